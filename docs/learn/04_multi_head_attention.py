# %% [markdown]
# # Multi-head attention
#
# Multi-head attention runs several attention heads in parallel, each with its own
# projections, and concatenates their context vectors. One head gives each query one
# average of the values; a token may need several, a verb its subject and its object, for
# example. This lesson computes the heads first one after the other, then all in one
# matrix product, and shows what breaks when that product is split into heads in the wrong
# way. You need the lessons up to [causal self-attention](03_causal_self_attention.md),
# and `view` and `transpose` of PyTorch. Reading time: 15 minutes.

# %%
import math

import torch
from IPython.display import Markdown, display

from headnotes import convert
from headnotes.implementations import causal, stages

words = ["Your", "journey", "starts", "with", "one", "step"]
inputs = torch.tensor(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)
batch = torch.stack([inputs, inputs])  # the same sentence twice

# %% [markdown]
# ## Several heads, concatenated
#
# The simplest way is to run `CausalAttention` of the previous lesson several times, each
# time with its own weights, and to concatenate the results. This is the last of the
# [four stages](../source/implementations/stages.md), here with two heads of width 2:

# %%
torch.manual_seed(123)
wrapper = stages.MultiHeadAttentionWrapper(
    d_in=3, d_out=2, context_length=6, dropout=0.0, num_heads=2
).requires_grad_(False)
concatenated = wrapper(batch)
print("[batch_size, seq_len, num_heads * d_out] =", list(concatenated.shape))
print(concatenated[0])
assert torch.equal(concatenated[0], concatenated[1])

# %% [markdown]
# The first two columns come from head 0, the other two from head 1. The heads do not
# influence each other. Since nothing has been trained, both spread their attention
# weights nearly evenly over the keys that the mask allows, as [lesson
# 2](02_queries_keys_and_values.md#scores-at-initialization) explains. But the two maps
# are not equal:

# %% alt="Two heat maps of attention weights, one per head, both zero above the diagonal. Each row is nearly even, but head 1 gives ‘Your’ a little less weight than head 0 does."
from headnotes.plots import display_attention


def attention_weights(queries, keys):
    """Causal attention weights, over the last two dimensions."""
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    scores = queries @ keys.mT / math.sqrt(keys.shape[-1])
    return scores.masked_fill(future, -math.inf).softmax(dim=-1)


maps = [attention_weights(h.W_query(inputs), h.W_key(inputs)) for h in wrapper.heads]
_ = display_attention(words, words, torch.stack(maps, dim=-1))

# %%
for h, weights in enumerate(maps):
    low, high = weights[-1].aminmax()  # the last row: six keys, 0.17 each if even
    print(f"head {h}, last row: weights from {low:.2f} to {high:.2f}")
    assert low > 0.12
    assert high < 0.22

# %% [markdown]
# ## One matrix product for all heads
#
# Each head multiplies the same inputs by its own small matrix. Stack these matrices, and
# a single product gives the queries of all heads:

# %%
stacked = torch.cat([head.W_query.weight for head in wrapper.heads])
queries = batch @ stacked.T  # [batch_size, seq_len, num_heads * head_dim]
print("matrix: ", list(stacked.shape))
print("queries:", list(queries.shape))
for h, head in enumerate(wrapper.heads):
    own = queries[..., 2 * h : 2 * h + 2]
    assert torch.allclose(own, head.W_query(batch), atol=1e-6)

# %% [markdown]
# So **a head is a contiguous block of rows** of this matrix, and a contiguous block of
# columns of the queries. `view` splits the last dimension into heads and components of a
# head, without moving anything in memory. `transpose` then puts the heads before the
# tokens, as batched matrix products need it.

# %%
split = queries.view(2, 6, 2, 2)  # [batch_size, seq_len, num_heads, head_dim]
split = split.transpose(1, 2)  # [batch_size, num_heads, seq_len, head_dim]
for h, head in enumerate(wrapper.heads):
    assert torch.allclose(split[:, h], head.W_query(batch), atol=1e-6)
print("[batch_size, num_heads, seq_len, head_dim] =", list(split.shape))

# %% [markdown]
# ## Splitting into heads: `view` and `transpose`, not `view` alone
#
# Why two steps? `view` alone can give the same shape. This is a well-known mistake,
# because it raises no error. But `view` does not permute dimensions: the numbers keep
# their order in memory, token after token. To see where each component goes, we label
# it: 13 is component 3 of token 1.

# %%
seq_len, num_heads, head_dim = 6, 2, 2
labels = 10 * torch.arange(6)[:, None] + torch.arange(4)  # [seq_len, d_out]
right = labels.view(seq_len, num_heads, head_dim).transpose(0, 1)
wrong = labels.view(num_heads, seq_len, head_dim)
print("same shape:", list(right.shape), list(wrong.shape))
print("right, head 0:", right[0].tolist())
print("wrong, head 0:", wrong[0].tolist())


# %% fold="Plotting code"
import matplotlib.pyplot as plt


def draw_grids(grids):
    """Tables of labels, each cell in the color of its token."""
    shape = {"width_ratios": [grid.shape[1] for grid in grids.values()]}
    size = {"figsize": (6.4, 2.9), "sharey": True}
    _, axes = plt.subplots(1, len(grids), gridspec_kw=shape, **size)
    lines = {"edgecolors": "#8a8a8a", "linewidth": 0.4}
    for ax, (title, grid) in zip(axes, grids.items(), strict=True):
        ax.pcolormesh(grid // 10, vmin=0, vmax=5, **lines)
        for i, row in enumerate(grid.tolist()):
            for j, label in enumerate(row):
                ink = "white" if label // 10 < 3 else "black"
                place = {"ha": "center", "va": "center", "size": 8}
                ax.text(j + 0.5, i + 0.5, f"{label:02}", place, color=ink)
        ax.set(title=title, aspect="equal", xticks=[])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    axes[0].invert_yaxis()
    axes[0].set_yticks([i + 0.5 for i in range(6)], words)
    plt.show()


# %% alt="Five tables with one color per token. Before the split, each row is one token. Split correctly, both heads have one row per token. Split wrongly, head 0 has the first three tokens on two rows each, and head 1 the last three."
grids = {"before": labels, "right: head 0": right[0], "head 1": right[1]}
draw_grids(grids | {"wrong: head 0": wrong[0], " head 1": wrong[1]})

# %% [markdown]
# On the left, each row is one token, in one color. Split correctly, each head has all
# six tokens, and half of the components of each. Split wrongly, head 0 has *all*
# components of the first three tokens, on two rows each, and head 1 has those of the
# last three. The tokens have been divided among the heads, instead of the components.
#
# ## What a wrong split breaks
#
# We build both, and a third version that also merges the heads wrongly, so that each
# number returns to the place from which it came.


# %%
def attend(x, split, merge, mask=True):
    """Attention with the weights of the wrapper, and these ways to split and merge."""
    q, k, v = (
        split(x @ torch.cat([h.get_parameter(name) for h in wrapper.heads]).T)
        for name in ("W_query.weight", "W_key.weight", "W_value.weight")
    )
    if mask:
        weights = attention_weights(q, k)
    else:
        weights = (q @ k.mT / math.sqrt(2)).softmax(dim=-1)
    return merge(weights @ v)


correct = (
    lambda x: x.view(6, 2, 2).transpose(0, 1),
    lambda x: x.transpose(0, 1).flatten(1),
)
wrong_split = (lambda x: x.view(2, 6, 2), correct[1])
both_wrong = (wrong_split[0], lambda x: x.reshape(6, 4))
ways = {"correct": correct, "wrong split": wrong_split, "both wrong": both_wrong}

# %% [markdown]
# Change one token after the other, and record which outputs depend on it:

# %%
depends = {name: torch.zeros(6, 6, dtype=torch.bool) for name in ways}
for name, way in ways.items():
    for j in range(6):
        changed = inputs.clone()
        changed[j] += 1
        difference = attend(changed, *way) - attend(inputs, *way)
        depends[name][:, j] = difference.abs().amax(dim=-1) > 1e-4

print(" " * 8, *(f"{name:14}" for name in ways))
for i, word in enumerate(words):
    rows = [" ".join("·■"[n] for n in depends[name][i].int()) for name in ways]
    print(f"{word:8}", *(f"{row:14}" for row in rows))

# %% [markdown]
# A row is an output, a column is the token that was changed. On the left, as it should
# be, each output depends on its own token and on those before it. In the middle, the
# output of *Your* depends on *with*, three tokens later: **the future leaks**, although
# the causal mask is applied. (And the output of *starts* does not depend on *starts*.)
# The mask refers to rows, and rows are no longer tokens.
#
# The third version is harder to find. Nothing leaks, since each row is back in its
# place. But no output of the second half depends on any token of the first half. A test
# that looks only for leaks passes.

# %%
past = torch.ones(6, 6, dtype=torch.bool).tril()
assert torch.equal(depends["correct"], past)
assert depends["wrong split"][0, 3]
assert not depends["wrong split"][2, 2]
assert not (depends["both wrong"] & ~past).any()
assert not depends["both wrong"][3:, :3].any()

# %% [markdown]
# One test finds both. Without a mask and without positions, self-attention is
# permutation-equivariant: shuffle the tokens, and the outputs are shuffled in the same
# way. With a wrong split it is not:

# %%
order = torch.tensor([3, 0, 5, 1, 4, 2])
for name, way in ways.items():
    shuffled = attend(inputs[order], *way, mask=False)
    same = torch.allclose(shuffled, attend(inputs, *way, mask=False)[order])
    print(f"{name:11} permutation-equivariant: {same}")
    assert same == (name == "correct")

# %% [markdown]
# ## Batched matrix products: heads before tokens
#
# `@` multiplies matrices over the last two dimensions, and treats all others as batch
# dimensions. That is why heads are put before tokens. Here is a small tensor, with one
# sequence, two heads, three tokens and four components:

# %%
a = torch.tensor(
    [
        [
            [
                [0.2745, 0.6584, 0.2775, 0.8573],
                [0.8993, 0.0390, 0.9268, 0.7388],
                [0.7179, 0.7058, 0.9156, 0.4340],
            ],
            [
                [0.0772, 0.3565, 0.1479, 0.5331],
                [0.4066, 0.2318, 0.4545, 0.9737],
                [0.4606, 0.5159, 0.4220, 0.5786],
            ],
        ]
    ]
)  # [batch_size, num_heads, seq_len, head_dim]
print(a @ a.mT)

# %% [markdown]
# Each head has its own matrix of dot products of tokens with tokens. One head at a time
# gives the same:

# %%
first, second = a[0]
print("first head:", first @ first.T, sep="\n")
print("second head:", second @ second.T, sep="\n")
assert torch.allclose((a @ a.mT)[0, 0], first @ first.T)
assert torch.allclose((a @ a.mT)[0, 1], second @ second.T)

# %% [markdown]
# With tokens before heads, the same line would multiply, for each token, heads with
# heads:

# %%
tokens_first = a.transpose(1, 2)  # [batch_size, seq_len, num_heads, head_dim]
print("heads before tokens:", list((a @ a.mT).shape))
print("tokens before heads:", list((tokens_first @ tokens_first.mT).shape))

# %% [markdown]
# ## The class: `causal.MultiHeadAttention`
#
# These are the steps of
# [`causal.MultiHeadAttention`](../source/implementations/causal.md): one product, a
# split, attention, a merge. One more matrix follows, the **output projection**
# `out_proj`. It combines the heads: each component of the output depends on the context
# vectors of all heads.

# %%
torch.manual_seed(123)
mha = causal.MultiHeadAttention(
    d_in=3, d_out=2, context_length=6, dropout=0.0, num_heads=2
).requires_grad_(False)
output = mha(batch)
print("[batch_size, seq_len, d_out] =", list(output.shape))
print(output[0])
assert torch.equal(output[0], output[1])

# %% [markdown]
# ## Number of heads, head width and parameters
#
# Seed and arguments are those of the wrapper, but the output has two columns instead of
# four. The two classes define `d_out` differently: in the wrapper it is the width of
# *one* head, here it is the width of *all heads together*. So each head has width 1
# here, and the scores are divided by $\sqrt 1$.


# %%
def count(module):
    return sum(p.numel() for p in module.parameters())


w, m = wrapper, mha
width = w.heads[0].W_key.out_features
rows = [
    ("with two heads", "`stages` wrapper", "`causal`, split"),
    ("---", "---:", "---:"),
    ("argument `d_out`", width, m.d_out),
    ("width of a head", width, m.head_dim),
    ("scores are divided by", f"√{width}", f"√{m.head_dim}"),
    ("width of the output", concatenated.shape[-1], output.shape[-1]),
    ("parameters", count(w), count(m)),
]
display(Markdown("\n".join(f"| {a} | {b} | {c} |" for a, b, c in rows)))
assert (count(w), count(m)) == (36, 24)

# %% [markdown]
# The wrapper has $2 \cdot 3$ matrices of $3 \times 2$, which makes 36 parameters. The
# split class has three such matrices and the output projection, $2 \times 2$ with a bias
# of 2, which makes $18 + 6 = 24$. At the size of the first Transformer, 8 heads of width
# 64:

# %%
rows = [
    ("with eight heads", "`stages` wrapper", "`causal`, split"),
    ("---", "---:", "---:"),
]
for bias, label in ((False, "no `qkv_bias`"), (True, "with `qkv_bias`")):
    w = stages.MultiHeadAttentionWrapper(512, 64, 1, 0.0, 8, qkv_bias=bias)
    m = causal.MultiHeadAttention(512, 512, 1, 0.0, 8, qkv_bias=bias)
    cells = (f"{count(x):,}" for x in (w, m))
    rows.append((f"parameters, {label}", *cells))
    assert count(m) == (1_050_624 if bias else 1_049_088)
    assert count(m) - count(w) == 512 * 512 + 512  # the output projection
display(Markdown("\n".join(f"| {a} | {b} | {c} |" for a, b, c in rows)))

# %% [markdown]
# At equal widths, the two differ by the output projection only. With `d_out` fixed, more
# heads do not need more parameters: the same matrices are split into narrower blocks.
#
# ## Both classes compute the same
#
# Give the split class the stacked weights of the wrapper, and the identity as its output
# projection. [`convert`](../source/convert.md) does that:

# %%
joined = convert.to(wrapper, "causal").requires_grad_(False)
print("d_out:", joined.d_out, "  width of a head:", joined.head_dim)
print(joined.out_proj.weight.data)
difference = (joined(batch) - concatenated).abs().max()
print(f"largest difference: {difference:.6f}")
assert difference < 1e-6

# %% [markdown]
# The function `attend` with the correct split gives the same once more:

# %%
by_hand = attend(inputs, *correct)
assert torch.allclose(by_hand, concatenated[0], atol=1e-6)

# %% [markdown]
# Other implementations lay out their weights in other ways and compute the same
# function: see [equivalent implementations](09_equivalent_implementations.md).
#
# ## Try it
#
# The order of the heads has no meaning. Fill the `out_proj` of `joined` with random
# numbers, then swap the two heads in a copy of it. Which rows and columns must be swapped
# so that the output remains the same? And what happens if you forget `out_proj`?

# %% fold="Answer"
torch.manual_seed(0)
joined.out_proj.weight.copy_(torch.randn(4, 4))
before = joined(batch)

# Head 0 is rows 0 and 1 of the three matrices, head 1 is rows 2 and 3.
swap = torch.tensor([2, 3, 0, 1])
swapped = convert.to(joined, "causal").requires_grad_(False)  # a copy
for layer in (swapped.W_query, swapped.W_key, swapped.W_value):
    layer.weight.copy_(layer.weight[swap])
forgotten = (swapped(batch) - before).abs().max()

# The context vectors of a head are multiplied with its columns of the output projection.
swapped.out_proj.weight.copy_(swapped.out_proj.weight[:, swap])
complete = (swapped(batch) - before).abs().max()

print(f"rows only:        differs by {forgotten:.1f}")
print(f"rows and columns: differs by {complete:.1f}")
assert forgotten > 0.1
assert complete < 1e-5

# %% [markdown]
# ## In short
#
# - Each head has its own projections, attention weights and context vectors; the context
#   vectors are concatenated, and an output projection combines them.
# - All heads are computed by one matrix product: a head is a contiguous block of rows of
#   the weight matrix.
# - Split with `view(batch_size, seq_len, num_heads, head_dim).transpose(1, 2)`. `view`
#   alone gives the same shape, but divides the tokens among the heads.
# - Test for permutation equivariance, too: a test for leaks alone misses heads that are
#   split and merged wrongly.
# - With `d_out` fixed, the number of heads does not change the number of parameters.
#
# Next: where the vectors come from, in [embeddings and positional
# encoding](05_embeddings_and_positional_encoding.md).
