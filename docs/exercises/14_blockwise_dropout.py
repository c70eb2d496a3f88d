# %% [markdown]
# # Exercise: blockwise dropout
#
# A kernel that computes attention block by block does not store its dropout mask: each
# block of rows has a seed, from which the backward pass generates the same mask again.
# Complete such a dropout as an autograd function. `forward` gets the attention weights,
# `[q_len, k_len]`, a probability `0 <= p < 1`, an int `seed` and the number of rows in
# a block, `block_len`; the last block may have fewer rows. It returns a new tensor
# `[q_len, k_len]`, in which each weight is either zero or divided by `1 - p`. The mask
# of block `n`, counted from 0, with `rows` rows, comes from a generator of its own,
# seeded with `seed + n`: a weight is kept where
# `torch.rand(rows, k_len, generator=generator) >= p`. `backward` gets the gradient of
# the output, `[q_len, k_len]`, and returns the gradients of the four arguments, `None`
# for those that are no tensor. Save no tensor for it on `ctx`, and leave PyTorch's
# global random state as it is.
#
# - Lesson: [Dropout on attention
#   weights](../learn/03_causal_self_attention.md#dropout-on-attention-weights)
# - In the modules: [`Tiles`](../source/fast/blockwise.md#Tiles) in `fast.blockwise`

# %%
import torch

from headnotes.exercises import check


class BlockDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, p, seed, block_len):
        raise NotImplementedError

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `weights.split(block_len)` are the blocks. A generator with a seed is
# `torch.Generator().manual_seed(seed + n)`; it does not change the global random state.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The output is linear in the weights: each is multiplied by 0 or by `1 / (1 - p)`. The
# gradient of a weight is the gradient of its output times the same factor.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# So the backward pass is the same function, applied to the gradient. Write a function
# `drop(x, p, seed, block_len)`, call it in both, and keep the three numbers on `ctx`.
#
# </details>

# %%
print(check("blockwise_dropout", BlockDropout))
