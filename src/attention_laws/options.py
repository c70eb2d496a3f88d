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

from attention_laws.adapter import KINDS, LAYOUTS, POSITIONS
from attention_laws.law import first_line


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
