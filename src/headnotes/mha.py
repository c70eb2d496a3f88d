r"""# Multi-head attention, sequence first

This module is the reference implementation of multi-head attention, written for
readers, with a note beside each step. It is complete, and needs only PyTorch.
[fast](fast/module.md) computes the same from the same parameters, in less time and
memory.

Attention computes, for every position of one sequence, a weighted mean over the
positions of another. Each position of the first has a *query* $q$; each position of the
second has a *key* $k$ and a *value* $v$. The mean is taken over the values, and its
weights are a softmax over the dot products of the query with the keys:

$$\operatorname{Attention}(Q, K, V) =
  \operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$

*Multi-head* attention does this `heads` times in parallel, each time in a learned
subspace of width `d_k = d_model / heads`. A last linear map mixes the results. One head
can attend to the previous token while another attends to the verb.

Tensors are sequence first, `[seq_len, batch_size, d_model]`. Both products are written
with `einsum`, so that every axis has a letter: `i` query position, `j` key position,
`b` batch item, `h` head, `d` component within a head.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2, in the sequence-first formulation of labml's
[annotated transformer](https://nn.labml.ai/transformers/mha.html). That is the
*original* of the notes below: its checkpoints load here, and where this module differs,
the note beside the line says so.
"""

# Only PyTorch and the standard library, so that a copy of this file runs anywhere.
import math
from typing import Any

import torch
from torch import Tensor, nn


class PrepareForMultiHeadAttention(nn.Module):
    r"""A linear projection whose last axis is split into heads.

    `[..., d_model]` becomes `[..., heads, d_k]`, for a batch of sequences, or for one
    position during decoding.

    Raises `TypeError` for a wrong dtype, `ValueError` for a wrong width.
    Source: Vaswani et al. 2017, section 3.2.2, the matrices $W_i^Q$, $W_i^K$, $W_i^V$.

    >>> split = PrepareForMultiHeadAttention(10, 5, 2, bias=True)
    >>> split(torch.randn(7, 3, 10)).shape
    torch.Size([7, 3, 5, 2])
    >>> split(torch.randn(3, 10)).shape
    torch.Size([3, 5, 2])
    """

    def __init__(self, d_model: int, heads: int, d_k: int, bias: bool) -> None:
        super().__init__()
        check_sizes(d_model=d_model, heads=heads, d_k=d_k)
        # The paper has one small matrix per head. Stacked, they are a single product:
        # rows $h\,d_k$ to $(h+1)\,d_k - 1$ of this weight belong to head $h$.
        self.linear = nn.Linear(d_model, heads * d_k, bias=bias)
        self.heads = heads
        self.d_k = d_k

    def forward(self, x: Tensor) -> Tensor:
        r"""Project `x`, and give each head its part of the result."""
        check_weight(self, "linear")
        check_tensor("x", x, self.linear.weight.device, self.linear.weight.dtype)
        shape = list(x.shape)
        d_model = self.linear.weight.shape[-1]
        if shape[-1:] != [d_model]:
            raise ValueError(f"`x` has shape {shape}, not [..., d_model (={d_model})]")

        # One product, $x W^\top + b$, for all heads.
        x = self.linear(x)  # [..., heads * d_k]

        # Each head is a contiguous block of the last axis, so the split is a view:
        # nothing is copied. (A size of $-1$ would be ambiguous in an empty batch.)
        return x.view(*x.shape[:-1], self.heads, self.d_k)  # [..., heads, d_k]


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention over `[seq_len, batch_size, d_model]`.

    Each of the `heads` is `d_model / heads` wide. `dropout_prob` is the probability
    that an attention weight is set to zero during training. As in the original, `heads`
    comes before `d_model`.

    Raises `ValueError` where `heads` does not divide `d_model`, or a setting is out of
    range. Source: Vaswani et al. 2017, section 3.2.2.

    Batch-first inputs are refused only where their sizes, or those of the mask,
    disagree. In self-attention without a mask nothing tells them apart: it then attends
    across the batch.

    Three queries attend to five keys, for a batch of two:

    >>> mha = MultiHeadAttention(heads=7, d_model=77)
    >>> query = torch.randn(3, 2, 77)
    >>> memory = torch.randn(5, 2, 77)
    >>> mha(query=query, key=memory, value=memory).shape
    torch.Size([3, 2, 77])

    The attention weights of the last call stay on the module, for inspection. For each
    query, batch item and head they sum to 1 over the keys:

    >>> mha.attn.shape
    torch.Size([3, 5, 2, 7])
    >>> mha.attn.sum(dim=1).allclose(torch.ones(3, 2, 7))
    True
    """

    attn: Tensor | None

    def __init__(
        self, heads: int, d_model: int, dropout_prob: float = 0.1, bias: bool = True
    ) -> None:
        super().__init__()
        check_settings(heads, d_model, dropout_prob)

        # If the components of $q$ and $k$ are independent, with mean 0 and variance 1,
        # then $q \cdot k$ has variance $d_k$. Without this factor the softmax of a wide
        # head is almost one-hot, and little gradient passes through it.
        self.heads = heads
        self.d_k = d_model // heads
        self.scale = 1 / math.sqrt(self.d_k)

        # The projections to queries and keys. `bias` applies to these two only. A key
        # bias adds the same number to a whole row of scores, which softmax cancels;
        # only the bias of the query can change an output.
        self.query = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)
        self.key = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)

        # The projections to values, and from the concatenated heads to the output. Both
        # have a bias, though one would do: where a row of weights sums to 1, a value
        # bias $b_V$ passes through the mean unchanged and adds the constant $W_O\, b_V$
        # to each output.
        self.value = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=True)
        self.output = nn.Linear(d_model, d_model)

        self.dropout = nn.Dropout(dropout_prob)
        self.attn = None

    def forward(
        self,
        *,
        query: Tensor,  # [q_len, batch_size, d_model]
        key: Tensor,  # [k_len, batch_size, d_model]
        value: Tensor,  # [k_len, batch_size, d_model]
        mask: Tensor | None = None,
    ) -> Tensor:
        r"""Attend from `query` to `key`, and return the mean of `value`, projected.

        The result has the shape of `query`. `mask` is bool, or integer 0/1, `[q_len or
        1, k_len, batch_size or 1]`; True means that this query may attend to this key.
        The context of a fully masked row is zero, and its output is the output bias.

        Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape or device,
        before any work is done. Arguments are keyword-only: three tensors of one shape
        are too easily swapped.

        Here the second of three queries may attend to the first two keys only:

        >>> mha = MultiHeadAttention(heads=7, d_model=77)
        >>> x, y = torch.randn(3, 2, 77), torch.randn(5, 2, 77)
        >>> mask = torch.ones(3, 5, 2).bool()
        >>> mask[1, 2:] = False
        >>> _ = mha(query=x, key=y, value=y, mask=mask)
        >>> mha.attn[1, :, 0, 0] > 0
        tensor([ True,  True, False, False, False])
        """
        check_weight(self, "output")
        check_inputs(self.output.weight, query, key, value)

        # The mask gets an axis for the heads, which share it.
        if mask is not None:
            check_tensor("mask", mask, self.output.weight.device)
            shapes = query.shape, key.shape
            mask = self.prepare_mask(mask, *shapes)  # [q_len, k_len, batch_size, 1]
            # Padding may hold NaN, and a weight of zero does not remove it: zero times
            # NaN is NaN. So keys that no query may attend to are set to zero.
            hidden = ~mask.any(dim=(0, 3)).unsqueeze(-1)  # [k_len, batch_size, 1]
            key = key.masked_fill(hidden, 0)
            value = value.masked_fill(hidden, 0)

        # Project: each head gets its own query, key and value of each position,
        # $q = x W_Q^\top + b_Q$, of width $d_k$.
        query = self.query(query)  # [q_len, batch_size, heads, d_k]
        key = self.key(key)  # [k_len, batch_size, heads, d_k]
        value = self.value(value)  # [k_len, batch_size, heads, d_k]

        # Scale, then take the dot product of each query with each key:
        # $S = Q K^\top / \sqrt{d_k}$. The original scales the scores, which is the same
        # in exact arithmetic. But float16 ends at 65,504, and unscaled scores are
        # $\sqrt{d_k}$ times larger.
        query = query * self.scale
        scores = self.get_scores(query, key)  # [q_len, k_len, batch_size, heads]

        # Mask, then softmax over the keys: each query gets a weight for each key. The
        # weights are not negative, and sum to 1.
        attn = self.get_weights(scores, mask)  # [q_len, k_len, batch_size, heads]

        # Store them for inspection, without their graph. The original stores them after
        # dropout, when rows no longer sum to 1. (An exported program cannot store.)
        if not torch.compiler.is_exporting():
            self.attn = attn.detach()

        # During training, dropout sets some weights to zero and divides the others by
        # $1 - p$, which preserves their mean.
        attn = self.dropout(attn)

        # The weighted sum of the values: one context vector for each query and head.
        context = self.apply_weights(attn, value)  # [q_len, batch_size, heads, d_k]

        # Concatenate the heads along the last axis. This costs a copy, as `einsum`
        # leaves its result batch by batch in memory. Then mix them: $W_O\, c + b_O$.
        context = context.flatten(-2)  # [q_len, batch_size, d_model]
        output: Tensor = self.output(context)  # [q_len, batch_size, d_model]
        return output

    def get_scores(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
    ) -> Tensor:
        r"""The dot product of each query with each key:

        $$S_{ijbh} = \sum_d Q_{ibhd}\, K_{jbhd}$$

        The query arrives already divided by $\sqrt{d_k}$. A variant with other scores,
        such as relative positions, overrides this hook.

        >>> mha = MultiHeadAttention(heads=5, d_model=10)
        >>> query = torch.randn(3, 2, 5, 2)
        >>> mha.get_scores(query, torch.randn(7, 2, 5, 2)).shape
        torch.Size([3, 7, 2, 5])
        """
        scores = torch.einsum("ibhd,jbhd->ijbh", query, key)
        return scores  # [q_len, k_len, batch_size, heads]

    def get_weights(
        self,
        scores: Tensor,  # [q_len, k_len, batch_size, heads]
        mask: Tensor | None,  # [q_len, k_len, batch_size, 1]
    ) -> Tensor:
        r"""The softmax of the scores over the keys, zero where a key is hidden.

        A variant that turns scores into weights otherwise, such as attention sinks,
        overrides this hook.

        >>> mha = MultiHeadAttention(heads=5, d_model=10)
        >>> mask = torch.ones(3, 7, 2, 1).bool()
        >>> mask[:, 4:] = False
        >>> mha.get_weights(torch.zeros(3, 7, 2, 5), mask)[0, :, 0, 0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500, 0.0000, 0.0000, 0.0000])
        """
        return masked_softmax(scores, mask)  # [q_len, k_len, batch_size, heads]

    def prepare_mask(
        self,
        mask: Tensor,  # [q_len, k_len, batch_size]
        query_shape: tuple[int, ...],
        key_shape: tuple[int, ...],
    ) -> Tensor:
        r"""Validate `mask`, and give it an axis of size 1 that broadcasts over heads.

        The axes for queries and batch may have size 1; the one for keys may not, since
        a single column would silently allow or forbid all keys at once.

        >>> mha = MultiHeadAttention(heads=5, d_model=10)
        >>> mask = torch.ones(3, 7, 2).bool()
        >>> mha.prepare_mask(mask, (3, 2, 10), (7, 2, 10)).shape
        torch.Size([3, 7, 2, 1])
        """
        check_mask(mask, query_shape, key_shape)
        return mask.bool().unsqueeze(-1)  # [q_len, k_len, batch_size, 1]

    def apply_weights(
        self,
        attn: Tensor,  # [q_len, k_len, batch_size, heads]
        value: Tensor,  # [k_len, batch_size, heads, d_k]
    ) -> Tensor:
        r"""The weighted sum of the values, for each query and head:

        $$C_{ibhd} = \sum_j A_{ijbh}\, V_{jbhd}$$

        >>> mha = MultiHeadAttention(heads=5, d_model=10)
        >>> attn = torch.rand(3, 7, 2, 5)
        >>> mha.apply_weights(attn, torch.randn(7, 2, 5, 2)).shape
        torch.Size([3, 2, 5, 2])
        """
        context = torch.einsum("ijbh,jbhd->ibhd", attn, value)
        return context  # [q_len, batch_size, heads, d_k]

    def __getstate__(self) -> dict[str, Any]:
        # The weights of the last call are for inspection only. They grow with the
        # square of the length, and do not belong in a pickle, checkpoint or deep copy.
        return self.__dict__ | {"attn": None}


def masked_softmax(
    scores: Tensor,  # [q_len, k_len, batch_size, heads]
    mask: Tensor | None,  # [q_len, k_len, batch_size, 1]
) -> Tensor:
    r"""Softmax over the keys, axis 1; hidden keys and fully masked rows get zeros.

    $$A_{ijbh} = \frac{e^{S_{ijbh}}}{\sum_k e^{S_{ikbh}}}$$

    In the original, a fully masked row is NaN, 0 / 0:

    >>> torch.full((3,), -math.inf).softmax(dim=0)
    tensor([nan, nan, nan])

    In the backward pass the NaN then reaches every weight of the model, even where the
    loss leaves the row out. Here the row has weights of zero:

    >>> scores = torch.zeros(1, 3, 1, 2)
    >>> masked_softmax(scores, torch.zeros(1, 3, 1, 1).bool()).sum()
    tensor(0.)
    """
    if mask is None:
        return scores.softmax(dim=1)

    # Minus infinity becomes a weight of $e^{-\infty} = 0$. A large negative number does
    # not always suffice: a score may lie below it, and float16 ends at $-65{,}504$.
    scores = scores.masked_fill(~mask, -math.inf)  # [q_len, k_len, batch_size, heads]

    # A fully masked row would be NaN, forward and backward. So it is filled with zeros
    # before the softmax, which makes its weights uniform, and again after it.
    fully_masked = ~mask.any(dim=1, keepdim=True)  # [q_len, 1, batch_size, 1]
    scores = scores.masked_fill(fully_masked, 0)  # [q_len, k_len, batch_size, heads]
    weights = scores.softmax(dim=1)  # [q_len, k_len, batch_size, heads]
    return weights.masked_fill(fully_masked, 0)


# region Input checks


def check_sizes(**sizes: int) -> None:
    """Refuse sizes that no layer can have."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"`{name}` (={size!r}) must be an int from 1 up")


def check_settings(heads: int, d_model: int, dropout_prob: float) -> None:
    """Refuse settings that do not fit one another, and name the nearest that do."""
    check_sizes(heads=heads, d_model=d_model)
    if d_model % heads:
        divisors = [n for n in (*range(1, 4097), d_model) if d_model % n == 0]
        below = [n for n in divisors if n < heads][-1:]
        above = [n for n in divisors if n > heads][:1]
        way_out = f"{' and '.join(map(str, below + above))} would do"
        # `nn.MultiheadAttention` takes the width first.
        if heads % d_model == 0:
            way_out = f"`heads` comes first: `heads={d_model}, d_model={heads}`"
        raise ValueError(
            f"`d_model` (={d_model}) must be divisible by `heads` (={heads}); {way_out}"
        )
    if type(dropout_prob) not in (int, float) or not 0 <= dropout_prob <= 1:
        raise ValueError(f"`dropout_prob` (={dropout_prob!r}) must lie between 0 and 1")


def check_weight(module: nn.Module, name: str) -> None:
    """Refuse a layer without a weight, whose width, dtype and device inputs must have.

    >>> mha = MultiHeadAttention(heads=5, d_model=10)
    >>> mha.output = nn.Identity()
    >>> try:
    ...     check_weight(mha, "output")
    ... except TypeError as error:
    ...     print(error)  # doctest: +NORMALIZE_WHITESPACE
    `output` of MultiHeadAttention is a Identity without a `weight`, which inputs must
    fit; use an `nn.Linear`, or give yours a `weight`, as of the layer that it wraps
    """
    layer = getattr(module, name)
    if not isinstance(getattr(layer, "weight", None), Tensor):
        raise TypeError(
            f"`{name}` of {type(module).__name__} is a {type(layer).__name__} without "
            f"a `weight`, which inputs must fit; use an `nn.Linear`, or give yours a "
            f"`weight`, as of the layer that it wraps"
        )


def check_tensor(
    name: str, x: Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Refuse what is not a dense tensor of the module's device and dtype."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but is a {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise TypeError(f"`{name}` is sparse, nested or quantized; pass a dense one")
    if x.device != device:
        where = f"`{name}` is on {x.device}, the module on {device}"
        raise ValueError(f"{where}; use `{name}.to({str(device)!r})`")
    if dtype not in (None, x.dtype):
        # Autocast converts the operands of a product, but leaves float64 alone.
        castable = x.is_floating_point() and torch.float64 not in (x.dtype, dtype)
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if not (castable and autocast):
            way_out = f"use `{name}.to({dtype})`, or give the module its dtype"
            raise TypeError(f"`{name}` is {x.dtype}, the module {dtype}; {way_out}")


def check_inputs(weight: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse inputs that do not fit the module's `weight`, or one another."""
    d_model = weight.shape[-1]
    inputs = {"query": query, "key": key, "value": value}
    for name, x in inputs.items():  # [..., d_model]
        # In self-attention it is the same tensor three times; one check is enough.
        if x is query and name != "query":
            continue
        check_tensor(name, x, weight.device, weight.dtype)
        if x.dim() != 3 or x.shape[-1] != d_model:
            raise ValueError(
                f"`{name}` has shape {list(x.shape)}, not [seq_len, batch_size, "
                f"d_model (={d_model})]; a lone sequence needs `{name}.unsqueeze(1)`"
            )
        if x.shape[1] != query.shape[1]:
            raise ValueError(
                f"`{name}` has batch size {x.shape[1]}, but `query` has "
                f"{query.shape[1]}; share one sequence with `{name}.expand`, turn "
                f"batch-first data with `{name}.transpose(0, 1)`"
            )
    k_len, v_len = key.shape[0], value.shape[0]
    if k_len != v_len:
        raise ValueError(f"`value` has length {v_len}, `key` {k_len}; make them equal")


def check_mask(
    mask: Tensor, query_shape: tuple[int, ...], key_shape: tuple[int, ...]
) -> None:
    """Refuse a mask of another convention, or of other sizes."""
    # Converted to bool, an additive mask is silently inverted: its 0 would forbid, and
    # its minus infinity allow.
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"`mask` is {mask.dtype}, not bool or integer 0/1 with 1 for 'may attend'; "
            f"use `mask.bool()` for 0 and 1, `masks.from_additive(mask)` for 0 and -inf"
        )
    q_len, batch_size = query_shape[:2]
    k_len = key_shape[0]
    if not mask_fits(mask, q_len, k_len, batch_size):
        way_out = (
            "a [q_len, k_len] mask needs `mask.unsqueeze(-1)` if True means 'may "
            "attend', `masks.from_mha(mask, heads)` if True hides"
        )
        # In batch-first inputs, lengths and batch size change places.
        if mask_fits(mask, batch_size, key_shape[1], q_len):
            way_out = "it fits batch-first inputs: pass `query.transpose(0, 1)`, …"
        raise ValueError(
            f"`mask` has shape {list(mask.shape)}, not [q_len or 1, k_len, batch_size "
            f"or 1] = [{q_len} or 1, {k_len}, {batch_size} or 1]; {way_out}"
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


def mask_fits(mask: Tensor, q_len: int, k_len: int, batch_size: int) -> bool:
    """Whether a mask has the shape `[q_len or 1, k_len, batch_size or 1]`."""
    return (
        mask.dim() == 3
        and mask.shape[0] in (1, q_len)
        and mask.shape[1] == k_len
        and mask.shape[2] in (1, batch_size)
    )


# endregion
