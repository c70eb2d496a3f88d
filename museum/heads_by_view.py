"""Split along the wrong grain

Symptom: With one head all is well. With more heads a model for clicks gets a little
worse, where papers promise that it gets better.

Bug: In memory, all heads of a token lie side by side, and `view` does not move them. A
view as `[heads, length]` cuts the sequence instead of the width: with two heads the
first one holds the first half of the tokens, both halves of each, and believes that
they are twice as many tokens. No token of the first half ever meets one of the second.

Unseen: `view` accepts every shape of the right size, and the view back restores the
order, so each token even comes out where it went in.

Thread: https://github.com/reczoo/FuxiCTR/issues/30 (2022): in three models of a
library, which had the lines from a blog.
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
