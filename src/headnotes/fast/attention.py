r"""# Choosing how to compute attention

The function `attention` computes the context of every query, from queries, keys and
values that are already projected and split into heads. There are three ways to do it.
All give the same result; they differ in speed, in memory, and in what they support:

- **fused**: `F.scaled_dot_product_attention`, PyTorch's own kernel. It never holds all
  weights at once. On a CPU it has no dropout, does not return the weights, and knows
  causality only without a mask and for as many keys as queries.
- **in full**: the formula, with all weights in memory. It supports everything, forward
  mode and second derivatives included, and is the fastest for short sequences that
  are trained.
- **blockwise**: this module's own kernel, in plain PyTorch. It computes the weights of
  128 queries at a time, uses them while they are in the processor's cache, and computes
  them again in the backward pass. It is for what the fused kernel lacks on a CPU.

One table, `DISPATCH`, chooses the way of a call: the first row whose condition holds.
The conditions come from [measurements](../../compare/benchmarks.md).

Source: [FlashAttention](https://arxiv.org/abs/2205.14135), Dao et al. 2022, appendix B,
for the backward pass and for dropout masks that are generated again;
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

# Queries in a tile, scores in its buffer, and the heads that it holds at least, for the
# cores to share. 1 MiB of float32 stays in the cache of a core, beside the keys and
# values that it meets. All three were found by measuring.
TILE_ROWS = 128
TILE_SCORES = 1 << 18
TILE_HEADS = 8

# Context and weights of a call.
Way = Callable[["Call"], tuple[Tensor, Tensor | None]]

# Dropout: the weights with zeros in them, and a factor that is still to be applied.
Drop = Callable[[Tensor], tuple[Tensor, float]]


@dataclass
class Call:
    """One call of `attention`, and what the choice of a way depends on.

    `query`, `key` and `value` are `[seq_len, batch_size, heads, d_k]`, `mask` is
    `[q_len or 1, k_len, batch_size or 1]`.
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
    # On a CPU and run line by line: values can be inspected at no cost.
    eager: bool

    @property
    def custom_dropout(self) -> bool:
        """Whether another module than `nn.Dropout` stands in its place.

        A hook may change what a module returns, so with one it has to be called too.
        """
        module = self.dropout
        hooked = module._forward_hooks or module._forward_pre_hooks or has_global_hook()
        return bool(hooked) or type(module) not in (nn.Dropout, nn.Identity)

    @property
    def dropout_prob(self) -> float:
        """With which probability plain dropout acts.

        Its own mode decides, as in the core: Monte Carlo dropout sets the mode of this
        module alone.
        """
        module = self.dropout
        return module.p if type(module) is nn.Dropout and module.training else 0.0

    @property
    def mixed(self) -> bool:
        """Whether dtypes differ, as projections of several kinds do under autocast."""
        return not self.query.dtype == self.key.dtype == self.value.dtype

    @property
    def short(self) -> bool:
        """Whether there are so few keys that all weights fit into the cache."""
        return self.key.shape[0] <= SHORT_KEYS

    @property
    def needs_grad(self) -> bool:
        """Whether there will be a backward pass."""
        inputs = self.query, self.key, self.value
        return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)

    @property
    def causal_needs_mask(self) -> bool:
        """Whether the fused kernel would need the causal mask as a tensor.

        Its own causality aligns the first query with the first key, not the last with
        the last, and excludes a mask.
        """
        unequal = self.query.shape[0] != self.key.shape[0]
        return self.is_causal and (self.mask is not None or unequal)

    @cached_property
    def largest_score(self) -> float:
        r"""A bound of all scores: $d_k \max|q| \max|k|$, or NaN.

        Without a bound, only computing them shows whether they overflow.
        """
        query = max_abs(self.query)
        if not math.isfinite(query):
            # The row of a query that is not finite is NaN, and no other is touched.
            query = max_abs(self.query.nan_to_num(0.0, 0.0, 0.0))
        return query * max_abs(self.key) * self.query.shape[-1]

    def bounded(self, dtype: torch.dtype) -> bool:
        """Whether every score is known to be a finite number in `dtype`.

        Then a score is forbidden by adding minus infinity, which takes one pass instead
        of several. Otherwise the sum may be NaN.
        """
        return self.eager and self.largest_score <= torch.finfo(dtype).max

    @property
    def may_overflow(self) -> bool:
        """Whether a score may be infinite or NaN in the fused kernel."""
        return not self.bounded(torch.promote_types(self.query.dtype, torch.float32))

    def allowed(self) -> Tensor | None:
        """Which query may attend to which key, `[batch_size or 1, 1, q_len, k_len]`."""
        mask = self.mask
        if self.is_causal:
            past = causal_mask(self.query.shape[0], self.key)  # [q_len, k_len, 1]
            mask = past if mask is None else past & mask  # [q_len, k_len, ...]
        if mask is None:
            return None
        return mask.permute(2, 0, 1).unsqueeze(1)  # [..., k_len]


def attention(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_k]
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: nn.Module | None = None,
    need_weights: bool = False,
    average_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    r"""The context, `[q_len, batch_size, heads, d_k]`, and the weights if needed.

    `mask` is bool, `[q_len or 1, k_len, batch_size or 1]`, True for "may attend". With
    `is_causal` no query attends to a later key; the last query is aligned with the last
    key. A fully masked row has a context of zero. The weights are those before dropout,
    `[q_len, k_len, batch_size, heads]`, or their mean over the heads. The inputs are
    not checked here: `MultiHeadAttention` has done so.

    >>> query, key = torch.randn(8, 2, 7, 11).split([3, 5])
    >>> value = torch.randn(5, 2, 7, 11)
    >>> mask = torch.ones(3, 5, 2).bool()
    >>> mask[1, :, 0] = False
    >>> context, _ = attention(query, key, value, mask=mask)
    >>> context.any(dim=-1).all(dim=-1)
    tensor([[ True,  True],
            [False,  True],
            [ True,  True]])
    """
    dropout = nn.Identity() if dropout is None else dropout
    x = query, key, value
    tensors = x if mask is None else (*x, mask)
    transformed = not torch.compiler.is_compiling() and is_transformed(*tensors)
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
    )
    clean = mask is None or (call.bounded(query.dtype) and is_moderate(value))
    if mask is not None and not clean:
        # Padding may hold anything, a number too that overflows when it is projected.
        key, value = clear_fully_masked(key, value, mask, is_causal, query.shape[0])
        call = replace(call, key=key, value=value)
    way = next(way for way, serves in DISPATCH if serves(call))
    return way(call)  # [q_len, batch_size, heads, d_k], [q_len, k_len, ...]


def fused(call: Call) -> tuple[Tensor, None]:
    """PyTorch's own kernel, which never holds all weights at once."""
    use_mask = call.mask is not None or call.causal_needs_mask
    allowed = call.allowed() if use_mask else None  # [..., k_len]
    key, value, factor, empty = call.key, call.value, None, None
    if allowed is not None:
        if not call.eager:
            key, value, factor = isolate_nonfinite(key, value, allowed)
        allowed, empty = open_empty_rows(allowed)  # [..., k_len], [..., 1]
    q, k, v = (
        x.permute(1, 2, 0, 3) for x in (call.query, key, value)
    )  # [batch_size, heads, ..., d_k]
    is_causal = call.is_causal and not use_mask
    if call.eager and call.needs_grad:
        # Each position of a head lies a whole position of all heads apart, in the end
        # on a page of memory of its own. Side by side they are found faster, in the
        # backward pass above all.
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        context = FusedOnCPU.apply(q, k, v, allowed, is_causal)  # type: ignore[no-untyped-call]
    else:
        context = F.scaled_dot_product_attention(
            q, k, v, allowed, dropout_p=call.dropout_prob, is_causal=is_causal
        )  # [batch_size, heads, q_len, d_k]
    if empty is not None:
        context = context.masked_fill(empty, 0)
    if factor is not None:
        context = context * factor
    return context.permute(2, 0, 1, 3), None  # [q_len, batch_size, heads, d_k]


def in_full(call: Call) -> tuple[Tensor, Tensor | None]:
    r"""The formula, with all weights in memory.

    Three queries, five keys, causal and masked; query 1 is left without a key:

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

    Any module may stand in the place of dropout; this one leaves the weights as they
    are:

    >>> context, _ = attention(query, key, key, dropout=nn.ReLU())
    >>> torch.allclose(context, attention(query, key, key)[0], atol=1e-6)
    True
    """
    if call.custom_dropout:
        # It sees the weights in the layout of the core.
        def drop(weights: Tensor) -> tuple[Tensor, float]:
            weights = weights.permute(2, 3, 0, 1)  # [q_len, k_len, batch_size, heads]
            weights = call.dropout(weights)  # [q_len, k_len, batch_size, heads]
            weights = weights.permute(2, 3, 0, 1)  # [batch_size, heads, q_len, k_len]
            return weights, 1.0
    else:
        p, cheap = call.dropout_prob, call.eager

        def drop(weights: Tensor) -> tuple[Tensor, float]:
            return cheap_dropout(weights, p) if cheap else (F.dropout(weights, p), 1.0)

    context, weights = formula(
        call, drop
    )  # [q_len, batch_size, heads, ...], [batch_size, heads, q_len, k_len]
    if not call.need_weights:
        return context, None
    weights = weights.permute(2, 3, 0, 1)  # [q_len, k_len, batch_size, heads]
    if call.average_weights:
        weights = weights.mean(-1)  # [q_len, k_len, batch_size]
    return context, weights


def blockwise(call: Call) -> tuple[Tensor, Tensor | None]:
    r"""A tile of queries at a time, whose weights are used while they are in the cache.

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
        shown, call.is_causal, call.bounded(call.query.dtype), threshold, seed
    )
    apply: Any = Blockwise.apply
    context, weights = apply(
        call.query, call.key, call.value, call.mask, *spec
    )  # [q_len, batch_size, heads, ...], [batch_size, shown, q_len, k_len]
    if not call.need_weights:
        return context, None
    weights = weights.permute(2, 3, 0, 1)  # [q_len, k_len, batch_size, shown]
    if call.average_weights:
        weights = weights.squeeze(-1)  # [q_len, k_len, batch_size]
    return context, weights


# The first row whose condition holds computes the call.
#
# | way | for | because |
# |---|---|---|
# | `in_full` | transforms, mixed dtypes, custom dropout | all know its operators |
# | `in_full` | empty sequences and batches | the fused kernel divides by their size |
# | `in_full` | weights, compiled or on another device | the others return none there |
# | `fused` | all else that is compiled or on another device | PyTorch picks a kernel |
# | `in_full` | few keys, training | 2 to 3.5 times as fast in half precision |
# | `in_full` | few keys, weights or dropout | all weights fit into the cache |
# | `blockwise` | weights or dropout | the fused kernel has neither on a CPU |
# | `blockwise` | causal with a mask, or not square | a causal mask costs its half |
# | `blockwise` | a mask, where scores may overflow | NaN plus minus infinity is NaN |
# | `fused` | all else | it is the fastest |
DISPATCH: list[tuple[Way, Callable[[Call], bool]]] = [
    (in_full, lambda call: call.transformed or call.custom_dropout or call.mixed),
    (in_full, lambda call: call.query.numel() == 0 or call.key.numel() == 0),
    (in_full, lambda call: not call.eager and call.need_weights),
    (fused, lambda call: not call.eager),
    (in_full, lambda call: call.short and call.needs_grad),
    (in_full, lambda call: call.short and (call.need_weights or call.dropout_prob > 0)),
    (blockwise, lambda call: call.need_weights or call.dropout_prob > 0),
    (blockwise, lambda call: call.causal_needs_mask),
    (blockwise, lambda call: call.mask is not None and call.may_overflow),
    (fused, lambda call: True),
]


def formula(call: Call, drop: Drop) -> tuple[Tensor, Tensor]:
    """The context, `[q_len, batch_size, heads, d_k]`, and the weights, heads first."""
    query = call.query  # [q_len, batch_size, heads, d_k]
    batch_size, heads, d_k = query.shape[1:]
    q, k, v = (
        x.flatten(1, 2).transpose(0, 1) for x in (query, call.key, call.value)
    )  # [batch_size * heads, ..., d_k]
    scale = 1 / math.sqrt(d_k)
    allowed, empty = call.allowed(), None  # [..., k_len]
    if allowed is not None:
        allowed, empty = open_empty_rows(allowed)  # [..., k_len], [..., 1]
    adds = allowed is not None and call.bounded(query.dtype)
    if allowed is not None and adds:
        # Adding takes one pass, forward and backward; filling takes several.
        bias = additive_mask(allowed, q.dtype)  # [..., k_len]
        copies = heads if bias.shape[0] > 1 else 1
        bias = bias.expand(-1, copies, -1, -1).flatten(0, 1)  # [..., k_len]
        scores = torch.baddbmm(bias, q, k.mT, alpha=scale)  # [..., q_len, k_len]
    else:
        scores = scaled_bmm(q, k.mT, scale)  # [..., q_len, k_len]
    sizes = batch_size, heads, *scores.shape[1:]
    scores = scores.view(sizes)  # [batch_size, heads, q_len, k_len]
    if allowed is not None and not adds:
        scores = scores.masked_fill(~allowed, -math.inf)
        if empty is not None:
            # What an opened row may attend to now may not be finite.
            scores = scores.masked_fill(empty, 0)
    weights = scores.softmax(-1)  # [batch_size, heads, q_len, k_len]
    if empty is not None:
        weights = weights.masked_fill(empty, 0)
    dropped, factor = drop(weights)  # [batch_size, heads, q_len, k_len]
    context = scaled_bmm(dropped.flatten(0, 1), v, factor)  # [..., q_len, d_k]
    context = context.transpose(0, 1)  # [q_len, batch_size * heads, d_k]
    context = context.reshape(query.shape)  # [q_len, batch_size, heads, d_k]
    return context, weights


# Masks ------------------------------------------------------------------------------


def causal_mask(q_len: int, key: Tensor) -> Tensor:
    """True for every key that is not later than the query, `[q_len, k_len, 1]`."""
    k_len = key.shape[0]
    past = torch.ones(
        q_len, k_len, dtype=torch.bool, device=key.device
    )  # [q_len, k_len]
    return past.tril(k_len - q_len).unsqueeze(-1)  # [q_len, k_len, 1]


def open_empty_rows(allowed: Tensor) -> tuple[Tensor, Tensor | None]:
    """Let fully masked rows attend to all keys, and return which rows these are.

    A softmax over no keys is NaN, forward and backward. So such a row is computed over
    all keys and set to zero afterwards.
    """
    has_key = allowed.any(-1, keepdim=True)  # [..., 1]
    if known_true(has_key.all()):
        return allowed, None
    return allowed | ~has_key, ~has_key


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero for what is allowed, minus infinity for the rest."""
    bias = torch.zeros_like(allowed, dtype=dtype)
    return bias.masked_fill(~allowed, -math.inf)


def clear_fully_masked(
    key: Tensor, value: Tensor, mask: Tensor, is_causal: bool, q_len: int
) -> tuple[Tensor, Tensor]:
    """Set to zero what no query may attend to, since zero times NaN is NaN.

    >>> key, mask = torch.tensor([2.0, torch.nan]).view(2, 1, 1), torch.ones(1, 2, 1)
    >>> mask[:, 1] = 0
    >>> clear_fully_masked(key, key, mask.bool(), False, 1)[0].flatten()
    tensor([2., 0.])
    """
    mask = causal_mask(q_len, key) & mask if is_causal else mask
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
    """Replace keys and values that are not finite by a factor for each row.

    The fused kernel adds its mask, and NaN - inf is NaN: one such key would reach the
    rows too that may not attend to it. So it is cleared, and the rows that may attend
    to it are multiplied by NaN. A value reaches all rows: its weight may be 0, but
    0 * NaN is NaN.

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


# What is known of a call --------------------------------------------------------------


def is_traced() -> bool:
    """Whether a compiler or tracer runs the code, on tensors without values."""
    return torch.compiler.is_compiling() or is_jit_tracing()


def is_jit_tracing() -> bool:
    """Whether `torch.jit.trace` records the operators."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def is_transformed(*tensors: Tensor) -> bool:
    """Whether operators do more here than compute: derivatives, batching, recording."""
    for x in tensors:
        # A subclass of Tensor may do anything.
        if type(x) not in (Tensor, nn.Parameter) or torch.func.debug_unwrap(x) is not x:
            return True
        dual: Any = forward_ad.unpack_dual(x)  # type: ignore[no-untyped-call]
        if dual.tangent is not None:
            return True
    # `make_fx` records ordinary tensors, and refuses to tell their values.
    return not (is_jit_tracing() or known_true(torch.ones((), device="cpu")))


def has_global_hook() -> bool:
    """Whether a hook is registered for all modules."""
    return bool(nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def known_true(condition: Tensor) -> bool:
    """Whether `condition` is known to hold: on a CPU, where asking costs little."""
    if is_traced() or condition.device.type != "cpu":
        return False
    try:
        return bool(condition)
    except RuntimeError:  # under `vmap` there is no single answer, traced none at all
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


def is_moderate(x: Tensor) -> bool:
    """Whether `x` is known to hold finite numbers whose products do not overflow.

    That of a value in padding and a gradient could be infinite, and 0 * inf is NaN.
    """
    return max_abs(x) <= math.sqrt(torch.finfo(x.dtype).max)


# Dropout ------------------------------------------------------------------------------


def dropout_threshold(p: float) -> int:
    """In how many of 2¹⁶ cases a weight is dropped."""
    return round(p * 2**16)


def dropout_scale(threshold: int) -> float:
    """What the weights that are kept are multiplied by, for the rounded probability."""
    return 1 / (1 - threshold / 2**16) if threshold < 2**16 else 1.0


def draw_seed() -> int:
    """A seed from the global generator.

    So `torch.manual_seed` fixes the dropout masks, and activation checkpointing, which
    restores that generator, repeats them.
    """
    return int(torch.randint(2**62, (), device="cpu"))


def cheap_dropout(weights: Tensor, p: float) -> tuple[Tensor, float]:
    r"""Dropout with random numbers that are cheap on a CPU, and the factor to apply.

    >>> kept, scale = cheap_dropout(torch.ones(100_000), 0.25)
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
    """1 where a weight is kept, 0 where it is dropped, in place of the random bits.

    On a CPU a random number costs more than the weight that it decides on. So one
    integer of 64 bits serves four weights: of 16 bits each, with a sign.
    """
    *others, k_len = shape
    bits = random_bits.view(torch.int16)[: shape.numel()].view(
        *others, k_len
    )  # [..., k_len]
    if threshold == 2**16:  # more than an int16 can be compared with
        return bits.zero_()
    return bits.ge_(threshold - 2**15)


# The fused kernel of the CPU ----------------------------------------------------------


class FusedOnCPU(torch.autograd.Function):
    """PyTorch's fused kernel, with the second derivative that it lacks.

    A backward pass that is itself recorded (`create_graph=True`) goes by the formula.

    >>> query = torch.randn(3, 2, 7, 11).requires_grad_()
    >>> key, value = torch.randn(2, 131, 2, 7, 11)
    >>> mask = torch.ones(1, 131, 2).bool()
    >>> context, _ = attention(query, key, value, mask=mask)
    >>> loss = context.pow(3).sum()
    >>> (first,) = torch.autograd.grad(loss, query, create_graph=True)
    >>> (second,) = torch.autograd.grad(first.sum(), query)
    >>> second.abs().sum() > 0
    tensor(True)
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [batch_size, heads, q_len, d_k]
        key: Tensor,  # [batch_size, heads, k_len, d_k]
        value: Tensor,  # [batch_size, heads, k_len, d_k]
        allowed: Tensor | None,  # [..., k_len]
        is_causal: bool,
    ) -> Tensor:
        bias = None if allowed is None else additive_mask(allowed, query.dtype)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        x = query, key, value
        context, logsumexp = kernel(
            *x, 0.0, is_causal, attn_mask=bias
        )  # [batch_size, heads, q_len, d_k], [batch_size, ...]
        ctx.save_for_backward(query, key, value, bias, context, logsumexp)
        ctx.is_causal = is_causal
        result: Tensor = context  # [batch_size, heads, q_len, d_k]
        return result

    @staticmethod
    def backward(
        ctx: Any,
        grad_context: Tensor,  # [batch_size, heads, q_len, d_k]
    ) -> tuple[Tensor | None, ...]:
        query, key, value, bias, context, logsumexp = ctx.saved_tensors
        x = query, key, value
        if torch.is_grad_enabled():
            mask = None
            if bias is not None:
                _, _, n_q, k_len = bias.shape
                mask = (bias == 0).view(-1, n_q, k_len)  # [..., n_q, k_len]
                mask = mask.permute(1, 2, 0)  # [n_q, k_len, ...]
            by_position = [each.permute(2, 0, 1, 3) for each in x]
            grad = grad_context.permute(2, 0, 1, 3)  # [q_len, batch_size, heads, d_k]
            grads = recorded_gradients(x, by_position, mask, ctx.is_causal, grad)
        else:
            backward = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            )
            saved = *x, context, logsumexp
            grads = backward(grad_context, *saved, 0.0, ctx.is_causal, attn_mask=bias)
        d_query, d_key, d_value = grads
        return d_query, d_key, d_value, None, None


def recorded_gradients(
    inputs: Sequence[Tensor],
    by_position: Sequence[Tensor],
    mask: Tensor | None,
    is_causal: bool,
    grad_context: Tensor | None,
    grad_weights: Tensor | None = None,
    drop: Drop = lambda weights: (weights, 1.0),
) -> list[Tensor | None]:
    """The gradients of the formula for `inputs`, with a graph of their own.

    `by_position` are the same three tensors as `[seq_len, batch_size, heads, d_k]`.
    """
    with torch.enable_grad():
        query, key, value = by_position
        call = Call(
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
        )
        outputs = formula(call, drop)
    pairs = zip(outputs, (grad_context, grad_weights), strict=True)
    given = [(output, grad) for output, grad in pairs if grad is not None]
    learning = [x for x in inputs if x.requires_grad]
    found = iter(
        torch.autograd.grad(
            [output for output, _ in given],
            learning,
            [grad for _, grad in given],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(found) if x.requires_grad else None for x in inputs]


# Blockwise ----------------------------------------------------------------------------


class TileSpec(NamedTuple):
    """What the tiles of one call have in common, beside its mask."""

    # The heads whose weights are returned: none, all, or 1 for their mean.
    shown: int
    is_causal: bool
    # No score overflows, so that the forbidden ones can be lowered to minus infinity.
    bounded: bool
    dropout_threshold: int
    seed: int


class Tile(NamedTuple):
    """Some queries of some heads, and how many keys any of them may attend to."""

    rows: slice
    items: slice
    heads: slice
    k_len: int

    def queries(self, x: Tensor) -> Tensor:
        """Its rows of `x`, with items and heads as one dimension."""
        x = x[self.rows, self.items, self.heads].flatten(1, 2)  # [rows, folded, ...]
        return x.transpose(0, 1)  # [folded, rows, ...]

    def keys(self, x: Tensor) -> Tensor:
        """The keys or values that it may attend to."""
        x = x[: self.k_len, self.items, self.heads].flatten(
            1, 2
        )  # [k_len, folded, d_k]
        return x.transpose(0, 1)  # [folded, k_len, d_k]

    def by_head(
        self,
        x: Tensor,  # [..., rows, k_len]
    ) -> Tensor:
        """What was computed for it, with items and heads apart."""
        items = self.items.stop - self.items.start
        return x.view(items, -1, *x.shape[1:])  # [items, ..., rows, k_len]

    def of_weights(
        self,
        x: Tensor,  # [..., k_len]
    ) -> Tensor:
        """Its part of returned weights, `[items, shown, rows, k_len]`."""
        heads = self.heads if x.shape[1] > 1 else slice(1)
        return x[self.items, heads, self.rows, : self.k_len]  # [..., k_len]


class Tiles:
    r"""The tiles of one call, and the buffers that they share.

    A causal tile ends at the last key that one of its queries may attend to:

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
        self, query: Tensor, key: Tensor, mask: Tensor | None, spec: TileSpec
    ) -> None:
        self.q_len, self.batch_size, self.heads, d_k = query.shape
        self.k_len, self.mask, self.spec = key.shape[0], mask, spec
        self.scale = 1 / math.sqrt(d_k)
        # With more queries than keys, causality leaves the first queries no key.
        self.first_row = max(0, self.q_len - self.k_len) if spec.is_causal else 0
        # As many heads as fit: some of one batch item, or all of several items.
        self.tile_rows = min(TILE_ROWS, self.q_len)
        fit = max(TILE_HEADS, TILE_SCORES // max(1, self.tile_rows * self.k_len))
        self.step = max(1, fit // self.heads), min(fit, self.heads)
        self.like = query
        heads = min(self.step[0], self.batch_size) * self.step[1]
        self.tile_size = heads * self.tile_rows * self.k_len
        self.buffers: dict[str, Tensor] = {}
        self.random_bits: Tensor | None = None
        if spec.is_causal and mask is None:
            rows = self.tile_rows
            past = query.new_ones(rows, rows, dtype=torch.bool)  # [rows, rows]
            self.past = past.tril()
        # What forward dropped, backward drops again.
        self.generator = torch.Generator().manual_seed(spec.seed)

    def __iter__(self) -> Iterator[Tile]:
        shift = self.k_len - self.q_len
        items, heads = self.step
        for item in range(0, self.batch_size, items):
            for head in range(0, self.heads, heads):
                for row in range(self.first_row, self.q_len, TILE_ROWS):
                    end = min(row + TILE_ROWS, self.q_len)
                    yield Tile(
                        slice(row, end),
                        slice(item, min(item + items, self.batch_size)),
                        slice(head, min(head + heads, self.heads)),
                        end + shift if self.spec.is_causal else self.k_len,
                    )

    def buffer(self, name: str, shape: torch.Size) -> Tensor:
        """Memory for the weights of one tile, with whatever was left there."""
        if name not in self.buffers:
            self.buffers[name] = self.like.new_empty(self.tile_size)
        folded, rows, k_len = shape
        return self.buffers[name][: shape.numel()].view(
            folded, rows, k_len
        )  # [folded, rows, k_len]

    def empty_output(self) -> Tensor:
        """Like the query, with zeros for the rows that no tile will write."""
        q_len, *others = self.like.shape
        output = self.like.new_empty(q_len, *others)  # [q_len, ...]
        output[: self.first_row] = 0
        return output

    def head_contiguous(self, x: Tensor) -> Tensor:
        """Keys or values in half precision, with those of each head side by side.

        A product of matrices would copy them so for each tile of queries.
        """
        if x.itemsize > 2 or self.q_len <= TILE_ROWS:
            return x
        return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)

    def weights(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
        tile: Tile,
    ) -> Tensor:
        """The weights of a tile, `[folded, rows, k_len]`."""
        q = tile.queries(query)  # [folded, rows, d_k]
        k = tile.keys(key)  # [folded, k_len, d_k]
        shape = torch.Size((*q.shape[:2], tile.k_len))
        scores = self.buffer("weights", shape)  # [folded, rows, k_len]
        torch.baddbmm(scores, q, k.mT, beta=0, alpha=self.scale, out=scores)
        if self.mask is None:
            if self.spec.is_causal:
                # Each row may attend to one key more than the row before. What is
                # forbidden lies in the last columns, as many as there are rows.
                n = q.shape[1]
                self.forbid(scores[:, :, -n:], self.past[:n, :n])
            return torch.softmax(scores, -1, out=scores)

        allowed, empty = open_empty_rows(
            self.allowed(tile, self.mask)
        )  # [..., k_len], [..., 1]
        by_head = tile.by_head(scores)  # [..., rows, k_len]
        self.forbid(by_head, allowed)
        torch.softmax(scores, -1, out=scores)
        if empty is not None:
            by_head.masked_fill_(empty, 0)
        return scores

    def forbid(self, scores: Tensor, allowed: Tensor) -> None:
        """Set the scores that are not allowed to minus infinity."""
        if self.spec.bounded:
            # One pass instead of several. But the minimum of NaN and anything is NaN.
            ceiling = torch.full_like(allowed, -math.inf, dtype=scores.dtype)
            ceiling.masked_fill_(allowed, math.inf)
            torch.minimum(scores, ceiling, out=scores)
        else:
            scores.masked_fill_(~allowed, -math.inf)

    def allowed(self, tile: Tile, mask: Tensor) -> Tensor:
        """The mask of a tile, `[items or 1, 1, rows or 1, k_len]`."""
        mask = mask[tile.rows] if mask.shape[0] > 1 else mask
        mask = mask[..., tile.items] if mask.shape[2] > 1 else mask  # [..., items]
        mask = mask[:, : tile.k_len]  # [..., k_len, items]
        mask = mask.permute(2, 0, 1).unsqueeze(1)  # [items, ..., k_len]
        if self.spec.is_causal:
            rows = tile.rows.stop - tile.rows.start
            past = mask.new_ones(rows, tile.k_len).tril(tile.k_len - rows)
            mask = mask & past
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
            weights.zero_()  # a product with zero leaves NaN
        else:
            weights.mul_(self.dropout_mask(weights.shape))

    def drop_in_full(self, weights: Tensor) -> tuple[Tensor, float]:
        """The dropout of all tiles at once, for `[batch_size, heads, q_len, k_len]`."""
        keep = torch.ones_like(weights)
        for tile in self if self.spec.dropout_threshold else ():
            part = keep[tile.items, tile.heads, tile.rows, : tile.k_len]  # [..., k_len]
            folded = torch.Size((part.shape[0] * part.shape[1], *part.shape[2:]))
            part.copy_(tile.by_head(self.dropout_mask(folded)))
        return weights * keep, dropout_scale(self.spec.dropout_threshold)


class Blockwise(torch.autograd.Function):
    r"""The context tile by tile, and the weights of as many heads as are `shown`.

    The backward pass computes the weights again. With $P$ the weights, $M$ what dropout
    multiplies them by, $O = (P \odot M)\,V$ and $G$ the gradient of $O$:

    $$dV = (P \odot M)^\top\, G$$

    $$dS_{ij} = P_{ij}\, \Big(M_{ij} \sum_d G_{id} V_{jd} - \sum_d G_{id} O_{id}\Big)$$

    $$dQ = dS\, K / \sqrt{d_k} \qquad dK = dS^\top Q / \sqrt{d_k}$$

    The subtracted sum is FlashAttention's $D$: what the softmax gives to one key it
    takes from the others. Weights that are returned bring a gradient $W$ of their
    own, from before dropout: it joins the first sum, and $\sum_j P_{ij} W_{ij}$ the
    second. Where the backward pass is itself recorded, the formula takes its place.

    A row of weights sums to 1, or to 0 if it is fully masked. So no query can change
    the sum of them all:

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

    The backward pass drops the weights that the forward pass has dropped, whether it is
    recorded or not:

    >>> context, _ = attention(query, key, value, dropout=nn.Dropout(0.5))
    >>> loss = context.pow(2).sum()
    >>> (first,) = torch.autograd.grad(loss, query, retain_graph=True)
    >>> (same,) = torch.autograd.grad(loss, query, create_graph=True)
    >>> torch.allclose(first, same, atol=1e-4)
    True
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
        value: Tensor,  # [k_len, batch_size, heads, d_k]
        mask: Tensor | None,  # [..., k_len, batch_size]
        *spec: Any,
    ) -> tuple[Tensor, Tensor]:
        tiles = Tiles(query, key, mask, TileSpec(*spec))
        context = tiles.empty_output()  # [q_len, batch_size, heads, d_k]
        shape = tiles.batch_size, tiles.spec.shown, tiles.q_len, tiles.k_len
        shown = query.new_zeros(shape)  # [batch_size, shown, q_len, k_len]
        near_key, near_value = tiles.head_contiguous(key), tiles.head_contiguous(value)
        scale = dropout_scale(tiles.spec.dropout_threshold)
        for tile in tiles:
            weights = tiles.weights(query, near_key, tile)  # [folded, rows, k_len]
            if tiles.spec.shown:
                part = tile.of_weights(shown)  # [items, shown, rows, k_len]
                by_head = tile.by_head(weights)  # [items, heads, rows, k_len]
                if tiles.spec.shown == tiles.heads:
                    part.copy_(by_head)
                else:
                    part.add_(by_head.sum(1, keepdim=True), alpha=1 / tiles.heads)
            if tiles.spec.dropout_threshold:
                tiles.drop(weights)
            part = tile.queries(context)  # [folded, rows, d_k]
            part.copy_(scaled_bmm(weights, tile.keys(near_value), scale))
        ctx.save_for_backward(context, query, key, value, mask)
        ctx.spec = spec
        # Weights that no loss uses bring no gradient, rather than one full of zeros.
        ctx.set_materialize_grads(False)
        return context, shown

    @staticmethod
    def backward(
        ctx: Any, grad_context: Tensor | None, grad_shown: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        context, query, key, value, mask = ctx.saved_tensors
        tiles = Tiles(query, key, mask, TileSpec(*ctx.spec))
        x = query, key, value
        grads: Sequence[Tensor | None]
        if torch.is_grad_enabled():
            # Views: a key that is the query, or is computed from it, has its own part.
            x = query.view_as(query), key.view_as(key), value.view_as(value)
            if grad_shown is not None:  # of the mean, each head has its share
                share = tiles.heads // grad_shown.shape[1]
                grad_shown = grad_shown.expand(-1, tiles.heads, -1, -1) / share
            causal, drop = tiles.spec.is_causal, tiles.drop_in_full
            grads = recorded_gradients(
                x, x, mask, causal, grad_context, grad_shown, drop
            )
        else:
            grads = tile_gradients(tiles, *x, context, grad_context, grad_shown)
        d_query, d_key, d_value = grads
        return d_query, d_key, d_value, None, *(None for _ in ctx.spec)


def tile_gradients(
    tiles: Tiles,
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_k]
    context: Tensor,  # [q_len, batch_size, heads, d_k]
    grad_context: Tensor | None,  # [q_len, batch_size, heads, d_k]
    grad_shown: Tensor | None,  # [batch_size, shown, q_len, k_len]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, by the formulas of `Blockwise`."""
    key, value = tiles.head_contiguous(key), tiles.head_contiguous(value)
    grad_query = tiles.empty_output()  # [q_len, batch_size, heads, d_k]
    # The tiles add up here, so half precision is given the bits of float32.
    wide = torch.promote_types(query.dtype, torch.float32)
    shape = *key.shape[1:3], key.shape[0], key.shape[3]
    grad_key, grad_value = (
        key.new_zeros(shape, dtype=wide) for _ in range(2)
    )  # [batch_size, heads, k_len, d_k]
    if grad_context is None:
        grad_context = torch.zeros_like(query)  # [q_len, batch_size, heads, d_k]
    delta = (grad_context * context).sum(-1, keepdim=True)  # [q_len, ..., 1]
    scale = dropout_scale(tiles.spec.dropout_threshold)

    for tile in tiles:
        weights = tiles.weights(query, key, tile)  # [folded, rows, k_len]
        grad = tile.queries(grad_context)  # [folded, rows, d_k]
        grad_weights = tiles.buffer("grad_weights", weights.shape)
        scaled_bmm(grad, tile.keys(value).mT, scale, out=grad_weights)
        dropped = weights
        if tiles.spec.dropout_threshold:
            dropped = tiles.buffer("dropped", weights.shape)  # [folded, rows, k_len]
            dropped.copy_(tiles.dropout_mask(weights.shape))
            grad_weights.mul_(dropped)
            dropped.mul_(weights)
        accumulate_bmm(grad_value, tile, dropped.mT, grad, scale)

        total = tile.queries(delta)  # [folded, rows, 1]
        if grad_shown is not None:
            part = tile.of_weights(grad_shown)  # [items, shown, rows, k_len]
            if grad_shown.shape[1] < tiles.heads:
                part = part / tiles.heads  # [items, shown, rows, k_len]
            tile.by_head(grad_weights).add_(part)
            weighted = tiles.buffer("weighted", weights.shape)  # [folded, rows, k_len]
            torch.mul(tile.by_head(weights), part, out=tile.by_head(weighted))
            total = total + weighted.sum(-1, keepdim=True)  # [folded, rows, 1]
        grad_scores = grad_weights.sub_(total).mul_(weights)  # [folded, rows, k_len]
        part = tile.queries(grad_query)  # [folded, rows, d_k]
        part.copy_(scaled_bmm(grad_scores, tile.keys(key), tiles.scale))
        accumulate_bmm(grad_key, tile, grad_scores.mT, tile.queries(query), tiles.scale)
    grad_key, grad_value = (
        x.permute(2, 0, 1, 3) for x in (grad_key, grad_value)
    )  # [k_len, batch_size, heads, d_k]
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def scaled_bmm(
    a: Tensor,  # [folded, rows, inner]
    b: Tensor,  # [folded, inner, columns]
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """`scale` times the product of matrices, in one pass."""
    unused = a.new_empty(()) if out is None else out
    result = torch.baddbmm(unused, a, b, beta=0, alpha=scale, out=out)
    return result  # [folded, rows, columns]


def accumulate_bmm(
    total: Tensor,  # [..., k_len, d_k]
    tile: Tile,
    a: Tensor,  # [folded, k_len, rows]
    b: Tensor,  # [folded, rows, d_k]
    scale: float,
) -> None:
    """Add the product of `a` and `b` to what other tiles gave to the same keys."""
    part = total[tile.items, tile.heads, : tile.k_len]  # [..., k_len, d_k]
    part = part.flatten(0, 1)  # [folded, k_len, d_k]
    if part.dtype == a.dtype:
        part.baddbmm_(a, b, alpha=scale)
    else:
        part.add_(torch.bmm(a, b), alpha=scale)
