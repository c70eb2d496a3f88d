"""A MkDocs hook: a page's first use of each term of the glossary leads to its entry."""

import re
from collections.abc import Iterable, Iterator
from html import escape

from jinja2 import Environment
from markupsafe import Markup
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.utils import get_relative_url

GLOSSARY = "glossary.md"
ENTRY = re.compile(
    r'<h2 id="([^"]+)">(.*?)<a class="headerlink".*?</h2>\s*<p>(.*?)</p>',
    re.DOTALL,
)
# Of code, formulas and pictures, the whole is one piece: they have thousands of tags.
TAG = re.compile(
    r"(<pre\b.*?</pre>|<svg\b.*?</svg>|<math\b.*?</math>|<[^>]+>)", re.DOTALL
)
NAME = re.compile(r"</?(\w+)")

# Links stand in prose, but not within another link, a title, code or a picture.
PROSE = {"p", "li", "td"}
CODE = {"code", "script", "style"}
NO_LINKS = {"a", "button", "figure", "h1", "h2", "h3", "h4", "summary"} | CODE

# Words that also have an ordinary meaning, as in "the printed value".
ORDINARY = {"key", "scale", "value"}


def on_env(env: Environment, *, config: MkDocsConfig, files: Files) -> None:
    """Link the pages of prose; pages of source code link where their notes say so."""
    glossary = files.src_uris[GLOSSARY]
    terms = terms_of(glossary.page.content)
    words = any_of(terms)
    for file in files.documentation_pages():
        if not file.src_uri.startswith(("source/", "reference/", GLOSSARY)):
            url = get_relative_url(glossary.url, file.url)
            file.page.content = linked(file.page.content, terms, words, url)


def terms_of(html: str) -> dict[str, tuple[str, str]]:
    """The anchor and the definition of each term."""
    return {
        name: (anchor, first_sentence(text))
        for anchor, title, text in ENTRY.findall(html)
        for name in names_of(Markup(title).striptags())
    }


def names_of(title: str) -> Iterator[str]:
    """`Grouped-query attention (GQA)` is one term with two names."""
    for name in re.split(r"[()]", title):
        if (name := normal(name)) and name not in ORDINARY:
            yield name


def normal(text: str) -> str:
    """A term as it is looked up: one case, no hyphens, one line."""
    return " ".join(re.split(r"[\s-]+", text.strip())).casefold()


def first_sentence(html: str) -> str:
    """The definition in plain text, if it can be read without its formulas."""
    sentence = re.split(r"(?<=[.])\s(?=[A-Z<])", html)[0]
    return "" if "<math" in sentence else Markup(sentence).striptags()


def linked(
    html: str, terms: dict[str, tuple[str, str]], words: re.Pattern[str], url: str
) -> str:
    """The page with a link at the first use of each term in its prose."""
    used: set[str] = set()

    def link(found: re.Match[str]) -> str:
        name = normal(found[0])
        if name not in terms:
            name = re.sub("ies$", "y", name) if name.endswith("ies") else name[:-1]
        anchor, definition = terms[name]
        if anchor in used:
            return found[0]
        used.add(anchor)
        title = f' title="{escape(definition)}"' if definition else ""
        return f'<a class="term" href="{url}#{anchor}"{title}>{found[0]}</a>'

    parts, prose, barred = TAG.split(html), 0, 0
    for i, part in enumerate(parts):
        if i % 2 == 0:
            if prose and not barred:
                parts[i] = words.sub(link, part)
        elif tag := NAME.match(part):
            step = -1 if part.startswith("</") else 1
            prose += step * (tag[1] in PROSE)
            barred += step * (tag[1] in NO_LINKS and not part.endswith("/>"))
    return "".join(parts)


def any_of(terms: Iterable[str]) -> re.Pattern[str]:
    """Any of the terms; of two that begin alike, the longer one."""
    words = "|".join(map(pattern, sorted(terms, key=len, reverse=True)))
    return re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE)


def pattern(name: str) -> str:
    """The term in the singular or plural, with spaces, hyphens or a line break."""
    escaped = re.escape(name).replace(r"\ ", r"[\s-]+")
    return f"{escaped[:-1]}(?:y|ies)" if name.endswith("y") else f"{escaped}s?"
