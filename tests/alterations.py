"""Alter shape comments one at a time, and see which alterations pass unnoticed."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from sidenotes.shapes import Axes, Claim, Run, names_in, observe, verify_one
from sidenotes.trace import Trace

Alter = Callable[[Axes, set[str]], Iterator[Axes]]


def alterations(
    found: list[Claim], trace: Trace, alter: Alter
) -> Iterator[tuple[Claim, bool]]:
    """Altered claims, and whether one of their function is then not verified.

    `alter` gives the alterations of a shape, made of the names in its function. A claim
    is judged with those of its own function only.
    """
    functions = defaultdict(list)
    for claim in found:
        functions[claim.symbol].append(claim)
    for symbol, own in functions.items():
        calls = [call for call in trace.calls if call.symbol == symbol]
        runs, reached = observe(own, Trace(trace.path, calls))
        names = set(names_in(own))
        for claim in own:
            for axes in alter(claim.axes, names):
                other = replace(claim, text=f"[{', '.join(axes)}]", axes=axes)
                around = [other if each == claim else each for each in own]
                if claim.until:  # it describes those of several values that it fits
                    changed, _ = observe(around, Trace(trace.path, calls))
                else:
                    changed = [with_other(run, claim, other) for run in runs]
                words = names_in(around)
                first = [other, *(each for each in around if each != other)]
                judged = (verify_one(c, changed, reached, words) for c in first)
                yield other, any(finding.verdict != "verified" for finding in judged)


def with_other(run: Run, claim: Claim, other: Claim) -> Run:
    """The observations of a call, with another claim about the same values."""
    seen = [s._replace(claim=other) if s.claim == claim else s for s in run.seen]
    return replace(run, seen=seen)
