"""Causal and padding masks: one in place of the other

Symptom: A decoder reports an excellent loss, though only for batches with padding.

Bug: Where a padding mask is given, it is passed to the function, which takes either a
mask or `is_causal`. The causal mask is left out.

Unseen: Each mask works if it is tested alone. Without padding, as in most tests and in
generation, the attention is causal.

Thread: https://github.com/keras-team/keras/pull/23040 (2026): found by a reviewer, in
the fix of [a similar leak](https://github.com/keras-team/keras/issues/23038).
"""

from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "combined_masks"
OPTIONS = {"causal": True, "mask": {"mask": "attend:bk"}}
FIX = [
    ("        is_causal = mask is None\n", ""),
    (
        "            mask = mask[:, None, None]\n",
        "            own = x.new_ones(x.shape[1]).diag().bool()\n"
        "            causal = own.new_ones(own.shape).tril()\n"
        "            mask = mask[:, None, None] & causal | own\n",
    ),
    ("is_causal=is_causal", "is_causal=mask is None"),
]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        is_causal = mask is None
        if mask is not None:
            mask = mask[:, None, None]
        context = scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
        return self.proj(context.transpose(1, 2).flatten(2))
