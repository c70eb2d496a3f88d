r"""# Records and reports

A *record* holds the results of one suite on one machine, setting by setting: the
machine, all versions, the commit, and the command that measures it again. It is written
as JSON to a file named after the suite and the machine: a later record of the same
machine replaces the earlier one, and a record of another machine has its own file.

```json
{"suite": "inference", "machine": {"device": "…", "torch": "…"}, "cells": [
  {"setting": {"batch_size": 4, "seq_len": 512, "mask": "causal"},
   "results": {"nn": {"seconds": 0.018, "p25": 0.018, "p75": 0.019, "speedup": 1.0}},
   "skipped": {"broken": "not equal: output off by 0.3 …"}}]}
```

| key of a result | meaning |
|---|---|
| `seconds`, `p25`, `p75` | the median of the samples, and their quartiles |
| `samples` | the number of samples |
| `speedup` | how many times as fast as the baseline |
| `max_error` | the largest difference from the reference, over its largest entry |
| `flops_utilization`, `bandwidth_utilization` | shares of the machine's peak rates |
| `operators` | the number of operators that a call dispatches |
| `peak`, `retained` | bytes |

On a machine that is busy with other work, times cannot be compared. A record that was
measured there lists its `disturbances`, and has neither speedups nor shares of peak
rates nor exponents.

The peak rates are measured right before and after a suite: FLOP/s of a large matrix
product, and bytes per second of a copy that does not fit into any cache. In the
roofline model, the time of a setting is at least the longer of two times. So an
implementation that reaches 80 % of a peak rate can become at most 1.25 times as fast.

$$t \ge \max\left(\frac{\text{FLOPs}}{\text{FLOPs per second}},
  \frac{\text{bytes}}{\text{bytes per second}}\right)$$

Source: [Roofline](https://doi.org/10.1145/1498765.1498785), Williams, Waterman and
Patterson 2009.
"""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from attention_bench.timing import classify_speedup, timer_for

# Increased whenever the keys change, so that old files are refused, not misread.
FORMAT = 2

LIBRARIES = ("transformers", "x-transformers")


@dataclass
class Cell:
    """One setting: the result of each implementation, or the reason to skip it."""

    setting: dict[str, Any]
    title: str
    results: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass
class Record:
    """The results of one suite on one machine."""

    suite: str
    command: str
    baseline: str
    dtype: str
    machine: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)
    # For each amount, the fitted exponent of its growth with the length.
    exponents: dict[str, dict[str, float]] = field(default_factory=dict)
    # Why nothing can be concluded from the times.
    disturbances: list[str] = field(default_factory=list)
    seconds: float = 0.0
    format: int = FORMAT


def as_json(record: Record) -> str:
    r"""A record as JSON, with four digits of each number: more would be noise.

    >>> record = Record("tiny", "headnotes bench tiny", "nn", "float32", {})
    >>> from_json(as_json(record)) == record
    True
    """
    return json.dumps(rounded(asdict(record)), indent=1, ensure_ascii=False) + "\n"


def rounded(value: Any) -> Any:
    r"""Round all numbers in nested lists and dicts to four significant digits.

    >>> rounded({"seconds": [0.123456, 12]})
    {'seconds': [0.1235, 12]}
    """
    if isinstance(value, float):
        # JSON has no NaN.
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return value


def from_json(text: str) -> Record:
    r"""A record from its JSON; raises `ValueError` if the text is not a record.

    >>> from_json('{"format": 7}')
    Traceback (most recent call last):
    ...
    ValueError: not a benchmark record: its `format` is 7, not 2; measure it again
    """
    try:
        plain = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a benchmark record: {error}") from None
    seen = plain.get("format") if isinstance(plain, dict) else None
    if seen != FORMAT:
        raise ValueError(
            f"not a benchmark record: its `format` is {seen}, not {FORMAT}; "
            f"measure it again"
        )
    try:
        cells = [Cell(**cell) for cell in plain.pop("cells")]
        return Record(cells=cells, **plain)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a benchmark record: {error}") from None


def write(path: Path, text: str) -> None:
    """Write a file completely or not at all, even if interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    new = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # The permissions of a usual new file; `mkstemp` allows only its owner to read
        # it.
        new.chmod(0o644)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def table_lines(record: Record) -> Iterator[str]:
    r"""A record as a table for the terminal, the fastest first, line by line.

    >>> record = Record("inference", "", "nn", "float32", {"device": "a CPU"})
    >>> result = {"seconds": 0.2, "p25": 0.19, "p75": 0.21, "speedup": 1.5}
    >>> skipped = {"b": "RuntimeError: no"}
    >>> record.cells = [Cell({}, "length 8", {"fast": result}, skipped)]
    >>> print(*table_lines(record), sep="\n")  # doctest: +NORMALIZE_WHITESPACE
    inference, float32, on a CPU
    <BLANKLINE>
    length 8
      fast                  200 ms   ±  5%     1.50 × nn
      b                 skipped: RuntimeError: no
    """
    machine = record.machine
    title = [f"{record.suite}, {record.dtype}, on {machine.get('device', '?')}"]
    if "threads" in machine:
        count = machine["threads"]
        title.append(f"{count} thread{'s' * (count > 1)}")
    if "torch" in machine:
        title.append(f"torch {machine['torch']}")
    yield ", ".join(title)
    if record.disturbances:
        yield "no conclusions, because other processes disturbed the measurement:"
        yield from (f"- {disturbance}" for disturbance in record.disturbances)
    for cell in record.cells:
        yield ""
        yield cell.title
        for name, result in sorted(
            cell.results.items(), key=lambda item: cost(item[1])
        ):
            text = result_text(name, result, record.baseline)
            yield f"  {name:18}{text}".rstrip()
        for name, reason in cell.skipped.items():
            yield f"  {name:18}skipped: {reason}"
    for amount, exponents in record.exponents.items():
        fits = ", ".join(f"{name} {power:.2f}" for name, power in exponents.items())
        yield ""
        yield f"{amount} grows with the length to the power of"
        yield f"  {fits}"


def cost(result: dict[str, float]) -> float:
    """The sort key of a result: its time, or its peak memory."""
    return result["seconds"] if "seconds" in result else result["peak"]


def result_text(name: str, result: dict[str, float], baseline: str) -> str:
    r"""One result as the rest of a line.

    >>> result_text("nn", {"peak": 3 * 2**20, "retained": 0}, "nn")
    '     3.0 MiB peak,      0.0 MiB retained'
    """
    if "peak" in result:
        peak, retained = result["peak"] / 2**20, result["retained"] / 2**20
        return f"{peak:8,.1f} MiB peak, {retained:8,.1f} MiB retained"
    seconds = result["seconds"]
    spread = f"±{(result['p75'] - result['p25']) / 2 / seconds:4.0%}"
    if result.get("samples") == 1:
        spread = "1 run"  # of which ± 0 % would be a claim
    text = f"{duration(seconds):>10}   {spread:5}"
    if "speedup" in result:
        is_tie = name != baseline and classify_speedup(result["speedup"]) == "tie"
        tie = "tie" if is_tie else ""
        text += f"   {result['speedup']:6.2f} × {baseline} {tie:4}"
    if "flops_utilization" in result:
        # The limit is the peak rate that the result comes closer to.
        flops, bandwidth = result["flops_utilization"], result["bandwidth_utilization"]
        limit = "peak FLOP/s" if flops >= bandwidth else "peak bandwidth"
        text += f"{max(flops, bandwidth):4.0%} of {limit}"
    if "operators" in result:
        text += f"{result['operators']:4.0f} operators"
    return text


def duration(seconds: float) -> str:
    r"""A time with three significant digits.

    >>> duration(0.0123), duration(12.3e-6), duration(2)
    ('12.3 ms', '12.3 µs', '2.00 s')
    """
    unit, amount = "µs", seconds * 1e6
    if seconds >= 1:
        unit, amount = "s", seconds
    elif seconds >= 1e-3:
        unit, amount = "ms", seconds * 1e3
    decimals = 2 if amount < 10 else 1 if amount < 100 else 0
    return f"{amount:.{decimals}f} {unit}"


def device_name(device: torch.device) -> str:
    r"""The model of a CPU or GPU.

    >>> len(device_name(torch.device("cpu"))) > 0
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    match = re.search(r"model name\s*:\s*(.+)", text)
    name = match[1].strip() if match else platform.processor()
    return name or platform.machine() or "a CPU"


def slug(name: str) -> str:
    r"""A name as a part of a file name.

    >>> slug("Intel(R) Xeon(R) Processor")
    'intel-r-xeon-r-processor'
    """
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def commit() -> str:
    """The commit of the sources, with a `+` if they are changed; "" if unknown."""
    here = Path(__file__)

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    try:
        # An installed package may lie in the git repository of another project.
        if git("ls-files", "--error-unmatch", here.name).returncode:
            return ""
        # All packages: the measured modules lie beside this one.
        changed = git("status", "--porcelain", "--untracked-files=no", "..").stdout
        return git("rev-parse", "--short", "HEAD").stdout.strip() + "+" * bool(changed)
    except OSError:  # no git
        return ""


def core_count() -> int:
    """The number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float:
    """How many cores were busy in the last minute; 0 if unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def memory_gib(device: torch.device) -> float:
    """The memory of the device in GiB; 0 if unknown."""
    if device.type == "cuda":
        return round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0.0
    return round(total / 2**30, 1)


def describe_machine(device: torch.device) -> dict[str, Any]:
    r"""Hardware, versions, commit and date: all but the peak rates.

    >>> sorted(describe_machine(torch.device("cpu")))[:4]
    ['commit', 'cores', 'cuda', 'date']
    """
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": device_name(device),
        "device_type": device.type,
        "cores": core_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": memory_gib(device),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": (torch.version.cuda or "") if device.type == "cuda" else "",
        "libraries": versions,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def peak_rates(
    device: torch.device, dtype: torch.dtype, *, repeats: int = 8
) -> dict[str, float]:
    r"""The rates of the fastest of a few large matrix products and copies.

    >>> rates = peak_rates(torch.device("cpu"), torch.float32, repeats=1)
    >>> sorted(rates)
    ['bytes_per_second', 'flops_per_second']
    """
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 2048
    count = 2**29 if on_gpu else 2**26
    timer = timer_for(device)
    with torch.inference_mode():
        a = torch.ones(size, size, dtype=dtype, device=device)  # [size, size]
        out = torch.empty_like(a)
        # One more than `repeats`, because the first is never the fastest.
        matmul_seconds = min(
            timer(lambda: torch.mm(a, a, out=out), 1) for _ in range(1 + repeats)
        )
        source = torch.ones(count, device=device)  # [count]
        target = torch.empty_like(source)
        copy_seconds = min(
            timer(lambda: target.copy_(source), 1) for _ in range(1 + repeats)
        )
    # A copy reads each byte and writes it.
    copied_bytes = 2 * count * source.element_size()
    return {
        "flops_per_second": 2 * size**3 / matmul_seconds,
        "bytes_per_second": copied_bytes / copy_seconds,
    }
