r"""# Solution: padding mask

This is a solution of the exercise [padding
mask](../../../exercises/04_padding_mask.py), with the inputs that its check uses and
the mistakes that the check recognizes.

Source: [Dive into Deep
Learning](https://d2l.ai/chapter_attention-mechanisms-and-transformers/attention-scoring-functions.html),
section 11.3, for valid lengths.
"""

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise


def padding_mask(
    valid_lens: Tensor,  # [batch_size]
    k_len: int,
) -> Tensor:
    r"""A padding mask `[1, k_len, batch_size]`; True for the keys that are tokens.

    >>> padding_mask(torch.tensor([1, 3]), k_len=3)[0].int()
    tensor([[1, 1],
            [0, 1],
            [0, 1]], dtype=torch.int32)
    """
    # A column of positions is compared with a row of lengths; both are broadcast.
    position = torch.arange(k_len, device=valid_lens.device)  # [k_len]
    mask = position[:, None] < valid_lens  # [k_len, batch_size]

    # All queries share the mask: their axis has size 1.
    return mask[None]  # [1, k_len, batch_size]


def reference(valid_lens: Tensor, k_len: int) -> Tensor:
    """The same, one key and one batch item at a time."""
    rows = [[j < length for length in valid_lens.tolist()] for j in range(k_len)]
    return torch.tensor([rows])


# region Typical mistakes


def inverted(valid_lens: Tensor, k_len: int) -> Tensor:
    """The mask is inverted: True must stand for tokens, and False for padding."""
    return ~padding_mask(valid_lens, k_len)


def one_too_many(valid_lens: Tensor, k_len: int) -> Tensor:
    """One position of padding is allowed: positions count from 0, so the last token of
    a sequence of length `n` is at position `n - 1`.
    """
    return padding_mask(valid_lens + 1, k_len)


def from_the_end(valid_lens: Tensor, k_len: int) -> Tensor:
    """The mask is right for padding at the beginning. Here padding is at the end."""
    return padding_mask(valid_lens, k_len).flip(1)


def batch_first(valid_lens: Tensor, k_len: int) -> Tensor:
    """The axes are in another order: return `[1, k_len, batch_size]`, with the batch
    last.
    """
    return padding_mask(valid_lens, k_len).transpose(1, 2)


# endregion

EXERCISE = Exercise(
    series="Write it",
    solution=padding_mask,
    reference=reference,
    inputs=[
        (torch.tensor([1]), 1),
        (torch.tensor([1]), 2),
        (torch.tensor([2, 1]), 2),
        (torch.tensor([3, 0, 5, 2]), 5),
        (torch.tensor([4, 7, 1]), 7),
    ],
    mistakes=[inverted, one_too_many, from_the_end, batch_first],
)
