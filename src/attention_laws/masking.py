r"""# Laws of masking

Masks are the most frequent source of attention bugs. A mask that is inverted, dropped
in evaluation, or shifted by one still gives outputs of the right shape and a loss that
falls; a model that can see the next token even learns faster. So most of these laws
*change* tokens that the mask hides, and test whether any output changes.

Source: the cases are those of published bugs; the [bug
museum](../../compare/museum.md) shows them.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attention_laws import documented, names, structure
from attention_laws.adapter import MaskArgument, without_future
from attention_laws.algebra import (
    edge_argument,
    value_features_of,
)
from attention_laws.law import (
    Excused,
    LawViolation,
    NotApplicable,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.recorded import make_equal_tokens, record_weights
from attention_laws.script import CallArguments, Script


def causal_calls(script: Script, modes: list[str]) -> Iterator[CallArguments]:
    """Arguments of a causal call, in each mode, for each argument that makes it causal.

    The script is restarted before each.
    """
    skip_unless(script.sizes.k_len > 1, "needs two tokens")
    has_one_each = not script.adapter.is_pooled  # such as none for a prefix
    skip_unless(has_one_each, "has not one output for each token")
    length = script.sizes.k_len
    all_allowed = script.all_allowed(length, length)
    causal = without_future(all_allowed)
    allowed = all_allowed if script.adapter.causal else causal
    masks = script.masks_for(allowed)
    skip_unless(masks, "is not causal, and has no mask that could make it causal")
    for mode in modes:
        for mask in masks:
            script.restart(mode)
            yield script.make_arguments(allowed, mask)


@law
def causality(script: Script) -> None:
    r"""Future tokens cannot influence the past.

    $$y_i(x_1, \dots, x_n) = y_i(x_1, \dots, x_i)$$

    A language model that sees the token it is to predict learns to copy it, and reports
    an excellent loss. All tokens from some position on are replaced, in training (with
    dropout set to 0) and in evaluation; the outputs before that position must not
    change.
    """
    for args in causal_calls(script, script.modes()):
        before = script.call(args)
        for n in range(1, script.sizes.k_len):
            with script.rollback():
                after = script.call(script.perturb(args, l=slice(n, None)))
                message = f"{{place}} depends on key {n} or later"
                script.assert_close(before, after, message, l=slice(0, n))


@law
def causal_gradient(script: Script) -> None:
    r"""No gradient flows from past outputs to future tokens.

    $$\partial y_i / \partial x_j = 0 \quad \text{for } j \gt i$$

    This is causality of the backward pass, which custom kernels implement separately: a
    token must not be trained to help predict tokens before it.
    """
    for args in causal_calls(script, script.modes()):
        inputs = [args.inputs[role] for role in script.adapter.key_roles]
        for name in inputs:
            script.exec_line(f"{name}.requires_grad_()")
        output = script.call(args)
        for n in range(1, script.sizes.k_len):
            past = script.adapter.index(l=slice(0, n))
            with script.rollback():
                for name in inputs:
                    grad = script.gradient(f"{output}{past}", name)
                    message = (
                        f"key {{l}} receives a gradient from query {n - 1} or earlier"
                    )
                    zero = f"torch.zeros_like({grad})"
                    script.assert_close(zero, grad, message, l=slice(n, None))


def padding_masks(script: Script) -> Iterator[tuple[Tensor, list[int]]]:
    """Masks that hide keys of the first batch item, and which keys they hide.

    Hidden are the last key, all but the first, and the first alone. Lengths can express
    only the first two, other masks all three. Tokens that follow a padded prompt have
    padding in their past, through which a state must pass as it is.
    """
    k_len = script.sizes.k_len
    q_len = k_len if script.adapter.single_input else script.sizes.q_len
    ranges = [range(k_len - 1, k_len), range(1, k_len), range(1)]
    if script.adapter.causal and k_len > 2:
        ranges.append(range(1, k_len - 1))
    for hidden in ranges:
        allowed = script.all_allowed(q_len, k_len)
        allowed[:, list(hidden), 0] = False
        yield allowed, list(hidden)


def padded_calls(
    script: Script,
) -> Iterator[tuple[CallArguments, list[int], list[int]]]:
    """Arguments of a call with padding, the padded keys, and the queries to compare.

    The script is restarted before each. In self-attention with one input, the padded
    tokens are queries, too; their outputs are discarded, and not compared.
    """
    skip_unless(script.sizes.k_len > 1, "needs two keys")
    applicable = False
    of_first = structure.pools_by_first_token(script.adapter.target)
    for allowed, hidden in padding_masks(script):
        queries = list(range(len(allowed)))
        if script.adapter.is_pooled:
            if of_first and 0 in hidden:
                continue  # it is the query
            queries = [0]
        elif script.adapter.queries_are_keys:
            queries = [query for query in queries if query not in hidden]
        for mask in script.masks_for(allowed):
            for mode in script.modes():
                applicable = True
                script.restart(mode)
                args = script.make_arguments(allowed, mask)
                # What a query gives that may attend to no key is a convention.
                seen = args.allowed[..., 0].any(dim=1)
                yield args, hidden, [query for query in queries if seen[query]]
    skip_unless(applicable, "has no mask that could hide keys of one batch item only")


def assert_padding_ignored(script: Script, values: tuple[str, ...]) -> None:
    """Replace padded keys by each of the values; no real query may change."""
    for args, hidden, queries in padded_calls(script):
        before = script.call(args)
        for value in values:
            with script.rollback():
                keys = slice(hidden[0], hidden[-1] + 1)
                after = script.call(script.perturb(args, value, l=keys, b=slice(0, 1)))
                content = value.removeprefix("torch.")
                message = f"{{place}} depends on padded keys {hidden} of batch item 0"
                if content in ("nan", "inf"):
                    message += f", which hold {content}"
                script.assert_close(before, after, message, l=queries)


@law(assumes="convolution")
def padding(script: Script) -> None:
    r"""Padded keys cannot influence any output.

    $$a_{ij} = 0 \;\Rightarrow\; \partial y_i / \partial k_j = \partial y_i / \partial
    v_j = 0$$

    The sequences of a batch are padded to one length. If queries attend to padding, a
    sequence has another representation beside a longer one than alone. The hidden keys
    and values of one batch item are replaced, once by others of usual size and once by
    much larger ones, and no output may change. Nor may it if their scores are set to
    minus infinity: tokens that are only set to zero keep a part of the weights. Where
    the documentation says that padding may be on the left, tokens have their positions
    without it. In images, single pixels of several rows are hidden. Where marks in a
    text tell which images a token sees, those in front of the first one see none, and
    if it is documented, those behind the second one do not see the first. Where a mask
    has a 2 for tokens with global attention, these do not see padding either.
    """
    assert_images_follow_their_marks(script)
    has_pixels = assert_hidden_pixels_are_unseen(script)
    try:
        assert_padding_ignored(script, ("", "100.0"))
    except NotApplicable:
        if not has_pixels:
            raise
    if documented.marks_global_by_two(script.adapter.target):
        assert_global_tokens_skip_padding(script)
    adapter, k_len = script.adapter, script.sizes.k_len
    if adapter.single_input and documented.pads_left(adapter.target):
        longer = script.all_allowed(k_len + 2, k_len + 2)
        longer[:, :2] = False
        for mask in script.masks_for(longer):
            assert_padding_is_unseen(script, longer, mask, slice(2, None))
    if not {"selection", "window", "latents"} & {*script.adapter.designs}:
        assert_padding_has_no_weight(script)


def assert_global_tokens_skip_padding(script: Script) -> None:
    """Where all tokens but the padding are global, padded keys change none of them."""
    for args, hidden, queries in padded_calls(script):
        assert args.mask is not None
        name, encoded = args.mask
        marks = script.assign(name, f"2 * {encoded}.long()")
        with script.attempt():  # it may take no integers, or be of another kind
            args = replace(args, mask=(name, marks))
            before = script.call(args)
            keys = slice(hidden[0], hidden[-1] + 1)
            after = script.call(script.perturb(args, l=keys, b=slice(0, 1)))
            message = f"{{place}} is global, and depends on padded keys {hidden}"
            script.assert_close(before, after, message, l=queries, b=slice(0, 1))


def assert_images_follow_their_marks(script: Script) -> None:
    """No image has an influence on the tokens in front of the first mark of one."""
    adapter, q_len = script.adapter, script.sizes.q_len
    parameters = names.parameters_by_name(adapter.target)
    marks = [*filter(names.MARKS_PATTERN.fullmatch, parameters)]
    if len(adapter.inputs) != 2 or not marks:
        return
    if adapter.packing == "{0}[:, None]" and adapter.layout == "bld":
        assert_second_image_replaces_first(script, marks[0])
    script.restart()
    args = script.make_arguments()
    last = f"(torch.arange({q_len}) == {q_len - 1}){script.to_device()}"
    items = f"{last}.expand({script.sizes.batch_size}, -1)"
    given = {marks[0]: script.assign("marks", items)}
    with script.attempt():  # the marks may be of another kind
        before = script.call(args, **given)
        after = script.call(script.perturb(args, l=slice(None)), **given)
        message = f"{{place}} depends on an image, whose mark in `{marks[0]}` is later"
        script.assert_close(before, after, message, l=slice(0, q_len - 1))


def assert_second_image_replaces_first(script: Script, name: str) -> None:
    """Of two images, tokens see none before its mark, and if documented, the last only.

    The input, which has an axis of one image beside that of its pixels, is made two.
    """
    adapter = script.adapter
    two = replace(adapter, packing="{0}.unflatten(1, (2, -1))")
    with script.using(two, q_len=6, k_len=6):
        script.restart()
        with script.attempt():  # its second axis may be another one
            args = script.make_arguments()
            items = f".expand({script.sizes.batch_size}, -1){script.to_device()}"
            text = f"torch.tensor([{[False, True, False, False, True, False]}]){items}"
            given = {name: script.assign("marks", text)}
            before = script.call(args, **given)
            after = script.call(script.perturb(args, l=slice(3, None)), **given)
            message = f"{{place}} depends on an image, whose mark in `{name}` is later"
            script.assert_close(before, after, message, l=slice(0, 4))
            if documented.sees_last_image(adapter.target):
                after = script.call(script.perturb(args, l=slice(0, 3)), **given)
                message = "{place} depends on an image before the most recent one"
                script.assert_close(before, after, message, l=slice(5, None))


# Rows and columns of images, and the pixels that are hidden in them: single ones, those
# of a row, and those of a column.
HIDDEN_PIXELS = [
    ((3, 5), [4, 10, 11]),
    ((5, 3), [2, 6, 9]),
    ((3, 5), [5, 6, 7, 8, 9]),
    ((3, 5), [3, 8, 13]),
    ((3, 5), [10, 11, 12, 13, 14]),
    ((3, 5), [4, 9, 14]),
]


def assert_hidden_pixels_are_unseen(script: Script) -> bool:
    """A mask of pixels hides those that it marks, in images of several rows, too.

    Nor does it hide any of another batch item. Return whether a mask was tested.
    """
    adapter, is_tested = script.adapter, False
    is_image = adapter.image.startswith("image") and adapter.single_input
    if not is_image or adapter.fixed_length is not None:
        return False
    for (rows, columns), hidden in HIDDEN_PIXELS:
        number = rows * columns
        image = replace(adapter, image_height=rows)
        with script.using(image, batch_size=2, q_len=number, k_len=number):
            allowed = script.all_allowed()
            allowed[:, hidden, 0] = False
            visible = [n for n in range(number) if n not in hidden]
            for mask in script.masks_for(allowed):
                script.restart()
                args = script.make_arguments(allowed, mask)
                with script.attempt():  # it may take no such image
                    before = script.call(args)
                    after = script.call(script.perturb(args, l=hidden, b=slice(0, 1)))
                    message = (
                        f"{{place}} depends on hidden pixels {hidden} of an image of "
                        f"{rows} x {columns} pixels"
                    )
                    queries = [0] if adapter.is_pooled else visible
                    script.assert_close(before, after, message, l=queries)
                    all_visible = script.encode_mask(torch.ones_like(allowed), mask)
                    other = script.call(replace(args, mask=all_visible))
                    message = "{place} depends on the mask of another batch item"
                    script.assert_close(other, before, message, b=slice(1, None))
                    is_tested = True
    return is_tested


# The number of keys, which is no other size, so that a softmax over them is known.
MASKED_KEYS = 7


def assert_padding_has_no_weight(script: Script) -> None:
    """Scores of minus infinity for padded keys, in each softmax, change no output.

    A single query may have a path of its own.
    """
    adapter = script.adapter
    if adapter.fixed_length is not None:
        return
    is_square = adapter.single_input or adapter.causal
    counts = (MASKED_KEYS,) if is_square else (5, 1)
    ends = [0, 1], [MASKED_KEYS - 2, MASKED_KEYS - 1]
    for q_len, hidden in itertools.product(counts, ends):
        with script.using(q_len=q_len, k_len=MASKED_KEYS):
            queries = [0] if adapter.is_pooled else [*range(q_len)]
            if adapter.queries_are_keys:
                queries = [query for query in queries if query not in hidden]
            for allowed, mask in script.padding_cases(slice(hidden[0], hidden[-1] + 1)):
                script.restart()
                args = script.make_arguments(allowed, mask)
                seeing = args.allowed[:, :, 0].any(dim=1)
                compared = [n for n in queries if seeing[n] or adapter.is_pooled]
                with script.attempt():  # there may be a limit of the length
                    before = script.call(args)
                    call = f"lambda: {script.call_source(args)}"
                    text = f"without_keys({call}, {hidden}, {MASKED_KEYS})"
                    after = script.assign_output(text, args)
                    message = (
                        f"padded keys {hidden} have a part of the weights: {{place}} "
                        f"changes if their scores are minus infinity"
                    )
                    first = slice(0, 1)
                    script.assert_close(before, after, message, l=compared, b=first)


@law(strict=True)
def nonfinite_padding(script: Script) -> None:
    r"""Padded keys cannot influence any output, even if they hold NaN or infinity.

    $$0 \cdot \mathrm{NaN} = \mathrm{NaN}$$

    Padding is often uninitialized memory, or the output of a layer that divided by
    zero. A weight of zero does not remove NaN: its product with the value is NaN. An
    attention that ignores padding entirely has to clear these values.
    """
    assert_padding_ignored(script, ("torch.nan", "torch.inf"))


@law
def neutral_mask(script: Script) -> None:
    r"""A mask that hides nothing changes nothing.

    $$m_{ij} = 1 \;\Rightarrow\; y(x, m) = y(x)$$

    Without a mask, many implementations take a path of their own. If only one of the
    two paths scales the scores, or clears a table, a model that was trained with
    padding is evaluated as another model without. Nor may a mask join packed documents,
    which segment ids, or position ids that start again, keep separate.
    """
    adapter = script.adapter
    skip_unless(adapter.required_mask is None, "requires a mask in every call")
    applicable = [
        mask
        for mask in adapter.masks
        # A mask for queries and keys may replace the causal mask that is built in.
        if mask.kind != "causal" and not (adapter.causal and "q" in mask.axes)
    ]
    if adapter.causal and not adapter.single_input:
        assert_mask_moves_no_query(script)
    skip_unless(applicable, "has no mask that could hide nothing")
    # A mask of one key can lose an axis, or gain one.
    lengths = [script.sizes.k_len] + [1] * (adapter.fixed_length is None)
    for mask, k_len in itertools.product(applicable, lengths):
        script.restart()
        allowed = script.all_allowed(None if adapter.cross_attention else k_len, k_len)
        args = script.make_arguments(allowed)
        without = script.call(args)
        masked = script.call(replace(args, mask=script.encode_mask(allowed, mask)))
        message = f"{{place}} changes with a `{mask.name}` that hides nothing"
        script.assert_close(without, masked, message)
    for mask in applicable if script.sizes.k_len > 2 else ():
        assert_mask_joins_no_documents(script, mask)


def assert_mask_joins_no_documents(script: Script, mask: MaskArgument) -> None:
    """With two documents in each sequence, a mask that hides nothing changes nothing.

    Segments, or positions that start again, tell where a document begins.
    """
    length = script.sizes.k_len
    tokens, half = f"torch.arange({length})", (length + 1) // 2
    copies = f".expand({script.sizes.batch_size}, -1)"
    positions, segments = (
        f"({tokens} % {half}){copies}",
        f"({tokens} // {half}){copies}",
    )
    for argument, numbers in assigned_ids(script, positions, segments):
        allowed = script.all_allowed(length, length)
        args, given = script.make_arguments(allowed), {argument: numbers}
        message = (
            f"{{place}} changes with a `{mask.name}` that hides nothing, if "
            f"`{argument}` tells two documents apart"
        )
        with script.attempt():  # it may refuse to take both
            without = script.call(args, **given)
            encoded = script.encode_mask(allowed, mask)
            masked = script.call(replace(args, mask=encoded), **given)
            script.assert_close(without, masked, message)


def assigned_ids(
    script: Script, positions: str, segments: str
) -> Iterator[tuple[str, str]]:
    """The arguments for ids of positions and of segments, with these numbers assigned.

    The numbers are source text, [batch, length]. The script is restarted before each.
    """
    turn = ".T" * script.adapter.ids_are_turned
    ids = {
        script.adapter.position_ids: positions,
        script.adapter.segment_ids: segments,
    }
    for argument, text in ids.items():
        if argument:
            script.restart()
            numbers = script.assign(argument, f"({text}){turn}{script.to_device()}")
            yield argument, numbers


def assert_mask_moves_no_query(script: Script) -> None:
    """Fewer queries than keys are at the same positions with a mask and without.

    A mask that replaces the causal one changes the output for equal lengths, too.
    """
    k_len = script.sizes.k_len
    for mask in script.adapter.masks:
        for q_len in (k_len, 1 + k_len // 2):
            with script.using(q_len=q_len):
                script.restart()
                args = script.make_arguments()
                try:
                    without = script.call(args)
                    encoded = script.encode_mask(script.all_allowed(), mask)
                    masked = script.call(replace(args, mask=encoded))
                except ScriptError:
                    break  # there may have to be as many queries as keys
                if q_len == k_len:
                    if not script.evaluate(f"torch.allclose({without}, {masked})"):
                        break
                    continue
                message = f"{{place}} changes with a `{mask.name}` that hides nothing"
                script.assert_close(without, masked, message)


@law(slow=True)
def integer_mask(script: Script) -> None:
    r"""A mask of ones and zeros hides what one of True and False hides, or is refused.

    $$y(x, m) = y\big(x, [m = \text{True}]\big)$$

    Tokenizers return masks of integers. The operator `~` inverts a bool mask, and makes
    1 and 0 of integers -2 and -1, both of which are true: all keys are then hidden.
    This applies unless the mask is documented to be bool.
    """
    padded = script.all_allowed(
        script.sizes.k_len if script.adapter.single_input else None
    )
    padded[:, script.sizes.k_len // 2 + 1 :, 0] = False
    masks = [
        mask
        for mask in script.masks_for(padded)
        if mask and mask.kind in ("attend", "ignore") and "q" not in mask.axes
    ]
    adapter = script.adapter
    left_out = {m.name for m in adapter.masks if m.kind.startswith("additive")}
    left_out |= {m.name for m in masks if documented.is_bool(adapter.target, m.name)}
    masks = [mask for mask in masks if mask.name not in left_out]
    skip_unless(masks and not padded.all(), "takes no bool mask of keys")
    accepted = False
    for mask in masks:
        script.restart()
        args = script.make_arguments(padded, mask)
        usual = script.call(args)
        assert args.mask is not None
        integers = replace(args, mask=(mask.name, f"{args.mask[1]}.long()"))
        with script.attempt():
            seen = script.call(integers)
            accepted = True
            message = f"{{place}} changes if `{mask.name}` holds 1 and 0"
            queries = script.real_queries(args)
            script.assert_close(usual, seen, message, l=queries)
    skip_unless(accepted, "refuses a mask of integers")


@law
def combined_masks(script: Script) -> None:
    r"""A causal mask and one for padding hold at the same time.

    $$m_{ij} = m^{\text{causal}}_{ij} \, m^{\text{padding}}_{j}$$

    A decoder gets both masks at once. An implementation that uses one of them *instead*
    of the other leaks either padding or the future.
    """
    adapter, length = script.adapter, script.sizes.k_len
    skip_unless(length > 1, "needs two tokens")
    causal = without_future(script.all_allowed(length, length))
    padded = script.all_allowed(length, length)
    padded[:, length - 1 :, 0] = False
    firsts = [None] if adapter.causal else script.masks_for(causal)
    pairs = [
        (first, second)
        for first in firsts
        for second in script.masks_for(padded)
        if second is not None
        and "q" not in second.axes
        and (first is None or first.name != second.name)
    ]
    skip_unless(pairs, "takes no causal mask together with one for padding")
    refused: ScriptError | None = None
    passed = False
    for first, second in pairs:
        try:
            assert_both_hold(script, causal, first, padded, second)
            passed = True
        except ScriptError as failure:
            # Of the kinds of an argument, one may go with the other argument only.
            refused = failure
    if refused is not None and not passed:
        raise refused


def assert_both_hold(
    script: Script,
    causal: Tensor,
    first: MaskArgument | None,
    padded: Tensor,
    second: MaskArgument,
) -> None:
    """Neither padding nor future keys have influence if both masks are given."""
    script.restart()
    if first is None:  # causal without a mask
        args, more = script.make_arguments(padded, second), {}
    else:
        encoded = script.encode_mask(padded, second)
        assert encoded is not None
        args, more = script.make_arguments(causal, first), dict([encoded])
    before = script.call(args, **more)
    last = script.sizes.k_len - 1
    with script.rollback():
        after = script.call(
            script.perturb(args, l=slice(last, None), b=slice(0, 1)), **more
        )
        message = f"{{place}} depends on padding, with `{second.name}` and causal"
        script.assert_close(before, after, message, l=list(range(last)))
    after = script.call(script.perturb(args, l=slice(1, None)), **more)
    message = f"{{place}} depends on future keys, with `{second.name}` and causal"
    script.assert_close(before, after, message, l=slice(0, 1))


@law
def fully_masked_rows(script: Script) -> None:
    r"""A fully masked row has a finite output and finite gradients.

    $$\textstyle\sum_j m_{ij} = 0 \;\Rightarrow\; y_i,\ \partial L / \partial x \text{
    finite}$$

    For a query that may attend to no key, the softmax divides 0 by 0. The NaN spreads
    through the backward pass into every weight of the model, even if the loss excludes
    that row. Here the first batch item is fully masked, and the loss excludes it. Many
    implementations, PyTorch's among them, leave such rows to the caller: a row of NaN
    alone is reported as a skip unless `only` names this law. What is documented to be
    zero, and not a mean of hidden keys, depends on none of them.
    """
    q_len = script.sizes.k_len if script.adapter.single_input else None
    allowed = script.all_allowed(q_len)
    allowed[..., 0] = False
    masks = script.masks_for(allowed)
    skip_unless(masks, "has no mask that could hide all keys of one batch item")
    is_possible = script.insist or not documented.needs_keys(script.adapter.target)
    skip_unless(is_possible, "is documented to need a key for each query; see `only`")
    # PyTorch's packed sequences have no length of 0 either.
    is_promised = documented.clears_empty_rows(script.adapter.target)
    is_meant = script.insist or is_promised
    masks = [m for m in masks if is_meant or (m and not m.counts_keys)]
    skip_unless(masks, "a sequence without tokens has a length of 0; see `only`")
    # The caller chooses the number that an additive mask hides with, and can choose a
    # finite one.
    stated, masks = masks, [finite_mask(mask) for mask in masks]
    left_to_caller = False
    for mode in script.modes():
        for mask in masks:
            script.restart(mode)
            args = script.make_arguments(allowed, mask)
            for name in args.inputs:
                script.exec_line(f"{name}.requires_grad_()")
            output = script.call(args)
            # A loss excludes padding; with one item only, there is nothing else.
            other_items = script.adapter.index(b=slice(1, None))
            are_finite = "b" not in script.adapter.layout or script.evaluate(
                f"{output}{other_items}.isfinite().all()"
            )
            if are_finite and not is_meant:
                if script.evaluate(f"{output}.isnan().any()"):
                    left_to_caller = True
                    continue
            message = "the output of a fully masked row is NaN or infinite"
            script.assert_finite(output, message)
            if not script.evaluate(f"{output}.requires_grad"):
                continue
            if script.sizes.batch_size == 1:
                other_items = ""
            script.exec_line(f"{output}{other_items}.sum().backward()")
            for name in args.inputs:
                message = f"the gradient of `{name}` is NaN or infinite"
                script.assert_finite(f"{name}.grad", message)
            if script.adapter.is_module:
                script.exec_line("grads = [p.grad for p in attention.parameters()]")
                message = "gradients of parameters are NaN or infinite"
                script.assert_true(
                    "all(g is None or g.isfinite().all() for g in grads)", message
                )
    reason = "a fully masked row gives NaN, as in PyTorch; to insist, use `only`"
    skip_unless(not left_to_caller, reason)
    if is_promised:
        for mask in stated:
            script.restart()
            assert_hidden_keys_are_unseen(script, script.make_arguments(allowed, mask))
            assert_single_hidden_key_is_unseen(script, mask)
    assert_finite_in_half(script, allowed, masks)


def assert_single_hidden_key_is_unseen(
    script: Script, mask: MaskArgument | None
) -> None:
    """A path of its own for a single key uses the mask, too."""
    q_len = 1 if script.adapter.single_input else script.sizes.q_len
    with script.using(q_len=q_len, k_len=1):
        allowed = script.all_allowed(q_len)
        allowed[..., 0] = False
        script.restart()
        with script.attempt():  # it may take one length only
            assert_hidden_keys_are_unseen(script, script.make_arguments(allowed, mask))


def assert_finite_in_half(
    script: Script, allowed: Tensor, masks: list[MaskArgument | None]
) -> None:
    """Nor is the output NaN in float16, where small epsilons are zero.

    An additive mask of its least number may overflow.
    """
    with script.using(dtype=torch.float16):
        for mask in masks:
            if mask is None or mask.kind.startswith("additive"):
                continue
            script.restart()
            try:
                output = script.call(script.make_arguments(allowed, mask))
            except ScriptError:
                continue  # the laws of half precision report it
            message = "the output of a fully masked row is NaN or infinite in float16"
            try:
                script.assert_finite(output, message)
            except LawViolation:
                reason = (
                    "a fully masked row gives NaN in float16; to insist, use `only`"
                )
                skip_unless(script.insist, reason)
                raise


def assert_hidden_keys_are_unseen(script: Script, args: CallArguments) -> None:
    """In the first batch item, of which all keys are hidden, none has an influence.

    A token of self-attention is a query, too: it changes its own output. Where tokens
    are pooled, there is one for all.
    """
    adapter = script.adapter
    is_query = adapter.single_input and not adapter.is_pooled
    if is_query and len(args.allowed) == 1:
        return
    token, others = slice(0, 1), slice(1, None)
    here, there = (token, others) if is_query else (slice(None),) * 2
    before = script.call(args)
    after = script.call(script.perturb(args, l=here, b=slice(0, 1)))
    message = "{place}, which attends to no key, depends on keys that are hidden"
    script.assert_close(before, after, message, l=there, b=slice(0, 1))


def finite_mask(mask: MaskArgument | None) -> MaskArgument | None:
    """The mask with the least finite number in place of minus infinity."""
    is_additive = mask is not None and mask.kind == "additive"
    return replace(mask, kind="additive_min") if mask and is_additive else mask


@law(slow=True, assumes="softcap sink features talking convolution scale")
def added_mask(script: Script) -> None:
    r"""A mask of finite numbers is added to the scores, as it is.

    $$\ln \frac{a_{ij}}{a_{ij'}} = s_{ij} + m_{ij} - s_{ij'} - m_{ij'}$$

    An additive mask may hold a bias, such as that of relative positions. Added before
    the scores are divided by $\sqrt{d_k}$, it is divided, too. Zero and minus infinity
    do not show this.
    """
    masks = [
        mask
        for mask in script.adapter.masks
        if mask.kind.startswith("additive") and {*"qk"} <= {*mask.axes}
    ]
    skip_unless(masks, "takes no additive mask of queries and keys")
    q_len = script.sizes.k_len if script.adapter.single_input else script.sizes.q_len
    script.sizes = replace(script.sizes, batch_size=1, q_len=q_len)
    for mask in masks:
        script.restart()
        args = script.make_arguments()
        zeros = script.encode_mask(script.all_allowed(), mask)
        assert zeros is not None
        name = zeros[1]
        bias = script.assign(
            name, f"{name} + seeded_randn(9, *{name}.shape).to({name})"
        )
        logs = []
        for each in (name, bias):
            weights = record_weights(script, replace(args, mask=(mask.name, each)))
            skip_unless(
                weights, "its weights are neither returned nor those of a softmax"
            )
            logs.append(script.assign("logs", f"{weights}.log()"))
        change = script.assign("change", f"({logs[1]} - {logs[0]}).diff()")
        shape = f"-1, {q_len}, {script.sizes.k_len}"
        added = script.assign(
            "added", f"{bias}.reshape({shape}).diff().expand_as({change})"
        )
        script.exec_line(f"seen = {change}.isfinite()")
        factor = script.evaluate(
            f"(({change} * {added})[seen].sum() / {added}[seen].square().sum()).item()"
        )
        # Not added, but compared with a number: only zero and minus infinity count.
        is_added = f"({change} - {factor} * {added})[seen].abs().max() < 0.01"
        is_added = abs(factor) > 1e-6 and script.evaluate(is_added)
        skip_unless(is_added, "does not add its mask to the scores")
        message = f"the numbers in `{mask.name}` are multiplied by {factor:.3g}"
        script.assert_true(f"({change} - {added})[seen].abs().max() < 0.01", message)


# More tokens than most choose, or than one block has.
MANY_CHOICES = 20


@law(assumes="group_norm convolution positions ends sampling")
def longer_padding(script: Script) -> None:
    r"""More padding at the end changes no output.

    $$y_i(x_1, \dots, x_n) = y_i(x_1, \dots, x_n, \text{padding}, \dots)$$

    The same sequence gets more or less padding from batch to batch. Two hidden tokens
    are appended. Means over positions, normalization over positions and token counts
    include them, even if the mask of the attention is right.
    """
    adapter, k_len = script.adapter, script.sizes.k_len
    is_self = pads_queries(script)
    q_len = k_len if is_self else script.sizes.q_len
    longer = script.all_allowed(q_len + 2 * is_self, k_len + 2)
    longer[:, k_len:] &= adapter.causal
    masks = script.masks_for(longer)
    skip_unless(masks, "has no mask that could hide the padding")
    is_stated = documented.counts_from_the_end(adapter.target)
    for mask in masks:
        try:
            assert_padding_is_unseen(script, longer, mask, slice(0, q_len))
        except LawViolation:
            if is_stated or belongs_in_front(script, mask, q_len):
                raise Excused("its positions are counted from the last token") from None
            raise
    # How many are chosen may grow with the logarithm of the length, padding included.
    is_free = "log" not in structure.identifiers(adapter.target) and not is_stated
    if script.sizes.batch_size == 1 and is_free:
        script.sizes = replace(script.sizes, q_len=MANY_CHOICES, k_len=MANY_CHOICES)
        longer = script.all_allowed(MANY_CHOICES + 2 * is_self, MANY_CHOICES + 2)
        longer[:, MANY_CHOICES:] &= adapter.causal
        with script.attempt():  # it may take no longer sequences
            assert_padding_is_unseen(script, longer, masks[0], slice(0, MANY_CHOICES))


def belongs_in_front(script: Script, mask: MaskArgument | None, q_len: int) -> bool:
    """Whether padding in front of the tokens has no influence."""
    if script.adapter.causal or mask is None or mask.counts_keys:
        return False
    longer = script.all_allowed(
        q_len + 2 * pads_queries(script), script.sizes.k_len + 2
    )
    longer[:, :2] = False
    real = slice(2 if pads_queries(script) else None, None)
    try:
        assert_padding_is_unseen(script, longer, mask, real)
    except (LawViolation, ScriptError):
        return False
    return True


def pads_queries(script: Script) -> bool:
    """Whether queries get padding where keys do: they are the same, or as many.

    Those of causal attention may be counted from the last key. Their padding is hidden
    from the others by itself.
    """
    adapter = script.adapter
    return adapter.single_input or adapter.causal or not adapter.cross_attention


def assert_padding_is_unseen(
    script: Script, longer: Tensor, mask: MaskArgument | None, real: slice
) -> None:
    """With two hidden tokens beside them, the `real` ones have the same outputs."""
    adapter = script.adapter
    is_self = pads_queries(script)
    is_left = real.stop is None
    q_len, k_len = len(longer) - 2 * is_self, script.sizes.k_len
    script.restart()
    args = script.make_arguments(script.all_allowed(q_len, k_len))
    before = script.call(args)
    inputs = list(args.inputs)
    for role in range(len(inputs)) if is_self else adapter.key_roles:
        sizes = replace(script.sizes, q_len=2, k_len=2)
        shape = adapter.input_shape(sizes, role)
        padding = script.random_tensor("padding", *shape)
        parts = (padding, inputs[role]) if is_left else (inputs[role], padding)
        inputs[role] = script.concatenate(*parts)
    encoded = script.encode_mask(longer, mask)
    after = script.call(CallArguments(tuple(inputs), encoded, longer))
    if not adapter.is_pooled:
        after = script.assign("y", f"{after}{adapter.index(l=real)}")
    shapes = [script.evaluate(f"{y}.shape") for y in (before, after)]
    skip_unless(shapes[0] == shapes[1], "its output has an axis for the keys")
    where = " in front" * is_left
    script.assert_close(before, after, f"{{place}} depends on the padding{where}")


# Images of which one at least is made of whole windows, as rows and columns.
IMAGES = ((6, 10), (8, 12), (14, 21))


@law(
    slow=True,
    assumes="selection zeros unnormalized convolution linear features latents "
    "compression dynamic",
)
def own_key_attended(script: Script) -> None:
    r"""Each token attends to itself, or none does.

    $$\partial y_i / \partial v_i = 0 \iff \partial y_j / \partial v_j = 0$$

    Windows, blocks and neighborhoods have edges, where an index that is off by one
    leaves a token out. Windows that are put back in another order give a token the
    output of another one. Nothing leaks, and all shapes are right. The gradients of
    queries and keys are stopped, where these are known, so that values remain. In a
    graph, a node attends to itself once, also if its edges have a self-loop, where the
    documentation says so.
    """
    adapter = script.adapter
    skip_unless(adapter.is_module and adapter.single_input, "has no values of its own")
    skip_unless(not adapter.is_pooled, "has one output for all tokens")
    output, token = call_with_values_only(script)
    # The first of causal tokens may attend to itself because it has no past.
    first = script.adapter.index(b=slice(-1, None))
    axis = script.adapter.layout.index("l")
    own = script.assign("own", f"own_gradients({output}{first}, {token}, {axis})[1:]")
    found = script.evaluate(own)
    skip_unless(len(found) > 1, "needs three tokens")
    number = 1 + found.int().argmin().item()
    message = f"token {number} does not attend to itself, and others do"
    script.assert_true(f"{own}.all() or not {own}.any()", message)
    assert_loops_count_once(script)


def assert_loops_count_once(script: Script) -> None:
    """A given edge of a node to itself changes nothing, if this is documented."""
    edges, target = edge_argument(script.adapter), script.adapter.target
    if not edges or not documented.counts_loops_once(target):
        return
    script.restart()
    args = script.make_arguments()
    all_edges = script.sized_arguments(args, 0, [*args.inputs])[edges]
    given = script.assign(edges, all_edges)
    others = script.assign(edges, f"{given}[:, {given}[0] != {given}[1]]")
    one, two = (
        script.call(args, **script.with_edges(args, edges, each))
        for each in (others, given)
    )
    message = "{place} changes if the edges have a self-loop of each token"
    script.assert_close(one, two, message)


def call_with_values_only(script: Script) -> tuple[str, str]:
    """An output that has gradients of values only, and the input.

    An output for one token, or for equal ones, has no gradient of its query and keys.
    """
    adapter, usual = script.adapter, script.sizes
    length = adapter.fixed_length or 20
    # An image of windows may be accepted in other sizes than the one that was found.
    shapes = (*(IMAGES if adapter.image else ()), (1, length))
    kinds: dict[str, Tensor] = {}
    few = adapter.fixed_length or 1
    script.sizes = replace(usual, q_len=few, k_len=few)
    script.restart()
    width = usual.heads * usual.d_k
    layers = structure.layers_by_role(script.evaluate("attention"), width)
    roles = {"fused", "query", "key", "fused_key_value"} & {*layers}
    with script.attempt(), script.rollback():
        args = make_equal_tokens(script, script.make_arguments())
        for role in roles:
            name = layers[role]
            kinds[name] = value_features_of(script, args, name)
    for rows, columns in shapes:
        script.sizes = replace(usual, q_len=rows * columns, k_len=rows * columns)
        script.adapter = adapter
        if rows > 1:
            script.adapter = replace(adapter, image_height=rows, fixed_length=None)
        script.restart()
        args = script.make_arguments()
        script.exec_line(f"{args.inputs[0]}.requires_grad_()")
        for layer, features in kinds.items():
            values = features.nonzero().flatten().tolist()
            script.exec_line(
                f"keep_gradients(attention.get_submodule({layer!r}), {values})"
            )
        with script.attempt():
            return script.call(args), args.inputs[0]
    raise NotApplicable("takes no image of several windows")
