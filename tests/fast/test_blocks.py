"""Blocks: each weight is computed once, in buffers that are used again."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from headnotes.fast import blocks
from headnotes.fast.blocks import Rule, Workspace, bounds, read_of, rows_of

Q_LEN, K_LEN, BATCH, HEADS, D_K = 13, 17, 3, 11, 2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ROWS", 4)
    monkeypatch.setattr(blocks, "SCORES", 1)


def some(q_len: int = Q_LEN, k_len: int = K_LEN) -> tuple[Tensor, Tensor]:
    query = torch.randn(q_len, BATCH, HEADS, D_K, dtype=torch.float64)
    return query, torch.randn(k_len, BATCH, HEADS, D_K, dtype=torch.float64)


@pytest.mark.parametrize("fit", [1, 8, 11, 22, 25, 1000])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(("q_len", "k_len"), [(13, 17), (17, 13), (16, 16), (3, 5)])
def test_every_query_that_may_read_is_in_one_block_with_all_that_it_may_read(
    monkeypatch: pytest.MonkeyPatch, q_len: int, k_len: int, is_causal: bool, fit: int
) -> None:
    monkeypatch.setattr(blocks, "SCORES", fit * min(4, q_len) * k_len)
    query, key = some(q_len, k_len)
    work = Workspace(query, key, Rule(is_causal=is_causal))
    times = torch.zeros(q_len, BATCH, HEADS, dtype=torch.int64)
    most = 0
    for block in work.blocks():
        times[block.rows, block.items, block.heads] += 1
        rows, k = range(q_len)[block.rows], block.k_len
        assert 0 < len(rows) <= 4
        assert k == (rows[-1] + 1 + k_len - q_len if is_causal else k_len)
        folded = rows_of(query, block).shape[0]
        assert folded <= max(8, fit)
        most = max(most, folded)
        # Items are whole, or parts of one.
        assert (
            len(range(HEADS)[block.heads]) == HEADS
            or len(range(BATCH)[block.items]) == 1
        )
    blind = max(0, q_len - k_len) if is_causal else 0
    assert not times[:blind].any()
    assert (times[blind:] == 1).all()
    assert most > fit // 2 or most == BATCH * HEADS


def test_rows_and_keys_of_a_block_fold_items_and_heads() -> None:
    query, key = some()
    work = Workspace(query, key, Rule(is_causal=True))
    for block in work.blocks():
        folded = itertools.product(range(BATCH)[block.items], range(HEADS)[block.heads])
        q, k = rows_of(query, block), read_of(key, block)
        for n, (b, h) in enumerate(folded):
            assert torch.equal(q[n], query[block.rows, b, h])
            assert torch.equal(k[n], key[: block.k_len, b, h])


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(
    "shape", [None, (1, K_LEN, BATCH), (Q_LEN, K_LEN, 1), (Q_LEN, K_LEN, BATCH)]
)
def test_weights_of_a_block_are_those_of_the_whole(
    shape: tuple[int, ...] | None, is_causal: bool
) -> None:
    query, key = some()
    mask = None if shape is None else torch.rand(shape) < 0.4
    keep = torch.ones(Q_LEN, K_LEN, BATCH).bool() if mask is None else mask
    keep = keep.expand(Q_LEN, K_LEN, BATCH)
    if is_causal:
        keep = keep & torch.ones(Q_LEN, K_LEN).bool().tril(K_LEN - Q_LEN)[..., None]
    scores = torch.einsum("ibhd,jbhd->bhij", query, key) / math.sqrt(D_K)
    scores = scores.masked_fill(~keep.permute(2, 0, 1)[:, None], -math.inf)
    whole = scores.softmax(-1).nan_to_num(0)

    work = Workspace(query, key, Rule(mask, is_causal))
    for block in work.blocks():
        weights = work.weights(query, key, block)
        part = whole[block.items, block.heads, block.rows]
        torch.testing.assert_close(weights, part[..., : block.k_len].flatten(0, 1))
        assert not part[..., block.k_len :].any()


def test_all_blocks_share_their_buffers() -> None:
    query, key = some()
    work = Workspace(query, key, Rule(dropout_prob=0.5))
    places = set()
    for block in work.blocks():
        weights = work.weights(query, key, block)
        kept = work.kept(weights)
        places.add((weights.data_ptr(), kept.data_ptr()))
        assert weights.untyped_storage().nbytes() <= 8 * 8 * 4 * K_LEN
        assert kept.shape == weights.shape
    assert len(places) == 1


def test_where_no_block_writes_the_output_is_zero() -> None:
    query, key = some(K_LEN, Q_LEN)
    work = Workspace(query, key, Rule(is_causal=True))
    output = work.output()
    assert output.shape == query.shape
    assert not output[: K_LEN - Q_LEN].any()
    assert work.first == K_LEN - Q_LEN
    assert Workspace(query, key, Rule()).first == 0


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 1.0])
def test_the_gain_makes_up_for_the_probability_as_it_was_rounded(p: float) -> None:
    work = Workspace(*some(), Rule(dropout_prob=p))
    chance = work.dropped / 2**16
    assert abs(chance - p) <= 2**-16
    assert work.gain == (0 if p == 1 else 1 / (1 - chance))


def test_draws_are_zeros_and_ones_and_follow_the_seed() -> None:
    query, key = some()
    drawn = []
    for seed in (1, 1, 2):
        work = Workspace(query, key, Rule(dropout_prob=0.3, seed=seed))
        weights = work.weights(query, key, next(work.blocks()))
        drawn.append([work.kept(weights).clone() for _ in range(2)])
    for one, other in zip(*drawn[:2], strict=True):
        assert torch.equal(one, other)
        assert one.unique().tolist() == [0, 1]
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert not torch.equal(drawn[0][0], drawn[2][0])


def test_bounds_forbid_and_allow() -> None:
    keep = torch.tensor([True, False])
    for dtype in (torch.float16, torch.float32):
        assert bounds(keep, torch.zeros(1, dtype=dtype)).tolist() == [
            math.inf,
            -math.inf,
        ]
