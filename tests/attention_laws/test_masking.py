"""Laws of what may be read: each is broken by something, and by what it should be."""

import pytest
import torch

from attention_laws import LAWS
from attention_laws.masking import __name__ as family
from specimens import assert_caught

NAMES = [name for name, law in LAWS.items() if law.test.__module__ == family]


@pytest.mark.parametrize("name", NAMES)
def test_each_law_is_broken_by_who_breaks_it(name: str, device: torch.device) -> None:
    assert_caught(name, device.type)
