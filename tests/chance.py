"""Statistical assertions on dropout masks: their share, scale and independence."""

import math

import torch
from torch import Tensor


def assert_share(factors: Tensor, p: float) -> None:
    """A share `p` is dropped, and the rest makes up for it."""
    dropped = factors == 0
    n = dropped.numel()
    assert abs(dropped.sum().item() - n * p) < 4 * math.sqrt(n * p * (1 - p))
    gain = factors[~dropped]
    torch.testing.assert_close(
        gain, torch.full_like(gain, 1 / (1 - p)), rtol=1e-4, atol=0
    )


def assert_independent(factors: Tensor, p: float) -> None:
    """No draw tells anything of its neighbours along any axis."""
    dropped = (factors == 0).double() - p
    n, variance = dropped.numel(), p * (1 - p)
    for axis, size in enumerate(dropped.shape):
        for step in range(1, min(size, 9)):
            a, b = (dropped.narrow(axis, s, size - step) for s in (0, step))
            correlation = (a * b).mean() / variance
            assert abs(correlation) < 4.5 / math.sqrt(a.numel()), (axis, step)
    # No row, key, item or head fares better than another.
    for axis, size in enumerate(dropped.shape):
        rest = [other for other in range(dropped.dim()) if other != axis]
        bound = 4.5 * math.sqrt(variance * size / n)
        assert dropped.mean(rest).abs().max() < bound


def assert_unlike(first: Tensor, second: Tensor) -> None:
    """Two draws at one half agree in one half of their places."""
    agree = ((first == 0) == (second == 0)).double().mean()
    assert abs(agree - 0.5) < 4 * 0.5 / math.sqrt(first.numel())
