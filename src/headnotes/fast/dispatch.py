r"""# Choosing a kernel

All ways to attend give the same answer; which is the fastest depends on the call. What
was [measured](../../compare/benchmarks.md) says:

- **Few keys, on a CPU, while something learns or with dropout:** by plain products. The
  way back through PyTorch's kernel takes small steps, in half precision very slowly.
  Few are 128 keys.
- **Dropout over more keys, on a CPU:** [by blocks](blockwise.md). PyTorch's kernel has
  none there, and gives way to one that writes out all weights.
- **Causal, on a CPU, with a mask, or with more keys than queries or fewer:** by blocks.
  The causality of PyTorch's kernel is aligned with the top left corner, and excludes a
  mask; written out as one, it would cost the forbidden half.
- **A mask, on a CPU, where a key is no number:** by blocks, which clear what is
  forbidden. PyTorch's kernel adds minus infinity to it, and NaN remains NaN.
- **Weights to be shown:** by blocks too, which copy them while they are in the cache,
  but by plain products for short sequences.
- **All else:** `F.scaled_dot_product_attention`, which on a CPU takes any strides: a
  copy of the heads, one after the other, pays only for long sequences and where there
  is a way back. A mask costs little, as long as it is not written out for every head.

Source: the notes of
[scaled_dot_product_attention](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html)
in PyTorch's documentation, and its CPU kernel, `FlashAttentionKernel.cpp`.
"""

# What is imported with a dot stands beside this file; nothing else is needed.
import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from headnotes.fast.blocks import Rule, chances, kept
from headnotes.fast.blockwise import attend, attend_and_show, product

# Up to so few keys, neither blocks nor copies save anything. From so many queries on,
# copies pay even where there is no way back.
FEW, LONG = 128, 2048


def read(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_k]
    rule: Rule,
) -> Tensor:
    r"""The context, by the kernel that serves the call best.

    Whichever it is, a query that may read nothing reads zero:

    >>> query, key = torch.randn(8, 2, 7, 11).split([3, 5])
    >>> value = torch.randn(5, 2, 7, 11)
    >>> mask = torch.ones(3, 5, 2).bool()
    >>> mask[1, :, 0] = False
    >>> context = read(query, key, value, Rule(mask))
    >>> context.any(dim=-1).all(dim=-1)
    tensor([[ True,  True],
            [False,  True],
            [ True,  True]])
    """
    (q_len, batch_size, heads, _), k_len = query.shape, key.shape[0]
    if by_products(query, key, value, rule):
        return read_plainly(query, key, value, rule)[0]
    if by_blocks(query, key, rule):
        return attend(query, key, value, seeded(rule))
    mask, is_causal = rule.mask, rule.is_causal
    if is_causal and (mask is not None or q_len != k_len):
        # PyTorch's own causality meets in the top left corner, and bears no mask.
        mask, is_causal = with_past(rule, query, key), False
    # Batch items and heads fold into one axis, unless a mask tells items and queries
    # apart: written out for all heads, it would be as large as the weights.
    keep, empty = None, None
    apart = mask is not None and mask.shape[0] > 1 and mask.shape[2] > 1
    sizes = (batch_size, heads) if apart else (1, batch_size * heads)
    q, k, v = (
        x.reshape(x.shape[0], *sizes, x.shape[-1]).permute(1, 2, 0, 3)
        for x in (query, key, value)
    )  # [..., d_k]
    if far(q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if mask is not None:
        # A row without keys may read all on the way in and nothing on the way out:
        # kernels differ in what they make of an empty one.
        some = mask.any(dim=1)  # [q_len, batch_size]
        if not surely(some.all()):
            mask, empty = mask | ~some.unsqueeze(1), ~some
        keep = mask.permute(2, 0, 1)  # [batch_size, q_len, k_len]
        if not apart and keep.shape[0] > 1:
            keep = keep.repeat_interleave(heads, dim=0)
        keep = keep.unsqueeze(1 if apart else 0)  # [batch_size, ..., q_len, k_len]
    context = F.scaled_dot_product_attention(
        q, k, v, keep, dropout_p=rule.dropout_prob, is_causal=is_causal
    )  # [..., q_len, d_k]
    context = context.permute(2, 0, 1, 3).reshape(query.shape)
    if empty is not None:
        context = context.masked_fill(empty[..., None, None], 0)
    return context  # [q_len, batch_size, heads, d_k]


def read_and_show(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_k]
    rule: Rule,
    average: bool,
) -> tuple[Tensor, Tensor]:
    r"""The context, and the weights in the core's order of axes.

    Many keys are read by blocks, few plainly:

    >>> query, key = torch.randn(134, 2, 7, 11).split([3, 131])
    >>> x = query, key, key
    >>> many = read_and_show(*x, Rule(), average=False)
    >>> few = read_plainly(*x, Rule())
    >>> torch.allclose(many[0], few[0], atol=1e-5)
    True
    >>> many[1].shape
    torch.Size([3, 131, 2, 7])
    >>> mean = read_and_show(*x, Rule(), average=True)[1]
    >>> torch.allclose(mean, many[1].mean(-1))
    True
    """
    if eager(query) and key.shape[0] > FEW:
        context, weights = attend_and_show(
            query, key, value, seeded(rule), average=average
        )  # [q_len, batch_size, heads, d_k], [batch_size, ..., q_len, k_len]
    else:
        context, weights = read_plainly(query, key, value, rule)
        weights = weights.mean(1) if average else weights
    weights = weights.movedim((-2, -1), (0, 1))  # [q_len, k_len, batch_size, ...]
    return context, weights


def read_plainly(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_k]
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    r"""All weights at once, so that a loss may look at them too.

    Three queries meet five keys, with causality and a mask; query 1 is left with none:

    >>> query, key = torch.randn(8, 2, 7, 11).split([3, 5])
    >>> mask = torch.ones(3, 5, 2).bool()
    >>> mask[1, :4] = False
    >>> rule = Rule(mask, is_causal=True)
    >>> x = query, key, key
    >>> context, weights = read_plainly(*x, rule)
    >>> (weights[0, 0] > 0).int()
    tensor([[1, 1, 1, 0, 0],
            [0, 0, 0, 0, 0],
            [1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    _, batch_size, heads, d_k = query.shape
    q, k, v = (
        x.flatten(1, 2).transpose(0, 1) for x in (query, key, value)
    )  # [batch_size * heads, ..., d_k]
    # What is added costs one pass, forward and backward; a fill costs several.
    bias, empty = bias_of(rule, query, key)  # [..., k_len], [..., 1]
    scale = 1 / math.sqrt(d_k)
    if bias is None:
        scores = product(q, k.mT, scale)  # [..., q_len, k_len]
    else:
        scores = torch.baddbmm(bias, q, k.mT, alpha=scale)  # [..., q_len, k_len]
        if spoilt(query, key, rule):
            scores = scores.masked_fill(bias < 0, -math.inf)
    weights = scores.softmax(-1)
    weights = weights.view(batch_size, heads, *scores.shape[1:])  # [..., q_len, k_len]
    if empty is not None:
        weights = weights.masked_fill(empty, 0)
    used, gain = drop(weights.flatten(0, 1), rule.dropout_prob)  # [..., q_len, k_len]
    context = product(used, v, gain)  # [batch_size * heads, q_len, d_k]
    context = context.transpose(0, 1).reshape(query.shape)
    return context, weights  # [q_len, batch_size, heads, d_k], [batch_size, heads, ...]


def bias_of(
    rule: Rule,
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
) -> tuple[Tensor | None, Tensor | None]:
    """Minus infinity for the scores that are forbidden; and which rows are empty.

    An empty row is allowed all of them: softmax makes no number of none.

    >>> query, key = torch.randn(8, 2, 7, 11).split([3, 5])
    >>> bias_of(Rule(is_causal=True), query, key)[0]
    tensor([[[0., 0., 0., -inf, -inf],
             [0., 0., 0., 0., -inf],
             [0., 0., 0., 0., 0.]]])
    """
    q_len, k_len, heads = query.shape[0], key.shape[0], query.shape[2]
    if rule.is_causal and rule.mask is None and q_len <= k_len:
        # Each query has a past, so that no row is empty.
        bias = query.new_full((1, q_len, k_len), -math.inf)  # [1, q_len, k_len]
        return bias.triu_(1 + k_len - q_len), None
    mask = with_past(rule, query, key) if rule.is_causal else rule.mask
    if mask is None:
        return None, None
    mask = mask.permute(2, 0, 1)  # [..., q_len, k_len]
    empty = None
    some = mask.any(-1, keepdim=True)  # [..., q_len, 1]
    if not surely(some.all()):
        mask = mask | ~some
        empty = ~some.unsqueeze(1)  # [..., q_len, 1]
    bias = query.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)
    if bias.shape[0] > 1:
        bias = bias.repeat_interleave(heads, dim=0)  # [batch_size * heads, ...]
    return bias, empty


def drop(weights: Tensor, p: float) -> tuple[Tensor, float]:
    r"""Dropout by draws that are cheap on a CPU, and the gain that is left to apply.

    >>> used, gain = drop(torch.ones(100_000), 0.25)
    >>> round(gain, 3), round(used.mean().item() * gain, 1)
    (1.333, 1.0)
    """
    if not p:
        return weights, 1.0
    if not eager(weights):
        return F.dropout(weights, p), 1.0
    dropped, gain = chances(p)
    ends, n = torch.iinfo(torch.int64), weights.numel() // 4 + 1
    words = torch.randint(ends.min, ends.max, (n,))  # [n]
    return weights * kept(words, weights, dropped), gain


def seeded(rule: Rule) -> Rule:
    """A rule with draws of its own, where there is dropout.

    One number of the global generator: so `torch.manual_seed` fixes the draws, and
    checkpointing, which sets that generator back, repeats them.
    """
    return (
        rule._replace(seed=int(torch.randint(2**62, ()))) if rule.dropout_prob else rule
    )


def with_past(rule: Rule, query: Tensor, key: Tensor) -> Tensor:
    """The mask that says what `is_causal` says, and what the rule's own mask says."""
    q_len, k_len = query.shape[0], key.shape[0]
    past = query.new_ones(q_len, k_len, dtype=torch.bool)  # [q_len, k_len]
    past = past.tril(k_len - q_len).unsqueeze(-1)  # [q_len, k_len, 1]
    return past if rule.mask is None else past & rule.mask  # [q_len, k_len, ...]


def by_products(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> bool:
    """Whether plain products serve best: for few keys, with dropout or a way back."""
    if not eager(query) or key.shape[0] > FEW:
        return False
    return rule.dropout_prob > 0 or learns(query, key, value)


def by_blocks(query: Tensor, key: Tensor, rule: Rule) -> bool:
    """Whether blocks serve better than PyTorch's kernel."""
    if not eager(query):
        return False
    if rule.dropout_prob:
        return key.shape[0] > FEW
    if not key.shape[0]:
        return True  # to read nothing is zero, even for a query that is no number
    if rule.mask is not None:
        return rule.is_causal or spoilt(query, key, rule)
    return rule.is_causal and query.shape[0] != key.shape[0]


def far(query: Tensor, *others: Tensor) -> bool:
    """Whether to copy the heads, `[..., seq_len, d_k]`, so that each lies together.

    Its keys lie a whole position apart, in the end each on a page of memory of its own.
    Side by side they are found faster, on the way back above all.
    """
    if not eager(query):
        return False
    q_len = query.shape[-2]
    return q_len > FEW if learns(query, *others) else q_len >= LONG


def eager(x: Tensor) -> bool:
    """Whether a call runs now and here: on a CPU, not compiled."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def learns(*tensors: Tensor) -> bool:
    """Whether there will be a way back."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def spoilt(query: Tensor, key: Tensor, rule: Rule) -> bool:
    """Whether a score may be no number, which nothing added to it can forbid."""
    return eager(key) and not rule.finite and not finite(query, key)


def finite(*tensors: Tensor) -> bool:
    """Whether all are known to hold numbers only: a sum tells it in one reading."""
    try:
        return all(eager(x) and math.isfinite(total(x)) for x in set(tensors))
    except RuntimeError:  # under `vmap` there is no single answer
        return False


def total(x: Tensor) -> float:
    """The sum; that of many numbers in float16 need not be one, so it is wider."""
    wide = torch.float32 if x.dtype == torch.float16 else None
    return x.sum(dtype=wide).item()


def surely(condition: Tensor) -> bool:
    """Whether `condition` is known to hold: on a CPU, where a look costs little."""
    if not eager(condition):
        return False
    try:
        return bool(condition)
    except RuntimeError:  # under `vmap` there is no single answer
        return False
