"""Models of images are checked as a whole, with vectors in place of their patches."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attention_laws.adapter import Options
from attention_laws.infer import infer_adapter
from attention_laws.patches import of_patches
from headnotes.cli import main

SIDE, WIDTH, ROWS, COLUMNS = 4, 6, 3, 5


class Model(nn.Module):
    """images: (B, 3, H, W); mask: (B, H, W) bool, True at padding"""

    def __init__(self, d_model: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, d_model, kernel_size=SIDE, stride=SIDE)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        patches: Tensor = self.embed(images)
        if mask is None:
            return patches
        assert mask.shape[1:] == images.shape[2:]
        return patches * ~mask[:, None, ::SIDE, ::SIDE]


class Halves(Model):
    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(images[..., ::2], mask)


def test_vectors_take_the_place_of_patches_and_masks_are_theirs() -> None:
    vectors = torch.randn(2, WIDTH, ROWS, COLUMNS)
    model = of_patches(Model)()
    torch.testing.assert_close(model(vectors), vectors)
    mask = torch.rand(2, ROWS, COLUMNS) < 0.5
    torch.testing.assert_close(model(vectors, mask=mask), vectors * ~mask[:, None])


def test_an_image_is_taken_as_one() -> None:
    model, image = of_patches(Model)(), torch.randn(2, 3, 2 * SIDE, SIDE)
    torch.testing.assert_close(model(image), model.embed(image))  # type: ignore[operator]


def test_other_patches_than_those_of_the_image_are_refused() -> None:
    with pytest.raises(ValueError, match="not those of its image"):
        of_patches(Halves)()(torch.randn(2, WIDTH, 2, 4))


class Vision(nn.Module):
    """images: (B, 3, H, W), of one size"""

    def __init__(
        self, img_size: int = 224, patch_size: int = 16, dim: int = 96, heads: int = 3
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, patch_size, patch_size)
        count = (img_size // patch_size) ** 2
        self.positions = nn.Parameter(torch.randn(1, count, dim))
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).mT + self.positions
        y: Tensor = x + self.attention(x, x, x, need_weights=False)[0]
        return y.mean(dim=1)


def test_a_model_of_large_images_is_built_for_small_ones() -> None:
    adapter = infer_adapter(of_patches(Vision), "Vision", "", Options())
    assert (adapter.image, adapter.fixed_length) == ("image", 16)
    assert adapter.init_args | {"patch_size": "2", "img_size": "8"} == adapter.init_args


def test_the_channels_of_an_image_are_no_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "from torch import Tensor, nn\nimport torch\n\n"
    path = tmp_path / "vision.py"
    path.write_text(lines + inspect.getsource(Vision), encoding="utf-8")
    assert main(["check", f"{path}:Vision", "--json"]) == 0
    report, *_within = json.loads(capsys.readouterr().out)
    facts = {fact["name"]: fact["value"] for fact in report["facts"]}
    assert facts["layout"] == "image"
    assert facts["patches of images"] == "vectors are given in their place"
