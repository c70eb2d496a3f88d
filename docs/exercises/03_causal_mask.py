# %% [markdown]
# # Exercise: causal mask
#
# Write a function that returns the causal mask of `q_len` queries and `k_len` keys: a
# bool tensor `[q_len, k_len]`, where True means that the query of this row may attend to
# the key of this column. A query may attend to the key at its own position and to all
# earlier ones. Where the lengths differ, the last query is aligned with the last key, as
# in decoding with a KV cache.
#
# - Lesson: [Causal (masked) self-attention](../learn/03_causal_self_attention.md)
# - In the modules: [`causal`](../source/masks/build.md#causal) in `masks.build`

# %%
import torch

from headnotes.exercises import check


def causal_mask(q_len, k_len):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For three queries and three keys, the mask is True on the diagonal and below it. PyTorch
# has a method that sets all entries above a diagonal to zero, or to False.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `torch.ones(q_len, k_len, dtype=torch.bool).tril()` is right where both lengths are
# equal. `tril` takes the number of the last diagonal that it keeps.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# With two queries and five keys, the first query is at position 3. The diagonal is shifted
# by `k_len - q_len`.
#
# </details>

# %%
print(check("causal_mask", causal_mask))
