"""Attacks on attention at full speed: by blocks, with a cache, and as a module."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headnotes import fast
from headnotes.fast import blocks, blockwise
from headnotes.fast import dispatch as kernels
from headnotes.fast.kv_cache import KeyValueCache
from hostile.attention import (
    Weights,
    allowed,
    awake,
    call,
    compare,
    dense,
    eye,
    inputs,
    linear,
    need,
    new_mask,
    odd_mask,
    right,
    sizes,
    whole,
)
from hostile.dice import FLOATS, Dice
from hostile.outcome import Call
from hostile.registry import attack


@contextmanager
def small() -> Iterator[None]:
    """Every path is walked at small sizes."""
    changes = [(blocks, "ROWS", 2), (blocks, "SCORES", 1)]
    changes += [(kernels, "FEW", 1), (fast, "FEW", 2), (kernels, "LONG", 3)]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def may_read(mask: Any, is_causal: bool, full: tuple[int, ...]) -> Tensor:
    """A mask and causality, in full and on the CPU."""
    may = allowed(mask, full)
    past = torch.ones(full[:2]).bool().tril(full[1] - full[0])
    return may & past.unsqueeze(-1) if is_causal else may


# The module -----------------------------------------------------------------------


class Quietly(nn.Module):
    """As it is called where nothing is to be learnt, or where something is."""

    def __init__(self, module: fast.MultiHeadAttention, learns: bool) -> None:
        super().__init__()
        self.module, self.learns = module, learns

    def forward(
        self,
        *,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        is_causal: bool,
        need_weights: bool,
        average_weights: bool,
    ) -> Any:
        call: dict[str, Any] = {"query": query, "key": key, "value": value}
        call |= {"mask": mask, "is_causal": is_causal, "need_weights": need_weights}
        with small(), torch.set_grad_enabled(self.learns):
            return self.module(**call, average_weights=average_weights)


class Alone(nn.Module):
    """A sequence that reads itself, with nothing to learn: the packed projections."""

    def __init__(self, module: fast.MultiHeadAttention) -> None:
        super().__init__()
        self.module = module

    def forward(self, *, query: Any, mask: Any, is_causal: bool) -> Any:
        x = {"query": query, "key": query, "value": query}
        with small(), torch.no_grad():
            return self.module(**x, mask=mask, is_causal=is_causal)


def new_module(dice: Dice) -> tuple[Any, Weights]:
    heads, d_k = dice.roll(1, 3), dice.roll(1, 3)
    made = fast.MultiHeadAttention(heads, heads * d_k, 0.0, bias=not dice.chance(2))
    module = awake(dice, made)
    weights: Weights = {
        name: linear(getattr(module, name).linear) for name in ("query", "key", "value")
    }
    return module, weights | {"output": linear(module.output)}


@attack("fast.module.MultiHeadAttention.forward")
def forward(dice: Dice) -> Call:
    module, weights = new_module(dice)
    weight, heads = module.output.weight, module.heads
    q_len, k_len, batch_size = sizes(dice)
    k_len = q_len if dice.chance(2) else k_len
    shapes = [(n, batch_size, weight.shape[0]) for n in (q_len, k_len, k_len)]
    xs = inputs(dice, *shapes, like=weight)
    given: dict[str, Any] = dict(zip(("query", "key", "value"), xs, strict=True))
    given |= {"mask": new_mask(dice, q_len, k_len, batch_size)}
    flags = ("is_causal", "need_weights", "average_weights")
    flagged = {name: dice.chance(2) for name in flags}

    def judge(result: Any) -> None:
        *xs, mask = list(given.values())[:4]
        for x in xs:
            dense(x, weight, 3)
        full = (len(xs[0]), len(xs[1]), xs[0].shape[1])
        if mask is not None:
            whole(mask, weight)
        may = may_read(mask, flagged["is_causal"], full).to(weight.device)
        output, attn = right(*xs, may, weights, heads)
        if flagged["need_weights"]:
            attn = attn.mean(-1) if flagged["average_weights"] else attn
            compare(result[1], attn, weight)
            result = result[0]
        compare(result, output, weight)

    function = Quietly(module, learns=dice.chance(2))
    made = call(dice, function, given, judge, mask=odd_mask(dice))
    given |= flagged  # read by their truth, so none of them is wrong
    return made


@attack("fast.module.MultiHeadAttention.read_itself")
def alone(dice: Dice) -> Call:
    module, weights = new_module(dice)
    weight, heads = module.output.weight, module.heads
    seq_len, _, batch_size = sizes(dice)
    (x,) = inputs(dice, (seq_len, batch_size, weight.shape[0]), like=weight)
    given: dict[str, Any] = {"query": x}
    given |= {"mask": new_mask(dice, seq_len, seq_len, batch_size)}
    is_causal = dice.chance(2)

    def judge(result: Any) -> None:
        x, mask = given["query"], given["mask"]
        dense(x, weight, 3)
        full = (len(x), len(x), x.shape[1])
        if mask is not None:
            whole(mask, weight)
        may = may_read(mask, is_causal, full).to(weight.device)
        output, _ = right(x, x, x, may, weights, heads)
        compare(result, output, weight)

    made = call(dice, Alone(module.eval()), given, judge, mask=odd_mask(dice))
    given["is_causal"] = is_causal
    return made


@attack("fast.module.MultiHeadAttention.decode")
def decode(dice: Dice) -> Call:
    module, weights = new_module(dice)
    weight = module.output.weight
    past, seq_len, batch_size = dice.roll(0, 3), dice.roll(0, 3), dice.roll(1, 3)
    capacity = past + seq_len + dice.roll(0, 2) or 1
    cache = module.cache(batch_size, capacity)
    before = dice.floats(past, batch_size, weight.shape[0]).to(weight)
    with small():
        module.decode(before, cache)
    given: dict[str, Any] = {"x": dice.floats(seq_len, *before.shape[1:]).to(weight)}

    def function(x: Any) -> Any:
        with small():
            return module.decode(x, cache)

    def judge(result: Any) -> None:
        x = given["x"]
        dense(x, weight, 3)
        need(x.shape[1] == batch_size, "the cache is for another batch")
        whole_x = torch.cat([before, x.detach()])
        need(len(whole_x) <= capacity, "the cache is full")
        full = (len(whole_x), len(whole_x), batch_size)
        may = may_read(None, True, full).to(weight.device)
        output, _ = right(whole_x, whole_x, whole_x, may, weights, module.heads)
        assert len(cache) == len(whole_x)
        compare(result[0], output[past:], weight)

    return call(dice, function, given, judge, "key", "value", "capacity")


@attack("fast.module.MultiHeadAttention.cache")
def of_module(dice: Dice) -> Call:
    module, _ = new_module(dice)
    given: dict[str, Any] = {"batch_size": dice.roll(1, 3), "capacity": dice.roll(1, 3)}

    def judge(cache: Any) -> None:
        need(all(type(n) is int and n > 0 for n in given.values()), "a size is none")
        assert (cache.kept.shape[1], cache.capacity) == tuple(given.values())
        assert cache.kept.dtype == module.output.weight.dtype
        assert cache.kept.device == module.output.weight.device

    return call(dice, module.cache, given, judge)


# The cache ------------------------------------------------------------------------


def new_cache(dice: Dice) -> tuple[KeyValueCache, Tensor]:
    """A cache, and the keys and values that it holds already."""
    if dice.chance(8):
        dice.device = torch.device("meta")
    batch_size, heads, d_k, length = (dice.roll(1, 3) for _ in range(4))
    settings: dict[str, Any] = {"dtype": dice.pick(FLOATS), "device": dice.device}
    capacity = length + dice.roll(0, 3)
    cache = KeyValueCache(
        batch_size, heads, d_k, capacity, grow=dice.chance(2), **settings
    )
    held = dice.floats(2, length, batch_size, heads, d_k, dtype=settings["dtype"])
    cache.append(*held)
    return cache, held


@attack("fast.kv_cache.KeyValueCache")
def construct(dice: Dice) -> Call:
    names = ("batch_size", "heads", "d_k", "capacity")
    given: dict[str, Any] = {name: dice.roll(1, 3) for name in names}

    def judge(cache: Any) -> None:
        need(all(type(n) is int and n > 0 for n in given.values()), "a size is none")
        batch_size, heads, d_k, capacity = given.values()
        assert (len(cache), cache.capacity) == (0, capacity)
        assert cache.keys.shape == cache.values.shape == (batch_size, heads, 0, d_k)

    return call(dice, KeyValueCache, given, judge)


@attack("fast.kv_cache.KeyValueCache.append")
def append(dice: Dice) -> Call:
    cache, held = new_cache(dice)
    room = 5 if cache.grow else cache.capacity - len(cache)
    shape = (dice.roll(0, room), *held.shape[2:])
    given: dict[str, Any] = {
        name: dice.floats(*shape, dtype=held.dtype) for name in ("key", "value")
    }

    def judge(result: Any) -> None:
        for x in given.values():
            dense(x, held, 4)
            need(x.shape[1:] == held.shape[2:], "a size is another")
        need(len(given["key"]) == len(given["value"]), "lengths differ")
        for kept, old, x in zip(
            (cache.keys, cache.values), held, given.values(), strict=True
        ):
            compare(kept.permute(2, 0, 1, 3), wide(torch.cat([old, x])), held)
        assert len(cache) <= cache.capacity

    return call(dice, cache.append, given, judge, "capacity")


def wide(x: Tensor) -> Tensor:
    x = x.detach().double()
    return x if x.is_meta else x.cpu()


@attack("fast.kv_cache.KeyValueCache.reorder")
def reorder(dice: Dice) -> Call:
    cache, held = new_cache(dice)
    batch_size = held.shape[2]
    index = dice.ints(0, batch_size - 1, dice.roll(1, 4))
    given: dict[str, Any] = {"index": index.to(dice.pick((torch.int64, torch.int32)))}
    dice.tame = not index.is_meta  # there is nothing to be read of

    def judge(result: Any) -> None:
        index = given["index"]
        whole(index, held)
        need(index.dtype in (torch.int32, torch.int64), "they are no integers")
        need(index.dim() == 1 and len(index) > 0, "it is no list of items")
        need(not index.is_meta, "there are no values")
        order = index.tolist()
        need(all(0 <= n < batch_size for n in order), "there is no such item")
        for kept, old in zip((cache.keys, cache.values), held, strict=True):
            compare(kept.permute(2, 0, 1, 3), wide(old[:, order]), held)

    return call(dice, cache.reorder, given, judge)


# By blocks ------------------------------------------------------------------------


def new_call(dice: Dice) -> tuple[dict[str, Any], Tensor, dict[str, Any]]:
    """Queries, keys, values, a mask, and what chance and causality say."""
    if dice.chance(8):
        dice.device = torch.device("meta")
    heads, d_k = dice.roll(1, 9), dice.roll(1, 3)
    q_len, k_len, batch_size = sizes(dice)
    like = dice.floats(1, dtype=dice.pick(FLOATS))
    shapes = [(n, batch_size, heads, d_k) for n in (q_len, k_len, k_len)]
    xs = inputs(dice, *shapes, like=like)
    given: dict[str, Any] = dict(zip(("query", "key", "value"), xs, strict=True))
    mask = new_mask(dice, q_len, k_len, batch_size)
    given |= {"mask": mask if mask is None else mask.bool()}
    given |= {"dropout_prob": dice.pick((0.0, 0.0, 0.5, 1.0))}
    return given, like, {"is_causal": dice.chance(2), "seed": dice.roll(0, 9)}


def by_oracle(
    given: dict[str, Any], is_causal: bool, like: Tensor
) -> tuple[Tensor, Tensor, float]:
    """The context and the weights `[q_len, k_len, batch_size, heads]`, and how many
    of these are to be dropped."""
    query, key, value, mask, p = list(given.values())[:5]
    need(isinstance(query, Tensor) and query.dtype in FLOATS, "no floats")
    for x in (query, key, value):
        dense(x, query, 4)
        need(x.shape[1:] == query.shape[1:], "sizes differ")
    need(0 not in query.shape[2:], "there is no head, or no width")
    need(type(p) in (int, float) and 0 <= p <= 1, "no probability")
    if mask is not None:
        whole(mask, query)
        need(mask.dtype == torch.bool, "the mask is not bool")
    full = (len(query), len(key), query.shape[1])
    may = may_read(mask, is_causal, full).to(query.device)
    heads, d_k = query.shape[2:]
    weights: Weights = dict.fromkeys(
        ("query", "key", "value", "output"), eye(heads * d_k)
    )
    flat = (x.flatten(-2) for x in (query, key, value))
    context, attn = right(*flat, may, weights, heads)
    return context.unflatten(-1, (heads, d_k)), attn, p


def judge_context(context: Tensor, given: dict[str, Any], causal: bool) -> Tensor:
    expected, attn, p = by_oracle(given, causal, given["query"])
    if p in (0, 1):
        compare(context, expected if p == 0 else expected * 0, given["query"])
    assert context.shape == expected.shape
    return attn


@attack("fast.blockwise.attend")
def attend(dice: Dice) -> Call:
    given, _, rest = new_call(dice)

    def function(query: Any, key: Any, value: Any, mask: Any, dropout_prob: Any) -> Any:
        rule = blocks.Rule(mask, rest["is_causal"], dropout_prob, rest["seed"])
        with small():
            return blockwise.attend(query, key, value, rule)

    def judge(result: Any) -> None:
        judge_context(result, given, rest["is_causal"])

    return call(dice, function, given, judge, mask=odd_mask(dice))


@attack("fast.blockwise.attend_and_show")
def attend_and_show(dice: Dice) -> Call:
    given, _, rest = new_call(dice)
    average = dice.chance(2)

    def function(query: Any, key: Any, value: Any, mask: Any, dropout_prob: Any) -> Any:
        rule = blocks.Rule(mask, rest["is_causal"], dropout_prob, rest["seed"])
        with small():
            return blockwise.attend_and_show(query, key, value, rule, average=average)

    def judge(result: Any) -> None:
        attn = judge_context(result[0], given, rest["is_causal"]).permute(2, 3, 0, 1)
        compare(result[1], attn.mean(1) if average else attn, given["query"])

    return call(dice, function, given, judge, mask=odd_mask(dice))


@attack("fast.blockwise.widen")
def mapped(dice: Dice) -> Call:
    """Under `vmap`, with gradients."""
    heads, d_k, n = dice.roll(1, 9), dice.roll(1, 3), dice.roll(1, 3)
    q_len, k_len, batch_size = dice.roll(1, 4), dice.roll(1, 4), dice.roll(1, 3)
    dtype = dice.pick((torch.float32, torch.float64))
    given: dict[str, Any] = {
        name: dice.floats(n, length, batch_size, heads, d_k, dtype=dtype)
        for name, length in (("query", q_len), ("key", k_len), ("value", k_len))
    }
    given |= {"mask": dice.bools(n, q_len, k_len, batch_size)}
    is_causal = dice.chance(2)

    def loss(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
        rule = blocks.Rule(mask, is_causal)
        context = blockwise.attend(query, key, value, rule)
        return context.square().sum(), context

    slope = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)

    def function(query: Any, key: Any, value: Any, mask: Any) -> Any:
        with small():
            return torch.func.vmap(slope)(query, key, value, mask)

    def judge(result: Any) -> None:
        gradients, contexts = result
        for i in range(n):
            one = {name: x[i] for name, x in given.items()} | {"dropout_prob": 0.0}
            judge_context(contexts[i], one, is_causal)
            # The slope in a random direction is that of two steps.
            xs = [one[name].detach().double() for name in ("query", "key", "value")]
            ways = [torch.randn_like(x) for x in xs]
            ends = []
            for sign in (-1, 1):
                moved = [x + sign * 1e-5 * d for x, d in zip(xs, ways, strict=True)]
                ends.append(loss(*moved, one["mask"])[0])
            right = (ends[1] - ends[0]) / 2e-5
            ours = sum(
                (g[i].double() * d).sum() for g, d in zip(gradients, ways, strict=True)
            )
            assert math.isclose(ours, right, rel_tol=1e-3, abs_tol=1e-3)

    # Nothing is spoilt: `vmap` has its own words for what it cannot map.
    return Call(function, given, judge, dice.tame, dice.notes)
