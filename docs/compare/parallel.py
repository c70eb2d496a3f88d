# %% [markdown]
# # Training on several processes
#
# Do several processes train the same model as one, and what do they send to one another?
# This page is for readers who want to choose an engine. It trains the
# [translator](../source/models/translator.md) for two steps on two and on four processes,
# with each of PyTorch's engines, and compares outputs, gradients, losses and bytes. All
# numbers were measured when this page was built, by
# [`compare`](../source/parallel/comparison.md), which has
# [tests](../source/parallel/tests/test_comparison.md) of its own.
#
# ## Three ways to split a training step
#
# | engine | batch | parameters | what travels |
# |---|---|---|---|
# | [DDP](../source/parallel/engines.md) | split | on every rank | gradients |
# | [FSDP2](../source/parallel/engines.md) | split | split, gathered for use | parameters and gradients |
# | [heads](../source/parallel/heads.md), tensor parallelism | on every rank | attention is split by heads | activations |

# %% fold="Plotting code"
import matplotlib.pyplot as plt

BLUE, ORANGE = "#2f86d6", "#d55e00"
PARTS = 4  # heads, and items of the batch


def draw_grid(ax, title, batch_is_split, parameters_are_split):
    """The batch above, the heads' parameters below; a color for each rank."""
    both = f"{BLUE} {ORANGE}".split()
    rows = (("batch", 1.2, batch_is_split), ("heads", 0, parameters_are_split))
    for label, y, is_split in rows:
        for n in range(PARTS):
            owners = [both[n * 2 // PARTS]] if is_split else both
            for part, color in enumerate(owners):
                height = 1 / len(owners)
                square = (n * 1.1, y + part * height), 1, height
                ax.add_patch(
                    plt.Rectangle(*square, color=color, alpha=0.7, linewidth=0)
                )
        ax.text(-0.2, y + 0.5, label, ha="right", va="center")
    ax.set(title=title, xlim=(-1.6, 4.5), ylim=(-0.1, 2.3), aspect="equal")
    ax.set_axis_off()


# %% alt="Three panels, each with four items of a batch above four heads, colored by the rank that holds them, blue or orange. DDP: two items are blue, two orange, and all heads have both colors. FSDP2: items and heads are half blue, half orange. Heads: all items have both colors, two heads are blue, two orange."
figure, axes = plt.subplots(1, 3, figsize=(7.2, 1.7))
draw_grid(axes[0], "DDP", True, False)
draw_grid(axes[1], "FSDP2", True, True)
draw_grid(axes[2], "heads", False, True)
plt.show()

# %% [markdown]
# Two ranks, blue and orange. With FSDP2, each holds half of every parameter, but computes
# with all of it: the other half is gathered for the time of a layer, and freed. With heads,
# each rank computes with its own heads only.
#
# ## The same training
#
# The largest difference between any entry and that of one process, relative to the largest
# entry. All are rounding errors of float32: sums are taken in another order.

# %% hide="true"
from IPython.display import Markdown, display

from headnotes.parallel.comparison import compare

measured = {ranks: compare(ranks) for ranks in (2, 4)}
NAMES = {"ddp": "DDP", "fsdp": "FSDP2", "heads": "heads"}
cases = [
    (f"{NAMES[engine]}, {ranks} processes", ranks, engine)
    for engine in NAMES
    for ranks in measured
]
rows = ["| |outputs|gradients|losses of 2 steps|", "|---|--:|--:|--:|"]
for name, ranks, engine in cases:
    found = measured[ranks][engine]
    differences = found.output, found.gradient, found.loss
    rows.append(f"|{name}|" + "|".join(f"{x:.0e}" if x else "0" for x in differences))
    assert max(differences) < 1e-5
display(Markdown("\n".join(rows)))

# %% [markdown]
# Sequences differ in length, so ranks have different numbers of tokens. If each took the mean
# over its own tokens, the average of these would be another loss. So
# [`mean`](../source/parallel/engines.md#Parallel.mean) divides by the tokens of all ranks.
#
# ## The bytes that travel
#
# The bytes that the first process has sent in one step, as the kernel counts them at its
# sockets, and [the formula](../source/parallel/comparison.md), which knows the sizes only:

# %% hide="true"
rows = ["| |collectives|formula|measured|more|", "|---|--:|--:|--:|--:|"]
for name, ranks, engine in cases:
    found = measured[ranks][engine]
    more = found.sent / found.formula - 1
    rows.append(
        f"|{name}|{len(found.calls)}|{found.formula / 1e6:.3f} MB|"
        f"{found.sent / 1e6:.3f} MB|{more:.2%}|"
    )
    assert not found.sent or 0 < more < 0.01  # only Linux counts bytes
display(Markdown("\n".join(rows)))

# %% [markdown]
# What is more than the formula are the headers of gloo's messages, and one number, the count
# of tokens.
#
# - **DDP** sends each gradient once around the ring: with $P$ bytes of parameters,
#   $2P\,(n-1)/n$, in few large messages. It does not depend on batch and length.
# - **FSDP2** gathers the parameters twice, in the forward and in the backward pass, and
#   reduces the gradients: $3P\,(n-1)/n$ with NCCL. Gloo has no reduce-scatter of its own, so
#   that the table shows $4P\,(n-1)/n$, less what is gathered only once. This is the price for
#   storing only a part of parameters, gradients and optimizer state.
# - **Heads** send activations, whose size is that of batch and length, and no gradient of a
#   parameter. Each attention layer waits for its messages, so this needs a fast connection,
#   such as that between the GPUs of one machine.
#
# ## Which one to choose
#
# A model that fits into the memory of one device: DDP. One whose parameters and optimizer
# state do not: FSDP2. One that needs more devices than the batch has items, or a single layer
# that is too large: split the heads, within a machine, and often with FSDP2 across machines.
#
# [`headnotes train --parallel`](../source/parallel/cli.md) trains the translator with each of
# them. With a GPU for each process, it uses NCCL in place of gloo; that path has not been
# measured here, as the build has no GPU.
