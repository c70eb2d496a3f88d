"""Latent attention: keys and values from one short vector, expanded or absorbed."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import loops
from attention_laws import check
from headnotes import masks
from headnotes.variants.latent import LatentAttention

Q_LEN, K_LEN, BATCH, HEADS, D_MODEL = 3, 5, 2, 3, 11
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
                for j in range(len(key)):
                    k = module.key.linear.weight @ latent(key[j, b])
                    shared = module.rotary_key.linear.weight @ key[j, b]
                    score = torch.dot(q[h, :2], k.view(HEADS, -1)[h])
                    behind = len(key) - len(query)
                    score = score + torch.dot(
                        rotated(q[h, 2:], i + behind), rotated(shared, j)
                    )
                    scores.append(score / math.sqrt(2 + 4))
                    v = module.value.linear.weight @ latent(value[j, b])
                    values.append(v.view(HEADS, -1)[h])
                weights = loops.softmax(scores, mask[i, :, b].tolist())
                pairs = zip(weights, values, strict=True)
                parts.append(torch.stack([w * v for w, v in pairs]).sum(0))
            rows.append(module.output.weight @ torch.cat(parts))
    return torch.stack(rows).view(query.shape)


def test_output_and_gradients_are_those_of_the_loops() -> None:
    module = loops.build(LatentAttention(HEADS, D_MODEL, query_rank=6, **SIZES))
    query, key, value = xs = loops.inputs(
        (Q_LEN, BATCH, D_MODEL), (K_LEN, BATCH, D_MODEL), (K_LEN, BATCH, D_MODEL)
    )
    mask = torch.rand(Q_LEN, K_LEN, BATCH) < 0.7
    mask[1, :, 0] = False
    mask[0] = True  # no key is hidden from all queries, which would clear it
    expected = by_loops(module, query, key, value, mask)
    output = module(query=query, key=key, value=value, mask=mask)
    loops.assert_same(output, expected, [*xs, *module.parameters()])


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_absorbed_form_is_the_expanded_one(norm: bool, bias: bool) -> None:
    module = loops.build(LatentAttention(HEADS, D_MODEL, bias=bias, norm=norm, **SIZES))
    (x,) = loops.inputs((K_LEN, BATCH, D_MODEL))
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
    loops.assert_same(torch.cat(pieces), whole, [x, *module.parameters()])


def test_decoding_never_expands_a_key_or_value(monkeypatch: pytest.MonkeyPatch) -> None:
    module = LatentAttention(HEADS, D_MODEL, **SIZES)
    for name in ("key", "value"):
        monkeypatch.setattr(getattr(module, name), "forward", None)
    output, _ = module.decode(torch.randn(K_LEN, BATCH, D_MODEL))
    assert output.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_near(dtype: torch.dtype) -> None:
    module = loops.build(LatentAttention(HEADS, D_MODEL, **SIZES)).to(dtype)
    x = torch.randn(K_LEN, BATCH, D_MODEL).to(dtype)
    output, cache = module.decode(x)
    assert output.dtype == cache.dtype == dtype
    causal = masks.causal(K_LEN)
    y = x.double()
    expected = module.double()(query=y, key=y, value=y, mask=causal)
    near = 20 * torch.finfo(dtype).eps * float(expected.detach().abs().max())
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=near)


def test_laws_of_latent_attention() -> None:
    laws = ["relative_positions", "incremental_decoding", "padding", "causality"]
    settings = {"kv_rank": 5, "rotary_dim": 2}
    report = check(LatentAttention, positions="rotary", init_args=settings, only=laws)
    assert len(report.passed) == len(laws), report


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
