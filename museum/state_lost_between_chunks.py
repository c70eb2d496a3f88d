"""Linear attention: the state is lost between chunks of a prompt

Symptom: A model answers short prompts well. To a long prompt it answers as if only the
last part of it had been given.

Bug: Linear attention passes on a state in place of a KV cache. A call with more than
one token is taken for the start of a new prompt, and begins with a state of zero. A
long prompt, which is processed in chunks, loses the state at each boundary.

Unseen: A short prompt is one chunk, and then single tokens follow, which keep the
state. Nothing fails, and the text reads well.

Thread: https://github.com/lablup/mlxcel/issues/1749 (2026): prompts longer than 2,048
tokens were answered from their last chunk alone. In
[TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM/pull/6334), the decay at a chunk
boundary was taken from the wrong position.
"""

import torch
from torch import nn
from torch.nn.functional import elu

LAW = "incremental_decoding"
OPTIONS = {"causal": True, "cache": ("state", "[1]")}
FIX = [("if state is None or x.shape[1] > 1:", "if state is None:")]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, state=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = elu(q) + 1, elu(k) + 1
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        if state is None or x.shape[1] > 1:
            state = torch.zeros_like(k.mT @ v)
        products = (q @ k.mT).tril() @ v + q @ state
        state = state + k.mT @ v
        context = products[..., :-1] / products[..., -1:]
        return self.proj(context.transpose(1, 2).flatten(2)), state
