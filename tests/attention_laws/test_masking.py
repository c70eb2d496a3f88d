"""Laws of masking: each fails on attention that violates it."""

from attention_laws import check, masking
from specimens import NeighborsOfThreeInputs, make_test_of_laws

test_each_law_fails_on_implementations_that_violate_it = make_test_of_laws(masking)


def test_padded_queries_of_windows_are_not_compared() -> None:
    laws, mask = ["padding", "neutral_mask"], {"mask": "attend:bk"}
    assert check(NeighborsOfThreeInputs, only=laws, mask=mask).ok
