r"""# Components: rotary positions, scores, widths

These small objects turn [fast attention](module.md) into that of a current decoder.
Each is an argument of the constructor of `MultiHeadAttention`, and each default is the
attention of 2017:

| argument | default | what it changes | used by |
|---|---|---|---|
| `kv_heads` | `heads` | heads of keys and values, each for a group | Llama 3 |
| `widths` | `d_model / heads` | the widths of a head, and of the inputs | Qwen 3 |
| `project` | a linear layer | queries and keys, such as their norm | Qwen 3, OLMo 2 |
| `rotary` | none | queries and keys, by their positions | Llama, Mistral |
| `window` | none | which keys a query may attend to | Mistral, Gemma |
| `scores` | $1 / \sqrt{d_k}$ | how scores become weights | Gemma 2, gpt-oss |

A score of query $i$ and key $j$ is computed in this order, where $R$ is the rotation,
$c$ the cap, $b_{ij}$ the bias and $s$ the sink:

$$S_{ij} = c \tanh\left(\frac{\texttt{scale} \cdot R_i q_i \cdot R_j k_j}{c}\right)
  + b_{ij} \qquad
  A_{ij} = \frac{e^{S_{ij}}}{e^s + \sum_l e^{S_{il}}}$$

Source: the pages of the single ideas, [Variants](../variants/rotary.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headnotes.checks import check_sizes
from headnotes.variants.rotary import (
    FLOAT64,
    check_factor,
    check_frequencies,
    check_pairing,
    rotary_angles,
    rotate,
)


@dataclass(frozen=True)
class Widths:
    r"""The widths that differ from the defaults.

    `d_k` is the width of a head, of queries and keys, `d_model / heads` by default, and
    `d_v` that of its values, `d_k` by default. `key` and `value` are the widths of the
    inputs of that name, `d_model` by default.

    Raises `ValueError` for a width below 1.

    >>> Widths(d_k=128)
    Widths(d_k=128, d_v=None, key=None, value=None)
    """

    d_k: int | None = None
    d_v: int | None = None
    key: int | None = None
    value: int | None = None

    def __post_init__(self) -> None:
        given = {name: width for name, width in vars(self).items() if width is not None}
        check_sizes(**given)


class Rotary:
    r"""Rotary positions: rotates each pair of components by an angle.

    `frequencies` are the angles per position, one for each pair, as
    `rotary_frequencies` and the functions for scaling return them; fewer than `d_k / 2`
    rotate a part of a head. The other arguments are those of `rotate`. Angles are
    float64, whatever the dtype of the module.

    Any function of `x`, `[seq_len, batch_size, heads, d_k]`, and its positions,
    `[seq_len]`, can take its place. Raises what `RotaryAttention` raises.
    Source: [RoFormer](https://arxiv.org/abs/2104.09864), Su et al. 2021, section 3.2.

    >>> rotary = Rotary(torch.tensor([1.0, 0.1]).double())
    >>> x, positions = torch.randn(5, 1, 7, 4), torch.arange(5)
    >>> scores = (rotary(x[:1], positions[:1]) * rotary(x[1:2], positions[3:4])).sum()
    >>> later = (rotary(x[:1], positions[1:2]) * rotary(x[1:2], positions[4:])).sum()
    >>> torch.allclose(scores, later, atol=1e-6)
    True
    """

    def __init__(
        self,
        frequencies: Tensor,
        *,
        pairing: str = "halves",
        attention_factor: float = 1.0,
    ) -> None:
        check_frequencies(frequencies)
        check_pairing(pairing)
        check_factor("attention_factor", attention_factor, 0)
        # Numbers of Python, which no change of the module's dtype can round.
        self.frequencies: tuple[float, ...] = tuple(frequencies.tolist())
        self.pairing = pairing
        self.attention_factor = attention_factor

    def __call__(
        self,
        x: Tensor,  # [seq_len, ...]
        positions: Tensor,  # [seq_len]
    ) -> Tensor:
        frequencies = torch.tensor(self.frequencies, **FLOAT64)  # [pairs]
        angles = rotary_angles(positions.unsqueeze(1), frequencies)  # [..., pairs]
        return rotate(
            x, angles, pairing=self.pairing, attention_factor=self.attention_factor
        )


@dataclass(frozen=True)
class Scores:
    r"""How dot products become scores, and scores become weights.

    - `scale`: the factor of the dot products, $1 / \sqrt{d_k}$ by default.
    - `soft_cap`: scores are bounded by $c \tanh(S / c)$.
    - `bias`: a function, or a module with parameters of its own, of the positions of
      queries, `[q_len]`, and keys, `[k_len]`. It returns what is added to the scores,
      `[q_len, k_len, heads or 1]`, after the cap. The values must be finite; use a mask
      to hide keys. All of it is in memory, unlike the scores.
    - `sinks`: with True, the module has a parameter `sinks`, `[heads]`: logits that
      take part in the softmax and have no value. They begin at 0.

    Raises `ValueError` for a number out of range, `TypeError` for a bias that cannot be
    called. Source: [Gemma 2](https://arxiv.org/abs/2408.00118), section 2, for the cap;
    [gpt-oss](https://arxiv.org/abs/2508.10925), section 2.2, for the sinks;
    [ALiBi](https://arxiv.org/abs/2108.12409), Press et al. 2022, section 3, for a bias.

    A bias as in ALiBi, with a slope for each of two heads:

    >>> slopes = torch.tensor([0.5, 0.25])
    >>> def alibi(i, j):
    ...     return slopes * (j - i.unsqueeze(1)).unsqueeze(-1)
    >>> scores = Scores(bias=alibi)
    >>> scores.bias(torch.tensor([2]), torch.arange(3))[..., 0]
    tensor([[-1.0000, -0.5000,  0.0000]])
    """

    scale: float | None = None
    soft_cap: float | None = None
    bias: Callable[[Tensor, Tensor], Tensor] | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        for name in ("scale", "soft_cap"):
            number = getattr(self, name)
            if number is None:
                continue
            if type(number) not in (int, float) or not 0 < number < math.inf:
                raise ValueError(
                    f"`{name}` (={number!r}) must be a finite number above 0, or None"
                )
        if self.bias is not None and not callable(self.bias):
            raise TypeError(
                f"`bias` is a {type(self.bias).__name__}, not a function of the "
                f"positions of queries and keys"
            )
        if type(self.sinks) is not bool:
            raise ValueError(
                f"`sinks` (={self.sinks!r}) must be True or False; their values are "
                f"the parameter `sinks` of the module"
            )


def check_bias(bias: Tensor, q_len: int, k_len: int, heads: int) -> Tensor:
    """Refuse a bias of another shape; give it an axis that all batch items share.

    >>> check_bias(torch.zeros(3, 5, 2), 3, 5, 2).shape
    torch.Size([3, 5, 1, 2])
    """
    if (
        bias.dim() != 3
        or bias.shape[:2] != (q_len, k_len)
        or bias.shape[2]
        not in (
            1,
            heads,
        )
    ):
        raise ValueError(
            f"`scores.bias` returns shape {list(bias.shape)}, not [q_len (={q_len}), "
            f"k_len (={k_len}), heads (={heads}) or 1]"
        )
    return bias.unsqueeze(2)  # [q_len, k_len, 1, heads]
