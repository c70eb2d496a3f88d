"""Fast multi-head attention, the KV cache for decoding, and components of decoders."""

from headnotes.fast.components import Rotary, Scores, Widths
from headnotes.fast.module import KeyValueCache, MultiHeadAttention

__all__ = ["KeyValueCache", "MultiHeadAttention", "Rotary", "Scores", "Widths"]
