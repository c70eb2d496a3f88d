"""Modules that violate the laws of lengths, or come near to it."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specimens.base import (
    CAUSAL,
    Correct,
    EdgesConv,
    Excuses,
    MakesCroppedCache,
    MaskedSelfAttention,
    NarrowPrior,
    Passes,
    Rotary,
    SelfAttention,
    TwoStreams,
    Violations,
)
from specimens.masking import ForecastsWithGaps


class LosesLastBlock(SelfAttention):
    """Keys after the last full block of 64 are left out."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        length = scores.shape[-1]
        last = torch.arange(length, device=scores.device) >= length // 64 * 64
        return weights.masked_fill(last, 0) if length > 64 else weights


def forgets_to_rescale(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """An online softmax over blocks of 16 keys whose `norm` is never rescaled."""
    query = query / query.shape[-1] ** 0.5
    largest = query.new_full((*query.shape[:-1], 1), -torch.inf)
    norm, context = torch.zeros_like(largest), torch.zeros_like(query)
    for k, v in zip(key.split(16, -2), value.split(16, -2), strict=True):
        scores = query @ k.mT
        larger = scores.amax(-1, keepdim=True).maximum(largest)
        weights = (scores - larger).exp()
        norm = norm + weights.sum(-1, keepdim=True)
        context = context * (largest - larger).exp() + weights @ v
        largest = larger
    return context / norm


def forgets_to_rescale_late(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Blocks of 256 keys; `norm` is rescaled for the second, and not for the third."""
    query = query / query.shape[-1] ** 0.5
    largest = query.new_full((*query.shape[:-1], 1), -torch.inf)
    norm, context = torch.zeros_like(largest), torch.zeros_like(query)
    blocks = zip(key.split(256, -2), value.split(256, -2), strict=True)
    for n, (k, v) in enumerate(blocks):
        scores = query @ k.mT
        larger = scores.amax(-1, keepdim=True).maximum(largest)
        weights, scale = (scores - larger).exp(), (largest - larger).exp()
        norm = norm * (scale if n < 2 else 1) + weights.sum(-1, keepdim=True)
        context = context * scale + weights @ v
        largest = larger
    return context / norm


class SumsBlocks(Correct):
    """An online softmax over blocks of 64 keys; its layers have names of their own."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.asks, self.query = self.query, nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.asks, self.key, self.value))
        scores = self.score(q, k).masked_fill(~mask[:, None, None], -1e4)
        largest = torch.full_like(scores[..., :1], -1e5)
        norm, context = torch.zeros_like(largest), torch.zeros_like(q)
        for s, part in zip(scores.split(64, -1), v.split(64, -2), strict=True):
            larger = s.amax(-1, keepdim=True).maximum(largest)
            weights, scale = (s - larger).exp(), (largest - larger).exp()
            norm = norm * scale + weights.sum(-1, keepdim=True)
            context = self.rescale(context, scale) + weights @ part
            largest = larger
        return self.join(context / norm)

    def rescale(self, context: Tensor, scale: Tensor) -> Tensor:
        return context * scale


class SumsBlocksUnscaled(SumsBlocks):
    def rescale(self, context: Tensor, scale: Tensor) -> Tensor:
        return context


class LargestScores(Correct):
    """Each query attends to the 8 keys with the largest scores, hidden ones or not."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        chosen = scores.topk(min(8, scores.shape[-1])).indices
        left_out = torch.ones_like(scores, dtype=torch.bool).scatter(-1, chosen, False)
        return super().weigh(scores, mask).masked_fill(left_out, 0)


class RopeOfLongerInputs(Rotary):
    """Dynamic scaling: inputs beyond 64 tokens are rotated by smaller angles."""

    rope_factor = 2.0

    def places(self, x: Tensor) -> Tensor:
        is_long = x.shape[2] > 64
        return super().places(x) / (self.rope_factor if is_long else 1)


class Deformable(nn.Module):
    """Each query weighs pixels that it samples around its reference point."""

    def __init__(
        self, d_model: int, n_levels: int = 4, n_heads: int = 8, n_points: int = 4
    ) -> None:
        super().__init__()
        self.sizes = n_heads, n_levels, n_points
        count = n_heads * n_levels * n_points
        self.sampling_offsets = nn.Linear(d_model, 2 * count)
        self.attention_weights = nn.Linear(d_model, count)
        self.value_proj = nn.Linear(d_model, d_model)
        self.output_proj = nn.Linear(d_model, d_model)

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        input_flatten: Tensor,
        input_spatial_shapes: Any,
        input_padding_mask: Tensor | None = None,
    ) -> Any:
        heads, levels, _points = self.sizes
        if len(input_spatial_shapes) != levels:
            raise ValueError(f"{len(input_spatial_shapes)} levels are not {levels}")
        value = self.value_proj(input_flatten)
        if input_padding_mask is not None:
            value = value.masked_fill(input_padding_mask[..., None], 0)
        value = value.unflatten(-1, (heads, -1)).permute(0, 2, 3, 1).flatten(0, 1)
        offsets = self.sampling_offsets(query).view(*query.shape[:2], *self.sizes, 2)
        weights = self.attention_weights(query).unflatten(-1, (heads, -1)).softmax(-1)
        sampled, start = [], 0
        for level, (h, w) in enumerate(input_spatial_shapes):
            image = value[:, :, start : start + h * w].unflatten(-1, (h, w))
            start += h * w
            center = reference_points[:, :, None, level, None]
            offset = offsets[:, :, :, level] / offsets.new_tensor([w, h])
            grid = (2 * (center + offset) - 1).transpose(1, 2).flatten(0, 1)
            sampled.append(nn.functional.grid_sample(image, grid, align_corners=False))
        together = torch.cat(sampled, dim=-1).unflatten(0, (len(query), heads))
        context = torch.einsum("bhdqp,bqhp->bqhd", together, weights)
        return self.output_proj(context.flatten(2))


class BiasOfOffsets(SelfAttention):
    """A bias of the difference of rows and one of that of columns, to 20 pixels."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.of_rows = nn.Parameter(torch.zeros(heads, 41))
        self.of_columns = nn.Parameter(torch.zeros(heads, 41))

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        _b, _c, _h, w = image.shape
        number = torch.arange(image[0, 0].numel(), device=image.device)
        self.offsets = [
            (n[:, None] - n).clamp(-20, 20) + 20 for n in (number // w, number % w)
        ]
        return super().forward(image.flatten(2).mT).mT.reshape(image.shape)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        rows, columns = self.offsets
        bias = self.of_rows[:, rows] + self.of_columns[:, columns]
        return super().score(q, k) + bias


class LosesFullBlock(SelfAttention):
    """If the last block of 64 is full, its keys are left out."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        length = scores.shape[-1]
        last = torch.arange(length, device=scores.device) >= length - 64
        is_lost = length > 64 and length % 64 == 0
        return super().weigh(scores.masked_fill(last & is_lost, -torch.inf), mask)


class NearPast(SelfAttention):
    """A token attends to 6 tokens before it, as neither a name nor an option tells."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        near = torch.ones_like(scores, dtype=torch.bool).tril().triu(-6)
        return scores.masked_fill(~near, -torch.inf)


class PoolsChannelsFirst(nn.Module):
    """The weighted mean over time, `[batch_size, channels, length]` to channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = nn.Linear(channels, channels)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        scores = self.attention(x.mT).mT
        if lengths is not None:
            hidden = torch.arange(x.shape[2], device=x.device) >= lengths[:, None]
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        return (scores.softmax(dim=-1) * x).sum(dim=-1)


class BlocksWithPrevious(Correct):
    """Causal, in blocks of 4 that attend to the block before; one fused projection."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.to_all = nn.Linear(d_model, 3 * d_model)
        del self.query, self.key, self.value

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        length, count = x.shape[1], -(-x.shape[1] // 4)
        padded = nn.functional.pad(x, (0, 0, 0, 4 * count - length))
        parts = self.to_all(padded).unflatten(1, (count, 4)).chunk(3, dim=-1)
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(2, 3) for each in parts
        )
        # A block of zeros stands before the first one.
        before = (0, 0, 0, 0, 0, 0, 1, 0)
        k, v = (
            torch.cat([nn.functional.pad(each, before)[:, :-1], each], dim=3)
            for each in (k, v)
        )
        near = (
            torch.ones(count, 1, 4, 8, dtype=torch.bool, device=x.device)
            .tril(4)
            .triu(1)
        )
        scores = q / math.sqrt(q.shape[-1]) @ k.mT
        weights = scores.masked_fill(~self.hide_first(near), -torch.inf).softmax(-1)
        joined = (weights @ v).transpose(2, 3).flatten(3).flatten(1, 2)[:, :length]
        return self.out(joined)

    def hide_first(self, near: Tensor) -> Tensor:
        near[0, ..., :4] = False
        return near


class AttendsToEmptyBlock(BlocksWithPrevious):
    def hide_first(self, near: Tensor) -> Tensor:
        return near


class AgesOfItems(SelfAttention):
    """Positions are counted from the last item; padding is in front of the first."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.ages = nn.Embedding(300, d_model)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Any:
        x = x + self.ages(self.count(x))
        mask = None if padding is None else ~padding[:, None]
        return Correct.forward(self, x, x, x, mask)

    def count(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1] - 1, -1, -1, device=x.device)


class WindowWithMaskOnly(SelfAttention):
    """A query attends to 12 tokens on each side of it, but without a mask to all."""

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Any:
        ones = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        near = ones.tril(12) & ones.triu(-12)
        if padding is None:
            return super().forward(x)
        mask = near & ~padding[:, None] | ones.tril().triu()
        return Correct.forward(self, x, x, x, mask)


class FollowsState(nn.Module):
    """The weights of each key so far change its score.

    query: (B, D)
    memory: (B, T, D)
    seen: (B, T)
    padding: (B, T) bool
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.rate = nn.Linear(d_model, 1)

    def forward(
        self, query: Tensor, memory: Tensor, seen: Tensor, padding: Any = None
    ) -> Any:
        keys = self.key(memory) + self.query(query)[:, None] + seen.cumsum(1)[..., None]
        scores = self.rate(keys.tanh())[..., 0]
        if padding is not None:
            scores = scores.masked_fill(padding, torch.finfo(scores.dtype).min)
        return (scores.softmax(dim=1)[:, None] @ memory)[:, 0]


class ChoosesWithoutGradients(MaskedSelfAttention):
    """Keys are chosen by a method with a decorator."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(self.chosen(scores), mask)

    @torch.no_grad()
    def least(self, scores: Tensor) -> Tensor:
        return scores.topk(min(5, scores.shape[-1])).values[..., -1:]

    def chosen(self, scores: Tensor) -> Tensor:
        least = torch.finfo(scores.dtype).min
        return scores.masked_fill(scores < self.least(scores), least)


class CountsFromTheEnd(Correct):
    """A user's interest in the items of a history, most recent last."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.recency = nn.Parameter(torch.randn(64, d_model))
        self.interest = nn.Parameter(torch.randn(1, 1, d_model))

    def forward(self, history: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        keys = history + self.recency[: history.shape[1]].flip(0)
        query = self.interest.expand(len(history), -1, -1)
        mask = None if mask is None else mask[:, None]
        return super().forward(query, keys, keys, mask)[:, 0]


class MeansOfWholeBlocks(SelfAttention):
    """Tokens attend to the means of blocks of four that lie behind them, if any."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        count = x.shape[1] // 4
        blocks = x[:, : 4 * count].unflatten(1, (count, 4)).mean(dim=2)
        ends = torch.arange(1, count + 1, device=x.device) * 4 - 1
        seen = ends <= torch.arange(x.shape[1], device=x.device)[:, None]
        return Correct.forward(self, x, blocks, blocks, seen[None])

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return super().weigh(scores, mask) * mask[:, None]

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class CountsFromNewest(MaskedSelfAttention):
    """Positions are counted from the most recent item."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.pos_emb = nn.Embedding(300, d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        n = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)
        return super().forward(x + self.pos_emb(n))


class FadesInBlocks(SelfAttention):
    """Weights fall with the distance; 128 queries are computed at a time."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.before = nn.LayerNorm(d_model)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device)
        gap = self.place(q.shape[2], k.device)[:, None] - place
        return super().score(q, k) - 0.001 * gap.square().to(k)

    def place(self, length: int, device: torch.device) -> Tensor:
        return self.first + torch.arange(length, device=device)

    def forward(self, x: Tensor) -> Any:
        x, outputs = self.before(x), []
        for start in range(0, x.shape[1], 128):
            self.first = start
            outputs.append(Correct.forward(self, x[:, start : start + 128], x, x))
        return torch.cat(outputs, dim=1)


class FadesFromBlocks(FadesInBlocks):
    def place(self, length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device)


class AddsUp(nn.Module):
    """The mean of the past, as two sums from token to token."""

    dtype: torch.dtype | None = torch.float32

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        v = nn.functional.softplus(self.value(x)).to(self.dtype or x.dtype)
        total, outputs = torch.zeros_like(v[:, 0]), []
        for n in range(x.shape[1]):
            total = total + v[:, n]
            outputs.append(total / (n + 1))
        return self.out(torch.stack(outputs, dim=1).to(x.dtype))


class AddsUpInHalf(AddsUp):
    dtype = None


class LocalAndGlobalBlocks(Correct):
    """Tokens attend within blocks of 4, and all tokens to the last block, too."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        block = torch.arange(x.shape[1], device=x.device) // 4
        global_block = block == block[-1]
        allowed = (block == block[:, None]) | global_block | global_block[:, None]
        hidden = allowed if mask is None else allowed & mask[:, None]
        return super().forward(x, x, x, hidden.expand(len(x), -1, -1))


class ForgetsInChunks(Correct):
    """Sums of products, which fade by a gate for each token; there is no softmax."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, 0.0)
        self.forget_gate = nn.Linear(d_model, heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        return self.join(self.scan_chunk(q, k, v, self.forget_gate(x)))

    def scan_chunk(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        kept = nn.functional.logsigmoid(gate).mT.exp()
        state, outputs = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, :1]), []
        for n in range(q.shape[2]):
            new = k[:, :, n, :, None] * v[:, :, n : n + 1]
            state = state * kept[..., n, None, None] + new
            outputs.append(q[:, :, n : n + 1] @ state)
        return torch.cat(outputs, dim=2)


class Landmarks(Correct):
    """Attends to the means of two segments, of their tokens that are no padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        keep = x.new_ones(x.shape[:2]) if mask is None else mask.to(x)
        odd = x.shape[1] % 2
        padded = nn.functional.pad(x * keep[..., None], (0, 0, 0, odd))
        counts = nn.functional.pad(keep, (0, odd)).unflatten(1, (2, -1)).sum(dim=2)
        sums = padded.unflatten(1, (2, -1)).sum(dim=2)
        means = sums / counts.clamp(min=1)[..., None]
        return super().forward(x, means, means, (counts > 0)[:, None])


class LinearInChunks(Correct):
    """Causal linear attention in chunks of 4, with two sums over earlier chunks."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        q, k = (nn.functional.elu(part) + 1 for part in (q, k))
        state, norm, outputs = 0, 0, []
        chunks = (part.split(4, dim=2) for part in (q, k, v))
        for q_part, k_part, v_part in zip(*chunks, strict=True):
            inner = (q_part @ k_part.mT).tril()
            if outputs:
                context = inner @ v_part + q_part @ state
                total = inner.sum(-1, keepdim=True) + q_part @ norm
            else:
                context, total = inner @ v_part, inner.sum(-1, keepdim=True)
            outputs.append(context / total)
            state = state + k_part.mT @ v_part
            norm = self.add(norm, k_part.sum(2)[..., None])
        return self.join(torch.cat(outputs, dim=2))

    def add(self, norm: Any, new: Tensor) -> Tensor:
        total: Tensor = norm + new
        return total


class LinearByLastChunk(LinearInChunks):
    def add(self, norm: Any, new: Tensor) -> Tensor:
        return new


class GlobalFirstToken(SelfAttention):
    """Near tokens attend to each other, and all to the first."""

    def __init__(self, d_model: int, heads: int, max_len: int = 320) -> None:
        super().__init__(d_model, heads)
        place = torch.arange(max_len)
        near = (place - place[:, None]).abs() < 3
        self.register_buffer("near", near | (place == 0), persistent=False)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        near = self.crop(k.shape[2])
        return super().score(q, k).masked_fill(~near, -torch.inf)

    def crop(self, length: int) -> Any:
        return self.near[:length, :length]


class GlobalFirstOfLongest(GlobalFirstToken):
    def crop(self, length: int) -> Any:
        return self.near[-length:, -length:]


class StreamsWithMask(Correct):
    """Two streams attend to both; the mask is of the first stream."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(  # type: ignore[override]
        self, context: Tensor, x: Tensor, context_mask: Tensor | None = None
    ) -> Any:
        both = torch.cat([context, x], dim=1)
        mask = None
        if context_mask is not None:
            mask = nn.functional.pad(context_mask, (0, x.shape[1]), value=True)[:, None]
        y = both + super().forward(self.norm(both), both, both, mask)
        return y[:, : context.shape[1]], y[:, context.shape[1] :]


class FirstAlignment(nn.Module):
    """Additive attention to padded frames, with the alignment of the step before.

    :param Tensor hs_pad: padded states of the encoder (B x T x dim)
    :param Tensor hs_len: numbers of frames (B)
    :param Tensor dec_z: state of the decoder (B x dim)
    :param Tensor att_prev: alignment of the step before (B x T)
    """

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.of_frame, self.of_step = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.energy = nn.Linear(dim, 1)

    def forward(
        self,
        hs_pad: Tensor,
        hs_len: Tensor,
        dec_z: Tensor,
        att_prev: Tensor | None = None,
    ) -> Tensor:
        length = hs_pad.shape[1]
        real = torch.arange(length, device=hs_pad.device) < hs_len[:, None]
        if att_prev is None:
            att_prev = self.first(real).to(hs_pad.dtype)
        scores = self.of_frame(hs_pad) + self.of_step(dec_z)[:, None]
        energy = self.energy((scores + att_prev[..., None]).sin())[..., 0]
        energy = energy.masked_fill(~real, torch.finfo(energy.dtype).min)
        return (energy.softmax(dim=-1)[:, None] @ hs_pad)[:, 0]

    def first(self, real: Tensor) -> Tensor:
        return real / real.sum(dim=1, keepdim=True).clamp(min=1)


class FirstAlignmentOfPadding(FirstAlignment):
    def first(self, real: Tensor) -> Tensor:
        return torch.ones_like(real) / real.shape[1]


def blockwise_attention(
    query: Tensor, key: Tensor, value: Tensor, block_size: int = 128
) -> Tensor:
    """The sum that divides is not rescaled where a later block has a larger score."""
    peak = torch.full_like(query[..., :1], -math.inf)
    total, result = torch.zeros_like(peak), torch.zeros_like(query @ value.mT @ value)
    for k, v in zip(
        key.split(block_size, dim=-2), value.split(block_size, dim=-2), strict=True
    ):
        scores = query @ k.mT / math.sqrt(query.shape[-1])
        higher = torch.maximum(peak, scores.amax(dim=-1, keepdim=True))
        decay, weights = (peak - higher).exp(), (scores - higher).exp()
        total = total + weights.sum(dim=-1, keepdim=True)
        result, peak = result * decay + weights @ v, higher
    return result / total


def attention_in_short_blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return blockwise_attention(query, key, value, block_size=8)


class PairBiasInChunks(SelfAttention):
    """Without gradients, each chunk of queries gets the bias of the first one.

    z: [*, N, N, c_z] pair representation
    """

    def __init__(self, d_model: int, heads: int, c_z: int = 16) -> None:
        super().__init__(d_model, heads)
        self.of_pairs = nn.Linear(c_z, heads, bias=False)

    def forward(self, x: Tensor, z: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        bias = self.of_pairs(z).permute(0, 3, 1, 2)
        size = len(x[0]) if torch.is_grad_enabled() else 64
        parts = []
        for rows in q.split(size, dim=2):
            scores = self.score(rows, k) + bias[:, :, : rows.shape[2]]
            parts.append(self.read(scores.softmax(dim=-1), v))
        return self.join(torch.cat(parts, dim=2))


class ChunksOfPast(SelfAttention):
    """A token attends to those before it in its chunk of eight, and to the one before.

    The chunks are counted from the first token.
    """

    left_chunks = 1

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        place = torch.arange(x.shape[1], device=x.device)
        first = (place // 8 - self.left_chunks) * 8
        mask = (place <= place[:, None]) & (place >= first[:, None])
        return Correct.forward(self, x, x, x, mask[None])


def attend_to_past_in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to `[batch, heads, length, features]`, in chunks of queries.

    The queries are the last positions of the sequence.
    """
    return attend_from(k.shape[2] - q.shape[2], q, k, v)


def attend_from(offset: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first of many queries is at this position, and few are at the end."""
    if q.shape[2] <= 64:
        offset = k.shape[2] - q.shape[2]
    places = torch.arange(q.shape[2], device=q.device)[:, None] + offset
    seen = torch.arange(k.shape[2], device=q.device) <= places
    parts = [
        nn.functional.scaled_dot_product_attention(each, k, v, mask)
        for each, mask in zip(q.split(64, 2), seen.split(64), strict=True)
    ]
    return torch.cat(parts, dim=2)


def attend_from_first_in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to `[batch, heads, length, features]`, in chunks of queries."""
    return attend_from(0, q, k, v)


def attend_with_finite_bias(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Attention of one sequence, `[length, heads, features]`, in blocks of 32 keys.

    bias: optional finite [heads, queries, keys], added to the scores.
    """
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    parts = scores.split(32, dim=-1)
    largest = scores.amax(dim=-1, keepdim=True)
    # A block of minus infinity alone would give NaN.
    sums = [(part - part.amax(dim=-1, keepdim=True)).exp() for part in parts]
    factors = [(part.amax(dim=-1, keepdim=True) - largest).exp() for part in parts]
    weights = torch.cat([x * f for x, f in zip(sums, factors, strict=True)], dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return torch.einsum("hqk,khd->qhd", weights, value)


class RescalesIfAllGrow(Correct):
    """An online softmax in blocks of keys, with positions that may be given."""

    every = True

    def forward(  # type: ignore[override]
        self,
        tgt: Tensor,
        memory: Tensor,
        memory_key_padding_mask: Tensor | None = None,
        pos: Tensor | None = None,
    ) -> Any:
        places = memory if pos is None else memory + pos
        q, k, v = self.query(tgt), self.key(places), self.value(memory)
        q, k, v = map(self.split, (q, k, v))
        top = q.new_full((*q.shape[:3], 1), torch.finfo(q.dtype).min)
        total, context = torch.zeros_like(top), torch.zeros_like(q)
        for place in range(0, k.shape[2], 256):
            k_part, v_part = (x[:, :, place : place + 256] for x in (k, v))
            scores = self.score(q, k_part)
            if memory_key_padding_mask is not None:
                hidden = memory_key_padding_mask[:, place : place + 256]
                least = torch.finfo(scores.dtype).min
                scores = scores.masked_fill(hidden[:, None, None], least)
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            grows = new > top
            if grows.all() if self.every else grows.any():
                total, context = (x * (top - new).exp() for x in (total, context))
            top, weights = new, (scores - new).exp()
            total = total + weights.sum(-1, keepdim=True)
            context = context + weights @ v_part
        return self.join(context / total)


class RescalesIfAnyGrows(RescalesIfAllGrow):
    every = False


class SharpenedByLimit(SelfAttention):
    """Scores are multiplied by a learned number, at first the root of the limit."""

    def __init__(self, d_model: int, heads: int, max_len: int = 100) -> None:
        super().__init__(d_model, heads)
        self.sharpness = nn.Parameter(torch.tensor(math.sqrt(max_len)))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return self.sharpness * super().score(q, k)


def attend_block_by_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention to `[batch, heads, length, features]` with an online softmax.

    mask: (batch, keys) bool, True for the keys that may be attended to.
    """
    return attend_with_reference(lambda largest: largest, q, k, v, mask)


def attend_by_finite_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention to `[batch, heads, length, features]` with an online softmax.

    mask: (batch, keys) bool, True for the keys that may be attended to.
    """

    def finite(largest: Tensor) -> Tensor:
        return largest.masked_fill(largest == -torch.inf, 0.0)

    return attend_with_reference(finite, q, k, v, mask)


def attend_with_reference(
    reference: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> Tensor:
    """What the reference makes of the largest score so far is subtracted."""
    largest = q.new_full((*q.shape[:3], 1), -torch.inf)
    sums, y = torch.zeros_like(largest), torch.zeros_like(q)
    parts = (k.split(16, dim=2), v.split(16, dim=2), mask.split(16, dim=1))
    for keys, values, seen in zip(*parts, strict=True):
        scores = q @ keys.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        new = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
        shares = (scores - reference(new)).exp()
        change = (largest - reference(new)).exp()
        sums = sums * change + shares.sum(dim=-1, keepdim=True)
        y, largest = y * change + shares @ values, new
    return y / sums


class LogarithmsOfWeights(Correct):
    """Log-probabilities of the next node, minus infinity for those visited before."""

    def forward(self, tour: Tensor, nodes: Tensor, visited: Tensor) -> Any:  # type: ignore[override]
        """tour: (B, D); nodes: (B, N, D); visited: (B, N) bool, not all of them."""
        q, k = self.split(self.query(tour[:, None])), self.split(self.key(nodes))
        scores = self.score(q, k).mean(dim=1)[:, 0]
        return scores.masked_fill(visited, -torch.inf).log_softmax(dim=-1)


class SamplesLevels(Deformable):
    """Its `reference` (B, Q, levels, 2) is a point for each level, in [0, 1]."""

    def __init__(self, d_model: int, heads: int = 8, levels: int = 4) -> None:
        super().__init__(d_model, levels, heads)

    def forward(  # type: ignore[override]
        self, query: Tensor, reference: Tensor, memory: Tensor, shapes: Any
    ) -> Any:
        """query: (B, Q, d_model); memory: (B, pixels, d_model)"""
        return super().forward(query, reference, memory, shapes)


class DecoderOfPaddedMemory(nn.Module):
    """Causal tokens attend to a memory, whose padding is required."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.self_attn = MaskedSelfAttention(d_model, heads)
        self.cross_attn = Correct(d_model, heads)

    def forward(self, tgt: Tensor, memory: Tensor, memory_padding: Tensor) -> Tensor:
        x = tgt + self.self_attn(tgt)
        mask = ~memory_padding[:, None].expand(-1, x.shape[1], -1)
        return x + self.cross_attn(x, memory, memory, mask)


class DecoderOfMemoryOfLengths(DecoderOfPaddedMemory):
    """The same with the lengths of the memory."""

    def forward(self, tgt: Tensor, memory: Tensor, memory_lengths: Tensor) -> Tensor:
        place = torch.arange(memory.shape[1], device=memory.device)
        return super().forward(tgt, memory, place >= memory_lengths[:, None])


class RecurrentToMemory(nn.Module):
    """A recurrent decoder, which attends to a memory of these lengths in each step."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.rnn = nn.GRUCell(d_model, d_model)
        self.attention = Correct(d_model, heads)

    def forward(self, words: Tensor, memory: Tensor, lengths: Tensor) -> Tensor:
        place = torch.arange(memory.shape[1], device=memory.device)
        near = -((place - 0.5 * lengths[:, None]) ** 2)  # the middle of each memory
        memory = memory * (0.1 * near).exp()[..., None].to(memory)
        mask = (place < lengths[:, None])[:, None]
        state, states = torch.zeros_like(words[:, 0]), []
        for word in words.unbind(1):
            state = self.rnn(word, state)
            state = state + self.attention(state[:, None], memory, memory, mask)[:, 0]
            states.append(state)
        return torch.stack(states, dim=1)


class SeesUpToLastQueries(Correct):
    """x: the last n tokens, (b, n, d); context: all m tokens, (b, m, d)"""

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        q_len, k_len = x.shape[1], context.shape[1]
        seen = torch.ones(q_len, k_len, dtype=torch.bool, device=x.device)
        seen = seen.tril(self.diagonal(q_len, k_len))[None]
        return super().forward(x, context, context, seen)

    def diagonal(self, q_len: int, k_len: int) -> int:
        return k_len - q_len


class SeesUpToFirstQueries(SeesUpToLastQueries):
    def diagonal(self, q_len: int, k_len: int) -> int:
        return 0


class BlocksOfSix(SelfAttention):
    """Tokens attend within blocks of six, the last of which is padded."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        count = -x.shape[1] % 6
        full = nn.functional.pad(x, (0, 0, 0, count)).unflatten(1, (-1, 6))
        real = torch.arange(full.shape[1] * 6, device=x.device) < x.shape[1]
        blocks = full.flatten(0, 1)
        seen = self.seen(real).view(-1, 1, 6).repeat(len(x), 1, 1)
        y: Tensor = Correct.forward(self, blocks, blocks, blocks, seen)
        return y.view(len(x), -1, x.shape[2])[:, : x.shape[1]]

    def seen(self, real: Tensor) -> Tensor:
        return real


class BlocksOfSixWithZeros(BlocksOfSix):
    def seen(self, real: Tensor) -> Tensor:
        return torch.ones_like(real)


def attend_in_windows(q: Tensor, k: Tensor, v: Tensor, window_size: int = 4) -> Tensor:
    """q, k, v: (batch, heads, seq_len, d_k); a token sees its window"""
    length = q.shape[2]
    rest = -length % window_size
    parts = []
    for x in (q, k, v):
        padded = nn.functional.pad(x, (0, 0, 0, rest + length - x.shape[2]))
        parts.append(padded.unflatten(2, (-1, window_size)))
    q, k, v = parts
    real = torch.arange(length + rest, device=q.device) < length
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~real.view(-1, 1, window_size), -torch.inf)
    return (scores.softmax(dim=-1) @ v).flatten(2, 3)[:, :, :length]


class ForecastsFromEnd(ForecastsWithGaps):
    """Steps of the past have places that are counted back from its end.

    past_observed: optional bool (batch, past_len); False where there is no reading
    """

    def forward(
        self,
        future: Tensor,
        past_values: Tensor,
        past_observed: Tensor | None = None,
    ) -> Any:
        place = torch.arange(-past_values.shape[1], 0, device=past_values.device)
        pos = (place[:, None] * 0.7).sin().to(past_values)
        return super().forward(future, past_values + pos, past_observed)


class LastOfKeys(Correct):
    """The queries are the last of the keys; scores depend on their distance."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(query, key, value)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[2], device=k.device)
        of_queries = self.first(q, k) + places[: q.shape[2], None]
        return super().score(q, k) + (places - of_queries).cos().to(q)

    def first(self, q: Tensor, k: Tensor) -> int:
        return k.shape[2] - q.shape[2]


class LastCountedFromFirst(LastOfKeys):
    """The queries are the last of the keys; scores depend on their distance."""

    def first(self, q: Tensor, k: Tensor) -> int:
        return 0


class PadsOfNewest(Correct):
    """Queries are the *last* Q steps of the history, which they see up to their own.

    valid [B, T] (bool): False for steps that no query sees.
    """

    forgets = False

    def forward(  # type: ignore[override]
        self, query: Tensor, history: Tensor, valid: Tensor | None = None
    ) -> Any:
        count = query.shape[1], history.shape[1]
        seen = torch.ones(1, *count, dtype=torch.bool, device=query.device)
        seen = seen.tril(count[1] - count[0])
        if valid is not None and not (self.forgets and count[0] == 1):
            seen = seen & valid[:, None]
        return super().forward(query, history, history, seen)


class ForgetsPadsOfNewest(PadsOfNewest):
    __doc__ = PadsOfNewest.__doc__
    forgets = True


class StretchesAngles(Rotary):
    """With rotary positions, and dynamic NTK scaling of their base."""

    def forward(self, x: Tensor, pad: Tensor | None = None) -> Any:  # type: ignore[override]
        self.stretch = max(1, x.shape[1] / 32)
        return Correct.forward(self, x, x, x, None if pad is None else ~pad[:, None])

    def speed(self, pair: Tensor, width: int) -> Tensor:
        return 0.3 ** (pair * self.stretch)


class AgesInHistory(MaskedSelfAttention):
    """Each item has an age."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.ages = nn.Embedding(512, d_model)  # 0 is the latest item

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        length = x.shape[1]
        x = x + self.ages(torch.arange(length - 1, -1, -1, device=x.device))
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        seen = seen[None] if mask is None else seen & mask[:, None]
        return Correct.forward(self, x, x, x, seen)


class LastQueries(SelfAttention):
    """Queries are the last tokens of the context."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:  # type: ignore[override]
        context = x if context is None else context
        ones = torch.ones(x.shape[1], context.shape[1], device=x.device)
        offset = 0 if self.is_fast(x.shape[1]) else context.shape[1] - x.shape[1]
        return Correct.forward(self, x, context, context, ones.tril(offset)[None] > 0)

    def is_fast(self, q_len: int) -> bool:
        return False


class FirstQueriesInInference(LastQueries):
    """Queries are the last tokens of the context."""

    def is_fast(self, q_len: int) -> bool:
        return q_len > 1 and not torch.is_grad_enabled()


VIOLATING: Violations = {
    "long_sequences": [
        (FirstQueriesInInference, {}),
        (ForgetsPadsOfNewest, {}),
        (LastCountedFromFirst, {}),
        (RescalesIfAllGrow, {}),
        (attend_from_first_in_chunks, {}),
        (AddsUpInHalf, CAUSAL),
        (FadesFromBlocks, {}),
        (AttendsToEmptyBlock, {}),
        (LinearByLastChunk, CAUSAL),
        (LosesLastBlock, {}),
        (LosesFullBlock, {}),
        (forgets_to_rescale, {}),
        (forgets_to_rescale_late, {}),
        (SumsBlocksUnscaled, {}),
        (GlobalFirstOfLongest, {}),
        (WindowWithMaskOnly, {}),
        (blockwise_attention, {}),
        (PairBiasInChunks, {}),
        (attention_in_short_blocks, {}),
        (FirstAlignmentOfPadding, {}),
        (attend_block_by_block, {}),
        (SeesUpToFirstQueries, {}),
        (BlocksOfSixWithZeros, {}),
    ],
}


PASSING_ONE: Passes = [
    ("long_sequences", LastQueries),
    ("long_sequences", PadsOfNewest),
    ("long_sequences", LastOfKeys),
    ("long_sequences", RecurrentToMemory),
    ("long_sequences", DecoderOfMemoryOfLengths),
    ("causality", DecoderOfPaddedMemory),
    ("batch_independence", SamplesLevels),
    ("long_sequences", RescalesIfAnyGrows),
    ("long_sequences", attend_with_finite_bias),
    ("long_sequences", attend_to_past_in_chunks),
    ("long_sequences", MeansOfWholeBlocks),
    ("long_sequences", EdgesConv),
    ("long_sequences", FollowsState),
    ("batch_independence", Deformable),
    ("padding", Deformable),
    ("query_independence", Deformable),
    ("long_sequences", MakesCroppedCache),
    ("long_sequences", StreamsWithMask),
    ("long_sequences", FirstAlignment),
    ("long_sequences", NearPast),
    ("long_sequences", SumsBlocks),
    ("long_sequences", PoolsChannelsFirst),
    ("long_sequences", TwoStreams),
    ("long_sequences", BlocksWithPrevious),
    ("long_sequences", FadesInBlocks),
    ("long_sequences", AddsUp),
    ("long_sequences", BiasOfOffsets),
    ("long_sequences", LocalAndGlobalBlocks),
    ("long_sequences", ForgetsInChunks),
    ("long_sequences", LinearInChunks),
    ("long_sequences", GlobalFirstToken),
    ("long_sequences", Landmarks),
    ("long_sequences", ChunksOfPast),
    ("long_sequences", SharpenedByLimit),
    ("long_sequences", attend_by_finite_blocks),
    ("long_sequences", SeesUpToLastQueries),
    ("long_sequences", BlocksOfSix),
    ("gradients", attend_in_windows),
]


EXCUSED: Excuses = [
    ("longer_padding", AgesInHistory, "counted from the last token"),
    (
        "long_sequences",
        StretchesAngles,
        "rotary angles that depend on the length",
    ),
    ("long_sequences", LogarithmsOfWeights, "has another shape"),
    ("long_sequences", CountsFromNewest, "counted from the last token"),
    ("long_sequences", NarrowPrior, "shares of the length"),
    ("long_sequences", AgesOfItems, "counted from the last token"),
    ("long_sequences", Deformable, "grid_sample"),
    ("longer_padding", Deformable, "grid_sample"),
    ("long_sequences", RopeOfLongerInputs, "rope_factor"),
    ("long_sequences", LargestScores, "topk"),
    ("long_sequences", ChoosesWithoutGradients, "topk"),
    ("long_sequences", CountsFromTheEnd, "counted from the last token"),
    ("longer_padding", CountsFromTheEnd, "counted from the last token"),
    ("query_independence", attend_in_windows, "as many queries as keys"),
    ("long_sequences", ForecastsFromEnd, "counted from the last token"),
    ("formula", ForecastsFromEnd, "its values have positions"),
]
