r"""# Solution: grouped-query attention

This is a solution of the exercise [grouped-query
attention](../../../exercises/15_grouped_query.py), with the inputs that its check uses
and the mistakes that the check recognizes.

Source: [GQA](https://arxiv.org/abs/2305.13245), Ainslie et al. 2023, section 2.2.
"""

import math

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, numbers
from headnotes.exercises.loops import attention


def grouped_query_attention(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, kv_heads, d_k]
    value: Tensor,  # [k_len, batch_size, kv_heads, d_k]
) -> Tensor:
    r"""The context `[q_len, batch_size, heads, d_k]`, with `kv_heads` key heads.

    Three heads per group, and values that are the number of their head:

    >>> query, key = torch.randn(4, 5, 6, 7), torch.randn(11, 5, 2, 7)
    >>> value = torch.arange(2.0).view(1, 1, 2, 1).expand(11, 5, 2, 7)
    >>> grouped_query_attention(query, key, value)[0, 0, :, 0].round()
    tensor([0., 0., 0., 1., 1., 1.])
    """
    # Query head `h` belongs to key head `h // group_size`: consecutive heads form a
    # group. So the dimension of heads is split with the key heads first. The einsum
    # broadcasts keys over the group `g`, without a copy of them for each query head.
    kv_heads, d_k = key.shape[2:]
    q = query / math.sqrt(d_k)  # [q_len, batch_size, heads, d_k]
    q = q.view(*q.shape[:2], kv_heads, -1, d_k)  # [q_len, batch_size, kv_heads, ...]
    scores = torch.einsum("ibhgd,jbhd->ijbhg", q, key)  # [q_len, k_len, ...]
    weights = scores.softmax(dim=1)  # [q_len, k_len, batch_size, kv_heads, ...]
    context = torch.einsum("ijbhg,jbhd->ibhgd", weights, value)  # [q_len, ..., d_k]
    return context.flatten(2, 3)  # [q_len, batch_size, heads, d_k]


def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same, one query and one key at a time."""
    return attention(query, key, value)


# region Typical mistakes


def repeated_as_blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The key heads are repeated in the order 0, 1, 0, 1, so that neighboring query
    heads belong to different groups. `repeat_interleave` gives 0, 0, 1, 1.
    """
    times = 1, 1, query.shape[2] // key.shape[2], 1
    return grouped_query_attention(query, key.repeat(times), value.repeat(times))


def values_as_blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The keys are grouped as they should be, but the values in another order: 0, 1, 0,
    1. Both need the same order: 0, 0, 1, 1.
    """
    times = query.shape[2] // key.shape[2]
    repeated = key.repeat_interleave(times, dim=2)
    return grouped_query_attention(query, repeated, value.repeat(1, 1, times, 1))


def first_head_only(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All query heads attend to the first key head, as if there were one only. This is
    multi-query attention; here each group has a key head of its own.
    """
    return grouped_query_attention(query, key[:, :, :1], value[:, :, :1])


def unscaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The scores are not scaled: divide them by the square root of `d_k`."""
    return grouped_query_attention(query * math.sqrt(query.shape[-1]), key, value)


def softmax_over_queries(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The softmax runs over the queries. Let it run over the keys, so that the weights
    of each query sum to 1.
    """
    times = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(times, dim=2) for x in (key, value))
    scores = torch.einsum("ibhd,jbhd->ijbh", query, key) / math.sqrt(query.shape[-1])
    return torch.einsum("ijbh,jbhd->ibhd", scores.softmax(dim=0), value)


# endregion


def inputs(
    q_len: int, k_len: int, batch_size: int, heads: int, kv_heads: int, d_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of these sizes."""
    key, value = (numbers(k_len, batch_size, kv_heads, d_k, seed=n) for n in (1, 2))
    return numbers(q_len, batch_size, heads, d_k), key, value


EXERCISE = Exercise(
    series="Make it modern",
    solution=grouped_query_attention,
    reference=reference,
    inputs=[
        inputs(1, 1, 1, 1, 1, 1),
        inputs(1, 2, 1, 1, 1, 2),
        inputs(1, 1, 1, 4, 2, 1),
        inputs(3, 5, 2, 6, 2, 7),
    ],
    mistakes=[
        repeated_as_blocks,
        values_as_blocks,
        first_head_only,
        unscaled,
        softmax_over_queries,
    ],
)
