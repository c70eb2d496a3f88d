"""Fast path for inference: without the mask

Symptom: In training everything is right. Deployed, the model answers differently when
questions are batched.

Bug: The module has two code paths: one for training, and a fast one for inference. Only
one of them applies the mask.

Unseen: The tests run a training step, so they take the slow path. The fast path is
right without padding, and a benchmark has none.

Thread: https://github.com/OpenNMT/OpenNMT-py/pull/2532 (2023): the padding mask reached
the first step of decoding only, and batches of texts of different lengths got worse.
The fast path of PyTorch's own module, too, once [gave other
outputs](https://github.com/pytorch/pytorch/issues/106630) with a mask.
"""

import math

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "eval_matches_train"
OPTIONS = {"mask": {"mask": "attend:bqk"}}
FIX = [("(q, k, v)\n", "(q, k, v, attn_mask=mask)\n")]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if mask is not None:
            mask = mask.unsqueeze(1)
        if self.training:
            scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
            if mask is not None:
                scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            context = scores.softmax(dim=-1) @ v
        else:
            context = scaled_dot_product_attention(q, k, v)
        return self.proj(context.transpose(1, 2).flatten(2))
