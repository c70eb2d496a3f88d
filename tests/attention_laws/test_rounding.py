"""What is rounded in half precision: positions, a linear bias, or nothing."""

from typing import Any

import pytest
import torch

from attention_laws.adapter import Options, Sizes
from attention_laws.infer import infer_adapter
from attention_laws.rounding import counts_in_half, rounds_bias, rounds_with_buffers
from attention_laws.script import Script
from specimens.base import LinearBias, Rotary
from specimens.positions import BiasCountedInHalf, BiasOfKeys, RotatedInEachDtype


def script_of(kind: Any, positions: str) -> Script:
    """A script at 300 tokens; bfloat16 rounds the last positions."""
    adapter = infer_adapter(kind, kind.__name__, "", Options(positions=positions))
    return Script(adapter, Sizes(1, 300, 300, adapter.heads, adapter.d_k))


@pytest.mark.parametrize(
    ("kind", "rounds"), [(RotatedInEachDtype, True), (Rotary, False)]
)
def test_buffers_in_half_precision_round_what_is_computed_of_them(
    kind: Any, rounds: bool
) -> None:
    assert rounds_with_buffers(script_of(kind, "rotary"), torch.bfloat16) == rounds


def test_a_bias_is_rounded_like_its_size_and_counted_positions_are_not() -> None:
    kinds = BiasOfKeys, LinearBias, BiasCountedInHalf
    scripts = [script_of(kind, "alibi") for kind in kinds]
    assert [rounds_bias(s, torch.bfloat16) for s in scripts] == [True, True, False]
    counted = [counts_in_half(script, torch.bfloat16) for script in scripts]
    assert counted == [False, False, True]
