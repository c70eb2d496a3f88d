# %% [markdown]
# # Pretrained models from Hugging Face Transformers
#
# This page is for readers who have a model of `transformers`, such as Llama, Qwen or Gemma.
# It loads the weights of the attention layers into the modules of Headnotes, converts them
# back, and runs the whole model with the attention of Headnotes. It needs version 5.5 of the
# package or newer, `pip install "transformers>=5.5"`, or 4.57, the last of major version 4.
#
# To run two models with the attention of Headnotes, a later release is needed: 5.5 for
# **BERT**, and 5.16 for **T5**. They can be converted in all of these releases.
#
# The models here are tiny and have random weights, so that the page is built without a
# download. For trained weights, replace `LlamaForCausalLM(config)` by
# `AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")`.

# %% hide="true"
import warnings

# Transformers imports tqdm, which wants a progress bar of Jupyter's.
warnings.filterwarnings("ignore", "IProgress not found")

# %%
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=101,
    hidden_size=60,
    intermediate_size=70,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    initializer_range=0.3,  # large enough for the rows of attention to differ
    eos_token_id=None,
)
model = LlamaForCausalLM(config).eval()

# %% [markdown]
# ## Load the weights of a layer
#
# [`convert.from_transformers`](source/convert.md#from_transformers) converts an attention
# layer, or all layers of a model. The result for Llama is
# [`fast.MultiHeadAttention`](source/fast/module.md) with grouped heads and rotary positions.

# %%
from headnotes import convert

layers = convert.from_transformers(model)
for name, layer in layers.items():
    print(name, layer.heads, layer.kv_heads, layer.d_k, layer.rotary.pairing)

# %% [markdown]
# Our module is sequence first, and it computes the positions itself. In `transformers`, the
# model passes the cosines and sines of all positions to each layer. The outputs are equal
# to rounding:

# %%
x = torch.randn(3, 7, 60)  # [batch_size, seq_len, d_model]
positions = torch.arange(7).unsqueeze(0)
causal = torch.full((7, 7), -torch.inf).triu(1)
with torch.no_grad():
    theirs, _ = model.model.layers[0].self_attn(
        x,
        position_embeddings=model.model.rotary_emb(x, positions),
        attention_mask=causal[None, None],
    )
    y = x.transpose(0, 1)  # [seq_len, batch_size, d_model]
    ours = layers["model.layers.0.self_attn"](query=y, key=y, value=y, is_causal=True)
error = (ours.transpose(0, 1) - theirs).norm() / theirs.norm()
print("relative difference below 1e-5:", bool(error < 1e-5))

# %% [markdown]
# ## Models that can be converted
#
# The table is made from [`ARCHITECTURES`](source/architectures.md). The tests compare each
# row with a random model of its architecture. Grouped heads, the width of a head, biases,
# the scale and scaled rotary frequencies (linear, YaRN, Llama 3) are read from the layer,
# and so is whether it has a norm or a window where these are optional.

# %% hide="true"
from IPython.display import Markdown, display

from headnotes.architectures import ARCHITECTURES, Latent

NORMS = {
    "RMSNorm": "RMS",
    "LayerNorm": "layer norm",
    "OffsetRMSNorm": "RMS, stored minus 1",
    "HeadLayerNorm": "layer norm, by head",
}


def norm_of(row):
    norm = getattr(row, "norm", None)
    if norm is None:
        return "–"
    kind = NORMS[type(norm.make(2, 4, 1e-6)).__name__]
    return kind if norm.over == "head" else f"{kind}, all heads"


def others_of(row):
    """What else differs from the attention of 2017."""
    if isinstance(row, Latent):
        return "keys and values from a latent"
    others = [name for name in ("window", "soft_cap") if getattr(row, name)]
    others += {"T5": ["bias by distance"], "gpt-oss": ["sinks"]}.get(row.model, [])
    return ", ".join(others).replace("_", " ") or "–"


lines = [
    "| model | projections | rotary pairs | norm of Q, K | other |",
    "|---|---|---|---|---|",
]
for row in ARCHITECTURES.values():
    projections = "down, then up"
    if not isinstance(row, Latent):
        projections = f"fused, `{row.order}`" if row.order else "four"
    cells = row.model, projections, row.pairing or "–", norm_of(row), others_of(row)
    lines.append(f"| {' | '.join(cells)} |")
assert len(lines) == 2 + 17
display(Markdown("\n".join(lines)))

# %% [markdown]
# A model with a vision or audio encoder of another architecture, such as Gemma 3, is
# converted without the attention of that encoder, which a warning names.
#
# Not converted, but refused with an error that names the option: quantized layers and
# adapters, cross-attention of GPT-2 and, from version 5 on, of BERT, dynamic and LongRoPE
# scaling, attention to both sides of a window, in version 4 pruned heads and relative
# positions of BERT, and layers of other models. An error about a version names the model,
# the version that is installed, and those that work.
#
# ## Convert back
#
# [`convert.to_transformers`](source/convert.md#to_transformers) returns a state dict, for
# example after training. There and back, each weight has the same bits:

# %%
state = convert.to_transformers(layers, model)
before = model.state_dict()
print(len(state), "entries, the same bits:", end=" ")
print(all(torch.equal(value, before[name]) for name, value in state.items()))
print(model.load_state_dict(state, strict=False).unexpected_keys)

# %% [markdown]
# ## Run a whole model
#
# [`register`](source/integrations/transformers.md#register) adds an attention
# implementation, `"headnotes"`, that models use as they use `"eager"` or `"sdpa"`. Masks,
# caches and generation are those of the library. Here the second prompt has two tokens of
# padding on the left, and greedy generation gives the tokens of `"eager"`:

# %%
from headnotes.integrations.transformers import register

register()
prompts = torch.tensor([[5, 3, 2, 11], [0, 0, 7, 13]])
tokens = {}
for name in ("eager", "headnotes"):
    model.set_attn_implementation(name)
    tokens[name] = model.generate(
        prompts,
        attention_mask=(prompts != 0).long(),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
    )
    print(f"{name:9}", tokens[name][:, 4:].tolist())
assert torch.equal(tokens["eager"], tokens["headnotes"])

# %% [markdown]
# For trained weights, pass `attn_implementation="headnotes"` to `from_pretrained`. In
# training, the attention dropout of the model applies. The function refuses masks that
# differ between heads, masks of whole heads, floating-point masks and paged caches. A model
# that offers no choice of implementations, such as BERT and T5 in 4.57, refuses to be built
# with `"headnotes"`; its `set_attn_implementation` logs a warning, and changes nothing.
