"""Blockwise softmax: the last block is left out

Symptom: Outputs are right for sequences of 64, 128 or 192 tokens, and slightly wrong
for all other lengths above 64.

Bug: The keys are processed in blocks, whose number is rounded down. The keys after the
last full block are never attended to.

Unseen: Tests use lengths that are powers of two, and training uses one full length. A
sequence shorter than a block is one block, and right.

Thread: https://github.com/jax-ml/jax/issues/27224 (2025): right only for multiples of
the block. [Elsewhere](https://github.com/66RING/tiny-flash-attention/issues/12), too.
"""

import torch
from torch import nn

LAW = "long_sequences"
OPTIONS = {}
FIX = [("max(1, k.shape[2] // 64)", "-(-k.shape[2] // 64)")]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] / qkv.shape[-1] ** 0.5, qkv[1], qkv[2]
        top, total, context = -torch.inf, 0.0, 0.0
        for n in range(max(1, k.shape[2] // 64)):
            block = slice(64 * n, 64 * n + 64)
            scores = q @ k[:, :, block].mT
            highest = scores.amax(dim=-1, keepdim=True).clamp(min=top)
            weights = (scores - highest).exp()
            shrink = (top - highest).exp()
            total = shrink * total + weights.sum(dim=-1, keepdim=True)
            context = shrink * context + weights @ v[:, :, block]
            top = highest
        return self.proj((context / total).transpose(1, 2).flatten(2))
