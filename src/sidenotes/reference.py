"""What mkdocstrings and autorefs know of a page, beside its HTML.

While a page is rendered, they register its anchors, to which other pages link, and
mkdocstrings registers the documented objects, in the inventory that other sites read.
A cached page has to register the same again.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

from sidenotes.dependencies import Imports
from sidenotes.split import read

# A block that mkdocstrings replaces by the documentation of an object.
BLOCK = re.compile(r"^[ \t]*(?:#{1,6} *)?::: ?(?P<name>.+?) *$", re.MULTILINE)

# Options with which a block depends on more than the sources of its package.
READERS = re.compile(r"\b(handler|extensions|preload_modules|backlinks):")

Json = dict[str, Any]


def documented(text: str, config: MkDocsConfig) -> list[str] | None:
    """The sources that the blocks of a page document; None if there may be others."""
    packages = {match["name"].partition(".")[0] for match in BLOCK.finditer(text)}
    if not packages:
        return []
    plugin: Any = config.plugins["mkdocstrings"]
    handlers = plugin.config.handlers
    others = plugin.config.custom_templates or handlers.keys() - {"python"}
    if others or READERS.search(f"{text}{handlers}".replace("'", "")):
        return None
    root = Path(config.config_file_path).parent
    paths = handlers.get("python", {}).get("paths", ["."])
    modules = Imports([root / path for path in paths])
    found = []
    for name in sorted(packages):
        file = modules.find([name])
        if file is None:
            return None  # installed, perhaps in a way that permits editing
        inside = sorted(file.parent.rglob("*.py*")) if "__" in file.name else [file]
        for each in inside:
            if each.suffix in (".py", ".pyi"):
                found += [each.relative_to(file.parent).as_posix(), read(each)]
    # The documentation of an object may contain blocks of other packages.
    return None if any(BLOCK.search(source) for source in found) else found


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
