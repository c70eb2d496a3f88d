"""Attention over pages is checked as attention to sequences."""

import pytest
import torch

from attention_laws import check
from attention_laws.pages import over_pages
from specimens.masking import attention_to_whole_pages, paged_attention


def test_attention_over_pages_is_that_of_the_sequences() -> None:
    q, k, v = (torch.randn(2, n, 3, 5, dtype=torch.float64) for n in (7, 11, 11))
    lengths = torch.tensor([11, 6])
    mask = torch.arange(11) < lengths[:, None, None, None]
    inputs = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, mask)
    output = over_pages(paged_attention)(q, k, v, lengths)
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_a_last_page_that_is_not_full_is_padding() -> None:
    report = check(attention_to_whole_pages, only="padding")
    (failure,) = report.failed
    assert failure.counterexample is not None
    code = failure.counterexample.code
    assert "built = over_pages(attention_to_whole_pages)" in code


def test_lengths_of_other_axes_are_refused() -> None:
    q, k = torch.zeros(2, 1, 3, 5), torch.zeros(2, 4, 3, 5)
    with pytest.raises(ValueError, match=r"lengths has shape \[2, 1\], not \[batch"):
        over_pages(paged_attention)(q, k, k, torch.ones(2, 1, dtype=torch.long))
