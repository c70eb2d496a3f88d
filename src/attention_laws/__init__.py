"""What every attention must obey: `check` asks yours."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_laws.adapter import Adapter, CannotBeCalled, Mask, Options, Sizes
    from attention_laws.checker import (
        LAWS,
        Counterexample,
        Finding,
        Report,
        check,
    )
    from attention_laws.law import Law

# Where each name lives. It is imported when it is first asked for, so that pytest can
# know of the fixture without importing torch.
HOMES = {
    "LAWS": "checker",
    "Adapter": "adapter",
    "CannotBeCalled": "adapter",
    "Counterexample": "checker",
    "Finding": "checker",
    "Law": "law",
    "Mask": "adapter",
    "Options": "adapter",
    "Report": "checker",
    "Sizes": "adapter",
    "check": "checker",
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
