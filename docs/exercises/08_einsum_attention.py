# %% [markdown]
# # Exercise: scaled dot-product attention with einsum
#
# Write scaled dot-product attention for all batch items and heads at once, with one
# `torch.einsum` for the scores and one for the context vectors. `query` is `[q_len,
# batch_size, heads, d_k]`, and `key` and `value` are `[k_len, batch_size, heads, d_k]`.
# Return the weights, `[q_len, k_len, batch_size, heads]`, and the context vectors,
# `[q_len, batch_size, heads, d_k]`.
#
# - Lesson: [Sequence-first attention with einsum](../learn/08_sequence_first_with_einsum.md)
# - In the modules: [`get_scores`](../source/mha.md#MultiHeadAttention.get_scores) and [`apply_weights`](../source/mha.md#MultiHeadAttention.apply_weights)

# %%
import math

import torch

from headnotes.exercises import check


def einsum_attention(query, key, value):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Give each axis a letter: `i` query, `j` key, `b` batch item, `h` head, `d` component.
# A letter that is missing on the right of the arrow is summed over.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The scores are `torch.einsum("ibhd,jbhd->ijbh", query, key)`. Over which axis is the
# softmax?
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# The keys are axis 1. The context vectors are a sum over `j`: `"ijbh,jbhd->ibhd"`.
#
# </details>

# %%
print(check("einsum_attention", einsum_attention))
