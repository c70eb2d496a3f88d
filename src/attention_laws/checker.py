r"""# Checking an attention

`check` asks an attention all laws, and answers with a `Report`: which are kept, which
are broken and by what, which do not apply and why. Sizes are tried from small to large,
some of them with coincidences in them (as many batch items as tokens, or as heads), in
which masks of the wrong shape fit. What breaks a law is then made smaller as long as it
still does.

Source: [what a law is](law.md); the command line is [`headnotes check`](../cli.md).
"""

import math
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from attention_laws import algebra, masking, modes, order
from attention_laws.adapter import Adapter, CannotBeCalled, Fact, Options, Sizes
from attention_laws.infer import adapter
from attention_laws.law import (
    Broken,
    Failed,
    Law,
    NotApplicable,
    first_line,
)
from attention_laws.trial import Trial

# All laws, in the order in which they are checked and shown.
LAWS: dict[str, Law] = {
    each.name: each
    for family in (masking, algebra, order, modes)
    for each in vars(family).values()
    if isinstance(each, Law)
}

VERDICTS = ("kept", "broken", "not applicable")

# What an author raises who has thought of the case.
REFUSALS = (ValueError, TypeError, NotImplementedError, AssertionError)


@dataclass(frozen=True)
class Counterexample:
    """The smallest example found that breaks a law."""

    sizes: Sizes
    said: str
    amount: float
    tolerance: float
    code: str

    def __str__(self) -> str:
        lines = [self.said, f"at {self.sizes}"]
        if self.tolerance:
            lines.append(
                f"by {self.amount:.2g}, where {self.tolerance:.0e} is rounding"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Finding:
    """One law, and how an attention stands to it."""

    law: Law
    verdict: str  # "kept", "broken" or "not applicable"
    detail: str = ""
    counterexample: Counterexample | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """All findings about one attention; prints as a table."""

    name: str
    facts: tuple[Fact, ...]
    findings: tuple[Finding, ...]

    def of(self, verdict: str) -> list[Finding]:
        """The findings with this verdict."""
        return [f for f in self.findings if f.verdict == verdict]

    @property
    def kept(self) -> list[Finding]:
        """Laws that held for all that was tried."""
        return self.of("kept")

    @property
    def broken(self) -> list[Finding]:
        """Laws that did not, each with a counterexample."""
        return self.of("broken")

    @property
    def not_applicable(self) -> list[Finding]:
        """Laws that could not be asked, each with the reason."""
        return self.of("not applicable")

    @property
    def ok(self) -> bool:
        """Is no law broken?"""
        return not self.broken

    def __str__(self) -> str:
        lines = [
            self.name,
            *(f"  {f.name}: {f.value} ({f.how})" for f in self.facts),
            "",
        ]
        for finding in self.findings:
            row = f"{finding.law.name:24}{finding.verdict:16}{finding.detail}"
            lines.append(row.rstrip())
        for finding in self.broken:
            lines += ["", f"{finding.law.name}: {finding.law.statement}"]
            lines += textwrap.wrap(
                finding.law.reason, 78, initial_indent="  ", subsequent_indent="  "
            )
            example = finding.counterexample
            assert example is not None
            lines += ["", textwrap.indent(str(example), "  ")]
            lines += ["", textwrap.indent(example.code.rstrip(), "    ")]
        count = {verdict: len(self.of(verdict)) for verdict in VERDICTS}
        summary = ", ".join(f"{n} {verdict}" for verdict, n in count.items())
        return "\n".join([*lines, "", summary])


def grid(adapter: Adapter, thorough: bool) -> Iterator[Sizes]:
    """The sizes to try: each pair of axes differs somewhere and coincides somewhere."""
    # As many batch items as tokens, or as heads: there a mask fits that should not.
    as_heads = max(2, min(adapter.heads, 8))
    lengths = [(2, 4, 5), (3, 3, 3), (as_heads, 4, 7)]
    if thorough:
        lengths += [(1, 1, 1), (1, 2, 2), (4, 7, 19), (5, 5, 5)]
    for batch_size, q_len, k_len in lengths:
        if not adapter.cross:
            q_len = k_len
        if "b" not in adapter.layout:
            batch_size = 1
        yield Sizes(batch_size, q_len, k_len, adapter.heads, adapter.d_k)


def smaller(sizes: Sizes, adapter: Adapter) -> Iterator[Sizes]:
    """Sizes with one of them reduced, or two that coincide, the boldest steps first."""
    names = ["batch_size", "k_len", "q_len"]
    names = names if adapter.fixed else ["heads", "d_k", *names]
    pairs = [
        (a, b) for a in names for b in names if getattr(sizes, a) == getattr(sizes, b)
    ]
    for one, other in pairs:
        now = getattr(sizes, one)
        step = adapter.groups if "heads" in (one, other) else 1
        for n in dict.fromkeys((step, 2 * step, now - step)):
            if step <= n < now:
                less = replace(sizes, **{one: n, other: n})
                if not adapter.cross:
                    less = replace(less, q_len=less.k_len)
                if less != sizes and less.q_len <= less.k_len:
                    yield less


def judge(law: Law, adapter: Adapter, options: Options, thorough: bool) -> Finding:
    """Test one law, at all sizes; shrink what breaks it."""
    start = time.perf_counter()

    def attempt(sizes: Sizes) -> None:
        trial = Trial(adapter, sizes, thorough=thorough, **options.of_trials())
        try:
            law.test(trial)
        except Broken as broken:
            broken.sizes = trial.sizes
            raise
        except Failed as failure:
            # A clear refusal is no wrong answer. Anything else comes from inside.
            if isinstance(failure.error, REFUSALS):
                raise NotApplicable(
                    f"refused: {first_line(failure.error)}"
                ) from failure
            code = trial.code()
            raise Broken(f"raises {failure}", math.nan, 0.0, code) from failure

    reason, kept = "", False
    first: tuple[Sizes, Broken] | None = None
    for sizes in grid(adapter, thorough):
        try:
            attempt(sizes)
            kept = True
        except NotApplicable as refusal:
            reason = reason or str(refusal)
            continue
        except Broken as seen:
            # A wrong answer is worse than an error, and more is to be learned from it.
            if first is None or not kind(seen):
                first = sizes, seen
            if not kind(seen):
                break
        if law.once:
            break
    seconds = time.perf_counter() - start
    if first is not None:
        sizes, least = shrink(attempt, *first, adapter)
        sizes = least.sizes or sizes
        example = Counterexample(
            sizes, least.said, least.amount, least.tolerance, least.code
        )
        return Finding(law, "broken", least.said, example, seconds)
    if kept:
        return Finding(law, "kept", seconds=seconds)
    return Finding(law, "not applicable", reason, seconds=seconds)


def shrink(
    attempt: Callable[[Sizes], None], sizes: Sizes, broken: Broken, adapter: Adapter
) -> tuple[Sizes, Broken]:
    """Reduce one size after the other, as long as the law stays broken."""
    end = time.perf_counter() + 2
    progress = True
    while progress:
        progress = False
        for less in smaller(sizes, adapter):
            if time.perf_counter() > end:
                break
            try:
                attempt(less)
            except Broken as still:
                if kind(still) == kind(broken):
                    sizes, broken, progress = less, still, True
                    break
            except Exception:
                continue
    return sizes, broken


def importable(attention: Any, name: str) -> str:
    """The line that imports what has a name of its own in a module."""
    module = getattr(attention, "__module__", None)
    if (
        getattr(sys.modules.get(module or ""), name, None) is attention
        and module != "__main__"
    ):
        return f"from {module} import {name}\n"
    return f"# `{name}` is the attention that was checked.\n"


def read_laws(option: str, names: str | Iterable[str]) -> list[str]:
    """Names of laws, one or several; raises `ValueError` for what is none."""
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Iterable):
        raise ValueError(f"`{option}` (={names!r}) must be names of laws")
    names = list(names)
    for unknown in set(names) - set(LAWS):
        raise ValueError(
            f"`{option}` names {unknown!r}, which is no law; there are "
            f"{', '.join(LAWS)}"
        )
    return names


def kind(broken: Broken) -> str:
    """The error that was raised, whatever the sizes in it; empty for a wrong answer."""
    said = broken.said if broken.said.startswith("raises ") else ""
    return re.sub(r"\d+", "", said)


def check(
    attention: Any,
    *,
    only: str | Iterable[str] = (),
    skip: str | Iterable[str] = (),
    thorough: bool = False,
    name: str = "",
    imports: str = "",
    progress: Callable[[int, int, str], None] | None = None,
    **options: Any,
) -> Report:
    r"""Ask `attention` all laws, or `only` some, but those to `skip`, and report.

    `attention` is a class of modules, a module, or a function; it is not changed.
    `thorough` tries more sizes, compiles in earnest and asks the strict laws, too. What
    else may be said about it, instead of being found out, is listed in `Options`.
    `progress` is called before each law with how many are done, how many there are, and
    its name.

    Raises `CannotBeCalled`, a `ValueError`, where no way to call it was found.

    >>> laws = ["causality", "empty_rows"]
    >>> report = check(torch.nn.MultiheadAttention, only=laws)
    >>> [finding.law.name for finding in report.broken]
    ['empty_rows']
    >>> print(report.broken[0].counterexample)
    the output of a query that may read nothing is not finite
    at batch_size=1, q_len=1, k_len=1, heads=1, d_k=1
    """
    if not callable(attention):
        raise CannotBeCalled(f"`attention` (={attention!r}) cannot be called")
    if isinstance(attention, type) and not issubclass(attention, torch.nn.Module):
        raise CannotBeCalled(
            f"`{attention.__name__}` is a class, but none of modules; check what it "
            f"makes"
        )
    known = Options(**options)
    only, skip = read_laws("only", only), read_laws("skip", skip)
    chosen = [LAWS[name] for name in only] if only else list(LAWS.values())
    findings = []
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng():
        torch.manual_seed(known.seed)
        name = name or getattr(attention, "__name__", "")
        name = name if name.isidentifier() else "my_attention"
        imports = imports or importable(attention, name)
        called = adapter(attention, name, imports, known)
        for n, each in enumerate(chosen):
            if progress is not None:
                progress(n, len(chosen), each.name)
            if each.name in skip:
                findings.append(Finding(each, "not applicable", "skipped, as asked"))
            elif each.strict and not (thorough or only):
                why = "asked if named, or with `thorough`: most attention breaks it"
                findings.append(Finding(each, "not applicable", why))
            else:
                findings.append(judge(each, called, known, thorough))
    return Report(name, called.facts, tuple(findings))
