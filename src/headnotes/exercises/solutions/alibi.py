r"""# Solution: linear biases (ALiBi)

This is a solution of the exercise [linear biases
(ALiBi)](../../../exercises/17_alibi.py), with the inputs that its check uses and the
mistakes that the check recognizes.

Source: [Train Short, Test Long](https://arxiv.org/abs/2108.12409), Press et al. 2022,
section 3.
"""

import math

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise


def alibi_bias(heads: int, q_len: int, k_len: int) -> Tensor:
    r"""The bias of ALiBi with a causal mask, `[q_len, k_len, 1, heads]`.

    The first of eight heads, with slope 1/2:

    >>> alibi_bias(heads=8, q_len=2, k_len=3)[:, :, 0, 0]
    tensor([[-0.5000,  0.0000,    -inf],
            [-1.0000, -0.5000,  0.0000]])
    """
    # The last query is aligned with the last key.
    q_position = torch.arange(k_len - q_len, k_len)  # [q_len]
    distance = q_position[:, None] - torch.arange(k_len)  # [q_len, k_len]
    distance = distance[..., None, None]  # [q_len, k_len, 1, 1]

    # A geometric sequence, whose last slope is 1/256 for any number of heads.
    slope = 2 ** (-8 * torch.arange(1, heads + 1) / heads)  # [heads]
    bias = slope * -distance  # [q_len, k_len, 1, heads]
    return bias.masked_fill(distance < 0, -math.inf)  # [q_len, k_len, 1, heads]


def reference(heads: int, q_len: int, k_len: int) -> Tensor:
    """The same, one query, key and head at a time."""

    def bias(distance: int, head: int) -> float:
        return -math.inf if distance < 0 else 2 ** (-8 * head / heads) * -distance

    numbered = range(1, heads + 1)
    rows = [
        [[[bias(i + k_len - q_len - j, h) for h in numbered]] for j in range(k_len)]
        for i in range(q_len)
    ]
    return torch.tensor(rows)


# region Typical mistakes


def added(heads: int, q_len: int, k_len: int) -> Tensor:
    """The sign is wrong: far keys get a bonus instead of a penalty. The bias is
    negative, and zero for the query's own key.
    """
    bias = alibi_bias(heads, q_len, k_len)
    return torch.where(bias.isfinite(), bias.abs(), bias)


def future_visible(heads: int, q_len: int, k_len: int) -> Tensor:
    """Keys in the future are not masked. Where the distance is negative, the bias is
    minus infinity.
    """
    q_position = torch.arange(k_len - q_len, k_len)
    distance = q_position[:, None] - torch.arange(k_len)
    slope = 2 ** (-8 * torch.arange(1, heads + 1) / heads)
    return slope * -distance[..., None, None]


def future_penalized(heads: int, q_len: int, k_len: int) -> Tensor:
    """Keys in the future get the penalty of their distance, but are still visible. The
    bias is minus infinity there.
    """
    return -future_visible(heads, q_len, k_len).abs()


def top_left(heads: int, q_len: int, k_len: int) -> Tensor:
    """The first query is aligned with the first key. Align the last query with the last
    key: the position of query `i` is `i + k_len - q_len`.
    """
    longer = alibi_bias(heads, max(q_len, k_len), max(q_len, k_len))
    return longer[:q_len, :k_len]


def slopes_from_one(heads: int, q_len: int, k_len: int) -> Tensor:
    """Heads are counted from 0, so that the first slope is 1. Count them from 1."""
    return alibi_bias(heads, q_len, k_len) * 2 ** (8 / heads)


def slopes_of_eight_heads(heads: int, q_len: int, k_len: int) -> Tensor:
    r"""The slopes are $2^{-h}$, which is right for 8 heads only. Divide the exponent by
    the number of heads: $-8h$ / `heads`.
    """
    return alibi_bias(8, q_len, k_len).repeat(1, 1, 1, -(-heads // 8))[..., :heads]


def heads_first(heads: int, q_len: int, k_len: int) -> Tensor:
    """The values are right, but the heads are the first dimension. In the layout of the
    scores they are the last, after a dimension of size 1 for the batch.
    """
    return alibi_bias(heads, q_len, k_len).squeeze(2).permute(2, 0, 1)


# endregion

EXERCISE = Exercise(
    series="Make it modern",
    solution=alibi_bias,
    reference=reference,
    inputs=[(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 3), (8, 1, 5), (4, 3, 7)],
    mistakes=[
        added,
        future_visible,
        future_penalized,
        top_left,
        slopes_from_one,
        slopes_of_eight_heads,
        heads_first,
    ],
)
