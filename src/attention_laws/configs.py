r"""# Making a config

Many models take their sizes from one object. It is made from what the code reads of it:
as an instance of the class that the annotation names or that the file has, as a dict,
or as a namespace. The values are those that the [dictionary](names.md) has for the
names of its fields.

Source: the configs of public code, such as those of Hugging Face's transformers and of
nanoGPT.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from attention_laws.names import (
    CONFIG_PATTERN,
    CONTEXT_WIDTH_PATTERN,
    GUESSED_TYPES,
    WIDTH_PATTERN,
    guessed_value,
    value_of,
)
from attention_laws.source import source_of, source_with_bases

# What is made of sizes, as far as its opening parenthesis.
MADE_OF_SIZES = (
    r"\b(?:Linear|Embedding|Conv\dd|RMSNorm|LayerNorm|empty|zeros|ones|randn|range)\("
)
# Modules whose classes take fields of any name.
NAMESPACES = ("types", "argparse")


def config_source(
    target: Any, parameter: inspect.Parameter
) -> tuple[str, dict[str, Any]] | None:
    """Source text for a config object, and the class that it names.

    The class is that of the annotation, or one of the file whose fields the code reads.
    Without a class it is a namespace or a dict of the names that the source of the
    module reads. None where the argument is not a config.
    """
    config = find_config_class(target, parameter)
    is_config = CONFIG_PATTERN.search(short_name(target, parameter)) or (
        dataclasses.is_dataclass(config)
        and parameter.annotation in (config, config.__name__)
    )
    if not is_config:
        return None
    fields, keys, optional = names_in_config(target, parameter)
    is_dict = keys and parameter.annotation is parameter.empty
    read = dict.fromkeys(n for n in keys or fields if value_of(n) or n not in optional)
    if config is not None and not is_dict:
        sizes = config_sizes(config, [*read])
        text = ", ".join(f"{n}={value}" for n, value in sizes.items())
        return f"{config.__name__}({text})", {config.__name__: config}
    values = {
        n: value_of(n) or default_in_config(parameter, n) or guess_value(n, target)
        for n in read
    }
    if keys:
        text = ", ".join(f'"{n}": {value}' for n, value in values.items())
        return f"{{{{{text}}}}}", {}
    if not fields:
        return None
    text = ", ".join(f"{n}={value}" for n, value in values.items())
    return f"SimpleNamespace({text})", {"SimpleNamespace": SimpleNamespace}


def is_plain_config(value: Any) -> bool:
    r"""Whether a default is a dataclass that was built without arguments.

    >>> @dataclasses.dataclass
    ... class ModelArgs:
    ...     heads: int = 4
    >>> is_plain_config(ModelArgs()), is_plain_config(ModelArgs(heads=2))
    (True, False)
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    with suppress(TypeError):  # it requires arguments
        return bool(type(value)() == value)
    return False


def short_name(target: Any, parameter: inspect.Parameter) -> str:
    """The name of an argument within its class, where `__config` is private.

    Outside, that is `_Attention__config`.
    """
    return parameter.name.removeprefix(f"_{target.__name__.lstrip('_')}")


def names_in_config(
    target: Any, parameter: inspect.Parameter, outer: tuple[type, ...] = ()
) -> tuple[list[str], list[str], list[str]]:
    """The fields and keys that the code reads from a config, and those with a default.

    The config may be stored, have a shorter name in the function, or be passed on as
    the first argument of other classes of the file, but those that are `outer`.
    """
    source, short = source_with_bases(target), short_name(target, parameter)
    stored = rf"((?:self\.)?\w+)(?::[^=\n]+)? = {short}(?:;|$)"
    called = [short, *re.findall(stored, source, re.MULTILINE)]
    name = f"(?:{'|'.join(map(re.escape, called))})"
    fields = re.findall(rf"\b{name}\.(\w+)", source)
    fields += re.findall(rf"getattr\({name}, \"(\w+)\"", source)
    keys = re.findall(rf"\b{name}(?:\[|\.get\()[\"'](\w+)[\"']", source)
    has_default = rf"(?:{name}\.get\(|(?:get|has)attr\({name}, )[\"'](\w+)[\"'][,)]"
    found = fields, keys, re.findall(has_default, source)
    scope = vars(sys.modules.get(target.__module__, inspect))
    for called in dict.fromkeys(re.findall(rf"\b(\w+)\({name}[,)]", source)):
        part = scope.get(called)
        is_own = getattr(part, "__module__", "") == target.__module__
        if isinstance(part, type) and is_own and part not in (target, *outer):
            first = next(iter(inspect.signature(part).parameters.values()))
            inner = names_in_config(part, first, (target, *outer))
            for names, more in zip(found, inner, strict=True):
                names += more
    return found


def config_sizes(config: type, read: list[str]) -> dict[str, str]:
    r"""The sizes and other values with which a config of this class is built.

    `read` are the fields that the code of the attention reads.

    >>> def config(channels=32, num_heads=4, context_dim=24): ...
    >>> config_sizes(config, ["channels", "num_heads"])
    {'channels': '{d_model}', 'num_heads': '{heads}', 'context_dim': '{d_model}'}
    """
    accepted: Mapping[str, inspect.Parameter] = {}
    with suppress(ValueError):  # of a class that is no config, such as of tensors
        accepted = inspect.signature(config).parameters
    is_of_transformers = hasattr(config, "attribute_map")
    sizes = {
        n: value_of(n)
        for n in [*accepted, *read]
        if re.match("{(?!window)", value_of(n))
        and (n != "head_dim" or is_number(accepted.get(n)))
        and (n in accepted or is_of_transformers)
        and not is_sequence(accepted.get(n))
    }
    # Keys and values have widths of their own, too.
    contexts = filter(re.compile("context|ctx|enc|cross|source|src").search, accepted)
    for n in filter(CONTEXT_WIDTH_PATTERN.fullmatch, contexts):
        if n not in sizes and is_number(accepted[n]) and WIDTH_PATTERN.search(n):
            sizes[n] = "{d_model}"
    for n, field in accepted.items():
        is_one = field.kind not in (field.VAR_POSITIONAL, field.VAR_KEYWORD)
        if is_one and field.default is field.empty and n not in sizes:
            guess = GUESSED_TYPES.get(field.annotation, "None")
            sizes[n] = value_of(n) or guessed_value(n) or guess
    if is_of_transformers:
        sizes["attn_implementation"] = '"eager"'
    return sizes


def is_number(parameter: inspect.Parameter | None) -> bool:
    """Whether a parameter exists, and has a number as its default."""
    return parameter is not None and isinstance(parameter.default, int)


def is_sequence(parameter: inspect.Parameter | None) -> bool:
    """Whether a parameter has several numbers as its default, one for each stage."""
    return parameter is not None and isinstance(parameter.default, list | tuple)


def find_config_class(target: Any, parameter: inspect.Parameter) -> type | None:
    """The class of a config: the annotation, or the one that its file has for it.

    That is the only config class that the file defines, or an imported one whose name
    begins as that of the target, such as `T5Config` for `T5Attention`. A model of
    several parts has a config of configs, and one for each part: another class is
    chosen if it has more of the fields that the code reads.
    """
    # What was executed without an import is of no module.
    module = sys.modules.get(target.__module__)
    scope = vars(module) if module else {}
    annotation = parameter.annotation
    if isinstance(annotation, str):
        annotation = scope.get(annotation.split("|")[0].strip(" \"'"))
    configs = {
        match[1]: value
        for name, value in scope.items()
        if isinstance(value, type)
        and (match := re.match(r"(\w*?)_?(Config|Cfg|Args|Params)$", name))
    }
    own = [c for c in configs.values() if c.__module__ == target.__module__]
    stems = [stem for stem in configs if stem and target.__name__.startswith(stem)]
    annotated = [
        each
        for each in (annotation, *getattr(annotation, "__args__", ()))
        if isinstance(each, type)
        and each.__module__ not in ("builtins", "typing", "inspect", *NAMESPACES)
    ]
    likely = [*annotated[:1], *(own if len(own) == 1 else ())]
    likely += [configs[max(stems, key=len)]] if stems else []
    if not likely or not CONFIG_PATTERN.search(short_name(target, parameter)):
        return next(iter(likely), None)
    fields, _, optional = names_in_config(target, parameter)
    read = {n for n in fields if not n.startswith("_")} - {*optional}
    candidates: list[type] = [likely[0], *configs.values()]
    return min(candidates, key=lambda config: count_missing(config, read))


def count_missing(config: type, fields: Iterable[str]) -> int:
    """How many of these fields the objects of a class do not have."""
    known = {*dir(config), *getattr(config, "attribute_map", ())}
    known |= {*re.findall(r"self\.(\w+)", source_of(config))}
    with suppress(ValueError):
        known |= {*inspect.signature(config).parameters}
    return sum(name not in known for name in fields)


def default_in_config(parameter: inspect.Parameter, name: str) -> str:
    """The value of a field in the config that is an argument's default; "" if none."""
    default = parameter.default
    values = default if isinstance(default, dict) else getattr(default, "__dict__", {})
    value = values.get(name)
    return repr(value) if isinstance(value, bool | int | float | str) else ""


def guess_value(name: str, target: Any) -> str:
    r"""A value for a field of a config whose name is unknown.

    It is a width if the code makes a layer or a tensor of it, and a number if it
    calculates with it, which None would refuse.

    >>> def build(config):
    ...     layer = torch.nn.Linear(config.rank, 3, bias=config.centered)
    ...     return config.scalar**-0.5, 1 / config.factor, config.cap or 2
    >>> [guess_value(name, build) for name in ("rank", "scalar", "factor", "cap")]
    ['8', '1', '1', 'None']
    >>> [guess_value(n, build) for n in ("centered", "num_buckets", "max_distance")]
    ['None', '32', '128']
    """
    if "drop" in name or "prob" in name:
        return "0.1"
    # Of the config, not of the module, which may have a field that is left out.
    field = rf"\b\w+(?<!\bself)[.\[\"']+{name}\b[\"'\]]*"
    calculation = rf"{field} *[-+*/%<>]|[\w)\]] *[-+*/%<>]+ *(self\.)?{field}"
    source = source_with_bases(target)
    stored = re.findall(rf"([\w.]+)(?:: int)? = {field}", source)
    of_size = "|".join([field, *(rf"{re.escape(each)}\b" for each in stored)])
    # Those of T5, whose buckets are wide enough for the largest distance.
    if counted := re.search(r"(^|_)(num|max)_\w*?(buckets|distance)?$", name):
        return {"buckets": "32", "distance": "128"}.get(counted[3], "8")
    if re.search(rf"{MADE_OF_SIZES}(?:[^()]*[ (*])?(?:{of_size})", source):
        return "8"
    if re.search(calculation, source) and not re.search(f"{field} is ", source):
        return "1"
    return "False" if re.search(r"bias|^use|^is_|norm|flash", name) else "None"
