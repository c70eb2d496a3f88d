r"""# Sliding window attention

This module is causal attention in which each query attends to the last `window` keys
only, and optionally to the first tokens of the sequence, the *attention sinks*. Mistral
7B, Gemma 2 and gpt-oss use windows; StreamingLLM adds the sinks. It is for readers who
know the [core](../mha.md). Its projections, scores, softmax and weighted sum are
unchanged; they are applied to blocks of the sequence.

$$A_{ij} \gt 0 \iff 0 \le i - j \lt w \quad\text{or}\quad j \le i,\ j \lt s$$

The window $w$ counts the query's own position, as in Mistral's configuration and in
[`masks.sliding_window`](../masks/build.md#sliding_window). The last query is aligned
with the last key.

**Work that is linear in the length.** As a mask, a window saves nothing: all scores are
computed, and most of them are then hidden. But the queries of a block of the sequence
attend to the keys of the same block and to the `window - 1` keys before it, and to no
others. Blocks are independent of one another, as batch items are. So they become batch
items, each with its own keys, and the rest is the core. Here `window` is 3, and the
blocks have 4 positions:

```text
keys      0 1 2 3 4 5 6 7 8 9
query 4       ■ ■ ■                block 1 needs the keys 2 to 7
query 5         ■ ■ ■
query 6           ■ ■ ■
query 7             ■ ■ ■
query 8               ■ ■ ■        block 2 needs the keys 6 to 11
query 9                 ■ ■ ■
```

**Memory that is constant in decoding.** A new token attends to the last `window`
positions, so the cache needs no more of them: `RingCache` overwrites the oldest.

**Attention sinks.** Without them, a model that was trained without a window fails as
soon as its first tokens leave the window: heads put unneeded weight on those.
`sink_tokens=4` keeps the first four visible, and in the cache. (A learned logit can
take their place: [attention sinks](sinks.md).)

**Reduces to** causal attention for windows of the whole length.

**Laws.** `sliding_window` tests both edges. Of the laws that the core passes, all but
`key_permutation`, `query_permutation`, `neutral_mask`, `rows_sum_to_one`, `formula`,
`weights_match_output`, `score_independence` and `incremental_decoding` apply: the order
matters, no mask makes all keys visible, the weights are not stored, and `forward` takes
no cache.

Source: [Longformer](https://arxiv.org/abs/2004.05150), Beltagy et al. 2020, section
3.1; [Mistral 7B](https://arxiv.org/abs/2310.06825), Jiang et al. 2023, section 2, for
the ring ("rolling buffer cache"); [Efficient Streaming Language Models with Attention
Sinks](https://arxiv.org/abs/2309.17453), Xiao et al. 2023, section 3.2.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from headnotes.checks import check_items, check_next, check_sizes
from headnotes.mha import MultiHeadAttention, check_inputs, check_mask, check_tensor

# Blocks are no shorter: many tiny products take more time than a small one.
LEAST_BLOCK = 32


class SlidingWindowAttention(MultiHeadAttention):
    r"""Causal multi-head attention to the last `window` keys, and to the first few.

    `window` is the number of keys that a query attends to, its own included;
    `sink_tokens` is the number of first tokens that all later ones attend to as well.
    The other arguments, parameters, masks and errors are those of the core. The
    attention weights are not stored, so that memory grows with the length, not with its
    square. A program of `torch.export` has a fixed length, on which the number of
    blocks depends.

    Raises `ValueError` for a `window` below 1 or negative `sink_tokens`. Source: Jiang
    et al. 2023, section 2; Xiao et al. 2023, section 3.2.

    A change of token 2 reaches the outputs 2, 3 and 4, and no other:

    >>> mha = SlidingWindowAttention(7, 77, window=3).eval()
    >>> x = torch.randn(11, 2, 77)
    >>> y = mha(query=x, key=x, value=x)
    >>> x[2] += 1
    >>> z = mha(query=x, key=x, value=x)
    >>> (y - z).abs().amax(dim=(1, 2)).gt(1e-6).nonzero().flatten()
    tensor([2, 3, 4])

    It is the core with a mask:

    >>> core = MultiHeadAttention(7, 77).eval()
    >>> core.load_state_dict(mha.state_dict())
    <All keys matched successfully>
    >>> mask = torch.ones(11, 11).bool().tril().triu(-2)
    >>> expected = core(query=x, key=x, value=x, mask=mask.unsqueeze(-1))
    >>> z.allclose(expected, atol=1e-6)
    True
    """

    def __init__(
        self,
        heads: int,
        d_model: int,
        dropout_prob: float = 0.1,
        bias: bool = True,
        *,
        window: int,
        sink_tokens: int = 0,
    ) -> None:
        check_sizes(window=window)
        check_sizes(0, sink_tokens=sink_tokens)
        super().__init__(heads, d_model, dropout_prob, bias)
        self.window = window
        self.sink_tokens = sink_tokens

    def forward(
        self,
        *,
        query: Tensor,  # [q_len, batch_size, d_model]
        key: Tensor,  # [k_len, batch_size, d_model]
        value: Tensor,  # [k_len, batch_size, d_model]
        mask: Tensor | None = None,
    ) -> Tensor:
        r"""Attend from `query` to `key` within the window.

        Shapes, `mask` and errors are those of the core. A mask hides further keys.

        Keys that no window reaches are not even projected, so they may hold NaN:

        >>> mha = SlidingWindowAttention(7, 77, window=3, sink_tokens=1)
        >>> x, y = torch.randn(5, 2, 77), torch.randn(13, 2, 77)
        >>> y[1:6] = torch.nan
        >>> mask = torch.ones(5, 13, 2).bool()
        >>> mha(query=x, key=y, value=y, mask=mask).isfinite().all()
        tensor(True)
        """
        check_inputs(self.output.weight, query, key, value)
        if mask is not None:
            check_tensor("mask", mask, self.output.weight.device)
            check_mask(mask, query.shape, key.shape)
            mask = mask.bool()

        # Drop the keys between the sinks and the first key of the first query.
        # Distances from the last key stay the same, and so do the positions of the
        # sinks.
        first = len(key) - len(query) - self.window + 1
        if first > self.sink_tokens:
            sinks = self.sink_tokens
            key = torch.cat([key[:sinks], key[first:]])  # [sinks + k_len - first, ...]
            value = torch.cat(
                [value[:sinks], value[first:]]
            )  # [sinks + k_len - first, ...]
            if mask is not None:
                mask = torch.cat(
                    [mask[:, :sinks], mask[:, first:]], dim=1
                )  # [q_len, sinks + k_len - first, ...]

        # As in the core, hidden keys are set to zero, because zero times NaN is NaN.
        if mask is not None:
            if len(mask) > 1:  # it may allow a key to queries beyond its window only
                i = torch.arange(len(query), device=mask.device)  # [q_len]
                j = torch.arange(len(key), device=mask.device)  # [keys]
                i = i + len(key) - len(query)
                mask = mask & self.is_visible(i[:, None], j).unsqueeze(-1)
            hidden = ~mask.any(dim=0).unsqueeze(-1)  # [keys, ...]
            key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)

        query = self.query(query)  # [q_len, batch_size, heads, d_k]
        key = self.key(key)  # [..., batch_size, heads, d_k]
        value = self.value(value)  # [..., batch_size, heads, d_k]
        context = self.attend(query, key, value, mask)  # [..., batch_size, heads, d_k]
        output: Tensor = self.output(context.flatten(-2))  # [q_len, ..., d_model]
        return output

    def is_visible(
        self,
        i: Tensor,  # [q_len, 1, ...]
        j: Tensor,  # [k_len, ...]
    ) -> Tensor:
        r"""Whether the query at position `i` may attend to the key at position `j`.

        >>> mha = SlidingWindowAttention(1, 1, window=2, sink_tokens=1)
        >>> position = torch.arange(5)
        >>> mha.is_visible(position[:, None], position).int()
        tensor([[1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 1, 1, 0, 0],
                [1, 0, 1, 1, 0],
                [1, 0, 0, 1, 1]], dtype=torch.int32)
        """
        # The change: $0 \le i - j \lt w$, or a sink that is not in the future.
        return (j <= i) & (
            (i - j < self.window) | (j < self.sink_tokens)
        )  # [q_len, k_len, ...]

    def attend(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
        value: Tensor,  # [k_len, batch_size, heads, d_k]
        mask: Tensor | None = None,
    ) -> Tensor:
        r"""The context of each query, with blocks of the sequence as batch items.

        >>> mha = SlidingWindowAttention(7, 77, window=37, sink_tokens=5)
        >>> query = torch.randn(100, 2, 7, 11)
        >>> key = torch.randn(113, 2, 7, 11)
        >>> mask = torch.ones(100, 113, 2).bool()
        >>> mha.attend(query, key, key, mask).shape
        torch.Size([100, 2, 7, 11])
        """
        # Each block of queries becomes a batch item, with a column for each key.
        cut = Blocks.of(len(query), len(key), self.window, self.sink_tokens)
        batch_size = query.shape[1]
        query = cut.queries(query).flatten(1, 2)  # [size, ..., heads, d_k]
        key = cut.keys(key).flatten(1, 2)  # [columns, ..., heads, d_k]
        value = cut.keys(value).flatten(1, 2)  # [columns, ..., heads, d_k]

        # The window, as a mask of each block: $0 \le i - j \lt w$.
        i, j = cut.positions(query.device)  # [size, blocks], [columns, blocks]
        visible = self.is_visible(i[:, None], j)  # [size, columns, blocks]

        # A sink has a column of its own, so it is hidden among the near keys, which
        # begin with padding.
        visible[:, cut.sinks :] &= j[cut.sinks :] >= cut.sinks
        visible = visible.unsqueeze(-1)  # [size, columns, blocks, 1]
        if mask is not None:
            visible = visible & cut.mask(mask, j)  # [size, columns, blocks, ...]
        visible = visible.expand(-1, -1, -1, batch_size)  # [size, ..., batch_size]
        visible = visible.flatten(2).unsqueeze(-1)  # [size, columns, ..., 1]

        # From here on it is the core.
        scores = self.get_scores(query * self.scale, key)  # [size, columns, ..., heads]
        attn = self.get_weights(scores, visible)  # [size, columns, ..., heads]
        context = self.apply_weights(self.dropout(attn), value)  # [size, ..., d_k]

        # Back to one sequence, without the padding of its last block.
        context = context.view(
            cut.size, cut.blocks, batch_size, *context.shape[2:]
        )  # [size, blocks, batch_size, heads, d_k]
        context = context.transpose(0, 1).flatten(0, 1)  # [..., batch_size, heads, d_k]
        return context[: cut.q_len]  # [q_len, batch_size, heads, d_k]

    def cache(self, batch_size: int) -> "RingCache":
        r"""An empty cache for `decode`, with the module's sizes, dtype and device.

        Under autocast, the dtype is that of the projections.
        """
        weight = self.output.weight
        dtype, kind = weight.dtype, weight.device.type
        if not weight.is_meta and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return RingCache(
            batch_size,
            self.heads,
            self.d_k,
            self.window,
            self.sink_tokens,
            dtype=dtype,
            device=weight.device,
        )

    @torch.no_grad()
    def decode(
        self,
        x: Tensor,  # [seq_len, batch_size, d_model]
        cache: "RingCache",
    ) -> tuple[Tensor, "RingCache"]:
        r"""Decode the next positions, `x`: `[seq_len, batch_size, d_model]`.

        However a sequence is split into pieces, the outputs are those of one call of
        `forward`, without gradients. Raises `TypeError` for a wrong dtype or cache,
        `ValueError` for a wrong shape or device.

        The time of a token does not depend on its position: of 100 tokens, the cache
        holds the first and the last three.

        >>> mha = SlidingWindowAttention(7, 77, window=3, sink_tokens=1).eval()
        >>> x = torch.randn(100, 2, 77)
        >>> at_once = mha(query=x, key=x, value=x)
        >>> prompt, cache = mha.decode(x[:12], mha.cache(batch_size=2))
        >>> prompt.allclose(at_once[:12], atol=1e-6)
        True
        >>> for token in x[12:].split(1):
        ...     y, cache = mha.decode(token, cache)
        >>> y.allclose(at_once[-1:], atol=1e-6)
        True
        >>> cache.length, cache.keys.shape
        (100, torch.Size([4, 2, 7, 11]))
        """
        weight = self.output.weight
        check_cache(cache, self)
        check_next(x, weight, weight.shape[1], cache.buffer.shape[2])
        query, key, value = (
            self.query(x),
            self.key(x),
            self.value(x),
        )  # [seq_len, ..., heads, d_k]
        if len(x) == 1:
            # All that the ring then holds is within the window. It is not in order, but
            # a sum over the keys does not depend on their order.
            cache.append(key, value)
            scores = self.get_scores(
                query * self.scale, cache.keys
            )  # [seq_len, slots, batch_size, heads]
            attn = self.dropout(
                self.get_weights(scores, None)
            )  # [seq_len, slots, batch_size, heads]
            context = self.apply_weights(
                attn, cache.values
            )  # [seq_len, ..., heads, d_k]
        else:
            keys, values = cache.in_order()  # [..., batch_size, heads, d_k]
            keys, values = torch.cat([keys, key]), torch.cat([values, value])
            context = self.attend(query, keys, values)
            cache.append(key, value)
        output: Tensor = self.output(context.flatten(-2))  # [seq_len, ..., d_model]
        return output, cache


class Blocks(NamedTuple):
    r"""How a sequence is cut into `blocks` of `size` queries, and which keys they need.

    A block has a column for each of its keys: for the `sinks`, for the `before` keys
    before its first query, and for the keys of its own positions.

    >>> cut = Blocks.of(q_len=100, k_len=113, window=37, sink_tokens=5)
    >>> cut.blocks, cut.size, cut.before
    (3, 37, 36)
    """

    q_len: int
    k_len: int
    sinks: int
    before: int
    size: int
    blocks: int

    @classmethod
    def of(cls, q_len: int, k_len: int, window: int, sink_tokens: int) -> "Blocks":
        """Blocks as long as the window, so that two of them need each key."""
        window = max(1, min(window, k_len))
        size = max(1, min(q_len, max(window, LEAST_BLOCK)))
        blocks = max(1, -(-q_len // size))
        return cls(q_len, k_len, min(sink_tokens, k_len), window - 1, size, blocks)

    def queries(self, x: Tensor) -> Tensor:
        """Cut into blocks along the first axis, the last one padded with zeros."""
        size, blocks = self.size, self.blocks
        x = pad_first_axis(x, 0, blocks * size - self.q_len)  # [blocks * size, ...]
        x = x.reshape(blocks, size, *x.shape[1:])  # [blocks, size, ...]
        return x.transpose(0, 1)  # [size, blocks, ...]

    def keys(self, x: Tensor) -> Tensor:
        """The columns of each block; what lies before the first key is zero."""
        size, blocks, before = self.size, self.blocks, self.before
        start = self.k_len - self.q_len  # the position of the first query
        near = pad_first_axis(
            x, before - start, blocks * size - self.q_len
        )  # [before + blocks * size, ...]
        near = near.unfold(0, before + size, size)  # [blocks, ..., before + size]
        near = near.movedim(-1, 0)  # [before + size, blocks, ...]
        sinks = x[: self.sinks, None].expand(
            -1, blocks, *x.shape[1:]
        )  # [sinks, blocks, ...]
        return torch.cat([sinks, near])  # [sinks + before + size, blocks, ...]

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        r"""The positions of the queries, `[size, blocks]`, and keys, `[…, blocks]`.

        >>> cut = Blocks.of(3, 5, window=2, sink_tokens=1)
        >>> i, j = cut.positions(torch.device("cpu"))
        >>> i.flatten(), j.flatten()
        (tensor([2, 3, 4]), tensor([0, 1, 2, 3, 4]))
        """
        start = self.k_len - self.q_len
        first = torch.arange(self.blocks, device=device) * self.size + start  # [blocks]
        row = torch.arange(-self.before, self.size, device=device)  # [rows]
        near = first + row.unsqueeze(-1)  # [rows, blocks]
        sinks = torch.arange(self.sinks, device=device).unsqueeze(-1)  # [sinks, 1]
        columns = torch.cat(
            [sinks.expand(-1, self.blocks), near]
        )  # [sinks + rows, blocks]
        return near[self.before :], columns  # [..., blocks], [..., blocks]

    def mask(self, mask: Tensor, j: Tensor) -> Tensor:
        """A mask `[q_len or 1, k_len, …]` as `[size or 1, columns, blocks, …]`."""
        if len(mask) == 1:
            return self.keys(mask[0]).unsqueeze(0)
        # A mask for each query: of its rows, take the columns of their block. One more
        # column, False, stands for what lies outside.
        rows = self.queries(F.pad(mask, (0, 0, 0, 1)))  # [size, blocks, ...]
        index = j.T.clamp(0, self.k_len)[None, ..., None]  # [1, blocks, columns, 1]
        index = index.expand(self.size, -1, -1, mask.shape[2])  # [size, blocks, ...]
        return rows.gather(2, index).transpose(1, 2)  # [size, columns, blocks, ...]


def pad_first_axis(
    x: Tensor,  # [length, ...]
    left: int,
    right: int,
) -> Tensor:
    r"""Zeros before and behind; a negative number of them cuts off as many rows.

    >>> pad_first_axis(torch.tensor([3, 5, 7]), -1, 2)
    tensor([5, 7, 0, 0])
    """
    return F.pad(
        x, [0, 0] * (x.dim() - 1) + [left, right]
    )  # [left + length + right, ...]


class RingCache:
    r"""The KV cache of a window: the first `sink_tokens` and the last `window` keys.

    Position $p$ is stored in slot $s + (p - s) \bmod w$, where it overwrites position
    $p - w$, which has just left the window. The cache holds $2 \cdot
    \texttt{batch\_size} \cdot \texttt{heads} \cdot (s + w) \cdot d_k$ numbers, however
    long the sequence is.

    Raises `ValueError` for sizes below 1, or negative `sink_tokens`. Source: Jiang et
    al. 2023, section 2; Xiao et al. 2023, section 3.2.

    >>> cache = RingCache(1, 1, 1, window=3, sink_tokens=1)
    >>> for p in range(6):
    ...     position = torch.full((1, 1, 1, 1), float(p))
    ...     cache.append(position, position)
    >>> cache.keys.flatten()
    tensor([0., 4., 5., 3.])
    >>> keys, values = cache.in_order()
    >>> keys.flatten()
    tensor([0., 3., 4., 5.])
    """

    def __init__(
        self,
        batch_size: int,
        heads: int,
        d_k: int,
        window: int,
        sink_tokens: int = 0,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_sizes(batch_size=batch_size, heads=heads, d_k=d_k, window=window)
        check_sizes(0, sink_tokens=sink_tokens)
        self.window = window
        self.sink_tokens = sink_tokens
        self.length = 0  # all positions so far, also the overwritten ones
        slots = sink_tokens + window
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.buffer = torch.zeros(
                2, slots, batch_size, heads, d_k, dtype=dtype, device=device
            )  # [2, slots, batch_size, heads, d_k]

    @property
    def keys(self) -> Tensor:
        """A view of the keys, in the order of their slots."""
        keys: Tensor = self.buffer[0]  # [..., batch_size, heads, d_k]
        return keys[: self.length]  # [..., batch_size, heads, d_k]

    @property
    def values(self) -> Tensor:
        """A view of the values, in the order of their slots."""
        values: Tensor = self.buffer[1]  # [..., batch_size, heads, d_k]
        return values[: self.length]  # [..., batch_size, heads, d_k]

    def slots(self, positions: Tensor) -> Tensor:
        r"""Where positions are stored.

        >>> cache = RingCache(1, 1, 1, window=3, sink_tokens=1)
        >>> cache.slots(torch.arange(8))
        tensor([0, 1, 2, 3, 1, 2, 3, 1])
        """
        sinks = self.sink_tokens
        ring = sinks + (positions - sinks) % self.window
        return torch.where(positions < sinks, positions, ring)

    def held(self, start: int, stop: int) -> Tensor:
        r"""The positions from `start` on that are stored once there are `stop`.

        >>> RingCache(1, 1, 1, window=3, sink_tokens=1).held(0, 8)
        tensor([0, 5, 6, 7])
        """
        device, sinks = self.buffer.device, self.sink_tokens
        first = torch.arange(
            start, max(start, min(sinks, stop)), device=device
        )  # [first]
        oldest = min(stop, max(start, sinks, stop - self.window))
        return torch.cat(
            [first, torch.arange(oldest, stop, device=device)]
        )  # [first + stop - oldest]

    def in_order(self) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values, in the order of their positions."""
        slots = self.slots(self.held(0, self.length))  # [stored]
        return self.buffer[0, slots], self.buffer[1, slots]  # [stored, ...]

    @torch.no_grad()
    def append(
        self,
        key: Tensor,  # [seq_len, batch_size, heads, d_k]
        value: Tensor,  # [seq_len, batch_size, heads, d_k]
    ) -> None:
        r"""Store the keys and values of the next positions, without their gradients.

        Raises `TypeError` for another dtype, `ValueError` for a shape or device that
        does not fit; the cache is then as it was before.

        Of seven positions, a window of three keeps the last three:

        >>> cache = RingCache(2, 3, 5, window=3)
        >>> x = torch.randn(7, 2, 3, 5)
        >>> cache.append(x, x)
        >>> keys, values = cache.in_order()
        >>> torch.equal(keys, x[4:]), torch.equal(values, x[4:])
        (True, True)
        """
        check_stored("key", key, self.buffer)
        check_stored("value", value, self.buffer)
        if len(key) != len(value):
            raise ValueError(
                f"`value` has length {len(value)}, `key` {len(key)}; make them equal"
            )
        # Of the new positions, those that stay: so no slot is written twice.
        positions = self.held(self.length, self.length + len(key))  # [kept]
        slots = self.slots(positions)  # [kept]
        self.buffer[0, slots] = key[
            positions - self.length
        ]  # [..., batch_size, heads, d_k]
        self.buffer[1, slots] = value[
            positions - self.length
        ]  # [..., batch_size, heads, d_k]
        self.length += len(key)

    def reorder(self, index: Tensor) -> None:
        r"""Replace batch item `i` by the keys and values of item `index[i]`.

        Beam search needs this. `index` holds integers, `[batch_size]`, one for each new
        batch item. Raises `TypeError` for another dtype, `ValueError` for another
        shape, or an item that does not exist.

        >>> cache = RingCache(batch_size=3, heads=1, d_k=1, window=4)
        >>> x = torch.tensor([5.0, 7.0, 11.0]).view(1, 3, 1, 1)
        >>> cache.append(x, x)
        >>> cache.reorder(torch.tensor([2, 2, 0]))
        >>> cache.keys.flatten()
        tensor([11., 11.,  5.])
        """
        check_items(index, self.buffer.shape[2])
        with torch.inference_mode(False):
            index = index.to(self.buffer.device).clone()  # not an inference tensor
            self.buffer = self.buffer.index_select(2, index)  # [2, slots, ...]


# region Input checks


def check_cache(cache: "RingCache", module: SlidingWindowAttention) -> None:
    """Refuse a cache of another kind, or of another window."""
    if not isinstance(cache, RingCache):
        raise TypeError(
            f"`cache` is a {type(cache).__name__}, not a RingCache; make one with "
            f"`cache(batch_size)`"
        )
    seen = cache.window, cache.sink_tokens, *cache.buffer.shape[3:]
    fitting = module.window, module.sink_tokens, module.heads, module.d_k
    if seen != fitting:
        raise ValueError(
            f"`cache` has window, sink tokens, heads and d_k {seen}, the module "
            f"{fitting}; make one with `cache(batch_size)`"
        )


def check_stored(name: str, x: Tensor, buffer: Tensor) -> None:
    """Refuse a tensor that does not fit the stored ones."""
    if isinstance(x, Tensor) and x.dtype != buffer.dtype:
        raise TypeError(
            f"`{name}` is {x.dtype}, the cache {buffer.dtype}; make the cache with the "
            f"`dtype` that it is to hold"
        )
    check_tensor(name, x, buffer.device)
    batch_size, heads, d_k = buffer.shape[2:]
    if x.dim() != 4 or x.shape[1:] != (batch_size, heads, d_k):
        raise ValueError(
            f"`{name}` has shape {list(x.shape)}, not [seq_len, batch_size "
            f"(={batch_size}), heads (={heads}), d_k (={d_k})]"
        )


# endregion
