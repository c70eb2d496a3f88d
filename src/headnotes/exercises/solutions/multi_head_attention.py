r"""# Solution: multi-head attention

This is a solution of the exercise [multi-head
attention](../../../exercises/10_multi_head_attention.py), with the inputs that its
check uses and the mistakes that the check recognizes. The [reference
implementation](../../mha.md) does the same, and checks its arguments.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.2.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from headnotes import mha
from headnotes.exercises.exercise import Exercise, numbers


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention over `[seq_len, batch_size, d_model]`.

    >>> attention = MultiHeadAttention(heads=2, d_model=22)
    >>> query, memory = torch.randn(3, 5, 22), torch.randn(7, 5, 22)
    >>> attention(query, memory, memory, mask=torch.ones(3, 7, 5) > 0).shape
    torch.Size([3, 5, 22])
    """

    def __init__(self, heads: int, d_model: int) -> None:
        super().__init__()
        self.heads = heads
        self.d_k = d_model // heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)

    def forward(
        self,
        query: Tensor,  # [q_len, batch_size, d_model]
        key: Tensor,  # [k_len, batch_size, d_model]
        value: Tensor,  # [k_len, batch_size, d_model]
        mask: Tensor | None = None,  # [q_len, k_len, batch_size]
    ) -> Tensor:
        """Attend from `query` to `key`, and return the mean of `value`, projected."""
        # Project, and split the last axis into heads.
        split = (self.heads, self.d_k)
        q = self.query(query).unflatten(-1, split)  # [q_len, batch_size, heads, d_k]
        k = self.key(key).unflatten(-1, split)  # [k_len, batch_size, heads, d_k]
        v = self.value(value).unflatten(-1, split)  # [k_len, batch_size, heads, d_k]

        # One score for each query, key, batch item and head.
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * self.scale()
        weights = self.weights(scores, mask)  # [q_len, k_len, batch_size, heads]

        # The weighted sums of the values; then all heads side by side, and mixed.
        context = torch.einsum("ijbh,jbhd->ibhd", weights, v)
        output: Tensor = self.output(
            self.merge(context)
        )  # [q_len, batch_size, d_model]
        return output

    def scale(self) -> float:
        """The factor of the scores."""
        return 1 / math.sqrt(self.d_k)

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Masked softmax over the keys, axis 1; zeros where all keys are masked."""
        if mask is None:
            return scores.softmax(dim=1)
        mask = mask.unsqueeze(-1)
        fully_masked = ~mask.any(dim=1, keepdim=True)
        scores = scores.masked_fill(~mask, -math.inf).masked_fill(fully_masked, 0)
        return scores.softmax(dim=1).masked_fill(fully_masked, 0)

    def merge(self, context: Tensor) -> Tensor:
        """Concatenate the heads."""
        return context.flatten(-2)


def run(
    attention: Any,
    heads: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> Any:
    """Build the class with fixed weights, and call it."""
    torch.manual_seed(0)
    module = attention(heads, d_model=query.shape[-1]).eval()
    return module(query=query, key=key, value=value, mask=mask)


# region Typical mistakes


class NotScaled(MultiHeadAttention):
    """The scale is missing: divide the scores by the square root of `d_k`."""

    def scale(self) -> float:
        return 1


class ScaledByModel(MultiHeadAttention):
    """The scores are divided by the square root of `d_model`. Divide by the square root
    of `d_k`, the width of one head.
    """

    def scale(self) -> float:
        return 1 / math.sqrt(self.heads * self.d_k)


class OverQueries(MultiHeadAttention):
    """The softmax is over the queries, axis 0. The weights of one query sum to 1 over
    the keys, axis 1.
    """

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(-1), -math.inf)
        return scores.softmax(dim=0)


class OverHeads(MultiHeadAttention):
    """The softmax is over the heads, the last axis. The keys are axis 1."""

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(-1), -math.inf)
        return scores.softmax(dim=-1)


class Inverted(MultiHeadAttention):
    """The mask is inverted: True means that the query may attend to the key."""

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weights(scores, None if mask is None else ~mask)


class RowOfNaN(MultiHeadAttention):
    """All is right but for fully masked rows, which are NaN. Their weights must be
    zero.
    """

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(-1), -math.inf)
        return scores.softmax(dim=1)


class Ignored(MultiHeadAttention):
    """The mask has no effect: hide the scores where it is False, before the softmax."""

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.softmax(dim=1)


class HeadsInterleaved(MultiHeadAttention):
    """The heads are merged in another order: the components of one head are neighbors,
    so flatten `[heads, d_k]` without a transpose.
    """

    def merge(self, context: Tensor) -> Tensor:
        return context.transpose(-1, -2).flatten(-2)


class NotProjected(MultiHeadAttention):
    """The last projection is missing: pass the merged heads through `self.output`."""

    def __init__(self, heads: int, d_model: int) -> None:
        super().__init__(heads, d_model)
        self.output = nn.Identity()  # type: ignore[assignment]


# endregion


def inputs(heads: int, d_model: int, q_len: int, k_len: int, batch_size: int) -> Any:
    """The inputs of these sizes, without a mask."""
    query = numbers(q_len, batch_size, d_model, seed=1)
    key = numbers(k_len, batch_size, d_model, seed=2)
    value = numbers(k_len, batch_size, d_model, seed=3)
    return heads, query, key, value


ONE_ROW = torch.tensor([[True, False], [False, False]])[..., None]

EXERCISE = Exercise(
    series="Write it",
    solution=MultiHeadAttention,
    reference=mha.MultiHeadAttention,
    inputs=[
        (*inputs(1, 2, 1, 1, 1), None),
        (*inputs(1, 2, 1, 2, 1), None),
        (*inputs(2, 4, 2, 3, 1), None),
        (*inputs(1, 2, 1, 2, 1), torch.tensor([[[True], [False]]])),
        (*inputs(1, 2, 2, 2, 1), ONE_ROW),
        (*inputs(3, 15, 5, 7, 2), numbers(5, 7, 2) > 0),
    ],
    mistakes=[
        NotScaled,
        ScaledByModel,
        OverQueries,
        OverHeads,
        Inverted,
        RowOfNaN,
        Ignored,
        HeadsInterleaved,
        NotProjected,
    ],
    run=run,
)
