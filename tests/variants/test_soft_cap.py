"""Soft-capped attention: scores bounded by a tanh, after the scale, before the mask."""

import math
import re
from typing import Any

import pytest
import torch

from claims import (
    assert_equals_the_loops,
    inputs,
    some_mask,
)
from contract import randomize
from headnotes.mha import MultiHeadAttention
from headnotes.variants.soft_cap import SoftCapAttention
from loops import dot


@pytest.mark.parametrize("masked", [False, True])
def test_the_scores_are_capped_after_the_scale_and_before_the_mask(
    masked: bool,
) -> None:
    # A cap far below the scores: it matters where it stands.
    assert_equals_the_loops(
        SoftCapAttention(2, 6, soft_cap=0.7),
        some_mask() if masked else None,
        score=lambda q, k, at: 0.7 * torch.tanh(dot(q, k) / 0.7),
    )


def test_with_a_large_cap_it_is_the_core() -> None:
    core = MultiHeadAttention(2, 6).double().eval()
    randomize(core)
    module = SoftCapAttention(2, 6, soft_cap=1e7).double().eval()
    module.load_state_dict(core.state_dict())
    xs = inputs(6)
    torch.testing.assert_close(module(**xs), core(**xs), rtol=0, atol=1e-11)


@pytest.mark.parametrize("soft_cap", [50.0, 1e9])
def test_float16_neither_underflows_nor_overflows_at_the_cap(soft_cap: float) -> None:
    # A score by 1e9 is below the least number of float16, 3,000 times 50 beyond the
    # largest.
    module = SoftCapAttention(2, 22, soft_cap=soft_cap)
    query = (2 * torch.randn(3, 5, 2, 11)).half().requires_grad_()
    key = torch.eye(11).half().view(11, 1, 1, 11).expand(-1, 5, 2, -1)
    results = []
    for dtype in (torch.float16, torch.float64):
        scores = module.get_scores(query.to(dtype), key.to(dtype))
        (grad,) = torch.autograd.grad(3000 * scores.sum(), query)
        results.append([scores.double(), grad.double()])
    torch.testing.assert_close(*results, rtol=0.002, atol=0.002)


@pytest.mark.parametrize(
    "soft_cap", [0, -1.0, math.inf, math.nan, None, "50", True], ids=str
)
def test_a_cap_that_bounds_nothing_is_refused(soft_cap: Any) -> None:
    message = f"`soft_cap` (={soft_cap!r}) must be a finite number above 0; for scores"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        SoftCapAttention(2, 6, soft_cap=soft_cap)
