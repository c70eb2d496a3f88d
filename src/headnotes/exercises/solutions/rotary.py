r"""# Solution: rotary position embeddings

This is a solution of the exercise [rotary position
embeddings](../../../exercises/16_rotary.py), with the inputs that its check uses and
the mistakes that the check recognizes.

Source: [RoFormer](https://arxiv.org/abs/2104.09864), Su et al. 2021, section 3.2. The
paper pairs neighboring entries; to pair the halves is the convention of GPT-NeoX and
Llama in Hugging Face's library.
"""

import math

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, numbers


def rotate(
    x: Tensor,  # [seq_len, batch_size, heads, d_k]
    first: int,
) -> Tensor:
    r"""Queries or keys, rotated by angles that grow with the position.

    The dot product of a rotated query and key depends on their distance only:

    >>> query, key = torch.randn(2, 4, 3, 5, 14)
    >>> here = rotate(query, 7) * rotate(key, 4)
    >>> later = rotate(query, 107) * rotate(key, 104)
    >>> here.sum(dim=-1).allclose(later.sum(dim=-1), atol=1e-3)
    True
    """
    seq_len, d_k = x.shape[0], x.shape[-1]
    position = first + torch.arange(seq_len)  # [seq_len]
    frequency = 10_000 ** (-torch.arange(0, d_k, 2) / d_k)  # [d_k // 2]
    angle = position[:, None] * frequency  # [seq_len, d_k // 2]
    angle = angle[:, None, None]  # [seq_len, 1, 1, d_k // 2]

    # Each pair is rotated in its plane, which changes no length.
    a, b = x.chunk(2, dim=-1)  # [seq_len, batch_size, heads, d_k // 2]
    cos, sin = angle.cos(), angle.sin()  # [seq_len, 1, 1, d_k // 2]
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return rotated  # [seq_len, batch_size, heads, d_k]


def reference(x: Tensor, first: int) -> Tensor:
    """The same, one pair at a time."""
    rotated = x.clone()
    half = x.shape[-1] // 2
    for p in range(len(x)):
        for i in range(half):
            angle = (first + p) * 10_000 ** (-i / half)
            pair = x[p, ..., i], x[p, ..., half + i]
            # A rotation is a product with a complex number of length 1.
            turn = complex(math.cos(angle), math.sin(angle))
            product = torch.complex(*pair) * turn
            rotated[p, ..., i], rotated[p, ..., half + i] = product.real, product.imag
    return rotated


# region Typical mistakes


def rotate_by(angle: Tensor, x: Tensor) -> Tensor:
    """Rotate by given angles, `[seq_len, d_k // 2]`."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angle[:, None, None].cos(), angle[:, None, None].sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def angles(x: Tensor, first: int, start: int = 0, width: int = 0) -> Tensor:
    """Angles for other positions, or for another width."""
    width = width or x.shape[-1]
    position = torch.arange(len(x)) + first + start
    return position[:, None] * 10_000 ** (-torch.arange(0, x.shape[-1], 2) / width)


def neighbors(x: Tensor, first: int) -> Tensor:
    """Neighboring entries are paired, 0 with 1 and 2 with 3. Here entry `i` is paired
    with entry `i + d_k / 2`: split `x` into halves.
    """
    halves = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
    a, b = rotate(halves, first).chunk(2, dim=-1)
    return torch.stack([a, b], dim=-1).flatten(-2)


def other_direction(x: Tensor, first: int) -> Tensor:
    r"""The rotation has the opposite direction: the sine is subtracted in the first
    half, and added in the second.
    """
    return rotate_by(-angles(x, first), x)


def always_from_zero(x: Tensor, first: int) -> Tensor:
    """`first` is not used: the positions always begin at 0, so that a token decoded
    with a cache is rotated as the first one. Add `first` to the positions.
    """
    return rotate_by(angles(x, 0), x)


def from_one(x: Tensor, first: int) -> Tensor:
    """Positions are counted from 1. Count from 0: the first token of a prompt is not
    rotated.
    """
    return rotate_by(angles(x, first, start=1), x)


def wrong_frequencies(x: Tensor, first: int) -> Tensor:
    """The frequencies are too high: the exponent is `-2 * i / d_k`, where `i` counts
    the pairs. With `i / d_k` they do not reach low frequencies.
    """
    return rotate_by(angles(x, first, width=2 * x.shape[-1]), x)


# endregion

EXERCISE = Exercise(
    series="Make it modern",
    solution=rotate,
    reference=reference,
    inputs=[
        (numbers(1, 1, 1, 2), 0),
        (numbers(1, 1, 1, 2), 1),
        (numbers(2, 1, 1, 4), 0),
        (numbers(5, 2, 3, 14), 7),
    ],
    mistakes=[
        neighbors,
        other_direction,
        always_from_zero,
        from_one,
        wrong_frequencies,
    ],
)
