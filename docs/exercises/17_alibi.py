# %% [markdown]
# # Exercise: linear biases (ALiBi)
#
# ALiBi has no positional encoding. It subtracts from each score a penalty that grows
# linearly with the distance of query and key, with a slope for each head. Write a
# function of three ints that returns this bias together with the causal mask, as a
# float32 tensor `[q_len, k_len, 1, heads]`, to be added to the scaled scores. Heads are
# numbered from 1 to `heads`, a power of two, and head $h$ has the slope
# $2^{-8h / \text{heads}}$. The bias is minus the slope times the distance where the
# query may attend to the key, and minus infinity where the key is in the future. The
# last query is aligned with the last key, as in decoding with a KV cache.
#
# - Lesson: [Position encodings compared](../learn/12_position_encodings.md)
# - In the modules: [`AlibiAttention`](../source/variants/alibi.md#AlibiAttention) in
#   `variants.alibi`
# - Law: [`linear_bias`](../compare/laws.md)

# %%
import torch

from headnotes.exercises import check


def alibi_bias(heads, q_len, k_len):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Query `i` is at position `i + k_len - q_len`, key `j` at position `j`. The distances
# are a table, `[q_len, k_len]`: the difference of a column and a row.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# With 8 heads, the slopes are 1/2, 1/4, … 1/256; with 4 heads 1/4, 1/16, 1/64, 1/256.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# `slopes * -distance[..., None, None]` is `[q_len, k_len, 1, heads]`. Where the
# distance is negative, `masked_fill` sets minus infinity.
#
# </details>

# %%
print(check("alibi", alibi_bias))
