"""Query-key normalization: RMS or layer norm, over a head or over all of them."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from claims import (
    assert_equals_the_loops,
    inputs,
    some_mask,
)
from contract import randomize
from headnotes.variants.qk_norm import QKNormAttention

HEADS, D_MODEL, EPS = 2, 6, 1e-3


def normalize(x: Tensor, factors: Tensor, norm: str) -> Tensor:
    """One vector, by the formula."""
    if norm == "layer":
        x = x - x.sum() / len(x)
    mean_square = (x * x).sum() / len(x)
    return x / (mean_square + EPS).sqrt() * factors


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("over", ["head", "all"])
def test_queries_and_keys_are_normalized_before_the_scale(norm: str, over: str) -> None:
    module = QKNormAttention(HEADS, D_MODEL, norm=norm, over=over, eps=EPS)

    def prepare(name: str, vector: Tensor) -> Tensor:
        if name == "value":
            return vector
        factors = getattr(module, name).norm.weight
        if over == "all":
            return normalize(vector, factors, norm)
        return torch.cat([normalize(x, factors, norm) for x in vector.chunk(HEADS)])

    assert_equals_the_loops(module, some_mask(), prepare=prepare)


def test_a_factor_on_a_projection_changes_nothing() -> None:
    module = QKNormAttention(HEADS, D_MODEL, bias=False, eps=1e-20).double().eval()
    randomize(module)
    xs = inputs(D_MODEL)
    before = module(**xs)
    with torch.no_grad():
        module.query.linear.weight.mul_(1000)
        module.key.linear.weight.mul_(0.01)
    torch.testing.assert_close(module(**xs), before)


def test_the_factors_are_those_of_the_models() -> None:
    qwen, olmo = QKNormAttention(2, 6), QKNormAttention(2, 6, over="all")
    vit = QKNormAttention(2, 6, norm="layer")
    assert qwen.query.norm.weight.shape == vit.key.norm.weight.shape == (3,)
    assert olmo.query.norm.weight.shape == (6,)
    assert vit.query.norm.bias is None


def test_squares_beyond_float16_do_not_overflow() -> None:
    module = QKNormAttention(HEADS, D_MODEL, bias=False).half()
    x = 1000 * torch.randn(7, 1, D_MODEL).half()
    normalized = module.query(x)
    assert (module.query.linear(x).float().square() > 65_504).any()
    wide = module.float().query(x.float())
    torch.testing.assert_close(normalized.float(), wide, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"norm": "group"}, '`norm` (=\'group\') must be "rms" or "layer"'),
        ({"norm": None}, '`norm` (=None) must be "rms" or "layer"'),
        ({"over": "heads"}, '`over` (=\'heads\') must be "head" or "all"'),
        ({"eps": 0}, "`eps` (=0) must lie between 0 and 1; 1e-6 is usual"),
        ({"eps": "1e-6"}, "`eps` (='1e-6') must lie between 0 and 1; 1e-6 is usual"),
    ],
)
def test_what_is_no_norm_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        QKNormAttention(HEADS, D_MODEL, **given)
