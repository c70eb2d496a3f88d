"""Laws of masking: each fails on attention that violates it."""

import torch

from attention_laws import LAWS, check, masking
from specimens import assert_caught, each_law_of
from specimens.masking import (
    CountsPaddingBehindNorm,
    NeighborsOfThreeInputs,
    NotANumberAtPadding,
)


@each_law_of(masking)
def test_each_law_fails_on_implementations_that_violate_it(
    name: str, device: torch.device
) -> None:
    assert_caught(name, device.type)


def test_padded_queries_of_windows_are_not_compared() -> None:
    laws, mask = ["padding", "neutral_mask"], {"mask": "attend:bk"}
    assert check(NeighborsOfThreeInputs, only=laws, mask=mask).ok


def test_outputs_that_are_documented_to_be_zero_are_not_left_to_the_caller() -> None:
    others = [name for name in LAWS if name != "fully_masked_rows"]
    assert not check(NotANumberAtPadding, skip=others).ok


def test_a_norm_of_each_token_is_no_excuse_for_a_count_of_padding() -> None:
    others = [name for name in LAWS if name != "longer_padding"]
    assert not check(CountsPaddingBehindNorm, skip=others).ok
