"""Recordings: what is kept of a run, under which names, and for how long."""

import json
from pathlib import Path
from typing import Any

import pytest

from sidenotes import record as recorder
from sidenotes.dependencies import Imports
from sidenotes.record import flat, record, recording
from sidenotes.split import LiterateError
from sidenotes.trace import trace

NONE = Imports([])  # the modules import nothing of their folder

# A tensor is whatever has a shape: no test here needs torch.
TENSOR = """
class T:
    def __init__(self, *shape, start=0.0):
        self.shape, self.start = shape, start
    dtype, device = "t.float32", "cpu"
    def tolist(self):
        def fill(shape, at):
            if not shape:
                return at
            step = 1
            for size in shape[1:]:
                step *= size
            return [fill(shape[1:], at + i * step) for i in range(shape[0])]
        return fill(self.shape, self.start)
"""


def recorded(tmp_path: Path, source: str) -> dict[str, Any]:
    path = tmp_path / "a.py"
    path.write_text(source, encoding="utf-8")
    return json.loads(json.dumps(record(source, trace(path))))


def at(source: str, code: str) -> str:
    """The number of the line that holds `code`."""
    return str(1 + [code in line for line in source.split("\n")].index(True))


def test_a_confirmed_claim_names_its_axes_and_those_of_nearby_values(
    tmp_path: Path,
) -> None:
    source = (
        TENSOR
        + '''
def f(q, k):
    """
    >>> f(T(3, 7), T(5, 7)).shape
    (3, 5)
    """
    q = T(3, 7)  # [q_len, d]
    k = T(5, 7)  # [k_len, d]
    s = T(3, 5)  # [q_len, k_len]
    u = T(5, 1, 3)
    return T(3, 5)
'''
    )
    found = recorded(tmp_path, source)
    lines = found["lines"]
    assert found["checked"] == [
        int(at(source, f"# [{n}")) for n in ("q_len, d", "k_len, d", "q_len, k")
    ]
    assert lines[at(source, "u = T")]["text"] == "[k_len, 1, q_len]"
    assert lines[at(source, "return T(3, 5)")]["text"] == "[q_len, k_len]"
    call = next(call for call in found["calls"] if call["symbol"] == "f")
    assert call["arguments"][1]["axes"] == ["k_len", "d"]


def test_two_names_of_one_size_name_nothing_that_is_not_claimed(
    tmp_path: Path,
) -> None:
    source = (
        TENSOR
        + '''
def f(a, b):
    """
    >>> y = f(T(5, 5), T(5, 7)), f(T(2, 3), T(3, 7))
    """
    x = T(*a.shape)  # [m, n]
    y = T(*b.shape)  # [n, k]
    z = T(*a.shape)  # [m, n]
    w = T(*b.shape)  # [n, k]
    return T(*a.shape)
'''
    )
    found = recorded(tmp_path, source)
    # Of the two calls the second tells all sizes apart.
    assert found["lines"][at(source, "return T(*a")]["text"] == "[m, n]"
    weaker = source.replace(", f(T(2, 3), T(3, 7))", "")
    found = recorded(tmp_path, weaker)
    assert found["lines"][at(source, "return T(*a")]["text"] == "[5, 5]"


def test_an_ambiguous_claim_is_recorded_as_unverified(
    tmp_path: Path,
) -> None:
    source = (
        TENSOR
        + '''
def f():
    """
    >>> y = f()
    """
    return T(3, 3)  # [m, n]
'''
    )
    found = recorded(tmp_path, source)
    assert found["checked"] == []
    assert found["unverified"] == [int(at(source, "return T(3"))]
    assert found["lines"][at(source, "return T(3")]["text"] == "[3, 3]"


def test_a_false_claim_is_not_shown_as_checked(tmp_path: Path) -> None:
    source = (
        TENSOR
        + '''
def f():
    """
    >>> y = f()
    """
    x = T(3, 5)  # [m, n]
    y = T(5, 3)  # [m, n]
    z = T(3, 5)  # [m, n]
    return y
'''
    )
    found = recorded(tmp_path, source)
    line = at(source, "y = T(5")
    assert int(line) not in found["checked"]
    assert line in found["lines"]


def test_what_a_lambda_returns_is_no_value_of_the_line_that_it_stands_in(
    tmp_path: Path,
) -> None:
    source = (
        TENSOR
        + '''
def f(x):
    """
    >>> y = f(T(3))
    """
    y = T(*(lambda z: T(7))(x).shape, 3)
    return y

def g():
    """
    >>> y = g()(T(5))
    """
    return lambda z: T(11)
'''
    )
    found = recorded(tmp_path, source)
    # The inspector opens the first call that ran a line: it must be that of the shape.
    assert [call["symbol"] for call in found["calls"]] == ["f"]
    texts = {number: seen["text"] for number, seen in found["lines"].items()}
    assert texts == {at(source, "y = T(*("): "[7, 3]", at(source, "return y"): "[7, 3]"}


def test_a_call_that_returns_is_preferred_to_one_that_raises(tmp_path: Path) -> None:
    source = (
        TENSOR
        + '''
def f(x):
    """
    >>> y = f(T(3))
    >>> f(T(2, 7, 5))
    Traceback (most recent call last):
    ValueError
    """
    y = x
    if len(x.shape) > 1:
        raise ValueError
    return y
'''
    )
    (call,) = (c for c in recorded(tmp_path, source)["calls"] if c["symbol"] == "f")
    assert call["arguments"][0]["sizes"] == [3]
    assert [step["line"] for step in call["steps"]] == [
        int(at(source, code)) for code in ("y = x", "if len", "return y")
    ]


def test_numbers_have_four_digits_and_equal_tensors_are_stored_once(
    tmp_path: Path,
) -> None:
    source = (
        TENSOR
        + '''
def f():
    """
    >>> y = f()
    """
    x = T(2, start=0.123456)
    y = T(2, start=0.123456)
    return y
'''
    )
    found = recorded(tmp_path, source)
    assert found["tensors"] == [[0.1235, 1.123]]


@pytest.mark.parametrize(
    ("data", "numbers"),
    [
        (1.23456e-9, [1.235e-09]),
        ([float("nan"), float("-inf")], ["nan", "-inf"]),
        ([[True], [False]], [1, 0]),
        ([123456789], [123456789]),
        ([1 + 2j], ["(1+2j)"]),
        ([], []),
    ],
)
def test_numbers_become_json(data: Any, numbers: list[Any]) -> None:
    assert flat(data) == numbers
    assert json.loads(json.dumps(flat(data), allow_nan=False)) == numbers


def test_the_largest_tensors_go_when_a_page_grows_too_heavy() -> None:
    tensors = [[1.5], [n / 7 for n in range(300)], [2.5]]
    assert recorder.within_budget(tensors, 5000) == tensors
    assert recorder.within_budget(tensors, 120) == [[1.5], None, [2.5]]
    assert recorder.within_budget(tensors, -1) == [None, None, None]


@pytest.mark.slow
def test_long_code_leaves_less_room_for_tensors(tmp_path: Path) -> None:
    long = "".join(f"x{n} = {n * n}\n" for n in range(5000))
    assert recorded(tmp_path, TENSOR + EXAMPLE)["tensors"] == [[0.0, 1.0, 2.0]]
    assert recorded(tmp_path, TENSOR + EXAMPLE + long)["tensors"] == [None]


EXAMPLE = 'def f(x):\n    """\n    >>> y = f(T(3))\n    """\n    y = x\n    return y\n'


def files_of(tmp_path: Path) -> list[Path]:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(TENSOR + EXAMPLE)
    (tmp_path / "versions.txt").write_text("1")
    return sorted([*tmp_path.glob("*.py"), tmp_path / "versions.txt"])


@pytest.mark.slow
def test_nothing_is_run_when_nothing_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[set[str]] = []
    run = recorder.run

    def count(stored: dict[Path, Path], setup: str) -> None:
        ran.append({path.name for path in stored})
        run(stored, setup)

    monkeypatch.setattr(recorder, "run", count)
    files = files_of(tmp_path)
    a, b = tmp_path / "a.py", tmp_path / "b.py"

    def look(path: Path, setup: str = "") -> Any:
        cache = tmp_path / "cache"
        return recording(
            path, modules=files, imports=Imports([tmp_path]), setup=setup, cache=cache
        )

    first = look(a)
    assert first["calls"]
    look(b)
    assert look(a) == first
    assert ran == [{"a.py", "b.py"}]  # all at once, and once
    # A note moves the lines, and executes nothing.
    b.write_text("# a note\n\n" + b.read_text())
    assert look(b)["calls"][0]["line"] == first["calls"][0]["line"] + 2
    assert len(ran) == 1
    # Code and examples of a module concern those that import it, and no other.
    before = b.read_text()
    b.write_text(before.replace("T(3)", "T(3, 5)"))
    look(a)
    look(b)
    assert ran[1:] == [{"b.py"}]
    a.write_text("import b\n" + a.read_text())
    look(a)
    b.write_text(b.read_text() + "x = 1\n")
    look(a)
    assert ran[2:] == [{"a.py"}, {"a.py", "b.py"}]
    look(a, setup="pass")
    assert ran[4:] == [{"a.py", "b.py"}]
    # What is undone was recorded before.
    b.write_text(before)
    look(b)
    assert len(ran) == 5


def test_a_file_that_is_not_named_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("raise SystemExit('run')\n")
    cache = tmp_path / "cache"
    assert (
        recording(tmp_path / "a.py", modules=[], imports=NONE, setup="", cache=cache)
        is None
    )
    init = tmp_path / "__init__.py"
    init.write_text("raise SystemExit('run')\n")
    assert recording(init, modules=[init], imports=NONE, setup="", cache=cache) is None
    assert not cache.exists()


@pytest.mark.slow
def test_a_failing_example_stops_the_build_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('def f():\n    """\n    >>> f()\n    """\n    return 1 / 0\n')
    with pytest.raises(LiterateError, match=r"a\.py:3: the example raises ZeroDiv"):
        recording(
            path,
            modules=[path],
            imports=NONE,
            setup="",
            cache=tmp_path / "cache",
        )


@pytest.mark.slow
def test_the_setup_is_executed_before_each_module(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    for name in ("a", "b"):
        path = tmp_path / f"{name}.py"
        path.write_text(path.read_text().replace("T(3)", "T(3, start=random.random())"))
        path.write_text("import random\n" + path.read_text())
    setup = "import random; random.seed(7)"
    cache = tmp_path / "cache"
    a, b = (
        recording(path, modules=files, imports=NONE, setup=setup, cache=cache)
        for path in files
        if path.suffix == ".py"
    )
    assert a is not None
    assert b is not None
    assert a["tensors"] == b["tensors"] != []
