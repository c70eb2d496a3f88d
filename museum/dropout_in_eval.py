"""Dropout in `scaled_dot_product_attention`: active in evaluation

Symptom: In evaluation, the same input gives another output at each call, though nothing
is sampled.

Bug: `scaled_dot_product_attention` is a function, which has no training mode: it
applies dropout whenever `dropout_p` is above 0. `model.eval()` does not change this.

Unseen: Published weights mostly come with a dropout probability of 0, where the bug has
no effect. Otherwise the outputs are slightly noisy, and the noise looks like a slightly
worse model.

Thread: https://github.com/huggingface/pytorch-image-models/pull/1978 (2023): “a
recurring bug I see around”, fixed in many models of the library at once, and before in
[nanoGPT](https://github.com/karpathy/nanoGPT/pull/240).
"""

from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAW = "eval_matches_train"
OPTIONS = {}
FIX = [
    ("dropout_p=self.dropout", "dropout_p=dropout"),
    (
        "        context =",
        "        dropout = self.dropout if self.training else 0.0\n        context =",
    ),
]


class Attention(nn.Module):
    def __init__(self, d_model, heads, dropout=0.2):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        context = scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return self.proj(context.transpose(1, 2).flatten(2))
