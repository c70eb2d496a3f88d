r"""# Laws of positions

Without a positional encoding, tokens are [in no order](order.md). A bias that grows
with the distance (ALiBi), a rotation (RoPE) and a table of relative positions are
inferred or given as options, and each has laws of its own.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), section 3.5;
[ALiBi](https://arxiv.org/abs/2108.12409), section 3;
[RoFormer](https://arxiv.org/abs/2104.09864), section 3.
"""

import itertools
import math
import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from attention_laws import documented, names, recorders, structure
from attention_laws.adapter import Adapter, without_future
from attention_laws.algebra import has_unknown_order
from attention_laws.calling import order_matters
from attention_laws.execution import assert_half_is_close
from attention_laws.images import one_image
from attention_laws.influence import depends_on
from attention_laws.law import (
    Excused,
    LawViolation,
    NotApplicable,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.order import MANY, attends_twice
from attention_laws.recorded import (
    make_equal_tokens,
    record_equal_tokens,
    record_weights,
    record_weights_with_gradients,
)
from attention_laws.rounding import (
    assert_weights_are_exact,
    has_coarse_bias,
    rounds_bias,
    skip_if_of_buffers,
)
from attention_laws.scores import score_gradients
from attention_laws.script import CallArguments, Script, parts_of


@law
def positions_matter(script: Script) -> None:
    r"""With a positional encoding, each head weighs equal tokens by their positions.

    $$x_1 = \dots = x_n \;\not\Rightarrow\; a_{i1} = \dots = a_{in}$$

    If the positions run along the wrong axis, along heads or batch items, all tokens of
    a sequence are encoded alike: the code has an encoding, and the attention has none.
    In an image, rows and columns that are encoded apart in a square have to be so in
    other shapes: the width tells where a row ends, not the height. Sines and cosines of
    distances tell the past from the future, and a token is at distance 0 from itself.
    """
    adapter = script.adapter
    is_relative = adapter.positions in ("rotary", "alibi")
    if has_rows(script) and not is_relative:
        assert_rows_are_apart(script)
        return
    if not is_relative:
        assert_table_has_effect(script)
        assert_own_distance_is_zero(script)
        assert_directions_are_apart(script)
        raise NotApplicable("`positions` is not rotary or alibi")
    length = adapter.fixed_length or max(4, script.sizes.k_len)
    try:
        assert_last_weights_differ(script, length)
    except LawViolation:
        # The angles of one axis of an image may all be small.
        many = not adapter.fixed_length and takes_length(script, MANY)
        if not (adapter.image and many):
            raise
        assert_last_weights_differ(script, MANY)


def assert_directions_are_apart(script: Script) -> None:
    """An encoding with sines and cosines tells the past from the future.

    The sine of a distance has its sign. Without it, tokens in reverse order have the
    same outputs, in reverse order. The code takes the absolute value of distances where
    this is intended.
    """
    adapter = script.adapter
    found = structure.identifiers(adapter.target)
    is_signed = {"sin", "cos"} <= found and "abs" not in found
    is_encoded = adapter.is_module and adapter.positions != "none"
    is_plain = adapter.single_input and not (adapter.image or adapter.is_pooled)
    if not (is_signed and is_encoded and is_plain) or adapter.causal:
        return
    length = adapter.fixed_length or 5
    script.sizes = replace(script.sizes, q_len=length, k_len=length)
    script.restart()
    args = script.make_arguments(script.all_allowed(length, length))
    axis = adapter.layout.index("l")
    if not order_matters(script, args):
        return  # all may be at one place
    (tokens,) = args.inputs
    reverse = replace(args, inputs=(script.assign("x", f"{tokens}.flip({axis})"),))
    output, other = script.call(args), script.call(reverse)
    claim = f"not torch.allclose({output}, {other}.flip({axis}), atol=1e-5)"
    message = "tokens in front of a token have the same positions as those behind it"
    script.assert_true(claim, message)


def assert_table_has_effect(script: Script) -> None:
    """Where a table of relative positions is used, the order of tokens matters.

    If the sign of the distances is wrong, those of all past tokens share a row. Tables
    of few rows may tell past from future only. In several causal layers the order
    matters anyway, but not for the weights of equal tokens.
    """
    adapter = script.adapter
    is_plain = adapter.single_input and not (adapter.image or adapter.extra_args)
    is_open = adapter.positions in ("none", "unknown", "relative")
    if not (is_plain and adapter.is_module and is_open):
        return
    length = adapter.fixed_length or 40
    script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
    script.restart()
    tables = structure.table_sizes(script.evaluate("attention"))
    args = script.make_arguments(script.all_allowed(length, length))
    output = script.call(args)
    long = [name for name, rows in tables.items() if rows > 4]
    parameters = [script.evaluate(f"attention.get_parameter({n!r})") for n in long]
    used = [
        name
        for name, table in zip(long, parameters, strict=True)
        if depends_on(script.evaluate(output), [table])
    ]
    if not used:
        return
    if not order_matters(script, args):
        message = f"`{used[0]}` is used, and the order of the tokens does not matter"
        script.fail("False, " + repr(message), message, math.nan, 0.0)
    if weights := record_equal_tokens(script, args):
        last = f"{weights}[:, -1]"
        message = f"`{used[0]}` is used, and equal tokens have equal weights"
        script.assert_true(f"{last}.max() > 1.001 * {last}.min()", message)


def has_rows(script: Script) -> bool:
    """Whether the tokens are pixels of images, whose height is free."""
    adapter = script.adapter
    is_image = adapter.image and not adapter.image.startswith("frames")
    is_image = is_image or adapter.gets_sides
    return bool(is_image) and adapter.fixed_length is None and not adapter.is_pooled


def assert_rows_are_apart(script: Script) -> None:
    """In images that are no squares, a score has a part for the row and the column.

    That is tested if it is so in a square, where only the positions of a pixel can be
    exchanged.
    """
    adapter = script.adapter
    for height, width in ((4, 4), (3, 5), (5, 3)):
        length = height * width
        script.adapter = replace(adapter, image_height=height)
        script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
        script.restart()
        args = script.make_arguments(script.all_allowed(length, length))
        weights = record_weights(script, make_equal_tokens(script, args))
        skip_unless(weights, "its weights are neither returned nor those of a softmax")
        grid = f"{weights}.log().unflatten(-1, ({height}, {width}))"
        logs = script.assign(
            "logs", f"{grid} - {grid}.mean(dim=(-2, -1), keepdim=True)"
        )
        parts = "".join(f" - {logs}.mean(dim={n}, keepdim=True)" for n in (-1, -2))
        are_apart = f"({logs}{parts}).abs().max() <= 0.01 * {logs}.abs().max()"
        if height == width:
            is_seen = script.evaluate(f"{logs}.abs().max() > 0.1")
            skip_unless(is_seen, "equal pixels have equal weights")
            skip_unless(script.evaluate(are_apart), "rows and columns are not apart")
            continue
        message = (
            f"the rows of a {height} x {width} image are not encoded as those of a "
            f"square: divide by the width, not by the height"
        )
        script.assert_true(are_apart, message)


def assert_last_weights_differ(script: Script, length: int) -> None:
    """The last of equal tokens gives those before it unequal weights."""
    script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
    if not script.adapter.fixed_size:
        # A rotation of a quarter of each head needs room for a pair.
        script.sizes = replace(script.sizes, d_k=max(16, script.sizes.d_k))
    script.restart()
    args = script.make_arguments(script.all_allowed(length, length))
    weights = record_equal_tokens(script, args)
    skip_unless(weights, "its weights are neither returned nor those of a softmax")
    for head in range(script.sizes.heads):
        last = f"{weights}[{head}, -1, -20:]"
        message = f"head {head} gives the last of {length} equal tokens equal weights"
        script.assert_true(f"{last}.max() > 1.001 * {last}.min()", message)


def restart_with_one_head(script: Script, length: int) -> None:
    """Restart with one head, if no weights are returned and the sizes are free.

    With several heads, the output would mix their weights.
    """
    sizes = replace(script.sizes, q_len=length, k_len=length)
    if not script.adapter.weights_source and not script.adapter.fixed_size:
        sizes = replace(sizes, heads=script.adapter.group_size)
    script.sizes = sizes
    script.restart()


def weights_of_equal_tokens(script: Script, length: int) -> str:
    """The weights of the first batch item, `[heads, q_len, k_len]`.

    Recorded, returned by the attention, or derived from its outputs in one of two ways.
    Raises `NotApplicable` where none is possible.
    """
    adapter = script.adapter
    script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
    script.restart()
    args = script.make_arguments(script.all_allowed(length, length))
    if weights := record_equal_tokens(script, args):
        return script.assign("weights", f"{weights}.detach()")
    args = make_equal_tokens(script, args)
    if adapter.weights_source:
        weights = script.call_for_weights(args)
        index = [":" if letter in "qk" else "0" for letter in adapter.weights_axes]
        return script.assign("weights", f"{weights}[{', '.join(index)}][None]")
    if not adapter.single_input and "h" in adapter.layout:
        weights = weights_from_unit_values(script, args, length)
    else:
        restart_with_one_head(script, length)
        skip_unless(
            script.sizes.heads == 1,
            "returns no weights, and cannot be built with one head",
        )
        args = script.make_arguments(script.all_allowed(length, length))
        args = make_equal_tokens(script, args)
        weights = weights_from_gradients(script, args, length)
    return script.assign("weights", f"{weights}[None]")


def weights_from_gradients(script: Script, args: CallArguments, length: int) -> str:
    """Weights of one head, up to a common factor, from the gradients of its values.

    All tokens are equal, so the gradient of output i with respect to token j is the
    weight of j times a matrix that is the same for all i and j: only its norm is
    needed. With several heads there would be one matrix for each. If there are many
    queries, the weights are those of some at the edges of blocks, and NaN for others.
    """
    adapter = script.adapter
    values = args.inputs[-1]
    script.exec_line(f"{values}.requires_grad_()")
    output = script.call(args)
    script.exec_line(f"rows = [{values}.new_full(({length},), torch.nan)] * {length}")
    for query in range(length):
        if length > FAR and query >= 20 and (query + 1) % 64 > 2:
            continue
        one = adapter.index(l=slice(query, query + 1), b=slice(0, 1))
        grad = script.gradient(f"{output}{one}", values)
        grad += adapter.index(b=slice(0, 1))
        by_key = f"{grad}.movedim({adapter.layout.index('l')}, 0).flatten(1)"
        script.exec_line(f"rows[{query}] = {by_key}.norm(dim=1)")
        if query == min(length - 1, 20):
            # One matrix gives all gradients one direction. Values with positions of
            # their own, or a norm of their sum, do not.
            sizes = script.evaluate(f"torch.linalg.svdvals({by_key})")
            is_one = sizes[1:].sum() < 0.01 * sizes[0]
            skip_unless(is_one, "its values may have positions")
    return script.assign("weights", "torch.stack(rows)")


def weights_from_unit_values(script: Script, args: CallArguments, length: int) -> str:
    """Weights of a function: the output, if one key has the value 1, and others 0."""
    adapter = script.adapter
    query, key, value = args.inputs
    script.exec_line("columns = []")
    first_item_and_head = ["0"] * 4
    first_item_and_head[adapter.layout.index("l")] = ":"
    column = ", ".join(first_item_and_head)
    for n in range(length):
        unit = script.assign("value", f"torch.zeros_like({value})")
        script.exec_line(f"{unit}{adapter.index(l=slice(n, n + 1))} = 1")
        output = script.call(replace(args, inputs=(query, key, unit)))
        script.exec_line(f"columns.append({output}[{column}])")
    return script.assign("weights", "torch.stack(columns, dim=1)")


# The longest sequence that is tried: more than two blocks of 512.
LONGEST = 1040

# A length at which rounded angles, or a table that ends early, are noticed.
FAR = 300
FAR_HEIGHT = 15  # of an image of so many pixels
# If a call of that length has more functions of PyTorch, it is a loop over tokens, and
# would take seconds for the longest sequence.
LOOP_FUNCTIONS = 5_000


def ratio_tolerance(script: Script) -> float:
    """The tolerance of a ratio of weights, each of which is rounded."""
    return max(1e-3, 32 * torch.finfo(script.dtype).eps)


@law(assumes="window")
def linear_bias(script: Script) -> None:
    r"""With ALiBi, weights fall with the distance by a constant factor.

    $$a_{ij} \propto e^{-m\,|i - j|}, \quad m \gt 0$$

    All tokens are made equal, so that scores differ by the linear bias only. If its
    sign is wrong, the farthest token has the largest weight, and the loss still falls.
    Without a causal mask, that is so of later tokens if the bias has no absolute value;
    it is tested where the documentation names both directions.

    The slopes of 8 heads are 1/2, 1/4, … 1/256: a series from $2^{-8/n}$ to $2^{-8}$
    for $n$ heads. Where $n$ is no power of two, as 12, the heads have the slopes of the
    next smaller power, 8, and every other one of twice as many, 16. This is the rule of
    the paper's code, which published models follow. The paper's text has one series for
    any $n$; a model that is trained with it is a good model, so that is reported as a
    skip unless the file says that its slopes are those of the code, or `only` names
    this law.
    """
    adapter = script.adapter
    skip_unless(adapter.positions == "alibi", "`positions` is not alibi")
    is_line = not documented.is_periodic(adapter.target)
    skip_unless(is_line, "is documented to measure distances on a circle")
    length = script.sizes.k_len + 10
    counts = [script.sizes.heads]
    if not adapter.fixed_size:
        # Numbers that are no powers of two have a rule of their own.
        counts += [adapter.group_size * n for n in (4, 6, 12)]
    in_one_series = 0
    for heads in counts:
        script.sizes = replace(script.sizes, heads=heads)
        weights = weights_of_equal_tokens(script, length)
        last = f"{weights}[:, -1]"
        if "sink" in adapter.designs:
            # Values of its own are others, so that the gradient of a query counts, too.
            last += "[:, :-1]"
        message = (
            f"the last of {length} equal tokens weighs the first one more than itself"
        )
        script.assert_true(f"({last}[:, -1] > {last}[:, 0]).all()", message)
        if not adapter.causal and documented.decays_both_ways(adapter.target):
            first = f"{weights}[:, 0]"
            message = (
                f"the first of {length} equal tokens weighs the last one more than "
                f"itself"
            )
            script.assert_true(f"({first}[:, 0] > {first}[:, -1]).all()", message)
        ratio = script.assign("ratio", f"{last}[:, 1:] / {last}[:, :-1]")
        message = "the weights of equal tokens do not fall by a constant factor"
        claim = (
            f"({ratio} / {ratio}[:, :1] - 1).abs().max() <= {ratio_tolerance(script)}"
        )
        script.assert_true(claim, message)
        if any("slope" in each.name for each in names.parameters_of(adapter.target)):
            continue  # the caller chooses them
        heads = script.sizes.heads
        slopes = script.assign("slopes", f"{ratio}[:, 0].log().sort().values")
        # Some have 1/2, 1/4, and so on for each number of heads.
        halves = f"2.0 ** torch.arange(-{heads}, 0){script.to_device()}"
        tolerance = ratio_tolerance(script)
        if script.evaluate(f"({slopes} - {halves}).abs().max() <= {tolerance}"):
            continue
        order = f"torch.arange({heads}, 0, -1){script.to_device()}"
        series = f"2.0 ** (-8 * {order} / {heads})"
        is_series = script.evaluate(f"({slopes} - {series}).abs().max() <= {tolerance}")
        is_excused = not documented.has_slopes_of_code(adapter.target)
        if is_series and heads.bit_count() > 1 and is_excused and not script.insist:
            in_one_series = heads
            continue
        exponents = f"torch.tensor({alibi_exponents(heads)}){script.to_device()}"
        expected = script.assign("expected", f"2.0 ** {exponents}")
        message = f"the slopes of {heads} heads are not those of ALiBi"
        claim = f"({slopes} - {expected}).abs().max() <= {tolerance}"
        script.assert_true(claim, message)
    skip_unless(
        not in_one_series,
        f"the slopes of {in_one_series} heads are one series, as in the text of the "
        f"paper, not in its code; to insist, use `only`",
    )


def alibi_exponents(heads: int) -> list[float]:
    r"""The slopes of ALiBi, in rising order, as exponents of 2.

    >>> alibi_exponents(4), alibi_exponents(3)
    ([-8.0, -6.0, -4.0, -2.0], [-8.0, -4.0, -2.0])
    """
    power = 1 << (heads.bit_length() - 1)
    exponents = [-8 * n / power for n in range(1, power + 1)]
    exponents += [-8 * (n + 0.5) / power for n in range(heads - power)]
    return sorted(exponents)


@law
def relative_positions(script: Script) -> None:
    r"""With a relative positional encoding, only the distance of two tokens matters.

    $$\frac{a_{ij}}{a_{ij'}} = \frac{a_{i+1,\,j+1}}{a_{i+1,\,j'+1}}$$

    Rotary queries and keys are rotated against each other by an angle that depends on
    their distance, and is zero for a token and itself. If the angles are laid out for
    pairs of neighbors and the rotation pairs the two halves, or the other way round, it
    is no rotation, and absolute positions matter. So they do if the table of a learned
    relative bias is indexed by anything but the distance. Where position ids have
    several axes, as those of texts with images, each of them may be shifted.
    """
    adapter = script.adapter
    is_known = adapter.positions in ("rotary", "alibi", "relative")
    # Rows and columns may be encoded as in "axial" attention, which has other weights.
    rotates = re.compile(structure.POSITION_KINDS["rotary"], re.I).search
    found = map(rotates, structure.identifiers(adapter.target))
    of_patches = grids_of_patches(adapter)
    is_known |= bool(adapter.image or of_patches) and any(found)
    skip_unless(is_known, "`positions` is not rotary, alibi or relative")
    is_of_caller = adapter.image and adapter.position_args
    skip_unless(not is_of_caller, "the positions of pixels are given, in any order")
    # The mean of all pixels, or a token for it, is a query and a key more.
    skip_unless(not (adapter.image and adapter.is_pooled), "pools the pixels")
    has_rows = is_grid(adapter)
    if (has_rows or of_patches) and not adapter.fixed_size:
        # Two pairs of features for each axis: the order of a single one is free.
        script.sizes = replace(script.sizes, d_k=8)
    if of_patches:
        assert_patches_shift_invariant(script, of_patches[0])
        return  # a class token has no position
    if has_rows:
        assert_image_shift_invariant(script)
        script.adapter = adapter
    assert_shift_invariant(script)
    assert_each_axis_is_relative(script)
    if has_rows and adapter.fixed_length is not None:
        return  # the next pixel may be that of the next row
    # Where no mask can hide tokens in front of the others, weights show the same.
    length = max(4, script.sizes.k_len)
    weights = weights_of_equal_tokens(script, length)
    farthest = min(length - 2, adapter.window or length)
    assert_weights_shift(script, weights, range(1, farthest))
    is_normed = {"norm", "scale", "talking"} & set(adapter.designs)
    is_plain = not (is_normed or adapter.image)
    if adapter.positions == "rotary" and adapter.projections and is_plain:
        assert_rotation_starts_at_zero(script)


def assert_own_distance_is_zero(script: Script) -> None:
    """Where sines of distances are projected, a token itself is at distance 0.

    There sines are 0 and cosines 1. A slice of the table that is off by one, or a shift
    of the scores, gives this row to a neighbor.
    """
    adapter = script.adapter
    is_open = adapter.positions in ("relative", "unknown")
    if not (is_open and adapter.is_module and adapter.single_input) or adapter.image:
        return
    length = adapter.fixed_length or 5
    script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
    script.restart()
    calls = [f"lambda: {script.call_source(script.make_arguments())}" for _ in range(2)]
    for name, part in script.evaluate("attention").named_modules():
        layer = f"attention.get_submodule({name!r})"
        is_linear = isinstance(part, nn.Linear)
        if not is_linear or not script.evaluate(f"is_called({calls[0]}, {layer})"):
            continue
        one, other = (script.evaluate(f"captured_input({c}, {layer})") for c in calls)
        rows = one.flatten(0, -2)
        has_zero = ((rows == 0) | (rows == 1)).all(dim=1) & (rows.std(dim=1) > 0)
        if not torch.equal(one, other) or not has_zero.any():
            continue  # it projects tokens, or a table without the distance 0
        own = script.assign("own", f"encodings_of_own({calls[0]}, {layer})")
        if len(script.evaluate(own)) < 2:
            message = f"`{name}` gets another distance than 0 for a token and itself"
            is_zero = f"len({own}) == 1 and (({own} == 0) | ({own} == 1)).all()"
            script.assert_true(is_zero, message)


def assert_each_axis_is_relative(script: Script) -> None:
    """Of position ids with several axes, a shift along one of them changes nothing.

    Such are the ids of texts with images and videos: of time, rows and columns.
    """
    adapter, length, d_k = script.adapter, max(4, script.sizes.k_len), script.sizes.d_k
    # A narrow head may have features of one axis only.
    widths = [d_k] if adapter.fixed_size else [d_k, 16]
    number_and_axis = ((3, 0), (3, 1), (3, 2), (2, 0), (2, 1))
    stated = r"\(([23]), ?\w+, ?\w+\)"
    for name in filter(
        names.POSITION_IDS_PATTERN.fullmatch, names.parameters_by_name(adapter.target)
    ):
        if not documented.says_of(adapter.target, name, stated):
            continue
        for d_k, (axes, axis) in itertools.product(widths, number_and_axis):
            # It may have another number of axes.
            with script.using(d_k=d_k), script.attempt():
                script.restart()
                args = script.make_arguments(script.all_allowed(length, length))
                tokens = f"torch.arange({length}){script.to_device()}"
                factors = f"torch.arange(1, {axes + 1}){script.to_device()}"
                batch = f".expand(-1, {script.sizes.batch_size}, -1)"
                numbers = f"({tokens} * {factors}[:, None, None] % 5)"
                ids = script.assign(name, numbers + batch)
                moved = script.assign(name, f"{ids}.clone()")
                script.exec_line(f"{moved}[{axis}] += 7")
                before, after = (script.call(args, **{name: n}) for n in (ids, moved))
                message = f"{{place}} changes if axis {axis} of `{name}` is shifted"
                relative = ratio_tolerance(script)
                script.assert_close(before, after, message, relative=relative)


# How coordinates are moved, as source text; the second one is a rotation.
MOTIONS = {
    "shifted": "{} + 2",
    "rotated": "{} @ torch.matrix_exp(torch.tensor("
    "[[0.0, 0.3, -0.5], [-0.3, 0.0, 0.7], [0.5, -0.7, 0.0]]).to({}))",
}


@law(slow=True)
def moved_coordinates(script: Script) -> None:
    r"""Coordinates that are shifted, or rotated, leave the features as they are.

    $$y(x, R \, p + t) = y(x, p), \quad p'(x, R \, p + t) = R \, p'(x, p) + t$$

    What is computed from distances and differences alone does not depend on where a
    molecule or a map is, and how it is rotated. Coordinates that are returned move with
    those that are given: a sum of differences needs the sum of its own weights, which a
    cutoff makes less than one. This applies where the documentation says so.
    """
    adapter = script.adapter
    motions = documented.keeps_motions(adapter.target)
    shapes = documented.all_shapes(adapter.target)
    of_points = [n for n in adapter.extra_args if shapes.get(n, ())[2:] == ("3",)]
    is_known = motions and of_points and adapter.layout == "bld"
    skip_unless(is_known, "documents no coordinates that may be moved")
    name, usual = of_points[0], script.sizes
    length = usual.k_len if adapter.single_input else usual.q_len
    for motion in motions:
        script.restart()
        args = script.make_arguments(script.all_allowed(length, usual.k_len))
        points = script.random_tensor(name, usual.batch_size, length, 3)
        moved = script.assign(name, MOTIONS[motion].format(points, points))
        before, after = (
            script.assign("result", script.call_source(args, **{name: each}))
            for each in (points, moved)
        )
        shape = script.evaluate(points).shape
        parts = parts_of(script.evaluate(before)) or {"": script.evaluate(before)}
        for index, part in parts.items():
            if not isinstance(part, Tensor) or not part.is_floating_point():
                continue
            expected = script.assign("expected", f"{before}{index}")
            message = f"the output{index} changes if `{name}` is {motion}"
            if part.shape == shape:
                moves = MOTIONS[motion].format(expected, expected)
                expected = script.assign("expected", moves)
                message = f"the output{index} is not {motion} as `{name}` is"
            same = f"torch.allclose({expected}, {after}{index}, rtol=1e-3, atol=1e-3)"
            script.assert_true(same, message)


def grids_of_patches(adapter: Adapter) -> list[str]:
    """Arguments that are the rows and columns of patches, behind a class token perhaps.

    Where they are left out, the patches may be a square.
    """
    given = adapter.extra_args.items()
    required = [n for n, text in given if text == "(1, {length} - 1)"]
    parameters = names.parameters_of(adapter.target) if adapter.single_input else []
    optional = [p.name for p in parameters if p.default is None]
    return [*required, *filter(names.PATCH_GRID_PATTERN.fullmatch, optional)]


def is_grid(adapter: Adapter) -> bool:
    """Whether tokens have two distances, of rows and of columns."""
    if adapter.image:
        is_column = adapter.image_height == 0  # tokens meet along one axis only
        return not (is_column or adapter.image.startswith("frames"))
    length = adapter.fixed_length
    if length is None or math.isqrt(length) ** 2 != length:
        return adapter.gets_sides
    return any(map(GRID_PATTERN.search, structure.identifiers(adapter.target)))


GRID_PATTERN = re.compile(r"(^|_)(grid|height|rows?|axial|patch(es)?)(_|$)", re.I)


def assert_image_shift_invariant(
    script: Script, height: int = 3, width: int = 5
) -> None:
    """In an image that is no square, weights depend on two distances only.

    Those of the right and the lower neighbor are compared with that of the pixel.
    """
    if script.adapter.fixed_length:
        height, width = script.adapter.grid(script.adapter.fixed_length)
    script.adapter = replace(script.adapter, image_height=height)
    weights = weights_of_equal_tokens(script, height * width)
    assert_neighbors_weigh_alike(script, weights, height, width)


def assert_patches_shift_invariant(script: Script, argument: str) -> None:
    """So it is for patches whose rows and columns are given, behind a class token."""
    height, width = 3, 5
    given = {**script.adapter.extra_args, argument: f"({height}, {width})"}
    script.adapter = replace(script.adapter, extra_args=given)
    for first in (1, 0):
        with script.attempt():  # there may be no such token
            weights = weights_of_equal_tokens(script, first + height * width)
            patches = script.assign("weights", f"{weights}[..., {first}:, {first}:]")
            assert_neighbors_weigh_alike(script, patches, height, width)
            return


def assert_neighbors_weigh_alike(
    script: Script, weights: str, height: int, width: int
) -> None:
    """Each pixel weighs the next one on the right, and the one below, as others do."""
    for step, where in ((1, "on the right"), (width, "below")):
        queries = [
            n for n in range(height * width - step) if step > 1 or (n + 1) % width
        ]
        here, there = (f"{weights}.diagonal({d}, -2, -1)" for d in (0, step))
        ratio = script.assign("ratio", f"({there} / {here}[:, :-{step}])[:, {queries}]")
        # A pixel in another window has a weight of zero.
        seen = script.assign("seen", f"{ratio}.where({ratio} > 0, torch.nan)")
        usual = f"{seen}.nanmedian(dim=1, keepdim=True).values"
        claim = (
            f"({seen} / {usual} - 1).nan_to_num().abs().max() <= "
            f"{ratio_tolerance(script)}"
        )
        message = (
            f"the pixels of a {height} x {width} image weigh the next one {where} "
            f"differently"
        )
        script.assert_true(claim, message)


def assert_rotation_starts_at_zero(script: Script) -> None:
    """A query is rotated as much from distance 0 to 1 as from 1 to 2.

    Keys that are one position ahead have rotations that depend on distances, too.
    """
    if has_unknown_order(script):
        return
    script.sizes = replace(script.sizes, batch_size=1, q_len=3, k_len=3)
    script.restart()
    args = make_equal_tokens(script, script.make_arguments(script.all_allowed(3, 3)))
    weights = record_weights_with_gradients(script, args)
    if not weights:
        return
    with script.rollback():
        q, once = score_gradients(script, args, weights, query=1)
        _q, twice = score_gradients(script, args, weights, query=2)
    # The law of the scale compares their lengths.
    q, once, twice = (x / x.norm(dim=-1, keepdim=True) for x in (q, once, twice))
    off = (q * once - once * twice).sum(dim=-1).abs().max().item()
    if off > 0.02:
        message = (
            "a query is rotated otherwise between distances 0 and 1 than between 1 "
            "and 2: the positions of queries and keys do not start at the same number"
        )
        script.fail("False, " + repr(message), message, off, 0.02)


@law(slow=True, assumes="dynamic norm scale talking")
def rotary_angles(script: Script) -> None:
    r"""The angles of a rotary encoding fall from 1 to nearly the inverse of its base.

    $$\theta_n = b^{-2n/d}, \quad 0 \le n < d/2$$

    Here $d$ is the width of a head, or of the part of it that is rotated. Computed with
    the width of the model, the angles fall too slowly: all pairs are rotated fast, and
    none can tell far tokens apart. The base is a number in the code, such as 10,000.
    """
    adapter = script.adapter
    skip_unless(adapter.positions == "rotary", "`positions` is not rotary")
    skip_unless(adapter.projections and adapter.is_module, "projections not found")
    skip_unless(not (adapter.image or adapter.position_args), "gets its angles")
    d_k = script.sizes.d_k if adapter.fixed_size else max(16, script.sizes.d_k)
    script.sizes = replace(script.sizes, batch_size=1, q_len=2, k_len=2, d_k=d_k)
    script.restart()
    attention = script.evaluate("attention")
    scaled = [n for n in structure.identifiers(attention) if SCALED_PATTERN.search(n)]
    bases = structure.large_numbers(attention)
    skip_unless(bases and not scaled, "its base is not known")
    args = script.make_arguments(script.all_allowed(2, 2))
    args = make_equal_tokens(script, args)
    weights = record_weights_with_gradients(script, args)
    skip_unless(weights, "its weights are neither returned nor those of a softmax")
    with script.rollback():
        q, rotated = score_gradients(script, args, weights, query=1)
    width = structure.rotary_width(attention) or d_k
    is_partial = any("partial" in n.lower() for n in structure.identifiers(attention))
    skip_unless(width < d_k or not is_partial, "rotates a part of unknown width")
    angles = rotation_angles(q[:, :width], rotated[:, :width])
    skip_unless(len(angles) > 1, "its pairs of features were not found")
    ratio = (angles[1] / angles[0]).item()
    series = ratio ** torch.arange(len(angles))
    is_series = ((angles - series).abs() <= 0.01 * series + 1e-4).all()
    skip_unless(is_series, "its angles are not a geometric series from 1 on")
    base, heads = ratio ** -len(angles), script.sizes.heads
    is_known = any(abs(math.log(base / known)) < 0.02 for known in bases)
    # Computed with the width of the model, with twice the pairs, with half of them, or
    # with the width of the whole head.
    powers = (1 / heads, heads, 0.5, 2, width / d_k)
    for known, power in itertools.product(bases, powers):
        expected = math.log(known) * power
        off = abs(math.log(base) / expected - 1)
        if power != 1 and off < 0.01 and not is_known:
            message = (
                f"the angles of {width} features are those of a base of {base:.3g}; in "
                f"the code it is {known:.6g}"
            )
            script.fail("False, " + repr(message), message, off, 0.0)


# Names in code whose angles are others than those of the base, by intention.
SCALED_PATTERN = re.compile(
    r"scaling|(?<!norm_)factor|yarn|ntk|xpos|axial|2d|prop(ortional)?_?rope",
    re.IGNORECASE,
)


def rotation_angles(before: Tensor, after: Tensor) -> Tensor:
    """The angles between pairs of features, `[heads, features]`; empty if unknown.

    A rotation of a pair keeps its length.
    """
    for pairs in ((2, -1), (-1, 2)):
        axis = pairs.index(2) - 2
        a, b = before.reshape(len(before), *pairs).unbind(axis)
        c, d = after.reshape(len(after), *pairs).unbind(axis)
        is_kept = torch.allclose(a.hypot(b), c.hypot(d), rtol=0.01, atol=1e-3)
        if is_kept:
            cosine, sine = a * c + b * d, a * d - b * c
            return torch.atan2(sine.sum(dim=0), cosine.sum(dim=0)).abs().cpu()
    return torch.empty(0)


@law(slow=True, assumes="sampling convolution")
def distant_positions(script: Script) -> None:
    r"""Positions far from the start are as exact as the first, in half precision, too.

    $$\operatorname{bfloat16}(257) = 256$$

    Of 300 tokens, neighbors must have positions of their own, and equal distances equal
    weights: a table that ends early, or that is made of blocks, repeats positions or
    omits some. In half precision the positions must be computed in float32: bfloat16
    has 8 bits, and the angle of a rotary encoding is wrong from position 256 on, as
    1,040 tokens show, or their weights in the first layer of a model. An image of so
    many pixels has rows and columns, and two distances; a video has as many frames,
    too. Times in seconds may be as large as those of today, of which float32 rounds the
    last 2 minutes.

    Published models, such as BLOOM and MPT, add a linear bias by the position in the
    dtype of their scores. If only that is rounded, it is reported as a skip unless
    `only` names this law.
    """
    adapter = script.adapter
    assert_times_of_today_are_exact(script)
    skip_unless(adapter.positions != "none", "has no positional encoding")
    skip_unless(adapter.fixed_length is None, "takes sequences of one length only")
    has_points = "%" in "".join(adapter.position_args.values())
    skip_unless(not has_points, "its tokens are points, at coordinates that recur")
    script.sizes = replace(script.sizes, batch_size=1, q_len=FAR, k_len=FAR)
    skip_unless(not grids_of_patches(adapter), "a class token has no position")
    has_rows = is_grid(adapter)
    if has_rows:
        # No image has a side so long, and tables of rows and columns end before.
        script.adapter = replace(adapter, image_height=FAR_HEIGHT)
    skip_unless(takes_length(script, FAR), f"takes no sequences of {FAR} tokens")
    lengths = [FAR]
    is_loop = count_functions(script, FAR) > LOOP_FUNCTIONS
    takes_longest = not is_loop and takes_length(script, LONGEST)
    is_alone = adapter.is_module and not attends_twice(script)
    if adapter.positions == "rotary" and is_alone and takes_longest:
        lengths.append(LONGEST)  # of 300 positions, few are rounded
    is_model = adapter.positions == "rotary" and adapter.is_module and not is_alone
    has_weights = is_model and takes_longest
    has_weights = has_weights and assert_weights_are_exact(script, LONGEST)
    is_coarse = not has_weights and are_far_positions_coarse(script, lengths)
    is_video = adapter.image.startswith("video")
    if is_video:
        # It may have a table for fewer frames.
        with script.attempt(), one_image(script, (FAR, 1, 1)):
            is_coarse |= are_far_positions_coarse(script, [FAR])
    script.sizes = replace(script.sizes, q_len=FAR, k_len=FAR)
    if adapter.positions in ("rotary", "alibi") and not is_video:
        assert_last_weights_differ(script, FAR)  # of a video, frames alone may differ
    if has_rows and adapter.positions in ("rotary", "alibi", "relative"):
        assert_image_shift_invariant(script, FAR_HEIGHT, FAR // FAR_HEIGHT)
    elif adapter.positions in ("rotary", "alibi", "relative"):
        weights = weights_of_equal_tokens(script, FAR)
        # The weights of far keys may be too small for a ratio.
        near = range(1, min(20, adapter.window or 20))
        assert_weights_shift(script, weights, near, factor=10)
        if takes_longest:
            weights = weights_of_equal_tokens(script, LONGEST)
            assert_weights_shift(script, weights, near, factor=10)
            if adapter.positions == "alibi":
                is_coarse |= has_coarse_bias(script, LONGEST)
    if is_coarse:
        raise Excused(
            "its linear bias grows with the length and has the dtype of its scores, as "
            "in published models; in half precision, compute it and add it in float32"
        )


def are_far_positions_coarse(script: Script, lengths: list[int]) -> bool:
    """Assert that half precision is close; whether only a linear bias is rounded."""
    is_coarse = False
    for length, dtype in itertools.product(lengths, (torch.bfloat16, torch.float16)):
        script.sizes = replace(script.sizes, q_len=length, k_len=length)
        try:
            assert_half_is_close(script, dtype)
        except LawViolation:
            skip_if_of_buffers(script, dtype)
            if script.insist or not rounds_bias(script, dtype):
                raise
            is_coarse = True
    return is_coarse


# Seconds since 1970, and a number of seconds that float32 adds to others exactly.
TODAY, SOME_SECONDS = 1_700_000_000, 1024


def assert_times_of_today_are_exact(script: Script) -> None:
    """Where intervals matter only, they do for times of today, which are large."""
    script.sizes = replace(script.sizes, batch_size=1)
    for name, text in script.adapter.extra_args.items():
        is_integer = re.search(r"torch\.(int64|long)\b", text)
        if not (is_integer and names.TIME_PATTERN.search(name)):
            continue
        script.restart()
        args = script.make_arguments()
        times = script.sized_arguments(args, 0, [*args.inputs])[name]
        times = script.assign(name, f"({times} + 7).cumsum(-1)")
        usual = script.call(args, **{name: times})
        outputs = [
            script.call(args, **{name: f"{times} + {more}"})
            for more in (SOME_SECONDS, TODAY)
        ]
        if script.evaluate(f"torch.allclose({usual}, {outputs[0]}, atol=1e-5)"):
            message = f"{{place}} changes if all of `{name}` are those of today"
            script.assert_close(usual, outputs[1], message)


# The entries of all tensors that a call may compute: about a gigabyte in float32.
MANY_ENTRIES = 3e8


def fits_in_memory(script: Script, length: int) -> bool:
    """Whether the tensors of a call of this length are not too large.

    They grow with the square of the length, or with its cube if an axis, such as one of
    a mask, is broadcast by mistake. How fast is estimated from two short sequences.
    """
    counts = []
    for short in (32, 64):
        script.restart()
        causal = without_future(script.all_allowed(short, short))
        masks = script.masks_for(causal)
        allowed = causal if masks else script.all_allowed(short, short)
        args = script.make_arguments(allowed, *masks[:1])
        call = f"lambda: {script.call_source(args)}"
        with script.attempt():  # it may take other lengths only
            count = script.assign("count", f"count_entries({call})")
            counts.append(script.evaluate(count))
    if len(counts) < 2:
        return True
    growth = counts[1] / counts[0]
    return bool(counts[1] * growth ** math.log2(length / 64) <= MANY_ENTRIES)


def count_functions(script: Script, length: int) -> int:
    """How many functions of PyTorch a call of this length has: a loop has many."""
    script.restart()
    args = script.make_arguments(script.all_allowed(length, length))
    with recorders.CalledFunctions() as functions, script.attempt():
        script.call(args)
    return sum(functions.found.values())


def takes_length(script: Script, length: int) -> bool:
    """Whether a sequence of this length can be computed."""
    if not fits_in_memory(script, length):
        return False
    script.restart()
    args = script.make_arguments(script.all_allowed(length, length))
    try:
        script.call(args)
    except ScriptError:
        return False  # longer than its tables
    return True


def assert_weights_shift(
    script: Script, weights: str, distances: range, factor: float = 1.0
) -> None:
    """The ratios of the weights of neighboring keys are the same for all queries.

    A key outside of a window has a weight of zero, and no ratio. A weight below the
    smallest normal number is not exact. Queries whose weights are not known are left
    out.
    """
    here, there = f"{weights}[..., :-1]", f"{weights}[..., 1:]"
    seen = f"{here}.minimum({there}) > torch.finfo({weights}.dtype).tiny"
    ratio = script.assign("ratio", f"({there} / {here}).where({seen}, torch.nan)")
    unknown = script.evaluate(f"{weights}[0].isnan().all(-1)")
    known = (~unknown).nonzero().flatten().tolist()
    tolerance = factor * ratio_tolerance(script)
    for distance in distances:
        # The first query of two that are compared has no future keys to compare.
        here = f"{ratio}.diagonal(-{distance}, -2, -1)"
        if unknown.any():
            here += f"[..., {[n - distance for n in known if n >= distance]}]"
        largest = f"({here}[..., 1:] / {here}[..., :-1] - 1).nan_to_num().abs().max()"
        found = script.evaluate(largest).item()
        if not found <= tolerance:
            # With the difference, so that float64 may tell rounding from a bug.
            message = f"queries weigh keys at a distance of {distance} differently"
            script.fail(f"{largest} <= {tolerance}", message, found, tolerance)


def assert_shift_invariant(script: Script) -> None:
    """Put two hidden tokens in front, if a mask can hide them."""
    adapter, length = script.adapter, script.sizes.k_len
    longer = script.all_allowed(length + 2, length + 2)
    longer[:, :2] = False
    masks = script.masks_for(longer)
    for mask in masks:
        script.restart()
        allowed = script.all_allowed(length, length)
        args = script.make_arguments(allowed, mask)
        before = script.call(args)
        sizes = replace(script.sizes, q_len=2, k_len=2)
        inputs = []
        if adapter.position_args:
            continue
        for role, name in enumerate(args.inputs):
            hidden = script.random_tensor("hidden", *adapter.input_shape(sizes, role))
            inputs.append(script.concatenate(hidden, name))
        encoded = script.encode_mask(longer, mask)
        after = script.call(CallArguments(tuple(inputs), encoded, longer))
        after = script.assign("y", f"{after}{adapter.index(l=slice(2, None))}")
        message = "{place} changes behind two hidden tokens"
        script.assert_close(before, after, message, relative=ratio_tolerance(script))
