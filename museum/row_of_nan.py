"""One empty row

Symptom: After a few thousand steps the loss is NaN, from one step to the next. The
batch that did it looks like all others, and the learning rate is innocent.

Bug: One query had no key to look at: a window that holds nothing but filler. Softmax
over minus infinities divides 0 by 0. That the loss leaves the row out does not help,
as in the backward pass 0 times NaN is NaN, and reaches every weight.

Unseen: It needs a window and padding at once, in one item. Until then, every number is
right.

Thread: https://github.com/pytorch/pytorch/issues/41508 (2020, open): it is
`nn.MultiheadAttention` that does this, to this day, when it is asked for the weights.
"""

import math

import torch
from torch import nn

LAW = "fully_masked_rows"
OPTIONS = {"mask": {"mask": "attend:bqk"}}
FIX = [
    (
        "scores = scores.masked_fill(~mask, -torch.inf)",
        "empty = ~mask.any(dim=-1, keepdim=True)\n"
        "            scores = scores.masked_fill(~mask & ~empty, -torch.inf)",
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
