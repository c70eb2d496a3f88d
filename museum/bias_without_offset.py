"""Relative position bias: queries are counted from 0 with a cache

Symptom: Given all at once, a prompt is processed correctly. With cached keys, or with a
memory of earlier segments, the model prefers the beginning of the text.

Bug: The bias of a score depends on the distance of query and key. Queries and keys are
both numbered from 0, but behind a cache of five keys the first query has position 5.
Every distance is too small by the length of the cache.

Unseen: In training without a memory there are as many queries as keys. All shapes fit,
because the table is as large as the scores.

Thread: https://github.com/lucidrains/x-transformers/pull/103 (2022): the causal mask
was shifted by the length of the memory, and the bias was not.
"""

import math

import torch
from torch import nn

LAW = "incremental_decoding"
OPTIONS = {"causal": True, "positions": "learned", "cache": ("cache", "[1]")}
FIX = [("query = torch.arange(x.shape[1]", "query = torch.arange(start, k.shape[2]")]


class Attention(nn.Module):
    def __init__(self, d_model, heads, max_distance=4):
        super().__init__()
        self.heads, self.max_distance = heads, max_distance
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.bias = nn.Embedding(max_distance, heads)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, cache=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        start = 0 if cache is None else cache[0].shape[2]
        if cache is not None:
            k = torch.cat([cache[0], k], dim=2)
            v = torch.cat([cache[1], v], dim=2)
        query = torch.arange(x.shape[1], device=x.device)
        distance = query[:, None] - torch.arange(k.shape[2], device=x.device)
        bias = self.bias(distance.clamp(0, self.max_distance - 1)).permute(2, 0, 1)
        scores = q / math.sqrt(q.shape[-1]) @ k.mT + bias
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(start + 1)
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2)), (k, v)
