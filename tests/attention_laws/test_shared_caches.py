"""Caches that instances and calls share."""

import builtins
import functools

import pytest
import torch
from torch import Tensor, nn

from attention_laws.shared_caches import clear_caches, restored_caches, uncached


class ReadsTable(nn.Module):
    """What is no cache, but a dict of tensors, is read in each call."""


TABLE = {"scale": torch.tensor(0.5)}


def test_dicts_of_tensors_are_emptied_and_hold_the_same_afterwards() -> None:
    before = dict(TABLE)
    with restored_caches(ReadsTable()):
        assert clear_caches(ReadsTable())
        assert TABLE == {}
    assert before == TABLE


def test_the_builtins_stay_where_the_last_value_displayed_is_a_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builtins, "_", torch.ones(2), raising=False)
    # So `torch.compile` names them in the file of a module.
    monkeypatch.setitem(globals(), "__builtins_dict___0", vars(builtins))
    before = dict(vars(builtins))
    with restored_caches(ReadsTable()):
        clear_caches(ReadsTable())
        assert vars(builtins) == before


SETTING = [2.0]
ROWS: dict[int, Tensor] = {}


@functools.lru_cache
def read_setting() -> float:
    return SETTING[0]


def make_row(length: int) -> Tensor:
    if length not in ROWS:
        ROWS[length] = torch.full((length,), read_setting())
    return ROWS[length]


def test_without_caches_nothing_stored_is_read_and_nothing_is_left() -> None:
    before = make_row(3)
    SETTING[0] = 5.0
    assert uncached(make_row)(3).tolist() == [5.0] * 3
    assert uncached(make_row)(7).tolist() == [5.0] * 7
    assert make_row(3) is before
    assert make_row(7).tolist() == [2.0] * 7
