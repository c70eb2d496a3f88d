"""Multi-head attention at full speed, and the KV cache of its decoding."""

from headnotes.fast.module import KeyValueCache, MultiHeadAttention

__all__ = ["KeyValueCache", "MultiHeadAttention"]
