"""Laws of batch items: each fails on attention that violates it."""

import pytest
import torch
from torch import Tensor

from attention_laws import LAWS, batch, check
from specimens import assert_caught, each_law_of
from specimens.batch import PlacesOfFirst


@each_law_of(batch)
def test_each_law_fails_on_implementations_that_violate_it(
    name: str, device: torch.device
) -> None:
    assert_caught(name, device.type)


def attend_to_neighbors(q: Tensor, k: Tensor, v: Tensor, edge_index: Tensor) -> Tensor:
    """Attention along the edges of graphs; q, k, v: (nodes, heads, dim)."""
    largest = scores_of_edges(q, k, edge_index).amax(dim=0).expand(len(q), -1)
    return sums_of_edges(q, k, v, edge_index, largest)


def attend_to_own_neighbors(
    q: Tensor, k: Tensor, v: Tensor, edge_index: Tensor
) -> Tensor:
    """Attention along the edges of graphs; q, k, v: (nodes, heads, dim)."""
    scores, target = scores_of_edges(q, k, edge_index), edge_index[1]
    lowest = scores.new_full(q.shape[:2], -torch.inf)
    index = target[:, None].expand_as(scores)
    largest = lowest.scatter_reduce(0, index, scores, "amax")
    return sums_of_edges(q, k, v, edge_index, largest)


def scores_of_edges(q: Tensor, k: Tensor, edge_index: Tensor) -> Tensor:
    """The scores of all edges, `[edges, heads]`."""
    source, target = edge_index
    return (q[target] * k[source]).sum(dim=-1) / q.shape[-1] ** 0.5


def sums_of_edges(
    q: Tensor, k: Tensor, v: Tensor, edge_index: Tensor, largest: Tensor
) -> Tensor:
    """Means of the neighbors' values, with the largest score of each node."""
    source, target = edge_index
    weights = (scores_of_edges(q, k, edge_index) - largest[target]).exp()
    sums = torch.zeros_like(largest).index_add(0, target, weights)
    weights = weights / (sums[target] + 1e-16)
    return torch.zeros_like(v).index_add(0, target, weights[..., None] * v[source])


@pytest.mark.slow
def test_a_function_on_the_nodes_of_graphs_keeps_graphs_apart() -> None:
    report = check(attend_to_own_neighbors)
    assert report.ok, report
    assert "batch_independence" in [result.law.name for result in report.passed]
    report = check(attend_to_neighbors, only="batch_independence")
    assert not report.ok, report


@pytest.mark.slow
def test_a_method_that_draws_tokens_is_no_design() -> None:
    others = [name for name in LAWS if name != "batch_independence"]
    (failure,) = check(PlacesOfFirst, skip=others).failed
    assert "differs if the item is alone" in failure.detail
