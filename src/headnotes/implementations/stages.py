r"""# Self-attention in four stages

This module builds causal multi-head attention in four steps, for readers who meet it
for the first time. Each class adds something to the one before, in a paragraph that
begins **New here**:

1. `SelfAttention_v1`: three matrices, and the whole idea;
2. `SelfAttention_v2`: the same with linear layers;
3. `CausalAttention`: batches, a causal mask, dropout;
4. `MultiHeadAttentionWrapper`: several heads, concatenated.

The fifth stage, which computes all heads in one product, is [causal attention, batch
first](causal.md).

Source: [Build a Large Language Model (From
Scratch)](https://github.com/rasbt/LLMs-from-scratch), Raschka 2024, sections 3.4 to
3.6.1, the *original* of the notes below. Class and parameter names are those of the
book; its checkpoints load here, and its seeds give its numbers.
"""

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from headnotes.checks import check_dropout, check_sizes
from headnotes.implementations.causal import (
    check_input,
    exclude_mask_from_checkpoints,
    rebuild_mask,
)


class SelfAttention_v1(nn.Module):  # noqa: N801
    r"""Stage 1: each token of one sequence attends to all of them.

    **New here:** three learned matrices. Without them, a token's vector is its query,
    its key and its value at the same time. With them, these are three projections,
    $Q = X W_Q$, $K = X W_K$ and $V = X W_V$.

    Raises `ValueError` for a size below 1. Source: Raschka 2024, section 3.4.2.

    "Your journey starts with one step", each token a vector of three numbers:

    >>> x = torch.tensor(
    ...     [[0.43, 0.15, 0.89], [0.55, 0.87, 0.66],
    ...      [0.57, 0.85, 0.64], [0.22, 0.58, 0.33],
    ...      [0.77, 0.25, 0.10], [0.05, 0.80, 0.55]]
    ... )
    >>> _ = torch.manual_seed(123)
    >>> SelfAttention_v1(d_in=3, d_out=2)(x)[:2].detach()
    tensor([[0.2996, 0.8053],
            [0.3061, 0.8210]])
    """

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        check_sizes(d_in=d_in, d_out=d_out)
        # Uniform on $[0, 1)$, so that the numbers are easy to follow by hand. But then
        # all scores of positive inputs are positive, and all rows of weights are nearly
        # the same.
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))  # [d_in, d_out]
        self.W_key = nn.Parameter(torch.rand(d_in, d_out))  # [d_in, d_out]
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))  # [d_in, d_out]

    def forward(self, x: Tensor) -> Tensor:
        r"""Attend within `x`: `[seq_len, d_in]` becomes `[seq_len, d_out]`.

        Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape or device.
        A batch is refused: of a tensor with three axes, `keys.T` would reverse all
        three, and the original silently computes something else wherever the sizes
        happen to agree.

        >>> attention = SelfAttention_v1(3, 2)
        >>> torch.vmap(attention)(torch.rand(5, 6, 3)).shape
        torch.Size([5, 6, 2])
        """
        check_input(x, self.W_query.T)

        # Project: each token gets a query, a key and a value.
        queries = x @ self.W_query  # [seq_len, d_out]
        keys = x @ self.W_key  # [seq_len, d_out]
        values = x @ self.W_value  # [seq_len, d_out]

        # Scale: without this division, the softmax is almost one-hot where `d_out` is
        # large. (The original divides the scores, which may overflow in float16.)
        queries = queries / math.sqrt(keys.shape[-1])

        # Row $i$ holds the scores of token $i$ with all tokens, itself among them.
        scores = queries @ keys.T  # [seq_len, seq_len]

        # The softmax makes each row positive, with a sum of 1. With these weights, the
        # context of a token is a mean of the values.
        weights = scores.softmax(dim=-1)  # [seq_len, seq_len]
        return weights @ values  # [seq_len, d_out]


class SelfAttention_v2(nn.Module):  # noqa: N801
    r"""Stage 2: the same, with linear layers.

    **New here:** `nn.Linear` instead of bare matrices. It is initialized with small
    numbers of both signs, uniform within $\pm 1/\sqrt{d_{in}}$, and can have a bias. It
    stores the transpose of the matrix, `[d_out, d_in]`.

    Raises `ValueError` for a size below 1. Source: Raschka 2024, section 3.4.2.

    The same seed gives other weights, but with transposed weights both stages agree:

    >>> x = torch.rand(6, 3)
    >>> v1 = SelfAttention_v1(3, 2)
    >>> v2 = SelfAttention_v2(3, 2)
    >>> state = v1.state_dict().items()
    >>> v2.load_state_dict(
    ...     {f"{name}.weight": w.T for name, w in state}
    ... )
    <All keys matched successfully>
    >>> torch.allclose(v1(x), v2(x))
    True
    """

    def __init__(self, d_in: int, d_out: int, qkv_bias: bool = False) -> None:
        super().__init__()
        check_sizes(d_in=d_in, d_out=d_out)
        # Initialized in this order, query, key, value, from here to the last stage: one
        # seed gives the first head of each the same weights.
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within `x`: `[seq_len, d_in]` becomes `[seq_len, d_out]`.

        Raises the errors of stage 1.
        """
        check_input(x, self.W_query.weight)
        queries = self.W_query(x)  # [seq_len, d_out]
        keys = self.W_key(x)  # [seq_len, d_out]
        values = self.W_value(x)  # [seq_len, d_out]

        queries = queries / math.sqrt(keys.shape[-1])
        scores = queries @ keys.T  # [seq_len, seq_len]
        weights = scores.softmax(dim=-1)  # [seq_len, seq_len]
        context: Tensor = weights @ values  # [seq_len, d_out]
        return context


class CausalAttention(nn.Module):
    r"""Stage 3: causal attention over a batch.

    **New here:** a batch axis in front; a mask, so that a token attends only to itself
    and to those before it; dropout on the weights while training; and a limit,
    `context_length`, which is the size of the mask.

    Raises `ValueError` for a setting out of range. Source: Raschka 2024, section 3.5.3.

    The first three tokens of the sentence; the others could not change these numbers:

    >>> x = torch.tensor([[[0.43, 0.15, 0.89],
    ...                    [0.55, 0.87, 0.66],
    ...                    [0.57, 0.85, 0.64]]])
    >>> _ = torch.manual_seed(123)
    >>> CausalAttention(3, 2, 6, dropout=0.0)(x).detach()
    tensor([[[-0.4519,  0.2216],
             [-0.5874,  0.0058],
             [-0.6300, -0.0632]]])
    """

    mask: Tensor

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(d_in=d_in, d_out=d_out, context_length=context_length)
        check_dropout(dropout)
        self.context_length = context_length
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(dropout)

        # True means *hidden*: strictly above the diagonal. A buffer moves with the
        # module and is not trained. The original also stores it in every checkpoint, as
        # float32; here it is not stored, and a stored one is ignored.
        pairs = (context_length, context_length)
        mask = torch.full(pairs, True).triu(1)  # [context_length, context_length]
        self.register_buffer("mask", mask, persistent=False)
        exclude_mask_from_checkpoints(self)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each token of `x` to itself and to the tokens before it.

        `[batch_size, seq_len, d_in]` becomes `[batch_size, seq_len, d_out]`.

        Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape or device,
        or for more than `context_length` tokens.
        """
        check_input(x, self.W_query.weight, self.context_length)
        seq_len = x.shape[1]
        queries = self.W_query(x)  # [batch_size, seq_len, d_out]
        keys = self.W_key(x)  # [batch_size, seq_len, d_out]
        values = self.W_value(x)  # [batch_size, seq_len, d_out]

        # One product for each sequence: `mT` transposes the last two axes only.
        queries = queries / math.sqrt(keys.shape[-1])
        scores = queries @ keys.mT  # [batch_size, seq_len, seq_len]

        # Mask: a score of minus infinity becomes a weight of zero. One could also set
        # these weights to zero after the softmax, and divide by the sum of the others;
        # but in floating point that is $0 / 0$ where the future has all the weight.
        future = self.mask[:seq_len, :seq_len]  # [seq_len, seq_len]
        scores = scores.masked_fill(future, -math.inf)
        weights = scores.softmax(dim=-1)  # [batch_size, seq_len, seq_len]

        # During training, dropout sets some weights to zero at random and divides the
        # others by $1 - p$, so that a row sums to 1 on average.
        weights = self.dropout(weights)
        context: Tensor = weights @ values  # [batch_size, seq_len, d_out]
        return context

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `.to`, `.half` and `.to_empty` all call this.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        rebuild_mask(self)
        return self


class MultiHeadAttentionWrapper(nn.Module):
    r"""Stage 4: several heads, computed one after the other and concatenated.

    **New here:** `num_heads` independent copies of stage 3, each with its own weights,
    so that each can attend to something else. `d_out` is the width of **one** head, and
    the result is `num_heads * d_out` wide. Nothing mixes the heads: an output
    projection comes with the next stage, where `d_out` means all heads together.

    Raises `ValueError` for a setting out of range. Source: Raschka 2024, section 3.6.1.

    The first two columns are stage 3 under the same seed:

    >>> x = torch.tensor([[[0.43, 0.15, 0.89],
    ...                    [0.55, 0.87, 0.66]]])
    >>> _ = torch.manual_seed(123)
    >>> mha = MultiHeadAttentionWrapper(3, 2, 6, 0.0, 2)
    >>> mha(x).detach()
    tensor([[[-0.4519,  0.2216,  0.4772,  0.1063],
             [-0.5874,  0.0058,  0.5891,  0.3257]]])
    >>> mha = MultiHeadAttentionWrapper(13, 2, 11, 0.0, 5)
    >>> mha(torch.randn(3, 7, 13)).shape
    torch.Size([3, 7, 10])
    """

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
        check_sizes(num_heads=num_heads)
        self.d_in = d_in
        self.d_out = d_out
        self.num_heads = num_heads
        self.heads = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias)
            for _ in range(num_heads)
        )

    def forward(
        self,
        x: Tensor,  # [batch_size, seq_len, d_in]
    ) -> Tensor:
        """Attend with each head within all of `x`, and concatenate the results.

        Raises the errors of stage 3.
        """
        # A loop over the heads is easy to read, but slow with many of them.
        contexts = [head(x) for head in self.heads]
        return torch.cat(contexts, dim=-1)  # [batch_size, seq_len, num_heads * d_out]
