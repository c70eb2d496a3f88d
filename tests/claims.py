"""What every variant of the core must do, each as one assertion for its tests."""

from typing import Any

import torch
from torch import Tensor, nn

import loops
from contract import randomize

Q_LEN, K_LEN, BATCH = 3, 5, 2


def inputs(d_model: int, q_len: int = Q_LEN, k_len: int = K_LEN) -> dict[str, Tensor]:
    """Random query, key and value in float64."""
    lengths = {"query": q_len, "key": k_len, "value": k_len}
    return {
        name: torch.randn(n, BATCH, d_model, dtype=torch.float64)
        for name, n in lengths.items()
    }


def some_mask(q_len: int = Q_LEN, k_len: int = K_LEN) -> Tensor:
    """A random mask whose second row is fully masked in the first batch item."""
    mask = torch.rand(q_len, k_len, BATCH) < 0.6
    mask[:, 0] = True
    mask[1, :, 0] = False
    return mask


def in_float64(module: nn.Module) -> Any:
    """The module in float64 without dropout, with weights that make rows differ."""
    randomize(module)
    return module.double().eval()


def assert_equal_with_gradients(
    module: nn.Module, output: Tensor, expected: Tensor, leaves: list[Tensor]
) -> None:
    """Outputs and all gradients agree to 1e-12, relative to the largest."""
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    variables = [*leaves, *module.parameters()]
    upstream = torch.randn_like(expected)
    # What has no part in an output has a gradient of zero.
    ours, theirs = (
        torch.autograd.grad(y, variables, upstream, materialize_grads=True)
        for y in (output, expected)
    )
    for our, their in zip(ours, theirs, strict=True):
        near = 1e-12 * max(1.0, float(their.abs().max()))
        torch.testing.assert_close(our, their, rtol=0, atol=near)


def assert_equals_the_loops(
    module: Any,
    mask: Tensor | None,
    options: dict[str, Any] | None = None,
    **steps: Any,
) -> None:
    """Output and gradients are those of the loops in which `steps` are changed.

    `options` are further arguments of the module.
    """
    module = in_float64(module)
    xs = inputs(module.output.in_features)
    leaves = [x.requires_grad_() for x in xs.values()]
    expected = loops.attention(module, *leaves, mask, **steps)
    output = module(**xs, mask=mask, **(options or {}))
    assert_equal_with_gradients(module, output, expected, leaves)
