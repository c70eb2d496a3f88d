"""The first use of a term on a page of prose leads to its entry in the glossary."""

import re
from pathlib import Path

import pytest

from website import text_of

LINK = re.compile(r'<a class="term" href="([^"]*)"[^>]*>(.*?)</a>', re.DOTALL)
BLOCK = re.compile(r"<(h[1-4]|pre|code|button|summary)\b.*?</\1>", re.DOTALL)


@pytest.fixture(scope="session")
def lessons(site: Path) -> dict[str, str]:
    found = {path.stem: path.read_text("utf-8") for path in site.glob("learn/*.html")}
    assert len(found) > 10
    return found


def test_each_lesson_links_its_terms_to_the_glossary(
    site: Path, lessons: dict[str, str]
) -> None:
    glossary = (site / "glossary.html").read_text("utf-8")
    entries = dict(re.findall(r'<h2 id="([^"]+)">(.*?)<a class="headerlink"', glossary))
    for name, html in lessons.items():
        links = LINK.findall(html)
        assert len(links) >= 5, name
        for address, text in links:
            page, _, anchor = address.partition("#")
            assert page == "../glossary.html"
            title = re.split(r"\W+", text_of(entries[anchor]).casefold())
            words = re.split(r"\W+", text.casefold())
            assert any(words[-1].startswith(word[:-1]) for word in title if word)


def test_a_term_is_linked_once_and_in_prose_only(lessons: dict[str, str]) -> None:
    for name, html in lessons.items():
        targets = [address for address, _ in LINK.findall(html)]
        assert len(targets) == len(set(targets)), name
        assert not [m[0] for m in BLOCK.finditer(html) if 'class="term"' in m[0]]
        inner = re.findall(r"<a [^>]*>((?:(?!</a>).)*)</a>", html, re.DOTALL)
        assert not [text for text in inner if "<a " in text], name


def test_a_link_carries_its_definition(lessons: dict[str, str]) -> None:
    html = lessons["02_queries_keys_and_values"]
    (found,) = re.findall(r'<a class="term" ([^>]*)>token</a>', html)
    assert 'title="The unit of text' in found


def test_words_with_an_ordinary_meaning_are_not_linked(lessons: dict[str, str]) -> None:
    linked = {
        text.casefold() for html in lessons.values() for _, text in LINK.findall(html)
    }
    assert linked.isdisjoint({"key", "keys", "value", "values", "scale"})
