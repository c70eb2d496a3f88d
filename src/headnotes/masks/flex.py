r"""# Masks for FlexAttention

This module converts masks to and from the two forms that FlexAttention takes instead of
a mask tensor. A *mask function*, `mask_mod(b, h, q, k)`, returns True where a query may
attend to a key; FlexAttention compiles it into its kernel. A `BlockMask` holds such a
function and the list of blocks of the score matrix that are not fully masked: the
kernel skips all others, which makes it fast.

A mask function can represent every mask. It can also differ between heads, which a mask
of Headnotes cannot. Both conversions are exact.

Source: [FlexAttention](https://arxiv.org/abs/2412.05496), Dong et al. 2024; the
[documentation](https://docs.pytorch.org/docs/2.11/nn.attention.flex_attention.html) and
code of PyTorch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headnotes.checks import check_mask, check_sizes, first_index, without_heads

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def to_mask_mod(mask: Tensor) -> MaskMod:
    r"""A `mask_mod(b, h, q, k)` for FlexAttention that looks up `mask`.

    >>> mask_mod = to_mask_mod(torch.ones(3, 5, 1).bool())
    >>> mask_mod(*torch.tensor([1, 6, 2, 4]))
    tensor(True)
    """
    check_mask("mask", mask)
    allowed = mask.bool()
    # An axis of size 1 broadcasts: its only element is looked up for every index.
    q_step = int(mask.shape[0] > 1)
    b_step = int(mask.shape[2] > 1)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return allowed[q * q_step, k, b * b_step]

    return mask_mod


def from_mask_mod(
    mask_mod: MaskMod,
    q_len: int,
    k_len: int,
    batch_size: int = 1,
    heads: int = 1,
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    r"""A mask from a `mask_mod` of FlexAttention: `[q_len, k_len, batch_size]`.

    Raises `ValueError` where heads differ, `TypeError` for a function that returns no
    bool tensor.

    >>> past = lambda b, h, q, k: k <= q
    >>> mask = from_mask_mod(past, 2, 3, 5, heads=7)
    >>> mask[:, :, 4]
    tensor([[ True, False, False],
            [ True,  True, False]])
    """
    from torch.nn.attention.flex_attention import create_mask

    if not callable(mask_mod):
        raise TypeError(
            f"`mask_mod` must be callable, but is a {type(mask_mod).__name__}"
        )
    check_sizes(q_len=q_len, k_len=k_len, batch_size=batch_size, heads=heads)

    # `create_mask` counts arguments: with a fifth, optional one, `mask_mod` itself
    # would be taken for a `score_mod`.
    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask_mod(b, h, q, k)

    allowed = create_mask(
        rule, batch_size, heads, q_len, k_len, device
    )  # [batch_size, heads, q_len, k_len]
    if allowed.dtype != torch.bool:
        raise TypeError(f"`mask_mod` returned {allowed.dtype}, not a bool tensor")
    return without_heads("mask_mod", allowed)  # [q_len, k_len, batch_size]


def to_block_mask(mask: Tensor, block_size: int = 128) -> "BlockMask":
    r"""A `BlockMask` for FlexAttention, for as many queries as the mask has rows.

    `block_size` is the number of queries, and of keys, in a block. Raises `ValueError`
    for a mask without queries, keys or batch items, or on "meta".

    >>> mask = torch.ones(3, 5, 2).bool()
    >>> to_block_mask(mask).shape
    (2, 1, 3, 5)
    """
    from torch.nn.attention.flex_attention import create_block_mask

    check_mask("mask", mask)
    check_sizes(block_size=block_size)
    q_len, k_len, batch_size = mask.shape
    if not mask.numel():
        raise ValueError(f"`mask` has shape {list(mask.shape)}, which makes no block")
    if mask.is_meta:
        raise ValueError(
            "`mask` is on meta, where there are no values to find blocks by"
        )
    return create_block_mask(
        to_mask_mod(mask), batch_size, None, q_len, k_len, mask.device, block_size
    )


def from_block_mask(block_mask: "BlockMask") -> Tensor:
    r"""A mask from a `block_mask` of FlexAttention: `[q_len, k_len, batch_size]`.

    The compiled kernel skips empty blocks, and calls `mask_mod` in partial blocks only;
    without a compiler, FlexAttention calls `mask_mod` for every pair. Raises
    `ValueError` if the two differ, or if heads differ.

    >>> mask = torch.rand(3, 5, 2) < 0.5
    >>> from_block_mask(to_block_mask(mask)).equal(mask)
    True
    """
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    if not isinstance(block_mask, BlockMask):
        seen = type(block_mask).__name__
        raise TypeError(f"`block_mask` must be a BlockMask, but is a {seen}")
    device = block_mask.kv_indices.device
    batch_size, heads, q_len, k_len = block_mask.shape
    allowed = create_mask(block_mask.mask_mod, batch_size, heads, q_len, k_len, device)
    # A pair that `mask_mod` allows, in a block that the kernel skips.
    differs = allowed & ~in_listed_blocks(block_mask)
    full_count = block_mask.full_kv_num_blocks
    full_indices = block_mask.full_kv_indices
    if full_count is not None and full_indices is not None:
        full = BlockMask.from_kv_blocks(
            full_count,
            full_indices,
            BLOCK_SIZE=block_mask.BLOCK_SIZE,
            seq_lengths=block_mask.seq_lengths,
        )
        # A pair that `mask_mod` forbids, in a block that the kernel treats as full.
        differs = differs | (in_listed_blocks(full) & ~allowed)
    index = first_index(differs)
    if index is not None:
        _, _, i, j = index
        raise ValueError(
            f"`block_mask` and its own `mask_mod` differ on key {j} for query {i}; "
            f"FlexAttention follows the blocks if compiled, else the `mask_mod`"
        )
    return without_heads("block_mask", allowed)  # [q_len, k_len, batch_size]


def in_listed_blocks(block_mask: "BlockMask") -> Tensor:
    """Which pairs of a query and a key are in a block that the `BlockMask` lists."""
    q_len, k_len = block_mask.seq_lengths
    q_block, k_block = block_mask.BLOCK_SIZE
    device = block_mask.kv_indices.device
    row = torch.arange(q_len, device=device)[:, None] // q_block  # [q_len, 1]
    column = torch.arange(k_len, device=device) // k_block  # [k_len]
    return block_mask.to_dense().bool()[..., row, column]  # [..., q_len, k_len]
