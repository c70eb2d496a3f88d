"""Masks for FlexAttention: conversion there and back, their effect, errors."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

from headnotes import masks
from headnotes.mha import MultiHeadAttention

Q_LEN, K_LEN, BATCH_SIZE, HEADS, D_MODEL = 5, 7, 3, 2, 22


def some_mask(device: torch.device, batch_size: int) -> Tensor:
    """Random masks of one random size, dense and thin, one for each batch item."""
    q_len, k_len = torch.randint(1, 6, (2,)).tolist()
    density = torch.rand(batch_size, device=device)
    return torch.rand(q_len, k_len, batch_size, device=device) < density


@pytest.mark.slow
def test_mask_mods_convert_there_and_back(device: torch.device) -> None:
    # 20 sizes, 50 masks of each.
    for _ in range(20):
        mask = some_mask(device, 50)
        rule = masks.to_mask_mod(mask)
        again = masks.from_mask_mod(rule, *mask.shape, device=device)
        assert again.dtype == torch.bool
        assert torch.equal(again, mask)
        theirs = create_mask(rule, mask.shape[2], 1, *mask.shape[:2], device=device)
        assert torch.equal(theirs[:, 0].permute(1, 2, 0), mask)


@pytest.mark.slow
def test_block_masks_convert_there_and_back(device: torch.device) -> None:
    for n in range(20):
        mask = some_mask(device, 50)
        block_mask = masks.to_block_mask(mask, block_size=(1, 2, 128)[n % 3])
        assert isinstance(block_mask, BlockMask)
        assert block_mask.shape == (50, 1, *mask.shape[:2])
        assert torch.equal(masks.from_block_mask(block_mask), mask)


def test_blocks_need_not_be_square(device: torch.device) -> None:
    mask = masks.causal(7, 11, device=device)
    for size in ((2, 5), (5, 2), (1, 11)):
        rule = masks.to_mask_mod(mask)
        block_mask = create_block_mask(rule, None, None, 7, 11, device, size)
        assert torch.equal(masks.from_block_mask(block_mask), mask)


def test_an_axis_of_size_1_broadcasts(device: torch.device) -> None:
    mask = torch.rand(Q_LEN, K_LEN, BATCH_SIZE, device=device) < 0.5
    sizes = (Q_LEN, K_LEN, BATCH_SIZE)
    for part in (mask, mask[:1], mask[..., :1], mask[:1, :, :1]):
        rule = masks.to_mask_mod(part)
        again = masks.from_mask_mod(rule, *sizes, heads=HEADS, device=device)
        assert torch.equal(again, part.expand(sizes))


@pytest.mark.slow
@torch.no_grad()  # FlexAttention has no backward on a CPU
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_is_the_same_through_flex_attention(device: torch.device) -> None:
    core = MultiHeadAttention(HEADS, D_MODEL).eval().to(device)
    query = torch.randn(Q_LEN, BATCH_SIZE, D_MODEL, device=device) * 3
    memory = torch.randn(K_LEN, BATCH_SIZE, D_MODEL, device=device) * 3
    parts = core.query(query), core.key(memory), core.value(memory)
    q, k, v = (part.permute(1, 2, 0, 3) for part in parts)
    mask = torch.rand(Q_LEN, K_LEN, BATCH_SIZE, device=device) < 0.5
    mask[2, :, 1] = False  # a fully masked row: zero in both
    outputs = []
    for one in (mask, mask[..., :1], ~mask):
        context = flex_attention(q, k, v, block_mask=masks.to_block_mask(one))
        assert isinstance(context, Tensor)
        theirs = core.output(context.permute(2, 0, 1, 3).flatten(-2))
        ours = core(query=query, key=memory, value=memory, mask=one)
        assert (theirs - ours).abs().max() < 1e-6
        outputs.append(ours)
    assert (outputs[0] - outputs[2]).abs().max() > 0.1


def test_blocks_that_differ_from_their_mask_mod_are_refused() -> None:
    mask = masks.causal(7, 11)
    good = masks.to_block_mask(mask, block_size=2)
    blocks = good.kv_num_blocks, good.kv_indices
    sizes = {"BLOCK_SIZE": (2, 2), "seq_lengths": (7, 11)}
    # Without the full blocks, and with a `mask_mod` that allows everything.
    for rule in (good.mask_mod, None):
        other = BlockMask.from_kv_blocks(*blocks, mask_mod=rule, **sizes)
        with pytest.raises(
            ValueError, match="follows the blocks if compiled, else the"
        ):
            masks.from_block_mask(other)
    # A full block, in which `mask_mod` forbids a pair.
    full = BlockMask.from_kv_blocks(
        good.full_kv_num_blocks,
        good.full_kv_indices,
        *blocks,
        mask_mod=good.mask_mod,
        **sizes,
    )
    with pytest.raises(ValueError, match="follows the blocks if compiled, else the"):
        masks.from_block_mask(full)


def test_a_mask_mod_is_compiled_into_flex_attention() -> None:
    torch.compiler.reset()
    mask = torch.rand(Q_LEN, K_LEN, BATCH_SIZE) < 0.5
    rule = masks.to_mask_mod(mask)

    def ask(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return rule(b, b * 0, q, k)

    fast = torch.compile(ask, backend="eager", fullgraph=True)
    index = torch.arange(3)
    assert torch.equal(fast(index, index, index), mask[index, index, index])


PER_HEAD = torch.ones(7, 5, dtype=torch.bool)
PER_HEAD[4, 3] = False


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: masks.to_mask_mod([[True]]),  # type: ignore[arg-type]
            TypeError,
            "`mask` must be a tensor, but is a list",
        ),
        (
            lambda: masks.to_mask_mod(torch.ones(3, 5, 2).bool().to_sparse()),
            TypeError,
            "`mask` is sparse, nested or quantized; pass a dense one",
        ),
        (
            lambda: masks.to_mask_mod(torch.tensor([[[1]], [[-1]]])),
            ValueError,
            "`mask` holds -1 to 1, not 0/1; write `mask == 1`",
        ),
        (
            lambda: masks.from_mask_mod(True, 3, 5),  # type: ignore[arg-type]
            TypeError,
            "`mask_mod` must be callable, but is a bool",
        ),
        (
            lambda: masks.to_block_mask(masks.causal(3), 0),
            ValueError,
            "`block_size` (=0) must be an int from 1 up",
        ),
        (
            lambda: masks.to_mask_mod(torch.zeros(3, 5, 2)),
            TypeError,
            "`mask` is torch.float32, not bool or integer 0/1 with 1 for 'may "
            "attend'; use `mask.bool()` for 0 and 1, `masks.from_additive(mask)` for "
            "0 and -inf",
        ),
        (
            lambda: masks.to_block_mask(torch.ones(3, 5).bool()),
            ValueError,
            "`mask` has shape [3, 5], not [q_len or 1, k_len, batch_size or 1]; a "
            "[q_len, k_len] mask needs `mask.unsqueeze(-1)` "
            "if True means 'may attend', `masks.from_mha(mask, heads)` if True hides",
        ),
        (
            lambda: masks.from_mask_mod(lambda b, h, q, k: k <= q, 3, 0),
            ValueError,
            "`k_len` (=0) must be an int from 1 up",
        ),
        (
            lambda: masks.from_mask_mod(lambda b, h, q, k: k - q, 3, 5),
            TypeError,
            "`mask_mod` returned torch.int64, not a bool tensor",
        ),
        (
            lambda: masks.from_mask_mod(lambda b, h, q, k: PER_HEAD[h, k], 3, 5, 2, 7),
            ValueError,
            "`mask_mod` treats key 3 of query 0 and batch item 0 differently in heads "
            "0 and 4, but a mask of Headnotes is the same for all heads",
        ),
        (
            lambda: masks.from_block_mask(
                create_block_mask(
                    lambda b, h, q, k: PER_HEAD[h, k], 2, 7, 3, 5, device="cpu"
                )
            ),
            ValueError,
            "`block_mask` treats key 3 of query 0 and batch item 0 differently in "
            "heads 0 and 4, but a mask of Headnotes is the same for all heads",
        ),
        (
            lambda: masks.to_block_mask(torch.ones(3, 0, 2).bool()),
            ValueError,
            "`mask` has shape [3, 0, 2], which makes no block",
        ),
        (
            lambda: masks.to_block_mask(torch.ones(1, 1, 1, device="meta").bool()),
            ValueError,
            "`mask` is on meta, where there are no values to find blocks by",
        ),
        (
            lambda: masks.from_block_mask(masks.causal(3)),  # type: ignore[arg-type]
            TypeError,
            "`block_mask` must be a BlockMask, but is a Tensor",
        ),
    ],
)
def test_invalid_and_unsupported_masks_are_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make()
