"""`pytest --shapes`: what is collected, what is said, and that nothing else changes."""

from pathlib import Path

import pytest

from sidenotes.grammar import claims

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent.parent
MODEL = '''
"""A model of one line.

>>> import torch
>>> turn(torch.zeros(2, 3)).shape
torch.Size([3, 2])
"""


def turn(x):
    n, d = x.shape
    return x.T  # [d, n]
'''.lstrip()
CLAIM = "L11 [d, n]"
# For a process of its own, which begins in a tenth of the time.
WITHOUT_TORCH = (
    MODEL.replace("import torch", "import numpy")
    .replace("torch.zeros(2, 3)", "numpy.zeros((2, 3))")
    .replace("torch.Size([3, 2])", "(3, 2)")
)


def run(pytester: pytest.Pytester, *args: str | Path) -> pytest.RunResult:
    # Other plugins are slow to begin.
    return pytester.runpytest("-p", "no:hypothesispytest", "--shapes", *args)


@pytest.fixture
def model(pytester: pytest.Pytester) -> Path:
    path = pytester.path / "my_model.py"
    path.write_text(MODEL, encoding="utf-8")
    return path


def test_each_comment_is_a_test(pytester: pytest.Pytester, model: Path) -> None:
    result = run(pytester, "-v", model)
    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 1}
    assert f"my_model.py::{CLAIM} PASSED" in result.stdout.str()


@pytest.mark.slow
def test_one_comment_can_be_chosen(pytester: pytest.Pytester, model: Path) -> None:
    model.write_text(MODEL.replace("n, d = x.shape", "n, d = x.shape; y = x  # [n, d]"))
    assert run(pytester, model).parseoutcomes() == {"passed": 2}
    chosen = run(pytester, f"{model}::{CLAIM}")
    assert chosen.parseoutcomes() == {"passed": 1}


def test_a_wrong_comment_fails_in_five_lines(
    pytester: pytest.Pytester, model: Path
) -> None:
    model.write_text(MODEL.replace("[d, n]", "[n, d]"))
    result = run(pytester, model)
    assert result.ret == 1
    text = result.stdout.str()
    first = text.index("line 11: ")
    assert text[first:].split("\n")[:5] == [
        "line 11: [n, d] is wrong: `n` is 2, but the axis has size 3",
        "    return x.T  # [n, d]",
        "  seen:  return [3, 2]",
        "  where: n = 2 (in the code), d = 3 (in the code)",
        "  in:    turn, example 2",
    ]
    assert text[:first].split("\n")[-2].strip("_ ") == "L11 [n, d] in my_model.py"
    assert text[first:].split("\n")[5].startswith("=====")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("2, 3", "3, 3", "no example distinguishes"),
        (">>> turn", ">>> len", "no example executes this line"),
    ],
)
def test_an_unverified_comment_is_listed_and_fails_if_strict(
    pytester: pytest.Pytester, model: Path, old: str, new: str, reason: str
) -> None:
    model.write_text(MODEL.replace(old, new).replace(")).shape", "))"))
    result = run(pytester, model)
    assert result.ret == 0
    assert result.parseoutcomes() == {"unverified": 1}
    line = f"my_model.py: line 11: [[]d, n[]] is unverified: {reason}*"
    result.stdout.fnmatch_lines(["*unverified shape comments*", line])
    unreached = "executes" in reason
    assert ("--shapes-call CODE" in result.stdout.str()) == unreached
    result = run(pytester, "--shapes-strict", model)
    assert result.parseoutcomes() == {"failed": 1}
    assert "line 11: [d, n] is unverified: " in result.stdout.str()


@pytest.mark.slow
def test_a_call_replaces_the_examples(pytester: pytest.Pytester, model: Path) -> None:
    model.write_text("import torch\n\n\n" + MODEL[MODEL.index("def turn") :])
    call = ("--shapes-call", "turn(torch.zeros(2, 3))")
    assert run(pytester, *call, model).parseoutcomes() == {"passed": 1}
    result = run(pytester, "--shapes-call", "turn(torch.zeros(2))", model)
    assert result.parseoutcomes() == {"errors": 1}
    expected = "`turn(torch.zeros(2))` raises ValueError: not enough values"
    assert expected in result.stdout.str()
    result = run(pytester, "--shapes-call", "import sys; sys.exit(1)", model)
    assert result.parseoutcomes() == {"errors": 1}
    assert "raises SystemExit: 1" in result.stdout.str()


def test_wrong_comments_are_corrected_in_the_file(
    pytester: pytest.Pytester, model: Path
) -> None:
    body = """
    y = x + 1  # B x n; a remark
    z = x.reshape(-1)  # (d,)  # noqa
    return x.T  # [n, d]
"""
    model.write_text(MODEL.replace("\n    return x.T  # [d, n]\n", body))
    result = run(pytester, "--shapes-fix", model)
    assert result.parseoutcomes() == {"passed": 3}
    assert model.read_text().split("\n")[10:13] == [
        "    y = x + 1  # n x d; a remark",
        "    z = x.reshape(-1)  # (d * n,)  # noqa",
        "    return x.T  # [d, n]",
    ]
    result.stdout.fnmatch_lines("my_model.py:11: B x n is now n x d")


def test_several_comments_of_a_line_are_corrected(
    pytester: pytest.Pytester, model: Path
) -> None:
    body = """
    y = x + 1  # (n, d')
    y, z = x.sum(0), x.T  # d' x n, n x d'
    return z  # [d, n]
"""
    model.write_text(MODEL.replace("\n    return x.T  # [d, n]\n", body))
    run(pytester, "--shapes-fix", model)
    assert model.read_text().split("\n")[11].endswith("  # [d'], d' x n")


def test_what_is_written_is_a_shape_comment_again(
    pytester: pytest.Pytester, model: Path
) -> None:
    body = """
    y = x.sum(1)  # d x n
    z = x.sum()  # (n, d)
    w = x.sum(1)  # [n, d] the sums
    # Shape: (n,
    # d)
    v = x.sum(1)
    return x.T  # [d, n]
"""
    model.write_text(MODEL.replace("\n    return x.T  # [d, n]\n", body))
    result = run(pytester, "--shapes-fix", model)
    assert result.parseoutcomes() == {"passed": 3, "failed": 2}
    assert model.read_text().split("\n")[10:16] == [
        "    y = x.sum(1)  # [n]",
        "    z = x.sum()  # ()",
        *body.split("\n")[3:7],
    ]
    left = "my_model.py:1[34]: * is wrong, but was not corrected"
    result.stdout.fnmatch_lines(["my_model.py:12: (n, d) is now ()", left, left])


@pytest.mark.slow
@pytest.mark.parametrize(
    "prefix", [b"", b"\xef\xbb\xbf", b"# coding: latin-1\r\n# \xe9\r\n"]
)
def test_a_corrected_file_keeps_its_encoding_and_line_ends(
    pytester: pytest.Pytester, model: Path, prefix: bytes
) -> None:
    source = prefix + WITHOUT_TORCH.replace("\n", "\r\n").encode()
    model.write_bytes(source.replace(b"[d, n]", b"[n, d]"))
    assert run(pytester, "--shapes-fix", model).parseoutcomes() == {"passed": 1}
    assert model.read_bytes() == source


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("zeros(2, 3)", "zeros(2)", ":4: the example raises ValueError: not enough"),
        ("return x.T", "return 'x", ":11: unterminated string literal"),
        ("def turn", "import nowhere\n\n\ndef turn", ":1: cannot be imported: Module"),
    ],
)
def test_a_file_that_cannot_be_traced_is_one_error(
    pytester: pytest.Pytester, model: Path, old: str, new: str, message: str
) -> None:
    model.write_text(MODEL.replace(old, new))
    result = run(pytester, model)
    assert result.parseoutcomes() == {"errors": 1}
    assert f"{model}{message}" in result.stdout.str()
    assert "sidenotes" not in result.stdout.str().partition("ERRORS")[2]


def test_a_file_without_shape_comments_gives_a_warning(
    pytester: pytest.Pytester, model: Path
) -> None:
    model.write_text(MODEL.replace("# [d, n]", ""))
    result = run(pytester, "-W", "default", model)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines("*no line of code has a shape comment*")


def test_a_folder_gives_the_comments_of_its_files(
    pytester: pytest.Pytester, model: Path
) -> None:
    pytester.maketxtfile(notes="y = x  # [n, d]")
    pytester.makepyfile(other="x = 1", test_some="def test_some(): assert False")
    result = run(pytester, "-W", "error")
    assert result.parseoutcomes() == {"passed": 1}


def test_a_test_file_that_is_skipped_as_a_whole_is_counted(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile("import pytest; pytest.importorskip('nowhere')")
    result = pytester.runpytest("-p", "no:hypothesispytest", "-ra")
    assert result.parseoutcomes() == {"skipped": 1}


@pytest.mark.slow
def test_a_file_of_a_folder_that_cannot_be_imported_stops_no_other(
    pytester: pytest.Pytester, model: Path
) -> None:
    pytester.makepyfile(broken="import nowhere\n\nx = 1  # [n]\ny = 2  # [d]")
    result = run(pytester)
    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 1, "unverified": 1}
    line = "broken.py: line 1: cannot be imported: ModuleNotFoundError: No module *"
    result.stdout.fnmatch_lines(["*unverified shape comments*", line])
    result = run(pytester, "--shapes-strict")
    assert result.parseoutcomes() == {"passed": 1, "failed": 1}


@pytest.mark.slow
def test_runs_without_the_flag_are_unchanged(
    pytester: pytest.Pytester, model: Path
) -> None:
    model.write_text(WITHOUT_TORCH, encoding="utf-8")
    source = "import sys\n\ndef test_some():\n    x = 1  # [n]\n    "
    pytester.makepyfile(
        test_some=source + "assert 'sidenotes.trace' not in sys.modules"
    )
    result = pytester.runpytest_subprocess("--doctest-modules")
    assert result.parseoutcomes() == {"passed": 2}


@pytest.mark.slow
def test_the_page_itself_passes_and_an_altered_one_does_not(
    pytester: pytest.Pytester,
) -> None:
    source = (ROOT / "src/headnotes/mha.py").read_text(encoding="utf-8")
    path = pytester.path / "mha_copy.py"
    path.write_text(source, encoding="utf-8")
    count = len(claims(source))
    assert run(pytester, path).parseoutcomes() == {"passed": count}
    right, wrong = "return scores  # [q_len, k_len", "return scores  # [k_len, q_len"
    assert right in source
    swapped = source.replace(right, wrong)
    path.write_text(swapped, encoding="utf-8")
    found = run(pytester, path).parseoutcomes()
    # Of two comments, nothing is left that confirms them.
    assert found == {"passed": count - 3, "failed": 1, "unverified": 2}


@pytest.mark.parametrize("marks", [[], ["one"], ["one", "one/two"]])
def test_a_file_may_import_from_its_package(
    pytester: pytest.Pytester, marks: list[str]
) -> None:
    folder = pytester.path / "one" / "two"
    folder.mkdir(parents=True)
    for mark in marks:
        (pytester.path / mark / "__init__.py").touch()
    (folder / "near.py").write_text("from ..far import start\n", encoding="utf-8")
    (folder.parent / "far.py").write_text("start = 1\n", encoding="utf-8")
    lines = "from .near import start\nfrom ..far import start as other\n\n\ndef turn"
    source = MODEL.replace("def turn", lines).replace("    return", "    return 1 and")
    (folder / "my_model.py").write_text(source, encoding="utf-8")
    result = run(pytester, folder / "my_model.py")
    assert result.parseoutcomes() == {"passed": 1}


@pytest.mark.slow
def test_a_file_of_a_package_may_hold_assertions(pytester: pytest.Pytester) -> None:
    # Pytest rewrites the asserts of what it is given, and what it runs is another code.
    folder = pytester.path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    asserting = WITHOUT_TORCH.replace("    return", "    assert n\n    return")
    (folder / "my_model.py").write_text(asserting, encoding="utf-8")
    for given in (folder / "my_model.py", folder):
        assert pytester.runpytest_subprocess("--shapes", given).ret == 0
