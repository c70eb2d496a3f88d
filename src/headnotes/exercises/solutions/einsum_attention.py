r"""# Solution: scaled dot-product attention with einsum

This is a solution of the exercise [scaled dot-product attention with
einsum](../../../exercises/08_einsum_attention.py), with the inputs that its check uses
and the mistakes that the check recognizes.

Source: the two products of the [reference
implementation](../../mha.md#MultiHeadAttention.get_scores).
"""

import math

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, numbers


def einsum_attention(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_k]
) -> tuple[Tensor, Tensor]:
    r"""The attention weights, and the context vectors of all heads.

    >>> query, key = torch.randn(2, 3, 5, 7), torch.randn(11, 3, 5, 7)
    >>> weights, context = einsum_attention(query, key, key)
    >>> weights.shape, context.shape
    (torch.Size([2, 11, 3, 5]), torch.Size([2, 3, 5, 7]))
    """
    # `d` is missing in the result, so the products are summed over it. `b` and `h` are
    # in all three: each batch item and each head is computed by itself.
    scores = torch.einsum(
        "ibhd,jbhd->ijbh", query, key
    )  # [q_len, k_len, batch_size, heads]

    # The weights of one query sum to 1 over the keys, axis 1.
    scores = scores / math.sqrt(query.shape[-1])
    weights = scores.softmax(dim=1)  # [q_len, k_len, batch_size, heads]

    # Here `j` is summed over: a weighted sum of the values of all keys.
    context = torch.einsum("ijbh,jbhd->ibhd", weights, value)
    return weights, context


def reference(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The same with matrix products, batch items and heads in front."""
    q, k, v = (x.permute(1, 2, 0, 3).double() for x in (query, key, value))
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
    context = weights @ v
    return weights.permute(2, 3, 0, 1).float(), context.permute(2, 0, 1, 3).float()


# region Typical mistakes


def weighted(scores: Tensor, value: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The second half of a solution, with a softmax over any axis."""
    weights = scores.softmax(dim=dim)
    return weights, torch.einsum("ijbh,jbhd->ibhd", weights, value)


def scaled_scores(query: Tensor, key: Tensor) -> Tensor:
    """The first half of a solution."""
    scores = torch.einsum("ibhd,jbhd->ijbh", query, key)
    return scores / math.sqrt(query.shape[-1])


def over_queries(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax is over the queries, axis 0. The weights of one query sum to 1 over
    the keys: `dim=1`.
    """
    return weighted(scaled_scores(query, key), value, 0)


def over_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax is over the heads, the last axis. Here the keys are axis 1."""
    return weighted(scaled_scores(query, key), value, -1)


def not_scaled(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The scale is missing: divide the scores by the square root of `d_k`."""
    return weighted(torch.einsum("ibhd,jbhd->ijbh", query, key), value, 1)


def heads_summed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The scores are summed over all heads: `h` must stand on the right of the arrow,
    or its products are summed.
    """
    scores = torch.einsum("ibhd,jbhd->ijb", query, key)[..., None]
    scores = scores.expand(-1, -1, -1, query.shape[2])
    return weighted(scores / math.sqrt(query.shape[-1]), value, 1)


# endregion


def inputs(q_len: int, k_len: int, *sizes: int) -> tuple[Tensor, ...]:
    """The inputs of these sizes."""
    return (
        numbers(q_len, *sizes, seed=1),
        numbers(k_len, *sizes, seed=2),
        numbers(k_len, *sizes, seed=3),
    )


EXERCISE = Exercise(
    series="Write it",
    solution=einsum_attention,
    reference=reference,
    inputs=[inputs(1, 2, 1, 1, 2), inputs(2, 2, 1, 2, 2), inputs(3, 5, 2, 2, 7)],
    mistakes=[over_queries, over_heads, not_scaled, heads_summed],
)
