"""Exercises: the given code fails, the solution passes, each mistake gets its hint."""

import contextlib
import io
from pathlib import Path
from types import ModuleType
from typing import Any

import jupytext
import pytest

import attention_laws
from attention_laws import checker
from headnotes.exercises import check
from headnotes.exercises.exercise import SERIES, load, notebooks, title_of
from sidenotes import shapes
from sidenotes.trace import trace

ROOT = Path(__file__).parent.parent.parent
SOLUTIONS = ROOT / "src/headnotes/exercises/solutions"
NAMES = [*notebooks()]


def law_of(exercise: Any) -> str | None:
    return exercise.laws[0] if exercise.laws else None


def test_every_notebook_has_its_solution_and_every_solution_its_notebook() -> None:
    assert sorted(NAMES) == sorted(p.stem for p in SOLUTIONS.glob("[a-z]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_the_code_as_given_runs_and_fails(name: str) -> None:
    cells = jupytext.read(notebooks()[name]).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    module = ModuleType(name)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for source in code:
            exec(compile(source, name, "exec"), module.__dict__)
    exercise = load(name)
    assert printed.getvalue().startswith(f"{name}: FAIL")
    mine = getattr(module, exercise.solution.__name__)
    report = check(name, mine, law=law_of(exercise))
    if exercise.laws:
        # The first mistake is to change nothing.
        assert report.mistake == exercise.mistakes[0].__name__, report
    else:
        assert "not written" in report.message, report


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes(name: str) -> None:
    exercise = load(name)
    assert exercise.series in SERIES
    assert title_of(notebooks()[name])
    report = check(name, exercise.solution, law=law_of(exercise))
    assert report, report


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_mistake_gets_its_own_hint(name: str) -> None:
    exercise = load(name)
    assert len(exercise.mistakes) >= 3
    for mistake in exercise.mistakes:
        report = check(name, mistake, law=law_of(exercise))
        assert report.mistake == mistake.__name__, report
        assert report.hint.endswith("."), report


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if load(name).laws])
def test_the_solution_of_a_bug_passes_the_laws_that_the_bug_violates(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("SHRINKING_RUNS", "SLOW_SHRINKING_RUNS"):
        monkeypatch.setattr(checker, limit, 0)  # any counterexample will do
    exercise = load(name)
    options = {**exercise.options, "only": list(exercise.laws)}
    bug = attention_laws.check(exercise.mistakes[0], **options)
    assert {result.law.name for result in bug.failed} == {*exercise.laws}, bug
    fixed = attention_laws.check(exercise.solution, **options)
    assert fixed.ok, fixed


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_examples_confirm_the_shape_comments_of_a_solution(name: str) -> None:
    path = SOLUTIONS / f"{name}.py"
    found = shapes.check(path.read_text(encoding="utf-8"), trace(path, limit=0))
    assert [f.message for f in found if f.verdict != "verified"] == []
