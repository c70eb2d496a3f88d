"""Concatenating the heads: `reshape` without a transpose

Symptom: Its own test shows nothing wrong: this transformer, written from scratch,
learns to copy sequences.

Bug: After the attention, the tensor is `[batch, heads, length, d_k]`. Reshaped without
a transpose, the first few rows of the first head become the first token: each output
consists of parts of other positions, later ones included.

Unseen: The shape is right, and the permutation is always the same, so a network that is
large enough learns to undo it. The mask itself is correct.

Thread: https://github.com/jsbaan/transformer-from-scratch/pull/6 (2026): the author
asks why the test passed, and answers that copying is too easy. The same line is
defended in [another thread](https://github.com/xieenze/Trans2Seg/issues/4): it trains
well.
"""

from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "causality"
OPTIONS = {"causal": True}
FIX = [("context.reshape(x.shape)", "context.transpose(1, 2).reshape(x.shape)")]


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

    def forward(self, x):
        q, k, v = map(self.split, (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        context = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(context.reshape(x.shape))
