"""Attention of others, in adapters: no false alarm, and true ones where there are."""

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
    """Sees all that an additive mask does not hide."""

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
    """Rotates queries and keys; two query heads share one of keys and values."""

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
        places = torch.arange(x.shape[1], device=x.device)[None]
        turned = self.rotary(x, places)
        return self.attention(x, position_embeddings=turned, attention_mask=mask)[0]


# Their masks hold the least finite number, so that an empty row is uniform.
LEAST = {"mask": {"mask": "minimum:b1qk"}}

OTHERS: list[tuple[Any, dict[str, Any], set[str]]] = [
    # In training, its weights are shown after dropout: that law it breaks truly.
    (Gpt2, LEAST, {"rows_sum_to_one"}),
    (Bert, LEAST, set()),
    (FastBert, {}, set()),
    (Llama, {**LEAST, "kv_heads": 2, "positions": "rotary"}, set()),
]


@pytest.mark.parametrize(("attention", "options", "broken"), OTHERS)
def test_no_false_alarm_on_others(
    attention: Any, options: dict[str, Any], broken: set[str], device: torch.device
) -> None:
    report = check(attention, device=device.type, **options)
    assert {f.law.name for f in report.broken} == broken, report
    kept = {f.law.name for f in report.kept}
    rotary = options.get("positions") == "rotary"
    assert {"padding", "relative" if rotary else "formula"} <= kept, report
    assert len(kept) >= 16
