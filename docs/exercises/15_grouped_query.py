# %% [markdown]
# # Exercise: grouped-query attention
#
# In grouped-query attention (GQA), several query heads share one head of keys and
# values, which makes the KV cache smaller. `query` is
# `[q_len, batch_size, heads, d_k]`, `key` and `value` are
# `[k_len, batch_size, kv_heads, d_k]`, and `heads` is a multiple of `kv_heads`.
# Consecutive query heads belong to one group: with 6 heads and 2 key heads, query heads
# 0, 1 and 2 attend to key head 0, and 3, 4 and 5 to key head 1. Return the context,
# `[q_len, batch_size, heads, d_k]`, of scaled dot-product attention without a mask. Do
# not call `F.scaled_dot_product_attention`, which can do all of this.
#
# - Lesson: [Multi-head attention](../learn/04_multi_head_attention.md)
# - In the modules:
#   [`GroupedQueryAttention`](../source/variants/grouped_query.md#GroupedQueryAttention)
#   in `variants.grouped_query`

# %%
import math

import torch

from headnotes.exercises import check


def grouped_query_attention(query, key, value):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# With `kv_heads == heads`, the scores are
# `torch.einsum("ibhd,jbhd->ijbh", query, key)`, divided by the square root of `d_k`.
# The softmax runs over the keys, `j`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Either repeat each head of keys and values as many times as a group has query heads,
# or split the heads of the query into two dimensions, `kv_heads` and the heads of a
# group.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# `query.unflatten(2, (kv_heads, -1))` is
# `[q_len, batch_size, kv_heads, group_size, d_k]`, and its scores are
# `torch.einsum("ibhgd,jbhd->ijbhg", query, key)`. `flatten(2, 3)` joins the two
# dimensions of the context. Nothing is copied.
#
# </details>

# %%
print(check("grouped_query", grouped_query_attention))
