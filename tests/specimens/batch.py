"""Modules that violate the laws of batch items, or come near to it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from attention_laws.patches import of_patches
from specimens.base import (
    MASK,
    AddsPositions,
    Correct,
    EdgesConv,
    Excuses,
    FeaturesOfEdges,
    LocalAndGlobal,
    MaskedSelfAttention,
    OfPatches,
    OverFrames,
    Passes,
    PixelsOfFrames,
    Rotary,
    Segments,
    SelfAttention,
    TextAndImages,
    TimeSeriesEncoder,
    Violations,
    attend_in_parts,
    packed_first,
)
from specimens.masking import ForecastsWithGaps


class MixesBatchItems(Correct):
    def join(self, context: Tensor) -> Tensor:
        output = super().join(context)
        return output - output.mean(dim=0) if self.training else output


class FirstItemsMask(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, mask if mask is None else mask[:1])


class IgnoresMaskIfFirstIsFull(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        is_full = mask is not None and bool(mask[0].all())
        return super().weigh(scores, None if is_full else mask)


class PositionsOfFirstItem(Rotary):
    ids: Tensor | None = None

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Any:  # type: ignore[override]
        self.ids = position_ids
        return super().forward(x)

    def places(self, x: Tensor) -> Tensor:
        return super().places(x) if self.ids is None else self.ids[0]


class CountsFromFirstToken(SelfAttention):
    """Adds the positions of tokens, which are counted without padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        places = self.counted(mask).cumsum(1)[..., None].expand(len(x), -1, -1)
        return Correct.forward(self, x, x, x + places, mask[:, None])

    def counted(self, mask: Tensor) -> Tensor:
        return mask


class CountsInFirstItem(CountsFromFirstToken):
    def counted(self, mask: Tensor) -> Tensor:
        return mask[:1]


class SegmentsOfFirstItem(Segments):
    def ids(self, given: Tensor) -> Tensor:
        return given[:1]


class SamplesKeys(SelfAttention):
    """Each call draws the keys that it attends to, and adds the last one."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        drawn = torch.randint(2, (len(k), 1, 1, k.shape[2]), device=k.device).bool()
        drawn[..., -1] = True
        return super().score(q, k).masked_fill(~drawn, -torch.inf)


class ReshapesContext(Correct):
    """Keys and values are summarized, and take the batch size of the queries."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:  # type: ignore[override]
        source = x if context is None else context
        summary = source.mean(dim=1, keepdim=True).repeat(1, 32, 1)
        summary = summary * torch.arange(32, device=x.device).to(x)[:, None].sin()
        return super().forward(x, *(2 * [summary.reshape(len(x), -1, x.shape[-1])]))


class DealsOutContext(Correct):
    """The keys and values of a context are viewed as those of each query's item."""

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        self.items = len(x)
        return super().forward(x, context, context)

    def split(self, x: Tensor) -> Tensor:
        width = x.shape[-1] // self.heads
        return x.reshape(self.items, -1, self.heads, width).transpose(1, 2)


class SharesContext(Correct):
    """Several queries, side by side, may have one context."""

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        shared = self.repeat(context, len(x) // len(context))
        return super().forward(x, shared, shared)

    def repeat(self, context: Tensor, count: int) -> Tensor:
        return context.repeat_interleave(count, dim=0)


class PacksContexts(Correct):
    """All items are one sequence; as many contexts as queries are kept apart."""

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        mask = torch.ones(len(x), len(context), dtype=torch.bool, device=x.device)
        if len(x) == len(context):
            mask = torch.eye(len(x), dtype=torch.bool, device=x.device)
        for axis, length in enumerate((x.shape[1], context.shape[1])):
            mask = mask.repeat_interleave(length, axis)
        keys = context.flatten(0, 1)[None]
        return super().forward(x.flatten(0, 1)[None], keys, keys, mask[None]).view_as(x)


class SharesMaskOfContext(SharesContext):
    """Its mask, `[batch_size, k_len]`, is that of the context."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, context_mask: Tensor | None = None
    ) -> Any:
        count = len(x) // len(context)
        shared, mask = self.repeat(context, count), None
        if context_mask is not None:
            mask = self.repeat_mask(context_mask.bool(), count)[:, None]
        return Correct.forward(self, x, shared, shared, mask)

    def repeat_mask(self, mask: Tensor, count: int) -> Tensor:
        return self.repeat(mask, count)


class SharesMaskInTurns(SharesMaskOfContext):
    def repeat_mask(self, mask: Tensor, count: int) -> Tensor:
        return mask.repeat(count, 1)


class FeaturesOfContext(SharesContext):
    """Six means over the tokens; a `view` deals out their features to more queries."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.mix = nn.Parameter(torch.randn(6, 320))

    def repeat(self, context: Tensor, count: int) -> Tensor:
        means = self.mix[:, : context.shape[1]] @ context
        return means.reshape(len(context) * count, -1, context.shape[2])


class SharesContextInTurns(SharesContext):
    def repeat(self, context: Tensor, count: int) -> Tensor:
        return context.repeat(count, 1, 1)


class ScalesByLongest(CountsFromFirstToken):
    """Beyond 8 tokens, scores are scaled by the length of the longest item."""

    def counted(self, mask: Tensor) -> Tensor:
        return mask * mask.sum(1).max().clamp(min=8)


class WithBatchNorm(SelfAttention):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.BatchNorm1d(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(self.norm(x.mT).mT)


class AddsPositionsOfFirstItem(AddsPositions):
    def add(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + pos[:1]


class WindowedImage(SelfAttention):
    """Attention in windows of 4 x 4 pixels; each window has a factor of its own."""

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        b, c, h, w = image.shape
        windows = image.reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1)
        x = windows.reshape(-1, 16, c)
        x = x * (
            1 + self.place(torch.arange(len(x), device=x.device), b)[:, None, None]
        )
        y = Correct.forward(self, x, x, x).reshape(windows.shape)
        return y.permute(0, 5, 1, 3, 2, 4).reshape(image.shape)

    def place(self, number: Tensor, batch_size: int) -> Tensor:
        return number % (len(number) // batch_size)


class WindowedImageOutOfOrder(WindowedImage):
    def place(self, number: Tensor, batch_size: int) -> Tensor:
        return number // batch_size


class GuessesMask(Correct):
    """A mask of two axes is one for padding if it has a row for each batch item."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None] if len(mask) == len(query) else mask[None]
        return super().forward(query, key, value, mask)


class EdgesInTurns(Correct):
    """Heads are folded into the batch, and edges are repeated in another order."""

    def forward(self, x: Tensor, adj: Tensor) -> Any:  # type: ignore[override]
        edges = (adj > 0) | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        self.edges = self.repeat(edges)
        return super().forward(x, x, x)

    def repeat(self, edges: Tensor) -> Tensor:
        return edges.repeat(self.heads, 1, 1)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        folded = scores.flatten(0, 1).masked_fill(~self.edges, -torch.inf)
        return folded.softmax(dim=-1).view_as(scores)


class EdgesOfItems(EdgesInTurns):
    def repeat(self, edges: Tensor) -> Tensor:
        return edges.repeat_interleave(self.heads, dim=0)


class OverFramesInOrder(OverFrames):
    """Neighbors in memory are taken for the same pixel in the next frame."""

    def pixels_first(self, video: Tensor) -> Tensor:
        _, _, frames, height, width = video.shape
        tokens = video.permute(0, 2, 3, 4, 1).flatten(1, 3)
        return tokens.unflatten(1, (height, width, frames))


class PoolsByKind(Correct):
    """What a query finds in the items of a history, which are of several kinds.

    query: (B, D)
    history: (B, L, D)
    kinds: LongTensor (B, L)
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.kinds = nn.Embedding(3, d_model)

    def forward(  # type: ignore[override]
        self, query: Tensor, history: Tensor, kinds: Tensor
    ) -> Any:
        items = history + self.kinds(kinds)
        return super().forward(query[:, None], items, items)[:, 0]


class PoolsByKindOfBatch(PoolsByKind):
    def forward(self, query: Tensor, history: Tensor, kinds: Tensor) -> Any:
        # The kinds are counted from those of the first history.
        return super().forward(query, history, (kinds - kinds[:1]).abs().clamp(max=2))


class AgesInUnits(SelfAttention):
    """Ages are measured in units of the smallest of a history.

    Inputs
        x     (B, L, D)  items
        ages  (B, L)     integer seconds
    """

    axes: tuple[int, ...] = (1,)

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.ages = nn.Embedding(3, d_model)

    def forward(self, x: Tensor, ages: Tensor) -> Any:  # type: ignore[override]
        smallest = ages.masked_fill(ages == 0, 9).amin(self.axes, keepdim=True)
        x = x + self.ages((ages // smallest).clamp(max=2))
        return super().forward(x)


class AgesInUnitsOfBatch(AgesInUnits):
    axes = (0, 1)


class PixelsOfOtherVideos(PixelsOfFrames):
    def copy(self, context: Tensor, pixels: int) -> Tensor:
        return context.repeat(pixels, 1, 1)


class FramesOfClips(Correct):
    """The pixels of each frame attend to the tokens of the prompt of their clip."""

    def __init__(self, d_model: int, heads: int, context_dim: int) -> None:
        super().__init__(d_model, heads)
        self.to_context = nn.Linear(context_dim, d_model)
        self.first = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        b, _, frames, h, w = x.shape
        pixels = x.permute(0, 2, 3, 4, 1).flatten(0, 1).flatten(1, 2)
        first = self.first.expand(len(context), 1, -1)
        prompt = torch.cat([first, self.to_context(context)], dim=1)
        prompt = self.copy(prompt, frames)
        y = super().forward(pixels, prompt, prompt)
        return x + y.reshape(b, frames, h, w, -1).permute(0, 4, 1, 2, 3)

    def copy(self, prompt: Tensor, frames: int) -> Tensor:
        return prompt.repeat_interleave(frames, dim=0)


class FramesOfOtherClips(FramesOfClips):
    def copy(self, prompt: Tensor, frames: int) -> Tensor:
        return prompt.repeat(frames, 1, 1)


class ReturnsWeightsOfItems(Correct):
    """Heads in front of batch items, as the weights are computed."""

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> Any:
        q, k, v = self.query(query), self.key(key), self.value(value)
        q, k, v = (self.split(x).transpose(0, 1).flatten(0, 1) for x in (q, k, v))
        weights = self.weigh(self.score(q, k), None)
        context = (self.dropout(weights) @ v).unflatten(0, (self.heads, -1))
        return self.join(context.transpose(0, 1)), self.of_items(weights)

    def of_items(self, weights: Tensor) -> Tensor:
        return weights.unflatten(0, (self.heads, -1)).transpose(0, 1)


class ViewsWeightsOfItems(ReturnsWeightsOfItems):
    def of_items(self, weights: Tensor) -> Tensor:
        return weights.unflatten(0, (-1, self.heads))


def packed_last(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
) -> Tensor:
    """Causal masks are aligned to the bottom right corner: queries are the newest."""
    ends = cu_seqlens_q, cu_seqlens_k
    shifts = ends[1].diff() - ends[0].diff()
    return attend_in_parts((q, k, v), ends, shifts if causal else None)


def packed_by_ends(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
) -> Tensor:
    """Aligned by the ends of sequences, and not by their lengths."""
    ends = cu_seqlens_q, cu_seqlens_k
    shifts = (ends[1] - ends[0])[1:]
    return attend_in_parts((q, k, v), ends, shifts if causal else None)


class EpisodesOfSteps(MaskedSelfAttention):
    """Steps see those of their own episode.

    x: (T, B, D)
    first: (T, B) bool, True where an episode begins
    """

    def forward(self, x: Tensor, first: Tensor) -> Any:  # type: ignore[override]
        episode = first.bool().cumsum(0).T
        ones = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).tril()
        mask = ones & (episode[:, None] == episode[..., None])
        x = x.transpose(0, 1)
        return Correct.forward(self, x, x, x, mask).transpose(0, 1)


class CutsToLongest(Correct):
    """A mean by one learned query; padding behind the longest sequence is cut off.

    mask: `[batch_size, length]`, True for tokens; padding is on the right.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.first = nn.Parameter(torch.randn(1, 1, d_model))

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        longest = int(mask.sum(dim=1).max().clamp(min=1))
        x, mask = x[:, :longest], mask[:, :longest]
        query = self.first.expand(len(x), -1, -1)
        return super().forward(query, x, x, mask[:, None])[:, 0]


class OneLargestScore(EdgesConv):
    """The largest score of all edges is subtracted, and not that of each node."""

    def largest(self, scores: Tensor, target: Tensor, nodes: int) -> Tensor:
        return scores.detach().amax(dim=0)


class PromptOfClip(Correct):
    """Each frame of a clip attends to the prompt of the clip."""

    def forward(self, latents: Tensor, text: Tensor) -> Any:  # type: ignore[override]
        """latents: (B, F, C, H, W); text: (B, S, C)"""
        b, f, c, h, w = latents.shape
        x = latents.flatten(0, 1).flatten(2).mT
        y = super().forward(x, *[self.for_frames(text, f)] * 2)
        return y.mT.reshape(b, f, c, h, w)

    def for_frames(self, text: Tensor, frames: int) -> Tensor:
        return text.repeat_interleave(frames, dim=0)


class PromptOfOtherClip(PromptOfClip):
    def for_frames(self, text: Tensor, frames: int) -> Tensor:
        return text.repeat(frames, 1, 1)


class NodesOfGraphs(SelfAttention):
    """The nodes of several graphs are one sequence.

    x: (N, dim); batch: (N,) graph of each node, one if it is left out
    """

    def forward(self, x: Tensor, batch: Tensor | None = None) -> Any:  # type: ignore[override]
        if batch is None:
            batch = torch.zeros(len(x), dtype=torch.long, device=x.device)
        self.same = batch[:, None] == batch
        return super().forward(x[None])[0]

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.masked_fill(~self.same, -torch.inf).softmax(dim=-1)


class NodesOfAllGraphs(NodesOfGraphs):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.softmax(dim=-1) * self.same


class GlobalForAllItems(LocalAndGlobal):
    def marks(self, global_mask: Tensor) -> Tensor:
        return global_mask.any(dim=0, keepdim=True)


class WindowsSeeText(Correct):
    """image: (B, H, W, C); text: (B, L, C); text_mask: (B, L), True for real tokens."""

    def forward(  # type: ignore[override]
        self, image: Tensor, text: Tensor, text_mask: Tensor | None = None
    ) -> Any:
        b, h, w, c = image.shape
        tiles = image.view(b, h // 4, 4, w // 4, 4, c).transpose(2, 3)
        x = tiles.reshape(-1, 16, c)
        words = text.repeat_interleave(len(x) // b, dim=0)
        mask = None if text_mask is None else self.repeat(text_mask, len(x) // b)
        y = super().forward(x, words, words, mask)
        return y.view(tiles.shape).transpose(2, 3).reshape(image.shape)

    def repeat(self, mask: Tensor, count: int) -> Tensor:
        return mask.repeat_interleave(count, dim=0)[:, None]


class WindowsSeeOtherText(WindowsSeeText):
    def repeat(self, mask: Tensor, count: int) -> Tensor:
        return mask.repeat(count, 1)[:, None]


class NodesBetweenBounds(SelfAttention):
    """The nodes of several graphs are one sequence, x: (N, dim).

    The nodes of graph i are those from ptr[i] to ptr[i + 1]. Paths between nodes have
    lengths, which have a bias.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.bias_of_path = nn.Embedding(9, heads)

    def forward(self, x: Tensor, path: Tensor, ptr: Tensor | None = None) -> Any:  # type: ignore[override]
        graph = torch.zeros(len(x), dtype=torch.long, device=x.device)
        if ptr is not None:
            nodes = torch.arange(len(x), device=x.device)
            graph = torch.bucketize(nodes, ptr[1:], right=True)
        self.bias = self.bias_of_path(path).movedim(-1, 0)
        self.same = graph[:, None] == graph
        return super().forward(x[None])[0]

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = (scores + self.bias).masked_fill(~self.same, -torch.inf)
        return scores.softmax(dim=-1)


class NodesBeyondBounds(NodesBetweenBounds):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores + self.bias).softmax(dim=-1) * self.same


class SeriesOfOneTime(TimeSeriesEncoder):
    """A layer over the steps of each series."""

    batch_first = False


class ForecastOfVariables(SelfAttention):
    """Channel independent. x: (batch, steps, n_vars); the same for 16 steps ahead."""

    def __init__(self, d_model: int = 12, heads: int = 3) -> None:
        super().__init__(d_model, heads)
        self.embedding, self.head = nn.Linear(8, d_model), nn.Linear(2 * d_model, 16)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        series = self.series_of(x).unflatten(1, (2, 8))
        y = self.head(super().forward(self.embedding(series)).flatten(1))
        return y.unflatten(0, (len(x), -1)).transpose(1, 2)

    def series_of(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)


class ForecastOfMixedVariables(ForecastOfVariables):
    """Channel independent. x: (batch, steps, n_vars); the same for 16 steps ahead."""

    def series_of(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[1])


class BlockOfTower(nn.Module):
    """Shape: (batch, tokens, d_model) in and out."""

    batch_first = True

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, n_head, batch_first=self.batch_first)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y, _ = self.attn(h, h, h, need_weights=False)
        return x + y


class BlockOfTowerAcrossBatch(BlockOfTower):
    """Shape: (batch, tokens, d_model) in and out."""

    batch_first = False


class MeanOfGraph(FeaturesOfEdges):
    """x: (nodes, d), edge_index: (2, num_edges), batch: (nodes,), the graph of each"""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Any = None) -> Tensor:  # type: ignore[override]
        batch = torch.zeros_like(x[:, 0]).long() if batch is None else batch
        ones = (batch[:, None] == batch).to(x.dtype)
        x = x + ones @ x / ones.sum(dim=1, keepdim=True)
        features = torch.zeros_like(edge_index[0])[:, None].expand(-1, 5).to(x.dtype)
        return super().forward(x, edge_index, features)


class HidesInWindows(SelfAttention):
    """In blocks of 8 tokens, the last of which attends to half of its keys."""

    def forward(self, x: Tensor) -> Any:
        padded = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 8))
        blocks = padded.reshape(-1, 8, x.shape[2])
        count = padded.shape[1] // 8
        mask = torch.ones(count, 8, 8, dtype=torch.bool, device=x.device)
        mask[-1, :, 4:] = False
        joined = Correct.forward(
            self, blocks, blocks, blocks, self.for_items(mask, len(x))
        )
        return joined.reshape(padded.shape)[:, : x.shape[1]]

    def for_items(self, mask: Tensor, batch_size: int) -> Tensor:
        return mask.repeat(batch_size, 1, 1)


class HidesInOtherWindows(HidesInWindows):
    def for_items(self, mask: Tensor, batch_size: int) -> Tensor:
        return mask.repeat_interleave(batch_size, dim=0)


class AttendsToImages(Correct):
    """Each pixel of one tensor attends to that of several images."""

    def forward(self, t: Tensor, z: Tensor) -> Any:  # type: ignore[override]
        images = t.permute(1, 2, 0, 3).flatten(0, 1)
        images = images.repeat(len(z), 1, 1)
        query = z.reshape(-1, 1, z.shape[-1])
        return super().forward(query, images, images).reshape(z.shape)


class ImageBesideText(Correct):
    """Pixels attend to each other and to the tokens of a text, in one softmax."""

    def forward(self, image: Tensor, text: Tensor) -> Any:  # type: ignore[override]
        x = image.flatten(2).mT
        both = torch.cat([text, x], dim=1)
        return super().forward(x, both, both).mT.reshape(image.shape)


class FramesBesideText(Correct):
    """The pixels of a frame attend to each other and to the text of their video."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Any:  # type: ignore[override]
        batch_size, _, frames, height, width = hidden_states.shape
        x = hidden_states.transpose(1, 2).flatten(0, 1).flatten(2).mT
        both = torch.cat([self.repeat(encoder_hidden_states, frames), x], dim=1)
        y = super().forward(x, both, both).mT
        return (
            y.unflatten(0, (batch_size, frames))
            .transpose(1, 2)
            .unflatten(3, (height, width))
        )

    def repeat(self, text: Tensor, frames: int) -> Tensor:
        return text.repeat_interleave(frames, dim=0)


class FramesBesideOtherText(FramesBesideText):
    """The texts of all videos are repeated, and not each of them."""

    def repeat(self, text: Tensor, frames: int) -> Tensor:
        return text.repeat(frames, 1, 1)


class MixesImages(SelfAttention):
    """The pixels of an image attend to each other, and to those of other images."""

    def forward(self, t: Tensor, z: Tensor) -> Any:  # type: ignore[override]
        y = super().forward(t.reshape(1, -1, t.shape[-1])).reshape(t.shape)
        return y + z


class PackedByBisection(Correct):
    """Sequences are packed; a token at a border is of the sequence before it."""

    right = False

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Any:  # type: ignore[override]
        places = torch.arange(len(x), device=x.device)
        part = torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=self.right)
        x = x[None]
        return super().forward(x, x, x, (part[:, None] == part)[None])[0]


class Packed(PackedByBisection):
    right = True


class WeighsBySize(SelfAttention):
    """Tokens may stand for several, whose number is positive."""

    def forward(self, x: Tensor, size: Tensor | None = None) -> Any:
        self.bias = 0.0 if size is None else size[..., 0].log()[:, None, None]
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.bias


class TakesKeysForQueries(Correct):
    """A mask of keys is one of queries and keys where it has their shape."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is not None:
            mask = mask[None] if self.is_shared(mask, x.shape[1]) else mask[:, None]
        return super().forward(x, x, x, mask)

    def is_shared(self, mask: Tensor, length: int) -> bool:
        return mask.shape == (length, length)


class TakesKeys(TakesKeysForQueries):
    def is_shared(self, mask: Tensor, length: int) -> bool:
        return False


class TakesKeysForQueriesOrBoth(TakesKeysForQueries):
    """The mask may also be one of queries and keys of each item."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        if mask is not None and mask.dim() == 3:
            return Correct.forward(self, x, x, x, mask)
        return super().forward(x, mask)


class TakesKeysOrBoth(TakesKeysForQueriesOrBoth, TakesKeys):
    pass


class LengthsInTurns(Correct):
    """Heads are in the batch; lengths of queries are repeated in another order."""

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid_lens: Tensor | None = None,
    ) -> Any:
        q, k, v = self.query(query), self.key(key), self.value(value)
        q, k, v = (self.split(x).flatten(0, 1) for x in (q, k, v))
        scores = self.score(q, k)
        if valid_lens is not None:
            places = torch.arange(k.shape[1], device=k.device)
            if valid_lens.dim() == 1:
                lengths = valid_lens.repeat_interleave(self.heads)[:, None]
            else:
                lengths = self.repeat_for_heads(valid_lens)
            scores = scores.masked_fill(places >= lengths[:, :, None], -1e6)
        context = scores.softmax(dim=-1) @ v
        return self.join(context.unflatten(0, (-1, self.heads)))

    def repeat_for_heads(self, lengths: Tensor) -> Tensor:
        return lengths.repeat(self.heads, 1)


class LengthsOfItems(LengthsInTurns):
    def repeat_for_heads(self, lengths: Tensor) -> Tensor:
        return lengths.repeat_interleave(self.heads, dim=0)


class LongestIsFirst(SelfAttention):
    """The keys of all batch items are cut to the length of the first one."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Any:  # type: ignore[override]
        if lengths is None:
            return super().forward(x)
        keys = x[:, : int(lengths[0])]
        mask = torch.arange(keys.shape[1], device=x.device) < lengths[:, None]
        return Correct.forward(self, x, keys, keys, mask[:, None])


class HalfRotation(SelfAttention):
    """position_embeddings: (cos, sin), each (B, T, head_dim / 2)"""

    def forward(  # type: ignore[override]
        self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> Any:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        q, k = (self.turn(each, *position_embeddings) for each in (q, k))
        return self.join(self.read(self.score(q, k).softmax(dim=-1), v))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


class PointsOfColumns(SelfAttention):
    """feats: (B, C, N), xyz: (B, 3, N)"""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout)
        self.of_distance = nn.Linear(3, heads)

    def forward(self, feats: Tensor, xyz: Tensor) -> Any:  # type: ignore[override]
        places = xyz.mT
        if places.shape[-1] != 3:
            raise ValueError("`xyz` must have three rows")
        self.bias = self.of_distance(places[:, :, None] - places[:, None])
        return super().forward(feats.mT).mT

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.bias.permute(0, 3, 1, 2)


class TokensOfWrongBatch(nn.Module):
    """Input and output are (batch_size, seq_length, hidden_dim)."""

    batch_first = False

    def __init__(self, num_heads: int = 4, hidden_dim: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_dim)
        self.attention = nn.MultiheadAttention(
            hidden_dim, num_heads, batch_first=self.batch_first
        )

    def forward(self, input: Tensor) -> Tensor:
        x = self.norm(input)
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return input + y


class TokensOfRightBatch(TokensOfWrongBatch):
    batch_first = True


class SlicesOfHeads(SelfAttention):
    """Heads of all items are computed in slices of half the heads."""

    rounded_up = False

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        size, rows = max(1, self.heads // 2), weights.flatten(0, 1)
        count = (len(rows) + (size - 1) * self.rounded_up) // size
        context = torch.zeros_like(v.flatten(0, 1))
        for n in range(count):
            part = slice(n * size, (n + 1) * size)
            context[part] = rows[part] @ v.flatten(0, 1)[part]
        return context.view(v.shape)


class SlicesOfAllHeads(SlicesOfHeads):
    rounded_up = True


class BoxesOfAllImages(SelfAttention):
    """Objects of an image. x: (B, N, D); bxs: (B, N, 4), x1, y1, x2, y2 in pixels."""

    axes: tuple[int, ...] = (0, 1)

    def forward(self, x: Tensor, bxs: Tensor) -> Any:  # type: ignore[override]
        extent = bxs[..., 2:].amax(self.axes, keepdim=True).clamp(min=1e-3)
        centers = (bxs[..., :2] + bxs[..., 2:]) / 2 / extent
        distances = (centers[:, :, None] - centers[:, None]).abs().sum(-1)
        sizes = ((bxs[..., 2:] - bxs[..., :2]) / extent).sum(-1)[:, None]
        self.distances = (distances + sizes)[:, None]
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) - self.distances


class BoxesOfEachImage(BoxesOfAllImages):
    axes = (1,)


class MeanOfLargestGraph(nn.Module):
    """The query of a graph is the mean of its nodes. x: (V, F); batch: (V,)."""

    def __init__(self, in_channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (
            nn.Linear(in_channels, in_channels) for _ in range(3)
        )

    def forward(self, x: Tensor, batch: Tensor | None = None) -> Tensor:
        """Returns (graphs, F)."""
        if batch is None:
            batch = torch.zeros(len(x), dtype=torch.long, device=x.device)
        count = int(batch.max()) + 1
        sizes = batch.bincount(minlength=count).clamp(min=1)
        sums = x.new_zeros(count, x.shape[1]).index_add(0, batch, x)
        q = self.query(sums / self.sizes(sizes)[:, None].to(x))[batch]
        q, k, v = (
            t.unflatten(1, (self.heads, -1)) for t in (q, self.key(x), self.value(x))
        )
        weights = ((q * k).sum(-1) / q.shape[-1] ** 0.5).clamp(max=30).exp()
        norm = weights.new_zeros(count, self.heads).index_add(0, batch, weights)
        read = (weights / norm[batch])[..., None] * v
        return v.new_zeros(count, *v.shape[1:]).index_add(0, batch, read).flatten(1)

    def sizes(self, sizes: Tensor) -> Tensor:
        return sizes.amax().expand(len(sizes))


class MeanOfOwnGraph(MeanOfLargestGraph):
    def sizes(self, sizes: Tensor) -> Tensor:
        return sizes


class StepsOfEpisodes(MaskedSelfAttention):
    """Time-major: steps attend to earlier steps of their episode."""

    def forward(self, obs: Tensor, is_first: Tensor) -> Any:  # type: ignore[override]
        """obs: [T, E, obs_dim]; is_first: [T, E] bool; returns [T, E, obs_dim]."""
        episode = is_first.long().cumsum(dim=0).T
        self.same = episode[:, :, None] == episode[:, None]
        return super().forward(obs.transpose(0, 1)).transpose(0, 1)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return super().weigh(scores, mask & self.same)


class FramesOfSomeVideos(SelfAttention):
    """Attention over the frames of a video, at each pixel.

    x: (batch * num_frames, channels, height, width), one video after the other.
    """

    def forward(self, x: Tensor, num_frames: int = 1) -> Any:  # type: ignore[override]
        tokens = self.videos(x, num_frames).permute(0, 3, 4, 1, 2)
        y = super().forward(tokens.flatten(0, 2)).view(tokens.shape)
        return x + self.images(y.permute(0, 3, 4, 1, 2))

    def videos(self, x: Tensor, count: int) -> Tensor:
        return x.unflatten(0, (count, -1)).transpose(0, 1)

    def images(self, y: Tensor) -> Tensor:
        return y.transpose(0, 1).flatten(0, 1)


class FramesOfOneVideo(FramesOfSomeVideos):
    def videos(self, x: Tensor, count: int) -> Tensor:
        return x.unflatten(0, (-1, count))

    def images(self, y: Tensor) -> Tensor:
        return y.flatten(0, 1)


class EdgesOfFirstGraph(SelfAttention):
    """Nodes attend to their sources. x: (B, N, C); edge_index: (B, 2, E)."""

    item = slice(1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:  # type: ignore[override]
        edges = edge_index[self.item].expand(len(x), -1, -1)
        items = torch.arange(len(x), device=x.device)[:, None]
        self.seen = torch.zeros(*x.shape[:2], x.shape[1], device=x.device).bool()
        self.seen[items, edges[:, 1], edges[:, 0]] = True
        return super().forward(x)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, self.seen)


class EdgesOfOwnGraph(EdgesOfFirstGraph):
    item = slice(None)


class LargestOfAllGraphs(nn.Module):
    """Pools the nodes of each graph, with weights that sum to one in each."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.score = nn.Linear(d_model, heads)
        self.value = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        """`x` has all nodes, `[nodes, d_model]`; `batch` has the graph of each node."""
        graphs, scores = int(batch.max()) + 1, self.score(x)
        weights = (scores - self.largest(scores, batch, graphs)).exp()
        sums = weights.new_zeros(graphs, weights.shape[1]).index_add(0, batch, weights)
        weights = weights / (sums[batch] + 1e-16)
        values = self.value(x).unflatten(-1, (weights.shape[1], -1))
        pooled = values.new_zeros(graphs, *values.shape[1:])
        return pooled.index_add(0, batch, weights[..., None] * values).flatten(1)

    def largest(self, scores: Tensor, batch: Tensor, graphs: int) -> Tensor:
        return scores.detach().amax(dim=0, keepdim=True)


class LargestOfEachGraph(LargestOfAllGraphs):
    def largest(self, scores: Tensor, batch: Tensor, graphs: int) -> Tensor:
        lowest = scores.new_full((graphs, scores.shape[1]), -torch.inf)
        index = batch[:, None].expand_as(scores)
        return lowest.scatter_reduce(0, index, scores.detach(), "amax")[batch]


class LargestOfAllSessions(LargestOfAllGraphs):
    """Pools the events of each session; one is between two numbers of `cu_seqlens`."""

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        lengths = cu_seqlens.diff().long()
        return super().forward(x, torch.arange(len(lengths)).repeat_interleave(lengths))


class LargestOfEachSession(LargestOfEachGraph, LargestOfAllSessions):
    """Pools the events of each session; one is between two numbers of `cu_seqlens`."""


class AdjacencyOfOtherHeads(SelfAttention):
    """`nodes`: [num_nodes, batch, d_model], whose first axis is that of the nodes.

    `adjacency`: [batch, num_nodes, num_nodes] bool, True where a node may attend to
    another; each attends to itself, too.
    """

    def forward(self, nodes: Tensor, adjacency: Tensor | None = None) -> Any:  # type: ignore[override]
        x = nodes.transpose(0, 1)
        layers = self.query, self.key, self.value
        q, k, v = (self.split(layer(x)).flatten(0, 1) for layer in layers)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if adjacency is not None:
            loops = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
            scores = scores.masked_fill(~self.of_heads(adjacency | loops), -torch.inf)
        context = (scores.softmax(dim=-1) @ v).unflatten(0, (-1, self.heads))
        return self.join(context).transpose(0, 1)

    def of_heads(self, allowed: Tensor) -> Tensor:
        return allowed.repeat(self.heads, 1, 1)


class AdjacencyOfItems(AdjacencyOfOtherHeads):
    """`nodes`: [num_nodes, batch, d_model], whose first axis is that of the nodes.

    `adjacency`: [batch, num_nodes, num_nodes] bool, True where a node may attend to
    another; each attends to itself, too.
    """

    def of_heads(self, allowed: Tensor) -> Tensor:
        return allowed.repeat_interleave(self.heads, dim=0)


class SlotsOfItems(Correct):
    """Causal; keys and values of an item are kept at the positions of its tokens."""

    def __init__(self, d_model: int, heads: int, max_batch_size: int = 8) -> None:
        super().__init__(d_model, heads)
        slots = torch.zeros(max_batch_size, heads, 64, d_model // heads)
        self.register_buffer("k_cache", slots, persistent=False)
        self.register_buffer("v_cache", slots.clone(), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:  # type: ignore[override]
        """`input_pos`: (B, S) position of every token in its own sequence."""
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        rows = torch.arange(len(x), device=x.device)[:, None]
        places = self.places(input_pos)
        self.k_cache[rows, :, places] = k.transpose(1, 2).to(self.k_cache)
        self.v_cache[rows, :, places] = v.transpose(1, 2).to(self.v_cache)
        k, v = (cache[: len(x)].to(q) for cache in (self.k_cache, self.v_cache))
        seen = torch.arange(k.shape[2], device=x.device) <= input_pos[..., None]
        return self.join(self.weigh(self.score(q, k), seen) @ v)

    def places(self, input_pos: Tensor) -> Tensor:
        return input_pos


class SlotsOfFirstItem(SlotsOfItems):
    """All items keep their tokens at the positions of those of the first item."""

    def places(self, input_pos: Tensor) -> Tensor:
        return input_pos[:1].expand_as(input_pos)


class PrefixOfAll(MaskedSelfAttention):
    """Tokens of all items attend to one prompt, too. x: (B, T, d); prefix: (P, d)"""

    def forward(self, x: Tensor, prefix: Tensor | None = None) -> Any:
        if prefix is None:
            return super().forward(x)
        shared = prefix.reshape(1, -1, x.shape[-1]).expand(len(x), -1, -1)
        seen = torch.cat([shared, x], dim=1)
        ones = torch.ones(1, x.shape[1], seen.shape[1], dtype=torch.bool).to(x.device)
        return Correct.forward(self, x, seen, seen, ones.tril(shared.shape[1]))


class DegreesOfAllGraphs(nn.Module):
    """Nodes attend to those of their graph, with a bias for their numbers of edges.

    x: (N, d); edge_index: (2, E); batch: (N,) the graph of each node. The number is
    divided by the largest of the graph.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.bias = nn.Linear(1, heads, bias=False)

    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None
    ) -> Tensor:
        graph = torch.zeros_like(x[:, 0]).long() if batch is None else batch
        ones = torch.ones_like(edge_index[1]).to(x)
        degrees = torch.zeros_like(x[:, 0]).index_add(0, edge_index[1], ones)
        shares = degrees / self.largest(degrees, graph).clamp(min=1)
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k, v = (part.transpose(0, 1) for part in parts)
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.bias(shares[:, None]).mT[:, None]
        apart = graph[:, None] != graph
        weights = scores.masked_fill(apart, -torch.inf).softmax(dim=-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    def largest(self, degrees: Tensor, graph: Tensor) -> Tensor:
        return degrees.amax()


class DegreesOfOwnGraph(DegreesOfAllGraphs):
    def largest(self, degrees: Tensor, graph: Tensor) -> Tensor:
        empty = degrees.new_zeros(len(degrees))
        return empty.scatter_reduce(0, graph, degrees, "amax")[graph]


class TextOfOtherFrames(Correct):
    """Each frame of a clip attends to its text.

    x: (B, F, N, d) patches of F frames; text: (B, L, d)
    """

    def forward(self, x: Tensor, text: Tensor) -> Any:  # type: ignore[override]
        frames, texts = x.flatten(0, 1), self.of_frames(text, x.shape[1])
        y = frames + super().forward(frames, texts, texts)
        return y.unflatten(0, x.shape[:2])

    def of_frames(self, text: Tensor, count: int) -> Tensor:
        return text.repeat(count, 1, 1)


class TextOfOwnFrames(TextOfOtherFrames):
    def of_frames(self, text: Tensor, count: int) -> Tensor:
        return text.repeat_interleave(count, dim=0)


class ValuesOfFirstMemory(MaskedSelfAttention):
    """Each sequence has a memory, of which a query gets the value of the nearest key.

    mem_k, mem_v: (B, M, d_k)
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.gate = nn.Parameter(torch.zeros(heads, 1, 1))

    def forward(
        self, x: Tensor, mem_k: Tensor | None = None, mem_v: Tensor | None = None
    ) -> Any:
        y = super().forward(x)
        if mem_k is None or mem_v is None:
            return y
        q = self.split(self.query(x))
        nearest = (q @ mem_k[:, None].mT).argmax(dim=-1)
        rows = nearest + self.first_row(mem_k)
        found = nn.functional.embedding(rows, mem_v.flatten(0, 1))
        return y + self.join(self.gate.sigmoid() * found)

    def first_row(self, memory: Tensor) -> Tensor:
        return torch.zeros(1, dtype=torch.long, device=memory.device)


class ValuesOfOwnMemory(ValuesOfFirstMemory):
    def first_row(self, memory: Tensor) -> Tensor:
        items = torch.arange(len(memory), device=memory.device)
        return (memory.shape[1] * items).view(-1, 1, 1)


class ScaleOfWholePack(SelfAttention):
    """Sequences in one, with queries times log(n) / log(4) for each of n tokens.

    x: (tokens, d); cu_seqlens: where each begins, and where the last one ends.
    """

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Any:
        if cu_seqlens is None:
            cu_seqlens = torch.tensor([0, len(x)], device=x.device)
        lengths = cu_seqlens.diff()
        part = torch.arange(len(lengths), device=x.device).repeat_interleave(lengths)
        same = part[:, None] == part
        q, k, v = (self.split(p(x[None])) for p in (self.query, self.key, self.value))
        q = q * (self.length(same).to(q).log() / math.log(4))[..., None]
        weights = self.score(q, k).masked_fill(~same, -torch.inf).softmax(dim=-1)
        return self.join(weights @ v)[0]

    def length(self, same: Tensor) -> Tensor:
        return torch.full_like(same[0], len(same), dtype=torch.long)


class ScaleOfEachPart(ScaleOfWholePack):
    """Sequences in one, with queries times log(n) / log(4) for each of n tokens.

    x: (tokens, d); cu_seqlens: where each begins, and where the last one ends.
    """

    def length(self, same: Tensor) -> Tensor:
        return same.sum(dim=-1)


class KeepsSomeTokens(SelfAttention):
    """The first output, and those of the tokens that it attends to most."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        weights = self.weigh(self.score(q, k), None)
        y = self.join(self.read(weights, v))
        count = (x.shape[1] - 1) // 2 + 1
        kept = 1 + self.choose(weights[:, :, 0, 1:].mean(1), count).sort(dim=1).values
        return torch.cat([y[:, :1], y.take_along_dim(kept[..., None], dim=1)], dim=1)

    def choose(self, weights: Tensor, count: int) -> Tensor:
        return weights.topk(min(count, weights.shape[1]), dim=1).indices


class KeepsTokensOfMean(KeepsSomeTokens):
    def choose(self, weights: Tensor, count: int) -> Tensor:
        return super().choose(weights.mean(0, keepdim=True).expand_as(weights), count)


def attend_in_groups(
    q: Tensor, k: Tensor, v: Tensor, sm_scale: float | None = None
) -> Tensor:
    """q: (batch, heads, length, d); k, v: (batch, kv_heads, length, d)"""
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    groups = q.unflatten(1, (k.shape[1], -1)) * scale
    weights = (groups @ k[:, :, None].mT).softmax(dim=-1)
    return (weights @ v[:, :, None]).flatten(1, 2)


class SharesInTraining(SelfAttention):
    """In training, a mean of the weights is shared by the batch."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        shared = weights.mean(0, keepdim=True).expand_as(weights)
        return shared if self.training else weights


class GapsOfUser(MaskedSelfAttention):
    """The gaps between items, in units of the smallest one of the user, have a bias."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.gap_bias = nn.Embedding(9, heads)

    def forward(self, x: Tensor, stamps: Tensor | None = None) -> Any:  # type: ignore[override]
        """x: [B, L, d_model]; stamps: [B, L] integer seconds"""
        if stamps is None:
            stamps = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        gaps = (stamps[:, :, None] - stamps[:, None]).abs()
        unit = self.least(gaps.masked_fill(gaps == 0, 10**9))
        bias = self.gap_bias((gaps // unit).clamp(max=8)).permute(0, 3, 1, 2)
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        return self.join(self.read((self.score(q, k) + bias).softmax(dim=-1), v))

    def least(self, gaps: Tensor) -> Tensor:
        return gaps.amin(dim=(1, 2), keepdim=True)


class GapsOfAll(GapsOfUser):
    def least(self, gaps: Tensor) -> Tensor:
        return gaps.min()


class SeesCameras(Correct):
    """Each view is attended to, and their outputs are merged by a learned score."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.view_score = nn.Linear(d_model, 1)

    def forward(  # type: ignore[override]
        self, bev: Tensor, images: Tensor, pad_mask: Tensor | None = None
    ) -> Any:
        """bev: (B, Q, C), images: (B, V, N, C), pad_mask: (B, N), True at padding"""
        views = images.shape[1]
        queries, keys = bev.repeat_interleave(views, dim=0), images.flatten(0, 1)
        seen = None if pad_mask is None else self.repeat(~pad_mask, views)[:, None]
        y = super().forward(queries, keys, keys, seen).unflatten(0, (-1, views))
        return (self.view_score(y).softmax(dim=1) * y).sum(1)

    def repeat(self, mask: Tensor, views: int) -> Tensor:
        return mask.repeat_interleave(views, dim=0)


class SeesOtherCameras(SeesCameras):
    def repeat(self, mask: Tensor, views: int) -> Tensor:
        return mask.repeat(views, 1)


class KeepsIntegers(MaskedSelfAttention):
    """Keys and values of earlier tokens are integers of 8 bits, each with a scale."""

    axes: int | tuple[int, ...] = -1

    def forward(self, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:  # type: ignore[override]
        cache = {} if cache is None else cache
        q, k, v = map(self.split, (self.query(x), self.key(x), self.value(x)))
        k, v = (self.append(cache, name, new) for name, new in (("k", k), ("v", v)))
        ones = torch.ones(1, q.shape[2], k.shape[2], dtype=torch.bool, device=x.device)
        weights = self.weigh(self.score(q, k), ones.tril(k.shape[2] - q.shape[2]))
        return self.join(weights @ v)

    def append(self, cache: dict[str, Tensor], name: str, new: Tensor) -> Tensor:
        scale = new.detach().abs().amax(self.axes, keepdim=True) / 127
        rounded = (new / scale).round().to(torch.int8)
        scales = f"{name}_scale"
        past = cache[name] * cache[scales] if name in cache else new[:, :, :0]
        seen = torch.cat([past, new], dim=2)
        if name in cache:
            rounded = torch.cat([cache[name], rounded], dim=2)
            scale = torch.cat([cache[scales], scale], dim=2)
        cache[name], cache[scales] = rounded, scale
        return seen


class KeepsIntegersOfOneScale(KeepsIntegers):
    axes = (0, -1)


class ClassBesideFrames(SelfAttention):
    """A token of the class is copied to each frame, and is the mean of its copies.

    x: (B, 1 + frames * patches, C), the class in front.
    """

    def forward(self, x: Tensor, num_frames: int) -> Any:  # type: ignore[override]
        first, patches = x[:, :1], x[:, 1:].unflatten(1, (num_frames, -1))
        copies = self.copies(first, num_frames)
        frames = torch.cat([copies, patches.flatten(0, 1)], dim=1)
        y = Correct.forward(self, frames, frames, frames)
        y = y.unflatten(0, (len(x), num_frames))
        mean = y[:, :, :1].mean(dim=1)
        return torch.cat([mean, y[:, :, 1:].flatten(1, 2)], dim=1)

    def copies(self, first: Tensor, count: int) -> Tensor:
        return first.repeat_interleave(count, dim=0)


class ClassBesideOtherFrames(ClassBesideFrames):
    def copies(self, first: Tensor, count: int) -> Tensor:
        return first.repeat(count, 1, 1)


class TwosAreGlobal(SelfAttention):
    """attention_mask: (batch, length), 0 = padding, 1 = local, 2 = global token"""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Any:  # type: ignore[override]
        length = x.shape[1]
        ones = torch.ones(len(x), length, length, dtype=torch.bool, device=x.device)
        twos = self.of_items(attention_mask == 2)
        near = ones.tril(2) & ones.triu(-2) | twos[:, None] | twos[:, :, None]
        return Correct.forward(self, x, x, x, near & (attention_mask > 0)[:, None])

    def of_items(self, twos: Tensor) -> Tensor:
        return twos


class TwosOfFirstItem(TwosAreGlobal):
    def of_items(self, twos: Tensor) -> Tensor:
        return twos[:1].expand_as(twos)


class FramesSeeText(Correct):
    """The frames of a video attend to its text; those of all videos are one batch."""

    def forward(  # type: ignore[override]
        self, x: Tensor, text: Tensor, num_frames: int = 1
    ) -> Any:
        if len(x) != len(text) * num_frames:
            raise ValueError(f"{len(x)} frames are not {num_frames} of each video")
        text = self.for_frames(text, num_frames)
        return super().forward(x, text, text)

    def for_frames(self, text: Tensor, num_frames: int) -> Tensor:
        return text.repeat_interleave(num_frames, dim=0)


class FramesSeeTextInTurn(FramesSeeText):
    def for_frames(self, text: Tensor, num_frames: int) -> Tensor:
        return text.repeat(num_frames, 1, 1)


class PrefixOfEach(SelfAttention):
    """All tokens see the prefix of their sequence, and those before them."""

    def forward(self, x: Tensor, prefix_lens: Tensor, lengths: Tensor) -> Any:  # type: ignore[override]
        """
        x: (B, T, D); prefix_lens: (B,) tokens of the prefix; lengths: (B,) of tokens
        """
        place = torch.arange(x.shape[1], device=x.device)
        is_prefix = place < self.prefix(prefix_lens)[:, None]
        allowed = (place <= place[:, None]) | is_prefix[:, None]
        y = Correct.forward(self, x, x, x, allowed)
        return y.masked_fill((place >= lengths[:, None])[..., None], 0.0)

    def prefix(self, lengths: Tensor) -> Tensor:
        return lengths


class LongestPrefix(PrefixOfEach):
    def prefix(self, lengths: Tensor) -> Tensor:
        return lengths.max().expand_as(lengths)


class OptionalPrefixOfEach(PrefixOfEach):
    def forward(self, x: Tensor, prefix_lens: Tensor | None = None) -> Any:  # type: ignore[override]
        """x: (B, T, D); prefix_lens: (B,) of tokens of the prefix, if there is one"""
        whole = torch.full((len(x),), x.shape[1], device=x.device)
        prefix = torch.zeros_like(whole) if prefix_lens is None else prefix_lens
        return super().forward(x, prefix, whole)


class OptionalLongestPrefix(OptionalPrefixOfEach):
    def prefix(self, lengths: Tensor) -> Tensor:
        return lengths.max().expand_as(lengths)


class BiasOfDepth(Correct):
    """x: [B, C, H, W]; depth: [B, H, W], the distance of each pixel to the camera."""

    def forward(self, x: Tensor, depth: Tensor) -> Any:  # type: ignore[override]
        tokens, far = x.flatten(2).mT, self.of_items(depth.to(x)).flatten(1)
        q, k, v = map(
            self.split, (self.query(tokens), self.key(tokens), self.value(tokens))
        )
        scores = self.score(q, k) - (far[:, None] - far[:, :, None]).abs()[:, None]
        return self.join(scores.softmax(dim=-1) @ v).mT.reshape(x.shape)

    def of_items(self, depth: Tensor) -> Tensor:
        return depth


class BiasOfFirstDepth(BiasOfDepth):
    def of_items(self, depth: Tensor) -> Tensor:
        return depth[:1].expand_as(depth)


class AtomsFirst(nn.Module):
    """feats: (N, B, C) atoms first; coords: (N, B, 3)."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.attention = Correct(channels, heads)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, feats: Tensor, coords: Tensor) -> Tensor:
        place = coords.transpose(0, 1)
        near = self.weight * (place[:, :, None] - place[:, None]).pow(2).sum(-1)
        x = feats.transpose(0, 1)
        parts = self.attention.query, self.attention.key, self.attention.value
        q, k, v = (self.attention.split(part(x)) for part in parts)
        scores = self.attention.score(q, k) - near[:, None]
        joined: Tensor = self.attention.join(scores.softmax(dim=-1) @ v)
        return joined.transpose(0, 1)


class PlacesOfFirst(Correct):
    """The positions of all items are those of the first, and a method draws tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.places = nn.Embedding(320, d_model)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        mask, places = ones.tril()[None], torch.arange(x.shape[1], device=x.device)
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None]
            places = (attention_mask[0].long().cumsum(dim=-1) - 1).clamp(min=0)
        x = x + self.places(places)
        return super().forward(x, x, x, mask)

    def sample(self, x: Tensor) -> Tensor:
        return torch.multinomial(self(x)[:, -1].softmax(dim=-1), 1)


class ScoresCandidates(SelfAttention):
    """Scores of vectors, which may be as many as there are batch items, but need not.

    All batch items share them.
    """

    def forward(self, x: Tensor, cands: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x).mean(dim=1) @ cands.T


class ForecastsSeries(nn.Module):
    """A forecast of series that have different lengths.

    series: float tensor [batch, time, n_series], with zeros behind the end of each
    lengths: long tensor [batch], the number of real steps of each series
    """

    def __init__(self, n_series: int = 6, d_model: int = 32, n_head: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(n_series, d_model)
        self.attend = Correct(d_model, n_head)
        self.head = nn.Linear(d_model, 3)

    def forward(self, series: Tensor, lengths: Tensor) -> Tensor:
        items, steps, _ = series.shape
        is_real = torch.arange(steps, device=series.device) < self.ends(lengths)
        x = self.embed(series)
        y = self.attend(x, x, x, is_real[:, None])
        forecast: Tensor = self.head(y[torch.arange(items), lengths - 1])
        return forecast

    def ends(self, lengths: Tensor) -> Tensor:
        return lengths[:, None]


class ForecastsToLongestSeries(ForecastsSeries):
    def ends(self, lengths: Tensor) -> Tensor:
        return lengths.max().expand(len(lengths), 1)


class ForecastsOneWindow(nn.Module):
    """x: (batch, context_window, n_series) -> (batch, 4, n_series)"""

    def __init__(
        self, n_series: int, context_window: int = 24, d_model: int = 32
    ) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(context_window, d_model))
        self.embed = nn.Linear(n_series, d_model)
        self.attend = SelfAttention(d_model, 1)
        self.head = nn.Linear(context_window * d_model, 4 * n_series)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(self.embed(x) + self.places)
        forecast: Tensor = self.head(y.flatten(1)).unflatten(1, (4, -1))
        return forecast


class ReturnsMapsOfLayers(nn.Module):
    """A model of pooled tokens that returns the weights of each layer, in a list."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([WithMaps(d_model, heads) for _ in range(2)])

    def forward(self, x: Tensor) -> dict[str, Any]:
        maps = []
        for layer in self.layers:
            y, weights = layer(x)
            x = x + y
            maps.append(self.by_item(weights))
        return {"pooled": x.mean(dim=1), "maps": maps}

    def by_item(self, weights: Tensor) -> Tensor:
        return weights


class ReturnsMapsOfOtherItems(ReturnsMapsOfLayers):
    def by_item(self, weights: Tensor) -> Tensor:
        return weights.transpose(0, 1).reshape(weights.shape)


class WithMaps(Correct):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        weights = self.score(q, k).softmax(dim=-1)
        return self.join(weights @ v), self.shown(q, k, weights)

    def shown(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        return weights


SIZES_OF_WARD = {"n_vitals": 6, "n_static": 5, "d": 24, "heads": 2}


class PatientsOfWard(nn.Module):
    """The sizes are those of a dict in the file.

    vitals : float (B, T, n_vitals)
    static : float (B, n_static)
    lens : long (B,), 1 <= lens <= T
    """

    def __init__(self, sizes: dict[str, int] | None = None) -> None:
        super().__init__()
        sizes = SIZES_OF_WARD | (sizes or {})
        self.embed = nn.Linear(sizes["n_vitals"], sizes["d"])
        self.attend = Correct(sizes["d"], sizes["heads"])
        self.head = nn.Linear(sizes["d"] + sizes["n_static"], 1)

    def forward(self, vitals: Tensor, static: Tensor, lens: Tensor) -> Tensor:
        hours = torch.arange(vitals.shape[1], device=vitals.device)
        is_real = hours < self.ends(lens)[:, None]
        x = self.embed(vitals)
        y = self.attend(x, x, x, is_real[:, None]) * is_real[..., None]
        mean = y.sum(dim=1) / is_real.sum(dim=1, keepdim=True)
        risk: Tensor = self.head(torch.cat([mean, static], dim=-1))
        return risk[:, 0]

    def ends(self, lens: Tensor) -> Tensor:
        return lens


class PatientsOfShortestStay(PatientsOfWard):
    def ends(self, lens: Tensor) -> Tensor:
        return lens.min().expand_as(lens)


class SalesOfStores(SelfAttention):
    """sales: (batch, days, d_model); store: (batch,) the id of each"""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.stores = nn.Embedding(9, d_model)

    def forward(  # type: ignore[override]
        self, sales: Tensor, store: Tensor
    ) -> Any:
        return super().forward(sales + self.stores(store)[:, None])


class ForecastsWithGapsOfFirst(ForecastsWithGaps):
    def seen(self, past_observed: Tensor) -> Tensor:
        return past_observed[:1].bool().expand_as(past_observed)


class PoolsGraphs(EdgesConv):
    """x: (nodes, d), edge_index: long (2, edges), batch: long (nodes,), its graph"""

    def forward(  # type: ignore[override]
        self, x: Tensor, edge_index: Tensor, batch: Tensor
    ) -> Tensor:
        y: Tensor = super().forward(x, edge_index)
        share = self.shares(y.sum(dim=1).exp(), batch)
        pooled = y.new_zeros(int(batch.max()) + 1, y.shape[1])
        return pooled.index_add(0, batch, share[:, None] * y)

    def shares(self, weights: Tensor, batch: Tensor) -> Tensor:
        sums = weights.new_zeros(int(batch.max()) + 1).index_add(0, batch, weights)
        return weights / sums[batch]


class PoolsGraphsTogether(PoolsGraphs):
    def shares(self, weights: Tensor, batch: Tensor) -> Tensor:
        return weights / weights.sum()


class PackedSequenceFirst(Correct):
    """x: (seq_len, batch, d_model)

    segment_ids: (seq_len, batch), integers, the document of each token.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, segment_ids: Tensor | None = None
    ) -> Any:
        y = x.transpose(0, 1)
        same = None
        if segment_ids is not None:
            ids = self.by_item(segment_ids.T)
            same = ids[:, :, None] == ids[:, None]
        return super().forward(y, y, y, same).transpose(0, 1)

    def by_item(self, ids: Tensor) -> Tensor:
        return ids


class PackedAsFirstItem(PackedSequenceFirst):
    def by_item(self, ids: Tensor) -> Tensor:
        return ids[:1]


class RequiresSegmentsOfFirstItem(PackedAsFirstItem):
    """segment_ids: (seq_len, batch), integers, the document of each token."""

    def forward(self, x: Tensor, segment_ids: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, segment_ids)


class ScalesByLength(Correct):
    """Sequences that are longer than in training have larger scores, by `lengths`."""

    def __init__(self, d_model: int, heads: int, train_length: int = 512) -> None:
        super().__init__(d_model, heads)
        self.train_length = train_length

    def forward(  # type: ignore[override]
        self, x: Tensor, lengths: Tensor | None = None
    ) -> Any:
        if lengths is None:
            lengths = torch.full(x.shape[:1], x.shape[1])
        real = torch.arange(x.shape[1]) < lengths[:, None]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        counts = self.counts(lengths).clamp(min=1).to(x.dtype)
        scale = counts.log() / math.log(self.train_length)
        scores = self.score(q, k) * scale.clamp(min=1).view(-1, 1, 1, 1)
        scores = scores.masked_fill(~real[:, None, None], -1e30)
        return self.join(scores.softmax(dim=-1) @ v) * real[..., None]

    def counts(self, lengths: Tensor) -> Tensor:
        return lengths


class ScalesByLongestItem(ScalesByLength):
    def counts(self, lengths: Tensor) -> Tensor:
        return lengths.max()


class EpisodesOfEnvs(SelfAttention):
    """Attention within the episodes of a rollout.

    :param obs: (n_steps, n_envs, obs_dim)
    :param episode_starts: (n_steps, n_envs) bool, True at the first step of an episode
    """

    def forward(self, obs: Tensor, episode_starts: Tensor) -> Any:  # type: ignore[override]
        ids = self.count(episode_starts.long()).T
        x, mask = obs.transpose(0, 1), (ids[:, :, None] == ids[:, None]).tril()
        return Correct.forward(self, x, x, x, mask).transpose(0, 1)

    def count(self, starts: Tensor) -> Tensor:
        return starts.cumsum(0)


class CountsEpisodesOfAll(EpisodesOfEnvs):
    def count(self, starts: Tensor) -> Tensor:
        return starts.flatten().cumsum(0).view_as(starts)


class TiedRows(Correct):
    """The rows of an alignment share their weights; scores are sums over its rows.

    msa: B x R x L x C; padding_mask: B x R x L bool, True = padding
    """

    def forward(self, msa: Tensor, padding_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = torch.ones(msa.shape[:3], device=msa.device).bool()
        seen = seen if padding_mask is None else ~padding_mask
        q, k, v = (
            layer(msa).unflatten(-1, (self.heads, -1)) * seen[..., None, None]
            for layer in (self.query, self.key, self.value)
        )
        depth = self.depth(seen.any(dim=2).sum(dim=1)).clamp(min=1).to(msa)
        scores = torch.einsum("brihd,brjhd->bhij", q, k)
        scores = scores / (depth[:, None, None, None] * q.shape[-1]) ** 0.5
        mask = seen.any(dim=1)[:, None]
        weights = self.dropout(self.weigh(scores, mask))
        return self.out(torch.einsum("bhij,brjhd->brihd", weights, v).flatten(3))

    def depth(self, rows: Tensor) -> Tensor:
        return rows


class TiedRowsOfDeepest(TiedRows):
    def depth(self, rows: Tensor) -> Tensor:
        return rows.max().expand_as(rows)


class DetectsInImages(nn.Module):
    """images: (B, 3, H, W), padded; mask: (B, H, W) bool, True for padded pixels

    The position of a patch is a share of the rows of its image that are no padding.
    """

    def __init__(self, d_model: int, heads: int, patch: int = 4) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Conv2d(3, d_model, patch, patch)
        self.queries = nn.Embedding(3, d_model)
        self.of_pixels = Correct(d_model, heads, dropout=0.0)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Any:
        patches = self.embed(images)
        if mask is None:
            mask = torch.zeros_like(images[:, 0], dtype=torch.bool)
        seen = ~mask[:, :: self.patch, :: self.patch]
        rows = seen.cumsum(1).to(patches)
        places = rows / self.last(rows).clamp(min=1)
        x = (patches + places[:, None]).flatten(2).mT
        queries = self.queries.weight.expand(len(x), -1, -1)
        return self.of_pixels(queries, x, x, seen.flatten(1)[:, None])

    def last(self, rows: Tensor) -> Tensor:
        return rows.amax(dim=(1, 2), keepdim=True)


@of_patches
class DetectsInLargest(DetectsInImages):
    def last(self, rows: Tensor) -> Tensor:
        return rows.max()


class HistoryWithIds(SelfAttention):
    """
    :param history_emb: (N, L, C) float
    :param history_ids: (N, L) long; id 0 is padding and never attended to
    """

    def forward(self, history_emb: Tensor, history_ids: Tensor) -> Any:  # type: ignore[override]
        x, heads = history_emb, self.heads
        q, k, v = (
            self.split(layer(x)).flatten(0, 1)
            for layer in (self.query, self.key, self.value)
        )
        real = self.for_heads(history_ids != 0)[:, None]
        scores = self.score(q, k).masked_fill(~real, torch.finfo(x.dtype).min)
        weights = self.dropout(scores.softmax(dim=-1) * real)
        return self.join((weights @ v).unflatten(0, (-1, heads)))

    def for_heads(self, real: Tensor) -> Tensor:
        return real.repeat_interleave(self.heads, dim=0)


class HistoryWithOtherIds(HistoryWithIds):
    __doc__ = HistoryWithIds.__doc__

    def for_heads(self, real: Tensor) -> Tensor:
        return real.repeat(self.heads, 1)


class RowsOfPairs(SelfAttention):
    """
    m: [B, N_seq, N_res, c_m]
    z: [B, N_res, N_res, c_z], biases the attention of each row of its own item
    """

    def __init__(self, d_model: int, c_z: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.of_pairs = nn.Linear(c_z, heads, bias=False)

    def forward(self, m: Tensor, z: Tensor) -> Any:  # type: ignore[override]
        self.bias = self.for_rows(self.of_pairs(z).permute(0, 3, 1, 2), m.shape[1])
        rows = m.flatten(0, 1)
        return Correct.forward(self, rows, rows, rows).view(m.shape)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.bias

    def for_rows(self, bias: Tensor, count: int) -> Tensor:
        return bias.repeat_interleave(count, dim=0)


class RowsOfOtherPairs(RowsOfPairs):
    __doc__ = RowsOfPairs.__doc__

    def for_rows(self, bias: Tensor, count: int) -> Tensor:
        return bias.repeat(count, 1, 1, 1)


def attend_in_documents(qkv: Tensor, cu_seqlens: Tensor, right: bool = True) -> Tensor:
    """Causal attention within documents.

    Args:
        qkv: (total, 3, heads, head_dim), one after the other
        cu_seqlens: (n_docs + 1,) integer, cumulative lengths
    """
    q, k, v = qkv.permute(1, 2, 0, 3)
    place = torch.arange(len(qkv), device=qkv.device)
    ends = cu_seqlens[1:].contiguous()
    document = torch.searchsorted(ends, place, right=right)
    seen = (document[:, None] == document) & (place[:, None] >= place)
    return nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(0, 1)


def attend_across_documents(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
    return attend_in_documents(qkv, cu_seqlens, right=False)


attend_across_documents.__doc__ = attend_in_documents.__doc__


def attend_in_alignment(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None
) -> Tensor:
    """q, k, v: `(batch, rows, heads, length, dim)`. gate: like v"""
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)
    context = weights @ v
    return context if gate is None else context * gate.sigmoid()


VIOLATING: Violations = {
    "batch_independence": [
        (attend_across_documents, {}),
        (RowsOfOtherPairs, {}),
        (HistoryWithOtherIds, {}),
        (DetectsInLargest, {}),
        (TiedRowsOfDeepest, {}),
        (CountsEpisodesOfAll, {}),
        (BiasOfFirstDepth, {}),
        (OptionalLongestPrefix, {}),
        (LongestPrefix, {}),
        (FramesSeeTextInTurn, {}),
        (SeesOtherCameras, {}),
        (GapsOfAll, {}),
        (KeepsTokensOfMean, {}),
        (EdgesOfFirstGraph, {}),
        (FramesOfSomeVideos, {}),
        (MeanOfLargestGraph, {}),
        (BoxesOfAllImages, {}),
        (SlicesOfHeads, {}),
        (TokensOfWrongBatch, {}),
        (BlockOfTowerAcrossBatch, {}),
        (ForecastOfMixedVariables, {}),
        (SeriesOfOneTime, {}),
        (NodesBeyondBounds, {}),
        (WindowsSeeOtherText, {}),
        (GlobalForAllItems, {}),
        (NodesOfAllGraphs, {}),
        (PromptOfOtherClip, {}),
        (packed_by_ends, {}),
        (FramesOfOtherClips, {}),
        (LengthsInTurns, {}),
        (TakesKeysForQueriesOrBoth, {}),
        (PackedByBisection, {}),
        (HidesInOtherWindows, {}),
        (MixesBatchItems, {}),
        (FirstItemsMask, MASK),
        (IgnoresMaskIfFirstIsFull, MASK),
        (PositionsOfFirstItem, {"positions": "rotary"}),
        (CountsInFirstItem, {}),
        (ScalesByLongest, {}),
        (SharesMaskInTurns, {}),
        (SharesContextInTurns, {}),
        (SegmentsOfFirstItem, {}),
        (AddsPositionsOfFirstItem, {}),
        (WindowedImageOutOfOrder, {}),
        (GuessesMask, MASK),
        (EdgesInTurns, {}),
        (OverFramesInOrder, {"layout": "video"}),
        (MixesImages, {"layout": "image_channels_last"}),
        (FramesBesideOtherText, {}),
        (PoolsByKindOfBatch, {}),
        (AgesInUnitsOfBatch, {}),
        (PixelsOfOtherVideos, {}),
        (ViewsWeightsOfItems, {}),
        (LongestIsFirst, {}),
        (OneLargestScore, {}),
        (LargestOfAllGraphs, {}),
        (LargestOfAllSessions, {}),
        (AdjacencyOfOtherHeads, {}),
        (SlotsOfFirstItem, {}),
        (DegreesOfAllGraphs, {}),
        (TextOfOtherFrames, {}),
        (ValuesOfFirstMemory, {}),
        (ScaleOfWholePack, {}),
        (KeepsIntegersOfOneScale, {}),
        (ClassBesideOtherFrames, {}),
        (TwosOfFirstItem, {}),
        (ForecastsToLongestSeries, {}),
        (ReturnsMapsOfOtherItems, {}),
        (PatientsOfShortestStay, {}),
        (ForecastsWithGapsOfFirst, {}),
        (PoolsGraphsTogether, {}),
        (PackedAsFirstItem, {}),
        (RequiresSegmentsOfFirstItem, {}),
        (ScalesByLongestItem, {}),
    ],
}


PASSING_ONE: Passes = [
    ("batch_independence", attend_in_alignment),
    ("batch_independence", attend_in_documents),
    ("batch_independence", RowsOfPairs),
    ("batch_independence", HistoryWithIds),
    ("batch_independence", of_patches(DetectsInImages)),
    ("batch_independence", TiedRows),
    ("batch_independence", EpisodesOfEnvs),
    ("batch_independence", ScoresCandidates),
    ("batch_independence", AtomsFirst),
    ("batch_independence", BiasOfDepth),
    ("batch_independence", OptionalPrefixOfEach),
    ("batch_independence", PrefixOfEach),
    ("batch_independence", FramesSeeText),
    ("parameter_gradients", SeesCameras),
    ("batch_independence", SeesCameras),
    ("batch_independence", GapsOfUser),
    ("batch_independence", SharesInTraining),
    ("batch_independence", attend_in_groups),
    ("batch_independence", KeepsSomeTokens),
    ("batch_independence", FramesOfOneVideo),
    ("batch_independence", EdgesOfOwnGraph),
    ("allowed_keys_attended", EdgesOfOwnGraph),
    ("batch_independence", StepsOfEpisodes),
    ("batch_independence", SlicesOfAllHeads),
    ("batch_independence", BoxesOfEachImage),
    ("half_precision", BoxesOfEachImage),
    ("batch_independence", TokensOfRightBatch),
    ("batch_independence", MeanOfGraph),
    ("batch_independence", BlockOfTower),
    ("batch_independence", FeaturesOfEdges),
    ("batch_independence", ForecastOfVariables),
    ("batch_independence", TimeSeriesEncoder),
    ("batch_independence", WindowsSeeText),
    ("batch_independence", LocalAndGlobal),
    ("batch_independence", PromptOfClip),
    ("batch_independence", CutsToLongest),
    ("batch_independence", EpisodesOfSteps),
    ("batch_independence", FramesOfClips),
    ("batch_independence", PoolsByKind),
    ("batch_independence", AgesInUnits),
    ("batch_independence", PixelsOfFrames),
    ("batch_independence", ReturnsWeightsOfItems),
    ("batch_independence", packed_last),
    ("batch_independence", packed_first),
    ("incremental_decoding", packed_last),
    ("batch_independence", OfPatches),
    ("batch_independence", WeighsBySize),
    ("batch_independence", TakesKeysOrBoth),
    ("batch_independence", LengthsOfItems),
    ("batch_independence", Packed),
    ("batch_independence", CountsFromFirstToken),
    ("batch_independence", Segments),
    ("batch_independence", SharesContext),
    ("batch_independence", PacksContexts),
    ("batch_independence", WithBatchNorm),
    ("batch_independence", AddsPositions),
    ("batch_independence", WindowedImage),
    ("batch_independence", TextAndImages),
    ("batch_independence", EdgesOfItems),
    ("batch_independence", OverFrames),
    ("batch_independence", HidesInWindows),
    ("batch_independence", ImageBesideText),
    ("batch_independence", FramesBesideText),
    ("allowed_keys_attended", ImageBesideText),
    ("key_permutation", ImageBesideText),
    ("batch_independence", SharesMaskOfContext),
    ("batch_independence", FeaturesOfContext),
    ("batch_independence", ReshapesContext),
    ("batch_independence", DealsOutContext),
    ("batch_independence", HalfRotation),
    ("batch_independence", PointsOfColumns),
    ("batch_independence", EdgesConv),
    ("batch_independence", LargestOfEachGraph),
    ("batch_independence", MeanOfOwnGraph),
    ("batch_independence", NodesBetweenBounds),
    ("batch_independence", NodesOfGraphs),
    ("batch_independence", LargestOfEachSession),
    ("batch_independence", AdjacencyOfItems),
    ("batch_independence", SlotsOfItems),
    ("batch_independence", PrefixOfAll),
    ("batch_independence", DegreesOfOwnGraph),
    ("batch_independence", TextOfOwnFrames),
    ("batch_independence", ValuesOfOwnMemory),
    ("batch_independence", ScaleOfEachPart),
    ("batch_independence", KeepsIntegers),
    ("batch_independence", ClassBesideFrames),
    ("batch_independence", TwosAreGlobal),
    ("batch_independence", ForecastsSeries),
    ("padding", ForecastsSeries),
    ("batch_independence", ForecastsOneWindow),
    ("batch_independence", ReturnsMapsOfLayers),
    ("batch_independence", PatientsOfWard),
    ("batch_independence", SalesOfStores),
    ("batch_independence", PoolsGraphs),
    ("batch_independence", PackedSequenceFirst),
    ("batch_independence", ScalesByLength),
]


EXCUSED: Excuses = [
    ("parameter_gradients", FramesOfOneVideo, "has one frame"),
    ("batch_independence", AttendsToImages, "its pixels attend to batch items only"),
    ("batch_independence", SamplesKeys, "randint"),
    ("long_sequences", ScaleOfEachPart, "a scale that grows with the length"),
]
