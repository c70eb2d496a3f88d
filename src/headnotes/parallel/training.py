r"""# Training the translator on several processes

`train` is the [training](../models/training.md) of the translator on all processes
that `torchrun` has started, with one of the [engines](engines.md). Settings and
batches are those of one process, and so are the losses, up to rounding.

```console
$ torchrun --nproc-per-node 2 --no-python -- headnotes train dates --parallel heads=2
```

A checkpoint holds whole tensors, in the form of a run on one process. So a run may
continue with another engine, on another number of processes, or on one.

**If a process ends**, the others cannot continue: their next collective fails at once,
because its connections are closed. They report this and stop, and so does `torchrun`,
with an error that names the process that ended first. The same command continues from
the last checkpoint; with `--max-restarts=3`, `torchrun` repeats it by itself. A process
that hangs is noticed after `engines.TIMEOUT`.

Source: [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html).
"""

import os
import re
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from headnotes.models import dates
from headnotes.models.dates import Draw
from headnotes.models.training import (
    CHECKPOINT,
    METRICS,
    Settings,
    Trainer,
    experiment_in,
    loss_and_accuracy,
    resume,
    write,
)
from headnotes.models.translator import PAD, Translator
from headnotes.parallel.engines import TIMEOUT, Parallel, gathered, split_like
from headnotes.parallel.heads import check_heads_split


class ParallelTrainer(Trainer):
    """A trainer whose model is distributed over the ranks of `parallel`."""

    def __init__(
        self, settings: Settings, parallel: Parallel, draw: Draw = dates.sample
    ) -> None:
        super().__init__(settings, draw)
        self.parallel = parallel
        # DDP wraps the model; the other engines change it.
        self.distributed = parallel.distribute(self.model)
        # FSDP2 and `split_heads` replace parameters.
        self.optimizer.param_groups[0]["params"] = [*self.model.parameters()]

    def step(self) -> tuple[float, float]:
        """Train on one batch; return its loss and its accuracy, over all ranks."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate_at(len(self.losses))
        self.model.train()
        batch = dates.Batch(*map(self.parallel.own_items, self.batch()))
        mean, accuracy = loss_and_accuracy(self.distributed, batch)
        count = (batch.target[1:] != PAD).sum()
        loss = self.parallel.mean(mean * count, count)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(self.parallel.value(loss).item())
        return self.losses[-1], self.parallel.value(accuracy).item()

    def state(self) -> dict[str, Tensor]:
        """The state of a trainer on one process; all ranks must call it."""
        whole: dict[str, Tensor] = gathered(super().state())
        return {name: x.cpu() for name, x in whole.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the state of a trainer, which each rank has read."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(split_like(state[f"model.{name}"], parameter))
        for name, parameter in parameters.items():
            self.optimizer.state[parameter] = {
                key: split_like(state[f"optimizer.{key}.{name}"], parameter)
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
        torch.set_rng_state(state["random"])
        self.losses = state["losses"].tolist()


def parse(text: str, settings: Settings) -> str:
    r"""The engine of an option such as `ddp`, `fsdp` or `heads=2`.

    Raises `ValueError` for what is not one of these, outside of `torchrun`, and where
    heads, batch and ranks do not fit one another.

    >>> try:
    ...     parse("heads=2", Settings())
    ... except ValueError as error:
    ...     print(error)  # doctest: +NORMALIZE_WHITESPACE
    `--parallel heads=2` needs several processes; start it with
    `torchrun --nproc-per-node 2 --no-python -- headnotes train ...`
    """
    engine, _, number = text.partition("=")
    if not re.fullmatch(r"ddp|fsdp|heads=\d+", text):
        raise ValueError(f"`--parallel` (={text}) must be ddp, fsdp, or heads=2")
    if engine == "heads":
        check_heads_split(settings.heads, int(number))
    if "RANK" not in os.environ:
        start = f"torchrun --nproc-per-node {number or 2} --no-python --"
        raise ValueError(
            f"`--parallel {text}` needs several processes; start it with `{start} "
            f"headnotes train ...`"
        )
    ranks = int(os.environ["WORLD_SIZE"])
    if engine == "heads" and int(number) != ranks:
        raise ValueError(
            f"`--parallel {text}` splits the heads over {number} ranks, but torchrun "
            f"has started {ranks}; make them equal"
        )
    if engine != "heads" and settings.batch_size % ranks:
        raise ValueError(
            f"`batch_size` (={settings.batch_size}) must be divisible by the number of "
            f"ranks (={ranks})"
        )
    return engine


def train(
    folder: Path, settings: Settings, draw: Draw = dates.sample, *, option: str
) -> Translator:
    """Train on all ranks, or continue; return the whole model, on every rank.

    `option` is the engine, as `parse` takes it. Rank 0 writes checkpoints and metrics.
    Raises what `parse` raises, and `ConnectionError` where another rank has stopped.
    """
    engine = parse(option, settings)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    trainer = ParallelTrainer(settings, Parallel(engine), draw)
    path = folder / "checkpoint.safetensors"
    if path.exists():
        resume(trainer, path)
    try:
        run(trainer, path)
        state = trainer.state()
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise ConnectionError(
            f"rank {dist.get_rank()}: another rank has stopped, or hangs, in step "
            f"{len(trainer.losses) + 1}; the same command continues from the last "
            f"checkpoint in {folder}"
        ) from error
    finally:
        dist.destroy_process_group()
    alone = Trainer(settings, draw)
    alone.load_state(state)
    return alone.model


def run(trainer: ParallelTrainer, path: Path) -> None:
    """Make all further steps; rank 0 shows the metrics and writes the checkpoints."""
    settings, is_first = trainer.settings, trainer.parallel.rank == 0
    steps: Iterable[int] = range(len(trainer.losses) + 1, settings.steps + 1)
    with experiment_in(path.parent) if is_first else nullcontext():
        if is_first:
            from labml import monit, tracker

            steps = monit.loop(steps)
        for step in steps:
            loss, accuracy = trainer.step()
            if is_first:
                tracker.add({"loss": loss, "accuracy": accuracy})
            if is_first and step % METRICS == 0:
                tracker.save(step)
            if step % CHECKPOINT == 0 or step == settings.steps:
                # All ranks contribute to the state.
                state = trainer.state()
                if is_first:
                    write(path, state, {"settings": asdict(settings)})
