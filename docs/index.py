# %% [markdown]
# # Multi-head attention, line by line
#
# Headnotes explains multi-head attention with PyTorch source code that runs. It is a
# course for those who learn how a Transformer's attention works, a set of modules to copy
# into a project, and a checker for attention that you have written yourself.
# [Installation](install.md) is one command.
#
# <div class="grid cards" markdown>
#
# - **Read**
#
#     [Start here](start.md): a first look, attention by hand, and on, lesson by lesson. Or
#     read the [core module, line by line](source/mha.md).
#
# - **Copy**
#
#     Copy [the core module](source/mha.md), made to be read, or the [fast
#     module](source/fast/module.md), which has the same weights and outputs. They depend on
#     PyTorch only.
#
# - **Check**
#
#     Test your own module: `headnotes check my_model.py:MyAttention` runs the [laws of
#     attention](compare/laws.md), which catch [common bugs](compare/museum.md). Or begin
#     with [the symptom](troubleshooting.md).
#
# </div>
#
# ## One head
#
# Five queries `i` are compared with seven keys `j`. A softmax turns each row of scores
# into attention weights, which sum to 1; each context vector is the average of the
# values, weighted by one row of them.

# %% hide="true" alt="Attention as products of matrices, with the numbers of one run: five queries, one per row, times seven keys, one per column, give, after a softmax, the attention weights; the weights times the values, one per row, give the context vectors, one per row."
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
x, memory = 3 * torch.randn(5, 1, 4), 3 * torch.randn(7, 1, 4)
mha(query=x, key=memory, value=memory)
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
figure, axes = plt.subplots(1, 10, figsize=(7.8, 2.1), width_ratios=widths)
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
    gap.text(0.6, 0.5, sign, size=16, ha="center", va="center")
    gap.axis("off")
plt.show()

# %% [markdown]
# In the core module these are two lines, `einsum("ibhd,jbhd->ijbh")` and
# `einsum("ijbh,jbhd->ibhd")`, over all heads `h` and batch items `b` at once.
#
# ## A page of this site
#
# Each note stands beside the lines that it explains. This is the first of the two
# products. A check mark says that the shape beside it was confirmed by running the code;
# click it to see the values.
#
# ::literate src/headnotes/mha.py#MultiHeadAttention.get_scores
#
# All outputs on these pages were printed by the code above them when the site was built.
#
# ## First example
#
# Self-attention with a causal mask, over a batch of 32 sequences of 10 tokens:

# %%
import torch

from headnotes import MultiHeadAttention, masks

mha = MultiHeadAttention(heads=8, d_model=512)
x = torch.randn(10, 32, 512)  # [seq_len, batch_size, d_model]
y = mha(query=x, key=x, value=x, mask=masks.causal(10))
print(y.shape, mha.attn.shape)

# %% [markdown]
# ## More
#
# - **Masks**: draw a mask in the [converter](compare/masks.md), and copy it in the
#   convention of your library.
# - **Weights**: [`convert`](source/convert.md) loads the weights of
#   `nn.MultiheadAttention`, of other implementations, and of [pretrained
#   models](pretrained.md) from Hugging Face, such as Llama.
# - **Speed**: [benchmarks](compare/benchmarks.md) of the fast module against PyTorch and
#   other libraries.
# - **Shapes**: [`pytest --shapes`](shapes.md) tests the shape comments in your code.
# - **Other tutorials**: [five implementations](compare/equivalence.md) compute the same
#   function, [differ](compare/differences.md) in masks, layout and edge cases, and have
#   [errata](compare/errata.md).
# - **Reference**: [all arguments](reference/headnotes.md) of the public classes and
#   functions, [notation and shapes](notation.md), and a [glossary](glossary.md).
# - **Tests**: in a clone, `make test` runs the examples on all pages, and compares the
#   implementations of attention with plain loops in float64.
