r"""# Laws of execution

The same attention is trained and evaluated, in float32 and in half precision, eagerly
and compiled, saved and loaded. None of this may change what it computes, beyond stated
tolerances.

Source: the behavior is that of [PyTorch's
modules](https://docs.pytorch.org/docs/stable/notes/modules.html).
"""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from attention_laws import names, structure
from attention_laws.adapter import MaskArgument, without_future
from attention_laws.algebra import make_equal_tokens, record_weights
from attention_laws.law import (
    Excused,
    LawViolation,
    NotApplicable,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.script import CONTEXTS, CallArguments, Script
from attention_laws.tools import Squares, last_activation, place_of, probabilities

# Tokens added for a long sequence, beyond the usual sizes of blocks.
LONG = 256

# The width of heads in one test only.
OTHER_WIDTH = 32

# Copies of one sequence, of which each has a dropout mask of its own. There are fewer
# if a call computes more than `COPIED_ENTRIES` for them, or if they are packed into one
# sequence, whose scores grow with the square.
COPIES, FEWEST_COPIES, COPIED_ENTRIES = 4096, 256, 1e7


@law
def eval_matches_train(script: Script) -> None:
    r"""Evaluation computes the same as training with dropout 0.

    $$y_{\text{eval}} = y_{\text{train}}\big|_{p = 0}$$

    If a mask, a scale or a fast path is active in one of the two modes only, the model
    that is evaluated was never trained. Evaluation runs with dropout 0.5 configured;
    training runs with dropout 0. Both run with and without recording gradients.
    """
    skip_unless(script.adapter.is_module, "is a function, and has no modes")
    skip_unless(
        script.adapter.reproducible_training, "training is random even with dropout 0"
    )
    # A path for one mode may drop padding by its length, wherever it is.
    cases = [*script.mask_cases(), *script.padding_cases(slice(1, 2))]
    for allowed, mask in cases:
        script.restart("eval", dropout=0.5)
        args = script.make_arguments(allowed, mask)
        outputs = {"": script.call(args)}
        for context in CONTEXTS.values():
            script.context = context
            outputs[f" under {context}"] = script.call(args)
        script.context = ""
        with script.attempt():
            needing = [script.assign(n, f"{n}.clone()") for n in args.inputs]
            for name in needing:
                script.exec_line(f"{name}.requires_grad_()")
            outputs[" if its inputs require gradients"] = script.assign(
                "y", f"{script.call(replace(args, inputs=tuple(needing)))}.detach()"
            )
        script.exec_line("set_dropout(attention, 0.0)")
        script.exec_line("attention.train()")
        trained = script.call(args)
        script.context = CONTEXTS["no_grad"]
        unrecorded = script.call(args)
        script.context = ""
        for where, output in outputs.items():
            message = f"the output at {{place}} differs in evaluation{where}"
            script.assert_close(trained, output, message)
        message = "the output at {place} differs in training under torch.no_grad()"
        script.assert_close(trained, unrecorded, message)


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
    for same in [roles, roles[1:]] if len(roles) == 3 else [roles]:
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


@law(slow=True, assumes="linear")
def dropout(script: Script) -> None:
    r"""Dropout changes each weight independently, and on average nothing.

    $$\operatorname{E}[y_{\text{train}}] = y_{\text{eval}}$$

    It is applied to the weights, after the softmax, and what remains is divided by the
    probability to remain. Each dropout of the module is set to 0.5 in turn, and to
    0.02, which must change less. Copies of one sequence in a batch show what is random:
    over the copies the mean output must be that of evaluation; calls, copies, queries
    and heads must not share one mask.
    """
    adapter = script.adapter
    if not adapter.is_module:
        argument = names.dropout_of_function(adapter.target)
        skip_unless(argument, "is a function without dropout")
        if not assert_dropout_is_fair(script, argument):
            message = f"`{argument}` has no effect"
            script.fail("False, " + repr(message), message, math.nan, 0.0)
        return
    skip_unless(adapter.reproducible_training, "training is random even with dropout 0")
    skip_unless("b" in adapter.layout, "takes one sequence at a time")
    script.restart("train")
    places = script.evaluate("dropout_places(attention)")
    assert_draws_have_an_effect(script)
    skip_unless(places, "has no dropout")
    assert_argument_switches_off(script)
    for place in places:
        assert_weights_alone_are_dropped(script, place)
    changed = {place: assert_dropout_is_fair(script, place) for place in places}
    for place in places:
        if changed[place]:
            assert_each_path_drops(script, place)
    if "weights" not in changed.values():
        for place in places:
            found = script.evaluate(f"dropout_names(attention, {place!r})")
            idle = [name for name in found if "att" in name and not changed[place]]
            message = f"`{', '.join(idle)}` has no effect, and other dropout does"
            if idle and any(changed.values()):
                script.fail("False, " + repr(message), message, math.nan, 0.0)
    if not any(changed.values()):
        skip_unless(not is_always_zero(script), "its dropout is 0, which nothing sets")
        flag = adapter.designs.get("left_out", "")
        skip_unless(not flag, f"`{flag}` leaves out what its dropout may be of")
        script.restart("train", dropout=0.5)
        args = script.make_arguments()
        one, other = script.call(args), script.call(args)
        message = "dropout has no effect in training"
        script.assert_true(f"not torch.equal({one}, {other})", message)


def assert_each_path_drops(script: Script, place: str) -> None:
    """What drops, drops with a mask, too, and with or without returned weights."""
    script.restart("train")
    apply_dropout(script, 0.5, place)
    usual = script.make_arguments()
    if not script.evaluate(f"is_random(lambda: {script.call_source(usual)})"):
        return
    paths = [
        (script.call_source(usual, **given), names_of(given))
        for given in names.weights_flags(script.adapter)
    ]
    for allowed, mask in script.mask_cases():
        if mask is not None and mask != script.adapter.required_mask:
            masked = script.make_arguments(allowed, mask)
            paths.append((script.call_source(masked), f"a `{mask.name}`"))
    for call, what in paths:
        with script.attempt(), script.rollback():
            script.assign("y", call)  # it may be refused
            message = f"dropout has no effect in training with {what}"
            script.assert_true(f"is_random(lambda: {call})", message)


def assert_draws_have_an_effect(script: Script) -> None:
    """A random mask that is drawn in training changes the output.

    One whose probability is zero, or not found, changes nothing by intention.
    """
    attention = script.evaluate("attention")
    has_rate = any(
        structure.RANDOM_RATE_PATTERN.search(name) and 0 < value < 1
        for part in attention.modules()
        for name, value in vars(part).items()
        if type(value) is float
    )
    if not has_rate:
        return
    args = script.make_arguments()
    call = f"lambda: {script.call_source(args)}"
    message = "random numbers are drawn in training, and have no effect"
    script.assert_true(f"not draws_without_effect({call})", message)


def assert_weights_alone_are_dropped(script: Script, place: str) -> None:
    """A dropout layer named for the attention that gets weights gets nothing else.

    What is dropped beside them, such as the context, has a dropout of its own, if any:
    else it is dropped twice.
    """
    script.restart("train")
    if not any(
        "att" in name
        for name in script.evaluate(f"dropout_names(attention, {place!r})")
    ):
        return
    path = place.replace("*", "0")
    args = script.make_arguments()
    call = f"lambda: {script.call_source(args)}"
    layer = f"attention.get_submodule({path!r})"
    if script.evaluate(f"isinstance({layer}, torch.nn.Dropout)"):
        seen = script.assign("seen", f"captured_inputs({call}, {layer})")
        is_row = "(x.sum(-1) - 1).abs().max() < 0.01 and x.min() >= 0"
        are_weights = script.assign("are_weights", f"[bool({is_row}) for x in {seen}]")
        message = f"`{place}` is applied to the weights, and to other numbers, too"
        claim = f"all({are_weights}) or not any({are_weights})"
        script.assert_true(claim, message)


def is_always_zero(script: Script) -> bool:
    """Whether all dropout is 0, and the constructor has no argument that sets it.

    Such a layer only keeps the names of the weights of another implementation.
    """
    target = script.adapter.target
    kind = target if isinstance(target, type) else type(target)
    arguments = inspect.signature(kind).parameters
    has_config = any(map(names.CONFIG_PATTERN.search, arguments))
    if has_config or names.dropout_arguments(kind):
        return False
    script.restart("train", dropout=None)
    parts = script.evaluate("attention").modules()
    return not any(getattr(part, n) for part in parts for n in probabilities(part))


def assert_argument_switches_off(script: Script) -> None:
    """Built with a dropout of 0, or a probability to keep of 1, nothing is dropped.

    The others of these tests set the probabilities of a module that was built.
    """
    adapter = script.adapter
    given = names.dropout_arguments(adapter.target)
    if not given:
        return
    script.adapter = replace(adapter, init_args={**adapter.init_args, **given})
    script.restart("train", dropout=None)
    if structure.has_dropout_of_its_own(script.evaluate("attention")):
        script.adapter = adapter
        return
    args = script.make_arguments()
    trained = script.call(args)
    script.exec_line("attention.eval()")
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    message = f"{{place}} differs in training, though it is built with `{text}`"
    script.assert_close(script.call(args), trained, message)
    script.adapter = adapter


def assert_dropout_is_fair(script: Script, place: str) -> str:
    """Test one dropout of the module; return what it changes.

    That is "weights", "output", or nothing. Dropped weights change the output for equal
    tokens in one direction a head only, and a dropped output in all.
    """
    adapter = script.adapter
    length = adapter.fixed_length or 3
    script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
    copies = count_of_copies(script)
    script.restart("train")
    script.exec_line("torch.manual_seed(0)")
    args = script.make_arguments()
    # After a norm, equal tokens give equal outputs, whichever of their weights remain.
    for equal in (False,) if "norm" in adapter.designs else (False, True):
        with script.rollback():
            apply_dropout(script, 0.5, place)
            each = make_equal_tokens(script, args) if equal else args
            many = repeat_item(script, each, copies)
            output = script.call(many)
            in_order = f"{output}.movedim({copies_first(script)}, [0, 1])"
            y = script.assign("y", f"{in_order}.detach()")
            if bool(script.evaluate(f"({y} == {y}[0]).all()")):
                if drops_table(script, many, place):
                    return ""
                apply_dropout(script, 0.0, place)
                usual = script.call(many)
                if skips_layer(script, many, usual, place):
                    return ""
                message = "all batch items share one dropout mask"
                claim = f"torch.allclose({output}, {usual}, atol=1e-4)"
                script.assert_true(claim, message)
                return ""
            if not equal:
                again = script.call(many)
                message = "two calls in training share one dropout mask"
                script.assert_true(f"not torch.equal({output}, {again})", message)
                assert_keys_drop_apart(script, y, place)
                assert_less_drops_less(script, many, y, place)
                if not (
                    is_before_scores(script, place) or has_several_attentions(script)
                ):
                    try:
                        assert_mean_is_kept(script, many, output, place)
                    except LawViolation:
                        if hides_keys(script, many, place):
                            return "weights"
                        if not drops_table(script, many, place):
                            raise
            elif "h" not in adapter.layout:
                if not (is_of_part(script, place) or is_before_scores(script, place)):
                    assert_masks_differ(script, y, length, copies)
                rank = script.evaluate(
                    f"torch.linalg.matrix_rank({y}[:, -1] - {y}[0, -1], rtol=1e-3)"
                )
                return "weights" if rank <= script.sizes.heads else "output"
    return "weights"  # or not known


def assert_less_drops_less(
    script: Script, many: CallArguments, y: str, place: str
) -> None:
    """A probability of 0.02 changes the copies less than that of 0.5, which gave `y`.

    At 0.5, a module that keeps what it should drop passes the other tests. At 0.02, it
    drops nearly everything, and a right one nearly nothing.
    """
    with script.rollback():
        first = f"movedim({copies_first(script)}, [0, 1]).detach()"
        apply_dropout(script, 0.0, place)
        usual = script.assign("usual", f"{script.call(many)}.{first}")
        apply_dropout(script, 0.02, place)
        little = script.assign("little", f"{script.call(many)}.{first}")
        message = "a dropout of 0.02 changes the output about as much as one of 0.5"
        little, much = (f"({each} - {usual}).norm()" for each in (little, y))
        script.assert_true(f"{little} <= 0.7 * {much}", message)
        apply_dropout(script, 0.5, place)


def repeat_item(script: Script, args: CallArguments, copies: int) -> CallArguments:
    """The same arguments, with copies of their one batch item."""
    layout = script.adapter.layout
    repeats = ", ".join(str(copies) if axis == "b" else "1" for axis in layout)
    inputs = [script.assign(n, f"{n}.repeat({repeats})") for n in args.inputs]
    mask = script.encode_mask(
        script.all_allowed().expand(-1, -1, copies), script.adapter.required_mask
    )
    allowed = args.allowed.expand(-1, -1, copies)
    return replace(args, inputs=tuple(inputs), allowed=allowed, mask=mask)


def count_of_copies(script: Script) -> int:
    """How many copies of a sequence show what dropout does, at a bearable cost."""
    counts = []
    for copies in (2, 4, 6):
        script.restart("train")
        args = repeat_item(script, script.make_arguments(), copies)
        call = f"lambda: {script.call_source(args)}"
        try:
            counts.append(script.evaluate(f"count_entries({call})"))
        except ScriptError:
            return COPIES  # its kernels cannot be replaced
    two, four, six = counts
    if six - four > four - two:
        return FEWEST_COPIES
    bearable = int(2 * COPIED_ENTRIES / max(1, four - two))
    return max(FEWEST_COPIES, min(COPIES, bearable))


def hides_keys(script: Script, many: CallArguments, place: str) -> bool:
    """Whether a dropout hides keys before the softmax, as that of DropKey does.

    The other keys then share their weight, which keeps no mean.
    """
    hidden = []
    for p in (0.5, 0.0):
        apply_dropout(script, p, place)
        call = f"lambda: {script.call_source(many)}"
        hidden.append(script.evaluate(f"count_zero_weights({call})"))
    return bool(hidden[0] > hidden[1])


def skips_layer(script: Script, many: CallArguments, usual: str, place: str) -> bool:
    """Whether a call computes either all or nothing (LayerDrop, Fan et al. 2019).

    It does so for all batch items at once, and multiplies what remains by nothing.
    """
    calls = 12
    with script.rollback():
        apply_dropout(script, 0.5, place)
        outputs = [script.call(many) for _ in range(calls)]
    kept = [script.evaluate(f"torch.allclose({y}, {usual})") for y in outputs]
    skipped = [y for y, is_kept in zip(outputs, kept, strict=True) if not is_kept]
    same = (script.evaluate(f"torch.equal({y}, {skipped[0]})") for y in skipped)
    return 0 < len(skipped) < calls and all(same)


def drops_table(script: Script, many: CallArguments, place: str) -> bool:
    """Whether a dropout layer gets what is computed from weights or positions alone.

    That is a table of positions, or the output of a network for their biases: all
    batch items share what remains of it, and scores that it is part of keep no mean. A
    mask that is dropped by mistake, for all items alike, has no gradient, and is made
    of two numbers, or has rows and columns of tokens.
    """
    if not script.adapter.is_module:
        return False
    layers = [
        path
        for path, part in script.evaluate("attention").named_modules()
        if place_of(path) == place and isinstance(part, nn.modules.dropout._DropoutNd)
    ]
    for path in layers:
        with script.rollback():
            inputs = [script.assign(n, f"{n}.detach().clone()") for n in many.inputs]
            for name in inputs:
                script.exec_line(f"{name}.requires_grad_()")
            given = script.call_source(replace(many, inputs=tuple(inputs)))
            layer = f"attention.get_submodule({path!r})"
            call = f"captured_inputs(lambda: {given}, {layer})"
            for seen in script.evaluate(call):
                tensors = [script.evaluate(name) for name in inputs]
                is_table = seen.requires_grad or are_features(seen, many.allowed)
                if is_table and not depends_on(seen, tensors):
                    return True
    return False


def are_features(values: Tensor, allowed: Tensor) -> bool:
    """Whether values without a gradient are features of positions, and no mask."""
    is_of_pairs = values.shape[-2:] == allowed.shape[:2]
    return not is_of_pairs and len({*values.flatten().tolist()}) > 2


def depends_on(output: Tensor, inputs: list[Tensor]) -> bool:
    """Whether any of the inputs is in the graph of an output."""
    if not output.requires_grad:
        return False
    grads = torch.autograd.grad(
        output.sum(), inputs, retain_graph=True, allow_unused=True
    )
    return any(grad is not None for grad in grads)


def is_before_scores(script: Script, place: str) -> bool:
    """Whether a dropout is one of inputs or of queries and keys, by its name.

    It is part of their projections, as in LoRA.
    """
    if not script.adapter.is_module:
        return False
    *layers, _last = place.split(".")
    roles = {structure.role_of(layer, None) for layer in layers}
    found = script.evaluate(f"dropout_names(attention, {place!r})")
    is_named = any(map(structure.INPUT_DROPOUT_PATTERN.search, [place, *found]))
    return is_named or bool(roles & {"query", "key", "fused"})


def is_of_part(script: Script, place: str) -> bool:
    """Whether a dropout drops a whole part, such as a head, by its name."""
    found = [place]
    if script.adapter.is_module:
        found += script.evaluate(f"dropout_names(attention, {place!r})")
    return any(map(structure.PART_DROPOUT_PATTERN.search, found))


def has_several_attentions(script: Script) -> bool:
    """Whether there is more than one attention, but for a list of heads.

    What one of them drops may change the scores of another.
    """
    if not script.adapter.is_module:
        return False
    paths = structure.attention_paths(script.evaluate("attention"))
    return len({place_of(path) for path in paths}) > 1


def copies_first(script: Script) -> list[int]:
    """The axes of batch items and of positions."""
    return [script.adapter.layout.index(axis) for axis in "bl"]


def apply_dropout(script: Script, p: float, place: str) -> None:
    """Set a dropout of the module, or give the argument of a function."""
    adapter = script.adapter
    if adapter.is_module:
        where = f", {place!r}" if p else ""
        script.exec_line(f"set_dropout(attention, {p}{where})")
        return
    given = {place: p, **names.dropout_flags(adapter.target)}
    script.adapter = replace(adapter, call_args={**adapter.call_args, **given})


def assert_mean_is_kept(
    script: Script, many: CallArguments, output: str, place: str
) -> None:
    """The mean over the copies is the output without dropout.

    What follows a norm or an activation does not keep a mean; with one, what the last
    projection gets is compared.
    """
    first = f".movedim({copies_first(script)}, [0, 1])"
    is_linear = not {"norm", "features"} & {*script.adapter.designs}
    is_linear &= not last_activation(script.evaluate(output))
    if script.adapter.is_module and not is_linear:
        width = script.sizes.heads * script.sizes.d_k
        layers = structure.layers_by_role(script.evaluate("attention"), width)
        if "out" not in layers or "talking" in script.adapter.designs:
            return
        last = f"attention.get_submodule({layers['out']!r})"
        call = f"captured_input(lambda: {script.call_source(many)}, {last})"
        value, axis = script.evaluate(call), script.adapter.layout.index("b")
        if value.dim() != 3 or value.shape[axis] != len(many.allowed[0, 0]):
            return  # of parts of the sequences, such as the frames of videos
        if is_normalized(script, call):
            return
        y = script.assign("y", f"{call}{first}.detach()")
        apply_dropout(script, 0.0, place)
        usual = script.assign("usual", call)
    else:
        y = script.assign("y", f"{output}{first}.detach()")
        apply_dropout(script, 0.0, place)
        usual = script.call(many)
    error = script.assign("error", f"{y}.std(dim=0) / {len(many.allowed[0, 0])} ** 0.5")
    message = (
        "on average, dropout changes the output: it is not scaled by 1 / (1 - p), or "
        "not applied to the weights after the softmax"
    )
    usual = f"{usual}{first}[0]"
    difference = f"({y}.mean(dim=0) - {usual}).abs()"
    script.assert_true(f"({difference} <= 6 * {error} + 1e-3).all()", message)


def is_normalized(script: Script, call: str) -> bool:
    """Whether the value of a call of the module is the output of one of its norms."""
    outputs: list[Tensor] = []
    handles = [
        part.register_forward_hook(lambda _, inputs, output: outputs.append(output))
        for part in script.evaluate("attention").modules()
        if "norm" in type(part).__name__.lower()
    ]
    value = script.evaluate(call)
    for handle in handles:
        handle.remove()
    return any(
        output.shape == value.shape and torch.equal(output, value) for output in outputs
    )


def assert_masks_differ(script: Script, y: str, length: int, copies: int) -> None:
    """Queries, heads and keys have dropout masks of their own.

    All tokens are equal, so that outputs differ by the dropout masks only. With
    $n$ keys and $h$ heads, the counts of remaining keys allow $(n + 1)^h$ outcomes.
    """
    adapter, heads = script.adapter, script.sizes.heads
    if adapter.is_pooled or has_several_attentions(script):
        return  # of several, each may have fewer keys or queries
    if {"selection", "convolution"} <= {*adapter.designs}:
        return  # what is selected of a series are delays, for all queries
    if not (adapter.causal or adapter.positions != "none") and length > 1:
        message = "all queries share one dropout mask"
        script.assert_true(f"not torch.allclose({y}[:, 0], {y}[:, 1])", message)
    shared = max(2**heads, 2**length if heads > 1 else 0)
    usual = (2 * length**0.5 + 1) ** heads  # within two standard deviations
    if not shared < usual < copies:
        shared = 2**heads  # the copies do not show all outcomes
    # Of so many, the copies show on average:
    expected = shared * (1 - math.exp(-copies / shared))
    message = (
        f"the keys or the heads share one dropout mask: {heads} heads and {length} "
        f"keys give only {{}} different outputs"
    )
    count = script.evaluate(f"count_outcomes({y}[:, -1])")
    claim = f"count_outcomes({y}[:, -1]) > {1.1 * expected:.0f}"
    if (length + 1) ** heads > shared and 1.1 * expected < 0.9 * copies:
        script.assert_true(claim, message.format(count))


def assert_keys_drop_apart(script: Script, y: str, place: str) -> None:
    """No query loses all its keys in a head at once, unless all queries do.

    With $h$ heads, it would have $2^h$ outcomes. A whole head may be dropped for all.
    """
    adapter, heads = script.adapter, script.sizes.heads
    few_keys = {"compression", "convolution", "selection"}
    if (
        "h" in adapter.layout
        or adapter.is_pooled
        or heads == 1
        or script.sizes.d_k == 1
        or few_keys & set(adapter.designs)
        or is_of_part(script, place)
        or is_before_scores(script, place)
        or has_several_attentions(script)
    ):
        return
    last, each = f"count_outcomes({y}[:, -1])", f"count_outcomes({y})"
    message = (
        f"a query loses all weights of a head at once: {heads} heads and "
        f"{script.sizes.k_len} keys give only {{}} different outputs"
    )
    claim = f"not 2 < {last} <= {2**heads} < {each}"
    if not script.evaluate(claim) and last_query_sees_all(script, place):
        script.assert_true(claim, message.format(script.evaluate(last)))


def last_query_sees_all(script: Script, place: str) -> bool:
    """Whether the last output depends on each token, also beyond a window."""
    last = script.adapter.index(l=slice(-1, None))
    with script.rollback():
        apply_dropout(script, 0.0, place)
        args = script.make_arguments()
        before = script.call(args)
        seen = [
            script.call(script.perturb(args, l=slice(n, n + 1)))
            for n in range(script.sizes.k_len)
        ]
        same = [
            script.evaluate(f"torch.equal({before}{last}, {y}{last})") for y in seen
        ]
        apply_dropout(script, 0.5, place)
    return not any(same)


@law(slow=True)
def earlier_calls(script: Script) -> None:
    r"""What was called before does not change the output.

    $$y(x \mid x') = y(x)$$

    Masks and tables of positions are often stored for the next call. Stored for another
    length, batch size, mask or mode, they are wrong without an error. A copy of the
    attention that was never called must give the same outputs. Nor may they change when
    another instance is built.
    """
    adapter, k_len = script.adapter, script.sizes.k_len
    skip_unless(adapter.is_module, "is a function, and has no state")
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
            script.exec_line("unused = copy.deepcopy(attention)")
            first = script.make_arguments(padded if mask else None, mask)
            for args in [first, *other_calls(script, first, padded, mask), first]:
                script.exec_line("fresh = copy.deepcopy(unused)")
                try:
                    expected = script.call(args, function="fresh")
                except ScriptError:
                    continue  # a size that it does not accept, called before or not
                seen = script.call(args)
                message = "{place} changes after other calls"
                queries = script.real_queries(args)
                script.assert_close(expected, seen, message, l=queries)
    assert_no_weight_is_kept(script)
    if isinstance(adapter.target, type):
        assert_nothing_is_shared(script)
        assert_no_long_call_is_kept(script)
    if adapter.image and adapter.fixed_length is None:
        assert_no_shape_is_kept(script)
    if script.dtype == torch.float32:
        assert_no_dtype_is_kept(script)
    if adapter.reproducible_training:
        assert_no_mode_is_kept(script)


def other_calls(
    script: Script, first: CallArguments, padded: Tensor, mask: MaskArgument | None
) -> Iterator[CallArguments]:
    """Arguments like `first`, with other content, masks and sizes."""
    adapter, usual = script.adapter, script.sizes
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
        if "b" in adapter.layout:
            script.sizes = replace(usual, batch_size=batch_size)
        more_queries = change if adapter.single_input or adapter.causal else 0
        allowed = script.all_allowed(q_len + more_queries, k_len + change)
        # A long sequence fills tables; a mask of its size would be long to write.
        hides = mask and mask.kind != "lengths" and 1 < k_len + change < LONG
        allowed[:, :1, 0] = not hides
        yield script.make_arguments(allowed, mask if length < LONG else None)
        script.sizes = usual


def assert_no_shape_is_kept(script: Script) -> None:
    """An image is not taken for one of as many pixels with another height."""
    usual = script.adapter, script.sizes
    script.sizes = replace(script.sizes, q_len=12, k_len=12)
    script.restart("no_grad")
    script.exec_line("unused = copy.deepcopy(attention)")
    args = script.make_arguments()
    for height in (2, 3, 6):
        script.adapter = replace(script.adapter, image_height=height)
        script.exec_line("fresh = copy.deepcopy(unused)")
        with script.attempt():  # it may take no such image
            expected = script.call(args, function="fresh")
            seen = script.call(args)
            message = "{place} changes after a call with an image of another shape"
            script.assert_close(expected, seen, message)
    script.adapter, script.sizes = usual


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
    expected = script.call(args, function="unused")
    message = "{place} is that of the weights before they were trained"
    script.assert_close(expected, script.call(args), message)


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
        script.adapter = replace(adapter, init_args=init_args)
        with script.attempt():  # a limit may be one
            script.restart()
            script.exec_line("fresh = copy.deepcopy(attention)")
            length, longer = usual.k_len, 3 * usual.k_len
            short = script.make_arguments(script.all_allowed(length, length))
            script.sizes = replace(usual, q_len=longer, k_len=longer)
            script.call(script.make_arguments(script.all_allowed(longer, longer)))
            script.sizes = usual
            expected = script.call(short, function="fresh")
            message = f"{{place}} changes after a call of more than `{argument}` tokens"
            script.assert_close(expected, script.call(short), message)
        script.adapter, script.sizes = adapter, usual


def assert_nothing_is_shared(script: Script) -> None:
    """Another instance, when it is built, does not change the first.

    The heads have a width of which none was built before: what instances share is
    often kept for each width, and may change only a few times.
    """
    usual = script.sizes
    for d_k in (OTHER_WIDTH, usual.d_k):
        script.sizes = replace(usual, d_k=d_k)
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
    script.sizes = usual


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
    `only` names this law.
    """
    for dtype in (torch.bfloat16, torch.float16):
        for allowed, mask in script.mask_cases():
            assert_half_is_close(script, dtype, allowed, mask)
        # PyTorch's `normalize` has an epsilon that is zero in float16.
        is_torchs = "normalize" in structure.identifiers(script.adapter.target)
        if dtype == torch.bfloat16 or not is_torchs:
            assert_half_is_close(script, dtype, change=with_zero_token)
    if scores_are_bounded(script):
        assert_half_is_close(script, torch.float16, change=with_large_tokens)


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
    mentioned = any(map(FLOAT16_PATTERN.search, map(names.source_of, own)))
    return script.insist or mentioned


@law
def finite_in_half(script: Script) -> None:
    r"""A zero token has a finite output in float16, if it has one in float32.

    $$|y_{\text{float32}}| < \infty \;\Rightarrow\; |y_{\text{float16}}| < \infty$$

    The least positive number of float16 is 6e-8. A smaller epsilon is rounded to zero,
    and where all features of a query or of the keys are zero, as behind a ReLU, a sum
    of them divides 0 by 0. Other than the tenth of `half_precision`, this holds for
    each design.
    """
    usual, found = script.dtype, []
    # PyTorch's `normalize` has an epsilon that is zero in float16.
    is_torchs = "normalize" in structure.identifiers(script.adapter.target)
    skip_unless(not is_torchs, "calls `normalize`, whose epsilon is 0 in float16")
    is_exponential = "features" in script.adapter.designs and "exp" in (
        structure.identifiers(script.adapter.target)
    )
    skip_unless(not is_exponential, "sums of exponentials may round to 0 in float16")
    for script.dtype in (torch.float32, torch.float16):
        try:
            script.restart()
            args = script.make_arguments()
            zeros = tuple(with_zero_token(script, name) for name in args.inputs)
            found.append(script.call(replace(args, inputs=zeros)))
        except ScriptError as failure:
            raise NotApplicable(f"does not take {script.dtype}: {failure}") from failure
        if script.dtype == torch.float32:
            is_small = script.evaluate(f"{found[0]}.abs().max() < 1e4")
            skip_unless(is_small, "its output is large, or not finite, in float32")
    script.assert_finite(found[1], "the output is NaN or infinite in float16")
    script.dtype = usual


def with_zero_token(script: Script, name: str) -> str:
    """An input whose first token is zero."""
    zeros = script.assign(name, f"{name}.clone()")
    script.exec_line(f"{zeros}{script.adapter.index(l=slice(0, 1))} = 0")
    return zeros


def with_large_tokens(script: Script, name: str) -> str:
    """An input whose squares overflow in float16, though it does not."""
    return script.assign(name, f"300 * {name}")


def scores_are_bounded(script: Script) -> bool:
    """Whether tokens of any size give the same weights, none of them zero.

    So it is if queries and keys, or the tokens, are normalized. A key that is alone has
    a weight of one, whatever its score is.
    """
    usual = script.sizes
    if usual.k_len < 3:
        return False
    script.sizes = replace(usual, batch_size=1)
    script.restart()
    args = script.make_arguments()
    found = []
    for factor in (1, 300, 600):
        inputs = tuple(script.assign(n, f"{factor} * {n}") for n in args.inputs)
        found.append(record_weights(script, replace(args, inputs=inputs)))
    script.sizes = usual
    if not all(found):
        return False
    small, large, larger = found
    are_equal = f"torch.allclose({large}, {larger}, atol=1e-2)"
    are_seen = f"torch.equal({small} > 0, {large} > 0)"
    are_shared = f"(({small} > 0.01) & ({small} < 0.99)).any()"
    return bool(script.evaluate(f"{are_equal} and {are_seen} and {are_shared}"))


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
    usual, script.dtype = script.dtype, dtype
    allowed = script.all_allowed() if allowed is None else allowed
    try:
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
            if mentions_float16(script) or not squares_overflow(script, args):
                raise
            reason = "squares overflow in float16, which its code does not mention"
            raise Excused(reason) from None
    except ScriptError as failure:
        if not script.is_unsupported(failure):
            raise
    finally:
        script.dtype = usual


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
    """
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
    usual, insists = script.dtype, script.insist
    try:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            script.dtype = dtype
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
    finally:
        script.dtype, script.insist = usual, insists


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
    script.exec_line(f"compiled = torch.compile(attention, backend={backend!r})")
    try:
        output = script.call(args, function="compiled")
    except ScriptError as failure:
        if "No working C++ compiler" in str(failure):
            raise NotApplicable("there is no C++ compiler here") from failure
        raise
    message = "the compiled output differs at {place}"
    script.assert_close(eager, output, message)


@law(slow=True)
def vmapped(script: Script) -> None:
    r"""Under `vmap`, each example gives the same output as alone.

    $$\operatorname{vmap}(y)(x_1, x_2) = \big(y(x_1),\, y(x_2)\big)$$

    `torch.func.vmap` computes ensembles and per-example gradients. It cannot trace
    control flow that depends on values; the law does not apply to such code.
    """
    *_, (allowed, mask) = script.mask_cases()
    script.restart()
    first = script.make_arguments(allowed, mask)
    second = script.make_arguments(allowed)
    second = replace(second, mask=first.mask, allowed=allowed)
    one, other = script.call(first), script.call(second)
    names = ", ".join(first.inputs)
    pairs = zip(first.inputs, second.inputs, strict=True)
    stacked = ", ".join(f"torch.stack([{a}, {b}])" for a, b in pairs)
    output_index = script.adapter.output_index
    call = f"{script.call_source(first)}{output_index}"
    try:
        both = script.assign(
            "both", f"torch.func.vmap(lambda {names}: {call})({stacked})"
        )
    except ScriptError as failure:
        raise NotApplicable(f"vmap cannot trace it: {failure}") from failure
    for n, output in enumerate((one, other)):
        message = "under vmap, the output at {place} differs"
        script.assert_close(output, f"{both}[{n}]", message)


# What PyTorch says of operands of two dtypes.
DTYPES_DIFFER = re.compile(
    r"same (scalar type|dtype)|expected \w+ scalar type|dtypes? .*(match|equal)"
)


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
        output_index = script.adapter.output_index
        call = f"{script.call_source(args)}{output_index}"
        device = script.device.partition(":")[0]
        context = f"with torch.autocast({device!r}, torch.bfloat16): "
        try:
            script.exec_line(f"{context}cast = {call}")
        except ScriptError as failure:
            # An exception is nobody's wrong number: a product that autocast does not
            # know, such as `tensordot`, takes no operands of two dtypes, and a fill
            # value of float32 does not fit into bfloat16.
            differ = DTYPES_DIFFER.search(str(failure)) and not script.insist
            if not (differ or script.is_unsupported(failure)):
                raise
            raise NotApplicable(f"does not run under autocast: {failure}") from failure
        message = "under autocast, the output at {place} differs"
        script.assert_close(usual, "cast", message, relative=0.1)


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

    A tensor that is neither a parameter nor a buffer is in no checkpoint. The state
    dict is saved to bytes, and loaded into a module that was initialized with another
    seed, or whose parameters were overwritten.
    """
    adapter = script.adapter
    skip_unless(adapter.is_module, "is a function, and has no state")
    script.restart()
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
