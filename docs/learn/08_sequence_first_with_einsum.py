# %% [markdown]
# # Sequence-first attention with einsum
#
# Most implementations of multi-head attention keep their axes apart by views and
# transposes, and readers have to remember what each axis means. With `einsum`, every
# axis has a letter instead. The first half of this lesson derives the [core
# module](../source/mha.md) from plain loops, one step at a time; each step is asserted
# to equal the one before. The second half trains it on a lookup task and tracks its
# attention weights with labml. You need [multi-head
# attention](04_multi_head_attention.md) and training loops in PyTorch. Reading time: 25
# minutes.
#
# ## One letter per axis
#
# | letter | axis | size here |
# |:---:|---|---:|
# | `i` | query position | 3 |
# | `j` | key position | 5 |
# | `b` | batch item | 2 |
# | `h` | head | 7 |
# | `d` | component within a head | 11 |
#
# The sizes are distinct primes, so that swapped axes cannot go unnoticed. The position
# is the first axis, hence *sequence first*.

# %%
import torch

torch.manual_seed(7)
q_len, k_len, batch_size, heads, d_k = 3, 5, 2, 7, 11
query = torch.randn(q_len, batch_size, heads, d_k)  # [i, b, h, d]
key = torch.randn(k_len, batch_size, heads, d_k)  # [j, b, h, d]
value = torch.randn(k_len, batch_size, heads, d_k)  # [j, b, h, d]

# %% [markdown]
# ## Attention scores: from loops to einsum
#
# The scores are the dot products of every query with every key of the same batch item
# and the same head. With one loop per letter:

# %%
loops = torch.zeros(q_len, k_len, batch_size, heads)  # [i, j, b, h]
for i in range(q_len):
    for j in range(k_len):
        for b in range(batch_size):
            for h in range(heads):
                for d in range(d_k):
                    product = query[i, b, h, d] * key[j, b, h, d]
                    loops[i, j, b, h] += product

# %% [markdown]
# The innermost loop, over `d`, is a dot product:

# %%
dots = torch.zeros_like(loops)
for i in range(q_len):
    for j in range(k_len):
        for b in range(batch_size):
            for h in range(heads):
                dots[i, j, b, h] = query[i, b, h] @ key[j, b, h]
assert torch.allclose(dots, loops, atol=1e-5)

# %% [markdown]
# All dot products of the rows of two matrices are one matrix product, which replaces
# the loops over `i` and `j`:

# %%
products = torch.zeros_like(loops)
for b in range(batch_size):
    for h in range(heads):
        products[:, :, b, h] = query[:, b, h] @ key[:, b, h].T
assert torch.allclose(products, loops, atol=1e-5)

# %% [markdown]
# The two remaining loops and everything inside them are one call of `einsum`. Its
# equation names the axes of the two inputs and of the output:

# %%
scores = torch.einsum("ibhd,jbhd->ijbh", query, key)
assert torch.allclose(scores, loops, atol=1e-5)
print("[i, j, b, h] =", list(scores.shape))

# %% [markdown]
# How to read the equation:
#
# - `d` is missing in the output, so it is **summed over**.
# - `i` and `j` occur in one input each, so the output contains **all pairs** of them.
# - `b` and `h` occur in both inputs and in the output, so they are **batch
#   dimensions**: nothing is mixed between batch items or between heads.
#
# This line is [`get_scores`](../source/mha.md#MultiHeadAttention.get_scores) of the
# core module.
#
# ## Memory layout: strides of an einsum result
#
# We did not transpose any tensor. What `einsum` did internally shows in the strides of
# its result: the distance in memory between two neighbors along an axis.

# %%
for dim, letter in enumerate("ijbh"):
    size, stride = scores.shape[dim], scores.stride(dim)
    print(f"{letter}: size {size}, stride {stride:3}")
assert not scores.is_contiguous()
assert scores.permute(2, 3, 0, 1).is_contiguous()
assert scores.flatten().data_ptr() != scores.data_ptr()  # a copy

# %% [markdown]
# From the largest stride to the smallest, the order in memory is `b`, `h`, `i`, `j`:
# fourteen contiguous matrices of 3 × 5, which are the fourteen matrix products of the
# last loops. Batch-first code has the same layout in memory. The tensor that `einsum`
# returns is a permuted view of it. This has one consequence: `flatten` has to copy such
# a tensor.
#
# ## Scale by the square root of d_k
#
# A score is a sum of `d_k` products. If the components are independent with mean 0 and
# variance 1, the score has variance `d_k`. Dividing by $\sqrt{d_k}$ restores a variance
# of 1, so that the softmax does not saturate; [Embeddings and positional
# encoding](05_embeddings_and_positional_encoding.md) shows it in figures. (The core
# module scales the queries instead of the scores. The result is the same up to
# rounding, and products in half precision overflow later.)

# %%
print(f"standard deviation {scores.std():.2f}, √d_k {d_k**0.5:.2f}")
assert 0.8 < scores.std() / d_k**0.5 < 1.25
scores = scores / d_k**0.5
print(f"after scaling {scores.std():.2f}")

# %% [markdown]
# ## Softmax over the keys (dim=1), not over dim=-1
#
# Each query distributes a total weight of 1 over the keys, so the weights must sum to 1
# over `j`, which is axis 1 here. Softmax accepts any of the four axes and returns the
# same shape without an error. For each axis, we print the sums over the keys, and check
# whether the weights of the first query in the first batch item and head are the same
# as if they were computed alone:


# %%
def first_row(x):
    """The first query, of the first batch item, in the first head."""
    return x[:1, :, :1, :1]


same_as_alone = {}
for dim, letter in enumerate("ijbh"):
    weights = scores.softmax(dim=dim)
    low, high = weights.sum(dim=1).aminmax()
    same = torch.allclose(first_row(weights), first_row(scores).softmax(dim=dim))
    print(f"over {letter}: sums {low:.2f} to {high:.2f}, same as alone: {same}")
    same_as_alone[letter] = same
assert same_as_alone == {"i": False, "j": True, "b": False, "h": False}

# %% [markdown]
# Over `i`, each *key* distributes a total weight of 1 over the queries: the weights of
# a query depend on the other queries, which in a language model include future tokens.
# Over `b`, unrelated sequences of the same batch compete for weight; over `h`, heads
# do.
#
# The most likely mistake is `dim=-1`. It is right in batch-first code, where the keys
# are the last axis. Here the last axis is `h`.

# %%
weights = scores.softmax(dim=1)  # [i, j, b, h]
assert torch.allclose(weights.sum(dim=1), torch.ones(q_len, batch_size, heads))

# %% [markdown]
# ## Context vectors: the weighted sum of the values
#
# The context vector of a query is the sum of the values, each multiplied by its
# attention weight. In the equation, `j` is missing in the output, so the keys are
# summed over.

# %%
loops = torch.zeros(q_len, batch_size, heads, d_k)  # [i, b, h, d]
for i in range(q_len):
    for b in range(batch_size):
        for h in range(heads):
            for j in range(k_len):
                loops[i, b, h] += weights[i, j, b, h] * value[j, b, h]

context = torch.einsum("ijbh,jbhd->ibhd", weights, value)  # [i, b, h, d]
assert torch.allclose(context, loops, atol=1e-5)

# %% [markdown]
# ## Multi-head attention in einsum notation
#
# The projections are sums of products as well. Let `m` be the axis of the input vectors
# (`d_model`) and `n` that of the output vectors. The weight of a linear layer, viewed
# as `[h, d, m]`, consists of one small matrix per head. This is all of multi-head
# attention:


# %%
def attend(mha, query, key, value):
    """Multi-head attention with the weights of `mha`, in einsum notation."""

    def project(x, linear):  # [seq_len, b, h, d]
        weight = linear.weight.view(mha.heads, mha.d_k, -1)  # [h, d, m]
        bias = linear.bias.view(mha.heads, mha.d_k)  # [h, d]
        return torch.einsum("ibm,hdm->ibhd", x, weight) + bias

    query = project(query, mha.query.linear)
    key = project(key, mha.key.linear)
    value = project(value, mha.value.linear)

    scores = torch.einsum("ibhd,jbhd->ijbh", query * mha.scale, key)
    weights = scores.softmax(dim=1)
    context = torch.einsum("ijbh,jbhd->ibhd", weights, value)

    weight = mha.output.weight.view(-1, mha.heads, mha.d_k)  # [n, h, d]
    output = torch.einsum("ibhd,nhd->ibn", context, weight)
    return output + mha.output.bias, weights


# %% [markdown]
# The core module gives the same with the same weights. (The inputs are multiplied by 3,
# so that the attention weights are far from even and a mistake would show.)

# %%
from headnotes import MultiHeadAttention

d_model = heads * d_k
mha = MultiHeadAttention(heads=heads, d_model=d_model).eval()
x = 3 * torch.randn(q_len, batch_size, d_model)  # [i, b, m]
memory = 3 * torch.randn(k_len, batch_size, d_model)  # [j, b, m]

output, weights = attend(mha, query=x, key=memory, value=memory)
core = mha(query=x, key=memory, value=memory)
assert torch.allclose(output, core, atol=1e-5)
assert torch.allclose(weights, mha.attn, atol=1e-5)
print(f"largest weight: {weights.max():.2f}, mean: {weights.mean():.2f}")
print("the outputs and weights equal those of the core module")

# %% [markdown]
# On the annotated page of the core module, these are [the split into
# heads](../source/mha.md#PrepareForMultiHeadAttention.forward), [the
# scores](../source/mha.md#MultiHeadAttention.get_scores), [the softmax over
# `j`](../source/mha.md#masked_softmax), [the weighted
# sum](../source/mha.md#MultiHeadAttention.apply_weights) and [the output
# projection](../source/mha.md#MultiHeadAttention.forward), which is written there as
# `flatten` and a linear layer. The core module also has masks, dropout and input
# checks.
#
# ## Common mistake: batch-first input
#
# One mistake cannot be detected by any input check. Five sequences of three tokens are
# passed batch first, the layout of most libraries, to a sequence-first module:

# %%
sequences = 3 * torch.randn(5, 3, d_model)  # batch first: [b, i, m]
output = mha(query=sequences, key=sequences, value=sequences)
print("input:  ", list(sequences.shape))
print("output: ", list(output.shape))
print("weights:", list(mha.attn.shape))

# %% [markdown]
# There is no error, and the output has the expected shape. Only the weights show the
# mistake: they are 5 × 5. The module takes the five *sequences* for positions, so they
# attend to each other, and the tokens of a sequence do not. A test that changes one
# input and looks at one output finds it. It works for any attention module:


# %%
def self_attention(x):
    return mha(query=x, key=x, value=x)


def transposed(x):
    return self_attention(x.transpose(0, 1)).transpose(0, 1)


def affects(attention, sequence, token):
    """Does changing this token change the first output of the first sequence?"""
    changed = sequences.clone()
    changed[sequence, token] += 1
    before, after = attention(sequences)[0, 0], attention(changed)[0, 0]
    return not torch.allclose(before, after, atol=1e-5)


for name, attention in (("batch first", self_attention), ("transposed", transposed)):
    print(f"{name}:")
    print("  affected by its own sequence:", affects(attention, sequence=0, token=1))
    print("  affected by another sequence:", affects(attention, sequence=1, token=0))
assert not affects(self_attention, sequence=0, token=1)
assert affects(self_attention, sequence=1, token=0)
assert affects(transposed, sequence=0, token=1)
assert not affects(transposed, sequence=1, token=0)

# %% [markdown]
# The solution, `transpose(0, 1)`, is a view and costs nothing. A mask reveals the
# mistake if batch size and sequence length differ, since it must have one row per
# query:

# %%
from textwrap import fill

from headnotes import masks

try:
    mha(query=sequences, key=sequences, value=sequences, mask=masks.causal(3))
except ValueError as error:
    print(fill(str(error), 72))
else:
    raise AssertionError("a mask of the wrong size was accepted")

# %% [markdown]
# ## Train attention on a lookup task
#
# So far all weights were random. What do attention weights look like after training? We
# use a small task that needs attention, known as associative recall: seven cards have a
# letter and a digit each. Then come five questions, each a letter; the answer is the
# digit on the card with this letter.
#
# To answer, a head must find the card by its letter (query and key) and return its
# digit (value). The loss depends on the digits only: which card is the right one is
# never given to the model.


# %%
from torch import nn
from torch.nn.functional import cross_entropy

letter_names = "abcdefghijklmnopqrstuvwxyz"
cards, questions = 7, 5  # k_len and q_len


def sample(batch_size):
    """Letters and digits of the cards, and the index of the card of each question."""
    shuffled = torch.rand(26, batch_size).argsort(dim=0)
    letters = shuffled[:cards]  # [j, b], all different
    digits = torch.randint(10, (cards, batch_size))  # [j, b]
    right = torch.rand(cards, batch_size).argsort(dim=0)[:questions]  # [i, b]
    return letters, digits, right


class Lookup(nn.Module):
    """One attention layer between embeddings and a classifier of ten digits."""

    def __init__(self, attention=MultiHeadAttention, d_model=16):
        super().__init__()
        self.letter = nn.Embedding(26, d_model)
        self.digit = nn.Embedding(10, d_model)
        self.mha = attention(heads=2, d_model=d_model, dropout_prob=0.0)
        self.answer = nn.Linear(d_model, 10)

    def forward(self, letters, digits, asked):
        card = self.letter(letters) + self.digit(digits)  # [j, b, m]
        question = self.letter(asked)  # [i, b, m]
        found = self.mha(query=question, key=card, value=card)  # [i, b, m]
        return self.answer(found)  # [i, b, 10]


# %% [markdown]
# We track the attention weights of the last call, `mha.attn`, by two numbers per head:
# the weight on the right card, and the *entropy* of a row of weights,
# $-\sum_j w_j \ln w_j$. The entropy is 0 if one key has all of the weight, and
# $\ln 7 = 1.95$ if all seven keys have the same.
#
# The numbers go through `labml.tracker`, which the [annotated
# source](https://nn.labml.ai/transformers/mha.html) of the core module uses.
# `tracker.add` collects values; `tracker.save` writes their mean since the last `save`.
# By default it writes to the screen and, within an `experiment`, to a folder `logs/`
# and to a server if one is configured. This page keeps the values in memory.

# %% fold="Keep the values of labml in memory"
from collections import defaultdict
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from labml import tracker
from labml.internal.tracker import tracker_singleton
from labml.internal.tracker.writers import Writer


class MemoryWriter(Writer):
    """Keeps the means that labml would otherwise print, write to a file or send."""

    def __init__(self):
        self.steps = []
        self.means = defaultdict(list)

    def write(self, *, global_step, indicators):
        self.steps.append(global_step)
        for name, indicator in indicators.items():
            self.means[name].append(indicator.get_mean())


# labml looks for its settings once, from the working directory upwards. If there
# are none, it prints a warning in HTML or, with IPython 9, raises an ImportError.
# So we let it find an empty file.
#
# No `experiment` is started: an experiment would write `logs/`, store a machine
# id in the home folder and run git for the commit.
with TemporaryDirectory() as folder, chdir(folder):
    Path(".labml.yaml").touch()
    writers = tracker_singleton()


def new_writer():
    """Let the tracker write to a new `MemoryWriter` only, and return it."""
    writer = MemoryWriter()
    writers.reset_writers()
    writers.add_writer(writer)
    return writer


# %% [markdown]
# The training loop is the usual one; only the last lines, which track the weights,
# concern attention.


# %%
def entropy(attn):
    """Of each row: `[i, b, h]` for `[i, j, b, h]`."""
    return torch.special.entr(attn).sum(dim=1)


def weight_on(right, attn):
    """The weight on the right key: `[i, b, h]` for `[i, j, b, h]`."""
    index = right[:, None, :, None].expand(-1, -1, -1, attn.shape[-1])
    return attn.gather(1, index).squeeze(1)


def train(model, steps=250):
    writer = new_writer()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        letters, digits, right = sample(batch_size=64)
        logits = model(letters, digits, asked=letters.gather(0, right))
        target = digits.gather(0, right)  # [i, b]
        loss = cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        tracker.add("loss", loss.item())
        tracker.add("accuracy", (logits.argmax(dim=-1) == target).float())
        attn = model.mha.attn  # [i, j, b, h]
        for h, x in enumerate(entropy(attn).unbind(-1)):
            tracker.add(f"entropy.{h}", x)
        for h, x in enumerate(weight_on(right, attn).unbind(-1)):
            tracker.add(f"weight.{h}", x)
        if step % 5 == 0:
            tracker.save(step)
    return writer


# %% [markdown]
# We keep one example aside, to compare its attention weights before and after training.

# %%
torch.set_num_threads(1)  # the tensors are too small to share among threads
torch.manual_seed(2)
model = Lookup()
letters, digits, right = sample(batch_size=1)
example = letters, digits, letters.gather(0, right)
model(*example)
before = model.mha.attn[:, :, 0]  # [i, j, h]

tracked = train(model)

model(*example)
after = model.mha.attn[:, :, 0]  # [i, j, h]

# %% fold="Plotting code"
import math

import matplotlib.pyplot as plt


def draw_curves(tracked):
    """Entropy, weight and accuracy; dotted: the value of even weights."""
    _, axes = plt.subplots(1, 2, figsize=(6.2, 2.7))
    means = tracked.means
    style = {"color": "#8a8a8a", "linewidth": 3, "label": "accuracy"}
    axes[1].plot(tracked.steps, means["accuracy"], **style)
    for h, shade in enumerate(("#d55e00", "#2f86d6")):
        style = {"color": shade, "label": f"head {h}"}
        axes[0].plot(tracked.steps, means[f"entropy.{h}"], **style)
        axes[1].plot(tracked.steps, means[f"weight.{h}"], **style)
    titles = "entropy of a row", "weight on the right card"
    levels = math.log(cards), 1 / cards
    for ax, title, level in zip(axes, titles, levels, strict=True):
        ax.axhline(level, color="#123456", linewidth=0.8, linestyle=":")
        ax.set(title=title, xlabel="step", ylim=(0, None), xlim=(0, None))
    style = {"loc": "outside lower center", "ncols": 3, "frameon": False}
    axes[0].figure.legend(*axes[1].get_legend_handles_labels(), **style)
    plt.show()


# %% alt="Two panels over 250 training steps. The entropy of both heads falls from nearly 1.95 to well below 1. The weight on the right card rises in both heads from a seventh to most of the weight, and the accuracy from a tenth to 1."
draw_curves(tracked)

# %% [markdown]
# At first the weights are nearly even and the accuracy is that of guessing one of ten
# digits. Then all curves change together: the model can return the right digit only if
# its weight is on the right card. (Each printed number and each point is a mean over
# five steps.)

# %%
for name, means in tracked.means.items():
    print(f"{name:9}  first {means[0]:.2f}  last {means[-1]:.2f}")
assert tracked.means["accuracy"][0] < 0.3
assert tracked.means["accuracy"][-1] > 0.95
for h in range(2):
    assert tracked.means[f"entropy.{h}"][0] > 1.6
    assert tracked.means[f"entropy.{h}"][-1] < 1.0
    assert tracked.means[f"weight.{h}"][0] < 0.25
    assert tracked.means[f"weight.{h}"][-1] > 0.6

# %% [markdown]
# The weights do not become one-hot. Once every answer is right, the loss and its
# gradients are nearly zero, so nothing makes the weights sharper.
#
# ## Attention maps before and after training
#
# Here is the example that we kept aside. A row is a question, a column is a card, and a
# frame marks the right card.

# %% fold="Plotting code"
from headnotes.plots import display_attention


def draw_maps(before, after):
    times = "before", "after"
    asked = [f"{letter_names[n]}?" for n in example[2][:, 0]]
    pairs = zip(letters[:, 0], digits[:, 0], strict=True)
    labels = [f"{letter_names[n]} {digit}" for n, digit in pairs]
    figure = display_attention(
        asked,
        labels,
        torch.cat((before, after), dim=-1),
        titles=[f"{when}, head {h}" for when in times for h in (0, 1)],
    )
    for ax in figure.axes[:4]:
        for i, j in enumerate(right[:, 0].tolist()):
            frame = {"fill": False, "edgecolor": "#ff5a36", "linewidth": 2}
            ax.add_patch(plt.Rectangle((j, i), 1, 1, **frame, zorder=3))
    plt.show()


# %% alt="Four attention maps of five questions by seven cards, with a frame around the right card of each question. Before training the weights of both heads are spread over all cards; after training nearly all the weight of both heads is inside the frames."
draw_maps(before, after)

# %%
print("weight on the right card in this example, one column per head")
print("before:", weight_on(right, before[:, :, None]).mean(dim=(0, 1)))
print("after: ", weight_on(right, after[:, :, None]).mean(dim=(0, 1)))
assert (weight_on(right, after[:, :, None]).amax(dim=-1) > 0.5).all()

# %% [markdown]
# For each question, at least one head has more than half of its weight on the right
# card.
#
# ## Do the attention weights explain the answers?
#
# A map alone does not show that the model *uses* these weights. An intervention does:
# on new examples, we mask the right card and measure the accuracy again.

# %%
letters, digits, right = sample(batch_size=1000)
asked, target = letters.gather(0, right), digits.gather(0, right)
others = torch.ones(questions, cards, 1000).scatter(1, right[:, None], 0).bool()


def accuracy(mask=None):
    card = model.letter(letters) + model.digit(digits)
    question = model.letter(asked)
    found = model.mha(query=question, key=card, value=card, mask=mask)
    return (model.answer(found).argmax(dim=-1) == target).float().mean().item()


print(f"all cards:              {accuracy():.3f}")
print(f"without the right card: {accuracy(others):.3f}")
assert accuracy() > 0.95
assert accuracy(others) < 0.2

# %% [markdown]
# Without the right card, the accuracy is that of guessing.
#
# ## tracker.debug was removed from labml
#
# The annotated source passes its attention weights to labml in each forward pass, by
# `tracker.debug`. With a current labml, this call fails:

# %%
try:
    tracker.debug("attn", model.mha.attn)
except AttributeError as error:
    print(error)
assert not hasattr(tracker, "debug")

# %% [markdown]
# The function was removed for labml 0.5, in November 2023. Before, it did nothing
# unless it was switched on; then it appended the weights, with their autograd graph, to
# a list that kept growing. The core module calls no tracker. It [keeps the weights of
# the last call](../source/mha.md#MultiHeadAttention.forward) in `attn`, detached and
# before dropout, so that you can track or plot them, as on this page.
#
# ## Try it: one wrong letter
#
# A subclass can override `get_scores`. Suppose that one letter `b` has become `c`, so
# that the equation is `ibhd,jchd->ijbh`. Does it raise an error? What does it compute,
# and does the model still learn the task?


# %% fold="Answer"
class OneWrongLetter(MultiHeadAttention):
    def get_scores(self, query, key):
        return torch.einsum("ibhd,jchd->ijbh", query, key)


# There is no error. `c` is missing in the output, so it is summed over: each query
# is multiplied with the sum of the keys at position j of all batch items.
wrong = OneWrongLetter(heads=heads, d_model=d_model).get_scores(query, key)
summed = key.sum(dim=1, keepdim=True).expand_as(key)
mixed = torch.einsum("ibhd,jbhd->ijbh", query, summed)
assert torch.allclose(wrong, mixed, atol=1e-5)

# The shape is right, and distinct prime sizes do not help: the meaning of an axis
# is wrong, not its size. The tracked weights show it.
torch.manual_seed(2)
wrong_model = Lookup(OneWrongLetter)
tracked = train(wrong_model, steps=150)
for name in ("accuracy", "weight.0", "weight.1"):
    print(f"{name:9} last {tracked.means[name][-1]:.2f}")
    assert tracked.means[name][-1] < 0.5

# The model has learned to answer with a digit of one of the cards, but not of which
# card: the weight on the right card is still about a seventh in both heads.
guesses = wrong_model(letters, digits, asked).argmax(dim=-1)
on_a_card = (guesses[:, None] == digits).any(dim=1).float().mean()
print(f"answers that are on a card: {on_a_card:.2f}")
assert on_a_card > 0.9

# %% [markdown]
# ## In short
#
# - In an `einsum` equation, letters that are missing in the output are summed over;
#   letters in both inputs and in the output are batch dimensions.
# - Scores are `ibhd,jbhd->ijbh`, context vectors `ijbh,jbhd->ibhd`, and softmax runs
#   over `j`, which is axis 1 in this layout.
# - Batch-first input to a sequence-first module raises no error, but mixes sequences.
#   Change one input and check which outputs change.
# - Attention weights show where a trained model attends; masking a key shows whether it
#   uses it.
#
# Next: [equivalent implementations](09_equivalent_implementations.md) compares this
# module with four others that have the same weights.
