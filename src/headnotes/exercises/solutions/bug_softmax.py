r"""# Solution: right numbers, wrong lesson (memory-efficient softmax)

This is a solution of the exercise [right numbers, wrong
lesson](../../../exercises/22_bug_softmax.py), with the inputs that its check uses and
the mistakes that the check recognizes.

The backward pass of the given code is that of a sigmoid, $w (1 - w)$: the diagonal of
the derivative of a softmax. The other entries are missing. A larger score makes the
other weights of its row smaller:

$$\frac{\partial w_i}{\partial s_j} = w_i (\delta_{ij} - w_j)
  \quad\Rightarrow\quad
  \frac{\partial L}{\partial s_j} = w_j \Big(g_j - \sum_i g_i w_i\Big),
  \qquad g_i = \frac{\partial L}{\partial w_i}$$

The forward pass is right, and so are all comparisons of outputs. The law *gradients*
fails, which compares the gradient with finite differences of the output.

Source: [FlashAttention](https://arxiv.org/abs/2205.14135), Dao et al. 2022, appendix
B.2, for the derivative; the bug is our own.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from headnotes.exercises.exercise import Exercise, evaluate, numbers


class Softmax(torch.autograd.Function):
    """A softmax that saves only its output for the backward pass, fixed."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Any:
        """The weights."""
        weights = scores.softmax(dim=-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradient of the scores."""
        (weights,) = ctx.saved_tensors
        # The mean of the gradients, weighted by the row, is subtracted: adding one
        # number to all scores changes no weight, so their gradients sum to zero.
        return weights * (grad - (grad * weights).sum(dim=-1, keepdim=True))


class Attention(nn.Module):
    r"""Self-attention over `[batch_size, seq_len, d_model]`, with `Softmax`.

    >>> Attention(d_model=21, heads=3)(torch.randn(2, 5, 21)).shape
    torch.Size([2, 5, 21])
    """

    softmax: type[torch.autograd.Function] = Softmax

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each token of `x` to all tokens."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [batch_size, heads, seq_len, d_k]
        apply: Any = self.softmax.apply
        weights = apply(q @ k.mT / math.sqrt(q.shape[-1]))
        context = weights @ v  # [batch_size, heads, seq_len, d_k]
        return self.proj(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


# region Typical mistakes


class Diagonal(Softmax):
    """The backward pass of the given code."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return grad * weights * (1 - weights)


class Given(Attention):
    """This is the given code, or one that computes the same. If one score grows, all
    other weights of its row shrink; their gradients must count as well.
    """

    softmax = Diagonal


class PassedOn(Softmax):
    """A backward pass that changes nothing."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class StraightThrough(Attention):
    """The gradient of the weights is returned as that of the scores. Multiply it by
    the derivative of the softmax.
    """

    softmax = PassedOn


class NotSubtracted(Softmax):
    """A backward pass without the sum over the row."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return grad * weights


class WithoutMean(Attention):
    """The weights are a factor of the gradient, but nothing is subtracted. The
    gradients of a row of scores sum to zero: subtract the weighted mean of `grad`.
    """

    softmax = NotSubtracted


class SumOfQueries(Softmax):
    """A backward pass with a sum over the wrong dimension."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return weights * (grad - (grad * weights).sum(dim=-2, keepdim=True))


class OverQueries(Attention):
    """The sum runs over the queries. It runs over the keys, the last dimension, as the
    softmax does.
    """

    softmax = SumOfQueries


class PlainMean(Softmax):
    """A backward pass that subtracts an unweighted mean."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return weights * (grad - grad.mean(dim=-1, keepdim=True))


class UnweightedMean(Attention):
    """The plain mean of the gradients is subtracted. It is the mean weighted by the
    attention weights: `(grad * weights).sum(dim=-1, keepdim=True)`.
    """

    softmax = PlainMean


# endregion

EXERCISE = Exercise(
    series="Find the bug",
    solution=Attention,
    reference=Attention,
    inputs=[(numbers(1, 1, 2),), (numbers(1, 2, 2),), (numbers(3, 5, 4),)],
    mistakes=[Given, StraightThrough, WithoutMean, OverQueries, UnweightedMean],
    run=evaluate,
    laws=["gradients"],
    options={"layout": "batch_first"},
)
