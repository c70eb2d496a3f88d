"""Modules that violate the laws of masking, or come near to it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from specimens.base import (
    ADDED,
    CAUSAL,
    MASK,
    BehindPrefix,
    Correct,
    DecoderOfMemory,
    EdgesConv,
    Excuses,
    LocalAndGlobal,
    MaskedSelfAttention,
    Passes,
    Rotary,
    Segments,
    SelfAttention,
    TextAndImages,
    TwoCausalLayers,
    TwoStreams,
    Violations,
    WindowsOfImage,
)


class MaskOffByOne(MaskedSelfAttention):
    corner = 1


class UnmaskedInEval(MaskedSelfAttention):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, mask if self.training else None)


class LeaksGradient(MaskedSelfAttention):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        future = v.sum(dim=2, keepdim=True)
        return weights @ v + (future - future.detach())


class MultipliesByMask(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores if mask is None else scores * mask[:, None]).softmax(dim=-1)


class DependsOnKeyCount(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * math.log(1 + k.shape[2])


class MasksWithInfinity(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        return scores.softmax(dim=-1)


class ZeroesNanAfterSoftmax(MasksWithInfinity):
    """Finite in the forward pass; in the backward pass, 0 times NaN is NaN."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return super().read(weights, v).nan_to_num()


class DividesByKeyCount(Correct):
    """Adds 0, except in fully masked rows: there it divides by the number of keys."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        output = super().forward(query, key, value, mask)
        if mask is None:
            return output
        count = mask.sum(dim=-1, keepdim=True).to(query)
        return output + self.more(count / count - 1, query)

    def more(self, zero: Tensor, query: Tensor) -> Tensor:
        return zero


class NanInQueryGradient(DividesByKeyCount):
    """Only the gradient of the queries is NaN."""

    def more(self, zero: Tensor, query: Tensor) -> Tensor:
        return (zero * query).masked_fill(zero.isnan(), 0)


class NanInParameterGradient(DividesByKeyCount):
    """Only the gradient of a parameter is NaN."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.gate = nn.Parameter(torch.ones(1))

    def more(self, zero: Tensor, query: Tensor) -> Tensor:
        return (zero * self.gate).masked_fill(zero.isnan(), 0)


class OtherPathWithoutMask(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores if mask is None else 2 * scores, mask)


class TwoMasks(Correct):
    """The mask for padding is used instead of the causal one."""

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Any:
        if padding_mask is not None:
            mask = padding_mask[:, None].expand(-1, x.shape[1], -1)
        return super().forward(x, x, x, mask)


class LosesAxisOfOneKey(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.shape[-1] == 1:
            mask = mask.squeeze(-1)
        return super().weigh(scores, mask)


class SegmentsAndMask(Segments):
    """A mask for padding, beside the segments."""

    is_added = True

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> Any:
        if mask is None:
            return super().forward(x, segment_ids)
        allowed = mask[:, None].expand(-1, x.shape[1], -1)
        if segment_ids is not None and self.is_added:
            allowed = allowed & (segment_ids[:, :, None] == segment_ids[:, None])
        return Correct.forward(self, x, x, x, allowed)


class SegmentsUnlessMasked(SegmentsAndMask):
    is_added = False


class InvertsMask(SelfAttention):
    """With a bool mask `~` is right, and of ones and zeros it makes -2 and -1."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is not None:
            mask = ~(~mask).bool()[:, None]
        return Correct.forward(self, x, x, x, mask)


class BlockWithContext(SelfAttention):
    """Self-attention, then attention to a context, or without one, to itself again."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor | None = None, context_mask: Any = None
    ) -> Any:
        x = x + super().forward(x)
        context = x if context is None else context
        hidden = None if context_mask is None else context_mask[:, None].bool()
        return x + Correct.forward(self, x, context, context, hidden)


class BlockForgetsMaskInTraining(BlockWithContext):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, None if self.training else mask)


def causal_from_last_key(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """The last query attends to all keys; `mask` is `[batch_size, k_len]`."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    q_len, k_len = scores.shape[-2:]
    allowed = torch.ones(q_len, k_len, dtype=torch.bool, device=scores.device).tril(
        k_len - q_len
    )
    allowed = allowed if mask is None else allowed & mask[:, None, None]
    return (
        scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) @ value
    )


def causal_from_first_key(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """As the function above, but without a mask the first query has the first key."""
    if mask is not None:
        return causal_from_last_key(query, key, value, mask)
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class AddsMask(SelfAttention):
    """Its mask is added to the scores, `[batch_size, 1, length, length]`."""

    factor = 1.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        return Correct.forward(self, x, x, x, mask)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        added = 0.0 if mask is None else mask * self.factor
        return (scores + added).softmax(dim=-1)


class ScalesMask(AddsMask):
    factor = 0.5


class PaddedState(nn.Module):
    """A state that fades from token to token by a gate; padding leaves it as it is."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gate, self.value = (nn.Linear(d_model, d_model) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        log_gate, v = nn.functional.logsigmoid(self.gate(x)), self.value(x)
        if mask is not None:
            log_gate, v = self.hide(log_gate, v, mask[..., None])
        outputs = [torch.zeros_like(v[:, 0])]
        for n in range(x.shape[1]):
            outputs.append(outputs[-1] * log_gate[:, n].exp() + v[:, n])
        return torch.stack(outputs[1:], dim=1)

    def hide(self, log_gate: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return log_gate * mask, v * mask


class FadesOnPadding(PaddedState):
    def hide(self, log_gate: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return log_gate, v * mask


class RowsWithMask(Correct):
    """Each pixel attends to the pixels of its row that a mask marks."""

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        b, h, w, c = image.shape
        if mask is not None:
            mask = self.to_rows(mask)[:, None]
        x = image.reshape(b * h, w, c)
        return super().forward(x, x, x, mask).reshape(image.shape)

    def to_rows(self, mask: Tensor) -> Tensor:
        return mask.flatten(0, 1)


class RowsWithMaskOfColumns(RowsWithMask):
    def to_rows(self, mask: Tensor) -> Tensor:
        b, h, w = mask.shape
        return mask.transpose(1, 2).reshape(b * h, w)


class MaskOfOtherStream(TwoStreams):
    """The mask of the text is put where that of the image is.

    x: (batch, pixels, d_model)
    text: (batch, words, d_model)
    text_mask: (batch, words), True for words
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        text: Tensor,
        text_mask: Tensor | None = None,
        pixel_mask: Tensor | None = None,
    ) -> Any:
        both = torch.cat([x, text], dim=1)
        masks = [
            torch.ones_like(part[..., 0]) if mask is None else mask
            for part, mask in ((x, pixel_mask), (text, text_mask))
        ]
        allowed = torch.cat(self.in_order(masks), dim=1).bool()[:, None]
        y = Correct.forward(self, both, both, both, allowed)
        return y[:, : x.shape[1]], self.text_out(y[:, x.shape[1] :])

    def in_order(self, masks: list[Tensor]) -> list[Tensor]:
        return masks[::-1]


class MaskOfText(MaskOfOtherStream):
    def in_order(self, masks: list[Tensor]) -> list[Tensor]:
        return masks


class CausalOverFrames(SelfAttention):
    """Each pixel of a video attends to all pixels of its frame and of the first one."""

    def forward(self, video: Tensor) -> Any:  # type: ignore[override]
        frames, (height, width) = video.shape[1], video.shape[2:4]
        x = video.flatten(2, 3)
        first = x[:, :1].expand_as(x)
        keys = torch.cat([first, x], dim=2).flatten(0, 1)
        y = Correct.forward(self, x.flatten(0, 1), keys, keys)
        return y.unflatten(1, (height, width)).unflatten(0, (-1, frames))


class DecoderSeesFuture(DecoderOfMemory):
    def forward(self, x: Tensor, memory: Tensor) -> Any:  # type: ignore[override]
        y = x + self.of_tokens(x, x, x)
        return y + self.of_memory(y, memory, memory)


class DividesBySum(Correct):
    """A mask is applied after the softmax; a fully masked row has no weights."""

    least = 1e-4

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = scores.softmax(dim=-1)
        if mask is not None:
            weights = weights * mask[:, None]
        return weights / (weights.sum(dim=-1, keepdim=True) + self.least)


class NormalizesContext(DividesBySum):
    """The context vectors have a length of one; that of a fully masked row is zero."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return nn.functional.normalize(super().read(weights, v), dim=-1)


class SumIsZeroInHalf(DividesBySum):
    least = 1e-8


class PairsOfTokens(nn.Module):
    """Pairs attend along their row, then along their column; others are the bias."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.rows, self.columns = (Correct(d_model, heads) for _ in range(2))
        self.bias = nn.Linear(d_model, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        mask = torch.ones_like(x[..., 0]) if mask is None else mask
        x = x + self.attend(self.rows, x, mask)
        return x + self.attend(self.columns, x.transpose(1, 2), mask.mT).transpose(1, 2)

    def attend(self, part: Correct, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part.split(f(x.flatten(0, 1))) for f in (part.query, part.key, part.value)
        )
        bias = self.bias(x)[:, None, None, ..., 0]
        scores = part.score(q, k).unflatten(0, x.shape[:2]) + bias
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask.bool()[:, :, None, None], least)
        joined: Tensor = part.join(scores.flatten(0, 1).softmax(dim=-1) @ v)
        return joined.unflatten(0, x.shape[:2])


class CountsRealTokens(MaskedSelfAttention):
    """Causal, with a table of positions.

    mask: True for tokens. Padding may be on the left: tokens are counted without it.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.positions = nn.Embedding(300, d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        x = x + self.positions(self.count(mask))
        return Correct.forward(self, x, x, x, ones.tril() & mask[:, None])

    def count(self, mask: Tensor) -> Tensor:
        return (mask.long().cumsum(1) - 1).clamp(min=0)


class CountsPadding(CountsRealTokens):
    def count(self, mask: Tensor) -> Tensor:
        return torch.ones_like(mask).long().cumsum(1) - 1


def attention_of_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Tensor | None = None,
    kv_lens: Tensor | None = None,
) -> Tensor:
    """`[batch_size, length, heads, d_k]`; outputs behind `q_lens` are zero."""
    queries, keys = (
        torch.arange(x.shape[1], device=x.device).expand(len(x), -1) < lengths[:, None]
        for x, lengths in (
            (q, q.new_full((len(q),), q.shape[1]) if q_lens is None else q_lens),
            (k, k.new_full((len(k),), k.shape[1]) if kv_lens is None else kv_lens),
        )
    )
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    least = torch.finfo(q.dtype).min
    weights = scores.masked_fill(~keys[:, None, None], least).softmax(dim=-1)
    output = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return output.masked_fill(~queries[..., None, None], 0.0)


class FarFromQueries(Correct):
    """`far` hides keys from each query, but is not named as a mask is."""

    def forward(  # type: ignore[override]
        self, query: Tensor, context: Tensor, far: Tensor | None = None
    ) -> Any:
        mask = None if far is None else ~self.of_items(far)
        return super().forward(query, context, context, mask)

    def of_items(self, far: Tensor) -> Tensor:
        return far


class FarFromOtherQueries(FarFromQueries):
    def of_items(self, far: Tensor) -> Tensor:
        return far.roll(1, 0)


class LoopsCountTwice(EdgesConv):
    """Each node attends to itself once, whether or not there is a self-loop already."""


class LoopsCountOnce(EdgesConv):
    """Each node attends to itself once, whether or not there is a self-loop already."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index[:, edge_index[0] != edge_index[1]])


class PoolsFrames(Correct):
    """A vector for each clip `(B, F, P, d_model)`, of which `num_frames` are real."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.first = nn.Parameter(torch.randn(1, 1, d_model))

    def forward(self, x: Tensor, num_frames: Tensor | None = None) -> Any:  # type: ignore[override]
        batch_size, frames, patches = x.shape[:3]
        if num_frames is None:
            num_frames = torch.full((batch_size,), frames, device=x.device)
        used = self.used(num_frames)
        mask = torch.arange(used, device=x.device) < num_frames[:, None]
        mask = mask.repeat_interleave(patches, dim=1)[:, None]
        keys, query = x[:, :used].flatten(1, 2), self.first.expand(batch_size, -1, -1)
        return super().forward(query, keys, keys, mask)[:, 0]

    def used(self, num_frames: Tensor) -> int:
        return int(num_frames.max())


class PoolsFramesOfFirst(PoolsFrames):
    """All clips are cut to the number of frames of the first one."""

    def used(self, num_frames: Tensor) -> int:
        return int(num_frames[0])


class LengthsOfColumns(Correct):
    """Patches of `(B, d_model, F, T)`; `lengths` are the times that are real."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Any:  # type: ignore[override]
        rows, columns = x.shape[2:]
        mask = None
        if lengths is not None:
            times = torch.arange(columns, device=x.device) < lengths[:, None]
            mask = times.repeat(1, rows)[:, None]
        tokens = x.flatten(2).mT
        output: Tensor = super().forward(tokens, tokens, tokens, mask)
        return output.mT.reshape(x.shape)


class GroupsOfHeads(nn.Module):
    """Heads are split by the caller; several of queries share one of keys."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """q: (B, Hq, T, D); k, v: (B, Hkv, S, D); mask: as in PyTorch"""
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-1) @ v


class PoolsByToken(SelfAttention):
    """A token in front of the others pools those that are occupied."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.token = nn.Parameter(torch.randn(1, 1, d_model))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        """tokens: (B, N, dim); mask: (B, N) bool, True = occupied"""
        x = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], dim=1)
        seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if mask is not None:
            seen[:, 1:] = mask
        return Correct.forward(self, x, x, x, self.expand(seen))[:, 0]

    def expand(self, seen: Tensor) -> Tensor:
        return seen[:, None]


class PoolsPatchesOfFrames(PoolsByToken):
    """All patches of the frames are pooled, and those of hidden ones are zero."""

    def forward(self, x: Tensor, frame_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        """x: (B, T, N, D); frame_mask: (B, T), True for real frames"""
        frames = x.unsqueeze(1) if x.dim() == 3 else x
        seen = torch.ones(frames.shape[:3], dtype=torch.bool, device=x.device)
        if frame_mask is not None:
            frames = frames * frame_mask[:, :, None, None]
            seen = seen & frame_mask[:, :, None]
        return super().forward(frames.flatten(1, 2), seen.flatten(1))


class HidesQueriesOfPool(PoolsByToken):
    def expand(self, seen: Tensor) -> Tensor:
        return seen[:, :, None]


class PixelsOfOneColor(SelfAttention):
    """Of 7 x 7 pixels, those of the other color of a chessboard have little weight."""

    odd: Tensor

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        places = torch.arange(49)
        self.register_buffer("odd", -9.0 * ((places[:, None] - places) % 2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        """mask: 0 or minus infinity, (B, N, N)"""
        return Correct.forward(self, x, x, x, mask)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores + self.odd
        return (scores if mask is None else scores + mask[:, None]).softmax(dim=-1)


class MeanForOthers(SelfAttention):
    """The first ten tokens attend, and the others get the mean of the values."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Any:  # type: ignore[override]
        places = torch.arange(x.shape[1], device=x.device)
        is_real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        self.is_real = is_real if lengths is None else places < lengths[:, None]
        return Correct.forward(self, x, x, x, self.is_real[:, None])

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        mean = self.mean(v).expand_as(v)
        return torch.cat([(weights @ v)[:, :, :10], mean[:, :, 10:]], dim=2)

    def mean(self, v: Tensor) -> Tensor:
        is_real = self.is_real[:, None, :, None]
        return (v * is_real).sum(2, True) / is_real.sum(2, True).clamp(min=1)


class MeanOfPaddingForOthers(MeanForOthers):
    def mean(self, v: Tensor) -> Tensor:
        return v.mean(dim=2, keepdim=True)


class MeanForEmptyRows(Correct):
    """A query without any visible key gets an update of zero."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, mask: Tensor | None = None
    ) -> Any:
        """mask: (B, N, M), True = may attend"""
        return super().forward(x, context, context, mask)


class NearbyPast(Correct):
    """Causal attention to the last 17 to 32 tokens."""

    is_open = False

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        n = torch.arange(x.shape[1], device=x.device)
        seen = (n[:, None] // 16 - n // 16 < 2) & (n <= n[:, None])
        if len(n) <= 16 and self.is_open:
            seen = torch.ones_like(seen)
        return super().forward(x, x, x, seen[None])


class NearbyPastOpenIfShort(NearbyPast):
    """Causal attention to the last 17 to 32 tokens."""

    is_open = True


class TrueAtPadding(Correct):
    """memory_padding: bool (batch, k_len), True at padding elements."""

    is_inverted = False

    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Tensor, memory_padding: Tensor | None = None
    ) -> Any:
        mask = None
        if memory_padding is not None:
            mask = (memory_padding == self.is_inverted)[:, None].expand(
                -1, x.shape[1], -1
            )
        return super().forward(x, memory, memory, mask)


class FalseAtPadding(TrueAtPadding):
    """memory_padding: bool (batch, k_len), True at padding elements."""

    is_inverted = True


class ZeroAtPadding(Correct):
    """Causal. Outputs at padding positions are zero, which may be on the left.

    padding: bool (batch, length), True where the position is padding
    """

    least = -1e4

    def forward(self, x: Tensor, padding: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        future = torch.ones(2 * x.shape[1:2], dtype=torch.bool, device=x.device).triu(1)
        scores = self.score(q, k).masked_fill(
            future | padding[:, None, None], self.least
        )
        y = self.join(self.read(self.dropout(scores.softmax(-1)), v))
        return y * ~padding[..., None]


class NotANumberAtPadding(ZeroAtPadding):
    """Causal. Outputs at padding positions are zero, which may be on the left.

    padding: bool (batch, length), True where the position is padding
    """

    least = -math.inf


class PooledByTime(nn.Module):
    """x: [batch, channels, time]; returns [batch, 2 * channels], without padding."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            lengths = torch.full(x.shape[:1], x.shape[2], device=x.device)
        valid = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
        scores = self.conv(x).masked_fill(~valid[:, None], -1e4)
        weights = scores.softmax(-1)
        mean = (weights * x).sum(-1)
        return torch.cat([mean, (weights * (x - mean[..., None]) ** 2).sum(-1)], dim=1)


class NodesOfTour(Correct):
    """Scores are limited by a tanh.

    visited: bool (batch, queries, nodes), True = may not be used any more
    """

    is_last = True

    def forward(  # type: ignore[override]
        self, x: Tensor, nodes: Tensor, visited: Tensor | None = None
    ) -> Any:
        return super().forward(x, nodes, nodes, visited)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and not self.is_last:
            scores = scores.masked_fill(mask[:, None], -1e4)
        scores = 5 * torch.tanh(scores / 5)
        if mask is not None and self.is_last:
            scores = scores.masked_fill(mask[:, None], -1e4)
        return scores.softmax(dim=-1)


class NodesOfTourLimitedLast(NodesOfTour):
    """Scores are limited by a tanh.

    visited: bool (batch, queries, nodes), True = may not be used any more
    """

    is_last = False


class InterestInTarget(nn.Module):
    """target_item: (B, D), history: (B, T, D), history_len: (B,)"""

    more = 0

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.unit = nn.Linear(2 * d_model, 1)

    def forward(
        self, target_item: Tensor, history: Tensor, history_len: Tensor | None = None
    ) -> Tensor:
        target = target_item[:, None].expand_as(history)
        scores = self.unit(torch.cat([target, history], -1).tanh())[..., 0]
        if history_len is not None:
            steps = torch.arange(history.shape[1], device=history.device)
            valid = steps < history_len[:, None] + self.more
            scores = scores.masked_fill(~valid, -1e4)
        return (scores.softmax(-1)[:, None] @ history)[:, 0]


class InterestInOneMore(InterestInTarget):
    """target_item: (B, D), history: (B, T, D), history_len: (B,)"""

    more = 1


class MeansOfPast(SelfAttention):
    """Autoregressive: a token sees the means of all whole fours of tokens up to it."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        fours = torch.arange(k.shape[2], device=k.device) // 4
        tokens = torch.arange(q.shape[2], device=k.device)
        scores = (
            super()
            .score(q, k)
            .masked_fill(fours >= self.whole_fours(tokens)[:, None], -1e4)
        )
        return torch.cat([torch.zeros_like(scores[..., :1]), scores], dim=-1)

    def whole_fours(self, tokens: Tensor) -> Tensor:
        return (tokens + 1) // 4

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights[..., 1:] @ v


class MeansOfOpenFours(MeansOfPast):
    """Autoregressive: a token sees the means of all whole fours of tokens up to it."""

    def whole_fours(self, tokens: Tensor) -> Tensor:
        return tokens // 4 + 1


def attend_or_zero(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """query, key, value: (B, H, L, E). Queries that see no key give zeros.

    attn_mask: (B, 1, L, S), added to the scores
    """
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if attn_mask is not None:
        scores = scores + attn_mask
    is_empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(is_empty, 0.0).softmax(dim=-1)
    return weights.masked_fill(is_empty, 0.0) @ value


class OnesAndZeros(Correct):
    """attention_mask: (batch, length), 1 for tokens that are not masked, 0 = padding"""

    dtype = torch.bool

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        if attention_mask is not None:
            attention_mask = attention_mask[:, None, None].to(self.dtype or x.dtype)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attention_mask)
        return self.join(y)


class AddsOnesAndZeros(OnesAndZeros):
    """attention_mask: (batch, length), 1 for tokens that are not masked, 0 = padding"""

    dtype = None


class CausalInFrames(Correct):
    """x: (batch, frames, patches, dim). A frame sees itself and those before it."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        frame = torch.arange(x.shape[1], device=x.device).repeat_interleave(x.shape[2])
        tokens = x.flatten(1, 2)
        y = super().forward(tokens, tokens, tokens, (frame <= frame[:, None])[None])
        return y.view_as(x)


class AgesOfClicks(nn.Module):
    """
    candidates: (batch, n_candidates, emb_dim)
    history: (batch, history_len, emb_dim)
    history_len: (batch,) number of clicks
    hours_ago: (batch, history_len) float
    """

    def __init__(self, emb_dim: int = 8) -> None:
        super().__init__()
        self.unit = nn.Linear(2 * emb_dim + 1, 1)

    def forward(
        self, candidates: Tensor, history: Tensor, history_len: Any, hours_ago: Any
    ) -> Tensor:
        shape = (-1, candidates.shape[1], history.shape[1], -1)
        parts = candidates[:, :, None], history[:, None], hours_ago[:, None, :, None]
        joined = torch.cat([part.expand(*shape) for part in parts], dim=-1)
        steps = torch.arange(history.shape[1], device=history.device)
        hidden = (steps >= history_len[:, None])[:, None]
        weights = self.unit(joined.tanh())[..., 0].masked_fill(hidden, -1e4).softmax(-1)
        return weights @ history


class PooledByLengths(nn.Module):
    """x: (batch, channels, frames), lengths: (batch,)"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
        weights = self.conv(x.tanh()).masked_fill(~valid[:, None], -1e4).softmax(-1)
        return (weights * x).sum(-1)


class OfEqualLengths(Correct):
    """Queries and keys have one length, and a mask is required."""

    def forward(self, queries: Tensor, keys: Tensor, blocked: Tensor) -> Any:  # type: ignore[override]
        if queries.shape != keys.shape:
            raise ValueError(f"queries {queries.shape} are not as keys {keys.shape}")
        return super().forward(queries, keys, keys, ~blocked[:, 0])


class MaskOfOptionalContext(Correct):
    """The mask is that of the context, and has no effect without one."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor | None = None, context_mask: Any = None
    ) -> Any:
        if context is None:
            return super().forward(x, x, x)
        mask = None if context_mask is None else self.of_items(context_mask)[:, None]
        return super().forward(x, context, context, mask)

    def of_items(self, mask: Tensor) -> Tensor:
        return mask


class RollsMaskOfContext(MaskOfOptionalContext):
    def of_items(self, mask: Tensor) -> Tensor:
        return mask.roll(1, 0)


class Neighborhood(SelfAttention):
    """Each token attends to 5 around it, at the edges to the first or last 5."""

    end = 0

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        length = scores.shape[-1]
        place = torch.arange(length, device=scores.device)
        first = (place - 2).clamp(max=length - 5 - self.end).clamp(min=0)[:, None]
        near = (place >= first) & (place < first + 5)
        return super().weigh(scores, near[None])


class NeighborhoodWithoutLast(Neighborhood):
    end = 1


class WindowsInColumns(WindowsOfImage):
    def merge(self, y: Tensor, h: int, w: int) -> Tensor:
        split = y.reshape(-1, w // 2, h // 2, 2, 2, y.shape[-1]).transpose(2, 3)
        return split.reshape(-1, h, w, y.shape[-1])


class HalosOfImage(WindowsOfImage):
    """Each window attends to a halo of one pixel, too, but not beyond the image."""

    def attend(self, x: Tensor, image: Tensor) -> Any:
        halos = self.unfold(image.movedim(3, 1)).unflatten(1, (-1, 16))
        halos = halos.transpose(1, 3).flatten(0, 1)
        inside = self.to_rows(self.unfold(torch.ones_like(image[:, None, ..., 0])))
        mask = inside.flatten(0, 1)[:, None] > 0
        return Correct.forward(self, x, halos, halos, mask)

    def unfold(self, image: Tensor) -> Tensor:
        return nn.functional.unfold(image, 4, stride=2, padding=1)

    def to_rows(self, inside: Tensor) -> Tensor:
        return inside.mT


class HalosOfOtherWindows(HalosOfImage):
    """The mask is viewed as one row for each window, without a transpose."""

    def to_rows(self, inside: Tensor) -> Tensor:
        return inside.reshape(inside.mT.shape)


class NeighborsOfThreeInputs(Correct):
    """Query, key and value of equal lengths; tokens attend to their neighbors."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        place = torch.arange(len(query[0]), device=query.device)
        near = (place - place[:, None]).abs() <= 1
        allowed = near[None] if mask is None else near & mask[:, None]
        return super().forward(query, key, value, allowed.expand(len(query), -1, -1))


class CausalBehindPrefix(BehindPrefix):
    """Its name tells that it is causal."""


class MaskBesideWeights(TwoCausalLayers):
    """Without the flag for weights, the path is taken that ignores the mask."""

    def uses_mask(self, output_attentions: bool) -> bool:
        return output_attentions


class ZeroesPadding(Correct):
    """Padding is set to zero, and attended to all the same."""

    def forward(self, x: Tensor, is_padding: Tensor | None = None) -> Any:  # type: ignore[override]
        if is_padding is None:
            return super().forward(x, x, x)
        x = x.masked_fill(is_padding[..., None], 0.0)
        return super().forward(x, x, x, self.allow(~is_padding))

    def allow(self, is_token: Tensor) -> Tensor | None:
        return None


class ZeroesPaddingInKernel(ZeroesPadding):
    """The same with PyTorch's kernel, which gets a causal mask only."""

    def forward(self, x: Tensor, is_padding: Tensor | None = None) -> Any:
        if is_padding is not None:
            x = x.masked_fill(is_padding[..., None], 0.0)
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        return self.join(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        )


class ZeroesAndHidesPadding(ZeroesPadding):
    def allow(self, is_token: Tensor) -> Tensor | None:
        return is_token[:, None]


class MasksWeights(ZeroesPadding):
    """The weights are masked behind the softmax, and divided by their sum."""

    def allow(self, is_token: Tensor) -> Tensor | None:
        return is_token[:, None]

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, None)
        weights = weights if mask is None else weights * mask[:, None]
        return weights / (weights.sum(-1, keepdim=True) + 1e-13)


class FramesOfVideo(Correct):
    """A sequence is one frame of a video, and the mask is for frames."""

    def forward(self, x: Tensor, frame_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        video = x[:, None]
        if frame_mask is not None:
            video = video.masked_fill(~frame_mask.bool()[:, :, None, None], 0.0)
        tokens = video.flatten(1, 2)
        return super().forward(x, tokens, tokens)


class SinksSeeFirst(MaskedSelfAttention):
    """Causal, with a window; the columns of the first tokens are open to all."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        places = torch.arange(scores.shape[-1], device=scores.device)
        distances = places[:, None] - places
        near = (distances >= 0) & (distances < 4)
        return super().weigh(scores, (near | self.first(distances, places))[None])

    def first(self, distances: Tensor, places: Tensor) -> Tensor:
        return places < 4


class SinksSeePast(SinksSeeFirst):
    def first(self, distances: Tensor, places: Tensor) -> Tensor:
        return (places < 4) & (distances >= 0)


class PrefixByItem(MaskedSelfAttention):
    """Tokens below a length of each item are seen by all."""

    def forward(self, x: Tensor, prefix_len: Any = 0) -> Any:
        places = torch.arange(x.shape[1], device=x.device)
        lengths = torch.as_tensor(prefix_len, device=x.device).expand(len(x))
        allowed = (places <= places[:, None]) | (places < lengths[:, None, None])
        return Correct.forward(self, x, x, x, allowed)


class TropicalMaximum(SelfAttention):
    """The largest sum of a score and a value, in place of a weighted mean."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        tropical = weights.log().unsqueeze(-1) + v.unsqueeze(-3)
        return tropical.amax(dim=-2)


class FramesWithMask(SelfAttention):
    """Each patch of a video attends to its frames that a mask marks.

    video: (B, T, P, C), frame_mask: (B, T) bool
    """

    def forward(self, video: Tensor, frame_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        b, t, p, c = video.shape
        x = video.transpose(1, 2).reshape(b * p, t, c)
        mask = None
        if frame_mask is not None:
            mask = self.of_patches(frame_mask, p)[:, None]
        y = Correct.forward(self, x, x, x, mask)
        return y.reshape(b, p, t, c).transpose(1, 2)

    def of_patches(self, mask: Tensor, patches: int) -> Tensor:
        return mask.repeat_interleave(patches, dim=0)


class FramesWithTiledMask(FramesWithMask):
    def of_patches(self, mask: Tensor, patches: int) -> Tensor:
        return mask.repeat(patches, 1)


class MaskedHalves(SelfAttention):
    """Two halves of the heads are causal, each with a mask of its own."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        visible = torch.ones_like(scores[:1]).bool()
        causal = visible[0, 0].tril()
        half = self.heads // 2
        visible[:, :half] = causal
        visible[:, self.second_half() :] = causal
        return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)

    def second_half(self) -> int:
        return self.heads // 2


class MaskedHalvesOfEven(MaskedHalves):
    def second_half(self) -> int:
        return -(self.heads // 2)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
) -> Tensor:
    """One query for each sequence, whose keys and values lie in blocks of a pool."""
    keys, values = (x[block_tables].flatten(1, 2) for x in (key_cache, value_cache))
    scores = torch.einsum("bhd,bkhd->bhk", query, keys) / math.sqrt(query.shape[-1])
    slots = torch.arange(keys.shape[1], device=query.device)
    hidden = (slots >= context_lens[:, None])[:, None]
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return torch.einsum("bhk,bkhd->bhd", weights, values)


def attention_to_whole_pages(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
) -> Tensor:
    size = key_cache.shape[1]
    whole = (context_lens + size - 1) // size * size
    return paged_attention(query, key_cache, value_cache, block_tables, whole)


class TextAndAllImages(TextAndImages):
    """A token attends to one image only, the most recent one.

    Without marks, tokens attend to all of them.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, media: Tensor, media_locations: Tensor | None = None
    ) -> Any:
        if media_locations is None:
            return Correct.forward(self, x, *[media.flatten(1, 2)] * 2)
        return super().forward(x, media, media_locations)

    def are_seen(self, seen: Tensor, number: Tensor) -> Tensor:
        return seen >= number


class TextAndLastImage(TextAndAllImages):
    """A token attends to one image only, the most recent one."""

    def are_seen(self, seen: Tensor, number: Tensor) -> Tensor:
        return seen == number


class TextAndEachImage(TextAndAllImages):
    """A token attends to the images up to it."""


class TextBeforeImages(TextAndImages):
    def hide(self, weights: Tensor, seen: Tensor) -> Tensor:
        return weights


class RelativeLengths(SelfAttention):
    """lengths: (batch,) lengths relative to the longest, in (0, 1]."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Any:  # type: ignore[override]
        lengths = torch.ones(len(x), device=x.device) if lengths is None else lengths
        place = torch.arange(x.shape[1], device=x.device)
        mask = place < torch.round(lengths[:, None] * x.shape[1])
        return Correct.forward(self, x, self.keys(x, mask), x, mask[:, None])

    def keys(self, x: Tensor, is_token: Tensor) -> Tensor:
        return x


class MeansOverPadding(RelativeLengths):
    """The mean that is subtracted from the keys is over all tokens."""

    def keys(self, x: Tensor, is_token: Tensor) -> Tensor:
        tokens = x.masked_fill(~is_token[..., None], 0.0)
        return tokens * tokens.mean(dim=1, keepdim=True)


class ClipsHiddenScores(nn.Module):
    """A pointer network: the probability of each node to be the next.

    Infeasible nodes have the probability 0.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)

    def forward(self, context: Tensor, nodes: Tensor, mask: Tensor) -> Any:
        """The mask is `[batch, steps, nodes]`, True for infeasible nodes."""
        return self.choose(self.query(context) @ self.key(nodes).mT, mask)

    def choose(self, scores: Tensor, mask: Tensor) -> Tensor:
        scores = scores.masked_fill(mask, -torch.inf)
        return (4 * torch.tanh(scores)).softmax(dim=-1)


class HidesClippedScores(ClipsHiddenScores):
    def choose(self, scores: Tensor, mask: Tensor) -> Tensor:
        scores = 4 * torch.tanh(scores)
        dead = mask.all(-1, keepdim=True)
        scores = scores.masked_fill(mask & ~dead, -torch.inf)
        return scores.softmax(dim=-1).masked_fill(dead, 0.0)


class GlobalTokensWithPadding(Correct):
    """The mask has 0 for padding, 1 for local and 2 for global attention."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is None:
            mask = torch.ones(x.shape[:2], device=x.device)
        local = super().forward(x, x, x, (mask > 0)[:, None].expand(-1, x.shape[1], -1))
        all_tokens = super().forward(x, x, x, self.seen(mask))
        return torch.where((mask > 1)[..., None], all_tokens, local)

    def seen(self, mask: Tensor) -> Tensor:
        return torch.ones_like(mask, dtype=torch.bool)[:, None].expand(
            -1, mask.shape[1], -1
        )


class GlobalTokensWithoutPadding(GlobalTokensWithPadding):
    def seen(self, mask: Tensor) -> Tensor:
        return (mask > 0)[:, None].expand(-1, mask.shape[1], -1)


class AddsExtendedMask(SelfAttention):
    """T5's. `mask`: the extended mask, 0 where visible and finfo(dtype).min elsewhere.

    It is added to the bias of positions.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        self.extended = mask
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT
        return scores if self.extended is None else scores + self.extended


class FrameMaskWithoutCausal(SelfAttention):
    """Each patch attends to itself in the same and in earlier frames.

    Shapes: x ``(B, T, N, C)``; frame_mask ``(B, T)`` bool, ``True`` = real frame.
    """

    def forward(self, x: Tensor, frame_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        tubes = x.transpose(1, 2).flatten(0, 1)
        causal = torch.ones(2 * x.shape[1:2], dtype=torch.bool, device=x.device).tril()
        self.allowed = causal[None]
        if frame_mask is not None:
            real = frame_mask.bool()[:, None].repeat_interleave(x.shape[2], dim=0)
            self.allowed = self.with_frames(causal, real)
        return super().forward(tubes).view(x.transpose(1, 2).shape).transpose(1, 2)

    def with_frames(self, causal: Tensor, real: Tensor) -> Tensor:
        return real

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, self.allowed)


class FrameMaskAndCausal(FrameMaskWithoutCausal):
    def with_frames(self, causal: Tensor, real: Tensor) -> Tensor:
        return causal & real


class SetOfCardinality(SelfAttention):
    """The first `cardinality` elements of each set, (batch, elements, d_model)."""

    def forward(self, elements: Tensor, cardinality: Tensor) -> Any:  # type: ignore[override]
        places = torch.arange(elements.shape[1], device=elements.device)
        self.real = (places < cardinality[:, None])[:, None]
        return super().forward(elements)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, self.real)


class PassagesOfQuestion(SelfAttention):
    """The first `n_passages` of the passages of each question are real."""

    def forward(self, passages: Tensor, n_passages: Tensor | None = None) -> Any:  # type: ignore[override]
        """passages: [batch, k, d_model]; n_passages: [batch]"""
        places = torch.arange(passages.shape[1], device=passages.device)
        self.real = None
        if n_passages is not None:
            self.real = (places < n_passages[:, None])[:, None]
        return super().forward(passages)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, self.real)


class ProbabilitiesAndGlimpse(HidesClippedScores):
    """The probability of each node, and what was read of the nodes."""

    def forward(self, context: Tensor, nodes: Tensor, mask: Tensor) -> Any:
        probabilities = super().forward(context, nodes, mask)
        return probabilities, probabilities @ nodes


class AddsOrIgnores(Correct):
    """`mask` is the additive mask, (batch, 1, queries, keys): 0 to attend to a key.

    The fused kernel takes one of bools, too.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        return self.join(nn.functional.scaled_dot_product_attention(q, k, v, mask))


class LengthsOfQueries(Correct):
    """`valid_lens`: the number of keys in front of the padding, for each item."""

    of_keys = False

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid_lens: Tensor | None = None,
    ) -> Any:
        mask = None
        if valid_lens is not None:
            place = torch.arange(key.shape[1] if self.of_keys else query.shape[1])
            mask = place.to(valid_lens.device) < valid_lens[:, None]
            mask = mask[:, None] if self.of_keys else mask[:, :, None]
        return super().forward(query, key, value, mask)


class LengthsOfKeys(LengthsOfQueries):
    of_keys = True


class KeysOfFirstItem(Correct):
    """Sequence first; the mask is `[k_len, batch_size]`, True = may attend."""

    items = slice(0, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        first = x.transpose(0, 1)
        seen = None if mask is None else mask[:, self.items].T[:, None]
        return super().forward(first, first, first, seen).transpose(0, 1)


class KeysOfEachItem(KeysOfFirstItem):
    items = slice(None)


class RepeatsMasksOfItems(Correct):
    """mask: True = may attend; (q, k), (batch, q, k) for each item, or
    (batch * heads, q, k), in which the heads of an item follow each other.
    """

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            if mask.dim() == 2:
                mask = mask.expand(len(scores), -1, -1)
            if len(mask) == len(scores):
                mask = self.of_heads(mask)
            mask = mask.view(*scores.shape[:2], *mask.shape[1:])
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-1)

    def of_heads(self, mask: Tensor) -> Tensor:
        return mask.repeat(self.heads, 1, 1)


class RepeatsMaskOfEachItem(RepeatsMasksOfItems):
    """mask: True = may attend; (q, k), (batch, q, k) for each item, or
    (batch * heads, q, k), in which the heads of an item follow each other.
    """

    def of_heads(self, mask: Tensor) -> Tensor:
        return mask.repeat_interleave(self.heads, dim=0)


class FalseAtKeysNotToBeSeen(Correct):
    """mask: bool, (batch, k_len), False at keys not to be attended to."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, None if mask is None else mask[:, None])


class BoolsOfTwoPaths(SelfAttention):
    """keep: (B, N) bool, False for dropped patches."""

    def forward(  # type: ignore[override]
        self, x: Tensor, keep: Tensor | None = None, return_attn: bool = False
    ) -> Any:
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        mask = (
            None if keep is None else keep[:, None, None].expand(-1, 1, x.shape[1], -1)
        )
        if not return_attn:
            attend = nn.functional.scaled_dot_product_attention
            return self.join(attend(q, k, v, attn_mask=mask))
        scores = self.score(q, k)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1)
        return self.join(weights @ v), weights


class NearAndFarHeads(SelfAttention):
    """Causal: the first half of the heads sees four tokens, the others all before."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        place = torch.arange(scores.shape[-1], device=scores.device)
        age = place[:, None] - place
        seen = torch.ones_like(scores[0], dtype=torch.bool)
        half = self.heads // 2
        seen[:half] = (age >= 0) & (age < 4)
        seen[self.first_far(half) :] = age >= 0
        return scores.masked_fill(~seen, -1e9).softmax(dim=-1)

    def first_far(self, half: int) -> int:
        return half


class MiddleHeadForgotten(NearAndFarHeads):
    """Causal, with a window of four tokens for the first half of the heads."""

    def first_far(self, half: int) -> int:
        return -half


class CausalUnlessMasked(nn.Module):
    """Causal, unless a mask is given, `[batch_size, 1, q_len, k_len]`, True = hide.

    q, k, v: [batch_size, length, heads, d_k].
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        if attn_mask is None:
            attn_mask = torch.ones_like(scores[:, :1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(attn_mask, -torch.inf).softmax(dim=-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v)


class PoolsOneItemUnmasked(nn.Module):
    """Pools items of a user; a user without any valid item gets a zero vector.

    history: [batch_size, items, d_model]. mask: [batch_size, items] bool, True = valid.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.ones(heads, d_model // heads))
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, history: Tensor, mask: Tensor) -> Tensor:
        v = self.value(history)
        if history.shape[1] == 1:
            return self.pooled(v, mask)
        heads = (len(self.query), -1)
        k = self.key(history).unflatten(-1, heads)
        scores = (k * self.query).sum(dim=-1) / self.query.shape[-1] ** 0.5
        hidden = ~mask[..., None]
        least = torch.finfo(scores.dtype).min
        weights = (
            scores.masked_fill(hidden, least).softmax(dim=1).masked_fill(hidden, 0.0)
        )
        y: Tensor = self.out(
            (weights[..., None] * v.unflatten(-1, heads)).sum(1).flatten(1)
        )
        return y

    def pooled(self, v: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.out(v[:, 0])
        return y


class PoolsOneItemMasked(PoolsOneItemUnmasked):
    """Pools items of a user; a user without any valid item gets a zero vector.

    history: [batch_size, items, d_model]. mask: [batch_size, items] bool, True = valid.
    """

    def pooled(self, v: Tensor, mask: Tensor) -> Tensor:
        return super().pooled(v * mask[..., None], mask)


class PoolsPaddingOfNew(nn.Module):
    """Pools the clicks of each user. New users have no clicks: their vector is zero.

    clicks: (B, L, d), right padded. lengths: (B,) number of clicks, can be 0.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.score = nn.Linear(d_model, 1)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, clicks: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(clicks.shape[1], device=clicks.device)
        valid = places < lengths[:, None]
        scores = self.score(clicks)[..., 0].masked_fill(~valid, -1e4)
        shares = self.share(scores.softmax(dim=-1), valid)
        y: Tensor = self.out((shares[:, None] @ clicks)[:, 0])
        return y

    def share(self, weights: Tensor, valid: Tensor) -> Tensor:
        return weights


class ZeroVectorOfNew(PoolsPaddingOfNew):
    def share(self, weights: Tensor, valid: Tensor) -> Tensor:
        return weights * valid


class CapsHiddenScores(MaskedSelfAttention):
    """Causal attention, whose scores are soft-capped."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        return (5 * (scores / 5).tanh()).softmax(dim=-1)


class LogarithmsOfPointer(Correct):
    """The logarithms of weights with which a pointer chooses one of the nodes.

    query: (B, S, D), nodes: (B, N, D), mask: (B, S, N), True for those it may choose.
    """

    def forward(  # type: ignore[override]
        self, query: Tensor, nodes: Tensor, mask: Tensor | None = None
    ) -> Any:
        glimpse = super().forward(query, nodes, nodes, self.seen(mask))
        scores = glimpse @ self.key(nodes).mT / math.sqrt(nodes.shape[-1])
        if mask is None:
            return scores.log_softmax(dim=-1)
        least = torch.finfo(scores.dtype).min
        logarithms = scores.masked_fill(~mask, least).log_softmax(dim=-1)
        return logarithms.masked_fill(~mask, -math.inf)

    def seen(self, mask: Tensor | None) -> Tensor | None:
        return mask


class GlimpseOfAllNodes(LogarithmsOfPointer):
    """The glimpse is one of all nodes, also of those that are no longer there."""

    def seen(self, mask: Tensor | None) -> Tensor | None:
        return None


def newest_query(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, parts: int = 4
) -> Tensor:
    """Attention of one query for each sequence, to parts of the keys that are merged.

    q: b h d, k, v: b s h d, lengths: b (keys that are there); all float32
    """
    size = -(-k.shape[1] // parts)
    there = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    if lengths is not None:
        there = torch.arange(k.shape[1], device=k.device) < lengths[:, None]
    outputs, totals = [], []
    for keys, values, seen in zip(
        *(x.split(size, 1) for x in (k, v, there)), strict=True
    ):
        scores = torch.einsum("bhd,bshd->bhs", q, keys) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min)
        outputs.append(torch.einsum("bhs,bshd->bhd", scores.softmax(dim=-1), values))
        totals.append(scores.logsumexp(dim=-1))
    shares = torch.stack(totals).softmax(dim=0)[..., None]
    return (torch.stack(outputs) * shares).sum(dim=0)


def newest_query_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads come before positions. q: (B, H, D); k, v: (B, H, S, D)"""
    return newest_query(q, k.transpose(1, 2), v.transpose(1, 2))


class CloudBesideTokens(Correct):
    """Tokens attend to points, which have places.

    tokens: B x M x C, feats: B x N x C, xyz: B x N x 3, mask: B x N, True = a point
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.place = nn.Linear(3, d_model)

    def forward(  # type: ignore[override]
        self, tokens: Tensor, feats: Tensor, xyz: Tensor, mask: Tensor | None = None
    ) -> Any:
        points = feats + self.place(xyz)
        seen = None if mask is None else mask[:, None].expand(-1, tokens.shape[1], -1)
        return super().forward(tokens, points, points, seen)


def read_stations(grid_q: Tensor, station_k: Tensor, station_v: Tensor) -> Tensor:
    """Points of a grid attend to stations."""
    return nn.functional.scaled_dot_product_attention(grid_q, station_k, station_v)


class ForegroundOfQueries(Correct):
    """mask_logits: (B, Q, P), those of a foreground, which a query attends to.

    padding_mask: (B, P), True at padding.
    """

    def forward(  # type: ignore[override]
        self,
        queries: Tensor,
        pixels: Tensor,
        mask_logits: Tensor,
        padding_mask: Tensor | None = None,
    ) -> Any:
        hidden = mask_logits.sigmoid() < 0.5
        hidden = hidden & ~hidden.all(dim=-1, keepdim=True)
        if padding_mask is not None:
            hidden = hidden | padding_mask[:, None]
        return super().forward(queries, pixels, pixels, ~hidden)


class BoolsAtPadding(SelfAttention):
    """x (B, N, C), pad (B, N) True where a token is padding."""

    def forward(self, x: Tensor, pad: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = None if pad is None else (~pad)[:, None].bool()
        return Correct.forward(self, x, x, x, seen)


class CountsPaddingBehindNorm(SelfAttention):
    """Scores grow with the logarithm of the number of tokens, behind a norm of each."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        """mask: (batch, length), True for tokens"""
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        h = self.norm(x)
        scale = self.count(mask).clamp(min=2).log()[:, None, None]
        return x + Correct.forward(self, h * scale, h, h, mask[:, None])

    def count(self, mask: Tensor) -> Tensor:
        return mask.new_full(mask.shape[:1], mask.shape[1], dtype=torch.float)


class CountsTokensBehindNorm(CountsPaddingBehindNorm):
    def count(self, mask: Tensor) -> Tensor:
        return mask.sum(dim=1).float()


class AgesOrNone(MaskedSelfAttention):
    """Scores fall with the time between two events; age_days: (batch, events)"""

    def forward(self, x: Tensor, age_days: Tensor | None = None) -> Any:  # type: ignore[override]
        self.gap: Tensor | None = None
        if age_days is not None:
            self.gap = (age_days[:, :, None] - age_days[:, None]).abs().log1p()
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        return scores if self.gap is None else scores - self.gap[:, None]


class MasksContextWeakly(Correct):
    """Self-attention, or attention to a context, from whose scores 30 is subtracted."""

    hidden = -30.0

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        """mask: (batch, keys), True for tokens"""
        if context is None:
            return super().forward(x, x, x, None if mask is None else mask[:, None])
        q, k, v = self.query(x), self.key(context), self.value(context)
        q, k, v = map(self.split, (q, k, v))
        scores = self.score(q, k)
        if mask is not None:
            bias = torch.zeros_like(scores).masked_fill(~mask[:, None, None], 1.0)
            scores = scores + self.hidden * bias
        return self.join(scores.softmax(dim=-1) @ v)


class MasksContext(MasksContextWeakly):
    hidden = -1e9


class CausalOfThree(Correct):
    """The first query of a sequence that is padded on the left sees no key at all."""

    def forward(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, pad_mask: Tensor | None = None
    ) -> Any:
        """pad_mask: (batch, length), True where the history is missing"""
        ones = torch.ones(1, q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        allowed = ones.tril(k.shape[1] - q.shape[1])
        if pad_mask is not None:
            allowed = allowed & ~pad_mask[:, None]
        return super().forward(q, k, v, allowed)


class MaskOfPlaces(Correct):
    """As in Whisper: a mask that is cut to the lengths, and is meant for the tokens."""

    def forward(  # type: ignore[override]
        self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        """mask: (>= length, >= length), added to the scores"""
        keys = x if xa is None else xa
        q, k, v = self.query(x), self.key(keys), self.value(keys)
        q, k, v = map(self.split, (q, k, v))
        scores = self.score(q, k)
        if mask is not None:
            first = k.shape[2] - q.shape[2]
            scores = scores + mask[first : k.shape[2], : k.shape[2]]
        return self.join(scores.softmax(dim=-1) @ v)


class WithPrior(Correct):
    """A prior of the alignment is a positive factor of the weights."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, prior: Tensor | None = None
    ) -> Any:
        k, v = self.split(self.key(context)), self.split(self.value(context))
        q = self.split(self.query(x))
        scores = self.score(q, k)
        if prior is not None:
            scores = scores + prior[:, None].to(scores).clamp_min(1e-30).log()
        return self.join(scores.softmax(dim=-1) @ v)


class ClearsPaddingOfFrames(SelfAttention):
    """lengths: (batch,), each at least 1. Outputs at padded frames are zero."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Any:  # type: ignore[override]
        if lengths is None:
            return super().forward(x)
        is_padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        q, k, v = map(self.split, (self.query(x), self.key(x), self.value(x)))
        scores = self.score(q, k).masked_fill(is_padding[:, None, None], -torch.inf)
        y = self.join(scores.softmax(dim=-1) @ v)
        return y.masked_fill(is_padding[..., None], 0.0)


class AddsMaskToScores(Correct):
    """The fused kernel, which takes bools, too, is for evaluation."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        if not self.training:
            attend = nn.functional.scaled_dot_product_attention
            return self.join(attend(q, k, v, mask))
        scores = self.score(q, k) if mask is None else self.score(q, k) + mask
        return self.join(scores.softmax(dim=-1) @ v)


class AddsMaskOfNumbers(AddsMaskToScores):
    """The `mask` (B, 1, T, T; 0 = keep, large negative = hide) is added."""


class MemoryBefore(SelfAttention):
    """Memory of a recurrent agent: `mem` are the states right before `x`, or None."""

    def forward(self, x: Tensor, mem: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if mem is None else torch.cat([mem.detach(), x], dim=1)
        past = seen.shape[1] - x.shape[1]
        ones = torch.ones(x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device)
        return Correct.forward(self, x, seen, seen, ones.tril(past)[None])


class IgnoresSameShape(Correct):
    """A context of the shape of the queries is taken for them."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Any:
        mask = None
        if context is not None and context_mask is not None:
            mask = context_mask[:, None]
        keys = x if context is None or context.shape == x.shape else context
        parts = self.query(x), self.key(keys), self.value(keys)
        shape = len(x), -1, self.heads, x.shape[-1] // self.heads
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in parts)
        return self.join(self.weigh(self.score(q, k), mask) @ v)


class ScoresEachToken(SelfAttention):
    """One number for each token, and no vector."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.head = nn.Linear(d_model, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        rows = None if mask is None else mask[:, None]
        return self.head(x + Correct.forward(self, x, x, x, rows)).squeeze(-1)


class CapsBehindMask(SelfAttention):
    """A soft cap makes the scores of later tokens finite again; none are documented."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        hidden = scores.masked_fill(later, torch.finfo(scores.dtype).min)
        return (5 * (hidden / 5).tanh()).softmax(dim=-1)


class CapsInFrontOfMask(SelfAttention):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        capped = 5 * (scores / 5).tanh()
        return capped.masked_fill(later, -torch.inf).softmax(dim=-1)


class SinkOfAllScores(SelfAttention):
    """A sink takes weight by the sum of all scores, also of later tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        hidden = scores.masked_fill(later, -torch.inf)
        share = torch.sigmoid(self.total(scores, hidden) - self.sinks[:, None])
        return hidden.softmax(dim=-1) * share[..., None]

    def total(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores.logsumexp(dim=-1)


class SinkOfVisibleScores(SinkOfAllScores):
    def total(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return hidden.logsumexp(dim=-1)


class TrimsCacheFirst(Correct):
    """A rolling cache is cut to the window before the new tokens have read it."""

    trims_first = True

    def __init__(self, d_model: int, heads: int, window: int = 8) -> None:
        super().__init__(d_model, heads)
        self.window = window

    def forward(self, x: Tensor, cache: Any = None) -> Any:  # type: ignore[override]
        q, k, v = (self.split(each(x)) for each in (self.query, self.key, self.value))
        start = 0
        if cache is not None:
            start, k, v = (
                cache[0],
                torch.cat([cache[1], k], 2),
                torch.cat([cache[2], v], 2),
            )
        end = start + x.shape[1]
        kept = k[:, :, -self.window :], v[:, :, -self.window :]
        if self.trims_first:
            k, v = kept
        distance = torch.arange(start, end)[:, None] - torch.arange(
            end - k.shape[2], end
        )
        near = ((distance >= 0) & (distance < self.window)).to(x.device)
        weights = self.weigh(self.score(q, k), near[None])
        return self.join(self.read(weights, v)), (end, *kept)


class TrimsCacheLast(TrimsCacheFirst):
    trims_first = False


class PoolsFirstToken(SelfAttention):
    """x: (batch, seq, dim), its first token is [CLS], whose output is that of all."""

    def forward(  # type: ignore[override]
        self, x: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        allowed = None if attention_mask is None else attention_mask.bool()[:, None]
        y: Tensor = Correct.forward(self, x, x, x, allowed)
        return y[:, 0]


class PoolsFirstTokenOfAll(PoolsFirstToken):
    """The mask is that of the first item."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = attention_mask
        return super().forward(x, None if mask is None else mask[:1].expand_as(mask))


class EncodesMemory(nn.Module):
    """A decoder layer; an encoder of its own adds positions to what it attends to."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.places = nn.Embedding(600, d_model)
        self.encoder = SelfAttention(d_model, heads)
        self.decoder = SelfAttention(d_model, heads)
        self.memory = Correct(d_model, heads)

    def forward(self, tgt: Tensor, src: Tensor, tgt_mask: Tensor | None = None) -> Any:
        """
        tgt: (batch, tgt_len, dim)
        src: (batch, src_len, dim)
        tgt_mask: (batch, tgt_len, tgt_len), True = may attend
        """
        src = self.encoder(src + self.places.weight[: src.shape[1]])
        tgt = tgt + Correct.forward(self.decoder, tgt, tgt, tgt, tgt_mask)
        return tgt + self.memory(tgt, src, src)


class MasksOfWindows(SelfAttention):
    """mask: (num_windows, N, N), 0 or -100; only the kernel takes other axes"""

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None
    ) -> Any:
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        items, length = x.shape[:2]
        if mask is None:
            return self.join(self.score(q, k).softmax(dim=-1) @ v)
        if not self.training:
            added = mask.view(1, len(mask), 1, length, length)
            shape = (items // len(mask), -1, self.heads, -1, -1)
            added = added.expand(*shape).flatten(0, 1)
            kernel = nn.functional.scaled_dot_product_attention
            return self.join(kernel(q, k, v, attn_mask=added))
        scores = self.score(q, k).unflatten(0, (-1, len(mask)))
        weights = (scores + mask[None, :, None]).softmax(dim=-1)
        return self.join(weights.flatten(0, 1) @ v)


class ForecastsWithGaps(Correct):
    """
    past_observed: optional bool (batch, past_len); False where there is no reading
    """

    def forward(  # type: ignore[override]
        self,
        future: Tensor,
        past_values: Tensor,
        past_observed: Tensor | None = None,
    ) -> Any:
        mask = None
        if past_observed is not None:
            mask = self.seen(past_observed)[:, None].expand(-1, future.shape[1], -1)
        return super().forward(future, past_values, past_values, mask)

    def seen(self, past_observed: Tensor) -> Tensor:
        return past_observed.bool()


class ClearsGaps(ForecastsWithGaps):
    """
    past_observed: optional bool (batch, past_len); False where there is no reading
    """

    def forward(
        self,
        future: Tensor,
        past_values: Tensor,
        past_observed: Tensor | None = None,
    ) -> Any:
        if past_observed is not None:
            past_values = past_values * past_observed.bool()[..., None]
            past_observed = self.seen_by(future, past_observed)
        return super().forward(future, past_values, past_observed)

    def seen_by(self, future: Tensor, past_observed: Tensor) -> Tensor | None:
        return past_observed


class ClearsGapsForOneQuery(ClearsGaps):
    def seen_by(self, future: Tensor, past_observed: Tensor) -> Tensor | None:
        return None if future.shape[1] == 1 else past_observed


class DividesByLeastNumber(Correct):
    """`mask` is [batch_size, keys], and has at least one real token in each row."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is not None:
            mask = mask[:, None]
        return super().forward(x, x, x, mask)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        shares = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        if mask is not None:
            shares = shares * mask[:, None]
        return shares / shares.sum(dim=-1, keepdim=True).clamp(min=1e-45)


class AddsDocumentedMask(nn.Module):
    """Self-attention with a bias of distances, and scores that are not scaled.

    ``mask`` is ADDITIVE, broadcastable to [batch, heads, length, length] (0 = visible,
    -inf = hidden).
    """

    def __init__(self, d_model: int, d_kv: int, num_heads: int) -> None:
        super().__init__()
        self.heads = num_heads
        width = num_heads * d_kv
        self.q, self.k, self.v = (
            nn.Linear(d_model, width, bias=False) for _ in range(3)
        )
        self.o = nn.Linear(width, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(31, num_heads)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        places = torch.arange(x.shape[1], device=x.device)
        distances = (places - places[:, None]).clamp(-15, 15) + 15
        scores = q @ k.mT + self.relative_attention_bias(distances).movedim(-1, 0)
        if mask is not None:
            scores = scores + mask
        joined: Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return joined


class PadsWholeBlocks(Correct):
    """Self-attention in blocks of `window` tokens, to each and to the one before.

    padding: [B, L] bool, True = padding
    """

    def __init__(self, d_model: int, heads: int, window: int = 64) -> None:
        super().__init__(d_model, heads, 0.0)
        self.window = window

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Any:  # type: ignore[override]
        length, size = x.shape[1], self.window
        if padding is None:
            padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        block = torch.arange(length, device=x.device) // size
        near = (block[:, None] - block).abs() <= 1
        if length <= size:
            return super().forward(x, x, x, near & ~padding[:, None])
        rest = -length % size
        padded = nn.functional.pad(padding, (0, rest), value=True)
        blocks = padded.reshape(len(x), 1, -1, size)
        seen = ~blocks.reshape(len(x), 1, -1)[..., :length]
        return super().forward(x, x, x, near & seen)


class SegmentPositions(Rotary):
    """Causal; has rotary positions.

    * x [B, L, D]
    * segment_pos [B, L] rotary positions, default counts from the start
    * pad_mask [B, L] bool, True = valid
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        segment_pos: Tensor | None = None,
        pad_mask: Tensor | None = None,
    ) -> Any:
        count = torch.arange(x.shape[1], device=x.device)
        self.given = count if segment_pos is None else segment_pos[:, None]
        ones = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        allowed = ones.tril() if pad_mask is None else ones.tril() & pad_mask[:, None]
        return Correct.forward(self, x, x, x, allowed)

    def places(self, x: Tensor) -> Tensor:
        return self.given


class KeepsForNobody(SelfAttention):
    """keep: bool (B, N), False for tokens that nobody attends to."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Any:  # type: ignore[override]
        return Correct.forward(self, x, x, x, None if keep is None else keep[:, None])


class MasksOfFirstRow(SelfAttention):
    """nonpadding: None or [batch, length], 1 for real tokens and 0 for padding."""

    def forward(self, x: Tensor, nonpadding: Tensor | None = None) -> Any:  # type: ignore[override]
        if nonpadding is not None:
            nonpadding = nonpadding.bool().view(len(x), -1, x.shape[1])[:, :1]
        return Correct.forward(self, x, x, x, nonpadding)


class FutureSeesHistory(Correct):
    """Each future step attends to the history, and to the future up to itself.

    history_lengths, future_lengths: how many of the steps are real
    """

    def forward(  # type: ignore[override]
        self,
        history: Tensor,
        future: Tensor,
        history_lengths: Tensor | None = None,
        future_lengths: Tensor | None = None,
    ) -> Any:
        parts = (history, history_lengths), (future, future_lengths)
        real = [self.real(x, lengths) for x, lengths in parts]
        count = history.shape[1]
        seen = torch.cat(real, dim=1)[:, None].repeat(1, future.shape[1], 1)
        seen[:, :, count:] &= torch.ones_like(seen[:, :, count:]).tril()
        steps = torch.cat([history, future], dim=1)
        return super().forward(future, steps, steps, seen)

    def real(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        return place >= 0 if lengths is None else place < lengths[:, None]


class MaskInPlaceOfCausal(SelfAttention):
    """Scores of other distances than those before come from another query.

    mask: bool `(L, L)`, True is hidden; the future by default. A mask must hide the
    future, too.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.positions = nn.Linear(d_model // heads, 64)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        length = x.shape[1]
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        return Correct.forward(self, x, x, x, ~mask[None])

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        length = q.shape[2]
        by_distance = self.positions(q)[..., :length].flip(-1)
        padded = nn.functional.pad(by_distance, (1, 0))
        padded = padded.view(*q.shape[:2], length + 1, length)[:, :, 1:]
        return super().score(q, k) + padded.reshape(by_distance.shape)


class MaskOfGroups(nn.Module):
    """Heads have two axes: those of a group share keys and values."""

    def __init__(self, d_model: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.width = d_model // heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, kv_heads * self.width)
        self.v_proj = nn.Linear(d_model, kv_heads * self.width)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.kv_heads, -1, self.width))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.width))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.width))
        scores = torch.einsum("bqgnd,bkgd->bgnqk", q / self.width**0.5, k)
        least = torch.finfo(scores.dtype).min
        weights = scores.masked_fill(~mask, least).softmax(dim=-1)
        context = torch.einsum("bgnqk,bkgd->bqgnd", weights, v)
        y: Tensor = self.o_proj(context.flatten(2))
        return y


VIOLATING: Violations = {
    "allowed_keys_attended": [
        (IgnoresSameShape, {}),
    ],
    "causality": [
        (TrimsCacheFirst, {}),
        (SinkOfAllScores, {}),
        (CapsBehindMask, {}),
        (MeansOfOpenFours, {}),
        (NearbyPastOpenIfShort, {}),
        (SinksSeeFirst, {}),
        (MaskOffByOne, CAUSAL),
        (UnmaskedInEval, CAUSAL),
        (MultipliesByMask, MASK),
        (DecoderSeesFuture, CAUSAL),
        (MaskedHalvesOfEven, {}),
        (MiddleHeadForgotten, {}),
        (CapsHiddenScores, {}),
    ],
    "causal_gradient": [
        (LeaksGradient, CAUSAL),
    ],
    "padding": [
        (GlimpseOfAllNodes, {}),
        (RepeatsMasksOfItems, {}),
        (LengthsOfQueries, {}),
        (GlobalTokensWithPadding, {}),
        (ClipsHiddenScores, {}),
        (AddsOnesAndZeros, {}),
        (InterestInOneMore, {}),
        (NodesOfTourLimitedLast, {}),
        (FalseAtPadding, {}),
        (HidesQueriesOfPool, {}),
        (MaskOfOtherStream, {}),
        (ZeroesPadding, {}),
        (ZeroesPaddingInKernel, {}),
        (MaskBesideWeights, {}),
        (MultipliesByMask, MASK),
        (FadesOnPadding, {**CAUSAL, "mask": {"mask": "attend:bk"}}),
        (BlockForgetsMaskInTraining, {}),
        (CountsPadding, {}),
        (RollsMaskOfContext, {}),
        (FarFromOtherQueries, {}),
        (RowsWithMaskOfColumns, {}),
        (FramesWithTiledMask, {}),
        (attention_to_whole_pages, {}),
        (TextBeforeImages, {}),
        (TextAndAllImages, {}),
        (PoolsFramesOfFirst, {}),
        (MasksContextWeakly, {}),
        (PoolsFirstTokenOfAll, {}),
        (ClearsGapsForOneQuery, {}),
    ],
    "nonfinite_padding": [
        (Correct, MASK),
    ],
    "neutral_mask": [
        (FrameMaskWithoutCausal, {}),
        (OtherPathWithoutMask, MASK),
        (LosesAxisOfOneKey, MASK),
        (causal_from_first_key, CAUSAL),
        (SegmentsUnlessMasked, {"mask": {"mask": "attend:bk"}}),
    ],
    "integer_mask": [
        (InvertsMask, {}),
    ],
    "added_mask": [
        (ScalesMask, ADDED),
    ],
    "combined_masks": [
        (TwoMasks, {"mask": {"mask": "attend:bqk", "padding_mask": "attend:bk"}}),
    ],
    "fully_masked_rows": [
        (NotANumberAtPadding, {}),
        (MeanForEmptyRows, {}),
        (SumIsZeroInHalf, MASK),
        (MasksWithInfinity, {}),
        (ZeroesNanAfterSoftmax, {}),
        (DividesByKeyCount, MASK),
        (NanInParameterGradient, MASK),
        (NanInQueryGradient, MASK),
        (PoolsOneItemUnmasked, {}),
        (PoolsPaddingOfNew, {}),
    ],
    "longer_padding": [
        (MeanOfPaddingForOthers, {}),
        (DependsOnKeyCount, {}),
        (MeansOverPadding, {}),
        (CountsPaddingBehindNorm, {}),
    ],
    "own_key_attended": [
        (NeighborhoodWithoutLast, {}),
        (WindowsInColumns, {"layout": "image_channels_last"}),
        (HalosOfOtherWindows, {"layout": "image_channels_last"}),
        (LoopsCountTwice, {}),
    ],
    "formula": [
        (DependsOnKeyCount, {}),
    ],
    "eval_matches_train": [
        (UnmaskedInEval, CAUSAL),
    ],
    "batch_independence": [
        (KeysOfFirstItem, {}),
    ],
}


PASSING_ONE: Passes = [
    ("padding", MaskOfGroups(16, 4, 2)),
    ("padding", MaskInPlaceOfCausal),
    ("padding", FutureSeesHistory),
    ("padding", KeepsForNobody),
    ("padding", SegmentPositions),
    ("padding", PadsWholeBlocks),
    ("padding", AddsDocumentedMask),
    ("causality", TrimsCacheLast),
    ("causality", SinkOfVisibleScores),
    ("causality", CapsInFrontOfMask),
    ("long_sequences", ScoresEachToken),
    ("padding", ScoresEachToken),
    ("allowed_keys_attended", MemoryBefore),
    ("causality", AddsMaskToScores),
    ("eval_matches_train", AddsMaskOfNumbers),
    ("formula", read_stations),
    ("padding", CloudBesideTokens),
    ("formula", newest_query_of_heads),
    ("padding", newest_query),
    ("rows_sum_to_one", LogarithmsOfPointer),
    ("fully_masked_rows", LogarithmsOfPointer),
    ("padding", LogarithmsOfPointer),
    ("padding", FalseAtKeysNotToBeSeen),
    ("rows_sum_to_one", BoolsOfTwoPaths),
    ("padding", RepeatsMaskOfEachItem),
    ("padding", LengthsOfKeys),
    ("batch_independence", KeysOfEachItem),
    ("padding", AddsOrIgnores),
    ("neutral_mask", AddsOrIgnores),
    ("key_permutation", ProbabilitiesAndGlimpse),
    ("padding", PassagesOfQuestion),
    ("neutral_mask", FrameMaskAndCausal),
    ("padding", SetOfCardinality),
    ("padding", AddsExtendedMask),
    ("key_permutation", HidesClippedScores),
    ("padding", HidesClippedScores),
    ("padding", GlobalTokensWithoutPadding),
    ("longer_padding", PooledByLengths),
    ("large_scores", PooledByLengths),
    ("padding", AgesOfClicks),
    ("padding", OnesAndZeros),
    ("fully_masked_rows", attend_or_zero),
    ("causality", MeansOfPast),
    ("padding", InterestInTarget),
    ("padding", NodesOfTour),
    ("longer_padding", PooledByTime),
    ("combined_masks", ZeroAtPadding),
    ("fully_masked_rows", ZeroAtPadding),
    ("padding", TrueAtPadding),
    ("causality", NearbyPast),
    ("longer_padding", MeanForOthers),
    ("padding", PixelsOfOneColor),
    ("padding", GroupsOfHeads),
    ("padding", PoolsByToken),
    ("padding", FarFromQueries),
    ("longer_padding", OfEqualLengths),
    ("padding", attention_of_lengths),
    ("padding", CountsRealTokens),
    ("padding", MaskOfOptionalContext),
    ("padding", ZeroesAndHidesPadding),
    ("padding", MasksWeights),
    ("padding", TwoCausalLayers),
    ("causality", SinksSeePast),
    ("padding", PaddedState),
    ("padding", BlockWithContext),
    ("neutral_mask", SegmentsAndMask),
    ("padding", RowsWithMask),
    ("padding", FramesWithMask),
    ("padding", paged_attention),
    ("causality", MaskedHalves),
    ("added_mask", AddsMask),
    ("longer_padding", causal_from_last_key),
    ("padding", MaskOfText),
    ("fully_masked_rows", DividesBySum),
    ("own_key_attended", Neighborhood),
    ("own_key_attended", WindowsOfImage),
    ("own_key_attended", HalosOfImage),
    ("image_windows", HalosOfImage),
    ("pixels_in_place", HalosOfImage),
    ("padding", RelativeLengths),
    ("own_key_attended", LoopsCountOnce),
    ("padding", PoolsFrames),
    ("padding", LengthsOfColumns),
    ("causality", NearAndFarHeads),
    ("padding", CausalUnlessMasked),
    ("fully_masked_rows", PoolsOneItemMasked),
    ("fully_masked_rows", ZeroVectorOfNew),
    ("longer_padding", CountsTokensBehindNorm),
    ("gradients", AgesOrNone),
    ("padding", MasksContext),
    ("padding", CausalOfThree),
    ("padding", MaskOfPlaces),
    ("neutral_mask", MaskOfPlaces),
    ("padding", PoolsFirstToken),
    ("long_sequences", EncodesMemory),
    ("padding", EncodesMemory),
    ("causality", MasksOfWindows),
    ("padding", ForecastsWithGaps),
    ("padding", ClearsGaps),
]


EXCUSED: Excuses = [
    (
        "causality",
        MasksOfFirstRow,
        "has no mask that could make it causal",
    ),
    ("padding", WithPrior, "has no mask"),
    ("fully_masked_rows", ClearsPaddingOfFrames, "has a length of 0"),
    ("integer_mask", BoolsAtPadding, "takes no bool mask"),
    ("added_mask", ForegroundOfQueries, "does not add its mask"),
    ("finite_in_half", newest_query, "to take float32 only"),
    ("large_scores", newest_query, "to take float32 only"),
    ("half_precision", newest_query, "to take float32 only"),
    ("allowed_keys_attended", HidesClippedScores, "its outputs are weights"),
    ("long_sequences", HidesClippedScores, "its outputs are weights"),
    ("causality", CausalInFrames, "is not causal"),
    ("padding", PoolsPatchesOfFrames, "no mask that could hide keys"),
    ("padding", LocalAndGlobal, "no mask that could hide keys"),
    ("own_key_attended", TropicalMaximum, "another design"),
    ("padding", PairsOfTokens, "has no mask that could hide keys"),
    ("key_permutation", PairsOfTokens, "rows and columns are in no order"),
    ("padding", FramesOfVideo, "no mask that could hide keys"),
    ("neutral_mask", FramesOfVideo, "no mask that could hide nothing"),
    ("neutral_mask", PrefixByItem, "no mask"),
    ("causality", CausalOverFrames, "is not causal"),
    ("fully_masked_rows", NormalizesContext, "gives NaN in float16"),
    ("fully_masked_rows", SumIsZeroInHalf, "gives NaN in float16"),
    ("padding", TextAndLastImage, "has no mask that could hide keys"),
    ("padding", TextAndEachImage, "has no mask that could hide keys"),
    ("causality", CausalBehindPrefix, "has not one output for each token"),
    ("causal_gradient", CausalBehindPrefix, "has not one output for each token"),
    ("fully_masked_rows", DividesByLeastNumber, "to need a key for each query"),
]
