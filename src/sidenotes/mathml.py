r"""Convert LaTeX to MathML at build time, so that pages need no script for formulas."""

from html import unescape
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert_to_element
from markdown.treeprocessors import Treeprocessor
from pymdownx.arithmatex import ArithmatexExtension

from sidenotes.split import LiterateError

# `pymdownx.arithmatex`, in generic mode, puts formulas as `\(…\)` into a span, or as
# `\[…\]` into a div, of this class.
FORMULA = "arithmatex"


class MathML(Treeprocessor):
    """Replaces the LaTeX in the elements of arithmatex by MathML."""

    def run(self, root: Element) -> None:
        self.require_generic()
        for element in root.iter():
            if element.get("class") == FORMULA and element.text:
                latex = unescape(element.text.strip()[2:-2])  # its `<` and `&`, too
                block = element.tag == "div"
                element.text = ""
                display = "block" if block else "inline"
                try:
                    element.append(convert_to_element(latex, display=display))
                except Exception as error:  # of many types, none with the formula in it
                    reason = f"cannot read the formula {latex!r}: {error!r}"
                    raise LiterateError(reason) from None

    def require_generic(self) -> None:
        """Refuse the other mode of arithmatex, which would leave formulas in LaTeX."""
        for extension in self.md.registeredExtensions:
            if isinstance(extension, ArithmatexExtension):
                if not extension.getConfig("generic"):
                    raise LiterateError(
                        "sidenotes needs the generic mode of arithmatex; write "
                        "`- pymdownx.arithmatex: {generic: true}` in "
                        "`markdown_extensions`"
                    )
