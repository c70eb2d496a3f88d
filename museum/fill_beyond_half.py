"""A number that half precision does not have

Symptom: In float32 the model trains. In float16 it stops at its first mask with
`value cannot be converted to type c10::Half without overflow`.

Bug: Float16 ends at 65,504, and $-10^{10}$ lies beyond. The usual way out,
$-10^4$, runs but is no mask: a score of the model may lie lower.

Unseen: Whoever writes a constant has one dtype in mind. The line runs for years until
somebody saves memory.

Thread: https://github.com/bentrevett/pytorch-seq2seq/issues/191 (2022): a reader
tries minus infinity first, meets NaN, and arrives at $-10^4$.
"""

import math

import torch
from torch import nn

LAW = "large_scores"
OPTIONS = {"mask": {"mask": "attend:bqk"}}
FIX = [("-1e10", "torch.finfo(scores.dtype).min")]


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
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e10)
        weights = torch.softmax(scores, dim=-1)
        context = weights @ v
        return self.out_proj(context.transpose(1, 2).flatten(2))
