"""Attending to the neighbours in the batch

Symptom: The detector gives other boxes for the same picture, depending on which
pictures are processed with it.

Bug: `nn.MultiheadAttention` takes the *sequence* first unless it is told otherwise. A
batch-first tensor fits as well: each position then attends to the same position of the
other items, and never to its own sequence.

Unseen: Three axes go in, three axes come out. Trained this way, the model learns what
little there is to learn across a batch; one author took it for a strong regulariser.

Thread: https://github.com/om-ai-lab/OmDet/issues/19 (2024): found when the model was
ported, as inference by batches did not agree with inference one by one.
[The regulariser](https://github.com/aipixel/AEMatter/issues/3) is of 2023.
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
