r"""# Benchmark suites

A *suite* is a list of settings and a list of implementations to measure in them. There
are seven suites:

- `inference`: time of a forward pass;
- `training`: time of a forward and a backward pass, without dropout and with it;
- `decode`: time of one more token with a filled KV cache;
- `memory`: peak and retained memory of a call, and how they grow with the length;
- `growth`: how the time of a forward pass grows with the length;
- `tiny`: overhead of a call on tiny tensors, on one thread;
- `decoders`: the variants of current decoders, each beside its own baseline. Its
  implementations are the [comparisons](decoders.md).

Each has a quick form with fewer settings; `headnotes bench --quick` runs all seven.

Source: the width is that of the base model of [Attention Is All You
Need](https://arxiv.org/abs/1706.03762), Vaswani et al. 2017, table 3; the lengths go
from a sentence (10 tokens) to a chapter (thousands).
"""

from dataclasses import dataclass, replace
from typing import Any

from attention_bench.decoders import COMPARISONS
from attention_bench.decoding import DECODERS
from attention_bench.implementations import COMPILED
from attention_bench.setting import MASKS, Setting

Sizes = tuple[tuple[int, int], ...]

SIZES = ((32, 10), (30, 50), (8, 128), (4, 512), (2, 1024), (1, 2048), (1, 4096))
MAIN = ("core", "fast", "nn", "nn-weights", "sdpa")
HEADNOTES = ("core", "fast", "fast-weights")
PYTORCH = ("nn", "nn-weights", "nn-fastpath", "sdpa")
TUTORIALS = ("causal", "valid_lens", "batch_first")
LIBRARIES = ("gpt2", "bert", "llama", "x-transformers")


@dataclass(frozen=True)
class Suite:
    """Which implementations are measured, in which settings, and for how long."""

    implementations: tuple[str, ...]
    # The batch size and length of each setting.
    sizes: Sizes
    masks: tuple[str, ...] = MASKS
    dropouts: tuple[float, ...] = (0.0,)
    # Any of "inference", "training", "decoding".
    modes: tuple[str, ...] = ("inference",)
    # The time budget of a setting, shared by its implementations.
    seconds: float = 3.0
    # "time", "memory" or "comparison".
    metric: str = "time"
    # The implementation that speedups are relative to.
    baseline: str = "nn"
    d_model: int = 512
    # The number of CPU threads; 0 leaves it to PyTorch.
    threads: int = 0

    def settings(self, **common: Any) -> list[Setting]:
        r"""All settings; `common` are fields that they share, such as the dtype.

        >>> len(SUITES["training"].settings())
        33
        """
        if self.metric == "comparison":
            of_each = (COMPARISONS[name].setting for name in self.implementations)
            return [replace(setting, **common) for setting in of_each]
        return [
            Setting(
                batch_size,
                seq_len,
                mask,
                dropout,
                training=mode == "training",
                decoding=mode == "decoding",
                d_model=self.d_model,
                **common,
            )
            for mode in self.modes
            for batch_size, seq_len in self.sizes
            for mask in self.masks
            for dropout in self.dropouts
            # Training with dropout is slow in all implementations: the longest and the
            # padded settings would take most of the suite's time.
            if not dropout or (mask != "padding" and seq_len <= 2048)
        ]


SUITES = {
    "inference": Suite(
        (*HEADNOTES, *PYTORCH, *TUTORIALS, *LIBRARIES),
        SIZES,
    ),
    "training": Suite(
        (*HEADNOTES, "nn", "nn-weights", "sdpa"),
        SIZES,
        dropouts=(0.0, 0.1),
        modes=("training",),
    ),
    "decode": Suite(
        tuple(DECODERS),
        ((1, 512), (1, 4096), (8, 512), (8, 4096)),
        masks=("none",),
        modes=("decoding",),
        baseline="sdpa",
    ),
    "memory": Suite(
        MAIN,
        ((1, 1024), (1, 2048), (1, 4096), (1, 8192)),
        masks=("none",),
        modes=("inference", "training"),
        metric="memory",
    ),
    "growth": Suite(
        MAIN,
        ((1, 256), (1, 512), (1, 1024), (1, 2048), (1, 4096)),
        masks=("none",),
    ),
    "tiny": Suite(
        (*HEADNOTES, *PYTORCH, *TUTORIALS, *LIBRARIES),
        ((1, 12), (1, 1)),
        masks=("none", "causal"),
        seconds=2.0,
        d_model=64,
        threads=1,
    ),
    "decoders": Suite(
        tuple(COMPARISONS),
        (),
        modes=("decoding", "training"),
        metric="comparison",
        seconds=10.0,
        baseline="baseline",
    ),
}


def quick(name: str, sizes: Sizes, **changes: Any) -> Suite:
    """The quick form of a suite: fewer sizes, and one second for each setting."""
    return replace(SUITES[name], sizes=sizes, seconds=1.0, **changes)


QUICK_SUITES = {
    "inference": quick("inference", ((8, 128), (4, 512)), implementations=MAIN),
    "training": quick(
        "training", ((4, 512),), implementations=MAIN, masks=("none", "causal")
    ),
    "decode": quick("decode", ((8, 512),)),
    "memory": quick(
        "memory",
        ((1, 512), (1, 1024), (1, 2048)),
        implementations=("core", "fast", "nn"),
    ),
    "growth": quick("growth", ((1, 256), (1, 512), (1, 1024))),
    "tiny": quick("tiny", ((1, 12),), masks=("none",)),
    "decoders": quick("decoders", (), implementations=("ring", "training")),
}

# Implementations that hold all scores at once are measured up to these lengths only.
# At longer ones they take minutes and all memory of a small machine.
MAX_SEQ_LEN = dict.fromkeys(TUTORIALS, 1024) | dict.fromkeys(
    ("core", "fast-weights", "nn-weights", "nn-fastpath"), 4096
)
MAX_SEQ_LEN_TRAINING = dict.fromkeys(("core", "fast-weights", "nn-weights"), 2048)


def is_within_max_seq_len(name: str, setting: Setting) -> bool:
    r"""Whether an implementation is measured at this length.

    >>> is_within_max_seq_len("core", Setting(1, 4096, training=True))
    False
    """
    limits = MAX_SEQ_LEN_TRAINING if setting.training else MAX_SEQ_LEN
    limit = limits.get(name.removesuffix(COMPILED), setting.seq_len)
    return setting.seq_len <= limit
