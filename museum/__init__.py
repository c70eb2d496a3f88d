"""The bug museum: published bugs of attention code, one file each.

An exhibit needs torch only. Its docstring has five paragraphs: the title (`Topic: what
is wrong`), `Symptom`, `Bug`, `Unseen` (why neither the loss nor the shapes showed it)
and `Thread` (where it really happened). Then follow `LAW`, the law of `attention_laws`
that it violates; `OPTIONS`, the options with which `headnotes check` finds it; `FIX`,
pairs of a piece of the code and its replacement; and the code, as its author might have
written it. The text and the code are our own.

`read_exhibit` parses such a file, and `command_line_flags` writes its options as flags.
"""

import ast
from pathlib import Path
from typing import Any, NamedTuple

# The exhibits by room, in the order of the page.
ROOMS = {
    "Masking": [
        "inverted_mask",
        "zero_is_no_mask",
        "heads_by_coincidence",
        "mask_repeated",
        "mask_in_place",
        "causal_or_padding",
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
    "Scores and weights": [
        "scaled_by_width",
        "weights_after_dropout",
        "fill_beyond_half",
        "softcap_after_mask",
        "softcap_before_scale",
        "sink_for_each_block",
        "forgotten_value",
        "weights_with_their_graph",
        "last_block",
    ],
    "Training and evaluation": [
        "causal_in_training",
        "dropout_in_eval",
        "dropout_never_applied",
        "mask_lost_in_eval",
    ],
    "Positions and decoding": [
        "corner_of_the_cache",
        "window_off_by_one",
        "ring_one_short",
        "state_lost_between_chunks",
        "alibi_sign",
        "alibi_slopes",
        "bias_without_offset",
        "shift_wraps",
        "rotary_halves",
        "rotary_over_heads",
        "rotary_in_half",
        "table_by_length",
    ],
}


class Exhibit(NamedTuple):
    """One bug: its description, its code, and the law that finds it."""

    name: str
    title: str  # "Topic: what is wrong"
    symptom: str
    bug: str
    why_unseen: str
    thread: str
    law: str
    options: dict[str, Any]
    target: str  # the class or function that is under test
    header: str  # the file up to the code
    code: str
    fixed_code: str


def read_exhibit(name: str) -> Exhibit:
    """Read one exhibit; raises `ValueError` if a part of it is missing."""
    path = Path(__file__).parent / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)

    title, *paragraphs = (ast.get_docstring(tree) or "").split("\n\n")
    texts = dict(paragraph.split(": ", 1) for paragraph in paragraphs)
    if [*texts] != ["Symptom", "Bug", "Unseen", "Thread"]:
        raise ValueError(
            f"{path}: the docstring must have the paragraphs Symptom, Bug, Unseen and "
            f"Thread, but has {[*texts]}"
        )

    values, definitions = {}, []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            values[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            definitions.append(node)
    if [*values] != ["LAW", "OPTIONS", "FIX"] or not definitions:
        raise ValueError(
            f"{path}: the file must define LAW, OPTIONS, FIX and code, but has "
            f"{[*values]}"
        )

    lines = text.splitlines(keepends=True)
    start = definitions[0].lineno - 1
    code = fixed_code = "".join(lines[start:])
    for old, new in values["FIX"]:
        count = fixed_code.count(old)
        if count != 1:
            raise ValueError(
                f"{path}: {old!r} must occur once in the code, not {count} times"
            )
        fixed_code = fixed_code.replace(old, new)
    return Exhibit(
        name,
        title,
        texts["Symptom"],
        texts["Bug"],
        texts["Unseen"],
        texts["Thread"],
        values["LAW"],
        values["OPTIONS"],
        definitions[-1].name,
        "".join(lines[:start]),
        code,
        fixed_code,
    )


def command_line_flags(exhibit: Exhibit) -> list[str]:
    """The options of an exhibit, as flags of `headnotes check`."""
    flags = []
    for name, value in exhibit.options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, dict):
            value = ",".join(f"{key}={each}" for key, each in value.items())
        elif isinstance(value, tuple):
            value = "=".join(value)
        flags += [flag] if value is True else [flag, str(value)]
    return flags
