"""Modules that violate the laws of scores, or come near to it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from specimens.base import (
    CAUSAL,
    Correct,
    Excuses,
    MaskedSelfAttention,
    Passes,
    RelativeTable,
    Rotary,
    RotaryOfDevices,
    SelfAttention,
    Violations,
)


class FillValueTooHigh(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -1e3)
        return scores.softmax(dim=-1)


class SoftmaxWithoutMaximum(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = scores.exp()
        if mask is not None:
            weights = weights * mask[:, None]
        return weights / weights.sum(dim=-1, keepdim=True)


class MaskedSoftmaxWithoutMaximum(MaskedSelfAttention, SoftmaxWithoutMaximum):
    pass


class RotaryOfManyDevices(RotaryOfDevices):
    """Each device has one head."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.devices = heads


class RotaryUnscaled(Rotary):
    """The scale is part of the weights, as the class states."""

    scaling = 1

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q * math.sqrt(q.shape[-1]), k)


class RotaryAfterNorms(Rotary):
    """Queries and keys are normalized over the whole width."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.q_norm = nn.LayerNorm(d_model)
        self.k_norm = nn.LayerNorm(d_model)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        whole = (x.transpose(1, 2).flatten(2) for x in (q, k))
        norms = (self.q_norm, self.k_norm)
        q, k = (self.split(n(x)) for n, x in zip(norms, whole, strict=True))
        return super().score(q, k)


class RotaryScaledByWidth(Rotary):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) / math.sqrt(self.heads)


class FillsWithTenThousand(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores + (1.0 - mask[:, None].to(scores)) * -1e4
        return scores.softmax(dim=-1)


class KeysFromFirst(SelfAttention):
    """Keys are taken relative to the first one, which changes no weight."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ (k - k[:, :, :1]).mT / math.sqrt(q.shape[-1])


class QuarticScores(nn.Module):
    """Queries and keys are products of two projections of a token."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.factors = nn.Linear(d_model, 5 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:
        parts = self.factors(x).unflatten(-1, (5, self.heads, -1)).transpose(1, 3)
        a, b, c, d, v = parts.unbind(2)
        weights = (a * b @ (c * d).mT).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class BesideState(SelfAttention):
    """Attention, and beside it a state of products, as in a state space model."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.ssm = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:
        state = (10 * self.ssm(x)).pow(3).cumsum(dim=1)
        return super().forward(x) + nn.functional.layer_norm(state, state.shape[-1:])


class ScoresOfTwoQueries(MaskedSelfAttention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        return scores + scores.roll(1, dims=2)


class StrongestTokens(SelfAttention):
    """Keys are the five tokens with the largest first feature, in its order."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        chosen = x[..., 0].topk(min(5, x.shape[1])).indices
        tokens = x.gather(1, chosen[..., None].expand(-1, -1, x.shape[2]))
        return Correct.forward(self, x, tokens, tokens)


class PointCloud(SelfAttention):
    """Near points are preferred; distances are scaled by their mean."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        squared = (x[:, :, None] - x[:, None]).square().sum(-1)
        self.near = -squared / squared.mean((1, 2), keepdim=True)
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.near[:, None]


class ValuesOfNeighbors(Correct):
    """Five keys and values for each token, with a vector for each distance."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.relative = nn.Embedding(5, d_model // heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        k, v = (self.neighbors(y) + self.relative.weight for y in (k, v))
        real = self.neighbors(torch.ones_like(q[..., :1])).mT > 0
        scores = self.score(q[..., None, :], k)
        weights = scores.masked_fill(~real, -torch.inf).softmax(dim=-1)
        return self.join((weights @ v).squeeze(-2))

    def neighbors(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 2, 2)).unfold(2, 5, 1).mT


class NearFive(Correct):
    """Each token has scores for the five tokens around it, by their distance."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        window = torch.arange(-2, 3, device=x.device)
        place = torch.arange(x.shape[1], device=x.device)[:, None] + window
        inside = (place >= 0) & (place < x.shape[1])
        place = place.clamp(0, x.shape[1] - 1)
        scores = (
            torch.einsum("bhld,bhlwd->bhlw", q, k[:, :, place]) / q.shape[-1] ** 0.5
        )
        weights = scores.masked_fill(~inside, -torch.inf).softmax(-1)
        return self.join(torch.einsum("bhlw,bhlwd->bhld", weights, v[:, :, place]))


class SharpCosines(SelfAttention):
    """Cosine attention, with scores of up to 100."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.temperature = nn.Parameter(torch.full((heads, 1, 1), 0.1))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = (nn.functional.normalize(x, dim=-1) for x in (q, k))
        return q @ k.mT / self.temperature.clamp(min=0.01)


class ProductsInHalf(SelfAttention):
    """Scores are computed in float32, in which large ones do not overflow."""

    dtype: torch.dtype | None = None

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q.to(self.dtype or q.dtype) @ k.to(self.dtype or k.dtype).mT
        return scores.float() / math.sqrt(q.shape[-1])

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights.to(v.dtype) @ v


class ProductsInFloat32(ProductsInHalf):
    """Scores are computed in float32, in which large ones do not overflow."""

    dtype = torch.float32


class RelativeProductsInHalf(RelativeTable):
    """Scores are computed in float32."""

    dtype: torch.dtype | None = None

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q.to(self.dtype or q.dtype) @ k.to(self.dtype or k.dtype).mT
        place = torch.arange(q.shape[2], device=q.device)
        bias = self.relative_bias[:, self.rows(place - place[:, None])]
        return scores.float() / math.sqrt(q.shape[-1]) + bias.float()

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights.to(v.dtype) @ v


class RelativeProductsInFloat32(RelativeProductsInHalf):
    """Scores are computed in float32."""

    dtype = torch.float32


class OptionOfFloat32(SelfAttention):
    """`upcast`: scores and softmax in float32 at least. Defaults to False."""

    def __init__(self, d_model: int, heads: int, upcast: bool = False) -> None:
        super().__init__(d_model, heads)
        self.upcast = upcast

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = (x.float() if self.upcast else x for x in (q, k))
        return super().score(q, k)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights.to(v.dtype) @ v


class ProductBeforeScale(Correct):
    """Scores of large activations are safe in float16."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / math.sqrt(q.shape[-1])


class ScaleBeforeProduct(Correct):
    """Scores of large activations are safe in float16."""


class RunsInHalf(SelfAttention):
    """The model runs in half precision at inference; the softmax is in float32."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.25
        return (q * scale) @ (k * scale).mT

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.float().softmax(dim=-1).to(scores.dtype)


class RunsInHalfUnscaled(RunsInHalf):
    """The model runs in half precision at inference; the softmax is in float32."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * q.shape[-1] ** -0.5


class PoolsWithMaximum(nn.Module):
    """A learned query pools tokens behind a norm; the softmax is written by hand."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.query = nn.Parameter(torch.randn(d_model))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.norm(x) @ self.query
        weights = (scores - self.largest(scores)).exp()
        return torch.einsum("bn,bnd->bd", weights / self.total(weights), x)

    def largest(self, scores: Tensor) -> Any:
        return scores.amax(dim=1, keepdim=True)

    def total(self, weights: Tensor) -> Tensor:
        return weights.sum(dim=1, keepdim=True).clamp(min=1e-6)


class PoolsWithoutMaximum(PoolsWithMaximum):
    def largest(self, scores: Tensor) -> Any:
        return 0


class PoolsWithMaximumOfAll(PoolsWithMaximum):
    def largest(self, scores: Tensor) -> Any:
        return scores.max()


class NormInHalf(nn.Module):
    """A norm in front bounds the scores of large tokens.

    Runs in the dtype of its weights (float16 and bfloat16 too); the softmax is taken
    in float32.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (d_model // heads) ** -0.5
        self.norm, self.qkv = nn.LayerNorm(d_model), nn.Linear(d_model, 3 * d_model)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (self.heads, -1, 3)).transpose(1, 2)
        q, k, v = qkv.unbind(-1)
        weights = self.score(q, k).softmax(dim=-1).to(v.dtype)
        return (weights @ v).transpose(1, 2).flatten(2)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * self.scale @ k.mT).float()


class NormInHalfUnscaled(NormInHalf):
    """Runs in the dtype of its weights (float16 and bfloat16 too)."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT).float() * self.scale


class GrowsWithLayers(nn.Module):
    """Scores grow from layer to layer, as no norm is between them."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Correct(d_model, heads) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 8 * layer(x, x, x)
        return x


class SkewsScores(Correct):
    """Scores of distances are moved to their keys, as by the Music Transformer.

    The row of a query is filled up with those of the next one, which are of the future.
    """

    longest = 600

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.distances = nn.Parameter(torch.randn(self.longest, d_model // heads))

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        """mask: bool, (length, length), True = may attend"""
        return super().forward(x, x, x, mask[None])

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        length = q.shape[2]
        rows = q @ self.distances[self.longest - length :].mT
        padded = nn.functional.pad(rows, (1, 0))
        skewed = padded.reshape(*q.shape[:2], length + 1, length)[:, :, 1:]
        return super().score(q, k) + skewed


class SkewsFromStart(SkewsScores):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        length = q.shape[2]
        shorter = self.distances[:length]
        rows = nn.functional.pad(q @ shorter.mT, (1, 0))
        skewed = rows.reshape(*q.shape[:2], length + 1, length)[:, :, 1:]
        return Correct.score(self, q, k) + skewed


class KeysAreEarlierTokens(SelfAttention):
    """Each query attends to the tokens before its own, behind one that is learned."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.start = nn.Parameter(torch.randn(d_model))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        earlier = torch.cat([self.start.expand_as(x[:, :1]), x[:, :-1]], dim=1)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        return Correct.forward(self, x, earlier, earlier, seen.tril()[None])


def _phi(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1.0, x.clamp(max=0.0).exp())


def attend_with_kernel(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None
) -> Tensor:
    """q: [batch, heads, q_len, d]; k, v: [batch, heads, k_len, d]; True may be seen."""
    q, k = _phi(q), _phi(k)
    if key_mask is not None:
        k = k * key_mask[:, None, :, None]
    total = torch.einsum("bhqd,bhd->bhq", q, k.sum(dim=2))
    return q @ (k.mT @ v) / total.clamp(min=1e-30)[..., None]


def attend_and_merge(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> Tensor:
    """q, k, v: [batch, length, heads, d_head]; mask: [batch, k_len], True = seen.

    Returns [batch, q_len, heads * d_head].
    """
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask[:, None, None], least)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v).flatten(2)


class LogitsAsTheyAre(SelfAttention):
    """As in T5, the logits are *not* divided by the root of the width."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


class MultipliesScores(SelfAttention):
    """The scale is that of a smaller model with which it was tuned."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return 6 / q.shape[-1] * q @ k.mT


VIOLATING: Violations = {
    "score_independence": [(ScoresOfTwoQueries, CAUSAL)],
    "score_scale": [
        (RotaryScaledByWidth, {"positions": "rotary"}),
    ],
    "large_scores": [
        (NormInHalfUnscaled, {}),
        (PoolsWithMaximumOfAll, {}),
        (PoolsWithoutMaximum, {}),
        (RelativeProductsInHalf, {}),
        (ProductsInHalf, {}),
        (FillValueTooHigh, {}),
        (SoftmaxWithoutMaximum, {}),
        (MaskedSoftmaxWithoutMaximum, {}),
        (ProductBeforeScale, {}),
        (RunsInHalfUnscaled, {}),
    ],
    "long_sequences": [
        (SkewsFromStart, {}),
    ],
}


PASSING_ONE: Passes = [
    ("formula", LogitsAsTheyAre),
    ("formula", attend_and_merge),
    ("large_scores", MultipliesScores),
    ("large_scores", NormInHalf),
    ("large_scores", PoolsWithMaximum),
    ("large_scores", RelativeProductsInFloat32),
    ("large_scores", OptionOfFloat32),
    ("large_scores", ProductsInFloat32),
    ("score_independence", SharpCosines),
    ("score_scale", RotaryAfterNorms),
    ("relative_positions", RotaryAfterNorms),
    ("relative_positions", RotaryOfManyDevices),
    ("large_scores", FillsWithTenThousand),
    ("large_scores", KeysFromFirst),
    ("large_scores", QuarticScores),
    ("large_scores", ScaleBeforeProduct),
    ("large_scores", RunsInHalf),
    ("score_independence", SkewsScores),
    ("long_sequences", SkewsScores),
    ("causality", SkewsScores),
]


EXCUSED: Excuses = [
    ("formula", attend_with_kernel, "_phi"),
    ("large_scores", GrowsWithLayers, "of a later layer are beyond float16"),
    ("score_independence", NearFive, "neither returned nor those of a softmax"),
    ("score_independence", StrongestTokens, "topk"),
    ("score_independence", PointCloud, "PointCloud"),
    ("score_independence", ValuesOfNeighbors, "neither returned nor those of a"),
    ("score_scale", RotaryUnscaled, "scaling = 1.0"),
    ("score_scale", RotaryOfManyDevices, "the order of its fused projection"),
    ("weights_match_output", RotaryOfManyDevices, "the order of its fused projection"),
    ("large_scores", BesideState, "its state overflows, and not its scores"),
    ("score_independence", KeysAreEarlierTokens, "each key is the token before it"),
]
