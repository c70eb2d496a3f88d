"""The panel of sizes: complete as text, and strict about what it is told."""

import re
from html import unescape
from pathlib import Path

import markdown
import pytest

from sidenotes.extension import SidenotesExtension
from sidenotes.sizes import panel
from sidenotes.split import LiterateError

SIZES = {
    "sliders": {"q_len": [5, 90], "heads": [3, 16], "d_k": [7, 64]},
    "where": {"d_model": "heads * d_k"},
    "totals": {"numbers": "q_len * (d_model + 1)", "half of it": "d_model // 2 - 1"},
}


def text_of(html: str) -> str:
    html = re.sub(r'<input type="number"[^>]* value="(\d+)"[^>]*>', r"\1", html)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


def test_totals_are_worked_out_for_the_sizes_to_begin_with() -> None:
    text = text_of(panel(SIZES))
    assert "q_len 5 heads 3 d_k 7 d_model = heads * d_k = 21" in text
    assert "numbers = q_len * (d_model + 1) = 110" in text
    assert "half of it = d_model // 2 - 1 = 9" in text


def test_large_totals_are_readable() -> None:
    assert ">1,000,000<" in panel(
        {"sliders": {"n": [1000, 2000]}, "totals": {"a": "n * n"}}
    )


def test_a_size_reaches_from_one_to_the_greatest() -> None:
    field = 'name="heads" min="1" max="16" value="3" required readonly>'
    assert field in panel(SIZES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total": {}}, "sizes have `sliders`, `where`, `totals`, not 'sliders', "),
        ({"totals": {"a": "q_len / 2"}}, "`q_len / 2` is not an expression of names"),
        ({"totals": {"a": "q_len, 2"}}, "`q_len, 2` is not an expression of names"),
        ({"totals": {"a": "q_len +"}}, "`q_len +` is not an expression of names"),
        ({"totals": {"a": "k_len"}}, "`k_len` names k_len, not of q_len, heads, d_k"),
        ({"where": {"a": "d_model"}}, "`d_model` names d_model, not of q_len"),
        ({"totals": {"a": "d_k // (d_k - 7)"}}, "`d_k // (d_k - 7)` has no value at"),
    ],
)
def test_what_cannot_be_worked_out_is_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(LiterateError, match=re.escape(message)):
        panel(SIZES | change)


def test_sizes_without_sliders_are_refused() -> None:
    with pytest.raises(LiterateError, match="not nothing"):
        panel({})


def page(folder: Path, directive: str, **sizes: object) -> str:
    (folder / "a.py").write_text('"""# A"""\n\ndef f(x):\n    return x\n')
    options = {"root": str(folder), "sizes": {f"{k}.py": v for k, v in sizes.items()}}
    return markdown.markdown(directive, extensions=[SidenotesExtension(**options)])


def test_only_the_page_that_names_sizes_has_a_panel(tmp_path: Path) -> None:
    parts = ('class="sn-sizes"', "Try other sizes</button>")
    html = page(tmp_path, "::literate a.py", a=SIZES)
    assert all(part in html for part in parts)
    for other in (
        page(tmp_path, "::literate a.py"),
        page(tmp_path, "::literate a.py", b=SIZES),
        page(tmp_path, "::literate a.py#f", a=SIZES),
    ):
        assert not any(part in other for part in parts)
