r"""# Solution: blockwise dropout

This is a solution of the exercise [blockwise
dropout](../../../exercises/14_blockwise_dropout.py), with the inputs that its check
uses and the mistakes that the check recognizes.

Source: [FlashAttention](https://arxiv.org/abs/2205.14135), Dao et al. 2022, appendix
B.3, which stores the state of the random generator in place of the mask.
"""

from typing import Any

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, numbers


class BlockDropout(torch.autograd.Function):
    r"""Dropout whose mask is generated again in the backward pass.

    >>> weights = torch.ones(3, 5).requires_grad_()
    >>> dropped = BlockDropout.apply(weights, 0.5, 7, 2)
    >>> dropped.sum().backward()
    >>> torch.equal(weights.grad, dropped)
    True
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, p: float, seed: int, block_len: int) -> Any:
        """Drop weights, and keep three numbers for the backward pass."""
        ctx.numbers = p, seed, block_len
        return drop(weights, p, seed, block_len)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradients of the weights, and none of the three numbers."""
        # Dropout multiplies each weight by a factor that does not depend on it: the
        # gradient is multiplied by the same factor.
        return drop(grad, *ctx.numbers), None, None, None


def drop(x: Tensor, p: float, seed: int, block_len: int) -> Tensor:
    """Multiply each block of rows by its mask, and by $1 / (1 - p)$."""
    blocks = torch.split(x, block_len)
    dropped = [block * mask(block, p, seed + n) for n, block in enumerate(blocks)]
    return torch.cat(dropped) / (1 - p)


def mask(block: Tensor, p: float, seed: int) -> Tensor:
    """True where a weight of the block is kept."""
    # A generator of its own: `torch.manual_seed` would set the global state back at
    # each call, and with it all other dropout layers and the order of the data.
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(block.shape, generator=generator) >= p


def apply(function: Any, weights: Tensor, p: float, seed: int, block_len: int) -> Any:
    """The dropped weights, and the next random number of the global state."""
    torch.manual_seed(2017)
    return function.apply(weights, p, seed, block_len), torch.rand(1)


class Reference:
    """The same, one weight at a time."""

    @staticmethod
    def apply(weights: Tensor, p: float, seed: int, block_len: int) -> Tensor:
        """The dropped weights."""
        rows = weights.tolist()
        for n in range(-(-len(rows) // block_len)):
            block = range(n * block_len, min((n + 1) * block_len, len(rows)))
            generator = torch.Generator().manual_seed(seed + n)
            random = torch.rand(len(block), weights.shape[1], generator=generator)
            for i, row in zip(block, random.tolist(), strict=True):
                pairs = zip(rows[i], row, strict=True)
                rows[i] = [x / (1 - p) if r >= p else 0.0 for x, r in pairs]
        return torch.tensor(rows)


# region Typical mistakes


class OtherMask(BlockDropout):
    """The backward pass drops other weights than the forward pass. Start its
    generators from the same seeds.
    """

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, seed, block_len = ctx.numbers
        return drop(grad, p, seed + 1, block_len), None, None, None


class GradientNotDropped(BlockDropout):
    """The gradient is returned as it came. A dropped weight has no influence on the
    output, so that its gradient is zero; the others are divided by `1 - p`.
    """

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None, None


class GradientNotRescaled(BlockDropout):
    """The gradient has the right mask, but is not divided by `1 - p`, as the weights
    were.
    """

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return drop(grad, *ctx.numbers) * (1 - ctx.numbers[0]), None, None, None


class NotRescaled(BlockDropout):
    """The weights that are kept are not divided by `1 - p`, which preserves the mean of
    the output; their gradients neither.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, p: float, seed: int, block_len: int) -> Any:
        return BlockDropout.forward(ctx, weights, p, seed, block_len) * (1 - p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return GradientNotRescaled.backward(ctx, grad)


class OneMask(BlockDropout):
    """All blocks have the same mask. Seed the generator of block `n` with `seed + n`,
    not with `seed`.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, p: float, seed: int, block_len: int) -> Any:
        ctx.numbers = p, seed, block_len
        return OneMask.drop(weights, p, seed, block_len)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return OneMask.drop(grad, *ctx.numbers), None, None, None

    @staticmethod
    def drop(x: Tensor, p: float, seed: int, block_len: int) -> Tensor:
        blocks = [block * mask(block, p, seed) for block in torch.split(x, block_len)]
        return torch.cat(blocks) / (1 - p)


class OneGenerator(OneMask):
    """One generator serves all blocks, so that the mask of a block depends on the
    blocks before it. Make a generator for each block, seeded with `seed + n`.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, p: float, seed: int, block_len: int) -> Any:
        return BlockDropout.forward(ctx, weights, p, seed, len(weights))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return BlockDropout.backward(ctx, grad)


class KeptWithP(BlockDropout):
    """Weights are kept where they should be dropped: `p` is the probability of
    dropping a weight, and the random number must be at least `p` to keep it.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, p: float, seed: int, block_len: int) -> Any:
        dropped = BlockDropout.forward(ctx, weights, p, seed, block_len)
        return weights / (1 - p) - dropped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / (1 - ctx.numbers[0]) - drop(grad, *ctx.numbers), None, None, None


class GlobalSeed(BlockDropout):
    """The weights are right, but the function seeds PyTorch's global generator, which
    all other random numbers come from. Make a `torch.Generator` for each block.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, p: float, seed: int, block_len: int) -> Any:
        last = -(-len(weights) // block_len) - 1
        torch.manual_seed(seed + last)
        torch.rand_like(weights[last * block_len :])
        return BlockDropout.forward(ctx, weights, p, seed, block_len)


# endregion

EXERCISE = Exercise(
    series="Make it fast, make it decode",
    solution=BlockDropout,
    reference=Reference,
    inputs=[
        (numbers(1, 2), 0.0, 0, 1),
        (numbers(1, 5), 0.5, 0, 1),
        (numbers(2, 5), 0.25, 1, 1),
        (numbers(7, 11), 0.25, 3, 3),
    ],
    mistakes=[
        OtherMask,
        GradientNotDropped,
        GradientNotRescaled,
        NotRescaled,
        OneMask,
        OneGenerator,
        KeptWithP,
        GlobalSeed,
    ],
    run=apply,
)
