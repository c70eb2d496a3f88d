"""The law of decoding: it fails on attention that violates it."""

import pytest
import torch

from attention_laws import LAWS, check
from attention_laws.adapter import Adapter, Sizes
from attention_laws.law import NotApplicable
from attention_laws.script import Script
from specimens import assert_caught
from specimens.decoding import (
    CacheOfFloats,
    ConvolvesWithoutState,
    RotaryInDtypeOfBufferAfterPast,
)


@pytest.mark.slow
def test_the_law_fails_on_implementations_that_violate_it(device: torch.device) -> None:
    assert_caught("incremental_decoding", device.type)


def test_a_cache_may_be_without_the_state_of_a_convolution() -> None:
    adapter = Adapter(
        ConvolvesWithoutState(12, 3),
        "Attention",
        "",
        {},
        inputs=("x",),
        cache=("past", "[1]"),
        causal=True,
        designs={"convolution": "Conv1d"},
    )
    with pytest.raises(NotApplicable, match="state of its convolution"):
        LAWS["incremental_decoding"].test(Script(adapter, Sizes(2, 3, 3, 3, 4)))


@pytest.mark.slow
def test_positions_in_the_dtype_of_a_buffer_fail_only_on_request() -> None:
    attention = RotaryInDtypeOfBufferAfterPast
    name = "incremental_decoding"
    report = check(attention, skip=[law for law in LAWS if law != name])
    assert [result.law.name for result in report.passed] == [name], report
    report = check(attention, only=name)
    assert [result.law.name for result in report.failed] == [name], report


@pytest.mark.slow
def test_a_cache_that_refuses_half_precision_fails_only_on_request() -> None:
    name = "incremental_decoding"
    report = check(CacheOfFloats, skip=[law for law in LAWS if law != name])
    assert [result.law.name for result in report.passed] == [name], report
    (failure,) = check(CacheOfFloats, only=name).failed
    assert "dtype" in failure.detail or "scalar type" in failure.detail
