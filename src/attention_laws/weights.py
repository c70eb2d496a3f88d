r"""# Laws of returned weights

$$y_i = \textstyle\sum_j a_{ij} v_j \, W_O$$

An attention that returns its weights promises that these are what it applied to the
values: of each head, of each query and key, behind the mask. Others are plotted, and
compared, in vain.

Source: the [laws of the formula](algebra.md), and what
[`nn.MultiheadAttention`](https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html)
documents of the weights that it returns.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from attention_laws import documented, names, structure
from attention_laws.adapter import AXES, Adapter
from attention_laws.algebra import (
    UNKNOWN_ORDER,
    compare_projected,
    has_unknown_order,
    project,
)
from attention_laws.law import (
    Excused,
    LawViolation,
    law,
    skip_unless,
)
from attention_laws.recorded import (
    assert_weights_are_applied,
    record_weights,
)
from attention_laws.script import CallArguments, Script, find_output


@law(assumes="assignment monotonic")
def weights_axes(script: Script) -> None:
    r"""Returned weights have a row for each query, and a column for each key.

    $$a_{ij} = a_{ij}(q_i, k_j)$$

    A decoder layer may return the weights of its self-attention where those of its
    cross-attention are expected. Where the lengths differ, so do the shapes; where they
    are the same, the weights of other keys have to be others.
    """
    adapter, sizes = script.adapter, script.sizes
    skip_unless(adapter.weights_source, "returns no weights")
    several = not adapter.single_input and not adapter.is_pooled
    skip_unless(several, "its queries and keys have one length")
    skip_unless(sizes.k_len > 1, "needs two keys")
    script.restart()
    args = script.make_arguments()
    weights = script.call_for_weights(args)
    lengths = sizes.lengths()
    shape = [lengths[axis] for axis in adapter.weights_axes]
    claim = f"list({weights}.shape) == {shape}"
    seen = [*script.evaluate(weights).shape]
    names_of_axes = ", ".join(AXES[axis] for axis in adapter.weights_axes)
    message = f"the returned weights have shape {seen}, not {shape}: {names_of_axes}"
    script.assert_true(claim, message)
    other = script.call_for_weights(script.perturb(args, l=slice(None)))
    # Slots divide each key among them, and a single one gets the whole.
    claim = f"not torch.equal({weights}, {other}) or ({weights} == 1).all()"
    script.assert_true(claim, "the returned weights do not depend on the keys")


# Designs that change what weights and values give, but not how much of each value.
AROUND_WEIGHTS = {"norm", "residual", "gate", "softcap", "sink"}


@law(assumes="features convolution clip assignment")
def weights_match_output(script: Script) -> None:
    r"""The returned weights are those that were used.

    $$y_i = \textstyle\sum_j a_{ij} v_j \, W_O$$

    Weights are returned for plots and for pruning. If they were computed a second time,
    before a mask or with another scale, or belong to another head, what they show is
    not what the model did. Where the formula is not known, as behind a norm or a gate,
    the influence of a value on the output has to be in proportion to its weight. If the
    documentation tells whether they are from before or after dropout, they are tested
    for it. Those of one output for all tokens sum to one with hidden keys as without.
    Means over heads are compared where there is one head. Those of several layers have
    to be results of a softmax that are applied. Weights that are documented as those
    used are multiplied by a mask of the heads, too.
    """
    adapter = script.adapter
    assert_weights_are_applied(script)
    skip_unless(adapter.weights_source, "returns no weights")
    if "q" not in adapter.weights_axes:
        assert_pooled_weights_are_shares(script)
        return
    assert_weights_are_as_documented(script)
    if "h" not in adapter.weights_axes:
        if documented.averages_heads(adapter.target):
            assert_weights_are_averaged(script)
        if script.sizes.heads > 1:
            assert_weighted_keys_matter(script)
            return
    try:
        assert_weights_match(script)
    except LawViolation:
        # They may be returned as they were before the heads were mixed.
        is_promised = documented.returns_weights_of_values(adapter.target)
        mixes_heads = "talking" in adapter.designs and not script.insist
        is_excused = mixes_heads and not is_promised
        if is_excused and not are_right_without_mask(script):
            raise Excused("mixes the weights of its heads") from None
        raise
    assert_head_mask_is_in_weights(script)
    kinds = with_kinds_of_pairs(adapter)
    if kinds != adapter:
        with script.using(kinds), script.attempt():  # there may be one kind only
            assert_weights_match(script)


def assert_head_mask_is_in_weights(script: Script) -> None:
    """Weights that are documented as those used are multiplied by a mask of the heads.

    It has a factor for each head, with axes for the other ones or without.
    """
    adapter = script.adapter
    parameters = [p.name for p in names.parameters_of(adapter.target)]
    given = [name for name in parameters if name.endswith("head_mask")]
    if not given or documented.place_of_dropout(adapter.target) != "after":
        return
    factors = "torch.linspace(0.5, 1, {heads}){dtype}"
    in_order = in_usual_order(adapter.weights_axes)
    for axes in (".view(1, -1, 1, 1)", ""):
        extra_args = {**adapter.extra_args, given[0]: factors + axes}
        masked = replace(adapter, extra_args=extra_args)
        with script.attempt():  # it may be refused with axes, or without
            script.restart()
            args = script.make_arguments()
            usual = f"{script.call_for_weights(args)}{in_order}"
            with script.using(masked):
                weights = f"{script.call_for_weights(args)}{in_order}"
            sizes = {"heads": script.sizes.heads, "dtype": script.to_dtype_and_device()}
            factor = script.assign("factors", factors.format(**sizes))
            expected = f"{usual} * {factor}.view(-1, 1, 1)"
            message = f"the returned weights are not multiplied by `{given[0]}`"
            script.assert_true(f"torch.allclose({weights}, {expected})", message)
            return


# The number of keys of which some have to be chosen.
MANY_WEIGHTS = 11


def assert_weights_are_averaged(script: Script) -> None:
    """Weights that are documented to be the mean of those of the heads are that.

    The softmax of the mean of their scores, for one, is not.
    """
    axes = script.adapter.weights_axes
    if sorted(axes) != [*"bkq"] or script.sizes.heads == 1:
        return
    with script.using(batch_size=1):
        for allowed, mask in script.mask_cases():
            script.restart()
            args = script.make_arguments(allowed, mask)
            if used := record_weights(script, args):
                weights = f"{script.call_for_weights(args)}{in_usual_order(axes)}[0, 0]"
                # The rows of queries that are padding may be cleared later.
                used = f"{used}.mean(0) * ({weights}.sum(-1, keepdim=True) != 0)"
                claim = f"torch.allclose({weights}, {used}, atol=1e-4)"
                message = "the returned weights are not the mean of those of the heads"
                script.assert_true(claim, message)


def assert_weighted_keys_matter(script: Script) -> None:
    """A key whose returned weight is above zero has an influence on the output.

    Weights from before the largest are chosen, for one, are not those that were used.
    """
    adapter = script.adapter
    is_known = sorted(adapter.weights_axes) == [*"bkq"] and not adapter.is_pooled
    skip_unless(is_known, "returns no weights of single heads")
    length = adapter.fixed_length or MANY_WEIGHTS
    script.sizes = replace(script.sizes, q_len=length, k_len=length)
    script.restart()
    args = script.make_arguments()
    tokens = args.inputs[adapter.key_roles[-1]]
    script.exec_line(f"{tokens}.requires_grad_()")
    in_order = in_usual_order(adapter.weights_axes)
    weights = f"{script.call_for_weights(args)}{in_order}[:, 0]"
    output = script.call(args)
    rest = tuple(n for n, axis in enumerate(adapter.layout) if axis not in "bl")
    is_first = adapter.layout.index("l") < adapter.layout.index("b")
    turned = ".mT" if is_first else ""
    for query in range(length):
        grad = script.gradient(f"{output}{adapter.index(l=[query])}", tokens)
        seen = script.assign("seen", f"({grad}.abs().sum({rest}) > 0){turned}")
        if script.evaluate(f"{seen}.any()"):
            message = f"a key has a returned weight of query {query}, and no influence"
            claim = f"({seen} | ({weights}[:, {query}] < 1e-3)).all()"
            script.assert_true(claim, message)


def in_usual_order(axes: str) -> str:
    """What makes returned weights `[batch_size, heads, q_len, k_len]`, as source text.

    An axis that they do not have, such as that of heads, has a size of 1 then.

    >>> in_usual_order("bhqk"), in_usual_order("hqk"), in_usual_order("qkb")
    ('.permute(0, 1, 2, 3)', '.permute(0, 1, 2)[None]', '.permute(2, 0, 1)[:, None]')
    """
    order = ", ".join(str(axes.index(axis)) for axis in "bhqk" if axis in axes)
    index = {"bh": "", "h": "[None]", "b": "[:, None]", "": "[None, None]"}
    return f".permute({order}){index[''.join(a for a in 'bh' if a in axes)]}"


def with_kinds_of_pairs(adapter: Adapter) -> Adapter:
    """Pairs of tokens are of two kinds, where integers, such as distances, tell them.

    A bias for the kind would cancel in the softmax if all were the same. So would one
    for the time between two tokens, which have times of their own here, and one of the
    features of a pair.
    """
    kinds = {}
    for name, text in adapter.extra_args.items():
        if re.search(r"torch\.(int64|long)\b", text) and text.count("{length}") == 2:
            kinds[name] = f"({text} + 1).cumsum(-1) % 2"
        of_tokens = text.count("{length}") == 1 or text.count("{k_len}") == 1
        if names.TIME_PATTERN.search(name) and of_tokens:
            kinds[name] = f"({text} + 1).cumsum(-1)"
        if text.endswith("{length}, {length}, -1)"):
            kinds[name] = f"({text}).cumsum(-2).sin()"
    return replace(adapter, extra_args={**adapter.extra_args, **kinds})


def assert_pooled_weights_are_shares(script: Script) -> None:
    """Weights of one output, which sum to one without a mask, do so with one.

    Those from before they were divided by the sum over real tokens do not. Nor has a
    hidden key any.
    """
    k_axis = script.adapter.weights_axes.index("k")
    b_axis = script.adapter.weights_axes.index("b")
    for allowed, mask in script.mask_cases():
        script.restart()
        args = script.make_arguments(allowed, mask)
        weights = script.call_for_weights(args)
        sums = script.assign("sums", f"{weights}.sum({k_axis})")
        message = "where keys are hidden, the returned weights do not sum to 1"
        script.assert_true(f"({sums} - 1).abs().max() <= 1e-4", message)
        of_items = f"{weights}.movedim([{b_axis}, {k_axis}], [0, -1])"
        for item, is_seen in enumerate(allowed.any(dim=0).T):
            hidden = (~is_seen).nonzero().flatten().tolist()
            message = (
                f"the returned weights of hidden keys of batch item {item} are not 0"
            )
            claim = f"({of_items}[{item}, ..., {hidden}].abs() <= 1e-4).all()"
            if hidden:
                script.assert_true(claim, message)


def are_right_without_mask(script: Script) -> bool:
    """Whether returned weights give the output where there is no mask."""
    try:
        with script.using(replace(script.adapter, masks=())):
            assert_weights_match(script)
    except LawViolation:
        return False
    return True


def assert_weights_match(script: Script) -> None:
    """The returned weights, of one head or of each, give the output."""
    adapter = script.adapter
    is_unknown = AROUND_WEIGHTS & {*adapter.designs} or "out" not in adapter.projections
    if adapter.is_module and is_unknown:
        if not assert_fused_weights_match(script):
            assert_weights_are_proportional(script)
        return
    skip_unless(not has_unknown_order(script), UNKNOWN_ORDER)
    for mode in script.modes():
        for allowed, mask in script.mask_cases():
            script.restart(mode)
            args = script.make_arguments(allowed, mask)
            output = script.call(args)
            weights = script.call_for_weights(args)
            message = "{place} is not what the returned weights give"
            compare_weighted(script, args, weights, output, message)
    assert_dropped_weights_match(script)


def assert_weights_are_proportional(script: Script) -> None:
    """The gradients of an output with respect to the values are as its weights.

    That is a vector for each head, times the weight of each key. Values that are scaled
    by numbers of their own have other gradients, of which there are too many.
    """
    adapter = script.adapter
    is_plain = adapter.layout in ("bld", "lbd") and not adapter.is_pooled
    skip_unless(adapter.group_size == 1, "has values that several heads share")
    path, first = layer_of_values(script) if is_plain else ("", 0)
    skip_unless(path, "has no values that are known")
    item = "[0]" if adapter.layout == "bld" else "[:, 0]"
    item += f"[:, {first}:]"
    keep = f"values = kept_outputs(attention.get_submodule({path!r}))"

    def compare(args: CallArguments, output: str, weights: str) -> None:
        for query in script.real_queries(args):
            part = f"{output}{adapter.index(l=slice(query, query + 1), b=slice(1))}"
            grad = script.gradient(part, "values[0]")
            in_order = in_usual_order(adapter.weights_axes)
            of_query = f"{weights}{in_order}[0, :, {query}]"
            claim = f"are_in_proportion({grad}{item}, {of_query})"
            message = f"the returned weights of query {query} are not those used"
            script.assert_true(claim, message)

    for allowed, mask in script.mask_cases():
        script.restart()
        script.exec_line(keep)
        args = script.make_arguments(allowed, mask)
        output = script.call(args)
        skip_unless(
            script.evaluate("len(values) == 1"), "projects values several times"
        )
        compare(args, output, script.call_for_weights(args))
    for call in calls_with_dropped_weights(script, keep):
        compare(*call)


def layer_of_values(script: Script) -> tuple[str, int]:
    """The layer that gives the values, and its first output that is one.

    It may give the keys, too, or queries and keys: the weights depend on these, and not
    on the last part, which is of the values then. So the vector of additive scores,
    which may have the name of the values, is none. The path is empty if none is known.
    """
    width = script.sizes.heads * script.sizes.d_k
    script.restart()
    layers = structure.layers_by_role(script.evaluate("attention"), width)
    roles = {"value": 1, "fused_key_value": 2, "fused": 3}
    path, parts = next(
        ((layers[r], n) for r, n in roles.items() if r in layers), ("", 1)
    )
    weight, first = f"attention.get_submodule({path!r}).weight", (parts - 1) * width
    if not path or script.evaluate(f"len({weight})") != parts * width:
        return "", 0
    args = script.make_arguments()
    before = script.call_for_weights(args)
    changed = []
    for rows in (f"[{first}:]", f"[:{width}]")[:parts]:
        script.exec_line(f"{weight}.data{rows} *= -1")
        after = script.call_for_weights(args)
        changed.append(script.evaluate(f"not torch.allclose({before}, {after})"))
    return (path, first) if changed == [False, True][:parts] else ("", 0)


def assert_fused_weights_match(script: Script) -> bool:
    """The returned weights are those of PyTorch's attention, if it is called once.

    It returns none, so they are computed a second time, with all that is added to the
    scores. This needs no projections, which a table of biases may hide. False if it is
    not called.
    """
    for allowed, mask in script.mask_cases():
        script.restart()
        args = script.make_arguments(allowed, mask)
        call = f"fused_weights(lambda: {script.call_source(args)})"
        fused = script.assign("fused", call)
        in_order = in_usual_order(script.adapter.weights_axes)
        weights = f"{script.call_for_weights(args)}{in_order}"
        same_shape = f"{fused} is not None and {fused}.shape == {weights}.shape"
        if not script.evaluate(same_shape):
            return False
        claim = f"torch.allclose({weights}, {fused}, atol=1e-4, equal_nan=True)"
        message = "the returned weights are not those of `scaled_dot_product_attention`"
        script.assert_true(claim, message)
    return True


def assert_dropped_weights_match(script: Script) -> None:
    """In training, weights of which some are dropped are those of the same call."""
    for args, output, weights in calls_with_dropped_weights(script):
        message = "{place} is not what the returned weights, with dropout, give"
        compare_weighted(script, args, weights, output, message)


def calls_with_dropped_weights(
    script: Script, first_line: str = ""
) -> Iterator[tuple[CallArguments, str, str]]:
    """Calls in training that return their output and weights, some of them dropped.

    Many return the weights before dropout: those are left out, whose weights are not
    zero more often than in evaluation, where those of future keys are. `first_line`
    runs before each call.
    """
    adapter = script.adapter
    if not (adapter.is_module and adapter.reproducible_training):
        return
    script.restart()
    weights = script.call_for_weights(script.make_arguments())
    hidden = script.evaluate(f"({weights} == 0).sum()")
    script.restart("train")
    for place in script.evaluate("dropout_places(attention)"):
        script.restart("train")
        script.exec_line(f"set_dropout(attention, 0.5, {place!r})")
        if first_line:
            script.exec_line(first_line)
        args = script.make_arguments()
        call = script.call_source(args, **adapter.weights_args)
        result = script.assign("result", call)
        value, query = script.namespace[result], script.evaluate(args.inputs[0])
        output = script.assign("y", f"{result}{find_output(value, query, adapter)}")
        source = adapter.weights_source
        of_call = "attention" if source.startswith(".") else result
        weights = script.assign("weights", of_call + source.removeprefix("result"))
        if script.evaluate(f"({weights} == 0).sum()") > hidden:
            yield args, output, weights


def assert_weights_are_as_documented(script: Script) -> None:
    """In training, weights documented as after dropout hold zeros, others none.

    Dropout of something else, such as the output, does not change them.
    """
    adapter = script.adapter
    promise = documented.place_of_dropout(adapter.target)
    if not promise or not (adapter.is_module and adapter.reproducible_training):
        return
    with script.using(batch_size=64):  # some weights are dropped
        script.restart()
        places = script.evaluate("dropout_places(attention)")
        if all(map(structure.OUTPUT_DROPOUT_PATTERN.search, places)):
            return  # no weight is dropped
        weights = script.call_for_weights(script.make_arguments())
        usual = script.evaluate(f"({weights} == 0).sum().item()")
        script.restart("train", dropout=0.5)
        args = script.make_arguments()
        with script.rollback():
            both = script.call(args), script.call(args)
            if script.evaluate(f"torch.equal({', '.join(both)})"):
                return  # nothing is dropped
        dropped = script.call_for_weights(args)
    more = f"({dropped} == 0).sum()"
    message = f"the returned weights are documented as those {promise} dropout"
    if promise == "after":
        script.assert_true(f"{more} > {usual}", f"{message}, and none is dropped")
    else:
        script.assert_true(f"{more} <= {usual}", f"{message}, and some are dropped")


def compare_weighted(
    script: Script,
    args: CallArguments,
    weights: str,
    output: str,
    message: str,
) -> None:
    """Compare the output with the values, weighted by the weights that are returned."""
    adapter = script.adapter
    _q, _k, v = project(script, args)
    in_order = in_usual_order(adapter.weights_axes)
    v = f"{v}.repeat_interleave({adapter.group_size}, dim=1)"
    expected = script.assign("expected", f"{weights}{in_order}.double() @ {v}")
    compare_projected(script, args, expected, output, message)
