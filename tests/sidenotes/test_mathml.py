"""Formulas become MathML, in place, and code stays code."""

import markdown
import pytest

from sidenotes.split import LiterateError

EXTENSIONS = ["pymdownx.arithmatex", "pymdownx.superfences", "sidenotes"]
CONFIG = {"pymdownx.arithmatex": {"generic": True}}


def convert(text: str) -> str:
    return markdown.markdown(text, extensions=EXTENSIONS, extension_configs=CONFIG)


def test_a_formula_in_a_line_is_inline_and_one_of_its_own_a_block() -> None:
    html = convert("Here $x_i$ is.\n\n$$\nx = \\frac12\n$$\n\nAnd on.")
    assert html.count("<math") == 2
    assert 'display="inline"' in html
    assert 'display="block"' in html
    assert "<msub>" in html
    assert "<mfrac>" in html
    assert "\\frac" not in html


def test_the_line_goes_on_after_a_formula() -> None:
    assert convert("Here $x$ is.").endswith("</span> is.</p>")


def test_a_dollar_in_code_is_no_formula() -> None:
    html = convert("`$x$` and\n\n```sh\necho $HOME $x\n```")
    assert "<math" not in html
    assert "$x$" in html


@pytest.mark.parametrize(
    "latex", [r"\operatorname{softmax}", r"\left(\sqrt{d_k}\right)"]
)
def test_what_the_pages_use_is_understood(latex: str) -> None:
    html = convert(f"${latex}$")
    assert "<math" in html
    assert "\\" not in html


@pytest.mark.parametrize("formula", ["${}$", "$$\n{}\n$$"])
def test_signs_of_html_are_those_of_the_formula(formula: str) -> None:
    html = convert(formula.format(r"i < j > k, \begin{matrix} a & b \end{matrix}"))
    assert "&amp;" not in html
    assert html.count("<mtd") == 2
    assert html.count("&#x0003C;") == html.count("&#x0003E;") == 1


def test_a_formula_that_cannot_be_read_stops_the_build_and_is_named() -> None:
    with pytest.raises(LiterateError, match=r"cannot read the formula 'a_b_c'"):
        convert("$a_b_c$")
