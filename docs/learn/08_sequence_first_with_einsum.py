# %% [markdown]
# # Sequence first, with einsum
#
# Attention has four axes at work at once, and a fifth that comes and goes. Most code
# keeps them apart by turning tensors: a view, a transpose, one more transpose to undo
# the first. What each axis *means*, you have to remember. What if every axis had a
# name, and the names did the turning?
#
# On the first half of this page we go from plain loops to
# [the core of this house](../source/mha.md), one step at a time, and each step is
# asserted to equal the one before. On the second half we train it, and watch its
# weights find what they look for.
#
# ## Every axis has a name
#
# | letter | axis | size here |
# |:---:|---|---:|
# | `i` | query position: who asks | 3 |
# | `j` | key position: who is read | 5 |
# | `b` | batch item | 2 |
# | `h` | head | 7 |
# | `d` | component within a head | 11 |
#
# The sizes are prime and all different, so that no two axes can be swapped unnoticed.
# Positions come first; hence *sequence first*.

# %%
import torch

torch.manual_seed(7)
q_len, k_len, batch_size, heads, d_k = 3, 5, 2, 7, 11
query = torch.randn(q_len, batch_size, heads, d_k)  # [i, b, h, d]
key = torch.randn(k_len, batch_size, heads, d_k)  # [j, b, h, d]
value = torch.randn(k_len, batch_size, heads, d_k)  # [j, b, h, d]

# %% [markdown]
# ## From loops to einsum
#
# Every query is compared with every key, by a dot product, within its own batch item
# and its own head. One loop a letter says exactly that:

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
# The innermost loop, over `d`, is a dot product. It goes first:

# %%
dots = torch.zeros_like(loops)
for i in range(q_len):
    for j in range(k_len):
        for b in range(batch_size):
            for h in range(heads):
                dots[i, j, b, h] = query[i, b, h] @ key[j, b, h]
assert torch.allclose(dots, loops, atol=1e-5)

# %% [markdown]
# All dot products of some rows with some others are a matrix product. There go `i` and
# `j`:

# %%
products = torch.zeros_like(loops)
for b in range(batch_size):
    for h in range(heads):
        products[:, :, b, h] = query[:, b, h] @ key[:, b, h].T
assert torch.allclose(products, loops, atol=1e-5)

# %% [markdown]
# And the two loops that remain, with all that was inside them, are one line. It names
# the axes of what goes in and of what shall come out:

# %%
scores = torch.einsum("ibhd,jbhd->ijbh", query, key)
assert torch.allclose(scores, loops, atol=1e-5)
print("[i, j, b, h] =", list(scores.shape))

# %% [markdown]
# Read it by what becomes of each letter.
#
# - `d` is missing on the right: it is **summed over**.
# - `i` and `j` come from one side each: they make a **table**, everyone with everyone.
# - `b` and `h` are on both sides and on the right: they stay **loops**. Nothing in one
#   batch item meets anything in another, and no head meets another head.
#
# This line is [`get_scores`](../source/mha.md#MultiHeadAttention.get_scores) of the
# core.
#
# ## What lies in memory
#
# No tensor was turned, at least not by us. How `einsum` went about it can be seen from
# the strides of the result: how far apart in memory two neighbours along an axis are.

# %%
for dim, letter in enumerate("ijbh"):
    size, stride = scores.shape[dim], scores.stride(dim)
    print(f"{letter}: {size} long, {stride:3} apart")
assert not scores.is_contiguous()
assert scores.permute(2, 3, 0, 1).is_contiguous()
assert scores.flatten().data_ptr() != scores.data_ptr()  # a copy

# %% [markdown]
# From the widest step to the narrowest, memory reads `b`, `h`, `i`, `j`: fourteen
# matrices of 3 × 5, one after another, just as batch-first code lays them out by hand.
# They are the fourteen products of the last loops. What we hold is a view of them, with
# the axes in the order that we asked for: the names are for us, the memory is for the
# machine. The one thing to know is that `flatten` has to copy such a tensor.
#
# ## Why scale
#
# A score is a sum of `d` products. If the components are independent, with variance 1,
# each product has variance 1 too, and their sum has variance `d`. Dividing by
# $\sqrt{d_k}$ brings the scores back to where softmax is neither flat nor one-hot.
# [Another lesson](05_embeddings_and_positional_encoding.md) has the pictures. (The core divides
# the query, so that half precision does not overflow; the scores are the same.)

# %%
print(f"standard deviation {scores.std():.2f}, √d_k {d_k**0.5:.2f}")
assert 0.8 < scores.std() / d_k**0.5 < 1.25
scores = scores / d_k**0.5
print(f"after scaling {scores.std():.2f}")

# %% [markdown]
# ## Softmax over j, and over nothing else
#
# Who asks shares out one unit of attention among those who are read. So the weights
# have to sum to 1 over `j`, axis 1. All four axes can be given to softmax, the shape is
# the same, and no error comes. What does come? We look at the sums over the keys, and
# whether the first question of the first item is answered as if it had come alone:


# %%
def alone(x):
    """The first query, of the first batch item, in the first head."""
    return x[:1, :, :1, :1]


answered_alone = {}
for dim, letter in enumerate("ijbh"):
    weights = scores.softmax(dim=dim)
    low, high = weights.sum(dim=1).aminmax()
    same = torch.allclose(alone(weights), alone(scores).softmax(dim=dim))
    print(f"over {letter}: sums {low:.2f} to {high:.2f}, as if alone: {same}")
    answered_alone[letter] = same
assert answered_alone == {"i": False, "j": True, "b": False, "h": False}

# %% [markdown]
# Over `i`, each *key* shares itself out among those who ask: one query gets several
# times the attention of another, and the answer depends on what else is asked. In a
# language model, that means on words which are not yet written. Over `b`, strangers who
# happen to share a batch compete; over `h`, the heads do.
#
# The likeliest slip is `dim=-1`. In batch-first code it is right, for there the keys
# come last. Here `h` does.

# %%
weights = scores.softmax(dim=1)  # [i, j, b, h]
assert torch.allclose(weights.sum(dim=1), torch.ones(q_len, batch_size, heads))

# %% [markdown]
# ## Read
#
# The weights say how much of each value goes into the mixture. In loops, and in
# letters: `j` is gone, so the keys are summed over, and `d` is back.

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
# ## The whole
#
# Projections are sums of products as well, so they can be written in letters too: let
# `m` be the axis of the model's vectors, and `n` that of what comes out. The weight of
# a linear layer, viewed as `[h, d, m]`, *is* one small matrix a head. Here is all of
# multi-head attention:


# %%
def attend(mha, query, key, value):
    """Multi-head attention with the weights of `mha`, letter by letter."""

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
# And here is the core, with the same weights. (The inputs are three times as large as
# usual, so that the rows of weights differ.)

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
print("largest weight:", f"{weights.max():.2f}, mean: {weights.mean():.2f}")
print("the core gives the same output, and the same weights")

# %% [markdown]
# Line by line, the letters are
# [the split into heads](../source/mha.md#PrepareForMultiHeadAttention.forward),
# [the scores](../source/mha.md#MultiHeadAttention.get_scores),
# [the softmax over `j`](../source/mha.md#masked_softmax),
# [the reading](../source/mha.md#MultiHeadAttention.apply_weights) and
# [the last map](../source/mha.md#MultiHeadAttention.forward), which the core writes as
# a `flatten` and a linear layer. What that page has beyond ours is the mask, the
# dropout, and the care for bad input.
#
# ## The batch that attends to itself
#
# There is one kind of bad input that no care can find. Five sentences of three words,
# batch first as most libraries have them, go into a sequence-first module:

# %%
sentences = 3 * torch.randn(5, 3, d_model)  # batch first: [b, i, m]
output = mha(query=sentences, key=sentences, value=sentences)
print("in:     ", list(sentences.shape))
print("out:    ", list(output.shape))
print("weights:", list(mha.attn.shape))

# %% [markdown]
# No complaint, and the shape that one expects. Only the weights give it away: 5 × 5.
# The *sentences* attend to one another, and the words of a sentence never meet. Two
# questions bring it to light, and they are worth asking of any attention that you are
# handed:


# %%
def self_attention(x):
    return mha(query=x, key=x, value=x)


def turned(x):
    return self_attention(x.transpose(0, 1)).transpose(0, 1)


def reaches(attention, sentence, word):
    """Does a change there reach the first word of the first sentence?"""
    changed = sentences.clone()
    changed[sentence, word] += 1
    before, after = attention(sentences)[0, 0], attention(changed)[0, 0]
    return not torch.allclose(before, after, atol=1e-5)


for name, attention in (("as it is", self_attention), ("turned", turned)):
    print(f"{name}:")
    print("  reads its own sentence:", reaches(attention, sentence=0, word=1))
    print("  reads the next sentence:", reaches(attention, sentence=1, word=0))
assert not reaches(self_attention, sentence=0, word=1)
assert reaches(self_attention, sentence=1, word=0)
assert reaches(turned, sentence=0, word=1)
assert not reaches(turned, sentence=1, word=0)

# %% [markdown]
# `transpose(0, 1)` is a view and costs nothing; forgetting it costs the model. A mask
# would have told, if the two sizes differ, since it has to have one row a query:

# %%
from textwrap import fill

from headnotes import masks

try:
    mha(query=sentences, key=sentences, value=sentences, mask=masks.causal(3))
except ValueError as error:
    print(fill(str(error), 72))
else:
    raise AssertionError("a mask of the wrong size went through")

# %% [markdown]
# ## Watch attention learn
#
# So far all weights were random. What do they look like once they have a purpose? Here
# is a task that attention is made for. Seven cards lie on the table, each with a letter
# and a digit. Then come five questions, each a letter: which digit is on its card?
#
# To answer, a head must find the card by its letter (query and key), and read off the
# digit (value). Nobody tells it which card is the right one: all it is ever told is the
# digit.


# %%
from torch import nn
from torch.nn.functional import cross_entropy

letter_names = "abcdefghijklmnopqrstuvwxyz"
cards, questions = 7, 5  # a hand, sequence first


def deal(batch_size):
    """Letters and digits on the cards, and the card of each question."""
    shuffled = torch.rand(26, batch_size).argsort(dim=0)
    letters = shuffled[:cards]  # [j, b], all different
    digits = torch.randint(10, (cards, batch_size))  # [j, b]
    right = torch.rand(cards, batch_size).argsort(dim=0)[:questions]  # [i, b]
    return letters, digits, right


class Lookup(nn.Module):
    """One layer of attention between embeddings and an answer."""

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
# We watch `mha.attn`, which the core keeps from its last call, and ask two things of
# each head. How much of its weight is on the right card? And how widely does it look?
# The *entropy* of a row of weights, $-\sum_j w_j \ln w_j$, is 0 where one key has all,
# and $\ln 7 = 1.95$ where all seven have the same.
#
# The numbers go through `labml.tracker`, the companion of the
# [annotated source](https://nn.labml.ai/transformers/mha.html) that the core page
# follows. `tracker.add` collects values, `tracker.save` writes the mean of what came in
# since the last time. As a rule it writes to the screen and, within an `experiment`, to
# a folder `logs/` and to a server, if one is set. This page needs nothing of the kind.

# %% fold="How labml is kept in memory, quiet and offline"
from collections import defaultdict
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from labml import tracker
from labml.internal.tracker import tracker_singleton
from labml.internal.tracker.writers import Writer


class Kept(Writer):
    """Keeps the means that labml would otherwise print, file or send."""

    def __init__(self):
        self.steps = []
        self.means = defaultdict(list)

    def write(self, *, global_step, indicators):
        self.steps.append(global_step)
        for name, indicator in indicators.items():
            self.means[name].append(indicator.get_mean())


# labml looks for its settings once, upwards from the working directory. Where
# there are none it complains, in HTML, or with IPython 9 in an ImportError of
# its own making. So we let it find some, which are empty.
#
# No `experiment` is started: it is that which writes `logs/`, puts a machine
# id into the home folder and asks git for the commit.
with TemporaryDirectory() as folder, chdir(folder):
    Path(".labml.yaml").touch()
    writers = tracker_singleton()


def keep():
    """From now on the tracker writes to what this returns, nowhere else."""
    kept = Kept()
    writers.reset_writers()
    writers.add_writer(kept)
    return kept


# %% [markdown]
# Training is the usual loop; nothing in it is about attention but the lines at the end,
# which watch.


# %%
def entropy(attn):
    """Of each row: `[i, b, h]` for `[i, j, b, h]`."""
    return torch.special.entr(attn).sum(dim=1)


def share(attn, right):
    """The weight on the right key: `[i, b, h]` for `[i, j, b, h]`."""
    index = right[:, None, :, None].expand(-1, -1, -1, attn.shape[-1])
    return attn.gather(1, index).squeeze(1)


def train(model, steps=250):
    kept = keep()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        letters, digits, right = deal(batch_size=64)
        logits = model(letters, digits, asked=letters.gather(0, right))
        truth = digits.gather(0, right)  # [i, b]
        loss = cross_entropy(logits.flatten(0, 1), truth.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        tracker.add("loss", loss.item())
        tracker.add("accuracy", (logits.argmax(dim=-1) == truth).float())
        attn = model.mha.attn  # [i, j, b, h]
        for h, x in enumerate(entropy(attn).unbind(-1)):
            tracker.add(f"entropy.{h}", x)
        for h, x in enumerate(share(attn, right).unbind(-1)):
            tracker.add(f"share.{h}", x)
        if step % 5 == 0:
            tracker.save(step)
    return kept


# %% [markdown]
# One hand is put aside, to be looked at before and after.

# %%
torch.set_num_threads(1)  # with work so small, a second one is in the way
torch.manual_seed(2)
model = Lookup()
letters, digits, right = deal(batch_size=1)
hand = letters, digits, letters.gather(0, right)
model(*hand)
before = model.mha.attn[:, :, 0]  # [i, j, h]

kept = train(model)

model(*hand)
after = model.mha.attn[:, :, 0]  # [i, j, h]

# %% fold="How the curves are drawn"
import math

import matplotlib.pyplot as plt


def draw_curves(kept):
    """Entropy, share and accuracy; dotted: all cards read alike."""
    _, axes = plt.subplots(1, 2, figsize=(6.2, 2.7))
    means = kept.means
    style = {"color": "#8a8a8a", "linewidth": 3, "label": "right answers"}
    axes[1].plot(kept.steps, means["accuracy"], **style)
    for h, shade in enumerate(("#d55e00", "#2f86d6")):
        style = {"color": shade, "label": f"head {h}"}
        axes[0].plot(kept.steps, means[f"entropy.{h}"], **style)
        axes[1].plot(kept.steps, means[f"share.{h}"], **style)
    titles = "entropy of a row", "weight on the right card"
    levels = math.log(cards), 1 / cards
    for ax, title, level in zip(axes, titles, levels, strict=True):
        ax.axhline(level, color="#123456", linewidth=0.8, linestyle=":")
        ax.set(title=title, xlabel="step", ylim=(0, None), xlim=(0, None))
    style = {"loc": "outside lower center", "ncols": 3, "frameon": False}
    axes[0].figure.legend(*axes[1].get_legend_handles_labels(), **style)
    plt.show()


# %% alt="Two panels over 250 steps of training. The entropy of both heads falls from nearly 1.95 to well below 1. The weight on the right card rises in both from a seventh to most of it, and the share of right answers from a tenth to all."
draw_curves(kept)

# %% [markdown]
# It begins where one who knows nothing would: every card is read alike, and one answer
# in ten is right. Then all curves move together, because they are one thing. Only who
# looks at the right card can read the right digit. (Each number below, and each point
# above, is a mean over five steps.)

# %%
for name, means in kept.means.items():
    print(f"{name:9}  first {means[0]:.2f}  last {means[-1]:.2f}")
assert kept.means["accuracy"][0] < 0.3
assert kept.means["accuracy"][-1] > 0.95
for h in range(2):
    assert kept.means[f"entropy.{h}"][0] > 1.6
    assert kept.means[f"entropy.{h}"][-1] < 1.0
    assert kept.means[f"share.{h}"][0] < 0.25
    assert kept.means[f"share.{h}"][-1] > 0.6

# %% [markdown]
# And then the weights all but stop, short of one-hot. Once every answer is right, the
# loss is nearly zero, and so are its gradients: nobody pays for sharper weights.
#
# Here is the hand that was put aside. A row is a question, a column a card, and a frame
# marks the card that was asked for.

# %% fold="How the maps are drawn"
from headnotes.plots import display_attention


def draw_maps(before, after):
    times = "before", "after"
    asked = [f"{letter_names[n]}?" for n in hand[2][:, 0]]
    table = zip(letters[:, 0], digits[:, 0], strict=True)
    on_table = [f"{letter_names[n]} {digit}" for n, digit in table]
    figure = display_attention(
        asked,
        on_table,
        torch.cat((before, after), dim=-1),
        titles=[f"{when}, head {h}" for when in times for h in (0, 1)],
    )
    for ax in figure.axes[:4]:
        for i, j in enumerate(right[:, 0].tolist()):
            frame = {"fill": False, "edgecolor": "#ff5a36", "linewidth": 2}
            ax.add_patch(plt.Rectangle((j, i), 1, 1, **frame, zorder=3))
    plt.show()


# %% alt="Four maps of five questions by seven cards, with a frame around the right card of each question. Before training the weights of both heads are spread over all cards; after training nearly all the weight of both heads is inside the frames."
draw_maps(before, after)

# %%
print("weight on the right card, this hand, one column a head")
print("before:", share(before[:, :, None], right).mean(dim=(0, 1)))
print("after: ", share(after[:, :, None], right).mean(dim=(0, 1)))
assert (share(after[:, :, None], right).amax(dim=-1) > 0.5).all()

# %% [markdown]
# For each question at least one head is sure of its card; the other need not be.
#
# Pictures like these tempt one to explain a model by its weights. Whether the weights
# *do* anything can be tested: deal new hands, forbid the right card by a mask, and see
# what is left.

# %%
letters, digits, right = deal(batch_size=1000)
asked, truth = letters.gather(0, right), digits.gather(0, right)
others = torch.ones(questions, cards, 1000).scatter(1, right[:, None], 0).bool()


def accuracy(mask=None):
    card = model.letter(letters) + model.digit(digits)
    question = model.letter(asked)
    found = model.mha(query=question, key=card, value=card, mask=mask)
    return (model.answer(found).argmax(dim=-1) == truth).float().mean().item()


print(f"all cards:              {accuracy():.3f}")
print(f"without the right card: {accuracy(others):.3f}")
assert accuracy() > 0.95
assert accuracy(others) < 0.2

# %% [markdown]
# What is left is chance.
#
# ## What became of `tracker.debug`
#
# The annotated source hands its weights to labml in each forward pass, by a call to
# `tracker.debug`. If you run it today, this is what you get:

# %%
try:
    tracker.debug("attn", model.mha.attn)
except AttributeError as error:
    print(error)
assert not hasattr(tracker, "debug")

# %% [markdown]
# The function was removed in the clean-up for labml 0.5, in November 2023. Before, it
# stored nothing unless it was switched on; and if it was, it appended the weights to a
# list that kept growing, with the graph of their gradients. So the core calls no
# tracker. It [keeps `attn`](../source/mha.md#MultiHeadAttention.forward) of the last
# call, without graph and before dropout, and leaves it to you whether to track it, draw
# it or ignore it.
#
# ## Try it
#
# `get_scores` is a hook: a subclass may score as it likes. Suppose that a `b` has
# become a `c`, so that the line reads `ibhd,jchd->ijbh`. Is that an error? What does it
# compute, and will the model still learn?


# %% fold="What happens"
class OneWrongLetter(MultiHeadAttention):
    def get_scores(self, query, key):
        return torch.einsum("ibhd,jchd->ijbh", query, key)


# No error. `c` is missing on the right, so it is summed over: each query is
# compared with the keys at position j of all batch items, added up.
wrong = OneWrongLetter(heads=heads, d_model=d_model).get_scores(query, key)
summed = key.sum(dim=1, keepdim=True).expand_as(key)
mixed = torch.einsum("ibhd,jbhd->ijbh", query, summed)
assert torch.allclose(wrong, mixed, atol=1e-5)

# The shape is right, and prime sizes do not help: it is the meaning of an
# axis that is wrong, not its size. The tracker sees it at once.
torch.manual_seed(2)
unlucky = Lookup(OneWrongLetter)
kept = train(unlucky, steps=150)
for name in ("accuracy", "share.0", "share.1"):
    print(f"{name:9} last {kept.means[name][-1]:.2f}")
    assert kept.means[name][-1] < 0.5

# It has learned to name a digit that is on the table, but not which: both
# heads give the right card about a seventh of their weight, as ever.
guesses = unlucky(letters, digits, asked).argmax(dim=-1)
on_table = (guesses[:, None] == digits).any(dim=1).float().mean()
print(f"on the table: {on_table:.2f}")
assert on_table > 0.9
