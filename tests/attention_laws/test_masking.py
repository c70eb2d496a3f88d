"""Laws of masking: each fails on attention that violates it."""

import pytest
import torch

from attention_laws import LAWS, check
from attention_laws.masking import __name__ as family
from specimens import NeighborsOfThreeInputs, assert_caught

NAMES = [name for name, law in LAWS.items() if law.test.__module__ == family]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_law_fails_on_implementations_that_violate_it(
    name: str, device: torch.device
) -> None:
    assert_caught(name, device.type)


def test_padded_queries_of_windows_are_not_compared() -> None:
    laws, mask = ["padding", "neutral_mask"], {"mask": "attend:bk"}
    assert check(NeighborsOfThreeInputs, only=laws, mask=mask).ok
