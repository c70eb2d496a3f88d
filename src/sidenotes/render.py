"""Sections to HTML: notes on the left, highlighted code on the right."""

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from xml.etree.ElementTree import Element, SubElement

from markdown.util import AtomicString
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from sidenotes.split import Section

# Both take HTML or Markdown text into the page that is being converted.
Stash = Callable[[str], str]
Parse = Callable[[Element, str], None]


def render(
    parent: Element,
    sections: Sequence[Section],
    source: str,
    *,
    headings: bool,
    parse: Parse,
    stash: Stash,
) -> Element:
    """Append `sections` of `source` to `parent`, as a grid of two columns."""
    highlighted = highlight_lines(source)
    blank = [not line.strip() for line in source.split("\n")]
    grid = SubElement(parent, "div", {"class": "sidenotes"})
    symbols: Counter[str] = Counter()
    for section in sections:
        kind = "sn-module" if section.is_module else "sn-section"
        row = SubElement(grid, "section", {"class": kind})

        shown = trim(section.code_lines, blank)
        hidden = sorted({*section.note_lines, *section.code_lines}.difference(shown))
        # Each line of the source can be linked to, also those that became prose.
        anchors = "".join(f'<span id="L{n}"></span>' for n in hidden)
        note = SubElement(row, "div", {"class": "sn-note"})
        SubElement(note, "div", {"class": "sn-anchors"}).text = stash(anchors)
        if section.symbol and headings:
            depth = section.symbol.count(".")
            # A name may be defined in each of two branches.
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
            code.text = stash("".join(line(n, highlighted[n - 1]) for n in shown))
    return grid


def highlight_lines(source: str) -> list[str]:
    r"""One HTML fragment a line, from a single pass, so that strings may span lines.

    >>> highlight_lines('x = 1\ny = 2')[1]
    '<span class="n">y</span> <span class="o">=</span> <span class="mi">2</span>'
    """
    lexer = PythonLexer(stripnl=False, ensurenl=False, tabsize=0)
    html: str = highlight(source, lexer, HtmlFormatter(nowrap=True))
    return html.split("\n")


def line(number: int, html: str) -> str:
    """One line of code, with its number as a link to itself."""
    link = f'href="#L{number}" data-n="{number}" tabindex="-1" aria-hidden="true"'
    return f'<span id="L{number}"><a {link}></a>{html}\n</span>'


def trim(numbers: Sequence[int], blank: Sequence[bool]) -> list[int]:
    """Line numbers without the blank ones at either end."""
    kept = [n for n in numbers if not blank[n - 1]]
    return [n for n in numbers if kept and kept[0] <= n <= kept[-1]]


def toolbar(editions: dict[str, str], links: dict[str, str], stash: Stash) -> Element:
    """What can be done with the module: copy one of its editions, follow a link."""
    bar = Element("p", {"class": "sn-bar"})
    for label, url in links.items():
        SubElement(bar, "a", {"href": url, "class": "md-button"}).text = label
    # The texts travel inside the page: no request, so that copying works from a file.
    buttons = "".join(
        f'<button type="button" class="md-button" hidden>{escape(label)}'
        f"<textarea hidden>{escape(text)}</textarea></button>"
        for label, text in editions.items()
    )
    SubElement(bar, "span").text = stash(buttons)
    return bar
