"""Replace wrong shape comments by true ones."""

from collections.abc import Iterator

from sidenotes.grammar import Claim, claims, fits, words_of
from sidenotes.notations import Axes, split_entries
from sidenotes.shapes import Run, observe, verify
from sidenotes.trace import Trace


def corrected(source: str, trace: Trace) -> tuple[str, list[str]]:
    """A source with its wrong comments replaced, and a line about each of them.

    A comment remains if no entries are right in all calls.
    """
    found = claims(source)
    lines = source.split("\n")
    changes = []
    runs, _ = observe(found, trace)
    wrong = [f.claim for f in verify(found, trace) if f.verdict == "wrong"]
    # From the right, so that columns remain valid.
    for claim in sorted(wrong, key=lambda claim: -claim.column):
        axes = true_axes(claim, [run for run in runs if run.of(claim)])
        if axes is not None and claim.column >= 0:
            line = lines[claim.line - 1]
            text = written(axes, claim)
            end = claim.column + len(claim.text)
            assert line[claim.column : end] == claim.text
            lines[claim.line - 1] = f"{line[: claim.column]}{text}{line[end:]}"
            changes.append((claim.line, f"{claim.line}: {claim.text} is now {text}"))
    return "\n".join(lines), [change for _, change in sorted(changes)]


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
    return {"[": f"[{inner}]", "(": f"({inner})"}.get(opening, inner)
