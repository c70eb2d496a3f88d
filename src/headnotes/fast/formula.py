r"""# Attention by the formula

The method `materialized` computes attention by its formula, with all weights in memory.
It is for readers of [the function `attention`](attention.md), which uses it for short
sequences and for all that the faster methods lack: transforms such as `vmap`, forward
mode, and dropout modules of one's own.

$$A = \operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) \qquad C = A V$$

The module also has what all methods share: `Call`, the record of one call of
`attention`, and functions for masks, dropout and second derivatives.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812

from headnotes.checks import check_dropout

# Up to this many keys, neither tiles nor copies of the heads save any time.
SHORT_KEYS = 128

# What plain dropout computes. Programs replace `nn.Dropout`, and patch its `forward`.
Dropout = nn.Dropout
Forwards = dict[type[nn.Module], Callable[..., Any]]
DROPOUTS: Forwards = {kind: kind.forward for kind in (nn.Dropout, nn.Identity)}

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
    mask: Tensor | None = None
    is_causal: bool = False
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout: nn.Module = field(default_factory=nn.Identity)
    need_weights: bool = False
    average_weights: bool = False

    # Inside of `vmap`, `jvp` or a tracer, in forward mode, or with a tensor subclass.
    transformed: bool = False
    # Eager on a CPU, where values can be inspected without a synchronization.
    eager: bool = False

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
        """Whether the dropout does anything but what `nn.Dropout` does."""
        return not is_plain(self.dropout, DROPOUTS)

    @property
    def dropout_prob(self) -> float:
        """The probability of plain dropout; 0 in evaluation.

        The mode of the dropout module decides, as in the core: Monte Carlo dropout sets
        the mode of this module only.
        """
        module = self.dropout
        if type(module) is not Dropout:
            return 0.0
        p = float(module.p)
        if not 0 <= p <= 1:  # assigned since the module was made
            check_dropout(p)
        return p if module.training else 0.0

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
        if not (math.isfinite(query) or self.needs_grad):
            # A query with NaN makes its own row NaN, and affects no other row. (In the
            # backward pass it affects all, unless its row is fully masked.)
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


def materialized(call: Call) -> tuple[Tensor, Tensor | None]:
    r"""The formula, with all weights in memory.

    Three queries, five keys, causal and masked; the row of query 1 is fully masked:

    >>> query, key = torch.randn(8, 2, 7, 11).split([3, 5])
    >>> mask = torch.ones(3, 5, 2).bool()
    >>> mask[1, :4] = False
    >>> options = {"mask": mask, "is_causal": True, "need_weights": True, "eager": True}
    >>> context, weights = materialized(Call(query, key, key, **options))
    >>> (weights[:, :, 0, 0] > 0).int()
    tensor([[1, 1, 1, 0, 0],
            [0, 0, 0, 0, 0],
            [1, 1, 1, 1, 1]], dtype=torch.int32)

    >>> options["average_weights"] = True
    >>> _, mean = materialized(Call(query, key, key, **options))
    >>> torch.allclose(mean, weights.mean(-1))
    True

    Dropout can be replaced by any module. This one does not change the weights:

    >>> context, _ = materialized(Call(query, key, key, dropout=nn.ReLU()))
    >>> same, _ = materialized(Call(query, key, key))
    >>> torch.allclose(context, same, atol=1e-6)
    True

    With grouped heads, a sink that is far above all scores takes the whole weight:

    >>> query, key = torch.randn(3, 2, 6, 11), torch.randn(5, 2, 2, 11)
    >>> value = torch.randn(5, 2, 2, 13).requires_grad_()
    >>> sinks = torch.full((6,), 99.0)
    >>> context, _ = materialized(Call(query, key, value, soft_cap=9.0, sinks=sinks))
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


def formula(call: Call, drop: Drop) -> tuple[Tensor, Tensor]:
    """The context, `[q_len, batch_size, heads, d_k]`, and the weights, heads first."""
    q_len, batch_size, heads, _ = call.query.shape
    q, k, v = (
        x.flatten(1, 2).transpose(0, 1) for x in (call.query, call.key, call.value)
    )  # [batch_size * heads, q_len, d_k], [..., k_len, d_k], [..., k_len, d_v]
    q = merge_groups(q, call.groups)  # [..., d_k]
    product = transformed_bmm if call.transformed else scaled_bmm
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
        scores = product(q, k.mT, call.score_scale)  # [..., k_len]
    sizes = batch_size, heads, q_len, k.shape[1]
    scores = scores.view(sizes)  # [batch_size, heads, q_len, k_len]
    if call.soft_cap is not None:
        capped = call.soft_cap * torch.tanh(wide_range(scores) / call.soft_cap)
        scores = capped.to(scores.dtype)  # [batch_size, heads, q_len, k_len]
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
    context = product(merge_groups(dropped, call.groups), v, factor)  # [..., d_v]
    context = context.view(*sizes[:3], v.shape[-1])  # [batch_size, ..., q_len, d_v]
    if empty is not None and not call.has_custom_dropout:
        # Zero times NaN is NaN. (A dropout of your own may return other weights.)
        context = context.masked_fill(empty, 0)
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


def transformed_bmm(
    a: Tensor,  # [batch_heads, rows, inner]
    b: Tensor,  # [batch_heads, inner, columns]
    scale: float,
) -> Tensor:
    """As `scaled_bmm`, which `torch.func.linearize` answers with a segmentation fault.

    It does so for each `baddbmm` with `beta=0`, in PyTorch 2.13.

    >>> a, b = torch.randn(3, 5, 7), torch.randn(3, 7, 11)
    >>> product = transformed_bmm(a, b, 0.5)
    >>> torch.allclose(product, scaled_bmm(a, b, 0.5), atol=1e-6)
    True
    """
    return torch.bmm(a * scale, b)  # [batch_heads, rows, columns]


def wide_range(scores: Tensor) -> Tensor:
    """The scores for a soft cap, in float32 if they are in float16.

    There, the quotient by a large cap underflows, and a gradient times the cap
    overflows.

    >>> wide_range(torch.zeros(1).half()).dtype
    torch.float32
    """
    return scores.float() if scores.dtype == torch.float16 else scores


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
    if known_true(has_key):
        return allowed, None
    return allowed == has_key, ~has_key


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
    # Causality alone hides no key from the last query.
    if window is not None or (is_causal and mask.shape[0] > 1):
        mask = band_mask(q_len, key, is_causal, window) & mask
    seen = mask[0] if mask.shape[0] == 1 else mask.any(dim=0)  # [k_len, ...]
    unseen = ~seen  # [k_len, ...]
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
    attend to it are multiplied by NaN. A value with NaN affects all rows that are not
    fully masked: even with a weight of 0, because 0 * NaN is NaN.

    This is stricter than the formula. There, an infinite key makes only those rows NaN
    whose score is infinity or NaN; a score of minus infinity is a weight of 0. To tell
    them apart, all scores would have to be computed, which the fused kernel avoids.

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
    # The largest magnitude takes a single pass, and 0 times infinity or NaN is not 0.
    bad_key, bad_value = (
        torch.linalg.vector_norm(x, math.inf, dim=(2, 3)) * 0 != 0 for x in (key, value)
    )  # [k_len, batch_size]
    bad_item = bad_value.any(0)  # [batch_size]
    bad = (bad_key | bad_item).T[:, None, None]  # [batch_size, 1, 1, k_len]
    reached = (allowed & bad).any(-1, keepdim=True)  # [batch_size, 1, q_len, 1]
    factor = torch.where(reached, math.nan, 1.0)  # [batch_size, 1, q_len, 1]
    factor = factor.to(key.dtype)
    key, value = (
        x.masked_fill(where[..., None, None], 0)
        for x, where in ((key, bad_key), (value, bad_value))
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
    if torch.compiler.is_compiling():
        return False
    # A transform may have none of its tensors here: `vmap` repeats random numbers.
    if has_functorch_transform():
        return True
    for x in tensors:
        # A subclass of Tensor may redefine any operator.
        if type(x) not in (Tensor, nn.Parameter):
            return True
        if has_tangent(x):
            return True
    if is_jit_tracing():
        return True
    # `make_fx` records plain tensors, and raises where their values are inspected.
    # Other modes, such as that which counts operations, do not.
    has_mode = (
        torch._C._len_torch_dispatch_stack()
        or torch._ops._len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
    )
    return bool(has_mode) and not known_true(torch.ones((), device="cpu"))


def has_tangent(x: Tensor) -> bool:
    """Whether forward mode computes a derivative along with `x`."""
    dual: Any = forward_ad.unpack_dual(x)  # type: ignore[no-untyped-call]
    return dual.tangent is not None


def has_functorch_transform() -> bool:
    """Whether a transform of `torch.func` is active, such as `vmap` or `jvp`."""
    return torch._C._are_functorch_transforms_active()


def is_plain(module: nn.Module, forwards: Forwards) -> bool:
    """Whether a call of `module` is one of these methods `forward`, without a hook.

    Otherwise the module must be called: a hook may change what it returns.

    >>> dropout = nn.Dropout(0.5)
    >>> is_plain(dropout, DROPOUTS)
    True
    >>> dropout.forward = lambda weights: weights / 2
    >>> is_plain(dropout, DROPOUTS)
    False
    """
    hooked = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )
    if hooked or "forward" in module.__dict__:
        return False
    kind = type(module)
    return kind in forwards and kind.forward is forwards[kind]


def known_true(condition: Tensor) -> bool:
    """Whether all of `condition` is known to hold: on a CPU, where a look is cheap."""
    if is_traced() or condition.device.type != "cpu":
        return False
    try:
        return bool(condition.all())
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
        bounds = x.detach().aminmax()
        low, high = float(bounds.min), float(bounds.max)
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

    >>> dropped, scale = fast_dropout(torch.ones(1000, 100), 0.25)
    >>> round(scale, 3), round(dropped.mean().item() * scale, 1)
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


# Second derivatives -----------------------------------------------------------------


def needs_recorded_gradients(*grads: Tensor | None) -> bool:
    """Whether autograd records the backward pass, or its gradients are batches.

    Both need operators with rules of their own for it, which the kernels are not.
    `is_grads_batched=True` makes batches of the kind that preceded `torch.func`.
    """
    return (
        torch.is_grad_enabled()
        or has_functorch_transform()
        or any(
            torch._C._functorch.is_legacy_batchedtensor(x)
            for x in grads
            if x is not None
        )
    )


def recorded_gradients(
    inputs: Sequence[Tensor | None],
    call: Call,
    grad_context: Tensor | None,
    grad_weights: Tensor | None = None,
    drop: Drop = lambda weights: (weights, 1.0),
) -> list[Tensor | None]:
    """The gradients of the formula for `inputs`, recorded if the backward pass is.

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
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]
