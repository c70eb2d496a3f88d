"""One call, and what may come of it: the right answer, or an error in our own words."""

import inspect
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

import headnotes

SOURCE = str(Path(headnotes.__file__).parent)
SECONDS = 10  # of computing; a call of this size that takes longer hangs

# What torch imports at the first product on "meta" takes seconds; once is enough.
torch.ones(1, 1, device="meta").mm(torch.ones(1, 1, device="meta")).tril()

# All functions of the package that were entered, by their code.
ENTERED: set[CodeType] = set()


class Meaningless(Exception):  # noqa: N818
    """There is no right answer: the call should have been refused."""


class Hung(BaseException):
    """It took too long. (No `Exception`, which the callee might catch.)"""


@dataclass
class Call:
    """A call that is about to be made, and the judge of its result."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    # Looks at a result; raises `Meaningless` where there should have been none, and
    # `AssertionError` where it should have been another.
    judge: Callable[[Any], None]
    tame: bool = True  # nothing was spoilt: there must be a result
    notes: list[str] = field(default_factory=list)
    # Names that an error may use beside those of the arguments.
    words: tuple[str, ...] = ()

    def __repr__(self) -> str:
        lines = [f"{getattr(self.function, '__qualname__', self.function)}("]
        lines += [f"  {name}={show(value)}" for name, value in self.arguments.items()]
        return "\n".join([*lines, ")", *(f"# {note}" for note in self.notes)])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # for hypothesis, which else shows the fields


def show(value: Any) -> str:
    """A value in one line, tensors by their shape as well."""
    if not isinstance(value, Tensor):
        return repr(value)
    kind = f"{type(value).__name__}, {value.dtype}, {value.device}, {value.layout}"
    shape = "?" if value.is_nested else list(value.shape)
    try:
        content = value.detach().tolist() if value.numel() < 100 else "…"
    except (RuntimeError, NotImplementedError):  # nothing to be read
        content = "…"
    return f"{shape} ({kind}) {content}"


def outcome(call: Call) -> str:
    """Make the call, and say what came of it; `AssertionError` where that is wrong."""
    before = [(x, state(x)) for x in tensors([call.function, call.arguments])]
    try:
        with limited():
            result = call.function(**call.arguments)
    except Hung as late:
        raise AssertionError(f"not done after {SECONDS} seconds:\n{call}") from late
    except Exception as error:
        came = "too large" if too_large(call, error) else refusal(call, error)
    else:
        came = "answered"
        try:
            call.judge(result)
        except Meaningless as why:
            raise AssertionError(f"answered, though {why}:\n{call}") from why
        except AssertionError as error:
            line = traceback.extract_tb(error.__traceback__)[-1].line
            raise AssertionError(
                f"{error or line}\n{call}\ngave {show(result)}"
            ) from error
        differentiate(call, result)
    for x, seen in before:
        now = state(x)
        if came == "answered" and nn.UninitializedParameter in seen:
            continue  # a lazy layer, which has seen its first input
        same = all(a is b or a == b for a, b in zip(seen, now, strict=False))
        assert same, f"an input was modified: {seen} -> {now}\n{call}"
    return came


def too_large(call: Call, error: Exception) -> bool:
    """A size that no memory can hold is for torch to refuse, in one of many words."""
    sizes = [n for n in call.arguments.values() if type(n) is int]
    huge = max(sizes, default=0) >= 2**30
    return huge and not call.tame and not ours(call, error)


def ours(call: Call, error: Exception) -> bool:
    """An error is ours if it was raised in our file, and names an argument."""
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    quoted = re.findall(r"`([^\W\d]\w*)[^`]*`", str(error))
    known = {*signature(call).parameters, *call.words}
    kind = isinstance(error, TypeError | ValueError)
    return kind and innermost.startswith(SOURCE) and bool(known & set(quoted))


def refusal(call: Call, error: Exception) -> str:
    """Which error it was, if it is ours; also Python may refuse, on our behalf."""
    assert not call.tame, f"{error!r}, though nothing is wrong\n{call}"
    try:
        signature(call).bind(**call.arguments)
    except TypeError:
        return "TypeError"
    frames = "".join(traceback.format_tb(error.__traceback__)[-2:])
    assert ours(call, error), f"{error!r} is not ours:\n{call}\n{frames}"
    return type(error).__name__


def signature(call: Call) -> inspect.Signature:
    function: Any = call.function
    function = function.forward if isinstance(function, nn.Module) else function
    return inspect.signature(function)


def differentiate(call: Call, result: Any) -> None:
    """Gradients of an answer are finite wherever the inputs and the answer are."""
    given = [x for x in tensors([call.arguments]) if x.requires_grad]
    made = [y for y in tensors([result]) if y.requires_grad and not y.is_meta]
    if not given or not made or any(x.is_meta for x in given):
        return
    if not all(x.isfinite().all() for x in [*tensors([call.arguments]), *made]):
        return
    total = sum(y.double().sum() for y in made)
    for gradient in torch.autograd.grad(total, given, allow_unused=True):
        finite = gradient is None or bool(gradient.isfinite().all())
        assert finite, f"a gradient is not finite\n{call}"


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a nest of lists, tuples, dicts and modules."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


def state(x: Tensor) -> tuple[Any, ...]:
    """All of a tensor that a callee could change, the bytes of its memory last."""
    kind = (x.requires_grad, x.dtype, x.device, x.layout, x._version, type(x))
    if x.layout != torch.strided or x.is_nested or nn.parameter.is_lazy(x):
        return kind
    kind = (*kind, x.shape, x.stride(), x.grad if x.is_leaf else None)
    if x.is_meta:
        return kind
    memory = torch.empty(0, dtype=torch.uint8, device=x.device)
    return (*kind, memory.set_(x.untyped_storage()).cpu().numpy().tobytes())


@contextmanager
def limited() -> Iterator[None]:
    """Note which functions of the package are entered, and end what hangs."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Hung

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename.startswith(SOURCE):
            ENTERED.add(frame.f_code)

    previous = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    # It is called for each frame only; a profiler would be called for C functions, too.
    tracing = sys.gettrace()
    sys.settrace(note)
    try:
        yield
    finally:
        sys.settrace(tracing)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
