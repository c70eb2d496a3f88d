r"""# Options and call adapter

An `Adapter` describes how one attention implementation is called, so that each law is
written once. Implementations differ in their signatures: batch first or sequence first,
one input or three, a bool mask in which True means *may attend* or *is ignored*, an
additive mask, lengths, or no mask. `Options` are the facts that you give yourself; [the
others are inferred](infer.md).

The adapter writes each call as *source text*. A law runs the very lines that it prints
when it fails, so a counterexample cannot differ from what was executed.

A shape is written with one letter for each axis: `b` batch item, `l` position, `h`
head, `d` feature, `q` and `k` position of the query and of the key, `n` batch items
times heads flattened into one axis, `1` an axis of size 1. So `bld` is batch first, and
a mask `b1qk` broadcasts over its axis for heads.

Source: the conventions are those in the table of
[differences](../../compare/differences.md).
"""

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from attention_laws.law import first_line

# Layouts of the inputs that have a name. Any other order of the letters can be given,
# too.
LAYOUTS = {
    "batch_first": "bld",
    "sequence_first": "lbd",
    "heads_first": "bhld",
    "heads_last": "blhd",
    "unbatched": "ld",
}

# Layouts of images and videos, and of the sequences of their pixels.
IMAGES = {
    "image": "bdl",
    "image_channels_last": "bld",
    "image_rows_first": "lbd",
    "video": "bdl",
    "video_channels_last": "bld",
    "video_frames_first": "bdl",
    "frames": "bdl",
    "frames_channels_last": "bld",
    "frames_frames_first": "bdl",
}

AXES = {
    "b": "batch items",
    "n": "batch items and heads",
    "l": "positions",
    "q": "queries",
    "k": "keys",
    "p": "pixels, as rows and columns",
    "r": "rows",
    "c": "columns",
    "h": "heads",
    "o": "outputs",
    "d": "features",
}

# How the value of a mask argument encodes which keys a query may attend to.
MASK_KINDS = {
    "attend": "bool, True = may attend",
    "ignore": "bool, True = is ignored",
    "attend_int": "int, 1 = may attend",
    "ignore_int": "int, 1 = is ignored",
    "additive": "added to the scores, 0 or minus infinity",
    "additive_min": "added to the scores, 0 or the least finite number",
    "lengths": "number of leading keys that may be attended to",
    "relative_lengths": "number of leading keys, divided by that of all",
    "causal": "bool flag, True = causal",
}

POSITIONS = ("none", "alibi", "rotary", "relative", "learned")

# The projections that the option `projections` can name.
PROJECTIONS = ("query", "key", "value", "out", "fused")


class CallError(ValueError):
    """The module could not be called; the message names the option to set."""


class ModelError(CallError):
    """A model cannot be called with vectors; attentions within it may.

    `why` is a relative clause, such as "takes images, and no vectors". `source` is the
    expression that builds the model, with the lines that it `imports`.
    """

    def __init__(
        self,
        message: str,
        why: str,
        model: Any,
        source: str,
        imports: str,
        takes_ids: bool = False,
    ) -> None:
        super().__init__(message)
        self.why = why
        self.takes_ids = takes_ids
        self.model = model
        self.source = source
        self.imports = imports


class UnsupportedMaskError(ValueError):
    """A mask that this mask argument cannot express."""


@dataclass(frozen=True)
class Sizes:
    r"""The sizes of one call.

    >>> print(Sizes(2, 3, 5, heads=3, d_k=4))
    batch_size=2, q_len=3, k_len=5, heads=3, d_k=4
    """

    batch_size: int
    q_len: int
    k_len: int
    heads: int
    d_k: int

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in vars(self).items())

    def lengths(self) -> dict[str, int]:
        r"""The length of each axis of returned weights, by its letter.

        >>> Sizes(2, 3, 5, heads=7, d_k=4).lengths()
        {'b': 2, 'h': 7, 'q': 3, 'k': 5, 'n': 14}
        """
        lengths = {"b": self.batch_size, "h": self.heads, "q": self.q_len}
        return lengths | {"k": self.k_len, "n": self.batch_size * self.heads}


@dataclass(frozen=True)
class MaskArgument:
    r"""One argument of the attention that hides keys, and how it encodes a mask.

    `kind` is one of `MASK_KINDS`, `axes` the letters of the mask's axes. The laws use
    one bool mask, `[q_len, k_len, batch_size]`, True = may attend; a mask argument
    writes it in its own encoding.

    >>> allowed = torch.tensor([[1, 0], [1, 1]]).bool()[..., None]
    >>> MaskArgument("mask", "attend", "qk").to_source(allowed)
    'torch.tensor([[True, False], [True, True]])'
    >>> MaskArgument("key_padding_mask", "ignore", "bk").to_source(allowed[1:])
    'torch.tensor([[False, False]])'
    >>> MaskArgument("attn_mask", "additive", "b1qk").to_source(allowed)
    'torch.tensor([[[[0.0, -torch.inf], [0.0, 0.0]]]])'
    >>> MaskArgument("valid_lens", "lengths", "bq").to_source(allowed)
    'torch.tensor([[1, 2]])'
    >>> MaskArgument("wav_lens", "relative_lengths", "b").to_source(allowed[:1])
    '(torch.tensor([1]) / 2)'
    >>> MaskArgument("is_causal", "causal", "").to_source(allowed)
    'True'
    >>> MaskArgument("pixels", "attend", "bp").to_source(allowed[:1], sides=(2, 1))
    'torch.tensor([[True, False]]).unflatten(1, (2, 1))'
    >>> MaskArgument("frames", "attend", "br").to_source(allowed[:1], sides=(2, 1))
    'torch.tensor([[True, False]])'
    >>> MaskArgument("num_frames", "lengths", "br").to_source(allowed[:1], sides=(2, 1))
    'torch.tensor([1])'
    """

    name: str
    kind: str
    axes: str
    at_end: bool = False  # whether it is documented to hide the last keys only
    # Whether causal queries are the last of the keys that it counts, as in a cache.
    moves_queries: bool = False

    def to_source(
        self, allowed: Tensor, heads: int = 1, sides: tuple[int, ...] = ()
    ) -> str:
        """The value of this argument for a mask, as source text.

        The keys may be the pixels of an image with these `sides`. Raises
        `UnsupportedMaskError` where this argument cannot express the mask.
        """
        if {*"prc"} & {*self.axes}:
            return self.to_image_source(allowed, heads, sides)
        if self.kind == "causal":
            q_len, k_len, _ = allowed.shape
            causal = torch.ones(q_len, k_len, dtype=torch.bool).tril()
            if q_len == k_len and allowed.equal(causal[..., None].expand_as(allowed)):
                return "True"
            raise UnsupportedMaskError(f"`{self.name}` can only express a causal mask")

        if self.counts_keys:
            lengths = allowed.sum(dim=1, keepdim=True)
            order = torch.arange(allowed.shape[1])[:, None]
            if not allowed.equal(order < lengths):
                raise UnsupportedMaskError(
                    f"`{self.name}` can only hide the last keys of a sequence"
                )
            text = f"torch.tensor({self.to_axes(lengths).tolist()})"
            return text if self.kind == "lengths" else f"({text} / {len(order)})"

        if self.at_end and bool((allowed[:, 1:] & ~allowed[:, :-1]).any()):
            raise UnsupportedMaskError(f"`{self.name}` hides keys at the end only")
        values = self.to_axes(allowed)
        if values.numel() > 1000 and (text := self.to_short_source(allowed)):
            # A literal of so many entries would take longer than the attention.
            if self.kind.startswith("ignore"):
                text = f"~{text}"
            if self.kind.endswith("_int"):
                text = f"({text}).long()"
            elif self.kind in ("additive", "additive_min"):
                text = f"torch.where({text}, 0.0, -torch.inf)"
        else:
            text = self.to_literal(values)

        # All heads have the same mask. Writing it once keeps the text short.
        if "h" in self.axes:
            sizes = [heads if axis == "h" else -1 for axis in self.axes]
            # With memory of its own for each head, as the mask of a user has.
            text += f".expand({', '.join(map(str, sizes))}).contiguous()"
        if "n" in self.axes:
            text += f".repeat_interleave({heads}, dim={self.axes.index('n')})"
        return text

    @property
    def counts_keys(self) -> bool:
        """Whether it is a number of leading keys, and no mask of each."""
        return self.kind in ("lengths", "relative_lengths")

    def to_literal(self, values: Tensor) -> str:
        """A mask with the axes of this argument, written in full."""
        if self.kind.startswith("ignore"):
            values = ~values
        if self.kind.endswith("_int"):
            values = values.long()
        elif self.kind in ("additive", "additive_min"):
            # For "additive_min" the script clamps to the least number of its dtype.
            values = torch.zeros(values.shape).masked_fill(~values, -torch.inf)
        return f"torch.tensor({values.tolist()})".replace("-inf", "-torch.inf")

    def to_short_source(self, allowed: Tensor) -> str:
        """An expression for a causal mask, or one that hides the last keys.

        Empty for any other mask.
        """
        q_len, k_len, batch_size = allowed.shape
        mask, visible = allowed[..., 0], int(allowed[0, :, 0].sum())
        if not allowed.equal(mask[..., None].expand_as(allowed)):
            return ""
        if mask.equal(torch.ones(q_len, k_len, dtype=torch.bool).tril()):
            text = f"torch.ones({q_len}, {k_len}, dtype=torch.bool).tril()"
        elif mask.equal((torch.arange(k_len) < visible).expand_as(mask)):
            text = f"(torch.arange({k_len}) < {visible}).expand({q_len}, {k_len})"
        else:
            return ""
        text += "" if "q" in self.axes else "[0]"
        if self.axes.find("k") < self.axes.find("q"):
            text += ".mT"
        index = ", ".join(":" if axis in "qk" else "None" for axis in self.axes)
        sizes = [batch_size if axis in "bn" else -1 for axis in self.axes]
        return f"{text}[{index}].expand({', '.join(map(str, sizes))})"

    def can_express(self, allowed: Tensor, sides: tuple[int, ...] = ()) -> bool:
        """Whether this argument can express a mask."""
        try:
            self.to_source(allowed, sides=sides)
        except UnsupportedMaskError:
            return False
        return True

    def to_image_source(
        self, allowed: Tensor, heads: int, sides: tuple[int, ...]
    ) -> str:
        """The value of a mask of pixels, of rows or of columns, as source text."""
        letter = next(axis for axis in self.axes if axis in "prc")
        axis = "" if self.counts_keys else "k"
        of_keys = replace(self, axes=self.axes.replace(letter, axis))
        if letter == "p":
            image = f".unflatten({self.axes.index('p')}, {sides})"
            return of_keys.to_source(allowed, heads) + image
        grid = allowed.reshape(len(allowed), *sides, -1)
        other = 1 + (letter == "r")
        first = grid.narrow(other, 0, 1)
        if not grid.equal(first.expand_as(grid)):
            text = f"`{self.name}` hides {AXES[letter]}, and no single pixels"
            raise UnsupportedMaskError(text)
        return of_keys.to_source(first.squeeze(other), heads)

    def to_axes(self, values: Tensor) -> Tensor:
        """Permute `[q_len, k_len, batch_size]` to `axes`; axes of heads have size 1.

        Raises `UnsupportedMaskError` where the values differ along an axis that is not
        among `axes`.
        """
        axes = self.axes.replace("n", "b")
        for dim, axis in enumerate("qkb"):
            if axis not in axes:
                first = values.narrow(dim, 0, 1)
                if not values.equal(first.expand_as(values)):
                    raise UnsupportedMaskError(
                        f"`{self.name}` has no axis for {AXES[axis]}"
                    )
                values = first
        present = ["qkb".index(axis) for axis in axes if axis in "qkb"]
        absent = [dim for dim in range(3) if dim not in present]
        values = values.permute(*present, *absent).flatten(len(present) - 1)
        for dim, axis in enumerate(axes):
            if axis in "1h":
                values = values.unsqueeze(dim)
        return values


@dataclass(frozen=True)
class Fact:
    """One fact about the implementation; `source`: "given", "inferred" or "assumed"."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Adapter:
    r"""How one attention implementation is built, called and read.

    `target` is a function, a module, or a module class. A class is built anew at each
    size, so that a counterexample can shrink. `attention_laws.infer.infer_adapter`
    makes adapters.
    """

    target: Any
    name: str  # the name of the target in a counterexample
    imports: str  # the lines that import it there
    init_args: Mapping[str, str]  # arguments of the constructor, as source text
    # Classes that `init_args` name, such as that of a config.
    namespace: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "bld"
    inputs: tuple[str, ...] = ("x",)
    by_keyword: bool = False  # whether inputs are passed by keyword
    masks: tuple[MaskArgument, ...] = ()
    required_mask: MaskArgument | None = None  # the mask that has no default
    call_args: Mapping[str, Any] = field(default_factory=dict)  # passed with each call
    # Arguments that depend on the length, such as position ids, as source text with the
    # names of `Script.argument_sizes`.
    position_args: Mapping[str, str] = field(default_factory=dict)
    # Other required arguments, such as the height and the width of an image, likewise.
    extra_args: Mapping[str, str] = field(default_factory=dict)
    # Arguments, [batch, length], that may give positions, or the parts of a sequence;
    # [length, batch], if `ids_are_turned`.
    position_ids: str = ""
    segment_ids: str = ""
    ids_are_turned: bool = False
    is_pooled: bool = False  # whether its outputs are not one for each token
    # One of `IMAGES`. Images, [batch_size, channels, height, width], channels
    # last, or rows first, [height, width, batch_size, channels], have `image_height`
    # rows, or only one column if it is 0, or are squares if the length is fixed. Videos
    # have one frame, or frames of one pixel.
    image: str = ""
    image_height: int = 1
    video_frames: int = 1
    input_key: str = ""  # of the input in a dict, where it takes one
    packing: str = ""  # how the last input is repeated, as keys and as values
    fixed_length: int | None = None  # the only length that it accepts
    least_length: int = 1  # the shortest, as of patches
    output_index: str = ""  # where the output is in the result: "", or such as "[0]"
    # Where the attention weights are: "[1]" or "result.attn", or an attribute ".attn".
    weights_source: str = ""
    weights_axes: str = ""  # their letters, such as "bhqk"
    weights_args: Mapping[str, str] = field(default_factory=dict)  # to ask for them
    queries_first: bool = False  # whether its softmax has queries in front of heads
    heads: int = 3
    least_heads: int = 1  # 2 where half of them attend in another way
    d_k: int = 4
    d_model: int | None = None  # the width of the input, where it is not heads * d_k
    context_width: int | None = None  # of keys and values, where it is another one
    group_size: int = 1  # query heads that share one head of keys and values
    fixed_size: bool = False  # whether heads and d_k cannot shrink
    free_heads: bool = False  # whether it can be built with other numbers of heads
    cross_attention: bool = False  # whether q_len and k_len may differ
    one_length: bool = False  # whether queries are as many as keys, in blocks
    mixes_queries: bool = False  # whether queries of their own attend to each other
    causal_queries: bool = False  # whether they do so causally, as in a decoder
    causal: bool = False
    needs_causal_mask: bool = False  # which one of queries and keys has to be
    window: int | None = None
    softcap: float | None = None  # the limit of the scores
    designs: Mapping[str, str] = field(
        default_factory=dict
    )  # of `structure.designs_of`
    positions: str = "none"  # one of `POSITIONS`, or "unknown"
    projections: Mapping[str, str] = field(default_factory=dict)
    # Argument of the cache, and index of the new one in the result. The index is "" if
    # the cache is modified in place, and both are if the module stores it.
    cache: tuple[str, str] | None = None
    cache_context: str = ""  # in which it takes a cache, such as "torch.no_grad()"
    reset: str = ""  # the method that is called before each call, as it stores a state
    # An optional context, and the mask that is of it and not of the input, by its name.
    masked_context: tuple[str, str] | None = None
    memory: str = ""  # the argument that takes the tokens before the input
    memory_maker: str = "{}"  # what is made of the tokens for it
    # The context of a decoder, which is among `extra_args`, and the masks of it.
    decoder_context: str = ""
    context_masks: tuple[MaskArgument, ...] = ()
    context_cache: str = ""  # the argument for what was projected of the context
    context_cache_index: str = ""  # where the first call returns it, if it does
    # What the first call gets, or what is called before by a module that stores it.
    empty_cache: str = "None"
    decode_method: str = ""  # that takes the cache, where `forward` does not
    prompted: bool = False  # whether `forward` takes the tokens before those
    # The place from which on it takes one token at a time: 0, or 1 after the prompt.
    single_from: int | None = None
    cache_args: Mapping[str, str] = field(default_factory=dict)  # with each piece
    reproducible_training: bool = True  # whether dropout is all that is random
    unused_parameters: tuple[str, ...] = ()  # declared to receive no gradient
    facts: tuple[Fact, ...] = ()

    @property
    def single_input(self) -> bool:
        """Whether it is self-attention with one input, not query, key and value."""
        return len(self.inputs) == 1

    @property
    def queries_are_keys(self) -> bool:
        """Whether query and key of one position are one token.

        So they are in windows of three inputs: elsewhere, its window may be padding.
        """
        is_local = "window" in self.designs and not self.cross_attention
        return self.single_input or is_local

    @property
    def image_axes(self) -> int:
        """How many axes of positions the input has, if it is an image or a video."""
        kind = self.image.partition("_")[0]
        return {"": 0, "image": 2, "video": 3, "frames": 3}[kind]

    @property
    def gets_sides(self) -> bool:
        """Whether the rows and columns of an image are arguments beside its pixels."""
        given = "".join(self.extra_args.values())
        return "{rows}" in given and "{columns}" in given

    @property
    def has_grid(self) -> bool:
        """Whether the tokens are in rows and columns, as those of an image."""
        return bool(self.image) or self.gets_sides

    @property
    def key_roles(self) -> list[int]:
        """Which inputs hold keys or values: the one input, the context, or two."""
        return [0] if self.single_input else [*range(1, len(self.inputs))]

    @property
    def is_module(self) -> bool:
        """Whether it has parameters and modes; otherwise it is a function."""
        return isinstance(self.target, nn.Module | type)

    def build_expression(self, sizes: Sizes) -> str:
        """The expression that makes the attention for these sizes."""
        if isinstance(self.target, type):
            named = self.named_sizes(sizes)
            args = [f"{k}={v.format(**named)}" for k, v in self.init_args.items()]
            return f"{self.name}({', '.join(args)})"
        if isinstance(self.target, nn.Module):
            return f"detached_copy({self.name})"
        return self.name

    def named_sizes(self, sizes: Sizes) -> dict[str, int]:
        """The sizes that a constructor argument may refer to, by name."""
        return {
            **vars(sizes),
            "kv_heads": max(1, sizes.heads // self.group_size),
            "d_model": self.d_model or sizes.heads * sizes.d_k,
            # So narrow that it ends within short sequences.
            "window": self.window or 4,
        }

    def input_shape(self, sizes: Sizes, role: int) -> list[int]:
        """The shape of an input; role 0 is the query, 1 the key, 2 the value."""
        named = self.named_sizes(sizes)
        width = sizes.d_k if "h" in self.layout else named["d_model"]
        size = {
            "b": sizes.batch_size,
            "l": sizes.k_len if role else sizes.q_len,
            "h": named["kv_heads"] if role else sizes.heads,
            "d": self.context_width or width if role or self.is_pooled else width,
        }
        return [size[axis] for axis in self.layout]

    def is_like_query(self, shape: torch.Size, query: torch.Size) -> bool:
        """Whether a tensor of this shape may be the output, whose width may differ."""
        if self.is_pooled:
            if "b" not in self.layout:  # what has as many rows has one for each token
                return shape[:1] == (1,) and len(shape) == 2 and len(query) == 2
            if self.layout == "lbd":
                return shape == query[1:2] or shape[:-1] in ((query[1],), (1, query[1]))
            # A number, or one vector, or one for each of its own, learned queries.
            return len(shape) in (1, 2, 3) and shape[0] == query[0]
        pairs = zip(self.layout, shape, query, strict=False)
        return len(shape) == len(query) and all(
            size == expected
            for axis, size, expected in pairs
            if axis != "d" or "h" in self.layout
        )

    def grid(self, length: int) -> tuple[int, int]:
        """Rows and columns of the images that `length` pixels make."""
        length //= self.video_frames
        side = math.isqrt(length)
        rows = self.image_height or length
        rows = side if self.fixed_length == side * side else rows
        return rows, length // rows

    def to_image(self, length: int) -> str:
        r"""How an input is made an image or a video, as source text.

        >>> Adapter(print, "print", "", {}, layout="bdl", image="video").to_image(5)
        '.unflatten(2, (1, 1, 5))'
        """
        source = f".unflatten({self.layout.index('l')}, {self.sides(length)})"
        return f"{source}.transpose(1, 2)" if self.has_frames_first else source

    @property
    def has_frames_first(self) -> bool:
        """Whether the frames of a video are in front of its channels."""
        return self.image.endswith("frames_first")

    def sides(self, length: int) -> tuple[int, ...]:
        """Frames, if it is a video, rows and columns that `length` pixels make."""
        if self.image.startswith("frames"):
            return length, 1, 1
        return (self.video_frames,) * (self.image_axes - 2) + self.grid(length)

    def from_image(self) -> str:
        """How an image or a video is made a sequence, as source text."""
        first = self.layout.index("l")
        source = f".flatten({first}, {first + self.image_axes - 1})"
        return f".transpose(1, 2){source}" if self.has_frames_first else source

    @property
    def filled(self) -> list[str]:
        """Required tensors of unknown names: one of them may be what is attended to."""
        return [n for n, text in self.extra_args.items() if "zeros_like" in text]

    def effective_mask(
        self, allowed: Tensor, mask: MaskArgument | None = None
    ) -> Tensor:
        """A mask combined with the attention's built-in causality and window."""
        q_len, k_len = allowed.shape[:2]
        ones = torch.ones(q_len, k_len, dtype=torch.bool)
        if self.causal and mask is not None and mask.moves_queries:
            hidden = (~allowed).sum(dim=1, keepdim=True)
            order = torch.arange(k_len)[:, None] + hidden
            allowed = order <= torch.arange(k_len - q_len, k_len)[:, None, None]
        elif self.causal:
            allowed = without_future(allowed)
        if self.window is not None:
            farthest = self.window - 1
            allowed = allowed & ones.triu(k_len - q_len - farthest)[..., None]
            allowed = allowed & ones.tril(k_len - q_len + farthest)[..., None]
        return allowed

    def index(self, **picked: int | slice | list[int]) -> str:
        r"""The index of positions (`l`) and batch items (`b`), as source text.

        >>> adapter = Adapter(print, "print", "", {}, layout="bhld")
        >>> adapter.index(l=slice(3, None), b=1)
        '[1, :, 3:]'
        """
        parts = [index_source(picked.get(axis, slice(None))) for axis in self.layout]
        while parts and parts[-1] == ":":
            parts.pop()
        return f"[{', '.join(parts)}]" if parts else ""


def without_future(allowed: Tensor) -> Tensor:
    r"""A mask combined with a causal one, in which the last query is at the last key.

    >>> without_future(torch.ones(2, 3, 1).bool())[..., 0].int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    q_len, k_len = allowed.shape[:2]
    past = torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)
    return allowed & past[..., None]


def index_source(index: int | slice | list[int]) -> str:
    r"""A number, a slice or a list of numbers, as written between brackets.

    >>> index_source(slice(2, None)), index_source([0, 2]), index_source([1, 2, 3])
    ('2:', '[0, 2]', '1:4')
    """
    if isinstance(index, list) and len(index) > 2:
        first, stop = index[0], index[-1] + 1
        if index == [*range(first, stop)]:
            index = slice(first, stop)
    if isinstance(index, slice):
        ends = ("" if end is None else str(end) for end in (index.start, index.stop))
        return ":".join(ends)
    return str(index)


@dataclass(frozen=True)
class Options:
    r"""The facts about an implementation that you give instead of having them inferred.

    `headnotes check` has a flag for each option, `check` and the pytest fixture take
    them as keyword arguments.

    - `layout`: one of `LAYOUTS` or `IMAGES`, or its letters;
    - `inputs`: the name of the one input, the names of input and context, or those of
      query, key and value;
    - `mask`: kind and axes of each mask argument, such as `{"attn_mask": "ignore:qk"}`;
      either part may be left out; `+` separates two encodings of one argument;
      `{"none": ""}` means that there is no mask;
    - `init_args`: arguments of the constructor;
    - `call_args`: arguments that are passed with each call;
    - `heads`, `kv_heads`, `d_model`: sizes, where they cannot be inferred;
    - `causal`: whether it is causal without a mask;
    - `window`: the number of keys that a query attends to in a sliding window, its own
      included;
    - `positions`: its positional encoding, one of `POSITIONS`;
    - `weights`: where the attention weights are, such as `"[1]"` of the result or
      `".attn"`, with their axes after a colon; `"none"` to leave them unchecked;
    - `projections`: names of the submodules for "query", "key", "value" and "out", or
      "fused"; with `:h3d` appended if each head has its three parts side by side;
    - `cache`: the argument that takes the KV cache, and the index of the new cache in
      the result;
    - `unused_parameters`: parameters that are meant to receive no gradient;
    - `dtype`, `device`, `seed`: of inputs and parameters.

    Raises `CallError`, a `ValueError`, for an invalid value.

    >>> try:
    ...     Options(layout="lbd", heads=6, kv_heads=4)
    ... except CallError as error:
    ...     print(error)
    `heads` (=6) must be divisible by `kv_heads` (=4)
    """

    layout: str = ""
    inputs: tuple[str, ...] = ()
    mask: Mapping[str, str] = field(default_factory=dict)
    init_args: Mapping[str, Any] = field(default_factory=dict)
    call_args: Mapping[str, Any] = field(default_factory=dict)
    heads: int | None = None
    kv_heads: int | None = None
    d_model: int | None = None
    causal: bool | None = None
    window: int | None = None
    positions: str = ""
    weights: str = ""
    projections: Mapping[str, str] = field(default_factory=dict)
    cache: tuple[str, str] | None = None
    unused_parameters: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            # True == 1 and 1.0 == 1: the type counts, too.
            given = type(value) is not type(option.default) or value != option.default
            is_valid, expected = VALIDATORS[option.name]
            if given and not is_valid(value):
                raise CallError(f"`{option.name}` (={value!r}) must be {expected}")

        if self.heads and self.kv_heads:
            check_divisible("heads", self.heads, "kv_heads", self.kv_heads)

        try:
            torch.empty(1, device=self.device).item()
        except (AssertionError, RuntimeError) as error:
            raise CallError(
                f"`device` (={self.device!r}) cannot compute here: {first_line(error)}"
            ) from error

    def script_options(self) -> dict[str, Any]:
        """The options that every script takes."""
        return {"seed": self.seed, "dtype": self.dtype, "device": self.device}


def check_divisible(larger: str, whole: int, smaller: str, part: int) -> None:
    r"""Raise `CallError` unless one option is divisible by another.

    >>> check_divisible("d_model", 12, "heads", 3)
    """
    if whole % part:
        raise CallError(
            f"`{larger}` (={whole}) must be divisible by `{smaller}` (={part})"
        )


def is_size(value: Any) -> bool:
    r"""Whether it is a positive int. A bool is none, though Python makes it a subclass.

    >>> is_size(3), is_size(0), is_size(True)
    (True, False, False)
    """
    return type(value) is int and value > 0


def are_strings(value: Any) -> bool:
    r"""Whether it is a list or tuple of strings.

    >>> are_strings(("query", "key")), are_strings("query")
    (True, False)
    """
    return isinstance(value, tuple | list) and all(isinstance(v, str) for v in value)


def is_layout(value: Any) -> bool:
    r"""Whether it is the name of a layout, or letters for the axes of an input.

    >>> is_layout("sequence_first"), is_layout("lbd"), is_layout("bqk")
    (True, True, False)
    """
    return isinstance(value, str) and (
        value in (*LAYOUTS, *IMAGES)
        or (len({*value}) == len(value) and {*"ld"} <= {*value} <= {*"blhd"})
    )


def are_mask_encodings(value: Any) -> bool:
    r"""Whether it maps names to `KIND:AXES`; either part may be missing.

    >>> are_mask_encodings({"mask": "ignore:bk"}), are_mask_encodings({"mask": "seek"})
    (True, False)
    """
    if not (isinstance(value, Mapping) and are_strings([*value, *value.values()])):
        return False
    encodings = [each for text in value.values() for each in text.split("+")]
    parts = [encoding.partition(":") for encoding in encodings]
    return all(
        kind in ("", *MASK_KINDS) and {*axes} <= {*"bhqkn1"} for kind, _, axes in parts
    )


def are_literals(value: Any) -> bool:
    r"""Whether it maps names to values that a counterexample can write as literals.

    >>> are_literals({"bias": False}), are_literals({"act": print})
    (True, False)
    """
    if not (isinstance(value, Mapping) and are_strings([*value])):
        return False
    # The repr of a torch.dtype, such as torch.float64, is valid source, too.
    literals = [v for v in value.values() if not isinstance(v, torch.dtype)]
    try:
        for literal in literals:
            ast.literal_eval(repr(literal))
    except (SyntaxError, ValueError):
        return False
    return True


# For each option, a test of its value and the end of the error message. Defaults are
# not tested.
VALIDATORS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "layout": (
        is_layout,
        f"one of {', '.join([*LAYOUTS, *IMAGES])}, or made of the letters b, l, h, d",
    ),
    "inputs": (
        lambda x: are_strings(x) and len(x) in (0, 1, 2, 3),
        "the name of one input, or those of input and context, or of query, key and "
        "value",
    ),
    "mask": (
        are_mask_encodings,
        f"such as {{'attn_mask': 'ignore:qk'}}; a kind is one of "
        f"{', '.join(MASK_KINDS)}, and axes are among b, h, q, k, n, 1",
    ),
    "init_args": (
        are_literals,
        "names with numbers, strings, lists, True, False or None; for any other "
        "argument, build the module yourself and check the instance",
    ),
    "call_args": (
        are_literals,
        "names with numbers, strings, lists, True, False or None",
    ),
    "heads": (is_size, "a positive int"),
    "kv_heads": (is_size, "a positive int"),
    "d_model": (is_size, "a positive int"),
    "causal": (lambda x: type(x) is bool, "True or False"),
    "window": (is_size, "a positive int"),
    "positions": (lambda x: x in POSITIONS, f"one of {', '.join(POSITIONS)}"),
    "weights": (
        lambda x: (
            isinstance(x, str)
            and re.fullmatch(r"none|(\[.+\]|\.[\w.]+)(:[bhqkn]+)?", x) is not None
        ),
        "an index or attribute such as '[1]' or '.attn', with axes as in '[1]:bhqk', "
        "or 'none'",
    ),
    "projections": (
        lambda x: (
            isinstance(x, Mapping)
            and are_strings([*x.values()])
            and {*x} <= {*PROJECTIONS}
        ),
        f"names of submodules, for some of {', '.join(PROJECTIONS)}",
    ),
    "cache": (
        lambda x: are_strings(x) and len(x) == 2,
        "an argument and an index of the result, such as ('past', '[1]')",
    ),
    "unused_parameters": (are_strings, "names of parameters"),
    "dtype": (
        lambda x: isinstance(x, torch.dtype) and x.is_floating_point,
        "a floating-point dtype of torch",
    ),
    "device": (lambda x: isinstance(x, str), "the name of a device, such as 'cuda'"),
    "seed": (lambda x: type(x) is int and 0 <= x < 2**32, "an int from 0 to 2**32 - 1"),
}
