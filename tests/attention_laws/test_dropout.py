"""The law of dropout: it fails on attention that violates it."""

import pytest
import torch
from torch import Tensor, nn

from attention_laws import LAWS, check
from attention_laws.adapter import Adapter, Sizes
from attention_laws.dropout import count_of_copies
from attention_laws.script import Script
from attention_laws.structure import identifiers
from specimens import assert_caught
from specimens.base import SelfAttention
from specimens.dropout import DropsByHandUnscaled, DropsChannels, KeysOfSmallerImage


@pytest.mark.slow
def test_the_law_fails_on_implementations_that_violate_it(device: torch.device) -> None:
    assert_caught("dropout", device.type)


@pytest.mark.slow
def test_a_layer_for_channels_does_not_drop_weights() -> None:
    others = [name for name in LAWS if name != "dropout"]
    assert check(KeysOfSmallerImage, skip=others).ok
    [failed] = check(DropsChannels, skip=others).failed
    assert failed.detail == "`dropout` drops all weights of a head at once"


@pytest.mark.slow
def test_a_variable_named_as_a_statistic_is_no_norm() -> None:
    others = [name for name in LAWS if name != "dropout"]
    assert "std" not in identifiers(DropsByHandUnscaled)
    [failed] = check(DropsByHandUnscaled, skip=others).failed
    assert failed.detail.startswith("on average, dropout changes the output")


class PacksBatch(SelfAttention):
    """All batch items are one sequence, and a mask keeps each to its own tokens."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        item = torch.arange(q.shape[2], device=q.device) // self.length
        hidden = item[:, None] != item
        return super().score(q, k).masked_fill(hidden, -torch.inf)

    def forward(self, x: Tensor) -> Tensor:
        self.length = x.shape[1]
        packed: Tensor = super().forward(x.reshape(1, -1, x.shape[-1]))
        return packed.reshape(x.shape)


class SwapsBatchAndLength(nn.MultiheadAttention):
    """The items of the batch are the tokens of fused kernels."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        output: Tensor = super().forward(x, x, x, need_weights=False)[0]
        return output


@pytest.mark.parametrize(
    ("attention", "d_k", "expected"),
    [
        (SelfAttention(12, 3), 4, range(4096, 4097)),
        (SelfAttention(300, 3), 100, range(300, 2000)),
        (PacksBatch(12, 3), 4, range(256, 257)),
        (SwapsBatchAndLength(12, 3), 4, range(256, 257)),
        (SwapsBatchAndLength(12, 3, batch_first=True), 4, range(4096, 4097)),
    ],
)
def test_dropout_is_sampled_less_where_a_call_is_large_or_grows_with_the_square(
    attention: nn.Module, d_k: int, expected: range
) -> None:
    adapter = Adapter(attention, "Attention", "", {}, inputs=("x",))
    script = Script(adapter, Sizes(1, 3, 3, 3, d_k))
    assert count_of_copies(script) in expected
