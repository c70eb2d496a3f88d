r"""# Multi-head attention with valid lengths

This module is multi-head attention for padded batches, in which *valid lengths* take
the place of a mask: how many keys, from the first on, may be attended to. One integer
per batch item is enough for padding at the end of a sequence. One per query is enough
for a causal mask too: query `i` has length `i + 1`.

Heads are *flattened into the batch*. Two sequences and five
heads become a batch of ten independent sequences, and single-head attention computes
all of them in one batched product.

$$[\,2,\ n,\ 5 \cdot d_k\,] \;\longrightarrow\; [\,10,\ n,\ d_k\,]$$

Item `b * num_heads + i` of the flattened batch is head `i` of item `b`. More heads do
not increase the cost of the products, as each head is narrower; but each has attention
weights of its own, which take memory.

Source: [Dive into Deep Learning](https://d2l.ai/chapter_attention-mechanisms-and-transformers/multihead-attention.html),
Zhang et al. 2023, sections 11.3 and 11.5. That is the *original* of the notes below,
and its checkpoints load here. The method is that of [Attention Is All You
Need](https://arxiv.org/abs/1706.03762), section 3.2.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headnotes.checks import (
    check_dropout,
    check_heads,
    check_lengths,
    check_tensor,
    fits_dtype,
)


def masked_softmax(
    X: Tensor,  # [batch_size, q_len, k_len]  # noqa: N803
    valid_lens: Tensor | None,
) -> Tensor:
    r"""Softmax over the last axis, in which only the first keys of each row count.

    `valid_lens` is `None`, `[batch_size]`, or `[batch_size, q_len]` for lengths that
    differ by query.

    Raises `TypeError` for lengths that are not an integer tensor, `ValueError` for a
    wrong shape, or a length below 0 or beyond `k_len`.
    Source: Dive into Deep Learning, section 11.3.

    >>> X = torch.zeros(2, 1, 4)
    >>> masked_softmax(X, torch.tensor([4, 2])).squeeze(1)
    tensor([[0.2500, 0.2500, 0.2500, 0.2500],
            [0.5000, 0.5000, 0.0000, 0.0000]])

    Lengths that grow with the query are a causal mask:

    >>> X = torch.zeros(1, 3, 3)
    >>> masked_softmax(X, torch.tensor([[1, 2, 3]]))
    tensor([[[1.0000, 0.0000, 0.0000],
             [0.5000, 0.5000, 0.0000],
             [0.3333, 0.3333, 0.3333]]])

    A length of 0 masks the whole row, and its weights are zero:

    >>> masked_softmax(X, torch.tensor([0])).sum()
    tensor(0.)
    """
    check_tensor("X", X)
    if X.dtype.itemsize < 2 or not X.is_floating_point():
        raise TypeError(f"`X` is {X.dtype}, which has no softmax; use `X.float()`")
    if X.dim() != 3:
        axes = "[batch_size, q_len, k_len]"
        raise ValueError(f"`X` has shape {list(X.shape)}, not {axes}")
    if valid_lens is None:
        return X.softmax(dim=-1)
    check_valid_lens(valid_lens, X, X.shape[-1])

    # Compare the position of each key with the length.
    lens = lens_by_query(valid_lens).unsqueeze(-1)  # [batch_size, ..., 1]
    position = torch.arange(X.shape[-1], device=X.device)  # [k_len]
    allowed = position < lens  # [batch_size, ..., k_len]

    # Padding gets a score of $-\infty$, and so a weight of zero. The original fills in
    # $-10^6$, and a true score may lie below that. But a whole row of $-\infty$ becomes
    # NaN. So fully masked rows are filled with 0 before the softmax, for the gradients,
    # and again after it, where the original attends to all of the padding.
    fully_masked = lens <= 0  # [batch_size, ..., 1]
    scores = X.masked_fill(~allowed, -math.inf).masked_fill(fully_masked, 0)
    weights = scores.softmax(dim=-1)  # [batch_size, q_len, k_len]
    return weights.masked_fill(fully_masked, 0)


def lens_by_query(valid_lens: Tensor) -> Tensor:
    r"""Lengths `[batch_size]` or `[batch_size, q_len]` as `[batch_size, 1 or q_len]`.

    >>> lens_by_query(torch.tensor([3, 5])).tolist()
    [[3], [5]]
    """
    # In int64, so that a comparison with positions does not wrap around.
    lens = valid_lens.long()
    if lens.dim() == 2:
        return lens
    # Not `len(lens)`: under `torch.export` that would be a constant.
    batch_size = lens.shape[0]
    return lens.view(batch_size, 1)  # [batch_size, 1]


class DotProductAttention(nn.Module):
    r"""Scaled dot-product attention of a single head.

    `dropout` acts on the attention weights during training.

    Raises `ValueError` where `dropout` does not lie between 0 and 1.
    Source: Dive into Deep Learning, section 11.3.
    """

    attention_weights: Tensor | None

    def __init__(self, dropout: float) -> None:
        super().__init__()
        check_dropout(dropout)
        self.dropout = nn.Dropout(dropout)
        self.attention_weights = None

    def forward(
        self,
        queries: Tensor,  # [batch_size, q_len, d_k]
        keys: Tensor,  # [batch_size, k_len, d_k]
        values: Tensor,  # [batch_size, k_len, d_v]
        valid_lens: Tensor | None = None,
    ) -> Tensor:
        r"""The weighted mean of `values`, for each of the `queries`.

        With a length of 0, the context is zero.

        Raises `TypeError` for a wrong dtype, `ValueError` for shapes or devices that do
        not fit.

        >>> attention = DotProductAttention(dropout=0.5)
        >>> queries = torch.randn(2, 1, 3)
        >>> keys, values = torch.randn(2, 5, 3), torch.randn(2, 5, 7)
        >>> lens = torch.tensor([2, 4])
        >>> attention(queries, keys, values, lens).shape
        torch.Size([2, 1, 7])
        >>> attention.attention_weights[:, 0] > 0
        tensor([[ True,  True, False, False, False],
                [ True,  True,  True,  True, False]])
        """
        check_tensor("queries", queries)
        check_inputs("`queries`", queries, [0, 0, 0], queries, keys, values)
        q_width, k_width = queries.shape[-1], keys.shape[-1]
        if q_width != k_width:
            raise ValueError(
                f"`keys` are {k_width} wide, `queries` {q_width}; make them equal"
            )

        # The dot product of each query with each key. If their components have variance
        # 1, it has variance $d_k$; the division brings it back to 1. The original
        # divides the scores, which may pass 65,504, where float16 ends.
        queries = queries / math.sqrt(queries.shape[-1])
        scores = torch.bmm(queries, keys.mT)  # [batch_size, q_len, k_len]

        # The softmax over the keys; padding gets a weight of zero. The weights stay on
        # the module for inspection, detached: the original stores them with their
        # graph, which keeps the memory of the forward pass alive, and `deepcopy`
        # raises. (An exported program cannot store them.)
        weights = masked_softmax(scores, valid_lens)  # [batch_size, q_len, k_len]
        if not torch.compiler.is_exporting():
            self.attention_weights = weights.detach()

        # Dropout on the weights, then the weighted sum of the values.
        weights = self.dropout(weights)
        return torch.bmm(weights, values)  # [batch_size, q_len, d_v]

    def __getstate__(self) -> dict[str, Any]:
        # The weights of the last call are for inspection, and do not belong in a
        # pickle, checkpoint or copy.
        return self.__dict__ | {"attention_weights": None}


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention whose heads are flattened into the batch.

    `num_hiddens` is the width of the output, and of all heads together. Each input may
    have a width of its own, which is inferred in the first forward pass. `dropout` acts
    on the attention weights during training; `bias` applies to all four linear maps.

    Raises `ValueError` where `num_heads` does not divide `num_hiddens`, or a setting is
    out of range. Source: Dive into Deep Learning, section 11.5.

    >>> attention = MultiHeadAttention(100, 5, dropout=0.5)
    >>> X, Y = torch.randn(2, 4, 100), torch.randn(2, 6, 100)
    >>> attention(X, Y, Y, torch.tensor([3, 2])).shape
    torch.Size([2, 4, 100])

    The attention weights of the last call stay on the module, heads within batch items:

    >>> weights = attention.attention.attention_weights
    >>> weights.shape
    torch.Size([10, 4, 6])
    >>> weights.view(2, 5, 4, 6)[1, 0, 0] > 0
    tensor([ True,  True, False, False, False, False])
    """

    def __init__(
        self, num_hiddens: int, num_heads: int, dropout: float, bias: bool = False
    ) -> None:
        super().__init__()
        check_heads("num_hiddens", num_hiddens, "num_heads", num_heads)
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
        # A lazy layer infers its input width in the first forward pass, which also
        # initializes its weights, with the random seed that is set then. Before it they
        # cannot be counted or inspected, though an optimizer may already hold them.
        self.W_q = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_k = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_v = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_o = nn.LazyLinear(num_hiddens, bias=bias)

    def forward(
        self,
        queries: Tensor,  # [batch_size, q_len, ...]
        keys: Tensor,  # [batch_size, k_len, ...]
        values: Tensor,  # [batch_size, k_len, ...]
        valid_lens: Tensor | None,
    ) -> Tensor:
        r"""Attend from `queries` to `keys`, and return the mean of `values`, projected.

        The inputs may have any width; the result is `num_hiddens` wide. `valid_lens` is
        `None`, `[batch_size]` or `[batch_size, q_len]`: how many keys, from the first
        on, may be attended to. Where it is 0, the context is zero and the output is the
        output bias; fully masked keys may hold NaN.

        Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape, device or
        length, before any work is done.

        Padding cannot change an output, with one length per item or one per query:

        >>> mha = MultiHeadAttention(6, 2, dropout=0).eval()
        >>> X, lens = torch.randn(2, 5, 7), torch.tensor([3, 5])
        >>> before = mha(X, X, X, lens)
        >>> X[0, 3:] = torch.nan
        >>> after = mha(X, X, X, lens[:, None].expand(2, 5))
        >>> torch.equal(before[0, :3], after[0, :3])
        True
        """
        # The width of a layer that is still lazy is 0, and any width fits. A compiler
        # must not use its weight, or the graph would refer to the uninitialized one.
        weight = queries if torch.compiler.is_compiling() else self.W_q.weight
        widths = [linear.in_features for linear in (self.W_q, self.W_k, self.W_v)]
        check_inputs("the module", weight, widths, queries, keys, values)
        if valid_lens is not None:
            check_valid_lens(valid_lens, queries, keys.shape[1])

            # Padding may hold NaN, and a weight of zero does not remove it: zero times
            # NaN is NaN. So keys that no query may attend to are set to zero.
            lens = lens_by_query(valid_lens).unsqueeze(-1)  # [batch_size, ..., 1]
            position = torch.arange(keys.shape[1], device=keys.device)  # [k_len]
            hidden = (position >= lens).all(dim=1)  # [batch_size, k_len]
            keys = keys.masked_fill(hidden[..., None], 0)
            values = values.masked_fill(hidden[..., None], 0)

            # The heads of item 0 come first in the flattened batch, then those of item
            # 1. So for three heads, lengths [3, 2] must become [3, 3, 3, 2, 2, 2].
            # `repeat` makes them [3, 2, 3, 2, 3, 2], which fits as well, and is wrong.
            valid_lens = valid_lens.repeat_interleave(
                self.num_heads, dim=0
            )  # [batch_size * num_heads, ...]

        # Project each token to a query, a key and a value. From here to
        # `transpose_output`, heads are part of the batch.
        queries = self.transpose_qkv(self.W_q(queries))  # [..., q_len, d_k]
        keys = self.transpose_qkv(self.W_k(keys))  # [..., k_len, d_k]
        values = self.transpose_qkv(self.W_v(values))  # [..., k_len, d_k]
        context = self.attention(queries, keys, values, valid_lens)  # [..., q_len, d_k]

        # Concatenate the heads, then mix them with the output projection.
        context = self.transpose_output(context)  # [batch_size, q_len, num_hiddens]
        output: Tensor = self.W_o(context)  # [batch_size, q_len, num_hiddens]
        return output

    def transpose_qkv(self, X: Tensor) -> Tensor:  # noqa: N803
        r"""Split the last axis into heads, and flatten them into the batch.

        >>> mha = MultiHeadAttention(10, 5, dropout=0)
        >>> mha.transpose_qkv(torch.randn(2, 3, 10)).shape
        torch.Size([10, 3, 2])
        """
        # Heads must be beside the batch before both can become one axis. This costs a
        # copy, since in memory heads are beside their components.
        batch_size, seq_len, width = X.shape
        split = (batch_size, seq_len, self.num_heads, width // self.num_heads)
        heads = X.view(split)  # [batch_size, seq_len, num_heads, d_k]
        return heads.transpose(1, 2).flatten(0, 1)  # [..., seq_len, d_k]

    def transpose_output(self, X: Tensor) -> Tensor:  # noqa: N803
        r"""Undo `transpose_qkv`: split heads from the batch, and concatenate them.

        >>> mha = MultiHeadAttention(10, 5, dropout=0)
        >>> X = torch.randn(2, 3, 10)
        >>> flattened = mha.transpose_qkv(X)
        >>> torch.equal(mha.transpose_output(flattened), X)
        True
        """
        # Sizes are spelt out because a $-1$ is ambiguous in an empty batch.
        rows, seq_len, d_k = X.shape
        split = (rows // self.num_heads, self.num_heads, seq_len, d_k)
        x = X.view(split)  # [batch_size, num_heads, seq_len, d_k]
        return x.transpose(1, 2).flatten(2)  # [batch_size, seq_len, num_heads * d_k]


# region Input checks


def check_inputs(
    owner: str,
    weight: Tensor,
    widths: Sequence[int],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Refuse inputs of another dtype or device than `weight`, or unlike one another.

    A width of 0 stands for any: that of a lazy layer before its first forward.
    """
    # Only floating-point numbers have a softmax; float8 has no arithmetic.
    has_softmax = weight.is_floating_point() and weight.dtype.itemsize > 1
    dtype = weight.dtype if has_softmax else torch.float32
    inputs = {"queries": queries, "keys": keys, "values": values}
    for (name, x), width in zip(inputs.items(), widths, strict=True):
        check_tensor(name, x, weight.device, owner=owner)
        if not fits_dtype(x, dtype):
            way_out = f"use `{name}.to({dtype})`"
            raise TypeError(f"`{name}` is {x.dtype}, not {dtype}; {way_out}")
        if x.dim() != 3 or not x.shape[-1] or width not in (0, x.shape[-1]):
            last = f"width (={width})" if width else "width"
            raise ValueError(
                f"`{name}` has shape {list(x.shape)}, not [batch_size, seq_len, "
                f"{last}]; a lone sequence needs `{name}.unsqueeze(0)`"
            )
        if x.shape[0] != queries.shape[0]:
            raise ValueError(
                f"`{name}` has batch size {x.shape[0]}, but `queries` has "
                f"{queries.shape[0]}; share one sequence with `{name}.expand`"
            )
    k_len, v_len = keys.shape[1], values.shape[1]
    if k_len != v_len:
        raise ValueError(f"`values` are {v_len} long, `keys` {k_len}; make them equal")


def check_valid_lens(valid_lens: Tensor, queries: Tensor, k_len: int) -> None:
    """Refuse lengths of another dtype or shape, or beyond the keys."""
    check_tensor("valid_lens", valid_lens, queries.device, owner="`queries`")
    check_lengths("valid_lens", valid_lens, k_len)
    batch_size, q_len = queries.shape[:2]
    if valid_lens.shape not in ((batch_size,), (batch_size, q_len)):
        raise ValueError(
            f"`valid_lens` has shape {list(valid_lens.shape)}, not [batch_size] or "
            f"[batch_size, q_len] = [{batch_size}] or [{batch_size}, {q_len}]"
        )


# endregion
