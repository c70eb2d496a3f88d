"""Fast multi-head attention, and the KV cache for decoding."""

from headnotes.fast.module import KeyValueCache, MultiHeadAttention

__all__ = ["KeyValueCache", "MultiHeadAttention"]
