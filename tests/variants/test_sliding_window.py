"""Sliding window attention: the band, its blocks, the ring cache, the sink tokens."""

import copy
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import loops
from claims import (
    BATCH,
    assert_equal_with_gradients,
    in_float64,
    inputs,
)
from contract import randomize
from headnotes import masks
from headnotes.mha import MultiHeadAttention
from headnotes.variants import sliding_window
from headnotes.variants.sliding_window import RingCache, SlidingWindowAttention


def band(
    q_len: int, k_len: int, window: int, sinks: int, mask: Tensor | None = None
) -> Tensor:
    """The definition, one pair at a time; what `mask` hides at the start is no sink."""
    mask = torch.ones(1, k_len, 1).bool() if mask is None else mask
    allowed = torch.zeros(q_len, k_len, mask.shape[2]).bool()
    for b in range(mask.shape[2]):
        seen = [j for j in range(k_len) if mask[:, j, b].any()]
        start = seen[0] if seen else k_len
        for row in range(q_len):
            i = row + k_len - q_len
            for j in range(k_len):
                is_sink = start <= j < start + sinks
                allowed[row, j, b] = 0 <= i - j < window or (j <= i and is_sink)
    return allowed & mask


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one position and more, so that short sequences have many."""
    monkeypatch.setattr(sliding_window, "LEAST_BLOCK", 1)


def test_output_and_gradients_are_those_of_the_loops() -> None:
    module = in_float64(SlidingWindowAttention(2, 6, window=2, sink_tokens=1))
    xs = inputs(6, q_len=5, k_len=6)
    leaves = [x.requires_grad_() for x in xs.values()]
    mask = torch.rand(5, 6, BATCH) < 0.8
    mask[3] = False
    mask[:, :2, 1] = False
    expected = loops.attention(module, *leaves, band(5, 6, 2, 1, mask))
    assert_equal_with_gradients(module, module(**xs, mask=mask), expected, leaves)


@settings(max_examples=25)
@given(data=st.data())
def test_it_is_the_core_with_a_mask_for_all_sizes(data: st.DataObject) -> None:
    names = {"q_len": (0, 9), "k_len": (0, 9), "window": (1, 10), "sinks": (0, 3)}
    q_len, k_len, window, sinks = (
        data.draw(st.integers(*bounds), label=n) for n, bounds in names.items()
    )
    kind = data.draw(st.sampled_from(["none", "padding", "queries"]), label="mask")
    torch.manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    core = MultiHeadAttention(2, 6, 0.0).double()
    module = SlidingWindowAttention(2, 6, 0.0, window=window, sink_tokens=sinks)
    module = module.double()
    module.load_state_dict(core.state_dict())
    xs = inputs(6, q_len, k_len)
    mask = torch.rand(1 if kind == "padding" else q_len, k_len, BATCH) < 0.7
    padding = data.draw(st.integers(0, 9), label="padding")
    mask[:, :padding, 1] = False
    full = band(q_len, k_len, window, sinks, None if kind == "none" else mask)
    output = module(**xs, mask=None if kind == "none" else mask)
    torch.testing.assert_close(output, core(**xs, mask=full), rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [7, 8, 10**12])
def test_a_window_of_the_whole_length_is_causal(window: int) -> None:
    core = MultiHeadAttention(2, 6).double().eval()
    module = SlidingWindowAttention(2, 6, window=window).double().eval()
    module.load_state_dict(core.state_dict())
    xs = inputs(6, 7, 7)
    expected = core(**xs, mask=masks.causal(7))
    torch.testing.assert_close(module(**xs), expected, rtol=0, atol=1e-12)


def test_the_window_counts_as_the_mask_does() -> None:
    module = SlidingWindowAttention(2, 6, window=3)
    i, j = torch.arange(4, 9), torch.arange(9)
    expected = masks.sliding_window(5, 9, window=3).squeeze(-1)
    assert torch.equal(module.is_visible(i[:, None], j), expected)


def test_keys_beyond_all_windows_may_hold_nan() -> None:
    module = SlidingWindowAttention(2, 6, window=2, sink_tokens=1).double().eval()
    xs = inputs(6, 2, 9)
    expected = module(**xs)
    for name in ("key", "value"):
        xs[name][1:6] = torch.nan
    # The last query may attend to key 6, but its window does not reach it.
    xs["key"][6, 0] = torch.nan
    xs["value"][6, 0] = torch.nan
    mask = torch.ones(2, 9, BATCH).bool()
    mask[0, 6, 0] = False
    output = module(**xs, mask=mask)
    assert output.isfinite().all()
    torch.testing.assert_close(output[:, 1], expected[:, 1])


def flops(length: int, **options: int) -> int:
    module = SlidingWindowAttention(1, 8, **options)
    x = torch.randn(length, 1, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        module(query=x, key=x, value=x).sum().backward()
    total: int = counter.get_total_flops()
    return total


def test_the_work_of_forward_and_backward_is_linear_in_the_length() -> None:
    assert flops(512, window=16) == 2 * flops(256, window=16)
    # Half of what is computed is within the window.
    assert flops(512, window=16) < 0.15 * flops(512, window=512)


def test_nothing_is_stored_on_the_module() -> None:
    module = SlidingWindowAttention(2, 6, window=2)
    module(**{name: x.float() for name, x in inputs(6).items()})
    assert module.attn is None


def test_padding_on_the_left_is_no_sink() -> None:
    module = in_float64(SlidingWindowAttention(2, 6, window=2, sink_tokens=2))
    x = torch.randn(9, BATCH, 6).double()
    x[:3, 1] = torch.nan
    mask = torch.ones(1, 9, BATCH).bool()
    mask[:, :3, 1] = False
    output = module(query=x.nan_to_num(), key=x, value=x, mask=mask)
    for b, start in enumerate((0, 3)):
        alone = x[start:, b : b + 1]
        expected = module(query=alone, key=alone, value=alone)[:, 0]
        torch.testing.assert_close(output[start:, b], expected, rtol=0, atol=1e-12)


# The ring


@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("pieces", [[1] * 13, [7, 1, 0, 5], [1, 3, 1, 1, 4, 3], [13]])
def test_padding_on_the_left_may_hold_anything_in_the_ring(
    pieces: list[int], sinks: int
) -> None:
    module = in_float64(SlidingWindowAttention(2, 6, window=3, sink_tokens=sinks))
    lengths = torch.tensor([0, 2, 6])
    x = torch.randn(13, 3, 6).double()
    present = torch.arange(13).unsqueeze(1) >= lengths
    x[~present] = torch.nan
    cache = module.cache(3, left_padding=lengths)
    output = torch.cat([module.decode(piece, cache)[0] for piece in x.split(pieces)])
    cleared = x.nan_to_num()
    xs = {"query": cleared, "key": x, "value": x}
    expected = module(**xs, mask=present.unsqueeze(0))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    for b, start in enumerate(lengths.tolist()):
        alone = x[start:, b : b + 1]
        same = module(query=alone, key=alone, value=alone)
        near = {"rtol": 0, "atol": 1e-12}
        torch.testing.assert_close(output[start:, b : b + 1], same, **near)

    # Beams keep the padding of their items.
    order = torch.tensor([2, 0, 2, 1])
    cache.reorder(order)
    more = torch.randn(4, 4, 6).double()
    beams = [module.decode(piece, cache)[0] for piece in more.split([1, 2, 1])]
    x = torch.cat([x[:, order], more])
    present = torch.arange(17).unsqueeze(1) >= lengths[order]
    xs = {"query": x.nan_to_num(), "key": x, "value": x}
    expected = module(**xs, mask=present.unsqueeze(0))[13:]
    torch.testing.assert_close(torch.cat(beams), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padding", [None, torch.tensor([0, 2])])
@pytest.mark.parametrize("stored", [0, 1, 3, 8])
def test_decoding_continues_after_an_error_as_before_it(
    stored: int, padding: Tensor | None
) -> None:
    module = in_float64(SlidingWindowAttention(2, 6, window=3, sink_tokens=2))
    x = torch.randn(12, BATCH, 6).double()
    expected = module.decode(x, module.cache(BATCH, left_padding=padding))[0]
    cache = module.cache(BATCH, left_padding=padding)
    module.decode(x[:stored], cache)

    def fail(*_: Any) -> None:
        raise RuntimeError("a hook fails")

    handle = module.output.register_forward_hook(fail)
    for length in (1, 4, 1):
        with pytest.raises(RuntimeError, match="a hook fails"):
            module.decode(-x[:length], cache)
    assert cache.length == stored
    handle.remove()
    for split in ([1, 3], [4]):
        continued = copy.deepcopy(cache)
        pieces = x[stored : stored + 4].split(split)
        output = torch.cat([module.decode(piece, continued)[0] for piece in pieces])
        same = expected[stored : stored + 4]
        torch.testing.assert_close(output, same, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("pieces", [[1] * 11, [5, 6], [1, 3, 1, 1, 5], [2, 0, 9]])
def test_decoding_in_any_pieces_is_one_call(pieces: list[int], sinks: int) -> None:
    module = SlidingWindowAttention(2, 6, window=3, sink_tokens=sinks).eval()
    randomize(module)
    x = torch.randn(11, BATCH, 6)
    cache = module.cache(BATCH)
    outputs = [module.decode(piece, cache)[0] for piece in x.split(pieces)]
    expected = module(query=x, key=x, value=x)
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-4, atol=1e-4)
    assert cache.buffer.shape == (2, 3 + sinks, BATCH, 2, 3)


def test_the_oldest_position_is_overwritten_and_no_sink_is() -> None:
    cache = RingCache(1, 1, 1, window=3, sink_tokens=2)
    held = []
    for p in range(9):
        x = torch.full((1, 1, 1, 1), float(p))
        cache.append(x, -x)
        keys, values = cache.in_order()
        assert torch.equal(keys, -values)
        assert sorted(cache.keys.flatten().tolist()) == keys.flatten().tolist()
        held.append(keys.flatten().int().tolist())
    assert held[3:7] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 1, 3, 4, 5],
        [0, 1, 4, 5, 6],
    ]


@pytest.mark.parametrize("length", [2, 7])
def test_reordered_beams_continue_from_the_given_items(length: int) -> None:
    module = SlidingWindowAttention(2, 6, window=3, sink_tokens=1).eval()
    prompt, tokens = torch.randn(length, 3, 6), torch.randn(2, 5, 6)
    order = torch.tensor([2, 2, 0, 1, 0])  # more beams than items
    _, cache = module.decode(prompt, module.cache(3))
    cache.reorder(order)
    outputs = [module.decode(token, cache)[0] for token in tokens.split(1)]
    x = torch.cat([prompt[:, order], tokens])
    expected = module(query=x, key=x, value=x)[length:]
    torch.testing.assert_close(torch.cat(outputs), expected)
    with pytest.raises(ValueError, match="`index` names items 0 to 5, but there are"):
        cache.reorder(torch.tensor([0, 5]))


def test_a_cache_of_inference_mode_is_continued_outside_of_it() -> None:
    module = SlidingWindowAttention(2, 6, window=3, sink_tokens=1).eval()
    x, order = torch.randn(7, BATCH, 6), torch.tensor([1, 0])
    with torch.inference_mode():
        first, cache = module.decode(x[:5], module.cache(BATCH))
        cache.reorder(order)
    rest, _ = module.decode(x[5:, order], cache)
    expected = module(query=x, key=x, value=x)
    torch.testing.assert_close(first, expected[:5])
    torch.testing.assert_close(rest, expected[5:, order])


def test_under_autocast_the_cache_holds_what_the_projections_give() -> None:
    module = SlidingWindowAttention(2, 6, window=3).eval()
    x = torch.randn(7, BATCH, 6)
    with torch.autocast("cpu", torch.bfloat16):
        cache = module.cache(BATCH)
        outputs = [module.decode(piece, cache)[0] for piece in x.split([5, 1, 1])]
    assert cache.keys.dtype == torch.bfloat16
    expected = module(query=x, key=x, value=x)
    near = 0.1 * float(expected.detach().abs().max())
    torch.testing.assert_close(torch.cat(outputs).float(), expected, rtol=0, atol=near)


# What it refuses


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": 0}, "`window` (=0) must be an int from 1 up"),
        ({"window": 2.0}, "`window` (=2.0) must be an int from 1 up"),
        (
            {"window": 2, "sink_tokens": -1},
            "`sink_tokens` (=-1) must be an int from 0 up",
        ),
    ],
)
def test_a_window_is_a_number_of_keys(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SlidingWindowAttention(2, 6, **given)


def test_a_cache_that_does_not_fit_is_refused() -> None:
    module = SlidingWindowAttention(2, 6, window=3)
    x = torch.randn(1, BATCH, 6)
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (x, None, TypeError, "`cache` is a NoneType, not a RingCache; make one"),
        (
            x,
            RingCache(BATCH, 2, 3, window=2),
            ValueError,
            "`cache` has window, sink tokens, heads and d_k (2, 0, 2, 3), the module",
        ),
        (
            x[0],
            module.cache(BATCH),
            ValueError,
            "`x` has shape [2, 6], not [seq_len, batch_size (=2), d_model (=6)]; one",
        ),
        (
            x.double(),
            module.cache(BATCH),
            TypeError,
            "`x` is torch.float64, the module torch.float32",
        ),
    ]
    for piece, cache, error, message in cases:
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            module.decode(piece, cache)


def test_a_ring_refuses_what_does_not_fit_and_stays_as_it_was() -> None:
    cache = RingCache(2, 3, 5, window=2)
    x = torch.randn(1, 2, 3, 5)
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (x.double(), x, TypeError, "`key` is torch.float64, the cache torch.float32"),
        (x, x[0], ValueError, "`value` has shape [2, 3, 5], not [seq_len, batch_size"),
        (x, x[:0], ValueError, "`value` has length 0, `key` 1; make them equal"),
        (x, x.to("meta"), ValueError, "`value` is on meta, "),
    ]
    for key, value, error, message in cases:
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            cache.append(key, value)
    assert cache.length == 0
