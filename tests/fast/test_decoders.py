"""What current decoders add to attention: each part alone, in pairs, and decoded."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headnotes.fast import attention as methods

Q_LEN, K_LEN, BATCH, HEADS, KV_HEADS, D_K, D_V = 5, 7, 2, 6, 2, 3, 4

CLOSE: Any = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles have 2 rows and one group of heads; 2 keys are few."""
    monkeypatch.setattr(methods, "TILE_ROWS", 2)
    monkeypatch.setattr(methods, "TILE_SCORES", 1)
    monkeypatch.setattr(methods, "TILE_HEADS", 2)
    monkeypatch.setattr(methods, "SHORT_KEYS", 2)


def may_attend(
    i: int, j: int, q_len: int, k_len: int, is_causal: bool, window: int | None
) -> bool:
    """Whether query `i` may attend to key `j`; the last of both are aligned."""
    distance = i + k_len - q_len - j
    return (not is_causal or distance >= 0) and (
        window is None or abs(distance) < window
    )


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The context, row by row, over the allowed keys only."""
    (q_len, batch_size, heads, d_k), (k_len, _, kv_heads, d_v) = (
        query.shape,
        value.shape,
    )
    context = torch.zeros(q_len, batch_size, heads, d_v, dtype=query.dtype)
    for i, b, h in itertools.product(*map(range, query.shape[:3])):
        shared = h * kv_heads // heads
        total = 0 * query.sum() if sinks is None else sinks[h].exp()
        row = torch.zeros(d_v, dtype=query.dtype)
        visible = False
        for j in range(k_len):
            if not may_attend(i, j, q_len, k_len, is_causal, window):
                continue
            if mask is not None and not mask[i % len(mask), j, b % mask.shape[2]]:
                continue
            visible = True
            score = query[i, b, h].dot(key[j, b, shared])
            score = score / math.sqrt(d_k) if scale is None else score * scale
            if soft_cap is not None:
                score = soft_cap * (score / soft_cap).tanh()
            if bias is not None:
                score = score + bias[i % len(bias), j, b % bias.shape[2], h]
            total = total + score.exp()
            row = row + score.exp() * value[j, b, shared]
        if visible:
            context[i, b, h] = row / total
    return context


# Each part with its arguments; `kv_heads` and `d_v` are sizes.
PARTS: dict[str, dict[str, Any]] = {
    "groups": {"kv_heads": KV_HEADS},
    "width": {"d_v": D_V},
    "window": {"window": 3},
    "scale": {"scale": 1.7},
    "cap": {"soft_cap": 1.3},
    "bias": {"bias": (Q_LEN, K_LEN, 1, HEADS)},
    "sinks": {"sinks": (HEADS,)},
}
PAIRS = [frozenset(pair) for pair in itertools.product(PARTS, PARTS)]
PAIRS = sorted({*PAIRS}, key=sorted)
ALONE_AND_IN_PAIRS = pytest.mark.parametrize("parts", PAIRS, ids="-".join)


def given(parts: frozenset[str], k_len: int = K_LEN) -> dict[str, Any]:
    """Random arguments of `attention`, in float64, which need a gradient."""
    settings: dict[str, Any] = {}
    for part in sorted(parts):
        settings |= PARTS[part]
    kv_heads, d_v = settings.pop("kv_heads", HEADS), settings.pop("d_v", D_K)
    shapes = {
        "query": (Q_LEN, BATCH, HEADS, D_K),
        "key": (k_len, BATCH, kv_heads, D_K),
        "value": (k_len, BATCH, kv_heads, d_v),
    }
    for name in ("bias", "sinks"):
        if name in settings:
            shapes[name] = settings.pop(name)
    tensors = {
        name: (1.5 * torch.randn(shape)).double().requires_grad_()
        for name, shape in shapes.items()
    }
    return tensors | settings


def gradients(context: Tensor, arguments: dict[str, Any]) -> list[Tensor]:
    leaves = [x for x in arguments.values() if isinstance(x, Tensor)]
    leaves = [x for x in leaves if x.requires_grad]
    return list(torch.autograd.grad(context.pow(3).sum(), leaves))


@ALONE_AND_IN_PAIRS
def test_each_method_equals_the_oracle_with_gradients(
    parts: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = torch.rand(Q_LEN, K_LEN, BATCH) < 0.7
    mask[2, :, 1] = False
    mask[:, 3, 0] = False
    for is_causal in (False, True):
        arguments = given(parts)
        rest: dict[str, Any] = {"is_causal": is_causal}
        rest["mask"] = None if is_causal else mask
        expected = oracle(**arguments, **rest)
        for method in (methods.materialized, methods.blockwise, methods.fused):
            if method is methods.fused and parts & {"width", "cap"}:
                continue  # it has none of them
            monkeypatch.setattr(methods, "DISPATCH", [(method, lambda call: True)])
            learned = dict(arguments)
            if method is methods.fused and "bias" in parts:
                learned["bias"] = learned["bias"].detach()
            context, _ = methods.attention(**learned, **rest)
            name = method.__name__
            torch.testing.assert_close(context, expected, **CLOSE, msg=name)
            for ours, theirs in zip(
                gradients(context, learned),
                gradients(oracle(**learned, **rest), learned),
                strict=True,
            ):
                torch.testing.assert_close(ours, theirs, **CLOSE)
