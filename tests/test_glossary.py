"""The glossary holds terms that the pages use, in order, and leads to their pages."""

import re
from pathlib import Path

import pytest

from test_language import files

GLOSSARY = Path(__file__).parent.parent / "docs/glossary.md"
ENTRIES = {
    entry: " ".join(text.split())
    for entry, text in re.findall(
        r"^## (.+)\n((?:(?!## ).*\n)+)", GLOSSARY.read_text(encoding="utf-8"), re.M
    )
}
# What an entry says that leads to no page, or of a term that is used nowhere else.
UNCOVERED, UNUSED = "covered yet", "These pages"


def plain(text: str) -> str:
    return re.sub(r"[\s_-]+", " ", text).casefold()


def names_of(entry: str) -> list[str]:
    """`Grouped-query attention (GQA)` is one term with two names."""
    return [plain(name).strip() for name in re.split(r"[()]", entry) if name.strip()]


def test_the_terms_are_in_alphabetical_order() -> None:
    assert len(ENTRIES) > 60
    assert list(ENTRIES) == sorted(ENTRIES, key=str.casefold)


def test_each_term_leads_to_a_page_or_is_not_covered_yet() -> None:
    lost = [
        entry
        for entry, text in ENTRIES.items()
        if ".md" not in text and "](#" not in text and UNCOVERED not in text
    ]
    assert lost == []


@pytest.mark.slow
def test_each_term_is_used_on_the_site_or_says_that_it_is_not() -> None:
    pages = [path for path in files() if path != GLOSSARY]
    words = plain(" ".join(path.read_text(encoding="utf-8") for path in pages))
    unused = [
        entry
        for entry, text in ENTRIES.items()
        if not any(name in words for name in names_of(entry))
        and UNCOVERED not in text
        and UNUSED not in text
    ]
    assert unused == []
