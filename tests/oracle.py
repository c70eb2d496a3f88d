"""Attention by loops over Python's own floats, which are float64.

The judge of every other implementation: it shares no code with any of them, and no
line of it is clever.
"""

import math

Vector = list[float]
Matrix = list[Vector]


def linear(x: Vector, weight: Matrix, bias: Vector | None) -> Vector:
    """One output per row of `weight`."""
    out = []
    for row, matrix_row in enumerate(weight):
        total = 0.0 if bias is None else bias[row]
        for a, b in zip(matrix_row, x, strict=True):
            total += a * b
        out.append(total)
    return out


def weights_of_row(scores: Vector, allowed: list[bool]) -> Vector:
    """Softmax over the allowed keys; all zeros where there is none."""
    largest = max((s for s, a in zip(scores, allowed, strict=True) if a), default=0.0)
    exponentials = []
    for score, may in zip(scores, allowed, strict=True):
        exponentials.append(math.exp(score - largest) if may else 0.0)
    total = sum(exponentials)
    return [e / total if total else 0.0 for e in exponentials]


def attention(
    query: list[Matrix],
    key: list[Matrix],
    value: list[Matrix],
    mask: list[list[list[bool]]],
    parameters: dict[str, tuple[Matrix, Vector | None]],
    heads: int,
) -> tuple[list[Matrix], list[list[Matrix]]]:
    """Output `[q_len][batch_size][d_model]` and weights, one more axis at the end.

    Weights are `[q_len][k_len][batch_size][heads]`; `query`, `key` and `value` are
    `[len][batch_size][d_model]`; `mask` is `[q_len][k_len][batch_size]`, True where
    the query may attend to the key.
    """
    d_model = len(parameters["output"][0])
    d_k = d_model // heads
    batch_size = len(query[0]) if query else 0

    projected = {}
    for name, x in (("query", query), ("key", key), ("value", value)):
        weight, bias = parameters[name]
        projected[name] = [[linear(v, weight, bias) for v in row] for row in x]

    output, weights = [], []
    for i in range(len(query)):
        row_output = []
        row_weights = [[[0.0] * heads for _ in range(batch_size)] for _ in key]
        for b in range(batch_size):
            context = [0.0] * d_model
            for h in range(heads):
                components = range(h * d_k, (h + 1) * d_k)
                scores = []
                for j in range(len(key)):
                    product = 0.0
                    for d in components:
                        q, k = projected["query"][i][b][d], projected["key"][j][b][d]
                        product += q * k
                    scores.append(product / math.sqrt(d_k))
                row = weights_of_row(scores, [mask[i][j][b] for j in range(len(key))])
                for j, w in enumerate(row):
                    row_weights[j][b][h] = w
                    for d in components:
                        context[d] += w * projected["value"][j][b][d]
            row_output.append(linear(context, *parameters["output"]))
        output.append(row_output)
        weights.append(row_weights)
    return output, weights
