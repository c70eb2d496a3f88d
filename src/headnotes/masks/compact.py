r"""# Masks, in fewer numbers

A mask has a number for each query and key, and most masks need far fewer: a length, the
places where documents begin, a flag. Fast kernels take those, and never build the
square.

| what | says | who takes it |
| --- | --- | --- |
| valid lengths | how many keys are no filler | d2l, and many others |
| `cu_seqlens` | where packed documents begin | FlashAttention, `varlen_attn` |
| `is_causal=True` | causal, **from the top left** | `F.scaled_dot_product_attention` |

What a form cannot say is refused, with the first place where it cannot; what it can
say comes back exactly: from lengths with [`padding`](build.md#padding), from
`is_causal` with the other corner of [`causal`](build.md#causal).

Source: [Dive into Deep
Learning](https://d2l.ai/chapter_attention-mechanisms-and-transformers/attention-scoring-functions.html),
section 11.3, for valid lengths; the documentation and code of
[FlashAttention](https://github.com/Dao-AILab/flash-attention) and
[PyTorch](https://docs.pytorch.org/docs/2.11/).
"""

import torch
from torch import Tensor


def to_valid_lens(mask: Tensor) -> Tensor:
    r"""How many keys may be read, where those are the first: `padding`, turned round.

    A mask `[1, k_len, batch_size]` gives `[batch_size]`, and a mask `[q_len, k_len,
    batch_size]` gives `[batch_size, q_len]`.

    Raises `ValueError` where a key may be read behind one that may not.

    >>> mask = torch.ones(3, 5).tril().bool().unsqueeze(-1)
    >>> to_valid_lens(mask.expand(3, 5, 2))
    tensor([[1, 2, 3],
            [1, 2, 3]])
    """
    mask = check_mask(mask)  # [q_len, k_len, batch_size]
    lens = mask.sum(dim=1)  # [q_len, batch_size]
    position = torch.arange(mask.shape[1], device=mask.device)  # [k_len]
    place = first(mask != (position[:, None] < lens[:, None]))
    if place is not None:
        raise ValueError(
            f"`mask` {said(mask, place)}, but shows a later one, and lengths do not"
        )
    return lens[0] if len(lens) == 1 else lens.T  # [batch_size, ...]


def to_is_causal(mask: Tensor) -> bool:
    r"""True, where `is_causal=True` is the same to `F.scaled_dot_product_attention`.

    That is a triangle from the **top left** corner, also where the lengths differ. One
    from the bottom right is `torch.nn.attention.bias.causal_lower_right`.

    Raises `ValueError` for every other mask: False would mean no mask at all.

    >>> mask = torch.ones(3, 5).tril().bool().unsqueeze(-1)
    >>> to_is_causal(mask)
    True
    """
    mask = check_mask(mask)  # [q_len, k_len, ...]
    check_values("mask", mask)
    triangle = mask.new_ones(mask.shape[:2]).tril()  # [q_len, k_len]
    place = first(mask != triangle.unsqueeze(-1))
    if place is not None:
        raise ValueError(
            f"`mask` {said(mask, place)}, but `is_causal` does not: its corner is top "
            f"left; use `to_sdpa`"
        )
    return True


def to_cu_seqlens(mask: Tensor) -> tuple[Tensor, Tensor]:
    r"""Where packed documents begin, and the last one ends: for queries and for keys.

    Both are int32, `[documents + 1]`. The mask is `[q_len, k_len, 1]`: a packed batch
    is one row. Neighbours that see the same are one document.

    Raises `ValueError` where a query sees more, or less, than its document.

    >>> query = torch.tensor([0, 1, 1, 2, 2])
    >>> key = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    >>> mask = (query[:, None] == key).unsqueeze(-1)
    >>> [places.tolist() for places in to_cu_seqlens(mask)]
    [[0, 1, 3, 5], [0, 3, 4, 7]]
    """
    mask = check_mask(mask)
    check_values("mask", mask)
    q_len, k_len = mask.shape[:2]
    if mask.shape[2] != 1:
        raise ValueError(f"`mask` has {mask.shape[2]} batch items; packed, it has 1")
    seen = mask.squeeze(-1)  # [q_len, k_len]
    # A document is a block, from one corner to the next. It ends where the next query
    # sees other keys; keys that nobody sees are a document without queries.
    ends = ((seen[1:] != seen[:-1]).any(dim=1).nonzero() + 1).flatten().tolist()
    corners, start = [(0, 0)], 0
    for end in [*ends, q_len]:
        keys = seen[start:end][:1].nonzero()[:, 1].tolist()
        last = corners[-1][1]
        corners += [(start, keys[0]), (end, keys[-1] + 1)] if keys else [(end, last)]
        start = end
    corners = [*dict.fromkeys([*corners, (q_len, k_len)])]
    places = torch.tensor(corners, device=mask.device)  # [documents + 1, 2]
    cu_q, cu_k = places.int().cummax(dim=0).values.T  # [documents + 1]
    place = first(mask != from_cu_seqlens(cu_q, cu_k))
    if place is not None:
        raise ValueError(
            f"`mask` {said(mask, place)}, but packed documents do not: each sees all "
            f"of itself, and nothing else"
        )
    return cu_q, cu_k


def from_cu_seqlens(cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None) -> Tensor:
    r"""The mask `[q_len, k_len, 1]` of packed documents, each seeing all of itself.

    Raises `TypeError` for what is no integer tensor, `ValueError` where it does not run
    from 0 up, or the keys have another number of documents than the queries.

    >>> cu_q, cu_k = torch.tensor([[0, 1, 3], [0, 3, 5]])
    >>> from_cu_seqlens(cu_q, cu_k).squeeze(-1).int()
    tensor([[1, 1, 1, 0, 0],
            [0, 0, 0, 1, 1],
            [0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    check_cu_seqlens("cu_seqlens", cu_seqlens, cu_seqlens)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, cu_seqlens)
    # Say beside each position which document it belongs to, and compare.
    lens, k_lens = cu_seqlens.long().diff(), cu_seqlens_k.long().diff()  # [documents]
    number = torch.arange(len(lens), device=lens.device)  # [documents]
    of_query = number.repeat_interleave(lens)  # [q_len]
    of_key = number.repeat_interleave(k_lens)  # [k_len]
    return (of_query[:, None] == of_key).unsqueeze(-1)  # [q_len, k_len, 1]


def said(mask: Tensor, place: tuple[int, ...]) -> str:
    """What a mask does to a key and a query."""
    i, j, b = place
    does = f"shows key {j} to" if mask[place] else f"hides key {j} from"
    return f"{does} query {i} of batch item {b}"


def first(wrong: Tensor) -> tuple[int, ...] | None:
    """Where True stands first; None if nowhere, or if compiling, on meta, in `vmap`."""
    if torch.compiler.is_compiling() or wrong.is_meta:
        return None
    try:
        places = wrong.nonzero()[:1].tolist()
    except RuntimeError:
        return None
    return tuple(places[0]) if places else None


def check_tensor(name: str, x: Tensor) -> None:
    """Refuse what is no tensor, or has not a number in each place."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but is a {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise TypeError(f"`{name}` is sparse, nested or quantised; pass a dense one")


def check_mask(mask: Tensor) -> Tensor:
    """A mask as bool, or an error that says what it is instead."""
    check_tensor("mask", mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"`mask` is {mask.dtype}, not bool or integer 0/1; use `mask.bool()` if it "
            f"holds 0 and 1, `masks.from_additive(mask)` if 0 and -inf"
        )
    if mask.dim() != 3:
        expected = "[q_len or 1, k_len, batch_size or 1]"
        raise ValueError(f"`mask` has shape {list(mask.shape)}, not {expected}")
    place = None if mask.dtype == torch.bool else first((mask != 0) & (mask != 1))
    if place is not None:
        seen = mask[place].item()
        raise ValueError(f"`mask` holds {seen} at {list(place)}, not 0 or 1")
    return mask.bool()


def check_values(name: str, x: Tensor) -> None:
    """Refuse where the answer lies in values, and there are none to read."""
    if torch.compiler.is_compiling() or x.is_meta:
        raise ValueError(f"`{name}` decides by values that cannot be read here")


def check_cu_seqlens(name: str, cu_seqlens: Tensor, other: Tensor) -> None:
    """Refuse what are no places where documents begin."""
    check_tensor(name, cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`{name}` is {cu_seqlens.dtype}, not int32 or int64")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) != len(other) or not len(other):
        expected = "[documents + 1], with as many as the queries have"
        raise ValueError(f"`{name}` has shape {list(cu_seqlens.shape)}, not {expected}")
    if cu_seqlens.device != other.device:
        raise ValueError(f"`{name}` is on {cu_seqlens.device}, not on {other.device}")
    check_values(name, cu_seqlens)
    if cu_seqlens[0] != 0 or (cu_seqlens.diff() < 0).any():
        way_out = "`F.pad(lengths.cumsum(0), (1, 0))` makes it from lengths"
        raise ValueError(f"`{name}` must begin with 0 and never fall; {way_out}")
