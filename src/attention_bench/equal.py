r"""# Checking equality before timing

Only implementations that compute the same function are timed. Each gets the same
weights and the same input, and its result is compared with a reference: the formula,
head by head, in float32, on the weights and tokens rounded to the setting's dtype. The
output is compared; in a training setting the gradient of the input, too; and if the
implementation returns attention weights, their average over heads. An implementation
that differs is excluded from the setting, and listed there with the reason.

Dropout is off for this comparison. Where a setting has dropout, the output is computed
once more with it: dropout must change the output about as much as it changes the
reference. Otherwise an implementation that ignores dropout would look fast.

The timed *step* is a forward pass in inference mode, or a forward and a backward pass
with gradients for the input and all weights. There is no optimizer step, which would
take the same time for each implementation.

Source: that only equal functions are compared is the rule of the [equivalence
matrix](../../compare/equivalence.md).
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from attention_bench.implementations import Adapter, Implementation, Outputs
from attention_bench.setting import Setting
from attention_bench.timing import error_summary
from headnotes.compare.equivalence import difference

# The largest difference that rounding explains, relative to the largest entry: the
# rounding errors of a dtype, summed over a few thousand terms.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}

# Dropout is random: its effect on an output may be half or twice the reference's.
DROPOUT_FACTOR = 2.0


def deterministic_outputs(adapter: Adapter, setting: Setting) -> Outputs:
    r"""All tensors of an implementation that are compared, without dropout.

    >>> from attention_bench.implementations import build_nn_weights
    >>> setting = Setting(2, 3, d_model=10, heads=5, training=True)
    >>> adapter = build_nn_weights(setting.core(), setting)
    >>> list(deterministic_outputs(adapter, setting))
    ['output', 'weights', 'input gradient']
    """
    adapter.module.eval()
    x = adapter.switch_layout(setting.x())
    if not setting.training:
        with torch.inference_mode():
            return adapter.outputs(adapter.call(x))
    x.requires_grad_()
    result = adapter.call(x)
    outputs = adapter.outputs(result)
    output = result[0] if isinstance(result, tuple) else result
    grad_output = adapter.switch_layout(setting.grad_output())
    (grad_input,) = torch.autograd.grad(output, x, grad_output)
    return outputs | {"input gradient": adapter.switch_layout(grad_input)}


def reference(setting: Setting, dropout: float = 0.0) -> Outputs:
    r"""The expected outputs: the formula of attention, in float32 or better.

    They are computed head by head, so that without a gradient only the scores of one
    head are in memory. No implementation that is timed shares this code.

    >>> setting = Setting(2, 3, "causal", d_model=10, heads=5)
    >>> core = setting.core()
    >>> x = setting.x()
    >>> output = core(query=x, key=x, value=x, mask=setting.attention_mask())
    >>> torch.allclose(reference(setting)["output"], output, atol=1e-6)
    True
    """
    dtype = torch.promote_types(setting.dtype, torch.float32)
    core = setting.core().to(dtype)
    x = setting.x().to(dtype)  # [seq_len, batch_size, d_model]
    x.requires_grad_(setting.training)
    mask = setting.attention_mask()
    hidden = None if mask is None else ~mask.permute(2, 0, 1)  # [..., seq_len]
    contexts = []
    weights = torch.zeros((), device=setting.device)
    with torch.set_grad_enabled(setting.training and not dropout):
        projected = [core.query(x) * core.scale, core.key(x), core.value(x)]
        for query, key, value in zip(*(p.unbind(2) for p in projected), strict=True):
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
            scores = query @ key.mT  # [batch_size, seq_len, seq_len]
            if hidden is not None:
                scores = scores.masked_fill(hidden, -math.inf)
            attn = scores.softmax(dim=-1)  # [batch_size, seq_len, seq_len]
            weights = attn.detach() / setting.heads + weights
            attn = F.dropout(attn, dropout)  # [batch_size, seq_len, seq_len]
            contexts.append((attn @ value).transpose(0, 1))
        output = core.output(torch.cat(contexts, dim=-1))  # [seq_len, ..., d_model]
    outputs = {"output": output.detach(), "weights": weights.permute(1, 2, 0)}
    if output.requires_grad:
        grad_output = setting.grad_output().to(dtype)
        (outputs["input gradient"],) = torch.autograd.grad(output, x, grad_output)
    return outputs


def check_equal(
    outputs: Outputs, expected: Outputs, tolerance: float
) -> tuple[float, str]:
    r"""The largest relative error, and its description; "" within the tolerance.

    Parts that only one of the two has are not compared; both have an output.

    >>> one, other = torch.ones(2), torch.tensor([1.0, 2.0])
    >>> check_equal({"output": one}, {"output": one}, tolerance=1e-6)
    (0.0, '')
    >>> check_equal({"output": other}, {"output": one}, tolerance=1e-6)
    (0.5, 'not equal: output off by 0.5 of the largest entry')
    """
    errors = {
        part: difference({part: expected[part]}, {part: outputs[part]})
        for part in outputs
        if part in expected
    }
    part = max(errors, key=errors.__getitem__)
    problem = f"not equal: {part} off by {errors[part]:.2g} of the largest entry"
    return errors[part], problem if errors[part] > tolerance else ""


def relative_change(
    before: Tensor,  # [seq_len, batch_size, d_model]
    after: Tensor,  # [seq_len, batch_size, d_model]
) -> float:
    r"""The norm of a change, relative to the norm before it.

    >>> before = torch.full((2, 1, 3), 4.0)
    >>> relative_change(before, before + 1)
    0.25
    """
    share: Tensor = (after - before).norm() / before.norm()
    return share.item()


def output_with_dropout(adapter: Adapter, setting: Setting) -> Tensor:
    r"""The output of an implementation in training mode, sequence first.

    >>> from attention_bench.implementations import build_nn
    >>> setting = Setting(2, 3, d_model=10, heads=5)
    >>> adapter = build_nn(setting.core(), setting)
    >>> output_with_dropout(adapter, setting).shape
    torch.Size([3, 2, 10])
    """
    adapter.module.train()
    with torch.no_grad():
        result = adapter.call(adapter.switch_layout(setting.x()))
    adapter.module.eval()
    return adapter.outputs(result)["output"].float()


def build_and_check(
    implementations: Mapping[str, Implementation], setting: Setting
) -> tuple[dict[str, Adapter], dict[str, float], dict[str, str]]:
    r"""Build implementations, and compare each with the reference.

    Returns the adapters of those that are equal, the relative errors of all, and the
    reasons why the others are skipped. Implementations that do not support the setting
    are not listed.

    >>> from attention_bench.implementations import IMPLEMENTATIONS
    >>> setting = Setting(2, 3, d_model=10, heads=5)
    >>> two = {name: IMPLEMENTATIONS[name] for name in ("core", "nn")}
    >>> adapters, max_errors, skipped = build_and_check(two, setting)
    >>> list(adapters), max_errors["nn"] < 1e-6, skipped
    (['core', 'nn'], True, {})
    """
    adapters: dict[str, Adapter] = {}
    max_errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    core = setting.core()
    expected = reference(setting)
    expected_change = 0.0
    if setting.dropout:
        dropped = reference(setting, setting.dropout)["output"]
        expected_change = relative_change(expected["output"], dropped)
    tolerance = TOLERANCES[setting.dtype]
    for name, implementation in implementations.items():
        if not implementation.supports(setting):
            continue
        try:
            adapter = implementation.build(core, setting)
            # One at a time: all outputs together may exceed the memory of a small
            # machine.
            start = time.perf_counter()
            outputs = upcast(deterministic_outputs(adapter, setting))
            adapter.first_call_seconds = time.perf_counter() - start
            max_errors[name], problem = check_equal(outputs, expected, tolerance)
            if setting.dropout and not problem:
                dropped = output_with_dropout(adapter, setting)
                change = relative_change(outputs["output"], dropped)
                problem = check_dropout(change / expected_change)
        except Exception as error:
            problem = error_summary(error)
        if problem:
            skipped[name] = problem
        else:
            adapters[name] = adapter
    return adapters, max_errors, skipped


def check_dropout(change: float) -> str:
    r"""Describe a wrong effect of dropout, relative to the reference's; "" if right.

    >>> check_dropout(1.1)
    ''
    >>> check_dropout(0.0)
    'not equal: dropout changes the output 0 times as much as the reference'
    """
    if 1 / DROPOUT_FACTOR < change < DROPOUT_FACTOR:
        return ""
    return (
        f"not equal: dropout changes the output {change:.2g} times as much as the "
        f"reference"
    )


def upcast(outputs: Outputs) -> Outputs:
    """All tensors in float32 or better, to be compared."""
    return {
        part: tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        for part, tensor in outputs.items()
    }


def make_step(adapter: Adapter, setting: Setting) -> Callable[[], None]:
    r"""The step that is timed: a forward pass, or a forward and a backward pass.

    >>> from attention_bench.implementations import build_sdpa
    >>> setting = Setting(2, 3, d_model=10, heads=5, training=True)
    >>> adapter = build_sdpa(setting.core(), setting)
    >>> make_step(adapter, setting)()
    >>> {p.grad for p in adapter.module.parameters()}
    {None}
    """
    adapter.module.train(setting.training)
    x = adapter.switch_layout(setting.x())
    if not setting.training:

        def forward() -> None:
            with torch.inference_mode():
                adapter.call(x)

        return forward

    x.requires_grad_()
    grad_output = adapter.switch_layout(setting.grad_output())
    parameters = list(adapter.module.parameters())

    def forward_and_backward() -> None:
        result = adapter.call(x)
        output: Any = result[0] if isinstance(result, tuple) else result
        output.backward(grad_output)
        # As `optimizer.zero_grad()` does: the next step allocates new gradients.
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return forward_and_backward
