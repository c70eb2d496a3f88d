r"""# Comparing implementations

This module measures whether attention implementations compute the same function. Each
gets the same weights and the same input, in its own [calling convention](calling.md),
and its output, its input gradient and its weight gradients are compared: with equal
outputs alone, two implementations could train differently. The [equivalence
matrix](../../compare/equivalence.md) shows the results, and the tests run the same
code.

A difference is given **relative to the largest entry**, so that a gradient of 40 and an
output of 0.4 have the same tolerance. Rounding alone causes about $10^{-7}$ in float32
and $10^{-16}$ in float64.

Source: the five systems are those of the pages on other implementations, of the
[core](../mha.md), and of
[`torch.nn.MultiheadAttention`](https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html).
"""

import copy
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headnotes import convert, masks, mha
from headnotes.compare.calling import call
from headnotes.implementations import stages

# The systems with separate heads and an output projection, which can hold any weights.
SYSTEMS = ("core", "causal", "valid_lens", "batch_first", "torch")

# These have no output projection, and so no gradient of one.
STAGES = (
    stages.SelfAttention_v1,
    stages.SelfAttention_v2,
    stages.CausalAttention,
    stages.MultiHeadAttentionWrapper,
)


@dataclass(frozen=True)
class Case:
    """The inputs of one comparison."""

    x: Tensor  # gives the queries, [q_len, batch_size, d_model]
    memory: Tensor  # the keys and values, [k_len, batch_size, d_model], or `x` itself
    mask: Tensor | None  # in the convention of Headnotes


def cases(d_model: int, **like: Any) -> dict[str, Case]:
    r"""The five cases to compare; `like` is the dtype and device of their tensors.

    >>> list(cases(10))
    ['no mask', 'causal', 'padding', 'causal + padding', 'cross']
    """
    # Random numbers from the CPU, in float64: the same on every device, in every dtype.
    generator = torch.Generator().manual_seed(7)
    randn = partial(torch.randn, generator=generator, dtype=torch.float64)
    q_len, k_len, batch_size = 7, 5, 3
    x = randn(q_len, batch_size, d_model)  # [q_len, batch_size, d_model]
    memory = randn(k_len, batch_size, d_model)  # [k_len, batch_size, d_model]
    x = x.to(**like)
    memory = memory.to(**like)
    causal_mask = masks.causal(q_len, device=x.device)  # [q_len, q_len, 1]
    lengths = torch.tensor([7, 5, 2], device=x.device)  # [batch_size]
    padding = masks.padding(lengths, q_len)  # [1, q_len, batch_size]
    padding = padding.expand(q_len, -1, -1)  # [q_len, q_len, batch_size]
    return {
        "no mask": Case(x, x, None),
        "causal": Case(x, x, causal_mask),
        "padding": Case(x, x, padding),
        "causal + padding": Case(x, x, masks.combine(causal_mask, padding)),
        "cross": Case(x, memory, None),
    }


def systems(
    targets: Iterable[str], *, heads: int = 4, d_model: int = 24, **like: Any
) -> dict[str, nn.Module]:
    r"""The named targets of `convert`, all with the same weights.

    The weights are larger than the usual initialization, with which attention is nearly
    uniform, and a wrong mask or scale changes little. The stages have no output
    projection, so it is the identity in all modules if a stage is among them.

    >>> same = systems(["core", "torch"])
    >>> same["core"].output.weight.equal(same["torch"].out_proj.weight)
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        core = mha.MultiHeadAttention(heads, d_model, 0.0).double().eval()
        with torch.no_grad():
            for parameter in core.parameters():
                parameter.copy_(torch.randn_like(parameter) / d_model**0.5)
            if not set(targets) <= set(SYSTEMS):
                core.output.weight.copy_(torch.eye(d_model))
                for linear in (core.query, core.key, core.value):
                    linear.linear.bias.zero_()
                core.output.bias.zero_()
    core.to(**like)
    length = {"context_length": 7}
    settings = dict.fromkeys(("causal", "causal_head", "wrapper"), length)
    return {name: convert.to(core, name, **settings.get(name, {})) for name in targets}


def results(module: nn.Module, case: Case) -> dict[str, dict[str, Tensor]]:
    r"""The output of `module` for `case`, its input gradients and weight gradients.

    The keys are "output", "input gradient" and "weight gradients"; the module itself
    is not modified. Raises `ValueError` where it cannot compute the case.
    """
    module = copy.deepcopy(module)
    x = case.x.clone().requires_grad_()  # [q_len, batch_size, d_model]
    memory = x
    inputs = {"x": x}
    if case.memory is not case.x:
        memory = case.memory.clone().requires_grad_()  # [..., batch_size, d_model]
        inputs["memory"] = memory
    output = call(module, x, memory, case.mask)[0]  # [q_len, batch_size, d_model]
    # The gradient of the loss with respect to the output: the same random one for all.
    generator = torch.Generator().manual_seed(13)
    grad_output = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(
        output, [*inputs.values(), *parameters], grad_output.to(output)
    )
    input_gradients = gradients[: len(inputs)]
    parameter_gradients = gradients[len(inputs) :]

    # A gradient has the shape of its parameter. Copied into it, it is converted by
    # `extract` to the common layout, as the weights are.
    with torch.no_grad():
        for parameter, gradient in zip(parameters, parameter_gradients, strict=True):
            parameter.copy_(gradient)
    extracted = convert.extract(module)
    weights = {}
    for name in convert.PARTS:
        projection: convert.Projection = getattr(extracted, name)
        if name != "output" or not isinstance(module, STAGES):
            weights[f"{name}.weight"] = projection.weight
            if projection.bias is not None:
                weights[f"{name}.bias"] = projection.bias
    return {
        "output": {"output": output.detach()},
        "input gradient": dict(zip(inputs, input_gradients, strict=True)),
        "weight gradients": weights,
    }


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    r"""The largest difference in the parts that both have, over the largest entry.

    >>> a = {"x": torch.tensor([100.0, 1.0])}
    >>> b = {"x": torch.tensor([100.0, 2.0]), "y": torch.ones(3)}
    >>> difference(a, b)
    0.01
    """
    shared = [name for name in a if name in b]
    max_error = max((a[name] - b[name]).abs().max().item() for name in shared)
    largest = max(part[name].abs().max().item() for part in (a, b) for name in shared)
    # A NaN is different from everything, but `max` would pass over it.
    if not (math.isfinite(max_error) and math.isfinite(largest)):
        return math.inf
    return max_error / largest if largest else 0.0


def matrix(
    modules: dict[str, nn.Module], cases: dict[str, Case]
) -> dict[str, dict[str, dict[str, float | str]]]:
    r"""For each case, quantity and module: the largest difference to any other module.

    Where a module cannot compute a case, the message of its error is in the cell.

    >>> d_model = 24
    >>> cells = matrix(systems(["core", "causal", "torch"]), cases(d_model))
    >>> cells["causal"]["output"]["core"] < 1e-6
    True
    >>> cells["padding"]["output"]["causal"]
    'it is always causal, and takes no other mask'
    """
    cells: dict[str, dict[str, dict[str, float | str]]] = {}
    for setting, case in cases.items():
        computed = {}
        messages: dict[str, float | str] = {}
        for name, module in modules.items():
            try:
                computed[name] = results(module, case)
            except ValueError as error:
                messages[name] = str(error)
        cells[setting] = {}
        for quantity in ("output", "input gradient", "weight gradients"):
            largest: dict[str, float | str] = dict.fromkeys(computed, 0.0)
            for one, other in itertools.permutations(computed, 2):
                distance = difference(
                    computed[one][quantity], computed[other][quantity]
                )
                largest[one] = max(float(largest[one]), distance)
            cells[setting][quantity] = largest | messages
    return cells


def worst(cells: dict[str, dict[str, dict[str, float | str]]]) -> float:
    r"""The largest number of a matrix: the difference of the most different pair.

    >>> worst({"causal": {"output": {"core": 1e-7, "v1": "it has no mask"}}})
    1e-07
    """
    rows = (row for quantities in cells.values() for row in quantities.values())
    values = (value for row in rows for value in row.values())
    return max(value for value in values if not isinstance(value, str))
