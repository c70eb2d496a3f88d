# %% [markdown]
# # Variants at a glance
#
# Current models change the attention of 2017 in a few places. This page compares the
# variants of Headnotes for readers who know [the core](../source/mha.md): the formula that
# changes, what the variant reduces to, and what it costs. Each has a page with annotated
# code, as a small change to the core. Everything below is computed when the site is built.
#
# ## What changes
#
# $q_i$, $k_j$ and $v_j$ are query, key and value of a head, $S$ the scores, $A$ the
# attention weights, $x_j$ the input.

# %% hide="true"
import ast
import importlib
import re
from pathlib import Path
from time import process_time
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display
from torch.utils.flop_counter import FlopCounterMode

from headnotes import MultiHeadAttention

HEADS, D_MODEL = 8, 512
INK = "#123456"  # the color of the text


class Variant(NamedTuple):
    """A row of the tables: its name, where its code is, and the formula that changes."""

    name: str
    module: str
    kind: str
    arguments: dict
    formula: str
    users: str
    # For this setting, it computes the same as the other module.
    setting: str = ""
    other: str = ""


VARIANTS = [
    Variant(
        "rotary",
        "rotary",
        "RotaryAttention",
        {},
        r"S_{ij} = R_i q_i \cdot R_j k_j",
        "Llama, Qwen",
        r"R = 1",
        "core",
    ),
    Variant(
        "ALiBi",
        "alibi",
        "AlibiAttention",
        {},
        r"S_{ij} = q_i \cdot k_j - m_h \left\vert i - j \right\vert",
        "BLOOM, MPT",
        r"m_h = 0",
        "core",
    ),
    Variant(
        "Shaw",
        "relative",
        "ShawAttention",
        {"max_distance": 16},
        r"S_{ij} = q_i \cdot (k_j + a_{j-i})",
        "Music Transformer",
        r"a = 0",
        "core",
    ),
    Variant(
        "Transformer-XL",
        "relative",
        "TransformerXLAttention",
        {},
        r"S_{ij} = (q_i + u) \cdot k_j + (q_i + v) \cdot r_{i-j}",
        "Transformer-XL, XLNet",
        r"u = r = 0",
        "core",
    ),
    Variant(
        "T5",
        "relative",
        "T5Attention",
        {},
        r"S_{ij} = q_i \cdot k_j + b_{j-i}",
        "T5",
        r"b = 0",
        "core without a scale",
    ),
    Variant(
        "grouped query",
        "grouped_query",
        "GroupedQueryAttention",
        {"kv_heads": 2},
        r"k_{jh} = k_{jg},\ v_{jh} = v_{jg}",
        "Llama 3, Mistral",
        r"g = h",
        "core",
    ),
    Variant(
        "latent",
        "latent",
        "LatentAttention",
        {"kv_rank": 128, "rotary_dim": 32},
        r"k_{jh} = W^{K}_h c_j,\ v_{jh} = W^{V}_h c_j",
        "DeepSeek-V2 and V3",
    ),
    Variant(
        "sliding window",
        "sliding_window",
        "SlidingWindowAttention",
        {"window": 64},
        r"A_{ij} > 0 \iff 0 \le i - j < w",
        "Mistral, Gemma 2",
        r"w \geq n",
        "causal core",
    ),
    Variant(
        "sinks",
        "sinks",
        "SinkAttention",
        {},
        r"A_{ij} = e^{S_{ij}} / (e^{s_h} + \sum_l e^{S_{il}})",
        "gpt-oss",
        r"s_h \to -\infty",
        "core",
    ),
    Variant(
        "soft cap",
        "soft_cap",
        "SoftCapAttention",
        {"soft_cap": 50.0},
        r"S'_{ij} = c \tanh(S_{ij} / c)",
        "Gemma 2",
        r"c \to \infty",
        "core",
    ),
    Variant(
        "query-key norm",
        "qk_norm",
        "QKNormAttention",
        {},
        r"S_{ij} = \operatorname{norm}(q_i) \cdot \operatorname{norm}(k_j)",
        "Qwen 3, OLMo 2",
    ),
    Variant(
        "differential",
        "differential",
        "DifferentialAttention",
        {},
        r"A = A^{(1)} - \lambda A^{(2)}",
        "Differential Transformer",
        r"\lambda = 0",
        "core, before the norm",
    ),
    Variant(
        "linear",
        "linear",
        "LinearAttention",
        {},
        r"A_{ij} = \phi(q_i) \cdot \phi(k_j) / \sum_l \phi(q_i) \cdot \phi(k_l)",
        "Linear Transformer",
    ),
    Variant(
        "delta rule",
        "linear",
        "DeltaNetAttention",
        {},
        r"M_j = \alpha_j M_{j-1} (1 - \beta_j k_j k_j^\top) + \beta_j v_j k_j^\top",
        "Qwen3-Next, Kimi Linear",
        r"\alpha = 1,\ k_i \perp k_j",
        "linear, not normalized",
    ),
]
SOURCES = Path("../../src/headnotes/variants")


def docstring(module):
    text = ast.get_docstring(ast.parse((SOURCES / f"{module}.py").read_text("utf-8")))
    return " ".join(text.split())


def laws(module):
    """What the page of the module says of the laws, without its links."""
    text = re.search(r"\*\*Laws[.:]\*\* (.*?)(?= \[|$| Source:)", plain(module))[1]
    return text[0].upper() + text[1:]


def plain(module):
    return re.sub(r"\[(`[^]]+`)\]\([^)]*\)", r"\1", docstring(module))


rows = ["|variant|formula|used by|", "|---|---|---|"]
for each in VARIANTS:
    link = f"[{each.name}](../source/variants/{each.module}.md#{each.kind})"
    rows.append(f"|{link}|${each.formula}$|{each.users}|")
display(Markdown("\n".join(rows)))

# %% [markdown]
# Most variants contain the attention that they change: for one value of what they add, they
# compute the same. A test of each variant checks this. Latent attention, the norm of
# queries and keys, and linear attention have no such value.

# %% hide="true" alt="For each variant, an arrow to the attention that it is for one value of what it adds; beside the arrow, this value. Seven of them lead to the core."
reducible = [each for each in VARIANTS if each.other]
# Those that lead to the core are neighbors, so that no arrows cross.
reducible.sort(key=lambda each: each.other != "core")
figure, ax = plt.subplots(figsize=(5.4, 0.34 * len(reducible)))
arrow = {"arrowstyle": "->", "color": INK, "linewidth": 0.8}
for row, each in enumerate(reducible):
    rows = [n for n, v in enumerate(reducible) if v.other == each.other]
    end = sum(rows) / len(rows)
    ax.text(0, row, each.name, va="center")
    ax.text(0.42, row, f"${each.setting}$", va="center", ha="center")
    ax.annotate("", (0.74, end), (0.55, row), arrowprops=arrow)
    if row == rows[0]:
        ax.text(0.76, end, each.other, va="center")
ax.set(xlim=(0, 1.1), ylim=(len(reducible) - 0.5, -0.5))
ax.axis("off")
plt.show()

# %% [markdown]
# ## What it costs
#
# A layer of width 512 with 8 heads, in self-attention over 256 tokens, in float32:
# parameters; the floating-point operations of all matrix products; the memory of the
# tensors that a forward pass saves for the backward pass; what a KV cache stores for each
# token; and the processor time of a forward pass on one thread, relative to the core. The
# calls take turns, and the shortest of each counts; differences of a fifth are noise. These
# modules are written to be read; [the fast one](../source/fast/module.md) has most of these
# variants, too, and saves no scores.

# %% hide="true"
torch.set_num_threads(1)
torch.manual_seed(0)
length = 256
x = torch.randn(length, 1, D_MODEL)


def build(variant):
    module = importlib.import_module(f"headnotes.variants.{variant.module}")
    kind = getattr(module, variant.kind)
    return kind(HEADS, D_MODEL, **variant.arguments).eval()


modules = {"core": MultiHeadAttention(HEADS, D_MODEL).eval()}
modules |= {variant.name: build(variant) for variant in VARIANTS}


def call(module):
    return module(query=x, key=x, value=x)


def operations(module):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call(module)
    return counter.get_total_flops()


def saved_bytes(module):
    """Of each memory block once, and without the weights."""
    weights = {w.untyped_storage().data_ptr() for w in module.parameters()}
    blocks = {}

    def save(tensor):
        block = tensor.untyped_storage()
        if block.data_ptr() not in weights:
            # Kept, so that no other block gets its address.
            blocks[block.data_ptr()] = block
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        call(module)
    return sum(block.nbytes() for block in blocks.values())


def cached(name, module):
    """The bytes of a token in the KV cache."""
    if name in ("linear", "delta rule"):
        return "none"
    if name == "latent":
        cache = module.cache(1, 1)
        return f"{cache.buffer.nbytes:,}"
    token = x[:1]
    size = module.key(token).nbytes + module.value(token).nbytes
    window = f", of {module.window} tokens" if name == "sliding window" else ""
    return f"{size:,}{window}"


times = dict.fromkeys(modules, float("inf"))
for _ in range(9):
    for name, module in modules.items():
        start = process_time()
        with torch.no_grad():
            call(module)
        times[name] = min(times[name], process_time() - start)

rows = [
    "|variant|parameters|million operations|MB saved|cache bytes per token|time / core|",
    "|---|--:|--:|--:|--:|--:|",
]
for name, module in modules.items():
    parameters = sum(p.numel() for p in module.parameters())
    amounts = f"{operations(module) / 1e6:,.0f}|{saved_bytes(module) / 1e6:,.1f}"
    ratio = times[name] / times["core"]
    rows.append(f"|{name}|{parameters:,}|{amounts}|{cached(name, module)}|{ratio:.2f}|")
display(Markdown("\n".join(rows)))

# %% [markdown]
# What a variant saves shows in decoding and in long sequences: [the lesson on the KV
# cache](../learn/11_kv_cache.md#the-size-of-the-cache-in-bytes) computes the bytes per token
# of ten published models, [the lesson on
# windows](../learn/13_sliding_windows_and_sinks.md) counts the operations, and [position
# encodings compared](../learn/12_position_encodings.md) trains five of them.
#
# ## Which laws apply
#
# The [laws](laws.md) test properties of the attention of 2017. A variant gives some of them
# up on purpose; its page says why. All others apply.

# %% hide="true"
rows = ["|module|laws|", "|---|---|"]
for module in dict.fromkeys(variant.module for variant in VARIANTS):
    rows.append(f"|[{module}](../source/variants/{module}.md)|{laws(module)}|")
display(Markdown("\n".join(rows)))
