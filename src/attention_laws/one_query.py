r"""# Attention of one query

A server decodes one token of each sequence at a time, and the function that does so
takes queries without an axis for their positions. It is checked as attention to the
same keys and values from several queries: `over_queries` gives it each of them as a
sequence of its own. A module that also takes a cache is given the tokens of a sequence
one by one, by `over_steps`.

Source: Flash-Decoding ([Dao et al., 2023](https://pytorch.org/blog/flash-decoding/)),
whose keys are split among blocks because there is one query only.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from attention_laws import caches, documented
from attention_laws.names import (
    CACHE_PATTERN,
    LENGTHS_PATTERN,
    MASK_PATTERN,
    parameters_by_name,
    parameters_of,
)

# The first arguments: of `query` are documented three axes, of the others four.
QUERY, KEY, VALUE = range(3)


def takes_one_query(function: Any) -> bool:
    r"""Whether a function is documented to take queries without an axis of positions.

    >>> def attend(q, k, v): "q: (B, H, D); k, v: (B, S, H, D)"
    >>> def attend_all(q, k, v): "q: (B, T, H, D); k, v: (B, S, H, D)"
    >>> takes_one_query(attend), takes_one_query(attend_all)
    (True, False)
    """
    if not inspect.isfunction(function):
        return False
    axes = axes_of_inputs(function)
    return [len(each) for each in axes] == [3, 4, 4] and axes[QUERY][0] == axes[KEY][0]


def axes_of_inputs(function: Any) -> list[tuple[str, ...]]:
    """The documented axes of the first three arguments."""
    shapes = documented.all_shapes(function)
    return [shapes.get(name, ()) for name in [*parameters_by_name(function)][:3]]


def takes_steps(attention: Any) -> bool:
    r"""Whether a module takes the newest token of each sequence, and a cache.

    >>> class Attention(nn.Module):
    ...     def new_cache(self, batch_size): ...
    ...     def forward(self, x, cache): "x: (B, D)"
    >>> takes_steps(Attention), takes_steps(nn.Linear)
    (True, False)
    """
    if not (isinstance(attention, type) and issubclass(attention, nn.Module)):
        return False
    required = [p for p in parameters_of(attention) if p.default is p.empty]
    return (
        len(required) == 2
        and CACHE_PATTERN.match(required[1].name) is not None
        and len(documented.all_shapes(attention).get(required[0].name, ())) == 2
        and bool(new_caches(attention, required[1].name))
    )


def new_caches(attention: type[nn.Module], name: str) -> dict[str, dict[str, type]]:
    """Source texts for the cache of an argument, and the classes that each names."""
    return caches.new_caches(attention, parameters_by_name(attention)[name])


def make_cache(
    module: nn.Module, made_by: dict[str, dict[str, type]], batch_size: int
) -> Any:
    """The first cache that the methods of a module, or classes, make."""
    text, classes = next(iter(made_by.items()))
    return eval(text.format(batch_size=batch_size), {"attention": module, **classes})


def named_as(
    attention: type[nn.Module], steps: type[nn.Module], signature: inspect.Signature
) -> type[nn.Module]:
    """A subclass, shown as its class is, whose `forward` has this signature."""
    steps.forward.__signature__ = signature  # type: ignore[attr-defined]
    steps.__doc__ = attention.__doc__
    for name in ("__name__", "__qualname__", "__module__"):
        setattr(steps, name, getattr(attention, name))
    return steps


def over_steps(attention: type[nn.Module]) -> type[nn.Module]:
    r"""The class, called with sequences, whose tokens it takes one by one.

    Without a cache, the first that its methods make is taken. What a step returns
    beside its output is the cache of the next.

    >>> class Sum(nn.Module):
    ...     def init_state(self, batch_size): return [0.0]
    ...     def forward(self, x, state):
    ...         "x: (B, D)"
    ...         return x + state[0], [x + state[0]]
    >>> sums, _state = over_steps(Sum)()(torch.ones(2, 3, 5))
    >>> sums[0, :, 0]
    tensor([1., 2., 3.])
    """
    first, second, *others = parameters_of(attention)
    made_by = new_caches(attention, second.name)

    class Steps(attention):  # type: ignore[misc, valid-type]
        def forward(
            self,
            x: Tensor,  # [batch_size, length, d_model]
            *args: Any,
            **options: Any,
        ) -> Any:
            given = signature.bind(self, x, *args, **options).arguments
            cache = given.get(second.name)
            options = {p.name: given[p.name] for p in others if p.name in given}
            if cache is None:
                cache = make_cache(self, made_by, len(x))
            outputs = []  # each [batch_size, d_model]
            for token in x.unbind(1):
                result = super().forward(token, cache, **options)
                output, *state = result if isinstance(result, tuple) else (result,)
                cache = state[0] if state else cache
                outputs.append(output)
            y = torch.stack(outputs, 1)  # [batch_size, length, d_model]
            return (y, cache) if state else y

    itself, *_ = inspect.signature(attention.forward).parameters.values()
    cached = second.replace(default=None)
    signature = inspect.Signature([itself, first, cached, *others])
    return named_as(attention, Steps, signature)


def over_queries(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    r"""Attention of one query for each sequence, as one of several queries.

    Each query is an item of a larger batch, with its own copy of keys, values, and of
    what else each sequence has: masks, lengths, and what is documented to be so.

    >>> def first_token(q, k, v): "q: (B, H, D); k, v: (B, S, H, D)"; return v[:, 0]
    >>> query, key = Tensor(2, 7, 3, 11).zero_(), Tensor(2, 19, 3, 11).normal_()
    >>> output = over_queries(first_token)(query, key, key)
    >>> output.equal(key[:, :1].expand_as(query))
    True
    """
    axes, shapes = axes_of_inputs(attention), documented.all_shapes(attention)
    heads_first = documented.place_of_heads(axes[KEY][1:]) == "hld"
    of_sequences = {
        name
        for n, name in enumerate(parameters_by_name(attention))
        if n in (KEY, VALUE)
        or shapes.get(name, ())[:1] == axes[QUERY][:1]
        or MASK_PATTERN.search(name)
        or LENGTHS_PATTERN.search(name)
    }

    def in_order(x: Tensor) -> Tensor:
        """Heads and positions change places, if heads come first."""
        return x.transpose(1, 2) if heads_first else x

    @wraps(attention)
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        given = inspect.signature(attention).bind(*args, **kwargs).arguments
        name, *_ = given
        query = in_order(given[name])  # [batch_size, q_len, heads, d_k]
        q_len = query.shape[1]
        given = {
            each: value.repeat_interleave(q_len, dim=0)
            if each in of_sequences and isinstance(value, Tensor)
            else value
            for each, value in given.items()
        }
        given |= {name: query.flatten(0, 1)}
        found = attention(**given)  # [batch_size * q_len, heads, d_k]
        output = found.reshape(*query.shape[:3], -1)  # [batch_size, q_len, heads, d_k]
        return in_order(output)

    return attend
