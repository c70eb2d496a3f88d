"""Options are validated, and masks, calls and indices written as source text."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_laws import CallError, Options, check, infer
from attention_laws.adapter import (
    VALIDATORS,
    Adapter,
    MaskArgument,
    Sizes,
    UnsupportedMaskError,
    index_source,
)
from specimens.base import Correct

Q_LEN, K_LEN, BATCH, HEADS = 3, 5, 2, 7


def some_mask() -> Tensor:
    allowed = torch.rand(Q_LEN, K_LEN, BATCH) > 0.4
    allowed[:, 0] = True
    return allowed


def read(mask: MaskArgument, allowed: Tensor, heads: int = HEADS) -> Any:
    return eval(mask.to_source(allowed, heads), {"torch": torch})


@pytest.mark.parametrize("axes", ["qkb", "bqk", "b1qk", "bhqk", "nqk", "kqb"])
def test_every_order_of_axes_holds_the_mask(axes: str) -> None:
    allowed = some_mask()
    sizes = {"q": Q_LEN, "k": K_LEN, "b": BATCH, "h": HEADS, "n": BATCH * HEADS, "1": 1}
    got = read(MaskArgument("mask", "attend", axes), allowed)
    assert list(got.shape) == [sizes[axis] for axis in axes]
    for q in range(Q_LEN):
        for k in range(K_LEN):
            for b in range(BATCH):
                at = {"q": q, "k": k, "b": b, "h": 4, "n": b * HEADS + 4, "1": 0}
                assert got[tuple(at[axis] for axis in axes)] == allowed[q, k, b]


def test_each_kind_encodes_the_same_mask() -> None:
    allowed = some_mask()
    assert read(MaskArgument("mask", "attend", "qkb"), allowed).equal(allowed)
    assert read(MaskArgument("mask", "ignore", "qkb"), allowed).equal(~allowed)
    added = read(MaskArgument("mask", "additive", "qkb"), allowed)
    assert added.equal(torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf))


def test_lengths_count_the_visible_keys() -> None:
    lengths = torch.tensor([[2, 5], [1, 3], [0, 4]])  # [q_len, batch_size]
    allowed = torch.arange(K_LEN)[:, None] < lengths[:, None]
    got = read(MaskArgument("valid_lens", "lengths", "bq"), allowed)
    assert got.tolist() == [[2, 1, 0], [5, 3, 4]]
    same = allowed[:1].expand(Q_LEN, -1, -1)
    assert read(MaskArgument("valid_lens", "lengths", "b"), same).tolist() == [2, 5]


@pytest.mark.slow
def test_a_short_expression_is_the_mask_that_a_literal_would_be() -> None:
    causal = torch.ones(37, 37, dtype=torch.bool).tril()
    padded = (torch.arange(41) < 3).expand(29, 41)
    for mask in (causal, padded):
        allowed = mask[..., None].expand(-1, -1, 2)
        for kind in ("attend", "ignore", "attend_int", "ignore_int", "additive"):
            for axes in ("b1qk", "bhqk", "qkb", "kqb", "nqk", "qk"):
                argument = MaskArgument("mask", kind, axes)
                text = argument.to_source(allowed, heads=3)
                assert len(text) < 200
                literal = argument.to_literal(argument.to_axes(allowed))
                short = eval(text)
                expected = eval(literal)
                if "n" in axes:
                    expected = expected.repeat_interleave(3, dim=0)
                assert torch.equal(short, expected.expand_as(short))
                assert short.dtype == expected.dtype


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (MaskArgument("m", "attend", "qk"), "`m` has no axis for batch items"),
        (MaskArgument("m", "attend", "bk"), "`m` has no axis for queries"),
        (
            MaskArgument("m", "lengths", "bq"),
            "`m` can only hide the last keys of a sequence",
        ),
        (MaskArgument("m", "causal", ""), "`m` can only express a causal mask"),
    ],
)
def test_a_mask_that_cannot_be_expressed_is_refused(
    mask: MaskArgument, message: str
) -> None:
    allowed = torch.ones(Q_LEN, K_LEN, BATCH).bool()
    allowed[1, 2, 1] = False
    assert not mask.can_express(allowed)
    with pytest.raises(UnsupportedMaskError, match=f"^{re.escape(message)}$"):
        mask.to_source(allowed)


def test_a_causal_flag_expresses_only_a_causal_mask() -> None:
    flag = MaskArgument("is_causal", "causal", "")
    causal = torch.ones(3, 3).tril().bool()[..., None].expand(-1, -1, 2)
    assert flag.to_source(causal) == "True"
    assert not flag.can_express(torch.ones(3, 3, 2).bool())
    assert not flag.can_express(causal[:2])


def test_input_shapes_follow_the_layout_and_the_group_size() -> None:
    sizes = Sizes(2, 3, 5, heads=6, d_k=7)
    heads = Adapter(print, "f", "", {}, layout="bhld", group_size=3)
    assert heads.input_shape(sizes, 0) == [2, 6, 3, 7]
    assert heads.input_shape(sizes, 1) == heads.input_shape(sizes, 2) == [2, 2, 5, 7]
    assert Adapter(print, "f", "", {}, layout="lbd").input_shape(sizes, 0) == [3, 2, 42]
    fixed = Adapter(print, "f", "", {}, layout="ld", d_model=13)
    assert fixed.input_shape(sizes, 1) == [5, 13]


def test_what_has_a_row_for_each_token_without_a_batch_is_not_pooled() -> None:
    pooled = Adapter(print, "print", "", {}, layout="ld", is_pooled=True)
    shapes = torch.Size([5, 2, 4]), torch.Size([5, 8])
    assert not pooled.is_like_query(*shapes)
    assert replace(pooled, layout="bld").is_like_query(*shapes)


def test_an_index_is_written_like_handwritten_code() -> None:
    adapter = Adapter(print, "f", "", {}, layout="lbd")
    assert adapter.index(l=slice(0, 3)) == "[0:3]"
    assert adapter.index(b=slice(1, None)) == "[:, 1:]"
    assert adapter.index(l=[2, 0], b=1) == "[[2, 0], 1]"
    assert adapter.index(l=[*range(260)]) == "[0:260]"
    assert adapter.index() == ""
    assert index_source(slice(None)) == ":"


def test_a_class_is_built_an_instance_copied_and_a_function_used() -> None:
    sizes = Sizes(2, 3, 5, heads=6, d_k=7)
    settings = {"d_model": "{d_model}", "n_kv": "{kv_heads}", "bias": "False"}
    built = Adapter(nn.Linear, "Linear", "", settings, group_size=3).build_expression(
        sizes
    )
    assert built == "Linear(d_model=42, n_kv=2, bias=False)"
    module = Adapter(nn.Linear(1, 1), "mine", "", {})
    assert module.build_expression(sizes) == "detached_copy(mine)"
    assert module.is_module
    function = Adapter(print, "print", "", {})
    assert function.build_expression(sizes) == "print"
    assert not function.is_module


SIZE = "must be a positive int"
LITERALS = "must be names with numbers, strings, lists, True, False or None"


@pytest.mark.parametrize(
    "options",
    [
        {
            "layout": "lbd",
            "inputs": ["x"],
            "mask": {"m": "", "n": "ignore", "o": ":qk"},
        },
        {
            "init_args": {"bias": False, "dtype": torch.float64},
            "call_args": {"names": ["a"]},
        },
        {"heads": 6, "kv_heads": 2, "d_model": 12, "window": 1, "causal": False},
        {"positions": "alibi", "weights": "none", "seed": 0, "mask": {"none": ""}},
        {"weights": "['attn']:bhqk", "projections": {"fused": "qkv:h3d", "out": "o"}},
        {
            "weights": ".inner.attn",
            "cache": ("past", "[1]"),
            "unused_parameters": ("key.bias",),
        },
    ],
)
def test_valid_options_are_stored_unchanged(options: dict[str, Any]) -> None:
    taken = Options(**options)
    assert {name: getattr(taken, name) for name in options} == options


@pytest.mark.parametrize(
    ("name", "value", "expected"),
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
        ("inputs", ("q", "k", "v", "w"), "must be the name of one input, or those of "),
        (
            "mask",
            {"m": "seek:bk"},
            "must be such as {'attn_mask': 'ignore:qk'}; a kind ",
        ),
        (
            "mask",
            {"m": "ignore:xy"},
            "must be such as {'attn_mask': 'ignore:qk'}; a kind ",
        ),
        ("mask", "m", "must be such as {'attn_mask': 'ignore:qk'}; a kind is one of "),
        ("init_args", {"act": nn.ReLU()}, LITERALS),
        ("call_args", {"f": print}, LITERALS),
        (
            "positions",
            "absolute",
            "must be one of none, alibi, rotary, relative, learned",
        ),
        ("weights", "attn", "must be an index or attribute such as '[1]' or "),
        ("weights", "[1]:xyz", "must be an index or attribute such as '[1]' or "),
        ("projections", {"q": "q"}, "must be names of submodules, for some of query, "),
        ("cache", ("past",), "must be an argument and an index of the result, such "),
        ("unused_parameters", "bias", "must be names of parameters"),
        ("dtype", torch.int32, "must be a floating-point dtype of torch"),
        ("device", torch.device("cpu"), "must be the name of a device, such as 'cuda'"),
        ("seed", -1, "must be an int from 0 to 2**32 - 1"),
    ],
)
def test_invalid_options_are_refused(name: str, value: Any, expected: str) -> None:
    message = f"`{name}` (={value!r}) {expected}"
    with pytest.raises(CallError, match=f"^{re.escape(message)}"):
        Options(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
    with pytest.raises(CallError, match=f"^{re.escape(message)}$"):
        Options(**options)


def test_every_option_has_a_validator() -> None:
    assert set(VALIDATORS) == set(vars(Options()))


ARGUMENTS = (
    "which is no argument of `Correct`; its arguments are query, key, value, mask"
)
UNKNOWN_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"mask": {"musk": ""}}, f"`mask` names `musk`, {ARGUMENTS}"),
    ({"call_args": {"musk": 1}}, f"`call_args` names `musk`, {ARGUMENTS}"),
    ({"cache": ("musk", "[1]")}, f"`cache` names `musk`, {ARGUMENTS}"),
    ({"inputs": ["query", "musk"]}, f"`inputs` names `musk`, {ARGUMENTS}"),
    (
        {"init_args": {"musk": 1}},
        "`init_args` names `musk`, which is no argument of `Correct`; its arguments "
        "are d_model, heads, dropout",
    ),
]
UNKNOWN_PARTS: list[tuple[dict[str, Any], str]] = [
    (
        {"projections": {"query": "musk"}},
        "`projections` names `musk`, which does not exist; there are dropout, ",
    ),
    (
        {"unused_parameters": ["musk"]},
        "`unused_parameters` names `musk`, which does not exist; there are key",
    ),
    (
        {"weights": "[7]"},
        "`weights` (='[7]') is no tensor, where the sizes are b=2, h=3, q=5, ",
    ),
    (
        {"weights": ".attn"},
        "`weights` (='.attn') is no tensor, where the sizes are b=2, h=3, q=5, ",
    ),
]


@pytest.mark.parametrize(("options", "message"), UNKNOWN_ARGUMENTS)
def test_options_that_name_unknown_arguments_are_refused_before_any_call(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer, "find_call", pytest.fail)
    with pytest.raises(CallError, match=f"^{re.escape(message)}"):
        check(Correct, **options)


@pytest.mark.parametrize(
    ("option", "value"), [("mask", {"key": "attend:bk"}), ("call_args", {"key": None})]
)
def test_an_option_that_names_an_input_is_refused_before_any_call(
    option: str, value: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer, "infer_layout", pytest.fail)
    message = (
        f"`{option}` names `key`, which is taken for an input of `Correct`; "
        f"name another argument, or the inputs with `--inputs`"
    )
    with pytest.raises(CallError, match=f"^{re.escape(message)}$"):
        check(Correct, **{option: value})


@pytest.mark.parametrize(("options", "message"), UNKNOWN_PARTS)
def test_options_that_name_unknown_parts_are_refused_before_more_is_inferred(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer, "infer_masks", pytest.fail)
    with pytest.raises(CallError, match=f"^{re.escape(message)}"):
        check(Correct, **options)


def test_inputs_of_any_number_have_no_names() -> None:
    def attend(*inputs: Tensor) -> Tensor:
        return inputs[0]

    infer.check_argument_names(attend, "attend", Options(inputs=("x",)))


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (
            3,
            "`attention` (=3) cannot be called; give a module class, a module, or a "
            "function",
        ),
        (
            dict,
            "`dict` is a class, but not of modules; give an instance that can be "
            "called, or a function",
        ),
    ],
)
def test_an_object_that_cannot_be_called_is_refused(
    attention: Any, message: str
) -> None:
    with pytest.raises(CallError, match=f"^{re.escape(message)}$"):
        check(attention)
