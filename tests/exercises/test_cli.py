"""`headnotes exercise` writes exercises into a folder, checks them, keeps progress."""

import json
from pathlib import Path

import jupytext
import pytest

from headnotes import cli
from headnotes.exercises.cli import PROGRESS, files
from headnotes.exercises.exercise import notebooks

pytest_plugins = ["pytester"]

SOLVED = """
import torch

def causal_mask(q_len, k_len):
    return torch.ones(q_len, k_len).tril(k_len - q_len) > 0
"""


def exercise(*words: object) -> int:
    return cli.main(["exercise", *map(str, words)])


def test_an_exercise_is_written_solved_checked_and_remembered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exercise("start", "causal_mask", tmp_path / "mine") == 0
    script = tmp_path / "mine" / "causal_mask.py"
    assert exercise("check", tmp_path / "mine") == 1
    assert "not written yet" in capsys.readouterr().out
    script.write_text(SOLVED)
    assert exercise("start", "causal_mask", tmp_path / "mine") == 0
    assert script.read_text() == SOLVED
    assert "is left as it is" in capsys.readouterr().out
    assert exercise("check", tmp_path / "mine") == 0
    said = capsys.readouterr().out
    assert "causal_mask.py                  pass" in said
    assert f"1 of {len(notebooks())} exercises passed" in said
    assert exercise("list", tmp_path / "mine") == 0
    assert "  pass  causal_mask " in capsys.readouterr().out
    script.write_text(SOLVED.replace("> 0", ""))
    assert exercise("check", tmp_path / "mine") == 1
    assert json.loads((tmp_path / "mine" / PROGRESS).read_text()) == {"passed": []}


def test_a_downloaded_notebook_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = jupytext.read(notebooks()["causal_mask"])
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    code[0].source = f"%matplotlib inline\n{SOLVED}"
    code[1].source = "report = check('causal_mask', causal_mask)"
    path = tmp_path / "03_causal_mask.ipynb"
    jupytext.write(notebook, path)
    assert exercise("check", tmp_path) == 1
    assert "cannot be run: NameError" in capsys.readouterr().out
    code[1].source = ""
    jupytext.write(notebook, path)
    assert exercise("check", tmp_path) == 0


def test_what_cannot_be_done_is_said_and_has_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exercise("start", "mask", tmp_path) == 2
    assert "`mask` is no exercise" in capsys.readouterr().err
    assert exercise("check", tmp_path) == 2
    assert "holds no exercise" in capsys.readouterr().err
    (tmp_path / PROGRESS).write_text("[]")
    assert exercise("list", tmp_path) == 2
    assert "remove it" in capsys.readouterr().err


def test_no_file_of_the_learner_links_to_a_page_beside_it() -> None:
    for name in notebooks():
        assert "](../" not in files(name)[f"{name}.py"]


def test_pytest_checks_a_folder(pytester: pytest.Pytester) -> None:
    for name in ("causal_mask", "bug_perplexity"):
        exercise("start", name, pytester.path)
    (pytester.path / "causal_mask.py").write_text(SOLVED)
    # Without a plugin that is slow to begin.
    result = pytester.runpytest("-p", "no:hypothesispytest", ".")
    assert result.parseoutcomes() == {"passed": 1, "failed": 1}
    assert "`law` is empty" in result.stdout.str()
