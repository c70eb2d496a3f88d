# %% [markdown]
# # Exercise: chunked prefill
#
# A long prompt is processed in chunks, each of which attends to the chunks before it
# through the KV cache. Write the step for one chunk. `query`, `key` and `value` are
# those of the `chunk_len` new positions, `[chunk_len, batch_size, heads, d_k]`;
# `past_key` and `past_value` are the cache, `[past_len, batch_size, heads, d_k]`, and
# `past_len` is 0 for the first chunk. Return a tuple of three tensors: the context of
# the chunk, `[chunk_len, batch_size, heads, d_k]`, and the keys and values of past and
# chunk together, `[past_len + chunk_len, batch_size, heads, d_k]`. The attention is
# causal, over all these keys: for every chunk length, the contexts of all chunks
# together are those of one causal pass.
#
# - Lesson: [Prefill and decoding](../learn/11_kv_cache.md#prefill-and-decoding)
# - In the modules:
#   [`MultiHeadAttention.decode`](../source/fast/module.md#MultiHeadAttention.decode) in
#   `fast.module`

# %%
import math

import torch

from headnotes.exercises import check


def prefill_chunk(query, key, value, past_key, past_value):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Concatenate past and new keys, in this order, along the first dimension; values, too.
# The scores are then `[chunk_len, past_len + chunk_len, batch_size, heads]`:
# `torch.einsum("ibhd,jbhd->ijbh", query, keys)`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The query of row `i` is at position `past_len + i`. It may attend to all keys up to
# this position.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# `torch.ones(chunk_len, k_len, dtype=torch.bool).tril(past_len)` is the mask, and
# `mask[..., None, None]` broadcasts over batch and heads. The softmax runs over axis 1.
#
# </details>

# %%
print(check("chunked_prefill", prefill_chunk))
