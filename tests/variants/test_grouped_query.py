"""Grouped-query attention: several heads of queries share one of keys and values."""

import re

import pytest
import torch
from torch import nn

from claims import BATCH, K_LEN, Q_LEN, assert_equals_the_loops, some_mask
from headnotes.mha import MultiHeadAttention
from headnotes.variants.grouped_query import GroupedQueryAttention

HEADS, D_K = 6, 7
D_MODEL = HEADS * D_K


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_output_and_gradients_are_those_of_the_loops(kv_heads: int) -> None:
    module = GroupedQueryAttention(HEADS, D_MODEL, kv_heads=kv_heads)
    assert_equals_the_loops(module, some_mask())


def test_with_as_many_heads_it_is_the_core() -> None:
    core = MultiHeadAttention(HEADS, D_MODEL).eval()
    module = GroupedQueryAttention.from_multi_head(core, HEADS)
    query, key = torch.randn(Q_LEN, BATCH, D_MODEL), torch.randn(K_LEN, BATCH, D_MODEL)
    arguments = {"query": query, "key": key, "value": key}
    torch.testing.assert_close(module(**arguments), core(**arguments))


@pytest.mark.parametrize("bias", [True, False])
def test_weights_are_the_mean_of_their_group_and_the_source_stays(bias: bool) -> None:
    core = MultiHeadAttention(HEADS, D_MODEL, 0.3, bias).double().eval()
    before = {name: x.clone() for name, x in core.state_dict().items()}
    module = GroupedQueryAttention.from_multi_head(core, 3)
    assert (module.dropout.p, module.training) == (0.3, False)
    for name, x in core.state_dict().items():
        assert torch.equal(x, before[name])
    for name, x in module.state_dict().items():
        assert x.dtype == torch.float64
        if not name.startswith(("key", "value")):
            assert torch.equal(x, before[name])
            continue
        for group in range(3):
            for d in range(D_K):
                rows = [before[name][(2 * group + n) * D_K + d] for n in range(2)]
                torch.testing.assert_close(x[group * D_K + d], (rows[0] + rows[1]) / 2)


def test_a_conversion_takes_no_random_numbers() -> None:
    core = MultiHeadAttention(HEADS, D_MODEL)
    before = torch.get_rng_state()
    GroupedQueryAttention.from_multi_head(core, 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("kv_heads", "message"),
    [
        (4, "`heads` (=6) must be divisible by `kv_heads` (=4); 3 and 6 would do"),
        (12, "`heads` (=6) must be divisible by `kv_heads` (=12); 6 would do"),
        (0, "`kv_heads` (=0) must be an int from 1 up"),
    ],
)
def test_heads_that_do_not_fit_are_refused(kv_heads: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        GroupedQueryAttention(HEADS, D_MODEL, kv_heads=kv_heads)


def test_another_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^`mha` is a Multihead"):
        GroupedQueryAttention.from_multi_head(nn.MultiheadAttention(6, 2), 1)  # type: ignore[arg-type]
