"""MkDocs hooks: downloads of the modules, and a page for the tests of each module."""

import io
import os
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from headnotes.cli import companions, copied_name, edition, modules

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
    """Add each module to copy, as `headnotes copy` gives it, and its tests."""
    copied = set(modules().values())
    pages = config.plugins["sidenotes"].pages
    for module, page in pages.items():
        folder = Path(page).parent
        if module not in copied:
            own = module.read_text(encoding="utf-8")
            add(files, config, f"{folder}/{module.name}", own)
            continue
        add(files, config, f"{folder}/{module.name}", edition(module))
        if needed := companions(module):
            name = copied_name(module).replace(".py", ".zip")
            add(files, config, f"{folder}/{name}", archive([module, *needed]))
        else:
            plain = edition(module, plain=True)
            add(files, config, f"{folder}/plain/{module.name}", plain)

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


def archive(paths: list[Path]) -> bytes:
    """The copies of some modules in one file, which is the same at each build."""
    content = io.BytesIO()
    with ZipFile(content, "w") as archive:
        for path in paths:
            archive.writestr(ZipInfo(copied_name(path)), edition(path))
    return content.getvalue()


def add(files: Files, config: MkDocsConfig, path: str, content: str | bytes) -> None:
    """Put a file into the site that is not in `docs/`."""
    files.append(File.generated(config, path, content=content))


def listing(tests: Path, name: str, of_one: bool) -> str:
    """The page of a file of tests."""
    lines = ["---", "search: {exclude: true}", "---", f"# Tests of `{name}`", ""]
    if of_one:
        lines += [f"What they test: [{name}](../{name}.md).", ""]
    lines += [f"::listing {tests.relative_to(ROOT).as_posix()}", ""]
    return "\n".join(lines)
