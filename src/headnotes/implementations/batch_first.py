r"""# Multi-head attention, batch first

This module is multi-head attention in the layout that most code uses, `[batch_size,
seq_len, d_model]`, with the attention weights as a second result. Heads become an axis
of their own beside the batch, and attention is a batched matrix product, one for each
batch item $b$ and head $h$:

$$\operatorname{softmax}\left(\frac{Q_{bh}\, K_{bh}^\top}{\sqrt{d_k}}\right) V_{bh}$$

The weights are returned for plots. Fused kernels cannot return them: they never hold a
whole row of weights at once.

The mistakes that this layout permits are silent. Queries and keys of different batch
sizes can still fit after a reshape; a mask of three axes may mean one for each batch
item, or one for each head; and an additive mask, converted to 0 and 1, is inverted. All
of these are refused here, each with the way out.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.2, with the names (`Wq`, `Wk`, `Wv`, `Wo`, `n_heads`) of a published
walk-through that follows real sentences through a transformer. It is the *original* of
the notes below, and its checkpoints load here.
"""

import math

import torch
from torch import Tensor, nn

from headnotes.checks import (
    check_dropout,
    check_dtype,
    check_heads,
    check_tensor,
    check_zero_one,
)


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention over `[batch_size, seq_len, d_model]`.

    Each of the `n_heads` heads is `d_model / n_heads` wide; `dropout` acts on the
    attention weights during training.

    Raises `ValueError` where `n_heads` does not divide `d_model`, or a setting is out
    of range. Source: Vaswani et al. 2017, section 3.2.2.

    Three queries attend to five keys, of which the second item's last is padding:

    >>> mha = MultiHeadAttention(d_model=77, n_heads=7)
    >>> query = torch.randn(2, 3, 77)
    >>> memory = torch.randn(2, 5, 77)
    >>> not_padding = torch.arange(5) < torch.tensor([[5], [4]])
    >>> mask = not_padding[:, None, None, :]
    >>> output, attn_probs = mha(query, memory, memory, mask)
    >>> output.shape, attn_probs.shape
    (torch.Size([2, 3, 77]), torch.Size([2, 7, 3, 5]))

    The weights are returned as before dropout, so their rows always sum to 1:

    >>> attn_probs.sum(dim=-1).allclose(torch.ones(2, 7, 3))
    True
    """

    def __init__(
        self, d_model: int = 512, n_heads: int = 8, dropout: float = 0.1
    ) -> None:
        super().__init__()
        check_heads("d_model", d_model, "n_heads", n_heads)
        check_dropout(dropout)
        self.d_model = d_model
        self.n_heads = n_heads
        self.d_key = d_model // n_heads
        # Three projections to queries, keys and values, and one to the output. Each
        # holds the matrices of all heads, stacked: rows $h\,d_k$ to $(h+1)\,d_k - 1$
        # belong to head $h$. (A linear layer computes $x W^\top + b$.)
        self.Wq = nn.Linear(d_model, d_model)
        self.Wk = nn.Linear(d_model, d_model)
        self.Wv = nn.Linear(d_model, d_model)
        self.Wo = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        query: Tensor,  # [batch_size, q_len, d_model]
        key: Tensor,  # [batch_size, k_len, d_model]
        value: Tensor,  # [batch_size, k_len, d_model]
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        r"""Attend from `query` to `key`; return the output and the attention weights.

        The output has the shape of `query`, the weights are `[batch_size, n_heads,
        q_len, k_len]`. `mask` is bool, or integer 0/1; True means that this query may
        attend to this key. It is `[q_len, k_len]`, or has four axes: `[batch_size or 1,
        n_heads or 1, q_len or 1, k_len]`. A fully masked row has weights of zero, and
        its output is the output bias; a fully masked key may hold NaN.

        Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape or device,
        before any work is done.

        Causal and padding masks combine by broadcasting. The second sequence here has
        two tokens, and one of padding:

        >>> mha = MultiHeadAttention(6, n_heads=2).eval()
        >>> x = torch.randn(2, 3, 6)
        >>> causal = torch.ones(3, 3).tril().bool()
        >>> not_padding = torch.arange(3) < torch.tensor([[3], [2]])
        >>> mask = causal & not_padding[:, None, None, :]
        >>> _, attn_probs = mha(x, x, x, mask)
        >>> (attn_probs[1, 0] > 0).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 1, 0]], dtype=torch.int32)
        """
        check_inputs(self.Wo.weight, query, key, value)

        # The mask gets axes of size 1 for batch and heads, where it has none.
        if mask is not None:
            check_mask(mask, query, key, self.n_heads)
            mask = mask.bool() if mask.dim() == 4 else mask.bool()[None, None]
            # Padding may hold NaN, and a weight of zero does not remove it: zero times
            # NaN is NaN. So keys that no query may attend to are set to zero.
            hidden = ~mask.any(dim=(1, 2)).unsqueeze(-1)  # [batch_size, k_len, 1]
            key = key.masked_fill(hidden, 0)
            value = value.masked_fill(hidden, 0)

        # Project each token to a query, a key and a value, and split them into heads.
        q = self.split(self.Wq(query))  # [batch_size, n_heads, q_len, d_key]
        k = self.split(self.Wk(key))  # [batch_size, n_heads, k_len, d_key]
        v = self.split(self.Wv(value))  # [batch_size, n_heads, k_len, d_key]

        # Scale, then take the dot product of each query with each key. The original
        # scales the scores, which is the same in exact arithmetic. But float16 ends at
        # 65,504, and unscaled scores are $\sqrt{d_k}$ times larger.
        q = q / math.sqrt(self.d_key)
        scores = q @ k.mT  # [batch_size, n_heads, q_len, k_len]

        # Mask, softmax over the keys, and the weighted sum of the values. Dropout acts
        # on the weights that multiply the values, not on those that are returned: their
        # rows sum to 1 during training too, and a plot shows no holes.
        attn_probs = masked_softmax(scores, mask)  # [batch_size, n_heads, q_len, k_len]
        context = self.dropout(attn_probs) @ v  # [batch_size, n_heads, q_len, d_key]

        # Concatenate the heads, then mix them with the output projection. Each head
        # first moves back beside its components: a reshape alone would give the right
        # shape too, but mix positions with heads.
        context = context.transpose(1, 2).flatten(-2)  # [batch_size, q_len, d_model]
        return self.Wo(context), attn_probs

    def split(self, x: Tensor) -> Tensor:
        r"""Split the last axis into heads, and move them beside the batch.

        Both steps are views; no memory is copied.

        >>> mha = MultiHeadAttention(d_model=10, n_heads=5)
        >>> mha.split(torch.randn(2, 3, 10)).shape
        torch.Size([2, 5, 3, 2])
        """
        batch_size, seq_len, _ = x.shape
        split = (batch_size, seq_len, self.n_heads, self.d_key)
        x = x.view(split)  # [batch_size, seq_len, n_heads, d_key]
        return x.transpose(1, 2)  # [batch_size, n_heads, seq_len, d_key]


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    r"""Softmax over the last axis, in which a fully masked row is all zeros.

    >>> scores = torch.zeros(1, 1, 2, 4)
    >>> mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    >>> masked_softmax(scores, mask.bool()).squeeze()
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.0000, 0.0000]])
    """
    if mask is None:
        return scores.softmax(dim=-1)

    # The original fills in $-10^{10}$, which float16 cannot hold, and which makes a
    # fully masked row uniform: it attends to the padding. Minus infinity exists in
    # every dtype, but makes such a row NaN, forward and backward. So the row is filled
    # with 0 before the softmax, and again after it.
    fully_masked = ~mask.any(dim=-1, keepdim=True)  # [..., 1]
    scores = scores.masked_fill(~mask, -torch.inf).masked_fill(fully_masked, 0)
    return scores.softmax(dim=-1).masked_fill(fully_masked, 0)


# region Input checks


def check_inputs(weight: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse inputs that do not fit the module's `weight`, or one another."""
    d_model = weight.shape[-1]
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, weight.device)
        # The original takes a lone sequence for many sequences of one token each.
        if x.dim() != 3 or x.shape[-1] != d_model:
            raise ValueError(
                f"`{name}` has shape {list(x.shape)}, not [batch_size, seq_len, "
                f"d_model (={d_model})]; a lone sequence needs `{name}.unsqueeze(0)`"
            )
        check_dtype(name, x, weight.dtype)
        # The original takes the batch size from the key, and accepts four queries of
        # five tokens as two of ten.
        if x.shape[0] != query.shape[0]:
            raise ValueError(
                f"`{name}` has batch size {x.shape[0]}, but `query` has "
                f"{query.shape[0]}; share one sequence with `{name}.expand`, turn "
                f"sequence-first data with `{name}.transpose(0, 1)`"
            )
    if key.shape[1] != value.shape[1]:
        v_len, k_len = value.shape[1], key.shape[1]
        raise ValueError(f"`value` has length {v_len}, `key` {k_len}; make them equal")


def check_mask(mask: Tensor, query: Tensor, key: Tensor, n_heads: int) -> None:
    """Refuse a mask of another convention, or of other sizes."""
    check_tensor("mask", mask, query.device)
    check_zero_one("mask", mask)
    batch_size, q_len = query.shape[:2]
    k_len = key.shape[1]
    # With as many heads as batch items, both meanings of three axes would fit.
    if mask.dim() == 3:
        raise ValueError(
            f"`mask` has shape {list(mask.shape)}: one for each batch item, or each "
            f"head? Say the first with `mask.unsqueeze(1)`, else `mask.unsqueeze(0)`"
        )
    # An axis of size 1 broadcasts, except for the keys: a mask with one key would
    # silently allow or forbid all of them.
    full = (batch_size, n_heads, q_len, k_len)
    if mask.dim() == 2:
        fits = mask.shape == (q_len, k_len)
    else:
        fits = (
            mask.dim() == 4
            and mask.shape[-1] == k_len
            and all(n in (1, size) for n, size in zip(mask.shape, full, strict=True))
        )
    if not fits:
        raise ValueError(
            f"`mask` has shape {list(mask.shape)}, not [q_len, k_len] = [{q_len}, "
            f"{k_len}] or [batch_size or 1, n_heads or 1, q_len or 1, k_len] = "
            f"[{batch_size} or 1, {n_heads} or 1, {q_len} or 1, {k_len}]; a padding "
            f"mask [batch_size, k_len] needs `mask[:, None, None]`"
        )


# endregion
