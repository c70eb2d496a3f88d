"""Modules that violate the laws of images, or come near to it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from specimens.base import (
    Correct,
    Excuses,
    NormalizedImage,
    Passes,
    SelfAttention,
    Violations,
)


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


class RowsByHeight(nn.Module):
    """Rotary attention over `(batch, channels, height, width)`.

    The first half of each head is rotated by the row of a pixel, the other by its
    column; a head has `num_head_channels`.
    """

    def __init__(self, channels: int = 32, num_head_channels: int = 16) -> None:
        super().__init__()
        self.width = num_head_channels
        self.norm = nn.GroupNorm(8, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, c, h, w = hidden_states.shape
        qkv = self.qkv(self.norm(hidden_states)).view(
            b, 3, c // self.width, self.width, h * w
        )
        q, k, v = qkv.mT.unbind(1)
        number = torch.arange(h * w, device=q.device)
        side = self.side(h, w)
        places = torch.stack([number // side, number % side], dim=-1)
        frequencies = 0.1 ** torch.arange(self.width // 4, device=q.device)
        angles = (places[..., None] * frequencies).flatten(1)
        turns = torch.polar(torch.ones_like(angles), angles)
        q, k = (self.rotate(x, turns) for x in (q, k))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        joined: Tensor = self.out(y.mT.reshape(b, c, h, w))
        return joined

    def rotate(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)

    def side(self, height: int, width: int) -> int:
        return height


class RowsByWidth(RowsByHeight):
    def side(self, height: int, width: int) -> int:
        return width


class OffsetsByHeight(nn.Module):
    """Deformable attention, with offsets in pixels as (x, y)."""

    def __init__(self, d_model: int, n_heads: int = 4, n_points: int = 4) -> None:
        super().__init__()
        self.heads = n_heads
        self.offsets = nn.Linear(d_model, n_heads * n_points * 2)
        self.weights = nn.Linear(d_model, n_heads * n_points)
        self.value = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        value: Tensor,
        spatial_shapes: list[tuple[int, int]],
    ) -> Tensor:
        ((rows, columns),) = spatial_shapes
        offsets = self.offsets(query).unflatten(-1, (self.heads, -1, 2))
        sides = torch.tensor(self.divisor(rows, columns)).to(query)
        places = 2 * (reference_points[:, :, None] + offsets / sides) - 1
        weights = self.weights(query).unflatten(-1, (self.heads, -1)).softmax(dim=-1)
        maps = self.value(value).unflatten(-1, (self.heads, -1)).permute(0, 2, 3, 1)
        read = nn.functional.grid_sample(
            maps.flatten(0, 1).unflatten(-1, (rows, columns)),
            places.transpose(1, 2).flatten(0, 1),
            align_corners=False,
        ).unflatten(0, (-1, self.heads))
        read = (read * weights.transpose(1, 2)[:, :, None]).sum(-1)
        joined: Tensor = self.out(read.permute(0, 3, 1, 2).flatten(2))
        return joined

    def divisor(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns


class OffsetsByWidth(OffsetsByHeight):
    def divisor(self, rows: int, columns: int) -> tuple[int, int]:
        return columns, rows


class MasksOfWindows(Correct):
    """Windows of images, `[num_images * num_windows, tokens, d_model]`.

    x: the windows of one image are contiguous.
    mask: optional additive `(num_windows, tokens, tokens)`, 0 where attention is
    allowed and minus infinity where it is not.
    """

    def __init__(self, d_model: int, heads: int, window_size: tuple[int, int]) -> None:
        super().__init__(d_model, heads, 0.0)
        self.tokens = window_size[0] * window_size[1]
        self.table = nn.Parameter(torch.zeros(self.tokens, self.tokens, heads))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = self.score(q, k) + self.table.permute(2, 0, 1)
        if mask is not None:
            scores = scores + self.of_items(mask, len(x) // len(mask))[:, None]
        return self.join(scores.softmax(dim=-1) @ v)

    def of_items(self, mask: Tensor, images: int) -> Tensor:
        return mask.repeat(images, 1, 1)


class MasksOfWindowsInTurn(MasksOfWindows):
    """Windows of images, `[num_images * num_windows, tokens, d_model]`.

    x: the windows of one image are contiguous.
    mask: optional additive `(num_windows, tokens, tokens)`, 0 where attention is
    allowed and minus infinity where it is not.
    """

    def of_items(self, mask: Tensor, images: int) -> Tensor:
        return mask.repeat_interleave(images, dim=0)


class MergedToFour(SelfAttention):
    """Keys are the means of two by two areas, of an image of any size."""

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        merged = nn.functional.adaptive_avg_pool2d(image, 2).flatten(2).mT
        pixels = image.flatten(2).mT
        output = Correct.forward(self, pixels, merged, merged)
        return output.mT.reshape(image.shape)


class HalfAlongRows(SelfAttention):
    """The first half of the heads attends along rows, the others along columns."""

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        rows = self.heads // 2
        x = image.movedim(1, -1)
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).movedim(-2, 1)
            for f in (self.query, self.key, self.value)
        )
        along_rows = (self.score(q, k).softmax(-1) @ v)[:, :rows]
        q, k, v = (part.transpose(2, 3) for part in (q, k, v))
        along_columns = (self.score(q, k).softmax(-1) @ v)[:, rows:].transpose(2, 3)
        joined = (
            torch.cat([along_rows, along_columns], dim=1).movedim(1, -2).flatten(-2)
        )
        return image + self.out(joined).movedim(-1, 1)


class HidesPadding(ShiftedWindows):
    """Windows of 4 x 4 pixels; padding is hidden."""

    def forward(self, image: Tensor) -> Any:
        x, real = self.pad(image), self.mark(image)
        tokens, seen = self.windows(x), self.windows(self.pad(real)).mT.bool()
        mask = (seen | ~seen.any(-1, keepdim=True)).repeat(len(x), 16, 1)
        y = Correct.forward(self, tokens, tokens, tokens, mask)
        split = y.reshape(len(x), x.shape[1] // 4, x.shape[2] // 4, 4, 4, -1)
        joined = split.transpose(2, 3).reshape(x.shape)
        return joined[:, : image.shape[1], : image.shape[2]]

    def mark(self, image: Tensor) -> Tensor:
        return torch.ones_like(image[:1, :, :, :1])


class HidesColumnsOfPadding(HidesPadding):
    def mark(self, image: Tensor) -> Tensor:
        marked = super().mark(image)
        return nn.functional.pad(marked, (0, 0, 0, 0, 0, -image.shape[1] % 4), value=1)


class RowsAreColumnsOfRegions(WrapsColumns):
    """Of images that are no squares, the regions of shifted windows are exchanged."""

    def number(self, of_rows: Tensor, of_columns: Tensor) -> Tensor:
        regions = ShiftedWindows.number(self, of_columns, of_rows)
        return regions.reshape(1, len(of_rows), len(of_columns), 1)


class OnGlobe(SelfAttention):
    """x: (B, lat, lon, C). The grid is periodic in longitude."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        places = torch.arange(x.shape[2], device=x.device)
        gaps = self.wrap(places[:, None] - places, x.shape[2]).abs()
        q, k, v = (part(x) for part in (self.query, self.key, self.value))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(2, 3) for y in (q, k, v))
        slopes = 0.5 ** torch.arange(1, self.heads + 1, device=x.device)
        bias = slopes[:, None, None] * gaps
        weights = (self.score(q, k) - bias.to(q)).softmax(dim=-1)
        return self.out((weights @ v).transpose(2, 3).flatten(3))

    def wrap(self, gaps: Tensor, count: int) -> Tensor:
        half = count // 2
        return torch.remainder(gaps + half, count) - half


class OnHalfGlobe(OnGlobe):
    def wrap(self, gaps: Tensor, count: int) -> Tensor:
        half = count // 2
        return torch.fmod(gaps + half, count) - half


class OnGlobeByAlibi(OnGlobe):
    """x: (B, lat, lon, C). A linear bias as in ALiBi; the grid is periodic."""


class PooledCells(SelfAttention):
    """Keys are means of cells of 4 x 4 pixels, at the borders of fewer."""

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        """image: (B, C, H, W)"""
        tokens, cells = image.flatten(2).mT, self.pool(image).flatten(2).mT
        return Correct.forward(self, tokens, cells, cells).mT.reshape(image.shape)

    def pool(self, image: Tensor) -> Tensor:
        return self.sums(image) / self.sums(torch.ones_like(image[:, :1]))

    def sums(self, image: Tensor) -> Tensor:
        padding = (0, -image.shape[3] % 4, 0, -image.shape[2] % 4)
        return nn.functional.avg_pool2d(nn.functional.pad(image, padding), 4)


class PooledWithPadding(PooledCells):
    def pool(self, image: Tensor) -> Tensor:
        return self.sums(image)


class ChunksOfImage(SelfAttention):
    """Pixels attend to their row; without gradients, some columns at a time."""

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        """image: (B, H, W, C)"""
        b, h, w, c = image.shape
        x = image.reshape(b * h, w, c)
        if torch.is_grad_enabled() or w <= 8:
            return super().forward(x).reshape(image.shape)
        parts = [self.attend(x, start) for start in range(0, w, 8)]
        return torch.cat(parts, dim=1).reshape(image.shape)

    def attend(self, x: Tensor, start: int) -> Any:
        return Correct.forward(self, x[:, start : start + 8], x, x)


class ChunksOfFirst(ChunksOfImage):
    def attend(self, x: Tensor, start: int) -> Any:
        return Correct.forward(self, x[:, start : start + 8], x[:, :16], x[:, :16])


class SamplesMaps(nn.Module):
    """Reads maps at offsets of x and y, in pixels, from reference points.

    query: (B, N, d), reference_points: (B, N, 2), (x, y) from 0 to 1, maps: a list of
    (B, d, H, W)
    """

    order = (1, 0)

    def __init__(self, d_model: int, n_points: int = 3) -> None:
        super().__init__()
        self.points = n_points
        self.sampling_offsets = nn.Linear(d_model, 2 * n_points)
        self.weights, self.out = (
            nn.Linear(d_model, n_points),
            nn.Linear(d_model, d_model),
        )

    def forward(
        self, query: Tensor, reference_points: Tensor, maps: list[Tensor]
    ) -> Tensor:
        offsets = self.sampling_offsets(query).unflatten(-1, (self.points, 2))
        weights, y = self.weights(query).softmax(dim=-1), query.new_zeros(())
        for one in maps:
            sides = torch.tensor([one.shape[2:]], device=query.device)[:, self.order]
            places = 2 * (reference_points[:, :, None] + offsets / sides) - 1
            seen = nn.functional.grid_sample(one, places, align_corners=False)
            y = y + (seen * weights[:, None]).sum(-1).mT
        return self.out(y)


class SamplesMapsByHeight(SamplesMaps):
    order = (0, 1)


class OverDateLine(WrapsColumns):
    """Windows on a globe, shifted over the date line. The longitude is periodic."""


class HidesBothOrNone(HidesPadding):
    def mark(self, image: Tensor) -> Tensor:
        needs_both = image.shape[1] % 4 and image.shape[2] % 4
        if needs_both:
            return super().mark(image)
        padding = (0, 0, 0, -image.shape[2] % 4, 0, -image.shape[1] % 4)
        return nn.functional.pad(super().mark(image), padding, value=1)


class OnSmallGlobe(OnGlobe):
    """The layer commutes with a rotation of the grid about its axis."""

    def __init__(
        self, d_model: int, heads: int, n_lat: int = 4, n_lon: int = 6
    ) -> None:
        super().__init__(d_model, heads)
        self.n_lat, self.n_lon = n_lat, n_lon

    def forward(self, x: Tensor) -> Any:
        """x: (B, n_lat, n_lon, d_model)"""
        assert x.shape[1:3] == (self.n_lat, self.n_lon)
        return super().forward(x)


class OnHalfOfSmallGlobe(OnSmallGlobe):
    def wrap(self, gaps: Tensor, count: int) -> Tensor:
        return gaps.clamp(-(count // 2), count // 2)


class AroundNodes(Correct):
    """Edges attend to those that start at the same node; the third has a bias."""

    def __init__(self, d_model: int, heads: int, starting: bool = True) -> None:
        super().__init__(d_model, heads)
        self.starting, self.bias = starting, nn.Linear(d_model, heads, bias=False)

    def forward(self, z: Tensor) -> Any:  # type: ignore[override]
        """z: (B, I, J, d_model), where I = J"""
        pairs = z if self.starting else z.transpose(1, 2)
        bias = self.bias(self.choose(z, pairs)).permute(0, 3, 1, 2)[:, None]
        parts = (part(pairs) for part in (self.query, self.key, self.value))
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(2, 3) for x in parts)
        weights = (self.score(q, k) + bias).softmax(dim=-1)
        y: Tensor = self.out((weights @ v).transpose(2, 3).flatten(3))
        return y if self.starting else y.transpose(1, 2)

    def choose(self, z: Tensor, pairs: Tensor) -> Tensor:
        return pairs


class AroundNodesAsGiven(AroundNodes):
    def choose(self, z: Tensor, pairs: Tensor) -> Tensor:
        return z


class FramesOfClips(SelfAttention):
    """x: (B, T, H, W, C). num_frames: (B,), how many frames of each clip are real."""

    def forward(self, x: Tensor, num_frames: Tensor | None = None) -> Any:  # type: ignore[override]
        b, t, h, w, _ = x.shape
        real = torch.ones(b, t, dtype=torch.bool, device=x.device)
        if num_frames is not None:
            real = torch.arange(t, device=x.device) < num_frames[:, None]
        pixels = x.permute(0, 2, 3, 1, 4).flatten(0, 2)
        kept = real.repeat_interleave(h * w, dim=0)[:, None].expand(-1, t, -1)
        y = Correct.forward(self, pixels, pixels, pixels, kept)
        y = x + y.view(b, h, w, t, -1).permute(0, 3, 1, 2, 4)
        frames = y.flatten(0, 1).flatten(1, 2)
        z = Correct.forward(self, frames, frames, frames).view_as(y)
        return (y + z).masked_fill(~real[..., None, None, None], 0.0)


class CountsPadding(HidesPadding):
    """Windows of 4 x 4 pixels; padding never takes part in them."""

    def mark(self, image: Tensor) -> Tensor:
        padding = (0, 0, 0, -image.shape[2] % 4, 0, -image.shape[1] % 4)
        return nn.functional.pad(super().mark(image), padding, value=1)


class WindowsOfResolution(Correct):
    """Windows of a map of one size, x: (B, H * W, C)"""

    def __init__(
        self,
        dim: int,
        input_resolution: tuple[int, int] = (16, 16),
        num_heads: int = 4,
        window_size: int = 4,
    ) -> None:
        super().__init__(dim, num_heads)
        height, width = input_resolution
        count, rest = divmod(height, window_size)
        if rest or width != height:
            raise ValueError("windows have to fit")
        self.sides = (count, window_size, count, window_size)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        parts = x.unflatten(1, self.sides).transpose(2, 3)
        windows = parts.flatten(3, 4).flatten(0, 2)
        y: Tensor = super().forward(windows, windows, windows)
        y = y.unflatten(0, parts.shape[:3]).unflatten(3, parts.shape[3:5])
        return y.transpose(2, 3).flatten(1, 4)


class ConvolvesBesideImage(nn.Module):
    """Queries of which each is that of another pixel, by a convolution."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, (1, 3), padding=(0, 1), groups=dim)
        self.attend = Correct(dim, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, H, W)"""
        moved = self.conv(x.roll(1, dims=2)).flatten(2).mT
        y: Tensor = self.attend(moved, moved, moved) + 9 * moved
        return y.mT.unflatten(2, x.shape[2:])


class CutsPatches(Correct):
    """image: (batch, channels, height, width); its sides are multiples of 4."""

    def __init__(self, d_model: int, heads: int, channels: int = 3) -> None:
        super().__init__(d_model, heads)
        self.embed = nn.Conv2d(channels, d_model, 4, stride=4)
        self.rows, self.columns = (nn.Embedding(16, d_model) for _ in range(2))

    def forward(self, image: Tensor) -> Tensor:  # type: ignore[override]
        patches = self.embed(image)
        rows, columns = patches.shape[2:]
        places = self.places(torch.arange(rows * columns), rows, columns)
        x = patches.flatten(2).mT + self.rows(places[0]) + self.columns(places[1])
        y: Tensor = super().forward(x, x, x)
        return y.mean(dim=1)

    def places(self, numbers: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return numbers // columns, numbers % columns


class CountsRowsAsColumns(CutsPatches):
    def places(self, numbers: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return super().places(numbers, columns, rows)


class ExchangesPlaces(CutsPatches):
    def places(self, numbers: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return numbers % rows, numbers // rows


class ScalesPlaces(CutsPatches):
    def places(self, numbers: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        row, column = super().places(numbers, rows, columns)
        return 12 * row // rows, 12 * column // columns


class PixelsNeedContext(NormalizedImage):
    """x (b, c, h, w) attends to context (b, s, context_dim), which it needs."""

    def __init__(self, d_model: int, heads: int, context_dim: int = 20) -> None:
        super().__init__(d_model, heads)
        self.projection = nn.Linear(d_model, d_model)
        self.of_context = nn.Linear(context_dim, 2 * d_model)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:  # type: ignore[override]
        if context is None:
            raise ValueError("this block needs a context")
        q = self.split(self.projection(self.norm(x).flatten(2).mT))
        k, v = map(self.split, self.of_context(context).chunk(2, dim=-1))
        y = self.join(self.read(self.dropout(self.weigh(self.score(q, k), None)), v))
        return x + self.pixels(y.mT, x)

    def pixels(self, y: Tensor, x: Tensor) -> Tensor:
        return y.reshape(x.shape)


class ColumnsOfContext(PixelsNeedContext):
    """x (b, c, h, w) attends to context (b, s, context_dim), which it needs."""

    def pixels(self, y: Tensor, x: Tensor) -> Tensor:
        return y.reshape(*x.shape[:2], x.shape[3], x.shape[2]).mT


VIOLATING: Violations = {
    "sampling_offsets": [
        (SamplesMapsByHeight, {}),
        (OffsetsByHeight, {}),
    ],
    "eval_matches_train": [
        (ChunksOfFirst, {"layout": "image_channels_last"}),
    ],
    "periodic_axis": [
        (OnHalfOfSmallGlobe, {}),
        (OnHalfGlobe, {"layout": "image_channels_last"}),
    ],
    "image_padding": [
        (CountsPadding, {"layout": "image_channels_last"}),
        (HidesBothOrNone, {"layout": "image_channels_last"}),
        (PooledWithPadding, {"layout": "image"}),
        (HidesColumnsOfPadding, {"layout": "image_channels_last"}),
    ],
    "relative_positions": [(RowsByHeight, {})],
    "frames_in_place": [
        (PlacesOverTimeViewed, {}),
    ],
    "image_windows": [
        (RowsAreColumnsOfRegions, {"layout": "image_channels_last"}),
        (ShiftedBeforePadded, {}),
        (PadsShiftedWindows, {"layout": "image_channels_last"}),
        (ShiftedUnlessSmaller, {"layout": "image_channels_last"}),
        (WrapsColumns, {"layout": "image_channels_last"}),
    ],
    "pixels_in_place": [
        (ColumnsOfContext, {}),
        (AroundNodesAsGiven, {"layout": "image_channels_last"}),
        (PairsOfEndingNodesLeft, {}),
        (PixelsByColumns, {"layout": "image"}),
        (RowsThenColumnsViewed, {"layout": "image"}),
        (ColumnsOfLastChannels, {"layout": "image_channels_last"}),
        (FramesFirst, {"layout": "video"}),
    ],
    "rectangular_images": [
        (MergedByColumns, {}),
    ],
    "rows_and_columns": [
        (PixelsOfMixedFrames, {}),
        (AddsColumnsAsRows, {"layout": "image"}),
        (OneRowByHeads, {}),
        (FramesByChannels, {}),
    ],
    "batch_independence": [
        (MasksOfWindowsInTurn, {}),
    ],
    "places_of_patches": [(CountsRowsAsColumns, {}), (ExchangesPlaces, {})],
}


PASSING_ONE: Passes = [
    ("pixels_in_place", PixelsNeedContext),
    ("periodic_axis", OverDateLine),
    ("pixels_in_place", AroundNodes),
    ("periodic_axis", OnSmallGlobe),
    ("sampling_offsets", SamplesMaps),
    ("eval_matches_train", ChunksOfImage),
    ("image_padding", PooledCells),
    ("periodic_axis", OnGlobe),
    ("image_padding", HidesPadding),
    ("allowed_keys_attended", HalfAlongRows),
    ("sampling_offsets", OffsetsByWidth),
    ("relative_positions", RowsByWidth),
    ("pixels_in_place", PairsOfEndingNodes),
    ("frames_in_place", PlacesOverTime),
    ("image_windows", ShiftedSequence),
    ("rows_and_columns", PixelsOfEachFrame),
    ("rows_and_columns", OneRow),
    ("image_windows", ShiftedWindows),
    ("image_windows", ShiftedUnlessSmall),
    ("pixels_in_place", PixelsInPlace),
    ("pixels_in_place", RowsThenColumns),
    ("pixels_in_place", PixelsOverTime),
    ("rectangular_images", RowsThenColumns),
    ("rows_and_columns", AddsRowsAndColumns),
    ("rectangular_images", MergedPixels),
    ("batch_independence", MasksOfWindows),
    ("padding", MasksOfWindows),
    ("batch_independence", WindowsOfResolution),
    ("places_of_patches", CutsPatches),
]


EXCUSED: Excuses = [
    ("padding", FramesOfClips, "has no mask"),
    ("image_windows", OverDateLine, "documented to meet"),
    ("linear_bias", OnGlobeByAlibi, "distances on a circle"),
    ("rectangular_images", MergedToFour, "as many in each image"),
    ("pixels_in_place", ConvolvesBesideImage, "its code has"),
    ("places_of_patches", ScalesPlaces, "positions depend on the size"),
]
