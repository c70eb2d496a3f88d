# %% [markdown]
# # Exercise: NaN after three days (attention scores)
#
# The class below is self-attention in the style of labml: sequence first,
# `[seq_len, batch_size, d_model]`, with einsum. Its author wrote the softmax out, to
# see each step. For three days the loss falls, and agrees with that of another
# implementation. Then it is NaN from one step to the next. Write the name of the law of
# attention that the class violates into `law`, then fix `forward`. Leave the
# constructor as it is.
#
# - All laws: [Laws of attention](../compare/laws.md)
# - Lesson: [Attention by hand](../learn/01_attention_by_hand.md)
# - In the modules: [`masked_softmax`](../source/mha.md#masked_softmax)

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
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1))

    def forward(self, x):
        query, key = self.split(self.query(x)), self.split(self.key(x))
        scores = torch.einsum("ibhd,jbhd->ijbh", query, key)
        scores = scores / math.sqrt(query.shape[-1])
        attn = scores.exp()
        attn = attn / attn.sum(dim=1, keepdim=True)
        value = self.split(self.value(x))
        context = torch.einsum("ijbh,jbhd->ibhd", attn, value)
        return self.output(context.flatten(-2))


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The checker tests a class against all laws. In a new cell, run `import attention_laws`
# and `attention_laws.check(Attention, layout="sequence_first", skip="compiled")`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# In training, the scores grow. What are `torch.tensor(100.0).exp()` and the quotient of
# two such numbers?
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# A softmax does not change if one number is subtracted from all scores of its row. With
# the largest score of the row subtracted, no exponential is above 1, and the sum is at
# least 1.
#
# </details>

# %%
print(check("bug_nan", Attention, law=law))
