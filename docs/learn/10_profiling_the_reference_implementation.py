# %% [markdown]
# # Profiling the reference implementation
#
# [The core module](../source/mha.md) is the reference implementation: it is written to
# be read. [The fast module](../source/fast/module.md) has the same parameters and gives
# the same results up to rounding, and both compute the same matrix products. Yet the
# core module takes longer. This lesson finds out why with PyTorch's profiler, and then
# changes the computation step by step until it is fast. After each step the output is
# asserted to be that of the core module. You need [sequence-first attention with
# einsum](08_sequence_first_with_einsum.md), strides in particular. Reading time: 20
# minutes.
#
# We use a batch of two sequences of 512 tokens and a layer of common size. Everything
# runs on one thread, so that the times of the parts add up, and without gradients.

# %%
import os

# Otherwise the profiler logs its start and stop.
os.environ.update(KINETO_LOG_LEVEL="6", TORCH_CPP_LOG_LEVEL="ERROR")

import torch
from IPython.display import Markdown, display
from torch.nn.functional import linear, scaled_dot_product_attention

from headnotes import MultiHeadAttention

torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(9)
length, batch_size, d_model, heads = 512, 2, 512, 8
core = MultiHeadAttention(heads, d_model).eval()
x = 3 * torch.randn(length, batch_size, d_model)

tokens = length * batch_size
projections = 4 * tokens * d_model**2
attention = 2 * tokens * length * d_model
print(f"four projections: {projections / 1e6:5,.0f} million multiplications")
print(f"two products:     {attention / 1e6:5,.0f} million")

# %% [markdown]
# ## Run the PyTorch profiler
#
# The profiler records each operator that PyTorch runs: its name, start and duration,
# the shapes of its inputs, the operator that called it, and the memory that was
# allocated and freed. This gives some hundred events, which we group into a few kinds.
# An operator without a kind of its own belongs to the kind of the operator that called
# it.

# %%
from itertools import accumulate

from torch.profiler import profile

KINDS = {
    "aten::addmm": "products",
    "aten::bmm": "products",
    "aten::baddbmm": "products",
    "aten::_softmax": "softmax",
    "aten::clone": "copies",
    "aten::scaled_dot_product_attention": "fused kernel",
}


class Run:
    """One profiled call: its operators in order of time, and the bytes allocated."""

    def __init__(self, call):
        with profile(record_shapes=True, profile_memory=True) as profiled:
            self.output = call()
        events = [event for event in profiled.events() if event.name != "[memory]"]
        self.events = sorted(events, key=lambda event: event.time_range.start)
        raw = profiled.profiler.kineto_results.events()
        changes = [event for event in raw if event.name() == "[memory]"]
        changes.sort(key=lambda event: event.start_ns())
        self.memory = list(accumulate(event.nbytes() for event in changes))


def kind(event):
    while event.name not in KINDS and event.cpu_parent:
        event = event.cpu_parent
    return KINDS.get(event.name, "other")


def total(run):
    """Milliseconds, from the start of the first operator to the end of the last."""
    end = max(event.time_range.end for event in run.events)
    return (end - run.events[0].time_range.start) / 1000


def time_by_kind(run):
    """Milliseconds, for each kind."""
    times = dict.fromkeys((*KINDS.values(), "other"), 0.0)
    for event in run.events:
        times[kind(event)] += event.self_cpu_time_total / 1000
    times["other"] += total(run) - sum(times.values())  # time between operators
    return {name: time for name, time in times.items() if time}


# %% [markdown]
# Other processes on the machine disturb a measurement, so a single time means little.
# We profile the calls that are to be compared in turn, several times, until the two
# shortest runs of each agree within 5 % (three rounds at most), and take the shortest.


# %%
def shortest(calls, rounds=3):
    """The shortest run of each call, out of at most so many."""
    runs = {name: [] for name in calls}
    for done in range(rounds):
        for name, call in calls.items():
            runs[name] = sorted([*runs[name], Run(call)], key=total)[:2]
        pairs = [[total(run) for run in found] for found in runs.values()]
        if done and all(second < 1.05 * first for first, second in pairs):
            break
    return {name: found[0] for name, found in runs.items()}


steps = {"core module": lambda: core(query=x, key=x, value=x)}
measured = shortest(steps)
for name, time in time_by_kind(measured["core module"]).items():
    print(f"{name:10} {time:6.1f} ms")

# %% fold="Plotting code"
import matplotlib.pyplot as plt

COLORS = {
    "products": "#2f86d6",
    "softmax": "#e69f00",
    "copies": "#d55e00",
    "fused kernel": "#009e73",
    "other": "#a0a0a0",
}


def draw(runs):
    """One row per run: its operators over time."""
    figure, ax = plt.subplots(figsize=(5.6, 1.05 + 0.3 * len(runs)))
    used = {"other": None}
    for row, run in enumerate(runs.values()):
        start = run.events[0].time_range.start
        ax.barh(row, total(run), 0.7, color=COLORS["other"])
        for event in run.events:  # a called operator is drawn over its caller
            if event.name in KINDS:
                left = (event.time_range.start - start) / 1000
                width = event.time_range.elapsed_us() / 1000
                ax.barh(row, width, 0.7, left, color=COLORS[kind(event)])
                used[kind(event)] = None
    ax.set_yticks(range(len(runs)), list(runs))
    ax.set(xlabel="milliseconds", ylim=(len(runs) - 0.5, -0.5))
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    for name in COLORS:
        if name in used:
            ax.barh(0, 0, color=COLORS[name], label=name)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    plt.show()


# %% alt="A timeline of the core module, one color per kind of operator: three projections, the first product, then a large copy and the softmax, then many small copies followed by the second product, and the output projection."
draw(measured)

# %% [markdown]
# From left to right: three projections, the scores, the softmax, the weighted sum of
# the values, and the output projection. The products and the softmax are the work of
# attention. The copies are not part of any formula: a large one before the softmax, and
# many small ones before the second product. No line of the core module asks for a copy.
# Where do they come from?
#
# ## Memory layout: strides cause the copies
#
# A tensor is a block of memory and its *strides*, the distances between neighbors along
# each axis. [Sequence-first attention with
# einsum](08_sequence_first_with_einsum.md#memory-layout-strides-of-an-einsum-result)
# looked at those of a small tensor. Here are the strides of the scores, and of the
# weights that softmax returns:

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
# The scores of a query are contiguous: along `j` the stride is 1. This is how a matrix
# product stores them, one matrix after another; `einsum` returns a permuted view,
# `[i, j, b, h]`.
#
# Softmax runs over `j`, which is contiguous. But PyTorch's softmax first makes its
# input contiguous in the order of its axes. It copies all scores into that order, in
# which two neighboring keys of a query are 16 numbers apart, and then reads memory with
# that stride. The second product needs matrices again and copies each of the 16 back.
# The profiler has the shapes of everything that was copied:


# %%
def copied(run):
    """How many numbers were copied."""
    copies = [event for event in run.events if event.name == "aten::clone"]
    return sum(torch.Size(copy.input_shapes[0]).numel() for copy in copies)


def peak(run):
    """The largest number of bytes allocated, in addition to those before the call."""
    return max(run.memory)


def report(run):
    print(f"numbers copied: {copied(run):10,}")
    print(f"peak memory:    {peak(run) / 2**20:6.0f} MiB")


scores_and_weights = 2 * scores.numel()
context = x.numel()  # flattened before the output projection
report(measured["core module"])
assert copied(measured["core module"]) == scores_and_weights + context

# %% [markdown]
# ## Step 1: keep the axes in memory order
#
# The smallest change is to ask `einsum` for the axes in the order of the memory,
# `[b, h, i, j]`. Then the keys are the last axis, and softmax has nothing to copy.


# %%
def layer(attend):
    """The core module, with another function between its projections."""
    query, key, value = core.query(x), core.key(x), core.value(x)
    return core.output(attend(query, key, value).flatten(-2))


def in_memory_order(query, key, value):
    scores = torch.einsum("ibhd,jbhd->bhij", query * core.scale, key)
    weights = scores.softmax(dim=-1)
    return torch.einsum("bhij,jbhd->ibhd", weights, value)


expected = core(query=x, key=x, value=x)


def check(call):
    """Assert that the output is that of the core module; report copies and memory."""
    run = Run(call)
    assert torch.allclose(run.output, expected, rtol=1e-4, atol=1e-5)
    report(run)
    return run


steps["memory order"] = lambda: layer(in_memory_order)
run = check(steps["memory order"])
assert copied(run) == context

# %% [markdown]
# The weights are still available in the order of the core module, as a view that costs
# nothing:

# %%
in_order = torch.einsum("ibhd,jbhd->bhij", query * core.scale, key)
in_order = in_order.softmax(dim=-1)
view = in_order.permute(2, 3, 0, 1)  # [i, j, b, h]
assert view.data_ptr() == in_order.data_ptr()
assert torch.allclose(view, weights, atol=1e-6)

# %% [markdown]
# The core module does not do this, so that all of its tensors have the same order of
# axes: softmax over `j` is written as softmax over `j`, beside a mask and weights in
# the same order. That makes it easier to read, and slower.
#
# ## Step 2: run softmax in place
#
# Besides the products, a softmax and one copy are left. Softmax reads one large tensor
# and writes another, so both are in memory at once. And new memory may cost time: the
# operating system may have to provide it page by page and fill each page with zeros.
# (Whether it does depends on the allocator and on what was allocated before, so the
# gain in the figure below varies.) Softmax can write into its own input instead.
#
# For this, we write out what `einsum` did. Batch items and heads are flattened into one
# axis of 16 matrices. This is a view, since these two axes are adjacent in memory; and
# a matrix product accepts a view as long as one of its axes has stride 1. The product
# can apply the scale too.


# %%
def flatten_batch(x):
    """`[seq_len, b, h, d]` as matrices: `[b * h, seq_len, d]`."""
    return x.flatten(1, 2).transpose(0, 1)


def unflatten_batch(x):
    return x.transpose(0, 1).unflatten(1, (batch_size, heads))


def in_place(query, key, value):
    q, k, v = flatten_batch(query), flatten_batch(key), flatten_batch(value)
    scores = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=core.scale)
    weights = torch.softmax(scores, dim=-1, out=scores)
    return unflatten_batch(weights @ v)


assert flatten_batch(query).data_ptr() == query.data_ptr()
steps["in place"] = lambda: layer(in_place)
run = check(steps["in place"])

# %% [markdown]
# This works for inference only: with gradients, autograd refuses `out=`.
#
# ## Step 3: use a fused kernel (SDPA)
#
# How many tables of the size of the scores did each step have in memory at once?

# %%
table = 4 * scores.numel()  # bytes
print(f"a table of scores: {table / 2**20:.0f} MiB")
assert 3 * table < peak(measured["core module"])  # scores, their copy, weights
assert 2 * table < peak(Run(steps["memory order"])) < 3 * table
assert table < peak(run) < 2 * table

# %% [markdown]
# Even one table is a lot: for twice the length it is four times as large, and at some
# length larger than any cache. But the context vector of a query needs only its own row
# of weights, and only while it is computed. So one can process a few queries at a time
# and discard their weights before the next. With an [online
# softmax](../source/variants/online_softmax.md), which corrects a running sum, not even
# a whole row is needed at once. The fused kernel behind PyTorch's
# `scaled_dot_product_attention` (SDPA) does this, from the first product to the second,
# and it accepts our flattened views.


# %%
def fused(query, key, value):
    q, k, v = (flatten_batch(part)[None] for part in (query, key, value))
    return unflatten_batch(scaled_dot_product_attention(q, k, v)[0])


steps["fused kernel"] = lambda: layer(fused)
run = check(steps["fused kernel"])
assert copied(run) == 0
assert peak(run) < table
assert round(peak(run) / (4 * x.numel())) == 5

# %% [markdown]
# Nothing is copied: the kernel stores its result sequence first, so even the `flatten`
# before the output projection is a view. And the table of scores is gone. What is left
# are queries, keys, values, context vectors and outputs: five tensors of the size of
# the input. They grow linearly with the length, not quadratically.
#
# In inference, [the fast module](../source/fast/module.md) runs exactly these
# operators. It adds masks, dropout, causal attention, a KV cache, returned weights, and
# the input checks of the core module.

# %%
from headnotes import fast

module = fast.MultiHeadAttention(heads, d_model).eval()
module.load_state_dict(core.state_dict())
steps["fast module"] = lambda: module(query=x, key=x, value=x)


def operators(run):
    return [event.name for event in run.events if event.name in KINDS]


ours, theirs = operators(run), operators(check(steps["fast module"]))
print(*theirs, sep="\n")
assert theirs == ours

# %% [markdown]
# ## Why not one QKV projection instead of three?
#
# In self-attention, queries, keys and values are three products with the same input.
# With stacked weights, they are one:

# %%
parts = [part.linear for part in (core.query, core.key, core.value)]
weight = torch.cat([part.weight for part in parts])
bias = torch.cat([part.bias for part in parts])


def project(x):
    stacked = linear(x, weight, bias)
    return stacked.unflatten(-1, (3, heads, -1)).unbind(2)


for one, part in zip(project(x), (core.query, core.key, core.value), strict=True):
    assert torch.allclose(one, part(x), atol=1e-5)

# %% [markdown]
# This saves two products, which matters for short sequences; many modules, such as
# PyTorch's, store the stacked weight only. But a stacked *copy* beside the three
# weights becomes stale as soon as one of them changes:

# %%
before = project(x)[0]
core.query.linear.weight.data.mul_(2)
assert torch.equal(project(x)[0], before)  # the copy has not changed
assert not torch.allclose(core.query(x), before)
_ = core.query.linear.weight.data.div_(2)

# %% [markdown]
# An optimizer, a moving average of the weights or another process may change them at
# any time, and not every change can be detected. The fast module once had such a copy
# and returned wrong results because of it. Now it has the three projections of the core
# module and nothing else. The [benchmarks](../compare/benchmarks.md) show what this
# costs.
#
# ## Results: time, copies and peak memory
#
# Here are all steps, measured in turn on the machine that built this page. The times
# depend on the machine and its load; the copies and the memory do not.

# %%
measured = shortest(steps)

# %% alt="One timeline per step, from the core module to the fast module, with the operators in order of time. From row to row the copies disappear, then part of the softmax, then both products and the softmax become one fused kernel; the projections take the same time in each row."
draw(measured)

# %% fold="Code of the table"
rows = ["|step|ms|numbers copied|peak MiB|", "|---|--:|--:|--:|"]
for name, run in measured.items():
    mebibytes = f"{peak(run) / 2**20:.0f}"
    rows.append(f"|{name}|{total(run):.0f}|{copied(run):,}|{mebibytes}|")

# %%
display(Markdown("\n".join(rows)))

# %% [markdown]
# No formula was changed: only the memory layout, and the number of intermediate
# tensors.
#
# For short sequences, there is little to copy and no memory to save. Then the overhead
# of calling operators counts, and with it their number:

# %%
few, counts = 3 * torch.randn(5, 1, d_model), {}
for name, system in (("core module", core), ("fast module", module)):
    run = Run(lambda system=system: system(query=few, key=few, value=few))
    print(f"{name}: {len(run.events):3} operators, including those called by others")
    counts[name] = len(run.events)
assert counts["fast module"] < counts["core module"]

# %% [markdown]
# ## Limits of the fused kernel: dropout and returned weights
#
# PyTorch's fused kernel for CPUs does not support dropout. With dropout,
# `scaled_dot_product_attention` returns a correct result, but silently uses an
# implementation that stores all weights. The fast module then computes
# [blockwise](../source/fast/blockwise.md#blockwise), with dropout of its own:

# %%
module.train()
q, k, v = (flatten_batch(part)[None] for part in (query, key, value))
kernel = Run(lambda: scaled_dot_product_attention(q, k, v, dropout_p=0.1))
blocks = Run(lambda: module(query=x, key=x, value=x))
print(f"scaled_dot_product_attention: {peak(kernel) / 2**20:4.0f} MiB at peak")
print(f"fast, projections included:   {peak(blocks) / 2**20:4.0f} MiB at peak")
assert peak(blocks) < table < peak(kernel)

# %% [markdown]
# Fused kernels do not return attention weights either, and each supports some masks
# better than others. So profile what a kernel really does, as on this page. Unlike
# times, the names and shapes of operators do not depend on the load of the machine.
#
# ## Which implementation to use
#
# | purpose | implementation | note |
# |---|---|---|
# | understand attention, change the scores, look at the weights | [the core module](../source/mha.md) | keeps all weights of its last call |
# | the same function at full speed; training with dropout on a CPU; decoding with a KV cache | [the fast module](../source/fast/module.md) | has no hooks to override; returns weights only on request |
# | a layer in a model made of PyTorch modules | [`nn.MultiheadAttention`](https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html) | bool masks have the opposite polarity; stores all weights unless `need_weights=False` |
# | a layer of your own | [PyTorch's SDPA](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html) | returns no weights; `is_causal` aligns the first query with the first key, which is wrong with a KV cache |
# | scores changed by a formula, or mostly masked, on a GPU | [FlexAttention](../source/masks/flex.md) | has no dropout; stores all scores unless compiled |
#
# The [benchmarks](../compare/benchmarks.md) compare their speed, by size and machine.
#
# ## Try it: chunk the queries
#
# Use `in_memory_order` as it is, without a fused kernel, such that the whole table of
# scores is never in memory and the output is the same. Does it take longer?


# %% fold="Answer"
# A row of weights sums to 1 over the keys, whatever the other rows are. So the
# queries can be split into chunks; the keys and values cannot.
def chunked(query, key, value):
    chunks = [in_memory_order(rows, key, value) for rows in query.split(64)]
    return torch.cat(chunks)


calls = {
    "all at once": lambda: layer(in_memory_order),
    "chunked": lambda: layer(chunked),
}
once, chunks = (call() for call in calls.values())
assert torch.allclose(once, chunks, rtol=1e-4, atol=1e-5)
measured = shortest(calls)
for name, run in measured.items():
    print(f"{name:11} {total(run):4.0f} ms, {peak(run) / 2**20:3.0f} MiB at peak")
assert peak(measured["all at once"]) > 2 * table
assert peak(measured["chunked"]) < table

# %% [markdown]
# The arithmetic is the same, with more calls. But the scores of a chunk may still be in
# the cache when softmax and the second product read them, and the next chunk can reuse
# the memory of the last. [Tiles](../source/fast/blockwise.md#Tiles) in the fast module
# implement this idea with one buffer for all chunks, less work under a causal mask, and
# [a backward pass](../source/fast/blockwise.md#Blockwise).
#
# ## In short
#
# - The core module is slow mainly because of copies: `einsum` returns a permuted view,
#   and softmax and the second product each copy it into another order.
# - Keeping the axes in memory order removes these copies; softmax in place removes a
#   table of scores; a fused kernel removes the last one, and memory grows linearly.
# - A stacked copy of weights can become stale.
# - Fused kernels have limits, such as dropout on CPUs. The profiler shows which
#   operators run, what they copy and how much memory they use.
#
# Next: what a generated token costs, with and without a [KV cache](11_kv_cache.md).
