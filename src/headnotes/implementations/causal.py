r"""# Causal attention, batch first

This module is causal multi-head self-attention as most small GPTs implement it: one
class, heads split by `view` and `transpose`, and a triangular mask in a buffer. A
language model predicts each token from those before it. So a token may attend to itself
and to the tokens before it, and never to those after it: that is what *causal* means.

The notes follow one input through the class, line by line: 30 sequences of 50 tokens,
each token a vector of 512 numbers, $(30, 50, 512)$, with `d_out=512` in 8 heads of
width 64.

Source: [Build a Large Language Model (From
Scratch)](https://github.com/rasbt/LLMs-from-scratch), Raschka 2024, section 3.6.2,
`MultiHeadAttention`. That is the *original* of the notes below, and its checkpoints
load here. What is corrected: the mask is bool and is not stored in checkpoints, a
sequence that is too long is refused with a message, a `context_length` of 1 does not
leak the future, and float16 overflows later.
"""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from headnotes.checks import (
    check_dropout,
    check_dtype,
    check_heads,
    check_sizes,
    check_tensor,
)


class MultiHeadAttention(nn.Module):
    r"""Causal multi-head self-attention: `[batch_size, seq_len, d_in]` to `[…, d_out]`.

    `d_out` is the width of **all** heads together, so each is `d_out / num_heads` wide.
    `context_length`, elsewhere called `block_size`, is the largest `seq_len`. `dropout`
    acts on the attention weights during training.

    Raises `ValueError` where `num_heads` does not divide `d_out`, or a setting is out
    of range. Source: Raschka 2024, section 3.6.2.

    >>> mha = MultiHeadAttention(
    ...     d_in=512, d_out=512, context_length=50,
    ...     dropout=0.1, num_heads=8
    ... )
    >>> mha(torch.randn(30, 50, 512)).shape
    torch.Size([30, 50, 512])

    Two heads of width 1, on the first two tokens of the book's sentence. The tokens
    after them cannot change these numbers:

    >>> x = torch.tensor([[[0.43, 0.15, 0.89],
    ...                    [0.55, 0.87, 0.66]]])
    >>> _ = torch.manual_seed(123)
    >>> mha = MultiHeadAttention(3, 2, 6, 0.0, 2)
    >>> mha(x).detach()
    tensor([[[0.3190, 0.4858],
             [0.2943, 0.3897]]])

    A change of the last token changes no output before it:

    >>> x = torch.randn(1, 4, 3)
    >>> y = mha(x)
    >>> x[:, -1] += 100
    >>> (mha(x) == y).all(dim=2)
    tensor([[ True,  True,  True, False]])
    """

    mask: Tensor

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        check_settings(d_in, d_out, context_length, dropout, num_heads)
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads  # 512 / 8 = 64
        self.context_length = context_length

        # Each of the three is one matrix for all heads: rows $64\,h$ to $64\,h + 63$
        # belong to head $h$. The widths in and out may differ.
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        # Heads are independent of one another up to here, where this map mixes their
        # results. It always has a bias; `qkv_bias` does not apply to it.
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)

        # True means *hidden*: strictly above the diagonal. A token may always attend to
        # itself, so no row is fully masked. At a length of 1,024 it takes 1 MiB; the
        # original's float32 takes 4.
        pairs = (context_length, context_length)
        mask = torch.full(pairs, True).triu(1)  # [context_length, context_length]

        # A buffer moves with the module and is not trained. The original also stores it
        # in checkpoints, which then fit one `context_length` only. Here a stored mask
        # is ignored.
        self.register_buffer("mask", mask, persistent=False)
        exclude_mask_from_checkpoints(self)

    def forward(self, x: Tensor) -> Tensor:
        r"""Attend from each token of `x` to itself and to the tokens before it.

        `x` is `[batch_size, seq_len, d_in]`, the result `[batch_size, seq_len, d_out]`.

        Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape or device,
        or for more than `context_length` tokens, before any work is done. Hidden tokens
        must still be finite: zero times NaN is NaN.
        """
        check_input(x, self.W_query.weight, self.context_length)
        batch_size, seq_len, _ = x.shape

        # Three projections of each token: its query, its key and its value, each
        # $(30, 50, 512)$. They are as wide as `x` only because `d_out` equals `d_in`.
        queries = self.W_query(x)  # [batch_size, seq_len, d_out]
        keys = self.W_key(x)  # [batch_size, seq_len, d_out]
        values = self.W_value(x)  # [batch_size, seq_len, d_out]

        # Split the last axis into heads: $512 = 8 \cdot 64$, so $(30, 50, 8, 64)$.
        # Heads are contiguous blocks of it, hence this is a view: nothing is copied.
        split = (batch_size, seq_len, self.num_heads, self.head_dim)
        queries = queries.view(split)  # [batch_size, seq_len, num_heads, head_dim]
        keys = keys.view(split)  # [batch_size, seq_len, num_heads, head_dim]
        values = values.view(split)  # [batch_size, seq_len, num_heads, head_dim]

        # The product `@` multiplies the last two axes and is batched over all others.
        # Heads must be among the others: $(30, 8, 50, 64)$. Only strides change, so the
        # three are no longer contiguous. (A `view` as this shape would fit, but mix
        # tokens with heads.)
        queries = queries.transpose(1, 2)  # [batch_size, num_heads, seq_len, head_dim]
        keys = keys.transpose(1, 2)  # [batch_size, num_heads, seq_len, head_dim]
        values = values.transpose(1, 2)  # [batch_size, num_heads, seq_len, head_dim]

        # The dot product of each query with each key: $(30, 8, 50, 64)$ times
        # $(30, 8, 64, 50)$ is $(30, 8, 50, 50)$. The original divides by $\sqrt{64}$
        # after masking; scaling the query first lets float16 overflow later.
        queries = queries / math.sqrt(self.head_dim)
        scores = queries @ keys.mT  # [batch_size, num_heads, seq_len, seq_len]

        # A corner of the mask, $(50, 50)$, broadcasts over all sequences and heads.
        # Minus infinity becomes a weight of exactly zero.
        future = self.mask[:seq_len, :seq_len]  # [seq_len, seq_len]
        scores = scores.masked_fill(future, -math.inf)
        weights = scores.softmax(dim=-1)  # [batch_size, num_heads, seq_len, seq_len]

        # Rows sum to 1 up to here. During training, dropout sets some weights to zero
        # and divides the others by $1 - p$, which preserves their mean. (The first
        # token has one weight only: with probability $p$ its context is zero.)
        weights = self.dropout(weights)

        # The weighted mean of the values: $(30, 8, 50, 50)$ times $(30, 8, 50, 64)$ is
        # $(30, 8, 50, 64)$. Transposed, tokens come before heads: $(30, 50, 8, 64)$.
        context = weights @ values  # [batch_size, num_heads, seq_len, head_dim]
        context = context.transpose(1, 2)  # [batch_size, seq_len, num_heads, head_dim]

        # Concatenated, the heads are $(30, 50, 512)$ again. After the transpose this
        # costs a copy, which `view` would refuse to make. Then they are mixed.
        context = context.flatten(2)  # [batch_size, seq_len, d_out]
        output: Tensor = self.out_proj(context)  # [batch_size, seq_len, d_out]
        return output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `.to`, `.half` and `.to_empty` all call this.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        rebuild_mask(self)
        return self


def exclude_mask_from_checkpoints(module: Any) -> None:
    """Load `module` from checkpoints with a stored mask and from those without."""
    module.register_load_state_dict_pre_hook(drop_stored_mask)
    module.register_load_state_dict_post_hook(rebuild_mask)


def drop_stored_mask(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Ignore the mask that a checkpoint of the original holds, whatever its size."""
    state_dict.pop(prefix + "mask", None)


def rebuild_mask(module: Any, *_: Any) -> None:
    """Fill the mask again where its values may be lost.

    `to_empty` leaves uninitialized memory, which might let a token attend to the
    future; a module that is built on "meta" and then loaded has no values at all.
    """
    if module.mask.is_meta:
        device = module.W_query.weight.device
        module.mask = torch.empty_like(module.mask, device=device)
    module.mask.fill_(True).triu_(1)


# region Input checks


def check_settings(
    d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int
) -> None:
    """Refuse settings that are out of range, or do not fit one another."""
    check_sizes(d_in=d_in, context_length=context_length)
    check_heads("d_out", d_out, "num_heads", num_heads)
    check_dropout(dropout)


def check_input(x: Tensor, weight: Tensor, context_length: int | None = None) -> None:
    """Refuse an input that does not fit the `weight` of a projection, `[d_out, d_in]`.

    Without a `context_length`, `x` is a single sequence, and a batch is refused.
    """
    d_in = weight.shape[1]
    axes, way_out = "batch_size, seq_len", "a lone sequence needs `x.unsqueeze(0)`"
    if context_length is None:
        axes, way_out = "seq_len", "a batch needs `torch.vmap(module)(x)`"
    check_tensor("x", x, weight.device)
    if x.dim() != (2 if context_length is None else 3) or x.shape[-1] != d_in:
        shape = list(x.shape)
        raise ValueError(
            f"`x` has shape {shape}, not [{axes}, d_in (={d_in})]; {way_out}"
        )
    check_dtype("x", x, weight.dtype)
    # The original leaves this to broadcasting. It fails there with a message that does
    # not name the length, and at a `context_length` of 1 it does not fail: the mask, a
    # single False, broadcasts over all scores and hides nothing.
    if context_length is not None and x.shape[1] > context_length:
        raise ValueError(
            f"`x` has {x.shape[1]} tokens, more than `context_length` "
            f"(={context_length}); keep the last with `x[:, -{context_length}:]`"
        )


# endregion
