"""Relative positions: vectors, sinusoids and buckets of distances."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import loops
from attention_laws import check
from headnotes.mha import MultiHeadAttention
from headnotes.variants import relative
from headnotes.variants.relative import (
    ShawAttention,
    T5Attention,
    TransformerXLAttention,
    relative_buckets,
)

Q_LEN, K_LEN, BATCH, HEADS, D_K = 3, 5, 2, 3, 2
D_MODEL = HEADS * D_K
BEHIND = K_LEN - Q_LEN


def compare(
    module: Any, score: loops.Score, value_of: loops.ValueOf | None = None
) -> None:
    """Output and all gradients, those of the tables included."""
    query, key, value = xs = loops.inputs(
        (Q_LEN, BATCH, D_MODEL), (K_LEN, BATCH, D_MODEL), (K_LEN, BATCH, D_MODEL)
    )
    mask = torch.rand(Q_LEN, K_LEN, BATCH) < 0.7
    mask[1, :, 0] = False
    expected = loops.attention(module, query, key, value, mask, score, value_of)
    output = module(query=query, key=key, value=value, mask=mask)
    loops.assert_same(output, expected, [*xs, *module.parameters()])


def test_shaw_is_what_the_loops_compute() -> None:
    module = loops.build(ShawAttention(HEADS, D_MODEL, max_distance=2))

    def row(i: int, j: int) -> int:
        return max(-2, min(2, j - (i + BEHIND))) + 2

    def score(i: int, j: int, b: int, h: int, q: Tensor, k: Tensor) -> Tensor:
        return torch.dot(q, k + module.key_table[row(i, j)]) / math.sqrt(D_K)

    def value_of(i: int, j: int, b: int, h: int, v: Tensor) -> Tensor:
        return v + module.value_table[row(i, j)]

    compare(module, score, value_of)


def test_transformer_xl_is_what_the_loops_compute() -> None:
    module = loops.build(TransformerXLAttention(HEADS, D_MODEL))

    def position(distance: int, h: int) -> Tensor:
        angles = [distance / 10000 ** (n / D_MODEL) for n in range(0, D_MODEL, 2)]
        sinusoid = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        whole = module.position.linear.weight @ torch.tensor(
            sinusoid, dtype=torch.float64
        )
        return whole.view(HEADS, D_K)[h]

    def score(i: int, j: int, b: int, h: int, q: Tensor, k: Tensor) -> Tensor:
        content = torch.dot(q + module.content_bias[h], k)
        by_distance = position(i + BEHIND - j, h)
        total = content + torch.dot(q + module.position_bias[h], by_distance)
        return total / math.sqrt(D_K)

    compare(module, score)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_is_what_the_loops_compute(bidirectional: bool) -> None:
    options: dict[str, Any] = {"buckets": 8, "max_distance": 5}
    module = T5Attention(HEADS, D_MODEL, bidirectional=bidirectional, **options)
    loops.build(module)
    # By hand, for distances 0 to 4: with four buckets, two for a single distance each,
    # and with eight.
    past = [0, 1, 2, 2, 3] if bidirectional else [0, 1, 2, 3, 4]
    after = [0, 5, 6, 6, 7] if bidirectional else [0] * 5

    def score(i: int, j: int, b: int, h: int, q: Tensor, k: Tensor) -> Tensor:
        distance = i + BEHIND - j
        bucket = past[distance] if distance >= 0 else after[-distance]
        return torch.dot(q, k) + module.relative_bias.weight[bucket, h]

    compare(module, score)


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


@pytest.mark.parametrize("kind", KINDS)
def test_laws_of_relative_positions(kind: Any) -> None:
    # "rotary" stands for any encoding in which only distances matter.
    laws = ["relative_positions", "incremental_decoding"]
    report = check(kind, positions="rotary", only=laws)
    assert len(report.passed) == len(laws), report


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
    module = loops.build(TransformerXLAttention(1, 64)).bfloat16()
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
