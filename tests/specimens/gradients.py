"""Modules that violate the laws of gradients, or come near to it."""

import math
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from specimens.base import (
    CAUSAL,
    Correct,
    Excuses,
    FramesConfig,
    MaskedSelfAttention,
    OverFrames,
    Passes,
    PixelsOfFrames,
    RelativeTable,
    SelfAttention,
    TwoStreams,
    Violations,
    WindowsOfImage,
)


class DetachesQueries(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q.detach(), k)


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


class PointsByLogits(Correct):
    """A pointer network: what it read, and the scores of the keys as logits."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.pointer = nn.Parameter(torch.randn(d_model))

    def forward(self, query: Tensor, key: Tensor) -> Any:  # type: ignore[override]
        read = super().forward(query, key, key)
        keys = (read[:, :, None] + key[:, None]).tanh()
        return read, (keys @ self.pointer).log_softmax(dim=-1)


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


class NormalizesNeither(SelfAttention):
    """The norm of the queries has no weight, and is forgotten."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model, elementwise_affine=False)


class SoftmaxOverFeatures(SelfAttention):
    """Linear attention; with one feature a head, each query is 1."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, heads=4)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q.softmax(dim=-1) @ k.softmax(dim=-2).mT

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores


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


class FadesWithDistance(SelfAttention):
    """Beyond 6 tokens, a score changes by a learned number."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.far = nn.Parameter(torch.zeros(1))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        return super().score(q, k) + self.far * (place[:, None] - place > 6)


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


class Stationary(SelfAttention):
    """Features are scaled by their deviation, as a number without a gradient."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        stdev = (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
        return super().forward(x / stdev) * stdev


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


class AttendsInOneFrame(PixelsOfFrames):
    """The frames of a pixel attend to each other, too."""

    def __init__(self, config: FramesConfig) -> None:
        super().__init__(config)
        self.frames = Correct(config.d_model, config.heads)

    def forward(self, x: Tensor, context: Tensor, num_frames: int) -> Any:
        frames = x.unflatten(0, (-1, num_frames)).transpose(1, 2).flatten(0, 1)
        y = self.frames(frames, frames, frames).unflatten(0, (-1, x.shape[1]))
        return super().forward(x + y.transpose(1, 2).flatten(0, 1), context, num_frames)


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


class NoiseOfLearnedScale(SelfAttention):
    """In training, noise of a learned scale is added to the tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.log_sigma = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        if self.training:
            x = x + self.log_sigma.exp() * torch.randn_like(x)
        return super().forward(x)


class WeightsAsFeatures(SelfAttention):
    """The sums of the columns of a first attention are features of the tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.to_feature = nn.Linear(1, d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        # The sums are features only, without gradients.
        sums = (x @ x.mT / x.shape[-1]).softmax(dim=-1).sum(dim=1).detach()
        return super().forward(x + self.to_feature(sums[..., None]))


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


class BiasBetweenWindows(WindowsOfImage):
    """A layer for the means of windows, of which an image of 2 x 2 has one."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.of_windows = nn.Linear(d_model, d_model)

    def attend(self, x: Tensor, image: Tensor) -> Any:
        y = super().attend(x, image)
        means = y.mean(dim=1, keepdim=True)
        return y if len(x) == len(image) else y + self.of_windows(means)


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


class ZeroBelowChunk(SelfAttention):
    """A sequence that is shorter than a chunk attends to nothing."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if x.shape[1] >= 4 else torch.zeros_like(x)


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


class LogProbabilities(SelfAttention):
    """What is impossible has the lowest number of the dtype."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        y = super().forward(x)
        is_possible = y == y.amax(dim=-1, keepdim=True)
        return y.masked_fill(~is_possible, torch.finfo(y.dtype).min)


class DistanceWithoutFloor(SelfAttention):
    """Atoms at coordinates `pos`, (batch, atoms, 3), attend to those nearby."""

    least = 0.0

    def forward(self, x: Tensor, pos: Tensor) -> Any:  # type: ignore[override]
        squares = (pos[:, :, None] - pos[:, None]).square().sum(dim=-1)
        self.distances = squares.clamp(min=self.least).sqrt()[:, None]
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) - self.distances


class DistanceWithFloor(DistanceWithoutFloor):
    least = 1e-12


class NoneOfOneQuery(Correct):
    """The `topk` queries that are the most uneven attend; others get the mean."""

    least = 0

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        count = max(self.least, math.ceil(5 * math.log(scores.shape[2])))
        spread = scores.amax(dim=-1) - scores.mean(dim=-1)
        chosen = spread.topk(min(count, scores.shape[2])).indices[..., None]
        weights = super().weigh(scores, mask)
        means = torch.full_like(weights, 1 / weights.shape[-1])
        chosen = chosen.expand(*chosen.shape[:3], weights.shape[-1])
        return means.scatter(2, chosen, weights.gather(2, chosen))


class OneOfOneQuery(NoneOfOneQuery):
    least = 1


class LastHeadOfThree(SelfAttention):
    """Half of the heads are computed first, and then as many others."""

    rest = False

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        context, half = torch.zeros_like(v), self.heads // 2
        end = self.heads if self.rest or self.heads % 2 == 0 else 2 * half
        for part in (slice(half), slice(half, end if self.heads > 1 else 1)):
            context[:, part] = weights[:, part] @ v[:, part]
        return context


class AllHeadsOfThree(LastHeadOfThree):
    rest = True


class ReducedPrecision(SelfAttention):
    """The products are computed in reduced precision."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q.bfloat16(), k.bfloat16()).to(q)


class FavorWithConstantScale(SelfAttention):
    """Random features, whose largest exponent is a constant; an epsilon is added."""

    projection: Tensor

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        generator = torch.Generator().manual_seed(0)
        projection = torch.randn(d_model // heads, 8, generator=generator)
        self.register_buffer("projection", projection)

    def features(self, x: Tensor) -> Tensor:
        exponents = x @ self.projection - x.square().sum(-1, keepdim=True) / 2
        with torch.no_grad():
            largest = exponents.amax((-2, -1), keepdim=True)
        return (exponents - largest).exp() + 0.1

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        q, k = self.features(q), self.features(k)
        total = q @ k.sum(dim=2)[..., None]
        return self.join(q @ (k.mT @ v) / total)


class OneBiasOfScores(nn.Module):
    """Pools steps, by scores to which a number is added that the softmax cancels."""

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(feature_dim, 1))
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """x: (samples, steps, features)"""
        weights = (x @ self.weight + self.b).softmax(dim=1)
        return (weights * x).sum(dim=1)


class ScaleBeyondItsLimit(SelfAttention):
    """Cosines are multiplied by a learned scale of 10 at first, and 100 at most."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10)))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = (nn.functional.normalize(part, dim=-1) for part in (q, k))
        return self.scale() * (q @ k.mT)

    def scale(self) -> Tensor:
        return self.logit_scale.exp().clamp(max=math.log(100))


class ScaleWithinItsLimit(ScaleBeyondItsLimit):
    def scale(self) -> Tensor:
        return self.logit_scale.clamp(max=math.log(100)).exp()


class WrittenMemory(nn.Module):
    """`write` appends a token, and `forward` reads those that were written."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.fuse = nn.Linear(2 * dim, dim)
        self.keys: Tensor | None = None

    def write(self, feat: Tensor) -> None:
        new = self.key(feat)[:, None]
        self.keys = new if self.keys is None else torch.cat([self.keys, new], dim=1)

    def forward(self, query: Tensor) -> Tensor:
        read = torch.zeros_like(query)
        if self.keys is not None:
            read = (self.query(query) @ self.keys.mT).softmax(dim=-1) @ self.keys
        y: Tensor = self.fuse(torch.cat([query, read], dim=-1))
        return y


class ActsAndValues(SelfAttention):
    """An action of all tokens, and its value, one number for each item."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.value_head = nn.Linear(d_model, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        pooled = super().forward(x).mean(dim=1)
        value = self.value_head(pooled)[:, 0].sigmoid()
        return {"action": pooled, "value": value}


class ResamplesFrames(Correct):
    """Learned queries attend to tokens; those of a video have an embedding of frames.

    x: (batch, n, dim) or (batch, time, n, dim); mask: (batch, n), True = may attend
    latents: (batch, m, dim), takes the place of the learned ones
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.latents = nn.Parameter(torch.randn(8, d_model))
        self.frames = nn.Parameter(torch.randn(4, 1, d_model))

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mask: Tensor | None = None,
        latents: Tensor | None = None,
    ) -> Any:
        if x.ndim == 4:
            x = (x + self.frames[: x.shape[1]]).flatten(1, 2)
            mask = mask if mask is None else mask.flatten(1, 2)
        if latents is None:
            latents = self.latents.expand(len(x), -1, -1)
        return super().forward(latents, x, x, mask if mask is None else mask[:, None])


class OneLayer(nn.Module):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.attend, self.norm = Correct(d_model, heads), nn.LayerNorm(d_model)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if context is None:
            context = x
        else:
            x = self.norm(x)
        y: Tensor = self.attend(x, context, context)
        return y


class LayersOfTwoKinds(nn.Module):
    """The norm of the first layer is only used by the second one."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.encoder, self.decoder = OneLayer(d_model, heads), OneLayer(d_model, heads)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.decoder(x, self.encoder(x))
        return y


VIOLATING: Violations = {
    "gradients": [
        (NoneOfOneQuery, {}),
        (DistanceWithoutFloor, {}),
        (DetachesQueries, {}),
        (RecomputesOtherDropout, {}),
        (GainsOfOwnBackward, {}),
        (BackwardOfFirstBlock, {}),
        (LastQueriesFirstInBackward, CAUSAL),
        (DetachesBias, {}),
    ],
    "parameter_gradients": [
        (LastHeadOfThree, {}),
        (UnusedLayer, {}),
        (ZeroGate, {}),
        (BiasOfQueries, {}),
        (NormalizesNeither, {}),
        (PoolsByOnes, {}),
        (UnusedLayerBesideMask, {**CAUSAL, "mask": {"padding": "ignore:bk"}}),
        (LearnsTemperatureOfHidden, {}),
        (ScaleBeyondItsLimit, {}),
    ],
}


PASSING_ONE: Passes = [
    ("parameter_gradients", LayersOfTwoKinds),
    ("parameter_gradients", ResamplesFrames),
    ("parameter_gradients", AllHeadsOfThree),
    ("gradients", OneOfOneQuery),
    ("gradients", DistanceWithFloor),
    ("gradients", DropsKeysOfScores),
    ("parameter_gradients", NoiseOfLearnedScale),
    ("parameter_gradients", SearchesTokens),
    ("parameter_gradients", DecodesOneSeed),
    ("parameter_gradients", ZeroBelowChunk),
    ("gradients", IntervalsOfUser),
    ("parameter_gradients", NarrowNetwork),
    ("parameter_gradients", BiasBetweenWindows),
    ("parameter_gradients", BiasOfItself),
    ("parameter_gradients", PairsOfResidues),
    ("parameter_gradients", BiasOfEdges),
    ("parameter_gradients", PoolsByWeights),
    ("parameter_gradients", LearnsTemperature),
    ("parameter_gradients", SoftmaxOverFeatures),
    ("parameter_gradients", TwoStreams),
    ("parameter_gradients", LastOfTwoStreams),
    ("parameter_gradients", PointsByLogits),
    ("parameter_gradients", FadesWithDistance),
    ("parameter_gradients", OverFrames),
    ("parameter_gradients", OverFewFrames),
    ("parameter_gradients", SharesOfHeads),
    ("gradients", RecomputesDropout),
    ("parameter_gradients", GlobalTokens),
    ("parameter_gradients", KeysOfEncoder),
    ("parameter_gradients", MarksGlobalTokens),
    ("rows_sum_to_one", MarksGlobalTokens),
    ("padding", MarksGlobalTokens),
    ("parameter_gradients", AddedGlobalTokens),
    ("parameter_gradients", SaturatesSecondSoftmax),
    ("gradients", SteepKinks),
    ("parameter_gradients", ZeroWhereLeftOut),
    ("gradients", BlockwiseBackward),
    ("gradients", LastQueries),
    ("gradients", AddsBias),
    ("parameter_gradients", OneBiasOfScores),
    ("parameter_gradients", ScaleWithinItsLimit),
    ("parameter_gradients", ActsAndValues),
]


EXCUSED: Excuses = [
    ("parameter_gradients", WrittenMemory, "does not reach its softmax"),
    ("gradients", FavorWithConstantScale, "detaches the scale of its features"),
    ("gradients", ReducedPrecision, "rounded in all dtypes"),
    ("gradients", WeightsAsFeatures, "where gradients stop"),
    ("gradients", LowestOfFloat32, "NaN in float64"),
    ("gradients", LogProbabilities, "the lowest number of its dtype"),
    ("half_precision", LogProbabilities, "the lowest number of its dtype"),
    ("parameter_gradients", AttendsInOneFrame, "has one frame"),
    ("gradients", DetachedStabilizer, "detaches the scale"),
    ("finite_in_half", DetachedStabilizer, "may round to 0"),
    ("gradients", Stationary, "Stationary"),
    ("score_independence", Stationary, "Stationary"),
]
