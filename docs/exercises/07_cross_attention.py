# %% [markdown]
# # Exercise: cross-attention
#
# Write cross-attention with one head: each token of `x`, `[q_len, d_model]`, attends to
# all tokens of `memory`, `[k_len, d_model]`. The projections are matrix products with
# `w_query` and `w_key`, `[d_model, d_k]`, and `w_value`, `[d_model, d_v]`. The scores
# are scaled dot products, and the result is `[q_len, d_v]`.
#
# - Lesson: [Cross-attention](../learn/07_cross_attention.md)
# - In the modules: [`forward`](../source/mha.md#MultiHeadAttention.forward), where queries and keys come from different tensors

# %%
import math

import torch

from headnotes.exercises import check


def cross_attention(x, memory, w_query, w_key, w_value):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# There is one context vector for each token of `x`. So the queries come from `x`; what
# comes from `memory`?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The weights are `[q_len, k_len]`, a softmax over the keys, the last axis. They are
# multiplied with the values, `[k_len, d_v]`.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# `query = x @ w_query`, `key = memory @ w_key`, `value = memory @ w_value`. The scale
# is the square root of `query.shape[-1]`.
#
# </details>

# %%
print(check("cross_attention", cross_attention))
