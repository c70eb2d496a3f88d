r"""# Solution: NaN after three days (attention scores)

This is a solution of the exercise [NaN after three
days](../../../exercises/26_bug_nan.py), with the inputs that its check uses and the
mistakes that the check recognizes.

The given code computes $e^s$ of each score. In float32, this is infinite for scores
above 88, and in float16 above 11. The quotient of two infinities is NaN. Where all
scores of a row are below -104, all exponentials are zero, and so is their sum. The
softmax does not change if the largest score of the row is subtracted:

$$\frac{e^{s_j}}{\sum_k e^{s_k}} = \frac{e^{s_j - m}}{\sum_k e^{s_k - m}},
  \qquad m = \max_k s_k$$

At initialization the scores are small, and both sides agree. The law *large_scores*
fails.

Source: the code is in the style of [labml](https://nn.labml.ai/transformers/mha.html);
the bug is our own.
"""

import math

import torch
from torch import Tensor, nn

from headnotes.exercises.exercise import Exercise, evaluate, numbers


class Attention(nn.Module):
    r"""Self-attention over `[seq_len, batch_size, d_model]`, fixed.

    >>> attention = Attention(d_model=21, heads=3)
    >>> attention(1000 * torch.randn(5, 2, 21)).isfinite().all()
    tensor(True)
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)

    def split(self, x: Tensor) -> Tensor:
        """Split the last dimension into heads."""
        return x.view(*x.shape[:2], self.heads, -1)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each token of `x` to all tokens."""
        query, key = self.split(self.query(x)), self.split(self.key(x))
        scores = torch.einsum("ibhd,jbhd->ijbh", query, key)
        scores = scores / math.sqrt(query.shape[-1])
        attn = self.weights(scores)
        value = self.split(self.value(x))  # [seq_len, batch_size, heads, d_k]
        context = torch.einsum(
            "ijbh,jbhd->ibhd", attn, value
        )  # [seq_len, batch_size, heads, d_k]
        return self.output(context.flatten(-2))  # type: ignore[no-any-return]

    def weights(self, scores: Tensor) -> Tensor:
        """The softmax over the keys; `scores.softmax(dim=1)` does the same."""
        attn = (scores - scores.amax(dim=1, keepdim=True)).exp()
        return attn / attn.sum(dim=1, keepdim=True)


# region Typical mistakes


class Given(Attention):
    """This is the given code, or one that computes the same. Look at the largest score
    when the output is NaN, and at its exponential.
    """

    def weights(self, scores: Tensor) -> Tensor:
        attn = scores.exp()
        return attn / attn.sum(dim=1, keepdim=True)


class Clamped(Attention):
    """The scores are clamped. All scores above the limit then have the same weight;
    subtract the largest score of the row instead.
    """

    def weights(self, scores: Tensor) -> Tensor:
        return scores.clamp(-80, 80).softmax(dim=1)


class GlobalMaximum(Attention):
    """The maximum of all scores is subtracted. In a row with much smaller scores, all
    exponentials are then zero: subtract the maximum of each row.
    """

    def weights(self, scores: Tensor) -> Tensor:
        attn = (scores - scores.max()).exp()
        return attn / attn.sum(dim=1, keepdim=True)


class MaximumOfQueries(Attention):
    """The maximum runs over the queries, so that another number is subtracted from each
    score of a row. It runs over the keys, dimension 1, as the sum does.
    """

    def weights(self, scores: Tensor) -> Tensor:
        attn = (scores - scores.amax(dim=0, keepdim=True)).exp()
        return attn / attn.sum(dim=1, keepdim=True)


class Hidden(Attention):
    """NaN is replaced by zero, which hides the overflow: these weights should be close
    to 1. Subtract the largest score of the row before the exponential.
    """

    def weights(self, scores: Tensor) -> Tensor:
        attn = scores.exp()
        return (attn / attn.sum(dim=1, keepdim=True)).nan_to_num(0.0)


# endregion

EXERCISE = Exercise(
    series="Find the bug",
    solution=Attention,
    reference=Attention,
    inputs=[
        (numbers(1, 1, 2),),
        (numbers(2, 1, 2),),
        (30 * numbers(1, 1, 2, seed=3),),
        (1000 * numbers(2, 1, 2),),
        (1000 * numbers(5, 3, 4),),
    ],
    mistakes=[Given, Clamped, GlobalMaximum, MaximumOfQueries, Hidden],
    run=evaluate,
    laws=["large_scores"],
    options={"layout": "sequence_first"},
)
