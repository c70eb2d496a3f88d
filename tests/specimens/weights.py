"""Modules that violate the laws of returned weights, or come near to it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specimens.algebra import (
    AssignsTokens,
    DrawsWeightsAgain,
    MixesHeadsBehind,
    ReturnsDrawnWeights,
    ReturnsUnmaskedByFlag,
    ReturnsWeightsByFlag,
)
from specimens.base import (
    Correct,
    Excuses,
    MaskedSelfAttention,
    MemoryInFront,
    NarrowPrior,
    Passes,
    SelfAttention,
    Violations,
)
from specimens.batch import ReturnsMapsOfLayers, WithMaps


class ReturnsOtherHeads(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        self.attn = weights.detach().roll(1, 1)
        return weights


class WeightsOnRequest(Correct):
    """Returns its weights if they are asked for."""

    kept: tuple[Tensor]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Any:
        output = super().forward(query, key, value, mask)
        return (output, self.shown()) if need_weights else output

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.kept = (super().weigh(scores, mask),)
        return self.kept[0]

    def shown(self) -> Tensor:
        return self.kept[0]


class ReversedOnRequest(WeightsOnRequest):
    def shown(self) -> Tensor:
        return self.kept[0].flip(1)


class FusedWithBias(SelfAttention):
    """The kernel of PyTorch gets a bias; the weights are computed a second time."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.strength = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, x: Tensor, need_weights: bool = False) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        place = torch.arange(x.shape[1], device=x.device)
        bias = (-self.strength * (place[:, None] - place).abs()).expand(
            len(x), -1, -1, -1
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        shown = (self.score(q, k) + self.shown(bias)).softmax(-1)
        return (self.join(y), shown) if need_weights else self.join(y)

    def shown(self, bias: Tensor) -> Tensor:
        return bias


class WeightsWithoutBias(FusedWithBias):
    def shown(self, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)


class DropsTwice(Correct):
    """The weights that it returns are dropped again, by other random numbers."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        self.attn = self.dropout(weights)
        return weights @ v


class WeightsBeforeDropout(MaskedSelfAttention):
    """Returns the weights before dropout, of which those of future keys are zero."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), self.weights

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.weights = super().weigh(scores, mask)
        return self.weights


class KeepsWeights(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.attn = super().weigh(scores, mask)
        return self.attn


class DecoderLayer(nn.Module):
    """Attends to its input, then to the context; returns the weights of the latter."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.first = KeepsWeights(d_model, heads)
        self.second = KeepsWeights(d_model, heads)

    def forward(self, x: Tensor, context: Tensor) -> Any:
        x = x + self.first(x, x, x)
        return x + self.second(x, context, context), self.weights()

    def weights(self) -> Tensor:
        return self.second.attn


class DecoderLayerWithFirstWeights(DecoderLayer):
    def weights(self) -> Tensor:
        return self.first.attn


class TransposedBesideTable(NarrowPrior):
    """Its table of distances is no weights, and those that it returns are wrong."""

    def forward(
        self, x: Tensor, mask: Tensor | None = None, return_weights: bool = False
    ) -> Any:
        output = super().forward(x, mask)
        weights, self.last = self.last.mT, None
        return (output, weights) if return_weights else output

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        self.last: Any = weights
        return weights @ v


class ReturnsGatedWeights(Correct):
    """The weights are a mean of two, by a gate of each head."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.gate = nn.Parameter(torch.zeros(heads, 1, 1))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        weights, gate = self.weigh(self.score(q, k), None), self.gate.sigmoid()
        mean = gate * weights + (1 - gate) / x.shape[1]
        return self.join(self.dropout(mean) @ v), self.choose(weights, mean)

    def choose(self, weights: Tensor, mean: Tensor) -> Tensor:
        return mean


class ReturnsWeightsBeforeGate(ReturnsGatedWeights):
    def choose(self, weights: Tensor, mean: Tensor) -> Tensor:
        return weights


class WeightsBeforeChoice(Correct):
    """Each query attends to five keys; the mean weights of all keys are returned."""

    def forward(self, query: Tensor, memory: Tensor) -> Any:  # type: ignore[override]
        q, k, v = self.query(query), self.key(memory), self.value(memory)
        q, k, v = (self.split(x) for x in (q, k, v))
        scores = self.score(q, k)
        largest = scores.topk(min(5, scores.shape[-1])).values
        chosen = scores.masked_fill(scores < largest[..., -1:], -torch.inf)
        context = self.dropout(chosen.softmax(dim=-1)) @ v
        return self.join(context), self.returned(scores, chosen).softmax(-1).mean(1)

    def returned(self, scores: Tensor, chosen: Tensor) -> Tensor:
        return scores


class WeightsOfChoice(WeightsBeforeChoice):
    """Returned are the weights of the five keys."""

    def returned(self, scores: Tensor, chosen: Tensor) -> Tensor:
        return chosen


class ReturnsWeightsOfTimes(SelfAttention):
    """Events that are far apart in time attend less to each other.

    times: (B, T), in days
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.query = self.key = self.value = None  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self, events: Tensor, times: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = map(self.split, self.qkv(self.norm(events)).chunk(3, dim=-1))
        bias = -(times[:, :, None] - times[:, None]).abs().log1p()[:, None].to(q.dtype)
        context = nn.functional.scaled_dot_product_attention(q, k, v, bias)
        return events + self.join(context), self.returned(self.score(q, k), bias)

    def returned(self, scores: Tensor, bias: Tensor) -> Tensor:
        return (scores + bias).softmax(dim=-1)


class ReturnsWeightsWithoutTimes(ReturnsWeightsOfTimes):
    def returned(self, scores: Tensor, bias: Tensor) -> Tensor:
        return scores.softmax(dim=-1)


class MixesFusedWeights(SelfAttention):
    """The weights of the heads are mixed; those that are returned are mixed, too."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.query = self.key = self.value = None  # type: ignore[assignment]
        self.mix = nn.Linear(heads, heads, bias=False)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = map(self.split, self.qkv(x).chunk(3, dim=-1))
        weights = self.score(q, k).softmax(dim=-1)
        part = self.mix.weight.softmax(dim=-1)
        mixed = torch.einsum("hg,bgqk->bhqk", part, weights)
        return self.join(self.read(mixed, v)), self.returned(weights, mixed)

    def returned(self, weights: Tensor, mixed: Tensor) -> Tensor:
        return mixed


class ReturnsUnmixedWeights(MixesFusedWeights):
    def returned(self, weights: Tensor, mixed: Tensor) -> Tensor:
        return weights


class TalkingWeights(MixesFusedWeights):
    """The heads talk to each other.

    Returned are the output and the weights by which the values are summed.
    """


class TalkingWeightsUnmixed(ReturnsUnmixedWeights):
    """The heads talk to each other.

    Returned are the output and the weights by which the values are summed.
    """


class TalkingWeightsUndocumented(ReturnsUnmixedWeights):
    """The heads talk to each other."""


class WeightsOfMeanScores(SelfAttention):
    """Returns the output and the attention weights averaged over the heads."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), self.scores.mean(dim=1).softmax(dim=-1)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.scores = scores
        return scores.softmax(dim=-1)


class WeightsBesideNull(Correct):
    """Returns the output and the weights (B, heads, N, M) of the words of a text.

    A learned token is in front of these.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        del self.key, self.value
        self.to_kv = nn.Linear(d_model, 2 * d_model)
        self.null_kv = nn.Parameter(torch.zeros(2, 1, heads, 1, d_model // heads))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        q = self.split(self.query(self.norm(x)))
        k, v = map(self.split, self.to_kv(context).chunk(2, dim=-1))
        k, v = (
            torch.cat([null.expand(len(x), -1, -1, -1), part], dim=2)
            for null, part in zip(self.null_kv, (k, v), strict=True)
        )
        weights = self.weigh(self.score(q, k), None)
        return x + self.join(weights @ v), self.of_words(weights)

    def of_words(self, weights: Tensor) -> Tensor:
        return weights[..., 1:]


class WeightsWithoutLastWord(WeightsBesideNull):
    def of_words(self, weights: Tensor) -> Tensor:
        return weights[..., :-1]


class WeightsWithPairFeatures(SelfAttention):
    """x: (B, N, C), pairs: (B, N, N, C); returns the output and the weights."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.gate = nn.Linear(d_model, d_model)
        self.to_bias = nn.Linear(d_model, heads)

    def forward(self, x: Tensor, pairs: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        bias = self.to_bias(pairs).permute(0, 3, 1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, bias)
        gate = self.gate(x).sigmoid()
        weights = (self.score(q, k) + self.shown(bias)).softmax(dim=-1)
        return self.out(y.transpose(1, 2).flatten(2) * gate), weights

    def shown(self, bias: Tensor) -> Tensor:
        return bias


class WeightsWithoutPairFeatures(WeightsWithPairFeatures):
    def shown(self, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)


class MixesHeadsBehindShown(MixesHeadsBehind):
    """Returns the output and the coefficients with which the values are summed."""

    def shown(self, weights: Tensor, mixed: Tensor) -> Tensor:
        return weights


class ShowsIfAsked(Correct):
    """memory_mask: (batch, length) bool, True = real, False = padding"""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Any = None,
        return_attn: bool = False,
    ) -> Any:
        q, k = self.split(self.query(x)), self.split(self.key(memory))
        v = self.split(self.value(memory))
        mask = None if memory_mask is None else memory_mask[:, None, None]
        y = self.join(nn.functional.scaled_dot_product_attention(q, k, v, mask))
        if not return_attn:
            return y
        scores = self.score(q, k)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return y, scores.softmax(dim=-1)


class ReturnsWeightsOfPairs(SelfAttention):
    """The weights that it returns are with the bias of pairs.

    distance: (B, T, T) long
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.of_distance = nn.Embedding(8, heads)

    def forward(  # type: ignore[override]
        self, x: Tensor, distance: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        bias = self.of_distance(distance).permute(0, 3, 1, 2)
        context = nn.functional.scaled_dot_product_attention(q, k, v, bias)
        return self.join(context), self.returned(self.score(q, k), bias)

    def returned(self, scores: Tensor, bias: Tensor) -> Tensor:
        return (scores + bias).softmax(dim=-1)


class ReturnsWeightsWithoutPairs(ReturnsWeightsOfPairs):
    def returned(self, scores: Tensor, bias: Tensor) -> Tensor:
        return scores.softmax(dim=-1)


class DocumentsDroppedWeights(SelfAttention):
    """Returns the output and the attention weights, those after dropout."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        weights = self.score(q, k).softmax(dim=-1)
        dropped = self.dropout(weights)
        return self.join(dropped @ v), self.returned(weights, dropped)

    def returned(self, weights: Tensor, dropped: Tensor) -> Tensor:
        return weights


class WeightsAfterDropout(DocumentsDroppedWeights):
    """Returns the output and the attention weights, those after dropout."""

    def returned(self, weights: Tensor, dropped: Tensor) -> Tensor:
        return dropped


class ReturnsProbabilities(SelfAttention):
    """Returns the output and the weights `(batch, heads, queries, keys)`.

    These weights are used to compute the weighted average in the heads.
    """

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        weights = self.score(q, k).softmax(dim=-1)
        used = self.dropout(weights)
        return self.join(used @ v), self.shown(weights, used)

    def shown(self, weights: Tensor, used: Tensor) -> Tensor:
        return weights


class ReturnsDroppedProbabilities(ReturnsProbabilities):
    def shown(self, weights: Tensor, used: Tensor) -> Tensor:
        return used


class AveragesOfRealQueries(Correct):
    """Returns the output and the weights averaged over heads; none of padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        """mask: (B, L), True for real tokens."""
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        seen = (mask[:, None] & mask[:, :, None]).bool()
        weights = self.weigh(self.score(q, k), seen) * seen[:, None]
        return self.join(weights @ v), weights.mean(dim=1)


class ReturnsWeightsDroppedAnew(Correct):
    """The weights after dropout are returned, in a residual connection with a norm."""

    anew = True

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = self.query(self.norm(x)), self.key(context), self.value(context)
        q, k, v = map(self.split, (q, k, v))
        weights = self.weigh(self.score(q, k), None)
        dropped = self.dropout(weights)
        y = x + self.join(self.read(dropped, v))
        return y, self.dropout(weights) if self.anew else dropped


class ReturnsDroppedOfBlock(ReturnsWeightsDroppedAnew):
    anew = False


class WeightsOfBlockBeforeDropout(Correct):
    """A block that returns its weights exactly as they multiplied the values."""

    before = True

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout)
        self.network = nn.Sequential(nn.Linear(d_model, d_model), nn.ReLU())

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = self.query(x), self.key(memory), self.value(memory)
        q, k, v = map(self.split, (q, k, v))
        weights = self.weigh(self.score(q, k), None)
        dropped = self.dropout(weights)
        y = x + self.join(self.read(dropped, v))
        return y + self.network(y), weights if self.before else dropped


class WeightsOfBlockAfterDropout(WeightsOfBlockBeforeDropout):
    """A block that returns its weights exactly as they multiplied the values."""

    before = False


class MeanWeightsBeforeDropout(WeightsOfBlockBeforeDropout):
    """Returns the weights by which the values were multiplied, averaged over heads."""

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = super().forward(x, memory)
        return y, weights.mean(dim=1)


class MeanWeightsAfterDropout(MeanWeightsBeforeDropout):
    """Returns the weights by which the values were multiplied, averaged over heads."""

    before = False


class ReturnsWeightsBeforeDropout(Correct):
    """Returns the output, and the weights as they were applied to the values."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        layers = zip(
            (self.query, self.key, self.value), (query, key, value), strict=True
        )
        q, k, v = (self.split(layer(x)) for layer, x in layers)
        weights = self.score(q, k).softmax(dim=-1)
        dropped = self.dropout(weights)
        return self.join(dropped @ v), self.returned(weights, dropped)

    def returned(self, weights: Tensor, dropped: Tensor) -> Tensor:
        return weights


class ReturnsWeightsAfterDropout(ReturnsWeightsBeforeDropout):
    """Returns the output, and the weights as they were applied to the values."""

    def returned(self, weights: Tensor, dropped: Tensor) -> Tensor:
        return dropped


class WeightsWithoutPadding(WeightsOnRequest):
    """Those that it returns are computed again, without the mask."""

    gamma = 0.1

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        return super().score(q, k) - (self.gamma * distance**2).to(q)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        super().weigh(scores, None)
        return Correct.weigh(self, scores, mask)


class SharesBeforePadding(nn.Module):
    """Pools the parts of a product; returns the weights by which they are summed.

    parts: (B, M, d); present: (B, M) bool, at least one True.
    """

    def __init__(self, d_model: int, num_fields: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(torch.ones(heads, d_model // heads))
        self.of_fields = nn.Parameter(torch.zeros(num_fields, d_model))
        self.key = nn.Linear(d_model, d_model)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, parts: Tensor, present: Tensor | None = None) -> Any:
        k = self.key(self.norm(parts + self.of_fields[: parts.shape[1]]))
        k = k.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        weights = (k @ self.query[..., None])[..., 0].softmax(dim=-1)
        real = weights if present is None else weights * present[:, None]
        shares = real / real.sum(dim=-1, keepdim=True).clamp(min=1e-9)
        v = parts.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = (shares[..., None, :] @ v).flatten(1)
        return y, self.returned(real, shares)

    def returned(self, real: Tensor, shares: Tensor) -> Tensor:
        return real


class SharesOfRealParts(SharesBeforePadding):
    def returned(self, real: Tensor, shares: Tensor) -> Tensor:
        return shares


class WeightsOfCall(NamedTuple):
    output: Tensor
    weights: Tensor  # (batch, heads, query, key): what the values were multiplied with


class TalkingAndTelling(MixesFusedWeights):
    """The heads talk to each other."""

    def forward(self, x: Tensor) -> WeightsOfCall:  # type: ignore[override]
        return WeightsOfCall(*super().forward(x))


class TalkingAndTellingUnmixed(ReturnsUnmixedWeights):
    """The heads talk to each other."""

    def forward(self, x: Tensor) -> WeightsOfCall:  # type: ignore[override]
        return WeightsOfCall(*super().forward(x))


class TellsWhatMixed(Correct):
    """Returns the output, and the coefficients with which the values were mixed."""

    def forward(self, query: Tensor, other: Tensor) -> Any:  # type: ignore[override]
        q, k = self.split(self.query(query)), self.split(self.key(other))
        weights = self.weigh(self.score(q, k), None)
        dropped = self.dropout(weights)
        y = self.join(self.read(dropped, self.split(self.value(other))))
        return y, self.tell(weights, dropped)

    def tell(self, weights: Tensor, dropped: Tensor) -> Tensor:
        return dropped


class TellsWhatWasWeighed(TellsWhatMixed):
    def tell(self, weights: Tensor, dropped: Tensor) -> Tensor:
        return weights


class MapsOfValues(SelfAttention):
    """Returns the output, and the maps that multiply the values."""

    def __init__(self, d_model: int, heads: int, proj_drop: float = 0.1) -> None:
        super().__init__(d_model, heads, 0.0)
        self.dropout = nn.Identity()  # type: ignore[assignment]
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        weights = self.score(q, k).softmax(dim=-1)
        return self.proj_drop(self.join(self.read(weights, v))), weights


class WeightsOfOwnScale(Correct):
    """Returned are weights that are computed a second time."""

    scale = 2.0

    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.query(x), self.key(memory), self.value(memory)
        q, k, v = (self.split(part) for part in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale)
        weights = self.once_more(q, k) if need_weights else None
        return self.join(y), weights

    def once_more(self, q: Tensor, k: Tensor) -> Tensor:
        return (self.scale * q @ k.mT).softmax(dim=-1).mean(dim=1)


class WeightsOfUsualScale(WeightsOfOwnScale):
    def once_more(self, q: Tensor, k: Tensor) -> Tensor:
        return (q.shape[-1] ** -0.5 * q @ k.mT).softmax(dim=-1).mean(dim=1)


class WeighsByAge(Correct):
    """Weights fall with the age of an event; age_days: (B, L)"""

    def forward(  # type: ignore[override]
        self, candidates: Tensor, history: Tensor, age_days: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self.query(candidates), self.key(history), self.value(history)
        q, k, v = (self.split(part) for part in (q, k, v))
        first = self.weigh(self.score(q, k), None)
        weights = first * torch.exp2(-age_days[:, None, None])
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.join(weights @ v), self.returned(first, weights).mean(dim=1)

    def returned(self, first: Tensor, weights: Tensor) -> Tensor:
        return weights


class ReturnsWeightsWithoutAge(WeighsByAge):
    def returned(self, first: Tensor, weights: Tensor) -> Tensor:
        return first


class Resampler(Correct):
    """A few learned queries attend to all tokens. mask: (batch, length), True = seen"""

    def __init__(self, d_model: int, heads: int, num_latents: int = 4) -> None:
        super().__init__(d_model, heads)
        self.latents = nn.Parameter(torch.randn(num_latents, d_model))

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> Any:
        latents = self.latents.expand(len(x), -1, -1)
        q, k, v = self.query(latents), self.key(x), self.value(x)
        q, k, v = (self.split(part) for part in (q, k, v))
        mask = None if mask is None else mask[:, None]
        y = self.join(self.weigh(self.score(q, k), mask) @ v)
        if not output_attentions:
            return (y,)
        return y, self.weigh(self.score(q, k), self.of_weights(mask))

    def of_weights(self, mask: Tensor | None) -> Tensor | None:
        return mask


class ResamplerForgetsMask(Resampler):
    def of_weights(self, mask: Tensor | None) -> Tensor | None:
        return None


class WeighsDocuments(SelfAttention):
    """x: (batch, length, d_model); documents: long (batch, length)"""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.titles = nn.Embedding(9, 1)

    def forward(  # type: ignore[override]
        self, x: Tensor, documents: Tensor
    ) -> dict[str, Tensor]:
        weights = self.titles(documents)[..., 0].softmax(dim=-1)
        return {"pooled": super().forward(x).mean(dim=1), "of_documents": weights}


class RecomputesMapsOfLayers(ReturnsMapsOfLayers):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.layers = nn.ModuleList([WithOtherMaps(d_model, heads) for _ in range(2)])


class WithOtherMaps(WithMaps):
    def shown(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        return (q @ k.mT).softmax(dim=-1)


class AveragesMapsOfLayers(ReturnsMapsOfLayers):
    def by_item(self, weights: Tensor) -> Tensor:
        return weights.mean(dim=1).detach()


@dataclass
class OutputAndAttentions:
    output: Tensor
    attentions: Tensor


class ReturnsFieldDroppedAnew(SelfAttention):
    """The weights after dropout are a field of the result."""

    anew = True

    def forward(self, x: Tensor) -> OutputAndAttentions:
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        weights = self.weigh(self.score(q, k), None)
        dropped = self.dropout(weights)
        returned = self.dropout(weights) if self.anew else dropped
        return OutputAndAttentions(self.join(self.read(dropped, v)), returned)


class ReturnsFieldAfterDropout(ReturnsFieldDroppedAnew):
    anew = False


class MasksOfHeads(SelfAttention):
    """Returns the output and the weights by which the values were multiplied.

    head_mask: `(1, heads, 1, 1)`, multiplies the weights.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, head_mask: Tensor | None = None
    ) -> Any:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        weights = self.score(q, k).softmax(dim=-1)
        masked = weights if head_mask is None else weights * head_mask
        return self.join(masked @ v), self.told(weights, masked)

    def told(self, weights: Tensor, masked: Tensor) -> Tensor:
        return masked


class TellsOfAllHeads(MasksOfHeads):
    __doc__ = MasksOfHeads.__doc__

    def told(self, weights: Tensor, masked: Tensor) -> Tensor:
        return weights


VIOLATING: Violations = {
    "weights_match_output": [
        (TellsOfAllHeads, {}),
        (ReturnsFieldDroppedAnew, {}),
        (TellsWhatWasWeighed, {}),
        (TalkingAndTellingUnmixed, {}),
        (DrawsWeightsAgain, {}),
        (MeanWeightsBeforeDropout, {}),
        (WeightsOfBlockBeforeDropout, {}),
        (ReturnsWeightsDroppedAnew, {}),
        (ReturnsProbabilities, {}),
        (MixesHeadsBehindShown, {}),
        (WeightsWithoutPairFeatures, {}),
        (WeightsWithoutLastWord, {}),
        (WeightsOfMeanScores, {}),
        (TalkingWeightsUnmixed, {}),
        (ReturnsUnmixedWeights, {}),
        (ReturnsWeightsWithoutTimes, {}),
        (TransposedBesideTable, {}),
        (ReturnsOtherHeads, {}),
        (ReversedOnRequest, {}),
        (DropsTwice, {}),
        (WeightsWithoutBias, {}),
        (ReturnsWeightsBeforeGate, {}),
        (DocumentsDroppedWeights, {}),
        (ReturnsWeightsWithoutPairs, {}),
        (WeightsBeforeChoice, {}),
        (ReturnsUnmaskedByFlag, {}),
        (ReturnsWeightsBeforeDropout, {}),
        (SharesBeforePadding, {}),
        (WeightsOfUsualScale, {}),
        (ReturnsWeightsWithoutAge, {}),
        (ResamplerForgetsMask, {}),
        (RecomputesMapsOfLayers, {}),
    ],
    "weights_axes": [
        (DecoderLayerWithFirstWeights, {"weights": "[1]:bhqk"}),
    ],
}

PASSING_ONE: Passes = [
    ("weights_match_output", MasksOfHeads),
    ("weights_match_output", ReturnsFieldAfterDropout),
    ("weights_match_output", MapsOfValues),
    ("weights_match_output", TellsWhatMixed),
    ("weights_match_output", TalkingAndTelling),
    ("weights_match_output", ReturnsDrawnWeights),
    ("weights_match_output", MeanWeightsAfterDropout),
    ("weights_match_output", WeightsOfBlockAfterDropout),
    ("weights_match_output", ReturnsDroppedOfBlock),
    ("weights_axes", AssignsTokens),
    ("weights_match_output", AveragesOfRealQueries),
    ("weights_match_output", ReturnsDroppedProbabilities),
    ("weights_match_output", ShowsIfAsked),
    ("weights_match_output", WeightsWithPairFeatures),
    ("weights_match_output", WeightsBesideNull),
    ("weights_match_output", TalkingWeights),
    ("weights_match_output", MixesFusedWeights),
    ("weights_match_output", ReturnsWeightsOfTimes),
    ("weights_match_output", ReturnsGatedWeights),
    ("weights_axes", DecoderLayer),
    ("weights_match_output", ReturnsWeightsOfPairs),
    ("weights_match_output", WeightsOnRequest),
    ("weights_match_output", FusedWithBias),
    ("weights_match_output", WeightsBeforeDropout),
    ("weights_match_output", WeightsAfterDropout),
    ("weights_match_output", WeightsOfChoice),
    ("weights_match_output", ReturnsWeightsByFlag),
    ("weights_match_output", ReturnsWeightsAfterDropout),
    ("weights_match_output", SharesOfRealParts),
    ("weights_match_output", WeightsOfOwnScale),
    ("weights_match_output", WeighsByAge),
    ("weights_match_output", Resampler),
]

EXCUSED: Excuses = [
    ("weights_match_output", TalkingWeightsUndocumented, "mixes the weights"),
    ("weights_axes", MemoryInFront, "have one length"),
    ("weights_match_output", WeighsDocuments, "returns no weights"),
    ("weights_match_output", AveragesMapsOfLayers, "returns no weights"),
]
