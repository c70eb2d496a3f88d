# %% [markdown]
# # Exercise: KV cache
#
# Write a KV cache with room for `capacity` positions. `append` stores the key and the
# value of the next position, each `[batch_size, heads, d_k]`. `attend` takes the query
# of the newest position, `[batch_size, heads, d_k]`, and returns its context of the
# same shape: scaled dot-product attention over all positions stored so far, its own
# included, for each head on its own. Allocate the memory in the constructor, and write
# to it in place: appending with `torch.cat` would copy all earlier positions at each
# step. All tensors are float32. The check runs a whole sequence through your class, one
# position after the other, without gradients; it never exceeds the capacity.
#
# - Lesson: [The cost of a token: the KV cache](../learn/11_kv_cache.md)
# - In the modules: [`KeyValueCache`](../source/fast/module.md#KeyValueCache) in
#   `fast.module`

# %%
import math

import torch

from headnotes.exercises import check


class KVCache:
    def __init__(self, capacity, batch_size, heads, d_k):
        raise NotImplementedError

    def append(self, key, value):
        raise NotImplementedError

    def attend(self, query):
        raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Keep two buffers, `[capacity, batch_size, heads, d_k]`, one for keys and one for
# values, and the number of positions that are stored.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `append` writes to index `length` of both buffers, and then increments `length`.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# `attend` uses `self.keys[: self.length]`, not the whole buffer. One query needs no
# mask: `torch.einsum("bhd,jbhd->jbh", query, keys)` are its scores, and the softmax
# runs over `j`.
#
# </details>

# %%
print(check("kv_cache", KVCache))
