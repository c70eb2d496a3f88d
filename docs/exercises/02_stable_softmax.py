# %% [markdown]
# # Exercise: numerically stable softmax
#
# Write the softmax over the last axis of `scores`, `[q_len, k_len]`, with `exp`, `sum`
# and `max`, and without `softmax` of PyTorch. The sum of each row of the result is 1,
# also where scores are as large as 1000, whose exponential is too large for float32.
#
# - Lesson: [Attention by hand](../learn/01_attention_by_hand.md)
# - In the modules: [`masked_softmax`](../source/mha.md#masked_softmax)

# %%
import torch

from headnotes.exercises import check


def stable_softmax(scores):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin with `scores.exp()`, divided by its sum over the last axis. `keepdim=True` keeps
# that axis, so that the division is broadcast.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# What happens to the softmax of a row if the same number is subtracted from all its
# scores?
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# Subtract the maximum of each row: `scores.max(dim=-1, keepdim=True).values`. The
# largest exponential is then 1.
#
# </details>

# %%
print(check("stable_softmax", stable_softmax))
