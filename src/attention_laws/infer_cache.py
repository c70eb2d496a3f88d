r"""# Inferring the cache

A KV cache may be an argument, which a call modifies or returns anew, or a part of the
module. It may be made by a method, and a method beside `forward` may decode with it. A
way of passing it on is right if the output of a second piece depends on the first one.

Source: the KV caches of public code, such as those of fairseq, Hugging Face's
transformers, torchtune and WeNet.
"""

import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention_laws import caches, documented, names
from attention_laws.adapter import Adapter, Options, Sizes
from attention_laws.cached_calls import (
    cache_arguments,
    call_with_cache,
    empty_cache,
    owned_tensors,
    restart_with_cache,
)
from attention_laws.calling import CallProbe, count_own_keys, output_of
from attention_laws.decoding import (
    assert_equal_after_memory,
    pieces_agree,
)
from attention_laws.law import LawViolation, ScriptError
from attention_laws.recorders import WeightsRecorder
from attention_laws.script import (
    CONTEXTS,
    CallArguments,
    Script,
    find_output,
    parts_of,
)
from attention_laws.tools import tensors_in

# Methods beside `forward` that continue a sequence.
DECODE_METHOD_PATTERN = re.compile(
    r"(?!forward$)(forward|step|decode|infer(ence)?|incremental|recurrent|extend"
    r"|stream(ing)?)(_?(step|one|token|next|single|with|kv|cached?|incremental|forward"
    r"|decod(e|ing)|recurrent|infer(ence)?|stream(ing)?|chunk))*"
)
STEP_PATTERN = re.compile(r"step|token|one|single|recurrent")
PAIR_PATTERN = re.compile("kvs?|prev")
# Methods with which a module begins to store a cache.
CACHE_SETUP_PATTERN = re.compile(
    r"(set_?up|enable|init(ialize)?|start|begin|allocate)_?(kv_?)?"
    r"(cache|caching|decoding|generation|streaming|state)s?|allocate"
)


def infer_cache(probe: CallProbe) -> None:
    """How a KV cache is passed, or that the module stores one between calls."""
    adapter = probe.adapter
    # Of what is not causal, only an argument tells that it decodes with a cache.
    is_causal = adapter.single_input and adapter.causal
    is_named = len(adapter.inputs) != 2 and cache_argument(adapter)
    if not (is_causal or is_named):
        return
    # A cache with memory of its own may be taken without gradients only.
    for context in ("", CONTEXTS["no_grad"]):
        for text, fields in cache_candidates(probe):
            fields["cache_context"] = context
            passed = replace(adapter, **fields)
            if takes_steps_only(passed, probe.options):
                continue
            if longest := longest_piece(passed, probe.options):
                if longest == 1:
                    fields["single_from"] = 1  # after the prompt
                probe.record("cache", text, "inferred", **fields)
                infer_first_position(probe)
                return
    argument = cache_argument(adapter)
    if is_causal and names.CACHE_PATTERN.match(argument):
        probe.record("cache", f"unknown: give --cache {argument}=[1]", "assumed")


def infer_reset(probe: CallProbe) -> None:
    """Whether the module stores a state that another call of it would continue.

    Calls were preceded by a call of its method that is named `reset`, if there is one.
    """
    adapter, call = probe.adapter, probe.try_call()
    if not adapter.reset or call is None:
        return
    probe.update(reset="")
    script, _args = call
    script.adapter = probe.adapter
    script.restart()
    script.exec_line("fresh = copy.deepcopy(attention)")
    with suppress(ScriptError):
        script.call(script.make_arguments())
        args = script.make_arguments()
        one, other = script.call(args, function="fresh"), script.call(args)
        if script.evaluate(f"torch.allclose({one}, {other}, atol=1e-4)"):
            return
    text = f"stored between calls; `{adapter.reset}()` is called before each"
    probe.record("state", text, "inferred", reset=adapter.reset)


def infer_first_position(probe: CallProbe) -> None:
    """Whether an argument is not the positions of all tokens, but that of the first.

    A number and a vector may both be added to positions. Single tokens that are decoded
    with the one that is meant have the outputs of the whole.
    """
    adapter, options = probe.adapter, probe.options
    first = {
        name: "{start}"
        for name, text in adapter.position_args.items()
        if text.startswith("torch.arange({start}, {stop})")
    }
    other = replace(adapter, position_args={**adapter.position_args, **first})
    if not first or tokens_agree(adapter, options) or not tokens_agree(other, options):
        return
    changed = [f"`{name}`" for name in first]
    kept = tuple(fact for fact in adapter.facts if fact.name not in changed)
    probe.update(position_args=other.position_args, facts=kept)
    for name in changed:
        probe.record(name, "the position of the first token", "inferred")


def tokens_agree(adapter: Adapter, options: Options) -> bool:
    """Whether four tokens, decoded one by one, have the outputs of the sequence."""
    with suppress(ScriptError):
        script = script_of_length(adapter, options, 4)
        return pieces_agree(script, [1, 1, 1, 1])
    return False


def cache_argument(adapter: Adapter, method: str = "") -> str:
    """The argument that is named as a cache is; empty if there is none.

    An optional pair of keys and values may be one, too.
    """
    arguments = names.required_by_name(parameters_of_call(adapter, method))
    named = [name for name in arguments if names.CACHE_PATTERN.match(name)]
    pairs = [name for name, needed in arguments.items() if not needed]
    return next(iter([*named, *filter(PAIR_PATTERN.fullmatch, pairs)]), "")


def parameters_of_call(adapter: Adapter, method: str) -> list[inspect.Parameter]:
    """The parameters of the target, or of a method of it."""
    if method:
        return names.parameters_of_method(adapter.target, method)
    return names.parameters_of(adapter.target)


def cache_candidates(probe: CallProbe) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways in which a cache may be passed on: a text, and fields of the adapter."""
    adapter = probe.adapter
    methods = decode_methods(adapter.target) if adapter.is_module else []
    for method in ["", *methods]:
        parameters = parameters_of_call(adapter, method)
        within = f" of `{method}`" if method else ""
        for text, fields in cache_candidates_of(probe, method, parameters):
            for single_from in (None, 0) if method else (None,):
                more = {"decode_method": method, "single_from": single_from}
                yield f"{text}{within}", {**fields, **more}
    for method in methods:  # that takes a token behind those that `forward` has stored
        parameters = parameters_of_call(adapter, method)
        if not cache_argument(adapter, method):
            step = next(caches.cache_steps(parameters, {}), {})
            fields = {"cache": ("", ""), "cache_args": step, "single_from": 1}
            text = f"stored by the module, for `{method}` behind a call"
            yield text, {**fields, "decode_method": method, "prompted": True}
    parameters = parameters_of_call(adapter, "")
    for name in optional_positions(adapter):
        places = {name: "torch.arange({start}, {stop}){device}"}
        for text, fields in cache_candidates_of(probe, "", parameters):
            placed = {**fields, "cache_args": {**fields["cache_args"], **places}}
            yield f"{text}, with `{name}`", placed
            yield f"{text}, with `{name}`", {**placed, "single_from": 0}


def optional_positions(adapter: Adapter) -> list[str]:
    """Optional arguments that take the position of each new token."""
    return [
        parameter.name
        for parameter in names.parameters_of(adapter.target)
        if parameter.default is None and parameter.name not in adapter.position_args
        if re.fullmatch("cache_pos(ition)?s?|(token_)?positions?|pos", parameter.name)
    ]


def cache_candidates_of(
    probe: CallProbe, method: str, parameters: list[inspect.Parameter]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways in which `forward`, or a method beside it, passes a cache on."""
    adapter = probe.adapter
    use = flags_of_use(parameters)
    steps = [*caches.cache_steps(parameters, {} if method else adapter.position_args)]
    use |= {n: text for n, text in next(iter(steps), {}).items() if text == "{start}"}
    if argument := cache_argument(adapter, method):
        for index in returned_caches(probe, method, argument, use):
            passed = {"cache": (argument, index), "cache_args": use}
            yield f"`{argument}`, {index} of the result", passed
        by_name = {p.name: p for p in parameters}
        for text, classes in caches.empty_caches(adapter.target, by_name[argument]):
            fields: dict[str, Any] = {"cache": (argument, ""), "cache_args": use}
            fields |= {"decode_method": method, **made_by(adapter, text, classes)}
            shown = text.partition("(")[0]
            maker = shown.removeprefix("attention.")
            start = f"a new {shown}" if maker == shown else f"made by `{maker}`"
            yield f"`{argument}`, modified in place, at first {start}", fields
            for index in caches_after(replace(adapter, **fields), probe.options):
                returned = {**fields, "cache": (argument, index)}
                yield f"`{argument}`, {index} of the result, at first {start}", returned
    if adapter.is_module:
        for step in steps or ([{}] if method or adapter.reset else []):
            given = f", with `{', '.join(step)}`" if step else ""
            text = f"stored by the module{given}"
            yield text, {"cache": ("", ""), "cache_args": step}
        for setup in cache_setups(adapter.target):
            text = f"stored by the module after `{setup.partition('(')[0]}`"
            fields = {"cache": ("", ""), "empty_cache": f"attention.{setup}"}
            yield text, {**fields, "cache_args": next(iter(steps), {})}


def flags_of_use(parameters: list[inspect.Parameter]) -> dict[str, str]:
    """The flags that ask for a cache and are off by default, each turned on."""
    return {
        p.name: "True"
        for p in parameters
        if names.CACHE_USE_PATTERN.fullmatch(p.name) and not p.default
    }


def made_by(adapter: Adapter, text: str, classes: dict[str, type]) -> dict[str, Any]:
    """The fields for an empty cache that a text makes, which names these classes."""
    imports = "".join(map(names.import_source, classes.values()))
    return {
        "empty_cache": text,
        "imports": adapter.imports + imports,
        "namespace": {**adapter.namespace, **classes},
    }


def returned_caches(
    probe: CallProbe, method: str, argument: str, use: Mapping[str, str]
) -> Iterator[str]:
    """Where in the result of a call without a past a cache may be returned.

    A method beside `forward` may take one token only.
    """
    first = {name: text.format(start=0) for name, text in use.items()}
    given = {argument: "None", **first}
    for length in (5, 1) if method else (5,):
        call = probe.try_call(k_len=length, more={} if method else given)
        if call is None:
            continue
        script, args = call
        function = f"attention.{method}" if method else "attention"
        with suppress(ScriptError):
            source = script.call_source(args, function, **given)
            yield from indexes_beside_output(script, args, source)
            return


def caches_after(adapter: Adapter, options: Options) -> Iterator[str]:
    """Where in the result of a call with an empty cache the next may be returned."""
    script = script_of_length(adapter, options, 5)
    assert adapter.cache is not None
    with suppress(ScriptError):
        restart_with_cache(script)
        args = script.make_arguments()
        more = cache_arguments(script, 0, script.sizes.k_len)
        more[adapter.cache[0]] = empty_cache(script)
        method = f".{adapter.decode_method}" if adapter.decode_method else ""
        source = script.call_source(args, f"attention{method}", **more)
        yield from indexes_beside_output(script, args, source)


def indexes_beside_output(
    script: Script, args: CallArguments, source: str
) -> Iterator[str]:
    """The indexes of the parts of a result that are not the output, and not None."""
    name = script.assign("result", source)
    result, query = map(script.evaluate, (name, args.inputs[0]))
    # A flag may make a tuple of what is a tensor else.
    output = find_output(result, query, script.adapter)
    for index, value in parts_of(result).items():
        if value is not None and index != output:
            yield index


def infer_context_cache(probe: CallProbe) -> None:
    """The argument for what cross-attention has projected, in a dict or returned."""
    adapter, argument = probe.adapter, cache_argument(probe.adapter)
    call = probe.try_call()
    if call is None or adapter.single_input or not argument:
        return
    script, args = call
    query, *_context = args.inputs
    other = script.make_arguments(args.allowed)
    others = replace(args, inputs=(query, *other.inputs[1:]))
    parameter = names.parameters_by_name(adapter.target)[argument]
    ways = caches.empty_caches(adapter.target, parameter)
    for (text, classes), given in itertools.product(ways, static_flags(adapter)):
        with suppress(ScriptError):
            script.namespace.update(classes)
            script.adapter = replace(adapter, empty_cache=text, call_args=given)
            cache = empty_cache(script)
            first = script.call(args, **{argument: cache})
            sizes = [t.shape for t in owned_tensors(script.evaluate(cache))]
            again = script.call(args, **{argument: cache})
            # That of past tokens grows in each call.
            has_grown = sizes != [
                t.shape for t in owned_tensors(script.evaluate(cache))
            ]
            # The first output comes again, or another context is not looked at.
            unlike = script.call(others, **{argument: cache})
            pairs = (f"torch.equal({again}, {each})" for each in (first, unlike))
            if sizes and not has_grown and any(map(script.evaluate, pairs)):
                probe.record("cache", f"`{argument}`, of the context", "inferred")
                made = made_by(adapter, text, classes)
                probe.update(context_cache=argument, call_args=given, **made)
                return
    script.adapter = adapter
    with suppress(ScriptError):
        first = script.call(args)
        if script.evaluate(f"torch.allclose({first}, {script.call(others)})"):
            return
        use = flags_of_use(names.parameters_of(adapter.target))
        source = script.call_source(args, **use)
        for index in indexes_beside_output(script, args, source):
            with script.attempt():
                if replaces_context(script, args, others, argument, index, use):
                    text = f"`{argument}`, {index} of the result, of the context"
                    probe.record("cache", text, "inferred")
                    fields = {"context_cache_index": index, "cache_args": use}
                    probe.update(context_cache=argument, **fields)
                    return


# The flag of fairseq for a cache of the context, which is static.
STATIC_FLAG = "static_kv"


def static_flags(adapter: Adapter) -> list[Mapping[str, Any]]:
    """The arguments of a call, with and without the flag for a static context."""
    usual = adapter.call_args
    parameter = names.parameters_by_name(adapter.target).get(STATIC_FLAG)
    is_off = parameter is not None and parameter.default is False
    return [{**usual, STATIC_FLAG: True}, usual] if is_off else [usual]


def caches_apart(adapter: Adapter) -> list[Adapter]:
    """An adapter for each cache, of the tokens and of a context, if both are taken."""
    if adapter.cache is None or not adapter.context_cache:
        return [adapter]
    usual = {n: value for n, value in adapter.call_args.items() if n != STATIC_FLAG}
    of_tokens = replace(adapter, context_cache="", call_args=usual)
    return [of_tokens, replace(adapter, cache=None)]


def replaces_context(
    script: Script,
    args: CallArguments,
    others: CallArguments,
    name: str,
    index: str,
    use: Mapping[str, str],
) -> bool:
    """Whether the context is not looked at again with a part of an earlier result.

    That of past tokens grows in each call.
    """
    cache = script.assign("cache", f"{script.call_source(args, **use)}{index}")
    call = script.call_source(args, **{name: cache}, **use)
    grown = script.assign("cache", f"{call}{index}")
    sizes = [[t.shape for t in tensors_in(script.evaluate(c))] for c in (cache, grown)]
    outputs = [script.call(each, **{name: cache}) for each in (args, others)]
    is_same = script.evaluate(f"torch.equal({', '.join(outputs)})")
    return bool(is_same) and sizes[0] == sizes[1]


def infer_memory(probe: CallProbe) -> None:
    """The argument that takes the tokens before the first one, as they were given."""
    adapter = probe.adapter
    if not adapter.single_input or adapter.cache is not None:
        return
    if count_own_keys(probe):
        return  # which the argument replaces
    call = probe.try_call()
    assert call is not None  # as it succeeded for the layout
    with WeightsRecorder() as recorder:
        call[0].call(call[1])
    named = names.memory_arguments(adapter.target)
    optional = names.optional_tensors(adapter)
    stated = [n for n in optional if documented.precedes(adapter.target, n)]
    for name in dict.fromkeys([*named, *stated]):
        # It may be that of an encoder.
        is_certain = name in stated and len(recorder.found) == 1
        if (name == "memory" or name not in named) and not is_certain:
            continue
        if name == "history" and not continues(probe, name):
            continue
        shape = call[0].evaluate(call[1].inputs[0]).shape
        past = call[0].random_expression(*shape)
        given = probe.try_call(more={name: past})
        if given is not None and attends_to_memory(probe, name):
            output = given[0].evaluate(given[0].call(given[1], **{name: past}))
            if not torch.equal(output, output_of(call)):
                probe.record("memory", f"`{name}`", "inferred", memory=name)


def attends_to_memory(probe: CallProbe, name: str) -> bool:
    """Whether the tokens of a memory are keys beside those of the input.

    Those of a context are in their place.
    """
    call = probe.try_call()
    assert call is not None  # as it succeeded for the layout
    shape = [*call[0].evaluate(call[1].inputs[0]).shape]
    shape[probe.adapter.layout.index("l")] = 7
    past = call[0].random_expression(*shape)
    if (given := probe.try_call(more={name: past})) is None:
        return True  # it takes no other length
    with WeightsRecorder() as recorder:
        given[0].call(given[1], **{name: past})
    keys: set[int] = recorder.key_counts
    return keys != {7}


# Methods that make what an argument takes of the tokens before the input.
MAKER_PATTERN = re.compile(
    r"(encode|build|make|compute|prefill|prepare|project|cache|run|process)_(\w+_)?"
    r"(prefix|prompt|history|past|shared)(_\w+)?"
)
MADE_PATTERN = re.compile(r"(\w+_)?(prefix|prompt|history|past|shared)(_\w+)?")


def infer_made_memory(probe: CallProbe) -> None:
    """The argument that takes what a method makes of the tokens before the first one.

    These may be the same for all batch items. If tokens have positions, the outputs
    have to be those of the whole.
    """
    adapter = probe.adapter
    if not adapter.single_input or adapter.cache or adapter.memory or adapter.is_pooled:
        return
    call = probe.try_call(batch_size=1)
    methods = filter(MAKER_PATTERN.fullmatch, dir(adapter.target))
    optional = filter(MADE_PATTERN.fullmatch, names.optional_tensors(adapter))
    for method, name in itertools.product(methods, [*optional]):
        parameters = names.parameters_of_method(adapter.target, method)
        if call is None or len(parameters) != 1:
            continue
        past = call[0].random_expression(*call[0].evaluate(call[1].inputs[0]).shape)
        for maker in (f"attention.{method}({{}})", f"attention.{method}({{}}[0])"):
            more = {name: maker.format(past)}
            given = probe.try_call(batch_size=1, more=more)
            if given is None:
                continue
            output = given[0].evaluate(given[0].call(given[1], **more))
            if torch.equal(output, output_of(call)):
                continue
            fields = {"memory": name, "memory_maker": maker}
            if adapter.positions == "none" or continues(probe, name, maker):
                text = f"`{name}`, made by `{method}`"
                probe.record("memory", text, "inferred", **fields)
            return


def continues(probe: CallProbe, name: str, maker: str = "{}") -> bool:
    """Whether the tokens before the others can be given as this argument.

    In training or in evaluation, the outputs of the others are then the same.
    """
    for mode in ("eval", "train"):
        adapter = replace(probe.adapter, memory=name, memory_maker=maker)
        with suppress(LawViolation, ScriptError):
            script = script_of_length(adapter, probe.options, 5)
            assert_equal_after_memory(script, 3, mode)
            return True
    return False


def longest_piece(adapter: Adapter, options: Options) -> int:
    """The tokens of a second piece whose output depends on the first one.

    They are two or, if these are refused, one; 0 if no output depends on it.
    """
    accepted = (n for n in (2, 1) if piece_depends_on_past(adapter, options, n))
    return next(accepted, 0)


def script_of_length(adapter: Adapter, options: Options, length: int) -> Script:
    """A script at small sizes, whose number of batch items is not that of heads."""
    batch_size = 2 + (adapter.heads == 2)
    sizes = Sizes(batch_size, length, length, adapter.heads, adapter.d_k)
    return Script(adapter, sizes, **options.script_options())


def takes_steps_only(adapter: Adapter, options: Options) -> bool:
    """Whether a method that is named as one for a step gives others of two tokens.

    With no past yet, it would give those of the whole sequence if it could take two.
    """
    if adapter.single_from == 0 or not STEP_PATTERN.search(adapter.decode_method):
        return False
    script = script_of_length(adapter, options, 2)
    try:
        restart_with_cache(script)
        args = script.make_arguments()
        whole = script.call(args)
        piece, _cache = call_with_cache(script, args, 0, 2, empty_cache(script))
    except ScriptError:
        return False
    one, other = script.evaluate(whole), script.evaluate(piece)
    return not (one.shape == other.shape and torch.allclose(one, other, atol=1e-4))


def piece_depends_on_past(adapter: Adapter, options: Options, count: int) -> bool:
    """Whether the output of a piece of `count` tokens depends on those before."""
    outputs = []
    for changed in (False, True):
        script = script_of_length(adapter, options, 5)
        try:
            restart_with_cache(script)
            args = script.make_arguments()
            if changed:
                args = script.perturb(args, l=slice(0, 3))
            _first, cache = call_with_cache(script, args, 0, 3, empty_cache(script))
            later, _cache = call_with_cache(script, args, 3, count, cache)
        except ScriptError:
            return False
        outputs.append(script.evaluate(later))
    one, other = outputs
    return isinstance(one, Tensor) and not torch.equal(one, other)


def decode_methods(target: Any) -> list[str]:
    r"""Methods of a module, beside `forward`, that are named as those that decode.

    >>> from torch import nn
    >>> class Attention(nn.Module):
    ...     def decode_step(self, x, cache): ...
    ...     def encode(self, x): ...
    >>> decode_methods(Attention)
    ['decode_step']
    """
    return [*filter(DECODE_METHOD_PATTERN.fullmatch, dir(target))]


def cache_setups(target: Any) -> list[str]:
    r"""Calls of the methods with which a module begins to store a cache.

    >>> class Attention:
    ...     def setup_cache(self, batch_size, max_seq_len): ...
    >>> cache_setups(Attention)
    ['setup_cache(batch_size={batch_size}, max_seq_len=320)']
    """
    calls = []
    for name in filter(CACHE_SETUP_PATTERN.fullmatch, dir(target)):
        arguments = caches.sized_arguments(names.parameters_of_method(target, name))
        calls += [] if arguments is None else [f"{name}({arguments})"]
    return calls
