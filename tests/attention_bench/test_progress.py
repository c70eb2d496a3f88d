"""The bar: silent where nobody looks, and honest about the time that is left."""

import re

import pytest

from attention_bench import progress
from attention_bench.progress import Progress, left
from attention_bench.setting import Setting

SETTINGS = [Setting(1, 64), Setting(1, 4096)]


def test_nothing_is_shown_where_nobody_looks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = Progress()
    bar.begin("inference", SETTINGS, 1.0)
    bar(1, "length 4,096")
    bar.clear()
    assert capsys.readouterr().err == ""


def test_the_time_left_is_weighed_by_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    now = iter([0.0, 100.0, 101.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
    bar = Progress()
    bar.begin("inference", SETTINGS, 1.0)
    bar(0, "length 64")
    shown = capsys.readouterr().err
    assert shown == f"\rinference {'·' * 20} 0/2 length 64"
    assert "left" not in shown
    bar(1, "length 4,096")
    shown = capsys.readouterr().err
    # One of two cells is done, in a second, but not half of the work.
    small, large = bar.weights
    assert large > 10 * small
    assert shown.endswith(f"1/2 length 4,096, {large / small:.0f} s left")
    bar.clear()
    assert re.fullmatch(r"\r +\r", capsys.readouterr().err)
    bar.clear()
    assert capsys.readouterr().err == ""


def test_a_line_is_never_wrapped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = Progress()
    bar.begin("inference", SETTINGS, 1.0)
    bar(0, "x" * 200)
    assert len(capsys.readouterr().err.lstrip("\r")) <= 79


def test_times_are_said_as_one_says_them() -> None:
    assert left(0.2) == "0 s left"
    assert left(89) == "89 s left"
    assert left(100) == "2 min left"
