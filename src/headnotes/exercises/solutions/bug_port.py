r"""# Solution: blurred after the upgrade (self-attention of a ViT)

This is a solution of the exercise [blurred after the
upgrade](../../../exercises/23_bug_port.py), with the inputs that its check uses and the
mistakes that the check recognizes.

The given code scales the query, and `scaled_dot_product_attention` scales the scores
again. They are divided by $d_k$ in place of $\sqrt{d_k}$:

$$\operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k} \cdot \sqrt{d_k}}\right) V$$

Smaller scores give weights that are closer to uniform. In training, the weights of the
projections grow to compensate, so nothing is noticed. Weights that were trained with
one scale do not fit the other. The law *formula* fails, and no other.

Source: the code is in the style of
[timm](https://github.com/huggingface/pytorch-image-models); the bug is our own.
"""

import math
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from headnotes.exercises.exercise import Exercise, evaluate, numbers


class Attention(nn.Module):
    r"""Self-attention over `[batch_size, seq_len, d_model]`, fixed.

    >>> import torch
    >>> Attention(d_model=21, heads=3)(torch.randn(2, 5, 21)).shape
    torch.Size([2, 5, 21])
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.scale = (d_model // heads) ** -0.5
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:
        """Attend from each token of `x` to all tokens."""
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [batch, heads, length, d_k]
        x = self.attend(q, k, v)  # [batch, heads, length, d_k]
        x = x.transpose(1, 2).reshape(batch, length, width)
        return self.proj(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        r"""The context; the function scales by $1 / \sqrt{d_k}$ itself."""
        return scaled_dot_product_attention(q, k, v)


# region Typical mistakes


class Given(Attention):
    """This is the given code, or one that computes the same: the scores are scaled
    twice. `scaled_dot_product_attention` scales them as well.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q * self.scale, k, v)


class Unscaled(Attention):
    r"""The scores are not scaled at all. Scale them once, by $1 / \sqrt{d_k}$."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, scale=1.0)


class ScaledByWidth(Attention):
    r"""The scores are divided by $\sqrt{d_{model}}$. Their sums run over the width of
    a head, so divide by $\sqrt{d_k}$.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = 1 / math.sqrt(q.shape[1] * q.shape[-1])
        return scaled_dot_product_attention(q, k, v, scale=scale)


class Multiplied(Attention):
    r"""The scores are multiplied by $\sqrt{d_k}$ instead of divided. The argument
    `scale` is a factor; its default is $1 / \sqrt{d_k}$.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, scale=1 / self.scale)


# endregion

EXERCISE = Exercise(
    series="Find the bug",
    solution=Attention,
    reference=Attention,
    inputs=[(numbers(1, 1, 2),), (numbers(1, 2, 4),), (numbers(3, 5, 14),)],
    mistakes=[Given, Unscaled, ScaledByWidth, Multiplied],
    run=evaluate,
    laws=["formula"],
    options={"layout": "batch_first"},
)
