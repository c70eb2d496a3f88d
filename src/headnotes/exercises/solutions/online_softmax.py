r"""# Solution: online softmax

This is a solution of the exercise [online
softmax](../../../exercises/13_online_softmax.py), with the inputs that its check uses
and the mistakes that the check recognizes.

Source: [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867),
Milakov and Gimelshein 2018, algorithm 3;
[FlashAttention-2](https://arxiv.org/abs/2307.08691), Dao 2023, section 3.1, which
divides by the sum at the end.
"""

import math
from typing import Any

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, numbers

State = tuple[Tensor, Tensor, Tensor]


def add_block(
    largest: Tensor,  # [q_len]
    total: Tensor,  # [q_len]
    context: Tensor,  # [q_len, d_v]
    scores: Tensor,  # [q_len, block_len]
    value: Tensor,  # [block_len, d_v]
) -> State:
    r"""The largest score, the sum of exponentials and the weighted sum, after a block.

    >>> state = torch.full((3,), -torch.inf), torch.zeros(3), torch.zeros(3, 7)
    >>> scores, value = torch.randn(3, 5), torch.randn(5, 7)
    >>> state = add_block(*state, scores[:, :2], value[:2])
    >>> largest, total, context = add_block(*state, scores[:, 2:], value[2:])
    >>> expected = scores.softmax(dim=-1) @ value
    >>> (context / total[:, None]).allclose(expected, atol=1e-6)
    True
    """
    new_largest = torch.maximum(largest, scores.amax(dim=-1))  # [q_len]

    # While a row is fully masked, its largest score is minus infinity, and the
    # differences below would be NaN. With 0 in its place, they are minus infinity.
    shift = new_largest.masked_fill(new_largest == -math.inf, 0)  # [q_len]

    # One factor rescales all terms so far to the new maximum. It is at most 1.
    rescale = (largest - shift).exp()  # [q_len]
    weights = (scores - shift[:, None]).exp()  # [q_len, block_len]
    total = total * rescale + weights.sum(dim=-1)  # [q_len]
    context = context * rescale[:, None] + weights @ value  # [q_len, d_v]
    return new_largest, total, context


@torch.no_grad()
def all_blocks(step: Any, scores: Tensor, value: Tensor, block_len: int) -> Any:
    """Call `step` for each block of `scores`."""
    q_len, d_v = len(scores), value.shape[-1]
    state = (
        torch.full((q_len,), -torch.inf),
        torch.zeros(q_len),
        torch.zeros(q_len, d_v),
    )
    blocks = torch.split(scores, block_len, dim=1), torch.split(value, block_len)
    for block in zip(*blocks, strict=True):
        state = step(*state, *block)
    return state


def reference(
    largest: Tensor, total: Tensor, context: Tensor, scores: Tensor, value: Tensor
) -> State:
    """The same, one query at a time, with sums over Python's numbers."""
    rows = []
    for m, old, sums, row in zip(
        *(x.tolist() for x in (largest, total, context, scores)), strict=True
    ):
        new = max(m, *row)
        powers = [math.exp(s - new) if s > -math.inf else 0.0 for s in row]
        factor = math.exp(m - new) if m > -math.inf else 0.0
        columns = zip(sums, value.T.tolist(), strict=True)
        weighted = [
            factor * c + sum(p * v for p, v in zip(powers, column, strict=True))
            for c, column in columns
        ]
        rows.append((new, factor * old + sum(powers), weighted))
    new_largest, new_total, new_context = map(torch.tensor, zip(*rows, strict=True))
    return new_largest, new_total, new_context


# region Typical mistakes


def nan_in_masked_rows(
    largest: Tensor, total: Tensor, context: Tensor, scores: Tensor, value: Tensor
) -> State:
    """As long as all scores of a row are masked, its largest score is minus infinity,
    and minus infinity minus minus infinity is NaN. Subtract 0 in these rows.
    """
    new_largest = torch.maximum(largest, scores.amax(dim=-1))
    rescale = (largest - new_largest).exp()
    weights = (scores - new_largest[:, None]).exp()
    total = total * rescale + weights.sum(dim=-1)
    return new_largest, total, context * rescale[:, None] + weights @ value


def total_not_rescaled(
    largest: Tensor, total: Tensor, context: Tensor, scores: Tensor, value: Tensor
) -> State:
    """The total is not rescaled to the new maximum. Multiply it by the same factor as
    the context.
    """
    new, _, new_context = add_block(largest, total, context, scores, value)
    _, block_total, _ = add_block(new, torch.zeros_like(total), context, scores, value)
    return new, total + block_total, new_context


def context_not_rescaled(
    largest: Tensor, total: Tensor, context: Tensor, scores: Tensor, value: Tensor
) -> State:
    """The context is not rescaled to the new maximum. Multiply it by the same factor as
    the total.
    """
    new, new_total, _ = add_block(largest, total, context, scores, value)
    _, _, added = add_block(new, total, torch.zeros_like(context), scores, value)
    return new, new_total, context + added


def not_rescaled(
    largest: Tensor, total: Tensor, context: Tensor, scores: Tensor, value: Tensor
) -> State:
    r"""Neither total nor context is rescaled when the maximum grows. Multiply both by
    $e^{m_\text{old} - m_\text{new}}$ before the block is added.
    """
    new, _, new_context = context_not_rescaled(largest, total, context, scores, value)
    _, new_total, _ = total_not_rescaled(largest, total, context, scores, value)
    return new, new_total, new_context


def maximum_of_block(
    largest: Tensor, total: Tensor, context: Tensor, scores: Tensor, value: Tensor
) -> State:
    """The maximum of the block replaces the one so far, even if it is smaller. Keep the
    larger one; otherwise the factor that rescales the sums may overflow.
    """
    new = scores.amax(dim=-1)
    shift = new.masked_fill(new == -math.inf, 0)
    rescale = (largest - shift).exp()
    weights = (scores - shift[:, None]).exp()
    total = total * rescale + weights.sum(dim=-1)
    return new, total, context * rescale[:, None] + weights @ value


def nothing_subtracted(
    largest: Tensor, total: Tensor, context: Tensor, scores: Tensor, value: Tensor
) -> State:
    r"""The maximum is not subtracted, so that large scores overflow: add
    $e^{s_j - m}$, not $e^{s_j}$.
    """
    new = torch.maximum(largest, scores.amax(dim=-1))
    weights = scores.exp()
    return new, total + weights.sum(dim=-1), context + weights @ value


# endregion


def inputs(
    q_len: int, k_len: int, d_v: int, block_len: int, factor: float = 1
) -> tuple[Tensor, Tensor, int]:
    """Scores with a causal mask, their values, and the length of a block."""
    past = torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)
    scores = (factor * numbers(q_len, k_len)).masked_fill(~past, -math.inf)
    return scores, numbers(k_len, d_v, seed=1), block_len


# In the last but one, a row is fully masked in its first block.
MASKED_FIRST = torch.tensor([[-math.inf, -math.inf, 0.5], [0.25, -math.inf, 1.0]])

EXERCISE = Exercise(
    series="Make it fast, make it decode",
    solution=add_block,
    reference=reference,
    inputs=[
        inputs(1, 1, 1, 1),
        inputs(1, 3, 1, 1),
        inputs(2, 5, 3, 2),
        (MASKED_FIRST, numbers(3, 1, seed=1), 1),
        inputs(3, 11, 7, 5, factor=100),
    ],
    mistakes=[
        nan_in_masked_rows,
        total_not_rescaled,
        context_not_rescaled,
        not_rescaled,
        maximum_of_block,
        nothing_subtracted,
    ],
    run=all_blocks,
)
