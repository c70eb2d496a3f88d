"""The mask that was upside down

Symptom: A language model was moved from `nn.MultiheadAttention` to the faster
`scaled_dot_product_attention`, mask and all. Its loss fell faster than ever, and what
it wrote was gibberish.

Bug: The two read a bool mask in opposite senses. For the module True forbids, for the
function True allows. The triangle above the diagonal, which was to be hidden, is all
that a token may see.

Unseen: All shapes are right, and the loss is better than it should be: who may see the
next token predicts it well. Only in generation, where there is no next token to see,
is nothing left.

Thread: https://github.com/rasbt/LLMs-from-scratch/issues/1061 (2026): a notebook that
compares implementations of attention; the author agrees that the two senses confuse.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "causality"
OPTIONS = {"layout": "batch_first", "causal": True}
FIX = [("attn_mask=mask", "attn_mask=~mask")]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        context = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(context.transpose(1, 2).reshape(x.shape))
