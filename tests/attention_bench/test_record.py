"""Records: written whole or not at all, and read back as they were."""

import json
import re
from pathlib import Path

import pytest

from attention_bench import record
from attention_bench.record import Cell, Run, as_json, describe, from_json, table, write


def a_run() -> Run:
    found = {"seconds": 0.0123, "low": 0.012, "high": 0.013, "ratio": 1.25}
    slower = found | {"ratio": 0.99, "of_matmul": 0.71, "of_copy": 0.03}
    cell = Cell({"seq_len": 512}, "length 512", {"fast": found, "nn": slower})
    cell.left_out["broken"] = "RuntimeError: no"
    machine = {"device": "a CPU", "threads": 2, "torch": "2.13.0"}
    fits = {"time of inference": {"fast": 1.25}}
    return Run("growth", "headnotes bench", "nn", "float32", machine, [cell], fits)


def test_a_record_is_read_back_as_it_was() -> None:
    assert from_json(as_json(a_run())) == a_run()


def test_numbers_are_kept_with_four_digits() -> None:
    run = a_run()
    run.cells[0].results["fast"]["seconds"] = 0.0123456789
    run.cells[0].results["fast"]["ratio"] = float("nan")
    found = json.loads(as_json(run))["cells"][0]["results"]["fast"]
    assert found["seconds"] == 0.01235
    assert found["ratio"] is None  # NaN is no JSON


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no record of a benchmark: Expecting property name"),
        ("[]", "no record of a benchmark: its `format` is None, not 1"),
        ('{"format": 2}', "no record of a benchmark: its `format` is 2, not 1"),
        ('{"format": 1}', "no record of a benchmark: 'cells'"),
        ('{"format": 1, "cells": [{"a": 1}]}', "no record of a benchmark: Cell.__init"),
        ('{"format": 1, "cells": []}', "no record of a benchmark: Run.__init__"),
    ],
)
def test_what_is_no_record_is_said(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_json(text)


def test_a_file_is_written_whole_or_not_at_all(
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


def test_a_table_puts_the_fastest_first() -> None:
    run = a_run()
    run.cells[0].results["nn"]["seconds"] = 0.0122
    lines = list(table(run))
    assert lines == [
        "growth, float32, on a CPU, 2 threads, torch 2.13.0",
        "",
        "length 512",
        "  nn                   12.2 ms   ±  4%     0.99 × nn      71% of matmul",
        "  fast                 12.3 ms   ±  4%     1.25 × nn",
        "  broken            left out: RuntimeError: no",
        "",
        "time of inference grows with the length to the power of",
        "  fast 1.25",
    ]


def test_ties_are_called_ties_but_not_with_oneself() -> None:
    found = {"seconds": 1.0, "low": 1.0, "high": 1.0, "ratio": 0.99}
    assert describe("other", found, "nn").endswith("0.99 × nn tie ")
    assert "tie" not in describe("nn", found, "nn")


def test_the_nearer_ceiling_is_named() -> None:
    found = {"seconds": 1.0, "low": 1.0, "high": 1.0, "of_matmul": 0.1, "of_copy": 0.8}
    assert describe("a", found, "nn").endswith(" 80% of copy")
    found["of_matmul"] = 0.9
    assert describe("a", found, "nn").endswith(" 90% of matmul")
    assert describe("a", found | {"operators": 14}, "nn").endswith("  14 operators")


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
    assert record.duration(seconds) == words
