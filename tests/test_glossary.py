"""The glossary holds terms that the pages use, in order, and leads to their pages."""

import re
from pathlib import Path

from test_language import files, prose

GLOSSARY = Path(__file__).parent.parent / "docs/glossary.md"
ENTRIES = {
    entry: " ".join(text.split())
    for entry, text in re.findall(
        r"^## (.+)\n((?:(?!## ).*\n)+)", GLOSSARY.read_text(encoding="utf-8"), re.M
    )
}
UNCOVERED = "covered yet"


def names_of(entry: str) -> list[str]:
    """`Grouped-query attention (GQA)` is one term with two names."""
    return [name.strip() for name in re.split(r"[()]", entry) if name.strip()]


def test_the_terms_are_in_alphabetical_order() -> None:
    assert len(ENTRIES) > 60
    assert list(ENTRIES) == sorted(ENTRIES, key=str.casefold)


def test_each_term_leads_to_a_page_or_is_not_covered_yet() -> None:
    lost = [
        entry
        for entry, text in ENTRIES.items()
        if UNCOVERED not in text and ".md" not in text and "](#" not in text
    ]
    assert lost == []


def test_each_covered_term_is_used_on_the_site() -> None:
    pages = [path for path in files() if path != GLOSSARY]
    words = " ".join(" ".join(map(prose, pages)).split()).casefold()
    code = " ".join(path.read_text(encoding="utf-8") for path in pages)
    unused = [
        name
        for entry, text in ENTRIES.items()
        for name in names_of(entry)
        if UNCOVERED not in text
        if name.casefold() not in words and not ("_" in name and name in code)
    ]
    assert unused == []
