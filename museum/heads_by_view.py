"""Splitting into heads: `view` without a transpose

Symptom: With one head, a model that predicts clicks works well. With more heads it gets
a little worse, where papers report that it gets better.

Bug: In memory, all heads of a token lie side by side, and `view` does not move them. A
view as `[heads, length]` cuts the sequence instead of the width: with two heads, the
first one holds both halves of each token in the first half of the sequence, as if they
were twice as many tokens. No token of the first half attends to one of the second.

Unseen: `view` accepts every shape of the right size, and the view back restores the
order, so that each output is at the position of its token.

Thread: https://github.com/reczoo/FuxiCTR/issues/30 (2022): in three models of a
library, which had copied the lines from a blog.
"""

import math

from torch import nn

LAW = "query_permutation"
OPTIONS = {}
FIX = [
    ("x.view(batch, self.heads, length, -1)", "x.view(batch, length, self.heads, -1)"),
    ("return heads", "return heads.transpose(1, 2)"),
    ("context.view(x.shape)", "context.transpose(1, 2).reshape(x.shape)"),
]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)

    def split(self, x):
        batch, length, _ = x.shape
        heads = x.view(batch, self.heads, length, -1)
        return heads

    def forward(self, x):
        q = self.split(self.query(x))
        k = self.split(self.key(x))
        v = self.split(self.value(x))
        scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
        context = scores.softmax(dim=-1) @ v
        return context.view(x.shape)
