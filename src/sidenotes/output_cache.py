"""Cache the file that the theme makes of each page, and what the search finds in it.

A cached file is used only if nothing that it can show has changed: the page, titles and
addresses in the navigation, the settings, the templates of the site, and the installed
packages. A site whose templates could show anything else is not cached.
"""

import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure import StructureItem
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

from sidenotes.cache import ENVIRONMENT, hash_of, load, path_for, store
from sidenotes.page_cache import describe, entry

# This file as it was when the process loaded it.
CODE = Path(__file__).read_bytes()

# Attributes of a page that are objects, or that no template shows.
OBJECTS = {"children", "file", "next_page", "parent", "previous_page", "render", "toc"}
UNSEEN = {"links_to_anchors", "markdown", "present_anchor_ids", "update_date"}

# Settings that are objects, or paths of this machine.
NO_VALUES = {"config_file_path", "docs_dir", "hooks", "plugins", "site_dir", "watch"}

# What MkDocs passes to templates besides plain values.
PASSED = {"build_date_utc", "config", "nav", "page", "pages"}

# What a template of the site could show besides: the time, and the texts of all pages.
OTHERS = re.compile(r"\b(build_date_utc|markdown|pages|update_date)\b")
COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)

# Excluded from the search: the buttons of a module, and its code, since a name that
# occurs in each line would hide the page that explains it; and the elements around or
# before its first heading, with which the search plugin does not find the title.
UNSEARCHED = re.compile(
    r'<pre class="sn-code.*?</pre>'
    r'|<p class="sn-bar">.*?</p>'
    r'|<div class="sn-anchors">.*?</div>'
    r"|</?(?:div|section)\b[^>]*>",
    re.DOTALL,
)

# The search index needs text only: the markup of highlighted code, figures and formulas
# would slow the indexing down.
BLOCK = re.compile(r"<(pre|svg|math)\b[^>]*>(.*?)</\1>", re.DOTALL)
MARKUP = {
    "pre": re.compile(r"</?(span|a)\b[^>]*>"),
    "svg": re.compile(r"<[^>]*>"),
    "math": re.compile(r"<[^>]*>"),
}


def remember_files(env: Environment, config: MkDocsConfig, folder: Path) -> None:
    """Let the templates of `env` make the file of a page unless `folder` has it."""
    site: list[str | None] = []

    class Remembered(Template):
        """A template that makes no file twice."""

        def render(self, *args: Any, **kwargs: Any) -> str:
            context = dict(*args, **kwargs)
            page = context.get("page")
            if page is None:
                return super().render(context)
            if not site:  # the first page: now all titles are known
                site.append(site_inputs(env, config, context["nav"]))
            if site[0] is None:
                return super().render(context)
            others = {name: context[name] for name in context.keys() - PASSED}
            parts = [site[0], str(self.name), repr(sorted(others.items()))]
            stored = place(folder, page, parts, ".html")
            text = load(stored)
            if text is None:
                text = super().render(context)
                store(stored, text)
            return text

    env.template_class = Remembered


def place(folder: Path, page: Page, parts: list[str], suffix: str) -> Path:
    """The cached file for a page as it is now."""
    name = page.file.src_uri
    values = {**vars(page), "content": ""}  # long, so hashed without its `repr`
    plain = [[key, values[key]] for key in sorted(values.keys() - OBJECTS - UNSEEN)]
    toc = [entry(item) for item in page.toc.items]
    near = [shown(each) for each in (page.previous_page, page.next_page) if each]
    inputs = repr([name, page.url, page.title, page.is_homepage, plain, toc, near])
    key = hash_of([CODE, ENVIRONMENT, page.content or "", inputs, *parts])
    return path_for(folder, name.replace("/", "-"), key, suffix)


def site_inputs(env: Environment, config: MkDocsConfig, nav: Navigation) -> str | None:
    """What the files of all pages show; None if that cannot be known."""
    theme = config.theme
    own = sorted(Path(theme.custom_dir).rglob("*.*")) if theme.custom_dir else []
    files = [path for path in own if path.suffix in (".html", ".svg")]
    templates = [COMMENT.sub("", path.read_text(encoding="utf-8")) for path in files]
    plain = theme.get_env()
    # Functions that a plugin adds can show anything.
    added = env.filters != plain.filters or env.globals.keys() - plain.globals.keys()
    if theme.name != "material" or added or OTHERS.search(" ".join(templates)):
        return None
    settings = {key: config[key] for key in config if key not in NO_VALUES}
    plugins = config.plugins.items()
    options = {name: getattr(plugin, "config", None) for name, plugin in plugins}
    pages = repr([shown(item) for item in nav])
    return hash_of(
        [describe([settings, options]), str(theme.locale), pages, *templates]
    )


def shown(item: StructureItem) -> list[Any]:
    """What the navigation shows of a page, a section or a link."""
    meta = getattr(item, "meta", {})
    return [
        item.title,
        getattr(item, "url", ""),
        {key: value for key, value in meta.items() if key != "description"},
        [shown(child) for child in getattr(item, "children", None) or ()],
    ]


class Entries:
    """The entries of a page in the index of the search plugin."""

    def __init__(self, page: Page, config: MkDocsConfig, folder: Path) -> None:
        plugins: Any = config.plugins
        search = plugins.get("material/search") or plugins.get("search")
        index = vars(search.search_index) if hasattr(search, "search_index") else {}
        # Those of all pages; Material's plugin and that of MkDocs differ in the name.
        self.all = index.get("entries", index.get("_entries", []))
        self.before = len(self.all)
        self.path = place(folder, page, [describe(index.get("config"))], ".json")
        text = load(self.path)
        self.known = None if text is None else json.loads(text)

    def complete(self) -> None:
        """After the search plugin: add the known entries, or store its own."""
        if self.known is None:
            store(self.path, json.dumps(self.all[self.before :]))
        else:
            self.all[self.before :] = self.known


def searchable(html: str) -> str:
    """A page without markup that the search does not need."""
    content = UNSEARCHED.sub("", html).strip()
    return BLOCK.sub(lambda match: MARKUP[match[1]].sub("", match[0]), content)
