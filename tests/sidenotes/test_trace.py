"""The record of what each line computed: exact, complete, and without a footprint."""

import gc
import json
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from sidenotes.examples import Examples, imported
from sidenotes.trace import Call, Recorder, Trace, TraceError, Value, trace
from sidenotes.watch import tracing

ROOT = Path(__file__).parent.parent.parent
CORE = ROOT / "src" / "headnotes" / "mha.py"

# A tensor of our own: `sidenotes` must not need torch, and nor do most of its tests.
DUCK = """
from math import prod


class Storage:
    def __init__(self, cells):
        self.cells = cells

    def data_ptr(self):
        return id(self.cells)

    def nbytes(self):
        return 8


class T:
    dtype, device = "duck.float32", "pond:0"

    def __init__(self, *shape, cells=None):
        self.shape = shape
        self.cells = cells or [0] * prod(shape)

    def untyped_storage(self):
        return Storage(self.cells)

    def stride(self):
        return tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def is_contiguous(self):
        return True

    def view(self, *shape):
        return T(*shape, cells=self.cells)

    def tolist(self):
        cells = list(self.cells)
        for size in self.shape[:0:-1]:
            cells = [cells[i : i + size] for i in range(0, len(cells), size)]
        return cells

    def __add__(self, other):
        return T(*self.shape, cells=[cell + 1 for cell in self.cells])

    def __iadd__(self, other):
        self.cells[:] = [cell + 1 for cell in self.cells]
        return self

    def __setitem__(self, index, value):
        self.cells[0] = value if isinstance(value, int) else 7

    def __getitem__(self, index):
        return T(*self.shape[1:])

    def __iter__(self):
        return (T(*self.shape[1:]) for _ in range(self.shape[0]))

    def __enter__(self):
        return T(*self.shape[::-1])

    def __exit__(self, *error):
        return False


class Box:
    pass
"""


def write(folder: Path, source: str, example: str) -> Path:
    """A lone module beside our tensor, with one docstring of examples at its end."""
    (folder / "duck.py").write_text(DUCK)
    lines = textwrap.dedent(source).strip().split("\n")
    prompts = "\n".join(f"    >>> {line}" for line in example.split("\n"))
    examples = ["def examples():", '    """', prompts, '    """']
    path = folder / "literate.py"
    path.write_text("\n".join(["from duck import Box, T", *lines, *examples]) + "\n")
    return path


def shown(values: list[Value]) -> list[str]:
    return [f"{value.name} {list(value.shape)}" for value in values]


def told(path: Path, call: Call) -> list[tuple[str, ...]]:
    """The first line of each step in words, and what it assigned."""
    lines = path.read_text().split("\n")
    return [(lines[s.line - 1].strip(), *shown(s.values)) for s in call.steps]


def calls_of(record: Trace, symbol: str) -> list[Call]:
    return [call for call in record.calls if call.symbol == symbol]


Observe = Callable[..., list[tuple[str, ...]]]


@pytest.fixture
def observe(tmp_path: Path) -> Observe:
    """The steps of the first call of `f` in a source."""

    def steps(source: str, example: str = "_ = f(T(2, 3))") -> list[tuple[str, ...]]:
        path = write(tmp_path, source, example)
        return told(path, calls_of(trace(path), "f")[0])

    return steps


# Source of `f`, and its steps.
CONSTRUCTS = {
    "names": (
        """
        def f(x):
            y = x + 1
            n = 5
            return y
        """,
        [("y = x + 1", "y [2, 3]"), ("n = 5",), ("return y", "return [2, 3]")],
    ),
    "tuples": (
        """
        def f(x):
            a, (b, *c) = x, (x.view(6), 1)
            a, b = b, a
            d = e = x[0]
        """,
        [
            ("a, (b, *c) = x, (x.view(6), 1)", "a [2, 3]", "b [6]"),
            ("a, b = b, a", "a [6]", "b [2, 3]"),
            ("d = e = x[0]", "d [3]", "e [3]"),
        ],
    ),
    "tuples that are kept": (
        """
        def f(x):
            pair = x, x[0]
            return pair
        """,
        [
            ("pair = x, x[0]", "pair[0] [2, 3]", "pair[1] [3]"),
            ("return pair", "return[0] [2, 3]", "return[1] [3]"),
        ],
    ),
    "attributes": (
        """
        def f(x):
            box = Box()
            box.attn = x
            box.inner = Box()
            box.inner.attn, y = x[0], x
            (box
                .late) = x.view(6)
        """,
        [
            ("box = Box()",),
            ("box.attn = x", "box.attn [2, 3]"),
            ("box.inner = Box()",),
            ("box.inner.attn, y = x[0], x", "box.inner.attn [3]", "y [2, 3]"),
            ("(box", "box.late [6]"),
        ],
    ),
    "augmented assignments": (
        """
        def f(x):
            x += 1
            box = Box()
            box.y = x
            box.y += 1
            x[0] += 1
            x[0:1] = 2
        """,
        [
            ("x += 1", "x [2, 3]"),
            ("box = Box()",),
            ("box.y = x", "box.y [2, 3]"),
            ("box.y += 1", "box.y [2, 3]"),
            ("x[0] += 1", "x [2, 3]"),
            ("x[0:1] = 2", "x [2, 3]"),
        ],
    ),
    "walrus": (
        """
        def f(x):
            if (row := x[0]).shape == (3,) and (no := None):
                pass
            y = (z := x.view(6)).view(3, 2)
            return (last := y)
        """,
        [
            ("if (row := x[0]).shape == (3,) and (no := None):", "row [3]"),
            ("y = (z := x.view(6)).view(3, 2)", "z [6]", "y [3, 2]"),
            ("return (last := y)", "last [3, 2]", "return [3, 2]"),
        ],
    ),
    "a walrus that is not reached": (
        """
        def f(x):
            y = x[0]
            z = 1 or (y := x)
            z = x if x.shape else (y := x[0])
        """,
        [
            ("y = x[0]", "y [3]"),
            ("z = 1 or (y := x)",),
            ("z = x if x.shape else (y := x[0])", "z [2, 3]"),
        ],
    ),
    "loops": (
        """
        def f(x):
            for row in x:
                y = row + 1
            return y
        """,
        [
            ("for row in x:", "row [3]"),
            ("y = row + 1", "y [3]"),
            ("for row in x:", "row [3]"),
            ("y = row + 1", "y [3]"),
            ("for row in x:",),
            ("return y", "return [3]"),
        ],
    ),
    "loops on one line": (
        """
        def f(x):
            for row in x: y = row + 1
            a = x; b = x[0]
        """,
        [
            ("for row in x: y = row + 1", "row [3]"),
            ("for row in x: y = row + 1", "y [3]"),
            ("for row in x: y = row + 1", "row [3]"),
            ("for row in x: y = row + 1", "y [3]"),
            ("for row in x: y = row + 1",),
            ("a = x; b = x[0]", "a [2, 3]"),
            ("a = x; b = x[0]", "b [3]"),
        ],
    ),
    "a loop without a header": (
        """
        def f(x):
            n = 0
            while (n := n + 1) < 3:
                x = x.view(n, 6 // n)
        """,
        [
            ("n = 0",),
            ("while (n := n + 1) < 3:",),
            ("x = x.view(n, 6 // n)", "x [1, 6]"),
            ("while (n := n + 1) < 3:",),
            ("x = x.view(n, 6 // n)", "x [2, 3]"),
            ("while (n := n + 1) < 3:",),
        ],
    ),
    "comprehensions": (
        """
        def f(x):
            row = x
            rows = [row + 1 for row in x]
            total = sum(len(row.shape) for row in x)
            n = {1 for a in x for b in a}
            return {n: row for n, row in enumerate(x)}
        """,
        [
            ("row = x", "row [2, 3]"),
            ("rows = [row + 1 for row in x]", "row [3]", "row [3]"),
            ("total = sum(len(row.shape) for row in x)", "row [3]", "row [3]"),
            ("n = {1 for a in x for b in a}", *(2 * ["a [3]", *(3 * ["b []"])])),
            ("return {n: row for n, row in enumerate(x)}", "row [3]", "row [3]"),
        ],
    ),
    "a comprehension that gives a name back": (
        """
        def f(x):
            row = other = x
            row = T(len([1 for row, other in zip(x, x)]))
        """,
        [
            ("row = other = x", "row [2, 3]", "other [2, 3]"),
            (
                "row = T(len([1 for row, other in zip(x, x)]))",
                *(2 * ["row [3]", "other [3]"]),
                "row [2]",
            ),
        ],
    ),
    "a generator expression that waits": (
        """
        def f(x):
            rows = (row for row in x)
            first = next(rows)
            return first
        """,
        [
            ("rows = (row for row in x)",),
            ("first = next(rows)", "first [3]"),
            ("rows = (row for row in x)", "row [3]"),
            ("return first", "return [3]"),
        ],
    ),
    "a generator expression that another function runs": (
        """
        def f(x):
            return g(row for row in x)

        def g(rows):
            return [1 for row in rows]
        """,
        [("return g(row for row in x)", "row [3]", "row [3]")],
    ),
    "an assignment that fails": (
        """
        class Fixed:
            y = property(lambda self: T(5))

        def f(x):
            fixed = Fixed()
            try:
                fixed.y = x
            except AttributeError:
                z = x
        """,
        [
            ("fixed = Fixed()",),
            ("try:",),
            ("fixed.y = x",),
            ("except AttributeError:",),
            ("z = x", "z [2, 3]"),
        ],
    ),
    "with": (
        """
        def f(x):
            with x as y, y as z:
                w = z
        """,
        [
            ("with x as y, y as z:", "y [3, 2]", "z [2, 3]"),
            ("w = z", "w [2, 3]"),
            ("with x as y, y as z:",),
        ],
    ),
    "match": (
        """
        def f(x):
            match [x, x[0]]:
                case [y]:
                    pass
                case [y, *rest]:
                    z = y
        """,
        [
            ("match [x, x[0]]:",),
            ("case [y]:",),
            ("case [y, *rest]:", "y [2, 3]"),
            ("z = y", "z [2, 3]"),
        ],
    ),
    "try": (
        """
        def f(x):
            try:
                y = x.nothing
            except AttributeError as error:
                y = x[0]
            finally:
                z = y
        """,
        [
            ("try:",),
            ("y = x.nothing",),
            ("except AttributeError as error:",),
            ("y = x[0]", "y [3]"),
            ("z = y", "z [3]"),
        ],
    ),
    "nested functions": (
        """
        def f(x):
            y = x
            def inner():
                nonlocal y
                y = x[0]
            inner()
            return (lambda: y)()
        """,
        [
            ("y = x", "y [2, 3]"),
            ("def inner():",),
            ("inner()",),
            ("return (lambda: y)()", "return [3]"),
        ],
    ),
    "globals": (
        """
        def f(x):
            global y
            y = x
        """,
        [("y = x", "y [2, 3]")],
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_each_construct_gives_what_it_assigned_where(
    observe: Observe, name: str
) -> None:
    source, expected = CONSTRUCTS[name]
    assert observe(source) == expected


def test_a_statement_over_several_lines_is_one_step(tmp_path: Path) -> None:
    source = """
    def f(
        x,
    ):
        y = x.view(
            3,
            2,
        )
        for row in (
            y,
        ):  # [a, b]

            # A note.
            z = [
                a + 1
                for a in row
            ]
        return (
            y
        )
    """
    path = write(tmp_path, source, "_ = f(T(2, 3))")
    (call,) = trace(path).calls
    steps = [(step.line, step.last_line, *shown(step.values)) for step in call.steps]
    assert call.line == 2
    assert steps == [
        (5, 8, "y [3, 2]"),
        (9, 11, "row [3, 2]"),
        (14, 17, "a [2]", "a [2]", "a [2]"),
        (9, 11),
        (18, 20, "return [3, 2]"),
    ]


def test_calls_are_kept_apart_and_know_their_parents(tmp_path: Path) -> None:
    source = """
    class Layer:
        def __init__(self, x):
            self.__x = x

        @staticmethod
        def g(x, n=0, *rest, last=None, **more):
            return f(x, n - 1) if n else x

    def f(x, n):
        def inner():
            return Layer.g(x, n)
        return inner()
    """
    path = write(tmp_path, source, "_ = f(T(2), 1)\nx = Layer(T(3))\n_ = x.g(T(5))")
    calls = trace(path).calls
    assert [(call.symbol, call.parent, call.example, call.line) for call in calls] == [
        ("f", None, 0, 10),
        ("f.inner", 0, 0, 11),
        ("Layer.g", 1, 0, 7),
        ("f", 2, 0, 10),
        ("f.inner", 3, 0, 11),
        ("Layer.g", 4, 0, 7),
        ("Layer.__init__", None, 1, 3),
        ("Layer.g", None, 2, 7),
    ]
    assert shown(calls[-2].steps[0].values) == ["self.__x [3]"]
    assert all(shown(call.arguments) == ["x [2]"] for call in (calls[0], calls[5]))


def test_tensors_among_the_arguments_have_their_names(tmp_path: Path) -> None:
    source = "def f(a, /, b, *c, d=T(7), e=1, **g): return lambda: (a, d)"
    example = "_ = f(T(1), T(2), T(3), T(5), mask=T(11))"
    (call,) = trace(write(tmp_path, source, example)).calls
    expected = ["a [1]", "b [2]", "d [7]", "c[0] [3]", "c[1] [5]", "mask [11]"]
    assert shown(call.arguments) == expected


def test_generators_are_one_call_however_often_they_are_resumed(tmp_path: Path) -> None:
    source = """
    def rows(x):
        for row in x:
            back = yield row
        return x

    def f(x):
        y = yield from rows(x)
        for row in rows(x):
            break
        unused = rows(x)
        z = y
    """
    path = write(tmp_path, source, "_ = list(f(T(2, 3)))")
    f, whole, broken = trace(path).calls
    assert (f.symbol, whole.symbol, broken.symbol) == ("f", "rows", "rows")
    assert (f.parent, whole.parent, broken.parent) == (None, 0, 0)
    assert told(path, whole) == [
        ("for row in x:", "row [3]"),
        ("back = yield row", "yield [3]"),
        ("for row in x:", "row [3]"),
        ("back = yield row", "yield [3]"),
        ("for row in x:",),
        ("return x", "return [2, 3]"),
    ]
    assert told(path, f) == [
        ("y = yield from rows(x)", "yield [3]", "yield [3]", "y [2, 3]"),
        ("for row in rows(x):", "row [3]"),
        ("break",),
        ("unused = rows(x)",),
        ("z = y", "z [2, 3]"),
    ]
    assert told(path, broken) == told(path, whole)[:2]
    assert [call.raised for call in (f, whole, broken)] == [None, None, None]


def test_an_exception_thrown_into_a_generator_leaves_it(tmp_path: Path) -> None:
    source = """
    def f(x):
        yield x
    """
    example = """rows = f(T(2))
_ = next(rows)
rows.throw(KeyError(1))
Traceback (most recent call last):
KeyError: 1"""
    path = write(tmp_path, source, example)
    text = path.read_text().replace(">>> Trace", "Trace").replace(">>> KeyE", "KeyE")
    path.write_text(text)
    (call,) = trace(path).calls
    assert call.raised == "KeyError"
    assert told(path, call) == [("yield x", "yield [2]")]


def test_coroutines_are_followed(observe: Observe) -> None:
    source = """
    import asyncio

    async def f(x):
        await asyncio.sleep(0)
        return [row async for row in g(x)]

    async def g(x):
        for row in x:
            yield row
    """
    expected = ("return [row async for row in g(x)]", "row [3]", "row [3]")
    steps = observe(source, "_ = asyncio.run(f(T(2, 3)))")
    assert steps == [("await asyncio.sleep(0)",), expected]


def test_an_exception_ends_the_calls_that_it_leaves(tmp_path: Path) -> None:
    source = """
    def f(x):
        try:
            y = g(x)
        except KeyError:
            return x

    def g(x):
        try:
            x = h(x)
        finally:
            z = x[0]

    def h(x):
        y = x
        raise KeyError(y)
    """
    path = write(tmp_path, source, "_ = f(T(2, 3))")
    calls = trace(path).calls
    assert [call.raised for call in calls] == [None, "KeyError", "KeyError"]
    assert told(path, calls[0])[-1] == ("return x", "return [2, 3]")
    assert told(path, calls[1]) == [("try:",), ("x = h(x)",), ("z = x[0]", "z [3]")]


def test_a_long_body_with_many_names_is_read_as_a_short_one(observe: Observe) -> None:
    # More than 255 names and jumps take instructions with a prefix.
    lines = "\n".join(f"        y{n} = x" for n in range(300))
    source = f"def f(x):\n    for row in x:\n{lines}\n        last = row\n"
    steps = observe(source)
    assert len(steps) == 2 * (1 + 300 + 1) + 1
    assert steps[0] == ("for row in x:", "row [3]")
    assert steps[301] == ("last = row", "last [3]")
    assert steps[300] == ("y299 = x", "y299 [2, 3]")


def test_data_is_what_was_seen_then(tmp_path: Path) -> None:
    source = """
    def f(x):
        y = x
        x += 1
        x[0] = 5
        return y
    """
    path = write(tmp_path, source, "_ = f(T(2, 3))")
    (call,) = trace(path, limit=6).calls
    zeros, ones = [[0] * 3] * 2, [[1] * 3] * 2
    changed = [[5, 1, 1], [1] * 3]
    assert call.arguments[0].data == zeros
    seen = [step.values[0].data for step in call.steps]
    assert seen == [zeros, ones, changed, changed]
    (call,) = trace(path, limit=5).calls
    assert call.arguments[0].data is None


def test_a_value_has_shape_dtype_strides_and_memory(tmp_path: Path) -> None:
    path = write(tmp_path, "def f(x): y = x", "f(T(2, 3))")
    assert trace(path).calls[0].arguments == [
        Value("x", (2, 3), "float32", "pond:0", (3, 1), True, None, [[0] * 3] * 2)
    ]


def test_objects_that_only_resemble_tensors_are_ignored(observe: Observe) -> None:
    source = """
    class Odd:
        shape = ("q_len", 3)

    class Worse:
        @property
        def shape(self):
            raise RuntimeError

    def f(x):
        a, b, c = Odd(), Worse(), T
        x = Box()
        x.shape = (2, 3)
    """
    steps = observe(source)
    assert [values for _, *values in steps] == [[], [], []]


def test_shares_names_the_first_value_alive_with_the_same_memory(
    tmp_path: Path,
) -> None:
    # `x` is made inside: an argument may be alive as long as its caller, which holds it
    # wherever a frame evaluator is installed, as `torch.compile` leaves one behind.
    source = """
    def f(given):
        x = given + 1
        y = x + 1
        a, b = x.view(6), y.view(6)
        x = x.view(3, 2)
        for _ in range(99):
            y = y + 1
        x += 1
        return b
    """
    (call,) = trace(write(tmp_path, source, "_ = f(T(2, 3))")).calls
    shares = [(v.name, v.shares) for step in call.steps for v in step.values]
    first = [("x", None), ("y", None), ("a", "x"), ("b", "y"), ("x", "x")]
    assert shares[:5] == first
    assert set(shares[5:-2]) == {("y", None)}
    assert shares[-2:] == [("x", "a"), ("return", "b")]


def test_nothing_is_kept_alive(tmp_path: Path) -> None:
    source = """
    import weakref

    def f(x):
        y = x + 1
        seen = weakref.ref(y)
        z = y.view(6)
        del y
        n = 1
        assert seen() is None
        return z

    def g(x):
        y = x + 1
        yield weakref.ref(y)
    """
    example = "import gc\ngc.disable()\nx = T(2, 3)\n_ = f(x)\nref = weakref.ref(x)"
    example += "\nseen = next(g(x))\ndel x, _\nassert (ref(), seen()) == (None, None)"
    collecting = gc.isenabled()
    try:
        trace(write(tmp_path, source, example))
    finally:
        gc.enable() if collecting else None


def test_examples_share_their_names_within_a_docstring_only(tmp_path: Path) -> None:
    source = """
    name = T(2)

    def second():
        '''
        >>> _ = f(name)
        >>> print("wrong output is not our business")
        >>> name = T(3)
        >>> _ = f(name)  # doctest: +SKIP
        >>> f(None)
        Traceback (most recent call last):
        AttributeError: 'NoneType' object has no attribute 'shape'
        '''

    def f(x):
        assert x.shape
        return x

    def a():
        '''
        >>> _ = f(name)
        '''
    """
    calls = trace(write(tmp_path, source, "_ = f(T(5))")).calls
    seen = [(call.example, shown(call.arguments), call.raised) for call in calls]
    assert seen == [
        (0, ["x [2]"], None),
        (4, [], "AttributeError"),
        (5, ["x [2]"], None),
        (6, ["x [5]"], None),
    ]


def test_an_example_that_raises_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "def f(x):\n    return x.nothing", "x = 1\n_ = f(T(2))")
    said = f"{path}:7: the example raises AttributeError: 'T' object has no attribute"
    with pytest.raises(TraceError, match=re.escape(said)):
        trace(path)
    assert sys.gettrace() is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0", "1: cannot be imported: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "1: cannot be imported: SystemExit: 3"),
        (None, "1: there is no such file"),
    ],
)
def test_a_module_that_cannot_be_traced_is_named(
    tmp_path: Path, source: str | None, reason: str
) -> None:
    path = tmp_path / "literate.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(TraceError, match=re.escape(f"{path}:{reason}")):
        trace(path)


def test_a_single_file_is_executed_anew_each_time(tmp_path: Path) -> None:
    for folder, size in (("one", 2), ("two", 3), ("one", 5)):
        (tmp_path / folder).mkdir(exist_ok=True)
        path = write(tmp_path / folder, "def f(x): return x", f"_ = f(T({size}))")
        path = path.rename(path.with_name("json.py"))  # as one that is loaded already
        before, folders = dict(sys.modules), list(sys.path)
        assert trace(path).calls[0].arguments[0].shape == (size,)
        assert sys.modules == before
        assert "duck" not in before
        assert sys.path == folders
        assert not (path.parent / "__pycache__" / "json.cpython-311.pyc").exists()


def test_a_module_of_a_package_is_the_one_that_others_import(tmp_path: Path) -> None:
    inner = tmp_path / "flock" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "flock" / "__init__.py").touch()
    (inner / "__init__.py").touch()
    (inner / "duck.py").write_text(DUCK)
    (inner / "other.py").write_text("def of(x): import flock.inner.bird as b; return b")
    path = inner / "bird.py"
    source = "from flock.inner.other import of\nfrom flock.inner.duck import T\n\n\n"
    source += (
        'def f(x):\n    """\n    >>> assert of(1).f is f\n    >>> f(T(2))\n    """'
    )
    path.write_text(f"{source}\n    y = x\n")
    try:
        (call,) = trace(path).calls
        assert call.steps[0].line == 10
        # The module stays loaded: its lines must not be those of a newer file.
        path.write_text(f"# A new line.\n{source}\n    y = x\n")
        edited = "5: was edited after its import; trace it in a fresh process"
        with pytest.raises(TraceError, match=re.escape(f"{edited}")):
            trace(path)
    finally:
        for name in [name for name in sys.modules if name.startswith("flock")]:
            del sys.modules[name]


@pytest.mark.slow
def test_a_compiled_function_is_no_edited_file(tmp_path: Path) -> None:
    path = tmp_path / "bird.py"
    source = """
        import torch


        @torch.compile(backend="eager")
        def double(x):
            return x + x


        def f(x):
            y = double(x)
            return y
    """
    path.write_text(textwrap.dedent(source).lstrip(), encoding="utf-8")
    calls = trace(path, calls=["f(torch.ones(2))"]).calls
    (call,) = [call for call in calls if call.symbol == "f"]
    assert [step.line for step in call.steps] == [10, 11]


@pytest.mark.parametrize(
    ("file", "neighbour", "line"),
    [
        ("flock/bird.py", "flock/duck.py", "from .duck import T"),
        ("flock/inner/bird.py", "flock/duck.py", "from ..duck import T"),
        ("flock/inner/bird.py", "flock/other/duck.py", "from ..other.duck import T"),
    ],
)
@pytest.mark.parametrize("marked", [False, True])
def test_a_folder_is_a_package_where_relative_imports_say_so(
    tmp_path: Path, file: str, neighbour: str, line: str, marked: bool
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    # A package without its mark may hold others that have one.
    (path.parent / "__init__.py").touch() if marked else None
    (tmp_path / neighbour).parent.mkdir(exist_ok=True)
    (tmp_path / neighbour).write_text(DUCK)
    top = tmp_path / "flock" / "__init__.py"
    # Of two lengths: bytecode counts as current while the second in which the file was
    # written and its size stay the same.
    for size in (2, 13):
        example = f'def f(x):\n    """\n    >>> f(T({size}))\n    """\n    y = x\n'
        path.write_text(f"{line}\n\n\n{example}")
        before, folders = dict(sys.modules), list(sys.path)
        (call,) = trace(path).calls
        assert (call.steps[0].line, call.arguments[0].shape) == (8, (size,))
        assert sys.path == folders
        if top.exists():
            for name in sys.modules.keys() - before.keys():
                del sys.modules[name]
        assert sys.modules == before


def test_dots_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bird.py"
    path.write_text("from .duck import T\n")
    name = f"{tmp_path.name}.duck"
    said = (
        f"{path}:1: cannot be imported: ModuleNotFoundError: No module named '{name}'"
    )
    with pytest.raises(TraceError, match=re.escape(said)):
        trace(path)


# Every construct in one file, written to a second Python as JSON.
DUMP = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from sidenotes.trace import trace

print(json.dumps([asdict(call) for call in trace(Path(sys.argv[1])).calls]))
"""


def interpreter(version: str) -> str:
    """Another Python, where there is one that starts."""
    installed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for name in (f"python{version}", *map(str, installed)):
        if program := shutil.which(name):
            command = [program, "-c", "import sys; print(sys.executable)"]
            result = subprocess.run(command, capture_output=True, text=True)
            if not result.returncode:
                return result.stdout.strip()
    pytest.skip(f"there is no Python {version} on this machine")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_every_python_gives_the_same_record(tmp_path: Path, version: str) -> None:
    # `sys.settrace` here and `sys.monitoring` there, or the other way round.
    program = interpreter(version)
    functions = [textwrap.dedent(source) for source, _ in CONSTRUCTS.values()]
    source = "\n".join(
        re.sub(r"^def f\(", f"def f{number}(", function, flags=re.MULTILINE)
        for number, function in enumerate(functions)
    )
    calls = "\n".join(f"_ = f{number}(T(2, 3))" for number in range(len(functions)))
    path = write(tmp_path, source, calls)
    here = [asdict(call) for call in trace(path).calls]
    result = subprocess.run(
        [program, "-c", DUMP, path],
        env={"PATH": "", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(here) > len(functions)
    assert json.loads(result.stdout) == json.loads(json.dumps(here))


def test_the_core_is_recorded_line_by_line() -> None:
    torch.manual_seed(2017)
    record = trace(CORE)
    first, masked = calls_of(record, "MultiHeadAttention.forward")
    assert shown(first.arguments) == [
        "query [3, 2, 77]",
        "key [5, 2, 77]",
        "value [5, 2, 77]",
    ]
    lines = CORE.read_text().split("\n")
    steps = [
        (
            lines[step.line - 1].split("=")[0].strip(),
            shown(step.values),
            *(value.shares for value in step.values),
        )
        for step in first.steps
    ]
    assert steps == [
        ('check_weight(self, "output")', []),
        ("check_inputs(self.output.weight, query, key, value)", []),
        ("if mask is not None:", []),
        ("query", ["query [3, 2, 7, 11]"], None),
        ("key", ["key [5, 2, 7, 11]"], None),
        ("value", ["value [5, 2, 7, 11]"], None),
        ("query", ["query [3, 2, 7, 11]"], None),
        ("scores", ["scores [3, 5, 2, 7]"], None),
        ("attn", ["attn [3, 5, 2, 7]"], None),
        ("if not torch.compiler.is_exporting():", []),
        ("self.attn", ["self.attn [3, 5, 2, 7]"], "attn"),
        ("attn", ["attn [3, 5, 2, 7]"], None),
        ("context", ["context [3, 2, 7, 11]"], None),
        ("context", ["context [3, 2, 77]"], None),
        ("output: Tensor", ["output [3, 2, 77]"], None),
        ("return output", ["return [3, 2, 77]"], "output"),
    ]
    # One tensor is both key and value, and the mask gets its last axis as a view.
    shares = [value.shares for value in masked.arguments]
    assert shares == [None, None, "key", None]
    shares = [value.shares for step in masked.steps for value in step.values]
    assert shares[0] == "mask"
    assert shares[1:10] == [None] * 9
    assert shares[10:] == ["attn", None, None, None, None, "output"]
    callers = {
        call.symbol: record.calls[call.parent].symbol
        for call in record.calls
        if call.parent is not None
    }
    assert callers["masked_softmax"] == "MultiHeadAttention.get_weights"


def test_the_values_of_the_core_are_those_of_torch() -> None:
    torch.manual_seed(2017)
    call = calls_of(trace(CORE), "MultiHeadAttention.forward")[0]
    attn = next(v for step in call.steps for v in step.values if v.name == "attn")
    scores = next(v for step in call.steps for v in step.values if v.name == "scores")
    expected = torch.tensor(scores.data).softmax(dim=1)
    torch.testing.assert_close(torch.tensor(attn.data), expected)
    assert (attn.dtype, attn.device) == ("float32", "cpu")
    # `einsum` leaves the keys innermost.
    assert (scores.strides, scores.contiguous) == ((5, 1, 105, 15), False)


def test_recording_does_not_change_the_state_of_torch(tmp_path: Path) -> None:
    source = """
    import torch

    def f(x):
        y = (x * 2).view(6)
        q, k = y.chunk(2)
        total = (q * k).sum()
        return total
    """
    example = """x = torch.rand(2, 3, requires_grad=True)
y = f(x)
assert (x._version, y._version, y.grad_fn.name()) == (0, 0, "SumBackward0")
y.backward()
assert x.grad is not None"""
    torch.manual_seed(0)
    torch.rand(2, 3)
    following = torch.rand(1)
    torch.manual_seed(0)
    (call,) = trace(write(tmp_path, source, example)).calls
    assert torch.rand(1) == following
    seen = [(v.name, v.shares) for step in call.steps for v in step.values]
    assert seen[:3] == [("y", None), ("q", "y"), ("k", "y")]


@pytest.mark.slow
def test_tensors_without_memory_have_no_data(tmp_path: Path) -> None:
    source = """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Double(torch.nn.Module):
        def forward(self, x):
            y = x * 2
            return y

    double = Double()
    """
    example = """_ = double(torch.rand(2, 3, device="meta"))
with FakeTensorMode(): _ = double(torch.rand(2, 3))
_ = torch.vmap(double)(torch.rand(2, 3))
_ = double(torch.rand(2, 3).to_sparse())
_ = double(torch.rand(0, 3))
rows = {"x": {0: torch.export.Dim("rows")}}
_ = torch.export.export(double, (torch.rand(2, 3),))
exported = torch.export.export(double, (torch.rand(2, 3),), dynamic_shapes=rows)
assert exported.module()(torch.rand(5, 3)).shape == (5, 3)"""
    calls = trace(write(tmp_path, source, example)).calls
    seen = [step.values[0] for call in calls for step in call.steps[:1] if step.values]
    described = [(v.shape, v.device, v.strides, v.shares, v.data) for v in seen]
    assert described[:6] == [
        ((2, 3), "meta", (3, 1), None, None),
        ((2, 3), "cpu", (3, 1), None, None),
        ((3,), "cpu", (1,), None, None),
        ((2, 3), "cpu", (0, 0), None, None),
        ((0, 3), "cpu", (3, 1), None, []),
        ((2, 3), "cpu", (3, 1), None, None),
    ]
    # While exporting, one size is a symbol: that is no number to be written down.
    assert described[6:] == []


def test_arrays_share_memory_as_tensors_do(tmp_path: Path) -> None:
    source = """
    import numpy as np

    def f(x):
        rows, turned = x[1:], x.T
        copy = x.copy()

    def g(x):
        rest = x.base[3:]
    """
    example = "_ = f(np.arange(6.0).reshape(2, 3))\n_ = g(np.arange(6.0)[:3])"
    call, other = trace(write(tmp_path, source, example)).calls
    assert other.steps[0].values[0].shares == "x"  # the same storage, as in torch
    rows, turned, copy = [value for step in call.steps for value in step.values]
    x = call.arguments[0]
    assert (x.dtype, x.data, x.contiguous) == ("float64", [[0, 1, 2], [3, 4, 5]], True)
    assert (rows.shares, turned.shares, copy.shares) == ("x", "x", None)
    assert (turned.strides, turned.contiguous) == ((1, 3), False)


def test_other_files_and_other_threads_are_not_followed(tmp_path: Path) -> None:
    source = """
    import sys, threading

    def f(x):
        thread = threading.Thread(target=g, args=(x,))
        thread.start()
        thread.join()
        return x.view(6)

    def g(x):
        y = x
    """
    record = trace(write(tmp_path, source, "_ = f(T(2, 3))"))
    assert [call.symbol for call in record.calls] == ["f"]


@pytest.mark.slow
def test_recording_costs_at_most_five_times_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fastest(record: bool) -> float:
        times = []
        for _ in range(7):
            with imported(CORE) as module:
                recorder = Recorder(CORE, module, 2048)
                examples = Examples(module, recorder.begin)
                start = time.process_time()
                with tracing(recorder) if record else nullcontext():
                    examples.run_all()
                times.append(time.process_time() - start)
        return min(times)

    plain, recorded = fastest(False), fastest(True)
    with capsys.disabled():
        print(f" [{recorded / plain:.1f} times {1000 * plain:.1f} ms]", end="")
    assert recorded < 5 * plain
