r"""# How long it will take

A bar on the terminal, with the time that is left. Cells differ a thousandfold in the
work that they need, so it is not cells that are counted: each weighs the seconds that
its contestants share, and the work of the slow ones that comes on top.

Source: the bar of [`headnotes check`](../attention_laws/cli.md), which has less to wait
for.
"""

import sys
import time
from collections.abc import Sequence

from attention_bench.setting import Setting

# What the slowest contestants manage together in a second, about, on a small machine.
FLOPS_PER_SECOND = 2e9

WIDTH = 79


class Progress:
    """Where a run is, and how long it will go on; silent where nobody looks."""

    def __init__(self) -> None:
        self.shown = False
        self.begin("", [], 0.0)

    def begin(self, name: str, settings: Sequence[Setting], seconds: float) -> None:
        """Start with a question, whose cells share `seconds` each."""
        self.name = name
        self.weights = [seconds + s.flops() / FLOPS_PER_SECOND for s in settings]
        self.start = time.perf_counter()

    def __call__(self, done: int, what: str) -> None:
        """Say that so many cells are done, and what comes now."""
        if not sys.stderr.isatty():
            return
        part = sum(self.weights[:done]) / (sum(self.weights) or 1)
        bar = f"{'█' * int(20 * part):·<20}"
        line = f"{self.name} {bar} {done}/{len(self.weights)} {what}"
        if done:
            line += f", {left((time.perf_counter() - self.start) * (1 / part - 1))}"
        self.clear()
        print(f"\r{line[:WIDTH]}", end="", file=sys.stderr, flush=True)
        self.shown = True

    def clear(self) -> None:
        """Leave the terminal as it was."""
        if self.shown:
            print("\r" + " " * WIDTH + "\r", end="", file=sys.stderr, flush=True)
            self.shown = False


def left(seconds: float) -> str:
    r"""A time to wait, as one says it.

    >>> left(130), left(7)
    ('2 min left', '7 s left')
    """
    return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
