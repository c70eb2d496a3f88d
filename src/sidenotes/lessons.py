"""A lesson: a percent-format script, executed, as the Markdown of its page.

Markdown cells are prose, code cells are run in a kernel of their own, and what they
print or draw follows them. Figures become part of the page: drawn in the ink of the
text, they need no request and follow the theme.
"""

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jupytext
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from sidenotes.split import LiterateError, read

# Figures are drawn in this colour where they should take on the colour of the text.
INK = "#123456"

SVG = "http://www.w3.org/2000/svg"
XLINK = "{http://www.w3.org/1999/xlink}href"


def lesson(path: Path, *, depends_on: Iterable[Path], cache: Path) -> str:
    """The Markdown of the lesson at `path`, executed unless nothing has changed.

    What a lesson prints depends on its own text and on the files in `depends_on`. In
    Python sources only code counts: no lesson prints a comment or a docstring.
    """
    key = hashlib.sha256(read(path).encode())
    for file in [*sorted(depends_on), Path(__file__)]:
        key.update(code_of(file))
    stored = cache / f"{path.stem}-{key.hexdigest()[:16]}.md"
    if not stored.exists():
        markdown = to_markdown(execute(path), path)
        cache.mkdir(parents=True, exist_ok=True)
        for outdated in cache.glob(f"{path.stem}-*.md"):
            outdated.unlink()
        stored.write_text(markdown, encoding="utf-8")
    return stored.read_text(encoding="utf-8")


def code_of(file: Path) -> bytes:
    """What in a file can change a result: of Python the code, else every byte."""
    if file.suffix != ".py":
        return file.read_bytes()
    tree = ast.parse(read(file))
    for node in ast.walk(tree):
        documented = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree).encode()


def execute(path: Path) -> Any:
    """Run all cells in a fresh kernel; the first that raises stops the build."""
    notebook = jupytext.reads(read(path), fmt="py:percent")
    client = NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        extra_arguments=["--InlineBackend.figure_formats=svg"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise LiterateError(f"{path}: a cell failed\n{error}") from None
    return notebook


def to_markdown(notebook: Any, path: Path) -> str:
    """Prose as it is, code and text output fenced, figures in line."""
    parts: list[str] = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(fence(cell.source, "python"))
        text = ""
        for output in cell.outputs:
            data = output.get("data", {})
            if output.output_type == "stream" and output.name == "stdout":
                text += output.text
            elif "image/svg+xml" in data:
                alt = cell.metadata.get("alt")
                if not alt:
                    reason = 'its figure needs a description: # %% alt="…"'
                    raise LiterateError(f"{path}: cell {number}: {reason}")
                prefix = f"{path.stem}-{number}-"
                figure = inline_svg(data["image/svg+xml"], prefix, alt)
                parts.append(f'<figure class="lesson-figure">{figure}</figure>')
            elif "text/plain" in data:
                text += f"{data['text/plain']}\n"
            else:
                seen = output.get("text") or output.output_type
                raise LiterateError(f"{path}: cell {number}: unexpected output: {seen}")
        if text:
            parts.append(fence(text.rstrip("\n"), "text", "lesson-output"))
    return "\n\n".join(parts) + "\n"


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
