"""Render sections as HTML: notes on the left, code on the right, shapes beside it."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape, unescape
from itertools import groupby
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

# The contract of a definition begins with its errors or its source, or with its first
# example and the sentence that introduces it.
CONTRACT = re.compile(r"\n\n(?=Raises |Source: |>>> |(?:.+\n)*.*:\n\n>>> )")


@dataclass
class Renderer:
    """Writes the sections of one source into its page.

    Without `headings` they are an excerpt, a part of a page that has its own.
    """

    source: str
    headings: bool
    parse: Parse
    stash: Stash
    recorded: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.highlighted = highlight_lines(self.source)
        self.shapes = shape_column(self.recorded)
        self.blank = [not line.strip() for line in self.source.split("\n")]
        self.names: Counter[str] = Counter()

    def render(self, parent: Element, sections: Iterable[Section]) -> Element:
        """Append `sections` to `parent`, as a grid of two columns.

        What was recorded of a run is shown beside each line, and travels with the page.
        """
        grid = SubElement(parent, "div", {"class": "sidenotes"})
        for title, region in groupby(sections, key=lambda section: section.region):
            inside = list(region)
            place = self.region(grid, title, inside) if title else grid
            for row in rows(inside):
                self.row(place, row)
        if self.recorded and self.recorded["calls"]:
            shown_data = {name: self.recorded[name] for name in ("calls", "tensors")}
            text = json.dumps(shown_data, separators=(",", ":")).replace("</", r"<\/")
            data = f'<script type="application/json" class="sn-data">{text}</script>'
            SubElement(grid, "div", {"hidden": "hidden"}).text = self.stash(data)
        return grid

    def region(self, grid: Element, title: str, inside: list[Section]) -> Element:
        """A folded part of the grid, below its title and the names that it defines."""
        if self.headings:
            anchor = self.anchor(re.sub(r"\W+", "-", title.lower()))
            SubElement(grid, "h2", {"id": anchor}).text = title
        place = SubElement(grid, "details", {"class": "sn-region"})
        names = [s.symbol for s in inside if s.symbol and "." not in s.symbol]
        summary = AtomicString(", ".join(names) or title)
        SubElement(place, "summary").text = summary
        return place

    def row(self, place: Element, sections: Sequence[Section]) -> None:
        """Append a row: the note of its first section, and the code of all."""
        first = sections[0]
        kind = "sn-module" if first.is_module else "sn-section"
        row = SubElement(place, "section", {"class": kind})
        shown = trim([n for each in sections for n in each.code_lines], self.blank)
        lines = {n for each in sections for n in (*each.note_lines, *each.code_lines)}

        note = SubElement(row, "div", {"class": "sn-note"})
        anchors = SubElement(note, "div", {"class": "sn-anchors"})
        if first.symbol and self.headings:
            self.heading(note, first)
            for other in sections[1:]:
                SubElement(anchors, "span", {"id": self.anchor(other.symbol)})
        folded = self.write(note, first)
        anchors.text = self.line_anchors(lines.difference(shown, folded))

        if shown:
            code = SubElement(row, "pre", {"class": "sn-code highlight"})
            code.text = self.stash(
                "".join(
                    line(n, self.highlighted[n - 1], self.shapes.get(n)) for n in shown
                )
            )

    def heading(self, note: Element, section: Section) -> None:
        """The name of a definition, one level below what it is defined in."""
        level = 2 + section.symbol.count(".") + bool(section.region)
        anchor = self.anchor(section.symbol)
        heading = SubElement(note, f"h{min(level, 6)}", {"id": anchor})
        name = section.symbol.rpartition(".")[2]
        SubElement(heading, "code").text = AtomicString(name)

    def write(self, note: Element, section: Section) -> list[int]:
        """Write a note; the contract of a definition is folded below its first words.

        The result is the lines of the contract.
        """
        folded = []
        for text in section.note:
            cut = CONTRACT.search(text) if section.symbol else None
            self.parse(note, text[: cut.start()] if cut else text)
            if cut:
                contract = text[cut.end() :]
                # A docstring is the last of its notes; its quotes may end on a line of
                # their own.
                folded = section.note_lines[-contract.count("\n") - 2 :]
                details = SubElement(note, "details", {"class": "sn-contract"})
                SubElement(details, "summary").text = contract_label(contract)
                anchors = SubElement(details, "div", {"class": "sn-anchors"})
                anchors.text = self.line_anchors(folded)
                self.parse(details, contract)
        return folded

    def anchor(self, name: str) -> str:
        """The name as an id: a page may define it twice, in each of two branches."""
        self.names[name] += 1
        nth = self.names[name]
        return name if nth == 1 else f"{name}-{nth}"

    def line_anchors(self, numbers: Iterable[int]) -> str:
        """Each line of the source can be linked to, also those that became prose."""
        return self.stash("".join(f'<span id="L{n}"></span>' for n in sorted(numbers)))


def rows(sections: Iterable[Section]) -> list[list[Section]]:
    """Sections by row: an `__init__` without a note continues the row of its class."""
    joined: list[list[Section]] = []
    for section in sections:
        above = joined[-1][-1].symbol if joined else ""
        if above and section.symbol == f"{above}.__init__" and not section.note:
            joined[-1].append(section)
        else:
            joined.append([section])
    return joined


def contract_label(contract: str) -> str:
    """What a contract contains.

    >>> contract_label("Raises `ValueError` for a negative number. Source: Euler.")
    'Errors, source'
    """
    parts = {"Raises ": "errors", "Source: ": "source", ">>> ": "examples"}
    return ", ".join(parts[mark] for mark in parts if mark in contract).capitalize()


def shape_column(recorded: dict[str, Any] | None) -> dict[int, dict[str, Any]]:
    """For each line with a shape: the recorded shape, and the verdict on its claim."""
    if not recorded:
        return {}
    shapes = {int(number): seen for number, seen in recorded["lines"].items()}
    for verdict in ("checked", "unverified"):
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
    comment becomes a tick if the comment is verified.
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
    indent = len(html) - len(html.lstrip(" "))
    wraps = f' style="--in:{indent}"' if indent else ""
    return f'<span id="L{number}"{wraps}><a {link}></a>{html}{beside}\n</span>'


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
    paragraph = Element("p", {"class": "sn-legend"})
    paragraph.text = (
        "The shapes beside the code come from running the examples on this page; "
        "\u2713 marks a shape comment that the run has confirmed. "
    )
    SubElement(paragraph, "span").text = "Click a shape to step through the run."
    return paragraph
