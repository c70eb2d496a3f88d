"""What mkdocstrings and autorefs know of a page, beside its HTML.

While a page is rendered, they register its anchors, to which other pages link, and
mkdocstrings registers the documented objects, in the inventory that other sites read.
A cached page has to register the same again.
"""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

from sidenotes.cache import Memory, hash_of
from sidenotes.dependencies import Import, Imports

# A block that mkdocstrings replaces by the documentation of an object.
BLOCK = re.compile(r"^[ \t]*(?:#{1,6} *)?::: ?(?P<name>.+?) *$", re.MULTILINE)

# Without this option, a block shows comments, too.
SOURCELESS = re.compile(r"\bshow_source: [Ff]alse\b")

# Options with which a block depends on more than the imports of a module.
READERS = re.compile(r"\b(handler|extensions|preload_modules|backlinks):")

Json = dict[str, Any]


def documented(text: str, config: MkDocsConfig, memory: Memory) -> list[str] | None:
    """What the blocks of a page show; None if that cannot be known."""
    names = [match["name"] for match in BLOCK.finditer(text)]
    if not names:
        return []
    plugin: Any = config.plugins["mkdocstrings"]
    handlers = plugin.config.handlers
    options = f"{text}{handlers}".replace("'", "")
    others = plugin.config.custom_templates or handlers.keys() - {"python"}
    if others or READERS.search(options) or not SOURCELESS.search(options):
        return None
    root = Path(config.config_file_path).parent
    paths = handlers.get("python", {}).get("paths", ["."])
    imports = Imports([root / path for path in paths], memory)
    files: set[Path] = set()
    show = definitions_in
    for name in names:
        parts = name.split(".")
        count = len([*imports.files_of(Import(name, "", "", False))])
        if not count:
            return None  # installed, perhaps in a way that permits editing
        if count == len(parts):
            show = contents_of
        files |= imports.closure([Import(".".join(parts[:count]), "", "", False)])
    if any(BLOCK.search(imports.text(file)) for file in files):
        return None  # a docstring with blocks of its own
    # Which files these are follows from the names and from the imports.
    return [memory(show, imports.text(file)) for file in sorted(files)]


def contents_of(source: str) -> str:
    """A hash of all that the documentation of a module shows: no comments."""
    return hash_of([ast.dump(ast.parse(source))])


def definitions_in(source: str) -> str:
    """A hash of what the documentation of a class or a function shows."""
    tree = ast.parse(source)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return hash_of([ast.dump(tree)])


@contextmanager
def registrations(config: MkDocsConfig) -> Iterator[Json]:
    """Collect what is registered meanwhile, in place of registering it."""
    collected: Json = {"anchors": [], "objects": []}
    plugins: Any = config.plugins
    autorefs, mkdocstrings = map(plugins.get, ("autorefs", "mkdocstrings"))
    if autorefs is None:
        yield collected
        return

    def register_anchor(page: Page, *names: str, **options: Any) -> None:
        collected["anchors"].append([names, options])

    autorefs.register_anchor = register_anchor
    if mkdocstrings:
        inventory = mkdocstrings.handlers.inventory
        # An alias that another page has registered is not registered again.
        own = mkdocstrings.handlers.inventory = type(inventory)()
    try:
        yield collected
        if mkdocstrings:
            collected["objects"] = [vars(item) for item in own.values()]
    finally:
        del autorefs.register_anchor  # the method of its class comes to light again
        if mkdocstrings:
            mkdocstrings.handlers.inventory = inventory


def register(page: Page, config: MkDocsConfig, collected: Json) -> None:
    """Register what rendering the page has registered."""
    plugins: Any = config.plugins
    for names, options in collected["anchors"]:
        plugins["autorefs"].register_anchor(page, *names, **options)
    for item in collected["objects"]:
        handlers = plugins["mkdocstrings"].handlers
        handlers.get_handler("python")  # MkDocs writes the style sheets of those in use
        if item["priority"] == 1 or item["name"] not in handlers.inventory:
            handlers.inventory.register(**item)
