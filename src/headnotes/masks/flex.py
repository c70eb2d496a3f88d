r"""# Masks, for FlexAttention

FlexAttention builds no mask. It is told a rule, `mask_mod(b, h, q, k)`, which says for
one query and one key whether they may meet, and compiles the rule into its kernel. A
`BlockMask` is such a rule together with the blocks of the square that it leaves
anything of: the kernel skips all others, which is where the speed comes from.

A rule can say whatever a mask can, and differ between heads, which a mask of this house
cannot. Both ways are exact.

Source: [FlexAttention](https://arxiv.org/abs/2412.05496), Dong et al. 2024; the
[documentation](https://docs.pytorch.org/docs/2.11/nn.attention.flex_attention.html) and
code of PyTorch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def to_mask_mod(mask: Tensor) -> MaskMod:
    r"""The rule that FlexAttention asks, `mask_mod(b, h, q, k)`: it looks in the mask.

    >>> mask_mod = to_mask_mod(torch.ones(3, 5, 1).bool())
    >>> mask_mod(*torch.tensor([1, 6, 2, 4]))
    tensor(True)
    """
    mask = check_mask(mask)
    # An axis of size 1 has nothing but its index 0.
    step_q, step_b = (int(mask.shape[axis] > 1) for axis in (0, 2))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask[q * step_q, k, b * step_b]

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
    r"""Ask a rule of FlexAttention for each pair: `[q_len, k_len, batch_size]`.

    Raises `ValueError` where heads differ, `TypeError` for a rule that gives no bool.

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
    names = ("q_len", "k_len", "batch_size", "heads")
    for name, size in zip(names, (q_len, k_len, batch_size, heads), strict=True):
        if type(size) is not int or size < 1:
            raise ValueError(f"`{name}` (={size!r}) must be an int from 1 up")

    # A rule with a fifth argument would be taken for one that changes scores.
    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask_mod(b, h, q, k)

    sizes = batch_size, heads, q_len, k_len
    keep = create_mask(rule, *sizes, device)  # [batch_size, heads, q_len, k_len]
    if keep.dtype != torch.bool:
        raise TypeError(f"`mask_mod` returned {keep.dtype}, not a bool tensor")
    return one_head("mask_mod", keep)


def to_block_mask(mask: Tensor, block_size: int = 128) -> "BlockMask":
    r"""The `block_mask` of FlexAttention, for as many queries as the mask has rows.

    `block_size` counts the queries, and the keys, of a block. Raises `ValueError` for a
    mask without queries, keys or batch items, or on "meta".

    >>> mask = torch.ones(3, 5, 2).bool()
    >>> to_block_mask(mask).shape
    (2, 1, 3, 5)
    """
    from torch.nn.attention.flex_attention import create_block_mask

    mask = check_mask(mask)
    if type(block_size) is not int or block_size < 1:
        raise ValueError(f"`block_size` (={block_size!r}) must be an int from 1 up")
    q_len, k_len, batch_size = mask.shape
    if not mask.numel():
        raise ValueError(f"`mask` has shape {list(mask.shape)}, which makes no block")
    if mask.is_meta:
        raise ValueError(
            "`mask` is on meta, where there are no values to tell blocks by"
        )
    return create_block_mask(
        to_mask_mod(mask), batch_size, None, q_len, k_len, mask.device, block_size
    )


def from_block_mask(block_mask: "BlockMask") -> Tensor:
    r"""What FlexAttention does with a `block_mask`: `[q_len, k_len, batch_size]`.

    A kernel skips the blocks that are left out, and does not ask `mask_mod` in those
    that are full; what runs without a compiler asks it everywhere. Raises `ValueError`
    where the two differ, or heads do.

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
    keep = create_mask(block_mask.mask_mod, batch_size, heads, q_len, k_len, device)
    number, index = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    wrong = keep & ~positions(block_mask)
    if number is not None and index is not None:
        size, lengths = block_mask.BLOCK_SIZE, block_mask.seq_lengths
        full = BlockMask.from_kv_blocks(
            number, index, BLOCK_SIZE=size, seq_lengths=lengths
        )
        wrong = wrong | (positions(full) & ~keep)
    place = first(wrong)
    if place is not None:
        _, _, i, j = place
        raise ValueError(
            f"`block_mask` and its own `mask_mod` differ on key {j} for query {i}; "
            f"FlexAttention follows the blocks where it is compiled, and else the rule"
        )
    return one_head("block_mask", keep)


def positions(block_mask: "BlockMask") -> Tensor:
    """Which queries and keys lie in a block that is not left out."""
    (q_len, k_len), (rows, columns) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    device = block_mask.kv_indices.device
    row = torch.arange(q_len, device=device)[:, None] // rows  # [q_len, 1]
    column = torch.arange(k_len, device=device) // columns  # [k_len]
    return block_mask.to_dense().bool()[..., row, column]  # [..., q_len, k_len]


def one_head(name: str, keep: Tensor) -> Tensor:
    """The mask that all heads of `[batch_size, heads, q_len, k_len]` share."""
    place = first(keep != keep[:, :1])
    if place is not None:
        b, h, i, j = place
        raise ValueError(
            f"`{name}` treats key {j} of query {i} and batch item {b} differently in "
            f"heads 0 and {h}, but a mask of this house is one for all heads"
        )
    keep = keep[:, 0]  # [batch_size, q_len, k_len]
    return keep.permute(1, 2, 0)  # [q_len, k_len, batch_size]


def first(wrong: Tensor) -> tuple[int, ...] | None:
    """Where True stands first; None if nowhere, or if compiling, on meta, in `vmap`."""
    if torch.compiler.is_compiling() or wrong.is_meta:
        return None
    try:
        places = wrong.nonzero()[:1].tolist()
    except RuntimeError:
        return None
    return tuple(places[0]) if places else None


def check_tensor(name: str, x: Tensor) -> None:
    """Refuse what is no tensor, or has not a number in each place."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but is a {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise TypeError(f"`{name}` is sparse, nested or quantised; pass a dense one")


def check_mask(mask: Tensor) -> Tensor:
    """A mask as bool, or an error that says what it is instead."""
    check_tensor("mask", mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"`mask` is {mask.dtype}, not bool or integer 0/1; use `mask.bool()` if it "
            f"holds 0 and 1, `masks.from_additive(mask)` if 0 and -inf"
        )
    if mask.dim() != 3:
        expected = "[q_len or 1, k_len, batch_size or 1]"
        raise ValueError(f"`mask` has shape {list(mask.shape)}, not {expected}")
    place = None if mask.dtype == torch.bool else first((mask != 0) & (mask != 1))
    if place is not None:
        seen = mask[place].item()
        raise ValueError(f"`mask` holds {seen} at {list(place)}, not 0 or 1")
    return mask.bool()
