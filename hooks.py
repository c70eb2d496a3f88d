"""MkDocs hooks: downloads, install commands, and a page for each module's tests."""

import ast
import hashlib
import io
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urljoin
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import jupytext
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from headnotes.cli import archive_name, companions, copied_name, edition, modules
from sidenotes.cache import ENVIRONMENT, cached, hash_of, path_for

ROOT = Path(__file__).parent
# Tests that belong to no single module, and are linked to.
OF_MANY = {"contract", "numbers"}
# The folders whose wheels and source archives the site carries.
DISTRIBUTIONS = (ROOT, ROOT / "src" / "sidenotes")
# Links between pages, and the times of drawing in a figure.
PAGE_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)\s]*)\)")
DRAWN = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
# The first cell of a notebook that is downloaded.
FIRST_CELL = """\
# This notebook needs: pip install {packages}
import importlib.util

needed = {needed}
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    raise ModuleNotFoundError(
        f"{{', '.join(missing)}} not found; run: pip install {packages}"
    )
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set up kernels and links to edit a page; begin to build the distributions."""
    os.environ["MATPLOTLIBRC"] = str(ROOT / "docs" / "matplotlibrc")
    # Their tensors are small: threads would wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # In a fork, PyTorch's profiler warns of memory that was allocated before it began.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    builds()
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    return config


@cache
def builds() -> tuple[TemporaryDirectory[str], list[subprocess.Popen[str]]]:
    """The processes that build the distributions, beside the lessons, into a folder."""
    folder = TemporaryDirectory()
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder.name]
    return folder, [
        subprocess.Popen(command, cwd=source, stdout=PIPE, stderr=PIPE, text=True)
        for source in DISTRIBUTIONS
    ]


@cache
def distributions() -> dict[str, bytes]:
    """Wheels and source archives by file name, built once for each run of MkDocs.

    The same sources give the same bytes: hatchling fixes the times in the archives.
    """
    folder, processes = builds()
    for source, process in zip(DISTRIBUTIONS, processes, strict=True):
        _, errors = process.communicate()
        if process.returncode:
            raise PluginError(f"{source} cannot be built:\n{errors}")
    with folder:
        files = sorted(Path(folder.name).iterdir())
        return {path.name: path.read_bytes() for path in files}


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Fill in what only the build knows: `{{ headnotes }}` is where its wheel is."""
    for name, text in blanks(config.site_url or "", config.repo_url or "").items():
        markdown = markdown.replace(f"{{{{ {name} }}}}", text)
    return markdown


@cache
def blanks(site_url: str, repo_url: str) -> dict[str, str]:
    """What stands for each `{{ name }}` in a page.

    Without the address of the site, pip gets the name of a downloaded file.
    """
    folder = f"{site_url}dist/" if site_url else ""
    wheels = [name for name in distributions() if name.endswith(".whl")]
    archive = next(name for name in distributions() if name.endswith(".tar.gz"))
    return {
        **{name.partition("-")[0]: folder + name for name in wheels},
        "archive": archive,
        "folder": archive.removesuffix(".tar.gz"),
        "files": files_table(),
        "repository": repository(repo_url),
    }


def files_table() -> str:
    """A row for each distribution file: its size, and the hash of its bytes."""
    rows = ["| file | KB | SHA-256 |", "|---|--:|---|"]
    for name, content in distributions().items():
        size, digest = len(content) / 1000, hashlib.sha256(content).hexdigest()
        rows.append(f"| [{name}](dist/{name}) | {size:,.0f} | `{digest}` |")
    return "\n".join(rows)


def repository(url: str) -> str:
    """How to get the sources with their history, if the repository is known."""
    if not url:
        return ""
    url = url.rstrip("/")
    return (
        f"The sources with their history are in the [repository]({url}); problems are "
        f"reported in its [issues]({url}/issues).\n\n"
        f"```console\n$ git clone {url} headnotes\n```"
    )


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add distributions, notebooks, modules as they are copied, and their tests."""
    for name, packed in distributions().items():
        add(files, config, f"dist/{name}", packed)
    for name, content in notebooks(config).items():
        add(files, config, f"notebooks/{name}", content)
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
            name = archive_name(module)
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

    made_from = {page: f"../{m.relative_to(ROOT)}" for m, page in pages.items()}
    for file in files.documentation_pages():
        lesson = Path(file.src_uri).with_suffix(".py")
        if file.src_uri in made_from:
            file.edit_uri = made_from[file.src_uri]
        elif (ROOT / "docs" / lesson).is_file():
            file.edit_uri = lesson.as_posix()
    return files


def archive(paths: list[Path]) -> bytes:
    """The copies of some modules in one file."""
    return zipped(tuple((copied_name(path), edition(path)) for path in paths))


@cache  # for a served site, which is built after each change
def zipped(texts: tuple[tuple[str, str], ...]) -> bytes:
    """Some files in one, which is the same at each build."""
    content = io.BytesIO()
    with ZipFile(content, "w", ZIP_DEFLATED) as file:
        for name, text in texts:
            file.writestr(ZipInfo(name), text, ZIP_DEFLATED)
    return content.getvalue()


def notebooks(config: MkDocsConfig) -> dict[str, str | bytes]:
    """Executed lessons, and exercises, as notebooks and scripts; all in one file."""
    executed = config.plugins["sidenotes"].notebooks
    found = {page: text for page, text in executed.items() if page.startswith("learn/")}
    for path in (ROOT / "docs" / "exercises").glob("[0-9][0-9]_*.py"):
        found[f"exercises/{path.name}"] = path.read_text(encoding="utf-8")
    folder = config.plugins["sidenotes"].cache / "hooks"
    texts = {}
    site_url = config.site_url or ""
    parts = [Path(__file__).read_bytes(), ENVIRONMENT, site_url, wheel(site_url)]
    for page, text in sorted(found.items()):
        key = hash_of([*parts, page, text])
        stored = path_for(folder, page.replace("/", "-"), key, ".json")
        made = cached(stored, notebook, page, text, site_url)
        name = page.rpartition(".")[0]
        for suffix, content in made.items():
            texts[f"{name}{suffix}"] = content
    return {**texts, "headnotes-notebooks.zip": zipped(tuple(texts.items()))}


def notebook(page: str, text: str, site_url: str) -> dict[str, str]:
    """A lesson or an exercise that runs by itself, as a notebook and as a script."""
    if page.endswith(".py"):
        made = jupytext.reads(text, fmt="py:percent")
    else:
        made = nbformat.reads(text, as_version=4)
    complete(made, page, site_url)
    return {
        ".ipynb": nbformat.writes(made) + "\n",
        ".py": jupytext.writes(made, fmt="py:percent"),
    }


def complete(notebook: Any, page: str, site_url: str) -> None:
    """Make a notebook run by itself, and the same at each build."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    first = nbformat.v4.new_code_cell(first_cell("\n".join(code), site_url))
    notebook.cells.insert(0, first)
    address = urljoin(site_url, page)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata.pop("execution", None)  # when it ran
        if cell.cell_type == "markdown":
            cell.source = PAGE_LINK.sub(
                lambda link: outside(link, address) if site_url else link[1],
                cell.source,
            )
        for output in cell.get("outputs", []):
            if figure := output.get("data", {}).get("image/svg+xml"):
                output.data["image/svg+xml"] = DRAWN.sub("", figure)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": kernel, "jupytext": {"notebook_metadata_filter": "-all"}}
    )


def first_cell(code: str, site_url: str) -> str:
    """A cell that names what the code imports, and checks that it is installed."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    if "headnotes.plots" in names:
        names.add("matplotlib")
    if any(name.startswith("headnotes.models") for name in names):
        names |= {"babel", "safetensors"}
    needed = {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names}
    # Jupyter brings IPython, and Headnotes brings PyTorch and the laws.
    others = needed & {"babel", "labml", "matplotlib", "safetensors"}
    if "matplotlib" not in others:
        others.add("numpy")  # without it, PyTorch warns when it is imported
    packages = " ".join([wheel(site_url), *sorted(others)])
    return FIRST_CELL.format(packages=packages, needed=sorted(needed)).rstrip()


def wheel(site_url: str) -> str:
    """What pip installs: the address of the wheel, or its name."""
    return blanks(site_url, "")["headnotes"]


def outside(link: re.Match[str], address: str) -> str:
    """A link from a notebook to a page of the site."""
    target = re.sub(r"\.(md|py)(?=#|$)", ".html", link[2])
    return f"[{link[1]}]({urljoin(address, target)})"


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
