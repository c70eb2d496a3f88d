"""The blockwise kernel: its tiles, their weights and dropout, and its gradients."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from calls import (
    BATCH,
    CAUSAL,
    CLOSE,
    D_K,
    HEADS,
    MASKS,
    call_of,
    masks_of,
    reference,
    shrink,
    tensors,
)
from headnotes.fast import blockwise, formula
from headnotes.fast.blockwise import Tiles, TileSpec


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles have 2 rows and 8 of the 11 heads; 7 keys are few."""
    shrink(monkeypatch)


def tiles_of(
    q_len: int = 13,
    k_len: int = 17,
    mask: Tensor | None = None,
    is_causal: bool = False,
    p: float = 0.0,
    seed: int = 0,
) -> tuple[Tiles, Tensor, Tensor]:
    """The tiles of a call, its query and its key."""
    query, key, _ = tensors(q_len, k_len)
    spec = TileSpec(0, is_causal, True, formula.dropout_threshold(p), seed)
    return Tiles(query, key, mask, spec), query, key


@pytest.mark.parametrize("fit", [1, 8, 11, 22, 25, 1000])
@CAUSAL
@pytest.mark.parametrize(("q_len", "k_len"), [(13, 17), (17, 13), (16, 16), (3, 5)])
def test_each_query_is_in_one_tile_with_all_keys_that_it_may_attend_to(
    monkeypatch: pytest.MonkeyPatch, q_len: int, k_len: int, is_causal: bool, fit: int
) -> None:
    monkeypatch.setattr(blockwise, "TILE_ROWS", 4)
    monkeypatch.setattr(blockwise, "TILE_SCORES", fit * min(4, q_len) * k_len)
    tiles, query, _ = tiles_of(q_len, k_len, is_causal=is_causal)
    times = torch.zeros(q_len, BATCH, HEADS, dtype=torch.int64)
    most = 0
    for tile in tiles:
        times[tile.rows, tile.items, tile.heads] += 1
        rows = range(q_len)[tile.rows]
        assert 0 < len(rows) <= 4
        assert tile.k_len == (rows[-1] + 1 + k_len - q_len if is_causal else k_len)
        folded = tile.queries(query).shape[0]
        assert folded <= max(8, fit)
        most = max(most, folded)
        # All heads of several items, or some heads of one.
        assert (
            len(range(HEADS)[tile.heads]) == HEADS or len(range(BATCH)[tile.items]) == 1
        )
    without_keys = max(0, q_len - k_len) if is_causal else 0
    assert not times[:without_keys].any()
    assert (times[without_keys:] == 1).all()
    assert most > fit // 2 or most == BATCH * HEADS


def test_a_tile_flattens_batch_and_heads() -> None:
    tiles, query, key = tiles_of(is_causal=True)
    for tile in tiles:
        folded = itertools.product(range(BATCH)[tile.items], range(HEADS)[tile.heads])
        queries, keys = tile.queries(query), tile.keys(key)
        for n, (b, h) in enumerate(folded):
            assert torch.equal(queries[n], query[tile.rows, b, h])
            assert torch.equal(keys[n], key[: tile.k_len, b, h])


@CAUSAL
@pytest.mark.parametrize("kind", MASKS)
def test_the_weights_of_a_tile_are_those_of_all_keys(
    kind: str, is_causal: bool
) -> None:
    mask = masks_of(13, 17, BATCH)[kind]
    tiles, query, key = tiles_of(mask=mask, is_causal=is_causal)
    _, full = reference(query, key, key, mask, is_causal)
    full = full.permute(2, 3, 0, 1)  # [batch_size, heads, q_len, k_len]
    for tile in tiles:
        weights, _ = tiles.weights(query, key, tile)
        part = full[tile.items, tile.heads, tile.rows]
        expected = part[..., : tile.k_len].flatten(0, 1)
        torch.testing.assert_close(weights, expected, **CLOSE)
        assert not part[..., tile.k_len :].any()


def test_tiles_share_their_buffers() -> None:
    tiles, query, key = tiles_of(p=0.5)
    places = set()
    for tile in tiles:
        weights, _ = tiles.weights(query, key, tile)
        keep = tiles.dropout_mask(weights.shape)
        places.add((weights.data_ptr(), keep.data_ptr()))
        assert weights.untyped_storage().nbytes() <= 8 * 8 * 2 * 17
        assert keep.shape == weights.shape
    assert len(places) == 1


def test_rows_that_no_tile_writes_are_zero() -> None:
    tiles, query, _ = tiles_of(17, 13, is_causal=True)
    output = tiles.empty_output()
    assert output.shape == query.shape
    assert tiles.first_row == 4
    assert not output[:4].any()
    assert tiles_of(17, 13)[0].first_row == 0


def test_dropout_masks_are_zeros_and_ones_that_follow_the_seed() -> None:
    masks = []
    for seed in (1, 1, 2):
        tiles, query, key = tiles_of(p=0.3, seed=seed)
        shape = tiles.weights(query, key, next(iter(tiles)))[0].shape
        masks.append([tiles.dropout_mask(shape).clone() for _ in range(2)])
    for one, other in zip(*masks[:2], strict=True):
        assert torch.equal(one, other)
        assert one.unique().tolist() == [0, 1]
    assert not torch.equal(masks[0][0], masks[0][1])
    assert not torch.equal(masks[0][0], masks[2][0])


def test_drop_all_drops_the_weights_that_all_tiles_drop() -> None:
    tiles, query, key = tiles_of(is_causal=True, p=0.3, seed=5)
    again, *_ = tiles_of(is_causal=True, p=0.3, seed=5)
    ones = torch.ones(again.batch_size, again.heads, again.q_len, again.k_len)
    full, scale = again.drop_all(ones.double())
    assert scale == formula.dropout_scale(again.spec.dropout_threshold)
    for tile in tiles:
        keep = tiles.dropout_mask(tiles.weights(query, key, tile)[0].shape)
        part = full[tile.items, tile.heads, tile.rows, : tile.k_len]
        assert torch.equal(tile.split_heads(keep).double(), part)


def test_keys_of_a_head_are_contiguous_where_half_precision_would_copy_them() -> None:
    tiles, _, key = tiles_of()
    assert tiles.head_contiguous(key) is key
    half = key.half()
    copied = tiles.head_contiguous(half)
    assert torch.equal(copied, half)
    assert copied.permute(1, 2, 0, 3).is_contiguous()
    short, *_ = tiles_of(q_len=2)
    assert short.head_contiguous(half) is half


@pytest.mark.parametrize("average_weights", [False, True], ids=["each head", "mean"])
def test_a_loss_of_the_context_or_the_weights_alone_has_its_gradients(
    average_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = []  # the gradients of the weights
    tile_gradients = blockwise.tile_gradients

    def record(*x: Any) -> Any:
        arrived.append(x[-1])
        return tile_gradients(*x)

    monkeypatch.setattr(blockwise, "tile_gradients", record)
    x = tensors(requires_grad=True)
    context, weights = reference(*x, None, False)
    expected = context, weights.mean(-1) if average_weights else weights
    options = {"need_weights": True, "average_weights": average_weights}
    outputs = blockwise.blockwise(call_of(*x, **options))
    for ours, theirs in zip(outputs, expected, strict=True):
        upstream = torch.randn_like(theirs)
        gradients = torch.autograd.grad(ours, x, upstream, retain_graph=True)
        right = torch.autograd.grad(
            theirs, x, upstream, retain_graph=True, materialize_grads=True
        )
        for a, b in zip(gradients, right, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
        recorded = torch.autograd.grad(
            ours, x, upstream, retain_graph=True, create_graph=True, allow_unused=True
        )
        for a, b in zip(recorded, right, strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, **CLOSE)
            assert a is not None or not b.any()
    # Weights that no loss uses bring no gradient full of zeros.
    assert arrived[0] is None
    assert arrived[1].shape.numel() == expected[1].numel()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_in_half_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    # All weights of a key are equal, so its gradient is a long sum of equal numbers.
    q_len = 2003
    query = torch.zeros(q_len, 1, 1, D_K, dtype=dtype)
    key = torch.zeros(1, 1, 1, D_K, dtype=dtype)
    value = torch.ones(1, 1, 1, D_K, dtype=dtype, requires_grad=True)
    context, _ = blockwise.blockwise(call_of(query, key, value))
    context.sum().backward()
    assert torch.equal(value.grad, torch.full_like(value, q_len))
