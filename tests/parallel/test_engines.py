"""The engines on one rank, and what they refuse."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch import nn

from headnotes.parallel.engines import Parallel, gathered, split_like


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`engine` \(='zero'\) must be ddp, fsdp, he"):
        Parallel("zero")


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_ranks_share_the_batch_axis(engine: str) -> None:
    parallel = Parallel(engine)
    parallel.rank, parallel.ranks = 1, 3
    vectors = torch.randn(5, 7, 2)
    assert parallel.own_items(vectors).equal(vectors[:, [1, 4]])
    assert parallel.own_items(vectors[:, :, 0]).equal(vectors[:, [1, 4], 0])
    assert parallel.own_items(vectors[0, :, 0]).equal(vectors[0, [1, 4], 0])


def test_what_is_split_like_a_parameter_is_gathered_whole() -> None:
    layer = nn.Linear(3, 5)
    whole = torch.randn(5, 3)
    Parallel("fsdp").distribute(layer)
    split = split_like(whole, layer.weight)
    assert split.placements == layer.weight.placements
    assert gathered({"a": [split]})["a"][0].equal(whole)
    count = torch.tensor(3.0)
    assert split_like(count, layer.weight) is count


# Without care, about one replica in sixty never ends.
REPEATED = """
import torch
from torch import distributed as dist
from headnotes.parallel.engines import Parallel

def once():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel = Parallel("ddp")
    model = parallel.distribute(torch.nn.Linear(7, 3))
    parallel.mean(model(torch.ones(5, 7)).sum(), 15).backward()
    dist.destroy_process_group()
    del parallel

for _ in range(250):
    once()
"""


@pytest.mark.slow
def test_a_replica_may_outlive_the_process_group() -> None:
    subprocess.run([sys.executable, "-c", REPEATED], check=True, timeout=300)
