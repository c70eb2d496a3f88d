# %% [markdown]
# # Queries, keys and values
#
# This lesson computes queries, keys and values with three trainable projections, where
# [the previous one](01_attention_by_hand.md) used the embedding of a token for all three.
# It follows the same six tokens through two small classes of the [four
# stages](../source/implementations/stages.md), `SelfAttention_v1` and
# `SelfAttention_v2`. It also shows how large scores are at initialization, and why one
# seed gives the two classes different weights. You need [attention by
# hand](01_attention_by_hand.md) and `nn.Linear`. Reading time: 15 minutes.

# %%
import math

import torch

from headnotes import convert
from headnotes.implementations.stages import SelfAttention_v1, SelfAttention_v2

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

# %% [markdown]
# ## Why projections are needed
#
# Without projections, which key has the largest weight for each query? And which one,
# if all embeddings are first scaled to length 1?

# %%
raw = inputs @ inputs.T
unit = inputs / inputs.norm(dim=-1, keepdim=True)
print("query    largest weight  at length 1")
for i, word in enumerate(words):
    largest, at_length_1 = raw[i].argmax(), (unit @ unit.T)[i].argmax()
    print(f"{word:8} {words[largest]:15} {words[at_length_1]}")
assert torch.equal((unit @ unit.T).argmax(dim=-1), torch.arange(6))

# %% [markdown]
# At length 1, each token attends most to itself. This is true of any sentence: among
# vectors of length 1, none has a larger dot product with a vector than that vector
# itself. Without scaling, long embeddings are at an advantage: here *journey*, the
# longest, has the largest weight also for *starts*, *with* and *step*.
#
# Moreover, the scores are symmetric. Since $a \cdot b = b \cdot a$, the score of *step*
# for the query *journey* is the score of *journey* for the query *step*. (The weights
# are not symmetric, because softmax divides each row by its own sum.) Language is not
# symmetric: a verb may need its subject while the subject needs its adjective.
#
# ## Three projections: query, key and value
#
# So we compute three vectors from each embedding, each with a trainable matrix. The
# **query** is compared with the **keys** of all tokens, which gives the weights; the
# **values** are what is averaged:
#
# $$Q = X W_Q, \quad K = X W_K, \quad V = X W_V$$
#
# (In self-attention, all three come from the same sequence $X$. In
# [cross-attention](07_cross_attention.md), keys and values come from another one.)
#
# Here each of them has two components, so that we can plot them. `SelfAttention_v1`
# initializes its matrices uniformly on $[0, 1)$, and seed 123 gives the numbers of
# [Raschka's book](https://github.com/rasbt/LLMs-from-scratch), section 3.4.

# %%
torch.manual_seed(123)
v1 = SelfAttention_v1(d_in=3, d_out=2).requires_grad_(False)
print(v1.W_query.data)

# %% [markdown]
# ## The scores of one query
#
# We take the query of *journey*, the second token, and the keys of all six tokens, its
# own among them:

# %%
query = inputs[1] @ v1.W_query
keys = inputs @ v1.W_key
values = inputs @ v1.W_value
scores = keys @ query
print("query: ", query)
print("scores:", scores)

# %% [markdown]
# Before softmax, the scores are divided by $\sqrt{d_k}$, where $d_k$ is the width of a
# key, here 2. A score is a sum of $d_k$ products, so its variance grows with $d_k$;
# the division makes it independent of the width. Without it, softmax is nearly one-hot
# where keys are wide, and little gradient passes through it. [Lesson
# 5](05_embeddings_and_positional_encoding.md) measures this.

# %%
weights = (scores / math.sqrt(keys.shape[-1])).softmax(dim=-1)
print("weights:", weights)
print("context:", weights @ values)

# %% [markdown]
# ## All queries at once: `SelfAttention_v1`
#
# With one query per row, the same three lines compute all six context vectors. They are
# the whole class:

# %%
queries = inputs @ v1.W_query
scores = queries @ keys.T
weights = (scores / math.sqrt(keys.shape[-1])).softmax(dim=-1)
contexts = weights @ values
print(v1(inputs))
assert torch.allclose(contexts, v1(inputs))
assert not torch.allclose(scores, scores.T)

# %% [markdown]
# The scores are no longer symmetric, and the context vectors are averages of something
# other than what was compared. Yet the six rows are almost equal. The next figure shows
# why. Arrows are the six queries, that of *journey* in orange; dots are the six keys.
# Each dashed line joins the places in which a key has one score for the query of
# *journey*. The lines are perpendicular to its arrow: the score of a key depends on how
# far the key lies along the direction of the query.


# %% fold="Plotting code"
import matplotlib.pyplot as plt


def draw_plane(queries, keys, levels, left=(), below=()):
    """Queries as arrows, keys as dots, and lines of equal score for journey."""
    _, ax = plt.subplots(figsize=(4.6, 4.7))
    arrow = {"arrowstyle": "->", "shrinkA": 0, "shrinkB": 0}
    for word, tip in zip(words, queries.tolist(), strict=True):
        style = {"color": "#8a8a8a"}
        if word == "journey":
            style = {"color": "#d55e00", "linewidth": 1.8}
        z = 3 if word == "journey" else 2
        ax.annotate("", tip, (0, 0), arrowprops=arrow | style, zorder=z)

    query = queries[1]
    across = torch.stack([-query[1], query[0]]) / query.norm()
    for level in levels:
        foot = level * query / query.square().sum()
        style = {"color": "#8a8a8a", "linewidth": 0.7, "linestyle": "dashed"}
        ax.axline(foot.tolist(), (foot + across).tolist(), **style)
        x, y = (foot + 0.45 * across).tolist()
        style = {"color": "#8a8a8a", "size": 8, "va": "bottom"}
        ax.text(x + 0.03, y, f"{level:.1f}", style)

    ax.plot(*keys.T, "o", color="#2f86d6", markersize=5)
    for word, (x, y) in zip(words, keys.tolist(), strict=True):
        style = {"va": "top" if word in below else "center", "size": 8}
        side = -1 if word in left else 1
        style["ha"] = "right" if word in left else "left"
        ax.text(x + 0.04 * side, y, word, style)
    ax.set(aspect="equal", xlim=(-0.7, 1.2), ylim=(-0.8, 1.6))
    ax.set(xlabel="component 0", ylabel="component 1")
    plt.show()


# %% alt="v1: six query arrows, all pointing up and slightly to the right. The six keys lie along the arrow of ‘journey’: ‘journey’ and ‘starts’ beyond the line of score 1.5, ‘one’ near 0.5, the others between."
draw_plane(queries, keys, [0, 0.5, 1, 1.5, 2], below=("starts",))

# %% [markdown]
# Embeddings and matrices are positive, so the components of all queries and keys are
# positive, too. The queries point in nearly the same direction and differ mainly in
# length. They therefore rank the keys almost alike.
#
# ## With linear layers: `SelfAttention_v2`
#
# The second class uses `nn.Linear`, which initializes its weights with small numbers of
# both signs, uniform within $\pm 1/\sqrt{d_{in}}$, and can have a bias. The book uses
# seed 789 here:

# %%
torch.manual_seed(789)
v2 = SelfAttention_v2(d_in=3, d_out=2).requires_grad_(False)
v2_queries, v2_keys = v2.W_query(inputs), v2.W_key(inputs)
v2_scores = v2_queries @ v2_keys.T
v2_weights = (v2_scores / math.sqrt(2)).softmax(dim=-1)
print(v2_weights)
print(v2(inputs))
assert torch.allclose(v2_weights @ v2.W_value(inputs), v2(inputs))

# %% alt="v2, on the same axes: six shorter query arrows, pointing right and slightly down. The six keys lie around the line of score 0, none beyond 0.5."
lefts = ("with", "step")
draw_plane(v2_queries, v2_keys, [-0.5, 0, 0.5, 1], lefts, below=("journey",))

# %% [markdown]
# On the same axes, queries and keys are shorter now, and no key lies far along the
# arrow. The scores differ little, and so do the weights:

# %% alt="Two heat maps of attention weights, v1 and v2, on one scale. In v1 the columns of ‘journey’ and ‘starts’ are bright and ‘one’ is dark, from 0.09 to 0.23. In v2 all weights are between 0.15 and 0.20, and ‘Your’ is the brightest column."
from headnotes.plots import display_attention

both = torch.stack([weights, v2_weights], dim=-1)
_ = display_attention(words, words, both, titles=["v1", "v2"])

# %% [markdown]
# ## Scores at initialization
#
# Nearly even weights are what PyTorch's initialization of linear layers gives for inputs
# with a standard deviation of 1. A weight that is uniform within $\pm 1/\sqrt{d_{in}}$
# has a standard deviation of $1/\sqrt{3\,d_{in}}$. A component of a query is a sum of
# $d_{in}$ products, so its standard deviation is $1/\sqrt 3$; the same is true of a
# key. The product of two such components has $1/3$. The sum of $d_k$ of these has
# $\sqrt{d_k}/3$, and the division by $\sqrt{d_k}$ brings it back to $1/3$, whatever the
# sizes.
#
# If the inputs are $\sigma$ times as large, queries and keys are too, and the scores are
# $\sigma^2$ times as large. This is why the untrained maps of [lesson
# 0](00_a_first_look.md) are far from even: there $\sigma = \sqrt 8$, so scores have a
# standard deviation of $8/3$. We measure both. The table shows the standard deviations
# of inputs and scores, and the mean of the largest weight of a row, which would be 0.17
# if six weights were even:

# %%
torch.manual_seed(0)
settings = [(3, 2, 1), (64, 16, 1), (512, 64, 1), (8, 4, math.sqrt(8))]
print("d_in  d_out  inputs  scores  largest weight")
for d_in, d_out, sigma in settings:
    squares, largest = [], []
    for _ in range(400):
        layer = SelfAttention_v2(d_in, d_out).requires_grad_(False)
        x = sigma * torch.randn(6, d_in)
        s = layer.W_query(x) @ layer.W_key(x).T / math.sqrt(d_out)
        squares.append(s.square().mean())
        largest.append(s.softmax(dim=-1).amax(dim=-1).mean())
    std = torch.stack(squares).mean().sqrt()
    top = torch.stack(largest).mean()
    print(f"{d_in:4}{d_out:7}{sigma:8.2f}{std:8.2f}{top:11.2f}")
    assert abs(std / (sigma**2 / 3) - 1) < 0.15
    assert top > 0.5 if sigma > 1 else top < 0.27

# %% [markdown]
# With nearly even weights, each context vector depends on all tokens, and in the
# backward pass each of them gets a share of the gradient. Training makes the weights
# selective.
#
# ## `x @ W` and `nn.Linear` store transposed matrices
#
# `SelfAttention_v1` and `SelfAttention_v2` compute the same function, but they store
# their matrices differently. `x @ W` needs `W` as `[d_in, d_out]`. `nn.Linear` computes
# $x W^\top$ and stores `[d_out, d_in]`, one row per output.

# %%
print("v1:", list(v1.W_query.shape), "  v2:", list(v2.W_query.weight.shape))
twin = SelfAttention_v2(3, 2).requires_grad_(False)
for name, matrix in v1.named_parameters():
    twin.get_submodule(name).weight.copy_(matrix.T)
difference = (twin(inputs) - v1(inputs)).abs().max()
print(f"largest difference: {difference:.6f}")
assert difference < 1e-6

# %% [markdown]
# [`convert`](../source/convert.md) does the same, for these two and for all other
# implementations in Headnotes:

# %%
converted = convert.to(v1, "v2")
for name, weight in converted.named_parameters():
    assert torch.equal(weight, twin.get_parameter(name))

# %% [markdown]
# If you forget the transpose, PyTorch raises an error, because $3 \times 2$ does not fit
# $2 \times 3$. But where `d_in` equals `d_out`, as in most models, the matrix fits, and
# there is no error:

# %%
torch.manual_seed(123)
square = SelfAttention_v1(3, 3).requires_grad_(False)
untransposed = SelfAttention_v2(3, 3).requires_grad_(False)
state = {f"{name}.weight": w for name, w in square.state_dict().items()}
print(untransposed.load_state_dict(state))
difference = (untransposed(inputs) - square(inputs)).abs().max()
print(f"but they differ by {difference:.2f}")
assert difference > 0.1

# %% [markdown]
# ## The same seed does not give the same weights
#
# Seeds 123 and 789 give different weights, hence different outputs. Neither is better:
# before training, the outputs mean nothing. But the *same* seed gives v1 and v2
# different weights as well:

# %%
torch.manual_seed(123)
same_seed = SelfAttention_v2(3, 2).requires_grad_(False)
print("v1:", v1.W_query.data, sep="\n")
print("v2:", same_seed.W_query.weight.data, sep="\n")

# %% [markdown]
# Both use the same random numbers, but map them to weights differently. The generator
# returns the same six numbers between 0 and 1. v1 uses them as they are and fills three
# rows of two; `nn.Linear` maps them to $\pm 1/\sqrt 3$ and fills two rows of three:

# %%
samples = v1.W_query.flatten()
print("samples:", samples)
print("mapped: ", (2 * samples - 1) / math.sqrt(3))
for name, matrix in v1.named_parameters():
    mapped = (2 * matrix.reshape(2, 3) - 1) / math.sqrt(3)
    weight = same_seed.get_parameter(f"{name}.weight")
    assert torch.allclose(mapped, weight, atol=1e-6)

# %% [markdown]
# So compare implementations by copying weights, not by setting a seed. The same seed
# gives the same weights only where both sample from the same distribution, in the same
# order, for the same shapes.
#
# ## Batches: why `keys.T` is wrong for three dimensions
#
# Both classes take one sequence, `[seq_len, d_in]`. What if you pass a batch? For a
# matrix, `keys.T` swaps the two dimensions; for a tensor with three, it reverses all of
# them. Usually the sizes then do not fit. Where all sizes are equal, PyTorch warns that
# `.T` is deprecated there, and computes something else:

# %%
torch.manual_seed(0)
q, k = torch.rand(2, 4, 4, 4)  # each [batch_size, seq_len, d_out], all 4
reversed_dims = q @ k.permute(2, 1, 0)  # what `k.T` does to three dimensions
right = q @ k.mT  # transposes the last two dimensions only
print("shapes: ", list(reversed_dims.shape), list(right.shape))
print("differ by", f"{(reversed_dims - right).abs().max():.1f}")
assert not torch.allclose(reversed_dims, right, atol=0.1)

# %% [markdown]
# Component `m` of a query has been multiplied with *token* `m` of a key, which is not a
# dot product of any query with any key:

# %%
nonsense = torch.einsum("nim,jmn->nij", q, k)
assert torch.allclose(reversed_dims, nonsense)

# %% [markdown]
# Our classes refuse such an input, and the message names the way out:

# %%
batch = torch.rand(4, 4, 4)
attention = SelfAttention_v1(4, 4).requires_grad_(False)
try:
    attention(batch)
except ValueError as error:
    print(error)
each = torch.vmap(attention)(batch)
for x, y in zip(batch, each, strict=True):
    assert torch.allclose(attention(x), y, atol=1e-6)

# %% [markdown]
# ## Try it
#
# Which three matrices make `SelfAttention_v1` compute what lesson 1 computed by hand?
# The context vector of *journey* was `[0.4419, 0.6515, 0.5683]` there. And if you then
# change the sign of `W_key`, to which token does each query attend most?

# %% fold="Answer"
by_hand = SelfAttention_v1(3, 3).requires_grad_(False)
for matrix in by_hand.parameters():
    matrix.copy_(torch.eye(3))

# The class divides the scores by the root of 3; multiply the queries by it.
by_hand.W_query.mul_(math.sqrt(3))
print(by_hand(inputs)[1])
assert torch.allclose(by_hand(inputs), raw.softmax(dim=-1) @ inputs, atol=1e-6)

# With the other sign, each query attends most to the token to which it attended
# least before: five of them to "one", whose embedding is short and points elsewhere,
# and "one" to "step". No token attends most to itself.
by_hand.W_key.neg_()
scores = inputs @ by_hand.W_query @ (inputs @ by_hand.W_key).T
print([words[j] for j in scores.argmax(dim=-1)])
assert torch.equal(scores.argmax(dim=-1), raw.argmin(dim=-1))
assert (scores.argmax(dim=-1) != torch.arange(6)).all()

# %% [markdown]
# ## In short
#
# - Query, key and value are three projections of the embedding of a token, with
#   trainable matrices.
# - Scores are divided by $\sqrt{d_k}$, so that their variance does not depend on the
#   width of the keys.
# - With PyTorch's initialization and inputs of standard deviation 1, scores have a
#   standard deviation of $1/3$, and attention weights start out nearly even.
# - `nn.Linear` stores the transpose of the matrix in `x @ W`; compare implementations
#   by copying weights, not by seeds.
# - For batches, transpose the last two dimensions with `keys.mT`, not all with `keys.T`.
#
# Next: a batch dimension and a causal mask, in [causal
# self-attention](03_causal_self_attention.md).
