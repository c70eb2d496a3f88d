r"""# Running a suite

This module runs a suite, setting by setting: it builds the implementations, checks that
they are equal, and times them. An implementation that raises an exception does not end
the run: it is skipped in this setting, and the record holds the reason.

On tiny tensors, the time of a call depends on the number of operators that Python
dispatches. So suites on one thread count these as well.

Source: operators are counted by a
[`TorchDispatchMode`](https://docs.pytorch.org/docs/stable/notes/extending.html), which
receives every operator that reaches a kernel, including views.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_bench import memory
from attention_bench.decoders import COMPARISONS
from attention_bench.decoding import DECODERS, TOKENS, decode_tokens, make_prefix
from attention_bench.equal import (
    TOLERANCES,
    build_and_check,
    check_equal,
    make_step,
    upcast,
)
from attention_bench.implementations import ALL_IMPLEMENTATIONS, Adapter
from attention_bench.report import Cell, Record, duration
from attention_bench.setting import Setting
from attention_bench.suites import Suite, is_within_max_seq_len
from attention_bench.timing import (
    TimedCall,
    Timing,
    error_summary,
    fit_exponent,
    speedup,
    time_side_by_side,
    timer_for,
)

# After a first call of at least so many seconds, no second warm-up call is needed.
WARM_SECONDS = 0.1

# The shares of the peak rates that a call reaches.
UTILIZATIONS = "flops_utilization", "bandwidth_utilization"

# Called before each setting, with the number of finished settings and the next one.
ProgressCallback = Callable[[int, str], None]


def run_suite(
    suite: Suite,
    settings: Sequence[Setting],
    progress: ProgressCallback = lambda done, current: None,
) -> list[Cell]:
    r"""Run a suite in these settings.

    >>> setting = Setting(2, 3, "causal", d_model=10, heads=5)
    >>> suite = Suite(("core", "nn"), sizes=((2, 3),), seconds=0)
    >>> (cell,) = run_suite(suite, [setting])
    >>> list(cell.results), cell.results["nn"]["speedup"]
    (['core', 'nn'], 1.0)
    """
    if suite.metric == "memory":
        return measure_memory(suite, settings, progress)
    cells = []
    if suite.metric == "comparison":
        for done, name in enumerate(suite.implementations):
            progress(done, name)
            cells.append(time_comparison(name, settings[done], suite.seconds))
        return cells
    with torch_threads(suite.threads):
        for done, setting in enumerate(settings):
            progress(done, str(setting))
            time_setting = time_decoders if setting.decoding else time_modules
            cell = time_setting(suite, setting)
            cell.setting |= {"flops": setting.flops(), "bytes": setting.bytes()}
            cells.append(cell)
    return cells


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of PyTorch's CPU threads for a while; 0 does not change it."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count or before)
        yield
    finally:
        torch.set_num_threads(before)


def time_modules(suite: Suite, setting: Setting) -> Cell:
    """Time forward passes, or training steps."""
    implementations = {
        name: ALL_IMPLEMENTATIONS[name]
        for name in suite.implementations
        if is_within_max_seq_len(name, setting)
    }
    adapters, max_errors, skipped = build_and_check(implementations, setting)
    cell = Cell(setting.as_dict(), str(setting), skipped=skipped)
    timer = timer_for(setting.device)
    calls = {
        name: TimedCall(
            make_step(adapter, setting),
            timer,
            is_warm=adapter.first_call_seconds > WARM_SECONDS,
        )
        for name, adapter in adapters.items()
    }
    timings, failed = time_side_by_side(calls, seconds=suite.seconds)
    cell.skipped |= failed
    add_timings(cell, timings, max_errors, suite.baseline)
    if suite.threads == 1:
        for name in cell.results:
            cell.results[name]["operators"] = count_operators(adapters[name], setting)
    return cell


def time_decoders(suite: Suite, setting: Setting) -> Cell:
    """Time the decoding of tokens, one by one, from a KV cache of one length."""
    cell = Cell(setting.as_dict(), str(setting))
    prefix, tokens, expected = make_prefix(setting)
    timer = timer_for(setting.device)
    max_errors: dict[str, float] = {}
    calls = {}
    with torch.no_grad():
        for name in suite.implementations:
            try:
                decoder = DECODERS[name](prefix)
                call = partial(decode_tokens, decoder, tokens)
                decoder.reset()
                outputs = upcast({"output": call()})
            except Exception as error:
                cell.skipped[name] = error_summary(error)
                continue
            max_errors[name], problem = check_equal(
                outputs, {"output": expected}, TOLERANCES[setting.dtype]
            )
            if problem:
                cell.skipped[name] = problem
                continue
            calls[name] = TimedCall(
                call, timer, setup=decoder.reset, items_per_call=TOKENS
            )
        timings, failed = time_side_by_side(calls, seconds=suite.seconds)
    cell.skipped |= failed
    add_timings(cell, timings, max_errors, suite.baseline)
    return cell


def time_comparison(name: str, setting: Setting, seconds: float) -> Cell:
    r"""Time the implementations of a comparison, which have references of their own.

    >>> setting = Setting(2, 19, "causal", training=True, d_model=64)
    >>> cell = time_comparison("window_module", setting, seconds=0)
    >>> list(cell.results), cell.skipped
    (['causal', 'window 512'], {})
    """
    heads = f"{setting.heads} heads of {setting.d_model // setting.heads}"
    cell = Cell(setting.as_dict(), f"{name}: {setting}, {heads}")
    timer = timer_for(setting.device)
    max_errors: dict[str, float] = {}
    calls = {}
    builders = COMPARISONS[name].build(setting)
    with torch.set_grad_enabled(setting.training):
        for each, build in builders.items():
            try:
                measured = build()
                outputs, expected = measured.outputs(), measured.expected()
            except Exception as error:
                cell.skipped[each] = error_summary(error)
                continue
            max_errors[each], problem = check_equal(
                upcast(outputs), upcast(expected), TOLERANCES[setting.dtype]
            )
            if problem:
                cell.skipped[each] = problem
                continue
            calls[each] = TimedCall(
                measured.call,
                timer,
                setup=measured.setup,
                items_per_call=measured.items_per_call,
            )
        timings, failed = time_side_by_side(calls, seconds=seconds)
    cell.skipped |= failed
    baseline = next(iter(builders))
    add_timings(cell, timings, max_errors, baseline)
    # Its speedup over itself says nothing.
    cell.results.get(baseline, {}).pop("speedup", None)
    return cell


def add_timings(
    cell: Cell,
    timings: Mapping[str, Timing],
    max_errors: Mapping[str, float],
    baseline: str,
) -> None:
    """Add a result for each timing to a cell."""
    for name, timing in timings.items():
        result = {
            "seconds": timing.median,
            "p25": timing.p25,
            "p75": timing.p75,
            "samples": timing.count,
            "max_error": max_errors[name],
        }
        if baseline in timings:
            result["speedup"] = speedup(timings[baseline], timing)
        cell.results[name] = result


def add_roofline(cell: Cell, peak_rates: Mapping[str, float]) -> None:
    """Add to each result its share of the machine's peak rates."""
    for result in cell.results.values():
        flops_per_second = cell.setting["flops"] / result["seconds"]
        bytes_per_second = cell.setting["bytes"] / result["seconds"]
        result["flops_utilization"] = flops_per_second / peak_rates["flops_per_second"]
        result["bandwidth_utilization"] = (
            bytes_per_second / peak_rates["bytes_per_second"]
        )


def count_operators(adapter: Adapter, setting: Setting) -> int:
    r"""The number of operators that a forward pass dispatches, including views.

    >>> from torch import nn
    >>> layer = nn.Linear(10, 10)
    >>> setting = Setting(2, 3, d_model=10, heads=5)
    >>> count_operators(Adapter(layer, lambda x: layer(x).relu()), setting)
    5
    """
    count = 0

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal count
            count += 1
            result: Any = func(*args, **kwargs or {})
            return result

    x = adapter.switch_layout(setting.x())
    # Inference mode would hide the parts of composite operators.
    with torch.no_grad(), Counter():  # type: ignore[no-untyped-call]
        adapter.call(x)
    return count


def measure_memory(
    suite: Suite, settings: Sequence[Setting], progress: ProgressCallback
) -> list[Cell]:
    """Measure memory in a process for each implementation and mode."""
    cells = [
        Cell(setting.as_dict(), f"{mode_of(setting.training)}, {setting}")
        for setting in settings
    ]
    modes = dict.fromkeys(setting.training for setting in settings)
    jobs = [(name, mode) for name in suite.implementations for mode in modes]
    for done, (name, training) in enumerate(jobs):
        progress(done * len(settings) // len(jobs), name)
        # The measured settings, by their number in `cells`.
        measured = {
            number: setting
            for number, setting in enumerate(settings)
            if setting.training == training
            and ALL_IMPLEMENTATIONS[name].supports(setting)
            and is_within_max_seq_len(name, setting)
        }
        measurements = memory.measure_in_subprocess(
            name, list(measured.values()), torch.get_num_threads()
        )
        for number, measurement in zip(measured, measurements, strict=True):
            if isinstance(measurement, str):
                cells[number].skipped[name] = measurement
            else:
                cells[number].results[name] = {**measurement}
    return cells


def mode_of(training: bool) -> str:
    """The name of a mode."""
    return "training" if training else "inference"


def find_disturbances(
    record: Record,
    load: float,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> list[str]:
    r"""Signs that other processes disturbed the measurement of times.

    These are a `load` average that leaves too few cores, peak rates that differ
    `before` and `after`, and implementations that are faster on longer sequences.

    >>> record = Record("tiny", "", "nn", "float32", {"cores": 2, "threads": 2})
    >>> before, after = {"flops_per_second": 3e9}, {"flops_per_second": 1e9}
    >>> for disturbance in find_disturbances(record, 1.5, before, after):
    ...     print(disturbance)
    the load average was 1.5 of 2 cores before the start; 2 threads need 2 of them
    the peak rate flops_per_second was 3e+09 before and 1e+09 after the suite
    """
    disturbances = []
    cores, threads = record.machine["cores"], record.machine["threads"]
    if load + threads > cores + 0.5:
        disturbances.append(
            f"the load average was {load:.1f} of {cores} cores before the start; "
            f"{threads} thread{'s' * (threads > 1)} need {threads} of them"
        )
    disturbances += [
        f"the peak rate {rate} was {before[rate]:.3g} before and {after[rate]:.3g} "
        f"after the suite"
        for rate in before
        if max(before[rate], after[rate]) > 1.25 * min(before[rate], after[rate])
    ]
    return disturbances + faster_on_longer(record.cells)


def faster_on_longer(cells: Sequence[Cell]) -> list[str]:
    r"""Implementations that took less time on a longer sequence, by more than 10 %.

    Below a tenth of the peak rates, the time is that of launching operators, and the
    length says nothing.

    >>> cells = [
    ...     Cell({"seq_len": n}, "", {"core": {"seconds": seconds}})
    ...     for n, seconds in ((256, 0.221), (512, 0.236), (1024, 0.073))]
    >>> faster_on_longer(cells)
    ['core took 236 ms at length 512 and 73.0 ms at length 1,024']
    """
    found = []
    last: dict[tuple[object, ...], tuple[int, float]] = {}
    for cell in sorted(cells, key=lambda cell: int(cell.setting["seq_len"])):
        length = cell.setting["seq_len"]
        varying = ("seq_len", "flops", "bytes")
        rest = [v for k, v in sorted(cell.setting.items()) if k not in varying]
        for name, result in cell.results.items():
            if max(result.get(rate, 1.0) for rate in UTILIZATIONS) < 0.1:
                continue
            shorter, seconds = last.get((name, *rest), (length, 0.0))
            if result["seconds"] < 0.9 * seconds:
                found.append(
                    f"{name} took {duration(seconds)} at length {shorter:,} and "
                    f"{duration(result['seconds'])} at length {length:,}"
                )
            last[name, *rest] = length, result["seconds"]
    return found


def without_conclusions(record: Record) -> Record:
    """The record with its times alone."""
    measured = ("seconds", "p25", "p75", "samples", "max_error", "operators")
    cells = [
        replace(
            cell,
            results={
                name: {key: result[key] for key in measured if key in result}
                for name, result in cell.results.items()
            },
        )
        for cell in record.cells
    ]
    return replace(record, cells=cells, exponents={})


def growth_exponents(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    r"""How time or peak memory grows with the length: a fitted exponent each.

    >>> cells = [
    ...     Cell({"seq_len": n, "training": False}, "",
    ...          {"fast": {"seconds": 3.0 * n**2}})
    ...     for n in (8, 16, 32)]
    >>> growth_exponents(cells)
    {'inference time': {'fast': 2.0}}
    """
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for cell in cells:
        mode = mode_of(cell.setting["training"])
        for name, result in cell.results.items():
            if "peak" in result:
                metric, amount = "memory", result["peak"]
            else:
                metric, amount = "time", result["seconds"]
            # A logarithm needs more than zero bytes.
            point = (cell.setting["seq_len"], max(1e-9, amount))
            by_name = points.setdefault(f"{mode} {metric}", {})
            by_name.setdefault(name, []).append(point)
    return {
        metric: {
            name: fit_exponent(*zip(*pairs, strict=True))
            for name, pairs in by_name.items()
            if len(pairs) > 1
        }
        for metric, by_name in points.items()
    }
