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
import itertools
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attention_laws import caches, documented, names, structure
from attention_laws.adapter import (
    LAYOUTS,
    Adapter,
    CallError,
    MaskArgument,
    ModelError,
    Options,
    Sizes,
)
from attention_laws.algebra import (
    EDGE_ARGUMENTS,
)
from attention_laws.calling import (
    ARGUMENT_EXAMPLE,
    CALLING_WORK,
    CallProbe,
    SlowCallError,
    are_tokens_a_set,
    built_by,
    context_of_all_items,
    count_own_keys,
    error_location,
    has_one_axis_of_tokens,
    hides_future,
    influence,
    is_causal_behind_prefix,
    is_causal_with_more_heads,
    is_documented_causal,
    is_named_causal,
    leaks_little,
    limit_of_length,
    mask_candidates,
    order_matters,
    output_of,
    queries_are_causal,
    queries_meet,
    raise_if_model,
    token_mixing,
    ways_to_call,
)
from attention_laws.embedded import (
    decoder_inputs,
    is_large,
    takes_ids,
    weights_of_tables,
)
from attention_laws.infer_build import (
    SIZES,
    build,
    build_with,
    correct_group_size,
    infer_heads,
    infer_heads_of_function,
    infer_init_args,
    unknown_argument,
)
from attention_laws.infer_cache import (
    infer_cache,
    infer_context_cache,
    infer_made_memory,
    infer_memory,
    infer_reset,
)
from attention_laws.infer_formula import (
    attends_by_factors,
    attends_over_heads,
    infer_formula,
)
from attention_laws.infer_masks import (
    infer_masks,
    infer_place_of_padding,
    mask_leakage,
)
from attention_laws.infer_weights import infer_weights
from attention_laws.law import ScriptError, did_you_mean
from attention_laws.patches import takes_patches
from attention_laws.recorders import CalledFunctions, WeightsRecorder, calls_softmax
from attention_laws.script import NUMBER_OF_EACH, CallArguments, Script
from attention_laws.tools import loss

# Names in code that attends within chunks, beside those of PyTorch's functions.
CHUNK_PATTERN = re.compile(r"chunk(?!s?$)|(?<!^)chunk", re.IGNORECASE)

# The work of trying calls with token ids, which are slow, at each of the sizes.
WORK_WITH_IDS = 150

# Tokens among which a sliding window is looked for.
WINDOW_LENGTH = 40


def infer_adapter(attention: Any, name: str, imports: str, options: Options) -> Adapter:
    r"""Infer how `attention` is called, as far as `options` do not give it.

    It is called on the CPU, if it can be. There, an index out of range is an error like
    others, and on CUDA the end of all work in the process.

    Raises `CallError` where no way to call it was found.
    """
    if options.device != "cpu":
        with suppress(CallError):
            on_cpu = replace(options, device="cpu")
            return infer_adapter(attention, name, imports, on_cpu)
    check_forward(attention, name)
    check_argument_names(attention, name, options)
    probe = find_call(attention, name, imports, options)
    check_parameter_names(probe)
    try:
        infer_reset(probe)
        infer_times(probe)
        infer_weights(probe)
        infer_masks(probe)
        infer_place_of_padding(probe)
        infer_behavior(probe)
    except ScriptError as failure:
        raise late_error(name, failure) from failure
    return probe.adapter


def find_call(attention: Any, name: str, imports: str, options: Options) -> CallProbe:
    """Sizes at which `attention` is called with success, and how.

    Raises the `CallError` of the first sizes where there are none. The usual ways to
    call it are tried at all sizes before the others.
    """
    first_error: CallError | None = None
    is_built = needs_more = False
    is_of_ids = takes_ids(attention)  # whose parts are checked, too
    count = 1 if not isinstance(attention, type) else 3 if is_of_ids else len(SIZES)
    sizes = SIZES[:count]
    resets = caches.reset_methods(attention)
    built: set[str] = set()
    work = 0
    for usual, (heads, d_k, longest, tie) in itertools.product((True, False), sizes):
        needs_more |= not (usual or is_built)
        # Half of the work that is left, so that the later sizes are tried, too.
        limit = (CALLING_WORK - work) // 2
        if isinstance(first_error, ModelError):
            limit //= 4  # the attentions within it are checked else
        if is_of_ids:
            limit = WORK_WITH_IDS
        adapter = Adapter(attention, name, imports, {}, window=options.window)
        adapter = replace(adapter, reset=next(iter(resets), ""))
        probe = CallProbe(adapter, options, limit)
        try:
            if isinstance(attention, type):
                infer_init_args(probe, heads, d_k, longest, tie, needs_more)
                arguments = f"{usual} {probe.adapter.facts[-1].value}"
                if arguments in built:
                    continue
                built.add(arguments)
                check_build(probe)
                if not is_built:
                    # At sizes that it can be built with, an error tells more.
                    is_built, first_error = True, None
            else:
                infer_heads(probe)
            infer_inputs(probe)
            infer_layout(probe, usual)
            infer_heads_of_function(probe)
            correct_group_size(probe)
            free_or_fix_sizes(probe)
            leave_out_layers(probe)
            raise_limit(probe)
            infer_least_length(probe)
            if structure.halves_heads(probe.adapter.target):
                probe.update(least_heads=2)
            return probe
        except CallError as error:
            if probe.takes_ids or isinstance(error, SlowCallError):
                raise
            first_error = first_error or error
        except ScriptError as failure:
            first_error = first_error or late_error(name, failure)
        finally:
            work += probe.work
    assert first_error is not None
    limit = CALLING_WORK // (8 if isinstance(first_error, ModelError) else 2)
    limit = WORK_WITH_IDS if is_of_ids else limit
    try:
        return find_call_of_defaults(attention, name, imports, options, limit)
    except SlowCallError:
        raise
    except (CallError, ScriptError):
        raise first_error from None


def find_call_of_defaults(
    attention: Any, name: str, imports: str, options: Options, limit: int
) -> CallProbe:
    """How a class is called at the sizes that it has by default.

    Where it requires arguments, it is one whose width is none of them, but a default of
    its config. Raises `CallError` or `ScriptError` where there is no such call.
    """
    adapter = Adapter(attention, name, imports, {}, window=options.window)
    probe = CallProbe(adapter, options, limit)
    if not isinstance(attention, type) or options.init_args or options.d_model:
        raise CallError("it is built, or its sizes are given")
    parameters = inspect.signature(attention).parameters.values()
    if any(names.required_by_name(parameters).values()):
        infer_init_args(probe)
    else:
        probe.record("built as", f"{name}()", "inferred")
    probe.built = build(probe, probe.adapter.heads)
    if takes_ids(attention) and is_large(probe.built):
        raise CallError("it is too large to be checked as a whole")
    infer_heads(probe)
    infer_inputs(probe)
    infer_layout(probe, usual=False)
    return probe


def check_build(probe: CallProbe) -> None:
    """Raise `CallError` where a class cannot be built: no call could succeed."""
    adapter, options = probe.adapter, probe.options
    if not isinstance(adapter.target, type):
        return
    sizes = Sizes(2, 5, 5, adapter.heads, adapter.d_k)
    script = Script(adapter, sizes, **options.script_options())
    try:
        script.restart()
    except ScriptError as failure:
        if not script.lines[-1].startswith(f"attention = {adapter.name}("):
            return  # lazy weights, which a call initializes
        if probe.guessed:
            raise unknown_argument(adapter.target, probe.guessed) from failure
        raise CallError(
            f"`{adapter.build_expression(sizes)}` raises "
            f"{failure}{error_location(failure.error)}; give the arguments of the "
            f"constructor with `--init-args`, or check an instance"
        ) from failure


def late_error(name: str, failure: ScriptError) -> CallError:
    """The error of a call after others that succeeded."""
    location = error_location(failure.error)
    return CallError(
        f"the first calls of `{name}` succeed, and a later one raises "
        f"{failure}{location}; does it store something between calls?"
    )


# From signatures


def check_forward(attention: Any, name: str) -> None:
    """Raise `CallError` where a module has other methods only."""
    kind = attention if isinstance(attention, type) else type(attention)
    if issubclass(kind, nn.Module) and kind.forward is nn.Module.forward:
        raise CallError(
            f"`{name}` has no `forward`; write a subclass whose `forward` calls one of "
            f"its methods, and check that"
        )


def check_argument_names(attention: Any, name: str, options: Options) -> None:
    """Raise `CallError` where an option names an argument that does not exist."""
    arguments = names.parameters_of(attention)
    named = {
        "mask": [*options.mask],
        "call_args": [*options.call_args],
        "cache": [*(options.cache or ())][:1],
    }
    if not any(p.kind is p.VAR_POSITIONAL for p in arguments):
        named["inputs"] = [*options.inputs]
    pairs = [(option, given, arguments) for option, given in named.items()]
    if isinstance(attention, type):
        of_constructor = [*inspect.signature(attention).parameters.values()]
        pairs.append(("init_args", [*options.init_args], of_constructor))
    for option, given, parameters in pairs:
        if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
            continue
        existing = names.required_by_name(parameters)
        for each in given:
            if each not in existing and each != "none":
                raise CallError(
                    f"`{option}` names `{each}`, which is no argument of `{name}`; "
                    f"its arguments are {', '.join(existing)}"
                )


def check_parameter_names(probe: CallProbe) -> None:
    """Raise `CallError` where an option names a parameter that does not exist."""
    options, call = probe.options, probe.try_call()
    if not probe.adapter.is_module or call is None:
        return
    module = call[0].evaluate("attention")
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
                    f"`{option}` names `{name}`, which does not exist; "
                    f"{did_you_mean(name, sorted(existing - {''}), 'there are')}"
                )


def free_or_fix_sizes(probe: CallProbe) -> None:
    """Fix the sizes unless a class can be called with the least number of heads.

    A width may be the default of an argument of an unknown name, and not change, so
    that not all numbers of heads divide it. So may the number of heads of keys and
    values.
    """
    adapter = probe.adapter
    if not isinstance(adapter.target, type):
        return
    if probe.built is not None and not adapter.free_heads:
        return
    least = adapter.group_size
    others = {least, 2 * least, 3 * least} - {adapter.heads}
    if any(probe.try_call(heads=heads) is None for heads in others):
        probe.update(fixed_size=True, free_heads=False)


def leave_out_layers(probe: CallProbe) -> None:
    """Set a flag without which a class builds layers that its calls leave out.

    With `pre_only`, there is no last projection, which other calls have. A layer that
    another output needs, as that of a second stream of tokens, is not left out.
    """
    adapter, target = probe.adapter, probe.adapter.target
    of_class = inspect.signature(target).parameters if isinstance(target, type) else {}
    flags = [n for n, p in of_class.items() if p.default is False]
    flags = [*filter(names.OMISSION_PATTERN.search, flags)]
    call = probe.try_call(mode="train") if flags else None
    if call is None:
        return
    script, args = call
    result = script.assign("result", script.call_source(args))
    outputs = [*map(script.evaluate, script.all_outputs(args, result))]
    module = script.evaluate("attention")
    weights = {n: w for n, w in module.named_parameters() if w.requires_grad}
    if not (weights and outputs[0].requires_grad):
        return
    total = torch.stack([*map(loss, outputs)]).sum()
    grads = torch.autograd.grad(total, [*weights.values()], allow_unused=True)
    used = {n for n, grad in zip(weights, grads, strict=True) if grad is not None}
    for name in flags if used < {*weights} else ():
        init_args = {**adapter.init_args, name: "True"}
        other = probe.try_call(init_args=init_args)
        if other is None or name in adapter.init_args:
            continue
        if used == {*dict(other[0].evaluate("attention").named_parameters())}:
            probe.update(designs={**adapter.designs, "left_out": name})
            build_with(probe, init_args)
            return


def infer_least_length(probe: CallProbe) -> None:
    """The shortest sequence that is accepted, where two tokens are not enough.

    A context may begin or end with as many tokens of its own as an attribute tells.
    """
    adapter = probe.adapter
    if adapter.fixed_length is not None:
        return
    if not adapter.single_input:
        call = probe.unmasked_call("eval")
        counts = structure.token_counts(call and call[0].evaluate("attention"))
        refused = [n for n in counts & {2, 3, 4} if probe.try_call(k_len=n) is None]
        if call and refused:
            text = f"at least {max(refused) + 1} of the context"
            probe.record("length", text, "inferred", least_length=max(refused) + 1)
        return
    if any(probe.try_call(k_len=n) is not None for n in (1, 2)):
        return
    least = 3 if probe.try_call(k_len=3) is not None else 4
    least += least == 4 and probe.try_call(k_len=4) is None
    probe.record("length", f"at least {least}", "inferred", least_length=least)


def raise_limit(probe: CallProbe) -> None:
    """Set a small limit of the length that the constructor has under any name."""
    if name := limit_of_length(probe):
        build_with(probe, {**probe.adapter.init_args, name: "320"})


def infer_inputs(probe: CallProbe) -> None:
    """Which arguments are inputs, and whether they are passed by keyword."""
    adapter, options = probe.adapter, probe.options
    parameters = names.parameters_of(adapter.target)
    required = names.required_by_name(parameters)
    if not parameters and inspect.isbuiltin(adapter.target):
        # torch's functions have no signature; attention takes query, key and value.
        required = dict.fromkeys(names.INPUT_NAMES[0], True)
    order = list(required)
    # Key and value may be the same argument.
    given = tuple(dict.fromkeys(options.inputs or ()))
    inputs: tuple[str, ...] = given or names.find_inputs(required)
    if takes_ids(adapter.target) and not given:
        inputs = decoder_inputs(required) or inputs
    takes_args = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if takes_args and not options.inputs and not any(required.values()):
        inputs = ("x",)  # all that has a name is optional
    if not inputs:
        raise CallError(
            f"`{adapter.name}` has no named arguments; name its inputs with "
            f"`--inputs x` or `--inputs query,key,value`"
        )
    check_roles(adapter.name, inputs, options)
    by_keyword = order[: len(inputs)] != list(inputs) and set(inputs) <= set(order)
    by_keyword |= any(p.kind is p.KEYWORD_ONLY for p in parameters if p.name in inputs)
    # Inputs that the signature does not name are passed to its `**kwargs`.
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_keyword |= has_kwargs and not takes_args and not set(inputs) & set(order)
    key = names.input_key(adapter.target, inputs[0]) if len(inputs) == 1 else ""
    probe.update(input_key=key)
    call_args = {
        name: None
        for name, is_required in required.items()
        if is_required and name not in inputs
    }
    probe.update(call_args=call_args | dict(options.call_args))
    source = "given" if options.inputs else "inferred"
    probe.record(
        "inputs", ", ".join(inputs), source, inputs=inputs, by_keyword=by_keyword
    )


def check_roles(name: str, inputs: tuple[str, ...], options: Options) -> None:
    """Raise `CallError` where an option names an input as another argument."""
    for option in ("mask", "call_args"):
        for each in getattr(options, option):
            if each in inputs:
                raise CallError(
                    f"`{option}` names `{each}`, which is taken for an input of "
                    f"`{name}`; name another argument, or the inputs with `--inputs`"
                )


# From calls


def infer_layout(probe: CallProbe, usual: bool) -> None:
    """Along which axis tokens influence each other, and along which they do not.

    Raises `CallError` where no call succeeds.
    """
    # Tokens do not influence each other, or batch items do: probably a wrong layout,
    # unless no other is accepted.
    unlikely: tuple[dict[str, Any], MaskArgument | None] | None = None
    for choices, required_mask in ways_to_call(probe, usual):
        found: dict[float, dict[str, Any]] = {}
        for fields in choices:
            more = {"k_len": fields.pop("k_len", 5), "required_mask": required_mask}
            if unlikely is not None and are_features(probe, fields, unlikely[0]):
                continue
            if probe.try_call(**fields, **more, reuse=True) is None:
                continue
            call = probe.try_call(**fields, **more)
            equal = more | {"k_len": 5}
            if equal != more and probe.try_call(**fields, **equal, reuse=True) is None:
                continue  # what has to be longer than the input is no context
            if call is not None and is_constant(*call):
                call = call_with_other_output(probe, fields, more) or call
            # Attention to equal tokens, which fill a context, gives what they are.
            has_filled = call is not None and bool(call[0].adapter.filled)
            if call is not None and not has_filled and is_constant(*call):
                error = "gives the same output for all inputs"
                probe.first_error = probe.first_error or error
                continue
            fields["output_index"] = call[0].adapter.output_index if call else ""
            if call is not None and takes_channels_for_others(call[0]):
                continue
            if call is not None and accepts_other_batch(probe, fields, more):
                mixing = token_mixing(*call) or mixing_of_longer(probe, fields, more)
                found.setdefault(mixing, fields)
        if found and max(found) > 0:
            best = found[max(found)]
            best |= outputs_of_own_queries(probe, best, required_mask)
            record_layout(probe, best, required_mask)
            infer_roles(probe)
            return
        if found and unlikely is None:
            unlikely = found[max(found)], required_mask
    if unlikely is not None and not usual:
        record_layout(probe, *unlikely)
        return
    adapter = probe.adapter
    if probe.guessed and not probe.takes_ids:
        raise unknown_argument(adapter.target, probe.guessed)
    if not adapter.is_module and names.CONFIG_PATTERN.search(adapter.inputs[0]):
        raise unknown_argument(adapter.target, adapter.inputs[0])
    message = (
        f"`{adapter.name}` could not be called with random inputs (batch size 2, "
        f"length 5, {adapter.heads} heads of width {adapter.d_k}): it "
        f"{probe.first_error}; {unknown_arguments(probe)}describe the call with "
        f"`--layout`, `--inputs`, `--mask`, `--init-args`, `--call-args` or `--d-model`"
    )
    raise_if_model(probe, message)
    raise CallError(message)


def mixing_of_longer(
    probe: CallProbe, fields: dict[str, Any], more: dict[str, Any]
) -> float:
    """How much a context influences the output that is longer than the queries.

    One of their shape may be taken for them by mistake.
    """
    inputs = fields.get("inputs", probe.adapter.inputs)
    if len(inputs) != 2 or "fixed_length" in fields:
        return 0.0
    call = probe.try_call(**fields, **{**more, "k_len": 7})
    return token_mixing(*call) if call is not None else 0.0


def is_constant(script: Script, args: CallArguments) -> bool:
    """Whether the output is the same for other inputs, as that of a chunk's part."""
    # All calls may return one buffer.
    output = output_of((script, args)).clone()
    return torch.equal(output, output_of((script, script.make_arguments())))


def takes_channels_for_others(script: Script) -> bool:
    """Whether the channels of an image are taken for heads or rows, by coincidence."""
    adapter, module = script.adapter, script.namespace["attention"]
    has_four_axes = "h" in adapter.layout or adapter.image.endswith("last")
    is_of_pixels = isinstance(module, nn.Module) and not takes_patches(adapter.target)
    return has_four_axes and is_of_pixels and structure.embeds_pixels(module)


def call_with_other_output(
    probe: CallProbe, fields: dict[str, Any], more: dict[str, Any]
) -> tuple[Script, CallArguments] | None:
    """A call whose output is a later part of the result, and depends on the input.

    The first may be an argument that is returned, such as the points of a cloud.
    """
    for n in (1, 2):
        call = probe.try_call(**{**fields, "output_index": f"[{n}]"}, **more)
        if call is None or not call[0].adapter.output_index.startswith(f"[{n}]"):
            return None
        if not is_constant(*call):
            return call
    return None


def accepts_other_batch(
    probe: CallProbe, fields: dict[str, Any], more: dict[str, Any]
) -> bool:
    """Whether a guessed argument, one item for each of a batch, may have others.

    The two items of a first batch may be accepted as a pair, by coincidence, the five
    tokens of a first sequence as as many features, and an image of one row where pairs
    of tokens make a square. As many classes as there are batch items do not belong to
    one of them each.
    """
    is_fixed = "fixed_length" in fields
    if fields.get("image") and fields.get("is_pooled") and not is_fixed:
        rows = {**fields, "image_height": 2}
        if probe.try_call(**rows, **{**more, "k_len": 6}) is None:
            return False
    if fields["layout"] == "bdl" and not is_fixed:
        if probe.try_call(**fields, **{**more, "k_len": 7}) is None:
            return False
    guessed = str(fields.get("extra_args"))
    is_guessed = "{batch_size}" in guessed or "{query}" in guessed or "inputs" in fields
    if not is_guessed and fields["output_index"] != NUMBER_OF_EACH:
        return True
    return probe.try_call(**fields, **more, batch_size=6) is not None


def are_features(
    probe: CallProbe, fields: Mapping[str, Any], other: Mapping[str, Any]
) -> bool:
    """Whether the tokens of a layout must be the features of another one.

    A module that takes one length only may have that length for the width of its last
    axis. Features influence each other, which must not be mistaken for attention.
    """
    width = other.get("d_model") or probe.adapter.heads * probe.adapter.d_k
    is_last = fields["layout"] == "bdl" and other["layout"] in ("bld", "lbd")
    return is_last and fields.get("fixed_length") == width


def outputs_of_own_queries(
    probe: CallProbe, fields: dict[str, Any], required_mask: MaskArgument | None
) -> dict[str, Any]:
    """The fields of outputs that are as many as the tokens by coincidence, if any.

    Learned queries, such as one for each class, have outputs whose number is that of
    the tokens at one length only.
    """
    adapter = replace(probe.adapter, **fields)
    has_other_lengths = adapter.fixed_length is None and not adapter.image
    if adapter.single_input and has_other_lengths and not adapter.is_pooled:
        more = {**fields, "k_len": 7, "required_mask": required_mask}
        own = {**more, "is_pooled": True}
        if probe.try_call(**more) is None and (call := probe.try_call(**own)):
            return {"is_pooled": True, "output_index": call[0].adapter.output_index}
    return {}


def unknown_arguments(probe: CallProbe) -> str:
    """What to do about the required arguments of a call that are unknown, if any."""
    given, first = probe.options.call_args, probe.adapter.inputs[0]
    if parts := names.unpacked_parts(probe.adapter.target, first):
        return (
            f"it unpacks `{first}` into {', '.join(parts)}: write a function of one "
            f"of them that passes the others, and check that, or "
        )
    unknown = [n for n, v in probe.adapter.call_args.items() if v is None]
    unknown = [f"`{name}`" for name in unknown if name not in given]
    verb = "requires"
    if not unknown and "None" in probe.first_error:
        parameters = names.parameters_by_name(probe.adapter.target).items()
        optional = [n for n, parameter in parameters if parameter.default is None]
        unknown = [f"`{name}`" for name in optional if name not in given]
        verb = "may require"
    if not unknown:
        return ""
    return (
        f"it {verb} {', '.join(unknown)}, too: write a function that passes "
        f"{'them' if len(unknown) > 1 else 'it'}, and check that, or "
    )


def infer_roles(probe: CallProbe) -> None:
    """Which of two inputs is the query: the one that is as long as the output.

    Where a mask hides one query from another, as in the layer of a decoder, the query
    is the one input, and the context a constant.
    """
    adapter, options = probe.adapter, probe.options
    if len(adapter.inputs) != 2 or adapter.is_pooled:
        return
    swapped: dict[str, Any] = {"inputs": adapter.inputs[::-1], "by_keyword": True}
    calls = [
        probe.try_call(k_len=7, output_index="", **fields) for fields in ({}, swapped)
    ]
    if calls[0] is not None and probe.adapter.output_index:
        # Of two outputs, that of the query has its length.
        probe.update(output_index=calls[0][0].adapter.output_index)
    if calls[0] is None and calls[1] is not None and not options.inputs:
        probe.update(**swapped)
        probe.record("query", swapped["inputs"][0], "inferred")
    adapter = probe.adapter
    # One of the same length in all calls, unless it must have that of the queries.
    for text in (context_of_all_items(adapter), "torch.ones_like({query})"):
        text = adapter.packing.replace("{0}", text) or text
        constant = {**adapter.extra_args, adapter.inputs[1]: text}
        alone = CallProbe(
            replace(
                adapter, inputs=adapter.inputs[:1], extra_args=constant, packing=""
            ),
            options,
        )
        if (call := alone.try_call()) is not None:
            break
    if call is None or token_mixing(*call) <= 0:
        return
    module = call[0].namespace["attention"]
    is_recurrent = adapter.is_module and structure.is_recurrent(module)
    several = adapter.is_module and structure.count_attentions(module) > 1
    probe.update(mixes_queries=several or is_recurrent or attends_to_both(probe))
    if is_recurrent:
        return  # its queries are in order, and a mask is of the context
    leaks = (mask_leakage(alone, mask) for mask in mask_candidates(alone))
    if not options.inputs and any(leak is not None and leak < 1e-3 for leak in leaks):
        probe.update(inputs=alone.adapter.inputs, extra_args=constant)
        probe.record(f"`{adapter.inputs[1]}`", "a constant", "inferred")


def attends_to_both(probe: CallProbe) -> bool:
    """Whether the keys are those of both inputs, together or each in an attention."""
    call = probe.try_call(k_len=7)
    if call is None:
        return False
    with WeightsRecorder() as recorder:
        call[0].call(call[1])
    keys = recorder.key_counts
    return 5 + 7 in keys or {5, 7} <= keys


def record_layout(
    probe: CallProbe, fields: dict[str, Any], required_mask: MaskArgument | None
) -> None:
    """Record the layout under its name."""
    layout = fields["layout"]
    name = next((n for n, letters in LAYOUTS.items() if letters == layout), layout)
    source = "given" if probe.options.layout else "inferred"
    name = fields.get("image") or name
    probe.record(
        "layout", name.replace("_", " "), source, required_mask=required_mask, **fields
    )
    if "inputs" in fields:
        others = [fact for fact in probe.adapter.facts if fact.name != "inputs"]
        probe.update(facts=tuple(others))
        probe.record("inputs", ", ".join(fields["inputs"]), "inferred")
    adapter = probe.adapter
    for argument, text in {**adapter.position_args, **adapter.extra_args}.items():
        probe.record(f"`{argument}`", text.format(**ARGUMENT_EXAMPLE), "inferred")
    if probe.adapter.is_pooled:
        probe.record("output", "not one for each token", "inferred")
    if probe.adapter.fixed_length is not None:
        probe.record("length", f"only {probe.adapter.fixed_length}", "inferred")


def infer_behavior(probe: CallProbe) -> None:
    """How it behaves without a mask: causality, cross-attention, positions, cache."""
    adapter, options = probe.adapter, probe.options
    probe.first_error = ""
    call = probe.try_call()
    if call is None:
        raise CallError(
            f"`{adapter.name}` could not be called with the masks that were inferred: "
            f"it {probe.first_error}; describe them with `--mask`"
        )
    source = "inferred"
    causal = is_causal(probe, *call)
    if options.causal is not None:
        causal, source = options.causal, "given"
    text = "yes" if causal else "no"
    may_be_causal = options.causal is not False and queries_meet(*call)
    if may_be_causal and (options.causal or queries_are_causal(*call)):
        # Of the two attentions of a decoder, that is the one of the queries.
        probe.update(causal_queries=True, mixes_queries=True)
        text, causal = f"yes, for `{adapter.inputs[0]}`", False
    if options.causal is None and needs_causal_mask(probe):
        text, causal = "only with a causal mask", True
        probe.update(needs_causal_mask=True)
    elif causal and documented.needs_future_hidden(adapter.target):
        probe.update(needs_causal_mask=True)
    probe.record("causal without a mask", text, source, causal=causal)
    probe.update(masks=tuple(find_moved_queries(probe, m) for m in adapter.masks))

    cross = not adapter.single_input and not causal and adapter.fixed_length is None
    cross = cross and all(probe.try_call(k_len=n) is not None for n in (7, 3))
    one_length = has_one_length_in_blocks(adapter)
    probe.update(one_length=one_length)
    cross = cross and not one_length
    probe.update(cross_attention=cross, window=options.window, cache=options.cache)
    if options.window is not None:
        probe.record("window", options.window, "given")
    else:
        infer_window(probe)
    positions = options.positions
    source = "given" if positions else "assumed"
    if not positions:
        positions, source = infer_positions(probe, *call)
    text = "unknown: give --positions" if positions == "unknown" else positions
    probe.record("positions", text, source, positions=positions)
    infer_designs(probe, *call)
    infer_position_ids(probe)
    if adapter.is_module:
        infer_module_behavior(probe)
    if options.cache is None and not options.call_args:
        is_of_context = any(
            f in adapter.init_args for f in names.kind_flags(adapter.target)
        )
        if is_of_context:  # its cache does not grow
            infer_context_cache(probe)
        if not probe.adapter.context_cache:
            infer_cache(probe)
            infer_memory(probe)
            infer_made_memory(probe)
            infer_context_cache(probe)


def has_one_length_in_blocks(adapter: Adapter) -> bool:
    """Whether queries and keys of blocks are documented to be equally many.

    Others may be accepted, and end in other blocks.
    """
    shapes = documented.shapes(adapter.target)
    stated = {shapes.get(name) for name in adapter.inputs}
    in_blocks = re.search(
        "window|block|chunk", " ".join(structure.identifiers(adapter.target))
    )
    return len(stated) == 1 and None not in stated and in_blocks is not None


def needs_causal_mask(probe: CallProbe) -> bool:
    """Whether a score is right only if its key is not behind the query.

    The skewing of the Music Transformer moves scores of other queries to such places.
    The required mask hides token 1 from the first query, or from the last.
    """
    adapter, mask = probe.adapter, probe.adapter.required_mask
    is_plain = adapter.single_input and not (adapter.image or adapter.is_pooled)
    if mask is None or not ({"q", "k"} <= {*mask.axes} and is_plain):
        return False
    leaks = []
    for query in (0, 4):
        place = slice(query, query + 1)
        call = probe.try_call(mask=mask, hide=(place, slice(1, 2), slice(None)))
        if call is None:
            return False
        leaks.append(influence(*call, {"l": slice(1, 2)}, {"l": place}))
    return leaks[0] > 1e-3 and leaks[1] < 1e-6


def find_moved_queries(probe: CallProbe, mask: MaskArgument) -> MaskArgument:
    """The mask, if it moves causal queries with the number of keys that it counts."""
    adapter = probe.adapter
    if not (adapter.causal and mask.counts_keys) or adapter.single_input:
        return mask
    call = probe.try_call(mask=mask, hide=(slice(None), slice(4, 5), slice(None)))
    last = {"l": slice(3, 4)}
    is_moved = call is not None and influence(*call, last, last) == 0
    return replace(mask, moves_queries=is_moved)


def leaks_in_part(probe: CallProbe, script: Script, args: CallArguments) -> bool:
    """Whether it is causal but for some lengths or places, or for a small share."""
    return leaks_at_times(probe) or leaks_little(script, args)


def is_causal(probe: CallProbe, script: Script, args: CallArguments) -> bool:
    """Whether it is causal without a mask, or is meant to be and leaks.

    A class named causal is meant to be: the laws show the leak. One of videos may be so
    from frame to frame; the tokens are pixels.
    """
    adapter = probe.adapter
    if adapter.image:  # whose pixels may be pooled: not all of them count
        is_video = adapter.image.startswith("video")
        is_named = is_named_causal(adapter) and not is_video
        return is_named and hides_future(script, args)
    if "causal" in adapter.name.lower():
        return True
    return adapter.required_mask in (None, *adapter.masks) and (
        hides_future(script, args)
        or is_causal_behind_prefix(script, args)
        or (is_documented_causal(adapter) and leaks_in_part(probe, script, args))
        or is_causal_with_more_heads(probe)
        or is_causal_within_window(probe)
        or scores_hide_future(script, args)
    )


def is_causal_within_window(probe: CallProbe) -> bool:
    """Whether no more tokens than a window has are causal, though more are not."""
    adapter = probe.adapter
    has_window = any(map(names.WINDOW_PATTERN.fullmatch, adapter.init_args))
    if not has_window or adapter.fixed_length or not adapter.single_input:
        return False
    call = probe.try_call(k_len=4)
    return call is not None and hides_future(*call)


def scores_hide_future(script: Script, args: CallArguments) -> bool:
    """Whether the scores of later tokens are one number, whatever the tokens are.

    The code hides them, and what it does later, such as a soft cap, may undo that.
    """
    adapter, module = script.adapter, script.evaluate("attention")
    length = script.batch_and_length(args.inputs[0])[1]
    is_sequence = adapter.single_input and not (adapter.image or adapter.is_pooled)
    if not (is_sequence and adapter.is_module):
        return False
    if structure.is_recurrent(module) or convolves(script, args):
        return False
    with WeightsRecorder() as recorder:
        script.call(args)
    found = [w.detach() for w, dim in recorder.found if dim in (-1, w.dim() - 1)]
    if not found or any(w.shape[-2:] != (length, length) for w in found):
        return False
    later = [w[..., row, row + 1 :] for w in found for row in range(length - 2)]
    last = [w[..., -1, :] for w in found]
    return length > 3 and all(
        is_equal == bool(((w.amax(-1) - w.amin(-1)).abs() < 1e-6).all())
        for rows, is_equal in ((later, True), (last, False))
        for w in rows
    )


def leaks_at_times(probe: CallProbe) -> bool:
    """Whether it is causal for all but some of the first tokens, or in several blocks.

    A mask that opens the columns of the first tokens must not do so above the diagonal,
    nor may a path for a sequence within one block be without a mask. What is called
    autoregressive sees no token of its own block that follows, either.
    """
    call = probe.try_call(k_len=300)
    is_strict = documented.says(probe.adapter.target, "autoregressive")
    if call is not None and hides_future(*call, start=200 if is_strict else 3):
        return True
    call = probe.try_call(k_len=12)
    if call is None:
        return False
    leaks = (
        influence(*call, {"l": slice(n, None)}, {"l": slice(0, n)}) for n in range(5, 9)
    )
    late = influence(*call, {"l": slice(0, 5)}, {"l": slice(8, None)})
    return late > 1e-6 > max(leaks)


def infer_window(probe: CallProbe) -> None:
    """The width of a sliding window: how far back three late queries attend alike.

    An attribute `sliding_window` states it.
    """
    adapter = probe.adapter
    is_named = "window" in structure.designs_of(adapter.target) or any(
        map(CHUNK_PATTERN.search, structure.identifiers(adapter.target))
    )
    is_sequence = adapter.single_input and not adapter.is_pooled
    if (
        not (is_named or adapter.causal)
        or any(map(names.COORDINATES_PATTERN.search, adapter.position_args))
        or not is_sequence
        or adapter.fixed_length is not None
    ):
        return
    length = WINDOW_LENGTH
    sizes = Sizes(1, length, length, adapter.heads, adapter.d_k)
    script = Script(adapter, sizes, **probe.options.script_options())
    widths, is_open = set(), False
    with suppress(ScriptError):
        script.restart()
        args = script.make_arguments()
        script.exec_line(f"{args.inputs[0]}.requires_grad_()")
        output = script.call(args)
        for query in (length - 1, length - 2, length - 4):
            first = first_key(script, args.inputs[0], output, query)
            widths.add(query + 1 - first)
        infer_chunks(probe, script, args.inputs[0], output)
        # Of the past only, where the caller hides the future.
        is_open = not (adapter.causal or ends_early(script, args.inputs[0], output))
    # A token that attends to itself alone is none of a window.
    if len(widths) == 1 and 1 < max(widths) < length - 4 and not is_open:
        several = adapter.is_module and (
            structure.count_attentions(script.namespace["attention"]) > 1
        )
        stated = structure.stated_window(script.namespace["attention"])
        window = max(widths) if several else stated or max(widths)
        init_args = dict(adapter.init_args)
        built_for = adapter.named_sizes(sizes)["window"]
        if (several or not adapter.causal) and window != built_for:
            # In two directions, many count the keys on each side of a token. Several
            # layers reach farther than each of them.
            for name, text in init_args.items():
                init_args[name] = text.replace("{window}", str(built_for))
        # The argument of the constructor may count in another way.
        if probe.try_call(window=window, init_args=init_args) is not None:
            fields: dict[str, Any] = {"window": window, "init_args": init_args}
            probe.record("window", window, "inferred", **fields)


def first_key(script: Script, keys: str, output: str, query: int) -> int:
    """The first token from which a query receives a gradient; 0 if there is none."""
    index = script.adapter.index(l=slice(query, query + 1))
    grad = script.evaluate(script.gradient(f"{output}{index}", keys))
    axis = script.adapter.layout.index("l")
    size = grad.abs().movedim(axis, 0).flatten(1).sum(1)
    return min(size.nonzero().flatten().tolist(), default=0)


def ends_early(script: Script, keys: str, output: str) -> bool:
    """Whether the first query receives no gradient from the last token."""
    first = script.adapter.index(l=slice(0, 1))
    last = script.adapter.index(l=slice(-1, None))
    grad = script.gradient(f"{output}{first}", keys)
    return not script.evaluate(f"{grad}{last}.any()")


def infer_chunks(probe: CallProbe, script: Script, keys: str, output: str) -> None:
    """The length of the chunks within which tokens attend, if names tell of chunks.

    The first token of the last chunk attends to itself alone, and the token before it
    to all of its own chunk.
    """
    named = map(CHUNK_PATTERN.search, structure.identifiers(probe.adapter.target))
    name = next((match.string for match in named if match), "")
    if not name:
        return
    designs = {**probe.adapter.designs, "window": name}
    start = first_key(script, keys, output, script.sizes.k_len - 1)
    if start == 0 or first_key(script, keys, output, start) != start:
        if not probe.adapter.causal and (start or ends_early(script, keys, output)):
            probe.record("chunks", "not all meet", "inferred", designs=designs)
        return
    size = start - first_key(script, keys, output, start - 1)
    if size > 1 and start % size == 0:
        text = f"{size} tokens, within which they attend"
        probe.record("chunks", text, "inferred", designs=designs)


def infer_position_ids(probe: CallProbe) -> None:
    """The arguments that may give each batch item positions or parts of its own."""
    adapter = probe.adapter
    arguments = names.required_by_name(names.parameters_of(adapter.target))
    call = probe.try_call()
    assert call is not None  # as it succeeded for the layout
    if "b" not in adapter.layout or not adapter.single_input:
        return
    usual = output_of(call)
    batch_size, length = call[0].batch_and_length(call[1].inputs[0])
    ids = f"torch.arange({length}).expand({batch_size}, -1){call[0].to_device()}"
    turns = [""] + [".T"] * adapter.layout.startswith("lb")
    segments = filter(names.SEGMENT_PATTERN.fullmatch, arguments)
    for name, turn in itertools.product(segments, turns):
        zeros = ids.replace("arange", "zeros") + turn
        if probe.try_call(more={name: zeros}) is not None:
            probe.update(segment_ids=name, ids_are_turned=bool(turn))
    positions = filter(names.POSITION_IDS_PATTERN.fullmatch, arguments)
    for name, turn in itertools.product(positions, turns):
        more = {name: ids + turn}
        given = probe.try_call(more=more)
        if given is not None:
            output = given[0].evaluate(given[0].call(given[1], **more))
            if torch.allclose(output, usual, rtol=1e-3, atol=1e-3):
                probe.update(position_ids=name, ids_are_turned=bool(turn))
                return


def infer_times(probe: CallProbe) -> None:
    """The argument that a rotary encoding takes for positions, such as time stamps.

    It has a number for each token. These are zero where nothing is known about them, so
    that all tokens are at one place.
    """
    adapter, options = probe.adapter, probe.options
    kinds = structure.positions_named(structure.identifiers(adapter.target))
    zeros = "torch.zeros({batch_size}, {length}){dtype}"
    found = [name for name, text in adapter.extra_args.items() if text == zeros]
    if kinds != "rotary" or len(found) != 1 or options.positions not in ("", kinds):
        return
    # Integers, as a module in half precision rounds numbers of its dtype.
    text = "torch.arange({start}, {stop}).expand({batch_size}, -1){device}"
    rest = {n: t for n, t in adapter.extra_args.items() if n != found[0]}
    given = {**adapter.position_args, found[0]: text}
    other = replace(adapter, extra_args=rest, position_args=given)
    calls = [CallProbe(each, options).try_call() for each in (adapter, other)]
    if [call is not None and order_matters(*call) for call in calls] == [False, True]:
        facts = [fact for fact in adapter.facts if fact.name != f"`{found[0]}`"]
        probe.update(extra_args=rest, position_args=given, facts=tuple(facts))
        probe.record(f"`{found[0]}`", text.format(**ARGUMENT_EXAMPLE), "inferred")


def infer_positions(
    probe: CallProbe, script: Script, args: CallArguments
) -> tuple[str, str]:
    """The positional encoding, and whether it is inferred or assumed."""
    target = probe.adapter.target
    module = script.namespace["attention"]
    length = probe.adapter.fixed_length
    rows, columns = probe.adapter.grid(length) if length else (0, 0)
    # A table of one side, which heads may be as many as in a square.
    sides = {length, rows, columns} if 1 < rows != columns else {length}
    may_encode = structure.encodes_positions(target) or (
        probe.adapter.is_module and any(sides & {*p.shape} for p in module.parameters())
    )
    may_encode |= "attention." in str(probe.adapter.extra_args)  # made of tokens
    if probe.adapter.position_args or (may_encode and order_matters(script, args)):
        found = structure.identifiers(target) | {*probe.adapter.position_args}
        positions = structure.positions_named(found)
        is_sequence = probe.adapter.single_input and not (probe.adapter.image or length)
        is_relative = is_sequence and structure.is_relative(found)
        is_relative |= "distance_encoding" in str(probe.adapter.extra_args)
        if positions == "unknown" and isinstance(target, type):
            positions = structure.positions_named([target.__name__])
        if positions == "unknown" and is_relative:
            positions = "relative"
        return positions, "assumed" if positions == "unknown" else "inferred"
    # Sines and cosines that have no effect.
    with CalledFunctions() as functions:
        script.call(args)
    if may_encode and {"sin", "cos"} <= {*functions.found}:
        positions = structure.positions_named(structure.identifiers(target))
        if positions == "rotary":
            return positions, "inferred"
    # A table that has no effect.
    if probe.adapter.is_module:
        owned = {*dict(module.named_modules()), *dict(module.named_buffers())}
        if structure.positions_named(owned) != "unknown":
            return structure.positions_named(owned), "inferred"
    return "none", "assumed"


def infer_designs(probe: CallProbe, script: Script, args: CallArguments) -> None:
    """What the code, the documentation and a call tell of the design."""
    target = probe.adapter.target
    designs = {**structure.designs_of(target), **probe.adapter.designs}
    designs = {**documented.designs(target), **designs}
    if "sink" in designs and keeps_equal_values(script, args):
        del designs["sink"]  # that of an argument that is not given
    if own_keys := count_own_keys(probe):
        designs.setdefault("sink", f"{own_keys} keys of its own")
    if not calls_softmax(lambda: script.call(args)):
        designs["unnormalized"] = "no softmax"
    source = probe.adapter.weights_source
    if source and source.removeprefix("result") == probe.adapter.output_index:
        designs["pointer"] = "its outputs are weights"
    probe.update(designs=designs)


def keeps_equal_values(script: Script, args: CallArguments) -> bool:
    """Whether a function of values that are all equal gives these values."""
    if script.adapter.is_module or len(args.inputs) != 3:
        return False
    ones = script.assign("value", f"torch.ones_like({args.inputs[2]})")
    output = script.call(replace(args, inputs=(*args.inputs[:2], ones)))
    return bool(script.evaluate(f"torch.allclose({output}, {output}.new_ones(()))"))


def infer_module_behavior(probe: CallProbe) -> None:
    """Whether training is reproducible without dropout, and the projections."""
    options = probe.options
    call = probe.try_call(mode="train")
    # Nothing is perturbed: the influence is the difference of two equal calls.
    reproducible = call is not None and not influence(*call, {"l": slice(0, 0)}, {})
    text = "" if reproducible else "random even with dropout 0"
    if call is not None and structure.has_batch_norm(call[0].evaluate("attention")):
        text = "its batch norm mixes batch items"
    elif documented.shares_in_training(probe.adapter.target):
        text = "its documentation says that batch items share something"
    probe.update(reproducible_training=not text)
    if text:
        probe.record("training", f"{text}; only evaluation is checked", "inferred")
    call = probe.try_call()
    assert call is not None
    module = call[0].evaluate("attention")
    projections = projections_of_call(*call, options.projections)
    over_features = attends_over_features(*call) and not attends_over_heads(*call)
    if over_features or attends_by_factors(*call):
        projections = {}
    softcap = structure.softcap_of(module) if projections else None
    designs = designs_of_module(probe, module)
    is_relu = designs.get("features", "").lower() == "relu"
    if is_relu and not ("unnormalized" in designs or structure.is_recurrent(module)):
        del designs["features"]  # it is that of a network behind the attention
    if structure.is_recurrent(module):
        # Tokens are mixed beside the attention, in their order.
        designs |= dict.fromkeys(("convolution", "decay"), "recurrent layers")
    if over_features:
        designs["channels"] = "softmax over features"
        if has_one_axis_of_tokens(*call):
            designs["compression"] = "keys that are not the tokens"
    if structure.is_unscaled(module):
        designs["scale"] = "scaling = 1.0"
    adapter = probe.adapter
    # The weights of the module that was called are random; these are the initial ones.
    initial = built_by(probe, call[0].build_expression())
    if name := structure.folds_scale_into(
        initial, adapter.heads * adapter.d_k, adapter.d_k
    ):
        designs["scale"] = f"{name}.weight"
    if projections and not structure.normalizes(module):
        designs.pop("norm", None)  # all its norms are those of queries and keys
    if softcap is not None:
        designs.pop("softcap", None)
    is_pooled = probe.adapter.is_pooled and pools_by_weights(*call)
    # Layers of graphs are named as convolutions that attend.
    is_graph = adapter.extra_args.keys() & EDGE_ARGUMENTS and not convolves(*call)
    if is_pooled or is_graph or structure.convolves_single_tokens(module):
        designs.pop("convolution", None)
    # A name such as `rope_factor` may be of a scale alone.
    if adapter.positions == "none" and are_tokens_a_set(*call):
        designs.pop("positions", None)
    forwards = (vars(kind).get("forward") for kind in type(module).__mro__)
    is_wrapped = any(hasattr(each, "__wrapped__") for each in forwards)
    if is_wrapped and not output_of(call).requires_grad:
        designs["inference"] = "no_grad"
    unused = (*options.unused_parameters, *weights_left_out(adapter, module))
    found = {"projections": projections, "softcap": softcap, "designs": designs}
    probe.update(**found, unused_parameters=unused)
    if not options.projections:
        infer_formula(probe)


def weights_left_out(adapter: Adapter, module: nn.Module) -> list[str]:
    """The weights in whose place a call gets vectors.

    Those are tables of token ids, and learned queries that an input replaces.
    """
    learned = dict(module.named_parameters(recurse=False))
    replaced = [name for name in adapter.inputs if name in learned]
    return [*weights_of_tables(adapter.target), *replaced]


def projections_of_call(
    script: Script, args: CallArguments, given: Mapping[str, str]
) -> dict[str, str]:
    """The projections, with their heads behind the tokens.

    A layer of their own may return `[batch, heads, length, d_k]`.
    """
    module = script.evaluate("attention")
    found = structure.find_projections(module, given)
    parts = dict(module.named_modules())
    for role in ("query", "key", "value") if found and not given else ():
        text = found[role]
        path = text.removeprefix("attention64.").removesuffix("({})")
        if path not in parts or not structure.is_of_user(type(parts[path])):
            continue
        with suppress(Exception):  # it may take something else
            projected = script.evaluate(f"attention.{path}({args.inputs[0]})")
            length = script.batch_and_length(args.inputs[0])[1]
            if projected.dim() == 4 and projected.shape[-2] == length:
                found[role] = f"{text}.transpose(1, 2)"
    return found


def designs_of_module(probe: CallProbe, module: nn.Module) -> dict[str, str]:
    """The designs of the class, and those of parts that it builds.

    An option that is off tells of none, nor does the width of a head, whose scale is
    the usual one.
    """
    off = structure.options_that_are_off(module)
    off |= {n for n, text in probe.adapter.init_args.items() if text == "{d_k}"}
    of_class = {d: name for d, name in probe.adapter.designs.items() if name not in off}
    heads, d_k = probe.adapter.heads, probe.adapter.d_k
    if heads != d_k > 1:  # a square of as many rows as heads mixes them
        for name, parameter in module.named_parameters():
            if parameter.shape == (heads, heads):
                of_class.setdefault("talking", name)
    return {**structure.designs_of(module, off), **of_class}


def pools_by_weights(script: Script, args: CallArguments) -> bool:
    """Whether what is called pooling in the code is attention itself.

    Then no function convolves or pools, and no other name tells of a convolution.
    """
    pattern = re.compile(structure.DESIGNS["convolution"], re.IGNORECASE)
    found = filter(pattern.search, structure.identifiers(script.evaluate("attention")))
    are_pools = all("pool" in name.lower() for name in found)
    return are_pools and not convolves(script, args)


def convolves(script: Script, args: CallArguments) -> bool:
    """Whether a function is called that convolves or pools tokens."""
    with CalledFunctions() as functions:
        script.call(args)
    return any(re.search("conv|pool|fold|interpolate", f) for f in functions.found)


def attends_over_features(script: Script, args: CallArguments) -> bool:
    """Whether each softmax is over features, as in cross-covariance attention."""
    with WeightsRecorder() as recorder:
        script.call(args)
    length = script.batch_and_length(args.inputs[-1])[1]
    softmax_over = recorder.key_counts
    probe = CallProbe(script.adapter, Options())
    if attends_to_both(probe):
        return False
    keys = {length, length + count_own_keys(probe)}
    return bool(softmax_over) and not keys & softmax_over
