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
from time import perf_counter

import torch
from IPython.display import Markdown, display
from torch.utils.flop_counter import FlopCounterMode

from attention_laws import LAWS
from headnotes import MultiHeadAttention

HEADS, D_MODEL = 8, 512
# Module, class, arguments, the formula that changes, and who uses it.
VARIANTS = [
    ("rotary", "RotaryAttention", {}, r"S_{ij} = R_i q_i \cdot R_j k_j", "Llama, Qwen"),
    (
        "alibi",
        "AlibiAttention",
        {},
        r"S_{ij} = q_i \cdot k_j - m_h (i - j)",
        "BLOOM, MPT",
    ),
    (
        "relative",
        "ShawAttention",
        {"max_distance": 16},
        r"S_{ij} = q_i \cdot (k_j + a_{i-j})",
        "Music Transformer",
    ),
    (
        "relative",
        "TransformerXLAttention",
        {},
        r"S_{ij} = (q_i + u) \cdot k_j + (q_i + v) \cdot r_{i-j}",
        "Transformer-XL, XLNet",
    ),
    ("relative", "T5Attention", {}, r"S_{ij} = q_i \cdot k_j + b_{i-j}", "T5"),
    (
        "grouped_query",
        "GroupedQueryAttention",
        {"kv_heads": 2},
        r"k_{jh} = k_{jg},\ v_{jh} = v_{jg}",
        "Llama 3, Mistral",
    ),
    (
        "latent",
        "LatentAttention",
        {"kv_rank": 128, "rotary_dim": 32},
        r"k_{jh} = W^{K}_h c_j,\ v_{jh} = W^{V}_h c_j",
        "DeepSeek-V2 and V3",
    ),
    (
        "sliding_window",
        "SlidingWindowAttention",
        {"window": 64},
        r"A_{ij} > 0 \iff 0 \le i - j < w",
        "Mistral, Gemma 2",
    ),
    (
        "sinks",
        "SinkAttention",
        {},
        r"A_{ij} = e^{S_{ij}} / (e^{s_h} + \sum_l e^{S_{il}})",
        "gpt-oss",
    ),
    (
        "soft_cap",
        "SoftCapAttention",
        {"soft_cap": 50.0},
        r"S'_{ij} = c \tanh(S_{ij} / c)",
        "Gemma 2",
    ),
    (
        "qk_norm",
        "QKNormAttention",
        {},
        r"S_{ij} = \operatorname{norm}(q_i) \cdot \operatorname{norm}(k_j)",
        "Qwen 3, OLMo 2",
    ),
    (
        "differential",
        "DifferentialAttention",
        {},
        r"A = A^{(1)} - \lambda A^{(2)}",
        "Differential Transformer",
    ),
    (
        "linear",
        "LinearAttention",
        {},
        r"A_{ij} = \phi(q_i) \cdot \phi(k_j) / \sum_l \phi(q_i) \cdot \phi(k_l)",
        "Linear Transformer",
    ),
    (
        "linear",
        "DeltaNetAttention",
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
    return re.search(r"\*\*Reduces to\*\* (.*?)\.(?: |$)", docstring(module))[1]


def laws(module):
    """The laws that test the idea, and those that do not apply."""
    text = re.search(r"\*\*Laws[.:]\*\*(.*?)(?=Source:|$)", docstring(module))[1]
    named = [name for name in re.findall(r"`(\w+)`", text) if name in LAWS]
    idea = {"relative_positions", "linear_bias", "sliding_window"}
    return [n for n in named if n in idea], [n for n in named if n not in idea]


def link(module, name):
    return f"[`{name}`](../source/variants/{module}.md#{name})"


rows = ["|variant|formula|reduces to|used by|", "|---|---|---|---|"]
for module, name, _, formula, users in VARIANTS:
    rows.append(f"|{link(module, name)}|${formula}$|{reduces_to(module)}|{users}|")
display(Markdown("\n".join(rows)))

# %% [markdown]
# ## What it costs
#
# A layer of width 512 with 8 heads, in self-attention over 256 tokens: parameters, the
# floating-point operations of all matrix products, and the time of a forward pass, relative
# to the core. The calls take turns, and the shortest of each counts; differences of a tenth
# are noise. These modules are written to be read.

# %% hide="true"
torch.set_num_threads(1)
torch.manual_seed(0)
length = 256
x = torch.randn(length, 1, D_MODEL)


def build(module, name, arguments):
    kind = getattr(importlib.import_module(f"headnotes.variants.{module}"), name)
    return kind(HEADS, D_MODEL, 0.0, **arguments).eval()


modules = {"core": MultiHeadAttention(HEADS, D_MODEL, 0.0).eval()}
modules |= {name: build(module, name, more) for module, name, more, _, _ in VARIANTS}


@torch.no_grad()
def call(module):
    return module(query=x, key=x, value=x)


def operations(module):
    with FlopCounterMode(display=False) as counter:
        call(module)
    return counter.get_total_flops()


times = dict.fromkeys(modules, float("inf"))
for _ in range(5):
    for name, module in modules.items():
        start = perf_counter()
        call(module)
        times[name] = min(times[name], perf_counter() - start)

rows = ["|variant|parameters|million operations|time / core|", "|---|--:|--:|--:|"]
for name, module in modules.items():
    parameters = sum(p.numel() for p in module.parameters())
    million = operations(module) / 1e6
    ratio = times[name] / times["core"]
    rows.append(f"|`{name}`|{parameters:,}|{million:,.0f}|{ratio:.2f}|")
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
rows = ["|module|law of the idea|laws that do not apply|", "|---|---|---|"]
for module in dict.fromkeys(module for module, *_ in VARIANTS):
    idea, without = (
        ", ".join(n.replace("_", " ") for n in names) for names in laws(module)
    )
    rows.append(
        f"|[{module}](../source/variants/{module}.md)|{idea or '–'}|{without or '–'}|"
    )
display(Markdown("\n".join(rows)))
