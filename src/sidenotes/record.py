"""What a page knows of a run: for each function one call, its steps and its tensors.

Modules are traced in a process of their own, because the one that builds the site may
hold an older version of them, and what was recorded is kept until something changes.
"""

import gzip
import hashlib
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sidenotes.cache import code_of, keep, place
from sidenotes.grammar import Axes, Claim, pair
from sidenotes.shapes import check
from sidenotes.split import LiterateError, read
from sidenotes.trace import Call, Step, Trace, TraceError, Value, trace

# What a page may spend on values, compressed; beyond it the largest tensors go.
BUDGET = 16_000

Json = dict[str, Any]


def recording(
    path: Path, *, depends_on: Iterable[Path], setup: str, cache: Path
) -> Json | None:
    """The recording of `path`, or None where `depends_on` does not name it.

    A recording depends on the module's own text, which holds the examples and numbers
    the lines, on the code of all files in `depends_on`, and on `setup`, the statements
    that are executed first (`import torch; torch.manual_seed(1)`). Whatever is out of
    date is recorded in one go: most of the time is spent on importing.
    """
    path = path.resolve()
    files = sorted(file.resolve() for file in depends_on)
    if path not in files:
        return None

    common = hashlib.sha256(f"{setup} {sys.version}".encode())
    try:
        for file in [*files, *sorted(Path(__file__).parent.glob("*.py"))]:
            common.update(code_of(file))
    except SyntaxError as error:
        raise LiterateError(f"{file}:{error.lineno}: does not parse") from None
    stored = {}
    for file in files:
        if file.suffix == ".py" and file.stem != "__init__":
            key = hashlib.sha256(common.digest() + read(file).encode()).hexdigest()
            name = f"{file.parent.name}-{file.stem}"
            stored[file] = place(cache, name, key, ".json")
    if path not in stored:  # a package has no lines of its own worth following
        return None
    if not stored[path].exists():
        run(
            {file: where for file, where in stored.items() if not where.exists()}, setup
        )
    found: Json = json.loads(stored[path].read_text(encoding="utf-8"))
    return found


def run(stored: dict[Path, Path], setup: str) -> None:
    """Record each file to its place, in one fresh process."""
    work = {str(file): str(where) for file, where in stored.items()}
    result = subprocess.run(
        [sys.executable, "-m", "sidenotes.record"],
        input=json.dumps({"setup": setup, "work": work}),
        # The tensors of examples are small: threads would wait for one another.
        env={"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"} | dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise LiterateError(f"recording failed\n{result.stderr.strip()}")


def main() -> None:
    """Do the work that `run` hands over."""
    task = json.load(sys.stdin)
    for file, where in task["work"].items():
        path = Path(file)
        # Before each module, so that its numbers do not depend on the others.
        exec(task["setup"], {})
        try:
            content = json.dumps(record(read(path), trace(path)), allow_nan=False)
        except TraceError as error:
            sys.exit(str(error))
        keep(Path(where), content)


def record(source: str, run: Trace) -> Json:
    """All that a page shows of a trace, as JSON.

    `calls` holds one call a function; a value points into `tensors`, whose numbers lie
    flat, with 4 significant digits. `lines` says what is seen at the end of a line, and
    on which line that statement begins; `checked` names the lines whose comments were
    found to be true, and `weak` those that may be, for all that the examples show.
    """
    findings = check(source, run)
    checked = [f.claim for f in findings if f.verdict == "ok"]
    weak = [f.claim for f in findings if f.verdict == "weak"]
    best: dict[str, tuple[tuple[int, ...], Call]] = {}
    for call in run.calls:
        merit = tells(call, bindings(call, checked))
        if merit and (call.symbol not in best or merit >= best[call.symbol][0]):
            best[call.symbol] = merit, call

    tensors: list[list[Any]] = []
    calls: list[Json] = []
    lines: dict[int, Json] = {}
    for _, call in sorted(best.values(), key=lambda found: found[1].line):
        names = bindings(call, checked)
        steps = []
        for step in call.steps:
            values = [
                to_json(
                    value, axes_of(value, names, beside(checked, call, step)), tensors
                )
                for value in step.values
            ]
            steps.append({"line": step.line, "last": step.last_line, "values": values})
            if values:
                near = beside([*checked, *weak], call, step)
                where = near[0].line if near else step.last_line
                lines[where] = {"line": step.line, "text": brief(values)}
        arguments = [
            to_json(v, axes_of(v, names, spoken_of(checked, call)), tensors)
            for v in call.arguments
        ]
        head = {"symbol": call.symbol, "line": call.line, "names": names}
        calls.append({**head, "arguments": arguments, "steps": steps})
    return {
        "checked": sorted({claim.line for claim in checked}),
        "weak": sorted({claim.line for claim in weak}),
        "lines": {str(n): lines[n] for n in sorted(lines)},
        "calls": calls,
        "tensors": within_budget(tensors),
    }


def beside(claims: Iterable[Claim], call: Call, step: Step) -> list[Claim]:
    """The claims about a statement."""
    return [c for c in claims if c.statement == step.line and c.symbol == call.symbol]


def spoken_of(claims: Iterable[Claim], call: Call) -> list[Claim]:
    """The claims about the parameters of a function."""
    return [c for c in claims if not c.statement and c.symbol == call.symbol]


def about(claims: Iterable[Claim], value: Value) -> Claim | None:
    """The claim that speaks of a value; an item of a tuple is `return[0]`."""
    names = {value.name, value.name.split("[")[0]}
    return next((c for c in claims if names & set(c.targets)), None)


def bindings(call: Call, claims: Sequence[Claim]) -> dict[str, int]:
    """What the true claims of a call say that each name means."""
    names: dict[str, int] = {}
    seen = [(value, spoken_of(claims, call)) for value in call.arguments]
    for step in call.steps:
        seen += [(value, beside(claims, call, step)) for value in step.values]
    for value, near in seen:
        claim = about(near, value)
        pairs = pair(claim.axes, value.shape) if claim else None
        for entry, size in pairs or ():
            if entry.isidentifier():
                names.setdefault(entry, size)
    return names


def tells(call: Call, names: dict[str, int]) -> tuple[int, ...]:
    """How well a call tells sizes apart; empty where it holds no tensor at all."""
    values = [*call.arguments, *(v for step in call.steps for v in step.values)]
    if not values:
        return ()
    sizes = {size for value in values for size in value.shape}
    reached = {step.line for step in call.steps}
    return (not call.raised, len(set(names.values())), len(reached), len(sizes))


def axes_of(value: Value, names: dict[str, int], claims: Iterable[Claim]) -> Axes:
    """A name for each axis, where one is certain: claimed and true, or the only one."""
    common = Counter(names.values())
    known = {size: name for name, size in names.items() if common[size] == 1}
    # An axis of size 1 is more often there to be stretched than it is a size.
    axes = tuple(known.get(n, str(n)) if n != 1 else "1" for n in value.shape)
    claim = about(claims, value)
    if claim is None or pair(claim.axes, value.shape) is None:
        return axes
    if "..." not in claim.axes:
        return claim.axes
    first = claim.axes.index("...")
    rest = len(claim.axes) - first - 1
    middle = axes[first : len(axes) - rest]
    return (*claim.axes[:first], *middle, *claim.axes[first + 1 :])


def to_json(value: Value, axes: Axes, tensors: list[list[Any]]) -> Json:
    """A value for the page; numbers that were seen before are not repeated."""
    number = None
    if value.data is not None:
        numbers = flat(value.data)
        if numbers not in tensors:
            tensors.append(numbers)
        number = tensors.index(numbers)
    strides = list(value.strides) if value.strides is not None else None
    return {
        "name": value.name,
        "axes": axes,
        "sizes": value.shape,
        "dtype": value.dtype,
        "strides": strides,
        "contiguous": value.contiguous,
        "of": value.shares if value.shares != value.name else None,
        "data": number,
    }


def flat(data: Any) -> list[Any]:
    """The numbers of nested lists; what JSON does not know becomes its name.

    >>> flat([[0.123456, True], [float("-inf"), 7]])
    [0.1235, 1, '-inf', 7]
    """
    if isinstance(data, list):
        return [number for row in data for number in flat(row)]
    if isinstance(data, int):
        return [int(data)]
    known = isinstance(data, float) and math.isfinite(data)
    return [float(f"{data:.4g}") if known else str(data)]


def within_budget(tensors: list[list[Any]]) -> list[list[Any] | None]:
    """The tensors, without the largest ones if all are too much for a page."""
    kept: list[list[Any] | None] = list(tensors)
    while len(gzip.compress(json.dumps(kept).encode())) > BUDGET:
        kept[max(range(len(kept)), key=lambda n: len(kept[n] or ()))] = None
    return kept


def brief(values: Iterable[Json]) -> str:
    """The shapes of some values, each of them once.

    >>> brief([{"axes": ("q", "7")}, {"axes": ("q", "7")}, {"axes": ()}])
    '[q, 7], []'
    """
    texts = [f"[{', '.join(value['axes'])}]" for value in values]
    return ", ".join(dict.fromkeys(texts))


if __name__ == "__main__":
    main()
