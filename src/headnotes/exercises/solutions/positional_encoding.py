r"""# Solution: sinusoidal positional encoding

This is a solution of the exercise [sinusoidal positional
encoding](../../../exercises/09_positional_encoding.py), with the inputs that its check
uses and the mistakes that the check recognizes.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.5.
"""

import math

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise


def positional_encoding(seq_len: int, d_model: int) -> Tensor:
    r"""The table of sinusoids, `[seq_len, d_model]`, for an even `d_model`.

    >>> positional_encoding(2, 6)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0464, 0.9989, 0.0022, 1.0000]])
    >>> positional_encoding(5, 14).shape
    torch.Size([5, 14])
    """
    # Columns $2i$ and $2i + 1$ have the same frequency, $10000^{-2i/d_{model}}$.
    position = torch.arange(seq_len).float()  # [seq_len]
    even = torch.arange(0, d_model, 2).float()  # [d_model // 2]
    angle = position[:, None] * 10000 ** (-even / d_model)  # [seq_len, d_model // 2]

    # The sine and the cosine of an angle are neighbors: stacked on a new last axis,
    # which is then flattened.
    table = torch.stack(
        [angle.sin(), angle.cos()], dim=-1
    )  # [seq_len, d_model // 2, 2]
    return table.flatten(1)  # [seq_len, d_model]


def reference(seq_len: int, d_model: int) -> Tensor:
    """The same, one number at a time."""
    rows = []
    for t in range(seq_len):
        angles = [t / 10000 ** (2 * i / d_model) for i in range(d_model // 2)]
        rows.append([f(angle) for angle in angles for f in (math.sin, math.cos)])
    return torch.tensor(rows)


# region Typical mistakes


def in_halves(seq_len: int, d_model: int) -> Tensor:
    """All sines come first, then all cosines. Here they alternate: even columns are
    sines, odd columns are cosines.
    """
    table = positional_encoding(seq_len, d_model)
    return torch.cat([table[:, ::2], table[:, 1::2]], dim=1)


def swapped(seq_len: int, d_model: int) -> Tensor:
    """Sine and cosine are swapped: even columns are sines, odd columns are cosines."""
    table = positional_encoding(seq_len, d_model)
    return table.view(seq_len, -1, 2).flip(2).flatten(1)


def from_one(seq_len: int, d_model: int) -> Tensor:
    """The positions begin with 1: the first row is position 0."""
    return positional_encoding(seq_len + 1, d_model)[1:]


def half_the_exponent(seq_len: int, d_model: int) -> Tensor:
    """The exponent is too small: column `2 * i` has the frequency `10000 ** (-2 * i /
    d_model)`. With `i` in place of `2 * i`, all frequencies after the first are too
    high.
    """
    return positional_encoding(seq_len, 2 * d_model)[:, :d_model]


def frequency_of_each_column(seq_len: int, d_model: int) -> Tensor:
    """Each column has a frequency of its own. Columns `2 * i` and `2 * i + 1` have the
    same frequency, that of the even column.
    """
    column = torch.arange(d_model).float()
    angle = torch.arange(seq_len).float()[:, None] * 10000 ** (-column / d_model)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos())


# endregion

EXERCISE = Exercise(
    series="Write it",
    solution=positional_encoding,
    reference=reference,
    inputs=[(1, 2), (2, 2), (2, 4), (7, 6)],
    mistakes=[
        in_halves,
        swapped,
        from_one,
        half_the_exponent,
        frequency_of_each_column,
    ],
)
