"""The bug museum: real bugs of attention code, one file each, and how they are read.

An exhibit runs on torch alone. Its docstring tells the story in five paragraphs: the
title, `Symptom`, `Bug`, `Unseen` (why neither the loss nor the shapes showed it) and
`Thread` (where it really happened). Then come `LAW`, the law of `attention_laws` that
it breaks, `OPTIONS`, what `headnotes check` has to be told of it, `FIX`, the pieces of
text that mend it with what replaces them, and the code, as its author might have
written it. Words and code are ours.
"""

import ast
from pathlib import Path
from typing import Any, NamedTuple

# Which exhibits there are, in the order in which a visitor meets them.
ROOMS = {
    "What is hidden": [
        "inverted_mask",
        "zero_is_no_mask",
        "heads_by_coincidence",
        "mask_repeated",
        "mask_in_place",
        "norm_over_padding",
        "row_of_nan",
    ],
    "Axes and heads": [
        "softmax_over_queries",
        "softmax_over_heads",
        "heads_by_view",
        "heads_not_put_back",
        "grouped_by_tile",
        "fused_order",
        "batch_for_sequence",
    ],
    "Numbers and weights": [
        "scaled_by_width",
        "weights_after_dropout",
        "fill_beyond_half",
        "forgotten_value",
        "weights_with_their_graph",
    ],
    "Training and evaluation": [
        "causal_in_training",
        "dropout_in_eval",
        "mask_lost_in_eval",
    ],
    "Positions": [
        "corner_of_the_cache",
        "window_off_by_one",
        "alibi_sign",
        "rotary_halves",
    ],
}


class Exhibit(NamedTuple):
    """All that is known of one bug."""

    name: str
    title: str
    symptom: str
    bug: str
    unseen: str
    thread: str
    law: str
    options: dict[str, Any]
    target: str  # the class or function that is under test
    head: str  # the file up to the code
    code: str
    mended: str  # the code with its fix


def read(name: str) -> Exhibit:
    """The exhibit of this name; raises `ValueError` where a part of it is missing."""
    path = Path(__file__).parent / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)

    title, *paragraphs = (ast.get_docstring(tree) or "").split("\n\n")
    story = dict(paragraph.split(": ", 1) for paragraph in paragraphs)
    if [*story] != ["Symptom", "Bug", "Unseen", "Thread"]:
        raise ValueError(f"{path}: the docstring tells {[*story]}")

    values, definitions = {}, []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            values[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            definitions.append(node)
    if [*values] != ["LAW", "OPTIONS", "FIX"] or not definitions:
        raise ValueError(f"{path}: LAW, OPTIONS, FIX and code, not {[*values]}")

    lines = text.splitlines(keepends=True)
    start = definitions[0].lineno - 1
    code = mended = "".join(lines[start:])
    for old, new in values["FIX"]:
        if mended.count(old) != 1:
            raise ValueError(f"{path}: {mended.count(old)} times in the code: {old!r}")
        mended = mended.replace(old, new)
    return Exhibit(
        name,
        title,
        story["Symptom"],
        story["Bug"],
        story["Unseen"],
        story["Thread"],
        values["LAW"],
        values["OPTIONS"],
        definitions[-1].name,
        "".join(lines[:start]),
        code,
        mended,
    )


def flags(exhibit: Exhibit) -> list[str]:
    """The options of an exhibit, as `headnotes check` takes them."""
    said = []
    for name, value in exhibit.options.items():
        flag = "--" + {"settings": "with"}.get(name, name).replace("_", "-")
        if isinstance(value, dict):
            value = ",".join(f"{key}={each}" for key, each in value.items())
        elif isinstance(value, tuple):
            value = "=".join(value)
        said += [flag] if value is True else [flag, str(value)]
    return said
