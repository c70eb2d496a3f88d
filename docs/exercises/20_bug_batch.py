# %% [markdown]
# # Exercise: right alone, wrong in a batch (multi-head attention)
#
# The class below is self-attention in the style of d2l: batch and heads are flattened
# into one dimension for the matrix products. One sequence at a time, it computes the
# right numbers. In a batch, with no padding and no mask anywhere, the results of a
# sequence change with the others in the batch. Write the name of the law of attention
# that the class violates into `law`, then fix `forward` or a method that it calls.
# Leave the constructor as it is. `x` and the output are
# `[batch_size, seq_len, d_model]`.
#
# - All laws: [Laws of attention](../compare/laws.md)
# - Lesson: [Multi-head attention](../learn/04_multi_head_attention.md)
# - In the modules: [`valid_lens`](../source/implementations/valid_lens.md), in the
#   style of d2l

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

    def forward(self, x):
        q, k, v = (self.split(layer(x)) for layer in (self.W_q, self.W_k, self.W_v))
        scores = torch.bmm(q, k.mT) / math.sqrt(q.shape[-1])
        context = torch.bmm(scores.softmax(dim=-1), v)
        return self.W_o(self.merge(context))

    def split(self, x):
        x = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return x.flatten(0, 1)

    def merge(self, x):
        x = x.unflatten(0, (self.heads, -1))
        return x.permute(1, 2, 0, 3).flatten(2)


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
# Follow the shapes through `split` and `merge` with `batch_size=2` and `heads=3`. In
# which order do the six matrices lie in the flattened dimension?
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# `split` flattens `[batch_size, heads]`: all heads of the first item come first.
# `merge` has to split that dimension in the same order.
#
# </details>

# %%
print(check("bug_batch", Attention, law=law))
