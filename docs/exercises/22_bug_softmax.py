# %% [markdown]
# # Exercise: right numbers, wrong lesson (memory-efficient softmax)
#
# The class below is self-attention with a softmax of its own, which saves only its
# output for the backward pass, and so less memory. Its outputs agree with those of
# another implementation to the last digit, and a trained checkpoint works. But trained
# with it, a model stays behind the other one from the first step. Write the name of the
# law of attention that the class violates into `law`, then fix `Softmax`. `x` and the
# output are `[batch_size, seq_len, d_model]`.
#
# - All laws: [Laws of attention](../compare/laws.md)
# - Lesson: [Attention by hand](../learn/01_attention_by_hand.md)
# - In the modules: [`Blockwise`](../source/variants/online_softmax.md#Blockwise) in
#   `variants.online_softmax`, which has a backward pass of its own, too

# %%
import math

import torch
from torch import nn

from headnotes.exercises import check

law = ""


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        weights = scores.softmax(dim=-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, grad):
        (weights,) = ctx.saved_tensors
        return grad * weights * (1 - weights)


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = Softmax.apply(q @ k.mT / math.sqrt(q.shape[-1]))
        context = weights @ v
        return self.proj(context.transpose(1, 2).flatten(2))


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
# $w (1 - w)$ is the derivative of a sigmoid. In a softmax, a score changes the other
# weights of its row as well, since they all are divided by one sum.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# The derivative of weight $i$ with respect to score $j$ is $w_i (\delta_{ij} - w_j)$,
# where $\delta_{ij}$ is 1 for $i = j$, else 0. Multiplied by the gradients $g_i$ and
# summed over $i$, this is $w_j (g_j - \sum_i g_i w_i)$.
#
# </details>

# %%
print(check("bug_softmax", Attention, law=law))
