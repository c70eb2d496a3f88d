r"""# One process and several: the same training

`compare` trains a small [translator](../models/translator.md) on several processes
with each [engine](engines.md). It measures how far outputs, gradients and losses are
from those of one process, and how many bytes a process sends.

Each rank computes the training of one process, too, and compares its own part with it.
The batch has sequences of different lengths, so the ranks have different numbers of
tokens. Dropout is off, since ranks that split the batch have other random numbers.

The bytes of a training step follow from the sizes alone. With $P$ the bytes of all
parameters, $P_L$ those of the layers, $A_s$ and $A_t$ the bytes of the vectors
`[seq_len, batch_size, d_model]` of source and target, and $L$ layers each of encoder
and decoder:

| engine | payload of the collectives of a step |
|---|---|
| `ddp` | all-reduce: $P$ |
| `fsdp` | all-gather: $P$ forward, $P_L$ backward; reduce-scatter: $P$ |
| `heads` | all-reduce: $L\, (4 A_s + 4 A_t + 2 A_t + 2 A_s)$ |

The four terms of `heads` are the self-attention of the encoder, that of the decoder,
and the queries and keys of cross-attention, as [heads](heads.md) explains.

Source: the engines, each named on the page of its module.
"""

import multiprocessing
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F  # noqa: N812

from headnotes.models.translator import PAD, Translator
from headnotes.parallel.engines import ENGINES, Parallel, gathered
from headnotes.parallel.traffic import (
    PASSES_OF_GLOO,
    Collective,
    CollectiveRecorder,
    bytes_sent,
    bytes_to_send,
)

VOCAB_SIZE, D_MODEL, LAYERS = 61, 64, 1
SOURCE_LEN, TARGET_LEN, BATCH_SIZE = 31, 17, 24
STEPS = 2

Batch = tuple[Tensor, Tensor, Tensor]


class Report(NamedTuple):
    """What `compare` measures for an engine: the largest differences, and bytes.

    Differences are relative to the largest entry; `sent` are the bytes that rank 0 has
    sent in one step, 0 where the system does not count them, and `formula` those that
    the sizes predict.
    """

    output: float
    gradient: float
    loss: float
    calls: list[Collective]
    sent: int
    formula: float


def make_model() -> Translator:
    """The same model in each process."""
    torch.manual_seed(18)
    return Translator(VOCAB_SIZE, D_MODEL, 4, LAYERS, d_ff=256, dropout_prob=0.0)


def make_batch(step: int) -> Batch:
    """Tokens of source and target, and the lengths of the sources."""
    generator = torch.Generator().manual_seed(step)

    def random(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    source = random(4, VOCAB_SIZE, SOURCE_LEN, BATCH_SIZE)
    target = random(4, VOCAB_SIZE, TARGET_LEN + 1, BATCH_SIZE)
    target_lens = random(2, TARGET_LEN + 2, BATCH_SIZE)
    ended = torch.arange(TARGET_LEN + 1).unsqueeze(1) >= target_lens
    target = target.masked_fill(ended, PAD)
    return source, target, random(1, SOURCE_LEN + 1, BATCH_SIZE)


def total_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The logits, the sum of the losses of all target tokens, and their number.

    >>> logits, total, count = total_loss(make_model(), make_batch(step=0))
    >>> logits.shape, count
    (torch.Size([17, 24, 61]), tensor(191))
    """
    source, target, source_lens = batch
    logits = model(source, target[:-1], source_lens)
    after = target[1:]
    total = F.cross_entropy(
        logits.flatten(0, 1), after.flatten(), ignore_index=PAD, reduction="sum"
    )
    return logits, total, (after != PAD).sum()


def train(parallel: Parallel | None) -> dict[str, Any]:
    """Train, and return the first outputs and gradients, all losses, and the bytes."""
    model = make_model()
    distributed = parallel.distribute(model) if parallel else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    found: dict[str, Any] = {"losses": []}
    for step in range(STEPS):
        batch = make_batch(step)
        if parallel:
            source, target, source_lens = map(parallel.own_items, batch)
            batch = source, target, source_lens
            dist.barrier()
        before = count_bytes()
        with CollectiveRecorder() as recorder:
            logits, total, count = total_loss(distributed, batch)
            loss = parallel.mean(total, count) if parallel else total / count
            loss.backward()  # type: ignore[no-untyped-call]
        if parallel:
            dist.barrier()
        if step == 0:
            gradients = {name: p.grad for name, p in model.named_parameters()}
            found |= {"output": logits.detach(), "gradients": gathered(gradients)}
        # DDP arranges its buckets anew after the first step, so a later one counts.
        found |= {"calls": recorder.calls, "sent": count_bytes() - before}
        optimizer.step()
        optimizer.zero_grad()
        value = parallel.value(loss) if parallel else loss
        found["losses"].append(value.item())
    return found


def count_bytes() -> int:
    """The bytes sent so far; 0 where the system does not count them."""
    return bytes_sent() if Path("/proc/self/fd").exists() else 0


def largest_difference(x: Tensor, y: Tensor) -> Tensor:
    """The largest difference of any entry, relative to the largest entry of `y`."""
    return (x - y).abs().max() / y.abs().max()


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """All entries of all tensors."""
    return torch.cat([x.flatten() for x in tensors.values()])


def predict(parallel: Parallel, model: Translator) -> float:
    """The bytes that a rank should send in a step, by the formulas above."""
    parameters = 4 * sum(p.numel() for p in model.parameters())
    layers = [*model.encoder, *model.decoder]
    in_layers = 4 * sum(p.numel() for layer in layers for p in layer.parameters())
    source, target = (4 * n * BATCH_SIZE * D_MODEL for n in (SOURCE_LEN, TARGET_LEN))
    calls = {
        "ddp": [Collective("all-reduce", parameters)],
        "fsdp": [
            Collective("all-gather", parameters + in_layers),
            Collective("reduce-scatter", parameters),
        ],
        "heads": [Collective("all-reduce", LAYERS * 6 * (source + target))],
    }
    return bytes_to_send(calls[parallel.engine], parallel.ranks, PASSES_OF_GLOO)


def report(engine: str, alone: dict[str, Any]) -> Report:
    """Compare a training with `engine` to that of one process; all ranks call it."""
    parallel = Parallel(engine)
    formula = predict(parallel, make_model())
    found = train(parallel)
    differences = torch.stack(
        [
            largest_difference(found["output"], parallel.own_items(alone["output"])),
            largest_difference(flat(found["gradients"]), flat(alone["gradients"])),
            largest_difference(*map(torch.tensor, (found["losses"], alone["losses"]))),
        ]
    )
    dist.all_reduce(differences, dist.ReduceOp.MAX)
    output, gradient, loss = differences.tolist()
    return Report(output, gradient, loss, found["calls"], found["sent"], formula)


def work(rank: int, ranks: int, folder: str) -> None:
    """What each process does: all engines, one after the other."""
    torch.set_num_threads(1)
    meeting_point = f"file://{folder}/store"
    dist.init_process_group("gloo", meeting_point, rank=rank, world_size=ranks)
    alone = train(None)
    reports = {engine: report(engine, alone) for engine in ENGINES}
    if rank == 0:
        Path(folder, "reports").write_bytes(pickle.dumps(reports))
    dist.destroy_process_group()


def compare(ranks: int) -> dict[str, Report]:
    """A report for each engine, from so many processes of this machine.

    The processes are forks of one that has imported this module, where forks are safe.
    """
    method = "spawn"
    if "forkserver" in multiprocessing.get_all_start_methods():
        method = "forkserver"
        # An optimizer imports the second at its first step, which takes a second.
        multiprocessing.set_forkserver_preload([__name__, "torch._dynamo"])
    with TemporaryDirectory() as folder:
        start: Any = start_processes  # it has no types
        start(work, (ranks, folder), nprocs=ranks, start_method=method)
        reports: dict[str, Report] = pickle.loads(Path(folder, "reports").read_bytes())
    return reports
