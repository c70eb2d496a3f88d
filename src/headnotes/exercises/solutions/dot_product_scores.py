r"""# Solution: dot-product scores

This is a solution of the exercise [dot-product
scores](../../../exercises/01_dot_product_scores.py), with the inputs that its check
uses and the mistakes that the check recognizes.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.1.
"""

import math

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, numbers


def dot_product_scores(
    query: Tensor,  # [q_len, d_k]
    key: Tensor,  # [k_len, d_k]
) -> Tensor:
    r"""The scaled dot product of each query with each key, $Q K^\top / \sqrt{d_k}$.

    >>> query = torch.tensor([[1.0, 2.0, 0.0, 1.0]])
    >>> dot_product_scores(query, torch.eye(4)[:3])
    tensor([[0.5000, 1.0000, 0.0000]])
    """
    # A matrix product takes the dot products of rows with columns, so the keys are
    # transposed: entry `[i, j]` is the dot product of query `i` with key `j`.
    scores = query @ key.T  # [q_len, k_len]

    # If the components of a query and a key are independent, with variance 1, then
    # their dot product has variance $d_k$. The division restores a variance of 1.
    return scores / math.sqrt(query.shape[-1])  # [q_len, k_len]


def reference(query: Tensor, key: Tensor) -> Tensor:
    """The same, one number at a time."""
    rows = []
    for q in query.tolist():
        products = [sum(a * b for a, b in zip(q, k, strict=True)) for k in key.tolist()]
        rows.append([product / math.sqrt(len(q)) for product in products])
    return torch.tensor(rows)


# region Typical mistakes


def not_scaled(query: Tensor, key: Tensor) -> Tensor:
    """The scale is missing: divide by the square root of `d_k`, the number of
    components of a query.
    """
    return query @ key.T


def scaled_by_width(query: Tensor, key: Tensor) -> Tensor:
    """The products are divided by `d_k`: divide by its square root."""
    return query @ key.T / query.shape[-1]


def scaled_by_length(query: Tensor, key: Tensor) -> Tensor:
    """The products are divided by the square root of the number of keys. Divide by the
    square root of `d_k`, which is the size of the last axis.
    """
    return query @ key.T / math.sqrt(key.shape[0])


def transposed(query: Tensor, key: Tensor) -> Tensor:
    """The scores are transposed: a row belongs to a query, and a column to a key."""
    return key @ query.T / math.sqrt(query.shape[-1])


# endregion

EXERCISE = Exercise(
    series="Write it",
    solution=dot_product_scores,
    reference=reference,
    inputs=[
        (numbers(1, 4), numbers(1, 4, seed=1)),
        (numbers(2, 4), numbers(2, 4, seed=1)),
        (numbers(3, 7), numbers(5, 7, seed=1)),
    ],
    mistakes=[not_scaled, scaled_by_width, scaled_by_length, transposed],
)
