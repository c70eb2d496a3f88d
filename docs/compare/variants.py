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

import torch
from IPython.display import Markdown, display
from torch.utils.flop_counter import FlopCounterMode

from headnotes import MultiHeadAttention

HEADS, D_MODEL = 8, 512
# Module, class, name, arguments, the formula that changes, and who uses it.
VARIANTS = [
    (
        "rotary",
        "RotaryAttention",
        "rotary",
        {},
        r"S_{ij} = R_i q_i \cdot R_j k_j",
        "Llama, Qwen",
    ),
    (
        "alibi",
        "AlibiAttention",
        "ALiBi",
        {},
        r"S_{ij} = q_i \cdot k_j - m_h (i - j)",
        "BLOOM, MPT",
    ),
    (
        "relative",
        "ShawAttention",
        "Shaw",
        {"max_distance": 16},
        r"S_{ij} = q_i \cdot (k_j + a_{i-j})",
        "Music Transformer",
    ),
    (
        "relative",
        "TransformerXLAttention",
        "Transformer-XL",
        {},
        r"S_{ij} = (q_i + u) \cdot k_j + (q_i + v) \cdot r_{i-j}",
        "Transformer-XL, XLNet",
    ),
    ("relative", "T5Attention", "T5", {}, r"S_{ij} = q_i \cdot k_j + b_{i-j}", "T5"),
    (
        "grouped_query",
        "GroupedQueryAttention",
        "grouped query",
        {"kv_heads": 2},
        r"k_{jh} = k_{jg},\ v_{jh} = v_{jg}",
        "Llama 3, Mistral",
    ),
    (
        "latent",
        "LatentAttention",
        "latent",
        {"kv_rank": 128, "rotary_dim": 32},
        r"k_{jh} = W^{K}_h c_j,\ v_{jh} = W^{V}_h c_j",
        "DeepSeek-V2 and V3",
    ),
    (
        "sliding_window",
        "SlidingWindowAttention",
        "sliding window",
        {"window": 64},
        r"A_{ij} > 0 \iff 0 \le i - j < w",
        "Mistral, Gemma 2",
    ),
    (
        "sinks",
        "SinkAttention",
        "sinks",
        {},
        r"A_{ij} = e^{S_{ij}} / (e^{s_h} + \sum_l e^{S_{il}})",
        "gpt-oss",
    ),
    (
        "soft_cap",
        "SoftCapAttention",
        "soft cap",
        {"soft_cap": 50.0},
        r"S'_{ij} = c \tanh(S_{ij} / c)",
        "Gemma 2",
    ),
    (
        "qk_norm",
        "QKNormAttention",
        "query-key norm",
        {},
        r"S_{ij} = \operatorname{norm}(q_i) \cdot \operatorname{norm}(k_j)",
        "Qwen 3, OLMo 2",
    ),
    (
        "differential",
        "DifferentialAttention",
        "differential",
        {},
        r"A = A^{(1)} - \lambda A^{(2)}",
        "Differential Transformer",
    ),
    (
        "linear",
        "LinearAttention",
        "linear",
        {},
        r"A_{ij} = \phi(q_i) \cdot \phi(k_j) / \sum_l \phi(q_i) \cdot \phi(k_l)",
        "Linear Transformer",
    ),
    (
        "linear",
        "DeltaNetAttention",
        "delta rule",
        {},
        r"M_j = \alpha_j M_{j-1} (1 - \beta_j k_j k_j^\top) + \beta_j v_j k_j^\top",
        "Qwen3-Next, Kimi Linear",
    ),
]
SOURCES = Path("../../src/headnotes/variants")


def docstring(module):
    text = ast.get_docstring(ast.parse((SOURCES / f"{module}.py").read_text("utf-8")))
    return " ".join(text.split())


def reduces_to(module):
    """What the page of the module says of it."""
    return re.search(r"\*\*Reduces to:?\*\* (.*?)\.(?: |$)", docstring(module))[1]


def laws(module):
    """What the page of the module says of the laws, without its links."""
    text = re.search(r"\*\*Laws[.:]\*\* (.*?)(?= \[|$| Source:)", plain(module))[1]
    return text[0].upper() + text[1:]


def plain(module):
    return re.sub(r"\[(`[^]]+`)\]\([^)]*\)", r"\1", docstring(module))


def link(module, kind, name):
    return f"[{name}](../source/variants/{module}.md#{kind})"


rows = ["|variant|formula|reduces to|used by|", "|---|---|---|---|"]
for module, kind, name, _, formula, users in VARIANTS:
    rows.append(
        f"|{link(module, kind, name)}|${formula}$|{reduces_to(module)}|{users}|"
    )
display(Markdown("\n".join(rows)))

# %% [markdown]
# ## What it costs
#
# A layer of width 512 with 8 heads, in self-attention over 256 tokens: parameters, the
# floating-point operations of all matrix products, and the processor time of a forward pass
# on one thread, relative to the core. The calls take turns, and the shortest of each
# counts; differences of a fifth are noise. These modules are written to be read.

# %% hide="true"
torch.set_num_threads(1)
torch.manual_seed(0)
length = 256
x = torch.randn(length, 1, D_MODEL)


def build(module, kind, arguments):
    made = getattr(importlib.import_module(f"headnotes.variants.{module}"), kind)
    return made(HEADS, D_MODEL, **arguments).eval()


modules = {"core": MultiHeadAttention(HEADS, D_MODEL).eval()}
modules |= {
    name: build(module, kind, more) for module, kind, name, more, _, _ in VARIANTS
}


@torch.no_grad()
def call(module):
    return module(query=x, key=x, value=x)


def operations(module):
    with FlopCounterMode(display=False) as counter:
        call(module)
    return counter.get_total_flops()


times = dict.fromkeys(modules, float("inf"))
for _ in range(9):
    for name, module in modules.items():
        start = process_time()
        call(module)
        times[name] = min(times[name], process_time() - start)

rows = ["|variant|parameters|million operations|time / core|", "|---|--:|--:|--:|"]
for name, module in modules.items():
    parameters = sum(p.numel() for p in module.parameters())
    million = operations(module) / 1e6
    ratio = times[name] / times["core"]
    rows.append(f"|{name}|{parameters:,}|{million:,.0f}|{ratio:.2f}|")
display(Markdown("\n".join(rows)))

# %% [markdown]
# What a variant saves shows in decoding and in long sequences: [the lesson on the KV
# cache](../learn/11_kv_cache.md) computes the bytes per token of ten published models, [the
# lesson on windows](../learn/13_sliding_windows_and_sinks.md) counts the operations, and
# [position encodings compared](../learn/12_position_encodings.md) trains five of them.
#
# ## Which laws apply
#
# The [laws](laws.md) test properties of the attention of 2017. A variant gives some of them
# up on purpose; its page says why. All others apply.

# %% hide="true"
rows = ["|module|laws|", "|---|---|"]
for module in dict.fromkeys(module for module, *_ in VARIANTS):
    rows.append(f"|[{module}](../source/variants/{module}.md)|{laws(module)}|")
display(Markdown("\n".join(rows)))
