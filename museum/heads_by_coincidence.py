"""Mask for several heads: the head axis is missing

Symptom: Training with batches of one works. With batches of two, PyTorch raises an
error about sizes that do not match, so the batch size was set to the number of heads.
Now it runs.

Bug: The mask is `[batch, query, key]`, the scores are `[batch, heads, query, key]`.
Broadcasting aligns axes from the right, so the batch axis of the mask is aligned with
the heads of the scores: head 0 of every item uses the mask of item 0, head 1 that of
item 1.

Unseen: With one item, the mask is right for all heads, and where the sizes differ,
PyTorch raises an error. Only where batch size and number of heads are equal it raises
none. Then each item has some head that hides too much and some that hides too little.

Thread: https://github.com/lucidrains/graph-transformer-pytorch/pull/2 (2022): one line
in a graph transformer that was right for a batch of one.
"""

import math

import torch
from torch import nn

LAW = "padding"
OPTIONS = {"heads": 2, "mask": {"mask": "attend:bqk"}}
FIX = [("masked_fill(~mask,", "masked_fill(~mask.unsqueeze(1),")]


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
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        context = scores.softmax(dim=-1) @ v
        return self.out_proj(context.transpose(1, 2).flatten(2))
