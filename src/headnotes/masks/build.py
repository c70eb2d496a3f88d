r"""# Masks, built

A mask answers one question for each query and key: *may this query attend to this
key?* There is one convention in this house: a bool tensor `[q_len or 1, k_len,
batch_size or 1]`, where True means yes. An axis of size 1 says "the same for all".

What a mask forbids is not a matter of taste. A *causal* mask keeps a language model
from reading the word that it is asked to predict; a *padding* mask keeps a short
sentence from reading the filler that makes it as long as its neighbours. Both at once
is their conjunction, and broadcasting makes it cheap.

Others write a mask [otherwise](conventions.md), in [fewer numbers](compact.md), or as a
[rule](flex.md): each there and back. And [describe](describe.md) says what a mask does.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.3, for the causal mask; [Dive into Deep
Learning](https://d2l.ai/chapter_attention-mechanisms-and-transformers/attention-scoring-functions.html),
section 11.3, for valid lengths; beside each other mask, its own.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Device = torch.device | str | None


def causal(
    q_len: int,
    k_len: int | None = None,
    *,
    corner: Literal["bottom right", "top left"] = "bottom right",
    device: Device = None,
) -> Tensor:
    r"""Each query sees its own position and all before it: `[q_len, k_len, 1]`.

    When the lengths differ, the last query meets the last key, in the **bottom right**
    corner: query `i` sees key `j` where `j <= i + k_len - q_len`. This is what decoding
    with a cache needs, where the few queries are the newest of many positions. (With
    more queries than keys, the first of them see nothing.) `corner="top left"` lets the
    first query meet the first key instead, `j <= i`: what `is_causal=True` means in
    `F.scaled_dot_product_attention`.

    Raises `ValueError` for a negative or fractional length, or another corner.
    Source: Vaswani et al. 2017, section 3.2.3.

    >>> causal(3).squeeze(-1).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    >>> causal(2, 5).squeeze(-1).int()
    tensor([[1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1]], dtype=torch.int32)
    >>> causal(2, 5, corner="top left").squeeze(-1).int()
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0]], dtype=torch.int32)
    """
    k_len = q_len if k_len is None else k_len
    check_sizes(q_len=q_len, k_len=k_len)
    if type(corner) is not str or corner not in ("bottom right", "top left"):
        raise ValueError(f"`corner` is {corner!r}, not 'bottom right' or 'top left'")
    keep = torch.ones(q_len, k_len, dtype=torch.bool, device=device)  # [q_len, k_len]
    # `tril` counts its diagonal from the top left corner; the shift moves it to the
    # bottom right, where the last query meets the last key.
    shift = k_len - q_len if corner == "bottom right" else 0
    return keep.tril(shift).unsqueeze(-1)  # [q_len, k_len, 1]


def sliding_window(
    q_len: int, k_len: int | None = None, *, window: int, device: Device = None
) -> Tensor:
    r"""Each query sees the last `window` keys, its own among them: `[q_len, k_len, 1]`.

    What is counted is where implementations differ by one. Here `window` is the number
    of keys that a query sees: 1 is its own key alone, `k_len` is causal. That is
    `sliding_window` in Mistral's configuration; FlashAttention counts the keys
    *before* the query's own, `window_size=(window - 1, 0)`. The corner is bottom right,
    as in `causal`.

    Raises `ValueError` for a window below 1, or a negative or fractional length.
    Source: [Mistral 7B, 2](https://arxiv.org/abs/2310.06825), Jiang et al. 2023.

    >>> sliding_window(3, 5, window=2).squeeze(-1).int()
    tensor([[0, 1, 1, 0, 0],
            [0, 0, 1, 1, 0],
            [0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    if type(window) is not int or window < 1:
        raise ValueError(f"`window` (={window!r}) must be an int from 1 up")
    past = causal(q_len, k_len, device=device).squeeze(-1)  # [q_len, k_len]
    oldest = past.shape[1] - q_len - (window - 1)
    return past.triu(oldest).unsqueeze(-1)  # [q_len, k_len, 1]


def padding(valid_lens: Tensor, k_len: int) -> Tensor:
    r"""The first `valid_lens` keys may be read; the rest are filler.

    Lengths per batch item, `[batch_size]`, give a mask `[1, k_len, batch_size]`.
    Lengths per query, `[batch_size, q_len]`, give `[q_len, k_len, batch_size]`. A
    length of 0 leaves nothing to attend to, and the query reads zero.

    Raises `TypeError` for lengths that are not an integer tensor, `ValueError` for a
    length below 0 or beyond `k_len`.
    Source: Dive into Deep Learning, section 11.3, `valid_lens`.

    >>> padding(torch.tensor([3, 1]), k_len=4).squeeze(0).int()
    tensor([[1, 1],
            [1, 0],
            [1, 0],
            [0, 0]], dtype=torch.int32)
    >>> padding(torch.tensor([[1, 2, 3], [1, 1, 1]]), k_len=4).shape
    torch.Size([3, 4, 2])
    """
    check_sizes(k_len=k_len)
    check_lengths(
        "valid_lens", valid_lens, k_len, "[batch_size]", "[batch_size, q_len]"
    )
    valid_lens = valid_lens.long()  # [batch_size, ...]
    position = torch.arange(k_len, device=valid_lens.device)  # [k_len]
    if valid_lens.dim() == 1:
        return (position[:, None] < valid_lens).unsqueeze(0)  # [1, k_len, batch_size]
    # The lengths come batch first, as in the source; the mask leaves sequence first.
    lens = valid_lens.T[:, None]  # [q_len, 1, batch_size]
    return position[:, None] < lens  # [q_len, k_len, batch_size]


def prefix_lm(prefix_lens: Tensor, q_len: int, k_len: int | None = None) -> Tensor:
    r"""Causal, but the first `prefix_lens` keys may be read by every query.

    The prefix is the question, which is read in both directions; what follows is the
    answer, which is written word by word. Lengths `[batch_size]` give
    `[q_len, k_len, batch_size]`. A prefix of 0 is `causal`.

    Raises as `padding` does.
    Source: [T5](https://arxiv.org/abs/1910.10683), Raffel et al. 2020, section 3.2.1.

    >>> mask = prefix_lm(torch.tensor([4, 0]), q_len=3, k_len=5)
    >>> mask[:, :, 0].int()
    tensor([[1, 1, 1, 1, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    k_len = q_len if k_len is None else k_len
    check_sizes(q_len=q_len, k_len=k_len)
    check_lengths("prefix_lens", prefix_lens, k_len, "[batch_size]")
    prefix = padding(prefix_lens, k_len)  # [..., k_len, batch_size]
    past = causal(q_len, k_len, device=prefix.device)  # [q_len, k_len, 1]
    return prefix | past  # [q_len, k_len, batch_size]


def block_diagonal(
    lengths: Tensor,  # [documents]
    k_lengths: Tensor | None = None,
) -> Tensor:
    r"""Documents that are packed one after another, and see only themselves.

    Lengths `[documents]` give `[q_len, k_len, 1]`, where `q_len` is their sum. The keys
    may have lengths of their own, `k_lengths`. Each document sees all of itself; `&`
    with a `causal` mask lets it look only backwards. (The size of this mask lies in the
    values of the lengths, so build it outside of compiled code.)

    Raises `TypeError` for lengths that are no integer tensor, `ValueError` for a
    negative one, for values that cannot be read, or another number of `k_lengths`.
    Source: [Efficient Sequence Packing](https://arxiv.org/abs/2107.02027), Krell et al.
    2021, on cross-contamination.

    >>> q_lens, k_lens = torch.tensor([[1, 2], [3, 2]])
    >>> block_diagonal(q_lens, k_lens).squeeze(-1).int()
    tensor([[1, 1, 1, 0, 0],
            [0, 0, 0, 1, 1],
            [0, 0, 0, 1, 1]], dtype=torch.int32)
    >>> text = torch.tensor([2, 3])
    >>> (block_diagonal(text) & causal(5))[3].T.int()
    tensor([[0, 0, 1, 1, 0]], dtype=torch.int32)
    """
    k_lengths = lengths if k_lengths is None else k_lengths
    for name, each in (("lengths", lengths), ("k_lengths", k_lengths)):
        check_lengths(name, each, None, "[documents]")
        if each.shape != lengths.shape or each.device != lengths.device:
            seen, other = (f"{len(x)} items on {x.device}" for x in (each, lengths))
            raise ValueError(f"`{name}` has {seen}, `lengths` {other}")
        if each.is_meta:
            raise ValueError(f"`{name}` is on meta, but its values give the sizes")
    # Say beside each position which document it belongs to, and compare.
    number = torch.arange(len(lengths), device=lengths.device)  # [documents]
    of_query = number.repeat_interleave(lengths.long())  # [q_len]
    of_key = number.repeat_interleave(k_lengths.long())  # [k_len]
    return (of_query[:, None] == of_key).unsqueeze(-1)  # [q_len, k_len, 1]


def from_function(
    allows: Callable[[Tensor, Tensor, Tensor], Tensor],
    q_len: int,
    k_len: int | None = None,
    batch_size: int = 1,
    *,
    device: Device = None,
) -> Tensor:
    r"""A mask from a rule: `allows(b, q, k)` says whether query `q` sees key `k`.

    `b`, `q` and `k` are index tensors that broadcast, so that one call says it for all:
    write `&`, `|` and `~`, not `and`, `or` and `not`. It is the `mask_mod` of
    FlexAttention, without the head. An axis that the rule does not use keeps its size
    of 1, except for the keys: `[q_len or 1, k_len, batch_size or 1]`.

    Raises `TypeError` for a result that is no bool tensor, `ValueError` for its shape.
    Source: [FlexAttention](https://arxiv.org/abs/2412.05496), Dong et al. 2024.

    A window to either side, of another width for each batch item:

    >>> reach = torch.tensor([1, 2])
    >>> near = lambda b, q, k: (q - k).abs() <= reach[b]
    >>> mask = from_function(near, 3, 5, batch_size=2)
    >>> mask[:, :, 0].int()
    tensor([[1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [0, 1, 1, 1, 0]], dtype=torch.int32)
    """
    k_len = q_len if k_len is None else k_len
    check_sizes(q_len=q_len, k_len=k_len, batch_size=batch_size)
    if not callable(allows):
        raise TypeError(f"`allows` must be callable, but is a {type(allows).__name__}")
    b = torch.arange(batch_size, device=device)  # [batch_size]
    q = torch.arange(q_len, device=device)[:, None, None]  # [q_len, 1, 1]
    k = torch.arange(k_len, device=device)[:, None]  # [k_len, 1]
    mask = allows(b, q, k)  # [..., k_len, batch_size]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        seen = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"`allows` must return a bool tensor, but returned {seen}")
    shape = (1,) * (3 - mask.dim()) + tuple(mask.shape)
    full = (q_len, k_len, batch_size)
    fits = [n in (1, m) for n, m in zip(shape, full, strict=False)]
    if len(shape) > 3 or not all(fits):
        raise ValueError(
            f"`allows` returned shape {list(mask.shape)}, which does not broadcast to "
            f"[q_len, k_len, batch_size] = {list(full)}; compute it from `b`, `q`, `k`"
        )
    mask = mask.reshape(shape).expand(-1, k_len, -1)  # [..., k_len, batch_size]
    return mask.clone()


def combine(*masks: Tensor) -> Tensor:
    r"""What all `masks` allow: their logical *and*, broadcast.

    Raises `TypeError` for a floating-point mask, `ValueError` for masks that do not fit
    one another, or for none at all.

    >>> combine(causal(3, 5), padding(torch.tensor([5, 2]), 5)).shape
    torch.Size([3, 5, 2])
    """
    if not masks:
        raise ValueError("`masks` is empty; give at least one mask to combine")
    check_mask("masks[0]", masks[0], masks[0])
    combined = masks[0].bool()  # [q_len, k_len, ...]
    for n, mask in enumerate(masks):
        check_mask(f"masks[{n}]", mask, combined)
        combined = combined & mask.bool()  # [q_len, k_len, ...]
    return combined


def check_sizes(**sizes: int) -> None:
    """Refuse a size that no tensor could have; one that is traced is a SymInt."""
    for name, size in sizes.items():
        if type(size) not in (int, torch.SymInt) or size < 0:
            raise ValueError(f"`{name}` (={size!r}) must be an int from 0 up")


def extremes(x: Tensor) -> tuple[int, int]:
    """Least and greatest value, or zeros where values cannot be read.

    There is nothing to read on "meta", under `vmap`, or in a compiler.
    """
    if torch.compiler.is_compiling() or not x.numel():
        return 0, 0
    try:
        low, high = x.long().aminmax()
        return int(low), int(high)
    except RuntimeError:
        return 0, 0


def check_tensor(name: str, x: Tensor) -> None:
    """Refuse what is no tensor, or has not a number in each place."""
    if not isinstance(x, Tensor):
        seen, way_out = type(x).__name__, f"use `torch.tensor({name})`"
        raise TypeError(f"`{name}` must be a tensor, but is a {seen}; {way_out}")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise TypeError(f"`{name}` is sparse, nested or quantised; pass a dense one")


def check_lengths(name: str, lens: Tensor, k_len: int | None, *shapes: str) -> None:
    """Refuse lengths that would be read as something else, or reach beyond the keys."""
    check_tensor(name, lens)
    if lens.is_floating_point() or lens.is_complex() or lens.dtype == torch.bool:
        raise TypeError(
            f"`{name}` is {lens.dtype}, but lengths are integers; from a mask "
            f"[batch_size, k_len] with all filler at its end, use `mask.sum(dim=1)`"
        )
    if lens.dim() not in [shape.count(",") + 1 for shape in shapes]:
        raise ValueError(
            f"`{name}` has shape {list(lens.shape)}, not {' or '.join(shapes)}"
        )
    low, high = extremes(lens)
    if low < 0 or (k_len is not None and high > k_len):
        limit = "any length" if k_len is None else f"`k_len` (={k_len})"
        raise ValueError(
            f"`{name}` runs from {low} to {high}, but must lie between 0 and {limit}; "
            f"use `{name}.clamp(0, {k_len})` if meant so"
        )


def check_mask(name: str, mask: Tensor, others: Tensor) -> None:
    """Refuse what is no mask of this house, or does not fit the masks before it."""
    check_tensor(name, mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"`{name}` is {mask.dtype}, not bool or integer 0/1; use `mask.bool()` if "
            f"it holds 0 and 1, `masks.from_additive(mask)` if 0 and -inf"
        )
    if mask.dim() != 3:
        raise ValueError(
            f"`{name}` has shape {list(mask.shape)}, not [q_len or 1, k_len, "
            f"batch_size or 1]; a [q_len, k_len] mask needs `mask.unsqueeze(-1)`"
        )
    if mask.device != others.device:
        where = f"`{name}` is on {mask.device}, the masks before it on {others.device}"
        raise ValueError(f"{where}; use `mask.to({str(others.device)!r})`")
    # Axes of size 1 broadcast, but not the keys: one key is one key, not all of them.
    sizes = zip(("q_len", "k_len", "batch_size"), mask.shape, others.shape, strict=True)
    for axis, size, other in sizes:
        if size != other and (axis == "k_len" or 1 not in (size, other)):
            raise ValueError(
                f"`{name}` has shape {list(mask.shape)}, the masks before it "
                f"{list(others.shape)}: `{axis}` cannot be both {size} and {other}"
            )
    low, high = (0, 1) if mask.dtype == torch.bool else extremes(mask)
    if low < 0 or high > 1:
        raise ValueError(f"`{name}` holds {low} to {high}, not 0/1; write `mask == 1`")
