"""Records: written completely or not at all, read back, and shown as tables."""

import datetime
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from attention_bench import report
from attention_bench.report import (
    FORMAT,
    Cell,
    Record,
    as_json,
    from_json,
    result_text,
    table_lines,
    write,
)


def a_record() -> Record:
    result = {"seconds": 0.0123, "p25": 0.012, "p75": 0.013, "speedup": 1.25}
    slower = result | {"speedup": 0.99}
    slower |= {"flops_utilization": 0.71, "bandwidth_utilization": 0.03}
    cell = Cell({"seq_len": 512}, "length 512", {"fast": result, "nn": slower})
    cell.skipped["broken"] = "RuntimeError: no"
    machine = {"device": "a CPU", "threads": 2, "torch": "2.13.0"}
    fits = {"inference time": {"fast": 1.25}}
    return Record("growth", "headnotes bench", "nn", "float32", machine, [cell], fits)


def test_a_record_is_read_back_as_it_was() -> None:
    assert from_json(as_json(a_record())) == a_record()


def test_numbers_have_four_digits() -> None:
    record = a_record()
    record.cells[0].results["fast"]["seconds"] = 0.0123456789
    record.cells[0].results["fast"]["speedup"] = float("nan")
    result = json.loads(as_json(record))["cells"][0]["results"]["fast"]
    assert result["seconds"] == 0.01235
    assert result["speedup"] is None  # JSON has no NaN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", f"its `format` is None, not {FORMAT}; measure it again"),
        ('{"format": 1}', f"its `format` is 1, not {FORMAT}; measure it again"),
        (f'{{"format": {FORMAT}}}', "'cells'"),
        (f'{{"format": {FORMAT}, "cells": [{{"a": 1}}]}}', "Cell.__init"),
        (f'{{"format": {FORMAT}, "cells": []}}', "Record.__init__"),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"not a benchmark record: {message}")
    ):
        from_json(text)


def test_a_file_is_written_completely_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results" / "a.json"
    write(path, "old\n")
    assert path.read_text(encoding="utf-8") == "old\n"
    assert path.stat().st_mode & 0o777 == 0o644

    def interrupt(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(path, "new\n")
    assert path.read_text(encoding="utf-8") == "old\n"
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_a_table_starts_with_the_fastest() -> None:
    record = a_record()
    record.cells[0].results["nn"]["seconds"] = 0.0122
    lines = list(table_lines(record))
    assert lines == [
        "growth, float32, on a CPU, 2 threads, torch 2.13.0",
        "",
        "length 512",
        "  nn                   12.2 ms   ±  4%     0.99 × nn      71% of peak FLOP/s",
        "  fast                 12.3 ms   ±  4%     1.25 × nn",
        "  broken            skipped: RuntimeError: no",
        "",
        "inference time grows with the length to the power of",
        "  fast 1.25",
    ]


def test_memory_is_sorted_by_its_peak() -> None:
    results = {
        "large": {"peak": 5 * 2**20, "retained": 2**20},
        "small": {"peak": 3 * 2**20, "retained": 0},
    }
    record = Record("memory", "", "nn", "float32", {}, [Cell({}, "a cell", results)])
    assert list(table_lines(record))[3:] == [
        "  small                  3.0 MiB peak,      0.0 MiB retained",
        "  large                  5.0 MiB peak,      1.0 MiB retained",
    ]


def test_ties_are_marked_but_not_the_baseline() -> None:
    result = {"seconds": 1.0, "p25": 1.0, "p75": 1.0, "speedup": 0.99}
    assert result_text("other", result, "nn").endswith("0.99 × nn tie ")
    assert "tie" not in result_text("nn", result, "nn")


def test_a_single_sample_has_no_spread() -> None:
    result = {"seconds": 1.0, "p25": 1.0, "p75": 1.0, "samples": 1}
    assert result_text("nn", result, "nn") == "    1.00 s   1 run"
    assert "±  0%" in result_text("nn", result | {"samples": 2}, "nn")


def test_the_closer_peak_rate_is_named() -> None:
    result = {"seconds": 1.0, "p25": 1.0, "p75": 1.0}
    result |= {"flops_utilization": 0.1, "bandwidth_utilization": 0.8}
    assert result_text("a", result, "nn").endswith(" 80% of peak bandwidth")
    result["flops_utilization"] = 0.9
    assert result_text("a", result, "nn").endswith(" 90% of peak FLOP/s")
    result["operators"] = 14
    assert result_text("a", result, "nn").endswith("  14 operators")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (123.456, "123 s"),
        (1.5, "1.50 s"),
        (0.999, "999 ms"),
        (0.0456, "45.6 ms"),
        (42.1e-6, "42.1 µs"),
        (3e-9, "0.00 µs"),
    ],
)
def test_times_have_three_digits(seconds: float, words: str) -> None:
    assert report.duration(seconds) == words


def test_a_record_describes_its_machine(device: torch.device) -> None:
    machine = report.describe_machine(device)
    assert machine["device_type"] == device.type
    assert machine["device"]
    assert machine["torch"] == torch.__version__
    assert machine["threads"] == torch.get_num_threads()
    assert machine["cores"] >= 1
    assert machine["memory_gib"] > 0
    assert datetime.date.fromisoformat(machine["date"])


def test_only_installed_libraries_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LIBRARIES", ("torch", "no-such-library"))
    machine = report.describe_machine(torch.device("cpu"))
    assert list(machine["libraries"]) == ["torch"]


@pytest.mark.parametrize(
    ("tracked", "changed", "expected"),
    [(0, "", "abc1234"), (0, " M a.py\n", "abc1234+"), (1, "", "")],
)
def test_the_commit_is_marked_if_files_are_changed(
    tracked: int, changed: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = {
        "ls-files": (tracked, "a.py\n"),
        "status": (0, changed),
        "rev-parse": (0, "abc1234\n"),
    }

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        code, output = outputs[command[3]]
        return subprocess.CompletedProcess(command, code, output, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert report.commit() == expected


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", run)
    assert report.commit() == ""


@pytest.mark.slow
def test_peak_rates_are_the_best_of_several_measurements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([9.0, 2.0, 4.0, 9.0, 8.0, 0.5])

    def timer(call: object, repeats: int) -> float:
        return next(times)

    monkeypatch.setattr(report, "timer_for", lambda device: timer)
    rates = report.peak_rates(torch.device("cpu"), torch.float32, repeats=2)
    assert rates["flops_per_second"] == 2 * 2048**3 / 2.0
    assert rates["bytes_per_second"] == 2 * 4 * 2**26 / 0.5


def test_a_device_name_fits_into_a_file_name() -> None:
    assert report.slug("NVIDIA H200 (141 GB)") == "nvidia-h200-141-gb"
