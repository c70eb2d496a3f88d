r"""# Solution: numerically stable softmax

This is a solution of the exercise [numerically stable
softmax](../../../exercises/02_stable_softmax.py), with the inputs that its check uses
and the mistakes that the check recognizes.

Source: [Deep Learning](https://www.deeplearningbook.org/contents/numerical.html),
Goodfellow, Bengio and Courville 2016, section 4.1.
"""

import math

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, numbers


def stable_softmax(
    scores: Tensor,  # [q_len, k_len]
) -> Tensor:
    r"""Softmax over the last axis, without overflow.

    >>> stable_softmax(torch.tensor([[1000.0, 1000.0, 0.0], [0.0, -1000.0, 0.0]]))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.5000, 0.0000, 0.5000]])
    """
    # $e^{100}$ is too large for float32. To subtract the same number from all scores of
    # a row does not change their softmax, since it divides numerator and denominator
    # by the same factor. With the maximum, the largest exponential is $e^0 = 1$.
    largest = scores.max(dim=-1, keepdim=True).values  # [q_len, 1]
    exponentials = (scores - largest).exp()  # [q_len, k_len]
    return exponentials / exponentials.sum(dim=-1, keepdim=True)  # [q_len, k_len]


def reference(scores: Tensor) -> Tensor:
    """The same, one row at a time, in float64."""
    rows = []
    for row in scores.tolist():
        exponentials = [math.exp(score - max(row)) for score in row]
        rows.append([each / sum(exponentials) for each in exponentials])
    return torch.tensor(rows)


# region Typical mistakes


def overflowing(scores: Tensor) -> Tensor:
    """Large scores overflow: the exponential is infinite, and infinity divided by
    infinity is NaN. Subtract the maximum of each row first.
    """
    return scores.exp() / scores.exp().sum(dim=-1, keepdim=True)


def one_maximum(scores: Tensor) -> Tensor:
    """One maximum is subtracted from all rows. In a row with much smaller scores, all
    exponentials are then zero, and 0 / 0 is NaN. Take the maximum of each row, with
    `dim=-1, keepdim=True`.
    """
    exponentials = (scores - scores.max()).exp()
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def over_queries(scores: Tensor) -> Tensor:
    """The softmax is over the first axis. The weights of a query are a row: its sum
    must be 1, so the softmax is over the last axis.
    """
    return scores.softmax(dim=0)


def over_all(scores: Tensor) -> Tensor:
    """The sum is over all rows. Each row has a sum: use `dim=-1, keepdim=True`."""
    return scores.flatten().softmax(dim=0).view_as(scores)


def not_normalized(scores: Tensor) -> Tensor:
    """The exponentials are not divided by their sum."""
    return (scores - scores.max(dim=-1, keepdim=True).values).exp()


# endregion

EXERCISE = Exercise(
    series="Write it",
    solution=stable_softmax,
    reference=reference,
    inputs=[
        (torch.tensor([[0.0, 1.0]]),),
        (torch.tensor([[0.0, 1.0], [1.0, 3.0]]),),
        (numbers(3, 5),),
        (torch.tensor([[1000.0, 999.0]]),),
        (torch.tensor([[1.0, 0.0], [-1000.0, -1001.0]]),),
    ],
    mistakes=[overflowing, one_maximum, over_queries, over_all, not_normalized],
)
