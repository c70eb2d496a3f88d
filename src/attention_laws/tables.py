r"""# Laws of tables of relative positions

A learned bias has a row in a table for each distance of two tokens, for each offset in
a window of an image, or for each bucket of distances. Whichever it is, each row belongs
to one of them, and is used.

Source: [Self-Attention with Relative Position
Representations](https://arxiv.org/abs/1803.02155), section 3; [Swin
Transformer](https://arxiv.org/abs/2103.14030), section 3.2;
[T5](https://arxiv.org/abs/1910.10683), section 2.1.
"""

import math
from dataclasses import replace

from torch import nn

from attention_laws import documented, structure
from attention_laws.adapter import Adapter
from attention_laws.law import (
    LawViolation,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.patches import takes_patches
from attention_laws.positions import (
    FAR,
    LONGEST,
    ratio_tolerance,
    takes_length,
    weights_of_equal_tokens,
)
from attention_laws.recorded import (
    record_equal_tokens,
    record_weights,
)
from attention_laws.script import CallArguments, Script


@law(slow=True)
def relative_table(script: Script) -> None:
    r"""Each distance has its row in a table of relative positions, in their order.

    $$j - i \le j' - i' \;\Rightarrow\; r(j - i) \le r(j' - i')$$

    A learned relative encoding has a row for each distance, or for each up to a limit,
    where the distances are clamped. If the index is off by one, two distances share a
    row at one end, and another row keeps its initial value; or the index is -1, and
    Python takes the last row. The sequence is as long as the table, so that each
    distance occurs. In causal attention, half of the rows are enough. Where distances
    share rows, as the buckets of T5, the last row begins near the largest distance, and
    goes on behind it. In a window whose height is documented to come first, neighbors
    in a row have one score, and those in a column.
    """
    adapter = script.adapter
    found = assert_offsets_of_windows_used(script)
    is_relative = found or adapter.positions in ("relative", "unknown")
    skip_unless(is_relative, "`positions` is not relative")
    if adapter.positions == "none":
        return  # in a window of few tokens, the order was not seen to matter
    skip_unless(adapter.is_module, "is a function, and has no parameters")
    has_shape = any("1, {length} - 1)" in text for text in adapter.extra_args.values())
    skip_unless(not has_shape, "the shape of its images is given")
    is_chunked = "chunk" in adapter.designs.get("window", "").lower()
    skip_unless(not is_chunked, "not all distances occur in its chunks")
    script.restart()
    is_of_pixels = structure.patch_size(script.evaluate("attention")) <= 1
    is_of_pixels |= takes_patches(adapter.target)
    skip_unless(is_of_pixels, "its tokens are patches of several pixels")
    tables = structure.table_sizes(script.evaluate("attention"))
    tables = {name: rows for name, rows in tables.items() if 2 < rows < 2 * FAR}
    skip_unless(tables, "has no table with a name such as `relative_bias`")
    if structure.has_buckets(script.evaluate("attention")):
        assert_buckets_reach(script, tables)
        assert_far_keys_share_a_bucket(script)
        return
    for name, rows in tables.items():
        script.adapter = adapter
        args = restart_with_all_distances(script, rows)
        if args is not None:
            try:
                if not assert_all_rows_used(script, args, name, rows):
                    continue
            except LawViolation:
                if not larger_image_uses_all(script, name, rows):
                    raise
                continue
            # In an image, distances may have two axes.
            if adapter.fixed_length is None and not adapter.has_grid:
                assert_rows_in_order(script, args, name, rows)
    windows = [name for name, value in adapter.init_args.items() if value == "(2, 2)"]
    if windows and adapter.fixed_length == 4:
        assert_other_windows_use_all(script, adapter, windows[0])


def assert_offsets_of_windows_used(script: Script) -> bool:
    """Images and videos of two windows along each axis need all rows of their table.

    Returns whether there is a table with a row for each offset in a window. If the
    strides of its axes are not the widths of those behind, two offsets share a row.
    """
    adapter = script.adapter
    if not adapter.image or adapter.fixed_length is not None or not adapter.is_module:
        return False
    found = False
    script.restart()
    tables = structure.tables_of_windows(script.evaluate("attention"))
    for name, window in tables.items():
        if len(window) != adapter.image_axes:
            continue
        sides = [2 * side for side in window]
        large = replace(
            adapter,
            image=adapter.image.replace("frames", "video"),
            video_frames=math.prod(sides[:-2]),
            image_height=sides[-2],
        )
        n = math.prod(sides)
        with script.using(large, batch_size=1, q_len=n, k_len=n), script.attempt():
            script.restart()
            args = script.make_arguments(script.all_allowed(n, n))
            rows = math.prod(2 * side - 1 for side in window)
            assert_all_rows_used(script, args, name, rows)
            found = True
    return found


def larger_image_uses_all(script: Script, name: str, rows: int) -> bool:
    """Whether a larger image needs all rows of a table.

    A window that is shifted is divided where the image is a single window, and a table
    of two offsets needs an image that is as high and as wide as it.
    """
    adapter = script.adapter
    if not adapter.has_grid:
        return False
    if adapter.fixed_length is None:
        number = rows * rows
        if number > LONGEST:
            return False
        script.adapter = replace(adapter, image_height=rows)
    else:
        height, width = adapter.grid(adapter.fixed_length)
        number = 4 * height * width
        script.adapter = replace(adapter, image_height=2 * height, fixed_length=number)
    script.sizes = replace(script.sizes, q_len=number, k_len=number)
    try:
        script.restart()
        assert_all_rows_used(script, script.make_arguments(), name, rows)
    except (LawViolation, ScriptError):
        return False
    return True


def assert_other_windows_use_all(script: Script, adapter: Adapter, name: str) -> None:
    """In windows that are no squares, each pair of distances has a row of its own, too.

    The distance along the columns counts up to the width of the window, by which the
    other one is multiplied.
    """
    given = {**adapter.init_args, name: "(2, 3)"}
    height = 2 if adapter.image else adapter.image_height
    script.adapter = replace(
        adapter, init_args=given, fixed_length=6, image_height=height
    )
    script.sizes = replace(script.sizes, q_len=6, k_len=6)
    with script.attempt():  # it may take squares only
        script.restart()
        args = script.make_arguments()
        for table, rows in structure.table_sizes(script.evaluate("attention")).items():
            assert_all_rows_used(script, args, table, rows)
        if documented.says_of(adapter.target, name, HEIGHT_FIRST):
            assert_offsets_share_rows(script)


# The order of two sides, in words.
HEIGHT_FIRST = r"\b(height|rows?),? (and )?(the )?(width|columns?)\b"


def assert_offsets_share_rows(script: Script) -> None:
    """In a window of two rows and three columns, equal offsets have equal scores.

    All tokens are equal, so that scores differ by the table only. The tokens are those
    of one row after the other.
    """
    script.restart()
    weights = record_equal_tokens(script, script.make_arguments())
    if not weights:
        return
    scores = script.assign("scores", f"{weights}.log()")
    own = f"{scores}.diagonal(dim1=1, dim2=2)[..., None]"
    scores = script.assign("scores", f"{scores} - {own}")
    for name, one, other in (("row", (0, 1), (1, 2)), ("column", (0, 3), (1, 4))):
        first, second = (f"{scores}[:, {q}, {k}]" for q, k in (one, other))
        message = f"neighbors in a {name} of a window have different scores"
        script.assert_true(f"torch.allclose({first}, {second}, atol=1e-3)", message)


def assert_buckets_reach(script: Script, tables: dict[str, int]) -> None:
    """Up to the largest distance nearly all buckets are used, and far ones differ.

    The bucket of distance 0, counted as positive, is empty. Buckets are logarithmic, so
    that a third of the largest distance is not in the last one.
    """
    far = structure.largest_distance(script.evaluate("attention"))
    skip_unless(far and far < LONGEST, "its largest distance is not known")
    assert far is not None
    length = far + 1
    script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
    skip_unless(takes_length(script, length), "takes no sequences of that length")
    for name, rows in tables.items():
        script.restart()
        args = script.make_arguments(script.all_allowed(length, length))
        output, weights = script.call(args), record_weights(script, args)
        table = script.assign("table", f"attention.get_parameter({name!r})")
        axis = axis_of(script, name, rows)
        by_row = f"[0].movedim({axis}, 0).flatten(1).any(dim=1)"
        grad = f"torch.autograd.grad(loss({output}), {table}, retain_graph=True)"
        used = script.assign("used", f"{grad}{by_row}.sum().item()")
        found, enough = script.evaluate(used), 0.9 * rows - 1
        if found == 1 and script.adapter.extra_args:
            continue  # a table for what is constant, such as boxes of words
        if script.adapter.causal and found <= (rows + 1) // 2:
            enough = 0.45 * rows - 1
        message = f"only {found} of {rows} buckets of `{name}` are used up to {far}"
        script.assert_true(f"{used} >= {enough:.3g}", message)
        if weights:
            ratio = f"{weights}[:, -1, [0, {far - far // 3}]].log().diff(dim=-1)"
            script.exec_line(f"grad = torch.autograd.grad({ratio}.sum(), {table})[0]")
            message = f"distances {far // 3} and {far} share a bucket of `{name}`"
            script.assert_true("grad.abs().max() > 1e-3", message)


def assert_far_keys_share_a_bucket(script: Script) -> None:
    """Beyond the largest distance, all keys of a direction have one bias."""
    far = structure.largest_distance(script.evaluate("attention"))
    assert far is not None
    length = min(3 * far, far + FAR)
    if not takes_length(script, length):
        return
    weights = weights_of_equal_tokens(script, length)
    ends = {"before": f"{weights}[:, -1, :{length - far - 1}]"}
    if not script.adapter.causal:
        ends["behind"] = f"{weights}[:, 0, {far + 1}:]"
    for side, end in ends.items():
        message = f"keys more than {far} tokens {side} a query have several biases"
        claim = f"({end} / {end}[:, :1] - 1).abs().max() <= {ratio_tolerance(script)}"
        script.assert_true(claim, message)


def restart_with_all_distances(script: Script, rows: int) -> CallArguments | None:
    """A call that needs all rows of a table; None if it takes no sequence so long."""
    adapter, fixed = script.adapter, script.adapter.fixed_length
    # A table of all distances has nearly two rows for each token.
    lengths = [fixed] if fixed else [rows, (rows + 1) // 2]
    if fixed and rows_of_blocks(script.evaluate("attention"), rows):
        # Behind the borders of one block, there may be nothing.
        adapter = replace(adapter, fixed_length=None)
        lengths = [fixed * (9 if adapter.image else 3), fixed]
    if adapter.has_grid and not fixed:
        # One of an image may have a row for each pair of distances.
        side = math.isqrt(rows)
        sides = [side if side * side == rows else rows]
        lengths = [n * n for n in (*sides, (sides[0] + 1) // 2) if n * n <= LONGEST]
    for length in lengths:
        height = math.isqrt(length) if adapter.has_grid else 1
        script.adapter = replace(adapter, image_height=height)
        script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
        script.restart()
        args = script.make_arguments(script.all_allowed(length, length))
        with script.attempt():
            with script.rollback():
                script.call(args)
            return args
    return None


def assert_all_rows_used(
    script: Script, args: CallArguments, name: str, rows: int
) -> bool:
    """Each row receives a gradient; in causal attention, half of them are enough.

    Return whether one does: in a window of one token, whose weight is 1, none may.
    """
    script.exec_line(f"loss({script.call(args)}).backward()")
    grad = script.assign("grad", f"attention.get_parameter({name!r}).grad")
    if script.evaluate(f"{grad} is None"):
        return False  # the law of gradients reports it
    by_row = f"{grad}.movedim({axis_of(script, name, rows)}, 0).flatten(1)"
    used = script.assign("used", f"{by_row}.any(dim=1).sum().item()")
    if not script.evaluate(used):
        return False
    expected = [(rows + 1) // 2, rows] if script.adapter.causal else [rows]
    expected += rows_of_blocks(script.evaluate("attention"), rows)
    message = f"only {script.evaluate(used)} of {rows} rows of `{name}` are used"
    script.assert_true(f"{used} in {expected}", message)
    return True


def rows_of_blocks(module: nn.Module, rows: int) -> list[int]:
    r"""How many rows blocks of queries use that are shorter than the windows of keys.

    A table for windows as long as those of the keys has more distances than occur.

    >>> module = nn.Module()
    >>> module.block_size, module.win_size = 8, 14
    >>> rows_of_blocks(module, rows=27)
    [21]
    """
    stated = [
        (name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if type(value) is int
    ]
    window = (rows + 1) // 2
    blocks = {n for name, n in stated if "block" in name and 1 < n < window}
    # A window is a block and a halo on both sides of it.
    halos = {n for name, n in stated if "halo" in name}
    windows = {n + 2 * halo for n in blocks for halo in halos}
    is_stated = rows == 2 * window - 1 and window in {*dict(stated).values(), *windows}
    return sorted(n + window - 1 for n in blocks) if is_stated else []


def axis_of(script: Script, name: str, rows: int) -> int:
    """The axis of a table that has this number of rows."""
    shape = f"attention.get_parameter({name!r}).shape"
    found: int = script.evaluate(f"list({shape}).index({rows})")
    return found


def assert_rows_in_order(
    script: Script, args: CallArguments, name: str, rows: int
) -> None:
    """From key to key, the row in the table only grows, or only falls.

    The ratio of the weights of two neighboring keys depends on their two rows only.
    """
    weights = record_weights(script, args)
    if not weights:
        return
    length, axis = script.sizes.k_len, axis_of(script, name, rows)
    table = script.assign("table", f"attention.get_parameter({name!r})")
    keys = range(length - 1) if length < 50 else (0, 1, length - 3, length - 2)
    grows = falls = True
    for query in [length - 1] if script.adapter.causal else [0, length - 1]:
        last: list[int] = []
        for key in keys:
            log = f"{weights}[:, {query}, {key}:{key + 2}].log()"
            grad = (
                f"torch.autograd.grad({log}.diff().sum(), {table}, retain_graph=True)"
                f"[0].movedim({axis}, 0).flatten(1).norm(dim=1)"
            )
            size = script.evaluate(grad)
            if not size.isfinite().all():
                return
            # Two distances that share a row leave rounding errors.
            found = (size > max(1e-3 * size.max(), 1e-4)).nonzero().flatten().tolist()
            if len(found) > 2:
                return  # a key's weight depends on several rows
            if found and last:
                grows &= found[0] >= last[-1]
                falls &= found[-1] <= last[0]
            last = found or last
    if not (grows or falls):
        message = f"the rows of `{name}` are not in the order of the distances"
        script.fail("False, " + repr(message), message, math.nan, 0.0)
