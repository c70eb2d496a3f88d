r"""# Running the laws

`check` runs all laws on an implementation of attention, and returns a `Report`: which
laws pass, which fail and by which counterexample, which do not apply and why.

Each law runs at several sizes, from small to large. In some of them, two sizes are
equal (batch size and length, or batch size and heads), so that a mask of the wrong
shape broadcasts without an error. A counterexample is then shrunk: its sizes are
reduced as long as the law still fails.

Source: [defining a law](law.md); the command line is [`headnotes check`](cli.md).
"""

import dis
import inspect
import io
import logging
import math
import random
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import (
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attention_laws import (
    algebra,
    batch,
    blocks,
    configs,
    decoding,
    dropout,
    execution,
    generation,
    gradients,
    heads,
    images,
    lengths,
    masking,
    names,
    options,
    order,
    positions,
    scores,
    sinks,
    structure,
    tables,
    weights,
)
from attention_laws.adapter import Adapter, CallError, Fact, Options, Sizes
from attention_laws.calling import (
    CONTEXT_LENGTH,
    CallProbe,
    built_by,
    context_of_all_items,
    expanded,
    influence,
    is_model_around,
    order_matters,
    queries_meet,
)
from attention_laws.embedded import takes_ids
from attention_laws.infer import infer_adapter
from attention_laws.infer_cache import (
    caches_apart,
    infer_cache,
    infer_context_cache,
)
from attention_laws.infer_masks import infer_masks
from attention_laws.law import (
    Excused,
    Law,
    LawViolation,
    NotApplicable,
    ScriptError,
    did_you_mean,
    first_line,
)
from attention_laws.names import argument_values, required_by_name
from attention_laws.new_tokens import over_caches, takes_caches
from attention_laws.one_query import (
    over_queries,
    over_steps,
    takes_one_query,
    takes_steps,
)
from attention_laws.pages import over_pages, takes_pages
from attention_laws.patches import takes_patches
from attention_laws.prepared import (
    prepare_method,
    takers_of_memory,
    with_memory,
)
from attention_laws.script import CallArguments, Script

# All laws by name, in the order in which they run and are shown.
LAWS: dict[str, Law] = {
    each.name: each
    for family in (
        *(masking, batch, images, algebra, weights, scores, heads, sinks),
        *(gradients, decoding, generation, blocks, order, positions, tables),
        *(lengths, execution, dropout, options),
    )
    for each in vars(family).values()
    if isinstance(each, Law)
}
# What they compare may be returned only if the attention is built with a flag.
LAWS_OF_WEIGHTS = ("rows_sum_to_one", "weights_axes", "weights_match_output")

# Exceptions that authors raise on purpose, to refuse an input. Any other exception is a
# bug, and counts as a failure.
REFUSALS = (ValueError, TypeError, NotImplementedError, AssertionError)
# PyTorch's errors where a sequence is shorter than the kernel or padding of a layer.
TOO_SHORT = re.compile("Padding size should be less|Kernel size can't be greater")
TORCH_FOLDER = str(Path(torch.__file__).parent)

# What a report prints for the status of a result.
VERDICTS = {"pass": "pass", "fail": "FAIL", "not applicable": "skip"}

# Of two results of one law, the first in this order is reported.
STATUSES = ("fail", "pass", "not applicable")

# How often a law is run to shrink its counterexample, and if it is slow. Most fail at
# the least sizes after fewer runs. Time is no limit: the result must not depend on it.
SHRINKING_RUNS, SLOW_SHRINKING_RUNS = 40, 12

# A difference of so many tolerances at most may be rounding.
ROUNDING_TOLERANCES = 100


@dataclass(frozen=True)
class Counterexample:
    """The smallest example found that violates a law, and the program that shows it.

    `difference` is the largest absolute difference, or NaN where the law is not about
    one; `tolerance` is what rounding may cause.
    """

    sizes: Sizes
    message: str
    difference: float
    tolerance: float
    code: str

    def __str__(self) -> str:
        lines = [self.message, f"at {self.sizes}"]
        if self.tolerance:
            lines.append(
                f"difference {self.difference:.2g}, tolerance {self.tolerance:.0e}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class LawResult:
    """The result of one law; `status` is "pass", "fail" or "not applicable"."""

    law: Law
    status: str
    detail: str = ""
    counterexample: Counterexample | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """The results of all laws on one implementation; prints as a table.

    `model` is there if it has attentions within it, which may be checked, too: the
    module, the expression that builds it, and the lines that this needs.
    """

    name: str
    facts: tuple[Fact, ...]
    results: tuple[LawResult, ...]
    model: tuple[nn.Module, str, str] | None = field(default=None, repr=False)

    def with_status(self, status: str) -> list[LawResult]:
        """The results with this status."""
        return [result for result in self.results if result.status == status]

    @property
    def passed(self) -> list[LawResult]:
        """Laws that held in all calls."""
        return self.with_status("pass")

    @property
    def failed(self) -> list[LawResult]:
        """Laws that were violated, each with a counterexample."""
        return self.with_status("fail")

    @property
    def not_applicable(self) -> list[LawResult]:
        """Laws that could not run, each with the reason."""
        return self.with_status("not applicable")

    @property
    def ok(self) -> bool:
        """Whether no law fails."""
        return not self.failed

    def __str__(self) -> str:
        return self.render()

    def render(self, verbose: bool = False) -> str:
        """The table of results, and the first failure in full; all, if `verbose`.

        One bug may violate many laws, with programs that are nearly the same.
        """
        lines = [
            self.name,
            *(f"  {f.name}: {f.value} ({f.source})" for f in self.facts),
            "",
        ]
        for result in self.results:
            verdict = VERDICTS[result.status]
            detail = f"({result.detail})" if verdict == "skip" else result.detail
            lines.append(f"{result.law.name:24}{verdict:6}{detail}".rstrip())
        explained = self.failed if verbose else self.failed[:1]
        for result in explained:
            lines += ["", *explain(result)]
        if len(explained) < len(self.failed):
            others = len(self.failed) - 1
            lines += ["", f"the programs of {others} more: --verbose, or render(True)"]
        summary = (
            f"{len(self.passed)} passed, {len(self.failed)} failed, "
            f"{len(self.not_applicable)} skipped"
        )
        return "\n".join([*lines, "", summary])


def explain(result: LawResult) -> list[str]:
    """The lines of a report about a law that fails: statement, reason and program."""
    example = result.counterexample
    assert example is not None
    reason = textwrap.wrap(
        result.law.reason, 78, initial_indent="  ", subsequent_indent="  "
    )
    return [
        f"{result.law.name}: {result.law.statement}",
        *reason,
        "",
        textwrap.indent(str(example), "  "),
        "",
        textwrap.indent(example.code.rstrip(), "    "),
    ]


def size_grid(adapter: Adapter, thorough: bool) -> Iterator[Sizes]:
    """The sizes to run at; each pair of axes differs at one of them."""
    # Where the batch size equals the length, or the number of heads, a mask broadcasts
    # that should not.
    as_heads = max(2, min(adapter.heads, 8))
    lengths = [(2, 4, 5), (3, 3, 3), (as_heads, 1, 7), (1, 6, 4)]
    if thorough:
        lengths += [(1, 1, 1), (1, 2, 2), (4, 7, 19), (5, 5, 5)]
    for batch_size, q_len, k_len in lengths:
        heads, d_k = adapter.heads, adapter.d_k
        # One item, one head, and more queries than keys: cases with paths of their own.
        if batch_size == 1 and (adapter.free_heads or not adapter.fixed_size):
            heads = max(adapter.group_size, adapter.least_heads)
        elif batch_size == q_len and adapter.free_heads:
            heads = 3 * adapter.group_size
        if not adapter.cross_attention:
            q_len = k_len
        if "b" not in adapter.layout:
            batch_size = 1
        if adapter.fixed_length is not None:
            q_len = k_len = adapter.fixed_length
        if adapter.least_length > 1:
            k_len = max(k_len, adapter.least_length)
            q_len = q_len if adapter.cross_attention else k_len
        yield Sizes(batch_size, q_len, k_len, heads, d_k)


def smaller_sizes(sizes: Sizes, adapter: Adapter) -> Iterator[Sizes]:
    """Sizes with one of them reduced, or two equal ones; the largest steps first.

    Two equal sizes are reduced together, because the failure may need them equal.
    """
    names = ["batch_size", "k_len", "q_len"]
    names = names[:1] if adapter.fixed_length else names
    names = names if adapter.fixed_size else ["heads", "d_k", *names]
    pairs = [
        (a, b) for a in names for b in names if getattr(sizes, a) == getattr(sizes, b)
    ]
    for one, other in pairs:
        current = getattr(sizes, one)
        # Query heads come in groups that share keys and values. A rotation takes pairs
        # of features.
        step = adapter.group_size if "heads" in (one, other) else 1
        step *= 2 if "d_k" in (one, other) and adapter.positions == "rotary" else 1
        least = adapter.least_heads if "heads" in (one, other) else 1
        for n in dict.fromkeys((step, 2 * step, current - step)):
            if max(step, least) <= n < current:
                smaller = replace(sizes, **{one: n, other: n})
                if not adapter.cross_attention:
                    smaller = replace(smaller, q_len=smaller.k_len)
                if smaller != sizes:
                    yield smaller


def run_once(
    law: Law,
    adapter: Adapter,
    sizes: Sizes,
    options: Options,
    thorough: bool,
    insist: bool = False,
) -> None:
    """Run one law at one size; raises `LawViolation` or `NotApplicable`."""
    settings = {"thorough": thorough, "insist": insist, **options.script_options()}
    script = Script(adapter, sizes, **settings)
    try:
        law.test(script)
    except (LawViolation, NotApplicable):
        raise
    except ScriptError as failure:
        if not failure.is_call:
            reason = f"the check could not compute its reference ({failure})"
            raise NotApplicable(reason) from failure
        if is_refusal(failure, adapter) or exceeds_batch(script, failure):
            raise NotApplicable(f"refused: {first_line(failure.error)}") from failure
        code = script.program()
        raise LawViolation(f"raises {failure}", math.nan, 0.0, code) from failure
    except Exception as error:
        # A failure of the checker is no violation of a law.
        reason = f"the check itself failed: {type(error).__name__}: {first_line(error)}"
        raise NotApplicable(reason) from error


def exceeds_batch(script: Script, failure: ScriptError) -> bool:
    """Whether there are more batch items than a cache of the attention has room for."""
    limit = structure.largest_batch(script.namespace.get("attention"))
    return limit is not None and failure.batch_size > limit


def is_refusal(failure: ScriptError, adapter: Adapter) -> bool:
    """Whether the author of the attention refuses this input, in each mode alike.

    The exception is then raised by a `raise` or `assert` statement in their code. A
    `TypeError` that Python raises where `None` is indexed is a bug.
    """
    is_limited = adapter.fixed_length is not None or adapter.least_length > 1
    if is_limited and not failure.succeeded_before:
        return True
    if type(failure.error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return True  # a limit of `torch.compile`
    if "convolution" in adapter.designs and TOO_SHORT.search(str(failure.error)):
        return True
    if not isinstance(failure.error, REFUSALS) or failure.succeeded_before:
        return False
    last = failure.error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    is_raised = dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    is_torch = str(getattr(adapter.target, "__module__", "")).startswith("torch")
    in_torch = code.co_filename.startswith(TORCH_FOLDER)
    return is_raised and (is_torch or not in_torch)


def with_context(adapter: Adapter, options: Options) -> Adapter | None:
    """The same attention with the optional context that it attends to, if there is one.

    A mask is given if it hides keys of the context. All of a context is attended to,
    also where the attention to the tokens themselves is causal, unless it ends with
    these. What is projected of it may be kept in a cache.
    """
    if not adapter.single_input or adapter.required_mask is not None:
        return None
    for argument in names.optional_tensors(adapter):
        if names.CONTEXT_PATTERN.search(argument) and argument != adapter.memory:
            context = replace(
                adapter,
                inputs=(adapter.inputs[0], argument),
                by_keyword=True,
                cross_attention=True,
                masks=(),
                causal=False,
                window=None,
                cache=None,
                memory="",
            )
            script = Script(context, Sizes(2, 4, 5, adapter.heads, adapter.d_k))
            try:
                if is_context(script):
                    script.restart()
                    args = script.make_arguments()
                    if weighs_tokens_too(script, args):
                        return None
                    is_causal = ends_with_tokens(script, args)
                    if not is_causal and hides_context_as_future(script, args):
                        return None
                    found = replace(
                        context,
                        causal=is_causal,
                        cross_attention=not is_causal,
                        mixes_queries=queries_meet(script, args),
                        unused_parameters=unused_weights(script),
                        positions=positions_of_context(context),
                    )
                    if not is_causal:  # else, its last tokens are the queries, too
                        found = inferred_with(infer_masks, found, options)
                        # Those with an axis of queries may be of the tokens.
                        of_keys = (m for m in found.masks if "q" not in m.axes)
                        found = replace(found, masks=tuple(of_keys))
                    return with_cache_of(infer_context_cache, found, options)
            except ScriptError:
                continue
    return None


def ends_with_tokens(script: Script, args: CallArguments) -> bool:
    """Whether queries are the last tokens of the context, and do not see later ones."""
    first, last = {"l": slice(0, 1)}, {"l": slice(-1, None)}
    backward = influence(script, args, last, first)
    return backward < 1e-6 < influence(script, args, last, last)


def hides_context_as_future(script: Script, args: CallArguments) -> bool:
    """Whether a flag makes it causal, and a context, too, as only its tokens are meant.

    Another instance, built without the flag, is given a context.
    """
    first, last = {"l": slice(0, 1)}, {"l": slice(-1, None)}
    is_hidden = influence(script, args, last, first) < 1e-6
    return is_hidden and structure.is_built_causal(script.evaluate("attention"))


def weighs_tokens_too(script: Script, args: CallArguments) -> bool:
    """Whether returned weights are of the tokens of both inputs, as of a memory."""
    adapter = script.adapter
    if "k" not in adapter.weights_axes or not adapter.weights_source:
        return False
    weights = script.evaluate(script.call_for_weights(args))
    count: int = weights.shape[adapter.weights_axes.index("k")]
    return count == sum(args.allowed.shape[:2])


def positions_of_context(context: Adapter) -> str:
    """The positional encoding; "none" where the tokens of the context have none.

    Often only the tokens of self-attention are rotated.
    """
    script = Script(context, Sizes(2, 5, 5, context.heads, context.d_k))
    script.restart()
    is_order_seen = order_matters(script, script.make_arguments())
    return context.positions if is_order_seen else "none"


def of_queries(adapter: Adapter) -> tuple[Adapter, Adapter] | None:
    """A decoder's attention to its context, and that of its causal queries alone.

    For the latter, the context is the same in all calls and batch items. Its last two
    tokens are hidden, where a mask can hide them. A cache is that of the queries.
    """
    if not adapter.causal_queries:
        return None
    constants = {adapter.inputs[1]: context_of_all_items(adapter)}
    hidden = (torch.arange(CONTEXT_LENGTH) < CONTEXT_LENGTH - 2)[None, :, None]
    masks = [m for m in adapter.masks if m.kind != "causal" and {*m.axes} <= {*"bk1"}]
    for mask in masks:
        conversion = "{dtype}" if mask.kind.startswith("additive") else "{device}"
        text = expanded(mask.to_source(hidden), mask.axes) + conversion
        constants.setdefault(mask.name, text)
    required = adapter.required_mask
    alone = replace(
        adapter,
        inputs=adapter.inputs[:1],
        by_keyword=True,
        required_mask=None if required and required.name in constants else required,
        extra_args={**adapter.extra_args, **constants},
        decoder_context=adapter.inputs[1],
        context_masks=tuple({m.name: m for m in reversed(masks)}.values()),
        masks=(),
        causal=True,
        cross_attention=False,
        mixes_queries=False,
        weights_source="",  # those that are known are of the context
        weights_axes="",
    )
    return replace(adapter, cache=None), alone


Inference = Callable[[CallProbe], None]


def with_cache_of(infer: Inference, adapter: Adapter, options: Options) -> Adapter:
    """The attention with the cache that it takes of its past or context, if any."""
    if adapter.cache is None and options.cache is None and not options.call_args:
        return inferred_with(infer, adapter, options)
    return adapter


def inferred_with(infer: Inference, adapter: Adapter, options: Options) -> Adapter:
    """The attention with what this inference finds, if its calls succeed."""
    probe = CallProbe(adapter, options)
    with suppress(CallError, ScriptError):
        infer(probe)
    return probe.adapter


def unused_weights(script: Script) -> tuple[str, ...]:
    """The weights that this call leaves out, such as a bias of self-attention."""
    if not script.adapter.is_module:
        return ()
    script.restart()
    output = script.call(script.make_arguments())
    weights = script.evaluate("dict(attention.named_parameters())")
    if script.evaluate(output).requires_grad:
        script.exec_line(f"loss({output}).backward()")
    unused = [n for n, w in weights.items() if w.requires_grad and w.grad is None]
    return (*script.adapter.unused_parameters, *unused)


def infer_with_memory(
    attention: Any, name: str, imports: str, options: Options
) -> Adapter:
    """The adapter, with a memory that a method prepares if it cannot be called else.

    It may have to be built as self-attention or as one to a context.
    """
    try:
        return infer_adapter(attention, name, imports, options)
    except CallError:
        for each in kinds_of(attention, options):
            with suppress(CallError):
                adapter = infer_adapter(attention, name, imports, each)
                inferred = {"built as"} | ({"inputs"} if not options.inputs else set())
                facts = (
                    replace(f, source="inferred") if f.name in inferred else f
                    for f in adapter.facts
                )
                return replace(adapter, facts=tuple(facts))
        if not (method := prepare_method(attention)):
            raise
        lines = "from attention_laws.prepared import with_memory\n\n"
        lines += f"prepared = with_memory({name}, {method!r})\n"
        prepared = with_memory(attention, method)
        with suppress(CallError):
            return infer_adapter(prepared, "prepared", f"{imports}\n{lines}", options)
        raise


def with_prepared_memory(
    attention: Any, name: str, imports: str, options: Options, adapter: Adapter
) -> list[Adapter]:
    """Adapters of an attention to a context that takes what a method makes of it, too.

    Without a mask, both have the same outputs.
    """
    if adapter.single_input or not (method := prepare_method(attention)):
        return []
    found = []
    for taker in takers_of_memory(attention, method):
        prepared = with_memory(attention, method, taker)
        lines = "from attention_laws.prepared import with_memory\n\n"
        lines += f"prepared = with_memory({name}, {method!r}, {taker!r})\n"
        with suppress(CallError, ScriptError):
            each = infer_adapter(prepared, "prepared", f"{imports}\n{lines}", options)
            each = replace(each, masks=adapter.masks)
            script = Script(each, Sizes(2, 4, 5, each.heads, each.d_k))
            script.restart()
            args = script.make_arguments()
            both = script.call(args), script.call(args, function="attention.unprepared")
            if script.evaluate(f"torch.allclose({', '.join(both)}, atol=1e-4)"):
                found.append(each)
    return found


def kinds_of(attention: Any, options: Options) -> list[Options]:
    """Options with which it is built as self-attention, or as one to a context.

    Self-attention takes a query only, unless other inputs are required.
    """
    parameters = names.parameters_of(attention)
    flags = [f for f in names.kind_flags(attention) if f not in options.init_args]
    kinds = [replace(options, init_args={**options.init_args, f: True}) for f in flags]
    required = [p.name for p in parameters[1:] if p.default is p.empty]
    is_one = len(parameters) > 0 and not required
    return [
        replace(kind, inputs=kind.inputs or (parameters[0].name,))
        if is_one and "self" in flag
        else kind
        for flag, kind in zip(flags, kinds, strict=True)
    ]


def with_context_cache(
    attention: Any, name: str, imports: str, options: Options, adapter: Adapter
) -> list[Adapter]:
    """Adapters that keep what they project of a context, or take what a method does."""
    kinds = []
    for each in kinds_of(attention, options):
        with suppress(CallError):
            kinds.append(infer_adapter(attention, name, imports, each))
    prepared = with_prepared_memory(attention, name, imports, options, adapter)
    return [*(kind for kind in kinds if kind.context_cache), *prepared]


def with_weights(
    attention: Any, name: str, imports: str, options: Options
) -> list[Adapter]:
    """Adapters of an attention that returns its weights if it is built with a flag."""
    if not isinstance(attention, type) or options.weights:
        return []
    parameters = inspect.signature(attention).parameters.values()
    found = []
    for flag in names.flags_of_weights(parameters, False, options.init_args):
        init_args = {**options.init_args, flag: True}
        with suppress(CallError):
            each = replace(options, init_args=init_args)
            found.append(infer_adapter(attention, name, imports, each))
    return [adapter for adapter in found if adapter.weights_source]


def with_required_context(adapter: Adapter, options: Options) -> Adapter:
    """The same attention with the tensor that it requires and attends to, if any."""
    if not adapter.single_input or options.inputs or adapter.image:
        return adapter
    if adapter.masked_context is not None:
        return with_masked_context(adapter, options)
    filled = adapter.filled
    if len(filled) != 1:
        return adapter
    inputs = (*adapter.inputs, *filled)
    rest = {n: t for n, t in adapter.extra_args.items() if n not in filled}
    context = replace(
        adapter,
        inputs=inputs,
        by_keyword=True,
        cross_attention=True,
        masks=(),
        extra_args=rest,
    )
    sizes = Sizes(2, 4, 5, adapter.heads, adapter.d_k)
    # Where no token of the one input influenced another, its layout was not seen.
    for layout in dict.fromkeys((adapter.layout, "bld")):
        with suppress(ScriptError, CallError, TypeError):
            if is_context(Script(replace(context, layout=layout), sizes)):
                return infer_with_inputs(adapter, options, inputs)
    return adapter  # it is something else


def with_masked_context(adapter: Adapter, options: Options) -> Adapter:
    """The same attention with a context, if it takes one, and its mask is of that."""
    assert adapter.masked_context is not None
    argument, mask = adapter.masked_context
    try:
        found = infer_with_inputs(adapter, options, (*adapter.inputs, argument))
    except CallError:
        masks = (each for each in adapter.masks if each.name != mask)
        facts = (fact for fact in adapter.facts if fact.name != f"`{mask}`")
        return replace(adapter, masks=tuple(masks), facts=tuple(facts))
    return found if mask in {each.name for each in found.masks} else adapter


def infer_with_inputs(
    adapter: Adapter, options: Options, inputs: tuple[str, ...]
) -> Adapter:
    """The same attention with other inputs, which are shown as inferred."""
    stated = replace(options, inputs=inputs)
    found = infer_adapter(adapter.target, adapter.name, adapter.imports, stated)
    facts = [
        replace(f, source="inferred") if f.name == "inputs" else f for f in found.facts
    ]
    return replace(found, facts=tuple(facts))


def is_context(script: Script) -> bool:
    """Whether the output depends on the second input, and not on other queries.

    It does on both where keys are made of both inputs.
    """
    script.restart()
    args = script.make_arguments()
    before, after = script.call(args), script.call(script.perturb(args))
    query = script.assign("query", f"-{args.inputs[0]}")
    first = script.adapter.index(l=slice(0, 1))
    script.exec_line(f"{query}{first} = {args.inputs[0]}{first}")
    alone = script.call(replace(args, inputs=(query, args.inputs[1])))
    is_used = not script.evaluate(f"torch.equal({before}, {after})")
    claim = f"torch.allclose({before}{first}, {alone}{first}, atol=1e-3)"
    return is_used and bool(script.evaluate(claim))


def check_law(
    law: Law, adapter: Adapter, options: Options, thorough: bool, insist: bool = False
) -> LawResult:
    """Run one law at all sizes, and shrink the first counterexample.

    `insist` reports a violation even where the design may explain it.
    """

    def attempt(sizes: Sizes) -> None:
        try:
            run_once(law, adapter, sizes, options, thorough, insist)
        except LawViolation as violation:
            if not may_be_rounding(violation, options):
                raise
            exact = replace(options, dtype=torch.float64)
            if not is_rounding(violation, law, adapter, sizes, exact, thorough, insist):
                raise

    start = time.perf_counter()
    reason, passed = "", False
    found: tuple[Sizes, LawViolation] | None = None
    for sizes in size_grid(adapter, thorough):
        try:
            attempt(sizes)
            passed = True
        except NotApplicable as refusal:
            reason = reason or str(refusal)
            if isinstance(refusal, Excused) or law.slow:
                break
            continue
        except LawViolation as violation:
            # A wrong output is more informative than an exception: try other sizes,
            # too.
            is_wrong_output = not violation.message.startswith("raises ")
            if found is None or is_wrong_output:
                found = sizes, violation
            if is_wrong_output:
                break
        if law.slow:
            break
    seconds = time.perf_counter() - start

    excuse = next((adapter.designs[d] for d in law.assumes if d in adapter.designs), "")
    if found is not None and excuse and not insist:
        reason = (
            f"its code has `{excuse}`, so it may be attention of another design; to "
            f"insist, use `only`"
        )
        return LawResult(law, "not applicable", reason, seconds=seconds)
    if found is not None:
        runs = SLOW_SHRINKING_RUNS if law.slow else SHRINKING_RUNS
        sizes, smallest = shrink(attempt, *found, adapter, runs)
        example = Counterexample(
            smallest.sizes or sizes,
            smallest.message,
            smallest.difference,
            smallest.tolerance,
            smallest.code,
        )
        return LawResult(law, "fail", smallest.message, example, seconds)
    if passed:
        return LawResult(law, "pass", seconds=seconds)
    return LawResult(law, "not applicable", reason, seconds=seconds)


def may_be_rounding(violation: LawViolation, options: Options) -> bool:
    """Whether a difference is so small that float64 is to decide.

    Large scores amplify rounding: the last digit of a score of 200 in float32 is 1e-5.
    """
    largest = ROUNDING_TOLERANCES * violation.tolerance
    return options.dtype == torch.float32 and 0 < violation.difference < largest


def is_rounding(violation: LawViolation, law: Law, *run: Any) -> bool:
    """Whether a violation in float32 is none in float64, or rounding there, too.

    Rounding to float32 is 2**29 times as large, and what is wrong about as large.
    """
    try:
        run_once(law, *run)
    except NotApplicable:
        return False
    except LawViolation as exact:
        found, same = (re.sub(r"[\d, ]", "", v.message) for v in (exact, violation))
        return found == same and exact.difference < 1e-6 * violation.difference
    return True


def shrink(
    attempt: Callable[[Sizes], None],
    sizes: Sizes,
    violation: LawViolation,
    adapter: Adapter,
    runs: int,
) -> tuple[Sizes, LawViolation]:
    """Reduce one size after the other, as long as the law fails in the same way.

    That is in at most this number of `runs`.
    """
    progress = True
    while progress:
        progress = False
        for smaller in smaller_sizes(sizes, adapter):
            if runs == 0:
                break
            runs -= 1
            try:
                attempt(smaller)
            except LawViolation as still:
                if kind_of(still) == kind_of(violation):
                    sizes, violation, progress = smaller, still, True
                    break
            except Exception:
                # The implementation, or the test, cannot run at this size.
                continue
    return sizes, violation


def kind_of(violation: LawViolation) -> str:
    """The exception that was raised, without sizes; else, the first word."""
    is_exception = violation.message.startswith("raises ")
    words = violation.message if is_exception else violation.message.split()[0]
    return re.sub(r"\d+", "", words)


def import_line(attention: Any, name: str) -> str:
    """The line that imports the implementation, if it is an attribute of a module."""
    module = getattr(attention, "__module__", None)
    if (
        getattr(sys.modules.get(module or ""), name, None) is attention
        and module != "__main__"
    ):
        return f"from {module} import {name}\n"
    return f"# `{name}` is the attention that was checked.\n"


def build_by_function(function: Any, stated: Options) -> tuple[nn.Module, str] | None:
    """The module that a function of sizes builds, and the lines that build it.

    None where its required arguments are not sizes or a config, or where it builds no
    module.
    """
    if not inspect.isfunction(function):
        return None
    parameters = inspect.signature(function).parameters
    required = required_by_name(parameters.values())
    values = argument_values(dict.fromkeys(required, True))
    heads, d_k = stated.heads or 3, 4
    sizes = {
        "d_model": stated.d_model or heads * d_k,
        "heads": heads,
        "kv_heads": stated.kv_heads or heads,
        "d_k": stated.d_model // heads if stated.d_model else d_k,
        "window": stated.window or 4,
    }
    # A width by default fits heads that no argument sets.
    has_heads = {"{heads}", "{kv_heads}"} & {*values.values()} or stated.d_model
    replaced = ("{heads}", "{kv_heads}", *(["{d_model}"] if has_heads else []))
    given = {name: repr(value) for name, value in stated.init_args.items()}
    namespace: dict[str, Any] = {}
    for name, is_required in required.items():
        if name in given:
            continue
        config = configs.config_source(function, parameters[name])
        if config is not None and (is_required or name == "config"):
            given[name] = config[0].format(**sizes)
            namespace |= config[1]
        elif is_required or values[name] in replaced:
            given[name] = values[name].format(**sizes)
    is_sized = any(
        values[name] == "{d_model}" or names.CONFIG_PATTERN.search(name)
        for name in required
    )
    if not (is_sized or not required) or not all(given.values()):
        return None
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    with suppress(Exception):
        scope = {"function": function, "torch": torch, **namespace}
        built = eval(f"function({text})", scope)
        if isinstance(built, nn.Module):
            lines = "".join(map(names.import_source, namespace.values()))
            return built, f"{lines}built = {function.__name__}({text})\n"
    return None


def callable_module(attention: Any, name: str, stated: Options) -> tuple[Any, str, str]:
    """The attention, its name, and the lines that make it of one of another kind.

    That is a function that builds a module, or one that decodes.
    """
    if (built := build_by_function(attention, stated)) is not None:
        return built[0], "built", built[1]
    if (wrapper := wrapper_of(attention)) is not None:
        imported = f"from {wrapper.__module__} import {wrapper.__name__}\n\n"
        lines = f"\n{imported}built = {wrapper.__name__}({name})\n"
        return wrapper(attention), "built", lines
    return attention, name, ""


def validate_law_names(option: str, names: str | Iterable[str]) -> list[str]:
    """Names of laws, one or several; raises `ValueError` for an unknown one."""
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Iterable):
        raise ValueError(f"`{option}` (={names!r}) must be names of laws")
    names = list(names)
    for unknown in (name for name in names if name not in [*LAWS]):
        raise ValueError(
            f"`{option}` names {unknown!r}, which is not a law; "
            f"{did_you_mean(str(unknown), LAWS, 'the laws are')}"
        )
    return names


def validate_attention(attention: Any) -> None:
    """Raise `CallError` unless it is a module class, a module, or a function."""
    if not callable(attention):
        raise CallError(
            f"`attention` (={attention!r}) cannot be called; give a module class, a "
            f"module, or a function"
        )
    if isinstance(attention, type) and not issubclass(attention, nn.Module):
        raise CallError(
            f"`{attention.__name__}` is a class, but not of modules; give an instance "
            f"that can be called, or a function"
        )


def wrapper_of(attention: Any) -> Callable[[Any], Any] | None:
    """What makes attention to sequences of a function that decodes, if it is one."""
    if takes_pages(attention):
        return over_pages
    if takes_steps(attention):
        return over_steps
    if takes_caches(attention):
        return over_caches
    return over_queries if takes_one_query(attention) else None


@contextmanager
def quiet() -> Iterator[None]:
    """Show neither warnings nor what an attention prints."""
    with warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()):
        yield


@contextmanager
def undisturbed(attention: Any, seed: int) -> Iterator[None]:
    """Nothing is shown, and results depend on the code and the seed only."""
    with (
        quiet(),
        right_convolutions(attention),
        without_trace_log(),
        seeded_generators(seed),
    ):
        yield


@contextmanager
def right_convolutions(attention: Any) -> Iterator[None]:
    """Compute convolutions with PyTorch's own kernels, if there are any.

    Those of oneDNN in PyTorch 2.13 are wrong in bfloat16, on processors with AMX.
    """
    named = structure.identifiers(attention)
    has_convolution = any(re.match(r"conv\d", name, re.IGNORECASE) for name in named)
    flags = torch.backends.mkldnn.flags
    with flags(enabled=False) if has_convolution else nullcontext():
        yield


@contextmanager
def without_trace_log() -> Iterator[None]:
    """Leave PyTorch's trace of its compiler out of the logs.

    pytest attaches its own handlers to that logger, too, and would print each line.
    """
    logger = logging.getLogger("torch.__trace")
    handlers, logger.handlers = logger.handlers, []
    try:
        yield
    finally:
        logger.handlers = handlers


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed the generators of PyTorch, Python and NumPy, and restore them at the end."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(seed)
        stack.callback(random.setstate, random.getstate())
        random.seed(seed)
        if (of_numpy := sys.modules.get("numpy.random")) is not None:
            stack.callback(of_numpy.set_state, of_numpy.get_state())
            of_numpy.seed(seed)
        yield


def check(
    attention: Any,
    *,
    only: str | Iterable[str] = (),
    skip: str | Iterable[str] = (),
    thorough: bool = False,
    name: str = "",
    imports: str = "",
    progress: Callable[[int, int, str], None] | None = None,
    **options: Any,
) -> Report:
    r"""Run all laws on `attention`, or those in `only`, without those in `skip`.

    `attention` is a module class, a module, a function, or a function of sizes that
    builds a module; it is not modified. `thorough` runs at more sizes, and compiles
    with the default backend. A strict law runs only if `only` names it. `name` is the
    name of the implementation in counterexamples, and `imports` the lines that import
    it there. `progress` is called before each law with the number of finished laws, the
    number of all laws, and the name of the law. All other keyword arguments are
    `Options`, which replace what is otherwise inferred.

    Raises `CallError`, a `ValueError`, where no way to call `attention` was found.

    >>> laws = ["causality", "fully_masked_rows"]
    >>> report = check(torch.nn.MultiheadAttention, only=laws)
    >>> [result.law.name for result in report.failed]
    ['fully_masked_rows']
    >>> print(report.failed[0].counterexample)
    the output of a fully masked row is NaN or infinite
    at batch_size=1, q_len=1, k_len=1, heads=1, d_k=1
    """
    validate_attention(attention)
    stated = Options(**options)
    only = validate_law_names("only", only)
    skip = validate_law_names("skip", skip)
    chosen = [LAWS[name] for name in only] if only else list(LAWS.values())
    results = []
    stdout = sys.stdout
    with undisturbed(attention, stated.seed):
        name = name or getattr(attention, "__name__", "")
        name = name if name.isidentifier() else "my_attention"
        imports = imports or import_line(attention, name)
        attention, source_name, lines = callable_module(attention, name, stated)
        imports += lines
        if lines and isinstance(attention, nn.Module):
            stated = replace(stated, init_args={})
        adapter = infer_with_memory(attention, source_name, imports, stated)
        adapter = with_required_context(adapter, stated)
        context = with_context(adapter, stated)
        adapters = [adapter] if context is None else [adapter, context]
        if (both := of_queries(adapter)) is not None:
            adapters = [both[0], with_cache_of(infer_cache, both[1], stated)]
        given = attention, source_name, imports, stated
        returning: list[Adapter] | None = None
        for n, law in enumerate(chosen):
            if progress is not None:
                with redirect_stdout(stdout):
                    progress(n, len(chosen), law.name)
            if law.name in skip:
                results.append(LawResult(law, "not applicable", "skipped on request"))
            elif law.strict and not only:
                detail = "strict: runs with `only`"
                results.append(LawResult(law, "not applicable", detail))
            else:
                insist, each_of = law.name in only, [*adapters]
                if law is decoding.incremental_decoding:
                    each_of[:1] = caches_apart(adapters[0])
                    each_of += with_context_cache(*given, adapter)
                elif law.name in LAWS_OF_WEIGHTS and not adapter.weights_source:
                    returning = with_weights(*given) if returning is None else returning
                    each_of += returning
                elif law is execution.compiled and both is not None:
                    del each_of[1:]  # which makes the same call
                found = [
                    check_law(law, each, stated, thorough, insist) for each in each_of
                ]
                results.append(min(found, key=lambda r: STATUSES.index(r.status)))
        model = None if only else model_around(adapter, stated, results)
    return Report(name, adapter.facts, tuple(results), model)


def model_around(
    adapter: Adapter, options: Options, results: Iterable[LawResult]
) -> tuple[nn.Module, str, str] | None:
    """The model with attentions in it that was checked, if their formula was not.

    What an option says of the model may not be true of them.
    """
    if any(r.law is algebra.formula and r.status != "not applicable" for r in results):
        return None
    is_wrapped = takes_ids(adapter.target) or takes_patches(adapter.target)
    if is_wrapped or not isinstance(adapter.target, type):
        return None  # its attentions are checked as those of a model
    of_run = {n: getattr(options, n) for n in ("init_args", "dtype", "device", "seed")}
    if options != Options(**of_run) or not is_model_around(adapter, options):
        return None
    source = adapter.build_expression(Sizes(2, 5, 5, adapter.heads, adapter.d_k))
    model = built_by(CallProbe(adapter, options), source)
    within = structure.paths_of_attention(model)
    return (model, source, adapter.imports) if within else None
