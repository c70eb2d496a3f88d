"""Attacks on the variants that change scores, weights or context of the core."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rows
from headnotes.variants import (
    differential,
    qk_norm,
    sinks,
    sliding_window,
    soft_cap,
)
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
    build: Callable[[Dice, int, int], Any],
    steps: Callable[[Any], Steps],
    restrict: Callable[[Any, Tensor], Tensor] = lambda module, may: may,
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
            may = restrict(module, may)
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
            # As in the core, what a query may attend to must be finite for all queries
            # of a batch item, because zero times NaN is NaN.
            seen = may.any(dim=0) & ~xs[2].isfinite().all(dim=-1)
            expected[:, seen.any(dim=0)] = math.nan
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


def windowed(dice: Dice, heads: int, d_model: int) -> Any:
    return sliding_window.SlidingWindowAttention(
        heads, d_model, 0.0, window=dice.roll(1, 4), sink_tokens=dice.roll(0, 2)
    )


def within_window(module: Any, may: Tensor) -> Tensor:
    """The mask without what is too old, or in the future."""
    may = may.clone()
    for row, j in itertools.product(range(len(may)), range(may.shape[1])):
        distance = row + may.shape[1] - len(may) - j
        near = distance < module.window or j < module.sink_tokens
        may[row, j] &= distance >= 0 and near
    return may


@attack("variants.sliding_window.RingCache.append")
def append(dice: Dice) -> Call:
    batch_size, heads, d_k, window = (dice.roll(1, 3) for _ in range(4))
    dtype = dice.pick((torch.float32, torch.bfloat16))
    ring = sliding_window.RingCache(
        batch_size, heads, d_k, window, dice.roll(0, 2), dtype=dtype, device=dice.device
    )
    shape = dice.roll(0, 7), batch_size, heads, d_k
    given = {name: dice.floats(*shape, dtype=dtype) for name in ("key", "value")}

    def judge(result: Any) -> None:
        key, value = given.values()
        for x in (key, value):
            dense(x, ring.buffer, 4)
            need(x.shape[1:] == shape[1:], "sizes differ")
        need(len(key) == len(value), "lengths differ")
        held = [*range(min(len(key), ring.sink_tokens))]
        held += range(max(len(held), len(key) - window), len(key))
        for x, stored in zip((key, value), ring.in_order(), strict=True):
            assert torch.equal(stored.nan_to_num(7), x[held].nan_to_num(7))

    return call(dice, ring.append, given, judge)


@attack("variants.sliding_window.RingCache")
def ring(dice: Dice) -> Call:
    names = ("batch_size", "heads", "d_k", "window")
    given: dict[str, Any] = {name: dice.roll(1, 3) for name in names}
    given |= {"sink_tokens": dice.roll(0, 2)}

    def judge(made: Any) -> None:
        *sizes, sinks = given.values()
        need(all(type(n) is int and n > 0 for n in sizes), "no size")
        need(type(sinks) is int and sinks >= 0, "no number of tokens")
        *sizes, window = sizes
        assert made.buffer.shape == (2, sinks + window, *sizes)

    return call(dice, sliding_window.RingCache, given, judge)


@attack("variants.sliding_window.SlidingWindowAttention.decode")
def decode(dice: Dice) -> Call:
    heads, d_k = dice.roll(1, 3), dice.roll(1, 3)
    module = awake(dice, windowed(dice, heads, heads * d_k)).eval()
    weight = module.output.weight
    batch_size = dice.roll(1, 3)
    cache = module.cache(batch_size)
    x = dice.floats(dice.roll(0, 7), batch_size, heads * d_k, dtype=weight.dtype)
    module.decode(x, cache)
    piece = dice.floats(dice.roll(0, 3), *x.shape[1:], dtype=weight.dtype)
    given: dict[str, Any] = {"x": piece, "cache": cache}

    def judge(result: Any) -> None:
        piece, cache = given.values()
        dense(piece, weight, 3)
        need(piece.shape[1:] == x.shape[1:], "a size differs")
        need(isinstance(cache, sliding_window.RingCache), "there is no cache")
        together = torch.cat([x, piece])
        expected = module(query=together, key=together, value=together)[len(x) :]
        compare(result[0], wide(expected) if not x.is_meta else expected, weight)

    return call(dice, module.decode, given, judge)


@attack("variants.sliding_window.SlidingWindowAttention.cache")
def empty_cache(dice: Dice) -> Call:
    module = windowed(dice, 2, 6)
    given: dict[str, Any] = {"batch_size": dice.roll(1, 3)}

    def judge(cache: Any) -> None:
        batch_size = given["batch_size"]
        need(type(batch_size) is int and batch_size > 0, "no size")
        assert cache.keys.shape == (0, batch_size, 2, 3)

    return call(dice, module.cache, given, judge)


@attack("variants.sliding_window.SlidingWindowAttention")
def window(dice: Dice) -> Call:
    heads = dice.roll(1, 3)
    given: dict[str, Any] = {"heads": heads, "d_model": heads * dice.roll(1, 3)}
    given |= {"window": dice.roll(1, 9), "sink_tokens": dice.roll(0, 3)}

    def judge(module: Any) -> None:
        *sizes, sinks = given.values()
        need(all(type(n) is int and n > 0 for n in sizes), "no sizes")
        need(sizes[1] % sizes[0] == 0, "`heads` does not divide")
        need(type(sinks) is int and sinks >= 0, "no number of tokens")
        assert (module.window, module.sink_tokens) == (sizes[2], sinks)

    return call(dice, sliding_window.SlidingWindowAttention, given, judge)


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
    "variants.sliding_window.SlidingWindowAttention.forward": forward(
        windowed, lambda module: {}, within_window
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
