"""Mask repeated for each head: `repeat` in place of `repeat_interleave`

Symptom: The answer for a video depends on the other videos of the batch, though only
where their lengths differ.

Bug: Batch and heads are flattened into one axis: item 0 comes `heads` times, then the
next. `repeat` lays the masks out the other way: all items once, then all items again.
So most heads get the mask of another item.

Unseen: The shape is exactly what is expected. With one item, or with items of one
length, both orders are the same, and the loss of a model that attends to some padding
is hardly worse.

Thread: https://github.com/line/lighthouse/pull/77 (2026): in five encoders at once,
passed to `nn.MultiheadAttention`, which flattens in this order too. The same bug was
fixed in [CLIP4Clip](https://github.com/ArrowLuo/CLIP4Clip/issues/22) in 2021.
"""

import math

import torch
from torch import nn

LAW = "padding"
OPTIONS = {"mask": {"mask": "attend:bqk"}}
FIX = [("mask.repeat(self.heads, 1, 1)", "mask.repeat_interleave(self.heads, dim=0)")]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)

    def forward(self, x, mask=None):
        q, k, v = map(self.split, (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        scores = torch.bmm(q / math.sqrt(q.shape[-1]), k.transpose(1, 2))
        if mask is not None:
            mask = mask.repeat(self.heads, 1, 1)
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        context = torch.bmm(scores.softmax(dim=-1), v)
        context = context.unflatten(0, (x.shape[0], self.heads)).transpose(1, 2)
        return self.out_proj(context.flatten(2))
