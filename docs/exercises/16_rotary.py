# %% [markdown]
# # Exercise: rotary position embeddings
#
# Rotary position embeddings (RoPE) rotate queries and keys by angles that grow with the
# position, so that their dot product depends on the distance only. Write the rotation
# of `x`, `[seq_len, batch_size, heads, d_k]`, where `d_k` is even; the result has the
# same shape. Entry $i$ of the first half of $d_k$ is paired with entry $i$ of the
# second half. At position $p$, this pair $(a, b)$ becomes
# $(a \cos \theta - b \sin \theta,\; b \cos \theta + a \sin \theta)$, with
# $\theta = p \cdot 10000^{-2i / d_k}$ and $i$ counted from 0. The first token of `x` is
# at position `first`, an int: 0 for a prompt, and the length of the KV cache in
# decoding.
#
# - Lesson: [Position encodings compared](../learn/12_position_encodings.md)
# - In the modules: [`rotate`](../source/variants/rotary.md#rotate) in `variants.rotary`

# %%
import torch

from headnotes.exercises import check


def rotate(x, first):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `torch.arange(seq_len) + first` are the positions, and `torch.arange(d_k // 2)` the
# values of $i$. Their angles are a table, `[seq_len, d_k / 2]`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The table must broadcast over batch and heads: `angle[:, None, None]` is
# `[seq_len, 1, 1, d_k / 2]`.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# `a, b = x.chunk(2, dim=-1)` are the two halves. Compute both rotated halves, and
# concatenate them along the last dimension.
#
# </details>

# %%
print(check("rotary", rotate))
