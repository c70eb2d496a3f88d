r"""Scale of the scores: `sqrt(d_model)` in place of `sqrt(d_k)`

Symptom: Nothing seemed wrong. The code of the lecture ran, the loss fell, and the
generated text looked like Shakespeare.

Bug: The scores are divided by $\sqrt{d_{model}}$, where $d_{model}$ is the width of the
input. Their dot product sums over the width of a head, so they must be divided by
$\sqrt{d_k}$. With 8 heads, all scores are $\sqrt 8$ times too small, and each row of
weights is closer to uniform than intended.

Unseen: The scale is a constant, so training compensates with larger weights. Only a
checkpoint from elsewhere, or a comparison number by number, shows it.

Thread: https://github.com/karpathy/ng-video-lecture/pull/6 (2023): from a lecture that
many have watched; “you're right :(”, and fixed. The bug lives on in copies, in
[teaching notebooks](https://github.com/Graylab/DL4Proteins-notebooks/issues/12) and
[elsewhere](https://github.com/FareedKhan-dev/train-llm-from-scratch/pull/3).
"""

import math

from torch import nn

LAW = "formula"
OPTIONS = {}
FIX = [("math.sqrt(x.shape[-1])", "math.sqrt(q.shape[-1])")]


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

    def forward(self, x):
        q, k, v = map(self.split, (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        scores = q / math.sqrt(x.shape[-1]) @ k.transpose(-2, -1)
        context = scores.softmax(dim=-1) @ v
        return self.out_proj(context.transpose(1, 2).flatten(2))
