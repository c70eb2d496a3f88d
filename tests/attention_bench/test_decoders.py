"""Comparisons of decoders: each implementation is right before it is timed."""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest

from attention_bench import decoders
from attention_bench.decoders import COMPARISONS
from attention_bench.run import time_comparison
from attention_bench.setting import Setting

pytestmark = pytest.mark.filterwarnings("ignore")
LIBRARIES = {"llama": "transformers", "x-transformers": "x_transformers"}


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "WINDOW", 11)


def small(name: str) -> Setting:
    """The setting of a comparison with fewer tokens and narrower heads."""
    setting = COMPARISONS[name].setting
    return replace(setting, batch_size=2, seq_len=19, d_model=8 * setting.heads)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARISONS)
def test_all_compute_their_reference(name: str) -> None:
    cell = time_comparison(name, small(name), seconds=0)
    missing = [
        each
        for each, library in LIBRARIES.items()
        if importlib.util.find_spec(library) is None
    ]
    assert set(cell.skipped) <= {*missing}, cell.skipped
    assert all(result["max_error"] < 1e-5 for result in cell.results.values())
    if not missing or name != "training":
        # The baseline comes first, and the others are compared with it.
        has_speedup = ["speedup" in result for result in cell.results.values()]
        assert has_speedup == [False, *[True] * (len(has_speedup) - 1)]
        assert len(has_speedup) > 1


@pytest.mark.slow
def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoders.attention

    def wrong(*args: Any, window: int | None, **options: Any) -> Any:
        window = None if window is None else window - 1
        return right(*args, window=window, **options)

    monkeypatch.setattr(decoders, "attention", wrong)
    cell = time_comparison("window", small("window"), seconds=0)
    assert [*cell.results] == ["causal"]
    assert "not equal: " in cell.skipped["window 11"]
