"""Soft cap: applied after the mask

Symptom: The answer for a short sentence depends on how much padding follows it, a
little more with a smaller cap.

Bug: A soft cap limits scores to a range, here from -20 to 20. It is applied to scores
that are masked already, and makes of minus infinity a score of -20. So hidden keys keep
a small weight.

Unseen: With a cap of 50 and scores near zero the weight is too small to notice. It
grows if real scores are low, too.

Thread: https://github.com/Dao-AILab/flash-attention/pull/1025 (2024): noticed in the
review of a kernel. The definition of an
[ONNX operator](https://github.com/onnx/onnx/issues/7865) had the same order until 2026.
"""

import math

import torch
from torch import nn

LAW = "large_scores"
OPTIONS = {"mask": {"mask": "attend:bk"}}
FIX = [
    (
        "        if mask is not None:",
        "        scores = self.softcap * torch.tanh(scores / self.softcap)\n"
        "        if mask is not None:",
    ),
    ("        capped = self.softcap * torch.tanh(scores / self.softcap)\n", ""),
    ("capped.softmax", "scores.softmax"),
]


class Attention(nn.Module):
    def __init__(self, d_model, heads, softcap=20.0):
        super().__init__()
        self.heads, self.softcap = heads, softcap
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
        if mask is not None:
            least = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~mask[:, None, None], least)
        capped = self.softcap * torch.tanh(scores / self.softcap)
        context = capped.softmax(dim=-1) @ v
        return self.proj(context.transpose(1, 2).flatten(2))
