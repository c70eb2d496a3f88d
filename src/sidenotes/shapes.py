"""Check shape comments against a trace of the examples.

Within one call, a name means one size: the integer of that name in the code, or the
size that another claim gives it. A claim is ok if it is right and every similar,
different claim would be wrong in some call.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from sidenotes.grammar import (
    Axes,
    Claim,
    alternatives,
    claims,
    fits,
    linear,
    pair,
    tree_of,
    value_of,
    words_of,
)
from sidenotes.trace import Call, Trace, Value

__all__ = ["Axes", "Claim", "Finding", "check", "claims", "judge", "pair"]

Verdict = Literal["ok", "wrong", "weak", "unreached"]


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim; `message` explains it, unless it is ok."""

    claim: Claim
    verdict: Verdict
    message: str = ""


@dataclass
class Names:
    """The size of each name within a call, and where it comes from."""

    sizes: dict[str, int]
    since: dict[str, str]
    contradictions: dict[Claim, str] = field(default_factory=dict)

    def bind(self, claim: Claim, entry: str, size: int) -> bool:
        """Check an entry, or bind its one unknown name; False if that is too early."""
        unknown = words_of((entry,)).keys() - self.sizes.keys()
        if not unknown:
            value = value_of(entry, self.sizes)
            if value != size:
                self.contradict(
                    claim, f"`{entry}` is {value}, but the axis has size {size}"
                )
            return True
        line = None if len(unknown) > 1 else linear(tree_of(entry), self.sizes)
        if line is None or not line[0]:
            return False
        slope, start = line
        (name,) = unknown
        value, rest = divmod(size - start, slope)
        if rest or value < 0:
            self.contradict(
                claim, f"the axis has size {size}, but `{entry}` is never {size}"
            )
            return True
        self.sizes[name], self.since[name] = value, f"line {claim.line}"
        return True

    def contradict(self, claim: Claim, why: str) -> None:
        """Record the first contradiction of a claim."""
        self.contradictions.setdefault(claim, why)


@dataclass
class Seen:
    """The observations of one call: named integers, and shapes in order."""

    call: Call
    sizes: dict[str, int]
    shapes: dict[tuple[Claim, tuple[int, ...]], str]  # -> name of the value

    def note(self, beside: Iterable[Claim], values: Iterable[Value]) -> None:
        """Record the shapes of the values that the claims describe."""
        for claim in beside:
            for value in values:
                # The tensors of a tuple are named `return[0]`, `return[1]`, …
                if {value.name, value.name.split("[")[0]} & set(claim.targets):
                    self.shapes.setdefault((claim, value.shape), value.name)

    def of(self, claim: Claim) -> dict[tuple[int, ...], str]:
        """The shapes that one claim describes, each with the name of a value."""
        return {shape: name for (c, shape), name in self.shapes.items() if c == claim}

    @cached_property
    def names(self) -> Names:
        """The sizes of all names, from all claims."""
        return self.without(None)

    def without(self, silent: Claim | None) -> Names:
        """The sizes of all names without one claim; the first use binds a name."""
        names = Names(dict(self.sizes), dict.fromkeys(self.sizes, "in the code"))
        todo: list[tuple[Claim, str, int]] = []
        for claim, shape in self.shapes:
            pairs = pair(claim.axes, shape)
            if claim == silent:
                continue
            if pairs is None:
                names.contradict(claim, f"the value has {len(shape)} axes")
            todo += [(claim, entry, size) for entry, size in pairs or ()]
        left = len(todo) + 1
        while len(todo) < left:
            left = len(todo)
            todo = [each for each in todo if not names.bind(*each)]
        return names


def check(source: str, trace: Trace) -> list[Finding]:
    """Judge all claims of a source by a trace of its examples."""
    return judge(claims(source), trace)


def judge(found: list[Claim], trace: Trace) -> list[Finding]:
    """A finding for each claim, in order."""
    words = sorted({name for claim in found for name in words_of(claim.axes)})
    calls, reached = observe(found, trace, words)
    return [judge_one(claim, calls, reached, words) for claim in found]


def observe(
    found: list[Claim], trace: Trace, words: Iterable[str]
) -> tuple[list[Seen], set[int]]:
    """The observations of each call, and the lines that were executed."""
    beside: dict[int, list[Claim]] = defaultdict(list)
    parameters: dict[str, list[Claim]] = defaultdict(list)
    for claim in found:
        if claim.statement:
            beside[claim.statement].append(claim)
        elif not claim.problem:
            parameters[claim.symbol].append(claim)
    calls: dict[object, Seen] = {}
    reached = set()
    for call in trace.calls:
        seen = Seen(call, {n: call.sizes[n] for n in words if n in call.sizes}, {})
        seen.note(parameters.get(call.symbol, ()), call.arguments)
        for step in call.steps:
            reached.add(step.line)
            seen.note(beside.get(step.line, ()), step.values)
        if seen.shapes:
            # Calls with equal observations add nothing.
            calls.setdefault((tuple(seen.shapes), tuple(seen.sizes.items())), seen)
    return list(calls.values()), reached


def judge_one(
    claim: Claim, calls: list[Seen], reached: set[int], words: list[str]
) -> Finding:
    """Judge one claim; `words` are all names that the claims of its source use."""

    def finding(verdict: Verdict, why: str, seen: Seen | None = None) -> Finding:
        return Finding(claim, verdict, describe(claim, f"{verdict}: {why}", seen))

    calls = [seen for seen in calls if seen.of(claim)]
    if claim.problem:
        return finding("wrong", claim.problem)
    if not calls and claim.statement in reached:
        return finding("wrong", f"`{claim.targets[0]}` has no shape in any call")
    if not calls:
        what = "executes this line" if claim.statement else "passes a tensor here"
        return finding("unreached", f"no example {what}")
    for seen in calls:
        if why := seen.names.contradictions.get(claim):
            return finding("wrong", why, seen)
    if any(seen.names.contradictions for seen in calls):
        return Finding(claim, "ok")  # not tested further until the others are right

    # The claim is right. Would a different one be right, too? The sizes come from the
    # other claims only: a name that occurs in this claim alone could be any name.
    rests = [(seen, seen.without(claim).sizes) for seen in calls]
    lacking = [words_of(claim.axes).keys() - sizes.keys() for _, sizes in rests]
    if least := min(lacking, key=len):
        who = " or ".join(f"`{name}`" for name in sorted(least))
        return finding("weak", f"no other comment or variable defines {who}", calls[0])
    if claim.axes == ("...",):
        return finding("weak", "it fits every tensor", calls[0])
    for old, new, axes in alternatives(claim.axes, words):
        able = [(seen, s) for seen, s in rests if words_of(axes).keys() <= s.keys()]
        if able and all(
            fits(axes, shape, s) for seen, s in able for shape in seen.of(claim)
        ):
            seen, sizes = able[0]
            values = [str(value_of(entry, sizes)) for entry in (old, new)]
            both = f" (both {values[0]})" if values[0] == values[1] else ""
            return finding(
                "weak", f"no example distinguishes `{old}` from `{new}`{both}", seen
            )
    return Finding(claim, "ok")


def describe(claim: Claim, why: str, seen: Seen | None) -> str:
    """The line, the reason, the observed shapes, and the sizes of the names."""
    lines = [f"line {claim.line}: {claim.text} is {why}", f"    {claim.code}"]
    if seen:
        shown = [f"{name} {list(shape)}" for shape, name in seen.of(claim).items()]
        lines.append(f"  seen:  {', '.join(shown)}")
        names = seen.names
        known = [n for n in words_of(claim.axes) if n in names.sizes]
        said = [f"{n} = {names.sizes[n]} ({names.since[n]})" for n in known]
        lines += [f"  where: {', '.join(said)}"] if said else []
        lines.append(f"  in:    {seen.call.symbol}, example {seen.call.example + 1}")
    return "\n".join(lines)
