r"""# Solution: causal mask

This is a solution of the exercise [causal
mask](../../../exercises/03_causal_mask.py), with the inputs that its check uses and the
mistakes that the check recognizes.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.3.
"""

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise


def causal_mask(q_len: int, k_len: int) -> Tensor:
    r"""A causal mask `[q_len, k_len]`; True means that a query may attend to a key.

    >>> causal_mask(2, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    # `tril` keeps the lower triangle, with the diagonal. It counts the diagonal from
    # the top left corner; the shift aligns the last query with the last key.
    mask = torch.ones(q_len, k_len, dtype=torch.bool)  # [q_len, k_len]
    return mask.tril(k_len - q_len)  # [q_len, k_len]


def reference(q_len: int, k_len: int) -> Tensor:
    """The same, one query and one key at a time."""
    rows = [[j <= i + k_len - q_len for j in range(k_len)] for i in range(q_len)]
    return torch.tensor(rows)


# region Typical mistakes


def inverted(q_len: int, k_len: int) -> Tensor:
    """The mask is inverted: True must mean that the query may attend to the key."""
    return ~causal_mask(q_len, k_len)


def without_diagonal(q_len: int, k_len: int) -> Tensor:
    """The diagonal is missing: a query may attend to the key at its own position."""
    return torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len - 1)


def transposed(q_len: int, k_len: int) -> Tensor:
    """The upper triangle is kept: each query attends to later keys instead of earlier
    ones. Rows are queries and columns are keys; keep the lower triangle.
    """
    return torch.ones(q_len, k_len, dtype=torch.bool).triu(k_len - q_len)


def top_left(q_len: int, k_len: int) -> Tensor:
    """The first query is aligned with the first key. Align the last query with the
    last key: shift the diagonal by `k_len - q_len`.
    """
    return torch.ones(q_len, k_len, dtype=torch.bool).tril()


def as_floats(q_len: int, k_len: int) -> Tensor:
    """The values are right, but the mask holds floating-point numbers. Return a bool
    tensor: create it with `dtype=torch.bool`, or compare it with 0.
    """
    return causal_mask(q_len, k_len).float()


# endregion

EXERCISE = Exercise(
    series="Write it",
    solution=causal_mask,
    reference=reference,
    inputs=[(1, 1), (1, 2), (2, 2), (3, 3), (2, 5), (5, 5), (3, 2)],
    mistakes=[inverted, without_diagonal, transposed, top_left, as_floats],
)
