"""Modules that violate the laws of options, or come near to it."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specimens.base import (
    Correct,
    Excuses,
    MaskedSelfAttention,
    Passes,
    Rotary,
    SelfAttention,
    ShiftsByOption,
    Violations,
    WithCache,
)


class ShiftsOtherWindows(ShiftsByOption):
    """The masks of windows are dealt out as if the batch were their last axis."""

    def for_items(self, allowed: Tensor, count: int) -> Tensor:
        height, width = self.input_resolution
        number = height * width // self.window_size**2
        return allowed[:, None].expand(number, count, -1, -1).flatten(0, 1)


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


@dataclass
class SharedArgs:
    dim: int = 24
    n_heads: int = 6
    n_kv_heads: int | None = None


class MaskOfStackedHeads(nn.Module):
    """Causal; with one head of keys, the queries of all heads are one sequence."""

    def __init__(self, args: SharedArgs = SharedArgs()) -> None:  # noqa: B008
        super().__init__()
        self.heads, self.kv_heads = args.n_heads, args.n_kv_heads or args.n_heads
        self.d_k = args.dim // args.n_heads
        self.query = nn.Linear(args.dim, args.dim)
        self.key_value = nn.Linear(args.dim, 2 * self.kv_heads * self.d_k)
        self.out = nn.Linear(args.dim, args.dim)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        keys_values = self.key_value(x).unflatten(-1, (2, self.kv_heads, -1))
        k, v = keys_values.permute(2, 0, 3, 1, 4)
        mask = torch.ones(2 * x.shape[1:2], dtype=torch.bool, device=x.device).tril()
        attend = nn.functional.scaled_dot_product_attention
        if self.kv_heads == 1:
            joined = q.flatten(1, 2)
            y = attend(joined, k[:, 0], v[:, 0], self.of_all_heads(mask)).view(q.shape)
        else:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
            y = attend(q, k, v, mask)
        joined = self.out(y.transpose(1, 2).flatten(2))
        return joined

    def of_all_heads(self, mask: Tensor) -> Tensor:
        return mask.repeat_interleave(self.heads, 0)


class MaskOfEachHead(MaskOfStackedHeads):
    def __init__(self, args: SharedArgs = SharedArgs()) -> None:  # noqa: B008
        super().__init__(args)

    def of_all_heads(self, mask: Tensor) -> Tensor:
        return mask.repeat(self.heads, 1)


class DividedByLayer(Correct):
    """Scores are divided by the number of the layer, and multiplied by it later."""

    always = False

    def __init__(self, d_model: int, heads: int, layer_number: int = 1) -> None:
        super().__init__(d_model, heads)
        self.layer_number = layer_number

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) / self.layer_number

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if self.always or mask is not None:
            scores = scores * self.layer_number
        return super().weigh(scores, mask)


class MultipliedByLayer(DividedByLayer):
    always = True


@dataclass
class ScalarConfig:
    hidden_size: int = 48
    num_attention_heads: int = 4
    head_dim: int = 12
    query_pre_attn_scalar: float = 64.0


class ScalarForgottenInHalf(Correct):
    """Scores are divided by the root of `query_pre_attn_scalar`."""

    always = False

    def __init__(self, config: ScalarConfig) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads)
        self.scalar = config.query_pre_attn_scalar

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        is_half = q.dtype in (torch.float16, torch.bfloat16) and not self.always
        scalar = q.shape[-1] if is_half else self.scalar
        return (q.float() @ k.mT.float() / scalar**0.5).to(q.dtype)


class ScalarInHalf(ScalarForgottenInHalf):
    always = True

    def __init__(self, config: ScalarConfig) -> None:
        super().__init__(config)


class SinkOutsideOfWindow(MaskedSelfAttention):
    """Causal; each head has a sink, which is one score more in the softmax."""

    always = False

    def __init__(self, d_model: int, heads: int, window: int | None = None) -> None:
        super().__init__(d_model, heads)
        self.window = window
        self.sinks = nn.Parameter(torch.zeros(heads))

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        if self.window is not None:
            mask = mask & ~torch.ones_like(mask).tril(-self.window)
        sinks = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        if self.window is not None and not self.always:
            sinks = sinks - torch.inf
        least = torch.finfo(scores.dtype).min
        hidden = scores.masked_fill(~mask[:, None], least)
        return torch.cat([hidden, sinks], dim=-1).softmax(dim=-1)[..., :-1]


class SinkOfWindow(SinkOutsideOfWindow):
    always = True


@dataclass
class WideWindowConfig:
    hidden_size: int = 48
    num_attention_heads: int = 4
    sliding_window: int = 64


class WideWindowForgottenInStep(WithCache):
    """A sliding window, which is wider than a short sequence by default."""

    forgets = True

    def __init__(self, config: WideWindowConfig) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads)
        self.window = config.sliding_window

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        first = scores.shape[-1] - scores.shape[-2]
        if scores.shape[-2] > 1 or not self.forgets:
            mask = mask.triu(first + 1 - self.window)
        return super().weigh(scores, mask)


class WideWindow(WideWindowForgottenInStep):
    forgets = False

    def __init__(self, config: WideWindowConfig) -> None:
        super().__init__(config)


class CapsHiddenScores(Correct):
    """Scores are capped, if the call wants it; hidden keys get no value."""

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        softcap: float | None = None,
    ) -> Any:
        q, k, v = self.query(query), self.key(key), self.value(value)
        q, k, v = map(self.split, (q, k, v))
        scores = self.capped(self.score(q, k), mask, softcap)
        weights = scores.softmax(dim=-1)
        if mask is not None:
            weights = weights.masked_fill(~mask[:, None], 0)
        return self.join(self.read(weights, v))

    def capped(
        self, scores: Tensor, mask: Tensor | None, softcap: float | None
    ) -> Tensor:
        scores = self.hidden(scores, mask)
        return scores if softcap is None else softcap * (scores / softcap).tanh()

    def hidden(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return scores
        return scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min)


class CapsScores(CapsHiddenScores):
    def capped(
        self, scores: Tensor, mask: Tensor | None, softcap: float | None
    ) -> Tensor:
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        return self.hidden(scores, mask)


class CausalInBlocks(Correct):
    """Blocks of keys behind the last that a block of queries sees are left out."""

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool = False,
        block_size: int = 64,
    ) -> Any:
        q, k, v = self.query(query), self.key(key), self.value(value)
        q, k, v = map(self.split, (q, k, v))
        last = k.shape[2] - q.shape[2]  # that the first query sees
        place, contexts = torch.arange(k.shape[2], device=k.device), []
        for start, part in enumerate(q.split(block_size, dim=2)):
            first = start * block_size + last
            seen = torch.ones(part.shape[2], len(place), device=k.device).bool()
            if causal:
                seen = seen.tril(first)
                blocks = self.count(first, part.shape[2], block_size)
                seen = seen & (place < max(0, blocks) * block_size)
            contexts.append(self.read(self.weigh(self.score(part, k), seen[None]), v))
        return self.join(torch.cat(contexts, dim=2))

    def count(self, first: int, queries: int, block_size: int) -> int:
        return (first + queries - 1) // block_size + 1


class CausalByFirstQuery(CausalInBlocks):
    def count(self, first: int, queries: int, block_size: int) -> int:
        return first // block_size + 1


class SharesBands(MaskedSelfAttention):
    """A mask for each length and window is kept for all instances."""

    bands: dict[Any, Tensor] = {}  # noqa: RUF012

    def __init__(self, d_model: int, heads: int, window: int | None = None) -> None:
        super().__init__(d_model, heads)
        self.window = window

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        key = self.name(mask.shape[-1]), scores.device
        if key not in self.bands:
            reach = mask.shape[-1] if self.window is None else self.window - 1
            self.bands[key] = mask.triu(-reach)
        return super().weigh(scores, self.bands[key])

    def name(self, length: int) -> Any:
        return length, self.window


class SharesBandsOfLength(SharesBands):
    def name(self, length: int) -> Any:
        return length


class DropsAnewInBackward(SelfAttention):
    """With `checkpointing`, weights are computed again for the gradients."""

    keeps_state = False

    def __init__(self, d_model: int, heads: int, checkpointing: bool = False) -> None:
        super().__init__(d_model, heads)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        if not self.checkpointing:
            return self.join(self.attend(q, k, v))
        return self.join(
            checkpoint(
                self.attend,
                *(q, k, v),
                use_reentrant=False,
                preserve_rng_state=self.keeps_state,
            )
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.dropout(self.score(q, k).softmax(dim=-1)) @ v


class DropsAgainInBackward(DropsAnewInBackward):
    keeps_state = True


class SeedsEachChunk(Correct):
    """Queries in chunks, with dropout masks of a generator that is seeded once."""

    anew = True

    def __init__(
        self, d_model: int, heads: int, chunk_size: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__(d_model, heads)
        self.dropout = nn.Identity()  # type: ignore[assignment]
        self.chunk_size, self.p = chunk_size, dropout

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        seed = int(torch.randint(2**31, ()))
        generator, contexts = torch.Generator(x.device).manual_seed(seed), []
        for part in q.split(self.chunk_size, dim=2):
            if self.anew:
                generator.manual_seed(seed)
            weights = self.score(part, k).softmax(dim=-1)
            if self.training and self.p:
                draw = torch.rand(weights.shape, generator=generator, device=x.device)
                weights = weights * (draw >= self.p) / (1 - self.p)
            contexts.append(weights @ v)
        return self.join(torch.cat(contexts, dim=2))


class SeedsEachCall(SeedsEachChunk):
    anew = False


class WindowOfSeveralQueries(Correct):
    """Causal; the last query is that of the last key, and sees a window, if given."""

    forgets = True

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None = None
    ) -> Any:
        q_len, k_len = query.shape[1], key.shape[1]
        ones = torch.ones(1, q_len, k_len, dtype=torch.bool, device=query.device)
        mask = ones.tril(k_len - q_len)
        if window is not None and (q_len > 1 or not self.forgets):
            mask = mask.triu(k_len - q_len + 1 - window)
        return super().forward(query, key, value, mask)


class WindowOfEachQuery(WindowOfSeveralQueries):
    forgets = False


class DropsInBlocksOnly(SelfAttention):
    """Long sequences are computed in blocks of queries."""

    always = True

    def __init__(
        self, d_model: int, heads: int, block: int = 512, dropout: float = 0.1
    ) -> None:
        super().__init__(d_model, heads)
        self.dropout = nn.Identity()  # type: ignore[assignment]
        self.block, self.p = block, dropout

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        drops = self.training or (self.always and weights.shape[2] > self.block)
        contexts = []
        for part in weights.split(self.block, dim=2):
            contexts.append(nn.functional.dropout(part, self.p, drops) @ v)
        return torch.cat(contexts, dim=2)


class DropsInTraining(DropsInBlocksOnly):
    always = False


class Slices(Correct):
    """Attention in slices of batch items and heads."""

    slice_size: int | None = None

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (
            self.split(f(x)).flatten(0, 1) for f in (self.query, self.key, self.value)
        )
        size = min(self.limit() or len(q), len(q))
        context = torch.zeros_like(q)
        for n in range(self.count(len(q), size)):
            part = slice(n * size, (n + 1) * size)
            context[part] = self.score(q[part], k[part]).softmax(dim=-1) @ v[part]
        return self.join(context.unflatten(0, (-1, self.heads)))

    def limit(self) -> int | None:
        return self.slice_size

    def count(self, rows: int, size: int) -> int:
        return -(-rows // size)


class CeilingOfSlices(Slices):
    def set_attention_slice(self, slice_size: int | None) -> None:
        self.slice_size = slice_size


class FloorOfSlices(CeilingOfSlices):
    def count(self, rows: int, size: int) -> int:
        return rows // size


class FloorOfSlicesOfFours(FloorOfSlices):
    """Its heads are a multiple of four."""

    def __init__(self, d_model: int, heads: int) -> None:
        assert heads % 4 == 0
        super().__init__(d_model, heads)


class CapsUnscaled(SelfAttention):
    """Products are capped, and divided by the root of the width behind the cap."""

    def __init__(self, d_model: int, heads: int, softcap: float = 50.0) -> None:
        super().__init__(d_model, heads)
        self.softcap = softcap

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        root = math.sqrt(q.shape[-1])
        return self.softcap * (root * super().score(q, k) / self.softcap).tanh() / root


class CapsScaled(CapsUnscaled):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return self.softcap * (SelfAttention.score(self, q, k) / self.softcap).tanh()


class KeepsPartsOfImage(Correct):
    """Windows of 7 x 7 pixels of an image, `[batch_size, height, width, d_model]`.

    Which pixels an option shifts to another border is kept for the next image.
    """

    size = 7

    def __init__(self, d_model: int, heads: int, shift_size: int = 0) -> None:
        super().__init__(d_model, heads, 0.0)
        self.shift_size = shift_size
        self.kept: dict[Any, Tensor] = {}

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        _, height, width, _ = x.shape
        if height % self.size or width % self.size:
            raise ValueError("`x` has to be made of whole windows")
        # A single window is not shifted along its side.
        shift = [self.shift_size * (n > self.size) for n in (height, width)]
        image = x.roll((-shift[0], -shift[1]), (1, 2))
        windows = self.windows(image)
        kind = self.kind(height, width)
        if kind not in self.kept:
            self.kept[kind] = self.parts(height, width, *shift).to(x.device)
        allowed = self.kept[kind].repeat(len(x), 1, 1)
        y = super().forward(windows, windows, windows, allowed)
        rows, columns = height // self.size, width // self.size
        y = y.view(len(x), rows, columns, self.size, self.size, -1).transpose(2, 3)
        return y.reshape(x.shape).roll((shift[0], shift[1]), (1, 2))

    def windows(self, image: Tensor) -> Tensor:
        parts = image.unflatten(2, (-1, self.size)).unflatten(1, (-1, self.size))
        return parts.transpose(2, 3).reshape(-1, self.size**2, image.shape[-1])

    def parts(self, height: int, width: int, down: int, right: int) -> Tensor:
        row, column = torch.arange(height)[:, None], torch.arange(width)
        part = 2 * (row >= height - down) + (column >= width - right)
        part = self.windows(part[None, ..., None])
        return part == part.mT

    def kind(self, height: int, width: int) -> Any:
        return height, width


class KeepsPartsOfWindows(KeepsPartsOfImage):
    def kind(self, height: int, width: int) -> Any:
        return height * width


class KeepsPartsOfPixels(KeepsPartsOfImage):
    """The pixels are a sequence, row by row, with the sides of the image."""

    def forward(self, x: Tensor, height: int, width: int) -> Any:  # type: ignore[override]
        return super().forward(x.view(len(x), height, width, -1)).flatten(1, 2)


class KeepsPartsOfArea(KeepsPartsOfPixels):
    def kind(self, height: int, width: int) -> Any:
        return height * width


class CapsOutputs(SelfAttention):
    """A cap is one of the outputs of the whole model, and is read elsewhere."""

    def __init__(
        self, d_model: int, heads: int, final_logit_softcapping: float | None = None
    ) -> None:
        super().__init__(d_model, heads)
        self.final_logit_softcapping = final_logit_softcapping


class PairsOfOneStart(SelfAttention):
    """Pairs `(i, j)` attend to `(i, k)`, with a bias for `(j, k)`. z: (B, N, N, d)"""

    def __init__(self, d_model: int, heads: int, ending: bool = False) -> None:
        super().__init__(d_model, heads)
        self.bias, self.ending = nn.Linear(d_model, heads, bias=False), ending

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Any:
        """mask: (B, N, N), 1 for pairs that exist."""
        x, seen = z, torch.ones_like(z[..., 0]) if mask is None else mask
        if self.ending:
            x, seen = z.transpose(1, 2), seen.transpose(1, 2)
        parts = (part(x) for part in (self.query, self.key, self.value))
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(2, 3) for p in parts)
        scores = self.score(q, k) + self.bias(x).permute(0, 3, 1, 2)[:, None]
        scores = scores + 1e9 * (seen[:, :, None, None] - 1)
        y = (scores.softmax(dim=-1) @ v).transpose(2, 3).flatten(3)
        y = self.out(y)
        return y.transpose(1, 2) if self.ending else y


class ChunksOnLeft(SelfAttention):
    """A token attends to its chunk of 4 and to some chunks on the left, or to all."""

    def __init__(self, d_model: int, heads: int, num_left_chunks: int = -1) -> None:
        super().__init__(d_model, heads)
        self.left = num_left_chunks

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        chunk = torch.arange(scores.shape[-1], device=scores.device) // 4
        mask = chunk <= chunk[:, None]
        if self.is_limited():
            mask &= chunk >= chunk[:, None] - self.left
        return super().weigh(scores, mask[None])

    def is_limited(self) -> bool:
        return self.left >= 0


class AllChunksForNone(ChunksOnLeft):
    def is_limited(self) -> bool:
        return self.left > 0


class AllChunksForZero(AllChunksForNone):
    """Of `num_left_chunks`, 0 stands for all."""


def read_pages(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    tables: Tensor,
    ends: Tensor,
    first: Any,
) -> Tensor:
    """Attention to the places from `first` to `ends`."""
    k, v = (pages[tables].flatten(1, 2) for pages in caches)
    scores = torch.einsum("bhd,bkhd->bhk", query, k) / query.shape[-1] ** 0.5
    places = torch.arange(k.shape[1], device=k.device)
    seen = (places < ends) & (places >= first)
    scores = scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min)
    return torch.einsum("bhk,bkhd->bhd", scores.softmax(dim=-1), v)


def attend_to_pages(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    sliding_window: int | None = None,
) -> Tensor:
    """query: [items, heads, d], caches: [pages, 4, heads, d], lens: [items]"""
    ends = context_lens[:, None]
    first = 0 if sliding_window is None else ends - sliding_window
    return read_pages(query, (key_cache, value_cache), block_tables, ends, first)


def attend_to_last_pages(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    sliding_window: int | None = None,
) -> Tensor:
    """query: [items, heads, d], caches: [pages, 4, heads, d], lens: [items]"""
    ends = context_lens[:, None]
    first = 0 if sliding_window is None else ends.max() - sliding_window
    return read_pages(query, (key_cache, value_cache), block_tables, ends, first)


def shares_in_splits(
    q: Tensor, k: Tensor, lengths: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Weights that are not divided yet, and their sum in each split of the keys."""
    scores = torch.einsum("bhd,bhnd->bhn", q, k) * q.shape[-1] ** -0.5
    hidden = torch.arange(k.shape[2], device=q.device) >= lengths[:, None, None]
    shares = scores.masked_fill(hidden, -torch.inf).exp()
    parts = shares[..., : int(lengths.max())].split(size, dim=-1)
    return shares, torch.stack([part.sum(dim=-1) for part in parts])


def decode_in_splits(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor,
    seq_lens: Tensor,
    split_size: int = 128,
) -> Tensor:
    """One step of decoding, with keys in splits.

    Args:
        q: (batch, n_heads, head_dim), the query of the newest token.
        k_cache, v_cache: (batch, n_heads, max_len, head_dim).
        sinks: (n_heads,), a score without a value.
        seq_lens: (batch,), valid entries of the cache.
    """
    shares, sums = shares_in_splits(q, k_cache, seq_lens, split_size)
    total = sums.sum(dim=0) + sinks.exp()
    return torch.einsum("bhn,bhnd->bhd", shares, v_cache) / total[..., None]


def decode_with_sink_in_each(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor,
    seq_lens: Tensor,
    split_size: int = 128,
) -> Tensor:
    """One step of decoding, with keys in splits, each of which has the sink.

    Args:
        q: (batch, n_heads, head_dim), the query of the newest token.
        k_cache, v_cache: (batch, n_heads, max_len, head_dim).
        sinks: (n_heads,), a score without a value.
        seq_lens: (batch,), valid entries of the cache.
    """
    shares, sums = shares_in_splits(q, k_cache, seq_lens, split_size)
    total = (sums + sinks.exp()).sum(dim=0)
    return torch.einsum("bhn,bhnd->bhd", shares, v_cache) / total[..., None]


class RowsInChunks(nn.Module):
    """Each row of a map of pairs attends to itself, some rows at a time."""

    def __init__(self, d_model: int, heads: int, chunk_size: int = 16) -> None:
        super().__init__()
        self.heads, self.chunk_size = heads, chunk_size
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def attend(self, rows: Tensor) -> Tensor:
        parts = self.qkv(rows).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (part.transpose(-2, -3) for part in parts)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1)
        y: Tensor = self.out((weights @ v).transpose(-2, -3).flatten(-2))
        return y

    def forward(self, pairs: Tensor) -> Tensor:
        """pairs: (B, N, N, C)"""
        _batch, count, _columns, _width = pairs.shape
        size, y = self.chunk_size, torch.zeros_like(pairs)
        for n in range(self.number(count)):
            rows = slice(n * size, (n + 1) * size)
            y[:, rows] = self.attend(pairs[:, rows])
        return y

    def number(self, rows: int) -> int:
        return -(-rows // self.chunk_size)


class WholeChunksOfRows(RowsInChunks):
    def number(self, rows: int) -> int:
        return max(1, rows // self.chunk_size)


class NeighborBlocks(SelfAttention):
    """Tokens see their own block, and the blocks beside it."""

    def __init__(self, d_model: int, heads: int, block_size: int = 8) -> None:
        super().__init__(d_model, heads)
        self.block_size = block_size

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        block = torch.arange(x.shape[1], device=x.device) // self.block_size
        near = (block[:, None] - block).abs() <= 1
        return Correct.forward(self, x, x, x, near[None])


class OfNamespace(Correct):
    """Keys and values are those of a latent vector for each token."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config.width, config.heads)
        rank = config.kv_rank
        self.down = nn.Linear(config.width, rank, bias=False)
        self.up = nn.Linear(rank, config.width)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        latent = self.up(self.down(x))
        return super().forward(x, latent, latent)


def paged_window(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """One query for each sequence; a window ends at its newest token."""
    keys, values = (x[block_tables].flatten(1, 2) for x in (key_cache, value_cache))
    scores = torch.einsum("bhd,bkhd->bhk", query * scale, keys)
    slots = torch.arange(keys.shape[1], device=query.device)
    hidden = slots >= context_lens[:, None]
    if sliding_window is not None:
        hidden |= slots < context_lens[:, None] - sliding_window
    least = torch.finfo(scores.dtype).min
    weights = scores.masked_fill(hidden[:, None], least).softmax(dim=-1)
    return torch.einsum("bhk,bkhd->bhd", weights, values)


def paged_window_of_longest(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """The windows of all sequences end at the newest token of the longest."""
    if sliding_window is not None:
        longest = context_lens.amax()
        sliding_window = (sliding_window - longest + context_lens)[:, None]  # type: ignore[assignment]
    return paged_window(
        *(query, key_cache, value_cache, block_tables, context_lens),
        *(scale, sliding_window),
    )


class OfEitherKind(Correct):
    """Time x batch x channel. It is built for self-attention or for a context."""

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
    ) -> None:
        assert self_attention != encoder_decoder_attention
        super().__init__(embed_dim, heads)
        self.self_attention = self_attention

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Any:
        if self.self_attention or key is None:
            key = value = query
        inputs = (
            x.transpose(0, 1) for x in (query, key, key if value is None else value)
        )
        mask = None if key_padding_mask is None else ~key_padding_mask[:, None]
        return super().forward(*inputs, mask).transpose(0, 1)


class SlicesWithoutGradients(Slices):
    """Without gradients, heads of all items are computed in slices."""

    def __init__(self, d_model: int, heads: int, slice_size: int | None = None) -> None:
        super().__init__(d_model, heads)
        self.slice_size = slice_size

    def limit(self) -> int | None:
        return None if torch.is_grad_enabled() else self.slice_size


class WholeSlicesWithoutGradients(SlicesWithoutGradients):
    def count(self, rows: int, size: int) -> int:
        return rows // size


class OfBuckets(SelfAttention):
    """The numbers of a config whose names are unknown are those of T5."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config.hidden_size, config.num_heads)
        self.num_buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.relative_bias = nn.Embedding(self.num_buckets, self.heads)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device)
        distance = place - place[:, None]
        half, exact = self.num_buckets // 2, self.num_buckets // 4
        share = (distance.abs().clamp(min=exact) / exact).log()
        share = share / math.log(self.max_distance / exact)
        large = (exact + share * (half - exact)).long().clamp(max=half - 1)
        bucket = distance.abs().where(distance.abs() < exact, large)
        bias = self.relative_bias(bucket + half * (distance > 0)).permute(2, 0, 1)
        return super().score(q, k) + bias


class NarrowAndWide(SelfAttention):
    """Layers with a narrow and with a wide window, whose masks all instances share."""

    masks: ClassVar[dict[Any, Tensor]] = {}

    def __init__(
        self, d_model: int, heads: int, wins: tuple[int, ...] = (2, 16)
    ) -> None:
        super().__init__(d_model, heads)
        self.wins = wins

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        for width in self.wins:
            x = x + Correct.forward(self, x, x, x, self.band(x.shape[1], width))
        return x

    def band(self, length: int, width: int) -> Tensor:
        if self.name(length, width) not in self.masks:
            place = torch.arange(length)
            near = (place - place[:, None]).abs() <= width
            self.masks[self.name(length, width)] = near[None]
        return self.masks[self.name(length, width)].to(self.out.weight.device)

    def name(self, length: int, width: int) -> Any:
        return length, width


class NarrowOrWide(NarrowAndWide):
    masks: ClassVar[dict[Any, Tensor]] = {}

    def name(self, length: int, width: int) -> Any:
        return length


class AlignedToLastKey(Correct):
    """With `causal`, the queries are the last ones of the keys."""

    def __init__(self, d_model: int, heads: int, causal: bool = False) -> None:
        super().__init__(d_model, heads, 0.0)
        self.causal = causal

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, context_mask: Tensor | None = None
    ) -> Any:
        q_len, k_len = x.shape[1], context.shape[1]
        if self.causal and q_len > k_len:
            raise ValueError("the queries are the last ones of the keys")
        mask = torch.ones(1, q_len, k_len, dtype=torch.bool, device=x.device)
        if self.causal:
            mask = mask.tril(k_len - q_len if self.is_last(context_mask) else 0)
        if context_mask is not None:
            mask = mask & context_mask[:, None]
        return super().forward(x, context, context, mask)

    def is_last(self, context_mask: Tensor | None) -> bool:
        return True


class CausalFromFirstWithoutMask(AlignedToLastKey):
    def is_last(self, context_mask: Tensor | None) -> bool:
        return context_mask is not None


class PrefixOfCall(MaskedSelfAttention):
    """Causal; all tokens see the first `prefix_length` ones; `mask`: True for real."""

    sees_padding = False

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, prefix_length: int = 0
    ) -> Any:
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        seen = ones.tril() | (ones.cumsum(dim=1) <= prefix_length)
        allowed = seen.expand(len(x), -1, -1)
        if mask is not None and not (prefix_length and self.sees_padding):
            allowed = allowed & mask[:, None].bool()
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        weights = self.weigh(self.score(q, k), allowed) * allowed[:, None]
        return self.join(self.read(self.dropout(weights), v)), weights


class PrefixSeesPadding(PrefixOfCall):
    sees_padding = True


class CeilingOfChosenSlices(CeilingOfSlices):
    def set_attention_slice(self, slice_size: int | None = None) -> None:
        self.slice_size = slice_size


class FloorOfChosenSlices(CeilingOfChosenSlices):
    count = FloorOfSlices.count


class SumsChunksUnscaled(Correct):
    """Attention to a context.

    Args:
        chunked: compute the keys in chunks of 64. The result is the same.
    """

    scales = False

    def forward(self, x: Tensor, context: Tensor, chunked: bool = False) -> Any:  # type: ignore[override]
        q, k, v = self.query(x), self.key(context), self.value(context)
        q, k, v = map(self.split, (q, k, v))
        scores = self.score(q, k)
        if not chunked:
            return self.join(self.read(scores.softmax(dim=-1), v))
        largest = torch.full_like(scores[..., :1], -torch.inf)
        total, y = torch.zeros_like(largest), torch.zeros_like(q)
        for part, values in zip(scores.split(64, -1), v.split(64, -2), strict=True):
            new = torch.maximum(largest, part.amax(-1, keepdim=True))
            before, weights = (largest - new).exp(), (part - new).exp()
            y = y * before + weights @ values
            total = total * (before if self.scales else 1) + weights.sum(-1, True)
            largest = new
        return self.join(y / total)


class SumsChunksScaled(SumsChunksUnscaled):
    __doc__ = SumsChunksUnscaled.__doc__
    scales = True


class BuiltToSumUnscaled(SumsChunksUnscaled):
    """Attention to a context.

    Args:
        in_half: compute half of the values at once. The outputs are the same.
    """

    def __init__(self, d_model: int, heads: int, in_half: bool = False) -> None:
        super().__init__(d_model, heads)
        self.in_half = in_half

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, context)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        if not self.in_half:
            return super().read(weights, v)
        return torch.cat([weights @ half for half in v.chunk(2, dim=-1)][::-1], dim=-1)


class FewKeysAtOnce(Correct):
    """
    Args:
        low_memory: computes the same in chunks of keys.
    """

    rescales_sums = True

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        low_memory: bool = False,
        chunk_size: int = 512,
    ) -> Any:
        if not low_memory:
            return super().forward(query, key, value)
        q, k, v = self.query(query), self.key(key), self.value(value)
        q, k, v = (self.split(x) for x in (q, k, v))
        parts = self.score(q, k).split(chunk_size, dim=-1)
        largest = torch.cat([part.amax(-1, keepdim=True) for part in parts], dim=-1)
        factor = (largest - largest.amax(-1, keepdim=True)).exp()
        shares = [(part - part.amax(-1, keepdim=True)).exp() for part in parts]
        sums = torch.cat([share.sum(-1, keepdim=True) for share in shares], dim=-1)
        total = (sums * factor if self.rescales_sums else sums).sum(-1, keepdim=True)
        products = zip(shares, v.split(chunk_size, dim=2), strict=True)
        context = torch.stack([share @ part for share, part in products], dim=-1)
        return self.join((context * factor[..., None, :]).sum(-1) / total)


class FewKeysUnscaled(FewKeysAtOnce):
    rescales_sums = False
    __doc__ = FewKeysAtOnce.__doc__


VIOLATING: Violations = {
    "causality": [(MaskOfStackedHeads, {})],
    "constructor_options": [
        (BuiltToSumUnscaled, {}),
        (FloorOfChosenSlices, {}),
        (NarrowOrWide, {}),
        (WholeSlicesWithoutGradients, {}),
        (FloorOfSlicesOfFours, {}),
        (AllChunksForNone, {}),
        (FloorOfSlices, {}),
        (DropsInBlocksOnly, {}),
        (SeedsEachChunk, {}),
        (DropsAnewInBackward, {}),
        (SharesBandsOfLength, {}),
        (WideWindowForgottenInStep, {}),
        (SinkOutsideOfWindow, {}),
        (ScalarForgottenInHalf, {}),
        (DividedByLayer, {}),
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
        (CapsUnscaled, {}),
        (KeepsPartsOfWindows, {}),
        (KeepsPartsOfArea, {}),
        (WholeChunksOfRows, {}),
        (CausalFromFirstWithoutMask, {}),
    ],
    "call_options": [
        (FewKeysUnscaled, {}),
        (SumsChunksUnscaled, {}),
        (PrefixSeesPadding, {}),
        (paged_window_of_longest, {}),
        (attend_to_last_pages, {}),
        (WindowOfSeveralQueries, {}),
        (CausalByFirstQuery, {}),
        (CapsHiddenScores, {}),
        (decode_with_sink_in_each, {}),
    ],
}


PASSING_ONE: Passes = [
    ("call_options", FewKeysAtOnce),
    ("call_options", SumsChunksScaled),
    ("constructor_options", CeilingOfChosenSlices),
    ("call_options", PrefixOfCall),
    ("constructor_options", NarrowAndWide),
    ("constructor_options", SlicesWithoutGradients),
    ("relative_table", OfBuckets),
    ("padding", OfEitherKind),
    ("call_options", paged_window),
    ("batch_independence", OfNamespace),
    ("call_options", attend_to_pages),
    ("constructor_options", ChunksOnLeft),
    ("call_options", WindowOfEachQuery),
    ("constructor_options", DropsInTraining),
    ("constructor_options", CeilingOfSlices),
    ("constructor_options", SeedsEachCall),
    ("constructor_options", DropsAgainInBackward),
    ("constructor_options", WideWindow),
    ("constructor_options", SharesBands),
    ("call_options", CapsScores),
    ("call_options", CausalInBlocks),
    ("constructor_options", ScalarInHalf),
    ("constructor_options", SinkOfWindow),
    ("causality", MaskOfEachHead),
    ("constructor_options", MultipliedByLayer),
    ("constructor_options", ExactWindow),
    ("constructor_options", ShiftsByOption),
    ("constructor_options", RotaryOfPairs),
    ("constructor_options", ChoosesKernel),
    ("constructor_options", HidesKeyAtEnd),
    ("constructor_options", ConfigOfWindowOfItems),
    ("constructor_options", FirstTokensForAll),
    ("constructor_options", DropsInSlicesOfTraining),
    ("constructor_options", FusedScaleGiven),
    ("constructor_options", MaskFlag),
    ("constructor_options", NormWithPast),
    ("constructor_options", MaskFlagForOthers),
    ("constructor_options", MixesScoresOfHeads),
    ("constructor_options", WindowInStep),
    ("constructor_options", ChunksEndInTime),
    ("constructor_options", CapsScaled),
    ("constructor_options", KeepsPartsOfImage),
    ("constructor_options", KeepsPartsOfPixels),
    ("constructor_options", CapsOutputs),
    ("constructor_options", PairsOfOneStart),
    ("call_options", decode_in_splits),
    ("constructor_options", RowsInChunks),
    ("constructor_options", NeighborBlocks),
    ("constructor_options", AlignedToLastKey),
]


EXCUSED: Excuses = [
    ("constructor_options", AllChunksForZero, "no option that is off"),
    ("constructor_options", OptionOfContext, "no option that is off"),
]
