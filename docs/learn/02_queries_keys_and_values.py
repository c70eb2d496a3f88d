# %% [markdown]
# # Trainable projections
#
# [By hand](01_attention_by_hand.md), the vector of a word did three jobs at once: it
# asked, it was compared and it was read. What is lost by that, and what do three
# matrices change? We follow the same six words through two small classes,
# `SelfAttention_v1` and `SelfAttention_v2` of the
# [four stages](../source/implementations/stages.md), and then find out why they differ
# though they compute the same.

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
# ## One vector, three jobs
#
# Whom does each word read most from, as long as vectors are compared as they are? And
# whom, if we first make all of them equally long?

# %%
raw = inputs @ inputs.T
unit = inputs / inputs.norm(dim=-1, keepdim=True)
for i, word in enumerate(words):
    longest, itself = raw[i].argmax(), (unit @ unit.T)[i].argmax()
    print(f"{word:8} reads {words[longest]:8} at equal length {words[itself]}")

# %% [markdown]
# At equal length, everyone reads most from themselves. That is no property of this
# sentence: nothing points more in the direction of a vector than the vector itself.
# Only length can break the rule, and then the long ones win, whoever asks.
#
# And every score is mutual: since $a \cdot b = b \cdot a$, two words matter equally to
# each other. A language is not like that. A verb may look for its subject while the
# subject looks for its adjective.
#
# ## Three matrices
#
# So let each word have three vectors instead of one, each made from its own by a matrix
# that can be learned. With the **query** it asks, by the **key** it is found, and its
# **value** is what it gives away:
#
# $$Q = X W_Q, \quad K = X W_K, \quad V = X W_V$$
#
# Two numbers each will do here, so that we can draw them later. The first class draws
# its matrices from $[0, 1)$, and seed 123 gives the numbers of
# [Raschka's book](https://github.com/rasbt/LLMs-from-scratch), section 3.4.

# %%
torch.manual_seed(123)
v1 = SelfAttention_v1(d_in=3, d_out=2).requires_grad_(False)
print(v1.W_query.data)

# %% [markdown]
# ## One word asks
#
# *journey* again, the second word. It asks with its query, and all six are found by
# their keys, *journey* itself among them:

# %%
query = inputs[1] @ v1.W_query
keys = inputs @ v1.W_key
values = inputs @ v1.W_value
scores = keys @ query
print("query: ", query)
print("scores:", scores)

# %% [markdown]
# Before the softmax, scores are divided by $\sqrt{d_k}$, where $d_k$ is how many
# numbers a key has, here 2. A dot product adds up $d_k$ terms, so it strays further the
# more there are; divided by the root, it strays equally far at any width. Why that
# matters is told in [a later lesson](05_embeddings_and_positional_encoding.md).

# %%
weights = (scores / math.sqrt(keys.shape[-1])).softmax(dim=-1)
print("weights:", weights)
print("context:", weights @ values)

# %% [markdown]
# ## All words ask
#
# With one query a row, the same three lines serve all six. And this is the class:

# %%
queries = inputs @ v1.W_query
scores = queries @ keys.T
weights = (scores / math.sqrt(keys.shape[-1])).softmax(dim=-1)
contexts = weights @ values
print(v1(inputs))
assert torch.allclose(contexts, v1(inputs))
assert not torch.allclose(scores, scores.T)

# %% [markdown]
# Two promises are kept: the scores are no longer symmetric, and what is read, two
# numbers, is something else than what was compared. Yet the six rows are almost the
# same. A picture shows why. The arrows are the six queries, that of *journey* in
# orange; the dots are the six keys. Each dashed line joins all places of one score for
# *journey*. It meets the arrow at a right angle: a key scores by how far it lies
# *along* the arrow.


# %% fold="How the plane is drawn"
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
    ax.set(xlabel="first number", ylabel="second number")
    plt.show()


# %% alt="v1: six query arrows, all up and slightly to the right. The six keys lie along the arrow of ‘journey’: ‘journey’ and ‘starts’ beyond the line of score 1.5, ‘one’ near 0.5, the others between."
draw_plane(queries, keys, [0, 0.5, 1, 1.5, 2], below=("starts",))

# %% [markdown]
# All numbers are positive, inputs and matrices, so all arrows share one corner of the
# plane and point nearly the same way. Whoever asks, asks for the same thing, only more
# or less loudly.
#
# ## The same, with linear layers
#
# The second class uses `nn.Linear`, which begins with small numbers of both signs,
# uniform within $\pm 1/\sqrt{d_{in}}$, and could also have biases. The book takes seed
# 789 here:

# %%
torch.manual_seed(789)
v2 = SelfAttention_v2(d_in=3, d_out=2).requires_grad_(False)
v2_queries, v2_keys = v2.W_query(inputs), v2.W_key(inputs)
v2_scores = v2_queries @ v2_keys.T
v2_weights = (v2_scores / math.sqrt(2)).softmax(dim=-1)
print(v2_weights)
print(v2(inputs))
assert torch.allclose(v2_weights @ v2.W_value(inputs), v2(inputs))

# %% alt="v2, in the same frame: six shorter query arrows, to the right and slightly down. The six keys lie around the line of score 0, none beyond 0.5."
lefts = ("with", "step")
draw_plane(v2_queries, v2_keys, [-0.5, 0, 0.5, 1], lefts, below=("journey",))

# %% [markdown]
# In the same frame, arrows and keys are shorter now, and no key lies far along the
# arrow. The scores differ by little, and so do the weights:

# %% alt="Two maps of weights, v1 and v2, on one scale. In v1 the columns of ‘journey’ and ‘starts’ are bright and ‘one’ is dark, from 0.09 to 0.23. In v2 all is between 0.15 and 0.20, and ‘Your’ is the brightest column."
from headnotes.plots import display_attention

both = torch.stack([weights, v2_weights], dim=-1)
_ = display_attention(words, words, both, titles=["v1", "v2"])

# %% [markdown]
# This is how a layer is meant to be born. Say that its inputs have a standard deviation
# of 1. A weight drawn from $\pm 1/\sqrt{d_{in}}$ has one of $1/\sqrt{3\,d_{in}}$, so a
# query, which sums $d_{in}$ products, has $1/\sqrt 3$, and so has a key. Each product
# of the two then has $1/3$, and the division by $\sqrt{d_k}$ keeps the sum of $d_k$ of
# them near a third, too, whatever the sizes:

# %%
torch.manual_seed(0)
for d_in, d_out in [(3, 2), (64, 16), (512, 64)]:
    spreads = []
    for _ in range(100):
        layer = SelfAttention_v2(d_in, d_out).requires_grad_(False)
        x = torch.randn(6, d_in)
        s = layer.W_query(x) @ layer.W_key(x).T / math.sqrt(d_out)
        spreads.append(s.square().mean())
    spread = torch.stack(spreads).mean().sqrt()
    print(f"d_in {d_in:3}, d_out {d_out:2}: scores vary by {spread:.2f}")
    assert abs(spread - 1 / 3) < 0.05

# %% [markdown]
# Scores as close as that make soft weights: at first everyone listens to everyone,
# nearly evenly, and every word gets its share of the gradient. To prefer somebody is
# what training is for.
#
# ## One transpose apart
#
# Do v1 and v2 compute the same at all? They do, but they keep their matrices turned.
# `x @ W` needs `[d_in, d_out]`. `nn.Linear` computes $x W^\top$ and keeps
# `[d_out, d_in]`, a row for each number that comes out.

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
# implementations here:

# %%
converted = convert.to(v1, "v2")
for name, weight in converted.named_parameters():
    assert torch.equal(weight, twin.get_parameter(name))

# %% [markdown]
# Forget the transpose, and you are told, for $3 \times 2$ does not fit $2 \times 3$.
# But where `d_in` equals `d_out`, as in most models, it fits, and nobody complains:

# %%
torch.manual_seed(123)
square = SelfAttention_v1(3, 3).requires_grad_(False)
turned = SelfAttention_v2(3, 3).requires_grad_(False)
state = {f"{name}.weight": w for name, w in square.state_dict().items()}
print(turned.load_state_dict(state))
difference = (turned(inputs) - square(inputs)).abs().max()
print(f"but they differ by {difference:.2f}")
assert difference > 0.1

# %% [markdown]
# ## Two seeds, and one seed twice
#
# Seeds 123 and 789 give different weights, hence different outputs, and neither is
# better: before training they mean nothing. But the *same* seed gives v1 and v2
# different weights, too. Why?

# %%
torch.manual_seed(123)
same_seed = SelfAttention_v2(3, 2).requires_grad_(False)
print("v1:", v1.W_query.data, sep="\n")
print("v2:", same_seed.W_query.weight.data, sep="\n")

# %% [markdown]
# It is the same luck, used differently. The generator hands out the same six numbers
# between 0 and 1. v1 takes them as they are and fills three rows of two; `nn.Linear`
# stretches them to $\pm 1/\sqrt 3$ and fills two rows of three:

# %%
drawn = v1.W_query.flatten()
stretched = (2 * drawn - 1) / math.sqrt(3)
print("drawn:    ", drawn)
print("stretched:", stretched)
for name, matrix in v1.named_parameters():
    stretched = (2 * matrix.reshape(2, 3) - 1) / math.sqrt(3)
    weight = same_seed.get_parameter(f"{name}.weight")
    assert torch.allclose(stretched, weight, atol=1e-6)

# %% [markdown]
# So compare implementations by copying weights, never by setting a seed. A seed agrees
# only where both draw the same numbers, in the same order, for the same shapes.
#
# ## A batch is refused
#
# Both classes take one sentence, `[seq_len, d_in]`. What if you pass several at once?
# For a matrix, `keys.T` swaps two axes; of three axes it reverses all. Usually the
# sizes then clash. Where all of them agree, torch warns that `.T` is deprecated there,
# and goes on to compute something:

# %%
torch.manual_seed(0)
q, k = torch.rand(2, 4, 4, 4)  # each [batch_size, seq_len, d_out], all 4
reversed_axes = q @ k.permute(2, 1, 0)  # what `k.T` does to three axes
right = q @ k.mT  # only the last two axes
print("shapes: ", list(reversed_axes.shape), list(right.shape))
print("differ by", f"{(reversed_axes - right).abs().max():.1f}")
assert not torch.allclose(reversed_axes, right, atol=0.1)

# %% [markdown]
# What has it computed? Component `m` of a query was multiplied with *token* `m` of a
# key, which is no comparison of anything:

# %%
nonsense = torch.einsum("nim,jmn->nij", q, k)
assert torch.allclose(reversed_axes, nonsense)

# %% [markdown]
# Our classes refuse such an input, and say what would do instead:

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
# A batch axis of its own comes with the next stage, together with a mask:
# [looking only backwards](03_causal_self_attention.md).
#
# ## Try it
#
# Which three matrices make `SelfAttention_v1` do exactly what lesson 1 did by hand?
# Its context vector for *journey* was `[0.4419, 0.6515, 0.5683]`. And if you then turn
# the sign of `W_key`: whom do the words read most from?

# %% fold="One answer"
by_hand = SelfAttention_v1(3, 3).requires_grad_(False)
for matrix in by_hand.parameters():
    matrix.copy_(torch.eye(3))

# The class divides scores by the root of 3, so the queries make up for it.
by_hand.W_query.mul_(math.sqrt(3))
print(by_hand(inputs)[1])
assert torch.allclose(by_hand(inputs), raw.softmax(dim=-1) @ inputs, atol=1e-6)

# With the other sign, a word reads most from whom it read least before: five of
# them from "one", which is short and points elsewhere, and "one" from "step".
# Nobody reads most from themselves any more.
by_hand.W_key.neg_()
scores = inputs @ by_hand.W_query @ (inputs @ by_hand.W_key).T
print([words[j] for j in scores.argmax(dim=-1)])
assert torch.equal(scores.argmax(dim=-1), raw.argmin(dim=-1))
assert (scores.argmax(dim=-1) != torch.arange(6)).all()
