"""Caches of a context, which an attention keeps from call to call."""

from typing import Any

import pytest

from attention_laws import check
from specimens.decoding import (
    CachesContext,
    CachesContextOfOneShape,
    DropsMaskOfCachedContext,
    KeepsTextOfShape,
    StoresContextBeforeNorm,
)


@pytest.mark.parametrize(
    ("attention", "cause"),
    [
        (CachesContextOfOneShape, "differs with the cache of another context"),
        (KeepsTextOfShape, "differs with the cache of another context"),
        (DropsMaskOfCachedContext, "differs with a cache of the context"),
        (StoresContextBeforeNorm, "differs with a cache of the context"),
    ],
)
def test_what_is_wrong_with_a_cache_of_a_context_is_named(
    attention: Any, cause: str
) -> None:
    (failed,) = check(attention, only="incremental_decoding").failed
    assert failed.detail.endswith(cause)


def test_a_cache_of_the_last_context_may_be_kept() -> None:
    assert check(CachesContext, only="incremental_decoding").passed
