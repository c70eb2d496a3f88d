r"""# Making a cache

A KV cache may be an object that a method or a class makes, of sizes that the names of
their arguments tell. A module may store one, with a flag or at a first position, and
have a method that removes it.

Source: the KV caches of public code, such as those of fairseq, Hugging Face's
transformers, torchtune and WeNet.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from torch import nn

from attention_laws import names
from attention_laws.source import source_of

# Arguments with which a module stores a cache of its own: flags, and first positions.
FLAG_PATTERN = re.compile(r"incremental|cache|decod|stream|generat|inference")
START_PATTERN = re.compile(
    r"(start|cache|input)_?pos|^(offset|pos|start|seen)$|past_len"
)
# Methods that remove what a module stores between calls.
RESET_PATTERN = re.compile(
    r"_?(reset|clear|flush|forget|release|free|evict)(_(?!param|weight|grad)\w+)?"
)
# What such a method takes, if it frees the place of one sequence.
SLOT_PATTERN = re.compile(
    r"(slot|row|item|seq|request|batch|user|session|beam)(s|_?(ids?|idx|index))?"
    r"|ind(ex|ices)|idx|i|b"
)
# Classes of caches, for an argument without an annotation.
CLASS_PATTERN = re.compile(r"(Cache|State|Memory|Store|Buffer)(V?\d)?$")
# The method of modules that have none of their own.
FORWARD = nn.Module.forward
# Methods that make a cache.
METHOD_PATTERN = re.compile(
    r"(?!get_extra_state)"  # of each module
    r"_?(init(ial(ize)?)?|new|make|create|empty|alloc\w*|get|build|start|prepare)_?"
    r"(\w+_)?(state|cache|past|memory|store)"
)


def empty_caches(
    target: Any, parameter: inspect.Parameter
) -> Iterator[tuple[str, dict[str, type]]]:
    """Source texts for a cache that a call modifies, and the class that each names."""
    yield "dict()", {}
    for name in filter(METHOD_PATTERN.fullmatch, dir(target)):
        method = getattr(target, name)
        if not callable(method):
            continue
        parameters = inspect.signature(method).parameters.values()
        arguments = sized_arguments([p for p in parameters if p.name != "self"])
        if arguments is not None:
            yield f"attention.{name}({arguments})", {}
    module = sys.modules.get(getattr(target, "__module__", ""))
    annotated = re.findall(r"\w+", str(parameter.annotation))
    if parameter.annotation in (parameter.empty, Any, "Any"):
        annotated = [*filter(CLASS_PATTERN.search, vars(module) if module else ())]
    for name in annotated:
        found = getattr(module, name, None)
        if is_class_of_caches(found, target):
            of_class = inspect.signature(found).parameters.values()
            arguments = sized_arguments(of_class, stored_arguments(target))
            if arguments is not None:
                yield f"{name}({arguments})", {name: found}


def is_class_of_caches(found: Any, target: Any) -> TypeGuard[type]:
    """Whether this is a class of the target's file, and no module that is called."""
    is_own = isinstance(found, type) and found.__module__ == target.__module__
    return is_own and getattr(found, "forward", FORWARD) is FORWARD


def new_caches(target: Any, parameter: inspect.Parameter) -> dict[str, dict[str, type]]:
    """The same for a cache that a call requires, of the dtype of the attention."""
    weight = "next(attention.parameters())"
    own = {
        "dtype={dtype}": f"dtype={weight}.dtype",
        "device={device}": f"device={weight}.device",
    }
    found = {}
    for text, classes in empty_caches(target, parameter):
        if text != "dict()":
            for given, value in own.items():
                text = text.replace(given, value)
            found[text] = classes
    return found


def stored_arguments(target: Any) -> dict[str, str]:
    r"""The arguments of a constructor that a module stores, such as its config.

    >>> class Attention:
    ...     def __init__(self, config, heads):
    ...         self.config = config
    >>> stored_arguments(Attention)
    {'config': 'attention.config'}
    """
    kind = target if isinstance(target, type) else type(target)
    source = source_of(kind.__init__)  # type: ignore[misc]
    arguments = inspect.signature(kind).parameters
    stored = re.findall(r"\bself\.(\w+) = (\w+)(?=\n|$|;)", source)
    return {n: f"attention.{field}" for field, n in stored if n in arguments}


def sized_arguments(
    parameters: Iterable[inspect.Parameter], stored: Mapping[str, str] | None = None
) -> str | None:
    r"""Arguments that make a cache, as source text; None if a required one is unknown.

    What the module has `stored` under the same name is known.

    >>> def init_state(rows, max_len, name="", dtype=None): ...
    >>> sized_arguments(inspect.signature(init_state).parameters.values())
    'rows={batch_size}, max_len=320, dtype={dtype}'
    """
    given = names.required_by_name(parameters)
    used = [n for n in given if given[n] or n in ("dtype", "device")]
    sizes = {n: cache_size(n) or (stored or {}).get(n, "") for n in used}
    if not all(sizes.values()):
        return None
    return ", ".join(f"{n}={value}" for n, value in sizes.items())


def reset_methods(target: Any) -> list[str]:
    r"""Methods without arguments that remove what a module stores between calls.

    >>> class Attention:
    ...     def reset_cache(self): ...
    ...     def reset_parameters(self): ...
    ...     def clear_rows(self, rows): ...
    >>> reset_methods(Attention)
    ['reset_cache']
    """
    kind = target if isinstance(target, type) else type(target)
    return [
        name
        for name in filter(RESET_PATTERN.fullmatch, dir(kind))
        if inspect.isfunction(method := getattr(kind, name, None))
        and "parameters" not in method.__code__.co_names  # which it initializes
        and not any(
            names.required_by_name(names.parameters_of_method(kind, name)).values()
        )
    ]


def freeing_methods(target: Any) -> list[str]:
    r"""Calls of the methods that free the slot of one sequence, which is number 1.

    >>> class Attention:
    ...     def free(self, slots): ...
    ...     def evict(self, slot: int): ...
    ...     def release(self, count): ...
    >>> freeing_methods(Attention)
    ['evict(1)', 'free(torch.tensor([1]))']
    """
    calls = []
    kind = target if isinstance(target, type) else type(target)
    for name in filter(RESET_PATTERN.fullmatch, dir(kind)):
        if not inspect.isfunction(getattr(kind, name)):
            continue  # as those of a dict are
        parameters = names.parameters_of_method(kind, name)
        if len(parameters) == 1 and SLOT_PATTERN.fullmatch(parameters[0].name):
            is_int = parameters[0].annotation in (int, "int")
            calls.append(f"{name}({'1' if is_int else 'torch.tensor([1])'})")
    return calls


def cache_size(name: str) -> str:
    r"""The value of an argument with which a cache is built; "" if it is unknown.

    >>> cache_size("max_batch_size"), cache_size("max_seq_len"), cache_size("store")
    ('{batch_size}', '320', '')
    """
    if name in ("dtype", "device"):
        return f"{{{name}}}"
    is_batch = re.fullmatch(r"(max_)?b(atch)?(_?si?ze?)?|(n_|num_)?(rows|slots)", name)
    if is_batch:
        return "{batch_size}"
    is_length = re.fullmatch(r"(max_)?(capacity|tokens|positions|room)", name)
    return "320" if is_length else names.value_of(name)


def cache_steps(
    parameters: Iterable[inspect.Parameter], position_args: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Arguments with which a module may store a cache; "{start}" is a position."""
    found = {}
    for each in parameters:
        if each.default is False and FLAG_PATTERN.search(each.name):
            found[each.name] = "True"
        is_none = each.default is None and "int" in str(each.annotation)
        is_number = type(each.default) is int or is_none
        if is_number and START_PATTERN.search(each.name):
            found[each.name] = "{start}"
    if found or "start_pos" in position_args:
        yield found
