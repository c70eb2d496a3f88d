r"""# Building masks

This module builds attention masks: causal, padding, sliding window, prefix, packed
documents, or from a rule of your own. A mask defines for each query and key whether the
query may attend to the key. Headnotes has one convention for masks: a bool tensor
`[q_len or 1, k_len, batch_size or 1]`, where True means *may attend*. An axis of size 1
is broadcast: its values are the same for all queries, or for all batch items.

A *causal* mask keeps a language model from attending to the token that it is to
predict. A *padding* mask hides the padding that makes a short sequence as long as the
others of its batch. `combine`, or `&`, combines both; broadcasting makes it cheap.

Masks in [other conventions](conventions.md), including [mask functions of
FlexAttention](flex.md), can be converted from and to this one. [describe](describe.md)
describes a mask in words.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.3, for the causal mask; [Dive into Deep
Learning](https://d2l.ai/chapter_attention-mechanisms-and-transformers/attention-scoring-functions.html),
section 11.3, for valid lengths; the source of each other mask is named in its
docstring.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from headnotes.checks import (
    check_axes,
    check_lengths,
    check_mask,
    check_sizes,
    check_tensor,
)

Device = torch.device | str | None


def causal(
    q_len: int,
    k_len: int | None = None,
    *,
    corner: Literal["bottom right", "top left"] = "bottom right",
    device: Device = None,
) -> Tensor:
    r"""A causal mask, `[q_len, k_len, 1]`: no query attends to later positions.

    When the lengths differ, the last query is aligned with the last key, in the
    **bottom right** corner: query `i` may attend to key `j` if `j <= i + k_len -
    q_len`. Decoding with a KV cache needs this, because its few queries are the newest
    of many positions. (With more queries than keys, the first queries are fully
    masked.) `corner="top left"` aligns the first query with the first key instead, `j
    <= i`. This is what `is_causal=True` means in `F.scaled_dot_product_attention`.

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
    check_sizes(0, q_len=q_len, k_len=k_len)
    if type(corner) is not str or corner not in ("bottom right", "top left"):
        raise ValueError(f"`corner` is {corner!r}, not 'bottom right' or 'top left'")
    mask = torch.ones(q_len, k_len, dtype=torch.bool, device=device)  # [q_len, k_len]
    # `tril` counts its diagonal from the top left corner; the shift moves it to the
    # bottom right, where the last query is aligned with the last key.
    shift = k_len - q_len if corner == "bottom right" else 0
    return mask.tril(shift).unsqueeze(-1)  # [q_len, k_len, 1]


def sliding_window(
    q_len: int, k_len: int | None = None, *, window: int, device: Device = None
) -> Tensor:
    r"""A sliding window, `[q_len, k_len, 1]`: the last `window` keys, its own included.

    Here `window` is the number of keys that a query may attend to: 1 is its own key
    alone, `k_len` gives a causal mask. This is `sliding_window` in Mistral's
    configuration. Other implementations count one less: FlashAttention counts the keys
    *before* the query's own, `window_size=(window - 1, 0)`. The corner is bottom right,
    as in `causal`.

    Raises `ValueError` for a window below 1, or a negative or fractional length.
    Source: [Mistral 7B, 2](https://arxiv.org/abs/2310.06825), Jiang et al. 2023.

    >>> sliding_window(3, 5, window=2).squeeze(-1).int()
    tensor([[0, 1, 1, 0, 0],
            [0, 0, 1, 1, 0],
            [0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    check_sizes(window=window)
    past = causal(q_len, k_len, device=device).squeeze(-1)  # [q_len, k_len]
    oldest = past.shape[1] - q_len - (window - 1)
    return past.triu(oldest).unsqueeze(-1)  # [q_len, k_len, 1]


def padding(valid_lens: Tensor, k_len: int) -> Tensor:
    r"""A padding mask: all keys from position `valid_lens` on are hidden.

    Lengths per batch item, `[batch_size]`, give a mask `[1, k_len, batch_size]`.
    Lengths per query, `[batch_size, q_len]`, give `[q_len, k_len, batch_size]`. A
    length of 0 makes fully masked rows, whose context is zero.

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
    check_sizes(0, k_len=k_len)
    check_tensor("valid_lens", valid_lens)
    check_axes("valid_lens", valid_lens, "[batch_size]", "[batch_size, q_len]")
    check_lengths("valid_lens", valid_lens, k_len)
    valid_lens = valid_lens.long()  # [batch_size, ...]
    position = torch.arange(k_len, device=valid_lens.device)  # [k_len]
    if valid_lens.dim() == 1:
        return (position[:, None] < valid_lens).unsqueeze(0)  # [1, k_len, batch_size]
    # The lengths are batch first, as in the source; the mask is sequence first.
    lens = valid_lens.T[:, None]  # [q_len, 1, batch_size]
    return position[:, None] < lens  # [q_len, k_len, batch_size]


def prefix_lm(prefix_lens: Tensor, q_len: int, k_len: int | None = None) -> Tensor:
    r"""A prefix mask: causal, but all queries attend to the first `prefix_lens` keys.

    The prefix is the prompt, whose tokens attend in both directions; the tokens after
    it are generated one by one. Lengths `[batch_size]` give `[q_len, k_len,
    batch_size]`. A prefix of 0 is `causal`.

    Raises as `padding` does.
    Source: [T5](https://arxiv.org/abs/1910.10683), Raffel et al. 2020, section 3.2.1.

    >>> mask = prefix_lm(torch.tensor([4, 0]), q_len=3, k_len=5)
    >>> mask[:, :, 0].int()
    tensor([[1, 1, 1, 1, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    k_len = q_len if k_len is None else k_len
    check_sizes(0, q_len=q_len, k_len=k_len)
    check_tensor("prefix_lens", prefix_lens)
    check_axes("prefix_lens", prefix_lens, "[batch_size]")
    check_lengths("prefix_lens", prefix_lens, k_len)
    prefix = padding(prefix_lens, k_len)  # [..., k_len, batch_size]
    past = causal(q_len, k_len, device=prefix.device)  # [q_len, k_len, 1]
    return prefix | past  # [q_len, k_len, batch_size]


def block_diagonal(
    lengths: Tensor,  # [documents]
    k_lengths: Tensor | None = None,
) -> Tensor:
    r"""A mask for packed documents: each token attends to its own document only.

    Lengths `[documents]` give `[q_len, k_len, 1]`, where `q_len` is their sum. The keys
    may have other lengths, `k_lengths`. Combine with `& causal(q_len)` for causal
    attention within each document. (The size of this mask depends on the values of the
    lengths, so build it outside of compiled code.)

    Raises `TypeError` for lengths that are not an integer tensor, `ValueError` for a
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
    check_tensor("lengths", lengths)
    check_tensor("k_lengths", k_lengths, lengths.device, owner="`lengths`")
    for name, values in (("lengths", lengths), ("k_lengths", k_lengths)):
        check_axes(name, values, "[documents]")
        check_lengths(name, values, None)
        if len(values) != len(lengths):
            raise ValueError(
                f"`{name}` has {len(values)} items, `lengths` {len(lengths)}; give one "
                f"for each document"
            )
        if values.is_meta:
            raise ValueError(f"`{name}` is on meta, but its values give the sizes")
    # Number the documents, label each position with the number of its document, and
    # compare the labels.
    number = torch.arange(len(lengths), device=lengths.device)  # [documents]
    q_document = number.repeat_interleave(lengths.long())  # [q_len]
    k_document = number.repeat_interleave(k_lengths.long())  # [k_len]
    return (q_document[:, None] == k_document).unsqueeze(-1)  # [q_len, k_len, 1]


def from_function(
    allows: Callable[[Tensor, Tensor, Tensor], Tensor],
    q_len: int,
    k_len: int | None = None,
    batch_size: int = 1,
    *,
    device: Device = None,
) -> Tensor:
    r"""A mask from a function `allows(b, q, k)`: may query `q` attend to key `k`?

    `b`, `q` and `k` are index tensors that broadcast, so that one call computes the
    whole mask: write `&`, `|` and `~`, not `and`, `or` and `not`. The function is the
    `mask_mod` of FlexAttention, without the head. An axis that it does not use keeps
    its size of 1, except for the keys: `[q_len or 1, k_len, batch_size or 1]`.

    Raises `TypeError` for a result that is not a bool tensor, `ValueError` for its
    shape.
    Source: [FlexAttention](https://arxiv.org/abs/2412.05496), Dong et al. 2024.

    A window to both sides, of another width for each batch item:

    >>> width = torch.tensor([1, 2])
    >>> is_near = lambda b, q, k: (q - k).abs() <= width[b]
    >>> mask = from_function(is_near, 3, 5, batch_size=2)
    >>> mask[:, :, 0].int()
    tensor([[1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [0, 1, 1, 1, 0]], dtype=torch.int32)
    """
    k_len = q_len if k_len is None else k_len
    check_sizes(0, q_len=q_len, k_len=k_len, batch_size=batch_size)
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
    broadcasts = len(shape) == 3 and all(
        size in (1, limit) for size, limit in zip(shape, full, strict=True)
    )
    if not broadcasts:
        raise ValueError(
            f"`allows` returned shape {list(mask.shape)}, which does not broadcast to "
            f"[q_len, k_len, batch_size] = {list(full)}; compute it from `b`, `q`, `k`"
        )
    mask = mask.reshape(shape).expand(-1, k_len, -1)  # [..., k_len, batch_size]
    return mask.clone()


def combine(*masks: Tensor) -> Tensor:
    r"""Combine masks: the logical *and* of all `masks`, broadcast.

    Raises `TypeError` for a floating-point mask, `ValueError` for masks that do not fit
    one another, or for none at all.

    >>> combine(causal(3, 5), padding(torch.tensor([5, 2]), 5)).shape
    torch.Size([3, 5, 2])
    """
    if not masks:
        raise ValueError("`masks` is empty; give at least one mask to combine")
    check_mask("masks[0]", masks[0])
    # A single mask is copied, too: the result never shares memory with an input.
    combined = masks[0].bool().clone()  # [q_len, k_len, ...]
    for n, mask in enumerate(masks[1:], start=1):
        check_mask(f"masks[{n}]", mask)
        check_broadcast(f"masks[{n}]", mask, combined)
        combined = combined & mask.bool()  # [q_len, k_len, ...]
    return combined


def check_broadcast(name: str, mask: Tensor, others: Tensor) -> None:
    """Refuse a mask that does not broadcast with the masks before it."""
    check_tensor(name, mask, others.device, owner="the masks before it")
    # Axes of size 1 broadcast, except for the keys: a mask with one key would silently
    # allow or forbid all of them.
    sizes = zip(("q_len", "k_len", "batch_size"), mask.shape, others.shape, strict=True)
    for axis, size, other in sizes:
        if size != other and (axis == "k_len" or 1 not in (size, other)):
            raise ValueError(
                f"`{name}` has shape {list(mask.shape)}, the masks before it "
                f"{list(others.shape)}: `{axis}` cannot be both {size} and {other}"
            )
