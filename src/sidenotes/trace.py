"""Run the examples of a module, and record the values that each line computes.

The source is not modified, and other files are not slowed down. Python calls the
recorder where an instruction of the traced file begins a statement or ends an
assignment, and the recorder stores the assigned values. Any value with a `shape` of
integers is recorded as a tensor.
"""

import ast
import inspect
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from sidenotes.bytecode import (
    Assignments,
    Plan,
    SourceMap,
    Statement,
    codes_of,
    plan_of,
)
from sidenotes.examples import Examples, TraceError, imported, run_calls
from sidenotes.split import read
from sidenotes.watch import tracing

__all__ = ["Call", "Step", "Trace", "TraceError", "Value", "trace"]

COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
FUNCTION = 0x1 | 0x2  # CO_OPTIMIZED and CO_NEWLOCALS: neither a module nor a class body
VARARGS, VARKEYWORDS = 0x4, 0x8

# The tensors of a call in memory: each with its name and its range of addresses.
Memory = list[tuple[weakref.ref[Any], str, tuple[int, int]]]


@dataclass(frozen=True)
class Value:
    """The value of a name right after its assignment."""

    name: str  # "query", "self.attn", "return", "yield"; in a tuple "return[0]"
    shape: tuple[int, ...]
    dtype: str
    device: str
    strides: tuple[int, ...] | None  # in elements
    contiguous: bool | None
    shares: str | None  # the first value of the call, still alive, with the same memory
    data: Any | None  # nested lists; None for tensors beyond the limit


@dataclass
class Step:
    """One execution of one statement, or of the header of a compound one."""

    line: int
    last_line: int
    values: list[Value] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # integers after it, by name


@dataclass
class Call:
    """One call of one function of the module."""

    symbol: str
    line: int
    example: int
    parent: int | None
    steps: list[Step] = field(default_factory=list)
    arguments: list[Value] = field(default_factory=list)
    start: dict[str, int] = field(default_factory=dict)  # integers, by name, at first
    sizes: dict[str, int] = field(default_factory=dict)  # the same at its end
    parameters: dict[str, int] = field(default_factory=dict)  # those passed to it
    config: dict[str, int] = field(default_factory=dict)  # those of objects and dicts
    owner: int | None = None  # the number of the object that is its `self`
    raised: str | None = None


@dataclass
class Trace:
    """All calls, in the order in which they began."""

    path: Path
    calls: list[Call] = field(default_factory=list)


def trace(path: Path, *, limit: int = 2048, calls: Sequence[str] = ()) -> Trace:
    """Run the doctest examples of `path` in this process and record each call.

    `calls` are statements to run instead, such as `Attention(512, 8)(x)`. Tensors of at
    most `limit` elements are recorded with their values. Set random seeds before the
    call. Raises `TraceError` if an example raises an unexpected exception; its output
    is not compared.
    """
    with imported(path) as module:
        recorder = Recorder(path, module, limit)
        examples = Examples(module, recorder.begin)
        with tracing(recorder):
            if calls:
                run_calls(module, calls, recorder.begin)
            else:
                examples.run_all()
    # Others, such as torch.compile, may execute code of their own for its lines.
    if recorder.stale and not recorder.known.issuperset(codes_in(module)):
        reason = "was edited after its import; trace it in a fresh process"
        raise TraceError(f"{path}:{recorder.stale}: {reason}")
    return recorder.trace


@dataclass
class Activation:
    """A frame of the module, running or suspended; comprehensions have their own."""

    plan: Plan
    call: Call
    number: int
    memory: Memory
    inner: bool  # a comprehension: its values belong to the enclosing call
    statement: Statement | None = None
    step: Step | None = None
    pending: Assignments | None = None
    error: str | None = None
    thrown: bool = False


class Recorder:
    """Writes the trace: one of two backends calls it for each frame and instruction."""

    def __init__(self, path: Path, module: ModuleType, limit: int) -> None:
        source = read(path)
        self.trace = Trace(path)
        self.file = module.__file__
        self.limit = limit
        tree = ast.parse(source)
        self.source_map = SourceMap(tree, source)
        self.known = codes_of(tree, str(path))
        self.plans: dict[int, Plan] = {}
        self.frames: dict[int, Activation] = {}
        self.owners: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.example = 0
        self.stale = 0

    def plan(self, code: CodeType) -> Plan | None:
        """The events of a code object; None if it is not from the traced file."""
        plan = self.plans.get(id(code))
        if plan is None:
            if code.co_filename != self.file or code.co_flags & FUNCTION != FUNCTION:
                return None
            if code not in self.known:
                self.stale = self.stale or code.co_firstlineno
                return None
            if code.co_name == "<lambda>":
                return None  # it has no statements of its own
            plan = self.plans[id(code)] = plan_of(code, self.source_map)
        return plan

    def begin(self, example: int) -> None:
        """Called before each example."""
        self.example = example

    def find(self, frame: FrameType) -> Activation | None:
        """The activation of a frame, if it is recorded."""
        state = self.frames.get(id(frame))
        # A generator may be freed without an event, and its `id` be reused.
        return state if state is not None and state.plan.code is frame.f_code else None

    def around(self, frame: FrameType, inner: bool) -> Activation | None:
        """The nearest recorded caller; for a comprehension, the enclosing function."""
        outer = frame.f_back
        while outer is not None:
            state = self.find(outer)
            if state and (not inner or frame.f_code in outer.f_code.co_consts):
                return state
            outer = outer.f_back
        return None

    def enter(self, frame: FrameType) -> Activation | None:
        """Begin a call, or a comprehension within the enclosing call."""
        code = frame.f_code
        plan = self.plan(code)
        if plan is None:
            return None
        inner = code.co_name in COMPREHENSIONS
        outer = self.around(frame, inner)
        if not inner:
            parent = outer.number if outer else None
            line = self.source_map.definitions.get((code.co_firstlineno, code.co_name))
            symbol = code.co_qualname.replace(".<locals>", "")
            call = Call(symbol, line or code.co_firstlineno, self.example, parent)
            call.owner = self.number_of(frame.f_locals.get("self"))
            call.start = integers(frame)
            state = Activation(plan, call, len(self.trace.calls), [], False)
            self.trace.calls.append(call)
            for name, value in arguments(frame).items():
                if type(value) is int:
                    call.parameters[name] = value
                self.record(state, call.arguments, name, value)
        elif outer:
            state = Activation(plan, outer.call, outer.number, outer.memory, True)
            state.statement, state.step = outer.statement, outer.step
        else:
            return None
        self.frames[id(frame)] = state
        return state

    def number_of(self, owner: Any) -> int | None:
        """A number for an object, the same as long as it is alive."""
        reference, number = self.owners.get(id(owner), (None, -1))
        if reference is None or reference() is not owner:
            number = len(self.trace.calls)
            try:
                self.owners[id(owner)] = weakref.ref(owner), number
            except TypeError:
                return None
        return number

    def before(self, state: Activation, frame: FrameType, offset: int) -> None:
        """Called before an instruction of the plan is executed."""
        if state.pending and state.step and offset == state.pending.after:
            for target in state.pending.targets:
                value = target.read(frame)
                self.record(state, state.step.values, target.name, value)
            if state.step.values and not state.inner:
                state.step.sizes = integers(frame)
        statement = state.plan.entries.get(offset)
        # In a loop, the header comes between two executions of the same statement.
        if statement and statement is not state.statement:
            state.statement = statement
            state.step = Step(statement.line, statement.last_line)
            state.call.steps.append(state.step)
        state.pending = state.plan.stores.get(offset)
        if state.pending:
            forget_dead(state.memory)

    def leave(self, state: Activation, frame: FrameType, how: str, value: Any) -> None:
        """Called when a value is returned or yielded."""
        if not state.inner and state.step is not None:
            forget_dead(state.memory)
            self.record(state, state.step.values, how, value)
            state.step.sizes = integers(frame)
        if how == "return":
            if not state.inner:
                state.call.sizes = integers(frame)
                state.call.config = configured(frame)
            self.frames.pop(id(frame), None)

    def unwind(self, state: Activation, frame: FrameType, error: str | None) -> None:
        """Called when an exception leaves the frame."""
        if not state.inner and error != "GeneratorExit":
            state.call.raised = error
        elif not state.inner and not state.call.steps:
            self.trace.calls.pop()  # a generator that was never started
        self.frames.pop(id(frame), None)

    def record(
        self, state: Activation, values: list[Value], name: str, value: Any
    ) -> None:
        """Record a tensor, or the tensors in a tuple."""
        items = [(name, value)]
        if isinstance(value, tuple) and shape_of(value) is None:
            items = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
        for name, item in items:
            shape = shape_of(item)
            if shape is not None:
                values.append(describe(name, item, shape, state.memory, self.limit))


def codes_in(module: ModuleType) -> Iterator[CodeType]:
    """The code of the functions and methods that a file has defined."""
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    for each in (
        value for owner in (module, *classes) for value in vars(owner).values()
    ):
        with suppress(Exception):
            function = getattr(each, "__func__", getattr(each, "fget", each))
            code = inspect.unwrap(function).__code__
            if code.co_filename == module.__file__:
                yield code


def arguments(frame: FrameType) -> dict[str, Any]:
    """The arguments of a call, by name."""
    code, values = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & VARARGS)
    found = {name: values.get(name) for name in code.co_varnames[:count]}
    if code.co_flags & VARKEYWORDS:
        found |= values.get(code.co_varnames[count], {})
    return found


def integers(frame: FrameType) -> dict[str, int]:
    """The integers that have names in the code: attributes of `self`, and locals."""
    attributes = getattr(frame.f_locals.get("self"), "__dict__", {})
    names = {**attributes, **frame.f_locals}
    return {name: value for name, value in names.items() if type(value) is int}


def configured(frame: FrameType) -> dict[str, int]:
    """The integers in the dicts and the plain objects that have names in the code.

    `config.n_embd` and `cfg["n_embd"]` give `n_embd`.
    """
    found: dict[str, int] = {}
    own = getattr(frame.f_locals.get("self"), "__dict__", {})
    for value in [*frame.f_locals.values(), *own.values()]:
        if callable(value) or shape_of(value) is not None:
            continue  # a class, a module of torch, or a tensor
        inner = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for name, size in inner.items():
            if isinstance(name, str) and type(size) is int:
                found.setdefault(name, size)
    return found


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape, if it consists of integers; None for symbolic sizes."""
    try:
        shape = tuple(value.shape)
    except Exception:
        return None
    return shape if all(isinstance(size, int) for size in shape) else None


def describe(
    name: str,
    value: Any,
    shape: tuple[int, ...],
    memory: Memory,
    limit: int,
) -> Value:
    """Describe a tensor without modifying it, or keeping it or its graph alive."""
    place = span(value)
    shares = None
    if place is not None:
        start, end = place
        shares = next((n for _, n, (s, e) in memory if s < end and start < e), None)
        with suppress(TypeError):
            memory.append((weakref.ref(value), name, place))
    data = None
    # A fake tensor has a storage without an address. Reading its values would change
    # the program that is being exported.
    real = place is not None or not hasattr(value, "untyped_storage")
    if math.prod(shape) <= limit and (real or not math.prod(shape)):
        with suppress(Exception):
            data = value.tolist()
    dtype = str(getattr(value, "dtype", "")).rsplit(".", 1)[-1]
    device = str(getattr(value, "device", "cpu"))
    return Value(
        name, shape, dtype, device, strides(value), contiguous(value), shares, data
    )


def strides(value: Any) -> tuple[int, ...] | None:
    """The strides, in elements."""
    try:
        if callable(getattr(value, "stride", None)):
            return tuple(value.stride())
        return tuple(step // value.itemsize for step in value.strides)
    except Exception:
        return None


def contiguous(value: Any) -> bool | None:
    """Whether the tensor is contiguous; None if unknown."""
    try:
        if callable(getattr(value, "is_contiguous", None)):
            return bool(value.is_contiguous())
        return bool(value.flags.c_contiguous)
    except Exception:
        return None


def span(value: Any) -> tuple[int, int] | None:
    """The range of addresses of a tensor's memory; None if it has none."""
    try:
        if hasattr(value, "untyped_storage"):
            storage = value.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
        else:
            while getattr(value.base, "__array_interface__", None) is not None:
                value = value.base
            start, size = value.__array_interface__["data"][0], value.nbytes
        return (start, start + size) if start and size else None
    except Exception:
        return None


def forget_dead(memory: Memory) -> None:
    """Remove freed tensors, because their addresses may be reused.

    The new value exists already, so a tensor that is still alive at its addresses
    shares its memory.
    """
    memory[:] = [entry for entry in memory if entry[0]() is not None]
