"""Doctests in prose: fenced where they are, left alone where they are fenced."""

import pytest

from sidenotes.doctests import fence_doctests


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (">>> 1\n1", "```pycon\n>>> 1\n1\n```"),
        (">>> 1\n1\n\nText", "```pycon\n>>> 1\n1\n```\n\nText"),
        (">>> f(\n...     1\n... )", "```pycon\n>>> f(\n...     1\n... )\n```"),
        (">>> 1\n\n>>> 2", "```pycon\n>>> 1\n```\n\n```pycon\n>>> 2\n```"),
        ("- item\n\n  >>> 1\n  1", "- item\n\n  ```pycon\n  >>> 1\n  1\n  ```"),
        ("No doctest.\n> A quotation.", "No doctest.\n> A quotation."),
        (">>>> deep quotation", ">>>> deep quotation"),
        ("```pycon\n>>> 1\n```", "```pycon\n>>> 1\n```"),
        (
            "~~~~\n```\n>>> 1\n~~~~\n>>> 2",
            "~~~~\n```\n>>> 1\n~~~~\n```pycon\n>>> 2\n```",
        ),
    ],
)
def test_examples_are_fenced_to_their_blank_line(text: str, expected: str) -> None:
    assert "\n".join(fence_doctests(text.split("\n"))) == expected
