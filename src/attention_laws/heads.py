r"""# Laws of heads

Heads are apart until the last projection. A `view` in place of a transpose, a norm over
all features or a normalizer that adds up the wrong axis joins them, and all shapes stay
right. So these laws count the heads on which one row of a projection has influence.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), section 3.2.2.
"""

import re
from dataclasses import replace

import torch

from attention_laws import documented, structure
from attention_laws.algebra import plain_layers
from attention_laws.law import law, skip_unless
from attention_laws.recorded import record_weights
from attention_laws.recorders import WeightsRecorder
from attention_laws.script import Script


@law(slow=True, assumes="talking features convolution")
def head_independence(script: Script) -> None:
    r"""The weights of a head depend on its own queries only.

    $$\partial a^{(h)} / \partial q^{(h')} = 0 \quad \text{for } h \neq h'$$

    Heads are computed side by side, in axes that are easily confused. A norm or a
    softmax over the axis of the heads mixes them. A row of the projection may have
    influence on one head, or with grouped keys on the heads of a group. So may a row
    or a column of a parameter that no layer has.
    """
    adapter = script.adapter
    skip_unless(adapter.is_module, "is a function, and has no projections")
    length = adapter.fixed_length or 5
    script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
    script.restart()
    # Queries and keys of all heads have a norm in common in models that train its
    # weights; one without weights is for single heads.
    layers = plain_layers(script, weightless=False)
    name, axes = layers.get("query", layers.get("fused", "")), {"counts": 1}
    rows = f"attention.get_submodule({name!r}).weight"
    if not name:
        name = structure.query_parameter(script.evaluate("attention"))
        rows, axes = f"attention.get_parameter({name!r})", {"counts": 1, "columns": 0}
    skip_unless(name and script.sizes.heads > 1, "has no projection for several heads")
    weights = record_weights(script, script.make_arguments())
    skip_unless(weights, "its weights are neither returned nor those of a softmax")
    script.exec_line(f"rows = {rows}")
    script.exec_line(f"{' = '.join(axes)} = 0")
    for head in range(script.sizes.heads):
        # The weights of future keys are zero, and have no logarithm.
        of_head = f"loss({weights}[{head}].clamp(min=1e-30).log())"
        grad = f"torch.autograd.grad({of_head}, rows, retain_graph=True)[0]"
        for counts, axis in axes.items():
            size = script.assign("size", f"{grad}.flatten(1).norm(dim={axis})")
            script.exec_line(f"{counts} = {counts} + ({size} > 1e-3 * {size}.max())")
    message = f"a row of `{name}` has influence on the weights of several heads"
    # In a fused projection, the width tells how many heads share their keys.
    width, heads = script.evaluate("max(rows.shape[:2])"), script.sizes.heads
    kv_heads = heads if "query" in layers else (width // script.sizes.d_k - heads) // 2
    group_size = max(adapter.group_size, heads // max(1, kv_heads))
    claims = (f"{counts}.max() <= {group_size}" for counts in axes)
    script.assert_true(" or ".join(claims), message)


@law(slow=True, assumes="talking convolution selection")
def own_context(script: Script) -> None:
    r"""The context vectors of a head depend on its own queries and keys only.

    $$\partial c^{(h)} / \partial q^{(h')} = \partial c^{(h)} / \partial k^{(h')} = 0
    \quad \text{for } h \neq h'$$

    Without a softmax, too, heads are apart until the last projection. A normalizer that
    adds up keys along the axis of the heads mixes them. A row of a projection may
    change as many features of the input of the last one as belong to a head. Some rows
    have to: else the heads are not known.
    """
    adapter, heads = script.adapter, script.sizes.heads
    skip_unless(adapter.is_module, "is a function, and has no projections")
    length = adapter.fixed_length or 5
    script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
    script.restart()
    layers = plain_layers(script)
    is_known = {"query", "key", "out"} <= {*layers} and heads > 1
    skip_unless(is_known, "has no projections for several heads")
    call = f"lambda: {script.call_source(script.make_arguments())}"
    last, d_k = f"attention.get_submodule({layers['out']!r})", script.sizes.d_k
    is_found = script.evaluate(f"is_called({call}, {last})") and (
        script.evaluate(f"captured_input({call}, {last})").shape[-1] == heads * d_k
    )
    skip_unless(is_found, "its context vectors are not found")
    counts: dict[str, int] = {}
    for role in ("query", "key"):
        layer = f"attention.get_submodule({layers[role]!r})"
        if not is_scale_free(script, layer, f"captured_input({call}, {last})"):
            for head in range(heads):
                row = head * d_k
                text = f"count_changed({call}, {layer}.weight, {row}, {last})"
                counts[text] = script.evaluate(text)
    are_apart = counts and min(counts.values()) <= d_k
    skip_unless(are_apart, "no query or key changes the context of one head only")
    worst = max(counts, key=lambda text: counts[text])
    message = "a row of the queries or keys changes the context of several heads"
    script.assert_true(f"{worst} <= {d_k}", message)


# The classes of norms of single vectors, and not of several together.
NORM_PATTERN = re.compile(
    r"(?!.*(global|group|batch|inst|cumul)).*(layer|rms|l2)_?norm"
)


@law
def head_norms(script: Script) -> None:
    r"""A layer norm normalizes each vector by itself.

    $$\operatorname{norm}(x)_h = \operatorname{norm}(x_h)$$

    With a weight that is as wide as a head, the heads have an axis of their own: a mean
    over it, too, lets a head with large values shrink all others. So it is with a mean
    over tokens. This law applies to norms that are written by hand, and to queries and
    keys of length one, which `normalize` gives along its axis 1 if no other is named.
    If channels are attended to, they are the vectors, and their axis is that of tokens.
    """
    adapter = script.adapter
    tested = assert_features_are_normalized(script)
    skip_unless(tested or adapter.is_module, "is a function, and has no norms")
    script.restart()
    call = f"lambda: {script.call_source(script.make_arguments())}"
    for name, part in script.evaluate("attention").named_modules():
        is_norm = NORM_PATTERN.match(type(part).__name__.lower())
        if not is_norm or type(part).__module__.startswith("torch."):
            continue
        layer = script.assign("layer", f"attention.get_submodule({name!r})")
        if not script.evaluate(f"is_called({call}, {layer})"):
            continue
        x = script.assign("x", f"captured_input({call}, {layer}).detach()")
        shape = [*script.evaluate(x).shape]
        widths = [[*weight.shape] for weight in part.parameters()]
        is_known = shape.count(shape[-1]) == 1  # and not the number of channels, too
        if shape[-1:] not in widths or len(shape) < 3 or not is_known:
            continue
        last = ", ".join(["-1"] * (len(shape) - 1))
        with script.attempt():  # it may need a condition, too
            before = script.assign("before", f"{layer}({x})")
            script.exec_line(f"{x}[{last}] *= 100")
            after = script.assign("after", f"{layer}({x})")
            rows = ".flatten(0, -2)[:-1]"
            message = f"the norm `{name}` of a vector depends on another vector"
            claim = f"torch.allclose({after}{rows}, {before}{rows}, atol=1e-5)"
            script.assert_true(claim, message)
            tested = True
    skip_unless(tested, "has no layer norm that is written by hand")


# Tokens that are neither as many as heads or batch items, nor as features.
TOKENS = 7
# Axes of tokens, along which norms may be computed by intention.
OVER_TOKENS = (
    r"\b(along|over|across)\b[^.]*\b(tokens?|sequence|positions?|pixels|time)\b"
)


def assert_features_are_normalized(script: Script) -> bool:
    """Where a softmax is over the keys, queries and keys are normalized by features.

    If it is over channels, these are normalized. Returns whether they are, by features.
    """
    adapter, sizes = script.adapter, script.sizes
    if not structure.identifiers(adapter.target) & {"normalize", "norm", "vector_norm"}:
        return False
    if adapter.fixed_length is not None:
        return False
    with script.using(q_len=TOKENS, k_len=TOKENS):
        script.restart()
        args = script.make_arguments()
        with WeightsRecorder() as recorder:
            script.call(args)
    width, heads = sizes.d_k, sizes.heads
    is_known = len({width, heads, sizes.batch_size, TOKENS}) == 4
    over_keys = [w for w, dim in recorder.found if w.shape[dim] % TOKENS == 0]
    if not is_known:
        return False
    call = f"lambda: {script.call_source(args)}"
    found = f"normalized_sizes({call}, {width})"
    if not over_keys:
        message = "one is normalized along tokens, and one along features"
        script.assert_true(f"not {{{width}, {TOKENS}}} <= {{*{found}}}", message)
        of_channels = [w for w, _ in recorder.found if w.shape[-2:] == (width, width)]
        if of_channels and script.evaluate(found):
            message = "channels are attended to, and are not what is normalized"
            script.assert_true(f"{TOKENS} in {found}", message)
        return False
    if documented.says(adapter.target, OVER_TOKENS):
        return False
    for size, what in ((TOKENS, "tokens"), (2 * TOKENS, "tokens"), (heads, "heads")):
        message = f"queries or keys are normalized along the axis of the {what}"
        script.assert_true(f"{size} not in {found}", message)
    return bool(script.evaluate(found))


@law
def head_directions(script: Script) -> None:
    r"""Heads that see in one direction do so for each number of heads.

    $$a^{(h)}_{ij} = 0 \text{ for } j \gt i \text{, or for } j \lt i$$

    In some designs one half of the heads attends to the tokens before, and the other to
    those after. An odd number of heads has a middle one, which belongs to neither half:
    without a mask of its own, it sees both. This law applies if heads are of both
    kinds, and all of 2 and all of 4 heads see in one direction.
    """
    adapter = script.adapter
    is_given = adapter.free_heads or "{heads}" in adapter.init_args.values()
    skip_unless(is_given, "has one number of heads only")
    seen = {
        (script.evaluate(past), script.evaluate(future))
        for count in (2, 4)
        for past, future in directions(script, count)
    }
    are_of_two = seen == {(True, False), (False, True)}
    skip_unless(are_of_two, "its heads are not of two directions")
    of_three = directions(script, 3)
    skip_unless(of_three, "has no weights of three heads")
    for past, future in of_three:
        message = "one of 3 heads sees in both directions, but none of 2 or of 4 heads"
        script.assert_true(f"not ({past} and {future})", message)


def directions(script: Script, heads: int) -> list[tuple[str, str]]:
    """For each head, whether its weights of tokens before and after have an entry."""
    script.sizes = replace(script.sizes, batch_size=1, q_len=5, k_len=5, heads=heads)
    allowed, weights = script.all_allowed(5, 5), ""
    with script.attempt():  # other sizes may depend on the number of heads
        script.restart()
        weights = record_weights(script, script.make_arguments(allowed))
    return [
        (f"bool({weights}[{n}].tril(-1).any())", f"bool({weights}[{n}].triu(1).any())")
        for n in range(heads if weights else 0)
    ]


def is_scale_free(script: Script, layer: str, context: str) -> bool:
    """Whether the size of what a layer computes does not matter.

    So it is with a norm, which may be over the features of all heads.
    """
    usual = script.evaluate(context)
    parameters = [*script.evaluate(layer).parameters()]
    for weight in parameters:
        weight.data *= 2
    scaled = script.evaluate(context)
    for weight in parameters:
        weight.data /= 2
    return torch.allclose(usual, scaled, rtol=0.01, atol=0.01)


# Heads of queries, and of the keys that they share.
QUERY_HEADS, KEY_HEADS = 6, 2


@law()
def shared_heads(script: Script) -> None:
    r"""Query heads share those of keys and values in the same way at all lengths.

    $$y(q, k, v) = y(q, \operatorname{repeat}(k), \operatorname{repeat}(v))$$

    A function may take fewer heads of keys than of queries. Each is that of successive
    heads of queries, as if it were repeated, or that of every second or third. A path
    for one query that views the heads of a group along the wrong axis exchanges them.
    """
    adapter = script.adapter
    is_of_heads = len(adapter.inputs) == 3 and "h" in adapter.layout
    skip_unless(is_of_heads and not adapter.is_module, "takes no heads of its own")
    script.sizes = replace(script.sizes, heads=QUERY_HEADS)
    axis, group = adapter.layout.index("h"), QUERY_HEADS // KEY_HEADS
    counts = (group, *[1] * (len(adapter.layout) - axis - 1))
    ways = (f".repeat_interleave({group}, {axis})", f".tile({counts})")
    with script.using(q_len=5, k_len=5):
        found = [way for way in ways if shares_heads(script, way)]
    skip_unless(found, "takes as many heads of keys as of queries")
    for q_len in dict.fromkeys((script.sizes.q_len, 1)):
        with script.using(q_len=q_len):
            shares_heads(script, found[0], insist=True)


def shares_heads(script: Script, way: str, insist: bool = False) -> bool:
    """Whether fewer heads of keys give what they give if they are repeated in a way.

    With `insist`, they must.
    """
    script.restart()
    args = script.make_arguments()
    first = script.adapter.index(h=slice(KEY_HEADS))
    few = [script.assign(name, name + first) for name in args.inputs[1:]]
    many = [script.assign(name, name + way) for name in few]
    with script.attempt():
        y = script.call(replace(args, inputs=(args.inputs[0], *few)))
        repeated = script.call(replace(args, inputs=(args.inputs[0], *many)))
        if insist:
            message = "{place} differs if the heads of keys are repeated"
            script.assert_close(y, repeated, message)
        return bool(script.evaluate(f"torch.allclose({y}, {repeated}, atol=1e-4)"))
    return False
