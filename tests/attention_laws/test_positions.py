"""Laws of positions: each fails on attention that violates it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_laws import LAWS, check, positions
from attention_laws.adapter import Adapter, MaskArgument, Sizes
from attention_laws.law import NotApplicable
from attention_laws.positions import LONGEST, fits_in_memory
from attention_laws.script import Script
from specimens import assert_caught, each_law_of
from specimens.base import Correct, LinearBias, Rotary, SelfAttention
from specimens.positions import (
    BiasOfPixels,
    BiasWithoutSoftmax,
    MaskOfAnotherAxis,
    NearKeysOnly,
    RotaryImageOfTable,
    RotaryOfQuarter,
    RotaryOfRoundedTimes,
    RotatedInEachDtype,
    SeriesAsIfOfCode,
)
from specimens.scores import ValuesOfNeighbors


@each_law_of(positions)
def test_each_law_fails_on_implementations_that_violate_it(
    name: str, device: torch.device
) -> None:
    assert_caught(name, device.type)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "attention"),
    [
        ("relative_positions", BiasOfPixels),
        ("distant_positions", NearKeysOnly),
        ("distant_positions", BiasWithoutSoftmax),
    ],
)
def test_a_bias_of_pixels_or_of_near_keys_is_relative(law: str, attention: Any) -> None:
    assert check(attention, only=law, positions="relative").passed


class ScoresOfTriples(SelfAttention):
    """One more axis of keys is made by broadcasting, and then averaged."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        mask = torch.ones(k.shape[2], 1, 1, device=k.device)
        return (scores[:, :, None] * mask).mean(dim=2)


def test_a_mask_that_broadcasts_to_a_cube_is_not_tried_at_a_length_of_1040() -> None:
    masks = (MaskArgument("mask", "attend", "bqk"),)
    adapter = Adapter(
        MaskOfAnotherAxis(12, 3), "Attention", "", {}, inputs=("x",), masks=masks
    )
    assert not fits_in_memory(Script(adapter, Sizes(1, 3, 3, 3, 4)), LONGEST)


@pytest.mark.parametrize(
    ("attention", "expected"), [(SelfAttention, True), (ScoresOfTriples, False)]
)
def test_a_long_sequence_is_not_tried_if_memory_grows_with_its_cube(
    attention: type[SelfAttention], expected: bool
) -> None:
    adapter = Adapter(attention(12, 3), "Attention", "", {}, inputs=("x",))
    script = Script(adapter, Sizes(1, 3, 3, 3, 4))
    assert fits_in_memory(script, LONGEST) == expected
    assert fits_in_memory(script, 64)


class TokenByToken(Rotary):
    """A loop over the tokens, each with the products of its own."""

    longest = 0

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        TokenByToken.longest = max(self.longest, k.shape[2])
        q, k = self.turn(q), self.turn(k)
        products = [Correct.score(self, query, k) for query in q.split(1, dim=2)]
        return torch.cat(products, dim=2)


def test_a_loop_over_tokens_is_not_run_at_a_length_of_1040(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(positions, "LOOP_FUNCTIONS", 3 * positions.FAR)
    report = check(TokenByToken, only="distant_positions", positions="rotary")
    assert [result.law.name for result in report.passed] == ["distant_positions"]
    assert TokenByToken.longest == positions.FAR


def test_points_have_no_distant_positions() -> None:
    coordinates = {"coords": "torch.arange({start}, {stop}) % 8"}
    adapter = Adapter(
        SelfAttention(12, 3),
        "Attention",
        "",
        {},
        inputs=("x",),
        positions="relative",
        position_args=coordinates,
    )
    with pytest.raises(NotApplicable, match="coordinates"):
        LAWS["distant_positions"].test(Script(adapter, Sizes(2, 3, 3, 3, 4)))


class PlacesEndInHalf(LinearBias):
    """In bfloat16, the places end where it has not each whole number."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device)
        if k.dtype == torch.bfloat16:
            place = place.clamp(max=256)
        bias = self.slopes(k.shape[1])[:, None, None] * (place - place[:, None])
        return Correct.score(self, q, k) + bias.to(k)


@pytest.mark.slow
def test_wrong_places_are_no_rounding_of_a_linear_bias() -> None:
    law = "distant_positions"
    report = check(PlacesEndInHalf, skip=[name for name in LAWS if name != law])
    assert [result.law.name for result in report.failed] == [law], report


@pytest.mark.slow
def test_a_rounded_buffer_is_no_excuse_where_half_precision_is_promised() -> None:
    law = "distant_positions"
    report = check(RotatedInEachDtype, skip=[name for name in LAWS if name != law])
    assert [result.law.name for result in report.failed] == [law], report


@pytest.mark.slow
def test_less_noise_is_no_excuse_for_rounded_positions() -> None:
    law = "distant_positions"
    report = check(RotaryOfRoundedTimes, skip=[name for name in LAWS if name != law])
    assert [result.law.name for result in report.failed] == [law], report


def test_a_rotation_of_a_part_of_each_head_gets_room() -> None:
    laws = ["positions_matter", "distant_positions"]
    report = check(RotaryOfQuarter, only=laws, positions="rotary")
    assert [result.law.name for result in report.passed] == laws


def test_no_row_of_an_image_is_longer_than_a_table_of_rows() -> None:
    laws = ["relative_positions", "distant_positions"]
    report = check(RotaryImageOfTable, only=laws, positions="rotary")
    assert [result.law.name for result in report.passed] == laws, report


def test_values_with_positions_do_not_tell_the_weights() -> None:
    laws = ["relative_positions", "distant_positions"]
    others = [name for name in LAWS if name not in laws]
    report = check(ValuesOfNeighbors, skip=others, positions="relative")
    details = {result.law.name: result.detail for result in report.not_applicable}
    assert [details[law] for law in laws] == ["its values may have positions"] * 2


@pytest.mark.slow
def test_slopes_in_one_series_are_no_excuse_for_a_file_that_names_the_code() -> None:
    others = [name for name in LAWS if name != "linear_bias"]
    report = check(SeriesAsIfOfCode, skip=others, positions="alibi")
    assert [result.law.name for result in report.failed] == ["linear_bias"], report
