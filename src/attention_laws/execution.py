r"""# Laws of execution

The same attention is trained and evaluated, in float32 and in half precision, eagerly
and compiled, saved and loaded. None of this may change what it computes, beyond stated
tolerances.

Source: the behavior is that of [PyTorch's
modules](https://docs.pytorch.org/docs/stable/notes/modules.html).
"""

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from attention_laws import caches, documented, names, structure
from attention_laws.adapter import MaskArgument, without_future
from attention_laws.embedded import TakesVectors, takes_ids
from attention_laws.law import (
    Excused,
    LawViolation,
    NotApplicable,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.patches import TakesPatches
from attention_laws.recorders import CalledFunctions, Squares, WeightsRecorder
from attention_laws.script import CONTEXTS, CallArguments, Script
from attention_laws.shared_caches import shared_caches
from attention_laws.source import source_of

# Tokens added for a long sequence, beyond the usual sizes of blocks.
LONG = 256

# The width of heads in one test only.
OTHER_WIDTH = 32


@law
def eval_matches_train(script: Script) -> None:
    r"""Evaluation computes the same as training with dropout 0.

    $$y_{\text{eval}} = y_{\text{train}}\big|_{p = 0}$$

    If a mask, a scale or a fast path is active in one of the two modes only, the model
    that is evaluated was never trained. Evaluation runs with dropout 0.5 configured;
    training runs with dropout 0. Both run with and without recording gradients, and so
    does a function; with two masks at once, and in images of many columns, too. A
    flag for causal attention acts alike there, and beside dropout and returned weights.
    """
    is_module = script.adapter.is_module
    is_known = not is_module or script.adapter.reproducible_training
    skip_unless(is_known, "training is random even with dropout 0")
    # A path for one mode may drop padding by its length, wherever it is.
    cases = [*script.mask_cases(), *script.padding_cases(slice(1, 2))]
    for allowed, mask in cases:
        if not is_module:
            script.restart()
            assert_contexts_agree(script, script.make_arguments(allowed, mask))
            continue
        assert_modes_agree(script, allowed, mask)
    if is_module:
        assert_modes_agree_with_two_masks(script)
        assert_scales_are_limited_alike(script)
        assert_large_image_is_alike(script)
    assert_flags_act_alike(script)


# The side of a square image, with more columns than many chunks have.
LARGE_SIDE = 24


def assert_large_image_is_alike(script: Script) -> None:
    """The modes agree on an image of many rows and columns, too."""
    adapter, count = script.adapter, LARGE_SIDE**2
    is_free = adapter.image.startswith("image") and adapter.fixed_length is None
    if not is_free or script.sizes.batch_size != 2:
        return
    large = replace(adapter, image_height=LARGE_SIDE)
    # It may have a table for less.
    with script.using(large, batch_size=1, q_len=count, k_len=count), script.attempt():
        assert_modes_agree(script)


def assert_modes_agree_with_two_masks(script: Script) -> None:
    """The modes agree with a mask or a bias of the scores and one for padding, too.

    A path that takes one of them only may leave out the other.
    """
    of_scores = [
        mask
        for mask in script.adapter.masks
        if mask.kind.startswith("additive") or "qk" in mask.axes
    ]
    for other in of_scores if script.adapter.single_input else ():
        for allowed, mask in script.padding_cases(slice(-1, None)):
            if mask is None or mask.name == other.name:
                continue
            both = without_future(script.all_allowed())
            if not other.can_express(both):
                both = script.all_allowed()
            text = script.mask_source(both, other)
            with script.attempt():  # they may exclude each other
                assert_modes_agree(script, allowed, mask, given={other.name: text})


def assert_modes_agree(
    script: Script,
    allowed: Tensor | None = None,
    mask: MaskArgument | None = None,
    scales: Sequence[str] = (),
    given: Mapping[str, str] | None = None,
) -> None:
    """Evaluation and training give the same, with and without recorded gradients.

    The parameters that are `scales` are large. Other arguments may be `given`.
    """
    more = given or {}
    script.restart("eval", dropout=0.5)
    for name in scales:
        script.exec_line(f"attention.get_parameter({name!r}).data.fill_(6.0)")
    args = script.make_arguments(allowed, mask)
    outputs = {"": script.call(args, **more)}
    for context in CONTEXTS.values():
        script.context = context
        outputs[f" under {context}"] = script.call(args, **more)
    script.context = ""
    with script.attempt():
        needing = [script.assign(n, f"{n}.clone()") for n in args.inputs]
        for name in needing:
            script.exec_line(f"{name}.requires_grad_()")
        outputs[" if its inputs require gradients"] = script.assign(
            "y", f"{script.call(replace(args, inputs=tuple(needing)), **more)}.detach()"
        )
    script.exec_line("set_dropout(attention, 0.0)")
    script.exec_line("attention.train()")
    trained = script.call(args, **more)
    script.context = CONTEXTS["no_grad"]
    unrecorded = script.call(args, **more)
    script.context = ""
    for where, output in outputs.items():
        message = f"the output at {{place}} differs in evaluation{where}"
        script.assert_close(trained, output, message)
    message = "the output at {place} differs in training under torch.no_grad()"
    script.assert_close(trained, unrecorded, message)


def assert_scales_are_limited_alike(script: Script) -> None:
    """A learned scale of the scores has the same upper limit in all modes.

    It is that of Swin Transformer V2, whose logarithm is at most that of 100.
    """
    script.restart()
    parameters = script.evaluate("attention").named_parameters()
    scales = [n for n, p in parameters if LEARNED_SCALE_PATTERN.search(n)]
    if scales and script.adapter.reproducible_training:
        assert_modes_agree(script, scales=scales)


def assert_contexts_agree(
    script: Script, args: CallArguments, given: Mapping[str, str] | None = None
) -> None:
    """A call gives the same output where no gradients are recorded."""
    given = given or {}
    usual = script.call(args, **given)
    for context in CONTEXTS.values():
        script.context = context
        seen = script.call(args, **given)
        script.context = ""
        message = f"the output at {{place}} differs under {context}"
        if given:
            message += f" with {names_of(given)}"
        script.assert_close(usual, seen, message)


def assert_flags_act_alike(script: Script) -> None:
    """A flag for causal attention acts with dropout, and with weights, as without.

    Both may be reasons to leave a fused kernel, which hides the future itself. So may
    be that no gradients are recorded. Of more queries than keys, some might see none.
    """
    q_len, k_len = script.sizes.q_len, script.sizes.k_len
    for parameter in names.parameters_of(script.adapter.target):
        name = parameter.name
        if parameter.default is not False or "causal" not in name:
            continue
        script.restart("eval", dropout=0.0)
        args = script.make_arguments(script.all_allowed(min(q_len, k_len), k_len))
        with script.attempt():  # it may need another argument
            assert_contexts_agree(script, args, {name: "True"})
            if not script.adapter.is_module:
                continue
            expected = script.call(args, **{name: "True"})
            for given in names.weights_flags(script.adapter):
                seen = script.call(args, **{name: "True"}, **given)
                message = f"{{place}} differs with `{name}` and {names_of(given)}"
                script.assert_close(expected, seen, message)
            script.exec_line("set_dropout(attention, 0.5)")
            seen = script.call(args, **{name: "True"})
            message = f"in evaluation, {{place}} differs with `{name}` and dropout 0.5"
            script.assert_close(expected, seen, message)


@law
def deterministic(script: Script) -> None:
    r"""Two evaluations give the same output.

    $$y_{\text{eval}} = y_{\text{eval}}$$

    `eval` switches dropout layers off, but not a dropout probability that the module
    passes to a function: it has to pass 0 itself. Nor may a later call write to the
    output of an earlier one, or a call that returns the weights have another output
    than one that does not.
    """
    for allowed, mask in script.mask_cases():
        script.restart("eval", dropout=0.5)
        args = script.make_arguments(allowed, mask)
        one, other = script.call(args), script.call(args)
        message = "two calls in evaluation differ at {place}"
        script.assert_close(one, other, message, relative=0.0)
        for given in names.weights_flags(script.adapter):
            shown = script.call(args, **given)
            message = f"{{place}} differs with {names_of(given)}"
            script.assert_close(one, shown, message)
        before = script.assign("before", f"{one}.clone()")
        inputs = [script.assign(n, f"-2 * {n}") for n in args.inputs]
        script.call(replace(args, inputs=tuple(inputs)))
        message = "an output changes at {place} by a later call"
        script.assert_close(before, one, message, relative=0.0)


def names_of(given: Mapping[str, str]) -> str:
    """Arguments as they are written in a call."""
    return ", ".join(f"`{name}={text}`" for name, text in given.items())


@law
def memory_layout(script: Script) -> None:
    r"""Where the numbers of an input are in memory does not matter.

    $$y(x) = y(\mathrm{contiguous}(x))$$

    A slice or a transposed tensor has gaps in memory, or another order. Code that reads
    memory in order, as a kernel or `as_strided` does, has to make a copy, or to refuse
    such an input. Nor does it matter whether two inputs are one tensor: some code has a
    path of its own for self-attention, with one product for all projections.
    """
    if script.adapter.cross_attention or len(script.adapter.inputs) == 3:
        assert_same_as_copies(script)
    for allowed, mask in script.mask_cases():
        script.restart()
        args = script.make_arguments(allowed, mask)
        usual = script.call(args)
        inputs = [
            script.assign(name, f"torch.stack([{name}, {name}], -1)[..., 0]")
            for name in args.inputs
        ]
        try:
            apart = script.call(replace(args, inputs=tuple(inputs)))
        except ScriptError as failure:
            raise NotApplicable("requires contiguous inputs") from failure
        message = "{place} differs if the inputs are not contiguous"
        script.assert_close(usual, apart, message)


def assert_same_as_copies(script: Script) -> None:
    """One tensor given as several inputs gives the same output as its copies."""
    length, roles = script.sizes.k_len, [*range(len(script.adapter.inputs))]
    for same in [roles, roles[:2], roles[1:]] if len(roles) == 3 else [roles]:
        script.restart()
        args = script.make_arguments(script.all_allowed(length, length))
        shapes = {script.evaluate(args.inputs[role]).shape for role in same}
        if len(shapes) > 1:
            continue
        one, inputs = args.inputs[same[0]], [*args.inputs]
        for role in same[1:]:
            inputs[role] = script.assign(inputs[role], f"{one}.clone()")
        with script.attempt():  # it may refuse as many queries as keys
            expected = script.call(replace(args, inputs=tuple(inputs)))
            inputs = [one if role in same else n for role, n in enumerate(args.inputs)]
            seen = script.call(replace(args, inputs=tuple(inputs)))
            text = ", ".join(script.adapter.inputs[role] for role in same)
            message = f"{{place}} differs if {text} are one tensor, and no copies of it"
            script.assert_close(expected, seen, message)


# What has not been called, as source text: a function has the caches of its file only.
COPY = "copy.deepcopy({})"


@law(slow=True)
def earlier_calls(script: Script) -> None:
    r"""What was called before does not change the output.

    $$y(x \mid x') = y(x)$$

    Masks and tables of positions are often stored for the next call. Stored for another
    length, batch size, mask, option or mode, or for other ids of padding, they are
    wrong without an error. A copy of the attention that was never called must give the
    same outputs, and so must one after a method such as `reset`. Nor may they change
    when another instance is built. A function may store them in its file; without these
    it must give the same outputs.
    """
    adapter, k_len = script.adapter, script.sizes.k_len
    copy_of = COPY if adapter.is_module else "uncached({})"
    if not adapter.is_module:
        has_state = shared_caches(adapter.target)
        skip_unless(has_state, "is a function, and has no state")
    padded = script.all_allowed(k_len if adapter.single_input else None)
    padded[:, k_len - 1 :, 0] = False
    masks: list[MaskArgument | None] = [
        mask for mask in script.masks_for(padded) if mask and k_len > 1
    ]
    # Generation runs without gradients, and is where most caches are: there each mask
    # is tried, and with gradients the first.
    masks = masks or [None]
    for mode, tried in ((script.modes()[-1], masks[:1]), ("no_grad", masks)):
        for mask in tried:
            script.restart(mode)
            script.exec_line(f"unused = {copy_of.format('attention')}")
            first = script.make_arguments(padded if mask else None, mask)
            for args in [first, *other_calls(script, first, padded, mask), first]:
                script.exec_line(f"fresh = {copy_of.format('unused')}")
                try:
                    expected = script.call(args, function="fresh")
                except ScriptError:
                    continue  # a size that it does not accept, called before or not
                seen = script.call(args)
                if script.evaluate(f"{expected}.isnan().any()"):  # it sees no key
                    expected, seen = (f"{y}.nan_to_num()" for y in (expected, seen))
                message = "{place} changes after other calls"
                queries = script.real_queries(args)
                script.assert_close(expected, seen, message, l=queries)
    if not adapter.is_module:
        assert_no_option_is_kept(script, copy_of)
        return
    assert_reset_forgets(script)
    if adapter.reset and adapter.cross_attention:
        assert_context_is_noticed(script)
    assert_no_option_is_kept(script)
    assert_no_integer_is_kept(script)
    assert_no_weight_is_kept(script)
    assert_loaded_weights_are_used(script)
    if isinstance(adapter.target, type):
        assert_nothing_is_shared(script)
        assert_no_long_call_is_kept(script)
    if adapter.image or adapter.gets_sides:
        assert_no_shape_is_kept(script)
    if adapter.layout == "bhld" and adapter.single_input:
        assert_no_sides_are_kept(script)
    if script.dtype == torch.float32:
        assert_no_dtype_is_kept(script)
        assert_trees_are_of_call(script)
    if adapter.reproducible_training:
        assert_no_mode_is_kept(script)


def other_calls(
    script: Script, first: CallArguments, padded: Tensor, mask: MaskArgument | None
) -> Iterator[CallArguments]:
    """Arguments like `first`, with other content, masks and sizes."""
    adapter = script.adapter
    yield script.make_arguments(padded if mask else None, mask)
    if mask is not None:
        # As many hidden keys, of another item.
        yield script.make_arguments(padded.flip(2), mask)
    if mask is not None and adapter.required_mask is None:
        yield replace(first, mask=None, allowed=torch.ones_like(padded))
    yield replace(first, mask=script.encode_mask(torch.ones_like(padded), mask))
    if not adapter.causal and padded.shape[0] == padded.shape[1] > 1:
        causal = without_future(torch.ones_like(padded))
        for other in script.masks_for(causal):
            encoded = script.encode_mask(causal, other)
            yield replace(first, mask=encoded, allowed=causal)
    q_len, k_len = padded.shape[:2]
    if adapter.cross_attention and adapter.fixed_length is None:
        # What is stored for the number of keys may be that of other queries.
        yield script.make_arguments(script.all_allowed(q_len + 1, k_len))
    for batch_size, length in ((1, 0), (3, -1), (3, 2), (2, 1 - k_len), (1, LONG)):
        change = 0 if adapter.fixed_length else max(length, 1 - k_len)
        items = batch_size if "b" in adapter.layout else script.sizes.batch_size
        more_queries = change if adapter.single_input or adapter.causal else 0
        with script.using(batch_size=items):
            allowed = script.all_allowed(q_len + more_queries, k_len + change)
            # A long sequence fills tables; a mask of its size would be long to write.
            is_free = mask and not mask.counts_keys and not mask.at_end
            hides = is_free and 1 < k_len + change < LONG
            allowed[:, :1, 0] = not hides
            yield script.make_arguments(allowed, mask if length < LONG else None)


def assert_no_shape_is_kept(script: Script) -> None:
    """An image is not taken for one of as many pixels with another height.

    Nor is one of several windows, of which the one that was found may be one.
    """
    adapter = script.adapter
    side = math.isqrt(adapter.fixed_length or 0)
    shapes = [(2, 12), (3, 12), (6, 12), (8, 128)]
    for height, number in [*shapes, (side, 2 * side**2)] if side else shapes:
        image = replace(adapter, fixed_length=None, image_height=number // height)
        with script.using(image, q_len=number, k_len=number):
            script.restart("no_grad")
            script.exec_line("unused = copy.deepcopy(attention)")
            args = script.make_arguments()
            with script.attempt():  # it may take no such image, nor the next one
                script.call(args)
            script.adapter = replace(image, image_height=height)
            script.exec_line("fresh = copy.deepcopy(unused)")
            with script.attempt():  # it may take no such image
                expected = script.call(args, function="fresh")
                seen = script.call(args)
                message = "{place} changes after a call with an image of another shape"
                script.assert_close(expected, seen, message)


def assert_no_sides_are_kept(script: Script) -> None:
    """An input of four axes may be an image: its sides are exchanged after a call.

    One with an embedding of its patches takes heads for channels.
    """
    length = 3 * script.sizes.d_k
    with script.using(q_len=length, k_len=length):
        script.restart("no_grad")
        script.exec_line("fresh = copy.deepcopy(attention)")
        with script.attempt():  # it may take no such image
            args = script.make_arguments()
            script.call(args)
            other = script.assign(args.inputs[0], f"{args.inputs[0]}.mT.contiguous()")
            exchanged = replace(args, inputs=(other,))
            expected = script.call(exchanged, function="fresh")
            seen = script.call(exchanged)
            message = (
                "{place} changes after a call with an input whose sides are exchanged"
            )
            script.assert_close(expected, seen, message)


# Methods that begin a new sequence, or a new batch of them.
def assert_reset_forgets(script: Script) -> None:
    """After a method named `reset` or `clear_cache`, it answers as a new one does.

    Flags such as `incremental` are set, with which it stores what it has computed.
    """
    adapter, target = script.adapter, script.adapter.target
    steps = next(caches.cache_steps(names.parameters_of(target), {}), {})
    flags = {name: text for name, text in steps.items() if text == "True"}
    for method in caches.reset_methods(target):
        with script.using(replace(adapter, reset="")):
            script.restart()
            script.exec_line("fresh = copy.deepcopy(attention)")
            first, second = script.make_arguments(), script.make_arguments()
            with script.attempt():
                script.call(first, **flags)
                script.exec_line(f"attention.{method}()")
                expected = script.call(second, function="fresh", **flags)
                seen = script.call(second, **flags)
                message = f"{{place}} depends on a call before `{method}()`"
                script.assert_close(expected, seen, message)


def assert_context_is_noticed(script: Script) -> None:
    """Another context is used in each mode and for each batch size, or in none.

    What is projected of a context may be stored, until the module is reset.
    """
    found: dict[tuple[str, int], bool] = {}
    with script.using(replace(script.adapter, reset="")):
        for setting in itertools.product(script.modes(), (2, 3)):
            with script.attempt():  # it may need one batch size
                outputs = outputs_after_other_context(script, *setting)
                same = f"torch.allclose({', '.join(outputs)}, atol=1e-4)"
                found[setting] = script.evaluate(same)
        ignored = [setting for setting, is_noticed in found.items() if not is_noticed]
        if any(found.values()) and ignored:
            expected, seen = outputs_after_other_context(script, *ignored[0])
            message = "{place} is that of the context of an earlier call"
            script.assert_close(expected, seen, message)


def outputs_after_other_context(
    script: Script, mode: str, batch_size: int
) -> tuple[str, str]:
    """The outputs without an earlier call, and after one of two items."""
    script.sizes = replace(script.sizes, batch_size=2)
    script.restart(mode)
    script.exec_line("fresh = copy.deepcopy(attention)")
    script.call(script.make_arguments())
    script.sizes = replace(script.sizes, batch_size=batch_size)
    args = script.make_arguments()
    return script.call(args, function="fresh"), script.call(args)


# Flags with which a module stores something, or forgets it, by intention.
STORING_PATTERN = re.compile(
    r"updat|stor|record|accum|writ|save|reset|clear|cach|increm"
)


# A size of chunks, or a window, that is less than the length of the inputs.
SMALL_OPTION = 2


def assert_no_option_is_kept(script: Script, copy_of: str = COPY) -> None:
    """A call with another value of an option does not change a call without it.

    A mask or a table that depends on the option may be stored for the length only. A
    module that stores what it computed has another output in a second call.
    """
    adapter = script.adapter
    steps = next(caches.cache_steps(names.parameters_of(adapter.target), {}), {})
    for name, parameter in names.parameters_by_name(adapter.target).items():
        value = parameter.default
        is_start = value is None and re.search(r"\bint\b", str(parameter.annotation))
        is_number = isinstance(value, int) or (is_start and adapter.cache is None)
        if not is_number or adapter.cache == ("", ""):
            continue
        is_stored = STORING_PATTERN.search(name)
        if name in steps or is_stored or names.POSITION_PATTERN.search(name):
            continue
        is_flag = isinstance(value, bool)
        changed = {name: str(not value if is_flag else (value or 0) + 2)}
        pairs = [(changed, {}), ({}, changed)]
        if not is_flag:  # zero may stand for none, for which nothing is stored
            pairs.append((changed, {name: str((value or 0) + 1)}))
        if not is_flag and (value or 0) > SMALL_OPTION:  # a chunk longer than the input
            pairs.append(({}, {name: str(SMALL_OPTION)}))
        for first, second in pairs:
            script.restart("no_grad")
            script.exec_line(f"fresh = {copy_of.format('attention')}")
            args = script.make_arguments()
            with script.attempt():  # it may refuse the value
                expected = script.call(args, function="fresh", **second)
                again = script.call(args, function="fresh", **second)
                if not script.evaluate(f"torch.equal({expected}, {again})"):
                    break
                script.call(args, **first)
                seen = script.call(args, **second)
                message = f"{{place}} changes after a call with another `{name}`"
                script.assert_close(expected, seen, message)


def assert_no_integer_is_kept(script: Script) -> None:
    """A call with other integers, such as ids of padding, does not change the next."""
    integers = [n for n, text in script.adapter.extra_args.items() if "int64" in text]
    for name in integers:
        script.restart("no_grad")
        script.exec_line(f"fresh = {COPY.format('attention')}")
        with script.attempt():  # it may take these only
            args = script.make_arguments()
            text = script.sized_arguments(args, 0, [*args.inputs])[name]
            value = script.assign(name, text)
            other = script.assign(name, f"1 - {value}.clamp(0, 1)")
            for first, second in ((value, other), (other, value)):
                expected = script.call(args, function="fresh", **{name: second})
                if not script.evaluate(f"{expected}.isfinite().all()"):
                    break
                script.call(args, **{name: first})
                seen = script.call(args, **{name: second})
                message = f"{{place}} changes after a call with another `{name}`"
                script.assert_close(expected, seen, message)


def assert_no_weight_is_kept(script: Script) -> None:
    """After a step of training, evaluation without gradients uses the new weights."""
    script.restart("no_grad")
    args = script.make_arguments()
    script.exec_line("unused = copy.deepcopy(attention)")
    script.call(args)
    for name in ("attention", "unused"):
        script.exec_line(f"{name}.train()")
        script.exec_line(f"for weight in {name}.parameters(): weight.data.mul_(0.5)")
        script.exec_line(f"{name}.eval()")
    args = with_copies(script, args)
    expected = script.call(args, function="unused")
    message = "{place} is that of the weights before they were trained"
    script.assert_close(expected, script.call(args), message)


def with_copies(script: Script, args: CallArguments) -> CallArguments:
    """The same in other tensors, as a context is when weights have changed."""
    inputs = tuple(script.assign(name, f"{name}.clone()") for name in args.inputs)
    return replace(args, inputs=inputs)


def assert_loaded_weights_are_used(script: Script) -> None:
    """After a call in evaluation, a state dict that is loaded replaces all weights.

    The other module had its mode set after its weights changed, so that what `train`
    computes from them, such as merged weights, is part of its state.
    """
    script.restart("no_grad")
    args = script.make_arguments()
    script.exec_line("other = copy.deepcopy(attention)")
    script.exec_line("for weight in other.parameters(): weight.data.mul_(0.5)")
    script.exec_line("other.train().eval()")
    script.call(args)
    with script.attempt():  # a state of its own may be refused
        script.exec_line("attention.load_state_dict(other.state_dict())")
        args = with_copies(script, args)
        expected, seen = script.call(args, function="other"), script.call(args)
        message = "{place} is that of the weights before others were loaded"
        script.assert_close(expected, seen, message)


def assert_no_mode_is_kept(script: Script) -> None:
    """After evaluation, training is as before; and a mode may be set twice.

    A probability that evaluation sets to 0 stays 0. Weights are merged once, or not at
    all. (A table that is stored in inference mode cannot be used in training; PyTorch
    says so.)
    """
    script.restart("eval")
    args = script.make_arguments()
    script.exec_line("fresh = copy.deepcopy(attention)")
    for mode in ("train", "eval", "eval"):
        script.exec_line(f"attention.{mode}()")
    expected = script.call(args, function="fresh")
    message = "{place} changes if the mode is set to training, and twice to evaluation"
    script.assert_close(expected, script.call(args), message)
    script.restart("train", dropout=0.5)
    script.exec_line("fresh = copy.deepcopy(attention)")
    args = script.make_arguments()
    expected, again = (call_with_seed(script, args, "fresh") for _ in range(2))
    if not script.evaluate(f"torch.equal({expected}, {again})"):
        return  # its random numbers are not those of PyTorch
    script.exec_line("attention.eval()")
    script.context = CONTEXTS["no_grad"]
    script.call(args)
    script.context = ""
    script.exec_line("attention.train()")
    seen = call_with_seed(script, args, "attention")
    message = "in training, {place} changes after evaluation"
    script.assert_close(expected, seen, message)


def call_with_seed(script: Script, args: CallArguments, function: str) -> str:
    """The output of a call whose random numbers are the same each time."""
    script.exec_line("torch.manual_seed(0)")
    return script.call(args, function=function)


def assert_no_long_call_is_kept(script: Script) -> None:
    """A call that is longer than a limit does not change the output of a short one.

    Frequencies that depend on the length, beyond that of training, are for one call.
    """
    adapter, usual = script.adapter, script.sizes
    for argument in names.length_limits(adapter.target):
        if usual.k_len < 3 or adapter.fixed_length is not None:
            continue
        init_args = {**adapter.init_args, argument: str(2 * usual.k_len)}
        limited = replace(adapter, init_args=init_args)
        # A limit may be one.
        with script.using(limited), script.attempt():
            script.restart()
            script.exec_line("fresh = copy.deepcopy(attention)")
            length, longer = usual.k_len, 3 * usual.k_len
            short = script.make_arguments(script.all_allowed(length, length))
            with script.using(q_len=longer, k_len=longer):
                script.call(script.make_arguments(script.all_allowed(longer, longer)))
            expected = script.call(short, function="fresh")
            message = f"{{place}} changes after a call of more than `{argument}` tokens"
            script.assert_close(expected, script.call(short), message)


def assert_nothing_is_shared(script: Script) -> None:
    """Another instance, when it is built, does not change the first.

    The heads have a width of which none was built before: what instances share is
    often kept for each width, and may change only a few times.
    """
    for d_k in (OTHER_WIDTH, script.sizes.d_k):
        with script.using(d_k=d_k):
            try:
                script.restart()
                args = script.make_arguments()
                script.exec_line("fresh = copy.deepcopy(attention)")
                expected = script.call(args, function="fresh")
            except ScriptError:
                continue  # its width is given by other arguments, too
            script.exec_line(f"another = {script.build_expression()}")
            seen = script.call(args)
            message = "{place} changes when another instance is built"
            script.assert_close(expected, seen, message)
            break


def assert_trees_are_of_call(script: Script) -> None:
    """After a call with a chain of drafts, each token may follow the committed ones."""
    parameters = names.parameters_by_name(script.adapter.target)
    for name in filter(names.PARENTS_PATTERN.fullmatch, parameters):
        script.restart()
        script.exec_line("unused = copy.deepcopy(attention)")
        args = script.make_arguments()
        script.call(args)
        star = {name: f"[-1] * {len(args.allowed)}"}
        with script.attempt():  # it may be a tensor
            expected = script.call(args, function="unused", **star)
            message = f"{{place}} with other `{name}` changes after a call of as many"
            script.assert_close(expected, script.call(args, **star), message)


def assert_no_dtype_is_kept(script: Script) -> None:
    """After a call in half precision, a call in float32 is as exact as the first."""
    script.restart()
    script.exec_line("fresh = copy.deepcopy(attention).bfloat16().float()")
    args = script.make_arguments()
    expected = script.call(args, function="fresh")
    inputs = tuple(script.assign(n, f"{n}.bfloat16()") for n in args.inputs)
    script.exec_line("attention.bfloat16()")
    try:
        script.call(replace(args, inputs=inputs))
    except ScriptError:
        return  # the law of half precision reports it
    script.exec_line("attention.float()")
    message = "{place} changes after a call in bfloat16"
    script.assert_close(expected, script.call(args), message)


@law(assumes="features selection")
def half_precision(script: Script) -> None:
    r"""In half precision, the output is that of float32, within a tenth.

    $$|y_{\text{bfloat16}} - y_{\text{float32}}| \le 0.1 \max |y|$$

    Weights and inputs are rounded to half precision first, so that only the computation
    differs. A path of its own for half precision, positions that are rounded, or a mask
    that overflows changes the output by more.

    One token is zero, as padding may be, and where scores do not grow with the tokens,
    these are multiplied by 300: the squares of a norm must not overflow, nor its
    epsilon be rounded to zero. Code that does not mention float16 may be meant for
    bfloat16, whose range is larger: there, an overflow is reported as a skip unless
    `only` names this law. So is a difference where in float32, too, a little noise in
    the tokens changes a tenth.
    """
    halves = (torch.bfloat16, torch.float16)
    skip_if_for_float32(script)
    skip_where_refused(script, halves)
    for dtype in halves:
        for allowed, mask in script.mask_cases():
            assert_half_is_close(script, dtype, allowed, mask)
        # PyTorch's `normalize` has an epsilon that is zero in float16.
        is_torchs = "normalize" in structure.identifiers(script.adapter.target)
        if dtype == torch.bfloat16 or not is_torchs:
            assert_half_is_close(script, dtype, change=with_zero_token)
    if scores_are_bounded(script):
        assert_half_is_close(script, torch.float16, change=with_large_tokens)


def skip_if_for_float32(script: Script) -> None:
    """Skip a law of half precision where the documentation rules it out."""
    is_meant = not documented.is_for_float32(script.adapter.target)
    skip_unless(is_meant, "is documented to take float32 only")


def skip_where_refused(script: Script, dtypes: Sequence[torch.dtype]) -> None:
    """Skip the law if a call without a mask raises in each of these dtypes.

    An attention that is written for float32 alone gives nobody a wrong number.
    """
    refusals = []
    for dtype in dtypes:
        try:
            with script.using(dtype=dtype):
                script.restart()
                script.call(script.make_arguments())
        except ScriptError as failure:
            if script.is_unsupported(failure):
                refusals.append(str(failure))
    skip_unless(
        len(refusals) < len(dtypes), f"is for float32 only: {''.join(refusals[:1])}"
    )


# Learned scales of scores, by the names of their parameters.
LEARNED_SCALE_PATTERN = re.compile(
    r"(logit|log|attn)_?scales?$|temperature$|(^|[._])tau$"
)
# Names of float16 in code and comments.
FLOAT16_PATTERN = re.compile(r"\bfloat16|fp16|\.half\(|half.precision", re.IGNORECASE)


def squares_overflow(script: Script, args: CallArguments) -> bool:
    """Whether squares overflow in a call, such as those of a norm."""
    with script.rollback(), Squares() as squares:
        script.call(args)
    return bool(squares.overflow)


def mentions_float16(script: Script) -> bool:
    """Whether the source text of the attention, or of a part of it, names float16."""
    target = script.evaluate("attention")
    parts = target.modules() if script.adapter.is_module else [target]
    kinds = {type(part) if script.adapter.is_module else part for part in parts}
    own = [kind for kind in kinds if not str(kind.__module__).startswith("torch.")]
    mentioned = any(map(FLOAT16_PATTERN.search, map(source_of, own)))
    return script.insist or mentioned


@law
def finite_in_half(script: Script) -> None:
    r"""A zero token has a finite output in float16, if it has one in float32.

    $$|y_{\text{float32}}| < \infty \;\Rightarrow\; |y_{\text{float16}}| < \infty$$

    The least positive number of float16 is 6e-8. A smaller epsilon is rounded to zero,
    and where all features of a query or of the keys are zero, as behind a ReLU, a sum
    of them divides 0 by 0. Other than the tenth of `half_precision`, this holds for
    each design but features that are exponentials, whose sums may round to zero.
    """
    skip_if_for_float32(script)
    found = []
    # PyTorch's `normalize` has an epsilon that is zero in float16.
    is_torchs = "normalize" in structure.identifiers(script.adapter.target)
    skip_unless(not is_torchs, "calls `normalize`, whose epsilon is 0 in float16")
    for dtype in (torch.float32, torch.float16):
        try:
            with script.using(dtype=dtype):
                script.restart()
                args = script.make_arguments()
                zeros = tuple(with_zero_token(script, name) for name in args.inputs)
                found.append(script.call(replace(args, inputs=zeros)))
        except ScriptError as failure:
            raise NotApplicable(f"does not take {dtype}: {failure}") from failure
        if dtype == torch.float32:
            is_small = script.evaluate(f"{found[0]}.abs().max() < 1e4")
            skip_unless(is_small, "its output is large, or not finite, in float32")
    try:
        script.assert_finite(found[1], "the output is NaN or infinite in float16")
    except LawViolation:
        code = structure.identifiers(script.adapter.target)
        is_exponential = "features" in script.adapter.designs and "exp" in code
        reason = "sums of exponentials may round to 0 in float16"
        skip_unless(script.insist or not is_exponential, reason)
        raise


def with_zero_token(script: Script, name: str) -> str:
    """An input whose first token is zero."""
    zeros = script.assign(name, f"{name}.clone()")
    script.exec_line(f"{zeros}{script.adapter.index(l=slice(0, 1))} = 0")
    return zeros


def with_large_tokens(script: Script, name: str) -> str:
    """An input whose squares overflow in float16, though it does not."""
    return script.assign(name, f"300 * {name}")


# The size of the noise that half precision is compared with: a few of its roundings.
NOISE = {torch.bfloat16: 64, torch.float16: 512}
NOISES = 5  # each of which may meet, or miss, what is sensitive


def multiplies_noise(
    script: Script, args: CallArguments, usual: str, half: str, dtype: torch.dtype
) -> bool:
    """Whether in float32, too, the outputs change by a tenth with a little noise.

    What a norm divides by a small number, for one, has few exact digits. Noise that is
    some roundings of a token changes it about as much as half precision does.
    """
    if script.insist:
        return False
    sign = f"torch.randn_like({{0}}).sign() / {NOISE[dtype]}"
    for _ in range(NOISES):
        with script.rollback():
            noisy = tuple(
                script.assign(n, f"{n} * (1 + {sign.format(n)})") for n in args.inputs
            )
            noisy_args = replace(args, inputs=noisy)
            constants = {
                name: f"{text} * (1 + {sign.format(text)})"
                for name, text in script.sized_arguments(args, 0, [*noisy]).items()
                if text.startswith("seeded_randn")
            }
            output = script.call(noisy_args, function="exact", **constants)
            difference = f"({output} - {usual}).abs().max()"
            is_large = f"{difference} > 0.1 * {usual}.abs().max()"
            is_alike = f"({half} - {usual}).abs().max() < 2 * {difference}"
            if script.evaluate(f"{is_large} and {is_alike}"):
                return True
    return False


def scores_are_bounded(script: Script) -> bool:
    """Whether tokens of any size give the same weights, none of them zero.

    So it is in each layer if queries and keys, or the tokens, are normalized. A key
    that is alone has a weight of one, whatever its score is. What a soft cap limits is
    large before, and so is its rounding.
    """
    if script.sizes.k_len < 3 or "softcap" in script.adapter.designs:
        return False
    with script.using(batch_size=1):
        script.restart()
        args = script.make_arguments()
        found = []
        for factor in (1, 300, 600):
            inputs = tuple(script.assign(n, f"{factor} * {n}") for n in args.inputs)
            with WeightsRecorder() as recorder:
                script.call(replace(args, inputs=inputs))
            found.append([weights for weights, _ in recorder.found])
    layers = [*zip(*found, strict=False)]
    return bool(layers) and all(itertools.starmap(are_same_weights, layers))


def are_same_weights(small: Tensor, large: Tensor, larger: Tensor) -> bool:
    """Whether weights stay the same as tokens grow, and keys share them."""
    return (
        torch.allclose(large, larger, atol=1e-2)
        and torch.equal(small > 0, large > 0)
        and bool(((small > 0.01) & (small < 0.99)).any())
    )


def skip_if_lowest(script: Script, output: str) -> None:
    """Raise `NotApplicable` if an output marks what is impossible, such as a choice."""
    is_lowest = script.evaluate(f"({output}.abs() > 1e30).any()")
    skip_unless(not is_lowest, "its output holds the lowest number of its dtype")


def assert_half_is_close(
    script: Script,
    dtype: torch.dtype,
    allowed: Tensor | None = None,
    mask: MaskArgument | None = None,
    change: Callable[[Script, str], str] | None = None,
    last: int = 0,
) -> None:
    """Compare a call in half precision with one in float32, of the same numbers.

    With `last`, so many of the last outputs are compared, within a fifth of the largest
    of them: means of many tokens are small.
    """
    allowed = script.all_allowed() if allowed is None else allowed
    try:
        with script.using(dtype=dtype):
            script.restart()
            script.exec_line("exact = copy.deepcopy(attention)")
            args = script.make_arguments(allowed, mask)
            if change is not None:
                changed = tuple(change(script, name) for name in args.inputs)
                args = replace(args, inputs=changed)
            half = script.call(args)
            if script.adapter.is_module:
                script.exec_line("exact = exact.float()")
            inputs = [script.assign(n, f"{n}.float()") for n in args.inputs]
            script.dtype = torch.float32
            exact = replace(args, inputs=tuple(inputs))
            if mask is not None and "add" in mask.kind:
                exact = replace(exact, mask=script.encode_mask(allowed, mask))
            single = script.call(exact, function="exact")
            skip_if_lowest(script, single)
            if change is not None:
                message = "the output is NaN or infinite, in float32, too"
                script.assert_finite(single, message)
            message = f"the output at {{place}} differs in {dtype}"
            if last:
                end = script.adapter.index(l=slice(-last, None))
                error = f"({half}.float() - {single}){end}.abs().max()"
                claim = f"{error} <= 0.2 * {single}{end}.abs().max() + 0.02"
                message = f"the last of {len(allowed)} outputs differ in {dtype}"
                script.assert_true(claim, message)
                return
            queries = script.real_queries(args)
            try:
                half = f"{half}.float()"
                script.assert_close(single, half, message, relative=0.1, l=queries)
            except LawViolation:
                if multiplies_noise(script, exact, single, half, dtype):
                    reason = (
                        f"tokens that are changed by 1 / {NOISE[dtype]} change it, too"
                    )
                    raise Excused(reason) from None
                script.dtype = dtype
                if mentions_float16(script) or not squares_overflow(script, args):
                    raise
                reason = "squares overflow in float16, which its code does not mention"
                raise Excused(reason) from None
    except ScriptError as failure:
        if not script.is_unsupported(failure):
            raise


@law
def no_side_effects(script: Script) -> None:
    r"""A call modifies no input, mask, parameter or buffer.

    $$x_{\text{after}} = x_{\text{before}}$$

    The caller may pass the same tensors to the next layer. A mask that is modified in
    place is right in the first layer only. (In training, buffers may change, as those
    of a batch normalization do, and at any time those of a cache.)
    """
    for mode in script.modes():
        for allowed, mask in script.mask_cases():
            script.restart(mode)
            args = script.make_arguments(allowed, mask)
            tensors = list(args.inputs)
            if args.mask is not None and args.mask[1] in script.namespace:
                tensors.append(args.mask[1])
            remember(script, tensors)
            if script.adapter.is_module:
                named = ["*attention.named_parameters()"]
                if mode == "eval":
                    named.append("*attention.named_buffers()")
                script.exec_line(f"state = [{', '.join(named)}]")
                script.exec_line("state_before = {n: t.clone() for n, t in state}")
            script.call(args)
            assert_unmodified(script, tensors)
            if script.adapter.is_module:
                for name in script.evaluate("list(state_before)"):
                    if is_cache(
                        name, script.evaluate(f"state_before[{name!r}]"), script
                    ):
                        continue
                    claim = (
                        f"torch.equal(dict(state)[{name!r}], state_before[{name!r}])"
                    )
                    script.assert_true(claim, f"`{name}` is modified by a call")
    assert_optional_unmodified(script)
    assert_mask_unmodified_by_flag(script)
    assert_masks_unmodified_together(script)


def assert_masks_unmodified_together(script: Script) -> None:
    """Nor are masks of two arguments modified if one is merged with the other.

    They have integers, too, of which others than booleans need no copy.
    """
    masks = [
        mask
        for mask in script.adapter.masks
        if mask.kind != "causal" and not mask.counts_keys
    ]
    optional = names.optional_tensors(script.adapter)
    # Marks of global tokens hide none, and are merged all the same.
    marks = filter(names.GLOBAL_PATTERN.search, optional)
    masks += [MaskArgument(name, "attend", "bk") for name in marks]
    by_name = {mask.name: mask for mask in reversed(masks)}
    length = script.sizes.k_len
    for (one, other), kind in itertools.product(
        itertools.permutations(by_name.values(), 2), ("", ".long()")
    ):
        script.restart()
        args = script.make_arguments(script.all_allowed(length, length), one)
        encoded = script.encode_mask(args.allowed, other)
        assert args.mask is not None
        assert encoded is not None
        texts = args.mask[1], encoded[1]
        masks_of_call = [script.assign("mask", f"{text}{kind}") for text in texts]
        remember(script, masks_of_call)
        with script.attempt():
            given = replace(args, mask=(one.name, masks_of_call[0]))
            script.call(given, **{other.name: masks_of_call[1]})
            assert_unmodified(script, masks_of_call)


def assert_mask_unmodified_by_flag(script: Script) -> None:
    """Nor is a mask modified if a flag makes the attention causal, too."""
    flags = [mask for mask in script.adapter.masks if mask.kind == "causal"]
    others = [mask for mask in script.adapter.masks if mask.kind != "causal"]
    length = script.sizes.k_len
    for flag, mask in itertools.product(flags, others):
        script.restart()
        allowed = script.all_allowed(length, length)
        args = script.make_arguments(allowed, mask)
        assert args.mask is not None
        remember(script, [args.mask[1]])
        with script.attempt():
            script.call(args, **{flag.name: "True"})
            assert_unmodified(script, [args.mask[1]])


def is_cache(name: str, buffer: Tensor, script: Script) -> bool:
    """Whether a buffer is a cache by its name, or by its shape.

    Keys and values have three axes or more, of which the last is the width of a head.
    With a cache that the module stores, so are tokens, and integers are lengths and
    positions in it.
    """
    if script.adapter.cache == ("", ""):
        return not buffer.is_floating_point() or buffer.dim() > 2
    is_named = re.search(r"cache|past|buf|mem|prev|hist|state", name) is not None
    is_wide = buffer.dim() > 2 and buffer.shape[-1] == script.sizes.d_k
    return is_named or (is_wide and buffer.is_floating_point())


def assert_unmodified(script: Script, tensors: list[str]) -> None:
    """Tensors that were copied hold the same values, and were not written."""
    for name in tensors:
        claim = f"torch.equal({name}, {name}_before[0])"
        script.assert_true(claim, f"`{name}` is modified in place")
        # A version that grew means a write, even if it was of equal values.
        claim = f"{name}._version == {name}_before[1]"
        message = f"`{name}` is written to, though with the same values"
        script.assert_true(claim, message)


def assert_optional_unmodified(script: Script) -> None:
    """Nor is any input modified if an optional tensor, such as positions, is given."""
    adapter = script.adapter
    for argument in names.optional_tensors(adapter):
        script.restart()
        args = script.make_arguments()
        shape = script.evaluate(args.inputs[0]).shape
        given = script.random_tensor(argument, *shape)
        tensors = [*args.inputs, given]
        remember(script, tensors)
        with script.attempt():
            script.call(args, **{argument: given})
            assert_unmodified(script, tensors)


def remember(script: Script, tensors: list[str]) -> None:
    """Copy tensors, and note how often they were written."""
    for name in tensors:
        script.exec_line(f"{name}_before = {name}.clone(), {name}._version")


@law(slow=True)
def dtype_and_device(script: Script) -> None:
    r"""The output has the dtype and the device of the input.

    $$\operatorname{dtype}(y) = \operatorname{dtype}(x)$$

    This finds tables computed in float32, masks created on the CPU, and fill values
    that half precision cannot represent, if that of one mask is and of another is not.
    """
    of_ids = takes_ids(script.adapter.target)
    skip_unless(not of_ids, "its token ids have no dtype that its logits could have")
    insists, others = script.insist, (torch.float64, torch.float16, torch.bfloat16)
    skip_where_refused(script, others)
    for dtype in (torch.float32, *others):
        with script.using(dtype=dtype):
            refused, fits = [], False
            for allowed, mask in script.mask_cases():
                if not assert_dtype_is_kept(script, allowed, mask):
                    refused.append((allowed, mask))
                # Of an additive mask, the caller writes the fill value.
                elif mask and not mask.kind.startswith(("additive", "causal")):
                    fits = True
            for allowed, mask in refused:
                if mask and fits:
                    script.insist = True
                    assert_dtype_is_kept(script, allowed, mask)
                    script.insist = insists


def assert_dtype_is_kept(
    script: Script, allowed: Tensor, mask: MaskArgument | None
) -> bool:
    """The output is like the input; returns whether the dtype is supported."""
    try:
        script.restart()
        args = script.make_arguments(allowed, mask)
        output = script.call(args)
    except ScriptError as failure:
        if script.is_unsupported(failure):
            return False
        raise
    name = args.inputs[0]
    is_other = script.evaluate(f"{output}.shape[-1] != {name}.shape[-1]")
    if script.dtype != torch.float32 and (script.adapter.is_pooled or is_other):
        # Scores and probabilities are no vectors that a next layer gets.
        is_float32 = script.evaluate(f"{output}.dtype == torch.float32")
        reason = "gives other numbers than vectors like its input, in float32"
        skip_unless(script.insist or not is_float32, reason)
    message = f"the output is not {script.dtype}, as its input is"
    script.assert_true(f"{output}.dtype == {name}.dtype", message)
    message = "the output is on another device than its input"
    script.assert_true(f"{output}.device == {name}.device", message)
    return True


@law(slow=True)
def compiled(script: Script) -> None:
    r"""The compiled attention computes the same as the eager one.

    $$y_{\text{compiled}} = y_{\text{eager}}$$

    `torch.compile` traces a call once and replays it. A decision that depends on
    values, or state outside of parameters and buffers, may be lost.
    """
    # What a trace loses is lost with each backend. `eager` is the fastest to import.
    backend = "inductor" if script.thorough else "eager"
    *_, (allowed, mask) = script.mask_cases()
    script.restart()
    args = script.make_arguments(allowed, mask)
    eager = script.call(args)
    # After too many recompilations torch runs a function eagerly, which would compare
    # the eager output with itself.
    torch.compiler.reset()
    is_wrapped = isinstance(script.evaluate("attention"), TakesVectors | TakesPatches)
    function = "compile_own_forward" if is_wrapped else "torch.compile"
    script.exec_line(f"compiled = {function}(attention, backend={backend!r})")
    log = logging.getLogger("torch._dynamo")
    level = log.level
    log.setLevel(logging.ERROR)  # a graph that breaks is no news
    try:
        output = script.call(args, function="compiled")
    except ScriptError as failure:
        if "No working C++ compiler" in str(failure):
            raise NotApplicable("there is no C++ compiler here") from failure
        raise
    finally:
        log.setLevel(level)
    message = "the compiled output differs at {place}"
    script.assert_close(eager, output, message)


@law(slow=True)
def vmapped(script: Script) -> None:
    r"""Under `vmap`, each example gives the same output as alone.

    $$\operatorname{vmap}(y)(x_1, x_2) = \big(y(x_1),\, y(x_2)\big)$$

    `torch.func.vmap` computes ensembles and per-example gradients. It cannot trace
    control flow that depends on values, and mistakes the axes of what is written at two
    tensors of indices with a slice between them; the law does not apply to such code.
    """
    *_, (allowed, mask) = script.mask_cases()
    script.restart()
    first = script.make_arguments(allowed, mask)
    second = script.make_arguments(allowed)
    second = replace(second, mask=first.mask, allowed=allowed)
    with CalledFunctions() as functions:
        one = script.call(first)
    call = script.lines[-1].partition(" = ")[2]  # and where its output is
    other = script.call(second)
    names = ", ".join(first.inputs)
    pairs = zip(first.inputs, second.inputs, strict=True)
    stacked = ", ".join(f"torch.stack([{a}, {b}])" for a, b in pairs)
    try:
        both = script.assign(
            "both", f"torch.func.vmap(lambda {names}: {call})({stacked})"
        )
    except ScriptError as failure:
        raise NotApplicable(f"vmap cannot trace it: {failure}") from failure
    try:
        for n, output in enumerate((one, other)):
            message = "under vmap, the output at {place} differs"
            script.assert_close(output, f"{both}[{n}]", message)
    except LawViolation as failure:
        if "__setitem__" in functions.found:
            raise NotApplicable("writes at indices, as vmap cannot") from failure
        raise


@law(assumes="selection")
def autocast(script: Script) -> None:
    r"""Under autocast, the output is the same within a tenth.

    $$|y_{\text{bfloat16}} - y| \le 0.1 \max |y|$$

    Autocast runs matrix products in bfloat16, with 8 bits of precision, and leaves the
    rest in float32. A tenth of the largest entry is far above the rounding error, and
    far below the effect of a mask of the wrong size or dtype.
    """
    for allowed, mask in script.mask_cases():
        script.restart()
        args = script.make_arguments(allowed, mask)
        usual = script.call(args)
        device = script.device.partition(":")[0]
        script.context = f"torch.autocast({device!r}, torch.bfloat16)"
        try:
            cast = script.call(args)
        except ScriptError as failure:
            # An exception is nobody's wrong number: a product that autocast does not
            # know, such as `tensordot`, takes no operands of two dtypes, and a fill
            # value of float32 does not fit into bfloat16.
            if not script.is_unsupported(failure):
                raise
            raise NotApplicable(f"does not run under autocast: {failure}") from failure
        message = "under autocast, the output at {place} differs"
        script.assert_close(usual, cast, message, relative=0.1)


@law(strict=True)
def copy_after_call(script: Script) -> None:
    r"""A module can be copied after a call.

    $$\operatorname{deepcopy}(f)(x) = f(x)$$

    Weights that are stored for plots keep the graph that computed them, and PyTorch
    refuses to copy such tensors. An exponential moving average of the weights makes a
    copy of a model during training.
    """
    skip_unless(script.adapter.is_module, "is a function, and has no state")
    script.restart()
    args = script.make_arguments()
    output = script.call(args)
    script.exec_line("copied = copy.deepcopy(attention)")
    after = script.call(args, function="copied")
    script.assert_close(output, after, "the output of a deep copy differs at {place}")


@law(slow=True, assumes="tied")
def own_layers(script: Script) -> None:
    r"""Each layer of a list is a layer of its own.

    $$\theta_i \not\equiv \theta_j \quad \text{for } i \neq j$$

    `nn.ModuleList([layer] * 4)` has four names for one layer. Projections or heads that
    were meant to differ then share their weights, and the model is smaller than it
    seems. Layers of their own may have one weight, which is tied by intention.
    """
    skip_unless(script.adapter.is_module, "is a function, and has no layers")
    script.restart()
    script.exec_line("named = attention.named_modules(remove_duplicate=False)")
    script.exec_line("layers = [part for _, part in named if [*part.parameters()]]")
    claim = "len({*map(id, layers)}) == len(layers)"
    message = "a layer is registered under several names"
    lists = [
        name
        for name, part in script.evaluate("attention").named_modules()
        if isinstance(part, nn.ModuleList) and any(True for _ in part.parameters())
    ]
    for name in lists:
        layers = f"[*attention.get_submodule({name!r})]"
        own = f"len({{*map(id, {layers})}}) == len({layers})"
        script.assert_true(own, f"`{name}` holds one layer several times")
    script.assert_true(claim, message)


@law(slow=True)
def state_dict(script: Script) -> None:
    r"""A copy, and a module loaded from the state dict, compute the same.

    $$y_{\text{loaded}} = y_{\text{saved}}$$

    A tensor that is neither a parameter nor a buffer is in no checkpoint, and one that
    requires a gradient is meant to be a parameter. The state dict is saved to bytes,
    and loaded into a module that was initialized with another seed, or whose parameters
    were overwritten.
    """
    adapter = script.adapter
    skip_unless(adapter.is_module, "is a function, and has no state")
    script.restart()
    for name in script.evaluate("unregistered_tensors(attention)"):
        message = f"`{name}` requires a gradient, and is no parameter"
        script.assert_true("not unregistered_tensors(attention)", message)
    args = script.make_arguments()
    output = script.call(args)
    script.exec_line("copied = detached_copy(attention)")
    copied = script.call(args, function="copied")
    message = "the output of a copy differs at {place}"
    script.assert_close(output, copied, message)
    change = "for weight in attention.parameters(): weight.data.mul_({})"
    script.exec_line(change.format(0.5))
    after = script.call(args, function="copied")
    message = "the output of a copy changes at {place} with the original's parameters"
    script.assert_close(copied, after, message)
    script.exec_line(change.format(2.0))
    script.exec_line("import io")
    script.exec_line("torch.save(attention.state_dict(), file := io.BytesIO())")
    script.exec_line(f"torch.manual_seed({script.seed + 1})")
    script.exec_line(f"loaded = {script.build_expression()}.eval()")
    script.exec_line("set_dropout(loaded, 0.0)")
    if not isinstance(adapter.target, type):
        # Built as a copy of the given instance, it has its parameters already.
        script.exec_line("for weight in loaded.parameters(): weight.data.fill_(0.5)")
    script.exec_line("file.seek(0)")
    script.exec_line("loaded.load_state_dict(torch.load(file))")
    after = script.call(args, function="loaded")
    message = "after loading its state dict, the output differs at {place}"
    script.assert_close(output, after, message)
