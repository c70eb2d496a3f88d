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

**Left padding.** Padding is no sink. Keys at the start of a sequence that the mask
hides from all queries count as padding, and the sinks are the first keys behind them.
The cache takes the lengths of the padding as `left_padding`.

**At full speed** it is the argument `window` of
[`fast.MultiHeadAttention`](../fast/module.md), which has no `sink_tokens`. With the
same weights and `is_causal=True`, the outputs are equal:

```python
from headnotes import fast

quick = fast.MultiHeadAttention(heads=3, d_model=42, window=3)
```

**Reduces to** causal attention for windows of the whole length.

**Laws.** `sliding_window` tests both edges. Of the laws that the core passes, all but
`key_permutation`, `query_permutation`, `neutral_mask`, `rows_sum_to_one`, `formula`,
`weights_axes`, `weights_match_output`, `score_independence` and `incremental_decoding`
apply: the order matters, no mask makes all keys visible, the weights are not stored,
and `forward` takes no cache.

Source: [Longformer](https://arxiv.org/abs/2004.05150), Beltagy et al. 2020, section
3.1; [Mistral 7B](https://arxiv.org/abs/2310.06825), Jiang et al. 2023, section 2, for
the ring ("rolling buffer cache"); [Efficient Streaming Language Models with Attention
Sinks](https://arxiv.org/abs/2309.17453), Xiao et al. 2023, section 3.2.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from headnotes.checks import (
    check_items,
    check_next,
    check_padding,
    check_sizes,
    zero_padding,
)
from headnotes.mha import (
    MultiHeadAttention,
    check_inputs,
    check_mask,
    check_tensor,
    check_weight,
)

# Blocks are no shorter: many tiny products take more time than a small one.
LEAST_BLOCK = 32


class SlidingWindowAttention(MultiHeadAttention):
    r"""Causal multi-head attention to the last `window` keys, and to the first few.

    `window` is the number of keys that a query attends to, its own included;
    `sink_tokens` is the number of first tokens that all later ones attend to as well,
    not counting keys at the start that the mask hides from all queries. The other
    arguments, parameters, masks and errors are those of the core. The attention weights
    are not stored, so that memory grows with the length, not with its square. A program
    of `torch.export` has a fixed length, on which the number of blocks depends.

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

        >>> mha = SlidingWindowAttention(7, 77, window=4, sink_tokens=3)
        >>> x, y = torch.randn(6, 2, 77), torch.randn(17, 2, 77)
        >>> y[3:8] = torch.nan
        >>> mask = torch.ones(6, 17, 2).bool()
        >>> mha(query=x, key=y, value=y, mask=mask).isfinite().all()
        tensor(True)
        """
        check_weight(self, "output")
        check_inputs(self.output.weight, query, key, value)
        if mask is not None:
            check_tensor("mask", mask, self.output.weight.device)
            check_mask(mask, query.shape, key.shape)
            mask = mask.bool()

        # The sinks come first, then all keys from the window of the first query on.
        # What lies before it is dropped, and positions count from its first key.
        sinks = min(self.sink_tokens, len(key))
        first = max(0, len(key) - len(query) - self.window + 1)
        start: Tensor | int = 0
        if sinks and mask is not None:
            start = left_padding_of(mask)  # [batch_size]
        if sinks or first:
            key = sinks_first(key, sinks, start, first)  # [keys, ...]
            value = sinks_first(value, sinks, start, first)  # [keys, ...]
            if mask is not None:
                columns = mask.permute(1, 2, 0)  # [k_len, ...]
                columns = sinks_first(columns, sinks, start, first)  # [keys, ...]
                mask = columns.permute(2, 0, 1)  # [..., keys, batch_size]
        start = start - first

        # As in the core, hidden keys are set to zero, because zero times NaN is NaN.
        if mask is not None:
            seen = mask
            if len(mask) > 1:  # it may allow a key to queries beyond its window only
                rows = len(key) - sinks
                near = torch.arange(rows, device=mask.device)  # [rows]
                j = positions_of(near, sinks, start)  # [keys, ...]
                i = torch.arange(len(query), device=mask.device)  # [q_len]
                i = i + rows - len(query)
                seen = mask & self.is_visible(i[:, None, None], j, start)
            hidden = ~seen.any(dim=0).unsqueeze(-1)  # [keys, ...]
            key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)

        query = self.query(query)  # [q_len, batch_size, heads, d_k]
        key = self.key(key)  # [..., batch_size, heads, d_k]
        value = self.value(value)  # [..., batch_size, heads, d_k]
        context = self.attend(
            query, key, value, mask, sinks, start
        )  # [q_len, batch_size, heads, d_k]
        output: Tensor = self.output(context.flatten(-2))  # [q_len, ..., d_model]
        return output

    def is_visible(
        self,
        i: Tensor,  # [q_len, ...]
        j: Tensor,  # [k_len, ...]
        start: Tensor | int = 0,
    ) -> Tensor:
        r"""Whether the query at position `i` may attend to the key at position `j`.

        `start` is the position of the first sink.

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
        is_sink = (j >= start) & (j < start + self.sink_tokens)  # [k_len, ...]
        return (j <= i) & ((i - j < self.window) | is_sink)  # [q_len, k_len, ...]

    def attend(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
        value: Tensor,  # [k_len, batch_size, heads, d_k]
        mask: Tensor | None = None,
        sinks: int = 0,
        start: Tensor | int = 0,
    ) -> Tensor:
        r"""The context of each query, with blocks of the sequence as batch items.

        The first `sinks` rows of `key`, `value` and `mask` are the sinks, from the
        position `start` on, a number or `[batch_size]`. Position 0 is that of the row
        behind them.

        >>> mha = SlidingWindowAttention(7, 77, window=37)
        >>> query = torch.randn(100, 2, 7, 11)
        >>> key = torch.randn(113, 2, 7, 11)
        >>> mask = torch.ones(100, 113, 2).bool()
        >>> mha.attend(query, key, key, mask).shape
        torch.Size([100, 2, 7, 11])
        """
        # Each block of queries becomes a batch item, with a column for each key.
        cut = Blocks.of(len(query), len(key) - sinks, self.window, sinks)
        batch_size = query.shape[1]
        query = cut.queries(query).flatten(1, 2)  # [size, ..., heads, d_k]
        key = cut.keys(key).flatten(1, 2)  # [columns, ..., heads, d_k]
        value = cut.keys(value).flatten(1, 2)  # [columns, ..., heads, d_k]

        # The window, as a mask of each block: $0 \le i - j \lt w$.
        i, near = cut.positions(query.device)  # [size, blocks], [rows, blocks]
        j = positions_of(near, sinks, start)  # [columns, blocks, ...]
        visible = self.is_visible(
            i[:, None, :, None], j, start
        )  # [size, columns, blocks, ...]

        # A sink has a column of its own, so it is hidden among the near keys, which
        # begin with padding.
        near = j[sinks:]  # [rows, blocks, ...]
        is_sink = (near >= start) & (near < start + sinks)  # [rows, blocks, ...]
        visible[:, sinks:] &= (near >= 0) & ~is_sink
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

    def cache(
        self, batch_size: int, *, left_padding: Tensor | None = None
    ) -> "RingCache":
        r"""An empty cache for `decode`, with the module's sizes, dtype and device.

        `left_padding` counts the padded positions at the start of each sequence. They
        may hold anything, and are no sinks. Under autocast, the dtype is that of the
        projections.

        >>> mha = SlidingWindowAttention(7, 77, window=4, sink_tokens=3).eval()
        >>> x = torch.randn(13, 2, 77)
        >>> x[:4, 1] = torch.nan
        >>> cache = mha.cache(2, left_padding=torch.tensor([0, 4]))
        >>> prompt, cache = mha.decode(x[:5], cache)
        >>> rest, cache = mha.decode(x[5:], cache)
        >>> same, _ = mha.decode(x[4:, 1:], mha.cache(1))
        >>> torch.allclose(rest[:, 1:], same[1:], atol=1e-6)
        True
        """
        check_weight(self, "output")
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
            left_padding=left_padding,
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
        `ValueError` for a wrong shape or device. After any error, the cache is as it
        was before, but for a position that no later query may attend to.

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
        check_weight(self, "output")
        weight = self.output.weight
        check_cache(cache, self)
        check_next(x, weight, weight.shape[1], cache.buffer.shape[2])
        x = zero_padding(
            x, cache.left_padding, cache.length
        )  # [seq_len, batch_size, d_model]
        query, key, value = (
            self.query(x),
            self.key(x),
            self.value(x),
        )  # [seq_len, ..., heads, d_k]
        if len(x) != 1:
            keys, values = cache.extended(key, value)  # [keys, ...], [keys, ...]
            start = cache.first_sink()  # [batch_size]
            sinks, mask = self.sink_tokens, None
            if cache.left_padding is not None:
                rows = len(keys) - sinks
                near = torch.arange(rows, device=x.device)  # [rows]
                j = positions_of(near, sinks, start)  # [keys, batch_size]
                mask = (j >= start).unsqueeze(0)  # [1, keys, batch_size]
            context = self.attend(
                query, keys, values, mask, sinks, start
            )  # [seq_len, batch_size, heads, d_k]
            output: Tensor = self.output(context.flatten(-2))  # [seq_len, ..., d_model]
            cache.append(key, value)
            return output, cache

        # All that the ring holds with the new token is within the window. It is not in
        # order, but a sum over the keys does not depend on their order.
        cache.append(key, value)
        try:
            scores = self.get_scores(
                query * self.scale, cache.keys
            )  # [seq_len, slots, batch_size, heads]
            attn = self.get_weights(
                scores, cache.mask()
            )  # [seq_len, slots, batch_size, heads]
            context = self.apply_weights(
                self.dropout(attn), cache.values
            )  # [seq_len, batch_size, heads, d_k]
            output = self.output(context.flatten(-2))  # [seq_len, ..., d_model]
        except BaseException:
            cache.length -= 1
            raise
        return output, cache


class Blocks(NamedTuple):
    r"""How a sequence is cut into `blocks` of `size` queries, and which keys they need.

    A block has a column for each of its keys: for the `sinks`, which are the first rows
    of the keys, for the `before` keys before its first query, and for the keys of its
    own positions. `k_len` does not count the sinks.

    >>> cut = Blocks.of(q_len=100, k_len=113, window=37, sinks=5)
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
    def of(cls, q_len: int, k_len: int, window: int, sinks: int) -> "Blocks":
        """Blocks as long as the window, so that two of them need each key."""
        window = max(1, min(window, k_len))
        size = max(1, min(q_len, max(window, LEAST_BLOCK)))
        blocks = max(1, -(-q_len // size))
        return cls(q_len, k_len, sinks, window - 1, size, blocks)

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
            x[self.sinks :], before - start, blocks * size - self.q_len
        )  # [before + blocks * size, ...]
        near = near.unfold(0, before + size, size)  # [blocks, ..., before + size]
        near = near.movedim(-1, 0)  # [before + size, blocks, ...]
        sinks = x[: self.sinks, None].expand(
            -1, blocks, *x.shape[1:]
        )  # [sinks, blocks, ...]
        return torch.cat([sinks, near])  # [sinks + before + size, blocks, ...]

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        r"""The positions of the queries, `[size, blocks]`, and of the keys near them.

        >>> cut = Blocks.of(3, 5, window=2, sinks=1)
        >>> i, j = cut.positions(torch.device("cpu"))
        >>> i.flatten(), j.flatten()
        (tensor([2, 3, 4]), tensor([1, 2, 3, 4]))
        """
        start = self.k_len - self.q_len
        first = torch.arange(self.blocks, device=device) * self.size + start  # [blocks]
        row = torch.arange(-self.before, self.size, device=device)  # [rows]
        near = first + row.unsqueeze(-1)  # [rows, blocks]
        return near[self.before :], near  # [..., blocks], [..., blocks]

    def mask(self, mask: Tensor, j: Tensor) -> Tensor:
        """A mask `[q_len or 1, k_len, …]` as `[size or 1, columns, blocks, …]`."""
        if len(mask) == 1:
            return self.keys(mask[0]).unsqueeze(0)  # [1, ...]
        # A mask for each query: of its rows, take the columns of their block. One more
        # column, False, stands for what lies outside.
        rows = self.queries(F.pad(mask, (0, 0, 0, 1)))  # [size, blocks, ...]
        sinks = self.sinks
        near = sinks + j[sinks:].clamp(0, self.k_len)  # [columns - sinks, blocks, ...]
        order = torch.arange(sinks, device=j.device).view(-1, 1, 1)  # [sinks, 1, 1]
        order = order.expand(-1, *j.shape[1:])  # [sinks, blocks, ...]
        index = torch.cat([order, near])  # [columns, blocks, ...]
        index = index.transpose(0, 1).unsqueeze(0)  # [1, blocks, columns, ...]
        index = index.expand(self.size, -1, -1, mask.shape[2])  # [size, blocks, ...]
        return rows.gather(2, index).transpose(1, 2)  # [size, columns, blocks, ...]


def left_padding_of(
    mask: Tensor,
) -> Tensor:
    r"""How many keys at the start a mask hides from all queries, `[batch_size or 1]`.

    >>> mask = torch.tensor([[False, True, False], [False, False, True]])
    >>> left_padding_of(mask.unsqueeze(-1))
    tensor([1])
    """
    hidden = ~mask.any(dim=0)  # [..., batch_size]
    return hidden.long().cumprod(dim=0).sum(dim=0)  # [batch_size]


def sinks_first(
    x: Tensor,  # [k_len, batch_size, ...]
    sinks: int,
    start: Tensor | int,
    first: int,
) -> Tensor:
    r"""The rows of the sinks of each batch item, then those from `first` on.

    The former begin at `start`, a number or one for each batch item. (What would lie
    behind the last row is that row.)

    >>> x = torch.arange(10).view(5, 2)
    >>> sinks_first(x, 1, 0, first=3)
    tensor([[0, 1],
            [6, 7],
            [8, 9]])
    >>> sinks_first(x, 1, torch.tensor([0, 2]), first=3)
    tensor([[0, 5],
            [6, 7],
            [8, 9]])
    """
    if isinstance(start, int):
        rows = x[start : start + sinks]  # [sinks, batch_size, ...]
        return torch.cat([rows, x[first:]])  # [sinks + k_len - first, batch_size, ...]
    index = torch.arange(sinks, device=x.device).unsqueeze(-1) + start  # [sinks, ...]
    index = index.clamp(max=len(x) - 1).expand(-1, x.shape[1])  # [sinks, batch_size]
    index = index.view(*index.shape, *[1] * (x.dim() - 2))  # [sinks, batch_size, ...]
    rows = x.gather(0, index.expand(-1, -1, *x.shape[2:]))  # [sinks, batch_size, ...]
    return torch.cat([rows, x[first:]])  # [sinks + k_len - first, batch_size, ...]


def positions_of(
    near: Tensor,  # [rows, ...]
    sinks: int,
    start: Tensor | int,
) -> Tensor:
    r"""The positions of all keys, with an axis for the batch: the sinks come first.

    >>> near = torch.arange(3)
    >>> positions_of(near, 2, torch.tensor([-7, -5])).T
    tensor([[-7, -6,  0,  1,  2],
            [-5, -4,  0,  1,  2]])
    """
    order = torch.arange(sinks, device=near.device).unsqueeze(-1)  # [sinks, 1]
    first = order + start  # [sinks, ...]
    batch_size = first.shape[1]
    near = near.unsqueeze(-1).expand(*near.shape, batch_size)  # [rows, ...]
    first = first.view(sinks, *[1] * (near.dim() - 2), batch_size)  # [sinks, ...]
    first = first.expand(-1, *near.shape[1:])  # [sinks, ...]
    return torch.cat([first, near])  # [sinks + rows, ...]


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

    `left_padding`, `[batch_size]`, counts the padded positions at the start of each
    sequence. The sinks are then other positions in each batch item, so the sinks go to
    the ring, too, and `mask` hides what is stored twice.

    Raises `ValueError` for sizes below 1, negative `sink_tokens`, or padding of another
    shape. Source: Jiang et
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
        left_padding: Tensor | None = None,
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
        self.left_padding: Tensor | None = None
        if left_padding is not None:
            # A copy: the caller may use the tensor for the next batch.
            padding = check_padding(left_padding, batch_size)  # [batch_size]
            self.left_padding = padding.to(
                self.buffer.device, copy=True
            )  # [batch_size]

    @property
    def keys(self) -> Tensor:
        """A view of the keys, in the order of their slots; all slots with padding."""
        keys: Tensor = self.buffer[0]  # [slots, batch_size, heads, d_k]
        return keys[: self.slots_in_use]  # [..., batch_size, heads, d_k]

    @property
    def values(self) -> Tensor:
        """A view of the values, in the order of their slots."""
        values: Tensor = self.buffer[1]  # [slots, batch_size, heads, d_k]
        return values[: self.slots_in_use]  # [..., batch_size, heads, d_k]

    @property
    def slots_in_use(self) -> int:
        """How many slots, from the first on, may hold a position."""
        return self.buffer.shape[1] if self.left_padding is not None else self.length

    def slots(self, positions: Tensor) -> Tensor:
        r"""Where positions are stored.

        >>> cache = RingCache(1, 1, 1, window=3, sink_tokens=1)
        >>> cache.slots(torch.arange(8))
        tensor([0, 1, 2, 3, 1, 2, 3, 1])
        """
        sinks = self.sink_tokens
        ring = sinks + (positions - sinks) % self.window
        if self.left_padding is not None:
            return ring
        return torch.where(positions < sinks, positions, ring)

    def held(self, start: int, stop: int) -> Tensor:
        r"""The positions from `start` on that are stored once there are `stop`.

        >>> RingCache(1, 1, 1, window=3, sink_tokens=1).held(0, 8)
        tensor([0, 5, 6, 7])
        """
        device = self.buffer.device
        sinks = self.sink_tokens if self.left_padding is None else 0
        first = torch.arange(
            start, max(start, min(sinks, stop)), device=device
        )  # [first]
        oldest = min(stop, max(start, sinks, stop - self.window))
        return torch.cat(
            [first, torch.arange(oldest, stop, device=device)]
        )  # [first + stop - oldest]

    def in_order(self) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values, in the order of their positions.

        With left padding, these are the last `window` positions of all batch items.
        """
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
        if self.left_padding is not None:
            sinks = self.sinks_with(key, value)  # [2, ...]
            self.buffer[:, : self.sink_tokens] = sinks
        # Of the new positions, those that stay: so no slot is written twice.
        positions = self.held(self.length, self.length + len(key))  # [stored]
        slots = self.slots(positions)  # [stored]
        self.buffer[0, slots] = key[
            positions - self.length
        ]  # [..., batch_size, heads, d_k]
        self.buffer[1, slots] = value[
            positions - self.length
        ]  # [..., batch_size, heads, d_k]
        self.length += len(key)

    def sinks_with(
        self,
        key: Tensor,  # [seq_len, batch_size, heads, d_k]
        value: Tensor,  # [seq_len, batch_size, heads, d_k]
    ) -> Tensor:
        """The slots of the sinks, once these are stored: `[2, sink_tokens, ...]`."""
        stored = self.buffer[:, : self.sink_tokens]  # [2, sinks, ...]
        if not len(key):
            return stored
        # A position that lies neither in the cache nor in the piece changes no slot.
        sinks, device = self.sink_tokens, self.buffer.device
        order = torch.arange(sinks, device=device).unsqueeze(-1)  # [sinks, 1]
        start = 0 if self.left_padding is None else self.left_padding
        row = order + start - self.length  # [sinks, ...]
        is_new = ((row >= 0) & (row < len(key)))[..., None, None]  # [sinks, ..., 1, 1]
        row = row.clamp(0, len(key) - 1)[..., None, None]  # [sinks, ..., 1, 1]
        row = row.expand(-1, *key.shape[1:])  # [sinks, batch_size, heads, d_k]
        new = torch.stack([key.gather(0, row), value.gather(0, row)])  # [2, sinks, ...]
        return torch.where(is_new, new, stored)  # [2, sinks, ...]

    def extended(
        self,
        key: Tensor,  # [seq_len, batch_size, heads, d_k]
        value: Tensor,  # [seq_len, batch_size, heads, d_k]
    ) -> tuple[Tensor, Tensor]:
        """The keys and values that the queries of a further piece may attend to.

        These are the slots of the sinks, then the last `window - 1` positions, then the
        piece. Nothing is stored.
        """
        start, device = max(0, self.length - self.window + 1), self.buffer.device
        recent = self.buffer[
            :, self.slots(torch.arange(start, self.length, device=device))
        ]  # [2, ..., batch_size, heads, d_k]
        sinks = self.sinks_with(key, value)  # [2, ..., batch_size, heads, d_k]
        past = torch.cat([sinks, recent], dim=1)  # [2, ..., batch_size, heads, d_k]
        keys = torch.cat([past[0], key])  # [..., batch_size, heads, d_k]
        values = torch.cat([past[1], value])  # [..., batch_size, heads, d_k]
        return keys, values

    def first_sink(self) -> Tensor | int:
        """The position of the first sink, counted from the first row behind the sinks.

        That is in the result of `extended`; with left padding, one for each batch item.
        """
        start = max(0, self.length - self.window + 1)
        if self.left_padding is None:
            return -start
        return self.left_padding - start  # [batch_size]

    def mask(self) -> Tensor | None:
        r"""Which slots the last position may attend to, `[1, slots, batch_size, 1]`.

        None without left padding, when it may attend to all that is stored. Here the
        last of five positions may attend to all five in the first sequence, to both
        sinks and the one position behind them in the second, to itself in the third:

        >>> padding = torch.tensor([0, 2, 4])
        >>> cache = RingCache(3, 1, 1, window=4, sink_tokens=2, left_padding=padding)
        >>> cache.append(torch.zeros(5, 3, 1, 1), torch.zeros(5, 3, 1, 1))
        >>> cache.mask().int().squeeze().T
        tensor([[1, 1, 1, 1, 1, 0],
                [1, 1, 0, 0, 1, 0],
                [1, 0, 0, 0, 0, 0]], dtype=torch.int32)
        """
        if self.left_padding is None:
            return None
        last, sinks, device = self.length - 1, self.sink_tokens, self.buffer.device
        order = torch.arange(sinks, device=device).unsqueeze(-1)  # [sinks, 1]
        ring = torch.arange(self.window, device=device).unsqueeze(-1)  # [window, 1]
        # The last position that is stored in each slot of the ring.
        position = last - (last - sinks - ring) % self.window  # [window, 1]
        parts = (
            order + self.left_padding <= last,
            position >= self.left_padding + sinks,
        )  # [sinks, batch_size], [window, batch_size]
        return torch.cat(parts)[None, ..., None]  # [1, slots, batch_size, 1]

    def reorder(self, index: Tensor) -> None:
        r"""Replace batch item `i` by the keys and values of item `index[i]`.

        Beam search needs this. `index` holds integers, `[batch_size]`, one for each new
        batch item. Raises `TypeError` for another dtype, `ValueError` for another
        shape, or an item that does not exist.

        >>> cache = RingCache(3, heads=1, d_k=1, window=4, sink_tokens=1)
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
            if self.left_padding is not None:
                self.left_padding = self.left_padding[index]


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
