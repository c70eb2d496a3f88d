r"""# How an attention is called

Every attention computes the same thing, and hardly two are called alike: batch first or
sequence first, one input or three, a mask in which True means *may* or *must not*, an
additive one, lengths instead, or none. An `Adapter` holds these facts about one
attention, so that the laws can be written once.

It holds them as *text* where a call is made of them. The laws run the very lines that
they print when something is wrong, so a counterexample cannot differ from what was
seen.

A shape is written with a letter for each axis: `b` batch item, `l` position, `h` head,
`d` component, `q` and `k` position of the query and of the key, `n` batch items times
heads folded into one, `1` an axis of size 1. So `bld` is batch first, and a mask `b1qk`
has its axis for heads left to broadcasting.

Source: the conventions are those told apart in [who differs
how](../../compare/differences.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
