r"""# Masks, as others write them

Every system has masks, and no two agree on them. They differ in the order of the axes,
in what True means, and in whether what is hidden is said by a bool or by a number that
is added to the scores. Read by another convention, a mask is silently inverted or lost.
Below, `q` are the queries, `k` the keys, `b` the batch items and `h` the heads.

| whose | axes | may attend |
| --- | --- | --- |
| ours | `q k b` | True |
| `nn.MultiheadAttention`, `attn_mask` | `q k` or `(b h) q k` | **False** or 0.0 |
| `nn.MultiheadAttention`, `key_padding_mask` | `b k` | **False** or 0.0 |
| `F.scaled_dot_product_attention`, `attn_mask` | `q k` or `b h q k` | True or 0.0 |
| Keras, `attention_mask` | `b q k` | True |
| Keras, `key_mask` and `value_mask` | `b k` | True |
| Hugging Face, `attention_mask` | `b k` or `b 1 q k` | 1 or 0.0 |

There (`to_…`) and back (`from_…`) is the same mask, exactly. What a convention cannot
say is refused with a `ValueError` that names the first place; a dtype that it does not
take, with a `TypeError`. An axis of size 1 stays 1: where the other side does not
broadcast, call `mask.expand(q_len, k_len, batch_size)` first.

Source: the documentation and code of [PyTorch](https://docs.pytorch.org/docs/2.11/),
[Keras 3](https://keras.io/api/layers/attention_layers/multi_head_attention/) and
[Transformers](https://huggingface.co/docs/transformers/attention_interface).
"""

import math

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OURS = "[q_len or 1, k_len, batch_size or 1]"


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
    check_heads(heads)
    mask = check_mask("mask", mask, OURS)  # [q_len, k_len, batch_size]
    keep = mask.permute(2, 0, 1)  # [batch_size, q_len, k_len]
    if len(keep) > 1:
        keep = keep.repeat_interleave(heads, 0)  # [batch_size * heads, q_len, k_len]
    keep = keep.squeeze(0)  # [..., q_len, k_len]
    return ~keep if dtype is None else to_additive(keep, dtype)


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
    check_heads(heads)
    shapes = "[q_len, k_len]", "[batch_size * heads, q_len, k_len]"
    keep = read("attn_mask", attn_mask, *shapes, true_hides=True)  # [..., q_len, k_len]
    if keep.dim() == 2:
        return keep.unsqueeze(-1)  # [q_len, k_len, 1]
    n = len(keep)
    if n % heads:
        raise ValueError(
            f"`attn_mask` has {n} masks, which `heads` (={heads}) must divide"
        )
    keep = keep.view(n // heads, heads, *keep.shape[1:])  # [batch_size, heads, ...]
    return one_head("attn_mask", keep)  # [q_len, k_len, batch_size]


def to_key_padding_mask(mask: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    r"""The `key_padding_mask` of `nn.MultiheadAttention`, where True **hides**.

    `[batch_size or 1, k_len]`. With a floating-point `dtype` it is additive. Raises
    `ValueError` where queries differ.

    >>> mask = torch.tensor([[[1, 1], [1, 1], [1, 0]]]).bool()
    >>> to_key_padding_mask(mask).int().tolist()
    [[0, 0, 0], [0, 0, 1]]
    """
    keep = to_key_mask(mask)  # [..., k_len]
    return ~keep if dtype is None else to_additive(keep, dtype)  # [..., k_len]


def from_key_padding_mask(key_padding_mask: Tensor) -> Tensor:
    r"""A mask from the `key_padding_mask` of `nn.MultiheadAttention`: `[1, k_len, …]`.

    >>> filler = torch.tensor([[0, 0, 0], [0, 0, 1]]).bool()
    >>> from_key_padding_mask(filler)[0, :, 1]
    tensor([ True,  True, False])
    """
    name, mask, shape = "key_padding_mask", key_padding_mask, "[batch_size, k_len]"
    keep = read(name, mask, shape, true_hides=True)  # [batch_size, k_len]
    return keep.T.unsqueeze(0)  # [1, k_len, batch_size]


def to_sdpa(mask: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    r"""The `attn_mask` of `F.scaled_dot_product_attention`, where True **allows**.

    `[batch_size or 1, 1, q_len or 1, k_len]`. With a floating-point `dtype`, which must
    be that of the query, it is additive.

    >>> to_sdpa(torch.ones(3, 5, 2, dtype=torch.bool)).shape
    torch.Size([2, 1, 3, 5])
    """
    keep = to_keras(mask)  # [batch_size, q_len, k_len]
    keep = keep.unsqueeze(1)  # [batch_size, 1, q_len, k_len]
    return keep if dtype is None else to_additive(keep, dtype)


def from_sdpa(attn_mask: Tensor) -> Tensor:
    r"""A mask from the `attn_mask` of `F.scaled_dot_product_attention`.

    Bool or additive, with two axes or four: of three, the first would be the heads.
    Raises `ValueError` where heads differ, or a number neither allows nor hides.

    >>> attn_mask = torch.tensor([[0, -torch.inf, 0]] * 5)
    >>> from_sdpa(attn_mask)[0].T
    tensor([[ True, False,  True]])
    >>> from_sdpa(attn_mask.expand(2, 7, 5, 3)).shape
    torch.Size([5, 3, 2])
    """
    shapes = "[q_len or 1, k_len]", "[batch_size or 1, heads or 1, q_len or 1, k_len]"
    keep = read("attn_mask", attn_mask, *shapes, true_hides=False)  # [..., k_len]
    if keep.dim() == 2:
        return keep.unsqueeze(-1)  # [..., k_len, 1]
    return one_head("attn_mask", keep)


def to_keras(mask: Tensor) -> Tensor:
    r"""The `attention_mask` of Keras: `[batch_size or 1, q_len or 1, k_len]`.

    >>> to_keras(torch.ones(3, 5, 2, dtype=torch.bool)).shape
    torch.Size([2, 3, 5])
    """
    mask = check_mask("mask", mask, OURS)  # [q_len, k_len, batch_size]
    return mask.permute(2, 0, 1)  # [batch_size, q_len, k_len]


def from_keras(attention_mask: Tensor) -> Tensor:
    r"""A mask from the `attention_mask` of Keras, bool or integer 0/1.

    >>> from_keras(torch.ones(2, 3, 5).bool()).shape
    torch.Size([3, 5, 2])
    """
    name, shape = "attention_mask", "[batch_size or 1, q_len or 1, k_len]"
    keep = check_mask(name, attention_mask, shape)  # [batch_size, q_len, k_len]
    return keep.permute(1, 2, 0)  # [q_len, k_len, batch_size]


def to_key_mask(mask: Tensor) -> Tensor:
    r"""Which keys are not filler, `[batch_size or 1, k_len]`: True **allows**.

    Keras calls it `key_mask` and `value_mask`. Hugging Face calls it `attention_mask`
    and wants it as integers: `to_key_mask(mask).long()`. Refused where queries differ.

    >>> mask = torch.tensor([[[1, 1], [1, 1], [1, 0]]]).bool()
    >>> to_key_mask(mask).long().tolist()
    [[1, 1, 1], [1, 1, 0]]
    """
    mask = check_mask("mask", mask, OURS)  # [..., k_len, batch_size]
    place = first(mask != mask[:1])
    if place is not None:
        i, j, b = place
        raise ValueError(
            f"`mask` treats key {j} of batch item {b} differently for queries 0 and "
            f"{i}, which [batch_size, k_len] cannot say; use `to_sdpa` or `to_mha`"
        )
    return mask.all(dim=0).T  # [batch_size, k_len]


def from_key_mask(key_mask: Tensor) -> Tensor:
    r"""A mask from what says which keys are not filler: `[1, k_len, batch_size]`.

    >>> from_key_mask(torch.tensor([[1, 1, 0], [1, 1, 1]])).shape
    torch.Size([1, 3, 2])
    """
    shape = "[batch_size, k_len]"
    keep = check_mask("key_mask", key_mask, shape)  # [batch_size, k_len]
    return keep.T.unsqueeze(0)  # [1, k_len, batch_size]


def to_huggingface(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    r"""The `attention_mask` of Transformers in four dimensions, additive and finite.

    `[batch_size or 1, 1, q_len or 1, k_len]`. `dtype` is that of the model. A query
    that may attend to nothing reads the mean of all values there.

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
    check_shape(name, attention_mask, *shapes)
    if attention_mask.dim() == 2:
        keep = check_mask(name, attention_mask)  # [batch_size, k_len]
        return keep.T.unsqueeze(0)  # [1, k_len, batch_size]
    return one_head(name, read(name, attention_mask, true_hides=False))


def to_additive(
    mask: Tensor, dtype: torch.dtype = torch.float32, *, finite: bool = False
) -> Tensor:
    r"""0 where `mask` is True, minus infinity where not; any shape.

    `finite` takes the least number of the dtype instead. A softmax over nothing else
    is then uniform, where infinity gives NaN; neither is the zero of this house.

    >>> to_additive(torch.tensor([True, False]))
    tensor([0., -inf])
    """
    if dtype not in FLOATS:
        raise TypeError(f"`dtype` is {dtype}, not {', '.join(map(str, FLOATS))}")
    mask = check_mask("mask", mask)
    lowest = torch.finfo(dtype).min if finite else -math.inf
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, lowest)


def from_additive(mask: Tensor) -> Tensor:
    r"""True where `mask` is 0, False where it is minus infinity; any shape.

    The least number of a dtype hides, too, also of a narrower one. Whatever else is
    added to scores is a bias, which no mask can express: a `ValueError`.

    >>> from_additive(torch.tensor([0, -torch.inf, -65504]))
    tensor([ True, False, False])
    """
    return additive("mask", mask)


def read(name: str, mask: Tensor, *shapes: str, true_hides: bool) -> Tensor:
    """What a mask of torch allows, bool or additive, in the axes that it has."""
    check_shape(name, mask, *shapes)
    if mask.is_floating_point():
        return additive(name, mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"`{name}` is {mask.dtype}, where torch takes bool or float")
    return ~mask if true_hides else mask


def additive(name: str, mask: Tensor) -> Tensor:
    """Where a floating-point mask is 0; it may hold nothing else but what hides."""
    check_shape(name, mask)
    if mask.dtype not in FLOATS:
        raise TypeError(f"`{name}` is {mask.dtype}, not {', '.join(map(str, FLOATS))}")
    keep, hidden = mask == 0, mask == -math.inf
    for dtype in FLOATS:
        # A mask that was made in a narrow dtype keeps its least number in a wider one.
        if torch.finfo(dtype).min >= torch.finfo(mask.dtype).min:
            hidden = hidden | (mask == torch.finfo(dtype).min)
    place = first(~keep & ~hidden)
    if place is not None:
        raise ValueError(
            f"`{name}` holds {mask[place].item():g} at {list(place)}, neither 0 nor "
            f"the least number of a dtype; write `{name} == 0` if all but 0 hides"
        )
    return keep


def one_head(name: str, keep: Tensor) -> Tensor:
    """The mask that all heads of `[batch_size, heads, q_len, k_len]` share."""
    place = first(keep != keep[:, :1])
    if place is not None:
        b, h, i, j = place
        raise ValueError(
            f"`{name}` treats key {j} of query {i} and batch item {b} differently in "
            f"heads 0 and {h}, but a mask of this house is one for all heads"
        )
    keep = keep.all(dim=1)  # [batch_size, q_len, k_len]
    return keep.permute(1, 2, 0)  # [q_len, k_len, batch_size]


def first(wrong: Tensor) -> tuple[int, ...] | None:
    """Where True stands first; None if nowhere, or if compiling, on meta, in `vmap`."""
    if torch.compiler.is_compiling() or wrong.is_meta:
        return None
    try:
        places = wrong.nonzero()[:1].tolist()
    except RuntimeError:
        return None
    return tuple(places[0]) if places else None


def check_heads(heads: int) -> None:
    """Refuse a number of heads that no attention has."""
    if type(heads) is not int or heads < 1:
        raise ValueError(f"`heads` (={heads!r}) must be an int from 1 up")


def check_shape(name: str, mask: Tensor, *shapes: str) -> None:
    """Refuse what is no dense tensor, or has another number of axes."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but is a {type(mask).__name__}")
    if mask.layout != torch.strided or mask.is_nested or mask.is_quantized:
        raise TypeError(f"`{name}` is sparse, nested or quantised; pass a dense one")
    if shapes and mask.dim() not in [shape.count(",") + 1 for shape in shapes]:
        expected = " nor ".join(shapes)
        raise ValueError(f"`{name}` has shape {list(mask.shape)}, not {expected}")


def check_mask(name: str, mask: Tensor, *shapes: str) -> Tensor:
    """A mask as bool, or an error that says what it is instead."""
    check_shape(name, mask, *shapes)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"`{name}` is {mask.dtype}, not bool or integer 0/1; use `{name}.bool()` "
            f"if it holds 0 and 1, `masks.from_additive({name})` if 0 and -inf"
        )
    place = None if mask.dtype == torch.bool else first((mask != 0) & (mask != 1))
    if place is not None:
        seen = mask[place].item()
        raise ValueError(f"`{name}` holds {seen} at {list(place)}, not 0 or 1")
    return mask.bool()
