r"""# Choosing an attention kernel

The function `attention` computes scaled dot-product attention, from queries, keys and
values that are already projected and split into heads. It chooses between three
methods. All give the same result; they differ in speed, in memory, and in what they
support:

- **fused**: `F.scaled_dot_product_attention`, PyTorch's own kernel. It never holds all
  weights at once. On a CPU it has no dropout and does not return the weights, and
  `is_causal` works only without a mask, for as many keys as queries.
- **materialized**: the formula, with all weights in memory. It supports everything,
  including forward-mode and second derivatives, and is the fastest method to train on
  short sequences.
- **blockwise**: this module's own kernel, in plain PyTorch. It computes the weights of
  128 queries at a time, uses them while they are in the processor's cache, and
  recomputes them in the backward pass. It serves what the fused kernel lacks on a CPU.

One table, `DISPATCH`, chooses the method of a call: that of the first row whose
condition holds. The conditions come from
[measurements](../../compare/benchmarks.md).

Source: [FlashAttention](https://arxiv.org/abs/2205.14135), Dao et al. 2022, appendix B,
for the backward pass and for regenerating dropout masks;
[Self-attention Does Not Need O(n²) Memory](https://arxiv.org/abs/2112.05682), Rabe and
Staats 2021, section 2, with whole rows of keys in a block.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812

# Up to this many keys, neither tiles nor copies of the heads save any time.
SHORT_KEYS = 128

# The number of queries in a tile, of scores in its buffer, and the least number of
# heads in it, over which the CPU cores are parallel. 1 MiB of float32 fits into the
# cache of a core, beside the keys and values. All three values were found by measuring.
TILE_ROWS = 128
TILE_SCORES = 1 << 18
TILE_HEADS = 8

# Computes the context, `[q_len, batch_size, heads, d_k]`, and if needed the weights,
# `[q_len, k_len, batch_size, heads]`, or their mean over the heads.
Method = Callable[["Call"], tuple[Tensor, Tensor | None]]

# Applies dropout: the weights, some of them zero, and the factor that rescales them.
Drop = Callable[[Tensor], tuple[Tensor, float]]


@dataclass
class Call:
    """One call of `attention`, and the properties that the choice of a method uses.

    Its tensors are those of `attention`, with the same shapes.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    dropout: nn.Module
    need_weights: bool
    average_weights: bool

    # Inside of `vmap`, `jvp` or a tracer, in forward mode, or with a tensor subclass.
    transformed: bool
    # Eager on a CPU, where values can be inspected without a synchronization.
    eager: bool

    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def groups(self) -> int:
        """The number of query heads that share a head of keys and values."""
        return self.query.shape[2] // max(1, self.key.shape[2])

    @property
    def score_scale(self) -> float:
        r"""The factor of the dot products, $1 / \sqrt{d_k}$ by default."""
        d_k = self.query.shape[-1]
        return 1 / math.sqrt(d_k) if self.scale is None else self.scale

    @property
    def has_more_than_sdpa(self) -> bool:
        """Whether the call has what PyTorch's kernel has in no form."""
        return self.soft_cap is not None or self.sinks is not None

    @property
    def has_more_than_flash(self) -> bool:
        """Whether the call has what PyTorch's kernel of the CPU lacks or does slowly.

        It adds a mask for a window, and computes all scores all the same.
        """
        needs_bias_grad = self.bias is not None and self.bias.requires_grad
        return (
            self.window is not None
            or self.soft_cap is not None
            or (needs_bias_grad and torch.is_grad_enabled())
            or self.query.shape[-1] != self.value.shape[-1]
        )

    @property
    def has_custom_dropout(self) -> bool:
        """Whether the dropout is another module than `nn.Dropout`, or has a hook.

        A hook may change what a module returns, so the module must be called.
        """
        module = self.dropout
        hooked = module._forward_hooks or module._forward_pre_hooks or has_global_hook()
        return bool(hooked) or type(module) not in (nn.Dropout, nn.Identity)

    @property
    def dropout_prob(self) -> float:
        """The probability of plain dropout; 0 in evaluation.

        The mode of the dropout module decides, as in the core: Monte Carlo dropout sets
        the mode of this module only.
        """
        module = self.dropout
        return module.p if type(module) is nn.Dropout and module.training else 0.0

    @property
    def has_mixed_dtypes(self) -> bool:
        """Whether dtypes differ, as projections of several kinds do under autocast."""
        return not self.query.dtype == self.key.dtype == self.value.dtype

    @property
    def has_few_keys(self) -> bool:
        """Whether there are so few keys that all weights fit into the cache."""
        return self.key.shape[0] <= SHORT_KEYS

    @property
    def needs_grad(self) -> bool:
        """Whether autograd records this call."""
        inputs = self.query, self.key, self.value, self.bias, self.sinks
        return torch.is_grad_enabled() and any(
            x.requires_grad for x in inputs if x is not None
        )

    @property
    def causal_needs_mask(self) -> bool:
        """Whether the fused kernel would need the causal mask as a tensor.

        Its `is_causal` aligns the first query with the first key, not the last with the
        last, and cannot be combined with a mask or a bias.
        """
        unequal = self.query.shape[0] != self.key.shape[0]
        masked = self.mask is not None or self.bias is not None
        return self.is_causal and (masked or unequal)

    @cached_property
    def largest_score(self) -> float:
        r"""An upper bound of all scores: $d_k \max|q| \max|k|$, or NaN if unknown.

        A factor above 1 and a bias raise it.
        """
        query = max_abs(self.query)
        if not math.isfinite(query):
            # A query with NaN makes its own row NaN, and affects no other row.
            query = max_abs(self.query.nan_to_num(0.0, 0.0, 0.0))
        score = query * max_abs(self.key) * self.query.shape[-1]
        bias = 0.0 if self.bias is None else max_abs(self.bias)
        return score * max(1.0, abs(self.score_scale)) + bias

    def scores_are_finite(self, dtype: torch.dtype) -> bool:
        """Whether every score is known to be finite in `dtype`.

        Then a mask can be added to the scores (0 or minus infinity), which takes one
        pass over memory instead of several. Otherwise the sum may be NaN.
        """
        return self.eager and self.largest_score <= torch.finfo(dtype).max

    @property
    def scores_may_overflow(self) -> bool:
        """Whether a score may be infinite or NaN in the fused kernel."""
        return not self.scores_are_finite(
            torch.promote_types(self.query.dtype, torch.float32)
        )

    def allowed(self) -> Tensor | None:
        """Mask, causality and window, `[batch_size or 1, 1, q_len or 1, k_len]`."""
        mask = self.mask
        if self.is_causal or self.window is not None:
            q_len = self.query.shape[0]
            band = band_mask(
                q_len, self.key, self.is_causal, self.window
            )  # [q_len, k_len, 1]
            mask = band if mask is None else band & mask  # [q_len, k_len, ...]
        if mask is None:
            return None
        return mask.permute(2, 0, 1).unsqueeze(1)  # [..., k_len]


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
    away. A fully masked row has a context of zero. The weights are those before
    dropout, `[q_len, k_len, batch_size, heads]`, or their mean over the heads.

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

    Six heads of queries share two of keys and values; a window ends before the others:

    >>> query, key = torch.randn(3, 2, 6, 11), torch.randn(5, 2, 2, 11)
    >>> value = torch.randn(5, 2, 2, 13)
    >>> context, _ = attention(query, key, value, is_causal=True, window=2)
    >>> same, _ = attention(query, key[1:], value[1:], is_causal=True, window=2)
    >>> context.shape, torch.equal(context, same)
    (torch.Size([3, 2, 6, 13]), True)
    """
    dropout = nn.Identity() if dropout is None else dropout
    q_len, k_len = query.shape[0], key.shape[0]
    # The last query may attend to all keys.
    is_causal = bool(is_causal and q_len != 1)
    if window is not None:
        # Keys before the window of the first query; all others are in a window.
        before = max(0, k_len - q_len - window + 1)
        key, value = key[before:], value[before:]  # [k_len - before, ...]
        mask = mask if mask is None else mask[:, before:]
        bias = bias if bias is None else bias[:, before:]
        window = window if window < max(q_len, k_len - before) else None
    given = (x for x in (query, key, value, mask, bias, sinks) if x is not None)
    transformed = not torch.compiler.is_compiling() and is_transformed(*given)
    eager = query.device.type == "cpu" and not (transformed or is_traced())
    call = Call(
        query,
        key,
        value,
        mask,
        is_causal,
        dropout,
        need_weights,
        average_weights,
        transformed,
        eager,
        window,
        scale,
        soft_cap,
        bias,
        sinks,
    )
    if mask is not None and not (
        call.scores_are_finite(query.dtype) and squares_are_finite(value)
    ):
        # Padding may hold anything, even NaN or numbers whose projection overflows.
        key, value = zero_hidden_keys(key, value, mask, is_causal, q_len, window)
        call = replace(call, key=key, value=value)
    method = next(method for method, applies in DISPATCH if applies(call))
    return method(call)  # [q_len, batch_size, heads, d_v], [q_len, k_len, ...]


def fused(call: Call) -> tuple[Tensor, None]:
    """PyTorch's own kernel, which never holds all weights at once."""
    use_mask = (
        call.mask is not None or call.window is not None or call.causal_needs_mask
    )
    allowed = call.allowed() if use_mask else None  # [..., k_len]
    key, value, factor, empty = call.key, call.value, None, None
    if allowed is not None:
        if not call.eager:
            key, value, factor = isolate_nonfinite(key, value, allowed)
        allowed, empty = unmask_fully_masked_rows(allowed)  # [..., k_len], [..., 1]
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
        # mostly in the backward pass.
        if call.needs_grad:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
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


def materialized(call: Call) -> tuple[Tensor, Tensor | None]:
    r"""The formula, with all weights in memory.

    Three queries, five keys, causal and masked; the row of query 1 is fully masked:

    >>> query, key = torch.randn(8, 2, 7, 11).split([3, 5])
    >>> mask = torch.ones(3, 5, 2).bool()
    >>> mask[1, :4] = False
    >>> options = {"mask": mask, "is_causal": True, "need_weights": True}
    >>> context, weights = attention(query, key, key, **options)
    >>> (weights[:, :, 0, 0] > 0).int()
    tensor([[1, 1, 1, 0, 0],
            [0, 0, 0, 0, 0],
            [1, 1, 1, 1, 1]], dtype=torch.int32)

    >>> _, mean = attention(query, key, key, average_weights=True, **options)
    >>> torch.allclose(mean, weights.mean(-1))
    True

    Dropout can be replaced by any module. This one does not change the weights:

    >>> context, _ = attention(query, key, key, dropout=nn.ReLU())
    >>> torch.allclose(context, attention(query, key, key)[0], atol=1e-6)
    True

    With grouped heads, a sink that is far above all scores takes the whole weight:

    >>> query, key = torch.randn(3, 2, 6, 11), torch.randn(5, 2, 2, 11)
    >>> value = torch.randn(5, 2, 2, 13).requires_grad_()
    >>> sinks = torch.full((6,), 99.0)
    >>> context, _ = attention(query, key, value, soft_cap=9.0, sinks=sinks)
    >>> context.shape, context.abs().max() < 1e-9
    (torch.Size([3, 2, 6, 13]), tensor(True))
    """
    if call.has_custom_dropout:
        # It receives the weights in the layout of the core.
        def drop(weights: Tensor) -> tuple[Tensor, float]:
            weights = weights.permute(2, 3, 0, 1)  # [q_len, k_len, batch_size, heads]
            weights = call.dropout(weights)  # [q_len, k_len, batch_size, heads]
            weights = weights.permute(2, 3, 0, 1)  # [batch_size, heads, q_len, k_len]
            return weights, 1.0
    else:
        p, is_cpu = call.dropout_prob, call.eager

        def drop(weights: Tensor) -> tuple[Tensor, float]:
            return fast_dropout(weights, p) if is_cpu else (F.dropout(weights, p), 1.0)

    context, weights = formula(
        call, drop
    )  # [q_len, batch_size, heads, ...], [batch_size, heads, q_len, k_len]
    if call.average_weights:
        weights = weights.mean(1, keepdim=True)  # [batch_size, 1, q_len, k_len]
    returned = returned_weights(call, weights)  # [q_len, k_len, batch_size, ...]
    return context, returned


def blockwise(call: Call) -> tuple[Tensor, Tensor | None]:
    r"""One tile of queries at a time; its weights are used while they are in the cache.

    >>> query, key = torch.randn(134, 2, 7, 11).split([3, 131])
    >>> options = {"need_weights": True}
    >>> context, weights = attention(query, key, key, **options)
    >>> weights.shape
    torch.Size([3, 131, 2, 7])
    >>> _, mean = attention(query, key, key, average_weights=True, **options)
    >>> torch.allclose(mean, weights.mean(-1))
    True
    """
    heads = call.query.shape[2]
    shown = 0 if not call.need_weights else 1 if call.average_weights else heads
    threshold = dropout_threshold(call.dropout_prob)
    seed = draw_seed() if threshold else 0
    spec = TileSpec(
        shown,
        call.is_causal,
        call.scores_are_finite(call.query.dtype),
        threshold,
        seed,
        call.window,
        call.scale,
        call.soft_cap,
    )
    apply: Any = Blockwise.apply
    context, weights = apply(
        call.query, call.key, call.value, call.mask, call.bias, call.sinks, *spec
    )  # [q_len, batch_size, heads, ...], [batch_size, shown, q_len, k_len]
    returned = returned_weights(call, weights)  # [q_len, k_len, batch_size, ...]
    return context, returned


def returned_weights(
    call: Call,
    weights: Tensor,  # [batch_size, ..., q_len, k_len]
) -> Tensor | None:
    """The weights as `attention` returns them: sequence first, or None."""
    if not call.need_weights:
        return None
    weights = weights.permute(2, 3, 0, 1)  # [q_len, k_len, batch_size, ...]
    if call.average_weights:
        weights = weights.squeeze(-1)  # [q_len, k_len, batch_size]
    return weights


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


def formula(call: Call, drop: Drop) -> tuple[Tensor, Tensor]:
    """The context, `[q_len, batch_size, heads, d_k]`, and the weights, heads first."""
    q_len, batch_size, heads, _ = call.query.shape
    q, k, v = (
        x.flatten(1, 2).transpose(0, 1) for x in (call.query, call.key, call.value)
    )  # [batch_size * heads, q_len, d_k], [..., k_len, d_k], [..., k_len, d_v]
    q = merge_groups(q, call.groups)  # [..., d_k]
    allowed, empty = call.allowed(), None  # [..., k_len]
    if allowed is not None:
        allowed, empty = unmask_fully_masked_rows(allowed)  # [..., k_len], [..., 1]
    plain = call.soft_cap is None and call.bias is None
    adds = allowed is not None and plain and call.scores_are_finite(q.dtype)
    if allowed is not None and adds:
        # Adding takes one pass, forward and backward; filling takes several.
        bias = additive_mask(allowed, q.dtype)  # [..., k_len]
        copies = heads if bias.shape[0] > 1 else call.groups
        rows = q_len if call.groups > 1 else -1
        bias = bias.expand(-1, copies, rows, -1).flatten(0, 1)  # [..., k_len]
        bias = merge_groups(bias, call.groups)  # [..., k_len]
        scores = torch.baddbmm(bias, q, k.mT, alpha=call.score_scale)  # [..., k_len]
    else:
        scores = scaled_bmm(q, k.mT, call.score_scale)  # [..., k_len]
    sizes = batch_size, heads, q_len, k.shape[1]
    scores = scores.view(sizes)  # [batch_size, heads, q_len, k_len]
    if call.soft_cap is not None:
        scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
    if call.bias is not None:
        scores = scores + call.bias.permute(2, 3, 0, 1).to(scores.dtype)
    if allowed is not None and not adds:
        scores = scores.masked_fill(~allowed, -math.inf)
        if empty is not None:
            # The scores of an unmasked row may be NaN or infinite.
            scores = scores.masked_fill(empty, 0)
    weights = scores.softmax(-1)  # [batch_size, heads, q_len, k_len]
    if call.sinks is not None:
        weights = weights * share_of_keys(scores, call.sinks.view(-1, 1, 1))
    if empty is not None:
        weights = weights.masked_fill(empty, 0)
    dropped, factor = drop(weights)  # [batch_size, heads, q_len, k_len]
    dropped = dropped.flatten(0, 1)  # [batch_size * heads, q_len, k_len]
    context = scaled_bmm(merge_groups(dropped, call.groups), v, factor)  # [..., d_v]
    context = context.view(*sizes[:3], v.shape[-1])  # [batch_size, ..., q_len, d_v]
    context = context.permute(2, 0, 1, 3)  # [q_len, batch_size, heads, d_v]
    return context, weights


def merge_groups(
    x: Tensor,
    groups: int,
) -> Tensor:
    """Take the query heads that share keys and values for further rows of one head.

    So one product serves them all, and no key is repeated.

    >>> merge_groups(torch.arange(12).view(4, 3, 1), 2).squeeze(-1)
    tensor([[ 0,  1,  2,  3,  4,  5],
            [ 6,  7,  8,  9, 10, 11]])
    """
    if groups == 1:
        return x
    _, rows, columns = x.shape
    return x.reshape(x.shape[0] // groups, groups * rows, columns)  # [..., columns]


def share_of_keys(scores: Tensor, sinks: Tensor) -> Tensor:
    r"""The weight that the keys have together where a sink has the rest.

    With $Z = \sum_j e^{S_j}$ and a sink $s$, a weight is $e^{S_j} / (Z + e^s)$: that of
    the softmax, multiplied by $Z / (Z + e^s) = \sigma(\log Z - s)$.

    >>> share_of_keys(torch.zeros(4), torch.zeros(1))
    tensor([0.8000])
    """
    wide = torch.promote_types(scores.dtype, torch.float32)
    total = scores.to(wide).logsumexp(-1, keepdim=True)  # [..., 1]
    return (total - sinks.to(wide)).sigmoid().to(scores.dtype)


# Masks ------------------------------------------------------------------------------


def band_mask(q_len: int, key: Tensor, is_causal: bool, window: int | None) -> Tensor:
    """Causality and window as a mask: `[q_len, k_len, 1]`.

    >>> band_mask(3, torch.zeros(5), True, 2).squeeze(-1).int()
    tensor([[0, 1, 1, 0, 0],
            [0, 0, 1, 1, 0],
            [0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    k_len = key.shape[0]
    band = torch.ones(
        q_len, k_len, dtype=torch.bool, device=key.device
    )  # [q_len, k_len]
    band = cut_band(band, k_len - q_len, is_causal, window)
    return band.unsqueeze(-1)  # [q_len, k_len, 1]


def cut_band(
    mask: Tensor, position: int, is_causal: bool, window: int | None
) -> Tensor:
    """Keep the band of a mask whose first query has the position of key `position`."""
    if is_causal:
        mask = mask.tril(position)
    elif window is not None:
        mask = mask.tril(position + window - 1)
    return mask if window is None else mask.triu(position - window + 1)


def unmask_fully_masked_rows(allowed: Tensor) -> tuple[Tensor, Tensor | None]:
    """Let fully masked rows attend to all keys, and return which rows these are.

    A softmax over no keys is NaN, in the forward and in the backward pass. So these
    rows are computed over all keys, and set to zero afterwards.
    """
    has_key = allowed.any(-1, keepdim=True)  # [..., 1]
    if known_true(has_key.all()):
        return allowed, None
    return allowed | ~has_key, ~has_key


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where attention is allowed, minus infinity elsewhere."""
    bias = torch.zeros_like(allowed, dtype=dtype)
    return bias.masked_fill(~allowed, -math.inf)


def zero_hidden_keys(
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    is_causal: bool,
    q_len: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Set keys and values that no query may attend to to zero, because 0 * NaN is NaN.

    >>> key, mask = torch.tensor([2.0, torch.nan]).view(2, 1, 1), torch.ones(1, 2, 1)
    >>> mask[:, 1] = 0
    >>> zero_hidden_keys(key, key, mask.bool(), False, 1)[0].flatten()
    tensor([2., 0.])
    """
    if is_causal or window is not None:
        mask = band_mask(q_len, key, is_causal, window) & mask
    unseen = ~mask.any(dim=0)  # [k_len, ...]
    while unseen.dim() < key.dim():
        unseen = unseen.unsqueeze(-1)  # [k_len, ...]
    cleared = key.masked_fill(unseen, 0)
    return cleared, cleared if value is key else value.masked_fill(unseen, 0)


def isolate_nonfinite(
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_k]
    allowed: Tensor,  # [..., 1, q_len, k_len]
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace keys and values that are not finite by zero, and return a factor per row.

    The fused kernel adds its mask, and NaN - inf is NaN: a key with NaN would also make
    rows NaN that may not attend to it. So it is set to zero, and only the rows that may
    attend to it are multiplied by NaN. A value with NaN affects all rows: even with a
    weight of 0, because 0 * NaN is NaN.

    >>> key, value = torch.randn(2, 5, 2, 7, 11)
    >>> key[4, 0] = torch.nan
    >>> allowed = torch.ones(2, 1, 3, 5).bool()
    >>> allowed[0, 0, 1, 4] = False
    >>> key, value, factor = isolate_nonfinite(key, value, allowed)
    >>> key.isfinite().all()
    tensor(True)
    >>> factor[:, 0, :, 0]
    tensor([[nan, 1., nan],
            [1., 1., 1.]])
    """
    bad_key, bad_value = (
        ~x.isfinite().flatten(2).all(-1) for x in (key, value)
    )  # [k_len, batch_size]
    reached = allowed & bad_key.T[:, None, None]  # [batch_size, 1, q_len, k_len]
    reached = reached.any(-1, keepdim=True)  # [batch_size, 1, q_len, 1]
    reached = reached | bad_value.any(0).view(-1, 1, 1, 1)  # [batch_size, 1, q_len, 1]
    factor = torch.where(reached, math.nan, 1.0)  # [batch_size, 1, q_len, 1]
    factor = factor.to(key.dtype)
    key, value = (
        x.masked_fill(bad[..., None, None], 0)
        for x, bad in ((key, bad_key), (value, bad_value))
    )  # [k_len, batch_size, heads, d_k]
    return key, value, factor


# Inspecting tensors -------------------------------------------------------------------


def is_traced() -> bool:
    """Whether a compiler or tracer runs the code, on tensors without values."""
    return torch.compiler.is_compiling() or is_jit_tracing()


def is_jit_tracing() -> bool:
    """Whether `torch.jit.trace` records the operators."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def is_transformed(*tensors: Tensor) -> bool:
    """Whether operators are transformed: forward mode, `vmap`, tracing, subclasses."""
    for x in tensors:
        # A subclass of Tensor may redefine any operator.
        if type(x) not in (Tensor, nn.Parameter) or torch.func.debug_unwrap(x) is not x:
            return True
        dual: Any = forward_ad.unpack_dual(x)  # type: ignore[no-untyped-call]
        if dual.tangent is not None:
            return True
    # `make_fx` records plain tensors, and raises where their values are inspected.
    return not (is_jit_tracing() or known_true(torch.ones((), device="cpu")))


def has_global_hook() -> bool:
    """Whether a hook is registered for all modules."""
    return bool(nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def known_true(condition: Tensor) -> bool:
    """Whether `condition` is known to hold: on a CPU, where inspecting it is cheap."""
    if is_traced() or condition.device.type != "cpu":
        return False
    try:
        return bool(condition)
    except RuntimeError:  # under `vmap` and tracers, it has no single value
        return False


def max_abs(x: Tensor) -> float:
    """The largest magnitude in `x`; NaN if it holds one, or cannot be inspected.

    >>> max_abs(torch.tensor([1.0, -3.0, 2.0])), max_abs(torch.tensor([1.0, torch.nan]))
    (3.0, nan)
    """
    if is_traced() or x.device.type != "cpu":
        return math.nan
    if not x.numel():
        return 0.0
    try:
        low, high = (float(bound) for bound in x.detach().aminmax())
    except RuntimeError:  # as in `known_true`
        return math.nan
    return math.nan if math.isnan(low) else max(-low, high)


def squares_are_finite(x: Tensor) -> bool:
    """Whether `x` is known to hold finite numbers whose squares do not overflow.

    Otherwise the product of a padded value and its gradient could be infinite, and
    0 * inf is NaN.
    """
    return max_abs(x) <= math.sqrt(torch.finfo(x.dtype).max)


# Dropout ------------------------------------------------------------------------------


def dropout_threshold(p: float) -> int:
    """The dropout probability in units of 1/2¹⁶: a weight takes 16 random bits."""
    return round(p * 2**16)


def dropout_scale(threshold: int) -> float:
    """The factor that rescales the kept weights, for the rounded probability."""
    return 1 / (1 - threshold / 2**16) if threshold < 2**16 else 1.0


def draw_seed() -> int:
    """A seed from the global generator.

    So `torch.manual_seed` makes the dropout masks reproducible, and activation
    checkpointing, which restores that generator, repeats them.
    """
    return int(torch.randint(2**62, (), device="cpu"))


def fast_dropout(weights: Tensor, p: float) -> tuple[Tensor, float]:
    r"""Dropout with few random numbers, for the CPU; and the rescaling factor.

    >>> kept, scale = fast_dropout(torch.ones(100_000), 0.25)
    >>> round(scale, 3), round(kept.mean().item() * scale, 1)
    (1.333, 1.0)
    """
    threshold = dropout_threshold(p)
    if not threshold:
        return weights, 1.0
    if threshold == 2**16:
        everything = torch.ones((), dtype=torch.bool, device="cpu")
        return weights.masked_fill(everything, 0), 1.0
    ends, n = torch.iinfo(torch.int64), weights.numel() // 4 + 1
    random_bits = torch.randint(ends.min, ends.max, (n,), device="cpu")  # [n]
    keep = dropout_mask(random_bits, weights.shape, threshold)
    return weights * keep, dropout_scale(threshold)


def dropout_mask(random_bits: Tensor, shape: torch.Size, threshold: int) -> Tensor:
    """1 where a weight is kept, 0 where it is dropped; overwrites the random bits.

    On a CPU a random number takes longer than the weight itself. So one random int64 is
    used for four weights, as four int16.
    """
    *others, k_len = shape
    bits = random_bits.view(torch.int16)[: shape.numel()].view(
        *others, k_len
    )  # [..., k_len]
    if threshold == 2**16:  # beyond the range of int16
        return bits.zero_()
    return bits.ge_(threshold - 2**15)


# The fused kernel of the CPU ----------------------------------------------------------


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
        if torch.is_grad_enabled():
            q, k, v = (
                each.permute(2, 0, 1, 3) for each in x
            )  # [q_len, ..., d_k], [k_len, ..., d_k], [k_len, ..., d_k]
            call = recorded_call(q, k, v, None, ctx.is_causal, ctx.scale)
            call.bias = (
                None if mask is None else mask.permute(2, 3, 0, 1)
            )  # [1, k_len, ...]; or q_len
            call.sinks = sinks
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


def recorded_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Call:
    """A call of the formula, for its second derivatives."""
    return Call(
        query,
        key,
        value,
        mask,
        is_causal,
        nn.Identity(),
        need_weights=True,
        average_weights=False,
        transformed=True,
        eager=False,
        scale=scale,
    )


def recorded_gradients(
    inputs: Sequence[Tensor | None],
    call: Call,
    grad_context: Tensor | None,
    grad_weights: Tensor | None = None,
    drop: Drop = lambda weights: (weights, 1.0),
) -> list[Tensor | None]:
    """The gradients of the formula for `inputs`, recorded for second derivatives.

    `call` is made of the inputs, or of views of them.
    """
    with torch.enable_grad():
        outputs = formula(call, drop)
    pairs = zip(outputs, (grad_context, grad_weights), strict=True)
    given = [(output, grad) for output, grad in pairs if grad is not None]
    differentiable = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(
        torch.autograd.grad(
            [output for output, _ in given],
            differentiable,
            [grad for _, grad in given],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


# Blockwise ----------------------------------------------------------------------------


class TileSpec(NamedTuple):
    """The settings that all tiles of one call share, besides its mask."""

    # The number of heads in the returned weights: 0, all, or 1 for their mean.
    shown: int
    is_causal: bool
    # Whether all scores are known to be finite, so that a minimum can mask them.
    scores_are_finite: bool
    dropout_threshold: int
    seed: int
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None


class Tile(NamedTuple):
    """Some queries of some heads, and the keys that they may attend to."""

    rows: slice
    items: slice
    heads: slice
    kv_heads: slice
    columns: slice

    @property
    def k_len(self) -> int:
        """The number of its keys."""
        length: int = self.columns.stop - self.columns.start
        return length

    def queries(self, x: Tensor) -> Tensor:
        """Its rows of `x`, with batch items and heads flattened into one dimension."""
        x = x[self.rows, self.items, self.heads].flatten(
            1, 2
        )  # [rows, batch_heads, ...]
        return x.transpose(0, 1)  # [batch_heads, rows, ...]

    def keys(self, x: Tensor) -> Tensor:
        """The keys or values that its queries may attend to."""
        x = x[self.columns, self.items, self.kv_heads].flatten(
            1, 2
        )  # [k_len, batch_heads, d_k]
        return x.transpose(0, 1)  # [batch_heads, k_len, d_k]

    def by_head(
        self,
        x: Tensor,  # [..., rows, k_len]
    ) -> Tensor:
        """A tensor of this tile, with batch items and heads as two dimensions."""
        items = self.items.stop - self.items.start
        return x.view(items, -1, *x.shape[1:])  # [items, ..., rows, k_len]

    def of_weights(
        self,
        x: Tensor,  # [..., k_len]
    ) -> Tensor:
        """Its part of the returned weights, `[items, shown, rows, k_len]`."""
        heads = self.heads if x.shape[1] > 1 else slice(1)
        return x[self.items, heads, self.rows, self.columns]  # [..., k_len]

    def of_bias(
        self,
        x: Tensor,
    ) -> Tensor:
        """Its part of a bias, `[items or 1, heads or 1, rows or 1, k_len]`."""
        for dim, part in enumerate((self.items, self.heads, self.rows)):
            if x.shape[dim] > 1:
                x = x.movedim(dim, 0)[part].movedim(0, dim)
        return x[..., self.columns]


class Tiles:
    r"""The tiles of one call, and the buffers that they share.

    With `is_causal`, a tile ends at the last key that one of its queries may attend to:

    >>> x = torch.randn(300, 1, 7, 11)
    >>> tiles = Tiles(x, x, None, TileSpec(0, True, True, 2**15, 0))
    >>> [(tile.rows.start, tile.rows.stop, tile.k_len) for tile in tiles]
    [(0, 128, 128), (128, 256, 256), (256, 300, 300)]
    >>> shapes = [torch.Size((7, 44, tile.k_len)) for tile in tiles]
    >>> masks = [tiles.dropout_mask(shape) for shape in shapes]
    >>> masks[2].unique()
    tensor([0, 1], dtype=torch.int16)
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        spec: TileSpec,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.q_len, self.batch_size, self.heads, d_k = query.shape
        self.k_len, self.mask, self.spec = key.shape[0], mask, spec
        self.groups = self.heads // key.shape[2]
        self.bias = None if bias is None else bias.permute(2, 3, 0, 1)  # [..., k_len]
        self.sinks = sinks
        self.scale = 1 / math.sqrt(d_k) if spec.scale is None else spec.scale
        # How far a query sees before and after its own position.
        far = max(self.q_len, self.k_len)
        before = far if spec.window is None else spec.window - 1
        after = 0 if spec.is_causal else before
        self.reach = before, after
        # With more queries than keys, the first queries may be fully masked.
        self.first_row = max(0, self.q_len - self.k_len - after)
        # As many heads as fit: some of one batch item, or all of several items.
        self.tile_rows = min(TILE_ROWS, self.q_len)
        tile_keys = min(self.k_len, before + self.tile_rows + after)
        fit = max(TILE_HEADS, TILE_SCORES // max(1, self.tile_rows * tile_keys))
        # The heads that share keys are in one tile.
        most = max(1, fit // self.groups) * self.groups
        self.step = max(1, fit // self.heads), min(most, self.heads)
        self.like = query
        heads = min(self.step[0], self.batch_size) * self.step[1]
        self.tile_size = heads * self.tile_rows * tile_keys
        self.buffers: dict[str, Tensor] = {}
        self.random_bits: Tensor | None = None
        if spec.is_causal and mask is None:
            rows = self.tile_rows
            past = query.new_ones(rows, rows, dtype=torch.bool)  # [rows, rows]
            self.past = past.tril()
        # The backward pass drops the same weights as the forward pass.
        self.generator = torch.Generator().manual_seed(spec.seed)

    def __iter__(self) -> Iterator[Tile]:
        shift = self.k_len - self.q_len
        before, after = self.reach
        items, heads = self.step
        for item in range(0, self.batch_size, items):
            for head in range(0, self.heads, heads):
                last = min(head + heads, self.heads)
                for row in range(self.first_row, self.q_len, TILE_ROWS):
                    end = min(row + TILE_ROWS, self.q_len)
                    yield Tile(
                        slice(row, end),
                        slice(item, min(item + items, self.batch_size)),
                        slice(head, last),
                        slice(head // self.groups, last // self.groups),
                        slice(
                            max(0, row + shift - before),
                            min(self.k_len, end + shift + after),
                        ),
                    )

    def buffer(self, name: str, shape: torch.Size) -> Tensor:
        """Uninitialized memory for the weights of one tile."""
        if name not in self.buffers:
            self.buffers[name] = self.like.new_empty(self.tile_size)
        batch_heads, rows, k_len = shape
        return self.buffers[name][: shape.numel()].view(
            batch_heads, rows, k_len
        )  # [batch_heads, rows, k_len]

    def empty_output(self, width: int | None = None) -> Tensor:
        """One vector for each query, zero in the rows that no tile writes."""
        *others, d_k = self.like.shape
        output = self.like.new_empty(*others, width or d_k)  # [q_len, ...]
        output[: self.first_row] = 0
        return output

    def head_contiguous(self, x: Tensor) -> Tensor:
        """Keys or values; in half precision, copied so that each head is contiguous.

        A matrix product would otherwise make such a copy for each tile of queries.
        """
        if x.itemsize > 2 or self.q_len <= TILE_ROWS:
            return x
        return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)

    def merge(self, x: Tensor) -> Tensor:
        """As `merge_groups`."""
        return merge_groups(x, self.groups)

    def weights(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,
        tile: Tile,
        slope: Tensor | None = None,  # [batch_heads, rows, k_len]
    ) -> Tensor:
        """The weights of a tile, `[batch_heads, rows, k_len]`.

        The derivative of the soft cap is written to `slope`.
        """
        q = tile.queries(query)  # [batch_heads, rows, d_k]
        k = tile.keys(key)  # [..., k_len, d_k]
        shape = torch.Size((*q.shape[:2], tile.k_len))
        scores = self.buffer("weights", shape)  # [batch_heads, rows, k_len]
        merged = self.merge(scores)  # [..., k_len]
        torch.baddbmm(merged, self.merge(q), k.mT, beta=0, alpha=self.scale, out=merged)
        by_head = tile.by_head(scores)  # [..., rows, k_len]
        if self.spec.soft_cap is not None:
            scores.div_(self.spec.soft_cap).tanh_()
            if slope is not None:
                torch.mul(scores, scores, out=slope).neg_().add_(1)
            scores.mul_(self.spec.soft_cap)
        if self.bias is not None:
            by_head.add_(tile.of_bias(self.bias))
        empty = None
        if self.mask is None and self.spec.is_causal:
            self.mask_corners(scores, tile)
        elif self.mask is not None or self.spec.window is not None:
            allowed = self.allowed(tile, self.mask)  # [..., k_len]
            allowed, empty = unmask_fully_masked_rows(allowed)  # [..., k_len], [..., 1]
            self.mask_scores(by_head, allowed)
        share = None
        if self.sinks is not None:
            sinks = self.sinks[tile.heads].view(-1, 1, 1)  # [heads, 1, 1]
            share = share_of_keys(by_head, sinks)  # [..., rows, 1]
        torch.softmax(scores, -1, out=scores)
        if share is not None:
            by_head.mul_(share)
        if empty is not None:
            by_head.masked_fill_(empty, 0)
        return scores

    def mask_corners(
        self,
        scores: Tensor,
        tile: Tile,
    ) -> None:
        """Mask the scores of a causal tile, which is a band, in two triangles only.

        Each row may attend to one key more than the row before. So masked scores are in
        the last columns, as many as there are rows. A window ends one column later in
        each row, so it masks as many of the first columns.
        """
        n = scores.shape[1]
        self.mask_scores(scores[:, :, -n:], self.past[:n, :n])
        if self.spec.window is not None:
            # At the start of the sequence, the window of the first rows is not full.
            full = self.spec.window - 1 - self.position(tile)
            n = max(0, n - full)
            self.mask_scores(scores[:, full:, :n], self.past[:n, :n].mT)

    def position(self, tile: Tile) -> int:
        """The position of the first query, counted from the first key of the tile."""
        position: int = tile.rows.start + self.k_len - self.q_len - tile.columns.start
        return position

    def mask_scores(self, scores: Tensor, allowed: Tensor) -> None:
        """Set the scores that are not allowed to minus infinity."""
        if self.spec.scores_are_finite:
            # One pass instead of several; NaN would not be masked by a minimum.
            ceiling = torch.full_like(allowed, -math.inf, dtype=scores.dtype)
            ceiling.masked_fill_(allowed, math.inf)
            torch.minimum(scores, ceiling, out=scores)
        else:
            scores.masked_fill_(~allowed, -math.inf)

    def allowed(self, tile: Tile, mask: Tensor | None) -> Tensor:
        """The mask of a tile, `[items or 1, 1, rows or 1, k_len]`."""
        rows = tile.rows.stop - tile.rows.start
        if mask is None:
            mask = self.like.new_ones(1, tile.k_len, 1, dtype=torch.bool)
        else:
            mask = mask[:, tile.columns]
        mask = mask[tile.rows] if mask.shape[0] > 1 else mask
        mask = mask[..., tile.items] if mask.shape[2] > 1 else mask  # [..., items]
        mask = mask.permute(2, 0, 1).unsqueeze(1)  # [items, ..., k_len]
        is_causal, window = self.spec.is_causal, self.spec.window
        if is_causal or window is not None:
            mask = mask.expand(-1, -1, rows, -1)
            mask = cut_band(mask, self.position(tile), is_causal, window)
        return mask

    def dropout_mask(self, shape: torch.Size) -> Tensor:
        """1 for each weight of the next tile that is kept, 0 for the others."""
        if self.random_bits is None:
            most = self.tile_size // 4 + 1
            self.random_bits = self.like.new_empty(most, dtype=torch.int64)  # [most]
        n = shape.numel() // 4 + 1
        bits = self.random_bits[:n]  # [n]
        bits.random_(torch.iinfo(torch.int64).min, None, generator=self.generator)
        return dropout_mask(bits, shape, self.spec.dropout_threshold)

    def drop(self, weights: Tensor) -> None:
        """Drop weights of the next tile, in place."""
        if self.spec.dropout_threshold == 2**16:
            weights.zero_()  # NaN times zero would be NaN
        else:
            weights.mul_(self.dropout_mask(weights.shape))

    def drop_all(self, weights: Tensor) -> tuple[Tensor, float]:
        """The dropout of all tiles, for weights `[batch_size, heads, q_len, k_len]`."""
        keep = torch.ones_like(weights)
        for tile in self if self.spec.dropout_threshold else ():
            part = keep[tile.items, tile.heads, tile.rows, tile.columns]  # [..., k_len]
            batch_heads = torch.Size((part.shape[0] * part.shape[1], *part.shape[2:]))
            part.copy_(tile.by_head(self.dropout_mask(batch_heads)))
        return weights * keep, dropout_scale(self.spec.dropout_threshold)


class Blockwise(torch.autograd.Function):
    r"""Compute the context tile by tile, and the weights of `shown` heads.

    The backward pass recomputes the weights. With $P$ the weights, $M$ what dropout
    multiplies them by, $O = (P \odot M)\,V$ and $G$ the gradient of $O$:

    $$dV = (P \odot M)^\top\, G$$

    $$dS_{ij} = P_{ij}\, \Big(M_{ij} \sum_d G_{id} V_{jd} - \sum_d G_{id} O_{id}\Big)$$

    $$dQ = dS\, K / \sqrt{d_k} \qquad dK = dS^\top Q / \sqrt{d_k}$$

    The subtracted sum is FlashAttention's $D$; it comes from the softmax, whose weights
    sum to 1. If the weights are returned, their gradient $W$ (before dropout) is added
    to the first sum, and $\sum_j P_{ij} W_{ij}$ to the second. If the backward pass is
    itself recorded, the formula is differentiated instead.

    A row of weights sums to 1, or to 0 if it is fully masked. So the sum of all weights
    does not depend on the queries:

    >>> query = torch.randn(256, 4, 7, 11).requires_grad_()
    >>> key, value = torch.randn(2, 131, 4, 7, 11)
    >>> mask = torch.rand(1, 131, 4) < 0.9
    >>> mask[:, :, 3] = False
    >>> options = {"mask": mask, "need_weights": True}
    >>> _, weights = attention(query, key, value, **options)
    >>> _, mean = attention(query, key, value, average_weights=True, **options)
    >>> (weights.sum() + mean.sum()).backward()
    >>> torch.allclose(query.grad, torch.zeros(256, 4, 7, 11), atol=1e-5)
    True

    The backward pass drops the same weights as the forward pass, whether it is recorded
    or not:

    >>> context, _ = attention(query, key, value, dropout=nn.Dropout(0.5))
    >>> loss = context.pow(2).sum()
    >>> (first,) = torch.autograd.grad(loss, query, retain_graph=True)
    >>> (same,) = torch.autograd.grad(loss, query, create_graph=True)
    >>> torch.allclose(first, same, atol=1e-4)
    True

    A number that is added to all scores of a row and to its sink changes nothing, so
    the gradients of both sum to zero:

    >>> query = torch.randn(256, 4, 6, 11)
    >>> key, value = torch.randn(131, 4, 2, 11), torch.randn(131, 4, 2, 13)
    >>> bias = torch.randn(1, 131, 1, 6).requires_grad_()
    >>> sinks = torch.randn(6).requires_grad_()
    >>> options = {"bias": bias, "sinks": sinks, "soft_cap": 5.0}
    >>> context, _ = attention(query, key, value, **options)
    >>> context.pow(2).sum().backward()
    >>> total = bias.grad.sum() + sinks.grad.sum()
    >>> sinks.grad.abs().max() > 1, torch.allclose(total, torch.zeros(()), atol=0.1)
    (tensor(True), True)
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, kv_heads, d_k]
        value: Tensor,  # [k_len, batch_size, kv_heads, d_v]
        mask: Tensor | None,  # [..., k_len, batch_size]
        bias: Tensor | None,
        sinks: Tensor | None,  # [heads]
        *spec: Any,
    ) -> tuple[Tensor, Tensor]:
        tiles = Tiles(query, key, mask, TileSpec(*spec), bias, sinks)
        context = tiles.empty_output(value.shape[-1])  # [q_len, ..., d_v]
        shape = tiles.batch_size, tiles.spec.shown, tiles.q_len, tiles.k_len
        shown = query.new_zeros(shape)  # [batch_size, shown, q_len, k_len]
        contiguous_key, contiguous_value = (
            tiles.head_contiguous(key),
            tiles.head_contiguous(value),
        )
        scale = dropout_scale(tiles.spec.dropout_threshold)
        for tile in tiles:
            weights = tiles.weights(
                query, contiguous_key, tile
            )  # [batch_heads, rows, k_len]
            if tiles.spec.shown:
                part = tile.of_weights(shown)  # [items, shown, rows, k_len]
                by_head = tile.by_head(weights)  # [items, ..., rows, k_len]
                if tiles.spec.shown == tiles.heads:
                    part.copy_(by_head)
                else:
                    part.add_(by_head.sum(1, keepdim=True), alpha=1 / tiles.heads)
            if tiles.spec.dropout_threshold:
                tiles.drop(weights)
            part = tile.queries(context)  # [batch_heads, rows, d_v]
            product = scaled_bmm(
                tiles.merge(weights), tile.keys(contiguous_value), scale
            )  # [..., d_v]
            part.copy_(product.view(part.shape))
        ctx.save_for_backward(context, query, key, value, mask, bias, sinks)
        ctx.spec = spec
        # The gradient of an unused output is None, not a tensor of zeros.
        ctx.set_materialize_grads(False)
        return context, shown

    @staticmethod
    def backward(
        ctx: Any, grad_context: Tensor | None, grad_shown: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        context, query, key, value, mask, bias, sinks = ctx.saved_tensors
        tiles = Tiles(query, key, mask, TileSpec(*ctx.spec), bias, sinks)
        grads: Sequence[Tensor | None]
        if torch.is_grad_enabled():
            # Views, because the key may be the query, or be computed from it: each
            # input gets its own gradient.
            q, k, v = (each.view_as(each) for each in (query, key, value))
            if grad_shown is not None:  # the mean: its gradient is shared by the heads
                share = tiles.heads // grad_shown.shape[1]
                grad_shown = grad_shown.expand(-1, tiles.heads, -1, -1) / share
            spec, inputs = tiles.spec, (q, k, v, bias, sinks)
            call = recorded_call(q, k, v, mask, spec.is_causal, spec.scale)
            call.window, call.soft_cap = spec.window, spec.soft_cap
            call.bias, call.sinks = bias, sinks
            drop = tiles.drop_all
            grads = recorded_gradients(inputs, call, grad_context, grad_shown, drop)
        else:
            grads = tile_gradients(
                tiles, query, key, value, context, grad_context, grad_shown
            )
        return *grads[:3], None, *grads[3:], *(None for _ in ctx.spec)


def tile_gradients(
    tiles: Tiles,
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, kv_heads, d_k]
    value: Tensor,  # [k_len, batch_size, kv_heads, d_v]
    context: Tensor,  # [q_len, batch_size, heads, d_v]
    grad_context: Tensor | None,  # [q_len, batch_size, heads, d_v]
    grad_shown: Tensor | None,  # [batch_size, shown, q_len, k_len]
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, bias and sinks, by `Blockwise`'s formulas."""
    key, value = tiles.head_contiguous(key), tiles.head_contiguous(value)
    grads = Gradients(tiles, key, value)
    if grad_context is None:
        grad_context = torch.zeros_like(context)
    delta = (grad_context * context).sum(-1, keepdim=True)  # [q_len, ..., 1]
    scale = dropout_scale(tiles.spec.dropout_threshold)
    slope, merge = None, tiles.merge

    for tile in tiles:
        q = tile.queries(query)  # [batch_heads, rows, d_k]
        shape = torch.Size((*q.shape[:2], tile.k_len))
        if tiles.spec.soft_cap is not None:
            slope = tiles.buffer("slope", shape)  # [batch_heads, rows, k_len]
        weights = tiles.weights(query, key, tile, slope)  # [batch_heads, rows, k_len]
        grad = merge(tile.queries(grad_context))  # [..., d_v]
        grad_weights = tiles.buffer("grad_weights", shape)  # [batch_heads, rows, k_len]
        scaled_bmm(grad, tile.keys(value).mT, scale, out=merge(grad_weights))
        dropped = weights
        if tiles.spec.dropout_threshold:
            dropped = tiles.buffer("dropped", shape)  # [batch_heads, rows, k_len]
            dropped.copy_(tiles.dropout_mask(shape))
            grad_weights.mul_(dropped)
            dropped.mul_(weights)
        accumulate_bmm(grads.value, tile, merge(dropped).mT, grad, scale)

        total = tile.queries(delta)  # [batch_heads, rows, 1]
        if grad_shown is not None:
            part = tile.of_weights(grad_shown)  # [items, shown, rows, k_len]
            if grad_shown.shape[1] < tiles.heads:
                part = part / tiles.heads  # [items, shown, rows, k_len]
            tile.by_head(grad_weights).add_(part)
            weighted = tiles.buffer("weighted", shape)  # [batch_heads, rows, k_len]
            torch.mul(tile.by_head(weights), part, out=tile.by_head(weighted))
            total = total + weighted.sum(-1, keepdim=True)  # [batch_heads, rows, 1]
        grads.add_sinks(tile, weights, total)
        grad_scores = grad_weights.sub_(total).mul_(
            weights
        )  # [batch_heads, rows, k_len]
        grads.add_bias(tile, grad_scores)
        if slope is not None:
            grad_scores.mul_(slope)
        part = tile.queries(grads.query)  # [batch_heads, rows, d_k]
        merged = merge(grad_scores)  # [..., k_len]
        product = scaled_bmm(merged, tile.keys(key), tiles.scale)  # [..., d_k]
        part.copy_(product.view(part.shape))
        accumulate_bmm(grads.key, tile, merged.mT, merge(q), tiles.scale)
    return grads.result(key.dtype)


class Gradients:
    """The sums of the gradients of all tiles."""

    def __init__(
        self,
        tiles: Tiles,
        key: Tensor,  # [k_len, batch_size, kv_heads, d_k]
        value: Tensor,  # [k_len, batch_size, kv_heads, d_v]
    ) -> None:
        self.query = tiles.empty_output()  # [..., heads, d_k]
        # Gradients of many tiles are summed here: in float32 for half precision.
        wide = torch.promote_types(key.dtype, torch.float32)
        self.key, self.value = (
            x.new_zeros(*x.shape[1:3], x.shape[0], x.shape[3], dtype=wide)
            for x in (key, value)
        )  # [batch_size, kv_heads, k_len, d_k], [batch_size, ..., d_v]
        self.bias, self.sinks = (
            None
            if x is None or not x.requires_grad
            else torch.zeros_like(x, dtype=torch.promote_types(x.dtype, wide))
            for x in (tiles.bias, tiles.sinks)
        )  # [..., k_len], [heads]

    def add_bias(
        self,
        tile: Tile,
        grad_scores: Tensor,  # [..., k_len]
    ) -> None:
        """The bias is added to the scores, so both have the same gradient."""
        if self.bias is not None:
            part = tile.of_bias(self.bias)  # [..., k_len]
            part.add_(tile.by_head(grad_scores).sum_to_size(part.shape))

    def add_sinks(
        self,
        tile: Tile,
        weights: Tensor,  # [batch_heads, rows, ...]
        total: Tensor,  # [batch_heads, rows, 1]
    ) -> None:
        """A sink has the rest of the weight, and a value of zero."""
        if self.sinks is not None:
            rest = 1 - weights.sum(-1, keepdim=True)  # [batch_heads, rows, 1]
            grad = tile.by_head(rest * total)  # [..., rows, 1]
            self.sinks[tile.heads] -= grad.sum((0, 2, 3))

    def result(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """The gradients, in the layout and dtype of the inputs."""
        key, value = (
            x.permute(2, 0, 1, 3).to(dtype) for x in (self.key, self.value)
        )  # [k_len, batch_size, kv_heads, ...], [k_len, batch_size, kv_heads, ...]
        bias = (
            None if self.bias is None else self.bias.permute(2, 3, 0, 1)
        )  # [1, k_len, ...]; or q_len
        return self.query, key, value, bias, self.sinks


def scaled_bmm(
    a: Tensor,  # [batch_heads, rows, inner]
    b: Tensor,  # [batch_heads, inner, columns]
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """`scale` times the matrix product, in one pass."""
    unused = a.new_empty(()) if out is None else out
    result = torch.baddbmm(unused, a, b, beta=0, alpha=scale, out=out)
    return result  # [batch_heads, rows, columns]


def accumulate_bmm(
    total: Tensor,  # [..., k_len, d_k]
    tile: Tile,
    a: Tensor,  # [batch_heads, k_len, rows]
    b: Tensor,  # [batch_heads, rows, d_k]
    scale: float,
) -> None:
    """Add the product of `a` and `b` to the gradients of the keys of this tile."""
    part = total[tile.items, tile.kv_heads, tile.columns]  # [..., k_len, d_k]
    part = part.flatten(0, 1)  # [batch_heads, k_len, d_k]
    if part.dtype == a.dtype:
        part.baddbmm_(a, b, alpha=scale)
    else:
        part.add_(torch.bmm(a, b), alpha=scale)
