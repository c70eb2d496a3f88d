r"""# Asking

A run is made cell by cell: build, compare, time. Nobody's failure ends it: whoever
raises is left out of the cell, with the reason.

Where there is nothing to compute, what a call costs is the number of operators that
Python has to dispatch, so they are counted as well, on one thread.

Source: operators are counted by a
[`TorchDispatchMode`](https://docs.pytorch.org/docs/stable/notes/extending.html), which
sees each that arrives at a kernel, views included.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention_bench import memory
from attention_bench.contestants import Entry
from attention_bench.decoding import DECODERS, TOKENS, Decoder, prefix_of
from attention_bench.equal import WARM, admit, as_float, everyone, step
from attention_bench.record import Cell
from attention_bench.setting import Setting
from attention_bench.suites import Question, may_be_asked
from attention_bench.timing import (
    TOLERANCES,
    Timing,
    Turn,
    contest,
    exponent,
    gate,
    ratio,
    reason,
    stopwatch,
)

Progress = Callable[[int, str], None]


def ask(
    question: Question,
    settings: Sequence[Setting],
    progress: Progress = lambda done, what: None,
) -> list[Cell]:
    r"""Answer a question for these settings.

    `progress` is told before each cell how many are done, and what comes now.

    >>> from attention_bench.suites import QUESTIONS
    >>> setting = Setting(2, 3, "causal", d_model=10, heads=5)
    >>> question = Question("?", ("core", "nn"), ((2, 3),), seconds=0)
    >>> (cell,) = ask(question, [setting])
    >>> list(cell.results), cell.results["nn"]["ratio"]
    (['core', 'nn'], 1.0)
    """
    if question.amount == "memory":
        return ask_memory(question, settings, progress)
    cells = []
    with threads(question.threads):
        for done, setting in enumerate(settings):
            progress(done, str(setting))
            answered = ask_decoders if setting.decoding else ask_callers
            cells.append(answered(question, setting))
            cells[-1].setting |= {"flops": setting.flops(), "bytes": setting.bytes()}
    return cells


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Another number of threads for a while; 0 leaves it as it is."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count or before)
        yield
    finally:
        torch.set_num_threads(before)


def ask_callers(question: Question, setting: Setting) -> Cell:
    """One cell of forward passes, or of training steps."""
    names = [name for name in question.contestants if may_be_asked(name, setting)]
    entries, apart, left_out = admit(names, setting, everyone())
    cell = Cell(setting.as_json(), str(setting), left_out=left_out)
    watch = stopwatch(setting.device)
    steps = {name: step(entry, setting) for name, entry in entries.items()}
    turns = {
        name: Turn(call, watch, warm=entries[name].seconds > WARM)
        for name, call in steps.items()
    }
    timings, failed = contest(turns, seconds=question.seconds)
    cell.left_out |= failed
    fill(cell, timings, apart, question.baseline)
    if question.threads == 1:
        for name in cell.results:
            cell.results[name]["operators"] = operators(entries[name], setting)
    return cell


def ask_decoders(question: Question, setting: Setting) -> Cell:
    """One cell of decoders: tokens one by one, from a cache of the same length."""
    cell = Cell(setting.as_json(), str(setting))
    prefix, tokens, right = prefix_of(setting)
    apart: dict[str, float] = {}
    turns = {}
    with torch.no_grad():
        for name in question.contestants:
            try:
                decoder = DECODERS[name](prefix)
                call = partial(decode, decoder, tokens)
                decoder.reset()
                said = {name: as_float({"output": call()})}
            except Exception as error:
                cell.left_out[name] = reason(error)
                continue
            judged = gate(said, {"output": right}, TOLERANCES[setting.dtype])
            apart |= judged[0]
            cell.left_out |= judged[1]
            if name not in cell.left_out:
                watch = stopwatch(setting.device)
                turns[name] = Turn(call, watch, before=decoder.reset, per=TOKENS)
        timings, failed = contest(turns, seconds=question.seconds)
    cell.left_out |= failed
    fill(cell, timings, apart, question.baseline)
    return cell


def decode(
    decoder: Decoder,
    tokens: Tensor,  # [new, batch_size, d_model]
) -> Tensor:
    r"""All tokens one after the other, in the layout of the decoder.

    >>> tokens = torch.randn(3, 2, 10)
    >>> for batch_first in (False, True):
    ...     echo = Decoder(lambda: None, lambda x: x, batch_first)
    ...     decode(echo, tokens).equal(tokens)
    True
    True
    """
    said = []
    for n in range(len(tokens)):
        token = tokens[n : n + 1]  # [1, batch_size, d_model]
        if decoder.batch_first:
            token = token.transpose(0, 1)  # [batch_size, 1, d_model]
        said.append(decoder.step(token))
    if decoder.batch_first:
        return torch.cat(said, dim=1).transpose(0, 1)  # [new, batch_size, d_model]
    return torch.cat(said)  # [new, batch_size, d_model]


def fill(
    cell: Cell,
    timings: Mapping[str, Timing],
    apart: Mapping[str, float],
    baseline: str,
) -> None:
    """Write the timings of a contest into its cell."""
    for name, timing in timings.items():
        found = {
            "seconds": timing.median,
            "low": timing.low,
            "high": timing.high,
            "turns": timing.count,
            "apart": apart[name],
        }
        if baseline in timings:
            found["ratio"] = ratio(timings[baseline], timing)
        cell.results[name] = found


def rate(cell: Cell, ceilings: Mapping[str, float]) -> None:
    """Say how much of what the machine can do at best each result has reached."""
    for found in cell.results.values():
        flops = cell.setting["flops"] / found["seconds"]
        moved = cell.setting["bytes"] / found["seconds"]
        found["of_matmul"] = flops / ceilings["flops_per_second"]
        found["of_copy"] = moved / ceilings["bytes_per_second"]


def operators(entry: Entry, setting: Setting) -> int:
    r"""How many operators a forward pass dispatches, views included.

    >>> from torch import nn
    >>> layer = nn.Linear(10, 10)
    >>> setting = Setting(2, 3, d_model=10, heads=5)
    >>> operators(Entry(layer, lambda x: layer(x).relu()), setting)
    5
    """
    number = 0

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal number
            number += 1
            result: Any = func(*args, **kwargs or {})
            return result

    x = entry.turned(setting.x())
    # Not in inference mode, which hides what a composite operator is made of.
    with torch.no_grad(), Count():  # type: ignore[no-untyped-call]
        entry.call(x)
    return number


def ask_memory(
    question: Question, settings: Sequence[Setting], progress: Progress
) -> list[Cell]:
    """All settings for one contestant after the other, each in a process of its own."""
    cells = [Cell(setting.as_json(), title(setting)) for setting in settings]
    training = [setting.training for setting in settings]
    parts = [(name, mode) for name in question.contestants for mode in (False, True)]
    parts = [part for part in parts if part[1] in training]
    for done, (name, mode) in enumerate(parts):
        progress(done * len(settings) // len(parts), name)
        known = everyone()[name]
        asked = {
            number: setting
            for number, setting in enumerate(settings)
            if setting.training == mode and known.takes_part(setting)
            if may_be_asked(name, setting)
        }
        count = torch.get_num_threads()
        found = memory.in_a_process(name, list(asked.values()), count)
        for number, answer in zip(asked, found, strict=True):
            if isinstance(answer, str):
                cells[number].left_out[name] = answer
            else:
                cells[number].results[name] = {**answer}
    return cells


def title(setting: Setting) -> str:
    """A cell of the question for memory."""
    return f"{'training' if setting.training else 'inference'}, {setting}"


def exponents(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    r"""How times, or peaks, grow with the length: the exponent of each contestant.

    >>> cells = [
    ...     Cell({"seq_len": n, "training": False}, "",
    ...          {"fast": {"seconds": 3.0 * n**2}})
    ...     for n in (8, 16, 32)]
    >>> exponents(cells)
    {'time of inference': {'fast': 2.0}}
    """
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for cell in cells:
        mode = "training" if cell.setting["training"] else "inference"
        for name, found in cell.results.items():
            key = "peak" if "peak" in found else "seconds"
            what = f"{'memory' if key == 'peak' else 'time'} of {mode}"
            point = cell.setting["seq_len"], max(1e-9, found[key])
            points.setdefault(what, {}).setdefault(name, []).append(point)
    return {
        what: {
            name: exponent(*zip(*pairs, strict=True))
            for name, pairs in by_name.items()
            if len(pairs) > 1
        }
        for what, by_name in points.items()
    }
