r"""# Timing implementations side by side

This module times several implementations fairly, also on a machine whose speed changes.
They are timed in *rounds*: each round measures one sample of every implementation, one
after the other, so a machine that slows down slows all of them. The order changes from
round to round until each implementation has followed each other one equally often,
because its predecessor determines the content of the CPU's caches.

The reported time is the *median* of the samples, with the quartiles as its spread. A
*speedup* is the median of the ratios *within* rounds: both samples of such a ratio were
measured under the same conditions.

Source: pairing within rounds is the randomized block of Fisher's *The Design of
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

# Speedups within 2 % of 1 are ties: such differences do not repeat.
TIE = 0.02

# A sample lasts at least so many seconds: shorter calls are repeated within it, because
# a clock cannot measure a single one.
MIN_SECONDS = 0.002

# Runs a call so many times, and returns the mean seconds of one.
Timer = Callable[[Callable[[], object], int], float]


def round_order(count: int, round_number: int) -> list[int]:
    r"""The order of `count` implementations in a round.

    Over `count` rounds (twice as many if `count` is odd) each implementation is in each
    place equally often, and follows each other one equally often.

    >>> [round_order(4, n) for n in range(4)]
    [[0, 3, 1, 2], [1, 0, 2, 3], [2, 1, 3, 0], [3, 2, 0, 1]]
    """
    # The first row of Williams' square alternates between both ends; each further row
    # adds 1 to the one before.
    first = [n // 2 if n % 2 == 0 else -(n // 2) - 1 for n in range(count)]
    row = [(place + round_number) % count for place in first]
    # An odd number of implementations needs the reversed rows as well.
    is_reversed = count % 2 == 1 and round_number // count % 2 == 1
    return row[::-1] if is_reversed else row


class TimedCall:
    """A call with its timer: each invocation returns one sample in seconds."""

    def __init__(
        self,
        call: Callable[[], object],
        timer: Timer,
        *,
        setup: Callable[[], object] = lambda: None,
        items_per_call: int = 0,
        is_warm: bool = False,
    ) -> None:
        r"""`setup` runs before each sample, and is not timed.

        A call that processes several items (`items_per_call`) is not repeated within a
        sample, and the sample is the time of one item. `is_warm` says that the call has
        run before, and takes so long that it need not be repeated either.
        """
        self.call = call
        self.timer = timer
        self.setup = setup
        self.items_per_call = items_per_call
        self.is_warm = is_warm
        self.repeats = 1

    def warm_up(self) -> None:
        """Run the call until it has allocated and compiled; choose `repeats`."""
        if self.is_warm:
            return
        self.setup()
        seconds = self.timer(self.call, 1)
        if not self.items_per_call and seconds < MIN_SECONDS:
            # The first call is slower than those that follow.
            seconds = max(self.timer(self.call, 3), 1e-9)
            self.repeats = max(1, math.ceil(MIN_SECONDS / seconds))

    def __call__(self) -> float:
        """Measure one sample: the seconds of one call, or of one of its items."""
        self.setup()
        return self.timer(self.call, self.repeats) / (self.items_per_call or 1)


def timer_for(device: torch.device) -> Timer:
    r"""The timer for calls on a device.

    >>> timer_for(torch.device("cpu"))(lambda: None, 3) < 1
    True
    """
    return cuda_timer if device.type == "cuda" else cpu_timer


def cpu_timer(call: Callable[[], object], repeats: int) -> float:
    """Measure wall time: on a CPU a call returns when its work is done."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def cuda_timer(call: Callable[[], object], repeats: int) -> float:
    """Measure with CUDA events: a call returns when its work is queued."""
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000 / repeats


@dataclass(frozen=True)
class Timing:
    r"""The samples of an implementation in seconds, None for a round without one.

    >>> timing = Timing((3.0, 1.0, None, 2.0, 9.0, 2.0))
    >>> timing.median, timing.p25, timing.p75, timing.count
    (2.0, 2.0, 3.0, 5)
    """

    samples: tuple[float | None, ...]

    @property
    def measured(self) -> list[float]:
        """The samples without the gaps, shortest first."""
        return sorted(sample for sample in self.samples if sample is not None)

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self.measured)

    @property
    def median(self) -> float:
        """The median sample."""
        return statistics.median(self.measured)

    @property
    def p25(self) -> float:
        """The lower quartile, rounded to a sample."""
        return self.measured[(self.count - 1) // 4]

    @property
    def p75(self) -> float:
        """The upper quartile, rounded to a sample."""
        return self.measured[-1 - (self.count - 1) // 4]


def time_side_by_side(
    calls: Mapping[str, Callable[[], float]],
    *,
    seconds: float,
    min_rounds: int = 3,
    max_rounds: int = 40,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, Timing], dict[str, str]]:
    r"""Time implementations in rounds; return timings, and the errors of the others.

    A call is a `TimedCall`, or any function that returns seconds. All have an equal
    share of the `seconds`; one that has used its share is left out of further rounds,
    but not before `min_rounds`, unless it has used all of the `seconds` alone. So slow
    implementations cannot use up the time of fast ones, which need more samples to be
    distinguished.

    >>> timings, errors = time_side_by_side(
    ...     {"tortoise": lambda: 9.0, "hare": lambda: 1.0},
    ...     seconds=1, max_rounds=2)
    >>> timings["tortoise"].samples, errors
    ((9.0, 9.0), {})
    """
    samples: dict[str, list[float | None]] = {name: [] for name in calls}
    used = dict.fromkeys(calls, 0.0)
    errors: dict[str, str] = {}
    share = seconds / max(1, len(calls))

    def attempt(name: str, action: Callable[[], float | None]) -> float | None:
        start = clock()
        try:
            return action()
        except Exception as error:
            errors[name] = error_summary(error)
            return None
        finally:
            used[name] += clock() - start

    with gc_paused():
        for name, call in calls.items():
            if isinstance(call, TimedCall):
                attempt(name, call.warm_up)
        used = dict.fromkeys(calls, 0.0)
        for round_number in range(max_rounds):
            budget = seconds if round_number < min_rounds else share
            active = [
                name
                for name in calls
                if name not in errors and (round_number == 0 or used[name] < budget)
            ]
            if not active:
                break
            for name in calls:
                samples[name].append(None)
            for place in round_order(len(active), round_number):
                name = active[place]
                samples[name][-1] = attempt(name, calls[name])
    timings = {n: Timing(tuple(s)) for n, s in samples.items() if n not in errors}
    return timings, errors


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect garbage now, and not while a sample is measured."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def error_summary(error: Exception) -> str:
    r"""The type of an error, and the first line of its message.

    >>> error_summary(ValueError("no such mask\nat all"))
    'ValueError: no such mask'
    """
    first = (str(error).strip().splitlines() or [""])[0]
    kind = type(error).__name__
    return f"{kind}: {first}" if first else kind


def speedup(baseline: Timing, timing: Timing) -> float:
    r"""How many times as fast as the baseline: the median ratio within rounds.

    A machine that becomes three times as slow does not change it:

    >>> speedup(Timing((2.0, 6.0, 6.0)), Timing((1.0, 3.0, None)))
    2.0
    """
    pairs = zip(baseline.samples, timing.samples, strict=False)
    return statistics.median(a / b for a, b in pairs if a is not None and b is not None)


def classify_speedup(speedup: float) -> str:
    r"""Whether a speedup is a difference; within 2 % it is a tie.

    >>> classify_speedup(1.5), classify_speedup(0.98), classify_speedup(0.5)
    ('faster', 'tie', 'slower')
    """
    # 1.02 - 1 is slightly more than 0.02 in float64.
    if abs(speedup - 1) <= TIE + 1e-9:
        return "tie"
    return "faster" if speedup > 1 else "slower"


def fit_exponent(sizes: Sequence[float], amounts: Sequence[float]) -> float:
    r"""The $p$ of the best-fitting $c\,n^p$: the slope of a line through logarithms.

    >>> fit_exponent([10, 20, 40], [7, 28, 112])
    2.0
    """
    x = [math.log(n) for n in sizes]
    y = [math.log(n) for n in amounts]
    return round(statistics.linear_regression(x, y).slope, 12)
