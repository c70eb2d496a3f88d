# %% [markdown]
# # A first look at attention
#
# This page sends one sentence through an attention layer and looks at what comes out:
# tokens, embeddings, attention weights, and a first mask. It is an overview, and links to
# the lesson that explains each step. You need Python and a little PyTorch: tensors and
# their shapes. Reading time: 5 minutes. [Start here](../start.md) has a map of all lessons.
#
# Everything printed or drawn in these lessons is computed by the code above it when
# the site is built.
#
# ## From text to embeddings
#
# A model works on vectors, not on text. The text is split into **tokens**, here words;
# each token has a number in a [vocabulary](../source/positions.md). Numbers 0 and 1 are
# special: padding, which we need below, and unknown words.

# %%
import torch

from headnotes import MultiHeadAttention, masks
from headnotes.plots import display_attention
from headnotes.positions import Embeddings, Vocabulary, sinusoids

sentences = ["The cat sat on the mat.", "The dog slept."]
vocabulary = Vocabulary(sentences)
tokens = vocabulary.encode(sentences[0])  # [seq_len]
print(vocabulary.words)
print(tokens)

# %% [markdown]
# Each number selects a row of a table: the **embedding** of the token, a vector of
# `d_model` numbers. As in section 3.4 of [Attention Is All You
# Need](https://arxiv.org/abs/1706.03762), embeddings are multiplied by
# $\sqrt{d_{model}}$. The table is random, like all weights on this page: nothing has
# been trained.

# %%
torch.manual_seed(3)
d_model = 8
embeddings = Embeddings(len(vocabulary), d_model)
x = embeddings(tokens[:, None])  # tokens[:, None] is a batch of one sentence
print("[seq_len, batch_size, d_model] =", list(x.shape))

# %% [markdown]
# The position in the sequence is the first axis, the sentence within the batch is the
# second: the data are *sequence first*.
#
# ## Self-attention: queries, keys and values
#
# Attention computes a new vector for each token, its **context vector**, from the
# vectors of all tokens. Each token has three projections: a **query**, a **key** and a
# **value**. The dot products of the query of one token with the keys of all tokens are
# its **scores**. Softmax turns them into **attention weights**, which are positive and
# sum to 1. The context vector is the average of the values with these weights:
#
# $$\operatorname{Attention}(Q, K, V) =
#   \operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$
#
# where $d_k$ is the width of a key; the division keeps the scores small. In
# *self*-attention, queries, keys and values all come from the same sequence, so `x` is
# passed three times.
#
# The layer [`MultiHeadAttention`](../source/mha.md) does this in several **heads** in
# parallel, here two. Each head has its own projections, of width
# `d_k = d_model / heads = 4`, and so its own attention weights. The context vectors of
# the heads are concatenated, and a last projection mixes them. (`eval` turns off
# dropout, which only training needs.)

# %%
mha = MultiHeadAttention(heads=2, d_model=d_model).eval()
y = mha(query=x, key=x, value=x)
weights = mha.attn
print("output:  [seq_len, batch_size, d_model]    =", list(y.shape))
print("weights: [q_len, k_len, batch_size, heads] =", list(weights.shape))
print("sums over the keys:", weights.sum(dim=1)[:, 0, 0])

# %% [markdown]
# [Lesson 1](01_attention_by_hand.md) computes attention weights by hand, [lesson
# 2](02_queries_keys_and_values.md) adds the projections, [lesson
# 4](04_multi_head_attention.md) the heads.
#
# ## Attention weights as a heat map
#
# There is one map per head. A row is a query, a column is a key, and the six weights of
# a row sum to 1.

# %% alt="Two heat maps of attention weights, one per head, for ‘the cat sat on the mat’. Some rows have one weight near 1. In both maps the two rows and the two columns of ‘the’ are equal."
words = vocabulary.decode(tokens)
figure = display_attention(words, words, weights[:, :, 0])

# %% [markdown]
# ## Why these untrained weights are far from even
#
# In seven of these twelve rows, one key has more than half of the weight. The layer has
# not learned this, since nothing has been trained. The cause is the size of the
# embeddings. The factor $\sqrt{8}$ makes them 2.8 times as large, and scores, which are
# products of two such vectors, 8 times as large. The larger the differences between
# scores, the nearer softmax comes to one-hot.
#
# With inputs of standard deviation 1, as normalization layers give them in most models,
# untrained weights are nearly even; six even weights would be 0.17 each. Here is the
# largest weight of a row, the mean over all rows, heads and 200 random initializations:

# %%
top = weights.amax(dim=1)
print("rows with a weight above 0.5:", (top > 0.5).sum().item(), "of", top.numel())
assert (top > 0.5).sum() == 7

largest = {"√8": [], "1": []}
for seed in range(200):
    torch.manual_seed(seed)
    table = Embeddings(len(vocabulary), d_model)
    layer = MultiHeadAttention(heads=2, d_model=d_model).eval()
    scaled = table(tokens[:, None])
    for size, z in zip(largest, (scaled, scaled / table.scale), strict=True):
        layer(query=z, key=z, value=z)
        largest[size].append(layer.attn.amax(dim=1).mean())
for size, values in largest.items():
    mean = torch.stack(values).mean()
    print(f"standard deviation {size:2}: largest weight {mean:.2f}")
assert torch.stack(largest["√8"]).mean() > 0.5
assert torch.stack(largest["1"]).mean() < 0.3

# %% [markdown]
# [Lesson 2](02_queries_keys_and_values.md#scores-at-initialization) derives the size of
# scores at initialization.
#
# ## Without positions, token order does not matter
#
# Look at the two rows of *the* in the maps, and at its two columns: they are equal. A
# score depends on two vectors and on nothing else, softmax treats all keys alike, and
# the same token has the same embedding wherever it stands.

# %%
first, second = 0, 4  # the positions of "the"
assert torch.allclose(weights[first], weights[second])
assert torch.allclose(weights[:, first], weights[:, second])
print("same rows and same columns for positions", first, "and", second)

# %% [markdown]
# **Without positional information, self-attention is permutation-equivariant**: if the
# tokens change places, their outputs change places with them and are otherwise the same.
# A model must get the order from elsewhere. It can add a position vector to each
# embedding ([lesson 5](05_embeddings_and_positional_encoding.md)); it can put positions
# into the scores, as rotary embeddings (RoPE), ALiBi and relative position biases do; and
# a [causal mask](03_causal_self_attention.md) alone already breaks the symmetry. The
# exercise below checks these claims.
#
# ## Batches and padding
#
# Sentences of a batch must have one length, so the shorter ones end in **padding**,
# token number 0. In this layout a sentence is a column:

# %%
batch, valid_lens = vocabulary.encode_batch(sentences)
print(batch)
print("valid lengths:", valid_lens)

# %% [markdown]
# A **padding mask** excludes the padding: no query may attend to it, so its keys have
# weight zero. (Padding positions also produce outputs; ignore them in the loss.)

# %% alt="Two heat maps of attention weights, one per head, for ‘the dog slept’ and three tokens of padding. The three columns of the padding are zero in all rows."
mask = masks.padding(valid_lens, k_len=len(batch))  # [1, k_len, batch_size]
x_batch = embeddings(batch)
y_batch = mha(query=x_batch, key=x_batch, value=x_batch, mask=mask)
padded = vocabulary.decode(batch[:, 1])
figure = display_attention(padded, padded, mha.attn[:, :, 1])

# %% [markdown]
# So each sentence has the output that it has alone, without padding:

# %%
alone = x_batch[:3, 1:]  # the second sentence without its padding
y_alone = mha(query=alone, key=alone, value=alone)
assert torch.allclose(y_batch[:3, 1:], y_alone, atol=1e-5)
assert torch.allclose(y_batch[:, :1], y, atol=1e-5)
print("padding changes nothing")

# %% [markdown]
# [Lesson 6](06_padding_masks.md) shows what happens without the mask.
#
# ## Try it
#
# Shuffle the tokens of the first sentence. Before you run anything: what happens to its
# output? And which of these four would change your answer: sinusoidal positions, RoPE,
# ALiBi, a causal mask?

# %% fold="Answer"
order = torch.tensor([3, 0, 5, 1, 4, 2])
y_shuffled = mha(query=x[order], key=x[order], value=x[order])
assert torch.allclose(y_shuffled, y[order], atol=1e-5)
print(" ".join(words[i] for i in order))
print("each token keeps its output, which only changes its place")


def attend(q, k, v, bias=0.0):
    """Attention of one head, without projections; `bias` is added to the scores."""
    return (q @ k.T / d_model**0.5 + bias).softmax(dim=-1) @ v


def rotate(x):
    """RoPE: rotate pairs of components by angles proportional to the position."""
    frequency = 10000 ** -(torch.arange(0, d_model, 2) / d_model)
    angle = torch.arange(6)[:, None] * frequency  # [seq_len, d_model / 2]
    a, b, cos, sin = x[:, ::2], x[:, 1::2], angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


positions = sinusoids(6, d_model).float()
distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
future = torch.full((6, 6), -torch.inf).triu(1)
ways = {
    "no positions": lambda x: attend(x, x, x),
    "sinusoids": lambda x: attend(x + positions, x + positions, x + positions),
    "RoPE": lambda x: attend(rotate(x), rotate(x), x),
    "ALiBi": lambda x: attend(x, x, x, bias=-0.5 * distance),
    "causal mask": lambda x: attend(x, x, x, bias=future),
}
sentence = x[:, 0] / embeddings.scale  # so that no weight is tiny
for name, way in ways.items():
    same = torch.allclose(way(sentence[order]), way(sentence)[order], atol=1e-5)
    print(f"{name:12} permutation-equivariant: {same}")
    assert same == (name == "no positions")

# %% [markdown]
# ## In short
#
# - Text becomes tokens, tokens become numbers, and numbers select embeddings.
# - Attention weights are a softmax over scores, the dot products of queries with keys; a
#   context vector is the average of the values with these weights.
# - A head is one such computation with its own projections; the weights have shape
#   `[q_len, k_len, batch_size, heads]`.
# - Without positional information, self-attention is permutation-equivariant.
# - A padding mask gives padding a weight of zero.
#
# Next: the same computation [by hand](01_attention_by_hand.md), for six tokens and
# without any layer. For the layer itself, read [multi-head attention, line by
# line](../source/mha.md).
