"""What is wrong with an answer is said in a plain sentence."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headnotes.exercises import check
from headnotes.exercises.solutions.dot_product_scores import dot_product_scores
from headnotes.exercises.solutions.multi_head_attention import MultiHeadAttention


def in_place(query: Tensor, key: Tensor) -> Tensor:
    return query.mul_(query.shape[-1] ** -0.5) @ key.T


def forgetful() -> Callable[[Tensor, Tensor], Tensor]:
    calls: list[int] = []

    def scores(query: Tensor, key: Tensor) -> Tensor:
        calls.append(1)
        return dot_product_scores(query, key) * len(calls)

    return scores


def wrong_gradient(query: Tensor, key: Tensor) -> Tensor:
    return dot_product_scores(query, key.detach())


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (
            lambda q, k: 1 / 0,
            "raises ZeroDivisionError .*`.*1 / 0.*`: division by zero",
        ),
        (lambda q: q, "raises TypeError: .*takes 1 positional argument"),
        (lambda q, k: None, "gives `None`; does the code end with a `return`"),
        (lambda q, k: dot_product_scores(q, k).tolist(), "gives a list, not a tensor"),
        (lambda q, k: dot_product_scores(q, k)[None], r"wrong shape, \[1, 1, 1\], not"),
        (lambda q, k: dot_product_scores(q, k).double(), "of torch.float64, not"),
        (lambda q, k: dot_product_scores(q, k) * torch.nan, "gives NaN"),
        (in_place, "changes its input in place, argument 1"),
        (forgetful(), "second call with this input gives another answer"),
        (lambda q, k: dot_product_scores(q, k).detach(), "has no gradient"),
        (wrong_gradient, "is right, but its gradient is not"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(mine: Any, message: str) -> None:
    report = check("dot_product_scores", mine)
    assert not report
    assert report.mistake == ""
    assert re.search(message, report.message), report
    assert report.details.startswith("    dot_product_scores(\n        torch.tensor([[")


def test_the_input_in_a_report_runs_and_gives_the_answers() -> None:
    class Mine(MultiHeadAttention):
        def merge(self, context: Tensor) -> Tensor:
            return super().merge(context) + 1

    report = check("multi_head_attention", Mine)
    program, _, answers = report.details.partition("\n\nexpected: ")
    *definition, last = program.replace("\n    ", "\n").strip().split("\n\n\n")
    names: dict[str, Any] = {"torch": torch}
    exec(definition[0], names | {}, names)
    for attention, text in zip(
        (MultiHeadAttention, Mine), answers.split("got:"), strict=True
    ):
        names["MultiHeadAttention"] = attention
        came = eval(last, names)
        assert repr(came.detach()) == text.strip()


def test_a_correct_solution_of_another_kind_passes() -> None:
    def by_loops(query: Tensor, key: Tensor) -> Tensor:
        rows = [torch.stack([q @ k / len(q) ** 0.5 for k in key]) for q in query]
        return torch.stack(rows)

    assert repr(check("dot_product_scores", by_loops)) == "dot_product_scores: pass"


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="`mine` must be a function or a class"):
        check("causal_mask", torch.ones(2, 3))  # type: ignore[arg-type]


def test_the_law_is_checked_before_the_code() -> None:
    for law, message in (("", "`law` is empty"), ("formulas", "does not violate")):
        report = check("bug_perplexity", MultiHeadAttention, law=law)
        assert message in report.message
