r"""# Multi-head attention with valid lengths

Sentences of one batch differ in length, so the short ones are padded. Here no mask says
what is filler. A *valid length* does: the number of leading keys that may be read. One
integer per batch item is enough for padding, and one per query is enough for a causal
mask too: query `i` has length `i + 1`.

What is special about this form is where its heads go: they are *folded into the batch*.
Two sentences and five heads become ten small problems that know nothing of each other,
and plain single-head attention solves them all in one batched product.

$$[\,2,\ n,\ 5 \cdot d_k\,] \;\longrightarrow\; [\,10,\ n,\ d_k\,]$$

Row `b * num_heads + i` of the folded batch is head `i` of item `b`. More heads do not
make the products dearer, as each is narrower; but each has weights of its own to keep.

Source: [Dive into Deep Learning](https://d2l.ai/chapter_attention-mechanisms-and-transformers/multihead-attention.html),
Zhang et al. 2023, sections 11.3 and 11.5, whose checkpoints load here; the method is
that of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), section 3.2.
"""

# Nothing but PyTorch and the standard library: this file runs wherever it is put.
import math
from typing import Any

import torch
from torch import Tensor, nn


def masked_softmax(
    X: Tensor,  # [batch_size, q_len, k_len]  # noqa: N803
    valid_lens: Tensor | None,
) -> Tensor:
    r"""Softmax over the last axis, in which only the first keys of each row count.

    `valid_lens` is `None`, `[batch_size]`, or `[batch_size, q_len]` for lengths that
    differ by query. Raises `TypeError` where they are no integers, `ValueError` for a
    wrong shape, or one below 0 or beyond `k_len`. Source: Zhang et al. 2023, 11.3.

    >>> X = torch.zeros(2, 1, 4)
    >>> masked_softmax(X, torch.tensor([4, 2])).squeeze(1)
    tensor([[0.2500, 0.2500, 0.2500, 0.2500],
            [0.5000, 0.5000, 0.0000, 0.0000]])

    Lengths that grow with the query are a causal mask:

    >>> X = torch.zeros(1, 3, 3)
    >>> masked_softmax(X, torch.tensor([[1, 2, 3]]))
    tensor([[[1.0000, 0.0000, 0.0000],
             [0.5000, 0.5000, 0.0000],
             [0.3333, 0.3333, 0.3333]]])

    A length of 0 leaves nothing to read, and the row is zero:

    >>> masked_softmax(X, torch.tensor([0])).sum()
    tensor(0.)
    """
    check_tensor("X", X, X)
    if X.dtype.itemsize < 2 or not X.is_floating_point():
        raise TypeError(f"`X` is {X.dtype}, which has no softmax; use `X.float()`")
    if X.dim() != 3:
        axes = "[batch_size, q_len, k_len]"
        raise ValueError(f"`X` has shape {list(X.shape)}, not {axes}")
    if valid_lens is None:
        return X.softmax(dim=-1)
    check_valid_lens(valid_lens, X, X.shape[-1])
    # One axis more for the keys, and one for the queries where all share a length.
    lens = valid_lens.long().unsqueeze(-1)  # [batch_size, ...]
    lens = lens.unsqueeze(-1) if valid_lens.dim() == 1 else lens  # [batch_size, ..., 1]
    keep = torch.arange(X.shape[-1], device=X.device) < lens  # [batch_size, ..., k_len]

    # The original writes $-10^6$ into the scores, and a true score may lie below that;
    # below $-\infty$ lies nothing. A whole row of it would be NaN, so empty rows are 0
    # on the way in, and on the way out, where the original reads all the filler.
    empty = lens <= 0  # [batch_size, ..., 1]
    scores = X.masked_fill(~keep, -math.inf).masked_fill(empty, 0)
    return scores.softmax(dim=-1).masked_fill(empty, 0)  # [batch_size, q_len, k_len]


class DotProductAttention(nn.Module):
    r"""Scaled dot-product attention of a single head.

    `dropout` acts on the attention weights while training. Raises `ValueError` where it
    does not lie between 0 and 1. Source: Dive into Deep Learning, section 11.3.
    """

    attention_weights: Tensor | None

    def __init__(self, dropout: float) -> None:
        super().__init__()
        if type(dropout) not in (int, float) or not 0 <= dropout <= 1:
            raise ValueError(f"`dropout` (={dropout!r}) must lie between 0 and 1")
        self.dropout = nn.Dropout(dropout)
        self.attention_weights = None

    def forward(
        self,
        queries: Tensor,  # [batch_size, q_len, d_k]
        keys: Tensor,  # [batch_size, k_len, d_k]
        values: Tensor,  # [batch_size, k_len, d_v]
        valid_lens: Tensor | None = None,
    ) -> Tensor:
        r"""Read from `values` where `queries` meet `keys`.

        A query of length 0 reads zero. Raises `TypeError` for a wrong dtype,
        `ValueError` for shapes or devices that do not fit.

        >>> attention = DotProductAttention(dropout=0.5)
        >>> queries = torch.randn(2, 1, 3)
        >>> keys, values = torch.randn(2, 5, 3), torch.randn(2, 5, 7)
        >>> lens = torch.tensor([2, 4])
        >>> attention(queries, keys, values, lens).shape
        torch.Size([2, 1, 7])
        >>> attention.attention_weights[:, 0] > 0
        tensor([[ True,  True, False, False, False],
                [ True,  True,  True,  True, False]])
        """
        check_inputs(queries, [0, 0, 0], queries, keys, values)
        if (q := queries.shape[-1]) != (k := keys.shape[-1]):
            raise ValueError(f"`keys` are {k} wide, `queries` {q}; make them equal")
        # The dot product of two vectors of variance 1 has variance $d_k$; the division
        # brings it back. Dividing the queries, not the scores as the original does,
        # keeps the scores within float16, which ends at 65,504.
        queries = queries / math.sqrt(queries.shape[-1])
        scores = torch.bmm(queries, keys.mT)  # [batch_size, q_len, k_len]

        # Kept to be looked at: before dropout, so that rows sum to 1, and detached. The
        # original keeps their graph, and `deepcopy` raises. (An exported program has
        # nowhere to keep them, and what `vmap` leaves here is not readable.)
        weights = masked_softmax(scores, valid_lens)  # [batch_size, q_len, k_len]
        if not torch.compiler.is_exporting():
            self.attention_weights = weights.detach()
        weights = self.dropout(weights)
        return torch.bmm(weights, values)  # [batch_size, q_len, d_v]

    def __getstate__(self) -> dict[str, Any]:
        # What is only for looking at belongs in no pickle, checkpoint or deep copy.
        return self.__dict__ | {"attention_weights": None}


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention whose heads are folded into the batch.

    `num_hiddens` is the width of the output, and of all heads together. Each input may
    have a width of its own: it is found at the first forward, and the weights are drawn
    then. `dropout` acts on the attention weights while training, and `bias` governs all
    four linear maps. Raises `ValueError` where `num_heads` does not divide
    `num_hiddens`, or a setting is out of range. Source: Zhang et al. 2023, 11.5.

    >>> attention = MultiHeadAttention(100, 5, dropout=0.5)
    >>> X, Y = torch.randn(2, 4, 100), torch.randn(2, 6, 100)
    >>> attention(X, Y, Y, torch.tensor([3, 2])).shape
    torch.Size([2, 4, 100])

    The weights of the last call can be looked at, heads within batch items:

    >>> weights = attention.attention.attention_weights
    >>> weights.shape
    torch.Size([10, 4, 6])
    >>> weights.view(2, 5, 4, 6)[1, 0, 0] > 0
    tensor([ True,  True, False, False, False, False])
    """

    def __init__(
        self, num_hiddens: int, num_heads: int, dropout: float, bias: bool = False
    ) -> None:
        r"""Build four linear maps that do not know yet how wide their inputs are."""
        super().__init__()
        check_settings(num_hiddens, num_heads)
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
        # Drawn at the first forward: until then there is nothing to count or look at.
        self.W_q = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_k = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_v = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_o = nn.LazyLinear(num_hiddens, bias=bias)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None
    ) -> Tensor:
        r"""Read from `values` where `queries` meet `keys`.

        `queries` are `[batch_size, q_len, ...]`, `keys` and `values` `[batch_size,
        k_len, ...]`, of any width; the result is `[batch_size, q_len, num_hiddens]`.
        `valid_lens` is `None`, `[batch_size]` or `[batch_size, q_len]`: how many keys,
        from the first on, may be read. Where it is 0, the context is zero and the
        output is the output bias; what no query may read may hold NaN. Raises
        `TypeError` for a wrong dtype, `ValueError` for a wrong shape, device or length.

        Filler cannot change a sentence, be its length said once or for each query:

        >>> mha = MultiHeadAttention(6, 2, dropout=0).eval()
        >>> X, lens = torch.randn(2, 5, 7), torch.tensor([3, 5])
        >>> before = mha(X, X, X, lens)
        >>> X[0, 3:] = torch.nan
        >>> after = mha(X, X, X, lens[:, None].expand(2, 5))
        >>> torch.equal(before[0, :3], after[0, :3])
        True
        """
        # A layer that is still lazy says 0, and takes any width. Its weight must not be
        # looked at by a compiler, which would go on seeing the one that is missing.
        like = queries if torch.compiler.is_compiling() else self.W_q.weight
        widths = [x.in_features for x in (self.W_q, self.W_k, self.W_v)]
        check_inputs(like, widths, queries, keys, values)
        if valid_lens is not None:
            check_valid_lens(valid_lens, queries, keys.shape[1])
            # Zero times NaN is NaN: what no query may read is cleared, not just unread.
            lens = valid_lens.long().unsqueeze(1).flatten(1)  # [batch_size, ...]
            place = torch.arange(keys.shape[1], device=keys.device)  # [k_len]
            unread = (place >= lens[..., None]).all(dim=1)  # [batch_size, k_len]
            keys, values = (x.masked_fill(unread[..., None], 0) for x in (keys, values))
            # Item 0 fills the first rows of the folded batch, item 1 the next. So for
            # three heads, lengths [3, 2] must become [3, 3, 3, 2, 2, 2]. Plain `repeat`
            # makes them [3, 2, 3, 2, 3, 2], which fits as well, and is wrong.
            valid_lens = valid_lens.repeat_interleave(
                self.num_heads, dim=0
            )  # [batch_size * num_heads, ...]

        # From here to `transpose_output` there are no heads, only a larger batch.
        queries = self.transpose_qkv(self.W_q(queries))  # [..., q_len, d_k]
        keys = self.transpose_qkv(self.W_k(keys))  # [..., k_len, d_k]
        values = self.transpose_qkv(self.W_v(values))  # [..., k_len, d_k]
        context = self.attention(queries, keys, values, valid_lens)  # [..., q_len, d_k]

        context = self.transpose_output(context)  # [batch_size, q_len, num_hiddens]
        output: Tensor = self.W_o(context)  # [batch_size, q_len, num_hiddens]
        return output

    def transpose_qkv(self, X: Tensor) -> Tensor:  # noqa: N803
        r"""Split the last axis into heads, and fold them into the batch.

        >>> mha = MultiHeadAttention(10, 5, dropout=0)
        >>> mha.transpose_qkv(torch.randn(2, 3, 10)).shape
        torch.Size([10, 3, 2])
        """
        # Heads must stand beside the batch before both become one axis. This costs a
        # copy: in memory they stand beside their components.
        batch_size, seq_len, width = X.shape
        split = (batch_size, seq_len, self.num_heads, width // self.num_heads)
        heads = X.view(split)  # [batch_size, seq_len, num_heads, d_k]
        return heads.transpose(1, 2).flatten(0, 1)  # [..., seq_len, d_k]

    def transpose_output(self, X: Tensor) -> Tensor:  # noqa: N803
        r"""Undo `transpose_qkv`: unfold the heads, and lay them side by side again.

        >>> mha = MultiHeadAttention(10, 5, dropout=0)
        >>> X = torch.randn(2, 3, 10)
        >>> there = mha.transpose_qkv(X)
        >>> torch.equal(mha.transpose_output(there), X)
        True
        """
        # Sizes are spelt out because a $-1$ is ambiguous in an empty batch.
        rows, seq_len, d_k = X.shape
        split = (rows // self.num_heads, self.num_heads, seq_len, d_k)
        x = X.view(split)  # [batch_size, num_heads, seq_len, d_k]
        return x.transpose(1, 2).flatten(2)  # [batch_size, seq_len, num_heads * d_k]


def check_settings(num_hiddens: int, num_heads: int) -> None:
    """Refuse settings that do not fit one another, and name the nearest that do."""
    for name, size in (("num_hiddens", num_hiddens), ("num_heads", num_heads)):
        if type(size) is not int or size < 1:
            raise ValueError(f"`{name}` (={size!r}) must be an int from 1 up")
    if num_hiddens % num_heads:
        fits = [n for n in (*range(1, 4097), num_hiddens) if num_hiddens % n == 0]
        near = [n for n in fits if n < num_heads][-1:]
        near += [n for n in fits if n > num_heads][:1]
        raise ValueError(
            f"`num_hiddens` (={num_hiddens}) must be divisible by `num_heads` "
            f"(={num_heads}); {' and '.join(map(str, near))} would do"
        )


def check_tensor(name: str, x: Tensor, like: Tensor) -> None:
    """Refuse what is no dense tensor, or lies on another device than `like`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but is a {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise TypeError(f"`{name}` is sparse, nested or quantised; pass a dense one")
    if x.device != like.device:
        where = f"`{name}` is on {x.device}, not on {like.device}"
        raise ValueError(f"{where}; use `{name}.to({str(like.device)!r})`")


def check_inputs(like: Tensor, widths: list[int], *inputs: Tensor) -> None:
    """Refuse inputs of another dtype or device than `like`, or unlike one another."""
    names, (queries, keys, values) = ("queries", "keys", "values"), inputs
    for name, x, width in zip(names, inputs, widths, strict=True):
        check_tensor(name, x, like)
        real = like.dtype.is_floating_point and like.dtype.itemsize > 1
        dtype = like.dtype if real else torch.float32
        # Autocast makes its own peace between the dtypes that it casts.
        cast = x.is_floating_point() and torch.float64 not in (x.dtype, dtype)
        cast = cast and not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if x.dtype != dtype and not cast:
            way_out = f"use `{name}.to({dtype})`"
            raise TypeError(f"`{name}` is {x.dtype}, not {dtype}; {way_out}")
        if x.dim() != 3 or not x.shape[-1] or width not in (0, x.shape[-1]):
            last = f"width (={width})" if width else "width"
            raise ValueError(
                f"`{name}` has shape {list(x.shape)}, not [batch_size, seq_len, "
                f"{last}]; a lone sequence needs `{name}.unsqueeze(0)`"
            )
        if x.shape[0] != queries.shape[0]:
            raise ValueError(
                f"`{name}` has batch size {x.shape[0]}, but `queries` has "
                f"{queries.shape[0]}; share one sequence with `{name}.expand`"
            )
    if (k := keys.shape[1]) != (v := values.shape[1]):
        raise ValueError(f"`values` are {v} long, `keys` {k}; make them equal")


def check_valid_lens(valid_lens: Tensor, queries: Tensor, k_len: int) -> None:
    """Refuse lengths that would be read as something else, or reach beyond the keys."""
    check_tensor("valid_lens", valid_lens, queries)
    # From a padding mask the original reads lengths of 0 and 1.
    dtype = valid_lens.dtype
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        raise TypeError(
            f"`valid_lens` is {dtype}, but lengths are integers; from a padding mask "
            f"[batch_size, k_len] with all filler at its end, use `mask.sum(dim=1)`"
        )
    batch_size, q_len = queries.shape[:2]
    if valid_lens.shape not in ((batch_size,), (batch_size, q_len)):
        raise ValueError(
            f"`valid_lens` has shape {list(valid_lens.shape)}, not [batch_size] or "
            f"[batch_size, q_len] = [{batch_size}] or [{batch_size}, {q_len}]"
        )
    # Values can be read only where there are any: not on "meta", and not under `vmap`.
    if torch.compiler.is_compiling() or not valid_lens.numel():
        return
    try:
        low, high = (value.item() for value in valid_lens.long().aminmax())
    except RuntimeError:
        return
    if low < 0 or high > k_len:
        raise ValueError(
            f"`valid_lens` runs from {low} to {high}, but must lie between 0 and "
            f"`k_len` (={k_len}); use `valid_lens.clamp(0, {k_len})` if meant so"
        )
