"""Honest only while it learns

Symptom: A forecaster of prices is tested on held-out data, and its errors are smaller
than in training.

Bug: Causality was tied to the training mode, as one does with dropout. In eval every
position sees the whole window, its own future included.

Unseen: Training, where everybody looks, is right. In evaluation the numbers are
*better* than expected, and who examines good numbers?

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
