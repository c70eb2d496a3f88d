r"""# Multi-head attention, sequence first

Attention lets every position of one sequence read from all positions of another. A
position asks with its *query* $q$; every position offers a *key* $k$ to be compared
with, and a *value* $v$ to be read. What is read is a weighted mean of the values, and
the weights are a softmax over the comparisons:

$$\operatorname{Attention}(Q, K, V) =
  \operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$

*Multi-head* attention does this `heads` times side by side, each time in a learned
subspace of width `d_k = d_model / heads`, and mixes the results with one last linear
map. One head can follow the previous word while another looks for the verb.

Tensors lie sequence first, `[seq_len, batch_size, d_model]`. Both products are written
with `einsum`, so that every axis has a letter: `i` query position, `j` key position,
`b` batch item, `h` head, `d` component within a head.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2, in the sequence-first formulation of labml's
[annotated transformer](https://nn.labml.ai/transformers/mha.html), whose checkpoints
load here. Where this module departs from that one, the note beside the line says so.
"""

# Nothing but PyTorch and the standard library: this file runs wherever it is put.
import math
from typing import Any

import torch
from torch import Tensor, nn


class PrepareForMultiHeadAttention(nn.Module):
    r"""A linear map whose last axis is split into heads.

    `[..., d_model]` becomes `[..., heads, d_k]`, whatever the leading axes are: a
    sequence of batches, or a single position while decoding. Raises `TypeError` for a
    wrong dtype, `ValueError` for a wrong width.

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
        check_tensor("x", x, self.linear.weight.device, self.linear.weight.dtype)
        shape, d_model = list(x.shape), self.linear.in_features
        if shape[-1:] != [d_model]:
            raise ValueError(f"`x` has shape {shape}, not [..., d_model (={d_model})]")
        # Heads are contiguous blocks of the last axis, so the split is a view: nothing
        # is copied. Sizes are spelt out because a $-1$ is ambiguous in an empty batch.
        x = self.linear(x)  # [..., heads * d_k]
        return x.view(*x.shape[:-1], self.heads, self.d_k)  # [..., heads, d_k]


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention over `[seq_len, batch_size, d_model]`.

    `heads` comes before `d_model`, as in the original. Each head is `d_model / heads`
    wide; `dropout_prob` acts on the attention weights while training.

    Raises `ValueError` where `heads` does not divide `d_model`, or a setting is out of
    range. Source: Vaswani et al. 2017, section 3.2.2.

    Three queries read from five keys, for a batch of two:

    >>> mha = MultiHeadAttention(heads=7, d_model=77)
    >>> query = torch.randn(3, 2, 77)
    >>> memory = torch.randn(5, 2, 77)
    >>> mha(query=query, key=memory, value=memory).shape
    torch.Size([3, 2, 77])

    The weights of the last call stay on the module, to be looked at. For each query,
    batch item and head they sum to 1 over the keys:

    >>> mha.attn.shape
    torch.Size([3, 5, 2, 7])
    >>> mha.attn.sum(dim=1).allclose(torch.ones(3, 2, 7))
    True
    """

    def __init__(
        self, heads: int, d_model: int, dropout_prob: float = 0.1, bias: bool = True
    ) -> None:
        r"""Build the four linear maps, which are all that is learned."""
        super().__init__()
        check_settings(heads, d_model, dropout_prob)
        self.heads = heads
        self.d_k = d_model // heads
        # If the components of $q$ and $k$ are independent, with variance 1, then
        # $q \cdot k$ has variance $d_k$. Without this factor the softmax of a wide head
        # is almost one-hot, and little gradient passes through it.
        self.scale = 1 / math.sqrt(self.d_k)

        # `bias` governs only these two, and `bias=False` loses less than it seems. A
        # key bias adds the same number to a whole row of scores, which softmax
        # cancels: its gradient is zero. Only the query's bias can change an output.
        self.query = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)
        self.key = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)

        # These two always have theirs. Where a row of weights sums to 1, a value bias
        # $b_V$ passes through the mean untouched and arrives as the constant
        # $W_O\, b_V$, which the output bias could hold just as well.
        self.value = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=True)
        self.output = nn.Linear(d_model, d_model)

        self.dropout = nn.Dropout(dropout_prob)
        self.attn: Tensor | None = None

    def forward(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        r"""Read from `value` where `query` meets `key`.

        `query` is `[q_len, batch_size, d_model]`, `key` and `value` are
        `[k_len, batch_size, d_model]`; the result has the shape of `query`. `mask` is
        bool, or integer 0/1, `[q_len or 1, k_len, batch_size or 1]`; True means that
        this query may attend to this key. A query that may attend to nothing reads
        zero, and its output is the output bias; a key that none may read may hold NaN.

        Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape or device.
        Keyword-only, because three tensors of one shape are too easily swapped.

        Here the second of three queries may look at the first two keys only:

        >>> mha = MultiHeadAttention(heads=7, d_model=77)
        >>> x, y = torch.randn(3, 2, 77), torch.randn(5, 2, 77)
        >>> mask = torch.ones(3, 5, 2).bool()
        >>> mask[1, 2:] = False
        >>> _ = mha(query=x, key=y, value=y, mask=mask)
        >>> mha.attn[1, :, 0, 0] > 0
        tensor([ True,  True, False, False, False])
        """
        check_inputs(self.output.weight, query, key, value)
        if mask is not None:
            check_tensor("mask", mask, self.output.weight.device)
            shapes = query.shape, key.shape
            mask = self.prepare_mask(mask, *shapes)  # [q_len, k_len, batch_size, 1]
            # Zero times NaN is NaN: what no query may read is cleared, not just unread.
            unread = ~mask.any(dim=(0, 3)).unsqueeze(-1)  # [k_len, batch_size, 1]
            key, value = key.masked_fill(unread, 0), value.masked_fill(unread, 0)

        query = self.query(query)  # [q_len, batch_size, heads, d_k]
        key = self.key(key)  # [k_len, batch_size, heads, d_k]
        value = self.value(value)  # [k_len, batch_size, heads, d_k]

        # The original scales the scores. With the query scaled instead, $q \cdot k$ may
        # grow $\sqrt{d_k}$ times larger before it passes 65,504, where float16 ends.
        query = query * self.scale
        scores = self.get_scores(query, key)  # [q_len, k_len, batch_size, heads]

        # Kept to be looked at: detached, so that it holds no graph, and before dropout,
        # so that rows sum to 1; the original keeps it after. (An exported program has
        # nowhere to keep it, and what `vmap` leaves here is not readable.)
        attn = masked_softmax(scores, mask)  # [q_len, k_len, batch_size, heads]
        if not torch.compiler.is_exporting():
            self.attn = attn.detach()
        attn = self.dropout(attn)

        # The paper's Concat: head after head along the last axis. Here it costs a copy,
        # as `einsum` leaves its result batch by batch in memory.
        context = self.apply_weights(attn, value)  # [q_len, batch_size, heads, d_k]
        context = context.flatten(-2)  # [q_len, batch_size, d_model]
        output: Tensor = self.output(context)  # [q_len, batch_size, d_model]
        return output

    def get_scores(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
    ) -> Tensor:
        r"""Compare every query with every key: $S_{ijbh} = \sum_d Q_{ibhd} K_{jbhd}$.

        The query arrives already divided by $\sqrt{d_k}$. A variant that scores
        otherwise, with relative positions say, overrides this hook.
        """
        scores = torch.einsum("ibhd,jbhd->ijbh", query, key)
        return scores  # [q_len, k_len, batch_size, heads]

    def prepare_mask(
        self,
        mask: Tensor,  # [q_len, k_len, batch_size]
        query_shape: tuple[int, ...],
        key_shape: tuple[int, ...],
    ) -> Tensor:
        r"""Validate `mask` and give it an axis of size 1 that broadcasts over heads.

        The axes for queries and batch may have size 1; the one for keys may not,
        since a single column would silently allow or forbid all keys at once.
        """
        check_mask(mask, query_shape, key_shape)
        return mask.bool().unsqueeze(-1)  # [q_len, k_len, batch_size, 1]

    def apply_weights(
        self,
        attn: Tensor,  # [q_len, k_len, batch_size, heads]
        value: Tensor,  # [k_len, batch_size, heads, d_k]
    ) -> Tensor:
        r"""Read: the mean of the values under the weights of each query and head."""
        context = torch.einsum("ijbh,jbhd->ibhd", attn, value)
        return context  # [q_len, batch_size, heads, d_k]

    def __getstate__(self) -> dict[str, Any]:
        # The last weights are for looking at. They grow with the square of the length
        # and belong in no pickle, checkpoint or deep copy.
        return self.__dict__ | {"attn": None}


def masked_softmax(
    scores: Tensor,  # [q_len, k_len, batch_size, heads]
    mask: Tensor | None,  # [q_len, k_len, batch_size, 1]
) -> Tensor:
    r"""Softmax over the keys, axis 1, in which a row without keys is all zeros.

    The original, with its minus infinity, gives such a row NaN: it divides 0 by 0.

    >>> torch.full((3,), -math.inf).softmax(dim=0)
    tensor([nan, nan, nan])

    The NaN then spreads through the gradients into every weight of the model, even
    where the loss leaves the row out. Here the row reads nothing:

    >>> scores = torch.zeros(1, 3, 1, 2)
    >>> masked_softmax(scores, torch.zeros(1, 3, 1, 1).bool()).sum()
    tensor(0.)
    """
    if mask is None:
        return scores.softmax(dim=1)
    # Infinity, not just a large number: it exists in every dtype, and no true score
    # lies below it. Empty rows are filled with 0 on the way in, where they would make
    # NaN, forward and backward, and again on the way out, where they would be uniform.
    empty = ~mask.any(dim=1, keepdim=True)  # [q_len, 1, batch_size, 1]
    scores = scores.masked_fill(~mask, -math.inf).masked_fill(empty, 0)
    weights = scores.softmax(dim=1)  # [q_len, k_len, batch_size, heads]
    return weights.masked_fill(empty, 0)


def check_sizes(**sizes: int) -> None:
    """Refuse sizes that no layer can have."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"`{name}` (={size!r}) must be an int from 1 up")


def check_settings(heads: int, d_model: int, dropout_prob: float) -> None:
    """Refuse settings that do not fit one another, and name the nearest that do."""
    check_sizes(heads=heads, d_model=d_model)
    if d_model % heads:
        fits = [n for n in (*range(1, 4097), d_model) if d_model % n == 0]
        near = [n for n in fits if n < heads][-1:] + [n for n in fits if n > heads][:1]
        raise ValueError(
            f"`d_model` (={d_model}) must be divisible by `heads` (={heads}); "
            f"{' and '.join(map(str, near))} would do"
        )
    if type(dropout_prob) not in (int, float) or not 0 <= dropout_prob <= 1:
        raise ValueError(f"`dropout_prob` (={dropout_prob!r}) must lie between 0 and 1")


def check_tensor(
    name: str, x: Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Refuse what is no dense tensor, or unlike the module in device or dtype."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but is a {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise TypeError(f"`{name}` is sparse, nested or quantised; pass a dense one")
    if x.device != device:
        where = f"`{name}` is on {x.device}, the module on {device}"
        raise ValueError(f"{where}; use `{name}.to({str(device)!r})`")
    if dtype not in (None, x.dtype):
        # Autocast makes its own peace between the dtypes that it casts.
        cast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if not (cast and x.is_floating_point()) or torch.float64 in (x.dtype, dtype):
            way_out = f"use `{name}.to({dtype})`, or give the module its dtype"
            raise TypeError(f"`{name}` is {x.dtype}, the module {dtype}; {way_out}")


def check_inputs(weight: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse inputs that do not fit the module's `weight`, or one another."""
    d_model = weight.shape[-1]
    inputs = {"query": query, "key": key, "value": value}
    for name, x in inputs.items():  # [..., d_model]
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
    if (v_len := value.shape[0]) != (k_len := key.shape[0]):
        raise ValueError(f"`value` has length {v_len}, `key` {k_len}; make them equal")


def check_mask(
    mask: Tensor, query_shape: tuple[int, ...], key_shape: tuple[int, ...]
) -> None:
    """Refuse a mask that would be read otherwise than it was meant."""
    # Read as 0/1, an additive mask is inverted: its 0 would forbid, its -inf allow.
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"`mask` is {mask.dtype}, not bool or integer 0/1 with 1 for 'may attend'; "
            f"use `mask.bool()` for 0 and 1, `masks.from_additive(mask)` for 0 and -inf"
        )
    (q_len, batch_size), k_len = query_shape[:2], key_shape[0]
    n_q, n_k, n_b = mask.shape if mask.dim() == 3 else (0, -1, 0)
    if n_q not in (1, q_len) or n_k != k_len or n_b not in (1, batch_size):
        raise ValueError(
            f"`mask` has shape {list(mask.shape)}, not [q_len or 1, k_len, batch_size "
            f"or 1] = [{q_len} or 1, {k_len}, {batch_size} or 1]; a [q_len, k_len] "
            f"mask needs `mask.unsqueeze(-1)`"
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
