# %% [markdown]
# # Exercise: only in float32 (mixed precision)
#
# The class below is self-attention with the names of T5. Its author read that the
# softmax is more accurate in float32. Everything works, until the model is loaded in
# bfloat16 to save memory: the first call stops with an error about dtypes. Write the
# name of the law of attention that the class violates into `law`, then fix `forward`;
# the softmax stays in float32. Leave the constructor as it is. `x` and the output are
# `[batch_size, seq_len, d_model]`, both of the dtype of the parameters: float32,
# bfloat16 or float64.
#
# - All laws: [Laws of attention](../compare/laws.md)
# - Lesson: [Multi-head attention](../learn/04_multi_head_attention.md)
# - In the modules: [`check_tensor`](../source/mha.md#check_tensor), where the core
#   tests the dtypes of its inputs

# %%
import math

import torch
from torch import nn

from headnotes.exercises import check

law = ""


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.n_heads = heads
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)

    def split(self, x):
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = scores.float().softmax(dim=-1)
        context = weights @ v
        return self.o(context.transpose(1, 2).flatten(2))


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The checker tests a class against all laws. In a new cell, run `import attention_laws`
# and `attention_laws.check(Attention, layout="batch_first", skip="compiled")`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Write down the dtype after each line, for an `x` in bfloat16. PyTorch converts no
# operand of a matrix product by itself.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# Convert the weights back before they meet the values, to the dtype of the values,
# whatever it is.
#
# </details>

# %%
print(check("bug_precision", Attention, law=law))
