"""Relative shift (Transformer-XL): used without a causal mask

Symptom: A speech encoder takes its relative positions from a language model. It trains,
and does well. Yet the weights that a query gives to later tokens change if the token
after the query does.

Bug: Scores by distance become scores by key if the matrix is read as rows that are
shorter by one. The distances end with 0: a decoder needs no others, because its mask
hides later keys. In an encoder, the entries for those keys are one zero, and then the
scores of the *next query* with the farthest keys.

Unseen: All scores up to the query's own position are right, and no shape is wrong. The
encoder also has the content of the tokens to go by.

Thread: https://github.com/espnet/espnet/issues/2684 (2020): attention of the Conformer.
[OpenTransformer](https://github.com/ZhengkunTian/OpenTransformer/issues/25) had copied
it.
"""

import math

import torch
from torch import nn
from torch.nn.functional import pad

LAW = "query_independence"
OPTIONS = {"positions": "learned"}
FIX = [("arange(length - 1, -1, -1", "arange(length - 1, -length, -1")]


class Attention(nn.Module):
    def __init__(self, d_model, heads, frequencies=8):
        super().__init__()
        self.heads = heads
        self.register_buffer("frequency", 10000 ** -torch.linspace(0, 1, frequencies))
        self.position = nn.Linear(2 * frequencies, d_model, bias=False)
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.proj = nn.Linear(d_model, d_model)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def forward(self, query, key, value):
        q, k = self.split(self.query(query)), self.split(self.key(key))
        length = q.shape[2]
        distance = torch.arange(length - 1, -1, -1, device=q.device)
        angle = distance[:, None] * self.frequency.float()
        r = self.position(torch.cat([angle.sin(), angle.cos()], dim=-1).to(q.dtype))
        by_distance = q @ self.split(r).mT
        shifted = pad(by_distance, (1, 0)).flatten(2)[..., length:]
        by_key = shifted.view_as(by_distance)[..., :length]
        weights = ((q @ k.mT + by_key) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        context = weights @ self.split(self.value(value))
        return self.proj(context.transpose(1, 2).flatten(2))
