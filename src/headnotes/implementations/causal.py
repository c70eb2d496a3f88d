r"""# Causal attention, batch first

A language model predicts each token from those before it. So a position may read from
itself and from what is on its left, and never from its right: that is *causal*
self-attention. This is how most small GPTs write it: one class of about 47 lines, heads
split by `view` and `transpose`, and a triangular mask kept in a buffer.

The notes follow one input through it, line by line: 30 sequences of 50 tokens, each
token 512 numbers, $(30, 50, 512)$, with `d_out=512` in 8 heads of width 64.

Source: [Build a Large Language Model (From
Scratch)](https://github.com/rasbt/LLMs-from-scratch), Raschka 2024, section 3.6.2,
`MultiHeadAttention`; its checkpoints load here. What is corrected: the mask is bool
and stays out of checkpoints, a text that is too long is refused in words, a
`context_length` of 1 does not leak, and float16 overflows later.
"""

# Nothing but PyTorch and the standard library: this file runs wherever it is put.
import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    r"""Causal multi-head self-attention: `[batch_size, seq_len, d_in]` to `[…, d_out]`.

    `d_out` is the width of **all** heads together, so each is `d_out / num_heads` wide.
    `context_length`, elsewhere called `block_size`, is the longest `seq_len` that will
    be accepted; `dropout` acts on the attention weights while training.

    Raises `ValueError` where `num_heads` does not divide `d_out`, or a setting is out
    of range. Source: Raschka 2024, section 3.6.2.

    >>> mha = MultiHeadAttention(
    ...     d_in=512, d_out=512, context_length=50,
    ...     dropout=0.1, num_heads=8
    ... )
    >>> mha(torch.randn(30, 50, 512)).shape
    torch.Size([30, 50, 512])

    Two heads of width 1, on the first two tokens of the book's sentence. What follows
    them cannot change these numbers:

    >>> x = torch.tensor([[[0.43, 0.15, 0.89],
    ...                    [0.55, 0.87, 0.66]]])
    >>> _ = torch.manual_seed(123)
    >>> mha = MultiHeadAttention(3, 2, 6, 0.0, 2)
    >>> mha(x).detach()
    tensor([[[0.3190, 0.4858],
             [0.2943, 0.3897]]])

    Indeed, whatever comes last, the tokens before it do not notice:

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
        r"""Build four linear maps, which are all that is learned, and the mask."""
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
        # Heads do not see one another until here, where their results are mixed. This
        # map has a bias, whatever `qkv_bias` says.
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)

        # True means *blocked*: ones strictly above the diagonal, zeros on it and below,
        # for a token may always read itself. No row is ever empty. A buffer moves with
        # the module and is not trained; as bool it takes 1 MiB at a length of 1,024,
        # where the original's float32 takes 4.
        pairs = (context_length, context_length)
        mask = torch.full(pairs, True).triu(1)  # [context_length, context_length]
        # It follows from one number, so no checkpoint needs it. The original stores it,
        # and then a checkpoint fits one `context_length` only. Here a stored one is
        # passed over.
        self.register_buffer("mask", mask, persistent=False)
        keep_out_of_checkpoints(self)

    def forward(self, x: Tensor) -> Tensor:
        r"""Let each token of `x` read from itself and from the tokens before it.

        `x` is `[batch_size, seq_len, d_in]`, the result `[batch_size, seq_len, d_out]`.
        What the mask blocks must still be finite: zero times NaN is NaN.

        Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape or device,
        or for more than `context_length` tokens, before any work is done.
        """
        check_input(x, self.W_query, self.context_length)
        batch_size, seq_len, _ = x.shape

        # Ask, be compared, be read: three views of each token, each $(30, 50, 512)$.
        # They are as wide as `x` only because `d_out` equals `d_in` here.
        queries = self.W_query(x)  # [batch_size, seq_len, d_out]
        keys = self.W_key(x)  # [batch_size, seq_len, d_out]
        values = self.W_value(x)  # [batch_size, seq_len, d_out]

        # Cut the last axis into heads: $512 = 8 \cdot 64$, so $(30, 50, 8, 64)$. Heads
        # are contiguous blocks of it, hence this is a view and nothing is copied.
        split = (batch_size, seq_len, self.num_heads, self.head_dim)
        queries = queries.view(split)  # [batch_size, seq_len, num_heads, head_dim]
        keys = keys.view(split)  # [batch_size, seq_len, num_heads, head_dim]
        values = values.view(split)  # [batch_size, seq_len, num_heads, head_dim]

        # The product `@` works on the last two axes and repeats over all others. Heads
        # must be among the others: $(30, 8, 50, 64)$. Only strides change, so the
        # three are no longer contiguous. (To `view` as this shape directly would fit,
        # and would mix up tokens and heads.)
        queries = queries.transpose(1, 2)  # [batch_size, num_heads, seq_len, head_dim]
        keys = keys.transpose(1, 2)  # [batch_size, num_heads, seq_len, head_dim]
        values = values.transpose(1, 2)  # [batch_size, num_heads, seq_len, head_dim]

        # Each query with each key, $(30, 8, 50, 64)$ times $(30, 8, 64, 50)$, gives
        # $(30, 8, 50, 50)$. The original divides by $\sqrt{64}$ after masking; to scale
        # the query before is the same, and keeps float16 from overflowing so soon.
        queries = queries / math.sqrt(self.head_dim)
        scores = queries @ keys.mT  # [batch_size, num_heads, seq_len, seq_len]

        # A corner of the mask, $(50, 50)$, broadcasts over all sequences and heads.
        # Minus infinity becomes a weight of exactly zero.
        future = self.mask[:seq_len, :seq_len]  # [seq_len, seq_len]
        scores = scores.masked_fill(future, -math.inf)
        weights = scores.softmax(dim=-1)  # [batch_size, num_heads, seq_len, seq_len]

        # Rows sum to 1 up to here. In training, dropout then zeroes some weights and
        # divides the others by $1 - p$, which keeps the mean. In each head the first
        # token has but one weight: with probability $p$ it reads nothing there.
        weights = self.dropout(weights)

        # What is read: $(30, 8, 50, 50)$ times $(30, 8, 50, 64)$ is $(30, 8, 50, 64)$.
        # The transpose puts tokens before heads again: $(30, 50, 8, 64)$.
        context = weights @ values  # [batch_size, num_heads, seq_len, head_dim]
        context = context.transpose(1, 2)  # [batch_size, seq_len, num_heads, head_dim]

        # Side by side, the heads are $(30, 50, 512)$ again. After the transpose this
        # costs a copy, which `view` alone would refuse to make. Then they are mixed.
        context = context.flatten(2)  # [batch_size, seq_len, d_out]
        output: Tensor = self.out_proj(context)  # [batch_size, seq_len, d_out]
        return output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # All of `.to`, `.half`, `.to_empty` pass here.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        redraw_mask(self)
        return self


def keep_out_of_checkpoints(module: Any) -> None:
    """Let `module` read no mask from a checkpoint, and need none from it."""
    module.register_load_state_dict_pre_hook(drop_stored_mask)
    module.register_load_state_dict_post_hook(redraw_mask)


def drop_stored_mask(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Pass over the mask that an original checkpoint holds, whatever its size."""
    state_dict.pop(prefix + "mask", None)


def redraw_mask(module: MultiHeadAttention, *_: Any) -> None:
    """Draw the mask again where one may have been lost.

    A module built on "meta" has none. `load_state_dict` brings none, and `to_empty`
    whatever lay in memory: left so, it could let the future through.
    """
    if module.mask.is_meta:
        device = module.W_query.weight.device
        module.mask = torch.empty_like(module.mask, device=device)
    module.mask.fill_(True).triu_(1)


def check_settings(
    d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int
) -> None:
    """Refuse settings that do not fit one another, and name the nearest that do."""
    sizes = {"d_in": d_in, "d_out": d_out, "context_length": context_length}
    for name, size in {**sizes, "num_heads": num_heads}.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"`{name}` (={size!r}) must be an int from 1 up")
    if d_out % num_heads:
        fits = [n for n in (*range(1, 4097), d_out) if d_out % n == 0]
        near = [n for n in fits if n < num_heads][-1:]
        near += [n for n in fits if n > num_heads][:1]
        raise ValueError(
            f"`d_out` (={d_out}) must be divisible by `num_heads` (={num_heads}); "
            f"{' and '.join(map(str, near))} would do"
        )
    if type(dropout) not in (int, float) or not 0 <= dropout <= 1:
        raise ValueError(f"`dropout` (={dropout!r}) must lie between 0 and 1")


def check_input(x: Tensor, linear: nn.Linear, context_length: int) -> None:
    """Refuse an input that does not fit the module."""
    dtype, device, d_in = linear.weight.dtype, linear.weight.device, linear.in_features
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` must be a tensor, but is a {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise TypeError("`x` is sparse, nested or quantised; pass a dense one")
    if x.device != device:
        where = f"`x` is on {x.device}, the module on {device}"
        raise ValueError(f"{where}; use `x.to({str(device)!r})`")
    if x.dim() != 3 or x.shape[2] != d_in:
        raise ValueError(
            f"`x` has shape {list(x.shape)}, not [batch_size, seq_len, d_in (={d_in})]"
            f"; a lone sequence needs `x.unsqueeze(0)`"
        )
    # Autocast makes its own peace between the dtypes that it casts.
    cast = x.is_floating_point() and torch.float64 not in (x.dtype, dtype)
    cast = cast and not x.is_meta and torch.is_autocast_enabled(device.type)
    if x.dtype != dtype and not cast:
        way_out = f"use `x.to({dtype})`, or give the module its dtype"
        raise TypeError(f"`x` is {x.dtype}, the module {dtype}; {way_out}")
    # The original leaves this to broadcasting. It fails there without a word on length,
    # and at a `context_length` of 1 it does not fail: the mask, a lone zero, stretches
    # over all scores and blocks nothing.
    if x.shape[1] > context_length:
        raise ValueError(
            f"`x` has {x.shape[1]} tokens, more than `context_length` "
            f"(={context_length}); keep the last with `x[:, -{context_length}:]`"
        )
