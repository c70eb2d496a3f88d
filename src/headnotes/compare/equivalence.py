r"""# Comparing implementations

Two attentions are the same computation if, given the same weights and the same input,
they give the same output *and the same gradients*: with equal outputs alone they could
still learn differently. So each implementation of this house is handed one set of
weights, is asked one question in its own [dialect](calling.md), and answers with three
tensors. What the [equivalence matrix](../../compare/equivalence.md) shows is measured
here, and the tests run the same lines.

A difference is given **relative to the largest entry**, so that a gradient of 40 and
an output of 0.4 are held to the same standard. Rounding alone makes about
$10^{-7}$ in float32 and $10^{-16}$ in float64.

Source: the five systems are those of the pages under *As others write it*, of the
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
from headnotes.compare.calling import ask
from headnotes.implementations import stages

# The systems with separate heads and an output projection, which can hold any weights.
SYSTEMS = ("core", "causal", "valid_lens", "batch_first", "torch")

# They have no output projection that could have a gradient.
STAGES = (
    stages.SelfAttention_v1,
    stages.SelfAttention_v2,
    stages.CausalAttention,
    stages.MultiHeadAttentionWrapper,
)


@dataclass(frozen=True)
class Case:
    """One question: who asks, who is read, what is allowed."""

    x: Tensor  # asks: [q_len, batch_size, d_model]
    memory: Tensor  # is read: [k_len, batch_size, d_model]; `x` in self-attention
    keep: Tensor | None  # a mask of this house


def cases(d_model: int, **like: Any) -> dict[str, Case]:
    r"""The five questions; `like` is the dtype and device of their tensors.

    >>> list(cases(10))
    ['no mask', 'causal', 'padding', 'causal + padding', 'cross']
    """
    # Drawn on the CPU in float64: the same question on every device, in every dtype.
    seeded = torch.Generator().manual_seed(7)
    draw = partial(torch.randn, generator=seeded, dtype=torch.float64)
    q_len, k_len, batch_size = 7, 5, 3
    x = draw(q_len, batch_size, d_model)  # [q_len, batch_size, d_model]
    memory = draw(k_len, batch_size, d_model)  # [k_len, batch_size, d_model]
    x, memory = x.to(**like), memory.to(**like)
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

    The weights are larger than those that modules are born with: with the usual ones
    attention is nearly uniform, and a wrong mask or scale changes little. The stages
    know no output projection, so with them it is the identity for all.

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
    longest = {"context_length": 7}
    settings = dict.fromkeys(("causal", "causal_head", "wrapper"), longest)
    return {name: convert.to(core, name, **settings.get(name, {})) for name in targets}


def answers(module: nn.Module, case: Case) -> dict[str, dict[str, Tensor]]:
    r"""What `module` says to `case`: its output, and two kinds of gradient, in parts.

    The keys are "output", "input gradient" and "weight gradients"; the module itself
    is left as it was. Raises `ValueError` where it has no words for the question.
    """
    module = copy.deepcopy(module)
    x = case.x.clone().requires_grad_()  # [q_len, batch_size, d_model]
    alone, memory = case.memory is case.x, x
    if not alone:
        memory = case.memory.clone().requires_grad_()  # [..., batch_size, d_model]
    output = ask(module, x, memory, case.keep)[0]  # [q_len, batch_size, d_model]
    # The gradient that arrives from above: the same random one for all.
    draw = torch.Generator().manual_seed(13)
    above = torch.randn(output.shape, generator=draw, dtype=torch.float64)
    leaves = [x] if alone else [x, memory]
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(output, [*leaves, *parameters], above.to(output))

    # A gradient has the shape of its parameter. Put in its place, it is carried by
    # `convert` to where the other implementations have theirs.
    with torch.no_grad():
        for parameter, gradient in zip(
            parameters, gradients[len(leaves) :], strict=True
        ):
            parameter.copy_(gradient)
    read = convert.extract(module)
    weights = {}
    for name in ("query", "key", "value", "output"):
        projection: convert.Projection = getattr(read, name)
        if name != "output" or not isinstance(module, STAGES):
            weights[f"{name}.weight"] = projection.weight
            if projection.bias is not None:
                weights[f"{name}.bias"] = projection.bias
    inputs = zip(("x", "memory"), gradients[: len(leaves)], strict=False)
    return {
        "output": {"output": output.detach()},
        "input gradient": dict(inputs),
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
    apart = max((a[name] - b[name]).abs().max().item() for name in shared)
    largest = max(part[name].abs().max().item() for part in (a, b) for name in shared)
    if not (math.isfinite(apart) and math.isfinite(largest)):
        return math.inf  # NaN is equal to nothing, but smaller than everything to `max`
    return apart / largest if largest else 0.0


def matrix(
    modules: dict[str, nn.Module], questions: dict[str, Case]
) -> dict[str, dict[str, dict[str, float | str]]]:
    r"""For each question, quantity and module: how far it is from the farthest other.

    Where a module has no words for a question, its own refusal stands in place of a
    number.

    >>> d_model = 24
    >>> cells = matrix(systems(["core", "causal", "torch"]), cases(d_model))
    >>> cells["causal"]["output"]["core"] < 1e-6
    True
    >>> cells["padding"]["output"]["causal"]
    'it is always causal, and nothing else'
    """
    cells: dict[str, dict[str, dict[str, float | str]]] = {}
    for setting, case in questions.items():
        said = {}
        refused: dict[str, float | str] = {}
        for name, module in modules.items():
            try:
                said[name] = answers(module, case)
            except ValueError as refusal:
                refused[name] = str(refusal)
        cells[setting] = {}
        for quantity in ("output", "input gradient", "weight gradients"):
            farthest: dict[str, float | str] = dict.fromkeys(said, 0.0)
            for one, other in itertools.permutations(said, 2):
                apart = difference(said[one][quantity], said[other][quantity])
                farthest[one] = max(float(farthest[one]), apart)
            cells[setting][quantity] = farthest | refused
    return cells


def worst(cells: dict[str, dict[str, dict[str, float | str]]]) -> float:
    r"""The largest number of a matrix: how far the farthest pair is apart.

    >>> worst({"causal": {"output": {"core": 1e-7, "v1": "it has no mask"}}})
    1e-07
    """
    rows = (row for quantities in cells.values() for row in quantities.values())
    values = (value for row in rows for value in row.values())
    return max(value for value in values if not isinstance(value, str))
