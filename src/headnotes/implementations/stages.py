r"""# Self-attention in four stages

Nobody has to meet causal multi-head attention all at once. Four classes lead there, and
each adds something to the one before, in a paragraph that begins **New here**:

1. `SelfAttention_v1`: three matrices, and the whole idea;
2. `SelfAttention_v2`: the same with linear layers;
3. `CausalAttention`: batches, a mask over the future, dropout;
4. `MultiHeadAttentionWrapper`: several of them, side by side.

The fifth, which computes all heads in one product, is [causal attention, batch
first](causal.md).

Source: [Build a Large Language Model (From
Scratch)](https://github.com/rasbt/LLMs-from-scratch), Raschka 2024, sections 3.4 to
3.6.1, whose class and parameter names are kept; its checkpoints load here, and its
seeds give its numbers.
"""

# Nothing but PyTorch and the standard library: this file runs wherever it is put.
import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class SelfAttention_v1(nn.Module):  # noqa: N801
    r"""Stage 1: each token of one sequence reads from all of them.

    **New here:** three learned matrices. Without them a token would be compared, and
    read, as it is. With them it asks with one projection of itself, is found by a
    second, and gives away a third:

    $$Q = X W_Q, \quad K = X W_K, \quad V = X W_V$$

    `[seq_len, d_in]` becomes `[seq_len, d_out]`. Refuses a size below 1 with
    `ValueError`. Source: Raschka 2024, section 3.4.2.

    "Your journey starts with one step", each word three numbers:

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
        # every product of positive inputs is positive, and the rows are much alike.
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))  # [d_in, d_out]
        self.W_key = nn.Parameter(torch.rand(d_in, d_out))  # [d_in, d_out]
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))  # [d_in, d_out]

    def forward(self, x: Tensor) -> Tensor:
        r"""`[seq_len, d_in]` to `[seq_len, d_out]`.

        Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape or device.
        A batch is refused: of three axes `keys.T` would reverse all, and the original
        then computes something else without a word wherever sizes happen to agree.

        >>> attention = SelfAttention_v1(3, 2)
        >>> torch.vmap(attention)(torch.rand(5, 6, 3)).shape
        torch.Size([5, 6, 2])
        """
        check_input(x, self.W_query, d_in=self.W_query.shape[0])
        queries = x @ self.W_query  # [seq_len, d_out]
        keys = x @ self.W_key  # [seq_len, d_out]
        values = x @ self.W_value  # [seq_len, d_out]

        # Row $i$ compares token $i$ with all tokens, itself among them. The division
        # keeps the softmax soft where `d_out` is large; the original divides the
        # scores, which is the same, but in float16 they may overflow before.
        queries = queries / math.sqrt(keys.shape[-1])
        scores = queries @ keys.T  # [seq_len, seq_len]

        # Each row becomes positive and sums to 1: it says how to mix the values.
        weights = scores.softmax(dim=-1)  # [seq_len, seq_len]
        return weights @ values  # [seq_len, d_out]


class SelfAttention_v2(nn.Module):  # noqa: N801
    r"""Stage 2: the same, with linear layers.

    **New here:** `nn.Linear` instead of bare matrices. It begins with small numbers of
    both signs, uniform within $\pm 1/\sqrt{d_{in}}$, and can have a bias. It also
    keeps its matrix the other way round, as `[d_out, d_in]`. Therefore the same seed
    gives other weights, but a transpose makes the two stages agree:

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

    `[seq_len, d_in]` becomes `[seq_len, d_out]`. Refuses a size below 1 with
    `ValueError`. Source: Raschka 2024, section 3.4.2.
    """

    def __init__(self, d_in: int, d_out: int, qkv_bias: bool = False) -> None:
        super().__init__()
        check_sizes(d_in=d_in, d_out=d_out)
        # Drawn in this order, query, key, value, from here to the last stage: one seed
        # gives the first head of each the same weights.
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[seq_len, d_in]` to `[seq_len, d_out]`; refuses what stage 1 refuses."""
        check_input(x, self.W_query.weight, self.W_query.in_features)
        queries = self.W_query(x)  # [seq_len, d_out]
        keys = self.W_key(x)  # [seq_len, d_out]
        values = self.W_value(x)  # [seq_len, d_out]

        queries = queries / math.sqrt(keys.shape[-1])
        scores = queries @ keys.T  # [seq_len, seq_len]
        weights = scores.softmax(dim=-1)  # [seq_len, seq_len]
        context: Tensor = weights @ values  # [seq_len, d_out]
        return context


class CausalAttention(nn.Module):
    r"""Stage 3: nothing is read from the future, and batches are welcome.

    **New here:** a batch axis in front; a mask, so that a token reads only from itself
    and from those before it; dropout on the weights while training; and a limit,
    `context_length`, which is the size of the mask.

    `[batch_size, seq_len, d_in]` becomes `[batch_size, seq_len, d_out]`. Raises
    `ValueError` for a setting out of range. Source: Raschka 2024, section 3.5.3.

    The first three words of the sentence; the others could not change these numbers:

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
        if type(dropout) not in (int, float) or not 0 <= dropout <= 1:
            raise ValueError(f"`dropout` (={dropout!r}) must lie between 0 and 1")
        self.context_length = context_length
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(dropout)

        # True means *blocked*, strictly above the diagonal. A buffer moves with the
        # module and is not trained. The original also stores it in every checkpoint, as
        # float32; here it stays out, and a stored one is passed over.
        pairs = (context_length, context_length)
        mask = torch.full(pairs, True).triu(1)  # [context_length, context_length]
        self.register_buffer("mask", mask, persistent=False)
        keep_out_of_checkpoints(self)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch_size, seq_len, d_in]` to `[batch_size, seq_len, d_out]`.

        Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape or device,
        or for more than `context_length` tokens.
        """
        d_in = self.W_query.in_features
        check_input(x, self.W_query.weight, d_in, self.context_length)
        seq_len = x.shape[1]
        queries = self.W_query(x)  # [batch_size, seq_len, d_out]
        keys = self.W_key(x)  # [batch_size, seq_len, d_out]
        values = self.W_value(x)  # [batch_size, seq_len, d_out]

        # `mT` turns the last two axes only, sequence by sequence.
        queries = queries / math.sqrt(keys.shape[-1])
        scores = queries @ keys.mT  # [batch_size, seq_len, seq_len]

        # One could also zero the weights of the future and divide by what is left. On
        # paper that is the same. In floating point it is $0 / 0$ where the future had
        # all the weight; minus infinity *before* the softmax never meets that case.
        future = self.mask[:seq_len, :seq_len]  # [seq_len, seq_len]
        scores = scores.masked_fill(future, -math.inf)
        weights = scores.softmax(dim=-1)  # [batch_size, seq_len, seq_len]

        # Dropout acts on weights, not on tokens: now and then a token must do without
        # one of its sources. Survivors are divided by $1 - p$, so that the mean stays;
        # a row then sums to 1 only on average.
        weights = self.dropout(weights)
        context: Tensor = weights @ values  # [batch_size, seq_len, d_out]
        return context

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # All of `.to`, `.half`, `.to_empty` pass here.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        redraw_mask(self)
        return self


class MultiHeadAttentionWrapper(nn.Module):
    r"""Stage 4: several heads, one after the other, laid side by side.

    **New here:** `num_heads` independent copies of stage 3, each with its own weights,
    so that each can look for something else. `d_out` is the width of **one** head, and
    the result is `num_heads * d_out` wide. Nothing mixes the heads: an output
    projection comes with the next stage, where `d_out` means all heads together.

    `[batch_size, seq_len, d_in]` becomes `[batch_size, seq_len, num_heads * d_out]`.
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
        self.d_in, self.d_out, self.num_heads = d_in, d_out, num_heads
        self.heads = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias)
            for _ in range(num_heads)
        )

    def forward(
        self,
        x: Tensor,  # [batch_size, seq_len, d_in]
    ) -> Tensor:
        """Each head reads all of `x`; refuses what stage 3 refuses."""
        # One small product after the other: easy to read, and slow with many heads.
        contexts = [head(x) for head in self.heads]
        return torch.cat(contexts, dim=-1)  # [batch_size, seq_len, num_heads * d_out]


def keep_out_of_checkpoints(module: Any) -> None:
    """Let `module` read no mask from a checkpoint, and need none from it."""
    module.register_load_state_dict_pre_hook(drop_stored_mask)
    module.register_load_state_dict_post_hook(redraw_mask)


def drop_stored_mask(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Pass over the mask that an original checkpoint holds, whatever its size."""
    state_dict.pop(prefix + "mask", None)


def redraw_mask(module: CausalAttention, *_: Any) -> None:
    """Draw the mask again where one may have been lost.

    A module built on "meta" has none. `load_state_dict` brings none, and `to_empty`
    whatever lay in memory: left so, it could let the future through.
    """
    if module.mask.is_meta:
        device = module.W_query.weight.device
        module.mask = torch.empty_like(module.mask, device=device)
    module.mask.fill_(True).triu_(1)


def check_sizes(**sizes: int) -> None:
    """Refuse sizes that no layer can have."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"`{name}` (={size!r}) must be an int from 1 up")


def check_input(
    x: Tensor, weight: Tensor, d_in: int, context_length: int | None = None
) -> None:
    """Refuse an input that does not fit; a stage without a length takes no batch."""
    dtype, device = weight.dtype, weight.device
    axes, way_out = "batch_size, seq_len", "a lone sequence needs `x.unsqueeze(0)`"
    if context_length is None:
        axes, way_out = "seq_len", "a batch needs `torch.vmap(module)(x)`"
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` must be a tensor, but is a {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise TypeError("`x` is sparse, nested or quantised; pass a dense one")
    if x.device != device:
        where = f"`x` is on {x.device}, the module on {device}"
        raise ValueError(f"{where}; use `x.to({str(device)!r})`")
    if x.dim() != (2 if context_length is None else 3) or x.shape[-1] != d_in:
        shape = list(x.shape)
        raise ValueError(
            f"`x` has shape {shape}, not [{axes}, d_in (={d_in})]; {way_out}"
        )
    # Autocast makes its own peace between the dtypes that it casts.
    cast = x.is_floating_point() and torch.float64 not in (x.dtype, dtype)
    cast = cast and not x.is_meta and torch.is_autocast_enabled(device.type)
    if x.dtype != dtype and not cast:
        way_out = f"use `x.to({dtype})`, or give the module its dtype"
        raise TypeError(f"`x` is {x.dtype}, the module {dtype}; {way_out}")
    # The original leaves this to broadcasting. At a `context_length` of 1 that does not
    # fail: the mask, a lone zero, stretches over all scores and blocks nothing.
    if context_length is not None and x.shape[1] > context_length:
        raise ValueError(
            f"`x` has {x.shape[1]} tokens, more than `context_length` "
            f"(={context_length}); keep the last with `x[:, -{context_length}:]`"
        )
