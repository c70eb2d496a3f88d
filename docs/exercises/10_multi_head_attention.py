# %% [markdown]
# # Exercise: multi-head attention
#
# Write the `forward` of multi-head attention, sequence first: `query` is `[q_len,
# batch_size, d_model]`, and `key` and `value` are `[k_len, batch_size, d_model]`.
# `mask` is None or a bool tensor `[q_len, k_len, batch_size]`, where True means that
# the query may attend to the key; a fully masked row has weights of zero. The result is
# `[q_len, batch_size, d_model]`. Leave the constructor as it is.
#
# - Lesson: [Multi-head attention](../learn/04_multi_head_attention.md)
# - Lesson: [Sequence-first attention with einsum](../learn/08_sequence_first_with_einsum.md)
# - In the modules: [`forward`](../source/mha.md#MultiHeadAttention.forward)

# %%
import math

import torch
from torch import nn

from headnotes.exercises import check


class MultiHeadAttention(nn.Module):
    def __init__(self, heads, d_model):
        super().__init__()
        self.heads = heads
        self.d_k = d_model // heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The steps are those of exercises 5, 6 and 8: project and split into heads, scores,
# mask and softmax, context vectors, merge the heads, and the last projection.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Project and split with `self.query(query).unflatten(-1, (self.heads, self.d_k))`. In
# this layout, no transpose is needed.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# The scores are `[q_len, k_len, batch_size, heads]`. `mask.unsqueeze(-1)` is broadcast
# over the heads, and the softmax is over axis 1.
#
# </details>
#
# <details><summary>Hint 4</summary>
#
# Merge the heads with `flatten(-2)`, and pass the result through `self.output`.
#
# </details>

# %%
print(check("multi_head_attention", MultiHeadAttention))
