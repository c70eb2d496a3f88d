"""One more than was said

Symptom: Two implementations of one model agree up to a certain length of the text, and
from there on they drift apart.

Bug: A window of 4 means four keys, oneself included: distances 0, 1, 2 and 3. Here the
distance may be 4, and the window holds five.

Unseen: In texts that are shorter than the window nothing happens. In longer ones each
layer lets one key too many through, which hurts nobody who was trained like that, and
everybody who loads another's weights.

Thread: https://github.com/huggingface/transformers/issues/39408 (2025): flash attention
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
