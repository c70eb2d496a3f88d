"""The borrowed mask

Symptom: The first layer does what it should. From the second one on the mask is not
the mask that was passed in, and nobody has written to it.

Bug: `&=` writes into the tensor on its left, and that tensor belongs to the caller. The
padding mask of the batch is now causal, too, for whoever uses it next: the encoder
beside, the layer above, the loss.

Unseen: This layer, tested alone, is right in every number. What it breaks is
elsewhere, and no shape changes.

Thread: https://github.com/Shujun-He/RibonanzaNet/issues/7 (2025): a mask that changes
its values in the first layer and meets the second in another state.
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
