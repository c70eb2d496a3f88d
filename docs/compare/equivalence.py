# %% [markdown]
# # Equivalence matrix
#
# Do five implementations of multi-head attention compute the same function, and would
# they train alike? This page gives them the same weights and the same inputs in five
# cases, and compares outputs and gradients pair by pair. They agree up to rounding. All
# numbers were measured when this page was built, by
# [`compare`](../source/compare/equivalence.md), which has
# [tests](../source/compare/tests/test_equivalence.md) of its own. The five
# implementations are described in [How implementations differ](differences.md).
#
# ## How to read the tables
#
# A cell contains one number for float32 and one for float64. Each is the largest
# difference between this implementation and **any of the others**, in any entry,
# relative to the largest entry. One rounding is $6 \cdot 10^{-8}$ in float32 and
# $10^{-16}$ in float64. A dash means that the implementation cannot compute the case:
# `causal` is always causal, and has neither padding masks nor cross-attention.

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
    """A difference, or a dash for a case that cannot be computed."""
    return "–" if isinstance(value, str) else f"{value:.1e}".replace("e-0", "e-")


def table(quantity, rows):
    """One row per implementation, one column per case, float32 above float64."""
    cases = list(measured[torch.float32])
    lines = ["| implementation |" + "|".join(cases) + "|"]
    lines.append("|---" * (len(cases) + 1) + "|")
    for row in rows:
        cells = []
        for case in cases:
            single, double = (
                number(measured[dtype][case][quantity][row])
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
# ## Input gradients
#
# Each output receives the same random gradient in the backward pass.

# %% hide="true"
display(table("input gradient", compare.SYSTEMS))

# %% [markdown]
# ## Weight gradients
#
# The gradients of all four projections and their biases, converted to one layout by
# [`convert`](../source/convert.md).

# %% hide="true"
display(table("weight gradients", compare.SYSTEMS))

# %% [markdown]
# ## Largest difference of all

# %%
worst = {dtype: compare.worst(cells) for dtype, cells in measured.items()}
for dtype, value in worst.items():
    print(f"{dtype!s:14} {value:.1e}")
assert worst[torch.float32] <= 1e-6
assert worst[torch.float64] <= 1e-13

# %% [markdown]
# ## Number of parameters
#
# Here are the parameters of each implementation by default, with 8 heads and `d_model`
# = 512. The numbers differ only by [the biases](differences.md); with all biases they
# are the same.

# %% hide="true"
from headnotes.compare.probes import biases, default_module

lines = ["| implementation | parameters | biases |", "|---|--:|---|"]
for name in compare.SYSTEMS:
    count = sum(p.numel() for p in default_module(name, 512, 8).parameters())
    lines.append(f"| `{name}` | {count:,} | {biases(name)} |")
display(Markdown("\n".join(lines)))

with_all_biases = {
    sum(p.numel() for p in module.parameters()) for module in systems.values()
}
assert len(with_all_biases) == 1

# %% [markdown]
# ## The four stages that lead to `causal`
#
# The [four stages](../source/implementations/stages.md) have no output projection, and
# no biases here. So the others get an identity matrix as output projection. `v1`, `v2`
# and `causal_head` have one head, the `wrapper` has four.

# %% hide="true"
STAGES = {
    1: ("v1", "v2", "causal_head", "core", "causal", "torch"),
    HEADS: ("wrapper", "core", "causal", "torch"),
}
lines = ["| heads | implementation | no mask | causal |", "|--:|---|---|---|"]
for heads, names in STAGES.items():
    rows = {name: [] for name in names}
    for case in ("no mask", "causal"):
        for dtype in (torch.float32, torch.float64):
            cases = {case: compare.cases(D_MODEL, dtype=dtype)[case]}
            modules = compare.systems(names, heads=heads, d_model=D_MODEL, dtype=dtype)
            cells = compare.matrix(modules, cases)[case]
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
# Here a cell is the largest difference of the output and of both gradients. The
# gradient of the output projection is left out if an implementation has none.
#
# ## Other machines and GPUs
#
# `python benchmarks/equivalence.py` measures the same on each device of your machine,
# and records the result with the device and the versions. The recorded runs:

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
