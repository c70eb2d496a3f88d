"""Batch-first input: `batch_first=True` is missing

Symptom: A detector gives other boxes for the same image, depending on the other images
of the batch.

Bug: `nn.MultiheadAttention` is sequence first by default. A batch-first tensor is
accepted as well: each position then attends to the same position of the other batch
items, and never to its own sequence.

Unseen: Three axes go in, three axes come out. Trained this way, the model learns from
what the items of a batch have in common; one author took it for a strong regularizer.

Thread: https://github.com/om-ai-lab/OmDet/issues/19 (2024): found when the model was
ported, as inference in batches did not agree with inference one by one. [The
regularizer](https://github.com/aipixel/AEMatter/issues/3) is of 2023.
"""

from torch import nn

LAW = "batch_independence"
OPTIONS = {"layout": "batch_first"}
FIX = [
    (
        "nn.MultiheadAttention(d_model, heads)",
        "nn.MultiheadAttention(d_model, heads, batch_first=True)",
    )
]


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, heads)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]
