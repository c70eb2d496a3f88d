# %% [markdown]
# # Exercise: the boxes are off (cross-attention in DETR)
#
# The class below is the cross-attention of an object detector. `query` is
# `[batch_size, q_len, d_model]`, `key` and `value` are `[batch_size, k_len, d_model]`,
# and the output has the shape of `query`. The keys are the image features plus their
# positions, the values are the features alone. With a checkpoint that works elsewhere,
# all boxes are wrong. In the encoder, trained from scratch as self-attention, where
# query, key and value are the same tensor, nobody noticed anything. Write the name of
# the law of attention that the class violates into `law`, then fix `forward`. Leave the
# constructor as it is.
#
# - All laws: [Laws of attention](../compare/laws.md)
# - Lesson: [Cross-attention](../learn/07_cross_attention.md)
# - In the modules:
#   [`MultiHeadAttention.forward`](../source/mha.md#MultiHeadAttention.forward)

# %%
import math

from torch import nn

from headnotes.exercises import check

law = ""


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, query, key, value):
        q = self.split(self.q_proj(query))
        k = self.split(self.k_proj(key))
        v = self.split(self.v_proj(value))
        context = self.attend(q, v, k)
        return self.out_proj(context.transpose(1, 2).flatten(2))

    def attend(self, query, key, value):
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        return scores.softmax(dim=-1) @ value


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
# The output is a weighted sum of the values, with weights that do not depend on them.
# If all values are doubled, what happens to the context here?
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# Keys and values have the same shape, so that no error is raised if they change places.
# Follow both from the arguments of `forward` to `attend`.
#
# </details>

# %%
print(check("bug_boxes", Attention, law=law))
