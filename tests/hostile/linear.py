"""Attacks on linear attention and the delta rule; the right answers are loops."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headnotes.variants import linear
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
from hostile.dice import FLOATS, Dice
from hostile.forward import forward, wide
from hostile.outcome import Call
from hostile.registry import ATTACKS, attack
from hostile.settings import constructor


def right(q: Tensor, k: Tensor, v: Tensor, may: Tensor) -> Tensor:
    """The context of linear attention, in float64; all weights at once."""
    weights = torch.einsum("ibhd,jbhd->ijbh", q, k) * may.unsqueeze(-1)
    total = weights.sum(dim=1).unsqueeze(-1)
    context = torch.einsum("ijbh,jbhd->ibhd", weights, v)
    # A query of NaN is NaN, even where there is no key.
    context = context + 0 * q.sum(dim=-1, keepdim=True)
    return context / total.masked_fill(total == 0, 1)


def by_steps(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor) -> Tensor:
    """The context of the delta rule, in float64; one token at a time."""
    state = torch.zeros(*k.shape[1:], v.shape[3], dtype=torch.float64)
    contexts = [torch.zeros_like(v[:0])]
    for i in range(len(q)):
        state = state * log_gate[i, ..., None, None].exp()
        stored = (state * k[i].unsqueeze(-1)).sum(dim=-2)
        update = beta[i].unsqueeze(-1) * (v[i] - stored)
        state = state + k[i].unsqueeze(-1) * update.unsqueeze(-2)
        contexts.append((state * q[i].unsqueeze(-1)).sum(dim=-2)[None])
    return torch.cat(contexts)


def near(result: Any, expected: Tensor, like: Tensor) -> None:
    """Compare, where a quotient of sums can be compared."""
    if like.is_meta:
        compare(result, expected.to("meta"), like)
    elif like.dtype in (torch.float32, torch.float64):
        compare(result, expected, like)
    else:
        assert result.shape == expected.shape
        assert result.dtype == like.dtype


def heads_of(dice: Dice, q_len: int, k_len: int) -> dict[str, Any]:
    """Features of queries and keys, and values, `[len, batch_size, heads, d]`."""
    batch_size, heads, d_k, d_v = (dice.roll(1, 3) for _ in range(4))
    like = dice.floats(1, dtype=dice.pick(FLOATS))
    shapes = [(n, batch_size, heads, d) for n, d in ((q_len, d_k), (k_len, d_k))]
    xs = inputs(dice, *shapes, (k_len, batch_size, heads, d_v), like=like)
    q, k, v = xs
    return {"query": q.abs() + 0.1, "key": k.abs() + 0.1, "value": v}


def fitting(query: Any, key: Any, value: Any) -> None:
    """The three can be computed with, and weights are not negative."""
    need(isinstance(query, Tensor) and query.dtype in FLOATS, "no floats")
    for x in (query, key, value):
        dense(x, query, 4)
    need(query.shape[1:] == key.shape[1:], "queries and keys differ")
    need(key.shape[:3] == value.shape[:3], "keys and values differ")


def positive(*xs: Tensor) -> bool:
    return all(not x.is_meta and bool((x >= 0).all()) for x in xs)


@attack("variants.linear.feature_map")
def features(dice: Dice) -> Call:
    x = dice.floats(dice.roll(0, 5), dtype=dice.pick(FLOATS))

    def judge(result: Any) -> None:
        expected = torch.where(wide(x) > 0, wide(x) + 1, wide(x).exp())
        compare(result, expected, x)

    # It is a formula, and refuses nothing: it gets plain tensors only.
    return Call(linear.feature_map, {"x": x}, judge, dice.tame, dice.notes, ())


@attack("variants.linear.parallel_linear_attention")
def parallel(dice: Dice) -> Call:
    q_len, k_len, _ = sizes(dice)
    given = heads_of(dice, q_len, k_len)
    given |= {"mask": new_mask(dice, q_len, k_len, given["query"].shape[1])}

    def judge(result: Any) -> None:
        query, key, value, mask = given.values()
        fitting(query, key, value)
        if mask is not None:
            whole(mask, query)
        may = allowed(mask, (len(query), len(key), query.shape[1]))
        if positive(query, key):
            near(result, right(wide(query), wide(key), wide(value), may), query)

    return call(
        dice, linear.parallel_linear_attention, given, judge, mask=odd_mask(dice)
    )


def causal(function: Callable[..., Any], chunked: bool) -> Callable[[Dice], Call]:
    """An attack on one of the causal forms of linear attention."""

    def attack(dice: Dice) -> Call:
        length = dice.roll(0, 5)
        given = heads_of(dice, length, length)
        if chunked:
            given |= {"chunk_size": dice.roll(1, 4)}

        def judge(result: Any) -> None:
            query, key, value = (given[n] for n in ("query", "key", "value"))
            fitting(query, key, value)
            need(len(query) == len(key), "lengths differ")
            size = given.get("chunk_size", 1)
            need(type(size) is int and size > 0, "no size")
            may = torch.ones(len(query), len(query)).tril().unsqueeze(-1)
            if positive(query, key):
                near(result[0], right(wide(query), wide(key), wide(value), may), query)

        return call(dice, function, given, judge)

    return attack


def delta(function: Callable[..., Any], chunked: bool) -> Callable[[Dice], Call]:
    """An attack on one of the forms of the delta rule."""

    def attack(dice: Dice) -> Call:
        length = dice.roll(0, 5)
        given = heads_of(dice, length, length)
        key = given["key"]
        given["key"] = key / key.double().norm(dim=-1, keepdim=True).to(key.dtype)
        for name, sign in (("beta", 1), ("log_gate", -1)):
            x = dice.floats(*key.shape[:3], dtype=key.dtype)
            given[name] = sign * x.sigmoid()
        if chunked:
            given |= {"chunk_size": dice.roll(1, 4)}

        def judge(result: Any) -> None:
            names = ("query", "key", "value", "beta", "log_gate")
            xs = [given[name] for name in names]
            fitting(*xs[:3])
            need(len(xs[0]) == len(xs[1]), "lengths differ")
            for x in xs[3:]:
                need(isinstance(x, Tensor) and x.dtype in FLOATS, "no floats")
                dense(x, x, 3)
                need(x.device == xs[0].device, "devices differ")
                need(x.shape == xs[1].shape[:3], "a size differs")
            size = given.get("chunk_size", 1)
            need(type(size) is int and size > 0, "no size")
            # Keys that are not of length 1, or gates above 1, let the state grow.
            if dice.tame:
                near(result[0], by_steps(*(wide(x) for x in xs)), xs[0])

        return call(dice, function, given, judge)

    return attack


def module(kind: Any) -> Callable[[Dice], Any]:
    """One of the modules, of a random size."""

    def build(dice: Dice) -> Any:
        heads = dice.roll(1, 3)
        d_model = heads * dice.roll(1, 3)
        return kind(heads, d_model, chunk_size=dice.roll(1, 3))

    return build


def of_linear(module: Any, given: dict[str, Any], may: Tensor) -> Tensor | None:
    """The output of linear attention."""
    if given["query"].is_meta or not given["query"].numel():
        return None
    query, key, value = (wide(given[name]) for name in ("query", "key", "value"))
    hidden = ~may.any(dim=0).unsqueeze(-1)
    q, k = (
        linear.feature_map(layer(x))
        for layer, x in ((module.query, query), (module.key, key))
    )
    k = k.masked_fill(hidden.unsqueeze(-1), 0)
    v = module.value(value.masked_fill(hidden, 0))
    output: Tensor = module.output(right(q, k, v, may).flatten(-2))
    return output


def decode(kind: Any) -> Callable[[Dice], Call]:
    """An attack on `decode`, behind a prompt."""

    def attack(dice: Dice) -> Call:
        made = awake(dice, module(kind)(dice)).eval()
        weight = made.output.weight
        batch_size, d_model = dice.roll(1, 3), len(weight)
        shape = batch_size, d_model
        prompt = dice.floats(dice.roll(0, 3), *shape, dtype=weight.dtype)
        _, state = made.decode(prompt)
        x = dice.floats(dice.roll(0, 3), *shape, dtype=weight.dtype)
        given: dict[str, Any] = {"x": x, "state": state}
        given["mask"] = new_mask(dice, 1, len(x), batch_size)

        def judge(result: Any) -> None:
            x, start, mask = given.values()
            dense(x, weight, 3)
            need(x.shape[2] == d_model, "a width differs")
            fits = start is None or x.shape[1] == batch_size
            need(fits, "the state has another batch size")
            if start is not None:
                dense(start, state, 4)
                need(start.shape == state.shape, "the state has another shape")
            if mask is not None:
                whole(mask, weight)
            may = allowed(mask, (1, *x.shape[:2])).to(weight.device)
            # With another state, the outputs are not those of the prompt's.
            same = start is state or (
                start is not None and not x.is_meta and start.equal(state)
            )
            if not dice.tame or not same:
                return
            before = may.new_ones(1, len(prompt), batch_size)
            options: dict[str, Any] = {"mask": torch.cat([before, may], dim=1)}
            if kind is linear.LinearAttention:
                options["is_causal"] = True
            together = torch.cat([prompt, x.masked_fill(~may[0].unsqueeze(-1), 0)])
            y = made(query=together, key=together, value=together, **options)
            expected = y[len(prompt) :].detach()
            near(result[0], expected if y.is_meta else wide(expected), weight)

        return call(dice, made.decode, given, judge, mask=odd_mask(dice))

    return attack


NAME = "variants.linear"
ATTACKS |= {
    f"{NAME}.recurrent_linear_attention": causal(
        linear.recurrent_linear_attention, chunked=False
    ),
    f"{NAME}.chunked_linear_attention": causal(
        linear.chunked_linear_attention, chunked=True
    ),
    f"{NAME}.recurrent_delta_rule": delta(linear.recurrent_delta_rule, chunked=False),
    f"{NAME}.chunked_delta_rule": delta(linear.chunked_delta_rule, chunked=True),
}
for each in (linear.LinearAttention, linear.DeltaNetAttention):
    ATTACKS |= {
        f"{NAME}.{each.__name__}": constructor(
            each, heads=1, d_model=2, bias=True, chunk_size=3
        ),
        f"{NAME}.{each.__name__}.decode": decode(each),
    }
ATTACKS |= {
    f"{NAME}.LinearAttention.forward": forward(
        module(linear.LinearAttention), of_linear, coarse=True
    ),
    # Of the delta rule only the shape: its state may grow.
    f"{NAME}.DeltaNetAttention.forward": forward(
        module(linear.DeltaNetAttention),
        lambda module, given, may: None,
        mask_per_query=False,
    ),
}
