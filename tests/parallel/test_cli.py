"""The option `--parallel` of `headnotes train`."""

from pathlib import Path

import pytest

from headnotes.cli import main


def test_several_processes_need_torchrun_and_nothing_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    run = tmp_path / "run"
    assert main(["train", "dates", "--run", str(run), "--parallel", "heads=4"]) == 2
    message = "headnotes train: `--parallel heads=4` needs several processes"
    assert capsys.readouterr().err.startswith(message)
    assert not run.exists()
