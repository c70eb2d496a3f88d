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

UNREACHED = "no example executes"
UNVERIFIED = "unverified"  # the name of the property of a report, and of its category
REPORTS = pytest.StashKey[list[str]]()  # the corrections of `--shapes-fix`


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags; the files are the usual arguments of pytest."""
    group = parser.getgroup("shapes", "shape comments")
    group.addoption(
        "--shapes",
        action="store_true",
        help="test the shape comments, such as `# [batch_size, d]`, of the given .py "
        "files: run their doctest examples, and make each comment a test (no "
        "other tests are collected)",
    )
    group.addoption(
        "--shapes-strict",
        action="store_true",
        help="a shape comment that cannot be verified is an error, too",
    )
    group.addoption(
        "--shapes-call",
        action="append",
        default=[],
        metavar="CODE",
        help="run this instead of the doctest examples, with the names of the file and "
        'torch: "Attention(512, 8)(torch.randn(2, 5, 512))"; may be repeated',
    )
    group.addoption(
        "--shapes-fix",
        action="store_true",
        help="correct wrong shape comments in the files",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The other flags imply `--shapes`."""
    given = ("shapes_strict", "shapes_call", "shapes_fix")
    if any(config.getoption(name) for name in given):
        config.option.shapes = True
    config.stash[REPORTS] = []


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
        """One item per claim; warns if a file on the command line has none.

        Of a folder, a file that cannot be traced is one unverified item, because an
        error of collection would stop the run before the other files.
        """
        from sidenotes.split import UNREADABLE, LiterateError
        from sidenotes.trace import TraceError

        try:
            findings = self.findings()
        except (LiterateError, TraceError, *UNREADABLE) as error:
            message = str(error)
            if isinstance(error, UNREADABLE):
                line = getattr(error, "lineno", None) or 1
                message = f"{self.path}:{line}: {error}"
            if self.session.isinitpath(self.path):
                raise self.CollectError(message) from error
            message = message.removeprefix(f"{self.path}:")
            message = f"line {message}"
            yield UntracedFile.from_parent(self, name="all comments", message=message)
            return
        if not findings and self.session.isinitpath(self.path):
            reason = "no line of code has a shape comment, as `# [batch_size, d]`"
            self.warn(pytest.PytestCollectionWarning(reason))
        for finding in findings:
            name = f"L{finding.claim.line} {finding.claim.text}"
            yield ShapeItem.from_parent(self, name=name, finding=finding)

    def findings(self) -> "list[Finding]":
        """The findings on all claims; with `--shapes-fix`, after the corrections."""
        from sidenotes.fix import corrected, write_lines
        from sidenotes.grammar import claims
        from sidenotes.shapes import verify
        from sidenotes.split import read
        from sidenotes.trace import trace

        source = read(self.path)
        found = claims(source)
        if not found:
            return []
        calls = self.config.getoption("shapes_call")
        with as_written(self.config):
            traced = trace(self.path, calls=calls)
        if self.config.getoption("shapes_fix"):
            fixed, changes = corrected(source, traced)
            if changes:
                write_lines(self.path, fixed.split("\n"))
                found = claims(fixed)
            self.config.stash[REPORTS] += [f"{self.path.name}:{c}" for c in changes]
        return verify(found, traced)


class UnverifiedItem(pytest.Item):
    """A test that is reported as unverified, and fails with `--shapes-strict`."""

    def unverified(self, message: str) -> None:
        """Skip, or fail if unverified comments are errors."""
        if self.config.getoption("shapes_strict"):
            pytest.fail(message, pytrace=False)
        first = message.partition("\n")[0]
        self.user_properties.append((UNVERIFIED, f"{self.path.name}: {first}"))
        pytest.skip(first)


class UntracedFile(UnverifiedItem):
    """The comments of a file that cannot be imported, or whose examples fail."""

    def __init__(self, *, message: str, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.message = message

    def runtest(self) -> None:
        """Report the reason."""
        self.unverified(self.message)


class ShapeItem(UnverifiedItem):
    """The test of one claim."""

    def __init__(self, *, finding: "Finding", **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.finding = finding

    def runtest(self) -> None:
        """Pass, or report the claim and the observed shapes, without a traceback."""
        if self.finding.verdict == "unverified":
            self.unverified(self.finding.message)
        if self.finding.verdict != "verified":
            pytest.fail(self.finding.message, pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        """The location of the comment."""
        title = f"{self.name} in {self.path.name}"
        return self.path, self.finding.claim.line - 1, title


def pytest_report_teststatus(
    report: pytest.TestReport | pytest.CollectReport,
) -> tuple[str, str, str] | None:
    """Count unverified comments as such, not as skipped tests."""
    # A file that is skipped as a whole has a report without properties.
    if report.skipped and UNVERIFIED in dict(getattr(report, "user_properties", ())):
        return UNVERIFIED, "u", "UNVERIFIED"
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the corrected comments, and the unverified ones with their reasons."""
    config = terminalreporter.config
    reports = terminalreporter.getreports(UNVERIFIED)
    reasons = [str(dict(report.user_properties)[UNVERIFIED]) for report in reports]
    for title, lines in (
        ("corrected shape comments", config.stash[REPORTS]),
        ("unverified shape comments", reasons),
    ):
        if lines:
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.write_line(line)
    if any(UNREACHED in reason for reason in reasons):
        terminalreporter.write_line(
            "Lines are executed by doctest examples, or by --shapes-call CODE."
        )
