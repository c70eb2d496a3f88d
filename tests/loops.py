"""Variants of attention by loops over single positions, as `oracle.py` has the core.

It shares no code with any implementation, and no line of it is clever; the steps that a
variant changes are arguments. Vectors are float64 tensors, so that autograd gives the
gradients, too.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pair(NamedTuple):
    """A query `i` and a key `j`, of batch item `b` and head `h`."""

    i: int
    j: int
    b: int
    h: int


def dot(query: Tensor, key: Tensor, at: Pair | None = None) -> Tensor:
    """The score of the core."""
    return torch.dot(query, key) / math.sqrt(len(query))


def softmax(scores: Tensor, head: int = 0) -> Tensor:
    """The weights of the core; the first axis is that of the keys."""
    exponentials = (scores - scores.amax(0)).exp()
    return exponentials / exponentials.sum(0)


def linear(x: Tensor, layer: Any) -> Tensor:
    """The linear map of one vector."""
    y: Tensor = layer.weight @ x
    return y if layer.bias is None else y + layer.bias


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    prepare: Callable[[str, Tensor], Tensor] = lambda name, x: x,
    score: Callable[[Tensor, Tensor, Pair], Tensor] = dot,
    weigh: Callable[[Tensor, int], Tensor] = softmax,
    value_of: Callable[[Tensor, Pair], Tensor] = lambda value, at: value,
    finish: Callable[[Tensor], Tensor] = lambda context: context,
) -> Tensor:
    """The output of a module that has the projections of the core.

    `prepare` changes a projected vector, `score` compares the vectors of one head,
    `weigh` turns the scores of the allowed keys into weights, `value_of` is what a
    query receives from a key, and `finish` changes the context of a head. Heads of keys
    and values may be fewer: each then belongs to as many neighboring heads of queries.
    """
    heads = module.heads
    kv_heads = getattr(module, "kv_heads", heads)
    count = {"query": heads, "key": kv_heads, "value": kv_heads}
    vectors: dict[str, list[list[list[Tensor]]]] = {}
    for name, x in (("query", query), ("key", key), ("value", value)):
        layer = getattr(module, name).linear
        vectors[name] = [
            [list(prepare(name, linear(v, layer)).view(count[name], -1)) for v in row]
            for row in x
        ]
    width = len(module.value.linear.weight) // kv_heads
    rows = []
    for i in range(len(query)):
        for b in range(query.shape[1]):
            contexts = []
            for h in range(heads):
                g = h * kv_heads // heads
                pairs = [
                    Pair(i, j, b, h)
                    for j in range(len(key))
                    if mask is None or mask[i % len(mask), j, b % mask.shape[2]]
                ]
                context = torch.zeros(width, dtype=torch.float64)
                if pairs:
                    q = vectors["query"][i][b][h]
                    scores = [score(q, vectors["key"][at.j][b][g], at) for at in pairs]
                    weights = weigh(torch.stack(scores), h)
                    for weight, at in zip(weights, pairs, strict=True):
                        v = vectors["value"][at.j][b][g]
                        context = context + weight * value_of(v, at)
                contexts.append(finish(context))
            rows.append(linear(torch.cat(contexts), module.output))
    return torch.stack(rows).view(len(query), query.shape[1], -1)
