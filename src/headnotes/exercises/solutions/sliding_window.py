r"""# Solution: sliding-window attention

This is a solution of the exercise [sliding-window
attention](../../../exercises/18_sliding_window.py), with the inputs that its check uses
and the mistakes that the check recognizes.

Source: [Longformer](https://arxiv.org/abs/2004.05150), Beltagy et al. 2020, section
3.1; [Mistral 7B](https://arxiv.org/abs/2310.06825), Jiang et al. 2023, section 2, for
causal windows.
"""

import math

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, numbers
from headnotes.exercises.loops import attention


def sliding_window_attention(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_k]
    window: int,
) -> Tensor:
    r"""The context over the last `window` keys, `[q_len, batch_size, heads, d_k]`.

    With equal keys, it is the mean of the values in the window:

    >>> query, key = torch.zeros(8, 2, 7, 11).split([3, 5])
    >>> value = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 2, 7, 11)
    >>> context = sliding_window_attention(query, key, value, window=2)
    >>> context[:, 0, 0, 0]
    tensor([1.5000, 2.5000, 3.5000])
    """
    # The query's own key has the distance 0: a window of `window` keys ends before the
    # distance `window`.
    distance = distances(len(query), len(key))  # [q_len, k_len]
    mask = (distance >= 0) & (distance < window)  # [q_len, k_len]
    return masked_attention(query, key, value, mask)  # [q_len, batch_size, heads, d_k]


def distances(q_len: int, k_len: int) -> Tensor:
    """How far each key lies before each query; the last of both are aligned."""
    q_position = torch.arange(k_len - q_len, k_len)  # [q_len]
    return q_position[:, None] - torch.arange(k_len)  # [q_len, k_len]


def masked_attention(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_k]
    mask: Tensor,  # [q_len, k_len]
) -> Tensor:
    """Scaled dot-product attention; the mask is True where a query may attend."""
    q = query / math.sqrt(query.shape[-1])  # [q_len, batch_size, heads, d_k]
    scores = torch.einsum("ibhd,jbhd->ijbh", q, key)  # [q_len, k_len, ..., heads]
    scores = scores.masked_fill(~mask[..., None, None], -math.inf)  # [q_len, ...]
    weights = scores.softmax(dim=1)  # [q_len, k_len, batch_size, heads]
    context = torch.einsum("ijbh,jbhd->ibhd", weights, value)
    return context  # [q_len, batch_size, heads, d_k]


def reference(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """The same, one query and one key at a time."""
    past = len(key) - len(query)

    def bias(i: int, j: int) -> float:
        return 0.0 if i + past - window < j <= i + past else -math.inf

    return attention(query, key, value, bias)


# region Typical mistakes


def one_key_more(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """The window holds one key too many. The query's own key, at distance 0, is one of
    the `window` keys, so that the largest distance is `window - 1`.
    """
    return sliding_window_attention(query, key, value, window + 1)


def one_key_less(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """The window holds one key too few. With a window of 3, the distances are 0, 1 and
    2.
    """
    return sliding_window_attention(query, key, value, max(1, window - 1))


def both_sides(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """The window extends into the future as well. No query attends to a later key:
    the distance must be at least 0.
    """
    mask = distances(len(query), len(key)).abs() < window
    return masked_attention(query, key, value, mask)


def future_not_masked(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """The window has a far edge only: all later keys are visible. No query attends to a
    later key: the distance must be at least 0.
    """
    mask = distances(len(query), len(key)) < window
    return masked_attention(query, key, value, mask)


def causal_only(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """This is causal attention: keys before the window are not masked. The distance
    must be less than `window`.
    """
    return sliding_window_attention(query, key, value, len(key))


def top_left(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """The first query is aligned with the first key. Align the last query with the last
    key: query `i` is at position `i + k_len - q_len`.
    """
    distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
    mask = (distance >= 0) & (distance < window)
    return masked_attention(query, key, value, mask)


def unscaled(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """The scores are not scaled: divide them by the square root of `d_k`."""
    query = query * math.sqrt(query.shape[-1])
    return sliding_window_attention(query, key, value, window)


def masked_with_zeros(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Masked scores are set to zero, and a score of 0 has a weight of $e^0 = 1$ before
    the division. Set them to minus infinity.
    """
    distance = distances(len(query), len(key))
    mask = ((distance >= 0) & (distance < window))[..., None, None]
    q = query / math.sqrt(query.shape[-1])
    weights = (torch.einsum("ibhd,jbhd->ijbh", q, key) * mask).softmax(dim=1)
    return torch.einsum("ijbh,jbhd->ibhd", weights, value)


# endregion


def inputs(
    q_len: int, k_len: int, *shape: int, window: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Query, key and value of these lengths, and a window."""
    key, value = (numbers(k_len, *shape, seed=n) for n in (1, 2))
    return numbers(q_len, *shape), key, value, window


EXERCISE = Exercise(
    series="Make it modern",
    solution=sliding_window_attention,
    reference=reference,
    inputs=[
        inputs(1, 1, 1, 1, 1, window=1),
        inputs(2, 2, 1, 1, 1, window=1),
        inputs(1, 3, 1, 1, 1, window=2),
        inputs(3, 3, 1, 1, 2, window=2),
        inputs(2, 3, 1, 1, 2, window=5),
        inputs(7, 11, 2, 3, 5, window=4),
    ],
    mistakes=[
        one_key_more,
        one_key_less,
        both_sides,
        future_not_masked,
        causal_only,
        top_left,
        masked_with_zeros,
        unscaled,
    ],
)
