r"""LaTeX to MathML while the page is built, so that no page needs a script for it."""

from xml.etree.ElementTree import Element

from latex2mathml.converter import convert_to_element
from markdown.treeprocessors import Treeprocessor

# `pymdownx.arithmatex`, in generic mode, finds the formulas and leaves them as
# `\(…\)` in a span, or `\[…\]` in a div, of this class.
FORMULA = "arithmatex"


class MathML(Treeprocessor):
    """Fills the elements that arithmatex leaves with what a browser can draw."""

    def run(self, root: Element) -> None:
        for element in root.iter():
            if element.get("class") == FORMULA and element.text:
                latex = element.text.strip()[2:-2]
                block = element.tag == "div"
                element.text = ""
                element.append(
                    convert_to_element(latex, display="block" if block else "inline")
                )
