"""Training on several processes: resuming, refusals, and a process that is killed."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from torch import distributed as dist

from headnotes.models.training import CHECKPOINT, Settings, Trainer, resume, write
from headnotes.parallel.engines import ENGINES, Parallel
from headnotes.parallel.training import ParallelTrainer, parse

SMALL = Settings(batch_size=4, d_model=8, heads=2, layers=1, d_ff=8)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_continues_with_any_engine_from_the_state_of_any(engine: str) -> None:
    alone, parallel = Trainer(SMALL), ParallelTrainer(SMALL, Parallel(engine))
    assert parallel.step() == pytest.approx(alone.step(), rel=1e-5)
    # Each from the state of the other.
    before, after = alone.state(), parallel.state()
    assert {k: x.shape for k, x in before.items()} == {
        k: x.shape for k, x in after.items()
    }
    alone.load_state(after)
    parallel.load_state(before)
    for _ in range(2):
        assert parallel.step() == pytest.approx(alone.step(), rel=1e-5)


@pytest.mark.parametrize(
    ("option", "ranks", "message"),
    [
        ("heads", 2, r"`--parallel` \(=heads\) must be ddp, fsdp, or heads=2"),
        ("ddp=2", 2, r"`--parallel` \(=ddp=2\) must be ddp, fsdp, or heads=2"),
        ("heads=3", 3, r"`heads` \(=2\) must be .* by the number of ranks \(=3\)"),
        ("heads=2", 4, r"over 2 ranks, but torchrun has started 4"),
        ("ddp", 3, r"`batch_size` \(=4\) must be .* by the number of ranks \(=3\)"),
        ("fsdp", None, r"start it with `torchrun --nproc-per-node 2"),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused(
    option: str, ranks: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if ranks:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(ValueError, match=message):
        parse(option, SMALL)


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition comes true in so many seconds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow
def test_a_killed_rank_stops_the_others_and_the_run_resumes(tmp_path: Path) -> None:
    # One process has begun the run; the next step is that of a checkpoint.
    settings = Settings(steps=100_000, batch_size=4)
    trainer = Trainer(settings)
    trainer.step()
    trainer.losses *= CHECKPOINT - 1
    path = tmp_path / "checkpoint.safetensors"
    write(path, trainer.state(), {"settings": asdict(settings)})
    begun = path.stat().st_mtime_ns

    bin = Path(sys.executable).parent
    options = ["--run", str(tmp_path), "--steps", "100000", "--batch-size", "4"]
    command = [
        *(bin / "torchrun", "--nproc-per-node", "2", "--no-python", "--"),
        *(bin / "headnotes", "train", "dates", *options, "--parallel", "heads=2"),
    ]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        assert wait_for(lambda: path.stat().st_mtime_ns != begun, 120), log.read_text()
        ranks = psutil.Process(process.pid).children()
        next(rank for rank in ranks if rank.environ()["RANK"] == "1").kill()
        _, alive = psutil.wait_procs([*ranks, process], timeout=30)
        assert not alive
    finally:
        process.kill()
    assert process.returncode
    assert re.search(r"Root Cause[^=]*rank +: 1 [^=]*SIGKILL", log.read_text())

    # One process continues where two have stopped.
    resumed = Trainer(settings)
    resume(resumed, path)
    assert resumed.losses[:-1] == trainer.losses
    assert resumed.losses[-1] == pytest.approx(trainer.step()[0], rel=1e-5)
    assert resumed.step() == pytest.approx(trainer.step(), rel=1e-5)
