"""Attacks on constructors: sizes that do not fit, and settings that are none."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headnotes import convert, fast, mha, positions
from headnotes.implementations import batch_first, causal, stages, valid_lens
from hostile.attention import call, need
from hostile.dice import Dice
from hostile.outcome import Call
from hostile.registry import ATTACKS

# Of each constructor: the number that another must divide, and that other.
DIVIDES = {"heads": "d_model", "num_heads": "d_out", "n_heads": "d_model"}


def looped(kind: type[nn.Module], given: dict[str, Any]) -> bool:
    """Whether the constructor would go on making modules for years."""
    number = given.get("num_heads")
    many = type(number) is int and number > 2**20
    return many and kind is stages.MultiHeadAttentionWrapper


def constructor(kind: type[nn.Module], **plain: Any) -> Callable[[Dice], Call]:
    """An attack on `kind`; `plain` are sizes, probabilities and flags that fit."""
    divides = (
        {**DIVIDES, "num_heads": "num_hiddens"} if "num_hiddens" in plain else DIVIDES
    )
    divides = {} if kind is stages.MultiHeadAttentionWrapper else divides
    divides = {} if kind is mha.PrepareForMultiHeadAttention else divides
    divides = {**divides, "kv_heads": "heads"} if "kv_heads" in plain else divides

    def attack(dice: Dice) -> Call:
        given = dict(plain)
        # On "meta" a size may be anything, as nothing is filled.
        meta = dice.chance(2)
        for name, value in given.items():
            if type(value) is int:
                given[name] = value * dice.roll(1, 3) + dice.roll(0, 2)
                if meta and dice.chance(2):
                    given[name] = dice.pick((2**31, 2**31 - 1, 2**33 + 1))
        for part, whole in divides.items():
            if part in given and given[whole] % given[part]:
                dice.tame = False
        if looped(kind, given):
            given["num_heads"] = 1
        # Attention has weights as wide as high, and of such widths no memory has room
        # for the square; a table has room for the product of its sizes, or it has not.
        widths = sorted(v for v in given.values() if type(v) is int)
        table = kind in (positions.Embeddings, positions.PositionalEncoding)
        if math.prod(widths) > 2**58 if table else widths and widths[-1] > 2**29:
            dice.tame = False

        def make(**arguments: Any) -> nn.Module:
            with torch.device("meta" if meta else dice.device):
                return kind(**arguments)

        make.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
        make.__qualname__ = f"{kind.__qualname__} on {'meta' if meta else dice.device}"

        def judge(module: Any) -> None:
            for name, value in given.items():
                size, plain_value = type(value) is int, plain[name]
                if type(plain_value) is int:
                    need(size and value > 0, f"{name} is no size")
                elif type(plain_value) is float:
                    number = type(value) in (int, float)
                    need(number and 0 <= value <= 1, f"{name} is no probability")
            for part, whole in divides.items():
                if part in given:
                    need(given[whole] % given[part] == 0, f"{part} does not divide")
            assert isinstance(module, kind)
            device = "meta" if meta else dice.device.type
            assert all(p.device.type == device for p in module.parameters())
            for name in ("heads", "d_model", "d_out", "num_heads", "context_length"):
                kept = getattr(module, name, None)
                assert name not in given or type(kept) is not int or kept == given[name]

        # A flag is read by its truth, as everywhere in Python: none of them is wrong.
        flags = {n: bool(dice.roll(0, 1)) for n, v in plain.items() if type(v) is bool}
        spoilt = {name: given[name] for name in given if name not in flags}
        made = call(dice, make, spoilt, judge)
        if looped(kind, spoilt):
            spoilt["num_heads"] = 0
        given |= spoilt
        made.arguments = given | flags
        return made

    return attack


OWN = "implementations"
ATTACKS |= {
    "mha.PrepareForMultiHeadAttention": constructor(
        mha.PrepareForMultiHeadAttention, d_model=2, heads=1, d_k=1, bias=True
    ),
    "mha.MultiHeadAttention": constructor(
        mha.MultiHeadAttention, heads=1, d_model=2, dropout_prob=0.1, bias=True
    ),
    "fast.module.MultiHeadAttention": constructor(
        fast.MultiHeadAttention, heads=1, d_model=2, dropout_prob=0.1, bias=True
    ),
    f"{OWN}.batch_first.MultiHeadAttention": constructor(
        batch_first.MultiHeadAttention, d_model=2, n_heads=1, dropout=0.1
    ),
    f"{OWN}.causal.MultiHeadAttention": constructor(
        causal.MultiHeadAttention,
        d_in=1,
        d_out=2,
        context_length=3,
        dropout=0.1,
        num_heads=1,
        qkv_bias=False,
    ),
    f"{OWN}.stages.SelfAttention_v1": constructor(
        stages.SelfAttention_v1, d_in=1, d_out=2
    ),
    f"{OWN}.stages.SelfAttention_v2": constructor(
        stages.SelfAttention_v2, d_in=1, d_out=2, qkv_bias=False
    ),
    f"{OWN}.stages.CausalAttention": constructor(
        stages.CausalAttention,
        d_in=1,
        d_out=2,
        context_length=3,
        dropout=0.1,
        qkv_bias=False,
    ),
    f"{OWN}.stages.MultiHeadAttentionWrapper": constructor(
        stages.MultiHeadAttentionWrapper,
        d_in=1,
        d_out=2,
        context_length=3,
        dropout=0.1,
        num_heads=1,
        qkv_bias=False,
    ),
    f"{OWN}.valid_lens.DotProductAttention": constructor(
        valid_lens.DotProductAttention, dropout=0.1
    ),
    f"{OWN}.valid_lens.MultiHeadAttention": constructor(
        valid_lens.MultiHeadAttention,
        num_hiddens=2,
        num_heads=1,
        dropout=0.1,
        bias=False,
    ),
    "positions.Embeddings": constructor(positions.Embeddings, vocab_size=1, d_model=2),
    "positions.PositionalEncoding": constructor(
        positions.PositionalEncoding, d_model=2, dropout=0.1, max_length=3
    ),
    "convert.Fused": constructor(
        convert.Fused, d_model=2, heads=1, order="3 heads d_k", qkv_bias=True
    ),
}
