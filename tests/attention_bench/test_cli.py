"""`headnotes bench`: its options, what it prints and writes, and how it exits."""

import argparse
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_bench import cli
from attention_bench.cli import (
    SELECTABLE,
    OptionError,
    ProgressBar,
    add_arguments,
    file_name,
    parse_options,
    time_left,
)
from attention_bench.decoding import DECODERS
from attention_bench.report import Cell, Record, from_json
from attention_bench.setting import Setting
from attention_bench.suites import QUICK_SUITES, SUITES, Suite
from headnotes.cli import main

COMMAND = [sys.executable, "-m", "headnotes.cli", "bench"]
TINY = ["--sizes", "2x3", "--masks", "causal", "--seconds", "0.01"]


@pytest.mark.slow
def test_a_process_prints_a_table_and_writes_records(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    words = ["tiny", "--only", "core,nn,sdpa", *TINY, "--json", str(file)]
    result = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.startswith("tiny, float32, on ")
    assert ", 1 thread, torch " in result.stdout
    assert "\n\nbatch 2, length 3, causal\n  " in result.stdout
    assert result.stdout.count(" operators\n") == 3
    (fields,) = json.loads(file.read_text(encoding="utf-8"))
    record = from_json(json.dumps(fields))
    assert set(record.cells[0].results) == {"core", "nn", "sdpa"}
    assert record.command == (
        "headnotes bench tiny --only core,nn,sdpa --sizes 2x3 --masks causal "
        "--seconds 0.01"
    )


@pytest.mark.slow
def test_peak_rates_are_measured_for_times_on_all_threads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each of both measurements has the better one of the two rates.
    before = {"flops_per_second": 1e12, "bytes_per_second": 1e9}
    after = {"flops_per_second": 1e11, "bytes_per_second": 1e10}
    measured = itertools.cycle([before, after])
    monkeypatch.setattr(cli, "peak_rates", lambda *_: next(measured))
    monkeypatch.setattr(cli, "find_disturbances", lambda *_: [])
    written = []
    monkeypatch.setattr(cli, "write", lambda path, text: written.append(text))
    words = ["bench", "inference", "growth", "tiny", "--only", "nn", *TINY]
    assert main([*words, "--json", "here.json"]) == 0
    inference, growth, tiny = json.loads(written[0])
    assert inference["machine"]["flops_per_second"] == 1e12
    assert inference["machine"]["bytes_per_second"] == 1e10
    (cell,) = inference["cells"]
    nn, work = cell["results"]["nn"], cell["setting"]
    assert nn["flops_utilization"] == pytest.approx(
        work["flops"] / nn["seconds"] / 1e12, rel=0.01
    )
    assert nn["bandwidth_utilization"] == pytest.approx(
        work["bytes"] / nn["seconds"] / 1e10, rel=0.01
    )
    assert "flops_per_second" not in tiny["machine"]
    assert "flops_utilization" not in tiny["cells"][0]["results"]["nn"]
    assert list(growth["exponents"]) == ["inference time"]
    assert inference["exponents"] == {}
    assert inference["seconds"] > 0
    capsys.readouterr()


@pytest.mark.slow
def test_a_busy_machine_gets_times_without_conclusions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "load_average", lambda: 99.0)
    monkeypatch.setattr(
        cli, "peak_rates", lambda *_: {"flops_per_second": 1, "bytes_per_second": 1}
    )
    results = tmp_path / "results"
    words = ["bench", "growth", "--only", "core,nn", *TINY, "--sizes", "2x3,2x5"]
    assert main([*words, "--results", str(results)]) == 0
    shown = capsys.readouterr().out
    assert "\nno conclusions, because other processes disturbed the measure" in shown
    assert "\n- the load average was 99.0 of " in shown
    assert shown.count("\n  nn  ") == 2
    for conclusion in (" × nn", "% of peak", "to the power of"):
        assert conclusion not in shown
    assert not results.exists()


def fake_measure(name: str, *_: object) -> Record:
    """A record without the minutes of timing."""
    result = {"seconds": 1.0, "p25": 1.0, "p75": 1.0, "speedup": 1.0}
    cells = [Cell(Setting(2, 3).as_dict(), "a cell", {"nn": result})]
    machine = {"device": "A CPU", "threads": torch.get_num_threads()}
    return Record(name, "", "nn", "float32", machine, cells)


def test_threads_are_restored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "measure", fake_measure)
    before = torch.get_num_threads()
    assert main(["bench", "growth", "--threads", "2"]) == 0
    assert "2 threads" in capsys.readouterr().out
    assert torch.get_num_threads() == before


def test_finished_suites_are_written_when_interrupted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(name: str, *_: object) -> Record:
        if name == "training":
            raise KeyboardInterrupt
        return fake_measure(name)

    monkeypatch.setattr(cli, "measure", interrupted)
    words = ["bench", "inference", "training", "--results", str(tmp_path)]
    assert main([*words, "--json", str(tmp_path / "all.json")]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["inference-a-cpu.json"]
    assert capsys.readouterr().err == "headnotes bench: interrupted\n"


def test_an_invalid_option_is_explained_and_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "measure", lambda *_: pytest.fail("it was timed"))
    assert main(["bench", "--dtype", "int8"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("headnotes bench: `--dtype int8`: unknown dtype; ")


def test_the_progress_bar_begins_with_each_suite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = []
    monkeypatch.setattr(cli, "measure", fake_measure)
    monkeypatch.setattr(
        ProgressBar,
        "begin",
        lambda self, name, settings, seconds: begun.append((name, len(settings))),
    )
    assert main(["bench", "tiny", "growth"]) == 0
    assert begun[-2:] == [("tiny", 4), ("growth", 5)]
    capsys.readouterr()


def test_dtype_and_compilation_are_part_of_the_file_name() -> None:
    machine = {"device": "NVIDIA H200"}
    record = Record("decode", "headnotes bench decode", "nn", "float32", machine)
    assert file_name(record) == "decode-nvidia-h200.json"
    record.command += " --compile"
    record.dtype = "bfloat16"
    assert file_name(record) == "decode-nvidia-h200-bfloat16-compiled.json"


# Options


def parse(*words: str) -> tuple[dict[str, Suite], torch.device, torch.dtype]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parse_options(parser.parse_args(words))


def test_without_options_all_suites_run() -> None:
    suites, device, dtype = parse()
    assert suites == SUITES
    assert (device, dtype) == (torch.device("cpu"), torch.float32)
    assert parse("--quick")[0] == QUICK_SUITES


def test_options_change_the_suites_that_they_apply_to() -> None:
    suites, _, dtype = parse(
        *("training", "inference", "--sizes", "2x64", "--masks", "causal"),
        *("--dropout", "0.3", "--only", "nn,core", "--seconds", "0.5"),
        *("--dtype", "bfloat16"),
    )
    assert list(suites) == ["training", "inference"]
    for suite in suites.values():
        assert suite.sizes == ((2, 64),)
        assert suite.masks == ("causal",)
        assert suite.implementations == ("nn", "core")
        assert suite.seconds == 0.5
    assert suites["training"].dropouts == (0.3,)
    assert suites["inference"].dropouts == (0.0,)
    assert dtype == torch.bfloat16


def test_decode_and_memory_have_no_masks() -> None:
    suites, _, _ = parse("decode", "memory", "--masks", "causal", "--only", "bmm,nn")
    assert suites["decode"].masks == suites["memory"].masks == ("none",)
    assert suites["decode"].implementations == ("bmm", "nn")
    assert suites["memory"].implementations == ("nn",)


def test_compile_adds_a_compiled_form_of_each() -> None:
    suites, _, _ = parse("inference", "decode", "--compile", "--only", "nn,sdpa")
    names = ("nn", "sdpa", "nn+compile", "sdpa+compile", "flex")
    assert suites["inference"].implementations == names
    assert suites["decode"].implementations == ("nn", "sdpa")
    assert "flex" not in parse("inference")[0]["inference"].implementations
    only_flex, _, _ = parse("inference", "--compile", "--only", "flex")
    assert only_flex["inference"].implementations == ("flex",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["speed"], f"`speed`: unknown suite; there are {', '.join(SUITES)}"),
        (
            ["--dtype", "float"],
            "`--dtype float`: unknown dtype; there are float32, float64, bfloat16, "
            "float16",
        ),
        (["--threads", "-1"], "`--threads -1` must be at least 1"),
        (["--device", "gpu"], "`--device gpu` is not a device of PyTorch"),
        (["--device", "meta"], "`--device meta` must be a CPU or a CUDA device"),
        (
            ["--device", "cuda:99"],
            "`--device cuda:99` does not exist; PyTorch sees "
            f"{torch.cuda.device_count()} CUDA devices",
        ),
        (
            ["--only", "core,mine"],
            "`--only mine`: unknown implementation; there are " + ", ".join(SELECTABLE),
        ),
        (
            ["--masks", "window"],
            "`--masks window`: unknown mask; there are none, causal, padding",
        ),
        (
            ["--sizes", "4x512,8"],
            "`--sizes 4x512,8` must be batch sizes and lengths, as in 4x512,2x1024",
        ),
        (
            ["--sizes", "0x512"],
            "`--sizes 0x512` must be batch sizes and lengths, as in 4x512,2x1024",
        ),
        (
            ["--dropout", "0,1"],
            "`--dropout 0,1` must be probabilities from 0 to below 1, as in 0,0.1",
        ),
        (
            ["--dropout", "some"],
            "`--dropout some` must be probabilities from 0 to below 1, as in 0,0.1",
        ),
        (["--seconds", "-2"], "`--seconds -2.0` must be at least 0"),
        (["--seconds", "nan"], "`--seconds nan` must be at least 0"),
        (
            ["--json", "no/such/file.json"],
            "`--json no/such/file.json`: there is no folder `no/such`",
        ),
        (
            ["decode", "--only", "core"],
            "`--only core` leaves no implementation for `decode`; there are "
            + ", ".join(DECODERS),
        ),
        (
            ["training", "--masks", "padding", "--dropout", "0.1"],
            "`training` has no such setting: with dropout, it has neither padding "
            "masks nor lengths above 2,048",
        ),
    ],
)
def test_an_invalid_option_is_explained(words: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        parse(*words)


def test_results_must_not_be_a_file(tmp_path: Any) -> None:
    path = tmp_path / "results"
    path.touch()
    message = f"`--results {path}` is a file, not a folder"
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        parse("--results", str(path))


# The progress bar

SETTINGS = [Setting(1, 64), Setting(1, 4096)]


def test_nothing_is_shown_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = ProgressBar()
    bar.begin("inference", SETTINGS, 1.0)
    bar(1, "length 4,096")
    bar.clear()
    assert capsys.readouterr().err == ""


def test_the_time_left_is_weighted_by_flops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    now = iter([0.0, 100.0, 101.0])
    monkeypatch.setattr(cli.time, "perf_counter", lambda: next(now))
    bar = ProgressBar()
    bar.begin("inference", SETTINGS, 1.0)
    bar(0, "length 64")
    shown = capsys.readouterr().err
    assert shown == f"\rinference {'·' * 20} 0/2 length 64"
    assert "left" not in shown
    bar(1, "length 4,096")
    shown = capsys.readouterr().err
    # One of two settings is done, in a second, but not half of the work.
    small, large = bar.weights
    assert large > 10 * small
    assert shown.endswith(f"1/2 length 4,096, {large / small:.0f} s left")
    bar.clear()
    assert re.fullmatch(r"\r +\r", capsys.readouterr().err)
    bar.clear()
    assert capsys.readouterr().err == ""


def test_a_line_never_wraps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = ProgressBar()
    bar.begin("inference", SETTINGS, 1.0)
    bar(0, "x" * 200)
    assert len(capsys.readouterr().err.lstrip("\r")) <= 79


def test_the_time_left_is_in_seconds_or_minutes() -> None:
    assert time_left(0.2) == "0 s left"
    assert time_left(89) == "89 s left"
    assert time_left(100) == "2 min left"
