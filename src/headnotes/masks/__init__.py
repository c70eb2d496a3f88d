"""Masks: built, brought to other conventions and back, and said in words."""

from headnotes.masks.build import (
    block_diagonal,
    causal,
    combine,
    from_function,
    padding,
    prefix_lm,
    sliding_window,
)
from headnotes.masks.compact import (
    from_cu_seqlens,
    to_cu_seqlens,
    to_is_causal,
    to_valid_lens,
)
from headnotes.masks.conventions import (
    from_additive,
    from_huggingface,
    from_keras,
    from_key_mask,
    from_key_padding_mask,
    from_mha,
    from_sdpa,
    to_additive,
    to_huggingface,
    to_keras,
    to_key_mask,
    to_key_padding_mask,
    to_mha,
    to_sdpa,
)
from headnotes.masks.describe import describe
from headnotes.masks.flex import (
    from_block_mask,
    from_mask_mod,
    to_block_mask,
    to_mask_mod,
)

__all__ = [
    "block_diagonal",
    "causal",
    "combine",
    "describe",
    "from_additive",
    "from_block_mask",
    "from_cu_seqlens",
    "from_function",
    "from_huggingface",
    "from_keras",
    "from_key_mask",
    "from_key_padding_mask",
    "from_mask_mod",
    "from_mha",
    "from_sdpa",
    "padding",
    "prefix_lm",
    "sliding_window",
    "to_additive",
    "to_block_mask",
    "to_cu_seqlens",
    "to_huggingface",
    "to_is_causal",
    "to_keras",
    "to_key_mask",
    "to_key_padding_mask",
    "to_mask_mod",
    "to_mha",
    "to_sdpa",
    "to_valid_lens",
]
