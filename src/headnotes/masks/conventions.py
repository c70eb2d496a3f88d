r"""# Mask conventions by library

This module converts masks between the conventions of PyTorch, Keras, Hugging Face,
FlashAttention and Headnotes. They differ in the order of the axes, in the meaning of
True, and in whether a mask is bool or additive (0 and minus infinity, added to the
scores). A mask in the wrong convention is silently inverted or has no effect. Below,
`q` are the queries, `k` the keys, `b` the batch items and `h` the heads.

| convention | axes | may attend |
| --- | --- | --- |
| Headnotes | `q k b` | True |
| `nn.MultiheadAttention`, `attn_mask` | `q k` or `(b h) q k` | **False** or 0.0 |
| `nn.MultiheadAttention`, `key_padding_mask` | `b k` | **False** or 0.0 |
| `F.scaled_dot_product_attention`, `attn_mask` | `q k` or `b h q k` | True or 0.0 |
| Keras, `attention_mask` | `b q k` | True |
| Keras, `key_mask` and `value_mask` | `b k` | True |
| Hugging Face, `attention_mask` | `b k` or `b 1 q k` | 1 or 0.0 |

A mask has a value for each pair of a query and a key. Most masks can be given with far
fewer values: lengths, the offsets of documents, or a flag. Fast kernels take these, and
never build the full mask.

| lengths and flags | meaning | used by |
| --- | --- | --- |
| valid lengths | how many keys are not padding | d2l, and many others |
| `cu_seqlens` | the offsets of packed documents | FlashAttention, `varlen_attn` |
| `is_causal=True` | causal, **from the top left** | `F.scaled_dot_product_attention` |

`to_…` converts a mask of Headnotes to another convention, and `from_…` converts back to
exactly the same mask. (For valid lengths, the inverse is
[`padding`](build.md#padding); for `is_causal`, [`causal`](build.md#causal) with
`corner="top left"`.) A mask that the convention cannot represent raises a `ValueError`
that names the first such element, and an unsupported dtype raises a `TypeError`. An
axis of size 1 stays 1: where the other library does not broadcast, call
`mask.expand(q_len, k_len, batch_size)` first.

Source: the documentation and code of [PyTorch](https://docs.pytorch.org/docs/2.11/),
[Keras 3](https://keras.io/api/layers/attention_layers/multi_head_attention/),
[Transformers](https://huggingface.co/docs/transformers/attention_interface) and
[FlashAttention](https://github.com/Dao-AILab/flash-attention); [Dive into Deep
Learning](https://d2l.ai/chapter_attention-mechanisms-and-transformers/attention-scoring-functions.html),
section 11.3, for valid lengths.
"""

import math

import torch
from torch import Tensor

from headnotes.checks import (
    check_axes,
    check_mask,
    check_sizes,
    check_tensor,
    check_zero_one,
    first_index,
    without_heads,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def to_mha(mask: Tensor, heads: int, dtype: torch.dtype | None = None) -> Tensor:
    r"""The `attn_mask` of `nn.MultiheadAttention`, where True **hides**.

    `[q_len, k_len]` if the mask is the same for each batch item, else `[batch_size *
    heads, q_len, k_len]`, where each item's mask is repeated for each of its heads.
    With a floating-point `dtype` it is additive, 0 and minus infinity.

    >>> mask = torch.ones(3, 5, 2, dtype=torch.bool)
    >>> mask[:, 4, 1] = False
    >>> to_mha(mask, heads=7).shape
    torch.Size([14, 3, 5])
    >>> to_mha(mask[..., 1:], heads=7)[0]
    tensor([False, False, False, False,  True])
    """
    check_sizes(heads=heads)
    allowed = to_keras(mask)  # [batch_size, q_len, k_len]
    if len(allowed) > 1:
        allowed = allowed.repeat_interleave(
            heads, 0
        )  # [batch_size * heads, q_len, k_len]
    allowed = allowed.squeeze(0)  # [..., q_len, k_len]
    return ~allowed if dtype is None else to_additive(allowed, dtype)


def from_mha(attn_mask: Tensor, heads: int) -> Tensor:
    r"""A mask from the `attn_mask` of `nn.MultiheadAttention`, bool or additive.

    Raises `ValueError` where heads differ, or a number neither allows nor hides.

    >>> attn_mask = torch.ones(3, 5).triu(diagonal=1).bool()
    >>> from_mha(attn_mask, heads=7).squeeze(-1).int()
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0]], dtype=torch.int32)
    >>> from_mha(attn_mask.expand(14, 3, 5), heads=7).shape
    torch.Size([3, 5, 2])
    """
    check_sizes(heads=heads)
    shapes = "[q_len, k_len]", "[batch_size * heads, q_len, k_len]"
    allowed = torch_to_bool(
        "attn_mask", attn_mask, *shapes, true_hides=True
    )  # [..., q_len, k_len]
    if allowed.dim() == 2:
        return allowed.unsqueeze(-1)  # [q_len, k_len, 1]
    count = len(allowed)
    if count % heads:
        raise ValueError(
            f"`attn_mask` has {count} masks, which `heads` (={heads}) must divide"
        )
    split = (count // heads, heads, *allowed.shape[1:])
    allowed = allowed.view(split)  # [batch_size, heads, q_len, k_len]
    return without_heads("attn_mask", allowed)  # [q_len, k_len, batch_size]


def to_key_padding_mask(mask: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    r"""The `key_padding_mask` of `nn.MultiheadAttention`, where True **hides**.

    `[batch_size or 1, k_len]`. With a floating-point `dtype` it is additive. Raises
    `ValueError` where queries differ.

    >>> mask = torch.tensor([[[1, 1], [1, 1], [1, 0]]]).bool()
    >>> to_key_padding_mask(mask).int().tolist()
    [[0, 0, 0], [0, 0, 1]]
    """
    allowed = to_key_mask(mask)  # [..., k_len]
    return ~allowed if dtype is None else to_additive(allowed, dtype)  # [..., k_len]


def from_key_padding_mask(key_padding_mask: Tensor) -> Tensor:
    r"""A mask from the `key_padding_mask` of `nn.MultiheadAttention`: `[1, k_len, …]`.

    >>> is_padding = torch.tensor([[0, 0, 0], [0, 0, 1]]).bool()
    >>> from_key_padding_mask(is_padding)[0, :, 1]
    tensor([ True,  True, False])
    """
    allowed = torch_to_bool(
        "key_padding_mask", key_padding_mask, "[batch_size, k_len]", true_hides=True
    )  # [batch_size, k_len]
    return allowed.T.unsqueeze(0)  # [1, k_len, batch_size]


def to_sdpa(mask: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    r"""The `attn_mask` of `F.scaled_dot_product_attention`, where True **allows**.

    `[batch_size or 1, 1, q_len or 1, k_len]`. With a floating-point `dtype`, which must
    be that of the query, it is additive.

    >>> to_sdpa(torch.ones(3, 5, 2, dtype=torch.bool)).shape
    torch.Size([2, 1, 3, 5])
    """
    allowed = to_keras(mask)  # [batch_size, q_len, k_len]
    allowed = allowed.unsqueeze(1)  # [batch_size, 1, q_len, k_len]
    return allowed if dtype is None else to_additive(allowed, dtype)


def from_sdpa(attn_mask: Tensor) -> Tensor:
    r"""A mask from the `attn_mask` of `F.scaled_dot_product_attention`.

    Bool or additive, with two axes or four: the first of three would be the heads.
    Raises `ValueError` where heads differ, or a number neither allows nor hides.

    >>> attn_mask = torch.tensor([[0, -torch.inf, 0]] * 5)
    >>> from_sdpa(attn_mask)[0].T
    tensor([[ True, False,  True]])
    >>> from_sdpa(attn_mask.expand(2, 7, 5, 3)).shape
    torch.Size([5, 3, 2])
    """
    shapes = "[q_len or 1, k_len]", "[batch_size or 1, heads or 1, q_len or 1, k_len]"
    allowed = torch_to_bool(
        "attn_mask", attn_mask, *shapes, true_hides=False
    )  # [..., q_len, k_len]
    if allowed.dim() == 2:
        return allowed.unsqueeze(-1)  # [q_len, k_len, 1]
    return without_heads("attn_mask", allowed)  # [q_len, k_len, ...]


def to_keras(mask: Tensor) -> Tensor:
    r"""The `attention_mask` of Keras: `[batch_size or 1, q_len or 1, k_len]`.

    >>> to_keras(torch.ones(3, 5, 2, dtype=torch.bool)).shape
    torch.Size([2, 3, 5])
    """
    check_mask("mask", mask)
    allowed = mask.bool()  # [q_len, k_len, batch_size]
    return allowed.permute(2, 0, 1)  # [batch_size, q_len, k_len]


def from_keras(attention_mask: Tensor) -> Tensor:
    r"""A mask from the `attention_mask` of Keras, bool or integer 0/1.

    >>> from_keras(torch.ones(2, 3, 5).bool()).shape
    torch.Size([3, 5, 2])
    """
    allowed = to_bool(
        "attention_mask", attention_mask, "[batch_size or 1, q_len or 1, k_len]"
    )  # [batch_size, q_len, k_len]
    return allowed.permute(1, 2, 0)  # [q_len, k_len, batch_size]


def to_key_mask(mask: Tensor) -> Tensor:
    r"""The keys that are not padding, `[batch_size or 1, k_len]`: True **allows**.

    Keras calls it `key_mask` and `value_mask`. Hugging Face calls it `attention_mask`
    and requires integers: `to_key_mask(mask).long()`. Raises `ValueError` where queries
    differ.

    >>> mask = torch.tensor([[[1, 1], [1, 1], [1, 0]]]).bool()
    >>> to_key_mask(mask).long().tolist()
    [[1, 1, 1], [1, 1, 0]]
    """
    check_mask("mask", mask)
    mask = mask.bool()  # [..., k_len, batch_size]
    index = first_index(mask != mask[:1])
    if index is not None:
        i, j, b = index
        raise ValueError(
            f"`mask` treats key {j} of batch item {b} differently for queries 0 and "
            f"{i}, which a [batch_size, k_len] mask cannot represent; use `to_sdpa` or "
            f"`to_mha`"
        )
    return mask.all(dim=0).T  # [batch_size, k_len]


def from_key_mask(key_mask: Tensor) -> Tensor:
    r"""A mask from one that is True where a key is not padding: `[1, k_len, …]`.

    >>> from_key_mask(torch.tensor([[1, 1, 0], [1, 1, 1]])).shape
    torch.Size([1, 3, 2])
    """
    allowed = to_bool(
        "key_mask", key_mask, "[batch_size, k_len]"
    )  # [batch_size, k_len]
    return allowed.T.unsqueeze(0)  # [1, k_len, batch_size]


def to_huggingface(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    r"""The `attention_mask` of Transformers in four dimensions, additive and finite.

    `[batch_size or 1, 1, q_len or 1, k_len]`. `dtype` is that of the model. There, the
    context of a fully masked row is the mean of all values.

    >>> mask = torch.tensor([[[True], [False]]])
    >>> to_huggingface(mask, torch.float16).flatten()
    tensor([     0., -65504.], dtype=torch.float16)
    """
    return to_additive(to_sdpa(mask), dtype, finite=True)


def from_huggingface(attention_mask: Tensor) -> Tensor:
    r"""A mask from an `attention_mask` of Transformers, with two or four dimensions.

    >>> from_huggingface(torch.tensor([[1, 1, 0], [1, 1, 1]])).shape
    torch.Size([1, 3, 2])
    """
    name = "attention_mask"
    shapes = "[batch_size, k_len]", "[batch_size, 1, q_len, k_len]"
    check_tensor(name, attention_mask)
    check_axes(name, attention_mask, *shapes)
    if attention_mask.dim() == 2:
        allowed = to_bool(name, attention_mask)  # [batch_size, k_len]
        return allowed.T.unsqueeze(0)  # [1, k_len, batch_size]
    allowed = torch_to_bool(name, attention_mask, shapes[1], true_hides=False)
    return without_heads(name, allowed)


def to_additive(
    mask: Tensor, dtype: torch.dtype = torch.float32, *, finite: bool = False
) -> Tensor:
    r"""0 where `mask` is True, minus infinity where not; any shape.

    `finite` takes the least number of the dtype instead. The weights of a fully masked
    row are then uniform; with minus infinity they are NaN, in Headnotes 0.

    >>> to_additive(torch.tensor([True, False]))
    tensor([0., -inf])
    """
    if dtype not in FLOATS:
        raise TypeError(f"`dtype` is {dtype}, not {', '.join(map(str, FLOATS))}")
    mask = to_bool("mask", mask)
    lowest = torch.finfo(dtype).min if finite else -math.inf
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, lowest)


def from_additive(mask: Tensor) -> Tensor:
    r"""True where `mask` is 0, False where it is minus infinity; any shape.

    The least number of the dtype, or of a narrower one, hides too. Any other number is
    a bias, which a bool mask cannot represent, and raises `ValueError`.

    >>> from_additive(torch.tensor([0, -torch.inf, -65504]))
    tensor([ True, False, False])
    """
    return additive_to_bool("mask", mask)


def to_valid_lens(mask: Tensor) -> Tensor:
    r"""Valid lengths, the numbers of keys before the padding: the inverse of `padding`.

    A mask `[1, k_len, batch_size]` gives `[batch_size]`, and a mask `[q_len, k_len,
    batch_size]` gives `[batch_size, q_len]`.

    Raises `ValueError` where a hidden key comes before one that is not.

    >>> mask = torch.ones(3, 5).tril().bool().unsqueeze(-1)
    >>> to_valid_lens(mask.expand(3, 5, 2))
    tensor([[1, 2, 3],
            [1, 2, 3]])
    """
    check_mask("mask", mask)
    mask = mask.bool()  # [q_len, k_len, batch_size]
    lens = mask.sum(dim=1)  # [q_len, batch_size]
    position = torch.arange(mask.shape[1], device=mask.device)  # [k_len]
    index = first_index(mask != (position[:, None] < lens[:, None]))
    if index is not None:
        raise ValueError(
            f"`mask` {pair_in_words(mask, index)}, but shows a later one, which "
            f"lengths cannot represent; use `to_sdpa`"
        )
    return lens[0] if len(lens) == 1 else lens.T  # [batch_size, ...]


def to_is_causal(mask: Tensor) -> bool:
    r"""True if `F.scaled_dot_product_attention(is_causal=True)` applies this mask.

    This mask is a triangle aligned to the **top left** corner, also where the lengths
    differ. The one aligned to the bottom right is
    `torch.nn.attention.bias.causal_lower_right`.

    Raises `ValueError` for every other mask: False would mean no mask at all.

    >>> mask = torch.ones(3, 5).tril().bool().unsqueeze(-1)
    >>> to_is_causal(mask)
    True
    """
    check_mask("mask", mask)
    check_readable("mask", mask)
    mask = mask.bool()  # [q_len, k_len, ...]
    triangle = mask.new_ones(mask.shape[:2]).tril()  # [q_len, k_len]
    index = first_index(mask != triangle.unsqueeze(-1))
    if index is not None:
        raise ValueError(
            f"`mask` {pair_in_words(mask, index)}, but `is_causal` does not: its "
            f"corner is top left; use `to_sdpa`"
        )
    return True


def to_cu_seqlens(mask: Tensor) -> tuple[Tensor, Tensor]:
    r"""`cu_seqlens`, the offsets of packed documents and their end: queries, then keys.

    Both are int32, `[documents + 1]`. The mask is `[q_len, k_len, 1]`: a packed batch
    is one sequence. Consecutive queries with the same keys are one document.

    Raises `ValueError` where a query attends to more, or less, than its document.

    >>> query = torch.tensor([0, 1, 1, 2, 2])
    >>> key = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    >>> mask = (query[:, None] == key).unsqueeze(-1)
    >>> [offsets.tolist() for offsets in to_cu_seqlens(mask)]
    [[0, 1, 3, 5], [0, 3, 4, 7]]
    """
    check_mask("mask", mask)
    check_readable("mask", mask)
    mask = mask.bool()
    if mask.shape[2] != 1:
        raise ValueError(f"`mask` has {mask.shape[2]} batch items; packed, it has 1")
    corners = document_corners(mask.squeeze(-1))
    offsets = torch.tensor(corners, device=mask.device)  # [documents + 1, 2]
    # If the mask does not consist of documents, offsets may decrease. They are made
    # monotonic, so that the error below names the first pair that does not fit.
    cu_q, cu_k = offsets.int().cummax(dim=0).values.T  # [documents + 1]
    index = first_index(mask != from_cu_seqlens(cu_q, cu_k))
    if index is not None:
        raise ValueError(
            f"`mask` {pair_in_words(mask, index)}, but packed documents do not: each "
            f"attends to all of itself, and to nothing else"
        )
    return cu_q, cu_k


def document_corners(allowed: Tensor) -> list[tuple[int, int]]:
    """The top left corners of the blocks of a mask `[q_len, k_len]`, and its end.

    Each corner is the first query and the first key of a document.

    >>> query = torch.tensor([0, 1, 1])
    >>> document_corners(query[:, None] == torch.tensor([0, 0, 0, 1]))
    [(0, 0), (1, 3), (3, 4)]
    """
    q_len, k_len = allowed.shape
    # A document ends where the next query attends to other keys.
    changes = (allowed[1:] != allowed[:-1]).any(dim=1)  # [q_len - 1]
    ends = (changes.nonzero() + 1).flatten().tolist()
    corners = [(0, 0)]
    start = 0
    for end in [*ends, q_len]:
        keys = allowed[start:end][:1].nonzero()[:, 1].tolist()
        if keys:
            # Keys between two documents are a document without queries.
            corners += [(start, keys[0]), (end, keys[-1] + 1)]
        else:
            # Fully masked queries are a document without keys.
            corners.append((end, corners[-1][1]))
        start = end
    return list(dict.fromkeys([*corners, (q_len, k_len)]))


def from_cu_seqlens(cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None) -> Tensor:
    r"""The mask `[q_len, k_len, 1]` of packed documents, each attending to itself.

    Raises `TypeError` for what is not an integer tensor, `ValueError` where it does not
    run from 0 up, or the keys have another number of documents than the queries.

    >>> cu_q, cu_k = torch.tensor([[0, 1, 3], [0, 3, 5]])
    >>> from_cu_seqlens(cu_q, cu_k).squeeze(-1).int()
    tensor([[1, 1, 1, 0, 0],
            [0, 0, 0, 1, 1],
            [0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    check_tensor("cu_seqlens", cu_seqlens)
    check_cu_seqlens("cu_seqlens", cu_seqlens, cu_seqlens)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, cu_seqlens)
    q_lens = cu_seqlens.long().diff()  # [documents]
    k_lens = cu_seqlens_k.long().diff()  # [documents]
    # Number the documents, label each position with the number of its document, and
    # compare the labels.
    number = torch.arange(len(q_lens), device=q_lens.device)  # [documents]
    q_document = number.repeat_interleave(q_lens)  # [q_len]
    k_document = number.repeat_interleave(k_lens)  # [k_len]
    return (q_document[:, None] == k_document).unsqueeze(-1)  # [q_len, k_len, 1]


def pair_in_words(mask: Tensor, index: tuple[int, ...]) -> str:
    """What a mask does to one pair of a query and a key, for an error message."""
    i, j, b = index
    does = f"shows key {j} to" if mask[index] else f"hides key {j} from"
    return f"{does} query {i} of batch item {b}"


def to_bool(name: str, mask: Tensor, *shapes: str) -> Tensor:
    """A bool or integer 0/1 mask as bool, after a check of its shape."""
    check_tensor(name, mask)
    if shapes:
        check_axes(name, mask, *shapes)
    check_zero_one(name, mask)
    return mask.bool()


def torch_to_bool(name: str, mask: Tensor, *shapes: str, true_hides: bool) -> Tensor:
    """Where a mask of PyTorch, bool or additive, allows attention; the axes stay."""
    check_tensor(name, mask)
    check_axes(name, mask, *shapes)
    if mask.is_floating_point():
        return additive_to_bool(name, mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"`{name}` is {mask.dtype}, where torch takes bool or float")
    return ~mask if true_hides else mask


def additive_to_bool(name: str, mask: Tensor) -> Tensor:
    """Where a floating-point mask is 0; every other value must be one that hides."""
    check_tensor(name, mask)
    if mask.dtype not in FLOATS:
        raise TypeError(f"`{name}` is {mask.dtype}, not {', '.join(map(str, FLOATS))}")
    allowed = mask == 0
    hidden = mask == -math.inf
    for dtype in FLOATS:
        # A mask that was made in a narrow dtype keeps its least number in a wider one.
        if torch.finfo(dtype).min >= torch.finfo(mask.dtype).min:
            hidden = hidden | (mask == torch.finfo(dtype).min)
    index = first_index(~allowed & ~hidden)
    if index is not None:
        raise ValueError(
            f"`{name}` holds {mask[index].item():g} at {list(index)}, neither 0 nor "
            f"the least number of a dtype; write `{name} == 0` if all other values hide"
        )
    return allowed


def check_readable(name: str, x: Tensor) -> None:
    """Refuse a tensor without values where the result depends on them."""
    if torch.compiler.is_compiling() or x.is_meta:
        raise ValueError(
            f"`{name}` has no values that can be read here, in a compiler or on meta; "
            f"convert it outside"
        )


def check_cu_seqlens(name: str, cu_seqlens: Tensor, other: Tensor) -> None:
    """Refuse what are not the offsets of documents."""
    check_tensor(name, cu_seqlens, other.device, owner="`cu_seqlens`")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`{name}` is {cu_seqlens.dtype}, not int32 or int64")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) != len(other) or not len(other):
        expected = "[documents + 1], with as many as the queries have"
        raise ValueError(f"`{name}` has shape {list(cu_seqlens.shape)}, not {expected}")
    check_readable(name, cu_seqlens)
    if cu_seqlens[0] != 0 or (cu_seqlens.diff() < 0).any():
        way_out = "`F.pad(lengths.cumsum(0), (1, 0))` makes it from lengths"
        raise ValueError(f"`{name}` must begin with 0 and never fall; {way_out}")
