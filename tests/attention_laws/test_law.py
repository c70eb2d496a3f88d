"""A law takes its texts from the docstring of its test."""

import pytest

from attention_laws.law import (
    Law,
    NotApplicable,
    ScriptError,
    first_line,
    law,
    skip_unless,
)


def test_a_law_takes_its_texts_from_the_docstring() -> None:
    @law(slow=True)
    def twice(script: object) -> None:
        r"""Applied twice,
        it is as applied once.

        $$f(f(x))
        = f(x)$$

        A reason that runs over
        two lines.
        """

    assert isinstance(twice, Law)
    assert twice.name == "twice"
    assert twice.statement == "Applied twice, it is as applied once."
    assert twice.formula == "f(f(x)) = f(x)"
    assert twice.reason == "A reason that runs over two lines."
    assert (twice.slow, twice.strict) == (True, False)


def test_a_bare_decorator_makes_a_law() -> None:
    @law
    def plain(script: object) -> None:
        """Only a statement."""

    assert (plain.statement, plain.formula, plain.reason) == (
        "Only a statement.",
        "",
        "",
    )
    assert not plain.slow
    assert not plain.strict


def test_skip_unless_raises_with_the_reason() -> None:
    skip_unless(True, "never seen")
    with pytest.raises(NotApplicable, match=r"^takes no mask$"):
        skip_unless((), "takes no mask")


def test_an_exception_is_shown_in_one_short_line() -> None:
    assert str(ScriptError(RuntimeError("one\ntwo"))) == "RuntimeError: one"
    assert first_line(ValueError("x" * 200)) == "x" * 119 + "…"
    assert first_line(ValueError("")) == ""
