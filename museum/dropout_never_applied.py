"""Dropout: created, and never applied

Symptom: A model overfits, and a higher dropout probability changes nothing.

Bug: The constructor makes a dropout layer with the right probability, and `forward`
does not call it. The weights go straight to the values.

Unseen: The layer is printed with the model, and its probability is in the
configuration. It has no parameters, so nothing reports that it is unused.

Thread: https://github.com/zhouhaoyi/Informer2020/issues/97 (2021): one of the two
attentions of a model for time series; "It's a negligence", its author answered.
"""

import math

from torch import nn

LAW = "dropout"
OPTIONS = {}
FIX = [("scores.softmax(dim=-1)", "self.dropout(scores.softmax(dim=-1))")]


class Attention(nn.Module):
    def __init__(self, d_model, heads, dropout=0.1):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = map(self.split, (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
        weights = scores.softmax(dim=-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))
