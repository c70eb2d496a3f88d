"""Shape comments in the notations of public repositories, as their authors place them.

The code in tests/data/excerpts is ours: each file computes something similar to one of
the project that it is named after, with the same kind of comments at the same places. A
right comment must never fail, and altered ones must be noticed.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sidenotes.shapes import (
    Axes,
    Claim,
    Finding,
    claims,
    names_in,
    observe,
    verify,
    verify_one,
)
from sidenotes.trace import Trace, trace

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "tests" / "data" / "excerpts"
EXCERPTS = sorted(path.stem for path in FOLDER.glob("*.txt"))
NOTICED = 0.9  # the share of altered comments that must be noticed


@cache
def traced(name: str) -> tuple[list[Claim], Trace]:
    """The claims of an excerpt, and the trace of its examples."""
    source = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "excerpt.py"
        path.write_text(source, encoding="utf-8")
        return claims(source), trace(path, limit=0)


def verdicts_on(name: str) -> list[Finding]:
    return verify(*traced(name))


def altered(claim: Claim, names: list[str]) -> Iterator[Axes]:
    """One entry has another name, two are swapped, one is missing or too many."""
    axes = claim.axes
    for i, j in combinations(range(len(axes)), 2):
        swapped = [*axes]
        swapped[i], swapped[j] = axes[j], axes[i]
        yield tuple(swapped)
    for i in range(len(axes)):
        yield (*axes[:i], *axes[i + 1 :])
        yield from ((*axes[:i], name, *axes[i + 1 :]) for name in [*names, "other"])
    for i in range(len(axes) + 1):
        yield from ((*axes[:i], name, *axes[i:]) for name in ("other", "1"))


def alterations(name: str) -> Iterator[tuple[str, bool]]:
    """What is put for verified claims, and whether one is then no longer verified."""
    found, trace = traced(name)
    verified = [f.claim for f in verdicts_on(name) if f.verdict == "verified"]
    for claim in verified:
        names = names_in(c for c in found if c.symbol == claim.symbol)
        for axes in {*altered(claim, names)} - {claim.axes}:
            other = replace(claim, axes=axes, text=f"[{', '.join(axes)}]")
            others = [other if each is claim else each for each in found]
            words, (runs, reached) = names_in(others), observe(others, trace)
            first = [other, *(each for each in verified if each is not claim)]
            judged = (verify_one(each, runs, reached, words) for each in first)
            what = f"{name}: line {claim.line}: {claim.text} as {other.text}"
            yield what, any(finding.verdict != "verified" for finding in judged)


@pytest.mark.parametrize("name", EXCERPTS)
def test_a_right_comment_in_its_authors_notation_never_fails(name: str) -> None:
    verdicts = Counter(finding.verdict for finding in verdicts_on(name))
    assert [f.message for f in verdicts_on(name) if f.verdict == "wrong"] == []
    assert verdicts["verified"]


@pytest.mark.slow
def test_altered_comments_of_other_authors_are_noticed() -> None:
    found = [each for name in EXCERPTS for each in alterations(name)]
    print(*(what for what, noticed in found if not noticed), sep="\n")
    verdicts = Counter(f.verdict for name in EXCERPTS for f in verdicts_on(name))
    count = sum(noticed for _, noticed in found)
    share = count / len(found)
    figures = (
        f"{len(EXCERPTS)} excerpts",
        f"{verdicts['verified']} comments are verified",
        f"{verdicts['unverified']} unverified",
        f"{count:,} of {len(found):,} alterations",
        f"{share:.1%}",
    )
    print(", ".join(figures))
    assert len(EXCERPTS) >= 8
    assert verdicts["verified"] >= 2 * verdicts["unverified"]
    assert share >= NOTICED
    page = (ROOT / "docs" / "shapes.py").read_text(encoding="utf-8")
    text = " ".join(page.replace("\n# ", "\n").split())
    assert [figure for figure in figures if figure not in text] == []
