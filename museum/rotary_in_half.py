"""Rotary embeddings (RoPE): positions in half precision

Symptom: A model in bfloat16 is worse on long sequences than the same model in float32,
and two libraries that load the same weights disagree.

Bug: Positions are converted to the dtype of the input before they are multiplied by the
frequencies. bfloat16 has 8 bits: from position 256 on, only every second number exists,
and angles are off by up to one radian.

Unseen: Every operation is right, and tests use float32 or short sequences. The model
still trains, as nearby tokens keep nearly the same distances.

Thread: https://github.com/EleutherAI/gpt-neox/issues/1003 (2023): the whole table in
half precision. [Another library](https://github.com/huggingface/transformers/pull/29285)
had it under autocast.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "distant_positions"
OPTIONS = {"causal": True, "positions": "rotary"}
FIX = [
    ("device=x.device, dtype=x.dtype)\n    step", "device=x.device)\n    step"),
]


def rotate(x):
    position = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)
    step = torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1]
    angle = (position[:, None] * 10_000**-step).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return x * angle.cos().to(x.dtype) + rotated * angle.sin().to(x.dtype)


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = rotate(qkv[0]), rotate(qkv[1]), qkv[2]
        context = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(context.transpose(1, 2).flatten(2))
