"""Correct attention modules, and parts of specimens of several families."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Correct(nn.Module):
    """Batch first; the mask is `[batch_size, q_len, k_len]`, True = may attend."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        q, k, v = self.query(query), self.key(key), self.value(value)
        q, k, v = (self.split(x) for x in (q, k, v))
        weights = self.weigh(self.score(q, k), mask)
        return self.join(self.read(self.dropout(weights), v))

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q / math.sqrt(q.shape[-1]) @ k.mT

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            # The least finite number: a fully masked row is uniform, and not NaN.
            least = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~mask[:, None], least)
        return scores.softmax(dim=-1)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v

    def join(self, context: Tensor) -> Tensor:
        joined: Tensor = self.out(context.transpose(1, 2).flatten(2))
        return joined


class MaskedSelfAttention(Correct):
    """Causal self-attention."""

    corner = 0

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        return super().forward(x, x, x, ones.tril(self.corner)[None])


class SelfAttention(Correct):
    """Self-attention without a mask."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x)


class WithCache(Correct):
    """Self-attention with a KV cache."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if past is None else torch.cat([past, x], dim=1)
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        return super().forward(x, seen, seen, ones.tril(self.corner(ones))), seen

    def corner(self, ones: Tensor) -> int:
        return ones.shape[2] - ones.shape[1]


class Window(MaskedSelfAttention):
    """Causal self-attention with a sliding window."""

    reach = 2

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return super().weigh(scores, mask.triu(-self.reach))


class LinearBias(MaskedSelfAttention):
    """ALiBi: a bias that falls with the distance, with a slope for each head."""

    sign = 1

    def slopes(self, heads: int) -> Tensor:
        power = 1 << (heads.bit_length() - 1)
        order = torch.arange(1, heads + 1)
        order = torch.where(order > power, order - power - 0.5, order)
        return self.sign * 0.5 ** (8 * order / power)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device)
        slopes = self.slopes(k.shape[1]).to(k.device)[:, None, None]
        return super().score(q, k) + (slopes * (place - place[:, None])).to(k)


class Rotary(MaskedSelfAttention):
    """RoPE: pairs of neighboring components are rotated by the position."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.turn(q), self.turn(k))

    def turn(self, x: Tensor) -> Tensor:
        place = self.places(x)[..., None]
        pair = torch.arange(x.shape[3] // 2, device=x.device)
        angle = self.angles(place * self.speed(pair, x.shape[3]))
        other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return x * angle.cos().to(x) + other * angle.sin().to(x)

    def speed(self, pair: Tensor, width: int) -> Tensor:
        return 0.3**pair

    def places(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[2], device=x.device)

    def angles(self, angle: Tensor) -> Tensor:
        return angle.repeat_interleave(2, dim=-1)


class RotaryOfDevices(Rotary):
    """Two devices have half of the heads each: their queries, values and keys."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        if heads % 4:
            raise ValueError("each device has the same number of heads")
        self.devices = 2
        del self.query, self.key, self.value
        self.qkv = nn.Linear(d_model, 3 * d_model)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.qkv(x).unflatten(-1, (self.devices, -1)).chunk(3, -1)
        q, v, k = (self.split(part.flatten(2)) for part in parts)
        later = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
        scores = self.score(q, k).masked_fill(later, -torch.inf)
        weights = scores.softmax(dim=-1)
        return self.join(weights @ v), weights


class Segments(SelfAttention):
    """A token attends to those of its own segment."""

    def forward(  # type: ignore[override]
        self, x: Tensor, segment_ids: Tensor | None = None
    ) -> Any:
        if segment_ids is None:
            return super().forward(x)
        ids = self.ids(segment_ids)
        return Correct.forward(self, x, x, x, ids[:, :, None] == ids[:, None])

    def ids(self, given: Tensor) -> Tensor:
        return given


class RelativeTable(SelfAttention):
    """A learned bias for each distance up to a limit, at which they are clamped."""

    limit = 3

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.relative_bias = nn.Parameter(torch.zeros(heads, 2 * self.limit + 1))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        rows = self.rows(place[None] - place[:, None])
        return super().score(q, k) + self.relative_bias[:, rows]

    def rows(self, distance: Tensor) -> Tensor:
        return distance.clamp(-self.limit, self.limit) + self.limit


class AddsPositions(SelfAttention):
    """Positions, if given, are added to queries and keys."""

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Any:  # type: ignore[override]
        tokens = x if pos is None else self.add(x, pos)
        return Correct.forward(self, tokens, tokens, x)

    def add(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + pos


class NormalizedImage(Correct):
    """All pixels attend to each other, behind a norm, in a residual connection."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        del self.query, self.key, self.value, self.out
        self.norm = nn.GroupNorm(1, d_model)
        self.projection = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        tokens = self.norm(image).flatten(2).mT
        q, k, v = map(self.split, self.projection(tokens).chunk(3, dim=-1))
        weights = self.weigh(self.score(q, k), None)
        return image + self.join(self.read(weights, v)).mT.reshape(image.shape)


class ShiftsByOption(Correct):
    """Windows of an image, which an option shifts; it is given as a sequence."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        input_resolution: tuple[int, int],
        window_size: int = 4,
        shift_size: int = 0,
    ) -> None:
        super().__init__(d_model, heads, 0.0)
        self.input_resolution = input_resolution
        self.window_size, self.shift_size = window_size, shift_size

    def windows(self, image: Tensor) -> Tensor:
        size = self.window_size
        parts = image.unflatten(2, (-1, size)).unflatten(1, (-1, size))
        return parts.transpose(2, 3).reshape(-1, size**2, image.shape[-1])

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        height, width = self.input_resolution
        # An error of `unflatten` takes a hundred times as long.
        image = x.view(len(x), height, width, x.shape[-1])
        shift, size = self.shift_size, self.window_size
        parts = self.windows(image.roll((-shift, -shift), (1, 2)))
        # Pixels that the shift brings to a border are of other parts of the image.
        place = torch.arange(height * width, device=x.device).view(height, width)
        row, column = place // width, place % width
        part = 2 * (row >= height - shift) + (column >= width - shift)
        part = self.windows(part[None, ..., None])
        allowed = self.for_items(part == part.mT, len(x))
        y = super().forward(parts, parts, parts, allowed)
        y = y.view(len(x), height // size, width // size, size, size, -1)
        y = y.transpose(2, 3).reshape(image.shape)
        return y.roll((shift, shift), (1, 2)).flatten(1, 2)

    def for_items(self, allowed: Tensor, count: int) -> Tensor:
        return allowed.repeat(count, 1, 1)


class StoresDistances(Correct):
    """A bias of the distances, which are stored for each number of queries and keys."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.distances: dict[Any, Tensor] = {}

    def name(self, q_len: int, k_len: int) -> Any:
        return q_len, k_len

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q_len, k_len = q.shape[2], k.shape[2]
        first = k_len - q_len
        query, key = (torch.arange(n, device=q.device) for n in (q_len, k_len))
        distances = key - first - query[:, None]
        distances = self.distances.setdefault(self.name(q_len, k_len), distances)
        return super().score(q, k) + distances[-q_len:].cos()


class StoresDistancesByKeys(StoresDistances):
    def name(self, q_len: int, k_len: int) -> Any:
        return k_len


class TwoStreams(SelfAttention):
    """Tokens of an image and of a text, each with an output of its own."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.text_out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, other: Tensor) -> Any:  # type: ignore[override]
        both = torch.cat([x, other], dim=1)
        y = Correct.forward(self, both, both, both)
        return y[:, : x.shape[1]], self.text_out(y[:, x.shape[1] :])


class OverFrames(SelfAttention):
    """Each pixel of a video attends to itself in all frames."""

    def forward(self, video: Tensor) -> Any:  # type: ignore[override]
        *_, height, width = video.shape
        x = self.pixels_first(video).flatten(0, 2)
        y = Correct.forward(self, x, x, x).unflatten(0, (-1, height, width))
        return y.permute(0, 4, 3, 1, 2)

    def pixels_first(self, video: Tensor) -> Tensor:
        return video.permute(0, 3, 4, 2, 1)


class DecoderOfMemory(nn.Module):
    """Causal self-attention, then attention to a memory; both have one cache."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.of_tokens = Correct(d_model, heads)
        self.of_memory = Correct(d_model, heads)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        tokens = x if past is None else torch.cat([past[0], x], dim=1)
        ones = torch.ones(
            1, x.shape[1], tokens.shape[1], dtype=torch.bool, device=x.device
        )
        causal = self.align(ones, tokens.shape[1] - x.shape[1])
        y = x + self.of_tokens(x, tokens, tokens, causal)
        memory = memory if past is None else past[1]
        mask = None if memory_mask is None else memory_mask[:, None]
        y = y + self.of_memory(y, memory, memory, self.mask_with(mask, past))
        return y, (tokens, memory)

    def align(self, ones: Tensor, past: int) -> Tensor:
        return ones.tril(past)

    def mask_with(self, mask: Tensor | None, past: Any) -> Tensor | None:
        return mask


class Guided(nn.Module):
    """Tokens attend to each other, then to a context; the mask of each is required."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.of_tokens = Correct(d_model, heads)
        self.of_context = Correct(d_model, heads)

    def forward(
        self, x: Tensor, y: Tensor, x_mask: Tensor | None, y_mask: Tensor | None
    ) -> Tensor:
        # [batch_size, 1, 1, k_len], True = is ignored
        of_x, of_y = (None if m is None else ~m[:, 0] for m in (x_mask, y_mask))
        x = x + self.of_tokens(x, x, x, of_x)
        both: Tensor = x + self.of_context(x, y, y, of_y)
        return both


class NarrowPrior(SelfAttention):
    """Weights fade with the distance, as a share of the length, which is kept."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.log_width = nn.Parameter(torch.linspace(-3, -0.7, heads))
        self.distances: Tensor | None = None

    def share(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.distances is None or len(self.distances) != length:
            place = torch.arange(length, device=x.device) / length
            self.distances = (place[:, None] - place).square()
        return self.distances.to(x)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        precision = (-2 * self.log_width).exp()[:, None, None]
        scores = self.score(q, k) - precision / 2 * self.share(x)
        mask = None if mask is None else mask[:, None]
        return self.join(self.read(self.weigh(scores, mask), v))


@dataclass
class FramesConfig:
    d_model: int = 32
    heads: int = 4
    context_dim: int = 24


class PixelsOfFrames(Correct):
    """Each pixel attends to the context of its video, of which it has one copy."""

    def __init__(self, config: FramesConfig) -> None:
        super().__init__(config.d_model, config.heads)
        self.context = nn.Linear(config.context_dim, config.d_model)

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, num_frames: int
    ) -> Any:
        pixels, width = x.shape[1:]
        videos = x.reshape(-1, num_frames, pixels, width).transpose(1, 2).flatten(0, 1)
        context = self.copy(self.context(context), pixels)
        y = super().forward(videos, context, context)
        return y.reshape(-1, pixels, num_frames, width).transpose(1, 2).reshape_as(x)

    def copy(self, context: Tensor, pixels: int) -> Tensor:
        return context.repeat_interleave(pixels, dim=0)


def attend_in_parts(
    inputs: tuple[Tensor, Tensor, Tensor],
    ends: tuple[Tensor, Tensor],
    shifts: Tensor | None,
) -> Tensor:
    """Packed sequences; query `n` sees keys up to `n` and the shift of its sequence."""
    (q, k, v), (queries, keys) = inputs, ends
    of_query, of_key = (
        torch.repeat_interleave(torch.arange(len(end) - 1), end.diff()) for end in ends
    )
    mask = of_query[:, None] == of_key
    if shifts is not None:
        place = torch.arange(len(q)) - queries[of_query] + shifts[of_query]
        mask &= torch.arange(len(k)) - keys[of_key] <= place[:, None]
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, torch.finfo(q.dtype).min).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def packed_first(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
) -> Tensor:
    """Each query of a sequence sees as many of its keys as it has a number."""
    ends = cu_seqlens_q, cu_seqlens_k
    shifts = 0 * ends[0].diff()
    return attend_in_parts((q, k, v), ends, shifts if causal else None)


class EdgesConv(nn.Module):
    """Nodes attend to those from which they have an edge, `[2, edges]`."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.lin_query = nn.Linear(d_model, d_model)
        self.lin_key = nn.Linear(d_model, d_model)
        self.lin_value = nn.Linear(d_model, d_model)
        self.loop = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        loops = torch.arange(len(x), device=x.device).expand(2, -1)
        source, target = torch.cat([edge_index, loops], dim=1)
        q, k, v = (
            layer(x).unflatten(1, (self.heads, -1))
            for layer in (self.lin_query, self.lin_key, self.lin_value)
        )
        scores = (q[target] * k[source]).sum(dim=-1) * q.shape[-1] ** -0.5
        scores = scores + (source == target)[:, None] * self.loop
        shares = (scores - self.largest(scores, target, len(x))).exp()
        sums = scores.new_zeros(len(x), self.heads).index_add(0, target, shares)
        least = torch.finfo(x.dtype).tiny
        weights = (shares / sums[target].clamp(min=least))[..., None]
        return torch.zeros_like(v).index_add(0, target, weights * v[source]).flatten(1)

    def largest(self, scores: Tensor, target: Tensor, nodes: int) -> Tensor:
        index = target[:, None].expand_as(scores)
        largest = scores.new_full((nodes, self.heads), -torch.inf)
        return largest.scatter_reduce(0, index, scores.detach(), "amax")[target]


class HeadsSeeTwoWays(SelfAttention):
    """A half of the heads sees the past, and the others see the future."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores + self.direction_mask(scores), mask)

    def direction_mask(self, scores: Tensor) -> Tensor:
        future = torch.ones_like(scores[0, 0]).triu(1) > 0
        half = self.heads // 2
        hidden = torch.stack([future] * half + [future.T] * (self.heads - half))
        least = torch.finfo(scores.dtype).min
        return torch.zeros_like(scores[0]).masked_fill(hidden, least)


class MemoryInFront(SelfAttention):
    """Keys are the memory, if there is one, and the tokens; so are the weights."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if memory is None else torch.cat([memory, x], dim=1)
        q, k, v = self.query(x), self.key(seen), self.value(seen)
        q, k, v = (self.split(each) for each in (q, k, v))
        ones = torch.ones(1, q.shape[2], k.shape[2], dtype=torch.bool, device=x.device)
        mask = ones.tril(k.shape[2] - q.shape[2])
        weights = self.weigh(self.score(q, k), mask)
        return self.join(self.dropout(weights) @ v), weights


class RootMeanSquare(nn.Module):
    def __init__(self, d_k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_k))

    def forward(self, x: Tensor) -> Tensor:
        size = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)
        return x * size * self.weight


class HeadRMSNorm(RootMeanSquare):
    pass


class LocalAndGlobal(SelfAttention):
    """Tokens see 2 to each side, and those that are global; these see all.

    x: (B, N, D); global_mask: (B, N), True for global tokens
    """

    def forward(self, x: Tensor, global_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        length = x.shape[1]
        ones = torch.ones(len(x), length, length, dtype=torch.bool, device=x.device)
        near = ones.tril(2) & ones.triu(-2)
        if global_mask is not None:
            marks = self.marks(global_mask)
            near = near | marks[:, None] | marks[:, :, None]
        return Correct.forward(self, x, x, x, near)

    def marks(self, global_mask: Tensor) -> Tensor:
        return global_mask


class TimeSeriesEncoder(nn.Module):
    """A layer over the steps of each series."""

    batch_first = True

    def __init__(self, n_features: int = 7, d_model: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Linear(n_features, d_model)
        self.attention = nn.MultiheadAttention(
            d_model, heads, dropout=0.1, batch_first=self.batch_first
        )
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        """
        Parameters
        ----------
        x : torch.Tensor
            (batch, time, n_features)
        """
        h = self.embedding(x)
        y, _ = self.attention(h, h, h, need_weights=False)
        normed: Tensor = self.norm(h + y)
        return normed


class NormInFront(SelfAttention):
    """x = x + attn(norm(x))"""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        h = self.norm(x)
        return self.passed_on(x, h) + super().forward(h)

    def passed_on(self, x: Tensor, h: Tensor) -> Tensor:
        return x


class FeaturesOfEdges(nn.Module):
    """x: (nodes, d), edge_index: (2, num_edges), edge_attr: (num_edges, edge_dim)"""

    def __init__(self, d_model: int, heads: int = 2, edge_dim: int = 5) -> None:
        super().__init__()
        self.heads = heads
        self.value, self.score = nn.Linear(d_model, d_model), nn.Linear(d_model, heads)
        self.of_edge = nn.Linear(edge_dim, heads)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index
        scores = (self.score(x)[source] + self.of_edge(edge_attr)).tanh().exp()
        sums = torch.zeros_like(x[:, : self.heads]).index_add(0, target, scores)
        weights = (scores / sums[target])[..., None]
        values = self.value(x).unflatten(-1, (self.heads, -1))[source]
        y = torch.zeros_like(x).unflatten(-1, (self.heads, -1))
        return y.index_add(0, target, weights * values).flatten(1)


# For each law, modules that violate it, with their options.
Violations = dict[str, list[tuple[Any, dict[str, Any]]]]
# Pairs of a law and a module.
Passes = list[tuple[str, Any]]
# The reason is a part of that which is reported.
Excuses = list[tuple[str, type[nn.Module], str]]

MASK = {"mask": {"mask": "attend:bqk"}}


ADDED = {"mask": {"mask": "additive:b1qk"}}


PADDED = {"mask": {"padding": "ignore:bk", "attn_mask": "attend:bqk"}}


CAUSAL = {"causal": True}


CACHE = {"cache": ("past", "[1]")}


MEMORY = {"cache": ("mems", "[1]"), "causal": True}


class WindowsOfImage(SelfAttention):
    """Windows of 2 x 2 pixels; the image has its channels last."""

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        b, h, w, c = image.shape
        if h % 2 or w % 2:
            raise ValueError("height and width must be even")
        split = image.reshape(b, h // 2, 2, w // 2, 2, c).transpose(2, 3)
        x = split.reshape(-1, 4, c)
        return self.merge(self.attend(x, image), h, w)

    def attend(self, x: Tensor, image: Tensor) -> Any:
        return Correct.forward(self, x, x, x)

    def merge(self, y: Tensor, h: int, w: int) -> Tensor:
        split = y.reshape(-1, h // 2, w // 2, 2, 2, y.shape[-1]).transpose(2, 3)
        return split.reshape(-1, h, w, y.shape[-1])


class BehindPrefix(Correct):
    """All tokens are keys, but the first two are no queries. It is causal."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        length = x.shape[1]
        if length < 3:
            raise ValueError("a prefix only")
        ones = torch.ones(length, length, dtype=torch.bool, device=x.device)
        return super().forward(x[:, 2:], x, x, ones.tril()[None, 2:])


class TwoCausalLayers(nn.Module):
    """Two layers of causal self-attention, with a mask for padding."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Correct(d_model, heads, 0.0) for _ in range(2)])

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> Any:
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        allowed = causal[None]
        if attention_mask is not None and self.uses_mask(output_attentions):
            own = torch.eye(length, dtype=torch.bool, device=x.device)
            allowed = causal & attention_mask[:, None] | own
        for layer in self.layers:
            x = x + layer(x, x, x, allowed)
        return (x, [None, None]) if output_attentions else x

    def uses_mask(self, output_attentions: bool) -> bool:
        return True


class CroppedTokens:
    """A cache that is made by the first call, and from which tokens are removed."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.seen = 0

    def crop(self, length: int) -> None:
        self.tokens = [torch.cat(self.tokens, dim=1)[:, :length]]
        self.seen = length


class MakesCroppedCache(MaskedSelfAttention):
    """The first call makes the cache, which it returns."""

    kind = CroppedTokens

    def forward(self, x: Tensor, cache: Any = None) -> Any:  # type: ignore[override]
        cache = self.kind() if cache is None else cache
        first, cache.seen = cache.seen, cache.seen + x.shape[1]
        position = torch.arange(first, cache.seen, device=x.device)
        x = x + position.cos().to(x)[:, None]
        cache.tokens.append(x)
        seen = torch.cat(cache.tokens, dim=1)
        ones = torch.ones(1, x.shape[1], seen.shape[1], dtype=torch.bool)
        allowed = ones.tril(seen.shape[1] - x.shape[1]).to(x.device)
        return Correct.forward(self, x, seen, seen, allowed), cache


class OfPatches(Correct):
    """Tokens are patches of four steps: fewer steps give none."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        count = x.shape[1] // 4
        patches = x[:, : 4 * count].unflatten(1, (count, 4)).mean(2)
        return super().forward(patches, patches, patches).sum(1)


class TextAndImages(Correct):
    """A token attends to the image whose mark is the last one up to it."""

    def forward(  # type: ignore[override]
        self, x: Tensor, media: Tensor, media_locations: Tensor
    ) -> Any:
        images, length = media.shape[1:3]
        seen = media_locations.long().cumsum(dim=1)[:, :, None]
        number = torch.arange(1, images + 1, device=x.device).repeat_interleave(length)
        keys = media.flatten(1, 2)
        q, k, v = self.query(x), self.key(keys), self.value(keys)
        q, k, v = (self.split(part) for part in (q, k, v))
        allowed = self.are_seen(seen, number)
        weights = self.hide(self.weigh(self.score(q, k), allowed), seen)
        return self.join(self.read(weights, v))

    def are_seen(self, seen: Tensor, number: Tensor) -> Tensor:
        return seen == number

    def hide(self, weights: Tensor, seen: Tensor) -> Tensor:
        return weights.masked_fill(seen[:, None] == 0, 0)
