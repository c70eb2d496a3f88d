"""Sliding window: the cache drops a key too early

Symptom: A model with a sliding window gives the expected text up to the length of the
window. Then every generated token differs a little from that of the reference.

Bug: A query attends to its own key and to `window - 1` earlier ones, so the cache must
hold `window - 1` keys before the new one. It is shortened to `window - 2`: the oldest
key that is still inside of the window is lost.

Unseen: A pass without a cache, as in training, has the right mask. As long as the
sequence is shorter than the window, the cache is right, too.

Thread: https://github.com/huggingface/transformers/issues/37574 (2025): the cache moved
on when it became full, one step too early. [Continuous
batching](https://github.com/huggingface/transformers/pull/47708) had another error of
one at the same place.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "incremental_decoding"
OPTIONS = {
    "causal": True,
    "init_args": {"window": 3},
    "window": 3,
    "cache": ("cache", "[1]"),
}
FIX = [("keep = self.window - 2", "keep = self.window - 1")]


class Attention(nn.Module):
    def __init__(self, d_model, heads, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, cache=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            keep = self.window - 2
            k = torch.cat([cache[0][:, :, -keep:], k], dim=2)
            v = torch.cat([cache[1][:, :, -keep:], v], dim=2)
        key = torch.arange(k.shape[2], device=x.device)
        distance = key[-q.shape[2] :, None] - key
        mask = (distance >= 0) & (distance < self.window)
        context = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(context.transpose(1, 2).flatten(2)), (k, v)
