"""Laws of attention, and `check`, which tests them on any implementation."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_laws.adapter import (
        Adapter,
        CallError,
        MaskArgument,
        Options,
        Sizes,
    )
    from attention_laws.checker import (
        LAWS,
        Counterexample,
        LawResult,
        Report,
        check,
    )
    from attention_laws.law import Law

# The module that defines each name. It is imported on first access: pytest imports this
# package for its plugin in every project of the environment, and torch takes seconds.
DEFINED_IN = {
    "LAWS": "checker",
    "Adapter": "adapter",
    "CallError": "adapter",
    "Counterexample": "checker",
    "Law": "law",
    "LawResult": "checker",
    "MaskArgument": "adapter",
    "Options": "adapter",
    "Report": "checker",
    "Sizes": "adapter",
    "check": "checker",
}

__all__ = [
    "LAWS",
    "Adapter",
    "CallError",
    "Counterexample",
    "Law",
    "LawResult",
    "MaskArgument",
    "Options",
    "Report",
    "Sizes",
    "check",
]


def __getattr__(name: str) -> Any:
    if name not in DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{DEFINED_IN[name]}"), name)
