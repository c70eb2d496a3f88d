r"""# Laws of dropout

Dropout is where a wrong implementation shows least: the loss falls, and evaluation is
right. Copies of one sequence in a batch show what is random, and means over many copies
what is lost.

Source: [Dropout](https://jmlr.org/papers/v15/srivastava14a.html), Srivastava et al.
2014, section 4; [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani
et al. 2017, section 5.4.
"""

import inspect
import math
import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from attention_laws import documented, names, structure
from attention_laws.execution import names_of
from attention_laws.influence import depends_on
from attention_laws.law import (
    LawViolation,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.order import all_reach_last
from attention_laws.rates import place_of, probabilities, rates_of
from attention_laws.recorded import make_equal_tokens
from attention_laws.recorders import CalledFunctions, FactorOfDropout, WeightsRecorder
from attention_laws.script import CallArguments, Script
from attention_laws.source import source_of
from attention_laws.tools import are_on_a_line, last_activation

# Copies of one sequence, of which each has a dropout mask of its own. There are fewer
# if a call computes more than `COPIED_ENTRIES` for them, or if they are packed into one
# sequence, whose scores grow with the square.
COPIES, FEWEST_COPIES, COPIED_ENTRIES = 4096, 256, 1e7
# How many entries are computed in the time that a call of a function takes.
ENTRIES_OF_CALL = 5000
# Whether each row of `x` may be weights, as source text.
IS_ROW = "(x.sum(-1) - 1).abs().max() < 0.01 and x.min() >= 0"
# Calls with one sequence, of which each has a dropout mask of its own.
CALLS = 1024

MEAN_MESSAGE = (
    "on average, dropout changes the output: it is not scaled by 1 / (1 - p), or "
    "not applied to the weights after the softmax"
)


@law(slow=True, assumes="linear")
def dropout(script: Script) -> None:
    r"""Dropout changes each weight independently, and on average nothing.

    $$\operatorname{E}[y_{\text{train}}] = y_{\text{eval}}$$

    It is applied to the weights, after the softmax, and what remains is divided by the
    probability to remain. Each dropout of the module is set to 0.5 in turn, and to
    0.02, which must change less. Copies of one sequence in a batch show what is random:
    over the copies the mean output must be that of evaluation; calls, copies, queries
    and heads must not share one mask, unless it is documented that queries do. Where
    heads are dropped as a whole, those that remain are scaled, too.
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
    script.restart("train")
    places = script.evaluate("dropout_places(attention)")
    if "b" not in adapter.layout:
        tested = [assert_calls_are_fair(script, place) for place in places]
        skip_unless(any(tested), "takes one sequence at a time")
        return
    assert_draws_have_an_effect(script)
    skip_unless(places, "has no dropout")
    assert_argument_switches_off(script)
    for place in places:
        assert_weights_alone_are_dropped(script, place)
        assert_heads_stay(script, place)
    changed = {place: assert_dropout_is_fair(script, place) for place in places}
    for place in places:
        if changed[place]:
            assert_each_path_drops(script, place)
    assert_rates_reach_their_places(script, changed)
    assert_rates_drop_something(script)
    is_unknown = "norm" in adapter.designs  # what drops, behind one
    if "weights" not in changed.values() or is_unknown:
        for place in places:
            found = script.evaluate(f"dropout_names(attention, {place!r})")
            idle = [name for name in found if "att" in name and not changed[place]]
            if is_unknown:  # a number that is also that of a layer is no other dropout
                idle = [name for name in idle if is_given_to_function(script, name)]
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
        # Weights that a ReLU makes zero, of the last query, show no dropout.
        last = 0 if adapter.is_pooled else len(args.allowed) - 1
        moved = script.call(script.perturb(args, l=slice(0, last or None)))
        seen = adapter.index(l=slice(last, None))
        is_constant = script.evaluate(f"torch.equal({one}{seen}, {moved}{seen})")
        skip_unless(not is_constant, "its output is constant for so few tokens")
        message = "dropout has no effect in training"
        script.assert_true(f"not torch.equal({one}, {other})", message)


def is_given_to_function(script: Script, name: str) -> bool:
    """Whether `forward` gives an attribute to a function of dropout."""
    code = source_of(script.evaluate("attention.forward"))
    given = re.findall(r"dropout\w*\(([^()]*)\)", code)
    return any(re.search(rf"\bself\.{name}\b", text) for text in given)


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


# What dropout changes, by the name of its rate.
RATES = {
    "weights": re.compile(r"(^|_)att(entio)?n?_(\w+_)?(drop|p)"),
    "output": structure.OUTPUT_DROPOUT_PATTERN,
}


def assert_rates_reach_their_places(script: Script, changed: dict[str, str]) -> None:
    """With a rate named for attention, weights are dropped; others, with another one.

    `changed` has what the dropout at each place of the module changes.
    """
    adapter, rates = script.adapter, names.dropout_arguments(script.adapter.target)
    if not {*RATES} <= {*changed.values()}:
        return  # there is one kind only
    for name in rates:
        for expected, pattern in RATES.items():
            if not pattern.search(name):
                continue
            init_args = {**adapter.init_args, **rates, name: "0.5"}
            with script.using(replace(adapter, init_args=init_args)):
                script.restart("train", dropout=None)
            reached = script.evaluate("active_dropout(attention)")
            found = {changed.get(place) for place in reached}
            if (found & {*RATES} or not reached) and expected not in found:
                other = "output" if expected == "weights" else "weights"
                what = f"the {other}, and not the {expected}" if reached else "nothing"
                message = f"`{name}` drops {what}"
                claim = f"active_dropout(attention) != {reached}"
                script.assert_true(claim, message)


# Rates that may be of no layer, such as of the first of them.
OTHER_RATES = re.compile("path|depth|layer|stoch|block|zone")
# What the documentation says of an argument that is for other code only.
UNUSED = r"\b(unused|ignored|not used|no effect|compatib\w+)\b"


def assert_rates_drop_something(script: Script) -> None:
    """A rate of the constructor reaches a dropout of the module, whatever it drops."""
    adapter = script.adapter
    rates = names.dropout_arguments(adapter.target)
    for name in rates:
        if OTHER_RATES.search(name) or documented.says_of(adapter.target, name, UNUSED):
            continue
        init_args = {**adapter.init_args, **rates, name: "0.5"}
        with script.attempt():
            with script.using(replace(adapter, init_args=init_args)):
                script.restart("train", dropout=None)
            message = f"`{name}` of the constructor drops nothing"
            script.assert_true("active_dropout(attention) != []", message)


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
    if not any("att" in name for name in names_at(script, place)):
        return
    args = script.make_arguments()
    call = f"lambda: {script.call_source(args)}"
    if layer := layer_at(script, place, "torch.nn.Dropout"):
        seen = script.assign("seen", f"captured_inputs({call}, {layer})")
        are_weights = script.assign("are_weights", f"[bool({IS_ROW}) for x in {seen}]")
        message = f"`{place}` is applied to the weights, and to other numbers, too"
        claim = f"all({are_weights}) or not any({are_weights})"
        script.assert_true(claim, message)


def names_at(script: Script, place: str) -> list[str]:
    """The names of a dropout of the module, or of the argument of a function."""
    if not script.adapter.is_module:
        return [place]
    found: list[str] = script.evaluate(f"dropout_names(attention, {place!r})")
    return found


def layer_at(script: Script, place: str, kinds: str) -> str:
    """The dropout layer at a place, if it is of these kinds; else ""."""
    path = place.replace("*", "0")
    if path not in dict(script.evaluate("attention").named_modules()):
        return ""
    layer = f"attention.get_submodule({path!r})"
    return layer if script.evaluate(f"isinstance({layer}, {kinds})") else ""


def assert_heads_stay(script: Script, place: str) -> None:
    """Weights are dropped one by one, and not by a layer that drops whole channels.

    It takes the weights of a head for a channel.
    """
    script.restart("train")
    kinds = "(torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d)"
    layer = layer_at(script, place, kinds)
    if not layer or is_of_part(script, place):
        return
    call = f"lambda: {script.call_source(script.make_arguments())}"
    seen = script.assign("seen", f"captured_inputs({call}, {layer})")
    message = f"`{place}` drops all weights of a head at once"
    script.assert_true(f"not any({IS_ROW} for x in {seen})", message)


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
    with script.using(replace(adapter, init_args={**adapter.init_args, **given})):
        script.restart("train", dropout=None)
        if structure.has_dropout_of_its_own(script.evaluate("attention")):
            return
        args = script.make_arguments()
        trained = script.call(args)
        script.exec_line("attention.eval()")
        text = ", ".join(f"{name}={value}" for name, value in given.items())
        message = f"{{place}} differs in training, though it is built with `{text}`"
        script.assert_close(script.call(args), trained, message)


def assert_dropout_is_fair(script: Script, place: str) -> str:
    """Test one dropout of the module; return what it changes.

    That is "weights", "output", or nothing. Dropped weights change the output for equal
    tokens in one direction a head only, and a dropped output in all.
    """
    adapter = script.adapter
    length = adapter.fixed_length or max(3, adapter.least_length)
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
            if not equal and is_of_heads(script, place):
                assert_heads_are_scaled(script, many, y, place)
            if not equal:
                again = script.call(many)
                message = "two calls in training share one dropout mask"
                script.assert_true(f"not torch.equal({output}, {again})", message)
                if is_of_heads(script, place):
                    assert_items_are_scaled_alone(script, y, again)
                assert_keys_drop_apart(script, each, y, place)
                assert_less_drops_less(script, many, y, place)
                if keeps_mean(script, place):
                    try:
                        assert_mean_is_kept(script, many, output, place)
                    except LawViolation:
                        if hides_keys(script, many, place):
                            return "weights"
                        if not drops_table(script, many, place):
                            raise
            elif "h" not in adapter.layout:
                rank = script.evaluate(
                    f"torch.linalg.matrix_rank({y}[:, -1] - {y}[0, -1], rtol=1e-3)"
                )
                changed = "weights" if rank <= script.sizes.heads else "output"
                if not (is_of_part(script, place) or is_before_scores(script, place)):
                    is_alike = changed == "weights" and drops_alike(script, place)
                    assert_masks_differ(script, args, many, y, is_alike)
                return changed
            elif script.sizes.heads > 1:
                assert_as_many_directions(script, y)
    if "norm" in adapter.designs:
        assert_heads_drop_apart_in_front_of_norm(script, args, copies, place)
    return "weights"  # or not known


def assert_heads_drop_apart_in_front_of_norm(
    script: Script, args: CallArguments, copies: int, place: str
) -> None:
    """No two heads share their dropout masks, whatever is made of the output."""
    is_of_other = is_of_part(script, place) or is_before_scores(script, place)
    if "h" in script.adapter.layout or is_of_other or has_several_attentions(script):
        return
    with script.rollback():
        apply_dropout(script, 0.5, place)
        equal = make_equal_tokens(script, args)
        assert_heads_drop_apart(script, repeat_item(script, equal, copies))


def assert_heads_are_scaled(
    script: Script, many: CallArguments, y: str, place: str
) -> None:
    """What remains of heads that are dropped as a whole is scaled.

    At a probability of 0.5, the output of an item that has lost no head is then twice
    the usual, but for what is added to it. Unscaled, it is the usual one.
    """
    if documented.scales_by_rest(script.adapter.target):
        return
    with script.rollback():
        apply_dropout(script, 0.0, place)
        usual = f"{script.call(many)}.movedim({copies_first(script)}, [0, 1])"
        unscaled = f"(({y} - {usual}).abs().flatten(1).amax(1) < 1e-5).any().item()"
        owner = f"`{place}`" if place else "it"
        message = f"{owner} drops heads, and those that remain are not scaled"
        script.assert_true(f"not {unscaled}", message)
        apply_dropout(script, 0.5, place)  # as before


def assert_items_are_scaled_alone(script: Script, y: str, again: str) -> None:
    """What remains of heads is scaled by those of its own item, and not of the batch.

    With $h$ heads, equal items have $2^h$ outcomes then, in all calls together.
    """
    last = f"{again}.movedim({copies_first(script)}, [0, 1])[:, -1]"
    both = f"torch.cat([{y}[:, -1], {last}])"
    message = "what remains of an item depends on the heads that others lose"
    script.assert_true(f"count_outcomes({both}) <= 2**{script.sizes.heads}", message)


def assert_as_many_directions(script: Script, y: str) -> None:
    """For equal tokens, outputs differ in as many directions as there are heads.

    What remains of the weights of a head is a factor of its values.
    """
    spread = f"{y}[:, -1].flatten(1) - {y}[0, -1].flatten()"
    assert_rank_of_heads(script, spread, script.sizes.heads)


def assert_rank_of_heads(script: Script, spread: str, heads: int) -> None:
    """Rows, one for each item, differ in as many directions as there are heads."""
    message = f"of {heads} heads, some share one dropout mask"
    rank = f"torch.linalg.matrix_rank({spread}, rtol=1e-3)"
    script.assert_true(f"{rank} >= {heads}", message)


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
            with CalledFunctions() as functions:
                entries = script.evaluate(f"count_entries({call})")
            # A loop over the copies calls more functions for more of them.
            counts.append(entries + ENTRIES_OF_CALL * functions.found.total())
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


def keeps_mean(script: Script, place: str) -> bool:
    """Whether a dropout keeps the mean of the outputs, as far as is known."""
    target = script.adapter.target
    if documented.scales_by_rest(target) and is_of_part(script, place):
        return False
    if documented.renormalizes_rest(target):
        return False
    return not (is_before_scores(script, place) or has_several_attentions(script))


def is_before_scores(script: Script, place: str) -> bool:
    """Whether a dropout is one of inputs or of queries and keys, by its name.

    It is part of their projections, as in LoRA.
    """
    if not script.adapter.is_module:
        return False
    *layers, _last = place.split(".")
    roles = {structure.role_of(layer, None) for layer in layers}
    found = [place, *names_at(script, place)]
    is_named = any(map(structure.INPUT_DROPOUT_PATTERN.search, found))
    return is_named or bool(roles & {"query", "key", "fused"})


def drops_alike(script: Script, place: str) -> bool:
    """Whether a dropout is documented to be the same for all queries.

    That is in the documentation of the attention, or of the part that drops.
    """
    rates = rates_of(script.evaluate("attention")) if script.adapter.is_module else ()
    kinds = {type(part) for found, part, _ in rates if found == place}
    of_users = (kind for kind in kinds if not kind.__module__.startswith("torch"))
    documents = {script.adapter.target, *of_users}
    return any(map(documented.drops_alike_for_queries, documents))


def is_of_part(script: Script, place: str) -> bool:
    """Whether a dropout drops a whole part, such as a head, by its name."""
    found = [place, *names_at(script, place)]
    return any(map(structure.PART_DROPOUT_PATTERN.search, found))


def has_several_attentions(script: Script) -> bool:
    """Whether there is more than one attention, but for a list of heads.

    What one of them drops may change the scores of another, as it does in recurrent
    layers. The layers of a stack have more weights than the heads have.
    """
    if not script.adapter.is_module:
        return False
    attention = script.evaluate("attention")
    paths = structure.attention_paths(attention)
    if len({place_of(path) for path in paths}) > 1 or structure.is_recurrent(attention):
        return True
    with script.rollback(), WeightsRecorder() as recorder:
        args = script.make_arguments()
        script.call(args)
    # Each attention may have a few keys of its own.
    keys = max((script.sizes.k_len, *recorder.key_counts))
    found = [weights for weights, _ in recorder.found]
    queries = len(args.allowed)
    if script.adapter.is_pooled:  # they are learned
        queries = max([queries, *(w.shape[-2] for w in found if w.dim() > 2)])
    of_heads = script.sizes.heads * queries * script.sizes.batch_size * keys
    # A router has fewer axes: it chooses heads for each token.
    axes = max((weights.dim() for weights in found), default=0)
    count: int = sum(w.numel() for w in found if w.dim() == axes)
    return bool(count > of_heads)


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
    seed = names.parameters_by_name(adapter.target).get("seed")
    if seed is not None and seed.default is None:  # it may be required in training
        drawn = {"seed": "torch.randint(2**31, ()).item()"}
        extra_args = {**adapter.extra_args, **drawn}
        script.adapter = replace(script.adapter, extra_args=extra_args)


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
    if script.adapter.is_module:
        # A norm may be in front of the attention only, if what is dropped shows it.
        unknown = not is_linear
        is_linear = is_linear_in_dropped(script, many, place, known=unknown)
    if script.adapter.is_module and not is_linear:
        width = script.sizes.heads * script.sizes.d_k
        layers = structure.layers_by_role(script.evaluate("attention"), width)
        if "out" not in layers or "talking" in script.adapter.designs:
            return
        last = f"attention.get_submodule({layers['out']!r})"
        arguments = f"lambda: {script.call_source(many)}, {last}"
        if not script.evaluate(f"is_called({arguments})"):
            return  # that of a `MultiheadAttention` is not called as a layer
        call = f"captured_input({arguments})"
        value, axis = script.evaluate(call), script.adapter.layout.index("b")
        axes = 3 + script.adapter.image.startswith("image")
        if value.dim() not in (3, axes) or value.shape[axis] != len(many.allowed[0, 0]):
            return  # of parts of the sequences, such as the frames of videos
        if is_normalized(script, call):
            return
        if not is_linear_in_dropped(script, many, place, call):
            return  # what is dropped is in front of the attention
        y = script.assign("y", f"{call}{first}.detach()")
        apply_dropout(script, 0.0, place)
        usual = script.assign("usual", call)
    else:
        y = script.assign("y", f"{output}{first}.detach()")
        apply_dropout(script, 0.0, place)
        usual = script.call(many)
    error = script.assign("error", f"{y}.std(dim=0) / {len(many.allowed[0, 0])} ** 0.5")
    usual = f"{usual}{first}[0]"
    difference = f"({y}.mean(dim=0) - {usual}).abs()"
    script.assert_true(f"({difference} <= 6 * {error} + 1e-3).all()", MEAN_MESSAGE)


def assert_calls_are_fair(script: Script, place: str) -> bool:
    """The mean over calls with one sequence is its output without dropout.

    For equal tokens, heads have dropout masks of their own. Return whether this was
    tested. Only PyTorch's functions are known to drop numbers, and not whole edges or
    tokens.
    """
    adapter = script.adapter
    if adapter.image or is_before_scores(script, place):
        return False
    script.restart("train")
    args = script.make_arguments()
    output = script.call(args)
    is_linear = "norm" not in adapter.designs
    is_linear &= not last_activation(script.evaluate(output))
    if not (is_linear and is_linear_in_dropped(script, args, place, known=True)):
        return False
    apply_dropout(script, 0.5, place)
    y = stack_of_calls(script, args)
    error = f"{y}.std(dim=0) / {CALLS} ** 0.5"
    difference = f"({y}.mean(dim=0) - {output}).abs()"
    script.assert_true(f"({difference} <= 6 * {error} + 1e-3).all()", MEAN_MESSAGE)
    if script.sizes.heads > 1 and not documented.drops_alike_in_heads(adapter.target):
        equal = make_equal_tokens(script, args)
        assert_as_many_directions(script, stack_of_calls(script, equal))
    return True


def stack_of_calls(script: Script, args: CallArguments) -> str:
    """The outputs of many calls with the same arguments."""
    call = script.call_source(args) + script.adapter.output_index
    return script.assign("y", f"torch.stack([{call} for _ in range({CALLS})]).detach()")


def is_linear_in_dropped(
    script: Script,
    many: CallArguments,
    place: str,
    source: str = "",
    known: bool = False,
) -> bool:
    """Whether the output is a linear function of the weights or features dropped.

    Behind a layer with an activation, and without a norm, a mean is not kept either.
    Instead of the output, it may be what the `source` text gives. It is taken to be so
    where no function of PyTorch drops, unless that is to be `known`.
    """
    outputs, length = [], script.sizes.k_len
    with script.rollback():
        apply_dropout(script, 0.0, place)
        apply_dropout(script, 0.5, place)
        for factor in (1, 2, 3):
            with FactorOfDropout(factor) as mode:
                outputs.append(script.evaluate(source or script.call(many)).detach())
            # Scores in place of weights are wrong, and not linear: the mean shows it.
            if not mode.dropped:
                return not known
            if any(has_other_sums(x, length) for x in mode.dropped):
                return True
    return are_on_a_line(outputs)


def has_other_sums(x: Tensor, k_len: int) -> bool:
    """Whether rows that could be weights of `k_len` keys do not all sum to one.

    For all edges of a graph of as many tokens, with or without loops that are added,
    the weights of a head have a sum of one for each token.
    """
    is_of_edges = len(x) in (k_len**2, k_len**2 + k_len) and x.requires_grad
    if is_of_edges and x.dim() == 2 and k_len > 2:
        return bool((x.sum(0) - k_len).abs().max() > 0.01)
    is_square = [*x.shape[-2:]] in ([1, k_len], [k_len, k_len])
    # Heads may be the last axis, and as many as keys.
    return is_square and all(
        bool((x.sum(axis) - 1).abs().max() > 0.01) for axis in (-1, -2)
    )


def is_normalized(script: Script, call: str) -> bool:
    """Whether the value of a call of the module is the output of one of its norms."""
    outputs: list[Tensor] = []
    _attention, *parts = script.evaluate("attention").modules()
    handles = [
        part.register_forward_hook(lambda _, inputs, output: outputs.append(output))
        for part in filter(structure.is_norm, parts)
    ]
    value = script.evaluate(call)
    for handle in handles:
        handle.remove()
    return any(
        output.shape == value.shape and torch.equal(output, value) for output in outputs
    )


def assert_masks_differ(
    script: Script, args: CallArguments, many: CallArguments, y: str, is_alike: bool
) -> None:
    """Queries, heads and keys have dropout masks of their own.

    Queries share them if `is_alike`, as documented.

    All tokens are equal, so that outputs differ by the dropout masks only. With
    $n$ keys and $h$ heads, the counts of remaining keys allow $(n + 1)^h$ outcomes.
    """
    adapter, heads = script.adapter, script.sizes.heads
    length, copies = count_keys(script, args), len(many.allowed[0, 0])
    if has_several_attentions(script):
        return  # each may have fewer keys or queries
    if adapter.is_pooled:
        assert_heads_drop_apart(script, many)
        return
    if "convolution" in adapter.designs and (
        "selection" in adapter.designs or structure.uses_spectra(adapter.target)
    ):
        return  # what has a weight are the delays of a series, for all queries
    is_of_order = adapter.causal or adapter.positions != "none"
    same = f"torch.allclose({y}[:, 0], {y}[:, 1], atol=1e-4)"
    if is_alike and not is_of_order:
        message = "queries have dropout masks of their own, and are documented to share"
        script.assert_true(same, message)
        return  # heads may share them, too
    if not (is_of_order or structure.drops_columns(adapter.target)) and length > 1:
        message = "all queries share one dropout mask"
        script.assert_true(f"not {same}", message)
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
        if not differs_for_unequal_tokens(script, args, copies, 1.1 * expected):
            script.assert_true(claim, message.format(count))
    assert_heads_drop_apart(script, many)


def assert_heads_drop_apart(script: Script, many: CallArguments) -> None:
    """No two heads share their dropout masks, such as those of a group.

    For equal tokens, what remains of the weights of a head is a factor of its part of
    the last layer's input. Independent factors span as many directions as heads.
    """
    adapter, heads = script.adapter, script.sizes.heads
    width = heads * script.sizes.d_k
    if documented.drops_alike_in_heads(adapter.target):
        return
    layers: dict[str, str] = {}  # of a function
    if adapter.is_module:
        layers = structure.layers_by_role(script.evaluate("attention"), width)
    if "out" not in layers:
        assert_outputs_drop_apart(script, many)
        return
    layer = f"attention.get_submodule({layers['out']!r})"
    arguments = f"lambda: {script.call_source(many)}, {layer}"
    if not script.evaluate(f"is_called({arguments})"):
        return
    call = f"captured_input({arguments})"
    value, copies = script.evaluate(call), len(many.allowed[0, 0])
    axes = [adapter.layout.index(axis) for axis in "lb"]
    if value.dim() != 3 or value.shape[axes[1]] != copies:
        return
    if value.shape[axes[0]] != len(many.allowed) and not adapter.is_pooled:
        return
    if value.shape[-1] != width:
        return  # the heads are not side by side
    last = script.assign("last", f"{call}.movedim({axes}, [0, 1])[-1].detach()")
    spread = script.assign("spread", f"{last} - {last}.mean(0)")
    if script.evaluate(f"{spread}.norm() > 1e-3 * {last}.norm()"):
        # Those that a token has not chosen are zero.
        largest = f"{spread}.unflatten(-1, ({heads}, -1)).abs().amax(dim=(0, 2))"
        count = script.evaluate(f"({largest} > 0).sum().item()")
        assert_rank_of_heads(script, spread, count)


def assert_outputs_drop_apart(script: Script, many: CallArguments) -> None:
    """The same for outputs, as far as heads are summed there by weights of their own.

    Those of several shards are, in each of which a mask may be drawn for its heads.
    """
    heads = script.sizes.heads
    with script.rollback(), WeightsRecorder() as recorder:
        output = script.evaluate(script.call(many))
    calls = len(recorder.found)
    if not 1 < calls < heads or output.dim() != 3 or output.shape[-1] < heads:
        return
    last = f"{script.call(many)}.movedim({copies_first(script)}, [0, 1])[:, -1]"
    spread = script.assign("spread", f"({last} - {last}.mean(0)).detach()")
    assert_rank_of_heads(script, spread, heads)


def count_keys(script: Script, args: CallArguments) -> int:
    """The number of keys, which may be fewer than the tokens."""
    with WeightsRecorder() as recorder:
        script.evaluate(script.call_source(args))
    counts: set[int] = {script.sizes.k_len, *recorder.key_counts}
    return min(counts)


def differs_for_unequal_tokens(
    script: Script, args: CallArguments, copies: int, expected: float
) -> bool:
    """Whether unequal tokens have more outputs than one mask for all keys or heads.

    The mean of heads that share their values tells of equal tokens only how many
    weights remain.
    """
    with script.rollback():
        output = script.call(repeat_item(script, args, copies))
        in_order = f"{output}.movedim({copies_first(script)}, [0, 1])"
        count = script.evaluate(f"count_outcomes({in_order}.detach()[:, -1])")
    return bool(count > expected)


# Names of a dropout of whole heads.
HEADS_PATTERN = re.compile(r"head_?drop|drop_?head|^(p_heads?|heads?_p)$")


def is_of_heads(script: Script, place: str) -> bool:
    """Whether a dropout drops whole heads, by its name."""
    return any(map(HEADS_PATTERN.search, names_at(script, place)))


def assert_keys_drop_apart(
    script: Script, args: CallArguments, y: str, place: str
) -> None:
    """No query loses all its keys in a head at once, unless all queries do.

    With $h$ heads, it would have $2^h$ outcomes. A whole head may be dropped for all.
    """
    adapter, heads = script.adapter, script.sizes.heads
    few_keys = {"compression", "convolution", "selection"}
    if is_of_heads(script, place) and heads > 1:
        message = f"`{place}` drops all heads of a token, or none"
        script.assert_true(f"count_outcomes({y}[:, -1]) > 2", message)
    if "h" in adapter.layout and script.sizes.k_len > 1 and adapter.layout[-1] == "d":
        # The heads are apart, and all that a head can lose at once is the whole.
        claim = f"count_outcomes({y}[:, -1, 0]) > 2"
        message = "a query loses all weights of a head at once"
        if script.evaluate(claim) or last_query_sees_all(script, args, place):
            script.assert_true(claim, message)
        return
    if (
        adapter.is_pooled
        or heads == 1
        or script.sizes.d_k == 1
        or documented.drops_alike_in_heads(adapter.target)
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
    if not script.evaluate(claim) and last_query_sees_all(script, args, place):
        script.assert_true(claim, message.format(script.evaluate(last)))


def last_query_sees_all(script: Script, args: CallArguments, place: str) -> bool:
    """Whether the last output depends on each token, also beyond a window.

    Where one weight is all, that of the other keys shows no dropout.
    """
    with script.rollback():
        apply_dropout(script, 0.0, place)
        with WeightsRecorder() as recorder:
            before = script.call(args)
        if any((w[..., -1, :] > 0.999).any() for w, _ in recorder.found if w.dim() > 2):
            return False
        sees_all = all_reach_last(script, args, before, script.sizes.k_len)
        apply_dropout(script, 0.5, place)
    return sees_all
