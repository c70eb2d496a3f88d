"""Rotary embeddings (RoPE): positions in bfloat16

Symptom: A model is trained in bfloat16. In long texts it confuses neighboring tokens,
and its loss is higher than with the same code in float32.

Bug: The positions have the dtype of the weights. bfloat16 has 8 significant bits, so it
counts from 256 on in steps of two, and from 512 on in steps of four. Position 299
becomes 300, and two tokens have the same angles.

Unseen: Up to position 256 every position is exact, and tests use short sequences. A
training on long ones works, only not as well.

Thread: https://github.com/EleutherAI/gpt-neox/issues/1003 (2023): the table was
computed in the precision of the model. In
[Transformers](https://github.com/huggingface/transformers/pull/29285) it was computed
under autocast, which was noticed because two libraries had different losses.
"""

import math

import torch
from torch import nn

LAW = "relative_positions"
OPTIONS = {"positions": "rotary"}
FIX = [(", dtype=self.dtype)", ", dtype=torch.float32)")]


class Attention(nn.Module):
    def __init__(self, d_model, heads, dtype=torch.bfloat16):
        super().__init__()
        self.heads, self.dtype = heads, dtype
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def rotate(self, x):
        position = torch.arange(x.shape[-2], device=x.device, dtype=self.dtype)
        step = torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1]
        angle = (position[:, None].float() * 10_000**-step).repeat(1, 2)
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat([-second, first], dim=-1)
        return x * angle.cos().to(x.dtype) + rotated * angle.sin().to(x.dtype)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = self.rotate(q) / math.sqrt(q.shape[-1]) @ self.rotate(k).mT
        weights = scores.softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2)), weights
