# %% [markdown]
# # Exercise: every review is positive (padding mask)
#
# The class below is self-attention in a classifier of film reviews. It takes the number
# of real tokens of each sequence, `valid_lens`, ints `[batch_size]`, and `x`,
# `[batch_size, seq_len, d_model]`, like its output. "I wanted to like it, and I did" is
# rated positive, and so is "I wanted to like it, and I did not". No result depends on
# padding, except for reviews of a single token. Write the name of the law of attention
# that the class violates into `law`, then fix `forward`. Leave the constructor as it
# is, and the outputs of padded tokens as they come; each sequence has at least one real
# token.
#
# - All laws: [Laws of attention](../compare/laws.md)
# - Lesson: [Padding masks](../learn/06_padding_masks.md)
# - In the modules: [`padding`](../source/masks/build.md#padding) in `masks.build`

# %%
import math

import torch
from torch import nn

from headnotes.exercises import check

law = ""


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, valid_lens=None):
        q, k, v = (self.split(layer(x)) for layer in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if valid_lens is not None:
            position = torch.arange(1, x.shape[1] + 1)
            mask = position < valid_lens[:, None]
            lowest = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~mask[:, None, None], lowest)
        context = scores.softmax(dim=-1) @ v
        return self.W_o(context.transpose(1, 2).flatten(2))


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The checker tests a class against all laws. In a new cell, run `import attention_laws`
# and `attention_laws.check(Attention, layout="batch_first", mask={"valid_lens":
# "lengths:b"})`, with `skip="compiled"` to leave out the one law that takes long.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Print `mask` for `valid_lens = torch.tensor([3, 1])` and a length of 4. How many keys
# are True in each row?
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# With positions counted from 0, key `j` is real where `j < valid_lens`. Here they are
# counted from 1.
#
# </details>

# %%
print(check("bug_review", Attention, law=law))
