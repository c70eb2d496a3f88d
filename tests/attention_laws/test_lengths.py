"""Laws of long sequences: each fails on attention that violates it."""

import pytest
import torch

from attention_laws import LAWS
from attention_laws.lengths import __name__ as family
from specimens import assert_caught

NAMES = [name for name, law in LAWS.items() if law.test.__module__ == family]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_law_fails_on_implementations_that_violate_it(
    name: str, device: torch.device
) -> None:
    assert_caught(name, device.type)
