"""Sliding window: one key too many

Symptom: Two implementations of one model agree up to a certain length of the text, and
diverge beyond it.

Bug: A window of 3 means three keys, the query's own included: distances 0, 1 and 2.
Here the distance may be 3, and the window holds four.

Unseen: In texts that are shorter than the window, nothing changes. In longer ones, each
layer allows one key too many. That harms no model that was trained with it, and every
model that loads weights from elsewhere.

Thread: https://github.com/huggingface/transformers/issues/39408 (2025): FlashAttention
counts the keys *before* a query, the configuration counts all.
[mlx-lm](https://github.com/ml-explore/mlx-lm/pull/390) settled the same question.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "sliding_window"
OPTIONS = {"causal": True, "init_args": {"window": 3}, "window": 3}
FIX = [("distance <= self.window", "distance < self.window")]


class Attention(nn.Module):
    def __init__(self, d_model, heads, window):
        super().__init__()
        self.heads = heads
        self.window = window
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        position = torch.arange(x.shape[1], device=x.device)
        distance = position[:, None] - position
        mask = (distance >= 0) & (distance <= self.window)
        context = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(context.transpose(1, 2).flatten(2))
