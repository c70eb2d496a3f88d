"""The Markdown extension: a line `::literate src/package/module.py` becomes its page.

`::literate src/package/module.py#Class.method` shows that definition only. Beside the
directive the extension fences doctests and turns LaTeX into MathML, everywhere.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from markdown import Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions import Extension

from sidenotes.doctests import FenceDoctests
from sidenotes.mathml import MathML
from sidenotes.record import recording
from sidenotes.render import render, toolbar
from sidenotes.sizes import panel
from sidenotes.split import LiterateError, read, split

DIRECTIVE = re.compile(r"::literate[ ]+(?P<path>[^#\s]+)(#(?P<symbol>\S+))?\s*$")


class SidenotesExtension(Extension):
    """Options: where sources lie, what the bar above them offers, which are run."""

    def __init__(self, **options: Any) -> None:
        self.config = {
            "root": [".", "Folder that the paths in directives start from"],
            "editions": [no_editions, "From a source's path, texts to copy, by label"],
            "links": [{}, "Links by label; {stem} stands for the module's name"],
            "depends_on": [
                [],
                "Patterns of files: modules to run, what they depend on",
            ],
            "setup": ["", "Statements before each run: whoever draws numbers, seeds"],
            "cache": [".cache/traces", "Folder for what was recorded of the runs"],
            "sizes": [{}, "By source, the sizes that a reader may change on its page"],
        }
        super().__init__(**options)

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Register the directive, the doctests and the maths."""
        md.preprocessors.register(FenceDoctests(md), "sidenotes-doctests", 28)
        md.parser.blockprocessors.register(
            Literate(md, **self.getConfigs()), "sidenotes-literate", 200
        )
        md.treeprocessors.register(MathML(md), "sidenotes-mathml", 15)


def no_editions(path: Path) -> dict[str, str]:
    """Offer nothing to copy."""
    return {}


class Literate(BlockProcessor):
    """Replaces the directive by the annotated source that it names."""

    def __init__(
        self,
        md: Markdown,
        root: str,
        editions: Callable[[Path], dict[str, str]],
        links: dict[str, str],
        depends_on: list[str],
        setup: str,
        cache: str,
        sizes: dict[str, dict[str, Any]],
    ) -> None:
        super().__init__(md.parser)
        self.md = md
        self.root = Path(root)
        self.editions = editions
        self.links = links
        self.depends_on = depends_on
        self.setup = setup
        self.cache = self.root / cache
        self.sizes = sizes

    def test(self, parent: Element, block: str) -> bool:
        return block.startswith("::literate")

    def run(self, parent: Element, blocks: list[str]) -> None:
        block = blocks.pop(0)
        match = DIRECTIVE.match(block)
        if match is None:
            usage = "`::literate path/to/module.py` or `…py#symbol`, alone on its line"
            raise LiterateError(f"cannot read {block!r}; write {usage}")
        path, symbol = self.root / match["path"], match["symbol"]

        source = read(path)
        sections = split(source, path)
        if symbol:
            inside = [s for s in sections if f"{s.scope}.".startswith(f"{symbol}.")]
            if not inside:
                raise LiterateError(f"{path}:1: there is no `{symbol}` in this file")
            sections = inside
        stash = self.md.htmlStash.store
        # An excerpt is part of another page, which has headings of its own.
        grid = render(
            parent,
            sections,
            source,
            headings=not symbol,
            parse=self.parse,
            stash=stash,
            recorded=None if symbol else self.recorded(path),
        )
        sizes = None if symbol else self.sizes.get(match["path"])
        if sizes:
            place = SubElement(grid, "div", {"class": "sn-foot"})
            place.text = stash(panel(sizes))

        note = grid.find(".//h1/..")
        if note is not None and not symbol:
            links = {k: v.format(stem=path.stem) for k, v in self.links.items()}
            bar = toolbar(self.editions(path), links, bool(sizes), stash)
            below_title = [child.tag for child in note].index("h1") + 1
            note.insert(below_title, bar)

    def recorded(self, path: Path) -> dict[str, Any] | None:
        """What the module's examples have shown, where the site runs them."""
        files = [f for pattern in self.depends_on for f in self.root.glob(pattern)]
        return recording(path, depends_on=files, setup=self.setup, cache=self.cache)

    def parse(self, parent: Element, text: str) -> None:
        """Convert a note with all that the site has configured for its pages."""
        lines = text.split("\n")
        for preprocessor in self.md.preprocessors:
            lines = preprocessor.run(lines)
        self.parser.parseChunk(parent, "\n".join(lines))


def makeExtension(**options: Any) -> SidenotesExtension:  # noqa: N802
    """What Python-Markdown looks for in a module named as an extension."""
    return SidenotesExtension(**options)
