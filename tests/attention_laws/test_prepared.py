"""Attention to a memory that a method prepares is checked with that memory."""

import torch
from torch import Tensor, nn

from attention_laws import check
from attention_laws.prepared import is_prepared, prepare_method, with_memory
from specimens.base import Correct
from specimens.decoding import LeavesLengthsBehind, PreparesMemory, ReturnsMemory


def test_each_call_prepares_its_own_memory() -> None:
    torch.manual_seed(0)
    attention = with_memory(PreparesMemory, "start")(15, 3).eval()
    plain = PreparesMemory(15, 3).eval()
    plain.load_state_dict(attention.state_dict())
    x, first, second = (
        torch.randn(2, 5, 15),
        torch.randn(2, 7, 15),
        torch.randn(2, 9, 15),
    )
    for memory in (first, second):
        plain.start(memory, lengths := torch.tensor([4, 6]))
        assert torch.equal(attention(x, memory, lengths), plain(x))
    assert torch.equal(attention.again(x), plain(x))


def test_a_memory_that_is_returned_is_the_second_argument() -> None:
    attention = with_memory(ReturnsMemory, "prepare")(15, 3).eval()
    x, frames = torch.randn(2, 5, 15), torch.randn(2, 7, 15)
    expected = ReturnsMemory.forward(attention, x, attention.prepare(frames))
    assert torch.equal(attention(x, frames), expected)


def test_the_counterexample_prepares_the_memory() -> None:
    report = check(LeavesLengthsBehind, only="incremental_decoding")
    (failure,) = report.failed
    assert failure.counterexample is not None
    code = failure.counterexample.code
    assert "prepared = with_memory(LeavesLengthsBehind, 'start')" in code
    assert "attention.again(" in code


def test_only_methods_that_take_a_memory_first_prepare_one() -> None:
    class SetsWindow(nn.Module):
        def set_window(self, window: int) -> None: ...

        def forward(self, x: Tensor) -> Tensor:
            return x

    assert [prepare_method(t) for t in (SetsWindow, Correct, torch.relu)] == [""] * 3
    assert not is_prepared(PreparesMemory)
    assert is_prepared(with_memory(PreparesMemory, "start"))


class EncodesAndDecodes(nn.Module):
    """A method encodes the source, the first input of `forward`."""

    def encode(self, src: Tensor) -> Tensor:
        return src

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return tgt + self.encode(src).mean(dim=1, keepdim=True)


def test_a_method_of_the_first_input_prepares_nothing() -> None:
    assert prepare_method(EncodesAndDecodes) == ""
