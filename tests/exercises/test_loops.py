"""Attention in loops: the same as PyTorch's, with a mask and with grouped heads."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from headnotes.exercises.loops import attention, causal


def test_the_loops_compute_causal_grouped_attention() -> None:
    query = torch.randn(2, 3, 4, 7)
    key, value = torch.randn(2, 5, 3, 2, 7)
    mask = torch.ones(2, 5, dtype=torch.bool).tril(3)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    expected = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    came = attention(query, key, value, causal(past=3))
    assert came.allclose(expected.permute(2, 0, 1, 3), atol=1e-6)
