# %% [markdown]
# # Exercise: worse in generation than in validation
#
# The class below is causal self-attention for a language model. Training goes well, and
# the loss on the validation set is good. But the texts that the model generates are much
# worse than this loss suggests, and the same text gets another loss if it is computed one
# token at a time. Write the name of the law of attention that the class violates into
# `law`, then fix `forward`. Leave the constructor as it is.
#
# - All laws: [Laws of attention](../compare/laws.md)
# - Lesson: [Causal (masked) self-attention](../learn/03_causal_self_attention.md)
# - In the modules: [`masked_softmax`](../source/mha.md#masked_softmax)

# %%
import math

from torch import nn

from headnotes.exercises import check

law = ""


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = scores.softmax(dim=-1).tril()
        context = weights @ v
        return self.proj(context.transpose(1, 2).flatten(2))


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The checker tests a class against all laws. In a new cell, run `import attention_laws`
# and `attention_laws.check(Attention, layout="batch_first", causal=True)`, with
# `skip="compiled"` to leave out the one law that takes long.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Compute the attention weights of a sequence twice, the second time with another last
# token. Which rows change?
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# The denominator of the softmax is a sum over all keys, also over those that are masked
# afterwards.
#
# </details>

# %%
print(check("bug_perplexity", Attention, law=law))
