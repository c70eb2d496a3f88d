# %% [markdown]
# # Padding masks and variable lengths
#
# The sequences of a batch rarely have the same length, but a tensor is rectangular. So
# short sequences are padded with a special token, and a padding mask keeps attention
# from using it. This lesson measures what padding does without a mask, and how valid
# lengths, one integer per sequence, prevent it: also for an empty sequence, together
# with a causal mask, and in several heads. You need [causal
# self-attention](03_causal_self_attention.md) and [multi-head
# attention](04_multi_head_attention.md). Reading time: 20 minutes.
#
# The attention module of this lesson is that of [Dive into Deep
# Learning](https://d2l.ai/chapter_attention-mechanisms-and-transformers/multihead-attention.html),
# [annotated here](../source/implementations/valid_lens.md). It is batch first, takes
# valid lengths instead of a mask, and flattens the heads into the batch.

# %%
import math

import torch
from IPython.display import Markdown, display

from headnotes.implementations.valid_lens import (
    MultiHeadAttention,
    masked_softmax,
)
from headnotes.positions import Embeddings, Vocabulary

texts = ["Rain fell on the old roof.", "We slept well."]
vocabulary = Vocabulary(texts)
tokens, valid_lens = vocabulary.encode_batch(texts)
tokens = tokens.T  # batch first: one row per sentence
print(tokens)
print("valid lengths:", valid_lens)

# %% [markdown]
# Token id 0 is padding, written `<pad>`. To the model it is a token like any other: it
# has an embedding, and so a query, a key and a value. (All weights of this page are
# random; nothing is trained. Positional encodings are left out, so all padding
# positions have the same vector.)

# %%
torch.manual_seed(4)
x = Embeddings(len(vocabulary), d_model=8)(tokens).detach()
print("[batch_size, seq_len, d_model] =", list(x.shape))

mha = MultiHeadAttention(num_hiddens=8, num_heads=1, dropout=0).eval()
y = mha(x, x, x, None)  # None: every token attends to every position
unmasked = mha.attention.attention_weights
print("[batch_size, q_len, k_len] =", list(unmasked.shape))

# %% [markdown]
# ## What happens without a padding mask
#
# The second sentence has three tokens and three positions of padding. How much of the
# attention weight of its tokens goes to padding?

# %%
words = [vocabulary.decode(row) for row in tokens]
for word, row in zip(words[1][:3], unmasked[1, :3], strict=True):
    print(f"{word:5} {row[3:].sum():.0%} of its weight on padding")

# %% [markdown]
# The amount of padding depends on the *longest* sequence of the batch, which has
# nothing to do with this sentence. So we pad it to ever greater lengths, and compare
# its outputs with those that it has without padding:


# %%
def with_padding(count, lens=None):
    """Mean weight on padding, and the outputs, of three tokens before padding."""
    padding = x[1:, 3:4].expand(-1, count, -1)
    padded = torch.cat([x[1:, :3], padding], dim=1)
    outputs = mha(padded, padded, padded, lens)[0, :3].detach()
    weights = mha.attention.attention_weights[0, :3]
    return weights[:, 3:].sum(dim=-1).mean(), outputs


# %% fold="Code of the table"
def show(rows):
    """Show rows of text as a table; the first is its head."""
    lines = ["|".join(row) for row in rows]
    lines.insert(1, "|".join("---:" for _ in rows[0]))
    display(Markdown("\n".join(f"|{line}|" for line in lines)))


_, unpadded = with_padding(0)
rows = [["padding", "weight on padding", "change of outputs", "difference of tokens"]]
for count in (0, 1, 3, 10, 100, 1000):
    weight, outputs = with_padding(count)
    change = (outputs - unpadded).abs().max()
    apart = (outputs - outputs.roll(1, dims=0)).abs().max()
    rows.append([f"{count}", f"{weight:.2f}", f"{change:.2f}", f"{apart:.2f}"])

# %% hide="true"
show(rows)

# %% [markdown]
# The last two columns are the largest absolute differences of any component: between
# the outputs with and without padding, and between the outputs of different tokens. As
# padding grows, the outputs of *we*, *slept* and *well* all approach the projected
# value of padding and become nearly indistinguishable. No error is raised, and all
# shapes are right.

# %%
weight, outputs = with_padding(1000)
value_of_padding = mha.W_o(mha.W_v(x[1, 3]))
assert weight > 0.99
assert torch.allclose(outputs, value_of_padding.expand(3, -1), atol=0.1)

# %% [markdown]
# ## Valid lengths and masked softmax
#
# If padding is always at the end, one integer per sequence describes it: its *valid
# length*, the number of keys, from the first on, that queries may attend to. Here is
# the computation for a row of four scores with a valid length of 2. One of the padding
# positions has the largest score, so that a mistake would show.

# %%
scores = torch.tensor([1.0, 3.0, 2.0, 4.0])
valid_len = 2

keep = torch.arange(4) < valid_len
masked_scores = scores.masked_fill(~keep, -math.inf)
powers = (masked_scores - masked_scores.max()).exp()
weights = powers / powers.sum()
print("keep:         ", keep)
print("masked scores:", masked_scores)
print("powers:       ", powers, "sum:", f"{powers.sum():.4f}")
print("weights:      ", weights)

# %% [markdown]
# Positions from the valid length on get a score of $-\infty$. Since $e^{-\infty} = 0$,
# their weight is 0 and they add nothing to the sum. The weights of the first two keys
# are the softmax of their two scores alone. ([Causal
# self-attention](03_causal_self_attention.md) shows why weights should not be set to
# zero *after* the softmax.)

# %%
assert torch.allclose(weights[:2], scores[:2].softmax(dim=0))
batch = scores.expand(2, 1, 4)  # [batch_size, q_len, k_len]
rows = masked_softmax(batch, torch.tensor([2, 4])).squeeze(1)
print(rows)
assert torch.allclose(rows[0], weights)

# %% [markdown]
# Now the whole layer. The first sentence has no padding, so its valid length of 6
# changes nothing. In the second, the columns of padding become 0.

# %%
mha(x, x, x, valid_lens)
masked = mha.attention.attention_weights
assert torch.equal(masked[0], unmasked[0])
assert (masked[1, :, 3:] == 0).all()

# %% alt="Two heat maps of the attention weights of ‘we slept well’ and its three padding positions. Without a valid length, the columns of padding have up to 0.27 in a cell in the rows of the three tokens. With a valid length of 3 they are zero, and each row sums to 1 over the three tokens."
from headnotes.plots import display_attention

maps = torch.stack([unmasked[1], masked[1]], dim=-1)
titles = ["no valid length", "valid length 3"]
_ = display_attention(words[1], words[1], maps, titles=titles)

# %% [markdown]
# With a valid length, the amount of padding no longer matters:

# %%
for count in (3, 100, 1000):
    weight, outputs = with_padding(count, torch.tensor([3]))
    change = (outputs - unpadded).abs().max()
    print(f"{count:4} padding positions: outputs change by {change:.0e}")
    assert weight == 0
    assert change < 1e-5

# %% [markdown]
# Padding positions still have queries, so they have attention weights (the lower rows
# of the maps) and outputs. These do no harm as long as no token attends to them in the
# next layer and the loss ignores them.
#
# ## Fully masked rows: an empty sequence
#
# A sequence may be empty. Its valid length is 0, and all of its scores are masked. The
# code of the book sets masked scores to $-10^6$ instead of $-\infty$. As long as one
# key is valid, the result is nearly always the same, since the difference to its score
# is so large that the weight underflows to 0. But if all four scores are $-10^6$, they
# are equal, and softmax depends only on differences:
#
# $$\frac{e^{-10^6}}{4 \cdot e^{-10^6}} = \frac{1}{4}$$
#
# So the empty sequence attends evenly to all of its padding. With $-\infty$ alone it is
# worse: the difference of two infinities is undefined, so the row is NaN, and so is
# everything that is computed from it. The [masked softmax of
# Headnotes](../source/implementations/valid_lens.md#masked_softmax) returns zeros for a
# fully masked row.

# %%
keep = torch.arange(4) < 0
infinite = scores.masked_fill(~keep, -math.inf).softmax(dim=0)
original = scores.masked_fill(~keep, -1e6).softmax(dim=0)
ours = masked_softmax(scores.view(1, 1, 4), torch.tensor([0])).flatten()
print("−∞ alone:     ", infinite)
print("the book:     ", original)
print("Headnotes:    ", ours)
assert infinite.isnan().all()
assert (original == 1 / 4).all()
assert (ours == 0).all()

# %% [markdown]
# In the whole layer, with one sequence of six tokens and an empty one, the outputs of
# the empty sequence are zero (this module has no biases), and every gradient is finite.

# %%
y = mha(x, x, x, torch.tensor([6, 0]))
y.sum().backward()
assert (y[0] != 0).all()
assert (y[1] == 0).all()
assert all(p.grad.isfinite().all() for p in mha.parameters())

# %% [markdown]
# ## Causal and padding mask combined
#
# Valid lengths may also differ by query: `[batch_size, q_len]` instead of
# `[batch_size]`. Lengths of 1, 2, 3, … are a causal mask: each token attends to itself
# and to the tokens before it. For a causal mask *and* a padding mask, a key must be
# allowed by both, so the smaller length counts.

# %%
causal = torch.arange(1, 7)  # [q_len]
both = torch.minimum(causal, valid_lens[:, None])  # [batch_size, q_len]
print(both)

mha(x, x, x, both)
causal_weights = mha.attention.attention_weights

# %% alt="Two heat maps of attention weights, for the six tokens of ‘rain fell on the old roof’ and for ‘we slept well’ with three padding positions. Above the diagonal both are zero, and in the second the three columns of padding are zero as well."
maps = causal_weights.movedim(0, -1)  # [q_len, k_len, batch_size]
titles = ["sentence 0", "sentence 1"]
figure = display_attention(words[0], words[0], maps, titles=titles)
figure.axes[1].set_xticklabels(words[1])
_ = figure.axes[1].set_yticklabels(words[1])

# %% [markdown]
# The same mask can be [built as a bool tensor](../source/masks/build.md). The [core
# module](../source/mha.md), which takes such masks and sequence-first inputs, then
# computes the same with the same weights:

# %%
from headnotes import convert, masks

core = convert.to(mha, "core")
mask = masks.combine(masks.causal(6), masks.padding(valid_lens, k_len=6))
assert torch.equal(mask, masks.padding(both, k_len=6))

seq_first = x.transpose(0, 1)
theirs = core(query=seq_first, key=seq_first, value=seq_first, mask=mask)
difference = (theirs.transpose(0, 1) - mha(x, x, x, both)).abs().max()
print(f"largest difference: {difference:.0e}")
assert difference < 1e-5

# %% [markdown]
# Valid lengths are small and cheap, but they can only describe *prefixes*. Padding in
# front, gaps in the middle, or a sliding window of the last five tokens need a mask (or
# a trick, which is the exercise below).
#
# ## Test a mask with inputs that differ
#
# How would you notice that a mask is wrong? The book runs its class on inputs of ones
# and checks the shape of the output. Here is that example with correct and with
# incorrect valid lengths, on ones and on random inputs:

# %%
torch.manual_seed(0)
attention = MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5).eval()
ones = torch.ones(2, 4, 100), torch.ones(2, 6, 100)
random = torch.randn(2, 4, 100), torch.randn(2, 6, 100)
correct = torch.tensor([3, 2])

rows = [["valid lengths", "shape", "change, ones", "change, random inputs"]]
for lens in ([3, 2], [2, 3], [1, 1], [6, 6], None):
    given = None if lens is None else torch.tensor(lens)
    changes = []
    for X, Y in (ones, random):
        output = attention(X, Y, Y, given)
        changes.append((output - attention(X, Y, Y, correct)).abs().max())
    rows.append([f"{lens}", f"{tuple(output.shape)}", *(f"{c:.1g}" for c in changes)])
    assert changes[0] < 1e-6
    assert lens == [3, 2] or changes[1] > 0.1
show(rows)

# %% [markdown]
# The last two columns show how much the outputs differ from those with the correct
# lengths, `[3, 2]`. With ones, no mask that leaves at least one key changes anything
# beyond rounding: all values are the same vector, and so is their weighted mean,
# whatever the weights are. Such an example tests shapes and nothing else. **Test
# attention with inputs that differ.**
#
# ## Flatten batch and heads
#
# So far one head was enough. With five heads, the attention function itself does not
# change: the heads are flattened into the batch, which becomes five times as large. Two
# sentences with five heads are ten independent attention problems, each a fifth as
# wide. To see which component goes where, we number the components by sentence,
# position and component:

# %%
sentence, position, component = torch.meshgrid(
    torch.arange(2), torch.arange(3), torch.arange(10), indexing="ij"
)
X = 100 * sentence + 10 * position + component
print("sentence 1:", X[1], sep="\n")

five = MultiHeadAttention(num_hiddens=10, num_heads=5, dropout=0)
flat = five.transpose_qkv(X)
print("[batch_size * num_heads, seq_len, d_k] =", list(flat.shape))
print("item 7:", flat[7], sep="\n")

# %% [markdown]
# Item 7 is sentence 1, head 2: components 4 and 5 of all its positions. In general,
# item `b * num_heads + i` is head `i` of sentence `b`, and `transpose_output` reverses
# the flattening: it concatenates the heads again.

# %%
for b in range(2):
    for i in range(5):
        assert torch.equal(flat[b * 5 + i], X[b, :, 2 * i : 2 * i + 2])
assert torch.equal(five.transpose_output(flat), X)

# %% [markdown]
# The valid lengths must be repeated in the same order. The first five items belong to
# sentence 0, so its length comes five times, then that of sentence 1. This is what
# `repeat_interleave` does. `repeat` returns ten lengths as well, but in another order:

# %%
lens = torch.tensor([3, 2])
interleaved = lens.repeat_interleave(5)
repeated = lens.repeat(5)
print("repeat_interleave:", interleaved.tolist())
print("repeat:           ", repeated.tolist())
print("items that differ:", (interleaved != repeated).nonzero().flatten().tolist())


# %% fold="Plotting code"
import matplotlib.pyplot as plt


def draw_items(lengths):
    """Which of six keys each item of the flattened batch may attend to."""
    _, axes = plt.subplots(1, len(lengths), figsize=(6.2, 3.5), sharey=True)
    for ax, (title, lens) in zip(axes, lengths.items(), strict=True):
        for item, length in enumerate(lens.tolist()):
            color = ["#2f86d6", "#d55e00"][item // 5]
            for key in range(6):
                style = {"alpha": 1 if key < length else 0.15, "linewidth": 0}
                ax.add_patch(
                    plt.Rectangle((key, item), 0.92, 0.86, color=color, **style)
                )
            for key in range(*sorted((length, interleaved[item].item()))):
                style = {"ha": "center", "va": "center", "size": 13}
                ax.text(key + 0.46, item + 0.45, "×", **style)
        ax.set(title=title, xlabel="key", xlim=(-0.2, 6), ylim=(10, -0.1))
        ax.set_xticks([key + 0.46 for key in range(6)], range(6))
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    labels = [f"item {n}: sentence {n // 5}, head {n % 5}" for n in range(10)]
    axes[0].set_yticks([n + 0.43 for n in range(10)], labels)
    plt.show()


# %% alt="Two grids of ten items by six keys. With repeat_interleave, items 0 to 4, which are sentence 0, may attend to three keys, items 5 to 9 to two. With repeat, key 2 is wrong in items 1, 3, 6 and 8."
draw_items({"repeat_interleave": interleaved, "repeat": repeated})

# %% [markdown]
# Each cross is a mistake: two heads of sentence 0 miss its last token, two heads of
# sentence 1 attend to padding. All shapes are right, so only the values show it. We
# measure them with the module and the random inputs from above:

# %%
X, Y = random
flatten_heads = attention.transpose_qkv
queries, keys = flatten_heads(attention.W_q(X)), flatten_heads(attention.W_k(Y))
values = flatten_heads(attention.W_v(Y))

outputs = []
for order in (interleaved, repeated):
    context = attention.attention(queries, keys, values, order)
    outputs.append(attention.W_o(attention.transpose_output(context)))

weights = attention.attention.attention_weights.view(2, 5, 4, 6)  # of `repeat`
on_padding = weights[1, :, :, 2:].sum(dim=-1).mean(dim=-1)
change = (outputs[1] - outputs[0]).abs().amax(dim=(1, 2))
print("sentence 1, weight on padding by head:", *(f"{w:.0%}" for w in on_padding))
print("change of the outputs by sentence:    ", *(f"{m:.2f}" for m in change))
assert (on_padding > 0).tolist() == [False, True, False, True, False]
assert (change > 0.1).all()
assert torch.allclose(outputs[0], attention(X, Y, Y, correct), atol=1e-6)

# %% [markdown]
# ## What more heads cost: FLOPs and memory
#
# With more heads, each head is narrower. For $H$ heads of width $D/H$ and $L$ tokens,
# the products of queries and keys take $H \cdot 2 L^2 \cdot D/H$ operations, in which
# $H$ cancels. The products with the values take as many, and the four linear maps do
# not depend on the number of heads:
#
# $$4 \cdot 2 L D^2 + 2 \cdot 2 L^2 D$$
#
# For $L = 64$ and $D = 128$ this is 10,485,760. But each head has $L^2$ attention
# weights of its own, which are stored for the backward pass. So their memory grows with
# $H L^2$, and with it the work of the softmax, which is not a matrix product. PyTorch
# counts both:

# %%
from torch.utils.flop_counter import FlopCounterMode


def cost(heads, length=64, width=128):
    """Operations in matrix products, and bytes of the attention weights."""
    with torch.device("meta"):  # tensors with shapes, but without data
        mha = MultiHeadAttention(width, heads, dropout=0).eval()
        x = torch.empty(1, length, width)
    mha(x, x, x, None)  # the first call sets the sizes of the lazy layers
    with FlopCounterMode(display=False) as counter:
        mha(x, x, x, None)
    return counter.get_total_flops(), mha.attention.attention_weights.nbytes


for heads in (1, 2, 8):
    flops, size = cost(heads)
    print(f"heads: {heads}, operations: {flops:,}, bytes of weights: {size:,}")
    assert flops == 4 * 2 * 64 * 128**2 + 2 * 2 * 64**2 * 128 == 10_485_760
    assert size == heads * 64**2 * 4

# %% fold="Plotting code"
heads = [2**n for n in range(8)]
flops, sizes = zip(*(cost(h) for h in heads), strict=True)
_, axes = plt.subplots(1, 2, figsize=(6.2, 2.6))
axes[0].loglog(heads, flops, "o-", color="#2f86d6", base=2)
axes[1].loglog(heads, sizes, "o-", color="#d55e00", base=2)
axes[0].set(title="operations", ylim=(1e6, 1e8))
axes[1].set(title="memory of the weights")
axes[0].set_yticks([1e6, 10_485_760, 1e8], ["1 M", "10.5 M", "100 M"])
axes[1].set_yticks([2**14, 2**17, 2**21], ["16 KiB", "128 KiB", "2 MiB"])
for ax in axes:
    ax.set_xlabel("heads")
    ax.set_xticks(heads, heads)
plt.close()

# %% hide="true" alt="Two panels over 1 to 128 heads, on logarithmic axes. The number of operations is constant at 10.5 million. The memory of the attention weights is a straight line from 16 KiB up to 2 MiB."
display(axes[0].figure)

# %% [markdown]
# At the size of a lesson this is little memory. At the size of a real model it is not:

# %%
flops, size = cost(heads=8, length=4096, width=512)
print(f"8 heads, 4096 tokens: {size / 2**20:.0f} MiB per sequence and layer")
assert size == 512 * 2**20

# %% [markdown]
# (Fused kernels avoid it by never storing the whole table of weights; see [the
# profiling lesson](10_profiling_the_reference_implementation.md).)
#
# ## Try it: padding in front (left padding)
#
# Generation with decoder-only models usually pads in *front*, so that all sequences of
# a batch end together. Valid lengths cannot describe this, and this module accepts
# nothing else. It can still compute attention under the mask below, without a change to
# its code. How?

# %%
may_attend = torch.tensor(
    [
        [True, True, True, True, True, True],
        [False, False, False, True, True, True],
    ]
)


# %% fold="Answer"
def attend_by_lengths(x, may_attend):
    """Self-attention under a mask [batch_size, k_len], by valid lengths."""
    # The order of the keys does not matter if the values are in the same order.
    # So move the allowed ones to the front, and count them.
    order = may_attend.int().argsort(dim=1, descending=True)
    memory = torch.take_along_dim(x, order[..., None], dim=1)
    return mha(x, memory, memory, may_attend.sum(dim=1))


def attend_by_mask(x, may_attend):
    """The same in the core module, by a mask."""
    x = x.transpose(0, 1)
    y = core(query=x, key=x, value=x, mask=may_attend.T[None])
    return y.transpose(0, 1)


gaps = torch.tensor([[1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1]]).bool()
for mask in (may_attend, gaps):
    ours, theirs = attend_by_lengths(x, mask), attend_by_mask(x, mask)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.allclose(ours, mha(x, x, x, None), atol=0.1)
print("equal for padding in front, and for gaps")

# This does not work if the mask differs by query, as a sliding window does: each
# query would need the keys in an order of its own.

# %% [markdown]
# ## In short
#
# - Without a padding mask, tokens attend to padding, and the output of a sequence
#   depends on the length of the longest one in its batch. No error is raised.
# - A padding mask sets the scores of padding to $-\infty$ before the softmax. Valid
#   lengths describe it if padding is at the end; other masks need a bool tensor.
# - A fully masked row needs a rule of its own: $-\infty$ alone gives NaN, a large
#   negative number gives even weights, Headnotes gives zeros.
# - Flattening heads into the batch needs `repeat_interleave` for the valid lengths.
# - Test masks with inputs that differ.
# - The number of heads does not change the FLOPs of the matrix products; the memory of
#   the attention weights grows with it.
#
# Next: in [cross-attention](07_cross_attention.md), queries and keys come from
# different sequences, each with its own length.
