"""Attacks on the variants that change scores, weights or context of the core."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

import loops
from headnotes.variants import (
    differential,
    qk_norm,
    sinks,
    sliding_window,
    soft_cap,
)
from hostile.attention import (
    awake,
    call,
    compare,
    dense,
    item_order,
    need,
)
from hostile.dice import Dice
from hostile.forward import by_loops, forward, wide
from hostile.outcome import Call
from hostile.registry import ATTACKS, attack
from hostile.settings import constructor


def of_sinks(module: Any, given: Any) -> dict[str, Any]:
    def weigh(scores: Tensor, head: int) -> Tensor:
        sink = module.sinks[head].expand(1)
        return loops.softmax(torch.cat([scores, sink]))[:-1]

    return {"weigh": weigh}


def of_soft_cap(module: Any, given: Any) -> dict[str, Any]:
    cap = module.soft_cap
    return {"score": lambda q, k, at: cap * torch.tanh(loops.dot(q, k) / cap)}


def of_norm(module: Any, given: Any) -> dict[str, Any]:
    def prepare(name: str, vector: Tensor) -> Tensor:
        if name == "value":
            return vector
        layer = getattr(module, name)
        parts = [vector] if layer.over == "all" else vector.chunk(module.heads)
        factors, eps = layer.norm.weight, layer.norm.eps
        if isinstance(layer.norm, torch.nn.LayerNorm):
            parts = [x - x.mean() for x in parts]
        means = [x.square().mean() for x in parts]
        pairs = zip(parts, means, strict=True)
        return torch.cat([x / (m + eps).sqrt() * factors for x, m in pairs])

    return {"prepare": prepare}


def of_difference(module: Any, given: Any) -> dict[str, Any]:
    def score(q: Tensor, k: Tensor, at: loops.Pair) -> Tensor:
        halves = zip(q.chunk(2), k.chunk(2), strict=True)
        return torch.stack([loops.dot(a, b) for a, b in halves])

    def weigh(scores: Tensor, head: int) -> Tensor:
        first, second = (loops.softmax(each) for each in scores.T)
        return first - module.get_lambda() * second

    def finish(context: Tensor) -> Tensor:
        root = (context.square().mean() + 1e-5).sqrt()
        context = context / root * module.norm.weight
        return (1 - module.lambda_init) * context

    return {"score": score, "weigh": weigh, "finish": finish}


def widths(dice: Dice) -> tuple[int, int]:
    """Heads, and a width of which each has an even part."""
    heads = dice.roll(1, 3)
    return heads, 2 * heads * dice.roll(1, 2)


def normalized(dice: Dice) -> Any:
    norm, over = dice.pick(("rms", "layer")), dice.pick(("head", "all"))
    # With one or two components, layer norm divides zero by nearly zero.
    return qk_norm.QKNormAttention(
        *widths(dice), 0.0, norm=norm, over=over, eps=dice.pick((0.1, 0.5))
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


def windowed(dice: Dice) -> Any:
    return sliding_window.SlidingWindowAttention(
        *widths(dice), 0.0, window=dice.roll(1, 4), sink_tokens=dice.roll(0, 2)
    )


def within_window(module: Any, may: Tensor) -> Tensor:
    """The mask without what is too old, or in the future; padding is no sink."""
    within = may.clone()
    for row, j, b in itertools.product(*map(range, may.shape)):
        seen = may[:, : j + 1, b].any(dim=0)
        distance = row + may.shape[1] - len(may) - j
        # The keys up to this one, without those before the first that is seen.
        is_sink = int(seen.cummax(dim=0).values.sum()) <= module.sink_tokens
        within[row, j, b] &= distance >= 0 and (distance < module.window or is_sink)
    return within


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


@attack("variants.sliding_window.RingCache.reorder")
def reorder(dice: Dice) -> Call:
    batch_size, heads, d_k, window = (dice.roll(1, 3) for _ in range(4))
    ring = sliding_window.RingCache(
        batch_size, heads, d_k, window, dice.roll(0, 2), device=dice.device
    )
    x = dice.floats(dice.roll(0, 7), batch_size, heads, d_k)
    ring.append(x, x)
    held, _ = ring.in_order()
    given: dict[str, Any] = {"index": dice.ints(0, batch_size - 1, dice.roll(1, 4))}
    dice.tame = not given["index"].is_meta  # there is nothing to be read of

    def judge(result: Any) -> None:
        order = item_order(given["index"], ring.buffer, batch_size)
        kept, _ = ring.in_order()
        assert torch.equal(kept.nan_to_num(7), held[:, order].nan_to_num(7))

    return call(dice, ring.reorder, given, judge)


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
    module = awake(dice, windowed(dice)).eval()
    weight = module.output.weight
    batch_size = dice.roll(1, 3)
    padding = torch.tensor([dice.roll(0, 4) for _ in range(batch_size)])
    padding = padding.to(weight.device)
    is_padded = dice.roll(0, 1)
    cache = module.cache(batch_size, left_padding=padding if is_padded else None)
    x = dice.floats(dice.roll(0, 7), batch_size, len(weight), dtype=weight.dtype)
    module.decode(x, cache)
    piece = dice.floats(dice.roll(0, 3), *x.shape[1:], dtype=weight.dtype)
    given: dict[str, Any] = {"x": piece, "cache": cache}

    def judge(result: Any) -> None:
        piece, cache = given.values()
        dense(piece, weight, 3)
        need(piece.shape[1:] == x.shape[1:], "a size differs")
        need(isinstance(cache, sliding_window.RingCache), "there is no cache")
        together = torch.cat([x, piece])
        mask = None
        if is_padded:
            order = torch.arange(len(together), device=weight.device).unsqueeze(-1)
            mask = (order >= padding).unsqueeze(0)
            together = together.masked_fill(~mask[0].unsqueeze(-1), 0)
        xs = {"query": together, "key": together, "value": together}
        expected = module(**xs, mask=mask)[len(x) :]
        compare(result[0], wide(expected) if not x.is_meta else expected, weight)

    return call(dice, module.decode, given, judge)


@attack("variants.sliding_window.SlidingWindowAttention.cache")
def empty_cache(dice: Dice) -> Call:
    module = windowed(dice)
    given: dict[str, Any] = {"batch_size": dice.roll(1, 3)}

    def judge(cache: Any) -> None:
        batch_size = given["batch_size"]
        need(type(batch_size) is int and batch_size > 0, "no size")
        assert cache.keys.shape == (0, batch_size, module.heads, module.d_k)

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
        windowed, by_loops(restrict=within_window)
    ),
    "variants.sinks.SinkAttention.forward": forward(
        lambda dice: sinks.SinkAttention(*widths(dice), 0.0), by_loops(of_sinks)
    ),
    "variants.soft_cap.SoftCapAttention.forward": forward(
        lambda dice: soft_cap.SoftCapAttention(
            *widths(dice), 0.0, soft_cap=dice.pick((50.0, 1, 0.3))
        ),
        by_loops(of_soft_cap),
    ),
    "variants.qk_norm.QKNormAttention.forward": forward(
        normalized, by_loops(of_norm), coarse=True
    ),
    "variants.differential.DifferentialAttention.forward": forward(
        lambda dice: differential.DifferentialAttention(*widths(dice), 0.0),
        by_loops(of_difference),
        coarse=True,
    ),
}
