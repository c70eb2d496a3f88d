r"""# ALiBi: attention with linear biases

ALiBi replaces the positional encoding: a number that grows with the distance between
query and key is subtracted from each score. Each head has a fixed slope $m_h$, so some
heads see only the nearest tokens, and others see far. Nothing is added to the
embeddings, and nothing is learned.

One step of the [core](../mha.md#MultiHeadAttention.get_scores) changes, the scores:

$$S_{ijbh} = \frac{q_{ibh} \cdot k_{jbh}}{\sqrt{d_k}} - m_h\, |i - j|$$

BLOOM, MPT and BloombergGPT use it. A model that was trained on short texts works on
somewhat longer ones: the bias of a large distance continues that of the small ones.

The paper has causal attention only, where $j \le i$. Its code adds $m_h\, j$ to the
scores of a row instead, which differs by a constant of the row, and softmax cancels
that. Here the bias is symmetric, so that it is also of use without a causal mask; and
it is 0 for the token itself, so that it stays exact near the query in half precision.

**At full speed** it is the `bias` of [`Scores`](../fast/components.md#Scores), an
argument of [`fast.MultiHeadAttention`](../fast/module.md). With the same weights, the
outputs are equal:

```python
from headnotes import fast
from headnotes.variants.alibi import alibi_slopes

def bias(i, j):
    return -alibi_slopes(3) * (i.unsqueeze(1) - j).abs().unsqueeze(-1)

quick = fast.MultiHeadAttention(heads=3, d_model=42, scores=fast.Scores(bias=bias))
```

**Reduces to** the core where the slopes are zero.

**Laws.** The laws
[`linear_bias`](../attention_laws/positions.md#linear_bias) and `relative_positions` are
made for it. Of the laws that the core passes, all but `key_permutation`,
`query_permutation` and `longer_padding` apply: the order of tokens matters, and keys
that are appended behind the last query here move the queries along.

Source: [Train Short, Test Long](https://arxiv.org/abs/2108.12409), Press et al. 2021,
section 3; slopes for any number of heads from its [code](https://github.com/ofirpress/attention_with_linear_biases).
"""

import math
from typing import Any

import torch
from torch import Tensor

from headnotes.checks import check_sizes, check_tensor
from headnotes.mha import MultiHeadAttention

# Slopes are computed here, whatever the default device and dtype.
FLOAT64: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}


class AlibiAttention(MultiHeadAttention):
    r"""Multi-head attention with linear biases, and the parameters of the core.

    `slopes` are the `[heads]` slopes, those of `alibi_slopes` by default. The last
    query is at the position of the last key, as in decoding.

    Raises what the core raises, and `ValueError` for slopes that do not fit.
    Source: Press et al. 2021, section 3.

    If all tokens are equal, only the distance matters. Of two heads, the first has a
    slope of 1/16:

    >>> mha = AlibiAttention(heads=2, d_model=6)
    >>> x = torch.ones(3, 1, 6)
    >>> _ = mha(query=x, key=x, value=x)
    >>> mha.attn[2, :, 0, 0].log().diff()
    tensor([0.0625, 0.0625])
    """

    def __init__(
        self,
        heads: int,
        d_model: int,
        dropout_prob: float = 0.1,
        bias: bool = True,
        *,
        slopes: Tensor | None = None,
    ) -> None:
        super().__init__(heads, d_model, dropout_prob, bias)
        slopes = alibi_slopes(heads) if slopes is None else slopes  # [heads]
        check_slopes(slopes, heads)
        # Numbers of Python, not a buffer: a buffer would be rounded by `.half()`.
        self.slopes: tuple[float, ...] = tuple(slopes.tolist())

    def get_scores(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
    ) -> Tensor:
        r"""The dot product of each query with each key, less the bias.

        $$S_{ijbh} = \sum_d Q_{ibhd}\, K_{jbhd} - m_h\, |i - j|$$

        >>> mha = AlibiAttention(heads=5, d_model=10)
        >>> query = torch.randn(3, 2, 5, 2)
        >>> mha.get_scores(query, torch.randn(7, 2, 5, 2)).shape
        torch.Size([3, 7, 2, 5])
        """
        scores = super().get_scores(query, key)  # [q_len, k_len, batch_size, heads]
        q_len, k_len = scores.shape[:2]
        i = torch.arange(k_len - q_len, k_len, device=scores.device)  # [q_len]
        j = torch.arange(k_len, device=scores.device)  # [k_len]
        distance = (i.unsqueeze(1) - j).abs()  # [q_len, k_len]
        # The product is rounded once: float16 ends at 65,504, and bfloat16 has no
        # distance 257.
        wide = torch.promote_types(scores.dtype, torch.float32)
        slopes = torch.tensor(self.slopes, dtype=wide, device=scores.device)  # [heads]
        bias = distance[..., None, None] * slopes  # [q_len, k_len, 1, heads]
        return scores - bias.to(scores.dtype)  # [q_len, k_len, batch_size, heads]


def alibi_slopes(heads: int) -> Tensor:
    r"""The slopes of all heads, `[heads]`, in float64.

    For $n$ heads, a power of two, they are the geometric series that begins with
    $2^{-8/n}$ and ends with $2^{-8}$. For another number they are those of the next
    smaller power $n$, followed by every other one of $2n$ heads, from the first. (The
    common bug is a series with $2^{-8/12}$ for 12 heads: no checkpoint has those.)

    Raises `ValueError` for a number of heads below 1.
    Source: Press et al. 2021, section 3, and `get_slopes` in its code.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039], dtype=torch.float64)
    >>> alibi_slopes(6)[4:]
    tensor([0.5000, 0.1250], dtype=torch.float64)
    """
    check_sizes(heads=heads)
    power = 2 ** math.floor(math.log2(heads))
    order = torch.arange(heads, **FLOAT64)  # [heads]
    first = 8 * (order + 1) / power  # [heads]
    others = 4 * (2 * (order - power) + 1) / power  # [heads]
    exponents = torch.where(order < power, first, others)  # [heads]
    return 2**-exponents  # [heads]


# region Input checks


def check_slopes(slopes: Tensor, heads: int) -> None:
    """Refuse what is not one number for each head."""
    check_tensor("slopes", slopes)
    if slopes.is_complex() or slopes.dtype == torch.bool:
        raise TypeError(f"`slopes` is {slopes.dtype}, not a tensor of real numbers")
    if slopes.is_meta or tuple(slopes.shape) != (heads,):
        raise ValueError(
            f"`slopes` has shape {list(slopes.shape)} on {slopes.device}, not [heads "
            f"(={heads})] with values; `alibi_slopes({heads})` would do"
        )


# endregion
