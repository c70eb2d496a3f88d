"""A lesson: a percent-format script, executed, as the Markdown of its page.

Markdown cells are prose, code cells are run in a kernel of their own, and what they
print or draw follows them. Figures become part of the page: drawn in the ink of the
text, they need no request and follow the theme.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import Any
from xml.etree import ElementTree

import jupytext
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

from sidenotes.cache import code_of, keep, place
from sidenotes.split import LiterateError, read

# Figures are drawn in this colour where they should take on the colour of the text.
INK = "#123456"

SVG = "http://www.w3.org/2000/svg"
XLINK = "{http://www.w3.org/1999/xlink}href"


def lesson(
    path: Path, *, depends_on: Iterable[Path], quotes: Iterable[Path] = (), cache: Path
) -> str:
    """The Markdown of the lesson at `path`, executed unless nothing has changed.

    What a lesson prints depends on its own text, on the code in `depends_on`, and on
    every word in `quotes`, whose comments and docstrings it prints.
    """
    key = hashlib.sha256(read(path).encode())
    for file in [*sorted(depends_on), Path(__file__)]:
        key.update(code_of(file))
    for file in sorted(quotes):
        key.update(file.read_bytes())
    stored = place(cache, path.stem, key.hexdigest(), ".md")
    if not stored.exists():
        keep(stored, to_markdown(execute(path), path))
    return stored.read_text(encoding="utf-8")


def execute(path: Path) -> Any:
    """Run all cells in a fresh kernel; the first that raises stops the build."""
    notebook = jupytext.reads(read(path), fmt="py:percent")
    with TemporaryDirectory() as sockets:
        # The kernel is spoken to through the file system, not through the network.
        talk = {"transport": "ipc", "ip": f"{sockets}/kernel"}
        client = NotebookClient(
            notebook,
            timeout=120,
            kernel_name="python3",
            extra_arguments=["--InlineBackend.figure_formats=svg"],
            config=Config({"KernelManager": talk}),
            resources={"metadata": {"path": str(path.parent)}},
        )
        try:
            client.execute()
        except CellExecutionError as error:
            plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # a terminal's colours
            raise LiterateError(f"{path}: a cell failed\n{plain}") from None
    return notebook


def to_markdown(notebook: Any, path: Path) -> str:
    """Prose as it is, code and text output fenced, figures in line.

    A code cell may say of itself: `alt="…"` describes its figure, `fold="…"` folds it
    under that title, `hide="true"` shows only what it prints or draws.
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
    """What a cell printed, then its tables and figures; `prefix` is for their ids."""
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
    """A fenced block, closed by a fence that `text` does not hold."""
    marks = "```"
    while marks in text:
        marks += "`"
    info = f"{{.{language} .{css_class}}}" if css_class else language
    return f"{marks}{info}\n{text}\n{marks}"


def inline_svg(svg: str, prefix: str, alt: str) -> str:
    """A figure as part of the page: ids of its own, the page's ink, a description."""
    ElementTree.register_namespace("", SVG)
    root = ElementTree.fromstring(svg)
    # A style sheet or an id inside a figure would speak for the whole page.
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            if name == "id":
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
