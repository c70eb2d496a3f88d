"""Memory: the peak of a call, and what it keeps."""

import json
import subprocess
from typing import Any

import pytest
import torch

from attention_bench import memory
from attention_bench.memory import in_a_process, measure, read_setting, resident, start
from attention_bench.setting import Setting

MIB = 2**20
LINUX = memory.CLEAR.exists()


@pytest.mark.skipif(not LINUX, reason="the high-water mark cannot be set back here")
def test_the_peak_of_a_call_is_seen_and_forgotten() -> None:
    cpu = torch.device("cpu")
    before = start(cpu)
    held = torch.ones(16 * MIB)  # 64 MiB
    del held
    assert resident()[1] - before > 60 * MIB
    before = start(cpu)
    assert resident()[1] - before < 30 * MIB


@pytest.mark.skipif(not LINUX, reason="the high-water mark cannot be set back here")
def test_a_process_of_its_own_sees_what_is_kept() -> None:
    settings = [Setting(1, n, d_model=32, heads=8) for n in (64, 512)]
    settings.append(Setting(1, 512, "causal", training=True, d_model=32, heads=8))
    core = list(in_a_process("core", settings, threads=1))
    small, large, trained = (found for found in core if isinstance(found, dict))
    # 512 by 512 scores of 8 heads in float32 are 8 MiB; they stay on the module.
    assert 7 * MIB < large["kept"] < 12 * MIB
    assert small["kept"] < 2 * MIB
    assert small["peak"] < 15 * MIB < large["peak"] < 60 * MIB
    assert trained["peak"] > large["peak"]


def test_who_raises_is_heard_and_who_dies_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        spec = json.loads(command[-1])
        assert spec["name"] == "core"
        assert [s["seq_len"] for s in spec["settings"]] == [3, 5, 7]
        lines = '{"peak": 5, "kept": 0}\n"RuntimeError: no"\n'
        return subprocess.CompletedProcess(command, -9, lines, "")

    monkeypatch.setattr(subprocess, "run", run)
    settings = [Setting(2, n) for n in (3, 5, 7)]
    assert list(in_a_process("core", settings, threads=1)) == [
        {"peak": 5, "kept": 0},
        "RuntimeError: no",
        "its process ended with -9",
    ]


def test_an_endless_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    found = list(in_a_process("core", [Setting(2, 3)], threads=1, timeout=7))
    assert found == ["no answer in 7 seconds"]


def test_the_process_prints_an_answer_for_each_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fake(name: str, setting: Setting) -> dict[str, int]:
        asked.append(setting.seq_len)
        if setting.seq_len == 5:
            raise ValueError("no\nroom")
        return {"peak": 1, "kept": 0}

    monkeypatch.setattr(memory, "measure", fake)
    threads = torch.get_num_threads()
    plain = [Setting(2, n).as_json() for n in (3, 5)]
    memory.main({"name": "core", "threads": threads, "settings": plain})
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"peak": 1, "kept": 0},
        "ValueError: no",
    ]
    assert asked == [3, 3, 5]  # the first call of all is not counted


def test_a_gpu_counts_exactly(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("only its allocator counts")
    setting = Setting(1, 512, d_model=32, heads=8, device=device)
    assert measure("core", setting)["kept"] >= 8 * MIB


def test_settings_travel_as_json() -> None:
    setting = Setting(2, 3, "padding", 0.1, True, dtype=torch.bfloat16)
    plain = json.loads(json.dumps(setting.as_json()))
    assert read_setting(plain) == setting
