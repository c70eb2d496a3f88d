"""Laws of the formula: each fails on attention that violates it."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from attention_laws import LAWS, check
from attention_laws.algebra import __name__ as family
from specimens import assert_caught

NAMES = [name for name, law in LAWS.items() if law.test.__module__ == family]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_law_fails_on_implementations_that_violate_it(
    name: str, device: torch.device
) -> None:
    assert_caught(name, device.type)


def test_rows_sum_to_one_with_grouped_queries() -> None:
    def shared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    def more(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return 1.01 * shared(query, key, value)

    assert check(shared, kv_heads=2, only="rows_sum_to_one").passed
    assert check(more, kv_heads=2, only="rows_sum_to_one").failed
