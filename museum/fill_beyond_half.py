"""Masking in float16: the fill value overflows

Symptom: In float32 the model trains. In float16 it stops at its first mask with `value
cannot be converted to type c10::Half without overflow`.

Bug: The largest number of float16 is 65,504, and $-10^{10}$ is beyond it. The usual
workaround, $-10^4$, runs, but does not mask reliably: a score of the model may be
lower.

Unseen: The constant was chosen with float32 in mind. The line runs for years, until the
model is run in half precision to save memory.

Thread: https://github.com/bentrevett/pytorch-seq2seq/issues/191 (2022): a reader tries
minus infinity first, gets NaN, and ends with $-10^4$.
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
