"""Modules that violate the laws of the formula, or come near to it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from specimens.base import (
    MASK,
    BehindPrefix,
    Correct,
    EdgesConv,
    Excuses,
    FeaturesOfEdges,
    HeadRMSNorm,
    HeadsSeeTwoWays,
    MakesCroppedCache,
    MaskedSelfAttention,
    NarrowPrior,
    NormalizedImage,
    Passes,
    RotaryOfDevices,
    SelfAttention,
    TwoStreams,
    Violations,
)


class ReturnsDroppedWeights(Correct):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        self.attn = weights.detach()
        return weights @ v


class ReturnsWeightsBeforeMask(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.attn = scores.detach().softmax(dim=-1)
        return super().weigh(scores, mask)


class WeightsAboveOne(Correct):
    """Its weights are not returned; for later queries, they sum to more than 1."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        more = torch.arange(scores.shape[2], device=scores.device)[:, None]
        return super().weigh(scores, mask) * (1 + more).to(scores)


class NegativeWeights(Correct):
    """Its returned weights sum to 1, and some are negative."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        self.attn = (2 * weights - weights.flip(-1)).detach()
        return weights


def nine_tenths(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A function whose weights sum to 0.9."""
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1)
    return 0.9 * weights @ value


class HidesFirstKey(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        first = torch.arange(scores.shape[-1], device=scores.device) == 0
        return super().weigh(scores.masked_fill(first, -1e4), mask)


class ScalesByWidth(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / math.sqrt(q.shape[-1] * self.heads)


class NonlinearInValues(Correct):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v.tanh()


class Chunks(MaskedSelfAttention):
    """Causal self-attention within chunks of 4 tokens."""

    chunk_size = 4

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        chunk = torch.arange(scores.shape[-1], device=scores.device) // self.chunk_size
        return super().weigh(scores, mask & (chunk == chunk[:, None]))


class CausalUnlessMasked(MaskedSelfAttention):
    """Causal, unless a mask for queries and keys takes the place of causality."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is None:
            return super().forward(x)
        return Correct.forward(self, x, x, x, mask)


def attention_of_heads(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Splits projected queries, keys and values into heads."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return (
        nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    )


def attention_of_new_tokens(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
) -> Tensor:
    """The keys and values of new tokens, if any, replace the last ones."""
    if k is not None and v is not None:
        place = torch.arange(
            k_cache.shape[2] - k.shape[2], k_cache.shape[2], device=k_cache.device
        )
        k_cache, v_cache = k_cache.clone(), v_cache.clone()
        k_cache[:, :, place], v_cache[:, :, place] = k, v
    return nn.functional.scaled_dot_product_attention(q, k_cache, v_cache)


class NoiseInTraining(Correct):
    """Its training is random, also with dropout 0."""

    def join(self, context: Tensor) -> Tensor:
        noise = torch.rand_like(context) if self.training else 0
        return super().join(context + noise)


class NormalizesValues(SelfAttention):
    """A norm for queries and keys is applied to the values, too."""

    parts = 3

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        projected = [
            self.split(layer(x)) for layer in (self.query, self.key, self.value)
        ]
        normed = [nn.functional.normalize(each, dim=-1) for each in projected]
        q, k, v = normed[: self.parts] + projected[self.parts :]
        return self.join(self.read(self.weigh(4 * self.score(q, k), None), v))


class NormalizesQueriesAndKeys(NormalizesValues):
    parts = 2


class ClipsProjections(SelfAttention):
    """The queries, keys and values are clipped, as in MPT and DBRX."""

    clip_qkv = 0.5

    def split(self, x: Tensor) -> Tensor:
        return super().split(x.clamp(-self.clip_qkv, self.clip_qkv))


class OddHeads(Correct):
    """Its path for an odd number of heads has another scale."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (2 if self.heads % 2 else 1)


class CausalOrContext(MaskedSelfAttention):
    """Causal among the tokens; all of a context is attended to."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:
        if context is None:
            return super().forward(x)
        return Correct.forward(self, x, context, context, self.mask_of(x, context))

    def mask_of(self, x: Tensor, context: Tensor) -> Tensor | None:
        return None


class CausalToContext(CausalOrContext):
    def mask_of(self, x: Tensor, context: Tensor) -> Tensor | None:
        shape = 1, x.shape[1], context.shape[1]
        return torch.ones(shape, dtype=torch.bool, device=x.device).tril()


class AttendsByColumns(SelfAttention):
    """The weights are transposed: each column sums to one, not each row."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights.mT @ v


class ApproximateInverse(SelfAttention):
    """A row of weights by an approximate inverse sums up to any number."""

    def iterative_pinv(self, weights: Tensor) -> Tensor:
        z, eye = weights.mT / weights.shape[-1], torch.eye(weights.shape[-1])
        for _ in range(2):
            z = z @ (2 * eye.to(z) - weights @ z)
        return z

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        return weights @ self.iterative_pinv(weights) @ weights


class AttendsOverHeads(SelfAttention):
    """Each token attends to its own heads."""

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.heads, -1)

    def join(self, context: Tensor) -> Tensor:
        joined: Tensor = self.out(context.flatten(2))
        return joined


class AttendsToSlots(nn.Module):
    """Each token attends to learned slots, and to no other token."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, 7, bias=False)
        self.value = nn.Linear(7, d_model, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.value(self.key(self.query(x)).softmax(dim=-1))


class NormalizedImageByColumns(NormalizedImage):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights.mT @ v


class SplitsWeight(nn.Module):
    """A projection whose weight has an axis of heads, as in Flax."""

    def __init__(self, *shape: int, axes: int = 1) -> None:
        super().__init__()
        self.axes = axes
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(x, self.weight, dims=self.axes)


class HeadsInWeights(nn.Module):
    scale = 1.0

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            SplitsWeight(d_model, heads, d_model // heads) for _ in range(3)
        )
        self.out = SplitsWeight(heads, d_model // heads, d_model, axes=2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = self.scale * q @ k.mT / math.sqrt(q.shape[-1])
        y: Tensor = self.out((scores.softmax(dim=-1) @ v).transpose(1, 2))
        return y


class HalfOfHeadsInWeights(HeadsInWeights):
    scale = 0.5


class RequiresOther(Correct):
    """The second argument, of an unknown name, holds the keys."""

    first = 0

    def forward(self, v: Tensor, words: Tensor) -> Any:  # type: ignore[override]
        seen = torch.arange(words.shape[1], device=words.device) >= self.first
        return super().forward(v, words, words, seen[None, None])


class RequiresOtherButFirst(RequiresOther):
    first = 1


class NormsOfTwoStreams(TwoStreams):
    """Each stream has norms of its queries and keys."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.added_query, self.added_key, self.added_value = (
            nn.Linear(d_model, d_model) for _ in range(3)
        )
        norms = [nn.LayerNorm(d_model // heads) for _ in range(4)]
        self.norm_q, self.norm_k, self.norm_added_q, self.norm_added_k = norms

    def forward(self, x: Tensor, other: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (
            torch.cat([self.split(layer(x)), self.split(added(other))], dim=2)
            for layer, added in (
                (self.query, self.added_query),
                (self.key, self.added_key),
                (self.value, self.added_value),
            )
        )
        count = x.shape[1]
        q, k = (
            torch.cat([norm(each[:, :, :count]), added(each[:, :, count:])], dim=2)
            for each, norm, added in (
                (q, self.norm_q, self.norm_added_q),
                (k, self.norm_k, self.norm_added_k),
            )
        )
        y = self.join(self.read(self.weigh(self.score(q, k), None), v))
        return y[:, :count], self.text_out(y[:, count:])


class CombinesWithQuery(nn.Module):
    """As Luong's: the tanh of a layer that gets the context vector and the query."""

    def __init__(self, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.value_proj = nn.Linear(d_model, d_model, bias=False)
        self.combine = nn.Linear(2 * d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = self.dropout((query @ key.mT).softmax(dim=-1))
        both = torch.cat([weights @ self.value_proj(value), query], dim=-1)
        return self.combine(both).tanh()


class Prefix(SelfAttention):
    """Learned keys and values stand before those of the tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.before = nn.Parameter(torch.zeros(2, heads, 3, d_model // heads))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        before = self.before[0].expand(len(k), -1, -1, -1)
        return super().score(q, torch.cat([before, k], dim=2))

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        before = self.before[1].expand(len(v), -1, -1, -1)
        return super().read(weights, torch.cat([before, v], dim=2))


class RectifiesOutput(SelfAttention):
    """Behind a ReLU, many outputs have no gradient."""

    def join(self, context: Tensor) -> Tensor:
        return (super().join(context) - 1).relu()


class ScaleInInitialWeights(SelfAttention):
    """Scores are not divided by the root of the width, but the initial queries are."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        nn.init.normal_(self.query.weight, std=(d_model * d_model / heads) ** -0.5)
        nn.init.normal_(self.key.weight, std=d_model**-0.5)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


class ConvolvesValues(Correct):
    """Beside the padding of a convolution, equal values are not equal any more."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.convolution = nn.Conv1d(d_model, d_model, 3, padding=1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(query, key, self.convolution(value.mT).mT)


class VectorsOverChannels(SelfAttention):
    """Each channel has weights of its own, which a network makes of differences."""

    axis = -1

    def __init__(self, d_model: int, num_neighbors: int | None = None) -> None:
        super().__init__(d_model, 1)
        self.num_neighbors = num_neighbors
        self.network = nn.Sequential(
            nn.Linear(d_model, d_model), nn.ReLU(), nn.Linear(d_model, d_model)
        )

    def forward(self, x: Tensor) -> Any:
        scores = self.network(self.query(x)[:, :, None] - self.key(x)[:, None])
        if self.num_neighbors is not None:
            least = scores.topk(self.num_neighbors, dim=2).values[:, :, -1:]
            scores = scores.masked_fill(scores < least, -1e9)
        weights = scores.softmax(dim=self.axis)
        return self.out((weights * self.value(x)[:, None]).sum(dim=2))


class VectorsOverKeys(VectorsOverChannels):
    axis = 2


class SharpensWithPosition(SelfAttention):
    """Queries are multiplied by a number that grows with their position."""

    floor_scale = 2

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        steps = torch.arange(q.shape[2], device=q.device) // self.floor_scale
        return super().score(q * (1 + steps.log1p()).to(q.dtype)[:, None], k)


class MergedKeys(SelfAttention):
    """Keys and values are four weighted sums of all tokens, as in Linformer."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.merge = nn.Parameter(torch.zeros(4, 320))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, self.merge[:, : k.shape[2]] @ k)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return super().read(weights, self.merge[:, : v.shape[2]] @ v)


class PositiveScores(SelfAttention):
    """Weights are positive scores, and zero for the others."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.clamp(min=0) / scores.shape[-1]


class StartsMaximumAtZero(Correct):
    """A softmax by hand whose maximum is at least zero."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        largest = scores.amax(-1, keepdim=True).clamp(min=0)
        weights = (scores - largest).exp()
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


class NormalizesHeadsOfBoth(SelfAttention):
    """The queries and keys of each head are normalized, with gains."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.q_norm = nn.RMSNorm(d_model // heads)
        self.k_norm = nn.RMSNorm(d_model // heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(y) for y in (self.query(x), self.key(x), self.value(x)))
        q, k, v = self.normalize(q, k, v)
        return self.join(self.weigh(self.score(q, k), None) @ v)

    def normalize(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.q_norm(q), self.k_norm(k), v


class NormalizesKeysAndValues(NormalizesHeadsOfBoth):
    def normalize(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return q, self.q_norm(k), self.k_norm(v)


class NormalizesQueriesAndValues(NormalizesHeadsOfBoth):
    def normalize(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.q_norm(q), k, self.k_norm(v)


class NarrowPriorOfFirst(NarrowPrior):
    """The first key is hidden from all other queries."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores.clone()
        scores[..., 1:, 0] = -1e9
        return super().weigh(scores, mask)


class QueriesOfFeatures(Correct):
    """Queries and a feature map, whose name could be that of a number."""

    def forward(  # type: ignore[override]
        self, queries: Tensor, features: Tensor, padding: Tensor | None = None
    ) -> Any:
        mask = None if padding is None else ~padding[:, None]
        return super().forward(queries, features, features, mask)


class EdgesOfOneMaximum(EdgesConv):
    def largest(self, scores: Tensor, target: Tensor, nodes: int) -> Tensor:
        return scores.detach().amax(dim=0)


class ReadsPastOnly(MaskedSelfAttention):
    """Strictly causal: a token sees those before it, not itself, and a vector."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.rest = nn.Parameter(torch.randn(d_model))

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(each(x)) for each in (self.query, self.key, self.value))
        past = torch.ones_like(self.score(q, k)[0, 0]).tril(-1) > 0
        least = torch.finfo(x.dtype).min
        weights = self.score(q, k).masked_fill(~past, least).softmax(dim=-1)
        context = weights.masked_fill(~past, 0) @ v
        return self.join(context) + self.rest


class DecoderWithInputFeeding(nn.Module):
    """Each step of a recurrent decoder attends to a memory, and begins with its result.

    Returned are the outputs (B, T, D) and the weights (B, T, S).
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2 * d_model, d_model)
        self.key = nn.Linear(d_model, d_model)

    def forward(
        self, x: Tensor, memory: Tensor, memory_lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x: (B, T, D); memory: (B, S, D); memory_lengths: (B,)"""
        lengths = memory.new_full((len(memory),), memory.shape[1]).long()
        lengths = lengths if memory_lengths is None else memory_lengths
        places = torch.arange(memory.shape[1], device=memory.device)
        is_real = places < lengths[:, None]
        context = hidden = x.new_zeros(len(x), x.shape[2])
        outputs, all_weights = [], []
        for token in x.unbind(dim=1):
            hidden = self.cell(torch.cat([token, context], dim=-1), hidden)
            scores = torch.einsum("bd,bsd->bs", hidden, self.key(memory))
            least = torch.finfo(scores.dtype).min
            weights = scores.masked_fill(~is_real, least).softmax(dim=-1)
            context = torch.einsum("bs,bsd->bd", weights, memory)
            outputs.append(hidden + context)
            all_weights.append(weights)
        return torch.stack(outputs, dim=1), torch.stack(all_weights, dim=1)


class GroupsOfQueries(nn.Module):
    """Queries in groups, which share a key; queries and keys are normalized."""

    def __init__(self, dim: int, n_q: int, n_kv: int) -> None:
        super().__init__()
        self.n_q, self.n_kv, d_k = n_q, n_kv, dim // n_q
        self.wq = nn.Linear(dim, n_q * d_k)
        self.wk = nn.Linear(dim, n_kv * d_k)
        self.wv = nn.Linear(dim, n_kv * d_k)
        self.wo = nn.Linear(n_q * d_k, dim)
        self.q_norm, self.k_norm = HeadRMSNorm(d_k), HeadRMSNorm(d_k)

    def forward(self, x: Tensor) -> Any:
        q = self.wq(x).unflatten(-1, (self.n_q, -1))
        k, v = (f(x).unflatten(-1, (self.n_kv, -1)) for f in (self.wk, self.wv))
        q, k, v = self.q_norm(q), *map(self.share, (self.k_norm(k), v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
        return self.wo((weights @ v).transpose(1, 2).flatten(2))

    def share(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.n_q // self.n_kv, dim=2)


class GroupsOfQueriesInTurns(GroupsOfQueries):
    def share(self, x: Tensor) -> Tensor:
        return x.repeat(1, 1, self.n_q // self.n_kv, 1)


class MemoryWithoutGradient(Correct):
    """memory: (B, M, D) states of earlier segments (no gradient flows into them)"""

    def forward(self, x: Tensor, memory: Tensor) -> Any:  # type: ignore[override]
        past = memory.detach()
        return super().forward(x, past, past)


class ClearsRowsOfPadding(MaskedSelfAttention):
    """Returned weights of padded tokens are zero, as their outputs are."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        """attention_mask: (B, N) bool, True = real"""
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        real = real if attention_mask is None else attention_mask
        seen = (real[:, None] & real[:, :, None]).tril()
        weights = self.weigh(self.score(q, k), seen) * seen[:, None]
        return self.join(self.read(weights, v)) * real[..., None], weights


@torch.no_grad()
def nearest(x: Tensor, count: int) -> Tensor:
    """Which tokens are the nearest to each."""
    return torch.cdist(x, x).topk(min(count, x.shape[1]), largest=False).indices


class AttendsToNearest(SelfAttention):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        self.found = nearest(x, 2)
        return super().forward(x)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        far = torch.ones_like(scores[:, 0], dtype=torch.bool).scatter(2, self.found, 0)
        return scores.masked_fill(far[:, None], -torch.inf).softmax(dim=-1)


class GrowsWithLength(SelfAttention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        log_len = math.log(k.shape[2])
        return super().score(q, k) * log_len / math.log(512)


class ContinuesPrompt(Correct):
    """Several continuations of one prompt: tokens see it, and those before them."""

    def forward(self, x: Tensor, prompt: Tensor) -> Any:  # type: ignore[override]
        prompt = prompt.expand(len(x), -1, -1)
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        seen = torch.cat([ones.new_ones(len(ones), prompt.shape[1]), ones.tril()], 1)
        tokens = torch.cat([prompt, x], dim=1)
        return super().forward(x, tokens, tokens, seen[None])


class ReturnsWeightsByHead(Correct):
    """The weights that are returned are those of all batch items, head by head."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        return super().forward(query, key, value, mask), self.weights

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        self.weights = weights.transpose(0, 1).flatten(0, 1)
        return weights


class HidesSumOfZero(SelfAttention):
    """Tokens of zeros are padding."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        is_real = self.total(x) != 0
        return Correct.forward(self, x, x, x, is_real[:, None])

    def total(self, x: Tensor) -> Tensor:
        return x.sum(dim=-1)


class HidesZeros(HidesSumOfZero):
    def total(self, x: Tensor) -> Tensor:
        return x.abs().sum(dim=-1)


class NormsBesidePositions(SelfAttention):
    """A vector of its own is added to the normalized queries, as by Transformer-XL."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.q_norm = nn.LayerNorm(d_model // heads)
        self.k_norm = nn.LayerNorm(d_model // heads)
        self.u = nn.Parameter(torch.zeros(d_model // heads))

    def forward(self, x: Tensor, pos_emb: Tensor) -> Any:  # type: ignore[override]
        self.of_places = self.split(pos_emb[:, None])
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q = self.q_norm(q)
        return super().score(q + self.u, self.k_norm(k)) + q @ self.of_places.mT


class DividesByWidth(SelfAttention):
    """Scores are divided by the width of a head (muP), not by its square root."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q / q.shape[-1] @ k.mT


class MixesHeadsBehind(SelfAttention):
    """Returns the output and the coefficients with which the values are summed."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.proj_w = nn.Linear(heads, heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        weights = self.score(q, k).softmax(dim=-1)
        mixed = self.proj_w(weights.movedim(1, -1)).movedim(-1, 1)
        return self.join(self.read(mixed, v)), self.shown(weights, mixed)

    def shown(self, weights: Tensor, mixed: Tensor) -> Tensor:
        return mixed


def attend_with_one_more(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query: (B, H, L, E), key, value: (B, H, S, E)"""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return softmax_plus_one(scores) @ value


def softmax_plus_one(scores: Tensor) -> Tensor:
    zero = torch.zeros_like(scores[..., :1])
    return torch.cat([zero, scores], dim=-1).softmax(dim=-1)[..., 1:]


class SeesAhead(Correct):
    """Causal, but for three tokens that are seen in advance."""

    lookahead = 3

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        return super().forward(x, x, x, ones.tril(self.lookahead)[None])


def attend_by_heads(
    query: Tensor, key: Tensor, value: Tensor, num_heads: int = 4
) -> Tensor:
    """query, key, value: (batch, length, dim)"""
    q, k, v = (
        x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (query, key, value)
    )
    y = nn.functional.scaled_dot_product_attention(q, k, v)
    return y.transpose(1, 2).flatten(2)


class WaitKAttention(Correct):
    """Query t has read the first t + 3 tokens of the source."""

    def forward(self, x: Tensor, source: Tensor) -> Any:  # type: ignore[override]
        ones = torch.ones(
            x.shape[1], source.shape[1], dtype=torch.bool, device=x.device
        )
        return super().forward(x, source, source, ones.tril(2)[None])


class DetachedMemory(SelfAttention):
    """No gradient flows into the memory, which has the tokens before `x`."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:  # type: ignore[override]
        keys = x if memory is None else torch.cat([memory.detach(), x], dim=1)
        ones = torch.ones(x.shape[1], keys.shape[1], dtype=torch.bool, device=x.device)
        seen = ones.tril(keys.shape[1] - x.shape[1])
        return Correct.forward(self, x, keys, keys, seen[None])


class BandOfFrames(Correct):
    """A frame looks at 16 frames of history, and has a look-ahead of 3 frames."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        t = torch.arange(x.shape[1], device=x.device)
        ahead = t - t[:, None]
        return super().forward(x, x, x, ((ahead <= 3) & (ahead >= -16))[None])


class QueriesOfMap(Correct):
    """Queries and a feature map.

    queries: (B, N, D)
    features: (B, M, D)
    """

    def forward(self, queries, features, padding=None):  # type: ignore[no-untyped-def, override]
        mask = None if padding is None else ~padding[:, None]
        return super().forward(queries, features, features, mask)


class KeyNormOfContext(Correct):
    """A norm of the keys, which are in one tensor with the values."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.key_norm = nn.LayerNorm(d_model // heads)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        both = torch.stack([self.split(self.key(key)), self.split(self.value(value))])
        k, v = self.normalize(both)
        q = self.split(self.query(query))
        return self.join(self.weigh(self.score(q, k), None) @ v)

    def normalize(self, both: Tensor) -> tuple[Tensor, Tensor]:
        return self.key_norm(both[0]), both[1]


class KeyNormOfBoth(KeyNormOfContext):
    def normalize(self, both: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.key_norm(both)
        return k, v


class GroupedFused(nn.Module):
    """Queries, then the fewer keys and values, by one projection."""

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = n_heads, n_kv_heads
        self.qkv = nn.Linear(d_model, d_model // n_heads * (n_heads + 2 * n_kv_heads))
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:
        groups = self.heads // self.kv_heads
        split = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = split.transpose(1, 2).split(sizes, dim=1)
        k, v = k.repeat_interleave(groups, dim=1), self.for_queries(v, groups)
        weights = (q / math.sqrt(q.shape[-1]) @ k.mT).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))

    def for_queries(self, v: Tensor, groups: int) -> Tensor:
        return v.repeat_interleave(groups, dim=1)


class GroupedFusedInTurns(GroupedFused):
    def for_queries(self, v: Tensor, groups: int) -> Tensor:
        return v.repeat(1, groups, 1, 1)


class Head(nn.Module):
    """One head, with projections of its own."""

    def __init__(self, d_model: int, d_k: int) -> None:
        super().__init__()
        self.query = nn.Linear(d_model, d_k)
        self.key = nn.Linear(d_model, d_k)
        self.value = nn.Linear(d_model, d_k)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        weights = (q @ k.mT / math.sqrt(self.width(q, x))).softmax(dim=-1)
        context: Tensor = weights @ v
        return context

    def width(self, q: Tensor, x: Tensor) -> int:
        return q.shape[-1]


class ListOfHeads(nn.Module):
    kind = Head

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        heads = [self.kind(d_model, d_model // num_heads) for _ in range(num_heads)]
        self.heads = nn.ModuleList(heads)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class HeadScaledByModelWidth(Head):
    def width(self, q: Tensor, x: Tensor) -> int:
        return x.shape[-1]


class ListOfHeadsScaledByWidth(ListOfHeads):
    kind = HeadScaledByModelWidth


class OverlappingWindows(SelfAttention):
    """Windows of 8 tokens share 3 with the next; their outputs have a mean."""

    def forward(self, x: Tensor) -> Any:
        length = x.shape[1]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        context, counts = torch.zeros_like(q), q.new_zeros(length, 1)
        for start in range(0, max(1, length - 3), 5):
            part = slice(start, start + 8)
            weights = self.score(q[:, :, part], k[:, :, part]).softmax(dim=-1)
            context[:, :, part] += weights @ v[:, :, part]
            counts[part] += 1
        return self.join(self.share(context, counts))

    def share(self, context: Tensor, counts: Tensor) -> Tensor:
        return context / counts


class AddsOverlappingWindows(OverlappingWindows):
    def share(self, context: Tensor, counts: Tensor) -> Tensor:
        return context


class OfEdges(nn.Module):
    """Attention in a graph: the weights of the edges to a node sum to one."""

    end = 1

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.source, self.target = (nn.Linear(out_channels, 1) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        h = self.lin(x)
        scores = torch.tanh(self.source(h)[source] + self.target(h)[target]).exp()
        sums = torch.zeros(len(x), 1).to(h).index_add(0, edge_index[self.end], scores)
        weights = scores / (sums[edge_index[self.end]] + 1e-9)
        return torch.zeros_like(h).index_add(0, target, weights * h[source])


class SumsOverTargets(OfEdges):
    end = 0


class RoundsKeys(MaskedSelfAttention):
    """Keys are rounded as in a cache of few bits, with straight gradients."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, self.fake_quantize(k))

    def fake_quantize(self, k: Tensor) -> Tensor:
        scale = k.detach().abs().amax(dim=-1, keepdim=True) / 127 + 1e-8
        return k + (torch.round(k / scale) * scale - k).detach()


class NearbyFrames(Correct):
    """Chunks of 4 frames, which see the chunk before them, too, in both directions."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        chunk_index = torch.arange(x.shape[1], device=x.device) // 4
        ages = chunk_index[:, None] - chunk_index
        return super().forward(x, x, x, ((ages == 0) | (ages == 1))[None])


def attention_to_cache(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """Causal attention of the last tokens of a cache, of which `lengths` are filled."""
    q_len, k_len = query.shape[-2], key.shape[-2]
    if lengths is None:
        lengths = torch.full((len(query),), k_len, device=query.device)
    last = lengths[:, None] - q_len + torch.arange(q_len, device=query.device)
    visible = torch.arange(k_len, device=query.device) <= last[:, None, :, None]
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1).masked_fill(~visible, 0) @ value


class AssignsTokens(Correct):
    """Each key chooses one query, with the gradients of a softmax over the queries."""

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self.query(query), self.key(key), self.value(key)
        q, k, v = (self.split(x) for x in (q, k, v))
        soft = self.score(q, k).softmax(dim=-2)
        choice = soft.argmax(dim=-2, keepdim=True)
        hard = torch.zeros_like(soft).scatter(-2, choice, 1.0)
        assignment = hard + soft - soft.detach()
        weights = assignment / assignment.sum(dim=-1, keepdim=True).clamp(min=1)
        return self.join(self.read(weights, v)), assignment


class MeansOfHyperbolicPoints(SelfAttention):
    """Values are points of a hyperboloid, whose means are projected on it."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        mean = weights @ self.exp_map(v)
        square = mean[..., :1].square() - mean[..., 1:].square().sum(-1, keepdim=True)
        return (mean / square.clamp(min=1e-6).sqrt())[..., 1:]

    def exp_map(self, v: Tensor) -> Tensor:
        length = v.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        radius = (length / 2).tanh()
        return torch.cat([radius.cosh(), radius.sinh() * v / length], dim=-1)


class BondsOfAtoms(SelfAttention):
    """bonds: (B, N, N) kinds of bonds, 0 where there is none; atoms see themselves."""

    def forward(self, x: Tensor, bonds: Tensor) -> Any:  # type: ignore[override]
        if bonds.is_floating_point():
            raise TypeError("`bonds` must be integers")
        mask = (bonds > 0) | torch.eye(x.shape[1], device=x.device).bool()
        return Correct.forward(self, x, x, x, mask)


class LogOfCount(SelfAttention):
    """Scores are multiplied with log(n) / log(n_usual), with n tokens."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (math.log(max(2, k.shape[2])) / math.log(32))


class SendersAndReceivers(nn.Module):
    """Messages go from `senders` to `receivers`, integers (n_edges,)."""

    def __init__(self, node_size: int, edge_size: int, n_heads: int = 4) -> None:
        """Nodes (n_nodes, node_size); features of edges (n_edges, edge_size)."""
        super().__init__()
        self.heads = n_heads
        self.query, self.key, self.value = (
            nn.Linear(node_size, node_size) for _ in range(3)
        )
        self.bias = nn.Linear(edge_size, n_heads)
        self.out = nn.Linear(node_size, node_size)

    def forward(
        self, nodes: Tensor, senders: Tensor, receivers: Tensor, edges: Tensor
    ) -> Tensor:
        """edges: (n_edges, edge_size)."""
        q, k, v = (
            part(nodes).unflatten(-1, (self.heads, -1))
            for part in (self.query, self.key, self.value)
        )
        scores = (q[receivers] * k[senders]).sum(-1) / q.shape[-1] ** 0.5
        weights = (scores + self.bias(edges)).clamp(max=30).exp()
        sums = torch.zeros_like(q[..., 0]).index_add(0, receivers, weights)
        weights = weights / sums[receivers]
        read = weights[..., None] * v[senders]
        joined: Tensor = self.out(
            torch.zeros_like(v).index_add(0, receivers, read).flatten(1)
        )
        return joined


class WidthsInLetters(nn.Module):
    # Widths of the inputs X and M, and of the output.
    def __init__(self, dX: Any, dM: Any, dY: Any, h: int = 4) -> None:  # noqa: N803
        super().__init__()
        self.q, self.k, self.v = (
            nn.Parameter(torch.randn(d, h, 4) * d**-0.5) for d in (dX, dM, dM)
        )
        self.o = nn.Parameter(torch.randn(h, 4, dY) * (4 * h) ** -0.5)

    def forward(self, X: Tensor, M: Tensor) -> Tensor:  # noqa: N803
        # X: b n dX
        # M: b m dM
        q = torch.einsum("bnx,xhd->bhnd", X, self.q)
        k, v = (torch.einsum("bmx,xhd->bhmd", M, p) for p in (self.k, self.v))
        weights = (q @ k.mT / 2).softmax(dim=-1)
        return torch.einsum("bhnm,bhmd,hdy->bny", weights, v, self.o)


class AtomsWithinCutoff(SelfAttention):
    """Pairs further apart than 5 do not see each other. `xyz`: batch, atoms, 3."""

    def forward(self, feats: Tensor, xyz: Tensor, is_atom: Tensor) -> Any:  # type: ignore[override]
        squares = (xyz[:, :, None] - xyz[:, None]).square().sum(dim=-1)
        self.seen = (squares < 25) & is_atom[:, None].bool()
        return super().forward(feats)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, self.seen)


def break_stick(
    q: Tensor, k: Tensor, v: Tensor, attend_current: bool = False
) -> Tensor:
    """Causal attention that breaks a stick, `[batch, heads, length, features]`."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    seen = ones.tril(0 if attend_current else -1)
    rest = nn.functional.logsigmoid(-scores).masked_fill(~seen, 0.0)
    after = rest.flip(-1).cumsum(-1).flip(-1) - rest
    taken = (nn.functional.logsigmoid(scores) + after).exp().masked_fill(~seen, 0.0)
    return taken @ v


class DividedByLayers(SelfAttention):
    """Scores are divided by sqrt(head size), and also by `layer_idx` + 1."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) / 4


class RoundedValues(SelfAttention):
    """Values are rounded, as those of a quantized cache."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        scale = v.detach().abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / 7
        fake_quantized = v + ((v / scale).round() * scale - v).detach()
        return super().read(weights, fake_quantized)


class MaximalUpdate(SelfAttention):
    """Maximal update parametrization: scores are divided by the width of a head."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q / q.shape[-1] @ k.mT


def attend_with_scale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention to (..., length, features).

    mask: bool, broadcastable to (..., queries, keys), True = may attend
    scale: defaults to features ** -0.5

    Queries that may attend to nothing return 0.
    """
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None:
        return scores.softmax(dim=-1) @ v
    least = torch.finfo(scores.dtype).min
    return scores.masked_fill(~mask, least).softmax(dim=-1) * mask @ v


class ReturnsWeightsByFlag(Correct):
    """Causal; returns the weights if it is built so, or else None."""

    def __init__(
        self, d_model: int, heads: int, output_attention: bool = False
    ) -> None:
        super().__init__(d_model, heads)
        self.output_attention = output_attention

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Any:  # type: ignore[override]
        layers = zip(
            (self.query, self.key, self.value), (queries, keys, values), strict=True
        )
        q, k, v = (self.split(layer(x)) for layer, x in layers)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril().to(q.device)
        context = nn.functional.scaled_dot_product_attention(q, k, v, seen)
        weights = (
            self.weights(self.score(q, k), seen) if self.output_attention else None
        )
        return self.join(context), weights

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)


class ReturnsUnmaskedByFlag(ReturnsWeightsByFlag):
    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        return scores.softmax(dim=-1)


class MultipliesByInverse(SelfAttention):
    """The scores are multiplied by 1 / d_k, and not by 1 / sqrt(d_k)."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / q.shape[-1]


class AddsProjectedQuery(Correct):
    """The projected query is added to the context; an activation is behind the last."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        q, k, v = self.query(query), self.key(key), self.value(value)
        heads = [self.split(x) for x in (q, k, v)]
        weights = self.score(*heads[:2]).softmax(dim=-1)
        y = q + (weights @ heads[2]).transpose(1, 2).flatten(2)
        return y + nn.functional.relu(self.out(y))


class ReturnsMaps(Correct):
    """The mask is [batch_size, k_len], True = may attend; returns weights if asked."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        context: Tensor,
        mask: Tensor | None = None,
        return_maps: bool = False,
    ) -> Any:
        layers = self.query, self.key, self.value
        inputs = x, context, context
        q, k, v = (self.split(f(t)) for f, t in zip(layers, inputs, strict=True))
        seen = None if mask is None else mask[:, None, None]
        y = nn.functional.scaled_dot_product_attention(q, k, v, seen)
        maps = self.maps(self.score(q, k), seen) if return_maps else None
        return self.join(y), maps

    def maps(self, scores: Tensor, seen: Tensor | None) -> Tensor:
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        return scores.softmax(dim=-1)


class ReturnsUnmaskedMaps(ReturnsMaps):
    def maps(self, scores: Tensor, seen: Tensor | None) -> Tensor:
        return scores.softmax(dim=-1)


class DrawsWeightsAgain(Correct):
    """The returned weights are dropped out once more; named as in Joey NMT."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout)
        self.q_layer, self.k_layer, self.v_layer = self.query, self.key, self.value
        self.output_layer = self.out
        del self.query, self.key, self.value, self.out

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        layers = self.q_layer, self.k_layer, self.v_layer
        inputs = query, key, value
        q, k, v = (self.split(f(x)) for f, x in zip(layers, inputs, strict=True))
        weights = self.weigh(self.score(q, k), None)
        used = self.dropout(weights)
        output = self.output_layer((used @ v).transpose(1, 2).flatten(2))
        return output, self.returned(weights, used)

    def returned(self, weights: Tensor, used: Tensor) -> Tensor:
        return self.dropout(weights)


class ReturnsDrawnWeights(DrawsWeightsAgain):
    def returned(self, weights: Tensor, used: Tensor) -> Tensor:
        return used


def attend_by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    kv_lens: Tensor | None = None,
    block_size: int = 64,
    rescale: bool = True,
) -> Tensor:
    """q, k, v: (batch, heads, length, d). The queries are the last of each sequence.

    sinks: (heads,) scores beside those of the keys.
    """
    if kv_lens is None:
        kv_lens = torch.full((len(k),), k.shape[2], device=q.device)
    lens = kv_lens.view(-1, 1, 1)
    places = lens - q.shape[2] + torch.arange(q.shape[2], device=q.device)[:, None]
    largest = q.new_full((*q.shape[:3], 1), torch.finfo(q.dtype).min)
    total, y = torch.zeros_like(largest), torch.zeros_like(v[:, :, :1] + 0 * q[..., :1])
    for start in range(0, k.shape[2], block_size):
        part = slice(start, start + block_size)
        keys = torch.arange(k.shape[2], device=q.device)[part]
        seen = ((keys < lens) & (keys <= places))[:, None]
        scores = q @ k[:, :, part].mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~seen, torch.finfo(q.dtype).min)
        larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights = (scores - larger).exp() * seen
        factor = (largest - larger).exp()
        total = total * (factor if rescale else 1) + weights.sum(-1, keepdim=True)
        y, largest = y * factor + weights @ v[:, :, part], larger
    if sinks is not None:
        total = total + (sinks[:, None, None] - largest).exp()
    return y / total.clamp_min(torch.finfo(q.dtype).tiny)


def attend_by_blocks_unscaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    kv_lens: Tensor | None = None,
    block_size: int = 64,
) -> Tensor:
    """q, k, v: (batch, heads, length, d). The queries are the last of each sequence."""
    return attend_by_blocks(q, k, v, sinks, kv_lens, block_size, rescale=False)


class AttendsToMaps(Correct):
    """Queries attend to the pixels of a list of maps (B, C, H, W)."""

    def __init__(self, d_model: int, heads: int, num_levels: int = 3) -> None:
        super().__init__(d_model, heads)
        self.levels = nn.Parameter(torch.randn(num_levels, d_model))

    def forward(self, query: Tensor, maps: list[Tensor]) -> Any:  # type: ignore[override]
        parts = [
            one.flatten(2).mT + e for e, one in zip(self.levels, maps, strict=False)
        ]
        tokens = torch.cat(parts, dim=1)
        return super().forward(query, tokens, tokens)


class ReadsPassages(Correct):
    """question: (B, T, d), passages: (B, P, N, d)

    passage_mask: (B, P, N), True = token
    """

    def forward(  # type: ignore[override]
        self, question: Tensor, passages: Tensor, passage_mask: Tensor | None = None
    ) -> Any:
        tokens = passages.flatten(1, 2)
        seen = None if passage_mask is None else passage_mask.flatten(1)[:, None]
        return super().forward(question, tokens, tokens, seen)


class TextAndFrames(Correct):
    """Text and frames have widths of their own."""

    def __init__(self, text_dim: int = 64, frame_dim: int = 48, heads: int = 4) -> None:
        super().__init__(text_dim, heads, 0.0)
        self.norm = nn.LayerNorm(frame_dim)
        self.key, self.value = (nn.Linear(frame_dim, text_dim) for _ in range(2))

    def forward(self, text: Tensor, frames: Tensor) -> Any:  # type: ignore[override]
        frames = self.norm(frames)
        return super().forward(text, frames, frames)


class FactorsOfAttention(SelfAttention):
    """A softmax of the queries over channels, and one of the keys over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        y: Tensor = self.join(q.softmax(dim=-1) @ (k.softmax(dim=2).mT @ v))
        return y


class NewestOfContext(MaskedSelfAttention):
    """Causal; x are the newest tokens of the context, which is x by default."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:
        context = x if context is None else context
        shape = 1, x.shape[1], context.shape[1]
        ones = torch.ones(shape, dtype=torch.bool, device=x.device)
        return Correct.forward(
            self, x, context, context, ones.tril(shape[2] - shape[1])
        )


class RoundsToBytes(MaskedSelfAttention):
    """Keys and values are rounded to 8 bits, in units of the largest of each token."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        del self.query, self.key, self.value
        self.qkv = nn.Linear(d_model, 3 * d_model)

    def forward(self, x: Tensor) -> Any:
        q, k, v = map(self.split, self.qkv(x).chunk(3, dim=-1))
        k, v = self.rounded(k), self.rounded(v)
        future = torch.ones_like(x[0] @ x[0].mT, dtype=torch.bool).triu(1)
        scores = self.score(q, k).masked_fill(future, -torch.inf)
        return self.join(scores.softmax(dim=-1) @ v)

    def rounded(self, x: Tensor) -> Tensor:
        unit = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-8) / 127
        return (x / unit).round().to(torch.int8) * unit


class CapsProducts(SelfAttention):
    """Scores are limited in front of their scale; there is no window by default."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        query_pre_attn_scalar: int,
        softcapping: float = 20.0,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__(d_model, heads)
        self.scale, self.softcapping = query_pre_attn_scalar**-0.5, softcapping
        self.sliding_window = sliding_window

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return self.cap(q @ k.mT) * self.scale

    def cap(self, scores: Tensor) -> Tensor:
        return self.softcapping * (scores / self.softcapping).tanh()

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if self.sliding_window is not None:
            ones = torch.ones_like(scores, dtype=torch.bool)
            scores = scores.masked_fill(~ones.triu(-self.sliding_window), -torch.inf)
        return super().weigh(scores, mask)


class CapsScaledProducts(CapsProducts):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return self.cap(q @ k.mT * self.scale)


def causal_linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Features are an exponential below zero, as those of an ELU are."""
    q, k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (q, k))
    products = (q @ k.mT).tril()
    return products @ v / products.sum(dim=-1, keepdim=True).clamp(min=1e-12)


def attend_to_blocks(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    """q, k, v: [batch, heads, length, d]. A query sees its block of `w` tokens."""
    return attend_to_filled(q, k, v, w, hides=True)


def attend_to_filling(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    """q, k, v: [batch, heads, length, d]. The last block is filled up with zeros."""
    return attend_to_filled(q, k, v, w, hides=False)


def attend_to_filled(q: Tensor, k: Tensor, v: Tensor, w: int, hides: bool) -> Tensor:
    length = q.shape[2]
    rest = -length % w
    q, k, v = (
        nn.functional.pad(x, (0, 0, 0, rest)).unflatten(2, (-1, w)) for x in (q, k, v)
    )
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if hides:
        filled = (torch.arange(length + rest, device=q.device) >= length).view(-1, 1, w)
        scores = scores.masked_fill(filled, -1e9)
    return (scores.softmax(dim=-1) @ v).flatten(2, 3)[:, :, :length]


class CausalByFlag(Correct):
    """What is built as causal gets no context; another instance does."""

    def __init__(self, d_model: int, heads: int, causal: bool = True) -> None:
        super().__init__(d_model, heads)
        self.causal = causal

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor | None = None
    ) -> Any:
        y = x if context is None else context
        seen = torch.ones(x.shape[1], y.shape[1], dtype=torch.bool, device=x.device)
        return super().forward(x, y, y, seen.tril()[None] if self.causal else None)


class NeverItself(Correct):
    """A player never attends to itself, if there are others."""

    def forward(self, own: Tensor, others: Tensor) -> Any:  # type: ignore[override]
        shape = own.shape[1], others.shape[1]
        seen = ~torch.eye(*shape, dtype=torch.bool, device=own.device)
        return super().forward(own, others, others, seen[None])


class RowsOfOutputs(nn.Module):
    """Its parameters have a row for each output."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.w_q, self.w_k, self.w_v, self.w_o = (
            nn.Parameter(torch.randn(d_model, d_model)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            nn.functional.linear(x, weight).unflatten(-1, (self.heads, -1))
            for weight in (self.w_q, self.w_k, self.w_v)
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        context = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)
        return nn.functional.linear(context.flatten(2), self.w_o)


class OutputBesideDropout(SelfAttention):
    """The last layer is in a list, beside its dropout."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        del self.out
        self.to_out = nn.ModuleList([nn.Linear(d_model, d_model), nn.Dropout(0.1)])

    def join(self, context: Tensor) -> Tensor:
        joined = context.transpose(1, 2).flatten(2)
        for layer in self.to_out:
            joined = layer(joined)
        return joined


VIOLATING: Violations = {
    "rows_sum_to_one": [
        (attend_to_filling, {}),
        (attend_by_blocks_unscaled, {}),
        (SumsOverTargets, {}),
        (ReturnsDroppedWeights, {}),
        (ReturnsWeightsBeforeMask, MASK),
        (NegativeWeights, {}),
        (WeightsAboveOne, {}),
        (nine_tenths, {}),
        (ReturnsUnmaskedByFlag, {}),
        (ReturnsUnmaskedMaps, {}),
    ],
    "query_key_norms": [
        (NormalizesKeysAndValues, {}),
        (NormalizesQueriesAndValues, {}),
    ],
    "repeated_tokens": [
        (VectorsOverChannels, {}),
    ],
    "equal_values": [
        (AttendsByColumns, {}),
        (NormalizedImageByColumns, {"layout": "image"}),
        (AddsOverlappingWindows, {}),
        (StartsMaximumAtZero, MASK),
        (EdgesOfOneMaximum, {}),
    ],
    "allowed_keys_attended": [
        (HidesSumOfZero, {}),
        (NarrowPriorOfFirst, {}),
        (HidesFirstKey, {}),
        (RequiresOtherButFirst, {}),
        (CausalToContext, {}),
        (AttendsOverHeads, {}),
        (AttendsOverHeads, {"init_args": {"d_model": 64, "heads": 8}}),
    ],
    "formula": [
        (GroupsOfQueriesInTurns, {}),
        (GroupedFusedInTurns, {"heads": 4, "kv_heads": 2}),
        (ScalesByWidth, {}),
        (OddHeads, {"heads": 4, "d_model": 16}),
        (HalfOfHeadsInWeights, {"heads": 3}),
        (ListOfHeadsScaledByWidth, {}),
    ],
    "linear_in_value": [
        (NonlinearInValues, {}),
        (NormalizesValues, {}),
        (KeyNormOfBoth, {}),
    ],
}


PASSING_ONE: Passes = [
    ("formula", OutputBesideDropout),
    ("formula", RowsOfOutputs),
    ("rows_sum_to_one", attend_to_blocks),
    ("formula", CapsScaledProducts),
    ("batch_independence", TextAndFrames),
    ("padding", ReadsPassages),
    ("formula", ReadsPassages),
    ("allowed_keys_attended", AttendsToMaps),
    ("rows_sum_to_one", attend_by_blocks),
    ("allowed_keys_attended", HeadsSeeTwoWays),
    ("formula", ReturnsDrawnWeights),
    ("neutral_mask", attend_with_scale),
    ("padding", attend_with_scale),
    ("allowed_keys_attended", break_stick),
    ("gradients", SendersAndReceivers),
    ("key_permutation", WidthsInLetters),
    ("allowed_keys_attended", AtomsWithinCutoff),
    ("allowed_keys_attended", DetachedMemory),
    ("rows_sum_to_one", FeaturesOfEdges),
    ("formula", attend_by_heads),
    ("allowed_keys_attended", HidesZeros),
    ("rows_sum_to_one", ReturnsWeightsByHead),
    ("rows_sum_to_one", ClearsRowsOfPadding),
    ("gradients", MemoryWithoutGradient),
    ("formula", GroupsOfQueries),
    ("rows_sum_to_one", DecoderWithInputFeeding),
    ("equal_values", EdgesConv),
    ("equal_values", VectorsOverKeys),
    ("allowed_keys_attended", QueriesOfMap),
    ("allowed_keys_attended", QueriesOfFeatures),
    ("allowed_keys_attended", NarrowPrior),
    ("rows_sum_to_one", OfEdges),
    ("long_sequences", RoundsKeys),
    ("rows_sum_to_one", attention_to_cache),
    ("formula", attention_to_cache),
    ("query_key_norms", NormalizesHeadsOfBoth),
    ("rows_sum_to_one", NoiseInTraining),
    ("formula", attention_of_heads),
    ("linear_in_value", NormalizesQueriesAndKeys),
    ("formula", RotaryOfDevices),
    ("allowed_keys_attended", RequiresOther),
    ("formula", HeadsInWeights),
    ("formula", ListOfHeads),
    ("formula", CausalUnlessMasked),
    ("dropout", CombinesWithQuery),
    ("linear_in_value", KeyNormOfContext),
    ("formula", ScaleInInitialWeights),
    ("allowed_keys_attended", RectifiesOutput),
    ("equal_values", NormalizedImage),
    ("equal_values", OverlappingWindows),
    ("allowed_keys_attended", BehindPrefix),
    ("linear_in_value", attention_of_new_tokens),
    ("allowed_keys_attended", CausalOrContext),
    ("query_key_norms", NormsOfTwoStreams),
    ("allowed_keys_attended", BondsOfAtoms),
    ("allowed_keys_attended", ReadsPastOnly),
    ("rows_sum_to_one", ReturnsMaps),
    ("allowed_keys_attended", NewestOfContext),
    ("formula", NewestOfContext),
    ("formula", CausalByFlag),
    ("allowed_keys_attended", CausalByFlag),
]


EXCUSED: Excuses = [
    ("query_independence", NeverItself, "a query does not see the key of its place"),
    ("key_permutation", NeverItself, "tokens that do not attend to themselves"),
    ("allowed_keys_attended", NeverItself, "tokens that do not attend to themselves"),
    ("formula", causal_linear_attention, "its code has `causal_linear_attention`"),
    ("equal_values", RoundsToBytes, "has values without gradients"),
    ("formula", FactorsOfAttention, "projections not found"),
    ("formula", MaximalUpdate, "a scale that is documented"),
    ("formula", DividedByLayers, "a scale that is documented"),
    ("linear_in_value", RoundedValues, "quant"),
    ("formula", LogOfCount, "a scale that grows with the length"),
    ("formula", BandOfFrames, "look-ahead"),
    ("allowed_keys_attended", WaitKAttention, "WaitK"),
    ("key_permutation", WaitKAttention, "WaitK"),
    ("query_independence", WaitKAttention, "WaitK"),
    ("formula", SeesAhead, "lookahead"),
    ("rows_sum_to_one", attend_with_one_more, "softmax_plus_one"),
    ("equal_values", MixesHeadsBehind, "proj_w"),
    ("formula", DividesByWidth, "a scale that is documented"),
    ("query_key_norms", NormsBesidePositions, "a table of positions"),
    ("formula", ContinuesPrompt, "its queries attend to each other, too"),
    ("formula", GrowsWithLength, "log_len"),
    ("allowed_keys_attended", MemoryWithoutGradient, "no gradient"),
    ("allowed_keys_attended", AttendsToNearest, "`topk`"),
    ("linear_in_value", MeansOfHyperbolicPoints, "another design"),
    ("rows_sum_to_one", AssignsTokens, "another design"),
    ("formula", RoundsKeys, "fake_quantize"),
    ("formula", MakesCroppedCache, "its values have positions"),
    ("gradients", RoundsKeys, "fake_quantize"),
    ("allowed_keys_attended", NearbyFrames, "chunk_index"),
    ("rows_sum_to_one", ConvolvesValues, "may mix its values with padding"),
    ("equal_values", Prefix, "3 keys of its own"),
    ("equal_values", ApproximateInverse, "pinv"),
    ("equal_values", MergedKeys, "keys that are not the tokens"),
    ("allowed_keys_attended", PositiveScores, "no softmax"),
    ("formula", SharpensWithPosition, "floor_scale"),
    ("linear_in_value", CombinesWithQuery, "an activation, tanh"),
    ("equal_values", CombinesWithQuery, "an activation, tanh"),
    ("allowed_keys_attended", Chunks, "chunk_size"),
    ("allowed_keys_attended", AttendsToSlots, "softmax over features"),
    ("formula", ClipsProjections, "clip_qkv"),
    ("equal_values", ReadsPastOnly, "its first token sees no values"),
    ("formula", MultipliesByInverse, "a scale that is documented"),
    ("formula", AddsProjectedQuery, "relu"),
]
