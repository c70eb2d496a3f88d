"""Laws of blocks: each fails on attention that violates it."""

import torch

from attention_laws import blocks
from specimens import assert_caught, each_law_of


@each_law_of(blocks)
def test_each_law_fails_on_implementations_that_violate_it(
    name: str, device: torch.device
) -> None:
    assert_caught(name, device.type)
