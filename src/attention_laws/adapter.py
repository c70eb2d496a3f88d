r"""# What may be said about an attention

What `headnotes check` cannot find out, or should not, is said by options: flags of the
command line, arguments of `check`, and of the fixture. They are the same, and are read
once, here: what an option cannot mean is refused before anything is called.

Source: the [dictionary](names.md) of names says what is found out without them.
"""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from attention_laws.law import first_line

# The names that people use for what the letters say.
LAYOUTS = {
    "batch_first": "bld",
    "sequence_first": "lbd",
    "heads": "bhld",
    "heads_last": "blhd",
    "unbatched": "ld",
}

# How a mask may say it. A flag only ever says "causal".
KINDS = ("keep", "hide", "additive", "minimum", "lengths", "flag")

POSITIONS = ("none", "alibi", "rotary", "learned")


class Inexpressible(ValueError):  # noqa: N818
    """A mask that this argument has no words for."""


@dataclass(frozen=True)
class Sizes:
    r"""The sizes of one question.

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


@dataclass(frozen=True)
class Mask:
    r"""One argument that says which keys may be read.

    `kind` is one of `KINDS`: in a bool mask True means "may" (`keep`) or "must not"
    (`hide`); an `additive` one holds 0 and minus infinity, a `minimum` one 0 and the
    least finite number; `lengths` count the leading keys that may be read; a `flag`
    asks for a causal mask.

    >>> keep = torch.tensor([[1, 0], [1, 1]]).bool()[..., None]
    >>> Mask("mask", "keep", "qk").spell(keep)
    'torch.tensor([[True, False], [True, True]])'
    >>> Mask("attn_mask", "additive", "b1qk").spell(keep)
    'torch.tensor([[[[0.0, -torch.inf], [0.0, 0.0]]]])'
    >>> Mask("valid_lens", "lengths", "bq").spell(keep)
    'torch.tensor([[1, 2]])'
    >>> Mask("is_causal", "flag", "").spell(keep)
    'True'
    """

    name: str
    kind: str
    axes: str

    def spell(self, keep: Tensor, heads: int = 1) -> str:
        """`keep`, `[q_len, k_len, batch_size]`, as an expression for this argument.

        Raises `Inexpressible` where the argument cannot say it.
        """
        if self.kind == "flag":
            causal = torch.ones(keep.shape[:2], dtype=torch.bool).tril()
            if keep.shape[0] == keep.shape[1] and keep.equal(
                causal[..., None].expand_as(keep)
            ):
                return "True"
            raise Inexpressible(f"`{self.name}` only says 'causal'")
        if self.kind == "lengths":
            lengths = keep.sum(dim=1, keepdim=True)
            order = torch.arange(keep.shape[1])[:, None]
            if not keep.equal(order < lengths):
                raise Inexpressible(f"`{self.name}` only allows the first few keys")
            return f"torch.tensor({self.arrange(lengths, heads).tolist()})"
        values = self.arrange(keep, heads)
        if self.kind == "hide":
            values = ~values
        elif self.kind in ("additive", "minimum"):
            values = torch.zeros(values.shape).masked_fill(~values, -torch.inf)
        text = f"torch.tensor({values.tolist()})".replace("-inf", "-torch.inf")
        # One copy is enough to read; the others are said.
        if "h" in self.axes:
            sizes = [heads if axis == "h" else -1 for axis in self.axes]
            text += f".expand({', '.join(map(str, sizes))})"
        if "n" in self.axes:
            text += f".repeat_interleave({heads}, dim={self.axes.index('n')})"
        return text

    def can_say(self, keep: Tensor) -> bool:
        """Has this argument words for `keep`?"""
        try:
            self.spell(keep)
        except Inexpressible:
            return False
        return True

    def arrange(self, values: Tensor, heads: int) -> Tensor:
        """`[q_len, k_len, batch_size]` in the order of `axes`; heads have size 1."""
        axes = self.axes.replace("n", "b")
        for n, axis in enumerate("qkb"):
            if axis not in axes:
                first = values.narrow(n, 0, 1)
                if not values.equal(first.expand_as(values)):
                    raise Inexpressible(f"`{self.name}` has no axis for {AXES[axis]}")
                values = first
        present = ["qkb".index(axis) for axis in axes if axis in "qkb"]
        rest = [n for n in range(3) if n not in present]
        values = values.permute(*present, *rest).flatten(len(present) - 1)
        for n, axis in enumerate(axes):
            if axis in "1h":
                values = values.unsqueeze(n)
        return values


AXES = {
    "b": "batch items",
    "n": "batch items and heads",
    "l": "positions",
    "q": "queries",
    "k": "keys",
    "h": "heads",
    "d": "components",
}


@dataclass(frozen=True)
class Fact:
    """One thing known about an attention, and how: given, inferred, or assumed."""

    name: str
    value: str
    how: str


@dataclass(frozen=True)
class Adapter:
    r"""All that the laws need to know about one attention.

    `target` is a function, a module, or a class of modules; a class is built anew for
    each question, so that its sizes can shrink. `heads` and `d_k` are the sizes to
    begin with. Made by `attention_laws.infer.adapter`.
    """

    target: Any
    name: str  # what the target is called in a counterexample
    imports: str  # the lines that bring it there
    settings: Mapping[str, str]  # arguments of the constructor, as they are written
    layout: str = "bld"
    inputs: tuple[str, ...] = ("x",)
    keyword: bool = False  # are inputs passed by name?
    masks: tuple[Mask, ...] = ()
    always: Mask | None = None  # the one that may not be left out
    call: Mapping[str, Any] = field(default_factory=dict)  # passed with every call
    output: str = ""  # what follows the call: "" or "[0]"
    weights: str = ""  # where they lie: "", "[1]" of the result, or ".attn"
    weights_axes: str = ""  # their letters, such as "bhqk"
    heads: int = 3
    d_k: int = 4
    width: int | None = None  # of the input, where it is not heads * d_k
    groups: int = 1  # heads that share one head of keys and values
    fixed: bool = False  # may heads and d_k not shrink?
    cross: bool = False  # may there be more keys than queries?
    causal: bool = False
    window: int | None = None
    positions: str = "none"
    projections: Mapping[str, str] = field(default_factory=dict)
    cache: tuple[str, str] | None = None  # argument, and index in the result
    trains: bool = True  # is training reproducible once dropout is 0?
    unused: tuple[str, ...] = ()  # parameters declared to receive no gradient
    facts: tuple[Fact, ...] = ()

    @property
    def alone(self) -> bool:
        """Does it read itself: one input instead of three?"""
        return len(self.inputs) == 1

    @property
    def is_module(self) -> bool:
        """Has it parameters and modes, or is it a function?"""
        return isinstance(self.target, nn.Module | type)

    def build(self, sizes: Sizes) -> str:
        """The expression that makes the attention for these sizes."""
        if isinstance(self.target, type):
            given = {k: v.format(**self.names(sizes)) for k, v in self.settings.items()}
            return f"{self.name}({', '.join(f'{k}={v}' for k, v in given.items())})"
        if isinstance(self.target, nn.Module):
            return f"copy.deepcopy({self.name})"
        return self.name

    def names(self, sizes: Sizes) -> dict[str, int]:
        """The sizes that a setting may speak of, by name."""
        kv_heads = max(1, sizes.heads // self.groups)
        d_model = self.width or sizes.heads * sizes.d_k
        return {**vars(sizes), "kv_heads": kv_heads, "d_model": d_model}

    def shape(self, sizes: Sizes, role: int) -> list[int]:
        """The shape of an input: role 0 is the query, 1 the key, 2 the value."""
        named = self.names(sizes)
        split = "h" in self.layout
        size = {
            "b": sizes.batch_size,
            "l": sizes.k_len if role else sizes.q_len,
            "h": named["kv_heads"] if role else sizes.heads,
            "d": sizes.d_k if split else named["d_model"],
        }
        return [size[axis] for axis in self.layout]

    def effective(self, keep: Tensor) -> Tensor:
        """What may be read once the attention's own causality and window have acted."""
        q_len, k_len = keep.shape[:2]
        ones = torch.ones(q_len, k_len, dtype=torch.bool)
        if self.causal:
            keep = keep & ones.tril(k_len - q_len)[..., None]
        if self.window is not None:
            n = self.window - 1
            keep = keep & ones.triu(k_len - q_len - n)[..., None]
            keep = keep & ones.tril(k_len - q_len + n)[..., None]
        return keep

    def at(self, **where: int | slice | list[int]) -> str:
        r"""The index that picks positions (`l`) and batch items (`b`), as text.

        >>> adapter = Adapter(print, "print", "", {}, layout="bhld")
        >>> adapter.at(l=slice(3, None), b=1)
        '[1, :, 3:]'
        """
        parts = [spell_index(where.get(axis, slice(None))) for axis in self.layout]
        while parts and parts[-1] == ":":
            parts.pop()
        return f"[{', '.join(parts)}]" if parts else ""


def spell_index(index: int | slice | list[int]) -> str:
    r"""A number, a slice or a list of numbers, as one writes it between brackets.

    >>> spell_index(slice(2, None)), spell_index([0, 2])
    ('2:', '[0, 2]')
    """
    if isinstance(index, slice):
        ends = ("" if end is None else str(end) for end in (index.start, index.stop))
        return ":".join(ends)
    return str(index)


class CannotBeCalled(ValueError):  # noqa: N818
    """The attention could not be called; the message says which option would help."""


@dataclass(frozen=True)
class Options:
    r"""What may be said about an attention, instead of being found out.

    - `layout`: one of `LAYOUTS`, or its letters;
    - `inputs`: the names of one input, or of query, key and value;
    - `mask`: for each argument that is a mask its kind and axes, such as
      `{"attn_mask": "hide:qk"}`; either may be left out, `{"none": ""}` means no mask;
    - `settings`: arguments of the constructor;
    - `call`: arguments that are passed with each call;
    - `heads`, `kv_heads`, `d_model`: sizes, where they cannot be seen;
    - `causal`: is it causal without being asked?
    - `window`: how many keys a query reads, itself included;
    - `positions`: what it knows of places, one of `POSITIONS`;
    - `weights`: where they lie, such as `"[1]"` of the result or `".attn"`, and their
      axes after a colon; `"none"` if they are not to be looked at;
    - `projections`: names of the submodules for "query", "key", "value" and "out", or
      "fused", with `:h3d` if each head has its three parts side by side;
    - `cache`: the argument that takes the past, and where it lies in the result;
    - `unused`: parameters that receive no gradient, and are not to;
    - `dtype`, `device`, `seed`: of what is drawn and built.

    Raises `CannotBeCalled`, a `ValueError`, for what an option cannot mean.

    >>> try:
    ...     Options(layout="lbd", d_model=14, heads=4)
    ... except CannotBeCalled as error:
    ...     print(error)
    `d_model` (=14) must be divisible by `heads` (=4)
    """

    layout: str = ""
    inputs: tuple[str, ...] = ()
    mask: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    heads: int | None = None
    kv_heads: int | None = None
    d_model: int | None = None
    causal: bool | None = None
    window: int | None = None
    positions: str = ""
    weights: str = ""
    projections: Mapping[str, str] = field(default_factory=dict)
    cache: tuple[str, str] | None = None
    unused: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            given = type(value) is not type(option.default) or value != option.default
            test, wanted = FITTING[option.name]
            if given and not test(value):
                raise CannotBeCalled(f"`{option.name}` (={value!r}) must be {wanted}")
        for larger, smaller in (("d_model", "heads"), ("heads", "kv_heads")):
            whole, part = getattr(self, larger), getattr(self, smaller)
            if whole and part and whole % part:
                raise CannotBeCalled(
                    f"`{larger}` (={whole}) must be divisible by `{smaller}` (={part})"
                )
        try:
            torch.empty(1, device=self.device).item()
        except (AssertionError, RuntimeError) as error:
            raise CannotBeCalled(
                f"`device` (={self.device!r}) cannot compute here: {first_line(error)}"
            ) from error

    def of_trials(self) -> dict[str, Any]:
        """What every trial is told."""
        return {"seed": self.seed, "dtype": self.dtype, "device": self.device}


def is_size(value: Any) -> bool:
    r"""Is it a number of things?

    >>> is_size(3), is_size(0), is_size(True)
    (True, False, False)
    """
    return type(value) is int and value > 0


def are_words(value: Any) -> bool:
    r"""Are they strings, in a list or a tuple?

    >>> are_words(("query", "key")), are_words("query")
    (True, False)
    """
    return isinstance(value, tuple | list) and all(isinstance(v, str) for v in value)


def is_layout(value: Any) -> bool:
    r"""Does it say where the axes of an input are?

    >>> is_layout("sequence_first"), is_layout("lbd"), is_layout("bqk")
    (True, True, False)
    """
    return isinstance(value, str) and (
        value in LAYOUTS
        or (len({*value}) == len(value) and {*"ld"} <= {*value} <= {*"blhd"})
    )


def is_mask(value: Any) -> bool:
    r"""Does it say of each argument what kind of mask it is, of which axes?

    >>> is_mask({"mask": "hide:bk"}), is_mask({"mask": "seek"})
    (True, False)
    """
    if not (isinstance(value, Mapping) and are_words([*value, *value.values()])):
        return False
    pairs = [said.partition(":") for said in value.values()]
    return all(k in ("", *KINDS) and {*axes} <= {*"bhqkn1"} for k, _, axes in pairs)


def can_be_written(value: Any) -> bool:
    r"""Are they arguments that a counterexample can spell?

    >>> can_be_written({"bias": False}), can_be_written({"act": print})
    (True, False)
    """
    if not (isinstance(value, Mapping) and are_words([*value])):
        return False
    texts = [repr(v) for v in value.values() if not isinstance(v, torch.dtype)]
    try:
        return all(ast.parse(t) and ast.literal_eval(t) is not ... for t in texts)
    except (SyntaxError, ValueError):
        return False


PARTS = ("query", "key", "value", "out", "fused")

# A test of each option, and what passes it in words. What is not given is not tested.
FITTING: dict[str, tuple[Callable[[Any], bool], str]] = {
    "layout": (
        is_layout,
        f"one of {', '.join(LAYOUTS)}, or made of the letters b, l, h, d",
    ),
    "inputs": (
        lambda x: are_words(x) and len(x) in (0, 1, 3),
        "the name of one input, or those of query, key and value",
    ),
    "mask": (
        is_mask,
        f"such as {{'attn_mask': 'hide:qk'}}; a kind is one of {', '.join(KINDS)}, and "
        f"axes are of b, h, q, k, n, 1",
    ),
    "settings": (
        can_be_written,
        "names with numbers, strings, lists, True, False or None; what needs more is "
        "built before it is checked",
    ),
    "call": (
        can_be_written,
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
        "a place such as '[1]' or '.attn', with axes as in '[1]:bhqk', or 'none'",
    ),
    "projections": (
        lambda x: (
            isinstance(x, Mapping) and are_words([*x.values()]) and {*x} <= {*PARTS}
        ),
        f"names of submodules, for some of {', '.join(PARTS)}",
    ),
    "cache": (
        lambda x: are_words(x) and len(x) == 2,
        "an argument and a place in the result, such as ('past', '[1]')",
    ),
    "unused": (are_words, "names of parameters"),
    "dtype": (
        lambda x: isinstance(x, torch.dtype) and x.is_floating_point,
        "a floating dtype of torch",
    ),
    "device": (lambda x: isinstance(x, str), "the name of a device, such as 'cuda'"),
    "seed": (lambda x: type(x) is int and 0 <= x < 2**32, "an int, 0 or more"),
}
