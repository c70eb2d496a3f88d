"""Three in one, in another order

Symptom: Three projections were fused into one product, for speed. The model still
writes sentences, but they have lost their meaning.

Bug: Stacked weights are laid out query, key, value, and within each head after head.
The view reads them head after head, and within each query, key, value. So each head
takes its query, its key and its value from three neighbouring blocks, and for most
heads they are not what they are called.

Unseen: Both layouts are in use, both have the same shape, and no check of shapes can
tell them apart. A model that is trained this way is fine. A checkpoint is not.

Thread: https://github.com/vllm-project/vllm/issues/42803 (2026): query values in the
slots of keys and values when a fused checkpoint is spread over devices.
[Elsewhere](https://github.com/sgl-project/sglang/pull/28100) such a file made a model
say nothing but plus signs.
"""

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

LAW = "formula"
OPTIONS = {}
FIX = [("(self.heads, 3, -1)).permute(3, 0, 2", "(3, self.heads, -1)).permute(2, 0, 3")]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        projections = (self.q_proj, self.k_proj, self.v_proj)
        weight = torch.cat([projection.weight for projection in projections])
        qkv = linear(x, weight)
        q, k, v = qkv.unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        context = scaled_dot_product_attention(q, k, v)
        return self.out_proj(context.transpose(1, 2).flatten(2))
