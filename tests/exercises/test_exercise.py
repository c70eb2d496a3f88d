"""Exercises are found by name, in their order."""

import pytest

from headnotes.exercises.exercise import SERIES, load, notebooks


def test_exercises_are_numbered_by_series_from_one() -> None:
    numbers = [int(path.name[:2]) for path in notebooks().values()]
    assert numbers == sorted({*numbers})
    series = [SERIES.index(load(name).series) for name in notebooks()]
    assert series == sorted(series)


def test_an_unknown_exercise_is_refused_with_all_names() -> None:
    with pytest.raises(
        ValueError, match=r"`casual_mask` is no exercise; .*causal_mask"
    ):
        load("casual_mask")
