# %% [markdown]
# # The equivalence matrix
#
# Five systems hold the same weights and are asked the same five questions, each in its
# own dialect. Do they compute the same function, and would they learn the same? They
# do, as closely as rounding allows. All numbers below were measured when this page was
# built, by [`compare`](../source/compare/equivalence.md), whose lines the
# [tests](../source/compare/tests/test_equivalence.md) run too.
#
# ## How to read it
#
# A cell holds two numbers, for float32 and for float64. Each is the distance from the
# system named in its row to **the farthest of the others**: the largest difference of
# any entry, relative to the largest entry. One rounding is $6 \cdot 10^{-8}$ in
# float32 and $10^{-16}$ in float64. A dash means that the system has no words for the
# question: `causal` always looks backwards, and only at itself.

# %% fold="How it is measured"
import torch
from IPython.display import Markdown, display

from headnotes.compare import equivalence as compare

HEADS, D_MODEL = 4, 24
measured = {}
for dtype in (torch.float32, torch.float64):
    like = {"dtype": dtype}
    systems = compare.systems(compare.SYSTEMS, heads=HEADS, d_model=D_MODEL, **like)
    measured[dtype] = compare.matrix(systems, compare.cases(D_MODEL, **like))


def number(value):
    """A distance, or a dash for a question without words."""
    return "–" if isinstance(value, str) else f"{value:.1e}".replace("e-0", "e-")


def table(quantity, rows):
    """One row a system, one column a question, float32 above float64."""
    questions = list(measured[torch.float32])
    lines = ["| system |" + "|".join(questions) + "|"]
    lines.append("|---" * (len(questions) + 1) + "|")
    for row in rows:
        cells = []
        for question in questions:
            single, double = (
                number(measured[dtype][question][quantity][row])
                for dtype in (torch.float32, torch.float64)
            )
            cells.append(single if single == double else f"{single}<br>{double}")
        lines.append(f"| `{row}` |" + "|".join(cells) + "|")
    return Markdown("\n".join(lines))


# %% [markdown]
# ## Outputs

# %% hide="true"
display(table("output", compare.SYSTEMS))

# %% [markdown]
# ## Gradients of the input
#
# The same random gradient arrives at each output; this is what leaves at the input.

# %% hide="true"
display(table("input gradient", compare.SYSTEMS))

# %% [markdown]
# ## Gradients of the weights
#
# All four projections with their biases, carried to one layout by
# [`convert`](../source/convert.md).

# %% hide="true"
display(table("weight gradients", compare.SYSTEMS))

# %% [markdown]
# ## The worst pair

# %%
worst = {dtype: compare.worst(cells) for dtype, cells in measured.items()}
for dtype, value in worst.items():
    print(f"{dtype!s:14} {value:.1e}")
assert worst[torch.float32] <= 1e-6
assert worst[torch.float64] <= 1e-13

# %% [markdown]
# ## Parameters
#
# As each is built if nobody asks for more or for less, with 8 heads and a width of 512.
# They differ only in [which biases they have](differences.md); with all biases it is
# the same number for all.

# %% hide="true"
from headnotes.compare.probes import biases, default_module

lines = ["| system | parameters | biases |", "|---|--:|---|"]
for name in compare.SYSTEMS:
    count = sum(p.numel() for p in default_module(name, 512, 8).parameters())
    lines.append(f"| `{name}` | {count:,} | {biases(name)} |")
display(Markdown("\n".join(lines)))

everything = {
    name: sum(p.numel() for p in module.parameters())
    for name, module in systems.items()
}
assert len(set(everything.values())) == 1

# %% [markdown]
# ## The stages
#
# The [four stages](../source/implementations/stages.md) that lead to `causal` have no
# output projection, and no biases here. So the others are given an identity in its
# place, and the stages join the table: `v1` and `v2` with one head, the `wrapper` with
# four.

# %% hide="true"
STAGES = {
    1: ("v1", "v2", "causal_head", "core", "causal", "torch"),
    HEADS: ("wrapper", "core", "causal", "torch"),
}
lines = ["| heads | system | no mask | causal |", "|--:|---|---|---|"]
for heads, names in STAGES.items():
    rows = {name: [] for name in names}
    for question in ("no mask", "causal"):
        for dtype in (torch.float32, torch.float64):
            case = {question: compare.cases(D_MODEL, dtype=dtype)[question]}
            modules = compare.systems(names, heads=heads, d_model=D_MODEL, dtype=dtype)
            cells = compare.matrix(modules, case)[question]
            for name in names:
                values = [by_name[name] for by_name in cells.values()]
                refused = isinstance(values[0], str)
                rows[name].append("–" if refused else number(max(values)))
    for name, (one, two, three, four) in rows.items():
        first = one if one == two else f"{one}<br>{two}"
        second = three if three == four else f"{three}<br>{four}"
        lines.append(f"| {heads} | `{name}` | {first} | {second} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# Here a cell is the worst of the output and both gradients. The gradient of the output
# projection is left out where a system has none.
#
# ## On your machine
#
# `python benchmarks/equivalence.py` measures the same on each device that you have, and
# writes down what it found with the machine and the versions. The recorded runs:

# %% hide="true"
import json
from pathlib import Path

lines = ["| machine | torch | date | float32 | float64 |", "|---|---|---|---|---|"]
for file in sorted(Path("../../benchmarks/results").glob("equivalence-*.json")):
    run = json.loads(file.read_text(encoding="utf-8"))
    single, double = run["worst"]["float32"], run["worst"]["float64"]
    lines.append(
        f"| {run['device']} | {run['torch']} | {run['date']} "
        f"| {single:.1e} | {double:.1e} |"
    )
display(Markdown("\n".join(lines)))
