"""Random arguments for the fuzz test of `tests/test_hostile.py`.

`Dice` turns the random bytes that hypothesis draws into the arguments of one call.
Zeros give the plain call, so that a failing example shrinks towards it. A value is

- *plain*: an ordinary argument;
- *disguised*: a tensor with the same elements, but another memory layout or type
  (transposed, expanded, a view with an offset, a parameter, a subclass): a function
  that accepts the plain tensor must accept this one and return the same;
- *spoilt*: of a wrong type, size, dtype or device, or NaN: it may be refused, with an
  error that names the argument, or computed correctly.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def holds_numbers(dtype: torch.dtype) -> bool:
    """Whether anything can be copied into `dtype`; into int4, say, nothing can."""
    try:
        return torch.ones(1).to(dtype).dtype == dtype
    except RuntimeError:
        return False


# All that this version of torch has, among them those of float8.
with warnings.catch_warnings(action="ignore"):
    KNOWN = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    DTYPES = sorted(filter(holds_numbers, KNOWN), key=str)

# As sizes: not numbers, numbers of other kinds, and numbers that no memory can hold.
# (None lies between: it could be had, and would bring the machine down.)
NO_SIZE = (0, -1, True, 2.0, 0.5, "2", None, [2], np.int64(2), float("nan"), 1j)
HUGE = (2**62, 2**63 - 1, 2**63, 2**70)
NO_TENSOR = (None, 3, 0.5, True, "words", [[1.0]], (1, 2), {}, np.ones((2, 2)), Tensor)


class Marked(Tensor):
    """A subclass that adds nothing."""


class Dice:
    """The random choices of one call, and notes on the values that were not plain."""

    def __init__(self, rolls: bytes, device: torch.device) -> None:
        self.rolls = iter(rolls)
        self.device = device
        self.notes: list[str] = []
        self.tame = True  # no value was spoilt
        self.generator = torch.Generator().manual_seed(self.roll(0, 2**16))

    def roll(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included; zeros give `low`."""
        count = high - low + 1
        size = (count.bit_length() + 7) // 8
        number = int.from_bytes(bytes(islice(self.rolls, size)), "big")
        return low + number % count

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.roll(0, len(options) - 1)]

    def chance(self, one_in: int) -> bool:
        """Once in so many draws; it shrinks to False."""
        return self.roll(1, one_in) == one_in

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return x.to(dtype).to(self.device)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers from `low` to `high`; zeros where there is none between."""
        x = torch.randint(low, max(high, low) + 1, shape, generator=self.generator)
        return x.to(self.device)

    def bools(self, *shape: int) -> Tensor:
        """Any, all or nothing allowed."""
        full = torch.full(shape, not self.chance(6), device=self.device)
        return full if self.chance(5) else self.ints(0, 1, *shape).bool() & full

    def arguments(
        self, given: dict[str, Any], **spoilers: Callable[[Any], Any]
    ) -> None:
        """Disguise the tensors among `given`, then spoil up to two of all, in place.

        A spoiler, by the name of its argument, knows what is worst for that one.
        """
        for name, value in given.items():
            if isinstance(value, Tensor) and self.chance(2):
                given[name] = self.disguise(name, value)
        names = [n for n in given for _ in range(3 if n in spoilers else 1)]
        for _ in range(self.pick((0, 0, 1, 1, 1, 2)) if given else 0):
            name = self.pick(names)
            self.tame = False
            own = name in spoilers and not self.chance(3)
            spoil = spoilers[name] if own else self.spoil
            # There are tensors, such as sparse ones, with which little can be done.
            with suppress(Exception):
                given[name] = spoil(given[name])
                self.notes.append(f"{name}: {shortly(given[name])}")

    def spoil(self, value: Any) -> Any:
        """Something else than `value`, of the same kind or not."""
        # No operator touches a tensor in the layout of mkldnn a second time.
        usable = isinstance(value, Tensor) and not value.is_mkldnn
        if usable and not self.chance(4):
            spoilers = (self.rank, self.size, self.dtype, self.values, self.layout)
            with warnings.catch_warnings(action="ignore"):
                return self.pick(spoilers)(value)
        odd = (*NO_SIZE, *HUGE) if type(value) is int else NO_TENSOR
        odd = (*odd, -0.5, 1.5, float("nan"), 2) if type(value) is float else odd
        return self.pick(odd)

    def disguise(self, name: str, x: Tensor) -> Tensor:
        """The same tensor, made in another way."""
        disguises = [turned, sparse_in_memory, offset, as_parameter, as_subclass]
        disguises += [expanded, with_gradient, non_leaf, negated]
        chosen = self.pick(disguises)
        self.notes.append(f"{name}: {chosen.__name__}")
        with warnings.catch_warnings(action="ignore"):
            hidden: Tensor = chosen(x)
        return hidden

    def rank(self, x: Tensor) -> Tensor:
        ranks: list[Callable[[], Tensor]] = [
            lambda: x.unsqueeze(0),
            lambda: x.unsqueeze(-1),
            lambda: x.flatten(),
            lambda: x.new_zeros(()),
            lambda: x.new_zeros(x.shape[1:]),
        ]
        y: Tensor = self.pick(ranks)()
        return y

    def size(self, x: Tensor) -> Tensor:
        shape = list(x.shape) or [1]
        shape[self.roll(0, len(shape) - 1)] = self.roll(0, 5)
        return self.floats(*shape).to(x.dtype)

    def dtype(self, x: Tensor) -> Tensor:
        return x.to(self.pick(DTYPES))

    def layout(self, x: Tensor) -> Tensor:
        x = x.detach()
        # In half precision, operators on a tensor of mkldnn write past its memory.
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        layouts: list[Callable[[], Tensor]] = [
            lambda: x.to("meta"),
            lambda: x.to("cpu"),
            lambda: x.to_sparse(),
            lambda: x.to_sparse_csr(),
            lambda: wide.to_mkldnn(),
            lambda: torch.nested.nested_tensor(list(x)),
            lambda: torch.nested.nested_tensor(list(x), layout=torch.jagged),
            lambda: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
        ]
        y: Tensor = self.pick(layouts)()
        return y

    def values(self, x: Tensor) -> Tensor:
        """One entry, or all, which cannot be meant."""
        real = x.is_floating_point()
        odd = (float("nan"), float("inf"), -float("inf")) if real else (2, -1, 100)
        x = x.detach().clone(memory_format=torch.contiguous_format)
        x = x.int() if x.dtype == torch.bool else x
        entry = self.pick(odd)
        if x.numel() and not self.chance(4):
            x.view(-1)[self.roll(0, x.numel() - 1)] = entry
            return x
        return x.fill_(entry)


def shortly(value: Any) -> str:
    """What a value was made into."""
    if isinstance(value, Tensor):
        return f"now {value.dtype}, {value.layout}, on {value.device}"
    return f"now {value!r}"


def turned(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x


def sparse_in_memory(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2] if x.dim() else x


def offset(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)


def expanded(x: Tensor) -> Tensor:
    """All entries of the last axis but one become the first, by a stride of 0."""
    if x.dim() < 2 or not x.shape[-2]:
        return x
    return x[..., :1, :].expand(x.shape)


def with_gradient(x: Tensor) -> Tensor:
    return x.clone().requires_grad_() if x.is_floating_point() else x


def non_leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_() * 1 if x.is_floating_point() else x.clone()


def as_parameter(x: Tensor) -> Tensor:
    return nn.Parameter(x.clone(), requires_grad=x.is_floating_point())


def as_subclass(x: Tensor) -> Tensor:
    marked: Tensor = x.clone().as_subclass(Marked)
    return marked


def negated(x: Tensor) -> Tensor:
    """A view that stands for the negative of what is in memory."""
    if x.dtype not in (torch.float32, torch.float64):
        return x
    return torch.complex(torch.zeros_like(x), -x).conj().imag
