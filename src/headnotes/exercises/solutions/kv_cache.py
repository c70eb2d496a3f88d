r"""# Solution: KV cache

This is a solution of the exercise [KV cache](../../../exercises/11_kv_cache.py), with
the inputs that its check uses and the mistakes that the check recognizes.

Source: [Fast Transformer Decoding](https://arxiv.org/abs/1911.02150), Shazeer 2019,
section 2.4.
"""

import math
from typing import Any

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, numbers
from headnotes.exercises.loops import attention


class KVCache:
    r"""Keys and values of the positions so far, with room for `capacity`.

    >>> cache = KVCache(capacity=7, batch_size=2, heads=3, d_k=5)
    >>> x = torch.randn(2, 3, 5)
    >>> cache.append(x, x)
    >>> cache.attend(x).allclose(x)  # one position has all the weight
    True
    """

    def __init__(self, capacity: int, batch_size: int, heads: int, d_k: int) -> None:
        # Two buffers: `self.keys = self.values = torch.empty(...)` would make one.
        shape = capacity, batch_size, heads, d_k
        self.keys, self.values = torch.empty(shape), torch.empty(shape)
        self.length = 0

    def append(
        self,
        key: Tensor,  # [batch_size, heads, d_k]
        value: Tensor,  # [batch_size, heads, d_k]
    ) -> None:
        """Store the key and the value of the next position."""
        self.keys[self.length] = key
        self.values[self.length] = value
        self.length += 1

    def attend(self, query: Tensor) -> Tensor:
        """The context of the newest query, over all stored positions."""
        # The rest of the buffers is uninitialized. Of zeros, each would have a score of
        # 0, and so a weight of $e^0$.
        keys = self.keys[: self.length]  # [length, batch_size, heads, d_k]
        values = self.values[: self.length]  # [length, batch_size, heads, d_k]

        # The newest query may attend to all stored keys: no mask is needed.
        scores = torch.einsum("bhd,jbhd->jbh", query, keys)  # [length, ..., heads]
        weights = (scores / math.sqrt(query.shape[-1])).softmax(dim=0)  # [length, ...]
        return torch.einsum("jbh,jbhd->bhd", weights, values)  # [batch_size, ..., d_k]


@torch.no_grad()
def decode(cache_class: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Run a sequence through a cache, one position after the other."""
    cache = cache_class(len(query) + 1, *query.shape[1:])
    context = []
    for q, k, v in zip(query, key, value, strict=True):
        cache.append(k, v)
        context.append(cache.attend(q))
    return torch.stack(context)


class Reference:
    """The same with lists, and with attention in loops."""

    def __init__(self, *sizes: int) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store the key and the value of the next position."""
        self.keys.append(key)
        self.values.append(value)

    def attend(self, query: Tensor) -> Tensor:
        """The context of the newest query, over all stored positions."""
        keys, values = torch.stack(self.keys), torch.stack(self.values)
        return attention(query[None], keys, values)[0]


# region Typical mistakes


class WholeBuffer(KVCache):
    """The query attends to the whole buffer. Positions that are not written yet hold
    zeros, have scores of 0, and take weight from the others; use only those stored.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.keys, self.values = torch.zeros(2, *sizes)

    def attend(self, query: Tensor) -> Tensor:
        length, self.length = self.length, len(self.keys)
        context = super().attend(query)
        self.length = length
        return context


class SharedBuffer(KVCache):
    """Keys and values share one buffer, so that each value overwrites its key. Two
    names of one tensor are no copy: allocate a tensor for each.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.keys = self.values


class OnlyNewest(KVCache):
    """Each position overwrites the one before it. Count the stored positions, and write
    to the next index.
    """

    def append(self, key: Tensor, value: Tensor) -> None:
        self.length = 0
        super().append(key, value)


class Unscaled(KVCache):
    """The scores are not scaled: divide them by the square root of `d_k`."""

    def attend(self, query: Tensor) -> Tensor:
        return super().attend(query * math.sqrt(query.shape[-1]))


class WithoutItself(KVCache):
    """The newest position is left out, though a query attends to its own key as well.
    Only the first query, which has no other key, attends to itself here.
    """

    def attend(self, query: Tensor) -> Tensor:
        length, self.length = self.length, max(1, self.length - 1)
        context = super().attend(query)
        self.length = length
        return context


# endregion


def inputs(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value `[seq_len, batch_size, heads, d_k]`."""
    return numbers(*shape), numbers(*shape, seed=1), numbers(*shape, seed=2)


EXERCISE = Exercise(
    series="Make it fast, make it decode",
    solution=KVCache,
    reference=Reference,
    inputs=[inputs(1, 1, 1, 1), inputs(2, 1, 1, 2), inputs(5, 2, 3, 7)],
    mistakes=[WholeBuffer, SharedBuffer, OnlyNewest, Unscaled, WithoutItself],
    run=decode,
)
