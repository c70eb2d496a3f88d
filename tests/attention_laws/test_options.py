"""What may be said about an attention, and what an option cannot mean."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from attention_laws import CannotBeCalled, Options, check
from attention_laws.options import FITTING
from specimens import Honest

SIZE = "must be a positive int"
LITERALS = "must be names with numbers, strings, lists, True, False or None"


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "lbd", "inputs": ["x"], "mask": {"m": "", "n": "hide", "o": ":qk"}},
        {"settings": {"bias": False, "dtype": torch.float64}, "call": {"names": ["a"]}},
        {"heads": 6, "kv_heads": 2, "d_model": 12, "window": 1, "causal": False},
        {"positions": "alibi", "weights": "none", "seed": 0, "mask": {"none": ""}},
        {"weights": "['attn']:bhqk", "projections": {"fused": "qkv:h3d", "out": "o"}},
        {"weights": ".inner.attn", "cache": ("past", "[1]"), "unused": ("key.bias",)},
    ],
)
def test_what_can_be_meant_is_taken_as_it_is(options: dict[str, Any]) -> None:
    taken = Options(**options)
    assert {name: getattr(taken, name) for name in options} == options


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("heads", 0, SIZE),
        ("heads", "3", SIZE),
        ("kv_heads", 2.0, SIZE),
        ("d_model", True, SIZE),
        ("window", -1, SIZE),
        ("causal", 1, "must be True or False"),
        ("layout", "b", "must be one of batch_first, "),
        ("layout", "bl", "must be one of batch_first, "),
        ("layout", "bldd", "must be one of batch_first, "),
        ("layout", 5, "must be one of batch_first, "),
        ("inputs", "x", "must be the name of one input, or those of "),
        ("inputs", ("q", "k"), "must be the name of one input, or those of "),
        ("mask", {"m": "seek:bk"}, "must be such as {'attn_mask': 'hide:qk'}; a kind "),
        ("mask", {"m": "hide:xy"}, "must be such as {'attn_mask': 'hide:qk'}; a kind "),
        ("mask", "m", "must be such as {'attn_mask': 'hide:qk'}; a kind is one of "),
        ("settings", {"act": nn.ReLU()}, LITERALS),
        ("call", {"f": print}, LITERALS),
        ("positions", "absolute", "must be one of none, alibi, rotary, learned"),
        ("weights", "attn", "must be a place such as '[1]' or '.attn', with axes as "),
        ("weights", "[1]:xyz", "must be a place such as '[1]' or '.attn', with axes "),
        ("projections", {"q": "q"}, "must be names of submodules, for some of query, "),
        ("cache", ("past",), "must be an argument and a place in the result, such as "),
        ("unused", "bias", "must be names of parameters"),
        ("dtype", torch.int32, "must be a floating dtype of torch"),
        ("device", torch.device("cpu"), "must be the name of a device, such as 'cuda'"),
        ("seed", -1, "must be an int, 0 or more"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, value: Any, wanted: str) -> None:
    message = f"`{name}` (={value!r}) {wanted}"
    with pytest.raises(CannotBeCalled, match=f"^{re.escape(message)}"):
        Options(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"d_model": 7, "heads": 2},
            "`d_model` (=7) must be divisible by `heads` (=2)",
        ),
        (
            {"heads": 3, "kv_heads": 2},
            "`heads` (=3) must be divisible by `kv_heads` (=2)",
        ),
        (
            {"device": "meta"},
            "`device` (='meta') cannot compute here: Tensor.item() cannot be called on "
            "meta tensors",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CannotBeCalled, match=f"^{re.escape(message)}$"):
        Options(**options)


def test_every_option_is_tested() -> None:
    assert set(FITTING) == set(vars(Options()))


TAKEN = "which `Honest` does not take; it takes query, key, value, mask"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": {"musk": ""}}, f"`mask` names `musk`, {TAKEN}"),
        ({"call": {"musk": 1}}, f"`call` names `musk`, {TAKEN}"),
        ({"cache": ("musk", "[1]")}, f"`cache` names `musk`, {TAKEN}"),
        (
            {"projections": {"query": "musk"}},
            "`projections` names `musk`, which is not there; there are dropout, ",
        ),
        (
            {"unused": ["musk"]},
            "`unused` names `musk`, which is not there; there are key.bias, ",
        ),
        (
            {"weights": "[7]"},
            "`weights` (='[7]') are no tensor, where the sizes are b=2, h=3, q=5, ",
        ),
        (
            {"weights": ".attn"},
            "`weights` (='.attn') are no tensor, where the sizes are b=2, h=3, q=5, ",
        ),
    ],
)
def test_what_the_attention_does_not_have_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CannotBeCalled, match=f"^{re.escape(message)}"):
        check(Honest, only="causality", **options)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (3, "`attention` (=3) cannot be called"),
        (dict, "`dict` is a class, but none of modules; check what it makes"),
    ],
)
def test_what_is_no_attention_is_refused(attention: Any, message: str) -> None:
    with pytest.raises(CannotBeCalled, match=f"^{re.escape(message)}$"):
        check(attention)
