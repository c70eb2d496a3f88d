r"""# Solution: cross-attention

This is a solution of the exercise
[cross-attention](../../../exercises/07_cross_attention.py), with the inputs that its
check uses and the mistakes that the check recognizes.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.3: "the queries come from the previous decoder layer, and the memory
keys and values come from the output of the encoder".
"""

import math

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, numbers


def cross_attention(
    x: Tensor,  # [q_len, d_model]
    memory: Tensor,  # [k_len, d_model]
    w_query: Tensor,  # [d_model, d_k]
    w_key: Tensor,  # [d_model, d_k]
    w_value: Tensor,  # [d_model, d_v]
) -> Tensor:
    r"""Attend from each token of `x` to all tokens of `memory`.

    >>> x, memory = torch.randn(3, 5), torch.randn(7, 5)
    >>> weights = torch.randn(5, 2), torch.randn(5, 2), torch.randn(5, 11)
    >>> cross_attention(x, memory, *weights).shape
    torch.Size([3, 11])
    """
    # The queries come from one sequence, keys and values from the other. So there is
    # one context vector for each token of `x`, whatever the length of `memory`.
    query = x @ w_query  # [q_len, d_k]
    key = memory @ w_key  # [k_len, d_k]
    value = memory @ w_value  # [k_len, d_v]
    scores = query @ key.T / math.sqrt(query.shape[-1])  # [q_len, k_len]
    return scores.softmax(dim=-1) @ value  # [q_len, d_v]


def reference(
    x: Tensor, memory: Tensor, w_query: Tensor, w_key: Tensor, w_value: Tensor
) -> Tensor:
    """The same, one query at a time, in float64."""
    rows = []
    keys, values = memory.double() @ w_key.double(), memory.double() @ w_value.double()
    for token in x.double():
        scores = [float(token @ w_query.double() @ key) for key in keys]
        scores = [score / math.sqrt(w_query.shape[1]) for score in scores]
        exponentials = [math.exp(score) for score in scores]
        weights = [each / sum(exponentials) for each in exponentials]
        rows.append(sum(w * v for w, v in zip(weights, values, strict=True)))
    return torch.stack(rows).float()


# region Typical mistakes


def self_attention(
    x: Tensor, memory: Tensor, w_query: Tensor, w_key: Tensor, w_value: Tensor
) -> Tensor:
    """This is self-attention: `memory` is not used. Compute keys and values from
    `memory`.
    """
    return cross_attention(x, x, w_query, w_key, w_value)


def swapped(
    x: Tensor, memory: Tensor, w_query: Tensor, w_key: Tensor, w_value: Tensor
) -> Tensor:
    """The sequences are swapped: the queries come from `x`, and keys and values from
    `memory`.
    """
    return cross_attention(memory, x, w_query, w_key, w_value)


def values_of_x(
    x: Tensor, memory: Tensor, w_query: Tensor, w_key: Tensor, w_value: Tensor
) -> Tensor:
    """The values come from `x`: a context vector is a weighted mean of values of
    `memory`.
    """
    scores = x @ w_query @ (memory @ w_key).T / math.sqrt(w_query.shape[1])
    return scores.softmax(dim=-1) @ x @ w_value


def not_scaled(
    x: Tensor, memory: Tensor, w_query: Tensor, w_key: Tensor, w_value: Tensor
) -> Tensor:
    """The scale is missing: divide the scores by the square root of `d_k`."""
    scale = math.sqrt(w_query.shape[1])
    return cross_attention(x, memory, w_query * scale, w_key, w_value)


def scaled_by_model(
    x: Tensor, memory: Tensor, w_query: Tensor, w_key: Tensor, w_value: Tensor
) -> Tensor:
    """The scores are divided by the square root of `d_model`. Divide by the square root
    of `d_k`, the number of components of a query.
    """
    scale = math.sqrt(w_query.shape[1] / w_query.shape[0])
    return cross_attention(x, memory, w_query * scale, w_key, w_value)


def over_queries(
    x: Tensor, memory: Tensor, w_query: Tensor, w_key: Tensor, w_value: Tensor
) -> Tensor:
    """The softmax is over the queries. The weights of one query, over all keys, must
    sum to 1.
    """
    scores = x @ w_query @ (memory @ w_key).T / math.sqrt(w_query.shape[1])
    return scores.softmax(dim=0) @ memory @ w_value


# endregion


def inputs(
    q_len: int, k_len: int, d_model: int, d_k: int, d_v: int
) -> tuple[Tensor, ...]:
    """The inputs of these sizes."""
    weights = [numbers(d_model, d, seed=s) for s, d in ((3, d_k), (4, d_k), (5, d_v))]
    return numbers(q_len, d_model, seed=1), numbers(k_len, d_model, seed=2), *weights


EXERCISE = Exercise(
    series="Write it",
    solution=cross_attention,
    reference=reference,
    inputs=[inputs(1, 1, 2, 1, 2), inputs(1, 2, 2, 3, 2), inputs(5, 3, 2, 7, 11)],
    mistakes=[
        self_attention,
        swapped,
        values_of_x,
        not_scaled,
        scaled_by_model,
        over_queries,
    ],
)
