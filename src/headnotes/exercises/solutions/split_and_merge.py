r"""# Solution: split and merge heads

This is a solution of the exercise [split and merge
heads](../../../exercises/05_split_and_merge.py), with the inputs that its check uses
and the mistakes that the check recognizes.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.2: the heads are concatenated.
"""

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, numbers


def split_heads(
    x: Tensor,  # [batch_size, seq_len, heads * d_k]
    heads: int,
) -> Tensor:
    r"""Give each head its part of the last axis, and put the heads before the sequence.

    >>> x = torch.arange(12.0).view(1, 2, 6)
    >>> x
    tensor([[[ 0.,  1.,  2.,  3.,  4.,  5.],
             [ 6.,  7.,  8.,  9., 10., 11.]]])
    >>> split_heads(x, heads=3)
    tensor([[[[ 0.,  1.],
              [ 6.,  7.]],
    <BLANKLINE>
             [[ 2.,  3.],
              [ 8.,  9.]],
    <BLANKLINE>
             [[ 4.,  5.],
              [10., 11.]]]])
    """
    # In memory, all heads of a token are next to each other: a view can only cut the
    # last axis. A transpose then exchanges tokens and heads.
    batch_size, seq_len, _ = x.shape
    x = x.view(batch_size, seq_len, heads, -1)  # [batch_size, seq_len, heads, d_k]
    return x.transpose(1, 2)  # [batch_size, heads, seq_len, d_k]


def merge_heads(
    x: Tensor,  # [batch_size, heads, seq_len, d_k]
) -> Tensor:
    r"""Concatenate the heads of each token: the inverse of `split_heads`.

    >>> x = torch.randn(2, 3, 35)
    >>> merge_heads(split_heads(x, heads=5)).equal(x)
    True
    """
    # The transpose is a view, and flattening copies: after it, the heads of a token are
    # next to each other in memory again.
    x = x.transpose(1, 2)  # [batch_size, seq_len, heads, d_k]
    return x.flatten(2)  # [batch_size, seq_len, heads * d_k]


def split_and_merge(
    x: Tensor,  # [batch_size, seq_len, heads * d_k]
    heads: int,
) -> tuple[Tensor, Tensor]:
    r"""Both, as the check calls them.

    >>> split, merged = split_and_merge(torch.randn(2, 3, 35), heads=5)
    >>> split.shape
    torch.Size([2, 5, 3, 7])
    """
    split = split_heads(x, heads)  # [batch_size, heads, seq_len, d_k]
    return split, merge_heads(split)


def reference(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The parts of each head are sliced, one head at a time."""
    d_k = x.shape[-1] // heads
    parts = [x[:, :, h * d_k : (h + 1) * d_k] for h in range(heads)]
    return torch.stack(parts, dim=1), x


# region Typical mistakes


def split_by_view(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The sequence is cut instead of the width: a view as `[batch_size, heads, seq_len,
    d_k]` does not move the numbers. Split the last axis, then transpose.
    """
    split = x.reshape(x.shape[0], heads, x.shape[1], -1)
    return split, split.reshape(x.shape)


def split_interleaved(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Each head gets every `heads`-th component. A head is a block of neighboring
    components: split the last axis into `(heads, d_k)`, not `(d_k, heads)`.
    """
    split = x.view(*x.shape[:2], -1, heads).permute(0, 3, 1, 2)
    return split, split.permute(0, 2, 3, 1).flatten(2)


def not_transposed(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The heads come after the sequence: transpose the axes 1 and 2."""
    return x.view(*x.shape[:2], heads, -1), x


def merged_by_view(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The heads are split correctly, but merged without a transpose. Each row of the
    result then holds numbers of several tokens.
    """
    split = split_heads(x, heads)
    return split, split.reshape(x.shape)


# endregion

EXERCISE = Exercise(
    series="Write it",
    solution=split_and_merge,
    reference=reference,
    inputs=[
        (torch.arange(4.0).view(1, 1, 4), 2),
        (torch.arange(8.0).view(1, 2, 4), 2),
        (numbers(2, 3, 10), 5),
    ],
    mistakes=[split_by_view, split_interleaved, not_transposed, merged_by_view],
)
