"""Rotary embeddings (RoPE): the pairs of angles and rotation differ

Symptom: A model's speech is slightly wrong, and it is not known since when.

Bug: A rotation acts on pairs of components, and there are two conventions: neighbors (0
and 1, 2 and 3), or halves (0 and $d/2$). The table of angles is made for halves, the
rotation pairs neighbors. So the two members of a pair use different angles, which is no
rotation, and a score no longer depends on the distance alone.

Unseen: Both tables hold the same numbers, in another order. With a head width of 2 even
the order is the same.

Thread: https://github.com/huggingface/transformers/issues/47328 (2026): a refactoring
combined the table of one convention with the rotation of the other. The same happened
in [a book](https://github.com/raiyanyahya/how-to-train-your-gpt/issues/6).
"""

import math

import torch
from torch import nn

LAW = "relative_positions"
OPTIONS = {"positions": "rotary"}
FIX = [("torch.cat([angle, angle], dim=-1)", "angle.repeat_interleave(2, dim=-1)")]


def rotate(x):
    position = torch.arange(x.shape[-2], device=x.device)
    step = torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1]
    angle = position[:, None] * 10_000**-step
    angle = torch.cat([angle, angle], dim=-1)
    rotated = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return x * angle.cos().to(x.dtype) + rotated * angle.sin().to(x.dtype)


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = rotate(q) / math.sqrt(q.shape[-1]) @ rotate(k).transpose(-2, -1)
        weights = scores.softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2)), weights
