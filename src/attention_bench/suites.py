r"""# The questions

Six of them; each is a list of settings, and who is asked:

- `inference`: how long does a forward pass take?
- `training`: how long do a forward and a backward pass take, without dropout and with?
- `decode`: how long does one more token take, when many are in the cache?
- `memory`: how much does a call need, how much does it keep, and how does that grow?
- `growth`: how does the time of a forward pass grow with the length?
- `tiny`: what does a call cost where there is nothing to compute, on one thread?

Each has a short form, to see on any machine in less than a minute how things stand.

Source: the width is that of the base model of [Attention Is All You
Need](https://arxiv.org/abs/1706.03762), Vaswani et al. 2017, table 3; the lengths go
from that of a sentence to that of a chapter.
"""

from dataclasses import dataclass, replace
from typing import Any

from attention_bench.decoding import DECODERS
from attention_bench.setting import MASKS, Setting

Sizes = tuple[tuple[int, int], ...]

SIZES = ((32, 10), (30, 50), (8, 128), (4, 512), (2, 1024), (1, 2048), (1, 4096))
MAIN = ("core", "fast", "nn", "nn-weights", "sdpa")
OURS = ("core", "fast", "fast-weights")
TORCH = ("nn", "nn-weights", "nn-fastpath", "sdpa")
HOUSE = ("causal", "valid_lens", "batch_first")
PEERS = ("gpt2", "bert", "llama", "x-transformers")


@dataclass(frozen=True)
class Question:
    """What is asked of whom, and how long a cell may take."""

    title: str
    contestants: tuple[str, ...]
    sizes: Sizes  # of each cell: batch_size, seq_len
    masks: tuple[str, ...] = MASKS
    dropouts: tuple[float, ...] = (0.0,)
    modes: tuple[str, ...] = ("inference",)
    # The seconds that the contestants of a cell share; but see `contest`.
    seconds: float = 3.0
    amount: str = "time"  # or "memory"
    baseline: str = "nn"
    d_model: int = 512
    threads: int = 0  # 0: as many as there are

    def settings(self, **like: Any) -> list[Setting]:
        r"""The cells, one by one; `like` is what they have in common.

        >>> len(QUESTIONS["training"].settings())
        33
        """
        return [
            Setting(
                batch_size,
                seq_len,
                mask,
                dropout,
                training=mode == "training",
                decoding=mode == "decoding",
                d_model=self.d_model,
                **like,
            )
            for mode in self.modes
            for batch_size, seq_len in self.sizes
            for mask in self.masks
            for dropout in self.dropouts
            # With dropout everyone is slow; it is asked where it can be waited for.
            if not dropout or (mask != "padding" and seq_len <= 2048)
        ]


QUESTIONS = {
    "inference": Question(
        "How long does a forward pass take?",
        (*OURS, *TORCH, *HOUSE, *PEERS),
        SIZES,
    ),
    "training": Question(
        "How long do a forward and a backward pass take?",
        (*OURS, "nn", "nn-weights", "sdpa"),
        SIZES,
        dropouts=(0.0, 0.1),
        modes=("training",),
    ),
    "decode": Question(
        "How long does one more token take?",
        tuple(DECODERS),
        ((1, 512), (1, 4096), (8, 512), (8, 4096)),
        masks=("none",),
        modes=("decoding",),
        baseline="sdpa",
    ),
    "memory": Question(
        "How much memory does a call need, and how much does it keep?",
        MAIN,
        ((1, 1024), (1, 2048), (1, 4096), (1, 8192)),
        masks=("none",),
        modes=("inference", "training"),
        amount="memory",
    ),
    "growth": Question(
        "How does the time of a forward pass grow with the length?",
        MAIN,
        ((1, 256), (1, 512), (1, 1024), (1, 2048), (1, 4096)),
        masks=("none",),
    ),
    "tiny": Question(
        "What does a call cost where there is nothing to compute?",
        (*OURS, *TORCH, *HOUSE, *PEERS),
        ((1, 12), (1, 1)),
        masks=("none", "causal"),
        seconds=2.0,
        d_model=64,
        threads=1,
    ),
}


def shorter(name: str, sizes: Sizes, **changes: Any) -> Question:
    """The short form of a question: fewer sizes, and a second for each cell."""
    return replace(QUESTIONS[name], sizes=sizes, seconds=1.0, **changes)


QUICK = {
    "inference": shorter("inference", ((8, 128), (4, 512)), contestants=MAIN),
    "training": shorter(
        "training", ((4, 512),), contestants=MAIN, masks=("none", "causal")
    ),
    "decode": shorter("decode", ((8, 512),)),
    "memory": shorter(
        "memory", ((1, 512), (1, 1024), (1, 2048)), contestants=("core", "fast", "nn")
    ),
    "growth": shorter("growth", ((1, 256), (1, 512), (1, 1024))),
    "tiny": shorter("tiny", ((1, 12),), masks=("none",)),
}

# Of those that hold all scores at once nothing is asked that would take minutes, and
# need all of the memory of a small machine, only to be the slowest once more.
LONGEST = dict.fromkeys(HOUSE, 1024) | dict.fromkeys(
    ("core", "fast-weights", "nn-weights", "nn-fastpath"), 4096
)
LONGEST_TRAINING = {"core": 2048, "fast-weights": 2048, "nn-weights": 2048}


def may_be_asked(name: str, setting: Setting) -> bool:
    r"""Is the answer worth waiting for?

    >>> may_be_asked("core", Setting(1, 4096, training=True))
    False
    """
    name = name.partition("+")[0]
    longest = LONGEST_TRAINING if setting.training else LONGEST
    return setting.seq_len <= longest.get(name, setting.seq_len)
