# %% [markdown]
# # How implementations differ
#
# This page compares the conventions of five implementations of multi-head attention:
# layout, masks, return values, scale, dropout, biases, initial weights. Read it before
# you move code or a checkpoint from one to another: with the same weights and the same
# input, the five [compute the same function](equivalence.md), but in everything else
# they differ. Each cell of the tables is measured when this page is built, by a
# [probe](../source/compare/probes.md), an experiment on the module.

# %% hide="true"
from IPython.display import Markdown, display

from headnotes.compare.equivalence import SYSTEMS
from headnotes.compare.probes import PROBES


def table(properties):
    """One row per property, one column per implementation."""
    lines = ["| property |" + "|".join(f"`{name}`" for name in SYSTEMS) + "|"]
    lines.append("|---" * (len(SYSTEMS) + 1) + "|")
    for name in properties:
        found = "|".join(PROBES[name](system) for system in SYSTEMS)
        lines.append(f"| {name} | {found} |")
    return Markdown("\n".join(lines))


# %% [markdown]
# The implementations are [`core`](../source/mha.md), the reference implementation of
# Headnotes; [`causal`](../source/implementations/causal.md), which is always causal;
# [`valid_lens`](../source/implementations/valid_lens.md), which takes valid lengths
# instead of a mask; [`batch_first`](../source/implementations/batch_first.md), which
# returns its weights; and `torch`, which is `torch.nn.MultiheadAttention`. The first
# four follow published implementations, with [corrections](errata.md).
#
# ## Layout, masks and return values

# %% hide="true"
display(table(["layout", "mask", "returned"]))

# %% [markdown]
# Three common mistakes follow from these rows:
#
# - A batch-first tensor is accepted by a sequence-first module without an error, and
#   then sequences attend to each other instead of tokens.
# - A bool mask of one implementation is the inverse of the mask of another. It has the
#   right shape, so there is no error either.
# - The weights that `torch` returns are averaged over the heads: they have no axis for
#   heads.
#
# ## Scale, masked scores, dropout and float16

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
# *Below −1e30*: a key that may be attended to has all of the weight beside a masked
# one, even if its score is −10³⁰. *Shown before it*: the returned or stored weights are
# those before dropout, so they sum to 1 in training as well.
#
# A fully masked row of `torch` is NaN if the weights are requested, which is the
# default. With `need_weights=False` it uses another code path, and the context vector
# is zero, so the output is the output bias:

# %%
import torch
from torch import nn

theirs = nn.MultiheadAttention(6, 2)
x = torch.randn(3, 1, 6)
mask_all = torch.ones(3, 3, dtype=torch.bool)  # True: may not attend
with_weights, _ = theirs(x, x, x, attn_mask=mask_all)
without, _ = theirs(x, x, x, attn_mask=mask_all, need_weights=False)
print("need_weights=True: ", with_weights[0, 0, :3].tolist())
print("need_weights=False:", without[0, 0, :3].tolist())
assert with_weights.isnan().all()
assert torch.equal(without, theirs.out_proj.bias.expand_as(without))

# %% [markdown]
# ## Biases, initial weights and retained tensors

# %% hide="true"
display(table(["biases by default", "initial weights", "retained on the module"]))

# %% [markdown]
# ## Fill value of masked scores: −∞, −1e6 or −1e10
#
# The implementations of Headnotes are corrected: they work in float16, and a fully
# masked row gives zero. Their originals use three different values for a masked score,
# and the value matters. Here each of them goes through the same softmax of two scores,
# which returns two weights: with both keys masked, with the second key masked beside an
# allowed score of −2e6, and in float16 with one or both keys masked.

# %% fold="How it is measured"


def fill(row, masked, value):
    return row.masked_fill(masked, value)


def assign(row, masked, value):
    row[masked] = value
    return row


ORIGINALS = {
    "`causal`, `core`": (fill, -torch.inf),
    "`valid_lens`": (assign, -1e6),
    "`batch_first`": (fill, -1e10),
}


def weights(original, scores, masked, dtype=torch.float32):
    """A row of weights, as the original computes it."""
    fill, value = ORIGINALS[original]
    row = fill(torch.tensor(scores, dtype=dtype), torch.tensor(masked), value)
    found = ", ".join(f"{weight:.2g}" for weight in row.softmax(dim=0).tolist())
    return found.replace("nan", "NaN")


columns = [
    "original of",
    "value",
    "both masked",
    "−2e6, other masked",
    "float16",
    "float16, both masked",
]
lines = [f"| {' | '.join(columns)} |", "|---|--:|---|---|---|---|"]
for name, (_, value) in ORIGINALS.items():
    full = weights(name, [1.0, 2.0], [True, True])
    low = weights(name, [-2e6, 0.0], [False, True])
    try:
        half = weights(name, [1.0, 2.0], [False, True], torch.half)
        half_full = weights(name, [1.0, 2.0], [True, True], torch.half)
    except RuntimeError:
        half = half_full = "RuntimeError"
    lines.append(f"| {name} | {value:g} | {full} | {low} | {half} | {half_full} |")

# %% hide="true"
display(Markdown("\n".join(lines)))

# %% [markdown]
# Weights of ½ and ½ give the mean of all values, masked ones included. With −10⁶, a
# very low but allowed score loses all of its weight to the masked key. Neither −10⁶ nor
# −10¹⁰ exists in float16: assigned by an index, as the original of `valid_lens` does,
# the value becomes −∞, and `masked_fill` raises an error. −∞ exists in every dtype and
# is below every score, but it needs a rule for fully masked rows. In Headnotes, their
# [weights are zero](../source/mha.md#masked_softmax).
