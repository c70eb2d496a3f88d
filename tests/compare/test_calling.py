"""Calling conventions: every implementation gives the same result, or an error."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headnotes import convert, masks
from headnotes.compare import equivalence as compare
from headnotes.compare.calling import CALLS, call
from headnotes.implementations import stages, valid_lens

# As in the cases of `equivalence`, and pairwise distinct.
Q_LEN, K_LEN, BATCH, HEADS, D_MODEL = 7, 11, 3, 4, 24


Question = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def systems(device: torch.device) -> dict[str, nn.Module]:
    """All implementations, with the same weights, in float64."""
    like = {"device": device, "dtype": torch.float64}
    return compare.systems(compare.SYSTEMS, **like)


@pytest.fixture
def question(device: torch.device) -> Question:
    """Queries, keys and values, and a mask that valid lengths can represent."""
    like: Any = {"device": device, "dtype": torch.float64}
    x = torch.randn(Q_LEN, BATCH, D_MODEL, **like)
    memory = torch.randn(K_LEN, BATCH, D_MODEL, **like)
    lengths = torch.randint(1, K_LEN, (BATCH, Q_LEN), device=device)
    return x, memory, masks.padding(lengths, K_LEN)


def test_all_give_one_result_with_more_keys_than_queries(
    systems: dict[str, nn.Module], question: Question
) -> None:
    x, memory, mask = question
    expected, weights = call(systems["core"], x, memory, mask)
    assert weights is not None
    assert weights.gt(0).equal(mask.unsqueeze(-1).expand_as(weights))
    for name in ("valid_lens", "batch_first", "torch"):
        output, shown = call(systems[name], x, memory, mask)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(shown, weights)


@pytest.mark.parametrize("name", ["core", "valid_lens", "batch_first", "torch"])
def test_a_mask_without_batch_axis_equals_one_for_each_item(
    systems: dict[str, nn.Module], question: Question, name: str
) -> None:
    x, memory, mask = question
    mask = mask[..., :1]
    expected, _ = call(systems[name], x, memory, mask.expand(-1, -1, BATCH))
    output, _ = call(systems[name], x, memory, mask)
    torch.testing.assert_close(output, expected)


def test_torch_is_called_in_the_layout_of_batch_first(
    systems: dict[str, nn.Module], question: Question
) -> None:
    x, memory, mask = question
    expected, weights = call(systems["core"], x, memory, mask)
    twin = convert.to(systems["core"], "torch", batch_first=True)
    output, shown = call(twin, x, memory, mask)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(shown, weights)


def refused(module: nn.Module, message: str, *asked: Any) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(module, *asked)


def test_lengths_refuse_masks_that_are_no_prefix(
    systems: dict[str, nn.Module], question: Question
) -> None:
    x, memory, mask = question
    assert isinstance(systems["valid_lens"], valid_lens.MultiHeadAttention)
    message = "`mask` allows more than the first few keys of a query"
    refused(systems["valid_lens"], message, x, memory, mask.flip(1))


def test_causal_implementations_refuse_other_masks(
    systems: dict[str, nn.Module], question: Question
) -> None:
    x, memory, _ = question
    causal, module = masks.causal(Q_LEN, device=x.device), systems["causal"]
    refused(module, "it has self-attention only", x, memory, causal)
    refused(module, "it is always causal, and takes no other mask", x, x, None)
    refused(
        module,
        "it is always causal, and takes no other mask",
        x,
        x,
        causal.transpose(0, 1),
    )


def test_unbatched_implementations_are_called_item_by_item(
    device: torch.device, question: Question
) -> None:
    x, memory, mask = question
    module = stages.SelfAttention_v2(D_MODEL, 5).to(device, torch.float64)
    output, weights = call(module, x, x, None)
    assert weights is None
    for item in range(BATCH):
        torch.testing.assert_close(output[:, item], module(x[:, item]))
    refused(module, "it has self-attention only", x, memory, None)
    refused(module, "it has no mask", x, x, mask)


def test_an_unknown_module_is_refused_with_the_known_ones() -> None:
    x = torch.randn(3, 2, 5)
    known = ", ".join(kind.__qualname__ for kind in CALLS)
    message = f"`module` is a Linear, but must be one of {known}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        call(nn.Linear(5, 5), x, x, None)
