r"""# What is recorded

A run answers one question on one machine, cell by cell. It is written as JSON, whole or
not at all, under the name of the question and the machine: a run on another machine
stands beside it, a later one on the same machine takes its place.

```json
{"question": "inference", "machine": {"device": "…", "torch": "…"}, "cells": [
  {"setting": {"batch_size": 4, "seq_len": 512, "mask": "causal"},
   "results": {"nn": {"seconds": 0.018, "low": 0.018, "high": 0.019, "ratio": 1.0}},
   "left_out": {"somebody": "another function: output off by 0.3 …"}}]}
```

Times are in seconds, memory in bytes, `ratio` says how many times as fast as the
baseline, and `of_matmul` and `of_copy` are shares of what the machine can do at best.

Source: a record is what a table on the page of benchmarks is made from, and nothing on
that page comes from anywhere else.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attention_bench.timing import verdict

FORMAT = 1


@dataclass
class Cell:
    """One setting, what was found for each contestant, and who was left out and why."""

    setting: dict[str, Any]
    title: str
    results: dict[str, dict[str, float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """One question on one machine."""

    question: str
    command: str
    baseline: str
    dtype: str
    machine: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)
    # How an amount grows with the length: the fitted exponent of each contestant.
    exponents: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    format: int = FORMAT


def as_json(run: Run) -> str:
    r"""A run as JSON, with four digits of each number: more would be noise.

    >>> run = Run("tiny", "headnotes bench tiny", "nn", "float32", {})
    >>> from_json(as_json(run)) == run
    True
    """
    return json.dumps(rounded(asdict(run)), indent=1, ensure_ascii=False) + "\n"


def rounded(value: Any) -> Any:
    r"""Four significant digits, in whatever the numbers lie.

    >>> rounded({"seconds": [0.123456, 12]})
    {'seconds': [0.1235, 12]}
    """
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def from_json(text: str) -> Run:
    r"""A run from its JSON; raises `ValueError` for what is none.

    >>> from_json('{"format": 7}')
    Traceback (most recent call last):
    ...
    ValueError: no record of a benchmark: its `format` is 7, not 1
    """
    try:
        plain = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no record of a benchmark: {error}") from None
    seen = plain.get("format") if isinstance(plain, dict) else None
    if seen != FORMAT:
        raise ValueError(f"no record of a benchmark: its `format` is {seen}, not 1")
    try:
        cells = [Cell(**cell) for cell in plain.pop("cells")]
        return Run(cells=cells, **plain)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no record of a benchmark: {error}") from None


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all, whatever interrupts it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    new = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # As any new file: the one made above is for our eyes only.
        new.chmod(0o644)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def table(run: Run) -> Iterator[str]:
    r"""A run to be read on a terminal, the fastest first, line by line.

    >>> run = Run("inference", "", "nn", "float32", {"device": "a CPU"})
    >>> found = {"seconds": 0.2, "low": 0.19, "high": 0.21, "ratio": 1.5}
    >>> run.cells = [Cell({}, "length 8", {"fast": found}, {"b": "another function"})]
    >>> print(*table(run), sep="\n")  # doctest: +NORMALIZE_WHITESPACE
    inference, float32, on a CPU
    <BLANKLINE>
    length 8
      fast                  200 ms   ±  5%     1.50 × nn
      b                 left out: another function
    """
    machine = run.machine
    about = [f"{run.question}, {run.dtype}, on {machine.get('device', '?')}"]
    if "threads" in machine:
        count = machine["threads"]
        about.append(f"{count} thread{'s' * (count > 1)}")
    if "torch" in machine:
        about.append(f"torch {machine['torch']}")
    yield ", ".join(about)
    for cell in run.cells:
        yield ""
        yield cell.title
        results = cell.results.items()
        for name, found in sorted(results, key=lambda item: size(item[1])):
            yield f"  {name:18}{describe(name, found, run.baseline)}".rstrip()
        for name, why in cell.left_out.items():
            yield f"  {name:18}left out: {why}"
    for what, exponents in run.exponents.items():
        fits = ", ".join(f"{name} {power:.2f}" for name, power in exponents.items())
        yield ""
        yield f"{what} grows with the length to the power of"
        yield f"  {fits}"


def size(found: dict[str, float]) -> float:
    """What results are sorted by."""
    return found.get("seconds", found.get("peak", 0.0))


def describe(name: str, found: dict[str, float], baseline: str) -> str:
    r"""One result in words.

    >>> describe("nn", {"peak": 3 * 2**20, "kept": 0}, "nn")
    '     3.0 MiB at most,      0.0 kept'
    """
    if "peak" in found:
        peak, kept = (found[key] / 2**20 for key in ("peak", "kept"))
        return f"{peak:8,.1f} MiB at most, {kept:8,.1f} kept"
    seconds = found["seconds"]
    spread = (found["high"] - found["low"]) / 2 / seconds
    words = f"{duration(seconds):>10}   ±{spread:4.0%}"
    if "ratio" in found:
        tie = name != baseline and verdict(found["ratio"]) == "tie"
        words += f"   {found['ratio']:6.2f} × {baseline} {'tie' if tie else '':4}"
    # Of the two ceilings, the one that it is nearer to.
    if "of_matmul" in found:
        near, what = max((found[f"of_{what}"], what) for what in ("matmul", "copy"))
        words += f"{near:4.0%} of {what}"
    if "operators" in found:
        words += f"{found['operators']:4.0f} operators"
    return words


def duration(seconds: float) -> str:
    r"""A time with three digits.

    >>> duration(0.0123), duration(12.3e-6), duration(2)
    ('12.3 ms', '12.3 µs', '2.00 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            digits = max(0, 2 - math.floor(math.log10(max(seconds * factor, 1e-9))))
            return f"{seconds * factor:.{min(digits, 2)}f} {unit}"
    raise AssertionError  # the last unit takes all
