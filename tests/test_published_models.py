"""Settings of published models, as the lesson on the KV cache quotes them."""

import ast
from pathlib import Path
from typing import Any

import pytest
import transformers

LESSON = Path(__file__).parent.parent / "docs/learn/11_kv_cache.py"
# The settings that each class has unless told otherwise are those of this model.
CONFIGS = {
    "GPT-2 (124M)": "GPT2Config",
    "GPT-NeoX-20B": "GPTNeoXConfig",
    "Llama 7B": "LlamaConfig",
    "Phi-3-mini": "Phi3Config",
    "Falcon-7B": "FalconConfig",
    "StarCoder2-3B": "Starcoder2Config",
    "Mistral 7B": "MistralConfig",
    "Gemma 2 2B": "Gemma2Config",
    "gpt-oss-120b": "GptOssConfig",
    "DeepSeek-V3": "DeepseekV3Config",
}


def quoted(name: str) -> dict[str, Any]:
    for statement in ast.parse(LESSON.read_text(encoding="utf-8")).body:
        if (
            isinstance(statement, ast.Assign)
            and ast.unparse(statement.targets[0]) == name
        ):
            return eval(ast.unparse(statement.value))
    raise LookupError(name)


MODELS = quoted("PUBLISHED") | quoted("LATENT")


def test_all_models_are_compared() -> None:
    assert MODELS.keys() == CONFIGS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("model", CONFIGS)
def test_the_lesson_quotes_the_published_settings(model: str) -> None:
    config = getattr(transformers, CONFIGS[model])()
    layers, heads, *rest = MODELS[model]
    assert config.num_hidden_layers == layers
    assert config.num_attention_heads == heads
    if model == "DeepSeek-V3":
        assert rest == [config.kv_lora_rank + config.qk_rope_head_dim]
        assert config.qk_nope_head_dim == config.v_head_dim == 128
        return
    kv_heads, d_k, window, windowed = rest
    shared = 1 if getattr(config, "multi_query", False) else heads
    assert getattr(config, "num_key_value_heads", shared) == kv_heads
    width = config.hidden_size // heads
    assert (getattr(config, "head_dim", None) or width) == d_k
    if kinds := getattr(config, "layer_types", None):
        assert kinds.count("sliding_attention") == windowed
        assert config.sliding_window == window
