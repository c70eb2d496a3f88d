"""The bug museum: the named law finds each bug, and passes once it is fixed."""

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
    """Import a Python file from any folder as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


museum = load(MUSEUM / "__init__.py", "museum")
NAMES = [name for names in museum.ROOMS.values() for name in names]


def test_every_exhibit_is_in_one_room() -> None:
    assert len(NAMES) >= 16
    assert sorted(NAMES) == sorted(path.stem for path in MUSEUM.glob("[a-z]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_an_exhibit_has_all_its_parts_and_no_comments(name: str) -> None:
    exhibit = museum.read_exhibit(name)
    assert all(exhibit[:7])
    assert ": " in exhibit.title  # the topic, and what is wrong
    assert THREAD.match(exhibit.thread)
    assert exhibit.law in LAWS
    assert exhibit.target in ("Attention", "attention")
    assert len(exhibit.code.splitlines()) <= 30
    assert "#" not in exhibit.code
    assert '"""' not in exhibit.code


def attention_of(exhibit: Any, code: str) -> Any:
    """The attention of an exhibit, from its code or from its fixed code."""
    module = ModuleType(exhibit.name)
    exec(compile(exhibit.header + code, exhibit.name, "exec"), module.__dict__)
    return getattr(module, exhibit.target)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_named_law_fails_and_its_example_passes_once_fixed(
    name: str,
) -> None:
    exhibit = museum.read_exhibit(name)
    attention = attention_of(exhibit, exhibit.code)
    report = check(attention, **exhibit.options, only=exhibit.law, imports="# here\n")
    (result,) = report.failed
    assert result.law.name == exhibit.law
    # The counterexample fails with the bug, and passes without it.
    with pytest.raises((AssertionError, RuntimeError)):
        exec(result.counterexample.code, {exhibit.target: attention})
    fixed = attention_of(exhibit, exhibit.fixed_code)
    exec(result.counterexample.code, {exhibit.target: fixed})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_fixed_code_passes_all_laws(name: str) -> None:
    exhibit = museum.read_exhibit(name)
    # Compiling takes as long as all other laws.
    skip = () if exhibit.law == "compiled" else "compiled"
    attention = attention_of(exhibit, exhibit.fixed_code)
    report = check(attention, **exhibit.options, skip=skip)
    assert report.ok, report
    if LAWS[exhibit.law].strict:
        report = check(attention, **exhibit.options, only=exhibit.law)
    assert exhibit.law in {result.law.name for result in report.passed}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_finds_it_and_names_the_law(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exhibit = museum.read_exhibit(name)
    target = f"{MUSEUM / name}.py:{exhibit.target}"
    flags = [*museum.command_line_flags(exhibit), "--only", exhibit.law]
    assert cli.main(["check", target, *flags]) == 1
    printed = capsys.readouterr().out
    assert re.search(rf"^{exhibit.law} +FAIL", printed, re.MULTILINE), printed
