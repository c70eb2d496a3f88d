r"""# Solution: worse in generation than in validation

This is a solution of the exercise [worse in generation than in
validation](../../../exercises/19_bug_perplexity.py), with the inputs that its check
uses and the mistakes that the check recognizes.

The given code masks the weights after the softmax. A masked weight is zero, so that no
value of a later token is used. But the scores of later tokens remain in the denominator
of each softmax:

$$A_{ij} = \frac{e^{S_{ij}}}{\sum_k e^{S_{ik}}}$$

The sum runs over all keys. In training and validation, where later tokens exist, the
size of a context vector tells the model something about them. In generation they do not
exist yet. The law *causality* fails: another last token changes earlier outputs.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.3, which masks "in the input of the softmax".
"""

import math

import torch
from torch import Tensor, nn

from headnotes.exercises.exercise import Exercise, evaluate, numbers


class Attention(nn.Module):
    r"""Causal self-attention over `[batch_size, seq_len, d_model]`, fixed.

    >>> attention = Attention(d_model=14, heads=2)
    >>> attention(torch.randn(3, 5, 14)).shape
    torch.Size([3, 5, 14])
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each token of `x` to itself and to earlier tokens."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [batch_size, heads, seq_len, d_k]
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        context = self.weights(scores) @ v  # [batch_size, heads, seq_len, d_k]
        return self.proj(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def weights(self, scores: Tensor) -> Tensor:
        """The attention weights of all heads."""
        # Masked before the softmax, the weights of earlier tokens sum to 1. Dividing
        # masked weights by their sum would give the same.
        seq_len = scores.shape[-1]
        allowed = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
        return scores.softmax(dim=-1)


# region Typical mistakes


class Given(Attention):
    """This is the given code, or one that computes the same. Compare the sums of its
    rows of weights, `weights.sum(dim=-1)`, with 1.
    """

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=-1).tril()


class ScoresOfZero(Attention):
    """Masked scores are set to zero. Their weights are then proportional to $e^0 = 1$;
    only a score of minus infinity has a weight of zero.
    """

    def weights(self, scores: Tensor) -> Tensor:
        return scores.tril().softmax(dim=-1)


class Inverted(Attention):
    """The wrong scores are masked: each query attends to later keys only, and the last
    query to none, which gives NaN.
    """

    def weights(self, scores: Tensor) -> Tensor:
        earlier = torch.ones_like(scores, dtype=torch.bool).tril()
        return scores.masked_fill(earlier, -math.inf).softmax(dim=-1)


# endregion

EXERCISE = Exercise(
    series="Find the bug",
    solution=Attention,
    reference=Attention,
    inputs=[(numbers(1, 1, 2),), (numbers(1, 2, 2),), (numbers(3, 5, 4),)],
    mistakes=[Given, ScoresOfZero, Inverted],
    run=evaluate,
    laws=["causality", "causal_gradient", "longer_padding", "formula"],
)
