"""The dictionary of names: arguments, sizes and projections."""

import inspect
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_laws import names
from attention_laws.tools import seeded_randn, split_heads
from headnotes import mha
from headnotes.implementations import batch_first, causal, stages, valid_lens


def test_parameters_are_those_of_the_forward() -> None:
    def call(x: Tensor, *args: Any, mask: Any = None, **more: Any) -> None:
        pass

    class Module(nn.Module):
        def forward(this, query: Tensor) -> None:  # noqa: N805
            pass

    assert names.required_by_name(names.parameters_of(call)) == {
        "x": True,
        "mask": False,
    }
    assert names.required_by_name(names.parameters_of(Module)) == {"query": True}
    assert names.required_by_name(names.parameters_of(Module())) == {"query": True}
    assert names.parameters_of(nn.functional.scaled_dot_product_attention) == []


def test_sizes_are_found_under_each_of_their_names() -> None:
    assert names.size_attribute(nn.MultiheadAttention(12, 3), "{heads}") == 3
    assert names.size_attribute(nn.MultiheadAttention(12, 3), "{d_model}") == 12
    assert names.size_attribute(nn.Linear(1, 1), "{heads}") is None


def test_a_config_has_sizes_under_each_of_its_names() -> None:
    module = nn.Identity()
    module.cfg = SimpleNamespace(n_head=3)  # type: ignore[assignment]
    assert names.size_attribute(module, "{heads}") == 3
    assert names.find_inputs({"queries": True, "keys": True}) == ("queries", "keys")
    assert names.argument_values({"hidden": True, "source": True})["source"]


def test_the_most_likely_width_comes_first() -> None:
    assert names.candidate_widths(nn.MultiheadAttention(14, 7))[0] == 14
    assert names.candidate_widths(causal.MultiHeadAttention(7, 10, 32, 0.5, 2))[0] == 10
    assert 7 in names.candidate_widths(causal.MultiHeadAttention(7, 10, 32, 0.5, 2))
    lazy = valid_lens.MultiHeadAttention(12, 3, 0.0)
    assert names.candidate_widths(lazy)[-1] == 12


def test_an_initialization_is_no_norm_and_a_scale_of_one_is_a_design() -> None:
    def forward(x: Tensor) -> Tensor:
        return nn.init.xavier_normal_(x)

    assert names.designs_of(forward) == {}
    module = nn.Identity()
    assert not names.is_unscaled(module)
    module.scaling = 1.0  # type: ignore[assignment]
    assert names.is_unscaled(module)


def test_cosines_are_computed_before_they_are_rounded() -> None:
    for name in ("position_embeddings", "cos", "sin"):
        assert ".cos()" in (text := names.position_templates(name)[0]) or name == "sin"
        assert re.search(r"\{d_k\}\)\.(cos|sin)\(\)\{dtype\}", text), text


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
        (mha.MultiHeadAttention(3, 12), 3, "attention64.query({})"),
        (batch_first.MultiHeadAttention(12, 3), 3, "attention64.Wq({})"),
        (causal.MultiHeadAttention(12, 12, 5, 0.0, 3), 3, "attention64.W_query({})"),
        (stages.SelfAttention_v1(12, 12), 2, "({} @ attention64.W_query)"),
        (Fused(), 3, "attention64.c_attn({}).chunk(3, -1)[0]"),
        (Inside(Fused()), 3, "attention64.inner.c_attn({}).chunk(3, -1)[0]"),
        (Strange(), -1, ""),
        (nn.Linear(12, 12), -1, ""),
    ],
)
def test_projections_are_found_by_name(
    module: nn.Module, parts: int, query: str
) -> None:
    found = names.find_projections(module, {})
    assert len(found) == parts + 1
    assert found.get("query", "") == query


def test_stated_projections_are_used() -> None:
    given = {"query": "key", "key": "query", "value": "value"}
    found = names.find_projections(Strange(), given)
    assert found == {
        "query": "attention64.key({})",
        "key": "attention64.query({})",
        "value": "attention64.value({})",
    }


@pytest.mark.parametrize("bias", [True, False])
def test_the_packed_projection_of_torch_is_split(bias: bool) -> None:
    module = nn.MultiheadAttention(12, 3, bias=bias)
    nn.init.normal_(module.in_proj_weight)
    found = names.find_projections(Inside(module), {})
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
    assert names.find_projections(nn.MultiheadAttention(12, 3, kdim=5), {}) == {}


def test_a_fused_layer_is_split_in_either_order() -> None:
    attention64, x = Fused(), seeded_randn(1, 2, 5, 12)
    space = {"attention64": attention64, "x": x, "heads": 3}
    by_part = names.find_projections(attention64, {"fused": "c_attn"})
    by_head = names.find_projections(attention64, {"fused": "c_attn:h3d"})
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

    assert names.designs_of(forward) == {}


def test_a_scale_of_the_length_that_was_trained_is_a_design() -> None:
    def forward(x: Tensor, train_length: int) -> Tensor:
        return x * math.log(len(x), train_length)

    assert names.designs_of(forward) == {"scale": "train_length"}


def test_a_number_of_keys_that_are_kept_is_no_dropout() -> None:
    class Strongest(nn.Module):
        def __init__(self, keep: int = 8) -> None: ...

    class Drops(nn.Module):
        def __init__(self, keep: float = 0.9) -> None: ...

    found = [names.dropout_arguments(each) for each in (Strongest, Drops)]
    assert found == [{}, {"keep": "1.0"}]


def test_neighbors_and_coordinates_are_designs() -> None:
    def forward(x: Tensor, neighbors: int) -> Any:
        return torch.meshgrid(x[:neighbors])

    expected = {"window": "neighbors", "positions": "meshgrid"}
    assert names.designs_of(forward) == expected


def test_random_features_and_chosen_keys_are_designs() -> None:
    def forward(x: Tensor, nb_features: int) -> Tensor:
        return x.topk(nb_features).values

    expected = {"features": "nb_features", "selection": "topk"}
    assert names.designs_of(forward) == expected


def test_what_fades_encodes_positions_and_weight_decay_does_not() -> None:
    class Fades(nn.Module):
        def forward(self, x: Tensor, decay: Tensor) -> Tensor:
            return x * decay

    class Regularized(nn.Module):
        def forward(self, x: Tensor, weight_decay: float) -> Tensor:
            return x * weight_decay

    encoded = [names.encodes_positions(each) for each in (Fades, Regularized)]
    assert encoded == [True, False]


def test_a_bias_of_two_axes_is_one_for_positions() -> None:
    module = nn.Module()
    module.bias_rows = nn.Parameter(torch.zeros(3, 9))
    module.out_bias = nn.Parameter(torch.zeros(3))
    assert names.designs_of(module) == {"positions": "bias_rows"}
    table = nn.Module()
    table.er = nn.Parameter(torch.zeros(512, 4))
    assert names.designs_of(table) == {"positions": "er"}


@pytest.mark.parametrize(
    ("name", "built"),
    [
        ("gpt_neox.modeling_gpt_neox:GPTNeoXAttention", "GPTNeoXConfig(hidden_size="),
        ("musicgen.modeling_musicgen:MusicgenAttention", "MusicgenConfig(attn_"),
    ],
)
def test_an_imported_config_is_found_by_the_name_of_its_model(
    name: str, built: str
) -> None:
    file, _, name = name.partition(":")
    module = pytest.importorskip(f"transformers.models.{file}")
    attention = getattr(module, name)
    parameter = inspect.signature(attention).parameters["config"]
    source, scope = names.config_source(attention, parameter) or ("", {})
    assert source.startswith(built)
    assert [*scope] == [built.partition("(")[0]]


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

    assert names.normalizes(Divides())
    assert not names.normalizes(Calls())
