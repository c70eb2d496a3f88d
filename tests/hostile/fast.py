"""Attacks on attention at full speed: its module, its KV cache, and its methods."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from headnotes import fast
from headnotes.fast import KeyValueCache, Rotary, Scores, Widths, blockwise
from headnotes.fast import attention as methods
from hostile.attention import (
    Weights,
    allowed,
    awake,
    call,
    compare,
    dense,
    inputs,
    item_order,
    linear,
    need,
    new_mask,
    odd_mask,
    right,
    sizes,
    whole,
)
from hostile.dice import FLOATS, Dice, Marked
from hostile.outcome import Call
from hostile.registry import attack

LONG = 300  # tiles have 128 rows, and up to 128 keys are few


@contextmanager
def surroundings(tiny: bool, nan_memory: bool = False) -> Iterator[None]:
    """Tiles of two rows, for every path at tiny sizes; NaN in uninitialized memory."""
    with ExitStack() as stack:
        if tiny:
            changes = {"TILE_ROWS": 2, "TILE_SCORES": 1}
            stack.enter_context(mock.patch.multiple(blockwise, **changes))
            stack.enter_context(mock.patch("headnotes.fast.formula.SHORT_KEYS", 1))
        if nan_memory:
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        yield


def may_attend(mask: Any, is_causal: bool, full: tuple[int, ...]) -> Tensor:
    """A mask and causality, in full and on the CPU."""
    may = allowed(mask, full)
    past = torch.ones(full[:2]).bool().tril(full[1] - full[0])
    return may & past.unsqueeze(-1) if is_causal else may


def formula(
    query: Tensor, key: Tensor, value: Tensor, may: Tensor
) -> tuple[Tensor, Tensor]:
    """Context, and weights `[q_len, k_len, batch_size, heads]`, by plain operators."""
    scores = torch.einsum("ibhd,jbhd->ijbh", query, key) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~may.unsqueeze(-1), -math.inf)
    # There may be no key at all.
    largest = scores.detach().sum(1, keepdim=True).fill_(-math.inf)
    largest = torch.cat([scores.detach(), largest], 1).amax(1, keepdim=True)
    exponentials = (scores - largest.nan_to_num(0, 0, 0)).exp()
    total = exponentials.sum(1, keepdim=True)
    weights = exponentials / torch.where(total > 0, total, 1)
    return torch.einsum("ijbh,jbhd->ibhd", weights, value), weights


def right_or_long(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    may: Tensor,
    weights: Weights,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """As `right`; of long sequences by operators, as loops would take minutes."""
    if query.is_meta or max(len(query), len(key)) < 9:
        return right(query, key, value, may, weights, heads)
    need(query.shape[1] == key.shape[1] == value.shape[1], "batch sizes differ")
    need(len(key) == len(value), "keys and values differ in length")
    xs = []
    for name, x in (("query", query), ("key", key), ("value", value)):
        weight, bias = (None if w is None else wide(w) for w in weights[name])
        need(x.shape[-1] == weight.shape[1], "a width differs")
        xs.append(
            nn.functional.linear(wide(x), weight, bias).unflatten(-1, (heads, -1))
        )
    context, attn = formula(*xs, may.cpu())
    weight, bias = (None if w is None else wide(w) for w in weights["output"])
    return nn.functional.linear(context.flatten(-2), weight, bias), attn


# The module -----------------------------------------------------------------------


class Surrounded(nn.Module):
    """A module, called with gradients or without, at tiny sizes or real ones."""

    def __init__(self, module: fast.MultiHeadAttention, dice: Dice, tiny: bool) -> None:
        super().__init__()
        self.module, self.tiny = module, tiny
        self.needs_grad, self.nan_memory = dice.chance(2), dice.chance(3)

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
        grad = torch.set_grad_enabled(self.needs_grad)
        with surroundings(self.tiny, self.nan_memory), grad:
            return self.module(**call, average_weights=average_weights)


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
    tiny = not dice.chance(5)
    if not tiny:
        q_len, k_len = dice.roll(1, LONG), dice.roll(1, LONG)
    k_len = q_len if dice.chance(2) else k_len
    shapes = [(n, batch_size, weight.shape[0]) for n in (q_len, k_len, k_len)]
    xs = inputs(dice, *shapes, like=weight)
    given: dict[str, Any] = dict(zip(("query", "key", "value"), xs, strict=True))
    given |= {"mask": new_mask(dice, q_len, k_len, batch_size)}
    flags = {name: dice.chance(2) for name in ("is_causal", "need_weights")}
    flags["average_weights"] = flags["need_weights"] and dice.chance(2)
    drops_all = dice.chance(8)
    if drops_all:
        module.dropout = nn.Dropout(1.0)
    # Padding may hold anything.
    padding_overflows = False
    if given["mask"] is not None and not weight.is_meta and dice.chance(3):
        bad = dice.pick((math.nan, math.inf, -math.inf, torch.finfo(weight.dtype).max))
        mask = given["mask"].bool().any(0).cpu()  # [k_len, batch_size or 1]
        padding = ~mask.expand(k_len, batch_size).to(weight.device)
        for name in ("key", "value"):
            given[name] = given[name].masked_fill(padding.unsqueeze(-1), bad)
        padding_overflows = math.isfinite(bad)
        dice.notes.append(f"padding is {bad}")

    def judge(result: Any) -> None:
        *xs, mask = list(given.values())[:4]
        for x in xs:
            dense(x, weight, 3)
        full = (len(xs[0]), len(xs[1]), xs[0].shape[1])
        if mask is not None:
            whole(mask, weight)
        may = may_attend(mask, flags["is_causal"], full).to(weight.device)
        unseen = ~may.any(0).unsqueeze(-1)  # [k_len, batch_size, 1]
        if mask is not None and all(x.shape[:2] == unseen.shape[:2] for x in xs[1:]):
            xs[1:] = (x.masked_fill(unseen.to(x.device), 0) for x in xs[1:])
        if padding_overflows and any(type(x) is Marked for x in given.values()):
            return  # a subclass hides its values, so its projections are not cleared
        output, attn = right_or_long(*xs, may, weights, heads)
        if drops_all and module.dropout.training:
            # What is left is the bias of the last layer, and 0 * NaN where a value that
            # may be attended to is not finite.
            bias = weights["output"][1]
            unit = torch.zeros(output.shape[-1]) if bias is None else wide(bias)
            whole_values = (
                wide(xs[2]).isfinite().all(0).all(-1)[:, None]
            )  # [batch_size, 1]
            output = torch.where(whole_values, unit, math.nan).expand(output.shape)
        if flags["need_weights"]:
            attn = attn.mean(-1) if flags["average_weights"] else attn
            compare(result[1], attn, weight)
            result = result[0]
        compare(result, output, weight)

    made = call(dice, Surrounded(module, dice, tiny), given, judge, mask=odd_mask(dice))
    given |= flags  # used by their truth, so none of them is wrong
    return made


@attack("fast.module.MultiHeadAttention.decode")
def decode(dice: Dice) -> Call:
    module, weights = new_module(dice)
    weight = module.output.weight
    past, seq_len, batch_size = dice.roll(0, 3), dice.roll(0, 3), dice.roll(1, 3)
    capacity = past + seq_len + dice.roll(0, 2) or 1
    cache = module.cache(batch_size, capacity)
    before = dice.floats(past, batch_size, weight.shape[0]).to(weight)
    with surroundings(True):
        module.decode(before, cache)
    given: dict[str, Any] = {"x": dice.floats(seq_len, *before.shape[1:]).to(weight)}

    def function(x: Any) -> Any:
        with surroundings(True):
            return module.decode(x, cache)

    def judge(result: Any) -> None:
        x = given["x"]
        dense(x, weight, 3)
        need(x.shape[1] == batch_size, "the cache is for another batch")
        whole_x = torch.cat([before, x.detach()])
        need(len(whole_x) <= capacity, "the cache is full")
        full = (len(whole_x), len(whole_x), batch_size)
        may = may_attend(None, True, full).to(weight.device)
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
        assert (cache.buffer.shape[1], cache.capacity) == tuple(given.values())
        assert cache.buffer.dtype == module.output.weight.dtype
        assert cache.buffer.device == module.output.weight.device

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


@attack("fast.module.KeyValueCache")
def construct(dice: Dice) -> Call:
    names = ("batch_size", "heads", "d_k", "capacity")
    given: dict[str, Any] = {name: dice.roll(1, 3) for name in names}

    def judge(cache: Any) -> None:
        need(all(type(n) is int and n > 0 for n in given.values()), "a size is none")
        batch_size, heads, d_k, capacity = given.values()
        assert (len(cache), cache.capacity) == (0, capacity)
        assert cache.keys.shape == cache.values.shape == (batch_size, heads, 0, d_k)

    return call(dice, KeyValueCache, given, judge)


@attack("fast.module.KeyValueCache.append")
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


@attack("fast.module.KeyValueCache.reorder")
def reorder(dice: Dice) -> Call:
    cache, held = new_cache(dice)
    batch_size = held.shape[2]
    index = dice.ints(0, batch_size - 1, dice.roll(1, 4))
    given: dict[str, Any] = {"index": index.to(dice.pick((torch.int64, torch.int32)))}
    dice.tame = not index.is_meta  # there is nothing to be read of

    def judge(result: Any) -> None:
        order = item_order(given["index"], held, batch_size)
        for kept, old in zip((cache.keys, cache.values), held, strict=True):
            compare(kept.permute(2, 0, 1, 3), wide(old[:, order]), held)

    return call(dice, cache.reorder, given, judge)


# The methods -------------------------------------------------------------------------


def disguised(dice: Dice, given: dict[str, Any]) -> None:
    """Tensors that lie otherwise in memory, or are of another kind."""
    for name, x in given.items():
        if isinstance(x, Tensor) and dice.chance(3):
            given[name] = dice.disguise(name, x)


@attack("fast.attention.attention")
def attend(dice: Dice) -> Call:
    """Valid inputs only, since it is the module that checks them."""
    if dice.chance(8):
        dice.device = torch.device("meta")
    tiny = not dice.chance(3)
    q_len, k_len, batch_size = sizes(dice)
    heads, d_k = dice.roll(1, 9), dice.roll(1, 3)
    if not tiny:
        q_len, k_len = dice.roll(1, LONG), dice.roll(1, LONG)
        heads, batch_size = dice.roll(1, 3), dice.roll(1, 2)
    k_len = q_len if dice.chance(3) else k_len
    dtype = dice.pick(FLOATS)
    shapes = [(n, batch_size, heads, d_k) for n in (q_len, k_len, k_len)]
    xs = inputs(dice, *shapes, like=dice.floats(1, dtype=dtype))
    given: dict[str, Any] = dict(zip(("query", "key", "value"), xs, strict=True))
    mask = new_mask(dice, q_len, k_len, batch_size)
    given |= {"mask": mask if mask is None else mask.bool()}
    disguised(dice, given)
    mask, is_causal, p = given["mask"], dice.chance(2), dice.pick((0.0, 0.0, 0.5, 1.0))
    shown, mean = dice.chance(2), dice.chance(2)
    derivatives, nan_memory = dice.pick((0, 1, 2)), dice.chance(3)
    full = q_len, k_len, batch_size
    may = may_attend(mask, is_causal, full)
    # Rows that may attend to a key that is not finite, or overflows, are not compared.
    sound = torch.ones(q_len, batch_size).bool()
    clean = dict(given)
    subclass = any(type(x) is Marked for x in given.values())
    if k_len and batch_size and dice.device.type != "meta" and dice.chance(3):
        derivatives = 0
        largest = torch.finfo(dtype).max
        bad = dice.pick((math.nan, math.inf, -math.inf, largest, -largest / 2))
        j = dice.roll(0, k_len - 1)
        given["key"] = given["key"].detach().clone()
        given["key"][j] = bad
        sound = ~may[:, j]
        if mask is not None and not subclass:
            padding = ~mask.any(0).expand(k_len, batch_size)
            hidden = padding.to(given["value"].device)[..., None, None]
            given["value"] = given["value"].detach().masked_fill(hidden, bad)
        dice.notes.append(f"key {j}, and padding, is {bad}")

    def function(query: Any, key: Any, value: Any, mask: Any) -> Any:
        options: dict[str, Any] = {"mask": mask, "is_causal": is_causal}
        options |= {"need_weights": shown, "average_weights": shown and mean}
        x = query, key, value
        if derivatives:
            x = tuple(t.detach().requires_grad_() for t in x)
        with surroundings(tiny, nan_memory):
            context, weights = methods.attention(*x, dropout=nn.Dropout(p), **options)
            if not derivatives:
                return context, weights, ()
            loss = context.square().sum() / 2
            if weights is not None:
                loss = loss + weights.square().sum()
            gradients = torch.autograd.grad(loss, x, create_graph=derivatives == 2)
            if derivatives == 2 and not context.is_meta:
                total = sum(g.square().sum() for g in gradients)
                second = torch.autograd.grad(total, x, allow_unused=True)
                half = dtype in (torch.float16, torch.bfloat16)
                for g in second:
                    assert half or g is None or g.isfinite().all()
        return context, weights, gradients

    def judge(result: Any) -> None:
        context, weights, gradients = result
        like = dice.floats(1, dtype=dtype)
        assert context.shape == (q_len, batch_size, heads, d_k)
        if context.is_meta:
            return
        for name in ("key", "value"):
            clean[name] = clean[name].detach()
        xs = [wide(clean[name]).requires_grad_() for name in ("query", "key", "value")]
        expected, attn = formula(*xs, may)
        kept = 0.0 if p == 1 else 1.0
        if p in (0, 1):
            rows = sound.to(context.device)
            compare(context[rows], (expected * kept)[sound].detach(), like)
        if weights is not None:
            right = attn.mean(-1) if mean else attn
            rows = sound.to(context.device)
            right = right.transpose(1, 2)[sound].detach()
            compare(weights.transpose(1, 2)[rows], right, like)
        if gradients and p in (0, 1) and dtype in (torch.float32, torch.float64):
            loss = (expected * kept).square().sum() / 2
            if weights is not None:
                loss = loss + (attn.mean(-1) if mean else attn).square().sum()
            for ours, theirs in zip(
                gradients, torch.autograd.grad(loss, xs), strict=True
            ):
                compare(ours, theirs, like)

    return Call(function, given, judge, dice.tame, dice.notes)


# Components --------------------------------------------------------------------------


@attack("fast.components.Widths")
def widths(dice: Dice) -> Call:
    names = ("d_k", "d_v", "key", "value")
    given: dict[str, Any] = {name: dice.pick((None, 1, 2, 3)) for name in names}

    def judge(made: Any) -> None:
        for name, width in given.items():
            need(width is None or type(width) is int, f"{name} is no number")
            need(width is None or width > 0, f"{name} is no width")
        assert vars(made) == given

    return call(dice, Widths, given, judge)


@attack("fast.components.Rotary")
def of_rotary(dice: Dice) -> Call:
    given: dict[str, Any] = {"frequencies": dice.floats(dice.roll(0, 3))}
    x, positions = torch.randn(2, 1, 3, 32), torch.tensor([0, 5])

    def function(frequencies: Any) -> Tensor:
        return Rotary(frequencies)(x, positions)

    def judge(result: Tensor) -> None:
        frequencies = given["frequencies"]
        need(isinstance(frequencies, Tensor), "they are no tensor")
        need(frequencies.dtype in (torch.float32, torch.float64), "too coarse")
        need(frequencies.dim() == 1 and not frequencies.is_meta, "they are no list")
        if frequencies.isfinite().all():
            # A rotation changes no length.
            compare(result.norm(dim=-1), x.norm(dim=-1).double(), x)

    return call(dice, function, given, judge)


@attack("fast.components.Scores")
def decoder(dice: Dice) -> Call:
    """A decoder with all components: in pieces, and in one causal pass."""
    given: dict[str, Any] = {"scale": 0.5, "soft_cap": 2.0, "sinks": dice.chance(2)}
    window, length = dice.pick((None, 1, 2, 3)), dice.roll(2, 6)
    padding = torch.tensor([0, dice.roll(0, 1)])
    settings: dict[str, Any] = {"kv_heads": dice.pick((1, 2)), "window": window}
    settings |= {"rotary": Rotary(torch.ones(1)), "widths": Widths(d_k=2, d_v=3)}

    def alibi(i: Tensor, j: Tensor) -> Tensor:
        return -(i.unsqueeze(1) - j).abs().unsqueeze(-1) / 4

    bias = alibi if dice.chance(2) else None

    def function(scale: Any, soft_cap: Any, sinks: Any) -> tuple[Tensor, Tensor]:
        scores = Scores(scale, soft_cap, bias, sinks)
        module = fast.MultiHeadAttention(4, 8, 0.0, scores=scores, **settings).eval()
        x = torch.randn(length, 2, 8)
        mask = (torch.arange(length).unsqueeze(1) >= padding).unsqueeze(0)
        cache = module.cache(2, length, left_padding=padding)
        with surroundings(tiny=True):
            pieces = [module.decode(part, cache)[0] for part in (x[:-1], x[-1:])]
            whole = module(query=x, key=x, value=x, mask=mask, is_causal=True)
        assert len(cache.positions) == min(length, window or length)
        return torch.cat(pieces)[1:], whole[1:].detach()

    def judge(result: tuple[Tensor, Tensor]) -> None:
        for name in ("scale", "soft_cap"):
            number = given[name]
            need(number is None or type(number) in (int, float), f"{name} is no number")
            need(number is None or 0 < number < math.inf, f"{name} is out of range")
        need(type(given["sinks"]) is bool, "it is no flag")
        compare(result[0], result[1].double(), result[1])

    return call(dice, function, given, judge)
