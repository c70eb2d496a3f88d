# %% [markdown]
# # Exercise: online softmax
#
# Attention can be computed without ever holding a whole row of scores: the keys are
# processed block by block, and three running values are kept for each query. Write the
# step for one block. `scores` are those of the block, `[q_len, block_len]`, already
# scaled and masked with minus infinity; `value` are its values, `[block_len, d_v]`.
# `largest` and `total`, `[q_len]`, are the largest score so far, $m$, and the sum
# $\sum_j e^{s_j - m}$; `context`, `[q_len, d_v]`, is $\sum_j e^{s_j - m}\, v_j$, not
# yet divided by the total. Return the new `largest`, `total` and `context` as a tuple.
# They start with minus infinity, 0 and 0, and stay so as long as all scores of a row
# are masked. Scores may be large: compute no exponential of a positive number. The
# check calls your function for each block of a row, without gradients, and compares the
# final values.
#
# - Exercise: [stable softmax](02_stable_softmax.py), for the maximum that is subtracted
# - In the modules:
#   [`running_softmax`](../source/variants/online_softmax.md#running_softmax) in
#   `variants.online_softmax`

# %%
import torch

from headnotes.exercises import check


def add_block(largest, total, context, scores, value):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The new largest score is the larger one of `largest` and the largest score of the
# block: `torch.maximum(largest, scores.amax(dim=-1))`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Each term of `total` and `context` contains $e^{-m}$, with the old $m$. Both are
# multiplied by $e^{m_\text{old} - m_\text{new}}$ before the terms of the block are
# added.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# In a row that is masked so far, the differences are $-\infty - (-\infty)$, which is
# NaN. Where the new largest score is minus infinity, subtract 0 instead: all
# exponentials are then zero.
#
# </details>

# %%
print(check("online_softmax", add_block))
