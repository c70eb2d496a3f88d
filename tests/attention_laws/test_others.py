"""Attention of transformers: correct laws pass, and its known violations fail."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_laws import check

transformers = pytest.importorskip("transformers")


class Gpt2(nn.Module):
    """Always causal; an additive mask hides padding."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Config

        config = GPT2Config(n_embd=hidden_size, n_head=num_heads)
        config._attn_implementation = "eager"
        self.attention = GPT2Attention(config, layer_idx=0)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.attention(x, attention_mask=mask)


class Bert(nn.Module):
    """Attends to all keys that an additive mask does not hide."""

    implementation = "eager"

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        from transformers.models.bert.modeling_bert import BertConfig, BertSelfAttention

        config = BertConfig(hidden_size=hidden_size, num_attention_heads=num_heads)
        config._attn_implementation = self.implementation
        self.attention = BertSelfAttention(config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.attention(x, attention_mask=mask)[0]


class FastBert(Bert):
    implementation = "sdpa"


class Llama(nn.Module):
    """Rotary positions; two query heads share one head of keys and values."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        from transformers.models.llama import modeling_llama as llama

        config = llama.LlamaConfig(
            hidden_size=hidden_size,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
        )
        config._attn_implementation = "eager"
        self.attention = llama.LlamaAttention(config, layer_idx=0)
        self.rotary = llama.LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        embeddings = self.rotary(x, positions)
        return self.attention(x, position_embeddings=embeddings, attention_mask=mask)[0]


# Their masks hold the least finite number: a fully masked row is uniform, not NaN.
LEAST = {"mask": {"mask": "additive_min:b1qk"}}

OTHERS: list[tuple[Any, dict[str, Any], set[str]]] = [
    (Gpt2, LEAST, set()),
    (Bert, LEAST, set()),
    (FastBert, {}, set()),
    (Llama, {**LEAST, "kv_heads": 2, "positions": "rotary"}, set()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "options", "failed"), OTHERS)
def test_transformers_fails_only_known_laws(
    attention: Any, options: dict[str, Any], failed: set[str], device: torch.device
) -> None:
    report = check(attention, device=device.type, skip="compiled", **options)
    assert {f.law.name for f in report.failed} == failed, report
    passed = {f.law.name for f in report.passed}
    rotary = options.get("positions") == "rotary"
    assert {"padding", "relative_positions" if rotary else "formula"} <= passed, report
    assert len(passed) >= 15
