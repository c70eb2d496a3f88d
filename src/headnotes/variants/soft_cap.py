r"""# Soft-capped attention

This module is the core with its scores bounded by a smooth function, so that none is
larger than a *cap*. Gemma 2 uses it in every layer, with a cap of 50; the first Grok
with one of 30. It is for readers who know the [core](../mha.md); only the scores
change.

Scores can grow during training until the softmax is one-hot and has no gradient. The
hyperbolic tangent is almost the identity for small scores, and its absolute value stays
below 1:

$$S'_{ijbh} = c \tanh\left(\frac{S_{ijbh}}{c}\right)$$

The cap is applied after the scale and before the mask: a hidden key has minus infinity,
which a cap would make finite.

**At full speed** it is an option of [`Scores`](../fast/components.md#Scores), an
argument of [`fast.MultiHeadAttention`](../fast/module.md). With the same weights, the
outputs are equal:

```python
from headnotes import fast

quick = fast.MultiHeadAttention(heads=3, d_model=42, scores=fast.Scores(soft_cap=2.0))
```

**Reduces to** the core for large caps: the scores change by about $S^3 / 3 c^2$.

**Laws.** Of the laws that the core passes, all apply: the checker reads the cap, and
its `formula` has one.

Source: [Gemma 2](https://arxiv.org/abs/2408.00118), Gemma Team 2024, section 2, "Logit
soft-capping"; [Neural Combinatorial Optimization with Reinforcement
Learning](https://arxiv.org/abs/1611.09940), Bello et al. 2016, equation 16.
"""

import math

import torch
from torch import Tensor

from headnotes.mha import MultiHeadAttention


class SoftCapAttention(MultiHeadAttention):
    r"""Multi-head attention whose scores lie between `-soft_cap` and `soft_cap`.

    The other arguments, masks and errors are those of the core; the parameters are the
    same, too. Raises `ValueError` where `soft_cap` is not a finite number above 0.
    Source: Gemma Team 2024, section 2.

    Whatever the inputs, no key has more than $e^{2c}$ times the weight of another:

    >>> mha = SoftCapAttention(heads=2, d_model=6, soft_cap=3.0)
    >>> x = 100 * torch.randn(5, 1, 6)
    >>> _ = mha(query=x, key=x, value=x)
    >>> ratios = mha.attn.amax(dim=1) / mha.attn.amin(dim=1)
    >>> bool((ratios <= 1.01 * math.exp(6)).all())
    True
    """

    def __init__(
        self,
        heads: int,
        d_model: int,
        dropout_prob: float = 0.1,
        bias: bool = True,
        *,
        soft_cap: float = 50.0,
    ) -> None:
        check_soft_cap(soft_cap)
        super().__init__(heads, d_model, dropout_prob, bias)
        self.soft_cap = soft_cap

    def get_scores(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
    ) -> Tensor:
        r"""The dot products of the core, capped.

        >>> mha = SoftCapAttention(heads=1, d_model=1, soft_cap=2.0)
        >>> query = torch.tensor([0.1, 1.0, 100.0]).view(3, 1, 1, 1)
        >>> mha.get_scores(query, torch.ones(1, 1, 1, 1)).flatten()
        tensor([0.0999, 0.9242, 2.0000])
        """
        scores = super().get_scores(query, key)  # [q_len, k_len, batch_size, heads]

        # The change: $S' = c \tanh(S / c)$. The range of float16 is too small for it:
        # the quotient by a large cap underflows, a gradient times the cap overflows.
        dtype = torch.float32 if scores.dtype == torch.float16 else scores.dtype
        capped = self.soft_cap * torch.tanh(scores.to(dtype) / self.soft_cap)
        return capped.to(scores.dtype)  # [q_len, k_len, batch_size, heads]


# region Input checks


def check_soft_cap(soft_cap: float) -> None:
    """Refuse what bounds nothing."""
    is_number = type(soft_cap) in (int, float) and math.isfinite(soft_cap)
    if not is_number or soft_cap <= 0:
        raise ValueError(
            f"`soft_cap` (={soft_cap!r}) must be a finite number above 0; for scores "
            f"without a cap, use `MultiHeadAttention`"
        )


# endregion
