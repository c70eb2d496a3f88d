"""Fixtures for all tests: a device, and a seed."""

import pytest
import torch

# The tensors of the tests are small; threads would only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn; CUDA is skipped, by name, where there is none."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers in each test, whatever ran before it."""
    torch.manual_seed(2017)
