r"""# Ways to call an attention

A function or module may be called in many ways: its inputs may have batch items or
positions first, and it may need arguments beside them, such as a mask, positions or the
height of an image. The ways are listed here, with the most likely first, and
[tried](infer.md) with small random inputs, until one gives an output of the expected
shape in which tokens influence each other.

Source: the [dictionary](names.md) of names, and the signatures of public code.
"""

import inspect
import itertools
import math
import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_laws import caches, documented, names, structure
from attention_laws.adapter import (
    IMAGES,
    LAYOUTS,
    Adapter,
    CallError,
    Fact,
    MaskArgument,
    ModelError,
    Options,
    Sizes,
)
from attention_laws.embedded import PADDING, embedding_widths, takes_ids
from attention_laws.law import ScriptError
from attention_laws.patches import takes_patches
from attention_laws.recorders import WeightsRecorder
from attention_laws.script import CallArguments, Script, find_output
from attention_laws.source import source_of
from attention_laws.tools import tensors_in

# Candidates for the axes of masks and of attention weights. Masks that can express more
# come first.
MASK_AXES = ("b1qk", "bhqk", "bqk", "qkb", "nqk", "b11k", "bk", "qk", "qk1", "k")
# The same for masks of images.
PIXEL_AXES = ("bp", "b1p")

# Lengths that are tried for an attention that accepts one length only.
FIXED_LENGTHS = (4, 16, 9, 8, 49, 64)

# The largest limit of the length that is looked for among arguments of any name.
LONGEST_LIMIT = 64

# The tokens of a context that is the same in all calls: a number that no law gives.
CONTEXT_LENGTH = 11

# Sizes with which an argument that depends on them is shown in the report.
ARGUMENT_EXAMPLE: dict[str, Any] = {
    "start": 0,
    "stop": 5,
    "length": 5,
    "k_len": 5,
    "rows": 1,
    "columns": 5,
    "batch_size": 2,
    "d_k": 4,
    "d_model": 12,
    "heads": 3,
    "query": "x",
    "dtype": "",
    "device": "",
}

# How much work trying ways to call an attention may be: the number of small calls, of
# which building a module is worth several. What is found depends on no clock, and is
# the same on each machine. On most, it takes 2 seconds.
CALLING_WORK = 6000
BUILDING_WORK = 4
PARAMETERS_PER_WORK = 100_000
# Only calls that are slow by far reach this limit: it is an error, and no other answer.
CALLING_SECONDS = 30.0


class SlowCallError(CallError):
    """Ways to call an attention could not be tried within `CALLING_SECONDS`."""


class CallProbe:
    """Makes small calls, and collects what they show in an adapter."""

    def __init__(
        self, adapter: Adapter, options: Options, limit: int = CALLING_WORK
    ) -> None:
        self.adapter = adapter
        self.options = options
        self.limit = limit  # of the work to find a way to call it
        self.work = 0
        self.end = time.process_time() + CALLING_SECONDS
        # The module, where its sizes are its own and not those of its arguments.
        is_module = isinstance(adapter.target, nn.Module)
        self.built: nn.Module | None = adapter.target if is_module else None
        # For each mode, the adapter and its call without a mask.
        self.unmasked: dict[
            str, tuple[Adapter, tuple[Script, CallArguments] | None]
        ] = {}
        # For each mode, the module of the last attempt to call it, with what it depends
        # on.
        self.reused: dict[str, tuple[object, dict[str, Any]]] = {}
        self.guessed = ""  # a constructor argument of unknown meaning
        self.first_error = ""  # the reason why the first failing call failed
        self.takes_ids = False  # whether a tensor of numbers was refused as token ids

    def record(self, name: str, value: object, source: str, **fields: Any) -> None:
        """Add a fact to the report, and set fields of the adapter."""
        fact = Fact(name, str(value), source)
        self.update(facts=(*self.adapter.facts, fact), **fields)

    def update(self, **fields: Any) -> None:
        """Set fields of the adapter."""
        self.adapter = replace(self.adapter, **fields)

    def unmasked_call(self, mode: str) -> tuple[Script, CallArguments] | None:
        """A call without a mask; the same for all masks that are tried."""
        if mode not in self.unmasked or self.unmasked[mode][0] is not self.adapter:
            self.unmasked[mode] = self.adapter, self.try_call(mode=mode)
        return self.unmasked[mode][1]

    def try_call(
        self,
        mask: MaskArgument | None = None,
        hide: tuple[slice, slice | list[int], slice] | None = None,
        k_len: int = 5,
        batch_size: int | None = None,
        q_len: int = 5,
        mode: str = "eval",
        more: dict[str, str] | None = None,
        reuse: bool = False,
        **fields: Any,
    ) -> tuple[Script, CallArguments] | None:
        """Make one call, with some fields of the adapter changed.

        `hide` is what `mask` hides: queries, keys and batch items. With `reuse`, the
        module is that of the call before. Returns None where the call fails, or returns
        nothing that could be the output.
        """
        self.work += 1
        adapter = replace(self.adapter, **fields) if fields else self.adapter
        given = mask or adapter.required_mask
        if given is not None and given.axes == "k" and "b" in adapter.layout:
            return None  # a mask of one sequence
        # Batch size, length and heads are pairwise different, so that a mask of the
        # wrong shape cannot broadcast by coincidence.
        counts = adapter.heads, adapter.group_size, adapter.heads // adapter.group_size
        usual_size = 1 if adapter.layout == "ld" else 2 + (2 in counts)
        q_len = k_len if adapter.single_input else q_len
        if adapter.fixed_length is not None:
            q_len = k_len = adapter.fixed_length
        batch_size = batch_size or usual_size
        sizes = Sizes(batch_size, q_len, k_len, adapter.heads, adapter.d_k)
        try:
            script = Script(adapter, sizes, **self.options.script_options())
            if reuse:
                self.restart_with_same_module(script, mode)
            else:
                self.restart(script, mode)
            allowed = script.all_allowed()
            if hide is not None:
                allowed[hide] = False
            args = script.make_arguments(allowed, mask)
            result = script.evaluate(script.call_source(args, **more or {}))
            query = script.evaluate(args.inputs[0])
            output_index = find_output(result, query, adapter)
        except Exception as error:
            cause = error.error if isinstance(error, ScriptError) else error
            if "'indices' to have" in str(cause):
                self.takes_ids |= may_be_ids(adapter)
            if not self.first_error:
                location = error_location(cause)
                self.first_error = f"raises {ScriptError(cause)}{location}"
            return None
        if output_index is None:
            message = (
                f"returns {type(result).__name__}, where a tensor of "
                f"{list(query.shape)} was expected"
            )
            self.first_error = self.first_error or message
            return None
        script.adapter = replace(adapter, output_index=output_index)
        script.result_shapes = [tensor.shape for tensor in tensors_in(result)]
        return script, args

    def restart(self, script: Script, mode: str = "eval") -> None:
        """Build a new module, and count the work."""
        self.work += BUILDING_WORK
        script.restart(mode)
        module = script.namespace["attention"]
        if isinstance(module, nn.Module):
            parameters = module.parameters()
            count = sum(p.numel() for p in parameters if not nn.parameter.is_lazy(p))
            self.work += count // PARAMETERS_PER_WORK

    def restart_with_same_module(self, script: Script, mode: str) -> None:
        """Start with the module of the last attempt, which is often refused at once.

        It is built anew if that attempt has changed its attributes.
        """
        adapter = script.adapter
        sizes = (adapter.heads, adapter.d_k, adapter.d_model, adapter.fixed_length)
        state, namespace = self.reused.get(mode, (None, {}))
        if state != (sizes, attribute_ids(namespace.get("attention"))):
            self.restart(script, mode)
            namespace = dict(script.namespace)
            state = sizes, attribute_ids(namespace["attention"])
            self.reused[mode] = state, namespace
        script.namespace = dict(namespace)


def may_be_ids(adapter: Adapter) -> bool:
    """Whether a tensor that an embedding refused may have been the input.

    Else it is an argument that was made, unless the input has the two axes of ids.
    """
    shape = documented.shapes(adapter.target).get(adapter.inputs[0], ())
    is_input = not adapter.extra_args or len(shape) == 2
    return is_input and not takes_ids(adapter.target)


def attribute_ids(module: Any) -> list[object]:
    """The identities of the attributes of a module, and the lengths of containers."""
    parts = module.modules() if isinstance(module, nn.Module) else []
    values = [
        each
        for part in parts
        for each in (*vars(part).values(), *part._buffers.values())
    ]
    sizes = [len(each) for each in values if isinstance(each, dict | list)]
    return [*map(id, values), *sizes]


def output_of(call: tuple[Script, CallArguments]) -> Tensor:
    """The output of one more call with the same arguments."""
    script, args = call
    output: Tensor = script.evaluate(script.call(args))
    return output


def error_location(error: Exception) -> str:
    """The last line in the traceback that is neither in torch nor in this package."""
    skipped = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if not f.filename.startswith(skipped)]
    return f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""


def influence(
    script: Script,
    args: CallArguments,
    changed: dict[str, Any],
    observed: dict[str, Any],
) -> float:
    """How much the output at `observed` changes if keys and values at `changed` do."""
    before = script.call(args)
    after = script.call(script.perturb(args, **changed))
    difference = script.evaluate(
        f"({after} - {before}){script.adapter.index(**observed)}"
    )
    return float(difference.detach().abs().nan_to_num(torch.inf).sum())


def mask_candidates(probe: CallProbe) -> Iterator[MaskArgument]:
    """Every mask argument, in every kind and shape that its name leaves open."""
    adapter, options = probe.adapter, probe.options
    encodings: dict[str, str] = dict(options.mask)
    if encodings == {"none": ""}:
        return
    if not encodings:
        parameters = names.parameters_of(adapter.target)
        required = names.required_by_name(parameters)
        order, first = [*required] or ["attn_mask"], adapter.inputs[0]
        optional = {name for name, is_required in required.items() if not is_required}
        order += names.names_in_kwargs(adapter.target)
        excluded = {*adapter.inputs, *options.call_args, *adapter.extra_args}
        other = [n for n in order if n not in excluded]
        if any(map(names.CONTEXT_PATTERN.search, adapter.extra_args)):
            # That of the context is constant; one of the input has its name in front.
            of_input = tuple(adapter.inputs)
            other = [
                n
                for n in other
                if n.startswith(of_input) or not names.CONTEXT_PATTERN.search(n)
            ]
        encodings = {
            name: ""
            for name in other
            if names.MASK_PATTERN.search(name)
            or names.CAUSAL_PATTERN.match(name)
            or (name in optional and documented.is_map_of(adapter.target, name, first))
            or documented.marks_padding(adapter.target, name, first)
            if not names.GLOBAL_PATTERN.search(name)
            if not documented.is_length_of_part(adapter.target, name)
        }
        if getattr(adapter.target, "adds_padding", False):
            encodings[PADDING] = "ignore:bk"  # where the ids are those of padding
        # Beside the lengths of keys, those of queries hide none.
        if any(map(names.KEY_LENGTHS_PATTERN.match, encodings)):
            encodings = {
                n: e
                for n, e in encodings.items()
                if not names.QUERY_LENGTHS_PATTERN.match(n)
            }
    stated = documented.all_shapes(adapter.target)
    for name, encoding in encodings.items():
        if adapter.image.startswith("video") and names.FRAMES_PATTERN.fullmatch(name):
            continue  # numbers of frames, of which there is one
        for each in encoding.split("+"):
            masks = [*encodings_of(name, each)]
            # Those with the documented number of axes first: others may be accepted.
            count = len(stated.get(name, ()))
            fitting = [mask for mask in masks if len(mask.axes) == count]
            others = [mask for mask in masks if mask not in fitting]
            is_known = count > 0 and takes_ids(adapter.target)
            for mask in [*fitting, *([] if is_known else others)]:
                if adapter.image == "image_rows_first" and ":" not in each:
                    if mask.axes == "bk" and not polarity(mask):
                        # It marks the padding of rows, of which there is one.
                        yield replace(mask, axes="b1k")
                elif not (adapter.is_pooled and mask.axes == "bq" and not encoding):
                    yield mask
                    for axes in axes_beside(probe, mask):
                        yield replace(mask, axes=axes)
                if mask.axes == "b11k" and adapter.is_pooled:
                    yield replace(mask, axes="b1k")  # a row of one query


def axes_beside(probe: CallProbe, mask: MaskArgument) -> Iterator[str]:
    """Axes that only some layouts have, to be tried behind those of a mask."""
    adapter, axes = probe.adapter, mask.axes
    if axes == "bk" and adapter.layout == "lbd":
        yield from ("1kb", "kb")
    if axes == MASK_AXES[0] and adapter.image:
        yield from PIXEL_AXES
    is_grouped = axes == "b1qk" and adapter.group_size > 1
    if is_grouped and probe.try_call(mask=mask) is None:
        yield "b11qk"  # groups of heads, and the heads of each


# Arguments that are known to be no masks, by their names.
OTHER_ARGUMENTS = (
    *(names.CONTEXT_PATTERN, names.OTHER_PATTERN),
    *(names.SCALE_PATTERN, names.TIME_PATTERN),
)


def unnamed_masks(probe: CallProbe) -> Iterator[str]:
    """Optional arguments of other names, which may be masks of keys."""
    adapter, options = probe.adapter, probe.options
    known = {*adapter.inputs, *adapter.call_args, *adapter.extra_args}
    if options.mask or adapter.image:
        return
    for name, parameter in names.parameters_by_name(adapter.target).items():
        is_named = names.MASK_PATTERN.search(name) is not None
        is_known = documented.is_bool(adapter.target, name) and not is_named
        is_optional = parameter.default is None and (
            is_known or names.may_be_context(parameter)
        )
        is_other = any(pattern.search(name) for pattern in OTHER_ARGUMENTS)
        is_known &= not names.POSITION_IDS_PATTERN.fullmatch(name)
        is_other &= not is_known
        if is_optional and name not in known and not is_other:
            yield name


def encodings_of(name: str, encoding: str) -> Iterator[MaskArgument]:
    """What `encoding`, such as "attend:qk", "attend" or nothing, leaves open."""
    kind, _, axes = encoding.partition(":")
    kinds = [kind] if kind else ["attend", "ignore", "attend_int", "additive"]
    if not kind and names.CAUSAL_PATTERN.match(name):
        kinds = ["causal"]
    elif not kind and "mask" not in name and names.LENGTHS_PATTERN.search(name):
        kinds = ["lengths", "relative_lengths"]
    for each in kinds:
        of_numbers = {"lengths": ("bq", "b"), "relative_lengths": ("b",)}
        shapes = {"causal": ("",), **of_numbers}.get(each, MASK_AXES)
        for shape in [axes] if axes else shapes:
            yield MaskArgument(name, each, shape)


def polarity(mask: MaskArgument) -> bool:
    """Whether the mask is added to the scores; one other encoding excludes the others.

    A mask of ones and zeros cannot mean both that ones are hidden and that zeros are.
    """
    return mask.kind.startswith("additive")


# Any four axes fit to rows first: it is tried where the batch is known to be third.
IMAGE_GROUPS = [[name] for name in IMAGES if name != "image_rows_first"]


# A vector for each batch item where positions are in front of batch items: beside
# images, these would be as many tokens as there are batch items.
OF_POSITIONS_FIRST = {"torch.ones(1, {batch_size}, {d_model}){dtype}"}


def ways_to_call(
    probe: CallProbe, usual: bool
) -> Iterator[tuple[list[dict[str, Any]], MaskArgument | None]]:
    """Fields of the adapter for each group of layouts, and a mask, up to the limit.

    Layouts of one group accept the same tensors, and are distinguished by their
    outputs. Only the `usual` ways, or all. Raises `SlowCallError` where calls are slow.
    """
    adapter, options = probe.adapter, probe.options
    groups = groups_of_layouts(probe)
    widths: list[int | None] = [adapter.d_model]
    if "qkv" in adapter.inputs[0].lower() and options.d_model is None:
        widths.append(3 * adapter.heads * adapter.d_k)  # projected already
    if probe.built is not None:
        candidates = structure.candidate_widths(probe.built)
        if takes_ids(adapter.target):
            candidates = embedding_widths(probe.built)
        candidates = documented_width(adapter) or candidates
        widths = [options.d_model] if options.d_model else [*candidates]
    for variant, mask in variants_and_masks(probe, usual):
        likely = groups
        if any("cu_seq" in name for name in variant.get("extra_args", ())):
            # The items of a batch are parts of one sequence.
            likely = sorted(groups, key=lambda group: "b" in group[0])
        tried = fitting_groups(likely, variant, mask)
        pairs: list[tuple[int | None, int | None]] = [(w, None) for w in widths]
        if probe.built is not None and len(variant.get("inputs", adapter.inputs)) > 1:
            pairs += itertools.permutations(structure.layer_widths(probe.built), 2)
        for (width, other), group in itertools.product(pairs, tried):
            choices, columns = [], []
            for layout in group:
                fields = {**variant, "layout": layout, "d_model": width}
                if other is not None:
                    fields["context_width"] = other
                if layout in IMAGES:
                    fields |= {"layout": IMAGES[layout], "image": layout}
                    column = {"image_height": 0} if layout.startswith("image") else {}
                    columns.append(fields | column)
                if width is not None and probe.built is not None:
                    fields["d_k"] = max(1, width // adapter.heads)
                choices.append(fields)
            yield choices, mask
            yield columns, mask  # tokens may influence each other along one axis
            if probe.work > probe.limit:
                return
            if time.process_time() > probe.end:
                raise SlowCallError(
                    f"trying ways to call `{adapter.name}` took more than "
                    f"{CALLING_SECONDS:.0f} s; describe the call with `--layout`, "
                    f"`--inputs` or `--call-args`, or check a smaller instance"
                )


def documented_width(adapter: Adapter) -> list[int]:
    """The width of the first input, if it is documented by the name of a size."""
    axes = shapes_of_inputs(adapter).get(adapter.inputs[0], ())
    sizes = names.constructor_sizes(adapter.target, adapter.init_args)
    # The channels of an image may be its second axis.
    features = (axes[1], axes[-1]) if len(axes) > 3 else axes[-1:]
    widths = [sizes.get(axis, "") for axis in dict.fromkeys(features)]
    return [int(width) for width in widths if width.isdigit()]


def groups_of_layouts(probe: CallProbe) -> list[list[str]]:
    """The layouts to try in their order, those that accept the same tensors together.

    What is documented or unpacked tells of an input of four or five axes.
    """
    adapter, options = probe.adapter, probe.options
    groups = [["bld", "lbd"], ["bhld", "blhd"], ["ld"], *IMAGE_GROUPS, ["bdl"]]
    if takes_ids(adapter.target):  # whose vectors are the last axis, and have no heads
        groups = [["bld", "lbd"], ["ld"], ["image_channels_last"]]
    elif takes_patches(adapter.target):
        return [["image"]]
    if not adapter.is_module:
        with_heads = ["bhld", "blhd", "lbhd", "bhdl"]
        groups = [with_heads, groups[0], ["hld", "lhd"], *groups[2:]]
    elif "Conv2d" in structure.identifiers(adapter.target):
        groups.sort(key=lambda group: group == ["bhld", "blhd"])  # images come first
    first = adapter.inputs[0]
    shapes = [shapes_of_inputs(adapter).get(first, ())]
    shapes.append(names.unpacked_axes(adapter.target, first))
    is_image = {"w", "width"} & {axis.lower() for axis in shapes[0]}
    if len(shapes[0]) == 4 and len(adapter.inputs) == 3 and not is_image:
        groups.sort(key=lambda group: group != ["bhld", "blhd"])  # heads are split
    if len(shapes[0]) == 5:
        groups.sort(key=lambda group: not group[0].startswith(("video", "frames")))
    if order := "" if adapter.is_module else documented.place_of_heads(shapes[0]):
        groups.insert(0, [order])
    if len(shapes[0]) == 3:
        # Others may fit to the same tensors: what is documented is tested.
        others = documented.other_orders(shapes[0])
        likely = ([each for each in group if each not in others] for group in groups)
        groups = [group for group in likely if group]
        if documented.has_channels_second(shapes[0]):
            groups.sort(key=lambda group: group != ["bdl"])
    has_three_axes = {len(axes) for axes in shapes if axes} == {3}
    if has_three_axes or not all(map(documented.is_batch_first, shapes)):
        # Three axes in front of the features are not always those of an image.
        groups = [group for group in groups if group[0] not in IMAGES]
    if any(map(documented.is_batch_third, shapes)):
        groups.insert(0, ["image_rows_first"])
    if len(shapes[0]) == 2 and documented.is_batch(shapes[0][0]):
        sizes = names.constructor_sizes(adapter.target, adapter.init_args)
        if shapes[0][1] in sizes:  # numbers of each item are no tokens
            groups = [group for group in groups if group != ["ld"]]
    if options.layout:
        groups = [[LAYOUTS.get(options.layout, options.layout)]]
    if options.layout.startswith("video"):
        # Its tokens are those of one frame, or of one pixel over all frames.
        groups.append([options.layout.replace("video", "frames")])
    return groups


def fitting_groups(
    groups: list[list[str]], variant: dict[str, Any], mask: MaskArgument | None
) -> list[list[str]]:
    """The groups of layouts that go with these fields and this mask."""
    # Images have no masks, nor have channels in front of positions if none are stated.
    without_mask = {*IMAGES} | ({"bdl"} if groups[0] != ["bdl"] else set())
    tried = [g for g in groups if not (mask and g[0] in without_mask)]
    if OF_POSITIONS_FIRST & {*variant.get("extra_args", {}).values()}:
        tried = [group for group in tried if group[0] not in IMAGES]
    if "designs" in variant:  # of a constant context
        tried = [group for group in tried if group[0] in IMAGES]
    return tried


def variants_and_masks(
    probe: CallProbe, only_usual: bool
) -> Iterator[tuple[dict[str, Any], MaskArgument | None]]:
    """Fields of the adapter to try, with and without masks; the most likely first."""
    required = names.required_by_name(names.parameters_of(probe.adapter.target))
    masks = [*mask_candidates(probe)]
    required_masks = [mask for mask in masks if required.get(mask.name)]
    filled = [*filled_arguments(probe)]
    of_items = [*queries_of_items(probe)]
    yield from itertools.product(of_items, [None, *required_masks])
    # The tokens of a bag have one output, beside which their weights may be returned.
    bags = [f for f in filled if names.ONE_BAG in f["extra_args"].values()]
    yield from (({**fields, "is_pooled": True}, None) for fields in bags)
    # A mask that is required is mostly not None, and then nothing else is missing. A
    # number of heads has a default that would divide the width, too.
    counted = [f for f in filled if {*f["extra_args"].values()} == {"{heads}"}]
    yield from itertools.product([*counted, {}], [None, *required_masks])
    usual = [*packed_contexts(probe), *second_inputs(probe), *filled]
    usual += [*packed_inputs(probe), *optional_arguments(probe)]
    usual += [*needed_together(probe, filled)]
    yield from itertools.product(usual, [*required_masks, None])
    yield from itertools.product(constant_context(probe), [None])
    if only_usual:
        return
    sides = [*names.stated_sides(probe.adapter.target), *documented_sides(probe)]
    stated = [{"fixed_length": r * c, "image_height": r} for r, c in sides]
    stated += [
        {"fixed_length": f * r * c, "image_height": r, "video_frames": f}
        for f, r, c in names.stated_volumes(probe.adapter.target)
    ]
    counts = [*documented_lengths(probe), *FIXED_LENGTHS]
    lengths = [*stated, *({"fixed_length": n} for n in counts)]
    if takes_ids(probe.adapter.target):  # which are slow, and seldom of one length
        pooled = [{**fields, "is_pooled": True} for fields in filled]
        yield from itertools.product(pooled, [*required_masks, None])
    for fields in [{}, *filled, *constant_context(probe)]:
        sized = [fields | {"is_pooled": True}]
        sized += [fields | length for length in lengths]
        sized += [each | {"is_pooled": True} for each in sized[1:]]
        # What is pooled has no lengths of queries, which may broadcast.
        pairs = itertools.product(sized, [None, *required_masks])
        yield from (
            (each, mask)
            for each, mask in pairs
            if not (mask and mask.axes == "bq" and each.get("is_pooled"))
        )
    yield from (({}, mask) for mask in masks if mask not in required_masks)


def documented_sides(probe: CallProbe) -> Iterator[tuple[int, int]]:
    """Rows and columns of images, one of which a number of the constructor sets.

    The documented axis has its name; an axis of another name has three.
    """
    adapter = probe.adapter
    axes = shapes_of_inputs(adapter).get(adapter.inputs[0], ())
    sizes = names.constructor_sizes(adapter.target, adapter.init_args)
    counts = {name: int(text) for name, text in sizes.items() if text.isdigit()}
    for pair in (axes[1:3], axes[2:4]) if len(axes) == 4 else ():
        if {*pair} & {*counts}:
            yield counts.get(pair[0], 3), counts.get(pair[1], 3)


def documented_lengths(probe: CallProbe) -> Iterator[int]:
    """The length of sequences, where the documentation names it as the constructor."""
    adapter = probe.adapter
    axes = shapes_of_inputs(adapter).get(adapter.inputs[0], ())
    sizes = names.constructor_sizes(adapter.target, adapter.init_args)
    if len(axes) == 3 and (length := sizes.get(axes[1], "")).isdigit():
        yield int(length)


# A number for each pixel of an image, the same for all.
MAP = "torch.ones({batch_size}, {rows}, {columns}){dtype}"
MAP_OF_INTEGERS = "torch.ones({batch_size}, {rows}, {columns}, dtype=torch.int64)"


def filled_arguments(probe: CallProbe) -> Iterator[dict[str, Any]]:
    """Values for the required arguments that are no inputs."""
    adapter = probe.adapter
    templates = values_of_required(probe)
    made: dict[str, dict[str, type]] = {}
    for name in filter(names.CACHE_PATTERN.match, [*templates]):
        parameter = names.parameters_by_name(adapter.target)[name]
        made |= caches.new_caches(adapter.target, parameter)
        templates[name] = [*made, *templates[name]]
    columns = [*templates.values()]
    choices = [*itertools.islice(itertools.product(*columns), 12)]
    if len(columns) > 1:
        choices += zip(*columns, strict=False)  # all of one kind, as the input is
    for texts in dict.fromkeys(choices):
        chosen = {n: text for n, text in zip(templates, texts, strict=True) if text}
        of_positions = set(filter(names.POSITION_PATTERN.search, chosen))
        of_positions |= {n for n, text in chosen.items() if text == "{start}"}
        if chosen:
            fields: dict[str, Any] = {
                "position_args": {n: chosen[n] for n in chosen if n in of_positions},
                "extra_args": {n: chosen[n] for n in chosen if n not in of_positions},
                "call_args": {
                    n: v for n, v in adapter.call_args.items() if n not in chosen
                },
            }
            for classes in (made[text] for text in texts if made.get(text)):
                imports = "".join(map(names.import_source, classes.values()))
                fields["imports"] = adapter.imports + imports
                fields["namespace"] = {**adapter.namespace, **classes}
            yield fields


# What has values of its own, whatever its shape is.
OF_EXTRA = names.REFERENCE_PATTERN, names.BEGINS_PATTERN


def values_of_required(probe: CallProbe) -> dict[str, list[str]]:
    """Source texts for each of the required arguments that are no inputs."""
    adapter, given = probe.adapter, probe.options.call_args
    parameters = names.parameters_by_name(adapter.target)
    shapes = shapes_of_inputs(adapter)
    if 0 < len(shapes.get(adapter.inputs[0], "")) < 3:
        # The input is no sequence of batch items. Nodes have edges.
        of_edges = documented.EDGES_PATTERN.fullmatch
        shapes = {n: axes for n, axes in shapes.items() if of_edges(axes[0])}
    integers = documented.integers(adapter.target) if shapes else set()
    templates = {
        name: ["{heads}"]
        for name, parameter in parameters.items()
        if not adapter.is_module and type(parameter.default) is int
        if names.value_of(name) == "{heads}"
    }
    for name, value in adapter.call_args.items():
        if value is not None or name in given:
            continue
        if names.POSITION_PATTERN.search(name):
            has_axes = len(documented.all_shapes(adapter.target).get(name, ())) == 3
            # Three axes are those of coordinates.
            kind = "coordinates" if has_axes else name
            templates[name] = names.position_templates(kind)
            if documented.is_of_other_length(adapter.target, name, adapter.inputs[0]):
                templates[name] = [
                    text.replace("{start}, {stop}", "{k_len}")
                    for text in templates[name]
                ]
        elif name == "seen" and "int" in str(parameters[name].annotation):
            templates[name] = ["{start}"]
        elif text := names.dict_template(adapter.target, name):
            templates[name] = [text]
        elif documented.is_map_of(adapter.target, name, adapter.inputs[0]):
            templates[name] = [MAP_OF_INTEGERS] if name in integers else [MAP]
        elif name in shapes and not any(p.fullmatch(name) for p in OF_EXTRA):
            axes = documented.axes_of_input(adapter.inputs[0], shapes)
            known = documented.sizes(axes)
            known = names.constructor_sizes(adapter.target, adapter.init_args) | known
            known = documented.lengths(shapes.values()) | known
            are_integers = name in integers
            text = documented.template(
                name, shapes[name], known, are_integers=are_integers
            )
            # With zeros for all tokens, there may be none at all.
            ones = text.replace("torch.zeros", "torch.ones")
            listed = [text, *names.extra_templates(name, None), ones]
            templates[name] = [*dict.fromkeys(listed)]
        else:
            templates[name] = templates_of(adapter, parameters[name])
    if any("cu_seq" in name for name in templates):
        # Those of the keys may default to those of the queries.
        templates |= {
            name: names.extra_templates(name, None)
            for name, parameter in parameters.items()
            if "cu_seq" in name and parameter.default is None and name not in given
        }
    return templates


def shapes_of_inputs(adapter: Adapter) -> dict[str, tuple[str, ...]]:
    """The documented shapes; in place of token ids, an input has vectors."""
    shapes = documented.shapes(adapter.target)
    if takes_ids(adapter.target):
        shapes |= {n: (*shapes[n], "") for n in adapter.inputs if n in shapes}
    return shapes


def templates_of(adapter: Adapter, parameter: inspect.Parameter) -> list[str]:
    """Values for a required argument without features, such as the edges of a graph."""
    name = parameter.name
    others = map(str.lower, names.parameters_by_name(adapter.target))
    if name == "w" and not {"h", "height", "rows"} & {*others}:
        name = "window"  # no width of images, whose height would be given, too
    texts = names.extra_templates(name, parameter.annotation)
    axes = documented.all_shapes(adapter.target).get(name, ())
    if len(axes) == 3 and texts[0].endswith(".T"):
        return [f"{texts[0]}.expand({{batch_size}}, -1, -1)"]  # edges of each graph
    return texts


def queries_of_items(probe: CallProbe) -> Iterator[dict[str, Any]]:
    """Documented shapes: a vector for each batch item, such as the query of a step.

    What has an axis of positions is one input, as keys and as values. Other arguments
    may be made of it by a method.
    """
    adapter = probe.adapter
    shapes = shapes_of_inputs(adapter)
    required = [*adapter.inputs, *(n for n in adapter.call_args if n in shapes)]
    if probe.options.inputs or not set(adapter.inputs) <= {*shapes}:
        return
    ordered = {n: documented.with_batch_first(axes) for n, axes in shapes.items()}
    batch = ordered[required[0]][:1]
    sequences = [n for n in required if documented.has_positions(ordered[n], batch)]
    others = [n for n in required if n not in sequences]
    if not sequences or not any(shapes[n][:1] == batch for n in others):
        return
    if len(sequences) > 1 and required[0] in sequences:
        return  # its queries are a sequence, too
    *keys, values = sequences
    known = names.constructor_sizes(adapter.target, adapter.init_args)
    known |= documented.sizes(shapes[values])
    multiple = documented.multiple(shapes[values])
    width = "{d_model}" + f" // {multiple}" * (multiple > 1)
    # An optional state is zero where it is left out.
    parameters = names.parameters_by_name(adapter.target)
    others += [
        n
        for n, axes in ordered.items()
        if parameters[n].default is None and not documented.has_positions(axes, batch)
        if ordered[values][1] not in axes  # a number for each position
    ]
    integers = documented.integers(adapter.target)
    texts = {
        n: documented.template(n, shapes[n], known, width, n in integers)
        for n in others
    }
    texts |= dict.fromkeys(keys, "{query}")
    for name, (method, given) in documented.made_by_methods(adapter.target).items():
        if name in adapter.call_args and given in sequences:
            made = f"attention.{method}({{query}})"
            # That of a first step may be of its first tokens only.
            is_state = names.CACHE_PATTERN.match(name)
            texts[name] = f"torch.ones_like({made})" if is_state else made
    rest = {n: v for n, v in adapter.call_args.items() if n not in (*texts, values)}
    fields = {"inputs": (values,), "by_keyword": True, "call_args": rest}
    if multiple > 1:
        fields["context_width"] = multiple * (
            adapter.d_model or adapter.heads * adapter.d_k
        )
    for is_pooled in (False, True):
        yield fields | {"extra_args": texts, "is_pooled": is_pooled}


def expanded(text: str, axes: str) -> str:
    """The source text of a tensor that all batch items share, for each of them."""
    sizes = ["{batch_size}" if axis == "b" else "-1" for axis in axes]
    return f"{text}.expand({', '.join(sizes)})"


def context_of_all_items(adapter: Adapter) -> str:
    """The source text of a context that is the same in all calls and batch items."""
    width = str(adapter.context_width or "{d_model}")
    shape = {"b": "1", "l": str(CONTEXT_LENGTH), "h": "{heads}", "d": width}
    sizes = ", ".join(shape[axis] for axis in adapter.layout)
    return expanded(f"seeded_randn(8, {sizes})", adapter.layout) + "{dtype}"


def constant_context(probe: CallProbe) -> Iterator[dict[str, Any]]:
    """The context as nine tokens, the same in all calls, beside an image.

    The pixels may be keys, too. Any other required argument that is named as a context
    is given like this.
    """
    adapter = probe.adapter
    parameters = names.parameters_by_name(adapter.target)
    named = [
        name
        for name in parameters
        if adapter.call_args.get(name, parameters[name].default) is None
        if names.CONTEXT_PATTERN.search(name) and name not in probe.options.call_args
        if not names.MASK_PATTERN.search(name) and name not in adapter.inputs
    ]
    first, *others = [*adapter.inputs, *named]
    if len(others) != 1 or probe.options.inputs:
        return
    axes = shapes_of_inputs(adapter).get(others[0], ("",))
    sizes = names.constructor_sizes(adapter.target, adapter.init_args)
    width = sizes.get(axes[-1], "{d_model}")
    tokens = f"seeded_randn(8, 1, 9, {width}).expand({{batch_size}}, -1, -1){{dtype}}"
    yield {
        "inputs": (first,),
        "by_keyword": True,
        "extra_args": {others[0]: tokens},
        "call_args": {n: v for n, v in adapter.call_args.items() if n not in named},
        "designs": {"sink": f"`{others[0]}`"},
    }


def second_inputs(probe: CallProbe) -> Iterator[dict[str, Any]]:
    """Required arguments of any name as the context: of other lengths, and attended to.

    Required arguments beside it are filled.
    """
    adapter = probe.adapter
    if not adapter.single_input or probe.options.inputs:
        return
    shapes = shapes_of_inputs(adapter)
    for name, parameter in names.parameters_by_name(adapter.target).items():
        value = adapter.call_args.get(name, ...)
        # The name of a size is one of a tensor if the documentation says so.
        is_named = names.value_of(name) and len(shapes.get(name, ())) == 3
        is_named = is_named or names.is_given_to_layer(adapter.target, name)
        if value is not None or not (is_named or names.may_be_context(parameter)):
            continue
        if any("+" in axis for axis in shapes.get(name, ())):
            continue  # its length is that of the input, and more
        others = {n: v for n, v in adapter.call_args.items() if n != name}
        fields = {"inputs": (*adapter.inputs, name), "by_keyword": True, "k_len": 7}
        rest = CallProbe(replace(adapter, call_args=others), probe.options)
        for more in ({"call_args": others}, *filled_arguments(rest)):
            yield fields | more
        if names.CONTEXT_PATTERN.search(adapter.inputs[0]):  # it may come first
            yield {**fields, "inputs": (name, *adapter.inputs), "call_args": others}


def packed_contexts(probe: CallProbe) -> Iterator[dict[str, Any]]:
    """Required arguments as the context, of which the tokens are in several parts.

    That is a list of feature maps, or of sequences, or a tensor that is documented to
    have an axis more than the queries, as several passages of a text have. The first
    input may be a list, too.
    """
    adapter = probe.adapter
    if not adapter.single_input or probe.options.inputs:
        return
    shapes, maps = shapes_of_inputs(adapter), "[{0}.mT.unflatten(2, (1, -1))]"
    first = adapter.inputs[0]
    if documented.says_of(adapter.target, first, r"\blist\b"):
        if names.is_list(adapter.target, first):
            for packing in (maps, "[{0}]"):
                yield {"packing": packing}
                yield {"packing": packing, "is_pooled": True}
    for name in [n for n, value in adapter.call_args.items() if value is None]:
        axes, of_query = (shapes.get(n, ()) for n in (name, adapter.inputs[0]))
        has_parts = len(axes) == 4 and len(of_query) == 3 and axes[-1] == of_query[-1]
        has_parts = has_parts and len({*axes[1:3], of_query[1]}) == 3
        packings = ["{0}[:, None]"] if has_parts else []
        if names.is_list(adapter.target, name):
            packings = [maps, "[{0}]"]
        others = {n: v for n, v in adapter.call_args.items() if n != name}
        rest = CallProbe(replace(adapter, call_args=others), probe.options)
        fields = {"inputs": (*adapter.inputs, name), "by_keyword": True}
        for packing in packings:
            for more in ({"call_args": others}, *filled_arguments(rest)):
                yield fields | {"packing": packing} | more


def packed_inputs(probe: CallProbe) -> Iterator[dict[str, Any]]:
    """The last input as a stack or a list of queries, keys and values, all equal.

    Or with one more axis.
    """
    if len(probe.adapter.inputs) < 3:
        last, target = probe.adapter.inputs[-1], probe.adapter.target
        packings = names.packings(target, last)
        # Three heads would be taken for queries, keys and values.
        axes = documented.all_shapes(target).get(last, ())
        stated = [p for p in packings if p.endswith(f", {place_of_count(axes)})")]
        for packing in stated or packings:
            yield {"packing": packing}
            for fields in filled_arguments(probe):
                yield fields | {"packing": packing}
    if len(probe.adapter.inputs) == 2 and probe.adapter.is_module:
        # One of several contexts, such as images, each with tokens of its own.
        yield {"packing": "{0}[:, None]"}
        for fields in filled_arguments(probe):
            yield fields | {"packing": "{0}[:, None]"}


def place_of_count(axes: tuple[str, ...]) -> int:
    """The axis of queries, keys and values that are documented to be in one tensor."""
    return next((n for n, axis in enumerate(axes) if axis in ("2", "3")), -1)


def named_arguments(probe: CallProbe) -> Iterator[dict[str, Any]]:
    """Positions and a context that may be left out, as far as the signature tells."""
    adapter, given = probe.adapter, probe.options.call_args
    sequences = documented.other_sequences(adapter.target, adapter.inputs[0])
    for parameter in names.parameters_of(adapter.target):
        name = parameter.name
        is_optional = parameter.default is None and name not in given
        if is_optional and names.POSITION_PATTERN.search(name):
            for text in names.position_templates(name):
                yield {"position_args": {name: text}}
        elif is_optional and adapter.single_input and not probe.options.inputs:
            is_named = names.CONTEXT_PATTERN.search(name) or name in sequences
            if is_named and not names.MASK_PATTERN.search(name):
                fields = {"inputs": (*adapter.inputs, name), "by_keyword": True}
                yield fields
                yield {**fields, "packing": "{0}[:, None]"}


def optional_arguments(probe: CallProbe) -> Iterator[dict[str, Any]]:
    """Those arguments, and one of several inputs as a vector for each batch item.

    The vector is a condition, or a query.
    """
    adapter = probe.adapter
    yield from named_arguments(probe)
    if len(adapter.inputs) == 3 and not probe.options.inputs:
        query, key, value = adapter.inputs
        for text in names.extra_templates("", None)[1:]:
            fields = {"inputs": (value,), "by_keyword": True, "is_pooled": True}
            yield fields | {"extra_args": {query: text, key: "{query}"}}
    if len(adapter.inputs) == 2 and not probe.options.inputs:
        shapes = shapes_of_inputs(adapter)
        for one, other in itertools.permutations(adapter.inputs):
            rest = CallProbe(replace(adapter, inputs=(one,)), probe.options)
            is_sequence = len(shapes.get(other, ())) > 2  # and no vector
            texts = names.extra_templates("", None)[1 + is_sequence :]
            for more, text in itertools.product(
                [*filled_arguments(rest)] or [{}], texts
            ):
                extra = {**more.get("extra_args", {}), other: text}
                fields = {**more, "inputs": (one,), "extra_args": extra}
                yield fields | {"by_keyword": True}
                yield fields | {"by_keyword": True, "is_pooled": True}


def needed_together(
    probe: CallProbe, filled: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Optional arguments beside required ones, which are `filled`, or beside a vector.

    The vector is one for each batch item, such as the embedding of a time step. Biases
    of all scores are given like this, too.
    """
    kinds = {names.VECTOR_PATTERN: names.PER_ITEM, names.BIAS_PATTERN: names.BIAS}
    vectors = {
        parameter.name: f"{text}{{dtype}}"
        for parameter in names.parameters_of(probe.adapter.target)
        for pattern, text in kinds.items()
        if parameter.default is None and parameter.name not in probe.options.call_args
        if pattern.fullmatch(parameter.name)
    }
    for required, given in itertools.product(filled or [{}], [vectors, {}]):
        beside = {**required.get("extra_args", {}), **given}
        if given:
            yield {**required, "extra_args": beside}
        if beside or required:
            for fields in named_arguments(probe):
                more = {**required, **fields}
                for kind in ("extra_args", "position_args"):
                    more[kind] = {**required.get(kind, {}), **fields.get(kind, {})}
                yield {**more, "extra_args": {**beside, **more["extra_args"]}}


def mixes_last_axis(script: Script, args: CallArguments) -> bool:
    """Whether values have an influence along the last axis, as those of positions.

    Each feature of a value has an influence on the same feature only.
    """
    value = args.inputs[2]
    usual = script.evaluate(script.call(args))
    other = script.assign(value, f"{value}.clone()")
    script.exec_line(f"{other}[..., 0] += 1")
    changed = script.call(replace(args, inputs=(*args.inputs[:2], other)))
    return not torch.equal(usual[..., 1:], script.evaluate(changed)[..., 1:])


def token_mixing(script: Script, args: CallArguments) -> float:
    """How much more tokens influence each other than batch items do.

    Features before positions, in a function with heads, are less usual: values show it.
    """
    if script.adapter.layout == "bhdl":
        is_likely = len(args.inputs) == 3 and mixes_last_axis(script, args)
        return math.inf if is_likely else 0.0
    early, late = {"l": slice(0, 3)}, {"l": slice(3, None)}
    tokens = influence(script, args, early, late)
    tokens += influence(script, args, late, early)
    items = influence(script, args, {"b": slice(0, 1)}, {"b": slice(1, None)})
    return tokens - items * ("b" in script.adapter.layout)


def count_own_keys(probe: CallProbe) -> int:
    """How many keys there are beside those of the tokens, for each length alike.

    They are learned, as those of a prefix; those that complete a block are not.
    """
    adapter = probe.adapter
    if adapter.fixed_length is not None or adapter.image:
        return 0
    found: list[set[int]] = []
    for length in (5, 6):
        sizes = Sizes(2, length, length, adapter.heads, adapter.d_k)
        script = Script(adapter, sizes, **probe.options.script_options())
        try:
            script.restart()
            args = script.make_arguments()
            with WeightsRecorder() as recorder:
                script.call(args)
        except ScriptError:
            return 0
        found.append({weights.shape[dim] - length for weights, dim in recorder.found})
    return max([0, *(found[0] & found[1])])


def limit_of_length(probe: CallProbe) -> str:
    """The optional argument of a class whose default is the longest length; "" if none.

    Up to that number, calls of each length succeed, and with a larger one, longer ones.
    """
    adapter, target = probe.adapter, probe.adapter.target
    if not isinstance(target, type) or adapter.fixed_length is not None:
        return ""
    for name, parameter in inspect.signature(target).parameters.items():
        n = parameter.default
        if (
            type(n) is not int
            or not 5 < n <= LONGEST_LIMIT
            or name in adapter.init_args
        ):
            continue
        init_args = {**adapter.init_args, name: "320"}
        if (
            probe.try_call(k_len=n + 1) is None
            and all(probe.try_call(k_len=length) for length in (n, n - 1))
            and all(
                probe.try_call(k_len=length, init_args=init_args)
                for length in (5, n + 1, 2 * n + 1)
            )
        ):
            return name
    return ""


def hides_future(script: Script, args: CallArguments, start: int = 3) -> bool:
    """Whether the first three tokens have an influence on later ones, and not back."""
    late, early = {"l": slice(start, None)}, {"l": slice(0, 3)}
    backward = influence(script, args, late, early)
    return backward < 1e-6 < influence(script, args, early, late)


def is_named_causal(adapter: Adapter) -> bool:
    """Whether a name in the code tells of causal attention."""
    return any("causal" in n for n in structure.identifiers(adapter.target))


def is_documented_causal(adapter: Adapter) -> bool:
    """Whether code or text says that one sequence of any length sees the past only."""
    target = adapter.target
    text = source_of(type(target) if isinstance(target, nn.Module) else target)
    return (
        adapter.single_input
        and adapter.fixed_length is None
        and bool(re.search("causal|autoregressive", text, re.IGNORECASE))
        and not re.search("prefix|prompt|cls|class_|latent|bidirectional", text)
    )


def leaks_little(script: Script, args: CallArguments) -> bool:
    """Whether later tokens have an influence, of less than a tenth of that of earlier.

    Hidden scores that a soft cap has made finite have some weight.
    """
    late, early = {"l": slice(3, None)}, {"l": slice(0, 3)}
    backward = influence(script, args, late, early)
    return backward < 0.1 * influence(script, args, early, late)


def is_causal_with_more_heads(probe: CallProbe) -> bool:
    """Whether what says to be causal is so with an even number of heads only."""
    adapter = probe.adapter
    is_named = is_named_causal(adapter) or is_documented_causal(adapter)
    if not is_named or "{heads}" not in adapter.init_args.values():
        return False
    call = probe.try_call(heads=4 * adapter.group_size)
    return call is not None and hides_future(*call)


def is_causal_behind_prefix(script: Script, args: CallArguments) -> bool:
    """Whether the outputs are those of the last tokens, and causal among these.

    The others are a prefix, which all of them see.
    """
    length = script.batch_and_length(args.inputs[0])[1]
    if script.adapter.output_index != "[:, :1]":
        return False  # not one of several outputs
    calls = [
        args,
        script.perturb(args, l=slice(0, 1)),
        script.perturb(args, l=slice(length - 1, None)),
    ]
    usual, *others = (script.evaluate(f"{script.call_source(each)}") for each in calls)
    of_first, of_last = ((y - usual).abs().sum((0, 2)) for y in others)
    return bool(
        1 < usual.shape[1] < length
        and of_last[0] < 1e-6 < of_last[-1]
        and (of_first > 1e-6).all()
    )


def queries_meet(script: Script, args: CallArguments) -> bool:
    """Whether queries that have a context as their keys depend on each other, too."""
    return query_has_influence(script, args, slice(0, 1), slice(1, None))


def queries_are_causal(script: Script, args: CallArguments) -> bool:
    """Whether no query that has a context as its keys depends on the last of five."""
    return not query_has_influence(script, args, slice(4, None), slice(0, 4))


def query_has_influence(
    script: Script, args: CallArguments, changed: slice, observed: slice
) -> bool:
    """Whether the outputs at `observed` depend on the queries at `changed`.

    No query has an influence where there is no context beside it.
    """
    if len(args.inputs) != 2:
        return False
    query, context = args.inputs
    before = script.call(args)
    other = script.assign("query", f"{query}.clone()")
    index, rest = (script.adapter.index(l=part) for part in (changed, observed))
    script.exec_line(f"{other}{index} *= -2")
    after = script.call(replace(args, inputs=(other, context)))
    return not script.evaluate(f"torch.equal({before}{rest}, {after}{rest})")


def order_matters(script: Script, args: CallArguments) -> bool:
    """Whether the last output changes if the tokens before it change their order."""
    adapter = script.adapter
    length = script.batch_and_length(args.inputs[0])[1]
    order = adapter.index(l=[*range(1, length - 1), 0, length - 1])
    last = "" if adapter.is_pooled else adapter.index(l=slice(length - 1, None))
    inputs = [*args.inputs]
    before = script.call(args)
    for role in adapter.key_roles:
        inputs[role] = script.assign(inputs[role], f"{inputs[role]}{order}")
    after = script.call(replace(args, inputs=tuple(inputs)))
    one, other = (script.evaluate(f"{output}{last}") for output in (before, after))
    return not torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def are_tokens_a_set(script: Script, args: CallArguments) -> bool:
    """Whether each output moves with its token if all but the last are reordered."""
    length = script.batch_and_length(args.inputs[0])[1]
    if length < 5 or not script.adapter.single_input or script.adapter.is_pooled:
        return False
    order = script.adapter.index(l=[2, 0, *range(3, length - 1), 1, length - 1])
    moved = tuple(script.assign(name, f"{name}{order}") for name in args.inputs)
    before, after = script.call(args), script.call(replace(args, inputs=moved))
    one, other = script.evaluate(f"{before}{order}"), script.evaluate(after)
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def has_one_axis_of_tokens(script: Script, args: CallArguments) -> bool:
    """Whether weights are of queries and of fewer keys, to which tokens are reduced."""
    with WeightsRecorder() as recorder:
        script.call(args)
    length = script.batch_and_length(args.inputs[-1])[1]
    return all([*found.shape].count(length) == 1 for found, _ in recorder.found)


def weighing_argument(probe: CallProbe) -> str:
    """An argument of numbers for all pairs of tokens that is no bias; "" if none is.

    The same number, added to all scores, has no effect. If it has one, the weights may
    be multiplied by these numbers, or have them added.
    """
    call = probe.try_call()
    if call is None:
        return ""
    script, args = call
    usual = output_of(call)
    for name, text in script.sized_arguments(args, 0, [*args.inputs]).items():
        template = probe.adapter.extra_args.get(name, "")
        if re.search("{length}, {(length|k_len)}", template):
            other = f"(1 - {text}.float()).to({text})"
            if (given := probe.try_call(more={name: other})) is not None:
                output = given[0].evaluate(given[0].call(given[1], **{name: other}))
                if not torch.allclose(usual, output, rtol=1e-3, atol=1e-3):
                    return name
    return ""


def built_by(probe: CallProbe, source: str) -> nn.Module:
    """What an expression builds, with its initial weights and its own dropout."""
    adapter = probe.adapter
    sizes = Sizes(2, 5, 5, adapter.heads, adapter.d_k)
    script = Script(adapter, sizes, **probe.options.script_options())
    script.restart()
    script.namespace[adapter.name] = adapter.target  # it may be named `attention`
    built: nn.Module = script.evaluate(source)
    return built


def is_model_around(adapter: Adapter, options: Options) -> bool:
    """Whether attentions within it may be checked instead of it, or beside it.

    What is named attention is to be checked itself, as is what a call is given for.
    """
    kind = adapter.target if isinstance(adapter.target, type) else type(adapter.target)
    is_described = options.layout or options.inputs or options.mask or options.call_args
    is_attention = names.ATTENTION_PATTERN.search(kind.__name__)
    return not (is_attention or is_described)


def raise_if_model(probe: CallProbe, message: str) -> None:
    """Raise `ModelError` if what could not be called is a model with attentions in it.

    It may embed its input, or be called in a way that is unknown. It is built anew,
    with the sizes and the dropout that it has by default.
    """
    adapter, options = probe.adapter, probe.options
    if not adapter.is_module:
        return
    source = adapter.build_expression(Sizes(2, 5, 5, adapter.heads, adapter.d_k))
    if isinstance(adapter.target, nn.Module):
        source = adapter.name
    elif not options.init_args:
        parameters = inspect.signature(adapter.target).parameters.values()
        has_required = any(names.required_by_name(parameters).values())
        source = source if has_required else f"{adapter.name}()"
    model = built_by(probe, source)
    if probe.takes_ids or structure.embeds_pixels(model):
        takes = "token ids" if probe.takes_ids else "images"
        why = f"takes {takes}, and no vectors"
        message = (
            f"`{adapter.name}` takes {takes}, which it embeds, and no vectors; check "
            f"the attentions within it with `--inside`, or a function of vectors"
        )
        raise ModelError(message, why, model, source, adapter.imports, probe.takes_ids)
    if is_model_around(adapter, options) and structure.paths_of_attention(model):
        why = "could not be called itself"
        raise ModelError(message, why, model, source, adapter.imports)
