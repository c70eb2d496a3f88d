"""`pytest --shapes my_model.py`: every shape comment is a test.

pytest loads this plugin in every run. Without the flag it does nothing, and does not
import the tracer.
"""

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sidenotes.shapes import Finding


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag; the files are the usual arguments of pytest."""
    parser.getgroup("shapes", "shape comments").addoption(
        "--shapes",
        action="store_true",
        help="test the shape comments, such as `# [batch_size, d]`, of the given .py "
        "files: run their doctest examples, and make each comment a test (no "
        "other tests are collected)",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """With `--shapes`, collect the shape comments of a Python file, nothing else."""
    collectors = yield
    if not parent.config.getoption("shapes"):
        return collectors
    if file_path.suffix != ".py":
        return []
    return [ShapeFile.from_parent(parent, path=file_path)]


@contextmanager
def as_written(config: pytest.Config) -> Iterator[None]:
    """Import files unmodified: without the assertion rewriting of pytest."""
    finders = sys.meta_path[:]
    rewriter: object = config.pluginmanager.rewrite_hook
    sys.meta_path[:] = [finder for finder in finders if finder is not rewriter]
    try:
        yield
    finally:
        sys.meta_path[:] = finders


class ShapeFile(pytest.File):
    """A source file, traced once for all of its comments."""

    def collect(self) -> Iterator[pytest.Item]:
        """One item per claim; warns if a file on the command line has none."""
        from sidenotes.grammar import claims
        from sidenotes.shapes import judge
        from sidenotes.split import UNREADABLE, LiterateError, read
        from sidenotes.trace import TraceError, trace

        try:
            found = claims(read(self.path))
            with as_written(self.config):
                findings = judge(found, trace(self.path)) if found else []
        except (LiterateError, TraceError) as error:
            raise self.CollectError(str(error)) from error
        except UNREADABLE as error:
            line = getattr(error, "lineno", None) or 1
            raise self.CollectError(f"{self.path}:{line}: {error}") from error
        if not findings and self.session.isinitpath(self.path):
            reason = "no line of code ends with a shape comment, as `# [batch_size, d]`"
            self.warn(pytest.PytestCollectionWarning(reason))
        for finding in findings:
            name = f"L{finding.claim.line} {finding.claim.text}"
            yield ShapeItem.from_parent(self, name=name, finding=finding)


class ShapeItem(pytest.Item):
    """The test of one claim."""

    def __init__(self, *, finding: "Finding", **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.finding = finding

    def runtest(self) -> None:
        """Pass, or report the claim and the observed shapes, without a traceback."""
        if self.finding.verdict != "ok":
            pytest.fail(self.finding.message, pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        """The location of the comment."""
        title = f"{self.name} in {self.path.name}"
        return self.path, self.finding.claim.line - 1, title
