r"""# Attention to a prepared memory

The decoder of a translation or speech model attends to the same encoder outputs at each
step, so many modules project them once, in a method that is called before `forward`.
Such a module is checked as attention of two inputs: `with_memory` makes a class whose
calls prepare the memory first.

Source: the memory is that of the decoder in [Attention Is All You
Need](https://arxiv.org/abs/1706.03762), section 3.2.3, whose keys and values do not
depend on the step.
"""

import inspect
import re
from typing import Any

from torch import nn

from attention_laws import names

# What the method is named, beside the memory that it takes first.
PREPARE_PATTERN = re.compile(
    r"(start|begin|bind|set|attach|load|prepare|pre_?compute|encode|project|cache|init|new"
    r"|register|remember|read|fill|open|store|use|build|compute|create|make)(_\w+)?"
    r"|(\w+_)?kv"
)
# What takes the memory, beside the names of contexts.
MEMORY_PATTERN = re.compile(
    r"memor(y|ies)|states?|frames|outputs?|annotations|keys|nodes"
)
# What takes that which the method returns, beside the names of caches.
TAKER_PATTERN = re.compile(r"(\w+_)?(kvs?|key_values?|keys_values|projected|prepared)")


def prepare_method(target: Any) -> str:
    r"""The method of a module class that prepares a memory for `forward`; "" if none.

    >>> class Attention(nn.Module):
    ...     def start(self, memory, lengths=None): ...
    ...     def forward(self, x): ...
    >>> prepare_method(Attention), prepare_method(nn.Linear)
    ('start', '')
    """
    if not (isinstance(target, type) and issubclass(target, nn.Module)):
        return ""
    called = names.required_by_name(names.parameters_of(target))
    if [*called.values()].count(True) not in (1, 2):
        return ""
    own = sorted({*dir(target)} - {*dir(nn.Module)})
    for name in filter(PREPARE_PATTERN.fullmatch, own):
        required = names.required_by_name(names.parameters_of_method(target, name))
        first, *others = [n for n, is_needed in required.items() if is_needed] or [""]
        is_memory = names.CONTEXT_PATTERN.search(first) or MEMORY_PATTERN.search(first)
        if first == next(iter(called)):
            continue  # of the first input of `forward`, whose memory is another
        if is_memory and all(map(names.MASK_PATTERN.search, others)):
            return name
    return ""


def takers_of_memory(target: Any, method: str) -> list[str]:
    r"""The optional arguments of `forward` that may take what `method` returns.

    >>> class Attention(nn.Module):
    ...     def project(self, memory, pad=None): ...
    ...     def forward(self, x, memory=None, pad=None, bias=None, kv=None): ...
    >>> takers_of_memory(Attention, "project")
    ['kv']
    """
    given = {p.name for p in names.parameters_of_method(target, method)}
    return [
        p.name
        for p in names.parameters_of(target)
        if p.default is None and p.name not in given
        if names.CACHE_PATTERN.match(p.name) or TAKER_PATTERN.fullmatch(p.name)
    ]


def is_prepared(target: Any) -> bool:
    """Whether it is a class of `with_memory`."""
    return isinstance(target, type) and "again" in vars(target)


def takes_memory_too(target: Any) -> bool:
    """Whether such a class takes the memory in its own `forward`, too."""
    return is_prepared(target) and hasattr(target, "unprepared")


def with_memory(
    attention: type[nn.Module], method: str, taker: str = ""
) -> type[nn.Module]:
    r"""The class, called with a memory that `method` prepares in each call.

    What it returns, if anything, is the second argument of `forward`, or an optional
    one, `taker`. The method `again` calls `forward` with the memory of the last call.

    >>> from torch import ones, zeros
    >>> class Attention(nn.Module):
    ...     def start(self, memory): self.mean = memory.mean()
    ...     def forward(self, x): return x + self.mean
    >>> attention = with_memory(Attention, "start")()
    >>> attention(zeros(2), ones(3)), attention.again(ones(1))
    (tensor([1., 1.]), tensor([2.]))
    """
    called = list(inspect.signature(attention.forward).parameters.values())
    given = names.parameters_of_method(attention, method)
    required = [p for p in called[2:] if p.default is p.empty]
    if is_optional := bool(taker):
        prepared = {taker, *(p.name for p in given)}
        required = [p for p in called[2:] if p.name in prepared]
    elif required:
        taker = required[0].name
    rest = [p for p in called[2:] if p not in required]
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    known = {p.name for p in called if p not in required}
    of_method = [p.replace(kind=positional) for p in given if p.name not in known]
    query, (memory, *others) = called[1], of_method
    if len(names.find_inputs({query.name: True, memory.name: True})) < 2:
        query, memory = query.replace(name="query"), memory.replace(name="memory")

    class Prepared(attention):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **options: Any) -> Any:
            bound = signature.bind(self, *args, **options).arguments
            settings = {p.name: bound[p.name] for p in others if p.name in bound}
            prepared = getattr(self, method)(bound[memory.name], **settings)
            self.prepared = {taker: prepared} if taker else {}
            options = {p.name: bound[p.name] for p in rest if p.name in bound}
            return self.again(bound[query.name], **options)

        def again(self, x: Any, **options: Any) -> Any:
            return super().forward(x, **self.prepared, **options)

    if is_optional and given[0].name in {p.name for p in required}:
        Prepared.unprepared = attention.forward
    signature = inspect.Signature([called[0], query, memory, *others, *rest])
    Prepared.forward.__signature__ = signature  # type: ignore[attr-defined]
    texts = (inspect.getdoc(getattr(attention, n)) for n in (method, "forward"))
    Prepared.forward.__doc__ = "\n\n".join(filter(None, texts))
    Prepared.__doc__ = inspect.getdoc(attention)
    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Prepared, name, getattr(attention, name))
    return Prepared
