"""Mask conventions: conversion there and back, effect in each library, errors."""

import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headnotes import convert, masks
from headnotes.mha import MultiHeadAttention

Q_LEN, K_LEN, BATCH_SIZE, HEADS, D_MODEL = 5, 7, 3, 2, 22
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def some_masks(
    n: int, device: torch.device, *, alike: bool = False
) -> Iterator[Tensor]:
    """Random masks of random sizes, dense and thin, some the same along an axis."""
    for _ in range(n):
        q_len, k_len, batch_size = torch.randint(1, 6, (3,)).tolist()
        shape = (1 if alike else q_len, k_len, batch_size)
        yield torch.rand(shape, device=device) < torch.rand((), device=device)


# Each converter, and its inverse.
ROUND_TRIPS: dict[
    str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
] = {
    "nn.MultiheadAttention, bool": (
        lambda mask: masks.to_mha(mask, heads=3),
        lambda other: masks.from_mha(other, heads=3),
    ),
    "nn.MultiheadAttention, additive": (
        lambda mask: masks.to_mha(mask, heads=3, dtype=torch.float16),
        lambda other: masks.from_mha(other, heads=3),
    ),
    "scaled_dot_product_attention, bool": (masks.to_sdpa, masks.from_sdpa),
    "scaled_dot_product_attention, additive": (
        lambda mask: masks.to_sdpa(mask, dtype=torch.float64),
        masks.from_sdpa,
    ),
    "additive": (masks.to_additive, masks.from_additive),
    "additive and finite": (
        lambda mask: masks.to_additive(mask, torch.bfloat16, finite=True),
        masks.from_additive,
    ),
    "Keras": (masks.to_keras, masks.from_keras),
    "Hugging Face": (masks.to_huggingface, masks.from_huggingface),
}

# Those whose masks have no axis for queries.
KEY_ROUND_TRIPS = {
    "key_padding_mask, bool": (masks.to_key_padding_mask, masks.from_key_padding_mask),
    "key_padding_mask, additive": (
        lambda mask: masks.to_key_padding_mask(mask, torch.float32),
        masks.from_key_padding_mask,
    ),
    "Keras, keys": (masks.to_key_mask, masks.from_key_mask),
    "Hugging Face, keys": (
        lambda mask: masks.to_key_mask(mask).long(),
        masks.from_huggingface,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ROUND_TRIPS, *KEY_ROUND_TRIPS])
def test_converting_there_and_back_gives_the_same_mask(
    name: str, device: torch.device
) -> None:
    to, back = {**ROUND_TRIPS, **KEY_ROUND_TRIPS}[name]
    for mask in some_masks(300, device, alike=name in KEY_ROUND_TRIPS):
        before = mask.clone()
        other = to(mask)
        again = back(other)
        assert again.dtype == torch.bool
        assert again.shape == mask.shape
        assert torch.equal(again, mask)
        assert torch.equal(mask, before)
        assert other.device.type == again.device.type == device.type
        # Integers 0/1 are accepted, too.
        assert torch.equal(to(mask.int()), other)


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_empty_masks_convert_there_and_back(name: str, shape: tuple[int, ...]) -> None:
    to, back = ROUND_TRIPS[name]
    assert torch.equal(back(to(torch.ones(shape).bool())), torch.ones(shape).bool())


def test_no_query_and_no_head_hide_nothing() -> None:
    assert masks.to_key_mask(torch.zeros(0, 5, 3).bool()).all()
    assert not masks.to_key_padding_mask(torch.zeros(0, 5, 3).bool()).any()
    assert masks.from_sdpa(torch.zeros(3, 0, 2, 5).bool()).all()


def test_each_entry_is_converted_as_in_the_table(device: torch.device) -> None:
    mask = torch.rand(Q_LEN, K_LEN, BATCH_SIZE, device=device) < 0.5
    mha, sdpa = masks.to_mha(mask, HEADS), masks.to_sdpa(mask)
    keras, added = masks.to_keras(mask), masks.to_huggingface(mask)
    assert mha.shape == (BATCH_SIZE * HEADS, Q_LEN, K_LEN)
    assert sdpa.shape == added.shape == (BATCH_SIZE, 1, Q_LEN, K_LEN)
    for i in range(Q_LEN):
        for j in range(K_LEN):
            for b in range(BATCH_SIZE):
                may = mask[i, j, b].item()
                assert sdpa[b, 0, i, j] == keras[b, i, j] == may
                assert (added[b, 0, i, j] == 0) == may
                for h in range(HEADS):
                    assert mha[b * HEADS + h, i, j] == (not may)


def test_one_mask_for_all_items_has_two_axes_for_nn_multihead_attention() -> None:
    mask = masks.causal(Q_LEN, K_LEN)
    assert masks.to_mha(mask, HEADS).shape == (Q_LEN, K_LEN)
    expanded = masks.to_mha(mask.expand(-1, -1, BATCH_SIZE), HEADS)
    assert expanded.shape == (BATCH_SIZE * HEADS, Q_LEN, K_LEN)


def test_hidden_is_infinite_or_the_least_finite_number() -> None:
    hidden = torch.tensor([[[False]]])
    for dtype in FLOATS:
        assert masks.to_additive(hidden, dtype).item() == -math.inf
        finite = masks.to_additive(hidden, dtype, finite=True)
        assert finite.dtype == dtype
        assert finite.item() == torch.finfo(dtype).min
        assert masks.to_mha(hidden, 1, dtype).item() == -math.inf
        assert masks.to_huggingface(hidden, dtype).item() == torch.finfo(dtype).min


@pytest.mark.parametrize("made", FLOATS)
@pytest.mark.parametrize("used", FLOATS)
def test_what_hides_in_a_narrow_dtype_hides_in_a_wider_one(
    made: torch.dtype, used: torch.dtype
) -> None:
    mask = torch.tensor([True, False])
    for finite in (True, False):
        added = masks.to_additive(mask, made, finite=finite).to(used)
        # bfloat16 cannot represent the least number of float16, and rounds it.
        if not (finite and (made, used) == (torch.float16, torch.bfloat16)):
            assert torch.equal(masks.from_additive(added), mask)


class Through:
    """The same weights in our module and in those of torch."""

    def __init__(self, device: torch.device) -> None:
        factory = {"device": device, "dtype": torch.float64}
        self.core = MultiHeadAttention(HEADS, D_MODEL).eval().to(**factory)
        self.query = torch.randn(Q_LEN, BATCH_SIZE, D_MODEL, **factory) * 3
        self.key = torch.randn(K_LEN, BATCH_SIZE, D_MODEL, **factory) * 3
        self.mask = torch.rand(Q_LEN, K_LEN, BATCH_SIZE, device=device) < 0.5
        self.mask[:, 0] = True  # no fully masked row: its result differs, see below

    def ours(self, mask: Tensor) -> Tensor:
        out: Tensor = self.core(
            query=self.query, key=self.key, value=self.key, mask=mask
        )
        return out

    def heads_of(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.core.query(self.query), self.core.key(self.key)
        v = self.core.value(self.key)
        return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)

    def output(self, context: Tensor) -> Tensor:
        out: Tensor = self.core.output(context.permute(2, 0, 1, 3).flatten(-2))
        return out

    def sdpa(self, attn_mask: Tensor) -> Tensor:
        q, k, v = self.heads_of()
        return self.output(functional.scaled_dot_product_attention(q, k, v, attn_mask))

    def mha(self, **keywords: Tensor | bool) -> Tensor:
        theirs = convert.to(self.core, "torch")
        out: Tensor = theirs(self.query, self.key, self.key, **keywords)[0]
        return out


@pytest.fixture
def through(device: torch.device) -> Through:
    return Through(device)


def test_attention_is_the_same_through_nn_multihead_attention(through: Through) -> None:
    for mask in (through.mask, through.mask[..., :1], through.mask[..., 1:2]):
        ours = through.ours(mask)
        for dtype in (None, torch.float64):
            attn_mask = masks.to_mha(mask, HEADS, dtype)
            for need_weights in (True, False):
                theirs = through.mha(attn_mask=attn_mask, need_weights=need_weights)
                assert (theirs - ours).abs().max() < 1e-6
    # A mask that has an effect changes the output.
    assert (through.ours(~through.mask) - through.ours(through.mask)).abs().max() > 0.1


def test_padding_is_the_same_through_nn_multihead_attention(through: Through) -> None:
    lens = torch.tensor([7, 2, 5], device=through.mask.device)
    padded = masks.padding(lens, K_LEN)
    for dtype in (None, torch.float64):
        key_padding_mask = masks.to_key_padding_mask(padded, dtype)
        theirs = through.mha(key_padding_mask=key_padding_mask)
        assert (theirs - through.ours(padded)).abs().max() < 1e-6
        both = masks.combine(padded, through.mask)
        attn_mask = masks.to_mha(through.mask, HEADS, dtype)
        theirs = through.mha(key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        assert (theirs - through.ours(both)).abs().max() < 1e-6


def test_a_mask_for_all_queries_is_expanded_first(through: Through) -> None:
    padded = masks.padding(torch.tensor([7, 2, 5], device=through.mask.device), K_LEN)
    attn_mask = masks.to_mha(padded.expand(Q_LEN, -1, -1), HEADS)
    theirs = through.mha(attn_mask=attn_mask)
    assert (theirs - through.ours(padded)).abs().max() < 1e-6


def test_attention_is_the_same_through_sdpa(through: Through) -> None:
    lens = torch.tensor([7, 2, 5], device=through.mask.device)
    wide = masks.padding(lens, K_LEN)
    for mask in (through.mask, through.mask[..., :1], wide):
        ours = through.ours(mask)
        for dtype in (None, torch.float64):
            theirs = through.sdpa(masks.to_sdpa(mask, dtype))
            assert (theirs - ours).abs().max() < 1e-6
        theirs = through.sdpa(masks.to_huggingface(mask, torch.float64))
        assert (theirs - ours).abs().max() < 1e-6


def test_a_fully_masked_row_is_zero_here_and_differs_elsewhere(
    through: Through,
) -> None:
    mask = through.mask
    mask[2, :, 1] = False
    bias = through.core.output.bias
    assert torch.allclose(through.ours(mask)[2, 1], bias)
    # Infinity gives NaN, unless a kernel handles such rows; the least finite number
    # gives the mean of all values.
    assert through.mha(attn_mask=masks.to_mha(mask, HEADS))[2, 1].isnan().all()
    added = through.sdpa(masks.to_huggingface(mask, torch.float64))[2, 1]
    mean = through.sdpa(masks.to_sdpa(torch.ones_like(mask)))
    everything = through.core.value(through.key).mean(0).flatten(-2)
    assert torch.allclose(added, through.core.output(everything)[1])
    assert not torch.allclose(added, mean[2, 1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_transformers_makes_the_same_masks(dtype: torch.dtype) -> None:
    made = pytest.importorskip(
        "transformers.masking_utils", reason="it is in the extra `test`"
    )
    keys = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    sizes = {"batch_size": 3, "q_length": 3, "kv_length": 5, "q_offset": 2}
    mask = masks.combine(masks.causal(3, 5), masks.from_huggingface(keys.long()))
    theirs = made.eager_mask(**sizes, attention_mask=keys, dtype=dtype)
    assert torch.equal(masks.to_huggingface(mask, dtype), theirs)
    assert torch.equal(masks.from_huggingface(theirs), mask)
    theirs = made.sdpa_mask(**sizes, attention_mask=keys)
    assert torch.equal(masks.to_sdpa(mask), theirs)
    assert torch.equal(masks.from_huggingface(theirs), mask)
    window = made.sliding_window_causal_mask_function(2)
    theirs = made.sdpa_mask(**sizes, mask_function=window)
    ours = masks.sliding_window(3, 5, window=2)
    assert torch.equal(masks.from_sdpa(theirs), ours.expand(3, 5, 3))


@pytest.mark.slow
def test_transformers_applies_converted_masks() -> None:
    gpt2 = pytest.importorskip(
        "transformers.models.gpt2", reason="it is in the extra `test`"
    )
    size = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11}
    config = gpt2.GPT2Config(**size, attn_implementation="eager", initializer_range=1.0)
    model = gpt2.GPT2Model(config).eval()
    tokens = torch.randint(11, (2, 5))
    padded = masks.padding(torch.tensor([5, 3]), 5)
    keys = masks.to_key_mask(padded).long()
    mask = masks.combine(masks.causal(5), padded)
    with torch.no_grad():
        by_keys = model(tokens, attention_mask=keys).last_hidden_state
        added = masks.to_huggingface(mask)
        in_full = model(tokens, attention_mask=added).last_hidden_state
        unmasked = model(tokens).last_hidden_state
    assert (by_keys - in_full).abs().max() < 1e-6
    # The padding is after the text, so that in GPT-2 only padding attends to it.
    assert (by_keys - unmasked)[1, 3:].abs().max() > 0.1
    assert (by_keys - unmasked)[1, :3].abs().max() < 1e-6


@pytest.mark.slow
def test_converting_compiles_whole() -> None:
    torch.compiler.reset()

    def convert_all(mask: Tensor) -> list[Tensor]:
        there = [to(mask) for to, _ in ROUND_TRIPS.values()]
        back = [
            back(other)
            for (_, back), other in zip(ROUND_TRIPS.values(), there, strict=True)
        ]
        return [*there, *back, masks.to_key_mask(mask[:1].int())]

    mask = torch.rand(Q_LEN, K_LEN, BATCH_SIZE) < 0.5
    fast = torch.compile(convert_all, backend="eager", fullgraph=True)
    for one, other in zip(fast(mask), convert_all(mask), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", [*ROUND_TRIPS, *KEY_ROUND_TRIPS])
def test_shapes_can_be_found_without_any_data(name: str) -> None:
    to, back = {**ROUND_TRIPS, **KEY_ROUND_TRIPS}[name]
    queries = 1 if name in KEY_ROUND_TRIPS else Q_LEN
    mask = torch.ones(queries, K_LEN, BATCH_SIZE, dtype=torch.bool, device="meta")
    assert back(to(mask)).shape == mask.shape


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_masks_may_be_mapped_over(name: str) -> None:
    to, back = ROUND_TRIPS[name]
    several = torch.rand(4, Q_LEN, K_LEN, BATCH_SIZE) < 0.5
    again = torch.func.vmap(lambda mask: back(to(mask)))(several)
    assert torch.equal(again, several)


def test_floating_point_masks_are_not_guessed() -> None:
    mask = torch.zeros(Q_LEN, K_LEN, BATCH_SIZE)
    name = re.escape("`masks.from_additive(mask)` for 0 and -inf")
    for to in (masks.to_sdpa, masks.to_keras, masks.to_key_mask, masks.to_additive):
        with pytest.raises(TypeError, match=name):
            to(mask)
    with pytest.raises(TypeError, match=name):
        masks.to_mha(mask, HEADS)


MASK = torch.ones(3, 5, 2, dtype=torch.bool)
DIFFERENT = torch.ones(2, 7, 3, 5, dtype=torch.bool)
DIFFERENT[1, 4, 2, 3] = False


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: masks.to_mha([[True]], 2),  # type: ignore[arg-type]
            TypeError,
            "`mask` must be a tensor, but is a list",
        ),
        (
            lambda: masks.to_mha(MASK, 0),
            ValueError,
            "`heads` (=0) must be an int from 1 up",
        ),
        (
            lambda: masks.from_mha(MASK, 2.0),  # type: ignore[arg-type]
            ValueError,
            "`heads` (=2.0) must be an int from 1 up",
        ),
        (
            lambda: masks.to_mha(MASK[0], 2),
            ValueError,
            "`mask` has shape [5, 2], not [q_len or 1, k_len, batch_size or 1]; a "
            "[q_len, k_len] mask needs `mask.unsqueeze(-1)` "
            "if True means 'may attend', `masks.from_mha(mask, heads)` if True hides",
        ),
        (
            lambda: masks.to_sdpa(MASK.float()),
            TypeError,
            "`mask` is torch.float32, not bool or integer 0/1 with 1 for 'may "
            "attend'; use `mask.bool()` for 0 and 1, `masks.from_additive(mask)` for "
            "0 and -inf",
        ),
        (
            lambda: masks.to_keras(torch.tensor([[[0], [1], [3]]])),
            ValueError,
            "`mask` holds 0 to 3, not 0/1; write `mask == 1`",
        ),
        (
            lambda: masks.from_mha(MASK[0, 0], 2),
            ValueError,
            "`attn_mask` has shape [2], not [q_len, k_len] nor [batch_size * heads, "
            "q_len, k_len]",
        ),
        (
            lambda: masks.from_mha(MASK, 2),
            ValueError,
            "`attn_mask` has 3 masks, which `heads` (=2) must divide",
        ),
        (
            lambda: masks.from_mha(~DIFFERENT.flatten(0, 1), 7),
            ValueError,
            "`attn_mask` treats key 3 of query 2 and batch item 1 differently in "
            "heads 0 and 4, but a mask of Headnotes is the same for all heads",
        ),
        (
            lambda: masks.from_sdpa(DIFFERENT),
            ValueError,
            "`attn_mask` treats key 3 of query 2 and batch item 1 differently in "
            "heads 0 and 4, but a mask of Headnotes is the same for all heads",
        ),
        (
            lambda: masks.from_mha(MASK[..., 0].int(), 2),
            TypeError,
            "`attn_mask` is torch.int32, where torch takes bool or float",
        ),
        (
            lambda: masks.from_sdpa(MASK),
            ValueError,
            "`attn_mask` has shape [3, 5, 2], not [q_len or 1, k_len] nor [batch_size "
            "or 1, heads or 1, q_len or 1, k_len]",
        ),
        (
            lambda: masks.from_sdpa(torch.tensor([[0, -1e9]])),
            ValueError,
            "`attn_mask` holds -1e+09 at [0, 1], neither 0 nor the least number of a "
            "dtype; write `attn_mask == 0` if all other values hide",
        ),
        (
            lambda: masks.from_additive(torch.tensor([0, math.nan])),
            ValueError,
            "`mask` holds nan at [1], neither 0 nor the least number of a dtype; write "
            "`mask == 0` if all other values hide",
        ),
        (
            lambda: masks.from_additive(torch.tensor([[0.0], [0.5]])),
            ValueError,
            "`mask` holds 0.5 at [1, 0], neither 0 nor the least number of a dtype; "
            "write `mask == 0` if all other values hide",
        ),
        (
            lambda: masks.from_additive(MASK),
            TypeError,
            "`mask` is torch.bool, not torch.float16, torch.bfloat16, torch.float32, "
            "torch.float64",
        ),
        (
            lambda: masks.from_additive(0.0),  # type: ignore[arg-type]
            TypeError,
            "`mask` must be a tensor, but is a float",
        ),
        (
            lambda: masks.to_additive(MASK, torch.int32),
            TypeError,
            "`dtype` is torch.int32, not torch.float16, torch.bfloat16, torch.float32, "
            "torch.float64",
        ),
        (
            lambda: masks.from_sdpa(torch.zeros(3, 5).to(torch.float8_e4m3fn)),
            TypeError,
            "`attn_mask` is torch.float8_e4m3fn, not torch.float16, torch.bfloat16, "
            "torch.float32, torch.float64",
        ),
        (
            lambda: masks.to_sdpa(MASK.to_sparse()),
            TypeError,
            "`mask` is sparse, nested or quantized; pass a dense one",
        ),
        (
            lambda: masks.to_key_mask(MASK.clone().index_fill_(0, torch.tensor(2), 0)),
            ValueError,
            "`mask` treats key 0 of batch item 0 differently for queries 0 and 2, "
            "which a [batch_size, k_len] mask cannot represent; use `to_sdpa` or "
            "`to_mha`",
        ),
        (
            lambda: masks.to_key_padding_mask(masks.causal(3)),
            ValueError,
            "`mask` treats key 1 of batch item 0 differently for queries 0 and 1, "
            "which a [batch_size, k_len] mask cannot represent; use `to_sdpa` or "
            "`to_mha`",
        ),
        (
            lambda: masks.from_key_padding_mask(torch.tensor([[0, 1]])),
            TypeError,
            "`key_padding_mask` is torch.int64, where torch takes bool or float",
        ),
        (
            lambda: masks.from_key_padding_mask(MASK),
            ValueError,
            "`key_padding_mask` has shape [3, 5, 2], not [batch_size, k_len]",
        ),
        (
            lambda: masks.from_keras(MASK[0]),
            ValueError,
            "`attention_mask` has shape [5, 2], not [batch_size or 1, q_len or 1, "
            "k_len]",
        ),
        (
            lambda: masks.from_keras(MASK.float()),
            TypeError,
            "`attention_mask` is torch.float32, not bool or integer 0/1 with 1 for "
            "'may attend'; use `attention_mask.bool()` for 0 and 1, "
            "`masks.from_additive(attention_mask)` for 0 and -inf",
        ),
        (
            lambda: masks.from_key_mask(torch.tensor([[1, 2]])),
            ValueError,
            "`key_mask` holds 1 to 2, not 0/1; write `key_mask == 1`",
        ),
        (
            lambda: masks.from_huggingface([1, 0]),  # type: ignore[arg-type]
            TypeError,
            "`attention_mask` must be a tensor, but is a list",
        ),
        (
            lambda: masks.from_huggingface(MASK),
            ValueError,
            "`attention_mask` has shape [3, 5, 2], not [batch_size, k_len] nor "
            "[batch_size, 1, q_len, k_len]",
        ),
        (
            lambda: masks.from_huggingface(torch.tensor([[1, 0], [2, 1]])),
            ValueError,
            "`attention_mask` holds 0 to 2, not 0/1; write `attention_mask == 1`",
        ),
        (
            lambda: masks.from_huggingface(DIFFERENT),
            ValueError,
            "`attention_mask` treats key 3 of query 2 and batch item 1 differently in "
            "heads 0 and 4, but a mask of Headnotes is the same for all heads",
        ),
    ],
)
def test_invalid_and_unsupported_masks_are_refused(
    make: Callable[[], Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make()
