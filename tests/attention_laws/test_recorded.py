"""Weights that calls record."""

from typing import Any

import torch
from torch import Tensor, nn

from attention_laws.adapter import Options, Sizes
from attention_laws.infer import infer_adapter
from attention_laws.recorded import record_equal_tokens, record_weights
from attention_laws.script import Script
from specimens.base import Rotary, SelfAttention

SIZES = Sizes(1, 5, 5, heads=3, d_k=4)


def started(attention: Any) -> Script:
    adapter = infer_adapter(attention, "Attention", "", Options())
    script = Script(adapter, SIZES)
    script.restart()
    return script


class TwoLayers(nn.Module):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        layers = [kind(d_model, heads) for kind in (SelfAttention, Rotary)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class AddsPlaces(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.arange(x.shape[1])[:, None])


def test_weights_are_those_of_the_only_softmax() -> None:
    script = started(SelfAttention)
    weights = script.evaluate(record_weights(script, script.make_arguments()))
    assert weights.shape == (3, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 5))
    script = started(TwoLayers)
    assert record_weights(script, script.make_arguments()) == ""


def test_of_several_layers_the_first_tells_equal_tokens_apart() -> None:
    script = started(TwoLayers)
    weights = script.evaluate(record_equal_tokens(script, script.make_arguments()))
    assert weights.shape == (3, 5, 5)
    assert weights[:, -1].std() > 0.01  # of the second: the first has no positions


def test_tokens_to_which_positions_are_added_are_not_equal() -> None:
    script = started(AddsPlaces)
    assert record_equal_tokens(script, script.make_arguments()) == ""
