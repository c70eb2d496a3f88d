# %% [markdown]
# # Who differs how
#
# The five systems [compute the same](equivalence.md) once they hold the same weights
# and are asked the same question. What differs is everything around it, and that is
# where people stumble when they carry code or a checkpoint from one to another. No cell
# of these tables was typed: each is the answer of a [probe](../source/compare/probes.md), which
# does something to the module and looks at what happens.

# %% hide="true"
from IPython.display import Markdown, display

from headnotes.compare.equivalence import SYSTEMS
from headnotes.compare.probes import PROBES


def table(questions):
    """One row a question, one column a system."""
    lines = ["| question |" + "|".join(f"`{name}`" for name in SYSTEMS) + "|"]
    lines.append("|---" * (len(SYSTEMS) + 1) + "|")
    for question in questions:
        answers = "|".join(PROBES[question](name) for name in SYSTEMS)
        lines.append(f"| {question} | {answers} |")
    return Markdown("\n".join(lines))


# %% [markdown]
# `core` is [the page](../source/mha.md), `causal`, `valid_lens` and `batch_first` are
# [as others](../source/implementations/causal.md)
# [write](../source/implementations/valid_lens.md)
# [it](../source/implementations/batch_first.md), and `torch` is
# `torch.nn.MultiheadAttention`.
#
# ## How it is called

# %% hide="true"
display(table(["layout", "mask", "returned"]))

# %% [markdown]
# Three traps lie in these rows. A batch-first tensor fits into a sequence-first module
# without complaint, and attends across the batch. A mask for one of the columns,
# inverted, is a mask for another. And the weights that `torch` returns are averaged
# over the heads: the axis is missing.
#
# ## What it computes

# %% hide="true"
display(
    table(
        [
            "scores times",
            "a masked score lies",
            "fully masked row",
            "dropout",
            "float16 works",
        ]
    )
)

# %% [markdown]
# *Below −1e30* means that a key which may be read wins against one which may not, even
# if its score is −10³⁰. *Shown before it* means that the weights which you can look at
# still sum to 1 in training.
#
# `torch` reads NaN from an empty row when it is asked for the weights. If it is not,
# it takes another path, and reads zero there too:

# %%
import torch
from torch import nn

theirs = nn.MultiheadAttention(6, 2)
x = torch.randn(3, 1, 6)
nothing = torch.ones(3, 3, dtype=torch.bool)  # True forbids
with_weights, _ = theirs(x, x, x, attn_mask=nothing)
without, _ = theirs(x, x, x, attn_mask=nothing, need_weights=False)
print("need_weights=True: ", with_weights[0, 0, :3].tolist())
print("need_weights=False:", without[0, 0, :3].tolist())
assert with_weights.isnan().all()
assert torch.equal(without, theirs.out_proj.bias.expand_as(without))

# %% [markdown]
# ## What it holds

# %% hide="true"
display(table(["biases by default", "initial weights", "retained on the module"]))

# %% [markdown]
# ## What the originals fill in
#
# Ours agree on empty rows and on float16 because they were made to. The published
# originals write three different numbers over a forbidden score, and the number
# decides. Here each of the three goes through the same softmax, in a row that may see
# nothing, in a row whose one permitted score is very low, and in float16:

# %% fold="How it is measured"
FILLS = {"`causal`, `core`": -torch.inf, "`valid_lens`": -1e6, "`batch_first`": -1e10}


def weights(scores, allowed, fill, dtype=torch.float32):
    """A row of weights, the forbidden scores overwritten by `fill`."""
    row = torch.tensor(scores, dtype=dtype)
    return row.masked_fill(~torch.tensor(allowed), fill).softmax(dim=0).tolist()


def say(row):
    return ", ".join(f"{weight:.2g}" for weight in row)


lines = ["| the original of | fills | a row without keys | a score of −2e6 beside a "]
lines[0] += "forbidden key | float16, one key forbidden | float16, no keys |"
lines.append("|---|--:|---|---|---|---|")
for name, fill in FILLS.items():
    empty = say(weights([1.0, 2.0], [False, False], fill))
    low = say(weights([-2e6, 0.0], [True, False], fill))
    try:
        half = say(weights([1.0, 2.0], [True, False], fill, torch.half))
        none = say(weights([1.0, 2.0], [False, False], fill, torch.half))
    except RuntimeError:
        half = none = "RuntimeError"
    lines.append(f"| {name} | {fill:g} | {empty} | {low} | {half} | {none} |")

# %% hide="true"
display(Markdown("\n".join(lines)))

# %% [markdown]
# A row of ½ and ½ is the mean of all values, the forbidden ones among them. Minus
# infinity is the one number that exists in every dtype and lies below every score; it
# only needs a rule for the row without keys, and the rule of this house is
# [zero](../source/mha.md#masked_softmax).
