"""Rotary embeddings (RoPE): a stored table that ignores the offset

Symptom: Given all at once, a prompt is processed correctly. Token by token with a KV
cache, the text loses its thread.

Bug: The angles are stored under the number of new tokens. Their first position is no
part of the key. The second single token gets the angles of the first.

Unseen: Training has no offset. In generation, the first call and the second have
different lengths, and only the third finds a table that is wrong.

Thread: https://github.com/lucidrains/rotary-embedding-torch/issues/11 (2023): found by
a reader of the code.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "incremental_decoding"
OPTIONS = {"causal": True, "positions": "rotary", "cache": ("cache", "[1]")}
FIX = [("key = stop - start\n", "key = (start, stop)\n")]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads, self.angles = heads, {}
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def rotate(self, x, start, stop):
        key = stop - start
        if key not in self.angles:
            step = torch.arange(0, x.shape[-1], 2) / x.shape[-1]
            angle = torch.arange(start, stop)[:, None] * 10_000**-step
            self.angles[key] = angle.repeat(1, 2)
        cos, sin = self.angles[key].cos().to(x), self.angles[key].sin().to(x)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    def forward(self, x, cache=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        start = 0 if cache is None else cache[0].shape[2]
        q, k = (self.rotate(y, start, start + x.shape[1]) for y in (q, k))
        if cache is not None:
            k, v = (
                torch.cat([a, b], dim=2) for a, b in zip(cache, (k, v), strict=True)
            )
        mask = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(start)
        context = scaled_dot_product_attention(q, k, v, mask)
        return self.proj(context.transpose(1, 2).flatten(2)), (k, v)
