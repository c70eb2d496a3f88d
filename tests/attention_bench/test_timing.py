"""The contest: who comes when, what counts, and who may not take part."""

import gc
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from attention_bench.timing import (
    TURN,
    Timing,
    Turn,
    contest,
    cpu_seconds,
    cuda_seconds,
    exponent,
    gate,
    order,
    ratio,
    reason,
    stopwatch,
    verdict,
)


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, *seconds: float) -> Callable[[], float]:
        """A turn that takes these times, over and over."""
        times = itertools.cycle(seconds)

        def turn() -> float:
            self.now += (duration := next(times))
            return duration

        return turn


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 11, 14])
def test_everyone_comes_once_a_round(count: int) -> None:
    for round_number in range(3 * count):
        assert sorted(order(count, round_number)) == list(range(count))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 11, 14])
def test_each_follows_each_equally_often(count: int) -> None:
    rounds = [order(count, n) for n in range(count * (1 + count % 2))]
    followed = Counter(pair for one in rounds for pair in itertools.pairwise(one))
    assert set(followed.values()) == {1 + count % 2}
    assert len(followed) == count * (count - 1)
    places = Counter((place, who) for one in rounds for place, who in enumerate(one))
    assert set(places.values()) == {1 + count % 2}


def test_turns_are_interleaved() -> None:
    log: list[str] = []

    def turn(name: str) -> Callable[[], float]:
        return lambda: log.append(name) or 1.0  # type: ignore[func-returns-value]

    contest({name: turn(name) for name in "abcd"}, seconds=0, least=4, most=4)
    assert len(log) == 4  # without seconds there is one round
    log.clear()
    contest({name: turn(name) for name in "abcd"}, seconds=9, most=4)
    rounds = [log[n : n + 4] for n in range(0, 16, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    behind_a = {x for one in rounds for a, x in itertools.pairwise(one) if a == "a"}
    assert behind_a == set("bcd")


def test_medians_and_spread_are_those_of_the_turns() -> None:
    clock = Clock()
    turns = {"a": clock.taking(5.0, 1.0, 2.0, 3.0, 4.0), "b": clock.taking(7.0)}
    timings, failed = contest(turns, seconds=99, most=5, clock=clock)
    assert failed == {}
    assert timings["a"].turns == (5.0, 1.0, 2.0, 3.0, 4.0)
    assert (timings["a"].low, timings["a"].median, timings["a"].high) == (2, 3, 4)
    assert (timings["b"].low, timings["b"].median, timings["b"].high) == (7, 7, 7)


def test_whoever_has_used_its_share_sits_out() -> None:
    clock = Clock()
    turns = {"slow": clock.taking(2.0), "fast": clock.taking(0.5)}
    timings, _ = contest(turns, seconds=10, least=2, most=40, clock=clock)
    assert timings["slow"].turns == (2.0, 2.0, 2.0, *[None] * 7)
    assert timings["fast"].turns == (0.5,) * 10


def test_least_turns_are_taken_unless_one_eats_all_the_time() -> None:
    clock = Clock()
    turns = {"slow": clock.taking(3.0), "slowest": clock.taking(9.0)}
    timings, _ = contest(turns, seconds=4, least=3, most=40, clock=clock)
    assert timings["slow"].count == 2
    assert timings["slowest"].count == 1


def test_who_raises_is_named_and_the_others_go_on() -> None:
    clock = Clock()
    turn = clock.taking(1.0)
    calls = iter([1.0, 1.0])

    def tires() -> float:
        try:
            return next(calls)
        except StopIteration:
            raise MemoryError("no room\nat all") from None

    timings, failed = contest(
        {"a": turn, "tired": tires, "b": turn}, seconds=99, most=4, clock=clock
    )
    assert failed == {"tired": "MemoryError: no room"}
    assert {name: timing.count for name, timing in timings.items()} == {"a": 4, "b": 4}


def test_an_interrupt_is_no_failure() -> None:
    def interrupted() -> float:
        raise KeyboardInterrupt

    gc.enable()
    with pytest.raises(KeyboardInterrupt):
        contest({"a": interrupted}, seconds=1)
    assert gc.isenabled()


def test_nothing_is_collected_during_a_turn() -> None:
    seen = []
    contest({"a": lambda: seen.append(gc.isenabled()) or 1.0}, seconds=1, most=2)  # type: ignore[func-returns-value]
    assert seen == [False, False]
    assert gc.isenabled()


def test_short_calls_are_repeated_until_a_turn_is_long_enough() -> None:
    asked: list[int] = []

    def watch(call: Callable[[], object], number: int) -> float:
        asked.append(number)
        return TURN / 50

    turn = Turn(lambda: None, watch)
    turn.warm_up()
    assert turn() == TURN / 50
    assert asked == [1, 3, 50]


def test_long_calls_are_not_repeated() -> None:
    asked: list[int] = []

    def watch(call: Callable[[], object], number: int) -> float:
        asked.append(number)
        return 4 * TURN

    turn = Turn(lambda: None, watch)
    turn.warm_up()
    turn()
    assert asked == [1, 1]
    asked.clear()
    warm = Turn(lambda: None, watch, warm=True)
    warm.warm_up()
    warm()
    assert asked == [1]


def test_a_turn_of_several_things_is_set_back_before() -> None:
    log: list[str] = []

    def watch(call: Callable[[], object], number: int) -> float:
        assert number == 1
        call()
        return TURN / 8

    turn = Turn(
        lambda: log.append("call"), watch, before=lambda: log.append("before"), per=8
    )
    turn.warm_up()
    assert turn() == TURN / 64
    assert log == ["before", "call"] * 2


def test_ratios_are_taken_within_rounds() -> None:
    # The machine slows down threefold in the middle.
    baseline = Timing((2.0, 2.0, 6.0, 6.0, 6.0))
    timing = Timing((1.0, 1.0, 3.0, None, None))
    assert ratio(baseline, timing) == 2
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
    assert verdict(times_as_fast) == word


def test_the_exponent_of_a_power_is_found() -> None:
    lengths = [256, 512, 1024, 2048, 4096]
    assert exponent(lengths, [3e-9 * n**1.7 for n in lengths]) == pytest.approx(1.7)
    noise = [1.05, 0.95, 1.02, 0.97, 1.01]
    noisy = [n * n * e for n, e in zip(lengths, noise, strict=True)]
    assert exponent(lengths, noisy) == pytest.approx(2, abs=0.03)
    # A constant beside a line is less than a line.
    assert exponent(lengths, [n + 1000 for n in lengths]) < 0.8


def test_the_gate_shuts_out_who_computes_something_else() -> None:
    right = {"output": torch.tensor([4.0, 2.0]), "weights": torch.ones(3)}
    close = {"output": torch.tensor([4.0, 2.00001])}
    planted = {"output": torch.tensor([4.0, 2.0]), "weights": torch.ones(3) * 0.9}
    nothing = {"output": torch.full((2,), math.nan)}
    other_part = {"output": right["output"], "input gradient": torch.ones(1)}
    apart, unequal = gate(
        {"close": close, "planted": planted, "nan": nothing, "more": other_part},
        right,
        tolerance=1e-5,
    )
    assert set(unequal) == {"planted", "nan"}
    assert unequal["planted"] == (
        "another function: weights off by 0.1 of the largest entry"
    )
    assert unequal["nan"].startswith("another function: output off by inf")
    assert apart["close"] == pytest.approx(2.5e-6, rel=0.1)
    assert apart["more"] == 0


def test_reasons_are_one_line() -> None:
    assert reason(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert reason(NotImplementedError()) == "NotImplementedError"


def test_the_wall_clock_counts_one_call() -> None:
    calls: Iterator[int] = iter(range(10))
    seconds = cpu_seconds(lambda: next(calls), 5)
    assert next(calls) == 5
    assert 0 < seconds < 0.1


def test_each_device_has_its_clock(device: torch.device) -> None:
    watch = stopwatch(device)
    assert watch is (cuda_seconds if device.type == "cuda" else cpu_seconds)
    x = torch.ones(64, 64, device=device)
    assert 0 < watch(lambda: x @ x, 3) < 1
