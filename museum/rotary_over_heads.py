"""Rotary embeddings (RoPE): rotated along the heads

Symptom: A language model trains, with a loss that is higher than it should be and
unstable for small models.

Bug: `rotate` expects the positions at the axis before the last. Queries and keys still
have their heads there, since they are transposed afterwards. So each head is rotated by
its own number, and all tokens of a sequence alike.

Unseen: The shapes fit, because the table is made for the size that is found. A causal
mask tells a model something about positions even without an encoding.

Thread: https://github.com/facebookresearch/xformers/issues/841 (2023): a library's
rotation with another layout than its attention, found by
[a project](https://github.com/mlfoundations/open_lm/issues/4) that trained with it.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "positions_matter"
OPTIONS = {"causal": True, "positions": "rotary"}
FIX = [
    ("        q, k = rotate(q), rotate(k)\n", ""),
    ("        context =", "        q, k = rotate(q), rotate(k)\n        context ="),
]


def rotate(x):
    position = torch.arange(x.shape[-2], device=x.device)
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
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = rotate(q), rotate(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        context = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(context.transpose(1, 2).flatten(2))
