"""ALiBi: scores fall with the distance, by a slope for each head."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from claims import BATCH, K_LEN, Q_LEN, assert_equals_the_loops, in_float64, some_mask
from headnotes import masks
from headnotes.mha import MultiHeadAttention
from headnotes.variants.alibi import AlibiAttention, alibi_slopes
from loops import Pair, dot

HEADS, D_K = 3, 7
D_MODEL = HEADS * D_K


def test_output_and_gradients_are_those_of_the_loops() -> None:
    slopes = [1 / 16, 1 / 256, 1 / 4]

    def score(q: Tensor, k: Tensor, at: Pair) -> Tensor:
        return dot(q, k) - slopes[at.h] * abs(at.i + K_LEN - Q_LEN - at.j)

    assert_equals_the_loops(AlibiAttention(HEADS, D_MODEL), some_mask(), score=score)


def test_with_slopes_of_zero_it_is_the_core() -> None:
    core = MultiHeadAttention(HEADS, D_MODEL).eval()
    module = AlibiAttention(HEADS, D_MODEL, slopes=torch.zeros(HEADS)).eval()
    module.load_state_dict(core.state_dict())
    x = torch.randn(K_LEN, BATCH, D_MODEL)
    assert torch.equal(module(query=x, key=x, value=x), core(query=x, key=x, value=x))


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        # 12 heads: those of 8, then every other one of 16.
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (5, [2, 4, 6, 8, 1]),
    ],
)
def test_slopes_are_those_of_the_paper(heads: int, exponents: list[float]) -> None:
    expected = [2**-exponent for exponent in exponents]
    assert alibi_slopes(heads).tolist() == pytest.approx(expected, rel=1e-15)


def test_causal_scores_are_those_of_the_code_that_adds_the_position_of_the_key() -> (
    None
):
    module = in_float64(AlibiAttention(HEADS, D_MODEL))
    x = torch.randn(K_LEN, BATCH, D_MODEL).double()
    causal = masks.causal(K_LEN)
    module(query=x, key=x, value=x, mask=causal)
    core = MultiHeadAttention(HEADS, D_MODEL).double().eval()
    core.load_state_dict(module.state_dict())
    scores = core.get_scores(core.query(x) * core.scale, core.key(x))
    scores = scores + torch.arange(K_LEN).view(1, -1, 1, 1) * alibi_slopes(HEADS)
    scores = scores.masked_fill(~causal.unsqueeze(-1), -math.inf)
    torch.testing.assert_close(module.attn, scores.softmax(dim=1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_near_keys_are_exact_behind_a_long_past(dtype: torch.dtype) -> None:
    # A slope in bfloat16, or key positions of 2,000, would round these biases.
    module = AlibiAttention(12, 24).to(dtype)
    query = torch.zeros(1, 1, 12, 2, dtype=dtype)
    scores = module.get_scores(query, torch.zeros(2001, 1, 12, 2, dtype=dtype))
    expected = -alibi_slopes(12) * torch.arange(3, -1, -1).unsqueeze(1)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        scores[0, -4:, 0].double(), expected, rtol=eps / 2, atol=0
    )


@pytest.mark.parametrize(
    ("slopes", "error", "message"),
    [
        ([1.0], TypeError, "`slopes` must be a tensor, but is a list"),
        (torch.ones(3).bool(), TypeError, "`slopes` is torch.bool, not a tensor of"),
        (
            torch.ones(2),
            ValueError,
            "`slopes` has shape [2] on cpu, not [heads (=3)] with values; "
            "`alibi_slopes(3)` would do",
        ),
    ],
)
def test_slopes_that_do_not_fit_are_refused(
    slopes: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        AlibiAttention(HEADS, D_MODEL, slopes=slopes)
