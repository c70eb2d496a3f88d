# %% [markdown]
# # Exercise: split and merge heads
#
# Write two functions. `split_heads` takes `x`, `[batch_size, seq_len, d_model]`, and
# returns `[batch_size, heads, seq_len, d_k]`, where `d_k` is `d_model / heads` and each
# head is a block of neighboring components of the last axis. `merge_heads` takes the
# result, and returns `x`. The check calls `split_and_merge`, which calls both.
#
# - Lesson: [Multi-head attention](../learn/04_multi_head_attention.md)
# - In the modules: [`MultiHeadAttention`](../source/implementations/batch_first.md#MultiHeadAttention), batch first

# %%
import torch

from headnotes.exercises import check


def split_heads(x, heads):
    raise NotImplementedError


def merge_heads(x):
    raise NotImplementedError


def split_and_merge(x, heads):
    split = split_heads(x, heads)
    return split, merge_heads(split)


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In memory, the components of a token are neighbors, head after head. A view can cut
# the last axis into `(heads, d_k)`, but it cannot exchange heads and tokens.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# To split: `x.unflatten(-1, (heads, -1))`, then a transpose of two axes.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# To merge: the same transpose, then `flatten(2)`, which copies where it must. (`view`
# would raise an error.)
#
# </details>

# %%
print(check("split_and_merge", split_and_merge))
