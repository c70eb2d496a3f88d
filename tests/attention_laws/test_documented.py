"""What docstrings say of arguments is found in the styles in which people write it."""

from typing import Any

import pytest

from attention_laws import documented

COLUMNS = """Attends.

    Inputs
        x      (B, L, dim)   events, right-padded
        ages   (B, L)        integer seconds
        valid  (B, L) bool   True at events
    """
NUMPY = """Attends.

    Parameters
    ----------
    x : (batch, length, dim)
    ages : LongTensor (batch, length)
        Prompts are left-padded.
    """


def with_docstring(text: str) -> Any:
    def attend(x: Any, ages: Any, valid: Any = None) -> Any:
        return x, ages, valid

    attend.__doc__ = text
    return attend


@pytest.mark.parametrize("text", [COLUMNS, NUMPY])
def test_shapes_and_integers_are_found_in_columns_and_in_sections(text: str) -> None:
    attend = with_docstring(text)
    assert [len(documented.shapes(attend)[name]) for name in ("x", "ages")] == [3, 2]
    assert documented.integers(attend) == {"ages"}


def test_the_side_of_the_padding_is_found() -> None:
    right, left = map(with_docstring, (COLUMNS, NUMPY))
    assert documented.pads_right(right)
    assert not documented.pads_left(right)
    assert documented.pads_left(left)
    assert not documented.pads_right(left)


def test_integers_and_numbers_of_tokens_are_zero_so_that_tokens_have_no_order() -> None:
    known = documented.sizes(("B", "L", "dim"))
    numbers = documented.template("ages", ("B", "L"), known)
    integers = documented.template("ages", ("B", "L"), known, are_integers=True)
    assert numbers == "torch.zeros({batch_size}, {length}){dtype}"
    assert integers.startswith("torch.zeros({batch_size}, {length}, dtype=torch.int64)")


@pytest.mark.parametrize(
    ("text", "is_left_out"),
    [
        ("On later steps `lengths` and `memory` are not needed and may be None.", True),
        ("lengths: ignored once the cache is filled.", True),
        ("`lengths` may be left out in subsequent calls", True),
        ("lengths: (B,), None if all are valid. Later steps get the cache.", False),
        ("The cache may be None after the first step.", False),
    ],
)
def test_what_later_calls_do_not_need_is_found(text: str, is_left_out: bool) -> None:
    def attend(x: Any, memory: Any, lengths: Any, cache: Any) -> None: ...

    attend.__doc__ = text
    assert documented.is_left_out_later(attend, "lengths") == is_left_out


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "Returns the weights, namely those used (after dropout and head mask).",
            "after",
        ),
        ("attn: (B, H, T, S) attention probabilities before dropout", "before"),
        ("The probabilities are those before dropout; weights after dropout.", ""),
        ("A norm after dropout. Returns the weights.", ""),
    ],
)
def test_where_dropout_of_returned_weights_is_found(text: str, place: str) -> None:
    def attend(x: Any) -> None: ...

    attend.__doc__ = text
    assert documented.place_of_dropout(attend) == place
