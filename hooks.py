"""MkDocs hooks: pages and files that are made from sources outside of `docs/`."""

import ast
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import sidenotes
from headnotes.cli import edition
from sidenotes.lessons import lesson
from sidenotes.render import highlight_lines, line

ROOT = Path(__file__).parent
# Tests that belong to no single module, and are linked to.
OF_MANY = {"numbers"}
SOURCES = sorted((ROOT / "src" / "headnotes").rglob("*.py"))


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the lessons, the style sheet and script, and each module with its tests."""
    docs = Path(config.docs_dir)
    # Read by the kernels, whose tensors are small: threads would wait for one another.
    os.environ["MATPLOTLIBRC"] = str(docs / "matplotlibrc")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    others = [ROOT / "constraints.txt", docs / "matplotlibrc"]
    others += (ROOT / "benchmarks" / "results").glob("*.json")
    # What few lessons import, or quote word by word: a change there need not run all
    # the others again.
    checker = sorted((ROOT / "src" / "sidenotes").glob("*.py"))
    quoted = {
        "museum": sorted((ROOT / "museum").glob("*.py")),
        "headnotes.laws": sorted((ROOT / "src" / "headnotes" / "laws").glob("*.py")),
    }

    def executed(script: Path) -> str:
        text = script.read_text(encoding="utf-8")
        return lesson(
            script,
            depends_on=[*SOURCES, *others, *(checker if "sidenotes" in text else [])],
            quotes=[f for name in quoted if name in text for f in quoted[name]],
            cache=ROOT / ".cache" / "lessons",
        )

    # Two kernels at a time: each spends half of its life importing.
    scripts = sorted(docs.rglob("*.py"))
    with ThreadPoolExecutor(max_workers=2) as kernels:
        for script, page in zip(scripts, kernels.map(executed, scripts), strict=True):
            page_path = script.relative_to(docs).with_suffix(".md").as_posix()
            add(files, config, page_path, page)

    for asset in (Path(sidenotes.__file__).parent / "assets").iterdir():
        add(files, config, f"assets/{asset.name}", asset.read_text(encoding="utf-8"))

    for module in SOURCES:
        inside = module.relative_to(ROOT / "src" / "headnotes")
        if (docs / "source" / inside).with_suffix(".md").exists():
            add(files, config, f"source/{inside.as_posix()}", edition(module))

    for tests in sorted((ROOT / "tests").rglob("test_*.py")):
        inside = tests.relative_to(ROOT / "tests").with_suffix(".md")
        page = docs / "source" / inside.with_name(inside.name.removeprefix("test_"))
        if page.exists() or page.stem in OF_MANY:
            path = Path("source") / inside.parent / "tests" / inside.name
            add(files, config, path.as_posix(), listing(tests, page))
    return files


def add(files: Files, config: MkDocsConfig, path: str, content: str) -> None:
    """Put a file into the site that is not in `docs/`."""
    files.append(File.generated(config, path, content=content))


def listing(tests: Path, page: Path) -> str:
    """The page of a file of tests, with an anchor for each line and each test."""
    text = tests.read_text(encoding="utf-8")
    names = {
        node.lineno: node.name
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }
    code = ""
    for number, html in enumerate(highlight_lines(text.rstrip("\n")), start=1):
        code += f'<i id="{names[number]}"></i>' if number in names else ""
        code += line(number, html)
    meta = "---\nsearch: {exclude: true}\n---\n"
    title = f"# Tests of `{page.stem}`"
    if page.exists():
        title += f"\n\nWhat they test: [{page.stem}](../{page.name})."
    shown = f'<pre class="sn-code highlight">{code}</pre>'
    return f'{meta}{title}\n\n<div class="sidenotes">{shown}</div>\n'
