"""Padding mask: scores are multiplied by the mask

Symptom: A slide gets another score when it is put into a batch with a larger one.
Alone, its score is right.

Bug: A score of 0 is an ordinary score: softmax turns it into $e^0 = 1$ before it
divides. Multiplied by the mask, padding counts like a key that is orthogonal to the
query, and more than every key with a negative score.

Unseen: The weights sum to 1, nothing is NaN, and the model learns. In batches of one
item there is no padding at all.

Thread: https://github.com/georg-wolflein/good-features/pull/1 (2023): found by a
reader; the results of the paper were not affected, as it had trained with batches of
one.
"""

import math

import torch
from torch import nn

LAW = "padding"
OPTIONS = {"mask": {"mask": "attend:bk"}}
FIX = [
    (
        "scores = scores * mask[:, None, None]",
        "lowest = torch.finfo(scores.dtype).min\n"
        "            scores = scores.masked_fill(~mask[:, None, None], lowest)",
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
            scores = scores * mask[:, None, None]
        weights = torch.softmax(scores, dim=-1)
        context = weights @ v
        return self.out_proj(context.transpose(1, 2).flatten(2))
