r"""# Inferring the calling convention

The checker infers how your implementation is built and called, as far as you do not
give it as an option. Names are the first evidence: a constructor with `embed_dim` and
`num_heads` shows how to build the module, a `forward(query, key, value, attn_mask)`
what it takes. Small calls with random inputs answer the rest: along which axis do
tokens influence each other? Does a key lose its influence where a mask is True, or
where it is False? All inferred facts are printed above the table of results, so that
you see a wrong guess, and can correct it with an [option](adapter.md#Options).

Source: the [dictionary](names.md) of names, and the [probes](../compare/probes.md) of
calling conventions.
"""

import inspect
import math
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_laws import names
from attention_laws.adapter import (
    AXES,
    LAYOUTS,
    MASK_KINDS,
    Adapter,
    CallError,
    Fact,
    MaskArgument,
    Options,
    Sizes,
)
from attention_laws.law import ScriptError
from attention_laws.script import CallArguments, Script

# Candidates for the axes of masks and of attention weights. Masks that can express more
# come first.
MASK_AXES = ("b1qk", "bhqk", "bqk", "qkb", "nqk", "b11k", "bk", "qk")
WEIGHTS_AXES = ("bhqk", "qkbh", "bqk", "qkb", "nqk", "hqk", "qk")


def infer_adapter(attention: Any, name: str, imports: str, options: Options) -> Adapter:
    r"""Infer how `attention` is called, as far as `options` do not give it.

    Raises `CallError` where no way to call it was found.
    """
    probe = CallProbe(Adapter(attention, name, imports, {}), options)
    if isinstance(attention, type):
        infer_init_args(probe)
    else:
        infer_heads(probe)
    infer_inputs(probe)
    check_argument_names(probe)
    try:
        infer_layout(probe)
        infer_masks(probe)
        infer_weights(probe)
        infer_behavior(probe)
    except ScriptError as failure:
        location = error_location(failure.error)
        raise CallError(
            f"the first calls of `{name}` succeed, and a later one raises "
            f"{failure}{location}; does it store something between calls?"
        ) from failure
    return probe.adapter


class CallProbe:
    """Makes small calls, and collects what they show in an adapter."""

    def __init__(self, adapter: Adapter, options: Options) -> None:
        self.adapter = adapter
        self.options = options
        self.first_error = ""  # the reason why the first failing call failed

    def record(self, name: str, value: object, source: str, **fields: Any) -> None:
        """Add a fact to the report, and set fields of the adapter."""
        fact = Fact(name, str(value), source)
        self.update(facts=(*self.adapter.facts, fact), **fields)

    def update(self, **fields: Any) -> None:
        """Set fields of the adapter."""
        self.adapter = replace(self.adapter, **fields)

    def try_call(
        self,
        mask: MaskArgument | None = None,
        hide: tuple[slice, slice, slice] | None = None,
        k_len: int = 5,
        mode: str = "eval",
        **fields: Any,
    ) -> tuple[Script, CallArguments] | None:
        """Make one call, with some fields of the adapter changed.

        `hide` is what `mask` hides: queries, keys and batch items. Returns None where
        the call fails, or returns nothing that could be the output.
        """
        adapter = replace(self.adapter, **fields)
        # Batch size, length and heads are pairwise different, so that a mask of the
        # wrong shape cannot broadcast by coincidence.
        batch_size = 1 if adapter.layout == "ld" else 2 + (adapter.heads == 2)
        sizes = Sizes(batch_size, 5, k_len, adapter.heads, adapter.d_k)
        try:
            script = Script(adapter, sizes, **self.options.script_options())
            script.restart(mode)
            allowed = script.all_allowed()
            if hide is not None:
                allowed[hide] = False
            args = script.make_arguments(allowed, mask)
            result = script.evaluate(f"attention({script.argument_source(args)})")
        except Exception as error:
            cause = error.error if isinstance(error, ScriptError) else error
            message = f"raises {ScriptError(cause)}{error_location(cause)}"
            self.first_error = self.first_error or message
            return None
        query = script.evaluate(args.inputs[0])
        output_index = find_output(result, query)
        if output_index is None:
            message = (
                f"returns {type(result).__name__}, where a tensor of "
                f"{list(query.shape)} was expected"
            )
            self.first_error = self.first_error or message
            return None
        script.adapter = replace(adapter, output_index=output_index)
        return script, args


def error_location(error: Exception) -> str:
    """The last line in the traceback that is neither in torch nor in this package."""
    skipped = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if not f.filename.startswith(skipped)]
    return f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""


def find_output(result: Any, query: Tensor) -> str | None:
    """The index of the first tensor shaped like the query, except for its width."""
    parts: list[tuple[str, Any]] = [("", result)]
    if isinstance(result, dict):
        parts = [(f"[{key!r}]", value) for key, value in result.items()]
    elif isinstance(result, tuple | list):
        parts = [(f"[{n}]", value) for n, value in enumerate(result)]
    for index, value in parts:
        if isinstance(value, Tensor) and value.shape[:-1] == query.shape[:-1]:
            return index
    return None


def influence(
    script: Script,
    args: CallArguments,
    changed: dict[str, Any],
    observed: dict[str, Any],
) -> float:
    """How much the output at `observed` changes if keys and values at `changed` do."""
    before = script.call(args)
    after = script.call(script.perturb(args, **changed))
    difference = script.evaluate(
        f"({after} - {before}){script.adapter.index(**observed)}"
    )
    return float(difference.detach().abs().nan_to_num(torch.inf).sum())


# From signatures


def check_argument_names(probe: CallProbe) -> None:
    """Raise `CallError` where an option names an argument that does not exist."""
    adapter, options = probe.adapter, probe.options
    parameters = names.parameters_of(adapter.target)
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    existing = names.required_by_name(parameters)
    named = {
        "mask": [*options.mask],
        "call_args": [*options.call_args],
        "cache": [*(options.cache or ())][:1],
    }
    for option, arguments in named.items():
        for name in arguments:
            if name not in existing and name != "none":
                raise CallError(
                    f"`{option}` names `{name}`, which is no argument of "
                    f"`{adapter.name}`; its arguments are {', '.join(existing)}"
                )


def infer_heads(probe: CallProbe) -> None:
    """The number of heads that a module has, or that a function is called with."""
    target, options = probe.adapter.target, probe.options
    is_instance = isinstance(target, nn.Module)
    heads = options.heads or names.size_attribute(target, "{heads}")
    kv_heads = options.kv_heads or names.size_attribute(target, "{kv_heads}")
    if heads is None:
        heads = 1 if is_instance else 2 * kv_heads if kv_heads else 3
    group_size = heads // kv_heads if kv_heads else 1
    probe.update(heads=heads, group_size=group_size, fixed_size=is_instance)
    if kv_heads:
        probe.record("heads", f"{heads}, {kv_heads} of keys and values", "given")


def infer_init_args(probe: CallProbe) -> None:
    """Which arguments the constructor needs, and which sizes they leave."""
    target, options = probe.adapter.target, probe.options
    init_args = {name: repr(value) for name, value in options.init_args.items()}
    sizes: dict[str, Any] = {
        "{heads}": options.heads,
        "{d_model}": options.d_model,
        "{kv_heads}": options.kv_heads,
    }
    present = set()
    parameters = inspect.signature(target).parameters.values()
    for name, required in names.required_by_name(parameters).items():
        value = names.ARGUMENT_VALUES.get(name, "")
        present.add(value)
        if name in init_args:
            sizes[value] = sizes.get(value) or options.init_args[name]
        elif value.startswith("{") or (required and value):
            init_args[name] = value
        elif required:
            raise CallError(
                f"`{target.__name__}` requires `{name}`, whose meaning is unknown; "
                f"give it with `--init-args {name}=...`, or check an instance"
            )

    heads, d_model, kv_heads = (
        sizes[name] for name in ("{heads}", "{d_model}", "{kv_heads}")
    )
    heads_given = bool(heads)
    if not heads:
        heads = 2 * kv_heads if kv_heads else 3
        if "{heads}" not in present or (d_model and d_model % heads):
            heads = 1
    probe.update(
        init_args=init_args,
        heads=heads,
        d_k=d_model // heads if d_model else 4,
        group_size=heads // kv_heads if kv_heads else 1,
        fixed_size=bool(heads_given or d_model),
    )
    built_as = probe.adapter.build_expression(Sizes(2, 5, 5, heads, probe.adapter.d_k))
    probe.record("built as", built_as, "given" if options.init_args else "inferred")


def infer_inputs(probe: CallProbe) -> None:
    """Whether there is one input or three, and whether they are passed by keyword."""
    adapter, options = probe.adapter, probe.options
    parameters = names.parameters_of(adapter.target)
    required = names.required_by_name(parameters)
    if not parameters and inspect.isbuiltin(adapter.target):
        # torch's functions have no signature; attention takes query, key and value.
        required = dict.fromkeys(names.INPUT_NAMES[0], True)
    order = list(required)
    inputs: tuple[str, ...] = options.inputs or next(
        (triple for triple in names.INPUT_NAMES if set(triple) <= set(order)),
        tuple(order[:1]),
    )
    if len(inputs) not in (1, 3):
        raise CallError(
            f"`{adapter.name}` has no named arguments; name its inputs with "
            f"`--inputs x` or `--inputs query,key,value`"
        )
    by_keyword = order[: len(inputs)] != list(inputs) and set(inputs) <= set(order)
    by_keyword |= any(p.kind is p.KEYWORD_ONLY for p in parameters if p.name in inputs)
    # Inputs that the signature does not name are passed to its `**kwargs`.
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_keyword |= has_kwargs and not set(inputs) & set(order)
    call_args = {
        name: None
        for name, is_required in required.items()
        if is_required and name not in inputs and names.MASK_PATTERN.search(name)
    }
    probe.update(call_args=call_args | dict(options.call_args))
    source = "given" if options.inputs else "inferred"
    probe.record(
        "inputs", ", ".join(inputs), source, inputs=inputs, by_keyword=by_keyword
    )


# From calls


def mask_candidates(probe: CallProbe) -> Iterator[MaskArgument]:
    """Every mask argument, in every kind and shape that its name leaves open."""
    adapter, options = probe.adapter, probe.options
    encodings: dict[str, str] = dict(options.mask)
    if encodings == {"none": ""}:
        return
    if not encodings:
        parameters = names.parameters_of(adapter.target)
        order = names.required_by_name(parameters) or ["attn_mask"]
        other = [n for n in order if n not in (*adapter.inputs, *options.call_args)]
        encodings = {
            name: ""
            for name in other
            if names.MASK_PATTERN.search(name) or names.CAUSAL_PATTERN.match(name)
        }
    for name, encoding in encodings.items():
        kind, _, axes = encoding.partition(":")
        kinds = [kind] if kind else ["attend", "ignore", "additive"]
        if not kind and names.CAUSAL_PATTERN.match(name):
            kinds = ["causal"]
        elif not kind and "len" in name:
            kinds = ["lengths"]
        for each in kinds:
            shapes = {"causal": ("",), "lengths": ("bq", "b")}.get(each, MASK_AXES)
            for shape in [axes] if axes else shapes:
                yield MaskArgument(name, each, shape)


def infer_layout(probe: CallProbe) -> None:
    """Along which axis tokens influence each other, and along which they do not.

    Raises `CallError` where no call succeeds.
    """
    adapter, options = probe.adapter, probe.options
    # Layouts of one group accept the same tensors, and are distinguished by their
    # outputs.
    groups = [["bld", "lbd"], ["bhld", "blhd"], ["ld"]]
    if not adapter.is_module:
        groups = [groups[1], groups[0], groups[2]]
    if options.layout:
        groups = [[LAYOUTS.get(options.layout, options.layout)]]
    widths: list[int | None] = [None]
    if isinstance(adapter.target, nn.Module):
        candidates = names.candidate_widths(adapter.target)
        widths = [options.d_model] if options.d_model else [*candidates]
    for required_mask in (None, *mask_candidates(probe)):
        for width in widths:
            for group in groups:
                found = {}
                for layout in group:
                    fields: dict[str, Any] = {"layout": layout, "d_model": width}
                    if width is not None:
                        fields["d_k"] = max(1, width // adapter.heads)
                    call = probe.try_call(required_mask=required_mask, **fields)
                    if call is not None:
                        fields["output_index"] = call[0].adapter.output_index
                        found[token_mixing(*call)] = fields
                if found:
                    record_layout(probe, found[max(found)], required_mask)
                    return
    raise CallError(
        f"`{adapter.name}` could not be called with small random inputs: it "
        f"{probe.first_error}; describe the call with `--layout`, `--inputs`, "
        f"`--mask`, `--init-args`, `--call-args` or `--d-model`"
    )


def token_mixing(script: Script, args: CallArguments) -> float:
    """How much more tokens influence each other than batch items do."""
    tokens = influence(script, args, {"l": slice(0, 3)}, {"l": slice(3, None)})
    items = influence(script, args, {"b": slice(0, 1)}, {"b": slice(1, None)})
    return tokens - items * (script.adapter.layout != "ld")


def record_layout(
    probe: CallProbe, fields: dict[str, Any], required_mask: MaskArgument | None
) -> None:
    """Record the layout under its name."""
    layout = fields["layout"]
    name = next((n for n, letters in LAYOUTS.items() if letters == layout), layout)
    source = "given" if probe.options.layout else "inferred"
    probe.record(
        "layout", name.replace("_", " "), source, required_mask=required_mask, **fields
    )


def infer_masks(probe: CallProbe) -> None:
    """Which arguments hide keys, and how they encode it."""
    given = dict(probe.options.mask)
    found: dict[str, list[MaskArgument]] = {}
    # The candidate for which hidden keys have the least influence. An implementation
    # whose mask leaks is to be checked with this mask, not as one without a mask.
    least: dict[str, tuple[float, MaskArgument]] = {}
    for mask in mask_candidates(probe):
        masks = found.setdefault(mask.name, [])
        if ":" in given.get(mask.name, "") or given.get(mask.name) == "causal":
            masks.append(mask)  # given in full: used even if it hides nothing
        elif mask.kind == "lengths" or mask.kind not in {m.kind for m in masks}:
            leak = mask_leakage(probe, mask)
            if leak is not None and leak < 1e-3:
                masks.append(mask)
            elif leak is not None and leak < least.get(mask.name, (math.inf,))[0]:
                least[mask.name] = leak, mask
    for name, masks in found.items():
        if not masks and name in least:
            masks.append(least[name][1])
        for mask in masks:
            record_mask(probe, mask)
    probe.update(masks=tuple(mask for masks in found.values() for mask in masks))
    if not probe.adapter.masks:
        probe.record("mask", "none", "given" if given else "inferred")


def record_mask(probe: CallProbe, mask: MaskArgument) -> None:
    """Record the kind and the axes of a mask."""
    axes = ", ".join(AXES.get(axis, axis) for axis in mask.axes)
    source = "given" if probe.options.mask else "inferred"
    text = MASK_KINDS[mask.kind] + (f" [{axes}]" if axes else "")
    probe.record(f"`{mask.name}`", text, source)


def mask_leakage(probe: CallProbe, mask: MaskArgument) -> float | None:
    """The influence of hidden keys, relative to visible ones; None if the call fails.

    0 where the mask hides what it should, about 1 where it hides nothing.
    """
    if mask.kind == "causal":
        call = probe.try_call(call_args={**probe.adapter.call_args, mask.name: True})
        if call is None:
            return None
        late, early = {"l": slice(3, None)}, {"l": slice(0, 3)}
        return influence(*call, late, early) / (1e-9 + influence(*call, early, late))

    # Of five keys the fourth is hidden, and the output of the fifth query observed.
    # Lengths can hide only the last key, so there it is the other way round. If the
    # mask has an axis for batch items, only the last item has a hidden key.
    key = 4 if mask.kind == "lengths" else 3
    items = slice(None)
    if set("bn") & set(mask.axes):
        last_item = 1 + (probe.adapter.heads == 2)
        items = slice(last_item, None)
    hidden_key = slice(key, key + 1)
    call = probe.try_call(mask=mask, hide=(slice(None), hidden_key, items))
    if call is None:
        return None
    observed = {"l": slice(7 - key, 8 - key), "b": items}
    hidden = influence(*call, {"l": hidden_key}, observed)
    return hidden / (1e-9 + influence(*call, {"l": slice(0, 3)}, observed))


def infer_weights(probe: CallProbe) -> None:
    """Where the attention weights are, in the result or in an attribute.

    Raises `CallError` if the option `weights` names a place where there are none.
    """
    adapter, options = probe.adapter, probe.options
    call = probe.try_call()
    if call is None or options.weights == "none":
        return
    script, args = call
    script.exec_line(f"result = attention({script.argument_source(args)})")
    given, _, axes = options.weights.partition(":")
    candidates = [given] if given else [*weights_candidates(script)]
    sizes = {"b": script.sizes.batch_size, "h": adapter.heads, "q": 5, "k": 5}
    sizes["n"] = sizes["b"] * sizes["h"]
    for source in candidates:
        value = None
        with suppress(LookupError, AttributeError, TypeError):
            owner = "result" if source.startswith("[") else "attention"
            value = script.evaluate(owner + source)
        for letters in [axes] if axes else WEIGHTS_AXES:
            shape = [sizes[letter] for letter in letters]
            if isinstance(value, Tensor) and list(value.shape) == shape:
                probe.record(
                    "weights",
                    f"{source} [{', '.join(AXES[axis] for axis in letters)}]",
                    "given" if options.weights else "inferred",
                    weights_source=source,
                    weights_axes=letters,
                )
                return
        if given:
            seen = (
                f"a tensor of {list(value.shape)}"
                if isinstance(value, Tensor)
                else "no tensor"
            )
            raise CallError(
                f"`weights` (={options.weights!r}) is {seen}, where the sizes are "
                f"{', '.join(f'{letter}={size}' for letter, size in sizes.items())}"
            )


def weights_candidates(script: Script) -> Iterator[str]:
    """Where weights could be: items of the result, and attributes of the module."""
    result = script.evaluate("result")
    if isinstance(result, tuple | list):
        yield from (f"[{n}]" for n in range(len(result)))
    elif isinstance(result, dict):
        yield from (f"[{key!r}]" for key in result)
    if script.adapter.is_module:
        for path, module in script.evaluate("attention").named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    yield f".{path}.{name}" if path else f".{name}"


def check_parameter_names(module: nn.Module, options: Options) -> None:
    """Raise `CallError` where an option names a parameter that does not exist."""
    parameters = dict(module.named_parameters())
    parts = {*parameters, *dict(module.named_modules())}
    projections = [name.partition(":")[0] for name in options.projections.values()]
    for option, named, existing in (
        ("projections", projections, parts),
        ("unused_parameters", options.unused_parameters, {*parameters}),
    ):
        for name in named:
            if name not in existing:
                raise CallError(
                    f"`{option}` names `{name}`, which does not exist; there are "
                    f"{', '.join(sorted(existing - {''}))}"
                )


def infer_behavior(probe: CallProbe) -> None:
    """How it behaves without a mask: causality, cross-attention, positions, cache."""
    adapter, options = probe.adapter, probe.options
    call = probe.try_call()
    assert call is not None  # as it succeeded for the layout

    late, early = {"l": slice(3, None)}, {"l": slice(0, 3)}
    source = "inferred"
    # A class named causal is meant to be, even if it leaks: the laws show the leak.
    causal = "causal" in adapter.name.lower()
    if options.causal is not None:
        causal, source = options.causal, "given"
    elif not causal and adapter.required_mask is None:
        causal = influence(*call, late, early) < 1e-6 < influence(*call, early, late)
    probe.record(
        "causal without a mask", "yes" if causal else "no", source, causal=causal
    )

    cross = len(adapter.inputs) == 3 and not causal
    cross = cross and probe.try_call(k_len=7) is not None
    probe.update(cross_attention=cross, window=options.window, cache=options.cache)
    if options.window is not None:
        probe.record("window", options.window, "given")
    positions = options.positions or "none"
    source = "given" if options.positions else "assumed"
    probe.record("positions", positions, source, positions=positions)
    if adapter.is_module:
        infer_module_behavior(probe)


def infer_module_behavior(probe: CallProbe) -> None:
    """Whether training is reproducible without dropout, and the projections."""
    options = probe.options
    call = probe.try_call(mode="train")
    # Nothing is perturbed: the influence is the difference of two equal calls.
    reproducible = call is not None and not influence(*call, {"l": slice(0, 0)}, {})
    probe.update(
        reproducible_training=reproducible,
        unused_parameters=options.unused_parameters,
    )
    if not reproducible:
        text = "random even with dropout 0; only evaluation is checked"
        probe.record("training", text, "inferred")
    call = probe.try_call()
    assert call is not None
    module = call[0].evaluate("attention")
    check_parameter_names(module, options)
    projections = names.find_projections(module, options.projections)
    probe.update(projections=projections)
