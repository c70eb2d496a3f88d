"""MkDocs hooks: pages and files that are made from sources outside of `docs/`."""

import os
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import sidenotes
from headnotes.cli import edition
from sidenotes.lessons import lesson

ROOT = Path(__file__).parent
SOURCES = sorted((ROOT / "src" / "headnotes").rglob("*.py"))


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the lessons, the style sheet and script, and each module with its tests."""
    docs = Path(config.docs_dir)
    os.environ["MATPLOTLIBRC"] = str(docs / "matplotlibrc")  # read by the kernels

    for script in [docs / "index.py", *sorted((docs / "learn").glob("*.py"))]:
        page = lesson(
            script,
            depends_on=[*SOURCES, ROOT / "constraints.txt", docs / "matplotlibrc"],
            cache=ROOT / ".cache" / "lessons",
        )
        page_path = script.relative_to(docs).with_suffix(".md").as_posix()
        add(files, config, page_path, page)

    for asset in (Path(sidenotes.__file__).parent / "assets").iterdir():
        add(files, config, f"assets/{asset.name}", asset.read_text(encoding="utf-8"))

    for page in sorted((docs / "source").glob("*.md")):
        module = ROOT / "src" / "headnotes" / f"{page.stem}.py"
        tests = ROOT / "tests" / f"test_{page.stem}.py"
        add(files, config, f"source/{module.name}", edition(module))
        add(files, config, f"source/tests/{tests.stem}.md", listing(tests, page.stem))
    return files


def add(files: Files, config: MkDocsConfig, path: str, content: str) -> None:
    """Put a file into the site that is not in `docs/`."""
    files.append(File.generated(config, path, content=content))


def listing(tests: Path, module: str) -> str:
    """The page that shows the tests of a module."""
    text = tests.read_text(encoding="utf-8")
    meta = "---\nsearch: {exclude: true}\n---\n"
    title = f"# Tests of `{module}`\n\nWhat they test: [{module}](../{module}.md)."
    return f"{meta}{title}\n\n~~~~~~~python\n{text}~~~~~~~\n"
