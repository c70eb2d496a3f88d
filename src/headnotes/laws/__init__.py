"""What every attention must obey: `check` asks yours."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headnotes.laws.adapter import Adapter, Mask, Sizes
    from headnotes.laws.checking import (
        LAWS,
        Counterexample,
        Finding,
        Report,
        check,
    )
    from headnotes.laws.law import Law
    from headnotes.laws.options import CannotBeCalled, Options

# Where each name lives. It is imported when it is first asked for, so that pytest can
# know of the fixture without importing torch.
HOMES = {
    "LAWS": "checking",
    "Adapter": "adapter",
    "CannotBeCalled": "options",
    "Counterexample": "checking",
    "Finding": "checking",
    "Law": "law",
    "Mask": "adapter",
    "Options": "options",
    "Report": "checking",
    "Sizes": "adapter",
    "check": "checking",
}

__all__ = [
    "LAWS",
    "Adapter",
    "CannotBeCalled",
    "Counterexample",
    "Finding",
    "Law",
    "Mask",
    "Options",
    "Report",
    "Sizes",
    "check",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
