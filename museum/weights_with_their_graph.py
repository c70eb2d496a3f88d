"""Stored attention weights: not detached from the graph

Symptom: A new model can be copied, a trained one cannot: `Only Tensors created
explicitly by the user (graph leaves) support the deepcopy protocol`.

Bug: The weights are stored on the module for plots, and with them the whole autograd
graph that computed them. Such a tensor cannot be copied, and its memory is not freed
until the next call.

Unseen: Code that trains and evaluates one model never copies it. An exponential moving
average of the weights, a cross-validation or a second process does.

Thread: https://github.com/sktime/sktime/issues/10928 (2026): tests of fitted estimators
failed for every model with this layer.
"""

import math

from torch import nn

LAW = "copy_after_call"
OPTIONS = {}
FIX = [("self.weights = weights", "self.weights = weights.detach()")]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.weights = None

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = map(self.split, (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
        weights = scores.softmax(dim=-1)
        self.weights = weights
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))
