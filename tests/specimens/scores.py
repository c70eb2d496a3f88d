"""Modules that violate the laws of scores, or come near to it."""

import math
from typing import Any

from torch import Tensor, nn

from specimens.base import (
    Correct,
    Excuses,
    MaskedSelfAttention,
    Passes,
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


VIOLATING: Violations = {
    "score_scale": [
        (RotaryScaledByWidth, {"positions": "rotary"}),
    ],
    "large_scores": [
        (FillValueTooHigh, {}),
        (SoftmaxWithoutMaximum, {}),
        (MaskedSoftmaxWithoutMaximum, {}),
    ],
}


PASSING_ONE: Passes = [
    ("score_scale", RotaryAfterNorms),
    ("relative_positions", RotaryAfterNorms),
    ("relative_positions", RotaryOfManyDevices),
    ("large_scores", FillsWithTenThousand),
    ("large_scores", KeysFromFirst),
    ("large_scores", QuarticScores),
]


EXCUSED: Excuses = [
    ("score_scale", RotaryUnscaled, "scaling = 1.0"),
    ("score_scale", RotaryOfManyDevices, "the order of its fused projection"),
    ("weights_match_output", RotaryOfManyDevices, "the order of its fused projection"),
    ("large_scores", BesideState, "its state overflows, and not its scores"),
]
