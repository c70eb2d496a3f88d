r"""# Training the translator

This module trains the [translator](translator.md) on [dates](dates.md), on a CPU, in
minutes, and can be interrupted at any moment: a run that is started again continues
from its last checkpoint, and all later losses are bit for bit those of a run that was
never interrupted.

What a step computes depends on three things only, and a checkpoint holds them all:

- the parameters, and the two moments of each that Adam keeps,
- the state of PyTorch's random number generator, which dropout uses,
- the number of the step. From it and the seed come the pairs of the batch, and from it
  alone the learning rate. So there is no other state that could be lost.

[labml](https://github.com/labmlai/labml) shows the progress and stores the metrics:
loss, accuracy, and for each head the entropy of its weights and their share on the
diagonal. By default it also writes into the home folder, stores a diff of the
repository, and may send the metrics to a server; here it gets to see the folder of the
run only.

Source: [Adam](https://arxiv.org/abs/1412.6980), Kingma and Ba 2015;
[safetensors](https://huggingface.co/docs/safetensors) for the checkpoints, which hold
numbers and text, and no code.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from headnotes.checks import check_sizes
from headnotes.models import dates, heads
from headnotes.models.dates import Batch, Draw, Pair
from headnotes.models.translator import PAD, Translator

# Every so many steps: a line of metrics, the statistics of the heads, a checkpoint.
METRICS, STATISTICS, CHECKPOINT = 10, 100, 100


RECORDED = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class Settings:
    """All that a run depends on, beside its data."""

    seed: int = 1
    steps: int = 1200
    batch_size: int = 128
    learning_rate: float = 3e-3
    warmup: int = 100
    d_model: int = 64
    heads: int = 4
    layers: int = 2
    d_ff: int = 256
    dropout_prob: float = 0.0

    def build(self) -> Translator:
        """The translator of these sizes, initialized from the global generator."""
        return Translator(
            dates.VOCAB_SIZE,
            self.d_model,
            self.heads,
            self.layers,
            self.d_ff,
            self.dropout_prob,
        )

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step: linear up, then linear down to 0.

        >>> settings = Settings(steps=1000, warmup=100, learning_rate=0.002)
        >>> [round(settings.learning_rate_at(n), 6) for n in (0, 99, 550)]
        [2e-05, 0.001802, 0.0009]
        """
        up = min(1, (step + 1) / self.warmup)
        return self.learning_rate * up * (1 - step / self.steps)


class Trainer:
    r"""A translator, its optimizer, and the losses of the steps so far.

    >>> trainer = Trainer(Settings(steps=2, batch_size=3, d_model=8, d_ff=16))
    >>> for _ in range(2):
    ...     loss, accuracy = trainer.step()
    >>> len(trainer.losses), accuracy
    (2, 0.0)
    """

    def __init__(self, settings: Settings, draw: Draw = dates.sample) -> None:
        check_sizes(steps=settings.steps, batch_size=settings.batch_size)
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.draw = draw
        self.model = settings.build()
        self.optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.98))
        self.losses: list[float] = []

    def batch(self) -> Batch:
        """The batch of the next step, which depends on the seed and the step alone."""
        random = Random(f"{self.settings.seed} {len(self.losses)}")
        return dates.encode_pairs(self.draw("train", self.settings.batch_size, random))

    def step(self) -> tuple[float, float]:
        """Train on one batch; return its loss and its accuracy."""
        rate = self.settings.learning_rate_at(len(self.losses))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        loss, accuracy = loss_and_accuracy(self.model, self.batch())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss.item())
        return loss.item(), accuracy.item()

    def state(self) -> dict[str, Tensor]:
        """All tensors from which the training continues, by name."""
        state = {f"model.{n}": p for n, p in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                state[f"optimizer.{key}.{name}"] = value
        state["random"] = torch.get_rng_state()
        state["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        weights = {name: state[f"model.{name}"] for name in self.model.state_dict()}
        self.model.load_state_dict(weights)
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter] = {
                key: state[f"optimizer.{key}.{name}"]
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
        torch.set_rng_state(state["random"])
        self.losses = state["losses"].tolist()


def loss_and_accuracy(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    r"""The mean cross-entropy of the target's tokens, and the share of exact targets.

    A target is exact if each of its tokens is the most probable one, given those before
    it. That is when greedy decoding would generate it.
    """
    logits = model(
        batch.source, batch.target[:-1], batch.source_lens
    )  # [target_len, batch_size, ...]
    wanted = batch.target[1:]  # [target_len, batch_size]
    loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD)
    right = (logits.argmax(-1) == wanted) | (wanted == PAD)  # [target_len, batch_size]
    return loss, right.all(0).float().mean()


def train(folder: Path, settings: Settings, draw: Draw = dates.sample) -> Translator:
    """Train a translator in a folder, or continue the run that the folder holds.

    The folder gets `checkpoint.safetensors`; `weights-….safetensors` of the model after
    10 %, 50 % and 100 % of the steps; and `labml/`, the metrics.

    Raises `ValueError` where the folder holds a run with other settings, and
    `ImportError` without labml or safetensors.
    """
    trainer, source = Trainer(settings, draw), commit()
    path = folder / "checkpoint.safetensors"
    if path.exists():
        resume(trainer, path)
    held_out = dates.encode_pairs(draw("validation", 32, Random(settings.seed)))
    snapshots = {settings.steps * percent // 100 for percent in (10, 50, 100)}
    with experiment_in(folder):
        from labml import monit, tracker

        for name in ("entropy.*", "diagonal.*", "padding"):
            tracker.set_scalar(name, is_print=False)
        for step in monit.loop(range(len(trainer.losses) + 1, settings.steps + 1)):
            loss, accuracy = trainer.step()
            tracker.add({"loss": loss, "accuracy": accuracy})
            if step % STATISTICS == 0:
                tracker.add(statistics(trainer.model, held_out))
            if step % METRICS == 0:
                tracker.save(step)
            if step in snapshots:
                save_weights(folder / f"weights-{step:05}.safetensors", trainer, source)
            if step % CHECKPOINT == 0 or step == settings.steps:
                write(path, trainer.state(), {"settings": asdict(settings)})
    return trainer.model


def statistics(model: Translator, batch: Batch) -> dict[str, float]:
    """The [statistics](heads.md#statistics) of the heads on a batch."""
    source, source_lens, target = batch
    maps = heads.attention_maps(model, source, target[:-1], source_lens)
    target_lens = (target[:-1] != PAD).sum(0)
    return heads.statistics(maps, source_lens, target_lens)


def exact_match(model: Translator, pairs: list[Pair]) -> tuple[float, list[str]]:
    """The share of pairs whose target is generated exactly, and all that is generated.

    Decoding is greedy, with the KV cache.
    """
    batch = dates.encode_pairs(pairs)
    model.eval()
    max_len = len(batch.target) - 1
    texts = dates.decode(model.greedy(batch.source, batch.source_lens, max_len))
    right = sum(text == pair.target for text, pair in zip(texts, pairs, strict=True))
    return right / len(pairs), texts


# region Files


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Write a safetensors file atomically: it is there as a whole, or not at all."""
    from safetensors.torch import save

    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {key: json.dumps(value) for key, value in metadata.items()}
    content = save({n: t.contiguous() for n, t in tensors.items()}, texts)
    beside = path.with_suffix(".tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        # The name must not reach the disk before the content does.
        os.fsync(file.fileno())
    beside.replace(path)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the metadata of a file that `write` wrote."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        texts = file.metadata()
    return tensors, {key: json.loads(text) for key, text in texts.items()}


def resume(trainer: Trainer, path: Path) -> None:
    """Continue from a checkpoint, if it is of a run with the same settings."""
    state, metadata = read(path)
    mine = asdict(trainer.settings)
    for key, value in metadata["settings"].items():
        if mine[key] != value:
            raise ValueError(
                f"`{path.parent}` holds a run with `{key}` {value}, not {mine[key]}; "
                f"choose another folder"
            )
    trainer.load_state(state)


def save_weights(path: Path, trainer: Trainer, source: str) -> None:
    """Write the weights in half precision, with their origin; `source` is a commit."""
    weights = {name: p.half() for name, p in trainer.model.state_dict().items()}
    metadata = {
        "settings": asdict(trainer.settings),
        "step": len(trainer.losses),
        "losses": [round(loss, 5) for loss in trainer.losses],
        "commit": source,
    }
    write(path, weights, metadata)


def load_weights(path: Path) -> tuple[Translator, dict[str, Any]]:
    """The translator of a file that `save_weights` wrote, and its metadata."""
    weights, metadata = read(path)
    model = Settings(**metadata["settings"]).build().eval()
    model.load_state_dict(weights)
    return model, metadata


def recorded() -> dict[int, tuple[Translator, dict[str, Any]]]:
    r"""The translators that are stored with this package, with their metadata, by step.

    They are those of one run, `headnotes train dates`: after 10 %, 50 % and 100 % of
    its steps.

    >>> list(recorded())
    [120, 600, 1200]
    """
    found = map(load_weights, sorted(RECORDED.glob("*.safetensors")))
    return {metadata["step"]: (model, metadata) for model, metadata in found}


def commit() -> str:
    """The commit of this source, or `unknown` outside of its repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


@contextmanager
def experiment_in(folder: Path) -> Iterator[None]:
    """A labml experiment that reads and writes nothing outside of `folder`."""
    try:
        from labml import experiment, lab
    except ImportError:
        raise ImportError("training needs labml: pip install labml") from None

    home = folder / "labml"
    home.mkdir(parents=True, exist_ok=True)
    # labml takes its settings from files of this name, from here up to the root.
    (home / ".labml.yaml").touch()
    # It names each machine in a file in the home folder, so for this moment the home
    # folder is ours. It also prints that this folder is no git repository.
    ours = {"HOME": str(home), "USERPROFILE": str(home)}
    with patch.dict(os.environ, ours), redirect_stdout(StringIO()):
        lab.configure({"path": str(home), "app_url": None})
        experiment.create(
            name="dates", python_file=str(home), writers={"screen", "file"}
        )
        running = experiment.start()
    with running:
        yield


# endregion
