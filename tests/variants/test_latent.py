"""Latent attention: keys and values from one short vector, expanded or absorbed."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import loops
from claims import (
    BATCH,
    K_LEN,
    assert_equal_with_gradients,
    in_float64,
    inputs,
    some_mask,
)
from headnotes import masks
from headnotes.variants.latent import LatentAttention, LatentCache

HEADS, D_MODEL = 3, 11
SIZES: dict[str, Any] = {"kv_rank": 7, "rotary_dim": 4, "d_k": 2, "d_v": 5}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / ((x * x).sum() / len(x) + 1e-6).sqrt() * weight


def rotated(x: Tensor, t: int) -> Tensor:
    """Neighboring components, at angles of 1 and 1/100 for each position."""
    parts = []
    for n in range(0, len(x), 2):
        angle = t * 10000 ** (-n / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        parts += [x[n] * cos - x[n + 1] * sin, x[n] * sin + x[n + 1] * cos]
    return torch.stack(parts)


def by_loops(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> Tensor:
    """Equations 37 to 47 of the paper's appendix C, token by token."""

    def latent(x: Tensor) -> Tensor:
        low = module.latent.weight @ x
        return rms_norm(low, module.latent_norm.weight)

    down, norm = module.query_latent
    rows = []
    for i in range(len(query)):
        for b in range(query.shape[1]):
            low = rms_norm(down.weight @ query[i, b], norm.weight)
            q = (module.query.linear.weight @ low).view(HEADS, -1)
            parts = []
            for h in range(HEADS):
                scores, values = [], []
                for j in mask[i, :, b].nonzero().flatten():
                    k = module.key.linear.weight @ latent(key[j, b])
                    shared = module.rotary_key.linear.weight @ key[j, b]
                    score = torch.dot(q[h, :2], k.view(HEADS, -1)[h])
                    behind = len(key) - len(query)
                    score = score + torch.dot(
                        rotated(q[h, 2:], i + behind), rotated(shared, int(j))
                    )
                    scores.append(score / math.sqrt(2 + 4))
                    v = module.value.linear.weight @ latent(value[j, b])
                    values.append(v.view(HEADS, -1)[h])
                parts.append(torch.zeros(SIZES["d_v"], dtype=torch.float64))
                if scores:
                    weights = loops.softmax(torch.stack(scores))
                    parts[h] = weights @ torch.stack(values)
            rows.append(module.output.weight @ torch.cat(parts))
    return torch.stack(rows).view(query.shape)


def test_output_and_gradients_are_those_of_the_loops() -> None:
    module = in_float64(LatentAttention(HEADS, D_MODEL, query_rank=6, **SIZES))
    xs = inputs(D_MODEL)
    leaves = [x.requires_grad_() for x in xs.values()]
    mask = some_mask()
    expected = by_loops(module, *leaves, mask)
    output = module(**xs, mask=mask)
    assert_equal_with_gradients(module, output, expected, leaves)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_absorbed_form_is_the_expanded_one(norm: bool, bias: bool) -> None:
    module = in_float64(LatentAttention(HEADS, D_MODEL, bias=bias, norm=norm, **SIZES))
    x = torch.randn(K_LEN, BATCH, D_MODEL).double().requires_grad_()
    whole = module(query=x, key=x, value=x, mask=masks.causal(K_LEN))
    cache = module.cache(BATCH, 1)
    pieces = [
        module.decode(piece, cache)[0] for piece in (x[:2], x[2:3], x[3:3], x[3:])
    ]
    assert cache.latents.shape == (K_LEN, BATCH, 7 + 4)
    output = torch.cat(pieces)
    assert not output.requires_grad
    torch.testing.assert_close(output, whole.detach(), rtol=0, atol=1e-12)


def test_padding_on_the_left_may_hold_anything_and_a_beam_keeps_its_own() -> None:
    module = in_float64(LatentAttention(HEADS, D_MODEL, bias=True, **SIZES))
    x = torch.randn(K_LEN, 2, D_MODEL).double()
    x[:2, 1] = torch.nan
    alone = [
        module.decode(x[start:, b : b + 1], module.cache(1, K_LEN))[0]
        for b, start in enumerate((0, 2))
    ]
    cache = module.cache(2, 2, left_padding=torch.tensor([0, 2]))
    first, _ = module.decode(x[:3], cache)
    # A position that may attend to nothing has a context of zero.
    assert torch.equal(first[:2, 1], module.output.bias.expand(2, -1))
    beams = torch.tensor([1, 0, 1])
    cache.reorder(beams)
    for t in range(3, K_LEN):
        token, _ = module.decode(x[t : t + 1, beams], cache)
        for output, b in zip(token[0], beams.tolist(), strict=True):
            expected = alone[b][t - K_LEN, 0]
            torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 3])
def test_after_an_error_the_cache_is_as_it_was_before(length: int) -> None:
    module = in_float64(LatentAttention(HEADS, D_MODEL, **SIZES))
    x = torch.randn(K_LEN, BATCH, D_MODEL).double()
    expected = module.decode(x, module.cache(BATCH, K_LEN))[0]
    cache = module.cache(BATCH, 2)
    module.decode(x[:2], cache)

    def fail(*_: Any) -> None:
        raise RuntimeError("a hook fails")

    handle = module.output.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a hook fails"):
        module.decode(-x[:length], cache)
    assert len(cache) == 2
    handle.remove()
    rest, _ = module.decode(x[2:], cache)
    torch.testing.assert_close(rest, expected[2:], rtol=0, atol=1e-12)


def test_a_step_writes_in_place_and_copies_no_earlier_position() -> None:
    module = LatentAttention(HEADS, D_MODEL, **SIZES)
    with torch.inference_mode():
        cache = module.cache(BATCH, K_LEN)
        place = cache.buffer.data_ptr()
        module.decode(X[:2], cache)
    module.decode(X[2:], cache)  # a buffer of inference mode could not be written to
    assert cache.buffer.data_ptr() == cache.latents.data_ptr() == place
    assert (len(cache), cache.capacity) == (K_LEN, K_LEN)


def test_decoding_never_expands_a_key_or_value(monkeypatch: pytest.MonkeyPatch) -> None:
    module = LatentAttention(HEADS, D_MODEL, **SIZES)
    for name in ("key", "value"):
        monkeypatch.setattr(getattr(module, name), "forward", None)
    output, _ = module.decode(X, module.cache(BATCH, K_LEN))
    assert output.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_near(dtype: torch.dtype) -> None:
    module = in_float64(LatentAttention(HEADS, D_MODEL, **SIZES)).to(dtype)
    x = torch.randn(K_LEN, BATCH, D_MODEL).to(dtype)
    output, cache = module.decode(x, module.cache(BATCH, K_LEN))
    assert output.dtype == cache.latents.dtype == dtype
    causal = masks.causal(K_LEN)
    y = x.double()
    expected = module.double()(query=y, key=y, value=y, mask=causal)
    near = 20 * torch.finfo(dtype).eps * float(expected.detach().abs().max())
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=near)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_under_autocast_the_cache_holds_what_the_projections_give() -> None:
    module = in_float64(LatentAttention(HEADS, D_MODEL, **SIZES)).float()
    expected, _ = module.decode(X, module.cache(BATCH, K_LEN))
    with torch.autocast("cpu", torch.bfloat16):
        output, cache = module.decode(X, module.cache(BATCH, K_LEN))
    assert cache.latents.dtype == torch.bfloat16
    near = 0.1 * float(expected.abs().max())
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=near)


X = torch.randn(K_LEN, BATCH, D_MODEL)


@pytest.mark.parametrize(
    ("x", "cache", "error", "message"),
    [
        (X, None, TypeError, "`cache` is a NoneType, not a LatentCache; make one with"),
        (
            X,
            LatentCache(BATCH, 7, 3),
            ValueError,
            "`cache` has width 7, the module kv_rank + rotary_dim (=11); make one with",
        ),
        (
            X[:, :1],
            LatentCache(BATCH, 11, 3),
            ValueError,
            f"`x` has shape [{K_LEN}, 1, 11], not [seq_len, batch_size (={BATCH}), ",
        ),
        (
            X,
            LatentCache(BATCH, 11, 3, dtype=torch.float64),
            TypeError,
            "`x` is torch.float32, the cache torch.float64; make the cache with the",
        ),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(
    x: Tensor, cache: Any, error: type[Exception], message: str
) -> None:
    module = LatentAttention(HEADS, D_MODEL, **SIZES)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        module.decode(x, cache)


def test_a_latent_cache_refuses_what_does_not_fit_and_stays_as_it_was() -> None:
    cache = LatentCache(2, 5, capacity=1)
    x = torch.randn(3, 2, 5)
    cases: list[tuple[Any, type[Exception], str]] = [
        (x[0], ValueError, "`x` has shape [2, 5], not [seq_len, batch_size (=2), w"),
        (x[:, :1], ValueError, "`x` has shape [3, 1, 5], not [seq_len, batch_size"),
        (x.to("meta"), ValueError, "`x` is on meta, "),
        ([0.0], TypeError, "`x` must be a tensor, but is a list"),
    ]
    for piece, error, message in cases:
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            cache.append(piece)
    assert (len(cache), cache.capacity) == (0, 1)
    assert cache


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_rank": 0}, "`kv_rank` (=0) must be an int from 1 up"),
        ({"rotary_dim": 3}, "`rotary_dim` (=3) must be an even int from 2 up"),
        ({"d_k": None}, "`d_model` (=11) must be divisible by `heads` (=3); 1 and 11"),
        ({"query_rank": 0}, "`query_rank` (=0) must be an int from 1 up"),
        ({"frequencies": torch.ones(3)}, "`frequencies` has 3 pairs, but `rotary_dim`"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        LatentAttention(HEADS, D_MODEL, **SIZES | settings)
