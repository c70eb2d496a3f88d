"""Lost on the way back

Symptom: In its own test nothing is wrong. Trained to copy, this transformer, written
from scratch, copies.

Bug: After the attention the tensor is `[batch, heads, length, d_k]`. Reshaped as it
lies, the first head's rows for the first few tokens become the first token: each output
is pieced together from other positions, later ones too.

Unseen: The shape is right, and the scrambling is always the same, so that a large
enough network learns to undo it. That the mask is correct makes it look safe.

Thread: https://github.com/jsbaan/transformer-from-scratch/pull/6 (2026): the author
asks why the test passed, and answers: copying is too easy. The same line is defended in
[another thread](https://github.com/xieenze/Trans2Seg/issues/4): it trains well.
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
