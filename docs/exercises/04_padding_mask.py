# %% [markdown]
# # Exercise: padding mask
#
# Write a function that returns the padding mask of a batch. `valid_lens` is an integer
# tensor `[batch_size]`, the number of tokens in each sequence; all other positions, at
# the end, are padding. The result is a bool tensor `[1, k_len, batch_size]`, where True
# stands for a token and False for padding. All queries share the mask, so the axis for
# queries has size 1.
#
# - Lesson: [Padding masks and variable lengths](../learn/06_padding_masks.md)
# - In the modules: [`padding`](../source/masks/build.md#padding) in `masks.build`

# %%
import torch

from headnotes.exercises import check


def padding_mask(valid_lens, k_len):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A key at position `j` is a token if `j` is less than the length of its sequence.
# Compare all positions with all lengths at once, by broadcasting.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `torch.arange(k_len)[:, None] < valid_lens` compares a column with a row. What shape
# does it have?
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# The comparison is `[k_len, batch_size]`. Add an axis of size 1 in front, with `[None]`
# or `unsqueeze(0)`.
#
# </details>

# %%
print(check("padding_mask", padding_mask))
