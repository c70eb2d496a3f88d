"""The structure of a module: its projections, its widths, and its designs."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_laws import structure
from attention_laws.tools import seeded_randn, split_heads
from headnotes import mha
from headnotes.implementations import batch_first, causal, stages, valid_lens


def test_sizes_are_found_under_each_of_their_names() -> None:
    assert structure.size_attribute(nn.MultiheadAttention(12, 3), "{heads}") == 3
    assert structure.size_attribute(nn.MultiheadAttention(12, 3), "{d_model}") == 12
    assert structure.size_attribute(nn.Linear(1, 1), "{heads}") is None


def test_a_config_has_sizes_under_each_of_its_names() -> None:
    module = nn.Identity()
    module.cfg = SimpleNamespace(n_head=3)  # type: ignore[assignment]
    assert structure.size_attribute(module, "{heads}") == 3


def test_the_most_likely_width_comes_first() -> None:
    assert structure.candidate_widths(nn.MultiheadAttention(14, 7))[0] == 14
    assert (
        structure.candidate_widths(causal.MultiHeadAttention(7, 10, 32, 0.5, 2))[0]
        == 10
    )
    assert 7 in structure.candidate_widths(causal.MultiHeadAttention(7, 10, 32, 0.5, 2))
    lazy = valid_lens.MultiHeadAttention(12, 3, 0.0)
    assert structure.candidate_widths(lazy)[-1] == 12


def test_an_initialization_is_no_norm_and_a_scale_of_one_is_a_design() -> None:
    def forward(x: Tensor) -> Tensor:
        return nn.init.xavier_normal_(x)

    assert structure.designs_of(forward) == {}
    module = nn.Identity()
    assert not structure.is_unscaled(module)
    module.scaling = 1.0  # type: ignore[assignment]
    assert structure.is_unscaled(module)
    module.scaling, module.scale = 0.5, torch.ones(2, 1, 1)  # learned, for each head
    assert not structure.is_unscaled(module)


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


class NormedByFunction(nn.Module):
    """The norms are functions: only their gains belong to the module."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(12, 12) for _ in range(3))
        self.q_norm, self.k_norm = (nn.Parameter(torch.ones(4)) for _ in range(2))


@pytest.mark.parametrize(
    ("module", "parts", "query"),
    [
        (mha.MultiHeadAttention(3, 12), 3, "attention64.query({})"),
        (batch_first.MultiHeadAttention(12, 3), 3, "attention64.Wq({})"),
        (causal.MultiHeadAttention(12, 12, 5, 0.0, 3), 3, "attention64.W_query({})"),
        (stages.SelfAttention_v1(12, 12), 2, "({} @ attention64.W_query)"),
        (Fused(), 3, "attention64.c_attn({}).chunk(3, -1)[0]"),
        (Inside(Fused()), 3, "attention64.inner.c_attn({}).chunk(3, -1)[0]"),
        (Strange(), -1, ""),
        (NormedByFunction(), -1, ""),
        (nn.Linear(12, 12), -1, ""),
    ],
)
def test_projections_are_found_by_name(
    module: nn.Module, parts: int, query: str
) -> None:
    found = structure.find_projections(module, {})
    assert len(found) == parts + 1
    assert found.get("query", "") == query


def test_stated_projections_are_used() -> None:
    given = {"query": "key", "key": "query", "value": "value"}
    found = structure.find_projections(Strange(), given)
    assert found == {
        "query": "attention64.key({})",
        "key": "attention64.query({})",
        "value": "attention64.value({})",
    }


@pytest.mark.parametrize("bias", [True, False])
def test_the_packed_projection_of_torch_is_split(bias: bool) -> None:
    module = nn.MultiheadAttention(12, 3, bias=bias)
    nn.init.normal_(module.in_proj_weight)
    found = structure.find_projections(Inside(module), {})
    attention64 = Inside(module)
    x = seeded_randn(1, 5, 2, 12)
    for n, part in enumerate(("query", "key", "value")):
        got = eval(
            found[part].format("x"),
            {"torch": torch, "attention64": attention64, "x": x},
        )
        rows = slice(12 * n, 12 * n + 12)
        expected = x @ module.in_proj_weight[rows].T
        if bias:
            expected = expected + module.in_proj_bias[rows]
        assert torch.allclose(got, expected, atol=1e-5)
    assert structure.find_projections(nn.MultiheadAttention(12, 3, kdim=5), {}) == {}


def test_a_fused_layer_is_split_in_either_order() -> None:
    attention64, x = Fused(), seeded_randn(1, 2, 5, 12)
    space = {"attention64": attention64, "x": x, "heads": 3}
    by_part = structure.find_projections(attention64, {"fused": "c_attn"})
    by_head = structure.find_projections(attention64, {"fused": "c_attn:h3d"})
    fused = attention64.c_attn(x)
    for n, part in enumerate(("query", "key", "value")):
        first = split_heads(eval(by_part[part].format("x"), space), "bld", 3)
        other = split_heads(eval(by_head[part].format("x"), space), "bld", 3)
        for h in range(3):
            assert torch.equal(first[:, h], fused[..., 12 * n + 4 * h :][..., :4])
            assert torch.equal(other[:, h], fused[..., 12 * h + 4 * n :][..., :4])


def test_a_scale_is_no_norm_and_a_pool_of_memory_no_convolution() -> None:
    def forward(x: Tensor, norm_factor: float, pages: int) -> Tensor:
        pool = x.new_zeros(pages)
        return pool[0] + x / norm_factor

    assert structure.designs_of(forward) == {}


def test_a_scale_of_the_length_that_was_trained_is_a_design() -> None:
    def forward(x: Tensor, train_length: int) -> Tensor:
        return x * math.log(len(x), train_length)

    assert structure.designs_of(forward) == {"scale": "train_length"}


def test_neighbors_and_coordinates_are_designs() -> None:
    def forward(x: Tensor, neighbors: int) -> Any:
        return torch.meshgrid(x[:neighbors])

    expected = {"window": "neighbors", "positions": "meshgrid"}
    assert structure.designs_of(forward) == expected


def test_random_features_and_chosen_keys_are_designs() -> None:
    def forward(x: Tensor, nb_features: int) -> Tensor:
        return x.topk(nb_features).values

    expected = {"features": "nb_features", "selection": "topk"}
    assert structure.designs_of(forward) == expected


def test_what_fades_encodes_positions_and_weight_decay_does_not() -> None:
    class Fades(nn.Module):
        def forward(self, x: Tensor, decay: Tensor) -> Tensor:
            return x * decay

    class Regularized(nn.Module):
        def forward(self, x: Tensor, weight_decay: float) -> Tensor:
            return x * weight_decay

    encoded = [structure.encodes_positions(each) for each in (Fades, Regularized)]
    assert encoded == [True, False]


def test_vectors_of_rows_and_columns_encode_positions() -> None:
    def forward(x: Tensor, row_embed: Tensor) -> Tensor:
        return x + row_embed

    assert structure.encodes_positions(forward)


def test_a_bias_of_two_axes_is_one_for_positions() -> None:
    module = nn.Module()
    module.bias_rows = nn.Parameter(torch.zeros(3, 9))
    module.out_bias = nn.Parameter(torch.zeros(3))
    assert structure.designs_of(module) == {"positions": "bias_rows"}
    table = nn.Module()
    table.er = nn.Parameter(torch.zeros(512, 4))
    assert structure.designs_of(table) == {"positions": "er"}


def test_a_norm_that_is_no_layer_normalizes() -> None:
    class Divides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.norm(dim=-1, keepdim=True)

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(3)

        def forward(self, x: Tensor) -> Any:
            return self.norm(x)

    assert structure.normalizes(Divides())
    assert not structure.normalizes(Calls())


def test_the_gate_of_a_function_makes_tokens_fade() -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor) -> None:
        raise NotImplementedError(q, k, v, log_fgate)

    assert structure.designs_of(forward) == {"decay": "log_fgate"}
