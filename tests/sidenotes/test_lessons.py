"""Lessons: executed for real, never stale, and never wrong in silence."""

import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import jupytext
import pytest

from sidenotes import lessons
from sidenotes.dependencies import Imports
from sidenotes.kernels import Kernels
from sidenotes.lessons import INK, inline_svg, lesson
from sidenotes.split import LiterateError

NONE = Imports([])  # no folder to import from


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    """The kernels of all tests here; they can import from one folder."""
    setup = "import random, matplotlib.pyplot"
    with Kernels(setup, Imports([tmp_path_factory.mktemp("lessons")])) as kernels:
        yield kernels


@pytest.fixture
def write(kernels: Kernels):  # type: ignore[no-untyped-def]
    """Write a lesson, and return a function that makes its page."""
    (folder,) = kernels.imports.roots

    def make(text: str, **files: str):  # type: ignore[no-untyped-def]
        script = folder / "lesson.py"
        script.write_text(dedent(text), encoding="utf-8")
        inputs = []
        for name, content in files.items():
            path = folder / name.replace("_py", ".py")
            path.write_text(content, encoding="utf-8")
            if path.suffix != ".py":
                inputs.append(path)
        cache = folder / "cache"
        kernels.imports = Imports([folder])  # what a new build finds
        return lesson(script, kernels=kernels, inputs=inputs, cache=cache).markdown

    return make


@pytest.mark.slow
def test_prose_code_and_output_follow_one_another(write) -> None:  # type: ignore[no-untyped-def]
    page = write(
        """\
        # %% [markdown]
        # # Title
        # %%
        print("one")
        2
        # %% fold="More"
        print("```")
        # %% hide="true"
        print("seen")
        """
    )
    assert page == (
        "# Title\n\n"
        '```python\nprint("one")\n2\n```\n\n'
        "```{.text .lesson-output}\none\n2\n```\n\n"
        '??? example "More"\n\n'
        '    ````python\n    print("```")\n    ````\n\n'
        "    ````{.text .lesson-output}\n    ```\n    ````\n\n"
        "```{.text .lesson-output}\nseen\n```\n"
    )


@pytest.mark.slow
def test_a_table_is_part_of_the_page(write) -> None:  # type: ignore[no-untyped-def]
    page = write(
        """\
        # %% hide="true"
        from IPython.display import Markdown, display
        display(Markdown("| a |\\n|---|\\n| 1 |"))
        """
    )
    assert page == "| a |\n|---|\n| 1 |\n"


@pytest.mark.slow
def test_a_cell_that_raises_stops_the_build(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LiterateError, match=r"lesson\.py: a cell failed[^$\x1b]*1/0"):
        write("# %%\n1/0\n")


@pytest.mark.slow
def test_a_cell_that_ends_its_process_stops_the_build(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LiterateError, match=r"lesson\.py: a cell failed\nKernel died"):
        write("# %%\nimport os\nos._exit(1)\n")


@pytest.mark.slow
def test_a_lesson_does_not_see_the_state_of_another(write, kernels: Kernels) -> None:  # type: ignore[no-untyped-def]
    text = """\
        # %%
        import os, random
        import matplotlib.pyplot as plt
        print(plt.rcParams["lines.linewidth"], hasattr(random, "x"))
        print("X" in os.environ, os.getcwd())
        plt.rcParams["lines.linewidth"] = 9
        random.x = os.environ["X"] = "1"
        os.chdir("/")
        """
    for number in (1, 2):
        page = write(f"{dedent(text)}# {number}\n")
        assert f"\n1.5 False\nFalse {kernels.imports.roots[0]}\n" in page


@pytest.mark.slow
def test_an_interrupted_build_leaves_no_process(tmp_path: Path) -> None:
    script, begun = tmp_path / "lesson.py", tmp_path / "begun"
    script.write_text("# %%\nimport time\nopen('begun', 'w')\ntime.sleep(60)\n")
    kernels = Kernels("", NONE)
    with ThreadPoolExecutor() as threads, kernels:
        page = threads.submit(lesson, script, kernels=kernels, cache=tmp_path)
        while not begun.exists():
            time.sleep(0.01)
    assert isinstance(page.exception(), LiterateError)
    assert not any(kernel.is_running() for kernel in kernels.forks)
    assert kernels.server.poll() == 0


@pytest.mark.slow
def test_a_setup_that_fails_stops_the_build(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "lesson.py"
    script.write_text("# %%\n1\n")
    reason = "`setup` failed, see above: import missing"
    with (
        pytest.raises(LiterateError, match=reason),
        Kernels("import missing", NONE) as k,
    ):
        lesson(script, kernels=k, cache=tmp_path)
    assert "No module named 'missing'" in capfd.readouterr().err


@pytest.mark.slow
def test_a_warning_stops_the_build(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        LiterateError, match=r"lesson\.py: cell 0: unexpected output.*old"
    ):
        write("# %%\nimport warnings\nwarnings.warn('old')\n")


@pytest.mark.slow
def test_a_figure_without_a_description_stops_the_build(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LiterateError, match=r"lesson\.py: cell 0: the figure needs"):
        write("# %%\nimport matplotlib.pyplot as plt\nplt.plot([1])\nplt.show()\n")


@pytest.mark.slow
def test_a_figure_is_part_of_the_page(write) -> None:  # type: ignore[no-untyped-def]
    page = write(
        """\
        # %% alt="A line & more"
        import matplotlib.pyplot as plt
        for _ in range(2):
            plt.plot([1, 2])
            plt.show()
        """
    )
    figures = re.findall(r'<figure class="lesson-figure">(.*?)</figure>', page)
    assert len(figures) == 2
    assert all('aria-label="A line &amp; more"' in figure for figure in figures)
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'(?:url\(|href=")#([^")]+)', page):
        assert target in ids
    assert "<style" not in page


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kernels are not forked")
def test_a_figure_is_drawn_for_the_page_only(write) -> None:  # type: ignore[no-untyped-def]
    page = write(
        """\
        # %% alt="A line"
        import matplotlib.pyplot as plt
        from matplotlib.figure import Figure
        canvases, draw = [], Figure.draw
        def recorded(figure, renderer):
            canvases.append(type(figure.canvas).__name__)
            return draw(figure, renderer)
        Figure.draw = recorded
        _ = plt.plot([1, 2])
        # %%
        print({*canvases})
        """
    )
    assert "<svg" in page
    assert "{'FigureCanvasSVG'}" in page


def test_figures_take_the_ink_of_the_page() -> None:
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg"><style>*{fill:red}</style>'
        f'<text id="t" style="fill: {INK}">a</text></svg>'
    )
    html = inline_svg(svg, "p-", "alt")
    assert '<text style="fill: currentColor">a</text>' in html
    assert "red" not in html


def test_what_is_stored_is_used_only_while_nothing_has_changed(
    write,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[Path] = []

    def execute(path: Path, kernels: object) -> object:
        runs.append(path)
        return jupytext.read(path)

    monkeypatch.setattr(lessons, "execute", execute)
    module = '"""Doc."""\nX = 1  # comment\n'
    text = "# %%\nfrom a import X\n"

    def ran(text: str, module: str, versions: str) -> bool:
        before = len(runs)
        write(text, a_py=module, versions=versions)
        return len(runs) > before

    assert ran(text, module, "1")
    assert not ran(text, module, "1")
    assert not ran(text, module.replace("comment", "remark"), "1")
    assert not ran(text, module.replace("Doc", "Text"), "1")
    assert ran(text + "2\n", module, "1")
    assert ran(text, module.replace("X = 1", "X = 2"), "1")
    assert ran(text, module, "2")
    # What is undone was executed before.
    assert not ran(text, module, "2")
    assert not ran(text, module, "1")
    # A module that the lesson does not import may change.
    other = "# %%\nfrom b import X\n"
    assert ran(other, module, "1")
    assert not ran(other, module.replace("X = 1", "X = 3"), "1")


@pytest.mark.slow
def test_a_changed_module_never_shows_an_old_output(write) -> None:  # type: ignore[no-untyped-def]
    text = "# %%\nfrom module import X\nprint(X)\n"
    # Python recognizes an edit within a second by the size of the file.
    for value in (1, 22):
        page = write(text, module_py=f"X = {value}\n")
        assert f"\n{value}\n" in page


@pytest.mark.slow
def test_each_byte_of_an_input_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lessons, "execute", lambda path, kernels: jupytext.read(path))
    kernels = Kernels("", NONE)  # starts no process
    script, quoted = tmp_path / "page.py", tmp_path / "quoted.py"
    script.write_text("# %%\n1\n", encoding="utf-8")
    cache = tmp_path / "cache"
    for docstring in ("One.", "Two."):
        quoted.write_text(f'"""{docstring}"""\n', encoding="utf-8")
        lesson(script, kernels=kernels, inputs=[quoted], cache=cache)
    assert len(list(cache.glob("*.md"))) == 2
