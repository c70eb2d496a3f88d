"""Imports, read from the syntax tree: all that are executed, and no others."""

from pathlib import Path

import pytest

from sidenotes.dependencies import Imports
from sidenotes.split import LiterateError


def names(tmp_path: Path, script: str, **files: str) -> set[str]:
    for name, text in {"script": script, **files}.items():
        path = tmp_path / f"{name.replace('__', '/').replace('/init', '/__init__')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = Imports([tmp_path]).of(tmp_path / "script.py")
    return {path.relative_to(tmp_path).as_posix() for path in found}


@pytest.mark.parametrize(
    "script",
    [
        "import p.a",
        "import p.a as b",
        "from p import a",
        "from p.a import x",
        "def f():\n    from p.a import x",
        "try:\n    from p.a import *\nexcept ImportError: pass",
        'def f():\n    """\n    >>> from p.a import x\n    """',
    ],
)
def test_every_form_of_an_import_is_followed_to_its_end(
    tmp_path: Path, script: str
) -> None:
    found = names(
        tmp_path,
        script,
        p__init="",
        p__a="from .b import y\nimport os",
        p__b="import c",
        c="",
        d="",
    )
    assert found == {"p/__init__.py", "p/a.py", "p/b.py", "c.py"}


def test_imports_for_type_checkers_are_not_executed(tmp_path: Path) -> None:
    lazy = "if TYPE_CHECKING:\n    from p.a import x\n    from p import b\n"
    lazy += "def __getattr__(name): ..."
    files = {"p__init": lazy, "p__a": "", "p__b": "", "p__c": ""}
    assert names(tmp_path, "from p import c", **files) == {"p/__init__.py", "p/c.py"}
    # A name that the package looks up when it is used.
    assert names(tmp_path, "from p import x", **files) == {"p/__init__.py", "p/a.py"}
    everything = {"p/__init__.py", "p/a.py", "p/b.py"}
    assert names(tmp_path, "import p", **files) == everything


def test_of_a_package_that_hides_its_imports_each_file_counts(tmp_path: Path) -> None:
    files = {"p__init": "def __getattr__(name): ...", "p__a": "", "p__b": ""}
    everything = {"p/__init__.py", "p/a.py", "p/b.py"}
    assert names(tmp_path, "import p", **files) == everything


def test_a_circle_of_imports_ends(tmp_path: Path) -> None:
    assert names(tmp_path, "import a", a="import b", b="import a") == {"a.py", "b.py"}


def test_a_file_that_does_not_parse_is_named(tmp_path: Path) -> None:
    with pytest.raises(LiterateError, match=r"a\.py:1: does not parse"):
        names(tmp_path, "import a", a="def")
