"""Caches are found as arguments, in the module, and by methods that decode."""

from typing import Any

import pytest

from attention_laws.adapter import Adapter, Options
from attention_laws.infer import infer_adapter
from specimens.base import WithCache
from specimens.decoding import (
    DecodesTopLeft,
    LeftContext,
    StepsInGroups,
    StoresAfterSetupInOrder,
)


@pytest.mark.parametrize(
    ("attention", "fields"),
    [
        (WithCache, {"cache": ("past", "[1]"), "decode_method": ""}),
        (DecodesTopLeft, {"cache": ("past", "[1]"), "decode_method": "decode"}),
        (StepsInGroups, {"cache": ("cache", "[1]"), "single_from": 0}),
        (
            StoresAfterSetupInOrder,
            {"cache": ("", ""), "empty_cache": "attention.setup_cache()"},
        ),
        (LeftContext, {"cache": None, "memory": "left"}),
    ],
)
def test_caches_are_found(attention: Any, fields: dict[str, Any]) -> None:
    adapter: Adapter = infer_adapter(attention, "mine", "", Options())
    assert {name: getattr(adapter, name) for name in fields} == fields
