"""Multi-head attention in PyTorch, with masks, a fast version and weight conversion."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headnotes import convert, fast, masks
    from headnotes.mha import MultiHeadAttention, PrepareForMultiHeadAttention

__version__ = "0.1.0"

__all__ = [
    "MultiHeadAttention",
    "PrepareForMultiHeadAttention",
    "convert",
    "fast",
    "masks",
]


def __getattr__(name: str) -> Any:
    # Imported lazily: pytest and the command line load this package, and importing
    # torch takes seconds.
    if name in ("convert", "fast", "masks"):
        return importlib.import_module(f"headnotes.{name}")
    if name in __all__:
        return getattr(importlib.import_module("headnotes.mha"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
