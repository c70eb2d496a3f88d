r"""# Checking a solution

`check` calls a solution on inputs from the smallest to the largest, and compares each
answer with the expected one. At the first difference it reports the input, as code, and
both answers. If the solution gives the same answers as a known mistake on all inputs,
the report ends with a hint for that mistake. The text of the solution is not read.

```python
from headnotes.exercises import check

print(check("causal_mask", my_causal_mask))
```

Nothing is sent anywhere or stored.

Source: the expected answers come from loops over Python's numbers where these are
short, and else from the [reference implementation](../mha.md).
"""

import ast
import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from textwrap import indent
from typing import Any

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, call, load, numbers

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@dataclass(frozen=True)
class Report:
    """What came of a check. It is true if the solution passes, and prints as text."""

    name: str
    message: str = ""
    details: str = ""
    mistake: str = ""
    hint: str = ""

    def __bool__(self) -> bool:
        return not self.message

    def __repr__(self) -> str:
        if not self.message:
            return f"{self.name}: pass"
        parts = [f"{self.name}: FAIL", self.message, self.details]
        parts += [f"Hint: {self.hint}"] if self.hint else []
        return "\n\n".join(filter(None, parts))


@dataclass(frozen=True)
class Answer:
    """What a solution returns for an input, and what else it does."""

    value: Any = None
    error: Exception | None = None
    changed: Sequence[int] = ()
    """Positions of the arguments that the call has modified."""
    repeated: bool = True
    """Whether a second call returns the same."""
    gradients: tuple[Tensor, ...] | None = None
    """With respect to each floating-point tensor of the input, if there are any."""


@dataclass
class Comparison:
    """Answers of one solution to the inputs of an exercise, computed when needed."""

    exercise: Exercise
    function: Callable[..., Any]
    answers: list[Answer] = field(default_factory=list)

    def __getitem__(self, position: int) -> Answer:
        while len(self.answers) <= position:
            arguments = self.exercise.inputs[len(self.answers)]
            self.answers.append(answer(self.exercise, self.function, arguments))
        return self.answers[position]


def check(name: str, mine: Callable[..., Any], *, law: str | None = None) -> Report:
    r"""Check a solution of an exercise: `mine` is the function or the class.

    In the series *Find the bug*, `law` names a law that the given code violates.

    Raises `ValueError` for an unknown exercise, `TypeError` where `mine` cannot be
    called.

    >>> check("causal_mask", lambda q_len, k_len: torch.ones(q_len, k_len).tril() > 0)
    causal_mask: FAIL
    <BLANKLINE>
    This input gives a wrong answer:
    <BLANKLINE>
        causal_mask(1, 2)
    <BLANKLINE>
    expected: tensor([[True, True]])
    got:      tensor([[ True, False]])
    <BLANKLINE>
    Hint: The first query is aligned with the first key. Align the last query with the
    last key: shift the diagonal by `k_len - q_len`.
    """
    exercise = load(name)
    if not callable(mine):
        seen = type(mine).__name__
        raise TypeError(f"`mine` must be a function or a class, but is a {seen}")
    if exercise.laws and law not in exercise.laws:
        return Report(name, wrong_law(law))
    came = Comparison(exercise, mine)
    solved = Comparison(exercise, exercise.solution)
    for position, arguments in enumerate(exercise.inputs):
        # The loops of a reference have no gradients; those of the solution are tested.
        value = exercise.run(exercise.reference, *fresh(arguments))
        expected = replace(solved[position], value=value)
        if message := fault(expected, came[position]):
            if isinstance(came[position].error, NotImplementedError):
                return Report(name, "The code to complete is not written yet.")
            details = f"{indent(code(exercise, arguments), '    ')}\n\n"
            details += values(expected, came[position])
            return Report(name, message, details.rstrip(), *recognized(came))
    return Report(name)


def wrong_law(law: str | None) -> str:
    """What is wrong with the name of a law that the given code does not violate."""
    if not law:
        return "`law` is empty; name the law that the given code violates."
    return f"The given code does not violate the law `{law}`."


def recognized(came: Comparison) -> tuple[str, str]:
    """The name and the hint of the mistake that gives the same answers, if one does."""
    exercise = came.exercise
    for mistake in exercise.mistakes:
        other = Comparison(exercise, mistake)
        positions = range(len(exercise.inputs))
        if not any(fault(other[position], came[position]) for position in positions):
            return mistake.__name__, inspect.getdoc(mistake) or ""
    return "", ""


def answer(
    exercise: Exercise, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Answer:
    """Call a solution twice, the second time with inputs that need gradients."""
    given, again = fresh(arguments), fresh(arguments)
    leaves = [x for x in again if isinstance(x, Tensor) and x.is_floating_point()]
    try:
        value = exercise.run(function, *given)
        pairs = enumerate(zip(arguments, given, strict=True))
        tensors = [(i, x, y) for i, (x, y) in pairs if isinstance(x, Tensor)]
        if changed := [i for i, x, y in tensors if not same(x, y)]:
            return Answer(value, changed=changed)
        for leaf in leaves:
            leaf.requires_grad_()
        second = exercise.run(function, *again)
        gradients = gradients_of(second, leaves)
    except Exception as error:
        return Answer(error=error)
    repeated = not difference(value, detached(second))
    return Answer(value, repeated=repeated, gradients=gradients)


def gradients_of(value: Any, leaves: list[Tensor]) -> tuple[Tensor, ...] | None:
    """The gradients of a weighted sum of the answer, or None without a graph."""
    values = value if isinstance(value, tuple) else (value,)
    parts = [x for x in values if isinstance(x, Tensor) and x.requires_grad]
    if not parts or not leaves:
        return None
    # Ones would not do: the rows of a softmax have a constant sum.
    total = sum((x * numbers(*x.shape, seed=1)).sum() for x in parts)
    assert isinstance(total, Tensor)  # there is a part
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


def fault(expected: Answer, came: Answer) -> str:
    """What is wrong with an answer, in a sentence; empty if nothing is."""
    if came.error is not None:
        alike = type(expected.error) is type(came.error)
        return "" if alike else described(came.error)
    if expected.error is not None:
        return "This input gives an answer, where an error is expected:"
    if text := difference(expected.value, came.value):
        return text
    if expected.changed != came.changed:
        which = ", ".join(str(i + 1) for i in came.changed)
        return f"This call changes its input in place, argument {which}:"
    if expected.repeated != came.repeated:
        return "A second call with this input gives another answer:"
    if expected.gradients is not None and came.gradients is None:
        return "The answer for this input has no gradient:"
    if expected.gradients and difference(expected.gradients, came.gradients):
        return "The answer for this input is right, but its gradient is not:"
    return ""


def difference(expected: Any, came: Any) -> str:
    """How two answers differ, in a sentence; empty if they do not."""
    if came is None:
        return "This input gives `None`; does the code end with a `return`?"
    if isinstance(expected, tuple):
        if not isinstance(came, tuple) or len(came) != len(expected):
            return f"This input does not give a tuple of {len(expected)} tensors:"
        pairs = zip(expected, came, strict=True)
        return next(filter(None, (difference(x, y) for x, y in pairs)), "")
    if not isinstance(came, Tensor):
        return f"This input gives a {type(came).__name__}, not a tensor:"
    if came.shape != expected.shape:
        shapes = f"{list(came.shape)}, not {list(expected.shape)}"
        return f"This input gives a tensor of a wrong shape, {shapes}:"
    if came.dtype != expected.dtype:
        return f"This input gives a tensor of {came.dtype}, not {expected.dtype}:"
    if came.isnan().any() and not expected.isnan().any():
        return "This input gives NaN:"
    return "" if same(expected, came) else "This input gives a wrong answer:"


def same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    return x.shape == y.shape and x.allclose(y, **TOLERANCE, equal_nan=True)


def described(error: Exception) -> str:
    """An error, and the last line of the learner's code that led to it."""
    inside = inspect.getfile(call), inspect.getfile(check), torch.__path__[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(inside)]
    where = f" in the line `{own[-1].line}`" if own and own[-1].line else ""
    return f"This input raises {type(error).__name__}{where}: {error}"


def values(expected: Answer, came: Answer) -> str:
    """Both answers, or their gradients if only these differ."""
    if came.error is not None or came.value is None:
        return ""
    what, pair = "", (expected.value, came.value)
    if not difference(*pair):
        if not came.repeated or came.gradients is None:
            return ""
        what, pair = " gradients", (expected.gradients, came.gradients)
        if not difference(*pair):
            return ""
    labels = f"expected{what}: ", f"got{what}:      "
    texts = [
        label + indent(repr(detached(x)), " " * len(label)).strip()
        for label, x in zip(labels, pair, strict=True)
    ]
    return "\n".join(texts)


def code(exercise: Exercise, arguments: tuple[Any, ...]) -> str:
    r"""The call that gives an answer, to be pasted below the solution.

    >>> print(code(load("causal_mask"), (2, 3)))
    causal_mask(2, 3)
    """
    texts = [literal(each) for each in arguments]
    name = exercise.solution.__name__
    before = ""
    if exercise.run is not call:
        before = unannotated(inspect.getsource(exercise.run)) + "\n\n\n"
        texts, name = [name, *texts], exercise.run.__name__
    line = f"{name}({', '.join(texts)})"
    if len(line) > 80:
        line = f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + ")"
    return before + line


def unannotated(source: str) -> str:
    r"""A function without its annotations, whose names a notebook need not have.

    >>> print(unannotated("def double(x: Tensor) -> Tensor:\n    return 2 * x"))
    def double(x):
        return 2 * x
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    return ast.unparse(tree)


def literal(value: Any) -> str:
    r"""A value as code.

    >>> literal(torch.tensor([[0.5, 1.0], [-torch.inf, 2.0]]))
    'torch.tensor([[0.5, 1.0], [-torch.inf, 2.0]])'
    >>> literal(torch.empty(0, 3)), literal(torch.tensor([1]).int())
    ('torch.empty(0, 3)', 'torch.tensor([1], dtype=torch.int32)')
    """
    if not isinstance(value, Tensor):
        return repr(value)
    plain = value.dtype in (torch.float32, torch.int64, torch.bool)
    dtype = "" if plain else f", dtype={value.dtype}"
    if not value.numel():
        return f"torch.empty({', '.join(map(str, value.shape))}{dtype})"
    text = repr(value.tolist()).replace("inf", "torch.inf").replace("nan", "torch.nan")
    return f"torch.tensor({text}{dtype})"


def fresh(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the tensors, since a solution may modify its inputs."""
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in arguments)


def detached(value: Any) -> Any:
    """An answer without its graph."""
    if isinstance(value, tuple | list):
        return type(value)(detached(each) for each in value)
    return value.detach() if isinstance(value, Tensor) else value
