"""Laws of returned weights: each fails on attention that violates it."""

import pytest
import torch

from attention_laws import LAWS, check, weights
from specimens import assert_caught, each_law_of
from specimens.weights import WeightsWithoutPadding


@each_law_of(weights)
def test_each_law_fails_on_implementations_that_violate_it(
    name: str, device: torch.device
) -> None:
    assert_caught(name, device.type)


@pytest.mark.slow
def test_weights_that_are_right_without_a_mask_are_of_no_mixed_heads() -> None:
    skipped = [name for name in LAWS if name != "weights_match_output"]
    report = check(WeightsWithoutPadding, skip=skipped)
    assert [result.law.name for result in report.failed] == ["weights_match_output"]
