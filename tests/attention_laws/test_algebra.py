"""Laws of the formula: each fails on attention that violates it."""

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from attention_laws import LAWS, algebra, check
from attention_laws.adapter import Adapter, Sizes
from attention_laws.law import NotApplicable
from attention_laws.script import Script
from specimens import assert_caught, each_law_of
from specimens.algebra import (
    CapsProducts,
    CapsScaledProducts,
    ScalesByWidth,
)
from specimens.base import Correct


@each_law_of(algebra)
def test_each_law_fails_on_implementations_that_violate_it(
    name: str, device: torch.device
) -> None:
    assert_caught(name, device.type)


class DoesNotScale(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


class ScalesTwice(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) / q.shape[-1] ** 0.5


@pytest.mark.parametrize(
    ("attention", "cause"),
    [
        (DoesNotScale, ", as if the scores were not divided by sqrt(d_k)"),
        (
            ScalesByWidth,
            ", as if the scores were divided by sqrt(d_model), not by sqrt(d_k)",
        ),
        (ScalesTwice, ""),
    ],
)
def test_a_known_wrong_scale_is_named(attention: type[Correct], cause: str) -> None:
    (result,) = check(attention, only="formula").failed
    assert re.sub(r"\d", "0", result.detail) == (
        f"query 0 of batch item 0 differs from the formula{cause}"
    )
    assert result.counterexample is not None
    assert "sqrt" not in result.counterexample.code
    assert result.counterexample.code.count("reference_attention(") == 1


def test_rows_sum_to_one_with_grouped_queries() -> None:
    def shared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    def more(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return 1.01 * shared(query, key, value)

    assert check(shared, kv_heads=2, only="rows_sum_to_one").passed
    assert check(more, kv_heads=2, only="rows_sum_to_one").failed


def test_what_may_attend_to_a_tensor_that_was_filled_in_need_not_attend_to_others() -> (
    None
):
    def to_text(x: Tensor, text: Tensor) -> Tensor:
        return (x @ text.mT).softmax(dim=-1) @ text

    filled = {"text": "torch.zeros_like(x)"}
    adapter = Adapter(to_text, "to_text", "", {}, inputs=("x",), extra_args=filled)
    with pytest.raises(NotApplicable, match="`text`"):
        LAWS["allowed_keys_attended"].test(Script(adapter, Sizes(2, 3, 3, 1, 4)))


def test_the_formula_is_not_for_single_tokens_of_several_sequences() -> None:
    adapter = Adapter(torch.tanh, "tanh", "", {}, inputs=("x",), layout="ld")
    with pytest.raises(NotApplicable, match="do not influence"):
        LAWS["formula"].test(Script(adapter, Sizes(1, 3, 3, 1, 4)))


@pytest.mark.slow
def test_a_window_that_is_off_is_no_other_design() -> None:
    skipped = [name for name in LAWS if name != "formula"]
    assert check(CapsProducts, skip=skipped).failed
    assert check(CapsScaledProducts, skip=skipped).passed
