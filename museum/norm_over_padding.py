"""Normalization after attention: an instance norm includes the padding

Symptom: The attention was tested with padding, and passes. The layer around it gives
another output for each length to which a sentence is padded.

Bug: The mask hides the padded *keys*, but padded positions are also *queries*, and have
outputs. An instance norm takes mean and variance over all positions, including these.
So the padding influences the outputs of real tokens after all.

Unseen: In training, sentences of similar length are batched together, and nothing looks
wrong. A layer norm, which normalizes each position on its own, has no such problem.

Thread: https://github.com/pytorch/pytorch/issues/81985 (2022, open): instance and group
norms, and [wav2vec 2.0](https://github.com/pytorch/audio/issues/2242), where the tests
had used sounds of about one length.
"""

from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "padding"
OPTIONS = {"mask": {"mask": "attend:bk"}}
FIX = [
    ("nn.InstanceNorm1d(d_model)", "nn.LayerNorm(d_model)"),
    ("self.norm(y.transpose(1, 2)).transpose(1, 2)", "self.norm(y)"),
]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)
        self.norm = nn.InstanceNorm1d(d_model)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if mask is not None:
            mask = mask[:, None, None]
        context = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = x + self.proj(context.transpose(1, 2).flatten(2))
        return self.norm(y.transpose(1, 2)).transpose(1, 2)
