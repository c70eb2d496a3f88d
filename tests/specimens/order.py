"""Modules that violate the laws of order, or come near to it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from specimens.base import (
    Correct,
    Excuses,
    HeadsSeeTwoWays,
    MaskedSelfAttention,
    NarrowPrior,
    Passes,
    SelfAttention,
    TwoCausalLayers,
    Violations,
    Window,
)


class AddsKeyIndex(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device).to(k)
        return super().score(q, k) + place


class NormalizesOverQueries(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores.softmax(dim=2), mask)


class SkipsOneQuery(Correct):
    """A path of its own for one query, without a scale."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT if q.shape[2] == 1 else super().score(q, k)


class ViewsAsHeads(Correct):
    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.heads, x.shape[1], -1)


class ViewsAsHeadsSelfAttention(SelfAttention, ViewsAsHeads):
    pass


class WideWindow(Window):
    reach = 3


class NarrowWindow(Window):
    reach = 1


class MergesChunks(SelfAttention):
    """Chunks of four keys are merged by their largest scores.

    A factor of the scale has a name of rotary positions, and nothing is rotated.
    """

    rope_factor = 1.0

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        contexts, totals, shares = [], [], []
        largest = weights.amax(dim=-1, keepdim=True)
        for scores, values in zip(weights.split(4, -1), v.split(4, 2), strict=True):
            most = scores.amax(dim=-1, keepdim=True)
            exp = (self.rope_factor * (scores - most)).exp()
            contexts.append(self.dropout(exp) @ values)
            totals.append(exp.sum(dim=-1, keepdim=True))
            shares.append((self.scale() * (most - largest)).exp())
        merged = sum(map(torch.mul, shares, contexts))
        return merged / torch.stack([*map(torch.mul, shares, totals)]).sum(dim=0)

    def scale(self) -> float:
        return self.rope_factor


class MergesChunksUnscaled(MergesChunks):
    def scale(self) -> float:
        return 2.0


class BlocksByKeys(Correct):
    """Only as many blocks of 64 queries are computed as there are of the keys."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        blocks = 64 * math.ceil(k.shape[2] / 64)
        later = torch.arange(q.shape[2], device=q.device)[:, None] >= blocks
        return super().score(q.masked_fill(later, 0), k)


class OptionalContext(Correct):
    """Self-attention, or cross-attention if a context is given; queries in blocks."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:  # type: ignore[override]
        context = x if context is None else context
        blocks = x.split(2, 1)[: self.number_of_blocks(x, context)]
        outputs = [
            super(OptionalContext, self).forward(b, context, context) for b in blocks
        ]
        found = torch.cat(outputs, 1)
        return torch.nn.functional.pad(found, (0, 0, 0, x.shape[1] - found.shape[1]))

    def number_of_blocks(self, x: Tensor, context: Tensor) -> int:
        return x.shape[1]


class OptionalContextByKeys(OptionalContext):
    """As many blocks of queries are computed as there are blocks of keys."""

    def number_of_blocks(self, x: Tensor, context: Tensor) -> int:
        return (context.shape[1] + 1) // 2


class ExchangesQueriesAndKeys(SelfAttention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(k, q)


class ClassBeforePixels(SelfAttention):
    """A token for the class is in front of an image, and no key of its pixels."""

    def forward(self, x: Tensor, B: int, H: int, W: int) -> Any:  # type: ignore[override] # noqa: N803
        first, pixels = x.split([1, H * W], dim=1)
        pixels = super().forward(pixels).reshape(B, H * W, -1)
        return torch.cat([first + pixels.mean(dim=1, keepdim=True), pixels], dim=1)


class Retention(SelfAttention):
    """Keys fade by a decay from token to token; there is no softmax."""

    decay = 0.9

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return Correct.forward(self, x, x, x)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        place = torch.arange(scores.shape[-1], device=scores.device)
        distance = place[:, None] - place
        faded = self.decay ** distance.clamp(min=0) * (distance >= 0)
        return scores * faded.to(scores.dtype)


class ShortDecoder(nn.Module):
    """Attention to the tokens, then to a memory, with weights of unknown names."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.one = nn.Linear(d_model, d_model)
        self.two = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + (self.one(x) @ x.mT).softmax(dim=-1) @ x
        return x + (self.two(x) @ memory.mT).softmax(dim=-1) @ memory


class TwoLayersOfWindows(nn.Module):
    """Two layers, each with a window of three tokens."""

    def __init__(self, d_model: int, heads: int, window: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Correct(d_model, heads) for _ in range(2))
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        near = ones.tril() & ~ones.tril(-self.window)
        for layer in self.layers:
            x = x + layer(x, x, x, near)
        return x


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Sequences that are packed into one, `[length, heads, d_k]`.

    Keys end where queries do, if nothing else is given.
    """
    ends = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    of_query, of_key = (
        torch.searchsorted(
            end[1:].contiguous(), torch.arange(len(x), device=q.device), right=True
        )
        for end, x in ((cu_seqlens_q, q), (ends, k))
    )
    mask = of_query[:, None] == of_key
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, torch.finfo(q.dtype).min).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class SelectiveSelfAttention(MaskedSelfAttention):
    """Each token lowers the scores of others for all tokens behind it."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        lowered = scores[:, :1].relu().masked_fill(~mask[:, None], 0)
        return super().weigh(scores - lowered.cumsum(dim=2) + lowered, mask)


class LooksAhead(SelfAttention):
    """Frames see all before, and `right_context` behind their own."""

    def __init__(self, d_model: int, heads: int, right_context: int = 4) -> None:
        super().__init__(d_model, heads)
        self.right_context = right_context

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        ones = torch.ones_like(scores[:, 0], dtype=torch.bool)
        return super().weigh(scores, ones.tril(self.frames_ahead()))

    def frames_ahead(self) -> int:
        return self.right_context


class LooksOneLessAhead(LooksAhead):
    def frames_ahead(self) -> int:
        return max(0, self.right_context - 1)


class LooksAheadTwice(LooksAhead):
    """Two layers see twice as far."""

    def __init__(self, d_model: int, heads: int, right_context: int = 4) -> None:
        super().__init__(d_model, heads, right_context)
        self.second = LooksAhead(d_model, heads, right_context)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.second(super().forward(x))


class KeepsAsManyAsQueries(Correct):
    """A query attends to the best keys, of as many as there are queries."""

    def forward(self, query: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        return super().forward(query, context, context)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        count = min(5, scores.shape[2])
        least = scores.topk(count, dim=-1).values[..., -1:]
        return scores.masked_fill(scores < least, -torch.inf).softmax(dim=-1)


class BesideClassToken(SelfAttention):
    """The first token, that of the class, has a layer of its own."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.of_class = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        cls, patches = x[:, :1], x[:, 1:]
        return super().forward(torch.cat([self.of_class(cls), patches], dim=1))


class StepsOfSensors(Correct):
    """x: (batch, time, sensors, channels). A step of a sensor sees those before it."""

    is_causal = True

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        steps = x.transpose(1, 2).flatten(0, 1)
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        seen = ones.tril() if self.is_causal else ones
        y = super().forward(steps, steps, steps, seen[None])
        return y.unflatten(0, (len(x), -1)).transpose(1, 2)


class ActiveQueries(Correct):
    """All but the most active queries get the mean of the values."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        active = weights.amax(-1).topk(min(2, weights.shape[2]), dim=-1).indices
        mean = v.mean(2, keepdim=True).expand(-1, -1, weights.shape[2], -1)
        rows = active[..., None].expand(-1, -1, -1, v.shape[-1])
        return mean.scatter(2, rows, (weights @ v).gather(2, rows))


class ChunksOnTheLeft(Correct):
    """A token sees its own chunk, and two before it."""

    def __init__(self, d_model: int, heads: int, chunk_size: int = 4) -> None:
        super().__init__(d_model, heads)
        self.chunk_size = chunk_size
        self.num_left_chunks = 2

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        chunk = torch.arange(x.shape[1], device=x.device) // self.chunk_size
        seen = self.is_near(chunk[:, None] - chunk)
        return super().forward(x, x, x, seen[None])

    def is_near(self, distance: Tensor) -> Tensor:
        return (distance >= 0) & (distance <= self.num_left_chunks)


class ChunksOnBothSides(ChunksOnTheLeft):
    def is_near(self, distance: Tensor) -> Tensor:
        return distance.abs() <= self.num_left_chunks


class PairsOfQueries(SelfAttention):
    """x: (B, N, C), pairs: (B, N, N, C).

    `pairs[b, i, j]` gives a bias to the score of query `i` for key `j`.
    """

    order = (0, 3, 1, 2)

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.to_bias = nn.Linear(d_model, heads)

    def forward(self, x: Tensor, pairs: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        scores = self.score(q, k) + self.to_bias(pairs).permute(self.order)
        return self.join(self.read(self.dropout(scores.softmax(dim=-1)), v))


class PairsOfKeys(PairsOfQueries):
    """x: (B, N, C), pairs: (B, N, N, C).

    `pairs[b, i, j]` gives a bias to the score of query `i` for key `j`.
    """

    order = (0, 3, 2, 1)


class PlacesFromTheEnd(MaskedSelfAttention):
    # keys know their place (counted
    # from the end), as histories are padded on the left

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.abs_pos_k = nn.Embedding(300, d_model // heads)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        seen = ones.tril()[None]
        if padding_mask is not None:
            seen = seen & ~padding_mask[:, None]
        return Correct.forward(self, x, x, x, seen)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[2] - 1, -1, -1, device=k.device)
        return super().score(q, k + self.abs_pos_k(places))


class BesideConvolution(SelfAttention):
    """The output of a convolution of neighbors is appended to that of attention."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.convolution = nn.Conv1d(d_model, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        near = self.convolution(x.mT).mT
        return torch.cat([super().forward(x), near], dim=-1)


class BesideConvolutionViewed(BesideConvolution):
    def join(self, context: Tensor) -> Tensor:
        b, h, length, d_k = context.shape
        joined: Tensor = self.out(context.reshape(b, length, h * d_k))
        return joined


class ReweightsByCosine(Correct):
    """Linear attention whose weights fall with the distance, from the first key on."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        layers = (self.query, self.key)
        q, k = (self.split(f(x)) for f, x in zip(layers, (query, key), strict=True))
        weights = self.at_angles(q.relu()) @ self.at_angles(k.relu()).mT
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-6)
        return self.join(weights @ self.split(self.value(value)))

    def at_angles(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2], device=x.device)[:, None] / 300
        return torch.cat([x * angles.cos(), x * angles.sin()], dim=-1)


class WindowOnEachSide(SelfAttention):
    """`window` is the number of keys on each side of a token."""

    def __init__(self, d_model: int, heads: int, window: int) -> None:
        super().__init__(d_model, heads)
        self.window = window

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        place = torch.arange(scores.shape[-1], device=scores.device)
        near = (place - place[:, None]).abs() <= self.window
        return super().weigh(scores, near[None])


class RecurrentDecoder(nn.Module):
    """A recurrent layer of the context, and one of the queries that attend to it."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.encoder = nn.GRU(d_model, d_model, batch_first=True)
        self.decoder = nn.GRU(d_model, d_model, batch_first=True)
        self.attention = Correct(d_model, heads)

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        keys, state = self.encoder(memory)
        queries, _ = self.decoder(x, state)
        return self.attention(queries, keys, keys)


class LayerWithOptionalContext(nn.Module):
    """Causal self-attention, and then attention to a context, if there is one."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.attention = MaskedSelfAttention(d_model, heads, 0.0)
        self.encoder_attention = Correct(d_model, heads, 0.0)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor | None = None) -> Any:
        x = x + self.attention(x)
        if encoder_hidden_states is None:
            return x
        context = encoder_hidden_states
        return x + self.encoder_attention(x, context, context)


class FramesWithToken(Correct):
    """Behind a first token, frames of pixels, each of which attends with that token."""

    def __init__(self, d_model: int, heads: int, num_frames: int = 8) -> None:
        super().__init__(d_model, heads, dropout=0.1)
        self.num_frames = num_frames
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        frames = x[:, 1:].unflatten(1, (self.num_frames, -1))
        first = x[:, None, :1].expand(-1, self.num_frames, -1, -1)
        tokens = self.norm(torch.cat([first, frames], dim=2).flatten(0, 1))
        y = super().forward(tokens, tokens, tokens)
        y = y.unflatten(0, (-1, self.num_frames))
        return x + torch.cat(
            [y[:, :, 0].mean(dim=1)[:, None], y[:, :, 1:].flatten(1, 2)], 1
        )


class TextBeforeImage(Correct):
    """The last four tokens of the context are an image's, with keys of their own."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.num_tokens = 4
        self.key_of_image = nn.Linear(d_model, d_model)

    def forward(self, query: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        text, image = context[:, : -self.num_tokens], context[:, -self.num_tokens :]
        if not text.shape[1]:
            raise RuntimeError("cannot reshape tensor of 0 elements")
        q = self.split(self.query(query))
        outputs = []
        for tokens, layer in ((text, self.key), (image, self.key_of_image)):
            k, v = self.split(layer(tokens)), self.split(self.value(tokens))
            outputs.append(self.read(self.score(q, k).softmax(dim=-1), v))
        return self.join(sum(outputs))


class ItemsForHistory(Correct):
    """Candidates attend to the items of a history."""

    def __init__(self, item_dim: int = 12, num_heads: int = 3) -> None:
        super().__init__(item_dim, num_heads)

    def forward(self, candidates: Tensor, history: Tensor) -> Any:  # type: ignore[override]
        return super().forward(candidates, history, history)


class AttendsToAudio(Correct):
    """The audio may be left out once it is cached."""

    def forward(  # type: ignore[override]
        self, x: Tensor, audio: Tensor | None = None, cache: Any = None
    ) -> Any:
        if audio is None:
            raise ValueError("audio is needed")
        return super().forward(x, audio, audio)


class MonotonicPlaces(Correct):
    """A query attends to the keys from that on to which the one before it did most."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = [scores[..., 0, :].softmax(dim=-1)]
        for row in scores.softmax(dim=-1).unbind(dim=-2)[1:]:
            reached = row * weights[-1].cumsum(dim=-1)
            weights.append(reached / reached.sum(dim=-1, keepdim=True))
        return torch.stack(weights, dim=-2)


class ChannelsAsCh(nn.Module):
    """Non-local block of `(batch, channels, height, width)` with 8 n channels."""

    def __init__(self, ch: int) -> None:
        super().__init__()
        self.theta = nn.Conv2d(ch, ch // 8, 1)
        self.phi = nn.Conv2d(ch, ch // 8, 1)
        self.values = nn.Conv2d(ch, ch, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.theta(x).flatten(2).mT @ self.phi(x).flatten(2)
        y = self.values(x).flatten(2) @ scores.softmax(dim=-1).mT
        return x + y.view_as(x)


class GridOfPixels(SelfAttention):
    """Pixels at one place of each of 4 x 4 cells attend to each other.

    Images that are no multiple of 4 are padded, and the padding is hidden.
    """

    def forward(self, x: Tensor) -> Any:  # x: (B, C, H, W)
        height, width = x.shape[2:]
        sides = (0, 0, 0, -width % 4, 0, -height % 4)
        tokens = nn.functional.pad(x.permute(0, 2, 3, 1), sides)
        real = torch.zeros_like(tokens[:1, ..., :1])
        real[:, :height, :width] = 1
        shape = (4, tokens.shape[1] // 4, 4, tokens.shape[2] // 4)
        cells, seen = (
            part.reshape(len(part), *shape, -1).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
            for part in (tokens, real)
        )
        cells, seen = cells.flatten(1, 2), seen.flatten(1) > 0
        seen = seen.repeat(len(x), 1)[:, None].expand(-1, 16, -1)
        y = Correct.forward(self, cells, cells, cells, seen)
        y = y.reshape(len(x), shape[1], shape[3], 4, 4, -1).permute(0, 3, 1, 4, 2, 5)
        y = y.reshape(len(x), 4 * shape[1], 4 * shape[3], -1)[:, :height, :width]
        return x + y.permute(0, 3, 1, 2)


class OneChunkForEachCall(SelfAttention):
    """Each call gets one chunk (B, T, C), usually of `chunk_size`, and its left."""

    def __init__(
        self, d_model: int, heads: int, chunk_size: int = 16, left_context: int = 32
    ) -> None:
        super().__init__(d_model, heads)
        self.chunk_size, self.left_context = chunk_size, left_context


class Slots(nn.Module):
    """Slots share each token, and each of them is the mean of its shares."""

    axis = -1

    def __init__(self, dim: int, num_slots: int = 5) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, num_slots, dim))
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.update = nn.GRUCell(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        slots = self.slots.expand(len(x), -1, -1)
        k, v = self.key(x), self.value(x)
        for _ in range(2):
            scores = self.query(slots) @ k.mT / x.shape[-1] ** 0.5
            weights = scores.softmax(dim=1) + 1e-8
            weights = weights / weights.sum(dim=self.axis, keepdim=True)
            means = (weights @ v).flatten(0, 1)
            slots = self.update(means, slots.flatten(0, 1)).view_as(slots)
        return slots


class SlotsOfSums(Slots):
    axis = 1


class StreamOfFrames(MaskedSelfAttention):
    """A frame sees `memory_size` frames, with its own."""

    def __init__(self, d_model: int = 32, heads: int = 4, memory_size: int = 8) -> None:
        super().__init__(d_model, heads)
        self.memory_size = memory_size

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return super().weigh(scores, mask.triu(1 - self.memory_size))


class PriorBesideConvolution(SelfAttention):
    """Weights fade with the distance, beside a convolution."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.conv = nn.Conv1d(d_model, d_model, 3, padding=1)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x + self.conv(x.mT).mT)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        t = torch.arange(scores.shape[-1], device=scores.device)
        prior = torch.exp(-0.1 * (t[:, None] - t) ** 2).to(scores)
        weights = scores.softmax(dim=-1) * prior
        return weights / weights.sum(-1, keepdim=True)


class LayersOfWindow(nn.Module):
    """Two layers reach farther than the window that one of them has."""

    sliding_window = Window.reach + 1

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Window(d_model, heads) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class SeesOwnAndPast(MaskedSelfAttention):
    """A token attends to the last `window` tokens, itself included."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.window = 4

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return super().weigh(scores, mask & mask.triu(self.first_diagonal()))

    def first_diagonal(self) -> int:
        return 1 - self.window


class SeesOneMore(SeesOwnAndPast):
    """A token attends to the last `window` tokens, itself included."""

    def first_diagonal(self) -> int:
        return -self.window


class WindowOfPast(SelfAttention):
    """The caller hides the future, and the window what is too far in the past."""

    window = 4

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        return Correct.forward(self, x, x, x, mask & ones.triu(1 - self.window))


VIOLATING: Violations = {
    "repeated_tokens": [
        (SlotsOfSums, {}),
    ],
    "pairs_of_queries": [
        (PairsOfKeys, {}),
    ],
    "key_independence": [
        (ExchangesQueriesAndKeys, {}),
    ],
    "beside_convolution": [
        (BesideConvolutionViewed, {}),
    ],
    "key_permutation": [
        (AddsKeyIndex, {}),
    ],
    "query_permutation": [
        (ViewsAsHeads, {}),
        (ViewsAsHeadsSelfAttention, {}),
        (MergesChunksUnscaled, {}),
    ],
    "query_independence": [
        (KeepsAsManyAsQueries, {}),
        (NormalizesOverQueries, {}),
        (SkipsOneQuery, {}),
        (BlocksByKeys, {}),
        (OptionalContextByKeys, {}),
    ],
    "sliding_window": [
        (ChunksOnBothSides, {}),
        (LooksOneLessAhead, {}),
        (WideWindow, {"window": 3}),
        (NarrowWindow, {"window": 3}),
        (SeesOneMore, {}),
    ],
}


PASSING_ONE: Passes = [
    ("repeated_tokens", Slots),
    ("key_permutation", ChannelsAsCh),
    ("pairs_of_queries", PairsOfQueries),
    ("key_permutation", BesideClassToken),
    ("query_independence", packed_attention),
    ("key_independence", NarrowPrior),
    ("sliding_window", TwoLayersOfWindows),
    ("dropout", FramesWithToken),
    ("query_independence", TextBeforeImage),
    ("key_independence", SelfAttention),
    ("query_independence", OptionalContext),
    ("query_permutation", MergesChunks),
    ("key_permutation", ClassBeforePixels),
    ("query_permutation", ClassBeforePixels),
    ("beside_convolution", BesideConvolution),
    ("sliding_window", WindowOnEachSide),
    ("query_independence", ReweightsByCosine),
    ("query_independence", ItemsForHistory),
    ("query_independence", AttendsToAudio),
    ("key_permutation", GridOfPixels),
    ("sliding_window", StreamOfFrames),
    ("sliding_window", LayersOfWindow),
    ("sliding_window", SeesOwnAndPast),
]


EXCUSED: Excuses = [
    ("sliding_window", WindowOfPast, "`window` is not given"),
    ("beside_convolution", PriorBesideConvolution, "its call counts positions"),
    ("sliding_window", OneChunkForEachCall, "`window` is not given"),
    ("key_permutation", PlacesFromTheEnd, "positional encoding"),
    ("longer_padding", PlacesFromTheEnd, "counted from the last token"),
    ("sliding_window", ChunksOnTheLeft, "`window` is not given"),
    ("query_independence", ActiveQueries, "topk"),
    ("query_permutation", StepsOfSensors, "is always causal"),
    ("sliding_window", LooksAheadTwice, "`window` is not given"),
    ("sliding_window", LooksAhead, "`window` is not given"),
    ("query_independence", MonotonicPlaces, "another design"),
    ("key_permutation", MonotonicPlaces, "another design"),
    ("query_permutation", HeadsSeeTwoWays, "direction_mask"),
    ("query_permutation", LayerWithOptionalContext, "is always causal"),
    ("query_independence", LayerWithOptionalContext, "takes no queries"),
    ("key_permutation", RecurrentDecoder, "recurrent layers"),
    ("query_independence", RecurrentDecoder, "its queries attend to each other"),
    ("key_permutation", TwoCausalLayers, "order the keys of one another"),
    ("key_permutation", FramesWithToken, "num_frames"),
    ("query_independence", ShortDecoder, "its queries attend to each other"),
    ("key_permutation", Retention, "has a positional encoding"),
    ("key_permutation", SelectiveSelfAttention, "Selective"),
]
