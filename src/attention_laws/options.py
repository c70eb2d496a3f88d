r"""# Laws of options

Users build and call an attention with options that its author tried last: a causal
mask, a scale of their own, one more norm, other sizes of chunks. An option may be
implemented in one path and forgotten in another, such as the fused kernel for inference
or the step of decoding. So options that are off by default are turned on, and the paths
are compared again.

Source: the signatures of the constructor and of the call, and the laws of other pages.
"""

import ast
import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from torch import Tensor

from attention_laws import documented, names
from attention_laws.adapter import Adapter, MaskArgument
from attention_laws.algebra import rows_sum_to_one
from attention_laws.batch import batch_independence
from attention_laws.decoding import LEFT_PATTERN, decode_with_cache
from attention_laws.dropout import dropout
from attention_laws.execution import (
    assert_no_shape_is_kept,
    eval_matches_train,
    half_precision,
)
from attention_laws.law import (
    Law,
    LawViolation,
    NotApplicable,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.lengths import long_sequences
from attention_laws.masking import causality, longer_padding, neutral_mask, padding
from attention_laws.order import query_independence
from attention_laws.positions import relative_positions
from attention_laws.recorded import record_weights
from attention_laws.script import CallArguments, Script
from attention_laws.shared_caches import restored_caches
from attention_laws.sinks import sinks, sinks_compete
from attention_laws.source import source_of

# Finds options of a constructor, beside those that are given, with values as text.
OptionFinder = Callable[[type, Mapping[str, str]], Iterator[tuple[str, str]]]

# Options of something else than the attention, or of one mode by intention.
OTHER_PATTERN = re.compile(
    r"(^|_)bias$|return|output|need|verbose|debug|drop|dtype|device|batch|first|last|layout"
    r"|only|bn$|random|sampl|nois|jitter|stoch|merge|checkpoint|compil|quant|eval|train"
    r"|infer|cross_?att"  # which needs a context
)
WINDOW_PATTERN = re.compile(r"window|local|exact|strict")
CAUSAL_PATTERN = re.compile(r"(is_)?causal|auto_?regressive|unidirectional")
SCALE_PATTERN = re.compile(
    r"(\w+_)?(scale|scaling|multiplier)|temperature|tau|query_pre_attn_scalar"
)
# How many heads of all batch items are computed at once.
SLICE_PATTERN = re.compile(r"(attn_|attention_)?slice(_size|s)?")
SOFTCAP_PATTERN = re.compile(r"(\w+_)?(soft_?cap(ping)?|logit_cap)")
ROTARY_PATTERN = re.compile(r"rope|rotary|rotat|interleav|neox")
COUNT_PATTERN = re.compile(
    r"((n|num|number_of|num_of)_?)?(\w+_)?(sinks?|globals?|global_tokens|registers?"
    r"|mem(or(y|ies))?(_\w+)?|null_\w+|prefix(_\w+)?)|shift(_size)?"
)
CHECKPOINT_PATTERN = re.compile(r"(\w+_)?checkpoint(s|ing|ed)?|remat\w*|recompute\w*")
LAYER_PATTERN = re.compile(r"layer_?(idx|id|i|number|num|no|index)|block_idx|depth")
CHOICE_PATTERN = re.compile(r"(\w+_)?(impl(ementation)?|backend)")
CHUNK_PATTERN = re.compile(
    r"((\w+_)?(chunk|block|tile|bucket|split))(_?(size|len(gth)?|[qk]))?"
)

# Options that are tried: more of them take seconds.
MOST_OPTIONS = 8
# The width of heads of which a quarter has several pairs of features.
ROTATED = 16
TOKENS, FEWER_TOKENS = 7, 4
# Tokens, and sizes of chunks: the first divides their number, and another does not.
CHUNKED_TOKENS, SMALL_CHUNKS = 8, (2, 3)
LONG = 260  # several chunks, whatever their size
# A soft cap that scores of large tokens reach, whatever they are divided by.
SMALL_CAP = 0.1


@law(slow=True)
def constructor_options(script: Script) -> None:
    r"""With each option of the constructor, all paths give the same outputs.

    $$y_{\text{eval}}(x; o) = y_{\text{train}}(x; o)$$

    Flags that are off by default are turned on, and scales, soft caps and windows that
    are not given are set, one after the other, and so are numbers of sinks or of global
    tokens that are zero; the attention is that of a later layer. Evaluation, training
    and `torch.no_grad()` must then give the same outputs, a batch item those that it
    has alone, and a sequence in pieces those of the whole; with a flag, padding must be
    hidden. With a flag named `causal`, future tokens cannot influence the past, nor
    with one of a window. The sizes of chunks that are an implementation detail, as
    equal sizes show, must not change the output if they are unequal, nor may a method
    that chooses a path, such as `set_attention_slice`, or an option that names one,
    such as `attn_implementation="eager"`, nor a flag that returns the weights, or that
    is documented to give the same result. With no chunk on the left, a query sees no
    more than with one. Scores reach a soft cap, and are not scaled behind it. A flag
    that recomputes activations for the gradients changes neither these nor the output,
    also with dropout. What all instances share, such as a dict of masks, must not give
    one the mask of another, whose options differ.
    """
    adapter = script.adapter
    skip_unless(isinstance(adapter.target, type), "is not built by the check")
    options = [*options_with_arguments(adapter)][:MOST_OPTIONS]
    parameters = inspect.signature(adapter.target).parameters.values()
    chunks = chunk_sizes_of(parameters, adapter.init_args)
    setters = names.setters_of_paths(adapter.target)
    choices = [*options_with_arguments(adapter, choices_of)]
    numbers = [*options_with_arguments(adapter, numbers_of)]
    limits = [*options_with_arguments(adapter, limits_of)]
    flags = [p.name for p in parameters if CHECKPOINT_PATTERN.fullmatch(p.name)]
    caps = [*options_with_arguments(adapter, caps_of)]
    found = options, chunks, setters, choices, numbers, limits, flags, caps
    skip_unless(any(found), "its constructor has no option that is off")
    for name, value, init_args in options:
        chosen = replace(adapter, init_args=init_args)
        with script.using(chosen), named_option(name, value):
            assert_option_acts_alike(script, name, value, adapter)
    if chunks:
        assert_chunks_change_nothing(script, chunks)
        one = in_chunks(adapter, dict.fromkeys(chunks, 1), of_call=False)
        # Each chunk has dropout masks of its own.
        with script.using(one), suppress(ScriptError):
            run_if_it_applies(dropout, script)
            run_if_it_applies(eval_matches_train, script)
    for name, _value, init_args in caps:
        # It may need another option.
        with script.using(replace(adapter, init_args=init_args)), script.attempt():
            assert_cap_is_reached(script, name)
    for name, _value, init_args in limits:
        # It may need another option.
        with script.using(replace(adapter, init_args=init_args)), script.attempt():
            assert_less_context_sees_less(script, name)
    for name in flags if adapter.reproducible_training else []:
        with script.attempt():  # it may need another option
            assert_checkpoint_changes_nothing(script, name)
    script.restart()
    with restored_caches(script.evaluate("attention")):
        if script.evaluate("clear_caches(attention)"):
            assert_instances_share_nothing(script)
    for name, value, init_args in choices:
        with suppress(ScriptError):  # it may need a package that is not installed
            assert_choice_changes_nothing(script, name, value, init_args)
    for call in setters:
        with suppress(ScriptError):  # it may need a package that is not installed
            assert_setter_changes_nothing(script, call)


@law(slow=True)
def call_options(script: Script) -> None:
    r"""With each option of the call, keys stay hidden and batch items apart.

    $$y(x, m; o) = y(x, m; o \mid \text{hidden keys are others})$$

    Scales, soft caps and windows that are not given are set, one after the other. A
    soft cap behind the mask, for one, makes the scores of hidden keys finite again.
    Flags may turn the attention into another. The sizes of chunks that are an
    implementation detail must not change the output, with and without masks, whatever
    the lengths of queries and keys: where the last chunks end, keys are left out by
    mistake. Nor may a flag that is documented to give the same result, in chunks of any
    size.
    """
    adapter = script.adapter
    known = {*adapter.inputs, *adapter.call_args, *adapter.extra_args}
    known |= {*adapter.position_args, *(mask.name for mask in adapter.masks)}
    given = dict.fromkeys(known, "")
    parameters = names.parameters_of(adapter.target)
    found = options_among(parameters, given)
    options = [(name, value) for name, value in found if value != "True"]
    flags = [p.name for p in parameters if is_of_path(adapter.target, p, given)]
    chunks = chunk_sizes_of(parameters, given)
    skip_unless(options or flags or chunks, "its call has no option that is off")
    for name, value in options[:MOST_OPTIONS]:
        more = {**adapter.call_args, name: ast.literal_eval(value)}
        is_count = COUNT_PATTERN.fullmatch(name) is not None
        if is_count and int(value) >= script.sizes.k_len:
            continue  # of the tokens, all of which are then in it
        # All tokens see those of a prefix.
        is_causal = adapter.causal and not is_count
        chosen = replace(adapter, call_args=more, causal=is_causal)
        with script.using(chosen), named_option(name, value):
            for each in (batch_independence, padding, longer_padding, rows_sum_to_one):
                run_if_it_applies(each, script)
            assert_last_query_alone(script, adapter)
    if chunks:
        assert_chunks_change_nothing(script, chunks, of_call=True)
    for name in flags:
        assert_flag_changes_nothing(script, name, chunks)


def is_of_path(
    target: object, parameter: inspect.Parameter, given: Mapping[str, str]
) -> bool:
    """Whether an argument is a flag, off by default, that only chooses a path."""
    is_off = parameter.default is False and parameter.name not in given
    return is_off and documented.changes_nothing(target, parameter.name)


def assert_flag_changes_nothing(
    script: Script, name: str, chunks: Sequence[str] = ()
) -> None:
    """With a flag that is documented to choose a path, the output is the same.

    So it is for many keys, which may be computed in chunks, and in small chunks.
    """
    fixed = script.adapter.fixed_length
    small = dict.fromkeys(chunks, str(SMALL_CHUNKS[0]))
    for length in [fixed] if fixed else [TOKENS, LONG]:
        # They may be more than its tables have.
        with script.using(q_len=length, k_len=length), script.attempt():
            for allowed, mask in script.mask_cases():
                script.restart()
                args = script.make_arguments(allowed, mask)
                for given in [{}, small] if small else [{}]:
                    usual = script.call(args, **given)
                    other = script.call(args, **{name: "True"}, **given)
                    message = f"{{place}} differs with `{name}`"
                    script.assert_close(usual, other, message)


def assert_last_query_alone(script: Script, without: Adapter) -> None:
    """The last query of a causal attention gives the same alone, as without the option.

    A path of its own for a single query may leave out a window.
    """
    adapter = script.adapter
    if adapter.single_input or not adapter.causal or adapter.mixes_queries:
        return
    last = adapter.index(l=slice(TOKENS - 1, None))
    for each in (without, adapter):
        with script.using(each, q_len=TOKENS, k_len=TOKENS):
            script.restart()
            with script.attempt():  # it may need as many queries as keys
                args = script.make_arguments()
                whole = script.assign("y", f"{script.call(args)}{last}")
                query = script.assign("query", f"{args.inputs[0]}{last}")
                alone = script.call(replace(args, inputs=(query, *args.inputs[1:])))
                is_alike = script.evaluate(
                    f"torch.allclose({whole}, {alone}, atol=1e-4)"
                )
                if each is without and not is_alike:
                    break
                script.assert_close(
                    whole, alone, "{place} differs if the query is alone"
                )


@contextmanager
def named_option(name: str, value: str) -> Iterator[None]:
    """Name the option in the message of a law that is violated with it.

    An error is none: it may need another option, or other inputs.
    """
    try:
        yield
    except LawViolation as violation:
        if violation.difference == math.inf:
            return  # NaN, as with masks that the option is not meant for
        message = f"with `{name}={value}`, {violation.message}"
        numbers = violation.difference, violation.tolerance
        raise LawViolation(message, *numbers, violation.code, violation.sizes) from None
    except ScriptError:
        pass


def run_if_it_applies(tested: Law, script: Script) -> None:
    """Run a law, unless a design of the attention changes what it says."""
    if not {*tested.assumes} & {*script.adapter.designs}:
        with suppress(NotApplicable):
            tested.test(script)


def options_with_arguments(
    adapter: Adapter, find: OptionFinder | None = None
) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Options of the constructor, or of a config, and all arguments with each of them.

    They are those that are off, or what `find` returns. A config is a dataclass, with
    which the constructor is called.
    """
    find = find or options_of
    given = dict(adapter.init_args)
    for name, value in find(adapter.target, given):
        yield name, value, {**given, name: value}
    for argument, text in given.items():
        kind, _, fields = text.removesuffix(")").partition("(")
        config = adapter.namespace.get(kind)
        if dataclasses.is_dataclass(config) and isinstance(config, type):
            known = dict.fromkeys(re.findall(r"(\w+)=", fields), "")
            for name, value in find(config, known):
                others = [f for f in fields.split(", ") if not f.startswith(f"{name}=")]
                more = ", ".join(filter(None, [*others, f"{name}={value}"]))
                yield name, value, {**given, argument: f"{kind}({more})"}


def options_of(target: type, given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    r"""Options that are off by default, each with the source text of another value.

    >>> class Attention:
    ...     def __init__(self, dim, qk_norm=False, scale=None, need_weights=False): ...
    >>> [*options_of(Attention, {"dim": "12"})]
    [('qk_norm', 'True'), ('scale', '0.7')]
    """
    return options_among(inspect.signature(target).parameters.values(), given)


def options_among(
    parameters: Iterable[inspect.Parameter], given: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Those among the parameters of a constructor or of a call."""
    for parameter in parameters:
        name = parameter.name
        if name == "query_pre_attn_scalar":
            yield name, "9.0"  # and no width of heads
        if name in given or OTHER_PATTERN.search(name.lower()):
            continue
        if names.KIND_PATTERN.fullmatch(name):
            continue  # it needs a context, or none
        default = parameter.default
        if default is False:
            yield name, "True"
        elif default is None and SCALE_PATTERN.fullmatch(name):
            yield name, "0.7"
        elif default in (None, 0.0) and SOFTCAP_PATTERN.fullmatch(name):
            yield name, "2.0"
        elif names.WINDOW_PATTERN.fullmatch(name) and (
            default is None or (type(default) is int and default > TOKENS)
        ):
            yield name, "3"
        elif type(default) is int and default == 0 and COUNT_PATTERN.fullmatch(name):
            yield name, "2"
        elif type(default) is int and LAYER_PATTERN.fullmatch(name):
            yield name, "3"
        elif default is None and SLICE_PATTERN.fullmatch(name):
            yield name, "5"  # of two items with three or four heads, some are left


def choices_of(target: type, given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Options that name an implementation, each with another name that the code has.

    A flag that returns the weights may choose one, too, or one that is documented to.
    """
    for name, value in named_choices_of(target, given):
        if CHOICE_PATTERN.fullmatch(name):
            yield name, value
    parameters = inspect.signature(target).parameters.values()
    for name in names.flags_of_weights(parameters, False, given):
        yield name, "True"
    for parameter in parameters:
        if is_of_path(target, parameter, given):
            yield parameter.name, "True"


def caps_of(target: type, given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Soft caps that are given or None by default, each with a small one."""
    for name, parameter in inspect.signature(target).parameters.items():
        is_number = parameter.default is None or type(parameter.default) in (int, float)
        if is_number and name not in given and SOFTCAP_PATTERN.fullmatch(name):
            yield name, str(SMALL_CAP)


def limits_of(target: type, given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Numbers that limit the context on the left, each with 1."""
    for name, parameter in inspect.signature(target).parameters.items():
        if type(parameter.default) is int and LEFT_PATTERN.fullmatch(name):
            if name not in given and not documented.says_of(target, name, ALL_IF_ZERO):
                yield name, "1"


# What says that 0 stands for no limit.
ALL_IF_ZERO = (
    r"\b(0|zero)\b[^.;]*\b(all|every|full|whole|entire|unlimited|no limit)\b"
    r"|\b(all|every|full|whole|entire|unlimited|no limit)\b[^.;]*\b(0|zero)\b"
)


def assert_less_context_sees_less(script: Script, name: str) -> None:
    """What a query sees with a limit of 0 on the left, it sees with a limit of 1, too.

    As `x[-0:]` and `if limit:` do, 0 may mean no limit by mistake.
    """
    script.sizes = replace(script.sizes, batch_size=1, q_len=LONG, k_len=LONG)
    script.restart()
    args, last = script.make_arguments(), script.adapter.index(l=slice(-1, None))
    tokens = args.inputs[-1]
    script.exec_line(f"{tokens}.requires_grad_()")
    with_one = script.gradient(f"{script.call(args)}{last}", tokens)
    script.build_other("limited", {**script.adapter.init_args, name: "0"})
    output = script.call(args, function="limited")
    with_none = script.gradient(f"{output}{last}", tokens)
    message = f"with `{name}=0`, a query sees tokens that it does not with `{name}=1`"
    script.assert_true(f"(({with_none} == 0) | ({with_one} != 0)).all()", message)


def assert_cap_is_reached(script: Script, name: str) -> None:
    """With large tokens, scores differ by twice a small soft cap: none is smaller.

    A product that is scaled behind its cap stays below. A cap of something else leaves
    most of the weights at zero.
    """
    length = script.adapter.fixed_length or TOKENS  # scores of both signs
    script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
    script.restart()
    args = script.make_arguments()
    inputs = tuple(script.assign(n, f"100 * {n}") for n in args.inputs)
    usual = record_weights(script, args)
    weights = record_weights(script, replace(args, inputs=inputs))
    if weights and script.evaluate(f"(({weights} > 0) == ({usual} > 0)).all()"):
        scores = f"{weights}.clamp(min=1e-30).log()"
        seen = f"{weights} > 0"
        lowest = f"{scores}.where({seen}, torch.inf).amin(-1)"
        largest = f"({scores}.amax(-1) - {lowest}).max()"
        message = f"the scores of large tokens do not reach `{name}={SMALL_CAP}`"
        script.assert_true(f"{largest} >= 1.9 * {SMALL_CAP}", message)


def named_choices_of(
    target: type, given: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Options that are words, each with another word that the code has.

    The code compares it with them, or the annotation is a `Literal`.
    """
    code = source_of(sys.modules.get(target.__module__))
    for name, parameter in inspect.signature(target).parameters.items():
        if not isinstance(parameter.default, str) or name in given:
            continue
        compared = re.findall(rf"\b{name} [!=]= [\"'](\w+)[\"']", code)
        literal = re.findall(r"'(\w+)'", str(parameter.annotation))
        for other in dict.fromkeys([*compared, *literal]):
            if other != parameter.default:
                yield name, repr(other)


def assert_checkpoint_changes_nothing(script: Script, name: str) -> None:
    """With a flag that recomputes parts for the gradients, these are the same.

    In training with dropout, the same weights have to be dropped again.
    """
    adapter = script.adapter
    script.restart("train", dropout=0.5)
    script.build_other("checkpointed", {**adapter.init_args, name: "True"})
    script.exec_line("set_dropout(checkpointed, 0.5)")
    script.exec_line("checkpointed.train()")
    args = script.make_arguments()
    script.exec_line(f"{args.inputs[0]}.requires_grad_()")
    results = []
    for function in ("attention", "checkpointed"):
        script.exec_line(f"torch.manual_seed({script.seed})")
        output = script.call(args, function=function)
        results.append((output, script.gradient(output, args.inputs[0])))
    (usual, gradient), (seen, recomputed) = results
    message = f"{{place}} differs in training with `{name}=True`"
    script.assert_close(usual, seen, message)
    claim = f"torch.allclose({gradient}, {recomputed}, atol=1e-4)"
    message = f"the gradient differs with `{name}=True`, in training with dropout"
    script.assert_true(claim, message)


def numbers_of(target: type, given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Options that are numbers, or several of them, each with half of it."""
    for name, parameter in inspect.signature(target).parameters.items():
        default = parameter.default
        several = [*default] if isinstance(default, tuple | list) else [default]
        if not several or name in given:
            continue
        if all(type(each) in (int, float) and each > 1 for each in several):
            halves = [n // 2 if type(n) is int else n / 2 for n in several]
            yield name, repr(halves[0] if several == [default] else halves)


def assert_instances_share_nothing(script: Script) -> None:
    """What instances share does not give one of them the mask or table of another.

    Their options differ: words are others, windows small and numbers halves.
    """
    adapter = script.adapter
    args_of = partial(options_with_arguments, adapter)
    windows = {
        name: value
        for name, value in options_of(adapter.target, adapter.init_args)
        if names.WINDOW_PATTERN.fullmatch(name)
    }
    finders = named_choices_of, numbers_of, options_of
    options = chain.from_iterable(map(args_of, finders))
    for name, value, init_args in islice(options, MOST_OPTIONS):
        # It may need another option.
        with script.using(q_len=TOKENS, k_len=TOKENS), script.attempt():
            script.restart()
            args = script.make_arguments()
            script.build_other("other", {**windows, **init_args})
            script.exec_line("clear_caches(other)")
            expected = script.call(args, function="other")
            script.exec_line("clear_caches(other)")
            script.call(args)
            seen = script.call(args, function="other")
            message = (
                f"with `{name}={value}`, {{place}} changes after a call of another "
                f"instance, without that option"
            )
            script.assert_close(expected, seen, message)


def chunk_sizes_of(
    parameters: Iterable[inspect.Parameter], given: Mapping[str, str]
) -> list[str]:
    r"""The parameters that are the size of a chunk by default.

    >>> def attend(x, q_chunk=64, k_chunk=128, max_len=512): ...
    >>> chunk_sizes_of(inspect.signature(attend).parameters.values(), {"x": ""})
    ['q_chunk', 'k_chunk']
    """
    return [
        parameter.name
        for parameter in parameters
        if type(parameter.default) is int
        and parameter.default > max(SMALL_CHUNKS)
        and CHUNK_PATTERN.fullmatch(parameter.name)
        and given.get(parameter.name) in (None, names.value_of(parameter.name))
    ]


def assert_option_acts_alike(
    script: Script, name: str, value: str, without: Adapter
) -> None:
    """Assert the laws of paths and of the batch, and of padding with a flag.

    That of causality, too, if it is the option; `without` is the adapter without it. A
    sequence in pieces is compared if the option leaves the attention causal.
    """
    adapter = script.adapter
    laws = [eval_matches_train, batch_independence]
    if SCALE_PATTERN.fullmatch(name) or SOFTCAP_PATTERN.fullmatch(name):
        laws.append(half_precision)  # which may have a path of its own
    if "sink" in adapter.designs and names.WINDOW_PATTERN.fullmatch(name):
        laws += [sinks, sinks_compete]
    if value == "True" and not documented.is_of_pairs(adapter.target):
        laws.append(padding)  # with a window, masks may be of another kind
        if adapter.positions == "rotary" and ROTARY_PATTERN.search(name):
            laws.append(relative_positions)
    if CAUSAL_PATTERN.fullmatch(name):
        if not changes_output(script, without):
            laws.append(neutral_mask)  # beside a mask, it may have an effect
        elif adapter.single_input and "features" not in adapter.designs:
            # Tokens attend to each other; features may be scaled by their largest.
            script.adapter = adapter = replace(adapter, causal=True)
            laws += [causality, long_sequences]
        elif not adapter.single_input:
            laws.append(neutral_mask)  # fewer queries than keys are the last of them
    elif adapter.causal and WINDOW_PATTERN.search(name):
        laws.append(causality)  # a window hides keys, and shows none
    elif LAYER_PATTERN.fullmatch(name):
        laws.append(neutral_mask)
    elif name.startswith("shift") and (adapter.image or adapter.gets_sides):
        assert_no_shape_is_kept(script)
    for each in laws:
        is_wide = each is relative_positions and not adapter.fixed_size
        with script.using(d_k=ROTATED if is_wide else script.sizes.d_k):
            run_if_it_applies(each, script)
    if adapter.cache is not None and adapter.causal and stays_causal(script):
        with script.using(q_len=TOKENS, k_len=TOKENS), suppress(NotApplicable):
            decode_with_cache(script, [3, 1, 1, 2])


def changes_output(script: Script, without: Adapter) -> bool:
    """Whether an option changes the output: a flag may be kept for others to read."""
    script.restart()
    args = script.make_arguments()
    chosen = script.call(args)
    script.build_other("plain", without.init_args)
    usual = script.call(args, function="plain")
    return not script.evaluate(f"torch.equal({chosen}, {usual})")


def stays_causal(script: Script) -> bool:
    """Whether future tokens have no influence, with the option either."""
    try:
        causality.test(script)
    except (LawViolation, NotApplicable):
        return False
    return True


def assert_chunks_change_nothing(
    script: Script, chunks: list[str], of_call: bool = False
) -> None:
    """If whole chunks of one size change nothing, those of other sizes change nothing.

    Nor do they with masks, nor for other lengths of queries and keys. Otherwise the
    chunks are part of what is computed, in which batch items and queries are apart.
    """
    adapter = script.adapter
    many, few = CHUNKED_TOKENS, FEWER_TOKENS
    lengths = [(many, many)]
    if adapter.image.startswith("image"):
        adapter = replace(adapter, image_height=many)
        lengths = [(many**2, many**2)]
    if not adapter.single_input:
        lengths += [(few, many), (many, few)]
    for q_len, k_len in lengths:
        with script.using(adapter, q_len=q_len, k_len=k_len):
            cases = [*script.mask_cases()]
            flags = (mask for mask in adapter.masks if mask.kind == "causal")
            if q_len != k_len:
                cases += [(script.all_allowed(), flag) for flag in flags]
            for case in cases:
                with script.attempt():  # sizes may have to be equal
                    if not assert_case_in_chunks(script, chunks, of_call, *case):
                        return


def assert_case_in_chunks(
    script: Script,
    chunks: list[str],
    of_call: bool,
    allowed: Tensor,
    mask: MaskArgument | None,
) -> bool:
    """With this mask, the sizes of chunks change nothing.

    Returns False if the chunks are part of what is computed.
    """
    small, other = SMALL_CHUNKS
    equal = dict.fromkeys(chunks, small)
    variants = [equal, dict.fromkeys(chunks, other)]
    variants += [{**equal, name: other} for name in chunks if len(chunks) > 1]
    script.restart()
    if mask is not None and mask.kind == "causal":
        args = replace(script.make_arguments(allowed), mask=(mask.name, "True"))
    else:
        args = script.make_arguments(allowed, mask)
    whole = script.call(args)
    for sizes in variants:
        seen = call_in_chunks(script, args, sizes, of_call)
        if not seen:
            return False
        same = f"torch.allclose({whole}, {seen}, atol=1e-4, equal_nan=True)"
        is_first = sizes is equal and script.sizes.q_len == script.sizes.k_len
        if is_first and mask is None and not script.evaluate(same):
            chunked = in_chunks(script.adapter, sizes, of_call)
            with script.using(chunked), named_option(chunks[0], str(small)):
                run_if_it_applies(batch_independence, script)
                run_if_it_applies(query_independence, script)
            return False
        text = ", ".join(f"{n}={size}" for n, size in sizes.items())
        message = f"{{place}} differs in chunks of `{text}`"
        script.assert_close(whole, seen, message)
    return True


def in_chunks(adapter: Adapter, sizes: Mapping[str, int], of_call: bool) -> Adapter:
    """The same with chunks of these sizes, which the call or the constructor takes."""
    if of_call:
        return replace(adapter, call_args={**adapter.call_args, **sizes})
    texts = {name: str(size) for name, size in sizes.items()}
    return replace(adapter, init_args={**adapter.init_args, **texts})


def call_in_chunks(
    script: Script, args: CallArguments, sizes: Mapping[str, int], of_call: bool
) -> str:
    """The output in chunks of these sizes; empty if they are those of the weights."""
    if of_call:
        return script.call(args, **{name: str(size) for name, size in sizes.items()})
    script.build_other("chunked", in_chunks(script.adapter, sizes, of_call).init_args)
    if not script.evaluate("have_same_shapes(attention, chunked)"):
        return ""
    return script.call(args, function="chunked")


def assert_choice_changes_nothing(
    script: Script, name: str, value: str, init_args: dict[str, str]
) -> None:
    """Another implementation gives the same outputs, with each mask."""
    with script.using(q_len=TOKENS, k_len=TOKENS):
        for allowed, mask in script.mask_cases():
            script.restart()
            args = script.make_arguments(allowed, mask)
            script.build_other("other", init_args)
            if not script.evaluate("have_same_shapes(attention, other)"):
                return
            message = f"{{place}} differs if it is built with `{name}={value}`"
            other = script.call(args, function="other")
            script.assert_close(script.call(args), other, message)


def assert_setter_changes_nothing(script: Script, call: str) -> None:
    """In evaluation, a path that a method chooses gives the same outputs."""
    with script.using(batch_size=5):
        script.restart("eval", dropout=0.5)
        args = script.make_arguments()
        usual = script.call(args)
        script.exec_line(f"attention.{call}")
        message = f"{{place}} differs after `{call}`"
        script.assert_close(usual, script.call(args), message)
