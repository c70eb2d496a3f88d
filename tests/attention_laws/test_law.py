"""A law is made of its test, and says what its docstring says."""

import pytest

from attention_laws.law import Failed, Law, NotApplicable, first_line, law, need


def test_a_law_says_what_its_docstring_says() -> None:
    @law(once=True)
    def twice(trial: object) -> None:
        r"""Said twice,
        it is as said once.

        $$f(f(x))
        = f(x)$$

        A reason that runs over
        two lines.
        """

    assert isinstance(twice, Law)
    assert twice.name == "twice"
    assert twice.statement == "Said twice, it is as said once."
    assert twice.formula == "f(f(x)) = f(x)"
    assert twice.reason == "A reason that runs over two lines."
    assert (twice.once, twice.strict) == (True, False)


def test_a_bare_decorator_makes_a_law() -> None:
    @law
    def plain(trial: object) -> None:
        """Only a statement."""

    assert (plain.statement, plain.formula, plain.reason) == (
        "Only a statement.",
        "",
        "",
    )
    assert not plain.once
    assert not plain.strict


def test_need_names_the_reason() -> None:
    need(True, "never seen")
    with pytest.raises(NotApplicable, match=r"^takes no mask$"):
        need((), "takes no mask")


def test_a_failure_is_told_in_one_short_line() -> None:
    assert str(Failed(RuntimeError("one\ntwo"))) == "RuntimeError: one"
    assert first_line(ValueError("x" * 200)) == "x" * 119 + "…"
    assert first_line(ValueError("")) == ""
