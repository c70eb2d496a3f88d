"""Modules that violate the laws of sinks, or come near to it."""

from typing import Any

import torch
from torch import Tensor, nn

from specimens.base import Excuses, Passes, SelfAttention, Violations


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


VIOLATING: Violations = {
    "sinks": [
        (SinksInEachScore, {}),
        (SinksOfOtherMaximum, {}),
    ],
    "sinks_compete": [
        (SinksBesideMaximum, {}),
    ],
}


PASSING_ONE: Passes = [
    ("sinks", SinksOfOneMaximum),
    ("sinks", SinksWithValues),
    ("sinks", Sinks),
    ("sinks_compete", Sinks),
]


EXCUSED: Excuses = [
    ("sinks_compete", KeysOfFullPairs, "a single key is hidden"),
]
