"""Soft cap: applied before the scale

Symptom: Weights loaded from a checkpoint give attention that is flatter than in the
original model, most where a key fits very well.

Bug: The cap limits the products of queries and keys, and the result is divided by the
root of the width of a head. The model was trained with the two steps the other way
round: here, no score exceeds 20 / √12, about 5.8.

Unseen: Products that are small are not changed by a cap, in any order. A model that is
trained with this code learns to live with the lower cap.

Thread: https://github.com/huggingface/trl/pull/5691 (2026): noticed in the review of a
cap for the logits of the vocabulary, which have the same two steps.
"""

import math

import torch
from torch import nn

LAW = "formula"
OPTIONS = {}
FIX = [
    ("scores = q @ k", "scores = q / math.sqrt(q.shape[-1]) @ k"),
    ("(capped / math.sqrt(q.shape[-1])).softmax", "capped.softmax"),
]


class Attention(nn.Module):
    def __init__(self, d_model, heads, softcap=20.0):
        super().__init__()
        self.heads, self.softcap = heads, softcap
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)
        capped = self.softcap * torch.tanh(scores / self.softcap)
        context = (capped / math.sqrt(q.shape[-1])).softmax(dim=-1) @ v
        return self.proj(context.transpose(1, 2).flatten(2))
