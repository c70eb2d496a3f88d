# %% [markdown]
# # Attention by hand
#
# A word comes into a model as a vector that knows nothing of its neighbours. Attention
# gives it a new one, mixed from all the words of its sentence. How much of each? Here
# we find out by hand, for one word and then for all. Nothing is learned, there is no
# class and no layer: only dot products, one softmax and a weighted mean.
#
# The sentence and its numbers are those of
# [Raschka's book](https://github.com/rasbt/LLMs-from-scratch), section 3.3, so you may
# lay the two side by side. Six words, each a vector of three numbers:

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
# ## Compare
#
# The second word, *journey*, asks; call its vector the *query*. It is compared with
# each word by a dot product: multiply component by component, add up. The result is
# large where two vectors are long, and point the same way.

# %%
query = inputs[1]
scores = torch.zeros(6)
for j, x in enumerate(inputs):
    for a, b in zip(x, query, strict=True):
        scores[j] += a * b
print(scores)

# %% fold="How the bars are drawn"
import matplotlib.pyplot as plt


def draw_products(products):
    """One bar a word, made of the products of its components."""
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
    ax.set(xlabel="score: what the three products add up to", xlim=(0, 1.75))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.figure.legend(loc="outside upper center", ncols=3, frameon=False)
    plt.show()


# %% alt="Six bars, one a word, each made of three products. The longest belong to ‘journey’ with 1.4950 and ‘starts’ with 1.4754, the shortest to ‘one’ with 0.7070."
draw_products(inputs * query)

# %% [markdown]
# Two things to notice. *journey* is also compared with itself: no word is left out, and
# the one who asks is no exception. And *starts* scores almost as much, because the two
# vectors are almost the same.
#
# The loop is one product of a matrix with a vector:

# %%
assert torch.allclose(inputs @ query, scores)
scores = inputs @ query

# %% [markdown]
# ## From scores to weights
#
# To mix, we need weights: six numbers that sum to 1. The obvious way is to divide by
# the sum:

# %%
shares = scores / scores.sum()
print("sum of scores: ", f"{scores.sum():.4f}")
print("shares:        ", shares)
print("sum of shares: ", f"{shares.sum():.4f}")

# %% [markdown]
# So why does nobody do it? Because here it worked by luck: all scores happen to be
# positive. Scores are dot products, and nothing keeps those above zero.
#
# Measure the same vectors from their common mean, for instance, which is what much of
# deep learning does to its inputs. The scores now sum to zero, and must: the vectors
# do. What is left of the sum is rounding error, and we divide by it.

# %%
centred = inputs - inputs.mean(dim=0)
centred_scores = centred @ centred[1]
print("scores:         ", centred_scores)
print("their sum:      ", f"{centred_scores.sum():.0e}")
centred_shares = centred_scores / centred_scores.sum()
print("largest “share”:", f"{centred_shares.abs().max():.0e}")
assert centred_scores.sum().abs() < 1e-6

# %% [markdown]
# *Softmax* has no such trouble. It makes all scores positive first, by the exponential,
# and only then divides by the sum:
#
# $$w_j = \frac{e^{s_j}}{\sum_k e^{s_k}}$$

# %%
weights = scores.exp() / scores.exp().sum()
print("weights:", weights)
print("centred:", centred_scores.softmax(dim=0))
assert torch.isclose(weights.sum(), torch.tensor(1.0))

# %% [markdown]
# It has a second virtue. Add the same number to all scores, and nothing happens: above
# and below the line, $e^{s+c} = e^c e^s$, so the factor cancels. Only *differences*
# between scores count, which is what a comparison ought to mean. Division by the sum,
# on the other hand, gives whatever you like:


# %% fold="How the curves are drawn"
def draw_shifts(scores):
    """The weights of each word as one number is added to all scores."""
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
            width = 3.5 - 0.4 * j  # so that those below are seen
            style = {"color": shades[j], "label": words[j], "linewidth": width}
            ax.plot(shift[:, 0], curve, **style)
        ax.set(title=title, xlabel="added to all scores")
    axes[0].set_ylabel("weight")
    handles, labels = axes[0].get_legend_handles_labels()
    style = {"frameon": False, "columnspacing": 1, "handlelength": 1.2}
    place = "outside lower center"
    axes[0].figure.legend(handles, labels, loc=place, ncols=6, **style)
    plt.show()


# %% alt="Two panels of six curves each. Divided by the sum, the weights fan out as 1 is subtracted from the scores, from minus 0.5 to plus 0.9. Under softmax all six curves are level."
draw_shifts(scores)

# %% [markdown]
# On the left, subtracting 1 makes some weights negative, and *journey* alone takes
# 0.88. A little further, at 1.09, which is the mean of the scores, their sum passes
# through zero and the curves leave for infinity. On the right nothing moves.

# %%
bad = (scores - 1) / (scores - 1).sum()
print(bad)
assert f"{scores.mean():.2f}" == "1.09"
assert torch.allclose((scores - 1).softmax(dim=0), weights)

# %% [markdown]
# That freedom has a practical use. Written as above, softmax overflows early, since
# $e^{89}$ is too large for float32. So the real one subtracts the largest score first;
# the weights are the same, and no exponent is above zero.

# %%
large = scores + 100
print("by the formula:", large.exp() / large.exp().sum())
print("torch.softmax: ", large.softmax(dim=0))
assert torch.allclose(large.softmax(dim=0), weights, atol=1e-5)

# %% [markdown]
# ## One context vector
#
# The weights say how much of each word goes into the mixture. Multiply and add up:

# %%
context = torch.zeros(3)
for weight, x in zip(weights, inputs, strict=True):
    context += weight * x
print(context)
assert torch.allclose(context, weights @ inputs)

# %% [markdown]
# This is the *context vector* of *journey*: its new vector, which now holds something
# of its neighbours. Since the weights are positive and sum to 1, it is a mean, and a
# mean never leaves the range of what it was made of.
#
# ## All of them at once
#
# Every word deserves one. With a row for each word that asks and a column for each that
# is read, all dot products are one matrix product:

# %%
scores = inputs @ inputs.T
print(scores)
for i in range(6):
    for j in range(6):
        assert torch.isclose(scores[i, j], inputs[i] @ inputs[j])

# %% [markdown]
# Softmax runs along each row, over the words that are read: `dim=-1`, the last axis. A
# second product does all the mixing.

# %%
weights = scores.softmax(dim=-1)
print(weights)
contexts = weights @ inputs
print(contexts)
assert torch.allclose(contexts[1], context)

# %% alt="A map of weights, six rows by six columns. The columns of ‘journey’ and ‘starts’ are the brightest throughout, the largest weight is 0.24."
from headnotes.plots import display_attention

_ = display_attention(words, words, weights)

# %% [markdown]
# The scores are symmetric, for $a \cdot b = b \cdot a$; the weights are not, since each
# row is divided by a sum of its own. And look at the row of *with*: it reads most from
# *journey*, not from itself. A dot product also rewards length, and *journey* has a
# long vector where *with* has a short one.

# %%
assert torch.equal(scores, scores.T)
assert not torch.allclose(weights, weights.T)
length = inputs.norm(dim=-1)
print("with reads most from", words[weights[3].argmax()])
print("lengths:", *(f"{n:.2f}" for n in length))

# %% [markdown]
# Here are the six vectors and what has become of them, drawn by two of their three
# components. All have moved to the middle, and close together: their weights, between
# 0.10 and 0.24, are not far from $1/6$, so each new vector is nearly the plain mean.


# %% fold="How the arrows are drawn"
def draw_moves(before, after):
    """An arrow from each word's vector to its context vector."""
    _, ax = plt.subplots(figsize=(4.6, 3.4))
    arrow = {"arrowstyle": "->", "color": "#8a8a8a", "shrinkA": 4, "shrinkB": 3}
    for word, start, end in zip(words, before, after, strict=True):
        x, y = start.tolist()
        ax.annotate("", end.tolist(), (x, y), arrowprops=arrow)
        side = {"ha": "right" if word == "journey" else "left", "va": "center"}
        x += -0.02 if word == "journey" else 0.02
        ax.text(x, y + (0.04 if y > 0.5 else -0.04), word, side, size=8)
    ax.plot(*before.T, "o", color="#2f86d6", label="the word's vector")
    style = {"color": "#d55e00", "markersize": 4}
    ax.plot(*after.T, "o", label="its context vector", **style)
    ax.set(xlabel="component 0", ylabel="component 1", xlim=(0, 0.9))
    ax.set_ylim(0.05, 1.0)
    ax.figure.legend(loc="outside upper center", ncols=2, frameon=False)
    plt.show()


# %% alt="Six vectors as dots spread over the plane of components 0 and 1, with arrows to six context vectors that lie close together in the middle."
draw_moves(inputs[:, :2], contexts[:, :2])

# %%
print("smallest and largest weight:", *(f"{w:.2f}" for w in weights.aminmax()))
assert (contexts <= inputs.amax(dim=0)).all()
assert (contexts >= inputs.amin(dim=0)).all()

# %% [markdown]
# ## What is missing
#
# This is all of attention but the learning. One and the same vector asks, is compared
# and is read, so *journey* cannot look for one thing and offer another. Three matrices
# mend that, and [the next lesson](02_queries_keys_and_values.md) begins with them. But
# for these, and a division that keeps the scores small, this page is already
# `SelfAttention_v1` of the [four stages](../source/implementations/stages.md).
#
# ## Try it
#
# Make *step* ten times as long, in the same direction. Whom will the six words read
# from? And if you turn it round instead, to ten times as long in the *opposite*
# direction?

# %% fold="What happens"
stretched = inputs.clone()
stretched[5] *= 10
to_step = (stretched @ stretched.T).softmax(dim=-1)[:, 5]
print("ten times as long:", to_step)

# All six read mostly from "step", though it points where it pointed before.
# A dot product cannot tell a long vector from one that fits well. It is one
# reason why models normalise their vectors and scale their scores.
assert (to_step > 0.6).all()

stretched[5] *= -1
to_step = (stretched @ stretched.T).softmax(dim=-1)[:, 5]
print("turned round:     ", to_step)

# Every score with the others is negative now: nobody reads from "step" but
# "step" itself, for which two wrong signs make a right one.
assert (to_step[:5] < 0.02).all()
assert to_step[5] == 1
