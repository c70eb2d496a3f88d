"""Fully masked row: the softmax is NaN

Symptom: After a few thousand steps, the loss is NaN from one step to the next. The
batch looks like all others, and a smaller learning rate does not help.

Bug: One query has no key to attend to: its window holds nothing but padding. A softmax
over minus infinities divides 0 by 0. It does not help that the loss leaves this row
out: in the backward pass, 0 times NaN is NaN, and reaches every weight.

Unseen: The row occurs only where a window and padding meet in one batch item. Until
then, every number is right.

Thread: https://github.com/pytorch/pytorch/issues/41508 (2020, open):
`nn.MultiheadAttention` still does this when the weights are requested.
"""

import math

import torch
from torch import nn

LAW = "fully_masked_rows"
OPTIONS = {"mask": {"mask": "attend:bqk"}}
FIX = [
    (
        "scores = scores.masked_fill(~mask, -torch.inf)",
        "fully_masked = ~mask.any(dim=-1, keepdim=True)\n"
        "            scores = scores.masked_fill(~mask & ~fully_masked, -torch.inf)",
    )
]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, mask=None):
        q, k, v = map(self.split, (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
        if mask is not None:
            mask = mask.unsqueeze(1)
            scores = scores.masked_fill(~mask, -torch.inf)
        context = scores.softmax(dim=-1) @ v
        return self.out_proj(context.transpose(1, 2).flatten(2))
