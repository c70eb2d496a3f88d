r"""# Differential attention

This module is the core with two softmaxes in each head, of which one is subtracted from
the other, as in the Differential Transformer. It is for readers who know the
[core](../mha.md); scores, weights and context change by a line each.

A softmax gives some weight to every key, also to irrelevant ones. In the difference of
two softmaxes, what they have in common cancels, as noise does in a differential
amplifier. Each query and each key is cut into two halves of width $d_k / 2$, and both
pairs of halves have a softmax of their own:

$$A = \operatorname{softmax}\left(\frac{Q_1 K_1^\top}{\sqrt{d_k / 2}}\right)
  - \lambda \operatorname{softmax}\left(\frac{Q_2 K_2^\top}{\sqrt{d_k / 2}}\right)$$

The factor $\lambda$ is learned, one number for all heads of a layer. Each head is then
normalized by itself:

$$\lambda = e^{\lambda_{q1} \cdot \lambda_{k1}} - e^{\lambda_{q2} \cdot \lambda_{k2}}
  + \lambda_\text{init}$$

$$C_{ibh} = (1 - \lambda_\text{init})
  \operatorname{RMSNorm}\left(\sum_j A_{ijbh} V_{jbh}\right)$$

`heads` counts pairs of softmaxes, so it is half of what a core of the same widths would
have: the paper has $d_\text{model} / 2d$ heads, with $d$ the width of a half.

**Reduces to** the core for $\lambda = 0$ and without the norm, in heads whose query and
key are half as wide as their value.

**Laws.** Of the laws that the core passes, all but `formula`, `weights_axes`,
`weights_match_output`, `score_independence` and `linear_in_value` apply: the weights
are not stored and may be negative, and the norm is not linear. `rows_sum_to_one`
passes, as values that are all equal give equal contexts: a row sums to $1 - \lambda$.

Source: [Differential Transformer](https://arxiv.org/abs/2410.05258), Ye et al. 2024,
section 2.1. The order of the halves in the weights, and the norm with learned factors,
are those of the authors' code. (DiffLlama in `transformers` has all first halves before
all second halves, and no factors in the norm.)
"""

import math

import torch
from torch import Tensor, nn

from headnotes.mha import MultiHeadAttention


class DifferentialAttention(MultiHeadAttention):
    r"""Multi-head attention with the difference of two softmaxes in each head.

    `lambda_init` is $\lambda$ at initialization, roughly; `initial_lambda` gives that
    of the paper for each layer. The other arguments, masks and errors are those of the
    core, and so are the parameters, but for `lambda_q1`, `lambda_k1`, `lambda_q2`,
    `lambda_k2`, `[d_k / 2]`, and `norm.weight`, `[d_k]`.

    Raises `ValueError` where `d_model / heads` is odd, or `lambda_init` is not between
    0 and 1. Source: Ye et al. 2024, section 2.1.

    A row of weights sums to $1 - \lambda$:

    >>> mha = DifferentialAttention(heads=2, d_model=12)
    >>> x, y = torch.randn(8, 1, 12).split([3, 5])
    >>> _ = mha(query=x, key=y, value=y)
    >>> total = 1 - mha.get_lambda().expand(3, 1, 2)
    >>> mha.attn.sum(dim=1).allclose(total, atol=1e-6)
    True
    """

    def __init__(
        self,
        heads: int,
        d_model: int,
        dropout_prob: float = 0.1,
        bias: bool = True,
        *,
        lambda_init: float = 0.8,
    ) -> None:
        super().__init__(heads, d_model, dropout_prob, bias)
        check_lambda(self.d_k, lambda_init)
        # A half is narrower than a head, so its products have a smaller variance.
        half = self.d_k // 2
        self.scale = 1 / math.sqrt(half)

        # Exponentials of dot products instead of one number for each softmax: they
        # begin near 1, and move as fast as the other parameters.
        self.lambda_init = lambda_init
        self.lambda_q1 = nn.Parameter(0.1 * torch.randn(half))  # [half]
        self.lambda_k1 = nn.Parameter(0.1 * torch.randn(half))  # [half]
        self.lambda_q2 = nn.Parameter(0.1 * torch.randn(half))  # [half]
        self.lambda_k2 = nn.Parameter(0.1 * torch.randn(half))  # [half]
        self.norm = nn.RMSNorm(self.d_k, eps=1e-5)

    def get_lambda(self) -> Tensor:
        r"""The factor of the second softmax, in float32 or better.

        >>> mha = DifferentialAttention(heads=2, d_model=8, lambda_init=0.2)
        >>> _ = torch.nn.init.zeros_(mha.lambda_q1)
        >>> _ = torch.nn.init.zeros_(mha.lambda_q2)
        >>> mha.get_lambda()
        tensor(0.2000, grad_fn=<AddBackward0>)
        """
        wide = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        q1, k1 = self.lambda_q1.to(wide), self.lambda_k1.to(wide)  # [half]
        q2, k2 = self.lambda_q2.to(wide), self.lambda_k2.to(wide)  # [half]
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init

    def get_scores(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
    ) -> Tensor:
        r"""The scores of the first halves in all heads, then of the second halves.

        >>> mha = DifferentialAttention(heads=5, d_model=20)
        >>> query = torch.randn(3, 2, 5, 4)
        >>> mha.get_scores(query, torch.randn(7, 2, 5, 4)).shape
        torch.Size([3, 7, 2, 10])
        """
        q1, q2 = query.chunk(2, dim=-1)  # [..., heads, d_k // 2]
        k1, k2 = key.chunk(2, dim=-1)  # [..., heads, d_k // 2]
        first = super().get_scores(q1, k1)  # [q_len, k_len, batch_size, heads]
        second = super().get_scores(q2, k2)  # [q_len, k_len, batch_size, heads]
        return torch.cat([first, second], dim=-1)  # [..., batch_size, 2 * heads]

    def get_weights(
        self,
        scores: Tensor,  # [q_len, k_len, batch_size, 2 * heads]
        mask: Tensor | None,  # [q_len, k_len, batch_size, 1]
    ) -> Tensor:
        r"""The first softmax of each head minus $\lambda$ times the second.

        >>> mha = DifferentialAttention(heads=5, d_model=20)
        >>> mask = torch.ones(3, 7, 2, 1).bool()
        >>> mha.get_weights(torch.randn(3, 7, 2, 10), mask).shape
        torch.Size([3, 7, 2, 5])
        """
        both = super().get_weights(scores, mask)  # [q_len, k_len, ..., 2 * heads]
        first, second = both.chunk(2, dim=-1)  # [q_len, k_len, batch_size, heads]

        # The change: $A_1 - \lambda A_2$.
        factor = self.get_lambda().to(both.dtype)
        return first - factor * second  # [q_len, k_len, batch_size, heads]

    def apply_weights(
        self,
        attn: Tensor,  # [q_len, k_len, batch_size, heads]
        value: Tensor,  # [k_len, batch_size, heads, d_k]
    ) -> Tensor:
        r"""The weighted sum of the values, normalized in each head.

        >>> mha = DifferentialAttention(heads=5, d_model=20, lambda_init=0.2)
        >>> attn = torch.rand(3, 7, 2, 5)
        >>> context = mha.apply_weights(attn, torch.randn(7, 2, 5, 4))
        >>> context.square().mean(dim=-1).sqrt().allclose(
        ...     torch.full((3, 2, 5), 0.8), atol=1e-3
        ... )
        True
        """
        context = super().apply_weights(attn, value)  # [q_len, batch_size, heads, d_k]

        # The change:
        # $C = (1 - \lambda_\text{init}) \operatorname{RMSNorm}(A V)$.
        # Small differences of weights give small contexts, and heads differ in it. The
        # norm makes all heads alike; the constant factor keeps the size of the gradient
        # near that of the core, so that its learning rates can be used.
        normalized: Tensor = self.norm(context)  # [q_len, batch_size, heads, d_k]
        return normalized * (1 - self.lambda_init)  # [q_len, batch_size, heads, d_k]


def initial_lambda(depth: int) -> float:
    r"""The `lambda_init` of a layer: $0.8 - 0.6\, e^{-0.3\, \text{depth}}$.

    `depth` is the number of layers below, so the first layer has 0. (The paper counts
    layers from 1, and writes $l - 1$.) Raises `ValueError` for a negative or fractional
    `depth`. Source: Ye et al. 2024, section 2.1.

    >>> [round(initial_lambda(depth), 3) for depth in (0, 1, 10, 30)]
    [0.2, 0.356, 0.77, 0.8]
    """
    if type(depth) is not int or depth < 0:
        raise ValueError(f"`depth` (={depth!r}) must be an int from 0 up")
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


# region Input checks


def check_lambda(d_k: int, lambda_init: float) -> None:
    """Refuse a head without halves, and a factor that would turn the context around."""
    if d_k % 2:
        raise ValueError(
            f"`d_model / heads` (={d_k}) must be even, for two halves of each query; "
            f"halve or double `heads`"
        )
    if type(lambda_init) not in (int, float) or not 0 <= lambda_init < 1:
        raise ValueError(
            f"`lambda_init` (={lambda_init!r}) must lie between 0 and 1; "
            f"`initial_lambda(depth)` gives that of the paper"
        )


# endregion
