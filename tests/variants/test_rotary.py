"""Rotary attention: only distances matter, in every dtype and at every position."""

import copy
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from claims import (
    BATCH,
    K_LEN,
    assert_equals_the_loops,
    in_float64,
    some_mask,
)
from headnotes import masks
from headnotes.mha import MultiHeadAttention
from headnotes.variants import rotary
from headnotes.variants.rotary import RotaryAttention, rotary_frequencies
from loops import Pair, dot

HEADS, D_K = 3, 6
D_MODEL = HEADS * D_K


def rotated(x: Tensor, t: float, frequencies: Sequence[float], pairing: str) -> Tensor:
    """One vector, pair by pair."""
    parts = list(x)
    for n, frequency in enumerate(frequencies):
        first, second = (
            (n, n + len(frequencies)) if pairing == "halves" else (2 * n, 2 * n + 1)
        )
        cos, sin = math.cos(t * frequency), math.sin(t * frequency)
        parts[first] = x[first] * cos - x[second] * sin
        parts[second] = x[first] * sin + x[second] * cos
    return torch.stack(parts)


@pytest.mark.parametrize("pairing", ["halves", "neighbors"])
def test_output_and_gradients_are_those_of_the_loops(pairing: str) -> None:
    frequencies = [1.0, 0.3]  # four of six components
    module = RotaryAttention(
        HEADS,
        D_MODEL,
        frequencies=torch.tensor(frequencies, dtype=torch.float64),
        pairing=pairing,
        attention_factor=1.2,
    )
    positions = torch.tensor([[0, 900], [1, 901], [2, 950], [7, 951], [8, 952]])

    def score(q: Tensor, k: Tensor, at: Pair) -> Tensor:
        q, k = (
            torch.cat([1.2 * y[:4], y[4:]])
            for y in (
                rotated(q, int(positions[at.i + 2, at.b]), frequencies, pairing),
                rotated(k, int(positions[at.j, at.b]), frequencies, pairing),
            )
        )
        return dot(q, k)

    options = {"key_positions": positions}
    assert_equals_the_loops(module, some_mask(), options, score=score)


def test_without_rotation_it_is_the_core() -> None:
    x = torch.randn(K_LEN, BATCH, D_MODEL)
    core = MultiHeadAttention(HEADS, D_MODEL).eval()
    for frequencies in (torch.zeros(3), torch.zeros(0)):
        module = RotaryAttention(HEADS, D_MODEL, frequencies=frequencies).eval()
        module.load_state_dict(core.state_dict())
        assert torch.equal(
            module(query=x, key=x, value=x), core(query=x, key=x, value=x)
        )


def test_only_distances_matter_and_they_do_matter() -> None:
    module = in_float64(RotaryAttention(HEADS, D_MODEL))
    x = torch.randn(K_LEN, BATCH, D_MODEL).double()
    near = torch.arange(K_LEN).unsqueeze(1)
    y = module(query=x, key=x, value=x)
    for positions, same in ((near + 500, True), (2 * near, False), (-near, False)):
        moved = module(query=x, key=x, value=x, key_positions=positions)
        assert torch.allclose(moved, y, rtol=0, atol=1e-11) == same


def test_tokens_that_are_decoded_one_by_one_get_the_causal_outputs() -> None:
    module = in_float64(RotaryAttention(HEADS, D_MODEL))
    x = torch.randn(K_LEN, BATCH, D_MODEL).double()
    whole = module(query=x, key=x, value=x, mask=masks.causal(K_LEN))
    for t in range(K_LEN):
        past = x[: t + 1]
        last = module(query=x[t : t + 1], key=past, value=past)
        torch.testing.assert_close(last, whole[t : t + 1], rtol=0, atol=1e-12)


def test_padding_on_the_left_and_packed_documents_need_no_positions() -> None:
    module = in_float64(RotaryAttention(HEADS, D_MODEL))
    x = torch.randn(K_LEN, 1, D_MODEL).double()
    first, second = (module(query=y, key=y, value=y) for y in (x[:2], x[2:]))
    packed = masks.block_diagonal(torch.tensor([2, 3]))
    output = module(query=x, key=x, value=x, mask=packed)
    torch.testing.assert_close(output, torch.cat([first, second]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_angles_are_not_rounded_to_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    # In bfloat16, 100,003 is 99,840, and in float16 it is infinite.
    at = torch.arange(100_003, 100_003 + K_LEN).unsqueeze(1)
    x = torch.randn(K_LEN, BATCH, HEADS, D_K).to(dtype)
    angles = rotary.rotary_angles(at, rotary_frequencies(D_K))
    output = rotary.rotate(x, angles)
    assert output.dtype == dtype
    expected = rotary.rotate(x.double(), angles)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=eps / 2, atol=1e-7)

    module = in_float64(RotaryAttention(HEADS, D_MODEL))
    back = copy.deepcopy(module).to(dtype).double()
    for ours, theirs in zip(back.parameters(), module.parameters(), strict=True):
        ours.data.copy_(theirs.data)
    y = x.double().flatten(-2)
    arguments = {"query": y, "key": y, "value": y, "key_positions": at}
    assert torch.equal(back(**arguments), module(**arguments))


def test_weights_of_one_pairing_fit_the_other_after_a_permutation() -> None:
    weight = torch.randn(HEADS * D_K, 7)
    for rotary_dim in (2, 4, 6, None):
        options: dict[str, Any] = {"heads": HEADS, "rotary_dim": rotary_dim}
        there = rotary.convert_pairing(weight, to="neighbors", **options)
        back = rotary.convert_pairing(there, to="halves", **options)
        assert torch.equal(back, weight)
        assert torch.equal(there, weight) == (rotary_dim == 2)


# What it refuses


X = torch.randn(K_LEN, BATCH, D_MODEL)


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        ([0, 1, 2, 3, 4], TypeError, "`key_positions` must be a tensor, but is a list"),
        (
            torch.arange(5).bfloat16().unsqueeze(1),
            TypeError,
            "`key_positions` is torch.bfloat16; use integers, float32 or float64 "
            "(bfloat16 counts to 256 only)",
        ),
        (
            torch.arange(5),
            ValueError,
            "`key_positions` has shape [5], not [seq_len, batch_size or 1] = [5, 2 or "
            "1]; positions that the batch shares need `key_positions.unsqueeze(1)`",
        ),
        (
            torch.arange(5, device="meta").unsqueeze(1),
            ValueError,
            "`key_positions` is on meta, the module on cpu; use `key_positions.to("
            "'cpu')`",
        ),
    ],
    ids=["list", "bfloat16", "axes", "device"],
)
def test_positions_that_do_not_fit_are_refused(
    positions: Any, error: type[Exception], message: str
) -> None:
    module = RotaryAttention(HEADS, D_MODEL)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        module(query=X, key=X, value=X, key_positions=positions)
    assert module.attn is None


def test_more_queries_than_keys_need_positions_of_their_own() -> None:
    module = RotaryAttention(HEADS, D_MODEL)
    message = "`key_positions` has 2 positions, fewer than the 5 queries; pass"
    with pytest.raises(ValueError, match=message):
        module(query=X, key=X[:2], value=X[:2], key_positions=torch.zeros(2, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_model": 15}, "`d_model / heads` (=5) must be an even int from 2 up"),
        ({"pairing": "interleaved"}, "must be 'halves' or 'neighbors'"),
        ({"frequencies": torch.ones(4)}, "has 4 pairs, more than fit into a head of"),
        ({"frequencies": torch.ones(2, 2)}, "has shape [2, 2], not [pairs]"),
        ({"attention_factor": -1}, "must be a finite number from 0 up"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RotaryAttention(**{"heads": HEADS, "d_model": D_MODEL} | settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rotary_frequencies(7), "`rotary_dim` (=7) must be an even int"),
        (lambda: rotary_frequencies(8, base=0), "`base` (=0) must be a finite number"),
        (
            lambda: rotary.yarn_scaling(torch.ones(1), 2, 64),
            "`frequencies` must fall, from two up",
        ),
        (
            lambda: rotary.linear_scaling(torch.ones(2), 0.5),
            "`factor` (=0.5) must be a finite number from 1 up",
        ),
        (
            lambda: rotary.llama3_scaling(torch.ones(2), 2, 64, low=4, high=2),
            "`high` (=2) must be a finite number from 4 up",
        ),
        (
            lambda: rotary.rotate(torch.ones(5, 2, 3, 4), torch.ones(5, 1, 3)),
            "`x` has shape [5, 2, 3, 4], `angles` [5, 1, 3], not [5, 2 or 1, at most "
            "2]",
        ),
        (
            lambda: rotary.convert_pairing(torch.ones(7, 2), 2, to="halves"),
            "`weight` has shape [7, 2], not [heads * d_k, ...] with `heads` (=2)",
        ),
    ],
)
def test_what_cannot_be_rotated_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
