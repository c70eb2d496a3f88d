"""Causal and padding mask combined: the caller's mask is modified in place

Symptom: The first layer computes what it should. From the second layer on, the mask
differs from the mask that was passed in, and no line assigns to it.

Bug: `&=` writes into the tensor on its left, and that tensor belongs to the caller. The
padding mask of the batch is now causal, too, wherever it is used next: in the encoder,
in the layer above, in the loss.

Unseen: This layer, tested alone, computes every number correctly. The error appears
elsewhere, and no shape changes.

Thread: https://github.com/Shujun-He/RibonanzaNet/issues/7 (2025): a mask that the first
layer modifies, so that the second layer receives another one.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "no_side_effects"
OPTIONS = {"causal": True, "mask": {"mask": "attend:bqk"}}
FIX = [("mask &= causal", "mask = mask & causal")]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        length = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if mask is None:
            mask = causal[None]
        else:
            mask &= causal
        context = scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1))
        return self.proj(context.transpose(1, 2).flatten(2))
