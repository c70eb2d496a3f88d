r"""# Defining a law

A law is a property of every correct implementation of attention. It consists of a
statement, a formula, a reason, and a test that can fail. It is written as a function
whose docstring holds the first three, so that its page, the output of `headnotes check`
and the [list of all laws](../../compare/laws.md) show the same text.

A test ends in one of three ways:

- it returns: the implementation passes;
- it raises `LawViolation`, with the failing example: the implementation fails;
- it raises `NotApplicable`, with the reason: an implementation without a mask argument,
  for example, cannot be tested on its masks.

Source: property-based testing, [QuickCheck](https://doi.org/10.1145/351240.351266),
Claessen and Hughes 2000: state what must hold for all inputs, search for a
counterexample, and shrink it before it is shown.
"""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from attention_laws.adapter import Sizes
    from attention_laws.script import Script

LawTest = Callable[["Script"], None]


@dataclass(frozen=True)
class Law:
    r"""A law: its name, statement, formula and reason, and the function that tests it.

    `assumes` names designs (of `structure.DESIGNS`) to which the law does not apply: if
    the code of an implementation mentions one, a violation is reported as a skip.

    `slow` marks a test that takes seconds, and runs at one size only. `strict` marks a
    law that most correct implementations violate; it runs only on request.
    """

    name: str
    statement: str
    formula: str  # LaTeX, without the dollars
    reason: str
    test: LawTest
    slow: bool = False
    strict: bool = False
    assumes: tuple[str, ...] = ()


class NotApplicable(Exception):  # noqa: N818
    """The law does not apply to this implementation; the message gives the reason."""


class Excused(NotApplicable):
    """A habit violates the law at these sizes; others, which hide it, are not tried.

    One head with a small slope, for example, has a linear bias that is nearly exact.
    """


def skip_unless(condition: object, reason: str) -> None:
    """Raise `NotApplicable` unless the condition holds."""
    if not condition:
        raise NotApplicable(reason)


class ScriptError(Exception):
    """A line of a script raised an exception, which is stored as `error`."""

    def __init__(
        self,
        error: Exception,
        is_call: bool = True,
        succeeded_before: bool = False,
        batch_size: int = 0,
    ) -> None:
        super().__init__(f"{type(error).__name__}: {first_line(error)}")
        self.error = error
        self.is_call = is_call  # whether it called the attention, not a helper
        # Whether the same call succeeded in another mode.
        self.succeeded_before = succeeded_before
        self.batch_size = batch_size


def first_line(error: Exception) -> str:
    r"""The first line of an error message, cut after 119 characters.

    PyTorch appends hints and C++ stack traces, which would break the table of results.

    >>> first_line(ValueError("`heads` is 3;\nuse 2"))
    '`heads` is 3;'
    """
    line = str(error).strip().partition("\n")[0]
    return line if len(line) < 120 else line[:119] + "…"


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    r"""How an error about an unknown name ends: with the similar name, or with all.

    >>> did_you_mean("causalty", ["causality", "padding"], "the laws are")
    'did you mean `causality`?'
    >>> did_you_mean("x", ["causality", "padding"], "the laws are")
    'the laws are causality, padding'
    """
    known = [*known]
    for similar in difflib.get_close_matches(name, known, n=1):
        return f"did you mean `{similar}`?"
    return f"{otherwise} {', '.join(known)}"


class LawViolation(Exception):  # noqa: N818
    """An implementation violates a law; `code` is the program that shows it.

    `difference` is the largest absolute difference found, and NaN where the law is not
    about a difference.
    """

    def __init__(
        self,
        message: str,
        difference: float,
        tolerance: float,
        code: str,
        sizes: "Sizes | None" = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.difference = difference
        self.tolerance = tolerance
        self.code = code
        self.sizes = sizes  # a law may use others than it was given


@overload
def law(test: LawTest) -> Law: ...
@overload
def law(
    *, slow: bool = False, strict: bool = False, assumes: str = ""
) -> Callable[[LawTest], Law]: ...
def law(
    test: LawTest | None = None,
    *,
    slow: bool = False,
    strict: bool = False,
    assumes: str = "",
) -> Any:
    r"""Decorator that makes a `Law` of its test, with or without arguments.

    The docstring of the test gives the texts: its first paragraph is the statement, the
    part between `$$` the formula, and the rest the reason.

    >>> parse_docstring("Weights are shares.\n\n$$a \\ge 0$$\n\nNone is negative.")
    ('Weights are shares.', 'a \\ge 0', 'None is negative.')
    """

    def decorate(test: LawTest) -> Law:
        texts = parse_docstring(test.__doc__ or "")
        return Law(test.__name__, *texts, test, slow, strict, tuple(assumes.split()))

    return decorate if test is None else decorate(test)


def parse_docstring(docstring: str) -> tuple[str, str, str]:
    """Statement, formula and reason of a law, each on one line."""
    parts = re.split(r"\$\$", inspect.cleandoc(docstring))
    before, formula, after = (*parts, "", "")[:3]
    statement, _, rest = before.partition("\n\n")
    return unwrap(statement), unwrap(formula), unwrap(f"{rest} {after}")


def unwrap(text: str) -> str:
    """Put wrapped text on one line."""
    return " ".join(text.split())
