"""Fused QKV projection: the rows are read in another order

Symptom: Three projections were fused into one matrix product, for speed. The model
still writes sentences, but they have no meaning.

Bug: The stacked weights are ordered query, key, value, and head by head within each.
The code splits them head by head, and into query, key, value within each head. So each
head takes its query, key and value from three adjacent blocks of rows, and most heads
get, say, a key where they expect a query.

Unseen: Both orders are in use, both have the same shape, and no check of shapes can
distinguish them. A model that is trained with the wrong order is fine. A checkpoint
that is loaded is not.

Thread: https://github.com/vllm-project/vllm/issues/42803 (2026): rows of the query in
place of keys and values when a fused checkpoint is distributed over devices.
[Elsewhere](https://github.com/sgl-project/sglang/pull/28100), such a checkpoint made a
model generate nothing but plus signs.
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
