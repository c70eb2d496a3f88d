r"""# Fast multi-head attention

`MultiHeadAttention` is a faster version of the [core module](../mha.md), for training
and inference. It has the same constructor, parameters, masks, errors and results: a
checkpoint of either loads into the other. It also has a KV cache, for decoding.

**The steps of a call**

1. `forward` checks the inputs as the core does, and converts the mask to bool.
2. Keys and values that no query may attend to are set to zero, unless they are known
   to hold neither NaN nor large numbers.
3. The submodules `query`, `key` and `value` project the inputs and split them into
   heads: `[seq_len, batch_size, heads, d_k]`. There is no packed copy of their weights,
   which could become stale, so hooks and replaced submodules work.
4. [`attention`](attention.md#attention) chooses a method from its table `DISPATCH`:
   PyTorch's fused kernel, the formula, or the blockwise kernel.
5. Each method combines the mask and causality in one bool tensor, `[batch_size or 1, 1,
   q_len, k_len]`. Fully masked rows attend to all keys in the softmax, so that nothing
   is NaN, and are set to zero after it.
6. The context is sequence first again, a view concatenates the heads, and `output`
   projects them. No tensor of a call is stored on the module.

Memory grows linearly with the length, not with its square, unless the weights are
returned.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2; [Fast Transformer Decoding](https://arxiv.org/abs/1911.02150),
Shazeer 2019, section 2.4, for the cost of a decoding step.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from headnotes import mha
from headnotes.fast.attention import attention, squares_are_finite, zero_hidden_keys


class MultiHeadAttention(nn.Module):
    r"""Fast multi-head attention over `[seq_len, batch_size, d_model]`.

    Takes the arguments of the core's class and raises its errors. No tensor of a call
    is stored on the module: `need_weights=True` returns the weights.
    Source: Vaswani et al. 2017, section 3.2.2.

    >>> core = mha.MultiHeadAttention(7, 77).eval()
    >>> fast = MultiHeadAttention(7, 77).eval()
    >>> fast.load_state_dict(core.state_dict())
    <All keys matched successfully>
    >>> x, y = torch.randn(3, 2, 77), torch.randn(5, 2, 77)
    >>> output = fast(query=x, key=y, value=y)
    >>> same = core(query=x, key=y, value=y)
    >>> torch.allclose(output, same, atol=1e-6)
    True

    Padding, which no query may attend to, may hold NaN:

    >>> mask = torch.ones(1, 5, 2).bool()
    >>> mask[:, 3:, 1] = False
    >>> y[3:, 1] = torch.nan
    >>> output = fast(query=x, key=y, value=y, mask=mask)
    >>> output.isfinite().all()
    tensor(True)
    """

    def __init__(
        self, heads: int, d_model: int, dropout_prob: float = 0.1, bias: bool = True
    ) -> None:
        r"""Build the four linear layers of the core, with the same names."""
        super().__init__()
        mha.check_settings(heads, d_model, dropout_prob)
        self.heads = heads
        self.d_k = d_model // heads
        # Three products instead of one packed product: measured on two cores, packing
        # changes the speed by -6 to +12 %, and a packed weight must be kept in sync.
        project = mha.PrepareForMultiHeadAttention
        self.query = project(d_model, heads, self.d_k, bias=bias)
        self.key = project(d_model, heads, self.d_k, bias=bias)
        self.value = project(d_model, heads, self.d_k, bias=True)
        self.output = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout_prob)

    def forward(
        self,
        *,
        query: Tensor,  # [q_len, batch_size, d_model]
        key: Tensor,  # [k_len, batch_size, d_model]
        value: Tensor,  # [k_len, batch_size, d_model]
        mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
        average_weights: bool = False,
    ) -> Any:
        r"""Attend from `query` to `key`, and return the weighted sum of `value`.

        Shapes, `mask` and errors are those of the core. With `is_causal` no query
        attends to a key after its own position, where the last query is aligned with
        the last key; it can be combined with a mask.

        With `need_weights` the result is a pair of output and weights, the latter
        before dropout, `[q_len, k_len, batch_size, heads]`, or with `average_weights`
        their mean over the heads, `[q_len, k_len, batch_size]`.

        >>> fast = MultiHeadAttention(7, 77).eval()
        >>> x, y = torch.randn(8, 2, 77).split([3, 5])
        >>> output, weights = fast(
        ...     query=x, key=y, value=y,
        ...     is_causal=True, need_weights=True,
        ... )
        >>> (weights[:, :, 0, 0] > 0).int()
        tensor([[1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1]], dtype=torch.int32)
        """
        mha.check_inputs(self.output.weight, query, key, value)
        if average_weights and not need_weights:
            raise ValueError(
                "`average_weights` (=True) averages what `need_weights` (=False) "
                "returns; pass `need_weights=True` too"
            )
        if mask is not None:
            mha.check_tensor("mask", mask, self.output.weight.device)
            mha.check_mask(mask, query.shape, key.shape)
            mask = mask.bool()
            # Clear the inputs, not only the projections: the gradient of a projection's
            # weight multiplies the inputs by zero, and 0 * NaN is NaN.
            if not (
                squares_are_finite(key) and (value is key or squares_are_finite(value))
            ):
                q_len = query.shape[0]
                key, value = zero_hidden_keys(key, value, mask, is_causal, q_len)

        q = self.query(query)  # [q_len, batch_size, heads, d_k]
        k, v = self.key(key), self.value(value)  # [k_len, batch_size, heads, d_k]
        shown = {"need_weights": need_weights, "average_weights": average_weights}
        context, weights = attention(
            q, k, v, mask=mask, is_causal=is_causal, dropout=self.dropout, **shown
        )  # [q_len, batch_size, heads, d_k], [q_len, k_len, batch_size, ...]
        output = self.output(context.flatten(-2))  # [q_len, batch_size, d_model]
        return (output, weights) if need_weights else output

    def cache(
        self, batch_size: int, capacity: int, *, grow: bool = False
    ) -> "KeyValueCache":
        r"""An empty KV cache for `decode`, with the module's sizes, dtype and device.

        Under autocast, the dtype is that of the outputs of the projections.
        """
        weight = self.output.weight
        dtype, kind = weight.dtype, weight.device.type
        if not weight.is_meta and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        sizes = batch_size, self.heads, self.d_k, capacity
        return KeyValueCache(*sizes, grow=grow, dtype=dtype, device=weight.device)

    @torch.no_grad()
    def decode(
        self, x: Tensor, cache: "KeyValueCache"
    ) -> tuple[Tensor, "KeyValueCache"]:
        r"""Decode the next positions, `x`: `[seq_len, batch_size, d_model]`.

        Each position attends to itself, to those before it, and to those in the cache,
        to which its key and value are appended. However a sequence is split into
        pieces, the outputs are those of one causal pass. There is no dropout, and no
        gradient. Raises what `forward` raises, and `ValueError` if the cache is full or
        has other sizes.

        >>> fast = MultiHeadAttention(7, 77).eval()
        >>> x = torch.randn(5, 2, 77)
        >>> cache = fast.cache(batch_size=2, capacity=5)
        >>> prompt, cache = fast.decode(x[:3], cache)
        >>> token, cache = fast.decode(x[3:4], cache)
        >>> at_once = fast(query=x, key=x, value=x, is_causal=True)
        >>> in_pieces = torch.cat([prompt, token])
        >>> torch.allclose(in_pieces, at_once[:4], atol=1e-6)
        True
        """
        weight, d_model = self.output.weight, self.output.in_features
        mha.check_tensor("x", x, weight.device, weight.dtype)
        if x.dim() != 3 or x.shape[-1] != d_model:
            raise ValueError(
                f"`x` has shape {list(x.shape)}, not [seq_len, batch_size, d_model "
                f"(={d_model})]; one token of each batch item needs `x.unsqueeze(0)`"
            )
        if not isinstance(cache, KeyValueCache):
            raise TypeError(
                f"`cache` is a {type(cache).__name__}, not a KeyValueCache; make one "
                f"with `cache(batch_size, capacity)`"
            )
        q, k, v = self.query(x), self.key(x), self.value(x)  # [..., heads, d_k]
        cache.append(k, v)
        # A module that replaces the dropout is applied here, too.
        plain = type(self.dropout) in (nn.Dropout, nn.Identity)
        if x.shape[0] == 1 and plain:
            # The last query may attend to all keys in the cache, so no mask is needed.
            # For one token, every further view would cost time.
            q = q.permute(1, 2, 0, 3)  # [batch_size, heads, ..., d_k]
            context = F.scaled_dot_product_attention(q, cache.keys, cache.values)
            context = context.permute(2, 0, 1, 3)  # [..., batch_size, heads, d_k]
        else:
            stored = cache.keys, cache.values
            k, v = (y.permute(2, 0, 1, 3) for y in stored)  # [..., heads, d_k]
            dropout = None if plain else self.dropout
            context, _ = attention(
                q, k, v, is_causal=True, dropout=dropout
            )  # [..., batch_size, heads, d_k]
        output = self.output(context.flatten(-2))  # [..., batch_size, heads * d_k]
        return output, cache


class KeyValueCache:
    r"""The KV cache: keys and values of `length` positions, with room for `capacity`.

    A language model generates one token at a time, and each token attends to all tokens
    before it. Their keys and values no longer change, so they are computed once and
    stored. A step then projects one token, and reads all stored numbers once, which
    limits its speed. The cache holds

    $$2 \cdot \texttt{batch\_size} \cdot \texttt{heads} \cdot \texttt{k\_len}
      \cdot d_k$$

    The heads are contiguous, and new positions are written in place; a cache that grows
    by `torch.cat` copies all earlier positions for each token.

    With `grow=True`, the capacity is doubled when it does not suffice; otherwise a full
    cache raises `ValueError`. Raises `ValueError` for sizes below 1.
    Source: Shazeer 2019, section 2.4.

    >>> cache = KeyValueCache(2, 3, 5, capacity=7, grow=True)
    >>> x = torch.randn(17, 2, 3, 5)
    >>> cache.append(x[:4], x[:4])
    >>> len(cache), cache.capacity
    (4, 7)
    >>> cache.append(x[4:], x[4:])
    >>> len(cache), cache.capacity
    (17, 28)
    >>> stored = x.permute(1, 2, 0, 3)
    >>> torch.equal(cache.keys, stored)
    True
    >>> torch.equal(cache.values, stored)
    True
    """

    def __init__(
        self,
        batch_size: int,
        heads: int,
        d_k: int,
        capacity: int,
        *,
        grow: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {"batch_size": batch_size, "heads": heads, "d_k": d_k}
        for name, size in (sizes | {"capacity": capacity}).items():
            if type(size) is not int or size < 1:
                raise ValueError(f"`{name}` (={size!r}) must be an int from 1 up")
        # Keys are used first, then values: one half of the buffer each.
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.buffer = torch.empty(
                2, batch_size, heads, capacity, d_k, dtype=dtype, device=device
            )  # [2, batch_size, heads, capacity, d_k]
        self.length = 0
        self.grow = grow

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:
        # `if cache:` tests whether a cache exists; an empty one must be true as well.
        return True

    @property
    def capacity(self) -> int:
        """The number of positions that fit into the buffer."""
        return self.buffer.shape[3]

    @property
    def keys(self) -> Tensor:
        """A view of the keys so far, `[batch_size, heads, length, d_k]`."""
        keys: Tensor = self.buffer[0]  # [batch_size, heads, ..., d_k]
        return keys[:, :, : self.length]  # [batch_size, heads, length, d_k]

    @property
    def values(self) -> Tensor:
        """A view of the values so far, `[batch_size, heads, length, d_k]`."""
        values: Tensor = self.buffer[1]  # [batch_size, heads, ..., d_k]
        return values[:, :, : self.length]  # [batch_size, heads, length, d_k]

    def append(
        self,
        key: Tensor,  # [seq_len, batch_size, heads, d_k]
        value: Tensor,  # [seq_len, batch_size, heads, d_k]
    ) -> None:
        r"""Store the keys and values of the next positions, without their gradients.

        Raises `TypeError` for another dtype, `ValueError` for a shape or device that
        does not fit, or where there is no room; the cache is then as it was before.

        >>> cache = KeyValueCache(2, 3, 5, capacity=1)
        >>> token = torch.randn(1, 2, 3, 5)
        >>> cache.append(token, token)
        >>> cache.append(token, token)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: the cache is full: it holds 1 of 1 ...
        """
        self.check("key", key)
        self.check("value", value)
        if len(key) != len(value):
            raise ValueError(
                f"`value` has length {len(value)}, `key` {len(key)}; make them equal"
            )
        end = self.length + len(key)
        if end > self.capacity and not self.grow:
            raise ValueError(
                f"the cache is full: it holds {self.length} of {self.capacity} "
                f"positions, and {len(key)} more do not fit; give it more "
                f"`capacity`, or `grow=True`"
            )
        if end > self.capacity:
            self.grow_to(end)
        with torch.no_grad():
            keys, values = self.buffer[
                :, :, :, self.length : end
            ]  # [..., seq_len, d_k]
            keys.copy_(key.permute(1, 2, 0, 3))
            values.copy_(value.permute(1, 2, 0, 3))
        self.length = end

    def grow_to(self, needed: int) -> None:
        """Double the capacity until it suffices; doubling keeps copies rare."""
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        *sizes, _, d_k = self.buffer.shape
        with torch.inference_mode(False):
            buffer = self.buffer.new_empty(
                *sizes, capacity, d_k
            )  # [..., capacity, d_k]
            buffer[:, :, :, : self.length] = self.buffer[:, :, :, : self.length]
        self.buffer = buffer

    def reorder(self, index: Tensor) -> None:
        r"""Replace batch item `i` by the keys and values of item `index[i]`.

        Beam search needs this, because the best continuations may all belong to one
        sequence. `index` holds integers, `[batch_size]`, one for each new batch item.
        Raises `TypeError` for another dtype, `ValueError` for another shape, or
        an item that does not exist.

        >>> cache = KeyValueCache(batch_size=3, heads=1, d_k=1, capacity=2)
        >>> x = torch.tensor([5.0, 7.0, 11.0]).view(1, 3, 1, 1)
        >>> cache.append(x, x)
        >>> cache.reorder(torch.tensor([2, 2, 0]))
        >>> cache.keys.flatten()
        tensor([11., 11.,  5.])
        """
        batch_size = self.buffer.shape[1]
        if not isinstance(index, Tensor) or index.dtype not in (
            torch.int32,
            torch.int64,
        ):
            seen = index.dtype if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"`index` is {seen}, not an int64 tensor of batch items")
        if index.layout != torch.strided or index.is_nested or index.is_meta:
            raise TypeError("`index` is sparse, nested or on meta; pass a dense one")
        if index.dim() != 1 or not len(index):
            raise ValueError(
                f"`index` has shape {list(index.shape)}, not [batch_size]; give one "
                f"item for each new batch item"
            )
        low, high = (bound.item() for bound in index.aminmax())
        if low < 0 or high >= batch_size:
            raise ValueError(
                f"`index` names items {low} to {high}, but there are 0 to "
                f"{batch_size - 1}"
            )
        with torch.inference_mode(False):
            index = index.to(self.buffer.device).clone()  # not an inference tensor
            self.buffer = self.buffer.index_select(1, index)  # [2, ...]

    def check(self, name: str, x: Tensor) -> None:
        """Refuse a tensor that does not fit the stored ones."""
        if not isinstance(x, Tensor) or x.dtype != self.buffer.dtype:
            seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"`{name}` is {seen}, the cache {self.buffer.dtype}; make the cache "
                f"with the `dtype` that it is to hold"
            )
        _, batch_size, heads, _, d_k = self.buffer.shape
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"`{name}` is sparse or nested; pass a dense one")
        if x.dim() != 4 or x.shape[1:] != (batch_size, heads, d_k):
            raise ValueError(
                f"`{name}` has shape {list(x.shape)}, not [seq_len, batch_size "
                f"(={batch_size}), heads (={heads}), d_k (={d_k})]"
            )
        if x.device != self.buffer.device:
            raise ValueError(
                f"`{name}` is on {x.device}, the cache on {self.buffer.device}; make "
                f"the cache with that `device`"
            )
