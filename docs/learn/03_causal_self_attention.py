# %% [markdown]
# # Causal (masked) self-attention
#
# In *causal* self-attention, each token may attend to itself and to the tokens before it,
# but not to later ones. Language models need this: they learn to predict the next token,
# and in training they get whole sequences, which contain the tokens to be predicted. This
# lesson masks later tokens in two ways, shows where one of them gives NaN, and adds
# dropout on the attention weights. You need [attention by hand](01_attention_by_hand.md)
# and [queries, keys and values](02_queries_keys_and_values.md). Reading time: 10 minutes.
#
# The sentence and the seeds are those of the previous lessons. We begin with the
# attention weights of [`SelfAttention_v2`](../source/implementations/stages.md), without
# a mask:

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
scores = v2.W_query(inputs) @ v2.W_key(inputs).T  # [q_len, k_len]
scale = 2**-0.5  # one over the root of `d_out`
weights = (scores * scale).softmax(dim=-1)
print(weights)
assert torch.allclose(weights @ v2.W_value(inputs), v2(inputs))

# %% [markdown]
# A row is a query, a column is a key. The entries above the diagonal are the weights of
# future tokens, those that come after the query.
#
# ## First way: zero the future weights and renormalize
#
# The obvious way is to multiply these weights by zero, with a lower triangular matrix.

# %%
past = torch.ones(6, 6).tril()
zeroed = weights * past
print(zeroed)

# %% [markdown]
# The rows no longer sum to 1. Divide each of them by its sum:

# %%
renormalized = zeroed / zeroed.sum(dim=-1, keepdim=True)
print(renormalized)

# %% [markdown]
# The softmax was computed over *all* six tokens. Do future tokens still influence the
# result? They do not. All weights of a row have the same denominator $Z$, which
# contains the future scores, and the second division cancels it:
#
# $$\frac{e^{s_j} / Z}{\sum_{k \le i} e^{s_k} / Z} =
#   \frac{e^{s_j}}{\sum_{k \le i} e^{s_k}}$$
#
# ## Second way: mask with minus infinity before softmax
#
# The right-hand side is a softmax over the past alone. Since $e^{-\infty} = 0$, a score
# of minus infinity excludes a key from softmax:

# %%
future = past == 0
masked_scores = scores.masked_fill(future, -torch.inf)
print(masked_scores)

# %%
masked = (masked_scores * scale).softmax(dim=-1)
print(masked)
print(f"largest difference: {(masked - renormalized).abs().max():.0e}")
assert torch.allclose(masked, renormalized, atol=1e-6)

# %% [markdown]
# The weights are the same, with one step less. (It does not matter whether the mask
# comes before or after the scale: minus infinity divided by $\sqrt{2}$ is minus
# infinity.)

# %% alt="Two heat maps of attention weights, before and after masking. Before, all weights lie between 0.15 and 0.20. After, the weights above the diagonal are zero, the first row has its whole weight on ‘Your’, and the last row is unchanged."
maps = torch.stack((weights, masked), dim=-1)
_ = display_attention(words, words, maps, titles=["before", "after"])

# %% [markdown]
# The first token can attend to itself only, so this weight is 1. The last token has no
# future tokens, so its row has not changed.
#
# A causal mask also carries information on positions: the number of keys differs from
# query to query. So causal self-attention depends on the order of the tokens, as the
# exercise of [lesson 0](00_a_first_look.md) checks.
#
# ## Where renormalizing fails: underflow and NaN
#
# Let there be one past key, with score 0, and one future key, with score 200. Only one
# key is allowed, so its weight should be 1:

# %%
two = torch.tensor([0.0, 200.0])
allowed = torch.tensor([True, False])
zeroed_two = two.softmax(dim=0) * allowed
print("renormalized:", zeroed_two / zeroed_two.sum())
print("masked:      ", two.masked_fill(~allowed, -torch.inf).softmax(dim=0))
assert zeroed_two.sum() == 0

# %% [markdown]
# The softmax over both keys gives all of the weight to the future key. The weight of the
# past key would be $e^{-200}$, which is smaller than every positive number of float32,
# so it underflows to zero. Zero divided by zero is NaN. With the mask, this cannot
# happen: softmax subtracts the largest *allowed* score, so that one allowed key has
# exponent 0.
#
# Accuracy is lost gradually. Take two past keys, with scores 0 and 1, and a future key
# with a growing score:

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

# %% fold="Plotting code"
import matplotlib.pyplot as plt


def draw_underflow(x, masked, renormalized):
    """The weight of the second past key, as the future score grows."""
    _, ax = plt.subplots(figsize=(5.2, 2.5))
    style = {"linewidth": 5, "alpha": 0.4, "solid_capstyle": "butt"}
    ax.plot(x, masked, color="#2f86d6", label="masked", **style)
    ax.plot(x, renormalized, color="#d55e00", label="renormalized")
    end = renormalized.isfinite().nonzero().max()
    ax.plot(x[end], renormalized[end], "x", color="#d55e00")
    ax.text(x[end] + 1, renormalized[end], "NaN from here on", va="center", size=8)
    ax.set(xlabel="score of the future key", ylabel="weight")
    ax.set(ylim=(0, 1.08), xlim=(x[0], x[-1]))
    ax.legend(loc="lower left", frameon=False)
    plt.show()


# %% alt="The weight of the second past key against the score of the future key. Masked, it is 0.73 throughout. Renormalized, it is the same up to about 100, then jumps up and down, and ends as NaN just before 105."
draw_underflow(future_score, by_masking, by_zeroing)

# %% [markdown]
# Up to a score of about 88 the two agree within rounding errors. Then the weights of the
# past become *subnormal* numbers, which have fewer significant digits; past 100 they are
# visibly wrong, and before 105 they underflow. In float16 this happens much earlier:

# %%
half = torch.tensor([0.0, 18.0], dtype=torch.float16)
print(half.softmax(dim=0))
assert half.softmax(dim=0)[0] == 0

# %% [markdown]
# Therefore every implementation in Headnotes masks before softmax.
#
# ## Context vectors
#
# The context vectors are the weights times the values. One of the walk-throughs in the
# [errata](../compare/errata.md) multiplies by a `values` that it does not define, and
# prints a result. Its numbers come from the values of `SelfAttention_v1` (seed 123), not
# from those of the layer that gave the weights (`SelfAttention_v2`, seed 789):

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
# Both products are computed correctly, but no model computes the first. If you get the
# second, you have made no mistake.
#
# ## The class: `CausalAttention`
#
# [`CausalAttention`](../source/implementations/stages.md) does all of this for a batch,
# `[batch_size, seq_len, d_in]`. With the weights of `v2`, it gives the second result:

# %%
from headnotes.implementations.stages import CausalAttention

causal = CausalAttention(d_in=3, d_out=2, context_length=6, dropout=0.0)
causal.load_state_dict(v2.state_dict())
batch = torch.stack((inputs, inputs))
print(list(batch.shape), "to", list(causal(batch).shape))
assert torch.allclose(causal(batch)[0], consistent)

# %% [markdown]
# To test that no future token leaks, replace the last token and see which outputs
# change. Only its own may:

# %%
other = inputs.clone()
other[5] = torch.tensor([9.0, -9.0, 9.0])
changed = (causal(other[None]) != causal(inputs[None])).any(dim=-1)[0]
print(dict(zip(words, changed.tolist(), strict=True)))
assert changed.tolist() == [False] * 5 + [True]

# %% [markdown]
# ## Dropout on attention weights
#
# In training, dropout sets some weights to zero at random, so that the model does not
# come to depend on single keys. With $p = \tfrac12$:

# %%
torch.manual_seed(123)
dropout = torch.nn.Dropout(0.5)
dropped = dropout(masked)
print(dropped)
survivors = dropped > 0
assert torch.allclose(dropped[survivors], 2 * masked[survivors])

# %% [markdown]
# Each weight that survives is **twice** what it was. In evaluation nothing is dropped,
# and the context vectors should then have the size that they have in training on
# average. A weight $w$ survives with probability $1 - p$; divided by $1 - p$, it keeps
# its mean:
#
# $$p \cdot 0 + (1 - p) \cdot \frac{w}{1 - p} = w$$
#
# Over 20,000 samples, the mean is again the weights:

# %%
samples = dropout(masked.expand(20_000, 6, 6))
print(samples.mean(dim=0))
assert torch.allclose(samples.mean(dim=0), masked, atol=0.05)

# %% [markdown]
# But only on average. In a single sample, a row need not sum to 1. Here are the sums of
# the last row, that of *step*, in the 20,000 samples:


# %% fold="Plotting code"
def draw_sums(sums):
    """A histogram of the sums of a row, and their mean."""
    _, ax = plt.subplots(figsize=(5.2, 2.2))
    share = torch.full_like(sums, 100 / len(sums))
    edges = torch.linspace(-0.025, 2.025, 42)
    ax.hist(sums, edges, weights=share, color="#2f86d6")
    ax.axvline(sums.mean(), color="#d55e00", linewidth=1.5)
    ax.text(sums.mean() + 0.02, 20, f"mean {sums.mean():.2f}", size=8)
    ax.set(xlabel="sum of the row", ylabel="% of samples", ylim=(0, 22))
    plt.show()


# %% alt="A histogram of row sums between 0 and 2, with clusters near 0, 0.33, 0.66, 1, 1.33, 1.66 and 2, one for each number of survivors. The mean is 1."
draw_sums(samples[:, 5].sum(dim=-1))

# %% [markdown]
# There are seven clusters, for zero to six surviving weights. The first token is
# affected most: its only weight is either 0 or 2, so in half of the samples its context
# vector is zero.

# %%
first = samples[:, 0, 0]
print("values:", first.unique().tolist(), f"mean: {first.mean():.2f}")
assert first.unique().tolist() == [0, 2]

# %% [markdown]
# ## Why dropout masks differ from the book's
#
# A seed makes initial weights reproducible. For dropout it does less: for seed 123, two
# different dropout masks have been printed. On Intel processors, PyTorch used to take
# these random numbers from Intel's MKL library, and on all others from its own
# generator, a Mersenne twister. Early in 2025 [it dropped
# MKL's](https://github.com/pytorch/pytorch/pull/146174), because its streams, seeded
# anew at each call, repeated themselves. A GPU has a third generator. So the dropout
# mask depends on the device and on the version of PyTorch. Both of the CPU's generators
# can be written in a few lines:


# %% fold="The two generators"
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
    """The Mersenne twister, with 53 bits per number."""
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
# So your tests should not compare with stored numbers that depend on dropout. Test what
# is true of all samples: the factor of the surviving weights, and the mean.
#
# ## Try it
#
# What if a token may not attend to itself, but only to the tokens *before* it? Shift the
# mask by one, `tril(-1)`, and try both ways. What are the weights of the first token? And
# what are they in [`MultiHeadAttention`](../source/mha.md), the core module of
# Headnotes?

# %% fold="Answer"
strictly = torch.ones(6, 6).tril(-1)
zeroed = weights * strictly
print("renormalized:", (zeroed / zeroed.sum(dim=-1, keepdim=True))[0])
no_keys = scores.masked_fill(strictly == 0, -torch.inf)
print("masked:      ", no_keys.softmax(dim=-1)[0])
assert no_keys.softmax(dim=-1)[0].isnan().all()

# The first row is fully masked: no key is allowed, and both ways divide zero by zero.
# The core module gives such a row weights of zero. Its context vector is then zero,
# and the output is the bias of the output projection.
from headnotes import MultiHeadAttention

mha = MultiHeadAttention(heads=1, d_model=3).eval()
x = inputs[:, None]  # [seq_len, batch_size, d_model]
y = mha(query=x, key=x, value=x, mask=strictly.bool()[:, :, None])
print("core module: ", mha.attn[0, :, 0, 0])
assert (mha.attn[0] == 0).all()
assert torch.allclose(y[0, 0], mha.output.bias)
assert y.isfinite().all()

# %% [markdown]
# ## In short
#
# - With a causal mask, a query may attend to its own position and to those before it.
# - Mask by setting scores to minus infinity *before* softmax. Zeroing weights after
#   softmax and renormalizing is the same in exact arithmetic, but can give NaN.
# - Test for leaks: change one token, and check that no earlier output changes.
# - Dropout acts on attention weights in training and divides the surviving ones by
#   $1 - p$; rows then sum to 1 only on average.
# - A fully masked row is 0 / 0; Headnotes gives it weights of zero.
#
# Next: several heads in parallel, in [multi-head
# attention](04_multi_head_attention.md).
