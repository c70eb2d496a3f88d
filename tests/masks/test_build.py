"""Building masks: what each mask allows, and errors."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

from headnotes.masks.build import (
    block_diagonal,
    causal,
    combine,
    from_function,
    padding,
    prefix_lm,
    sliding_window,
)

NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
INTEGERS = [torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64]


@pytest.mark.slow
@given(q_len=st.integers(0, 9), k_len=st.integers(0, 9))
def test_bottom_right_aligns_the_last_query_with_the_last_key(
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


@given(q_len=st.integers(0, 9), k_len=st.integers(0, 9))
def test_top_left_aligns_the_first_query_with_the_first_key(
    q_len: int, k_len: int
) -> None:
    mask = causal(q_len, k_len, corner="top left")
    assert mask.shape == (q_len, k_len, 1)
    for i in range(q_len):
        assert mask[i, :, 0].tolist() == [j <= i for j in range(k_len)]


def test_corners_are_those_of_torch() -> None:
    def seen(q_len: int, k_len: int, bias: Tensor) -> Tensor:
        # Equal scores, and one-hot values that identify the keys.
        queries, keys = torch.zeros(1, 1, q_len, 8), torch.zeros(1, 1, k_len, 8)
        values = torch.eye(k_len)[None, None]
        weights = scaled_dot_product_attention(queries, keys, values, bias)
        return weights[0, 0, :, :, None] > 0

    assert torch.equal(causal(3, 8), seen(3, 8, causal_lower_right(3, 8)))
    for q_len, k_len in ((3, 8), (11, 8), (8, 8)):
        mask = causal(q_len, k_len, corner="top left")
        assert torch.equal(mask, seen(q_len, k_len, causal_upper_left(q_len, k_len)))
    assert torch.equal(causal(7), causal(7, corner="top left"))


@given(q_len=st.integers(0, 7), k_len=st.integers(0, 7), window=st.integers(1, 9))
def test_the_window_is_the_number_of_keys_per_query(
    q_len: int, k_len: int, window: int
) -> None:
    mask = sliding_window(q_len, k_len, window=window)
    assert mask.shape == (q_len, k_len, 1)
    for i in range(q_len):
        own = i + k_len - q_len
        seen = [j for j in range(k_len) if mask[i, j, 0]]
        assert seen == [j for j in range(own - window + 1, own + 1) if 0 <= j < k_len]
        if window <= own + 1:
            assert len(seen) == window


def test_a_wide_window_is_causal_and_one_of_1_is_the_diagonal() -> None:
    assert torch.equal(sliding_window(5, 7, window=7), causal(5, 7))
    assert torch.equal(sliding_window(5, window=1).squeeze(-1), torch.eye(5).bool())


@pytest.mark.slow
@given(data=st.data())
def test_all_queries_attend_to_the_prefix_and_causally_to_the_rest(
    data: st.DataObject,
) -> None:
    q_len, k_len = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 7))
    lens = data.draw(st.lists(st.integers(0, k_len), min_size=1, max_size=3))
    mask = prefix_lm(torch.tensor(lens), q_len, k_len)
    assert mask.shape == (q_len, k_len, len(lens))
    for b, length in enumerate(lens):
        for i in range(q_len):
            own = i + k_len - q_len
            seen = [j < length or j <= own for j in range(k_len)]
            assert mask[i, :, b].tolist() == seen


def test_no_prefix_is_causal_and_a_full_prefix_hides_nothing() -> None:
    mask = prefix_lm(torch.tensor([0, 5]), q_len=5)
    assert torch.equal(mask[..., :1], causal(5))
    assert mask[..., 1].all()


@given(data=st.data())
def test_packed_documents_attend_to_themselves_only(data: st.DataObject) -> None:
    length = st.integers(0, 4)
    lengths = data.draw(st.lists(st.tuples(length, length), min_size=0, max_size=4))
    q_lens = torch.tensor([q for q, _ in lengths], dtype=torch.int64)
    k_lens = torch.tensor([k for _, k in lengths], dtype=torch.int64)
    queries = [n for n, (q, _) in enumerate(lengths) for _ in range(q)]
    keys = [n for n, (_, k) in enumerate(lengths) for _ in range(k)]
    mask = block_diagonal(q_lens, k_lens)
    assert mask.shape == (len(queries), len(keys), 1)
    assert mask.squeeze(-1).tolist() == [[q == k for k in keys] for q in queries]
    assert torch.equal(block_diagonal(q_lens), block_diagonal(q_lens, q_lens))


def test_a_function_is_evaluated_for_every_pair(device: torch.device) -> None:
    table = torch.rand(5, 7, 3, device=device) < 0.5
    mask = from_function(lambda b, q, k: table[q, k, b], 5, 7, 3, device=device)
    assert torch.equal(mask, table)
    assert mask.device.type == device.type


def test_an_axis_that_a_function_does_not_use_has_size_1(device: torch.device) -> None:
    lens = torch.tensor([7, 5, 2], device=device)
    padded = from_function(lambda b, q, k: k < lens[b], 5, 7, 3, device=device)
    assert torch.equal(padded, padding(lens, 7))
    past = from_function(lambda b, q, k: k <= q, 5, 7, 3)
    assert torch.equal(past, causal(5, 7, corner="top left"))
    # The keys are the one axis that does not broadcast.
    assert from_function(lambda b, q, k: q > 1, 5, 7, 3).shape == (5, 7, 1)
    constant = torch.tensor(True)
    assert from_function(lambda b, q, k: constant, 5, 7, 3).shape == (1, 7, 1)


def test_a_function_is_the_mask_mod_of_flex_attention() -> None:
    document = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])

    def same(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (document[b, q] == document[b, k]) & (k <= q)

    theirs = create_mask(lambda b, h, q, k: same(b, q, k), 2, 1, 5, 5, device="cpu")
    ours = from_function(same, 5, batch_size=2)
    assert torch.equal(ours, theirs[:, 0].permute(1, 2, 0))


def test_a_mask_from_a_function_shares_no_memory_with_its_result() -> None:
    table = torch.ones(3, 3, 1).bool()
    from_function(lambda b, q, k: table, 3).fill_(False)
    assert table.all()


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
    # 300 keys: more than a uint8 can hold.
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


def test_masks_and_lengths_are_not_modified() -> None:
    lens = torch.tensor([3, 1, 2])
    mask = causal(3)
    combine(mask, padding(lens, 3), mask.int())
    assert lens.tolist() == [3, 1, 2]
    assert torch.equal(mask, causal(3))


@pytest.mark.slow
def test_building_masks_compiles_whole() -> None:
    torch.compiler.reset()

    def build(lens: Tensor) -> Tensor:
        rule = from_function(lambda b, q, k: k < lens[b], 5, batch_size=3)
        window = sliding_window(5, window=2)
        return combine(causal(5), padding(lens, 5).int(), rule, window) | prefix_lm(
            lens, 5
        )

    lens = torch.tensor([5, 2, 0])
    fast = torch.compile(build, backend="eager", fullgraph=True)
    assert torch.equal(fast(lens), build(lens))


@pytest.mark.slow
def test_building_masks_exports_with_a_dynamic_length() -> None:
    class Build(torch.nn.Module):
        def forward(self, x: Tensor, lens: Tensor) -> Tensor:
            return combine(causal(x.shape[0]), padding(lens, x.shape[0]))

    lens = torch.tensor([5, 2, 0])
    length, batch = torch.export.Dim("length", min=2), torch.export.Dim("batch", min=2)
    program = torch.export.export(
        Build(),
        (torch.zeros(5), lens),
        dynamic_shapes=({0: length}, {0: batch}),
        strict=False,
    )
    other = (torch.zeros(7), torch.tensor([7, 3]))
    assert torch.equal(program.module()(*other), Build()(*other))


def test_shapes_can_be_found_without_any_data() -> None:
    lens = torch.zeros(3, dtype=torch.int64, device="meta")
    mask = combine(causal(5, device="meta").int(), padding(lens, 5))
    assert mask.shape == (5, 5, 3)
    assert prefix_lm(lens, 5).shape == (5, 5, 3)
    assert sliding_window(5, window=2, device="meta").is_meta
    assert from_function(lambda b, q, k: k <= q, 5, device="meta").shape == (5, 5, 1)


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
            "`valid_lens` must be a tensor, but is a list",
        ),
        (
            lambda: padding(torch.tensor([True, False]), 4),
            TypeError,
            "`valid_lens` is torch.bool, but lengths are integers; from a padding "
            "mask [batch_size, k_len] with all padding at its end, use "
            "`mask.sum(dim=1)`",
        ),
        (
            lambda: padding(torch.tensor([3.0]), 4),
            TypeError,
            "`valid_lens` is torch.float32, but lengths are integers; from a padding "
            "mask [batch_size, k_len] with all padding at its end, use "
            "`mask.sum(dim=1)`",
        ),
        (
            lambda: padding(torch.ones(2, 3, 5).long(), 4),
            ValueError,
            "`valid_lens` has shape [2, 3, 5], not [batch_size] nor [batch_size, "
            "q_len]",
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
            "`masks[1]` is torch.float32, not bool or integer 0/1 with 1 for 'may "
            "attend'; use `masks[1].bool()` for 0 and 1, "
            "`masks.from_additive(masks[1])` for 0 and -inf",
        ),
        (
            lambda: causal(3, corner="lower right"),  # type: ignore[arg-type]
            ValueError,
            "`corner` is 'lower right', not 'bottom right' or 'top left'",
        ),
        (
            lambda: sliding_window(3, window=0),
            ValueError,
            "`window` (=0) must be an int from 1 up",
        ),
        (
            lambda: sliding_window(-3, window=2),
            ValueError,
            "`q_len` (=-3) must be an int from 0 up",
        ),
        (
            lambda: prefix_lm(torch.tensor([2]), -1),
            ValueError,
            "`q_len` (=-1) must be an int from 0 up",
        ),
        (
            lambda: prefix_lm(torch.tensor([2, 6]), 5),
            ValueError,
            "`prefix_lens` runs from 2 to 6, but must lie between 0 and `k_len` (=5); "
            "use `prefix_lens.clamp(0, 5)` if meant so",
        ),
        (
            lambda: prefix_lm(torch.tensor([[2, 3]]), 5),
            ValueError,
            "`prefix_lens` has shape [1, 2], not [batch_size]",
        ),
        (
            lambda: block_diagonal([2, 3]),  # type: ignore[arg-type]
            TypeError,
            "`lengths` must be a tensor, but is a list",
        ),
        (
            lambda: block_diagonal(torch.tensor([2, -1])),
            ValueError,
            "`lengths` runs from -1 to 2, but must lie between 0 and any length; use "
            "`lengths.clamp(0, None)` if meant so",
        ),
        (
            lambda: padding(torch.tensor([2, 3]).to_sparse(), 5),
            TypeError,
            "`valid_lens` is sparse, nested or quantized; pass a dense one",
        ),
        (
            lambda: combine(NESTED),
            TypeError,
            "`masks[0]` is sparse, nested or quantized; pass a dense one",
        ),
        (
            lambda: from_function(3, 3),  # type: ignore[arg-type]
            TypeError,
            "`allows` must be callable, but is a int",
        ),
        (
            lambda: block_diagonal(torch.tensor(5)),
            ValueError,
            "`lengths` has shape [], not [documents]",
        ),
        (
            lambda: block_diagonal(torch.tensor([2, 3]), torch.tensor([5])),
            ValueError,
            "`k_lengths` has 1 items, `lengths` 2; give one for each document",
        ),
        (
            lambda: block_diagonal(
                torch.tensor([2, 3]), torch.tensor([2, 3], device="meta")
            ),
            ValueError,
            "`k_lengths` is on meta, `lengths` on cpu; use `k_lengths.to('cpu')`",
        ),
        (
            lambda: block_diagonal(torch.tensor([2, 3], device="meta")),
            ValueError,
            "`lengths` is on meta, but its values give the sizes",
        ),
        (
            lambda: from_function(lambda b, q, k: k <= q, 3, -2),
            ValueError,
            "`k_len` (=-2) must be an int from 0 up",
        ),
        (
            lambda: from_function(lambda b, q, k: True, 3),  # type: ignore[arg-type,return-value]
            TypeError,
            "`allows` must return a bool tensor, but returned bool",
        ),
        (
            lambda: from_function(lambda b, q, k: q - k, 3),
            TypeError,
            "`allows` must return a bool tensor, but returned torch.int64",
        ),
        (
            lambda: from_function(lambda b, q, k: k[:2] <= q, 3),
            ValueError,
            "`allows` returned shape [3, 2, 1], which does not broadcast to [q_len, "
            "k_len, batch_size] = [3, 3, 1]; compute it from `b`, `q`, `k`",
        ),
        (
            lambda: from_function(lambda b, q, k: (k <= q)[:1, :1, :, None], 3),
            ValueError,
            "`allows` returned shape [1, 1, 1, 1], which does not broadcast to [q_len, "
            "k_len, batch_size] = [3, 3, 1]; compute it from `b`, `q`, `k`",
        ),
        (
            lambda: combine(torch.ones(3, 3).bool()),
            ValueError,
            "`masks[0]` has shape [3, 3], not [q_len or 1, k_len, batch_size or 1]; a "
            "[q_len, k_len] mask needs `masks[0].unsqueeze(-1)` "
            "if True means 'may attend', `masks.from_mha(masks[0], heads)` "
            "if True hides",
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
            "`masks[1]` is on meta, the masks before it on cpu; use "
            "`masks[1].to('cpu')`",
        ),
        (
            lambda: combine(causal(2), torch.tensor([[[5], [1]], [[0], [-2]]])),
            ValueError,
            "`masks[1]` holds -2 to 5, not 0/1; write `masks[1] == 1`",
        ),
    ],
)
def test_invalid_arguments_are_refused(
    build: Callable[[], Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        build()
