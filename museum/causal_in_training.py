"""Causal mask: only in training

Symptom: A forecaster of prices is tested on held-out data, and its errors are smaller
than in training.

Bug: The causal mask depends on the training mode, as dropout does. In evaluation, every
position attends to the whole window, its own future included.

Unseen: Training, which is examined most, is right. In evaluation the numbers are
*better* than expected, and good numbers are rarely examined.

Thread: https://github.com/shiyu-coder/Kronos/issues/199 (2025, open): titled “data
leakage during eval”.
"""

from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "causality"
OPTIONS = {"causal": True}
FIX = [("is_causal=self.training", "is_causal=True")]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        context = scaled_dot_product_attention(q, k, v, is_causal=self.training)
        return self.proj(context.transpose(1, 2).flatten(2))
