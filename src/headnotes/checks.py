r"""# Argument checks

These functions validate the arguments of the other modules: sizes, dropout
probabilities, tensors, lengths and masks. Each raises `ValueError` or `TypeError`
before any work is done, with a message that names the argument, the value seen and a
way out.

`headnotes copy` puts this file beside each module that needs it. The
[core](mha.md) has checks of its own, because it is a single file.

Source: the convention of the [core](mha.md#check_tensor), in the same words.
"""

# This file needs nothing but PyTorch.
from importlib.metadata import version

import torch
from torch import Tensor

# The axes of a mask in the convention of Headnotes.
MASK_AXES = "[q_len or 1, k_len, batch_size or 1]"


def check_sizes(minimum: int = 1, /, **sizes: int) -> None:
    """Refuse sizes that are not integers, or lie below `minimum`.

    While a graph is traced, a size may be a `torch.SymInt`.

    >>> try:
    ...     check_sizes(heads=8, d_model=512.0)
    ... except ValueError as error:
    ...     print(error)
    `d_model` (=512.0) must be an int from 1 up
    """
    for name, size in sizes.items():
        if type(size) not in (int, torch.SymInt) or size < minimum:
            raise ValueError(f"`{name}` (={size!r}) must be an int from {minimum} up")


def check_heads(width_name: str, width: int, heads_name: str, heads: int) -> None:
    """Refuse a number of heads that does not divide the width; name the nearest.

    The names are those of the caller's arguments, which differ between systems.

    >>> try:
    ...     check_heads("d_model", 512, "n_heads", 10)
    ... except ValueError as error:
    ...     print(error)
    `d_model` (=512) must be divisible by `n_heads` (=10); 8 and 16 would do
    """
    check_sizes(**{width_name: width, heads_name: heads})
    if width % heads:
        divisors = [n for n in (*range(1, 4097), width) if width % n == 0]
        below = [n for n in divisors if n < heads][-1:]
        above = [n for n in divisors if n > heads][:1]
        way_out = f"{' and '.join(map(str, below + above))} would do"
        if heads % width == 0:  # in the other order
            way_out = f"`{heads_name}={width}, {width_name}={heads}` would do"
        raise ValueError(
            f"`{width_name}` (={width}) must be divisible by `{heads_name}` "
            f"(={heads}); {way_out}"
        )


def check_dropout(dropout: float) -> None:
    """Refuse what is not a probability.

    >>> try:
    ...     check_dropout(10)
    ... except ValueError as error:
    ...     print(error)
    `dropout` (=10) must lie between 0 and 1
    """
    if type(dropout) not in (int, float) or not 0 <= dropout <= 1:
        raise ValueError(f"`dropout` (={dropout!r}) must lie between 0 and 1")


def check_tensor(
    name: str,
    x: Tensor,
    device: torch.device | None = None,
    *,
    owner: str = "the module",
) -> None:
    """Refuse what is not a dense tensor, or lies on another device than its owner.

    >>> try:
    ...     check_tensor("x", [1.0, 2.0])
    ... except TypeError as error:
    ...     print(error)
    `x` must be a tensor, but is a list
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but is a {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise TypeError(f"`{name}` is sparse, nested or quantized; pass a dense one")
    if device not in (None, x.device):
        where = f"`{name}` is on {x.device}, {owner} on {device}"
        raise ValueError(f"{where}; use `{name}.to({str(device)!r})`")


def check_dtype(name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Refuse a tensor that the weights of a module, of `dtype`, cannot multiply.

    >>> try:
    ...     check_dtype("x", torch.zeros(3).double(), torch.float32)
    ... except TypeError as error:
    ...     print(error)  # doctest: +NORMALIZE_WHITESPACE
    `x` is torch.float64, the module torch.float32; use `x.to(torch.float32)`,
    or give the module its dtype
    """
    if not fits_dtype(x, dtype):
        way_out = f"use `{name}.to({dtype})`, or give the module its dtype"
        raise TypeError(f"`{name}` is {x.dtype}, the module {dtype}; {way_out}")


def fits_dtype(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether `x` has this dtype, or autocast will give both the same one."""
    if x.dtype == dtype:
        return True
    # Autocast converts the operands of a product, but leaves float64 alone. On "meta"
    # it does nothing.
    castable = x.is_floating_point() and torch.float64 not in (x.dtype, dtype)
    return castable and not x.is_meta and torch.is_autocast_enabled(x.device.type)


def check_axes(name: str, x: Tensor, *shapes: str) -> None:
    """Refuse a tensor whose number of axes is that of none of `shapes`.

    >>> try:
    ...     check_axes("key_mask", torch.ones(5), "[batch_size, k_len]")
    ... except ValueError as error:
    ...     print(error)
    `key_mask` has shape [5], not [batch_size, k_len]
    """
    if x.dim() not in [shape.count(",") + 1 for shape in shapes]:
        expected = " nor ".join(shapes)
        raise ValueError(f"`{name}` has shape {list(x.shape)}, not {expected}")


def check_next(
    x: Tensor, weight: Tensor, d_model: int, batch_size: int | None = None
) -> None:
    """Refuse what cannot be the next positions, for a module that decodes.

    `weight` has the dtype and the device of the module. A cache with a fixed batch size
    gives `batch_size`.

    >>> try:
    ...     check_next(torch.zeros(2, 77), torch.zeros(77, 77), 77)
    ... except ValueError as error:
    ...     print(error)  # doctest: +NORMALIZE_WHITESPACE
    `x` has shape [2, 77], not [seq_len, batch_size, d_model (=77)];
    one token of each batch item needs `x.unsqueeze(0)`
    """
    check_tensor("x", x, weight.device)
    check_dtype("x", x, weight.dtype)
    fits = x.dim() == 3 and x.shape[2] == d_model
    if not fits or batch_size not in (None, x.shape[1]):
        batch = "batch_size" if batch_size is None else f"batch_size (={batch_size})"
        raise ValueError(
            f"`x` has shape {list(x.shape)}, not [seq_len, {batch}, d_model "
            f"(={d_model})]; one token of each batch item needs `x.unsqueeze(0)`"
        )


def check_version(purpose: str, package: str, *minimums: str) -> None:
    """Refuse a release of a package before the minimum of its major version.

    `minimums` are a major and a minor version each, in ascending order.

    >>> try:
    ...     check_version("This function", "torch", "98.7", "99.10")
    ... except ImportError as error:
    ...     print(error)  # doctest: +ELLIPSIS
    This function needs torch~=98.7 or torch>=99.10, but ... is installed; update ...
    """
    seen = version(package)
    release, *lowest = ([int(n) for n in x.split(".")[:2]] for x in (seen, *minimums))
    lowest = [each for each in lowest if each[0] <= release[0]]
    if not lowest or release < lowest[-1]:
        kinds = [*["~="] * (len(minimums) - 1), ">="]
        known = [f"{package}{a}{b}" for a, b in zip(kinds, minimums, strict=True)]
        raise ImportError(
            f"{purpose} needs {' or '.join(known)}, but {seen} is installed; update "
            f"with `pip install --upgrade {package}`"
        )


def check_items(index: Tensor, batch_size: int) -> None:
    """Refuse what does not name batch items to continue from.

    >>> try:
    ...     check_items(torch.tensor([0, 3]), batch_size=3)
    ... except ValueError as error:
    ...     print(error)
    `index` names items 0 to 3, but there are 0 to 2
    """
    if not isinstance(index, Tensor) or index.dtype not in (
        torch.int32,
        torch.int64,
    ):
        seen = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"`index` is {seen}, not an int64 tensor of batch items")
    if index.layout != torch.strided or index.is_nested or index.is_meta:
        raise TypeError("`index` is sparse, nested or on meta; pass a dense one")
    if index.dim() != 1 or not len(index):
        raise ValueError(
            f"`index` has shape {list(index.shape)}, not [batch_size]; give one "
            f"item for each new batch item"
        )
    low, high = (bound.item() for bound in index.aminmax())
    if low < 0 or high >= batch_size:
        raise ValueError(
            f"`index` names items {low} to {high}, but there are 0 to {batch_size - 1}"
        )


def check_lengths(name: str, lengths: Tensor, k_len: int | None) -> None:
    """Refuse lengths that are not integers, or lie outside of 0 to `k_len`.

    >>> try:
    ...     check_lengths("valid_lens", torch.tensor([3, 9]), k_len=5)
    ... except ValueError as error:
    ...     print(error)  # doctest: +NORMALIZE_WHITESPACE
    `valid_lens` runs from 3 to 9, but must lie between 0 and `k_len` (=5);
    use `valid_lens.clamp(0, 5)` if meant so
    """
    # The sum of a padding mask has an integer dtype; the mask itself, taken for
    # lengths, would be lengths of 0 and 1.
    dtype = lengths.dtype
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        raise TypeError(
            f"`{name}` is {dtype}, but lengths are integers; from a padding mask "
            f"[batch_size, k_len] with all padding at its end, use `mask.sum(dim=1)`"
        )
    low, high = value_range(lengths)
    if low < 0 or (k_len is not None and high > k_len):
        limit = "any length" if k_len is None else f"`k_len` (={k_len})"
        raise ValueError(
            f"`{name}` runs from {low} to {high}, but must lie between 0 and {limit}; "
            f"use `{name}.clamp(0, {k_len})` if meant so"
        )


def check_padding(left_padding: Tensor, batch_size: int) -> Tensor:
    """Refuse what does not count the padding of each batch item.

    >>> try:
    ...     check_padding(torch.tensor([0, 2]), batch_size=3)
    ... except ValueError as error:
    ...     print(error)  # doctest: +NORMALIZE_WHITESPACE
    `left_padding` has shape [2], not [batch_size (=3)]; from a mask [1, k_len,
    batch_size] of the prompt, use `(~mask).sum(1)[0]`
    """
    check_tensor("left_padding", left_padding)
    if left_padding.shape != (batch_size,):
        raise ValueError(
            f"`left_padding` has shape {list(left_padding.shape)}, not [batch_size "
            f"(={batch_size})]; from a mask [1, k_len, batch_size] of the prompt, use "
            f"`(~mask).sum(1)[0]`"
        )
    check_lengths("left_padding", left_padding, None)
    return left_padding.long()


def zero_padding(
    x: Tensor,  # [seq_len, batch_size, d_model]
    left_padding: Tensor | None,  # [batch_size]
    start: int,
) -> Tensor:
    """Set padding in the positions from `start` on to zero, because 0 * NaN is NaN.

    >>> x = torch.full((3, 2, 1), torch.nan)
    >>> zero_padding(x, torch.tensor([0, 6]), start=4)[:, :, 0]
    tensor([[nan, 0.],
            [nan, 0.],
            [nan, nan]])
    """
    if left_padding is None:
        return x
    positions = torch.arange(start, start + len(x), device=x.device)  # [seq_len]
    padding = positions.unsqueeze(1) < left_padding  # [seq_len, batch_size]
    return x.masked_fill(padding.unsqueeze(-1), 0)  # [seq_len, ..., d_model]


def check_zero_one(name: str, mask: Tensor) -> None:
    """Refuse a mask that is neither bool nor integer 0/1.

    Converted to bool, an additive mask is inverted without an error: its 0 would
    forbid, and its minus infinity allow.

    >>> try:
    ...     check_zero_one("mask", torch.tensor([0.0, -torch.inf]))
    ... except TypeError as error:
    ...     print(error)  # doctest: +NORMALIZE_WHITESPACE
    `mask` is torch.float32, not bool or integer 0/1 with 1 for 'may attend';
    use `mask.bool()` for 0 and 1, `masks.from_additive(mask)` for 0 and -inf
    """
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"`{name}` is {mask.dtype}, not bool or integer 0/1 with 1 for 'may "
            f"attend'; use `{name}.bool()` for 0 and 1, `masks.from_additive({name})` "
            f"for 0 and -inf"
        )
    if mask.dtype == torch.bool:
        return
    low, high = value_range(mask)
    if low < 0 or high > 1:
        message = f"`{name}` holds {low} to {high}, not 0/1; write `{name} == 1`"
        raise ValueError(message)


def check_mask(name: str, mask: Tensor) -> None:
    """Refuse what is not a mask in the convention of Headnotes.

    >>> try:
    ...     check_mask("mask", torch.ones(3, 5).bool())
    ... except ValueError as error:
    ...     print(error)  # doctest: +NORMALIZE_WHITESPACE
    `mask` has shape [3, 5], not [q_len or 1, k_len, batch_size or 1];
    a [q_len, k_len] mask needs `mask.unsqueeze(-1)` if True means 'may attend',
    `masks.from_mha(mask, heads)` if True hides
    """
    check_tensor(name, mask)
    if mask.dim() != 3:
        raise ValueError(
            f"`{name}` has shape {list(mask.shape)}, not {MASK_AXES}; a [q_len, k_len] "
            f"mask needs `{name}.unsqueeze(-1)` if True means 'may attend', "
            f"`masks.from_mha({name}, heads)` if True hides"
        )
    check_zero_one(name, mask)


def value_range(x: Tensor) -> tuple[int, int]:
    """The least and the greatest value, or zeros where values cannot be read.

    There is nothing to read on "meta", under `vmap`, or while a graph is traced.

    >>> value_range(torch.tensor([3, -1, 4]))
    (-1, 4)
    """
    if torch.compiler.is_compiling() or not x.numel():
        return 0, 0
    try:
        low, high = x.long().aminmax()
        return int(low), int(high)
    except RuntimeError:
        return 0, 0


def first_index(flags: Tensor) -> tuple[int, ...] | None:
    """The index of the first True; None if there is none, or values cannot be read.

    >>> first_index(torch.tensor([[False, False], [False, True]]))
    (1, 1)
    """
    if torch.compiler.is_compiling() or flags.is_meta:
        return None
    try:
        indices = flags.nonzero()[:1].tolist()
    except RuntimeError:  # under `vmap`
        return None
    return tuple(indices[0]) if indices else None


def without_heads(name: str, mask: Tensor) -> Tensor:
    """The mask that all heads share: `[batch_size, heads, q_len, k_len]` to ours.

    >>> without_heads("attn_mask", torch.ones(2, 7, 3, 5).bool()).shape
    torch.Size([3, 5, 2])
    """
    index = first_index(mask != mask[:, :1])
    if index is not None:
        b, h, i, j = index
        raise ValueError(
            f"`{name}` treats key {j} of query {i} and batch item {b} differently in "
            f"heads 0 and {h}, but a mask of Headnotes is the same for all heads"
        )
    mask = mask.all(dim=1)  # [batch_size, q_len, k_len]
    return mask.permute(1, 2, 0)  # [q_len, k_len, batch_size]
