"""Modules that violate the law of tables of positions, or come near to it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from specimens.base import (
    Correct,
    Excuses,
    Passes,
    RelativeTable,
    SelfAttention,
    ShiftsByOption,
    Violations,
)
from specimens.positions import Buckets


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


class BucketsOfLargestDistance(Buckets):
    """The logarithms are divided by that of the largest distance itself."""

    def growth(self) -> float:
        return self.max_distance


class BucketsThatEndEarly(Buckets):
    def growth(self) -> float:
        return 2


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


class BucketsBehindTheLast(SelfAttention):
    """Buckets of distances, of which the last begins at `max_distance`, as by T5."""

    def __init__(self, d_model: int, heads: int, max_distance: int = 32) -> None:
        super().__init__(d_model, heads)
        self.max_distance, self.num_buckets = max_distance, 16
        self.relative_attention_bias = nn.Embedding(self.num_buckets, heads)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[2], device=k.device)
        bias = self.relative_attention_bias(self.buckets(places - places[:, None]))
        return super().score(q, k) + bias.permute(2, 0, 1)

    def buckets(self, distances: Tensor) -> Tensor:
        half = self.num_buckets // 2
        far, exact = distances.abs(), half // 2
        growth = (far.clamp(min=1) / exact).log() / math.log(self.max_distance / exact)
        large = self.limit(exact + (growth * (half - exact)).long())
        near_or_far = torch.where(far < exact, far, large)
        return ((distances > 0) * half + near_or_far).clamp(max=self.num_buckets - 1)

    def limit(self, large: Tensor) -> Tensor:
        return large


class BucketsUpToTheLast(BucketsBehindTheLast):
    def limit(self, large: Tensor) -> Tensor:
        return large.clamp(max=self.num_buckets // 2 - 1)


class BiasOfNeighbors(SelfAttention):
    """A pixel attends to 3 x 3 pixels around it, which move inwards at a border."""

    kernel = 3

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        sides = 2 * self.kernel - 1
        self.rpb = nn.Parameter(torch.randn(heads, sides, sides))

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        (rows, row_bias), (columns, column_bias) = map(self.near, image.shape[2:])
        x = image.movedim(1, -1)
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).movedim(-2, 1)
            for f in (self.query, self.key, self.value)
        )
        places = rows[:, None, :, None], columns[None, :, None]
        k, v = (part[:, :, *places].flatten(4, 5) for part in (k, v))
        bias = self.rpb[:, row_bias[:, None, :, None], column_bias[None, :, None]]
        scores = (q[..., None, :] @ k.mT)[..., 0, :] / math.sqrt(q.shape[-1])
        weights = (scores + bias.flatten(3)).softmax(dim=-1)
        y = (weights[..., None, :] @ v)[..., 0, :].movedim(1, -2).flatten(-2)
        return self.out(y).movedim(-1, 1)

    def near(self, length: int) -> tuple[Tensor, Tensor]:
        """For each pixel along an axis, those nearby, and their rows of the table."""
        kernel = min(self.kernel, length)
        place = torch.arange(length)[:, None]
        first = (place - kernel // 2).clamp(0, length - kernel)
        near = first + torch.arange(kernel)
        return near, near - self.origin(place, near) + self.kernel - 1

    def origin(self, place: Tensor, near: Tensor) -> Tensor:
        return place


class BiasFromMiddle(BiasOfNeighbors):
    """Offsets are those from the middle of the neighborhood, also at a border."""

    def origin(self, place: Tensor, near: Tensor) -> Tensor:
        return near[:, near.shape[1] // 2, None]


class TableBesideOneRow(RelativeTable):
    """A window of one token, whose weight is 1, has a table of one distance."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.relative_bias_of_one = nn.Parameter(torch.zeros(1, heads))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        alone = self.relative_bias_of_one.softmax(dim=0)
        return super().forward(x) * alone.mean()


class WindowsOfPaddedMap(SelfAttention):
    """x is [B, H*W, dim] in row-major order, `hw=(H, W)`; windows are padded."""

    def __init__(self, dim: int, heads: int, window_size: int = 3) -> None:
        super().__init__(dim, heads)
        self.side = window_size
        count = (2 * window_size - 1) ** 2
        self.bias_table = nn.Parameter(torch.zeros(count, heads))

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Any:  # type: ignore[override]
        side, (height, width) = self.side, hw
        more = 0, 0, 0, -width % side, 0, -height % side
        image = nn.functional.pad(x.view(len(x), height, width, -1), more)
        real = nn.functional.pad(torch.ones_like(x[:1, :, :1]).view(1, *hw, 1), more)
        parts, seen = map(self.windows, (image, real))
        allowed = (seen > 0).mT.repeat(len(x), 1, 1)
        y = Correct.forward(self, parts, parts, parts, allowed)
        rows, columns = (n // side for n in image.shape[1:3])
        y = y.view(len(x), rows, columns, side, side, -1).transpose(2, 3)
        return y.reshape(image.shape)[:, :height, :width].reshape(x.shape)

    def windows(self, image: Tensor) -> Tensor:
        parts = image.unflatten(2, (-1, self.side)).unflatten(1, (-1, self.side))
        return parts.transpose(2, 3).reshape(-1, self.side**2, image.shape[-1])

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(self.side**2, device=q.device)
        row, column = place // self.side, place % self.side
        rows, columns = (n[:, None] - n + self.side - 1 for n in (row, column))
        bias = self.bias_table[rows * self.stride() + columns]
        return super().score(q, k) + bias.permute(2, 0, 1)

    def stride(self) -> int:
        return 2 * self.side - 1


class WindowsOfSharedOffsets(WindowsOfPaddedMap):
    def stride(self) -> int:
        return 2 * self.side - 2


class BucketsOfBoxes(SelfAttention):
    r"""Tokens and their boxes have buckets.

    Args:
        x (`torch.FloatTensor` of shape `(batch_size, seq_len, hidden_size)`)
        bbox (`torch.LongTensor` of shape `(batch_size, seq_len, 4)`): boxes
    """

    def __init__(self, d_model: int, heads: int, max_rel_pos: int = 32) -> None:
        super().__init__(d_model, heads)
        self.max_rel_pos = max_rel_pos
        self.rel_pos_bias = nn.Embedding(16, heads)
        self.rel_x_bias = nn.Embedding(16, heads)

    def forward(self, x: Tensor, bbox: Tensor) -> Any:  # type: ignore[override]
        places = torch.arange(x.shape[1], device=x.device)[None]
        self.bias = self.of_buckets(self.rel_pos_bias, places)
        self.bias = self.bias + self.of_buckets(self.rel_x_bias, bbox[..., 3])
        return super().forward(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.bias

    def of_buckets(self, table: nn.Embedding, places: Tensor) -> Tensor:
        distance = places[:, None] - places[..., None]
        size, far = distance.abs(), self.max_rel_pos
        ratio = (size.clamp(min=1) / 4).log() / math.log(far / 4)
        bucket = torch.where(size < 4, size, 4 + (4 * ratio).long())
        rows = self.limited(bucket) + 8 * (distance > 0)
        bias: Tensor = table(rows.clamp(max=15))
        return bias.permute(0, 3, 1, 2)

    def limited(self, bucket: Tensor) -> Tensor:
        return bucket.clamp(max=7)


class BucketsOfBoxesBehind(BucketsOfBoxes):
    __doc__ = BucketsOfBoxes.__doc__

    def limited(self, bucket: Tensor) -> Tensor:
        return bucket


class RectangularWindow(SelfAttention):
    """A bias for each offset of two pixels in a window, one row after the other.

    window_size: (height, width)
    """

    order = "ij"

    def __init__(self, d_model: int, heads: int, window_size: tuple[int, int]) -> None:
        super().__init__(d_model, heads)
        self.height, self.width = window_size
        rows = (2 * self.height - 1) * (2 * self.width - 1)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(rows, heads))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        sides = (torch.arange(n, device=q.device) for n in (self.height, self.width))
        places = torch.meshgrid(*sides, indexing=self.order)
        down, right = (x.flatten()[:, None] - x.flatten() for x in places)
        rows = (down + self.height - 1) * (2 * self.width - 1) + right + self.width - 1
        return super().score(q, k) + self.relative_position_bias_table[rows].movedim(
            -1, 0
        )


class RowsTakenForColumns(RectangularWindow):
    order = "xy"
    __doc__ = RectangularWindow.__doc__


VIOLATING: Violations = {
    "relative_table": [
        (RowsTakenForColumns, {}),
        (BucketsOfBoxesBehind, {}),
        (WindowsOfSharedOffsets, {}),
        (BiasFromMiddle, {}),
        (BucketsBehindTheLast, {}),
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
}

PASSING_ONE: Passes = [
    ("relative_table", RectangularWindow),
    ("relative_table", BucketsOfBoxes),
    ("relative_table", WindowsOfPaddedMap),
    ("relative_table", BiasOfNeighbors),
    ("relative_table", BucketsUpToTheLast),
    ("relative_table", RelativeTable),
    ("relative_table", Buckets),
    ("relative_table", TableOfBothDirections),
    ("relative_table", TableOfWindows),
    ("relative_table", TableOfHalos),
    ("relative_table", BiasOfWindow),
    ("relative_table", BiasOfImageWindow),
    ("relative_table", BiasOfVolume),
    ("relative_table", TableOfShiftedWindows),
    ("relative_table", TableOfPairs),
    ("relative_table", TableBesideOneRow),
]

EXCUSED: Excuses = [
    ("relative_table", ChunksWithAllPast, "distances occur in its chunks"),
]
