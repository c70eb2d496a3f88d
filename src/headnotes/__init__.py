"""Multi-head attention, line by line. The modules are the documentation: read them."""

from headnotes import convert, masks
from headnotes.mha import MultiHeadAttention, PrepareForMultiHeadAttention

__version__ = "0.1.0"

__all__ = ["MultiHeadAttention", "PrepareForMultiHeadAttention", "convert", "masks"]
