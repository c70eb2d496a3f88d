"""Training continues exactly where it was interrupted, and stays in its folder."""

import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from random import Random

import pytest
import torch

from headnotes.models import dates, training
from headnotes.models.dates import Pair, Split
from headnotes.models.training import Settings, Trainer, exact_match, train

# `KILLS=20 pytest tests/models/test_training.py -k killed` kills it more often; each
# kill costs a third of a whole run.
KILLS = int(os.environ.get("KILLS", "5"))

# Dropout draws from the generator whose state a checkpoint holds.
SMALL = Settings(
    steps=60, batch_size=3, d_model=8, heads=2, d_ff=8, layers=1, dropout_prob=0.3
)


def train_and_be_killed(folder: Path, seconds: float) -> None:
    """Train until this process has used so much CPU time; then the kernel ends it."""
    # As with SIGKILL, no line of Python runs between the signal and the end.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    train(folder, SMALL)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="needs POSIX signals")
# It forks, and pytest's process may have threads; the child starts none.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_run_that_is_killed_at_any_moment_continues_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CHECKPOINT", 3)
    Trainer(SMALL).step()  # what is imported then is imported by no child
    start = time.process_time()
    train(tmp_path / "whole", SMALL)
    whole = time.process_time() - start
    expected, _ = training.read(tmp_path / "whole" / "checkpoint.safetensors")
    assert len(expected["losses"]) == SMALL.steps

    path = tmp_path / "killed" / "checkpoint.safetensors"
    random, steps, kills = Random(1), [], 0
    context = multiprocessing.get_context("fork")
    while kills < KILLS or not steps or steps[-1] != SMALL.steps:
        # The last run is left to end.
        seconds = whole * random.uniform(0.05, 0.6) if kills < KILLS else 60
        child = context.Process(target=train_and_be_killed, args=(path.parent, seconds))
        child.start()
        child.join()
        kills += child.exitcode == -signal.SIGPROF
        if not path.exists():
            continue
        state, _ = training.read(path)
        steps.append(len(state["losses"]))
        assert state["losses"].equal(expected["losses"][: steps[-1]])
        if steps[-1] == SMALL.steps:
            assert all(state[name].equal(expected[name]) for name in expected)
            path.unlink()  # and from the start
    print(f"{kills} kills; steps of the checkpoints: {steps}")
    assert len({*steps} - {SMALL.steps}) > 1, "it was not interrupted in the middle"


def test_a_trainer_continues_bit_for_bit_from_its_state() -> None:
    whole = Trainer(SMALL)
    for step in range(6):
        if step == 3:
            state = {name: value.clone() for name, value in whole.state().items()}
        whole.step()
    resumed = Trainer(SMALL)
    resumed.load_state(state)
    for _ in range(3):
        resumed.step()
    assert resumed.losses == whole.losses
    expected = whole.state()
    assert all(value.equal(expected[n]) for n, value in resumed.state().items())


@pytest.mark.slow
def test_a_run_stays_in_its_folder_and_off_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection")

    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("labml_app_url", "http://127.0.0.1:9/")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(home)
    settings = Settings(steps=2, batch_size=3, d_model=8, heads=2, d_ff=8, layers=1)
    train(tmp_path / "run", settings)
    assert [*home.iterdir()] == []
    assert {path.name for path in tmp_path.iterdir()} == {"home", "run"}
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files >= {"checkpoint.safetensors", "weights-00002.safetensors", "labml"}
    diffs = [*(tmp_path / "run").rglob("source.diff")]
    assert [diff.read_text() for diff in diffs] == [""]
    assert os.environ["HOME"] == str(home)


def test_other_settings_do_not_continue_a_run(tmp_path: Path) -> None:
    trainer = Trainer(SMALL)
    trainer.step()
    path = tmp_path / "checkpoint.safetensors"
    training.write(path, trainer.state(), {"settings": training.asdict(SMALL)})
    other = Trainer(Settings(**{**training.asdict(SMALL), "seed": 2}))
    with pytest.raises(ValueError, match="holds a run with `seed` 1, not 2"):
        training.resume(other, path)


def test_weights_are_stored_with_what_made_them(tmp_path: Path) -> None:
    trainer = Trainer(SMALL)
    trainer.step()
    path = tmp_path / "weights.safetensors"
    training.save_weights(path, trainer, training.commit())
    model, metadata = training.load_weights(path)
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, atol=1e-3, rtol=0)
    assert Settings(**metadata["settings"]) == SMALL
    assert metadata["step"] == 1
    assert len(metadata["commit"]) == 40
    assert not model.training


def in_figures(split: Split, count: int, random: Random) -> list[Pair]:
    """The easiest of the forms: the ISO date itself."""
    pairs = dates.sample(split, count, random)
    return [Pair(pair.target, pair.target) for pair in pairs]


@pytest.mark.slow
def test_the_recorded_weights_translate_held_out_dates() -> None:
    weights = training.recorded()
    pairs = dates.sample("test", 200, Random(8))
    shares = [exact_match(model, pairs)[0] for model, _ in weights.values()]
    assert shares == sorted(shares)
    assert shares[-1] > 0.98
    stored = sum(path.stat().st_size for path in training.RECORDED.iterdir())
    assert stored < 2e6


@pytest.mark.slow
def test_a_small_model_learns_from_scratch_to_copy_a_date() -> None:
    settings = Settings(
        steps=200,
        batch_size=32,
        learning_rate=0.01,
        warmup=20,
        d_model=32,
        d_ff=64,
        layers=1,
    )
    trainer = Trainer(settings, in_figures)
    for _ in range(settings.steps):
        trainer.step()
    share, _ = exact_match(trainer.model, in_figures("test", 200, Random(1)))
    assert share > 0.3
