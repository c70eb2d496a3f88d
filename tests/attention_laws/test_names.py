"""What names mean: settings, sizes and projections."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_laws import names
from attention_laws.tools import draw, to_heads
from headnotes import mha
from headnotes.implementations import batch_first, causal, stages, valid_lens


def test_arguments_are_those_of_the_call() -> None:
    def call(x: Tensor, *args: Any, mask: Any = None, **more: Any) -> None:
        pass

    class Module(nn.Module):
        def forward(this, query: Tensor) -> None:  # noqa: N805
            pass

    assert names.named(names.arguments(call)) == {"x": True, "mask": False}
    assert names.named(names.arguments(Module)) == {"query": True}
    assert names.named(names.arguments(Module())) == {"query": True}
    assert names.arguments(nn.functional.scaled_dot_product_attention) == []


def test_sizes_are_found_under_any_of_their_names() -> None:
    assert names.attribute(nn.MultiheadAttention(12, 3), "{heads}") == 3
    assert names.attribute(nn.MultiheadAttention(12, 3), "{d_model}") == 12
    assert names.attribute(nn.Linear(1, 1), "{heads}") is None


def test_the_likeliest_width_comes_first() -> None:
    assert names.widths(nn.MultiheadAttention(14, 7))[0] == 14
    assert names.widths(causal.MultiHeadAttention(7, 10, 32, 0.5, 2))[0] == 10
    assert 7 in names.widths(causal.MultiHeadAttention(7, 10, 32, 0.5, 2))
    lazy = valid_lens.MultiHeadAttention(12, 3, 0.0)
    assert names.widths(lazy)[-1] == 12


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(12, 36)
        self.c_proj = nn.Linear(12, 12)


class Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.dropout = nn.Dropout(0.1)


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(12, 12) for _ in range(3))
        self.mystery = nn.Linear(12, 12)


@pytest.mark.parametrize(
    ("module", "parts", "query"),
    [
        (mha.MultiHeadAttention(3, 12), 3, "exact.query({})"),
        (batch_first.MultiHeadAttention(12, 3), 3, "exact.Wq({})"),
        (causal.MultiHeadAttention(12, 12, 5, 0.0, 3), 3, "exact.W_query({})"),
        (stages.SelfAttention_v1(12, 12), 2, "({} @ exact.W_query)"),
        (Fused(), 3, "exact.c_attn({}).chunk(3, -1)[0]"),
        (Inside(Fused()), 3, "exact.inner.c_attn({}).chunk(3, -1)[0]"),
        (Strange(), -1, ""),
        (nn.Linear(12, 12), -1, ""),
    ],
)
def test_projections_are_found_by_name(
    module: nn.Module, parts: int, query: str
) -> None:
    found = names.projections(module, {})
    assert len(found) == parts + 1
    assert found.get("query", "") == query


def test_given_projections_are_taken() -> None:
    given = {"query": "key", "key": "query", "value": "value"}
    found = names.projections(Strange(), given)
    assert found == {
        "query": "exact.key({})",
        "key": "exact.query({})",
        "value": "exact.value({})",
    }


@pytest.mark.parametrize("bias", [True, False])
def test_torch_keeps_three_projections_in_one(bias: bool) -> None:
    module = nn.MultiheadAttention(12, 3, bias=bias)
    nn.init.normal_(module.in_proj_weight)
    found = names.projections(Inside(module), {})
    exact = Inside(module)
    x = draw(1, 5, 2, 12)
    for n, part in enumerate(("query", "key", "value")):
        got = eval(found[part].format("x"), {"torch": torch, "exact": exact, "x": x})
        rows = slice(12 * n, 12 * n + 12)
        expected = x @ module.in_proj_weight[rows].T
        if bias:
            expected = expected + module.in_proj_bias[rows]
        assert torch.allclose(got, expected, atol=1e-5)
    assert names.projections(nn.MultiheadAttention(12, 3, kdim=5), {}) == {}


def test_a_fused_layer_is_read_in_either_order() -> None:
    exact, x = Fused(), draw(1, 2, 5, 12)
    space = {"exact": exact, "x": x, "heads": 3}
    by_part = names.projections(exact, {"fused": "c_attn"})
    by_head = names.projections(exact, {"fused": "c_attn:h3d"})
    fused = exact.c_attn(x)
    for n, part in enumerate(("query", "key", "value")):
        first = to_heads(eval(by_part[part].format("x"), space), "bld", 3)
        other = to_heads(eval(by_head[part].format("x"), space), "bld", 3)
        for h in range(3):
            assert torch.equal(first[:, h], fused[..., 12 * n + 4 * h :][..., :4])
            assert torch.equal(other[:, h], fused[..., 12 * h + 4 * n :][..., :4])
