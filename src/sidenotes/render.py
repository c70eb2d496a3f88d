"""Render sections as HTML: notes on the left, code on the right, shapes beside it."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape, unescape
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from markdown.util import AtomicString
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from sidenotes.split import Section

# Functions that add HTML, or Markdown text, to the page that is being converted.
Stash = Callable[[str], str]
Parse = Callable[[Element, str], None]

COMMENT = re.compile(r'<span class="c1">#(?P<text>.*)</span>$')
TAG = re.compile(r"<[^>]+>")


def render(
    parent: Element,
    sections: Sequence[Section],
    source: str,
    *,
    headings: bool,
    parse: Parse,
    stash: Stash,
    recorded: dict[str, Any] | None = None,
) -> Element:
    """Append `sections` of `source` to `parent`, as a grid of two columns.

    Recorded shapes are shown beside each line, and the recording is part of the page.
    """
    highlighted = highlight_lines(source)
    shapes = shape_column(recorded)
    blank = [not line.strip() for line in source.split("\n")]
    grid = SubElement(parent, "div", {"class": "sidenotes"})
    symbols: Counter[str] = Counter()
    for section in sections:
        kind = "sn-module" if section.is_module else "sn-section"
        row = SubElement(grid, "section", {"class": kind})

        shown = trim(section.code_lines, blank)
        hidden = sorted({*section.note_lines, *section.code_lines}.difference(shown))
        # Each line of the source has an anchor, also those of notes.
        anchors = "".join(f'<span id="L{n}"></span>' for n in hidden)
        note = SubElement(row, "div", {"class": "sn-note"})
        SubElement(note, "div", {"class": "sn-anchors"}).text = stash(anchors)
        if section.symbol and headings:
            depth = section.symbol.count(".")
            # A name may be defined twice, in two branches.
            symbols[section.symbol] += 1
            nth = symbols[section.symbol]
            anchor = section.symbol if nth == 1 else f"{section.symbol}-{nth}"
            heading = SubElement(note, f"h{min(2 + depth, 6)}", {"id": anchor})
            name = section.symbol.rpartition(".")[2]
            SubElement(heading, "code").text = AtomicString(name)
        for text in section.note:
            parse(note, text)

        if shown:
            code = SubElement(row, "pre", {"class": "sn-code highlight"})
            code.text = stash(
                "".join(line(n, highlighted[n - 1], shapes.get(n)) for n in shown)
            )
    if recorded and recorded["calls"]:
        shown_data = {name: recorded[name] for name in ("calls", "tensors")}
        text = json.dumps(shown_data, separators=(",", ":")).replace("</", r"<\/")
        data = f'<script type="application/json" class="sn-data">{text}</script>'
        SubElement(grid, "div", {"hidden": "hidden"}).text = stash(data)
    return grid


def shape_column(recorded: dict[str, Any] | None) -> dict[int, dict[str, Any]]:
    """For each line with a shape: the recorded shape, and the verdict on its claim."""
    if not recorded:
        return {}
    shapes = {int(number): seen for number, seen in recorded["lines"].items()}
    for verdict in ("checked", "weak"):
        for number in recorded[verdict]:
            shapes[number] = {"claim": verdict, **shapes.get(number, {})}
    return shapes


def highlight_lines(source: str) -> list[str]:
    r"""One HTML fragment per line, from a single pass, so that strings may span lines.

    >>> highlight_lines('x = 1\ny = 2')[1]
    '<span class="n">y</span> <span class="o">=</span> <span class="mi">2</span>'
    """
    lexer = PythonLexer(stripnl=False, ensurenl=False, tabsize=0)
    html: str = highlight(source, lexer, HtmlFormatter(nowrap=True))
    return html.split("\n")


def line(number: int, html: str, shape: dict[str, Any] | None = None) -> str:
    """One line of code, with its number as a link to itself, and its recorded shape.

    A shape comment is moved into the column of shapes. It remains part of the line, so
    that copying the line includes it; a recorded shape is not copied. The `#` of a
    comment becomes a tick if the comment is ok.
    """
    link = f'href="#L{number}" data-n="{number}" tabindex="-1" aria-hidden="true"'
    beside = ""
    if shape:
        comment = COMMENT.search(html) if "claim" in shape else None
        code = html[: comment.start()] if comment else html
        length = len(unescape(TAG.sub("", code)).expandtabs(4))
        begins = f' data-line="{shape["line"]}"' if "line" in shape else ""
        place = f'{begins} style="--at:{length}"'
        if comment:
            ticked = shape["claim"] == "checked"
            mark = '<span class="sn-mark">#</span>' if ticked else "#"
            text = f"{mark}{comment['text']}"
            html = f'{code}<span class="c1 sn-claim"{place}>{text}</span>'
        else:
            beside = f'<samp class="sn-shape"{place}>{escape(shape["text"])}</samp>'
    return f'<span id="L{number}"><a {link}></a>{html}\n</span>{beside}'


def trim(numbers: Sequence[int], blank: Sequence[bool]) -> list[int]:
    """Line numbers without blank lines at both ends."""
    filled = [n for n in numbers if not blank[n - 1]]
    return [n for n in numbers if filled and filled[0] <= n <= filled[-1]]


def toolbar(
    editions: dict[str, str],
    links: dict[str, str],
    tools: dict[str, str],
    stash: Stash,
) -> Element:
    """The toolbar of a module: links, copy buttons, and buttons of tools.

    A copy button is a link, too: the script copies the file to which it leads.
    """
    bar = Element("p", {"class": "sn-bar"})
    for kind, addresses in (("", links), (" sn-copy", editions)):
        for label, url in addresses.items():
            button = SubElement(bar, "a", {"href": url, "class": f"md-button{kind}"})
            button.text = label
    buttons = "".join(
        f'<button type="button" class="md-button {kind}" hidden>{label}</button>'
        for label, kind in tools.items()
    )
    SubElement(bar, "span").text = stash(buttons)
    return bar


def legend() -> Element:
    """The line that explains the shapes and check marks beside the code."""
    said = Element("p", {"class": "sn-legend"})
    said.text = (
        "The shapes beside the code come from running the examples on this page; "
        "\u2713 marks a shape comment that the run has confirmed. "
    )
    SubElement(said, "span").text = "Click a shape to step through the run."
    return said
