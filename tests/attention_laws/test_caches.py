"""How a cache is made, stored and removed is told by names."""

import inspect

import pytest
from torch import Tensor, nn

from attention_laws import caches


class Room:
    def __init__(self, rows: int, capacity: int, device: str = "cpu") -> None: ...


class StoresRoom(nn.Module):
    def new_cache(
        self, batch_size: int, max_len: int, dtype: object = None
    ) -> None: ...

    def reset_cache(self) -> None: ...

    def reset_rows(self, rows: Tensor) -> None: ...

    def forward(self, x: Tensor, cache: Room, use_cache: bool = False) -> Tensor:
        return x


CACHE = inspect.signature(StoresRoom.forward).parameters["cache"]


def test_a_cache_is_made_by_a_method_or_by_its_class() -> None:
    texts = [text for text, _classes in caches.empty_caches(StoresRoom, CACHE)]
    made = "attention.new_cache(batch_size={batch_size}, max_len=320, dtype={dtype})"
    built = "Room(rows={batch_size}, capacity=320, device={device})"
    assert texts == ["dict()", made, built]


def test_a_required_cache_has_the_dtype_and_device_of_the_weights() -> None:
    made, built = caches.new_caches(StoresRoom, CACHE)
    assert "dtype=next(attention.parameters()).dtype" in made
    assert "device=next(attention.parameters()).device" in built


@pytest.mark.parametrize("target", [StoresRoom, StoresRoom()])
def test_methods_without_arguments_reset_a_module(target: object) -> None:
    assert caches.reset_methods(target) == ["reset_cache"]


def test_flags_store_a_cache() -> None:
    parameters = inspect.signature(StoresRoom.forward).parameters.values()
    assert [*caches.cache_steps(parameters, {})] == [{"use_cache": "True"}]
