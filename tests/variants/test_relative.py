"""Relative positions: vectors, sinusoids and buckets of distances."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from claims import BATCH, K_LEN, Q_LEN, assert_equals_the_loops, in_float64, some_mask
from headnotes.mha import MultiHeadAttention
from headnotes.variants import relative
from headnotes.variants.relative import (
    ShawAttention,
    T5Attention,
    TransformerXLAttention,
    relative_buckets,
)
from loops import Pair, dot

HEADS, D_K = 3, 2
D_MODEL = HEADS * D_K
BEHIND = K_LEN - Q_LEN


@pytest.mark.slow
def test_shaw_is_what_the_loops_compute() -> None:
    module = ShawAttention(HEADS, D_MODEL, max_distance=2)

    def row(at: Pair) -> int:
        return max(-2, min(2, at.j - (at.i + BEHIND))) + 2

    def score(q: Tensor, k: Tensor, at: Pair) -> Tensor:
        return dot(q, k + module.key_table[row(at)])

    def value_of(v: Tensor, at: Pair) -> Tensor:
        return v + module.value_table[row(at)]

    assert_equals_the_loops(module, some_mask(), score=score, value_of=value_of)


def test_transformer_xl_is_what_the_loops_compute() -> None:
    module = TransformerXLAttention(HEADS, D_MODEL)

    def position(distance: int, h: int) -> Tensor:
        angles = [distance / 10000 ** (n / D_MODEL) for n in range(0, D_MODEL, 2)]
        sinusoid = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        whole = module.position.linear.weight @ torch.tensor(
            sinusoid, dtype=torch.float64
        )
        return whole.view(HEADS, D_K)[h]

    def score(q: Tensor, k: Tensor, at: Pair) -> Tensor:
        by_distance = position(at.i + BEHIND - at.j, at.h)
        content = dot(q + module.content_bias[at.h], k)
        return content + dot(q + module.position_bias[at.h], by_distance)

    assert_equals_the_loops(module, some_mask(), score=score)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_is_what_the_loops_compute(bidirectional: bool) -> None:
    options: dict[str, Any] = {"buckets": 8, "max_distance": 5}
    module = T5Attention(HEADS, D_MODEL, bidirectional=bidirectional, **options)
    # By hand, for distances 0 to 4: with four buckets, two for a single distance each,
    # and with eight.
    past = [0, 1, 2, 2, 3] if bidirectional else [0, 1, 2, 3, 4]
    after = [0, 5, 6, 6, 7] if bidirectional else [0] * 5

    def score(q: Tensor, k: Tensor, at: Pair) -> Tensor:
        distance = at.i + BEHIND - at.j
        bucket = past[distance] if distance >= 0 else after[-distance]
        return torch.dot(q, k) + module.relative_bias.weight[bucket, at.h]

    assert_equals_the_loops(module, some_mask(), score=score)


KINDS = [ShawAttention, TransformerXLAttention, T5Attention]


@pytest.mark.parametrize("kind", KINDS)
def test_with_zero_tables_it_is_the_core(kind: Any) -> None:
    core = MultiHeadAttention(HEADS, D_MODEL).eval()
    module = kind(HEADS, D_MODEL).eval()
    for parameter in module.parameters():
        torch.nn.init.zeros_(parameter)
    module.load_state_dict(core.state_dict(), strict=False)
    core.scale = module.scale  # T5 has none
    x = torch.randn(K_LEN, BATCH, D_MODEL)
    torch.testing.assert_close(
        module(query=x, key=x, value=x), core(query=x, key=x, value=x)
    )


@pytest.mark.parametrize(
    ("q_len", "k_len"), [(3, 5), (1, 4), (5, 3), (1, 1), (0, 3), (2, 0), (0, 0)]
)
def test_the_shift_finds_the_distance_of_each_key(q_len: int, k_len: int) -> None:
    distances = torch.arange(k_len - 1, -q_len - 1, -1).expand(q_len, -1)
    shifted = relative.relative_shift(distances)
    expected = -relative.relative_positions(q_len, k_len, torch.device("cpu"))
    assert torch.equal(shifted, expected)


def test_distances_are_not_rounded_to_the_dtype_of_the_model() -> None:
    # In bfloat16, a distance of 1,001 is 1,000.
    module = in_float64(TransformerXLAttention(1, 64)).bfloat16()
    query = torch.randn(1, 1, 1, 64).bfloat16()
    key = torch.zeros(1002, 1, 1, 64).bfloat16()
    table = relative.xl_sinusoids(torch.arange(1001, -1, -1), 64)
    assert not torch.allclose(table[0], table[1], atol=0.1)
    by_distance = module.position.linear.weight.double() @ table.T
    biased = query.flatten().double() + module.position_bias.double() / 8
    expected = (biased @ by_distance).flatten()
    scores = module.get_scores(query, key).flatten().double()
    error = (scores - expected).abs().max() / expected.abs().max()
    assert error < 0.02


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ShawAttention(HEADS, D_MODEL, max_distance=0),
            ValueError,
            "`max_distance` (=0) must be an int from 1 up",
        ),
        (
            lambda: T5Attention(HEADS, D_MODEL, buckets=2),
            ValueError,
            "`buckets` (=2) must be an int from 4 up",
        ),
        (
            lambda: T5Attention(HEADS, D_MODEL, buckets=9),
            ValueError,
            "`buckets` (=9) must be even, as keys before and after the query have",
        ),
        (
            lambda: T5Attention(HEADS, D_MODEL, max_distance=8),
            ValueError,
            "`max_distance` (=8) must be an int from 9 up",
        ),
        (
            lambda: relative_buckets(torch.zeros(3)),
            TypeError,
            "`positions` is torch.float32; use `positions.long()`",
        ),
        (
            lambda: relative_buckets(torch.zeros(3).long(), bidirectional=1),  # type: ignore[arg-type]
            TypeError,
            "`bidirectional` (=1) must be True or False",
        ),
        (
            lambda: relative.relative_shift(torch.zeros(5, 3)),
            ValueError,
            "`x` has shape [5, 3], not [q_len, q_len + k_len]",
        ),
        (
            lambda: relative.xl_sinusoids(torch.zeros(5, 3), 4),
            ValueError,
            "`distances` is torch.float32 of shape [5, 3], not [length] of real",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    call: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()
