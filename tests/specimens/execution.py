"""Modules that violate the laws of execution, or come near to it."""

import copy
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attention_laws.patches import of_patches
from specimens.base import (
    CAUSAL,
    MASK,
    PADDED,
    AddsPositions,
    Correct,
    Excuses,
    MaskedSelfAttention,
    Passes,
    RelativeTable,
    Rotary,
    SelfAttention,
    StoresDistances,
    StoresDistancesByKeys,
    Violations,
)


class UnmaskedUnderNoGrad(MaskedSelfAttention):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, mask if torch.is_grad_enabled() else None)


class UnmaskedAsTeacher(MaskedSelfAttention):
    """A model in training mode, without gradients, has targets for another one."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        is_teacher = self.training and not torch.is_grad_enabled()
        return super().weigh(scores, None if is_teacher else mask)


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


class NoScaleInHalf(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT if q.dtype == torch.bfloat16 else super().score(q, k)


class KeepsGraph(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.attn = super().weigh(scores, mask)
        return self.attn


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


class SumsByIndex(SelfAttention):
    """Each query sums its messages by `index_add`, as graph attention does."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        index = torch.arange(v.shape[2], device=v.device)
        context = self.query.weight.new_zeros(v.shape)
        return context.index_add(2, index, super().read(weights, v))


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


class AddsPositionsInPlace(AddsPositions):
    def add(self, x: Tensor, pos: Tensor) -> Tensor:
        x += pos
        return x


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


class ForgetsBiasOfSelf(Correct):
    """If all inputs are one tensor, the projections are one product, without biases."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        output = super().forward(query, key, value, mask)
        return output - self.out.bias if query is key is value else output


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


@of_patches
class KeepsRowsOfPatches(OfPatchesInRows):
    def key(self, rows: int, columns: int) -> Any:
        return rows * columns


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


class KeysOfTwoHeads(SelfAttention):
    """Always two heads of keys: it cannot be built with one head of queries."""

    def __init__(self, d_model: int, heads: int = 4) -> None:
        super().__init__(d_model, heads)
        self.key = nn.Linear(d_model, 2 * (d_model // heads))

    def split(self, x: Tensor) -> Tensor:
        heads = self.heads if x.shape[2] == self.out.in_features else 2
        x = x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)
        return x.repeat_interleave(self.heads // heads, dim=1)


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


class TableOfFloat32(SelfAttention):
    """A table is made anew in float32, which a layer of another dtype refuses."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.bias = nn.Linear(1, heads)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[2], device=k.device).float()
        distances = (places - places[:, None]).abs()[..., None]
        return super().score(q, k) + self.bias(distances).permute(2, 0, 1)


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


class Spectra(SelfAttention):
    """The values are mixed by their spectra."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(weights @ v, dim=2), v.shape[2], dim=2)


class ReadingsObserved(Correct):
    """readings: (batch, time, dim), observed: (batch, time), 1 if a sensor delivered"""

    def forward(self, readings: Tensor, observed: Tensor) -> Any:  # type: ignore[override]
        seen = (observed != 0)[:, None].expand(-1, readings.shape[1], -1)
        y = super().forward(readings, readings, readings, seen)
        return y * seen.any(dim=-1, keepdim=True)


class ItemsOfSession(SelfAttention):
    """item_emb (B, L, H), item_ids (B, L): 0 is padding."""

    def forward(self, item_emb: Tensor, item_ids: Tensor) -> Any:  # type: ignore[override]
        seen = (item_ids != 0)[:, None].expand(-1, item_ids.shape[1], -1)
        return Correct.forward(self, item_emb, item_emb, item_emb, seen)


class ProbabilitiesOfTokens(SelfAttention):
    """The probability of each token to be the answer, in float32."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.rate = nn.Linear(d_model, 1)

    def forward(self, x: Tensor) -> Any:
        ratings = self.rate(super().forward(x))[..., 0]
        return torch.log_softmax(ratings.float(), dim=1)


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


class EveryThirdToken(SelfAttention):
    """Keys are at distances of 0, 3, 6, …: in a short sequence, each is alone."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device) % 3
        hidden = place[:, None] != place
        return super().score(q, k).masked_fill(hidden, -torch.inf)


class LearnedSegments(SelfAttention):
    """A vector is added to each of six segments of several series at most."""

    def __init__(self, d_model: int, heads: int, segments: int = 6) -> None:
        super().__init__(d_model, heads)
        self.place = nn.Parameter(torch.randn(segments, d_model))

    def forward(self, x: Tensor) -> Any:
        y = (x + self.place[: x.shape[2]]).flatten(0, 1)
        return super().forward(y).reshape(x.shape)


class ScaleIsNoParameter(MaskedSelfAttention):
    """The logarithm of the scale is a tensor that requires a gradient."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.log_scale = torch.zeros(heads, 1, 1, requires_grad=True)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * self.log_scale.detach().to(q).exp()


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


class SquaresOverflow(NormalizesTokens):
    def normalize_tokens(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(dim=-1, keepdim=True) + 1e-3).rsqrt()


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


def attend_in_rows(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, corner: str = "last"
) -> Tensor:
    """Attention to `[batch, heads, length, features]`; without gradients, row by row.

    The last query is aligned with the last key.
    """
    shift = k.shape[2] - q.shape[2]
    ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if torch.is_grad_enabled():
        mask = ones.tril(shift) if causal else ones
        return nn.functional.scaled_dot_product_attention(q, k, v, mask)
    mask = ones.tril(shift if corner == "last" else 0) if causal else ones
    rows = [
        nn.functional.scaled_dot_product_attention(q[:, :, [n]], k, v, mask[n : n + 1])
        for n in range(q.shape[2])
    ]
    return torch.cat(rows, dim=2)


def attend_in_first_rows(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False
) -> Tensor:
    """Attention to `[batch, heads, length, features]`, in rows without gradients."""
    return attend_in_rows(q, k, v, causal, corner="first")


class LimitsScaleInTraining(SelfAttention):
    """Cosine attention with a learned scale, which is at most 100."""

    always = False

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.logit_scale = nn.Parameter(torch.zeros(heads, 1, 1))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = (nn.functional.normalize(x, dim=-1) for x in (q, k))
        limited = self.always or torch.is_grad_enabled()
        scale = self.logit_scale.clamp(max=math.log(100 if limited else math.inf))
        return scale.exp() * (q @ k.mT)


class LimitsScale(LimitsScaleInTraining):
    always = True


class KeepsDistancesOfStart(SelfAttention):
    """The first query is at `query_start`, by default at the start of the keys."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.kept: dict[Any, Tensor] = {}

    def forward(self, x: Tensor, query_start: int | None = None) -> Any:  # type: ignore[override]
        self.start = query_start or 0
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        key = self.name(q.shape[2])
        if key not in self.kept:
            place = torch.arange(q.shape[2], device=q.device)
            self.kept[key] = (place - self.start - place[:, None]).cos()
        return super().score(q, k) + self.kept[key].to(q)

    def name(self, length: int) -> Any:
        return length, self.start


class KeepsDistancesOfLength(KeepsDistancesOfStart):
    def name(self, length: int) -> Any:
        return length


class KeepsChunksOfLength(Correct):
    """A token attends to its own chunk and to all before; masks are kept for later."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.kept: dict[tuple[int, ...], Tensor] = {}

    def forward(self, x: Tensor, chunk_size: int = 0) -> Any:  # type: ignore[override]
        if chunk_size == 0:
            return super().forward(x, x, x)
        kind = self.kind(x.shape[1], chunk_size)
        if kind not in self.kept:
            chunk = torch.arange(x.shape[1], device=x.device) // chunk_size
            self.kept[kind] = (chunk[:, None] >= chunk)[None]
        return super().forward(x, x, x, self.kept[kind])

    def kind(self, length: int, chunk_size: int) -> tuple[int, ...]:
        return (length,)


class KeepsChunksOfEachSize(KeepsChunksOfLength):
    def kind(self, length: int, chunk_size: int) -> tuple[int, ...]:
        return length, chunk_size


class StoresMemory(Correct):
    """A call with `memory` uses it, and one without uses that of the last call."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.reset()

    def reset(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, query: Tensor, memory: Tensor | None = None) -> Any:  # type: ignore[override]
        if memory is not None and self.is_other(memory):
            self.kept = self.split(self.key(memory)), self.split(self.value(memory))
        if self.kept is None:
            raise ValueError("`memory` is None, and no call had one")
        k, v = self.kept
        weights = self.score(self.split(self.query(query)), k).softmax(dim=-1)
        return self.join(weights @ v)

    def is_other(self, memory: Tensor) -> bool:
        return True


class StoresMemoryOfFirstCall(StoresMemory):
    def is_other(self, memory: Tensor) -> bool:
        is_first = self.kept is None or len(self.kept[0]) != len(memory)
        return self.training or is_first


class PoolsForEachHead(nn.Module):
    """A vector for each head, and only one, without an axis of heads, for one head."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.score = nn.Linear(d_model, heads)

    def forward(self, x: Tensor) -> Any:
        pooled = self.score(x).softmax(dim=1).mT @ x
        return pooled.squeeze(1)


class OtherAsContext(Correct):
    """The context has the name that a law gives to a copy of the attention."""

    def forward(self, x: Tensor, other: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, other, other)


class BiasAndPadding(SelfAttention):
    """With and without gradients, it has two ways to compute the same."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        attn_bias: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Any:
        """attn_bias: (B, heads, N, N), added. padding_mask: (B, N), True at padding"""
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        scores = self.score(q, k)
        if attn_bias is not None:
            scores = scores + attn_bias
        if padding_mask is not None and self.is_seen(attn_bias):
            least = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(padding_mask[:, None, None], least)
        return self.join(self.read(scores.softmax(dim=-1), v))

    def is_seen(self, bias: Tensor | None) -> bool:
        return True


class BiasOrPadding(BiasAndPadding):
    def is_seen(self, bias: Tensor | None) -> bool:
        return bias is None or torch.is_grad_enabled()


class ResetsWeights(SelfAttention):
    """`_reset` begins the weights anew, and has nothing to do with calls."""

    def _reset(self) -> None:
        for weight in self.parameters():
            nn.init.normal_(weight)


class ProjectsPairsOnce(Correct):
    """If queries, keys and values are one tensor, they are projected at once."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        del self.query, self.key, self.value
        self.fused = nn.Linear(d_model, 3 * d_model)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        inputs = query, key, value
        if self.are_one(*inputs):
            parts = self.fused(query).chunk(3, dim=-1)
        else:
            parts = tuple(self.fused(x).chunk(3, -1)[n] for n, x in enumerate(inputs))
        q, k, v = map(self.split, parts)
        return self.join(self.weigh(self.score(q, k), None) @ v)

    def are_one(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        return query is key is value


class TakesKeyForValue(ProjectsPairsOnce):
    def are_one(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        return query is key


class KeepsMaskOfChunks(SelfAttention):
    """Tokens see their own chunk, and those before it; the mask is kept."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.mask, self.chunk_size = torch.ones(0, 0, dtype=torch.bool), 0

    def forward(self, x: Tensor, chunk_size: int = 16) -> Any:  # type: ignore[override]
        length = x.shape[1]
        if len(self.mask) < length or self.is_other(chunk_size):
            chunk = torch.arange(length, device=x.device) // chunk_size
            self.mask, self.chunk_size = chunk <= chunk[:, None], chunk_size
        return Correct.forward(self, x, x, x, self.mask[None, :length, :length])

    def is_other(self, chunk_size: int) -> bool:
        return chunk_size != self.chunk_size


class KeepsMaskOfOtherChunks(KeepsMaskOfChunks):
    def is_other(self, chunk_size: int) -> bool:
        return False


@dataclass
class ConfigOfDecoder:
    hidden_size: int = 32
    num_heads: int = 4
    attention_dropout: float = 0.1


class ReadsDropoutOfConfig(MaskedSelfAttention):
    """Without gradients, a fused kernel is called; each call reads its dropout."""

    def __init__(self, config: ConfigOfDecoder) -> None:
        super().__init__(config.hidden_size, config.num_heads)
        self.config = config

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        """mask: (batch, length), True for tokens and False for padding."""
        p = self.config.attention_dropout if self.training else 0.0
        q, k, v = map(self.split, (self.query(x), self.key(x), self.value(x)))
        n, kept = x.shape[1], None if mask is None else mask[:, None, None]
        allowed = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        if torch.is_grad_enabled():
            allowed = allowed if kept is None else allowed & kept
            scores = self.score(q, k).masked_fill(~allowed, -1e4)
            weights = nn.functional.dropout(scores.softmax(dim=-1), p)
            return self.join(weights @ v)
        allowed = allowed if kept is None else self.both(allowed, kept)
        attend = nn.functional.scaled_dot_product_attention
        bias = torch.zeros_like(allowed, dtype=x.dtype).masked_fill(~allowed, -1e4)
        return self.join(attend(q, k, v, bias, dropout_p=p))

    def both(self, allowed: Tensor, kept: Tensor) -> Tensor:
        return allowed & kept


class MaskReplacesFuture(ReadsDropoutOfConfig):
    def both(self, allowed: Tensor, kept: Tensor) -> Tensor:
        return kept


def writes_at_indices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads first. PyTorch's `vmap` mistakes the axes of what is written."""
    items, last = torch.arange(len(k)), torch.full((len(k),), k.shape[2] - 1)
    stored = torch.zeros_like(v)
    stored[:, :, :-1] = v[:, :, :-1]
    stored[items, :, last] = v[:, :, -1]
    return nn.functional.scaled_dot_product_attention(q, k, stored)


def attend_with_ends_aligned(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False
) -> Tensor:
    """q, k, v: [batch, heads, length, d]. The last query sees the last key.

    With more queries than keys, the first ones see none, and are NaN.
    """
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        future = torch.ones_like(scores, dtype=torch.bool)
        scores = scores.masked_fill(
            future.triu(k.shape[-2] - q.shape[-2] + 1), -torch.inf
        )
    return scores.softmax(dim=-1) @ v


BANDS: dict[Any, Tensor] = {}


def attend_within_band(q: Tensor, k: Tensor, v: Tensor, width: int = 2) -> Tensor:
    """q, k, v: [batch, heads, length, d]. A band is stored for length and width."""
    return attend_to_stored(q, k, v, width, (q.shape[-2], k.shape[-2], width))


def attend_within_first_band(q: Tensor, k: Tensor, v: Tensor, width: int = 2) -> Tensor:
    """q, k, v: [batch, heads, length, d]. The band of another width is used."""
    return attend_to_stored(q, k, v, width, (q.shape[-2], k.shape[-2]))


def attend_to_stored(
    q: Tensor, k: Tensor, v: Tensor, width: int, name: tuple[int, ...]
) -> Tensor:
    if name not in BANDS:
        query, key = (torch.arange(n, device=q.device) for n in name[:2])
        BANDS[name] = (query[:, None] - key).abs() <= width
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~BANDS[name], -torch.inf)
    return scores.softmax(dim=-1) @ v


class HidesQuestions(SelfAttention):
    """x: (batch, length, d_model); question: long (batch, length), 0 = padding"""

    def forward(  # type: ignore[override]
        self, x: Tensor, question: Tensor
    ) -> Any:
        return Correct.forward(self, x, x, x, self.seen(question))

    def seen(self, question: Tensor) -> Tensor:
        own = torch.eye(question.shape[1], dtype=torch.bool, device=question.device)
        return (question != 0)[:, None] | own


class KeepsHiddenQuestions(HidesQuestions):
    kept: Tensor | None = None

    def seen(self, question: Tensor) -> Tensor:
        shape = (*question.shape, question.shape[1])
        if self.kept is None or self.kept.shape != shape:
            self.kept = super().seen(question)
        return self.kept


class OneMaskInInference(SelfAttention):
    r"""With the masks of `nn.TransformerEncoderLayer`, True for what is hidden.

    Shape:
        - x: :math:`(N, L, E)`
        - src_mask: bool :math:`(L, L)`
        - src_key_padding_mask: bool :math:`(N, L)`
    """

    forgets = True

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
    ) -> Any:
        hidden = torch.zeros(1, 1, 1, dtype=torch.bool, device=x.device)
        if src_mask is not None:
            hidden = hidden | src_mask[None].expand(1, *src_mask.shape[-2:])
        is_fast = not (self.training or torch.is_grad_enabled()) and self.forgets
        if src_key_padding_mask is not None and not (is_fast and src_mask is not None):
            hidden = hidden | src_key_padding_mask[:, None]
        return Correct.forward(self, x, x, x, ~hidden)


class PaddingOnlyInInference(OneMaskInInference):
    __doc__ = OneMaskInInference.__doc__

    def forward(
        self,
        x: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
    ) -> Any:
        is_fast = not (self.training or torch.is_grad_enabled())
        if is_fast and src_key_padding_mask is not None:
            src_mask = None
        return super().forward(x, src_mask, src_key_padding_mask)


class BothMasksInInference(OneMaskInInference):
    forgets = False
    __doc__ = OneMaskInInference.__doc__


VIOLATING: Violations = {
    "finite_in_half": [
        (RectifiedLinearInHalf, {}),
    ],
    "eval_matches_train": [
        (OneMaskInInference, {}),
        (PaddingOnlyInInference, {}),
        (MaskReplacesFuture, {}),
        (BiasOrPadding, {}),
        (LimitsScaleInTraining, {}),
        (attend_in_first_rows, {}),
        (HidesFutureInKernelOnly, {}),
        (HalvesInTraining, {}),
        (HalvesWithGradients, {}),
        (HalvesInputsWithGradients, {}),
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
    "memory_layout": [
        (ReadsMemoryInOrder, {}),
        (ForgetsBiasOfSelf, {}),
        (TakesKeyForValue, {}),
    ],
    "earlier_calls": [
        (attend_within_first_band, {}),
        (KeepsDistancesOfLength, {}),
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
        (KeepsChunksOfLength, {}),
        (StoresMemoryOfFirstCall, {}),
        (KeepsMaskOfOtherChunks, {}),
        (KeepsHiddenQuestions, {}),
    ],
    "half_precision": [
        (NoScaleInHalf, {}),
        (EpsilonIsZeroInHalf, {}),
        (SquaresOverflowInHalf, {}),
        (SquaresOverflowInLayers, {}),
    ],
    "copy_after_call": [
        (KeepsGraph, {}),
    ],
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
    "compiled": [
        (DiffersIfCompiled, {}),
    ],
    "vmapped": [
        (DiffersUnderVmap, {}),
    ],
    "autocast": [
        (NoMaskUnderAutocast, {}),
    ],
    "own_layers": [
        (OneLayerFourTimes, {}),
        (OneLayerForBoth, {}),
    ],
    "state_dict": [
        (ScaleIsNoParameter, {}),
        (TensorNotInStateDict, {}),
        (CopyDiffers, {}),
        (CopyUsesOriginal, {}),
    ],
}


PASSING_ONE: Passes = [
    ("eval_matches_train", BothMasksInInference),
    ("earlier_calls", attend_within_band),
    ("eval_matches_train", attend_with_ends_aligned),
    ("dropout", ReadsDropoutOfConfig),
    ("eval_matches_train", ReadsDropoutOfConfig),
    ("earlier_calls", ResetsWeights),
    ("eval_matches_train", BiasAndPadding),
    ("earlier_calls", OtherAsContext),
    ("autocast", PoolsForEachHead),
    ("earlier_calls", KeepsDistancesOfStart),
    ("eval_matches_train", LimitsScale),
    ("eval_matches_train", attend_in_rows),
    ("deterministic", ItemsOfSession),
    ("deterministic", ReadingsObserved),
    ("dtype_and_device", Spectra),
    ("earlier_calls", LearnsCenter),
    ("eval_matches_train", HidesFutureByFlag),
    ("earlier_calls", PrefixAndText),
    ("no_side_effects", MergesMasks),
    ("earlier_calls", FrequenciesOfCall),
    ("earlier_calls", SignOfItsOwn),
    ("earlier_calls", KeepsAngles),
    ("earlier_calls", of_patches(OfPatchesInRows)),
    ("earlier_calls", StoresDistances),
    ("earlier_calls", MergesWeights),
    ("earlier_calls", KeepsBiasUntilLoaded),
    ("eval_matches_train", TrimsPadding),
    ("no_side_effects", AddsPositions),
    ("own_layers", FourLayers),
    ("own_layers", TiedKeys),
    ("deterministic", KeysOfTwoHeads),
    ("no_side_effects", CacheInBuffers),
    ("half_precision", NormalizesTokens),
    ("half_precision", NormalizesEachLayer),
    ("finite_in_half", RectifiedLinear),
    ("half_precision", EveryThirdToken),
    ("deterministic", LearnedSegments),
    ("earlier_calls", KeepsChunksOfEachSize),
    ("earlier_calls", StoresMemory),
    ("memory_layout", ProjectsPairsOnce),
    ("earlier_calls", KeepsMaskOfChunks),
    ("earlier_calls", HidesQuestions),
]


EXCUSED: Excuses = [
    ("vmapped", writes_at_indices, "writes at indices, as vmap cannot"),
    ("dtype_and_device", TableOfFloat32, "is for float32 only"),
    ("half_precision", TableOfFloat32, "is for float32 only"),
    ("dtype_and_device", ProbabilitiesOfTokens, "other numbers than vectors"),
    ("half_precision", SquaresOverflow, "does not mention"),
    ("own_layers", RepeatsOneLayer, "share_layers"),
    ("own_layers", OneLayerForPositions, "share_att_key"),
    ("autocast", SumsByIndex, "does not run under autocast"),
]
