"""The panel in which a reader changes sizes and sees computed totals.

For each source, the site configures the sizes (with initial value and maximum), names
that are computed from them, and the totals to show:

    sliders: {q_len: [50, 4096], heads: [8, 64], d_k: [64, 256]}
    where: {d_model: heads * d_k}
    totals: {parameters of one map: (d_model + 1) * d_model}

Expressions consist of names, integers and + - * //. Without a script, the panel shows
the totals for the initial sizes.
"""

import ast
from html import escape
from typing import Any

from sidenotes.grammar import value_of, words_of
from sidenotes.notations import is_size
from sidenotes.split import LiterateError

KEYS = {"sliders", "where", "totals"}


def panel(sizes: dict[str, Any]) -> str:
    """The HTML of a panel; raises `LiterateError` if a formula cannot be evaluated.

    >>> html = panel({"sliders": {"n": [3, 9]}, "totals": {"pairs": "n * n"}})
    >>> html[html.index("<b data") :]
    '<b data-formula="n * n">9</b></span></p></form>'
    """
    if sizes.keys() - KEYS or "sliders" not in sizes:
        given = ", ".join(map(repr, sizes)) or "nothing"
        raise LiterateError(f"sizes have `sliders`, `where`, `totals`, not {given}")
    now = {name: start for name, (start, _) in sizes["sliders"].items()}
    sliders = [
        f'<span class="sn-size"><label>{name} <input type="number" name="{name}" '
        f'min="1" max="{most}" value="{start}" required readonly></label>'
        f'<input type="range" min="0" aria-label="{name}" hidden></span>'
        for name, (start, most) in sizes["sliders"].items()
    ]
    totals = []
    for name, formula in sizes.get("where", {}).items():
        now[name] = work_out(formula, now)
        totals.append((name, formula, now[name], f' data-name="{name}"'))
    for label, formula in sizes.get("totals", {}).items():
        totals.append((label, formula, work_out(formula, now), ""))
    follows = [
        f"<span>{escape(label)} <code>= {escape(formula)}</code> = "
        f'<b{named} data-formula="{escape(formula)}">{value:,}</b></span>'
        for label, formula, value, named in totals
    ]
    return (
        '<form class="sn-sizes" aria-label="Sizes" autocomplete="off">'
        '<button type="button" aria-label="Back to names" hidden>×</button>'
        f"<p>{' '.join(sliders)}</p><p>{' '.join(follows)}</p></form>"
    )


def work_out(formula: str, sizes: dict[str, int]) -> int:
    """The value of a formula; `sizes` must define all of its names."""
    try:
        tree = ast.parse(formula, mode="eval").body
    except SyntaxError:
        tree = None
    if tree is None or not is_size(tree):
        raise LiterateError(f"`{formula}` is not an expression of names with + - * //")
    if unknown := words_of((formula,)).keys() - sizes.keys():
        known = ", ".join(sizes)
        raise LiterateError(f"`{formula}` names {', '.join(unknown)}, not of {known}")
    value = value_of(formula, sizes)
    if value is None:
        raise LiterateError(f"`{formula}` has no value at {sizes}")
    return value
