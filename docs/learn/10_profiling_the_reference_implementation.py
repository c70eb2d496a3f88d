# %% [markdown]
# # Why is the readable one slow?
#
# [The core](../source/mha.md) is written to be read. [The fast
# one](../source/fast/module.md) has the same parameters, and gives the same answers. Both have
# the same matrices to multiply, down to the last number. So where does the core spend
# the rest of its time?
#
# We do not guess: we ask PyTorch's profiler. Then we change the core, one thing at a
# time, until it is fast. Each step is asserted to equal the core, so that nothing
# changes but the time.
#
# Here are four sentences of 512 words, and a layer of a common size. One thread, so
# that times of parts add up to the time of the whole; no gradients for now.

# %%
import os

# The profiler would report its own comings and goings to the screen.
os.environ.update(KINETO_LOG_LEVEL="6", TORCH_CPP_LOG_LEVEL="ERROR")

import torch
from IPython.display import Markdown, display
from torch.nn.functional import linear, scaled_dot_product_attention

from headnotes import MultiHeadAttention

torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(9)
length, batch_size, d_model, heads = 512, 4, 512, 8
core = MultiHeadAttention(heads, d_model).eval()
x = 3 * torch.randn(length, batch_size, d_model)

words = length * batch_size
projections = 4 * words * d_model**2
attention = 2 * words * length * d_model
print(f"four projections: {projections / 1e6:5,.0f} million multiplications")
print(f"two products:     {attention / 1e6:5,.0f} million")

# %% [markdown]
# ## Ask the profiler
#
# It notes each operator that PyTorch runs: its name, when it began and how long it
# took, what shapes it was given, which operator called it, and what memory was taken
# and given back. That is a list of some hundred events; we want a handful of numbers.
# So we sort the events into kinds. What an operator calls on its way is of its kind
# too, unless it has a kind of its own.

# %%
from itertools import accumulate

from torch.profiler import profile

KINDS = {
    "aten::addmm": "products",
    "aten::bmm": "products",
    "aten::baddbmm": "products",
    "aten::_softmax": "softmax",
    "aten::clone": "copies",
    "aten::scaled_dot_product_attention": "all in one",
}


class Run:
    """One call: what ran, in order of time, and the bytes in use."""

    def __init__(self, call):
        with profile(record_shapes=True, profile_memory=True) as seen:
            self.output = call()
        events = [event for event in seen.events() if event.name != "[memory]"]
        self.events = sorted(events, key=lambda event: event.time_range.start)
        raw = seen.profiler.kineto_results.events()
        changes = [event for event in raw if event.name() == "[memory]"]
        changes.sort(key=lambda event: event.start_ns())
        self.memory = list(accumulate(event.nbytes() for event in changes))


def kind(event):
    while event.name not in KINDS and event.cpu_parent:
        event = event.cpu_parent
    return KINDS.get(event.name, "the rest")


def total(run):
    """Milliseconds, from the first beginning to the last end."""
    end = max(event.time_range.end for event in run.events)
    return (end - run.events[0].time_range.start) / 1000


def spent(run):
    """Milliseconds, for each kind."""
    times = dict.fromkeys((*KINDS.values(), "the rest"), 0.0)
    for event in run.events:
        times[kind(event)] += event.self_cpu_time_total / 1000
    times["the rest"] += total(run) - sum(times.values())  # Python's own
    return {name: time for name, time in times.items() if time}


# %% [markdown]
# A machine that builds pages has other things to do as well, and a single time means
# little. So each call is watched several times, in turn with all others that it is
# compared with, until its two calmest runs agree; the calmer one counts.


# %%
def calmest(calls, rounds=3):
    """The shortest run of each call, out of at most so many."""
    runs = {name: [] for name in calls}
    for done in range(rounds):
        for name, call in calls.items():
            runs[name] = sorted([*runs[name], Run(call)], key=total)[:2]
        pairs = [[total(run) for run in found] for found in runs.values()]
        if done and all(second < 1.05 * first for first, second in pairs):
            break
    return {name: found[0] for name, found in runs.items()}


steps = {"the core": lambda: core(query=x, key=x, value=x)}
seen = calmest(steps)
for name, time in spent(seen["the core"]).items():
    print(f"{name:10} {time:6.1f} ms")

# %% fold="How the picture is drawn"
import matplotlib.pyplot as plt

COLOURS = {
    "products": "#2f86d6",
    "softmax": "#e69f00",
    "copies": "#d55e00",
    "all in one": "#009e73",
    "the rest": "#a0a0a0",
}


def draw(seen):
    """A row a call, and in it each operator, when it ran."""
    figure, ax = plt.subplots(figsize=(5.6, 1.05 + 0.3 * len(seen)))
    used = {"the rest": None}
    for row, run in enumerate(seen.values()):
        start = run.events[0].time_range.start
        ax.barh(row, total(run), 0.7, color=COLOURS["the rest"])
        for event in run.events:  # what was called lies above its caller
            if event.name in KINDS:
                left = (event.time_range.start - start) / 1000
                width = event.time_range.elapsed_us() / 1000
                ax.barh(row, width, 0.7, left, color=COLOURS[kind(event)])
                used[kind(event)] = None
    ax.set_yticks(range(len(seen)), list(seen))
    ax.set(xlabel="milliseconds", ylim=(len(seen) - 0.5, -0.5))
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    for name in COLOURS:
        if name in used:
            ax.barh(0, 0, color=COLOURS[name], label=name)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    plt.show()


# %% alt="A bar from left to right in time, one colour a kind of operator: three projections, the first product, then a large copy and the softmax, then a row of many small copies that ends in the second product, and the last projection."
draw(seen)

# %% [markdown]
# From left to right: three projections, the scores, the softmax, the reading, and one
# last projection. Products and a softmax are what attention is. The copies are no part
# of any formula: a large one before the softmax, and many small ones before the second
# product. Who asked for them? No line of the core says `copy`.
#
# ## Where a number lies
#
# A tensor is a row of numbers in memory, and a way to count through them: its *strides*
# tell how far apart two neighbours along each axis are. [We have met
# them](08_sequence_first_with_einsum.md#what-lies-in-memory) in a tensor of small
# primes. Here are those of the scores, and of the weights that softmax makes of them:

# %%
query, key, value = core.query(x), core.key(x), core.value(x)  # [i, b, h, d]
scores = torch.einsum("ibhd,jbhd->ijbh", query * core.scale, key)
weights = scores.softmax(dim=1)

print("axis   scores     weights")
for dim, axis in enumerate("ijbh"):
    print(f"{axis}{scores.stride(dim):12,}{weights.stride(dim):12,}")
assert scores.stride("ijbh".index("j")) == 1
assert weights.stride("ijbh".index("j")) == batch_size * heads

# %% [markdown]
# The scores of a query already lie side by side: along `j` the stride is 1. That is how
# a product of matrices leaves them, one matrix after another. `einsum` only *shows*
# them as `[i, j, b, h]`.
#
# Softmax sums over `j`, so it could walk straight along. But first it wants its input
# to lie in the order of its axes. It copies all scores into that order, by which two
# keys of a query come to be 32 numbers apart, and then works its way through memory in
# leaps. The second product wants matrices again, and copies each of the 32 back. The
# profiler has the shapes of all that was copied:


# %%
def copied(run):
    """How many numbers were copied from one place to another."""
    copies = [event for event in run.events if event.name == "aten::clone"]
    return sum(torch.Size(copy.input_shapes[0]).numel() for copy in copies)


def peak(run):
    """The most bytes in use, above what was in use before."""
    return max(run.memory)


def report(run):
    print(f"numbers copied: {copied(run):10,}")
    print(f"memory at most: {peak(run) / 2**20:6.0f} MiB")


there_and_back = 2 * scores.numel()
to_flatten = x.numel()  # the context, before the last projection
report(seen["the core"])
assert copied(seen["the core"]) == there_and_back + to_flatten

# %% [markdown]
# ## Let them lie
#
# The smallest mend is to ask for the axes as they lie in memory, `[b, h, i, j]`. Then
# the last axis is that of the keys, and softmax has nothing to copy.


# %%
def layer(read):
    """The core, with another way to read."""
    query, key, value = core.query(x), core.key(x), core.value(x)
    return core.output(read(query, key, value).flatten(-2))


def mended(query, key, value):
    scores = torch.einsum("ibhd,jbhd->bhij", query * core.scale, key)
    weights = scores.softmax(dim=-1)
    return torch.einsum("bhij,jbhd->ibhd", weights, value)


expected = core(query=x, key=x, value=x)


def check(call):
    """It says what the core says. What did its run look like?"""
    run = Run(call)
    assert torch.allclose(run.output, expected, rtol=1e-4, atol=1e-5)
    report(run)
    return run


steps["axes as they lie"] = lambda: layer(mended)
run = check(steps["axes as they lie"])
assert copied(run) == to_flatten

# %% [markdown]
# Who wants the weights in the order of the core still gets them: as a view, which
# costs nothing.

# %%
in_memory = torch.einsum("ibhd,jbhd->bhij", query * core.scale, key)
in_memory = in_memory.softmax(dim=-1)
view = in_memory.permute(2, 3, 0, 1)  # [i, j, b, h]
assert view.data_ptr() == in_memory.data_ptr()
assert torch.allclose(view, weights, atol=1e-6)

# %% [markdown]
# Why does the core not do so? Because on its page softmax over `j` is written as
# softmax over `j`, next to a mask and weights in the same order as everything else.
# That is a fair price for a page, and a high one for a model.
#
# ## The same paper twice
#
# What is left beside the products is softmax, and a single copy. Softmax reads one
# large tensor and writes another, so both are there at once. Nor is new memory always
# to be had for nothing: it may come from the operating system page by page, each of
# them wiped clean. (Whether it does, depends on the allocator and on what was there
# before; so the picture below may show more of this, or less.) Let softmax write over
# what it has just read.
#
# For this we say by hand what `einsum` did for us. Batch items and heads become one
# axis of 32 matrices. That is a view, since these two axes are neighbours in memory;
# and a product of matrices takes a view, as long as one of its axes has stride 1. The
# product can multiply by the scale in passing, too.


# %%
def fold(x):
    """`[seq_len, b, h, d]` as matrices: `[b * h, seq_len, d]`."""
    return x.flatten(1, 2).transpose(0, 1)


def unfold(x):
    return x.transpose(0, 1).unflatten(1, (batch_size, heads))


def in_place(query, key, value):
    q, k, v = fold(query), fold(key), fold(value)
    scores = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=core.scale)
    weights = torch.softmax(scores, dim=-1, out=scores)
    return unfold(weights @ v)


assert fold(query).data_ptr() == query.data_ptr()
steps["in place"] = lambda: layer(in_place)
run = check(steps["in place"])

# %% [markdown]
# This is for inference only. Autograd refuses `out=`, whatever would be written there.
#
# ## Never all at once
#
# How often was the whole table of scores there, in one form or another?

# %%
table = 4 * scores.numel()  # bytes
print(f"a table of scores: {table / 2**20:.0f} MiB")
assert 3 * table < peak(seen["the core"])  # scores, their copy, weights
assert 2 * table < peak(Run(steps["axes as they lie"])) < 3 * table
assert table < peak(run) < 2 * table

# %% [markdown]
# Once is still a lot: with twice the length it is four times as much, and sooner or
# later more than any cache holds. But a query needs only its own row of weights, and
# that only for as long as it reads. So one can take a few queries at a time, and throw
# their weights away before the next ones come. With a softmax that is corrected [as it
# goes along](../source/variants/online_softmax.md), one need not even have a whole row.
# That is what PyTorch's kernel does, from the first product to the last, and it takes
# our folded views as they are.


# %%
def by_kernel(query, key, value):
    q, k, v = fold(query)[None], fold(key)[None], fold(value)[None]
    return unfold(scaled_dot_product_attention(q, k, v)[0])


steps["one kernel"] = lambda: layer(by_kernel)
run = check(steps["one kernel"])
assert copied(run) == 0
assert peak(run) < table
assert round(peak(run) / (4 * x.numel())) == 5

# %% [markdown]
# Nothing is copied any more: the kernel leaves its result sequence first, so even the
# `flatten` before the last projection is a view. And the table is gone. What is left is
# query, key, value, what is read and what is returned: five tensors as large as the
# input, which grow with the length, not with its square.
#
# This is where [the fast module](../source/fast/module.md) stands. What it adds makes a
# module of it: masks, dropout, causality, a KV cache, weights on request, and the core's
# care for bad input. In inference it runs the operators that we have arrived at:

# %%
from headnotes import fast

module = fast.MultiHeadAttention(heads, d_model).eval()
module.load_state_dict(core.state_dict())
steps["fast"] = lambda: module(query=x, key=x, value=x)


def work(run):
    return [event.name for event in run.events if event.name in KINDS]


ours, theirs = work(run), work(check(steps["fast"]))
print(*theirs, sep="\n")
assert theirs == ours

# %% [markdown]
# ## Why not one projection instead of three?
#
# In self-attention, query, key and value are three products of the same input. With
# their weights stacked, they are one:

# %%
parts = [part.linear for part in (core.query, core.key, core.value)]
weight = torch.cat([part.weight for part in parts])
bias = torch.cat([part.bias for part in parts])


def project(x):
    packed = linear(x, weight, bias)
    return packed.unflatten(-1, (3, heads, -1)).unbind(2)


for one, part in zip(project(x), (core.query, core.key, core.value), strict=True):
    assert torch.allclose(one, part(x), atol=1e-5)

# %% [markdown]
# That is two products less, which counts where a call is short: many modules, PyTorch's
# among them, store the stacked weight only. But a stacked *copy* beside the three
# weights becomes stale as soon as one of them is written to:

# %%
before = project(x)[0]
core.query.linear.weight.data.mul_(2)
assert torch.equal(project(x)[0], before)  # the copy has not noticed
assert not torch.allclose(core.query(x), before)
core.query.linear.weight.data.div_(2)

# %% [markdown]
# An optimizer, an average of weights, or another process may write at any time, and not
# every write can be noticed. The fast module had such a copy once, and returned wrong
# results because of it. Now it has the core's three projections and nothing else. What
# that costs is on the page of [benchmarks](../compare/benchmarks.md).
#
# ## All steps
#
# Now all of them in turn, on the machine that built this page: how long each took, how
# many numbers it copied, and the most memory that it used. The times are as calm as
# that machine was; the other two are exact.

# %%
seen = calmest(steps)

# %% alt="A row a step, from the core to the fast one, each with its operators in the order of time. From row to row the copies vanish, then part of the softmax, then both products and the softmax become one block; the projections stay as long as they were."
draw(seen)

# %% fold="How the table is made"
rows = ["|step|ms|copied|MiB|", "|---|--:|--:|--:|"]
for name, run in seen.items():
    mebibytes = f"{peak(run) / 2**20:.0f}"
    rows.append(f"|{name}|{total(run):.0f}|{copied(run):,}|{mebibytes}|")

# %%
display(Markdown("\n".join(rows)))

# %% [markdown]
# What is left is nearly all work. And no formula was changed for it: it was enough to
# know where a number lies, and to write down less.
#
# When the sequences are short, there is little to copy, and no memory to save. Then each
# operator costs its call, and what counts is how many there are:

# %%
few, called = 3 * torch.randn(5, 1, d_model), {}
for name, system in (("the core", core), ("fast", module)):
    run = Run(lambda system=system: system(query=few, key=few, value=few))
    print(f"{name:8} {len(run.events):3} operators, with those they call")
    called[name] = len(run.events)
assert called["fast"] < called["the core"]

# %% [markdown]
# ## What a kernel does not do
#
# A kernel is fast at what it was made for. On a CPU, PyTorch's was not made for
# dropout. Asked for it, `scaled_dot_product_attention` answers correctly, and without a
# word takes another way, on which all weights are written out after all. The fast
# module then computes [blockwise](../source/fast/attention.md#blockwise), with dropout
# of its own:

# %%
module.train()
q, k, v = fold(query)[None], fold(key)[None], fold(value)[None]
kernel = Run(lambda: scaled_dot_product_attention(q, k, v, dropout_p=0.1))
blocks = Run(lambda: module(query=x, key=x, value=x))
print(f"kernel alone:   {peak(kernel) / 2**20:4.0f} MiB at most")
print(f"fast, with all: {peak(blocks) / 2**20:4.0f} MiB at most")
assert peak(blocks) < table

# %% [markdown]
# Nor does a kernel show its weights. And each knows some masks better than others. So
# before you trust one, look at what it did, as on this page; names and shapes of
# operators are the same on a busy day.
#
# ## Which one, then?
#
# PyTorch's module is `nn.MultiheadAttention`; its kernel is
# `scaled_dot_product_attention`, of `torch.nn.functional`.
#
# | you want to | take | and mind that |
# |---|---|---|
# | understand it, change how it scores, watch its weights | [the core](../source/mha.md) | it keeps all weights of its last call |
# | have the same at speed; train with dropout on a CPU; decode with a cache | [the fast module](../source/fast/module.md) | it has no hooks to override, and returns weights only on request |
# | fit into a model made of PyTorch's layers | [its module](https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html) | its bool masks mean the opposite, and it writes out all weights unless it is told `need_weights=False` |
# | write a layer of your own | [its kernel](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html) | it shows no weights, and its `is_causal` lets the first query meet the first key: wrong with a cache |
# | change scores by a formula, or skip most of a mask, on a GPU | [FlexAttention](../source/masks/flex.md) | it knows no dropout, and writes out all scores unless it is compiled |
#
# How fast each of them is, at which sizes and on which machine, is [measured
# elsewhere](../compare/benchmarks.md), with more patience.
#
# ## Try it
#
# No kernel is needed for this: with `mended` as it is, see to it that the table of
# scores is never there, and that the output stays what it was. Does it take longer than
# all at once?


# %% fold="A few queries at a time"
# A row of weights sums to 1 over the keys, whatever the other rows are. So
# queries can be cut into pieces; keys and values cannot.
def in_pieces(query, key, value):
    pieces = [mended(rows, key, value) for rows in query.split(64)]
    return torch.cat(pieces)


calls = {
    "all at once": lambda: layer(mended),
    "in pieces": lambda: layer(in_pieces),
}
once, pieces = (call() for call in calls.values())
assert torch.allclose(once, pieces, rtol=1e-4, atol=1e-5)
seen = calmest(calls)
for name, run in seen.items():
    memory = f"{peak(run) / 2**20:3.0f} MiB at most"
    print(f"{name:11} {total(run):4.0f} ms, {memory}")
assert peak(seen["all at once"]) > 2 * table
assert peak(seen["in pieces"]) < table

# %% [markdown]
# The arithmetic is the same, and there are more calls. On the other hand a piece may
# still be in the cache when softmax comes for it, and when the second product does; and
# the next piece finds room where the last one was. [Tiles](../source/fast/attention.md#Tiles)
# are this idea, with one buffer for all pieces, less to compute under a causal mask, and
# [a backward pass](../source/fast/attention.md#Blockwise).
