"""MkDocs hooks: downloads of the modules, and a page for the tests of each module."""

import os
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from headnotes.cli import edition, modules

ROOT = Path(__file__).parent
# Tests that belong to no single module, and are linked to.
OF_MANY = {"contract", "numbers"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set up the kernels of the lessons."""
    os.environ["MATPLOTLIBRC"] = str(ROOT / "docs" / "matplotlibrc")
    # Their tensors are small: threads would wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add each module to download, as `headnotes copy` gives it, and its tests."""
    copied = set(modules().values())
    pages = config.plugins["sidenotes"].pages
    for module, page in pages.items():
        own = module.read_text(encoding="utf-8")
        download = edition(module) if module in copied else own
        add(files, config, page.removesuffix(".md") + ".py", download)

    for tests in sorted((ROOT / "tests").rglob("test_*.py")):
        inside = tests.relative_to(ROOT / "tests").with_suffix(".md")
        name = inside.stem.removeprefix("test_")
        module_page = Path("source") / inside.with_name(f"{name}.md")
        of_one = module_page.as_posix() in pages.values()
        if of_one or name in OF_MANY:
            page = Path("source") / inside.parent / "tests" / inside.name
            content = listing(tests, name, of_one)
            add(files, config, page.as_posix(), content)
    return files


def add(files: Files, config: MkDocsConfig, path: str, content: str) -> None:
    """Put a file into the site that is not in `docs/`."""
    files.append(File.generated(config, path, content=content))


def listing(tests: Path, name: str, of_one: bool) -> str:
    """The page of a file of tests."""
    lines = ["---", "search: {exclude: true}", "---", f"# Tests of `{name}`", ""]
    if of_one:
        lines += [f"What they test: [{name}](../{name}.md).", ""]
    lines += [f"::listing {tests.relative_to(ROOT).as_posix()}", ""]
    return "\n".join(lines)
