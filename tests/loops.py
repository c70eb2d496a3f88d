"""Variants of attention by loops over single positions, as `oracle.py` has the core.

It shares no code with any implementation, and no line of it is clever. Vectors are
float64 tensors, so that autograd gives the gradients, too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# The score of query i and key j, from both of their vectors; with their batch item and
# head.
Score = Callable[[int, int, int, int, Tensor, Tensor], Tensor]
# The value that query i receives from key j.
ValueOf = Callable[[int, int, int, int, Tensor], Tensor]


def project(x: Tensor, layer: Any, heads: int) -> list[list[list[Tensor]]]:
    """The vectors of each head, `[seq_len][batch_size][heads]`."""
    rows = []
    for t in range(x.shape[0]):
        row = []
        for b in range(x.shape[1]):
            whole = layer.weight @ x[t, b]
            if layer.bias is not None:
                whole = whole + layer.bias
            row.append(list(whole.view(heads, -1)))
        rows.append(row)
    return rows


def softmax(scores: list[Tensor], allowed: list[bool]) -> list[Tensor]:
    """Weights of one row; all zero where nothing is allowed."""
    kept = [s for s, a in zip(scores, allowed, strict=True) if a]
    if not kept:
        return [s * 0 for s in scores]
    largest = max(s.item() for s in kept)
    exponentials = [
        (s - largest).exp() if a else s * 0
        for s, a in zip(scores, allowed, strict=True)
    ]
    total = torch.stack(exponentials).sum()
    return [e / total for e in exponentials]


def attend(
    query: list[list[list[Tensor]]],
    key: list[list[list[Tensor]]],
    value: list[list[list[Tensor]]],
    mask: Tensor | None,
    score: Score,
    value_of: ValueOf | None = None,
) -> list[list[Tensor]]:
    """The contexts, `[q_len][batch_size]`, with the heads concatenated.

    Heads of keys and values may be fewer: each then belongs to as many neighboring
    heads of the queries.
    """
    contexts = []
    for i in range(len(query)):
        row = []
        for b in range(len(query[i])):
            parts = []
            for h in range(len(query[i][b])):
                group = len(query[i][b]) // len(key[0][b])
                g = h // group
                scores = [
                    score(i, j, b, h, query[i][b][h], key[j][b][g])
                    for j in range(len(key))
                ]
                allowed = [
                    mask is None or bool(mask[i % len(mask), j, b % mask.shape[2]])
                    for j in range(len(key))
                ]
                weights = softmax(scores, allowed)
                context = torch.zeros_like(value[0][b][g])
                for j in range(len(key)):
                    received = value[j][b][g]
                    if value_of is not None:
                        received = value_of(i, j, b, h, received)
                    context = context + weights[j] * received
                parts.append(context)
            row.append(torch.cat(parts))
        contexts.append(row)
    return contexts


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    score: Score,
    value_of: ValueOf | None = None,
    kv_heads: int | None = None,
) -> Tensor:
    """The output of a module with the projections of the core, but other scores."""
    contexts = attend(
        project(query, module.query.linear, module.heads),
        project(key, module.key.linear, kv_heads or module.heads),
        project(value, module.value.linear, kv_heads or module.heads),
        mask,
        score,
        value_of,
    )
    output = module.output
    rows = [[output.weight @ c + output.bias for c in row] for row in contexts]
    return torch.stack([torch.stack(row) for row in rows])


def build(module: nn.Module) -> Any:
    """The module in float64 without dropout, with weights that make rows differ."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.25)
    return module.double().eval()


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Float64 leaves."""
    return [
        torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes
    ]


def assert_same(
    output: Tensor, expected: Tensor, variables: list[Tensor], near: float = 1e-12
) -> None:
    """Output and gradients of both are equal, to rounding."""
    torch.testing.assert_close(output, expected, rtol=near, atol=near)
    upstream = torch.linspace(-1, 1, output.numel(), dtype=output.dtype)
    upstream = upstream.view_as(output)
    ours, theirs = (
        torch.autograd.grad(y, variables, upstream, allow_unused=True)
        for y in (output, expected)
    )
    for our, their in zip(ours, theirs, strict=True):
        # What has no part in the output may get a gradient of zero, or none.
        if our is None or their is None:
            assert not any(g.any() for g in (our, their) if g is not None)
        else:
            torch.testing.assert_close(our, their, rtol=near, atol=near)
