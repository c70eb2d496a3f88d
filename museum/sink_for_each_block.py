"""Attention sinks: the sink is counted once for each block of keys

Symptom: A model with attention sinks is right for short texts. In long ones its
attention fades, and its answers differ from those of the reference.

Bug: A sink is a logit without a value: it adds one term to the denominator of the
softmax. The keys are processed in blocks, and the sums of the blocks are added. Each
block begins with the sink, so its term is counted once for each block.

Unseen: In one block the result is right. While the logit of the sink is low, it hardly
matters how often it is counted.

Thread: https://github.com/ROCm/rocm-libraries/issues/12227 (2026): in a kernel that
distributes the keys, two parts could add the sink.
"""

import math

import torch
from torch import nn

LAW = "longer_padding"
OPTIONS = {"mask": {"mask": "attend:bk"}}
FIX = [
    ("context = total = 0", "context, total = 0, (sink - top).exp()"),
    ("total + (sink - top).exp() + ", "total + "),
]


class Attention(nn.Module):
    def __init__(self, d_model, heads, block=4):
        super().__init__()
        self.heads, self.block = heads, block
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.sink = nn.Parameter(torch.zeros(heads))
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q / math.sqrt(q.shape[-1]) @ k.mT
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
        sink = self.sink[:, None, None]
        top = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
        context = total = 0
        for keys in torch.arange(x.shape[1]).split(self.block):
            weights = (scores[..., keys] - top).exp()
            context = context + weights @ v[:, :, keys]
            total = total + (sink - top).exp() + weights.sum(dim=-1, keepdim=True)
        return self.proj((context / total).transpose(1, 2).flatten(2))
