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
SOURCES = sorted((ROOT / "src" / "headnotes").rglob("*.py"))


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the lessons, the style sheet and script, and each module with its tests."""
    docs = Path(config.docs_dir)
    os.environ["MATPLOTLIBRC"] = str(docs / "matplotlibrc")  # read by the kernels

    def executed(script: Path) -> str:
        return lesson(
            script,
            depends_on=[*SOURCES, ROOT / "constraints.txt", docs / "matplotlibrc"],
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

    for page in sorted((docs / "source").rglob("*.md")):
        inside = page.relative_to(docs / "source").with_suffix(".py")
        module = ROOT / "src" / "headnotes" / inside
        tests = ROOT / "tests" / inside.with_name(f"test_{inside.name}")
        folder = page.parent.relative_to(docs).as_posix()
        add(files, config, f"{folder}/{module.name}", edition(module))
        add(files, config, f"{folder}/tests/{tests.stem}.md", listing(tests))
    return files


def add(files: Files, config: MkDocsConfig, path: str, content: str) -> None:
    """Put a file into the site that is not in `docs/`."""
    files.append(File.generated(config, path, content=content))


def listing(tests: Path) -> str:
    """The page of a module's tests, with an anchor for each line and each test."""
    module = tests.stem.removeprefix("test_")
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
    title = f"# Tests of `{module}`\n\nWhat they test: [{module}](../{module}.md)."
    shown = f'<pre class="sn-code highlight">{code}</pre>'
    return f'{meta}{title}\n\n<div class="sidenotes">{shown}</div>\n'
