"""Functions that find influence."""

import pytest
import torch

from attention_laws.influence import (
    change_diagonal,
    displaced_tokens,
    farthest_influence,
    places_are_same,
)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_farthest_influence_is_the_width_of_a_window(width: int) -> None:
    image = change_diagonal(torch.ones(1, 11 * 11, 1), axis=1).unflatten(1, (11, 11))
    rows = [image.roll(n, dims=1) for n in range(-width, width + 1)]
    assert farthest_influence(sum(rows[1:], rows[0]).flatten(1, 2), axis=1) >= width


def test_pixels_that_change_another_one_clearly_more_are_displaced() -> None:
    x = torch.rand(1, 5 * 5, 2, requires_grad=True)
    image = x.unflatten(1, (5, 5))
    turned = image.transpose(1, 2) + 0.1 * image.sum(2, keepdim=True)
    moved = dict(displaced_tokens(turned.flatten(1, 2), x, axis=1))
    assert moved[1] == 5
    assert moved[7] == 11
    in_place = image + 0.1 * image.sum(2, keepdim=True)
    assert displaced_tokens(in_place.flatten(1, 2), x, axis=1) == []


def test_tokens_of_all_frames_are_those_of_the_same_places() -> None:
    x = torch.rand(1, 3 * 5, 2, requires_grad=True)
    frames = x.unflatten(1, (3, 5))
    of_places = frames.sum(1, keepdim=True).expand(-1, 3, -1, -1)
    of_frames = frames.sum(2, keepdim=True).expand(-1, -1, 5, -1)
    viewed = x.unflatten(1, (5, 3)).sum(2, keepdim=True).expand(-1, -1, 3, -1)
    sums = [
        each.flatten(1, 2) for each in (of_places, of_frames, x[:, :, None], viewed)
    ]
    assert [places_are_same(each, x, 3) for each in sums] == [True, True, True, False]
