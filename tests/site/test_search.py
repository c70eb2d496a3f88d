"""The search box answers what people type with the page that they want."""

import json
from collections import Counter
from pathlib import Path

from playwright.sync_api import Page

from website import INDEX, ROOT

# Queries, each with the pages of which one must be among the first three results.
QUERIES: dict[str, list[str]] = json.loads(
    (ROOT / "tests/data/queries.json").read_text(encoding="utf-8")
)

# The page that each result leads to.
PAGES = """results => results.map(result => {
  const path = new URL(result.querySelector("a").href).pathname;
  const root = location.pathname.replace(/[^/]*$/, "");
  return path.slice(root.length).replace(/\\.html$/, "");
})"""


def test_each_query_finds_its_page_among_the_first_three(
    page: Page, searchable: str
) -> None:
    assert len(QUERIES) >= 40
    page.goto(f"{searchable}/index.html")
    box = page.locator(".md-search__input")
    results = page.locator(".md-search-result__item:not([data-old])")
    box.click()
    misses = []
    for query, wanted in QUERIES.items():
        results.evaluate_all("all => all.forEach(e => e.dataset.old = '')")
        box.fill(query)
        box.press("End")  # the search listens to keys
        results.first.wait_for()
        found = results.evaluate_all(PAGES)[:3]
        if not set(found) & set(wanted):
            misses.append(f"{query!r} finds {found}, not {wanted}")
    assert not misses, "\n".join(misses)


def test_no_two_pages_have_one_title(site: Path) -> None:
    pages = json.loads((site / INDEX).read_text(encoding="utf-8"))["docs"]
    titles = Counter(
        page["title"].casefold() for page in pages if "#" not in page["location"]
    )
    assert len(titles) > 50
    assert [title for title, count in titles.items() if count > 1] == []


def test_the_search_finds_notes_and_not_the_code_beside_them(site: Path) -> None:
    pages = json.loads((site / INDEX).read_text(encoding="utf-8"))["docs"]
    core = [page for page in pages if page["location"].startswith("source/mha.html")]
    text = " ".join(page["text"] for page in core)
    assert "Attention computes, for every position" in core[0]["text"]
    assert "def forward" not in text
    assert "Copy module" not in text
