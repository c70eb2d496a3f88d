"""Modules that violate the laws of sinks, or come near to it."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specimens.base import (
    Correct,
    Excuses,
    MaskedSelfAttention,
    Passes,
    SelfAttention,
    Violations,
)


class Sinks(SelfAttention):
    """One score for each head that takes weight and has no value."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        sinks = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]


class SinksInEachScore(Sinks):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return torch.logaddexp(scores, self.sinks[:, None, None]).softmax(dim=-1)


class SinksBesideMaximum(Sinks):
    """The largest score is subtracted from the scores, and not from the sinks."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        shares = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        sinks = self.sinks[:, None, None].exp()
        return shares / (sinks + shares.sum(dim=-1, keepdim=True))


class KeysOfFullPairs(SelfAttention):
    """A key of two tokens, hidden until both are given, and a learned one."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.null_key = nn.Parameter(torch.zeros(1, 1, d_model))
        self.null_value = nn.Parameter(torch.zeros(1, 1, d_model))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        full = x[:, : x.shape[1] // 2 * 2]
        pairs = full.unflatten(1, (-1, 2)).mean(dim=2)
        number = torch.arange(x.shape[1], device=x.device)
        mask = 2 * number[: pairs.shape[1]] < number[:, None]
        mask = nn.functional.pad(mask, (1, 0), value=True)[None]
        k, v = (
            torch.cat([null.expand(len(x), -1, -1), layer(pairs)], dim=1)
            for null, layer in (
                (self.null_key, self.key),
                (self.null_value, self.value),
            )
        )
        q, k, v = (self.split(each) for each in (self.query(x), k, v))
        return self.join(self.weigh(self.score(q, k), mask) @ v)


class SinksOfOtherMaximum(Sinks):
    """The largest of all scores is subtracted, but not from the sinks."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        sinks = self.sinks[:, None, None]
        top = scores.amax(dim=-1, keepdim=True).maximum(sinks)
        shares = (scores - top).exp()
        return shares / (
            shares.sum(dim=-1, keepdim=True) + (sinks - self.lower(top)).exp()
        )

    def lower(self, top: Tensor) -> Tensor:
        return torch.zeros_like(top)


class SinksOfOneMaximum(SinksOfOtherMaximum):
    def lower(self, top: Tensor) -> Tensor:
        return top


class SinksWithValues(Sinks):
    """What a sink takes from the keys has a value of its own."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.sink_value = nn.Parameter(torch.zeros(heads, 1, d_model // heads))

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        rest = 1 - weights.sum(dim=-1, keepdim=True)
        return super().read(weights, v) + rest * self.sink_value


class OffByOne(Correct):
    """A sink of 0: the denominator of the softmax has a 1, so that weights may vanish.

    Queries, keys and values of a token are made by one layer.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        del self.query, self.key, self.value
        self.qkv = nn.Linear(d_model, 3 * d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = map(self.split, self.qkv(x).chunk(3, dim=-1))
        return self.join(softmax_one(self.score(q, k), self.sink) @ v)

    def sink(self, largest: Tensor) -> Tensor:
        return (-largest).exp()


class OffByOneOfLargest(OffByOne):
    """Above 0, the 1 is added after the largest score was subtracted."""

    def sink(self, largest: Tensor) -> Tensor:
        return torch.ones_like(largest)


def softmax_one(scores: Tensor, sink: Callable[[Tensor], Tensor]) -> Tensor:
    largest = scores.amax(dim=-1, keepdim=True).clamp(min=0.0)
    shares = (scores - largest).exp()
    return shares / (sink(largest) + shares.sum(dim=-1, keepdim=True))


def attend_beside_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """q, k, v: (batch, heads, length, d_k); sinks: (heads,)"""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    largest = scores.amax(dim=-1, keepdim=True)
    total = (scores - largest).exp().sum(dim=-1, keepdim=True)
    context = (scores - largest).exp() @ v
    if sinks is not None:
        sink = sinks.view(-1, 1, 1)
        most = torch.maximum(largest, sink)
        factor = (largest - most).exp()
        context, total = context * factor, total * factor + (sink - most).exp()
    return context / total


def attend_beside_unscaled_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """q, k, v: (batch, heads, length, d_k); sinks: (heads,)"""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    largest = scores.amax(dim=-1, keepdim=True)
    total = (scores - largest).exp().sum(dim=-1, keepdim=True)
    if sinks is not None:
        sink = sinks.view(-1, 1, 1)
        total = total + (sink - torch.maximum(largest, sink)).exp()
    return (scores - largest).exp() @ v / total


class SinksDividedAway(MaskedSelfAttention):
    """What is left to the keys is divided by its sum, unless that is tiny."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        weights = Sinks.weigh(self, scores, None)  # type: ignore[arg-type]
        return weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-5)


class SinksOfGroups(nn.Module):
    """Few keys and values, in one layer, whose outputs are fewer than its inputs."""

    def __init__(self, d_model: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        width = d_model // heads
        self.q = nn.Linear(d_model, d_model)
        self.kv = nn.Linear(d_model, 2 * kv_heads * width)
        self.o = nn.Linear(d_model, d_model)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = self.kv(x).unflatten(-1, (2, self.kv_heads, -1)).permute(2, 0, 3, 1, 4)
        k, v = kv.repeat_interleave(self.heads // self.kv_heads, dim=2)
        weights = Sinks.weigh(self, q / q.shape[-1] ** 0.5 @ k.mT, None)  # type: ignore[arg-type]
        y: Tensor = self.o((weights @ v).transpose(1, 2).flatten(2))
        return y


VIOLATING: Violations = {
    "sinks": [
        (SinksDividedAway, {}),
        (SinksInEachScore, {}),
        (SinksOfOtherMaximum, {}),
        (attend_beside_unscaled_sinks, {}),
    ],
    "sinks_compete": [
        (OffByOneOfLargest, {}),
        (SinksBesideMaximum, {}),
    ],
}


PASSING_ONE: Passes = [
    ("sinks_compete", SinksOfGroups(48, 6, 2)),
    ("sinks_compete", OffByOne),
    ("sinks", SinksOfOneMaximum),
    ("sinks", SinksWithValues),
    ("sinks", Sinks),
    ("sinks_compete", Sinks),
    ("sinks", attend_beside_sinks),
]


EXCUSED: Excuses = [
    ("sinks_compete", KeysOfFullPairs, "a single key is hidden"),
]
