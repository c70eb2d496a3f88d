# %% [markdown]
# # Attention by hand
#
# This lesson computes self-attention for one sentence, step by step: dot products give
# scores, softmax turns scores into attention weights, and a weighted average gives each
# token its context vector. Nothing is learned here, and there is no class and no layer.
# You need Python and basic PyTorch: tensors and matrix products. Reading time: 10
# minutes.
#
# The sentence and its numbers are those of
# [Raschka's book](https://github.com/rasbt/LLMs-from-scratch), section 3.3, so that you
# can read the two side by side. There are six tokens, each with an embedding of three
# numbers:

# %%
import torch

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
# An embedding describes its token alone; it does not depend on the other tokens of the
# sentence. Attention computes a new vector for each token, a weighted average over all
# tokens. We need the weights of that average.
#
# ## Scores: dot products of a query with the keys {#compare}
#
# We begin with the second token, *journey*. Its embedding is the **query**. The
# embeddings of all six tokens are the **keys**. The **score** of a key is its dot
# product with the query: multiply the two vectors component by component, and add up. A
# score is large where both vectors are long and point in similar directions.

# %%
query = inputs[1]
scores = torch.zeros(6)
for j, key in enumerate(inputs):
    for a, b in zip(key, query, strict=True):
        scores[j] += a * b
print(scores)

# %% fold="Plotting code"
import matplotlib.pyplot as plt


def draw_products(products):
    """One bar per token, made of the products of its components."""
    _, ax = plt.subplots(figsize=(5.4, 2.3))
    start = torch.zeros(6)
    shades = ["#2f86d6", "#d55e00", "#8a8a8a"]
    for c, (column, shade) in enumerate(zip(products.T, shades, strict=True)):
        style = {"color": shade, "height": 0.65, "label": f"component {c}"}
        ax.barh(words, column, left=start, **style)
        start = start + column
    for j, score in enumerate(start.tolist()):
        ax.text(score + 0.02, j, f"{score:.4f}", va="center", size=8)
    ax.invert_yaxis()
    ax.set(xlabel="score: the sum of the three products", xlim=(0, 1.75))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.figure.legend(loc="outside upper center", ncols=3, frameon=False)
    plt.show()


# %% alt="Six bars, one per token, each made of three products. The longest are those of ‘journey’ with 1.4950 and ‘starts’ with 1.4754, the shortest is that of ‘one’ with 0.7070."
draw_products(inputs * query)

# %% [markdown]
# Two things to notice. First, *journey* is also compared with itself: the keys are
# those of all tokens, the query's own among them. Second, the score of *starts* is
# almost as large as that of *journey*, because the two embeddings are almost equal.
#
# The loop is a product of a matrix with a vector:

# %%
assert torch.allclose(inputs @ query, scores)
scores = inputs @ query

# %% [markdown]
# ## Softmax: from scores to attention weights
#
# A weighted average needs weights that sum to 1. The obvious way to get them is to
# divide the scores by their sum:

# %%
ratios = scores / scores.sum()
print("sum of the scores:  ", f"{scores.sum():.4f}")
print("divided by the sum: ", ratios)
print("sum of these:       ", f"{ratios.sum():.4f}")

# %% [markdown]
# This works here only because all scores happen to be positive. Scores are dot products,
# and dot products can be negative.
#
# For example, center the embeddings: subtract their mean from each of them. They then
# sum to zero, and so do their dot products with any query. We would divide by zero;
# because of rounding errors, the code divides by a tiny number instead:

# %%
centered = inputs - inputs.mean(dim=0)
centered_scores = centered @ centered[1]
print("scores:            ", centered_scores)
print("their sum:         ", f"{centered_scores.sum():.0e}")
centered_ratios = centered_scores / centered_scores.sum()
print("divided by the sum:", f"up to {centered_ratios.abs().max():.0e}")
assert centered_scores.sum().abs() < 1e-6

# %% [markdown]
# *Softmax* does not have this problem. It first makes all scores positive, by the
# exponential function, and then divides by the sum. The results are the **attention
# weights**:
#
# $$w_j = \frac{e^{s_j}}{\sum_k e^{s_k}}$$

# %%
weights = scores.exp() / scores.exp().sum()
print("weights:          ", weights)
print("centered weights: ", centered_scores.softmax(dim=0))
assert torch.isclose(weights.sum(), torch.tensor(1.0))

# %% [markdown]
# ## Softmax depends on differences of scores only
#
# Add the same number $c$ to all scores, and the weights remain the same: since
# $e^{s+c} = e^c e^s$, the factor $e^c$ cancels in the fraction. Division by the sum does
# not have this property:


# %% fold="Plotting code"
def draw_shifts(scores):
    """The weight of each token as one number is added to all scores."""
    _, axes = plt.subplots(1, 2, figsize=(6.2, 2.7), sharey=True)
    shift = torch.linspace(-1.0, 1.0, 201)[:, None]
    ways = {
        "divided by the sum": lambda s: s / s.sum(dim=1, keepdim=True),
        "softmax": lambda s: s.softmax(dim=1),
    }
    shades = ["#8a8a8a", "#d55e00", "#2f86d6", "#c27ba0", "#1a9e77", "#c79a00"]
    for ax, (title, way) in zip(axes, ways.items(), strict=True):
        ax.axhline(0, color="#123456", linewidth=0.6)
        for j, curve in enumerate(way(scores + shift).T):
            width = 3.5 - 0.4 * j  # equal curves remain visible below one another
            style = {"color": shades[j], "label": words[j], "linewidth": width}
            ax.plot(shift[:, 0], curve, **style)
        ax.set(title=title, xlabel="added to all scores")
    axes[0].set_ylabel("weight")
    handles, labels = axes[0].get_legend_handles_labels()
    style = {"frameon": False, "columnspacing": 1, "handlelength": 1.2}
    place = "outside lower center"
    axes[0].figure.legend(handles, labels, loc=place, ncols=6, **style)
    plt.show()


# %% alt="Two panels of six curves each. Divided by the sum, the weights diverge as 1 is subtracted from the scores, to values from minus 0.5 to plus 0.9. Under softmax all six curves are horizontal."
draw_shifts(scores)

# %% [markdown]
# On the left, subtracting 1 makes some weights negative, and gives *journey* a weight of
# 0.88. Where 1.09 is subtracted, the mean of the scores, their sum is zero and the
# curves diverge. On the right nothing changes.

# %%
bad = (scores - 1) / (scores - 1).sum()
print(bad)
assert f"{scores.mean():.2f}" == "1.09"
assert torch.allclose((scores - 1).softmax(dim=0), weights)

# %% [markdown]
# Implementations make use of this property. Computed by the formula, softmax overflows
# early, since $e^{89}$ is too large for float32. `torch.softmax` therefore subtracts the
# largest score first: the weights are the same, and no exponent is above zero.

# %%
large = scores + 100
print("by the formula:", large.exp() / large.exp().sum())
print("torch.softmax: ", large.softmax(dim=0))
assert torch.allclose(large.softmax(dim=0), weights, atol=1e-5)

# %% [markdown]
# ## The context vector of one token
#
# The vectors that are averaged are called **values**. In this lesson they are the
# embeddings once more. Multiply each by its weight, and add up:

# %%
context = torch.zeros(3)
for weight, value in zip(weights, inputs, strict=True):
    context += weight * value
print(context)
assert torch.allclose(context, weights @ inputs)

# %% [markdown]
# This is the **context vector** of *journey*: a new vector for this token, which depends
# on all tokens of the sentence. Since the weights are positive and sum to 1, each of its
# components lies between the smallest and the largest of that component in the values.
#
# ## All tokens at once: two matrix products
#
# Each token has a context vector. With one row per query and one column per key, all
# scores are one matrix product:

# %%
scores = inputs @ inputs.T  # [q_len, k_len]
print(scores)
for i in range(6):
    for j in range(6):
        assert torch.isclose(scores[i, j], inputs[i] @ inputs[j])

# %% [markdown]
# Softmax runs over the keys, along each row: `dim=-1`, the last dimension. A second
# matrix product computes all weighted averages.

# %%
weights = scores.softmax(dim=-1)
print(weights)
contexts = weights @ inputs
print(contexts)
assert torch.allclose(contexts[1], context)

# %% alt="A heat map of attention weights, six queries by six keys. The columns of ‘journey’ and ‘starts’ are bright in all rows; the largest weight is 0.24."
from headnotes.plots import display_attention

_ = display_attention(words, words, weights)

# %% [markdown]
# The matrix of scores is symmetric, because $a \cdot b = b \cdot a$. The matrix of
# weights is not, because each row is divided by its own sum. Look also at the row of
# *with*: its largest weight belongs to *journey*, not to *with* itself. A dot product
# grows with the length of the vectors, and the embedding of *journey* is long while that
# of *with* is short.

# %%
assert torch.equal(scores, scores.T)
assert not torch.allclose(weights, weights.T)
length = inputs.norm(dim=-1)
print("largest weight in the row of with:", words[weights[3].argmax()])
print("lengths:", *(f"{n:.2f}" for n in length))

# %% [markdown]
# The next figure shows the six embeddings and their context vectors, by two of the three
# components. All context vectors lie in the middle, close together: the weights, between
# 0.10 and 0.24, are not far from $1/6$, so each context vector is close to the plain mean
# of the six embeddings.


# %% fold="Plotting code"
def draw_moves(before, after):
    """An arrow from the embedding of each token to its context vector."""
    _, ax = plt.subplots(figsize=(4.6, 3.4))
    arrow = {"arrowstyle": "->", "color": "#8a8a8a", "shrinkA": 4, "shrinkB": 3}
    for word, start, end in zip(words, before, after, strict=True):
        x, y = start.tolist()
        ax.annotate("", end.tolist(), (x, y), arrowprops=arrow)
        side = {"ha": "right" if word == "journey" else "left", "va": "center"}
        x += -0.02 if word == "journey" else 0.02
        ax.text(x, y + (0.04 if y > 0.5 else -0.04), word, side, size=8)
    ax.plot(*before.T, "o", color="#2f86d6", label="embedding")
    style = {"color": "#d55e00", "markersize": 4}
    ax.plot(*after.T, "o", label="context vector", **style)
    ax.set(xlabel="component 0", ylabel="component 1", xlim=(0, 0.9))
    ax.set_ylim(0.05, 1.0)
    ax.figure.legend(loc="outside upper center", ncols=2, frameon=False)
    plt.show()


# %% alt="Six embeddings as dots spread over the plane of components 0 and 1, with arrows to six context vectors, which lie close together in the middle."
draw_moves(inputs[:, :2], contexts[:, :2])

# %%
print("smallest and largest weight:", *(f"{w:.2f}" for w in weights.aminmax()))
assert (contexts <= inputs.amax(dim=0)).all()
assert (contexts >= inputs.amin(dim=0)).all()

# %% [markdown]
# ## What is missing: trainable projections
#
# Here one and the same vector serves as query, key and value. So *journey* cannot look
# for one thing as a query and offer another as a key. Three trainable matrices change
# that; [the next lesson](02_queries_keys_and_values.md) adds them. Apart from these
# matrices and a division that keeps the scores small, this page is already
# `SelfAttention_v1`, the first of [four stages](../source/implementations/stages.md).
#
# ## Try it
#
# Make the embedding of *step* ten times as long, in the same direction. To which key do
# the six queries then attend most? And what if it is ten times as long in the *opposite*
# direction?

# %% fold="Answer"
stretched = inputs.clone()
stretched[5] *= 10
to_step = (stretched @ stretched.T).softmax(dim=-1)[:, 5]
print("ten times as long:   ", to_step)

# All six queries attend mostly to "step", though its direction has not changed: a
# large dot product can mean a good match or merely a long vector. This is one
# reason why models normalize their vectors and scale their scores.
assert (to_step > 0.6).all()

stretched[5] *= -1
to_step = (stretched @ stretched.T).softmax(dim=-1)[:, 5]
print("opposite direction:  ", to_step)

# All scores of "step" with other tokens are negative now, so only "step" attends to
# "step": its score with itself is positive, a product of two vectors of one direction.
assert (to_step[:5] < 0.02).all()
assert to_step[5] == 1

# %% [markdown]
# ## In short
#
# - A score is the dot product of a query with a key.
# - Softmax over the keys turns the scores of a query into attention weights, which are
#   positive and sum to 1; they depend on differences of scores only.
# - The context vector of a query is the average of the values with these weights.
# - For all tokens at once, self-attention is `(inputs @ inputs.T).softmax(dim=-1) @
#   inputs`.
# - Without trainable projections the scores are symmetric, but the weights are not.
#
# Next: [queries, keys and values](02_queries_keys_and_values.md) from trainable
# projections.
