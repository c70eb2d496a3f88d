r"""# Inferring the masks

What kind of mask an argument is shows in its effect: a key that is hidden has no
influence on the output. Each argument whose name may be that of a mask is tried in all
encodings, with every order of axes: True where a query may attend, or where it may not,
0 and minus infinity, lengths, or a flag.

Source: the [names](names.md) of mask arguments, and the
[conventions](../masks/conventions.md) of public libraries.
"""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from attention_laws import documented, names, structure
from attention_laws.adapter import (
    AXES,
    MASK_KINDS,
    MaskArgument,
)
from attention_laws.calling import (
    ARGUMENT_EXAMPLE,
    CallProbe,
    encodings_of,
    influence,
    mask_candidates,
    output_of,
    polarity,
    unnamed_masks,
)

# The sizes of these axes, for a mask of a call of `Script.sized_arguments`.
MASK_SIZES = {
    "b": "{batch_size}",
    "h": "{heads}",
    "n": "{batch_size} * {heads}",
    "q": "{length}",
    "k": "{k_len}",
    "1": "1",
}


def infer_masks(probe: CallProbe) -> None:
    """Which arguments hide keys, and how they encode it."""
    given = dict(probe.options.mask)
    fill_required_mask(probe)
    found: dict[str, list[MaskArgument]] = {}
    # How much influence hidden keys have with each candidate that does not hide them.
    leaking: dict[str, list[tuple[float, MaskArgument]]] = {}
    unused = math.inf if given else 0.99  # the influence if the mask hides nothing
    call = probe.unmasked_call("eval") if probe.adapter.image and not given else None
    if call is not None and structure.mixes_pixels(call[0].evaluate("attention")):
        unused = 0.0  # hidden pixels have an influence without the attention
    unused_names: dict[str, bool] = {}
    in_evaluation: list[MaskArgument] = []  # masks that hide no key in training
    for mask in mask_candidates(probe):
        masks = found.setdefault(mask.name, [])
        if mask.name not in unused_names:
            unused_names[mask.name] = not given and is_unused(probe, mask.name)
            if not given and hides_queries(probe, mask):
                unused_names[mask.name] = True
        if unused_names[mask.name]:
            continue
        if ":" in given.get(mask.name, "") or given.get(mask.name) == "causal":
            masks.append(accepted_encoding(probe, mask))
        elif mask.kind == "lengths" or polarity(mask) not in map(polarity, masks):
            leaks = [mask_leakage(probe, mask, mode) for mode in ("eval", "train")]
            leak = least_leak(mask, leaks)
            is_mask = leaks[0] is not None and leaks[0] < 1e-3
            # A path for training may take other axes than the fused kernel.
            is_mask &= leaks[1] is not None or not probe.unmasked_call("train")
            is_mask = is_mask and (not masks or takes_one_query(probe, mask))
            if is_mask and is_neutral(probe, mask) and agrees(probe, masks[:1], mask):
                masks.append(without_queries(probe, mask))
                if leaks[1] is not None and leaks[1] > 0.1:
                    in_evaluation.append(masks[-1])
            elif leak < unused:
                leaking.setdefault(mask.name, []).append((leak, mask))
    for name, masks in found.items():
        add_other_masks(probe, name, masks, leaking.get(name, []), unused_names[name])
        masks[:] = as_documented(probe, masks_of_sides(probe, name, masks))
        masks[:] = without_bools_of_kernel(probe, masks, in_evaluation)
        for mask in masks:
            record_mask(probe, mask)
        required = probe.adapter.required_mask
        if masks and required is not None and required.name == name:
            probe.update(required_mask=masks[0])  # not only accepted, but understood
        if not masks and not given:
            probe.record(
                f"`{name}`",
                f"hides no key; if it should: --mask {name}=...",
                "inferred",
            )
    for name in unnamed_masks(probe):
        unnamed = mask_of_any_name(probe, name)
        if unnamed is not None:
            found[name] = [unnamed]
            record_mask(probe, unnamed)
    probe.update(masks=tuple(mask for masks in found.values() for mask in masks))
    if not found:
        probe.record("mask", "none", "given" if given else "inferred")


def add_other_masks(
    probe: CallProbe,
    name: str,
    masks: list[MaskArgument],
    leaking: list[tuple[float, MaskArgument]],
    is_unused: bool,
) -> None:
    """Add masks that hide keys not in all calls, not in these axes, or with a leak."""
    given = probe.options.mask
    # Without the context, its mask leaks, or is not used at all.
    if not (masks or given) and (leaking or is_unused):
        infer_context_of_mask(probe, name)
    masks += leaking_masks(probe, masks, leaking)
    masks += masks_of_other_axes(probe, name, masks)
    if not (masks or given):
        masks += mask_beside_weights(probe, name)
    if not (masks or given):
        masks += mask_of_pooled(probe, name)
    if not masks and not is_unused:
        masks += mask_of_all_items(probe, name) or mask_by_its_name(probe, name)


# What is added to the scores, in words and numbers.
ADDED_PATTERN = (
    r"\b(added|additive|bias|[Ff]loat\w*|inf|infinity|finfo|large|lowest|negative)\b"
)
# Masks of something else than tokens, by their names.
OTHERS_PATTERN = re.compile("frame|image|media|patch|text|token_type")
OPPOSITES = {
    "attend": "ignore",
    "ignore": "attend",
    "attend_int": "ignore_int",
    "ignore_int": "attend_int",
}


def as_documented(probe: CallProbe, masks: list[MaskArgument]) -> list[MaskArgument]:
    """The masks, which hide keys where the documentation says so.

    If others are hidden, the laws show it. Where it speaks of ones and zeros, these are
    not added to the scores.
    """
    if probe.options.mask:
        return masks
    target, found = probe.adapter.target, []
    are_added = all(map(polarity, masks))
    added = [
        mask
        for mask in filter(polarity, masks)
        if documented.says_of(target, mask.name, r"\b(?i:add(ed|itive))\b")
    ]
    if added and not are_added:
        return added  # its numbers are documented, whatever else is accepted
    for mask in masks:
        hides = documented.hides_where_true(target, mask.name)
        is_known = hides is not None or documented.is_bool(target, mask.name)
        if is_known and polarity(mask) and not are_added:
            continue  # numbers may be refused by the code that returns weights
        kind = mask.kind
        if kind == "additive" and documented.says_of(target, mask.name, r"\bfinite\b"):
            kind = "additive_min"
        if are_added and not documented.says_of(target, mask.name, ADDED_PATTERN):
            kind = "attend_int"
        if hides is not None and kind.startswith("ignore") != hides:
            kind = OPPOSITES.get(kind, kind)
        stated = replace(mask, kind=kind)
        if hides is not None or kind == "additive_min":
            if stated != mask and probe.try_call(mask=stated):
                mask = stated
        found.append(mask)
    return found


def without_bools_of_kernel(
    probe: CallProbe, masks: list[MaskArgument], in_evaluation: list[MaskArgument]
) -> list[MaskArgument]:
    """The masks without bools that hide keys in evaluation only, if numbers always do.

    The fused kernel takes both kinds, where code that adds a mask to the scores takes
    numbers. What is documented to be bool stays.
    """
    target = probe.adapter.target
    if not any(mask not in in_evaluation for mask in filter(polarity, masks)):
        return masks
    return [
        mask
        for mask in masks
        if mask not in in_evaluation
        or polarity(mask)
        or probe.options.mask
        or documented.is_bool(target, mask.name)
        or documented.hides_where_true(target, mask.name) is not None
    ]


def masks_of_sides(
    probe: CallProbe, name: str, found: list[MaskArgument]
) -> list[MaskArgument]:
    """The masks of an argument, of rows or of columns if it is of these.

    In an image of one row, a mask of its pixels may be one of the columns. The hidden
    row, or column, has no influence on others; it is hidden in all batch items, which
    may get the masks of others by mistake.
    """
    is_free = probe.adapter.fixed_length is None and not probe.options.mask
    if not (is_free and probe.adapter.image.startswith("image")) or len(found) > 1:
        return found
    row, column = [5, 6, 7, 8, 9], [3, 8, 13]
    size: dict[str, Any] = {"k_len": 15, "image_height": 3}
    unmasked = probe.try_call(**size)
    # A number is accepted whatever it counts.
    kind = found[0].kind if found and found[0].counts_keys else "lengths"
    is_number = [mask.kind for mask in found] == [kind]
    is_taken = found and not is_number and probe.try_call(mask=found[0], **size)
    if unmasked is None or is_taken:
        return found
    kinds = [mask.kind for mask in found] or ["attend", "ignore", "attend_int"]
    sides = ("br", row), ("bc", column)
    ways = [] if is_number else [(k, *side) for k in kinds for side in sides]
    ways += [(kind, "br", [*range(10, 15)]), (kind, "bc", [4, 9, 14])]
    for kind, axes, keys in ways:
        mask = MaskArgument(name, kind, axes)
        hide = (slice(None), keys, slice(None))
        call = probe.try_call(mask=mask, hide=hide, **size)
        observed = {"l": slice(0, 1)}
        if call is None or not influence(*unmasked, {"l": keys}, observed):
            continue
        if influence(*call, {"l": keys}, observed) == 0:
            return [mask]
    return found


def least_leak(mask: MaskArgument, leaks: list[float | None]) -> float:
    """The least influence of hidden keys in any mode; infinite where none is known.

    A share of the length, where a number is meant, hides all keys but the first.
    """
    known = [leak for leak in leaks if leak is not None]
    return min(known, default=math.inf) if mask.kind != "relative_lengths" else math.inf


def infer_place_of_padding(probe: CallProbe) -> None:
    """The masks of keys hide the last ones only, if this is documented."""
    if not documented.pads_right(probe.adapter.target):
        return
    masks = [
        replace(mask, at_end="k" in mask.axes and "q" not in mask.axes)
        for mask in probe.adapter.masks
    ]
    required = probe.adapter.required_mask
    if required in probe.adapter.masks:
        required = masks[probe.adapter.masks.index(required)]
    probe.update(masks=tuple(masks), required_mask=required)


def leaking_masks(
    probe: CallProbe,
    found: list[MaskArgument],
    leaking: list[tuple[float, MaskArgument]],
) -> list[MaskArgument]:
    """A mask of which hidden keys have an influence, if none that hides is `found`.

    An implementation whose mask leaks is to be checked with this mask, not as one
    without a mask. It is that for which the influence is least. What is documented to
    be a mask of the context is one that changes nothing if it hides nothing.
    """
    ordered = [mask for _, mask in sorted(leaking, key=lambda pair: pair[0])]
    if found or not ordered:
        return leaking_mask_of_items(found, *ordered[:1])
    if may_leak(probe, ordered[0]):
        return ordered[:1]
    target, inputs = probe.adapter.target, probe.adapter.inputs
    if len(inputs) < 2 or not documented.is_mask_of(target, ordered[0].name, inputs[1]):
        return []
    return [*itertools.islice((m for m in ordered if is_neutral(probe, m)), 1)]


def may_leak(probe: CallProbe, mask: MaskArgument) -> bool:
    """Whether what leaks may be a mask of the tokens, with a mistake.

    A mask of something else, such as frames, changes the output if it hides nothing,
    unless it is documented to be one of the tokens.
    """
    is_usual = not OTHERS_PATTERN.search(mask.name)
    adapter = probe.adapter
    is_of_tokens = documented.is_mask_of(adapter.target, mask.name, adapter.inputs[0])
    is_usual |= is_of_tokens and not adapter.is_pooled
    return bool(probe.options.mask) or is_usual or is_neutral(probe, mask)


def mask_beside_weights(probe: CallProbe, name: str) -> list[MaskArgument]:
    """The mask if it hides keys only where a flag asks for the weights.

    The fused kernel, which returns none, has then forgotten it.
    """
    adapter, parameters = probe.adapter, names.parameters_of(probe.adapter.target)
    for flag in names.flags_of_weights(parameters, False, adapter.call_args):
        given = {**adapter.call_args, flag: True}
        with_weights = CallProbe(replace(adapter, call_args=given), probe.options)
        for mask in mask_candidates(with_weights):
            leak = mask_leakage(with_weights, mask) if mask.name == name else None
            if leak is not None and leak < 1e-3 and is_neutral(with_weights, mask):
                return [mask]
    return []


def fill_required_mask(probe: CallProbe) -> None:
    """Make a required argument a constant if it is named as a mask, and hides no key.

    Such are the edges of a graph, if only a bias depends on them; a mask of another
    name may leak by mistake.
    """
    required, adapter = probe.adapter.required_mask, probe.adapter
    if required is None or probe.options.mask:
        return
    is_graph = required.name.startswith("adj")
    if not (is_graph or adapter.single_input):
        return
    candidates = [mask for mask in mask_candidates(probe) if mask.name == required.name]
    leaks = (mask_leakage(probe, mask) for mask in candidates)
    leakage = 1e-3 if is_graph else 0.5
    if (
        required.kind == "causal"
        or required.counts_keys
        or any(leak is not None and leak < leakage for leak in leaks)
    ):
        return
    values = {"attend": True, "ignore": False, "attend_int": 1, "ignore_int": 0}
    sizes = ", ".join(MASK_SIZES[axis] for axis in required.axes)
    text = f"torch.full(({sizes},), {values.get(required.kind, 0.0)}){{device}}"
    probe.update(required_mask=None)
    # Edges of floating-point numbers, which the weights may be added to, have a dtype.
    edges = {required.name: f"torch.ones({sizes}){{dtype}}"}
    if is_graph and probe.try_call(extra_args={**adapter.extra_args, **edges}):
        text = edges[required.name]
    probe.update(extra_args={**adapter.extra_args, required.name: text})
    probe.record(f"`{required.name}`", text.format(**ARGUMENT_EXAMPLE), "inferred")


def is_unused(probe: CallProbe, name: str) -> bool:
    """Whether an argument takes anything, without effect: no mask is tried for it."""
    required = probe.adapter.required_mask
    if required is not None and required.name == name:
        return False
    anything = {name: "object()"}
    for mode in ("eval", "train"):
        without, given = (
            probe.unmasked_call(mode),
            probe.try_call(more=anything, mode=mode),
        )
        if without is None or given is None:
            return False
        script, args = given
        output = script.evaluate(script.call(args, **anything))
        if not torch.equal(output_of(without), output):
            return False
    return True


def hides_queries(probe: CallProbe, mask: MaskArgument) -> bool:
    """Whether a mask is of queries: it has their length where keys have another."""
    adapter, name = probe.adapter, mask.name
    if adapter.single_input or adapter.fixed_length is not None:
        return False
    if mask.kind == "causal" or mask.counts_keys:
        return False
    batch_size = 2 + (adapter.heads == 2)
    accepted = []
    for length in (7, 5):
        shapes = (f"{batch_size}, {length}", f"{batch_size}, 1, 1, {length}")
        ones = [f"torch.ones({shape}, dtype=torch.bool)" for shape in shapes]
        accepted.append(any(probe.try_call(k_len=7, more={name: n}) for n in ones))
    of_keys, of_queries = accepted
    return of_queries and not of_keys


def infer_context_of_mask(probe: CallProbe, name: str) -> None:
    """The optional argument that a mask is of, by its name, if it is not of the input.

    The input may take the place of a context that is not given. In a block that attends
    to itself first, it has an influence that the mask of the context does not hide.
    """
    if not probe.adapter.single_input or not names.CONTEXT_PATTERN.search(name):
        return
    for argument in names.optional_tensors(probe.adapter):
        if names.CONTEXT_PATTERN.search(argument):
            probe.update(masked_context=(argument, name))
            return


def mask_of_any_name(probe: CallProbe, name: str) -> MaskArgument | None:
    """The first encoding in which an argument hides keys; None if it hides none.

    Its name does not tell that it is a mask, so one that leaks is none, unless it hides
    what is hidden in all batch items alike: then items get the masks of others. Where
    the documentation tells it, it is that which leaks least.
    """
    if is_unused(probe, name):
        return None
    hides = documented.hides_where_true(probe.adapter.target, name)
    if hides is not None:
        kinds = ("ignore", "ignore_int") if hides else ("attend", "attend_int")
        stated = [mask for kind in kinds for mask in encodings_of(name, kind)]
        count = len(documented.all_shapes(probe.adapter.target).get(name, ()))
        stated.sort(key=lambda mask: len(mask.axes) != count)
        leaks = [(mask_leakage(probe, mask), n) for n, mask in enumerate(stated)]
        # One that hides nothing may be of queries.
        known = [(leak, n) for leak, n in leaks if leak is not None and leak < 0.99]
        return stated[min(known)[1]] if known else None
    for alike in (False, True):
        for mask in encodings_of(name, ""):
            leak = mask_leakage(probe, mask, alike=alike)
            if leak is not None and leak < 1e-3 and is_neutral(probe, mask):
                return mask if alike or is_of_item(probe, mask) else None
    return None


def without_queries(probe: CallProbe, mask: MaskArgument) -> MaskArgument:
    """The mask of keys, where only the first row of one for each query is used."""
    if mask.axes != "b1qk" or probe.adapter.is_pooled:
        return mask
    if documented.has_queries(probe.adapter.target, mask.name):
        return mask
    of_keys = replace(mask, axes="b11k")
    last = slice(4, 5)
    call = probe.try_call(mask=mask, hide=(last, slice(3, 4), slice(None)))
    if call is None or influence(*call, {"l": slice(3, 4)}, {"l": last}) == 0:
        return mask
    leak = mask_leakage(probe, of_keys)
    return of_keys if leak is not None and leak < 1e-3 else mask


def is_of_item(probe: CallProbe, mask: MaskArgument) -> bool:
    """Whether a mask of the last batch item leaves the first as it is."""
    last = slice(1 + (probe.adapter.heads == 2), None)
    masked = probe.try_call(mask=mask, hide=(slice(None), slice(3, 4), last))
    unmasked, first = probe.unmasked_call("eval"), probe.adapter.index(b=0)
    if masked is None or unmasked is None or not set("bn") & set(mask.axes):
        return True
    one, other = (
        script.evaluate(f"{script.call(args)}{first}")
        for script, args in (masked, unmasked)
    )
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def leaking_mask_of_items(
    masks: list[MaskArgument], candidate: MaskArgument | None = None
) -> list[MaskArgument]:
    """The `candidate` for a mask of each item, where those found are of all items.

    An argument may take both. If it hides keys in the wrong items, the laws show it.
    """
    if candidate is None or candidate.axes != "bqk":
        return []
    if any(set("bn") & set(mask.axes) for mask in masks):
        return []
    return [candidate] if candidate.kind in {mask.kind for mask in masks} else []


def masks_of_other_axes(
    probe: CallProbe, name: str, masks: list[MaskArgument]
) -> list[MaskArgument]:
    """Masks of an argument that hide the right keys if all items have the same."""
    of_queries = leaking_lengths_of_queries(probe, masks)
    return of_queries + documented_mask_of_items(probe, name, masks)


def leaking_lengths_of_queries(
    probe: CallProbe, masks: list[MaskArgument]
) -> list[MaskArgument]:
    """Lengths for each query, beside those found for each item, if both are accepted.

    They hide the right keys if all items have the same; the laws show whether they do
    so for items that differ.
    """
    is_of_items = [(mask.kind, mask.axes) for mask in masks] == [("lengths", "b")]
    if not is_of_items or probe.adapter.is_pooled:
        return []
    of_queries = replace(masks[0], axes="bq")
    leak = mask_leakage(probe, of_queries, alike=True)
    return [of_queries] if leak is not None and leak < 1e-3 else []


def documented_mask_of_items(
    probe: CallProbe, name: str, masks: list[MaskArgument]
) -> list[MaskArgument]:
    """A mask for each item, beside one for each item and head, if both are documented.

    It hides the right keys if all items have the same; the laws show whether they do so
    for items that differ.
    """
    of_heads = [mask for mask in masks if mask.axes == "nqk"]
    is_stated = documented.has_items(probe.adapter.target, name)
    if not (of_heads and is_stated) or any(mask.axes == "bqk" for mask in masks):
        return []
    of_items = replace(of_heads[0], axes="bqk")
    leak = mask_leakage(probe, of_items, alike=True)
    return [of_items] if leak is not None and leak < 1e-3 else []


def mask_of_all_items(probe: CallProbe, name: str) -> list[MaskArgument]:
    """The first encoding that hides a key if it is hidden in all batch items alike.

    An implementation that applies the mask of one item to all is checked with it.
    """
    for mask in mask_candidates(probe):
        if mask.name == name:
            leak = mask_leakage(probe, mask, alike=True)
            if leak is not None and leak < 1e-3 and is_neutral(probe, mask):
                return [mask]
    return []


def mask_by_its_name(probe: CallProbe, name: str) -> list[MaskArgument]:
    """A mask that hides no key in any encoding, though its name says that it does.

    So may its documentation. The laws show that. Where the attention is not all that
    mixes tokens, it may hide what it should.
    """
    call, target = probe.unmasked_call("eval"), probe.adapter.target
    hides = documented.hides_where_true(target, name)
    candidates: Iterable[MaskArgument] = ()
    if hides is not None and not OTHERS_PATTERN.search(name):
        candidates = encodings_of(name, "ignore" if hides else "attend")
    elif names.LENGTHS_PATTERN.search(name) and documented.counts_valid(target, name):
        candidates = encodings_of(name, "lengths")
    elif names.KEY_PADDING_PATTERN.search(name):
        kinds = ("ignore", "attend", "ignore_int")
        candidates = [MaskArgument(name, kind, "bk") for kind in kinds]
    if call is None:
        return []
    script = call[0]
    if probe.adapter.is_module and structure.mixes_pixels(script.evaluate("attention")):
        return []
    hide = (slice(None), slice(3, 5), slice(None))  # lengths hide the last keys only
    accepted = (m for m in candidates if probe.try_call(mask=m, hide=hide))
    return [*itertools.islice(accepted, 1)]


def mask_of_pooled(probe: CallProbe, name: str) -> list[MaskArgument]:
    """A mask with the documented axes of tokens that are pooled, though it hides none.

    There are no outputs of padding that it could be for.
    """
    adapter = probe.adapter
    axes = documented.all_shapes(adapter.target).get(adapter.inputs[0], ())
    is_of_tokens = documented.is_mask_of(adapter.target, name, adapter.inputs[0])
    if not (adapter.is_pooled and adapter.single_input and is_of_tokens):
        return []
    if len(axes) != 3:
        return []  # it is of frames, perhaps
    candidates = [MaskArgument(name, kind, "bk") for kind in ("attend", "ignore")]
    hide = (slice(None), slice(3, 4), slice(None))
    accepted = (m for m in candidates if probe.try_call(mask=m, hide=hide))
    return [*itertools.islice(accepted, 1)]


def takes_one_query(probe: CallProbe, mask: MaskArgument) -> bool:
    """Whether a single query takes this mask, if it is taken without a mask.

    A path of its own for one query may take fewer encodings than a kernel of PyTorch.
    """
    length: Any = {"k_len": 1} if probe.adapter.single_input else {"q_len": 1}
    return not probe.try_call(**length) or bool(probe.try_call(mask=mask, **length))


def accepted_encoding(probe: CallProbe, mask: MaskArgument) -> MaskArgument:
    """The mask as it was given; as integers where a bool mask raises a type error."""
    if mask.kind in ("attend", "ignore"):
        as_int = replace(mask, kind=f"{mask.kind}_int")
        hide = (slice(None), slice(0, 1), slice(None))
        if not probe.try_call(mask=mask, hide=hide) and probe.try_call(
            mask=as_int, hide=hide
        ):
            return as_int
    return mask


def record_mask(probe: CallProbe, mask: MaskArgument) -> None:
    """Record the kind and the axes of a mask."""
    axes = ", ".join(AXES.get(axis, axis) for axis in mask.axes)
    source = "given" if probe.options.mask else "inferred"
    text = MASK_KINDS[mask.kind] + (f" [{axes}]" if axes else "")
    probe.record(f"`{mask.name}`", text, source)


def mask_leakage(
    probe: CallProbe, mask: MaskArgument, mode: str = "eval", alike: bool = False
) -> float | None:
    """The influence of hidden keys, relative to visible ones; None if the call fails.

    0 where the mask hides what it should, about 1 where it hides nothing. A mask that
    takes the influence of visible keys, too, is one of another kind: 1.
    """
    # Of a window of four tokens, the first of five is left out.
    fewer = int(probe.adapter.fixed_length == 4 and not probe.adapter.image)
    first = 3 - fewer
    late, early = {"l": slice(first, None)}, {"l": slice(0, first)}
    if mask.kind == "causal":
        flag = {**probe.adapter.call_args, mask.name: True}
        call = probe.try_call(call_args=flag, mode=mode)
        if call is None:
            return None
        return influence(*call, late, early) / (1e-9 + influence(*call, early, late))

    # Of five keys the fourth is hidden, and the output of the fifth query observed.
    # Lengths can hide only the last keys. Of two, the last one counts: the first may
    # be visible by mistake. If the mask has an axis for batch items, only the last item
    # has a hidden key, unless all are `alike`.
    key = first + mask.counts_keys
    items = slice(None)
    if set("bn") & set(mask.axes) and not alike:
        last_item = 1 + (probe.adapter.heads == 2)
        items = slice(last_item, None)
    hidden_key = slice(key, key + 1)
    hide = (slice(None), slice(first, key + 1), items)
    if probe.try_call(mask=mask, hide=hide, mode=mode, reuse=True) is None:
        return None  # most masks are refused at once
    call = probe.try_call(mask=mask, hide=hide, mode=mode)
    if call is None:
        return None
    unmasked = probe.unmasked_call(mode)
    if unmasked is not None and output_of(unmasked).shape != output_of(call).shape:
        return None  # a mask with wrong axes, which broadcasts
    if unmasked is not None and torch.allclose(
        output_of(unmasked), output_of(call), rtol=1e-5, atol=1e-6
    ):
        return 1.0  # the argument is not used, or hides keys that are all equal
    query = 0 if probe.adapter.is_pooled else first + (-1 if mask.counts_keys else 1)
    observed = {"l": slice(query, query + 1), "b": items}
    hidden = influence(*call, {"l": hidden_key}, observed)
    visible = influence(*call, early, observed)
    usual = visible
    if unmasked is not None:
        usual = influence(*unmasked, early, observed)
        if hidden > 1e-3 * visible and not influence_of_mask(probe, mask, mode):
            return 1.0
        if 1e-3 * visible > hidden > 0:
            # A bias may leave little influence to this key without the mask, too.
            return hidden / (1e-9 + influence(*unmasked, {"l": hidden_key}, observed))
    return hidden / visible if visible > 1e-3 * usual > 0 else 1.0


def is_neutral(probe: CallProbe, mask: MaskArgument) -> bool:
    """Whether the output with a mask that hides nothing is that without a mask."""
    unmasked, masked = probe.unmasked_call("eval"), probe.try_call(mask=mask)
    required = probe.adapter.required_mask
    is_required = required is not None and required.name == mask.name
    if unmasked is None or masked is None or mask.kind == "causal" or is_required:
        return True  # there is no call without it
    if unmasked[0].result_shapes != masked[0].result_shapes:
        return False  # a mask with too many axes, which broadcasts
    one, other = output_of(unmasked), output_of(masked)
    # Scores to which -1e4 is added lose more digits than this.
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def agrees(probe: CallProbe, found: list[MaskArgument], mask: MaskArgument) -> bool:
    """Whether a mask that hides nothing gives what the one that was `found` gives.

    A required mask of True and False may hide where an additive one has 0, so that all
    keys are hidden: without a call that has no mask, nothing else shows it.
    """
    calls = [probe.try_call(mask=each) for each in (*found, mask)]
    if probe.adapter.required_mask is None or None in calls:
        return True
    outputs = [output_of(call) for call in calls if call is not None]
    return torch.allclose(outputs[0], outputs[-1], rtol=1e-4, atol=1e-4)


def influence_of_mask(probe: CallProbe, mask: MaskArgument, mode: str) -> bool:
    """Whether the output changes if the mask hides two keys more."""
    outputs = []
    for keys in (slice(3, 4), slice(1, 4)):
        call = probe.try_call(
            mask=mask, hide=(slice(None), keys, slice(None)), mode=mode
        )
        if call is None:
            return True
        outputs.append(output_of(call))
    return not torch.equal(*outputs)
