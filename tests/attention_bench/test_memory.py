"""Memory: the peak of a call, and what it retains."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from attention_bench import memory
from attention_bench.memory import (
    measure,
    measure_in_subprocess,
    reset_peak,
    resident_bytes,
)
from attention_bench.setting import Setting

MIB = 2**20
LINUX = memory.CLEAR_REFS.exists()


@pytest.mark.skipif(not LINUX, reason="the high-water mark cannot be reset here")
def test_the_peak_of_a_call_is_seen_and_reset() -> None:
    cpu = torch.device("cpu")
    before = reset_peak(cpu)
    x = torch.ones(16 * MIB)  # 64 MiB
    del x
    assert resident_bytes()[1] - before > 60 * MIB
    before = reset_peak(cpu)
    assert resident_bytes()[1] - before < 30 * MIB


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="the high-water mark cannot be reset here")
def test_a_process_of_its_own_sees_what_is_retained() -> None:
    settings = [Setting(1, n, d_model=32, heads=8) for n in (64, 512)]
    settings.append(Setting(1, 512, "causal", training=True, d_model=32, heads=8))
    core = list(measure_in_subprocess("core", settings, threads=1))
    small, large, trained = (found for found in core if isinstance(found, dict))
    # 512 by 512 scores of 8 heads in float32 are 8 MiB; the core stores its weights.
    assert 7 * MIB < large["retained"] < 9 * MIB
    assert small["retained"] < 2 * MIB
    assert small["peak"] < 15 * MIB < large["peak"] < 60 * MIB
    assert trained["peak"] > large["peak"]


def test_errors_and_a_killed_process_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        spec = json.loads(command[-1])
        assert spec["name"] == "core"
        assert [s["seq_len"] for s in spec["settings"]] == [3, 5, 7]
        lines = '{"peak": 5, "retained": 0}\n"RuntimeError: no"\n'
        return subprocess.CompletedProcess(command, -9, lines, "")

    monkeypatch.setattr(subprocess, "run", run)
    settings = [Setting(2, n) for n in (3, 5, 7)]
    assert list(measure_in_subprocess("core", settings, threads=1)) == [
        {"peak": 5, "retained": 0},
        "RuntimeError: no",
        "its process ended with exit status -9",
    ]


def test_the_last_line_of_a_crash_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nKeyError: 'x'\n")

    monkeypatch.setattr(subprocess, "run", run)
    found = list(measure_in_subprocess("core", [Setting(2, 3)], threads=1))
    assert found == ["its process ended with exit status 1: KeyError: 'x'"]


@pytest.mark.slow
def test_a_timeout_keeps_what_was_measured_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A real process, because `subprocess` does not decode the output of a timeout.
    program = """if True:
        import time
        print('{"peak": 5, "retained": 0}', flush=True)
        time.sleep(60)
    """
    real_run = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        return real_run([sys.executable, "-c", program], **options)

    monkeypatch.setattr(subprocess, "run", run)
    settings = [Setting(2, 3), Setting(2, 5)]
    found = list(measure_in_subprocess("core", settings, threads=1, timeout=1))
    assert found == [{"peak": 5, "retained": 0}, "no result within 1 seconds"]


def test_the_process_prints_a_line_for_each_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def fake(name: str, setting: Setting) -> dict[str, int]:
        measured.append(setting.seq_len)
        if setting.seq_len == 5:
            raise ValueError("no\nroom")
        return {"peak": 1, "retained": 0}

    monkeypatch.setattr(memory, "measure", fake)
    threads = torch.get_num_threads()
    settings = [Setting(2, n).as_dict() for n in (3, 5)]
    memory.main({"name": "core", "threads": threads, "settings": settings})
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"peak": 1, "retained": 0},
        "ValueError: no",
    ]
    assert measured == [3, 3, 5]  # the first call warms up


def test_a_gpu_counts_exactly(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("only PyTorch's CUDA allocator counts exactly")
    setting = Setting(1, 512, d_model=32, heads=8, device=device)
    assert measure("core", setting)["retained"] >= 8 * MIB
