r"""# Masks

A mask answers one question for each query and key: *may this query attend to this
key?* There is one convention in this house: a bool tensor `[q_len or 1, k_len,
batch_size or 1]`, where True means yes. An axis of size 1 says "the same for all".

What a mask forbids is not a matter of taste. A *causal* mask keeps a language model
from reading the word that it is asked to predict; a *padding* mask keeps a short
sentence from reading the filler that makes it as long as its neighbours. Both at once
is their conjunction, and broadcasting makes it cheap.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.3, for the causal mask; [Dive into Deep
Learning](https://d2l.ai/chapter_attention-mechanisms-and-transformers/attention-scoring-functions.html),
section 11.3, for valid lengths.
"""

import torch
from torch import Tensor


def causal(
    q_len: int, k_len: int | None = None, *, device: torch.device | str | None = None
) -> Tensor:
    r"""Each query sees its own position and all before it: `[q_len, k_len, 1]`.

    When the lengths differ, the corner is **aligned to the last key**: query `i` sees
    key `j` where `j <= i + k_len - q_len`. This is what decoding with a cache needs,
    where the few queries are the newest of many positions. (With more queries than
    keys, the first of them see nothing.)

    Raises `ValueError` for a negative or fractional length.
    Source: Vaswani et al. 2017, section 3.2.3.

    >>> causal(3).squeeze(-1).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    >>> causal(2, 5).squeeze(-1).int()
    tensor([[1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    k_len = q_len if k_len is None else k_len
    check_length("q_len", q_len)
    check_length("k_len", k_len)
    keep = torch.ones(q_len, k_len, dtype=torch.bool, device=device)  # [q_len, k_len]
    # `tril` counts its diagonal from the top left corner; the shift moves it to the
    # bottom right, where the last query meets the last key.
    return keep.tril(k_len - q_len).unsqueeze(-1)  # [q_len, k_len, 1]


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
    check_length("k_len", k_len)
    check_valid_lens(valid_lens, k_len)
    valid_lens = valid_lens.long()  # [batch_size, ...]
    position = torch.arange(k_len, device=valid_lens.device)  # [k_len]
    if valid_lens.dim() == 1:
        return (position[:, None] < valid_lens).unsqueeze(0)  # [1, k_len, batch_size]
    # The lengths come batch first, as in the source; the mask leaves sequence first.
    lens = valid_lens.T[:, None]  # [q_len, 1, batch_size]
    return position[:, None] < lens  # [q_len, k_len, batch_size]


def combine(*masks: Tensor) -> Tensor:
    r"""What all `masks` allow: their logical *and*, broadcast.

    Raises `TypeError` for a floating-point mask, `ValueError` for masks that do not fit
    one another, or for none at all.

    >>> combine(causal(3), padding(torch.tensor([3, 2]), k_len=3)).shape
    torch.Size([3, 3, 2])
    """
    if not masks:
        raise ValueError("`masks` is empty; give at least one mask to combine")
    check_mask("masks[0]", masks[0], masks[0])
    combined = masks[0].bool()
    for n, mask in enumerate(masks):
        check_mask(f"masks[{n}]", mask, combined)
        combined = combined & mask.bool()
    return combined


def check_length(name: str, length: int) -> None:
    """Refuse a length that no tensor could have; one that is traced is a SymInt."""
    if type(length) not in (int, torch.SymInt) or length < 0:
        raise ValueError(f"`{name}` (={length!r}) must be an int from 0 up")


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


def check_valid_lens(valid_lens: Tensor, k_len: int) -> None:
    """Refuse lengths that would be read as something else, or reach beyond the keys."""
    if not isinstance(valid_lens, Tensor):
        way_out = "use `torch.tensor(valid_lens)`"
        seen = type(valid_lens).__name__
        raise TypeError(f"`valid_lens` must be a tensor, but is a {seen}; {way_out}")
    integral = not (valid_lens.is_floating_point() or valid_lens.is_complex())
    if not integral or valid_lens.dtype == torch.bool:
        raise TypeError(
            f"`valid_lens` is {valid_lens.dtype}, but lengths are integers; from a "
            f"mask [batch_size, k_len] with all filler at its end, use "
            f"`mask.sum(dim=1)`"
        )
    if valid_lens.dim() not in (1, 2):
        raise ValueError(
            f"`valid_lens` has shape {list(valid_lens.shape)}, not [batch_size] or "
            f"[batch_size, q_len]"
        )
    low, high = extremes(valid_lens)
    if low < 0 or high > k_len:
        raise ValueError(
            f"`valid_lens` runs from {low} to {high}, but must lie between 0 and "
            f"`k_len` (={k_len}); use `valid_lens.clamp(0, {k_len})` if meant so"
        )


def check_mask(name: str, mask: Tensor, others: Tensor) -> None:
    """Refuse what is no mask of this house, or does not fit the masks before it."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but is a {type(mask).__name__}")
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"`{name}` is {mask.dtype}, not bool or integer 0/1; use `mask.bool()` if "
            f"it holds 0 and 1, `mask == 0` if it is additive, with 0 and -inf"
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
