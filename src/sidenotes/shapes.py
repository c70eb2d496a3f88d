"""Check shape comments against a trace of the examples.

Within one call, a name means one size: the integer of that name in the code, or the
size that most comments give it. A claim is verified if it is right, and if every
similar, different claim would be wrong in some call. It is wrong if it contradicts the
code, or other comments. Any other claim is unverified: nothing is known against it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from sidenotes.grammar import (
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
from sidenotes.notations import ANY, Axes
from sidenotes.trace import Call, Trace, Value

__all__ = ["Axes", "Claim", "Finding", "check", "claims", "pair", "verify"]

Verdict = Literal["verified", "wrong", "unverified"]
Sizes = dict[str, int]

# A larger number in a comment may be that of another configuration: `(B, 3, 224, 224)`.
LARGEST_FIXED_SIZE = 4
AROUND = "in its class or configuration"


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim; `message` explains it, unless it is verified."""

    claim: Claim
    verdict: Verdict
    message: str = ""


class Seen(NamedTuple):
    """The shape of a value that a claim describes, within one call."""

    claim: Claim
    name: str  # of the value
    shape: tuple[int, ...]
    now: tuple[tuple[str, int], ...]  # integers that differ from those of its `Run`
    later: frozenset[str]  # integers of its `Run` that the code defines afterwards
    again: bool  # whether this is a later iteration of a loop, with another shape


@dataclass
class Names:
    """The size of each name within a call, and where it comes from."""

    sizes: Sizes
    since: dict[str, str]

    def at(self, seen: Seen) -> Sizes:
        """The sizes when a value was computed."""
        return self.sizes | dict(seen.now) if seen.now else self.sizes

    def bind(self, seen: Iterable[Seen], *, plain: bool) -> bool:
        """Bind unknown names, each to the size that most claims give it.

        `plain` for the entries that are a name; otherwise, for expressions with one
        unknown name. Returns whether a name was bound.
        """
        votes: dict[str, dict[int, dict[Claim, None]]] = {}
        for each in seen:
            for entry, size in pair(each.claim.axes, each.shape) or ():
                if entry.isidentifier() is plain:
                    if solved := solve(entry, size, self.at(each)):
                        name, value = solved
                        values = votes.setdefault(name, {})
                        values.setdefault(value, {})[each.claim] = None
        for name, values in votes.items():
            value = max(values, key=lambda value: len(values[value]))  # or the first
            self.sizes[name] = value
            self.since[name] = f"line {next(iter(values[value])).line}"
        return bool(votes)


def solve(entry: str, size: int, sizes: Sizes) -> tuple[str, int] | None:
    """The one unknown name of an entry with a size, and its value; None if neither."""
    if entry.isidentifier():
        return None if entry in sizes else (entry, size)
    unknown = words_of((entry,)).keys() - sizes.keys()
    line = linear(tree_of(entry), sizes) if len(unknown) == 1 else None
    if line is None or not line[0]:
        return None
    slope, start = line
    value, rest = divmod(size - start, slope)
    return None if rest or value < 0 else (unknown.pop(), value)


@dataclass
class Run:
    """The observations of one call: named integers, and shapes in order."""

    call: Call
    code: Sizes  # the integers of the call, by name
    around: Sizes  # those of its class and of its configuration
    kin: list[Sizes]  # groups of names with different meanings, such as parameters
    tensors: set[str] = field(default_factory=set)  # their names
    seen: list[Seen] = field(default_factory=list)

    def of(self, claim: Claim) -> list[Seen]:
        """The values that one claim describes."""
        return [seen for seen in self.seen if seen.claim == claim]

    def twins(self, entry: str, claim: Claim) -> set[str]:
        """The names in the code that have the size of an entry, and another meaning.

        Only names that stand beside each other, such as two parameters: others may be
        two names for one thing, such as `heads` and `self.heads`.
        """
        call, sizes = self.call, self.call.config | self.call.sizes
        if entry.isdecimal():
            beside = [call.parameters, {n: sizes[n] for n in claim.used & sizes.keys()}]
            beside = [kin | {entry: int(entry)} for kin in beside]
        else:
            names = {other for one, other in claim.rivals if one == entry}
            beside = [*self.kin, {n: sizes.get(n, 0) for n in {entry, *names}}]
        found = {
            name
            for kin in beside
            if kin.get(entry, 0) > 1
            for name, size in kin.items()
            if size == kin[entry]
        }
        return found - {entry}

    @cached_property
    def names(self) -> Names:
        """The sizes of all names, from all claims."""
        return self.without(None)

    @cached_property
    def outvoted(self) -> set[Claim]:
        """The claims that contradict the code, or most others."""
        return {
            seen.claim
            for seen in self.seen
            for entry, size in pair(seen.claim.axes, seen.shape) or ()
            if self.contradiction(entry, size, seen)
        }

    def without(self, silent: Claim | None) -> Names:
        """The sizes of all names, without one claim, and then without outvoted ones."""
        out = {silent} | self.outvoted if silent else set()
        names = Names(dict(self.code), dict.fromkeys(self.code, "in the code"))
        seen = [s for s in self.seen if s.claim not in out and not s.again]
        names.bind(seen, plain=True)
        for name, size in self.around.items():
            if name not in names.sizes:
                names.sizes[name], names.since[name] = size, AROUND
        while names.bind(seen, plain=False):
            names.bind(seen, plain=True)
        return names

    @cached_property
    def first_again(self) -> int:
        """Where the observations after the first iteration of a loop begin."""
        return next((n for n, seen in enumerate(self.seen) if seen.again), 0)

    @cached_property
    def growing(self) -> set[str]:
        """The names of axes that change in a loop."""
        first: dict[tuple[Claim, str], tuple[int, ...]] = {}
        found: set[str] = set()
        for seen in self.seen:
            shape = first.setdefault((seen.claim, seen.name), seen.shape)
            if seen.again and len(shape) == len(seen.shape):
                before = pair(seen.claim.axes, shape) or ()
                after = pair(seen.claim.axes, seen.shape) or ()
                for (entry, old), (_, new) in zip(before, after, strict=True):
                    found |= words_of((entry,)).keys() if old != new else set()
        return found - self.code.keys()

    def contradictions(self, claim: Claim) -> Iterator[tuple[str, bool]]:
        """What speaks against a claim, and whether this is certain."""
        for seen in self.of(claim):
            pairs = pair(claim.axes, seen.shape)
            if pairs is None:
                # A word that nothing else uses may be no name of a size.
                elsewhere = self.without(claim).sizes
                known = not elsewhere.keys().isdisjoint(words_of(claim.axes))
                # `# (q, k)` beside two tensors of these names may speak of them.
                known &= not self.tensors.issuperset(words_of(claim.axes))
                why = f"the value has {len(seen.shape)} axes"
                yield why, known and not self.was_right(seen)
            for entry, size in pairs or ():
                if why := self.contradiction(entry, size, seen):
                    yield why, self.is_certain(entry, seen)

    def is_certain(self, entry: str, seen: Seen) -> bool:
        """Whether an entry that contradicts a size makes the claim wrong."""
        words = words_of((entry,)).keys()
        outside = any(self.names.since.get(word) == AROUND for word in words)
        outside |= bool(words) and self.tensors.issuperset(words_of(seen.claim.axes))
        other = entry.isdecimal() and int(entry) > LARGEST_FIXED_SIZE
        sizes = self.names.at(seen)
        # As `n // d`, where d is 0.
        undefined = words <= sizes.keys() and value_of(entry, sizes) is None
        unsure = outside or other or undefined or bool(words & seen.later)
        return not unsure and not self.was_right(seen)

    def was_right(self, seen: Seen) -> bool:
        """Whether a claim is right in the first iteration of a loop, not in this."""
        first = [each for each in self.of(seen.claim) if not each.again]
        pairs = [pair(each.claim.axes, each.shape) for each in first]
        return seen.again and not any(
            found is None or any(self.contradiction(*entry, each) for entry in found)
            for each, found in zip(first, pairs, strict=True)
        )

    def contradiction(self, entry: str, size: int, seen: Seen) -> str:
        """Why an entry cannot be the size of an axis, or ""."""
        words = words_of((entry,)).keys()
        sizes = self.names.at(seen)
        if words & self.growing and self.seen.index(seen) >= self.first_again:
            return ""
        if words <= sizes.keys():
            value = value_of(entry, sizes)
            if value == size:
                return ""
            if value is None:
                return f"`{entry}` has no value"
            return f"`{entry}` is {value}, but the axis has size {size}"
        line = linear(tree_of(entry), sizes) if len(words - sizes.keys()) == 1 else None
        if line is None or not line[0] or solve(entry, size, sizes):
            return ""
        return f"the axis has size {size}, but `{entry}` is never {size}"


def check(source: str, trace: Trace) -> list[Finding]:
    """Verify all claims of a source by a trace of its examples."""
    return verify(claims(source), trace)


def verify(found: list[Claim], trace: Trace) -> list[Finding]:
    """A finding for each claim, in order."""
    words = names_in(found)
    runs, reached = observe(found, trace)
    return [verify_one(claim, runs, reached, words) for claim in found]


def names_in(found: Iterable[Claim]) -> list[str]:
    """All names that claims use."""
    return sorted({name for claim in found for name in words_of(claim.axes)})


def observe(found: list[Claim], trace: Trace) -> tuple[list[Run], set[int]]:
    """The observations of each call, and the lines that were executed."""
    words = names_in(found)
    beside: dict[int, list[Claim]] = defaultdict(list)
    parameters: dict[str, list[Claim]] = defaultdict(list)
    for claim in found:
        if claim.statement:
            beside[claim.statement].append(claim)
        elif not claim.problem:
            parameters[claim.symbol].append(claim)
    runs: dict[object, Run] = {}
    reached = set()
    # What `__init__` has found for each object.
    by_owner: dict[int | None, list[Sizes]] = defaultdict(lambda: [{}, {}])
    for call in trace.calls:
        inherited, kin = by_owner[call.owner] if call.owner is not None else ({}, {})
        code = {n: call.sizes[n] for n in words if n in call.sizes}
        around = {n: s for n, s in (inherited | call.config).items() if n in words}
        run = Run(call, code, around, [call.parameters, call.config, kin])
        values = [*call.arguments, *(v for step in call.steps for v in step.values)]
        run.tensors = {value.name for value in values} - code.keys()
        observer = Observer(run)
        observer.note(parameters.get(call.symbol, ()), call.arguments, call.start, 0)
        for step in call.steps:
            reached.add(step.line)
            near = beside.get(step.line, ())
            observer.note(near, step.values, step.sizes, step.line)
        observer.close(0)
        if call.owner is not None and call.symbol.endswith(".__init__"):
            inherited |= run.names.sizes | call.sizes
            kin |= call.parameters
        if run.seen:
            # Calls with equal observations add nothing.
            sizes = (run.code, run.around, *run.kin)
            key = (tuple(run.seen), *(tuple(each.items()) for each in sizes))
            runs.setdefault(key, run)
    return list(runs.values()), reached


class Moment(NamedTuple):
    """The integers of a call when a line is executed; see `Seen`."""

    now: tuple[tuple[str, int], ...] = ()
    later: frozenset[str] = frozenset()


class Observer:
    """Records the shapes of the values that claims describe, in one call."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.latest: dict[str, Value] = {}
        self.first: dict[tuple[Claim, str], tuple[int, ...]] = {}
        # Candidates, for a whole paragraph.
        self.open: dict[Claim, list[tuple[Value, Moment]]] = {}
        self.moment = Moment()

    def note(
        self, beside: Sequence[Claim], values: Sequence[Value], sizes: Sizes, line: int
    ) -> None:
        """Record the values of the statement in a line; in line 0, the arguments."""
        if self.open:
            self.close(line)
        if values and (beside or self.open):
            code = self.run.code
            now = ((n, sizes[n]) for n in code if sizes.get(n, code[n]) != code[n])
            self.moment = Moment(tuple(now), frozenset(code.keys() - sizes.keys()))
        for claim in beside:
            before = [self.latest[n] for n in claim.targets if n in self.latest]
            mine = [*described(claim, values), *(before if claim.earlier else ())]
            if claim.until:
                mine = before if claim.earlier else []
                self.open[claim] = [(value, self.moment) for value in mine]
            else:
                self.add(claim, mine[: 1 if claim.earlier else None], self.moment)
        for claim, candidates in self.open.items():
            new = [(value, self.moment) for value in described(claim, values)]
            candidates[:0] = reversed(new)
        self.latest |= {value.name: value for value in values}

    def close(self, line: int) -> None:
        """End the claims about paragraphs that a line does not belong to."""
        for claim in [c for c in self.open if not c.statement < line <= c.until]:
            candidates = self.open.pop(claim)
            for name in dict.fromkeys(value.name for value, _ in candidates):
                own = [each for each in candidates if each[0].name == name]
                # It may describe any of them, so it describes the one that it fits.
                value, moment = max(own, key=lambda each: self.score(claim, *each))
                self.add(claim, [value], moment)

    def add(self, claim: Claim, values: Iterable[Value], moment: Moment) -> None:
        """Record the shapes of values."""
        for value in values:
            first = self.first.setdefault((claim, value.name), value.shape)
            again = first != value.shape
            seen = Seen(claim, value.name, value.shape, *moment, again)
            if again or seen not in self.run.seen:
                self.run.seen.append(seen)

    def score(self, claim: Claim, value: Value, moment: Moment) -> int:
        """How well a value fits a claim: 0 if not, 2 if the code does not object."""
        pairs = pair(claim.axes, value.shape)
        sizes = self.run.code | dict(moment.now)
        return (pairs is not None) + all(
            value_of(entry, sizes) == size
            for entry, size in pairs or ()
            if words_of((entry,)).keys() <= sizes.keys()
        )


def described(claim: Claim, values: Iterable[Value]) -> list[Value]:
    """Those of the values that a claim describes."""
    # The tensors of a tuple are named `return[0]`, `return[1]`, …
    names = {*claim.targets}
    return [v for v in values if {v.name, v.name.split("[")[0]} & names]


def verify_one(
    claim: Claim, runs: list[Run], reached: set[int], words: list[str]
) -> Finding:
    """Judge one claim; `words` are all names that the claims of its source use."""

    def finding(verdict: Verdict, why: str, run: Run | None = None) -> Finding:
        return Finding(claim, verdict, describe(claim, f"{verdict}: {why}", run))

    runs = [run for run in runs if run.of(claim)]
    if claim.problem:
        return finding("unverified", claim.problem)
    if not runs and claim.statement in reached:
        return finding("unverified", f"`{claim.targets[0]}` has no shape in any call")
    if not runs:
        what = "executes this line" if claim.statement else "passes a tensor here"
        return finding("unverified", f"no example {what}")
    uncertain: tuple[str, Run] | None = None
    for run in runs:
        for why, certain in run.contradictions(claim):
            if certain:
                return finding("unverified" if claim.guessed else "wrong", why, run)
            uncertain = uncertain or (why, run)
    if uncertain:
        return finding("unverified", *uncertain)
    if reason := reason_unverified(claim, runs, words):
        return finding("unverified", *reason)
    return Finding(claim, "verified")


def reason_unverified(
    claim: Claim, runs: list[Run], words: list[str]
) -> tuple[str, Run] | None:
    """Why a claim that nothing contradicts is not verified; None if it is.

    The sizes come from the other claims only: a name that occurs in this claim alone
    could be any name.
    """
    rests = [(run, run.without(claim)) for run in runs]
    lacking = [words_of(claim.axes).keys() - names.sizes.keys() for _, names in rests]
    if least := min(lacking, key=len):
        who = " or ".join(f"`{name}`" for name in sorted(least))
        return f"no other comment or variable defines {who}", runs[0]
    if claim.axes and {*claim.axes} <= {"...", ANY}:
        return "it fits every tensor", runs[0]
    for run, names in able(claim.axes, claim, rests):
        for seen in () if right(claim.axes, claim, run, names) else run.of(claim):
            for entry, size in pair(claim.axes, seen.shape) or ():
                value = value_of(entry, names.at(seen))
                if value != size:
                    return f"elsewhere `{entry}` is {value}, here {size}", run
    for old, new, axes in alternatives(claim.axes, words):
        known = able(axes, claim, rests)
        if known and all(right(axes, claim, run, names) for run, names in known):
            run, names = known[0]
            values = [str(value_of(entry, names.sizes)) for entry in (old, new)]
            both = f" (both {values[0]})" if values[0] == values[1] else ""
            return f"no example distinguishes `{old}` from `{new}`{both}", run
    for old, new in coincident(claim, rests):
        both = f"(both {value_of(old, runs[0].names.sizes)})"
        return f"no example distinguishes `{old}` from `{new}` {both}", runs[0]
    return None


def able(
    axes: Axes, claim: Claim, rests: list[tuple[Run, Names]]
) -> list[tuple[Run, Names]]:
    """The calls in which the names of some axes are known."""
    needed = words_of(axes).keys()
    new = needed - words_of(claim.axes).keys()
    return [
        (run, names)
        for run, names in rests
        if needed <= names.sizes.keys()
        and not any(names.since[name] == AROUND for name in new)
    ]


def right(axes: Axes, claim: Claim, run: Run, names: Names) -> bool:
    """Whether axes fit all values that a claim describes in a call."""
    return all(
        fits(axes, seen.shape, names.at(seen))
        for seen in run.of(claim)
        if not seen.again
    )


def coincident(
    claim: Claim, rests: list[tuple[Run, Names]]
) -> Iterator[tuple[str, str]]:
    """Sizes of a claim, and names in the code that have the same size in all calls."""
    numbers = (e for entry in claim.axes for e in re.findall(r"\b\d+\b", entry))
    for entry in dict.fromkeys([*words_of(claim.axes), *numbers]):
        others = [run.twins(entry, claim) for run, _ in rests]
        yield from ((entry, other) for other in sorted(set.intersection(*others)))


def describe(claim: Claim, why: str, run: Run | None) -> str:
    """The line, the reason, the observed shapes, and the sizes of the names."""
    lines = [f"line {claim.line}: {claim.text} is {why}", f"    {claim.code}"]
    if run:
        shown = {f"{seen.name} {list(seen.shape)}": None for seen in run.of(claim)}
        lines.append(f"  seen:  {', '.join(shown)}")
        names = run.names
        known = [n for n in words_of(claim.axes) if n in names.sizes]
        sizes = [f"{n} = {names.sizes[n]} ({names.since[n]})" for n in known]
        lines += [f"  where: {', '.join(sizes)}"] if sizes else []
        lines.append(f"  in:    {run.call.symbol}, example {run.call.example + 1}")
    return "\n".join(lines)
