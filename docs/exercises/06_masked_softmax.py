# %% [markdown]
# # Exercise: masked softmax with fully masked rows
#
# Write a softmax over the last axis of `scores`, `[q_len, k_len]`, in which only the
# keys count where `mask`, a bool tensor of the same shape, is True. All other weights
# are zero. In a fully masked row, where `mask` is False for all keys, all weights are
# zero, and no gradient is NaN.
#
# - Lesson: [Causal (masked) self-attention](../learn/03_causal_self_attention.md)
# - Lesson: [Padding masks and variable lengths](../learn/06_padding_masks.md)
# - In the modules: [`masked_softmax`](../source/mha.md#masked_softmax)

# %%
import math

import torch

from headnotes.exercises import check


def masked_softmax(scores, mask):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A score of minus infinity has a weight of zero: `scores.masked_fill(~mask,
# -math.inf)`. What is the softmax of a row where all scores are minus infinity?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `mask.any(dim=-1, keepdim=True)` is False for the fully masked rows. Their weights can
# be set to zero after the softmax.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# To keep NaN out of the backward pass, set the scores of fully masked rows to zero
# before the softmax, and their weights to zero after it.
#
# </details>

# %%
print(check("masked_softmax", masked_softmax))
