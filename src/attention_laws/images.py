r"""# Laws of images

The pixels of an image are a row of tokens for most of the code, and its rows and
columns come back with a `reshape`. If height and width, or pixels and channels, are
exchanged there, all shapes may be right, and those of squares are. So these laws move
pixels, rows and columns, and look where they have influence.

Source: vision transformers with windows
([Swin](https://arxiv.org/abs/2103.14030), section 3.2) and with attention along axes
([Axial Attention](https://arxiv.org/abs/1912.12180), section 2).
"""

import inspect
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attention_laws import documented, names, structure
from attention_laws.algebra import last_ignores_first
from attention_laws.law import NotApplicable, ScriptError, law, skip_unless
from attention_laws.masking import IMAGES
from attention_laws.recorded import make_equal_tokens
from attention_laws.recorders import WeightsRecorder
from attention_laws.script import CallArguments, Script

# Sizes of square images, of which some are made of whole windows and others are not. In
# the first four, attention in windows of up to 8 pixels shows.
SQUARES = (16, 14, 12, 15, 8, 9, 17, 21, 24)
RECTANGLES = ((16, 24), (24, 16), (14, 21), (21, 14))


@law(slow=True, assumes="selection dynamic")
def image_windows(script: Script) -> None:
    r"""Windows keep the borders of an image apart, whatever its size is.

    $$\max(|i - k|, |j - l|) > w \;\Rightarrow\; \partial y_{kl} / \partial x_{ij} = 0$$

    An image that is not made of whole windows is padded, and windows that are shifted
    wrap around its borders, where a mask has to hide one side from the other. If the
    padding is added behind the shift, the mask hides other pixels. Each pixel of a
    diagonal is changed in turn: if none has influence across half of a smaller and of a
    larger image, none may have influence from border to border. Where all images are
    wrapped around, a pixel has influence beyond a border, and none between. An image of
    one window is not shifted: if a smaller one is attended to as a whole, so is this
    one. In images that are no squares, no pixel has influence farther than in squares.
    The ends of a sequence whose windows are shifted are kept apart, too.
    """
    adapter, found = script.adapter, dict[int, int]()
    if "roll" in structure.identifiers(adapter.target) and not adapter.image:
        assert_ends_are_apart(script)
        return
    is_image = adapter.image.startswith("image") and adapter.single_input
    skip_unless(is_image and not adapter.is_pooled, "takes no images")
    has_borders = not documented.is_periodic(adapter.target)
    skip_unless(has_borders, "takes images whose borders are documented to meet")
    for n, size in enumerate(SQUARES):
        local = [each for each, reach in found.items() if 2 * reach <= each]
        if n == 4 and not local:
            assert_borders_are_apart(script)
        skip_unless(n < 4 or local, "pixels have influence across the image")
        with script.attempt():
            found[size] = script.evaluate(influence_in_square(script, size))
    local = [each for each, reach in found.items() if 2 * reach <= each]
    for size, reach in found.items():
        smaller = [each for each in local if each < size]
        larger = [each for each in local if each > size]
        if not (smaller and larger and reach == size - 1):
            continue
        near = max(smaller), min(larger)
        usual = max(found[each] for each in near)
        claim = f"{influence_in_square(script, size)} <= {usual}"
        message = (
            f"the borders of an image of {size} x {size} pixels have influence on each "
            f"other, and those of images of {near[0]} and {near[1]} rows have none"
        )
        if reach > usual:
            script.assert_true(claim, message)
    window = 1 + max(found[each] for each in local)
    for shape in RECTANGLES:
        with script.attempt():
            claim = f"{influence_in_image(script, *shape)} < {window}"
            message = (
                f"pixels of an image of {shape[0]} x {shape[1]} have influence "
                f"farther than those of any square image"
            )
            script.assert_true(claim, message)
    if window > 2 and "convolution" not in adapter.designs:
        assert_one_window_is_whole(script, window)


# Lengths of sequences of several windows, of which most are not whole.
ROLLED_LENGTHS = range(8, 18)


def assert_ends_are_apart(script: Script) -> None:
    """The first token of a sequence has no influence on the last one.

    That is so for all lengths between two for which it has none.
    """
    adapter = script.adapter
    is_sequence = adapter.single_input and adapter.fixed_length is None
    skip_unless(is_sequence and not adapter.is_pooled, "takes no images")
    apart: dict[int, bool] = {}
    for length in ROLLED_LENGTHS:
        with script.attempt():  # it may need whole windows
            apart[length] = bool(script.evaluate(ends_are_equal(script, length)))
    within = [n for n, is_apart in apart.items() if is_apart]
    skip_unless(within, "the first token has influence on the last one")
    for length, is_apart in apart.items():
        if not is_apart and within[0] < length < within[-1]:
            message = (
                f"the first of {length} tokens has influence on the last one, and none "
                f"in sequences of {within[0]} and {within[-1]}"
            )
            script.assert_true(ends_are_equal(script, length), message)


def ends_are_equal(script: Script, length: int) -> str:
    """Whether the first of so many tokens has no influence on the last one, as text."""
    script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
    return last_ignores_first(script)


@law(slow=True, assumes="convolution")
def pixels_in_place(script: Script) -> None:
    r"""A pixel changes the output at its own place more than at others.

    $$\lVert \partial y_{ij} / \partial x_{ij} \rVert >
    \lVert \partial y_{kl} / \partial x_{ij} \rVert$$

    There it is the query, and elsewhere one key of many. If rows and columns are
    exchanged, or a sequence is made an image with its axes in another order, all shapes
    may be right. Beside a residual connection, what is added to the input is compared.
    It is a violation where most pixels change the output at another place more, each at
    a place of its own. Attention around the nodes at which the edges of a graph end is
    that around those at which they start, for pairs that are transposed.
    """
    adapter = script.adapter
    kind = adapter.image.replace("frames", "video")
    frames = 1 + kind.startswith("video")
    is_image = kind and adapter.single_input and not adapter.is_pooled
    skip_unless(bool(is_image), "takes no images")
    if kind == "image_channels_last":
        assert_ending_is_transposed(script)
    shapes = [(3, 5), *IMAGES, (5, 5)]  # the last for pairs of tokens
    if adapter.fixed_length is not None:
        frames, shapes = 1, [adapter.grid(adapter.fixed_length)]
    for rows, columns in shapes:
        number = frames * rows * columns
        script.sizes = replace(script.sizes, batch_size=64, q_len=number, k_len=number)
        if adapter.fixed_length is None:
            grid = replace(adapter, image_height=rows, video_frames=frames)
            script.adapter = replace(grid, image=kind)
        script.restart()
        args = script.make_arguments()
        (image,) = args.inputs
        script.exec_line(f"{image}.requires_grad_()")
        with script.attempt():
            output = script.call(args)
            break
    else:
        raise NotApplicable("takes no image of several rows")
    outputs = [output]
    if script.evaluate(f"{output}.shape == {image}.shape"):
        outputs.append(f"{output} - {image}")
    for each in outputs:
        found = f"displaced_tokens({each}, {image}, {adapter.layout.index('l')})"
        if moved := script.evaluate(found):
            shape = (frames, rows, columns)[frames == 1 :]
            places = torch.stack(torch.unravel_index(torch.tensor(moved[0]), shape), 1)
            first, second = map(tuple, places.tolist())
            message = (
                f"of {' x '.join(map(str, shape))} pixels, that at {first} changes the "
                f"output at {second} most: the output is an image with its axes in "
                f"another order"
            )
            script.assert_true(f"not {found}", message)


# Flags of attention to pairs of nodes: around those that an edge starts at, or ends at.
NODES_PATTERN = re.compile(r"(is_)?(starting|ending)(_node)?")


def assert_ending_is_transposed(script: Script) -> None:
    """Attention around ending nodes is that around starting nodes, transposed."""
    adapter, side = script.adapter, 5
    if not isinstance(adapter.target, type) or adapter.fixed_length is not None:
        return
    for name, parameter in inspect.signature(adapter.target).parameters.items():
        if not NODES_PATTERN.fullmatch(name) or type(parameter.default) is not bool:
            continue
        square = replace(adapter, image_height=side)
        with script.using(square, batch_size=2, q_len=side**2, k_len=side**2):
            script.restart()
            args = script.make_arguments()
            other = {**adapter.init_args, name: repr(not parameter.default)}
            script.build_other("other", other)
            back = f".unflatten(1, ({side}, {side})).transpose(1, 2).flatten(1, 2)"
            pairs = script.assign("pairs", args.inputs[0] + back)
            seen = script.call(replace(args, inputs=(pairs,)), function="other")
            message = (
                f"{{place}} of transposed pairs differs with `{name}={other[name]}`"
            )
            script.assert_close(script.call(args), f"{seen}{back}", message)


@law(slow=True, assumes="selection sampling")
def frames_in_place(script: Script) -> None:
    r"""A token of a video attends to the same places of all frames.

    $$m_{i,tp} = m'_{it} \, m''_{ip}$$

    Here $m_{i,tp}$ is 1 if output $i$ depends on the token at place $p$ of frame $t$,
    and 0 if not. A token attends to its own frame, to its own place in all frames, or
    to several places in several frames. If the axes of frames and places are not
    exchanged before frames, or places, join the batch items, all shapes are right, and
    tokens of other places are attended to. This is tested where the documentation says
    that tokens are given frame by frame. The number of places is no multiple of that of
    frames.
    """
    usual = script.adapter
    is_stated = usual.layout == "bld" and documented.is_frame_major(usual.target)
    skip_unless(is_stated, "takes no tokens of videos, frame by frame")
    script.restart()
    frames = structure.frame_count(script.evaluate("attention"))
    skip_unless(frames > 1, "has no attribute for the number of frames")
    for places in (n for n in (3, 5) if n % frames):
        length = frames * places
        script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
        script.adapter = replace(usual, fixed_length=length)
        script.restart()
        args = script.make_arguments()
        script.exec_line(f"{args.inputs[0]}.requires_grad_()")
        with script.attempt():
            output = script.call(args)
            script.assert_true(
                f"places_are_same({output}, {args.inputs[0]}, {frames})",
                f"a token attends to other places in one of {frames} frames, of "
                f"{places} tokens each, than in another",
            )
            return
    raise NotApplicable("takes videos of one size only")


# Sides of images, of which most windows fill one and leave a rest of the other.
WHOLE_SIDES = (8, 14, 12, 10)


# How documentation promises that padding is hidden.
HIDES_PADDING = (
    r"\bpadd(ing|ed)\b[^.]*\b(never (takes?|is|are)|does not take|doesn't take)\b"
    r"|\bpadd(ing|ed)( \w+)? (is|are) (masked|hidden|excluded|ignored)\b"
)


@law(slow=True, assumes="selection dynamic")
def image_padding(script: Script) -> None:
    r"""Padding is hidden along all axes of an image, or along none.

    $$y_p(c, \dots, c) = y(c)$$

    An image that is not made of whole windows is padded, and a mask hides the padding.
    In an image of equal pixels, all outputs are then equal. If a row that is added at
    the bottom leaves them equal, a column that is added on the right has to do so, too,
    both together, and a frame that is added to a video. This is tested where an image
    of whole windows gives equal outputs. Where more scores are computed for each pixel
    than in that one, it was padded. None may count if the documentation says so. If
    keys are means of pixels, that of equal pixels is one of them, in a cell that is not
    full, too.
    """
    adapter = script.adapter
    is_video = adapter.image.startswith("video") and adapter.single_input
    if not is_video:
        skip_unless_pixels_have_outputs(script)
    is_free = adapter.fixed_length is None and not adapter.is_pooled
    skip_unless(is_free, "takes images of one size only, or has one output for them")
    if calls_means(script) and not is_video:
        assert_means_are_of_pixels(script)
    for side in WHOLE_SIDES[: 1 if is_video else None]:
        whole = (side,) * (2 + is_video)
        claims: dict[tuple[int, ...], str] = {}
        with script.attempt():
            equal, usual = equal_pixels(script, whole)
            if not script.evaluate(equal):
                continue
            fewer = [
                (*whole[:axis], side - 1, *whole[axis + 1 :])
                for axis in range(len(whole))
            ]
            for shape in [*fewer, (side - 1,) * len(whole)]:
                claim, count = equal_pixels(script, shape)
                if count > usual * 1.01:
                    claims[shape] = claim if script.evaluate(claim) else ""
        wrong = [shape for shape, claim in claims.items() if not claim]
        right = [shape for shape, claim in claims.items() if claim]
        if wrong and (right or documented.says(adapter.target, HIDES_PADDING)):
            claim, _ = equal_pixels(script, wrong[0])
            others = right[0] if right else whole
            message = (
                f"padding is not hidden: equal pixels of an image of "
                f"{' x '.join(map(str, wrong[0]))} have unequal outputs, and those of "
                f"{' x '.join(map(str, others))} have not"
            )
            script.assert_true(claim, message)


def calls_means(script: Script) -> bool:
    """Whether it averages pixels, and no layer has a kernel of several of them."""
    named = structure.identifiers(script.adapter.target)
    if not any(name.lower().startswith(("avg_pool", "avgpool")) for name in named):
        return False
    script.restart()
    kernels = [
        part.kernel_size
        for part in script.evaluate("attention").modules()
        if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    return all(size == 1 for kernel in kernels for size in kernel)


def assert_means_are_of_pixels(script: Script) -> None:
    """Equal pixels give the same with a row less, which leaves some cells not full."""
    adapter, side = script.adapter, WHOLE_SIDES[0]
    with script.attempt(), one_image(script, (side, side)) as args:
        equal = make_equal_tokens(script, args)
        whole = script.call(equal)
        rows = adapter.index(l=slice(0, side * (side - 1)))
        fewer = script.assign(equal.inputs[0], f"{equal.inputs[0]}{rows}")
        script.adapter = replace(adapter, image_height=side - 1)
        part = script.call(replace(equal, inputs=(fewer,)))
        message = "{place} of equal pixels changes with a row less: a mean has padding"
        script.assert_close(f"{whole}{rows}", part, message)


@contextmanager
def one_image(script: Script, sides: tuple[int, ...]) -> Iterator[CallArguments]:
    """Restart with one image of these sides, or one video; it may be refused.

    The adapter is the usual one again behind the block.
    """
    usual, number = script.adapter, math.prod(sides)
    *frames, rows, _columns = sides
    script.sizes = replace(script.sizes, batch_size=1, q_len=number, k_len=number)
    script.adapter = replace(
        usual,
        image_height=rows,
        video_frames=frames[0] if frames else usual.video_frames,
        fixed_length=None,
    )
    try:
        script.restart()
        yield script.make_arguments()
    finally:
        script.adapter = usual


def equal_pixels(script: Script, shape: tuple[int, ...]) -> tuple[str, float]:
    """Whether all outputs for an image of equal pixels are equal, as source text.

    Beside it is the number of weights that are computed for each pixel.
    """
    with one_image(script, shape) as args:
        equal = make_equal_tokens(script, args)
        with WeightsRecorder() as recorder:
            output = script.call(equal)
    count = sum(weights.numel() for weights, _ in recorder.found)
    first = f"{output}{script.adapter.index(l=slice(0, 1))}"
    claim = f"({output} - {first}).abs().max() <= {script.tolerance(output)}"
    return claim, count / math.prod(shape)


# Sides of images that are rolled, and by how much.
ROLLED_SIDES, STEPS = ((8, 16), (4, 6), (6, 4)), (1, 2, 4, 8)


@law(slow=True, assumes="selection")
def periodic_axis(script: Script) -> None:
    r"""If tokens lie on a circle, rolling them rolls the outputs.

    $$y(\operatorname{roll} x) = \operatorname{roll} y(x)$$

    The longitudes of the globe have no end: the first and the last are neighbors. If
    distances wrap around on one side only, or positions begin anew, the place where the
    array begins has an influence. This applies where the documentation says that an
    axis is periodic; windows may be rolled as a whole.
    """
    adapter = script.adapter
    is_stated = documented.is_periodic(adapter.target) and adapter.single_input
    skip_unless(is_stated and not adapter.is_pooled, "has no axis that is a circle")
    axis, tried = adapter.layout.index("l"), list[tuple[tuple[int, int], Any]]()
    shapes = ROLLED_SIDES if adapter.image.startswith("image") else ((1, 8),)
    if adapter.fixed_length:
        rows, columns = adapter.grid(adapter.fixed_length)
        shapes = (*shapes, (rows, columns))  # it may take others, too
    for shape in shapes:
        moves = [
            (f".roll({step}, {axis + along})", f"{what} of {{}} x {{}} are rolled")
            for along, what in enumerate(("the rows", "the columns"))
            if meets_along(script, shape, along)
            for step in STEPS
            if step < shape[along]
        ]
        tried += [(shape, move) for move in moves]
    skip_unless(tried, "its tokens do not influence each other at these sizes")
    if not any(moves_pixels(script, shape, [move]) for shape, move in tried):
        shape, move = tried[0]
        moves_pixels(script, shape, [move], insist=True)


def meets_along(script: Script, shape: tuple[int, int], along: int) -> bool:
    """Whether the first row has influence on others, or the first column has."""
    axis, meets = script.adapter.layout.index("l"), False
    with script.attempt(), one_image(script, shape) as args:
        before = script.call(args)
        moved = script.assign("moved", f"{args.inputs[0]}.clone()")
        image = f"unflatten({axis}, {shape})"
        script.exec_line(f"{moved}.{image}.select({axis + along}, 0).neg_()")
        after = script.call(replace(args, inputs=(moved,)))
        others = f".{image}.movedim({axis + along}, 0)[1:]"
        meets = script.evaluate(f"(({after} - {before}){others}.abs() > 1e-4).any()")
    return bool(meets)


# The sides of a square map, in which no offset reaches a border from the center, and
# those of maps of which it is a part: a larger square, and others.
MAP_SIDES = ((32, 32), (64, 64), (32, 64), (64, 32))


@law(slow=True)
def sampling_offsets(script: Script) -> None:
    r"""Offsets in pixels reach as far in a wide map as in a square one.

    $$p_x + \frac{o_x}{W}, \quad p_y + \frac{o_y}{H}$$

    Deformable attention reads a feature map at offsets from a reference point, which is
    a fraction of the width and of the height. Offsets are $(x, y)$, and shapes are
    $(H, W)$: divided in this order, offsets are right in squares only. A map becomes a
    part of a larger one, in which the reference points stay at their pixels: then the
    outputs must stay, too. This applies if they do in a larger square.
    """
    adapter = script.adapter
    shapes = [*filter(names.MAP_SHAPES_PATTERN.fullmatch, adapter.extra_args)]
    points = [*filter(names.REFERENCE_PATTERN.fullmatch, adapter.extra_args)]
    takes_maps = len(adapter.inputs) == 2 and adapter.layout == "bld"
    of_list = adapter.packing.startswith("[{0}.mT")
    has_sides = bool(shapes) or of_list
    is_known = has_sides and points and takes_maps
    skip_unless(is_known, "takes no map with reference points")
    side = MAP_SIDES[0][0]
    script.sizes = replace(script.sizes, batch_size=1, q_len=2, k_len=4 * side**2)
    script.restart()
    args, outputs = script.make_arguments(), []
    query, tokens = args.inputs
    point = script.sized_arguments(args, 0, [*args.inputs])[points[0]]
    axes = "1, 2, 1, 2" if script.evaluate(point).dim() == 4 else "1, 2, 2"
    part = f"{tokens}[:, :{side**2}].unflatten(1, ({side}, {side}))"
    is_list = bool(shapes) and adapter.extra_args[shapes[0]].startswith("[")
    for rows, columns in MAP_SIDES:
        whole = f"{tokens}[:, :{rows * columns}].unflatten(1, ({rows}, {columns}))"
        whole = script.assign("map", f"{whole}.clone()")
        script.exec_line(f"{whole}[:, :{side}, :{side}] = {part}")
        whole = script.assign(tokens, f"{whole}.flatten(1, 2)")
        place = f"torch.tensor([{side / 2 / columns}, {side / 2 / rows}])"
        place += f"{script.to_dtype_and_device()}.expand({axes})"
        sides = f"torch.tensor([[{rows}, {columns}]]){script.to_device()}"
        given = {points[0]: place}
        if shapes:
            given[shapes[0]] = f"[({rows}, {columns})]" if is_list else sides
        packing = adapter.packing
        if of_list:
            packing = packing.replace("(1, -1)", f"({rows}, {columns})")
        with script.using(replace(adapter, packing=packing)):
            outputs.append(script.call(replace(args, inputs=(query, whole)), **given))
    square, larger, *others = outputs
    is_of_pixels = f"torch.allclose({square}, {larger}, atol=1e-4)"
    skip_unless(script.evaluate(is_of_pixels), "its offsets are not counted in pixels")
    for (rows, columns), output in zip(MAP_SIDES[2:], others, strict=True):
        message = f"{{place}} reads other pixels of a map of {rows} x {columns}"
        script.assert_close(square, output, message)


@law(slow=True, assumes="selection dynamic")
def rectangular_images(script: Script) -> None:
    r"""Images that are no squares are shifted as squares are.

    $$y(\operatorname{shift}_s x) = \operatorname{shift}_s y(x)$$

    Where pixels have no positions, an image that is shifted around its borders gives
    shifted outputs, if it is by whole windows, or by the stride with which keys are
    merged. The smallest shift for which this holds in squares has to be one in other
    images: if height and width are exchanged, squares do not show it.
    """
    skip_unless_pixels_have_outputs(script)
    code = structure.identifiers(script.adapter.target)
    is_fixed = any(name.lower().startswith("adaptive") for name in code)
    skip_unless(not is_fixed, "merges its keys to as many in each image")
    axis, square = script.adapter.layout.index("l"), (8, 8)
    steps = (n for n in (1, 2, 4) if moves_pixels(script, square, shifts(axis, n)))
    step = next(steps, 0)
    skip_unless(step > 0, "no shift of a square image shifts its outputs")
    for shape in ((8, 16), (16, 8)):
        moves_pixels(script, shape, shifts(axis, step), insist=True)


# Rows and columns of patches: two squares, and images that are none.
PATCHES = ((2, 2), (3, 3), (2, 3), (3, 2))


@law(slow=True)
def places_of_patches(script: Script) -> None:
    r"""Patches of an image that is no square have the positions of those of a square.

    $$a_{(r, c), (r', c')} / a_{(r, c), (r, c)} \text{ depends on } r, c, r', c' \text{
    alone}$$

    A vision transformer numbers its patches row by row, and finds the row and the
    column of each with the number of columns. With the number of rows, or with rows and
    columns exchanged, all squares look right. In images of one color, the first weights
    depend on positions alone: where those of patches at the same places are in the same
    proportion in two squares, they have to be so in other images.
    """
    adapter = script.adapter
    skip_unless(adapter.is_module, "is a function, and takes no images")
    script.restart()
    size = structure.patch_size(script.evaluate("attention"))
    skip_unless(size > 1, "takes no images that it cuts into patches")
    needs_more = adapter.extra_args or adapter.required_mask or adapter.input_key
    skip_unless(adapter.single_input and not needs_more, "takes more than an image")
    channels = channels_of(script)
    given = "".join(f", {n}={value!r}" for n, value in adapter.call_args.items())
    found = {}
    for rows, columns in PATCHES:
        sides = f"1, {channels}, {rows * size}, {columns * size}"
        text = f"torch.ones({sides}){script.to_dtype_and_device()}"
        image = script.assign("image", text)
        call = f"lambda: attention({image}{given})"
        with script.attempt():  # it may take squares only, or those of one size
            text = f"weights_of_patches({call}, {rows}, {columns})"
            found[rows, columns] = script.assign("weights", text)
    known = {s: n for s, n in found.items() if script.evaluate(f"{n} is not None")}
    skip_unless({*PATCHES[:2]} <= {*known}, "no weights of its patches were found")
    square = known[3, 3]
    for (rows, columns), weights in known.items():
        part = f"[:, :{rows}, :{columns}, :{rows}, :{columns}]"
        claim = f"({weights} - {square}{part}).abs().max() <= 1e-3"
        if rows == columns:
            is_same = script.evaluate(claim)
            skip_unless(is_same, "positions depend on the size of the image")
            continue
        message = f"patches of {rows} x {columns} have other positions than in squares"
        script.assert_true(claim, message)


def channels_of(script: Script) -> int:
    """How many channels the images of a call have."""
    name = script.make_arguments().inputs[0]
    adapter, length = script.adapter, script.batch_and_length(name)[1]
    image = script.evaluate(name + (adapter.to_image(length) if adapter.image else ""))
    skip_unless(image.dim() == 4, "takes no images")
    channels: int = image.shape[1]
    return channels


# Pixels of one row, and the sides of images that are no squares.
ROW, SIDES = 6, ((4, 6), (6, 4))


@law(slow=True, assumes="positions decay compression convolution window selection")
def rows_and_columns(script: Script) -> None:
    r"""Rows and columns are in no order if the pixels of a single row are in none.

    $$y(\pi x) = \pi y(x)$$

    Without positions and windows, pixels that change their places have outputs that
    change places alike. It is tested in images of one row and of one column first,
    where no axes can be exchanged. In other images, whole rows and whole columns are
    moved: so they can be where each pixel attends to its row or its column only, too.
    And if the number of equal rows does not matter, a single one is no exception. So
    it is with the frames of a video.
    """
    if script.adapter.image.startswith("video") and script.adapter.single_input:
        assert_frames_are_in_no_order(script)
        return
    skip_unless_pixels_have_outputs(script)
    is_free = script.adapter.fixed_length is None
    skip_unless(is_free, "takes images of one size only")
    axis = script.adapter.layout.index("l")
    in_no_order = all(
        moves_pixels(script, shape, other_orders(axis, shape))
        for shape in ((1, ROW), (ROW, 1))
    )
    skip_unless(in_no_order, "the pixels of a row or of a column are in an order")
    for shape in SIDES:
        moves_pixels(script, shape, other_orders(axis, shape), insist=True)
    for along, what in enumerate(("rows", "columns")):
        assert_one_is_as_many(script, along, what)


# Frames, rows and columns.
VIDEOS = ((5, 1, 1), (5, 2, 3))


def assert_frames_are_in_no_order(script: Script) -> None:
    """If frames of one pixel are in no order, those of more pixels are in none."""
    adapter = script.adapter
    is_free = adapter.fixed_length is None and not adapter.is_pooled
    skip_unless(is_free, "takes videos of one size only, or has one output for a video")
    axis, message = adapter.layout.index("l"), "{place} differs if frames change places"
    for frames, rows, columns in VIDEOS:
        number = frames * rows * columns
        script.sizes = replace(script.sizes, batch_size=1, q_len=number, k_len=number)
        script.adapter = replace(adapter, image_height=rows, video_frames=frames)
        script.restart()
        args = script.make_arguments()
        order = f"[{', '.join([':'] * axis)}, [2, 0, 1, 3, 4]]"
        moved = f".unflatten({axis}, {(frames, rows * columns)}){order}"
        moved += f".flatten({axis}, {axis + 1})"
        try:
            output = script.call(args)
            video = script.assign("moved", args.inputs[0] + moved)
            after = script.call(replace(args, inputs=(video,)))
        except ScriptError as refusal:
            raise NotApplicable(f"takes no such video: {refusal}") from refusal
        expected = script.assign("expected", output + moved)
        if number > frames:
            script.assert_close(expected, after, message)
        elif not script.evaluate(f"torch.allclose({expected}, {after}, atol=1e-4)"):
            raise NotApplicable("its frames are in an order")


def assert_one_is_as_many(script: Script, along: int, what: str) -> None:
    """If two, three and four equal rows give the same, one of them gives it, too."""
    usual, axis, outputs = script.adapter, script.adapter.layout.index("l"), []
    with script.using(batch_size=1, q_len=ROW, k_len=ROW):
        script.restart()
        args = script.make_arguments()
        with script.attempt():
            for count in (2, 3, 4, 1):
                shape = [(count, ROW), (ROW, count)][along]
                script.adapter = replace(
                    usual, image_height=shape[0], fixed_length=None
                )
                row = [(1, ROW), (ROW, 1)][along]
                line = f"{args.inputs[0]}.unflatten({axis}, {row})"
                repeated = f"{line}.repeat_interleave({count}, {axis + along})"
                pixels = script.assign("x", f"{repeated}.flatten({axis}, {axis + 1})")
                allowed = script.all_allowed(count * ROW, count * ROW)
                given = replace(args, inputs=(pixels,), allowed=allowed)
                image = f"{script.call(given)}.unflatten({axis}, {shape})"
                outputs.append(script.assign("y", f"{image}.select({axis + along}, 0)"))
            two, three, four, one = outputs
            script.adapter = replace(usual, image_height=0, fixed_length=None)
            pairs = (
                f"torch.allclose({two}, {each}, atol=1e-4)" for each in (three, four)
            )
            if all(map(script.evaluate, pairs)):
                message = f"{{place}} of several equal {what} differs from that of one"
                script.assert_close(two, one, message)


def skip_unless_pixels_have_outputs(script: Script) -> None:
    """Raise `NotApplicable` if it takes no image, or has one output for all pixels."""
    adapter = script.adapter
    is_image = adapter.image.startswith("image") or adapter.gets_sides
    skip_unless(bool(is_image) and adapter.single_input, "takes no images")
    skip_unless(not adapter.is_pooled, "has one output for all pixels")


def shifts(axis: int, step: int) -> list[tuple[str, str]]:
    """A shift of rows and one of columns, as `moves_pixels` takes them."""
    return [
        (
            f".roll({step}, {along})",
            f"an image of {{}} x {{}} pixels is shifted by {step} of its {what}, and "
            f"in squares nothing does",
        )
        for along, what in ((axis, "rows"), (axis + 1, "columns"))
    ]


def other_orders(axis: int, shape: tuple[int, int]) -> list[tuple[str, str]]:
    """Another order of rows and one of columns, as `moves_pixels` takes them."""
    moves = []
    for along, (size, what) in enumerate(zip(shape, ("rows", "columns"), strict=True)):
        if size > 1:
            order = [2, 0, 1, *range(3, size)]
            index = ", ".join([":"] * (axis + along) + [str(order)])
            text = f"the {what} of an image of {{}} x {{}} pixels are reordered to "
            moves.append((f"[{index}]", f"{text}{order}"))
    return moves


def moves_pixels(
    script: Script,
    shape: tuple[int, int],
    moves: list[tuple[str, str]],
    insist: bool = False,
) -> bool:
    """Whether moved pixels have outputs that are moved alike; with `insist`, they must.

    Each move is source text for an image with rows and columns, and what it does, for
    the message. An image of this size may be refused.
    """
    axis, holds = script.adapter.layout.index("l"), False
    with script.attempt(), one_image(script, shape) as args:
        output = script.call(args)
        for move, what in moves:
            moved = f".unflatten({axis}, {shape}){move}.flatten({axis}, {axis + 1})"
            pixels = script.assign("moved", args.inputs[0] + moved)
            after = script.call(replace(args, inputs=(pixels,)))
            expected = script.assign("expected", output + moved)
            if insist:
                message = f"{{place}} differs if {what.format(*shape)}"
                script.assert_close(expected, after, message)
            elif not script.evaluate(f"torch.allclose({expected}, {after}, atol=1e-4)"):
                break
        else:
            holds = True
    return holds


def assert_one_window_is_whole(script: Script, window: int) -> None:
    """In an image as large as the window, pixels have influence from border to border.

    So it must be if it is in an image that is smaller by one pixel.
    """
    is_whole = False
    with script.attempt():
        reach = influence_in_square(script, window - 1)
        is_whole = script.evaluate(f"{reach} == {window - 2}")
    if is_whole:
        with script.attempt():  # windows overlap, and blocks of them are smaller
            claim = f"{influence_in_square(script, window)} == {window - 1}"
            message = (
                f"an image of {window} x {window} pixels, as large as the window, is "
                f"divided, and a smaller one is not"
            )
            script.assert_true(claim, message)


def assert_borders_are_apart(script: Script) -> None:
    """Windows that are shifted by a roll do not reach from border to border.

    The two sides of a window that was wrapped around would otherwise attend to each
    other, with nothing of the image between them.
    """
    if "roll" not in structure.identifiers(script.adapter.target):
        return
    for size in (16, 24):
        with script.attempt():
            output, axis = change_image(script, size, size)
            message = (
                f"the borders of an image of {size} x {size} pixels have influence on "
                f"each other, and pixels between them have none"
            )
            script.assert_true(f"not wraps_around({output}, {axis})", message)


def influence_in_square(script: Script, size: int) -> str:
    """How far a pixel of a square image has influence, as source text."""
    return influence_in_image(script, size, size)


def influence_in_image(script: Script, rows: int, columns: int) -> str:
    """How far a pixel of an image has influence, as source text."""
    output, axis = change_image(script, rows, columns)
    height = f", {rows}" * (rows != columns)
    return f"farthest_influence({output}, {axis}{height})"


def change_image(script: Script, rows: int, columns: int) -> tuple[str, int]:
    """The output for an image with pixels of a diagonal changed, and the axis of all.

    There is a copy of the image for each of them.
    """
    axis, height = script.adapter.layout.index("l"), f", {rows}" * (rows != columns)
    with one_image(script, (rows, columns)) as args:
        changed = f"change_diagonal({args.inputs[0]}, {axis}{height})"
        many = script.assign("many", changed)
        return script.call(replace(args, inputs=(many,))), axis
