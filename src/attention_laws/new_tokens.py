r"""# Attention of new tokens

A server may keep keys and values itself: one call takes the new token of each sequence,
the tensors in which those of the tokens before are stored, and how many there are. It
is checked as attention to sequences, whose tokens `over_caches` gives it one by one.

Source: the decoding kernels and static caches of public code, such as gpt-fast.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attention_laws import documented
from attention_laws.names import parameters_by_name, with_options
from attention_laws.one_query import make_cache, named_as, new_caches

# Arguments that store keys and values, and the number of those that are stored.
STORE_PATTERN = re.compile(
    r"(k|v|keys?|values?)_?caches?|caches?_?(k|v|keys?|values?)|past_(k|v|keys?|values?)"
)
COUNT_PATTERN = re.compile(
    r"((cache|past|seq|context|kv|cur(rent)?)_?)?len(gth)?s?|pos(itions?)?|offsets?"
    r"|(start|cache|input)_pos(itions?)?"
)


class Parts(NamedTuple):
    """The names of the required arguments: tokens, stores, and how many they have.

    Their `shapes` are those that are documented.
    """

    tokens: tuple[str, ...]
    stores: tuple[str, ...]
    number: inspect.Parameter
    shapes: dict[str, tuple[str, ...]]

    @property
    def axes(self) -> tuple[str, ...]:
        """The documented axes of the tokens of a call."""
        return self.shapes.get(self.tokens[0], ())

    @property
    def axis(self) -> int:
        """The axis of positions, of which a call takes one."""
        return self.axes.index("1") if "1" in self.axes else 1


def parts_of_call(attention: Any) -> Parts | None:
    r"""What a class of modules, or a function of q, k and v, requires; None if else.

    >>> def attend(q, k_new, v_new, k_cache, v_cache, lengths, scale=None): ...
    >>> parts_of_call(attend).stores, parts_of_call(lambda q, k, v: None)
    (('k_cache', 'v_cache'), None)
    """
    is_class = isinstance(attention, type) and issubclass(attention, nn.Module)
    if not (is_class or inspect.isfunction(attention)):
        return None
    known = parameters_by_name(attention)
    required = [name for name, p in known.items() if p.default is p.empty]
    first = 1 if is_class else 3
    tokens, stores, rest = required[:first], required[first:-1], required[-1:]
    are_stores = bool(stores) and all(map(STORE_PATTERN.fullmatch, stores))
    if not (are_stores and all(map(COUNT_PATTERN.fullmatch, rest))):
        return None
    shapes = documented.all_shapes(attention)
    return Parts(tuple(tokens), tuple(stores), known[rest[0]], shapes)


def takes_caches(attention: Any) -> bool:
    r"""Whether a call takes new tokens, and tensors that store keys and values.

    The documentation has the shapes of both, or a method makes the latter.

    >>> def attend(q, k, v, k_cache, v_cache, lengths):
    ...     "q, k, v: (B, H, 1, D); k_cache, v_cache: (B, H, N, D)"
    >>> takes_caches(attend), takes_caches(nn.Linear)
    (True, False)
    """
    parts = parts_of_call(attention)
    if parts is None:
        return False
    axes, is_class = parts.axes, isinstance(attention, type)
    is_one = len(axes) == (2 if is_class else 3) or "1" in axes
    is_made = is_class and bool(new_caches(attention, parts.stores[0]))
    return is_one and (is_made or {*parts.stores} <= {*parts.shapes})


def over_caches(attention: Any) -> Any:
    r"""The class or function, called with sequences, whose tokens it takes one by one.

    As on a server, the sequences of a batch begin one after the other, and so have
    different numbers of stored tokens; one that has not begun, or that has ended, gets
    its first or its last token again. A module also returns what it stores, which the
    next call takes.

    >>> def sums(q, k, v, k_cache, v_cache, lengths):
    ...     "q, k, v: (B, H, D); k_cache, v_cache: (B, N, H, D)"
    ...     v_cache[torch.arange(len(v)), lengths] = v
    ...     seen = torch.arange(v_cache.shape[1]) <= lengths[:, None]
    ...     return (v_cache * seen[..., None, None]).sum(1)
    >>> x = torch.ones(2, 3, 5, 7)
    >>> over_caches(sums)(x, x, x)[:, :, 0, 0]
    tensor([[1., 2., 3.],
            [1., 2., 3.]])
    """
    parts = parts_of_call(attention)
    assert parts is not None
    if isinstance(attention, type):
        return steps_of_module(attention, parts)

    def attend(*inputs: Tensor, **options: Any) -> Tensor:
        given = signature.bind(*inputs, **options).arguments
        tokens = [given.pop(name) for name in parts.tokens]
        stored = empty_stores(attention, parts, tokens[0])
        return steps(parts, attention, tokens, stored, given)[0]

    known = parameters_by_name(attention)
    signature = with_options(attention, [known[name] for name in parts.tokens])
    attend.__signature__ = signature  # type: ignore[attr-defined]
    return attend


def steps_of_module(attention: type[nn.Module], parts: Parts) -> type[nn.Module]:
    """The class, whose `forward` takes sequences, and what was stored."""
    made_by = new_caches(attention, parts.stores[0])

    class Steps(attention):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **options: Any) -> Any:
            given = signature.bind(self, *args, **options).arguments
            tokens, stored = given[parts.tokens[0]], given.get("cache")
            if stored is None and made_by:
                made = make_cache(self, made_by, len(tokens))
                stored = *(made if isinstance(made, tuple) else (made,)), 0
            elif stored is None:
                stored = empty_stores(self, parts, tokens)
            left = {n: x for n, x in given.items() if n not in own}
            return steps(parts, super().forward, [tokens], stored, left)

    itself, *_ = inspect.signature(attention.forward).parameters.values()
    first = parameters_by_name(attention)[parts.tokens[0]]
    cache = first.replace(name="cache", default=None, annotation=tuple[Any, ...] | None)
    own = {each.name for each in (itself, first, cache)}
    signature = with_options(attention, [itself, first, cache])
    return named_as(attention, Steps, signature)


def empty_stores(attention: Any, parts: Parts, tokens: Tensor) -> tuple[Any, ...]:
    """Tensors of the documented shapes, with as many tokens as there are, and a 0.

    An axis is as long as that of the same name of the tokens, or as the attribute of
    this name. What they hold at first is no key, and must not count.
    """
    axes = [name for name in parts.axes if name != "1"]
    sizes = [size for n, size in enumerate(tokens.shape) if n != parts.axis]
    known, length = dict(zip(axes, sizes, strict=True)), tokens.shape[parts.axis]
    one = torch.ones_like(tokens.flatten()[:1])  # one for each example under `vmap`
    shapes = (
        [known.get(n, getattr(attention, n, length)) for n in parts.shapes[store]]
        for store in parts.stores
    )
    return *(one.expand(shape).clone() for shape in shapes), 0


def steps(
    parts: Parts,
    call: Callable[..., Any],
    tokens: list[Tensor],
    stored: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[Tensor, tuple[Any, ...]]:
    """The outputs for all tokens, and what is stored of them, with its length."""
    axis, is_narrow = parts.axis, "1" in parts.axes
    is_int = parts.number.annotation in (int, "int")
    *stores, start = stored
    batch_size, length = len(tokens[0]), tokens[0].shape[axis]
    item = torch.arange(batch_size, device=tokens[0].device)  # [batch_size]
    delays = item * (not is_int)  # [batch_size]
    outputs = []
    for step in range(length + int(delays.max())):
        place = (step - delays).clamp(0, length - 1)  # [batch_size]
        new = [x.movedim(axis, 1)[item, place] for x in tokens]
        new = [x.unsqueeze(axis) for x in new] if is_narrow else new
        stores = [each.clone() for each in stores]  # for the gradients of each step
        count = start + (step if is_int else place)
        result = call(*new, *stores, count, **options)
        output, *later = result if isinstance(result, tuple) else (result,)
        stores = later[: len(stores)] if len(later) >= len(stores) else stores
        outputs.append(output.squeeze(axis) if is_narrow else output)
    every = torch.stack(outputs, 1)
    places = torch.arange(length, device=item.device) + delays[:, None]
    y = every[item[:, None], places].movedim(1, axis)
    return y, (*stores, start + length)
