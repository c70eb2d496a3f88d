"""`headnotes train` trains, continues, and says what is wrong with a file."""

from pathlib import Path

import pytest

from headnotes import cli
from headnotes.models import cli as models


@pytest.mark.slow
def test_a_complete_run_prints_its_exact_match_and_its_mistakes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "HELD_OUT", 7)
    words = ["train", "dates", "--steps", "1", "--batch-size", "2"]
    assert cli.main([*words, "--run", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "exact match on 7 texts of held-out dates: 0.00%" in said
    assert ", not " in said
    assert cli.main([*words, "--run", str(tmp_path), "--seed", "2"]) == 2
    assert "holds a run with `seed` 1, not 2" in capsys.readouterr().err


def test_bad_lines_of_a_file_are_reported_by_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("3 mai 1998\t1998-05-03\nno date\n")
    words = ["train", "dates", "--run", str(tmp_path / "run"), "--data", str(path)]
    assert cli.main(words) == 2
    assert "line 2: 1 fields" in capsys.readouterr().err
    assert cli.main([*words, "--skip-bad-lines"]) == 2
    assert "none has a date of the split validation or test" in capsys.readouterr().err
