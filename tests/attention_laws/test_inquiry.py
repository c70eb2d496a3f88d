"""What signatures say: how an attention is built, and what its inputs are called."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_laws.adapter import Adapter, Mask
from attention_laws.inquiry import (
    Inquiry,
    effect,
    find_heads,
    find_inputs,
    find_output,
    find_settings,
)
from attention_laws.options import CannotBeCalled, Options
from specimens import Alone, Honest


def inquiry(attention: Any, **options: Any) -> Inquiry:
    name = getattr(attention, "__name__", "mine")
    return Inquiry(Adapter(attention, name, "", {}), Options(**options))


class Shaped(nn.Module):
    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int = 1, bias: bool = True
    ) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("options", "built", "sizes"),
    [
        ({}, "Shaped(embed_dim=12, num_heads=3, kv_heads=3)", (3, 4, 1, False)),
        (
            {"settings": {"embed_dim": 20, "num_heads": 5, "bias": False}},
            "Shaped(embed_dim=20, num_heads=5, bias=False, kv_heads=5)",
            (5, 4, 1, True),
        ),
        ({"heads": 2}, "Shaped(embed_dim=8, num_heads=2, kv_heads=2)", (2, 4, 1, True)),
        (
            {"kv_heads": 2},
            "Shaped(embed_dim=16, num_heads=4, kv_heads=2)",
            (4, 4, 2, False),
        ),
        (
            {"d_model": 21},
            "Shaped(embed_dim=21, num_heads=3, kv_heads=3)",
            (3, 7, 1, True),
        ),
    ],
)
def test_a_class_is_built_as_its_arguments_are_called(
    options: dict[str, Any], built: str, sizes: tuple[int, int, int, bool]
) -> None:
    asked = inquiry(Shaped, **options)
    find_settings(asked)
    adapter = asked.adapter
    assert adapter.facts[0].name == "built as"
    assert adapter.facts[0].value == built
    assert (adapter.heads, adapter.d_k, adapter.groups, adapter.fixed) == sizes


def test_an_argument_that_nobody_knows_must_be_given() -> None:
    class Odd(nn.Module):
        def __init__(self, d_model: int, flavour: str) -> None:
            super().__init__()

    message = (
        "`Odd` wants `flavour`, and it is not known what that is; say it with "
        "`--with flavour=...`, or check a module that is built"
    )
    with pytest.raises(CannotBeCalled, match=f"^{re.escape(message)}$"):
        find_settings(inquiry(Odd))
    asked = inquiry(Odd, settings={"flavour": "sour"})
    find_settings(asked)
    assert asked.adapter.facts[0].value == "Odd(flavour='sour', d_model=4)"
    assert asked.adapter.heads == 1  # it has no argument for them


def test_a_module_says_how_many_heads_it_has() -> None:
    asked = inquiry(nn.MultiheadAttention(14, 7))
    find_heads(asked)
    assert (asked.adapter.heads, asked.adapter.fixed) == (7, True)
    asked = inquiry(torch.relu, kv_heads=2)
    find_heads(asked)
    assert (asked.adapter.heads, asked.adapter.groups) == (4, 2)
    assert not asked.adapter.fixed


def by_name(*, query: Tensor, key: Tensor, value: Tensor) -> None: ...
def turned(value: Tensor, key: Tensor, query: Tensor) -> None: ...
def needs_a_mask(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> None: ...
def takes_one(hidden: Tensor, mask: Any = None) -> None: ...
def takes_any_name(**inputs: Tensor) -> None: ...
def takes_none() -> None: ...


@pytest.mark.parametrize(
    ("function", "inputs", "keyword", "call"),
    [
        (by_name, ("query", "key", "value"), True, {}),
        (turned, ("query", "key", "value"), True, {}),
        (needs_a_mask, ("q", "k", "v"), False, {"attn_mask": None}),
        (takes_one, ("hidden",), False, {}),
        (
            nn.functional.scaled_dot_product_attention,
            ("query", "key", "value"),
            False,
            {},
        ),
    ],
)
def test_inputs_are_known_by_name(
    function: Any, inputs: tuple[str, ...], keyword: bool, call: dict[str, Any]
) -> None:
    asked = inquiry(function)
    find_inputs(asked)
    assert asked.adapter.inputs == inputs
    assert asked.adapter.keyword == keyword
    assert asked.adapter.call == call


def test_who_takes_any_name_is_called_by_name() -> None:
    asked = inquiry(takes_any_name, inputs=("query", "key", "value"))
    find_inputs(asked)
    assert asked.adapter.keyword


def test_who_takes_nothing_is_told_so() -> None:
    message = (
        "`takes_none` takes nothing; say which are its inputs with `--inputs x` or "
        "`--inputs query,key,value`"
    )
    with pytest.raises(CannotBeCalled, match=f"^{re.escape(message)}$"):
        find_inputs(inquiry(takes_none))


@pytest.mark.parametrize(
    ("result", "where"),
    [
        (torch.zeros(2, 5, 7), ""),
        ((torch.zeros(2, 3, 5, 5), torch.zeros(2, 5, 7)), "[1]"),
        ({"weights": None, "output": torch.zeros(2, 5, 7)}, "['output']"),
        (torch.zeros(2, 4, 7), None),
        ("nothing", None),
    ],
)
def test_the_output_has_the_shape_of_the_query(result: Any, where: str | None) -> None:
    assert find_output(result, torch.zeros(2, 5, 12)) == where


def test_an_effect_is_how_far_the_output_moves() -> None:
    asked = inquiry(Alone)
    find_settings(asked)
    find_inputs(asked)
    answered = asked.ask()
    assert answered is not None
    late, early = {"l": slice(3, None)}, {"l": slice(0, 3)}
    assert effect(*answered, early, late) > 0.1
    assert effect(*answered, late, early) == 0


def test_a_call_that_fails_is_no_answer() -> None:
    asked = inquiry(Honest)
    find_settings(asked)
    find_inputs(asked)
    assert asked.ask(way=Mask("mask", "keep", "bqk")) is not None
    assert asked.ask(way=Mask("musk", "keep", "bqk")) is None
    assert asked.problem.startswith("raises TypeError: ")
    assert "musk" in asked.problem
