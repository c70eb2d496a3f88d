"""The source text of a class is that of Python's `inspect`."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from attention_laws import adapter
from attention_laws.source import source_of, source_with_bases
from specimens.base import Correct


class Outer:
    class Inner:
        """A class within a class, of a name that others have."""


def make() -> type:
    class Inner:
        """A class of a function."""

    return Inner


@pytest.mark.parametrize(
    "target",
    [
        *(nn.MultiheadAttention, Correct, adapter.Adapter),
        *(Outer.Inner, make(), make, torch.optim.AdamW),
    ],
)
def test_it_is_that_of_inspect(target: Any) -> None:
    assert source_of(target) == inspect.getsource(target)


def test_without_a_file_there_is_none() -> None:
    made = type("Made", (), {"__module__": "nowhere"})
    assert source_of(made) == source_of(torch.Tensor.add) == ""


class Inherits(Correct):
    """Its own lines are few."""


def test_that_of_a_class_and_its_bases_leaves_out_those_of_torch() -> None:
    own = [inspect.getsource(kind) for kind in (Inherits, Correct)]
    assert source_with_bases(Inherits) == "\n".join(own)
