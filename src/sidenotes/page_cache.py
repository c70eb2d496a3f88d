"""Cache the HTML that MkDocs makes of a Markdown page.

A cached page is used only if nothing that it depends on has changed: its text, the
sources that its directives name, the settings of the site, the set of pages (links are
checked against it), the installed packages and the renderer. Some Markdown extensions
read other files, or change state that other pages use. If the site has an extension
that is not known to do neither, no page is cached. (mkdocstrings and autorefs do both:
`sidenotes.reference` knows what.)
"""

import inspect
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink, get_toc

from sidenotes.cache import ENVIRONMENT, PACKAGE, Memory, hash_of, load, path_for, store
from sidenotes.reference import documented, register, registrations

LOG = logging.getLogger("mkdocs")

# Settings, beside those of the Markdown extensions, that the HTML of a page depends on.
SETTINGS = ("use_directory_urls", "validation")

# Extensions of pymdownx that read other files.
READERS = {"pymdownx.b64", "pymdownx.snippets"}

KNOWN_OBJECTS = {"SidenotesExtension", "MkdocstringsExtension", "AutorefsExtension"}


def site_key(config: MkDocsConfig, files: Files) -> str | None:
    """A hash of what all pages depend on; None if the site's pages cannot be cached."""
    if not are_pure(config) or LOG.isEnabledFor(logging.DEBUG):
        return None  # at debug level, MkDocs does not list links to anchors
    known = sorted(f"{f.src_uri} {f.url} {f.inclusion.name}" for f in files)
    settings = [describe(config[name]) for name in SETTINGS]
    if "mkdocstrings" in config.plugins:
        settings.append(describe(config.plugins["mkdocstrings"].config))
    parts = [ENVIRONMENT, *known, *settings, extensions_of(config)]
    return hash_of([*parts, *PACKAGE])


def render_cached(
    page: Page,
    config: MkDocsConfig,
    files: Files,
    parts: list[str],
    memory: Memory,
    folder: Path,
) -> bool:
    """Render a page, or use its cached HTML for the same text and `parts`.

    Returns whether it was cached.
    """
    text = page.markdown or ""
    sources = documented(text, config, memory)
    if sources is None:
        Page.render(page, config, files)
        return False
    name = page.file.src_uri
    key = hash_of([name, text, *parts, *sources])
    stored = path_for(folder, name.replace("/", "-"), key, ".json")
    if found := load(stored):
        content = json.loads(found)
        restore(page, content, files)
    else:
        with messages(LOG) as logged, registrations(config) as collected:
            Page.render(page, config, files)
        content = content_of(page) | collected
        # A page with a broken link is not cached, so that each build reports it.
        if not logged:
            store(stored, json.dumps(content))
    register(page, config, content)
    return found is not None


def are_pure(config: MkDocsConfig) -> bool:
    """Whether the site's Markdown extensions depend on the text of a page only."""
    ours = {entry.name for entry in metadata.distribution("markdown").entry_points}
    for each in config.markdown_extensions:
        if isinstance(each, str):
            name = each.removeprefix("markdown.extensions.")
            known = name in ours or name.startswith("pymdownx.")
            if not known or name in READERS:
                return False
        elif type(each).__name__ not in KNOWN_OBJECTS:
            return False
    return True


def extensions_of(config: MkDocsConfig) -> str:
    """The Markdown extensions of a site and their options, as text."""
    objects: list[Any] = [*config.markdown_extensions]
    options = {
        # Without paths: a copy of the site can use a copy of its cache.
        describe(each): {
            **each.getConfigs(),
            "root": "",
            "cache": "",
            "import_roots": "",
        }
        for each in objects
        if type(each).__name__ == "SidenotesExtension"
    }
    return describe([config.markdown_extensions, config.mdx_configs, options])


def describe(value: Any) -> str:
    """A setting as text; for a function or object, with the file that defines it."""
    if isinstance(value, dict):
        pairs = [f"{describe(k)}: {describe(v)}" for k, v in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe, value))}]"
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    if hasattr(value, "items"):  # a section of the configuration
        return describe(dict(value.items()))
    owner: Any = value if callable(value) else type(value)
    return f"{owner.__module__}.{owner.__qualname__} {source_of(owner)}"


@cache
def source_of(owner: Any) -> str:
    """The text of the file that defines a function or a class."""
    try:
        return Path(inspect.getfile(owner)).read_text(encoding="utf-8")
    except (TypeError, OSError):
        return ""  # built into Python


@contextmanager
def messages(log: logging.Logger) -> Iterator[list[str]]:
    """Collect log messages from level `INFO` up, even if they are not shown."""
    logged: list[str] = []
    level = log.level

    def collect(record: logging.LogRecord) -> bool:
        logged.append(record.getMessage())
        return record.levelno >= level

    loggers = [log, *children(log)]
    for each in loggers:
        each.addFilter(collect)
    log.setLevel(min(level, logging.INFO))
    try:
        yield logged
    finally:
        log.setLevel(level)
        for each in loggers:
            each.removeFilter(collect)


def children(log: logging.Logger) -> list[logging.Logger]:
    """The child loggers of a logger: a filter applies to its own logger only."""
    found = logging.Logger.manager.loggerDict.items()
    return [
        each
        for name, each in found
        if name.startswith(f"{log.name}.") and isinstance(each, logging.Logger)
    ]


def content_of(page: Page) -> dict[str, Any]:
    """The attributes that rendering sets on a page."""
    links = page.links_to_anchors or {}
    return {
        "content": page.content,
        "title": page._title_from_render,
        "toc": [entry(item) for item in page.toc.items],
        "ids": sorted(page.present_anchor_ids or ()),
        "links": {file.src_uri: anchors for file, anchors in links.items()},
    }


def entry(item: AnchorLink) -> dict[str, Any]:
    """An entry of the table of contents, in the format of Python-Markdown."""
    children = [entry(child) for child in item.children]
    head = {"name": item.title, "id": item.id, "level": item.level}
    return {**head, "children": children}


def restore(page: Page, stored: dict[str, Any], files: Files) -> None:
    """Set the attributes that rendering sets on a page."""
    page.content = stored["content"]
    page._title_from_render = stored["title"]
    page.toc = get_toc(stored["toc"])
    page.present_anchor_ids = set(stored["ids"])
    page.links_to_anchors = {
        file: anchors
        for name, anchors in stored["links"].items()
        if (file := files.get_file_from_path(name)) is not None
    }
