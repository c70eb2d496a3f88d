"""ALiBi: wrong slopes for 12 heads

Symptom: A checkpoint with 12 heads gives good text where it was trained, and worse text
elsewhere, the more so the longer it is. One with 16 heads is the same in both.

Bug: The paper's series of slopes is for powers of two. Its code, and with it each
published model, gives 12 heads the slopes of 8, and four of those of 16, every other
one. Here the series is stretched to 12 heads, as the text of the paper suggests.

Unseen: The slopes are positive, all different, and end with 1/256. A model that is
trained with them is a good model. Only weights from elsewhere do not fit.

Thread: https://github.com/ml-explore/mlx/pull/3071 (2026): two years after the [first
report](https://github.com/ml-explore/mlx/issues/343).
"""

import math

import torch
from torch import nn

LAW = "linear_bias"
OPTIONS = {"causal": True, "positions": "alibi"}
FIX = [
    (
        "        slope =",
        "        n = 2 ** int(math.log2(self.heads))\n"
        "        head = torch.where(head > n, head - n - 0.5, head)\n"
        "        slope =",
    ),
    ("/ self.heads)", "/ n)"),
]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        head = torch.arange(1, self.heads + 1, device=x.device)
        slope = 2 ** (-8 * head / self.heads)
        position = torch.arange(x.shape[1], device=x.device)
        bias = slope[:, None, None] * (position - position[:, None])
        scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1) + bias.to(q.dtype)
        scores = scores.masked_fill(position > position[:, None], -torch.inf)
        weights = scores.softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2)), weights
