# %% [markdown]
# # Looking only backwards
#
# A language model learns to guess the next word. If attention lets it look at that
# word, there is nothing left to guess. So each word may read from itself and from those
# before it, and never from those that follow. How does one hide the future? There are
# two ways. They give the same numbers, until one day they do not.
#
# We go on with the sentence and the seeds of [the first
# lessons](01_attention_by_hand.md), and begin with the weights of stage 2,
# [`SelfAttention_v2`](../source/implementations/stages.md):

# %%
import torch

from headnotes.implementations.stages import SelfAttention_v2
from headnotes.plots import display_attention

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
torch.set_grad_enabled(False)  # nothing is trained on this page

torch.manual_seed(789)
v2 = SelfAttention_v2(d_in=3, d_out=2)
scores = v2.W_query(inputs) @ v2.W_key(inputs).T
scale = 2**-0.5  # one over the root of `d_out`
weights = (scores * scale).softmax(dim=-1)
print(weights)
assert torch.allclose(weights @ v2.W_value(inputs), v2(inputs))

# %% [markdown]
# A row is a word that asks, a column a word that is read. The future lies above the
# diagonal.
#
# ## Zero the future, and share out again
#
# The obvious way: strike out the weights that should not be there.

# %%
past = torch.ones(6, 6).tril()
struck = weights * past
print(struck)

# %% [markdown]
# Now the rows no longer sum to 1. Divide each by what is left of it:

# %%
renormalised = struck / struck.sum(dim=-1, keepdim=True)
print(renormalised)

# %% [markdown]
# One might worry that the future still has a hand in this: each weight was computed by
# a softmax over *all* six words. It has not. Every weight of a row has the same
# denominator, future included, and the second division cancels it:
#
# $$\frac{e^{s_j} / Z}{\sum_{k \le i} e^{s_k} / Z} =
#   \frac{e^{s_j}}{\sum_{k \le i} e^{s_k}}$$
#
# ## Minus infinity, before the softmax
#
# The right-hand side says that we could have left the future out from the start. Since
# $e^{-\infty} = 0$, a score of minus infinity does that:

# %%
future = past == 0
masked_scores = scores.masked_fill(future, -torch.inf)
print(masked_scores)

# %%
masked = (masked_scores * scale).softmax(dim=-1)
print(masked)
print(f"largest difference: {(masked - renormalised).abs().max():.0e}")
assert torch.allclose(masked, renormalised, atol=1e-6)

# %% [markdown]
# The same weights, in one step less. (Dividing minus infinity by $\sqrt{2}$ leaves it
# what it is, so it does not matter whether the mask comes before the scale or after.)

# %% alt="Two maps of weights, before and after masking. Before, all cells lie between 0.15 and 0.20. After, the cells above the diagonal are zero, the first row has its whole weight on ‘Your’, and the last row is what it was."
maps = torch.stack((weights, masked), dim=-1)
_ = display_attention(words, words, maps, titles=["before", "after"])

# %% [markdown]
# The first word reads only itself. The last one has no future, so its row is what it
# was.
#
# ## When the two differ
#
# Let there be one word in the past, with score 0, and one in the future, with score
# 200. There is only one word to read from, so its weight is 1. Or is it?

# %%
two = torch.tensor([0.0, 200.0])
may = torch.tensor([True, False])
struck_two = two.softmax(dim=0) * may
print("renormalised:", struck_two / struck_two.sum())
print("masked:      ", two.masked_fill(~may, -torch.inf).softmax(dim=0))
assert struck_two.sum() == 0

# %% [markdown]
# The softmax over both gave the future everything: $e^{-200}$ is smaller than any
# number that float32 has, so the past was rounded to zero before it could count. Zero
# divided by zero is NaN. The mask never meets that case: what softmax subtracts first is
# the largest score that is *allowed*, so one weight at least is never tiny.
#
# It does not break all at once. Take two words in the past, with scores 0 and 1, and
# let the score of a third one, in the future, grow:

# %%
future_score = torch.linspace(80, 120, 401)
three = torch.tensor([0.0, 1.0, 0.0]).repeat(401, 1)
three[:, 2] = future_score
kept = three.softmax(dim=1)[:, :2]
by_zeroing = (kept / kept.sum(dim=1, keepdim=True))[:, 1]
by_masking = three[:, :2].softmax(dim=1)[:, 1]

gap = (by_zeroing - by_masking).abs()
assert gap[future_score < 87].max() < 1e-6
assert gap[(future_score > 100) & (future_score < 104)].max() > 0.05
assert by_zeroing[future_score > 105].isnan().all()

# %% fold="How the curves are drawn"
import matplotlib.pyplot as plt


def draw_underflow(x, masked, renormalised):
    """The weight of the second past word, as the future takes the lead."""
    _, ax = plt.subplots(figsize=(5.2, 2.5))
    style = {"linewidth": 5, "alpha": 0.4, "solid_capstyle": "butt"}
    ax.plot(x, masked, color="#2f86d6", label="masked", **style)
    ax.plot(x, renormalised, color="#d55e00", label="renormalised")
    end = renormalised.isfinite().nonzero().max()
    ax.plot(x[end], renormalised[end], "x", color="#d55e00")
    ax.text(x[end] + 1, renormalised[end], "NaN from here", va="center", size=8)
    ax.set(xlabel="score of the future word", ylabel="weight")
    ax.set(ylim=(0, 1.08), xlim=(x[0], x[-1]))
    ax.legend(loc="lower left", frameon=False)
    plt.show()


# %% alt="The weight of the second past word against the score of the future word. Masked, it is 0.73 throughout. Renormalised, it is the same up to about 100, then jumps up and down, and ends as NaN just before 105."
draw_underflow(future_score, by_masking, by_zeroing)

# %% [markdown]
# Up to about 88 they agree to the last digit or so. Then the weights of the past become
# *subnormal*, numbers with ever fewer digits; past 100 they are plainly wrong, and soon
# after they are gone. In float16 the end comes much sooner:

# %%
half = torch.tensor([0.0, 18.0], dtype=torch.float16)
print(half.softmax(dim=0))
assert half.softmax(dim=0)[0] == 0

# %% [markdown]
# So every implementation here masks with minus infinity, before the softmax.
#
# ## What is read
#
# The context is the weights times the values, as ever. A well-known walk-through of
# these steps multiplies by a `values` that it never defines, and prints a result. Which
# values were they? Not those of the layer that gave the weights, seed 789, but those of
# stage 1, seed 123:

# %%
from headnotes.implementations.stages import SelfAttention_v1

torch.manual_seed(123)
v1 = SelfAttention_v1(d_in=3, d_out=2)
as_printed = masked @ (inputs @ v1.W_value)
consistent = masked @ v2.W_value(inputs)
print("weights of v2, values of v1, as printed:")
print(as_printed)
print("weights and values of v2:")
print(consistent)
assert torch.allclose(as_printed[0], torch.tensor([0.1855, 0.8812]), atol=6e-5)

# %% [markdown]
# Neither is wrong arithmetic, but no model computes the first. If your numbers are the
# second, you have made no mistake.
#
# ## As a class
#
# [`CausalAttention`](../source/implementations/stages.md) is all of this with a batch
# axis in front. Given the weights of `v2`, it gives the second result:

# %%
from headnotes.implementations.stages import CausalAttention

causal = CausalAttention(d_in=3, d_out=2, context_length=6, dropout=0.0)
causal.load_state_dict(v2.state_dict())
batch = torch.stack((inputs, inputs))
print(list(batch.shape), "to", list(causal(batch).shape))
assert torch.allclose(causal(batch)[0], consistent)

# %% [markdown]
# Does it really not look ahead? Replace the last word, and see whose output moves:

# %%
other = inputs.clone()
other[5] = torch.tensor([9.0, -9.0, 9.0])
moved = (causal(other[None]) != causal(inputs[None])).any(dim=-1)[0]
print(dict(zip(words, moved.tolist(), strict=True)))
assert moved.tolist() == [False] * 5 + [True]

# %% [markdown]
# ## Dropout, on the weights
#
# While training, some weights are set to zero at random, so that no word comes to
# depend on a single source. Here half of them:

# %%
torch.manual_seed(123)
dropout = torch.nn.Dropout(0.5)
dropped = dropout(masked)
print(dropped)
alive = dropped > 0
assert torch.allclose(dropped[alive], 2 * masked[alive])

# %% [markdown]
# Look at the survivors: each is **twice** what it was. When the model is used, nothing
# is dropped, and what it reads should then be, on average, what it was trained on. A
# weight $w$ survives with probability $1 - p$. To keep its mean, divide it by that:
#
# $$p \cdot 0 + (1 - p) \cdot \frac{w}{1 - p} = w$$
#
# With $p = \tfrac12$ this doubles. Over 20,000 draws the mean is the weights again:

# %%
draws = dropout(masked.expand(20_000, 6, 6))
print(draws.mean(dim=0))
assert torch.allclose(draws.mean(dim=0), masked, atol=0.05)

# %% [markdown]
# But only on average. In a single draw, a row no longer sums to 1. Here are the sums of
# the last row, *step*, in those 20,000 draws:


# %% fold="How the bars are drawn"
def draw_sums(sums):
    """How often a row has which sum, and where their mean lies."""
    _, ax = plt.subplots(figsize=(5.2, 2.2))
    share = torch.full_like(sums, 100 / len(sums))
    edges = torch.linspace(-0.025, 2.025, 42)
    ax.hist(sums, edges, weights=share, color="#2f86d6")
    ax.axvline(sums.mean(), color="#d55e00", linewidth=1.5)
    ax.text(sums.mean() + 0.02, 20, f"mean {sums.mean():.2f}", size=8)
    ax.set(xlabel="sum of the row", ylabel="% of draws", ylim=(0, 22))
    plt.show()


# %% alt="A histogram of row sums between 0 and 2, with clusters near 0, 0.33, 0.66, 1, 1.33, 1.66 and 2, one for each number of survivors. The mean is 1."
draw_sums(draws[:, 5].sum(dim=-1))

# %% [markdown]
# Seven clusters, for no survivor up to six. The first word is worst off: its only
# weight is either 0 or 2, and in half of the draws it reads nothing at all.

# %%
first = draws[:, 0, 0]
print("values:", first.unique().tolist(), f"mean: {first.mean():.2f}")
assert first.unique().tolist() == [0, 2]

# %% [markdown]
# ## Why your dropout differs from the book's
#
# Seeds make weights repeatable. They do less for dropout: for seed 123, two different
# masks are in print. torch used to ask Intel's MKL library for these random numbers
# where the processor was Intel's, and its own generator, a Mersenne twister, everywhere
# else. Early in 2025 [it stopped asking
# MKL](https://github.com/pytorch/pytorch/pull/146174), whose streams, seeded anew at
# each call, repeated themselves. A GPU draws in a third way. So the mask depends on
# where, and with which version, it was drawn. Both rules are short:


# %% fold="The two rules"
def kept_by_mkl(size, p, seed):
    """MKL's generator MCG31, seeded with the twister's first 32 bits."""
    twister = torch.Generator().manual_seed(seed)
    first = torch.empty(1, dtype=torch.int64)
    first.random_(-(2**63), None, generator=twister)  # the upper half of 64
    m = 2**31 - 1
    x = (first.item() >> 32) % 2**32 % m or 1
    kept = []
    for _ in range(size):
        kept.append(x / m < 1 - p)
        x = 1132489760 * x % m
    return torch.tensor(kept)


def kept_by_twister(size, p, seed):
    """The twister itself, with 53 bits a number."""
    twister = torch.Generator().manual_seed(seed)
    return torch.rand(size, dtype=torch.float64, generator=twister) < 1 - p


# %%
mkl = kept_by_mkl(36, 0.5, seed=123).view(6, 6)
twister = kept_by_twister(36, 0.5, seed=123).view(6, 6)
print("MKL           twister")
for left, right in zip(mkl.int().tolist(), twister.int().tolist(), strict=True):
    print(*left, " ", *right)

torch.manual_seed(123)
here = dropout(torch.ones(6, 6)) > 0
print("this page was built with MKL's:        ", torch.equal(here, mkl))
print("this page was built with the twister's:", torch.equal(here, twister))

# %% [markdown]
# For your own tests this means: never fix a number that dropout has touched. Fix what
# is true of all draws, as above: the survivors' factor, the mean.
#
# ## Try it
#
# What if a word may not even read itself, only those *before* it? Move the mask by one,
# `tril(-1)`, and try both ways. What becomes of the first word? And what does
# [`MultiHeadAttention`](../source/mha.md), the core of this project, do with it?

# %% fold="What happens"
strictly = torch.ones(6, 6).tril(-1)
struck = weights * strictly
print("renormalised:", (struck / struck.sum(dim=-1, keepdim=True))[0])
nothing = scores.masked_fill(strictly == 0, -torch.inf)
print("masked:      ", nothing.softmax(dim=-1)[0])
assert nothing.softmax(dim=-1)[0].isnan().all()

# The first word has nobody to read from, and both ways divide zero by zero.
# The core gives it weights of zero instead: it reads nothing, and its output
# is the output layer's bias.
from headnotes import MultiHeadAttention

mha = MultiHeadAttention(heads=1, d_model=3).eval()
x = inputs[:, None]
y = mha(query=x, key=x, value=x, mask=strictly.bool()[:, :, None])
print("the core:    ", mha.attn[0, :, 0, 0])
assert (mha.attn[0] == 0).all()
assert torch.allclose(y[0, 0], mha.output.bias)
assert y.isfinite().all()
