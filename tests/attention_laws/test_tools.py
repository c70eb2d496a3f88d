"""Functions that counterexamples call."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import oracle
from attention_laws.tools import (
    flip_items,
    loss,
    merge_heads,
    randomize_parameters,
    reference_attention,
    seeded_randn,
    split_heads,
)


def test_random_numbers_depend_on_nothing_but_the_seed() -> None:
    one = seeded_randn(3, 2, 5)
    torch.rand(7)
    assert torch.equal(seeded_randn(3, 2, 5), one)
    assert not torch.equal(seeded_randn(4, 2, 5), one)
    assert one.shape == (2, 5)


def test_randomized_weights_make_rows_of_attention_differ() -> None:
    attention = nn.MultiheadAttention(64, 4)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.mul_(0.02)
    randomize_parameters(attention)
    x = seeded_randn(1, 11, 3, 64)
    _, weights = attention(x, x, x, average_attn_weights=False)
    assert weights.max() > 0.5
    assert weights.min() < 0.01
    assert attention.in_proj_bias.std() > 0.1


def test_parameters_that_are_not_trained_and_buffers_stay() -> None:
    module = nn.BatchNorm1d(7)
    module.weight.requires_grad_(False)
    randomize_parameters(module)
    assert torch.equal(module.weight, torch.ones(7))
    assert torch.equal(module.running_var, torch.ones(7))  # type: ignore[arg-type]
    assert module.bias.any()


def test_a_convolution_is_randomized_like_a_layer_of_its_fan_in() -> None:
    convolution, norm = nn.Conv2d(100, 100, 1), nn.Module()
    norm.gain = nn.Parameter(torch.ones(1, 50, 1, 1))
    randomize_parameters(convolution)
    randomize_parameters(norm)
    assert 0.1 < convolution.weight.std() < 0.2
    assert 0.8 < norm.gain.mean() < 1.2


@pytest.mark.parametrize("layout", ["bld", "lbd", "bhld", "blhd", "ld"])
def test_heads_are_split_from_any_layout_and_merged_back(layout: str) -> None:
    sizes = {"b": 2, "l": 7, "h": 3, "d": 5 if "h" in layout else 15}
    x = seeded_randn(1, *(sizes[axis] for axis in layout))
    heads = split_heads(x, layout, 3)
    assert heads.shape == (2 if "b" in layout else 1, 3, 7, 5)
    assert torch.equal(merge_heads(heads, layout), x)
    # Component 6 of position 4 is component 1 of head 1.
    at = {"b": 1, "l": 4, "h": 1, "d": 1 if "h" in layout else 6}
    place = tuple(at[axis] for axis in layout)
    assert heads[at["b"] if "b" in layout else 0, 1, 4, 1] == x[place]


def test_the_reference_equals_the_oracle() -> None:
    query, key, value = (seeded_randn(n, 2, 3, 7, 5).double() for n in (1, 2, 3))
    query = query[:, :, :4]
    allowed = seeded_randn(4, 2, 1, 4, 7) > 0
    allowed[..., 0] = True
    got = reference_attention(query, key, value, allowed)
    for item, head, i in itertools.product(range(2), range(3), range(4)):
        products = key[item, head] @ query[item, head, i]
        scores = [product / math.sqrt(5) for product in products.tolist()]
        weights = oracle.weights_of_row(scores, allowed[item, 0, i].tolist())
        expected = torch.tensor(weights, dtype=torch.float64) @ value[item, head]
        assert torch.allclose(got[item, head, i], expected, rtol=1e-12)


def test_consecutive_query_heads_share_a_key_head() -> None:
    query, key = seeded_randn(1, 1, 4, 3, 5), seeded_randn(2, 1, 2, 3, 5)
    allowed = torch.ones(1, 1, 3, 3).bool()
    got = reference_attention(query, key, key, allowed)
    for head in range(4):
        alone = key[:, [head // 2]]
        expected = reference_attention(query[:, [head]], alone, alone, allowed)
        assert torch.allclose(got[:, [head]], expected)


def test_the_loss_depends_on_every_entry() -> None:
    x = seeded_randn(1, 3, 5).requires_grad_()
    (grad,) = torch.autograd.grad(loss(x), x)
    assert grad.unique().numel() == 15


class Pair(NamedTuple):
    key: Tensor
    value: Tensor


def test_a_cache_of_named_items_keeps_their_names() -> None:
    flipped = flip_items(Pair(torch.tensor([1, 2]), torch.tensor([3, 4])), 2)
    assert flipped.value.tolist() == [4, 3]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -3e38])
def test_a_vector_that_is_left_uninitialized_is_randomized(garbage: float) -> None:
    module = nn.Module()
    module.sinks = nn.Parameter(torch.full((3,), garbage))
    randomize_parameters(module)
    assert 0 < module.sinks.abs().max() < 2
