# %% [markdown]
# # Exercise: dot-product scores
#
# Write a function that returns the scores of attention: the dot product of each query
# with each key, divided by the square root of `d_k`. `query` is `[q_len, d_k]`, `key`
# is `[k_len, d_k]`, and the result is `[q_len, k_len]`, with a row for each query.
#
# - Lesson: [Queries, keys and values](../learn/02_queries_keys_and_values.md)
# - In the modules: [`get_scores`](../source/mha.md#MultiHeadAttention.get_scores)

# %%
import math

import torch

from headnotes.exercises import check


def dot_product_scores(query, key):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A matrix product takes the dot product of each row of its first factor with each
# column of its second. Which of the two matrices must be transposed?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `query @ key.T` has the shape `[q_len, k_len]`. The scale is missing.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# `d_k` is the size of the last axis, `query.shape[-1]`. The scores are divided by
# `math.sqrt(query.shape[-1])`.
#
# </details>

# %%
print(check("dot_product_scores", dot_product_scores))
