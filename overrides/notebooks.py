"""A MkDocs hook: pages of notebooks as plain as all others, and links to download them.

mkdocs-jupyter inlines the style sheets and scripts of Jupyter, 600 KB for each page,
which load more of them from other hosts; and MkDocs does not see the links in its HTML.
"""

import json
import logging
import posixpath
import re
from functools import partial
from html import escape, unescape
from pathlib import Path, PurePosixPath
from typing import Any

from bs4 import BeautifulSoup, Tag
from jinja2 import Environment, FileSystemBytecodeCache
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from nbconvert.exporters import templateexporter

from sidenotes.cache import hash_of, load, path_for, store
from sidenotes.page_cache import messages

LOG = logging.getLogger("mkdocs.plugins.notebooks")

# Most of a page of mkdocs-jupyter, and nothing that remains of it.
ASSETS = re.compile(r"<(style|script)\b.*?</\1>", re.DOTALL)
# The parts of a notebook: its prose and its code. (Exercises have no outputs.)
CELLS = ["jp-MarkdownOutput", "highlight-ipynb"]
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$", re.DOTALL)
TITLE = "</h1>"


def on_pre_build(config: MkDocsConfig) -> None:
    """Compile the templates of nbconvert once, not for each notebook."""
    folder = config.plugins["sidenotes"].cache / "templates"
    folder.mkdir(parents=True, exist_ok=True)
    compiled = FileSystemBytecodeCache(str(folder))
    templateexporter.Environment = partial(Environment, bytecode_cache=compiled)


def on_page_content(
    html: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Reduce a notebook to its cells, and offer the page as a notebook."""
    source = PurePosixPath(page.file.src_uri)
    if source.suffix == ".py":
        html = reduced_once(html, page, files, config.plugins["sidenotes"])
    links = {
        f"Download {suffix}": f"notebooks/{source.with_suffix(suffix)}"
        for suffix in (".ipynb", ".py")
    }
    if files.get_file_from_path(links["Download .ipynb"]) is None:
        return html
    if source.suffix == ".py":
        name = source.stem.partition("_")[2]
        links["Solution"] = f"source/exercises/solutions/{name}.md"
    buttons = "".join(
        f'<a class="md-button" href="{files.src_uris[to].url_relative_to(page.file)}"'
        f"{' download' * label.startswith('Download')}>{label}</a>"
        for label, to in links.items()
    )
    title, end, rest = html.partition(TITLE)
    return f'{title}{end}<p class="sn-bar">{buttons}</p>{rest}'


def reduced_once(html: str, page: Page, files: Files, sidenotes: Any) -> str:
    """The reduced notebook, from the cache if the page and the site are the same."""
    source = page.file.src_uri
    parts = [sidenotes.site_key or "", Path(__file__).read_bytes(), source, html]
    name = source.replace("/", "-")
    stored = path_for(sidenotes.cache / "hooks", name, hash_of(parts), ".json")
    text = load(stored) if sidenotes.site_key else None
    if text is None:
        with messages(LOG) as said:
            html = reduced(html, page, files)
        links = page.links_to_anchors or {}
        to = {file.src_uri: anchors for file, anchors in links.items()}
        # A broken link is reported by each build.
        if sidenotes.site_key and not said:
            store(stored, json.dumps([html, sorted(page.present_anchor_ids), to]))
        return html
    html, ids, to = json.loads(text)
    page.present_anchor_ids = set(ids)
    page.links_to_anchors = {files.src_uris[name]: to[name] for name in to}
    return html


def reduced(html: str, page: Page, files: Files) -> str:
    """The cells of a notebook, in the markup that the theme gives prose and code."""
    soup = BeautifulSoup(ASSETS.sub("", html), "html.parser")
    parts = []
    for cell in soup.find_all(class_=CELLS):
        if "highlight-ipynb" in cell["class"]:
            parts.append(code_block(cell))
            continue
        for block in cell.find_all(class_="highlight"):
            block.replace_with(BeautifulSoup(code_block(block), "html.parser"))
        for link in cell.find_all("a", href=True):
            link["href"] = resolved(str(link["href"]), page, files)
        for anchor in cell.find_all("a", class_="anchor-link"):
            anchor["class"], anchor["title"] = "headerlink", "Permanent link"
        for text in cell.find_all(string=FORMULA):
            if not any(parent.name in ("code", "pre") for parent in text.parents):
                formula = FORMULA.sub(mathml, escape(text, quote=False))
                text.replace_with(BeautifulSoup(formula, "html.parser"))
        parts.append(cell.decode_contents())
    page.present_anchor_ids = {str(tag["id"]) for tag in soup.find_all(id=True)}
    return "".join(parts)


def code_block(cell: Tag) -> str:
    """Highlighted code, with the elements that the theme expects around it."""
    code = cell.pre.decode_contents().removeprefix("<span></span>")
    block = f"<pre><span></span><code>{code}</code></pre>"
    return f'<div class="language-python highlight">{block}</div>'


def mathml(match: re.Match[str]) -> str:
    """A formula of a notebook, converted as those of the other pages are."""
    block, inline = match.groups()
    if inline:
        return f'<span class="arithmatex">{convert(unescape(inline))}</span>'
    formula = convert(unescape(block), display="block")
    return f'<div class="arithmatex">{formula}</div>'


def resolved(link: str, page: Page, files: Files) -> str:
    """The address of a link to another source; a warning where there is none."""
    target, _, anchor = link.partition("#")
    if not target or ":" in target:
        return link
    source = page.file.src_uri
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    file = files.get_file_from_path(path)
    if file is None:
        LOG.warning("%s: the link %r leads to no page", source, link)
        return link
    # MkDocs compares them with the anchors of all pages at the end of the build.
    if anchor:
        page.links_to_anchors = page.links_to_anchors or {}
        page.links_to_anchors.setdefault(file, {})[anchor] = link
    return file.url_relative_to(page.file) + ("#" + anchor) * bool(anchor)
