r"""# Inferring the formula

Of most modules, the projections are known by their names. Whether the formula of
attention holds with them is computed: also for what is added to a residual connection,
with the parts of a fused projection in another order, or with more heads.

Source: the [formula](algebra.md#formula), and the orders of rows in the fused
projections of public models.
"""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from attention_laws import structure
from attention_laws.adapter import Adapter, Options, Sizes
from attention_laws.algebra import assert_formula
from attention_laws.calling import CallProbe, token_mixing, weighing_argument
from attention_laws.law import LawViolation, NotApplicable, ScriptError
from attention_laws.recorded import make_equal_tokens, record_weights
from attention_laws.recorders import WeightsRecorder
from attention_laws.script import CallArguments, Script


def infer_formula(probe: CallProbe) -> None:
    """Of what the formula holds: a residual, other numbers of heads, another order."""
    adapter, options = probe.adapter, probe.options
    if not adapter.projections or formula_holds(adapter, options):
        return
    if formula_holds(adapter, options, residual=True):
        probe.update(designs={**adapter.designs, "residual": "x + attention(x)"})
        return
    for fact, text, fields in other_formulas(adapter):
        is_given = fact == "heads" and options.heads is not None
        if not is_given and formula_holds(replace(adapter, **fields), options):
            probe.record(fact, text, "inferred", **fields)
            return
        if is_order_of_rows(adapter, text, options):
            # Seen in the weights: that the formula does not hold is reported.
            probe.record(fact, text, "inferred", **fields)
            return
    if name := weighing_argument(probe):
        probe.update(designs={**adapter.designs, "edges": name})
    elif "relu" in structure.identifiers(adapter.target):
        # An activation behind what is taken for the last projection.
        probe.update(designs={**adapter.designs, "features": "relu"})
    if adapter.heads == 1 and probe.built is not None and options.heads is None:
        if "head" in "".join(structure.identifiers(probe.built)).lower():
            probe.update(projections={})  # there may be several


def other_formulas(adapter: Adapter) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A fact, its text, and fields with which the formula may hold.

    The scale of the scores may be in the initial weights, as in T5. Parts of a fused
    projection come in many orders. A module may not tell how many heads it has.
    Parameters may be factors of a product, or the weights of a linear function.
    """
    transposed = structure.transposed_factors(adapter.projections)
    if transposed != adapter.projections:
        yield "parameters", "[outputs, inputs]", {"projections": transposed}
    if "scale" in adapter.designs:
        designs = {n: name for n, name in adapter.designs.items() if n != "scale"}
        query = f"({adapter.projections['query']} * d_k ** 0.5)"
        unscaled = {"projections": {**adapter.projections, "query": query}}
        yield "scores", "not divided by sqrt(d_k)", {**unscaled, "designs": designs}
    orders = structure.other_fused_orders(adapter.projections)
    devices = structure.orders_of_devices(adapter.projections, adapter.heads)
    for name, projections in itertools.chain(orders, devices):
        yield "fused projection", f"[{name}]", {"projections": projections}
    if adapter.heads == 1 and adapter.is_module:
        for heads in (n for n in range(2, adapter.d_k + 1) if adapter.d_k % n == 0):
            sizes = {"heads": heads, "d_k": adapter.d_k // heads}
            yield "heads", str(heads), {**sizes, "fixed_size": True}


def is_order_of_rows(adapter: Adapter, text: str, options: Options) -> bool:
    """Whether a fused projection has the heads of queries, of keys, and of values.

    The rows of a query have influence on the weights of one head, those of a key on
    those of its group, and those of a value on none.
    """
    if text != f"[{structure.GROUPED_ORDER}]" or adapter.group_size == 1:
        return False
    heads, group = adapter.heads, adapter.group_size
    script = Script(
        adapter, Sizes(1, 5, 5, heads, adapter.d_k), **options.script_options()
    )
    with suppress(ScriptError):
        script.restart()
        layers = structure.layers_by_role(
            script.evaluate("attention"), heads * adapter.d_k
        )
        weights = record_weights(script, script.make_arguments())
        if not weights or "fused" not in layers:
            return False
        rows = f"attention.get_submodule({layers['fused']!r}).weight"
        found = []
        for head in range(heads):
            of_head = f"loss({weights}[{head}].clamp(min=1e-30).log())"
            grad = script.evaluate(
                f"torch.autograd.grad({of_head}, {rows}, retain_graph=True)[0]"
            )
            size = grad.unflatten(0, (-1, adapter.d_k)).flatten(1).norm(dim=1)
            found.append(size > 1e-3 * size.max())
        query = torch.eye(heads, dtype=torch.bool)
        key = torch.eye(heads // group, dtype=torch.bool).repeat_interleave(group, 0)
        expected = torch.cat([query, key, torch.zeros_like(key)], dim=1)
        return torch.equal(torch.stack(found).cpu(), expected)
    return False


def formula_holds(adapter: Adapter, options: Options, residual: bool = False) -> bool:
    """Whether one call, or what it adds to its input, equals the formula.

    That is up to positions.
    """
    length = adapter.fixed_length or 5
    sizes = Sizes(2, length, length, adapter.heads, adapter.d_k)
    script = Script(adapter, sizes, **options.script_options())
    try:
        script.restart()
        args = script.make_arguments()
        if adapter.positions != "none":
            args = make_equal_tokens(script, args)
        output = script.call(args)
        if residual:
            output = script.assign("y", f"{output} - {args.inputs[0]}")
        assert_formula(script, args, output)
    except (LawViolation, NotApplicable, ScriptError):
        return False
    return True


def attends_by_factors(script: Script, args: CallArguments) -> bool:
    """Whether queries and keys have a softmax each, and no pair of them has a weight.

    That of the keys is over tokens. The order of the products is then that of a linear
    attention.
    """
    if not script.adapter.single_input or script.adapter.is_pooled:
        return False
    with WeightsRecorder() as recorder:
        script.call(args)
    length = script.batch_and_length(args.inputs[-1])[1]
    over_keys = [w.shape[dim] == length for w, dim in recorder.found]
    is_of_tokens = ([*w.shape].count(length) == 1 for w, _ in recorder.found)
    return any(over_keys) and not all(over_keys) and all(is_of_tokens)


def attends_over_heads(script: Script, args: CallArguments) -> bool:
    """Whether each token attends to its own heads, and to no other token.

    Then heads and positions were not transposed.
    """
    heads = script.adapter.heads
    with WeightsRecorder() as recorder:
        script.call(args)
    are_heads = all(w.shape[-2:] == (heads, heads) for w, _ in recorder.found)
    return are_heads and heads > 1 and token_mixing(script, args) <= 0
