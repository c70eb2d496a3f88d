"""Record one call of each function for its page: the steps and the tensors.

Modules are traced in a separate process, because the process that builds the site may
have imported an older version of them. Recordings are cached.
"""

import ast
import doctest
import gc
import gzip
import io
import json
import logging
import math
import os
import subprocess
import sys
import tokenize
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from sidenotes.cache import (
    ENVIRONMENT,
    Memory,
    hash_of,
    load,
    path_for,
    prune,
    store,
)
from sidenotes.dependencies import Imports
from sidenotes.grammar import Claim, pair
from sidenotes.notations import Axes
from sidenotes.shapes import check
from sidenotes.split import UNREADABLE, LiterateError, is_within, named, read
from sidenotes.trace import Call, Step, Trace, TraceError, Value, trace

LOG = logging.getLogger("mkdocs.plugins.sidenotes")

# The compressed size of the code of a page and of its recorded values together, in
# bytes; beyond it, the largest tensors are left out.
BUDGET = 21_000

# Tokens that occur in lines without code.
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER}
NOT_CODE |= {tokenize.INDENT, tokenize.DEDENT}

Json = dict[str, Any]


def recording(
    path: Path,
    *,
    modules: Iterable[Path],
    imports: Imports,
    setup: str,
    cache: Path,
) -> Json | None:
    """The recording of `path`, or None if it is not in `modules`.

    A recording depends on the code and the examples of the module, on the code of all
    files that it imports, and on `setup`, the statements that are
    executed first (`import torch; torch.manual_seed(1)`). It does not depend on notes:
    its lines are numbered without them.
    """
    path = path.resolve()
    if path not in {file.resolve() for file in modules} or path.stem == "__init__":
        return None
    stored = location(path, imports, setup, cache)
    text = load(stored)
    if text is None:
        record_all(modules, imports=imports, setup=setup, cache=cache)
        text = stored.read_text(encoding="utf-8")
    recorded: Json = json.loads(text)
    lines = [*code_lines(read(path))]
    return renumber(recorded, lambda ordinal: lines[ordinal])


def record_all(
    modules: Iterable[Path], *, imports: Imports, setup: str, cache: Path
) -> None:
    """Make all missing recordings in one process: most of its time is for imports."""
    missing = {}
    for file in sorted({file.resolve() for file in modules}):
        if file.suffix == ".py" and file.stem != "__init__":
            place = location(file, imports, setup, cache)
            if not place.exists():
                missing[file] = place
    if missing:
        run(missing, setup)
        prune(cache)


def location(path: Path, imports: Imports, setup: str, cache: Path) -> Path:
    """The path of the recording of a module in the cache."""
    try:
        own = imports.memory(own_code, imports.text(path))
        code = [imports.code(file) for file in sorted(imports.of(path))]
        code += [imports.code(file) for file in recorder_files(imports.memory)]
    except UNREADABLE as error:
        line = getattr(error, "lineno", None) or 1
        raise LiterateError(f"{path}:{line}: does not parse: {error}") from None
    key = hash_of([path.name, setup, ENVIRONMENT, own, *code])
    return path_for(cache, f"{path.parent.name}-{path.stem}", key, ".json")


@lru_cache(maxsize=1)
def recorder_files(memory: Memory) -> list[Path]:
    """The files of this package that make recordings."""
    file = Path(__file__)
    return sorted([file, *Imports([file.parents[1]], memory).of(file)])


def own_code(source: str) -> str:
    """A hash of the lines of code and the examples of a source."""
    return hash_of([*code_lines(source).values(), *examples_in(source)])


@cache  # the recorder and the build ask for those of each source twice
def code_lines(source: str) -> dict[int, str]:
    r"""The lines of code by number: without blank lines and lines of comments only.

    A recording counts these lines only, so that it stays valid if notes change. The
    first and the last line of a docstring are included, without their text, because a
    function that consists of a docstring returns there.

    >>> code_lines('x = [\n    # Why\n    1,  # one\n]\n\ndef f():\n    "Text."')
    {1: 'x = [', 3: '    1,  # one', 4: ']', 6: 'def f():', 7: ''}
    """
    tree = ast.parse(source)
    docstrings = {
        node.body[0].lineno
        for node in [tree, *(definition for _, definition in named(tree))]
        if ast.get_docstring(node) is not None
    }
    lines = source.split("\n")
    found: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (first, _), (last, _) = token.start, token.end
        if token.type == tokenize.STRING and first in docstrings:
            found |= {first: "", last: ""}
        elif token.type not in NOT_CODE:
            found |= {n: lines[n - 1] for n in range(first, last + 1) if n not in found}
    return dict(sorted(found.items()))


def examples_in(source: str) -> list[str]:
    """The examples of all docstrings, with their expected exceptions."""
    tree = ast.parse(source)
    parser = doctest.DocTestParser()
    found = []
    for node in [tree, *(definition for _, definition in named(tree))]:
        for example in parser.get_examples(ast.get_docstring(node) or ""):
            options = sorted(example.options.items())
            found.append(f"{example.source}{example.exc_msg}{options}")
        found.append("")  # examples of one docstring share their variables
    return found


def excerpt(recorded: Json, symbol: str) -> Json:
    """The part of a recording that concerns one definition."""
    calls = [c for c in recorded["calls"] if is_within(c["symbol"], symbol)]
    values = [value for call in calls for value in call["arguments"]]
    values += [v for call in calls for step in call["steps"] for v in step["values"]]
    used = {value["data"] for value in values}
    # Values refer to tensors by their place in the list.
    tensors = [t if n in used else None for n, t in enumerate(recorded["tensors"])]
    return recorded | {"calls": calls, "tensors": tensors}


def renumber(recorded: Json, number: Callable[[int], int]) -> Json:
    """A recording with other line numbers."""

    def step(old: Json) -> Json:
        return old | {"line": number(old["line"]), "last": number(old["last"])}

    def call(old: Json) -> Json:
        steps = [step(each) for each in old["steps"]]
        return old | {"line": number(old["line"]), "steps": steps}

    return {
        "checked": [number(line) for line in recorded["checked"]],
        "unverified": [number(line) for line in recorded["unverified"]],
        "lines": {
            str(number(int(line))): seen | {"line": number(seen["line"])}
            for line, seen in recorded["lines"].items()
        },
        "calls": [call(each) for each in recorded["calls"]],
        "tensors": recorded["tensors"],
    }


def run(missing: dict[Path, Path], setup: str) -> None:
    """Record each file, in one new process."""
    LOG.info("Executing the examples of %d modules", len(missing))
    work = {str(file): str(where) for file, where in missing.items()}
    result = subprocess.run(
        [sys.executable, "-m", "sidenotes.record"],
        input=json.dumps({"setup": setup, "work": work}),
        # The tensors of examples are small: more threads would only add overhead.
        env={"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"} | dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise LiterateError(f"recording failed\n{result.stderr.strip()}")


def main() -> None:
    """The task of the process that `run` starts."""
    task = json.load(sys.stdin)
    # What it imports stays: to collect garbage meanwhile, or to visit it later, is in
    # vain, a quarter of the time of all examples.
    gc.disable()
    exec(task["setup"], {})
    gc.freeze()
    gc.enable()
    for file, where in task["work"].items():
        path = Path(file)
        # Before each module, so that its random numbers do not depend on the others.
        exec(task["setup"], {})
        source = read(path)
        ordinals = {line: n for n, line in enumerate(code_lines(source))}
        try:
            recorded = record(source, trace(path))
        except TraceError as error:
            sys.exit(str(error))
        stored = renumber(recorded, ordinals.__getitem__)
        store(Path(where), json.dumps(stored, allow_nan=False))


def record(source: str, run: Trace) -> Json:
    """The parts of a trace that a page shows, as JSON.

    `calls` holds one call for each function; its values refer to `tensors`, flat lists
    of numbers with 4 significant digits. `lines` holds the shapes at the end of a line,
    and the first line of its statement. `checked` lists the lines with a shape comment
    that is verified, and `unverified` those with another that is not wrong. Comments on
    lines of their own are notes of the page.
    """
    findings = [f for f in check(source, run) if f.claim.at_end]
    checked = [f.claim for f in findings if f.verdict == "verified"]
    unverified = [f.claim for f in findings if f.verdict == "unverified"]
    best: dict[str, tuple[tuple[int, ...], Call]] = {}
    for call in run.calls:
        score = informativeness(call, bindings(call, checked))
        if score and (call.symbol not in best or score >= best[call.symbol][0]):
            best[call.symbol] = score, call

    tensors: list[list[Any]] = []
    calls: list[Json] = []
    lines: dict[int, Json] = {}
    for _, call in sorted(best.values(), key=lambda found: found[1].line):
        names = bindings(call, checked)
        steps = []
        for step in call.steps:
            values = [
                to_json(
                    value,
                    axes_of(value, names, claims_at(checked, call, step)),
                    tensors,
                )
                for value in step.values
            ]
            steps.append({"line": step.line, "last": step.last_line, "values": values})
            if values:
                near = claims_at([*checked, *unverified], call, step)
                where = near[0].line if near else step.last_line
                lines[where] = {"line": step.line, "text": shapes_as_text(values)}
        arguments = [
            to_json(v, axes_of(v, names, parameter_claims(checked, call)), tensors)
            for v in call.arguments
        ]
        head = {"symbol": call.symbol, "line": call.line}
        calls.append({**head, "arguments": arguments, "steps": steps})
    # Color doubles the weight of the code.
    code = 2 * weight("\n".join(code_lines(source).values()))
    return {
        "checked": sorted({claim.line for claim in checked}),
        "unverified": sorted({claim.line for claim in unverified}),
        "lines": {str(n): lines[n] for n in sorted(lines)},
        "calls": calls,
        "tensors": within_budget(tensors, BUDGET - code - weight(json.dumps(calls))),
    }


def claims_at(claims: Iterable[Claim], call: Call, step: Step) -> list[Claim]:
    """The claims about the values that a statement assigns or returns."""
    return [c for c in claims if c.statement == step.line and c.symbol == call.symbol]


def parameter_claims(claims: Iterable[Claim], call: Call) -> list[Claim]:
    """The claims about the parameters of a function."""
    return [c for c in claims if not c.statement and c.symbol == call.symbol]


def claim_about(claims: Iterable[Claim], value: Value) -> Claim | None:
    """The claim about a value; an item of a tuple is named `return[0]`."""
    names = {value.name, value.name.split("[")[0]}
    return next((c for c in claims if names & set(c.targets)), None)


def bindings(call: Call, claims: Sequence[Claim]) -> dict[str, int]:
    """The size of each name in a call, from its confirmed claims."""
    names: dict[str, int] = {}
    seen = [(value, parameter_claims(claims, call)) for value in call.arguments]
    for step in call.steps:
        seen += [(value, claims_at(claims, call, step)) for value in step.values]
    for value, near in seen:
        claim = claim_about(near, value)
        pairs = pair(claim.axes, value.shape) if claim else None
        for entry, size in pairs or ():
            if entry.isidentifier():
                names.setdefault(entry, size)
    return names


def informativeness(call: Call, names: dict[str, int]) -> tuple[int, ...]:
    """How informative a call is, to choose one to show; empty if it has no tensor.

    A call that returns is better than one that raises; then distinct sizes count.
    """
    values = [*call.arguments, *(v for step in call.steps for v in step.values)]
    if not values:
        return ()
    sizes = {size for value in values for size in value.shape}
    reached = {step.line for step in call.steps}
    return (not call.raised, len(set(names.values())), len(reached), len(sizes))


def axes_of(value: Value, names: dict[str, int], claims: Iterable[Claim]) -> Axes:
    """A name for each axis: from a confirmed claim, or the only name of its size."""
    common = Counter(names.values())
    known = {size: name for name, size in names.items() if common[size] == 1}
    # An axis of size 1 usually exists to be broadcast.
    axes = tuple(known.get(n, str(n)) if n != 1 else "1" for n in value.shape)
    claim = claim_about(claims, value)
    if claim is None or pair(claim.axes, value.shape) is None:
        return axes
    if "..." not in claim.axes:
        return claim.axes
    first = claim.axes.index("...")
    rest = len(claim.axes) - first - 1
    middle = axes[first : len(axes) - rest]
    return (*claim.axes[:first], *middle, *claim.axes[first + 1 :])


def to_json(value: Value, axes: Axes, tensors: list[list[Any]]) -> Json:
    """A value for the page; equal tensors are stored once."""
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
    """The numbers of nested lists; NaN and infinity, which JSON lacks, become strings.

    >>> flat([[0.123456, True], [float("-inf"), 7]])
    [0.1235, 1, '-inf', 7]
    """
    if not isinstance(data, list):
        return [to_number(data)]
    if data and isinstance(data[0], list):
        return [number for row in data for number in flat(row)]
    return [*map(to_number, data)]


def to_number(data: Any) -> Any:
    """A number with 4 significant digits; its name if it is not finite."""
    if isinstance(data, int):
        return int(data)
    known = isinstance(data, float) and math.isfinite(data)
    return float(f"{data:.4g}") if known else str(data)


def within_budget(tensors: list[list[Any]], budget: int) -> list[list[Any] | None]:
    """The tensors, without the largest ones if together they exceed the budget."""
    by_size = sorted(range(len(tensors)), key=lambda n: -len(tensors[n]))

    def without(count: int) -> list[list[Any] | None]:
        """The tensors but for this many of the largest."""
        left_out = {*by_size[:count]}
        return [None if n in left_out else t for n, t in enumerate(tensors)]

    def fits(count: int) -> bool:
        return weight(json.dumps(without(count))) <= budget

    # Compression takes time, so bisect instead of leaving out one by one.
    return without(bisect_left(range(len(tensors)), True, key=fits))


def weight(text: str) -> int:
    """The bytes of a text as a server sends it."""
    return len(gzip.compress(text.encode()))


def shapes_as_text(values: Iterable[Json]) -> str:
    """The distinct shapes of some values, as text.

    >>> shapes_as_text([{"axes": ("q", "7")}, {"axes": ("q", "7")}, {"axes": ()}])
    '[q, 7], []'
    """
    texts = [f"[{', '.join(value['axes'])}]" for value in values]
    return ", ".join(dict.fromkeys(texts))


if __name__ == "__main__":
    main()
