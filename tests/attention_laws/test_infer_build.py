"""How a module is built is inferred from its constructor."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from attention_laws.adapter import Adapter, CallError, Options
from attention_laws.calling import CallProbe
from attention_laws.infer_build import infer_heads, infer_init_args
from specimens.base import Correct


def call_probe(attention: Any, **options: Any) -> CallProbe:
    name = getattr(attention, "__name__", "mine")
    return CallProbe(Adapter(attention, name, "", {}), Options(**options))


class Shaped(nn.Module):
    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int = 1, bias: bool = True
    ) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("options", "built", "sizes"),
    [
        ({}, "Shaped(embed_dim=16, num_heads=4, kv_heads=2)", (4, 4, 2, False)),
        (
            {"init_args": {"embed_dim": 20, "num_heads": 5, "bias": False}},
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
def test_constructor_arguments_are_inferred_from_their_names(
    options: dict[str, Any], built: str, sizes: tuple[int, int, int, bool]
) -> None:
    probe = call_probe(Shaped, **options)
    infer_init_args(probe)
    adapter = probe.adapter
    assert adapter.facts[0].name == "built as"
    assert adapter.facts[0].value == built
    assert (adapter.heads, adapter.d_k, adapter.group_size, adapter.fixed_size) == sizes


def test_parts_that_are_left_out_by_default_get_no_size() -> None:
    class Local(nn.Module):
        def __init__(
            self,
            dim: int,
            heads: int,
            one_kv_heads: bool = False,
            n_local_heads: int = 0,
        ) -> None:
            super().__init__()

    probe = call_probe(Local)
    infer_init_args(probe)
    assert probe.adapter.facts[0].value == "Local(dim=12, heads=3)"


def test_a_constructor_argument_of_unknown_meaning_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self, d_model: int, flavor: str) -> None:
            super().__init__()

    message = (
        "`Odd` requires `flavor`, whose meaning is unknown; give it with "
        "`--init-args flavor=...`, or check an instance: write `built = Odd(...)` in "
        "the file, and name `built`"
    )
    with pytest.raises(CallError, match=f"^{re.escape(message)}$"):
        infer_init_args(call_probe(Odd))
    probe = call_probe(Odd, init_args={"flavor": "sour"})
    infer_init_args(probe)
    assert probe.adapter.facts[0].value == "Odd(flavor='sour', d_model=4)"
    assert probe.adapter.heads == 1  # there is no argument for them


def test_the_number_of_heads_is_an_attribute_of_the_module() -> None:
    probe = call_probe(nn.MultiheadAttention(14, 7))
    infer_heads(probe)
    assert (probe.adapter.heads, probe.adapter.fixed_size) == (7, True)
    probe = call_probe(torch.relu, kv_heads=2)
    infer_heads(probe)
    assert (probe.adapter.heads, probe.adapter.group_size) == (4, 2)
    assert not probe.adapter.fixed_size


def test_heads_are_those_of_a_config_in_a_dict_or_as_many_as_have_keys() -> None:
    module = Correct(12, 4)
    del module.heads
    module.kv_heads = 2  # type: ignore[assignment]
    for config, heads, group_size in (({"n_heads": 6}, 6, 3), ({}, 2, 1)):
        module.config = config  # type: ignore[assignment]
        probe = call_probe(module)
        infer_heads(probe)
        assert (probe.adapter.heads, probe.adapter.group_size) == (heads, group_size)


class OfUnknownCount(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int, store: "int") -> None:
        super().__init__()


def test_a_number_is_guessed_where_annotations_are_text() -> None:
    probe = call_probe(OfUnknownCount)
    infer_init_args(probe)
    assert probe.adapter.init_args["store"] == "2"
