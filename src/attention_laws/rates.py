r"""# Dropout probabilities

The laws set all dropout of a module to zero, or one to a half. Its probabilities are
those of layers, attributes whose names tell it, and fields of a config that each call
reads.

Source: `torch.nn.Dropout`, `torch.nn.MultiheadAttention`, which has an attribute only,
and Hugging Face's transformers, which read configs.
"""

import copy
import itertools
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import CodeType, SimpleNamespace
from typing import Any

from torch import nn

from attention_laws.names import KEEP_PATTERN, RATE_PATTERN
from attention_laws.structure import codes_of, is_of_user


def set_dropout(module: nn.Module, p: float, place: str | None = None) -> bool:
    r"""Set dropout probabilities in `module`; return whether any changed.

    That is each dropout layer, and each number between 0 and 1 in an attribute with
    "drop" in its name: `nn.MultiheadAttention`, for example, has no dropout layer and
    passes its attribute `dropout` to a function. So is `p` where `forward` is random.
    With `place`, only those at this one of its `dropout_places` are set.

    >>> mha = nn.MultiheadAttention(4, 2, dropout=0.1)
    >>> set_dropout(mha, 0.5), mha.dropout
    (True, 0.5)
    """
    changed = False
    for found, part, name in rates_of(module):
        if place in (None, found):
            value = 1 - p if is_kept(name) else p
            changed |= attrgetter(name)(part) != value
            set_rate(part, name, value)
    return changed


def set_rate(part: nn.Module, name: str, value: float) -> None:
    """Set a probability; a config, which other modules may share, is replaced."""
    attribute, _, field = name.rpartition(".")
    if attribute:
        config = copy.copy(getattr(part, attribute))
        object.__setattr__(config, field, value)  # it may be frozen
        setattr(part, attribute, config)
    else:
        setattr(part, name, value)


def dropout_places(module: nn.Module) -> list[str]:
    r"""The names of the submodules that have a dropout probability.

    Items of a list, such as one head each, have one name. Of several probabilities in
    one submodule, each has one.

    >>> dropout_places(nn.ModuleList([nn.Dropout(), nn.Dropout()]))
    ['*']
    >>> module = nn.Module()
    >>> module.attn_drop, module.out_drop = 0.1, 0.2
    >>> dropout_places(module)
    ['attn_drop', 'out_drop']
    """
    return list(dict.fromkeys(place for place, _, _ in rates_of(module)))


def active_dropout(module: nn.Module) -> list[str]:
    r"""The places whose dropout probability is above zero.

    >>> active_dropout(nn.ModuleDict({"a": nn.Dropout(0.0), "b": nn.Dropout(0.5)}))
    ['b']
    """
    found = [
        place
        for place, part, name in rates_of(module)
        if attrgetter(name)(part) != float(is_kept(name))
    ]
    return list(dict.fromkeys(found))


def dropout_names(module: nn.Module, place: str) -> list[str]:
    r"""The names of the layers, or else of the attributes, at a place.

    >>> dropout_names(nn.ModuleDict({"attn_drop": nn.Dropout()}), "attn_drop")
    ['attn_drop']
    """
    return [
        place.rpartition(".")[2]
        if isinstance(part, nn.modules.dropout._DropoutNd)
        else name.rpartition(".")[2]
        for found, part, name in rates_of(module)
        if found == place
    ]


def rates_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The dropout probabilities: the place, the submodule and the attribute of each.

    One that is the probability to keep may be derived from another one: they are then
    at one place. One that each call reads from a config is that of the config.
    """
    for path, part in module.named_modules():
        names = probabilities(part)
        are_apart = len(names) > 1 and not any(map(is_kept, names))
        for name in names:
            place = f"{path}.{name}".lstrip(".") if are_apart else path
            yield place_of(place), part, name
        for name in rates_in_configs(part):
            field = name.rpartition(".")[2]
            yield place_of(f"{path}.{field}".lstrip(".")), part, name


def rates_in_configs(part: nn.Module) -> list[str]:
    r"""The dropout probabilities in configs that code of a module reads in a call.

    >>> class Attention(nn.Module):
    ...     def forward(self, x): return dropout(x, self.config.attention_drop)
    >>> attention = Attention()
    >>> attention.config = SimpleNamespace(attention_drop=0.1, embedding_drop=0.2)
    >>> rates_in_configs(attention)
    ['config.attention_drop']
    """
    if not is_of_user(type(part)):
        return []
    found = [
        (attribute, name)
        for attribute, config in vars(part).items()
        for name, value in fields_of(config).items()
        if "drop" in name.lower() and type(value) in (int, float) and 0 <= value <= 1
    ]
    read = {n for code in codes_of_part(part) for n in code.co_names} if found else ()
    return [".".join(names) for names in found if {*names} <= {*read}]


def fields_of(config: Any) -> dict[str, Any]:
    """The fields of a namespace or of an instance of a dataclass; else none."""
    if is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in fields(config)}
    return vars(config) if isinstance(config, SimpleNamespace) else {}


def place_of(name: str) -> str:
    """The name of a submodule, with a star for each number in it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def probabilities(part: nn.Module) -> list[str]:
    """The names of the attributes of a module that are dropout probabilities.

    A number named `p`, `p_attn`, `rate` or `keep` is one in a dropout layer, and in
    code that is random.
    """
    return [
        name
        for name, value in vars(part).items()
        if type(value) in (int, float) and 0 <= value <= 1
        if "drop" in name.lower()
        or ((RATE_PATTERN.fullmatch(name) or is_kept(name)) and uses_random(part))
    ]


def is_kept(name: str) -> bool:
    r"""Whether an attribute is the probability to keep a number, not to drop it.

    >>> is_kept("keep_prob"), is_kept("keepdim")
    (True, False)
    """
    return KEEP_PATTERN.fullmatch(name) is not None


def uses_random(part: nn.Module) -> bool:
    """Whether it is a dropout layer, or code of its class draws random numbers.

    That is a method, or a function of its file that one calls.
    """
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return True
    return any(map(names_random, codes_of_part(part)))


def codes_of_part(part: nn.Module) -> Iterator[CodeType]:
    """The code of each method of a module, but for its constructors."""
    kinds = filter(is_of_user, type(part).__mro__)
    methods = [f for k in kinds for name, f in vars(k).items() if name != "__init__"]
    return (code for f in (part.forward, *methods) for code in codes_of(f))


@cache
def names_random(code: CodeType) -> bool:
    """Whether a function names one that draws random numbers, or its argument."""
    texts = [each if isinstance(each, tuple) else (each,) for each in code.co_consts]
    keywords = (each for each in itertools.chain(*texts) if isinstance(each, str))
    found = " ".join([*code.co_names, *filter(str.isidentifier, keywords)])
    return re.search(r"dropout|bernoulli|\brand", found) is not None
