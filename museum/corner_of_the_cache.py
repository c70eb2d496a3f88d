"""`is_causal` with a KV cache: the mask is aligned to the top left

Symptom: Given all at once, a prompt is processed correctly. Token by token with a KV
cache, the model repeats one word forever.

Bug: With a cache there is one query and, say, six keys, and `is_causal=True` aligns the
triangle to the top left: query 0 may attend to key 0, and to nothing else. The newest
token attends to the oldest one only.

Unseen: In training there are as many queries as keys, and both alignments are the same.
The first step with a cache is right, too.

Thread: https://github.com/pytorch/pytorch/issues/144858 (2025): noticed because the
same vector is returned at each step; the alignment itself was
[questioned](https://github.com/pytorch/pytorch/issues/103082) soon after the function
was released.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "incremental_decoding"
OPTIONS = {"causal": True, "cache": ("cache", "[1]")}
FIX = [
    ("is_causal=True", "attn_mask=mask"),
    (
        "        context =",
        "        mask = x.new_ones(q.shape[2], k.shape[2], dtype=torch.bool)\n"
        "        mask = mask.tril(k.shape[2] - q.shape[2])\n"
        "        context =",
    ),
]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, cache=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k = torch.cat([cache[0], k], dim=2)
            v = torch.cat([cache[1], v], dim=2)
        context = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(context.transpose(1, 2).flatten(2)), (k, v)
