"""An attack on the `forward` of any variant; the right answer is given from outside."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import loops
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

# From a module in float64 on the CPU, the arguments of the call, and its mask in full:
# the right output, or None if only the shape is known.
Answer = Callable[[Any, dict[str, Any], Tensor], Tensor | None]
# The steps of the loops that a variant changes.
Steps = Callable[[Any, dict[str, Any]], dict[str, Any]]


def forward(
    build: Callable[[Dice], Any],
    answer: Answer,
    extra: Callable[[Dice, int, int, int], dict[str, Any]] | None = None,
    *,
    mask_per_query: bool = True,
    coarse: bool = False,
) -> Callable[[Dice], Call]:
    """An attack on the `forward` of a variant, whose further arguments are `extra`.

    The values of `coarse` ones cannot be compared in half precision.
    """

    def attack(dice: Dice) -> Call:
        module = awake(dice, build(dice))
        weight = module.output.weight
        d_model = len(weight)
        q_len, k_len, batch_size = sizes(dice)
        shapes = [(n, batch_size, d_model) for n in (q_len, k_len, k_len)]
        xs = inputs(dice, *shapes, like=weight)
        given: dict[str, Any] = dict(zip(("query", "key", "value"), xs, strict=True))
        rows = q_len if mask_per_query else 1
        given["mask"] = new_mask(dice, rows, k_len, batch_size)
        if extra:
            given |= extra(dice, q_len, k_len, batch_size)
            dice.tame &= q_len <= k_len  # or there are queries without positions

        def judge(result: Any) -> None:
            query, key, value, mask = list(given.values())[:4]
            for x in (query, key, value):
                dense(x, weight, 3)
                need(x.shape[2] == d_model, "a width differs")
            need(query.shape[1] == key.shape[1] == value.shape[1], "batch sizes differ")
            need(len(key) == len(value), "keys and values differ in length")
            if mask is not None:
                whole(mask, weight)
            may = allowed(mask, (len(query), len(key), query.shape[1]))
            twin = module if weight.is_meta else copy.deepcopy(module).cpu().double()
            expected = answer(twin, given, may)
            half = weight.dtype not in (torch.float32, torch.float64)
            if expected is None or (coarse and half):
                expected = torch.full(query.shape, math.nan)
            compare(result, expected.detach(), weight)

        return call(dice, module, given, judge, mask=odd_mask(dice))

    return attack


def wide(x: Tensor) -> Tensor:
    return x.detach().cpu().double()


def by_loops(
    steps: Steps = lambda module, given: {},
    restrict: Callable[[Any, Tensor], Tensor] = lambda module, may: may,
) -> Answer:
    """The answer of the loops; `restrict` is what the variant does to the mask."""

    def answer(module: Any, given: dict[str, Any], may: Tensor) -> Tensor | None:
        changed = steps(module, given)
        query, key, value = (given[name] for name in ("query", "key", "value"))
        if query.is_meta or not query.numel():
            return None
        may = restrict(module, may)
        xs = [wide(x) for x in (query, key, value)]
        expected = loops.attention(module, *xs, may, **changed)
        # As in the core, what a query may attend to must be finite for all queries of a
        # batch item, because zero times NaN is NaN.
        seen = may.any(dim=0) & ~xs[2].isfinite().all(dim=-1)
        expected[:, seen.any(dim=0)] = math.nan
        return expected

    return answer
