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
OF_MANY = {"contract", "numbers"}
# Where the page of a module stands: that of `headnotes.mha` is `source/mha.md`.
PACKAGES = {"headnotes": "", "attention_laws": "attention_laws/"}
PACKAGES |= {"attention_bench": "attention_bench/"}
SOURCES = [p for name in PACKAGES for p in sorted((ROOT / "src" / name).rglob("*.py"))]


def page_of(module: Path) -> str:
    """The page of a module, as a path below `source/`, without its suffix."""
    package, *inside = module.relative_to(ROOT / "src").with_suffix("").parts
    return PACKAGES[package] + "/".join(inside)


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
        "attention_laws": sorted((ROOT / "src" / "attention_laws").glob("*.py")),
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
        if module.stem != "__init__":
            literate = f"::literate {module.relative_to(ROOT).as_posix()}\n"
            add(files, config, f"source/{page_of(module)}.md", literate)
            add(files, config, f"source/{page_of(module)}.py", edition(module))

    for tests in sorted((ROOT / "tests").rglob("test_*.py")):
        inside = tests.relative_to(ROOT / "tests").with_suffix(".md")
        page = inside.with_name(inside.name.removeprefix("test_"))
        of_one = page.with_suffix("").as_posix() in map(page_of, SOURCES)
        if of_one or page.stem in OF_MANY:
            path = Path("source") / inside.parent / "tests" / inside.name
            add(files, config, path.as_posix(), listing(tests, page.stem, of_one))
    return files


def add(files: Files, config: MkDocsConfig, path: str, content: str) -> None:
    """Put a file into the site that is not in `docs/`."""
    files.append(File.generated(config, path, content=content))


def listing(tests: Path, name: str, of_one: bool) -> str:
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
    title = f"# Tests of `{name}`"
    if of_one:
        title += f"\n\nWhat they test: [{name}](../{name}.md)."
    shown = f'<pre class="sn-code highlight">{code}</pre>'
    return f'{meta}{title}\n\n<div class="sidenotes">{shown}</div>\n'
