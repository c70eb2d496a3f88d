"""The Markdown extension: a line `::literate src/package/module.py` becomes its page.

`::literate src/package/module.py#Class.method` shows that definition only, and
`::listing tests/test_module.py` shows a file as it is. The extension also fences
doctests and turns LaTeX into MathML, on every page.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from markdown import Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions import Extension

from sidenotes.dependencies import dependencies
from sidenotes.doctests import FenceDoctests
from sidenotes.mathml import MathML
from sidenotes.record import excerpt, location, recording
from sidenotes.render import highlight_lines, line, render, toolbar
from sidenotes.sizes import panel
from sidenotes.split import UNREADABLE, LiterateError, named, read, split

DIRECTIVE = re.compile(
    r"::(?P<kind>literate|listing)[ ]+(?P<path>[^#\s]+)(#(?P<symbol>\S+))?\s*$"
)

# What the pages are written in. The extension adds those that the site does not name.
REQUIRED: dict[str, dict[str, Any]] = {
    "attr_list": {},
    "md_in_html": {},
    "pymdownx.arithmatex": {"generic": True},
    "pymdownx.details": {},
    "pymdownx.superfences": {},
}


def no_editions(path: Path) -> dict[str, str]:
    """Offer nothing to copy."""
    return {}


class SidenotesExtension(Extension):
    """The options of the extension, and what it adds to a Markdown converter."""

    # The MkDocs plugin sets this: it adds the style sheet and the script to each page.
    in_plugin = False

    def __init__(self, **options: Any) -> None:
        self.config = {
            "root": [".", "Folder that all other paths start from"],
            "execute": [
                [],
                "Patterns of modules (`src/**/*.py`) whose doctest examples are "
                "executed, to show the shapes and values that each line computes",
            ],
            "import_roots": [
                ["src", "."],
                "Folders that hold the packages which these modules import",
            ],
            "setup": [
                "",
                "Statements before the examples of a module, such as a random seed",
            ],
            "cache": [".cache/sidenotes/recordings", "Folder for what was recorded"],
            "editions": [
                no_editions,
                "Function from a module's path to texts to copy, by label; they depend "
                "on the module and on what it imports",
            ],
            "links": [{}, "Links by label; {stem} stands for the module's name"],
            "sizes": [{}, "By module, the sizes that a reader can change on its page"],
        }
        super().__init__(**options)

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Register the required extensions, the directives, doctests and maths."""
        # An extension that the site configures in its own way stays as it is.
        present = {type(extension).__module__ for extension in md.registeredExtensions}
        for name, options in REQUIRED.items():
            if not {name, f"markdown.extensions.{name}"} & present:
                md.registerExtensions([name], {name: options})
        md.preprocessors.register(FenceDoctests(md), "sidenotes-doctests", 28)
        directives = Directives(md, self.sources(), self.in_plugin)
        md.parser.blockprocessors.register(directives, "sidenotes-directives", 200)
        md.treeprocessors.register(MathML(md), "sidenotes-mathml", 15)

    def sources(self) -> "Sources":
        """The sources that directives name, by the options of the site."""
        options = self.getConfigs()
        root = Path(options.pop("root")).resolve()
        options["import_roots"] = [root / each for each in options["import_roots"]]
        options["cache"] = root / options["cache"]
        return Sources(root, **options)


@dataclass(frozen=True)
class Sources:
    """Modules on the disk, and what their pages show besides their text."""

    root: Path
    execute: list[str]
    import_roots: list[Path]
    setup: str
    cache: Path
    editions: Callable[[Path], dict[str, str]]
    links: dict[str, str]
    sizes: dict[str, dict[str, Any]]

    @cached_property
    def executed(self) -> set[Path]:
        """The modules whose examples are executed."""
        found = [f for pattern in self.execute for f in self.root.glob(pattern)]
        return {path for path in found if path.stem != "__init__"}

    def recorded(self, path: Path, symbol: str | None) -> dict[str, Any] | None:
        """What a module's examples have shown, if the site executes them.

        Of an excerpt, what they have shown of `symbol`.
        """
        found = recording(
            path,
            modules=self.executed,
            roots=self.import_roots,
            setup=self.setup,
            cache=self.cache,
        )
        return excerpt(found, symbol) if found and symbol else found

    def inputs(self, text: str) -> list[str]:
        """All that the directives in a Markdown text depend on, to key a cache."""
        found = []
        for match in re.finditer(rf"^[ \t]*{DIRECTIVE.pattern}", text, re.MULTILINE):
            path = self.root / match["path"]
            # A text may speak of a file that is not there, as an example.
            if not path.is_file():
                found.append("missing")
                continue
            found.append(read(path))
            if match["kind"] == "literate":
                # An edition may hold what the module imports, beside the module.
                imported = dependencies(path, self.import_roots)
                found += [read(file) for file in sorted(imported)]
                if path in self.executed:
                    place = location(path, self.import_roots, self.setup, self.cache)
                    found.append(place.name)
        return found


class Directives(BlockProcessor):
    """Replaces a directive by the source that it names."""

    def __init__(self, md: Markdown, sources: Sources, in_plugin: bool) -> None:
        super().__init__(md.parser)
        self.md = md
        self.sources = sources
        self.in_plugin = in_plugin

    def test(self, parent: Element, block: str) -> bool:
        return block.startswith(("::literate", "::listing"))

    def run(self, parent: Element, blocks: list[str]) -> None:
        block = blocks.pop(0)
        match = DIRECTIVE.match(block)
        if match is None or (match["kind"] == "listing" and match["symbol"]):
            usage = "`::literate a.py`, `::literate a.py#symbol` or `::listing a.py`"
            raise LiterateError(f"cannot read {block!r}; write {usage} alone on a line")
        self.require_plugin()
        if match["kind"] == "listing":
            self.listing(parent, self.sources.root / match["path"])
        else:
            self.literate(parent, match["path"], match["symbol"])

    def require_plugin(self) -> None:
        """Refuse to make a page in MkDocs that would have no styles and no script."""
        # A tree processor of MkDocs itself, which is there on each of its pages.
        if "relpath" in self.md.treeprocessors and not self.in_plugin:
            raise LiterateError(
                "in MkDocs, sidenotes needs its plugin, which adds styles and script: "
                "write `plugins: [search, sidenotes]` in mkdocs.yml, and remove "
                "`sidenotes` from `markdown_extensions`"
            )

    def literate(self, parent: Element, name: str, symbol: str | None) -> None:
        """Append the annotated source of a module, or of one definition in it."""
        path = self.sources.root / name
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
            recorded=self.sources.recorded(path, symbol),
        )
        if symbol:
            return
        sizes = self.sources.sizes.get(name)
        if sizes:
            place = SubElement(grid, "div", {"class": "sn-foot"})
            place.text = stash(panel(sizes))

        note = grid.find(".//h1/..")
        if note is not None:
            links = {
                label: url.format(stem=path.stem)
                for label, url in self.sources.links.items()
            }
            bar = toolbar(self.sources.editions(path), links, bool(sizes), stash)
            below_title = [child.tag for child in note].index("h1") + 1
            note.insert(below_title, bar)

    def listing(self, parent: Element, path: Path) -> None:
        """Append a file, with an anchor for each line and each top-level definition."""
        source = read(path)
        try:
            tree = ast.parse(source)
        except UNREADABLE as error:
            number = getattr(error, "lineno", None) or 1
            raise LiterateError(f"{path}:{number}: does not parse: {error}") from None
        names = {node.lineno: name for name, node in named(tree) if "." not in name}
        grid = SubElement(parent, "div", {"class": "sidenotes"})
        block = SubElement(grid, "pre", {"class": "sn-code highlight"})
        # An anchor must be an element, or MkDocs does not know of it: the lines between
        # two of them are stashed together.
        code, anchor = "", None
        last = source.rstrip("\n").count("\n") + 1
        for number, html in enumerate(highlight_lines(source)[:last], start=1):
            if number in names:
                place_code(block, anchor, self.md.htmlStash.store(code))
                anchor = SubElement(block, "i", {"id": names[number]})
                code = ""
            code += line(number, html)
        place_code(block, anchor, self.md.htmlStash.store(code))

    def parse(self, parent: Element, text: str) -> None:
        """Convert a note with all that the site has configured for its pages."""
        lines = text.split("\n")
        for preprocessor in self.md.preprocessors:
            lines = preprocessor.run(lines)
        self.parser.parseChunk(parent, "\n".join(lines))


def place_code(block: Element, anchor: Element | None, code: str) -> None:
    """Put code after an anchor of its block, or before the first one."""
    if anchor is None:
        block.text = code
    else:
        anchor.tail = code


def makeExtension(**options: Any) -> SidenotesExtension:  # noqa: N802
    """What Python-Markdown looks for in a module named as an extension."""
    return SidenotesExtension(**options)
