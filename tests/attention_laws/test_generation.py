"""The law of generation: it fails on models that violate it."""

import torch

from attention_laws import generation
from specimens import assert_caught, each_law_of


@each_law_of(generation)
def test_each_law_fails_on_implementations_that_violate_it(
    name: str, device: torch.device
) -> None:
    assert_caught(name, device.type)
