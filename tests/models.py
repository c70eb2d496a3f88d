"""Tiny models of `transformers` with random weights; nothing is downloaded."""

from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import nn

# Sizes under each of the names that configurations have for them. A head is wider than
# `d_model / heads` where the architecture allows it.
SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 6}
WINDOW: dict[str, Any] = {"sliding_window": 3}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT = SIZES | {
    "num_key_value_heads": 6,
    "kv_lora_rank": 8,
    "q_lora_rank": 5,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 3,
    "first_k_dense_replace": 2,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 5,
}

# The class of each model with its settings: together, they use every option.
MODELS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": SIZES | {"scale_attn_by_inverse_layer_idx": True},
    "GPTNeoXForCausalLM": SIZES
    | {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    "BertForMaskedLM": SIZES,
    "T5ForConditionalGeneration": {
        "vocab_size": 31,
        "d_model": 24,
        "d_kv": 5,
        "d_ff": 20,
        "num_layers": 2,
        "num_heads": 6,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 6,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": None,
    },
    "LlamaForCausalLM": WIDE | {"rope_parameters": LLAMA3, "attention_bias": True},
    "MistralForCausalLM": WIDE | WINDOW,
    "Qwen2ForCausalLM": GROUPED
    | WINDOW
    | {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen3ForCausalLM": WIDE,
    "PhiForCausalLM": GROUPED
    | {
        "qk_layernorm": True,
        "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "Olmo2ForCausalLM": GROUPED,
    "CohereForCausalLM": GROUPED | {"use_qk_norm": True},
    "Starcoder2ForCausalLM": GROUPED | WINDOW,
    "Gemma2ForCausalLM": WIDE
    | WINDOW
    | LAYERS
    | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 17},
    "Gemma3ForCausalLM": WIDE
    | WINDOW
    | LAYERS
    | {
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 100.0},
            "full_attention": {
                "rope_type": "linear",
                "rope_theta": 900.0,
                "factor": 2.0,
            },
        }
    },
    "DeepseekV2ForCausalLM": LATENT | {"q_lora_rank": None},
    "DeepseekV3ForCausalLM": LATENT
    | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    "GptOssForCausalLM": WIDE
    | WINDOW
    | LAYERS
    | EXPERTS
    | {"rope_parameters": YARN | {"truncate": False}},
}


def is_older(release: str) -> bool:
    """Whether the installed release of `transformers` is older than this one."""
    seen = version("transformers").split(".")[:2]
    return [int(n) for n in seen] < [int(n) for n in release.split(".")]


def require(release: str) -> None:
    """Skip a test that the installed release of `transformers` is too old for."""
    if is_older(release):
        seen = version("transformers")
        pytest.skip(f"it needs transformers>={release}, but {seen} is installed")


def configuration(kind: Any, settings: dict[str, Any]) -> Any:
    """The configuration with these settings, under the names of the release."""
    rope = settings.get("rope_parameters")
    if not rope or not version("transformers").startswith("4."):
        return kind(**settings)
    named = {k: v for k, v in settings.items() if k != "rope_parameters"}
    if "sliding_attention" in rope:
        named["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    scaling = dict(rope)
    named["rope_theta"] = named["rotary_emb_base"] = scaling.pop("rope_theta")
    if factor := scaling.pop("partial_rotary_factor", None):
        named["partial_rotary_factor"] = named["rotary_pct"] = factor
    return kind(**named, rope_scaling=scaling or None)


def build(name: str, attention: str = "eager") -> Any:
    """A model in evaluation mode, with weights for which rows of attention differ."""
    import transformers

    kind = getattr(transformers, name)
    config = configuration(kind.config_class, MODELS[name])
    config._attn_implementation = attention
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            std = 0.5 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            nn.init.normal_(parameter, std=std)
    return model
