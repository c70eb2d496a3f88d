r"""# Caches that instances and calls share

A file may keep masks and tables of positions for all instances of a class and all calls
of a function: in a dict, or as results of a function with a cache. Stored for the
length only, a mask is then that of another window. Without what such caches hold, a
call has to give the same.

Source: the caches of public code, mostly `functools.lru_cache` and dicts of masks.
"""

import builtins
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attention_laws.structure import is_of_user


def clear_caches(attention: Any) -> bool:
    r"""Empty what its classes, and the files of these, keep for all instances.

    That are functions with a cache, and dicts that are empty or have tensors. Whether
    there are any. A function has the caches of its file.

    >>> clear_caches(nn.Linear(2, 3)), clear_caches(nn.functional.linear)
    (False, False)
    """
    caches = shared_caches(attention)
    for _owner, _name, each in caches:
        each.clear() if isinstance(each, dict) else each.cache_clear()
    return bool(caches)


def uncached(attention: Any) -> Callable[..., Any]:
    r"""The attention without what earlier calls have stored for all calls.

    Nor does it leave anything behind for others.

    >>> uncached(abs)(-2)
    2
    """

    @functools.wraps(attention)
    def call(*args: Any, **kwargs: Any) -> Any:
        with restored_caches(attention), ExitStack() as stack:
            for owner, name, each in shared_caches(attention):
                if isinstance(each, dict):
                    each.clear()
                else:
                    plain = mock.patch.object(owner, name, each.__wrapped__)
                    stack.enter_context(plain)
            return attention(*args, **kwargs)

    return call


def shared_caches(attention: Any) -> list[tuple[Any, str, Any]]:
    """Those dicts and functions, with the class or the file and the name of each.

    Never the builtins, where `_` may be a tensor: `torch.compile` has other names for
    them in a file, such as `__builtins_dict___0`.
    """
    if isinstance(attention, nn.Module):
        kinds = {base for part in attention.modules() for base in type(part).__mro__}
        owners: list[Any] = [kind for kind in kinds if is_of_user(kind)]
    else:
        owners = [attention] if inspect.isfunction(attention) else []
        owners = [each for each in owners if is_of_user(each)]
    owners += [sys.modules.get(each.__module__) for each in owners]
    found: dict[int, tuple[Any, str, Any]] = {}
    named = [(each, *pair) for each in owners if each for pair in vars(each).items()]
    for owner, name, value in named:
        if isinstance(value, dict) and value is not vars(builtins):
            leaves = tree_leaves([*value.values()])
            if not value or any(isinstance(leaf, Tensor) for leaf in leaves):
                found[id(value)] = owner, name, value
        elif hasattr(value, "cache_clear") and hasattr(value, "__wrapped__"):
            found[id(value)] = owner, name, value
    return [*found.values()]


@contextmanager
def restored_caches(attention: Any) -> Iterator[None]:
    """What these dicts hold is the same behind the block: it may be no cache."""
    dicts = [each for *_, each in shared_caches(attention) if isinstance(each, dict)]
    before = [dict(each) for each in dicts]
    try:
        yield
    finally:
        for each, content in zip(dicts, before, strict=True):
            each.clear()
            each.update(content)
