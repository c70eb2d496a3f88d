# %% [markdown]
# # Exercise: sliding-window attention
#
# With a sliding window, a query attends to the `window` last positions only, its own
# included, and never to a later one: with a window of 3, the query at position 7
# attends to positions 5, 6 and 7. `query` is `[q_len, batch_size, heads, d_k]`, `key`
# and `value` are `[k_len, batch_size, heads, d_k]`, with `q_len <= k_len` and
# `window >= 1`. The last query is aligned with the last key. Return the context,
# `[q_len, batch_size, heads, d_k]`, of scaled dot-product attention.
#
# - Lesson: [Sliding windows and attention sinks](../learn/13_sliding_windows_and_sinks.md)
# - In the modules:
#   [`SlidingWindowAttention`](../source/variants/sliding_window.md#SlidingWindowAttention)
#   in `variants.sliding_window`
# - Law: [`sliding_window`](../compare/laws.md)

# %%
import math

import torch

from headnotes.exercises import check


def sliding_window_attention(query, key, value, window):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The distance of query `i` to key `j` is `i + k_len - q_len - j`. It is negative where
# the key is in the future.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A window of 1 is a query that attends to itself only: its distance is 0.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# A query may attend where `(distance >= 0) & (distance < window)`. Elsewhere the
# scores, `[q_len, k_len, batch_size, heads]`, are filled with minus infinity before the
# softmax.
#
# </details>

# %%
print(check("sliding_window", sliding_window_attention))
