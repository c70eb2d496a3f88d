"""The dropout that cannot hear

Symptom: The same input gives another output at each call, in eval, and with no sampling
anywhere.

Bug: `scaled_dot_product_attention` is a function: it knows of no module and of no mode,
and drops whenever `dropout_p` is above 0. `model.eval()` does not reach it.

Unseen: Published weights mostly come with a dropout of 0, where there is nothing to
see. Else the outputs are only a little noisy, and the noise looks like a model that is
a little worse.

Thread: https://github.com/huggingface/pytorch-image-models/pull/1978 (2023): “a
recurring bug I see around”, mended in many models of the library at once, and before
in [nanoGPT](https://github.com/karpathy/nanoGPT/pull/240).
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
