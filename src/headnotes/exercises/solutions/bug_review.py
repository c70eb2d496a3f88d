r"""# Solution: every review is positive (padding mask)

This is a solution of the exercise [every review is
positive](../../../exercises/24_bug_review.py), with the inputs that its check uses and
the mistakes that the check recognizes.

The given code counts positions from 1, and compares them with `<`, which is right for
positions counted from 0. So the last real token of each sequence is masked, too. Where
it is the only one, the whole row is masked with the same finite number, and the weights
are uniform over everything, padding included.

Nothing leaks otherwise, so most tests of masks pass. The law *allowed_keys_attended*
fails: a query attends to every key that the mask allows.

Source: [Dive into Deep Learning](https://d2l.ai), Zhang et al., section 11.3, for the
style; the bug is our own.
"""

import math

import torch
from torch import Tensor, nn

from headnotes.exercises.exercise import Exercise, evaluate, numbers


class Attention(nn.Module):
    r"""Self-attention over `[batch_size, seq_len, d_model]` with lengths, fixed.

    >>> attention, x = Attention(d_model=21, heads=3), torch.randn(2, 5, 21)
    >>> padded = attention(x, torch.tensor([5, 4]))
    >>> shorter = attention(x[1:, :4])
    >>> padded[1:, :4].allclose(shorter, atol=1e-6)
    True
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split(self, x: Tensor) -> Tensor:
        """Split the last dimension into heads."""
        x = x.view(*x.shape[:2], self.heads, -1)  # [batch_size, seq_len, heads, d_k]
        return x.transpose(1, 2)  # [batch_size, heads, seq_len, d_k]

    def forward(self, x: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        """Attend from each token of `x` to the real tokens of its sequence."""
        q, k, v = (self.split(layer(x)) for layer in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if valid_lens is not None:
            scores = self.masked(scores, valid_lens[:, None])
        context = scores.softmax(dim=-1) @ v
        return self.W_o(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def masked(self, scores: Tensor, valid_lens: Tensor) -> Tensor:
        """Mask padding: key `j`, counted from 0, is real where `j < valid_lens`."""
        mask = torch.arange(scores.shape[-1]) < valid_lens
        return self.fill(scores, mask[:, None, None])

    def fill(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Fill with the lowest number, which also gives padding a finite output."""
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


# region Typical mistakes


class Given(Attention):
    """This is the given code, or one that computes the same. Count the keys that are
    True in each row of the mask, and compare with `valid_lens`.
    """

    def masked(self, scores: Tensor, valid_lens: Tensor) -> Tensor:
        mask = torch.arange(1, scores.shape[-1] + 1) < valid_lens
        return self.fill(scores, mask[:, None, None])


class OneTooMany(Attention):
    """One padded key is visible: with positions counted from 0, the comparison is `<`;
    counted from 1, it is `<=`. Only one of the two must change.
    """

    def masked(self, scores: Tensor, valid_lens: Tensor) -> Tensor:
        mask = torch.arange(scores.shape[-1]) <= valid_lens
        return self.fill(scores, mask[:, None, None])


class NotMasked(Attention):
    """Nothing is masked: queries attend to padding. Keys from `valid_lens` on must stay
    hidden.
    """

    def masked(self, scores: Tensor, valid_lens: Tensor) -> Tensor:
        return scores


class Inverted(Attention):
    """The mask is inverted: the real keys are hidden, and the padding is visible. Fill
    the scores where the mask is False.
    """

    def masked(self, scores: Tensor, valid_lens: Tensor) -> Tensor:
        mask = torch.arange(scores.shape[-1]) >= valid_lens
        return self.fill(scores, mask[:, None, None])


class QueriesMasked(Attention):
    """The rows of padded queries are masked instead of the columns of padded keys. The
    mask is `[batch_size, 1, 1, k_len]` to broadcast over heads and queries.
    """

    def masked(self, scores: Tensor, valid_lens: Tensor) -> Tensor:
        mask = torch.arange(scores.shape[-1]) < valid_lens
        return self.fill(scores, mask[:, None, :, None])


# endregion


def inputs(lens: list[int], seq_len: int, d_model: int) -> tuple[Tensor, Tensor]:
    """Sequences of one length, with fewer real tokens."""
    return numbers(len(lens), seq_len, d_model), torch.tensor(lens)


EXERCISE = Exercise(
    series="Find the bug",
    solution=Attention,
    reference=Attention,
    inputs=[inputs([1], 1, 2), inputs([1], 2, 2), inputs([2, 5, 1], 5, 4)],
    mistakes=[Given, OneTooMany, NotMasked, Inverted, QueriesMasked],
    run=evaluate,
    laws=[
        "allowed_keys_attended",
        "padding",
        "longer_padding",
        "formula",
        "large_scores",
    ],
    options={"layout": "batch_first", "mask": {"valid_lens": "lengths:b"}},
)
