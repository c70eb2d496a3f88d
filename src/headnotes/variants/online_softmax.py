r"""# Online softmax

Attention computes a score for every query and every key. For 8,192 tokens these are 67
million scores in each head, 256 MiB of float32, and a training step holds several such
matrices. All its other tensors grow with the length, not with its square:

$$O = \operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$

Only the softmax seems to need a whole row of scores: their maximum is subtracted, so
that no exponential overflows, and the sum of the exponentials divides each of them. But
both can be updated as the row is processed. So scores are computed block by block, used
and discarded, and the result is *exact*; the backward pass computes the blocks again.

FlashAttention does this, and so does `F.scaled_dot_product_attention`. What they add is
engineering: one kernel for all the steps of a block, many blocks at the same time, and
scores that never leave the fast on-chip memory of a GPU.

**Laws:** all but `dropout` apply, as there is none.

Source: [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867),
Milakov and Gimelshein 2018; [Self-attention Does Not Need O(n²)
Memory](https://arxiv.org/abs/2112.05682), Rabe and Staats 2021;
[FlashAttention](https://arxiv.org/abs/2205.14135), Dao et al. 2022;
[FlashAttention-2](https://arxiv.org/abs/2307.08691), Dao 2023.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headnotes.checks import check_sizes, check_tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def running_softmax(scores: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    r"""The running maximum and sum of a row that is processed block by block.

    Scores `[k_len]` give two numbers for each block, `[blocks]`: the largest score so
    far, $m$, and the sum so far, $\ell = \sum_j e^{s_j - m}$.

    Raises `TypeError` for what is not a floating-point tensor, `ValueError` for another
    shape or a block size below 1. Source: Milakov and Gimelshein 2018, algorithm 3.

    >>> row = torch.tensor([1.0, 3.0, 2.0, 1.0, 6.0, 4.0])
    >>> largest, total = running_softmax(row, block_size=2)
    >>> largest
    tensor([3., 3., 6.])
    >>> total
    tensor([1.1353, 1.6386, 1.2169])

    The second block adds $e^{2-3} + e^{1-3} = 0.5032$. The third has a larger score, so
    the sum so far is multiplied by $e^{3-6}$. The last two numbers are those of the
    whole row, and all that its softmax needs:

    >>> weights = (row - largest[-1]).exp() / total[-1]
    >>> weights.allclose(row.softmax(dim=0))
    True
    """
    check_tensor("scores", scores)
    check_floats("scores", scores, scores)
    check_sizes(block_size=block_size)
    if scores.dim() != 1 or not len(scores):
        raise ValueError(f"`scores` has shape {list(scores.shape)}, not [k_len > 0]")
    # The least number of the dtype, not minus infinity: as long as all scores are
    # masked, the difference of two maxima is 0, where $-\infty - (-\infty)$ is NaN.
    largest = scores.new_full((), torch.finfo(scores.dtype).min)
    total = torch.zeros_like(largest)
    maxima, totals = [], []
    for i in spans(0, len(scores), block_size):
        # Each term of the sum so far contains $e^{-m}$, but needs $e^{-m'}$ now. One
        # factor rescales them all:
        # $\ell' = e^{m - m'}\, \ell + \sum_{j \in \text{block}} e^{s_j - m'}$.
        new_largest = torch.maximum(largest, scores[i].amax())
        rescale = (largest - new_largest).exp()
        largest = new_largest
        total = rescale * total + (scores[i] - largest).exp().sum()
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
    r"""Exact attention in linear memory: the context `[q_len, batch_size, heads, d_v]`.

    `mask` is bool, `[q_len or 1, k_len, batch_size or 1]`; True means that this query
    may attend to this key. `is_causal` hides the future as well, and skips its blocks;
    the last query is aligned with the last key. The context of a fully masked row is
    zero, and a fully masked key may hold NaN. There is no dropout. As a hand-written
    `autograd.Function`, it supports neither `torch.vmap` nor forward mode.

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
    # Query `i` attends to keys up to `i + offset`: to all of them, if it is not causal.
    offset = len(key) - len(query) if is_causal else len(key)
    blocks = min(q_block, len(query) or 1), min(k_block, len(key) or 1)
    if mask is not None:
        check_mask(mask, query, key)
        mask = mask.permute(2, 0, 1)  # [..., k_len]
        mask = mask.tril(offset) if mask.shape[1] > 1 else mask
        # Zero times NaN is NaN: keys that no query may attend to are cleared.
        hidden = ~mask.any(dim=1).T[..., None, None]  # [k_len, ..., 1, 1]
        key = key.masked_fill(hidden, 0)
        value = value.masked_fill(hidden, 0)
        # An expanded axis takes no memory: heads and queries may share one mask.
        mask = mask[:, None].expand(-1, -1, len(query), -1)  # [..., q_len, k_len]

    # Sums are in float32: long ones need more than the 8 or 11 significant bits of half
    # precision, and float16 ends at 65,504. The copy is linear in the length. (Autocast
    # does not apply to products with `out=`.) Batch and heads become one axis.
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide) / math.sqrt(query.shape[-1])
    k, v = key.to(wide), value.to(wide)
    inputs = (x.permute(1, 2, 0, 3).flatten(0, 1) for x in (q, k, v))
    apply: Any = Blockwise.apply
    output: Tensor = apply(*inputs, mask, offset, blocks)[0]  # [..., q_len, d_v]
    output = output.view(*query.shape[1:3], *output.shape[1:])  # [..., q_len, d_v]
    return output.permute(2, 0, 1, 3).to(query.dtype)  # [q_len, batch_size, heads, d_v]


class Blockwise(torch.autograd.Function):
    r"""$O = \operatorname{softmax}(S)\, V$ with $S = Q K^\top$, in `[items, len, d]`.

    Autograd would save each block for the backward pass, and so all scores. Hence both
    passes are written by hand. What is saved between them is linear in the length, and
    at any time there are only `q_block` by `k_block` scores in each item, a head.

    Where all scores are 0, the context is the mean of the values, and the gradient of a
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
        offset: int,
        blocks: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        r"""The context of each query, and $L_i = \log \sum_j e^{S_{ij}}$."""
        items, q_len = query.shape[:2]
        d_v = value.shape[2]
        output = query.new_empty(items, q_len, d_v)  # [items, q_len, d_v]
        log_sum = query.new_empty(items, q_len, 1)  # [items, q_len, 1]
        buffer = query.new_empty(items, *blocks)  # [items, ...]
        lowest = torch.finfo(query.dtype).min
        # A block of queries goes through all its keys before the next block. Blocks of
        # queries are independent: on a GPU, each is a thread block of its own.
        for i in spans(0, q_len, blocks[0]):
            largest = torch.full_like(log_sum[:, i], lowest)  # [items, rows, 1]
            total = torch.zeros_like(largest)
            context = torch.zeros_like(output[:, i])  # [items, rows, d_v]
            for j in spans(0, min(i.stop + offset, key.shape[1]), blocks[1]):
                scores = block_scores(
                    query, key, mask, offset, i, j, buffer
                )  # [..., rows, columns]
                new_largest = torch.maximum(largest, scores.amax(2, keepdim=True))
                rescale = (largest - new_largest).exp()
                largest = new_largest
                weights = scores.sub_(largest).exp_()
                total = rescale * total + weights.sum(2, keepdim=True)
                # The context so far is a sum like $\ell$, each term times its value,
                # $\sum_j e^{s_j - m}\, v_j$. So the same factor rescales it.
                v = value[:, j]  # [items, columns, d_v]
                context.mul_(rescale).baddbmm_(weights, v)
            # Divided once, at the end. The largest score of a row adds $e^0 = 1$, so a
            # sum of 0 means a fully masked row, whose context is 0.
            output[:, i] = context / total.masked_fill(total == 0, 1)
            log_sum[:, i] = largest + total.log()
        return output, log_sum

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        r"""Save $L$: with it, the weights are $P_{ij} = e^{S_{ij} - L_i}$."""
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
        offset, blocks = ctx.settings
        # $D$ is a sum over a whole row, but needs no scores: $dP_{ik}$ is $\sum_d
        # dO_{id} V_{kd}$, so summed over $k$ first, $D_i = \sum_d dO_{id}\, O_{id}$.
        # ($L$ has a gradient in a second derivative only; its own derivative is $P$.)
        delta = (grad_output * output).sum(2, keepdim=True) - grad_log_sum  # [..., 1]
        dq, dk, dv = (delta.new_zeros(x.shape) for x in (query, key, value))
        buffer, other_buffer = delta.new_empty(2, len(key), *blocks)  # [items, ...]
        for i in spans(0, query.shape[1], blocks[0]):
            do = grad_output[:, i]  # [items, rows, d_v]
            for j in spans(0, min(i.stop + offset, key.shape[1]), blocks[1]):
                # Scores are computed again: a fifth product, in exchange for memory.
                log_weights = block_scores(
                    query, key, mask, offset, i, j, buffer, log_sum[:, i]
                )  # [items, rows, columns]
                weights = log_weights.exp_()  # [items, rows, columns]
                v = value[:, j]  # [items, columns, d_v]
                ds = product(do, v, other_buffer, delta[:, i])  # [items, rows, columns]
                ds.mul_(weights)
                dv[:, j] += weights.mT @ do
                dq[:, i] += ds @ key[:, j]
                dk[:, j] += ds.mT @ query[:, i]
        return dq, dk, dv, None, None, None


def block_scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    offset: int,
    i: slice,
    j: slice,
    buffer: Tensor,
    subtract: Tensor | None = None,
) -> Tensor:
    r"""One block of scores, minus infinity where a query may not attend to a key."""
    scores = product(query[:, i], key[:, j], buffer, subtract)  # [..., rows, columns]
    if mask is not None and scores.numel():
        split_scores = scores.view(
            len(mask), -1, *scores.shape[1:]
        )  # [..., rows, columns]
        split_scores.masked_fill_(~mask[..., i, j], -math.inf)
    # The last blocks of keys may contain some of the future.
    if j.stop > i.start + offset + 1:
        last = torch.arange(i.start, i.stop, device=key.device) + offset  # [rows]
        position = torch.arange(j.start, j.stop, device=key.device)  # [columns]
        scores.masked_fill_(position > last.unsqueeze(-1), -math.inf)
    return scores


def product(
    x: Tensor, y: Tensor, buffer: Tensor, subtract: Tensor | None = None
) -> Tensor:
    r"""$X Y^\top$ minus a column, in the memory of `buffer`: allocation takes time."""
    shape = *x.shape[:2], y.shape[1]
    # A second derivative needs the scores of all blocks, so none may be overwritten.
    reused = buffer.flatten()[: math.prod(shape)].view(shape)  # [items, rows, columns]
    out = None if torch.is_grad_enabled() else reused
    if subtract is None:
        return torch.bmm(x, y.mT, out=out)  # [items, rows, columns]
    return torch.baddbmm(subtract, x, y.mT, beta=-1, out=out)  # [items, rows, columns]


def spans(start: int, stop: int, size: int) -> Iterator[slice]:
    """Split a range into blocks; the last may be shorter."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


# region Input checks


def check_inputs(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> None:
    """Refuse inputs that do not fit one another."""
    if type(is_causal) is not bool:
        raise TypeError(f"`is_causal` (={is_causal!r}) must be True or False")
    check_tensor("query", query)
    for name, x in {"query": query, "key": key, "value": value}.items():
        check_floats(name, x, query)
    q, k, v = (list(x.shape) for x in (query, key, value))
    fit = len(q) == len(k) == len(v) == 4 and q[1:3] == k[1:3] == v[1:3]
    if not fit or k[0] != v[0] or k[3] != q[3] or not q[3]:
        raise ValueError(
            f"`query`, `key`, `value` have shapes {q}, {k}, {v}, not [q_len, "
            "batch_size, heads, d_k] and [k_len, batch_size, heads, d_k or d_v]; split "
            "heads with `unflatten(-1, (heads, d_k))`"
        )


def check_floats(name: str, x: Tensor, query: Tensor) -> None:
    """Refuse a tensor of another dtype or device than `query`, or without a softmax."""
    check_tensor(name, x)
    if x.dtype not in FLOATS or x.dtype != query.dtype:
        dtype = query.dtype if query.dtype in FLOATS else torch.float32
        raise TypeError(f"`{name}` is {x.dtype}; use `{name}.to({dtype})`")
    check_tensor(name, x, query.device, owner="`query`")


def check_mask(mask: Tensor, query: Tensor, key: Tensor) -> None:
    """Refuse a mask of another convention, or of other sizes."""
    check_tensor("mask", mask, query.device, owner="`query`")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"`mask` is {mask.dtype}, not bool with True for 'may attend'; use "
            f"`mask.bool()` for 0 and 1, `mask == 0` for 0 and -inf"
        )
    q_len, k_len, batch_size = len(query), len(key), query.shape[1]
    if not (
        mask.dim() == 3
        and mask.shape[0] in (1, q_len)
        and mask.shape[1] == k_len
        and mask.shape[2] in (1, batch_size)
    ):
        raise ValueError(
            f"`mask` has shape {list(mask.shape)}, not [q_len or 1, k_len, batch_size "
            f"or 1] = [{q_len} or 1, {k_len}, {batch_size} or 1]; a [q_len, k_len] "
            f"mask needs `mask.unsqueeze(-1)` if True means 'may attend', "
            f"`masks.from_mha(mask, heads)` if True hides"
        )


# endregion
