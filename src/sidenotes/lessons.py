"""Execute a lesson, a script in the percent format, and write it as Markdown.

Markdown cells are copied. Code cells are executed in one kernel per lesson, and their
output and figures follow them. Figures are embedded in the page as SVG; lines in the
color `INK` get the color of the text.
"""

import asyncio
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import Any, NamedTuple
from xml.etree import ElementTree

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from sidenotes.cache import ENVIRONMENT, hash_of, load, path_for, store
from sidenotes.kernels import Kernels
from sidenotes.split import LiterateError, read

LOG = logging.getLogger("mkdocs.plugins.sidenotes")

# Lines of a figure in this color get the color of the text.
INK = "#123456"

# This file as it was when the process loaded it.
CONVERTER = Path(__file__).read_bytes()

SVG = "http://www.w3.org/2000/svg"
XLINK = "{http://www.w3.org/1999/xlink}href"


class Lesson(NamedTuple):
    """An executed lesson, as Markdown and as the JSON of a Jupyter notebook."""

    markdown: str
    notebook: str


def lesson(
    path: Path, *, kernels: Kernels, inputs: Iterable[Path] = (), cache: Path
) -> Lesson:
    """The executed lesson at `path`, from the cache if nothing has changed.

    The output of a lesson depends on its text, on the `setup` of the kernels, on the
    code of the files that it imports, on all bytes of the files in
    `inputs`, and on installed packages.
    """
    parts: list[str | bytes] = [read(path), kernels.setup, ENVIRONMENT, CONVERTER]
    imports = kernels.imports
    parts += [imports.code(file) for file in sorted(imports.of(path))]
    parts += [file.read_bytes() for file in sorted(inputs)]
    stored = path_for(cache, path.stem, hash_of(parts), ".md")
    text, notebook = load(stored), load(stored.with_suffix(".ipynb"))
    if text is None or notebook is None:
        LOG.info("Executing %s", path.name)
        executed = execute(path, kernels)
        text = to_markdown(executed, path)
        notebook = nbformat.writes(executed)  # type: ignore[no-untyped-call]
        store(stored, text)
        store(stored.with_suffix(".ipynb"), notebook)
    return Lesson(text, notebook)


def execute(path: Path, kernels: Kernels) -> Any:
    """Run all cells in a new kernel; the first error stops the build."""
    notebook = jupytext.reads(read(path), fmt="py:percent")
    with TemporaryDirectory() as sockets:
        client = NotebookClient(
            notebook,
            # Messages go through the file system: no port is opened.
            km=kernels.manager(transport="ipc", ip=f"{sockets}/kernel"),
            timeout=300,
            extra_arguments=["--InlineBackend.figure_formats=svg"],
            resources={"metadata": {"path": str(path.parent)}},
        )
        try:
            # Each thread has its own event loop, which is closed at the end.
            run = client.async_execute(env=kernels.environment, cleanup_kc=True)
            asyncio.run(run)
        except (CellExecutionError, DeadKernelError) as error:
            plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # colors of a terminal
            raise LiterateError(f"{path}: a cell failed\n{plain}") from None
    return notebook


def to_markdown(notebook: Any, path: Path) -> str:
    """Copy Markdown cells, fence code and printed text, and embed figures.

    Options of a code cell, on its first line: `alt="…"` describes its figure,
    `fold="…"` folds it under that title, `hide="true"` shows only its output and
    figures.
    """
    parts: list[str] = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        place = f"{path}: cell {number}"
        shown = [] if cell.metadata.get("hide") else [fence(cell.source, "python")]
        shown += outputs(cell, f"{path.stem}-{number}-", place)
        block = "\n\n".join(shown)
        if title := cell.metadata.get("fold"):
            block = f'??? example "{title}"\n\n{indent(block, "    ")}'
        parts.append(block)
    return "\n\n".join(parts) + "\n"


def outputs(cell: Any, prefix: str, place: str) -> list[str]:
    """The printed text of a cell, then its tables and figures; `prefix` is for ids."""
    text = ""
    rest: list[str] = []  # tables, as Markdown, and figures
    for output in cell.outputs:
        data = output.get("data", {})
        if output.output_type == "stream" and output.name == "stdout":
            text += output.text
        elif "image/svg+xml" in data:
            if not cell.metadata.get("alt"):
                reason = 'the figure needs a description: # %% alt="…"'
                raise LiterateError(f"{place}: {reason}")
            ids = f"{prefix}{len(rest)}-"
            svg = inline_svg(data["image/svg+xml"], ids, cell.metadata["alt"])
            rest.append(f'<figure class="lesson-figure">{svg}</figure>')
        elif "text/markdown" in data:
            rest.append(data["text/markdown"])
        elif "text/plain" in data:
            text += f"{data['text/plain']}\n"
        else:
            seen = output.get("text") or output.output_type
            raise LiterateError(f"{place}: unexpected output: {seen}")
    printed = [fence(text.rstrip("\n"), "text", "lesson-output")] if text else []
    return printed + rest


def fence(text: str, language: str, css_class: str = "") -> str:
    """A fenced block, with a fence that does not occur in `text`."""
    marks = "```"
    while marks in text:
        marks += "`"
    info = f"{{.{language} .{css_class}}}" if css_class else language
    return f"{marks}{info}\n{text}\n{marks}"


def inline_svg(svg: str, prefix: str, alt: str) -> str:
    """Embed a figure in the page: unique ids, the color of the text, a description."""
    ElementTree.register_namespace("", SVG)
    root = ElementTree.fromstring(svg)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    # A style sheet or an id inside a figure would apply to the whole page.
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            if name == "id" and value not in used:  # most have one
                del element.attrib[name]
            elif name == "id":
                element.set(name, f"{prefix}{value}")
            elif name == XLINK:
                del element.attrib[name]
                element.set("href", f"#{prefix}{value[1:]}")
            elif "url(#" in value:
                element.set(name, value.replace("url(#", f"url(#{prefix}"))
    root.set("role", "img")
    root.set("aria-label", alt)
    text = ElementTree.tostring(root, encoding="unicode")
    return " ".join(text.replace(INK, "currentColor").split())
