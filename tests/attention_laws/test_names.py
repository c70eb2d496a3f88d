"""The dictionary of names: arguments of a constructor and of a call."""

import re
from typing import Any

from torch import Tensor, nn

from attention_laws import names


def test_parameters_are_those_of_the_forward() -> None:
    def call(x: Tensor, *args: Any, mask: Any = None, **more: Any) -> None:
        pass

    class Module(nn.Module):
        def forward(this, query: Tensor) -> None:  # noqa: N805
            pass

    assert names.required_by_name(names.parameters_of(call)) == {
        "x": True,
        "mask": False,
    }
    assert names.required_by_name(names.parameters_of(Module)) == {"query": True}
    assert names.required_by_name(names.parameters_of(Module())) == {"query": True}
    assert names.parameters_of(nn.functional.scaled_dot_product_attention) == []


def test_inputs_and_widths_have_many_names() -> None:
    assert names.find_inputs({"queries": True, "keys": True}) == ("queries", "keys")
    assert names.argument_values({"hidden": True, "source": True})["source"]


def test_cosines_are_computed_before_they_are_rounded() -> None:
    for name in ("position_embeddings", "cos", "sin"):
        assert ".cos()" in (text := names.position_templates(name)[0]) or name == "sin"
        assert re.search(r"\{d_k\}\)\.(cos|sin)\(\)\{dtype\}", text), text


def test_a_number_of_keys_that_are_kept_is_no_dropout() -> None:
    class Strongest(nn.Module):
        def __init__(self, keep: int = 8) -> None: ...

    class Drops(nn.Module):
        def __init__(self, keep: float = 0.9) -> None: ...

    found = [names.dropout_arguments(each) for each in (Strongest, Drops)]
    assert found == [{}, {"keep": "1.0"}]


def test_a_class_of_no_file_has_the_sizes_of_its_constructor() -> None:
    scope: dict[str, Any] = {"__name__": "no_file"}
    exec("class Attention:\n    def __init__(self, dim, side=3): ...", scope)
    assert names.constructor_sizes(scope["Attention"], {}) == {"side": "3"}
