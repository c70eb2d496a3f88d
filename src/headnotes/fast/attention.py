r"""# Choosing an attention kernel

The function `attention` computes scaled dot-product attention, from queries, keys and
values that are already projected and split into heads. It chooses between three
methods. All give the same result; they differ in speed, in memory, and in what they
support:

- **fused**: `F.scaled_dot_product_attention`, PyTorch's own kernel. It never holds all
  weights at once. On a CPU it has no dropout and does not return the weights, and
  `is_causal` works only without a mask, for as many keys as queries.
- [**materialized**](formula.md): the formula, with all weights in memory. It supports
  everything, including forward-mode and second derivatives, and is the fastest method
  to train on short sequences.
- [**blockwise**](blockwise.md): a kernel of our own, in plain PyTorch. It computes the
  weights of 128 queries at a time, and serves what the fused kernel lacks on a CPU.

One table, `DISPATCH`, chooses the method of a call: that of the first row whose
condition holds. The conditions come from
[measurements](../../compare/benchmarks.md).

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.1, for what all methods compute.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from headnotes.fast.blockwise import blockwise
from headnotes.fast.formula import (
    Call,
    additive_mask,
    is_traced,
    is_transformed,
    isolate_nonfinite,
    materialized,
    needs_recorded_gradients,
    recorded_gradients,
    squares_are_finite,
    unmask_fully_masked_rows,
    zero_hidden_keys,
)

# Computes the context, `[q_len, batch_size, heads, d_k]`, and if needed the weights,
# `[q_len, k_len, batch_size, heads]`, or their mean over the heads.
Method = Callable[[Call], tuple[Tensor, Tensor | None]]


def attention(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, kv_heads, d_k]
    value: Tensor,  # [k_len, batch_size, kv_heads, d_v]
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: nn.Module | None = None,
    need_weights: bool = False,
    average_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    r"""The context, `[q_len, batch_size, heads, d_v]`, and the weights if needed.

    `mask` is bool, `[q_len or 1, k_len, batch_size or 1]`, True = may attend. With
    `is_causal` no query attends to a later key; the last query is aligned with the last
    key. With `window`, a query attends to keys that are fewer than `window` positions
    away. A fully masked row has a context of zero, also where a value that others may
    attend to is NaN. The weights are those before dropout, `[q_len, k_len, batch_size,
    heads]`, or their mean over the heads.

    Consecutive query heads share a head of keys and values if there are fewer of those.
    Scores are, in this order, multiplied by `scale`, bounded by `soft_cap`, and added
    to `bias`, `[q_len or 1, k_len, batch_size or 1, heads or 1]`, which must be finite.
    `sinks`, `[heads]`, are logits without a value. The inputs are not checked here, but
    in `MultiHeadAttention`.

    >>> query, key = torch.randn(8, 2, 7, 11).split([3, 5])
    >>> value = torch.randn(5, 2, 7, 11)
    >>> mask = torch.ones(3, 5, 2).bool()
    >>> mask[1, :, 0] = False
    >>> context, _ = attention(query, key, value, mask=mask)
    >>> context.any(dim=-1).all(dim=-1)
    tensor([[ True,  True],
            [False,  True],
            [ True,  True]])
    >>> _, weights = attention(query, key, value, mask=mask, need_weights=True)
    >>> weights.shape
    torch.Size([3, 5, 2, 7])

    Six heads of queries share two of keys and values; a window ends before the others:

    >>> query, key = torch.randn(3, 2, 6, 11), torch.randn(5, 2, 2, 11)
    >>> value = torch.randn(5, 2, 2, 13)
    >>> options = {"is_causal": True, "window": 2, "need_weights": True}
    >>> context, weights = attention(query, key, value, **options)
    >>> same, _ = attention(query, key[1:], value[1:], **options)
    >>> context.shape, torch.equal(context, same)
    (torch.Size([3, 2, 6, 13]), True)
    >>> (weights[:, :, 0, 0] > 0).int()
    tensor([[0, 1, 1, 0, 0],
            [0, 0, 1, 1, 0],
            [0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    dropout = nn.Identity() if dropout is None else dropout
    q_len, k_len = query.shape[0], key.shape[0]
    # The last query may attend to all keys.
    is_causal = bool(is_causal and q_len != 1)
    before = 0
    if window is not None:
        # Keys before the window of the first query; all others are in a window.
        before = max(0, k_len - q_len - window + 1)
        key, value = key[before:], value[before:]  # [k_len - before, ...]
        mask = mask if mask is None else mask[:, before:]
        bias = bias if bias is None else bias[:, before:]
        window = window if window < max(q_len, k_len - before) else None
    given = (x for x in (query, key, value, mask, bias, sinks) if x is not None)
    transformed = is_transformed(*given)
    eager = query.device.type == "cpu" and not (transformed or is_traced())
    call = Call(
        query,
        key,
        value,
        mask,
        is_causal=is_causal,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        bias=bias,
        sinks=sinks,
        dropout=dropout,
        need_weights=need_weights,
        average_weights=average_weights,
        transformed=transformed,
        eager=eager,
    )
    if eager and bias is not None and bias.is_inference() and call.needs_grad:
        # A bias that a call in inference mode has left behind cannot be saved.
        call = replace(call, bias=bias.clone())
    if mask is not None and not (
        call.scores_are_finite(query.dtype) and squares_are_finite(value)
    ):
        # Padding may hold anything, even NaN or numbers whose projection overflows.
        key, value = zero_hidden_keys(key, value, mask, is_causal, q_len, window)
        call = replace(call, key=key, value=value)
    method = next(method for method, applies in DISPATCH if applies(call))
    context, weights = method(call)  # [q_len, batch_size, heads, d_v], [q_len, ...]
    if weights is not None and before:
        # The keys that were left out have a weight of zero.
        no_padding = [0, 0] * (weights.dim() - 2)
        weights = F.pad(weights, [*no_padding, before, 0])  # [q_len, k_len, ...]
    return context, weights


def fused(call: Call) -> tuple[Tensor, None]:
    """PyTorch's own kernel, which never holds all weights at once.

    Keys that are hidden from all queries have values of zero. So on a GPU, a sequence
    that is all padding needs no further step:

    >>> query, key = torch.randn(8, 2, 7, 11).split([3, 5])
    >>> mask = torch.tensor([True, False]).expand(1, 5, 2)
    >>> value = torch.randn(5, 2, 7, 11) * mask[0, ..., None, None]
    >>> context, _ = fused(Call(query, key, value, mask, eager=False))
    >>> context.isfinite().all(), context[:, 1].any()
    (tensor(True), tensor(False))
    """
    use_mask = (
        call.mask is not None or call.window is not None or call.causal_needs_mask
    )
    allowed = call.allowed() if use_mask else None  # [..., k_len]
    key, value, factor, empty = call.key, call.value, None, None
    if allowed is not None:
        # Where all queries share one row of the mask, each attends to all keys that are
        # not hidden, and those are zero already.
        if not call.eager and allowed.shape[-2] > 1:
            key, value, factor = isolate_nonfinite(key, value, allowed)
        # The kernel reads the mask for each block of queries, up to 1.2 times as slowly
        # if the keys are not adjacent in memory.
        allowed = allowed.contiguous()  # [..., k_len]
        if call.eager or allowed.shape[-2] > 1:
            allowed, empty = unmask_fully_masked_rows(allowed)  # [..., k_len], [..., 1]
        else:
            # The values of a fully masked row are zero already, and so is their mean.
            allowed = allowed == allowed.any(-1, keepdim=True)  # [..., k_len]
    added = allowed  # [..., k_len]
    if call.bias is not None:
        added = call.bias.permute(2, 3, 0, 1).to(call.query.dtype)
        if allowed is not None:
            added = added.masked_fill(~allowed, -math.inf)
    q, k, v = (
        x.permute(1, 2, 0, 3) for x in (call.query, key, value)
    )  # [batch_size, ..., d_k]
    is_causal = call.is_causal and not use_mask
    if call.eager and (call.needs_grad or call.sinks is not None):
        # In the projections, two positions of one head are `heads * d_k` elements
        # apart, in the end on different memory pages. Contiguous heads are faster,
        # mostly in the backward pass. The kernel relies on a last stride of 1.
        q, k, v = (
            x.contiguous() if call.needs_grad or x.stride(-1) != 1 else x
            for x in (q, k, v)
        )  # [batch_size, ..., d_k]
        context = FusedOnCPU.apply(  # type: ignore[no-untyped-call]
            q, k, v, added, call.sinks, is_causal, call.score_scale
        )  # [batch_size, heads, q_len, d_k]
    else:
        context = F.scaled_dot_product_attention(
            q,
            k,
            v,
            added,
            dropout_p=call.dropout_prob,
            is_causal=is_causal,
            scale=call.scale,
            enable_gqa=bool(call.groups > 1),
        )  # [batch_size, heads, q_len, d_k]
    if empty is not None:
        context = context.masked_fill(empty, 0)
    if factor is not None:
        context = context * factor
    return context.permute(2, 0, 1, 3), None  # [q_len, batch_size, heads, d_k]


# The method of the first row whose condition holds computes the call.
#
# | method | for | because |
# |---|---|---|
# | `materialized` | transforms, mixed dtypes, custom dropout | plain operators only |
# | `materialized` | empty sequences or batches | the fused kernel divides by sizes |
# | `materialized` | weights, compiled or not on a CPU | the others return none there |
# | `materialized` | soft cap or sinks, compiled or not on a CPU | PyTorch has neither |
# | `fused` | all other calls, compiled or not on a CPU | PyTorch picks a kernel |
# | `materialized` | few keys, training | 2 to 3.5 times as fast in half precision |
# | `materialized` | few keys, weights or dropout | all weights fit into the cache |
# | `blockwise` | weights or dropout | the fused kernel has neither on a CPU |
# | `blockwise` | causal with a mask, or not square | it skips the masked half |
# | `blockwise` | a mask, and scores may overflow | NaN plus minus infinity is NaN |
# | `blockwise` | window, soft cap, learned bias, other `d_v` | it has none of them |
# | `fused` | all other calls | it is the fastest |
#
# `MultiHeadAttention.decode` calls the fused kernel directly for one token.
DISPATCH: list[tuple[Method, Callable[[Call], bool]]] = [
    (
        materialized,
        lambda call: (
            call.transformed or call.has_custom_dropout or call.has_mixed_dtypes
        ),
    ),
    (materialized, lambda call: call.query.numel() == 0 or call.key.numel() == 0),
    (materialized, lambda call: not call.eager and call.need_weights),
    (materialized, lambda call: not call.eager and call.has_more_than_sdpa),
    (fused, lambda call: not call.eager),
    (materialized, lambda call: call.has_few_keys and call.needs_grad),
    (
        materialized,
        lambda call: call.has_few_keys and (call.need_weights or call.dropout_prob > 0),
    ),
    (blockwise, lambda call: call.need_weights or call.dropout_prob > 0),
    (blockwise, lambda call: call.causal_needs_mask),
    (blockwise, lambda call: call.mask is not None and call.scores_may_overflow),
    (blockwise, lambda call: call.has_more_than_flash),
    (fused, lambda call: True),
]


class FusedOnCPU(torch.autograd.Function):
    """PyTorch's fused kernel, with the second derivative that it lacks.

    If the backward pass is itself recorded (`create_graph=True`), it differentiates the
    formula instead.

    >>> query = torch.randn(3, 2, 7, 11).requires_grad_()
    >>> key, value = torch.randn(2, 131, 2, 7, 11)
    >>> mask = torch.ones(1, 131, 2).bool()
    >>> context, _ = attention(query, key, value, mask=mask)
    >>> loss = context.pow(3).sum()
    >>> (first,) = torch.autograd.grad(loss, query, create_graph=True)
    >>> (second,) = torch.autograd.grad(first.sum(), query)
    >>> second.abs().sum() > 0
    tensor(True)

    Seven heads of queries share one of keys and values. With a sink they have half of
    the weight, where all scores are zero:

    >>> value = torch.ones(131, 2, 1, 11)
    >>> sinks = torch.full((7,), 131.0).log().requires_grad_()
    >>> context, _ = attention(0 * query, 0 * value, value, sinks=sinks)
    >>> torch.allclose(context, torch.tensor(0.5))
    True
    >>> context.sum().backward()
    >>> sinks.grad[0] / context[:, :, 0].numel()
    tensor(-0.2500)
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [batch_size, heads, q_len, d_k]
        key: Tensor,  # [batch_size, kv_heads, k_len, d_k]
        value: Tensor,  # [batch_size, kv_heads, k_len, d_k]
        mask: Tensor | None,  # [..., k_len]
        sinks: Tensor | None,  # [heads]
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        if mask is not None and mask.dtype == torch.bool:
            mask = additive_mask(mask, query.dtype)  # [..., k_len]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        x = query, key, value
        context, logsumexp = kernel(
            *x, 0.0, is_causal, attn_mask=mask, scale=scale
        )  # [batch_size, heads, q_len, d_k], [batch_size, ...]
        if sinks is not None:
            # The sum that divides the weights gets one more term. The kernel's backward
            # pass divides by the sum that it is given, so it is right as it is.
            total = sinks.view(-1, 1).to(logsumexp.dtype)  # [heads, ...]
            share = (
                (logsumexp - total).sigmoid().unsqueeze(-1)
            )  # [batch_size, heads, q_len, ...]
            context = context * share.to(context.dtype)  # [..., q_len, d_k]
            logsumexp = torch.logaddexp(logsumexp, total)
        ctx.save_for_backward(query, key, value, mask, sinks, context, logsumexp)
        ctx.is_causal, ctx.scale = is_causal, scale
        result: Tensor = context  # [batch_size, heads, q_len, d_k]
        return result

    @staticmethod
    def backward(
        ctx: Any,
        grad_context: Tensor,  # [batch_size, heads, q_len, d_k]
    ) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks, context, logsumexp = ctx.saved_tensors
        x = query, key, value
        if needs_recorded_gradients(grad_context):
            with torch.enable_grad():
                q, k, v = (
                    each.permute(2, 0, 1, 3) for each in x
                )  # [q_len, ..., d_k], [k_len, ..., d_k], [k_len, ..., d_k]
                bias = (
                    None if mask is None else mask.permute(2, 3, 0, 1)
                )  # [1, k_len, ...]; or q_len
            call = Call(
                q,
                k,
                v,
                is_causal=ctx.is_causal,
                scale=ctx.scale,
                bias=bias,
                sinks=sinks,
            )
            grad = grad_context.permute(2, 0, 1, 3)  # [q_len, batch_size, heads, d_k]
            *grads, grad_sinks = recorded_gradients([*x, sinks], call, grad)
            return *grads, None, grad_sinks, None, None
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = backward(
            grad_context,
            *x,
            context,
            logsumexp,
            0.0,
            ctx.is_causal,
            attn_mask=mask,
            scale=ctx.scale,
        )
        grad_sinks = None
        if sinks is not None:
            # The value of a sink is zero, so the weight's own gradient is, too.
            total = sinks.view(-1, 1)  # [heads, 1]
            weights = (total - logsumexp).exp()  # [batch_size, heads, q_len]
            inner = (grad_context * context).sum(-1)  # [batch_size, heads, q_len]
            grad_sinks = -(weights * inner).sum((0, 2)).to(sinks.dtype)  # [heads]
        return *grads, None, grad_sinks, None, None
