"""Weights are found in results and in attributes, by their shape and their values."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attention_laws.adapter import Adapter, Options
from attention_laws.infer import infer_adapter
from specimens.base import Correct, Rotary
from specimens.positions import QueriesBeforeHeads


def found(attention: Any, **options: Any) -> Adapter:
    return infer_adapter(attention, "mine", "", Options(**options))


class ReturnsWeights(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.attn = super().weigh(scores, mask)
        return self.attn

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(query, key, value), self.attn.mean(dim=1)


def test_weights_are_found_in_results_and_in_attributes() -> None:
    adapter = found(ReturnsWeights)
    assert (adapter.output_index, adapter.weights_source, adapter.weights_axes) == (
        "[0]",
        "[1]",
        "bqk",
    )
    adapter = found(ReturnsWeights, weights=".attn")
    assert (adapter.weights_source, adapter.weights_axes) == (".attn", "bhqk")
    assert found(ReturnsWeights, weights="none").weights_source == ""
    assert found(Correct).weights_source == ""


@dataclass
class Result:
    output: Tensor
    weights: Tensor


class InDataclass(ReturnsWeights):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        return Result(*super().forward(query, key, value))


def test_output_and_weights_are_found_in_a_dataclass() -> None:
    adapter = found(InDataclass)
    assert (adapter.output_index, adapter.weights_source) == (
        ".output",
        "result.weights",
    )


def test_which_of_queries_and_heads_comes_first_is_found_where_they_differ() -> None:
    assert found(QueriesBeforeHeads).queries_first
    assert not found(Rotary).queries_first
