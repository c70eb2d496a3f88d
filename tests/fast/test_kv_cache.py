"""The KV cache stores keys and values in place, in order, and checks their sizes."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from headnotes.fast import KeyValueCache

BATCH, HEADS, D_K, CAPACITY = 3, 5, 7, 11


def build(capacity: int = CAPACITY, **settings: Any) -> KeyValueCache:
    return KeyValueCache(BATCH, HEADS, D_K, capacity, **settings)


def some(seq_len: int, batch_size: int = BATCH, **like: Any) -> tuple[Tensor, Tensor]:
    """Random keys and values, `[seq_len, batch_size, heads, d_k]`."""
    key, value = torch.randn(2, seq_len, batch_size, HEADS, D_K, **like)
    return key, value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_appended_keys_and_values_are_stored_in_order(
    device: torch.device, dtype: torch.dtype
) -> None:
    cache = build(dtype=dtype, device=device)
    pieces = [some(n, dtype=dtype, device=device) for n in (2, 1, 0, 5)]
    for n, (key, value) in enumerate(pieces, 1):
        cache.append(key, value)
        keys = torch.cat([k for k, _ in pieces[:n]]).permute(1, 2, 0, 3)
        values = torch.cat([v for _, v in pieces[:n]]).permute(1, 2, 0, 3)
        assert torch.equal(cache.keys, keys)
        assert torch.equal(cache.values, values)
        assert len(cache) == cache.length == keys.shape[2]
    assert cache.capacity == CAPACITY


def test_positions_are_written_in_place_head_by_head_and_returned_as_views() -> None:
    cache = build()
    place = cache.buffer.data_ptr()
    for n in range(CAPACITY):
        cache.append(*some(1))
        assert len(cache) == n + 1
    assert cache.buffer.data_ptr() == cache.keys.data_ptr() == place
    assert cache.values._base is cache.buffer
    assert cache.buffer.shape == (2, BATCH, HEADS, CAPACITY, D_K)
    assert cache.keys.stride()[2:] == (D_K, 1)


def test_the_cache_holds_copies_without_gradients() -> None:
    cache = build()
    key, value = some(2)
    expected = key.clone().permute(1, 2, 0, 3)
    cache.append(key.requires_grad_(), value.requires_grad_())
    key.data.zero_()
    assert torch.equal(cache.keys, expected)
    assert not cache.buffer.requires_grad
    assert cache.buffer.grad_fn is None


def test_a_growing_cache_doubles_its_capacity_and_keeps_its_contents(
    device: torch.device,
) -> None:
    cache = build(3, grow=True, dtype=torch.float64, device=device)
    key, value = some(20, dtype=torch.float64, device=device)
    capacities = []
    for n in (0, 1, 2, 3, 4, 13):  # the last one needs more than twice
        start, end = n, {13: 20}.get(n, n + 1) if n != 4 else 13
        cache.append(key[start:end], value[start:end])
        capacities.append(cache.capacity)
    assert capacities == [3, 3, 3, 6, 24, 24]
    assert torch.equal(cache.keys, key.permute(1, 2, 0, 3))
    assert torch.equal(cache.values, value.permute(1, 2, 0, 3))
    assert (cache.buffer.dtype, cache.buffer.device.type) == (
        torch.float64,
        device.type,
    )


def test_a_full_cache_raises_and_is_left_unchanged() -> None:
    cache = build(4)
    cache.append(*some(3))
    before = cache.buffer.clone()
    message = (
        "the cache is full: it holds 3 of 4 positions, and 2 more do not fit; give it "
        "more `capacity`, or `grow=True`"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        cache.append(*some(2))
    assert len(cache) == 3
    assert torch.equal(cache.buffer[:, :, :, :3], before[:, :, :, :3])
    cache.append(*some(1))
    assert len(cache) == cache.capacity == 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("order", [[2, 2, 0], [1], [0, 1, 2, 2, 1, 0, 0]], ids=str)
def test_reorder_selects_the_batch_items_to_continue_from(
    device: torch.device, order: list[int], dtype: torch.dtype
) -> None:
    cache = build(device=device)
    key, value = some(5, device=device)
    cache.append(key, value)
    cache.reorder(torch.tensor(order, dtype=dtype))
    assert torch.equal(cache.keys, key[:, order].permute(1, 2, 0, 3))
    assert torch.equal(cache.values, value[:, order].permute(1, 2, 0, 3))
    assert (len(cache), cache.capacity) == (5, CAPACITY)
    more = some(1, len(order), device=device)
    cache.append(*more)
    assert torch.equal(cache.keys[:, :, 5:], more[0].permute(1, 2, 0, 3))
    # Two items with the same past are independent from now on.
    if len(order) == 3:
        assert torch.equal(cache.keys[0, :, :5], cache.keys[1, :, :5])
        assert not torch.equal(cache.keys[0], cache.keys[1])


def test_copies_are_independent() -> None:
    cache = build()
    cache.append(*some(2))
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(twin.keys, cache.keys)
        twin.append(*some(1))
        twin.buffer.zero_()
        assert len(cache) == 2
        assert cache.keys.any()


def test_works_on_the_meta_device() -> None:
    cache = build(2, grow=True, device="meta")
    cache.append(*some(3, device="meta"))
    assert cache.keys.shape == (BATCH, HEADS, 3, D_K)


# Errors


@pytest.mark.parametrize("name", ["batch_size", "heads", "d_k", "capacity"])
@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
def test_invalid_sizes_raise(name: str, size: Any) -> None:
    sizes: dict[str, Any] = {"batch_size": 3, "heads": 5, "d_k": 7, "capacity": 11}
    message = f"`{name}` (={size!r}) must be an int from 1 up"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        KeyValueCache(**sizes | {name: size})


KEY = torch.randn(2, BATCH, HEADS, D_K)
SHAPE = "not [seq_len, batch_size (=3), heads (=5), d_k (=7)]"


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"key": KEY.double()},
            TypeError,
            "`key` is torch.float64, the cache torch.float32; make the cache with the "
            "`dtype` that it is to hold",
        ),
        (
            {"value": [0.0]},
            TypeError,
            "`value` is list, the cache torch.float32; make the cache with the `dtype` "
            "that it is to hold",
        ),
        ({"key": KEY[0]}, ValueError, f"`key` has shape [3, 5, 7], {SHAPE}"),
        ({"key": KEY[:, :2]}, ValueError, f"`key` has shape [2, 2, 5, 7], {SHAPE}"),
        (
            {"value": KEY.transpose(1, 2)},
            ValueError,
            f"`value` has shape [2, 5, 3, 7], {SHAPE}",
        ),
        (
            {"value": KEY[..., :5]},
            ValueError,
            f"`value` has shape [2, 3, 5, 5], {SHAPE}",
        ),
        (
            {"value": KEY[:1]},
            ValueError,
            "`value` has length 1, `key` 2; make them equal",
        ),
        (
            {"value": KEY.to("meta")},
            ValueError,
            "`value` is on meta, the cache on cpu; make the cache with that `device`",
        ),
    ],
)
def test_tensors_that_do_not_fit_raise_and_leave_the_cache_unchanged(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    cache = build(grow=True)
    cache.append(KEY, KEY)
    before = cache.buffer.clone()
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        cache.append(**{"key": KEY, "value": KEY} | changed)
    assert len(cache) == 2
    assert torch.equal(cache.keys, before[0, :, :, :2])


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ([0], TypeError, "`index` is list, not an int64 tensor of batch items"),
        (
            torch.tensor([True]),
            TypeError,
            "`index` is torch.bool, not an int64 tensor of batch items",
        ),
        (
            torch.tensor([0.0]),
            TypeError,
            "`index` is torch.float32, not an int64 tensor of batch items",
        ),
        (
            torch.tensor([[0]]),
            ValueError,
            "`index` has shape [1, 1], not [batch_size]; give one item for each new "
            "batch item",
        ),
        (
            torch.tensor([]).long(),
            ValueError,
            "`index` has shape [0], not [batch_size]; give one item for each new "
            "batch item",
        ),
        (
            torch.tensor([0, 3]),
            ValueError,
            "`index` names items 0 to 3, but there are 0 to 2",
        ),
        (
            torch.tensor([-1, 1]),
            ValueError,
            "`index` names items -1 to 1, but there are 0 to 2",
        ),
    ],
)
def test_indices_that_do_not_name_batch_items_raise(
    index: Any, error: type[Exception], message: str
) -> None:
    cache = build()
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        cache.reorder(index)
    assert cache.buffer.shape[1] == BATCH
