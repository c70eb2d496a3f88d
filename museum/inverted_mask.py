"""Boolean causal mask: True and False are swapped

Symptom: A language model was moved from `nn.MultiheadAttention` to the faster
`scaled_dot_product_attention`, and its mask was moved along. The loss fell faster than
ever, and the generated text was gibberish.

Bug: The two give a bool mask opposite meanings. In the module, True hides a key; in the
function, True allows it. The triangle above the diagonal, which should be hidden, is
all that a token attends to.

Unseen: All shapes are right, and the loss is better than it should be: a model that
sees the next token predicts it well. Only in generation, where the next token does not
exist yet, the model fails.

Thread: https://github.com/rasbt/LLMs-from-scratch/issues/1061 (2026): a notebook that
compares implementations of attention; the author agrees that the two meanings are
confusing.
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
