# %% [markdown]
# # Exercise: slow learner (attention maps)
#
# The class below is self-attention in the style of labml: sequence first,
# `[seq_len, batch_size, d_model]`, with einsum. It stores its attention weights for
# plots. It learns, but more slowly than another implementation, and the attention maps
# look the same after each epoch. Write the name of the law of attention that the class
# violates into `law`, then fix `forward`. The weights are still stored, without their
# graph. Leave the constructor as it is.
#
# - All laws: [Laws of attention](../compare/laws.md)
# - Lesson: [Sequence first, with einsum](../learn/08_sequence_first_with_einsum.md)
# - In the modules:
#   [`MultiHeadAttention.forward`](../source/mha.md#MultiHeadAttention.forward)

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
        self.attn = None

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1))

    def forward(self, x):
        query, key = self.split(self.query(x)), self.split(self.key(x))
        scores = torch.einsum("ibhd,jbhd->ijbh", query, key)
        attn = (scores / math.sqrt(query.shape[-1])).softmax(dim=1)
        self.attn = attn = attn.detach()
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
# Call `backward` on the sum of an output, and print the `grad` of each parameter. Which
# have none?
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# `a = b = c` assigns the same object to both names. Which of the two needs the graph?
#
# </details>

# %%
print(check("bug_maps", Attention, law=law))
