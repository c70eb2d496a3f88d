"""The law of constructor options: it fails on options that one path forgets."""

import pytest
import torch

from specimens import assert_caught


@pytest.mark.slow
def test_the_law_fails_on_options_that_one_path_forgets(device: torch.device) -> None:
    assert_caught("constructor_options", device.type)
