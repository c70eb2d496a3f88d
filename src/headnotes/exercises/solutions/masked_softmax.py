r"""# Solution: masked softmax with fully masked rows

This is a solution of the exercise [masked softmax with fully masked
rows](../../../exercises/06_masked_softmax.py), with the inputs that its check uses and
the mistakes that the check recognizes.

Source: [masked_softmax](../../mha.md#masked_softmax) of the reference implementation.
"""

import math

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, numbers


def masked_softmax(
    scores: Tensor,  # [q_len, k_len]
    mask: Tensor,  # [q_len, k_len]
) -> Tensor:
    r"""Softmax over the allowed keys; a fully masked row has weights of zero.

    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> masked_softmax(torch.zeros(2, 3), mask)
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    # A score of minus infinity has a weight of zero, as $e^{-\infty} = 0$.
    scores = scores.masked_fill(~mask, -math.inf)  # [q_len, k_len]

    # A row of minus infinity would give NaN. It is filled with zeros before the
    # softmax, so that no NaN arises in the backward pass either, and again after it.
    fully_masked = ~mask.any(dim=-1, keepdim=True)  # [q_len, 1]
    weights = scores.masked_fill(fully_masked, 0).softmax(dim=-1)  # [q_len, k_len]
    return weights.masked_fill(fully_masked, 0)  # [q_len, k_len]


def reference(scores: Tensor, mask: Tensor) -> Tensor:
    """The same, one row at a time, in float64."""
    rows = []
    for row, allowed in zip(scores.tolist(), mask.tolist(), strict=True):
        pairs = [*zip(row, allowed, strict=True)]
        largest = max((s for s, may in pairs if may), default=0.0)
        exponentials = [math.exp(s - largest) if may else 0.0 for s, may in pairs]
        rows.append([each / (sum(exponentials) or 1.0) for each in exponentials])
    return torch.tensor(rows)


# region Typical mistakes


def row_of_nan(scores: Tensor, mask: Tensor) -> Tensor:
    """A fully masked row is NaN: all its scores are minus infinity. Such a row must get
    weights of zero.
    """
    return scores.masked_fill(~mask, -math.inf).softmax(dim=-1)


def uniform_row(scores: Tensor, mask: Tensor) -> Tensor:
    """A fully masked row gets uniform weights: a softmax of equal scores, however
    small, is uniform. Such a row must get weights of zero.
    """
    return scores.masked_fill(~mask, -1e9).softmax(dim=-1)


def inverted(scores: Tensor, mask: Tensor) -> Tensor:
    """The mask is inverted: True means that the query may attend to the key. `~mask` is
    True where a score must be hidden.
    """
    return masked_softmax(scores, ~mask)


def after_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """The weights are masked after the softmax, so hidden scores still count in its
    denominator, and the rows do not sum to 1. Mask the scores before the softmax.
    """
    return scores.softmax(dim=-1) * mask


def gradient_of_nan(scores: Tensor, mask: Tensor) -> Tensor:
    """The weights are right, but their gradient is NaN: NaN that is replaced after the
    softmax still reaches the scores in the backward pass. Change the scores of a fully
    masked row before the softmax.
    """
    return (scores + mask.log()).softmax(dim=-1).nan_to_num()


# endregion

ROWS = torch.tensor([[True, False], [False, False]])

EXERCISE = Exercise(
    series="Write it",
    solution=masked_softmax,
    reference=reference,
    inputs=[
        (torch.tensor([[1.0, 0.0]]), torch.tensor([[True, True]])),
        (torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[True, True, False]])),
        (torch.tensor([[1.0, 0.0], [2.0, 1.0]]), ROWS),
        (numbers(5, 3), numbers(5, 3, seed=2) > 0),
    ],
    mistakes=[row_of_nan, uniform_row, inverted, after_softmax, gradient_of_nan],
)
