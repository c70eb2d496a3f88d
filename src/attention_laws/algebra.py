r"""# Laws of the formula

$$\operatorname{Attention}(Q, K, V) =
  \operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$

These laws follow from the formula: rows of attention weights sum to one, the output is
linear in the values, a query attends to every key that the mask allows. Where the
projections can be found, the output is compared with the formula itself, in float64.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from attention_laws import documented, structure
from attention_laws.adapter import Adapter, MaskArgument
from attention_laws.influence import depends_on
from attention_laws.law import (
    LawViolation,
    NotApplicable,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.recorded import (
    make_equal_tokens,
    record_weights,
)
from attention_laws.recorders import CalledFunctions
from attention_laws.script import CallArguments, Script
from attention_laws.tools import (
    captured_input,
    captured_inputs,
    is_called,
    last_activation,
)

# Keys that fill more than one block.
MANY_KEYS = 299

UNKNOWN_ORDER = "the order of its fused projection is not known"

PLAIN = (
    "norm residual gate softcap features decay sink window selection scale "
    "convolution talking edges clip quantized direction assignment"
)


# It makes scores of some hundreds or thousands.
LARGE_FACTOR = 100


@law(assumes="norm residual gate features sink talking assignment direction")
def rows_sum_to_one(script: Script) -> None:
    r"""Each row of attention weights sums to one, over the keys that it may attend to.

    $$\textstyle\sum_j m_{ij} a_{ij} = 1, \quad a_{ij} \ge 0$$

    Weights that are returned before the mask is applied, or normalized along another
    axis, are no distribution over these keys. If no weights are returned, all values
    are made equal: every weighted mean of them is then the same; equal nodes of a graph
    have equal outputs, however many neighbors they have. With `only`, weights that are
    returned after dropout fail, too; those of PyTorch and of many others are. Functions
    are called with more keys than a block has, too.
    """
    adapter = script.adapter
    if edges := edge_argument(adapter):
        assert_equal_nodes_give_equal(script, edges)
        return
    returns_weights = bool(adapter.weights_source)
    skip_unless(
        returns_weights or len(adapter.inputs) == 3,
        "returns no weights, and takes no values",
    )
    dropout = 0.5 if returns_weights and script.insist else 0.0
    skip_unless(
        returns_weights or adapter.positions not in ("relative", "unknown"),
        "returns no weights, and its values may have positions",
    )
    convolves = adapter.designs.get("convolution", "")
    skip_unless(
        returns_weights or script.insist or not convolves,
        f"returns no weights, and `{convolves}` may mix its values with padding",
    )
    modes = [("eval", 0.0), ("train", dropout)]
    for mode, dropout in modes[: len(script.modes())]:
        for allowed, mask in script.mask_cases():
            script.restart(mode, dropout)
            args = script.make_arguments(allowed, mask)
            if not returns_weights:
                assert_equal_values_pass(script, args)
                # The scores of some rows are all far below zero.
                assert_equal_values_pass(script, with_large_queries(script, args))
                continue
            weights = script.call_for_weights(args)
            assert_hidden_weights_are_zero(script, args, weights)
            k_axis = adapter.weights_axes.index("k")
            sums = script.assign(
                "sums", f"{weights}.sum({k_axis}){seeing(script, args)}"
            )
            message = f"a row of weights does not sum to 1 in {mode}"
            tolerance = script.tolerance(sums)
            script.assert_true(f"({sums} - 1).abs().max() <= {tolerance}", message)
            script.assert_true(f"{weights}.min() >= 0", "a weight is negative")
    if not adapter.is_module and not adapter.fixed_length:
        assert_many_equal_values_pass(script)


def assert_many_equal_values_pass(script: Script) -> None:
    """The weights of a row sum to one if there are more keys than in one block."""
    script.sizes = replace(script.sizes, batch_size=1, q_len=MANY_KEYS, k_len=MANY_KEYS)
    script.restart()
    with script.attempt():  # its tables may have fewer positions
        args = script.make_arguments()
        assert_equal_values_pass(script, args)
        assert_equal_values_pass(script, with_large_queries(script, args))


def seeing(script: Script, args: CallArguments) -> str:
    """The index of the queries with a key in each batch item, for sums of weights.

    A window in which all is padding has none, and weights of zero, as may what is
    padding itself. "" for all queries.
    """
    adapter, rows = script.adapter, args.allowed.any(dim=1).all(dim=1)
    if adapter.is_pooled:
        return ""
    is_window = adapter.window is not None
    real = [n for n in script.real_queries(args) if rows[n] or not is_window]
    axis = adapter.weights_axes.replace("k", "").index("q")
    return f".movedim({axis}, 0)[{real}]" if len(real) < len(rows) else ""


# Arguments for the edges of a graph, from nodes and to nodes.
EDGE_ARGUMENTS = {"edge_index", "edges", "edge_idx"}


def edge_argument(adapter: Adapter) -> str:
    """The argument for the edges of a graph; "" if there is none."""
    given = adapter.extra_args.items()
    known = (n for n, text in given if n in EDGE_ARGUMENTS and text.endswith(".T"))
    return next(known, "")


def assert_equal_nodes_give_equal(script: Script, argument: str) -> None:
    """In a graph in which each node has edges from those before, equal nodes are equal.

    That is so if the softmax is over the edges to a node. Over those from a node, it
    gives one with many neighbors more than others.
    """
    script.restart()
    args = make_equal_tokens(script, script.make_arguments())
    length = script.sizes.k_len
    pairs = f"torch.ones({length}, {length}).tril().nonzero().T"
    graph = script.assign("edges", pairs + script.to_device())
    first = script.adapter.index(l=slice(0, 1))
    for edges in (graph, f"{graph}.flip(0)"):
        output = script.call(args, **script.with_edges(args, argument, edges))
        tolerance = script.tolerance(output)
        message = "nodes that are equal have unequal outputs, by their neighbors"
        script.assert_true(
            f"({output} - {output}{first}).abs().max() <= {tolerance}", message
        )


@law(
    assumes="gate compression convolution unnormalized decay linear inverse assignment "
    "talking"
)
def equal_values(script: Script) -> None:
    r"""If all values are equal, they have the same part in each output.

    $$v_1 = \dots = v_n \;\Rightarrow\; y_i(v) - y_i(0) = y_{i'}(v) - y_{i'}(0)$$

    Whatever the scores are, the weights of a row sum to one. Values that are mixed by
    the columns of the weights, or a sum that was not rescaled with a larger maximum,
    have another part in each output. The output of the value projection, or its part of
    a fused one, is replaced by ones, and by zeros. Long sequences show it where weights
    are computed in blocks, and large scores where a maximum is not the right one. What
    the last projection gets is compared, if it is known: no norm and no residual
    connection is before it. A sink, and the padding of windows, may take a part, but
    none of them can add to it: windows that overlap have to share their tokens.
    """
    adapter = script.adapter
    is_past = adapter.causal and documented.leaves_out_own(adapter.target)
    skip_unless(not is_past, "its first token sees no values")
    skip_unless(adapter.is_module and not adapter.is_pooled, "has no value projection")
    layers, features = find_values(script)
    usual, fixed = script.sizes, adapter.fixed_length
    width = usual.heads // adapter.group_size * usual.d_k
    are_known = not features or len(features) >= width
    skip_unless(are_known, "has values without gradients, as those that are rounded")
    lengths = [fixed] if fixed else [usual.k_len, MANY_KEYS]
    for length, factor in [(lengths[0], LARGE_FACTOR), *((n, 1) for n in lengths)]:
        script.sizes = replace(usual, k_len=length)
        if adapter.single_input:
            script.sizes = replace(script.sizes, q_len=length)
        script.restart()
        script.exec_line(f"layer = attention.get_submodule({layers['value']!r})")
        try:
            assert_equal_parts(script, features, layers.get("out", ""), factor)
        except LawViolation:
            design = adapter.designs.get("features", "")
            reason = (
                f"its code has `{design}`, so it may be attention of another design"
            )
            skip_unless(not design or script.insist, reason)
            excuse = adapter.designs.get("sink", adapter.designs.get("window", ""))
            if not excuse or script.insist:
                raise
            assert_no_part_is_added(script)
            reason = f"its code has `{excuse}`, so values may lose a part"
            raise NotApplicable(reason) from None
        except ScriptError:
            if length == MANY_KEYS:
                continue  # more keys than its tables have positions
            raise


def find_values(script: Script) -> tuple[dict[str, str], list[int]]:
    """The layers by role, and which features of that named "value" are the values.

    The list is empty if all of them are. In a fused projection they are those that have
    influence if there is one token only.
    """
    adapter, sizes = script.adapter, script.sizes
    script.restart()
    width = sizes.heads * sizes.d_k
    layers = structure.layers_by_role(script.evaluate("attention"), width, True)
    if "out" in layers:
        last = script.evaluate("attention").get_submodule(layers["out"])
        if not is_called(lambda: script.call(script.make_arguments()), last):
            del layers["out"]  # its weight is used without the layer
    if "value" in layers:
        return layers, []
    name = layers.get("fused", layers.get("fused_key_value", ""))
    skip_unless(name and not adapter.fixed_length, "has no value projection")
    with script.using(q_len=1, k_len=1):
        script.restart()
        try:
            features = value_features_of(script, script.make_arguments(), name)
        except ScriptError as failure:
            raise NotApplicable("does not take a single token") from failure
    return {**layers, "value": name}, features.nonzero().flatten().tolist()


def has_unknown_order(script: Script) -> bool:
    """Whether the parts of a fused projection are in an order that is not known.

    That is if its values are found in several places, as in weights that are laid out
    for several devices, and no known order of such parts gives the formula. The values
    of weights that are read in a wrong order may be in one place.
    """
    if ".chunk(" not in script.adapter.projections.get("value", ""):
        return False
    try:
        _layers, features = find_values(script)
    except NotApplicable:
        return False
    return bool(features) and len(features) <= features[-1] - features[0]


def value_features_of(script: Script, args: CallArguments, name: str) -> Tensor:
    """Which features of a layer are values; the arguments are of one token."""
    layer = f"attention.get_submodule({name!r})"
    call = f"lambda: {script.call_source(args)}"
    index = script.adapter.output_index
    found = script.assign("features", f"value_features({call}, {layer}, {index!r})")
    features: Tensor = script.evaluate(found)
    return features


def assert_equal_parts(
    script: Script, features: list[int], last: str, factor: int
) -> None:
    """Values of ones have the same part in what the last projection gets.

    Without values, that must be equal for all tokens. Otherwise, or if the projection
    is not known, the output is compared, unless there may be a norm behind it.
    """
    calls = [call_with_values(script, features, n, last, factor) for n in (1, 0)]
    message = "{place} has another part of the values, which are all equal"
    if last:
        one, zero = (context for _, context in calls)
        tolerance = max(1e-4, 32 * torch.finfo(script.dtype).eps)
        if script.evaluate(f"({zero} - {zero}[0]).abs().max() <= {tolerance}"):
            part = script.assign("part", f"{one} - {zero}")
            claim = f"({part} - {part}[0]).abs().max() <= {tolerance}"
            script.assert_true(claim, message.format(place="a token"))
            return
    excuse = script.adapter.designs.get("norm", "")
    skip_unless(not excuse, f"its code has `{excuse}`, and values are not all it adds")
    one, zero = (output for output, _ in calls)
    skip_activation(script, one)
    part = script.assign("part", f"{one} - {zero}")
    first = f"{part}{script.adapter.index(l=slice(0, 1))}.expand_as({part})"
    script.assert_close(first, part, message, relative=1e-4)


def assert_no_part_is_added(script: Script) -> None:
    """If some tokens have all of the equal values, none has more.

    So it is only if what the last projection gets was compared.
    """
    if "part" not in script.namespace or "context" not in script.namespace:
        return
    has_all = "((part - 1).abs() < 1e-4).all(dim=-1).any()"
    if script.evaluate(has_all):
        message = "a token has more than all of the values, and another has all"
        script.assert_true("part.max() <= 1 + 1e-3", message)


def skip_activation(script: Script, output: str) -> None:
    """Skip a law of what is linear if the output is that of an activation."""
    found = last_activation(script.evaluate(output))
    skip_unless(not found, f"its output is that of an activation, {found}")


def call_with_values(
    script: Script, features: list[int], number: int, last: str, factor: int = 1
) -> tuple[str, str]:
    """The output, and the input of the last projection, if all values are a number.

    The inputs are multiplied by `factor`.
    """
    script.counters.pop("seeded_randn", None)  # the same inputs in each call
    args = script.make_arguments()
    if factor > 1:
        large = (script.assign(name, f"{factor} * {name}") for name in args.inputs)
        args = replace(args, inputs=tuple(large))
    values = f"torch.full_like(v, {number})"
    if features:
        layer = script.namespace["layer"]
        axis = -1 if isinstance(layer, nn.Linear) else -len(layer.kernel_size) - 1
        which = f"torch.tensor({features}){script.to_device()}"
        values = f"v.index_fill({axis}, {which}, {number})"
    script.exec_line(f"hook = layer.register_forward_hook(lambda _, x, v: {values})")
    output, context = script.call(args), ""
    if last:
        layer = f"attention.get_submodule({last!r})"
        call = f"lambda: {script.call_source(args)}"
        context = script.assign("context", f"captured_input({call}, {layer})")
        context = script.assign("context", f"rows_of_layer({context}, {layer})")
    script.exec_line("hook.remove()")
    return output, context


def assert_hidden_weights_are_zero(
    script: Script, args: CallArguments, weights: str
) -> None:
    """The returned weights of hidden keys are zero, for all queries but padding."""
    axes = script.adapter.weights_axes
    shown = MaskArgument("mask", "attend", axes.replace("h", "1" * ("n" not in axes)))
    if args.allowed.all() or not shown.can_express(args.allowed):
        return
    text = shown.to_source(args.allowed, script.sizes.heads) + script.to_device()
    visible = script.assign("visible", text)
    if "n" in axes and not script.evaluate(f"torch.equal({weights} == 0, ~{visible})"):
        # They may be those of all batch items, head by head.
        heads = (
            f".unflatten(0, (-1, {script.sizes.heads})).transpose(0, 1).flatten(0, 1)"
        )
        other = f"{visible}{heads}"
        if script.evaluate(f"torch.equal({weights} == 0, ~{other})"):
            visible = other
    hidden = f"{weights}.masked_fill({visible}, 0)"
    rows = ""
    if "q" in axes:
        rows = f".movedim({axes.index('q')}, 0)[{script.real_queries(args)}]"
    claim = f"({hidden}{rows}).abs().max() <= {script.tolerance(weights)}"
    script.assert_true(claim, "a returned weight of a hidden key is not zero")


def assert_equal_values_pass(script: Script, args: CallArguments) -> None:
    """If all values are equal, so are all outputs, and those of a function."""
    adapter = script.adapter
    query, key, value = args.inputs
    first = adapter.index(l=slice(0, 1))
    value = script.assign("value", f"{value}{first}.expand_as({value}).clone()")
    output = script.call(replace(args, inputs=(query, key, value)))
    message = "{place} differs, though all values are equal"
    if adapter.is_module:
        # Its output projection is unknown, but it is the same for all queries.
        script.assert_close(f"{output}{first}.expand_as({output})", output, message)
        return
    skip_unless(
        adapter.group_size == 1 or "h" in adapter.layout,
        "shares values between heads that are not an axis of their own",
    )
    if adapter.group_size > 1:
        axis = adapter.layout.index("h")
        value += f".repeat_interleave({adapter.group_size}, dim={axis})"
    expected = f"{value}{first}.expand_as({output})"
    script.assert_close(expected, output, message, l=script.real_queries(args))


def with_large_queries(script: Script, args: CallArguments) -> CallArguments:
    """The same arguments, with scores in the hundreds or thousands."""
    query, *others = args.inputs
    large = script.assign(query, f"{LARGE_FACTOR} * {query}")
    return replace(args, inputs=(large, *others))


@law(
    assumes="window selection zeros unnormalized convolution linear channels direction "
    "hyperbolic pointer"
)
def allowed_keys_attended(script: Script) -> None:
    r"""A query attends to every key that the mask allows.

    $$m_{ij} = 1 \;\Rightarrow\; \partial y_i / \partial v_j \neq 0$$

    A mask that hides too much leaks nothing, and passes the laws of masking. The
    softmax gives every allowed key a weight above zero, so each must receive a
    gradient. So must a token whose features sum to zero, as behind a norm: it is no
    padding.
    """
    adapter = script.adapter
    filled = ", ".join(adapter.filled)
    skip_unless(not filled, f"also gets `{filled}`, which may be its keys")
    for allowed, mask in script.mask_cases():
        assert_in_float64(script, partial(assert_case_attended, script, allowed, mask))
    if adapter.layout[-1] == "d" and script.sizes.batch_size > 1:
        assert_sum_of_zero_attended(script)


def assert_sum_of_zero_attended(script: Script) -> None:
    """The first key receives a gradient if its features are ones and minus ones."""
    script.restart()
    args = script.make_arguments()
    inputs, first = list(args.inputs), script.adapter.index(l=slice(0, 1))
    for role in script.adapter.key_roles:
        name = inputs[role] = script.assign(inputs[role], f"{inputs[role]}.clone()")
        token = f"{name}{first}"
        script.exec_line(f"{token} = ({token} - {token}.flip(-1)).sign()")
    args = replace(args, inputs=tuple(inputs))
    try:
        assert_keys_attended(script, args)
    except LawViolation as failure:
        if not calls_relu(script, args):
            failure.message += ", and whose features sum to zero"
            raise


def assert_case_attended(
    script: Script, allowed: Tensor, mask: MaskArgument | None
) -> None:
    """Each key that this mask allows receives a gradient from each query."""
    script.restart()
    args = script.make_arguments(allowed, mask)
    try:
        assert_keys_attended(script, args)
    except LawViolation:
        # Behind a ReLU, a vector that is negative has no gradient at all.
        if not calls_relu(script, args) or always_unattended(script, allowed, mask):
            raise


def assert_in_float64(script: Script, test: Callable[[], None]) -> None:
    """What a test finds has to be found in float64, too.

    A bias such as that of a narrow Gaussian makes some weights less than the least
    number above zero of float32. What a mask hides has no weight in float64 either.
    """
    try:
        test()
    except LawViolation as failure:
        try:
            with script.using(dtype=torch.float64):
                test()
        except (NotApplicable, ScriptError):
            raise failure from None
        except LawViolation as other:
            raise (failure if failure.message == other.message else other) from None


def assert_keys_attended(script: Script, args: CallArguments) -> None:
    """Each allowed key receives a gradient from each query."""
    values, target = args.inputs[-1], script.adapter.target
    context = script.adapter.inputs[-1]
    is_detached = documented.gets_no_gradient(target, context)
    skip_unless(not is_detached, f"`{context}` is documented to get no gradient")
    script.exec_line(f"{values}.requires_grad_()")
    output = script.call(args)
    for query in script.real_queries(args):
        with script.rollback():
            grad = gradient_of_query(script, output, values, query)
            unseen = ~tokens_with_gradient(script, grad)
            if script.adapter.causal and documented.leaves_out_own(target):
                unseen[query] = False
            for key, item in (args.allowed[query] & unseen).nonzero().tolist():
                place = script.adapter.index(l=key, b=item)
                message = (
                    f"query {query} of batch item {item} does not attend to key "
                    f"{key}, which the mask allows (give `window` if it has a "
                    f"sliding window)"
                )
                script.assert_true(f"{grad}{place}.any()", message)


def tokens_with_gradient(script: Script, grad: str) -> Tensor:
    """Which tokens of which batch items have a gradient, `[k_len, batch_size]`."""
    layout = script.adapter.layout
    value: Tensor = script.evaluate(grad).ne(0)
    if "b" not in layout:
        value, layout = value[None], f"b{layout}"
    axes = [layout.index(axis) for axis in "lb"]
    return value.movedim(axes, (0, 1)).flatten(2).any(dim=2).cpu()


def gradient_of_query(script: Script, output: str, values: str, query: int) -> str:
    """The gradient that the output of one query passes to the values."""
    index = script.adapter.index(l=slice(query, query + 1))
    return script.gradient(f"{output}{index}", values)


def calls_relu(script: Script, args: CallArguments) -> bool:
    """Whether a call computes a ReLU."""
    with CalledFunctions() as functions:
        script.call(args)
    return bool({"relu", "relu_"} & functions.found.keys())


def always_unattended(
    script: Script, allowed: Tensor, mask: MaskArgument | None, count: int = 6
) -> bool:
    """Whether there is an allowed key without a gradient, the same for many inputs."""
    missing: list[set[tuple[int, ...]]] = []
    for _ in range(count):
        args = script.make_arguments(allowed, mask)
        values = args.inputs[-1]
        script.exec_line(f"{values}.requires_grad_()")
        output = script.call(args)
        missing.append(set())
        for query in script.real_queries(args):
            grad = gradient_of_query(script, output, values, query)
            for key, item in args.allowed[query].nonzero().tolist():
                place = script.adapter.index(l=key, b=item)
                if not script.evaluate(f"{grad}{place}.any()"):
                    missing[-1].add((query, key, item))
    return bool(set.intersection(*missing))


def project(script: Script, args: CallArguments) -> tuple[str, ...]:
    """Queries, keys and values in float64, `[batch_size, heads, length, d_k]`.

    They are computed by the attention's own projections, in a copy of it in float64.
    Raises `NotApplicable` where the projections are unknown.
    """
    adapter = script.adapter
    skip_unless(adapter.layout.endswith("d"), "has channels before positions")
    if adapter.is_module:
        skip_unless(
            adapter.projections, "projections not found; name them with `projections`"
        )
        script.exec_line("attention64 = detached_copy(attention).double()")
        sizes = adapter.named_sizes(script.sizes)
        for name in ("heads", "kv_heads", "d_k"):
            if re.search(rf"\b{name}\b", str(adapter.projections)):
                script.exec_line(f"{name} = {sizes[name]}")
    else:
        has_weights = "seeded_randn" in str(adapter.extra_args)
        skip_unless(
            not (adapter.single_input or has_weights),
            "is a function without projected queries, keys and values",
        )
    inputs = [args.inputs[min(role, len(args.inputs) - 1)] for role in range(3)]
    found = []
    for role, name in zip(("query", "key", "value"), inputs, strict=True):
        heads = script.sizes.heads // (1 if role == "query" else adapter.group_size)
        text = f"{name}.double()"
        if adapter.is_module:
            text = adapter.projections[role].replace("{}", text)
        elif "h" not in adapter.layout and "{heads}" not in adapter.extra_args.values():
            heads = 1
        text = f"split_heads({text}, {adapter.layout!r}, {heads})"
        norm = adapter.projections.get(f"{role}_norm", "{}")
        found.append(script.assign(role[0], norm.replace("{}", text)))
    return tuple(found)


def compare_projected(
    script: Script,
    args: CallArguments,
    context: str,
    output: str,
    message: str,
    relative: float | None = None,
) -> None:
    """Compare the output with context vectors `[batch_size, heads, length, d_k]`."""
    adapter = script.adapter
    expected = script.assign("expected", f"merge_heads({context}, {adapter.layout!r})")
    if takes_heads(script, args):
        expected += f".unflatten(-1, ({script.sizes.heads}, -1))"
    if "out" in adapter.projections:
        projected = adapter.projections["out"].replace("{}", expected)
        expected = script.assign("expected", projected)
    has_shape = script.evaluate(f"{expected}.shape == {output}.shape")
    skip_unless(has_shape, "its output has another shape than its heads, joined")
    queries = script.real_queries(args)
    script.assert_close(expected, output, message, relative=relative, l=queries)


def takes_heads(script: Script, args: CallArguments) -> bool:
    """Whether the last projection gets heads that are an axis of their own.

    So does a layer that is ported from Flax, whose weight has an axis of heads.
    """
    adapter = script.adapter
    layer = re.fullmatch(
        r"attention64\.([\w.]+)\({}\)", adapter.projections.get("out", "")
    )
    if layer is None or "h" in adapter.layout:
        return False
    attention = script.namespace["attention"]
    part = attention.get_submodule(layer[1])
    if isinstance(part, nn.Linear):
        return False
    call = eval(f"lambda: {script.call_source(args)}", script.namespace)
    if not is_called(call, part):
        return False  # its weight is used without the layer
    inputs = captured_input(call, part)
    return inputs.dim() == len(adapter.layout) + 1


@law(assumes=PLAIN)
def formula(script: Script) -> None:
    r"""The output equals the formula, computed in float64.

    $$y = \operatorname{softmax}\left(\frac{q k^\top}{\sqrt{d_k}}\right) v\, W_O$$

    A wrong scale, heads split along the wrong axis, a fused weight read in another
    order: models with these bugs still learn, but they do not compute attention with
    their weights. The attention's own projections are applied, and everything between
    them is computed by a reference implementation.
    """
    adapter = script.adapter
    has_positions = adapter.positions != "none"
    skip_unless(not adapter.causal_queries, "its queries attend to each other, too")
    if "b" not in adapter.layout and script.sizes.k_len > 1:
        skip_unless(tokens_meet(script), "its tokens do not influence each other")
    for allowed, mask in script.mask_cases():
        script.restart()
        args = script.make_arguments(allowed, mask)
        if has_positions:
            # The weights depend on positions, but not the mean of equal values.
            args = make_equal_tokens(script, args)
        message = "{place} differs from the formula"
        message += ", though all tokens are equal" * has_positions
        output = script.call(args)
        reason = "its values have positions"
        skip_unless(not has_positions_in_values(script, args, output), reason)
        assert_formula(script, args, output, message)


def has_positions_in_values(script: Script, args: CallArguments, output: str) -> bool:
    """Whether the outputs for equal tokens are unequal, in an encoding that is unknown.

    Positions are then added to the tokens, before their values are computed. Those of a
    context change the outputs for one of its tokens.
    """
    adapter = script.adapter
    if adapter.positions != "unknown" or adapter.is_pooled:
        return False
    first = adapter.index(l=slice(0, 1))
    claim = f"torch.allclose({output}, {output}{first}, atol=1e-3)"
    if not script.evaluate(claim):
        return True
    if adapter.single_input or adapter.required_mask is not None:
        return False
    keys = [f"{name}{first}" for name in args.inputs[1:]]
    alone = replace(args, inputs=(args.inputs[0], *keys), mask=None)
    with script.rollback():
        try:
            together = script.call(replace(args, mask=None))
            claim = f"torch.allclose({together}, {script.call(alone)}, atol=1e-3)"
            return not script.evaluate(claim)
        except ScriptError:
            return False  # it takes as many queries as keys


def tokens_meet(script: Script) -> bool:
    """Whether the last output depends on the first token.

    What an attention without a batch takes may be one token of each sequence, whose
    past it has stored.
    """
    return not script.evaluate(last_ignores_first(script))


def last_ignores_first(script: Script) -> str:
    """Whether the last output is the same with another first token, as source text."""
    script.restart()
    args = script.make_arguments(script.all_allowed(script.sizes.k_len))
    before = script.call(args)
    after = script.call(script.perturb(args, l=slice(0, 1)))
    last = script.adapter.index(l=slice(-1, None))
    return f"torch.equal({before}{last}, {after}{last})"


# Wrong scales of the scores, each with its ratio to the right one.
WRONG_SCALES = {
    "not divided by sqrt(d_k)": "{d_k} ** 0.5",
    "divided by sqrt(d_model), not by sqrt(d_k)": "({d_k} / {d_model}) ** 0.5",
}


def assert_formula(
    script: Script,
    args: CallArguments,
    output: str,
    message: str = "{place} of a long sequence differs from the formula",
    relative: float | None = None,
) -> None:
    """Compare an output with the reference implementation."""
    q, k, v = project(script, args)
    softcap = f", {script.adapter.softcap}" if script.adapter.softcap else ""
    text = "torch.ones(1, 1, 1, 1, dtype=torch.bool)"
    if not bool(args.allowed.all()):
        text = MaskArgument("mask", "attend", "b1qk").to_source(args.allowed)
    mask = script.assign("reference_mask", text + script.to_device())
    expected = script.assign(
        "expected", f"reference_attention({q}, {k}, {v}, {mask}{softcap})"
    )
    try:
        compare_projected(script, args, expected, output, message, relative)
    except LawViolation as violation:
        sizes = script.adapter.named_sizes(script.sizes)
        for scale, factor in WRONG_SCALES.items():
            scaled = f"{q} * {factor.format(**sizes)}"
            text = f"reference_attention({scaled}, {k}, {v}, {mask}{softcap})"
            with suppress(LawViolation):
                compare_projected(script, args, text, output, message, relative)
                violation.message += f", as if the scores were {scale}"
                break
        raise


@law(assumes="features linear")
def query_key_norms(script: Script) -> None:
    r"""The norms of queries and of keys change nothing but the scores.

    $$(c \, q_i) \cdot (k_j / c) = q_i \cdot k_j$$

    What the norm of the queries returns is multiplied by 4, and what that of the keys
    returns by 1/4: all scores are as before. They are not if one of the norms is
    applied to the values.
    """
    adapter = script.adapter
    skip_unless(adapter.is_module, "is a function, and has no norms of its own")
    script.restart()
    attention = script.evaluate("attention")
    has_table = adapter.positions in ("relative", "unknown")
    has_table = has_table or bool(structure.table_sizes(attention))
    has_table |= any(map(structure.ENCODING_PATTERN.search, adapter.extra_args))
    skip_unless(not has_table, "its queries may meet a table of positions, too")
    args = script.make_arguments()
    call = f"lambda: {script.call_source(args)}"
    norms = [
        (query, key)
        for query, key in structure.norms_of_scores(attention)
        if all(
            script.evaluate(
                f"is_between({call}, attention, attention.get_submodule({name!r}))"
            )
            for name in (query, key)
        )
    ]
    skip_unless(norms, "has no norms of projected queries and keys")
    # Two streams of tokens with norms of their own may attend to each other.
    factors = ", ".join(
        f"attention.get_submodule({name!r}): {factor}"
        for pair in norms
        for name, factor in zip(pair, (4.0, 0.25), strict=True)
    )
    script.exec_line(f"factors = {{{factors}}}")
    usual = script.assign("weights", f"weights_if_scaled({call}, {{}})")
    found = script.evaluate(f"{usual}.numel()")
    skip_unless(found, "its weights are not those of a softmax")
    scaled = script.assign("scaled", f"weights_if_scaled({call}, factors)")
    claim = f"torch.allclose({usual}, {scaled}, atol=1e-4)"
    names_of_norms = " and ".join(f"`{name}`" for name in norms[0])
    message = f"the scores are not products of what {names_of_norms} return"
    script.assert_true(claim, message)


def plain_layers(script: Script, weightless: bool = True) -> dict[str, str]:
    """The projections by role, if there is no norm over the whole width.

    A norm without weights may be one if `weightless`.
    """
    attention = script.evaluate("attention")
    layers = structure.layers_by_role(attention, script.sizes.heads * script.sizes.d_k)
    wide = structure.wide_norms(attention, script.sizes.d_k, weightless)
    skip_unless(
        not any(norms_behind(script, layers, wide)),
        "has a norm over the whole width",
    )
    return layers


def norms_behind(
    script: Script, layers: Mapping[str, str], norms: list[nn.Module]
) -> Iterator[nn.Module]:
    """The norms of what is projected; where the layers are unknown, all of them."""
    names_of_layers = {layers.get(role, "") for role in ("query", "key", "fused")}
    weights = [
        script.evaluate(f"attention.get_submodule({name!r}).weight")
        for name in names_of_layers - {""}
    ]
    with script.rollback():
        args = script.make_arguments()
    call = script.call_source(args)
    for norm in norms:
        seen = captured_inputs(lambda: script.evaluate(call), norm)
        if not weights or any(depends_on(x, weights) for x in seen):
            yield norm  # else it is of the tokens, before they are projected


def assert_linear_in_value_weights(script: Script) -> None:
    """What the last projection gets is linear in the weights of the value projection.

    In a fused projection, they are the weights without influence on the scores.
    """
    adapter = script.adapter
    skip_unless(adapter.is_module, "is a function of one input")
    script.restart()
    layers = plain_layers(script)
    name = layers.get("value", layers.get("fused", ""))
    skip_unless(name and "out" in layers, "takes no values of their own")
    args = script.make_arguments()
    script.exec_line(f"layer = attention.get_submodule({name!r})")
    rows = "[:]"
    if "value" not in layers:
        weights = record_weights(script, args)
        skip_unless(weights, "its weights are neither returned nor those of a softmax")
        of_rows = f"torch.autograd.grad(loss({weights}), layer.weight)[0]"
        rows = script.assign("rows", f"{of_rows}.flatten(1).norm(dim=1) == 0")
        width = script.sizes.heads // adapter.group_size * script.sizes.d_k
        # Where the scores of some heads were not found, so were their queries and keys.
        are_values = script.evaluate(f"{rows}.sum()") == width
        skip_unless(are_values, "the rows of its values were not found")
        rows = f"[{rows}]"
    call = f"lambda: {script.call_source(args)}"
    scaled = [f"layer.weight.data{rows}"]
    if "query" in layers:
        query = layers["query"]
        scaled.append(f"attention.get_submodule({query!r}).weight.data[:]")
    elif rows != "[:]":
        scaled.append(f"layer.weight.data[~{rows[1:]}")
    is_normed = normalizes_context(script, call, scaled)
    last = f"attention.get_submodule({layers['out']!r})"
    contexts = []
    for factor in (1, 2, 0):
        if factor != 1:
            script.exec_line(f"layer.weight.data{rows} *= {factor}")
        contexts.append(script.assign("context", f"captured_input({call}, {last})"))
    one, two, zero = contexts
    tolerance = script.tolerance(one, two)
    claim = f"({two} - {zero} - 2 * ({one} - {zero})).abs().max() <= {tolerance}"
    is_linear = not is_normed or script.evaluate(claim)
    skip_unless(is_linear, "has a norm of the context vectors")
    message = "if the values are doubled, the context vectors are not"
    script.assert_true(claim, message)


def normalizes_context(script: Script, call: str, weights: list[str]) -> bool:
    """Whether a norm gets numbers that depend on each of these weights.

    If these are the weights of values and those of queries, it is a norm of what is
    attended to: one of projections has numbers that depend on one of the two.
    """
    function = script.evaluate(call)
    for norm in script.evaluate("attention").modules():
        if "norm" not in type(norm).__name__.lower() or len(weights) < 2:
            continue
        usual, changed = captured_inputs(function, norm), []
        for each in weights:
            with script.rollback():
                script.exec_line(f"{each} *= 2")
                found = captured_inputs(function, norm)
                script.exec_line(f"{each} /= 2")
            changed.append([x != y for x, y in zip(usual, found, strict=True)])
        if any((one & other).any() for one, other in zip(*changed, strict=True)):
            return True
    return False


@law(assumes="residual gate convolution features talking clip hyperbolic quantized")
def linear_in_value(script: Script) -> None:
    r"""The output is linear in the values, up to a constant.

    $$y(v) + y(v') = y(v + v') + y(0)$$

    The output is a weighted sum of the values, and the weights depend on queries and
    keys only. (The constant is the biases of the projections.) Where values are no
    input, the weights of their projection are changed: a norm that is meant for queries
    and keys must not be applied to them.
    """
    if len(script.adapter.inputs) != 3:
        assert_linear_in_value_weights(script)
        return
    if "norm" in script.adapter.designs and not script.insist:
        # A norm of the inputs is before the projection, whose values must not have one.
        assert_linear_in_value_weights(script)
        return
    for allowed, mask in script.mask_cases():
        script.restart()
        args = script.make_arguments(allowed, mask)
        query, key, value = args.inputs
        other = script.assign("value", f"seeded_randn(5, *{value}.shape).to({value})")
        both = script.assign("value", f"{value} + {other}")
        zero = script.assign("value", f"torch.zeros_like({value})")
        y = [
            script.call(replace(args, inputs=(query, key, each)))
            for each in (value, other, both, zero)
        ]
        skip_activation(script, y[0])
        message = "the output at {place} is not linear in the values"
        script.assert_close(f"({y[0]} + {y[1]})", f"({y[2]} + {y[3]})", message)
