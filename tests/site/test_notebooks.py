"""Lessons and exercises as notebooks: their pages, buttons and files."""

import ast
import importlib.util
import json
import os
import re
import runpy
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
from mkdocs.structure.files import File, Files

import alone
from website import ROOT

HOOK = runpy.run_path(str(ROOT / "overrides/notebooks.py"))
BUTTON = re.compile(r'<a class="md-button" href="([^"]*)" download>')


def pages(site: Path) -> list[Path]:
    folders = ("learn/*.html", "exercises/[0-9]*.html")
    return [page for folder in folders for page in sorted(site.glob(folder))]


def test_each_lesson_and_exercise_is_a_notebook_and_a_script(site: Path) -> None:
    files = set()
    for page in pages(site):
        targets = BUTTON.findall(page.read_text(encoding="utf-8"))
        assert [Path(target).suffix for target in targets] == [".ipynb", ".py"], page
        files |= {(page.parent / target).resolve() for target in targets}
    folder = site.resolve() / "notebooks"
    assert files == {p for p in folder.rglob("*") if p.suffix in (".ipynb", ".py")}
    with ZipFile(folder / "headnotes-notebooks.zip") as archive:
        assert {folder / info.filename for info in archive.infolist()} == files
        assert {info.date_time for info in archive.infolist()} == {
            (1980, 1, 1, 0, 0, 0)
        }


def test_lessons_have_outputs_and_exercises_have_none(site: Path) -> None:
    for path in sorted((site / "notebooks").rglob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        assert bool(outputs) == (path.parent.name == "learn"), path
        # Neither an address of this machine nor the time of the build.
        assert "](../" not in str(cells)
        assert "execution" not in str([cell["metadata"] for cell in cells])


def test_the_first_cell_says_what_is_missing(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = site / "notebooks/learn/08_sequence_first_with_einsum.py"
    cell = path.read_text(encoding="utf-8").split("# %%")[1]
    exec(cell, {})
    needed = ast.literal_eval(re.findall(r"^needed = (.*)$", cell, re.MULTILINE)[0])
    assert needed == ["headnotes", "labml", "matplotlib", "torch"]
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "torch" or None
    )
    said = r"headnotes, labml, matplotlib not found; run: pip install .*whl labml"
    with pytest.raises(ModuleNotFoundError, match=said):
        exec(cell, {})


# Of the others, only the imports are executed, unless HEADNOTES_NOTEBOOKS=all: all
# cells of all lessons need two minutes.
WHOLE = ("01_attention_by_hand", "03_causal_self_attention", "04_multi_head_attention")


@pytest.mark.slow
def test_a_lesson_needs_nothing_but_the_packages_that_it_names(site: Path) -> None:
    run_all = os.environ.get("HEADNOTES_NOTEBOOKS") == "all"
    tasks = []
    for path in sorted((site.resolve() / "notebooks/learn").glob("*.ipynb")):
        first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]
        names = re.findall(r"pip install \S+ (.+)$", "".join(first), re.MULTILINE)
        packages = tuple(names[0].split())
        tasks.append(alone.Task(str(path), packages, run_all or path.stem in WHOLE))
    (wheel,) = (site / "dist").glob("headnotes-*.whl")
    found = alone.execute(wheel, tasks)
    print(*found.items(), sep="\n")
    assert {path: error for path, (error, _) in found.items() if error} == {}
    assert len(found) == len(tasks)


def test_pages_of_notebooks_bring_nothing_from_jupyter(site: Path) -> None:
    for page in sorted(site.glob("exercises/[0-9]*.html")):
        html = page.read_text(encoding="utf-8")
        assert re.findall(r"<style|jp-\w+|mermaid|mathjax", html) == []


def test_a_broken_link_of_a_notebook_is_a_warning(
    tmp_path: Path, logged: StringIO
) -> None:
    files = [
        File(name, str(tmp_path), str(tmp_path), use_directory_urls=False)
        for name in ("exercises/01_mask.py", "learn/03_causal.md")
    ]
    page = SimpleNamespace(file=files[0], links_to_anchors=None)
    resolved = HOOK["resolved"]
    assert resolved("https://pytorch.org", page, Files(files)) == "https://pytorch.org"
    assert not logged.getvalue()
    link = "../learn/03_causal.md#softmax"
    assert resolved(link, page, Files(files)) == "../learn/03_causal.html#softmax"
    assert page.links_to_anchors == {files[1]: {"softmax": link}}
    resolved("../learn/04_causal.md", page, Files(files))
    assert "leads to no page" in logged.getvalue()


def test_formulas_of_a_notebook_are_mathml() -> None:
    html = """<div class="jp-MarkdownOutput"><p>Let $a &lt; b$ be
    <code>$HOME</code>.</p>$$x_1$$</div>"""
    page = SimpleNamespace(file=None)
    reduced = HOOK["reduced"](html, page, Files([]))
    assert reduced.count("<math") == 2
    assert "<code>$HOME</code>" in reduced
    assert '<div class="arithmatex"><math' in reduced
