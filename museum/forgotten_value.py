"""Value projection: computed and not used

Symptom: The images of a ported model are slightly worse than those of the original. All
weights have been copied.

Bug: The values are projected, and then the weighted sum is taken over the keys: one
wrong index. A quarter of the parameters has no influence on the output.

Unseen: Keys and values have the same shape, and a network can learn keys that also
serve as values. The unused projection is in the parameter count, in the checkpoint and
in the optimizer, which skips parameters without a gradient without a warning.

Thread: https://github.com/hmdolatabadi/denoising_diffusion/issues/1 (2020): the finder
thinks that it hardly shows unless likelihoods and FID are measured; the owner agrees.
"""

import math

from torch import nn

LAW = "parameter_gradients"
OPTIONS = {}
FIX = [("softmax(dim=-1) @ heads[1]", "softmax(dim=-1) @ heads[2]")]


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
        projections = (self.q_proj, self.k_proj, self.v_proj)
        heads = [self.split(projection(x)) for projection in projections]
        scores = heads[0] / math.sqrt(heads[0].shape[-1]) @ heads[1].transpose(-2, -1)
        context = scores.softmax(dim=-1) @ heads[1]
        return self.out_proj(context.transpose(1, 2).flatten(2))
