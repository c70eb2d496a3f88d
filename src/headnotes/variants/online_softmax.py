r"""# Online softmax

Attention compares every query with every key. For 8,192 tokens these are 67 million
scores in each head, 256 MiB of float32, and a training step holds several such
matrices. All else in it grows with the length, and not with its square:

$$O = \operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$

It is the softmax that seems to need a whole row of scores: its largest is subtracted,
so that no exponential overflows, and its sum divides the rest. Yet both can be kept
while the row goes by. So scores are made block by block, used and forgotten, and the
result is *exact*; on the way back, the blocks are made once more.

FlashAttention does this, and so does `F.scaled_dot_product_attention`. From here to
there it is engineering: one kernel for all the steps of a block, many blocks at the
same time, and scores that never leave the fast memory beside the cores of a GPU.

Source: [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867),
Milakov and Gimelshein 2018; [Self-attention Does Not Need O(n²)
Memory](https://arxiv.org/abs/2112.05682), Rabe and Staats 2021;
[FlashAttention](https://arxiv.org/abs/2205.14135), Dao et al. 2022;
[FlashAttention-2](https://arxiv.org/abs/2307.08691), Dao 2023.
"""

# Nothing but PyTorch and the standard library: this file runs wherever it is put.
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def running_softmax(scores: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    r"""The maximum and the sum of a row that is read block by block.

    Scores `[k_len]` give two numbers for each block, `[blocks]`: the largest score so
    far, $m$, and the sum so far, $\ell = \sum_j e^{s_j - m}$.

    Raises `TypeError` for what is no tensor of floats, `ValueError` for another shape
    or a block size below 1. Source: Milakov and Gimelshein 2018, algorithm 3.

    >>> row = torch.tensor([1.0, 3.0, 2.0, 1.0, 6.0, 4.0])
    >>> largest, total = running_softmax(row, block_size=2)
    >>> largest
    tensor([3., 3., 6.])
    >>> total
    tensor([1.1353, 1.6386, 1.2169])

    The second block adds $e^{2-3} + e^{1-3} = 0.5032$. The third brings a larger score,
    so all that was summed before shrinks by $e^{3-6}$. The last two numbers are those
    of the whole row, and all that its softmax needs:

    >>> weights = (row - largest[-1]).exp() / total[-1]
    >>> weights.allclose(row.softmax(dim=0))
    True
    """
    check_tensor("scores", scores, scores)
    check_sizes(block_size=block_size)
    if scores.dim() != 1 or not len(scores):
        raise ValueError(f"`scores` has shape {list(scores.shape)}, not [k_len > 0]")
    # The least number there is, not minus infinity: as long as all scores are masked,
    # the difference of two maxima is 0, where $-\infty - (-\infty)$ would be NaN.
    largest = scores.new_full((), torch.finfo(scores.dtype).min)
    total = torch.zeros_like(largest)
    maxima, totals = [], []
    for i in spans(0, len(scores), block_size):
        # Each term of the old sum holds $e^{-m}$, and wants $e^{-m'}$ now. The terms
        # are gone, but one factor mends them all:
        # $\ell' = e^{m - m'}\, \ell + \sum_{j \in \text{block}} e^{s_j - m'}$.
        newest = torch.maximum(largest, scores[i].amax())
        kept, largest = (largest - newest).exp(), newest
        total = kept * total + (scores[i] - largest).exp().sum()
        maxima.append(largest)
        totals.append(total)
    maximum = torch.stack(maxima)  # [blocks]
    return maximum, torch.stack(totals)  # [blocks]


def online_softmax_attention(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_v]
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    q_block: int = 256,
    k_block: int = 512,
) -> Tensor:
    r"""Read from `value` where `query` meets `key`: `[q_len, batch_size, heads, d_v]`.

    `mask` is bool, `[q_len or 1, k_len, batch_size or 1]`; True means that this query
    may attend to this key. `is_causal` hides the future as well, and spares its blocks;
    the last query meets the last key. A query that may attend to nothing reads zero,
    and a key that none may read may hold NaN. There are no weights to drop out.

    Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape or device.
    Source: Dao et al. 2022, algorithms 2 and 4; Dao 2023, section 3.1.

    >>> query, key = torch.randn(18, 3, 5, 7).split([8, 10])
    >>> inputs = query, key, torch.randn(10, 3, 5, 11)
    >>> y = online_softmax_attention(
    ...     *inputs, is_causal=True, q_block=4, k_block=2
    ... )
    >>> q, k, v = (x.movedim(0, 2) for x in inputs)
    >>> scores = q @ k.mT / 7**0.5
    >>> future = torch.ones(8, 10).bool().triu(3)
    >>> scores[..., future] = -torch.inf
    >>> expected = scores.softmax(dim=-1) @ v
    >>> y.movedim(0, 2).allclose(expected, atol=1e-5)
    True
    """
    check_inputs(query, key, value, is_causal)
    check_sizes(q_block=q_block, k_block=k_block)
    # Query `i` sees keys up to `i + ahead`, which are all of them where none is hidden.
    ahead = len(key) - len(query) if is_causal else len(key)
    blocks = min(q_block, len(query) or 1), min(k_block, len(key) or 1)
    if mask is not None:
        check_mask(mask, query, key)
        mask = mask.permute(2, 0, 1)  # [..., k_len]
        mask = mask.tril(ahead) if mask.shape[1] > 1 else mask
        # Zero times NaN is NaN: what no query may read is cleared, not just unread.
        unread = ~mask.any(dim=1).T[..., None, None]  # [k_len, ..., 1, 1]
        key, value = key.masked_fill(unread, 0), value.masked_fill(unread, 0)
        # An expanded axis takes no memory, and a mask has one for heads and queries.
        mask = mask[:, None].expand(-1, -1, len(query), -1)  # [..., q_len, k_len]

    # Long sums want more than the 8 or 11 bits of half precision, and float16 ends at
    # 65,504. So what adds up does it in float32, for a copy that is linear in the
    # length. (Autocast leaves products alone that are written in place.) Batch and
    # heads become one axis, for the core as a view.
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(wide) / math.sqrt(query.shape[-1]), key.to(wide), value.to(wide)
    inputs = (x.permute(1, 2, 0, 3).flatten(0, 1) for x in (q, k, v))
    apply: Any = Blockwise.apply
    read: Tensor = apply(*inputs, mask, ahead, blocks)[0]  # [..., q_len, d_v]
    read = read.view(*query.shape[1:3], *read.shape[1:])  # [..., q_len, d_v]
    return read.permute(2, 0, 1, 3).to(query.dtype)  # [q_len, batch_size, heads, d_v]


class Blockwise(torch.autograd.Function):
    r"""$O = \operatorname{softmax}(S)\, V$ with $S = Q K^\top$, in `[items, len, d]`.

    Autograd would keep each block for the way back, and so all scores. Hence both ways
    are written by hand. What is kept between them is linear in the length, and of the
    scores no more exist at a time than `q_block` by `k_block` in each item, a head.

    Where all scores are 0, a query reads the mean of what it may, and the gradient of a
    value is the sum of its weights. Ten queries share one, two or four keys:

    >>> query, key = torch.zeros(14, 3, 7, 11).split([10, 4])
    >>> value = torch.randn(4, 3, 7, 13).requires_grad_()
    >>> lens = torch.tensor([1, 2, 4])
    >>> mask = torch.arange(4).view(1, 4, 1) < lens
    >>> y = online_softmax_attention(
    ...     query, key, value, mask, q_block=5, k_block=2
    ... )
    >>> y.sum().backward()
    >>> value.grad[:, :, 0, 0].T
    tensor([[10.0000,  0.0000,  0.0000,  0.0000],
            [ 5.0000,  5.0000,  0.0000,  0.0000],
            [ 2.5000,  2.5000,  2.5000,  2.5000]])
    """

    @staticmethod
    def forward(
        query: Tensor,  # [items, q_len, d_k]
        key: Tensor,  # [items, k_len, d_k]
        value: Tensor,  # [items, k_len, d_v]
        mask: Tensor | None,
        ahead: int,
        blocks: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        r"""What each query reads, and $L_i = \log \sum_j e^{S_{ij}}$."""
        items, q_len, d_v = *query.shape[:2], value.shape[2]
        output = query.new_empty(items, q_len, d_v)  # [items, q_len, d_v]
        log_sum = query.new_empty(items, q_len, 1)  # [items, q_len, 1]
        room = query.new_empty(items, *blocks)  # [items, ...]
        hidden, lowest = (mask, ahead), torch.finfo(query.dtype).min
        # A block of queries reads all its keys before the next begins. None waits for
        # another: on a GPU each of them is a program of its own.
        for i in spans(0, q_len, blocks[0]):
            largest = torch.full_like(log_sum[:, i], lowest)  # [items, rows, 1]
            total = torch.zeros_like(largest)
            context = torch.zeros_like(output[:, i])  # [items, rows, d_v]
            for j in spans(0, min(i.stop + ahead, key.shape[1]), blocks[1]):
                scores = compare(query, key, hidden, i, j, room)  # [..., rows, columns]
                newest = torch.maximum(largest, scores.amax(2, keepdim=True))
                kept, largest = (largest - newest).exp(), newest
                weights = scores.sub_(largest).exp_()
                total = kept * total + weights.sum(2, keepdim=True)
                # What was read so far is a sum like $\ell$, each term with its vector,
                # $\sum_j e^{s_j - m}\, v_j$. So the same factor mends it.
                v = value[:, j]  # [items, columns, d_v]
                context.mul_(kept).baddbmm_(weights, v)
            # Divided once, at the end. The largest score of a row has added $e^0 = 1$,
            # so a sum of 0 is a row that has read nothing, and its context is 0.
            output[:, i] = context / total.masked_fill(total == 0, 1)
            log_sum[:, i] = largest + total.log()
        return output, log_sum

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        r"""Keep $L$: with it, the weights are $P_{ij} = e^{S_{ij} - L_i}$."""
        ctx.save_for_backward(*inputs[:4], *output)
        ctx.settings = inputs[4:]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_log_sum: Tensor) -> Any:
        r"""The chain rule, first through $O = P V$, and then through the softmax:

        $$dV = P^\top dO \qquad dP = dO\, V^\top$$

        $$dS_{ij} = P_{ij}\, (dP_{ij} - D_i) \qquad D_i = \sum_k P_{ik}\, dP_{ik}$$

        $$dQ = dS\, K \qquad dK = dS^\top Q$$
        """
        query, key, value, mask, output, log_sum = ctx.saved_tensors
        ahead, blocks = ctx.settings
        # $D$ sums over a whole row, and again it need not: $dP_{ik}$ is $\sum_d dO_{id}
        # V_{kd}$, so summed over $k$ first, $D_i = \sum_d dO_{id}\, O_{id}$. (Only from
        # a second derivative does $L$ have a gradient; its own derivative is $P$.)
        delta = (grad_output * output).sum(2, keepdim=True) - grad_log_sum  # [..., 1]
        dq, dk, dv = (delta.new_zeros(x.shape) for x in (query, key, value))
        one, two = delta.new_empty(2, len(key), *blocks)  # [items, ...]
        for i in spans(0, query.shape[1], blocks[0]):
            given = grad_output[:, i]  # [items, rows, d_v]
            for j in spans(0, min(i.stop + ahead, key.shape[1]), blocks[1]):
                # Scores are made once more: a fifth product, for want of the memory.
                logs = compare(query, key, (mask, ahead), i, j, one, log_sum[:, i])
                weights = logs.exp_()  # [items, rows, columns]
                v = value[:, j]  # [items, columns, d_v]
                change = product(given, v, two, delta[:, i])  # [items, rows, columns]
                change.mul_(weights)
                dv[:, j] += weights.mT @ given
                dq[:, i] += change @ key[:, j]
                dk[:, j] += change.mT @ query[:, i]
        return dq, dk, dv, None, None, None


def compare(
    query: Tensor,
    key: Tensor,
    hidden: tuple[Tensor | None, int],
    i: slice,
    j: slice,
    room: Tensor,
    less: Tensor | None = None,
) -> Tensor:
    r"""One block of scores, minus infinity where a query may not read."""
    mask, ahead = hidden
    scores = product(query[:, i], key[:, j], room, less)  # [..., rows, columns]
    if mask is not None and scores.numel():
        by_head = scores.view(len(mask), -1, *scores.shape[1:])  # [..., rows, columns]
        by_head.masked_fill_(~mask[..., i, j], -math.inf)
    # The last block of keys, or the last few, may hold some of the future.
    if j.stop > i.start + ahead + 1:
        last = torch.arange(i.start, i.stop, device=key.device) + ahead  # [rows]
        place = torch.arange(j.start, j.stop, device=key.device)  # [columns]
        scores.masked_fill_(place > last.unsqueeze(-1), -math.inf)
    return scores


def product(x: Tensor, y: Tensor, room: Tensor, less: Tensor | None = None) -> Tensor:
    r"""$X Y^\top$ less a column, written over the last one, as fresh memory is dear."""
    shape = *x.shape[:2], y.shape[1]
    # Who differentiates the gradients once more needs all blocks.
    old = room.flatten()[: math.prod(shape)].view(shape)  # [items, rows, columns]
    out = None if torch.is_grad_enabled() else old
    if less is None:
        return torch.bmm(x, y.mT, out=out)  # [items, rows, columns]
    return torch.baddbmm(less, x, y.mT, beta=-1, out=out)  # [items, rows, columns]


def spans(start: int, stop: int, size: int) -> Iterator[slice]:
    """Cut a range into blocks; the last may be shorter."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def check_sizes(**sizes: int) -> None:
    """Refuse sizes that no block can have."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"`{name}` (={size!r}) must be an int from 1 up")


def check_tensor(name: str, x: Tensor, query: Tensor, floats: bool = True) -> None:
    """Refuse what is no dense tensor, or neither where nor what `query` is."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but is a {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise TypeError(f"`{name}` is sparse, nested or quantised; pass a dense one")
    dtypes = torch.float16, torch.bfloat16, torch.float32, torch.float64
    if floats and (x.dtype not in dtypes or x.dtype != query.dtype):
        one = query.dtype if query.dtype in dtypes else torch.float32
        raise TypeError(f"`{name}` is {x.dtype}; use `{name}.to({one})`")
    if x.device != query.device:
        where = f"`{name}` is on {x.device}, `query` on {query.device}"
        raise ValueError(f"{where}; use `{name}.to({str(query.device)!r})`")


def check_inputs(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> None:
    """Refuse inputs that do not fit one another."""
    if type(is_causal) is not bool:
        raise TypeError(f"`is_causal` (={is_causal!r}) must be True or False")
    for name, x in {"query": query, "key": key, "value": value}.items():
        check_tensor(name, x, query)
    q, k, v = (list(x.shape) for x in (query, key, value))
    fit = len(q) == len(k) == len(v) == 4 and q[1:3] == k[1:3] == v[1:3]
    if not fit or k[0] != v[0] or k[3] != q[3] or not q[3]:
        raise ValueError(
            f"`query`, `key`, `value` have shapes {q}, {k}, {v}, not [q_len, "
            "batch_size, heads, d_k] and [k_len, batch_size, heads, d_k or d_v]; split "
            "heads with `unflatten(-1, (heads, d_k))`"
        )


def check_mask(mask: Tensor, query: Tensor, key: Tensor) -> None:
    """Refuse a mask that would be read otherwise than it was meant."""
    check_tensor("mask", mask, query, floats=False)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"`mask` is {mask.dtype}, not bool with True for 'may attend'; use "
            f"`mask.bool()` for 0 and 1, `mask == 0` for 0 and -inf"
        )
    q_len, k_len, batch_size = len(query), len(key), query.shape[1]
    n_q, n_k, n_b = mask.shape if mask.dim() == 3 else (0, -1, 0)
    if n_q not in (1, q_len) or n_k != k_len or n_b not in (1, batch_size):
        raise ValueError(
            f"`mask` has shape {list(mask.shape)}, not [q_len or 1, k_len, batch_size "
            f"or 1] = [{q_len} or 1, {k_len}, {batch_size} or 1]; a [q_len, k_len] "
            f"mask needs `mask.unsqueeze(-1)`"
        )
