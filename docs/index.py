# %% [markdown]
# # Multi-head attention, line by line
#
# Headnotes is annotated source code that runs: each note stands beside the lines that
# it explains. What these pages print was printed by their code when the site was built,
# and what they claim has a test. Take a module home: it needs PyTorch alone, and it is
# right in the corners too.

# %% hide="true" alt="Attention as a product of five matrices, with numbers from a real run: the queries, one row a position, times the keys, one column a position, give the weights; each row of the weights, times the values, gives one row of the context."
import matplotlib.pyplot as plt
import torch

from headnotes import MultiHeadAttention

torch.manual_seed(8)
mha = MultiHeadAttention(heads=1, d_model=4).eval()
seen = {}
mha.query.register_forward_hook(lambda *a: seen.update(query=a[-1] * mha.scale))
mha.key.register_forward_hook(lambda *a: seen.update(key=a[-1]))
mha.value.register_forward_hook(lambda *a: seen.update(value=a[-1]))
mha.output.register_forward_pre_hook(lambda _, x: seen.update(context=x[0][:, :, None]))
asks, offers = 3 * torch.randn(5, 1, 4), 3 * torch.randn(7, 1, 4)
mha(query=asks, key=offers, value=offers)
names = ("query", "key", "value", "context")
query, key, value, context = (seen[name][:, 0, 0].detach() for name in names)
weights = mha.attn[:, :, 0, 0]
assert torch.allclose((query @ key.T).softmax(dim=1) @ value, context, atol=1e-6)

panels = [
    (query, "queries", "d", "i", "·"),
    (key.T, "keys", "j", "d", "→"),
    (weights, "weights", "j", "i", "·"),
    (value, "values", "d", "j", "="),
    (context, "context", "d", "i", ""),
]
widths = [width for panel in panels for width in (panel[0].shape[1], 2)]
figure, axes = plt.subplots(1, 10, figsize=(4.9, 1.35), width_ratios=widths)
for ax, gap, (matrix, title, across, down, sign) in zip(
    axes[::2], axes[1::2], panels, strict=True
):
    if title == "weights":
        ax.pcolormesh(matrix, vmin=0, vmax=1)
    else:
        reach = matrix.abs().max()
        ax.pcolormesh(matrix, vmin=-reach, vmax=reach, cmap="PuOr")
    ax.set(title=title, aspect="equal", xticks=[], yticks=[])
    ax.set_xlabel(across, family="monospace")
    ax.set_ylabel(down, family="monospace", rotation=0, va="center")
    ax.invert_yaxis()
    ax.spines[:].set_visible(False)
    gap.text(0.6, 0.5, sign, size=14, ha="center", va="center")
    gap.axis("off")
plt.show()

# %% [markdown]
# One head, for real: five queries `i` are compared with seven keys `j`, a softmax turns
# each row of scores into weights, and each row of weights mixes the values into one row
# of context. In the code these are two lines, `einsum("ibhd,jbhd->ijbh")` and
# `einsum("ijbh,jbhd->ibhd")`, over all heads `h` and batch items `b` at once. A page of
# this site looks like this:
#
# ::literate src/headnotes/mha.py#MultiHeadAttention.__init__
#
# ## Where to begin
#
# - **To understand it**, start with [a sentence and its
#   weights](learn/00_a_first_look.md) and go on [by
#   hand](learn/01_attention_by_hand.md), lesson by lesson; or read [the whole module,
#   line by line](source/mha.md).
# - **To use it**, copy the module from the buttons above its page, or take it with
#   `headnotes copy mha`. The [reference](reference/headnotes.md) lists what it accepts,
#   and [`convert`](source/convert.md) brings weights in from elsewhere.
# - **To keep it**, take `headnotes copy fast`: the same weights and the same answers [at
#   full speed](source/fast/module.md). How fast is [measured](compare/benchmarks.md).
# - **To check yours**, ask it the [laws](compare/laws.md) that every attention must
#   obey: `headnotes check my_model.py:MyAttention`. Its shape comments become [tests
#   of their own](shapes.md). What they catch is in the [museum](compare/museum.md).
# - **If it is the mask**, paint it in the [converter](compare/masks.md), and read it in
#   the convention of every library.
# - **To check us**, clone the project and run `make test`: it runs every example of
#   every page, and compares every module with loops that are too simple to be wrong.
# - **If you come from another tutorial**, its names are here too. See that [five systems
#   compute the same](compare/equivalence.md), [how they differ](compare/differences.md)
#   all the same, and what we had to [correct](compare/errata.md).

# %%
import torch

from headnotes import MultiHeadAttention, masks

mha = MultiHeadAttention(heads=8, d_model=512)
x = torch.randn(10, 32, 512)  # [seq_len, batch_size, d_model]
y = mha(query=x, key=x, value=x, mask=masks.causal(10))
print(y.shape, mha.attn.shape)
