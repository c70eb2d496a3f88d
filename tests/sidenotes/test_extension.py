"""The directive: from one line of Markdown to the annotated page."""

import json
import re
from html import unescape
from pathlib import Path

import markdown
import pytest

from sidenotes.extension import SidenotesExtension
from sidenotes.split import LiterateError
from website import code_lines

ROOT = Path(__file__).parent.parent.parent


def convert(text: str, **options: object) -> str:
    return markdown.markdown(
        text,
        extensions=[
            SidenotesExtension(**options),
            "md_in_html",
            "pymdownx.arithmatex",
            "pymdownx.highlight",
            "pymdownx.superfences",
            "tables",
            "toc",
        ],
        extension_configs={"pymdownx.arithmatex": {"generic": True}},
    )


def page(tmp_path: Path, source: str, symbol: str = "", **options: object) -> str:
    (tmp_path / "a.py").write_text(source, encoding="utf-8")
    return convert(f"::literate a.py{symbol}", root=str(tmp_path), **options)


def test_a_string_over_several_lines_is_highlighted_on_each(tmp_path: Path) -> None:
    html = page(tmp_path, "x = '''one\n# two\n'''\n")
    assert code_lines(html) == {1: "x = '''one", 2: "# two", 3: "'''"}
    assert '<span class="s1"># two</span>' in html


def test_every_definition_has_a_heading_and_an_anchor(tmp_path: Path) -> None:
    source = (
        "class A:\n    def f(self): pass\n    class B:\n        def f(self): pass\n"
    )
    html = page(tmp_path, source)
    for tag, symbol in [("h2", "A"), ("h3", "A.f"), ("h3", "A.B"), ("h4", "A.B.f")]:
        name = symbol.split(".")[-1]
        assert f'<{tag} id="{symbol}"><code>{name}</code></{tag}>' in html


@pytest.mark.slow
def test_an_overloaded_name_keeps_one_anchor_each(tmp_path: Path) -> None:
    html = page(tmp_path, "if x:\n    def f(): pass\nelse:\n    def f(): pass\n")
    ids = re.findall(r'<h2 id="([^"]+)"', html)
    assert len(ids) == len(set(ids)) == 2


def test_an_init_without_a_note_continues_the_row_of_its_class(tmp_path: Path) -> None:
    source = "class A:\n    'What.'\n    x = 1\n\n    def __init__(self): pass\n"
    html = page(tmp_path, source)
    assert html.count("<section") == 1
    assert list(code_lines(html)) == [1, 3, 4, 5]
    assert '<span id="A.__init__">' in html
    noted = source.replace(": pass", ":\n        'Why.'")
    assert page(tmp_path, noted).count("<section") == 2


@pytest.mark.parametrize(
    ("contract", "label"),
    [
        ("Raises `ValueError` for 0.", "Errors"),
        ("Source: Euler.", "Source"),
        (">>> invert(2)\n    0.5", "Examples"),
        ("The inverse of 2\n    and 4:\n\n    >>> invert(2)\n    0.5", "Examples"),
        ("Raises that. Source: Euler.\n\n    >>> 1\n    1", "Errors, source, examples"),
    ],
    ids=["errors", "source", "example", "introduced example", "all"],
)
def test_the_contract_of_a_definition_is_folded(
    tmp_path: Path, contract: str, label: str
) -> None:
    docstring = f'"""One by `x`.\n\n    Any: `x`.\n\n    {contract}\n    """'
    html = page(tmp_path, f"def invert(x):\n    {docstring}\n")
    before, fold, after = re.split(r"<details[^>]*>|</details>", html)
    assert "Any:" in before
    assert f"<summary>{label}</summary>" in fold
    assert 'id="L4"' in before  # a link to a line leads to where it is shown
    assert 'id="L6"' in fold
    words = re.sub(r"<[^>]+>", "", unescape(fold)).split()
    assert set(contract.replace("`", "").split()) <= set(words)
    assert "Any:" not in words
    assert "<p>" not in after


def test_what_a_module_or_a_comment_says_is_not_folded(tmp_path: Path) -> None:
    source = '"""# T\n\nSource: Euler.\n"""\n# Why.\n#\n# Source: Euler.\nx = 1\n'
    assert "<details" not in page(tmp_path, source)


def test_a_region_is_folded_below_its_title(tmp_path: Path) -> None:
    source = "x = 1\n# region Input checks\ndef check(): pass\n# endregion\ny = 2\n"
    html = page(tmp_path, source)
    before, fold, after = re.split(r"<details[^>]*>|</details>", html)
    assert before.rstrip().endswith('<h2 id="input-checks">Input checks</h2>')
    assert "<summary>check</summary>" in fold
    assert '<h3 id="check">' in fold
    for part, number in [(before, 1), (fold, 3), (after, 5)]:
        assert list(code_lines(part)) == [number]
    assert "<h2" not in page(tmp_path, source, "#check")


def test_notes_are_converted_with_all_extensions_of_the_site(tmp_path: Path) -> None:
    note = "$x_i$ and `x`\n#\n# | a | b |\n# |---|---|\n# | 1 | 2 |"
    html = page(tmp_path, f"# {note}\n#\n# >>> 1\n# 1\nx = 1\n")
    for part in (
        "<math",
        "<code>x</code>",
        "<table>",
        'class="language-pycon highlight"',
    ):
        assert part in html.replace(
            'class="highlight"', 'class="language-pycon highlight"'
        )


def test_unclosed_markup_in_a_note_does_not_affect_the_code(tmp_path: Path) -> None:
    # An open fence, an open tag, an open comment: each ends with its note.
    source = "# ```\n# open\nx = 1\n# <div>\ny = 2\n# <!-- open\nz = 3\n"
    assert code_lines(page(tmp_path, source)) == {3: "x = 1", 5: "y = 2", 7: "z = 3"}


def test_markup_in_code_is_text(tmp_path: Path) -> None:
    html = page(tmp_path, "x = '<b>&amp;</b> `$x$` [a](b) **c**'\n")
    assert code_lines(html) == {1: "x = '<b>&amp;</b> `$x$` [a](b) **c**'"}
    assert "<b>" not in html
    assert "<math" not in html


def test_an_excerpt_shows_one_definition_and_no_bar(tmp_path: Path) -> None:
    source = (
        '"""# T"""\nx = 1\ndef f():\n    # why\n    return 1\n\ndef ff():\n    pass\n'
    )
    html = page(tmp_path, source, "#f", editions=lambda path: {"Copy": "a.py"})
    assert code_lines(html) == {3: "def f():", 5: "    return 1"}
    assert "<h" not in html
    assert "sn-bar" not in html


def test_the_bar_leads_to_the_files_to_copy_and_the_links(tmp_path: Path) -> None:
    html = page(
        tmp_path,
        '"""# Title\n\nProse.\n"""\n',
        editions=lambda path: {"Copy": f"plain/{path.name}"},
        links=lambda path: {"Tests": f"tests/{path.stem}.html"},
    )
    assert '<a class="md-button sn-copy" href="plain/a.py">Copy</a>' in html
    assert '<a class="md-button" href="tests/a.html">Tests</a>' in html
    assert html.index("Title") < html.index("sn-bar") < html.index("Prose.")
    assert "sn-step" not in html
    assert "sn-legend" not in html


@pytest.mark.slow
def test_the_bar_offers_what_can_be_done_with_a_recorded_run(tmp_path: Path) -> None:
    sizes = {"a.py": {"sliders": {"m": [3, 9]}}}
    html = page(tmp_path, f'"""# T"""\n{SHAPED}', execute=["*.py"], sizes=sizes)
    bar = html[html.index("sn-bar") : html.index("sn-legend")]
    assert re.findall(r"<button [^>]*hidden>(.+?)<", bar) == [
        "Step through",
        "Try other sizes",
    ]


SHAPED = '''
class T:
    def __init__(self, *shape):
        self.shape = shape

def f(x):
    """
    >>> y = f(T(3, 5))
    """
    y = T(*x.shape)  # [m, n]
    z = T(5, 3)  # [n, m]
    return T(5, 3) if "<" else None
'''


@pytest.mark.slow
def test_shapes_stand_beside_the_lines_that_gave_them(tmp_path: Path) -> None:
    html = page(tmp_path, SHAPED, execute=["*.py"])
    lines = SHAPED.split("\n")
    shown = code_lines(html)
    assert all(text == lines[number - 1] for number, text in shown.items())
    mark = 'data-line="10" style="--at:21"><span class="sn-mark">#</span> [m, n]</span>'
    assert mark in html
    assert 'data-line="11" style="--at:17"><span class="sn-mark">#</span> [n' in html
    at = len(lines[11])
    seen = f'<samp class="sn-shape" data-line="12" style="--at:{at}">[n, m]</samp>'
    assert f"{seen}\n</span>" in html
    assert html.count("<samp") == 1
    (data,) = re.findall(r'class="sn-data">(.*)</script>', html)
    assert [call["symbol"] for call in json.loads(data)["calls"]][-1] == "f"
    assert [
        path.suffix for path in (tmp_path / ".cache/sidenotes/recordings").iterdir()
    ] == [".json"]


@pytest.mark.slow
def test_an_unverified_claim_has_no_tick_and_a_false_one_is_answered(
    tmp_path: Path,
) -> None:
    unverified = SHAPED.replace("    z = T(5, 3)  # [n, m]\n", "")
    html = page(tmp_path, unverified, execute=["*.py"])
    assert 'data-line="10" style="--at:21"># [m, n]</span>' in html
    false = SHAPED.replace("z = T(5, 3)", "z = T(2, 3)")
    html = page(tmp_path, false, execute=["*.py"])
    assert '<span class="c1"># [n, m]</span>' in html
    assert 'data-line="11" style="--at:25">[2, 3]</samp>' in html


def test_without_files_to_run_nothing_is_run(tmp_path: Path) -> None:
    html = page(tmp_path, SHAPED)
    assert "sn-shape" not in html
    assert "sn-claim" not in html
    assert "<script" not in html
    assert not (tmp_path / ".cache").exists()


@pytest.mark.slow
def test_an_excerpt_carries_what_was_recorded_of_it_and_no_more(tmp_path: Path) -> None:
    html = page(tmp_path, SHAPED, "#f", execute=["*.py"])
    (data,) = re.findall(r'class="sn-data">(.*)</script>', html)
    assert {call["symbol"] for call in json.loads(data)["calls"]} == {"f"}
    assert "sn-shape" in html


@pytest.mark.parametrize("end", ["\r\n", "\r"], ids=["CRLF", "CR"])
def test_other_line_ends_make_the_same_page(tmp_path: Path, end: str) -> None:
    source = '"""# T\n\nProse.\n"""\n\n# note\nx = 1\n'
    expected = page(tmp_path, source)
    (tmp_path / "a.py").write_bytes(source.replace("\n", end).encode())
    assert convert("::literate a.py", root=str(tmp_path)) == expected


def test_tabs_and_hard_spaces_in_text_are_kept(tmp_path: Path) -> None:
    html = page(tmp_path, "if x:\n\ty = 'a\N{NO-BREAK SPACE}b'\n")
    assert code_lines(html) == {1: "if x:", 2: "\ty = 'a\N{NO-BREAK SPACE}b'"}


@pytest.mark.parametrize(
    ("directive", "message"),
    [
        ("::literate missing.py", r"missing\.py:1: there is no such file"),
        ("::literate a.py#nothing", r"a\.py:1: there is no `nothing` in this file"),
        (
            "::literate a.py\nand more",
            "cannot read '::literate a.py\\\\nand more'; write",
        ),
        ("::literate", "cannot read '::literate'; write"),
    ],
)
def test_a_directive_that_cannot_be_followed_is_refused(
    tmp_path: Path, directive: str, message: str
) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(LiterateError, match=message):
        convert(directive, root=str(tmp_path))


def test_a_listing_shows_a_file_with_an_anchor_for_each_definition(
    tmp_path: Path,
) -> None:
    source = "# a\nx = 1\n\n\ndef f():\n    return '<b>'\n\n\nclass A: ...\n"
    (tmp_path / "a.py").write_text(source)
    html = convert("::listing a.py", root=str(tmp_path))
    assert "\n".join(code_lines(html).values()) == source.rstrip("\n")
    assert html.index('id="L4"') < html.index('<i id="f">') < html.index('id="L5"')
    assert html.index('id="L8"') < html.index('<i id="A">') < html.index('id="L9"')


def test_a_plain_markdown_converter_needs_no_other_extension(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""# T\n\n$x$\n\n>>> 1\n1\n"""\n')
    extension = SidenotesExtension(root=str(tmp_path))
    html = markdown.markdown("::literate a.py", extensions=[extension])
    assert "<math" in html
    assert 'class="highlight"' in html


def test_what_the_site_has_configured_stays(tmp_path: Path) -> None:
    named = {"pymdownx.superfences": {"css_class": "mine"}}
    html = markdown.markdown(
        "```python\n1\n```",
        extensions=["pymdownx.superfences", SidenotesExtension(root=str(tmp_path))],
        extension_configs=named,
    )
    assert 'class="mine"' in html


def test_the_other_mode_of_arithmatex_is_refused(tmp_path: Path) -> None:
    extensions = [SidenotesExtension(root=str(tmp_path)), "pymdownx.arithmatex"]
    with pytest.raises(
        LiterateError, match=r"`- pymdownx.arithmatex: \{generic: true\}`"
    ):
        markdown.markdown("$x$", extensions=extensions)


def test_text_about_the_directive_is_text() -> None:
    assert "<code>::literate a.py</code>" in convert(
        "Write `::literate a.py` to begin."
    )
