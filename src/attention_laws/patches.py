r"""# Models that cut images into patches

A vision transformer embeds patches of several pixels, and laws need vectors, of which
each can be changed a little, in images of any size. So the convolution that embeds the
patches is left out: a subclass takes a vector for each patch, gives the model an image
of as many patches, and returns the vectors where it embeds them. A mask has a number
for each patch, too, which all of its pixels get. All laws of images then apply to the
model as a whole: to its masks, its positions and its tables, which the attentions
within it do not show.

Source: [An Image is Worth 16x16 Words](https://arxiv.org/abs/2010.11929), Dosovitskiy
et al. 2021, section 3.1, and [DETR](https://arxiv.org/abs/2005.12872), whose images
have masks of pixels.
"""

import inspect
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from attention_laws import structure
from attention_laws.embedded import SMALL_MODEL, add_hook, own_forward, present_as

# Sizes of vision models, whose large defaults would only cost time: four rows of four
# patches.
SMALL_VISION = SMALL_MODEL | {
    r"(patch|stem)(_?size)?|patch_?(dim|width|side)": 2,
    r"(im(a)?ge?|input)_?(size|res(olution)?|side)|resolution": 8,
}


class TakesPatches:
    """A model that takes a vector for each patch of an image."""


def takes_patches(target: Any) -> bool:
    """Whether a module or class takes vectors in place of the patches of an image."""
    kind = target if isinstance(target, type) else type(target)
    return issubclass(kind, TakesPatches)


def of_patches(kind: type[nn.Module]) -> type[nn.Module]:
    r"""A subclass that takes vectors `[batch_size, d_model, rows, columns]`.

    `kind` takes an image, which it cuts into as many patches.

    >>> class Model(nn.Module):
    ...     def __init__(self, dim):
    ...         super().__init__()
    ...         self.embed = nn.Conv2d(3, dim, kernel_size=4, stride=4)
    ...     def forward(self, image):
    ...         return 2 * self.embed(image).flatten(2)
    >>> of_patches(Model)(1)(Tensor([[[[1, 2, 3]]]]))
    tensor([[[2., 4., 6.]]], grad_fn=<MulBackward0>)
    """

    class OfPatches(TakesPatches, kind):  # type: ignore[valid-type, misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return call_with_patches(self, args, kwargs)

    parameters = inspect.signature(kind.forward).parameters.values()
    present_as(OfPatches, kind, [*parameters])
    return OfPatches


def call_with_patches(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `model` with an image, and give it vectors where it embeds the patches.

    A call of its own methods gives it an image.
    """
    layer: Any = structure.patch_embedding(model)
    images = [x for x in (*args, *kwargs.values()) if is_image(x)]
    if layer is None or not images or images[0].shape[1] != layer.out_channels:
        return own_forward(model)(*args, **kwargs)
    vectors: Tensor = images[0]
    sides: tuple[int, int] = layer.stride

    def embed(_layer: nn.Module, _given: Any, output: Tensor) -> Tensor:
        if output.shape != vectors.shape:
            raise ValueError("its patches are not those of its image")
        return vectors + 0 * output  # so that the layer has a gradient

    def to_pixels(x: Tensor) -> Tensor:
        if x is vectors:
            size = [n * side for n, side in zip(x.shape[2:], sides, strict=True)]
            return x.new_zeros([len(x), layer.in_channels, *size])
        if x.dim() < 3 or x.shape[-2:] != vectors.shape[-2:]:
            return x
        for dim, side in zip((-2, -1), sides, strict=True):
            x = x.repeat_interleave(side, dim)
        return x

    args, kwargs = tree_map_only(Tensor, to_pixels, (args, kwargs))
    handle = add_hook(model, layer, embed)
    try:
        return own_forward(model)(*args, **kwargs)
    finally:
        handle.remove()


def is_image(value: Any) -> bool:
    """Whether an argument is a batch of images, or of vectors in rows and columns."""
    is_tensor = isinstance(value, Tensor) and value.is_floating_point()
    return is_tensor and value.dim() == 4
