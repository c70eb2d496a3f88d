"""What is said of the machine."""

import datetime
import subprocess

import pytest
import torch

from attention_bench import machine


def test_all_that_a_reader_must_know_is_said(device: torch.device) -> None:
    said = machine.describe(device)
    assert said["kind"] == device.type
    assert said["device"]
    assert said["torch"] == torch.__version__
    assert said["threads"] == torch.get_num_threads()
    assert said["cores"] >= 1
    assert said["memory_gib"] > 0
    assert datetime.date.fromisoformat(said["date"])


def test_only_installed_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LIBRARIES", ("torch", "no-such-library"))
    assert list(machine.describe(torch.device("cpu"))["libraries"]) == ["torch"]


@pytest.mark.parametrize(
    ("tracked", "changed", "expected"),
    [(0, "", "abc1234"), (0, " M a.py\n", "abc1234+"), (1, "", "")],
)
def test_the_commit_says_whether_it_is_all(
    tracked: int, changed: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        "ls-files": (tracked, "a.py\n"),
        "status": (0, changed),
        "rev-parse": (0, "abc1234\n"),
    }

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        code, output = said[command[3]]
        return subprocess.CompletedProcess(command, code, output, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert machine.commit() == expected


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", run)
    assert machine.commit() == ""


def test_ceilings_are_the_best_of_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([9.0, 2.0, 4.0, 9.0, 8.0, 0.5])

    def watch(call: object, number: int) -> float:
        return next(times)

    monkeypatch.setattr(machine, "stopwatch", lambda device: watch)
    found = machine.ceilings(torch.device("cpu"), torch.float32, turns=2)
    assert found["flops_per_second"] == 2 * 2048**3 / 2.0
    assert found["bytes_per_second"] == 2 * 4 * 2**26 / 0.5


def test_a_name_fits_into_a_file_name() -> None:
    assert machine.slug("NVIDIA H200 (141 GB)") == "nvidia-h200-141-gb"
