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
from headnotes.variants.latent import LatentAttention

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
    pieces, cache = [], None
    for piece in (x[:2], x[2:3], x[3:3], x[3:]):
        before = None if cache is None else cache.clone()
        output, longer = module.decode(piece, cache)
        assert before is None or torch.equal(cache, before)
        pieces.append(output)
        cache = longer
    assert cache is not None
    assert cache.shape == (K_LEN, BATCH, 7 + 4)
    assert_equal_with_gradients(module, torch.cat(pieces), whole, [x])


def test_decoding_never_expands_a_key_or_value(monkeypatch: pytest.MonkeyPatch) -> None:
    module = LatentAttention(HEADS, D_MODEL, **SIZES)
    for name in ("key", "value"):
        monkeypatch.setattr(getattr(module, name), "forward", None)
    output, _ = module.decode(torch.randn(K_LEN, BATCH, D_MODEL))
    assert output.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_near(dtype: torch.dtype) -> None:
    module = in_float64(LatentAttention(HEADS, D_MODEL, **SIZES)).to(dtype)
    x = torch.randn(K_LEN, BATCH, D_MODEL).to(dtype)
    output, cache = module.decode(x)
    assert output.dtype == cache.dtype == dtype
    causal = masks.causal(K_LEN)
    y = x.double()
    expected = module.double()(query=y, key=y, value=y, mask=causal)
    near = 20 * torch.finfo(dtype).eps * float(expected.detach().abs().max())
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=near)


X = torch.randn(K_LEN, BATCH, D_MODEL)


@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        ([], TypeError, "`cache` must be a tensor, but is a list"),
        (torch.zeros(3, 2, 11).double(), TypeError, "`cache` is torch.float64, the"),
        (
            torch.zeros(3, 2, 7),
            ValueError,
            "`cache` has shape [3, 2, 7], not [past_len, batch_size (=2), kv_rank + "
            "rotary_dim (=11)]; pass the one that `decode` returned",
        ),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(
    cache: Any, error: type[Exception], message: str
) -> None:
    module = LatentAttention(HEADS, D_MODEL, **SIZES)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        module.decode(X, cache)


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
