r"""# Fast multi-head attention

`MultiHeadAttention` is a faster version of the [core module](../mha.md), for training
and inference. It has the same constructor, parameters, masks, errors and results: a
checkpoint of either loads into the other. It also has a KV cache, for decoding.

Further arguments, all optional, make it the attention of current decoders: grouped
heads, rotary positions, a sliding window, sinks, and others. They are described with
their [components](components.md).

**The steps of a call**

1. `forward` checks the inputs as the core does, and converts the mask to bool.
2. Keys and values that no query may attend to are set to zero, unless they are known
   to hold neither NaN nor large numbers, and to be seen by no hook and no module of
   your own. Without gradients, and for padding in self-attention, their projections
   are, instead.
3. The submodules `query`, `key` and `value` project the inputs and split them into
   heads: `[seq_len, batch_size, heads, d_k]`, with fewer heads of keys and values if
   `kv_heads` says so. There is no packed copy of their weights, which could become
   stale, so hooks and replaced submodules work. What has neither is computed without
   a call of its module; in training on a GPU, one product with the weights of all
   three, concatenated in each call, projects a `query` that is also `key` and `value`.
4. `rotary` rotates queries and keys by their positions, before they are cached. The
   last query has the position of the last key.
5. [`attention`](attention.md#attention) chooses a method from its table `DISPATCH`:
   PyTorch's fused kernel, the formula, or the blockwise kernel. `decode` of one token
   does not use the table: if nothing requires another method, it calls the fused kernel
   directly.
6. Each method combines mask, causality and window in one bool tensor, `[batch_size or
   1, 1, q_len, k_len]`; the blockwise kernel skips the keys outside of a window. Fully
   masked rows attend to all keys in the softmax, so that nothing is NaN. Their context
   is set to zero after it, also where a visible value is NaN. (In the core, it is then
   0 · NaN, which is NaN.)
7. The context is sequence first again, a view concatenates the heads, and `output`
   projects them. No tensor of a call is stored on the module.

**Infinite keys.** A row is NaN if its score with a key that it may attend to is
infinity or NaN. With a row of the mask for each query or with causality, in a compiled
or exported call or on a GPU, the rows where that score is minus infinity are NaN as
well; in the core and otherwise, such a key has a weight of 0 there.

Memory grows linearly with the length, not with its square, unless the weights are
returned.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2; [Fast Transformer Decoding](https://arxiv.org/abs/1911.02150),
Shazeer 2019, section 2.4, for the cost of a decoding step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812

from headnotes import mha
from headnotes.checks import (
    check_items,
    check_next,
    check_padding,
    check_sizes,
    zero_padding,
)
from headnotes.fast.attention import attention
from headnotes.fast.components import Rotary, Scores, Widths, check_bias
from headnotes.fast.formula import (
    DROPOUTS,
    Forwards,
    has_tangent,
    is_plain,
    is_traced,
    is_transformed,
    squares_are_finite,
    zero_hidden_keys,
)
from headnotes.variants.rotary import check_frequencies

# Projections that compute each position from itself alone.
PROJECTIONS: Forwards = {
    mha.PrepareForMultiHeadAttention: mha.PrepareForMultiHeadAttention.forward
}
LINEAR: Forwards = {nn.Linear: nn.Linear.forward}


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

    Two heads of keys and values for six of queries, with rotary positions and a bias:

    >>> rotary = Rotary(10000 ** -(torch.arange(7).double() / 7))
    >>> def bias(i, j):
    ...     slopes = torch.arange(6) / 8
    ...     return slopes * (j - i.unsqueeze(1)).unsqueeze(-1)
    >>> options = {"kv_heads": 2, "rotary": rotary, "scores": Scores(bias=bias)}
    >>> widths = Widths(d_k=14, d_v=10)
    >>> decoder = MultiHeadAttention(6, 84, widths=widths, **options).eval()
    >>> x = torch.randn(7, 4, 84)
    >>> at_once = decoder(query=x[2:], key=x, value=x, is_causal=True)

    Decoded in pieces, the cache holds two heads. The last sequence begins with two
    tokens of padding:

    >>> padding = torch.tensor([0, 0, 0, 2])
    >>> cache = decoder.cache(4, 7, left_padding=padding)
    >>> for piece in x.split([2, 3, 1, 1]):
    ...     y, cache = decoder.decode(piece, cache)
    >>> cache.keys.shape
    torch.Size([4, 2, 7, 14])
    >>> torch.allclose(y[0, :3], at_once[-1, :3], atol=1e-6)
    True

    With a window of 3, it holds three positions:

    >>> decoder = MultiHeadAttention(6, 84, widths=widths, window=3, kv_heads=2)
    >>> cache = decoder.cache(4, 5)
    >>> for piece in x.split([1, 6]):
    ...     y, cache = decoder.decode(piece, cache)
    >>> cache.keys.shape
    torch.Size([4, 2, 3, 14])
    """

    score_bias: Callable[[Tensor, Tensor], Tensor] | None
    sinks: Tensor | None

    def __init__(
        self,
        heads: int,
        d_model: int,
        dropout_prob: float = 0.1,
        bias: bool = True,
        *,
        kv_heads: int | None = None,
        widths: Widths | None = None,
        project: Callable[..., nn.Module] = mha.PrepareForMultiHeadAttention,
        rotary: Callable[[Tensor, Tensor], Tensor] | None = None,
        window: int | None = None,
        scores: Scores | None = None,
    ) -> None:
        r"""Build the four linear layers of the core, with the same names.

        `kv_heads` must divide `heads`; query heads `g * n` to `g * n + g - 1`, of a
        group of `g`, share head `n` of keys and values. `project` makes the submodules
        `query` and `key`; it takes what `PrepareForMultiHeadAttention` takes, and may
        normalize. With `window`, a query attends to keys that are fewer than `window`
        positions away: with `is_causal`, to itself and to `window - 1` keys before.
        """
        super().__init__()
        widths, scores = widths or Widths(), scores or Scores()
        d_k = widths.d_k
        mha.check_settings(heads, d_model if d_k is None else heads * d_k, dropout_prob)
        check_sizes(d_model=d_model)
        self.d_model = d_model
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        check_sizes(kv_heads=self.kv_heads)
        if heads % self.kv_heads:
            raise ValueError(
                f"`heads` (={heads}) must be divisible by `kv_heads` (={kv_heads}), so "
                f"that each head of keys and values serves equally many queries"
            )
        self.d_k = d_model // heads if d_k is None else d_k
        self.d_v = widths.d_v or self.d_k
        self.widths = d_model, widths.key or d_model, widths.value or d_model
        if isinstance(rotary, Rotary):
            check_frequencies(torch.tensor(rotary.frequencies, device="cpu"), self.d_k)
        self.rotary = rotary
        if window is not None:
            check_sizes(window=window)
        self.window = window
        self.scale, self.soft_cap = scores.scale, scores.soft_cap
        self.score_bias = scores.bias
        # Three weights instead of one packed weight, which must be kept in sync, or
        # changes the names in checkpoints: measured on two cores, packing changes the
        # speed by -6 to +12 %. On a GPU, training packs them anew in each call.
        self.query = project(d_model, heads, self.d_k, bias=bias)
        self.key = project(self.widths[1], self.kv_heads, self.d_k, bias=bias)
        self.value = mha.PrepareForMultiHeadAttention(
            self.widths[2], self.kv_heads, self.d_v, bias=True
        )
        self.output = nn.Linear(heads * self.d_v, d_model)
        self.sinks = nn.Parameter(torch.zeros(heads)) if scores.sinks else None
        self.dropout = nn.Dropout(dropout_prob)

    def forward(
        self,
        *,
        query: Tensor,  # [q_len, batch_size, d_model]
        key: Tensor,
        value: Tensor,
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

        Keys and values may have widths of their own:

        >>> cross = MultiHeadAttention(7, 77, widths=Widths(key=33, value=55))
        >>> key, value = torch.randn(5, 2, 33), torch.randn(5, 2, 55)
        >>> cross(query=x, key=key, value=value).shape
        torch.Size([3, 2, 77])
        """
        mha.check_weight(self, "output")
        check_inputs(self.output.weight, self.widths, query, key, value)
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
            shares_row = mask.shape[0] == 1 and not is_causal and self.window is None
            if not self.padding_is_harmless(query, key, value, shares_row):
                key, value = zero_hidden_keys(
                    key, value, mask, is_causal, query.shape[0], self.window
                )

        q, k, v = self.project_inputs(
            query, key, value
        )  # [q_len, ...], [k_len, ...], [k_len, ...]
        check_heads(q, k, v, mask)
        bias = None
        if self.rotary is not None or self.score_bias is not None:
            q_len, k_len = q.shape[0], k.shape[0]
            key_positions = torch.arange(k_len, device=k.device)  # [k_len]
            query_positions = torch.arange(
                k_len - q_len, k_len, device=k.device
            )  # [q_len]
            bias = self.get_bias(query_positions, key_positions)  # [q_len, k_len, ...]
            if self.rotary is not None:
                q = self.rotary(q, query_positions)
                k = self.rotary(k, key_positions)
        context, weights = attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=is_causal,
            window=self.window,
            scale=self.scale,
            soft_cap=self.soft_cap,
            bias=bias,
            sinks=self.sinks,
            dropout=self.dropout,
            need_weights=need_weights,
            average_weights=average_weights,
        )  # [q_len, batch_size, heads, d_v], [q_len, k_len, batch_size, ...]
        output = self.output(context.flatten(-2))  # [q_len, batch_size, d_model]
        return (output, weights) if need_weights else output

    def project_inputs(
        self,
        query: Tensor,  # [q_len, batch_size, d_model]
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, split into heads: `[seq_len, batch_size, ...]`.

        On a GPU, a step of training takes as long as its operators take to launch. So
        one product projects an input that is all three.
        """
        parts = [self.query, self.key, self.value]
        if query is key is value and can_be_packed(parts, query):
            q, k, v = project_packed(parts, query)
        else:
            q = project(self.query, query)  # [q_len, batch_size, ...]
            k = project(self.key, key)  # [k_len, batch_size, ...]
            v = project(self.value, value)  # [k_len, batch_size, ...]
        return q, k, v

    def padding_is_harmless(
        self, query: Tensor, key: Tensor, value: Tensor, shares_row: bool
    ) -> bool:
        """Whether padding is known to change nothing, as long as it is masked.

        No other module, such as a convolution, may mix it with its neighbors, and no
        dropout of your own may give it a weight. For gradients, it must be finite,
        unless it is in the queries, too, and all share a row of the mask: NaN then
        makes the gradients NaN in the core as well.
        """
        if not (
            is_plain_projection(self.key)
            and is_plain_projection(self.value)
            and (self.rotary is None or type(self.rotary) is Rotary)
            and is_plain(self.dropout, DROPOUTS)
        ):
            return False
        if not torch.is_grad_enabled() or (shares_row and query is key is value):
            return True
        return squares_are_finite(key) and (value is key or squares_are_finite(value))

    def get_bias(
        self,
        query_positions: Tensor,  # [q_len]
        key_positions: Tensor,  # [k_len]
    ) -> Tensor | None:
        """What is added to the scores, `[q_len, k_len, 1, heads or 1]`."""
        if self.score_bias is None:
            return None
        bias = self.score_bias(query_positions, key_positions)  # [q_len, k_len, ...]
        sizes = query_positions.shape[0], key_positions.shape[0], self.heads
        return check_bias(bias, *sizes)  # [q_len, k_len, ...]

    def cache(
        self,
        batch_size: int,
        capacity: int,
        *,
        grow: bool = False,
        left_padding: Tensor | None = None,
    ) -> "KeyValueCache":
        r"""An empty KV cache for `decode`, with the module's sizes, dtype and device.

        With a window, it stores the last `window` positions at most, whatever the
        `capacity`. `left_padding`, integers `[batch_size]`, are the numbers of padded
        positions at the start of each sequence, to which no query attends. Under
        autocast, the dtype is that of the outputs of linear projections.
        """
        mha.check_weight(self, "output")
        weight = self.output.weight
        dtype, kind = weight.dtype, weight.device.type
        # Autocast leaves float64 alone.
        castable = dtype != torch.float64 and not weight.is_meta
        if castable and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return KeyValueCache(
            batch_size,
            self.kv_heads,
            self.d_k,
            capacity,
            d_v=self.d_v,
            window=self.window,
            left_padding=left_padding,
            grow=grow,
            dtype=dtype,
            device=weight.device,
        )

    @torch.no_grad()
    def decode(
        self, x: Tensor, cache: "KeyValueCache"
    ) -> tuple[Tensor, "KeyValueCache"]:
        r"""Decode the next positions, `x`: `[seq_len, batch_size, d_model]`.

        Each position attends to itself, to those before it, and to those in the cache,
        to which its key and value are appended. However a sequence is split into
        pieces, the outputs are those of one causal pass. There is no gradient, except
        in forward mode, and no dropout but a hook on it or a module in its place.
        Raises what `forward` raises, `ValueError` if the cache is full or has other
        sizes, and `TypeError` under `vmap` and `jvp` or for a tracer's fake tensors,
        which the cache cannot hold; after any error, it is as it was before.

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
        d_model = self.d_model
        if self.widths != (d_model,) * 3:
            raise ValueError(
                f"keys and values have widths {self.widths[1:]}, not d_model "
                f"(={d_model}), so they are not those of `x`; use `forward`"
            )
        if not isinstance(cache, KeyValueCache):
            raise TypeError(
                f"`cache` is a {type(cache).__name__}, not a KeyValueCache; make one "
                f"with `cache(batch_size, capacity)`"
            )
        if cache.window != self.window:
            raise ValueError(
                f"`cache` has window {cache.window}, the module {self.window}; make it "
                f"with `cache(batch_size, capacity)`"
            )
        mha.check_weight(self, "output")
        check_next(x, self.output.weight, d_model, cache.buffer.shape[1])
        padding = cache.left_padding if cache.length < cache.most_padding else None
        x = zero_padding(x, padding, cache.length)  # [seq_len, batch_size, d_model]
        q, k, v = (
            project(part, x) for part in (self.query, self.key, self.value)
        )  # [seq_len, ...]
        check_heads(q, k, v)
        if self.rotary is not None:
            start = cache.length
            positions = torch.arange(
                start, start + len(x), device=x.device
            )  # [seq_len]
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        keys, values = cache.extend(k, v)  # [batch_size, kv_heads, ...]
        try:
            context = self.attend_to_cache(q, keys, values, cache)  # [seq_len, ...]
            output = self.output(context.flatten(-2))  # [..., batch_size, d_model]
        except BaseException:
            cache.take_back(k.shape[0], keys, values)
            raise
        return output, cache

    def attend_to_cache(
        self,
        q: Tensor,  # [seq_len, batch_size, heads, d_k]
        keys: Tensor,  # [batch_size, kv_heads, k_len, d_k]
        values: Tensor,  # [batch_size, kv_heads, k_len, d_v]
        cache: "KeyValueCache",
    ) -> Tensor:
        """The context of the last positions in the cache, `[seq_len, ...]`."""
        seq_len, bias, mask = q.shape[0], None, None
        if self.score_bias is not None or cache.left_padding is not None:
            end = cache.length
            positions = torch.arange(end - seq_len, end, device=q.device)  # [seq_len]
            key_positions = cache.key_positions(seq_len, keys.shape[2])  # [k_len]
            bias = self.get_bias(positions, key_positions)  # [seq_len, k_len, ...]
            mask = cache.mask(key_positions)  # [1, k_len, batch_size]
        # A hook on the dropout, or a module in its place, is applied here, too.
        plain = is_plain(self.dropout, DROPOUTS)
        kernel_suffices = plain and self.soft_cap is None and self.sinks is None
        if seq_len == 1 and kernel_suffices and not is_transformed(q, keys, values):
            # For one token, every further view would cost time.
            return self.attend_to_all(q, keys, values, mask, bias)  # [seq_len, ...]
        k, v = (
            y.permute(2, 0, 1, 3) for y in (keys, values)
        )  # [k_len, batch_size, kv_heads, ...]
        context, _ = attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=True,
            window=self.window if seq_len > 1 else None,
            scale=self.scale,
            soft_cap=self.soft_cap,
            bias=bias,
            sinks=self.sinks,
            dropout=None if plain else self.dropout,
        )  # [seq_len, batch_size, heads, d_v]
        return context

    def attend_to_all(
        self,
        query: Tensor,
        keys: Tensor,  # [batch_size, kv_heads, k_len, d_k]
        values: Tensor,  # [batch_size, kv_heads, k_len, d_v]
        mask: Tensor | None,  # [..., k_len, batch_size]
        bias: Tensor | None,
    ) -> Tensor:
        """The context of one token, which may attend to all keys in the cache.

        The query heads that share keys are further queries of one head, so the keys are
        read once.
        """
        _, batch_size, heads, d_k = query.shape
        q = query.reshape(batch_size, keys.shape[1], -1, d_k)  # [..., group, d_k]
        added = None
        if bias is not None:
            added = bias.permute(2, 3, 0, 1).to(query.dtype)  # [..., k_len]
            if added.shape[1] > 1:
                added = added.view(1, *q.shape[1:3], -1)  # [..., group, k_len]
        if mask is not None:
            mask = mask.permute(2, 0, 1).unsqueeze(1)  # [batch_size, ..., k_len]
            added = (
                mask if added is None else added.masked_fill(~mask, -torch.inf)
            )  # [..., k_len]
        context = F.scaled_dot_product_attention(
            q, keys, values, added, scale=self.scale
        )  # [batch_size, kv_heads, group, d_v]
        return context.reshape(1, batch_size, heads, -1)  # [1, batch_size, heads, d_v]


def is_plain_projection(part: Any) -> bool:
    """Whether a projection is that of the core, without a hook on it."""
    return is_plain(part, PROJECTIONS) and is_plain(part.linear, LINEAR)


def project(
    part: Any,
    x: Tensor,  # [seq_len, batch_size, ...]
) -> Tensor:
    """What `part(x)` returns, `[seq_len, batch_size, heads, d_k]`.

    The modules and checks of three projections take longer than a short attention. So
    what they compute is computed here, where it cannot be anything else.

    >>> part = mha.PrepareForMultiHeadAttention(14, 2, 7, bias=True)
    >>> x = torch.randn(3, 5, 14)
    >>> torch.equal(project(part, x), part(x))
    True
    >>> hook = part.register_forward_hook(lambda part, inputs, output: output.sin())
    >>> torch.equal(project(part, x), part(x))
    True
    """
    if is_plain_projection(part):
        layer: Any = part.linear
        weight = getattr(layer, "weight", None)
        if (
            isinstance(weight, Tensor)
            and x.shape[-1] == weight.shape[-1]
            and x.dtype == weight.dtype
            and x.device == weight.device
        ):
            heads, d_k = part.heads, part.d_k
            y = F.linear(x, weight, layer.bias)  # [..., heads * d_k]
            return y.view(*y.shape[:-1], heads, d_k)  # [..., heads, d_k]
    projected: Tensor = part(x)  # [seq_len, batch_size, ...]
    return projected


def can_be_packed(parts: Sequence[Any], x: Tensor) -> bool:
    """Whether one product in place of three is right, and known to be faster.

    In a step of training it saves a launch for each part and each derivative. In
    evaluation it saves two, which take less time than to concatenate the weights.
    """
    if x.device.type != "cuda" or not torch.is_grad_enabled() or is_traced():
        return False
    return all(
        is_plain_projection(part)
        and part.linear.weight.shape[-1] == x.shape[-1]
        and all(
            type(weight) in (Tensor, nn.Parameter)
            and weight.dtype == x.dtype
            and weight.device == x.device
            for weight in (part.linear.weight, part.linear.bias)
        )
        for part in parts
    )


def project_packed(
    parts: Sequence[Any],
    x: Tensor,  # [seq_len, batch_size, ...]
) -> list[Tensor]:
    """What each part returns for `x`, from one product with their present weights.

    >>> parts = [mha.PrepareForMultiHeadAttention(14, 2, 7, bias=True) for _ in "qkv"]
    >>> x = torch.randn(3, 5, 14)
    >>> query, key, value = project_packed(parts, x)
    >>> query.shape, torch.allclose(value, parts[2](x), atol=1e-6)
    (torch.Size([3, 5, 2, 7]), True)
    """
    layers = [part.linear for part in parts]
    weight = torch.cat([layer.weight for layer in layers])  # [width, ...]
    bias = torch.cat([layer.bias for layer in layers])  # [width]
    y = F.linear(x, weight, bias)  # [seq_len, batch_size, width]
    widths = [part.heads * part.d_k for part in parts]
    pieces = zip(torch.split(y, widths, dim=-1), parts, strict=True)
    return [x.view(*x.shape[:-1], part.heads, part.d_k) for x, part in pieces]


def check_inputs(
    weight: Tensor,
    widths: tuple[int, int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> None:
    """Refuse inputs that do not fit the module's widths, or one another."""
    inputs = {"query": query, "key": key, "value": value}
    if widths == (weight.shape[0],) * 3:
        # The check of the core reads the last axis.
        return mha.check_inputs(weight.mT, query, key, value)
    for (name, x), width in zip(inputs.items(), widths, strict=True):
        mha.check_tensor(name, x, weight.device, weight.dtype)
        if x.dim() != 3 or x.shape[-1] != width:
            raise ValueError(
                f"`{name}` has shape {list(x.shape)}, not [seq_len, batch_size, width "
                f"(={width})]"
            )
        if x.shape[1] != query.shape[1]:
            raise ValueError(
                f"`{name}` has batch size {x.shape[1]}, but `query` has "
                f"{query.shape[1]}; share one sequence with `{name}.expand`"
            )
    if len(key) != len(value):
        raise ValueError(
            f"`value` has length {len(value)}, `key` {len(key)}; make them equal"
        )


def check_heads(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> None:
    """Refuse projections of sizes that do not fit one another, or the mask.

    Hooks and modules of one's own may return any. Kernels do not check them all, and
    read other memory.
    """
    q, k, v = query.shape, key.shape, value.shape
    fits = (
        len(q) == len(k) == len(v) == 4
        and q[1] == k[1] == v[1]
        and q[3] == k[3]
        and k[0] == v[0]
        and k[2] == v[2]
        and q[2] % k[2] == 0
        and (mask is None or mha.mask_fits(mask, q[0], k[0], q[1]))
    )
    if not fits:
        masked = "" if mask is None else f", for a mask of shape {list(mask.shape)}"
        raise ValueError(
            f"the projections `query`, `key` and `value` return shapes {list(q)}, "
            f"{list(k)} and {list(v)}{masked}, not [q_len, batch_size, heads, d_k], "
            f"[k_len, batch_size, kv_heads, d_k] and [k_len, batch_size, kv_heads, "
            f"d_v]; where a size of 1 stands for all, use `expand`"
        )


def check_kind(name: str, x: Tensor, buffer: Tensor) -> None:
    """Refuse a tensor of a tracer or transform that a write to the cache would lose."""
    if torch.compiler.is_dynamo_compiling():
        return
    if isinstance(x, FakeTensor) != isinstance(buffer, FakeTensor):
        fake, real = f"`{name}`", "the cache"
        if not isinstance(x, FakeTensor):
            fake, real = real, fake
        raise TypeError(
            f"{fake} is a fake tensor, and {real} is not; where a tracer makes fake "
            f"tensors, make the cache in the traced function"
        )
    functorch: Any = torch._C._functorch
    if functorch.is_batchedtensor(x) and not functorch.is_batchedtensor(buffer):
        raise TypeError(
            f"`{name}` is batched by `vmap`, and the cache is not; decode all "
            f"sequences as one batch"
        )
    wraps = functorch.is_gradtrackingtensor
    if wraps(x) and not wraps(buffer) and has_tangent(x):
        raise TypeError(
            f"`{name}` has a tangent of `torch.func.jvp`, which a write to the cache "
            f"loses; use `torch.autograd.forward_ad`"
        )


class KeyValueCache:
    r"""The KV cache: keys and values of `length` positions, with room for `capacity`.

    A language model generates one token at a time, and each token attends to all tokens
    before it. Their keys and values no longer change, so they are computed once and
    stored. A step then projects one token, and reads all stored numbers once, which
    limits its speed. The cache holds

    $$2 \cdot \texttt{batch\_size} \cdot \texttt{heads} \cdot \texttt{k\_len}
      \cdot d_k$$

    numbers; `heads` are those of keys and values, which grouped-query attention has
    fewer of. The heads are contiguous, and new positions are written in place; a cache
    that grows by `torch.cat` copies all earlier positions for each token.

    With `grow=True`, the capacity is doubled when it does not suffice; otherwise a full
    cache raises `ValueError`. With `window`, the cache is a ring: position $p$ is in
    slot `p % window`, where it replaces position `p - window`. It is full only where
    the capacity is below the window: without `grow=True` it then raises, too.
    `left_padding`, `[batch_size]`, counts the padded positions at the start of each
    sequence. Values may have a width `d_v` of their own; they take the room of the
    wider of both.

    Raises `ValueError` for sizes below 1, or padding of another shape.
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
        d_v: int | None = None,
        window: int | None = None,
        left_padding: Tensor | None = None,
        grow: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_sizes(batch_size=batch_size, heads=heads, d_k=d_k, capacity=capacity)
        d_v = d_k if d_v is None else d_v
        check_sizes(d_v=d_v)
        if window is not None:
            check_sizes(window=window)
            capacity = min(capacity, window)
        # Keys are used first, then values: one half of the buffer each.
        self.buffer = torch.zeros(
            2,
            batch_size,
            heads,
            capacity,
            max(d_k, d_v),
            dtype=dtype,
            device=device,
        )  # [2, batch_size, heads, capacity, ...]
        self.widths = d_k, d_v
        self.window = window
        self.length = 0
        self.grow = grow
        self.left_padding: Tensor | None = None
        # The longest padding: whether there is any at a position, without tensors.
        self.most_padding = 0
        if left_padding is not None:
            # A copy: the caller may use the tensor for the next batch.
            self.left_padding = check_padding(left_padding, batch_size).to(
                self.buffer.device, copy=True
            )  # [batch_size]
            self.most_padding = int(left_padding.max())

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
        """A view of the stored keys, `[batch_size, heads, stored, d_k]`."""
        keys: Tensor = self.buffer[0]  # [batch_size, heads, ...]
        return keys[:, :, : self.length, : self.widths[0]]  # [batch_size, heads, ...]

    @property
    def values(self) -> Tensor:
        """A view of the stored values, `[batch_size, heads, stored, d_v]`."""
        values: Tensor = self.buffer[1]  # [batch_size, heads, ...]
        return values[:, :, : self.length, : self.widths[1]]  # [batch_size, heads, ...]

    @property
    def positions(self) -> Tensor:
        """The positions of the stored keys, `[stored]`; only a ring has them unsorted.

        >>> cache = KeyValueCache(1, 1, 1, capacity=9, window=3)
        >>> x = torch.arange(5.0).view(5, 1, 1, 1)
        >>> cache.append(x, x)
        >>> cache.positions, cache.keys.flatten()
        (tensor([3, 4, 2]), tensor([3., 4., 2.]))
        """
        stored, last = min(self.length, self.capacity), self.length - 1
        slots = torch.arange(stored, device=self.buffer.device)  # [stored]
        return last - (last - slots) % self.capacity  # [stored]

    def key_positions(self, seq_len: int, k_len: int) -> Tensor:
        """The positions of what `extend` returned for a piece of `seq_len`."""
        if seq_len == 1:
            return self.positions  # [k_len]
        return torch.arange(
            self.length - k_len, self.length, device=self.buffer.device
        )  # [k_len]

    def mask(
        self,
        positions: Tensor,  # [k_len]
    ) -> Tensor | None:
        """False for padding among keys of these positions: `[1, k_len, batch_size]`."""
        if self.left_padding is None:
            return None
        allowed = positions.unsqueeze(1) >= self.left_padding  # [k_len, batch_size]
        return allowed.unsqueeze(0)  # [1, k_len, batch_size]

    def extend(
        self,
        key: Tensor,  # [seq_len, batch_size, heads, ...]
        value: Tensor,  # [seq_len, batch_size, heads, ...]
    ) -> tuple[Tensor, Tensor]:
        """Append, and return the keys and values that the new queries may attend to.

        They are `[batch_size, heads, k_len, ...]`. In a ring, a piece of several
        positions overwrites keys that its first queries still need, so these are
        copied.
        """
        start, end = self.length, self.length + key.shape[0]
        if key.shape[0] < 2 or end <= self.capacity or self.window is None:
            self.append(key, value)
            return self.keys, self.values
        before = torch.arange(max(0, start - self.window + 1), start)  # [needed]
        slots = (before % self.capacity).to(self.buffer.device)  # [needed]
        past = [x.index_select(2, slots) for x in (self.keys, self.values)]
        self.append(key, value)
        keys, values = (
            torch.cat([old, new.permute(1, 2, 0, 3)], 2)
            for old, new in zip(past, (key, value), strict=True)
        )  # [batch_size, heads, needed + seq_len, ...]
        return keys, values

    def take_back(
        self,
        seq_len: int,
        keys: Tensor,  # [batch_size, heads, k_len, ...]
        values: Tensor,  # [batch_size, heads, k_len, ...]
    ) -> None:
        """Undo `extend` by a piece of `seq_len`, which returned `keys` and `values`.

        In a ring, a position that no later query may attend to stays overwritten.

        >>> cache = KeyValueCache(2, 7, 1, capacity=9, window=3)
        >>> x = torch.arange(7.0).view(7, 1, 1, 1).expand(7, 2, 7, 1)
        >>> cache.append(x[:4], x[:4])
        >>> keys, values = cache.extend(x[4:], x[4:])
        >>> cache.take_back(3, keys, values)
        >>> cache.append(x[4:5], x[4:5])
        >>> cache.positions, cache.keys[0, 0].flatten()
        (tensor([3, 4, 2]), tensor([3., 4., 2.]))
        """
        self.length -= seq_len
        past = keys.shape[2] - seq_len
        if self.window is not None and seq_len > 1:
            # The piece has overwritten positions of the ring that it returned.
            self.length -= past
            self.append(*(x[:, :, :past].permute(2, 0, 1, 3) for x in (keys, values)))

    def append(
        self,
        key: Tensor,  # [seq_len, batch_size, heads, ...]
        value: Tensor,  # [seq_len, batch_size, heads, ...]
    ) -> None:
        r"""Store the keys and values of the next positions, without their gradients.

        Raises `TypeError` for another dtype, for a tensor of a tracer or of `vmap`,
        `ValueError` for a shape or device that does not fit, or where there is no room;
        the cache is then as it was before.

        >>> cache = KeyValueCache(2, 3, 5, capacity=1)
        >>> token = torch.randn(1, 2, 3, 5)
        >>> cache.append(token, token)
        >>> cache.append(token, token)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: the cache is full: it holds 1 of 1 ...
        """
        for name, x, width in zip(
            ("key", "value"), (key, value), self.widths, strict=True
        ):
            self.check(name, x, width)
        if key.shape[0] != value.shape[0]:
            raise ValueError(
                f"`value` has length {len(value)}, `key` {len(key)}; make them equal"
            )
        end = self.length + key.shape[0]
        if end > self.capacity != self.window:
            if not self.grow:
                raise ValueError(
                    f"the cache is full: it holds {self.length} of {self.capacity} "
                    f"positions, and {len(key)} more do not fit; give it more "
                    f"`capacity`, or `grow=True`"
                )
            self.grow_to(end)
        if self.buffer.is_inference() and not torch.is_inference_mode_enabled():
            # Made or copied in inference mode, it cannot be written to outside of it.
            self.buffer = self.buffer.clone()
        # In a ring, positions that the last ones of this piece overwrite are left out.
        first = max(self.length, end - self.capacity)
        with torch.no_grad():
            while first < end:
                slot = first % self.capacity
                n = min(end - first, self.capacity - slot)
                part = slice(first - self.length, first - self.length + n)
                slots = self.buffer[
                    :, :, :, slot : slot + n
                ]  # [2, batch_size, heads, ...]
                for stored, x in zip(slots, (key, value), strict=True):
                    stored[..., : x.shape[-1]].copy_(x[part].permute(1, 2, 0, 3))
                first += n
        self.length = end

    def grow_to(self, needed: int) -> None:
        """Double the capacity until it suffices; doubling keeps copies rare."""
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        if self.window is not None:
            capacity = min(capacity, self.window)
        *sizes, _, width = self.buffer.shape
        buffer = self.buffer.new_zeros(*sizes, capacity, width)  # [..., width]
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
        check_items(index, self.buffer.shape[1])
        index = index.to(self.buffer.device)
        self.buffer = self.buffer.index_select(1, index)  # [2, ...]
        if self.left_padding is not None:
            self.left_padding = self.left_padding[index]
            self.most_padding = int(self.left_padding.max())

    def check(self, name: str, x: Tensor, width: int) -> None:
        """Refuse a tensor that does not fit the stored ones."""
        if not isinstance(x, Tensor) or x.dtype != self.buffer.dtype:
            seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"`{name}` is {seen}, the cache {self.buffer.dtype}; make the cache "
                f"with the `dtype` that it is to hold"
            )
        _, batch_size, heads, *_ = self.buffer.shape
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"`{name}` is sparse or nested; pass a dense one")
        check_kind(name, x, self.buffer)
        if x.dim() != 4 or x.shape[1:] != (batch_size, heads, width):
            raise ValueError(
                f"`{name}` has shape {list(x.shape)}, not [seq_len, batch_size "
                f"(={batch_size}), heads (={heads}), d_k (={width})]"
            )
        if x.device != self.buffer.device:
            raise ValueError(
                f"`{name}` is on {x.device}, the cache on {self.buffer.device}; make "
                f"the cache with that `device`"
            )
