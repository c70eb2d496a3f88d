# %% [markdown]
# # From sentences to pictures
#
# How does a sentence become something that attention can compare, and how does one look
# at what it did? We follow three sentences the whole way: words, numbers, vectors,
# positions, heads, maps. At the end stands the smallest part of the formula, and perhaps
# the most puzzling: why are scores divided by $\sqrt{d_k}$?
#
# ## Words, and numbers for them
#
# Three sentences of six words. They share some words, and each but the last uses a word
# twice.

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
# The [vocabulary](../source/positions.md) numbers each different word, in order of the
# alphabet. A word that it does not know becomes number 1.

# %%
vocabulary = Vocabulary(sentences)
tokens, _ = vocabulary.encode_batch(sentences)
print(len(vocabulary), "entries:", *vocabulary.words)
print(tokens.T)  # a row is a sentence
print(vocabulary.decode(vocabulary.encode("The wise owl")))

# %% [markdown]
# ## Numbers become vectors
#
# Each number picks a row of a learned table, 8 numbers wide here. What is learned starts
# out random, and so it stays on this page.

# %%
from headnotes.positions import Embeddings

torch.manual_seed(9)
d_model = 8
embeddings = Embeddings(len(vocabulary), d_model)
x = embeddings(tokens)
print("[seq_len, batch_size, d_model] =", list(x.shape))
rows = embeddings.table.weight[tokens]
print(f"size of their entries: {rows.std():.2f} as rows, {x.std():.2f} now")
assert torch.equal(x[0, 0], x[3, 0])  # 'the', twice in the first sentence

# %% [markdown]
# The vectors are $\sqrt{8} \approx 2.83$ times as large as their rows of the table. Why?
# The paper uses one table for two jobs. At the end of the model it turns vectors back
# into words, by dot products, and there its entries should be small, about
# $1/\sqrt{d_{model}}$: else the scores of the words would grow with the width. At the
# beginning its rows are added to the positions, whose entries do not shrink with the
# width, and the factor makes up for it. Without it, position would drown out meaning.
# (Our table starts out with entries of size 1, as PyTorch likes it, so here it is the
# words that are louder.)
#
# ## Vectors learn where they are
#
# Attention treats all keys alike and so [knows no
# order](00_a_first_look.md). Each vector is therefore given a second
# one, made of sines and cosines of its position.

# %%
from headnotes.positions import PositionalEncoding, sinusoids

table = sinusoids(32, 16)
products = table @ table.T

# %% fold="How the pictures are drawn"
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
    for here, color in ((8, "#d55e00"), (24, "#2f86d6")):
        right.plot(products[here], "-", color=color, label=f"row {here}")
        right.plot(here, products[here, here], "o", color=color)
    right.set(xlabel="position of the other row", ylabel="dot product")
    right.legend(frameon=False)
    plt.show()


# %% alt="Left: the table of positions, 32 rows by 16 columns, as colours from minus one to one; the first columns change from row to row, the last hardly at all. Right: the dot products of row 8 and of row 24 with all rows: two curves of the same shape, each with its peak of 8 at its own row."
draw_positions(table, products)

# %% [markdown]
# Each pair of columns is a hand of a clock. The first turns once in $2\pi \approx 6$
# positions, those on the right hardly move. To move by three positions is to turn every
# hand by an angle of its own, the same angle wherever one starts. So a dot product of
# two rows depends on their distance and on nothing else: the two curves are one curve,
# shifted.

# %%
for distance in (0, 1, 3, 10):
    values = products.diagonal(distance)
    assert torch.allclose(values, values[:1])
    print(f"{distance:2} apart: {values[0]:6.3f}, at all {len(values)} places")

# %% [markdown]
# Now the two *the* of the first sentence are no longer the same vector, and they differ
# by just the difference of their positions. (`eval` turns off the dropout, which
# would drop some entries in training.)

# %%
positions = PositionalEncoding(d_model).eval()
placed = positions(x)
first, second = 0, 3  # where 'the' stands
difference = placed[second, 0] - placed[first, 0]
rows = sinusoids(4, d_model).float()
assert torch.allclose(difference, rows[second] - rows[first], atol=1e-6)
print(*(f"{number:.4f}" for number in difference))

# %% [markdown]
# ## Four heads
#
# Up to here the sequence came first. Much code wants the batch first, so we turn the
# finished vectors and take a [module of that kind](../source/implementations/batch_first.md).
# It hands back the weights beside the output.

# %%
from headnotes.implementations.batch_first import MultiHeadAttention

mha = MultiHeadAttention(d_model=d_model, n_heads=4).eval()
batch = placed.transpose(0, 1)  # [batch_size, seq_len, d_model]
output, attn_probs = mha(batch, batch, batch)
print("output: ", list(output.shape))
print("weights:", list(attn_probs.shape))
assert torch.allclose(attn_probs.sum(dim=-1), torch.ones(3, 4, 6))

# %% [markdown]
# The weights are `[batch_size, heads, q_len, k_len]`. For the first sentence, with
# heads last, [a map a head](../source/plots.md):

# %% alt="Four heat maps, one a head, of how much each word of ‘the owl watched the old fox’ reads from each other word, on one colour scale. The heads differ, and the two rows of ‘the’ differ too."
from headnotes.plots import display_attention

words = tokenize(sentences[0])
maps = attn_probs[0].permute(1, 2, 0)  # [q_len, k_len, heads]
figure = display_attention(words, words, maps)

# %% [markdown]
# Compare the two rows of *the*. Without positions they would be equal, in every head, as
# they were in [the first lesson](00_a_first_look.md). Now they differ.

# %%
gap = (maps[first] - maps[second]).abs().max()
bare = x.transpose(0, 1)
_, without = mha(bare, bare, bare)
gap_without = (without[0, :, first] - without[0, :, second]).abs().max()
print(f"largest difference of the two rows: {gap:.2f}")
print(f"without positions:                  {gap_without:.2f}")
assert gap > 0.3
assert gap_without < 1e-6

# %% [markdown]
# ## What a colour means
#
# All four maps share one scale: it starts at 0 and ends at the largest weight of all.
# Published maps are often drawn otherwise, with a scale of its own for each head. Here
# is head 3 like that:

# %% alt="Head 3 alone, on its own scale from 0 to about 0.4. Its largest weights are now as bright as the largest of any head were before, although the numbers on the cells are the same."
figure = display_attention(words, words, maps[:, :, 3])

tops = maps.amax(dim=(0, 1))
print("largest weight of each head:", *(f"{top:.2f}" for top in tops))
assert tops.max() > 0.9
assert tops[3] < 0.42

# %% [markdown]
# The numbers are the same, but the picture now tells of a head that has found something,
# where before it told of one that looks around. Bright meant *much*; now it only means
# *the most that this head has*. Whoever reads a map should look at its colour bar first.
#
# ## Why divide by the square root?
#
# A score is a sum of $d_k$ products. If the components of a query and a key are
# independent, with mean 0 and variance 1, so is each product, and the variances add up:
# the score has variance $d_k$. Let us see, for 2,000 queries with 6 keys each, in heads
# that are 2, 64 and 512 wide.

# %%
scores = {}
for d_k in (2, 64, 512):
    query = torch.randn(2000, 1, d_k)
    key = torch.randn(2000, 6, d_k)
    scores[d_k] = (query * key).sum(dim=-1)  # [samples, k_len]
    spread = scores[d_k].std()
    print(f"d_k {d_k:3}: spread {spread:5.2f}, √d_k {d_k**0.5:5.2f}")
    assert abs(spread / d_k**0.5 - 1) < 0.05

# %% [markdown]
# Softmax looks at differences of scores. A difference of 1 makes one weight $e$ times
# the other; a difference of 20, half a billion times. So the wider the head, the more
# of the row goes to a single key, for no reason but the width. And a row that is decided
# is hard to change: the Jacobian of softmax, $\operatorname{diag}(p) - p\,p^\top$,
# vanishes as one weight comes near 1.

# %% alt="Three columns, for heads 2, 64 and 512 wide. Top: scores as they are spread ever wider, divided by the root of the width they keep their spread. Middle: the mean weight of the most read key rises from 0.46 to 0.96 as they are, and stays near 0.4 when divided. Bottom: the steepness of softmax piles up at 0 for wide heads as they are, and stays near 0.4 when divided."
from headnotes.plots import display_scaling, jacobian_norms

figure = display_scaling(scores)

# %%
most_read, steep, still = {}, {}, {}
print("             largest weight   steepness   rows below 0.01")
for d_k, plain in scores.items():
    for name, x in (("as is", plain), ("/ √d_k", plain / d_k**0.5)):
        weights = x.softmax(dim=-1)
        most_read[d_k, name] = weights.amax(dim=-1).mean().item()
        norms = jacobian_norms(weights)
        steep[d_k, name] = norms.mean().item()
        still[d_k, name] = (norms < 0.01).float().mean().item()
        print(
            f"{d_k:3} {name:8} {most_read[d_k, name]:11.3f}"
            f"{steep[d_k, name]:14.3f} {still[d_k, name]:14.0%}"
        )

# %% [markdown]
# At a width of 2 the division hardly matters. At 512, without it, one key takes nearly
# all of each row, and in most rows no gradient to speak of passes back to the scores.
# With it, the softmax of a wide head is as easy to move as that of a narrow one.

# %%
assert most_read[2, "as is"] - most_read[2, "/ √d_k"] < 0.1
assert most_read[512, "as is"] > 0.94
assert still[512, "as is"] > 0.6
for d_k in scores:
    assert abs(most_read[d_k, "/ √d_k"] - 0.4) < 0.03
    assert abs(steep[d_k, "/ √d_k"] - 0.385) < 0.015
    assert still[d_k, "/ √d_k"] < 0.01

# %% [markdown]
# ## Try it
#
# If dividing by $\sqrt{d_k}$ is good, would dividing by $d_k$ be better? Guess what the
# weights of the widest head would look like, and how much of a gradient would reach the
# queries. (From the weights to a query it passes through the Jacobian, the keys and the
# divisor: $J K / c$.)

# %% fold="Too much of a good thing"
d_k = 512
reaches = {}
for name, divisor in (("√d_k", d_k**0.5), ("d_k", d_k)):
    weights = (scores[d_k] / divisor).softmax(dim=-1)
    jacobian = weights.diag_embed() - weights[:, :, None] * weights[:, None]
    reaches[name] = (jacobian @ key / divisor).norm(dim=(1, 2)).mean().item()
    largest = weights.amax(dim=-1).mean()
    print(f"/ {name:4}  largest {largest:.3f}, gradient {reaches[name]:.3f}")

assert largest < 0.2  # six equal weights would be 0.167 each
assert reaches["d_k"] < reaches["√d_k"] / 20
print("all keys look alike, and the query hardly learns why")

# %% [markdown]
# How it is done: [words, vectors, positions](../source/positions.md), [batch-first
# heads](../source/implementations/batch_first.md) and [the
# pictures](../source/plots.md), line by line.
