"""The bug museum: each bug is caught by the law that is named, and its fix mends it."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attention_laws import LAWS, check
from headnotes import cli

ROOT = Path(__file__).parent.parent
MUSEUM = ROOT / "museum"
THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\s\(20\d\d")


def load(path: Path, name: str) -> ModuleType:
    """A Python file as a module, wherever it lies."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


museum = load(MUSEUM / "__init__.py", "museum")
NAMES = [name for names in museum.ROOMS.values() for name in names]


def test_every_file_is_on_show_once() -> None:
    assert len(NAMES) >= 16
    assert sorted(NAMES) == sorted(path.stem for path in MUSEUM.glob("[a-z]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_an_exhibit_tells_all_of_its_story_and_gives_nothing_away(name: str) -> None:
    exhibit = museum.read(name)
    assert all(exhibit[:7])
    assert THREAD.match(exhibit.thread)
    assert exhibit.law in LAWS
    assert exhibit.target in ("Attention", "attention")
    assert len(exhibit.code.splitlines()) <= 30
    assert "#" not in exhibit.code
    assert '"""' not in exhibit.code


def made(exhibit: Any, code: str) -> Any:
    """The attention of an exhibit, from its code or from its mended code."""
    module = ModuleType(exhibit.name)
    exec(compile(exhibit.head + code, exhibit.name, "exec"), module.__dict__)
    return getattr(module, exhibit.target)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_named_law_catches_it_with_an_example_that_the_fix_mends(name: str) -> None:
    exhibit = museum.read(name)
    attention = made(exhibit, exhibit.code)
    report = check(attention, **exhibit.options, only=exhibit.law, imports="# here\n")
    (finding,) = report.broken
    assert finding.law.name == exhibit.law
    # The example that is shown fails with the bug, and without it does not.
    with pytest.raises((AssertionError, RuntimeError)):
        exec(finding.counterexample.code, {exhibit.target: attention})
    mended = made(exhibit, exhibit.mended)
    exec(finding.counterexample.code, {exhibit.target: mended})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mended_it_keeps_every_law(name: str) -> None:
    exhibit = museum.read(name)
    report = check(made(exhibit, exhibit.mended), **exhibit.options)
    assert report.ok, report
    assert exhibit.law in {finding.law.name for finding in report.kept}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_catches_it_and_names_the_law(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exhibit = museum.read(name)
    target = f"{MUSEUM / name}.py:{exhibit.target}"
    flags = [*museum.flags(exhibit), "--only", exhibit.law]
    assert cli.main(["check", target, *flags]) == 1
    printed = capsys.readouterr().out
    assert re.search(rf"^{exhibit.law} +broken", printed, re.MULTILINE), printed
