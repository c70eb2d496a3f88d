r"""# Attention in loops

Attention over Python's numbers, one query at a time, without any tensor operation. It
gives the expected answers of exercises whose solutions are tensor code.

$$c_i = \frac{\sum_j e^{s_{ij}}\, v_j}{\sum_j e^{s_{ij}}},
  \qquad s_{ij} = \frac{q_i \cdot k_j}{\sqrt{d_k}} + b_{ij}$$

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.1.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Numbers = Sequence[float]


def attend(
    query: Numbers, keys: Sequence[Numbers], values: Sequence[Numbers], biases: Numbers
) -> list[float]:
    r"""The context of one query: the weighted mean of the values.

    >>> attend([0.0], [[1.0], [1.0]], [[2.0], [4.0]], [0.0, 0.0])
    [3.0]
    """
    scale = 1 / math.sqrt(len(query))
    scores = [
        scale * sum(x * y for x, y in zip(query, key, strict=True)) + bias
        for key, bias in zip(keys, biases, strict=True)
    ]
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    total = sum(weights)
    return [
        sum(w * x for w, x in zip(weights, column, strict=True)) / total
        for column in zip(*values, strict=True)
    ]


def attention(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, kv_heads, d_k]
    value: Tensor,  # [k_len, batch_size, kv_heads, d_v]
    bias: Callable[[int, int], float] = lambda i, j: 0.0,
) -> Tensor:
    r"""The context of all queries, `[q_len, batch_size, heads, d_v]`.

    `bias(i, j)` is added to the score of query `i` and key `j`; minus infinity hides
    the key. Consecutive query heads share one head of keys and values.

    >>> query, key = torch.zeros(3, 5, 4, 7), torch.zeros(8, 5, 2, 7)
    >>> value = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 5, 2, 11)
    >>> context = attention(query, key, value, causal(past=5))
    >>> context[:, 0, 0, 0]
    tensor([2.5000, 3.0000, 3.5000])
    """
    q_len, batch_size, heads, _ = query.shape
    group_size = heads // key.shape[2]

    def context(i: int, b: int, h: int) -> list[float]:
        keys, values = (x[:, b, h // group_size].tolist() for x in (key, value))
        biases = [bias(i, j) for j in range(len(keys))]
        return attend(query[i, b, h].tolist(), keys, values, biases)

    nested = [
        [[context(i, b, h) for h in range(heads)] for b in range(batch_size)]
        for i in range(q_len)
    ]
    return torch.tensor(nested)  # [q_len, batch_size, heads, d_v]


def causal(past: int) -> Callable[[int, int], float]:
    r"""The bias of a causal mask with `past` keys before that of the first query.

    >>> [causal(1)(0, j) for j in range(3)]
    [0.0, 0.0, -inf]
    """
    return lambda i, j: 0.0 if j <= i + past else -math.inf
