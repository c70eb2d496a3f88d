"""Replace wrong shape comments by true ones."""

import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from sidenotes.grammar import Claim, claims, fits, words_of
from sidenotes.notations import Axes, split_entries
from sidenotes.shapes import Run, observe, verify
from sidenotes.trace import Trace


def corrected(source: str, trace: Trace) -> tuple[str, list[str]]:
    """A source with its wrong comments replaced, and a line about each of them.

    A comment remains if no entries are right in all calls, if it spans several lines,
    or if what is written would not be read as a shape.
    """
    found = claims(source)
    lines = source.split("\n")
    changes = []
    runs, _ = observe(found, trace)
    wrong = [f.claim for f in verify(found, trace) if f.verdict == "wrong"]
    # From the right, so that columns remain valid.
    for claim in sorted(wrong, key=lambda claim: -claim.column):
        axes = true_axes(claim, [run for run in runs if run.of(claim)])
        new = "wrong, but was not corrected"
        for text in spellings(axes, claim) if axes is not None else ():
            line, end = lines[claim.line - 1], claim.column + len(claim.text)
            assert line[claim.column : end] == claim.text
            lines[claim.line - 1] = f"{line[: claim.column]}{text}{line[end:]}"
            place = (claim.line, claim.column, text, axes)
            again = claims("\n".join(lines))
            if place in [(c.line, c.column, c.text, c.axes) for c in again]:
                new = f"now {text}"
                break
            lines[claim.line - 1] = line
        changes.append((claim.line, f"{claim.line}: {claim.text} is {new}"))
    return "\n".join(lines), [change for _, change in sorted(changes)]


def spellings(axes: Axes, claim: Claim) -> tuple[str, ...]:
    """A shape as a comment has it, and in square brackets, which are always read.

    Empty if the comment spans several lines.
    """
    if claim.column < 0:
        return ()
    return written(axes, claim), f"[{', '.join(axes)}]".replace("ʹ", "'")


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Replace the lines of a file, but neither its encoding nor its line ends."""
    with path.open("rb") as file:
        encoding, _ = tokenize.detect_encoding(file.readline)
    old = path.read_bytes().decode(encoding)
    parts = re.split("(\r\n|\r|\n)", old)
    parts[::2] = lines
    path.write_bytes("".join(parts).encode(encoding))


def true_axes(claim: Claim, runs: list[Run]) -> Axes | None:
    """Entries that are right in all calls, as similar as possible to the old ones."""
    seen = [(run.without(claim), each) for run in runs for each in run.of(claim)]
    counts = {len(each.shape) for _, each in seen}
    if len(counts) != 1:
        return None
    (count,) = counts
    found = []
    for place in range(count):
        sizes = [(names.at(each), each.shape[place]) for names, each in seen]
        old_entry = claim.axes[place : place + 1] if len(claim.axes) == count else ()
        for entry in (*old_entry, *candidates(claim, sizes)):
            if all(fits_one(entry, size, known) for known, size in sizes):
                found.append(entry)
                break
    return tuple(found) if len(found) == count else None


def fits_one(entry: str, size: int, known: dict[str, int]) -> bool:
    """Whether an entry is the size of an axis, and all of its names are known."""
    return words_of((entry,)).keys() <= known.keys() and fits((entry,), (size,), known)


def candidates(claim: Claim, sizes: list[tuple[dict[str, int], int]]) -> Iterator[str]:
    """Entries to try: those of a claim, other names, products of two names, numbers."""
    known = dict.fromkeys(name for names, _ in sizes for name in names)
    yield from (entry for entry in claim.axes if entry != "...")
    yield from known
    yield from (f"{a} * {b}" for a in known for b in known if a < b)
    yield from (str(size) for _, size in sizes)


def written(axes: Axes, claim: Claim) -> str:
    """A shape in the notation of a comment.

    >>> written(("n", "h * d"), Claim(1, "(B x T)", (), ""))
    '(n x (h * d))'
    """
    pieces, opening, separator = split_entries(claim.text)
    if len(pieces) == len(claim.axes):
        spelled = dict(zip(claim.axes, pieces, strict=True))  # `d'` or `5 tokens`
        axes = tuple(spelled.get(entry, entry) for entry in axes)
    between = {"x": " x ", " ": " "}.get(separator, ", ")
    if separator in ("x", " "):
        axes = tuple(f"({e})" if " " in e and e[0] != "(" else e for e in axes)
    inner = between.join(axes)
    if opening == "(" and len(axes) == 1:
        inner += ","
    inner = inner.replace("ʹ", "'")
    return {"[": f"[{inner}]", "(": f"({inner})"}.get(opening, inner)
