# %% [markdown]
# # Embeddings and positional encoding
#
# A model turns text into vectors in three steps: it splits the text into tokens, looks
# up an embedding for each token, and adds a positional encoding. This lesson follows
# three sentences through these steps and through four attention heads. It then shows
# two things that are easy to get wrong: how to read a heat map of attention weights,
# and why scores are divided by $\sqrt{d_k}$. You need [multi-head
# attention](04_multi_head_attention.md). Reading time: 10 minutes.
#
# ## Tokens and vocabulary
#
# Here are three sentences of six tokens each; a token is a word here. The sentences
# share some tokens, and in the first two one token occurs twice.

# %%
import torch

from headnotes.positions import Vocabulary, tokenize

sentences = [
    "The owl watched the old fox.",
    "An owl is not an eagle!",
    "Old foxes know the owl, too.",
]
for sentence in sentences:
    print(tokenize(sentence))

# %% [markdown]
# The [vocabulary](../source/positions.md) assigns a token id to each distinct token, in
# alphabetical order. Id 0 is padding; id 1 stands for every token that is not in the
# vocabulary.

# %%
vocabulary = Vocabulary(sentences)
tokens, _ = vocabulary.encode_batch(sentences)
print(len(vocabulary), "entries:", *vocabulary.words)
print(tokens.T)  # one row per sentence
print(vocabulary.decode(vocabulary.encode("The wise owl")))

# %% [markdown]
# ## Token embeddings
#
# Each id selects a row of a table, the embedding of the token: here a vector of 8
# numbers. The table is a parameter that training adjusts. Nothing is trained on this
# page, so its entries are random.

# %%
from headnotes.positions import Embeddings

torch.manual_seed(9)
d_model = 8
embeddings = Embeddings(len(vocabulary), d_model)
x = embeddings(tokens)
print("[seq_len, batch_size, d_model] =", list(x.shape))
rows = embeddings.table.weight[tokens]
print(f"standard deviation: {rows.std():.2f} in the table, {x.std():.2f} in x")
assert torch.equal(x[0, 0], x[3, 0])  # 'the', twice in the first sentence

# %% [markdown]
# The embeddings are $\sqrt{8} \approx 2.83$ times as large as the rows of the table:
# [the paper](https://arxiv.org/abs/1706.03762) multiplies them by $\sqrt{d_{model}}$
# (section 3.4), without giving a reason. A likely one is that it uses one table for
# the embeddings and for the logits. For the logits, which are dot products of its rows
# with the outputs of the model, its entries should be small, about
# $1/\sqrt{d_{model}}$, or the logits would grow with the width. For the embeddings,
# positional encodings are added to its rows, and their entries do not shrink with the
# width; without the factor, they would dominate the sum.
#
# Our table is initialized like `torch.nn.Embedding`, with a standard deviation of 1. So
# here it is the embeddings that dominate, and large embeddings make large scores: the
# maps below are [far from even although nothing is
# trained](00_a_first_look.md).
#
# ## Sinusoidal positional encoding
#
# Self-attention without a mask is permutation-equivariant: if the tokens change places,
# the outputs change places with them and are otherwise the same. The order of the
# tokens must therefore enter in some way. The paper adds to each embedding a second
# vector, which is not learned: it consists of sines and cosines of the position. (Other
# ways are to rotate queries and keys by their position, as RoPE does, or to add a bias
# for the distance to the scores, as ALiBi does. A causal mask breaks the symmetry as
# well.)

# %%
from headnotes.positions import PositionalEncoding, sinusoids

table = sinusoids(32, 16)
products = table @ table.T

# %% fold="Plotting code"
import matplotlib.pyplot as plt


def draw_positions(table, products):
    """The table itself, and the dot products of two rows with all rows."""
    _, (left, right) = plt.subplots(1, 2, figsize=(6.6, 2.7))
    colors = plt.get_cmap("PuOr", 64)
    mesh = left.pcolormesh(table, vmin=-1, vmax=1, cmap=colors)
    left.invert_yaxis()
    left.set(xlabel="column", ylabel="position")
    bar = left.figure.colorbar(mesh, ax=left, ticks=[-1, 0, 1])
    bar.solids.set(rasterized=False, edgecolor="face")
    for row, color in ((8, "#d55e00"), (24, "#2f86d6")):
        right.plot(products[row], "-", color=color, label=f"row {row}")
        right.plot(row, products[row, row], "o", color=color)
    right.set(xlabel="position of the other row", ylabel="dot product")
    right.legend(frameon=False)
    plt.show()


# %% alt="Left: the table of positional encodings, 32 positions by 16 columns, as colors from minus one to one; the first columns change from row to row, the last hardly at all. Right: the dot products of row 8 and of row 24 with all rows: two curves of the same shape, each with its peak of 8 at its own row."
draw_positions(table, products)

# %% [markdown]
# Two neighboring columns hold the sine and the cosine of the same angle, which is
# proportional to the position: together they are a clock hand. The first hand makes a
# full turn in $2\pi \approx 6$ positions, the last hardly moves. Moving by three
# positions rotates each hand by an angle that depends on the hand only, not on the
# starting position. So the dot product of two rows depends only on their distance: the
# two curves are the same curve, shifted.

# %%
for distance in (0, 1, 3, 10):
    values = products.diagonal(distance)
    assert torch.allclose(values, values[:1])
    print(f"distance {distance:2}: {values[0]:6.3f} for all {len(values)} pairs")

# %% [markdown]
# With positional encodings, the two occurrences of *the* in the first sentence have
# different vectors. Their difference is that of the two encodings. (`eval` turns off
# the dropout of this layer, which sets some entries to zero in training.)

# %%
positions = PositionalEncoding(d_model).eval()
encoded = positions(x)
first, second = 0, 3  # the positions of 'the'
difference = encoded[second, 0] - encoded[first, 0]
rows = sinusoids(4, d_model).float()
assert torch.allclose(difference, rows[second] - rows[first], atol=1e-6)
print(*(f"{number:.4f}" for number in difference))

# %% [markdown]
# ## Attention weights of four heads
#
# So far the layout was sequence first, `[seq_len, batch_size, d_model]`. Much code is
# batch first, so we transpose the first two axes and use a [batch-first
# module](../source/implementations/batch_first.md), which returns its attention weights
# beside the output.

# %%
from headnotes.implementations.batch_first import MultiHeadAttention

mha = MultiHeadAttention(d_model=d_model, n_heads=4).eval()
batch = encoded.transpose(0, 1)  # [batch_size, seq_len, d_model]
output, attn_probs = mha(batch, batch, batch)
print("output: ", list(output.shape))
print("weights:", list(attn_probs.shape))
assert torch.allclose(attn_probs.sum(dim=-1), torch.ones(3, 4, 6))

# %% [markdown]
# The shape of the weights is `[batch_size, heads, q_len, k_len]`. Here are the weights
# of the first sentence, [one map per head](../source/plots.md); a row is a query, a
# column is a key:

# %% alt="Four heat maps of attention weights for ‘the owl watched the old fox’, one per head, on one color scale. The heads differ, and so do the two rows of ‘the’."
from headnotes.plots import display_attention

words = tokenize(sentences[0])
maps = attn_probs[0].permute(1, 2, 0)  # [q_len, k_len, heads]
figure = display_attention(words, words, maps)

# %% [markdown]
# Compare the two rows of *the*. Without positional encodings they are equal in every
# head, since equal queries have equal weights. With them they differ:

# %%
gap = (maps[first] - maps[second]).abs().max()
unencoded = x.transpose(0, 1)
_, without = mha(unencoded, unencoded, unencoded)
gap_without = (without[0, :, first] - without[0, :, second]).abs().max()
print(f"largest difference of the two rows: {gap:.2f}")
print(f"without positional encodings:       {gap_without:.2f}")
assert gap > 0.3
assert gap_without < 1e-6

# %% [markdown]
# ## Reading a heat map: check the color scale
#
# All four maps share one color scale, from 0 to the largest weight of all heads. Many
# published maps have one scale per head instead. Here is head 3 drawn that way:

# %% alt="Head 3 alone, on its own color scale from 0 to about 0.4. Its largest weights are now as bright as the largest weight of any head was before, although the numbers in the cells are the same."
figure = display_attention(words, words, maps[:, :, 3])

tops = maps.amax(dim=(0, 1))
print("largest weight of each head:", *(f"{top:.2f}" for top in tops))
assert tops.max() > 0.9
assert tops[3] < 0.42

# %% [markdown]
# The numbers are the same, but head 3 now looks as decided as the others. On the shared
# scale, a bright cell is a large weight; on a scale of its own, it is only the largest
# weight of this head. Look at the color bar before you interpret a map.
#
# ## Why scores are divided by the square root of d_k
#
# A score is a sum of $d_k$ products. If the components of query and key are
# independent, with mean 0 and variance 1, each product has variance 1 and their
# variances add up: the score has variance $d_k$. We check this with 2,000 queries, each
# with 6 keys, for heads of width 2, 64 and 512.

# %%
scores = {}
for d_k in (2, 64, 512):
    query = torch.randn(2000, 1, d_k)
    key = torch.randn(2000, 6, d_k)
    scores[d_k] = (query * key).sum(dim=-1)  # [samples, k_len]
    spread = scores[d_k].std()
    print(f"d_k {d_k:3}: standard deviation {spread:5.2f}, √d_k {d_k**0.5:5.2f}")
    assert abs(spread / d_k**0.5 - 1) < 0.05

# %% [markdown]
# Softmax depends on the differences between scores. A difference of 1 makes one weight
# $e$ times as large as the other; a difference of 20 makes it half a billion times as
# large. So the wider the head, the closer its weights are to one-hot, for no other
# reason than its width. And a softmax that is nearly one-hot is saturated: its
# Jacobian, $\operatorname{diag}(p) - p\,p^\top$, vanishes as one weight approaches 1,
# and the gradient vanishes with it.

# %% alt="Three columns, for heads of width 2, 64 and 512. Top: unscaled scores have an ever larger spread; divided by the root of the width, they keep the same spread. Middle: the mean of the largest weight of a row rises from 0.46 to 0.96 without scaling, and stays near 0.4 with it. Bottom: the norms of the Jacobian of softmax pile up at 0 for wide heads without scaling, and stay near 0.4 with it."
from headnotes.plots import display_scaling, jacobian_norms

figure = display_scaling(scores)

# %%
largest_weight, norm, saturated = {}, {}, {}
print("             largest weight   Jacobian norm   norm below 0.01")
for d_k, unscaled in scores.items():
    for name, x in (("unscaled", unscaled), ("/ √d_k", unscaled / d_k**0.5)):
        weights = x.softmax(dim=-1)
        largest_weight[d_k, name] = weights.amax(dim=-1).mean().item()
        norms = jacobian_norms(weights)
        norm[d_k, name] = norms.mean().item()
        saturated[d_k, name] = (norms < 0.01).float().mean().item()
        print(
            f"{d_k:3} {name:8} {largest_weight[d_k, name]:14.3f}"
            f"{norm[d_k, name]:16.3f} {saturated[d_k, name]:17.0%}"
        )

# %% [markdown]
# The table shows means over all rows. At a width of 2, scaling hardly matters. At a
# width of 512 without scaling, one key has nearly all of the weight in each row, and in
# most rows almost no gradient reaches the scores. With scaling, the weights and
# gradients of a wide head are like those of a narrow one.

# %%
assert largest_weight[2, "unscaled"] - largest_weight[2, "/ √d_k"] < 0.1
assert largest_weight[512, "unscaled"] > 0.94
assert saturated[512, "unscaled"] > 0.6
for d_k in scores:
    assert abs(largest_weight[d_k, "/ √d_k"] - 0.4) < 0.03
    assert abs(norm[d_k, "/ √d_k"] - 0.385) < 0.015
    assert saturated[d_k, "/ √d_k"] < 0.01

# %% [markdown]
# ## Try it: divide by d_k instead
#
# If dividing by $\sqrt{d_k}$ is good, would dividing by $d_k$ be better? Predict the
# weights of the widest head, and the size of the gradient that reaches the queries.
# (The derivative of the weights with respect to the query is $J K / c$: the Jacobian of
# softmax, times the keys, divided by the divisor $c$.)

# %% fold="Answer"
d_k = 512
gradient = {}
for name, divisor in (("√d_k", d_k**0.5), ("d_k", d_k)):
    weights = (scores[d_k] / divisor).softmax(dim=-1)
    jacobian = weights.diag_embed() - weights[:, :, None] * weights[:, None]
    gradient[name] = (jacobian @ key / divisor).norm(dim=(1, 2)).mean().item()
    largest = weights.amax(dim=-1).mean()
    print(f"/ {name:4}  largest {largest:.3f}, gradient {gradient[name]:.3f}")

# The weights are nearly even, whatever the query is: six equal weights would be
# 0.167 each. And the gradient of the query is more than 20 times smaller.
assert largest < 0.2
assert gradient["d_k"] < gradient["√d_k"] / 20

# %% [markdown]
# ## In short
#
# - A token id selects an embedding; the paper multiplies it by $\sqrt{d_{model}}$.
# - Self-attention without a mask ignores the order of its tokens. Sinusoidal positional
#   encodings, which are fixed and not learned, are added to the embeddings; their dot
#   products depend only on the distance.
# - Compare heat maps only on the same color scale.
# - Scores have variance $d_k$ if queries and keys have variance 1. Dividing by
#   $\sqrt{d_k}$ keeps softmax from saturating in wide heads.
#
# The code of this lesson, line by line: [embeddings and
# positions](../source/positions.md), [batch-first
# attention](../source/implementations/batch_first.md), [plots](../source/plots.md).
#
# Next: sentences of different lengths in one batch need [padding
# masks](06_padding_masks.md).
