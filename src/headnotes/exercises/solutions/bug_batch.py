r"""# Solution: right alone, wrong in a batch (multi-head attention)

This is a solution of the exercise [right alone, wrong in a
batch](../../../exercises/20_bug_batch.py), with the inputs that its check uses and the
mistakes that the check recognizes.

The given code flattens `[batch_size, heads]` into one dimension, and splits it again as
`[heads, batch_size]`. Both have the same size, so no error is raised. With two items
and three heads, the matrices lie in the order

$$b_0 h_0,\; b_0 h_1,\; b_0 h_2,\; b_1 h_0,\; b_1 h_1,\; b_1 h_2$$

and the second one, head 1 of item 0, is taken for head 0 of item 1. With one item, or
with one head, both orders are the same. The law *batch_independence* fails.

Source: [Dive into Deep Learning](https://d2l.ai), Zhang et al., section 11.5, for the
style; the bug is our own.
"""

import math

import torch
from torch import Tensor, nn

from headnotes.exercises.exercise import Exercise, evaluate, numbers


class Attention(nn.Module):
    r"""Self-attention over `[batch_size, seq_len, d_model]`, fixed.

    >>> Attention(d_model=21, heads=3)(torch.randn(2, 5, 21)).shape
    torch.Size([2, 5, 21])
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each token of `x` to all tokens."""
        q, k, v = (self.split(layer(x)) for layer in (self.W_q, self.W_k, self.W_v))
        scores = torch.bmm(q, k.mT) / math.sqrt(q.shape[-1])
        context = torch.bmm(scores.softmax(dim=-1), v)
        return self.W_o(self.merge(context))  # type: ignore[no-any-return]

    def split(self, x: Tensor) -> Tensor:
        """Split heads, and flatten batch and heads into one dimension."""
        x = x.view(*x.shape[:2], self.heads, -1)  # [batch_size, seq_len, heads, d_k]
        return x.transpose(1, 2).flatten(0, 1)  # [batch_size * heads, seq_len, d_k]

    def merge(self, x: Tensor) -> Tensor:
        """Undo `split`: the dimension is `[batch_size, heads]`, in this order."""
        x = x.view(-1, self.heads, *x.shape[1:])  # [batch_size, heads, seq_len, d_k]
        return x.transpose(1, 2).flatten(2)  # [batch_size, seq_len, heads * d_k]


# region Typical mistakes


class Given(Attention):
    """This is the given code, or one that computes the same. Compare the order of
    batch and heads in `split` and in `merge`.
    """

    def merge(self, x: Tensor) -> Tensor:
        x = x.view(self.heads, -1, *x.shape[1:])
        return x.permute(1, 2, 0, 3).flatten(2)


class NotTransposed(Attention):
    """Batch and heads are split in the right order, but positions and heads are not
    transposed before the heads are concatenated: a token gets parts of other positions.
    """

    def merge(self, x: Tensor) -> Tensor:
        x = x.view(-1, self.heads, *x.shape[1:])
        return x.reshape(len(x), x.shape[2], -1)


class HeadsLast(Attention):
    """The heads are interleaved: entry 0 of all heads comes first, then entry 1.
    Concatenate them one after the other, as `split` took them apart.
    """

    def merge(self, x: Tensor) -> Tensor:
        x = x.view(-1, self.heads, *x.shape[1:])
        return x.permute(0, 2, 3, 1).flatten(2)


class SplitByView(Attention):
    """`split` cuts each sequence instead of the width, because positions and heads are
    not transposed. The given `split` is right; the bug is elsewhere.
    """

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(len(x) * self.heads, x.shape[1], -1)


# endregion

EXERCISE = Exercise(
    series="Find the bug",
    solution=Attention,
    reference=Attention,
    inputs=[(numbers(1, 1, 4),), (numbers(2, 1, 2),), (numbers(3, 5, 4),)],
    mistakes=[Given, NotTransposed, HeadsLast, SplitByView],
    run=evaluate,
    laws=["batch_independence", "formula"],
    options={"layout": "batch_first"},
)
