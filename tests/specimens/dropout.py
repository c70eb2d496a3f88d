"""Modules that violate the laws of dropout, or come near to it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specimens.base import (
    MASK,
    Correct,
    EdgesConv,
    Excuses,
    NormInFront,
    OfPatches,
    Passes,
    SelfAttention,
    TimeSeriesEncoder,
    TwoCausalLayers,
    Violations,
)


class DropsScores(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return self.dropout(super().score(q, k))

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v


class NeverDrops(Correct):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        projected = (self.query(query), self.key(key), self.value(value))
        q, k, v = (self.split(x) for x in projected)
        return self.join(self.read(self.weigh(self.score(q, k), mask), v))


class DropsOutputOnly(NeverDrops):
    """Two dropout layers, of which the one for the weights is never called."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.attn_drop = nn.Dropout(0.1)
        self.out_drop = nn.Dropout(0.1)

    def join(self, context: Tensor) -> Tensor:
        dropped: Tensor = self.out_drop(super().join(context))
        return dropped


class Dropout(NeverDrops):
    """Along each axis of size 1 in `shape`, all weights share one dropout mask."""

    shape = (-1, -1, -1, -1)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        pairs = zip(weights.shape, self.shape, strict=True)
        sizes = [1 if axis == 1 else size for size, axis in pairs]
        return super().read(weights * self.dropout(weights.new_ones(sizes)), v)


class DropsForAllItems(Dropout):
    shape = (1, -1, -1, -1)


class DropsForAllHeads(Dropout):
    shape = (-1, 1, -1, -1)


class DropsForAllQueries(Dropout):
    shape = (-1, -1, 1, -1)


class DropsRows(Dropout):
    shape = (-1, -1, -1, 1)


class DropsWithoutScale(NeverDrops):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        kept = torch.rand_like(weights) >= self.dropout.p if self.training else 1
        return weights * kept @ v


class KeepsWhatItShouldDrop(NeverDrops):
    """The dropout probability is used as the probability to keep."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        if not self.training or self.dropout.p == 0:
            return weights @ v
        keep = self.dropout.p
        return weights * (torch.rand_like(weights) < keep) / keep @ v


class DropsWithoutScaleAfterNorm(DropsWithoutScale):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        x = self.norm(x)
        return super().forward(x, x, x)


class KeepsWhatItShouldDropAfterNorm(KeepsWhatItShouldDrop):
    """What is kept is not scaled either, and the norm hides the mean."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)
        self.last = nn.Conv1d(d_model, d_model, 1)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        x = self.norm(x)
        return self.last(super().forward(x, x, x).mT).mT

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        if not self.training or self.dropout.p == 0:
            return weights @ v
        keep = self.dropout.p
        return weights * (torch.rand_like(weights) < keep) / (1 - keep) @ v


class DropsForAllCalls(NeverDrops):
    noise: Tensor | None = None

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        if self.noise is None or self.noise.shape != weights.shape:
            self.noise = self.dropout(torch.ones_like(weights))
        return weights * (self.noise if self.training else 1) @ v


def keep_some(weights: Tensor, p: float, shape: torch.Size) -> Tensor:
    return weights * (torch.rand(shape, device=weights.device) >= p) / (1 - p)


class DropsInFunction(NeverDrops):
    """A function of the file draws the random numbers, and an attribute is `p`."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout = nn.Identity()  # type: ignore[assignment]
        self.p = dropout

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.drop(weights) @ v if self.training else weights @ v

    def drop(self, weights: Tensor) -> Tensor:
        return keep_some(weights, self.p, weights.shape)


class DropsForAllInFunction(DropsInFunction):
    def drop(self, weights: Tensor) -> Tensor:
        return keep_some(weights, self.p, weights.shape[-2:])


class KeepsWithoutScale(NeverDrops):
    """Its attribute is the probability to keep a weight."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.keep_prob = 0.9

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        if self.training:
            weights = weights * torch.bernoulli(
                torch.full_like(weights, self.keep_prob)
            )
        return weights @ v


class KeepProbabilityAsDropout(Correct):
    def __init__(self, d_model: int, heads: int, keep_prob: float = 0.9) -> None:
        super().__init__(d_model, heads, dropout=keep_prob)


def drops_without_scale(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0
) -> Tensor:
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1)
    return weights * (torch.rand_like(weights) >= dropout_p) @ value


def attention_of_flax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout_rate: float = 0.0,
    deterministic: bool = True,
    broadcast_dropout: bool = True,
) -> Tensor:
    """Drops in training only, and by default with one mask for all batch items."""
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1)
    if not deterministic and dropout_rate:
        shape = weights.shape[-2:] if broadcast_dropout else weights.shape
        weights = keep_some(weights, dropout_rate, shape)
    return weights @ value


def never_drops(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0
) -> Tensor:
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1)
    nn.functional.dropout(weights, dropout_p)
    return weights @ value


class EncodesPositions(SelfAttention):
    """What is dropped before the scores keeps no mean."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.pos_encoder = nn.Sequential(nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        steps = torch.arange(x.shape[1], device=x.device)[:, None]
        return super().forward(self.pos_encoder(x + steps.sin()))


class DropsContextToo(SelfAttention):
    """The dropout of the weights is applied to the context, too."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout = nn.Identity()
        self.attn_drop = nn.Dropout(dropout)
        self.proj_drop = nn.Dropout(dropout)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.drop(self.attn_drop(weights) @ v)

    def drop(self, context: Tensor) -> Tensor:
        return self.attn_drop(context)


class DropsWeightsAndContext(DropsContextToo):
    """Each has a dropout of its own."""

    def drop(self, context: Tensor) -> Tensor:
        return self.proj_drop(context)  # type: ignore[no-any-return]


class KeepsAllIfMasked(Correct):
    """The path for a mask has no dropout."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        p, self.dropout.p = self.dropout.p, 0.0 if mask is not None else self.dropout.p
        output = super().forward(query, key, value, mask)
        self.dropout.p = p
        return output


class DropsRowsByRate(SelfAttention):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.rate = 0.1

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        if self.training:
            kept = torch.rand_like(weights[..., :1]) >= self.rate
            weights = weights * kept / (1 - self.rate)
        return weights @ v


class TwoAttentions(nn.Module):
    """A few learned queries attend to all tokens, and all tokens to them."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.few = nn.Parameter(torch.randn(1, 2, d_model))
        self.gather = Correct(d_model, heads)
        self.spread = Correct(d_model, heads)

    def forward(self, x: Tensor) -> Any:
        gathered = self.gather(self.few.expand(len(x), -1, -1), x, x)
        return self.spread(x, gathered, gathered)


class TwelveHeads(Correct):
    def __init__(self) -> None:
        super().__init__(24, heads=12)


class DropsQueries(Correct):
    """As LoRA does, a part of the projection drops features of its input."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.query = nn.Sequential(nn.Dropout(0.1), nn.Linear(d_model, d_model))


class DropsKeys(NeverDrops):
    """DropKey: scores of some keys are minus infinity in training, at random."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        if not (self.training and self.dropout.p):
            return scores
        dropped = torch.rand_like(scores) < self.dropout.p
        return scores.masked_fill(dropped, torch.finfo(scores.dtype).min)


class DropsTable(SelfAttention):
    """Keys are moved by a table of positions, of which a part is dropped.

    The same layer drops weights, or a layer of its own.
    """

    def __init__(self, d_model: int, heads: int, shared: bool = False) -> None:
        super().__init__(d_model, heads)
        self.table = nn.Embedding(400, d_model)
        self.drop_rows = self.dropout if shared else nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        rows = self.drop_rows(self.table.weight[: x.shape[1]])
        q, k, v = self.query(x), self.key(x) + self.key(rows), self.value(x)
        q, k, v = (self.split(each) for each in (q, k, v))
        return self.join(self.read(self.dropout(self.weigh(self.score(q, k), None)), v))


class DropsTableAndWeights(DropsTable):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, shared=True)


class DropsFeaturesOfPositions(SelfAttention):
    """Keys are moved by features of the positions, of which some are dropped."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.pos_dropout = nn.Dropout(0.1)
        self.move = nn.Linear(6, d_model, bias=False)

    def forward(self, x: Tensor) -> Any:
        place = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        fading = torch.exp(-place[:, None] / torch.arange(1, 7).to(place))
        q, k, v = self.query(x), self.key(x), self.value(x)
        q, k, v = (
            self.split(each) for each in (q, k + self.move(self.pos_dropout(fading)), v)
        )
        return self.join(self.read(self.dropout(self.weigh(self.score(q, k), None)), v))


class DropsBiasForAllItems(SelfAttention):
    """The dropout that is meant for the weights gets a bias of the distances."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(p(x)) for p in (self.query, self.key, self.value))
        place = torch.arange(x.shape[1], device=x.device)
        bias = self.dropout((place[:, None] - place).abs().to(x))
        return self.join(self.read(self.weigh(self.score(q, k) - bias, None), v))


class NeverCallsDropoutOfZero(NeverDrops):
    """Its layer of dropout only keeps the names of weights in a list."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, 0.0)


class DropsHeads(NeverDrops):
    """In training, whole heads are dropped."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.head_drop = 0.1

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        read = super().read(weights, v)
        share = 1 - self.head_drop * self.training
        remains = torch.rand(*read.shape[:2], 1, 1, device=v.device) < share
        return read * remains / share


class DropsFeaturesOfKeys(NeverDrops):
    """Dropout of the features of keys, which all queries share."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.k_drop = nn.Dropout(0.1)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, self.k_drop(k))


class DropsRowsBehindNorm(SelfAttention):
    """`Dropout1d` drops channels, which are rows of weights here."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.norm(x)
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        weights = self.weigh(self.score(q, k), None)
        rows = nn.functional.dropout1d(
            weights.flatten(0, 1), self.dropout.p, self.training
        )
        return self.join(self.read(rows.view_as(weights), v))


class HidesInTraining(SelfAttention):
    """In training, keys are hidden at random."""

    def __init__(self, d_model: int, heads: int, mask_prob: float = 0.5) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.mask_prob = mask_prob

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if self.training:
            kept = torch.rand_like(scores) >= self.mask_prob
            scores = self.hide(
                scores, kept | torch.eye(len(kept.mT[0, 0]), device=kept.device).bool()
            )
        return super().weigh(scores, mask)

    def hide(self, scores: Tensor, kept: Tensor) -> Tensor:
        return scores.masked_fill(~kept, -1e4)


class HidesNoneInTraining(HidesInTraining):
    def hide(self, scores: Tensor, kept: Tensor) -> Tensor:
        scores.detach().clone().masked_fill_(~kept, -1e4)
        return scores


class DropsBeforeActivation(SelfAttention):
    """The weights are dropped in front of a layer with an activation, and no norm."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.wide, self.narrow = nn.Linear(d_model, 99), nn.Linear(99, d_model)

    def forward(self, x: Tensor) -> Any:
        x = x + super().forward(x)
        return x + self.narrow(self.wide(x).exp())


class NormOfHeadsByHand(SelfAttention):
    """A norm without a layer follows the dropped weights, and keeps no mean."""

    def drop(self, weights: Tensor) -> Tensor:
        return nn.functional.dropout(weights, self.dropout.p, self.training)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        context = self.drop(weights) @ v
        return context * (context.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        return self.join(self.read(self.weigh(self.score(q, k), None), v))


class DropsScoresBeforeNormByHand(NormOfHeadsByHand):
    """The scores are dropped in place of the weights."""

    def drop(self, weights: Tensor) -> Tensor:
        return weights

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(super().drop(scores), mask)


class MeanOfHeads(nn.Module):
    """Heads with their own weights, and the mean of their reads of shared values."""

    def __init__(self, d_model: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.n_head, d_k = heads, d_model // heads
        self.queries = nn.ModuleList(nn.Linear(d_model, d_k) for _ in range(heads))
        self.keys = nn.ModuleList(nn.Linear(d_model, d_k) for _ in range(heads))
        self.value, self.out = nn.Linear(d_model, d_k), nn.Linear(d_k, d_model)
        self.dropout = nn.Dropout(0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        heads = zip(self.queries, self.keys, strict=True)
        values = self.value(v)
        scores = [
            one(q) @ other(k).mT / values.shape[-1] ** 0.5 for one, other in heads
        ]
        reads = [self.dropout(score.softmax(dim=-1)) @ values for score in scores]
        return self.out(torch.stack(reads).mean(dim=0))


class AllDelays(Correct):
    """A weight for each delay of a whole series, shared by its queries and heads."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        n = x.shape[1]
        q, k, v = self.query(x), self.key(x), self.value(x)
        spectrum = torch.fft.rfft(q.float(), dim=1).conj() * torch.fft.rfft(
            k.float(), dim=1
        )
        series = torch.fft.irfft(spectrum, n=n, dim=1).mean(dim=2)
        weights = self.dropout(series.softmax(dim=-1)).to(v)
        places = torch.arange(n, device=x.device)
        moved = v[:, (places[:, None] + places) % n]
        return self.out(torch.einsum("bijd,bj->bid", moved, weights))


class FeedForwardFirst(SelfAttention):
    """A block that begins with a network, which has dropout."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.first = nn.Sequential(nn.Linear(d_model, d_model), nn.Dropout(0.1))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.norm(x + self.first(x)))


class DropsColumns(Correct):
    """A key is dropped for all queries of a head at once."""

    def __init__(self, d_model: int, heads: int, p: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout = nn.Identity()  # type: ignore[assignment]
        self.p = p

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.column_dropout(weights) @ v

    def column_dropout(self, weights: Tensor) -> Tensor:
        ones = torch.ones_like(weights[:, :, :1])
        return weights * nn.functional.dropout(ones, self.p, self.training)


class DropsRowsForColumns(DropsColumns):
    def column_dropout(self, weights: Tensor) -> Tensor:
        ones = torch.ones_like(weights[..., :1])
        return weights * nn.functional.dropout(ones, self.p, self.training)


class KeysOfSmallerImage(Correct):
    """x: (B, C, H, W)"""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.reduce = nn.Conv2d(d_model, d_model, 2, stride=2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        keys = self.reduce(x).flatten(2).mT
        return super().forward(x.flatten(2).mT, keys, keys).mT.view_as(x)


class DropsChannels(KeysOfSmallerImage):
    """x: (B, C, H, W)"""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout = nn.Dropout2d(dropout)


class DropsScoresBehindNorm(NormInFront):
    """x = x + attn(norm(x))"""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return self.dropout(super().score(q, k))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        h = self.norm(x)
        q, k, v = (self.split(part(h)) for part in (self.query, self.key, self.value))
        context = self.read(self.weigh(self.score(q, k), None), v)
        return x + context.transpose(1, 2).flatten(2)


class LayerOfDecoder(nn.Module):
    """Two attentions in one class, whose one probability is that of all dropout."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        for name in ("sa_q", "sa_k", "sa_v", "sa_o", "ca_q", "ca_k", "ca_v", "ca_o"):
            self.add_module(name, nn.Linear(d_model, d_model, bias=False))

    def attend(self, kind: str, x: Tensor, keys: Tensor) -> Tensor:
        q, k, v = (
            self.get_submodule(f"{kind}_{name}")(each)
            .unflatten(-1, (self.heads, -1))
            .transpose(1, 2)
            for name, each in (("q", x), ("k", keys), ("v", keys))
        )
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
        weights = nn.functional.dropout(weights, self.p, self.training)
        context = (weights @ v).transpose(1, 2).flatten(2)
        joined: Tensor = self.get_submodule(f"{kind}_o")(context)
        return joined

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attend("sa", x, x)
        return x + self.attend("ca", x, memory)


class HeadsAndLayer(nn.Module):
    """A list of heads, and a layer of one head behind it; graph attention is so."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        width = d_model // heads
        self.heads = nn.ModuleList(
            [AdditiveHead(d_model, width, dropout) for _ in range(heads)]
        )
        self.last = AdditiveHead(d_model, d_model, dropout)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([head(x) for head in self.heads], dim=-1)
        last: Tensor = self.last(nn.functional.elu(joined))
        return last.log_softmax(dim=-1)


class AdditiveHead(nn.Module):
    def __init__(self, width: int, out: int, dropout: float) -> None:
        super().__init__()
        self.project = nn.Linear(width, out, bias=False)
        self.source, self.target = nn.Linear(out, 1), nn.Linear(out, 1)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        scores = nn.functional.leaky_relu(self.source(h) + self.target(h).mT, 0.2)
        weights = scores.softmax(dim=-1)
        weights = nn.functional.dropout(weights, self.dropout, self.training)
        return weights @ h


class DropsEdges(EdgesConv):
    """The weights of the edges are dropped, after their softmax."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        q, k, v = (
            layer(x).unflatten(1, (self.heads, -1))
            for layer in (self.lin_query, self.lin_key, self.lin_value)
        )
        scores = (q[target] * k[source]).sum(dim=-1) * q.shape[-1] ** -0.5
        weights = self.weigh(scores, target, len(x))[..., None]
        return torch.zeros_like(v).index_add(0, target, weights * v[source]).flatten(1)

    def weigh(self, scores: Tensor, target: Tensor, nodes: int) -> Tensor:
        return self.drop(self.share(scores, target, nodes))

    def drop(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.dropout, self.training)

    def share(self, scores: Tensor, target: Tensor, nodes: int) -> Tensor:
        shares = (scores - self.largest(scores, target, nodes)).exp()
        sums = scores.new_zeros(nodes, self.heads).index_add(0, target, shares)
        return shares / sums[target].clamp(min=torch.finfo(scores.dtype).tiny)


class DropsScoresOfEdges(DropsEdges):
    def weigh(self, scores: Tensor, target: Tensor, nodes: int) -> Tensor:
        return self.share(self.drop(scores), target, nodes)


class OfPatchesOrNone(OfPatches):
    def forward(self, x: Tensor) -> Any:
        if x.shape[1] < 4:
            return x.new_zeros(len(x), self.out.out_features)
        return super().forward(x)


class DelaysOfSeries(Correct):
    """A weight for each of the best delays of a whole series, shared by its queries."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = self.query(x), self.key(x), self.value(x)
        spectrum = torch.fft.rfft(q.float(), dim=1).conj() * torch.fft.rfft(
            k.float(), dim=1
        )
        series = torch.fft.irfft(spectrum, n=x.shape[1], dim=1).mean(dim=2)
        best, delays = torch.topk(series, min(2, x.shape[1]), dim=-1)
        weights = self.dropout(best.softmax(dim=-1)).to(v)
        places = torch.arange(x.shape[1], device=x.device)
        rows = torch.arange(len(x), device=x.device)[:, None]
        moved = [v[rows, (places + d[:, None]) % x.shape[1]] for d in delays.T]
        return self.out(
            sum(w[:, None, None] * m for w, m in zip(weights.T, moved, strict=True))
        )


class RatesSwapped(SelfAttention):
    """`attn_drop` is the rate of the weights, `proj_drop` that of the output."""

    def __init__(
        self, d_model: int, heads: int, attn_drop: float = 0.0, proj_drop: float = 0.0
    ) -> None:
        super().__init__(d_model, heads)
        self.dropout = nn.Dropout(self.of_weights(attn_drop, proj_drop))
        self.last = nn.Dropout(self.of_weights(proj_drop, attn_drop))

    def of_weights(self, own: float, other: float) -> float:
        return other

    def join(self, context: Tensor) -> Tensor:
        return self.last(super().join(context))


class RatesInPlace(RatesSwapped):
    def of_weights(self, own: float, other: float) -> float:
        return own


class RoutesAndDropsHeads(SelfAttention):
    """A router weighs the heads; in training, whole heads are dropped."""

    def __init__(self, d_model: int, heads: int, head_drop: float = 0.25) -> None:
        super().__init__(d_model, heads)
        self.head_drop = head_drop
        self.dropout = nn.Dropout(0.0)
        self.router = nn.Linear(d_model, heads)

    def forward(self, x: Tensor) -> Any:
        self.gates = self.router(x).softmax(dim=-1).mT[..., None]
        return super().forward(x)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        context = super().read(weights, v) * self.gates
        if not self.training:
            return context
        kept = torch.rand(*context.shape[:2], 1, 1) >= self.head_drop
        return self.rescale(context * kept)

    def rescale(self, context: Tensor) -> Tensor:
        return context


class RoutesAndRescalesHeads(RoutesAndDropsHeads):
    def rescale(self, context: Tensor) -> Tensor:
        return context / (1 - self.head_drop)


def drop_queries(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.1, training: bool = False
) -> Tensor:
    """Attention to `[batch, heads, length, features]`; one mask for all queries."""
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)
    if training and p > 0:
        kept = torch.rand(*weights.shape[:3], 1) >= p
        weights = weights * kept / (1 - p)
    return weights @ v


def drop_keys_of_all(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.1, training: bool = False
) -> Tensor:
    """Attention to `[batch, heads, length, features]`; one mask for all queries."""
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)
    if training and p > 0:
        kept = torch.rand(*weights.shape[:2], 1, weights.shape[3]) >= p
        weights = weights * kept / (1 - p)
    return weights @ v


class OneKeyOfEachHead(nn.Module):
    """Raw parameters, as large as they may get: each head reads nearly one key."""

    def __init__(self, d_model: int, heads: int, drop: float = 0.1) -> None:
        super().__init__()
        self.drop = drop
        shape = heads, d_model, d_model // heads
        self.q, self.k, self.v = (nn.Parameter(torch.randn(shape)) for _ in range(3))
        self.o = nn.Parameter(torch.randn(heads, d_model // heads, d_model))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.einsum("btm,nmh->bnth", x, p) for p in (self.q, self.k, self.v)
        )
        weights = (20 * q @ k.mT).softmax(dim=-1)
        if self.training:
            kept = torch.rand(weights.shape, device=x.device) >= self.drop
            weights = weights * kept / (1 - self.drop)
        return torch.einsum("bnth,nhm->btm", weights @ v, self.o)


class RateOfOutputUnused(SelfAttention):
    """`attn_drop` is the rate of the weights, `proj_drop` that of the output."""

    def __init__(
        self, d_model: int, heads: int, attn_drop: float = 0.0, proj_drop: float = 0.0
    ) -> None:
        super().__init__(d_model, heads)
        self.dropout = nn.Dropout(attn_drop)
        self.last = nn.Dropout(attn_drop)

    def join(self, context: Tensor) -> Tensor:
        return self.last(super().join(context))


class DropsInPairs(SelfAttention):
    """The last two heads share the mask of their weights."""

    shared = 1

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout, self.attn_drop = nn.Identity(), nn.Dropout(dropout)  # type: ignore[assignment]

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        last = max(0, self.heads - 1 - self.shared)
        heads = torch.arange(self.heads, device=v.device).clamp(max=last)
        kept = self.attn_drop(torch.ones_like(weights[:, : last + 1]))
        return super().read(weights * kept[:, heads], v)


class DropsInEachHead(DropsInPairs):
    shared = 0


class RatesOfTwoKinds(SelfAttention):
    """`p_attn` is the rate of the weights, and `p_drop` that of the output."""

    def __init__(
        self, d_model: int, heads: int, p_attn: float = 0.1, p_drop: float = 0.1
    ) -> None:
        super().__init__(d_model, heads, p_attn)
        self.out = nn.Sequential(self.out, nn.Dropout(p_drop))  # type: ignore[assignment]


class DropsHeadsByRest(SelfAttention):
    """Heads are dropped; those that are left are multiplied by heads / heads left."""

    def __init__(self, d_model: int, heads: int, p_head: float = 0.1) -> None:
        super().__init__(d_model, heads, 0.0)
        self.dropout = nn.Identity()  # type: ignore[assignment]
        self.p_head = p_head

    def join(self, context: Tensor) -> Tensor:
        if self.training and self.p_head:
            draw = torch.rand(*context.shape[:2], 1, 1, device=context.device)
            kept = (draw >= self.p_head).to(context)
            share = kept / kept.sum(dim=1, keepdim=True).clamp(min=1)
            context = context * share * self.heads
        return super().join(context)


class DropsSquaresOfRelu(nn.Module):
    """A residual block; weights are squares of a ReLU, and zero for small scores."""

    def __init__(self, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        # Only large scores count.
        weights = (q @ k.mT / q.shape[-1] - 1).relu().square() / x.shape[1]
        y: Tensor = x + self.out(self.dropout(weights) @ v)
        return y


class DropsKeyForQueries(Correct):
    """A key that is dropped is dropped for all queries of a head."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        if not self.training or self.dropout.p == 0:
            return weights
        keep = 1 - self.dropout.p
        kept = torch.empty_like(weights[:, :, :1]).bernoulli_(keep)
        return weights * kept / keep

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        q, k, v = self.query(query), self.key(key), self.value(value)
        q, k, v = (self.split(x) for x in (q, k, v))
        return self.join(self.read(self.weigh(self.score(q, k), mask), v))


class DropsIntoNothing(SelfAttention):
    """What the function returns is thrown away; the output is dropped, too."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.attn_p = 0.1
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        weights = self.score(q, k).softmax(dim=-1)
        nn.functional.dropout(weights, p=self.attn_p, training=self.training)
        return self.norm(x + self.dropout(self.join(weights @ v)))


class DropsHeadsOfTokens(SelfAttention):
    """Each head is left out with a probability; the mask is for the tokens instead."""

    def __init__(self, d_model: int, heads: int, drop_head: float = 0.2) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.drop_head = drop_head

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.left(super().read(weights, v).transpose(1, 2)).transpose(1, 2)

    def left(self, context: Tensor) -> Tensor:
        """Drop along the second axis."""
        ones = torch.ones_like(context[:, :, :1, :1])
        return context * nn.functional.dropout(ones, self.drop_head, self.training)


class DropsWholeHeads(DropsHeadsOfTokens):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.left(weights @ v)


class DropsEdgesOfAllHeads(DropsEdges):
    def drop(self, x: Tensor) -> Tensor:
        return x * super().drop(torch.ones_like(x[:, :1]))


class DropsWholeEdges(DropsEdgesOfAllHeads):
    """Dropout of whole edges, over all heads alike."""


class DropsHeadsToo(Correct):
    """Heads of an item are dropped; the rest is scaled by heads / heads left."""

    def __init__(
        self, d_model: int, heads: int, p_drophead: float = 0.1, p_attn: float = 0.0
    ) -> None:
        super().__init__(d_model, heads, 0.0)
        self.p_drophead, self.p_attn = p_drophead, p_attn

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        y = nn.functional.dropout(weights, self.p_attn, self.training) @ v
        if not self.training or not self.p_drophead:
            return y
        noise = self.draw(y)
        kept = (noise >= self.p_drophead) | (noise == noise.amax(1, keepdim=True))
        return y * kept * (self.heads / kept.sum(1, keepdim=True))

    def draw(self, y: Tensor) -> Tensor:
        return torch.rand(*y.shape[:2], 1, 1, device=y.device)


class DropsHeadsOfBatch(DropsHeadsToo):
    def draw(self, y: Tensor) -> Tensor:
        return torch.rand(1, self.heads, 1, 1, device=y.device)


class GraphLayerWithHeadsLast(nn.Module):
    """Features are dropped, and weights, which have heads as their last axis."""

    def __init__(self, in_features: int, n_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.weight = nn.Linear(in_features, 8 * n_heads, bias=False)
        self.target = nn.Parameter(torch.randn(n_heads, 8))
        self.source = nn.Parameter(torch.randn(n_heads, 8))

    def forward(self, h: Tensor, adj: Tensor) -> Tensor:
        """adj: (B, N, N), 1 where row i receives from column j."""
        drop = nn.functional.dropout
        h = drop(h, self.dropout, self.training)
        values = self.weight(h).unflatten(-1, (self.n_heads, -1))
        target, source = self.target, self.source
        to, source = ((values * part).sum(-1) for part in (target, source))
        scores = nn.functional.leaky_relu(to[:, :, None] + source[:, None], 0.2)
        own = torch.eye(h.shape[1], dtype=torch.bool, device=h.device)
        scores = scores.masked_fill(~((adj > 0) | own)[..., None], -torch.inf)
        weights = drop(scores.softmax(dim=2), self.dropout, self.training)
        y = torch.einsum("bijh,bjhd->bihd", weights, values)
        return nn.functional.elu(y.flatten(2))


class HidesSlots(Correct):
    """Each slot of a memory is hidden from all queries of an item with a probability.

    The remaining weights are renormalized. A slot of zeros is never hidden.
    """

    def __init__(self, d_model: int, heads: int, slot_dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, 0.0)
        self.slot_dropout = slot_dropout
        self.null = nn.Parameter(torch.randn(2, d_model))

    def forward(self, x: Tensor, memory: Tensor) -> Any:  # type: ignore[override]
        """x: [B, T, d_model], memory: [B, M, d_model]"""
        k, v = (
            torch.cat([null.expand(len(x), 1, -1), part(memory)], dim=1)
            for null, part in zip(self.null, (self.key, self.value), strict=True)
        )
        q, k, v = map(self.split, (self.query(x), k, v))
        weights = self.score(q, k).softmax(dim=-1)
        if self.training and self.slot_dropout:
            kept = self.draw(weights) >= self.slot_dropout
            weights = weights * kept
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        return self.join(self.read(weights, v))

    def draw(self, weights: Tensor) -> Tensor:
        drawn = torch.rand(len(weights), 1, 1, weights.shape[-1], device=weights.device)
        drawn[..., 0] = 1
        return drawn


class HidesAllSlots(HidesSlots):
    def draw(self, weights: Tensor) -> Tensor:
        return torch.rand(len(weights), 1, weights.shape[2], 1, device=weights.device)


class DropsHeadsOnly(DropsHeadsToo):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        y = weights @ v
        kept = torch.rand(*y.shape[:2], 1, 1, device=y.device) >= self.p_drophead
        return y * kept / (1 - self.p_drophead) if self.training else y


class DropsHeadsUnscaled(DropsHeadsOnly):
    """A norm of queries and keys is in front."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        normalize = nn.functional.normalize
        return super().score(normalize(q, dim=-1), normalize(k, dim=-1))

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        y = super().read(weights, v)
        return y * (1 - self.p_drophead) if self.training else y


class DropsKeysButItsOwn(SelfAttention):
    """A share of the keys is hidden from every query in training, and its own is not.

    Behind it is another dropout, that of the output.
    """

    def __init__(
        self, d_model: int, heads: int, drop_key: float = 0.2, proj_drop: float = 0.1
    ) -> None:
        super().__init__(d_model, heads)
        self.dropout, self.drop_key = nn.Identity(), drop_key
        self.proj_drop = nn.Dropout(proj_drop)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        own = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
        if self.training:
            hidden = torch.rand_like(scores) < self.drop_key
            scores = scores.masked_fill(hidden & ~own, -torch.inf)
        return scores.softmax(dim=-1)

    def join(self, context: Tensor) -> Tensor:
        dropped: Tensor = self.proj_drop(super().join(context))
        return dropped


class DropsBehindNorm(NormInFront):
    """Dropout by hand, of which each head has its own."""

    heads_of_mask: int | None = None

    def __init__(self, d_model: int, heads: int, attn_dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout, self.attn_dropout = nn.Identity(), attn_dropout

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        if not self.training:
            return weights
        drawn = torch.rand_like(weights[:, : self.heads_of_mask])
        return weights * (drawn >= self.attn_dropout) / (1 - self.attn_dropout)


class DropsForAllHeadsBehindNorm(DropsBehindNorm):
    heads_of_mask = 1


class DropsOfLatents(DropsBehindNorm):
    """Some learned queries attend to all tokens, behind a norm."""

    def __init__(self, d_model: int, heads: int, attn_dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, attn_dropout)
        self.latents = nn.Parameter(torch.randn(8, d_model))

    def forward(self, x: Tensor) -> Any:
        latents = self.latents.expand(len(x), -1, -1)
        h = self.norm(x)
        return latents + Correct.forward(self, latents, h, h)


class DropsOfLatentsForAllHeads(DropsOfLatents):
    heads_of_mask = 1


class DropsKeysForQueries(nn.Module):
    """Dropout of weights whose noise does not depend on the query."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, weights: Tensor) -> Tensor:
        if not self.training:
            return weights
        kept = torch.rand_like(weights[:, :, :1]) >= self.p
        return weights * kept / (1 - self.p)


class WithDropsForQueries(SelfAttention):
    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout = DropsKeysForQueries(dropout)  # type: ignore[assignment]


class OfShards(nn.Module):
    """The outputs of two shards are summed, each of which has half of the heads."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        if heads % 2:
            raise ValueError("each shard has the same number of heads")
        self.heads, self.dropout = heads // 2, dropout
        self.qkv, self.outputs = (
            nn.ParameterList(nn.Parameter(torch.randn(*shape)) for _ in range(2))
            for shape in ((d_model, 3 * d_model // 2), (d_model // 2, d_model))
        )

    def forward(self, x: Tensor) -> Tensor:
        y, kept = torch.zeros_like(x), self.keep(x)
        for weight, last in zip(self.qkv, self.outputs, strict=True):
            parts = (x @ weight).unflatten(-1, (3, self.heads, -1))
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            weights = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(dim=-1)
            kept = self.next(kept, x)
            y = y + (weights * kept @ v).transpose(1, 2).flatten(2) @ last
        return y

    def keep(self, x: Tensor) -> Tensor:
        p = self.dropout if self.training else 0.0
        shape = len(x), self.heads, x.shape[1], x.shape[1]
        return (torch.rand(shape, device=x.device) >= p).to(x) / max(1 - p, 1e-9)

    def next(self, kept: Tensor, x: Tensor) -> Tensor:
        return self.keep(x)


class ShardsDropAlike(OfShards):
    def next(self, kept: Tensor, x: Tensor) -> Tensor:
        return kept


@dataclass(frozen=True)
class ConfigOfHeads:
    dim: int = 64
    heads: int = 8
    p_drophead: float = 0.2


class DropsHeadsOfConfig(SelfAttention):
    """In training, heads are dropped, with the probability that the config has."""

    def __init__(self, config: ConfigOfHeads) -> None:
        super().__init__(config.dim, config.heads, 0.0)
        self.config = config

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        p = self.config.p_drophead if self.training else 0.0
        kept = torch.rand_like(weights[:, :, :1, :1]) >= p
        return weights @ v * kept * self.factor(p)

    def factor(self, p: float) -> float:
        return 1 / max(1 - p, 1e-9)


class HeadsOfConfigUnscaled(DropsHeadsOfConfig):
    def factor(self, p: float) -> float:
        return 1.0


def attend_with_weights(
    x: Tensor,
    w_qkv: Tensor,
    w_out: Tensor,
    n_heads: int = 3,
    dropout_p: float = 0.0,
    training: bool = False,
) -> Tensor:
    parts = (x @ w_qkv).unflatten(-1, (3, n_heads, -1))
    q, k, v = parts.permute(2, 0, 3, 1, 4)
    weights = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(dim=-1)
    weights = nn.functional.dropout(weights, dropout_p, training)
    return (weights @ v).transpose(1, 2).flatten(2) @ w_out


class DropsByHand(nn.Module):
    """One matrix for each head; what remains is divided by the rest."""

    def __init__(self, embed_dim: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.p, width, std = dropout, embed_dim // heads, embed_dim**-0.5
        shape = heads, embed_dim, width
        self.w_q, self.w_k, self.w_v = (
            nn.Parameter(torch.randn(shape) * std) for _ in range(3)
        )
        self.w_o = nn.Parameter(torch.randn(heads, width, embed_dim) * std)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k = query[:, None] @ self.w_q, key[:, None] @ self.w_k
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)
        if self.training:
            kept = torch.rand_like(weights) < 1 - self.p
            weights = self.scaled(weights * kept)
        return (weights @ (value[:, None] @ self.w_v) @ self.w_o).sum(dim=1)

    def scaled(self, weights: Tensor) -> Tensor:
        return weights / (1 - self.p)


class DropsByHandUnscaled(DropsByHand):
    def scaled(self, weights: Tensor) -> Tensor:
        return weights


class DropsInFrontOfNorm(SelfAttention):
    """The norm in front of a network does not see a scale of what remains."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, 0.0)
        self.norm, self.network = nn.LayerNorm(d_model), nn.Linear(d_model, d_model)
        self.proj_drop = nn.Dropout(dropout)

    def join(self, context: Tensor) -> Tensor:
        y = self.proj_drop(super().join(context))
        return y + self.proj_drop(self.network(self.norm(y)).tanh())


class SpatialDropout(nn.Module):
    """Drops channels of all tokens of an item."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return x * nn.functional.dropout(torch.ones_like(x[:, :1]), self.p)


class OwnDropout(SpatialDropout):
    """Drops numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.p, self.training)


class ForgetsItsRate(SelfAttention):
    """Its only dropout does not get the probability that is given."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout = OwnDropout(0.1)  # type: ignore[assignment]


class FixedDropoutOfInputs(SelfAttention):
    """Its inputs have a dropout that no argument sets."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout)
        self.input_dropout = SpatialDropout(0.1)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(self.input_dropout(x))


class DropsInKernel(nn.Module):
    """Only an argument of the kernel tells that `p` is a probability of dropout."""

    def __init__(self, d_model: int, heads: int, drop: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.p = drop

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        p = self.p if self.training else self.p_in_evaluation()
        kernel = nn.functional.scaled_dot_product_attention
        y = kernel(*(t.transpose(1, 2) for t in (q, k, v)), dropout_p=p)
        return y.transpose(1, 2).flatten(2)

    def p_in_evaluation(self) -> float:
        return 0.0


class DropsInKernelAlways(DropsInKernel):
    def p_in_evaluation(self) -> float:
        return self.p


class HeadsOfToken(SelfAttention):
    """Each token chooses two of its heads; the others give zero."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.router = nn.Linear(d_model, heads, bias=False)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        y = self.dropout(self.score(q, k).softmax(dim=-1)) @ v
        scores = self.router(x)
        chosen = torch.zeros_like(scores)
        chosen = chosen.scatter(-1, scores.topk(2, dim=-1).indices, 1.0)
        return self.join(y * chosen.mT[..., None])


class PassesDropoutOn(nn.Module):
    """A block; `attn_drop` is the rate of the weights."""

    def __init__(
        self, d_model: int, heads: int, drop: float = 0.0, attn_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.attention = Correct(d_model, heads, self.rate(attn_drop))
        self.drop = nn.Dropout(drop)

    def rate(self, attn_drop: float) -> float:
        return attn_drop

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return x + self.drop(self.attention(y, y, y))


class ForgetsDropout(PassesDropoutOn):
    def rate(self, attn_drop: float) -> float:
        return 0.0


class ScalesByHeadsLeft(Correct):
    """Heads are dropped as a whole."""

    def __init__(self, d_model: int, heads: int, drop_head: float = 0.1) -> None:
        super().__init__(d_model, heads, 0.0)
        self.drop_head = drop_head

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        context = super().read(weights, v)
        if not self.training or self.drop_head == 0.0:
            return context
        draws = torch.rand(len(v), self.heads, 1, 1, device=v.device)
        keep = (draws >= self.drop_head).to(v.dtype)
        left = keep.sum(dim=1, keepdim=True).clamp(min=1)
        return context * keep * (self.heads / left)


class HeadsFirst(nn.Module):
    """A projection that returns its heads in front of the tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.linear(x)
        return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class ScalesHeadsOfItem(Correct):
    """Heads of an item are dropped; the rest is scaled by heads / heads left of it."""

    def __init__(self, d_model: int, heads: int, p_head: float = 0.2) -> None:
        super().__init__(d_model, heads, 0.0)
        self.query, self.key, self.value = (
            HeadsFirst(d_model, heads) for _ in range(3)
        )
        self.p_head = p_head

    def split(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        context = weights @ v
        if not (self.training and self.p_head):
            return context
        drawn = torch.rand(*context.shape[:2], 1, 1, device=context.device)
        return context * self.scaled((drawn >= self.p_head).to(context))

    def scaled(self, keep: Tensor) -> Tensor:
        return keep * self.heads / keep.sum(dim=1, keepdim=True).clamp(min=1)


class ScalesHeadsOfBatch(ScalesHeadsOfItem):
    """Heads of an item are dropped; the rest is scaled by heads / heads left of it."""

    def scaled(self, keep: Tensor) -> Tensor:
        return keep * keep.numel() / keep.sum().clamp(min=1)


VIOLATING: Violations = {
    "dropout": [
        (ScalesHeadsOfBatch, {}),
        (ForgetsItsRate, {}),
        (DropsByHandUnscaled, {}),
        (HeadsOfConfigUnscaled, {}),
        (ShardsDropAlike, {}),
        (DropsHeadsUnscaled, {}),
        (HidesAllSlots, {}),
        (DropsHeadsOfBatch, {}),
        (DropsEdgesOfAllHeads, {}),
        (DropsInPairs, {}),
        (RateOfOutputUnused, {}),
        (drop_queries, {}),
        (RoutesAndDropsHeads, {}),
        (RatesSwapped, {}),
        (DropsScoresBehindNorm, {}),
        (DropsRowsForColumns, {}),
        (DropsScores, {}),
        (HidesNoneInTraining, {}),
        (DropsForAllItems, {}),
        (DropsBiasForAllItems, {}),
        (DropsForAllHeads, {}),
        (DropsRowsBehindNorm, {}),
        (DropsForAllQueries, {}),
        (DropsForAllCalls, {}),
        (DropsRows, {}),
        (DropsRowsByRate, {}),
        (DropsWithoutScale, {}),
        (DropsWithoutScaleAfterNorm, {}),
        (KeepsWithoutScale, {}),
        (KeepProbabilityAsDropout, {}),
        (KeepsWhatItShouldDrop, {}),
        (KeepsWhatItShouldDropAfterNorm, {}),
        (drops_without_scale, {}),
        (never_drops, {}),
        (NeverDrops, {}),
        (DropsOutputOnly, {}),
        (DropsContextToo, {}),
        (KeepsAllIfMasked, MASK),
        (DropsForAllInFunction, {}),
        (DropsScoresBeforeNormByHand, {}),
        (DropsScoresOfEdges, {}),
        (DropsIntoNothing, {}),
        (DropsHeadsOfTokens, {}),
        (DropsForAllHeadsBehindNorm, {}),
        (DropsOfLatentsForAllHeads, {}),
        (ForgetsDropout, {}),
    ],
}


PASSING_ONE: Passes = [
    ("formula", ScalesHeadsOfItem),
    ("dropout", ScalesHeadsOfItem),
    ("dropout", FixedDropoutOfInputs),
    ("dropout", DropsInFrontOfNorm),
    ("dropout", DropsByHand),
    ("dropout", attend_with_weights),
    ("dropout", DropsHeadsOfConfig),
    ("dropout", OfShards),
    ("dropout", WithDropsForQueries),
    ("dropout", HidesSlots),
    ("dropout", GraphLayerWithHeadsLast),
    ("dropout", DropsHeadsToo),
    ("dropout", DropsWholeEdges),
    ("dropout", DropsHeadsByRest),
    ("dropout", RatesOfTwoKinds),
    ("dropout", DropsInEachHead),
    ("dropout", OneKeyOfEachHead),
    ("dropout", RatesInPlace),
    ("dropout", RoutesAndRescalesHeads),
    ("dropout", drop_keys_of_all),
    ("dropout", TimeSeriesEncoder),
    ("dropout", DropsColumns),
    ("dropout", FeedForwardFirst),
    ("dropout", DropsBeforeActivation),
    ("dropout", NormOfHeadsByHand),
    ("dropout", DropsEdges),
    ("dropout", MeanOfHeads()),
    ("dropout", AllDelays),
    ("dropout", OfPatches),
    ("dropout", LayerOfDecoder),
    ("dropout", TwoCausalLayers),
    ("dropout", HeadsAndLayer),
    ("dropout", DelaysOfSeries),
    ("dropout", EncodesPositions),
    ("dropout", DropsInFunction),
    ("dropout", TwoAttentions),
    ("dropout", DropsWeightsAndContext),
    ("dropout", TwelveHeads),
    ("dropout", DropsQueries),
    ("dropout", DropsFeaturesOfKeys),
    ("dropout", DropsKeys),
    ("dropout", DropsHeads),
    ("dropout", DropsTable),
    ("dropout", DropsTableAndWeights),
    ("dropout", DropsFeaturesOfPositions),
    ("dropout", attention_of_flax),
    ("dropout", DropsKeyForQueries),
    ("dropout", DropsWholeHeads),
    ("dropout", DropsKeysButItsOwn),
    ("dropout", DropsBehindNorm),
    ("dropout", DropsOfLatents),
    ("dropout", DropsInKernel),
    ("dropout", HeadsOfToken),
    ("dropout", PassesDropoutOn),
    ("dropout", ScalesByHeadsLeft),
]


EXCUSED: Excuses = [
    ("dropout", OfPatchesOrNone, "constant for so few tokens"),
    ("dropout", NeverCallsDropoutOfZero, "its dropout is 0, which nothing sets"),
    ("dropout", DropsSquaresOfRelu, "constant for so few tokens"),
]
