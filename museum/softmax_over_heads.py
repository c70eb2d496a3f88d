"""Softmax with several heads: normalized over heads and keys together

Symptom: Nothing seemed wrong. The model was published, and its results were good.

Bug: `flatten(2)` puts heads and keys into one axis, and the softmax runs over both. The
weights of all heads together sum to 1, so one head with large scores takes the weight
of the others.

Unseen: With one head it is right. With more, the weights are still positive, and still
sum to 1 over the flattened axis.

Thread: https://github.com/facebookresearch/detr/issues/247 (2020): in the panoptic head
of DETR. Trained again, with one softmax for each head, it scored higher.
"""

import math

import torch
from torch import nn

LAW = "rows_sum_to_one"
OPTIONS = {}
FIX = [("scores.flatten(2).softmax(dim=-1).view_as(scores)", "scores.softmax(dim=-1)")]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1))

    def forward(self, x):
        q, k, v = map(self.split, (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        scores = torch.einsum("bihd,bjhd->bihj", q / math.sqrt(q.shape[-1]), k)
        weights = scores.flatten(2).softmax(dim=-1).view_as(scores)
        context = torch.einsum("bihj,bjhd->bihd", weights, v)
        return self.out_proj(context.flatten(2)), weights.transpose(1, 2)
