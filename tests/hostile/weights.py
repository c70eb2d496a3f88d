"""Attacks on the conversion of weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headnotes import convert, fast, mha
from headnotes.implementations import batch_first, causal, stages, valid_lens
from hostile.attention import awake, call, need
from hostile.dice import FLOATS, Dice
from hostile.outcome import Call, tensors
from hostile.registry import attack

KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    "core": lambda d, heads: mha.MultiHeadAttention(heads, d),
    "causal": lambda d, heads: causal.MultiHeadAttention(d, d, 3, 0.1, heads),
    "valid_lens": lambda d, heads: valid_lens.MultiHeadAttention(d, heads, 0.1),
    "batch_first": lambda d, heads: batch_first.MultiHeadAttention(d, heads),
    "v1": lambda d, heads: stages.SelfAttention_v1(d, d),
    "v2": lambda d, heads: stages.SelfAttention_v2(d, d),
    "causal_head": lambda d, heads: stages.CausalAttention(d, d, 3, 0.1),
    "wrapper": lambda d, heads: stages.MultiHeadAttentionWrapper(d, d, 3, 0.1, heads),
    "torch": lambda d, heads: nn.MultiheadAttention(d, heads),
    "fused": lambda d, heads: convert.Fused(d, heads, "heads 3 d_k"),
    "fast": lambda d, heads: fast.MultiHeadAttention(heads, d),
}

TYPES = tuple(type(make(2, 1)) for make in KINDS.values())


class Child(mha.MultiHeadAttention):
    """It may compute anything."""


def odd_module(dice: Dice) -> Callable[[Any], Any]:
    """What is no attention, or none that can be read."""

    def spoil(module: Any) -> Any:
        if not isinstance(module, nn.Module):
            return None
        odd: list[Callable[[], Any]] = [
            lambda: nn.Linear(2, 2),
            lambda: nn.Module(),
            lambda: nn.Sequential(),
            lambda: Child(1, 2),
            lambda: mha.MultiHeadAttention,
            lambda: valid_lens.MultiHeadAttention(2, 1, 0.0),
            lambda: nn.MultiheadAttention(2, 1, add_bias_kv=True),
            lambda: nn.MultiheadAttention(2, 1, add_zero_attn=True),
            lambda: nn.MultiheadAttention(2, 1, kdim=3, vdim=5),
            lambda: module.to("meta"),
            lambda: mixed(module),
        ]
        return dice.pick(odd)()

    return spoil


def mixed(module: nn.Module) -> nn.Module:
    """Some of its parameters are of another dtype."""
    for parameter in list(module.parameters())[:1]:
        parameter.data = parameter.data.to(torch.float16)
    return module


def new_module(dice: Dice) -> tuple[str, Any]:
    kind = dice.pick(list(KINDS))
    heads = dice.roll(1, 2)
    module = KINDS[kind](heads * dice.roll(1, 2), heads)
    if kind == "valid_lens":
        width = heads * 2
        module(*(torch.zeros(1, 1, width) for _ in range(3)), None)
    return kind, awake(dice, module)


def readable(module: Any) -> None:
    need(type(module) in TYPES, "no format describes it")
    parameters = list(module.parameters())
    lazy = any(isinstance(p, nn.UninitializedParameter) for p in parameters)
    need(not lazy, "it is lazy")
    need(len({(p.dtype, p.device) for p in parameters}) == 1, "its parameters differ")


def shared(result: Any, parameters: Iterable[Tensor]) -> bool:
    """Does a result lie in the memory of some parameters?"""
    taken = {p.untyped_storage().data_ptr() for p in parameters if p.numel()}
    made = [x for x in tensors(result) if x.numel() and not x.is_meta]
    return any(x.untyped_storage().data_ptr() in taken for x in made)


@attack("convert.extract")
def read(dice: Dice) -> Call:
    _, module = new_module(dice)
    given = {"module": module}

    def judge(result: Any) -> None:
        module = given["module"]
        readable(module)
        parameters = list(module.parameters())
        for part in result[1:]:
            assert part.weight.dtype == parameters[0].dtype
            assert part.weight.device == parameters[0].device
        assert not shared(result, parameters)
        d_out = len(result.query.weight)
        assert d_out % result.heads == 0
        assert len(result.key.weight) == len(result.value.weight) == d_out

    return call(dice, convert.extract, given, judge, module=odd_module(dice))


ORDERS = ("3 heads d_k", "heads 3 d_k")
SETTINGS: tuple[tuple[str, Any], ...] = (
    ("dropout", 0.5),
    ("dropout_prob", 0.5),
    ("context_length", 5),
    ("batch_first", True),
    ("order", "3 heads d_k"),
    ("bias", True),
    ("qkv_bias", True),
    ("dropout", 2.0),
    ("dropout", "much"),
    ("context_length", -1),
    ("order", "d_k heads 3"),
    ("order", ["3"]),
    ("bias", False),
    ("qkv_bias", False),
    ("heads", 2),
    ("d_model", 3),
    ("nonsense", 1),
)


@attack("convert.to")
def to(dice: Dice) -> Call:
    _, module = new_module(dice)
    given: dict[str, Any] = {"module": module, "target": dice.pick(list(KINDS))}
    settings = dict(dice.pick(SETTINGS) for _ in range(dice.pick((0, 0, 0, 1, 2))))
    given |= settings

    def wrong(_: Any) -> Any:
        return dice.pick(
            ("nonsense", "", None, ["core"], 3, {}, mha.MultiHeadAttention)
        )

    def judge(result: Any) -> None:
        module, target = given["module"], given["target"]
        readable(module)
        need(target in KINDS, "there is no such target")
        dropout = given.get("dropout", 0.0)
        if target != "torch":  # which takes anything, and we may not ask more of it
            need(type(dropout) in (int, float) and 0 <= dropout <= 1, "no probability")
        length, order = given.get("context_length", 1), given.get("order", ORDERS[0])
        need(type(length) is int and length > 0, "it is no length")
        need(order in ORDERS, "there is no such order")
        need(given.keys().isdisjoint({"heads", "d_model", "nonsense"}), "no setting")
        there, here = convert.extract(result), convert.extract(module)
        assert there.heads == here.heads
        assert result.training == module.training
        assert torch.random.get_rng_state().equal(before), "used random numbers"
        for name in convert.PARTS:
            got, wanted = getattr(there, name), getattr(here, name)
            for a, b in (
                (got.weight, wanted.weight),
                (got.bias_or_zeros(), wanted.bias_or_zeros()),
            ):
                assert a.dtype == b.dtype
                assert a.device == b.device
                assert a.is_meta or a.equal(b), f"{name}: {a} for {b}"
        assert not shared(result, module.parameters())

    made = call(
        dice,
        convert.to,
        given,
        judge,
        "bias",
        "qkv_bias",
        "output_bias",
        "dropout_prob",
        *dict(SETTINGS),
        target=wrong,
        module=odd_module(dice),
    )
    before = torch.random.get_rng_state()
    made.tame = False  # most pairs lose something, and say so
    return made


@attack("convert.Projection.bias_or_zeros")
def bias_or_zeros(dice: Dice) -> Call:
    weight = dice.floats(dice.roll(0, 3), dice.roll(0, 3), dtype=dice.pick(FLOATS))
    bias = dice.floats(len(weight), dtype=weight.dtype) if dice.chance(2) else None
    projection = convert.Projection(dice.disguise("weight", weight), bias)

    def judge(result: Any) -> None:
        assert result.shape == (len(weight),)
        assert result.dtype == weight.dtype
        assert result is bias if bias is not None else not result.any()

    return Call(projection.bias_or_zeros, {}, judge, dice.tame, dice.notes)
