r"""# Blockwise (tiled) attention

The method `blockwise` computes exact attention in tiles, in plain PyTorch: it computes
the weights of 128 queries at a time, uses them while they are in the processor's cache,
and recomputes them in the backward pass. So memory grows with the length, not with its
square, unless the weights are returned. It is for readers of [the function
`attention`](attention.md), which uses it for what PyTorch's fused kernel lacks on a
CPU: dropout, returned weights, windows, a soft cap, and causality together with a mask.

A tile has whole rows of the weights. So its softmax is that of PyTorch, and the
[online softmax](../variants/online_softmax.md) is not needed.

Source: [FlashAttention](https://arxiv.org/abs/2205.14135), Dao et al. 2022, appendix B,
for the backward pass and for regenerating dropout masks;
[Self-attention Does Not Need O(n²) Memory](https://arxiv.org/abs/2112.05682), Rabe and
Staats 2021, section 2, with whole rows of keys in a block.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headnotes.fast.formula import (
    Call,
    cut_band,
    draw_seed,
    dropout_mask,
    dropout_scale,
    dropout_threshold,
    merge_groups,
    needs_recorded_gradients,
    recorded_gradients,
    returned_weights,
    scaled_bmm,
    share_of_keys,
    unmask_fully_masked_rows,
    wide_range,
)

# The number of queries in a tile, of scores in its buffer, and the least number of
# heads in it, over which the CPU cores are parallel. 1 MiB of float32 fits into the
# cache of a core, beside the keys and values. All three values were found by measuring.
TILE_ROWS = 128
TILE_SCORES = 1 << 18
TILE_HEADS = 8


def blockwise(call: Call) -> tuple[Tensor, Tensor | None]:
    r"""One tile of queries at a time; its weights are used while they are in the cache.

    >>> query, key = torch.randn(134, 2, 7, 11).split([3, 131])
    >>> options = {"need_weights": True}
    >>> context, weights = blockwise(Call(query, key, key, **options))
    >>> weights.shape
    torch.Size([3, 131, 2, 7])
    >>> _, mean = blockwise(Call(query, key, key, average_weights=True, **options))
    >>> torch.allclose(mean, weights.mean(-1))
    True
    """
    heads = call.query.shape[2]
    shown = 0 if not call.need_weights else 1 if call.average_weights else heads
    threshold = dropout_threshold(call.dropout_prob)
    seed = draw_seed() if threshold else 0
    spec = TileSpec(
        shown,
        call.is_causal,
        call.scores_are_finite(call.query.dtype),
        threshold,
        seed,
        call.window,
        call.scale,
        call.soft_cap,
    )
    apply: Any = Blockwise.apply
    mask = call.mask
    if mask is not None and call.needs_grad:
        # It is saved for the backward pass, and the caller may change it before that.
        mask = mask.clone()
    context, weights = apply(
        call.query, call.key, call.value, mask, call.bias, call.sinks, *spec
    )  # [q_len, batch_size, heads, ...], [batch_size, shown, q_len, k_len]
    returned = returned_weights(call, weights)  # [q_len, k_len, batch_size, ...]
    return context, returned


class TileSpec(NamedTuple):
    """The settings that all tiles of one call share, besides its mask."""

    # The number of heads in the returned weights: 0, all, or 1 for their mean.
    shown: int
    is_causal: bool
    # Whether all scores are known to be finite, so that a minimum can mask them.
    scores_are_finite: bool
    dropout_threshold: int
    seed: int
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None


class Tile(NamedTuple):
    """Some queries of some heads, and the keys that they may attend to."""

    rows: slice
    items: slice
    heads: slice
    kv_heads: slice
    columns: slice

    @property
    def k_len(self) -> int:
        """The number of its keys."""
        length: int = self.columns.stop - self.columns.start
        return length

    def queries(self, x: Tensor) -> Tensor:
        """Its rows of `x`, with batch items and heads flattened into one dimension."""
        x = x[self.rows, self.items, self.heads].flatten(
            1, 2
        )  # [rows, batch_heads, ...]
        return x.transpose(0, 1)  # [batch_heads, rows, ...]

    def keys(self, x: Tensor) -> Tensor:
        """The keys or values that its queries may attend to."""
        x = x[self.columns, self.items, self.kv_heads].flatten(
            1, 2
        )  # [k_len, batch_heads, d_k]
        return x.transpose(0, 1)  # [batch_heads, k_len, d_k]

    def split_heads(
        self,
        x: Tensor,  # [..., rows, k_len]
    ) -> Tensor:
        """A tensor of this tile, with batch items and heads as two dimensions."""
        items = self.items.stop - self.items.start
        return x.view(items, -1, *x.shape[1:])  # [items, ..., rows, k_len]

    def of_weights(
        self,
        x: Tensor,  # [..., k_len]
    ) -> Tensor:
        """Its part of the returned weights, `[items, shown, rows, k_len]`."""
        heads = self.heads if x.shape[1] > 1 else slice(1)
        return x[self.items, heads, self.rows, self.columns]  # [..., k_len]

    def of_bias(
        self,
        x: Tensor,
    ) -> Tensor:
        """Its part of a bias, `[items or 1, heads or 1, rows or 1, k_len]`."""
        for dim, part in enumerate((self.items, self.heads, self.rows)):
            if x.shape[dim] > 1:
                x = x.movedim(dim, 0)[part].movedim(0, dim)
        return x[..., self.columns]


class Tiles:
    r"""The tiles of one call, and the buffers that they share.

    With `is_causal`, a tile ends at the last key that one of its queries may attend to:

    >>> x = torch.randn(300, 1, 7, 11)
    >>> tiles = Tiles(x, x, None, TileSpec(0, True, True, 2**15, 0))
    >>> [(tile.rows.start, tile.rows.stop, tile.k_len) for tile in tiles]
    [(0, 128, 128), (128, 256, 256), (256, 300, 300)]
    >>> shapes = [torch.Size((7, 44, tile.k_len)) for tile in tiles]
    >>> masks = [tiles.dropout_mask(shape) for shape in shapes]
    >>> masks[2].unique()
    tensor([0, 1], dtype=torch.int16)
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        spec: TileSpec,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.q_len, self.batch_size, self.heads, d_k = query.shape
        self.k_len, self.mask, self.spec = key.shape[0], mask, spec
        self.groups = self.heads // key.shape[2]
        self.bias = None if bias is None else bias.permute(2, 3, 0, 1)  # [..., k_len]
        self.sinks = sinks
        self.scale = 1 / math.sqrt(d_k) if spec.scale is None else spec.scale
        # How far a query sees before and after its own position.
        longest = max(self.q_len, self.k_len)
        # One key before the window, which is masked, makes the rows of the scores as
        # long as a multiple of 16 for usual windows: such products are faster.
        before = longest if spec.window is None else spec.window
        after = 0 if spec.is_causal else before
        self.reach = before, after
        # With more queries than keys, the first queries may be fully masked.
        self.first_row = max(0, self.q_len - self.k_len - after)
        # As many heads as fit: some of one batch item, or all of several items.
        self.tile_rows = min(TILE_ROWS, self.q_len)
        tile_keys = min(self.k_len, before + self.tile_rows + after)
        fit = max(TILE_HEADS, TILE_SCORES // max(1, self.tile_rows * tile_keys))
        # The heads that share keys are in one tile.
        most = max(1, fit // self.groups) * self.groups
        self.step = max(1, fit // self.heads), min(most, self.heads)
        self.like = query
        heads = min(self.step[0], self.batch_size) * self.step[1]
        self.tile_size = heads * self.tile_rows * tile_keys
        self.buffers: dict[str, Tensor] = {}
        self.random_bits: Tensor | None = None
        if spec.is_causal and mask is None:
            rows = self.tile_rows
            square = query.new_ones(rows, rows, dtype=torch.bool)  # [rows, rows]
            self.past, self.future = (
                self.hidden(x) for x in (square.tril(), square.triu(1))
            )  # [rows, rows]
        # The backward pass drops the same weights as the forward pass.
        self.generator = torch.Generator().manual_seed(spec.seed)

    def __iter__(self) -> Iterator[Tile]:
        shift = self.k_len - self.q_len
        before, after = self.reach
        items, heads = self.step
        for item in range(0, self.batch_size, items):
            for head in range(0, self.heads, heads):
                last = min(head + heads, self.heads)
                for row in range(self.first_row, self.q_len, TILE_ROWS):
                    end = min(row + TILE_ROWS, self.q_len)
                    yield Tile(
                        slice(row, end),
                        slice(item, min(item + items, self.batch_size)),
                        slice(head, last),
                        slice(head // self.groups, last // self.groups),
                        slice(
                            max(0, row + shift - before),
                            min(self.k_len, end + shift + after),
                        ),
                    )

    def buffer(self, name: str, shape: torch.Size) -> Tensor:
        """Uninitialized memory for the weights of one tile."""
        if name not in self.buffers:
            self.buffers[name] = self.like.new_empty(self.tile_size)
        batch_heads, rows, k_len = shape
        return self.buffers[name][: shape.numel()].view(
            batch_heads, rows, k_len
        )  # [batch_heads, rows, k_len]

    def empty_output(self, width: int | None = None) -> Tensor:
        """One vector for each query, zero in the rows that no tile writes."""
        *others, d_k = self.like.shape
        output = self.like.new_empty(*others, width or d_k)  # [q_len, ...]
        output[: self.first_row] = 0
        return output

    def head_contiguous(self, x: Tensor) -> Tensor:
        """Keys or values; in half precision, copied so that each head is contiguous.

        A matrix product would otherwise make such a copy for each tile of queries.
        """
        if x.itemsize > 2 or self.q_len <= TILE_ROWS:
            return x
        return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)

    def merge(
        self,
        x: Tensor,  # [..., columns]
    ) -> Tensor:
        """As `merge_groups`."""
        return merge_groups(x, self.groups)  # [..., columns]

    def weights(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,
        tile: Tile,
        slope: Tensor | None = None,  # [batch_heads, rows, k_len]
    ) -> tuple[Tensor, Tensor | None]:
        """The weights of a tile, `[batch_heads, rows, k_len]`, and fully masked rows.

        The derivative of the soft cap is written to `slope`.
        """
        q = tile.queries(query)  # [batch_heads, rows, d_k]
        k = tile.keys(key)  # [..., k_len, d_k]
        shape = torch.Size((*q.shape[:2], tile.k_len))
        scores = self.buffer("weights", shape)  # [batch_heads, rows, k_len]
        merged = self.merge(scores)  # [..., k_len]
        torch.baddbmm(merged, self.merge(q), k.mT, beta=0, alpha=self.scale, out=merged)
        split_scores = tile.split_heads(scores)  # [..., rows, k_len]
        if self.spec.soft_cap is not None:
            # In place, where the scores have a wide range.
            capped = wide_range(scores).div_(self.spec.soft_cap).tanh_()  # [..., k_len]
            if slope is not None:
                torch.mul(capped, capped, out=slope).neg_().add_(1)
            scores.copy_(capped.mul_(self.spec.soft_cap))
        if self.bias is not None:
            split_scores.add_(tile.of_bias(self.bias))
        empty = None
        if self.mask is None and self.spec.is_causal:
            self.mask_corners(scores, tile)
        elif self.mask is not None or self.spec.window is not None:
            allowed = self.allowed(tile, self.mask)  # [..., k_len]
            allowed, empty = unmask_fully_masked_rows(allowed)  # [..., k_len], [..., 1]
            self.mask_scores(split_scores, self.hidden(allowed))
        share = None
        if self.sinks is not None:
            sinks = self.sinks[tile.heads].view(-1, 1, 1)  # [heads, 1, 1]
            share = share_of_keys(split_scores, sinks)  # [..., rows, 1]
        torch.softmax(scores, -1, out=scores)
        if share is not None:
            split_scores.mul_(share)
        if empty is not None:
            split_scores.masked_fill_(empty, 0)
        return scores, empty

    def mask_corners(
        self,
        scores: Tensor,
        tile: Tile,
    ) -> None:
        """Mask the scores of a causal tile, which is a band, in two triangles only.

        Each row may attend to one key more than the row before. So masked scores are in
        the last columns, as many as there are rows. A window ends one column later in
        each row, so it masks as many of the first columns.
        """
        n = scores.shape[1]
        self.mask_scores(scores[:, :, -n:], self.past[:n, :n])
        if self.spec.window is not None:
            # At the start of the sequence, the window of the first rows is not full.
            full = self.spec.window - self.position(tile)
            n = max(0, n - full)
            self.mask_scores(scores[:, full:, :n], self.future[:n, :n])

    def position(self, tile: Tile) -> int:
        """The position of the first query, counted from the first key of the tile."""
        position: int = tile.rows.start + self.k_len - self.q_len - tile.columns.start
        return position

    def hidden(self, allowed: Tensor) -> Tensor:
        """What is not allowed, as `mask_scores` takes it.

        If all scores are finite, it is a bound of them: minus infinity or infinity.
        """
        if not self.spec.scores_are_finite:
            return ~allowed
        bound = torch.full_like(allowed, -math.inf, dtype=self.like.dtype)
        return bound.masked_fill_(allowed, math.inf)

    def mask_scores(self, scores: Tensor, hidden: Tensor) -> None:
        """Set the hidden scores to minus infinity."""
        if hidden.dtype == torch.bool:
            scores.masked_fill_(hidden, -math.inf)
        else:
            # One pass instead of several; NaN would not be masked by a minimum.
            torch.minimum(scores, hidden, out=scores)

    def allowed(self, tile: Tile, mask: Tensor | None) -> Tensor:
        """The mask of a tile, `[items or 1, 1, rows or 1, k_len]`."""
        rows = tile.rows.stop - tile.rows.start
        if mask is None:
            mask = self.like.new_ones(1, tile.k_len, 1, dtype=torch.bool)
        else:
            mask = mask[:, tile.columns]
        mask = mask[tile.rows] if mask.shape[0] > 1 else mask
        mask = mask[..., tile.items] if mask.shape[2] > 1 else mask  # [..., items]
        mask = mask.permute(2, 0, 1).unsqueeze(1)  # [items, ..., k_len]
        is_causal, window = self.spec.is_causal, self.spec.window
        if is_causal or window is not None:
            mask = mask.expand(-1, -1, rows, -1)
            mask = cut_band(mask, self.position(tile), is_causal, window)
        return mask

    def dropout_mask(self, shape: torch.Size) -> Tensor:
        """1 for each weight of the next tile that is kept, 0 for the others."""
        if self.random_bits is None:
            most = self.tile_size // 4 + 1
            self.random_bits = self.like.new_empty(most, dtype=torch.int64)  # [most]
        n = shape.numel() // 4 + 1
        bits = self.random_bits[:n]  # [n]
        bits.random_(torch.iinfo(torch.int64).min, None, generator=self.generator)
        return dropout_mask(bits, shape, self.spec.dropout_threshold)

    def drop(self, weights: Tensor) -> None:
        """Drop weights of the next tile, in place."""
        if self.spec.dropout_threshold == 2**16:
            weights.zero_()  # NaN times zero would be NaN
        else:
            weights.mul_(self.dropout_mask(weights.shape))

    def drop_all(self, weights: Tensor) -> tuple[Tensor, float]:
        """The dropout of all tiles, for weights `[batch_size, heads, q_len, k_len]`."""
        keep = torch.ones_like(weights)
        for tile in self if self.spec.dropout_threshold else ():
            part = keep[tile.items, tile.heads, tile.rows, tile.columns]  # [..., k_len]
            batch_heads = torch.Size((part.shape[0] * part.shape[1], *part.shape[2:]))
            part.copy_(tile.split_heads(self.dropout_mask(batch_heads)))
        return weights * keep, dropout_scale(self.spec.dropout_threshold)


class Blockwise(torch.autograd.Function):
    r"""Compute the context tile by tile, and the weights of `shown` heads.

    The backward pass recomputes the weights. With $P$ the weights, $M$ what dropout
    multiplies them by, $O = (P \odot M)\,V$ and $G$ the gradient of $O$:

    $$dV = (P \odot M)^\top\, G$$

    $$dS_{ij} = P_{ij}\, \Big(M_{ij} \sum_d G_{id} V_{jd} - \sum_d G_{id} O_{id}\Big)$$

    $$dQ = dS\, K / \sqrt{d_k} \qquad dK = dS^\top Q / \sqrt{d_k}$$

    The subtracted sum is FlashAttention's $D$; it comes from the softmax, whose weights
    sum to 1. If the weights are returned, their gradient $W$ (before dropout) is added
    to the first sum, and $\sum_j P_{ij} W_{ij}$ to the second. If the backward pass is
    itself recorded, the formula is differentiated instead.

    A row of weights sums to 1, or to 0 if it is fully masked. So the sum of all weights
    does not depend on the queries:

    >>> query = torch.randn(256, 4, 7, 11).requires_grad_()
    >>> key, value = torch.randn(2, 131, 4, 7, 11)
    >>> mask = torch.rand(1, 131, 4) < 0.9
    >>> mask[:, :, 3] = False
    >>> options = {"mask": mask, "need_weights": True}
    >>> _, weights = blockwise(Call(query, key, value, **options))
    >>> options["average_weights"] = True
    >>> _, mean = blockwise(Call(query, key, value, **options))
    >>> (weights.sum() + mean.sum()).backward()
    >>> torch.allclose(query.grad, torch.zeros(256, 4, 7, 11), atol=1e-5)
    True

    The backward pass drops the same weights as the forward pass, whether it is recorded
    or not:

    >>> call = Call(query, key, value, dropout=torch.nn.Dropout(0.5))
    >>> context, _ = blockwise(call)
    >>> loss = context.pow(2).sum()
    >>> (first,) = torch.autograd.grad(loss, query, retain_graph=True)
    >>> (same,) = torch.autograd.grad(loss, query, create_graph=True)
    >>> torch.allclose(first, same, atol=1e-4)
    True

    A number that is added to all scores of a row and to its sink changes nothing, so
    the gradients of both sum to zero:

    >>> query = torch.randn(256, 4, 6, 11)
    >>> key, value = torch.randn(131, 4, 2, 11), torch.randn(131, 4, 2, 13)
    >>> bias = torch.randn(1, 131, 1, 6).requires_grad_()
    >>> sinks = torch.randn(6).requires_grad_()
    >>> options = {"bias": bias, "sinks": sinks, "soft_cap": 5.0}
    >>> context, _ = blockwise(Call(query, key, value, **options))
    >>> context.pow(2).sum().backward()
    >>> total = bias.grad.sum() + sinks.grad.sum()
    >>> sinks.grad.abs().max() > 1, torch.allclose(total, torch.zeros(()), atol=0.1)
    (tensor(True), True)
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, kv_heads, d_k]
        value: Tensor,  # [k_len, batch_size, kv_heads, d_v]
        mask: Tensor | None,  # [..., k_len, batch_size]
        bias: Tensor | None,
        sinks: Tensor | None,  # [heads]
        *spec: Any,
    ) -> tuple[Tensor, Tensor]:
        tiles = Tiles(query, key, mask, TileSpec(*spec), bias, sinks)
        context = tiles.empty_output(value.shape[-1])  # [q_len, ..., d_v]
        shape = tiles.batch_size, tiles.spec.shown, tiles.q_len, tiles.k_len
        shown = query.new_zeros(shape)  # [batch_size, shown, q_len, k_len]
        contiguous_key, contiguous_value = (
            tiles.head_contiguous(key),
            tiles.head_contiguous(value),
        )
        scale = dropout_scale(tiles.spec.dropout_threshold)
        for tile in tiles:
            weights, empty = tiles.weights(
                query, contiguous_key, tile
            )  # [batch_heads, rows, k_len], [..., 1]
            if tiles.spec.shown:
                part = tile.of_weights(shown)  # [items, shown, rows, k_len]
                split_weights = tile.split_heads(weights)  # [items, ..., rows, k_len]
                if tiles.spec.shown == tiles.heads:
                    part.copy_(split_weights)
                else:
                    part.add_(split_weights.sum(1, keepdim=True), alpha=1 / tiles.heads)
            if tiles.spec.dropout_threshold:
                tiles.drop(weights)
            part = tile.queries(context)  # [batch_heads, rows, d_v]
            product = scaled_bmm(
                tiles.merge(weights), tile.keys(contiguous_value), scale
            )  # [..., d_v]
            product = product.view(part.shape)  # [batch_heads, rows, d_v]
            if empty is not None:
                # Zero times NaN is NaN.
                tile.split_heads(product).masked_fill_(empty, 0)
            part.copy_(product)
        ctx.save_for_backward(context, query, key, value, mask, bias, sinks)
        ctx.spec = spec
        # The gradient of an unused output is None, not a tensor of zeros.
        ctx.set_materialize_grads(False)
        return context, shown

    @staticmethod
    def backward(
        ctx: Any, grad_context: Tensor | None, grad_shown: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        context, query, key, value, mask, bias, sinks = ctx.saved_tensors
        tiles = Tiles(query, key, mask, TileSpec(*ctx.spec), bias, sinks)
        grads: Sequence[Tensor | None]
        if needs_recorded_gradients(grad_context, grad_shown):
            # Views, because the key may be the query, or be computed from it: each
            # input gets its own gradient.
            with torch.enable_grad():
                q, k, v = (each.view_as(each) for each in (query, key, value))
            if grad_shown is not None:  # the mean: its gradient is shared by the heads
                share = tiles.heads // grad_shown.shape[1]
                grad_shown = grad_shown.expand(-1, tiles.heads, -1, -1) / share
            spec, inputs = tiles.spec, (q, k, v, bias, sinks)
            call = Call(
                q,
                k,
                v,
                mask,
                is_causal=spec.is_causal,
                window=spec.window,
                scale=spec.scale,
                soft_cap=spec.soft_cap,
                bias=bias,
                sinks=sinks,
            )
            drop = tiles.drop_all
            grads = recorded_gradients(inputs, call, grad_context, grad_shown, drop)
        else:
            grads = tile_gradients(
                tiles, query, key, value, context, grad_context, grad_shown
            )
        return *grads[:3], None, *grads[3:], *(None for _ in ctx.spec)


def tile_gradients(
    tiles: Tiles,
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, kv_heads, d_k]
    value: Tensor,  # [k_len, batch_size, kv_heads, d_v]
    context: Tensor,  # [q_len, batch_size, heads, d_v]
    grad_context: Tensor | None,  # [q_len, batch_size, heads, d_v]
    grad_shown: Tensor | None,  # [batch_size, shown, q_len, k_len]
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, bias and sinks, by `Blockwise`'s formulas."""
    key, value = tiles.head_contiguous(key), tiles.head_contiguous(value)
    grads = Gradients(tiles, key, value)
    if grad_context is None:
        grad_context = torch.zeros_like(context)
    delta = (grad_context * context).sum(-1, keepdim=True)  # [q_len, ..., 1]
    scale = dropout_scale(tiles.spec.dropout_threshold)
    slope, merge = None, tiles.merge

    for tile in tiles:
        q = tile.queries(query)  # [batch_heads, rows, d_k]
        shape = torch.Size((*q.shape[:2], tile.k_len))
        if tiles.spec.soft_cap is not None:
            slope = tiles.buffer("slope", shape)  # [batch_heads, rows, k_len]
        weights, _ = tiles.weights(
            query, key, tile, slope
        )  # [batch_heads, rows, k_len], [..., 1]
        grad = merge(tile.queries(grad_context))  # [..., d_v]
        grad_weights = tiles.buffer("grad_weights", shape)  # [batch_heads, rows, k_len]
        scaled_bmm(grad, tile.keys(value).mT, scale, out=merge(grad_weights))
        dropped = weights
        if tiles.spec.dropout_threshold:
            dropped = tiles.buffer("dropped", shape)  # [batch_heads, rows, k_len]
            dropped.copy_(tiles.dropout_mask(shape))
            grad_weights.mul_(dropped)
            dropped.mul_(weights)
        accumulate_bmm(grads.value, tile, merge(dropped).mT, grad, scale)

        total = tile.queries(delta)  # [batch_heads, rows, 1]
        if grad_shown is not None:
            part = tile.of_weights(grad_shown)  # [items, shown, rows, k_len]
            if grad_shown.shape[1] < tiles.heads:
                part = part / tiles.heads  # [items, shown, rows, k_len]
            tile.split_heads(grad_weights).add_(part)
            weighted = tiles.buffer("weighted", shape)  # [batch_heads, rows, k_len]
            torch.mul(tile.split_heads(weights), part, out=tile.split_heads(weighted))
            total = total + weighted.sum(-1, keepdim=True)  # [batch_heads, rows, 1]
        grads.add_sinks(tile, weights, total)
        grad_scores = grad_weights.sub_(total).mul_(
            weights
        )  # [batch_heads, rows, k_len]
        grads.add_bias(tile, grad_scores)
        if slope is not None:
            grad_scores.mul_(slope)
        part = tile.queries(grads.query)  # [batch_heads, rows, d_k]
        merged = merge(grad_scores)  # [..., k_len]
        product = scaled_bmm(merged, tile.keys(key), tiles.scale)  # [..., d_k]
        part.copy_(product.view(part.shape))
        accumulate_bmm(grads.key, tile, merged.mT, merge(q), tiles.scale)
    return grads.result(key.dtype)


class Gradients:
    """The sums of the gradients of all tiles."""

    def __init__(
        self,
        tiles: Tiles,
        key: Tensor,  # [k_len, batch_size, kv_heads, d_k]
        value: Tensor,  # [k_len, batch_size, kv_heads, d_v]
    ) -> None:
        self.query = tiles.empty_output()  # [..., heads, d_k]
        # Gradients of many tiles are summed here: in float32 for half precision.
        wide = torch.promote_types(key.dtype, torch.float32)
        self.key, self.value = (
            x.new_zeros(*x.shape[1:3], x.shape[0], x.shape[3], dtype=wide)
            for x in (key, value)
        )  # [batch_size, kv_heads, k_len, d_k], [batch_size, ..., d_v]
        self.bias, self.sinks = (
            None
            if x is None or not x.requires_grad
            else torch.zeros_like(x, dtype=torch.promote_types(x.dtype, wide))
            for x in (tiles.bias, tiles.sinks)
        )  # [..., k_len], [heads]

    def add_bias(
        self,
        tile: Tile,
        grad_scores: Tensor,  # [..., k_len]
    ) -> None:
        """The bias is added to the scores, so both have the same gradient."""
        if self.bias is not None:
            part = tile.of_bias(self.bias)  # [..., k_len]
            part.add_(tile.split_heads(grad_scores).sum_to_size(part.shape))

    def add_sinks(
        self,
        tile: Tile,
        weights: Tensor,  # [batch_heads, rows, ...]
        total: Tensor,  # [batch_heads, rows, 1]
    ) -> None:
        """A sink has the rest of the weight, and a value of zero."""
        if self.sinks is not None:
            rest = 1 - weights.sum(-1, keepdim=True)  # [batch_heads, rows, 1]
            grad = tile.split_heads(rest * total)  # [..., rows, 1]
            self.sinks[tile.heads] -= grad.sum((0, 2, 3))

    def result(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """The gradients, in the layout and dtype of the inputs."""
        key, value = (
            x.permute(2, 0, 1, 3).to(dtype) for x in (self.key, self.value)
        )  # [k_len, batch_size, kv_heads, ...], [k_len, batch_size, kv_heads, ...]
        bias = (
            None if self.bias is None else self.bias.permute(2, 3, 0, 1)
        )  # [1, k_len, ...]; or q_len
        return self.query, key, value, bias, self.sinks


def accumulate_bmm(
    total: Tensor,  # [..., k_len, d_k]
    tile: Tile,
    a: Tensor,  # [batch_heads, k_len, rows]
    b: Tensor,  # [batch_heads, rows, d_k]
    scale: float,
) -> None:
    """Add the product of `a` and `b` to the gradients of the keys of this tile."""
    part = total[tile.items, tile.kv_heads, tile.columns]  # [..., k_len, d_k]
    part = part.flatten(0, 1)  # [batch_heads, k_len, d_k]
    if part.dtype == a.dtype:
        part.baddbmm_(a, b, alpha=scale)
    else:
        part.add_(torch.bmm(a, b), alpha=scale)
