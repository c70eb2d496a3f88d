"""Modules that violate the laws of blocks, or come near to it."""

from typing import Any

from torch import Tensor, nn

from specimens.base import (
    Correct,
    Excuses,
    NormInFront,
    Passes,
    SelfAttention,
    Violations,
)


class PassesOnTheNorm(NormInFront):
    """x = x + attn(norm(x))"""

    def passed_on(self, x: Tensor, h: Tensor) -> Tensor:
        return h


class PlacesOfKeysOnly(Correct):
    """`pos` is added to queries and keys."""

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Any:  # type: ignore[override]
        placed = x if pos is None else x + pos
        return super().forward(placed, placed, self.values_of(x, placed))

    def values_of(self, x: Tensor, placed: Tensor) -> Tensor:
        return x


class PlacesOfValues(PlacesOfKeysOnly):
    """`pos` is added to queries and keys."""

    def values_of(self, x: Tensor, placed: Tensor) -> Tensor:
        return placed


class NormAtBothEnds(SelfAttention):
    """Pre-norm, with one more norm at the end."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm, self.final_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.final_norm(x + super().forward(self.norm(x)))


class ResidualOfCaller(SelfAttention):
    """Pre-norm self-attention; the block adds the residual connection."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.norm(x))


class AttendsBehindNorm(Correct):
    """Attention to a context, if there is one; prenorm included."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)
        self.to_out = nn.Sequential(self.out, nn.Dropout(0.1))
        del self.out

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:  # type: ignore[override]
        x = self.norm(x)
        context = x if context is None else context
        return super().forward(x, context, context)

    def join(self, context: Tensor) -> Tensor:
        joined: Tensor = self.to_out(context.transpose(1, 2).flatten(2))
        return joined


VIOLATING: Violations = {
    "position_free_values": [
        (PlacesOfValues, {}),
    ],
    "residual_connection": [
        (PassesOnTheNorm, {}),
    ],
}


PASSING_ONE: Passes = [
    ("position_free_values", PlacesOfKeysOnly),
    ("residual_connection", NormInFront),
]


EXCUSED: Excuses = [
    (
        "residual_connection",
        AttendsBehindNorm,
        "its caller adds the residual connection",
    ),
    ("residual_connection", ResidualOfCaller, "its caller adds"),
    ("residual_connection", NormAtBothEnds, "that of a norm"),
]
