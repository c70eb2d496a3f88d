"""Modules that violate the laws of positions, or come near to it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from specimens.base import (
    Correct,
    Excuses,
    LinearBias,
    MaskedSelfAttention,
    Passes,
    RelativeTable,
    Rotary,
    RotaryOfDevices,
    SelfAttention,
    Violations,
    Window,
)


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


class RotaryWithBase(Rotary):
    def speed(self, pair: Tensor, width: int) -> Tensor:
        return 10000.0 ** (-2 * pair / width)


class RotaryOfQuarter(Rotary):
    """A quarter of the components of each head are rotated."""

    def turn(self, x: Tensor) -> Tensor:
        width = x.shape[3] // 8 * 2
        return torch.cat([super().turn(x[..., :width]), x[..., width:]], dim=-1)


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


class RotaryUnlessMasked(Rotary):
    """Causal, unless a mask takes the place of causality."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if mask is None:
            mask = torch.ones(1, *x.shape[1:2] * 2, device=x.device).bool().tril()
        return Correct.forward(self, x, x, x, mask)


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


class LinearBiasInWindow(LinearBias, Window):
    """Distances beyond a window of five count as five."""

    reach = 9

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device)
        slopes = self.slopes(k.shape[1]).to(k.device)[:, None, None]
        distance = (place[:, None] - place).clamp(min=0, max=5)
        return Correct.score(self, q, k) - (slopes * distance).to(k)


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


class BucketsOfFuture(Buckets):
    """A causal table, whose rows are those of later keys."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        return scores + torch.full_like(scores, -torch.inf).triu(1)

    def rows(self, distance: Tensor) -> Tensor:
        return super().rows(distance.clamp(min=0)) % 8


def penalized_attention(q: Tensor, k: Tensor, v: Tensor, slope: float = 0.25) -> Tensor:
    """Heads first; the bias falls with the distance, by a slope that is given."""
    place = torch.arange(k.shape[2], device=k.device).to(k)
    scores = q / math.sqrt(q.shape[-1]) @ k.mT
    return (scores - slope * (place[:, None] - place).abs()).softmax(-1) @ v


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


class BiasOfPixelsFromEnd(BiasOfPixels):
    def rows(self, distance: Tensor) -> Tensor:
        return super().rows(distance).flip(1)


class NearKeysOnly(RelativeTable):
    """A query attends to 8 keys before it, which no option says."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        near = torch.ones_like(scores, dtype=torch.bool).tril().triu(-8)
        return scores.masked_fill(~near, -torch.inf)


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


class RelativeScores(SelfAttention):
    """A query has a score for each distance, as in Transformer-XL."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.rel_proj = nn.Linear(8, d_model, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        seen = mask[:, None].expand(-1, x.shape[1], -1)
        return super(SelfAttention, self).forward(x, x, x, seen)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        length = q.shape[2]
        distances = torch.arange(length - 1, -length, -1, device=q.device)
        angles = distances[:, None] * torch.tensor([1, 0.5, 0.2, 0.1], device=q.device)
        features = torch.cat([angles.sin(), angles.cos()], dim=-1).to(q.dtype)
        r = self.split(self.rel_proj(features)[None])
        return super().score(q, k) + self.rel_shift(super().score(q, r))

    def rel_shift(self, scores: Tensor) -> Tensor:
        length = scores.shape[2]
        padded = nn.functional.pad(scores, self.padding)
        rows = padded.view(*scores.shape[:2], -1, length)[:, :, 1:]
        return rows.reshape_as(scores)[..., :length]

    padding = (1, 0)


class RelativeScoresPaddedBehind(RelativeScores):
    padding = (0, 1)


class BiasOfKeys(LinearBias):
    """ALiBi by the position of the key, added in the dtype of the scores."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device)
        slopes = self.slopes(k.shape[1]).to(k)[:, None, None]
        return Correct.score(self, q, k) + slopes * place.to(k)


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


class DistancesOfCaller(nn.Module):
    """Attention to relative positions, as by ESPnet."""

    def __init__(self, n_head: int, n_feat: int) -> None:
        super().__init__()
        self.h = n_head
        self.linear_qkv = nn.ModuleList(nn.Linear(n_feat, n_feat) for _ in range(3))
        self.rel_proj = nn.Linear(n_feat, n_feat, bias=False)
        self.linear_out = nn.Linear(n_feat, n_feat)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, pos_emb: Tensor, mask: Tensor
    ) -> Tensor:
        """The mask is (#batch, 1, time1), zero where not to attend."""
        q, k, v, p = (
            part(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
            for part, x in zip(
                [*self.linear_qkv, self.rel_proj],
                (query, key, value, pos_emb),
                strict=True,
            )
        )
        scores = (q @ k.mT + self.shift(q @ p.mT)) / q.shape[-1] ** 0.5
        hidden = mask[:, None].eq(0)
        least = torch.finfo(scores.dtype).min
        weights = scores.masked_fill(hidden, least).softmax(dim=-1)
        context = weights.masked_fill(hidden, 0.0) @ v
        joined: Tensor = self.linear_out(context.transpose(1, 2).flatten(2))
        return joined

    def shift(self, scores: Tensor) -> Tensor:
        length = scores.shape[2]
        places = torch.arange(length, device=scores.device)
        distances = places[:, None] - places
        index = (length - 1 - distances).expand(*scores.shape[:3], -1)
        return scores.gather(-1, index)


class PlacesOfCaller(DistancesOfCaller):
    """The encoding of distances is not shifted for each query."""

    def shift(self, scores: Tensor) -> Tensor:
        return scores[..., : scores.shape[2]]


def rotate_along(x: Tensor, axis: int) -> Tensor:
    """Rotary positions along one of four axes."""
    shape = [1, 1, 1, x.shape[-1] // 2]
    shape[axis] = x.shape[axis]
    frequencies = 10000.0 ** -torch.linspace(0, 1, shape[-1] + 1, device=x.device)[:-1]
    angles = torch.arange(x.shape[axis], device=x.device)[:, None] * frequencies
    cos, sin = (t.view(shape).to(x.dtype) for t in (angles.cos(), angles.sin()))
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


class RotatesHeads(MaskedSelfAttention):
    """Causal attention with rotary positions."""

    rotary_axis = 1

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = (rotate_along(x, self.rotary_axis) for x in (q, k))
        return super().score(q, k)


class RotatesTokens(RotatesHeads):
    rotary_axis = 2


class AlibiOfPastOnly(SelfAttention):
    """ALiBi: the further away a key, in either direction, the lower its score."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.rel_pos = nn.Identity()

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[2], device=q.device)
        slopes = 2.0 ** -torch.arange(1, self.heads + 1, device=q.device)
        distances = self.rel_pos(self.distances(places))
        return super().score(q, k) - slopes[:, None, None].to(q) * distances

    def distances(self, places: Tensor) -> Tensor:
        return places[:, None] - places


class AlibiOfBothWays(AlibiOfPastOnly):
    def distances(self, places: Tensor) -> Tensor:
        return super().distances(places).abs()


class TimesInFloat(SelfAttention):
    """Intervals between events. timestamps: (B, L) int64 seconds."""

    dtype = torch.float32

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.interval_bias = nn.Embedding(32, heads)

    def forward(self, x: Tensor, timestamps: Tensor) -> Any:  # type: ignore[override]
        """x: (B, L, D)"""
        times = timestamps.to(self.dtype)
        gaps = (times[:, :, None] - times[:, None]).abs()
        steps = torch.log2(1 + gaps).long().clamp(max=31)
        self.bias = self.interval_bias(steps).permute(0, 3, 1, 2)
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.bias


class TimesInIntegers(TimesInFloat):
    dtype = torch.int64


class PartialRotaryOfWholeHead(RotaryWithBase):
    """A quarter of each head is rotated, with the angles of the whole head."""

    of_head = True

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.rotary_ndims = d_model // heads // 8 * 2

    def turn(self, x: Tensor) -> Tensor:
        self.width, width = x.shape[3], self.rotary_ndims
        return torch.cat([super().turn(x[..., :width]), x[..., width:]], dim=-1)

    def speed(self, pair: Tensor, width: int) -> Tensor:
        return super().speed(pair, self.width if self.of_head else width)


class PartialRotary(PartialRotaryOfWholeHead):
    """A quarter of each head is rotated."""

    of_head = False


class RotatedByRowAndColumn(SelfAttention):
    """Half of each head is rotated by the row of a patch, half by its column."""

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Any:  # type: ignore[override]
        self.places = self.rows_and_columns(torch.arange(x.shape[1]), *grid)
        return super().forward(x)

    def rows_and_columns(
        self, place: Tensor, height: int, width: int
    ) -> tuple[Tensor, Tensor]:
        return place // width, place % width

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.rotate(q), self.rotate(k))

    def rotate(self, x: Tensor) -> Tensor:
        size = x.shape[-1] // 4
        base = 100.0 ** (-torch.arange(size) / size)
        angle = torch.cat([n[:, None] * base for n in self.places], dim=-1).to(x)
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = angle.cos(), angle.sin()
        pair = even * cos - odd * sin, even * sin + odd * cos
        return torch.stack(pair, dim=-1).flatten(-2)


class RotatedByHeight(RotatedByRowAndColumn):
    def rows_and_columns(
        self, place: Tensor, height: int, width: int
    ) -> tuple[Tensor, Tensor]:
        return place // height, place % height


class RotatedInEachDtype(Rotary):
    """Works in float32, float16 and bfloat16: distances of all positions are right."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        size = d_model // heads
        self.register_buffer("bases", 1e4 ** (-torch.arange(0, size, 2) / size))

    def turn(self, x: Tensor) -> Tensor:
        angle = self.angles_of(x)
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = angle.cos().to(x), angle.sin().to(x)
        pair = even * cos - odd * sin, even * sin + odd * cos
        return torch.stack(pair, dim=-1).flatten(-2)

    def angles_of(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[2])[:, None].to(self.bases) * self.bases


class RotatedInFloat32(RotatedInEachDtype):
    """Works in float32, float16 and bfloat16: positions are rotated in float32."""

    def angles_of(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        bases = 1e4 ** (-torch.arange(0, size, 2, device=x.device) / size)
        return torch.arange(x.shape[2], device=x.device)[:, None] * bases


class RotatesShare(MaskedSelfAttention):
    """The first half of each head is rotated, by angles of its own width."""

    def __init__(self, d_model: int, heads: int, rotary_base: float = 10000.0) -> None:
        super().__init__(d_model, heads)
        self.rotary_base, self.head_size = rotary_base, d_model // heads
        self.rotary_ndims = self.head_size // 2
        self.norm_factor = math.sqrt(self.head_size)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return self.turn(q) @ self.turn(k).mT / self.norm_factor

    def width(self) -> int:
        return self.rotary_ndims

    def turn(self, x: Tensor) -> Tensor:
        rotated, rest = x.split(self.rotary_ndims, dim=-1)
        pair = torch.arange(0, self.rotary_ndims, 2, device=x.device)
        place = torch.arange(x.shape[2], device=x.device)[:, None]
        angle = (place * self.rotary_base ** -(pair / self.width())).repeat(1, 2)
        one, other = rotated.chunk(2, dim=-1)
        cos, sin = angle.cos().to(x), angle.sin().to(x)
        turned = rotated * cos + torch.cat([-other, one], dim=-1) * sin
        return torch.cat([turned, rest], dim=-1)


class RotatesShareOfHead(RotatesShare):
    """The first half of each head is rotated, by angles of the width of a head."""

    def width(self) -> int:
        return self.head_size


class RotatesQuarter(RotatesShare):
    """The first quarter of each head is rotated, by angles of its own width."""

    def __init__(self, d_model: int, heads: int, rotary_pct: float = 0.25) -> None:
        super().__init__(d_model, heads)
        self.rotary_ndims = int(self.head_size * rotary_pct)


class MovesAtoms(SelfAttention):
    """E(3)-equivariant attention: weights fade with the distance, to zero beyond 5."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.mix = nn.Parameter(torch.randn(heads))

    def forward(self, h: Tensor, x: Tensor) -> Any:  # type: ignore[override]
        """h: (B, N, d_model), x: (B, N, 3)"""
        q, k, v = (self.split(part(h)) for part in (self.query, self.key, self.value))
        distance = (x[:, :, None] - x[:, None]).square().sum(-1).clamp(min=1e-12).sqrt()
        fade = (1 - distance / 5).clamp(min=0)[:, None]
        weights = self.score(q, k).softmax(dim=-1) * fade
        of_pairs = (weights * self.mix[:, None, None]).sum(1)
        moved = x + of_pairs @ x - self.total(of_pairs) * x
        return h + self.join(weights @ v), moved

    def total(self, of_pairs: Tensor) -> Tensor:
        return of_pairs.sum(-1, keepdim=True)


class MovesAtomsTooFar(MovesAtoms):
    def total(self, of_pairs: Tensor) -> Tensor:
        return self.mix.sum()


class RotatesByThree(MaskedSelfAttention):
    """`position_ids` is (3, batch, seq): time, row and column; all equal for text."""

    shares: tuple[int, ...] = (2, 1, 1)

    def __init__(self, d_model: int = 24, heads: int = 3) -> None:
        super().__init__(d_model, heads)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Any:  # type: ignore[override]
        if position_ids is None:
            places = torch.arange(x.shape[1], device=x.device)
            position_ids = places.expand(3, *x.shape[:2])
        width = x.shape[-1] // self.heads
        speed = 100 ** -(torch.arange(0, width, 2, device=x.device) / width)
        angles = (position_ids[..., None] * speed).repeat(1, 1, 1, 2)
        parts = angles.split(self.sections(), dim=-1)
        angle = torch.cat([part[n % 3] for n, part in enumerate(parts)], dim=-1)
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        q, k = (self.turn_by(part, angle[:, None].to(x)) for part in (q, k))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        return self.join(self.read(self.weigh(self.score(q, k), seen.tril()[None]), v))

    def sections(self) -> list[int]:
        return [*self.shares, *self.shares]

    def turn_by(self, x: Tensor, angle: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=-1)
        return x * angle.cos() + torch.cat([-other, one], dim=-1) * angle.sin()


class RotatesByThreeInTurns(RotatesByThree):
    def sections(self) -> list[int]:
        return [2 * share for share in self.shares]


class RotatesByShares(RotatesByThree):
    """`position_ids` is (3, batch, seq). A narrow head has time alone."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        pairs = d_model // heads // 2
        side = 3 * pairs // 8
        self.shares = (pairs - 2 * side, side, side)


class RotatesBySharesInTurns(RotatesByShares):
    def sections(self) -> list[int]:
        return [2 * share for share in self.shares]


class RotatedFrames(Rotary):
    """Each place of a video attends to itself in all frames; x: (B, T, N, C)"""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Any:
        b, _frames, n, _width = x.shape
        tokens = self.norm(x).transpose(1, 2).flatten(0, 1)
        y = Correct.forward(self, tokens, tokens, tokens)
        return x + y.unflatten(0, (b, n)).transpose(1, 2)


class RotatedFramesInHalf(RotatedFrames):
    def places(self, x: Tensor) -> Tensor:
        return super().places(x).to(x)


class RotatedVideo(Rotary):
    """All tokens of a clip attend to each other; x: (B, frames, height, width, C)"""

    def forward(self, x: Tensor) -> Any:
        _batch, frames, height, width, _ = x.shape
        number = torch.arange(frames, device=x.device)
        self.frame = number.repeat_interleave(height * width)
        tokens = x.flatten(1, 3)
        return Correct.forward(self, tokens, tokens, tokens).reshape(x.shape)

    def places(self, x: Tensor) -> Tensor:
        return self.frame


class RotatedVideoInHalf(RotatedVideo):
    def places(self, x: Tensor) -> Tensor:
        return self.frame.to(x.dtype)


def slopes_in_series(heads: int) -> Tensor:
    """The slopes of the authors' code, which BLOOM has, too."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


class SeriesAsIfOfCode(LinearBias):
    def slopes(self, heads: int) -> Tensor:
        return slopes_in_series(heads)


class LayersOfSixSlopes(SelfAttention):
    """Two layers with the slopes of ALiBi, those of the code of Press et al.

    A network between them mixes what their outputs are made of.
    """

    first = 0

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.network = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        for _ in range(2):
            x = x + self.network(super().forward(x)).tanh()
        return x

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place, heads = torch.arange(k.shape[2], device=k.device), q.shape[1]
        closest = 1 << (heads.bit_length() - 1)
        exponents = [8 * (n + 1) / closest for n in range(closest)]
        between = [4 * (n + 1) / closest for n in range(2 * closest)][self.first :: 2]
        exponents += between[: heads - closest]
        slopes = 0.5 ** torch.tensor(exponents, device=k.device)[:, None, None]
        bias = -slopes * (place - place[:, None]).abs()
        return super().score(q, k) + bias.to(k)


class LayersOfOtherSlopes(LayersOfSixSlopes):
    """Those between have the exponents of those that there are."""

    first = 1


def rot(x: Tensor) -> Tensor:
    """Pairs of features are rotated by their place in the axis in front of them."""
    place = torch.arange(x.shape[-2], device=x.device)[:, None]
    angle = place * 0.3 ** torch.arange(x.shape[-1] // 2, device=x.device)
    one, other = x.chunk(2, dim=-1)
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


class TurnsTokens(MaskedSelfAttention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.turn(q), self.turn(k))

    def turn(self, x: Tensor) -> Tensor:
        return rot(x)


class TurnsHeads(TurnsTokens):
    def turn(self, x: Tensor) -> Tensor:
        return rot(x.transpose(1, 2)).transpose(1, 2)


class LayersThatTurn(nn.Module):
    """In two causal layers, the order of tokens matters without positions, too."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layer(d_model, heads) for _ in range(2)])

    def layer(self, d_model: int, heads: int) -> nn.Module:
        return TurnsTokens(d_model, heads)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class LayersThatTurnHeads(LayersThatTurn):
    def layer(self, d_model: int, heads: int) -> nn.Module:
        return TurnsHeads(d_model, heads)


class BucketsOfEarlier(MaskedSelfAttention):
    """A table of distances to past tokens, in buckets of which the first are exact."""

    sign = 1

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.rel = nn.Embedding(8, heads)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device)
        distance = self.sign * (place[:, None] - place)
        bias = self.table()(distance.clamp(0, 7)).permute(2, 0, 1)
        return super().score(q, k) + bias

    def table(self) -> nn.Module:
        return self.rel


class BucketsOfLater(BucketsOfEarlier):
    sign = -1


class LayersWithBuckets(LayersThatTurn):
    def layer(self, d_model: int, heads: int) -> nn.Module:
        return BucketsOfEarlier(d_model, heads)


class LayersWithBucketsOfLater(LayersThatTurn):
    def layer(self, d_model: int, heads: int) -> nn.Module:
        return BucketsOfLater(d_model, heads)


class ProjectsDistances(SelfAttention):
    """Transformer-XL: sines of distances are projected, and shifted for each query."""

    first = 0

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.rel_proj = nn.Linear(d_model, d_model, bias=False)

    def encode(self, length: int, width: int) -> Tensor:
        distance = torch.arange(length - 1, -length, -1.0)[:, None] + self.first
        angle = distance * 0.1 ** torch.arange(width // 2)
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        length = q.shape[2]
        table = self.encode(length, self.rel_proj.in_features).to(q)
        rel = self.split(self.rel_proj(table)[None])  # [1, heads, 2 * length - 1, d]
        every = q @ rel.mT
        place = torch.arange(length, device=q.device)
        rows = length - 1 - place[:, None] + place
        shifted = every.gather(-1, rows.expand(*every.shape[:2], -1, -1))
        return super().score(q, k) + shifted


class ProjectsNextDistances(ProjectsDistances):
    """The slice of the table begins one row too early."""

    first = 1


class BucketsNamedBias(BucketsOfLater):
    """The table is named as many things are."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.bias = self.rel
        del self.rel

    def table(self) -> nn.Module:
        return self.bias


class LayersWithBucketsNamedBias(LayersThatTurn):
    def layer(self, d_model: int, heads: int) -> nn.Module:
        return BucketsNamedBias(d_model, heads)


class LayersWithRotation(LayersThatTurn):
    def layer(self, d_model: int, heads: int) -> nn.Module:
        return Rotary(d_model, heads)


class LayersWithRotaryWrongPairs(LayersThatTurn):
    def layer(self, d_model: int, heads: int) -> nn.Module:
        return RotaryWrongPairs(d_model, heads)


class LayersWithRotaryInHalf(LayersThatTurn):
    def layer(self, d_model: int, heads: int) -> nn.Module:
        return RotaryInHalf(d_model, heads)


class LayersWithRotaryOfBuffer(LayersThatTurn):
    def layer(self, d_model: int, heads: int) -> nn.Module:
        return RotaryInDtypeOfBuffer(d_model, heads)


class SecondLayerTurns(LayersThatTurn):
    """The first layer has no positions of its own, as in some published models."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.layers[0] = MaskedSelfAttention(d_model, heads)

    def layer(self, d_model: int, heads: int) -> nn.Module:
        return Rotary(d_model, heads)


class RowsOfPart(nn.Module):
    """The biases of distances, in a module of its own."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, heads)

    def forward(self, distance: Tensor) -> Tensor:
        rows: Tensor = self.rows(distance)
        return rows


class BucketsOfPart(BucketsOfLater):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.rel = RowsOfPart(heads)  # type: ignore[assignment]


class LayersWithBucketsOfPart(LayersThatTurn):
    def layer(self, d_model: int, heads: int) -> nn.Module:
        return BucketsOfPart(d_model, heads)


class TwoMapsOfRotatedHeads(Rotary):
    """The difference of two maps, each with half of the heads' features."""

    def forward(self, x: Tensor) -> Any:
        maps = 2 * self.heads
        q, k = (
            layer(x).unflatten(-1, (maps, -1)).transpose(1, 2)
            for layer in (self.query, self.key)
        )
        later = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
        weights = self.score(q, k).masked_fill(later, -torch.inf).softmax(dim=-1)
        one, other = weights.unflatten(1, (self.heads, 2)).unbind(2)
        y = (one - 0.3 * other) @ self.split(self.value(x))
        return self.join(nn.functional.rms_norm(y, y.shape[-1:]))


class TwoMapsOfTwoSpeeds(TwoMapsOfRotatedHeads):
    """Keys are rotated twice as far as queries."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, self.turn(k))


class BiasBesideMemory(LinearBias):
    """A key of its own, to which no query has a distance."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.memory = nn.Parameter(torch.randn(2, 1, d_model))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        later = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
        scores = self.score(q, k).masked_fill(later, -torch.inf)
        own_key, own_value = (self.split(each[None]) for each in self.memory)
        scores = torch.cat([Correct.score(self, q, own_key), scores], dim=-1)
        v = torch.cat([own_value.expand(len(x), -1, -1, -1), v], dim=2)
        return self.join(scores.softmax(dim=-1) @ v)


VIOLATING: Violations = {
    "moved_coordinates": [
        (MovesAtomsTooFar, {}),
    ],
    "positions_matter": [
        (LayersWithBucketsNamedBias, {}),
        (ProjectsNextDistances, {}),
        (LayersWithBucketsOfLater, {}),
        (LayersThatTurnHeads, {}),
        (RotatesHeads, {}),
        (DistancesWithoutSign, {}),
        (RotaryOverHeads, {"positions": "rotary"}),
        (RowsAndColumnsByHeight, {}),
        (BucketsOfFuture, {}),
        (LayersWithBucketsOfPart, {}),
    ],
    "distant_positions": [
        (TimesInFloat, {}),
        (BiasOfKeys, {"positions": "alibi"}),
        (BiasCountedInHalf, {"positions": "alibi"}),
        (RotaryOfRoundedTimes, {}),
        (RotaryEndsEarly, {"positions": "rotary"}),
        (RotaryStartsAgain, {"positions": "rotary"}),
        (RotaryInHalf, {"positions": "rotary"}),
        (RotaryOfNormsInHalf, {"positions": "rotary"}),
        (RotaryByBlocks, {"positions": "rotary"}),
        (RotaryImageOfShortRows, {"positions": "rotary"}),
        (RotatedInEachDtype, {}),
        (RotatedFramesInHalf, {}),
        (RotatedVideoInHalf, {}),
        (LayersWithRotaryInHalf, {}),
    ],
    "linear_bias": [
        (LayersOfOtherSlopes, {}),
        (SeriesAsIfOfCode, {"positions": "alibi"}),
        (AlibiOfPastOnly, {}),
        (AlibiByDistanceInOrder, {}),
        (BiasWithWrongSign, {"positions": "alibi"}),
        (QuadraticBias, {"positions": "alibi"}),
        (SameSlopes, {"positions": "alibi"}),
        (SteepSlopes, {"positions": "alibi"}),
    ],
    "relative_positions": [
        (RotatesBySharesInTurns, {}),
        (RotatesByThreeInTurns, {}),
        (PlacesOfCaller, {}),
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
        (RotatedByHeight, {}),
        (LayersWithRotaryWrongPairs, {}),
        (TwoMapsOfTwoSpeeds, {}),
    ],
    "rotary_angles": [
        (PartialRotaryOfWholeHead, {"positions": "rotary"}),
        (RotaryOfModelWidth, {"positions": "rotary"}),
        (RotatesShareOfHead, {}),
    ],
}


PASSING_ONE: Passes = [
    ("linear_bias", BiasBesideMemory),
    ("linear_bias", LayersOfSixSlopes),
    ("relative_positions", RotatesByShares),
    ("relative_positions", RotatesByThree),
    ("moved_coordinates", MovesAtoms),
    ("rotary_angles", PartialRotary),
    ("positions_matter", RotatesTokens),
    ("linear_bias", AlibiOfBothWays),
    ("relative_positions", DistancesOfCaller),
    ("padding", DistancesOfCaller),
    ("relative_positions", RelativeScores),
    ("linear_bias", AlibiByDistance),
    ("relative_positions", RotatesPatchesOfSquare),
    ("relative_positions", RotatesPatches),
    ("relative_positions", RotatesRowsAndColumns),
    ("positions_matter", RotaryOfTimes),
    ("distant_positions", RotaryOfTimes),
    ("relative_positions", RotaryImage),
    ("relative_positions", RotaryUnlessMasked),
    ("relative_positions", RotaryOfDevices),
    ("rotary_angles", Rotary),
    ("rotary_angles", RotaryWithBase),
    ("distant_positions", BiasOfLaterKeys),
    ("distant_positions", RotaryOfNorms),
    ("linear_bias", penalized_attention),
    ("relative_positions", QueriesBeforeHeads),
    ("positions_matter", SlowColumns),
    ("positions_matter", RowsAndColumns),
    ("relative_positions", RotatedByRowAndColumn),
    ("distant_positions", RotatedInFloat32),
    ("rotary_angles", RotatesShare),
    ("relative_positions", RotatesQuarter),
    ("rotary_angles", RotatesQuarter),
    ("distant_positions", RotatedFrames),
    ("distant_positions", RotatedVideo),
    ("relative_positions", LayersWithRotation),
    ("distant_positions", LayersWithRotation),
    ("positions_matter", LayersWithRotation),
    ("positions_matter", SecondLayerTurns),
    ("relative_positions", TwoMapsOfRotatedHeads),
]


EXCUSED: Excuses = [
    ("positions_matter", LayersWithBuckets, "is not rotary or alibi"),
    ("positions_matter", ProjectsDistances, "is not rotary or alibi"),
    ("distant_positions", TimesInIntegers, "no positional encoding"),
    ("positions_matter", SignedDistances, "is not rotary or alibi"),
    ("distant_positions", WindowAtPrediction, "changed by 1 / 64 change it"),
    ("distant_positions", RotaryInDtypeOfBuffer, "the dtype of a buffer"),
    ("distant_positions", ProjectsInDtypeOfBuffer, "the dtype of a buffer"),
    ("relative_positions", RotaryImageOfAngles, "the positions of pixels are given"),
    ("relative_positions", RotaryImageWithMean, "pools the pixels"),
    ("linear_bias", SlopesInOneSeries, "one series, as in the text of the paper"),
    ("distant_positions", BiasOfKeys, "its linear bias grows with the length"),
    ("linear_bias", LinearBiasInWindow, "Window"),
    ("distant_positions", LayersWithRotaryOfBuffer, "the dtype of a buffer"),
]
