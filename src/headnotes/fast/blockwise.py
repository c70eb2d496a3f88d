r"""# Attention by blocks, with dropout

PyTorch has kernels that never hold all weights at once. On a CPU they know no dropout:
with it, `F.scaled_dot_product_attention` writes out all weights, and draws for each a
number that costs more than the weight did. They do not show the weights, and causality
they know only without a mask, and for as many keys as queries. This module is for these
cases; [another](dispatch.md) tells them apart.

It takes the weights [a block at a time](blocks.md), reads with them, shows them if it
is asked to, and keeps none: the way back computes them again, which costs one product
of matrices and saves the memory of all of them.

Source: [FlashAttention](https://arxiv.org/abs/2205.14135), Dao et al. 2022, appendix B,
for the way back and for dropout that is drawn again.
"""

# What is imported with a dot stands beside this file; nothing else is needed.
from typing import Any

import torch
from torch import Tensor

from headnotes.fast.blocks import (
    Block,
    Rule,
    Workspace,
    by_head,
    read_of,
    rows_of,
    shown_of,
)

ALL = Rule()


def attend(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_k]
    rule: Rule = ALL,
) -> Tensor:
    r"""Read from `value` what `rule` allows: `[q_len, batch_size, heads, d_k]`.

    A query that may read nothing reads zero. Gradients flow to all three tensors; there
    are none of second order. Raises `TypeError` for a wrong dtype, `ValueError` for a
    wrong shape or device. Source: Dao et al. 2022, algorithms 2 and 4, with blocks of
    queries only.

    Three queries, five keys; the first query is blind to the last two:

    >>> query = torch.randn(3, 2, 7, 11)
    >>> key, value = torch.randn(2, 5, 2, 7, 11)
    >>> context = attend(query, key, value, Rule(is_causal=True))
    >>> first = attend(query[:1], key[:3], value[:3])
    >>> torch.allclose(context[:1], first, atol=1e-6)
    True

    Dropout follows its seed, whatever else is drawn in between:

    >>> rule = Rule(dropout_prob=0.5, seed=2017)
    >>> first = attend(query, key, value, rule)
    >>> torch.equal(attend(query, key, value, rule), first)
    True
    """
    check_call(query, key, value, rule)
    apply: Any = Attend.apply
    read: tuple[Tensor, Tensor] = apply(query, key, value, 0, *rule)
    return read[0]  # [q_len, batch_size, heads, d_k]


def attend_and_show(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_k]
    rule: Rule = ALL,
    *,
    average: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""What `attend` returns, and the weights behind it; gradients flow through both.

    The weights are `[batch_size, heads, q_len, k_len]`, or, averaged over the heads,
    `[batch_size, q_len, k_len]`. They were taken before dropout.

    >>> query = torch.randn(256, 4, 7, 11).requires_grad_()
    >>> key, value = torch.randn(2, 131, 4, 7, 11)
    >>> context, weights = attend_and_show(query, key, value)
    >>> torch.allclose(weights.sum(-1), torch.ones(4, 7, 256))
    True

    Since a row of weights always sums to 1, no query can change that sum:

    >>> context, mean = attend_and_show(query, key, value, average=True)
    >>> (weights.sum() + mean.sum()).backward()
    >>> torch.allclose(query.grad, torch.zeros(256, 4, 7, 11), atol=1e-6)
    True
    """
    check_call(query, key, value, rule)
    n = 1 if average else query.shape[2]
    x = query, key, value
    apply: Any = Attend.apply
    context, shown = apply(*x, n, *rule)  # [q_len, ..., d_k], [n, ..., k_len]
    shown = shown[0] if average else shown.transpose(0, 1)  # [batch_size, ..., k_len]
    return context, shown


class Attend(torch.autograd.Function):
    """The way there: the context, and the weights of `n` heads.

    These are none, or all, or a single one, which is the mean of all.
    """

    @staticmethod
    def forward(
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
        value: Tensor,  # [k_len, batch_size, heads, d_k]
        n: int,
        *rule: Any,
    ) -> tuple[Tensor, Tensor]:
        (q_len, batch_size, heads, _), k_len = query.shape, key.shape[0]
        work = Workspace(query, key, Rule(*rule))
        key, value = work.near(key), work.near(value)
        context = work.output()  # [q_len, batch_size, heads, d_k]
        shown = query.new_zeros(n, batch_size, q_len, k_len)  # [n, ..., q_len, k_len]
        for block in work.blocks():
            weights = work.weights(query, key, block)  # [folded, rows, k_len]
            if n:
                # While they are at hand, in the cache.
                each = by_head(weights, block)  # [heads, items, rows, k_len]
                part = shown_of(shown, block)  # [n, items, rows, k_len]
                if n == heads:
                    part.copy_(each)
                else:
                    part.add_(each.sum(0), alpha=1 / heads)
            if work.rule.dropout_prob:
                weights.mul_(work.kept(weights))
            part = rows_of(context, block)  # [folded, rows, d_k]
            part.copy_(product(weights, read_of(value, block), work.gain))
        return context, shown

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        query, key, value, _, mask, *ctx.rule = inputs
        ctx.save_for_backward(output[0], query, key, value, mask)
        # Weights that nobody looks at bring no gradient, rather than one full of zeros.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, d_shown: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        context, query, key, value, mask = ctx.saved_tensors
        inputs = query, key, value, context, gradient, d_shown, mask, *ctx.rule
        gradients = AttendBackward.apply(*inputs)  # type: ignore[no-untyped-call]
        return *gradients, None, None, *(None for _ in ctx.rule)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, tuple[int, int]]:
        wide = widen(info.batch_size, in_dims, inputs)
        outputs = Attend.apply(*wide)  # type: ignore[no-untyped-call]
        size = (info.batch_size, -1)
        return tuple(x.unflatten(1, size) for x in outputs), (1, 1)


class AttendBackward(torch.autograd.Function):
    r"""The way back, by hand.

    With $P$ the weights, $M$ what dropout multiplies them by, $O = (P \odot M)\,V$ and
    $G$ the gradient that arrives for it:

    $$dV = (P \odot M)^\top\, G$$

    $$dS_{ij} = P_{ij}\, \Big(M_{ij} \sum_d G_{id} V_{jd} - \sum_d G_{id} O_{id}\Big)$$

    $$dQ = dS\, K / \sqrt{d_k} \qquad dK = dS^\top Q / \sqrt{d_k}$$

    The subtraction is the softmax's: what one key gains, the others lose. Weights that
    were shown bring a gradient $W$ of their own, from before dropout: it joins the
    first sum, and $\sum_j P_{ij} W_{ij}$ the second.

    Where all scores are 0, each of 256 queries reads a fifth of each of five values:

    >>> query = torch.zeros(256, 3, 7, 11).requires_grad_()
    >>> key = torch.zeros(5, 3, 7, 11)
    >>> value = torch.randn(5, 3, 7, 11).requires_grad_()
    >>> attend(query, key, value).sum().backward()
    >>> value.grad[:, 0, 0, 0].round(decimals=2)
    tensor([51.2000, 51.2000, 51.2000, 51.2000, 51.2000])
    """

    @staticmethod
    def forward(
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
        value: Tensor,  # [k_len, batch_size, heads, d_k]
        context: Tensor,  # [q_len, batch_size, heads, d_k]
        gradient: Tensor | None,  # [q_len, batch_size, heads, d_k]
        d_shown: Tensor | None,  # [n, batch_size, q_len, k_len]
        *rule: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = Workspace(query, key, Rule(*rule))
        key, value = work.near(key), work.near(value)
        d_query = work.output()  # [q_len, batch_size, heads, d_k]
        # The blocks add up here, so half precision is given the bits of float32.
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = (*key.shape[1:3], key.shape[0], key.shape[3])
        d_key, d_value = (
            x.new_zeros(shape, dtype=wide) for x in (key, value)
        )  # [batch_size, heads, k_len, d_k]
        if gradient is None:
            gradient = torch.zeros_like(query)  # [q_len, batch_size, heads, d_k]
        # What is lost in a row's softmax needs no weights, unless they were shown.
        lost = (gradient * context).sum(-1, keepdim=True)  # [..., 1]

        for block in work.blocks():
            weights = work.weights(query, key, block)  # [folded, rows, k_len]
            g = rows_of(gradient, block)  # [folded, rows, d_k]
            d_weights = work.buffer("gradient", weights.shape)
            product(g, read_of(value, block).mT, work.gain, out=d_weights)
            used = weights
            if work.rule.dropout_prob:
                used = work.buffer("used", weights.shape).copy_(work.kept(weights))
                d_weights.mul_(used)
                used.mul_(weights)
            add_product(d_value, block, used.mT, g, work.gain)

            less = rows_of(lost, block)  # [folded, rows, 1]
            if d_shown is not None:
                part = shown_of(d_shown, block)  # [n, items, rows, k_len]
                if len(d_shown) < work.heads:
                    part = part / work.heads  # [n, items, rows, k_len]
                by_head(d_weights, block).add_(part)
                passed = work.buffer("passed", weights.shape)
                each = by_head(weights, block)  # [heads, items, rows, k_len]
                torch.mul(each, part, out=by_head(passed, block))
                less = less + passed.sum(-1, keepdim=True)  # [folded, rows, 1]
            d_scores = d_weights.sub_(less).mul_(weights)
            part = rows_of(d_query, block)  # [folded, rows, d_k]
            part.copy_(product(d_scores, read_of(key, block), work.scale))
            add_product(d_key, block, d_scores.mT, rows_of(query, block), work.scale)
        d_key, d_value = (x.permute(2, 0, 1, 3) for x in (d_key, d_value))
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(
            "attention by blocks has no second derivative; "
            "the readable core, headnotes.mha, has"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, tuple[int, ...]]:
        wide = widen(info.batch_size, in_dims, inputs)
        gradients = AttendBackward.apply(*wide)  # type: ignore[no-untyped-call]
        size = (info.batch_size, -1)
        return tuple(g.unflatten(1, size) for g in gradients), (1, 1, 1)


def product(
    a: Tensor,  # [folded, rows, inner]
    b: Tensor,  # [folded, inner, columns]
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """`scale` times the product of matrices: one pass, not two."""
    nothing = a.new_empty(()) if out is None else out
    result = torch.baddbmm(nothing, a, b, beta=0, alpha=scale, out=out)
    return result  # [folded, rows, columns]


def add_product(
    total: Tensor,  # [..., d_k]
    block: Block,
    a: Tensor,  # [folded, keys, rows]
    b: Tensor,  # [folded, rows, d_k]
    scale: float,
) -> None:
    """Add the product of `a` and `b` to what other blocks gave to the same keys."""
    part = total[block.items, block.heads, : block.k_len]  # [..., keys, d_k]
    part = part.flatten(0, 1)  # [folded, keys, d_k]
    if part.dtype == a.dtype:
        part.baddbmm_(a, b, alpha=scale)
    else:
        part.add_(torch.bmm(a, b), alpha=scale)


def widen(n: int, dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> list[Any]:
    """One axis more for `vmap` to map over is a larger batch."""
    wide = list(inputs)
    for i, (dim, x) in enumerate(zip(dims, inputs, strict=True)):
        if isinstance(x, Tensor):
            # A mask has its batch last; elsewhere it is the second axis.
            axis = 2 if x.dtype == torch.bool else 1
            x = x.unsqueeze(axis) if dim is None else x.movedim(dim, axis)
            sizes = [*x.shape]
            sizes[axis] = n
            if axis == 2:
                sizes[3] = wide[0].shape[1] // n
            wide[i] = x.expand(sizes).flatten(axis, axis + 1)
    return wide


def check_call(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> None:
    """Refuse tensors that do not fit one another, and rules that cannot be kept."""
    dtypes = torch.float16, torch.bfloat16, torch.float32, torch.float64
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.dtype not in dtypes:
            seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"`{name}` must be a floating-point tensor, but is {seen}")
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"`{name}` is sparse or nested; pass a dense one")
        if (x.dtype, x.device) != (query.dtype, query.device):
            raise TypeError(
                f"`{name}` is {x.dtype} on {x.device}, `query` {query.dtype} on "
                f"{query.device}; use `{name}.to(query)`"
            )
        if x.dim() != 4 or x.shape[1:] != query.shape[1:] or 0 in query.shape[2:]:
            raise ValueError(
                f"`{name}` has shape {list(x.shape)}, `query` {list(query.shape)}, not "
                f"[seq_len, batch_size, heads, d_k] with the last three alike"
            )
    (q_len, batch_size), k_len = query.shape[:2], key.shape[0]
    if value.shape[0] != k_len:
        raise ValueError(
            f"`value` has length {len(value)}, `key` {k_len}; make them equal"
        )
    p = rule.dropout_prob
    if type(p) not in (int, float) or not 0 <= p <= 1:
        raise ValueError(f"`dropout_prob` (={p!r}) must lie between 0 and 1")
    if rule.mask is None:
        return
    if not isinstance(rule.mask, Tensor) or rule.mask.dtype != torch.bool:
        seen = rule.mask.dtype if isinstance(rule.mask, Tensor) else type(rule.mask)
        raise TypeError(f"`mask` is {seen}, not a bool tensor; write `mask == 1`")
    if rule.mask.layout != torch.strided or rule.mask.is_nested:
        raise TypeError("`mask` is sparse or nested; pass a dense one")
    if rule.mask.device != query.device:
        raise ValueError(f"`mask` is on {rule.mask.device}, not on {query.device}")
    n_q, n_k, n_b = rule.mask.shape if rule.mask.dim() == 3 else (0, -1, 0)
    if n_q not in (1, q_len) or n_k != k_len or n_b not in (1, batch_size):
        raise ValueError(
            f"`mask` has shape {list(rule.mask.shape)}, not [q_len or 1, k_len, "
            f"batch_size or 1] = [{q_len} or 1, {k_len}, {batch_size} or 1]"
        )
