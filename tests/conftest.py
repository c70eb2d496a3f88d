"""Fixtures for all tests: a device, a seed, and what MkDocs logs."""

import gc
import logging
from collections.abc import Iterator
from io import StringIO

import hypothesis
import pytest
import torch

# How long a random example takes says nothing on a busy machine.
hypothesis.settings.register_profile(
    "any speed",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any speed")

# The tensors of the tests are small; threads would only wait for one another.
torch.set_num_threads(1)


def pytest_collection() -> None:
    """Collect no garbage while modules are imported: they stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Garbage collection looks at new objects only: a million are older."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the CUDA cases where there is no such device.

    The fixture could do this, too. But pytest reports a skip in a fixture at each test,
    in hundreds of lines; those from here have one place, and share one line.
    """
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if parameters.get("device") == "cuda" and not torch.cuda.is_available():
        pytest.skip("the CUDA cases: this machine has no CUDA device")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers in each test, whatever ran before it."""
    if torch.cuda.is_available():
        torch.manual_seed(2017)
    else:
        # The same numbers. The function above keeps a traceback for missing devices.
        torch.default_generator.manual_seed(2017)


@pytest.fixture
def logged() -> Iterator[StringIO]:
    """What MkDocs and its plugins log."""
    text = StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger("mkdocs").addHandler(handler)
    yield text
    logging.getLogger("mkdocs").removeHandler(handler)
