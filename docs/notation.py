# %% [markdown]
# # Notation and shapes {: .sheet }
#
# This page lists the names, letters, shapes and mask conventions that the other pages
# use, beside those of PyTorch and Hugging Face. It is for looking things up, and prints
# on one sheet. The shapes in the tables were compared with the tensors of a run when
# this page was built.
#
# ## Sizes and letters
#
# In `einsum`, each axis has a letter. $Q$, $K$ and $V$ are the projected queries, keys
# and values.
#
# | letter | axis | size | the size is also called |
# |:---:|---|---|---|
# | `i` | query position | `q_len` | `L`, `T`, target length |
# | `j` | key position | `k_len` | `S`, source length |
# | `b` | batch item | `batch_size` | `N`, `bsz` |
# | `h` | head | `heads` | `num_heads`, `n_head`, `num_attention_heads` |
# | `d` | component within a head | `d_k` | `head_dim`, `head_size` |
# | `(h d)` | component of a token's vector | `d_model` = `heads` · `d_k` | `embed_dim`, `hidden_size`, `n_embd` |
#
# `seq_len` is the length where `q_len` and `k_len` are equal, as in self-attention.
#
# ## Tensors of the core module
#
# [The core](source/mha.md) is sequence first.

# %% hide="true"
import math
import re
import warnings
from operator import itemgetter

# Transformers imports tqdm, which wants a progress bar of Jupyter's.
warnings.filterwarnings("ignore", "IProgress not found")

import torch
from IPython.display import Markdown, display
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, GPT2Config, GPT2Model
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.gpt2.modeling_gpt2 import eager_attention_forward

from headnotes import MultiHeadAttention, convert, masks
from headnotes.mha import masked_softmax

LETTERS = {"i": 3, "j": 5, "b": 2, "h": 7, "d": 11, "1": 1}
NAMES = {"q_len": 3, "k_len": 5, "batch_size": 2, "heads": 7, "d_k": 11, "d_model": 77}


def sizes(axes):
    """The sizes of `i b (h d)`, where brackets are a product."""
    groups = [group.strip("()") for group in re.findall(r"\(.*?\)|\w", axes)]
    return [math.prod(LETTERS[letter] for letter in group.split()) for group in groups]


# A run of the core, step by step.
core = MultiHeadAttention(heads=7, d_model=77).eval()
x, memory = torch.randn(3, 2, 77), torch.randn(5, 2, 77)
padding = masks.padding(torch.tensor([5, 4]), k_len=5)
mask = masks.combine(masks.causal(3, 5), padding)
query, key, value = core.query(x), core.key(memory), core.value(memory)
scores = core.get_scores(query * core.scale, key)
attn = masked_softmax(scores, mask.unsqueeze(-1))
context = core.apply_weights(attn, value)
output = core(query=x, key=memory, value=memory, mask=mask)
assert torch.allclose(core.output(context.flatten(-2)), output, atol=1e-6)

ROWS = [
    ("inputs `query`", "$X$", "i b (h d)", "q_len, batch_size, d_model", x),
    ("inputs `key`, `value`", "$Y$", "j b (h d)", "k_len, batch_size, d_model", memory),
    (
        "queries by head",
        r"$Q = X W_Q^\top + b_Q$",
        "i b h d",
        "q_len, batch_size, heads, d_k",
        query,
    ),
    (
        "keys by head",
        r"$K = Y W_K^\top + b_K$",
        "j b h d",
        "k_len, batch_size, heads, d_k",
        key,
    ),
    (
        "values by head",
        r"$V = Y W_V^\top + b_V$",
        "j b h d",
        "k_len, batch_size, heads, d_k",
        value,
    ),
    (
        "scores",
        r"$S_{ijbh} = \sum_d Q_{ibhd}\, K_{jbhd} / \sqrt{d_k}$",
        "i j b h",
        "q_len, k_len, batch_size, heads",
        scores,
    ),
    (
        "attention weights, `attn`",
        r"$A_{ijbh} = \operatorname{softmax}_j S_{ijbh}$",
        "i j b h",
        "q_len, k_len, batch_size, heads",
        attn,
    ),
    (
        "context vectors",
        r"$C_{ibhd} = \sum_j A_{ijbh}\, V_{jbhd}$",
        "i b h d",
        "q_len, batch_size, heads, d_k",
        context,
    ),
    (
        "output",
        r"$C W_O^\top + b_O$",
        "i b (h d)",
        "q_len, batch_size, d_model",
        output,
    ),
]

lines = ["| tensor | formula | axes | shape |", "|---|---|---|---|"]
for name, formula, axes, shape, tensor in ROWS:
    assert sizes(axes) == list(tensor.shape), name
    assert [NAMES[size] for size in shape.split(", ")] == list(tensor.shape), name
    lines.append(f"| {name} | {formula} | `{axes}` | `[{shape}]` |")
display(Markdown("\n".join(lines)))

S = torch.einsum("ibhd,jbhd->ijbh", query * core.scale, key)
assert torch.equal(S, scores)
assert torch.equal(torch.einsum("ijbh,jbhd->ibhd", attn, value), context)
for projection in (core.query, core.key, core.value, core):
    linear = projection.output if projection is core else projection.linear
    assert linear.weight.shape == (77, 77)

# %% [markdown]
# The two products are `einsum("ibhd,jbhd->ijbh", query, key)` and
# `einsum("ijbh,jbhd->ibhd", attn, value)`. Each of $W_Q$, $W_K$, $W_V$ and $W_O$ is the
# weight of an `nn.Linear`, `[d_model, d_model]`; rows $h \cdot d_k$ to $(h + 1)\, d_k - 1$
# of the first three belong to head $h$.
#
# ## Masks
#
# **True means that this query may attend to this key.** A mask is bool, or integer 0/1,
# `[q_len or 1, k_len, batch_size or 1]`; the heads share it. A fully masked row has
# weights of zero: its output is $b_O$, the output bias. [Building
# masks](source/masks/build.md) has these and others:

# %% hide="true"
CAUSAL = "$j \\le i$ + `k_len` − `q_len`"
PADDING = "$j$ < `valid_lens[b]`"
MASKS = [
    ("causal", CAUSAL, "masks.causal(q_len, k_len)", "i j 1", masks.causal(3, 5)),
    ("padding", PADDING, "masks.padding(valid_lens, k_len)", "1 j b", padding),
    ("both", "both hold", "masks.combine(causal, padding)", "i j b", mask),
]
lines = ["| mask | may attend if | code | axes |", "|---|---|---|---|"]
for name, condition, code, axes, tensor in MASKS:
    assert sizes(axes) == list(tensor.shape), name
    lines.append(f"| {name} | {condition} | `{code}` | `{axes}` |")
display(Markdown("\n".join(lines)))

i, j, valid_lens = torch.arange(3)[:, None, None], torch.arange(5)[:, None], [5, 4]
assert torch.equal(masks.causal(3, 5), j <= i + 5 - 3)
assert torch.equal(padding[0], j < torch.tensor(valid_lens))
empty = core(query=x, key=memory, value=memory, mask=torch.zeros(1, 5, 1).bool())
assert torch.equal(empty, core.output.bias.expand_as(empty))
assert torch.equal(core.attn, torch.zeros_like(core.attn))

# %% [markdown]
# ## The same tensors elsewhere
#
# `nn.MultiheadAttention` is sequence first by default. PyTorch's
# `F.scaled_dot_product_attention` (SDPA) gets heads that are already split. The last
# column was measured with GPT-2 of Hugging Face. A dash means that the function does not
# take, return or show this tensor.

# %% hide="true"
# `nn.MultiheadAttention` with the same weights computes the same.
torch_mha = convert.to(core, "torch").eval()
by_default, mean = torch_mha(x, memory, memory, attn_mask=masks.to_mha(mask, heads=7))
assert torch.allclose(by_default, output, atol=1e-6)
_, by_head = torch_mha(
    x,
    memory,
    memory,
    key_padding_mask=masks.to_key_padding_mask(padding),
    attn_mask=masks.to_mha(masks.causal(3, 5), heads=7),
    average_attn_weights=False,
)
assert torch.allclose(by_head, attn.permute(2, 3, 0, 1), atol=1e-6)
assert torch.allclose(mean, by_head.mean(dim=1), atol=1e-6)
batch_first = convert.to(core, "torch", batch_first=True).eval()
x_batch_first, memory_batch_first = x.transpose(0, 1), memory.transpose(0, 1)
in_batches, _ = batch_first(
    x_batch_first,
    memory_batch_first,
    memory_batch_first,
    attn_mask=masks.to_mha(mask, heads=7),
)
assert torch.allclose(in_batches.transpose(0, 1), output, atol=1e-6)

# So does SDPA, after the projections.
heads_first = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
sdpa_mask = masks.to_sdpa(mask).expand(2, 7, 3, 5)
fused = sdpa(*heads_first, attn_mask=sdpa_mask)
assert torch.allclose(fused.permute(2, 0, 1, 3), context, atol=1e-6)
causal_only = masks.to_sdpa(masks.causal(3, 5))[0, 0]
sdpa(*heads_first, attn_mask=causal_only)
sdpa_padding = masks.to_sdpa(padding)
sdpa(*heads_first, attn_mask=sdpa_padding)

# GPT-2 with a cache of two tokens: three queries and five keys.
seen = {}


def record(module, query, key, value, attention_mask, **options):
    out, weights = eager_attention_forward(
        module, query, key, value, attention_mask, **options
    )
    seen.update(query=query, key=key, mask=attention_mask, context=out, attn=weights)
    return out, weights


AttentionInterface.register("record", record)
AttentionMaskInterface.register("record", eager_mask)
config = GPT2Config(n_embd=77, n_head=7, n_layer=1, attn_implementation="record")
gpt2 = GPT2Model(config).eval()
tokens = torch.randn(2, 5, 77)
past = gpt2(inputs_embeds=tokens[:, :2], use_cache=True).past_key_values
ones = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
hidden = gpt2(inputs_embeds=tokens[:, 2:], past_key_values=past, attention_mask=ones)
may_attend = masks.combine(masks.causal(3, 5), masks.from_huggingface(ones))
assert torch.equal(masks.from_huggingface(seen["mask"]), may_attend)

# A row: what it is, then for each column its text and the tensors of its axes.
SAME = [
    (
        "query input",
        ("`i b (h d)`", x),
        (
            "`i b (h d)`; with `batch_first=True`, `b i (h d)`",
            x,
            x_batch_first,
        ),
        ("–",),
        ("`b i (h d)`", tokens[:, 2:]),
    ),
    (
        "queries by head",
        ("`i b h d`", query),
        ("–",),
        ("`b h i d`", heads_first[0]),
        ("`b h i d`", seen["query"]),
    ),
    (
        "keys, values by head",
        ("`j b h d`", key),
        ("–",),
        ("`b h j d`", heads_first[1]),
        ("`b h j d`", seen["key"]),
    ),
    (
        "attention weights",
        ("`i j b h`", attn),
        (
            "`b i j`, the mean of the heads; with `average_attn_weights=False`, `b h i j`",
            mean,
            by_head,
        ),
        ("–",),
        ("`b h i j`", seen["attn"]),
    ),
    (
        "context vectors",
        ("`i b h d`", context),
        ("–",),
        ("`b h i d`", fused),
        ("`b i h d`", seen["context"]),
    ),
    (
        "output",
        ("`i b (h d)`", output),
        ("`i b (h d)` or `b i (h d)`", by_default, in_batches),
        ("–",),
        ("`b i (h d)`", hidden.last_hidden_state),
    ),
    (
        "mask",
        ("`i j b`", mask),
        (
            "`attn_mask`: `i j` or `(b h) i j`",
            masks.to_mha(masks.causal(3, 5), heads=7),
            masks.to_mha(mask, heads=7),
        ),
        ("`attn_mask`: `i j` or `b h i j`", causal_only, sdpa_mask),
        ("inside: `b 1 i j`", seen["mask"]),
    ),
    (
        "padding mask",
        ("`1 j b`", padding),
        ("`key_padding_mask`: `b j`", masks.to_key_padding_mask(padding)),
        ("`attn_mask`: `b 1 1 j`", sdpa_padding),
        ("`attention_mask`: `b j`", ones),
    ),
    (
        "may attend",
        ("True or 1",),
        ("**False** or 0.0",),
        ("True or 0.0",),
        ("1 or 0.0",),
    ),
    (
        "`is_causal`, if lengths differ",
        ("–",),
        ("a hint only; needs `attn_mask`",),
        ("top left: $j \\le i$",),
        ("–",),
    ),
]
COLUMNS = ["core", "nn.MultiheadAttention", "SDPA", "Hugging Face"]
AXES = re.compile(r"`((?:\([hbd ]+\)|[ijbhd1])(?: (?:\([hbd ]+\)|[ijbhd1]))+)`")
lines = [f"| tensor | {' | '.join(COLUMNS)} |", "|---" * 5 + "|"]
for name, *cells in SAME:
    for text, *tensors in cells:
        stated = [sizes(axes) for axes in AXES.findall(text)]
        found = [list(tensor.shape) for tensor in tensors]
        assert stated == found, (name, text, found)
    lines.append(f"| {name} | {' | '.join(map(itemgetter(0), cells))} |")
display(Markdown("\n".join(lines)))

top_left = masks.to_sdpa(masks.causal(3, 5, corner="top left"))
flag = sdpa(*heads_first, is_causal=True)
masked = sdpa(*heads_first, attn_mask=top_left)
assert torch.allclose(flag, masked, atol=1e-6)
message = ""
try:
    torch_mha(x, memory, memory, is_causal=True)
except RuntimeError as error:
    message = str(error)
assert "Need attn_mask if specifying the is_causal hint" in message

# %% [markdown]
# 0.0 stands for an additive mask, which has −∞ (in Hugging Face the least number of the
# dtype) for a key that is hidden. [Mask conventions](source/masks/conventions.md) converts
# all of these masks, and the [mask converter](compare/masks.md) does so in the browser.
# The terms are explained in the [glossary](glossary.md).
