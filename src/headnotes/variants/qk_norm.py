r"""# Query-key normalization

This module is the core with a normalization of queries and keys between projection and
dot product. ViT-22B, OLMo 2, Qwen 3 and Gemma 3 use it, each in its own form. It is for
readers who know the [core](../mha.md); only the projections to queries and keys change.

Scores are products of queries and keys, so they grow with the length of both, and large
scores make training unstable. Normalized, a query has the same length at every
position, up to a learned factor for each component:

$$S = \frac{\operatorname{norm}(Q)\, \operatorname{norm}(K)^\top}{\sqrt{d_k}}$$

$$\operatorname{RMSNorm}(x)_d =
  \frac{g_d\, x_d}{\sqrt{\frac{1}{n} \sum_c x_c^2 + \varepsilon}}$$

| model | `norm` | `over` | parameters |
|---|---|---|---|
| ViT-22B | `"layer"`, without bias | `"head"` | $2\, d_k$ |
| OLMo 2 | `"rms"` | `"all"` heads at once, before the split | $2\, d_\text{model}$ |
| Qwen 3, the default | `"rms"` | `"head"`; all heads share the factors | $2\, d_k$ |

The scale $1 / \sqrt{d_k}$ stays in all of them. With RMS norm over a head and factors
of 1, a query and a key have length $\sqrt{d_k}$, so no score exceeds $\sqrt{d_k}$.

**At full speed** it is the argument `project` of
[`fast.MultiHeadAttention`](../fast/module.md), which builds the projections of queries
and keys. With the same weights, the outputs are equal:

```python
from functools import partial

from headnotes import fast
from headnotes.variants.qk_norm import NormalizedProjection

project = partial(NormalizedProjection, norm="layer", over="all")
quick = fast.MultiHeadAttention(heads=3, d_model=42, project=project)
```

**Reduces to** nothing: no setting turns a norm off. Instead, a factor on the weight of
a projection changes no output.

**Laws.** Of the laws that the core passes, all but `large_scores` apply: the scores do
not grow with the inputs.

Source: [Scaling Vision Transformers to 22 Billion
Parameters](https://arxiv.org/abs/2302.05442), Dehghani et al. 2023, section 2.1; [2
OLMo 2 Furious](https://arxiv.org/abs/2501.00656), OLMo Team 2024, section 3.2; [Qwen3
Technical Report](https://arxiv.org/abs/2505.09388), Qwen Team 2025, section 2;
[Query-Key Normalization for Transformers](https://arxiv.org/abs/2010.04245), Henry et
al. 2020.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from headnotes.mha import MultiHeadAttention, PrepareForMultiHeadAttention

# In half precision, both compute in float32. Layer norm has no bias in ViT-22B.
NORMS: dict[str, Any] = {
    "rms": torch.nn.RMSNorm,
    "layer": partial(torch.nn.LayerNorm, bias=False),
}


class NormalizedProjection(PrepareForMultiHeadAttention):
    r"""A projection whose result is normalized, for each head or over all heads.

    Raises `ValueError` for a `norm` or an `over` of another name. Source: Dehghani et
    al. 2023, section 2.1; OLMo Team 2024, section 3.2.

    The mean square of each head is 1, whatever the size of the input:

    >>> split = NormalizedProjection(10, 5, 2, bias=True)
    >>> x = split(1000 * torch.randn(7, 3, 10))
    >>> x.square().mean(dim=-1).allclose(torch.ones(7, 3, 5))
    True
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_k: int,
        bias: bool,
        *,
        norm: str = "rms",
        over: str = "head",
        eps: float = 1e-6,
    ) -> None:
        check_norm(norm, over, eps)
        super().__init__(d_model, heads, d_k, bias)
        self.over = over
        width = d_k if over == "head" else heads * d_k
        self.norm = NORMS[norm](width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        r"""Project and split `x` as the core does, and normalize."""
        split = super().forward(x)  # [..., heads, d_k]

        # The change: one more line, for the last axis, or for the last two as one.
        axes = -1 if self.over == "head" else -2
        normalized: Tensor = self.norm(split.flatten(axes))
        return normalized.view_as(split)  # [..., heads, d_k]


class QKNormAttention(MultiHeadAttention):
    r"""Multi-head attention whose queries and keys are normalized.

    `norm` is `"rms"` or `"layer"`; `over` is `"head"`, for each head by itself, or
    `"all"`. The other arguments, masks and errors are those of the core, and so are the
    parameters, but for `query.norm.weight` and `key.norm.weight`.

    Raises `ValueError` for a `norm` or an `over` of another name, or an `eps` that is
    not above 0. Source: Qwen Team 2025, section 2.

    No score exceeds $\sqrt{d_k}$, so no weight exceeds that of two opposite keys:

    >>> mha = QKNormAttention(heads=2, d_model=8)
    >>> x = 1000 * torch.randn(2, 1, 8)
    >>> _ = mha(query=x, key=x, value=x)
    >>> bool((mha.attn <= torch.tensor([2.0, -2.0]).softmax(dim=0)[0]).all())
    True
    """

    def __init__(
        self,
        heads: int,
        d_model: int,
        dropout_prob: float = 0.1,
        bias: bool = True,
        *,
        norm: str = "rms",
        over: str = "head",
        eps: float = 1e-6,
    ) -> None:
        super().__init__(heads, d_model, dropout_prob, bias)
        # The query is scaled after its norm: before it, the scale would cancel. Query
        # and key have factors of their own.
        project = partial(NormalizedProjection, norm=norm, over=over, eps=eps)
        self.query = project(d_model, heads, self.d_k, bias=bias)
        self.key = project(d_model, heads, self.d_k, bias=bias)


# region Input checks


def check_norm(norm: str, over: str, eps: float) -> None:
    """Refuse a norm that does not exist, or one that divides by zero."""
    options = {"norm": (norm, [*NORMS]), "over": (over, ["head", "all"])}
    for name, (value, known) in options.items():
        if not isinstance(value, str) or value not in known:
            way_out = " or ".join(f'"{each}"' for each in known)
            raise ValueError(f"`{name}` (={value!r}) must be {way_out}")
    if type(eps) not in (int, float) or not 0 < eps < 1:
        raise ValueError(f"`eps` (={eps!r}) must lie between 0 and 1; 1e-6 is usual")


# endregion
