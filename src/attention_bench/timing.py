r"""# A fair contest

Two programs are timed side by side, one call of each in turn, so that a machine which
slows down slows both. Whoever always follows the heaviest finds the caches cold, so the
order changes from round to round until each has followed each. What counts is the
*median* of a contestant's turns, with the quartiles as its spread, and the median of
the ratios *within* rounds: both calls of such a ratio saw the same machine.

Before anything is timed there is a gate. All contestants are given the same weights and
the same question; whoever answers differently is computing something else, and how fast
it does that is of no interest here.

Source: pairing within rounds is the randomised block of Fisher's *The Design of
Experiments*, 1935; the order is Williams' square, *Experimental designs balanced for
the estimation of residual effects of treatments*, 1949.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headnotes.compare.equivalence import difference

# Differences below this share of a time are no differences: they do not repeat.
TIE = 0.02

# A turn lasts at least so many seconds: a clock cannot see a single short call.
TURN = 0.002

# How far two ways of computing one function may be apart, relative to its largest
# entry: the roundings of the dtype, summed over a few thousand terms.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}

Stopwatch = Callable[[Callable[[], object], int], float]


def order(count: int, round_number: int) -> list[int]:
    r"""Who comes when: in `count` rounds, or twice as many if it is odd, all is even.

    Each has then been in each place as often as any other, and has followed each of
    the others equally often.

    >>> [order(4, n) for n in range(4)]
    [[0, 3, 1, 2], [1, 0, 2, 3], [2, 1, 3, 0], [3, 2, 0, 1]]
    """
    # From the two ends to the middle; each next round is the same, one further.
    zigzag = [n // 2 if n % 2 == 0 else -(n // 2) - 1 for n in range(count)]
    places = [(place + round_number) % count for place in zigzag]
    # An odd number of contestants needs the mirror images as well.
    mirrored = count % 2 == 1 and round_number // count % 2 == 1
    return places[::-1] if mirrored else places


class Turn:
    """One contestant's call, and how often it is repeated in a turn of its own."""

    def __init__(
        self,
        call: Callable[[], object],
        stopwatch: Stopwatch,
        *,
        before: Callable[[], object] = lambda: None,
        per: int = 0,
        warm: bool = False,
    ) -> None:
        r"""`before` is run ahead of each turn, and not timed.

        A call that does `per` things is not repeated within its turn; what is returned
        is the time of one of them. What is `warm` has run already, and takes long.
        """
        self.call = call
        self.stopwatch = stopwatch
        self.before = before
        self.per = per
        self.warm = warm
        self.number = 1

    def warm_up(self) -> None:
        """Let it allocate and compile, and find out how many calls fill a turn."""
        if self.warm:
            return
        self.before()
        seconds = self.stopwatch(self.call, 1)
        if not self.per and seconds < TURN:
            # The first call is never the fastest.
            seconds = max(self.stopwatch(self.call, 3), 1e-9)
            self.number = max(1, math.ceil(TURN / seconds))

    def __call__(self) -> float:
        """Take a turn; return the seconds of one call."""
        self.before()
        return self.stopwatch(self.call, self.number) / (self.per or 1)


def stopwatch(device: torch.device) -> Stopwatch:
    r"""What measures calls on this device: seconds of one call, in the mean of many.

    >>> stopwatch(torch.device("cpu"))(lambda: None, 3) < 1
    True
    """
    return cuda_seconds if device.type == "cuda" else cpu_seconds


def cpu_seconds(call: Callable[[], object], number: int) -> float:
    """The wall clock: on a CPU a call ends when its work does."""
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def cuda_seconds(call: Callable[[], object], number: int) -> float:
    """The clock of the GPU: a call returns when its work has been queued."""
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(number):
        call()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000 / number


@dataclass(frozen=True)
class Timing:
    r"""The turns of a contestant, in seconds a call; None for a round that it sat out.

    >>> timing = Timing((3.0, 1.0, None, 2.0, 9.0, 2.0))
    >>> timing.median, timing.low, timing.high, timing.count
    (2.0, 2.0, 3.0, 5)
    """

    turns: tuple[float | None, ...]

    @property
    def taken(self) -> list[float]:
        """Its turns, shortest first."""
        return sorted(turn for turn in self.turns if turn is not None)

    @property
    def count(self) -> int:
        """How many turns it took."""
        return len(self.taken)

    @property
    def median(self) -> float:
        """Half of its turns took longer."""
        return statistics.median(self.taken)

    @property
    def low(self) -> float:
        """A quarter of its turns were at least as short."""
        return self.taken[(self.count - 1) // 4]

    @property
    def high(self) -> float:
        """A quarter of its turns took at least as long."""
        return self.taken[-1 - (self.count - 1) // 4]


def contest(
    turns: Mapping[str, Any],
    *,
    seconds: float,
    least: int = 3,
    most: int = 40,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, Timing], dict[str, str]]:
    r"""Let all take turns; return their timings, and who failed with its reason.

    A turn is a `Turn`, or whatever is called and returns seconds. Each contestant has
    an equal share of the `seconds`: whoever has used it up sits out, but not before
    `least` turns, unless a few have taken all of the seconds. So the slow ones cannot
    eat the time of the fast, which need more turns to be told apart.

    >>> timings, failed = contest(
    ...     {"tortoise": lambda: 9.0, "hare": lambda: 1.0},
    ...     seconds=1, most=2)
    >>> timings["tortoise"].turns, failed
    ((9.0, 9.0), {})
    """
    taken: dict[str, list[float | None]] = {name: [] for name in turns}
    used = dict.fromkeys(turns, 0.0)
    failed: dict[str, str] = {}
    share = seconds / max(1, len(turns))

    def attempt(name: str, action: Callable[[], float | None]) -> float | None:
        start = clock()
        try:
            return action()
        except Exception as error:
            failed[name] = reason(error)
            return None
        finally:
            used[name] += clock() - start

    with no_collections():
        for name, turn in turns.items():
            if isinstance(turn, Turn):
                attempt(name, turn.warm_up)
        used = dict.fromkeys(turns, 0.0)
        for round_number in range(most):
            patience = seconds if round_number < least else share
            present = [n for n in turns if n not in failed]
            present = [n for n in present if not round_number or used[n] < patience]
            if not present:
                break
            for name in turns:
                taken[name].append(None)
            for place in order(len(present), round_number):
                name = present[place]
                taken[name][-1] = attempt(name, turns[name])
    timings = {n: Timing(tuple(t)) for n, t in taken.items() if n not in failed}
    return timings, failed


@contextmanager
def no_collections() -> Iterator[None]:
    """A collection of garbage would be somebody's bad luck: it is done before."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def reason(error: Exception) -> str:
    r"""Why somebody is left out, in one line.

    >>> reason(ValueError("no such mask\nat all"))
    'ValueError: no such mask'
    """
    first = (str(error).strip().splitlines() or [""])[0]
    kind = type(error).__name__
    return f"{kind}: {first}" if first else kind


def ratio(baseline: Timing, timing: Timing) -> float:
    r"""How many times as fast as the baseline: the median over rounds that both took.

    The machine became three times as slow; the ratio does not notice.

    >>> ratio(Timing((2.0, 6.0, 6.0)), Timing((1.0, 3.0, None)))
    2.0
    """
    pairs = zip(baseline.turns, timing.turns, strict=False)
    return statistics.median(a / b for a, b in pairs if a is not None and b is not None)


def verdict(times_as_fast: float) -> str:
    r"""A ratio in words; what lies within 2 % is a tie.

    >>> verdict(1.5), verdict(0.98), verdict(0.5)
    ('faster', 'tie', 'slower')
    """
    if abs(times_as_fast - 1) <= TIE + 1e-9:
        return "tie"
    return "faster" if times_as_fast > 1 else "slower"


def exponent(sizes: Sequence[float], amounts: Sequence[float]) -> float:
    r"""The $p$ of the $c\,n^p$ that fits best: a line through the logarithms.

    >>> exponent([10, 20, 40], [7, 28, 112])
    2.0
    """
    x, y = [math.log(n) for n in sizes], [math.log(n) for n in amounts]
    return round(statistics.linear_regression(x, y).slope, 12)


Answer = dict[str, Tensor]


def gate(
    answers: Mapping[str, Answer], judge: Answer, tolerance: float
) -> tuple[dict[str, float], dict[str, str]]:
    r"""How far each is from the judge, and who is too far, with the reason.

    An answer has parts, its output and perhaps a gradient or weights. Only what both
    have is compared, and everyone has an output.

    >>> one, other = torch.ones(2), torch.tensor([1.0, 2.0])
    >>> apart, unequal = gate(
    ...     {"a": {"output": one}, "b": {"output": other}},
    ...     {"output": one}, tolerance=1e-6)
    >>> apart
    {'a': 0.0, 'b': 0.5}
    >>> unequal["b"]
    'another function: output off by 0.5 of the largest entry'
    """
    apart: dict[str, float] = {}
    unequal: dict[str, str] = {}
    for name, answer in answers.items():
        for part in (part for part in answer if part in judge):
            distance = difference({part: judge[part]}, {part: answer[part]})
            apart[name] = max(apart.get(name, 0.0), distance)
            if distance > tolerance:
                off = f"{part} off by {distance:.2g} of the largest entry"
                unequal[name] = f"another function: {off}"
    return apart, unequal
