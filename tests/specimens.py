"""A correct attention module, and modules that violate each law; for tests only."""

import copy
import math
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn


class Correct(nn.Module):
    """Batch first; the mask is `[batch_size, q_len, k_len]`, True = may attend."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        q, k, v = self.query(query), self.key(key), self.value(value)
        q, k, v = (self.split(x) for x in (q, k, v))
        weights = self.weigh(self.score(q, k), mask)
        return self.join(self.read(self.dropout(weights), v))

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q / math.sqrt(q.shape[-1]) @ k.mT

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            # The least finite number: a fully masked row is uniform, and not NaN.
            least = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~mask[:, None], least)
        return scores.softmax(dim=-1)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v

    def join(self, context: Tensor) -> Tensor:
        joined: Tensor = self.out(context.transpose(1, 2).flatten(2))
        return joined


class MaskedSelfAttention(Correct):
    """Causal self-attention."""

    corner = 0

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        return super().forward(x, x, x, ones.tril(self.corner)[None])


# Laws of masking.


class MaskOffByOne(MaskedSelfAttention):
    corner = 1


class UnmaskedInEval(MaskedSelfAttention):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, mask if self.training else None)


class UnmaskedUnderNoGrad(MaskedSelfAttention):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, mask if torch.is_grad_enabled() else None)


class UnmaskedAsTeacher(MaskedSelfAttention):
    """A model in training mode, without gradients, has targets for another one."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        is_teacher = self.training and not torch.is_grad_enabled()
        return super().weigh(scores, None if is_teacher else mask)


class LeaksGradient(MaskedSelfAttention):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        future = v.sum(dim=2, keepdim=True)
        return weights @ v + (future - future.detach())


class MultipliesByMask(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores if mask is None else scores * mask[:, None]).softmax(dim=-1)


class DependsOnKeyCount(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * math.log(1 + k.shape[2])


class MixesBatchItems(Correct):
    def join(self, context: Tensor) -> Tensor:
        output = super().join(context)
        return output - output.mean(dim=0) if self.training else output


class MasksWithInfinity(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        return scores.softmax(dim=-1)


class ZeroesNanAfterSoftmax(MasksWithInfinity):
    """Finite in the forward pass; in the backward pass, 0 times NaN is NaN."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return super().read(weights, v).nan_to_num()


class DividesByKeyCount(Correct):
    """Adds 0, except in fully masked rows: there it divides by the number of keys."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        output = super().forward(query, key, value, mask)
        if mask is None:
            return output
        count = mask.sum(dim=-1, keepdim=True).to(query)
        return output + self.more(count / count - 1, query)

    def more(self, zero: Tensor, query: Tensor) -> Tensor:
        return zero


class NanInQueryGradient(DividesByKeyCount):
    """Only the gradient of the queries is NaN."""

    def more(self, zero: Tensor, query: Tensor) -> Tensor:
        return (zero * query).masked_fill(zero.isnan(), 0)


class NanInParameterGradient(DividesByKeyCount):
    """Only the gradient of a parameter is NaN."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.gate = nn.Parameter(torch.ones(1))

    def more(self, zero: Tensor, query: Tensor) -> Tensor:
        return (zero * self.gate).masked_fill(zero.isnan(), 0)


# Laws of the formula.


class ReturnsDroppedWeights(Correct):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        self.attn = weights.detach()
        return weights @ v


class ReturnsWeightsBeforeMask(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.attn = scores.detach().softmax(dim=-1)
        return super().weigh(scores, mask)


class WeightsAboveOne(Correct):
    """Its weights are not returned; for later queries, they sum to more than 1."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        more = torch.arange(scores.shape[2], device=scores.device)[:, None]
        return super().weigh(scores, mask) * (1 + more).to(scores)


class NegativeWeights(Correct):
    """Its returned weights sum to 1, and some are negative."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        self.attn = (2 * weights - weights.flip(-1)).detach()
        return weights


def nine_tenths(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A function whose weights sum to 0.9."""
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1)
    return 0.9 * weights @ value


class HidesFirstKey(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        first = torch.arange(scores.shape[-1], device=scores.device) == 0
        return super().weigh(scores.masked_fill(first, -1e4), mask)


class ScalesByWidth(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / math.sqrt(q.shape[-1] * self.heads)


class NonlinearInValues(Correct):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v.tanh()


class DetachesQueries(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q.detach(), k)


class FillValueTooHigh(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -1e3)
        return scores.softmax(dim=-1)


class SoftmaxWithoutMaximum(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = scores.exp()
        if mask is not None:
            weights = weights * mask[:, None]
        return weights / weights.sum(dim=-1, keepdim=True)


class MaskedSoftmaxWithoutMaximum(MaskedSelfAttention, SoftmaxWithoutMaximum):
    pass


class UnusedLayer(Correct):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.gate = nn.Linear(d_model, d_model)


class ZeroGate(UnusedLayer):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v + 0 * (self.gate.weight.sum() + self.gate.bias.sum())


class BiasOfQueries(Correct):
    """A table of biases that is the same for all keys, which the softmax cancels."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.table = nn.Embedding(16, heads)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        return super().score(q, k) + self.table(place).T[:, :, None]


# Laws of order and positions.


class AddsKeyIndex(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device).to(k)
        return super().score(q, k) + place


class NormalizesOverQueries(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores.softmax(dim=2), mask)


class SkipsOneQuery(Correct):
    """A path of its own for one query, without a scale."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT if q.shape[2] == 1 else super().score(q, k)


class ViewsAsHeads(Correct):
    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.heads, x.shape[1], -1)


class SelfAttention(Correct):
    """Self-attention without a mask."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x)


class ViewsAsHeadsSelfAttention(SelfAttention, ViewsAsHeads):
    pass


class WithCache(Correct):
    """Self-attention with a KV cache."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if past is None else torch.cat([past, x], dim=1)
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        return super().forward(x, seen, seen, ones.tril(self.corner(ones))), seen

    def corner(self, ones: Tensor) -> int:
        return ones.shape[2] - ones.shape[1]


class CacheTopLeft(WithCache):
    def corner(self, ones: Tensor) -> int:
        return 0


class CacheForgetsPadding(WithCache):
    """The padding mask of a call with a cache hides none of the past keys."""

    def forward(
        self, x: Tensor, past: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        seen = x if past is None else torch.cat([past, x], dim=1)
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        allowed = ones.tril(seen.shape[1] - x.shape[1])
        if mask is not None:
            is_past = (
                torch.arange(seen.shape[1], device=x.device)
                < seen.shape[1] - x.shape[1]
            )
            allowed = allowed & (mask | is_past)[:, None]
        return Correct.forward(self, x, seen, seen, allowed), seen


class CacheInDict(Correct):
    """Self-attention whose cache is a dict that the caller passes and it modifies."""

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, cache: Any = None
    ) -> Any:
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        past = cache or {"x": x[:, :0], "mask": mask[:, :0]}
        seen, allowed = torch.cat([past["x"], x], dim=1), self.join_masks(past, mask)
        if cache is not None:
            cache.update(x=seen, mask=allowed)
        ones = torch.ones(x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device)
        causal = ones.tril(seen.shape[1] - x.shape[1])
        return super().forward(x, seen, seen, causal & allowed[:, None])

    def join_masks(self, past: Any, mask: Tensor) -> Tensor:
        return torch.cat([past["mask"], mask], dim=1)


class DictForgetsPadding(CacheInDict):
    def join_masks(self, past: Any, mask: Tensor) -> Tensor:
        return torch.cat([torch.ones_like(past["mask"]), mask], dim=1)


class StoresCache(CacheInDict):
    """The module itself stores the cache, if a flag is given."""

    stored: dict[str, Tensor]

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.stored = {}

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, incremental: bool = False
    ) -> Any:
        return super().forward(x, mask, self.stored if incremental else None)

    def reorder(self, order: Tensor) -> None:
        self.stored = {name: x[order] for name, x in self.stored.items()}


class ReordersTokensOnly(StoresCache):
    def reorder(self, order: Tensor) -> None:
        self.stored["x"] = self.stored["x"][order]


class TopLeftCorner(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and not mask.all():
            # Replaces every mask by a causal one.
            mask = torch.ones_like(mask).tril()
        return super().weigh(scores, mask)


class Window(MaskedSelfAttention):
    """Causal self-attention with a sliding window."""

    reach = 2

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return super().weigh(scores, mask.triu(-self.reach))


class Chunks(MaskedSelfAttention):
    """Causal self-attention within chunks of 4 tokens."""

    chunk_size = 4

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        chunk = torch.arange(scores.shape[-1], device=scores.device) // self.chunk_size
        return super().weigh(scores, mask & (chunk == chunk[:, None]))


class WideWindow(Window):
    reach = 3


class NarrowWindow(Window):
    reach = 1


class LinearBias(MaskedSelfAttention):
    """ALiBi: a bias that falls with the distance, with a slope for each head."""

    sign = 1

    def slopes(self, heads: int) -> Tensor:
        power = 1 << (heads.bit_length() - 1)
        order = torch.arange(1, heads + 1)
        order = torch.where(order > power, order - power - 0.5, order)
        return self.sign * 0.5 ** (8 * order / power)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device)
        slopes = self.slopes(k.shape[1]).to(k.device)[:, None, None]
        return super().score(q, k) + (slopes * (place - place[:, None])).to(k)


class BiasCountedInHalf(LinearBias):
    """Positions have the dtype of the tokens: in bfloat16, 257 is 256."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device, dtype=k.dtype)
        distance = (place - place[:, None]).float()
        slopes = self.slopes(k.shape[1]).to(k.device)[:, None, None]
        return MaskedSelfAttention.score(self, q, k) + (slopes * distance).to(k)


class BiasOfLaterKeys(LinearBias):
    """Without a mask: the weights of the first keys are too small to be exact."""

    def forward(self, x: Tensor) -> Any:
        return Correct.forward(self, x, x, x)


class BiasWithWrongSign(LinearBias):
    sign = -1


class QuadraticBias(LinearBias):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device).to(k)
        return MaskedSelfAttention.score(self, q, k) - (place - place[:, None]) ** 2 / 8


class WindowAtPrediction(SelfAttention):
    """Each token predicts the position around which it attends, in float32."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.center = nn.Linear(d_model, 1)

    def forward(self, x: Tensor) -> Any:
        center = (x.shape[1] - 1) * self.center(x).float().sigmoid()
        distance = torch.arange(x.shape[1], device=x.device) - center
        return Correct.forward(self, x, x, x, distance.abs() <= 2)


class BiasOfSums(MaskedSelfAttention):
    """A learned bias for each distance, whose table is indexed by the sum."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.bias = nn.Parameter(torch.zeros(64))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device)
        return super().score(q, k) + self.bias[place + place[:, None]]


class ScoresOfTwoQueries(MaskedSelfAttention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        return scores + scores.roll(1, dims=2)


class Rotary(MaskedSelfAttention):
    """RoPE: pairs of neighboring components are rotated by the position."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.turn(q), self.turn(k))

    def turn(self, x: Tensor) -> Tensor:
        place = self.places(x)[:, None]
        pair = torch.arange(x.shape[3] // 2, device=x.device)
        angle = self.angles(place * self.speed(pair, x.shape[3]))
        other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return x * angle.cos().to(x) + other * angle.sin().to(x)

    def speed(self, pair: Tensor, width: int) -> Tensor:
        return 0.3**pair

    def places(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[2], device=x.device)

    def angles(self, angle: Tensor) -> Tensor:
        return angle.repeat_interleave(2, dim=-1)


class RotaryOfDevices(Rotary):
    """Two devices have half of the heads each: their queries, values and keys."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        if heads % 4:
            raise ValueError("each device has the same number of heads")
        self.devices = 2
        del self.query, self.key, self.value
        self.qkv = nn.Linear(d_model, 3 * d_model)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.qkv(x).unflatten(-1, (self.devices, -1)).chunk(3, -1)
        q, v, k = (self.split(part.flatten(2)) for part in parts)
        later = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
        scores = self.score(q, k).masked_fill(later, -torch.inf)
        weights = scores.softmax(dim=-1)
        return self.join(weights @ v), weights


class RotaryOfManyDevices(RotaryOfDevices):
    """Each device has one head."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.devices = heads


class RotaryUnscaled(Rotary):
    """The scale is part of the weights, as the class states."""

    scaling = 1

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q * math.sqrt(q.shape[-1]), k)


class RotaryWithBase(Rotary):
    def speed(self, pair: Tensor, width: int) -> Tensor:
        return 10000.0 ** (-2 * pair / width)


class RotaryOfQuarter(Rotary):
    """A quarter of the components of each head are rotated."""

    def turn(self, x: Tensor) -> Tensor:
        width = x.shape[3] // 8 * 2
        return torch.cat([super().turn(x[..., :width]), x[..., width:]], dim=-1)


class RotaryAfterNorms(Rotary):
    """Queries and keys are normalized over the whole width."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.q_norm = nn.LayerNorm(d_model)
        self.k_norm = nn.LayerNorm(d_model)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        whole = (x.transpose(1, 2).flatten(2) for x in (q, k))
        norms = (self.q_norm, self.k_norm)
        q, k = (self.split(n(x)) for n, x in zip(norms, whole, strict=True))
        return super().score(q, k)


class RotaryOfModelWidth(RotaryWithBase):
    """The angles are computed with the width of the model."""

    def speed(self, pair: Tensor, width: int) -> Tensor:
        return super().speed(pair, width * self.heads)


class RotaryWrongPairs(Rotary):
    def angles(self, angle: Tensor) -> Tensor:
        return torch.cat([angle, angle], dim=-1)


class RotaryKeysAhead(Rotary):
    """Keys are rotated as if they were one position later."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        first = torch.zeros_like(k[:, :, :1])
        ahead = self.turn(torch.cat([first, k], dim=2))[:, :, 1:]
        return Correct.score(self, self.turn(q), ahead)


class RotaryWrongPairsWithMask(RotaryWrongPairs):
    """With a mask argument, so that positions can be shifted."""

    forward = Correct.forward  # type: ignore[assignment]


class CausalUnlessMasked(MaskedSelfAttention):
    """Causal, unless a mask for queries and keys takes the place of causality."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is None:
            return super().forward(x)
        return Correct.forward(self, x, x, x, mask)


class RotaryUnlessMasked(Rotary):
    """Causal, unless a mask takes the place of causality."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is None:
            mask = torch.ones(1, *x.shape[1:2] * 2, device=x.device).bool().tril()
        return Correct.forward(self, x, x, x, mask)


def attention_of_heads(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Splits projected queries, keys and values into heads."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return (
        nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    )


def attention_of_new_tokens(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
) -> Tensor:
    """The keys and values of new tokens, if any, replace the last ones."""
    if k is not None and v is not None:
        place = torch.arange(
            k_cache.shape[2] - k.shape[2], k_cache.shape[2], device=k_cache.device
        )
        k_cache, v_cache = k_cache.clone(), v_cache.clone()
        k_cache[:, :, place], v_cache[:, :, place] = k, v
    return nn.functional.scaled_dot_product_attention(q, k_cache, v_cache)


# Laws of execution.


class HalvesInTraining(Correct):
    def join(self, context: Tensor) -> Tensor:
        return super().join(context) / (2 if self.training else 1)


class HalvesWithGradients(Correct):
    def join(self, context: Tensor) -> Tensor:
        half = torch.is_grad_enabled() and not self.training
        return super().join(context) / (2 if half else 1)


class DropoutInEval(Correct):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return nn.functional.dropout(weights, self.dropout.p, training=True) @ v


class ModifiesMask(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask[:, :, 0] = True
        return super().weigh(scores, mask)


class ModifiesData(Correct):
    """Writing through `data` does not increase the version of a tensor."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask.data[:, :, -1] = True
        return super().weigh(scores, mask)


class CountsCalls(Correct):
    calls: Tensor

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.register_buffer("calls", torch.zeros(()))

    def join(self, context: Tensor) -> Tensor:
        self.calls += 1
        return super().join(context)


class ReturnsFloat32(Correct):
    def join(self, context: Tensor) -> Tensor:
        return super().join(context).float()


class FillValueOverflowsHalf(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -1e9)
        return scores.softmax(dim=-1)


class OneFillValueOverflowsHalf(FillValueOverflowsHalf):
    """The least number is that of the dtype for one of two masks only."""

    def forward(  # type: ignore[override]
        self, x: Tensor, padding: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Any:
        self.padding = padding
        return super().forward(x, x, x, attn_mask)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        if self.padding is None:
            return scores
        return scores.masked_fill(self.padding[:, None, None], -1e4)


class DiffersIfCompiled(Correct):
    def join(self, context: Tensor) -> Tensor:
        return super().join(context) * (2 if torch.compiler.is_compiling() else 1)


class Doubled(torch.autograd.Function):
    """The identity, with a wrong rule for `vmap`."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return 2 * x, in_dims[0]


class DiffersUnderVmap(Correct):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ Doubled.apply(v)  # type: ignore[no-any-return, no-untyped-call]


class NoMaskUnderAutocast(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        cast = torch.is_autocast_enabled(scores.device.type)
        return super().weigh(scores, None if cast else mask)


class TensorNotInStateDict(Correct):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.scale = 1 + torch.rand(1)

    def join(self, context: Tensor) -> Tensor:
        return super().join(context) * self.scale.to(context)


class CopyDiffers(Correct):
    gain = 2.0

    def join(self, context: Tensor) -> Tensor:
        return super().join(context) * self.gain

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"gain": 1.0}


class ReturnsOnCpu(Correct):
    """Correct if everything is on the CPU."""

    def join(self, context: Tensor) -> Tensor:
        return super().join(context).cpu()


# Laws of calls: masks, state, length, precision.


class OtherPathWithoutMask(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores if mask is None else 2 * scores, mask)


class TwoMasks(Correct):
    """The mask for padding is used instead of the causal one."""

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Any:
        if padding_mask is not None:
            mask = padding_mask[:, None].expand(-1, x.shape[1], -1)
        return super().forward(x, x, x, mask)


class FirstItemsMask(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, mask if mask is None else mask[:1])


class LosesAxisOfOneKey(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.shape[-1] == 1:
            mask = mask.squeeze(-1)
        return super().weigh(scores, mask)


class IgnoresMaskIfFirstIsFull(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        is_full = mask is not None and bool(mask[0].all())
        return super().weigh(scores, None if is_full else mask)


class ReturnsOtherHeads(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        self.attn = weights.detach().roll(1, 1)
        return weights


class SignOfAllInstances(Correct):
    """Each new instance reverses the scores of all others."""

    sign: ClassVar[list[int]] = [1]

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.sign[0] *= -1

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return self.sign[0] * super().score(q, k)


class SignOfItsOwn(SignOfAllInstances):
    """Every second instance has reversed scores."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.sign = [*self.sign]


class KeepsFirstMask(MaskedSelfAttention):
    """The causal mask is made once, and cut to the length."""

    kept: Tensor | None = None

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if self.kept is None or self.kept.shape[-1] < scores.shape[-1]:
            self.kept = mask if self.kept is None else torch.ones_like(mask)  # type: ignore[arg-type]
        length = scores.shape[-1]
        return super().weigh(scores, self.kept[:, :length, :length])  # type: ignore[index]


class KeepsMask(Correct):
    """A call without a mask has that of the call before, if the shape allows."""

    kept: Tensor | None = None

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.kept = mask if mask is not None else self.kept
        if self.kept is not None and self.kept.shape == scores[:, 0].shape:
            mask = self.kept
        return super().weigh(scores, mask)


class KeepsLongest(Rotary):
    """Angles are divided by the length of the longest sequence so far."""

    longest = 64

    def angles(self, angle: Tensor) -> Tensor:
        self.longest = max(self.longest, len(angle))
        return super().angles(angle) * 64 / self.longest


class PositionsOfFirstItem(Rotary):
    ids: Tensor | None = None

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Any:  # type: ignore[override]
        self.ids = position_ids
        return super().forward(x)

    def places(self, x: Tensor) -> Tensor:
        return super().places(x) if self.ids is None else self.ids[0]


class KeepsHalf(Rotary):
    """The table is made once, in the dtype of the first call."""

    kept: Tensor | None = None

    def angles(self, angle: Tensor) -> Tensor:
        if self.kept is None or len(self.kept) != len(angle):
            self.kept = super().angles(angle).to(self.query.weight.dtype)
        return self.kept


class KeepsContext(Correct):
    """Without gradients, projected keys and values are kept while the shapes do."""

    kept: tuple[Any, Tensor, Tensor] | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        if torch.is_grad_enabled():
            return super().forward(query, key, value, mask)
        if self.kept is None or self.kept[0] != key.shape:
            self.kept = key.shape, key, value
        return super().forward(query, *self.kept[1:], mask)


class LosesLastBlock(SelfAttention):
    """Keys after the last full block of 64 are left out."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        length = scores.shape[-1]
        last = torch.arange(length, device=scores.device) >= length // 64 * 64
        return weights.masked_fill(last, 0) if length > 64 else weights


class DropsScores(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return self.dropout(super().score(q, k))

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v


class NeverDrops(Correct):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        projected = (self.query(query), self.key(key), self.value(value))
        q, k, v = (self.split(x) for x in projected)
        return self.join(self.read(self.weigh(self.score(q, k), mask), v))


class DropsOutputOnly(NeverDrops):
    """Two dropout layers, of which the one for the weights is never called."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.attn_drop = nn.Dropout(0.1)
        self.out_drop = nn.Dropout(0.1)

    def join(self, context: Tensor) -> Tensor:
        dropped: Tensor = self.out_drop(super().join(context))
        return dropped


class Dropout(NeverDrops):
    """Along each axis of size 1 in `shape`, all weights share one dropout mask."""

    shape = (-1, -1, -1, -1)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        pairs = zip(weights.shape, self.shape, strict=True)
        sizes = [1 if axis == 1 else size for size, axis in pairs]
        return super().read(weights * self.dropout(weights.new_ones(sizes)), v)


class DropsForAllItems(Dropout):
    shape = (1, -1, -1, -1)


class DropsForAllHeads(Dropout):
    shape = (-1, 1, -1, -1)


class DropsForAllQueries(Dropout):
    shape = (-1, -1, 1, -1)


class DropsRows(Dropout):
    shape = (-1, -1, -1, 1)


class DropsWithoutScale(NeverDrops):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        kept = torch.rand_like(weights) >= self.dropout.p if self.training else 1
        return weights * kept @ v


class KeepsWhatItShouldDrop(NeverDrops):
    """The dropout probability is used as the probability to keep."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        if not self.training or self.dropout.p == 0:
            return weights @ v
        keep = self.dropout.p
        return weights * (torch.rand_like(weights) < keep) / keep @ v


class DropsWithoutScaleAfterNorm(DropsWithoutScale):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        x = self.norm(x)
        return super().forward(x, x, x)


class KeepsWhatItShouldDropAfterNorm(KeepsWhatItShouldDrop):
    """What is kept is not scaled either, and the norm hides the mean."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)
        self.last = nn.Conv1d(d_model, d_model, 1)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        x = self.norm(x)
        return self.last(super().forward(x, x, x).mT).mT

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        if not self.training or self.dropout.p == 0:
            return weights @ v
        keep = self.dropout.p
        return weights * (torch.rand_like(weights) < keep) / (1 - keep) @ v


def forgets_to_rescale(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """An online softmax over blocks of 16 keys whose `norm` is never rescaled."""
    query = query / query.shape[-1] ** 0.5
    largest = query.new_full((*query.shape[:-1], 1), -torch.inf)
    norm, context = torch.zeros_like(largest), torch.zeros_like(query)
    for k, v in zip(key.split(16, -2), value.split(16, -2), strict=True):
        scores = query @ k.mT
        larger = scores.amax(-1, keepdim=True).maximum(largest)
        weights = (scores - larger).exp()
        norm = norm + weights.sum(-1, keepdim=True)
        context = context * (largest - larger).exp() + weights @ v
        largest = larger
    return context / norm


def forgets_to_rescale_late(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Blocks of 256 keys; `norm` is rescaled for the second, and not for the third."""
    query = query / query.shape[-1] ** 0.5
    largest = query.new_full((*query.shape[:-1], 1), -torch.inf)
    norm, context = torch.zeros_like(largest), torch.zeros_like(query)
    blocks = zip(key.split(256, -2), value.split(256, -2), strict=True)
    for n, (k, v) in enumerate(blocks):
        scores = query @ k.mT
        larger = scores.amax(-1, keepdim=True).maximum(largest)
        weights, scale = (scores - larger).exp(), (largest - larger).exp()
        norm = norm * (scale if n < 2 else 1) + weights.sum(-1, keepdim=True)
        context = context * scale + weights @ v
        largest = larger
    return context / norm


class SumsBlocks(Correct):
    """An online softmax over blocks of 64 keys; its layers have names of their own."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.asks, self.query = self.query, nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.asks, self.key, self.value))
        scores = self.score(q, k).masked_fill(~mask[:, None, None], -1e4)
        largest = torch.full_like(scores[..., :1], -1e5)
        norm, context = torch.zeros_like(largest), torch.zeros_like(q)
        for s, part in zip(scores.split(64, -1), v.split(64, -2), strict=True):
            larger = s.amax(-1, keepdim=True).maximum(largest)
            weights, scale = (s - larger).exp(), (largest - larger).exp()
            norm = norm * scale + weights.sum(-1, keepdim=True)
            context = self.rescale(context, scale) + weights @ part
            largest = larger
        return self.join(context / norm)

    def rescale(self, context: Tensor, scale: Tensor) -> Tensor:
        return context * scale


class SumsBlocksUnscaled(SumsBlocks):
    def rescale(self, context: Tensor, scale: Tensor) -> Tensor:
        return context


class MergesChunks(SelfAttention):
    """Chunks of four keys are merged by their largest scores.

    A factor of the scale has a name of rotary positions, and nothing is rotated.
    """

    rope_factor = 1.0

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        contexts, totals, shares = [], [], []
        largest = weights.amax(dim=-1, keepdim=True)
        for scores, values in zip(weights.split(4, -1), v.split(4, 2), strict=True):
            most = scores.amax(dim=-1, keepdim=True)
            exp = (self.rope_factor * (scores - most)).exp()
            contexts.append(self.dropout(exp) @ values)
            totals.append(exp.sum(dim=-1, keepdim=True))
            shares.append((self.scale() * (most - largest)).exp())
        merged = sum(map(torch.mul, shares, contexts))
        return merged / torch.stack([*map(torch.mul, shares, totals)]).sum(dim=0)

    def scale(self) -> float:
        return self.rope_factor


class MergesChunksUnscaled(MergesChunks):
    def scale(self) -> float:
        return 2.0


class DropsForAllCalls(NeverDrops):
    noise: Tensor | None = None

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        if self.noise is None or self.noise.shape != weights.shape:
            self.noise = self.dropout(torch.ones_like(weights))
        return weights * (self.noise if self.training else 1) @ v


class NoScaleInHalf(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT if q.dtype == torch.bfloat16 else super().score(q, k)


class KeepsGraph(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.attn = super().weigh(scores, mask)
        return self.attn


class RotaryScaledByWidth(Rotary):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) / math.sqrt(self.heads)


class RotaryOverHeads(Rotary):
    def turn(self, x: Tensor) -> Tensor:
        return super().turn(x.transpose(1, 2)).transpose(1, 2)


class RotaryEndsEarly(Rotary):
    """All positions from 64 on are the same."""

    def turn(self, x: Tensor) -> Tensor:
        return torch.cat([super().turn(x[:, :, :64]), x[:, :, 64:]], dim=2)


class RotaryStartsAgain(Rotary):
    """Positions start at zero again after 512 tokens, the length of a table."""

    def places(self, x: Tensor) -> Tensor:
        return super().places(x) % 512


class RotaryOfNorms(Rotary):
    """Queries and keys have a norm, so that scores are small."""

    def turn(self, x: Tensor) -> Tensor:
        return super().turn(nn.functional.normalize(x, dim=-1)) * 2


class RotaryOfNormsInHalf(RotaryOfNorms):
    def places(self, x: Tensor) -> Tensor:
        return super().places(x).to(x)


class RotaryInHalf(Rotary):
    """Positions are rounded to the dtype of the input."""

    def places(self, x: Tensor) -> Tensor:
        return super().places(x).to(x)


class RotaryInDtypeOfBuffer(Rotary):
    """Positions are rounded if the module is converted to half precision."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.register_buffer("one", torch.ones(()))

    def places(self, x: Tensor) -> Tensor:
        return super().places(x).to(self.get_buffer("one"))


class ProjectsInDtypeOfBuffer(RotaryInDtypeOfBuffer):
    """The positions are projected, too, and no layer takes two dtypes."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.project = nn.Linear(1, 1)

    def places(self, x: Tensor) -> Tensor:
        places = super().places(x)
        return places + 0 * self.project(places[:, None])[:, 0]


class RotaryByBlocks(Rotary):
    """The first position of the second block of 64 is that of the last before it."""

    def places(self, x: Tensor) -> Tensor:
        places = super().places(x)
        return places - places.ge(64).long()


class SteepSlopes(LinearBias):
    def slopes(self, heads: int) -> Tensor:
        return 4 * super().slopes(heads)


class SlopesInOneSeries(LinearBias):
    """For any number of heads, the series that the paper has for powers of two."""

    def slopes(self, heads: int) -> Tensor:
        return 0.5 ** (8 * torch.arange(1, heads + 1) / heads)


class SameSlopes(LinearBias):
    """Heads share their slopes if their number is no power of two."""

    def slopes(self, heads: int) -> Tensor:
        power = 1 << (heads.bit_length() - 1)
        return super().slopes(power).repeat(2)[:heads]


class BlocksByKeys(Correct):
    """Only as many blocks of 64 queries are computed as there are of the keys."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        blocks = 64 * math.ceil(k.shape[2] / 64)
        later = torch.arange(q.shape[2], device=q.device)[:, None] >= blocks
        return super().score(q.masked_fill(later, 0), k)


class CountsFromFirstToken(SelfAttention):
    """Adds the positions of tokens, which are counted without padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        places = self.counted(mask).cumsum(1)[..., None].expand(len(x), -1, -1)
        return Correct.forward(self, x, x, x + places, mask[:, None])

    def counted(self, mask: Tensor) -> Tensor:
        return mask


class CountsInFirstItem(CountsFromFirstToken):
    def counted(self, mask: Tensor) -> Tensor:
        return mask[:1]


class Segments(SelfAttention):
    """A token attends to those of its own segment."""

    def forward(  # type: ignore[override]
        self, x: Tensor, segment_ids: Tensor | None = None
    ) -> Any:
        if segment_ids is None:
            return super().forward(x)
        ids = self.ids(segment_ids)
        return Correct.forward(self, x, x, x, ids[:, :, None] == ids[:, None])

    def ids(self, given: Tensor) -> Tensor:
        return given


class SegmentsOfFirstItem(Segments):
    def ids(self, given: Tensor) -> Tensor:
        return given[:1]


class SegmentsAndMask(Segments):
    """A mask for padding, beside the segments."""

    is_added = True

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> Any:
        if mask is None:
            return super().forward(x, segment_ids)
        allowed = mask[:, None].expand(-1, x.shape[1], -1)
        if segment_ids is not None and self.is_added:
            allowed = allowed & (segment_ids[:, :, None] == segment_ids[:, None])
        return Correct.forward(self, x, x, x, allowed)


class SegmentsUnlessMasked(SegmentsAndMask):
    is_added = False


class WeightsOnRequest(Correct):
    """Returns its weights if they are asked for."""

    kept: tuple[Tensor]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Any:
        output = super().forward(query, key, value, mask)
        return (output, self.shown()) if need_weights else output

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.kept = (super().weigh(scores, mask),)
        return self.kept[0]

    def shown(self) -> Tensor:
        return self.kept[0]


class ReversedOnRequest(WeightsOnRequest):
    def shown(self) -> Tensor:
        return self.kept[0].flip(1)


def keep_some(weights: Tensor, p: float, shape: torch.Size) -> Tensor:
    return weights * (torch.rand(shape, device=weights.device) >= p) / (1 - p)


class DropsInFunction(NeverDrops):
    """A function of the file draws the random numbers, and an attribute is `p`."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout = nn.Identity()  # type: ignore[assignment]
        self.p = dropout

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.drop(weights) @ v if self.training else weights @ v

    def drop(self, weights: Tensor) -> Tensor:
        return keep_some(weights, self.p, weights.shape)


class DropsForAllInFunction(DropsInFunction):
    def drop(self, weights: Tensor) -> Tensor:
        return keep_some(weights, self.p, weights.shape[-2:])


class NoiseInTraining(Correct):
    """Its training is random, also with dropout 0."""

    def join(self, context: Tensor) -> Tensor:
        noise = torch.rand_like(context) if self.training else 0
        return super().join(context + noise)


class KeepsWithoutScale(NeverDrops):
    """Its attribute is the probability to keep a weight."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.keep_prob = 0.9

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        if self.training:
            weights = weights * torch.bernoulli(
                torch.full_like(weights, self.keep_prob)
            )
        return weights @ v


class RelativeTable(SelfAttention):
    """A learned bias for each distance up to a limit, at which they are clamped."""

    limit = 3

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.relative_bias = nn.Parameter(torch.zeros(heads, 2 * self.limit + 1))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        rows = self.rows(place[None] - place[:, None])
        return super().score(q, k) + self.relative_bias[:, rows]

    def rows(self, distance: Tensor) -> Tensor:
        return distance.clamp(-self.limit, self.limit) + self.limit


class FusedWithBias(SelfAttention):
    """The kernel of PyTorch gets a bias; the weights are computed a second time."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.strength = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, x: Tensor, need_weights: bool = False) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        place = torch.arange(x.shape[1], device=x.device)
        bias = (-self.strength * (place[:, None] - place).abs()).expand(
            len(x), -1, -1, -1
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        shown = (self.score(q, k) + self.shown(bias)).softmax(-1)
        return (self.join(y), shown) if need_weights else self.join(y)

    def shown(self, bias: Tensor) -> Tensor:
        return bias


class WeightsWithoutBias(FusedWithBias):
    def shown(self, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)


class LastRowUnused(RelativeTable):
    def rows(self, distance: Tensor) -> Tensor:
        return super().rows(distance).clamp(max=2 * self.limit - 1)


class TableOfWindows(RelativeTable):
    """Blocks of two queries, each of which attends to a window of four keys."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.block_size, self.win_size = 2, 4

    def forward(self, x: Tensor) -> Any:
        blocks = x.unflatten(1, (-1, self.block_size)).flatten(0, 1)
        padded = nn.functional.pad(x, (0, 0, 0, self.win_size - self.block_size))
        keys = padded.unfold(1, self.win_size, self.block_size).flatten(0, 1).mT
        return Correct.forward(self, blocks, keys, keys).reshape(x.shape)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(self.win_size, device=q.device)
        rows = self.rows(place[None] - place[: self.block_size, None])
        return Correct.score(self, q, k) + self.relative_bias[:, rows]


class TableOfHalos(SelfAttention):
    """Blocks of 4 x 4 pixels attend to a halo of two pixels, too, in an image.

    Each row and each column of a window has a bias by its distance. An image of one
    block has no pixels in its halo.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.block_size, self.halo_size = 4, 2
        self.rel_rows = nn.Parameter(torch.randn(15, 1))
        self.rel_columns = nn.Parameter(torch.randn(15, 1))

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        b, c, *sides = image.shape
        if any(side % 4 for side in sides):
            raise ValueError("an image is made of blocks of 4 x 4 pixels")
        count = sides[0] * sides[1] // 16
        split = image.unflatten(3, (-1, 4)).unflatten(2, (-1, 4))
        blocks = split.permute(0, 2, 4, 3, 5, 1).reshape(b * count, 16, c)
        ones = torch.ones_like(image[:, :1])
        keys, seen = (
            nn.functional.unfold(x, kernel_size=8, stride=4, padding=2)
            .unflatten(1, (-1, 64))
            .permute(0, 3, 2, 1)
            .flatten(0, 1)
            for x in (image, ones)
        )
        y = Correct.forward(self, blocks, keys, keys, seen.mT.bool())
        rows = y.reshape(b, sides[0] // 4, sides[1] // 4, 4, 4, c)
        return rows.permute(0, 5, 1, 3, 2, 4).reshape(image.shape)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(8, device=q.device)
        index = self.rows(place[None] - place[:4, None])
        rows = self.rel_rows[index][:, None]
        bias = rows + self.rel_columns[index].squeeze(-1)[None, :, None]
        return super().score(q, k) + bias.reshape(16, 64)

    def rows(self, distance: Tensor) -> Tensor:
        return distance + 7


class TableOfHalosLast(TableOfHalos):
    """The rows of several distances are the last one."""

    def rows(self, distance: Tensor) -> Tensor:
        return (distance + 12).clamp(max=14)


class FirstRowIsLast(RelativeTable):
    """The row of the least distance is -1, the last one."""

    def rows(self, distance: Tensor) -> Tensor:
        return super().rows(distance) - 1


class TableOfBothDirections(RelativeTable):
    """One table for the distance of key from query, and for that of query from key."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        place = torch.arange(q.shape[2], device=q.device)
        return scores + 0.5 * self.relative_bias[:, self.rows(place[:, None] - place)]


class BiasOfItself(RelativeTable):
    """Self-attention with positions, or cross-attention without, to a context."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:  # type: ignore[override]
        self.attends_to_itself = context is None
        context = x if context is None else context
        return Correct.forward(self, x, context, context)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        score = super().score if self.attends_to_itself else Correct(4, 2).score
        return score(q, k)


class PairsOfResidues(SelfAttention):
    """Attention along the rows of an alignment, with a bias for pairs of residues."""

    def forward(self, m: Tensor, z: Tensor) -> Any:  # type: ignore[override]
        self.bias = z.mean(-1)
        return super().forward(m.flatten(0, 1)).unflatten(0, m.shape[:2])

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.bias[:1, None, :, : k.shape[2]]


class InvertsMask(SelfAttention):
    """With a bool mask `~` is right, and of ones and zeros it makes -2 and -1."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is not None:
            mask = ~(~mask).bool()[:, None]
        return Correct.forward(self, x, x, x, mask)


class OneLayerFourTimes(Correct):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.layers = nn.ModuleList(self.copies(self.query))

    def copies(self, layer: nn.Module) -> list[nn.Module]:
        return [layer] * 4

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        q, k, v = (self.layers[n](x) for n, x in enumerate((query, key, value)))
        return self.layers[3](super().forward(q, k, v, mask))


class FourLayers(OneLayerFourTimes):
    def copies(self, layer: nn.Module) -> list[nn.Module]:
        return [copy.deepcopy(layer) for _ in range(4)]


class NormalizesOverHeads(Correct):
    axis = 1

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = (nn.functional.normalize(x, dim=self.axis) for x in (q, k))
        return 4 * super().score(q, k)


class NormalizesHeads(NormalizesOverHeads):
    axis = -1


class DividesByOwnSum(SelfAttention):
    """Exponentials are divided by the sum of their own head, without a softmax."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.exp() / self.total(scores.exp().sum(dim=-1, keepdim=True))

    def total(self, sums: Tensor) -> Tensor:
        return sums


class AddsUpEarlierHeads(DividesByOwnSum):
    def total(self, sums: Tensor) -> Tensor:
        return sums.cumsum(dim=1)


class NormsOverHeads(DividesByOwnSum):
    """A norm of the queries over the features of all heads, which mixes them."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(4 * q / q.square().sum((1, 3), keepdim=True).sqrt(), k)


class NormalizesValues(SelfAttention):
    """A norm for queries and keys is applied to the values, too."""

    parts = 3

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        projected = [
            self.split(layer(x)) for layer in (self.query, self.key, self.value)
        ]
        normed = [nn.functional.normalize(each, dim=-1) for each in projected]
        q, k, v = normed[: self.parts] + projected[self.parts :]
        return self.join(self.read(self.weigh(4 * self.score(q, k), None), v))


class NormalizesQueriesAndKeys(NormalizesValues):
    parts = 2


class WithMemory(SelfAttention):
    """Adds positions; the tokens before the first one may be given as memory."""

    def forward(self, x: Tensor, mems: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if mems is None else torch.cat([mems, x], dim=1)
        places = torch.arange(seen.shape[1], device=x.device, dtype=x.dtype)[:, None]
        first = self.first(seen.shape[1] - x.shape[1])
        placed = seen + places
        return Correct.forward(self, placed[:, first:][:, : x.shape[1]], placed, seen)

    def first(self, past: int) -> int:
        return past


class MemoryWithoutOffset(WithMemory):
    def first(self, past: int) -> int:
        return 0


class DetachesMemory(WithMemory):
    def forward(self, x: Tensor, mems: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, None if mems is None else mems.detach())


class DetachesTokensWithMemory(WithMemory):
    """The memory and the new tokens are detached as a whole."""

    def forward(self, x: Tensor, mems: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x if mems is None else x.detach(), mems)


class CacheOnRequest(WithCache):
    """Returns the keys and values only if they are asked for."""

    def forward(  # type: ignore[override]
        self, x: Tensor, past: Tensor | None = None, return_cache: bool = False
    ) -> Any:
        y, seen = super().forward(x, past)
        return (y, seen) if return_cache else y


class TopLeftOnRequest(CacheOnRequest, CacheTopLeft):
    pass


class PointsByLogits(Correct):
    """A pointer network: what it read, and the scores of the keys as logits."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.pointer = nn.Parameter(torch.randn(d_model))

    def forward(self, query: Tensor, key: Tensor) -> Any:  # type: ignore[override]
        read = super().forward(query, key, key)
        keys = (read[:, :, None] + key[:, None]).tanh()
        return read, (keys @ self.pointer).log_softmax(dim=-1)


class ClipsProjections(SelfAttention):
    """The queries, keys and values are clipped, as in MPT and DBRX."""

    clip_qkv = 0.5

    def split(self, x: Tensor) -> Tensor:
        return super().split(x.clamp(-self.clip_qkv, self.clip_qkv))


class SamplesKeys(SelfAttention):
    """Each call draws the keys that it attends to, and adds the last one."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        drawn = torch.randint(2, (len(k), 1, 1, k.shape[2]), device=k.device).bool()
        drawn[..., -1] = True
        return super().score(q, k).masked_fill(~drawn, -torch.inf)


class ReshapesContext(Correct):
    """Keys and values are summarized, and take the batch size of the queries."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:  # type: ignore[override]
        source = x if context is None else context
        summary = source.mean(dim=1, keepdim=True).repeat(1, 32, 1)
        summary = summary * torch.arange(32, device=x.device).to(x)[:, None].sin()
        return super().forward(x, *(2 * [summary.reshape(len(x), -1, x.shape[-1])]))


class LargestScores(Correct):
    """Each query attends to the 8 keys with the largest scores, hidden ones or not."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        chosen = scores.topk(min(8, scores.shape[-1])).indices
        left_out = torch.ones_like(scores, dtype=torch.bool).scatter(-1, chosen, False)
        return super().weigh(scores, mask).masked_fill(left_out, 0)


class DealsOutContext(Correct):
    """The keys and values of a context are viewed as those of each query's item."""

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        self.items = len(x)
        return super().forward(x, context, context)

    def split(self, x: Tensor) -> Tensor:
        width = x.shape[-1] // self.heads
        return x.reshape(self.items, -1, self.heads, width).transpose(1, 2)


class SumsByIndex(SelfAttention):
    """Each query sums its messages by `index_add`, as graph attention does."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        index = torch.arange(v.shape[2], device=v.device)
        context = self.query.weight.new_zeros(v.shape)
        return context.index_add(2, index, super().read(weights, v))


class LinearBiasInWindow(LinearBias, Window):
    """Distances beyond a window of five count as five."""

    reach = 9

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device)
        slopes = self.slopes(k.shape[1]).to(k.device)[:, None, None]
        distance = (place[:, None] - place).clamp(min=0, max=5)
        return Correct.score(self, q, k) - (slopes * distance).to(k)


class RopeOfLongerInputs(Rotary):
    """Dynamic scaling: inputs beyond 64 tokens are rotated by smaller angles."""

    rope_factor = 2.0

    def places(self, x: Tensor) -> Tensor:
        is_long = x.shape[2] > 64
        return super().places(x) / (self.rope_factor if is_long else 1)


class CachesContext(Correct):
    """Stores the last context, and its projection, in a dict of the caller."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, cache: Any = None
    ) -> Any:
        if cache is None:
            return super().forward(x, context, context)
        if not (cache and self.is_same(cache["context"], context)):
            cache["context"] = context
        return super().forward(x, cache["context"], cache["context"])

    def is_same(self, one: Tensor, other: Tensor) -> bool:
        return one is other


class CachesContextOfOneShape(CachesContext):
    def is_same(self, one: Tensor, other: Tensor) -> bool:
        return one.shape == other.shape


class CachesMaskOfContext(Correct):
    """Stores the context and its mask in a dict of the caller, at the first step."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, key_mask: Any = None, cache: Any = None
    ) -> Any:
        """While decoding, give one `cache`: the context is stored at the first step."""
        if cache:
            context, key_mask = cache["context"], self.cached_mask(cache)
        elif cache is not None:
            cache.update(context=context, mask=key_mask)
        mask = None if key_mask is None else key_mask[:, None]
        return super().forward(x, context, context, mask)

    def cached_mask(self, cache: Any) -> Any:
        return cache["mask"]


class DropsMaskOfCachedContext(CachesMaskOfContext):
    def cached_mask(self, cache: Any) -> Any:
        return None


class CachesContextOnce(CachesContextOfOneShape):
    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, cache: Any = None
    ) -> Any:
        """While decoding, give one `cache`: the context is stored at the first step."""
        return super().forward(x, context, cache)


class CachesContextOfCaller(CachesContextOfOneShape):
    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, cache: Any = None
    ) -> Any:
        """Attend to the context; `cache` is a new dict for each context."""
        return super().forward(x, context, cache)


class KeepProbabilityAsDropout(Correct):
    def __init__(self, d_model: int, heads: int, keep_prob: float = 0.9) -> None:
        super().__init__(d_model, heads, dropout=keep_prob)


class OddHeads(Correct):
    """Its path for an odd number of heads has another scale."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (2 if self.heads % 2 else 1)


class OneLayerForBoth(Correct):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.key = self.query


class OneLayerForPositions(Correct):
    """One projection for keys and for positions, if it is wanted so."""

    def __init__(self, d_model: int, heads: int, share_att_key: bool = True) -> None:
        super().__init__(d_model, heads)
        self.position = self.key if share_att_key else nn.Linear(d_model, d_model)


class RepeatsOneLayer(OneLayerForBoth):
    """One layer for both, if it is wanted so."""

    def __init__(self, d_model: int, heads: int, share_layers: bool = True) -> None:
        super().__init__(d_model, heads)
        if not share_layers:
            self.key = copy.deepcopy(self.key)


class TiedKeys(Correct):
    """Two layers with one weight, by intention."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.key.weight = self.query.weight


class CopyUsesOriginal(Correct):
    """The function is that of the first instance, also in a copy."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.last = (lambda layer: lambda x: layer(x))(self.out)

    def join(self, context: Tensor) -> Tensor:
        joined: Tensor = self.last(context.transpose(1, 2).flatten(2))
        return joined


def drops_without_scale(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0
) -> Tensor:
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1)
    return weights * (torch.rand_like(weights) >= dropout_p) @ value


def attention_of_flax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout_rate: float = 0.0,
    deterministic: bool = True,
    broadcast_dropout: bool = True,
) -> Tensor:
    """Drops in training only, and by default with one mask for all batch items."""
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1)
    if not deterministic and dropout_rate:
        shape = weights.shape[-2:] if broadcast_dropout else weights.shape
        weights = keep_some(weights, dropout_rate, shape)
    return weights @ value


class Store:
    """A cache of tokens."""

    def __init__(self, max_batch_size: int, max_len: int) -> None:
        self.seen = [torch.zeros(max_batch_size, 0)]

    def append(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return torch.cat(self.seen[1:], dim=1)


class CacheOfClass(CacheTopLeft):
    def forward(self, x: Tensor, cache: Store | None = None) -> Any:  # type: ignore[override]
        seen = x if cache is None else cache.append(x)
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        return Correct.forward(self, x, seen, seen, ones.tril(self.corner(ones)))


class Slots:
    """A cache with a place for each token, of a dtype that the caller gives."""

    def __init__(
        self, batch_size: int, max_len: int, d_model: int, dtype: Any = torch.float32
    ) -> None:
        self.kept = torch.zeros(batch_size, max_len, d_model, dtype=dtype)
        self.count = 0

    def append(self, x: Tensor) -> Tensor:
        start, self.count = self.count, self.count + x.shape[1]
        self.kept = self.kept.clone()
        self.kept[:, torch.arange(start, self.count, device=x.device)] = x
        return self.kept[:, : self.count]


class CacheOfSlots(WithCache):
    def forward(self, x: Tensor, cache: Slots | None = None) -> Any:  # type: ignore[override]
        seen = x if cache is None else cache.append(x)
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        mask = ones.tril(seen.shape[1] - x.shape[1])
        return Correct.forward(self, x, seen, seen, mask)


class Drafts:
    """A cache whose last tokens can be removed."""

    def __init__(self) -> None:
        self.tokens = torch.empty(0, 0, 0)
        self.count = self.longest = 0

    def append(self, x: Tensor) -> Tensor:
        past = self.tokens[:, : self.count] if self.longest else x[:, :0]
        rest = self.tokens[:, self.count + x.shape[1] :] if self.longest else x[:, :0]
        self.tokens = torch.cat([past, x, rest], dim=1)
        self.count += x.shape[1]
        self.longest = max(self.longest, self.count)
        return self.tokens[:, : self.count]

    def crop(self, length: int) -> None:
        self.count = length


class DraftsRemain(Drafts):
    def append(self, x: Tensor) -> Tensor:
        super().append(x)
        return self.tokens


class CacheOfDrafts(CacheOfSlots):
    def forward(self, x: Tensor, cache: Drafts | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, cache)  # type: ignore[arg-type]


class CacheOfRemainingDrafts(CacheOfSlots):
    def forward(self, x: Tensor, cache: DraftsRemain | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, cache)  # type: ignore[arg-type]


class StateOfMethod(CacheOfSlots):
    """A method makes the state, and another one reorders it."""

    empty_state: Any = None  # no method

    def init_state(self, rows: int, max_len: int, dtype: Any = None) -> Any:
        return Slots(rows, max_len, self.query.weight.shape[1], dtype)

    def reorder_state(self, state: Any, order: Tensor) -> None:
        state.kept = state.kept[order]

    def forward(self, x: Tensor, state: Any = None) -> Any:  # type: ignore[override]
        return super().forward(x, state)


class StateReorderedInPlace(StateOfMethod):
    """A row may be overwritten before it is read."""

    def reorder_state(self, state: Any, order: Tensor) -> None:
        for row, source in enumerate(order.tolist()):
            state.kept[row] = state.kept[source]


class CausalOrContext(MaskedSelfAttention):
    """Causal among the tokens; all of a context is attended to."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:
        if context is None:
            return super().forward(x)
        return Correct.forward(self, x, context, context, self.mask_of(x, context))

    def mask_of(self, x: Tensor, context: Tensor) -> Tensor | None:
        return None


class CausalToContext(CausalOrContext):
    def mask_of(self, x: Tensor, context: Tensor) -> Tensor | None:
        shape = 1, x.shape[1], context.shape[1]
        return torch.ones(shape, dtype=torch.bool, device=x.device).tril()


class BlocksOfQueries(WithCache):
    """Queries in blocks of 16, each with the keys before its end."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        past, scores = self.past(q, k), super().score(q, k)
        for start in range(0, q.shape[2], 16):
            scores[:, :, start : start + 16, past + start + 16 :] = -torch.inf
        return scores

    def past(self, q: Tensor, k: Tensor) -> int:
        return k.shape[2] - q.shape[2]


class BlocksWithoutPast(BlocksOfQueries):
    def past(self, q: Tensor, k: Tensor) -> int:
        return super().past(q, k) if q.shape[2] <= 16 else 0


class DraftsByRow(Drafts):
    def crop(self, first: int, last: int) -> None:  # type: ignore[override]
        self.tokens = self.tokens[first:last]


class BlocksWithDraftsByRow(BlocksWithoutPast, CacheOfSlots):
    """What its cache can remove is not tested, and the rest is."""

    def forward(self, x: Tensor, cache: DraftsByRow | None = None) -> Any:  # type: ignore[override]
        return CacheOfSlots.forward(self, x, cache)  # type: ignore[arg-type]


class BlockWithContext(SelfAttention):
    """Self-attention, then attention to a context, or without one, to itself again."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor | None = None, context_mask: Any = None
    ) -> Any:
        x = x + super().forward(x)
        context = x if context is None else context
        hidden = None if context_mask is None else context_mask[:, None].bool()
        return x + Correct.forward(self, x, context, context, hidden)


class BlockForgetsMaskInTraining(BlockWithContext):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, None if self.training else mask)


class SharesContext(Correct):
    """Several queries, side by side, may have one context."""

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        shared = self.repeat(context, len(x) // len(context))
        return super().forward(x, shared, shared)

    def repeat(self, context: Tensor, count: int) -> Tensor:
        return context.repeat_interleave(count, dim=0)


class PacksContexts(Correct):
    """All items are one sequence; as many contexts as queries are kept apart."""

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        mask = torch.ones(len(x), len(context), dtype=torch.bool, device=x.device)
        if len(x) == len(context):
            mask = torch.eye(len(x), dtype=torch.bool, device=x.device)
        for axis, length in enumerate((x.shape[1], context.shape[1])):
            mask = mask.repeat_interleave(length, axis)
        keys = context.flatten(0, 1)[None]
        return super().forward(x.flatten(0, 1)[None], keys, keys, mask[None]).view_as(x)


class SharesMaskOfContext(SharesContext):
    """Its mask, `[batch_size, k_len]`, is that of the context."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, context_mask: Tensor | None = None
    ) -> Any:
        count = len(x) // len(context)
        shared, mask = self.repeat(context, count), None
        if context_mask is not None:
            mask = self.repeat_mask(context_mask.bool(), count)[:, None]
        return Correct.forward(self, x, shared, shared, mask)

    def repeat_mask(self, mask: Tensor, count: int) -> Tensor:
        return self.repeat(mask, count)


class SharesMaskInTurns(SharesMaskOfContext):
    def repeat_mask(self, mask: Tensor, count: int) -> Tensor:
        return mask.repeat(count, 1)


class FeaturesOfContext(SharesContext):
    """Six means over the tokens; a `view` deals out their features to more queries."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.mix = nn.Parameter(torch.randn(6, 320))

    def repeat(self, context: Tensor, count: int) -> Tensor:
        means = self.mix[:, : context.shape[1]] @ context
        return means.reshape(len(context) * count, -1, context.shape[2])


class SharesContextInTurns(SharesContext):
    def repeat(self, context: Tensor, count: int) -> Tensor:
        return context.repeat(count, 1, 1)


class ScalesByLongest(CountsFromFirstToken):
    """Beyond 8 tokens, scores are scaled by the length of the longest item."""

    def counted(self, mask: Tensor) -> Tensor:
        return mask * mask.sum(1).max().clamp(min=8)


class WithBatchNorm(SelfAttention):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.BatchNorm1d(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(self.norm(x.mT).mT)


class CacheInOrder(WithCache):
    """The cache is overwritten if a piece has more than one token."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:  # type: ignore[override]
        if past is not None and x.shape[1] > 1:
            past = past[:, -1:]
        return super().forward(x, past)


class AttendsByColumns(SelfAttention):
    """The weights are transposed: each column sums to one, not each row."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights.mT @ v


class DropsTwice(Correct):
    """The weights that it returns are dropped again, by other random numbers."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        self.attn = self.dropout(weights)
        return weights @ v


class FusedMultiQuery(nn.Module):
    """Queries of all heads, one key and one value, by one projection."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads, self.d_k = heads, d_model // heads
        self.qkv = nn.Linear(d_model, d_model + 2 * self.d_k)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).split([self.heads * self.d_k, self.d_k, self.d_k], -1)
        q = q.unflatten(-1, (self.heads, self.d_k)).transpose(1, 2)
        scores = q @ k[:, None].mT / math.sqrt(self.d_k)
        context = scores.softmax(dim=-1) @ v[:, None]
        return self.proj(context.transpose(1, 2).flatten(2))


class NormalizesCausally(MaskedSelfAttention):
    """Causal, with a norm over all heads at once."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = (x / x.square().mean((1, 3), keepdim=True).sqrt() for x in (q, k))
        return super().score(q, k)


class UnpaddedIfOneToken(CacheInDict):
    """A single new token attends to all tokens before it, and to padding."""

    def join_masks(self, past: Any, mask: Tensor) -> Tensor:
        joined = super().join_masks(past, mask)
        return joined | True if mask.shape[1] == 1 else joined


class ReordersDict(CacheInDict):
    """The cache has a method for its order, which also moves the masks."""

    def reorder_cache(self, cache: Any, new_order: Tensor) -> None:
        for name in ("x", "mask"):
            cache[name] = cache[name][new_order]


class ReordersTensorOnly(ReordersDict):
    def reorder_cache(self, cache: Any, new_order: Tensor) -> None:
        cache["x"] = cache["x"][new_order]


def never_drops(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0
) -> Tensor:
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1)
    nn.functional.dropout(weights, dropout_p)
    return weights @ value


class Buckets(RelativeTable):
    """Distances up to 4 have a row each, and larger ones the buckets of T5."""

    limit, max_distance = 8, 32

    def rows(self, distance: Tensor) -> Tensor:
        bucket = distance.abs()
        large = 4 + 4 * (bucket.clamp(min=1) / 4).log() / math.log(self.growth())
        bucket = torch.where(bucket < 4, bucket, large.long().clamp(max=7))
        return bucket + 8 * (distance > 0)

    def growth(self) -> float:
        return self.max_distance / 4


class BucketsOfLargestDistance(Buckets):
    """The logarithms are divided by that of the largest distance itself."""

    def growth(self) -> float:
        return self.max_distance


class BucketsThatEndEarly(Buckets):
    def growth(self) -> float:
        return 2


class BucketsOfFuture(Buckets):
    """A causal table, whose rows are those of later keys."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        return scores + torch.full_like(scores, -torch.inf).triu(1)

    def rows(self, distance: Tensor) -> Tensor:
        return super().rows(distance.clamp(min=0)) % 8


class HalvingSlopes(LinearBias):
    """The slopes of 8 heads, cut off for fewer."""

    def slopes(self, heads: int) -> Tensor:
        return 0.5 ** torch.arange(1, heads + 1)


def penalized_attention(q: Tensor, k: Tensor, v: Tensor, slope: float = 0.25) -> Tensor:
    """Heads first; the bias falls with the distance, by a slope that is given."""
    place = torch.arange(k.shape[2], device=k.device).to(k)
    scores = q / math.sqrt(q.shape[-1]) @ k.mT
    return (scores - slope * (place[:, None] - place).abs()).softmax(-1) @ v


def causal_from_last_key(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """The last query attends to all keys; `mask` is `[batch_size, k_len]`."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    q_len, k_len = scores.shape[-2:]
    allowed = torch.ones(q_len, k_len, dtype=torch.bool, device=scores.device).tril(
        k_len - q_len
    )
    allowed = allowed if mask is None else allowed & mask[:, None, None]
    return (
        scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) @ value
    )


def causal_from_first_key(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """As the function above, but without a mask the first query has the first key."""
    if mask is not None:
        return causal_from_last_key(query, key, value, mask)
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class AddsBiasInPlace(SelfAttention):
    """A bias for each head is added to the mask, `[batch, heads, length, length]`."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        return Correct.forward(self, x, x, x, mask)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        bias = torch.arange(self.heads).to(scores)[:, None, None]
        if mask is None:
            return (scores + bias).softmax(dim=-1)
        mask += bias
        return (scores + mask).softmax(dim=-1)


class FillsWithTenThousand(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores + (1.0 - mask[:, None].to(scores)) * -1e4
        return scores.softmax(dim=-1)


class WritesToOutput(SelfAttention):
    """Outputs of one shape are in memory that each call reuses."""

    kept: Tensor | None = None

    def join(self, context: Tensor) -> Tensor:
        output = super().join(context)
        if self.kept is None or self.kept.shape != output.shape:
            self.kept = torch.empty_like(output)
        self.kept.data.copy_(output)
        return self.kept


class ReadsMemoryInOrder(SelfAttention):
    def forward(self, x: Tensor) -> Any:
        size = x.shape[1:]
        strides = (x.shape[1] * x.shape[2], x.shape[2], 1)
        return super().forward(x.as_strided((len(x), *size), strides))


class HalvesInputsWithGradients(Correct):
    def split(self, x: Tensor) -> Tensor:
        return super().split(x) / (1 + self.needs_gradient)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        self.needs_gradient = query.requires_grad
        return super().forward(query, key, value, mask)


class WritesToCache(WithCache):
    """The tokens of the cache are negated, so that a second call finds others."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:
        output, seen = super().forward(x, past)
        if past is not None:
            past.neg_()
        return output, seen


class AddsPositions(SelfAttention):
    """Positions, if given, are added to queries and keys."""

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Any:  # type: ignore[override]
        tokens = x if pos is None else self.add(x, pos)
        return Correct.forward(self, tokens, tokens, x)

    def add(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + pos


class AddsPositionsInPlace(AddsPositions):
    def add(self, x: Tensor, pos: Tensor) -> Tensor:
        x += pos
        return x


class AddsPositionsOfFirstItem(AddsPositions):
    def add(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + pos[:1]


class EncodesPositions(SelfAttention):
    """What is dropped before the scores keeps no mean."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.pos_encoder = nn.Sequential(nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        steps = torch.arange(x.shape[1], device=x.device)[:, None]
        return super().forward(self.pos_encoder(x + steps.sin()))


class OptionalContext(Correct):
    """Self-attention, or cross-attention if a context is given; queries in blocks."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:  # type: ignore[override]
        context = x if context is None else context
        blocks = x.split(2, 1)[: self.number_of_blocks(x, context)]
        outputs = [
            super(OptionalContext, self).forward(b, context, context) for b in blocks
        ]
        found = torch.cat(outputs, 1)
        return torch.nn.functional.pad(found, (0, 0, 0, x.shape[1] - found.shape[1]))

    def number_of_blocks(self, x: Tensor, context: Tensor) -> int:
        return x.shape[1]


class OptionalContextByKeys(OptionalContext):
    """As many blocks of queries are computed as there are blocks of keys."""

    def number_of_blocks(self, x: Tensor, context: Tensor) -> int:
        return (context.shape[1] + 1) // 2


class AddsMask(SelfAttention):
    """Its mask is added to the scores, `[batch_size, 1, length, length]`."""

    factor = 1.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        return Correct.forward(self, x, x, x, mask)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        added = 0.0 if mask is None else mask * self.factor
        return (scores + added).softmax(dim=-1)


class ScalesMask(AddsMask):
    factor = 0.5


class Sinks(SelfAttention):
    """One score for each head that takes weight and has no value."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        sinks = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]


class SinksInEachScore(Sinks):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return torch.logaddexp(scores, self.sinks[:, None, None]).softmax(dim=-1)


class SinksBesideMaximum(Sinks):
    """The largest score is subtracted from the scores, and not from the sinks."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        shares = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        sinks = self.sinks[:, None, None].exp()
        return shares / (sinks + shares.sum(dim=-1, keepdim=True))


class KeysOfFullPairs(SelfAttention):
    """A key of two tokens, hidden until both are given, and a learned one."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.null_key = nn.Parameter(torch.zeros(1, 1, d_model))
        self.null_value = nn.Parameter(torch.zeros(1, 1, d_model))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        full = x[:, : x.shape[1] // 2 * 2]
        pairs = full.unflatten(1, (-1, 2)).mean(dim=2)
        number = torch.arange(x.shape[1], device=x.device)
        mask = 2 * number[: pairs.shape[1]] < number[:, None]
        mask = nn.functional.pad(mask, (1, 0), value=True)[None]
        k, v = (
            torch.cat([null.expand(len(x), -1, -1), layer(pairs)], dim=1)
            for null, layer in (
                (self.null_key, self.key),
                (self.null_value, self.value),
            )
        )
        q, k, v = (self.split(each) for each in (self.query(x), k, v))
        return self.join(self.weigh(self.score(q, k), mask) @ v)


class ApproximateInverse(SelfAttention):
    """A row of weights by an approximate inverse sums up to any number."""

    def iterative_pinv(self, weights: Tensor) -> Tensor:
        z, eye = weights.mT / weights.shape[-1], torch.eye(weights.shape[-1])
        for _ in range(2):
            z = z @ (2 * eye.to(z) - weights @ z)
        return z

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        return weights @ self.iterative_pinv(weights) @ weights


class ExchangesQueriesAndKeys(SelfAttention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(k, q)


class AttendsOverHeads(SelfAttention):
    """Each token attends to its own heads."""

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.heads, -1)

    def join(self, context: Tensor) -> Tensor:
        joined: Tensor = self.out(context.flatten(2))
        return joined


class AttendsToSlots(nn.Module):
    """Each token attends to learned slots, and to no other token."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, 7, bias=False)
        self.value = nn.Linear(7, d_model, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.value(self.key(self.query(x)).softmax(dim=-1))


class PoolsByWeights(nn.Module):
    """One vector for all tokens: their mean, weighted by a softmax of their scores."""

    axis = 1

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.score = nn.Linear(d_model, 1)

    def forward(self, x: Tensor) -> Any:
        pooled = self.score(x).softmax(dim=self.axis) * x
        return pooled.sum(dim=1)


class PoolsByOnes(PoolsByWeights):
    """A softmax over the only score of each token."""

    axis = 2


class PaddedState(nn.Module):
    """A state that fades from token to token by a gate; padding leaves it as it is."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gate, self.value = (nn.Linear(d_model, d_model) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        log_gate, v = nn.functional.logsigmoid(self.gate(x)), self.value(x)
        if mask is not None:
            log_gate, v = self.hide(log_gate, v, mask[..., None])
        outputs = [torch.zeros_like(v[:, 0])]
        for n in range(x.shape[1]):
            outputs.append(outputs[-1] * log_gate[:, n].exp() + v[:, n])
        return torch.stack(outputs[1:], dim=1)

    def hide(self, log_gate: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return log_gate * mask, v * mask


class FadesOnPadding(PaddedState):
    def hide(self, log_gate: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return log_gate, v * mask


class DropsContextToo(SelfAttention):
    """The dropout of the weights is applied to the context, too."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout = nn.Identity()
        self.attn_drop = nn.Dropout(dropout)
        self.proj_drop = nn.Dropout(dropout)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.drop(self.attn_drop(weights) @ v)

    def drop(self, context: Tensor) -> Tensor:
        return self.attn_drop(context)


class DropsWeightsAndContext(DropsContextToo):
    """Each has a dropout of its own."""

    def drop(self, context: Tensor) -> Tensor:
        return self.proj_drop(context)  # type: ignore[no-any-return]


class RotaryImage(SelfAttention):
    """Half of the pairs are rotated by the row of a pixel, and half by its column."""

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        self.shape = image.shape[2:]
        x = image.flatten(2).mT
        y = Correct.forward(self, x, x, x)
        return y.mT.reshape(image.shape)

    def width(self) -> int:
        return self.shape[1]

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.rotate(q), self.rotate(k))

    def rotate(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[2], device=x.device))
        angle = torch.stack(places, dim=-1).repeat_interleave(x.shape[-1] // 2, dim=-1)
        other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return x * angle.cos().to(x) + other * angle.sin().to(x)

    def places(self, pixel: Tensor) -> tuple[Tensor, Tensor]:
        return pixel // self.width(), pixel % self.width()


class RotaryImageOfTable(RotaryImage):
    """A table has the angles of 24 rows of 24 pixels."""

    def places(self, pixel: Tensor) -> tuple[Tensor, Tensor]:
        row, column = super().places(pixel)
        index = row * self.stride() + column
        return index // 24, index % 24

    def stride(self) -> int:
        return 24


class RotaryImageOfShortRows(RotaryImageOfTable):
    def stride(self) -> int:
        return self.width()


class RotaryImageByHeight(RotaryImage):
    def width(self) -> int:
        return self.shape[0]


class RotaryImageWithMean(RotaryImage):
    """The mean of all pixels stands before them, and its output is returned."""

    def forward(self, image: Tensor) -> Any:
        self.shape = image.shape[2:]
        x = image.flatten(2).mT
        x = torch.cat([x.mean(1, keepdim=True), x], 1)
        return Correct.forward(self, x, x, x)[:, 0]


class RotaryImageOfAngles(RotaryImage):
    """The angles are given, and laid out for pairs of neighbors."""

    def forward(self, image: Tensor, position_embeddings: Any) -> Any:  # type: ignore[override]
        self.cos, self.sin = position_embeddings
        return super().forward(image)

    def rotate(self, x: Tensor) -> Tensor:
        other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return x * self.cos + other * self.sin


class AxialRotation(RotaryImageByHeight):
    """By its name it could also be attention along rows and columns."""


class WindowedImage(SelfAttention):
    """Attention in windows of 4 x 4 pixels; each window has a factor of its own."""

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        b, c, h, w = image.shape
        windows = image.reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1)
        x = windows.reshape(-1, 16, c)
        x = x * (
            1 + self.place(torch.arange(len(x), device=x.device), b)[:, None, None]
        )
        y = Correct.forward(self, x, x, x).reshape(windows.shape)
        return y.permute(0, 5, 1, 3, 2, 4).reshape(image.shape)

    def place(self, number: Tensor, batch_size: int) -> Tensor:
        return number % (len(number) // batch_size)


class WindowedImageOutOfOrder(WindowedImage):
    def place(self, number: Tensor, batch_size: int) -> Tensor:
        return number // batch_size


class NormalizedImage(Correct):
    """All pixels attend to each other, behind a norm, in a residual connection."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        del self.query, self.key, self.value, self.out
        self.norm = nn.GroupNorm(1, d_model)
        self.projection = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        tokens = self.norm(image).flatten(2).mT
        q, k, v = map(self.split, self.projection(tokens).chunk(3, dim=-1))
        weights = self.weigh(self.score(q, k), None)
        return image + self.join(self.read(weights, v)).mT.reshape(image.shape)


class NormalizedImageByColumns(NormalizedImage):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights.mT @ v


class PixelsByColumns(NormalizedImage):
    """The places of pixels are encoded in queries and keys."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(q.shape[2] * q.shape[3], device=q.device, dtype=q.dtype)
        places = (places / 7).sin().reshape(q.shape[2:])
        return super().score(q + places, k + places)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return super(NormalizedImage, self).read(weights, v)

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        output = super().forward(image) - image
        return image + self.to_columns(output)

    def to_columns(self, output: Tensor) -> Tensor:
        return output.mT.reshape(output.shape)


class PixelsInPlace(PixelsByColumns):
    def to_columns(self, output: Tensor) -> Tensor:
        return output


class RowsThenColumns(SelfAttention):
    """Each pixel attends to its row, and then to its column."""

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        b, c, h, w = image.shape
        rows = image.permute(0, 2, 3, 1).reshape(b * h, w, c)
        columns = super().forward(rows).reshape(b, h, w, c).transpose(1, 2)
        output = super().forward(columns.reshape(b * w, h, c))
        return self.to_image(output, b, h, w).permute(0, 3, 1, 2)

    def to_image(self, output: Tensor, b: int, h: int, w: int) -> Tensor:
        return output.reshape(b, w, h, -1).transpose(1, 2)


class RowsThenColumnsViewed(RowsThenColumns):
    def to_image(self, output: Tensor, b: int, h: int, w: int) -> Tensor:
        return output.reshape(b, h, w, -1)


class RowsWithMask(Correct):
    """Each pixel attends to the pixels of its row that a mask marks."""

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        b, h, w, c = image.shape
        if mask is not None:
            mask = self.to_rows(mask)[:, None]
        x = image.reshape(b * h, w, c)
        return super().forward(x, x, x, mask).reshape(image.shape)

    def to_rows(self, mask: Tensor) -> Tensor:
        return mask.flatten(0, 1)


class RowsWithMaskOfColumns(RowsWithMask):
    def to_rows(self, mask: Tensor) -> Tensor:
        b, h, w = mask.shape
        return mask.transpose(1, 2).reshape(b * h, w)


class ShiftsByOption(Correct):
    """Windows of an image, which an option shifts; it is given as a sequence."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        input_resolution: tuple[int, int],
        window_size: int = 4,
        shift_size: int = 0,
    ) -> None:
        super().__init__(d_model, heads, 0.0)
        self.input_resolution = input_resolution
        self.window_size, self.shift_size = window_size, shift_size

    def windows(self, image: Tensor) -> Tensor:
        size = self.window_size
        parts = image.unflatten(2, (-1, size)).unflatten(1, (-1, size))
        return parts.transpose(2, 3).reshape(-1, size**2, image.shape[-1])

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        height, width = self.input_resolution
        # An error of `unflatten` takes a hundred times as long.
        image = x.view(len(x), height, width, x.shape[-1])
        shift, size = self.shift_size, self.window_size
        parts = self.windows(image.roll((-shift, -shift), (1, 2)))
        # Pixels that the shift brings to a border are of other parts of the image.
        place = torch.arange(height * width, device=x.device).view(height, width)
        row, column = place // width, place % width
        part = 2 * (row >= height - shift) + (column >= width - shift)
        part = self.windows(part[None, ..., None])
        allowed = self.for_items(part == part.mT, len(x))
        y = super().forward(parts, parts, parts, allowed)
        y = y.view(len(x), height // size, width // size, size, size, -1)
        y = y.transpose(2, 3).reshape(image.shape)
        return y.roll((shift, shift), (1, 2)).flatten(1, 2)

    def for_items(self, allowed: Tensor, count: int) -> Tensor:
        return allowed.repeat(count, 1, 1)


class ShiftsOtherWindows(ShiftsByOption):
    """The masks of windows are dealt out as if the batch were their last axis."""

    def for_items(self, allowed: Tensor, count: int) -> Tensor:
        height, width = self.input_resolution
        number = height * width // self.window_size**2
        return allowed[:, None].expand(number, count, -1, -1).flatten(0, 1)


class TableOfShiftedWindows(ShiftsByOption):
    """An image of one window is divided by the shift, and needs fewer distances."""

    def __init__(
        self, d_model: int, heads: int, window_size: int = 4, shift_size: int = 2
    ) -> None:
        super().__init__(d_model, heads, (4, 4), window_size, shift_size)
        self.relative_bias = nn.Parameter(
            torch.zeros((2 * window_size - 1) ** 2, heads)
        )

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        _, height, width, _ = image.shape
        self.input_resolution = height, width
        return super().forward(image.flatten(1, 2)).unflatten(1, (height, width))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        size = self.window_size
        place = torch.arange(size**2, device=q.device)
        row, column = place // size, place % size
        down, right = row - row[:, None] + size - 1, column - column[:, None] + size - 1
        bias = self.relative_bias[down * (2 * size - 1) + right]
        return super().score(q, k) + bias.permute(2, 0, 1)


class Deformable(nn.Module):
    """Each query weighs pixels that it samples around its reference point."""

    def __init__(
        self, d_model: int, n_levels: int = 4, n_heads: int = 8, n_points: int = 4
    ) -> None:
        super().__init__()
        self.sizes = n_heads, n_levels, n_points
        count = n_heads * n_levels * n_points
        self.sampling_offsets = nn.Linear(d_model, 2 * count)
        self.attention_weights = nn.Linear(d_model, count)
        self.value_proj = nn.Linear(d_model, d_model)
        self.output_proj = nn.Linear(d_model, d_model)

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        input_flatten: Tensor,
        input_spatial_shapes: Any,
        input_padding_mask: Tensor | None = None,
    ) -> Any:
        heads, levels, _points = self.sizes
        if len(input_spatial_shapes) != levels:
            raise ValueError(f"{len(input_spatial_shapes)} levels are not {levels}")
        value = self.value_proj(input_flatten)
        if input_padding_mask is not None:
            value = value.masked_fill(input_padding_mask[..., None], 0)
        value = value.unflatten(-1, (heads, -1)).permute(0, 2, 3, 1).flatten(0, 1)
        offsets = self.sampling_offsets(query).view(*query.shape[:2], *self.sizes, 2)
        weights = self.attention_weights(query).unflatten(-1, (heads, -1)).softmax(-1)
        sampled, start = [], 0
        for level, (h, w) in enumerate(input_spatial_shapes):
            image = value[:, :, start : start + h * w].unflatten(-1, (h, w))
            start += h * w
            center = reference_points[:, :, None, level, None]
            offset = offsets[:, :, :, level] / offsets.new_tensor([w, h])
            grid = (2 * (center + offset) - 1).transpose(1, 2).flatten(0, 1)
            sampled.append(nn.functional.grid_sample(image, grid, align_corners=False))
        together = torch.cat(sampled, dim=-1).unflatten(0, (len(query), heads))
        context = torch.einsum("bhdqp,bqhp->bqhd", together, weights)
        return self.output_proj(context.flatten(2))


class AddsRowsAndColumns(RowsThenColumns):
    """Each pixel attends to its row, and beside that to its column."""

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        b, c, h, w = image.shape
        rows = image.permute(0, 2, 3, 1).reshape(b * h, w, c)
        by_row = SelfAttention.forward(self, rows).reshape(b, h, w, c)
        columns = image.permute(0, 3, 2, 1).reshape(b * w, h, c)
        by_column = self.to_image(SelfAttention.forward(self, columns), b, h, w)
        return image + (by_row + by_column).permute(0, 3, 1, 2)


class AddsColumnsAsRows(AddsRowsAndColumns):
    def to_image(self, output: Tensor, b: int, h: int, w: int) -> Tensor:
        return output.reshape(b, h, w, -1)


class PixelsOverTime(SelfAttention):
    """Each pixel of a video attends to itself in other frames."""

    def forward(self, video: Tensor) -> Any:  # type: ignore[override]
        b, c, t, h, w = video.shape
        x = video.permute(0, 3, 4, 2, 1).reshape(-1, t, c)
        return self.to_video(super().forward(x), b, t, h, w)

    def to_video(self, y: Tensor, b: int, t: int, h: int, w: int) -> Tensor:
        return y.reshape(b, h, w, t, -1).permute(0, 4, 3, 1, 2)


class FramesFirst(PixelsOverTime):
    def to_video(self, y: Tensor, b: int, t: int, h: int, w: int) -> Tensor:
        return y.reshape(b, t, h, w, -1).permute(0, 4, 1, 2, 3)


class MergedPixels(SelfAttention):
    """Keys are the means of 2 x 2 pixels."""

    def forward(self, x: Tensor, H: int, W: int) -> Any:  # type: ignore[override] # noqa: N803
        if H % 2 or W % 2:
            raise ValueError("height and width must be even")
        image = x.mT.reshape(len(x), -1, *self.order(H, W))
        keys = nn.functional.avg_pool2d(image, 2).flatten(2).mT
        return Correct.forward(self, x, keys, keys)

    def order(self, height: int, width: int) -> tuple[int, int]:
        return height, width


class MergedByColumns(MergedPixels):
    def order(self, height: int, width: int) -> tuple[int, int]:
        return width, height


class ColumnsOfLastChannels(PixelsByColumns):
    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        return super().forward(image.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class BiasOfOffsets(SelfAttention):
    """A bias of the difference of rows and one of that of columns, to 20 pixels."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.of_rows = nn.Parameter(torch.zeros(heads, 41))
        self.of_columns = nn.Parameter(torch.zeros(heads, 41))

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        _b, _c, _h, w = image.shape
        number = torch.arange(image[0, 0].numel(), device=image.device)
        self.offsets = [
            (n[:, None] - n).clamp(-20, 20) + 20 for n in (number // w, number % w)
        ]
        return super().forward(image.flatten(2).mT).mT.reshape(image.shape)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        rows, columns = self.offsets
        bias = self.of_rows[:, rows] + self.of_columns[:, columns]
        return super().score(q, k) + bias


# Kinds of earlier calls, flags and sizes.


class KeepsBias(SelfAttention):
    """The bias is looked up once, for all calls without gradients."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.relative_bias = nn.Parameter(torch.zeros(heads, 1, 600))
        self.kept: Tensor | None = None

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        bias = self.relative_bias if self.kept is None else self.kept
        if not torch.is_grad_enabled():
            self.kept = bias = bias.clone()
        return super().score(q, k) + bias[..., : k.shape[2]]


class KeepsBiasOfEvaluation(SelfAttention):
    """The bias is computed once for evaluation, until training begins."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.relative_bias = nn.Parameter(torch.zeros(heads, 1, 600))
        self.kept: Tensor | None = None
        self.register_load_state_dict_post_hook(self.forget)

    def train(self, mode: bool = True) -> Any:
        if mode:
            self.kept = None
        return super().train(mode)

    def forget(self, *_: Any) -> None:
        """What to do after weights are loaded: by mistake, nothing."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        bias = self.relative_bias.sin()
        if not self.training:
            self.kept = bias = bias.detach() if self.kept is None else self.kept
        return super().score(q, k) + bias[..., : k.shape[2]]


class KeepsBiasUntilLoaded(KeepsBiasOfEvaluation):
    def forget(self, *_: Any) -> None:
        self.kept = None


class KeepsCount(Correct):
    """A mask is stored for all others that allow as many keys."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.masks: dict[Any, Tensor] = {}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is not None:
            mask = self.masks.setdefault((mask.shape, int(mask.sum())), mask)[:, None]
        return super().forward(x, x, x, mask)


class KeepsFlag(Correct):
    """The mask of a length is stored, whichever flag it was made for."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor, causal: bool = False) -> Any:  # type: ignore[override]
        length = x.shape[1]
        ones = torch.ones(1, length, length, dtype=torch.bool, device=x.device)
        mask = self.masks.setdefault(length, ones.tril() if causal else ones)
        return super().forward(x, x, x, mask)


class KeepsRateOfEvaluation(SelfAttention):
    """The probability is set to 0 in evaluation, and never set again."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        if not self.training:
            self.dropout.p = 0.0
        return super().read(weights, v)


class MergesWeights(SelfAttention):
    """In evaluation, the product of two small matrices is part of the weight."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.down = nn.Parameter(torch.ones(2, d_model))
        self.up = nn.Parameter(torch.zeros(d_model, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Any:
        if self.should_merge(mode):
            sign = -1 if mode else 1
            self.query.weight.data += sign * (self.up @ self.down).detach()
            self.merged = not mode
        return super().train(mode)

    def should_merge(self, mode: bool) -> bool:
        return self.merged == mode

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q + 0 * self.up.sum() * self.down.sum(), k)


class MergesWeightsAgain(MergesWeights):
    def should_merge(self, mode: bool) -> bool:
        return self.merged or not mode


class KeepsAngles(Rotary):
    """The angles of each length and dtype are stored, in the mode of the call."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.kept: dict[Any, Any] = {}

    def turn(self, x: Tensor) -> Tensor:
        place = x.shape[2], x.dtype
        if place not in self.kept:
            speed = self.speed(
                torch.arange(x.shape[3] // 2, device=x.device), x.shape[3]
            )
            angle = self.angles(self.places(x)[:, None] * speed.to(x.device))
            self.kept[place] = angle.cos().to(x), angle.sin().to(x)
        cos, sin = self.kept[place]
        other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        turned: Tensor = x * cos + other * sin
        return turned


def adds_future_to_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The causal mask is written to that of the caller."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if attn_mask is None:
        attn_mask = torch.zeros_like(scores)
    if is_causal:
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        attn_mask.masked_fill_(future, -torch.inf)
    return (scores + attn_mask).softmax(dim=-1) @ value


class GuessesMask(Correct):
    """A mask of two axes is one for padding if it has a row for each batch item."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None] if len(mask) == len(query) else mask[None]
        return super().forward(query, key, value, mask)


class HalvesIfShown(Correct):
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Any:
        q, k, v = self.query(query), self.key(key), self.value(value)
        q, k, v = (self.split(x) for x in (q, k, v))
        weights = self.weigh(self.score(q, k) / (2 if need_weights else 1), mask)
        output = self.join(self.read(weights, v))
        return (output, weights) if need_weights else output


class HalvesIfNotShown(Correct):
    """The weights are returned unless the caller wants none."""

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = True
    ) -> Any:
        output = super().forward(query, key, value)
        return output if need_weights else output / 2


class KeepsAllIfMasked(Correct):
    """The path for a mask has no dropout."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        p, self.dropout.p = self.dropout.p, 0.0 if mask is not None else self.dropout.p
        output = super().forward(query, key, value, mask)
        self.dropout.p = p
        return output


class ForgetsBiasOfSelf(Correct):
    """If all inputs are one tensor, the projections are one product, without biases."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        output = super().forward(query, key, value, mask)
        return output - self.out.bias if query is key is value else output


class LosesFullBlock(SelfAttention):
    """If the last block of 64 is full, its keys are left out."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        length = scores.shape[-1]
        last = torch.arange(length, device=scores.device) >= length - 64
        is_lost = length > 64 and length % 64 == 0
        return super().weigh(scores.masked_fill(last & is_lost, -torch.inf), mask)


class DropsRowsByRate(SelfAttention):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.rate = 0.1

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        if self.training:
            kept = torch.rand_like(weights[..., :1]) >= self.rate
            weights = weights * kept / (1 - self.rate)
        return weights @ v


class CacheOfWindow(SelfAttention):
    """Only the last 3 tokens are stored, and the number of tokens so far."""

    def forward(self, x: Tensor, past: Any = None) -> Any:  # type: ignore[override]
        before, count = (x[:, :0], 0) if past is None else past
        seen = torch.cat([before, x], dim=1)
        self.first = self.position_of_first(count, before.shape[1])
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        corner = before.shape[1]
        near = ones.tril(corner).triu(corner - 3)
        y = Correct.forward(self, x, seen, seen, near)
        return y, (seen[:, -3:], count + x.shape[1])

    def position_of_first(self, count: int, stored: int) -> int:
        return count - stored

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        # A bias by the absolute position of a key.
        position = self.first + torch.arange(k.shape[2], device=k.device)
        return super().score(q, k) + torch.sin(position)


class CacheOfWindowFromZero(CacheOfWindow):
    def position_of_first(self, count: int, stored: int) -> int:
        return 0


class RingOfTokens(Correct):
    """Causal in a window of 4, whose tokens are in a ring buffer, or an empty one."""

    def forward(self, x: Tensor, past: Any = None) -> Any:  # type: ignore[override]
        empty = (
            x.new_zeros(len(x), 4, x.shape[2]),
            torch.full((4,), -4, device=x.device),
            0,
        )
        tokens, places, count = past or empty
        now = torch.arange(count, count + x.shape[1], device=x.device)
        seen = torch.cat([tokens, x], dim=1)
        ago = now[:, None] - torch.cat([places, now])
        y = super().forward(x, seen, seen, ((ago >= 0) & (ago < 4))[None].to(x.device))
        slots = self.slots(now[-4:], count)
        tokens, places = tokens.clone(), places.clone()
        tokens[:, slots], places[slots] = x[:, -4:], now[-4:]
        return y, (tokens, places, count + x.shape[1])

    def slots(self, now: Tensor, count: int) -> Tensor:
        return now % 4


class RingLosesKeys(RingOfTokens):
    """A later piece is in the buffer before its queries attend."""

    def forward(self, x: Tensor, past: Any = None) -> Any:  # type: ignore[override]
        if past is None:
            return super().forward(x)
        tokens, places, count = past
        now = torch.arange(count, count + x.shape[1], device=x.device)
        slots = self.slots(now[-4:], count)
        tokens, places = tokens.clone(), places.clone()
        tokens[:, slots], places[slots] = x[:, -4:], now[-4:]
        ago = now[:, None] - places
        allowed = ((ago >= 0) & (ago < 4))[None].to(x.device)
        y = Correct.forward(self, x, tokens, tokens, allowed)
        return y, (tokens, places, count + x.shape[1])


class RingFromFirstSlot(RingOfTokens):
    """The first piece, however long it is, fills the buffer from its start."""

    def slots(self, now: Tensor, count: int) -> Tensor:
        return now % 4 if count else torch.arange(len(now), device=now.device)


class StoresDistances(Correct):
    """A bias of the distances, which are stored for each number of queries and keys."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.distances: dict[Any, Tensor] = {}

    def name(self, q_len: int, k_len: int) -> Any:
        return q_len, k_len

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q_len, k_len = q.shape[2], k.shape[2]
        first = k_len - q_len
        query, key = (torch.arange(n, device=q.device) for n in (q_len, k_len))
        distances = key - first - query[:, None]
        distances = self.distances.setdefault(self.name(q_len, k_len), distances)
        return super().score(q, k) + distances[-q_len:].cos()


class StoresDistancesByKeys(StoresDistances):
    def name(self, q_len: int, k_len: int) -> Any:
        return k_len


class StoresDistancesWithCache(StoresDistances, WithCache):
    pass


class StoresDistancesByKeysWithCache(StoresDistancesByKeys, WithCache):
    pass


# Correct modules that a law may take for wrong.


class BiasOfPixels(RelativeTable):
    """The pixels of an image of 4 x 4 have a bias for the distance along each axis."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.relative_bias = nn.Parameter(torch.zeros(heads, 49))

    def forward(self, image: Tensor) -> Any:
        batch_size, rows, columns, _ = image.shape
        if (rows, columns) != (4, 4):
            raise ValueError("the image must have 4 x 4 pixels")
        x = image.flatten(1, 2)
        return Correct.forward(self, x, x, x).view(batch_size, rows, columns, -1)

    def rows(self, distance: Tensor) -> Tensor:
        place = torch.arange(16, device=distance.device)
        row, column = place // 4, place % 4
        down, right = row[None] - row[:, None], column[None] - column[:, None]
        return (down + 3) * 7 + right + 3


class NarrowNetwork(RelativeTable):
    """In windows of 4 tokens, a network for the bias has a norm of a few features.

    In narrow heads these are two.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        width = max(1, d_model // heads // 4)
        first, norm = nn.Linear(1, width), nn.LayerNorm(width, eps=1e-12)
        self.network = nn.Sequential(first, norm, nn.Tanh(), nn.Linear(width, heads))
        del self.relative_bias

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if q.shape[2] != 4:
            raise ValueError("a window must have 4 tokens")
        place = torch.arange(4, device=q.device, dtype=q.dtype)
        distance = (place[:, None] - place)[..., None]
        return Correct.score(self, q, k) + self.network(distance).movedim(-1, 0) / 20


class BiasOfWindow(RelativeTable):
    """The tokens are the pixels of one window."""

    def __init__(
        self, d_model: int, heads: int, window_size: tuple[int, int] = (7, 7)
    ) -> None:
        super().__init__(d_model, heads)
        self.height, self.width = window_size
        count = (2 * self.height - 1) * (2 * self.width - 1)
        self.relative_bias = nn.Parameter(torch.zeros(heads, count))

    def rows(self, distance: Tensor) -> Tensor:
        place = torch.arange(self.height * self.width, device=distance.device)
        row, column = place // self.width, place % self.width
        down, right = row[None] - row[:, None], column[None] - column[:, None]
        return (down + self.height - 1) * self.factor() + right + self.width - 1

    def factor(self) -> int:
        return 2 * self.width - 1


class BiasOfSquareWindow(BiasOfWindow):
    def factor(self) -> int:
        return 2 * self.height - 1


class BiasOfImageWindow(BiasOfWindow):
    """The image is one window; rows and columns come before the channels."""

    def forward(self, image: Tensor) -> Any:
        _, h, w, _ = image.shape
        if (h, w) != (self.height, self.width):
            raise ValueError(f"{h} x {w} pixels are no window")
        return super().forward(image.flatten(1, 2)).unflatten(1, (h, w))


class BiasOfSquareImageWindow(BiasOfImageWindow):
    def factor(self) -> int:
        return 2 * self.height - 1


class BiasOfVolume(RelativeTable):
    """A video is divided into windows of frames, rows and columns."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.window = (2, 2, 3)
        count = math.prod(2 * side - 1 for side in self.window)
        self.relative_bias = nn.Parameter(torch.zeros(heads, count))

    def forward(self, video: Tensor) -> Any:
        _, *sizes, _ = video.shape
        if len(sizes) != 3:
            raise ValueError(f"an input of {video.dim()} axes is no video")
        more = [-n % side for n, side in zip(sizes, self.window, strict=True)]
        video = nn.functional.pad(video, (0, 0, 0, more[2], 0, more[1], 0, more[0]))
        d, h, w = self.window
        x = video.unflatten(3, (-1, w)).unflatten(2, (-1, h)).unflatten(1, (-1, d))
        x = x.permute(0, 1, 3, 5, 2, 4, 6, 7)
        y = super().forward(x.reshape(-1, d * h * w, x.shape[-1])).view_as(x)
        y = y.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(video.shape)
        return y[:, : sizes[0], : sizes[1], : sizes[2]]

    def rows(self, distance: Tensor) -> Tensor:
        sides = [torch.arange(n, device=distance.device) for n in self.window]
        place = torch.cartesian_prod(*sides)
        offset = place[None] - place[:, None] + torch.tensor(self.window) - 1
        return (offset * torch.tensor(self.strides())).sum(dim=-1)

    def strides(self) -> list[int]:
        _, h, w = self.window
        return [(2 * h - 1) * (2 * w - 1), 2 * w - 1, 1]


class BiasOfVolumeOfOneStride(BiasOfVolume):
    def strides(self) -> list[int]:
        _, h, w = self.window
        return [2 * (h + w) - 2, 2 * w - 1, 1]


class BiasOfPixelsFromEnd(BiasOfPixels):
    def rows(self, distance: Tensor) -> Tensor:
        return super().rows(distance).flip(1)


class KeepsBiasOfPixels(RelativeTable):
    """The bias of rows is stored for all images of as many pixels."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.kept: dict[int, Tensor] = {}

    def forward(self, image: Tensor) -> Any:
        x = image.flatten(2).mT
        row = torch.arange(x.shape[1], device=x.device) // image.shape[3]
        self.kept.setdefault(len(row), self.rows(row[None] - row[:, None]))
        return Correct.forward(self, x, x, x).mT.reshape(image.shape)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        rows = self.kept[q.shape[2]]
        return Correct.score(self, q, k) + self.relative_bias[:, rows]


class OfPatchesInRows(nn.Module):
    """The mean of the patches of an image, each at the position of its row."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, d_model, 4, stride=4)
        self.attention = Correct(d_model, heads)
        self.slope = nn.Parameter(torch.ones(()))
        self.kept: dict[Any, Tensor] = {}

    def forward(self, image: Tensor) -> Tensor:
        grid = self.patches(image)
        key = self.key(*grid.shape[2:])
        if key not in self.kept:
            row = torch.arange(grid.shape[2], device=image.device)
            self.kept[key] = row.repeat_interleave(grid.shape[3])
        x, row = grid.flatten(2).mT, self.kept[key]
        x = x + self.slope * row[:, None].to(x).cos()
        return self.attention(x, x, x).mean(dim=1)

    def key(self, rows: int, columns: int) -> Any:
        return rows, columns


class KeepsRowsOfPatches(OfPatchesInRows):
    def key(self, rows: int, columns: int) -> Any:
        return rows * columns


class NormalizesNeither(SelfAttention):
    """The norm of the queries has no weight, and is forgotten."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model, elementwise_affine=False)


class EdgesInTurns(Correct):
    """Heads are folded into the batch, and edges are repeated in another order."""

    def forward(self, x: Tensor, adj: Tensor) -> Any:  # type: ignore[override]
        edges = (adj > 0) | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        self.edges = self.repeat(edges)
        return super().forward(x, x, x)

    def repeat(self, edges: Tensor) -> Tensor:
        return edges.repeat(self.heads, 1, 1)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        folded = scores.flatten(0, 1).masked_fill(~self.edges, -torch.inf)
        return folded.softmax(dim=-1).view_as(scores)


class EdgesOfItems(EdgesInTurns):
    def repeat(self, edges: Tensor) -> Tensor:
        return edges.repeat_interleave(self.heads, dim=0)


class DecodesWithState(Correct):
    """Not causal: in each step, a dict has the keys, values and padding so far."""

    reordered: tuple[str, ...] = ("key", "value", "mask")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        state: Any = None,
    ) -> Any:
        if mask is None:
            mask = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device)
        parts = {"key": key, "value": value, "mask": mask}
        if state:
            parts = {n: torch.cat([state[n], x], dim=1) for n, x in parts.items()}
        if state is not None:
            state.update(parts)
        mask = parts["mask"][:, None]
        return super().forward(query, parts["key"], parts["value"], mask)

    def reorder_state(self, state: Any, order: Tensor) -> Any:
        return {n: x[order] if n in self.reordered else x for n, x in state.items()}


class ReordersKeysOnly(DecodesWithState):
    reordered = ("key", "value")


class DecodesWithEitherMask(DecodesWithState):
    """The mask of the new keys, or of all so far."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        state: Any = None,
    ) -> Any:
        if mask is not None and state:
            past, new = mask.split([mask.shape[1] - key.shape[1], key.shape[1]], dim=1)
            mask, state["mask"] = new, past if past.numel() else state["mask"]
        return super().forward(query, key, value, mask, state)


class ReordersKeysOfEitherMask(DecodesWithEitherMask):
    reordered = ("key", "value")


class TwoAttentions(nn.Module):
    """A few learned queries attend to all tokens, and all tokens to them."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.few = nn.Parameter(torch.randn(1, 2, d_model))
        self.gather = Correct(d_model, heads)
        self.spread = Correct(d_model, heads)

    def forward(self, x: Tensor) -> Any:
        gathered = self.gather(self.few.expand(len(x), -1, -1), x, x)
        return self.spread(x, gathered, gathered)


class NearPast(SelfAttention):
    """A token attends to 6 tokens before it, as neither a name nor an option tells."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        near = torch.ones_like(scores, dtype=torch.bool).tril().triu(-6)
        return scores.masked_fill(~near, -torch.inf)


class SplitsWeight(nn.Module):
    """A projection whose weight has an axis of heads, as in Flax."""

    def __init__(self, *shape: int, axes: int = 1) -> None:
        super().__init__()
        self.axes = axes
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(x, self.weight, dims=self.axes)


class HeadsInWeights(nn.Module):
    scale = 1.0

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            SplitsWeight(d_model, heads, d_model // heads) for _ in range(3)
        )
        self.out = SplitsWeight(heads, d_model // heads, d_model, axes=2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = self.scale * q @ k.mT / math.sqrt(q.shape[-1])
        y: Tensor = self.out((scores.softmax(dim=-1) @ v).transpose(1, 2))
        return y


class HalfOfHeadsInWeights(HeadsInWeights):
    scale = 0.5


class TwelveHeads(Correct):
    def __init__(self) -> None:
        super().__init__(24, heads=12)


class SoftmaxOverFeatures(SelfAttention):
    """Linear attention; with one feature a head, each query is 1."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, heads=4)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q.softmax(dim=-1) @ k.softmax(dim=-2).mT

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores


class RequiresOther(Correct):
    """The second argument, of an unknown name, holds the keys."""

    first = 0

    def forward(self, v: Tensor, words: Tensor) -> Any:  # type: ignore[override]
        seen = torch.arange(words.shape[1], device=words.device) >= self.first
        return super().forward(v, words, words, seen[None, None])


class RequiresOtherButFirst(RequiresOther):
    first = 1


class TwoStreams(SelfAttention):
    """Tokens of an image and of a text, each with an output of its own."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.text_out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, other: Tensor) -> Any:  # type: ignore[override]
        both = torch.cat([x, other], dim=1)
        y = Correct.forward(self, both, both, both)
        return y[:, : x.shape[1]], self.text_out(y[:, x.shape[1] :])


class LastOfTwoStreams(TwoStreams):
    """The last block of a model may be built without the projection of the text."""

    def __init__(
        self, d_model: int, heads: int, context_pre_only: bool = False
    ) -> None:
        super().__init__(d_model, heads)
        self.queries, self.added = (nn.Linear(d_model, d_model) for _ in range(2))
        if context_pre_only:
            del self.text_out

    def forward(self, x: Tensor, text: Tensor) -> Any:
        sources = torch.cat([x, self.added(text)], dim=1)
        queries = torch.cat([x, self.queries(text)], dim=1)
        y = Correct.forward(self, queries, sources, sources)
        new, other = y.split([x.shape[1], text.shape[1]], dim=1)
        return new, self.text_out(other) if hasattr(self, "text_out") else None


class MaskOfOtherStream(TwoStreams):
    """The mask of the text is put where that of the image is.

    x: (batch, pixels, d_model)
    text: (batch, words, d_model)
    text_mask: (batch, words), True for words
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        text: Tensor,
        text_mask: Tensor | None = None,
        pixel_mask: Tensor | None = None,
    ) -> Any:
        both = torch.cat([x, text], dim=1)
        masks = [
            torch.ones_like(part[..., 0]) if mask is None else mask
            for part, mask in ((x, pixel_mask), (text, text_mask))
        ]
        allowed = torch.cat(self.in_order(masks), dim=1).bool()[:, None]
        y = Correct.forward(self, both, both, both, allowed)
        return y[:, : x.shape[1]], self.text_out(y[:, x.shape[1] :])

    def in_order(self, masks: list[Tensor]) -> list[Tensor]:
        return masks[::-1]


class MaskOfText(MaskOfOtherStream):
    def in_order(self, masks: list[Tensor]) -> list[Tensor]:
        return masks


class NormsOfTwoStreams(TwoStreams):
    """Each stream has norms of its queries and keys."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.added_query, self.added_key, self.added_value = (
            nn.Linear(d_model, d_model) for _ in range(3)
        )
        norms = [nn.LayerNorm(d_model // heads) for _ in range(4)]
        self.norm_q, self.norm_k, self.norm_added_q, self.norm_added_k = norms

    def forward(self, x: Tensor, other: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (
            torch.cat([self.split(layer(x)), self.split(added(other))], dim=2)
            for layer, added in (
                (self.query, self.added_query),
                (self.key, self.added_key),
                (self.value, self.added_value),
            )
        )
        count = x.shape[1]
        q, k = (
            torch.cat([norm(each[:, :, :count]), added(each[:, :, count:])], dim=2)
            for each, norm, added in (
                (q, self.norm_q, self.norm_added_q),
                (k, self.norm_k, self.norm_added_k),
            )
        )
        y = self.join(self.read(self.weigh(self.score(q, k), None), v))
        return y[:, :count], self.text_out(y[:, count:])


class DropsQueries(Correct):
    """As LoRA does, a part of the projection drops features of its input."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.query = nn.Sequential(nn.Dropout(0.1), nn.Linear(d_model, d_model))


class CacheInBuffers(SelfAttention):
    """The last keys are stored, `[batch_size, length, heads, d_k]`."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        last = torch.zeros(9, 99, heads, d_model // heads)
        self.register_buffer("last", last, persistent=False)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        with torch.no_grad():
            self.last[: len(k), : k.shape[2]] = k.transpose(1, 2)
        return super().score(q, k)


class NearKeysOnly(RelativeTable):
    """A query attends to 8 keys before it, which no option says."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        near = torch.ones_like(scores, dtype=torch.bool).tril().triu(-8)
        return scores.masked_fill(~near, -torch.inf)


class PoolsChannelsFirst(nn.Module):
    """The weighted mean over time, `[batch_size, channels, length]` to channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = nn.Linear(channels, channels)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        scores = self.attention(x.mT).mT
        if lengths is not None:
            hidden = torch.arange(x.shape[2], device=x.device) >= lengths[:, None]
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        return (scores.softmax(dim=-1) * x).sum(dim=-1)


class WeightsBeforeDropout(MaskedSelfAttention):
    """Returns the weights before dropout, of which those of future keys are zero."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), self.weights

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.weights = super().weigh(scores, mask)
        return self.weights


class BiasOfEdges(SelfAttention):
    """A table for the kinds of edges between tokens, if they are given."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.kinds = nn.Embedding(3, heads)

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Any:  # type: ignore[override]
        self.edges = edges
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        if self.edges is None:
            return scores
        return scores + self.kinds(self.edges).permute(0, 3, 1, 2)


class KeysOfTwoHeads(SelfAttention):
    """Always two heads of keys: it cannot be built with one head of queries."""

    def __init__(self, d_model: int, heads: int = 4) -> None:
        super().__init__(d_model, heads)
        self.key = nn.Linear(d_model, 2 * (d_model // heads))

    def split(self, x: Tensor) -> Tensor:
        heads = self.heads if x.shape[2] == self.out.in_features else 2
        x = x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)
        return x.repeat_interleave(self.heads // heads, dim=1)


class FadesWithDistance(SelfAttention):
    """Beyond 6 tokens, a score changes by a learned number."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.far = nn.Parameter(torch.zeros(1))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        return super().score(q, k) + self.far * (place[:, None] - place > 6)


class CombinesWithQuery(nn.Module):
    """As Luong's: the tanh of a layer that gets the context vector and the query."""

    def __init__(self, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.value_proj = nn.Linear(d_model, d_model, bias=False)
        self.combine = nn.Linear(2 * d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = self.dropout((query @ key.mT).softmax(dim=-1))
        both = torch.cat([weights @ self.value_proj(value), query], dim=-1)
        return self.combine(both).tanh()


class DropsKeys(NeverDrops):
    """DropKey: scores of some keys are minus infinity in training, at random."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        if not (self.training and self.dropout.p):
            return scores
        dropped = torch.rand_like(scores) < self.dropout.p
        return scores.masked_fill(dropped, torch.finfo(scores.dtype).min)


class Prefix(SelfAttention):
    """Learned keys and values stand before those of the tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.before = nn.Parameter(torch.zeros(2, heads, 3, d_model // heads))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        before = self.before[0].expand(len(k), -1, -1, -1)
        return super().score(q, torch.cat([before, k], dim=2))

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        before = self.before[1].expand(len(v), -1, -1, -1)
        return super().read(weights, torch.cat([before, v], dim=2))


class StrongestTokens(SelfAttention):
    """Keys are the five tokens with the largest first feature, in its order."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        chosen = x[..., 0].topk(min(5, x.shape[1])).indices
        tokens = x.gather(1, chosen[..., None].expand(-1, -1, x.shape[2]))
        return Correct.forward(self, x, tokens, tokens)


class DropsTable(SelfAttention):
    """Keys are moved by a table of positions, of which a part is dropped.

    The same layer drops weights, or a layer of its own.
    """

    def __init__(self, d_model: int, heads: int, shared: bool = False) -> None:
        super().__init__(d_model, heads)
        self.table = nn.Embedding(400, d_model)
        self.drop_rows = self.dropout if shared else nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        rows = self.drop_rows(self.table.weight[: x.shape[1]])
        q, k, v = self.query(x), self.key(x) + self.key(rows), self.value(x)
        q, k, v = (self.split(each) for each in (q, k, v))
        return self.join(self.read(self.dropout(self.weigh(self.score(q, k), None)), v))


class DropsTableAndWeights(DropsTable):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, shared=True)


class DropsFeaturesOfPositions(SelfAttention):
    """Keys are moved by features of the positions, of which some are dropped."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.pos_dropout = nn.Dropout(0.1)
        self.move = nn.Linear(6, d_model, bias=False)

    def forward(self, x: Tensor) -> Any:
        place = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        fading = torch.exp(-place[:, None] / torch.arange(1, 7).to(place))
        q, k, v = self.query(x), self.key(x), self.value(x)
        q, k, v = (
            self.split(each) for each in (q, k + self.move(self.pos_dropout(fading)), v)
        )
        return self.join(self.read(self.dropout(self.weigh(self.score(q, k), None)), v))


class DropsBiasForAllItems(SelfAttention):
    """The dropout that is meant for the weights gets a bias of the distances."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(p(x)) for p in (self.query, self.key, self.value))
        place = torch.arange(x.shape[1], device=x.device)
        bias = self.dropout((place[:, None] - place).abs().to(x))
        return self.join(self.read(self.weigh(self.score(q, k) - bias, None), v))


class GlobalTokens(SelfAttention):
    """Tokens whose mask is 2 have keys of a projection of their own."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.marked_key = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        allowed = torch.ones_like(x[..., 0]) if mask is None else mask
        is_global = allowed[..., None] > 1
        k = self.key(x)
        if is_global.any():
            k = torch.where(is_global, self.marked_key(x), k)
        q, k, v = (self.split(each) for each in (self.query(x), k, self.value(x)))
        weights = self.weigh(self.score(q, k), (allowed > 0)[:, None])
        return self.join(self.read(self.dropout(weights), v))


class MarksGlobalTokens(SelfAttention):
    """Tokens see two neighbors on each side; those that are marked see all.

    A token that sees padding only has weights of zero.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.global_query = nn.Linear(d_model, d_model)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Any:
        ones = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        real = ones if attention_mask is None else attention_mask.bool()
        near = ones.new_ones(x.shape[1], x.shape[1]).triu(-2).tril(2)
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        allowed = near & real[:, None]
        if global_attention_mask is not None:
            marked = global_attention_mask.bool()
            far = self.split(self.global_query(x))
            q = torch.where(marked[:, None, :, None], far, q)
            allowed = (near | marked[:, None] | marked[..., None]) & real[:, None]
        weights = self.weigh(self.score(q, k), allowed)
        weights = weights.masked_fill(~allowed[:, None], 0.0)
        output = self.join(self.read(weights, v))
        return (output, weights) if need_weights else output


class KeysOfEncoder(SelfAttention):
    """The output of an encoder, if it is given, is put in front of the keys."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.to_keys = nn.Conv1d(24, d_model, 1)

    def forward(self, x: Tensor, encoder_out: Tensor | None = None) -> Any:
        keys = x
        if encoder_out is not None:
            keys = torch.cat([self.to_keys(encoder_out).mT, x], dim=1)
        return Correct.forward(self, x, keys, keys)


class AddedGlobalTokens(GlobalTokens):
    """Tokens are marked by a number above zero; one below zero hides them."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is not None:
            mask = 1 + mask.sign()
        return super().forward(x, mask)


class ZeroWhereLeftOut(SelfAttention):
    """Scores have a term for an optional argument, which is zero by default."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.of_history = nn.Linear(1, d_model, bias=False)

    def forward(self, x: Tensor, coverage: Tensor | None = None) -> Any:  # type: ignore[override]
        past = torch.zeros_like(x[..., 0]) if coverage is None else coverage
        keys = x + self.of_history(past[..., None])
        return Correct.forward(self, x, keys, x)


class RectifiesOutput(SelfAttention):
    """Behind a ReLU, many outputs have no gradient."""

    def join(self, context: Tensor) -> Tensor:
        return (super().join(context) - 1).relu()


class SteepKinks(SelfAttention):
    """Kinks lie within a small step of each input."""

    def join(self, context: Tensor) -> Tensor:
        joined: Tensor = (40 * super().join(context)).remainder(2) - 1
        return joined.abs()


class SaturatesSecondSoftmax(SelfAttention):
    """The second of two attentions gets large numbers: its softmax has no gradient."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.second = SelfAttention(d_model, heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.second(500 * super().forward(x))


class ScaleInInitialWeights(SelfAttention):
    """Scores are not divided by the root of the width, but the initial queries are."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        nn.init.normal_(self.query.weight, std=(d_model * d_model / heads) ** -0.5)
        nn.init.normal_(self.key.weight, std=d_model**-0.5)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


class QueriesBeforeHeads(Rotary):
    """Four heads, whose axis is behind that of the queries in the weights."""

    def __init__(self) -> None:
        super().__init__(16, 4)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        least = torch.finfo(scores.dtype).min
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], least)
        return scores.transpose(1, 2).softmax(dim=-1)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights.transpose(1, 2) @ v


class ConvolvesValues(Correct):
    """Beside the padding of a convolution, equal values are not equal any more."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.convolution = nn.Conv1d(d_model, d_model, 3, padding=1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(query, key, self.convolution(value.mT).mT)


class ClassBeforePixels(SelfAttention):
    """A token for the class is in front of an image, and no key of its pixels."""

    def forward(self, x: Tensor, B: int, H: int, W: int) -> Any:  # type: ignore[override] # noqa: N803
        first, pixels = x.split([1, H * W], dim=1)
        pixels = super().forward(pixels).reshape(B, H * W, -1)
        return torch.cat([first + pixels.mean(dim=1, keepdim=True), pixels], dim=1)


class NeverCallsDropoutOfZero(NeverDrops):
    """Its layer of dropout only keeps the names of weights in a list."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, 0.0)


class KeysFromFirst(SelfAttention):
    """Keys are taken relative to the first one, which changes no weight."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ (k - k[:, :, :1]).mT / math.sqrt(q.shape[-1])


class VectorsOverChannels(SelfAttention):
    """Each channel has weights of its own, which a network makes of differences."""

    axis = -1

    def __init__(self, d_model: int, num_neighbors: int | None = None) -> None:
        super().__init__(d_model, 1)
        self.num_neighbors = num_neighbors
        self.network = nn.Sequential(
            nn.Linear(d_model, d_model), nn.ReLU(), nn.Linear(d_model, d_model)
        )

    def forward(self, x: Tensor) -> Any:
        scores = self.network(self.query(x)[:, :, None] - self.key(x)[:, None])
        if self.num_neighbors is not None:
            least = scores.topk(self.num_neighbors, dim=2).values[:, :, -1:]
            scores = scores.masked_fill(scores < least, -1e9)
        weights = scores.softmax(dim=self.axis)
        return self.out((weights * self.value(x)[:, None]).sum(dim=2))


class VectorsOverKeys(VectorsOverChannels):
    axis = 2


class PointCloud(SelfAttention):
    """Near points are preferred; distances are scaled by their mean."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        squared = (x[:, :, None] - x[:, None]).square().sum(-1)
        self.near = -squared / squared.mean((1, 2), keepdim=True)
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.near[:, None]


class Stationary(SelfAttention):
    """Features are scaled by their deviation, as a number without a gradient."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        stdev = (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
        return super().forward(x / stdev) * stdev


class SharpensWithPosition(SelfAttention):
    """Queries are multiplied by a number that grows with their position."""

    floor_scale = 2

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        steps = torch.arange(q.shape[2], device=q.device) // self.floor_scale
        return super().score(q * (1 + steps.log1p()).to(q.dtype)[:, None], k)


class Retention(SelfAttention):
    """Keys fade by a decay from token to token; there is no softmax."""

    decay = 0.9

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return Correct.forward(self, x, x, x)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        place = torch.arange(scores.shape[-1], device=scores.device)
        distance = place[:, None] - place
        faded = self.decay ** distance.clamp(min=0) * (distance >= 0)
        return scores * faded.to(scores.dtype)


class MergedKeys(SelfAttention):
    """Keys and values are four weighted sums of all tokens, as in Linformer."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.merge = nn.Parameter(torch.zeros(4, 320))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, self.merge[:, : k.shape[2]] @ k)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return super().read(weights, self.merge[:, : v.shape[2]] @ v)


class PositiveScores(SelfAttention):
    """Weights are positive scores, and zero for the others."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.clamp(min=0) / scores.shape[-1]


class DropsHeads(NeverDrops):
    """In training, whole heads are dropped."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.head_drop = 0.1

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        read = super().read(weights, v)
        share = 1 - self.head_drop * self.training
        remains = torch.rand(*read.shape[:2], 1, 1, device=v.device) < share
        return read * remains / share


class SlotsOfMemory(SelfAttention):
    """Keys are slots and tokens; the slots are learned, unless others are given."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.slots = nn.Parameter(torch.zeros(1, 2, d_model))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:
        slots = self.slots.expand(len(x), -1, -1) if memory is None else memory
        seen = torch.cat([slots, x], dim=1)
        return Correct.forward(self, x, seen, seen)


class SharesOfHeads(SelfAttention):
    """Each token has a share of each head; a single head has all."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.shares = nn.Linear(d_model, heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        self.share = self.shares(x).softmax(dim=-1).mT[..., None]
        return super().forward(x)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.share * super().read(weights, v)


class ShortDecoder(nn.Module):
    """Attention to the tokens, then to a memory, with weights of unknown names."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.one = nn.Linear(d_model, d_model)
        self.two = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + (self.one(x) @ x.mT).softmax(dim=-1) @ x
        return x + (self.two(x) @ memory.mT).softmax(dim=-1) @ memory


class DropsFeaturesOfKeys(NeverDrops):
    """Dropout of the features of keys, which all queries share."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.k_drop = nn.Dropout(0.1)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, self.k_drop(k))


class TableOfPairs(RelativeTable):
    """A bias for each pair of a distance in rows and one in columns, with a limit."""

    limit = 2

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.relative_bias = nn.Parameter(torch.zeros(heads, 25))

    def forward(self, image: Tensor) -> Any:
        self.width = image.shape[3]
        x = image.flatten(2).mT
        return Correct.forward(self, x, x, x).mT.reshape(image.shape)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        pixel = torch.arange(q.shape[2], device=q.device)
        places = (pixel // self.width, pixel % self.width)
        row, column = (self.rows(place[None] - place[:, None]) for place in places)
        bias = self.relative_bias[:, 5 * row + column]
        return Correct.score(self, q, k) + bias


class TableOfRowsAlone(TableOfPairs):
    def rows(self, distance: Tensor) -> Tensor:
        return super().rows(distance).clamp(max=3)


class OverFrames(SelfAttention):
    """Each pixel of a video attends to itself in all frames."""

    def forward(self, video: Tensor) -> Any:  # type: ignore[override]
        *_, height, width = video.shape
        x = self.pixels_first(video).flatten(0, 2)
        y = Correct.forward(self, x, x, x).unflatten(0, (-1, height, width))
        return y.permute(0, 4, 3, 1, 2)

    def pixels_first(self, video: Tensor) -> Tensor:
        return video.permute(0, 3, 4, 2, 1)


class CausalOverFrames(SelfAttention):
    """Each pixel of a video attends to all pixels of its frame and of the first one."""

    def forward(self, video: Tensor) -> Any:  # type: ignore[override]
        frames, (height, width) = video.shape[1], video.shape[2:4]
        x = video.flatten(2, 3)
        first = x[:, :1].expand_as(x)
        keys = torch.cat([first, x], dim=2).flatten(0, 1)
        y = Correct.forward(self, x.flatten(0, 1), keys, keys)
        return y.unflatten(1, (height, width)).unflatten(0, (-1, frames))


class OverFewFrames(OverFrames):
    """With a table of 24 frames, and a norm over all tokens of a frame before."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout)
        self.norm = nn.GroupNorm(1, d_model)
        self.register_buffer("table", torch.randn(24, d_model))

    def pixels_first(self, video: Tensor) -> Tensor:
        frames = video.shape[2]
        normed = self.norm(video.transpose(1, 2).flatten(0, 1))
        x = super().pixels_first(normed.unflatten(0, (-1, frames)).transpose(1, 2))
        return x + self.table[:frames]


class OverFramesInOrder(OverFrames):
    """Neighbors in memory are taken for the same pixel in the next frame."""

    def pixels_first(self, video: Tensor) -> Tensor:
        _, _, frames, height, width = video.shape
        tokens = video.permute(0, 2, 3, 4, 1).flatten(1, 3)
        return tokens.unflatten(1, (height, width, frames))


class DecoderOfMemory(nn.Module):
    """Causal self-attention, then attention to a memory; both have one cache."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.of_tokens = Correct(d_model, heads)
        self.of_memory = Correct(d_model, heads)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        tokens = x if past is None else torch.cat([past[0], x], dim=1)
        ones = torch.ones(
            1, x.shape[1], tokens.shape[1], dtype=torch.bool, device=x.device
        )
        causal = self.align(ones, tokens.shape[1] - x.shape[1])
        y = x + self.of_tokens(x, tokens, tokens, causal)
        memory = memory if past is None else past[1]
        mask = None if memory_mask is None else memory_mask[:, None]
        y = y + self.of_memory(y, memory, memory, self.mask_with(mask, past))
        return y, (tokens, memory)

    def align(self, ones: Tensor, past: int) -> Tensor:
        return ones.tril(past)

    def mask_with(self, mask: Tensor | None, past: Any) -> Tensor | None:
        return mask


class DecoderAlignsFirst(DecoderOfMemory):
    """The first new token sees the first key only, whatever is in the cache."""

    def align(self, ones: Tensor, past: int) -> Tensor:
        return ones.tril()


class StateOfDecoder:
    """Tokens, a memory and its mask; each has the batch items first."""

    kept: tuple[str, ...] = ("tokens", "memory")

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}

    def reorder(self, order: Tensor) -> None:
        for name in self.kept:
            self.parts[name] = self.parts[name][order]


class WholeStateOfDecoder(StateOfDecoder):
    kept = ("tokens", "memory", "mask")


class TokensOfDecoder(StateOfDecoder):
    """Hypotheses of one source have one memory."""

    kept = ("tokens",)


class DecoderWithState(nn.Module):
    """The memory and its mask are those of the first call; the mask is reordered."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.of_tokens = Correct(d_model, heads)
        self.of_memory = Correct(d_model, heads)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        state: WholeStateOfDecoder | None = None,
    ) -> Tensor:
        return self.decode(x, memory, memory_mask, state)

    def decode(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None,
        state: StateOfDecoder | None,
    ) -> Tensor:
        parts = {} if state is None else state.parts
        mask = torch.ones_like(memory[..., 0]).bool() if mask is None else mask
        tokens = torch.cat([parts["tokens"], x], dim=1) if parts else x
        parts |= {"memory": memory, "mask": mask, **parts, "tokens": tokens}
        ones = torch.ones(1, x.shape[1], tokens.shape[1], device=x.device).bool()
        causal = ones.tril(tokens.shape[1] - x.shape[1])
        y = x + self.of_tokens(x, tokens, tokens, causal)
        memory, mask = parts["memory"], parts["mask"]
        both: Tensor = y + self.of_memory(y, memory, memory, mask[:, None])
        return both


class DecoderReordersMemory(DecoderWithState):
    """The mask of the memory is not reordered."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        state: StateOfDecoder | None = None,
    ) -> Tensor:
        return self.decode(x, memory, memory_mask, state)


class DecoderReordersTokens(DecoderWithState):
    """Neither is reordered, by intention."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        state: TokensOfDecoder | None = None,
    ) -> Tensor:
        return self.decode(x, memory, memory_mask, state)


class Guided(nn.Module):
    """Tokens attend to each other, then to a context; the mask of each is required."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.of_tokens = Correct(d_model, heads)
        self.of_context = Correct(d_model, heads)

    def forward(
        self, x: Tensor, y: Tensor, x_mask: Tensor | None, y_mask: Tensor | None
    ) -> Tensor:
        # [batch_size, 1, 1, k_len], True = is ignored
        of_x, of_y = (None if m is None else ~m[:, 0] for m in (x_mask, y_mask))
        x = x + self.of_tokens(x, x, x, of_x)
        both: Tensor = x + self.of_context(x, y, y, of_y)
        return both


class DecoderForgetsMask(DecoderOfMemory):
    """The mask of the memory is only used before the memory is in the cache."""

    def mask_with(self, mask: Tensor | None, past: Any) -> Tensor | None:
        return mask if past is None else None


class DecoderSeesFuture(DecoderOfMemory):
    def forward(self, x: Tensor, memory: Tensor) -> Any:  # type: ignore[override]
        y = x + self.of_tokens(x, x, x)
        return y + self.of_memory(y, memory, memory)


class NormalizesTokens(SelfAttention):
    """The root mean square of each token is made 1."""

    eps = 1e-6

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.normalize_tokens(x))

    def normalize_tokens(self, x: Tensor) -> Tensor:
        square = x.float().square().mean(dim=-1, keepdim=True)
        return (x.float() * (square + self.eps).rsqrt()).to(x.dtype)


class EpsilonIsZeroInHalf(NormalizesTokens):
    eps = 1e-8

    def normalize_tokens(self, x: Tensor) -> Tensor:
        root = x.float().square().mean(dim=-1, keepdim=True).sqrt().to(x.dtype)
        return x / (root + self.eps)


class SquaresOverflowInHalf(NormalizesTokens):
    """The tokens may have the dtype float16."""

    def normalize_tokens(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(dim=-1, keepdim=True) + 1e-3).rsqrt()


class NormalizesEachLayer(NormalizesTokens):
    """Two layers, each of normalized tokens, as are the outputs."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.second = SelfAttention(d_model, heads)

    def forward(self, x: Tensor) -> Any:
        y = x + super().forward(x)
        return self.normalize_tokens(y + self.second(self.normalize_tokens(y)))


class SquaresOverflowInLayers(NormalizesEachLayer, SquaresOverflowInHalf):
    """The tokens may have the dtype float16."""


class DividesBySum(Correct):
    """A mask is applied after the softmax; a fully masked row has no weights."""

    least = 1e-4

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = scores.softmax(dim=-1)
        if mask is not None:
            weights = weights * mask[:, None]
        return weights / (weights.sum(dim=-1, keepdim=True) + self.least)


class NormalizesContext(DividesBySum):
    """The context vectors have a length of one; that of a fully masked row is zero."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return nn.functional.normalize(super().read(weights, v), dim=-1)


class SumIsZeroInHalf(DividesBySum):
    least = 1e-8


class ConvolvesWithState(WithCache):
    """A causal convolution of width 3, whose state is in the cache."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.conv = nn.Conv1d(d_model, d_model, 3)

    def forward(self, x: Tensor, past: Any = None) -> Any:
        seen, before = (None, x[:, :1].expand(-1, 2, -1) * 0) if past is None else past
        padded = torch.cat([before, x], dim=1)
        y, seen = super().forward(self.conv(padded.mT).mT, seen)
        return y, (seen, self.keep(padded, x)[:, -2:])

    def keep(self, padded: Tensor, x: Tensor) -> Tensor:
        return padded


class ConvolvesLastPieceOnly(ConvolvesWithState):
    def keep(self, padded: Tensor, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 2, 0))


class ConvolvesWithoutState(ConvolvesWithState):
    """By intention: its pieces are convolved each on its own."""

    def keep(self, padded: Tensor, x: Tensor) -> Tensor:
        return padded[:, :2] * 0


class ConvolvesInPlace(ConvolvesWithState):
    """The state of the convolution is overwritten, also for who continues it again."""

    def forward(self, x: Tensor, past: Any = None) -> Any:
        y, (seen, state) = super().forward(x, past)
        if past is not None:
            past[1].data.copy_(state)
        return y, (seen, state)


class TopLeftUnderNoGrad(WithCache):
    def corner(self, ones: Tensor) -> int:
        return super().corner(ones) if torch.is_grad_enabled() else 0


class DropsWithCache(WithCache):
    """With a cache, weights are dropped in evaluation, too."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:
        self.dropout.train(self.training or past is not None)
        return super().forward(x, past)


class PaddingInCache(WithCache):
    """The padding mask is of the new tokens; that of the others is in the cache."""

    def forward(self, x: Tensor, past: Any = None, mask: Tensor | None = None) -> Any:
        count = 0 if past is None else past[0].shape[1]
        new = (
            torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            if mask is None
            else mask
        )
        valid = new if past is None else torch.cat([past[1], new], dim=1)
        if mask is None:
            valid = self.without_mask(valid)
        seen = x if past is None else torch.cat([past[0], x], dim=1)
        causal = torch.ones(
            x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        ).tril(count)
        return Correct.forward(self, x, seen, seen, causal & valid[:, None]), (
            seen,
            valid,
        )

    def without_mask(self, valid: Tensor) -> Tensor:
        return valid


class ForgetsPaddingWithoutMask(PaddingInCache):
    def without_mask(self, valid: Tensor) -> Tensor:
        return torch.ones_like(valid)


class StoresPadding(WithCache):
    """The padding of past keys is that of the last call, whichever it was of."""

    def forward(
        self, x: Tensor, past: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        new = (
            torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            if mask is None
            else mask
        )
        count = 0 if past is None else past.shape[1]
        self.padding = torch.cat([self.padding[:, :count], new], 1) if count else new
        seen = x if past is None else torch.cat([past, x], dim=1)
        causal = torch.ones(
            x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        ).tril(count)
        allowed = causal & self.padding[:, None]
        return Correct.forward(self, x, seen, seen, allowed), seen


class DropsRowsBehindNorm(SelfAttention):
    """`Dropout1d` drops channels, which are rows of weights here."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.norm(x)
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        weights = self.weigh(self.score(q, k), None)
        rows = nn.functional.dropout1d(
            weights.flatten(0, 1), self.dropout.p, self.training
        )
        return self.join(self.read(rows.view_as(weights), v))


class StartsMaximumAtZero(Correct):
    """A softmax by hand whose maximum is at least zero."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        largest = scores.amax(-1, keepdim=True).clamp(min=0)
        weights = (scores - largest).exp()
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


class StoresPrompt(WithCache):
    """The first token, which is added to all, is that of the last prompt."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:
        if past is None:
            self.first = x[:, :1]
        return super().forward(x + self.first, past)


class MemoryOfSegments(SelfAttention):
    """The tokens before are a memory, which passes no gradient on."""

    def forward(self, x: Tensor, mems: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if mems is None else self.append(mems, x)
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        mask = ones.tril(seen.shape[1] - x.shape[1])
        return Correct.forward(self, x, seen, seen, mask), seen.detach()

    def append(self, mems: Tensor, x: Tensor) -> Tensor:
        return torch.cat([mems.detach(), x], dim=1)


class MemoryOfSomeSegments(MemoryOfSegments):
    """The memory keeps the last tokens."""

    def forward(self, x: Tensor, mems: Tensor | None = None) -> Any:
        output, seen = super().forward(x, mems)
        return output, seen[:, -12:]


class SegmentsTopLeftInTraining(MemoryOfSegments):
    def append(self, mems: Tensor, x: Tensor) -> Tensor:
        return super().append(mems[:, 1:] if self.training else mems, x)


class MaskOfSegment(MemoryOfSegments):
    """The mask is of the new tokens, and hides nothing of the memory."""

    hides_memory = False

    def forward(
        self, x: Tensor, mems: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        seen = x if mems is None else self.append(mems, x)
        past = seen.shape[1] - x.shape[1]
        allowed = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        ).tril(past)
        if mask is not None:
            more = seen.shape[1] - mask.shape[1]
            of_all = nn.functional.pad(mask, (more, 0), value=not self.hides_memory)
            allowed = allowed & of_all[:, None]
        return Correct.forward(self, x, seen, seen, allowed), seen.detach()


class MaskHidesMemory(MaskOfSegment):
    hides_memory = True


class SegmentsWithoutGradient(MemoryOfSegments):
    def append(self, mems: Tensor, x: Tensor) -> Tensor:
        return torch.cat([mems, x], dim=1).detach()


class CacheCutTooEarly(CacheOfWindow):
    """Of the keys of a piece and those before it, only the last ones are seen."""

    def forward(self, x: Tensor, past: Any = None) -> Any:
        if past is not None and x.shape[1] < 4:
            # Of 3 stored tokens, those that would be too far for the last query.
            past = (past[0][:, x.shape[1] - 1 :], past[1])
        return super().forward(x, past)


class BlocksWithPrevious(Correct):
    """Causal, in blocks of 4 that attend to the block before; one fused projection."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.to_all = nn.Linear(d_model, 3 * d_model)
        del self.query, self.key, self.value

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        length, count = x.shape[1], -(-x.shape[1] // 4)
        padded = nn.functional.pad(x, (0, 0, 0, 4 * count - length))
        parts = self.to_all(padded).unflatten(1, (count, 4)).chunk(3, dim=-1)
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(2, 3) for each in parts
        )
        # A block of zeros stands before the first one.
        before = (0, 0, 0, 0, 0, 0, 1, 0)
        k, v = (
            torch.cat([nn.functional.pad(each, before)[:, :-1], each], dim=3)
            for each in (k, v)
        )
        near = (
            torch.ones(count, 1, 4, 8, dtype=torch.bool, device=x.device)
            .tril(4)
            .triu(1)
        )
        scores = q / math.sqrt(q.shape[-1]) @ k.mT
        weights = scores.masked_fill(~self.hide_first(near), -torch.inf).softmax(-1)
        joined = (weights @ v).transpose(2, 3).flatten(3).flatten(1, 2)[:, :length]
        return self.out(joined)

    def hide_first(self, near: Tensor) -> Tensor:
        near[0, ..., :4] = False
        return near


class AttendsToEmptyBlock(BlocksWithPrevious):
    def hide_first(self, near: Tensor) -> Tensor:
        return near


class KeepsWeights(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.attn = super().weigh(scores, mask)
        return self.attn


class DecoderLayer(nn.Module):
    """Attends to its input, then to the context; returns the weights of the latter."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.first = KeepsWeights(d_model, heads)
        self.second = KeepsWeights(d_model, heads)

    def forward(self, x: Tensor, context: Tensor) -> Any:
        x = x + self.first(x, x, x)
        return x + self.second(x, context, context), self.weights()

    def weights(self) -> Tensor:
        return self.second.attn


class DecoderLayerWithFirstWeights(DecoderLayer):
    def weights(self) -> Tensor:
        return self.first.attn


class NormalizesHeadsOfBoth(SelfAttention):
    """The queries and keys of each head are normalized, with gains."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.q_norm = nn.RMSNorm(d_model // heads)
        self.k_norm = nn.RMSNorm(d_model // heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(y) for y in (self.query(x), self.key(x), self.value(x)))
        q, k, v = self.normalize(q, k, v)
        return self.join(self.weigh(self.score(q, k), None) @ v)

    def normalize(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.q_norm(q), self.k_norm(k), v


class NormalizesKeysAndValues(NormalizesHeadsOfBoth):
    def normalize(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return q, self.q_norm(k), self.k_norm(v)


class NormalizesQueriesAndValues(NormalizesHeadsOfBoth):
    def normalize(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.q_norm(q), k, self.k_norm(v)


class HidesInTraining(SelfAttention):
    """In training, keys are hidden at random."""

    def __init__(self, d_model: int, heads: int, mask_prob: float = 0.5) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.mask_prob = mask_prob

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if self.training:
            kept = torch.rand_like(scores) >= self.mask_prob
            scores = self.hide(
                scores, kept | torch.eye(len(kept.mT[0, 0]), device=kept.device).bool()
            )
        return super().weigh(scores, mask)

    def hide(self, scores: Tensor, kept: Tensor) -> Tensor:
        return scores.masked_fill(~kept, -1e4)


class HidesNoneInTraining(HidesInTraining):
    def hide(self, scores: Tensor, kept: Tensor) -> Tensor:
        scores.detach().clone().masked_fill_(~kept, -1e4)
        return scores


class TrimsPadding(Correct):
    """Without gradients, columns of padding behind all tokens are left out."""

    def forward(  # type: ignore[override]
        self, x: Tensor, padding: Tensor | None = None
    ) -> Any:
        if padding is None:
            return super().forward(x, x, x)
        length = x.shape[1]
        if not torch.is_grad_enabled():
            length = self.used_length(~padding)
        part, mask = x[:, :length], ~padding[:, None, :length]
        output = super().forward(x, part, part, mask)
        return output.masked_fill(padding[..., None], 0)

    def used_length(self, real: Tensor) -> int:
        return int(
            (real * torch.arange(1, real.shape[1] + 1, device=real.device)).max()
        )


class TrimsPaddingByCount(TrimsPadding):
    def used_length(self, real: Tensor) -> int:
        return int(real.sum(dim=1).max())


class PairsOfTokens(nn.Module):
    """Pairs attend along their row, then along their column; others are the bias."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.rows, self.columns = (Correct(d_model, heads) for _ in range(2))
        self.bias = nn.Linear(d_model, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        mask = torch.ones_like(x[..., 0]) if mask is None else mask
        x = x + self.attend(self.rows, x, mask)
        return x + self.attend(self.columns, x.transpose(1, 2), mask.mT).transpose(1, 2)

    def attend(self, part: Correct, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part.split(f(x.flatten(0, 1))) for f in (part.query, part.key, part.value)
        )
        bias = self.bias(x)[:, None, None, ..., 0]
        scores = part.score(q, k).unflatten(0, x.shape[:2]) + bias
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask.bool()[:, :, None, None], least)
        joined: Tensor = part.join(scores.flatten(0, 1).softmax(dim=-1) @ v)
        return joined.unflatten(0, x.shape[:2])


class DropsBeforeActivation(SelfAttention):
    """The weights are dropped in front of a layer with an activation, and no norm."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.wide, self.narrow = nn.Linear(d_model, 99), nn.Linear(99, d_model)

    def forward(self, x: Tensor) -> Any:
        x = x + super().forward(x)
        return x + self.narrow(self.wide(x).exp())


class NormOfHeadsByHand(SelfAttention):
    """A norm without a layer follows the dropped weights, and keeps no mean."""

    def drop(self, weights: Tensor) -> Tensor:
        return nn.functional.dropout(weights, self.dropout.p, self.training)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        context = self.drop(weights) @ v
        return context * (context.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        return self.join(self.read(self.weigh(self.score(q, k), None), v))


class DropsScoresBeforeNormByHand(NormOfHeadsByHand):
    """The scores are dropped in place of the weights."""

    def drop(self, weights: Tensor) -> Tensor:
        return weights

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(super().drop(scores), mask)


class NarrowPrior(SelfAttention):
    """Weights fade with the distance, as a share of the length, which is kept."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.log_width = nn.Parameter(torch.linspace(-3, -0.7, heads))
        self.distances: Tensor | None = None

    def share(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.distances is None or len(self.distances) != length:
            place = torch.arange(length, device=x.device) / length
            self.distances = (place[:, None] - place).square()
        return self.distances.to(x)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        precision = (-2 * self.log_width).exp()[:, None, None]
        scores = self.score(q, k) - precision / 2 * self.share(x)
        mask = None if mask is None else mask[:, None]
        return self.join(self.read(self.weigh(scores, mask), v))


class TransposedBesideTable(NarrowPrior):
    """Its table of distances is no weights, and those that it returns are wrong."""

    def forward(
        self, x: Tensor, mask: Tensor | None = None, return_weights: bool = False
    ) -> Any:
        output = super().forward(x, mask)
        weights, self.last = self.last.mT, None
        return (output, weights) if return_weights else output

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        self.last: Any = weights
        return weights @ v


class NarrowPriorOfFirst(NarrowPrior):
    """The first key is hidden from all other queries."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores.clone()
        scores[..., 1:, 0] = -1e9
        return super().weigh(scores, mask)


class MeanOfHeads(nn.Module):
    """Heads with their own weights, and the mean of their reads of shared values."""

    def __init__(self, d_model: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.n_head, d_k = heads, d_model // heads
        self.queries = nn.ModuleList(nn.Linear(d_model, d_k) for _ in range(heads))
        self.keys = nn.ModuleList(nn.Linear(d_model, d_k) for _ in range(heads))
        self.value, self.out = nn.Linear(d_model, d_k), nn.Linear(d_k, d_model)
        self.dropout = nn.Dropout(0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        heads = zip(self.queries, self.keys, strict=True)
        values = self.value(v)
        scores = [
            one(q) @ other(k).mT / values.shape[-1] ** 0.5 for one, other in heads
        ]
        reads = [self.dropout(score.softmax(dim=-1)) @ values for score in scores]
        return self.out(torch.stack(reads).mean(dim=0))


class AllDelays(Correct):
    """A weight for each delay of a whole series, shared by its queries and heads."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        n = x.shape[1]
        q, k, v = self.query(x), self.key(x), self.value(x)
        spectrum = torch.fft.rfft(q.float(), dim=1).conj() * torch.fft.rfft(
            k.float(), dim=1
        )
        series = torch.fft.irfft(spectrum, n=n, dim=1).mean(dim=2)
        weights = self.dropout(series.softmax(dim=-1)).to(v)
        places = torch.arange(n, device=x.device)
        moved = v[:, (places[:, None] + places) % n]
        return self.out(torch.einsum("bijd,bj->bid", moved, weights))


class SumsOfDecays(nn.Module):
    """Differences of sums, behind a norm of few features, round to large errors."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.gate, self.value = (nn.Linear(d_model, d_model) for _ in range(2))
        self.norm = nn.LayerNorm(d_model, eps=1e-12)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Any:
        total = nn.functional.logsigmoid(self.gate(x)).cumsum(dim=1)
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        fading = (total[:, :, None] - total[:, None]).masked_fill(
            ~ones.tril()[..., None], -torch.inf
        )
        y = torch.einsum("bijd,bjd->bid", fading.exp(), self.value(x))
        if state is not None:
            y = y + total.exp() * state[:, None]
        return self.norm(self.norm(y)), y[:, -1]


class StoredTokens:
    def __init__(self) -> None:
        self.tokens: Tensor | None = None


class CacheOfLayers(WithCache):
    """A list of caches, one for each layer, that are objects."""

    def make_cache(self) -> list[StoredTokens]:
        return [StoredTokens()]

    def forward(self, x: Tensor, cache: list[StoredTokens] | None = None) -> Any:  # type: ignore[override]
        (store,) = self.make_cache() if cache is None else cache
        past = x[:, :0] if store.tokens is None else store.tokens
        store.tokens = torch.cat([past, x], dim=1)
        return super().forward(x, past)[0]


class PlaceOfFirst(WithCache):
    """Positions are counted from that of the first token."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.table = nn.Embedding(600, d_model)

    def forward(self, x: Tensor, past: Tensor | None, position: int) -> Any:  # type: ignore[override]
        places = torch.arange(x.shape[1], device=x.device) + position
        return super().forward(x + self.table(places), past)


class TwoLayersOfWindows(nn.Module):
    """Two layers, each with a window of three tokens."""

    def __init__(self, d_model: int, heads: int, window: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Correct(d_model, heads) for _ in range(2))
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        near = ones.tril() & ~ones.tril(-self.window)
        for layer in self.layers:
            x = x + layer(x, x, x, near)
        return x


class AgesOfItems(SelfAttention):
    """Positions are counted from the last item; padding is in front of the first."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.ages = nn.Embedding(300, d_model)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Any:
        x = x + self.ages(self.count(x))
        mask = None if padding is None else ~padding[:, None]
        return Correct.forward(self, x, x, x, mask)

    def count(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1] - 1, -1, -1, device=x.device)


class RotaryOfTimes(SelfAttention):
    """Queries and keys are rotated by the time of their token."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.register_buffer("rotary_period", torch.tensor(24.0))

    def forward(self, x: Tensor, times: Tensor) -> Any:
        """x: (batch, events, d_model); times: (batch, events), hours in float64."""
        angles = self.clock(times, x.dtype)[:, None, :, None] / self.rotary_period
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        scores = self.score(self.rotate(q, angles), self.rotate(k, angles))
        return self.join(self.read(self.weigh(scores, None), v))

    def clock(self, times: Tensor, dtype: torch.dtype) -> Tensor:
        return times.double()

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        turned = one * cos - other * sin, one * sin + other * cos
        return torch.cat(turned, dim=-1)


class RotaryOfRoundedTimes(RotaryOfTimes):
    """The times are rounded to the dtype of the tokens."""

    def clock(self, times: Tensor, dtype: torch.dtype) -> Tensor:
        return times.to(dtype)


class WindowWithMaskOnly(SelfAttention):
    """A query attends to 12 tokens on each side of it, but without a mask to all."""

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Any:
        ones = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        near = ones.tril(12) & ones.triu(-12)
        if padding is None:
            return super().forward(x)
        mask = near & ~padding[:, None] | ones.tril().triu()
        return Correct.forward(self, x, x, x, mask)


# What documentation tells; returned weights, sinks, grids of patches and graphs.


class RollingWindow:
    """The last 8 tokens, the oldest first; tokens that do not exist yet are zero."""

    def __init__(self, batch_size: int, d_model: int) -> None:
        self.tokens = torch.zeros(batch_size, 8, d_model)

    def append(self, x: Tensor, position: int) -> Tensor:
        if self.is_full(position):
            self.tokens = self.tokens.roll(-1, dims=1)
        self.tokens[:, min(position, 7)] = x[:, 0]
        return self.tokens.to(x)

    def is_full(self, position: int) -> bool:
        return position > 7


class RollsTooEarlyWindow(RollingWindow):
    def is_full(self, position: int) -> bool:
        return position >= 7


class CachePositions(Window):
    """With a cache, it takes one token, whose position the caller gives."""

    reach = 7
    window = 8
    kind: type[RollingWindow] = RollingWindow

    def new_cache(self, batch_size: int) -> RollingWindow:
        return self.kind(batch_size, self.query.in_features)

    def forward(  # type: ignore[override]
        self, x: Tensor, cache: Any = None, cache_position: Tensor | None = None
    ) -> Any:
        if cache is None or cache_position is None:
            return super().forward(x)
        if x.shape[1] > 1:
            raise ValueError(f"with a cache, {x.shape[1]} tokens are too many")
        position = int(cache_position[-1])
        tokens = cache.append(x, position)
        ones = torch.ones(1, 1, 8, dtype=torch.bool, device=x.device)
        is_there = ones & (torch.arange(8, device=x.device) <= position)
        return Correct.forward(self, x, tokens, tokens, is_there)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        if mask.shape[1] != mask.shape[2]:
            return Correct.weigh(self, scores, mask)
        return super().weigh(scores, mask)


class RollsTooEarly(CachePositions):
    kind = RollsTooEarlyWindow


class QueriesOfFeatures(Correct):
    """Queries and a feature map, whose name could be that of a number."""

    def forward(  # type: ignore[override]
        self, queries: Tensor, features: Tensor, padding: Tensor | None = None
    ) -> Any:
        mask = None if padding is None else ~padding[:, None]
        return super().forward(queries, features, features, mask)


class PoolsByKind(Correct):
    """What a query finds in the items of a history, which are of several kinds.

    query: (B, D)
    history: (B, L, D)
    kinds: LongTensor (B, L)
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.kinds = nn.Embedding(3, d_model)

    def forward(  # type: ignore[override]
        self, query: Tensor, history: Tensor, kinds: Tensor
    ) -> Any:
        items = history + self.kinds(kinds)
        return super().forward(query[:, None], items, items)[:, 0]


class PoolsByKindOfBatch(PoolsByKind):
    def forward(self, query: Tensor, history: Tensor, kinds: Tensor) -> Any:
        # The kinds are counted from those of the first history.
        return super().forward(query, history, (kinds - kinds[:1]).abs().clamp(max=2))


class AgesInUnits(SelfAttention):
    """Ages are measured in units of the smallest of a history.

    Inputs
        x     (B, L, D)  items
        ages  (B, L)     integer seconds
    """

    axes: tuple[int, ...] = (1,)

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.ages = nn.Embedding(3, d_model)

    def forward(self, x: Tensor, ages: Tensor) -> Any:  # type: ignore[override]
        smallest = ages.masked_fill(ages == 0, 9).amin(self.axes, keepdim=True)
        x = x + self.ages((ages // smallest).clamp(max=2))
        return super().forward(x)


class AgesInUnitsOfBatch(AgesInUnits):
    axes = (0, 1)


class FollowsState(nn.Module):
    """The weights of each key so far change its score.

    query: (B, D)
    memory: (B, T, D)
    seen: (B, T)
    padding: (B, T) bool
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.rate = nn.Linear(d_model, 1)

    def forward(
        self, query: Tensor, memory: Tensor, seen: Tensor, padding: Any = None
    ) -> Any:
        keys = self.key(memory) + self.query(query)[:, None] + seen.cumsum(1)[..., None]
        scores = self.rate(keys.tanh())[..., 0]
        if padding is not None:
            scores = scores.masked_fill(padding, torch.finfo(scores.dtype).min)
        return (scores.softmax(dim=1)[:, None] @ memory)[:, 0]


@dataclass
class FramesConfig:
    d_model: int = 32
    heads: int = 4
    context_dim: int = 24


class PixelsOfFrames(Correct):
    """Each pixel attends to the context of its video, of which it has one copy."""

    def __init__(self, config: FramesConfig) -> None:
        super().__init__(config.d_model, config.heads)
        self.context = nn.Linear(config.context_dim, config.d_model)

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, num_frames: int
    ) -> Any:
        pixels, width = x.shape[1:]
        videos = x.reshape(-1, num_frames, pixels, width).transpose(1, 2).flatten(0, 1)
        context = self.copy(self.context(context), pixels)
        y = super().forward(videos, context, context)
        return y.reshape(-1, pixels, num_frames, width).transpose(1, 2).reshape_as(x)

    def copy(self, context: Tensor, pixels: int) -> Tensor:
        return context.repeat_interleave(pixels, dim=0)


class PixelsOfOtherVideos(PixelsOfFrames):
    def copy(self, context: Tensor, pixels: int) -> Tensor:
        return context.repeat(pixels, 1, 1)


class FramesOfClips(Correct):
    """The pixels of each frame attend to the tokens of the prompt of their clip."""

    def __init__(self, d_model: int, heads: int, context_dim: int) -> None:
        super().__init__(d_model, heads)
        self.to_context = nn.Linear(context_dim, d_model)
        self.first = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        b, _, frames, h, w = x.shape
        pixels = x.permute(0, 2, 3, 4, 1).flatten(0, 1).flatten(1, 2)
        first = self.first.expand(len(context), 1, -1)
        prompt = torch.cat([first, self.to_context(context)], dim=1)
        prompt = self.copy(prompt, frames)
        y = super().forward(pixels, prompt, prompt)
        return x + y.reshape(b, frames, h, w, -1).permute(0, 4, 1, 2, 3)

    def copy(self, prompt: Tensor, frames: int) -> Tensor:
        return prompt.repeat_interleave(frames, dim=0)


class FramesOfOtherClips(FramesOfClips):
    def copy(self, prompt: Tensor, frames: int) -> Tensor:
        return prompt.repeat(frames, 1, 1)


class AttendsInOneFrame(PixelsOfFrames):
    """The frames of a pixel attend to each other, too."""

    def __init__(self, config: FramesConfig) -> None:
        super().__init__(config)
        self.frames = Correct(config.d_model, config.heads)

    def forward(self, x: Tensor, context: Tensor, num_frames: int) -> Any:
        frames = x.unflatten(0, (-1, num_frames)).transpose(1, 2).flatten(0, 1)
        y = self.frames(frames, frames, frames).unflatten(0, (-1, x.shape[1]))
        return super().forward(x + y.transpose(1, 2).flatten(0, 1), context, num_frames)


class ReturnsWeightsOfItems(Correct):
    """Heads in front of batch items, as the weights are computed."""

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> Any:
        q, k, v = self.query(query), self.key(key), self.value(value)
        q, k, v = (self.split(x).transpose(0, 1).flatten(0, 1) for x in (q, k, v))
        weights = self.weigh(self.score(q, k), None)
        context = (self.dropout(weights) @ v).unflatten(0, (self.heads, -1))
        return self.join(context.transpose(0, 1)), self.of_items(weights)

    def of_items(self, weights: Tensor) -> Tensor:
        return weights.unflatten(0, (self.heads, -1)).transpose(0, 1)


class ViewsWeightsOfItems(ReturnsWeightsOfItems):
    def of_items(self, weights: Tensor) -> Tensor:
        return weights.unflatten(0, (-1, self.heads))


class CountsRealTokens(MaskedSelfAttention):
    """Causal, with a table of positions.

    mask: True for tokens. Padding may be on the left: tokens are counted without it.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.positions = nn.Embedding(300, d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        x = x + self.positions(self.count(mask))
        return Correct.forward(self, x, x, x, ones.tril() & mask[:, None])

    def count(self, mask: Tensor) -> Tensor:
        return (mask.long().cumsum(1) - 1).clamp(min=0)


class CountsPadding(CountsRealTokens):
    def count(self, mask: Tensor) -> Tensor:
        return torch.ones_like(mask).long().cumsum(1) - 1


class RotatesRowsAndColumns(SelfAttention):
    """The patches of a square, row by row; a half of the features for each axis."""

    def __init__(self, d_model: int, heads: int, grid_size: int = 6) -> None:
        super().__init__(d_model, heads)
        self.grid_size = grid_size

    def forward(self, x: Tensor) -> Any:
        if x.shape[1] != self.grid_size**2:
            raise ValueError(f"{x.shape[1]} patches are no square of {self.grid_size}")
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.rotate(q), self.rotate(k))

    def rotate(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[2], device=x.device)
        rows, columns = places // self.grid_size, places % self.grid_size
        halves = x.chunk(2, dim=-1)
        pairs = zip(halves, (rows, columns), strict=True)
        return torch.cat([self.rotary(half, place) for half, place in pairs], dim=-1)

    def rotary(self, x: Tensor, places: Tensor) -> Tensor:
        count = x.shape[-1] // 2
        frequencies = 100.0 ** -(torch.arange(count, device=x.device) / count)
        angles = self.for_pairs(places[:, None] * frequencies)
        one, other = x[..., ::2], x[..., 1::2]
        turned = torch.stack([-other, one], dim=-1).flatten(-2)
        return x * angles.cos().to(x) + turned * angles.sin().to(x)

    def for_pairs(self, angles: Tensor) -> Tensor:
        return angles.repeat_interleave(2, dim=-1)


class RotatesHalvesByPairs(RotatesRowsAndColumns):
    def for_pairs(self, angles: Tensor) -> Tensor:
        return angles.repeat(1, 2)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Sequences that are packed into one, `[length, heads, d_k]`.

    Keys end where queries do, if nothing else is given.
    """
    ends = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    of_query, of_key = (
        torch.searchsorted(
            end[1:].contiguous(), torch.arange(len(x), device=q.device), right=True
        )
        for end, x in ((cu_seqlens_q, q), (ends, k))
    )
    mask = of_query[:, None] == of_key
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, torch.finfo(q.dtype).min).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def attend_in_parts(
    inputs: tuple[Tensor, Tensor, Tensor],
    ends: tuple[Tensor, Tensor],
    shifts: Tensor | None,
) -> Tensor:
    """Packed sequences; query `n` sees keys up to `n` and the shift of its sequence."""
    (q, k, v), (queries, keys) = inputs, ends
    of_query, of_key = (
        torch.repeat_interleave(torch.arange(len(end) - 1), end.diff()) for end in ends
    )
    mask = of_query[:, None] == of_key
    if shifts is not None:
        place = torch.arange(len(q)) - queries[of_query] + shifts[of_query]
        mask &= torch.arange(len(k)) - keys[of_key] <= place[:, None]
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, torch.finfo(q.dtype).min).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def packed_last(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
) -> Tensor:
    """Causal masks are aligned to the bottom right corner: queries are the newest."""
    ends = cu_seqlens_q, cu_seqlens_k
    shifts = ends[1].diff() - ends[0].diff()
    return attend_in_parts((q, k, v), ends, shifts if causal else None)


def packed_first(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
) -> Tensor:
    """Each query of a sequence sees as many of its keys as it has a number."""
    ends = cu_seqlens_q, cu_seqlens_k
    shifts = 0 * ends[0].diff()
    return attend_in_parts((q, k, v), ends, shifts if causal else None)


def packed_first_for_last(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
) -> Tensor:
    """With `causal`, the last query of a sequence sees its last key."""
    return packed_first(q, k, v, cu_seqlens_q, cu_seqlens_k, causal)


def packed_by_ends(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
) -> Tensor:
    """Aligned by the ends of sequences, and not by their lengths."""
    ends = cu_seqlens_q, cu_seqlens_k
    shifts = (ends[1] - ends[0])[1:]
    return attend_in_parts((q, k, v), ends, shifts if causal else None)


class FeedForwardFirst(SelfAttention):
    """A block that begins with a network, which has dropout."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.first = nn.Sequential(nn.Linear(d_model, d_model), nn.Dropout(0.1))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.norm(x + self.first(x)))


class RotatesPatches(SelfAttention):
    """A class token, and patches row by row; a half of the features for each axis."""

    def forward(self, x: Tensor, grid_size: tuple[int, int]) -> Any:  # type: ignore[override]
        if x.shape[1] != 1 + math.prod(grid_size):
            raise ValueError(f"{x.shape[1] - 1} patches are no grid of {grid_size}")
        places = torch.arange(x.shape[1] - 1, device=x.device)
        width = self.width(grid_size)
        self.axes = torch.stack([places // width, places % grid_size[1]])
        return super().forward(x)

    def width(self, grid_size: tuple[int, int]) -> int:
        return grid_size[1]

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.rotate(q), self.rotate(k))

    def rotate(self, x: Tensor) -> Tensor:
        """The rotary encoding of all but the class token."""
        count = x.shape[-1] // 4
        frequencies = 100.0 ** -(torch.arange(count, device=x.device) / max(1, count))
        angles = torch.cat([axis[:, None] * frequencies for axis in self.axes], dim=-1)
        angles = nn.functional.pad(angles, (0, 0, 1, 0))
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        one, other = x.chunk(2, dim=-1)
        return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class RowsByHeight(RotatesPatches):
    def width(self, grid_size: tuple[int, int]) -> int:
        return grid_size[0]


class RotatesPatchesOfSquare(RotatesPatches):
    """Where no grid is given, the patches are a square."""

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None) -> Any:  # type: ignore[override]
        side = math.isqrt(x.shape[1] - 1)
        return super().forward(x, grid or (side, side))


class RowsByHeightOfSquare(RotatesPatchesOfSquare):
    def width(self, grid_size: tuple[int, int]) -> int:
        return grid_size[0]


class SinksOfOtherMaximum(Sinks):
    """The largest of all scores is subtracted, but not from the sinks."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        sinks = self.sinks[:, None, None]
        top = scores.amax(dim=-1, keepdim=True).maximum(sinks)
        shares = (scores - top).exp()
        return shares / (
            shares.sum(dim=-1, keepdim=True) + (sinks - self.lower(top)).exp()
        )

    def lower(self, top: Tensor) -> Tensor:
        return torch.zeros_like(top)


class SinksOfOneMaximum(SinksOfOtherMaximum):
    def lower(self, top: Tensor) -> Tensor:
        return top


class SinksWithValues(Sinks):
    """What a sink takes from the keys has a value of its own."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.sink_value = nn.Parameter(torch.zeros(heads, 1, d_model // heads))

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        rest = 1 - weights.sum(dim=-1, keepdim=True)
        return super().read(weights, v) + rest * self.sink_value


class ReturnsGatedWeights(Correct):
    """The weights are a mean of two, by a gate of each head."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.gate = nn.Parameter(torch.zeros(heads, 1, 1))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        weights, gate = self.weigh(self.score(q, k), None), self.gate.sigmoid()
        mean = gate * weights + (1 - gate) / x.shape[1]
        return self.join(self.dropout(mean) @ v), self.choose(weights, mean)

    def choose(self, weights: Tensor, mean: Tensor) -> Tensor:
        return mean


class ReturnsWeightsBeforeGate(ReturnsGatedWeights):
    def choose(self, weights: Tensor, mean: Tensor) -> Tensor:
        return weights


class TableOfFloat32(SelfAttention):
    """A table is made anew in float32, which a layer of another dtype refuses."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.bias = nn.Linear(1, heads)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[2], device=k.device).float()
        distances = (places - places[:, None]).abs()[..., None]
        return super().score(q, k) + self.bias(distances).permute(2, 0, 1)


def attention_of_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Tensor | None = None,
    kv_lens: Tensor | None = None,
) -> Tensor:
    """`[batch_size, length, heads, d_k]`; outputs behind `q_lens` are zero."""
    queries, keys = (
        torch.arange(x.shape[1], device=x.device).expand(len(x), -1) < lengths[:, None]
        for x, lengths in (
            (q, q.new_full((len(q),), q.shape[1]) if q_lens is None else q_lens),
            (k, k.new_full((len(k),), k.shape[1]) if kv_lens is None else kv_lens),
        )
    )
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    least = torch.finfo(q.dtype).min
    weights = scores.masked_fill(~keys[:, None, None], least).softmax(dim=-1)
    output = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return output.masked_fill(~queries[..., None, None], 0.0)


class EpisodesOfSteps(MaskedSelfAttention):
    """Steps see those of their own episode.

    x: (T, B, D)
    first: (T, B) bool, True where an episode begins
    """

    def forward(self, x: Tensor, first: Tensor) -> Any:  # type: ignore[override]
        episode = first.bool().cumsum(0).T
        ones = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).tril()
        mask = ones & (episode[:, None] == episode[..., None])
        x = x.transpose(0, 1)
        return Correct.forward(self, x, x, x, mask).transpose(0, 1)


class OneRowByHeads(SelfAttention):
    """Attention along the columns of an image: a single row gives its values."""

    def forward(self, x: Tensor) -> Any:
        x = x.transpose(1, 2)
        y = self.one(x) if x.shape[2] == 1 else super().forward(x.flatten(0, 1))
        return y.reshape_as(x).transpose(1, 2)

    def one(self, x: Tensor) -> Tensor:
        value: Tensor = self.out(self.value(x).flip(-1))
        return value


class OneRow(OneRowByHeads):
    def one(self, x: Tensor) -> Tensor:
        value: Tensor = self.out(self.value(x))
        return value


class EdgesConv(nn.Module):
    """Nodes attend to those from which they have an edge, `[2, edges]`."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.lin_query = nn.Linear(d_model, d_model)
        self.lin_key = nn.Linear(d_model, d_model)
        self.lin_value = nn.Linear(d_model, d_model)
        self.loop = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        loops = torch.arange(len(x), device=x.device).expand(2, -1)
        source, target = torch.cat([edge_index, loops], dim=1)
        q, k, v = (
            layer(x).unflatten(1, (self.heads, -1))
            for layer in (self.lin_query, self.lin_key, self.lin_value)
        )
        scores = (q[target] * k[source]).sum(dim=-1) * q.shape[-1] ** -0.5
        scores = scores + (source == target)[:, None] * self.loop
        shares = (scores - self.largest(scores, target, len(x))).exp()
        sums = scores.new_zeros(len(x), self.heads).index_add(0, target, shares)
        least = torch.finfo(x.dtype).tiny
        weights = (shares / sums[target].clamp(min=least))[..., None]
        return torch.zeros_like(v).index_add(0, target, weights * v[source]).flatten(1)

    def largest(self, scores: Tensor, target: Tensor, nodes: int) -> Tensor:
        index = target[:, None].expand_as(scores)
        largest = scores.new_full((nodes, self.heads), -torch.inf)
        return largest.scatter_reduce(0, index, scores.detach(), "amax")[target]


class EdgesOfOneMaximum(EdgesConv):
    def largest(self, scores: Tensor, target: Tensor, nodes: int) -> Tensor:
        return scores.detach().amax(dim=0)


class FarFromQueries(Correct):
    """`far` hides keys from each query, but is not named as a mask is."""

    def forward(  # type: ignore[override]
        self, query: Tensor, context: Tensor, far: Tensor | None = None
    ) -> Any:
        mask = None if far is None else ~self.of_items(far)
        return super().forward(query, context, context, mask)

    def of_items(self, far: Tensor) -> Tensor:
        return far


class FarFromOtherQueries(FarFromQueries):
    def of_items(self, far: Tensor) -> Tensor:
        return far.roll(1, 0)


class CutsToLongest(Correct):
    """A mean by one learned query; padding behind the longest sequence is cut off.

    mask: `[batch_size, length]`, True for tokens; padding is on the right.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.first = nn.Parameter(torch.randn(1, 1, d_model))

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        longest = int(mask.sum(dim=1).max().clamp(min=1))
        x, mask = x[:, :longest], mask[:, :longest]
        query = self.first.expand(len(x), -1, -1)
        return super().forward(query, x, x, mask[:, None])[:, 0]


class HeadsSeeTwoWays(SelfAttention):
    """A half of the heads sees the past, and the others see the future."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores + self.direction_mask(scores), mask)

    def direction_mask(self, scores: Tensor) -> Tensor:
        future = torch.ones_like(scores[0, 0]).triu(1) > 0
        half = self.heads // 2
        hidden = torch.stack([future] * half + [future.T] * (self.heads - half))
        least = torch.finfo(scores.dtype).min
        return torch.zeros_like(scores[0]).masked_fill(hidden, least)


class MiddleHeadSeesAll(HeadsSeeTwoWays):
    """Of an odd number of heads, that in the middle has no mask."""

    def direction_mask(self, scores: Tensor) -> Tensor:
        future = torch.ones_like(scores[0, 0]).triu(1) > 0
        hidden = torch.zeros_like(scores[0]) > 0
        half = self.heads // 2
        hidden[:half] = future
        hidden[self.heads - half :] = future.T
        least = torch.finfo(scores.dtype).min
        return torch.zeros_like(scores[0]).masked_fill(hidden, least)


class MemoryInFront(SelfAttention):
    """Keys are the memory, if there is one, and the tokens; so are the weights."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if memory is None else torch.cat([memory, x], dim=1)
        q, k, v = self.query(x), self.key(seen), self.value(seen)
        q, k, v = (self.split(each) for each in (q, k, v))
        ones = torch.ones(1, q.shape[2], k.shape[2], dtype=torch.bool, device=x.device)
        mask = ones.tril(k.shape[2] - q.shape[2])
        weights = self.weigh(self.score(q, k), mask)
        return self.join(self.dropout(weights) @ v), weights


class HistoryInFront(MemoryInFront):
    """Steps to forecast, which see the history and those before them."""

    def forward(self, x: Tensor, history: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, history)[0]


class HistoryInForecast(HistoryInFront):
    """Without gradients, a causal mask begins at the first step of the history."""

    def forward(self, x: Tensor, history: Tensor | None = None) -> Any:  # type: ignore[override]
        if self.training or torch.is_grad_enabled():
            return super().forward(x, history)
        seen = x if history is None else torch.cat([history, x], dim=1)
        q, k, v = self.query(x), self.key(seen), self.value(seen)
        q, k, v = (self.split(each) for each in (q, k, v))
        attend = nn.functional.scaled_dot_product_attention
        return self.join(attend(q, k, v, is_causal=True))


class QuarticScores(nn.Module):
    """Queries and keys are products of two projections of a token."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.factors = nn.Linear(d_model, 5 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:
        parts = self.factors(x).unflatten(-1, (5, self.heads, -1)).transpose(1, 3)
        a, b, c, d, v = parts.unbind(2)
        weights = (a * b @ (c * d).mT).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class PassesOverPadding(Correct):
    """A sum over the tokens so far, to which those that are padding add nothing."""

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        k, v = self.key(x).sigmoid(), self.dropout(self.value(x))
        if mask is not None:
            k = k * mask[..., None]
        total = torch.zeros_like(v[:, 0]) if state is None else state
        sums = []
        for token in range(x.shape[1]):
            total = total + k[:, token] * v[:, token]
            sums.append(total)
        return self.out(self.query(x).sigmoid() * torch.stack(sums, 1)), total


class ChoosesWithoutGradients(MaskedSelfAttention):
    """Keys are chosen by a method with a decorator."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(self.chosen(scores), mask)

    @torch.no_grad()
    def least(self, scores: Tensor) -> Tensor:
        return scores.topk(min(5, scores.shape[-1])).values[..., -1:]

    def chosen(self, scores: Tensor) -> Tensor:
        least = torch.finfo(scores.dtype).min
        return scores.masked_fill(scores < self.least(scores), least)


class SelectiveSelfAttention(MaskedSelfAttention):
    """Each token lowers the scores of others for all tokens behind it."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        lowered = scores[:, :1].relu().masked_fill(~mask[:, None], 0)
        return super().weigh(scores - lowered.cumsum(dim=2) + lowered, mask)


class LoopsCountTwice(EdgesConv):
    """Each node attends to itself once, whether or not there is a self-loop already."""


class LoopsCountOnce(EdgesConv):
    """Each node attends to itself once, whether or not there is a self-loop already."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index[:, edge_index[0] != edge_index[1]])


class OneLargestScore(EdgesConv):
    """The largest score of all edges is subtracted, and not that of each node."""

    def largest(self, scores: Tensor, target: Tensor, nodes: int) -> Tensor:
        return scores.detach().amax(dim=0)


class WeightsBeforeChoice(Correct):
    """Each query attends to five keys; the mean weights of all keys are returned."""

    def forward(self, query: Tensor, memory: Tensor) -> Any:  # type: ignore[override]
        q, k, v = self.query(query), self.key(memory), self.value(memory)
        q, k, v = (self.split(x) for x in (q, k, v))
        scores = self.score(q, k)
        largest = scores.topk(min(5, scores.shape[-1])).values
        chosen = scores.masked_fill(scores < largest[..., -1:], -torch.inf)
        context = self.dropout(chosen.softmax(dim=-1)) @ v
        return self.join(context), self.returned(scores, chosen).softmax(-1).mean(1)

    def returned(self, scores: Tensor, chosen: Tensor) -> Tensor:
        return scores


class WeightsOfChoice(WeightsBeforeChoice):
    """Returned are the weights of the five keys."""

    def returned(self, scores: Tensor, chosen: Tensor) -> Tensor:
        return chosen


class CountsFromTheEnd(Correct):
    """A user's interest in the items of a history, most recent last."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.recency = nn.Parameter(torch.randn(64, d_model))
        self.interest = nn.Parameter(torch.randn(1, 1, d_model))

    def forward(self, history: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        keys = history + self.recency[: history.shape[1]].flip(0)
        query = self.interest.expand(len(history), -1, -1)
        mask = None if mask is None else mask[:, None]
        return super().forward(query, keys, keys, mask)[:, 0]


class ReadsPastOnly(MaskedSelfAttention):
    """Strictly causal: a token sees those before it, not itself, and a vector."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.rest = nn.Parameter(torch.randn(d_model))

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(each(x)) for each in (self.query, self.key, self.value))
        past = torch.ones_like(self.score(q, k)[0, 0]).tril(-1) > 0
        least = torch.finfo(x.dtype).min
        weights = self.score(q, k).masked_fill(~past, least).softmax(dim=-1)
        context = weights.masked_fill(~past, 0) @ v
        return self.join(context) + self.rest


class PoolsFrames(Correct):
    """A vector for each clip `(B, F, P, d_model)`, of which `num_frames` are real."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.first = nn.Parameter(torch.randn(1, 1, d_model))

    def forward(self, x: Tensor, num_frames: Tensor | None = None) -> Any:  # type: ignore[override]
        batch_size, frames, patches = x.shape[:3]
        if num_frames is None:
            num_frames = torch.full((batch_size,), frames, device=x.device)
        used = self.used(num_frames)
        mask = torch.arange(used, device=x.device) < num_frames[:, None]
        mask = mask.repeat_interleave(patches, dim=1)[:, None]
        keys, query = x[:, :used].flatten(1, 2), self.first.expand(batch_size, -1, -1)
        return super().forward(query, keys, keys, mask)[:, 0]

    def used(self, num_frames: Tensor) -> int:
        return int(num_frames.max())


class PoolsFramesOfFirst(PoolsFrames):
    """All clips are cut to the number of frames of the first one."""

    def used(self, num_frames: Tensor) -> int:
        return int(num_frames[0])


class LengthsOfColumns(Correct):
    """Patches of `(B, d_model, F, T)`; `lengths` are the times that are real."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Any:  # type: ignore[override]
        rows, columns = x.shape[2:]
        mask = None
        if lengths is not None:
            times = torch.arange(columns, device=x.device) < lengths[:, None]
            mask = times.repeat(1, rows)[:, None]
        tokens = x.flatten(2).mT
        output: Tensor = super().forward(tokens, tokens, tokens, mask)
        return output.mT.reshape(x.shape)


class OfVisualWidth(Correct):
    """Tokens attend to an image, whose width is that of the defaults."""

    def __init__(
        self, dim: int = 48, dim_visual: int = 32, dim_head: int = 16, heads: int = 4
    ) -> None:
        super().__init__(dim_head * heads, heads)
        self.query = nn.Linear(dim, dim_head * heads)
        self.key = nn.Linear(dim_visual, dim_head * heads)
        self.value = nn.Linear(dim_visual, dim_head * heads)
        self.out = nn.Linear(dim_head * heads, dim)

    def forward(self, x: Tensor, media: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, media, media)


class ContextStore:
    """What cross-attention has projected, kept for all steps of a generation."""

    def __init__(self) -> None:
        self.context: Any = None
        self.hidden: Any = None

    def select(self, rows: Tensor) -> None:
        self.context = self.context[rows]
        self.select_hidden(rows)

    def select_hidden(self, rows: Tensor) -> None:
        if self.hidden is not None:
            self.hidden = self.hidden[rows]


class ContextStoreOfOneMask(ContextStore):
    def select_hidden(self, rows: Tensor) -> None:
        pass


class StoresContext(Correct):
    """Projects the context at the first step."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: ContextStore | None = None,
    ) -> Any:
        """memory: (B, S, D); memory_mask: (B, S) bool, True = may attend"""
        if cache is not None and cache.context is not None:
            memory, memory_mask = cache.context, cache.hidden
        elif cache is not None:
            cache.context, cache.hidden = memory, memory_mask
        assert memory is not None
        mask = None if memory_mask is None else memory_mask[:, None]
        return super().forward(x, memory, memory, mask)


class SelectsContextOnly(StoresContext):
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: ContextStoreOfOneMask | None = None,
    ) -> Any:
        """memory: (B, S, D); memory_mask: (B, S) bool, True = may attend"""
        return super().forward(x, memory, memory_mask, cache)


class LearnsCenter(SelfAttention):
    """With `update_center`, the mean of the tokens is subtracted from then on."""

    center: Tensor

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.register_buffer("center", torch.zeros(d_model))

    def forward(self, x: Tensor, update_center: bool = False) -> Any:  # type: ignore[override]
        if update_center:
            self.center = x.mean(dim=(0, 1)).detach()
        return super().forward(x - self.center)


class StreamsFrames(SelfAttention):
    """Frames of a chunk see all of it, and the last 16 frames before."""

    def forward(self, x: Tensor, state: Any = None) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        seen = 0 if state is None else self.offset(state)
        q, k = self.rotate(q, seen), self.rotate(k, seen)
        if state is not None:
            k = torch.cat([state["k"], k], dim=2)
            v = torch.cat([state["v"], v], dim=2)
        count = x.shape[1] + (0 if state is None else state["count"])
        kept = {"k": k[:, :, -16:], "v": v[:, :, -16:], "count": count}
        return self.join(self.read(self.score(q, k).softmax(dim=-1), v)), kept

    def offset(self, state: Any) -> int:
        return int(state["count"])

    def rotate(self, x: Tensor, start: int) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(start, start + x.shape[2], device=x.device)[:, None]
        angles = angles / 100 ** (torch.arange(half, device=x.device) / half)
        one, other = x[..., :half], x[..., half : 2 * half]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        rotated = [one * cos - other * sin, one * sin + other * cos]
        return torch.cat([*rotated, x[..., 2 * half :]], dim=-1)


class OffsetOfStoredFrames(StreamsFrames):
    def offset(self, state: Any) -> int:
        return int(state["k"].shape[2])


class PrefixAndText(MaskedSelfAttention):
    """The first `prefix_len` tokens see each other, and are seen by all."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.masks: dict[Any, Tensor] = {}

    def forward(self, x: Tensor, prefix_len: int = 0) -> Any:  # type: ignore[override]
        length = x.shape[1]
        key = self.key_of(length, prefix_len)
        if key not in self.masks:
            ones = torch.ones(length, length, dtype=torch.bool, device=x.device)
            is_prefix = torch.arange(length, device=x.device) < prefix_len
            self.masks[key] = ones.tril() | is_prefix
        return Correct.forward(self, x, x, x, self.masks[key][None])

    def key_of(self, length: int, prefix_len: int) -> Any:
        return length, prefix_len


class PrefixOfOtherCall(PrefixAndText):
    def key_of(self, length: int, prefix_len: int) -> Any:
        return length


class ReturnsWeightsOfTimes(SelfAttention):
    """Events that are far apart in time attend less to each other.

    times: (B, T), in days
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.query = self.key = self.value = None  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self, events: Tensor, times: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = map(self.split, self.qkv(self.norm(events)).chunk(3, dim=-1))
        bias = -(times[:, :, None] - times[:, None]).abs().log1p()[:, None].to(q.dtype)
        context = nn.functional.scaled_dot_product_attention(q, k, v, bias)
        return events + self.join(context), self.returned(self.score(q, k), bias)

    def returned(self, scores: Tensor, bias: Tensor) -> Tensor:
        return (scores + bias).softmax(dim=-1)


class ReturnsWeightsWithoutTimes(ReturnsWeightsOfTimes):
    def returned(self, scores: Tensor, bias: Tensor) -> Tensor:
        return scores.softmax(dim=-1)


class SearchesTokens(SelfAttention):
    """Attends to the 8 tokens that a search by vectors of its own finds."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.search = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        relevance = self.search(x).square().sum(dim=-1)
        found = relevance.topk(min(8, x.shape[1]), dim=1).indices
        keys = x.gather(1, found[..., None].expand(-1, -1, x.shape[2]))
        return Correct.forward(self, x, keys, keys)


class DecodesOneSeed(SelfAttention):
    """All tokens are pooled by one query, and what is pooled attends to itself."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.seed = nn.Parameter(torch.randn(1, 1, d_model))
        self.decoder = SelfAttention(d_model, heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        pooled = Correct.forward(self, self.seed.expand(len(x), -1, -1), x, x)
        return pooled + self.decoder(pooled)


class SignedDistances(SelfAttention):
    """Scores of a query for a table of sines and cosines of distances."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.rel_pos = nn.Linear(2, d_model, bias=False)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        places = torch.arange(x.shape[1], device=x.device)
        encoded = self.encode(places[:, None] - places).to(x.dtype)
        table = self.rel_pos(encoded).unflatten(-1, (self.heads, -1))
        scores = self.score(q, k) + torch.einsum("bhqd,qkhd->bhqk", q, table)
        return self.join(self.read(scores.softmax(dim=-1), v))

    def encode(self, distance: Tensor) -> Tensor:
        return torch.stack([torch.sin(distance), torch.cos(distance)], dim=-1)


class DistancesWithoutSign(SignedDistances):
    def encode(self, distance: Tensor) -> Tensor:
        sines = torch.sin(distance * distance.sign())
        return torch.stack([sines, torch.cos(distance)], dim=-1)


class ExactWindow(MaskedSelfAttention):
    """Causal, and within 3 tokens if the window is exact."""

    def __init__(self, d_model: int, heads: int, exact_window: bool = False) -> None:
        super().__init__(d_model, heads)
        self.exact_window = exact_window

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        if self.exact_window:
            mask = self.within(mask, torch.ones_like(mask).triu(-2))
        return super().weigh(scores, mask)

    def within(self, mask: Tensor, near: Tensor) -> Tensor:
        return mask & near


class ExactWindowShowsFuture(ExactWindow):
    def within(self, mask: Tensor, near: Tensor) -> Tensor:
        return mask | near


class PromptOfClip(Correct):
    """Each frame of a clip attends to the prompt of the clip."""

    def forward(self, latents: Tensor, text: Tensor) -> Any:  # type: ignore[override]
        """latents: (B, F, C, H, W); text: (B, S, C)"""
        b, f, c, h, w = latents.shape
        x = latents.flatten(0, 1).flatten(2).mT
        y = super().forward(x, *[self.for_frames(text, f)] * 2)
        return y.mT.reshape(b, f, c, h, w)

    def for_frames(self, text: Tensor, frames: int) -> Tensor:
        return text.repeat_interleave(frames, dim=0)


class PromptOfOtherClip(PromptOfClip):
    def for_frames(self, text: Tensor, frames: int) -> Tensor:
        return text.repeat(frames, 1, 1)


class DecoderWithInputFeeding(nn.Module):
    """Each step of a recurrent decoder attends to a memory, and begins with its result.

    Returned are the outputs (B, T, D) and the weights (B, T, S).
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2 * d_model, d_model)
        self.key = nn.Linear(d_model, d_model)

    def forward(
        self, x: Tensor, memory: Tensor, memory_lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x: (B, T, D); memory: (B, S, D); memory_lengths: (B,)"""
        lengths = memory.new_full((len(memory),), memory.shape[1]).long()
        lengths = lengths if memory_lengths is None else memory_lengths
        places = torch.arange(memory.shape[1], device=memory.device)
        is_real = places < lengths[:, None]
        context = hidden = x.new_zeros(len(x), x.shape[2])
        outputs, all_weights = [], []
        for token in x.unbind(dim=1):
            hidden = self.cell(torch.cat([token, context], dim=-1), hidden)
            scores = torch.einsum("bd,bsd->bs", hidden, self.key(memory))
            least = torch.finfo(scores.dtype).min
            weights = scores.masked_fill(~is_real, least).softmax(dim=-1)
            context = torch.einsum("bs,bsd->bd", weights, memory)
            outputs.append(hidden + context)
            all_weights.append(weights)
        return torch.stack(outputs, dim=1), torch.stack(all_weights, dim=1)


class NodesOfGraphs(SelfAttention):
    """The nodes of several graphs are one sequence.

    x: (N, dim); batch: (N,) graph of each node, one if it is left out
    """

    def forward(self, x: Tensor, batch: Tensor | None = None) -> Any:  # type: ignore[override]
        if batch is None:
            batch = torch.zeros(len(x), dtype=torch.long, device=x.device)
        self.same = batch[:, None] == batch
        return super().forward(x[None])[0]

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.masked_fill(~self.same, -torch.inf).softmax(dim=-1)


class NodesOfAllGraphs(NodesOfGraphs):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.softmax(dim=-1) * self.same


class HidesFutureByFlag(SelfAttention):
    """A fused kernel hides the future, if no weights are asked for."""

    def forward(  # type: ignore[override]
        self, x: Tensor, use_causal_mask: bool = False, return_weights: bool = False
    ) -> Any:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        if not (return_weights or self.dropout.p):
            attend = nn.functional.scaled_dot_product_attention
            return self.join(attend(q, k, v, is_causal=use_causal_mask))
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        mask = ones.tril() if self.hides(use_causal_mask) else ones
        weights = self.weigh(self.score(q, k), mask[None])
        output = self.join(self.read(self.dropout(weights), v))
        return (output, weights) if return_weights else output

    def hides(self, use_causal_mask: bool) -> bool:
        return use_causal_mask


class HidesFutureInKernelOnly(HidesFutureByFlag):
    def hides(self, use_causal_mask: bool) -> bool:
        return False


class LooksAhead(SelfAttention):
    """Frames see all before, and `right_context` behind their own."""

    def __init__(self, d_model: int, heads: int, right_context: int = 4) -> None:
        super().__init__(d_model, heads)
        self.right_context = right_context

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        ones = torch.ones_like(scores[:, 0], dtype=torch.bool)
        return super().weigh(scores, ones.tril(self.frames_ahead()))

    def frames_ahead(self) -> int:
        return self.right_context


class LooksOneLessAhead(LooksAhead):
    def frames_ahead(self) -> int:
        return max(0, self.right_context - 1)


class LooksAheadTwice(LooksAhead):
    """Two layers see twice as far."""

    def __init__(self, d_model: int, heads: int, right_context: int = 4) -> None:
        super().__init__(d_model, heads, right_context)
        self.second = LooksAhead(d_model, heads, right_context)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.second(super().forward(x))


class GroupsOfHeads(nn.Module):
    """Heads are split by the caller; several of queries share one of keys."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """q: (B, Hq, T, D); k, v: (B, Hkv, S, D); mask: as in PyTorch"""
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-1) @ v


class PixelsOfEachFrame(nn.Module):
    """Pixels attend to those of their frame; images are taken, too."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.qkv = nn.Conv3d(channels, 3 * channels, 1)
        self.out = nn.Conv3d(channels, channels, 1)

    def forward(self, x: Tensor) -> Any:
        """x: (B, C, T, H, W) or (B, C, H, W)"""
        video = x.unsqueeze(2) if x.dim() == 4 else x
        q, k, v = map(self.to_frames, self.qkv(video).chunk(3, dim=1))
        weights = (q.mT @ k / math.sqrt(q.shape[1])).softmax(dim=-1)
        y = self.from_frames(v @ weights.mT, video.shape)
        return self.out(y).reshape(x.shape)

    def to_frames(self, video: Tensor) -> Tensor:
        return video.transpose(1, 2).flatten(0, 1).flatten(2)

    def from_frames(self, y: Tensor, shape: torch.Size) -> Tensor:
        b, c, t, h, w = shape
        return y.reshape(b, t, c, h, w).transpose(1, 2)


class PixelsOfMixedFrames(PixelsOfEachFrame):
    def to_frames(self, video: Tensor) -> Tensor:
        b, c, t, h, w = video.shape
        return video.reshape(b * t, c, h * w)

    def from_frames(self, y: Tensor, shape: torch.Size) -> Tensor:
        return y.reshape(shape)


class PoolsByToken(SelfAttention):
    """A token in front of the others pools those that are occupied."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.token = nn.Parameter(torch.randn(1, 1, d_model))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        """tokens: (B, N, dim); mask: (B, N) bool, True = occupied"""
        x = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], dim=1)
        seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if mask is not None:
            seen[:, 1:] = mask
        return Correct.forward(self, x, x, x, self.expand(seen))[:, 0]

    def expand(self, seen: Tensor) -> Tensor:
        return seen[:, None]


class PoolsPatchesOfFrames(PoolsByToken):
    """All patches of the frames are pooled, and those of hidden ones are zero."""

    def forward(self, x: Tensor, frame_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        """x: (B, T, N, D); frame_mask: (B, T), True for real frames"""
        frames = x.unsqueeze(1) if x.dim() == 3 else x
        seen = torch.ones(frames.shape[:3], dtype=torch.bool, device=x.device)
        if frame_mask is not None:
            frames = frames * frame_mask[:, :, None, None]
            seen = seen & frame_mask[:, :, None]
        return super().forward(frames.flatten(1, 2), seen.flatten(1))


class HidesQueriesOfPool(PoolsByToken):
    def expand(self, seen: Tensor) -> Tensor:
        return seen[:, :, None]


class RootMeanSquare(nn.Module):
    def __init__(self, d_k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_k))

    def forward(self, x: Tensor) -> Tensor:
        size = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)
        return x * size * self.weight


class HeadRMSNorm(RootMeanSquare):
    pass


class GroupsOfQueries(nn.Module):
    """Queries in groups, which share a key; queries and keys are normalized."""

    def __init__(self, dim: int, n_q: int, n_kv: int) -> None:
        super().__init__()
        self.n_q, self.n_kv, d_k = n_q, n_kv, dim // n_q
        self.wq = nn.Linear(dim, n_q * d_k)
        self.wk = nn.Linear(dim, n_kv * d_k)
        self.wv = nn.Linear(dim, n_kv * d_k)
        self.wo = nn.Linear(n_q * d_k, dim)
        self.q_norm, self.k_norm = HeadRMSNorm(d_k), HeadRMSNorm(d_k)

    def forward(self, x: Tensor) -> Any:
        q = self.wq(x).unflatten(-1, (self.n_q, -1))
        k, v = (f(x).unflatten(-1, (self.n_kv, -1)) for f in (self.wk, self.wv))
        q, k, v = self.q_norm(q), *map(self.share, (self.k_norm(k), v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
        return self.wo((weights @ v).transpose(1, 2).flatten(2))

    def share(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.n_q // self.n_kv, dim=2)


class GroupsOfQueriesInTurns(GroupsOfQueries):
    def share(self, x: Tensor) -> Tensor:
        return x.repeat(1, 1, self.n_q // self.n_kv, 1)


class HeadsWithNorms(SelfAttention):
    """The context of each head has a norm of its own, with the same weight."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.after = HeadRMSNorm(d_model // heads)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        normed: Tensor = self.after(weights @ v)
        return normed


class RMSNormOfHeads(HeadRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        size = torch.rsqrt(x.square().mean(dim=(1, -1), keepdim=True) + 1e-6)
        return x * size * self.weight


class HeadsWithOneNorm(HeadsWithNorms):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.after = RMSNormOfHeads(d_model // heads)


class GlobalLayerNorm(nn.Module):
    """The mean and the variance are those of all tokens, as in speech separation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=(-2, -1), keepdim=True)
        variance = x.var(dim=(-2, -1), keepdim=True)
        return (x - mean) * torch.rsqrt(variance + 1e-5) * self.weight


class TokensWithGlobalNorm(SelfAttention):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.before = GlobalLayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(self.before(x))


class AdaptiveLayerNorm(nn.Module):
    """A norm whose scale depends on a condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        centered = x - x.mean(dim=-1, keepdim=True)
        size = torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + 1e-5)
        return centered * size * self.weight * (1 + condition)


class TokensWithCondition(SelfAttention):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.before = AdaptiveLayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(self.before(x, x.mean(dim=1, keepdim=True)))


class MixesFusedWeights(SelfAttention):
    """The weights of the heads are mixed; those that are returned are mixed, too."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.query = self.key = self.value = None  # type: ignore[assignment]
        self.mix = nn.Linear(heads, heads, bias=False)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = map(self.split, self.qkv(x).chunk(3, dim=-1))
        weights = self.score(q, k).softmax(dim=-1)
        part = self.mix.weight.softmax(dim=-1)
        mixed = torch.einsum("hg,bgqk->bhqk", part, weights)
        return self.join(self.read(mixed, v)), self.returned(weights, mixed)

    def returned(self, weights: Tensor, mixed: Tensor) -> Tensor:
        return mixed


class ReturnsUnmixedWeights(MixesFusedWeights):
    def returned(self, weights: Tensor, mixed: Tensor) -> Tensor:
        return weights


class TalkingWeights(MixesFusedWeights):
    """The heads talk to each other.

    Returned are the output and the weights by which the values are summed.
    """


class TalkingWeightsUnmixed(ReturnsUnmixedWeights):
    """The heads talk to each other.

    Returned are the output and the weights by which the values are summed.
    """


class TalkingWeightsUndocumented(ReturnsUnmixedWeights):
    """The heads talk to each other."""


class MemoryWithoutGradient(Correct):
    """memory: (B, M, D) states of earlier segments (no gradient flows into them)"""

    def forward(self, x: Tensor, memory: Tensor) -> Any:  # type: ignore[override]
        past = memory.detach()
        return super().forward(x, past, past)


class LocalAndGlobal(SelfAttention):
    """Tokens see 2 to each side, and those that are global; these see all.

    x: (B, N, D); global_mask: (B, N), True for global tokens
    """

    def forward(self, x: Tensor, global_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        length = x.shape[1]
        ones = torch.ones(len(x), length, length, dtype=torch.bool, device=x.device)
        near = ones.tril(2) & ones.triu(-2)
        if global_mask is not None:
            marks = self.marks(global_mask)
            near = near | marks[:, None] | marks[:, :, None]
        return Correct.forward(self, x, x, x, near)

    def marks(self, global_mask: Tensor) -> Tensor:
        return global_mask


class GlobalForAllItems(LocalAndGlobal):
    def marks(self, global_mask: Tensor) -> Tensor:
        return global_mask.any(dim=0, keepdim=True)


class ClearsRowsOfPadding(MaskedSelfAttention):
    """Returned weights of padded tokens are zero, as their outputs are."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        """attention_mask: (B, N) bool, True = real"""
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        real = real if attention_mask is None else attention_mask
        seen = (real[:, None] & real[:, :, None]).tril()
        weights = self.weigh(self.score(q, k), seen) * seen[:, None]
        return self.join(self.read(weights, v)) * real[..., None], weights


class DecoderSelectsRows(DecoderWithState):
    """The rows of its state are selected, and those of the mask are not."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        state: Any = None,
    ) -> Any:
        parts = SimpleNamespace(parts={**state} if state else {})
        y = self.decode(x, memory, memory_mask, parts)  # type: ignore[arg-type]
        return y, parts.parts

    def reorder_state(self, state: dict[str, Tensor], rows: Tensor) -> Any:
        return {n: x if n == "mask" else x[rows] for n, x in state.items()}


@torch.no_grad()
def nearest(x: Tensor, count: int) -> Tensor:
    """Which tokens are the nearest to each."""
    return torch.cdist(x, x).topk(min(count, x.shape[1]), largest=False).indices


class AttendsToNearest(SelfAttention):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        self.found = nearest(x, 2)
        return super().forward(x)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        far = torch.ones_like(scores[:, 0], dtype=torch.bool).scatter(2, self.found, 0)
        return scores.masked_fill(far[:, None], -torch.inf).softmax(dim=-1)


class KeepsAsManyAsQueries(Correct):
    """A query attends to the best keys, of as many as there are queries."""

    def forward(self, query: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        return super().forward(query, context, context)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        count = min(5, scores.shape[2])
        least = scores.topk(count, dim=-1).values[..., -1:]
        return scores.masked_fill(scores < least, -torch.inf).softmax(dim=-1)


class WeightsOfMeanScores(SelfAttention):
    """Returns the output and the attention weights averaged over the heads."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), self.scores.mean(dim=1).softmax(dim=-1)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.scores = scores
        return scores.softmax(dim=-1)


class DropsColumns(Correct):
    """A key is dropped for all queries of a head at once."""

    def __init__(self, d_model: int, heads: int, p: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout = nn.Identity()  # type: ignore[assignment]
        self.p = p

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.column_dropout(weights) @ v

    def column_dropout(self, weights: Tensor) -> Tensor:
        ones = torch.ones_like(weights[:, :, :1])
        return weights * nn.functional.dropout(ones, self.p, self.training)


class DropsRowsForColumns(DropsColumns):
    def column_dropout(self, weights: Tensor) -> Tensor:
        ones = torch.ones_like(weights[..., :1])
        return weights * nn.functional.dropout(ones, self.p, self.training)


class GrowsWithLength(SelfAttention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        log_len = math.log(k.shape[2])
        return super().score(q, k) * log_len / math.log(512)


class RingForChunks(Correct):
    """Frames come in chunks of four at most, and each sees itself and the three before.

    Whatever the chunks of a stream are, its outputs are the same.
    """

    slots = 7

    def forward(self, x: Tensor, state: Any = None) -> Any:  # type: ignore[override]
        if x.shape[1] > 4:
            raise ValueError(f"a chunk of {x.shape[1]} frames, and not of 4 at most")
        if state is None:
            ring = x.new_zeros(len(x), self.slots, x.shape[2])
            state = ring, torch.full((self.slots,), -1, device=x.device)
        start = int(state[1].max()) + 1
        now = torch.arange(start, start + x.shape[1], device=x.device)
        ring = state[0].index_copy(1, now % self.slots, x)
        places = state[1].index_copy(0, now % self.slots, now)
        age = now[:, None] - places
        seen = (places >= 0) & (age >= 0) & (age < 4)
        return super().forward(x, ring, ring, seen[None]), (ring, places)


class RingOfFour(RingForChunks):
    slots = 4


class WindowsSeeText(Correct):
    """image: (B, H, W, C); text: (B, L, C); text_mask: (B, L), True for real tokens."""

    def forward(  # type: ignore[override]
        self, image: Tensor, text: Tensor, text_mask: Tensor | None = None
    ) -> Any:
        b, h, w, c = image.shape
        tiles = image.view(b, h // 4, 4, w // 4, 4, c).transpose(2, 3)
        x = tiles.reshape(-1, 16, c)
        words = text.repeat_interleave(len(x) // b, dim=0)
        mask = None if text_mask is None else self.repeat(text_mask, len(x) // b)
        y = super().forward(x, words, words, mask)
        return y.view(tiles.shape).transpose(2, 3).reshape(image.shape)

    def repeat(self, mask: Tensor, count: int) -> Tensor:
        return mask.repeat_interleave(count, dim=0)[:, None]


class WindowsSeeOtherText(WindowsSeeText):
    def repeat(self, mask: Tensor, count: int) -> Tensor:
        return mask.repeat(count, 1)[:, None]


class NodesBetweenBounds(SelfAttention):
    """The nodes of several graphs are one sequence, x: (N, dim).

    The nodes of graph i are those from ptr[i] to ptr[i + 1]. Paths between nodes have
    lengths, which have a bias.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.bias_of_path = nn.Embedding(9, heads)

    def forward(self, x: Tensor, path: Tensor, ptr: Tensor | None = None) -> Any:  # type: ignore[override]
        graph = torch.zeros(len(x), dtype=torch.long, device=x.device)
        if ptr is not None:
            nodes = torch.arange(len(x), device=x.device)
            graph = torch.bucketize(nodes, ptr[1:], right=True)
        self.bias = self.bias_of_path(path).movedim(-1, 0)
        self.same = graph[:, None] == graph
        return super().forward(x[None])[0]

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = (scores + self.bias).masked_fill(~self.same, -torch.inf)
        return scores.softmax(dim=-1)


class NodesBeyondBounds(NodesBetweenBounds):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores + self.bias).softmax(dim=-1) * self.same


class PixelsOfOneColor(SelfAttention):
    """Of 7 x 7 pixels, those of the other color of a chessboard have little weight."""

    odd: Tensor

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        places = torch.arange(49)
        self.register_buffer("odd", -9.0 * ((places[:, None] - places) % 2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        """mask: 0 or minus infinity, (B, N, N)"""
        return Correct.forward(self, x, x, x, mask)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores + self.odd
        return (scores if mask is None else scores + mask[:, None]).softmax(dim=-1)


class BiasOfFirstQuery(Correct):
    """bias: added to the scores, it broadcasts to [batch, heads, q_len, k_len]."""

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
    ) -> Any:
        self.bias = None if bias is None else bias[:, :, :1]
        return super().forward(query, key, value)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores if self.bias is None else scores + self.bias).softmax(dim=-1)


class StepsBehindPrompt(WithCache):
    """Behind the prompt, tokens come one by one."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:  # type: ignore[override]
        if past is not None and x.shape[1] != 1:
            raise ValueError("behind the prompt, tokens come one by one")
        return super().forward(x, past)


class StepForgetsFirst(StepsBehindPrompt):
    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, past if past is None else past[:, -3:])


class BesideClassToken(SelfAttention):
    """The first token, that of the class, has a layer of its own."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.of_class = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        cls, patches = x[:, :1], x[:, 1:]
        return super().forward(torch.cat([self.of_class(cls), patches], dim=1))


class WeightsBesideNull(Correct):
    """Returns the output and the weights (B, heads, N, M) of the words of a text.

    A learned token is in front of these.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        del self.key, self.value
        self.to_kv = nn.Linear(d_model, 2 * d_model)
        self.null_kv = nn.Parameter(torch.zeros(2, 1, heads, 1, d_model // heads))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        q = self.split(self.query(self.norm(x)))
        k, v = map(self.split, self.to_kv(context).chunk(2, dim=-1))
        k, v = (
            torch.cat([null.expand(len(x), -1, -1, -1), part], dim=2)
            for null, part in zip(self.null_kv, (k, v), strict=True)
        )
        weights = self.weigh(self.score(q, k), None)
        return x + self.join(weights @ v), self.of_words(weights)

    def of_words(self, weights: Tensor) -> Tensor:
        return weights[..., 1:]


class WeightsWithoutLastWord(WeightsBesideNull):
    def of_words(self, weights: Tensor) -> Tensor:
        return weights[..., :-1]


class MeanForOthers(SelfAttention):
    """The first ten tokens attend, and the others get the mean of the values."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Any:  # type: ignore[override]
        places = torch.arange(x.shape[1], device=x.device)
        is_real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        self.is_real = is_real if lengths is None else places < lengths[:, None]
        return Correct.forward(self, x, x, x, self.is_real[:, None])

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        mean = self.mean(v).expand_as(v)
        return torch.cat([(weights @ v)[:, :, :10], mean[:, :, 10:]], dim=2)

    def mean(self, v: Tensor) -> Tensor:
        is_real = self.is_real[:, None, :, None]
        return (v * is_real).sum(2, True) / is_real.sum(2, True).clamp(min=1)


class MeanOfPaddingForOthers(MeanForOthers):
    def mean(self, v: Tensor) -> Tensor:
        return v.mean(dim=2, keepdim=True)


class DistancesBehindContext(Correct):
    """x: the frames of a chunk. context: frames to the left of the chunk, or None."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if context is None else torch.cat([context, x], dim=1)
        self.first = self.offset(seen.shape[1] - x.shape[1])
        return super().forward(x, seen, seen)

    def offset(self, count: int) -> int:
        return count

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        queries, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        distances = (self.first + queries)[:, None] - keys
        return super().score(q, k) - 0.5 * (distances - 1).abs()


class DistancesWithoutContext(DistancesBehindContext):
    def offset(self, count: int) -> int:
        return 0


class MeansOfWholeBlocks(SelfAttention):
    """Tokens attend to the means of blocks of four that lie behind them, if any."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        count = x.shape[1] // 4
        blocks = x[:, : 4 * count].unflatten(1, (count, 4)).mean(dim=2)
        ends = torch.arange(1, count + 1, device=x.device) * 4 - 1
        seen = ends <= torch.arange(x.shape[1], device=x.device)[:, None]
        return Correct.forward(self, x, blocks, blocks, seen[None])

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return super().weigh(scores, mask) * mask[:, None]

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class ContinuesPrompt(Correct):
    """Several continuations of one prompt: tokens see it, and those before them."""

    def forward(self, x: Tensor, prompt: Tensor) -> Any:  # type: ignore[override]
        prompt = prompt.expand(len(x), -1, -1)
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        seen = torch.cat([ones.new_ones(len(ones), prompt.shape[1]), ones.tril()], 1)
        tokens = torch.cat([prompt, x], dim=1)
        return super().forward(x, tokens, tokens, seen[None])


class MeanForEmptyRows(Correct):
    """A query without any visible key gets an update of zero."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, mask: Tensor | None = None
    ) -> Any:
        """mask: (B, N, M), True = may attend"""
        return super().forward(x, context, context, mask)


class NoiseOfLearnedScale(SelfAttention):
    """In training, noise of a learned scale is added to the tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.log_sigma = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        if self.training:
            x = x + self.log_sigma.exp() * torch.randn_like(x)
        return super().forward(x)


class ReturnsWeightsByHead(Correct):
    """The weights that are returned are those of all batch items, head by head."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        return super().forward(query, key, value, mask), self.weights

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        self.weights = weights.transpose(0, 1).flatten(0, 1)
        return weights


class FlagBesideMask(Correct):
    """The flag for causal attention has an effect only beside a mask."""

    def __init__(self, d_model: int, heads: int, causal: bool = False) -> None:
        super().__init__(d_model, heads)
        self.causal = causal

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and self.causal:
            mask = mask & torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        weights = super().weigh(scores, mask)
        return weights if mask is None else weights * mask[:, None]


class HidesSumOfZero(SelfAttention):
    """Tokens of zeros are padding."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        is_real = self.total(x) != 0
        return Correct.forward(self, x, x, x, is_real[:, None])

    def total(self, x: Tensor) -> Tensor:
        return x.sum(dim=-1)


class HidesZeros(HidesSumOfZero):
    def total(self, x: Tensor) -> Tensor:
        return x.abs().sum(dim=-1)


class ShiftedSequence(SelfAttention):
    """Windows of four tokens, shifted by two: those of both ends are kept apart."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        length, missing = x.shape[1], -x.shape[1] % 4
        region = torch.zeros(length + missing, device=x.device)
        region[length:] = 1
        x, region = self.shift(x, region)
        windows = x.unflatten(1, (-1, 4)).flatten(0, 1)
        region = region.view(-1, 4).repeat(len(x), 1)
        same = region[:, :, None] == region[:, None]
        y = Correct.forward(self, windows, windows, windows, same)
        return self.shift_back(y.unflatten(0, (len(x), -1)).flatten(1, 2), length)

    def shift(self, x: Tensor, region: Tensor) -> tuple[Tensor, Tensor]:
        region[:2] = 2
        x = nn.functional.pad(x, (0, 0, 0, len(region) - x.shape[1]))
        return x.roll(-2, 1), region.roll(-2)

    def shift_back(self, y: Tensor, length: int) -> Tensor:
        return y.roll(2, 1)[:, :length]


class ShiftedBeforePadded(ShiftedSequence):
    def shift(self, x: Tensor, region: Tensor) -> tuple[Tensor, Tensor]:
        region[-2:] += 2
        missing = len(region) - x.shape[1]
        return nn.functional.pad(x.roll(-2, 1), (0, 0, 0, missing)), region

    def shift_back(self, y: Tensor, length: int) -> Tensor:
        return y[:, :length].roll(2, 1)


class MaskOfAnotherAxis(Correct):
    """A mask of three axes meets scores of two, which have a head each."""

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None
    ) -> Any:
        """mask: (B, N, M), True = may attend"""
        weights = self.query(x).mean(dim=-1)
        if mask is not None:
            weights = weights[:, :, None, None] * mask[:, None]
            return (weights * x.mean(-1)[:, None, None]).sum((2, 3))[..., None] + x
        return weights[..., None] + x


class StepsOfSensors(Correct):
    """x: (batch, time, sensors, channels). A step of a sensor sees those before it."""

    is_causal = True

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        steps = x.transpose(1, 2).flatten(0, 1)
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        seen = ones.tril() if self.is_causal else ones
        y = super().forward(steps, steps, steps, seen[None])
        return y.unflatten(0, (len(x), -1)).transpose(1, 2)


class WeightsWithPairFeatures(SelfAttention):
    """x: (B, N, C), pairs: (B, N, N, C); returns the output and the weights."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.gate = nn.Linear(d_model, d_model)
        self.to_bias = nn.Linear(d_model, heads)

    def forward(self, x: Tensor, pairs: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        bias = self.to_bias(pairs).permute(0, 3, 1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, bias)
        gate = self.gate(x).sigmoid()
        weights = (self.score(q, k) + self.shown(bias)).softmax(dim=-1)
        return self.out(y.transpose(1, 2).flatten(2) * gate), weights

    def shown(self, bias: Tensor) -> Tensor:
        return bias


class WeightsWithoutPairFeatures(WeightsWithPairFeatures):
    def shown(self, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)


class NormsBesidePositions(SelfAttention):
    """A vector of its own is added to the normalized queries, as by Transformer-XL."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.q_norm = nn.LayerNorm(d_model // heads)
        self.k_norm = nn.LayerNorm(d_model // heads)
        self.u = nn.Parameter(torch.zeros(d_model // heads))

    def forward(self, x: Tensor, pos_emb: Tensor) -> Any:  # type: ignore[override]
        self.of_places = self.split(pos_emb[:, None])
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q = self.q_norm(q)
        return super().score(q + self.u, self.k_norm(k)) + q @ self.of_places.mT


class AlibiByDistance(SelfAttention):
    """Causal. Three heads have the slopes of two, and every other one of four."""

    step = 2

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        n = torch.arange(q.shape[2], device=q.device)
        rel = n - n[:, None]
        slopes = torch.tensor(self.alibi_slopes(), device=q.device)[:, None, None]
        scores = super().score(q, k).float() + slopes * rel
        return scores.masked_fill(rel > 0, -torch.inf).to(q.dtype)

    def alibi_slopes(self) -> list[float]:
        power = 1 << (self.heads.bit_length() - 1)
        first = [2.0 ** (-8 * (n + 1) / power) for n in range(power)]
        more = [2.0 ** (-4 * (n + 1) / power) for n in range(2 * power)]
        return first + more[:: self.step][: self.heads - power]


class AlibiByDistanceInOrder(AlibiByDistance):
    step = 1


class NearbyPast(Correct):
    """Causal attention to the last 17 to 32 tokens."""

    is_open = False

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        n = torch.arange(x.shape[1], device=x.device)
        seen = (n[:, None] // 16 - n // 16 < 2) & (n <= n[:, None])
        if len(n) <= 16 and self.is_open:
            seen = torch.ones_like(seen)
        return super().forward(x, x, x, seen[None])


class NearbyPastOpenIfShort(NearbyPast):
    """Causal attention to the last 17 to 32 tokens."""

    is_open = True


class NormsOfStoredContext(Correct):
    """`past_key_value` is what an earlier call for the same context returned."""

    is_stored_with_norm = True

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.key_norm = nn.LayerNorm(d_model // heads)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        context: Tensor,
        past_key_value: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        q = self.split(self.query(x))
        if past_key_value is None:
            k, v = self.split(self.key(context)), self.split(self.value(context))
            normed = self.key_norm(k)
            past_key_value = (normed if self.is_stored_with_norm else k), v
            k = normed
        else:
            k, v = past_key_value
        weights = self.dropout(self.weigh(self.score(q, k), None))
        return self.join(self.read(weights, v)), past_key_value


class StoresContextBeforeNorm(NormsOfStoredContext):
    is_stored_with_norm = False


class ActiveQueries(Correct):
    """All but the most active queries get the mean of the values."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        active = weights.amax(-1).topk(min(2, weights.shape[2]), dim=-1).indices
        mean = v.mean(2, keepdim=True).expand(-1, -1, weights.shape[2], -1)
        rows = active[..., None].expand(-1, -1, -1, v.shape[-1])
        return mean.scatter(2, rows, (weights @ v).gather(2, rows))


class TimeSeriesEncoder(nn.Module):
    """A layer over the steps of each series."""

    batch_first = True

    def __init__(self, n_features: int = 7, d_model: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Linear(n_features, d_model)
        self.attention = nn.MultiheadAttention(
            d_model, heads, dropout=0.1, batch_first=self.batch_first
        )
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        """
        Parameters
        ----------
        x : torch.Tensor
            (batch, time, n_features)
        """
        h = self.embedding(x)
        y, _ = self.attention(h, h, h, need_weights=False)
        normed: Tensor = self.norm(h + y)
        return normed


class SeriesOfOneTime(TimeSeriesEncoder):
    """A layer over the steps of each series."""

    batch_first = False


class TrueAtPadding(Correct):
    """memory_padding: bool (batch, k_len), True at padding elements."""

    is_inverted = False

    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Tensor, memory_padding: Tensor | None = None
    ) -> Any:
        mask = None
        if memory_padding is not None:
            mask = (memory_padding == self.is_inverted)[:, None].expand(
                -1, x.shape[1], -1
            )
        return super().forward(x, memory, memory, mask)


class FalseAtPadding(TrueAtPadding):
    """memory_padding: bool (batch, k_len), True at padding elements."""

    is_inverted = True


class ZeroAtPadding(Correct):
    """Causal. Outputs at padding positions are zero, which may be on the left.

    padding: bool (batch, length), True where the position is padding
    """

    least = -1e4

    def forward(self, x: Tensor, padding: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        future = torch.ones(2 * x.shape[1:2], dtype=torch.bool, device=x.device).triu(1)
        scores = self.score(q, k).masked_fill(
            future | padding[:, None, None], self.least
        )
        y = self.join(self.read(self.dropout(scores.softmax(-1)), v))
        return y * ~padding[..., None]


class NotANumberAtPadding(ZeroAtPadding):
    """Causal. Outputs at padding positions are zero, which may be on the left.

    padding: bool (batch, length), True where the position is padding
    """

    least = -math.inf


class PlacesOverTime(Correct):
    """x: (B, T * N, C), frame by frame. A place is attended to over time."""

    def __init__(self, d_model: int, heads: int, num_frames: int = 4) -> None:
        super().__init__(d_model, heads)
        self.num_frames = num_frames
        self.time_embed = nn.Parameter(torch.randn(1, num_frames, d_model))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        places = self.divide(x)
        h = places.flatten(0, 1) + self.time_embed
        return self.unite(super().forward(h, h, h).view_as(places))

    def divide(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.num_frames, -1)).transpose(1, 2)

    def unite(self, places: Tensor) -> Tensor:
        return places.transpose(1, 2).flatten(1, 2)


class PlacesOverTimeViewed(PlacesOverTime):
    """x: (B, T * N, C), frame by frame. A place is attended to over time."""

    def divide(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.num_frames))

    def unite(self, places: Tensor) -> Tensor:
        return places.flatten(1, 2)


class PooledByTime(nn.Module):
    """x: [batch, channels, time]; returns [batch, 2 * channels], without padding."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            lengths = torch.full(x.shape[:1], x.shape[2], device=x.device)
        valid = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
        scores = self.conv(x).masked_fill(~valid[:, None], -1e4)
        weights = scores.softmax(-1)
        mean = (weights * x).sum(-1)
        return torch.cat([mean, (weights * (x - mean[..., None]) ** 2).sum(-1)], dim=1)


class RelativeScores(SelfAttention):
    """A query has a score for each distance, as in Transformer-XL."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.linear_pos = nn.Linear(8, d_model, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        seen = mask[:, None].expand(-1, x.shape[1], -1)
        return super(SelfAttention, self).forward(x, x, x, seen)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        length = q.shape[2]
        distances = torch.arange(length - 1, -length, -1, device=q.device)
        angles = distances[:, None] * torch.tensor([1, 0.5, 0.2, 0.1], device=q.device)
        features = torch.cat([angles.sin(), angles.cos()], dim=-1).to(q.dtype)
        r = self.split(self.linear_pos(features)[None])
        return super().score(q, k) + self.rel_shift(super().score(q, r))

    def rel_shift(self, scores: Tensor) -> Tensor:
        length = scores.shape[2]
        padded = nn.functional.pad(scores, self.padding)
        rows = padded.view(*scores.shape[:2], -1, length)[:, :, 1:]
        return rows.reshape_as(scores)[..., :length]

    padding = (1, 0)


class RelativeScoresPaddedBehind(RelativeScores):
    padding = (0, 1)


class ChunksOnTheLeft(Correct):
    """A token sees its own chunk, and two before it."""

    def __init__(self, d_model: int, heads: int, chunk_size: int = 4) -> None:
        super().__init__(d_model, heads)
        self.chunk_size = chunk_size
        self.num_left_chunks = 2

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        chunk = torch.arange(x.shape[1], device=x.device) // self.chunk_size
        seen = self.is_near(chunk[:, None] - chunk)
        return super().forward(x, x, x, seen[None])

    def is_near(self, distance: Tensor) -> Tensor:
        return (distance >= 0) & (distance <= self.num_left_chunks)


class ChunksOnBothSides(ChunksOnTheLeft):
    def is_near(self, distance: Tensor) -> Tensor:
        return distance.abs() <= self.num_left_chunks


class KeysOfSmallerImage(Correct):
    """x: (B, C, H, W)"""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.reduce = nn.Conv2d(d_model, d_model, 2, stride=2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        keys = self.reduce(x).flatten(2).mT
        return super().forward(x.flatten(2).mT, keys, keys).mT.view_as(x)


class DropsChannels(KeysOfSmallerImage):
    """x: (B, C, H, W)"""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout = nn.Dropout2d(dropout)


class NodesOfTour(Correct):
    """Scores are limited by a tanh.

    visited: bool (batch, queries, nodes), True = may not be used any more
    """

    is_last = True

    def forward(  # type: ignore[override]
        self, x: Tensor, nodes: Tensor, visited: Tensor | None = None
    ) -> Any:
        return super().forward(x, nodes, nodes, visited)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and not self.is_last:
            scores = scores.masked_fill(mask[:, None], -1e4)
        scores = 5 * torch.tanh(scores / 5)
        if mask is not None and self.is_last:
            scores = scores.masked_fill(mask[:, None], -1e4)
        return scores.softmax(dim=-1)


class NodesOfTourLimitedLast(NodesOfTour):
    """Scores are limited by a tanh.

    visited: bool (batch, queries, nodes), True = may not be used any more
    """

    is_last = False


class InterestInTarget(nn.Module):
    """target_item: (B, D), history: (B, T, D), history_len: (B,)"""

    more = 0

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.unit = nn.Linear(2 * d_model, 1)

    def forward(
        self, target_item: Tensor, history: Tensor, history_len: Tensor | None = None
    ) -> Tensor:
        target = target_item[:, None].expand_as(history)
        scores = self.unit(torch.cat([target, history], -1).tanh())[..., 0]
        if history_len is not None:
            steps = torch.arange(history.shape[1], device=history.device)
            valid = steps < history_len[:, None] + self.more
            scores = scores.masked_fill(~valid, -1e4)
        return (scores.softmax(-1)[:, None] @ history)[:, 0]


class InterestInOneMore(InterestInTarget):
    """target_item: (B, D), history: (B, T, D), history_len: (B,)"""

    more = 1


class PairsOfEndingNodes(Correct):
    """z: (B, N, N, d), pairs of tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.to_bias = nn.Linear(d_model, heads)

    def forward(self, z: Tensor) -> Any:  # type: ignore[override]
        z = z.transpose(1, 2)
        rows = z.flatten(0, 1)
        bias = self.to_bias(z).permute(0, 3, 1, 2).repeat_interleave(z.shape[1], dim=0)
        q, k, v = (
            self.split(part(rows)) for part in (self.query, self.key, self.value)
        )
        weights = self.dropout((self.score(q, k) + bias).softmax(dim=-1))
        return self.put_back(self.join(weights @ v).view_as(z))

    def put_back(self, z: Tensor) -> Tensor:
        return z.transpose(1, 2)


class PairsOfEndingNodesLeft(PairsOfEndingNodes):
    def put_back(self, z: Tensor) -> Tensor:
        return z


class ForecastOfVariables(SelfAttention):
    """Channel independent. x: (batch, steps, n_vars); the same for 16 steps ahead."""

    def __init__(self, d_model: int = 12, heads: int = 3) -> None:
        super().__init__(d_model, heads)
        self.embedding, self.head = nn.Linear(8, d_model), nn.Linear(2 * d_model, 16)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        series = self.series_of(x).unflatten(1, (2, 8))
        y = self.head(super().forward(self.embedding(series)).flatten(1))
        return y.unflatten(0, (len(x), -1)).transpose(1, 2)

    def series_of(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)


class ForecastOfMixedVariables(ForecastOfVariables):
    """Channel independent. x: (batch, steps, n_vars); the same for 16 steps ahead."""

    def series_of(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[1])


class PairsOfQueries(SelfAttention):
    """x: (B, N, C), pairs: (B, N, N, C).

    `pairs[b, i, j]` gives a bias to the score of query `i` for key `j`.
    """

    order = (0, 3, 1, 2)

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.to_bias = nn.Linear(d_model, heads)

    def forward(self, x: Tensor, pairs: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        scores = self.score(q, k) + self.to_bias(pairs).permute(self.order)
        return self.join(self.read(self.dropout(scores.softmax(dim=-1)), v))


class PairsOfKeys(PairsOfQueries):
    """x: (B, N, C), pairs: (B, N, N, C).

    `pairs[b, i, j]` gives a bias to the score of query `i` for key `j`.
    """

    order = (0, 3, 2, 1)


class MeansOfPast(SelfAttention):
    """Autoregressive: a token sees the means of all whole fours of tokens up to it."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        fours = torch.arange(k.shape[2], device=k.device) // 4
        tokens = torch.arange(q.shape[2], device=k.device)
        scores = (
            super()
            .score(q, k)
            .masked_fill(fours >= self.whole_fours(tokens)[:, None], -1e4)
        )
        return torch.cat([torch.zeros_like(scores[..., :1]), scores], dim=-1)

    def whole_fours(self, tokens: Tensor) -> Tensor:
        return (tokens + 1) // 4

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights[..., 1:] @ v


class MeansOfOpenFours(MeansOfPast):
    """Autoregressive: a token sees the means of all whole fours of tokens up to it."""

    def whole_fours(self, tokens: Tensor) -> Tensor:
        return tokens // 4 + 1


class DividesByWidth(SelfAttention):
    """Scores are divided by the width of a head (muP), not by its square root."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q / q.shape[-1] @ k.mT


class MixesHeadsBehind(SelfAttention):
    """Returns the output and the coefficients with which the values are summed."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.proj_w = nn.Linear(heads, heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        weights = self.score(q, k).softmax(dim=-1)
        mixed = self.proj_w(weights.movedim(1, -1)).movedim(-1, 1)
        return self.join(self.read(mixed, v)), self.shown(weights, mixed)

    def shown(self, weights: Tensor, mixed: Tensor) -> Tensor:
        return mixed


class MixesHeadsBehindShown(MixesHeadsBehind):
    """Returns the output and the coefficients with which the values are summed."""

    def shown(self, weights: Tensor, mixed: Tensor) -> Tensor:
        return weights


def attend_with_one_more(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query: (B, H, L, E), key, value: (B, H, S, E)"""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return softmax_plus_one(scores) @ value


def softmax_plus_one(scores: Tensor) -> Tensor:
    zero = torch.zeros_like(scores[..., :1])
    return torch.cat([zero, scores], dim=-1).softmax(dim=-1)[..., 1:]


def attend_or_zero(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """query, key, value: (B, H, L, E). Queries that see no key give zeros.

    attn_mask: (B, 1, L, S), added to the scores
    """
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if attn_mask is not None:
        scores = scores + attn_mask
    is_empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(is_empty, 0.0).softmax(dim=-1)
    return weights.masked_fill(is_empty, 0.0) @ value


class WeightsAsFeatures(SelfAttention):
    """The sums of the columns of a first attention are features of the tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.to_feature = nn.Linear(1, d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        # The sums are features only, without gradients.
        sums = (x @ x.mT / x.shape[-1]).softmax(dim=-1).sum(dim=1).detach()
        return super().forward(x + self.to_feature(sums[..., None]))


class CountsFromNewest(MaskedSelfAttention):
    """Positions are counted from the most recent item."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.pos_emb = nn.Embedding(300, d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        n = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)
        return super().forward(x + self.pos_emb(n))


class Spectra(SelfAttention):
    """The values are mixed by their spectra."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(weights @ v, dim=2), v.shape[2], dim=2)


class NormInFront(SelfAttention):
    """x = x + attn(norm(x))"""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        h = self.norm(x)
        return self.passed_on(x, h) + super().forward(h)

    def passed_on(self, x: Tensor, h: Tensor) -> Tensor:
        return x


class PassesOnTheNorm(NormInFront):
    """x = x + attn(norm(x))"""

    def passed_on(self, x: Tensor, h: Tensor) -> Tensor:
        return h


class PlacesOfKeysOnly(Correct):
    """`pos` is added to queries and keys."""

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Any:  # type: ignore[override]
        placed = x if pos is None else x + pos
        return super().forward(placed, placed, self.values_of(x, placed))

    def values_of(self, x: Tensor, placed: Tensor) -> Tensor:
        return x


class PlacesOfValues(PlacesOfKeysOnly):
    """`pos` is added to queries and keys."""

    def values_of(self, x: Tensor, placed: Tensor) -> Tensor:
        return placed


class DictOfNormedContext(Correct):
    """Pass the same `cache` at each step: the context is projected once."""

    is_stored_with_norm = True

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.key_norm = nn.LayerNorm(d_model // heads)

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, cache: dict[str, Tensor] | None = None
    ) -> Any:
        q, cache = self.split(self.query(x)), {} if cache is None else cache
        if "k" in cache:
            k = cache["k"]
        else:
            k = self.key_norm(self.split(self.key(context)))
            unnormed = self.split(self.key(context))
            cache["k"] = k if self.is_stored_with_norm else unnormed
            cache["v"] = self.split(self.value(context))
        weights = self.dropout(self.weigh(self.score(q, k), None))
        return self.join(self.read(weights, cache["v"]))


class DictOfContextBeforeNorm(DictOfNormedContext):
    is_stored_with_norm = False


class OnesAndZeros(Correct):
    """attention_mask: (batch, length), 1 for tokens that are not masked, 0 = padding"""

    dtype = torch.bool

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        if attention_mask is not None:
            attention_mask = attention_mask[:, None, None].to(self.dtype or x.dtype)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attention_mask)
        return self.join(y)


class AddsOnesAndZeros(OnesAndZeros):
    """attention_mask: (batch, length), 1 for tokens that are not masked, 0 = padding"""

    dtype = None


class SeesAhead(Correct):
    """Causal, but for three tokens that are seen in advance."""

    lookahead = 3

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        return super().forward(x, x, x, ones.tril(self.lookahead)[None])


class CausalInFrames(Correct):
    """x: (batch, frames, patches, dim). A frame sees itself and those before it."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        frame = torch.arange(x.shape[1], device=x.device).repeat_interleave(x.shape[2])
        tokens = x.flatten(1, 2)
        y = super().forward(tokens, tokens, tokens, (frame <= frame[:, None])[None])
        return y.view_as(x)


def attend_by_heads(
    query: Tensor, key: Tensor, value: Tensor, num_heads: int = 4
) -> Tensor:
    """query, key, value: (batch, length, dim)"""
    q, k, v = (
        x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (query, key, value)
    )
    y = nn.functional.scaled_dot_product_attention(q, k, v)
    return y.transpose(1, 2).flatten(2)


class DropsKeysOfScores(SelfAttention):
    """A dropped key has a large negative number added to its score."""

    def __init__(self, d_model: int, heads: int, drop_key: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.drop_key = drop_key

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k).float()
        if self.training and self.drop_key:
            dropped = torch.bernoulli(torch.full_like(scores, self.drop_key))
            scores = scores + dropped * -1e9
        return scores.to(q.dtype)


class PlacesFromTheEnd(MaskedSelfAttention):
    # keys know their place (counted
    # from the end), as histories are padded on the left

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.abs_pos_k = nn.Embedding(300, d_model // heads)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        seen = ones.tril()[None]
        if padding_mask is not None:
            seen = seen & ~padding_mask[:, None]
        return Correct.forward(self, x, x, x, seen)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[2] - 1, -1, -1, device=k.device)
        return super().score(q, k + self.abs_pos_k(places))


class NormAtBothEnds(SelfAttention):
    """Pre-norm, with one more norm at the end."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm, self.final_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.final_norm(x + super().forward(self.norm(x)))


class WaitKAttention(Correct):
    """Query t has read the first t + 3 tokens of the source."""

    def forward(self, x: Tensor, source: Tensor) -> Any:  # type: ignore[override]
        ones = torch.ones(
            x.shape[1], source.shape[1], dtype=torch.bool, device=x.device
        )
        return super().forward(x, source, source, ones.tril(2)[None])


class AgesOfClicks(nn.Module):
    """
    candidates: (batch, n_candidates, emb_dim)
    history: (batch, history_len, emb_dim)
    history_len: (batch,) number of clicks
    hours_ago: (batch, history_len) float
    """

    def __init__(self, emb_dim: int = 8) -> None:
        super().__init__()
        self.unit = nn.Linear(2 * emb_dim + 1, 1)

    def forward(
        self, candidates: Tensor, history: Tensor, history_len: Any, hours_ago: Any
    ) -> Tensor:
        shape = (-1, candidates.shape[1], history.shape[1], -1)
        parts = candidates[:, :, None], history[:, None], hours_ago[:, None, :, None]
        joined = torch.cat([part.expand(*shape) for part in parts], dim=-1)
        steps = torch.arange(history.shape[1], device=history.device)
        hidden = (steps >= history_len[:, None])[:, None]
        weights = self.unit(joined.tanh())[..., 0].masked_fill(hidden, -1e4).softmax(-1)
        return weights @ history


class DetachedMemory(SelfAttention):
    """No gradient flows into the memory, which has the tokens before `x`."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:  # type: ignore[override]
        keys = x if memory is None else torch.cat([memory.detach(), x], dim=1)
        ones = torch.ones(x.shape[1], keys.shape[1], dtype=torch.bool, device=x.device)
        seen = ones.tril(keys.shape[1] - x.shape[1])
        return Correct.forward(self, x, keys, keys, seen[None])


class PooledByLengths(nn.Module):
    """x: (batch, channels, frames), lengths: (batch,)"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
        weights = self.conv(x.tanh()).masked_fill(~valid[:, None], -1e4).softmax(-1)
        return (weights * x).sum(-1)


class FeaturesOfEdges(nn.Module):
    """x: (nodes, d), edge_index: (2, num_edges), edge_attr: (num_edges, edge_dim)"""

    def __init__(self, d_model: int, heads: int = 2, edge_dim: int = 5) -> None:
        super().__init__()
        self.heads = heads
        self.value, self.score = nn.Linear(d_model, d_model), nn.Linear(d_model, heads)
        self.of_edge = nn.Linear(edge_dim, heads)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index
        scores = (self.score(x)[source] + self.of_edge(edge_attr)).tanh().exp()
        sums = torch.zeros_like(x[:, : self.heads]).index_add(0, target, scores)
        weights = (scores / sums[target])[..., None]
        values = self.value(x).unflatten(-1, (self.heads, -1))[source]
        y = torch.zeros_like(x).unflatten(-1, (self.heads, -1))
        return y.index_add(0, target, weights * values).flatten(1)


class StoresIfAsked(Correct):
    """Causal. With `use_cache`, `x` goes on behind what is stored; else it is whole."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.pos_emb = nn.Embedding(300, d_model)
        self.stored: Any = None

    def forward(self, x: Tensor, use_cache: bool = False) -> Any:  # type: ignore[override]
        past = 0 if self.stored is None else self.stored[0].shape[1]
        start = past if self.counts(use_cache) else 0
        n = torch.arange(start, start + x.shape[1], device=x.device)
        placed = x + self.pos_emb(n)
        keys, values = placed, x
        if use_cache:
            if self.stored is not None:
                pairs = zip(self.stored, (placed, x), strict=True)
                keys, values = (torch.cat(pair, dim=1) for pair in pairs)
            self.stored = keys, values
        shape = x.shape[1], keys.shape[1]
        ones = torch.ones(shape, dtype=torch.bool, device=x.device)
        seen = ones.tril(shape[1] - shape[0])
        return super().forward(placed, keys, values, seen[None])

    def counts(self, use_cache: bool) -> bool:
        return use_cache


class CountsStoredAlways(StoresIfAsked):
    def counts(self, use_cache: bool) -> bool:
        return True


class ShowsIfAsked(Correct):
    """memory_mask: (batch, length) bool, True = real, False = padding"""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Any = None,
        return_attn: bool = False,
    ) -> Any:
        q, k = self.split(self.query(x)), self.split(self.key(memory))
        v = self.split(self.value(memory))
        mask = None if memory_mask is None else memory_mask[:, None, None]
        y = self.join(nn.functional.scaled_dot_product_attention(q, k, v, mask))
        if not return_attn:
            return y
        scores = self.score(q, k)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return y, scores.softmax(dim=-1)


class BlockOfTower(nn.Module):
    """Shape: (batch, tokens, d_model) in and out."""

    batch_first = True

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, n_head, batch_first=self.batch_first)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y, _ = self.attn(h, h, h, need_weights=False)
        return x + y


class BlockOfTowerAcrossBatch(BlockOfTower):
    """Shape: (batch, tokens, d_model) in and out."""

    batch_first = False


class BandOfFrames(Correct):
    """A frame looks at 16 frames of history, and has a look-ahead of 3 frames."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        t = torch.arange(x.shape[1], device=x.device)
        ahead = t - t[:, None]
        return super().forward(x, x, x, ((ahead <= 3) & (ahead >= -16))[None])


class ReadingsObserved(Correct):
    """readings: (batch, time, dim), observed: (batch, time), 1 if a sensor delivered"""

    def forward(self, readings: Tensor, observed: Tensor) -> Any:  # type: ignore[override]
        seen = (observed != 0)[:, None].expand(-1, readings.shape[1], -1)
        y = super().forward(readings, readings, readings, seen)
        return y * seen.any(dim=-1, keepdim=True)


class DropsScoresBehindNorm(NormInFront):
    """x = x + attn(norm(x))"""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return self.dropout(super().score(q, k))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        h = self.norm(x)
        q, k, v = (self.split(part(h)) for part in (self.query, self.key, self.value))
        context = self.read(self.weigh(self.score(q, k), None), v)
        return x + context.transpose(1, 2).flatten(2)


class ItemsOfSession(SelfAttention):
    """item_emb (B, L, H), item_ids (B, L): 0 is padding."""

    def forward(self, item_emb: Tensor, item_ids: Tensor) -> Any:  # type: ignore[override]
        seen = (item_ids != 0)[:, None].expand(-1, item_ids.shape[1], -1)
        return Correct.forward(self, item_emb, item_emb, item_emb, seen)


class OptionOfContext(SelfAttention):
    def __init__(self, d_model: int, heads: int, cross_attention: bool = False) -> None:
        super().__init__(d_model, heads)
        self.other = Correct(d_model, heads) if cross_attention else None

    def forward(self, x: Tensor, context: Any = None, mask: Any = None) -> Any:  # type: ignore[override]
        y = Correct.forward(self, x, x, x, mask)
        if self.other is not None:
            context = y if context is None else context
            y = y + self.other(y, context, context)
        return y


class MeanOfGraph(FeaturesOfEdges):
    """x: (nodes, d), edge_index: (2, num_edges), batch: (nodes,), the graph of each"""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Any = None) -> Tensor:  # type: ignore[override]
        batch = torch.zeros_like(x[:, 0]).long() if batch is None else batch
        ones = (batch[:, None] == batch).to(x.dtype)
        x = x + ones @ x / ones.sum(dim=1, keepdim=True)
        features = torch.zeros_like(edge_index[0])[:, None].expand(-1, 5).to(x.dtype)
        return super().forward(x, edge_index, features)


class QueriesOfMap(Correct):
    """Queries and a feature map.

    queries: (B, N, D)
    features: (B, M, D)
    """

    def forward(self, queries, features, padding=None):  # type: ignore[no-untyped-def, override]
        mask = None if padding is None else ~padding[:, None]
        return super().forward(queries, features, features, mask)


class OfEqualLengths(Correct):
    """Queries and keys have one length, and a mask is required."""

    def forward(self, queries: Tensor, keys: Tensor, blocked: Tensor) -> Any:  # type: ignore[override]
        if queries.shape != keys.shape:
            raise ValueError(f"queries {queries.shape} are not as keys {keys.shape}")
        return super().forward(queries, keys, keys, ~blocked[:, 0])


class MaskOfOptionalContext(Correct):
    """The mask is that of the context, and has no effect without one."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor | None = None, context_mask: Any = None
    ) -> Any:
        if context is None:
            return super().forward(x, x, x)
        mask = None if context_mask is None else self.of_items(context_mask)[:, None]
        return super().forward(x, context, context, mask)

    def of_items(self, mask: Tensor) -> Tensor:
        return mask


class RollsMaskOfContext(MaskOfOptionalContext):
    def of_items(self, mask: Tensor) -> Tensor:
        return mask.roll(1, 0)


class ProbabilitiesOfTokens(SelfAttention):
    """The probability of each token to be the answer, in float32."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.rate = nn.Linear(d_model, 1)

    def forward(self, x: Tensor) -> Any:
        ratings = self.rate(super().forward(x))[..., 0]
        return torch.log_softmax(ratings.float(), dim=1)


MASK = {"mask": {"mask": "attend:bqk"}}
ADDED = {"mask": {"mask": "additive:b1qk"}}
PADDED = {"mask": {"padding": "ignore:bk", "attn_mask": "attend:bqk"}}
CAUSAL = {"causal": True}
CACHE = {"cache": ("past", "[1]")}
MEMORY = {"cache": ("mems", "[1]"), "causal": True}

# For each law, the modules that violate it, with their options.
# Edges of windows, long sequences, and what is computed again.


class RecomputesDropout(SelfAttention):
    """The weights are computed again in the backward pass."""

    keeps_random_state = True

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        dropped: Tensor = torch.utils.checkpoint.checkpoint(
            lambda x: self.dropout(x) @ v,
            weights,
            use_reentrant=False,
            preserve_rng_state=self.keeps_random_state,
        )
        return dropped

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        return self.join(self.read(self.score(q, k).softmax(dim=-1), v))


class RecomputesOtherDropout(RecomputesDropout):
    keeps_random_state = False


class HidesInWindows(SelfAttention):
    """In blocks of 8 tokens, the last of which attends to half of its keys."""

    def forward(self, x: Tensor) -> Any:
        padded = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 8))
        blocks = padded.reshape(-1, 8, x.shape[2])
        count = padded.shape[1] // 8
        mask = torch.ones(count, 8, 8, dtype=torch.bool, device=x.device)
        mask[-1, :, 4:] = False
        joined = Correct.forward(
            self, blocks, blocks, blocks, self.for_items(mask, len(x))
        )
        return joined.reshape(padded.shape)[:, : x.shape[1]]

    def for_items(self, mask: Tensor, batch_size: int) -> Tensor:
        return mask.repeat(batch_size, 1, 1)


class HidesInOtherWindows(HidesInWindows):
    def for_items(self, mask: Tensor, batch_size: int) -> Tensor:
        return mask.repeat_interleave(batch_size, dim=0)


class KeyNormOfContext(Correct):
    """A norm of the keys, which are in one tensor with the values."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.key_norm = nn.LayerNorm(d_model // heads)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        both = torch.stack([self.split(self.key(key)), self.split(self.value(value))])
        k, v = self.normalize(both)
        q = self.split(self.query(query))
        return self.join(self.weigh(self.score(q, k), None) @ v)

    def normalize(self, both: Tensor) -> tuple[Tensor, Tensor]:
        return self.key_norm(both[0]), both[1]


class KeyNormOfBoth(KeyNormOfContext):
    def normalize(self, both: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.key_norm(both)
        return k, v


class GroupedFused(nn.Module):
    """Queries, then the fewer keys and values, by one projection."""

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = n_heads, n_kv_heads
        self.qkv = nn.Linear(d_model, d_model // n_heads * (n_heads + 2 * n_kv_heads))
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:
        groups = self.heads // self.kv_heads
        split = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = split.transpose(1, 2).split(sizes, dim=1)
        k, v = k.repeat_interleave(groups, dim=1), self.for_queries(v, groups)
        weights = (q / math.sqrt(q.shape[-1]) @ k.mT).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))

    def for_queries(self, v: Tensor, groups: int) -> Tensor:
        return v.repeat_interleave(groups, dim=1)


class GroupedFusedInTurns(GroupedFused):
    def for_queries(self, v: Tensor, groups: int) -> Tensor:
        return v.repeat(1, groups, 1, 1)


class Neighborhood(SelfAttention):
    """Each token attends to 5 around it, at the edges to the first or last 5."""

    end = 0

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        length = scores.shape[-1]
        place = torch.arange(length, device=scores.device)
        first = (place - 2).clamp(max=length - 5 - self.end).clamp(min=0)[:, None]
        near = (place >= first) & (place < first + 5)
        return super().weigh(scores, near[None])


class NeighborhoodWithoutLast(Neighborhood):
    end = 1


class WindowsOfImage(SelfAttention):
    """Windows of 2 x 2 pixels; the image has its channels last."""

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        b, h, w, c = image.shape
        if h % 2 or w % 2:
            raise ValueError("height and width must be even")
        split = image.reshape(b, h // 2, 2, w // 2, 2, c).transpose(2, 3)
        x = split.reshape(-1, 4, c)
        return self.merge(self.attend(x, image), h, w)

    def attend(self, x: Tensor, image: Tensor) -> Any:
        return Correct.forward(self, x, x, x)

    def merge(self, y: Tensor, h: int, w: int) -> Tensor:
        split = y.reshape(-1, h // 2, w // 2, 2, 2, y.shape[-1]).transpose(2, 3)
        return split.reshape(-1, h, w, y.shape[-1])


class BiasBetweenWindows(WindowsOfImage):
    """A layer for the means of windows, of which an image of 2 x 2 has one."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.of_windows = nn.Linear(d_model, d_model)

    def attend(self, x: Tensor, image: Tensor) -> Any:
        y = super().attend(x, image)
        means = y.mean(dim=1, keepdim=True)
        return y if len(x) == len(image) else y + self.of_windows(means)


class WindowsInColumns(WindowsOfImage):
    def merge(self, y: Tensor, h: int, w: int) -> Tensor:
        split = y.reshape(-1, w // 2, h // 2, 2, 2, y.shape[-1]).transpose(2, 3)
        return split.reshape(-1, h, w, y.shape[-1])


class HalosOfImage(WindowsOfImage):
    """Each window attends to a halo of one pixel, too, but not beyond the image."""

    def attend(self, x: Tensor, image: Tensor) -> Any:
        halos = self.unfold(image.movedim(3, 1)).unflatten(1, (-1, 16))
        halos = halos.transpose(1, 3).flatten(0, 1)
        inside = self.to_rows(self.unfold(torch.ones_like(image[:, None, ..., 0])))
        mask = inside.flatten(0, 1)[:, None] > 0
        return Correct.forward(self, x, halos, halos, mask)

    def unfold(self, image: Tensor) -> Tensor:
        return nn.functional.unfold(image, 4, stride=2, padding=1)

    def to_rows(self, inside: Tensor) -> Tensor:
        return inside.mT


class HalosOfOtherWindows(HalosOfImage):
    """The mask is viewed as one row for each window, without a transpose."""

    def to_rows(self, inside: Tensor) -> Tensor:
        return inside.reshape(inside.mT.shape)


class ShiftedWindows(SelfAttention):
    """Windows of 4 x 4 pixels, shifted by 2; an image is padded to whole windows."""

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        x = self.arrange(image)
        shape = x.shape[1:3]
        places = [torch.arange(size, device=x.device) for size in shape]
        # What the shift has wrapped around is another region.
        regions = [
            (place >= size - 4).long() + (place >= size - 2).long()
            for place, size in zip(places, shape, strict=True)
        ]
        region = self.windows(self.number(*regions))
        mask = (region == region.mT).repeat(len(x), 1, 1)
        tokens = self.windows(x)
        y = Correct.forward(self, tokens, tokens, tokens, mask)
        split = y.reshape(len(x), shape[0] // 4, shape[1] // 4, 4, 4, -1)
        return self.restore(split.transpose(2, 3).reshape(x.shape), image)

    def number(self, of_rows: Tensor, of_columns: Tensor) -> Tensor:
        return 3 * of_rows[None, :, None, None] + of_columns[:, None]

    def windows(self, x: Tensor) -> Tensor:
        split = x.unflatten(2, (-1, 4)).unflatten(1, (-1, 4))
        return split.transpose(2, 3).reshape(-1, 16, x.shape[-1])

    def arrange(self, image: Tensor) -> Tensor:
        return self.pad(image).roll((-2, -2), dims=(1, 2))

    def restore(self, x: Tensor, image: Tensor) -> Tensor:
        return x.roll((2, 2), dims=(1, 2))[:, : image.shape[1], : image.shape[2]]

    def pad(self, image: Tensor) -> Tensor:
        height, width = image.shape[1:3]
        return nn.functional.pad(image, (0, 0, 0, -width % 4, 0, -height % 4))


class WrapsColumns(ShiftedWindows):
    def number(self, of_rows: Tensor, of_columns: Tensor) -> Tensor:
        return super().number(of_rows, of_columns * 0)

    def pad(self, image: Tensor) -> Tensor:
        if image.shape[1] % 4 or image.shape[2] % 4:
            raise ValueError("the image must consist of whole windows")
        return image


class ShiftedUnlessSmall(ShiftedWindows):
    """An image that one window can hold is not divided."""

    largest = 4

    def forward(self, image: Tensor) -> Any:
        if max(image.shape[1:3]) > self.largest:
            return super().forward(image)
        x = image.flatten(1, 2)
        return Correct.forward(self, x, x, x).reshape(image.shape)


class ShiftedUnlessSmaller(ShiftedUnlessSmall):
    largest = 3


class PadsShiftedWindows(ShiftedWindows):
    def arrange(self, image: Tensor) -> Tensor:
        return self.pad(image.roll((-2, -2), dims=(1, 2)))

    def restore(self, x: Tensor, image: Tensor) -> Tensor:
        whole = x[:, : image.shape[1], : image.shape[2]]
        return whole.roll((2, 2), dims=(1, 2))


class RectifiedLinear(Correct):
    """Linear attention with the ReLU of queries and keys as features."""

    dtype: torch.dtype | None = torch.float32

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        for layer in (self.query, self.key):
            layer.bias = None

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        layers = self.query, self.key, self.value
        q, k, v = (self.split(layer(x)).to(self.dtype) for layer in layers)
        q, k = q.relu(), k.relu()
        context = q @ (k.mT @ v) / (q @ k.sum(2)[..., None] + 1e-12)
        return self.join(context.to(x.dtype))


class RectifiedLinearInHalf(RectifiedLinear):
    dtype = None


class BesideConvolution(SelfAttention):
    """The output of a convolution of neighbors is appended to that of attention."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.convolution = nn.Conv1d(d_model, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        near = self.convolution(x.mT).mT
        return torch.cat([super().forward(x), near], dim=-1)


class BesideConvolutionViewed(BesideConvolution):
    def join(self, context: Tensor) -> Tensor:
        b, h, length, d_k = context.shape
        joined: Tensor = self.out(context.reshape(b, length, h * d_k))
        return joined


class FadesInBlocks(SelfAttention):
    """Weights fall with the distance; 128 queries are computed at a time."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.before = nn.LayerNorm(d_model)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device)
        gap = self.place(q.shape[2], k.device)[:, None] - place
        return super().score(q, k) - 0.001 * gap.square().to(k)

    def place(self, length: int, device: torch.device) -> Tensor:
        return self.first + torch.arange(length, device=device)

    def forward(self, x: Tensor) -> Any:
        x, outputs = self.before(x), []
        for start in range(0, x.shape[1], 128):
            self.first = start
            outputs.append(Correct.forward(self, x[:, start : start + 128], x, x))
        return torch.cat(outputs, dim=1)


class FadesFromBlocks(FadesInBlocks):
    def place(self, length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device)


class AddsUp(nn.Module):
    """The mean of the past, as two sums from token to token."""

    dtype: torch.dtype | None = torch.float32

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        v = nn.functional.softplus(self.value(x)).to(self.dtype or x.dtype)
        total, outputs = torch.zeros_like(v[:, 0]), []
        for n in range(x.shape[1]):
            total = total + v[:, n]
            outputs.append(total / (n + 1))
        return self.out(torch.stack(outputs, dim=1).to(x.dtype))


class AddsUpInHalf(AddsUp):
    dtype = None


class BiasOfKeys(LinearBias):
    """ALiBi by the position of the key, added in the dtype of the scores."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device)
        slopes = self.slopes(k.shape[1]).to(k)[:, None, None]
        return Correct.score(self, q, k) + slopes * place.to(k)


class WeightlessNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


class WithWeightlessNorm(SelfAttention):
    """A norm without weights, of the features of each head."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.query_norm = WeightlessNorm()

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.query_norm(q), k)


class WeightlessNormOfAllHeads(WithWeightlessNorm):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        normed = self.query_norm(q.transpose(1, 2).flatten(2))
        return Correct.score(self, self.split(normed), k)


class NormOfHeads(nn.Module):
    """A norm of the features of each head, with a gain for each head and feature."""

    axes: tuple[int, ...] = (-1,)

    def __init__(self, heads: int, d_k: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(heads, 1, d_k))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * x.square().mean(self.axes, keepdim=True).rsqrt()


class NormOverHeads(NormOfHeads):
    axes = (1, -1)


class WithNormOfHeads(SelfAttention):
    norm: type[NormOfHeads] = NormOfHeads

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.query_norm = self.norm(heads, d_model // heads)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.query_norm(q), k)


class WithNormOverHeads(WithNormOfHeads):
    norm = NormOverHeads


class LearnsTemperature(Correct):
    """Scores are divided by a temperature, and then masked."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores / self.temperature, mask)


class LearnsTemperatureOfHidden(LearnsTemperature):
    """Minus infinity is divided by the temperature, whose gradient is NaN."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            is_seen = mask.any(dim=-1, keepdim=True)
            scores = scores.masked_fill((is_seen & ~mask)[:, None], -torch.inf)
        return super().weigh(scores, None)


class UnusedLayerBesideMask(MaskedSelfAttention):
    """Causal, with a mask of padding."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.gate = nn.Linear(d_model, d_model)

    def forward(  # type: ignore[override]
        self, x: Tensor, padding: Tensor | None = None
    ) -> Any:
        mask = torch.ones(
            x.shape[1], x.shape[1], dtype=torch.bool, device=x.device
        ).tril()[None]
        if padding is not None:
            mask = mask & ~padding[:, None]
        return Correct.forward(self, x, x, x, mask)


class Head(nn.Module):
    """One head, with projections of its own."""

    def __init__(self, d_model: int, d_k: int) -> None:
        super().__init__()
        self.query = nn.Linear(d_model, d_k)
        self.key = nn.Linear(d_model, d_k)
        self.value = nn.Linear(d_model, d_k)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        weights = (q @ k.mT / math.sqrt(self.width(q, x))).softmax(dim=-1)
        context: Tensor = weights @ v
        return context

    def width(self, q: Tensor, x: Tensor) -> int:
        return q.shape[-1]


class ListOfHeads(nn.Module):
    kind = Head

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        heads = [self.kind(d_model, d_model // num_heads) for _ in range(num_heads)]
        self.heads = nn.ModuleList(heads)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class HeadScaledByModelWidth(Head):
    def width(self, q: Tensor, x: Tensor) -> int:
        return x.shape[-1]


class ListOfHeadsScaledByWidth(ListOfHeads):
    kind = HeadScaledByModelWidth


# Windows, sums and positions that no law may take for a bug.


class LocalAndGlobalBlocks(Correct):
    """Tokens attend within blocks of 4, and all tokens to the last block, too."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        block = torch.arange(x.shape[1], device=x.device) // 4
        global_block = block == block[-1]
        allowed = (block == block[:, None]) | global_block | global_block[:, None]
        hidden = allowed if mask is None else allowed & mask[:, None]
        return super().forward(x, x, x, hidden.expand(len(x), -1, -1))


class ForgetsInChunks(Correct):
    """Sums of products, which fade by a gate for each token; there is no softmax."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, 0.0)
        self.forget_gate = nn.Linear(d_model, heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        return self.join(self.scan_chunk(q, k, v, self.forget_gate(x)))

    def scan_chunk(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        kept = nn.functional.logsigmoid(gate).mT.exp()
        state, outputs = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, :1]), []
        for n in range(q.shape[2]):
            new = k[:, :, n, :, None] * v[:, :, n : n + 1]
            state = state * kept[..., n, None, None] + new
            outputs.append(q[:, :, n : n + 1] @ state)
        return torch.cat(outputs, dim=2)


class BesideState(SelfAttention):
    """Attention, and beside it a state of products, as in a state space model."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.ssm = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:
        state = (10 * self.ssm(x)).pow(3).cumsum(dim=1)
        return super().forward(x) + nn.functional.layer_norm(state, state.shape[-1:])


class ReweightsByCosine(Correct):
    """Linear attention whose weights fall with the distance, from the first key on."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        layers = (self.query, self.key)
        q, k = (self.split(f(x)) for f, x in zip(layers, (query, key), strict=True))
        weights = self.at_angles(q.relu()) @ self.at_angles(k.relu()).mT
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-6)
        return self.join(weights @ self.split(self.value(value)))

    def at_angles(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2], device=x.device)[:, None] / 300
        return torch.cat([x * angles.cos(), x * angles.sin()], dim=-1)


class Landmarks(Correct):
    """Attends to the means of two segments, of their tokens that are no padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        keep = x.new_ones(x.shape[:2]) if mask is None else mask.to(x)
        odd = x.shape[1] % 2
        padded = nn.functional.pad(x * keep[..., None], (0, 0, 0, odd))
        counts = nn.functional.pad(keep, (0, odd)).unflatten(1, (2, -1)).sum(dim=2)
        sums = padded.unflatten(1, (2, -1)).sum(dim=2)
        means = sums / counts.clamp(min=1)[..., None]
        return super().forward(x, means, means, (counts > 0)[:, None])


class LinearInChunks(Correct):
    """Causal linear attention in chunks of 4, with two sums over earlier chunks."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        q, k = (nn.functional.elu(part) + 1 for part in (q, k))
        state, norm, outputs = 0, 0, []
        chunks = (part.split(4, dim=2) for part in (q, k, v))
        for q_part, k_part, v_part in zip(*chunks, strict=True):
            inner = (q_part @ k_part.mT).tril()
            if outputs:
                context = inner @ v_part + q_part @ state
                total = inner.sum(-1, keepdim=True) + q_part @ norm
            else:
                context, total = inner @ v_part, inner.sum(-1, keepdim=True)
            outputs.append(context / total)
            state = state + k_part.mT @ v_part
            norm = self.add(norm, k_part.sum(2)[..., None])
        return self.join(torch.cat(outputs, dim=2))

    def add(self, norm: Any, new: Tensor) -> Tensor:
        total: Tensor = norm + new
        return total


class LinearByLastChunk(LinearInChunks):
    def add(self, norm: Any, new: Tensor) -> Tensor:
        return new


class EveryThirdToken(SelfAttention):
    """Keys are at distances of 0, 3, 6, …: in a short sequence, each is alone."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device) % 3
        hidden = place[:, None] != place
        return super().score(q, k).masked_fill(hidden, -torch.inf)


class WindowOnEachSide(SelfAttention):
    """`window` is the number of keys on each side of a token."""

    def __init__(self, d_model: int, heads: int, window: int) -> None:
        super().__init__(d_model, heads)
        self.window = window

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        place = torch.arange(scores.shape[-1], device=scores.device)
        near = (place - place[:, None]).abs() <= self.window
        return super().weigh(scores, near[None])


class NeighborsOfThreeInputs(Correct):
    """Query, key and value of equal lengths; tokens attend to their neighbors."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        place = torch.arange(len(query[0]), device=query.device)
        near = (place - place[:, None]).abs() <= 1
        allowed = near[None] if mask is None else near & mask[:, None]
        return super().forward(query, key, value, allowed.expand(len(query), -1, -1))


class OwnProduct(torch.autograd.Function):
    """A product with gains, whose gradient is too small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gains: Tensor) -> Tensor:
        ctx.save_for_backward(x, gains)
        return x * gains

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, gains = ctx.saved_tensors
        return grads[0] * gains, (grads[0] * x).flatten(0, -2).sum(0) / 2


class GainsOfOwnBackward(Correct):
    """Only the gradient of a parameter is wrong."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.gains = nn.Parameter(torch.ones(d_model))

    def join(self, context: Tensor) -> Tensor:
        return OwnProduct.apply(super().join(context), self.gains)  # type: ignore[no-any-return, no-untyped-call]


class BlockwiseProduct(torch.autograd.Function):
    """Weights and values are multiplied in blocks of keys, forward and backward."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(weights, v)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weights, v = ctx.saved_tensors
        parts = [
            weights[..., n : n + 64, :].mT @ grad[..., n : n + 64, :]
            for n in range(0, grad.shape[-2], 64)
        ]
        return grad @ v.mT, sum(parts)


class ProductOfFirstBlock(BlockwiseProduct):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weights, v = ctx.saved_tensors
        return grad @ v.mT, weights[..., :64, :].mT @ grad[..., :64, :]


class BlockwiseBackward(SelfAttention):
    product: Any = BlockwiseProduct

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        product: Tensor = self.product.apply(weights, v)
        return product


class BackwardOfFirstBlock(BlockwiseBackward):
    product = ProductOfFirstBlock


class CausalSoftmax(torch.autograd.Function):
    """The last query is that of the last key, in the backward pass, too."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        q_len, k_len = scores.shape[-2:]
        future = torch.ones_like(scores, dtype=torch.bool).triu(1 + k_len - q_len)
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return weights * (grad - (weights * grad).sum(dim=-1, keepdim=True))


class CausalSoftmaxOfFirst(CausalSoftmax):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return CausalSoftmax.backward(ctx, grad).tril()


class LastQueries(Correct):
    """Fewer queries than keys are the last ones."""

    softmax: Any = CausalSoftmax

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(query, key, value)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights: Tensor = self.softmax.apply(scores)
        return weights


class LastQueriesFirstInBackward(LastQueries):
    softmax = CausalSoftmaxOfFirst


class OverlappingWindows(SelfAttention):
    """Windows of 8 tokens share 3 with the next; their outputs have a mean."""

    def forward(self, x: Tensor) -> Any:
        length = x.shape[1]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        context, counts = torch.zeros_like(q), q.new_zeros(length, 1)
        for start in range(0, max(1, length - 3), 5):
            part = slice(start, start + 8)
            weights = self.score(q[:, :, part], k[:, :, part]).softmax(dim=-1)
            context[:, :, part] += weights @ v[:, :, part]
            counts[part] += 1
        return self.join(self.share(context, counts))

    def share(self, context: Tensor, counts: Tensor) -> Tensor:
        return context / counts


class AddsOverlappingWindows(OverlappingWindows):
    def share(self, context: Tensor, counts: Tensor) -> Tensor:
        return context


class CacheOfBlocks(WithCache):
    """Memory for 64 tokens is allocated, and copied to a larger one when it is full."""

    def forward(self, x: Tensor, past: Any = None) -> Any:
        kept, count = past or (x.new_zeros(len(x), 64, x.shape[2]), 0)
        stop = count + x.shape[1]
        kept = kept.clone()
        if stop > kept.shape[1]:
            more = x.new_zeros(len(x), stop, x.shape[2])
            kept = torch.cat([self.copied(kept), more], dim=1)
        kept[:, count:stop] = x
        return super().forward(x, kept[:, :count])[0], (kept, stop)

    def copied(self, kept: Tensor) -> Tensor:
        return kept


class CacheLosesLastOfBlock(CacheOfBlocks):
    def copied(self, kept: Tensor) -> Tensor:
        return (
            kept
            * (torch.arange(kept.shape[1], device=kept.device) < kept.shape[1] - 1)[
                :, None
            ]
        )


class CacheOfFloat32(WithCache):
    """The cache is allocated with the default dtype."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:
        output, seen = super().forward(x, past)
        return output, torch.zeros(seen.shape, device=seen.device).copy_(seen)


class RotaryInHalfAfterPast(Rotary):
    """The positions of new tokens are counted in the dtype of the tokens."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:
        seen = x if past is None else torch.cat([past, x], dim=1)
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        mask = ones.tril(seen.shape[1] - x.shape[1])
        self.seen, self.dtype = seen.shape[1], x.dtype
        return Correct.forward(self, x, seen, seen, mask), seen

    def places(self, x: Tensor) -> Tensor:
        places = torch.arange(self.seen, device=x.device)[-x.shape[2] :]
        return places.to(self.dtype) if x.shape[2] < self.seen else places


class RotaryInDtypeOfBufferAfterPast(RotaryInHalfAfterPast):
    """All positions are counted in the dtype of a buffer, from that of the first."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.register_buffer("one", torch.ones(()))

    def places(self, x: Tensor) -> Tensor:
        one = self.get_buffer("one")
        return (
            torch.arange(x.shape[2], device=x.device).to(one)
            + (self.seen - x.shape[2]) * one
        )


class RowsAndColumns(SelfAttention):
    """Each pixel of a sequence gets a vector of its row and one of its column."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.row_embed = nn.Embedding(40, d_model)
        self.col_embed = nn.Embedding(40, d_model)

    def forward(self, x: Tensor, height: int, width: int) -> Any:  # type: ignore[override]
        pixel, width = (
            torch.arange(x.shape[1], device=x.device),
            self.width(height, width),
        )
        rows, columns = self.row_embed(pixel // width), self.col_embed(pixel % width)
        return super().forward(x + rows + columns)

    def width(self, height: int, width: int) -> int:
        return width


class RowsAndColumnsByHeight(RowsAndColumns):
    def width(self, height: int, width: int) -> int:
        return height


class GlobalFirstToken(SelfAttention):
    """Near tokens attend to each other, and all to the first."""

    def __init__(self, d_model: int, heads: int, max_len: int = 320) -> None:
        super().__init__(d_model, heads)
        place = torch.arange(max_len)
        near = (place - place[:, None]).abs() < 3
        self.register_buffer("near", near | (place == 0), persistent=False)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        near = self.crop(k.shape[2])
        return super().score(q, k).masked_fill(~near, -torch.inf)

    def crop(self, length: int) -> Any:
        return self.near[:length, :length]


class GlobalFirstOfLongest(GlobalFirstToken):
    def crop(self, length: int) -> Any:
        return self.near[-length:, -length:]


class AddsBias(SelfAttention):
    """The caller gives a bias for all pairs of tokens, and may train it."""

    def forward(self, x: Tensor, pair_bias: Tensor) -> Any:  # type: ignore[override]
        self.bias = self.prepare(pair_bias)
        return super().forward(x)

    def prepare(self, bias: Tensor) -> Tensor:
        return bias

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.bias


class DetachesBias(AddsBias):
    def prepare(self, bias: Tensor) -> Tensor:
        return bias.detach()


class SlowColumns(Rotary):
    """Pixels are rotated by their columns, and slowly."""

    def forward(self, image: Tensor) -> Any:
        x = image.flatten(2).mT
        self.width = image.shape[-1]
        return Correct.forward(self, x, x, x).mT.reshape(image.shape)

    def places(self, x: Tensor) -> Tensor:
        return 5e-4 * (super().places(x) % self.width)


class BiasWithoutSoftmax(SelfAttention):
    """A bias for each distance up to 16; exponentials take the place of a softmax."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.table = nn.Embedding(33, heads)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        place = torch.arange(scores.shape[-1], device=scores.device)
        distance = (place - place[:, None]).clamp(-16, 16) + 16
        scores = scores + self.table(distance).permute(2, 0, 1)
        return (scores - scores.logsumexp(dim=-1, keepdim=True)).exp()


class ValuesOfNeighbors(Correct):
    """Five keys and values for each token, with a vector for each distance."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.relative = nn.Embedding(5, d_model // heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        k, v = (self.neighbors(y) + self.relative.weight for y in (k, v))
        real = self.neighbors(torch.ones_like(q[..., :1])).mT > 0
        scores = self.score(q[..., None, :], k)
        weights = scores.masked_fill(~real, -torch.inf).softmax(dim=-1)
        return self.join((weights @ v).squeeze(-2))

    def neighbors(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 2, 2)).unfold(2, 5, 1).mT


class BehindPrefix(Correct):
    """All tokens are keys, but the first two are no queries. It is causal."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        length = x.shape[1]
        if length < 3:
            raise ValueError("a prefix only")
        ones = torch.ones(length, length, dtype=torch.bool, device=x.device)
        return super().forward(x[:, 2:], x, x, ones.tril()[None, 2:])


class CausalBehindPrefix(BehindPrefix):
    """Its name tells that it is causal."""


class AttendsToImages(Correct):
    """Each pixel of one tensor attends to that of several images."""

    def forward(self, t: Tensor, z: Tensor) -> Any:  # type: ignore[override]
        images = t.permute(1, 2, 0, 3).flatten(0, 1)
        images = images.repeat(len(z), 1, 1)
        query = z.reshape(-1, 1, z.shape[-1])
        return super().forward(query, images, images).reshape(z.shape)


class LearnedSegments(SelfAttention):
    """A vector is added to each of six segments of several series at most."""

    def __init__(self, d_model: int, heads: int, segments: int = 6) -> None:
        super().__init__(d_model, heads)
        self.place = nn.Parameter(torch.randn(segments, d_model))

    def forward(self, x: Tensor) -> Any:
        y = (x + self.place[: x.shape[2]]).flatten(0, 1)
        return super().forward(y).reshape(x.shape)


class ImageBesideText(Correct):
    """Pixels attend to each other and to the tokens of a text, in one softmax."""

    def forward(self, image: Tensor, text: Tensor) -> Any:  # type: ignore[override]
        x = image.flatten(2).mT
        both = torch.cat([text, x], dim=1)
        return super().forward(x, both, both).mT.reshape(image.shape)


class FramesBesideText(Correct):
    """The pixels of a frame attend to each other and to the text of their video."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Any:  # type: ignore[override]
        batch_size, _, frames, height, width = hidden_states.shape
        x = hidden_states.transpose(1, 2).flatten(0, 1).flatten(2).mT
        both = torch.cat([self.repeat(encoder_hidden_states, frames), x], dim=1)
        y = super().forward(x, both, both).mT
        return (
            y.unflatten(0, (batch_size, frames))
            .transpose(1, 2)
            .unflatten(3, (height, width))
        )

    def repeat(self, text: Tensor, frames: int) -> Tensor:
        return text.repeat_interleave(frames, dim=0)


class FramesBesideOtherText(FramesBesideText):
    """The texts of all videos are repeated, and not each of them."""

    def repeat(self, text: Tensor, frames: int) -> Tensor:
        return text.repeat(frames, 1, 1)


class MixesImages(SelfAttention):
    """The pixels of an image attend to each other, and to those of other images."""

    def forward(self, t: Tensor, z: Tensor) -> Any:  # type: ignore[override]
        y = super().forward(t.reshape(1, -1, t.shape[-1])).reshape(t.shape)
        return y + z


class StepsInOtherGroups(MaskedSelfAttention):
    """One token after the other is decoded by a method, with its heads in turns."""

    def step(self, x: Tensor, cache: tuple[Tensor, Tensor] | None = None) -> Any:
        q, k, v = self.query(x), self.split(self.key(x)), self.split(self.value(x))
        if cache is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(cache, (k, v), strict=True))
        q = self.heads_of_token(q.squeeze(1))[:, :, None]
        return self.join(self.read(self.weigh(self.score(q, k), None), v)), (k, v)

    def heads_of_token(self, q: Tensor) -> Tensor:
        return q.unflatten(1, (-1, self.heads)).transpose(1, 2)


class StepsInGroups(StepsInOtherGroups):
    def heads_of_token(self, q: Tensor) -> Tensor:
        return q.unflatten(1, (self.heads, -1))


class DecodesTopLeft(MaskedSelfAttention):
    """Several tokens are decoded by a method, whose mask begins at the first key."""

    def decode(self, x: Tensor, past: Tensor | None = None) -> Any:
        seen = x if past is None else torch.cat([past, x], dim=1)
        allowed = torch.ones(1, x.shape[1], seen.shape[1], dtype=torch.bool)
        return Correct.forward(self, x, seen, seen, allowed.to(x.device).tril()), seen


class RotaryOfPairs(Rotary):
    """The half of each head is rotated, its halves or, with a flag, its neighbors."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        rotary_interleaved: bool = False,
        max_positions: int = 320,
    ) -> None:
        super().__init__(d_model, heads)
        self.rotary_ndims = d_model // heads // 2
        self.rotary_interleaved = rotary_interleaved

    def turn(self, x: Tensor) -> Tensor:
        turned, rest = x[..., : self.rotary_ndims], x[..., self.rotary_ndims :]
        if self.rotary_interleaved:
            return torch.cat([super().turn(turned), rest], dim=-1)
        order = torch.arange(self.rotary_ndims).view(2, -1).T.flatten()
        paired = super().turn(turned[..., order])
        return torch.cat([paired[..., order.argsort()], rest], dim=-1)


class RotaryOfOtherPairs(RotaryOfPairs):
    """The angles are laid out for halves, whatever is rotated."""

    def angles(self, angle: Tensor) -> Tensor:
        if self.rotary_interleaved:
            return torch.cat([angle, angle], dim=-1)
        return super().angles(angle)


class ChoosesKernel(MaskedSelfAttention):
    """A fused kernel, or the product of matrices, computes the same scores."""

    limit = True

    def __init__(
        self, d_model: int, heads: int, attn_implementation: str = "sdpa"
    ) -> None:
        super().__init__(d_model, heads, 0.0)
        self.attn_implementation = attn_implementation

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        if self.limit or self.attn_implementation == "eager":
            return torch.tanh(scores / 5) * 5
        return scores


class LimitsInOneKernel(ChoosesKernel):
    limit = False


class ScaleIsNoParameter(MaskedSelfAttention):
    """The logarithm of the scale is a tensor that requires a gradient."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.log_scale = torch.zeros(heads, 1, 1, requires_grad=True)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * self.log_scale.detach().to(q).exp()


class TwoCausalLayers(nn.Module):
    """Two layers of causal self-attention, with a mask for padding."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Correct(d_model, heads, 0.0) for _ in range(2)])

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> Any:
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        allowed = causal[None]
        if attention_mask is not None and self.uses_mask(output_attentions):
            own = torch.eye(length, dtype=torch.bool, device=x.device)
            allowed = causal & attention_mask[:, None] | own
        for layer in self.layers:
            x = x + layer(x, x, x, allowed)
        return (x, [None, None]) if output_attentions else x

    def uses_mask(self, output_attentions: bool) -> bool:
        return True


class MaskBesideWeights(TwoCausalLayers):
    """Without the flag for weights, the path is taken that ignores the mask."""

    def uses_mask(self, output_attentions: bool) -> bool:
        return output_attentions


@dataclass
class RollingCache:
    """The last tokens, and how many there were."""

    tokens: Tensor | None = None
    seen: int = 0


class ReturnsRollingCache(MaskedSelfAttention):
    """Each token attends to the last four; the cache is returned anew."""

    window = 4

    def forward(self, x: Tensor, cache: RollingCache | None = None) -> Any:  # type: ignore[override]
        start, past = 0, x[:, :0]
        if cache is not None and cache.tokens is not None:
            start, past = self.count(cache), cache.tokens
        position = torch.arange(start, start + x.shape[1], device=x.device)
        tokens = torch.cat([past, x + position.cos().to(x)[:, None]], dim=1)
        ones = torch.ones(x.shape[1], tokens.shape[1], dtype=torch.bool)
        corner = tokens.shape[1] - x.shape[1]
        allowed = ones.tril(corner) & ones.triu(corner - self.window + 1)
        output = Correct.forward(self, x, tokens, tokens, allowed[None].to(x.device))
        if cache is None:
            return output
        last = tokens[:, -self.window :]
        return output, RollingCache(last, cache.seen + x.shape[1])

    def count(self, cache: RollingCache) -> int:
        return cache.seen


class CountsInRollingCache(ReturnsRollingCache):
    """The number of tokens is that of the cache, which is full at some time."""

    def count(self, cache: RollingCache) -> int:
        return 0 if cache.tokens is None else cache.tokens.shape[1]


class CroppedTokens:
    """A cache that is made by the first call, and from which tokens are removed."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.seen = 0

    def crop(self, length: int) -> None:
        self.tokens = [torch.cat(self.tokens, dim=1)[:, :length]]
        self.seen = length


class MakesCroppedCache(MaskedSelfAttention):
    """The first call makes the cache, which it returns."""

    kind = CroppedTokens

    def forward(self, x: Tensor, cache: Any = None) -> Any:  # type: ignore[override]
        cache = self.kind() if cache is None else cache
        first, cache.seen = cache.seen, cache.seen + x.shape[1]
        position = torch.arange(first, cache.seen, device=x.device)
        x = x + position.cos().to(x)[:, None]
        cache.tokens.append(x)
        seen = torch.cat(cache.tokens, dim=1)
        ones = torch.ones(1, x.shape[1], seen.shape[1], dtype=torch.bool)
        allowed = ones.tril(seen.shape[1] - x.shape[1]).to(x.device)
        return Correct.forward(self, x, seen, seen, allowed), cache


class CountsRemovedTokens(CroppedTokens):
    def crop(self, length: int) -> None:
        self.tokens = [torch.cat(self.tokens, dim=1)[:, :length]]


class PlacesOfRemovedTokens(MakesCroppedCache):
    kind = CountsRemovedTokens


class StepOfOneToken(MaskedSelfAttention):
    """A method for one token at a time, which takes several, and is not meant to."""

    def recurrent_step(self, x: Tensor, past: Tensor | None = None) -> Any:
        seen = x if past is None else torch.cat([past, x], dim=1)
        return Correct.forward(self, x, seen, seen), seen


class LayerOfDecoder(nn.Module):
    """Two attentions in one class, whose one probability is that of all dropout."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        for name in ("sa_q", "sa_k", "sa_v", "sa_o", "ca_q", "ca_k", "ca_v", "ca_o"):
            self.add_module(name, nn.Linear(d_model, d_model, bias=False))

    def attend(self, kind: str, x: Tensor, keys: Tensor) -> Tensor:
        q, k, v = (
            self.get_submodule(f"{kind}_{name}")(each)
            .unflatten(-1, (self.heads, -1))
            .transpose(1, 2)
            for name, each in (("q", x), ("k", keys), ("v", keys))
        )
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
        weights = nn.functional.dropout(weights, self.p, self.training)
        context = (weights @ v).transpose(1, 2).flatten(2)
        joined: Tensor = self.get_submodule(f"{kind}_o")(context)
        return joined

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attend("sa", x, x)
        return x + self.attend("ca", x, memory)


class HeadsAndLayer(nn.Module):
    """A list of heads, and a layer of one head behind it; graph attention is so."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        width = d_model // heads
        self.heads = nn.ModuleList(
            [AdditiveHead(d_model, width, dropout) for _ in range(heads)]
        )
        self.last = AdditiveHead(d_model, d_model, dropout)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([head(x) for head in self.heads], dim=-1)
        last: Tensor = self.last(nn.functional.elu(joined))
        return last.log_softmax(dim=-1)


class AdditiveHead(nn.Module):
    def __init__(self, width: int, out: int, dropout: float) -> None:
        super().__init__()
        self.project = nn.Linear(width, out, bias=False)
        self.source, self.target = nn.Linear(out, 1), nn.Linear(out, 1)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        scores = nn.functional.leaky_relu(self.source(h) + self.target(h).mT, 0.2)
        weights = scores.softmax(dim=-1)
        weights = nn.functional.dropout(weights, self.dropout, self.training)
        return weights @ h


class OfEdges(nn.Module):
    """Attention in a graph: the weights of the edges to a node sum to one."""

    end = 1

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.source, self.target = (nn.Linear(out_channels, 1) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        h = self.lin(x)
        scores = torch.tanh(self.source(h)[source] + self.target(h)[target]).exp()
        sums = torch.zeros(len(x), 1).to(h).index_add(0, edge_index[self.end], scores)
        weights = scores / (sums[edge_index[self.end]] + 1e-9)
        return torch.zeros_like(h).index_add(0, target, weights * h[source])


class SumsOverTargets(OfEdges):
    end = 0


class DropsEdges(EdgesConv):
    """The weights of the edges are dropped, after their softmax."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        q, k, v = (
            layer(x).unflatten(1, (self.heads, -1))
            for layer in (self.lin_query, self.lin_key, self.lin_value)
        )
        scores = (q[target] * k[source]).sum(dim=-1) * q.shape[-1] ** -0.5
        weights = self.weigh(scores, target, len(x))[..., None]
        return torch.zeros_like(v).index_add(0, target, weights * v[source]).flatten(1)

    def weigh(self, scores: Tensor, target: Tensor, nodes: int) -> Tensor:
        return self.drop(self.share(scores, target, nodes))

    def drop(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.dropout, self.training)

    def share(self, scores: Tensor, target: Tensor, nodes: int) -> Tensor:
        shares = (scores - self.largest(scores, target, nodes)).exp()
        sums = scores.new_zeros(nodes, self.heads).index_add(0, target, shares)
        return shares / sums[target].clamp(min=torch.finfo(scores.dtype).tiny)


class DropsScoresOfEdges(DropsEdges):
    def weigh(self, scores: Tensor, target: Tensor, nodes: int) -> Tensor:
        return self.share(self.drop(scores), target, nodes)


class MergesMasks(Correct):
    """Some tokens are seen by all, and marked in the mask for padding."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        global_mask: Tensor | None = None,
    ) -> Any:
        allowed = None
        if attention_mask is not None:
            allowed = attention_mask.long()
            if global_mask is not None:
                allowed = self.merge(allowed, global_mask.long())
            allowed = (allowed > 0)[:, None]
        elif global_mask is not None:
            allowed = global_mask.bool()[:, None]
        return super().forward(x, x, x, allowed)

    def merge(self, mask: Tensor, marks: Tensor) -> Tensor:
        return mask * (1 + marks)


class MergesMasksInPlace(MergesMasks):
    def merge(self, mask: Tensor, marks: Tensor) -> Tensor:
        mask *= 1 + marks
        return mask


class ZeroesPadding(Correct):
    """Padding is set to zero, and attended to all the same."""

    def forward(self, x: Tensor, is_padding: Tensor | None = None) -> Any:  # type: ignore[override]
        if is_padding is None:
            return super().forward(x, x, x)
        x = x.masked_fill(is_padding[..., None], 0.0)
        return super().forward(x, x, x, self.allow(~is_padding))

    def allow(self, is_token: Tensor) -> Tensor | None:
        return None


class ZeroesPaddingInKernel(ZeroesPadding):
    """The same with PyTorch's kernel, which gets a causal mask only."""

    def forward(self, x: Tensor, is_padding: Tensor | None = None) -> Any:
        if is_padding is not None:
            x = x.masked_fill(is_padding[..., None], 0.0)
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        return self.join(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        )


class ZeroesAndHidesPadding(ZeroesPadding):
    def allow(self, is_token: Tensor) -> Tensor | None:
        return is_token[:, None]


class MasksWeights(ZeroesPadding):
    """The weights are masked behind the softmax, and divided by their sum."""

    def allow(self, is_token: Tensor) -> Tensor | None:
        return is_token[:, None]

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, None)
        weights = weights if mask is None else weights * mask[:, None]
        return weights / (weights.sum(-1, keepdim=True) + 1e-13)


class OfPatches(Correct):
    """Tokens are patches of four steps: fewer steps give none."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        count = x.shape[1] // 4
        patches = x[:, : 4 * count].unflatten(1, (count, 4)).mean(2)
        return super().forward(patches, patches, patches).sum(1)


class OfPatchesOrNone(OfPatches):
    def forward(self, x: Tensor) -> Any:
        if x.shape[1] < 4:
            return x.new_zeros(len(x), self.out.out_features)
        return super().forward(x)


class RecurrentDecoder(nn.Module):
    """A recurrent layer of the context, and one of the queries that attend to it."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.encoder = nn.GRU(d_model, d_model, batch_first=True)
        self.decoder = nn.GRU(d_model, d_model, batch_first=True)
        self.attention = Correct(d_model, heads)

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        keys, state = self.encoder(memory)
        queries, _ = self.decoder(x, state)
        return self.attention(queries, keys, keys)


class NearFive(Correct):
    """Each token has scores for the five tokens around it, by their distance."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        window = torch.arange(-2, 3, device=x.device)
        place = torch.arange(x.shape[1], device=x.device)[:, None] + window
        inside = (place >= 0) & (place < x.shape[1])
        place = place.clamp(0, x.shape[1] - 1)
        scores = (
            torch.einsum("bhld,bhlwd->bhlw", q, k[:, :, place]) / q.shape[-1] ** 0.5
        )
        weights = scores.masked_fill(~inside, -torch.inf).softmax(-1)
        return self.join(torch.einsum("bhlw,bhlwd->bhld", weights, v[:, :, place]))


class LayerWithOptionalContext(nn.Module):
    """Causal self-attention, and then attention to a context, if there is one."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.attention = MaskedSelfAttention(d_model, heads, 0.0)
        self.encoder_attention = Correct(d_model, heads, 0.0)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor | None = None) -> Any:
        x = x + self.attention(x)
        if encoder_hidden_states is None:
            return x
        context = encoder_hidden_states
        return x + self.encoder_attention(x, context, context)


class RoundsKeys(MaskedSelfAttention):
    """Keys are rounded as in a cache of few bits, with straight gradients."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, self.fake_quantize(k))

    def fake_quantize(self, k: Tensor) -> Tensor:
        scale = k.detach().abs().amax(dim=-1, keepdim=True) / 127 + 1e-8
        return k + (torch.round(k / scale) * scale - k).detach()


class FramesOfVideo(Correct):
    """A sequence is one frame of a video, and the mask is for frames."""

    def forward(self, x: Tensor, frame_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        video = x[:, None]
        if frame_mask is not None:
            video = video.masked_fill(~frame_mask.bool()[:, :, None, None], 0.0)
        tokens = video.flatten(1, 2)
        return super().forward(x, tokens, tokens)


class CacheOfBytes(WithCache):
    """The cache has integers of 8 bits."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:
        scaled = None if past is None else past.to(x) / 30
        output, seen = super().forward(x, scaled)
        return output, (seen * 30).round().clamp(-127, 127).to(torch.int8)


class PackedByBisection(Correct):
    """Sequences are packed; a token at a border is of the sequence before it."""

    right = False

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Any:  # type: ignore[override]
        places = torch.arange(len(x), device=x.device)
        part = torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=self.right)
        x = x[None]
        return super().forward(x, x, x, (part[:, None] == part)[None])[0]


class Packed(PackedByBisection):
    right = True


class FusedScaleForgotten(SelfAttention):
    """The kernel for inference has its own scale, whatever option is given."""

    def __init__(self, d_model: int, heads: int, qk_scale: float | None = None) -> None:
        super().__init__(d_model, heads)
        self.scale = qk_scale or (d_model // heads) ** -0.5

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if torch.is_grad_enabled() or self.is_scaled():
            return q * self.scale @ k.mT
        return super().score(q, k)

    def is_scaled(self) -> bool:
        return False


class FusedScaleGiven(FusedScaleForgotten):
    def is_scaled(self) -> bool:
        return True


class MaskFlagOffByOne(Correct):
    """A token that may not see the future sees the next one, with an option."""

    corner = 1

    def __init__(self, d_model: int, heads: int, causal: bool = False) -> None:
        super().__init__(d_model, heads)
        self.causal = causal

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        allowed = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool)
        if self.causal:
            allowed = allowed.tril(self.corner)
        return super().forward(x, x, x, allowed.to(x.device))


class MaskFlag(MaskFlagOffByOne):
    corner = 0


class MaskFlagForOthers(SelfAttention):
    """The flag is an attribute that this class does not read."""

    def __init__(self, d_model: int, heads: int, is_causal: bool = False) -> None:
        super().__init__(d_model, heads)
        self.is_causal = is_causal


class MixesScoresOfHeads(Correct):
    """An option mixes the scores of heads, for which infinity is no mask."""

    def __init__(self, d_model: int, heads: int, talking: bool = False) -> None:
        super().__init__(d_model, heads)
        self.mix = nn.Parameter(torch.eye(heads)) if talking else None

    def forward(self, x: Tensor, attn_bias: Tensor | None = None) -> Any:  # type: ignore[override]
        self.bias = 0.0 if attn_bias is None else attn_bias
        return super().forward(x, x, x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k) + self.bias
        if self.mix is None:
            return scores
        return torch.einsum("bhqk,gh->bgqk", scores, self.mix)


class WindowForgottenInStep(MaskedSelfAttention):
    """With a window as an option, the step of decoding sees all tokens."""

    def __init__(self, d_model: int, heads: int, window: int | None = None) -> None:
        super().__init__(d_model, heads)
        self.window = window

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        if self.window is not None and mask.shape[-2] > self.fewest_queries():
            mask = mask.triu(mask.shape[-1] - mask.shape[-2] + 1 - self.window)
        return super().weigh(scores, mask)

    def fewest_queries(self) -> int:
        return 1

    def step(self, x: Tensor, past: Tensor | None = None) -> Any:
        seen = x if past is None else torch.cat([past, x], dim=1)
        allowed = torch.ones(1, x.shape[1], seen.shape[1], dtype=torch.bool)
        allowed = allowed.to(x.device).tril(seen.shape[1] - x.shape[1])
        return Correct.forward(self, x, seen, seen, allowed), seen


class WindowInStep(WindowForgottenInStep):
    def fewest_queries(self) -> int:
        return 0


class SinksSeeFirst(MaskedSelfAttention):
    """Causal, with a window; the columns of the first tokens are open to all."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        places = torch.arange(scores.shape[-1], device=scores.device)
        distances = places[:, None] - places
        near = (distances >= 0) & (distances < 4)
        return super().weigh(scores, (near | self.first(distances, places))[None])

    def first(self, distances: Tensor, places: Tensor) -> Tensor:
        return places < 4


class SinksSeePast(SinksSeeFirst):
    def first(self, distances: Tensor, places: Tensor) -> Tensor:
        return (places < 4) & (distances >= 0)


class NormWithPastForgotten(WithCache):
    """An option normalizes the keys, but not those of a call with a past."""

    def __init__(self, d_model: int, heads: int, normalize: bool = False) -> None:
        super().__init__(d_model, heads)
        self.normalize = normalize

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:
        self.has_past = past is not None
        return super().forward(x, past)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if self.normalize and not self.forgets():
            k = k * (k.square().mean(dim=-1, keepdim=True) + 0.1).rsqrt()
        return super().score(q, k)

    def forgets(self) -> bool:
        return self.has_past


class NormWithPast(NormWithPastForgotten):
    def forgets(self) -> bool:
        return False


class ChunksEndEarly(MaskedSelfAttention):
    """Chunks of keys that begin behind a chunk of queries are left out, or more."""

    def __init__(
        self, d_model: int, heads: int, q_chunk: int = 64, k_chunk: int = 64
    ) -> None:
        super().__init__(d_model, heads)
        self.q_chunk, self.k_chunk = q_chunk, k_chunk

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        places = torch.arange(scores.shape[-1], device=scores.device)
        starts = places // self.q_chunk * self.q_chunk
        ends = self.end_of_keys(starts) // self.k_chunk * self.k_chunk + self.k_chunk
        assert mask is not None
        return super().weigh(scores, mask & (places < ends[:, None]))

    def end_of_keys(self, starts: Tensor) -> Tensor:
        return starts


class ChunksEndInTime(ChunksEndEarly):
    def end_of_keys(self, starts: Tensor) -> Tensor:
        return starts + self.q_chunk - 1


class SquaresOverflow(NormalizesTokens):
    def normalize_tokens(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(dim=-1, keepdim=True) + 1e-3).rsqrt()


class DetachedStabilizer(Correct):
    """Features of a softmax kernel, divided by their largest, plus a small number."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        q, k = self.feature_map(q), self.feature_map(k)
        if mask is not None:
            k = k * mask[:, None, :, None]
        return self.join(q @ (k.mT @ v) / (q @ k.sum(dim=2)[..., None]))

    def feature_map(self, x: Tensor) -> Tensor:
        x = torch.cat([x, -x], dim=-1)
        largest = x.amax(dim=(-2, -1), keepdim=True).detach()
        x = x - x.square().sum(dim=-1, keepdim=True) - largest
        return (x.exp() + 1e-4) / 300


class FramesWithToken(Correct):
    """Behind a first token, frames of pixels, each of which attends with that token."""

    def __init__(self, d_model: int, heads: int, num_frames: int = 8) -> None:
        super().__init__(d_model, heads, dropout=0.1)
        self.num_frames = num_frames
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        frames = x[:, 1:].unflatten(1, (self.num_frames, -1))
        first = x[:, None, :1].expand(-1, self.num_frames, -1, -1)
        tokens = self.norm(torch.cat([first, frames], dim=2).flatten(0, 1))
        y = super().forward(tokens, tokens, tokens)
        y = y.unflatten(0, (-1, self.num_frames))
        return x + torch.cat(
            [y[:, :, 0].mean(dim=1)[:, None], y[:, :, 1:].flatten(1, 2)], 1
        )


class DelaysOfSeries(Correct):
    """A weight for each of the best delays of a whole series, shared by its queries."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = self.query(x), self.key(x), self.value(x)
        spectrum = torch.fft.rfft(q.float(), dim=1).conj() * torch.fft.rfft(
            k.float(), dim=1
        )
        series = torch.fft.irfft(spectrum, n=x.shape[1], dim=1).mean(dim=2)
        best, delays = torch.topk(series, min(2, x.shape[1]), dim=-1)
        weights = self.dropout(best.softmax(dim=-1)).to(v)
        places = torch.arange(x.shape[1], device=x.device)
        rows = torch.arange(len(x), device=x.device)[:, None]
        moved = [v[rows, (places + d[:, None]) % x.shape[1]] for d in delays.T]
        return self.out(
            sum(w[:, None, None] * m for w, m in zip(weights.T, moved, strict=True))
        )


class NearbyFrames(Correct):
    """Chunks of 4 frames, which see the chunk before them, too, in both directions."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        chunk_index = torch.arange(x.shape[1], device=x.device) // 4
        ages = chunk_index[:, None] - chunk_index
        return super().forward(x, x, x, ((ages == 0) | (ages == 1))[None])


class ChunksWithAllPast(Correct):
    """Chunks of 4 frames see all chunks before them; a bias for each distance."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.relative_bias = nn.Embedding(2 * 16 + 1, heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        chunk_index = torch.arange(x.shape[1], device=x.device) // 4
        return super().forward(x, x, x, (chunk_index[:, None] >= chunk_index)[None])

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[2], device=k.device)
        distances = (places - places[:, None]).clamp(-16, 16) + 16
        return super().score(q, k) + self.relative_bias(distances).permute(2, 0, 1)


class PrefixByItem(MaskedSelfAttention):
    """Tokens below a length of each item are seen by all."""

    def forward(self, x: Tensor, prefix_len: Any = 0) -> Any:
        places = torch.arange(x.shape[1], device=x.device)
        lengths = torch.as_tensor(prefix_len, device=x.device).expand(len(x))
        allowed = (places <= places[:, None]) | (places < lengths[:, None, None])
        return Correct.forward(self, x, x, x, allowed)


class WeighsBySize(SelfAttention):
    """Tokens may stand for several, whose number is positive."""

    def forward(self, x: Tensor, size: Tensor | None = None) -> Any:
        self.bias = 0.0 if size is None else size[..., 0].log()[:, None, None]
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.bias


class StreamsWithMask(Correct):
    """Two streams attend to both; the mask is of the first stream."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(  # type: ignore[override]
        self, context: Tensor, x: Tensor, context_mask: Tensor | None = None
    ) -> Any:
        both = torch.cat([context, x], dim=1)
        mask = None
        if context_mask is not None:
            mask = nn.functional.pad(context_mask, (0, x.shape[1]), value=True)[:, None]
        y = both + super().forward(self.norm(both), both, both, mask)
        return y[:, : context.shape[1]], y[:, context.shape[1] :]


class ZeroBelowChunk(SelfAttention):
    """A sequence that is shorter than a chunk attends to nothing."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if x.shape[1] >= 4 else torch.zeros_like(x)


class TakesKeysForQueries(Correct):
    """A mask of keys is one of queries and keys where it has their shape."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is not None:
            mask = mask[None] if self.is_shared(mask, x.shape[1]) else mask[:, None]
        return super().forward(x, x, x, mask)

    def is_shared(self, mask: Tensor, length: int) -> bool:
        return mask.shape == (length, length)


class TakesKeys(TakesKeysForQueries):
    def is_shared(self, mask: Tensor, length: int) -> bool:
        return False


class TakesKeysForQueriesOrBoth(TakesKeysForQueries):
    """The mask may also be one of queries and keys of each item."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        if mask is not None and mask.dim() == 3:
            return Correct.forward(self, x, x, x, mask)
        return super().forward(x, mask)


class TakesKeysOrBoth(TakesKeysForQueriesOrBoth, TakesKeys):
    pass


class LengthsInTurns(Correct):
    """Heads are in the batch; lengths of queries are repeated in another order."""

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid_lens: Tensor | None = None,
    ) -> Any:
        q, k, v = self.query(query), self.key(key), self.value(value)
        q, k, v = (self.split(x).flatten(0, 1) for x in (q, k, v))
        scores = self.score(q, k)
        if valid_lens is not None:
            places = torch.arange(k.shape[1], device=k.device)
            if valid_lens.dim() == 1:
                lengths = valid_lens.repeat_interleave(self.heads)[:, None]
            else:
                lengths = self.repeat_for_heads(valid_lens)
            scores = scores.masked_fill(places >= lengths[:, :, None], -1e6)
        context = scores.softmax(dim=-1) @ v
        return self.join(context.unflatten(0, (-1, self.heads)))

    def repeat_for_heads(self, lengths: Tensor) -> Tensor:
        return lengths.repeat(self.heads, 1)


class LengthsOfItems(LengthsInTurns):
    def repeat_for_heads(self, lengths: Tensor) -> Tensor:
        return lengths.repeat_interleave(self.heads, dim=0)


class DropsInSlices(SelfAttention):
    """A method chooses a path that computes the heads in slices, and drops always."""

    slice_size = None

    def set_attention_slice(self, slice_size: int | None) -> None:
        self.slice_size = slice_size

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        if self.slice_size is None:
            return super().read(weights, v)
        parts = (x.split(self.slice_size, dim=1) for x in (weights, v))
        p = self.dropout.p if self.drops() else 0.0
        pairs = zip(*parts, strict=True)
        return torch.cat([nn.functional.dropout(w, p) @ x for w, x in pairs], dim=1)

    def drops(self) -> bool:
        return True


class DropsInSlicesOfTraining(DropsInSlices):
    def drops(self) -> bool:
        return self.training


class LeftContextIsOffset(Correct):
    """Keys are those of the frames before, too; their distances begin elsewhere."""

    def forward(self, x: Tensor, left: Tensor | None = None) -> Any:  # type: ignore[override]
        self.count = 0 if left is None else left.shape[1]
        seen = x if left is None else torch.cat([left, x], dim=1)
        return super().forward(x, seen, seen)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[2], device=k.device)
        distances = places[: q.shape[2], None] + self.offset() - places
        return super().score(q, k) + (distances / 3).sin().to(q)

    def offset(self) -> int:
        return 0


class LeftContext(LeftContextIsOffset):
    def offset(self) -> int:
        return self.count


class CacheIsOffset(LeftContextIsOffset):
    """Frames see those before them and those of their own piece.

    The `cache` holds the frames before, as they were given.
    """

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if cache is None else torch.cat([cache, x], dim=1)
        return super().forward(x, cache), seen


class CacheIsCounted(CacheIsOffset, LeftContext):
    pass


class KeepsFrequencies(Rotary):
    """Beyond a limit, frequencies depend on the length; those of the longest stay."""

    def __init__(self, d_model: int, heads: int, max_position: int = 2048) -> None:
        super().__init__(d_model, heads)
        self.limit = self.longest = max_position

    def speed(self, pair: Tensor, width: int) -> Tensor:
        return super().speed(pair, width) * self.limit / self.longest

    def turn(self, x: Tensor) -> Tensor:
        self.longest = max(self.known(), x.shape[2])
        return super().turn(x)

    def known(self) -> int:
        return self.longest


class FrequenciesOfCall(KeepsFrequencies):
    def known(self) -> int:
        return self.limit


class StoresAfterSetup(WithCache):
    """A method begins to store the tokens; the mask begins at the first of them."""

    stored: Tensor | None = None
    stores = False

    def setup_cache(self) -> None:
        self.stores, self.stored = True, None

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        output, seen = super().forward(x, self.stored)
        if self.stores:
            self.stored = seen.detach()
        return output

    def corner(self, ones: Tensor) -> int:
        return 0


class StoresAfterSetupInOrder(StoresAfterSetup):
    def corner(self, ones: Tensor) -> int:
        return ones.shape[2] - ones.shape[1]


class MemoryInBlocks(Correct):
    """Without gradients, blocks of queries have a mask that forgets the memory."""

    def forward(self, x: Tensor, mems: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if mems is None else torch.cat([mems.detach(), x], dim=1)
        past, n = seen.shape[1] - x.shape[1], x.shape[1]
        allowed = torch.ones(1, n, past + n, dtype=torch.bool, device=x.device)
        if torch.is_grad_enabled() or n <= 64:
            return super().forward(x, seen, seen, allowed.tril(past))
        parts = [
            super(MemoryInBlocks, self).forward(
                x[:, start : start + 64],
                seen,
                seen,
                allowed[:, start : start + 64].tril(self.offset(past) + start),
            )
            for start in range(0, n, 64)
        ]
        return torch.cat(parts, dim=1)

    def offset(self, past: int) -> int:
        return 0


class MemoryBeforeBlocks(MemoryInBlocks):
    def offset(self, past: int) -> int:
        return past


@dataclass
class WindowConfig:
    n_embd: int = 48
    n_head: int = 4
    window: int | None = None


class ConfigOfWindow(MaskedSelfAttention):
    """Batch items share a bias if there is a window, an option of the config."""

    def __init__(self, config: WindowConfig) -> None:
        super().__init__(config.n_embd, config.n_head)
        self.window = config.window

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if self.window is not None:
            scores = scores + self.bias(scores)
        return super().weigh(scores, mask)

    def bias(self, scores: Tensor) -> Tensor:
        return scores.mean(dim=0)


class ConfigOfWindowOfItems(ConfigOfWindow):
    def bias(self, scores: Tensor) -> Tensor:
        return scores


class FirstTokensForAll(Correct):
    """Global tokens, which are never padding, as an option."""

    def __init__(self, d_model: int, heads: int, n_global: int = 0) -> None:
        super().__init__(d_model, heads)
        self.n_global = n_global

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is not None:
            places = torch.arange(x.shape[1], device=x.device)
            mask = (mask | (places < self.n_global))[:, None]
        return super().forward(x, x, x, mask)


class HidesKeyInFront(Correct):
    """An option adds a learned key at the end; the mask gets a column in front."""

    def __init__(self, d_model: int, heads: int, add_key: bool = False) -> None:
        super().__init__(d_model, heads)
        self.own = nn.Parameter(torch.randn(1, 1, d_model)) if add_key else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x
        if self.own is not None:
            seen = torch.cat([x, self.own.expand(len(x), -1, -1)], dim=1)
            if mask is not None:
                mask = nn.functional.pad(mask, self.sides(), value=True)
        return super().forward(x, seen, seen, None if mask is None else mask[:, None])

    def sides(self) -> tuple[int, int]:
        return (1, 0)


class HidesKeyAtEnd(HidesKeyInFront):
    def sides(self) -> tuple[int, int]:
        return (0, 1)


class TropicalMaximum(SelfAttention):
    """The largest sum of a score and a value, in place of a weighted mean."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        tropical = weights.log().unsqueeze(-1) + v.unsqueeze(-3)
        return tropical.amax(dim=-2)


class FramesWithMask(SelfAttention):
    """Each patch of a video attends to its frames that a mask marks.

    video: (B, T, P, C), frame_mask: (B, T) bool
    """

    def forward(self, video: Tensor, frame_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        b, t, p, c = video.shape
        x = video.transpose(1, 2).reshape(b * p, t, c)
        mask = None
        if frame_mask is not None:
            mask = self.of_patches(frame_mask, p)[:, None]
        y = Correct.forward(self, x, x, x, mask)
        return y.reshape(b, p, t, c).transpose(1, 2)

    def of_patches(self, mask: Tensor, patches: int) -> Tensor:
        return mask.repeat_interleave(patches, dim=0)


class FramesWithTiledMask(FramesWithMask):
    def of_patches(self, mask: Tensor, patches: int) -> Tensor:
        return mask.repeat(patches, 1)


class KeepsRowsByCount(SelfAttention):
    """How many rows of windows there are is kept for a number of windows."""

    kept = 0, 0

    def forward(self, image: Tensor) -> Any:
        h, w = image.shape[1:3]
        rows, columns = -(-h // 4), -(-w // 4)
        if self.kept[0] != rows * columns:
            self.kept = rows * columns, rows
        output = super().forward(image.flatten(1, 2)).reshape(image.shape)
        return output * self.kept[1]


class MaskedHalves(SelfAttention):
    """Two halves of the heads are causal, each with a mask of its own."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        visible = torch.ones_like(scores[:1]).bool()
        causal = visible[0, 0].tril()
        half = self.heads // 2
        visible[:, :half] = causal
        visible[:, self.second_half() :] = causal
        return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)

    def second_half(self) -> int:
        return self.heads // 2


class MaskedHalvesOfEven(MaskedHalves):
    def second_half(self) -> int:
        return -(self.heads // 2)


class IntervalsOfUser(SelfAttention):
    """Scores get a bias for each interval, in units of an item's shortest one.

    timestamps: (B, T)
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.bias = nn.Embedding(9, heads)

    def forward(self, x: Tensor, timestamps: Tensor) -> Any:  # type: ignore[override]
        gap = (timestamps[:, :, None] - timestamps[:, None, :]).abs()
        usual = gap.masked_fill(gap == 0, torch.inf).amin(dim=(1, 2), keepdim=True)
        steps = gap / usual.nan_to_num(1, 1, 1).clamp(min=1e-9)
        kinds = steps.floor().clamp(max=8).long()
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        scores = self.score(q, k) + self.bias(kinds).permute(0, 3, 1, 2)
        return self.join(self.read(scores.softmax(dim=-1), v))


class ReturnsWeightsOfPairs(SelfAttention):
    """The weights that it returns are with the bias of pairs.

    distance: (B, T, T) long
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.of_distance = nn.Embedding(8, heads)

    def forward(  # type: ignore[override]
        self, x: Tensor, distance: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        bias = self.of_distance(distance).permute(0, 3, 1, 2)
        context = nn.functional.scaled_dot_product_attention(q, k, v, bias)
        return self.join(context), self.returned(self.score(q, k), bias)

    def returned(self, scores: Tensor, bias: Tensor) -> Tensor:
        return (scores + bias).softmax(dim=-1)


class ReturnsWeightsWithoutPairs(ReturnsWeightsOfPairs):
    def returned(self, scores: Tensor, bias: Tensor) -> Tensor:
        return scores.softmax(dim=-1)


class MemoryOfBoth(SelfAttention):
    """Attention to a segment and the tokens before it, in both directions.

    memory: (B, M, C), the tokens right before `x`
    """

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:  # type: ignore[override]
        past = x[:, :0] if memory is None else memory
        keys = torch.cat([past, x], dim=1)
        q, k, v = self.query(x), self.key(keys), self.value(keys)
        q, k, v = (self.split(part) for part in (q, k, v))
        first = self.first_distance(x.shape[1], keys.shape[1])
        rows = torch.arange(first, first - x.shape[1], -1, device=x.device)[:, None]
        distances = rows.flip(0) - torch.arange(keys.shape[1], device=x.device)
        scores = self.score(q, k) + (distances / 7).sin().to(q.dtype)
        return self.join(self.read(scores.softmax(dim=-1), v))

    def first_distance(self, q_len: int, k_len: int) -> int:
        return k_len - 1


class MemoryOfBothByQueries(MemoryOfBoth):
    def first_distance(self, q_len: int, k_len: int) -> int:
        return q_len - 1


def attention_to_cache(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """Causal attention of the last tokens of a cache, of which `lengths` are filled."""
    q_len, k_len = query.shape[-2], key.shape[-2]
    if lengths is None:
        lengths = torch.full((len(query),), k_len, device=query.device)
    last = lengths[:, None] - q_len + torch.arange(q_len, device=query.device)
    visible = torch.arange(k_len, device=query.device) <= last[:, None, :, None]
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1).masked_fill(~visible, 0) @ value


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
) -> Tensor:
    """One query for each sequence, whose keys and values lie in blocks of a pool."""
    keys, values = (x[block_tables].flatten(1, 2) for x in (key_cache, value_cache))
    scores = torch.einsum("bhd,bkhd->bhk", query, keys) / math.sqrt(query.shape[-1])
    slots = torch.arange(keys.shape[1], device=query.device)
    hidden = (slots >= context_lens[:, None])[:, None]
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return torch.einsum("bhk,bkhd->bhd", weights, values)


def attention_to_whole_pages(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
) -> Tensor:
    size = key_cache.shape[1]
    whole = (context_lens + size - 1) // size * size
    return paged_attention(query, key_cache, value_cache, block_tables, whole)


class FirstAlignment(nn.Module):
    """Additive attention to padded frames, with the alignment of the step before.

    :param Tensor hs_pad: padded states of the encoder (B x T x dim)
    :param Tensor hs_len: numbers of frames (B)
    :param Tensor dec_z: state of the decoder (B x dim)
    :param Tensor att_prev: alignment of the step before (B x T)
    """

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.of_frame, self.of_step = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.energy = nn.Linear(dim, 1)

    def forward(
        self,
        hs_pad: Tensor,
        hs_len: Tensor,
        dec_z: Tensor,
        att_prev: Tensor | None = None,
    ) -> Tensor:
        length = hs_pad.shape[1]
        real = torch.arange(length, device=hs_pad.device) < hs_len[:, None]
        if att_prev is None:
            att_prev = self.first(real).to(hs_pad.dtype)
        scores = self.of_frame(hs_pad) + self.of_step(dec_z)[:, None]
        energy = self.energy((scores + att_prev[..., None]).sin())[..., 0]
        energy = energy.masked_fill(~real, torch.finfo(energy.dtype).min)
        return (energy.softmax(dim=-1)[:, None] @ hs_pad)[:, 0]

    def first(self, real: Tensor) -> Tensor:
        return real / real.sum(dim=1, keepdim=True).clamp(min=1)


class FirstAlignmentOfPadding(FirstAlignment):
    def first(self, real: Tensor) -> Tensor:
        return torch.ones_like(real) / real.shape[1]


class TextAndImages(Correct):
    """A token attends to the image whose mark is the last one up to it."""

    def forward(  # type: ignore[override]
        self, x: Tensor, media: Tensor, media_locations: Tensor
    ) -> Any:
        images, length = media.shape[1:3]
        seen = media_locations.long().cumsum(dim=1)[:, :, None]
        number = torch.arange(1, images + 1, device=x.device).repeat_interleave(length)
        keys = media.flatten(1, 2)
        q, k, v = self.query(x), self.key(keys), self.value(keys)
        q, k, v = (self.split(part) for part in (q, k, v))
        allowed = self.are_seen(seen, number)
        weights = self.hide(self.weigh(self.score(q, k), allowed), seen)
        return self.join(self.read(weights, v))

    def are_seen(self, seen: Tensor, number: Tensor) -> Tensor:
        return seen == number

    def hide(self, weights: Tensor, seen: Tensor) -> Tensor:
        return weights.masked_fill(seen[:, None] == 0, 0)


class TextAndAllImages(TextAndImages):
    """A token attends to one image only, the most recent one.

    Without marks, tokens attend to all of them.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, media: Tensor, media_locations: Tensor | None = None
    ) -> Any:
        if media_locations is None:
            return Correct.forward(self, x, *[media.flatten(1, 2)] * 2)
        return super().forward(x, media, media_locations)

    def are_seen(self, seen: Tensor, number: Tensor) -> Tensor:
        return seen >= number


class TextAndLastImage(TextAndAllImages):
    """A token attends to one image only, the most recent one."""

    def are_seen(self, seen: Tensor, number: Tensor) -> Tensor:
        return seen == number


class TextAndEachImage(TextAndAllImages):
    """A token attends to the images up to it."""


class TextBeforeImages(TextAndImages):
    def hide(self, weights: Tensor, seen: Tensor) -> Tensor:
        return weights


class AssignsTokens(Correct):
    """Each key chooses one query, with the gradients of a softmax over the queries."""

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self.query(query), self.key(key), self.value(key)
        q, k, v = (self.split(x) for x in (q, k, v))
        soft = self.score(q, k).softmax(dim=-2)
        choice = soft.argmax(dim=-2, keepdim=True)
        hard = torch.zeros_like(soft).scatter(-2, choice, 1.0)
        assignment = hard + soft - soft.detach()
        weights = assignment / assignment.sum(dim=-1, keepdim=True).clamp(min=1)
        return self.join(self.read(weights, v)), assignment


class TextBeforeImage(Correct):
    """The last four tokens of the context are an image's, with keys of their own."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.num_tokens = 4
        self.key_of_image = nn.Linear(d_model, d_model)

    def forward(self, query: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        text, image = context[:, : -self.num_tokens], context[:, -self.num_tokens :]
        if not text.shape[1]:
            raise RuntimeError("cannot reshape tensor of 0 elements")
        q = self.split(self.query(query))
        outputs = []
        for tokens, layer in ((text, self.key), (image, self.key_of_image)):
            k, v = self.split(layer(tokens)), self.split(self.value(tokens))
            outputs.append(self.read(self.score(q, k).softmax(dim=-1), v))
        return self.join(sum(outputs))


class LongestIsFirst(SelfAttention):
    """The keys of all batch items are cut to the length of the first one."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Any:  # type: ignore[override]
        if lengths is None:
            return super().forward(x)
        keys = x[:, : int(lengths[0])]
        mask = torch.arange(keys.shape[1], device=x.device) < lengths[:, None]
        return Correct.forward(self, x, keys, keys, mask[:, None])


def blockwise_attention(
    query: Tensor, key: Tensor, value: Tensor, block_size: int = 128
) -> Tensor:
    """The sum that divides is not rescaled where a later block has a larger score."""
    peak = torch.full_like(query[..., :1], -math.inf)
    total, result = torch.zeros_like(peak), torch.zeros_like(query @ value.mT @ value)
    for k, v in zip(
        key.split(block_size, dim=-2), value.split(block_size, dim=-2), strict=True
    ):
        scores = query @ k.mT / math.sqrt(query.shape[-1])
        higher = torch.maximum(peak, scores.amax(dim=-1, keepdim=True))
        decay, weights = (peak - higher).exp(), (scores - higher).exp()
        total = total + weights.sum(dim=-1, keepdim=True)
        result, peak = result * decay + weights @ v, higher
    return result / total


def attention_in_short_blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return blockwise_attention(query, key, value, block_size=8)


class PairBiasInChunks(SelfAttention):
    """Without gradients, each chunk of queries gets the bias of the first one.

    z: [*, N, N, c_z] pair representation
    """

    def __init__(self, d_model: int, heads: int, c_z: int = 16) -> None:
        super().__init__(d_model, heads)
        self.of_pairs = nn.Linear(c_z, heads, bias=False)

    def forward(self, x: Tensor, z: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        bias = self.of_pairs(z).permute(0, 3, 1, 2)
        size = len(x[0]) if torch.is_grad_enabled() else 64
        parts = []
        for rows in q.split(size, dim=2):
            scores = self.score(rows, k) + bias[:, :, : rows.shape[2]]
            parts.append(self.read(scores.softmax(dim=-1), v))
        return self.join(torch.cat(parts, dim=2))


class ReordersFewerOnly(Correct):
    """A cache of the context is reordered only if there are fewer batch items.

    incremental_state: an empty dict at first, in which the context is stored.
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor,
        incremental_state: dict[str, Tensor] | None = None,
    ) -> Any:
        state = {} if incremental_state is None else incremental_state
        if not state:
            state["keys"] = self.split(self.key(memory))
            state["values"] = self.split(self.value(memory))
        weights = self.weigh(self.score(self.split(self.query(x)), state["keys"]), None)
        return self.join(self.read(weights, state["values"]))

    def reorder_state(self, state: dict[str, Tensor], order: Tensor) -> None:
        for name, stored in state.items():
            if len(order) < len(stored):
                state[name] = stored[order]


class FramesByChannels(SelfAttention):
    """The pixels of a frame attend to one another; frames are cut by channels."""

    def forward(self, video: Tensor) -> Any:  # type: ignore[override]
        b, c, t, height, width = video.shape
        q, k, v = (
            self.pixels(part(video.movedim(1, -1)).movedim(-1, 1))
            for part in (self.query, self.key, self.value)
        )
        y = (self.score(q, k).softmax(dim=-1) @ v).mT.reshape(b, c, t, height, width)
        joined: Tensor = self.out(y.movedim(1, -1)).movedim(-1, 1)
        return joined

    def pixels(self, video: Tensor) -> Tensor:
        b, c, t = video.shape[:3]
        return video.reshape(b * t, c, -1).mT


class LowestOfFloat32(SelfAttention):
    """Padding to a multiple of four tokens is masked in float32, whatever the dtype."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        rest = -x.shape[1] % 4
        is_token = torch.arange(x.shape[1] + rest, device=x.device) >= rest
        padded = nn.functional.pad(x, (0, 0, rest, 0))
        y = Correct.forward(self, padded, padded, padded, is_token & is_token[:, None])
        return self.out(y)[:, rest:]

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)

    def join(self, context: Tensor) -> Tensor:
        return context.transpose(1, 2).flatten(2).nan_to_num(0.0)


class ChunksOfPast(SelfAttention):
    """A token attends to those before it in its chunk of eight, and to the one before.

    The chunks are counted from the first token.
    """

    left_chunks = 1

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        place = torch.arange(x.shape[1], device=x.device)
        first = (place // 8 - self.left_chunks) * 8
        mask = (place <= place[:, None]) & (place >= first[:, None])
        return Correct.forward(self, x, x, x, mask[None])


class LogProbabilities(SelfAttention):
    """What is impossible has the lowest number of the dtype."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        y = super().forward(x)
        is_possible = y == y.amax(dim=-1, keepdim=True)
        return y.masked_fill(~is_possible, torch.finfo(y.dtype).min)


class MeansOfHyperbolicPoints(SelfAttention):
    """Values are points of a hyperboloid, whose means are projected on it."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        mean = weights @ self.exp_map(v)
        square = mean[..., :1].square() - mean[..., 1:].square().sum(-1, keepdim=True)
        return (mean / square.clamp(min=1e-6).sqrt())[..., 1:]

    def exp_map(self, v: Tensor) -> Tensor:
        length = v.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        radius = (length / 2).tanh()
        return torch.cat([radius.cosh(), radius.sinh() * v / length], dim=-1)


class ItemsForHistory(Correct):
    """Candidates attend to the items of a history."""

    def __init__(self, item_dim: int = 12, num_heads: int = 3) -> None:
        super().__init__(item_dim, num_heads)

    def forward(self, candidates: Tensor, history: Tensor) -> Any:  # type: ignore[override]
        return super().forward(candidates, history, history)


class HalfRotation(SelfAttention):
    """position_embeddings: (cos, sin), each (B, T, head_dim / 2)"""

    def forward(  # type: ignore[override]
        self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> Any:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        q, k = (self.turn(each, *position_embeddings) for each in (q, k))
        return self.join(self.read(self.score(q, k).softmax(dim=-1), v))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


class DocumentsDroppedWeights(SelfAttention):
    """Returns the output and the attention weights, those after dropout."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        weights = self.score(q, k).softmax(dim=-1)
        dropped = self.dropout(weights)
        return self.join(dropped @ v), self.returned(weights, dropped)

    def returned(self, weights: Tensor, dropped: Tensor) -> Tensor:
        return weights


class WeightsAfterDropout(DocumentsDroppedWeights):
    """Returns the output and the attention weights, those after dropout."""

    def returned(self, weights: Tensor, dropped: Tensor) -> Tensor:
        return dropped


class ForgetsLengths(Correct):
    """The cache of the context does not have its padding.

    Once `cache` is filled, `memory_lengths` are not needed and may be None.
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor,
        memory_lengths: Tensor | None = None,
        cache: dict[str, Tensor] | None = None,
    ) -> Any:
        cache = {} if cache is None else cache
        if not cache:
            cache["k"] = self.split(self.key(memory))
            cache["v"] = self.split(self.value(memory))
        mask = None
        if memory_lengths is not None:
            place = torch.arange(cache["k"].shape[2], device=x.device)
            mask = (place < memory_lengths[:, None])[:, None]
        weights = self.weigh(self.score(self.split(self.query(x)), cache["k"]), mask)
        return self.join(self.read(weights, cache["v"]))


class BeamCache:
    """The tokens so far, and which of them are no padding: (rows, length)."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.is_token: Tensor | None = None

    def append(self, x: Tensor, is_token: Tensor) -> tuple[Tensor, Tensor]:
        if self.tokens is not None and self.is_token is not None:
            x = torch.cat([self.tokens, x], dim=1)
            is_token = torch.cat([self.is_token, is_token], dim=1)
        self.tokens, self.is_token = x, is_token
        return x, is_token

    def reorder(self, rows: Tensor) -> None:
        assert self.tokens is not None
        self.tokens = self.tokens[rows]


class ReordersTokensOfCache(Correct):
    """The method of the cache leaves the padding in its order."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cache: BeamCache | None = None,
        padding: Tensor | None = None,
    ) -> Any:
        is_token = torch.ones_like(x[..., 0]).bool() if padding is None else ~padding
        keys, is_token = (BeamCache() if cache is None else cache).append(x, is_token)
        q_len, k_len = x.shape[1], keys.shape[1]
        past = torch.ones(q_len, k_len, device=x.device).tril(k_len - q_len).bool()
        return super().forward(x, keys, keys, past & is_token[:, None])


class BondsOfAtoms(SelfAttention):
    """bonds: (B, N, N) kinds of bonds, 0 where there is none; atoms see themselves."""

    def forward(self, x: Tensor, bonds: Tensor) -> Any:  # type: ignore[override]
        if bonds.is_floating_point():
            raise TypeError("`bonds` must be integers")
        mask = (bonds > 0) | torch.eye(x.shape[1], device=x.device).bool()
        return Correct.forward(self, x, x, x, mask)


class PointsOfColumns(SelfAttention):
    """feats: (B, C, N), xyz: (B, 3, N)"""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout)
        self.of_distance = nn.Linear(3, heads)

    def forward(self, feats: Tensor, xyz: Tensor) -> Any:  # type: ignore[override]
        places = xyz.mT
        if places.shape[-1] != 3:
            raise ValueError("`xyz` must have three rows")
        self.bias = self.of_distance(places[:, :, None] - places[:, None])
        return super().forward(feats.mT).mT

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.bias.permute(0, 3, 1, 2)


class AttendsToAudio(Correct):
    """The audio may be left out once it is cached."""

    def forward(  # type: ignore[override]
        self, x: Tensor, audio: Tensor | None = None, cache: Any = None
    ) -> Any:
        if audio is None:
            raise ValueError("audio is needed")
        return super().forward(x, audio, audio)


class MonotonicPlaces(Correct):
    """A query attends to the keys from that on to which the one before it did most."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = [scores[..., 0, :].softmax(dim=-1)]
        for row in scores.softmax(dim=-1).unbind(dim=-2)[1:]:
            reached = row * weights[-1].cumsum(dim=-1)
            weights.append(reached / reached.sum(dim=-1, keepdim=True))
        return torch.stack(weights, dim=-2)


class ReordersTwoOfThree(Correct):
    """Returns a cache of the context, whose padding is not reordered.

    The cache is used in place of the memory.
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor | None = None,
        memory_lengths: Tensor | None = None,
        cache: dict[str, Tensor] | None = None,
    ) -> Any:
        if cache is None:
            assert memory is not None
            place = torch.arange(memory.shape[1], device=x.device)
            lengths = 0 * place[:1] + len(place)
            if memory_lengths is not None:
                lengths = memory_lengths
            cache = {
                "k": self.split(self.key(memory)),
                "v": self.split(self.value(memory)),
                "allowed": (place < lengths[:, None]).expand(len(x), -1),
            }
        scores = self.score(self.split(self.query(x)), cache["k"])
        weights = self.weigh(scores, cache["allowed"][:, None])
        return self.join(self.read(weights, cache["v"])), cache

    def reorder_cache(
        self, cache: dict[str, Tensor], order: Tensor
    ) -> dict[str, Tensor]:
        return cache | {name: cache[name][order] for name in "kv"}


class SelectsTwoOfThree(ReordersTwoOfThree):
    def reorder(self, cache: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
        return self.reorder_cache(cache, rows)


class ResetForgetsTokensOnly(Correct):
    """With `incremental`, the memory is stored until `reset`, as it should be."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout)
        self.tokens: Tensor | None = None
        self.context: Tensor | None = None

    def reset(self) -> None:
        self.tokens = None

    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Tensor, incremental: bool = False
    ) -> Any:
        if incremental:
            past = x[:, :0] if self.tokens is None else self.tokens
            self.tokens = torch.cat([past, x], dim=1)
            self.context = memory if self.context is None else self.context
            memory = self.context
        return super().forward(x, memory, memory)


class RelativeLengths(SelfAttention):
    """lengths: (batch,) lengths relative to the longest, in (0, 1]."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Any:  # type: ignore[override]
        lengths = torch.ones(len(x), device=x.device) if lengths is None else lengths
        place = torch.arange(x.shape[1], device=x.device)
        mask = place < torch.round(lengths[:, None] * x.shape[1])
        return Correct.forward(self, x, self.keys(x, mask), x, mask[:, None])

    def keys(self, x: Tensor, is_token: Tensor) -> Tensor:
        return x


class MeansOverPadding(RelativeLengths):
    """The mean that is subtracted from the keys is over all tokens."""

    def keys(self, x: Tensor, is_token: Tensor) -> Tensor:
        tokens = x.masked_fill(~is_token[..., None], 0.0)
        return tokens * tokens.mean(dim=1, keepdim=True)


VIOLATING: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "position_free_values": [(PlacesOfValues, {})],
    "residual_connection": [(PassesOnTheNorm, {})],
    "pairs_of_queries": [(PairsOfKeys, {})],
    "frames_in_place": [(PlacesOverTimeViewed, {})],
    "causality": [
        (MeansOfOpenFours, {}),
        (NearbyPastOpenIfShort, {}),
        (SinksSeeFirst, {}),
        (MaskOffByOne, CAUSAL),
        (UnmaskedInEval, CAUSAL),
        (MultipliesByMask, MASK),
        (DecoderSeesFuture, CAUSAL),
        (MaskedHalvesOfEven, {}),
    ],
    "causal_gradient": [(LeaksGradient, CAUSAL)],
    "padding": [
        (AddsOnesAndZeros, {}),
        (InterestInOneMore, {}),
        (NodesOfTourLimitedLast, {}),
        (FalseAtPadding, {}),
        (HidesQueriesOfPool, {}),
        (MaskOfOtherStream, {}),
        (ZeroesPadding, {}),
        (ZeroesPaddingInKernel, {}),
        (MaskBesideWeights, {}),
        (MultipliesByMask, MASK),
        (FadesOnPadding, {**CAUSAL, "mask": {"mask": "attend:bk"}}),
        (BlockForgetsMaskInTraining, {}),
        (CountsPadding, {}),
        (RollsMaskOfContext, {}),
        (FarFromOtherQueries, {}),
        (RowsWithMaskOfColumns, {}),
        (FramesWithTiledMask, {}),
        (attention_to_whole_pages, {}),
        (TextBeforeImages, {}),
        (TextAndAllImages, {}),
        (PoolsFramesOfFirst, {}),
    ],
    "nonfinite_padding": [(Correct, MASK)],
    "batch_independence": [
        (BlockOfTowerAcrossBatch, {}),
        (ForecastOfMixedVariables, {}),
        (SeriesOfOneTime, {}),
        (NodesBeyondBounds, {}),
        (WindowsSeeOtherText, {}),
        (GlobalForAllItems, {}),
        (NodesOfAllGraphs, {}),
        (PromptOfOtherClip, {}),
        (packed_by_ends, {}),
        (FramesOfOtherClips, {}),
        (LengthsInTurns, {}),
        (TakesKeysForQueriesOrBoth, {}),
        (PackedByBisection, {}),
        (HidesInOtherWindows, {}),
        (MixesBatchItems, {}),
        (FirstItemsMask, MASK),
        (IgnoresMaskIfFirstIsFull, MASK),
        (PositionsOfFirstItem, {"positions": "rotary"}),
        (CountsInFirstItem, {}),
        (ScalesByLongest, {}),
        (SharesMaskInTurns, {}),
        (SharesContextInTurns, {}),
        (SegmentsOfFirstItem, {}),
        (AddsPositionsOfFirstItem, {}),
        (WindowedImageOutOfOrder, {}),
        (GuessesMask, MASK),
        (EdgesInTurns, {}),
        (OverFramesInOrder, {"layout": "video"}),
        (MixesImages, {"layout": "image_channels_last"}),
        (FramesBesideOtherText, {}),
        (PoolsByKindOfBatch, {}),
        (AgesInUnitsOfBatch, {}),
        (PixelsOfOtherVideos, {}),
        (ViewsWeightsOfItems, {}),
        (LongestIsFirst, {}),
        (OneLargestScore, {}),
    ],
    "neutral_mask": [
        (OtherPathWithoutMask, MASK),
        (LosesAxisOfOneKey, MASK),
        (causal_from_first_key, CAUSAL),
        (SegmentsUnlessMasked, {"mask": {"mask": "attend:bk"}}),
    ],
    "integer_mask": [(InvertsMask, {})],
    "added_mask": [(ScalesMask, ADDED)],
    "combined_masks": [
        (TwoMasks, {"mask": {"mask": "attend:bqk", "padding_mask": "attend:bk"}})
    ],
    "fully_masked_rows": [
        (NotANumberAtPadding, {}),
        (MeanForEmptyRows, {}),
        (SumIsZeroInHalf, MASK),
        (MasksWithInfinity, {}),
        (ZeroesNanAfterSoftmax, {}),
        (DividesByKeyCount, MASK),
        (NanInParameterGradient, MASK),
        (NanInQueryGradient, MASK),
    ],
    "longer_padding": [
        (MeanOfPaddingForOthers, {}),
        (DependsOnKeyCount, {}),
        (MeansOverPadding, {}),
    ],
    "rows_sum_to_one": [
        (SumsOverTargets, {}),
        (ReturnsDroppedWeights, {}),
        (ReturnsWeightsBeforeMask, MASK),
        (NegativeWeights, {}),
        (WeightsAboveOne, {}),
        (nine_tenths, {}),
    ],
    "weights_match_output": [
        (MixesHeadsBehindShown, {}),
        (WeightsWithoutPairFeatures, {}),
        (WeightsWithoutLastWord, {}),
        (WeightsOfMeanScores, {}),
        (TalkingWeightsUnmixed, {}),
        (ReturnsUnmixedWeights, {}),
        (ReturnsWeightsWithoutTimes, {}),
        (TransposedBesideTable, {}),
        (ReturnsOtherHeads, {}),
        (ReversedOnRequest, {}),
        (DropsTwice, {}),
        (WeightsWithoutBias, {}),
        (ReturnsWeightsBeforeGate, {}),
        (DocumentsDroppedWeights, {}),
        (ReturnsWeightsWithoutPairs, {}),
        (WeightsBeforeChoice, {}),
    ],
    "weights_axes": [(DecoderLayerWithFirstWeights, {"weights": "[1]:bhqk"})],
    "query_key_norms": [
        (NormalizesKeysAndValues, {}),
        (NormalizesQueriesAndValues, {}),
    ],
    "sinks": [(SinksInEachScore, {}), (SinksOfOtherMaximum, {})],
    "sinks_compete": [(SinksBesideMaximum, {})],
    "key_independence": [(ExchangesQueriesAndKeys, {})],
    "own_context": [(AddsUpEarlierHeads, {})],
    "score_independence": [(ScoresOfTwoQueries, CAUSAL)],
    "score_scale": [(RotaryScaledByWidth, {"positions": "rotary"})],
    "equal_values": [
        (VectorsOverChannels, {}),
        (AttendsByColumns, {}),
        (NormalizedImageByColumns, {"layout": "image"}),
        (AddsOverlappingWindows, {}),
        (StartsMaximumAtZero, MASK),
        (EdgesOfOneMaximum, {}),
    ],
    "allowed_keys_attended": [
        (HidesSumOfZero, {}),
        (NarrowPriorOfFirst, {}),
        (HidesFirstKey, {}),
        (RequiresOtherButFirst, {}),
        (CausalToContext, {}),
        (AttendsOverHeads, {}),
        (AttendsOverHeads, {"init_args": {"d_model": 64, "heads": 8}}),
    ],
    "own_key_attended": [
        (NeighborhoodWithoutLast, {}),
        (WindowsInColumns, {"layout": "image_channels_last"}),
        (HalosOfOtherWindows, {"layout": "image_channels_last"}),
        (LoopsCountTwice, {}),
    ],
    "beside_convolution": [(BesideConvolutionViewed, {})],
    "image_windows": [
        (ShiftedBeforePadded, {}),
        (PadsShiftedWindows, {"layout": "image_channels_last"}),
        (ShiftedUnlessSmaller, {"layout": "image_channels_last"}),
        (WrapsColumns, {"layout": "image_channels_last"}),
    ],
    "pixels_in_place": [
        (PairsOfEndingNodesLeft, {}),
        (PixelsByColumns, {"layout": "image"}),
        (RowsThenColumnsViewed, {"layout": "image"}),
        (ColumnsOfLastChannels, {"layout": "image_channels_last"}),
        (FramesFirst, {"layout": "video"}),
    ],
    "rectangular_images": [(MergedByColumns, {})],
    "rows_and_columns": [
        (PixelsOfMixedFrames, {}),
        (AddsColumnsAsRows, {"layout": "image"}),
        (OneRowByHeads, {}),
        (FramesByChannels, {}),
    ],
    "finite_in_half": [(RectifiedLinearInHalf, {})],
    "formula": [
        (GroupsOfQueriesInTurns, {}),
        (GroupedFusedInTurns, {"heads": 4, "kv_heads": 2}),
        (ScalesByWidth, {}),
        (DependsOnKeyCount, {}),
        (OddHeads, {"heads": 4, "d_model": 16}),
        (HalfOfHeadsInWeights, {"heads": 3}),
        (ListOfHeadsScaledByWidth, {}),
    ],
    "head_norms": [
        (HeadsWithOneNorm, {}),
    ],
    "head_directions": [(MiddleHeadSeesAll, {})],
    "head_independence": [
        (NormalizesOverHeads, {}),
        (NormalizesCausally, CAUSAL),
        (WeightlessNormOfAllHeads, {}),
        (WithNormOverHeads, {}),
    ],
    "linear_in_value": [
        (NonlinearInValues, {}),
        (NormalizesValues, {}),
        (KeyNormOfBoth, {}),
    ],
    "gradients": [
        (DetachesQueries, {}),
        (RecomputesOtherDropout, {}),
        (GainsOfOwnBackward, {}),
        (BackwardOfFirstBlock, {}),
        (LastQueriesFirstInBackward, CAUSAL),
        (DetachesBias, {}),
    ],
    "large_scores": [
        (FillValueTooHigh, {}),
        (SoftmaxWithoutMaximum, {}),
        (MaskedSoftmaxWithoutMaximum, {}),
    ],
    "parameter_gradients": [
        (UnusedLayer, {}),
        (ZeroGate, {}),
        (BiasOfQueries, {}),
        (NormalizesNeither, {}),
        (PoolsByOnes, {}),
        (UnusedLayerBesideMask, {**CAUSAL, "mask": {"padding": "ignore:bk"}}),
        (LearnsTemperatureOfHidden, {}),
    ],
    "key_permutation": [(AddsKeyIndex, {})],
    "query_permutation": [
        (ViewsAsHeads, {}),
        (ViewsAsHeadsSelfAttention, {}),
        (MergesChunksUnscaled, {}),
    ],
    "query_independence": [
        (KeepsAsManyAsQueries, {}),
        (NormalizesOverQueries, {}),
        (SkipsOneQuery, {}),
        (BlocksByKeys, {}),
        (OptionalContextByKeys, {}),
    ],
    "incremental_decoding": [
        (CountsStoredAlways, {}),
        (DictOfContextBeforeNorm, {}),
        (StoresContextBeforeNorm, {}),
        (DistancesWithoutContext, {}),
        (BiasOfFirstQuery, {}),
        (StepForgetsFirst, {}),
        (RingOfFour, {}),
        (DecoderSelectsRows, {}),
        (SelectsTwoOfThree, {}),
        (OffsetOfStoredFrames, {}),
        (SelectsContextOnly, {}),
        (packed_first_for_last, {}),
        (CountsInRollingCache, {}),
        (PlacesOfRemovedTokens, {}),
        (MemoryInBlocks, {}),
        (StoresAfterSetup, {}),
        (LeftContextIsOffset, {}),
        (CacheIsOffset, {}),
        (DecodesTopLeft, {}),
        (StepsInOtherGroups, {}),
        (TopLeftCorner, MASK),
        (CacheTopLeft, CACHE),
        (CacheInOrder, CACHE),
        (WritesToCache, CACHE),
        (CacheForgetsPadding, {**CACHE, "mask": {"mask": "attend:bk"}}),
        (DictForgetsPadding, {}),
        (ReordersTokensOnly, {}),
        (ReordersTensorOnly, {}),
        (UnpaddedIfOneToken, {}),
        (CacheOfClass, {}),
        (CacheOfRemainingDrafts, {}),
        (StateReorderedInPlace, {}),
        (BlocksWithoutPast, CACHE),
        (BlocksWithDraftsByRow, {}),
        (MemoryWithoutOffset, {}),
        (DetachesTokensWithMemory, {}),
        (TopLeftOnRequest, {}),
        (CachesContextOfOneShape, {}),
        (DropsMaskOfCachedContext, {}),
        (CacheOfWindowFromZero, {}),
        (ReordersKeysOnly, {}),
        (ReordersKeysOfEitherMask, {}),
        (DecoderForgetsMask, {**CAUSAL, **CACHE, "mask": {"memory_mask": "attend:bk"}}),
        (ConvolvesLastPieceOnly, CACHE),
        (ConvolvesInPlace, CACHE),
        (TopLeftUnderNoGrad, CACHE),
        (DropsWithCache, CACHE),
        (ForgetsPaddingWithoutMask, {**CACHE, "mask": {"mask": "attend:bk"}}),
        (MaskHidesMemory, {**MEMORY, "mask": {"mask": "attend:bk"}}),
        (SegmentsTopLeftInTraining, MEMORY),
        (StoresPadding, {**CACHE, "mask": {"mask": "attend:bk"}}),
        (StoresPrompt, CACHE),
        (SegmentsWithoutGradient, MEMORY),
        (CacheCutTooEarly, {**CACHE, "window": 4}),
        (CacheLosesLastOfBlock, CACHE),
        (RingFromFirstSlot, {**CACHE, "window": 4}),
        (RingLosesKeys, {**CACHE, "window": 4}),
        (StoresDistancesByKeysWithCache, CACHE),
        (CacheOfFloat32, CACHE),
        (RotaryInHalfAfterPast, {**CACHE, "positions": "rotary"}),
        (RollsTooEarly, {}),
        (ReordersFewerOnly, {}),
        (ForgetsLengths, {}),
        (ReordersTokensOfCache, {}),
        (ReordersTwoOfThree, {}),
        (MemoryOfBothByQueries, {}),
        (DecoderAlignsFirst, {}),
        (HistoryInForecast, {}),
        (DecoderReordersMemory, {}),
    ],
    "long_sequences": [
        (AddsUpInHalf, CAUSAL),
        (FadesFromBlocks, {}),
        (AttendsToEmptyBlock, {}),
        (LinearByLastChunk, CAUSAL),
        (LosesLastBlock, {}),
        (LosesFullBlock, {}),
        (forgets_to_rescale, {}),
        (forgets_to_rescale_late, {}),
        (SumsBlocksUnscaled, {}),
        (GlobalFirstOfLongest, {}),
        (WindowWithMaskOnly, {}),
        (blockwise_attention, {}),
        (PairBiasInChunks, {}),
        (attention_in_short_blocks, {}),
        (FirstAlignmentOfPadding, {}),
    ],
    "positions_matter": [
        (DistancesWithoutSign, {}),
        (RotaryOverHeads, {"positions": "rotary"}),
        (RowsAndColumnsByHeight, {}),
        (BucketsOfFuture, {}),
    ],
    "distant_positions": [
        (BiasOfKeys, {"positions": "alibi"}),
        (BiasCountedInHalf, {"positions": "alibi"}),
        (RotaryOfRoundedTimes, {}),
        (RotaryEndsEarly, {"positions": "rotary"}),
        (RotaryStartsAgain, {"positions": "rotary"}),
        (RotaryInHalf, {"positions": "rotary"}),
        (RotaryOfNormsInHalf, {"positions": "rotary"}),
        (RotaryByBlocks, {"positions": "rotary"}),
        (RotaryImageOfShortRows, {"positions": "rotary"}),
    ],
    "sliding_window": [
        (ChunksOnBothSides, {}),
        (LooksOneLessAhead, {}),
        (WideWindow, {"window": 3}),
        (NarrowWindow, {"window": 3}),
    ],
    "linear_bias": [
        (AlibiByDistanceInOrder, {}),
        (BiasWithWrongSign, {"positions": "alibi"}),
        (QuadraticBias, {"positions": "alibi"}),
        (SameSlopes, {"positions": "alibi"}),
        (SteepSlopes, {"positions": "alibi"}),
    ],
    "relative_positions": [
        (RelativeScoresPaddedBehind, {}),
        (RotaryWrongPairs, {"positions": "rotary"}),
        (RotaryWrongPairsWithMask, {"positions": "rotary"}),
        (RotaryKeysAhead, {"positions": "rotary"}),
        (BiasOfSums, {"positions": "relative"}),
        (RotaryImageByHeight, {"positions": "rotary"}),
        (AxialRotation, {}),
        (BiasOfPixelsFromEnd, {"positions": "relative"}),
        (RowsByHeight, {}),
        (RowsByHeightOfSquare, {}),
        (RotatesHalvesByPairs, {}),
    ],
    "rotary_angles": [(RotaryOfModelWidth, {"positions": "rotary"})],
    "relative_table": [
        (LastRowUnused, {}),
        (FirstRowIsLast, {}),
        (BucketsOfLargestDistance, {}),
        (BucketsThatEndEarly, {}),
        (TableOfRowsAlone, {}),
        (TableOfHalosLast, {}),
        (BiasOfSquareWindow, {"init_args": {"window_size": (2, 2)}}),
        (BiasOfSquareImageWindow, {"init_args": {"window_size": (2, 2)}}),
        (BiasOfVolumeOfOneStride, {}),
    ],
    "eval_matches_train": [
        (HidesFutureInKernelOnly, {}),
        (HalvesInTraining, {}),
        (HalvesWithGradients, {}),
        (HalvesInputsWithGradients, {}),
        (UnmaskedInEval, CAUSAL),
        (UnmaskedUnderNoGrad, CAUSAL),
        (UnmaskedAsTeacher, CAUSAL),
        (TrimsPaddingByCount, {"mask": {"padding": "ignore:bk"}}),
    ],
    "deterministic": [
        (DropoutInEval, {}),
        (WritesToOutput, {}),
        (HalvesIfShown, {}),
        (HalvesIfNotShown, {}),
    ],
    "memory_layout": [(ReadsMemoryInOrder, {}), (ForgetsBiasOfSelf, {})],
    "dropout": [
        (DropsScoresBehindNorm, {}),
        (DropsRowsForColumns, {}),
        (DropsScores, {}),
        (HidesNoneInTraining, {}),
        (DropsForAllItems, {}),
        (DropsBiasForAllItems, {}),
        (DropsForAllHeads, {}),
        (DropsRowsBehindNorm, {}),
        (DropsForAllQueries, {}),
        (DropsForAllCalls, {}),
        (DropsRows, {}),
        (DropsRowsByRate, {}),
        (DropsWithoutScale, {}),
        (DropsWithoutScaleAfterNorm, {}),
        (KeepsWithoutScale, {}),
        (KeepProbabilityAsDropout, {}),
        (KeepsWhatItShouldDrop, {}),
        (KeepsWhatItShouldDropAfterNorm, {}),
        (drops_without_scale, {}),
        (never_drops, {}),
        (NeverDrops, {}),
        (DropsOutputOnly, {}),
        (DropsContextToo, {}),
        (KeepsAllIfMasked, MASK),
        (DropsForAllInFunction, {}),
        (DropsScoresBeforeNormByHand, {}),
        (DropsScoresOfEdges, {}),
    ],
    "earlier_calls": [
        (PrefixOfOtherCall, {}),
        (KeepsFrequencies, {}),
        (KeepsFirstMask, CAUSAL),
        (SignOfAllInstances, {}),
        (KeepsContext, MASK),
        (KeepsMask, MASK),
        (KeepsLongest, {"positions": "rotary"}),
        (KeepsHalf, {"positions": "rotary"}),
        (KeepsBias, {}),
        (KeepsFlag, {}),
        (KeepsCount, {}),
        (StoresDistancesByKeys, {}),
        (KeepsBiasOfPixels, {}),
        (KeepsRowsOfPatches, {}),
        (KeepsRateOfEvaluation, {}),
        (MergesWeightsAgain, {}),
        (KeepsBiasOfEvaluation, {}),
        (ResetForgetsTokensOnly, {}),
        (KeepsRowsByCount, {}),
    ],
    "half_precision": [
        (NoScaleInHalf, {}),
        (EpsilonIsZeroInHalf, {}),
        (SquaresOverflowInHalf, {}),
        (SquaresOverflowInLayers, {}),
    ],
    "copy_after_call": [(KeepsGraph, {})],
    "no_side_effects": [
        (MergesMasksInPlace, {}),
        (ModifiesMask, MASK),
        (ModifiesData, MASK),
        (CountsCalls, {}),
        (AddsPositionsInPlace, {}),
        (AddsBiasInPlace, {}),
        (adds_future_to_mask, {}),
    ],
    "dtype_and_device": [
        (ReturnsFloat32, {}),
        (FillValueOverflowsHalf, {}),
        (OneFillValueOverflowsHalf, PADDED),
    ],
    "compiled": [(DiffersIfCompiled, {})],
    "vmapped": [(DiffersUnderVmap, {})],
    "autocast": [(NoMaskUnderAutocast, {})],
    "own_layers": [(OneLayerFourTimes, {}), (OneLayerForBoth, {})],
    "constructor_options": [
        (FlagBesideMask, {}),
        (ExactWindowShowsFuture, {}),
        (ShiftsOtherWindows, {}),
        (RotaryOfOtherPairs, {}),
        (LimitsInOneKernel, {}),
        (HidesKeyInFront, {}),
        (ConfigOfWindow, {}),
        (DropsInSlices, {}),
        (FusedScaleForgotten, {}),
        (MaskFlagOffByOne, {}),
        (NormWithPastForgotten, {}),
        (WindowForgottenInStep, {}),
        (ChunksEndEarly, {}),
    ],
    "state_dict": [
        (ScaleIsNoParameter, {}),
        (TensorNotInStateDict, {}),
        (CopyDiffers, {}),
        (CopyUsesOriginal, {}),
    ],
}

# Modules that pass a law, and differ little from those that violate it.
PASSING_ONE: list[tuple[str, Any]] = [
    ("deterministic", ItemsOfSession),
    ("batch_independence", MeanOfGraph),
    ("deterministic", ReadingsObserved),
    ("batch_independence", BlockOfTower),
    ("weights_match_output", ShowsIfAsked),
    ("incremental_decoding", StoresIfAsked),
    ("allowed_keys_attended", DetachedMemory),
    ("rows_sum_to_one", FeaturesOfEdges),
    ("batch_independence", FeaturesOfEdges),
    ("longer_padding", PooledByLengths),
    ("large_scores", PooledByLengths),
    ("padding", AgesOfClicks),
    ("gradients", DropsKeysOfScores),
    ("formula", attend_by_heads),
    ("padding", OnesAndZeros),
    ("incremental_decoding", DictOfNormedContext),
    ("position_free_values", PlacesOfKeysOnly),
    ("residual_connection", NormInFront),
    ("dtype_and_device", Spectra),
    ("fully_masked_rows", attend_or_zero),
    ("causality", MeansOfPast),
    ("pairs_of_queries", PairsOfQueries),
    ("batch_independence", ForecastOfVariables),
    ("pixels_in_place", PairsOfEndingNodes),
    ("padding", InterestInTarget),
    ("padding", NodesOfTour),
    ("relative_positions", RelativeScores),
    ("longer_padding", PooledByTime),
    ("frames_in_place", PlacesOverTime),
    ("combined_masks", ZeroAtPadding),
    ("fully_masked_rows", ZeroAtPadding),
    ("padding", TrueAtPadding),
    ("dropout", TimeSeriesEncoder),
    ("batch_independence", TimeSeriesEncoder),
    ("incremental_decoding", NormsOfStoredContext),
    ("causality", NearbyPast),
    ("linear_bias", AlibiByDistance),
    ("weights_match_output", WeightsWithPairFeatures),
    ("image_windows", ShiftedSequence),
    ("allowed_keys_attended", HidesZeros),
    ("rows_sum_to_one", ReturnsWeightsByHead),
    ("parameter_gradients", NoiseOfLearnedScale),
    ("long_sequences", MeansOfWholeBlocks),
    ("incremental_decoding", DistancesBehindContext),
    ("longer_padding", MeanForOthers),
    ("weights_match_output", WeightsBesideNull),
    ("key_permutation", BesideClassToken),
    ("padding", PixelsOfOneColor),
    ("batch_independence", WindowsSeeText),
    ("incremental_decoding", StepsBehindPrompt),
    ("incremental_decoding", RingForChunks),
    ("dropout", DropsColumns),
    ("earlier_calls", LearnsCenter),
    ("relative_positions", RotatesPatchesOfSquare),
    ("rows_sum_to_one", ClearsRowsOfPadding),
    ("gradients", MemoryWithoutGradient),
    ("batch_independence", LocalAndGlobal),
    ("weights_match_output", TalkingWeights),
    ("head_norms", HeadsWithNorms),
    ("eval_matches_train", HidesFutureByFlag),
    ("padding", GroupsOfHeads),
    ("rows_and_columns", PixelsOfEachFrame),
    ("padding", PoolsByToken),
    ("formula", GroupsOfQueries),
    ("weights_match_output", MixesFusedWeights),
    ("incremental_decoding", StoresContext),
    ("incremental_decoding", StreamsFrames),
    ("earlier_calls", PrefixAndText),
    ("weights_match_output", ReturnsWeightsOfTimes),
    ("parameter_gradients", SearchesTokens),
    ("parameter_gradients", DecodesOneSeed),
    ("constructor_options", ExactWindow),
    ("batch_independence", PromptOfClip),
    ("rows_sum_to_one", DecoderWithInputFeeding),
    ("rows_and_columns", OneRow),
    ("equal_values", EdgesConv),
    ("equal_values", VectorsOverKeys),
    ("long_sequences", EdgesConv),
    ("padding", FarFromQueries),
    ("batch_independence", CutsToLongest),
    ("allowed_keys_attended", QueriesOfMap),
    ("longer_padding", OfEqualLengths),
    ("relative_positions", RotatesPatches),
    ("sinks", SinksOfOneMaximum),
    ("sinks", SinksWithValues),
    ("weights_match_output", ReturnsGatedWeights),
    ("padding", attention_of_lengths),
    ("batch_independence", EpisodesOfSteps),
    ("batch_independence", FramesOfClips),
    ("incremental_decoding", CachePositions),
    ("allowed_keys_attended", QueriesOfFeatures),
    ("batch_independence", PoolsByKind),
    ("batch_independence", AgesInUnits),
    ("batch_independence", PixelsOfFrames),
    ("batch_independence", ReturnsWeightsOfItems),
    ("padding", CountsRealTokens),
    ("padding", MaskOfOptionalContext),
    ("relative_positions", RotatesRowsAndColumns),
    ("query_independence", packed_attention),
    ("batch_independence", packed_last),
    ("batch_independence", packed_first),
    ("incremental_decoding", packed_last),
    ("incremental_decoding", CacheIsCounted),
    ("dropout", FeedForwardFirst),
    ("long_sequences", FollowsState),
    ("dropout", DropsBeforeActivation),
    ("allowed_keys_attended", NarrowPrior),
    ("key_independence", NarrowPrior),
    ("positions_matter", RotaryOfTimes),
    ("distant_positions", RotaryOfTimes),
    ("dropout", NormOfHeadsByHand),
    ("dropout", DropsEdges),
    ("dropout", MeanOfHeads()),
    ("dropout", AllDelays),
    ("incremental_decoding", SumsOfDecays),
    ("incremental_decoding", CacheOfLayers),
    ("incremental_decoding", PlaceOfFirst),
    ("sliding_window", TwoLayersOfWindows),
    ("batch_independence", OfPatches),
    ("dropout", OfPatches),
    ("padding", ZeroesAndHidesPadding),
    ("padding", MasksWeights),
    ("rows_sum_to_one", OfEdges),
    ("no_side_effects", MergesMasks),
    ("constructor_options", ShiftsByOption),
    ("batch_independence", Deformable),
    ("padding", Deformable),
    ("query_independence", Deformable),
    ("constructor_options", RotaryOfPairs),
    ("constructor_options", ChoosesKernel),
    ("incremental_decoding", ReturnsRollingCache),
    ("incremental_decoding", MakesCroppedCache),
    ("incremental_decoding", StepOfOneToken),
    ("padding", TwoCausalLayers),
    ("dropout", LayerOfDecoder),
    ("long_sequences", MakesCroppedCache),
    ("dropout", TwoCausalLayers),
    ("dropout", HeadsAndLayer),
    ("long_sequences", RoundsKeys),
    ("earlier_calls", FrequenciesOfCall),
    ("incremental_decoding", StoresAfterSetupInOrder),
    ("incremental_decoding", MemoryBeforeBlocks),
    ("constructor_options", HidesKeyAtEnd),
    ("constructor_options", ConfigOfWindowOfItems),
    ("constructor_options", FirstTokensForAll),
    ("batch_independence", WeighsBySize),
    ("batch_independence", TakesKeysOrBoth),
    ("batch_independence", LengthsOfItems),
    ("incremental_decoding", LeftContext),
    ("constructor_options", DropsInSlicesOfTraining),
    ("incremental_decoding", StepsInGroups),
    ("batch_independence", Packed),
    ("constructor_options", FusedScaleGiven),
    ("constructor_options", MaskFlag),
    ("constructor_options", NormWithPast),
    ("constructor_options", MaskFlagForOthers),
    ("constructor_options", MixesScoresOfHeads),
    ("constructor_options", WindowInStep),
    ("causality", SinksSeePast),
    ("constructor_options", ChunksEndInTime),
    ("parameter_gradients", ZeroBelowChunk),
    ("dropout", FramesWithToken),
    ("dropout", DelaysOfSeries),
    ("long_sequences", StreamsWithMask),
    ("padding", PaddedState),
    ("padding", BlockWithContext),
    ("batch_independence", CountsFromFirstToken),
    ("batch_independence", Segments),
    ("batch_independence", SharesContext),
    ("batch_independence", PacksContexts),
    ("batch_independence", WithBatchNorm),
    ("batch_independence", AddsPositions),
    ("batch_independence", WindowedImage),
    ("neutral_mask", SegmentsAndMask),
    ("earlier_calls", SignOfItsOwn),
    ("earlier_calls", KeepsAngles),
    ("earlier_calls", OfPatchesInRows),
    ("earlier_calls", StoresDistances),
    ("earlier_calls", MergesWeights),
    ("earlier_calls", KeepsBiasUntilLoaded),
    ("sinks", Sinks),
    ("weights_axes", DecoderLayer),
    ("query_independence", TextBeforeImage),
    ("padding", RowsWithMask),
    ("padding", FramesWithMask),
    ("padding", paged_attention),
    ("batch_independence", TextAndImages),
    ("long_sequences", FirstAlignment),
    ("causality", MaskedHalves),
    ("gradients", IntervalsOfUser),
    ("weights_match_output", ReturnsWeightsOfPairs),
    ("incremental_decoding", MemoryOfBoth),
    ("incremental_decoding", DecoderOfMemory),
    ("incremental_decoding", DecoderWithState),
    ("incremental_decoding", DecoderReordersTokens),
    ("rows_sum_to_one", attention_to_cache),
    ("formula", attention_to_cache),
    ("query_key_norms", NormalizesHeadsOfBoth),
    ("eval_matches_train", TrimsPadding),
    ("dropout", EncodesPositions),
    ("dropout", DropsInFunction),
    ("rows_sum_to_one", NoiseInTraining),
    ("sinks_compete", Sinks),
    ("key_independence", SelfAttention),
    ("own_context", DividesByOwnSum),
    ("own_context", NormsOverHeads),
    ("no_side_effects", AddsPositions),
    ("query_independence", OptionalContext),
    ("added_mask", AddsMask),
    ("relative_positions", RotaryImage),
    ("relative_positions", RotaryUnlessMasked),
    ("formula", attention_of_heads),
    ("weights_match_output", WeightsOnRequest),
    ("weights_match_output", FusedWithBias),
    ("head_independence", NormalizesHeads),
    ("head_independence", FusedMultiQuery),
    ("head_independence", WithWeightlessNorm),
    ("head_independence", WithNormOfHeads),
    ("linear_in_value", NormalizesQueriesAndKeys),
    ("incremental_decoding", CacheInDict),
    ("incremental_decoding", StoresCache),
    ("incremental_decoding", WithMemory),
    ("incremental_decoding", DetachesMemory),
    ("incremental_decoding", CacheOnRequest),
    ("incremental_decoding", CachesContext),
    ("incremental_decoding", CachesMaskOfContext),
    ("incremental_decoding", ReordersDict),
    ("score_scale", RotaryAfterNorms),
    ("relative_positions", RotaryAfterNorms),
    ("relative_positions", RotaryOfManyDevices),
    ("relative_positions", RotaryOfDevices),
    ("formula", RotaryOfDevices),
    ("rotary_angles", Rotary),
    ("rotary_angles", RotaryWithBase),
    ("distant_positions", BiasOfLaterKeys),
    ("relative_table", RelativeTable),
    ("relative_table", Buckets),
    ("relative_table", TableOfBothDirections),
    ("relative_table", TableOfWindows),
    ("relative_table", TableOfHalos),
    ("relative_table", BiasOfWindow),
    ("relative_table", BiasOfImageWindow),
    ("relative_table", BiasOfVolume),
    ("distant_positions", RotaryOfNorms),
    ("relative_table", TableOfShiftedWindows),
    ("parameter_gradients", NarrowNetwork),
    ("parameter_gradients", BiasBetweenWindows),
    ("parameter_gradients", BiasOfItself),
    ("parameter_gradients", PairsOfResidues),
    ("longer_padding", causal_from_last_key),
    ("large_scores", FillsWithTenThousand),
    ("own_layers", FourLayers),
    ("own_layers", TiedKeys),
    ("weights_match_output", WeightsBeforeDropout),
    ("linear_bias", penalized_attention),
    ("parameter_gradients", BiasOfEdges),
    ("parameter_gradients", PoolsByWeights),
    ("parameter_gradients", LearnsTemperature),
    ("deterministic", KeysOfTwoHeads),
    ("allowed_keys_attended", RequiresOther),
    ("formula", HeadsInWeights),
    ("formula", ListOfHeads),
    ("formula", CausalUnlessMasked),
    ("incremental_decoding", DecodesWithState),
    ("incremental_decoding", DecodesWithEitherMask),
    ("dropout", TwoAttentions),
    ("dropout", DropsWeightsAndContext),
    ("long_sequences", NearPast),
    ("long_sequences", SumsBlocks),
    ("batch_independence", EdgesOfItems),
    ("dropout", TwelveHeads),
    ("dropout", DropsQueries),
    ("parameter_gradients", SoftmaxOverFeatures),
    ("parameter_gradients", TwoStreams),
    ("parameter_gradients", LastOfTwoStreams),
    ("padding", MaskOfText),
    ("parameter_gradients", PointsByLogits),
    ("no_side_effects", CacheInBuffers),
    ("incremental_decoding", CacheOfWindow),
    ("incremental_decoding", RingOfTokens),
    ("incremental_decoding", StoresDistancesWithCache),
    ("long_sequences", PoolsChannelsFirst),
    ("parameter_gradients", FadesWithDistance),
    ("parameter_gradients", OverFrames),
    ("parameter_gradients", OverFewFrames),
    ("batch_independence", OverFrames),
    ("parameter_gradients", SharesOfHeads),
    ("dropout", DropsFeaturesOfKeys),
    ("dropout", DropsKeys),
    ("dropout", CombinesWithQuery),
    ("dropout", DropsHeads),
    ("long_sequences", TwoStreams),
    ("relative_table", TableOfPairs),
    ("long_sequences", BlocksWithPrevious),
    ("half_precision", NormalizesTokens),
    ("half_precision", NormalizesEachLayer),
    ("incremental_decoding", ConvolvesWithState),
    ("incremental_decoding", MemoryOfSegments),
    ("incremental_decoding", MemoryOfSomeSegments),
    ("incremental_decoding", MaskOfSegment),
    ("incremental_decoding", PaddingInCache),
    ("incremental_decoding", CacheOfBlocks),
    ("fully_masked_rows", DividesBySum),
    ("gradients", RecomputesDropout),
    ("batch_independence", HidesInWindows),
    ("linear_in_value", KeyNormOfContext),
    ("own_key_attended", Neighborhood),
    ("own_key_attended", WindowsOfImage),
    ("own_key_attended", HalosOfImage),
    ("image_windows", HalosOfImage),
    ("long_sequences", FadesInBlocks),
    ("long_sequences", AddsUp),
    ("dropout", DropsTable),
    ("dropout", DropsTableAndWeights),
    ("dropout", DropsFeaturesOfPositions),
    ("parameter_gradients", GlobalTokens),
    ("parameter_gradients", KeysOfEncoder),
    ("parameter_gradients", MarksGlobalTokens),
    ("rows_sum_to_one", MarksGlobalTokens),
    ("padding", MarksGlobalTokens),
    ("parameter_gradients", AddedGlobalTokens),
    ("parameter_gradients", SaturatesSecondSoftmax),
    ("gradients", SteepKinks),
    ("query_permutation", MergesChunks),
    ("key_permutation", ClassBeforePixels),
    ("query_permutation", ClassBeforePixels),
    ("formula", ScaleInInitialWeights),
    ("relative_positions", QueriesBeforeHeads),
    ("parameter_gradients", ZeroWhereLeftOut),
    ("allowed_keys_attended", RectifiesOutput),
    ("large_scores", KeysFromFirst),
    ("equal_values", NormalizedImage),
    ("equal_values", OverlappingWindows),
    ("gradients", BlockwiseBackward),
    ("gradients", LastQueries),
    ("gradients", AddsBias),
    ("image_windows", ShiftedWindows),
    ("image_windows", ShiftedUnlessSmall),
    ("beside_convolution", BesideConvolution),
    ("finite_in_half", RectifiedLinear),
    ("pixels_in_place", PixelsInPlace),
    ("pixels_in_place", RowsThenColumns),
    ("pixels_in_place", PixelsOverTime),
    ("rectangular_images", RowsThenColumns),
    ("rows_and_columns", AddsRowsAndColumns),
    ("rectangular_images", MergedPixels),
    ("pixels_in_place", HalosOfImage),
    ("long_sequences", BiasOfOffsets),
    ("long_sequences", LocalAndGlobalBlocks),
    ("long_sequences", ForgetsInChunks),
    ("long_sequences", LinearInChunks),
    ("half_precision", EveryThirdToken),
    ("sliding_window", WindowOnEachSide),
    ("positions_matter", SlowColumns),
    ("positions_matter", RowsAndColumns),
    ("long_sequences", GlobalFirstToken),
    ("allowed_keys_attended", BehindPrefix),
    ("linear_in_value", attention_of_new_tokens),
    ("deterministic", LearnedSegments),
    ("batch_independence", ImageBesideText),
    ("batch_independence", FramesBesideText),
    ("allowed_keys_attended", ImageBesideText),
    ("key_permutation", ImageBesideText),
    ("dropout", attention_of_flax),
    ("incremental_decoding", CacheOfSlots),
    ("incremental_decoding", CacheOfDrafts),
    ("incremental_decoding", StateOfMethod),
    ("incremental_decoding", BlocksOfQueries),
    ("allowed_keys_attended", CausalOrContext),
    ("batch_independence", SharesMaskOfContext),
    ("batch_independence", FeaturesOfContext),
    ("query_key_norms", NormsOfTwoStreams),
    ("query_independence", ReweightsByCosine),
    ("long_sequences", Landmarks),
    ("batch_independence", ReshapesContext),
    ("batch_independence", DealsOutContext),
    ("gradients", LowestOfFloat32),
    ("long_sequences", ChunksOfPast),
    ("query_independence", ItemsForHistory),
    ("batch_independence", HalfRotation),
    ("weights_match_output", WeightsAfterDropout),
    ("allowed_keys_attended", BondsOfAtoms),
    ("batch_independence", PointsOfColumns),
    ("query_independence", AttendsToAudio),
    ("padding", RelativeLengths),
    ("head_directions", HeadsSeeTwoWays),
    ("incremental_decoding", HistoryInFront),
    ("incremental_decoding", PassesOverPadding),
    ("large_scores", QuarticScores),
    ("own_key_attended", LoopsCountOnce),
    ("weights_match_output", WeightsOfChoice),
    ("batch_independence", EdgesConv),
    ("allowed_keys_attended", ReadsPastOnly),
    ("padding", PoolsFrames),
    ("padding", LengthsOfColumns),
]

# Designs that violate a law by intention: it is skipped, and the reason is given.
EXCUSED: list[tuple[str, type[nn.Module], str]] = [
    ("constructor_options", OptionOfContext, "no option that is off"),
    ("formula", BandOfFrames, "look-ahead"),
    ("allowed_keys_attended", WaitKAttention, "WaitK"),
    ("key_permutation", WaitKAttention, "WaitK"),
    ("query_independence", WaitKAttention, "WaitK"),
    ("residual_connection", NormAtBothEnds, "that of a norm"),
    ("key_permutation", PlacesFromTheEnd, "positional encoding"),
    ("longer_padding", PlacesFromTheEnd, "counted from the last token"),
    ("causality", CausalInFrames, "is not causal"),
    ("formula", SeesAhead, "lookahead"),
    ("long_sequences", CountsFromNewest, "counted from the last token"),
    ("gradients", WeightsAsFeatures, "where gradients stop"),
    ("rows_sum_to_one", attend_with_one_more, "softmax_plus_one"),
    ("equal_values", MixesHeadsBehind, "proj_w"),
    ("formula", DividesByWidth, "a scale that is documented"),
    ("sliding_window", ChunksOnTheLeft, "`window` is not given"),
    ("query_independence", ActiveQueries, "topk"),
    ("query_key_norms", NormsBesidePositions, "a table of positions"),
    ("query_permutation", StepsOfSensors, "is always causal"),
    ("formula", ContinuesPrompt, "its queries attend to each other, too"),
    ("formula", GrowsWithLength, "log_len"),
    ("batch_independence", NodesBetweenBounds, "needs two batch items"),
    ("sliding_window", LooksAheadTwice, "`window` is not given"),
    ("padding", PoolsPatchesOfFrames, "no mask that could hide keys"),
    ("padding", LocalAndGlobal, "no mask that could hide keys"),
    ("allowed_keys_attended", MemoryWithoutGradient, "no gradient"),
    ("weights_match_output", TalkingWeightsUndocumented, "mixes the weights"),
    ("head_norms", TokensWithGlobalNorm, "written by hand"),
    ("head_norms", TokensWithCondition, "written by hand"),
    ("batch_independence", NodesOfGraphs, "needs two batch items"),
    ("sliding_window", LooksAhead, "`window` is not given"),
    ("allowed_keys_attended", AttendsToNearest, "`topk`"),
    ("positions_matter", SignedDistances, "is not rotary or alibi"),
    ("query_independence", MonotonicPlaces, "another design"),
    ("key_permutation", MonotonicPlaces, "another design"),
    ("gradients", LogProbabilities, "the lowest number of its dtype"),
    ("half_precision", LogProbabilities, "the lowest number of its dtype"),
    ("linear_in_value", MeansOfHyperbolicPoints, "another design"),
    ("own_key_attended", TropicalMaximum, "another design"),
    ("weights_axes", AssignsTokens, "another design"),
    ("rows_sum_to_one", AssignsTokens, "another design"),
    ("allowed_keys_attended", HeadsSeeTwoWays, "direction_mask"),
    ("query_permutation", HeadsSeeTwoWays, "direction_mask"),
    ("weights_axes", MemoryInFront, "have one length"),
    ("dtype_and_device", TableOfFloat32, "is for float32 only"),
    ("half_precision", TableOfFloat32, "is for float32 only"),
    ("parameter_gradients", AttendsInOneFrame, "has one frame"),
    ("dtype_and_device", ProbabilitiesOfTokens, "other numbers than vectors"),
    ("padding", PairsOfTokens, "has no mask that could hide keys"),
    ("key_permutation", PairsOfTokens, "rows and columns are in no order"),
    ("long_sequences", NarrowPrior, "shares of the length"),
    ("long_sequences", AgesOfItems, "counted from the last token"),
    ("query_permutation", LayerWithOptionalContext, "is always causal"),
    ("query_independence", LayerWithOptionalContext, "takes no queries"),
    ("score_independence", NearFive, "neither returned nor those of a softmax"),
    ("key_permutation", RecurrentDecoder, "recurrent layers"),
    ("query_independence", RecurrentDecoder, "its queries attend to each other"),
    ("dropout", OfPatchesOrNone, "constant for so few tokens"),
    ("long_sequences", Deformable, "grid_sample"),
    ("longer_padding", Deformable, "grid_sample"),
    ("key_permutation", TwoCausalLayers, "order the keys of one another"),
    ("formula", RoundsKeys, "fake_quantize"),
    ("formula", MakesCroppedCache, "its values have positions"),
    ("gradients", RoundsKeys, "fake_quantize"),
    ("padding", FramesOfVideo, "no mask that could hide keys"),
    ("neutral_mask", FramesOfVideo, "no mask that could hide nothing"),
    ("relative_table", ChunksWithAllPast, "distances occur in its chunks"),
    ("neutral_mask", PrefixByItem, "no mask"),
    ("incremental_decoding", CacheOfBytes, "rounded to integers"),
    ("gradients", DetachedStabilizer, "detaches the scale"),
    ("half_precision", SquaresOverflow, "does not mention"),
    ("finite_in_half", DetachedStabilizer, "may round to 0"),
    ("allowed_keys_attended", NearbyFrames, "chunk_index"),
    ("key_permutation", FramesWithToken, "num_frames"),
    ("score_scale", RotaryUnscaled, "scaling = 1.0"),
    ("own_layers", RepeatsOneLayer, "share_layers"),
    ("own_layers", OneLayerForPositions, "share_att_key"),
    ("rows_sum_to_one", ConvolvesValues, "may mix its values with padding"),
    ("score_scale", RotaryOfManyDevices, "the order of its fused projection"),
    ("weights_match_output", RotaryOfManyDevices, "the order of its fused projection"),
    ("causality", CausalOverFrames, "is not causal"),
    ("distant_positions", WindowAtPrediction, "rounded to torch.bfloat16 alone"),
    ("distant_positions", RotaryInDtypeOfBuffer, "the dtype of a buffer"),
    ("distant_positions", ProjectsInDtypeOfBuffer, "the dtype of a buffer"),
    ("fully_masked_rows", NormalizesContext, "gives NaN in float16"),
    ("fully_masked_rows", SumIsZeroInHalf, "gives NaN in float16"),
    ("relative_positions", RotaryImageOfAngles, "the positions of pixels are given"),
    ("relative_positions", RotaryImageWithMean, "pools the pixels"),
    ("padding", TextAndLastImage, "has no mask that could hide keys"),
    ("padding", TextAndEachImage, "has no mask that could hide keys"),
    ("equal_values", Prefix, "3 keys of its own"),
    ("score_independence", StrongestTokens, "topk"),
    ("incremental_decoding", SlotsOfMemory, "`cache` is not given"),
    ("incremental_decoding", CachesContextOfCaller, "is documented to be empty"),
    ("incremental_decoding", CachesContextOnce, "is documented to be empty"),
    ("sinks_compete", KeysOfFullPairs, "a single key is hidden"),
    ("equal_values", ApproximateInverse, "pinv"),
    ("query_independence", ShortDecoder, "its queries attend to each other"),
    ("equal_values", MergedKeys, "keys that are not the tokens"),
    ("allowed_keys_attended", PositiveScores, "no softmax"),
    ("key_permutation", Retention, "has a positional encoding"),
    ("score_independence", PointCloud, "PointCloud"),
    ("gradients", Stationary, "Stationary"),
    ("score_independence", Stationary, "Stationary"),
    ("formula", SharpensWithPosition, "floor_scale"),
    ("linear_bias", SlopesInOneSeries, "one series, as in the text of the paper"),
    ("linear_in_value", CombinesWithQuery, "an activation, tanh"),
    ("equal_values", CombinesWithQuery, "an activation, tanh"),
    ("allowed_keys_attended", Chunks, "chunk_size"),
    ("allowed_keys_attended", AttendsToSlots, "softmax over features"),
    ("dropout", NeverCallsDropoutOfZero, "its dropout is 0, which nothing sets"),
    ("score_independence", ValuesOfNeighbors, "neither returned nor those of a"),
    ("batch_independence", AttendsToImages, "its pixels attend to batch items only"),
    ("causality", CausalBehindPrefix, "has not one output for each token"),
    ("causal_gradient", CausalBehindPrefix, "has not one output for each token"),
    ("distant_positions", BiasOfKeys, "its linear bias grows with the length"),
    ("large_scores", BesideState, "its state overflows, and not its scores"),
    ("batch_independence", SamplesKeys, "randint"),
    ("long_sequences", RopeOfLongerInputs, "rope_factor"),
    ("long_sequences", LargestScores, "topk"),
    ("linear_bias", LinearBiasInWindow, "Window"),
    ("formula", ClipsProjections, "clip_qkv"),
    ("autocast", SumsByIndex, "does not run under autocast"),
    ("long_sequences", ChoosesWithoutGradients, "topk"),
    ("key_permutation", SelectiveSelfAttention, "Selective"),
    ("long_sequences", CountsFromTheEnd, "counted from the last token"),
    ("longer_padding", CountsFromTheEnd, "counted from the last token"),
    ("equal_values", ReadsPastOnly, "its first token sees no values"),
    ("head_directions", OfVisualWidth, "heads are not of two directions"),
]

# Modules that pass all laws.
PASSING: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (Correct, {}),
    (MaskedSelfAttention, {}),
    (SelfAttention, {}),
    (WithCache, CACHE),
    (Window, {"window": 3}),
    (LinearBias, {"positions": "alibi"}),
    (Rotary, {"positions": "rotary"}),
]


def each_law_of(family: ModuleType) -> pytest.MarkDecorator:
    """Run a slow test once for each law of a module."""
    from attention_laws import LAWS

    names = [
        name for name, law in LAWS.items() if law.test.__module__ == family.__name__
    ]
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=pytest.mark.slow) for n in names]
    )


def assert_caught(law: str, device: str) -> None:
    """Each module violates `law`, and its counterexample runs on its own.

    Only that of the first is made smaller, which takes longer than to find it.
    """
    from attention_laws import check, checker

    for number, (specimen, options) in enumerate(VIOLATING[law]):
        with pytest.MonkeyPatch.context() as patch:
            if number:
                patch.setattr(checker, "SHRINKING_RUNS", 0)
                patch.setattr(checker, "SLOW_SHRINKING_RUNS", 0)
            report = check(specimen, only=law, device=device, **options)
        assert [r.law.name for r in report.failed] == [law], f"{specimen}\n{report}"
        example = report.failed[0].counterexample
        assert example is not None
        failure = failure_of(example.code)
        # It fails at its last line: the assertion, or the call that raises.
        assert isinstance(failure, AssertionError) != ("raises" in example.message)
        traceback = failure.__traceback__
        assert traceback is not None
        assert traceback.tb_next is not None
        assert traceback.tb_next.tb_lineno == len(example.code.splitlines())


def failure_of(code: str) -> Exception:
    """The exception that a program raises."""
    try:
        exec(compile(code, "<counterexample>", "exec"), {})
    except Exception as error:
        return error
    raise AssertionError(f"it does not fail:\n{code}")
