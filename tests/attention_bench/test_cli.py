"""`headnotes bench`: what it prints, what it writes, and how it exits."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention_bench import cli as command
from attention_bench.cli import file_name
from attention_bench.record import Cell, Run, as_json, from_json
from headnotes.cli import main

COMMAND = [sys.executable, "-m", "headnotes.cli", "bench"]
TINY = ["--sizes", "2x3", "--masks", "causal", "--seconds", "0.01"]


def test_a_process_prints_a_table_and_writes_records(tmp_path: Path) -> None:
    results, file = tmp_path / "results", tmp_path / "all.json"
    words = ["tiny", "--only", "core,nn,sdpa", *TINY]
    words += ["--results", str(results), "--json", str(file)]
    result = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.startswith("tiny, float32, on ")
    assert ", 1 thread, torch " in result.stdout
    assert "\n\nbatch 2, length 3, causal\n  " in result.stdout
    assert result.stdout.count(" operators\n") == 3
    (run,) = json.loads(file.read_text(encoding="utf-8"))
    (written,) = results.iterdir()
    assert written.name.startswith("tiny-")
    read = from_json(written.read_text(encoding="utf-8"))
    assert json.loads(as_json(read)) == run
    assert set(read.cells[0].results) == {"core", "nn", "sdpa"}
    assert read.command == (
        "headnotes bench tiny --only core,nn,sdpa --sizes 2x3 --masks causal "
        "--seconds 0.01"
    )


def test_ceilings_are_measured_where_they_can_be_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Busy with something else at first, it copies faster at the end.
    found = {"flops_per_second": 1e12, "bytes_per_second": 1e9}
    other = {"flops_per_second": 1e11, "bytes_per_second": 1e10}
    measured = itertools.cycle([found, other])
    monkeypatch.setattr(command, "ceilings", lambda *_: next(measured))
    seen = []
    monkeypatch.setattr(command, "write", lambda path, text: seen.append(text))
    words = ["bench", "inference", "growth", "tiny", "--only", "nn", *TINY]
    assert main([*words, "--json", "here.json"]) == 0
    inference, growth, tiny = json.loads(seen[0])
    assert inference["machine"]["flops_per_second"] == 1e12
    assert inference["machine"]["bytes_per_second"] == 1e10
    (cell,) = inference["cells"]
    nn, work = cell["results"]["nn"], cell["setting"]
    reached = work["flops"] / nn["seconds"] / 1e12
    assert nn["of_matmul"] == pytest.approx(reached, rel=0.01)
    assert nn["of_copy"] == pytest.approx(
        work["bytes"] / nn["seconds"] / 1e10, rel=0.01
    )
    assert "flops_per_second" not in tiny["machine"]
    assert "of_matmul" not in tiny["cells"][0]["results"]["nn"]
    assert list(growth["exponents"]) == ["time of inference"]
    assert inference["exponents"] == {}
    assert inference["seconds"] > 0
    capsys.readouterr()


def answered(*arguments: object) -> Run:
    """Instead of minutes of timing."""
    name, question = arguments[:2]
    setting = question.settings()[0].as_json()  # type: ignore[attr-defined]
    found = {"seconds": 1.0, "low": 1.0, "high": 1.0, "ratio": 1.0}
    cells = [Cell(setting, "a cell", {"nn": found})]
    machine = {"device": "A CPU", "threads": torch.get_num_threads()}
    return Run(str(name), "", "nn", "float32", machine, cells)


def test_threads_are_given_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "answer", answered)
    before = torch.get_num_threads()
    assert main(["bench", "growth", "--threads", "2"]) == 0
    assert "2 threads" in capsys.readouterr().out
    assert torch.get_num_threads() == before


def test_what_was_finished_is_there_when_interrupted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def impatient(*arguments: object) -> Run:
        if arguments[0] == "training":
            raise KeyboardInterrupt
        return answered(*arguments)

    monkeypatch.setattr(command, "answer", impatient)
    words = ["bench", "inference", "training", "--results", str(tmp_path)]
    assert main([*words, "--json", str(tmp_path / "all.json")]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["inference-a-cpu.json"]
    assert capsys.readouterr().err == "headnotes bench: interrupted\n"


def test_what_cannot_be_asked_is_said_and_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "answer", lambda *_: pytest.fail("it was timed"))
    assert main(["bench", "--dtype", "int8"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("headnotes bench: `--dtype int8` is no dtype; ")


def test_the_bar_is_told_of_each_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = []
    monkeypatch.setattr(command, "answer", answered)
    monkeypatch.setattr(
        command.Progress,
        "begin",
        lambda self, name, settings, seconds: begun.append((name, len(settings))),
    )
    assert main(["bench", "tiny", "growth"]) == 0
    assert begun[-2:] == [("tiny", 4), ("growth", 5)]
    capsys.readouterr()


def test_unusual_runs_have_names_of_their_own() -> None:
    machine = {"device": "NVIDIA H200"}
    usual = Run("decode", "headnotes bench decode", "nn", "float32", machine)
    assert file_name(usual) == "decode-nvidia-h200.json"
    usual.command += " --compile"
    usual.dtype = "bfloat16"
    assert file_name(usual) == "decode-nvidia-h200-bfloat16-compiled.json"
