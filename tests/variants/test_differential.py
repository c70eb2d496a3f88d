"""Differential attention: one softmax minus another, and a norm of each head."""

import math
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
from headnotes.mha import MultiHeadAttention
from headnotes.variants.differential import DifferentialAttention, initial_lambda
from loops import Pair, dot, softmax

HEADS, D_MODEL, LAMBDA = 2, 12, 0.3


def two_scores(q: Tensor, k: Tensor, at: Pair) -> Tensor:
    """Those of both halves."""
    (q1, q2), (k1, k2) = q.chunk(2), k.chunk(2)
    return torch.stack([dot(q1, k1), dot(q2, k2)])


@pytest.mark.parametrize("masked", [False, True])
def test_the_second_softmax_is_subtracted_and_each_head_normalized(
    masked: bool,
) -> None:
    module = DifferentialAttention(HEADS, D_MODEL, lambda_init=LAMBDA)

    def factor() -> Tensor:
        first = (module.lambda_q1 * module.lambda_k1).sum().exp()
        return first - (module.lambda_q2 * module.lambda_k2).sum().exp() + LAMBDA

    def finish(context: Tensor) -> Tensor:
        root = ((context * context).sum() / len(context) + 1e-5).sqrt()
        return (1 - LAMBDA) * context / root * module.norm.weight

    assert_equals_the_loops(
        module,
        some_mask() if masked else None,
        score=two_scores,
        weigh=lambda s, h: softmax(s[:, 0]) - factor() * softmax(s[:, 1]),
        finish=finish,
    )


def test_with_a_factor_of_zero_and_no_norm_it_is_the_core() -> None:
    module = DifferentialAttention(HEADS, D_MODEL, lambda_init=0.2).double().eval()
    randomize(module)
    module.norm = torch.nn.Identity()
    with torch.no_grad():
        # exp(0) - exp(log 1.2) + 0.2 = 0
        module.lambda_q1.zero_()
        module.lambda_q2.fill_(math.log(1.2) / 3)
        module.lambda_k2.fill_(1.0)
    core = MultiHeadAttention(HEADS, D_MODEL).double().eval()
    core.load_state_dict(module.state_dict(), strict=False)
    with torch.no_grad():
        # Half of each head is not compared, and the variance is that of a half.
        for layer in (core.query.linear, core.key.linear):
            for x in (layer.weight, layer.bias):
                x.view(HEADS, 6, -1)[:, 3:] = 0
                x.mul_(2**0.25)
        core.output.weight.mul_(0.8)
    xs = inputs(D_MODEL)
    for mask in (None, some_mask()):
        output = module(**xs, mask=mask)
        torch.testing.assert_close(output, core(**xs, mask=mask), rtol=0, atol=1e-12)


def test_the_first_layer_begins_at_a_fifth_and_deep_ones_near_four_fifths() -> None:
    assert initial_lambda(0) == pytest.approx(0.2)
    assert initial_lambda(1) == pytest.approx(0.8 - 0.6 * math.exp(-0.3))
    assert 0.79 < initial_lambda(20) < initial_lambda(40) < 0.8


@pytest.mark.parametrize(
    ("sizes", "given", "message"),
    [
        ((2, 6), {}, "`d_model / heads` (=3) must be even, for two halves of each"),
        ((2, 8), {"lambda_init": 1.0}, "`lambda_init` (=1.0) must lie between 0 and 1"),
        ((2, 8), {"lambda_init": "0"}, "`lambda_init` (='0') must lie between 0 and 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    sizes: tuple[int, int], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        DifferentialAttention(*sizes, **given)


@pytest.mark.parametrize("depth", [-1, 0.5, None])
def test_a_depth_is_a_number_of_layers(depth: Any) -> None:
    message = f"`depth` (={depth!r}) must be an int from 0 up"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        initial_lambda(depth)
