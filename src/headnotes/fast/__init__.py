"""Multi-head attention at full speed, and the KV cache of its decoding."""

from headnotes.fast.kv_cache import KeyValueCache
from headnotes.fast.module import MultiHeadAttention

__all__ = ["KeyValueCache", "MultiHeadAttention"]
