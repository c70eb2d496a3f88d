"""Masks: what each allows, and what is refused."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headnotes.masks import causal, combine, padding

INTEGERS = [torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64]


@given(q_len=st.integers(0, 9), k_len=st.integers(0, 9))
def test_the_last_query_sees_the_last_key_and_each_earlier_one_key_less(
    q_len: int, k_len: int
) -> None:
    mask = causal(q_len, k_len)
    assert mask.shape == (q_len, k_len, 1)
    assert mask.dtype == torch.bool
    for i in range(q_len):
        for j in range(k_len):
            from_the_end = (q_len - 1 - i) <= (k_len - 1 - j)
            assert mask[i, j, 0].item() == from_the_end


def test_one_length_is_enough_for_a_square(device: torch.device) -> None:
    assert torch.equal(causal(7, device=device), causal(7, 7, device=device))
    assert causal(7, device=device).device.type == device.type


def test_decoding_one_token_sees_the_whole_past() -> None:
    # The newest row of a full pass is the mask of a single cached step.
    assert torch.equal(causal(1, 7), causal(7)[-1:])
    assert torch.equal(causal(3, 7), causal(7)[-3:])


@given(data=st.data())
def test_lengths_allow_exactly_a_prefix(data: st.DataObject) -> None:
    k_len = data.draw(st.integers(0, 7), label="k_len")
    batch_size = data.draw(st.integers(0, 5), label="batch_size")
    length = st.integers(0, k_len)
    per_query = data.draw(st.booleans(), label="per query")
    q_len = data.draw(st.integers(1, 3), label="q_len") if per_query else 1
    lens = [[data.draw(length) for _ in range(q_len)] for _ in range(batch_size)]
    valid_lens = torch.tensor(lens, dtype=torch.int64).reshape(batch_size, q_len)
    mask = padding(valid_lens if per_query else valid_lens[:, 0], k_len)
    assert mask.shape == (q_len, k_len, batch_size)
    assert mask.dtype == torch.bool
    for b in range(batch_size):
        for i in range(q_len):
            assert mask[i, :, b].tolist() == [j < lens[b][i] for j in range(k_len)]


def test_causal_is_padding_with_lengths_that_grow(device: torch.device) -> None:
    lens = torch.arange(1, 8, device=device).expand(3, 7)  # 1 … 7 for each item
    assert torch.equal(padding(lens, 7), causal(7, device=device).expand(7, 7, 3))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_lengths_of_every_integer_type_are_accepted(dtype: torch.dtype) -> None:
    # 300 keys: more than a uint8 can count, fewer than are asked for.
    assert padding(torch.tensor([200], dtype=dtype), 300).sum() == 200


def test_combined_masks_allow_what_all_allow(device: torch.device) -> None:
    one = causal(5, 7, device=device)
    two = padding(torch.tensor([7, 2, 4], device=device), 7)
    three = torch.rand(5, 7, 3, device=device) < 0.5
    both = combine(one, two, three)
    assert both.shape == (5, 7, 3)
    assert torch.equal(both, one & two & three)
    assert torch.equal(combine(one.int(), two.long()), one & two)


def test_combining_one_mask_copies_it() -> None:
    mask = causal(3)
    combined = combine(mask)
    combined[:] = False
    assert mask.any()


def test_masks_and_lengths_are_left_alone() -> None:
    lens = torch.tensor([3, 1, 2])
    mask = causal(3)
    combine(mask, padding(lens, 3), mask.int())
    assert lens.tolist() == [3, 1, 2]
    assert torch.equal(mask, causal(3))


def test_building_masks_compiles_whole() -> None:
    torch.compiler.reset()

    def build(lens: Tensor) -> Tensor:
        return combine(causal(5), padding(lens, 5).int())

    lens = torch.tensor([5, 2, 0])
    fast = torch.compile(build, backend="aot_eager", fullgraph=True)
    assert torch.equal(fast(lens), build(lens))


def test_building_masks_exports_with_a_dynamic_length() -> None:
    class Build(torch.nn.Module):
        def forward(self, x: Tensor, lens: Tensor) -> Tensor:
            return combine(causal(x.shape[0]), padding(lens, x.shape[0]))

    lens = torch.tensor([5, 2, 0])
    length, batch = torch.export.Dim("length", min=2), torch.export.Dim("batch", min=2)
    for strict in (False, True):
        program = torch.export.export(
            Build(),
            (torch.zeros(5), lens),
            dynamic_shapes=({0: length}, {0: batch}),
            strict=strict,
        )
        other = (torch.zeros(7), torch.tensor([7, 3]))
        assert torch.equal(program.module()(*other), Build()(*other))


def test_shapes_can_be_found_without_any_data() -> None:
    lens = torch.zeros(3, dtype=torch.int64, device="meta")
    mask = combine(causal(5, device="meta").int(), padding(lens, 5))
    assert mask.shape == (5, 5, 3)


def test_lengths_may_be_mapped_over() -> None:
    lens = torch.tensor([[1, 2], [2, 3]])
    masks = torch.func.vmap(lambda one: padding(one, 4))(lens)
    assert torch.equal(masks, torch.stack([padding(one, 4) for one in lens]))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: causal(-1),
            ValueError,
            "`q_len` (=-1) must be an int from 0 up",
        ),
        (
            lambda: causal(3, 2.5),  # type: ignore[arg-type]
            ValueError,
            "`k_len` (=2.5) must be an int from 0 up",
        ),
        (
            lambda: padding(torch.tensor([1]), -3),
            ValueError,
            "`k_len` (=-3) must be an int from 0 up",
        ),
        (
            lambda: padding([3, 2], 4),  # type: ignore[arg-type]
            TypeError,
            "`valid_lens` must be a tensor, but is a list; use "
            "`torch.tensor(valid_lens)`",
        ),
        (
            lambda: padding(torch.tensor([True, False]), 4),
            TypeError,
            "`valid_lens` is torch.bool, but lengths are integers; from a mask "
            "[batch_size, k_len] with all filler at its end, use `mask.sum(dim=1)`",
        ),
        (
            lambda: padding(torch.tensor([3.0]), 4),
            TypeError,
            "`valid_lens` is torch.float32, but lengths are integers; from a mask "
            "[batch_size, k_len] with all filler at its end, use `mask.sum(dim=1)`",
        ),
        (
            lambda: padding(torch.ones(2, 3, 5).long(), 4),
            ValueError,
            "`valid_lens` has shape [2, 3, 5], not [batch_size] or [batch_size, q_len]",
        ),
        (
            lambda: padding(torch.tensor([3, 5]), 4),
            ValueError,
            "`valid_lens` runs from 3 to 5, but must lie between 0 and `k_len` (=4); "
            "use `valid_lens.clamp(0, 4)` if meant so",
        ),
        (
            lambda: padding(torch.tensor([-1, 2]), 4),
            ValueError,
            "`valid_lens` runs from -1 to 2, but must lie between 0 and `k_len` (=4); "
            "use `valid_lens.clamp(0, 4)` if meant so",
        ),
        (
            lambda: combine(),
            ValueError,
            "`masks` is empty; give at least one mask to combine",
        ),
        (
            lambda: combine(causal(3), [[True]]),  # type: ignore[arg-type]
            TypeError,
            "`masks[1]` must be a tensor, but is a list",
        ),
        (
            lambda: combine(causal(3), torch.zeros(3, 3, 1)),
            TypeError,
            "`masks[1]` is torch.float32, not bool or integer 0/1; use `mask.bool()` "
            "if it holds 0 and 1, `mask == 0` if it is additive, with 0 and -inf",
        ),
        (
            lambda: combine(torch.ones(3, 3).bool()),
            ValueError,
            "`masks[0]` has shape [3, 3], not [q_len or 1, k_len, batch_size or 1]; a "
            "[q_len, k_len] mask needs `mask.unsqueeze(-1)`",
        ),
        (
            lambda: combine(causal(3, 5), causal(3, 7)),
            ValueError,
            "`masks[1]` has shape [3, 7, 1], the masks before it [3, 5, 1]: `k_len` "
            "cannot be both 7 and 5",
        ),
        (
            lambda: combine(causal(3, 5), causal(1, 1)),
            ValueError,
            "`masks[1]` has shape [1, 1, 1], the masks before it [3, 5, 1]: `k_len` "
            "cannot be both 1 and 5",
        ),
        (
            lambda: combine(causal(1, 5), causal(2, 5), causal(3, 5)),
            ValueError,
            "`masks[2]` has shape [3, 5, 1], the masks before it [2, 5, 1]: `q_len` "
            "cannot be both 3 and 2",
        ),
        (
            lambda: combine(causal(3), causal(3, device="meta")),
            ValueError,
            "`masks[1]` is on meta, the masks before it on cpu; use `mask.to('cpu')`",
        ),
        (
            lambda: combine(causal(2), torch.tensor([[[5], [1]], [[0], [-2]]])),
            ValueError,
            "`masks[1]` holds -2 to 5, not 0/1; write `mask == 1`",
        ),
    ],
)
def test_what_is_no_mask_is_refused(
    build: Callable[[], Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        build()
