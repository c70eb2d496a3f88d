# %% [markdown]
# # Exercise: sinusoidal positional encoding
#
# Write a function that returns the table of sinusoidal positions, `[seq_len, d_model]`,
# for an even `d_model`. In row `t`, column `2 * i` is the sine and column `2 * i + 1`
# the cosine of the same angle:
#
# $$P_{t,2i} = \sin(t / 10000^{2i/d_{model}}) \qquad P_{t,2i+1} = \cos(t / 10000^{2i/d_{model}})$$
#
# - Lesson: [Embeddings and positional encoding](../learn/05_embeddings_and_positional_encoding.md)
# - In the modules: [`sinusoids`](../source/positions.md#sinusoids)

# %%
import torch

from headnotes.exercises import check


def positional_encoding(seq_len, d_model):
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Compute all angles at once: a column of positions times a row of frequencies. There
# are `d_model / 2` frequencies.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The frequencies are `10000 ** (-torch.arange(0, d_model, 2) / d_model)`: the even
# columns are `2 * i`.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# Sines and cosines alternate. Assign them to `table[:, 0::2]` and `table[:, 1::2]`, or
# stack them on a new last axis and flatten it.
#
# </details>

# %%
print(check("positional_encoding", positional_encoding))
