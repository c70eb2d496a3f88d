"""A call for new tokens is checked as attention to the tokens so far."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_laws import check
from attention_laws.new_tokens import over_caches
from specimens import failure_of
from specimens.decoding import (
    ServesTokens,
    attend_to_stored,
    attend_to_stored_heads_first,
)
from specimens.decoding import attend_to_longest as to_longest


@pytest.mark.parametrize(
    ("function", "heads_axis"),
    [(attend_to_stored, 2), (attend_to_stored_heads_first, 1)],
)
def test_tokens_one_by_one_are_those_of_the_sequence(
    function: object, heads_axis: int
) -> None:
    q, k, v = (torch.randn(2, 3, 7, 5, dtype=torch.float64) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(q, k, v, is_causal=True)
    given = (x.transpose(1, heads_axis) for x in (q, k, v))
    output = over_caches(function)(*given)
    torch.testing.assert_close(output.transpose(1, heads_axis), expected)


def test_a_second_call_of_a_module_continues_the_sequences() -> None:
    attention = over_caches(ServesTokens)(6, 2).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    whole, _stored = attention(x)
    start, stored = attention(x[:, :3])
    end, _stored = attention(x[:, 3:], stored)
    torch.testing.assert_close(torch.cat([start, end], dim=1), whole)


def test_the_sequences_of_a_batch_have_other_numbers_of_stored_tokens() -> None:
    seen: list[Tensor] = []

    def note(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, lengths: Tensor) -> Any:
        """q, k, v: (B, H, D); k_cache: (B, N, H, D)"""
        seen.append(lengths)
        return v

    x = torch.zeros(3, 2, 5, 7)
    over_caches(note)(x, x, x)
    assert torch.stack(seen).tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_the_longest_sequence_must_not_count_for_all() -> None:
    report = check(to_longest, only="batch_independence")
    (failure,) = report.failed
    assert failure.counterexample is not None
    code = failure.counterexample.code
    assert "built = over_caches(attend_to_longest)" in code
    assert isinstance(failure_of(code), AssertionError)
