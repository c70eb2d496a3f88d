r"""# Multi-head attention, batch first

Most code lays a batch out as `[batch_size, seq_len, d_model]`. Here the heads become an
axis of their own beside the batch, and what follows is a product of matrices, one for
each batch item $b$ and head $h$:

$$\operatorname{softmax}\left(\frac{Q_{bh}\, K_{bh}^\top}{\sqrt{d_k}}\right) V_{bh}$$

The weights come back beside the output, to be drawn. The fast kernels cannot give them:
they never hold a whole row of weights at once.

The traps of this form are silent ones. Queries and keys of different batch sizes can
still fit after a reshape; a mask of three axes may mean one for each item, or one for
each head; and an additive mask, read as 0 and 1, does the opposite of what it says. All
of these are refused here, each with the way out.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.2, with the names (`Wq`, `Wk`, `Wv`, `Wo`, `n_heads`) of a published
walk-through that follows real sentences through a transformer. It is the *original* of
the notes below, and its checkpoints load here.
"""

# Nothing but PyTorch and the standard library: this file runs wherever it is put.
import math

import torch
from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention over `[batch_size, seq_len, d_model]`.

    Each of `n_heads` heads is `d_model / n_heads` wide; `dropout` acts on the attention
    weights while training. Raises `ValueError` where `n_heads` does not divide
    `d_model`, or a setting is out of range. Source: Vaswani et al. 2017, section 3.2.2.

    Three queries read from five keys, the second item's from four and one of filler:

    >>> mha = MultiHeadAttention(d_model=77, n_heads=7)
    >>> query = torch.randn(2, 3, 77)
    >>> memory = torch.randn(2, 5, 77)
    >>> words = torch.arange(5) < torch.tensor([[5], [4]])
    >>> mask = words[:, None, None, :]
    >>> output, attn_probs = mha(query, memory, memory, mask)
    >>> output.shape, attn_probs.shape
    (torch.Size([2, 3, 77]), torch.Size([2, 7, 3, 5]))

    What is returned was taken before dropout, so that rows sum to 1 in training too:

    >>> attn_probs.sum(dim=-1).allclose(torch.ones(2, 7, 3))
    True
    """

    def __init__(
        self, d_model: int = 512, n_heads: int = 8, dropout: float = 0.1
    ) -> None:
        r"""Build the four linear maps, which are all that is learned."""
        super().__init__()
        check_settings(d_model, n_heads, dropout)
        self.d_model = d_model
        self.n_heads = n_heads
        self.d_key = d_model // n_heads
        # The matrices of all heads, stacked: rows $h\,d_k$ to $(h+1)\,d_k - 1$ belong
        # to head $h$. (A linear layer computes $x W^\top + b$: a row is an output.)
        self.Wq = nn.Linear(d_model, d_model)
        self.Wk = nn.Linear(d_model, d_model)
        self.Wv = nn.Linear(d_model, d_model)
        self.Wo = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        r"""Read from `value` where `query` meets `key`; return the weights as well.

        `query` is `[batch_size, q_len, d_model]`, `key` and `value` are `[batch_size,
        k_len, d_model]`. The output has the shape of `query`, the weights have
        `[batch_size, n_heads, q_len, k_len]`.

        `mask` is bool, or integer 0/1; True means that this query may attend to this
        key. It is `[q_len, k_len]`, or has four axes: `[batch_size or 1, n_heads or 1,
        q_len or 1, k_len]`. A query that may attend to nothing has weights of zero, and
        its output is the output bias; a key that none may read may hold NaN.

        Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape or device,
        before any work is done.

        Causal and padding masks combine by broadcasting. The second sentence here has
        two words, and one of filler:

        >>> mha = MultiHeadAttention(6, n_heads=2).eval()
        >>> x = torch.randn(2, 3, 6)
        >>> causal = torch.ones(3, 3).tril().bool()
        >>> words = torch.arange(3) < torch.tensor([[3], [2]])
        >>> mask = causal & words[:, None, None, :]
        >>> _, attn_probs = mha(x, x, x, mask)
        >>> (attn_probs[1, 0] > 0).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 1, 0]], dtype=torch.int32)
        """
        check_inputs(self.Wo.weight, query, key, value)
        if mask is not None:
            check_mask(mask, query, key, self.n_heads)
            mask = mask.bool() if mask.dim() == 4 else mask.bool()[None, None]
            # Zero times NaN is NaN: what no query may read is cleared, not just unread.
            unread = ~mask.any(dim=(1, 2)).unsqueeze(-1)  # [batch_size, k_len, 1]
            key, value = key.masked_fill(unread, 0), value.masked_fill(unread, 0)

        q = self.split(self.Wq(query))  # [batch_size, n_heads, q_len, d_key]
        k = self.split(self.Wk(key))  # [batch_size, n_heads, k_len, d_key]
        v = self.split(self.Wv(value))  # [batch_size, n_heads, k_len, d_key]

        # The original scales the scores. Scaling the query instead is the same in exact
        # arithmetic, and lets $q \cdot k$ grow $\sqrt{d_k}$ times larger before it
        # passes 65,504, where float16 ends.
        q = q / math.sqrt(self.d_key)
        scores = q @ k.mT  # [batch_size, n_heads, q_len, k_len]

        # Dropout acts on the weights that are used, not on those that are returned: in
        # training too, their rows sum to 1, and a picture of them has no holes.
        attn_probs = masked_softmax(scores, mask)  # [batch_size, n_heads, q_len, k_len]
        context = self.dropout(attn_probs) @ v  # [batch_size, n_heads, q_len, d_key]

        # Heads go back beside their components before both are joined. A reshape alone
        # would give the right shape too, and mix up positions and heads.
        context = context.transpose(1, 2).flatten(-2)  # [batch_size, q_len, d_model]
        return self.Wo(context), attn_probs

    def split(self, x: Tensor) -> Tensor:
        r"""Split the last axis into heads, and bring them beside the batch.

        No number moves: both steps are views.

        >>> mha = MultiHeadAttention(d_model=10, n_heads=5)
        >>> mha.split(torch.randn(2, 3, 10)).shape
        torch.Size([2, 5, 3, 2])
        """
        batch_size, seq_len, _ = x.shape
        split = (batch_size, seq_len, self.n_heads, self.d_key)
        x = x.view(split)  # [batch_size, seq_len, n_heads, d_key]
        return x.transpose(1, 2)  # [batch_size, n_heads, seq_len, d_key]


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    r"""Softmax over the last axis, in which a row without keys is all zeros.

    >>> scores = torch.zeros(1, 1, 2, 4)
    >>> mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    >>> masked_softmax(scores, mask.bool()).squeeze()
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.0000, 0.0000]])
    """
    if mask is None:
        return scores.softmax(dim=-1)
    # The original fills with $-10^{10}$, which float16 cannot hold, and which makes a
    # row without keys uniform: it reads the filler. Infinity exists in every dtype, but
    # makes NaN of such a row, forward and backward. So the row is filled with 0 on the
    # way in, and again on the way out.
    empty = ~mask.any(dim=-1, keepdim=True)  # [..., 1]
    scores = scores.masked_fill(~mask, -math.inf).masked_fill(empty, 0)
    return scores.softmax(dim=-1).masked_fill(empty, 0)


def check_settings(d_model: int, n_heads: int, dropout: float) -> None:
    """Refuse settings that do not fit one another, and name the nearest that do."""
    for name, size in (("d_model", d_model), ("n_heads", n_heads)):
        if type(size) is not int or size < 1:
            raise ValueError(f"`{name}` (={size!r}) must be an int from 1 up")
    if d_model % n_heads:
        fits = [n for n in (*range(1, 4097), d_model) if d_model % n == 0]
        near = [n for n in fits if n < n_heads][-1:]
        near += [n for n in fits if n > n_heads][:1]
        raise ValueError(
            f"`d_model` (={d_model}) must be divisible by `n_heads` (={n_heads}); "
            f"{' and '.join(map(str, near))} would do"
        )
    if type(dropout) not in (int, float) or not 0 <= dropout <= 1:
        raise ValueError(f"`dropout` (={dropout!r}) must lie between 0 and 1")


def check_tensor(name: str, x: Tensor, device: torch.device) -> None:
    """Refuse what is no dense tensor, or lies on another device than the module."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but is a {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise TypeError(f"`{name}` is sparse, nested or quantised; pass a dense one")
    if x.device != device:
        where = f"`{name}` is on {x.device}, the module on {device}"
        raise ValueError(f"{where}; use `{name}.to({str(device)!r})`")


def check_inputs(weight: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse inputs that do not fit the module's `weight`, or one another."""
    dtype, d_model = weight.dtype, weight.shape[-1]
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, weight.device)
        # The original reads a lone sequence as many sequences of one word each.
        if x.dim() != 3 or x.shape[-1] != d_model:
            raise ValueError(
                f"`{name}` has shape {list(x.shape)}, not [batch_size, seq_len, "
                f"d_model (={d_model})]; a lone sequence needs `{name}.unsqueeze(0)`"
            )
        # Autocast makes its own peace between the dtypes that it casts.
        cast = x.is_floating_point() and torch.float64 not in (x.dtype, dtype)
        cast = cast and not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if x.dtype != dtype and not cast:
            way_out = f"use `{name}.to({dtype})`, or give the module its dtype"
            raise TypeError(f"`{name}` is {x.dtype}, the module {dtype}; {way_out}")
        # The original takes the batch size from the key, and lets four queries of five
        # words pass for two of ten.
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
    """Refuse a mask that would be read otherwise than it was meant."""
    check_tensor("mask", mask, query.device)
    # Read as 0/1, an additive mask is silently inverted: its 0 would forbid, and its
    # minus infinity allow.
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"`mask` is {mask.dtype}, not bool or integer 0/1 with 1 for 'may attend'; "
            f"use `mask.bool()` for 0 and 1, `masks.from_additive(mask)` for 0 and -inf"
        )
    (batch_size, q_len), k_len = query.shape[:2], key.shape[1]
    # With as many heads as batch items both readings fit, and only one was meant.
    if mask.dim() == 3:
        raise ValueError(
            f"`mask` has shape {list(mask.shape)}: one for each batch item, or each "
            f"head? Say the first with `mask.unsqueeze(1)`, else `mask.unsqueeze(0)`"
        )
    # An axis of size 1 says "the same for all"; but one key is one key, not all keys.
    full = (batch_size, n_heads, q_len, k_len)
    if mask.dim() == 2:
        fits = mask.shape == (q_len, k_len)
    else:
        fits = mask.dim() == 4 and mask.shape[-1] == k_len
        fits = fits and all(n in (1, m) for n, m in zip(mask.shape, full, strict=True))
    if not fits:
        raise ValueError(
            f"`mask` has shape {list(mask.shape)}, not [q_len, k_len] = [{q_len}, "
            f"{k_len}] or [batch_size or 1, n_heads or 1, q_len or 1, k_len] = "
            f"[{batch_size} or 1, {n_heads} or 1, {q_len} or 1, {k_len}]; a padding "
            f"mask [batch_size, k_len] needs `mask[:, None, None]`"
        )
    if mask.dtype == torch.bool or torch.compiler.is_compiling() or not mask.numel():
        return
    # Values can be read only where there are any: not on "meta", and not under `vmap`.
    try:
        low, high = (value.item() for value in mask.long().aminmax())
    except RuntimeError:
        return
    if low < 0 or high > 1:
        raise ValueError(f"`mask` holds {low} to {high}, not 0/1; write `mask == 1`")
