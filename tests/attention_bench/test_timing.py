"""Timing: the order of the rounds, what a sample is, and what speedups mean."""

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from attention_bench.timing import (
    MIN_SECONDS,
    TimedCall,
    Timing,
    classify_speedup,
    cpu_timer,
    cuda_timer,
    error_summary,
    fit_exponent,
    round_order,
    speedup,
    time_side_by_side,
    timer_for,
)


class Clock:
    """A clock that the calls below move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, *seconds: float) -> Callable[[], float]:
        """A call whose samples are these, over and over."""
        times = itertools.cycle(seconds)

        def call() -> float:
            sample = next(times)
            self.now += sample
            return sample

        return call


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 11, 14])
def test_each_implementation_runs_once_a_round(count: int) -> None:
    for round_number in range(3 * count):
        assert sorted(round_order(count, round_number)) == list(range(count))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 11, 14])
def test_each_follows_each_other_equally_often(count: int) -> None:
    rounds = [round_order(count, n) for n in range(count * (1 + count % 2))]
    followed = Counter(pair for one in rounds for pair in itertools.pairwise(one))
    assert set(followed.values()) == {1 + count % 2}
    assert len(followed) == count * (count - 1)
    places = Counter(pair for one in rounds for pair in enumerate(one))
    assert set(places.values()) == {1 + count % 2}


@pytest.mark.slow
def test_samples_are_interleaved() -> None:
    log: list[str] = []

    def logging(name: str) -> Callable[[], float]:
        return lambda: log.append(name) or 1.0  # type: ignore[func-returns-value]

    calls = {name: logging(name) for name in "abcd"}
    time_side_by_side(calls, seconds=0, min_rounds=4, max_rounds=4)
    assert len(log) == 4  # without seconds there is one round
    log.clear()
    time_side_by_side(calls, seconds=9, max_rounds=4)
    rounds = [log[n : n + 4] for n in range(0, 16, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    after_a = {x for one in rounds for a, x in itertools.pairwise(one) if a == "a"}
    assert after_a == set("bcd")


@pytest.mark.slow
def test_median_and_quartiles_are_those_of_the_samples() -> None:
    clock = Clock()
    calls = {"a": clock.taking(5.0, 1.0, 2.0, 3.0, 4.0), "b": clock.taking(7.0)}
    timings, errors = time_side_by_side(calls, seconds=99, max_rounds=5, clock=clock)
    assert errors == {}
    assert timings["a"].samples == (5.0, 1.0, 2.0, 3.0, 4.0)
    assert (timings["a"].p25, timings["a"].median, timings["a"].p75) == (2, 3, 4)
    assert (timings["b"].p25, timings["b"].median, timings["b"].p75) == (7, 7, 7)


@pytest.mark.slow
def test_a_used_share_ends_the_samples_of_that_implementation() -> None:
    clock = Clock()
    timings, _ = time_side_by_side(
        {"slow": clock.taking(2.0), "fast": clock.taking(0.5)},
        seconds=10,
        min_rounds=2,
        max_rounds=40,
        clock=clock,
    )
    assert timings["slow"].samples == (2.0, 2.0, 2.0, *[None] * 7)
    assert timings["fast"].samples == (0.5,) * 10


@pytest.mark.slow
def test_min_rounds_are_measured_unless_one_uses_all_seconds() -> None:
    clock = Clock()
    timings, _ = time_side_by_side(
        {"slow": clock.taking(3.0), "slowest": clock.taking(9.0)},
        seconds=4,
        min_rounds=3,
        max_rounds=40,
        clock=clock,
    )
    assert timings["slow"].count == 2
    assert timings["slowest"].count == 1


@pytest.mark.slow
def test_an_implementation_that_raises_does_not_stop_the_others() -> None:
    clock = Clock()
    call = clock.taking(1.0)
    samples = iter([1.0, 1.0])

    def fails_later() -> float:
        try:
            return next(samples)
        except StopIteration:
            raise MemoryError("no room\nat all") from None

    timings, errors = time_side_by_side(
        {"a": call, "fails": fails_later, "b": call},
        seconds=99,
        max_rounds=4,
        clock=clock,
    )
    assert errors == {"fails": "MemoryError: no room"}
    assert {name: timing.count for name, timing in timings.items()} == {"a": 4, "b": 4}


@pytest.mark.slow
def test_an_interrupt_is_raised() -> None:
    def interrupted() -> float:
        raise KeyboardInterrupt

    gc.enable()
    with pytest.raises(KeyboardInterrupt):
        time_side_by_side({"a": interrupted}, seconds=1)
    assert gc.isenabled()


@pytest.mark.slow
def test_no_garbage_is_collected_during_a_sample() -> None:
    seen: list[bool] = []

    def call() -> float:
        seen.append(gc.isenabled())
        return 1.0

    time_side_by_side({"a": call}, seconds=1, max_rounds=2)
    assert seen == [False, False]
    assert gc.isenabled()


def test_short_calls_are_repeated_until_a_sample_is_long_enough() -> None:
    repeated: list[int] = []

    def timer(call: Callable[[], object], repeats: int) -> float:
        repeated.append(repeats)
        return MIN_SECONDS / 50

    call = TimedCall(lambda: None, timer)
    call.warm_up()
    assert call() == MIN_SECONDS / 50
    assert repeated == [1, 3, 50]


def test_long_calls_are_not_repeated() -> None:
    repeated: list[int] = []

    def timer(call: Callable[[], object], repeats: int) -> float:
        repeated.append(repeats)
        return 4 * MIN_SECONDS

    call = TimedCall(lambda: None, timer)
    call.warm_up()
    call()
    assert repeated == [1, 1]
    repeated.clear()
    warm = TimedCall(lambda: None, timer, is_warm=True)
    warm.warm_up()
    warm()
    assert repeated == [1]


def test_a_call_of_several_items_is_set_up_before_each_sample() -> None:
    log: list[str] = []

    def timer(call: Callable[[], object], repeats: int) -> float:
        assert repeats == 1
        call()
        return MIN_SECONDS / 8

    call = TimedCall(
        lambda: log.append("call"),
        timer,
        setup=lambda: log.append("setup"),
        items_per_call=8,
    )
    call.warm_up()
    assert call() == MIN_SECONDS / 64
    assert log == ["setup", "call"] * 2


def test_speedups_are_taken_within_rounds() -> None:
    # The machine slows down threefold after two rounds.
    baseline = Timing((2.0, 2.0, 6.0, 6.0, 6.0))
    timing = Timing((1.0, 1.0, 3.0, None, None))
    assert speedup(baseline, timing) == 2
    assert baseline.median / timing.median == 6


@pytest.mark.parametrize(
    ("times_as_fast", "word"),
    [
        (1.0201, "faster"),
        (1.02, "tie"),
        (1.0, "tie"),
        (0.98, "tie"),
        (0.9799, "slower"),
    ],
)
def test_two_per_cent_are_a_tie(times_as_fast: float, word: str) -> None:
    assert classify_speedup(times_as_fast) == word


def test_the_exponent_of_a_power_is_found() -> None:
    lengths = [256, 512, 1024, 2048, 4096]
    power = [3e-9 * n**1.7 for n in lengths]
    assert fit_exponent(lengths, power) == pytest.approx(1.7)
    noise = [1.05, 0.95, 1.02, 0.97, 1.01]
    noisy = [n * n * e for n, e in zip(lengths, noise, strict=True)]
    assert fit_exponent(lengths, noisy) == pytest.approx(2, abs=0.03)
    # A constant beside a linear term lowers the exponent below 1.
    assert fit_exponent(lengths, [n + 1000 for n in lengths]) < 0.8


def test_an_error_is_summarized_in_one_line() -> None:
    assert error_summary(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert error_summary(NotImplementedError()) == "NotImplementedError"


def test_wall_time_is_that_of_one_call() -> None:
    calls: Iterator[int] = iter(range(10))
    seconds = cpu_timer(lambda: next(calls), 5)
    assert next(calls) == 5
    assert 0 < seconds < 0.1


def test_each_device_has_its_timer(device: torch.device) -> None:
    timer = timer_for(device)
    assert timer is (cuda_timer if device.type == "cuda" else cpu_timer)
    x = torch.ones(64, 64, device=device)
    assert 0 < timer(lambda: x @ x, 3) < 1
