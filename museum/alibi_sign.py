"""ALiBi: the bias has the wrong sign

Symptom: Linear biases were meant to help a model with texts longer than those it was
trained on. The longer the text, the less the model uses nearby tokens.

Bug: ALiBi subtracts from each score a penalty that grows with the distance. Here `i -
j` is *added*: the farther back a key is, the more weight it gets.

Unseen: The bias has the right shape and the right slopes. In short texts it is small,
and the products of queries and keys outweigh it.

Thread: https://github.com/meta-pytorch/attention-gym/pull/86 (2024): in the notebook of
a collection of examples.
"""

import math

import torch
from torch import nn

LAW = "linear_bias"
OPTIONS = {"causal": True, "positions": "alibi"}
FIX = [("position[:, None] - position", "position - position[:, None]")]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        head = torch.arange(1, self.heads + 1, device=x.device)
        n = 2 ** int(math.log2(self.heads))
        head = torch.where(head > n, head - n - 0.5, head)
        slope = 2 ** (-8 * head / n)
        position = torch.arange(x.shape[1], device=x.device)
        bias = slope[:, None, None] * (position[:, None] - position)
        scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1) + bias.to(q.dtype)
        scores = scores.masked_fill(position > position[:, None], -torch.inf)
        weights = scores.softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2)), weights
