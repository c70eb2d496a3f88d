"""What may be said about an attention, and what an option cannot mean."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_laws import CannotBeCalled, Options, check
from attention_laws.adapter import (
    FITTING,
    Adapter,
    Inexpressible,
    Mask,
    Sizes,
    spell_index,
)
from specimens import Honest

Q_LEN, K_LEN, BATCH, HEADS = 3, 5, 2, 7


def some_mask() -> Tensor:
    keep = torch.rand(Q_LEN, K_LEN, BATCH) > 0.4
    keep[:, 0] = True
    return keep


def read(mask: Mask, keep: Tensor, heads: int = HEADS) -> Any:
    return eval(mask.spell(keep, heads), {"torch": torch})


@pytest.mark.parametrize("axes", ["qkb", "bqk", "b1qk", "bhqk", "nqk", "kqb"])
def test_every_order_of_axes_holds_the_mask(axes: str) -> None:
    keep = some_mask()
    sizes = {"q": Q_LEN, "k": K_LEN, "b": BATCH, "h": HEADS, "n": BATCH * HEADS, "1": 1}
    got = read(Mask("mask", "keep", axes), keep)
    assert list(got.shape) == [sizes[axis] for axis in axes]
    for q in range(Q_LEN):
        for k in range(K_LEN):
            for b in range(BATCH):
                at = {"q": q, "k": k, "b": b, "h": 4, "n": b * HEADS + 4, "1": 0}
                assert got[tuple(at[axis] for axis in axes)] == keep[q, k, b]


def test_each_kind_says_the_same_in_its_own_way() -> None:
    keep = some_mask()
    assert read(Mask("mask", "keep", "qkb"), keep).equal(keep)
    assert read(Mask("mask", "hide", "qkb"), keep).equal(~keep)
    added = read(Mask("mask", "additive", "qkb"), keep)
    assert added.equal(torch.zeros(keep.shape).masked_fill(~keep, -torch.inf))


def test_lengths_say_the_first_few_keys() -> None:
    lengths = torch.tensor([[2, 5], [1, 3], [0, 4]])  # [q_len, batch_size]
    keep = torch.arange(K_LEN)[:, None] < lengths[:, None]
    got = read(Mask("valid_lens", "lengths", "bq"), keep)
    assert got.tolist() == [[2, 1, 0], [5, 3, 4]]
    same = keep[:1].expand(Q_LEN, -1, -1)
    assert read(Mask("valid_lens", "lengths", "b"), same).tolist() == [2, 5]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Mask("m", "keep", "qk"), "`m` has no axis for batch items"),
        (Mask("m", "keep", "bk"), "`m` has no axis for queries"),
        (Mask("m", "lengths", "bq"), "`m` only allows the first few keys"),
        (Mask("m", "flag", ""), "`m` only says 'causal'"),
    ],
)
def test_what_cannot_be_said_is_refused(mask: Mask, message: str) -> None:
    keep = torch.ones(Q_LEN, K_LEN, BATCH).bool()
    keep[1, 2, 1] = False
    assert not mask.can_say(keep)
    with pytest.raises(Inexpressible, match=f"^{re.escape(message)}$"):
        mask.spell(keep)


def test_a_flag_says_causal_and_nothing_else() -> None:
    flag = Mask("is_causal", "flag", "")
    causal = torch.ones(3, 3).tril().bool()[..., None].expand(-1, -1, 2)
    assert flag.spell(causal) == "True"
    assert not flag.can_say(torch.ones(3, 3, 2).bool())
    assert not flag.can_say(causal[:2])


def test_shapes_follow_the_layout_and_the_groups() -> None:
    sizes = Sizes(2, 3, 5, heads=6, d_k=7)
    heads = Adapter(print, "f", "", {}, layout="bhld", groups=3)
    assert heads.shape(sizes, 0) == [2, 6, 3, 7]
    assert heads.shape(sizes, 1) == heads.shape(sizes, 2) == [2, 2, 5, 7]
    assert Adapter(print, "f", "", {}, layout="lbd").shape(sizes, 0) == [3, 2, 42]
    fixed = Adapter(print, "f", "", {}, layout="ld", width=13)
    assert fixed.shape(sizes, 1) == [5, 13]


def test_indices_are_written_as_one_would() -> None:
    adapter = Adapter(print, "f", "", {}, layout="lbd")
    assert adapter.at(l=slice(0, 3)) == "[0:3]"
    assert adapter.at(b=slice(1, None)) == "[:, 1:]"
    assert adapter.at(l=[2, 0], b=1) == "[[2, 0], 1]"
    assert adapter.at() == ""
    assert spell_index(slice(None)) == ":"


def test_it_is_built_as_it_is_given() -> None:
    sizes = Sizes(2, 3, 5, heads=6, d_k=7)
    settings = {"d_model": "{d_model}", "n_kv": "{kv_heads}", "bias": "False"}
    built = Adapter(nn.Linear, "Linear", "", settings, groups=3).build(sizes)
    assert built == "Linear(d_model=42, n_kv=2, bias=False)"
    module = Adapter(nn.Linear(1, 1), "mine", "", {})
    assert module.build(sizes) == "copy.deepcopy(mine)"
    assert module.is_module
    function = Adapter(print, "print", "", {})
    assert function.build(sizes) == "print"
    assert not function.is_module


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
