"""Splitting heads: what is refused, before anything is changed."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from headnotes import fast, mha
from headnotes.parallel.heads import split_heads
from headnotes.variants.alibi import AlibiAttention


def mesh(ranks: int) -> Any:
    """All that is used of a mesh before the work begins."""
    return SimpleNamespace(size=lambda: ranks)


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.layer = attention


@pytest.mark.parametrize("module", [mha, fast])
def test_heads_that_ranks_cannot_share_are_refused_before_any_work(module: Any) -> None:
    model = nn.ModuleList(
        [module.MultiHeadAttention(4, 12), module.MultiHeadAttention(6, 12)]
    )
    message = r"`1.heads` \(=6\) must be divisible by .* ranks \(=4\); 1, 2, 3 or 6"
    with pytest.raises(ValueError, match=message):
        split_heads(model, mesh(4))
    # The first attention, which the ranks could share, is as it was.
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert model[0].heads == 4


def test_grouped_heads_of_keys_must_be_divisible_too() -> None:
    attention = fast.MultiHeadAttention(4, 12, kv_heads=2)
    with pytest.raises(ValueError, match=r"`kv_heads` \(=2\) .* ranks \(=4\); 1 or 2"):
        split_heads(attention, mesh(4))


@pytest.mark.parametrize(
    "attention",
    [
        AlibiAttention(4, 12),
        fast.MultiHeadAttention(4, 12, scores=fast.Scores(sinks=True)),
        fast.MultiHeadAttention(4, 12, scores=fast.Scores(bias=lambda i, j: i)),
    ],
    ids=["slopes", "sinks", "bias"],
)
def test_what_each_head_has_for_itself_is_refused(attention: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"`layer` is an? .* each head"):
        split_heads(Model(attention), mesh(2))


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a Model\) holds no MultiHeadAttention"):
        split_heads(Model(nn.Linear(3, 5)), mesh(2))
