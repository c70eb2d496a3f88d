# %% [markdown]
# # Many heads
#
# A head gives each word one row of weights, and so one mixture. But a word may look for
# two things, a verb its subject and its object, and a mean of both is neither. So we
# let several heads look at once. How are they computed, first one after the other, then
# in one product, and what goes wrong if you split that product the wrong way?

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
# ## Side by side
#
# The plainest way is to take `CausalAttention` of
# [the last lesson](03_causal_self_attention.md) several times over, each with weights
# of its own, and to put what they say side by side. This is the fourth of the
# [four stages](../source/implementations/stages.md). Two heads, each two wide:

# %%
torch.manual_seed(123)
wrapper = stages.MultiHeadAttentionWrapper(
    d_in=3, d_out=2, context_length=6, dropout=0.0, num_heads=2
).requires_grad_(False)
side_by_side = wrapper(batch)
print("[batch_size, seq_len, num_heads * d_out] =", list(side_by_side.shape))
print(side_by_side[0])
assert torch.equal(side_by_side[0], side_by_side[1])

# %% [markdown]
# The first two columns come from head 0, the other two from head 1. Neither knows of
# the other. At birth both weigh nearly evenly, yet each in its own way:

# %% alt="Two maps of weights, one a head, both zero above the diagonal. Each row is nearly even, but head 1 reads a little less from ‘Your’ than head 0."
from headnotes.plots import display_attention


def weigh(queries, keys):
    """Causal weights, over the last two axes."""
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    scores = queries @ keys.mT / math.sqrt(keys.shape[-1])
    return scores.masked_fill(future, -math.inf).softmax(dim=-1)


maps = [weigh(h.W_query(inputs), h.W_key(inputs)) for h in wrapper.heads]
_ = display_attention(words, words, torch.stack(maps, dim=-1))

# %% [markdown]
# ## One product for all
#
# Each head multiplies the same words by a small matrix of its own. Stack these
# matrices, one below the other, and a single product gives the queries of all heads:

# %%
stacked = torch.cat([head.W_query.weight for head in wrapper.heads])
queries = batch @ stacked.T  # [batch_size, seq_len, num_heads * head_dim]
print("matrix: ", list(stacked.shape))
print("queries:", list(queries.shape))
for h, head in enumerate(wrapper.heads):
    own = queries[..., 2 * h : 2 * h + 2]
    assert torch.allclose(own, head.W_query(batch), atol=1e-6)

# %% [markdown]
# So **a head is a block of neighbouring rows** of the matrix, hence of neighbouring
# columns of the queries. Cutting the last axis in two, heads and what is in a head,
# moves nothing in memory: `view` does it. Then heads must go in front of the words, for
# a reason that we come to: `transpose` does that.

# %%
split = queries.view(2, 6, 2, 2)  # [batch_size, seq_len, num_heads, head_dim]
split = split.transpose(1, 2)  # [batch_size, num_heads, seq_len, head_dim]
for h, head in enumerate(wrapper.heads):
    assert torch.allclose(split[:, h], head.W_query(batch), atol=1e-6)
print("[batch_size, num_heads, seq_len, head_dim] =", list(split.shape))

# %% [markdown]
# ## A view is not a transpose
#
# Why two steps? `view` could give that shape at once, and this is a famous mistake,
# because nothing complains. But `view` only counts anew: the numbers stay in the order
# in which they lie in memory, word after word. Let us label them and see who ends up
# where: 13 is component 3 of word 1.

# %%
seq_len, num_heads, head_dim = 6, 2, 2
labels = 10 * torch.arange(6)[:, None] + torch.arange(4)  # [seq_len, d_out]
right = labels.view(seq_len, num_heads, head_dim).transpose(0, 1)
wrong = labels.view(num_heads, seq_len, head_dim)
print("same shape:", list(right.shape), list(wrong.shape))
print("right, head 0:", right[0].tolist())
print("wrong, head 0:", wrong[0].tolist())


# %% fold="How the grids are drawn"
import matplotlib.pyplot as plt


def draw_grids(grids):
    """Tables of labels, each cell in the colour of its word."""
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


# %% alt="Five tables with a colour for each word. All columns before the split have one colour a row. Split rightly, so have both heads. Split wrongly, head 0 has the first three words on two rows each, and head 1 the last three."
grids = {"before": labels, "right: head 0": right[0], "head 1": right[1]}
draw_grids(grids | {"wrong: head 0": wrong[0], " head 1": wrong[1]})

# %% [markdown]
# On the left each word is one row, of one colour. Split rightly, each head has all six
# words, and half of the components of each. Split wrongly, head 0 has *all* components
# of the first three words, on two rows each, and head 1 the rest. It is no longer the
# components that were divided among the heads, but the sentence.
#
# ## What the mistake breaks
#
# Let us build both, and a third that merges the heads as wrongly as it split them,
# which puts every number back where it came from.


# %%
def attend(x, split, merge, mask=True):
    """Attention with the weights of the wrapper, split and merged as told."""
    q, k, v = (
        split(x @ torch.cat([h.get_parameter(name) for h in wrapper.heads]).T)
        for name in ("W_query.weight", "W_key.weight", "W_value.weight")
    )
    weights = weigh(q, k) if mask else (q @ k.mT / math.sqrt(2)).softmax(dim=-1)
    return merge(weights @ v)


rightly = (
    lambda x: x.view(6, 2, 2).transpose(0, 1),
    lambda x: x.transpose(0, 1).flatten(1),
)
wrongly = (lambda x: x.view(2, 6, 2), rightly[1])
both_wrong = (wrongly[0], lambda x: x.reshape(6, 4))
ways = {"right": rightly, "wrong": wrongly, "both wrong": both_wrong}

# %% [markdown]
# Now change one word after the other, and note whose output notices:

# %%
notices = {name: torch.zeros(6, 6, dtype=torch.bool) for name in ways}
for name, way in ways.items():
    for j in range(6):
        changed = inputs.clone()
        changed[j] += 1
        moved = attend(changed, *way) - attend(inputs, *way)
        notices[name][:, j] = moved.abs().amax(dim=-1) > 1e-4

print(" " * 8, *(f"{name:14}" for name in ways))
for i, word in enumerate(words):
    rows = [" ".join("·■"[n] for n in notices[name][i].int()) for name in ways]
    print(f"{word:8}", *(f"{row:14}" for row in rows))

# %% [markdown]
# Each row is a word, each column the word that was changed. On the left, as it should
# be: everyone notices the past and themselves. In the middle *Your* notices *with*,
# three words ahead: **the future leaks**, although the mask is in its place. (And
# *starts* does not even notice itself.) For the mask speaks of rows, and rows are no
# longer words.
#
# The third is worse, as it looks healthy. Nothing leaks, since each row is back in its
# place. But no word of the second half notices any of the first: a model with half a
# memory, and a test that only looks for leaks will pass it.

# %%
past = torch.ones(6, 6, dtype=torch.bool).tril()
assert torch.equal(notices["right"], past)
assert notices["wrong"][0, 3]
assert not notices["wrong"][2, 2]
assert not (notices["both wrong"] & ~past).any()
assert not notices["both wrong"][3:, :3].any()

# %% [markdown]
# There is a test that catches both. Without a mask, attention knows no order: shuffle
# the words, and the outputs are shuffled likewise. Not here:

# %%
order = torch.tensor([3, 0, 5, 1, 4, 2])
for name, way in ways.items():
    shuffled = attend(inputs[order], *way, mask=False)
    same = torch.allclose(shuffled, attend(inputs, *way, mask=False)[order])
    print(f"{name:11} order does not matter: {same}")
    assert same == (name == "right")

# %% [markdown]
# ## Products in batches
#
# Now for why heads stand in front. `@` multiplies matrices along the last two axes, and
# repeats that over all others. Here is a small tensor, one sentence, two heads, three
# words, four numbers:

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
# Words with words, in each head for itself. One head at a time gives the same:

# %%
first, second = a[0]
print("first head:", first @ first.T, sep="\n")
print("second head:", second @ second.T, sep="\n")
assert torch.allclose((a @ a.mT)[0, 0], first @ first.T)
assert torch.allclose((a @ a.mT)[0, 1], second @ second.T)

# %% [markdown]
# With words in front of heads, the same line would compare, within each word, heads
# with heads:

# %%
words_first = a.transpose(1, 2)  # [batch_size, seq_len, num_heads, head_dim]
print("heads in front:", list((a @ a.mT).shape))
print("words in front:", list((words_first @ words_first.mT).shape))

# %% [markdown]
# ## The class
#
# That is all there is to
# [`causal.MultiHeadAttention`](../source/implementations/causal.md): one product, a
# split, attention, a merge. And one more matrix at the end, `out_proj`, in which heads
# meet at last: each number of the output is made from those of all heads.

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
# Same seed, same arguments, but other numbers, and only two columns. For `d_out` means
# something else: to the wrapper the width of *one* head, here that of all *together*.
# So these heads are one wide, and their scores are divided by $\sqrt 1$.


# %%
def count(module):
    return sum(p.numel() for p in module.parameters())


w, m = wrapper, mha
width = w.heads[0].W_key.out_features
rows = [
    ("with two heads", "`stages` wrapper", "`causal`, split"),
    ("---", "---:", "---:"),
    ("`d_out`, as given", width, m.d_out),
    ("width of a head", width, m.head_dim),
    ("scores are divided by", f"√{width}", f"√{m.head_dim}"),
    ("width of the output", side_by_side.shape[-1], output.shape[-1]),
    ("parameters", count(w), count(m)),
]
display(Markdown("\n".join(f"| {a} | {b} | {c} |" for a, b, c in rows)))
assert (count(w), count(m)) == (36, 24)

# %% [markdown]
# The wrapper has two times three matrices of $3 \times 2$, which makes 36. The other
# has three of these and the output projection, $2 \times 2$ with a bias of 2, which
# makes $18 + 6$. At the size of the first Transformer, with 8 heads of width 64:

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
# At equal widths the two differ by the output projection only. More heads do not cost
# more parameters: the same matrices are cut into narrower blocks.
#
# ## The two agree
#
# So give the split class the heads of the wrapper, stacked, and an output projection
# that does nothing, the identity. [`convert`](../source/convert.md) does that:

# %%
joined = convert.to(wrapper, "causal").requires_grad_(False)
print("d_out:", joined.d_out, "  width of a head:", joined.head_dim)
print(joined.out_proj.weight.data)
difference = (joined(batch) - side_by_side).abs().max()
print(f"largest difference: {difference:.6f}")
assert difference < 1e-6

# %% [markdown]
# And by hand, with the function from above: the right split was right.

# %%
by_hand = attend(inputs, *rightly)
assert torch.allclose(by_hand, side_by_side[0], atol=1e-6)

# %% [markdown]
# Other implementations split in other ways still, and agree all the same:
# [one computation, five ways](09_equivalent_implementations.md).
#
# ## Try it
#
# The order of the heads has no meaning. Fill the `out_proj` of `joined` with random
# numbers, then swap the two heads of a copy of it. Which rows and columns must move so
# that the output stays as it was? And what if you forget `out_proj`?

# %% fold="One answer"
torch.manual_seed(0)
joined.out_proj.weight.copy_(torch.randn(4, 4))
before = joined(batch)

# Head 0 owns rows 0 and 1 of the three matrices, head 1 rows 2 and 3.
swap = torch.tensor([2, 3, 0, 1])
swapped = convert.to(joined, "causal").requires_grad_(False)  # a copy
for layer in (swapped.W_query, swapped.W_key, swapped.W_value):
    layer.weight.copy_(layer.weight[swap])
forgotten = (swapped(batch) - before).abs().max()

# What a head says arrives in its columns of the output projection.
swapped.out_proj.weight.copy_(swapped.out_proj.weight[:, swap])
moved = (swapped(batch) - before).abs().max()

print(f"rows only:        {forgotten:.1f}")
print(f"rows and columns: {moved:.1f}")
assert forgotten > 0.1
assert moved < 1e-5
