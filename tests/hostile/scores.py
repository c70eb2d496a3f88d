"""Attacks on the variants that change scores, weights or context of the core."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rows
from headnotes.variants import differential, qk_norm, sinks, soft_cap
from hostile.attention import (
    allowed,
    awake,
    call,
    compare,
    dense,
    inputs,
    need,
    new_mask,
    odd_mask,
    sizes,
    whole,
)
from hostile.dice import Dice
from hostile.outcome import Call
from hostile.registry import ATTACKS, attack
from hostile.settings import constructor

Steps = dict[str, Callable[..., Any]]


def wide(x: Any) -> Tensor:
    y: Tensor = x.detach().cpu().double()
    return y


def forward(
    build: Callable[[Dice, int, int], Any], steps: Callable[[Any], Steps]
) -> Callable[[Dice], Call]:
    """An attack on a variant: `steps` are those of the loops that it changes."""

    def attack(dice: Dice) -> Call:
        heads, d_k = dice.roll(1, 3), 2 * dice.roll(1, 2)
        module = awake(dice, build(dice, heads, heads * d_k))
        weight = module.output.weight
        q_len, k_len, batch_size = sizes(dice)
        shapes = [(n, batch_size, heads * d_k) for n in (q_len, k_len, k_len)]
        xs = inputs(dice, *shapes, like=weight)
        given: dict[str, Any] = dict(zip(("query", "key", "value"), xs, strict=True))
        given |= {"mask": new_mask(dice, q_len, k_len, batch_size)}

        def judge(result: Any) -> None:
            query, key, value, mask = given.values()
            for x in (query, key, value):
                dense(x, weight, 3)
                need(x.shape[2] == heads * d_k, "a width differs")
            if mask is not None:
                whole(mask, weight)
            need(query.shape[1] == key.shape[1] == value.shape[1], "batch sizes differ")
            need(len(key) == len(value), "keys and values differ in length")
            may = allowed(mask, (len(query), len(key), query.shape[1]))
            if query.is_meta or not query.numel():
                compare(result, torch.empty(query.shape, device=query.device), weight)
                return
            layers = {n: getattr(module, n).linear for n in ("query", "key", "value")}
            layers["output"] = module.output
            projections: rows.Projections = {
                name: (wide(x.weight), None if x.bias is None else wide(x.bias))
                for name, x in layers.items()
            }
            xs = [wide(x) for x in (query, key, value)]
            expected = rows.attention(*xs, may, projections, heads, **steps(module))
            # A norm divides by what may be small, and half precision is coarse there.
            if weight.dtype in (torch.float32, torch.float64):
                compare(result, expected, weight)

        return call(dice, module, given, judge, mask=odd_mask(dice))

    return attack


def of_sinks(module: Any) -> Steps:
    def weigh(scores: Tensor, head: int) -> Tensor:
        sink = wide(module.sinks)[head].expand(1)
        return rows.softmax(torch.cat([scores, sink]), head)[:-1]

    return {"weigh": weigh}


def of_soft_cap(module: Any) -> Steps:
    cap = module.soft_cap
    return {"score": lambda q, k: cap * torch.tanh(rows.dot(q, k) / cap)}


def of_norm(module: Any) -> Steps:
    def prepare(name: str, vector: Tensor) -> Tensor:
        if name == "value":
            return vector
        layer = getattr(module, name)
        parts = [vector] if layer.over == "all" else vector.chunk(module.heads)
        factors, eps = wide(layer.norm.weight), layer.norm.eps
        if isinstance(layer.norm, torch.nn.LayerNorm):
            parts = [x - x.mean() for x in parts]
        means = [x.square().mean() for x in parts]
        pairs = zip(parts, means, strict=True)
        return torch.cat([x / (m + eps).sqrt() * factors for x, m in pairs])

    return {"prepare": prepare}


def of_difference(module: Any) -> Steps:
    def score(q: Tensor, k: Tensor) -> Tensor:
        halves = zip(q.chunk(2), k.chunk(2), strict=True)
        return torch.stack([rows.dot(a, b) for a, b in halves])

    def weigh(scores: Tensor, head: int) -> Tensor:
        first, second = (rows.softmax(each, head) for each in scores.T)
        return first - wide(module.get_lambda()) * second

    def finish(context: Tensor) -> Tensor:
        root = (context.square().mean() + 1e-5).sqrt()
        context = context / root * wide(module.norm.weight)
        return (1 - module.lambda_init) * context

    return {"score": score, "weigh": weigh, "finish": finish}


def normalized(dice: Dice, heads: int, d_model: int) -> Any:
    norm, over = dice.pick(("rms", "layer")), dice.pick(("head", "all"))
    # With one or two components, layer norm divides zero by nearly zero.
    return qk_norm.QKNormAttention(
        heads, d_model, 0.0, norm=norm, over=over, eps=dice.pick((0.1, 0.5))
    )


@attack("variants.differential.initial_lambda")
def first_factor(dice: Dice) -> Call:
    given: dict[str, Any] = {"depth": dice.roll(0, 40)}

    def judge(result: Any) -> None:
        depth = given["depth"]
        need(type(depth) is int and depth >= 0, "no number of layers")
        assert abs(result - (0.8 - 0.6 * math.exp(-0.3 * depth))) < 1e-12

    return call(dice, differential.initial_lambda, given, judge)


@attack("variants.differential.DifferentialAttention")
def difference(dice: Dice) -> Call:
    heads = dice.roll(1, 3)
    given: dict[str, Any] = {"heads": heads, "d_model": 2 * heads * dice.roll(1, 3)}
    given |= {"dropout_prob": 0.1, "lambda_init": 0.1 * dice.roll(0, 9)}

    def judge(module: Any) -> None:
        heads, d_model, *factors = given.values()
        need(all(type(n) is int and n > 0 for n in (heads, d_model)), "no sizes")
        need(d_model % (2 * heads) == 0, "there are no halves")
        need(all(type(x) in (int, float) for x in factors), "no numbers")
        need(0 <= factors[0] <= 1 and 0 <= factors[1] < 1, "numbers out of range")
        assert module.lambda_q1.shape == (d_model // heads // 2,)

    return call(dice, differential.DifferentialAttention, given, judge)


CORE = {"heads": 1, "d_model": 2, "dropout_prob": 0.1, "bias": True}
ATTACKS |= {
    "variants.sinks.SinkAttention": constructor(sinks.SinkAttention, **CORE),
    "variants.soft_cap.SoftCapAttention": constructor(
        soft_cap.SoftCapAttention, **CORE
    ),
    "variants.qk_norm.QKNormAttention": constructor(qk_norm.QKNormAttention, **CORE),
    "variants.qk_norm.NormalizedProjection": constructor(
        qk_norm.NormalizedProjection, d_model=2, heads=1, d_k=1, bias=True
    ),
    "variants.sinks.SinkAttention.forward": forward(
        lambda dice, *sizes: sinks.SinkAttention(*sizes, 0.0), of_sinks
    ),
    "variants.soft_cap.SoftCapAttention.forward": forward(
        lambda dice, *sizes: soft_cap.SoftCapAttention(
            *sizes, 0.0, soft_cap=dice.pick((50.0, 1, 0.3))
        ),
        of_soft_cap,
    ),
    "variants.qk_norm.QKNormAttention.forward": forward(normalized, of_norm),
    "variants.differential.DifferentialAttention.forward": forward(
        lambda dice, *sizes: differential.DifferentialAttention(*sizes, 0.0),
        of_difference,
    ),
}
