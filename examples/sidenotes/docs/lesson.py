# %% [markdown]
# # Softmax, step by step
#
# Softmax turns scores into weights that sum to 1: $w_i = e^{s_i} / \sum_j e^{s_j}$. See
# [its source](source/stable.md).

# %%
import numpy as np
from softmax.stable import softmax

weights = softmax(np.array([[1.0, 2.0, 3.0]]))
print(weights.round(3))
