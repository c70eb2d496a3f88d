r"""# Benchmarked implementations

This module builds and calls the implementations that are benchmarked. Each computes the
function of [the core module](../mha.md), with the same weights, which
[`convert`](../convert.md) copies into it. A *builder* takes the core
module and a [setting](setting.md) and returns an *adapter*: the module, a call that
takes the input in the module's own layout, and where its result has the attention
weights. Layout and mask are converted before the clock starts, to the form that each
implementation is fastest with.

An implementation that does not support a setting is not listed there: `causal` has no
padding mask, and FlexAttention no dropout.

The attention layers of three models of `transformers`, and that of `x-transformers`,
are measured where these packages are installed (`pip install transformers
x-transformers`). They are parts of larger layers, and changed here so that they compute
attention and nothing else:

- `gpt2` has no dropout after its output projection;
- `bert` gets a plain output projection, because its own belongs to a layer with a
  residual connection and a layer norm;
- `llama` gets biases, and rotary embeddings of angle zero, which leave queries and keys
  unchanged, though the multiplications still cost time;
- `x-transformers` gets linear layers with biases.

All four use `scaled_dot_product_attention`, which each selects by another option. Both
packages are imported only where they are used.

Source: the systems on the pages of `implementations/`; of PyTorch
[`nn.MultiheadAttention`](https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html),
[`scaled_dot_product_attention`](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html)
and [FlexAttention](https://docs.pytorch.org/docs/2.11/nn.attention.flex_attention.html);
[transformers](https://github.com/huggingface/transformers), `GPT2Attention`,
`BertSelfAttention`, `LlamaAttention`;
[x-transformers](https://github.com/lucidrains/x-transformers), `Attention`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from attention_bench.setting import Setting
from headnotes import convert, fast, masks, mha

# Tensors that are compared: "output", and maybe "weights" and "input gradient".
Outputs = dict[str, Tensor]


@dataclass
class Adapter:
    """A module, a function that calls it, and one that finds weights in its result."""

    module: nn.Module
    call: Callable[[Tensor], Any]
    batch_first: bool = True
    # Takes the averaged weights, `[q_len, k_len, batch_size]`, from a result with them.
    get_weights: Callable[[Any], Tensor] | None = None
    # The time of the first call. After a long one, no further warm-up is needed.
    first_call_seconds: float = 0.0

    def switch_layout(self, x: Tensor) -> Tensor:
        """Transpose a tensor from sequence first to the module's layout, or back."""
        return x.transpose(0, 1).contiguous() if self.batch_first else x

    def outputs(self, result: Any) -> Outputs:
        """The output, sequence first, and the averaged weights if there are any."""
        output = result[0] if isinstance(result, tuple) else result
        outputs = {"output": self.switch_layout(output.detach())}
        if self.get_weights is not None:
            outputs["weights"] = self.get_weights(result).detach()
        return outputs


Builder = Callable[[mha.MultiHeadAttention, Setting], Adapter]


@dataclass(frozen=True)
class Implementation:
    """A builder, and which settings the implementation supports."""

    build: Builder
    # How a mask is passed, for each mask that the implementation supports.
    mask_spelling: Mapping[str, str]
    supports_training: bool = True
    supports_dropout: bool = True

    def supports(self, setting: Setting) -> bool:
        """Whether the implementation has this mask, training and dropout."""
        if setting.training and not self.supports_training:
            return False
        if setting.dropout and not self.supports_dropout:
            return False
        return setting.mask in self.mask_spelling


def build_core(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """The core module."""
    module, mask = convert.to(core, "core"), setting.attention_mask()
    return Adapter(
        module,
        lambda x: module(query=x, key=x, value=x, mask=mask),
        batch_first=False,
    )


def fast_module(
    core: mha.MultiHeadAttention, setting: Setting
) -> tuple[nn.Module, dict[str, Any]]:
    """The fast module with the weights of `core`, and the arguments for the mask."""
    module = fast.MultiHeadAttention(setting.heads, setting.d_model, setting.dropout)
    module.to(**setting.factory_kwargs).load_state_dict(core.state_dict())
    if setting.mask == "causal":
        return module, {"is_causal": True}
    return module, {"mask": setting.attention_mask()}


def build_fast(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """The fast module."""
    module, kwargs = fast_module(core, setting)
    return Adapter(
        module,
        lambda x: module(query=x, key=x, value=x, **kwargs),
        batch_first=False,
    )


def build_fast_weights(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """The fast module, which also returns the weights averaged over heads."""
    module, kwargs = fast_module(core, setting)
    kwargs |= {"need_weights": True, "average_weights": True}
    return Adapter(
        module,
        lambda x: module(query=x, key=x, value=x, **kwargs),
        batch_first=False,
        get_weights=lambda result: result[1],
    )


def build_causal(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """`implementations.causal`: batch first, always causal."""
    module = convert.to(core, "causal", context_length=setting.seq_len)
    return Adapter(module, module)


def build_valid_lens(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    r"""`implementations.valid_lens`: masks are lengths.

    >>> for mask in ("padding", "causal"):
    ...     setting = Setting(2, 3, mask, d_model=10, heads=5)
    ...     adapter = build_valid_lens(setting.core(), setting)
    ...     adapter.call(adapter.switch_layout(setting.x())).shape
    torch.Size([2, 3, 10])
    torch.Size([2, 3, 10])
    """
    module = convert.to(core, "valid_lens")
    batch_size, seq_len = setting.batch_size, setting.seq_len
    lengths = None
    if setting.mask == "padding":
        lengths = setting.lengths()  # [batch_size]
    elif setting.mask == "causal":
        # Query i may attend to the first i + 1 keys.
        each = torch.arange(seq_len, device=setting.device) + 1  # [seq_len]
        lengths = each.expand(batch_size, -1)  # [batch_size, seq_len]
    return Adapter(module, lambda x: module(x, x, x, lengths))


def build_batch_first(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """`implementations.batch_first`: returns the weights of each head."""
    module, mask = convert.to(core, "batch_first"), sdpa_mask(setting)
    return Adapter(
        module,
        lambda x: module(x, x, x, mask),
        get_weights=lambda result: result[1].mean(dim=1).permute(1, 2, 0),
    )


def build_nn(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """`nn.MultiheadAttention` without weights, so that it may use fused kernels."""
    module, kwargs = convert.to(core, "torch"), nn_mask_kwargs(setting)
    return Adapter(
        module,
        lambda x: module(x, x, x, need_weights=False, **kwargs),
        batch_first=False,
    )


def build_nn_weights(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """`nn.MultiheadAttention` by default: it returns weights averaged over heads."""
    module, kwargs = convert.to(core, "torch"), nn_mask_kwargs(setting)
    return Adapter(
        module,
        lambda x: module(x, x, x, **kwargs),
        batch_first=False,
        get_weights=lambda result: result[1].permute(1, 2, 0),
    )


def build_nn_fastpath(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """`nn.MultiheadAttention`, batch first: inference takes its fast path."""
    module = convert.to(core, "torch", batch_first=True)
    kwargs = nn_mask_kwargs(setting)
    return Adapter(module, lambda x: module(x, x, x, need_weights=False, **kwargs))


def nn_mask_kwargs(setting: Setting) -> dict[str, Any]:
    """The arguments of `nn.MultiheadAttention` for the mask."""
    mask = setting.attention_mask()
    if mask is None:
        return {}
    if setting.mask == "padding":
        return {"key_padding_mask": masks.to_key_padding_mask(mask)}
    # `is_causal` alone would do, but PyTorch refuses it without a mask beside it.
    return {"attn_mask": ~mask[..., 0], "is_causal": True}


def sdpa_mask(setting: Setting) -> Tensor | None:
    """The mask in the convention of `scaled_dot_product_attention`."""
    mask = setting.attention_mask()
    return None if mask is None else masks.to_sdpa(mask)


class FusedProjections(nn.Module):
    r"""One projection to query, key and value, a kernel, and the output projection.

    >>> setting = Setting(2, 5, d_model=77, heads=7)
    >>> def first(query, key, value, dropout):
    ...     return value[:, :, :1].expand_as(value)
    >>> module = FusedProjections(setting.core(), first)
    >>> module(torch.randn(2, 5, 77)).shape
    torch.Size([2, 5, 77])
    """

    def __init__(
        self,
        core: mha.MultiHeadAttention,
        kernel: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    ) -> None:
        super().__init__()
        # All queries, then all keys, then all values: the order of most models.
        fused: Any = convert.to(core, "fused", order="3 heads d_k")
        self.heads, self.dropout = core.heads, core.dropout.p
        self.qkv, self.output, self.kernel = fused.qkv, fused.output, kernel

    def forward(
        self,
        x: Tensor,  # [batch_size, seq_len, d_model]
    ) -> Tensor:
        qkv = self.qkv(x)  # [batch_size, seq_len, 3 * d_model]
        qkv = qkv.unflatten(-1, (3, self.heads, -1))  # [batch_size, seq_len, 3, ...]
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [batch_size, heads, ...]
        dropout = self.dropout if self.training else 0.0
        context = self.kernel(query, key, value, dropout)  # [batch_size, heads, ...]
        context = context.transpose(1, 2).flatten(2)  # [batch_size, seq_len, d_model]
        output: Tensor = self.output(context)  # [batch_size, seq_len, d_model]
        return output


def build_sdpa(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """`scaled_dot_product_attention` between two projections: the least overhead."""
    kwargs: dict[str, Any] = {"is_causal": setting.mask == "causal"}
    if setting.mask == "padding":
        kwargs = {"attn_mask": sdpa_mask(setting)}
    attention = F.scaled_dot_product_attention
    module = FusedProjections(
        core, lambda q, k, v, dropout: attention(q, k, v, dropout_p=dropout, **kwargs)
    )
    return Adapter(module, module)


def build_flex(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """FlexAttention between two projections; it needs a compiler."""
    from torch.nn.attention.flex_attention import flex_attention

    mask, block_mask = setting.attention_mask(), None
    if mask is not None:
        block_mask = masks.to_block_mask(mask.expand(setting.seq_len, -1, -1))
    attention = torch.compile(flex_attention, dynamic=False)
    module = FusedProjections(
        core, lambda q, k, v, dropout: attention(q, k, v, block_mask=block_mask)
    )
    return Adapter(module, module)


def linear(projection: convert.Projection) -> nn.Linear:
    r"""A linear layer with the weight and bias of a projection.

    >>> from headnotes.convert import Projection
    >>> linear(Projection(torch.ones(3, 5))).bias.shape
    torch.Size([3])
    """
    d_out, d_in = projection.weight.shape
    # The default initialization is overwritten; it must not advance the generator.
    with torch.random.fork_rng(devices=[]):
        layer = nn.Linear(d_in, d_out).to(projection.weight)
    with torch.no_grad():
        layer.weight.copy_(projection.weight)
        layer.bias.copy_(projection.bias_or_zeros())
    return layer


def transformers_mask_kwargs(setting: Setting) -> dict[str, Any]:
    """The arguments of the modules of `transformers` for the mask."""
    if setting.mask == "causal":
        return {"attention_mask": None, "is_causal": True}
    return {"attention_mask": sdpa_mask(setting), "is_causal": False}


def gpt2_module(core: mha.MultiHeadAttention, **options: Any) -> nn.Module:
    """`GPT2Attention` with the weights of `core`."""
    from transformers.models.gpt2 import configuration_gpt2, modeling_gpt2

    weights = convert.extract(core)
    config = configuration_gpt2.GPT2Config(
        n_embd=len(weights.query.weight),
        n_head=weights.heads,
        attn_pdrop=core.dropout.p,
        resid_pdrop=0.0,
        attn_implementation="sdpa",
    )
    module = modeling_gpt2.GPT2Attention(config, **options).to(weights.query.weight)
    projections = (weights.query, weights.key, weights.value)
    qkv_weight = torch.cat([part.weight for part in projections])
    qkv_bias = torch.cat([part.bias_or_zeros() for part in projections])
    # GPT-2's Conv1D stores the transpose of a linear layer's weight: `[d_in, d_out]`.
    with torch.no_grad():
        module.c_attn.weight.copy_(qkv_weight.T)
        module.c_attn.bias.copy_(qkv_bias)
        module.c_proj.weight.copy_(weights.output.weight.T)
        module.c_proj.bias.copy_(weights.output.bias_or_zeros())
    typed: nn.Module = module
    return typed


def build_gpt2(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """The attention of GPT-2."""
    module, kwargs = gpt2_module(core), transformers_mask_kwargs(setting)
    return Adapter(module, lambda x: module(x, **kwargs))


def build_bert(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """The attention of BERT, and an output projection."""
    from transformers.models.bert import configuration_bert, modeling_bert

    weights = convert.extract(core)
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
    output = linear(weights.output)
    kwargs = transformers_mask_kwargs(setting)
    return Adapter(
        nn.ModuleList([attention, output]),
        lambda x: output(attention(x, **kwargs)[0]),
    )


def build_llama(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """The attention of Llama, with rotary embeddings of angle zero."""
    from transformers.models.llama import configuration_llama, modeling_llama

    weights = convert.extract(core)
    config = configuration_llama.LlamaConfig(
        hidden_size=setting.d_model,
        num_attention_heads=setting.heads,
        attention_dropout=setting.dropout,
        attn_implementation="sdpa",
    )
    module = modeling_llama.LlamaAttention(config, layer_idx=0)
    module.q_proj = linear(weights.query)
    module.k_proj = linear(weights.key)
    module.v_proj = linear(weights.value)
    module.o_proj = linear(weights.output)
    sizes = (1, setting.seq_len, setting.d_model // setting.heads)
    cos = torch.ones(sizes, **setting.factory_kwargs)
    sin = torch.zeros(sizes, **setting.factory_kwargs)
    kwargs = transformers_mask_kwargs(setting) | {"position_embeddings": (cos, sin)}
    return Adapter(module, lambda x: module(x, **kwargs))


def x_transformers_module(core: mha.MultiHeadAttention, causal: bool) -> nn.Module:
    """`Attention` of x-transformers with the weights of `core`."""
    from x_transformers.x_transformers import Attention

    weights = convert.extract(core)
    d_model = len(weights.query.weight)
    module = Attention(
        d_model,
        dim_head=d_model // weights.heads,
        heads=weights.heads,
        causal=causal,
        flash=True,
        dropout=core.dropout.p,
    )
    # Its own linear layers have no biases.
    module.to_q = linear(weights.query)
    module.to_k = linear(weights.key)
    module.to_v = linear(weights.value)
    module.to_out = linear(weights.output)
    typed: nn.Module = module
    return typed


def build_x_transformers(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
    """The attention of x-transformers, with `flash=True`."""
    module = x_transformers_module(core, causal=setting.mask == "causal")
    # As `mask`, a padding mask would also zero the outputs of padded queries.
    mask = sdpa_mask(setting) if setting.mask == "padding" else None
    return Adapter(module, lambda x: module(x, attn_mask=mask))


def compiled(build: Builder) -> Builder:
    """A builder of the same implementation, whose call `torch.compile` compiles."""

    def build_compiled(core: mha.MultiHeadAttention, setting: Setting) -> Adapter:
        adapter = build(core, setting)
        adapter.call = torch.compile(adapter.call, dynamic=False)
        return adapter

    return build_compiled


# How each implementation gets a mask, in words for the page of benchmarks.
NO_MASK = {"none": ""}
BOOL_MASK = NO_MASK | {"causal": "a bool mask", "padding": "a bool mask"}
IS_CAUSAL = NO_MASK | {"causal": "`is_causal=True`", "padding": "a bool mask"}
NN_MASK = NO_MASK | {
    "causal": "`is_causal=True`, with a bool mask",
    "padding": "`key_padding_mask`",
}
VALID_LENS = NO_MASK | {
    "causal": "a length for each query",
    "padding": "a length for each batch item",
}
BLOCK_MASK = NO_MASK | {"causal": "a `block_mask`", "padding": "a `block_mask`"}
X_TRANSFORMERS = NO_MASK | {"causal": "`causal=True`", "padding": "`attn_mask`"}

IMPLEMENTATIONS = {
    "core": Implementation(build_core, BOOL_MASK),
    "fast": Implementation(build_fast, IS_CAUSAL),
    "fast-weights": Implementation(build_fast_weights, IS_CAUSAL),
    "causal": Implementation(build_causal, {"causal": "always causal"}),
    "valid_lens": Implementation(build_valid_lens, VALID_LENS),
    "batch_first": Implementation(build_batch_first, BOOL_MASK),
    "nn": Implementation(build_nn, NN_MASK),
    "nn-weights": Implementation(build_nn_weights, NN_MASK),
    "nn-fastpath": Implementation(build_nn_fastpath, NN_MASK, supports_training=False),
    "sdpa": Implementation(build_sdpa, IS_CAUSAL),
    "flex": Implementation(build_flex, BLOCK_MASK, supports_dropout=False),
    "gpt2": Implementation(build_gpt2, IS_CAUSAL),
    "bert": Implementation(build_bert, IS_CAUSAL),
    "llama": Implementation(build_llama, IS_CAUSAL),
    "x-transformers": Implementation(build_x_transformers, X_TRANSFORMERS),
}

# What `--compile` adds: "nn+compile" and so on. FlexAttention is always compiled.
COMPILED = "+compile"
COMPILED_IMPLEMENTATIONS = {
    name + COMPILED: replace(implementation, build=compiled(implementation.build))
    for name, implementation in IMPLEMENTATIONS.items()
    if name != "flex"
}
ALL_IMPLEMENTATIONS = IMPLEMENTATIONS | COMPILED_IMPLEMENTATIONS
