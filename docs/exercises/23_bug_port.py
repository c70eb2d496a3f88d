# %% [markdown]
# # Exercise: blurred after the upgrade (self-attention of a ViT)
#
# The class below is the self-attention of a vision transformer. In an upgrade, two
# lines with a softmax were replaced by PyTorch's own function, which is faster.
# Training from scratch works as before. But a checkpoint from before the upgrade has a
# lower accuracy, and its attention maps are more uniform. Write the name of the law of
# attention that the class violates into `law`, then fix `forward`. Leave the
# constructor as it is. `x` and the output are `[batch_size, seq_len, d_model]`.
#
# - All laws: [Laws of attention](../compare/laws.md)
# - Lesson: [Why scores are divided by the square root of
#   d_k](../learn/05_embeddings_and_positional_encoding.md#why-scores-are-divided-by-the-square-root-of-d_k)
# - In the modules: [`fused`](../source/fast/attention.md#fused) in `fast.attention`

# %%
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from headnotes.exercises import check

law = ""


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.num_heads = heads
        self.scale = (d_model // heads) ** -0.5
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q = q * self.scale
        x = scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))


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
# Write down the formula that `forward` computes, from the documentation of
# `scaled_dot_product_attention`. By what are the scores divided?
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# The function divides by $\sqrt{d_k}$ itself, unless its argument `scale` is given.
#
# </details>

# %%
print(check("bug_port", Attention, law=law))
