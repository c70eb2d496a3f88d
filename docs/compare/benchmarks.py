# %% [markdown]
# # Benchmarks
#
# How fast is it, and compared with what? All that is timed here computes the same
# function: the same weights, the same tokens, and answers that were compared before the
# clock started. Whoever answers otherwise, or not at all, is [left out](#left-out), with
# the reason. Nothing on this page was measured when it was built. It is drawn from
# records, and each figure says whose.
#
# ## How to read it
#
# A number such as **1.25** says how many times as fast as `nn.MultiheadAttention` with
# `need_weights=False` somebody was, in the same rounds of [a fair
# contest](../source/attention_bench/timing.md): more is better, and differences of 2 % or less
# are ties. A size such as `4 × 512` is a batch of 4 sentences of 512 tokens. All are 512
# wide, with 8 heads, unless it is said otherwise. Where much is to be computed, what is
# reached is given as a share of what [the machine](../source/attention_bench/machine.md) can do at
# best, measured in the same minutes: the rate at which it multiplies large matrices, or
# copies memory, whichever is the limit. With a causal mask only the needed half counts.

# %% fold="How it is drawn"
import math
from collections import Counter
from pathlib import Path
from statistics import median
from textwrap import indent

import matplotlib.pyplot as plt
from IPython.display import Markdown, display

from attention_bench.record import duration, from_json
from attention_bench.timing import verdict

INK = "#123456"
STYLE = {
    "fast": ("#d55e00", "o"),
    "nn": (INK, "."),
    "nn-weights": ("#009e73", "^"),
    "sdpa": ("#2f86d6", "s"),
    "core": ("#b565a7", "D"),
}
MASKS = {"none": "no mask", "causal": "causal", "padding": "padding"}

# The columns of the tables: those of the figures, then all others.
FIRST = ("nn", "fast", "sdpa", "core", "fast-weights", "nn-weights")
OTHERS = ("nn-fastpath", "causal", "valid_lens", "batch_first")
OTHERS += ("gpt2", "bert", "llama", "x-transformers", "flex")

files = sorted(Path("../../benchmarks/results").glob("*.json"))
runs = [
    from_json(file.read_text(encoding="utf-8"))
    for file in files
    if not file.stem.startswith("equivalence")
]
runs.sort(key=lambda run: run.dtype != "float32")


def recorded(question):
    """The runs of a question, one a machine and dtype."""
    found = [run for run in runs if run.question == question]
    if not found:
        how = f"python benchmarks/{question}.py"
        display(Markdown(f"*Not recorded yet; `{how}` does it.*"))
    return found


def drawn(run):
    """Whether a machine is drawn: once a question, its other dtypes are in numbers."""
    same = (run.question, run.machine["device"])
    known = next(r for r in runs if (r.question, r.machine["device"]) == same)
    return run.dtype == known.dtype


def machine(run):
    """Machine, dtype, versions and date in a line."""
    about = run.machine
    threads = f"{about['threads']} thread{'s' * (about['threads'] > 1)}, "
    where = about["device"] + f", {threads}" * (about["kind"] == "cpu")
    return f"{where.strip(', ')}, {run.dtype}, torch {about['torch']}, {about['date']}"


def size(cell):
    return f"{cell.setting['batch_size']} × {cell.setting['seq_len']:,}"


def lines(ax, cells, value):
    """A line through the sizes for each contestant of the figures."""
    sizes = [size(cell) for cell in cells]
    for name, (colour, marker) in STYLE.items():
        found = [cell.results.get(name) for cell in cells]
        values = [value(one) if one else math.nan for one in found]
        ax.plot(sizes, values, color=colour, marker=marker, ms=4, label=name)
    ax.tick_params(axis="x", rotation=90)
    ax.set_xlabel("batch size × length")


def draw(run, value, title, label):
    """A panel a mask and chance of dropout, a line a contestant."""
    if not drawn(run):
        return

    def panel(cell):
        chance = cell.setting["dropout"]
        return chance, MASKS[cell.setting["mask"]] + f", dropout {chance:g}" * bool(
            chance
        )

    panels = sorted(dict.fromkeys(map(panel, run.cells)), key=lambda one: one[0])
    rows = -(-len(panels) // 3)
    figure, axes = plt.subplots(
        rows, 3, figsize=(7, 0.9 + 2.5 * rows), sharey=True, squeeze=False
    )
    figure.suptitle(f"{title}\n{machine(run)}", size="medium")
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    for ax, one in zip(axes.flat, panels, strict=False):
        lines(ax, [cell for cell in run.cells if panel(cell) == one], value)
        ax.set_title(one[1])
    first = axes[0][0]
    if value is ratio:
        first.set_yscale("log", base=2)
        first.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    else:
        first.set_ylim(0, 1)
        first.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    for ax in axes[:, 0]:
        ax.set_ylabel(label)
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=5, loc="outside lower center")
    plt.show()


def ratio(found):
    return found["ratio"]


def reached(found):
    """The share of the nearer ceiling."""
    return max(found["of_matmul"], found["of_copy"])


# What stands in a table: a dash for who is not there, a tie in italics.
def number(found):
    if not found:
        return "–"
    text = f"{found['ratio']:.2f}"
    return f"*{text}*" if verdict(found["ratio"]) == "tie" else text


def time_of(found):
    return duration(found["seconds"]) if found else "–"


def share(found):
    return f"{reached(found):.0%}" if found else "–"


def row_of(cell):
    """A cell in few words, for the first column of a table."""
    said = cell.setting
    mask = f", {MASKS[said['mask']]}" * (said["mask"] != "none")
    dropout = f", dropout {said['dropout']:g}" * bool(said["dropout"])
    return f"{size(cell)}{mask}{dropout}"


def table(run, entry, names, head="batch size × length"):
    """A row a cell, a column a contestant, where there is anything to be shown."""
    known = {name for cell in run.cells for name in cell.results}
    names = [name for name in names if name in known]
    # Of the baseline, whose ratio is 1, the time is shown.
    entries = dict.fromkeys(names, entry)
    titles = {name: f"`{name}`" for name in names}
    if entry is number and run.baseline in names:
        entries[run.baseline] = time_of
        titles[run.baseline] += ", time"
    rows = [f"|{head}|" + "|".join(titles.values()) + "|"]
    rows.append("|---" + "|--:" * len(names) + "|")
    for cell in run.cells:
        shown = [entries[name](cell.results.get(name)) for name in names]
        rows.append(f"|{row_of(cell)}|" + "|".join(shown) + "|")
    text = "\n".join(rows)
    if not drawn(run):
        head = f'??? info "In {run.dtype}: {", ".join(names)}"\n\n'
        text = head + indent(text, "    ")
    if names:
        display(Markdown(text))


def again(run):
    """The command that measures it once more."""
    commit = run.machine["commit"] or "unknown"
    line = f"`{run.command}`, {run.seconds:.0f} seconds: {machine(run)}"
    display(Markdown(f"{line}, commit {commit}"))


def losses(question, name="fast"):
    """Where somebody else is faster by more than a tie."""
    for run in recorded(question):
        rows = []
        for cell in run.cells:
            ours = cell.results.get(name)
            times = {
                other: found["ratio"] / ours["ratio"]
                for other, found in cell.results.items()
                if ours
            }
            who = ", ".join(
                f"`{other}` {times[other]:.2f}"
                for other in sorted(times, key=times.get, reverse=True)
                if verdict(times[other]) == "faster"
            )
            if who:
                rows.append(f"|{row_of(cell)}|{who}|")
        head = f"|where|who, and how many times as fast as `{name}`|"
        shown = "\n".join(["", head, "|---|---|", *rows]) if rows else "Nowhere."
        display(Markdown(f"{machine(run)}:\n{shown}"))


# %% [markdown]
# ## The machines

# %% hide="true"
rows = {}
for run in runs:
    about = run.machine
    ceilings = ("", "")
    if "flops_per_second" in about:
        ceilings = (
            f"{about['flops_per_second'] / 1e9:,.0f}",
            f"{about['bytes_per_second'] / 1e9:,.0f}",
        )
        key = (about["device"], about["threads"], run.dtype)
        libraries = ", ".join(f"{k} {v}" for k, v in about["libraries"].items())
        rows[key] = "|".join(
            [
                about["device"],
                str(about["threads"]),
                f"{about['memory_gib']:.0f}",
                run.dtype,
                *ceilings,
                f"torch {about['torch']}, Python {about['python']}, {libraries}",
                about["system"],
            ]
        )
head = "|device|threads|GiB|dtype|GFLOP/s|GB/s|versions|system|"
rule = "|---|--:|--:|---|--:|--:|---|---|"
display(Markdown("\n".join([head, rule, *(f"|{row}|" for row in rows.values())])))

# %% [markdown]
# GFLOP/s is the measured rate of products of large matrices, GB/s that of a copy, each
# byte counted when it is read and when it is written.
#
# ## A forward pass
#
# In inference mode. [`fast`](../source/fast/module.md) has the weights, the masks and the
# answers of the [readable core](../source/mha.md), and `fast-weights` returns their mean
# over the heads; `nn` and `nn-weights` are PyTorch's module without the weights and with
# them; `sdpa` is one projection, PyTorch's kernel, and another projection, with nothing
# around it.

# %% hide="true" alt="Lines over the sizes, a panel a mask: how many times as fast as nn.MultiheadAttention each contestant is in a forward pass. The tables beneath have the numbers."
for run in recorded("inference"):
    draw(run, ratio, "A forward pass", "times as fast as nn")
    table(run, number, FIRST)
    if drawn(run):
        table(run, number, OTHERS)
    again(run)

# %% [markdown]
# How much of the machine that is:

# %% hide="true" alt="Lines over the sizes, a panel a mask: the share of the measured ceiling that each contestant reaches in a forward pass. The table beneath has the numbers."
for run in filter(drawn, recorded("inference")):
    draw(run, reached, "A forward pass", "of the ceiling")
    table(run, share, STYLE)
    again(run)

# %% [markdown]
# Nobody reaches the ceiling. A head is narrow, and its products are too thin for the
# units that multiply; and a softmax has an exponential for each score, which is no
# product at all. How near to the bare kernel `fast` comes:

# %% hide="true"
for run in recorded("inference"):
    beside = [
        cell.results["fast"]["ratio"] / cell.results["sdpa"]["ratio"]
        for cell in run.cells
        if {"fast", "sdpa"} <= set(cell.results)
    ]
    if beside:
        reach = f"{min(beside):.2f} to {max(beside):.2f} times as fast as `sdpa`"
        middle = f"{median(beside):.2f} in the middle"
        display(Markdown(f"`fast` is {reach}, {middle}: {machine(run)}"))

# %% [markdown]
# **Where `fast` loses** to anybody, by more than 2 %:

# %% hide="true"
losses("inference")

# %% [markdown]
# ## A training step
#
# A forward and a backward pass, with gradients for the input and all weights, and no
# optimizer, which would cost everybody the same. Dropout is what differs most: with it,
# `scaled_dot_product_attention` leaves its fast path on a CPU.

# %% hide="true" alt="Lines over the sizes, a panel a mask and chance of dropout: how many times as fast as nn.MultiheadAttention each contestant is in a training step. The table beneath has the numbers."
for run in recorded("training"):
    draw(run, ratio, "A training step", "times as fast as nn")
    table(run, number, FIRST + OTHERS * drawn(run))
    again(run)

# %% hide="true" alt="Lines over the sizes, a panel a mask and chance of dropout: the share of the measured ceiling that each contestant reaches in a training step. The table beneath has the numbers."
for run in filter(drawn, recorded("training")):
    draw(run, reached, "A training step", "of the ceiling")
    table(run, share, STYLE)
    again(run)

# %% [markdown]
# **Where `fast` loses** to anybody, by more than 2 %:

# %% hide="true"
losses("training")

# %% [markdown]
# ## One more token
#
# Each step projects a token, reads the cache, and projects again. `sdpa` and `bmm` are
# bare kernels, on a cache that has room and lies head by head; `nn` keeps no cache, and
# projects the whole text again. [Decoders](../source/attention_bench/decoding.md) tells what the
# others do. The figure says how many times as long a step takes as that of `sdpa`, the
# table how many times as fast it is.

# %% hide="true" alt="Points, a row a decoder and a colour a size of the cache: how many times as long as the bare kernel one more token takes, on a logarithmic axis. The table beneath has the numbers."
DECODERS = ("sdpa", "fast", "bmm", "cat", "gpt2", "x-transformers", "nn")


def points(run):
    """A row a decoder, a colour a size of the cache."""
    if not drawn(run):
        return
    ax = plt.subplots(figsize=(7, 2.8))[1]
    names = [n for n in DECODERS if any(n in cell.results for cell in run.cells)]
    for cell, (colour, marker) in zip(run.cells, STYLE.values(), strict=False):
        there = [name for name in names if name in cell.results]
        times = [1 / ratio(cell.results[name]) for name in there]
        label = f"batch {cell.setting['batch_size']}, {cell.setting['seq_len']:,} keys"
        ax.plot(times, [names.index(name) for name in there], marker, color=colour)
        ax.lines[-1].set(markersize=5, label=label)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.axvline(1, color=INK, lw=0.5)
    ax.set_xscale("log")
    ax.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    ax.minorticks_off()
    ax.set_xlabel("times as long as sdpa")
    ax.set_title(f"One more token\n{machine(run)}")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()


for run in recorded("decode"):
    points(run)
    table(run, number, DECODERS, head="batch size × keys")
    again(run)

# %% [markdown]
# **Where `fast` loses** to anybody, by more than 2 %:

# %% hide="true"
losses("decode")

# %% [markdown]
# ## Memory
#
# What a call needs at most above what was in use before it, in a process of its own: of
# a GPU the allocator tells it, on a CPU the operating system. *Kept* is what is still in
# use when the result has been dropped: the core keeps its weights to be looked at. The
# power is the $p$ of the $n^p$ that fits best over all lengths shown.


# %% hide="true" alt="Lines over the length, both axes logarithmic, a panel for forward passes and one for training steps: the peak memory of a call for each contestant, with the fitted power. The table beneath has the numbers."
def mode_of(cell):
    return "training" if cell.setting["training"] else "inference"


def growth(run, what, key, unit, label):
    """Amounts over lengths, both logarithmic, a panel a mode."""
    if not drawn(run):
        return
    modes = list(dict.fromkeys(mode_of(cell) for cell in run.cells))
    width = 7 if len(modes) > 1 else 6
    figure, axes = plt.subplots(
        1, len(modes), figsize=(width, 3.2), sharey=True, squeeze=False
    )
    figure.suptitle(machine(run), size="medium")
    for ax, mode in zip(axes[0], modes, strict=True):
        cells = [cell for cell in run.cells if mode_of(cell) == mode]
        powers = run.exponents.get(f"{what} of {mode}", {})
        for name, (colour, marker) in STYLE.items():
            xs = [c.setting["seq_len"] for c in cells if name in c.results]
            ys = [c.results[name][key] / unit for c in cells if name in c.results]
            if xs:
                power = f", power {powers[name]:.2f}" if name in powers else ""
                ax.loglog(xs, ys, color=colour, marker=marker, ms=4)
                ax.lines[-1].set_label(name + power)
        ticks = [c.setting["seq_len"] for c in cells]
        ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
        ax.minorticks_off()
        ax.set_title(f"{what}, {mode}")
        ax.set_xlabel("length")
        ax.legend(frameon=False)
    axes[0][0].set_ylabel(label)
    plt.show()


def mebibytes(found):
    """The peak, and what is kept of it."""
    if not found:
        return "–"
    kept = f", {found['kept'] / 2**20:,.0f} kept" * (found["kept"] >= 4 * 2**20)
    return f"{found['peak'] / 2**20:,.0f}{kept}"


for run in recorded("memory"):
    growth(run, "memory", "peak", 2**20, "MiB at most")
    for mode in dict.fromkeys(mode_of(cell) for cell in run.cells):
        display(Markdown(f"MiB at most, {mode}:"))
        part = [cell for cell in run.cells if mode_of(cell) == mode]
        table(type(run)(**vars(run) | {"cells": part}), mebibytes, STYLE)
    again(run)

# %% [markdown]
# ## Growth with the length
#
# Projections grow with the length, scores with its square: what is measured lies in
# between, and nearer to 2 the more of the time the scores take.

# %% hide="true" alt="Lines over the length, both axes logarithmic: the time of a forward pass for each contestant, with the fitted power. The table beneath has the numbers."
for run in recorded("growth"):
    growth(run, "time", "seconds", 1e-3, "milliseconds")
    table(run, time_of, STYLE)
    again(run)

# %% [markdown]
# ## Tiny tensors
#
# A width of 64, at most 12 tokens, one thread: nothing to compute. What is left is the
# cost of each operator that Python dispatches, so these are counted too, with all views.
# In each cell: the time of a call, how many times as fast as `nn` that is, and the
# number of operators.

# %% hide="true"
for run in recorded("tiny"):
    rows = ["|who|" + "|".join(row_of(cell) for cell in run.cells) + "|"]
    rows.append("|---" + "|--:" * len(run.cells) + "|")
    for name in (*FIRST, *OTHERS):
        found = [cell.results.get(name) for cell in run.cells]
        entries = [
            f"{time_of(one)}, {number(one)}, {one['operators']:.0f}" if one else "–"
            for one in found
        ]
        if any(found):
            rows.append(f"|`{name}`|" + "|".join(entries) + "|")
    display(Markdown("\n".join(rows)))
    again(run)

# %% [markdown]
# **Where `fast` loses** to anybody, by more than 2 %:

# %% hide="true"
losses("tiny")

# %% [markdown]
# ## Who takes part
#
# Each is told of the mask in the best way that it offers. `valid_lens`, `causal` and
# `batch_first` are [as others write it](../source/implementations/batch_first.md), with
# the weights of the core; how those of other packages are made comparable is said
# [on their page](../source/attention_bench/peers.md).

# %% hide="true"
from attention_bench.contestants import CONTESTANTS
from attention_bench.peers import PEERS

rows = ["|name|what it is|told of a causal mask|of padding|", "|---|---|---|---|"]
summaries = {
    "core": "the readable page",
    "fast": "the same at full speed",
    "fast-weights": "and its weights, averaged over heads",
    "causal": "batch first, always causal",
    "valid_lens": "heads folded into the batch",
    "batch_first": "batch first, with the weights of each head",
    "nn": "`nn.MultiheadAttention`, `need_weights=False`",
    "nn-weights": "`nn.MultiheadAttention` as it comes",
    "nn-fastpath": "the same, batch first: its path for inference",
    "sdpa": "`scaled_dot_product_attention` between two projections",
    "flex": "FlexAttention between two projections, compiled",
    "gpt2": "`GPT2Attention` of `transformers`",
    "bert": "`BertSelfAttention` of `transformers`",
    "llama": "`LlamaAttention` of `transformers`",
    "x-transformers": "`Attention` of `x-transformers`",
}
for name, one in (CONTESTANTS | PEERS).items():
    told = [one.told.get(mask, "–") for mask in ("causal", "padding")]
    rows.append(f"|`{name}`|{summaries[name]}|{told[0]}|{told[1]}|")
display(Markdown("\n".join(rows)))

# %% [markdown]
# ## Left out

# %% hide="true"
why = Counter(
    (run.question, name, reason)
    for run in runs
    for cell in run.cells
    for name, reason in cell.left_out.items()
)
rows = [f"|{q}|`{n}`|{r}|{count}|" for (q, n, r), count in why.items()]
head = "|question|who|why|cells|\n|---|---|---|--:|\n"
display(Markdown(head + "\n".join(rows) if rows else "Nobody was left out."))

# %% [markdown]
# Not asked at all, because one would wait for minutes to see the slowest once more: of
# those that hold all scores at once, training steps beyond 2,048 tokens and forward
# passes beyond 4,096; of the implementations *as others write it*, anything beyond
# 1,024.
#
# ## On your machine
#
# ```console
# $ pip install headnotes[bench]
# $ headnotes bench --quick
# $ headnotes bench inference --device cuda --dtype bfloat16
# ```
#
# The first command is for `transformers` and `x-transformers`, which take part where
# they are installed. In a clone, `python benchmarks/run.py` asks all questions, which
# takes some ten minutes on two cores, and writes the records that this page is drawn
# from; `python benchmarks/inference.py` asks one. What can be said is told
# [here](../source/attention_bench/cli.md).
