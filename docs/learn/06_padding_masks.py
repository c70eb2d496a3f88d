# %% [markdown]
# # Sentences of different lengths
#
# A batch is a rectangle of numbers; sentences are not all equally long. So the short
# ones are filled up, and what fills them means nothing. What happens if it is read all
# the same? And how do we say, in one integer a sentence, that it must not be?
#
# The attention of this lesson is that of
# [Dive into Deep Learning](https://d2l.ai/chapter_attention-mechanisms-and-transformers/multihead-attention.html),
# [annotated here](../source/implementations/valid_lens.md). It lies batch first, takes
# lengths where others take masks, and folds its heads into the batch.

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
tokens = tokens.T  # batch first: a sentence is a row
print(tokens)
print("valid lengths:", valid_lens)

# %% [markdown]
# Number 0 is the filler, written `<pad>`. To the model it is a word like any other: it
# has a row in the table of vectors, and so it has a key to be compared with, and a value
# to be read. (The table and all weights are random here: nothing has been trained. Nor
# are positions added, so all filler is alike.)

# %%
torch.manual_seed(4)
x = Embeddings(len(vocabulary), d_model=8)(tokens).detach()
print("[batch_size, seq_len, d_model] =", list(x.shape))

mha = MultiHeadAttention(num_hiddens=8, num_heads=1, dropout=0).eval()
y = mha(x, x, x, None)  # None: every word reads everything
unmasked = mha.attention.attention_weights
print("[batch_size, q_len, k_len] =", list(unmasked.shape))

# %% [markdown]
# ## What filler does
#
# The second sentence has three words, and three of filler. How much of what its words
# read is filler?

# %%
words = [vocabulary.decode(row) for row in tokens]
for word, row in zip(words[1][:3], unmasked[1, :3], strict=True):
    print(f"{word:5} reads {row[3:].sum():.0%} filler")

# %% [markdown]
# This is not a matter of three more or less. How much filler there is depends on the
# *longest* sentence of the batch, on a stranger. So let us put ours beside ever longer
# strangers, and compare its outputs with those it has alone:


# %%
def with_filler(count, lens=None):
    """Mean weight on filler, and the outputs, of three words before filler."""
    filler = x[1:, 3:4].expand(-1, count, -1)
    padded = torch.cat([x[1:, :3], filler], dim=1)
    outputs = mha(padded, padded, padded, lens)[0, :3].detach()
    weights = mha.attention.attention_weights[0, :3]
    return weights[:, 3:].sum(dim=-1).mean(), outputs


# %% fold="How the table is made"
def show(rows):
    """Show rows of text as a table; the first is its head."""
    lines = ["|".join(row) for row in rows]
    lines.insert(1, "|".join("---:" for _ in rows[0]))
    display(Markdown("\n".join(f"|{line}|" for line in lines)))


_, alone = with_filler(0)
rows = [["filler", "weight on filler", "outputs move by", "words differ by"]]
for count in (0, 1, 3, 10, 100, 1000):
    weight, outputs = with_filler(count)
    moved = (outputs - alone).abs().max()
    apart = (outputs - outputs.roll(1, dims=0)).abs().max()
    rows.append([f"{count}", f"{weight:.2f}", f"{moved:.2f}", f"{apart:.2f}"])

# %% hide="true"
show(rows)

# %% [markdown]
# (Differences are the largest of any component.) The words drown. In the end all that
# *we*, *slept* and *well* read is the value of the filler, and they can hardly be told
# apart. No error was raised on the way, and the shapes are right.

# %%
weight, drowned = with_filler(1000)
value_of_filler = mha.W_o(mha.W_v(x[1, 3]))
assert weight > 0.99
assert torch.allclose(drowned, value_of_filler.expand(3, -1), atol=0.1)

# %% [markdown]
# ## One integer a sentence
#
# Filler stands at the end, always. So it is enough to know how many of the keys, from
# the first on, may be read: the *valid length*. Here it is at work on one row of four
# scores, of which two are valid. The largest score belongs to filler, on purpose.

# %%
scores = torch.tensor([1.0, 3.0, 2.0, 4.0])
valid_len = 2

keep = torch.arange(4) < valid_len
filled = scores.masked_fill(~keep, -math.inf)
powers = (filled - filled.max()).exp()
weights = powers / powers.sum()
print("keep:   ", keep)
print("filled: ", filled)
print("powers: ", powers, "sum:", f"{powers.sum():.4f}")
print("weights:", weights)

# %% [markdown]
# Positions are compared with the length, filler gets a score of $-\infty$, and
# $e^{-\infty} = 0$: it has no part in the sum, so the two words share all there is. They
# share it as if the other two did not exist. (Why not set *weights* to zero afterwards?
# That is told in [looking only backwards](03_causal_self_attention.md).)

# %%
assert torch.allclose(weights[:2], scores[:2].softmax(dim=0))
batch = scores.expand(2, 1, 4)  # [batch_size, q_len, k_len]
rows = masked_softmax(batch, torch.tensor([2, 4])).squeeze(1)
print(rows)
assert torch.allclose(rows[0], weights)

# %% [markdown]
# Now for our sentences. The long one has no filler, and its length of 6 changes nothing.
# In the short one the columns of the filler go dark, and its words have all their
# attention for themselves.

# %%
mha(x, x, x, valid_lens)
masked = mha.attention.attention_weights
assert torch.equal(masked[0], unmasked[0])
assert (masked[1, :, 3:] == 0).all()

# %% alt="Two maps of what ‘we slept well’ and its three of filler read. Without a length, the columns of filler hold up to 0.27 a cell in the rows of the words. With a length of 3 they are zero, and the words hold everything."
from headnotes.plots import display_attention

maps = torch.stack([unmasked[1], masked[1]], dim=-1)
titles = ["no length", "valid length 3"]
_ = display_attention(words[1], words[1], maps, titles=titles)

# %% [markdown]
# And the strangers? However long they are, they no longer matter:

# %%
for count in (3, 100, 1000):
    weight, outputs = with_filler(count, torch.tensor([3]))
    moved = (outputs - alone).abs().max()
    print(f"{count:4} of filler: outputs move by {moved:.0e}")
    assert weight == 0
    assert moved < 1e-5

# %% [markdown]
# Filler still *asks*, in the lower rows of the maps, and gets answers. They do no harm:
# nobody reads them, as long as the loss leaves them out as well.
#
# ## Nothing to read
#
# What if a sentence is empty? Its length is 0, and all of its scores are filled. The
# original fills them with $-10^6$ instead of $-\infty$, which most often makes no
# difference, for $e^{-10^6}$ is zero in every float. But if all four scores become
# $-10^6$, they are equal, and softmax knows only differences:
#
# $$\frac{e^{-10^6}}{4 \cdot e^{-10^6}} = \frac{1}{4}$$
#
# So the empty sentence reads all of its filler, evenly. With $-\infty$ alone it is worse:
# between infinities there is no difference at all, and the row is NaN, as is whatever is
# made of it. The [softmax of this house](../source/implementations/valid_lens.md) gives
# such a row zeros: who may read nothing reads nothing.

# %%
keep = torch.arange(4) < 0
infinite = scores.masked_fill(~keep, -math.inf).softmax(dim=0)
original = scores.masked_fill(~keep, -1e6).softmax(dim=0)
ours = masked_softmax(scores.view(1, 1, 4), torch.tensor([0])).flatten()
print("−∞ alone:     ", infinite)
print("the original: ", original)
print("ours:         ", ours)
assert infinite.isnan().all()
assert (original == 1 / 4).all()
assert (ours == 0).all()

# %% [markdown]
# The whole layer, for one sentence of six words and one of none: what comes out for the
# empty one is zero, as there are no biases here, and every gradient is finite.

# %%
y = mha(x, x, x, torch.tensor([6, 0]))
y.sum().backward()
assert (y[0] != 0).all()
assert (y[1] == 0).all()
assert all(p.grad.isfinite().all() for p in mha.parameters())

# %% [markdown]
# ## One integer a word
#
# Lengths may differ by query, too: `[batch_size, q_len]` in place of `[batch_size]`. And
# lengths of 1, 2, 3, … are a causal mask: each word reads itself and what stands before.
# To look backwards *and* keep off the filler, both must allow it, so the smaller length
# counts.

# %%
causal = torch.arange(1, 7)  # [q_len]
both = torch.minimum(causal, valid_lens[:, None])  # [batch_size, q_len]
print(both)

mha(x, x, x, both)
backwards = mha.attention.attention_weights

# %% alt="Two maps, of the six words of ‘rain fell on the old roof’ and of ‘we slept well’ followed by three of filler. Above the diagonal both are zero, and in the second so are the three columns of filler."
maps = backwards.movedim(0, -1)  # [q_len, k_len, batch_size]
titles = ["sentence 0", "sentence 1"]
figure = display_attention(words[0], words[0], maps, titles=titles)
figure.axes[1].set_xticklabels(words[1])
_ = figure.axes[1].set_yticklabels(words[1])

# %% [markdown]
# This is the same that [masks](../source/masks/build.md) say, and the
# [core page](../source/mha.md) computes with the same weights. It takes its data
# sequence first:

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
# A length is small and cheap, but it can only say *prefixes*. Filler in front, a hole in
# the middle, a window of the last five words: for these you need a mask. (Or a trick,
# which is the exercise.)
#
# ## An example that cannot fail
#
# How would you notice that a mask is wrong? The book tries its class on inputs of ones,
# and looks at the shape of what comes out. Let us do so with lengths that are right, and
# with some that are not, and then once more with inputs that differ.

# %%
torch.manual_seed(0)
attention = MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5).eval()
ones = torch.ones(2, 4, 100), torch.ones(2, 6, 100)
random = torch.randn(2, 4, 100), torch.randn(2, 6, 100)
right = torch.tensor([3, 2])

rows = [["lengths", "shape", "ones: output moves by", "random: moves by"]]
for lens in ([3, 2], [2, 3], [1, 1], [6, 6], None):
    tried = None if lens is None else torch.tensor(lens)
    moved = []
    for X, Y in (ones, random):
        output = attention(X, Y, Y, tried)
        moved.append((output - attention(X, Y, Y, right)).abs().max())
    moves = [f"{m:.1g}" for m in moved]
    rows.append([f"{lens}", f"{tuple(output.shape)}", *moves])
    assert moved[0] < 1e-6
    assert lens == [3, 2] or moved[1] > 0.1
show(rows)

# %% [markdown]
# With ones, no mask that leaves something to read can change anything beyond rounding.
# All values are the same vector, and a mean of the same is the same, whatever the
# weights. Such an example tests shapes, and nothing else. **Try attention on inputs that
# differ**, or it will tell you that all is well.
#
# ## Heads, folded into the batch
#
# All of this can be said of one head. For five, attention itself does not change: the
# batch becomes five times as large. Two sentences and five heads are ten problems that
# know nothing of each other, each a fifth as wide. To see what goes where, we give each
# entry a number that says where it comes from: sentence, position, component.

# %%
sentence, position, component = torch.meshgrid(
    torch.arange(2), torch.arange(3), torch.arange(10), indexing="ij"
)
X = 100 * sentence + 10 * position + component
print("sentence 1:", X[1], sep="\n")

five = MultiHeadAttention(num_hiddens=10, num_heads=5, dropout=0)
folded = five.transpose_qkv(X)
print("[batch_size * num_heads, seq_len, d_k] =", list(folded.shape))
print("row 7:", folded[7], sep="\n")

# %% [markdown]
# Row 7 is sentence 1, head 2: components 4 and 5 of all its positions. In general, row
# `b * num_heads + i` is head `i` of sentence `b`, and `transpose_output` lays the heads
# side by side again.

# %%
for b in range(2):
    for i in range(5):
        assert torch.equal(folded[b * 5 + i], X[b, :, 2 * i : 2 * i + 2])
assert torch.equal(five.transpose_output(folded), X)

# %% [markdown]
# The lengths must follow. Sentence 0 fills the first five rows, so its length comes five
# times, then that of sentence 1. This is `repeat_interleave`. Plain `repeat` makes ten
# numbers as well, but in another order:

# %%
lens = torch.tensor([3, 2])
proper = lens.repeat_interleave(5)
mixed = lens.repeat(5)
print("repeat_interleave:", proper.tolist())
print("repeat:           ", mixed.tolist())
print("rows that differ: ", (proper != mixed).nonzero().flatten().tolist())


# %% fold="How the rows are drawn"
import matplotlib.pyplot as plt


def draw_rows(lengths):
    """Which of six keys each row of the folded batch may read."""
    _, axes = plt.subplots(1, len(lengths), figsize=(6.2, 3.5), sharey=True)
    for ax, (title, lens) in zip(axes, lengths.items(), strict=True):
        for row, length in enumerate(lens.tolist()):
            color = ["#2f86d6", "#d55e00"][row // 5]
            for key in range(6):
                style = {"alpha": 1 if key < length else 0.15, "linewidth": 0}
                ax.add_patch(
                    plt.Rectangle((key, row), 0.92, 0.86, color=color, **style)
                )
            for key in range(*sorted((length, proper[row].item()))):
                style = {"ha": "center", "va": "center", "size": 13}
                ax.text(key + 0.46, row + 0.45, "×", **style)
        ax.set(title=title, xlabel="key", xlim=(-0.2, 6), ylim=(10, -0.1))
        ax.set_xticks([key + 0.46 for key in range(6)], range(6))
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    labels = [f"row {r}: sentence {r // 5}, head {r % 5}" for r in range(10)]
    axes[0].set_yticks([r + 0.43 for r in range(10)], labels)
    plt.show()


# %% alt="Two grids of ten rows by six keys. With repeat_interleave, rows 0 to 4, which are sentence 0, may read three keys, rows 5 to 9 two. With repeat, key 2 is wrong in rows 1, 3, 6 and 8."
draw_rows({"repeat_interleave": proper, "repeat": mixed})

# %% [markdown]
# Each cross is a mistake: two heads of sentence 0 miss its last word, two heads of
# sentence 1 read filler. No shape gives it away, so we measure, with the class and the
# random inputs from above:

# %%
X, Y = random
fold = attention.transpose_qkv
queries, keys = fold(attention.W_q(X)), fold(attention.W_k(Y))
values = fold(attention.W_v(Y))

outputs = []
for order in (proper, mixed):
    context = attention.attention(queries, keys, values, order)
    outputs.append(attention.W_o(attention.transpose_output(context)))

weights = attention.attention.attention_weights.view(2, 5, 4, 6)  # of the last
on_filler = weights[1, :, :, 2:].sum(dim=-1).mean(dim=-1)
moved = (outputs[1] - outputs[0]).abs().amax(dim=(1, 2))
print("sentence 1, filler by head:", *(f"{w:.0%}" for w in on_filler))
print("sentences 0 and 1 move by: ", *(f"{m:.2f}" for m in moved))
assert (on_filler > 0).tolist() == [False, True, False, True, False]
assert (moved > 0.1).all()
assert torch.allclose(outputs[0], attention(X, Y, Y, right), atol=1e-6)

# %% [markdown]
# ## What more heads cost
#
# More heads are narrower heads. With $H$ heads of width $D/H$, over $L$ words, all
# products of queries with keys take $H \cdot 2 L^2 \cdot D/H$ operations, where $H$
# cancels. The products with the values take as many, and the four linear maps know
# nothing of heads:
#
# $$4 \cdot 2 L D^2 + 2 \cdot 2 L^2 D$$
#
# For $L = 64$ and $D = 128$ this is 10,485,760. But each head has a map of weights of
# its own, $L^2$ numbers, which training keeps for the way back. So memory grows with
# $H L^2$, and with it the work of the softmax, which is no matrix product. Let PyTorch
# count:

# %%
from torch.utils.flop_counter import FlopCounterMode


def cost(heads, length=64, width=128):
    """Operations in matrix products, and bytes of the attention weights."""
    with torch.device("meta"):  # shapes without numbers: nothing is computed
        mha = MultiHeadAttention(width, heads, dropout=0).eval()
        x = torch.empty(1, length, width)
    mha(x, x, x, None)  # the lazy layers learn their widths
    with FlopCounterMode(display=False) as counter:
        mha(x, x, x, None)
    return counter.get_total_flops(), mha.attention.attention_weights.nbytes


for heads in (1, 2, 8):
    flops, size = cost(heads)
    print(f"heads: {heads}, operations: {flops:,}, bytes of weights: {size:,}")
    assert flops == 4 * 2 * 64 * 128**2 + 2 * 2 * 64**2 * 128 == 10_485_760
    assert size == heads * 64**2 * 4

# %% fold="How the curves are drawn"
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

# %% hide="true" alt="Two panels over 1 to 128 heads, on logarithmic axes. Operations stay level at 10.5 million. The memory of the weights is a straight line from 16 KiB up to 2 MiB."
display(axes[0].figure)

# %% [markdown]
# In a lesson that is little. At the size of a real model it no longer is:

# %%
flops, size = cost(heads=8, length=4096, width=512)
print(f"8 heads, 4096 words: {size / 2**20:.0f} MiB a sentence and layer")
assert size == 512 * 2**20

# %% [markdown]
# The same computation without any folding, each axis under its own name, is
# [the next lesson](08_sequence_first_with_einsum.md).
#
# ## Try it
#
# Some libraries put filler in *front*, so that all sentences end together. A valid
# length cannot say that, and this attention takes nothing else. Still it can be made to
# obey the mask below, without a change to its code. How?

# %%
may_read = torch.tensor(
    [
        [True, True, True, True, True, True],
        [False, False, False, True, True, True],
    ]
)


# %% fold="A solution"
def read_by_mask(x, may_read):
    """Self-attention under a mask [batch_size, k_len], said by lengths."""
    # Attention knows no order: keys may change places if their values come
    # along. So those that may be read go to the front, and are counted.
    order = may_read.int().argsort(dim=1, descending=True)
    memory = torch.take_along_dim(x, order[..., None], dim=1)
    return mha(x, memory, memory, may_read.sum(dim=1))


def read_by_core(x, may_read):
    """The same, said by a mask to the core."""
    x = x.transpose(0, 1)
    y = core(query=x, key=x, value=x, mask=may_read.T[None])
    return y.transpose(0, 1)


holes = torch.tensor([[1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1]]).bool()
for mask in (may_read, holes):
    ours, theirs = read_by_mask(x, mask), read_by_core(x, mask)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.allclose(ours, mha(x, x, x, None), atol=0.1)
print("filler in front, and even holes")

# It ends where queries have masks of their own, such as a window: each would
# need the keys in an order of its own.
