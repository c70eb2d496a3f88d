r"""# Laws of batch items

The sequences of a batch are chosen at random, so that none may depend on another one.
Implementations flatten heads or windows into the batch, use the mask or length of the
first item for all, and share a maximum or a table. So each item is computed again,
alone, with all that is its own: its mask, its positions, its context. Sequences that
are packed into one, and graphs whose nodes are, are kept apart like batch items.

Source: the cases are those of published bugs; the [bug
museum](../../compare/museum.md) shows them.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention_laws import documented, names
from attention_laws.adapter import Adapter, MaskArgument, without_future
from attention_laws.algebra import (
    LARGE_FACTOR,
    assert_in_float64,
    edge_argument,
    tokens_meet,
)
from attention_laws.cached_calls import restart_with_cache
from attention_laws.decoding import decode, is_quantized
from attention_laws.law import LawViolation, ScriptError, law, skip_unless
from attention_laws.masking import assigned_ids
from attention_laws.script import CallArguments, Script, parts_of


@law(assumes="sampling")
def batch_independence(script: Script) -> None:
    r"""Batch items do not influence each other.

    $$\partial y_b / \partial x_{b'} = 0 \quad \text{for } b \neq b'$$

    The sequences of a batch are chosen at random. Statistics over the batch, a `view`
    that confuses heads with batch items, and masks that broadcast only because two
    sizes are equal all break this, and the results of a sequence then depend on the
    others. So do those of a graph among the edges of several, or in a batch of which an
    argument tells the graph of each node. Variables of a series that are documented to
    be independent are items, too, and so are videos whose frames are images. An item
    has its own memory, its own text for all of its frames, its own mask for all of its
    views, its own scale in a cache of integers, and its own weights in a list of those
    of all layers.
    """
    ends = [n for n in script.adapter.extra_args if n.startswith("cu_seq")]
    if ends and not script.adapter.position_args:
        assert_packed_equal_alone(script, ends)
        return
    if edges := edge_argument(script.adapter):
        assert_graphs_are_apart(script, edges)
        return
    if script.adapter.layout == "ld" and assert_joined_equal_alone(script):
        return
    skip_unless(script.sizes.batch_size > 1, "needs two batch items")
    skip_unless("b" in script.adapter.layout, "takes one sequence at a time")
    assert_variables_are_apart(script)
    assert_videos_are_apart(script)
    assert_first_item_is_unseen(script)
    assert_weights_are_of_item(script)
    assert_marks_are_of_item(script)
    assert_marks_of_context_are_of_item(script)
    for allowed, mask in item_masks(script):
        script.restart()
        assert_items_equal_alone(script, allowed, mask)
    assert_odd_heads_equal_alone(script)
    assert_mask_is_shared(script)
    assert_images_share_mask_of_windows(script)
    assert_long_items_equal_alone(script)
    assert_items_equal_alone_behind_cache(script)
    if script.adapter.image.startswith("frames"):
        assert_pixels_equal_alone(script)
    if len(script.adapter.inputs) == 2:
        assert_context_is_shared(script)
        assert_views_are_of_item(script)
    length, items = script.sizes.k_len, f"torch.arange({script.sizes.batch_size})"
    tokens = f"torch.arange({length})"
    # The distances of the tokens of an item are others than those of the other items,
    # and so is the token with which its second part begins.
    positions = f"{tokens} * (1 + {items}[:, None])"
    segments = f"({tokens} > {items}[:, None]).long()"
    axis = int(script.adapter.ids_are_turned)
    for argument, numbers in assigned_ids(script, positions, segments):
        assert_items_have_own(script, argument, numbers, axis)
    numbers = f"({positions}){script.to_device()}"
    assert_items_have_own_numbers(script, optional_integers(script.adapter), numbers)
    lengths = lengths_of_items(script)
    assert_items_have_own_numbers(script, optional_lengths(script.adapter), lengths)
    adapter = script.adapter
    assert_memories_are_of_items(script)
    assert_items_have_own_tensors(script)
    if adapter.image.startswith("image") and adapter.fixed_length is None:
        # What is of an image may be repeated for each of its rows.
        with script.using(replace(adapter, image_height=2), q_len=6, k_len=6):
            assert_items_have_own_tensors(script)
            assert_rows_are_of_item(script)
    assert_items_have_own_features(script)


def assert_items_have_own_features(script: Script) -> None:
    """Each item has its part of optional tensors, shaped as the input, to itself."""
    adapter, shape = script.adapter, script.adapter.input_shape(script.sizes, 0)
    # If the sizes are equal, a tensor of other axes would be accepted.
    has_axes = len({*shape}) > 2
    for argument in names.optional_tensors(adapter) if has_axes else ():
        script.restart()
        stated = documented.all_shapes(adapter.target).get(argument, shape)
        if len(stated) != len(shape):
            continue  # the same for all items
        with script.attempt():  # it may be of another shape
            text = script.random_expression(*shape)
            if adapter.image:
                text += adapter.to_image(script.sizes.k_len)
            given = script.assign(argument, text)
            assert_items_have_own(script, argument, given, adapter.layout.index("b"))


def assert_rows_are_of_item(script: Script) -> None:
    """An item whose last row is hidden gives the same output in a batch of one.

    Such is an alignment of fewer sequences, of which others have no influence on it.
    """
    columns = script.adapter.grid(script.sizes.k_len)[1]
    allowed = script.all_allowed()
    allowed[:, -columns:, 0] = False
    for mask in script.masks_for(allowed):
        script.restart()
        with script.attempt():
            assert_items_equal_alone(script, allowed, mask)


def assert_items_have_own_numbers(
    script: Script, arguments: Iterable[str], numbers: str
) -> None:
    """Each item has its own integers, or its own length of a part, such as a prefix."""
    for argument in arguments:
        script.restart()
        with script.attempt():  # they may be numbers of something else
            given = script.assign(argument, numbers)
            assert_items_have_own(script, argument, given)


def assert_memories_are_of_items(script: Script) -> None:
    """Optional tensors that are documented to have a part for each item are apart.

    Such are the keys and the values of a memory, which a call gets together.
    """
    shapes = documented.shapes(script.adapter.target)
    found = [
        name
        for name in names.optional_tensors(script.adapter)
        if len(axes := shapes.get(name, ())) == 3
        and documented.BATCH_PATTERN.match(axes[0])
    ]
    if len(found) < 2:
        return
    for width in (script.sizes.d_k, script.sizes.heads * script.sizes.d_k):
        script.restart()
        with script.attempt():  # of another shape
            shape = script.sizes.batch_size, 7, width
            given = {name: script.random_tensor(name, *shape) for name in found}
            first = found[0]
            assert_items_have_own(script, first, given.pop(first), **given)


def assert_items_have_own_tensors(script: Script) -> None:
    """Each item gives the same output alone, with its part of what a call requires."""
    length = script.sizes.k_len
    for argument in {**script.adapter.extra_args, **script.adapter.position_args}:
        if script.adapter.image.startswith("video"):
            # What is of a video is repeated for each of its frames.
            script.adapter = replace(script.adapter, video_frames=2)
            script.sizes = replace(script.sizes, q_len=2 * length, k_len=2 * length)
        with script.attempt():  # its values may have a meaning
            script.restart()
            for given in own_tensors(script, argument):
                with script.attempt():
                    axis = axis_of_items(script, argument)
                    assert_items_have_own(script, argument, given, axis)


def axis_of_items(script: Script, argument: str) -> int:
    """The axis of batch items in an argument: the first, or that documented as it."""
    axes = documented.all_shapes(script.adapter.target).get(argument, ())
    return next((n for n, axis in enumerate(axes) if documented.is_batch(axis)), 0)


def assert_videos_are_apart(script: Script) -> None:
    """Images that are the frames of a video change those of no other video.

    Where tokens of several frames are one item, that has the same output alone.
    """
    adapter, given = script.adapter, script.adapter.extra_args
    counts = [
        name
        for name, parameter in names.parameters_by_name(adapter.target).items()
        if names.FRAMES_PATTERN.fullmatch(name)
        and (parameter.default in (1, None) or given.get(name) == "1")
    ]
    if not counts:
        return
    if len(adapter.inputs) == 2:
        assert_frames_see_own_context(script, counts[0])
    if not adapter.image:
        assert_items_of_frames_equal_alone(script, counts[0])
        return
    if not adapter.image.startswith("image"):
        return
    with script.using(batch_size=4):
        script.restart()
        with script.attempt():  # it may be another number
            args, two = script.make_arguments(), {counts[0]: "2"}
            before = script.call(args, **two)
            first = script.perturb(args, b=slice(0, 2), l=slice(None))
            after = script.call(first, **two)
            message = f"{{place}} depends on another video, with `{counts[0]}=2`"
            script.assert_close(before, after, message, b=slice(2, 4))


def assert_frames_see_own_context(script: Script, count: str) -> None:
    """If the frames of two videos have two contexts, each video sees its own."""
    adapter, two = script.adapter, {count: "2"}
    # It may have a context for each frame.
    with script.using(batch_size=4), script.attempt():
        script.restart()
        args = script.make_arguments()
        context = script.assign(
            "context", f"{args.inputs[1]}{adapter.index(b=slice(2))}"
        )
        both = script.call(replace(args, inputs=(args.inputs[0], context)), **two)
        for n in range(2):
            frames = adapter.index(b=slice(2 * n, 2 * n + 2))
            own = f"{context}{adapter.index(b=slice(n, n + 1))}"
            pair = (f"{args.inputs[0]}{frames}", own)
            inputs = tuple(map(script.assign, ("x", "context"), pair))
            alone = script.call(replace(args, inputs=inputs), **two)
            expected = script.assign("y", f"{both}{frames}")
            message = f"{{place}} of a video differs if it is alone, with `{count}=2`"
            script.assert_close(alone, expected, message)


def assert_items_of_frames_equal_alone(script: Script, count: str) -> None:
    """Items are apart if their tokens are of two frames, and perhaps of a class."""
    adapter = script.adapter
    if not adapter.single_input or adapter.fixed_length is not None:
        return
    extra_args = {**adapter.extra_args, count: "2"}
    mask, two = adapter.required_mask, replace(adapter, extra_args=extra_args)
    for length in (4, 5):
        # It may not be a multiple.
        with script.using(two, q_len=length, k_len=length), script.attempt():
            script.restart()
            assert_items_equal_alone(script, script.all_allowed(), mask)


def assert_marks_are_of_item(script: Script) -> None:
    """Which tokens are global in one item says nothing of another one."""
    items = f"torch.arange({script.sizes.batch_size})"
    tokens = f"torch.arange({script.sizes.k_len})"
    optional = names.optional_tensors(script.adapter)
    for argument in filter(names.GLOBAL_PATTERN.search, optional):
        script.restart()
        is_global = f"({tokens} == {items}[:, None]){script.to_device()}"
        marks = script.assign("marks", is_global)
        with script.attempt():  # they may be integers
            assert_items_have_own(script, argument, marks)
    if documented.marks_global_by_two(script.adapter.target):
        assert_twos_are_of_item(script)


# More tokens than a window beside a global token has.
MARKED = 24


def assert_twos_are_of_item(script: Script) -> None:
    """The same for a 2 in a mask, which stands for a global token."""
    adapter = script.adapter
    unmasked = replace(adapter, masks=(), required_mask=None)
    items = f"torch.arange({script.sizes.batch_size})[:, None]"
    twos = f"1 + (torch.arange({MARKED}) == {items}).long(){script.to_device()}"
    of_keys = (mask.name for mask in adapter.masks if mask.axes == "bk")
    for argument in dict.fromkeys(of_keys):
        with script.using(unmasked, q_len=MARKED, k_len=MARKED):
            script.restart()
            marks = script.assign(argument, twos)
            with script.attempt():  # it may take fewer tokens
                assert_items_have_own(script, argument, marks)


def assert_marks_of_context_are_of_item(script: Script) -> None:
    """Which tokens of a context beside an image are padding tells nothing of others.

    An image of four windows repeats the context of its batch item for each of them.
    """
    adapter, usual = script.adapter, script.sizes
    for context, mask in masks_of_filled(adapter) if adapter.image else ():
        for length in (usual.k_len, 4 * usual.k_len):
            only = replace(adapter, fixed_length=adapter.fixed_length and length)
            with script.using(only, q_len=length, k_len=length):
                script.restart()
                args = script.make_arguments()
                tokens = script.sized_arguments(args, 0, [*args.inputs])[context]
                shape = script.evaluate(tokens).shape
                count = shape[1] if len(shape) == 3 else 0
                items = f"torch.arange({usual.batch_size})"
                is_first = f"torch.arange({count}) <= {items}[:, None]"
                marks = script.assign("marks", f"({is_first}){script.to_device()}")
                with script.attempt():  # it may be of another length, or no bool mask
                    assert_items_have_own(script, mask, marks)


def masks_of_filled(adapter: Adapter) -> Iterator[tuple[str, str]]:
    """Optional masks of tensors that are filled, with these tensors."""
    for mask, parameter in names.parameters_by_name(adapter.target).items():
        if parameter.default is None and names.MASK_PATTERN.search(mask):
            for context in adapter.extra_args:
                is_named = mask.startswith(context)
                if is_named or documented.is_mask_of(adapter.target, mask, context):
                    yield context, mask


def assert_packed_equal_alone(script: Script, ends: list[str]) -> None:
    """Sequences that are packed into one give the same outputs as each alone.

    The arguments `ends` tell where the sequences end, as cumulative lengths. If those
    of keys are an argument of their own, sequences have fewer queries than keys, too,
    with and without a flag for causal attention.
    """
    bounds = [0, 2, 3, 7]
    for large in (False, True):
        assert_parts_equal_alone(script, ends, bounds, bounds, {}, large)
    if len(ends) == 1 or script.adapter.single_input:
        return
    flags = [mask.name for mask in script.adapter.masks if mask.kind == "causal"]
    for flag in ("", *flags):
        given = {flag: "True"} if flag else {}
        with script.attempt():  # it may take as many keys as queries only
            assert_parts_equal_alone(script, ends, bounds, [0, 4, 7, 12], given)


def assert_parts_equal_alone(
    script: Script,
    ends: list[str],
    of_queries: list[int],
    of_keys: list[int],
    more: Mapping[str, str],
    large: bool = False,
) -> None:
    """Sequences between these bounds do not depend on each other.

    So it is if the tokens of the first are large, with scores far above all others.
    """
    with script.using(q_len=of_queries[-1], k_len=of_keys[-1]):
        script.restart()
        args = script.make_arguments()
        if large:
            for name, stop in zip(
                args.inputs, (of_queries[1], of_keys[1]), strict=False
            ):
                first = script.adapter.index(l=slice(stop))
                script.exec_line(f"{name}{first} *= {LARGE_FACTOR}")
        last = {of_queries[-1]: of_queries, of_keys[-1]: of_keys}
        given = {}
        for name in ends:
            text = script.sized_arguments(args, 0, [*args.inputs])[name]
            bounds = last[int(script.evaluate(text)[-1])]
            given[name] = script.assign(
                "ends", f"torch.tensor({bounds}){script.to_device()}"
            )
        packed = script.call(args, **given, **more)
        roles = [of_queries, *[of_keys] * (len(args.inputs) - 1)]
        for number in range(len(of_queries) - 1):
            index = [
                script.adapter.index(l=slice(bounds[number], bounds[number + 1]))
                for bounds in roles
            ]
            pairs = zip(args.inputs, index, strict=True)
            inputs = tuple(script.assign(n, f"{n}{each}") for n, each in pairs)
            alone = script.call(replace(args, inputs=inputs), **more)
            if script.adapter.is_pooled:  # one output for each sequence
                index[0] = script.adapter.index(l=slice(number, number + 1))
            part = script.assign("y", f"{packed}{index[0]}")
            message = "{place} of a sequence differs if it is packed with others"
            script.assert_close(alone, part, message)


def assert_variables_are_apart(script: Script) -> None:
    """If the tokens are variables that are documented to be independent, they are."""
    adapter = script.adapter
    if adapter.layout != "bdl" or not adapter.single_input or adapter.image:
        return
    if documented.has_independent_variables(adapter.target):
        script.restart()
        args = script.make_arguments()
        before = script.call(args)
        after = script.call(script.perturb(args, l=slice(0, 1)))
        message = "{place} depends on another variable"
        script.assert_close(before, after, message, l=slice(1, None))


def assert_first_item_is_unseen(script: Script) -> None:
    """No batch item depends on the first one.

    Beside an image there may be a tensor that queries it at each pixel. The image is
    then one of several, which are no batch, but what is attended to.
    """
    for mode in script.modes():
        script.restart(mode)
        args = script.make_arguments()
        before = script.call(args)
        inputs = list(args.inputs)
        first_item = script.adapter.index(b=slice(0, 1))
        for role, name in enumerate(inputs):
            inputs[role] = script.assign(name, f"{name}.clone()")
            script.exec_line(f"{inputs[role]}{first_item} *= -2")
        after = script.call(replace(args, inputs=tuple(inputs)))
        message = "{place} depends on batch item 0"
        try:
            script.assert_close(before, after, message, b=slice(1, None))
        except LawViolation:
            filled = ", ".join(script.adapter.filled)
            is_batch = not (script.adapter.image and filled) or tokens_meet(script)
            reason = f"also gets `{filled}`, and its pixels attend to batch items only"
            skip_unless(is_batch, reason)
            raise


def assert_weights_are_of_item(script: Script) -> None:
    """Returned weights of other batch items are the same if the first one changes.

    A model may return those of each layer, in a list.
    """
    adapter = script.adapter
    if not adapter.weights_source or "b" not in adapter.weights_axes:
        assert_lists_are_of_item(script)
        return
    script.restart()
    args = script.make_arguments()
    before = script.call_for_weights(args)
    changed = script.perturb(args, b=slice(0, 1))
    after = script.call_for_weights(changed)
    others = "[" + ":, " * adapter.weights_axes.index("b") + "1:]"
    claim = f"torch.allclose({before}{others}, {after}{others}, atol=1e-5)"
    message = "returned weights of other batch items depend on batch item 0"
    script.assert_true(claim, message)


# Batch items, as many as nothing else.
MANY_ITEMS = 7


def assert_lists_are_of_item(script: Script) -> None:
    """Tensors for each item in a list that is returned depend on their item only."""
    if script.adapter.layout[0] != "b":
        return
    with script.using(batch_size=MANY_ITEMS):
        script.restart()
        with script.attempt():  # it may take fewer items
            args = script.make_arguments()
            changed = script.perturb(args, b=slice(0, 1))
            before, after = (
                f"tensors_in({script.assign('result', script.call_source(each))})"
                for each in (args, changed)
            )
            parts = parts_of(script.evaluate("result"))
            if not any(isinstance(part, list | tuple) for part in parts.values()):
                return
            pairs = f"zip({before}, {after}, strict=True)"
            equal = "torch.allclose(a[1:], b[1:], atol=1e-5)"
            claim = (
                f"all({equal} for a, b in {pairs} if a.shape[:1] == ({MANY_ITEMS},))"
            )
            message = "tensors of other batch items in a list depend on batch item 0"
            script.assert_true(claim, message)


def item_index(script: Script, item: int) -> str:
    """The index of one batch item, which keeps the axis."""
    return script.adapter.index(b=slice(item, item + 1))


def own_tensors(script: Script, argument: str) -> Iterator[str]:
    """Random values for a required tensor that has one part for each batch item.

    Such are the edges of a graph, or a vector that a layer is conditioned on. There are
    none where the argument is another one. Integers may be numbers of which each item
    has its own unit, or select one of two.
    """
    args = script.make_arguments(script.all_allowed(script.sizes.k_len))
    text = script.sized_arguments(args, 0, list(args.inputs)).get(argument, "None")
    value = script.evaluate(text)
    batch_size = script.sizes.batch_size
    adapter = script.adapter
    template = {**adapter.position_args, **adapter.extra_args}[argument]
    if "{batch_size}" not in template and "{query}" not in template:
        return  # of weights, or of positions, as many as there are batch items
    if names.LENGTHS_PATTERN.search(argument) and is_number_of_each(script, value):
        yield script.assign(argument, lengths_of_items(script))
    if not isinstance(value, Tensor) or value.dim() < 2 or value.is_complex():
        return
    axis = axis_of_items(script, argument)
    if [n for n, size in enumerate(value.shape) if size == batch_size] != [axis]:
        return
    if template.startswith(names.PER_ITEM) and takes_more_rows(script, argument, text):
        return  # they are vectors that all batch items share
    given = script.random_tensor(argument, *value.shape)
    if value.is_floating_point():
        is_box = value.shape[-1] == 4 and documented.BOXES_PATTERN.search(argument)
        boxes = f"{given}.abs().cumsum(-1)"
        yield script.assign(argument, boxes) if is_box else given
        return
    if argument in script.adapter.position_args or template in names.PAGES_OF_ITEM:
        return  # numbers of positions or of pages
    # Each token is its own neighbor, so that no row is empty.
    given = f"({given} > 0)"
    if value.shape[-2:].count(script.sizes.k_len) == 2:
        given += f" | torch.eye({script.sizes.k_len}).bool(){script.to_device()}"
    elif value.dtype != torch.bool:
        axes = tuple(-1 if n == axis else 1 for n in range(value.dim()))
        units = f"torch.arange(1, {batch_size + 1}){script.to_device()}.view{axes}"
        yield script.assign(argument, f"({given} * {units}).to({value.dtype})")
    yield script.assign(argument, f"({given}).to({value.dtype})")


def takes_more_rows(script: Script, argument: str, text: str) -> bool:
    """Whether a tensor may have more rows than there are batch items."""
    is_taken = False
    with script.rollback(), script.attempt():
        args = script.make_arguments(script.all_allowed(script.sizes.k_len))
        script.call(args, **{argument: f"torch.cat([{text}, {text}])"})
        is_taken = True
    return is_taken


def is_number_of_each(script: Script, value: Any) -> bool:
    """Whether a value is an integer for each batch item."""
    is_integer = isinstance(value, Tensor) and value.dtype == torch.int64
    return is_integer and [*value.shape] == [script.sizes.batch_size]


def lengths_of_items(script: Script) -> str:
    """Another length of a part, such as a prefix, for each batch item."""
    items = f"torch.arange({script.sizes.batch_size}){script.to_device()}"
    return f"({items} + 1) % {script.sizes.k_len}"


# A number of heads that slices of two or more of them do not divide.
ODD_HEADS = 5


def assert_odd_heads_equal_alone(script: Script) -> None:
    """The same for an odd number of heads: those of all items may be cut in slices."""
    group_size = script.adapter.group_size
    if script.adapter.fixed_size or "{heads}" not in str(script.adapter.init_args):
        return
    # Widths may have to be powers of two.
    with script.using(heads=ODD_HEADS * group_size), script.attempt():
        script.restart()
        assert_items_equal_alone(script, script.all_allowed(script.sizes.k_len), None)


def assert_mask_is_shared(script: Script) -> None:
    """Shorter shapes of a mask hide the same as its own, for any number of items.

    Where the batch size is the number of queries, a mask of queries and keys for all
    items must not be taken for one of the keys of each item, nor the other way round.
    """
    masks = [
        mask
        for mask in script.adapter.masks
        if mask.kind != "causal" and {*"bqk"} <= {*mask.axes}
    ]
    for mask in masks:
        shared, of_keys = replace(mask, axes="qk"), replace(mask, axes="bk")
        assert_shapes_agree(script, shared, replace(mask, axes="bqk"))
        assert_shapes_agree(script, of_keys, mask)


def assert_images_share_mask_of_windows(script: Script) -> None:
    """A mask for the windows of one image is that of the windows of the next one, too.

    Windows of two images have the outputs of each image alone.
    """
    pattern = r"\(\W*(n_?w|(num|n)_?win\w*)\b"
    for mask in script.adapter.masks:
        is_stated = documented.says_of(script.adapter.target, mask.name, pattern)
        if mask.axes != "bqk" or not is_stated:
            continue
        with script.using(batch_size=4):
            script.restart()
            args = script.make_arguments()
            allowed = args.allowed[..., :2].clone()
            allowed[:, -1, 0] = allowed[:, 0, 1] = False
            args = replace(args, mask=script.encode_mask(allowed, mask))
            with script.attempt():  # it may need as many masks as there are windows
                both = script.call(args)
                for number, items in enumerate((slice(0, 2), slice(2, 4))):
                    index = script.adapter.index(b=items)
                    image = tuple(script.assign(n, f"{n}{index}") for n in args.inputs)
                    alone = script.call(replace(args, inputs=image))
                    part = script.assign("y", f"{both}{index}")
                    message = f"{{place}} of image {number} differs if it is alone"
                    script.assert_close(alone, part, message)


def assert_shapes_agree(
    script: Script, shorter: MaskArgument, mask: MaskArgument
) -> None:
    """A mask of fewer axes hides the same as one of all, if both are accepted.

    If they do not where sizes differ, the shorter one means something else.
    """
    length = script.sizes.k_len
    if length < 3 or script.adapter.fixed_length is not None:
        return
    for batch_size in (length - 1, length):
        with script.using(batch_size=batch_size, q_len=length):
            script.restart()
            allowed = script.all_allowed()
            if "q" in shorter.axes:
                allowed = without_future(allowed)
            else:
                allowed[:, length - 1, 0] = False
            args = script.make_arguments(allowed, shorter)
            try:
                seen = script.call(args)
                encoded = script.encode_mask(allowed, mask)
                expected = script.call(replace(args, mask=encoded))
            except ScriptError:
                break
            if not isinstance(script.evaluate(expected), Tensor):
                break  # broadcast, so that no part of the result has the usual shape
            if batch_size < length:
                if not script.evaluate(
                    f"torch.allclose({seen}, {expected}, atol=1e-4)"
                ):
                    break
                continue
            axes = "[queries, keys]" if "q" in shorter.axes else "[batch items, keys]"
            message = f"{{place}} differs with a `{mask.name}` {axes}"
            script.assert_close(expected, seen, message)


def item_masks(script: Script) -> Iterator[tuple[Tensor, MaskArgument | None]]:
    """No mask, and masks that hide none, two and one of the last keys in each item.

    What an item hides is not all hidden in the next: counted over the batch, it shows.
    Then the first item hides two, as its length may be taken for the longest. Then it
    is the first keys, as after left padding: positions may be counted from it.
    """
    k_len = script.sizes.k_len
    q_len = k_len if script.adapter.single_input else script.sizes.q_len
    yield script.all_allowed(q_len, k_len), script.adapter.required_mask
    for first, is_left in ((0, False), (2, False), (0, True)):
        allowed = script.all_allowed(q_len, k_len)
        for item in range(script.sizes.batch_size):
            hidden = min((first + 2 * item) % 3, k_len - 1)
            keys = slice(hidden) if is_left else slice(k_len - hidden, k_len)
            allowed[:, keys, item] = False
        if not allowed.all():
            yield from ((allowed, mask) for mask in script.masks_for(allowed))


def assert_context_is_shared(script: Script) -> None:
    """If fewer contexts than queries are accepted, neighbors share one.

    A beam search has two hypotheses for each source, side by side: contexts may not be
    taken in turns. What accepts them by coincidence, as a `view` does that deals out
    the keys of a context to more queries, does neither.
    """
    usual, axis = script.sizes, script.adapter.layout.index("b")
    script.restart()
    args = script.make_arguments()
    context = args.inputs[1]
    sizes = replace(usual, batch_size=2 * usual.batch_size)
    shape = script.adapter.input_shape(sizes, 0)
    query = script.random_tensor("query", *shape)
    hypotheses = replace(args, inputs=(query, context))
    with script.attempt():
        shared = script.call(hypotheses)
        turns = f"torch.arange({usual.batch_size}).repeat(2){script.to_device()}"
        side_by_side, in_turns = (
            script.assign("context", f"{context}{repeated}")
            for repeated in (
                f".repeat_interleave(2, {axis})",
                f".index_select({axis}, {turns})",
            )
        )
        expected, other = (
            script.call(replace(hypotheses, inputs=(query, each)))
            for each in (side_by_side, in_turns)
        )
        if script.evaluate(f"torch.allclose({shared}, {other}, atol=1e-4)"):
            message = "{place} differs if two queries share a context"
            script.assert_close(expected, shared, message)
        if script.evaluate(f"torch.allclose({shared}, {expected}, atol=1e-4)"):
            assert_mask_of_context_is_shared(script, hypotheses, side_by_side)


def assert_mask_of_context_is_shared(
    script: Script, hypotheses: CallArguments, each: str
) -> None:
    """Queries that share a context share its mask; `each` has a context for each."""
    allowed = hypotheses.allowed.clone()
    for item in range(allowed.shape[2]):
        allowed[:, item + 1 :, item] = False
    for mask in script.masks_for(allowed):
        if mask is None or "q" in mask.axes:
            continue
        with script.attempt(), script.rollback():  # it may want a mask for each query
            encoded = script.encode_mask(allowed, mask)
            shared = script.call(replace(hypotheses, mask=encoded))
            repeated = allowed.repeat_interleave(2, dim=2)
            encoded = script.encode_mask(repeated, mask)
            inputs = (hypotheses.inputs[0], each)
            usual = script.call(replace(hypotheses, inputs=inputs, mask=encoded))
            message = "{place} differs if two queries share a context and a mask"
            script.assert_close(usual, shared, message)


def assert_long_items_equal_alone(script: Script) -> None:
    """Two long items, one of which is padded where possible, give the same alone.

    The scale of the scores, and the frequencies of a rotation, may depend on the length
    if it is longer than in training. A larger image has several windows.
    """
    adapter = script.adapter
    if script.sizes.batch_size != 2:
        return
    if adapter.fixed_length is not None:
        length = 4 * adapter.fixed_length
        if adapter.image and length < 300:
            whole = replace(adapter, fixed_length=length)
            with script.using(whole, q_len=length, k_len=length):
                script.restart()
                with script.attempt():  # it may take no other images
                    assert_items_equal_alone(script, script.all_allowed(), None)
        return
    trained: list[dict[str, str]] = [{}]
    trained += [{name: "8"} for name in names.trained_lengths(adapter.target)]
    for given in trained:
        built = replace(adapter, init_args={**adapter.init_args, **given})
        with script.using(built, q_len=24, k_len=24):
            unmasked, *masks = item_masks(script)
            for allowed, mask in masks[:1] or [unmasked]:
                if masks:
                    allowed[:, 12:, 1] = False
                with script.attempt():  # longer than its tables
                    script.restart()
                    assert_items_equal_alone(script, allowed, mask)


def assert_pixels_equal_alone(script: Script) -> None:
    """Where the tokens are those of one pixel over time, pixels are as batch items.

    A video of two pixels gives the same outputs as each of them alone.
    """
    adapter = script.adapter
    if adapter.extra_args or adapter.fixed_length is not None:
        return  # they may depend on the width
    script.restart()
    left, right = script.make_arguments(), script.make_arguments()
    length = script.sizes.k_len
    width = adapter.layout.index("l") + 2
    parts = [f"{args.inputs[0]}{adapter.to_image(length)}" for args in (left, right)]
    both = script.assign("both", f"torch.cat([{', '.join(parts)}], dim={width})")
    with script.attempt():
        output = f"attention({both}){adapter.output_index}"
        together = script.assign("y", f"{output}.unflatten({width - 2}, (-1, 2))")
        for n, args in enumerate((left, right)):
            alone = script.call(args)
            message = f"{{place}} differs beside another pixel, as pixel {n} of two"
            seen = f"{together}.select({width - 1}, {n})"
            script.assert_close(alone, seen, message)


def assert_items_equal_alone(
    script: Script, allowed: Tensor, mask: MaskArgument | None
) -> None:
    """Each batch item, with its own mask, gives the same output in a batch of one."""
    args = script.make_arguments(allowed, mask)
    together = script.call_for_all(args)
    for item in range(script.sizes.batch_size):
        with script.rollback():
            index = item_index(script, item)
            inputs = tuple(
                script.assign(name, f"{name}{index}") for name in args.inputs
            )
            own = allowed[..., item : item + 1]
            single = CallArguments(inputs, script.encode_mask(own, mask), own)
            alone = script.call_for_all(single)
            queries = script.real_queries(single)
            picked: Any = {} if script.adapter.is_pooled else {"l": queries}
            message = f"query {{l}} of batch item {item} differs if the item is alone"
            script.assert_close(f"{together}{index}", alone, message, **picked)


def assert_items_equal_alone_behind_cache(script: Script) -> None:
    """An item has the same output behind a cache of integers that is its own.

    A scale of all items changes how its numbers are rounded. In other caches, they are
    exact, so that a sequence in pieces is compared with the whole.
    """
    length = script.sizes.k_len
    if script.adapter.cache is None or length < 2 or not is_quantized(script):
        return

    def compare() -> None:
        restart_with_cache(script)
        args = script.make_arguments(script.all_allowed(length, length))
        together, _cache = decode(script, args, [length - 1, 1])
        index = item_index(script, 0)
        inputs = tuple(script.assign(name, f"{name}{index}") for name in args.inputs)
        with script.using(batch_size=1):
            alone, _cache = decode(
                script, replace(args, inputs=inputs), [length - 1, 1]
            )
            message = (
                "{place} differs behind its cache of integers if the item is alone"
            )
            script.assert_close(f"{together[-1]}{index}", alone[-1], message)

    assert_in_float64(script, compare)  # a number may be between two integers


def optional_integers(adapter: Adapter) -> list[str]:
    """Optional arguments, documented as an integer for each token of each item."""
    shapes = documented.all_shapes(adapter.target)
    integers = documented.integers(adapter.target)
    return [
        name
        for name in names.optional_tensors(adapter)
        if name in integers and len(shapes.get(name, ())) == 2
        if documented.BATCH_PATTERN.match(shapes[name][0])
        if name not in (adapter.position_ids, adapter.segment_ids)
    ]


def optional_lengths(adapter: Adapter) -> list[str]:
    """Optional arguments, documented as a length for each item."""
    shapes = documented.all_shapes(adapter.target)
    return [
        name
        for name in filter(
            names.LENGTHS_PATTERN.search, names.optional_tensors(adapter)
        )
        if len(shapes.get(name, ())) == 1
        and documented.BATCH_PATTERN.match(shapes[name][0])
    ]


def assert_views_are_of_item(script: Script) -> None:
    """Items with two views, such as images, are apart, as are their masks."""
    adapter = script.adapter
    if adapter.packing != "{0}[:, None]":
        return
    views = replace(adapter, packing="torch.stack([{0}] * 2, 1)")
    for allowed, mask in item_masks(script):
        with script.using(views), script.attempt():  # each may have a mask of its own
            script.restart()
            assert_items_equal_alone(script, allowed, mask)


def assert_items_have_own(
    script: Script,
    argument: str,
    given: str,
    axis: int = 0,
    /,
    **beside: str,
) -> None:
    """Each batch item gives the same output alone, with its part of an argument.

    These are the positions or segments of its tokens, or a tensor shaped as the input,
    of which `axis` is that of batch items. It has its part of those `beside` it, too.
    """
    arguments = {argument: given, **beside}
    length, batch_size = script.sizes.k_len, script.sizes.batch_size
    all_allowed = script.all_allowed(length, length)
    args = script.make_arguments(all_allowed)
    if script.adapter.is_module:  # which may store tokens at their positions
        script.exec_line("unused = copy.deepcopy(attention)")
    together = script.call(args, **arguments)
    if not script.evaluate(f"{together}.isfinite().all()"):
        return  # its values have a meaning, such as that of sizes
    for item in range(batch_size):
        with script.rollback():
            index = item_index(script, item)
            inputs = tuple(
                script.assign(name, f"{name}{index}") for name in args.inputs
            )
            part = f"[{':, ' * axis}{item}:{item + 1}]"
            own = {name: text + part for name, text in arguments.items()}
            allowed = args.allowed[..., item : item + 1]
            mask = script.encode_mask(all_allowed[..., :1])
            of_item = replace(args, inputs=inputs, allowed=allowed, mask=mask)
            function = "attention"
            if script.adapter.is_module:
                function = "fresh"
                script.exec_line("fresh = copy.deepcopy(unused)")
            alone = script.call(of_item, function, **own)
            message = (
                f"query {{l}} of batch item {item}, with `{argument}` of its own, "
                f"differs if the item is alone"
            )
            script.assert_close(f"{together}{index}", alone, message)


def assert_graphs_are_apart(script: Script, argument: str) -> None:
    """Of two graphs in one list of edges, one has no influence on the other.

    Nor if all its scores are far above those of the other, as with large features.
    """
    skip_unless("b" not in script.adapter.layout, "has one graph for all batch items")
    script.sizes = replace(script.sizes, batch_size=1, q_len=7, k_len=7)
    script.restart()
    args = script.make_arguments(script.all_allowed(7, 7))
    places = f"torch.arange(7){script.to_device()}"
    pairs = f"torch.cartesian_prod({places}, {places}).T"
    edges = script.assign("edges", pairs)
    edges = script.assign("edges", f"{edges}[:, ({edges} < 3).sum(0) != 1]")
    # Not all nodes of the first have as many.
    is_left_out = f"({edges}[0] == 0) & ({edges}[1] == 1)"
    edges = script.assign("edges", f"{edges}[:, ~({is_left_out})]")
    given = script.with_edges(args, argument, edges)
    adapter = script.adapter
    arguments = [*names.optional_tensors(adapter), *adapter.extra_args]
    parts = [*filter(names.PART_PATTERN.fullmatch, arguments)]
    given |= dict.fromkeys(parts, f"({places} >= 3).long()")
    skip_unless(parts or not adapter.is_pooled, "has one output for all graphs")
    first = slice(0, 1 if adapter.is_pooled else 3)
    before = script.call(args, **given)
    others = script.adapter.index(l=slice(3, None))
    large = f"1000 * {args.inputs[0]}{others}"
    for value in ("", large):
        perturbed = script.perturb(args, value, l=slice(3, None))
        after = script.call(perturbed, **given)
        message = "{place} of a graph depends on another one in the list of edges"
        script.assert_close(before, after, message, l=first)
    is_kept = f"({edges} < 3).all(0) | ({edges}[0] == {edges}[1])"
    few = script.assign("edges", f"{edges}[:, {is_kept}]")
    after = script.call(args, **given | script.with_edges(args, argument, few))
    message = "{place} of a graph depends on the edges of another one"
    script.assert_close(before, after, message, l=first)


def assert_joined_equal_alone(script: Script) -> bool:
    """Of two sequences in one, such as the nodes of two graphs, each is as it is alone.

    An argument tells of which one a token is, or where each of them begins. So it is if
    the tokens of one are large, with scores far above those of the other. Returns
    whether there is such an argument.
    """
    adapter, first, length, tested = script.adapter, 3, 7, False
    optional = names.optional_tensors(adapter) if adapter.single_input else []
    of_tokens = [*filter(names.PART_PATTERN.fullmatch, optional)]
    of_tokens += [n for n, text in adapter.extra_args.items() if text == names.ONE_BAG]
    begins = filter(names.BEGINS_PATTERN.fullmatch, optional)
    part, device = f"(torch.arange({length}) >= {first}).long()", script.to_device()
    ways = [(name, part, "torch.zeros({}, dtype=torch.long)") for name in of_tokens]
    bounds = f"torch.tensor([0, {first}, {length}])"
    ways += [(name, bounds, "torch.tensor([0, {}])") for name in begins]
    for (argument, given, of_one), large in itertools.product(ways, (False, True)):
        script.sizes = replace(script.sizes, q_len=length, k_len=length)
        script.restart()
        args = script.make_arguments(script.all_allowed(length, length))
        if large:
            tokens = f"{args.inputs[0]}{adapter.index(l=slice(first))}"
            script.exec_line(f"{tokens} *= {LARGE_FACTOR}")
        with script.attempt():  # it may be something else
            both = script.call(args, **{argument: given + device})
            if not script.evaluate(f"{both}.isfinite().all()"):
                continue
            for number, here in enumerate((slice(first), slice(first, length))):
                index = adapter.index(l=here)
                tokens = script.assign("x", f"{args.inputs[0]}{index}")
                if adapter.is_pooled:  # an output for each sequence
                    index = adapter.index(l=slice(number, number + 1))
                count = len(range(length)[here])
                of_part = {argument: of_one.format(count) + device}
                alone = script.call(replace(args, inputs=(tokens,)), **of_part)
                joined = script.assign("y", f"{both}{index}")
                message = f"{{place}} differs if `{argument}` is of one part alone"
                script.assert_close(alone, joined, message)
                tested = True
    return tested
