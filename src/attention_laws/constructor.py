r"""# Laws of constructor options

Users build an attention with options that its author tried last: a causal mask, a scale
of their own, one more norm, other sizes of chunks. An option may be implemented in one
path and forgotten in another, such as the fused kernel for inference or the step of
decoding. So options that are off by default are turned on, and the paths are compared
again.

Source: the signature of the constructor, and the laws of other pages.
"""

import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from attention_laws import names
from attention_laws.adapter import Adapter
from attention_laws.batch import batch_independence
from attention_laws.decoding import decode_with_cache
from attention_laws.execution import eval_matches_train, half_precision
from attention_laws.law import (
    LawViolation,
    NotApplicable,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.lengths import long_sequences
from attention_laws.masking import causality, neutral_mask, padding
from attention_laws.positions import relative_positions
from attention_laws.script import Script
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
SOFTCAP_PATTERN = re.compile(r"(\w+_)?(soft_?cap(ping)?|logit_cap)")
ROTARY_PATTERN = re.compile(r"rope|rotary|rotat|interleav|neox")
COUNT_PATTERN = re.compile(
    r"((n|num|number_of|num_of)_?)?(\w+_)?(sinks?|globals?|global_tokens|registers?"
    r"|mem(or(y|ies))?(_\w+)?|null_\w+|prefix(_\w+)?)|shift(_size)?"
)
LAYER_PATTERN = re.compile(r"layer_?(idx|id|i|number|num|no|index)|block_idx|depth")
CHOICE_PATTERN = re.compile(r"(\w+_)?(impl(ementation)?|backend)")
CHUNK_PATTERN = re.compile(r"((\w+_)?(chunk|block|tile))(_?(size|len(gth)?|[qk]))?")

# Options that are tried: more of them take seconds.
MOST_OPTIONS = 8
# The width of heads of which a quarter has several pairs of features.
ROTATED = 16
# Tokens, and sizes of chunks that do not divide their number.
TOKENS, SMALL_CHUNKS = 7, (2, 3)


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
    such as `attn_implementation="eager"`.
    """
    adapter = script.adapter
    skip_unless(isinstance(adapter.target, type), "is not built by the check")
    options = [*options_with_arguments(adapter)][:MOST_OPTIONS]
    chunks = chunk_sizes_of(adapter.target, adapter.init_args)
    setters = names.setters_of_paths(adapter.target)
    choices = [*options_with_arguments(adapter, choices_of)]
    has_options = options or chunks or setters or choices
    skip_unless(has_options, "its constructor has no option that is off")
    usual = adapter, script.sizes
    for name, value, init_args in options:
        script.sizes = usual[1]
        script.adapter = replace(adapter, init_args=init_args)
        try:
            assert_option_acts_alike(script, name, value, adapter)
        except LawViolation as violation:
            if violation.difference == math.inf:
                continue  # NaN, as with masks that the option is not meant for
            message = f"with `{name}={value}`, {violation.message}"
            raise LawViolation(
                message, violation.difference, violation.tolerance, violation.code
            ) from None
        except ScriptError:
            pass  # it may need another option, or other inputs
    script.adapter, script.sizes = usual
    if chunks:
        with suppress(ScriptError):  # they may have to be equal
            assert_chunks_change_nothing(script, chunks)
    for name, value, init_args in choices:
        script.sizes = usual[1]
        with suppress(ScriptError):  # it may need a package that is not installed
            assert_choice_changes_nothing(script, name, value, init_args)
    for call in setters:
        script.sizes = usual[1]
        with suppress(ScriptError):  # it may need a package that is not installed
            assert_setter_changes_nothing(script, call)


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
    for name, parameter in inspect.signature(target).parameters.items():
        if name == "query_pre_attn_scalar":
            yield name, "9.0"  # and no width of heads
        if name in given or OTHER_PATTERN.search(name.lower()):
            continue
        default = parameter.default
        if default is False:
            yield name, "True"
        elif default is None and SCALE_PATTERN.fullmatch(name):
            yield name, "0.7"
        elif default in (None, 0.0) and SOFTCAP_PATTERN.fullmatch(name):
            yield name, "2.0"
        elif default is None and names.WINDOW_PATTERN.fullmatch(name):
            yield name, "3"
        elif type(default) is int and default == 0 and COUNT_PATTERN.fullmatch(name):
            yield name, "2"
        elif type(default) is int and LAYER_PATTERN.fullmatch(name):
            yield name, "3"


def choices_of(target: type, given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Options that name an implementation, each with another name that the code has.

    The code compares it with them, or the annotation is a `Literal`.
    """
    code = source_of(sys.modules.get(target.__module__))
    for name, parameter in inspect.signature(target).parameters.items():
        usual = parameter.default
        if not (isinstance(usual, str) and CHOICE_PATTERN.fullmatch(name)):
            continue
        compared = re.findall(rf"\b{name} [!=]= [\"'](\w+)[\"']", code)
        literal = re.findall(r"'(\w+)'", str(parameter.annotation))
        for other in dict.fromkeys([*compared, *literal]):
            if other != usual and name not in given:
                yield name, repr(other)


def chunk_sizes_of(target: type, given: Mapping[str, str]) -> list[str]:
    r"""The arguments of a constructor that are the size of a chunk by default.

    >>> class Attention:
    ...     def __init__(self, dim, q_chunk=64, k_chunk=128, max_len=512): ...
    >>> chunk_sizes_of(Attention, {"dim": "12"})
    ['q_chunk', 'k_chunk']
    """
    return [
        name
        for name, parameter in inspect.signature(target).parameters.items()
        if type(parameter.default) is int
        and parameter.default > max(SMALL_CHUNKS)
        and CHUNK_PATTERN.fullmatch(name)
        and (name not in given or names.value_of(name) == given[name])
    ]


def assert_option_acts_alike(
    script: Script, name: str, value: str, without: Adapter
) -> None:
    """Assert the laws of paths and of the batch, and of padding with a flag.

    That of causality, too, if it is the option; `without` is the adapter without it. A
    sequence in pieces is compared if the option leaves the attention causal.
    """
    adapter, usual = script.adapter, script.sizes
    laws = [eval_matches_train, batch_independence]
    if SCALE_PATTERN.fullmatch(name) or SOFTCAP_PATTERN.fullmatch(name):
        laws.append(half_precision)  # which may have a path of its own
    if "sink" in adapter.designs and names.WINDOW_PATTERN.fullmatch(name):
        laws += [sinks, sinks_compete]
    if value == "True":
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
    elif adapter.causal and WINDOW_PATTERN.search(name):
        laws.append(causality)  # a window hides keys, and shows none
    elif LAYER_PATTERN.fullmatch(name):
        laws.append(neutral_mask)
    for each in laws:
        if each is relative_positions and not adapter.fixed_size:
            script.sizes = replace(usual, d_k=ROTATED)
        if not {*each.assumes} & {*adapter.designs}:
            with suppress(NotApplicable):
                each.test(script)
        script.sizes = usual
    if adapter.cache is not None and adapter.causal and stays_causal(script):
        script.sizes = replace(usual, q_len=TOKENS, k_len=TOKENS)
        with suppress(NotApplicable):
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


def assert_chunks_change_nothing(script: Script, chunks: list[str]) -> None:
    """If equal small sizes of chunks change nothing, other sizes change nothing."""
    small, other = SMALL_CHUNKS
    script.sizes = replace(script.sizes, q_len=TOKENS, k_len=TOKENS)
    script.restart()
    args = script.make_arguments()
    usual = script.call(args)
    equal = dict.fromkeys(chunks, small)
    variants = [equal, dict.fromkeys(chunks, other)]
    variants += [{**equal, name: other} for name in chunks if len(chunks) > 1]
    for sizes in variants:
        text = ", ".join(f"{name}={size}" for name, size in sizes.items())
        given = {name: str(size) for name, size in sizes.items()}
        script.build_other("chunked", {**script.adapter.init_args, **given})
        if not script.evaluate("have_same_shapes(attention, chunked)"):
            return
        seen = script.call(args, function="chunked")
        if sizes is equal:
            if not script.evaluate(f"torch.allclose({usual}, {seen}, atol=1e-4)"):
                return  # the chunks are part of what is computed
            continue
        message = f"{{place}} differs if it is built with `{text}`"
        script.assert_close(usual, seen, message)


def assert_choice_changes_nothing(
    script: Script, name: str, value: str, init_args: dict[str, str]
) -> None:
    """Another implementation gives the same outputs, with each mask."""
    script.sizes = replace(script.sizes, q_len=TOKENS, k_len=TOKENS)
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
    script.restart("eval", dropout=0.5)
    args = script.make_arguments()
    usual = script.call(args)
    script.exec_line(f"attention.{call}")
    message = f"{{place}} differs after `{call}`"
    script.assert_close(usual, script.call(args), message)
