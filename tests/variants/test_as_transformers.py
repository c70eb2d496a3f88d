"""Variants give what `transformers` gives, with its weights.

One file, so that one process of the tests loads the library. Nothing is downloaded: the
weights are random, large enough for the rows of attention to differ.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headnotes import masks
from headnotes.variants import rotary
from headnotes.variants.alibi import AlibiAttention
from headnotes.variants.differential import DifferentialAttention, initial_lambda
from headnotes.variants.grouped_query import GroupedQueryAttention
from headnotes.variants.latent import LatentAttention
from headnotes.variants.linear import chunked_delta_rule
from headnotes.variants.qk_norm import QKNormAttention
from headnotes.variants.relative import T5Attention
from headnotes.variants.rotary import RotaryAttention, rotary_frequencies
from headnotes.variants.sinks import SinkAttention
from headnotes.variants.sliding_window import SlidingWindowAttention
from headnotes.variants.soft_cap import SoftCapAttention

LENGTH, BATCH = 7, 2
CAUSAL = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
POSITIONS = torch.arange(LENGTH).unsqueeze(0)


def load(module: str) -> Any:
    return pytest.importorskip(f"transformers.models.{module}")


def randomize(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.25)


def copy(ours: Any, theirs: Any) -> None:
    """The weights of a linear map; without a bias of theirs, ours is zero."""
    with torch.no_grad():
        ours.weight.copy_(theirs.weight)
        if ours.bias is not None:
            ours.bias.copy_(torch.zeros(()) if theirs.bias is None else theirs.bias)


def assert_same(output: Tensor, expected: Tensor) -> None:
    """Ours is sequence first, theirs batch first."""
    expected = expected.transpose(0, 1)
    assert (output - expected).norm() <= 1e-5 * expected.norm()


class LlamaLike(RotaryAttention, GroupedQueryAttention):
    """Rotated queries and keys, then the scores of groups."""

    def __init__(self, heads: int, d_model: int, kv_heads: int) -> None:
        GroupedQueryAttention.__init__(
            self, heads, d_model, bias=False, kv_heads=kv_heads
        )
        self.frequencies = tuple(rotary_frequencies(self.d_k).tolist())
        self.pairing, self.attention_factor = "halves", 1.0


@pytest.mark.parametrize("kv_heads", [3, 1])
def test_rotary_and_grouped_attention_are_those_of_llama(kv_heads: int) -> None:
    llama = load("llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=24, num_attention_heads=3, num_key_value_heads=kv_heads
    )
    config._attn_implementation = "eager"
    theirs = llama.LlamaAttention(config, layer_idx=0).eval()
    randomize(theirs)
    ours = LlamaLike(3, 24, kv_heads).eval()
    for name, layer in zip("qkv", (ours.query, ours.key, ours.value), strict=True):
        copy(layer.linear, getattr(theirs, f"{name}_proj"))
    copy(ours.output, theirs.o_proj)
    x = torch.randn(LENGTH, BATCH, 24)
    angles = llama.LlamaRotaryEmbedding(config)(x, POSITIONS)
    expected, _ = theirs(x.transpose(0, 1), angles, CAUSAL)
    assert_same(ours(query=x, key=x, value=x, mask=masks.causal(LENGTH)), expected)


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_is_that_of_bloom(heads: int) -> None:
    bloom = load("bloom.modeling_bloom")
    config = bloom.BloomConfig(hidden_size=12, n_head=heads)
    theirs = bloom.BloomAttention(config, layer_idx=0).eval()
    randomize(theirs)
    ours = AlibiAttention(heads, 12).eval()
    # Each head has the rows of its query, key and value side by side.
    fused = theirs.query_key_value
    layers = (ours.query.linear, ours.key.linear, ours.value.linear)
    with torch.no_grad():
        for n, layer in enumerate(layers):
            weight = fused.weight.view(heads, 3, -1, 12)[:, n]
            layer.weight.copy_(weight.reshape(12, 12))
            layer.bias.copy_(fused.bias.view(heads, 3, -1)[:, n].flatten())
        ours.output.load_state_dict(theirs.dense.state_dict())
    x = torch.randn(LENGTH, BATCH, 12)
    alibi = bloom.build_alibi_tensor(torch.ones(BATCH, LENGTH), heads, torch.float32)
    y = x.transpose(0, 1)
    expected, _ = theirs(y, torch.zeros_like(y), alibi, CAUSAL)
    assert_same(ours(query=x, key=x, value=x, mask=masks.causal(LENGTH)), expected)


@pytest.mark.parametrize("is_decoder", [True, False])
def test_buckets_are_those_of_t5(is_decoder: bool) -> None:
    t5 = load("t5.modeling_t5")
    settings = {
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 6,
    }
    config = t5.T5Config(
        d_model=12, d_kv=4, num_heads=3, is_decoder=is_decoder, **settings
    )
    config._attn_implementation = "eager"
    theirs = t5.T5Attention(
        config, has_relative_attention_bias=True, layer_idx=0
    ).eval()
    randomize(theirs)
    sizes = {"buckets": 8, "max_distance": 6}
    ours = T5Attention(3, 12, bias=False, bidirectional=not is_decoder, **sizes).eval()
    layers = (ours.query.linear, ours.key.linear, ours.value.linear, ours.output)
    for name, layer in zip("qkvo", layers, strict=True):
        copy(layer, getattr(theirs, name))
    state = theirs.relative_attention_bias.state_dict()
    ours.relative_bias.load_state_dict(state)
    x = torch.randn(LENGTH, BATCH, 12)
    mask = masks.causal(LENGTH) if is_decoder else None
    expected = theirs(x.transpose(0, 1), mask=CAUSAL if is_decoder else None)[0]
    assert_same(ours(query=x, key=x, value=x, mask=mask), expected)


@pytest.mark.parametrize("query_rank", [None, 5])
def test_latent_attention_is_that_of_deepseek(query_rank: int | None) -> None:
    deepseek = load("deepseek_v2.modeling_deepseek_v2")
    config = deepseek.DeepseekV2Config(
        hidden_size=12,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=query_rank,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=2,
    )
    config._attn_implementation = "eager"
    theirs = deepseek.DeepseekV2Attention(config, layer_idx=0).eval()
    randomize(theirs)
    sizes: dict[str, Any] = {"kv_rank": 8, "rotary_dim": 4, "d_k": 6, "d_v": 2}
    ours = LatentAttention(3, 12, query_rank=query_rank, **sizes).eval()
    down, up = theirs.kv_a_proj_with_mqa.weight, theirs.kv_b_proj.weight
    up = up.view(3, 6 + 2, 8)
    ours.load_state_dict(
        {
            "latent.weight": down[:8],
            "rotary_key.linear.weight": down[8:],
            "latent_norm.weight": theirs.kv_a_layernorm.weight,
            "key.linear.weight": up[:, :6].reshape(18, 8),
            "value.linear.weight": up[:, 6:].reshape(6, 8),
            "output.weight": theirs.o_proj.weight,
        }
        | (
            {
                "query_latent.0.weight": theirs.q_a_proj.weight,
                "query_latent.1.weight": theirs.q_a_layernorm.weight,
                "query.linear.weight": theirs.q_b_proj.weight,
            }
            if query_rank
            else {"query.linear.weight": theirs.q_proj.weight}
        )
    )
    x = torch.randn(LENGTH, BATCH, 12)
    angles = deepseek.DeepseekV2RotaryEmbedding(config)(x, POSITIONS)
    expected = theirs(x.transpose(0, 1), CAUSAL, position_embeddings=angles)[0]
    assert_same(ours(query=x, key=x, value=x, mask=masks.causal(LENGTH)), expected)
    assert_same(ours.decode(x, ours.cache(BATCH, LENGTH))[0], expected)


# Attention with the four projections of the core
SIZES: dict[str, Any] = {
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_hidden_layers": 1,
    "attn_implementation": "eager",
}
NO_ROTATION = torch.ones(1, LENGTH, 1), torch.zeros(1, LENGTH, 1)  # cosine and sine


def compare(
    ours: Any, theirs: Any, mask: Tensor = CAUSAL, order: Tensor | None = None
) -> None:
    """The same output with the same weights, in causal self-attention.

    `mask` is what theirs is given, and what ours does by itself; `order` are their rows
    of query, key and value in our order.
    """
    heads = [layer.linear for layer in (ours.query, ours.key, ours.value)]
    for name, layer in zip("qkvo", (*heads, ours.output), strict=True):
        copy(layer, getattr(theirs, f"{name}_proj"))
    for layer in heads if order is not None else ():
        layer.weight.data = layer.weight.data[order]
    x = torch.randn(LENGTH, BATCH, 12)
    expected, *_ = theirs.eval()(
        hidden_states=x.transpose(0, 1),
        position_embeddings=NO_ROTATION,
        attention_mask=mask,
    )
    output = ours.eval()(query=x, key=x, value=x, mask=masks.causal(LENGTH))
    assert_same(output, expected)


def test_a_soft_cap_is_that_of_gemma_2() -> None:
    gemma = load("gemma2.modeling_gemma2")
    config = gemma.Gemma2Config(
        **SIZES,
        head_dim=4,
        query_pre_attn_scalar=4,
        attn_logit_softcapping=2.0,
        layer_types=["full_attention"],
    )
    theirs = gemma.Gemma2Attention(config, 0)
    randomize(theirs)
    compare(SoftCapAttention(3, 12, soft_cap=2.0), theirs)


def test_sinks_are_those_of_gpt_oss() -> None:
    gpt = load("gpt_oss.modeling_gpt_oss")
    config = gpt.GptOssConfig(**SIZES, head_dim=4, layer_types=["full_attention"])
    theirs = gpt.GptOssAttention(config, 0)
    randomize(theirs)
    ours = SinkAttention(3, 12)
    ours.load_state_dict({"sinks": theirs.sinks}, strict=False)
    compare(ours, theirs)


@pytest.mark.parametrize("model", ["olmo2", "qwen3"])
def test_norms_of_queries_and_keys_are_those_of(model: str) -> None:
    module = load(f"{model}.modeling_{model}")
    name, over = model.capitalize(), "all" if model == "olmo2" else "head"
    config = getattr(module, f"{name}Config")(**SIZES, rms_norm_eps=1e-2)
    config.head_dim = 4
    theirs = getattr(module, f"{name}Attention")(config, 0)
    randomize(theirs)
    ours = QKNormAttention(3, 12, over=over, eps=1e-2)
    ours.query.norm.load_state_dict(theirs.q_norm.state_dict())
    ours.key.norm.load_state_dict(theirs.k_norm.state_dict())
    compare(ours, theirs)


def test_differential_attention_is_that_of_diffllama() -> None:
    diffllama = load("diffllama.modeling_diffllama")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = diffllama.DiffLlamaConfig(**SIZES | heads, rms_norm_eps=1e-5)
    theirs = diffllama.DiffLlamaAttention(config, 3)
    randomize(theirs)
    ours = DifferentialAttention(2, 12, lambda_init=initial_lambda(3))
    names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    ours.load_state_dict({n: getattr(theirs, n) for n in names}, strict=False)
    # There, all first halves come before all second halves.
    order = torch.arange(12).view(2, 2, 3).transpose(0, 1).flatten()
    compare(ours, theirs, order=order)


def test_a_window_is_that_of_mistral() -> None:
    mistral = load("mistral.modeling_mistral")
    config = mistral.MistralConfig(**SIZES, sliding_window=3)
    theirs = mistral.MistralAttention(config, 0)
    randomize(theirs)
    from transformers.masking_utils import sliding_window_causal_mask_function

    function = sliding_window_causal_mask_function(config.sliding_window)
    position = torch.arange(LENGTH)
    window = function(0, 0, position[:, None], position)
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(~window, -torch.inf)
    compare(SlidingWindowAttention(3, 12, window=3), theirs, mask)


def test_the_delta_rule_is_that_of_qwen3_next() -> None:
    qwen = load("qwen3_next.modeling_qwen3_next")
    d_k, d_v = 3, 4
    q, k, v = (torch.randn(70, BATCH, 2, d) for d in (d_k, d_k, d_v))
    k = nn.functional.normalize(k, dim=-1)
    beta, gate = torch.rand(2, 70, BATCH, 2)
    x = [q, k, v, beta, gate.log()]
    *heads, b, g = (y.transpose(0, 1) for y in x)
    expected, _ = qwen.torch_chunk_gated_delta_rule(*heads, beta=b, g=g)
    x[0] = q / d_k**0.5  # there, the scale is part of the function
    output, _ = chunked_delta_rule(*x)
    assert_same(output, expected)


SCALINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "default": ({}, lambda f: f),
    "linear": ({"factor": 4.0}, lambda f: rotary.linear_scaling(f, 4.0)),
    "dynamic": ({"factor": 1.0}, lambda f: rotary.ntk_scaling(f, 3.0)),
    "yarn": ({"factor": 4.0}, lambda f: rotary.yarn_scaling(f, 4.0, 64)),
    "yarn whole": (
        {"factor": 4.0, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
        lambda f: rotary.yarn_scaling(
            f, 4.0, 64, beta_fast=8.0, beta_slow=2.0, truncate=False
        ),
    ),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        lambda f: rotary.llama3_scaling(f, 8.0, 64),
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(name: str) -> None:
    llama = load("llama.modeling_llama")
    given, scale = SCALINGS[name]
    parameters = {"rope_type": name.split()[0], "rope_theta": 5000.0, **given}
    if name.startswith(("yarn", "llama3")):
        parameters["original_max_position_embeddings"] = 64
    config = llama.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters=parameters,
    )
    if name == "default":
        theirs = llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        rope_type = parameters["rope_type"]
        theirs = llama.ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=192)
    ours = scale(rotary_frequencies(32, base=5000.0))
    torch.testing.assert_close(ours.float(), theirs[0], rtol=1e-5, atol=1e-9)
    if name == "yarn":
        assert rotary.yarn_attention_factor(4.0) == pytest.approx(theirs[1])
