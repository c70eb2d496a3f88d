"""Lengths, `cu_seqlens` and `is_causal`: conversion there and back, and errors."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from headnotes import masks


def some_mask(device: torch.device, batch_size: int) -> Tensor:
    """Random masks of one random size, dense and thin, one for each batch item."""
    q_len, k_len = torch.randint(1, 6, (2,)).tolist()
    density = torch.rand(batch_size, device=device)
    return torch.rand(q_len, k_len, batch_size, device=device) < density


def test_lengths_convert_there_and_back(device: torch.device) -> None:
    for n in range(1000):
        q_len, k_len, batch_size = torch.randint(0, 7, (3,)).tolist()
        shape = (batch_size, q_len) if n % 2 and q_len != 1 else (batch_size,)
        lens = torch.randint(k_len + 1, shape, device=device)
        mask = masks.padding(lens, k_len)
        before = mask.clone()
        again = masks.to_valid_lens(mask)
        assert again.dtype == torch.int64
        assert torch.equal(again, lens)
        assert torch.equal(mask, before)
        assert torch.equal(masks.to_valid_lens(mask.int()), lens)


def test_every_random_mask_converts_to_lengths_or_is_refused(
    device: torch.device,
) -> None:
    refused = 0
    for _ in range(300):
        mask = some_mask(device, 2)
        prefixes = (mask[:, 1:] & ~mask[:, :-1]).any().logical_not()
        try:
            lens = masks.to_valid_lens(mask)
        except ValueError as error:
            refused += 1
            assert not prefixes
            numbers = [int(n) for n in re.findall(r"\d+", str(error))]
            j, i, b = numbers[:3]
            assert not mask[i, j, b]
            assert mask[i, j:, b].any()
        else:
            assert prefixes
            again = masks.padding(lens, mask.shape[1])
            assert torch.equal(again, mask)
    assert 90 < refused < 285


@pytest.mark.slow
def test_documents_convert_there_and_back(device: torch.device) -> None:
    for _ in range(300):
        documents = int(torch.randint(0, 6, ()))
        # Adjacent documents without keys, or without queries, are merged.
        lens = torch.randint(1, 4, (2, documents), device=device)
        cu_q, cu_k = pad(lens.cumsum(1), (1, 0)).int()
        mask = masks.from_cu_seqlens(cu_q, cu_k)
        assert torch.equal(mask, masks.block_diagonal(*lens))
        again = masks.to_cu_seqlens(mask)
        assert [places.dtype for places in again] == [torch.int32] * 2
        assert torch.equal(again[0], cu_q)
        assert torch.equal(again[1], cu_k)
        alone = masks.from_cu_seqlens(cu_q.long())
        assert torch.equal(masks.to_cu_seqlens(alone)[1], cu_q)


@pytest.mark.slow
def test_documents_without_queries_or_keys_are_the_same_mask(
    device: torch.device,
) -> None:
    for _ in range(300):
        lens = torch.randint(0, 3, (2, 5), device=device)
        mask = masks.block_diagonal(*lens)
        before = mask.clone()
        assert torch.equal(masks.from_cu_seqlens(*masks.to_cu_seqlens(mask)), mask)
        assert torch.equal(mask, before)


@pytest.mark.slow
@given(data=st.data())
def test_every_small_mask_is_packed_documents_or_refused(data: st.DataObject) -> None:
    q_len, k_len = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    rows = st.lists(st.booleans(), min_size=k_len, max_size=k_len)
    flags = data.draw(st.lists(rows, min_size=q_len, max_size=q_len))
    mask = torch.tensor(flags).bool().reshape(q_len, k_len, 1)
    # Rows are intervals, each equal to the previous row or after it.
    intervals = [[j for j in range(k_len) if mask[i, j, 0]] for i in range(q_len)]
    packed = all(
        keys == list(range(keys[0], keys[-1] + 1)) for keys in intervals if keys
    )
    end = -1
    previous: list[int] = []
    for keys in intervals:
        if keys and keys != previous:
            packed &= keys[0] > end
            end = max(end, keys[-1])
        # A fully masked row is between two documents, not inside of one.
        previous = keys
    if packed:
        assert torch.equal(masks.from_cu_seqlens(*masks.to_cu_seqlens(mask)), mask)
    else:
        with pytest.raises(ValueError, match="but packed documents do not"):
            masks.to_cu_seqlens(mask)


def test_is_causal_is_what_sdpa_does(device: torch.device) -> None:
    for q_len, k_len in ((3, 8), (8, 8), (11, 8)):
        mask = masks.causal(q_len, k_len, corner="top left", device=device)
        q, k, v = (
            torch.randn(1, 2, n, 5, device=device) for n in (q_len, k_len, k_len)
        )
        theirs = scaled_dot_product_attention(
            q, k, v, is_causal=masks.to_is_causal(mask)
        )
        ours = scaled_dot_product_attention(q, k, v, masks.to_sdpa(mask))
        assert (theirs - ours).abs().max() < 1e-6
        for other in (~mask, mask.roll(1, 1), torch.ones_like(mask)):
            with pytest.raises(ValueError, match="but `is_causal` does not"):
                masks.to_is_causal(other)
    with pytest.raises(ValueError, match="but `is_causal` does not"):
        masks.to_is_causal(masks.causal(3, 8))


def test_lengths_are_found_where_values_cannot_be_read() -> None:
    lens = torch.tensor([[1, 2], [2, 3]])
    several = torch.stack([masks.padding(one, 4) for one in lens])
    assert torch.equal(torch.func.vmap(masks.to_valid_lens)(several), lens)
    assert masks.to_valid_lens(several[0].to("meta")).shape == (2,)
    torch.compiler.reset()
    fast = torch.compile(masks.to_valid_lens, backend="eager", fullgraph=True)
    assert torch.equal(fast(several[0]), lens[0])


def documents(*places: int) -> Tensor:
    return masks.from_cu_seqlens(torch.tensor(places))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: masks.to_valid_lens([[True]]),  # type: ignore[arg-type]
            TypeError,
            "`mask` must be a tensor, but is a list",
        ),
        (
            lambda: masks.to_valid_lens(torch.zeros(3, 5, 2)),
            TypeError,
            "`mask` is torch.float32, not bool or integer 0/1 with 1 for 'may "
            "attend'; use `mask.bool()` for 0 and 1, `masks.from_additive(mask)` for "
            "0 and -inf",
        ),
        (
            lambda: masks.to_valid_lens(torch.ones(3, 5).bool()),
            ValueError,
            "`mask` has shape [3, 5], not [q_len or 1, k_len, batch_size or 1]; a "
            "[q_len, k_len] mask needs `mask.unsqueeze(-1)` "
            "if True means 'may attend', `masks.from_mha(mask, heads)` if True hides",
        ),
        (
            lambda: masks.to_cu_seqlens(torch.ones(3, 5, 1).bool().to_sparse()),
            TypeError,
            "`mask` is sparse, nested or quantized; pass a dense one",
        ),
        (
            lambda: masks.to_is_causal(torch.tensor([[[1]], [[-1]]])),
            ValueError,
            "`mask` holds -1 to 1, not 0/1; write `mask == 1`",
        ),
        (
            lambda: masks.to_valid_lens(masks.causal(3).flip(1)),
            ValueError,
            "`mask` hides key 0 from query 0 of batch item 0, but shows a later one, "
            "which lengths cannot represent; use `to_sdpa`",
        ),
        (
            lambda: masks.to_is_causal(masks.causal(3, 5)),
            ValueError,
            "`mask` shows key 1 to query 0 of batch item 0, but `is_causal` does not: "
            "its corner is top left; use `to_sdpa`",
        ),
        (
            lambda: masks.to_is_causal(masks.sliding_window(5, window=2)),
            ValueError,
            "`mask` hides key 0 from query 2 of batch item 0, but `is_causal` does "
            "not: its corner is top left; use `to_sdpa`",
        ),
        (
            lambda: masks.to_is_causal(masks.causal(3, device="meta")),
            ValueError,
            "`mask` has no values that can be read here, in a compiler or on meta; "
            "convert it outside",
        ),
        (
            lambda: masks.to_cu_seqlens(masks.causal(3, device="meta")),
            ValueError,
            "`mask` has no values that can be read here, in a compiler or on meta; "
            "convert it outside",
        ),
        (
            lambda: masks.to_cu_seqlens(torch.ones(5, 5, 2).bool()),
            ValueError,
            "`mask` has 2 batch items; packed, it has 1",
        ),
        (
            lambda: masks.to_cu_seqlens(masks.causal(3)),
            ValueError,
            "`mask` shows key 0 to query 1 of batch item 0, but packed documents do "
            "not: each attends to all of itself, and to nothing else",
        ),
        (
            lambda: documents(1, 3),
            ValueError,
            "`cu_seqlens` must begin with 0 and never fall; `F.pad(lengths.cumsum(0), "
            "(1, 0))` makes it from lengths",
        ),
        (
            lambda: documents(0, 3, 2),
            ValueError,
            "`cu_seqlens` must begin with 0 and never fall; `F.pad(lengths.cumsum(0), "
            "(1, 0))` makes it from lengths",
        ),
        (
            lambda: documents(),
            TypeError,
            "`cu_seqlens` is torch.float32, not int32 or int64",
        ),
        (
            lambda: masks.from_cu_seqlens(torch.zeros(0).int()),
            ValueError,
            "`cu_seqlens` has shape [0], not [documents + 1], with as many as the "
            "queries have",
        ),
        (
            lambda: masks.from_cu_seqlens([0, 3]),  # type: ignore[arg-type]
            TypeError,
            "`cu_seqlens` must be a tensor, but is a list",
        ),
        (
            lambda: masks.from_cu_seqlens(
                torch.tensor([0, 3]), torch.tensor([0, 1, 2])
            ),
            ValueError,
            "`cu_seqlens_k` has shape [3], not [documents + 1], with as many as the "
            "queries have",
        ),
        (
            lambda: masks.from_cu_seqlens(
                torch.tensor([0, 3]), torch.tensor([0, 3], device="meta")
            ),
            ValueError,
            "`cu_seqlens_k` is on meta, `cu_seqlens` on cpu; use "
            "`cu_seqlens_k.to('cpu')`",
        ),
        (
            lambda: masks.from_cu_seqlens(torch.tensor([0, 3], device="meta")),
            ValueError,
            "`cu_seqlens` has no values that can be read here, in a compiler or on "
            "meta; convert it outside",
        ),
    ],
)
def test_invalid_and_unsupported_masks_are_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make()
