"""A function of one query is checked as attention of several queries."""

import pytest
import torch
from torch import Tensor

from attention_laws import check
from attention_laws.one_query import over_queries
from specimens.masking import newest_query, newest_query_of_heads


@pytest.mark.parametrize(
    ("function", "heads_axis"), [(newest_query, 2), (newest_query_of_heads, 1)]
)
def test_each_query_has_the_output_that_it_has_alone(
    function: object, heads_axis: int
) -> None:
    q, k, v = (torch.randn(2, n, 3, 5, dtype=torch.float64) for n in (7, 11, 11))
    inputs = [x.transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs)
    given = inputs if heads_axis == 1 else (q, k, v)
    output = over_queries(function)(*given)  # type: ignore[arg-type]
    torch.testing.assert_close(output.transpose(1, heads_axis), expected)


def test_lengths_are_those_of_the_sequence_of_each_query() -> None:
    q, k, v = (torch.randn(2, n, 3, 5, dtype=torch.float64) for n in (7, 11, 11))
    output = over_queries(newest_query)(q, k, v, lengths=torch.tensor([11, 6]))
    torch.testing.assert_close(
        output[1:], over_queries(newest_query)(q[1:], k[1:, :6], v[1:, :6])
    )


def merged_by_their_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q: (B, H, D); k, v: (B, S, H, D)."""
    parts = zip(k.split(2, 1), v.split(2, 1), strict=True)
    scores = [
        (torch.einsum("bhd,bshd->bhs", q, keys), values) for keys, values in parts
    ]
    outputs = [torch.einsum("bhs,bshd->bhd", s.softmax(-1), x) for s, x in scores]
    shares = torch.stack([s.amax(-1) for s, _ in scores]).softmax(0)[..., None]
    return (torch.stack(outputs) * shares).sum(0)


def test_a_wrong_merge_of_parts_is_found_and_its_program_runs_over_queries() -> None:
    report = check(merged_by_their_maximum, only="key_permutation")
    (failure,) = report.failed
    assert failure.counterexample is not None
    code = failure.counterexample.code
    assert "built = over_queries(merged_by_their_maximum)" in code
    with pytest.raises(AssertionError):
        exec(code, {})
