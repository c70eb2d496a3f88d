"""Attention row by row in float64, with the step that a variant changes as an argument.

Like `oracle`, it imports nothing of the package and is not clever; but its numbers are
tensors, so that autograd gives the gradients of the loops.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Projections = dict[str, tuple[Tensor, Tensor | None]]


def dot(q: Tensor, k: Tensor) -> Tensor:
    """The score of the core."""
    return (q * k).sum() / math.sqrt(len(q))


def softmax(scores: Tensor, head: int) -> Tensor:
    """The weights of the core."""
    exponentials = (scores - scores.amax()).exp()
    return exponentials / exponentials.sum()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    projections: Projections,
    heads: int,
    *,
    prepare: Callable[[str, Tensor], Tensor] = lambda name, vector: vector,
    score: Callable[[Tensor, Tensor], Tensor] = dot,
    weigh: Callable[[Tensor, int], Tensor] = softmax,
    finish: Callable[[Tensor], Tensor] = lambda context: context,
) -> Tensor:
    """The output `[q_len, batch_size, d_model]`; the mask is `[q_len, k_len, batch]`.

    `prepare` changes a projected vector, `score` compares the vectors of one head,
    `weigh` turns the scores of the allowed keys into weights, and `finish` changes the
    context of a head.
    """
    vectors: dict[str, Any] = {}
    for name, x in (("query", query), ("key", key), ("value", value)):
        weight, bias = projections[name]
        vectors[name] = [
            [
                prepare(name, weight @ v if bias is None else weight @ v + bias)
                for v in row
            ]
            for row in x
        ]
    rows = []
    for i in range(len(query)):
        for b in range(query.shape[1]):
            contexts = []
            for h in range(heads):
                parts = {
                    name: [row[b].chunk(heads)[h] for row in given]
                    for name, given in vectors.items()
                }
                allowed = [j for j in range(len(key)) if mask[i, j, b]]
                context = torch.zeros_like(parts["query"][i])
                if allowed:
                    q = parts["query"][i]
                    scores = torch.stack([score(q, parts["key"][j]) for j in allowed])
                    weights = weigh(scores, h)
                    for w, j in zip(weights, allowed, strict=True):
                        context = context + w * parts["value"][j]
                contexts.append(finish(context))
            weight, bias = projections["output"]
            mixed = weight @ torch.cat(contexts)
            rows.append(mixed if bias is None else mixed + bias)
    return torch.stack(rows).view(len(query), query.shape[1], -1)
