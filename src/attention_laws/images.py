r"""# Laws of images

The pixels of an image are a row of tokens for most of the code, and its rows and
columns come back with a `reshape`. If height and width, or pixels and channels, are
exchanged there, all shapes may be right, and those of squares are. So these laws move
pixels, rows and columns, and look where they have influence.

Source: vision transformers with windows
([Swin](https://arxiv.org/abs/2103.14030), section 3.2) and with attention along axes
([Axial Attention](https://arxiv.org/abs/1912.12180), section 2).
"""

import math
from dataclasses import replace

import torch

from attention_laws import documented, structure
from attention_laws.algebra import last_ignores_first
from attention_laws.law import NotApplicable, ScriptError, law, skip_unless
from attention_laws.masking import IMAGES
from attention_laws.script import Script

# Sizes of square images, of which some are made of whole windows and others are not. In
# the first four, attention in windows of up to 8 pixels shows.
SQUARES = (16, 14, 12, 15, 8, 9, 17, 21, 24)


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
    one. The ends of a sequence whose windows are shifted are kept apart, too.
    """
    adapter, found = script.adapter, dict[int, int]()
    if "roll" in structure.identifiers(adapter.target) and not adapter.image:
        assert_ends_are_apart(script)
        return
    is_image = adapter.image.startswith("image") and adapter.single_input
    skip_unless(is_image and not adapter.is_pooled, "takes no images")
    for n, size in enumerate(SQUARES):
        local = [each for each, reach in found.items() if 2 * reach <= each]
        if n == 4 and not local:
            assert_borders_are_apart(script)
        skip_unless(n < 4 or local, "pixels have influence across the image")
        with script.attempt():
            found[size] = script.evaluate(influence_in_square(script, size))
        script.adapter = adapter
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
    script.adapter = adapter
    window = 1 + max(found[each] for each in local)
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


@law(slow=True)
def pixels_in_place(script: Script) -> None:
    r"""A pixel changes the output at its own place more than at others.

    $$\lVert \partial y_{ij} / \partial x_{ij} \rVert >
    \lVert \partial y_{kl} / \partial x_{ij} \rVert$$

    There it is the query, and elsewhere one key of many. If rows and columns are
    exchanged, or a sequence is made an image with its axes in another order, all shapes
    may be right. Beside a residual connection, what is added to the input is compared.
    It is a violation where most pixels change the output at another place more, each at
    a place of its own.
    """
    adapter = script.adapter
    kind = adapter.image.replace("frames", "video")
    frames = 1 + kind.startswith("video")
    is_image = kind and adapter.single_input and not adapter.is_pooled
    skip_unless(bool(is_image), "takes no images")
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
    shapes = [name for name in adapter.extra_args if name.endswith("spatial_shapes")]
    points = [name for name in adapter.extra_args if name.startswith("reference_p")]
    takes_maps = len(adapter.inputs) == 2 and adapter.layout == "bld"
    skip_unless(shapes and points and takes_maps, "takes no map with reference points")
    side = MAP_SIDES[0][0]
    script.sizes = replace(script.sizes, batch_size=1, q_len=2, k_len=4 * side**2)
    script.restart()
    args, outputs = script.make_arguments(), []
    query, tokens = args.inputs
    part = f"{tokens}[:, :{side**2}].unflatten(1, ({side}, {side}))"
    is_list = adapter.extra_args[shapes[0]].startswith("[")
    for rows, columns in MAP_SIDES:
        whole = f"{tokens}[:, :{rows * columns}].unflatten(1, ({rows}, {columns}))"
        whole = script.assign("map", f"{whole}.clone()")
        script.exec_line(f"{whole}[:, :{side}, :{side}] = {part}")
        whole = script.assign(tokens, f"{whole}.flatten(1, 2)")
        place = f"torch.tensor([{side / 2 / columns}, {side / 2 / rows}])"
        place += f"{script.to_dtype_and_device()}.expand(1, 2, 1, 2)"
        sides = f"torch.tensor([[{rows}, {columns}]]){script.to_device()}"
        given = {points[0]: place, shapes[0]: sides}
        if is_list:
            given[shapes[0]] = f"[({rows}, {columns})]"
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
    script.sizes = replace(script.sizes, batch_size=1, q_len=ROW, k_len=ROW)
    script.restart()
    args = script.make_arguments()
    with script.attempt():
        for count in (2, 3, 4, 1):
            shape = [(count, ROW), (ROW, count)][along]
            script.adapter = replace(usual, image_height=shape[0], fixed_length=None)
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
        pairs = (f"torch.allclose({two}, {each}, atol=1e-4)" for each in (three, four))
        if all(map(script.evaluate, pairs)):
            message = f"{{place}} of several equal {what} differs from that of one"
            script.assert_close(two, one, message)
    script.adapter = usual


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
    usual, axis = script.adapter, script.adapter.layout.index("l")
    number = math.prod(shape)
    script.sizes = replace(script.sizes, batch_size=1, q_len=number, k_len=number)
    script.adapter = replace(usual, image_height=shape[0], fixed_length=None)
    holds = False
    with script.attempt():
        script.restart()
        args = script.make_arguments()
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
    script.adapter = usual
    return holds


def assert_one_window_is_whole(script: Script, window: int) -> None:
    """In an image as large as the window, pixels have influence from border to border.

    So it must be if it is in an image that is smaller by one pixel.
    """
    adapter, is_whole = script.adapter, False
    with script.attempt():
        reach = influence_in_square(script, window - 1)
        is_whole = script.evaluate(f"{reach} == {window - 2}")
    script.adapter = adapter
    if is_whole:
        with script.attempt():  # windows overlap, and blocks of them are smaller
            claim = f"{influence_in_square(script, window)} == {window - 1}"
            message = (
                f"an image of {window} x {window} pixels, as large as the window, is "
                f"divided, and a smaller one is not"
            )
            script.assert_true(claim, message)
        script.adapter = adapter


def assert_borders_are_apart(script: Script) -> None:
    """Windows that are shifted by a roll do not reach from border to border.

    The two sides of a window that was wrapped around would otherwise attend to each
    other, with nothing of the image between them.
    """
    if "roll" not in structure.identifiers(script.adapter.target):
        return
    adapter = script.adapter
    for size in (16, 24):
        with script.attempt():
            output, axis = change_square(script, size)
            message = (
                f"the borders of an image of {size} x {size} pixels have influence on "
                f"each other, and pixels between them have none"
            )
            script.assert_true(f"not wraps_around({output}, {axis})", message)
        script.adapter = adapter


def influence_in_square(script: Script, size: int) -> str:
    """How far a pixel of a square image has influence, as source text."""
    return "farthest_influence({}, {})".format(*change_square(script, size))


def change_square(script: Script, size: int) -> tuple[str, int]:
    """The output for a square image with each pixel changed, and the axis of pixels."""
    adapter = script.adapter
    script.sizes = replace(script.sizes, batch_size=1, q_len=size**2, k_len=size**2)
    script.adapter = replace(adapter, image_height=size, fixed_length=None)
    script.restart()
    args = script.make_arguments()
    axis = adapter.layout.index("l")
    many = script.assign("many", f"change_diagonal({args.inputs[0]}, {axis})")
    return script.call(replace(args, inputs=(many,))), axis
