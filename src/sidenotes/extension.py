"""The Markdown extension: `::literate src/package/module.py` inserts annotated source.

`::literate src/package/module.py#Class.method` inserts one definition, and
`::listing tests/test_module.py` a file without notes. On every page, the extension also
fences doctests and converts LaTeX to MathML.
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

from sidenotes.cache import Memory
from sidenotes.dependencies import Imports
from sidenotes.doctests import FenceDoctests
from sidenotes.mathml import MathML
from sidenotes.record import excerpt, location, record_all, recording
from sidenotes.render import Renderer, highlight_lines, legend, line, toolbar
from sidenotes.sizes import panel
from sidenotes.split import UNREADABLE, LiterateError, is_within, named, read, split

DIRECTIVE = re.compile(
    r"::(?P<kind>literate|listing)[ ]+(?P<path>[^#\s]+)(#(?P<symbol>\S+))?\s*$"
)

# Markdown extensions that the pages need; added unless the site configures them.
REQUIRED: dict[str, dict[str, Any]] = {
    "attr_list": {},
    "md_in_html": {},
    "pymdownx.arithmatex": {"generic": True},
    "pymdownx.details": {},
    "pymdownx.superfences": {},
}


def no_links(path: Path) -> dict[str, str]:
    """No links, and nothing to copy: the default."""
    return {}


class SidenotesExtension(Extension):
    """Registers directives, doctest fences and MathML; holds the options."""

    # The MkDocs plugin, which adds styles and script, sets this to the sources of a
    # build. Otherwise, each directive reads anew what may have changed.
    of_build: "Sources | None" = None

    def __init__(self, **options: Any) -> None:
        self.config = {
            "root": [".", "Folder that all other paths are relative to"],
            "execute": [
                [],
                "Patterns of modules (`src/**/*.py`) whose doctest examples are "
                "executed, to show the shapes and values of each line",
            ],
            "import_roots": [
                ["src", "."],
                "Folders that contain the packages that these modules import",
            ],
            "setup": [
                "",
                "Statements before the examples of a module, such as a random seed",
            ],
            "cache": [".cache/sidenotes/recordings", "Folder for recordings"],
            "editions": [
                no_links,
                "Function that maps a module's path to files to copy, addresses by "
                "label; these depend on the module and its imports",
            ],
            "links": [no_links, "Function from a module's path to links, by label"],
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
        directives = Directives(md, self)
        md.parser.blockprocessors.register(directives, "sidenotes-directives", 200)
        md.treeprocessors.register(MathML(md), "sidenotes-mathml", 15)

    def sources(self) -> "Sources":
        """The sources that directives name, by the options of the site."""
        options = self.getConfigs()
        root = Path(options.pop("root")).resolve()
        roots = [root / each for each in options.pop("import_roots")]
        options["cache"] = root / options["cache"]
        return Sources(root, Imports(roots, Memory(options["cache"])), **options)


@dataclass(frozen=True)
class Sources:
    """The modules of a site, and the options of their pages."""

    root: Path
    imports: Imports
    execute: list[str]
    setup: str
    cache: Path
    editions: Callable[[Path], dict[str, str]]
    links: Callable[[Path], dict[str, str]]
    sizes: dict[str, dict[str, Any]]

    @cached_property
    def executed(self) -> set[Path]:
        """The modules whose examples are executed."""
        found = [f for pattern in self.execute for f in self.root.glob(pattern)]
        return {path for path in found if path.stem != "__init__"}

    def recorded(self, path: Path, symbol: str | None) -> dict[str, Any] | None:
        """The recording of a module's examples, if the site executes them.

        Of an excerpt, the part that belongs to `symbol`.
        """
        found = recording(
            path,
            modules=self.executed,
            imports=self.imports,
            setup=self.setup,
            cache=self.cache,
        )
        return excerpt(found, symbol) if found and symbol else found

    def record_all(self) -> None:
        """Make the recordings that are missing, before a page asks for the first."""
        record_all(
            self.executed,
            imports=self.imports,
            setup=self.setup,
            cache=self.cache,
        )

    def inputs(self, text: str) -> list[str]:
        """What the directives of a page depend on, as parts of a cache key."""
        found = []
        for match in re.finditer(rf"^[ \t]*{DIRECTIVE.pattern}", text, re.MULTILINE):
            path = self.root / match["path"]
            # A page may mention a directive with a missing file, as an example.
            if not path.is_file():
                found.append("missing")
                continue
            found.append(read(path))
            if match["kind"] == "literate":
                found += map(str, (self.editions(path), self.links(path)))
                if path in self.executed:
                    place = location(path, self.imports, self.setup, self.cache)
                    found.append(place.name)
        return found


class Directives(BlockProcessor):
    """Replaces each directive by the source that it names."""

    def __init__(self, md: Markdown, extension: SidenotesExtension) -> None:
        super().__init__(md.parser)
        self.md = md
        self.extension = extension

    def test(self, parent: Element, block: str) -> bool:
        return block.startswith(("::literate", "::listing"))

    def run(self, parent: Element, blocks: list[str]) -> None:
        block = blocks.pop(0)
        match = DIRECTIVE.match(block)
        if match is None or (match["kind"] == "listing" and match["symbol"]):
            usage = "`::literate a.py`, `::literate a.py#symbol` or `::listing a.py`"
            raise LiterateError(f"cannot read {block!r}; write {usage} alone on a line")
        self.require_plugin()
        sources = self.extension.of_build or self.extension.sources()
        if match["kind"] == "listing":
            self.listing(parent, sources.root / match["path"])
        else:
            self.literate(parent, sources, match["path"], match["symbol"])

    def require_plugin(self) -> None:
        """Refuse MkDocs without the plugin: styles and script would be missing."""
        # MkDocs registers this tree processor for each of its pages.
        if "relpath" in self.md.treeprocessors and not self.extension.of_build:
            raise LiterateError(
                "in MkDocs, sidenotes needs its plugin, which adds styles and script: "
                "write `plugins: [search, sidenotes]` in mkdocs.yml, and remove "
                "`sidenotes` from `markdown_extensions`"
            )

    def literate(
        self, parent: Element, sources: Sources, name: str, symbol: str | None
    ) -> None:
        """Append the annotated source of a module, or of one definition in it."""
        path = sources.root / name
        source = read(path)
        sections = split(source, path)
        if symbol:
            inside = [s for s in sections if is_within(s.scope, symbol)]
            if not inside:
                raise LiterateError(f"{path}:1: there is no `{symbol}` in this file")
            sections = inside
        stash = self.md.htmlStash.store
        recorded = sources.recorded(path, symbol)
        renderer = Renderer(source, not symbol, self.parse, stash, recorded)
        grid = renderer.render(parent, sections)
        if symbol:
            return
        sizes = sources.sizes.get(name)
        if sizes:
            place = SubElement(grid, "div", {"class": "sn-foot"})
            place.text = stash(panel(sizes))

        note = grid.find(".//h1/..")
        if note is not None:
            tools = {}
            if has_run := bool(recorded and recorded["calls"]):
                tools["Step through"] = "sn-step"
            if sizes:
                tools["Try other sizes"] = "sn-try"
            editions, links = sources.editions(path), sources.links(path)
            below_title = [child.tag for child in note].index("h1") + 1
            if has_run:
                note.insert(below_title, legend())
            note.insert(below_title, toolbar(editions, links, tools, stash))

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
        # An anchor must be an element for MkDocs to find it; the lines between two
        # anchors are stashed together.
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
        """Convert a note with all Markdown extensions of the site."""
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
    """The function that Python-Markdown calls in an extension module."""
    return SidenotesExtension(**options)
