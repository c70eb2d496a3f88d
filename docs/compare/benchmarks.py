# %% [markdown]
# # Benchmarks
#
# This page compares the speed and the memory of implementations of multi-head attention,
# for those who choose one. All of them compute the same function: they have the same
# weights and the same input, and their outputs were [compared before the clock
# started](../source/attention_bench/equal.md). An implementation that computes something
# else, or fails, is [skipped](#skipped), with the reason. Nothing is measured when this
# page is built: it is made from records, and each figure names the machine.

# %% fold="The code of the tables and figures"
import math
from collections import Counter
from pathlib import Path
from statistics import geometric_mean, median
from textwrap import indent

import matplotlib.pyplot as plt
from IPython.display import Markdown, display

from attention_bench.report import duration, from_json
from attention_bench.timing import TIE, classify_speedup, fit_exponent

INK = "#123456"
STYLE = {
    "fast": ("#d55e00", "o"),
    "nn": (INK, "."),
    "nn-weights": ("#009e73", "^"),
    "sdpa": ("#2f86d6", "s"),
    "core": ("#b565a7", "D"),
}
MASKS = {"none": "no mask", "causal": "causal", "padding": "padding"}

# The columns of the tables: first the main implementations, then all others.
MAIN = ("nn", "fast", "sdpa", "core", "fast-weights", "nn-weights")
OTHERS = ("nn-fastpath", "causal", "valid_lens", "batch_first")
OTHERS += ("gpt2", "bert", "llama", "x-transformers", "flex")

records = [
    from_json(file.read_text(encoding="utf-8"))
    for file in sorted(Path("../../benchmarks/results").glob("*.json"))
    if not file.stem.startswith("equivalence")
]
records.sort(key=lambda record: record.dtype != "float32")


def records_of(suite):
    """The records of a suite: one for each machine and dtype."""
    found = [record for record in records if record.suite == suite]
    if not found:
        command = f"headnotes bench {suite} --results benchmarks/results"
        display(Markdown(f"*Not recorded yet; `{command}` measures it.*"))
    return found


def is_drawn(record):
    """Whether a record has figures: only the first dtype of each machine has."""
    same = (record.suite, record.machine["device"])
    first = next(r for r in records if (r.suite, r.machine["device"]) == same)
    return record.dtype == first.dtype


def machine(record):
    """Device, dtype, version and date in one line."""
    about = record.machine
    parts = [about["device"]]
    if about["device_type"] == "cpu":
        parts.append(f"{about['threads']} thread{'s' * (about['threads'] > 1)}")
    parts += [record.dtype, f"torch {about['torch']}", about["date"]]
    return ", ".join(parts)


def size(cell):
    return f"{cell.setting['batch_size']} × {cell.setting['seq_len']:,}"


def plot_lines(ax, cells, value):
    """Plot a line over the sizes for each main implementation."""
    sizes = [size(cell) for cell in cells]
    for name, (color, marker) in STYLE.items():
        results = [cell.results.get(name) for cell in cells]
        values = [value(result) if result else math.nan for result in results]
        ax.plot(sizes, values, color=color, marker=marker, ms=4, label=name)
    ax.tick_params(axis="x", rotation=90)
    ax.set_xlabel("batch size × length")


def draw(record, value, title, label):
    """Draw one panel for each mask and dropout probability."""
    if not is_drawn(record):
        return

    def panel(cell):
        dropout = cell.setting["dropout"]
        name = MASKS[cell.setting["mask"]]
        return dropout, f"{name}, dropout {dropout:g}" if dropout else name

    panels = sorted(dict.fromkeys(map(panel, record.cells)), key=lambda one: one[0])
    rows = -(-len(panels) // 3)
    figure, axes = plt.subplots(
        rows, 3, figsize=(7, 0.9 + 2.5 * rows), sharey=True, squeeze=False
    )
    figure.suptitle(f"{title}\n{machine(record)}", size="medium")
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    for ax, one in zip(axes.flat, panels, strict=False):
        plot_lines(ax, [cell for cell in record.cells if panel(cell) == one], value)
        ax.set_title(one[1])
    first = axes[0][0]
    if value is speedup:
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


def speedup(result):
    return result["speedup"]


def utilization(result):
    """The share of the closer one of the two peak rates."""
    return max(result["flops_utilization"], result["bandwidth_utilization"])


# Entries of tables: a dash for an implementation without a result, a tie in italics.
def speedup_entry(result):
    if not result:
        return "–"
    text = f"{speedup(result):.2f}"
    return f"*{text}*" if classify_speedup(speedup(result)) == "tie" else text


def time_entry(result):
    return duration(result["seconds"]) if result else "–"


def utilization_entry(result):
    return f"{utilization(result):.0%}" if result else "–"


def row_title(cell):
    """The first column of a table: size, mask and dropout."""
    parts = [size(cell)]
    if cell.setting["mask"] != "none":
        parts.append(MASKS[cell.setting["mask"]])
    if cell.setting["dropout"]:
        parts.append(f"dropout {cell.setting['dropout']:g}")
    return ", ".join(parts)


def table(record, entry, names, head="batch size × length"):
    """Show a table: a row for each setting, a column for each implementation."""
    known = {name for cell in record.cells for name in cell.results}
    names = [name for name in names if name in known]
    entries = dict.fromkeys(names, entry)
    titles = {name: f"`{name}`" for name in names}
    # The speedup of the baseline is always 1, so its time is shown instead.
    if entry is speedup_entry and record.baseline in names:
        entries[record.baseline] = time_entry
        titles[record.baseline] += ", time"
    rows = [f"|{head}|" + "|".join(titles.values()) + "|"]
    rows.append("|---" + "|--:" * len(names) + "|")
    for cell in record.cells:
        shown = [entries[name](cell.results.get(name)) for name in names]
        rows.append(f"|{row_title(cell)}|" + "|".join(shown) + "|")
    text = "\n".join(rows)
    if not is_drawn(record):
        title = f'??? info "In {record.dtype}: {", ".join(names)}"\n\n'
        text = title + indent(text, "    ")
    if names:
        display(Markdown(text))


def show_command(record):
    """Show the command that measures the record again."""
    commit = record.machine["commit"] or "unknown"
    line = f"`{record.command}`, {record.seconds:.0f} seconds: {machine(record)}"
    display(Markdown(f"{line}, commit {commit}"))


def summarize(suite, name="fast"):
    """Show in how many settings an implementation is as fast as the baseline."""
    rows = []
    for record in records_of(suite):
        by_dropout = {"all settings": []}
        for cell in record.cells:
            if "speedup" in cell.results.get(name, {}):
                dropout = f"dropout {cell.setting['dropout']:g}"
                for group in ("all settings", dropout):
                    by_dropout.setdefault(group, []).append(cell.results[name])
        if len(by_dropout) == 2:  # one dropout only: it is the same as all settings
            by_dropout.popitem()
        for group, results in by_dropout.items():
            speedups = [speedup(result) for result in results]
            if speedups:
                as_fast = sum(classify_speedup(one) != "slower" for one in speedups)
                rows.append(
                    f"|{machine(record)}|{group}|{as_fast} of {len(speedups)}"
                    f"|{geometric_mean(speedups):.2f}|{min(speedups):.2f}|"
                )
    head = f"|machine|settings|`{name}` faster or tied|geometric mean|lowest|"
    if rows:
        display(Markdown("\n".join([head, "|---|---|--:|--:|--:|", *rows])))


def show_losses(suite, name="fast"):
    """Show where another implementation is faster by more than a tie."""
    for record in records_of(suite):
        rows = []
        for cell in record.cells:
            if name not in cell.results:
                continue
            ratios = {
                other: speedup(result) / speedup(cell.results[name])
                for other, result in cell.results.items()
            }
            faster = [
                f"`{other}` {ratios[other]:.2f}"
                for other in sorted(ratios, key=ratios.get, reverse=True)
                if classify_speedup(ratios[other]) == "faster"
            ]
            if faster:
                rows.append(f"|{row_title(cell)}|{', '.join(faster)}|")
        head = f"|setting|implementations, and how many times as fast as `{name}`|"
        shown = "\n".join(["", head, "|---|---|", *rows]) if rows else "Nowhere."
        display(Markdown(f"{machine(record)}:\n{shown}"))


def explain_launches(suite, reason):
    """Say why times on a GPU hardly depend on the size."""
    for record in filter(is_drawn, records_of(suite)):
        if record.machine["device_type"] == "cuda":
            results = [one for cell in record.cells for one in cell.results.values()]
            most = max(map(utilization, results))
            display(
                Markdown(
                    f"On {record.machine['device']} no implementation reaches more "
                    f"than {most:.0%} of a peak rate. At most of these sizes a call "
                    f"takes as long as PyTorch needs to launch its operators, so {reason}"
                )
            )


# %% [markdown]
# ## How much faster is `fast`, and for what?
#
# [`fast`](../source/fast/module.md) is the module of this site that is made for speed,
# `nn` is `nn.MultiheadAttention` with `need_weights=False`, and `sdpa` is
# `scaled_dot_product_attention` between two projections.

# %% hide="true" alt="Dots on a logarithmic axis, a row for each use, one dot for each setting: the speedup of fast over another implementation, with the geometric mean. The sentences above have the numbers."
# A use, its suite, whether with dropout, and what `fast` is compared with.
USES = [
    ("A forward pass", "inference", False, "nn"),
    ("A training step", "training", False, "nn"),
    ("A training step with dropout", "training", True, "nn"),
    ("Decoding with a KV cache", "decode", False, "sdpa"),
    ("A forward pass of tiny tensors", "tiny", False, "nn"),
]


def ratios(cells, other):
    """How many times as fast as `other` the module `fast` is, in each setting."""
    return [
        speedup(cell.results["fast"]) / speedup(cell.results[other])
        for cell in cells
        if {"fast", other} <= set(cell.results)
    ]


def answer(of_device):
    """State and draw the speedup of `fast` for each use, on one machine."""
    lines, rows = [], []
    for use, suite, is_dropped, other in USES:
        cells = [
            cell
            for record in of_device
            for cell in record.cells
            if record.suite == suite and bool(cell.setting["dropout"]) == is_dropped
        ]
        if values := ratios(cells, other):
            mean = f"**{geometric_mean(values):.2f} times** as fast as `{other}`"
            extent = f"{min(values):.2f} to {max(values):.2f} in {len(values)} settings"
            lines.append(f"- {use}: `fast` is {mean} ({extent}).")
            rows.append((f"{use}, over {other}", values))
    if not rows:
        return
    where = f"{of_device[0].machine['device']}, {of_device[0].dtype}"
    means = "each number is a geometric mean"
    display(Markdown("\n".join([f"On {where}; {means}:", "", *lines])))
    ax = plt.subplots(figsize=(3.7, 0.8 + 0.5 * len(rows)))[1]
    for row, (title, values) in enumerate(rows):
        ax.plot(values, [row] * len(values), "o", color=STYLE["fast"][0], alpha=0.4)
        ax.plot(geometric_mean(values), row, "|", color=INK, ms=14, mew=2)
        ax.text(0, row - 0.4, title, transform=ax.get_yaxis_transform(), va="center")
    ax.axvline(1, color=INK, lw=0.5)
    ax.set_yticks([])
    ax.set_ylim(len(rows) - 0.5, -0.7)
    ax.spines["left"].set_visible(False)
    ax.set_xscale("log", base=2)
    low, high = ax.get_xlim()
    if high < 2 * low:  # no two powers of 2
        ax.set_xticks([n / 10 for n in range(40) if low <= n / 10 <= high])
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.set_xlabel(f"speedup of fast; the bar is the geometric mean\n{where}")
    plt.show()
    is_gpu = of_device[0].machine["device_type"] == "cuda"
    if is_gpu and any(geometric_mean(values) < 1 - TIE for _, values in rows):
        training = "training-a-forward-and-a-backward-pass"
        display(Markdown(f"Below 1, `fast` is slower; [why](#{training})."))


for device in dict.fromkeys(record.machine["device"] for record in records):
    answer([r for r in records if r.machine["device"] == device and is_drawn(r)])

if all(record.machine["device_type"] == "cpu" for record in records):
    display(
        Markdown(
            "**No GPU has been measured**: these results hold for CPUs, and say nothing "
            "about GPUs. You can [measure yours](#measure-on-your-machine)."
        )
    )

# %% [markdown]
# ## How to read the tables and figures
#
# A *speedup* such as **1.25** says how many times as fast as `nn.MultiheadAttention` with
# `need_weights=False` an implementation is, measured [side by
# side](../source/attention_bench/timing.md): larger is better, and speedups within 2 % of
# 1 are ties. A size such as `4 × 512` is a batch of 4 sequences of 512 tokens. `d_model`
# is 512, with 8 heads, unless stated otherwise. *Utilization* is the share of the
# [machine's measured peak rate](../source/attention_bench/report.md): FLOP/s of large
# matrix products, or bytes per second of a copy, whichever the implementation is closer
# to. With a causal mask, only the FLOPs of the unmasked half count.

# %% [markdown]
# ## The machines

# %% hide="true"
rows = {}
for record in records:
    about = record.machine
    if "flops_per_second" in about:
        key = (about["device"], about["threads"], record.dtype)
        libraries = ", ".join(f"{k} {v}" for k, v in about["libraries"].items())
        rows[key] = "|".join(
            [
                about["device"],
                str(about["threads"]),
                f"{about['memory_gib']:.0f}",
                record.dtype,
                f"{about['flops_per_second'] / 1e9:,.0f}",
                f"{about['bytes_per_second'] / 1e9:,.0f}",
                f"torch {about['torch']}, Python {about['python']}, {libraries}",
                about["system"],
            ]
        )
head = "|device|threads|GiB|dtype|GFLOP/s|GB/s|versions|system|"
rule = "|---|--:|--:|---|--:|--:|---|---|"
display(Markdown("\n".join([head, rule, *(f"|{row}|" for row in rows.values())])))

# %% [markdown]
# GFLOP/s is the measured rate of a product of large matrices, GB/s that of a copy, in
# which each byte is read and written.
#
# ## Inference: a forward pass
#
# In inference mode. [`fast`](../source/fast/module.md) has the weights, masks and outputs
# of the [core module](../source/mha.md), and `fast-weights` also returns the attention
# weights averaged over the heads. `nn` is PyTorch's module without weights, `nn-weights`
# with them. `sdpa` is `scaled_dot_product_attention` between two projections, with
# nothing around it.

# %% hide="true" alt="Lines over the sizes, a panel for each mask: the speedup of each implementation over nn.MultiheadAttention in a forward pass. The tables below have the numbers."
for record in records_of("inference"):
    draw(record, speedup, "A forward pass", "speedup over nn")
    table(record, speedup_entry, MAIN)
    if is_drawn(record):
        table(record, speedup_entry, OTHERS)
    show_command(record)

# %% [markdown]
# **The speedup of `fast` over `nn`**, summarized. Ties are speedups within 2 % of 1:

# %% hide="true"
summarize("inference")

# %% [markdown]
# Utilization of the machine:

# %% hide="true" alt="Lines over the sizes, a panel for each mask: the utilization that each implementation reaches in a forward pass. The table below has the numbers."
for record in filter(is_drawn, records_of("inference")):
    draw(record, utilization, "A forward pass", "utilization")
    table(record, utilization_entry, STYLE)
    show_command(record)

# %% [markdown]
# No implementation reaches the peak rate. The matrices of one head are narrow, which
# matrix units multiply slowly, and the softmax computes an exponential for each score,
# which is not counted in the FLOPs. The overhead of `fast` over the bare kernel:

# %% hide="true"
for record in records_of("inference"):
    if values := ratios(record.cells, "sdpa"):
        extent = f"{min(values):.2f} to {max(values):.2f} times as fast as `sdpa`"
        middle = f"median {median(values):.2f}"
        display(Markdown(f"`fast` is {extent}, {middle}: {machine(record)}"))

# %% hide="true"
explain_launches(
    "inference",
    "all that Python does before counts, too. `fast` checks its inputs and chooses a "
    "kernel, which takes about as long as the operators of `sdpa`; for padding, it has "
    "operators of its own. The differences are the same at all sizes: they are a time "
    "per call.",
)

# %% [markdown]
# **Settings in which another implementation is faster than `fast`**, by more than 2 %:

# %% hide="true"
show_losses("inference")

# %% [markdown]
# ## Training: a forward and a backward pass
#
# With gradients for the input and all weights, and without an optimizer step. The largest
# differences are with dropout: on a CPU, `scaled_dot_product_attention` then has no fused
# kernel.

# %% hide="true" alt="Lines over the sizes, a panel for each mask and dropout probability: the speedup of each implementation over nn.MultiheadAttention in a training step. The table below has the numbers."
for record in records_of("training"):
    draw(record, speedup, "A training step", "speedup over nn")
    table(record, speedup_entry, MAIN + OTHERS * is_drawn(record))
    show_command(record)

# %% [markdown]
# **The speedup of `fast` over `nn`**, summarized. Ties are speedups within 2 % of 1:

# %% hide="true"
summarize("training")

# %% hide="true" alt="Lines over the sizes, a panel for each mask and dropout probability: the utilization that each implementation reaches in a training step. The table below has the numbers."
for record in filter(is_drawn, records_of("training")):
    draw(record, utilization, "A training step", "utilization")
    table(record, utilization_entry, STYLE)
    show_command(record)

# %% hide="true"
explain_launches(
    "training",
    "the implementation with the fewest is the fastest. `fast` has as many as `nn` "
    "without a mask, and more for padding: it keeps NaN in padding out of the output, "
    "and lets a sequence be all padding.",
)

# %% [markdown]
# **Settings in which another implementation is faster than `fast`**, by more than 2 %:

# %% hide="true"
show_losses("training")

# %% [markdown]
# ## Decoding: one more token with a KV cache
#
# Each step projects a token, reads the KV cache, and projects again. `sdpa` and `bmm` are
# bare kernels on a preallocated cache with contiguous heads; `nn` has no cache, and
# projects the whole text again. [Decoding with a KV
# cache](../source/attention_bench/decoding.md) describes the others. The figure shows the
# time of a step relative to `sdpa`, the table the speedup over it.

# %% hide="true" alt="Points, a row for each decoder and a color for each size of the cache: the time of one more token relative to the bare kernel, on a logarithmic axis. The table below has the numbers."
DECODERS = ("sdpa", "fast", "bmm", "cat", "gpt2", "x-transformers", "nn")


def plot_points(record):
    """Plot a row for each decoder, a color for each size of the cache."""
    if not is_drawn(record):
        return
    ax = plt.subplots(figsize=(7, 2.8))[1]
    names = [n for n in DECODERS if any(n in cell.results for cell in record.cells)]
    for cell, (color, marker) in zip(record.cells, STYLE.values(), strict=False):
        present = [name for name in names if name in cell.results]
        times = [1 / speedup(cell.results[name]) for name in present]
        rows = [names.index(name) for name in present]
        label = f"batch {cell.setting['batch_size']}, {cell.setting['seq_len']:,} keys"
        ax.plot(times, rows, marker, color=color, ms=5, label=label)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.axvline(1, color=INK, lw=0.5)
    ax.set_xscale("log")
    ax.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    ax.minorticks_off()
    ax.set_xlabel("time relative to sdpa")
    ax.set_title(f"One more token\n{machine(record)}")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()


for record in records_of("decode"):
    plot_points(record)
    table(record, speedup_entry, DECODERS, head="batch size × keys")
    show_command(record)

# %% [markdown]
# **Settings in which another decoder is faster than `fast`**, by more than 2 %:

# %% hide="true"
show_losses("decode")

# %% [markdown]
# ## Variants of current decoders
#
# Each [comparison](../source/attention_bench/decoders.md) shows what a change of current
# language models saves: fewer heads of keys and values, a latent KV cache, a sliding
# window, a ring cache, linear attention. The speedup is that over its first row. The last
# comparison is between packages, which compute the same function. Times of decoding are
# those of a token.


# %% hide="true"
for record in records_of("decoders"):
    rows = ["|comparison|implementation|time|speedup|", "|---|---|--:|--:|"]
    for cell in record.cells:
        for name, result in cell.results.items():
            relative = speedup_entry(result if "speedup" in result else None)
            rows.append(f"|{cell.title}|{name}|{time_entry(result)}|{relative}|")
    display(Markdown("\n".join(rows)))
    for cell in record.cells:
        times = {
            int(name.removeprefix("length ").replace(",", "")): result["seconds"]
            for name, result in cell.results.items()
            if name.startswith("length ")
        }
        if len(times) > 1:
            power = fit_exponent([*times], [*times.values()])
            comparison = cell.title.partition(":")[0]
            text = f"The time of `{comparison}` grows with the length to the power of"
            display(Markdown(f"{text} {power:.2f}."))
    show_command(record)

# %% [markdown]
# ## Memory
#
# The *peak* is the most memory that a call has in use, above what was in use before it;
# each implementation is measured [in a process of its
# own](../source/attention_bench/memory.md). *Retained* is what is still in use when the
# result has been freed: the core module stores its attention weights for plots. The
# exponent is the $p$ of the $n^p$ that fits best over the lengths.


# %% hide="true" alt="Lines over the length, both axes logarithmic, a panel for forward passes and one for training steps: the peak memory of a call for each implementation, with the fitted exponent. The table below has the numbers."
def mode_of(cell):
    return "training" if cell.setting["training"] else "inference"


def draw_growth(record, metric, key, unit, label):
    """Draw amounts over lengths, both logarithmic, a panel for each mode."""
    if not is_drawn(record):
        return
    modes = list(dict.fromkeys(mode_of(cell) for cell in record.cells))
    width = 7 if len(modes) > 1 else 6
    figure, axes = plt.subplots(
        1, len(modes), figsize=(width, 3.2), sharey=True, squeeze=False
    )
    figure.suptitle(machine(record), size="medium")
    for ax, mode in zip(axes[0], modes, strict=True):
        cells = [cell for cell in record.cells if mode_of(cell) == mode]
        exponents = record.exponents.get(f"{mode} {metric}", {})
        for name, (color, marker) in STYLE.items():
            xs = [c.setting["seq_len"] for c in cells if name in c.results]
            ys = [c.results[name][key] / unit for c in cells if name in c.results]
            text = f", exponent {exponents[name]:.2f}" if name in exponents else ""
            if xs:
                ax.loglog(xs, ys, color=color, marker=marker, ms=4, label=name + text)
        ticks = [c.setting["seq_len"] for c in cells]
        ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
        ax.minorticks_off()
        ax.set_title(f"{mode} {metric}")
        ax.set_xlabel("length")
        ax.legend(frameon=False)
    axes[0][0].set_ylabel(label)
    plt.show()


def memory_entry(result):
    """The peak in MiB, and what is retained of it from 4 MiB up."""
    if not result:
        return "–"
    text = f"{result['peak'] / 2**20:,.0f}"
    if result["retained"] >= 4 * 2**20:
        text += f", {result['retained'] / 2**20:,.0f} retained"
    return text


for record in records_of("memory"):
    draw_growth(record, "memory", "peak", 2**20, "peak in MiB")
    for mode in dict.fromkeys(mode_of(cell) for cell in record.cells):
        display(Markdown(f"Peak in MiB, {mode}:"))
        part = [cell for cell in record.cells if mode_of(cell) == mode]
        table(type(record)(**vars(record) | {"cells": part}), memory_entry, STYLE)
    show_command(record)

# %% [markdown]
# ## Growth with the length
#
# The time of the projections grows linearly with the length, that of the scores
# quadratically. The measured exponent lies between 1 and 2, and closer to 2 the larger
# the share of the scores.

# %% hide="true" alt="Lines over the length, both axes logarithmic: the time of a forward pass for each implementation, with the fitted exponent. The table below has the numbers."
for record in records_of("growth"):
    draw_growth(record, "time", "seconds", 1e-3, "milliseconds")
    table(record, time_entry, STYLE)
    show_command(record)

# %% [markdown]
# ## Overhead on tiny tensors
#
# With `d_model` 64, at most 12 tokens and one thread, almost nothing is computed. The
# time is the overhead of each operator that Python dispatches, so operators are counted,
# too, including views. Each entry has the time of a call, the speedup over `nn`, and the
# number of operators.

# %% hide="true"
for record in records_of("tiny"):
    titles = "|".join(row_title(cell) for cell in record.cells)
    rows = [f"|implementation|{titles}|", "|---" + "|--:" * len(record.cells) + "|"]
    for name in (*MAIN, *OTHERS):
        results = [cell.results.get(name) for cell in record.cells]
        entries = [
            f"{time_entry(one)}, {speedup_entry(one)}, {one['operators']:.0f}"
            if one
            else "–"
            for one in results
        ]
        if any(results):
            rows.append(f"|`{name}`|" + "|".join(entries) + "|")
    display(Markdown("\n".join(rows)))
    show_command(record)

# %% [markdown]
# **Settings in which another implementation is faster than `fast`**, by more than 2 %:

# %% hide="true"
show_losses("tiny")

# %% [markdown]
# ## The implementations
#
# Each gets the mask in the form that it is fastest with. `causal`, `valid_lens` and
# `batch_first` are written [as in books and
# tutorials](../source/implementations/batch_first.md), with the weights of the core
# module. [Their page](../source/attention_bench/implementations.md) says what was changed
# in those of other packages to make them comparable.

# %% hide="true"
from attention_bench.implementations import IMPLEMENTATIONS

summaries = {
    "core": "the core module",
    "fast": "the fast module",
    "fast-weights": "the fast module, with weights averaged over heads",
    "causal": "batch first, always causal",
    "valid_lens": "batch first, masks are lengths",
    "batch_first": "batch first, with the weights of each head",
    "nn": "`nn.MultiheadAttention`, `need_weights=False`",
    "nn-weights": "`nn.MultiheadAttention` by default, with averaged weights",
    "nn-fastpath": "`nn.MultiheadAttention`, batch first: its fast path",
    "sdpa": "`scaled_dot_product_attention` between two projections",
    "flex": "FlexAttention between two projections, compiled",
    "gpt2": "`GPT2Attention` of `transformers`",
    "bert": "`BertSelfAttention` of `transformers`",
    "llama": "`LlamaAttention` of `transformers`",
    "x-transformers": "`Attention` of `x-transformers`",
}
rows = ["|name|implementation|causal mask|padding mask|", "|---|---|---|---|"]
for name, one in IMPLEMENTATIONS.items():
    spelling = [one.mask_spelling.get(mask, "–") for mask in ("causal", "padding")]
    rows.append(f"|`{name}`|{summaries[name]}|{spelling[0]}|{spelling[1]}|")
display(Markdown("\n".join(rows)))

# %% [markdown]
# ## Skipped

# %% hide="true"
reasons = Counter(
    (record.suite, name, reason)
    for record in records
    for cell in record.cells
    for name, reason in cell.skipped.items()
)
rows = [f"|{s}|`{n}`|{why}|{count}|" for (s, n, why), count in reasons.items()]
head = "|suite|implementation|reason|settings|\n|---|---|---|--:|\n"
display(Markdown(head + "\n".join(rows) if rows else "No implementation was skipped."))

# %% [markdown]
# Implementations that hold all scores at once are not measured at great lengths, where
# they would take minutes: training beyond 2,048 tokens, inference beyond 4,096, and the
# implementations from books and tutorials beyond 1,024.
#
# ## Measure on your machine
#
# ```console
# $ pip install {{ headnotes }}
# $ pip install transformers x-transformers
# $ headnotes bench --quick
# $ headnotes bench inference --device cuda --dtype bfloat16
# ```
#
# The first file is on the [installation page](../install.md#files). The implementations
# of `transformers` and `x-transformers` are skipped where these are missing. In a clone, `headnotes bench --results benchmarks/results` runs all
# suites in about ten minutes on two cores, and writes the records that this page is made
# from. `headnotes bench inference --results benchmarks/results` runs one suite. [The
# command's page](../source/attention_bench/cli.md) describes all options.
