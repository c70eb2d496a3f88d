"""Returned attention weights: after dropout, not before

Symptom: In a plot of the weights during training, the first token, which can attend
only to itself, has a weight of 1.25.

Bug: Dropout acts on the weights, and the *dropped* weights are returned. Those that are
kept were scaled up by $1 / (1 - p)$, the others are zero, and rows no longer sum to 1.
A loss that is computed from them is noisy.

Unseen: The output is right, and in evaluation so are the weights. Only the weights
during training show it.

Thread: https://github.com/pytorch/pytorch/issues/42929 (2020): in
`nn.MultiheadAttention`, which still does this; reported
[before](https://github.com/pytorch/pytorch/issues/33360), too.
"""

import math

from torch import nn

LAW = "rows_sum_to_one"
OPTIONS = {}
FIX = [
    ("weights = self.dropout(scores.softmax(dim=-1))", "weights = scores.softmax(-1)"),
    ("context = weights @ v", "context = self.dropout(weights) @ v"),
]


class Attention(nn.Module):
    def __init__(self, d_model, heads, dropout=0.2):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = map(self.split, (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
        weights = self.dropout(scores.softmax(dim=-1))
        context = weights @ v
        return self.out_proj(context.transpose(1, 2).flatten(2)), weights
