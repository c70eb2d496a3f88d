"""Soft-capped attention: scores bounded by a tanh, after the scale, before the mask."""

import math
import re
from typing import Any

import pytest
import torch

from attention_laws import check
from claims import (
    SLOW_LAWS,
    assert_equals_the_loops,
    assert_equals_transformers,
    assert_half_is_near,
    assert_sound,
    inputs,
    some_mask,
)
from contract import randomize
from headnotes.mha import MultiHeadAttention
from headnotes.variants.soft_cap import SoftCapAttention
from rows import dot


@pytest.mark.parametrize("masked", [False, True])
def test_the_scores_are_capped_after_the_scale_and_before_the_mask(
    masked: bool,
) -> None:
    # A cap far below the scores: it matters where it stands.
    assert_equals_the_loops(
        SoftCapAttention(2, 6, soft_cap=0.7),
        some_mask() if masked else None,
        score=lambda q, k: 0.7 * torch.tanh(dot(q, k) / 0.7),
    )


def test_with_a_large_cap_it_is_the_core() -> None:
    core = MultiHeadAttention(2, 6).double().eval()
    randomize(core)
    module = SoftCapAttention(2, 6, soft_cap=1e7).double().eval()
    module.load_state_dict(core.state_dict())
    xs = inputs(6)
    torch.testing.assert_close(module(**xs), core(**xs), rtol=0, atol=1e-11)


def test_it_is_sound() -> None:
    assert_sound(SoftCapAttention(2, 6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_near(dtype: torch.dtype) -> None:
    assert_half_is_near(lambda: SoftCapAttention(2, 6, soft_cap=5.0), dtype)


@pytest.mark.slow
def test_the_laws_that_apply_pass() -> None:
    report = check(
        SoftCapAttention,
        init_args={"soft_cap": 0.5},
        skip=(*SLOW_LAWS, "formula"),
    )
    assert report.ok, report
    assert len(report.passed) >= 16, report


@pytest.mark.parametrize(
    "soft_cap", [0, -1.0, math.inf, math.nan, None, "50", True], ids=str
)
def test_a_cap_that_bounds_nothing_is_refused(soft_cap: Any) -> None:
    message = f"`soft_cap` (={soft_cap!r}) must be a finite number above 0; for scores"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        SoftCapAttention(2, 6, soft_cap=soft_cap)


def test_it_is_the_attention_of_gemma_2() -> None:
    pytest.importorskip("transformers")
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2Config

    config = Gemma2Config(
        hidden_size=12,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=4,
        query_pre_attn_scalar=4,
        attn_logit_softcapping=2.0,
        layer_types=["full_attention"],
        num_hidden_layers=1,
        attn_implementation="eager",
    )
    theirs = Gemma2Attention(config, 0)
    randomize(theirs)
    assert_equals_transformers(SoftCapAttention(3, 12, soft_cap=2.0), theirs)
