"""Train the translator beside the same model built on `nn.Transformer`.

`python benchmarks/translator.py` trains both on the same batches, in turns, and writes
their times per step and their exact match on held-out dates to
`src/headnotes/models/recorded/comparison.json`, with the times of greedy decoding of 32
tokens with and without the KV cache. `--steps` changes the number of training steps.
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from attention_bench.report import commit, device_name, write
from headnotes import convert
from headnotes.models import dates
from headnotes.models.training import Settings, Trainer, loss_and_accuracy
from headnotes.models.translator import END, Translator

RESULTS = Path(__file__).parent.parent / "src/headnotes/models/recorded"


class OnPyTorch(nn.Module):
    """The same model with PyTorch's encoder and decoder in place of ours."""

    def __init__(self, model: Translator, settings: Settings) -> None:
        super().__init__()
        self.embeddings, self.positions = model.embeddings, model.positions
        self.transformer = nn.Transformer(
            settings.d_model,
            settings.heads,
            settings.layers,
            settings.layers,
            settings.d_ff,
            settings.dropout_prob,
            norm_first=True,
        )
        # Both begin with the same weights; what differs later is rounding, and time.
        encoder, decoder = self.transformer.encoder, self.transformer.decoder
        for mine, layer in zip(model.encoder, encoder.layers, strict=True):
            layer.self_attn = convert.to(mine.attention, "torch")
        for mine, layer in zip(model.decoder, decoder.layers, strict=True):
            layer.self_attn = convert.to(mine.self_attention, "torch")
            layer.multihead_attn = convert.to(mine.cross_attention, "torch")
        for mine, layer in zip(
            [*model.encoder, *model.decoder],
            [*encoder.layers, *decoder.layers],
            strict=True,
        ):
            layer.linear1.load_state_dict(mine.feed_forward[0].state_dict())
            layer.linear2.load_state_dict(mine.feed_forward[2].state_dict())

    def forward(self, source: Tensor, target: Tensor, source_lens: Tensor) -> Tensor:
        padding = torch.arange(len(source)) >= source_lens.unsqueeze(1)
        states = self.transformer(
            self.positions(self.embeddings(source)),
            self.positions(self.embeddings(target)),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(len(target)),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return F.linear(states, self.embeddings.table.weight)


def train_both(steps: int) -> dict[str, dict[str, float]]:
    """Train both in turns; the order changes at each step."""
    settings = Settings(steps=steps)
    trainers = {"headnotes": Trainer(settings), "nn.Transformer": Trainer(settings)}
    theirs = trainers["nn.Transformer"]
    theirs.model = OnPyTorch(theirs.model, settings)
    theirs.optimizer = torch.optim.Adam(theirs.model.parameters(), betas=(0.9, 0.98))
    wall = {name: [] for name in trainers}
    processor = {name: [] for name in trainers}
    for step in range(steps):
        names = list(trainers) if step % 2 else list(trainers)[::-1]
        for name in names:
            start, cpu = time.perf_counter(), time.process_time()
            trainers[name].step()
            wall[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - cpu)
        if step % 50 == 0:
            print(step, {n: round(t.losses[-1], 4) for n, t in trainers.items()})
    held_out = dates.encode_pairs(dates.sample("test", 2000, Random(0)))
    found = {}
    for name, trainer in trainers.items():
        with torch.no_grad():
            _, accuracy = loss_and_accuracy(trainer.model.eval(), held_out)
        found[name] = {
            "exact_match": accuracy.item(),
            "median_seconds_of_a_step": statistics.median(wall[name]),
            "median_cpu_seconds_of_a_step": statistics.median(processor[name]),
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
        }
    return found


def time_decoding(batch_size: int = 64, length: int = 32) -> dict[str, float]:
    """Median seconds of greedy decoding, with and without the cache, in turns."""
    torch.manual_seed(1)
    model = Settings().build().eval()
    # No target ends: the end is the least probable token.
    model.embeddings.table.weight.data[END] = 0
    model.decoder_norm.bias.data[:] = model.embeddings.table.weight[5].detach() * 9
    batch = dates.encode_pairs(dates.sample("test", batch_size, Random(0)))

    def decode(use_cache: bool) -> Tensor:
        return model.greedy(batch.source, batch.source_lens, length, use_cache)

    tokens = decode(True)
    assert len(tokens) == length
    assert tokens.equal(decode(False))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(5):
        for use_cache in (True, False):
            seconds[use_cache].append(seconds_of(lambda: decode(use_cache)))  # noqa: B023
    return {
        "tokens": length,
        "batch_size": batch_size,
        "with_cache": statistics.median(seconds[True]),
        "without_cache": statistics.median(seconds[False]),
    }


def seconds_of(call: Callable[[], object]) -> float:
    """CPU seconds of a call: other processes may share the cores."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    device = torch.device("cpu")
    record = {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "steps": steps,
        "decoding": time_decoding(),
        "training": train_both(steps) if steps else {},
    }
    text = json.dumps(record, indent=2) + "\n"
    print(text)
    write(RESULTS / "comparison.json", text)


if __name__ == "__main__":
    main()
