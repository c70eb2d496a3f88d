"""Modules that violate the laws of heads, or come near to it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from specimens.base import (
    CAUSAL,
    Correct,
    Excuses,
    HeadRMSNorm,
    HeadsSeeTwoWays,
    MaskedSelfAttention,
    Passes,
    SelfAttention,
    Violations,
)


class NormalizesOverHeads(Correct):
    axis = 1

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = (nn.functional.normalize(x, dim=self.axis) for x in (q, k))
        return 4 * super().score(q, k)


class NormalizesHeads(NormalizesOverHeads):
    axis = -1


class DividesByOwnSum(SelfAttention):
    """Exponentials are divided by the sum of their own head, without a softmax."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.exp() / self.total(scores.exp().sum(dim=-1, keepdim=True))

    def total(self, sums: Tensor) -> Tensor:
        return sums


class AddsUpEarlierHeads(DividesByOwnSum):
    def total(self, sums: Tensor) -> Tensor:
        return sums.cumsum(dim=1)


class NormsOverHeads(DividesByOwnSum):
    """A norm of the queries over the features of all heads, which mixes them."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(4 * q / q.square().sum((1, 3), keepdim=True).sqrt(), k)


class FusedMultiQuery(nn.Module):
    """Queries of all heads, one key and one value, by one projection."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads, self.d_k = heads, d_model // heads
        self.qkv = nn.Linear(d_model, d_model + 2 * self.d_k)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).split([self.heads * self.d_k, self.d_k, self.d_k], -1)
        q = q.unflatten(-1, (self.heads, self.d_k)).transpose(1, 2)
        scores = q @ k[:, None].mT / math.sqrt(self.d_k)
        context = scores.softmax(dim=-1) @ v[:, None]
        return self.proj(context.transpose(1, 2).flatten(2))


class NormalizesCausally(MaskedSelfAttention):
    """Causal, with a norm over all heads at once."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = (x / x.square().mean((1, 3), keepdim=True).sqrt() for x in (q, k))
        return super().score(q, k)


class MiddleHeadSeesAll(HeadsSeeTwoWays):
    """Of an odd number of heads, that in the middle has no mask."""

    def direction_mask(self, scores: Tensor) -> Tensor:
        future = torch.ones_like(scores[0, 0]).triu(1) > 0
        hidden = torch.zeros_like(scores[0]) > 0
        half = self.heads // 2
        hidden[:half] = future
        hidden[self.heads - half :] = future.T
        least = torch.finfo(scores.dtype).min
        return torch.zeros_like(scores[0]).masked_fill(hidden, least)


class OfVisualWidth(Correct):
    """Tokens attend to an image, whose width is that of the defaults."""

    def __init__(
        self, dim: int = 48, dim_visual: int = 32, dim_head: int = 16, heads: int = 4
    ) -> None:
        super().__init__(dim_head * heads, heads)
        self.query = nn.Linear(dim, dim_head * heads)
        self.key = nn.Linear(dim_visual, dim_head * heads)
        self.value = nn.Linear(dim_visual, dim_head * heads)
        self.out = nn.Linear(dim_head * heads, dim)

    def forward(self, x: Tensor, media: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, media, media)


class HeadsWithNorms(SelfAttention):
    """The context of each head has a norm of its own, with the same weight."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.after = HeadRMSNorm(d_model // heads)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        normed: Tensor = self.after(weights @ v)
        return normed


class RMSNormOfHeads(HeadRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        size = torch.rsqrt(x.square().mean(dim=(1, -1), keepdim=True) + 1e-6)
        return x * size * self.weight


class HeadsWithOneNorm(HeadsWithNorms):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.after = RMSNormOfHeads(d_model // heads)


class GlobalLayerNorm(nn.Module):
    """The mean and the variance are those of all tokens, as in speech separation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=(-2, -1), keepdim=True)
        variance = x.var(dim=(-2, -1), keepdim=True)
        return (x - mean) * torch.rsqrt(variance + 1e-5) * self.weight


class TokensWithGlobalNorm(SelfAttention):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.before = GlobalLayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(self.before(x))


class AdaptiveLayerNorm(nn.Module):
    """A norm whose scale depends on a condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        centered = x - x.mean(dim=-1, keepdim=True)
        size = torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + 1e-5)
        return centered * size * self.weight * (1 + condition)


class TokensWithCondition(SelfAttention):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.before = AdaptiveLayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(self.before(x, x.mean(dim=1, keepdim=True)))


class WeightlessNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


class WithWeightlessNorm(SelfAttention):
    """A norm without weights, of the features of each head."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.query_norm = WeightlessNorm()

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.query_norm(q), k)


class WeightlessNormOfAllHeads(WithWeightlessNorm):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        normed = self.query_norm(q.transpose(1, 2).flatten(2))
        return Correct.score(self, self.split(normed), k)


class NormOfHeads(nn.Module):
    """A norm of the features of each head, with a gain for each head and feature."""

    axes: tuple[int, ...] = (-1,)

    def __init__(self, heads: int, d_k: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(heads, 1, d_k))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * x.square().mean(self.axes, keepdim=True).rsqrt()


class NormOverHeads(NormOfHeads):
    axes = (1, -1)


class WithNormOfHeads(SelfAttention):
    norm: type[NormOfHeads] = NormOfHeads

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.query_norm = self.norm(heads, d_model // heads)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.query_norm(q), k)


class WithNormOverHeads(WithNormOfHeads):
    norm = NormOverHeads


class LengthOneOfHeads(nn.Module):
    """Queries and keys of length one, times a learned number: along the heads."""

    axis = 1

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))
        self.factor = nn.Parameter(torch.tensor(5.0))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, x in zip(self.linears, (query, key, value), strict=False)
        )
        q, k = (nn.functional.normalize(x, dim=self.axis) for x in (q, k))
        weights = (self.factor * q @ k.mT).softmax(dim=-1)
        joined: Tensor = self.linears[3]((weights @ v).transpose(1, 2).flatten(2))
        return joined


class LengthOneOfTokens(LengthOneOfHeads):
    axis = 2


class LengthOneOfFeatures(LengthOneOfHeads):
    axis = 3


class LengthOneOverTheTokens(LengthOneOfTokens):
    """Each feature of queries and keys has length one along all tokens."""


class LatentsOfLengthOne(nn.Module):
    """Latents attend to points; queries and keys of length one, along the features."""

    axis = 3

    def __init__(self, d_model: int, heads: int, num_latents: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.latents = nn.Parameter(torch.randn(num_latents, d_model))
        self.query = nn.Linear(d_model, d_model)
        self.kv = nn.Linear(d_model, 2 * d_model)

    def forward(self, points: Tensor) -> Tensor:
        """points: (B, N, dim); returns (B, num_latents, dim)"""
        q = self.query(self.latents).expand(len(points), -1, -1)
        k, v = self.kv(points).chunk(2, dim=-1)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        q, k = (nn.functional.normalize(x, dim=self.axis) for x in (q, k))
        weights = (10 * q @ k.mT).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class LatentsOfOtherHeads(LatentsOfLengthOne):
    axis = 1


class StreamsOfLengthOne(LatentsOfLengthOne):
    """Tokens of two inputs attend to those of both, by keys of length one."""

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        tokens = torch.cat([x, context], dim=1)
        k, v = self.kv(tokens).chunk(2, dim=-1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(tokens), k, v)
        )
        q, k = (nn.functional.normalize(part, dim=self.axis) for part in (q, k))
        y = ((10 * q @ k.mT).softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
        return y.split([x.shape[1], context.shape[1]], dim=1)


class StreamsOfOtherHeads(StreamsOfLengthOne):
    axis = 1


class CosineInVolume(SelfAttention):
    """Voxels (B, D, H, W, C) attend within windows; scores are cosines by a scale."""

    def __init__(
        self, d_model: int, heads: int, window_size: tuple[int, int, int] = (2, 3, 4)
    ) -> None:
        super().__init__(d_model, heads)
        self.window_size = window_size
        self.scale = nn.Parameter(torch.full((heads, 1, 1), 5.0))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        if any(n % w for n, w in zip(x.shape[1:4], self.window_size, strict=True)):
            raise ValueError(f"{tuple(x.shape)} is not made of whole windows")
        axes = x
        for n, side in enumerate(self.window_size):
            axes = axes.unflatten(1 + 2 * n, (-1, side))
        axes = axes.permute(0, 1, 3, 5, 2, 4, 6, 7)
        windows = axes.flatten(4, 6).flatten(0, 3)
        y = super().forward(windows).reshape(axes.shape)
        return y.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(x.shape)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return self.unit(q) @ self.unit(k).mT * self.scale

    def unit(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1)


class CosineOfAllHeads(CosineInVolume):
    def unit(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=(1, 3), keepdim=True)


class OverChannels(SelfAttention):
    """Channels attend to each other; each is a vector over the tokens."""

    axes = (-1, -1)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part(x).mT for part in (self.query, self.key, self.value))
        q, k, v = (part.unflatten(1, (self.heads, -1)) for part in parts)
        of_query, of_key = self.axes
        q = nn.functional.normalize(q, dim=of_query)
        k = nn.functional.normalize(k, dim=of_key)
        y: Tensor = self.out(((q @ k.mT).softmax(dim=-1) @ v).flatten(1, 2).mT)
        return y


class OverChannelsAndTokens(OverChannels):
    axes = (-1, -2)


class OverChannelsOfTokens(OverChannels):
    axes = (-2, -2)


class CosinesOfHeads(nn.Module):
    """Cosine attention, whose projections are one parameter."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * d_model, d_model))
        self.scale = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = nn.functional.linear(x, self.in_proj_weight).chunk(3, dim=-1)
        q, k = self.cosines(q), self.cosines(k)
        v = v.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        weights = (self.scale * q @ k.mT).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    def cosines(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return nn.functional.normalize(x, dim=-1)


class CosinesOfAllHeads(CosinesOfHeads):
    def cosines(self, x: Tensor) -> Tensor:
        x = nn.functional.normalize(x, dim=-1)
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class CosinesBehindNorm(CosinesOfHeads):
    """A norm of the tokens is as wide as all heads together."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)
        self.to_q, self.to_k, self.to_v = (
            nn.Linear(d_model, d_model) for _ in range(3)
        )
        del self.in_proj_weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k = self.cosines(self.to_q(x)), self.cosines(self.to_k(x))
        v = self.to_v(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        weights = (self.scale * q @ k.mT).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class CosinesOfAllBehindNorm(CosinesBehindNorm):
    cosines = CosinesOfAllHeads.cosines


class WidthByAnotherName(MaskedSelfAttention):
    """A default width that not all numbers of heads divide."""

    def __init__(self, hd: int = 64, nh: int = 4) -> None:
        super().__init__(hd, nh)


class ChannelNorm(nn.LayerNorm):
    """Over the channels of [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class NormsChannels(Correct):
    """x: (B, C, H, W)"""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = ChannelNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        tokens = self.norm(x).flatten(2).mT
        y: Tensor = super().forward(tokens, tokens, tokens)
        return x + y.mT.unflatten(2, x.shape[2:])


def share_in_groups(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> Tensor:
    """q: [batch, q_len, heads, d]; k and v: [batch, k_len, kv_heads, d], in groups."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[-1] ** -0.5)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def share_in_turn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> Tensor:
    """q: [batch, q_len, heads, d]; k and v: [batch, k_len, kv_heads, d], in turn."""
    k, v = (x.repeat(1, 1, q.shape[2] // k.shape[2], 1) for x in (k, v))
    return share_in_groups(q, k, v, scale)


def share_in_turn_for_one(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> Tensor:
    """q: [batch, q_len, heads, d]; k and v: [batch, k_len, kv_heads, d], in groups."""
    share = share_in_turn if q.shape[1] == 1 else share_in_groups
    return share(q, k, v, scale)


class MapsOverHeads(Correct):
    """A learned map over the axis of the heads, in front of the softmax."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.pre = nn.Parameter(torch.eye(heads) + 0.1 * torch.randn(heads, heads))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bhqk,hg->bgqk", super().score(q, k), self.pre)


VIOLATING: Violations = {
    "shared_heads": [
        (share_in_turn_for_one, {}),
    ],
    "own_context": [
        (AddsUpEarlierHeads, {}),
    ],
    "head_norms": [
        (OverChannelsOfTokens, {}),
        (OverChannelsAndTokens, {}),
        (HeadsWithOneNorm, {}),
        (LengthOneOfHeads, {}),
        (LengthOneOfTokens, {}),
        (LatentsOfOtherHeads, {}),
        (StreamsOfOtherHeads, {}),
    ],
    "head_directions": [
        (MiddleHeadSeesAll, {}),
    ],
    "head_independence": [
        (CosinesOfAllBehindNorm, {}),
        (CosinesOfAllHeads, {}),
        (CosineOfAllHeads, {}),
        (NormalizesOverHeads, {}),
        (NormalizesCausally, CAUSAL),
        (WeightlessNormOfAllHeads, {}),
        (WithNormOverHeads, {}),
        (LengthOneOfHeads, {}),
    ],
}


PASSING_ONE: Passes = [
    ("shared_heads", share_in_turn),
    ("shared_heads", share_in_groups),
    ("head_independence", CosinesBehindNorm),
    ("head_independence", CosinesOfHeads),
    ("query_permutation", OverChannels),
    ("head_independence", CosineInVolume),
    ("head_norms", HeadsWithNorms),
    ("own_context", DividesByOwnSum),
    ("own_context", NormsOverHeads),
    ("head_independence", NormalizesHeads),
    ("head_independence", FusedMultiQuery),
    ("head_independence", WithWeightlessNorm),
    ("head_independence", WithNormOfHeads),
    ("head_directions", HeadsSeeTwoWays),
    ("head_norms", LengthOneOfFeatures),
    ("head_independence", LengthOneOfFeatures),
    ("head_norms", LatentsOfLengthOne),
    ("head_norms", StreamsOfLengthOne),
    ("own_context", WidthByAnotherName),
]


EXCUSED: Excuses = [
    ("head_independence", MapsOverHeads, "its code has `pre`"),
    ("head_norms", TokensWithGlobalNorm, "written by hand"),
    ("head_norms", TokensWithCondition, "written by hand"),
    ("head_directions", OfVisualWidth, "heads are not of two directions"),
    ("head_norms", LengthOneOverTheTokens, "written by hand"),
    ("head_norms", NormsChannels, "written by hand"),
]
