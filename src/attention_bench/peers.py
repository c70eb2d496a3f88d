r"""# Contestants from other packages

The attention of three models of `transformers`, and that of `x-transformers`, take part
where these are installed: `pip install headnotes[bench]`. They come in layers of a
larger whole, and are taken out of it here so that nothing but attention is timed:

- `gpt2` is what it is, without the dropout after its output projection;
- `bert` has its output projection in a layer of its own, with a residual and a norm, so
  it is given a plain one;
- `llama` turns queries and keys by their positions: here by an angle of zero, which
  leaves them as they are, though not without work; it is given biases;
- `x-transformers` has no biases, so its linear maps are replaced by ones that do.

All of them are asked for `scaled_dot_product_attention`, which each calls by a name of
its own.

Source: [transformers](https://github.com/huggingface/transformers), `GPT2Attention`,
`BertSelfAttention`, `LlamaAttention`;
[x-transformers](https://github.com/lucidrains/x-transformers), `Attention`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from attention_bench.contestants import FAST, NONE, Contestant, Entry, sdpa_mask
from attention_bench.setting import Setting
from headnotes import convert, mha


def linear(projection: convert.Projection) -> nn.Linear:
    r"""A linear layer that holds this projection.

    >>> from headnotes.convert import Projection
    >>> linear(Projection(torch.ones(3, 5))).bias.shape
    torch.Size([3])
    """
    d_out, d_in = projection.weight.shape
    with torch.random.fork_rng(devices=[]):
        layer = nn.Linear(d_in, d_out).to(projection.weight)
    with torch.no_grad():
        layer.weight.copy_(projection.weight)
        layer.bias.copy_(projection.bias_or_zeros())
    return layer


def told(setting: Setting) -> dict[str, Any]:
    """What the modules of `transformers` are told of the mask."""
    if setting.mask == "causal":
        return {"attention_mask": None, "is_causal": True}
    return {"attention_mask": sdpa_mask(setting), "is_causal": False}


def build_gpt2(ours: mha.MultiHeadAttention, **options: Any) -> nn.Module:
    """Its linear maps are written `[d_in, d_out]`, three of them in one."""
    from transformers.models.gpt2 import configuration_gpt2, modeling_gpt2

    weights = convert.extract(ours)
    config = configuration_gpt2.GPT2Config(
        n_embd=len(weights.query.weight),
        n_head=weights.heads,
        attn_pdrop=ours.dropout.p,
        resid_pdrop=0.0,
        attn_implementation="sdpa",
    )
    module = modeling_gpt2.GPT2Attention(config, **options).to(weights.query.weight)
    three = weights[1:4]
    with torch.no_grad():
        module.c_attn.weight.copy_(torch.cat([part.weight for part in three]).T)
        module.c_attn.bias.copy_(torch.cat([part.bias_or_zeros() for part in three]))
        module.c_proj.weight.copy_(weights.output.weight.T)
        module.c_proj.bias.copy_(weights.output.bias_or_zeros())
    built: nn.Module = module
    return built


def gpt2(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """The attention of GPT-2."""
    module, how = build_gpt2(ours), told(setting)
    return Entry(module, lambda x: module(x, **how))


def bert(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """The attention of BERT, and an output projection."""
    from transformers.models.bert import configuration_bert, modeling_bert

    weights = convert.extract(ours)
    config = configuration_bert.BertConfig(
        hidden_size=setting.d_model,
        num_attention_heads=setting.heads,
        attention_probs_dropout_prob=setting.dropout,
        attn_implementation="sdpa",
    )
    attention = modeling_bert.BertSelfAttention(config)
    attention.query = linear(weights.query)
    attention.key = linear(weights.key)
    attention.value = linear(weights.value)
    both: Any = nn.ModuleDict({"self": attention, "output": linear(weights.output)})
    how = told(setting)
    return Entry(both, lambda x: both["output"](both["self"](x, **how)[0]))


def llama(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """The attention of Llama, at angles of zero."""
    from transformers.models.llama import configuration_llama, modeling_llama

    weights = convert.extract(ours)
    config = configuration_llama.LlamaConfig(
        hidden_size=setting.d_model,
        num_attention_heads=setting.heads,
        attention_dropout=setting.dropout,
        attn_implementation="sdpa",
    )
    module = modeling_llama.LlamaAttention(config, layer_idx=0)
    module.q_proj, module.k_proj = linear(weights.query), linear(weights.key)
    module.v_proj, module.o_proj = linear(weights.value), linear(weights.output)
    sizes = (1, setting.seq_len, setting.d_model // setting.heads)
    cos = torch.ones(sizes, **setting.like)
    how = told(setting) | {"position_embeddings": (cos, torch.zeros_like(cos))}
    return Entry(module, lambda x: module(x, **how))


def build_x_transformers(ours: mha.MultiHeadAttention, causal: bool) -> nn.Module:
    """Its layers replaced by ours, which have biases."""
    from x_transformers.x_transformers import Attention

    weights = convert.extract(ours)
    d_model = len(weights.query.weight)
    module = Attention(
        d_model,
        dim_head=d_model // weights.heads,
        heads=weights.heads,
        causal=causal,
        flash=True,
        dropout=ours.dropout.p,
    )
    module.to_q, module.to_k = linear(weights.query), linear(weights.key)
    module.to_v, module.to_out = linear(weights.value), linear(weights.output)
    built: nn.Module = module
    return built


def x_transformers(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """The attention of x-transformers, with `flash=True`."""
    module = build_x_transformers(ours, setting.mask == "causal")
    mask: Tensor | None = None
    if setting.mask == "padding":
        # Told by `mask`, it would clear the outputs of the filler as well.
        mask = sdpa_mask(setting)
    return Entry(module, lambda x: module(x, attn_mask=mask))


X_TRANSFORMERS = NONE | {"causal": "`causal=True`", "padding": "`attn_mask`"}

PEERS = {
    "gpt2": Contestant(gpt2, FAST),
    "bert": Contestant(bert, FAST),
    "llama": Contestant(llama, FAST),
    "x-transformers": Contestant(x_transformers, X_TRANSFORMERS),
}
