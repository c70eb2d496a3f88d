"""What every variant of the core must do, each as one assertion for its tests."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rows
from contract import randomize

Q_LEN, K_LEN, BATCH = 3, 5, 2

# These take most of the time; gradients are compared with those of the loops.
SLOW_LAWS = (
    "autocast",
    "causal_gradient",
    "compiled",
    "dtype_and_device",
    "gradients",
    "large_scores",
    "padding",
)


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


def projections(module: Any) -> rows.Projections:
    """Weight and bias of the four linear maps of the core."""
    layers = {
        name: getattr(module, name).linear for name in ("query", "key", "value")
    } | {"output": module.output}
    return {name: (layer.weight, layer.bias) for name, layer in layers.items()}


def assert_equal_with_gradients(
    module: nn.Module, output: Tensor, expected: Tensor, leaves: list[Tensor]
) -> None:
    """Outputs and all gradients agree to 1e-12, relative to the largest."""
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    variables = [*leaves, *module.parameters()]
    upstream = torch.randn_like(expected)
    ours = torch.autograd.grad(output, variables, upstream)
    theirs = torch.autograd.grad(expected, variables, upstream)
    for our, their in zip(ours, theirs, strict=True):
        near = 1e-12 * max(1.0, float(their.abs().max()))
        torch.testing.assert_close(our, their, rtol=0, atol=near)


def assert_equals_the_loops(module: Any, mask: Tensor | None, **steps: Any) -> None:
    """Output and gradients are those of the loops in which `steps` are changed."""
    randomize(module)
    module = module.double().eval()
    xs = inputs(module.output.in_features)
    leaves = [x.requires_grad_() for x in xs.values()]
    full = torch.ones(Q_LEN, K_LEN, BATCH).bool() if mask is None else mask
    expected = rows.attention(*leaves, full, projections(module), module.heads, **steps)
    output = module(**xs, mask=mask)
    assert_equal_with_gradients(module, output, expected, leaves)


def assert_sound(module: Any) -> None:
    """NaN in padding, fully masked rows, copies, "meta", `vmap` and `compile`."""
    randomize(module)
    module = module.eval()
    xs = {name: x.float() for name, x in inputs(module.output.in_features).items()}
    before = {name: x.clone() for name, x in xs.items()}
    mask = torch.ones(1, K_LEN, BATCH).bool()
    mask[:, 3:, 1] = False
    mask[:, :, 0] = False
    output = module(**xs, mask=mask)
    assert torch.equal(output[:, 0], module.output.bias.expand_as(output[:, 0]))
    assert all(torch.equal(x, before[name]) for name, x in xs.items())

    padded = {name: x.clone() for name, x in xs.items()}
    for name in ("key", "value"):
        padded[name][3:, 1] = torch.nan
    again = module(**padded, mask=mask)
    torch.testing.assert_close(again, output)
    again.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    module.zero_grad()

    torch.testing.assert_close(copy.deepcopy(module)(**xs, mask=mask), output)
    meta = copy.deepcopy(module).to("meta")
    on_meta = {name: x.to("meta") for name, x in xs.items()}
    assert meta(**on_meta, mask=mask.to("meta")).shape == output.shape

    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**xs, mask=mask), output)

    def one(*xs: Tensor) -> Any:
        query, key, value = xs
        return module(query=query, key=key, value=value)

    stacked = [torch.stack([x, x.flip(1)]) for x in xs.values()]
    expected = torch.stack([one(*xs.values()), one(*(x.flip(1) for x in xs.values()))])
    torch.testing.assert_close(torch.vmap(one)(*stacked), expected)


def assert_half_is_near(
    make: Callable[[], Any], dtype: torch.dtype, roundings: int = 20
) -> None:
    """In half precision, output and gradients are finite and near those in float64."""
    module = make()
    randomize(module)
    module = module.to(dtype).eval()
    wide = copy.deepcopy(module).double()
    xs = {n: x.to(dtype) for n, x in inputs(module.output.in_features).items()}
    mask = some_mask()
    output = module(**xs, mask=mask)
    expected = wide(**{n: x.double() for n, x in xs.items()}, mask=mask)
    assert output.dtype == dtype
    near = roundings * torch.finfo(dtype).eps * float(expected.detach().abs().max())
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=near)
    output.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def run_transformers(attention: Any, x: Tensor, mask: Tensor) -> Tensor:
    """The output of a module of `transformers`, sequence first, without rotation."""
    # Angles of zero, one number for all components of a head.
    angles = torch.zeros(x.shape[1], x.shape[0], 1)
    output: Tensor = attention(
        hidden_states=x.transpose(0, 1),
        position_embeddings=(angles.cos(), angles.sin()),
        attention_mask=torch.zeros(mask.shape[:2]).masked_fill(
            ~mask[..., 0], -torch.inf
        ),
    )[0]
    return output.transpose(0, 1)


def load_from_transformers(
    module: Any, attention: Any, order: Tensor | None = None
) -> None:
    """Copy the four projections of a module of `transformers`; missing biases are 0.

    `order` are their rows of query, key and value in our order.
    """
    pairs = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    layers = [(getattr(module, a).linear, b) for a, b in pairs.items()]
    with torch.no_grad():
        for ours, name in [*layers, (module.output, "o_proj")]:
            theirs = getattr(attention, name)
            ours.weight.copy_(theirs.weight)
            if ours.bias is not None:
                ours.bias.zero_()
                if theirs.bias is not None:
                    ours.bias.copy_(theirs.bias)
        if order is not None:
            for ours, _ in layers:
                ours.weight.copy_(ours.weight[order])


def assert_equals_transformers(
    module: Any,
    attention: Any,
    order: Tensor | None = None,
    mask: Tensor | None = None,
) -> None:
    """The same output as a module of `transformers` in causal self-attention.

    `order` are its rows in our order; `mask` is what it is given instead of a causal
    one, and what our module does by itself.
    """
    load_from_transformers(module, attention, order)
    module, attention = module.eval(), attention.eval()
    x = torch.randn(7, BATCH, module.output.in_features)
    causal = torch.ones(7, 7).bool().tril().unsqueeze(-1)
    with torch.no_grad():
        expected = run_transformers(attention, x, causal if mask is None else mask)
        output = module(query=x, key=x, value=x, mask=causal)
    largest = float(expected.abs().max())
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5 * largest)
