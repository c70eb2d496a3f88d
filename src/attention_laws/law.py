r"""# What a law is

A law is one sentence about every attention, with a formula, a reason and a test that
can fail. It is written as a function whose docstring holds the first three, in this
order: what stands beside the code, what `headnotes check` prints and what the pages
show is the same text.

A test ends in one of three ways. It returns, and the law is kept. It raises `Broken`,
with the smallest example that was found. Or it raises `NotApplicable`, with the reason:
who takes no mask cannot be asked what a mask does.

Source: property-based testing, [QuickCheck](https://doi.org/10.1145/351240.351266),
Claessen and Hughes 2000: state what must hold for all inputs, search for one that
breaks it, and make it small before it is shown.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from attention_laws.adapter import Sizes
    from attention_laws.trial import Trial

Test = Callable[["Trial"], None]


@dataclass(frozen=True)
class Law:
    r"""A law: its name, what it says, why, and the test of it.

    `once` marks a test that costs seconds, and is made at one size only; `strict` one
    that correct attention may fail, and that is only made where it is asked for.
    """

    name: str
    statement: str
    formula: str  # LaTeX, without the dollars
    reason: str
    test: Test
    once: bool = False
    strict: bool = False


class NotApplicable(Exception):  # noqa: N818
    """The law asks for something that this attention does not have; says what."""


def need(condition: object, reason: str) -> None:
    """Raise `NotApplicable` unless the condition holds."""
    if not condition:
        raise NotApplicable(reason)


class Failed(Exception):  # noqa: N818
    """A line of a trial raised; carries what it raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {first_line(error)}")
        self.error = error


def first_line(error: Exception) -> str:
    r"""What an error says, without what it goes on to say.

    >>> first_line(ValueError("`heads` is 3;\nuse 2"))
    '`heads` is 3;'
    """
    line = str(error).strip().partition("\n")[0]
    return line if len(line) < 120 else line[:119] + "…"


class Broken(Exception):  # noqa: N818
    """The law is broken; carries what was seen, and the lines that show it."""

    def __init__(self, said: str, amount: float, tolerance: float, code: str) -> None:
        super().__init__(said)
        self.said = said
        self.amount = amount
        self.tolerance = tolerance
        self.code = code
        self.sizes: Sizes | None = None  # those that the law chose itself


@overload
def law(test: Test) -> Law: ...
@overload
def law(*, once: bool = False, strict: bool = False) -> Callable[[Test], Law]: ...
def law(test: Test | None = None, *, once: bool = False, strict: bool = False) -> Any:
    r"""Make a law of its test, whose docstring says what it tests.

    The first sentence is the statement, what stands between `$$` is the formula, and
    the rest is the reason.

    >>> read('One is one.\n\n$$1 = 1$$\n\nOr nothing is.')
    ('One is one.', '1 = 1', 'Or nothing is.')
    """

    def made(test: Test) -> Law:
        return Law(test.__name__, *read(test.__doc__ or ""), test, once, strict)

    return made if test is None else made(test)


def read(docstring: str) -> tuple[str, str, str]:
    """Statement, formula and reason of a law, each on one line."""
    parts = re.split(r"\$\$", inspect.cleandoc(docstring))
    before, formula, after = (*parts, "", "")[:3]
    statement, _, rest = before.partition("\n\n")
    return one_line(statement), one_line(formula), one_line(f"{rest} {after}")


def one_line(text: str) -> str:
    """Undo the breaking of lines."""
    return " ".join(text.split())
