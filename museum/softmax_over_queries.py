"""Softmax axis: normalized over the queries

Symptom: The maps of attention weights look odd: some keys are dark in every row. Yet
the network generates good images.

Bug: The scores are `[batch, heads, query, key]`, and axis 2 is that of the queries. So
each *key* distributes a weight of 1 over the queries, and the weights of a query can
have any sum.

Unseen: A softmax over any axis gives numbers between 0 and 1. The rest of the network
adapts: in the thread, the right axis was tried, and the quality of the images did not
change.

Thread: https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/146
(2022): in the U-Net of a diffusion model, “a typo and a big bug”.
"""

import math

import torch
from torch import nn

LAW = "rows_sum_to_one"
OPTIONS = {}
FIX = [("softmax(dim=2)", "softmax(dim=3)")]


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
        scores = torch.einsum("bihd,bjhd->bhij", q / math.sqrt(q.shape[-1]), k)
        weights = scores.softmax(dim=2)
        context = torch.einsum("bhij,bjhd->bihd", weights, v)
        return self.out_proj(context.flatten(2)), weights
