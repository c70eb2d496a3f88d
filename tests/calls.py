"""Calls of the methods of fast attention, and what they are compared with."""

import math

import pytest
import torch
from torch import Tensor, nn

from headnotes.fast import blockwise, formula
from headnotes.fast.formula import Call

# Prime and pairwise distinct, so that no swapped pair of axes can pass unseen.
Q_LEN, K_LEN, BATCH, HEADS, D_K = 5, 13, 3, 11, 2

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16


def shrink(
    monkeypatch: pytest.MonkeyPatch, *, rows: int = 2, heads: int = 8, few: int = 7
) -> None:
    """Small sizes reach every method: tiles of few rows and heads, and few keys."""
    monkeypatch.setattr(blockwise, "TILE_ROWS", rows)
    monkeypatch.setattr(blockwise, "TILE_SCORES", 1)
    monkeypatch.setattr(blockwise, "TILE_HEADS", heads)
    monkeypatch.setattr(formula, "SHORT_KEYS", few)


def tensors(
    q_len: int = Q_LEN,
    k_len: int = K_LEN,
    batch_size: int = BATCH,
    heads: int = HEADS,
    d_k: int = D_K,
    requires_grad: bool = False,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value whose rows of attention differ."""
    query = 2 * torch.randn(q_len, batch_size, heads, d_k)
    key, value = torch.randn(2, k_len, batch_size, heads, d_k)
    query, key, value = (x.to(device, dtype) for x in (query, key, value))
    for x in (query, key, value):
        x.requires_grad_(requires_grad)
    return query, key, value


def random_mask(*shape: int) -> Tensor:
    """A random mask; the last row of the first batch item is fully masked."""
    mask = torch.rand(shape) < 0.6
    mask[-1:, :, :1] = False
    return mask


def masks_of(q_len: int, k_len: int, batch_size: int) -> dict[str, Tensor | None]:
    """All kinds of masks."""
    return {
        "no mask": None,
        "padding": random_mask(1, k_len, batch_size),
        "shared": random_mask(q_len, k_len, 1),
        "full": random_mask(q_len, k_len, batch_size),
        "keys": random_mask(1, k_len, 1),
    }


MASKS = list(masks_of(1, 1, 1))
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
MASKED = pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])


def call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    p: float = 0.0,
    need_weights: bool = False,
    average_weights: bool = False,
    transformed: bool = False,
    eager: bool = True,
) -> Call:
    """A call as `attention` makes it; `p` is the probability of dropout."""
    return Call(
        query,
        key,
        value,
        mask,
        is_causal,
        dropout=nn.Dropout(p),
        need_weights=need_weights,
        average_weights=average_weights,
        transformed=transformed,
        eager=eager,
    )


def allowed(
    mask: Tensor | None, is_causal: bool, q_len: int, k_len: int, batch_size: int
) -> Tensor:
    """The mask and causality in full, `[q_len, k_len, batch_size]`."""
    full = torch.ones(q_len, k_len, batch_size, dtype=torch.bool)
    if is_causal:
        full = full & torch.ones(q_len, k_len).bool().tril(k_len - q_len)[..., None]
    return full if mask is None else full & mask


def reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Context, and weights `[q_len, k_len, batch_size, heads]`, by plain operators."""
    scores = torch.einsum("ibhd,jbhd->ijbh", query, key) / math.sqrt(query.shape[-1])
    keep = allowed(mask, is_causal, len(query), len(key), query.shape[1])
    keep = keep.unsqueeze(-1).to(query.device)
    empty = ~keep.any(1, keepdim=True)
    scores = scores.masked_fill(~keep, -math.inf).masked_fill(empty, 0)
    weights = scores.softmax(1).masked_fill(empty, 0)
    return torch.einsum("ijbh,jbhd->ibhd", weights, value), weights
