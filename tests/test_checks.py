"""The checks that several modules share: what they refuse, and in which words."""

import re
from collections.abc import Callable

import pytest
import torch

from headnotes import checks, mha


@pytest.mark.parametrize("size", [True, 2.0, "2", 0, -3, None])
def test_a_size_is_an_int_from_the_minimum_up(size: object) -> None:
    message = f"`d_model` (={size!r}) must be an int from 1 up"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        checks.check_sizes(heads=3, d_model=size)  # type: ignore[arg-type]


def test_the_minimum_of_a_size_may_be_zero() -> None:
    checks.check_sizes(0, q_len=0)
    with pytest.raises(ValueError, match="must be an int from 0 up"):
        checks.check_sizes(0, q_len=-1)


@pytest.mark.parametrize("heads", [1, 2, 7, 9, 14])
@pytest.mark.parametrize("width", [1, 14, 18, 8192])
def test_the_nearest_heads_are_named_or_both_in_the_other_order(
    heads: int, width: int
) -> None:
    if width % heads == 0:
        checks.check_heads("d_out", width, "num_heads", heads)
        return
    with pytest.raises(ValueError, match="must be divisible by") as refusal:
        checks.check_heads("d_out", width, "num_heads", heads)
    nearest = str(refusal.value).partition("; ")[2].removesuffix(" would do")
    if heads % width == 0:
        assert nearest == f"`num_heads={width}, d_out={heads}`"
        return
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    expected = [n for n in divisors if n < heads][-1:]
    expected += [n for n in divisors if n > heads][:1]
    assert [int(n) for n in nearest.split(" and ")] == expected


@pytest.mark.parametrize("dropout", [-0.1, 1.5, "0.1", None, True])
def test_dropout_is_a_probability(dropout: object) -> None:
    message = f"`dropout` (={dropout!r}) must lie between 0 and 1"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        checks.check_dropout(dropout)  # type: ignore[arg-type]


def test_a_tensor_elsewhere_is_refused_with_the_name_of_its_owner() -> None:
    x = torch.ones(3, device="meta")
    message = "`key` is on meta, `query` on cpu; use `key.to('cpu')`"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        checks.check_tensor("key", x, torch.device("cpu"), owner="`query`")


def test_autocast_converts_other_dtypes_but_not_float64() -> None:
    half, single, double = (
        torch.ones(3, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    )
    assert not checks.fits_dtype(half, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert checks.fits_dtype(half, torch.float32)
        assert checks.fits_dtype(single, torch.bfloat16)
        assert not checks.fits_dtype(double, torch.float32)
        assert not checks.fits_dtype(single, torch.float64)
        assert not checks.fits_dtype(torch.ones(3).long(), torch.float32)
        assert not checks.fits_dtype(half.to("meta"), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64])
def test_lengths_are_integers(dtype: torch.dtype) -> None:
    message = f"`valid_lens` is {dtype}, but lengths are integers"
    with pytest.raises(TypeError, match=re.escape(message)):
        checks.check_lengths("valid_lens", torch.ones(3, dtype=dtype), 5)


def test_values_that_cannot_be_read_pass() -> None:
    lengths = torch.tensor([[1, 9], [2, 9]])
    checks.check_lengths("lengths", lengths.to("meta"), 5)
    assert checks.value_range(lengths.to("meta")) == (0, 0)
    assert checks.value_range(torch.ones(0).long()) == (0, 0)
    assert checks.first_index(torch.ones(3, device="meta") > 0) is None

    def check(row: torch.Tensor) -> torch.Tensor:
        checks.check_lengths("lengths", row, 5)
        assert checks.first_index(row > 0) is None
        return row

    assert torch.vmap(check)(lengths).equal(lengths)


def test_the_first_index_is_that_of_the_first_true() -> None:
    flags = torch.zeros(2, 3, 5, dtype=torch.bool)
    assert checks.first_index(flags) is None
    flags[1, 0, 4] = flags[1, 2, 0] = True
    assert checks.first_index(flags) == (1, 0, 4)


# The core is a single file, so it has checks of its own, which must not drift apart.
@pytest.mark.parametrize(
    ("core", "companion"),
    [
        (
            lambda: mha.check_sizes(heads=0),
            lambda: checks.check_sizes(heads=0),
        ),
        (
            lambda: mha.check_settings(10, 512, 0.1),
            lambda: checks.check_heads("d_model", 512, "heads", 10),
        ),
        (
            lambda: mha.check_tensor("x", [1.0], torch.device("cpu")),  # type: ignore[arg-type]
            lambda: checks.check_tensor("x", [1.0], torch.device("cpu")),  # type: ignore[arg-type]
        ),
        (
            lambda: mha.check_tensor(
                "x", torch.ones(3).to_sparse(), torch.device("cpu")
            ),
            lambda: checks.check_tensor("x", torch.ones(3).to_sparse()),
        ),
        (
            lambda: mha.check_tensor("x", torch.ones(3), torch.device("meta")),
            lambda: checks.check_tensor("x", torch.ones(3), torch.device("meta")),
        ),
        (
            lambda: mha.check_tensor(
                "x", torch.ones(3), torch.device("cpu"), torch.float64
            ),
            lambda: checks.check_dtype("x", torch.ones(3), torch.float64),
        ),
        (
            lambda: mha.check_mask(torch.ones(3, 5, 2), (3, 2, 7), (5, 2, 7)),
            lambda: checks.check_zero_one("mask", torch.ones(3, 5, 2)),
        ),
        (
            lambda: mha.check_mask(
                torch.full((3, 5, 2), 2, dtype=torch.int64), (3, 2, 7), (5, 2, 7)
            ),
            lambda: checks.check_zero_one("mask", torch.tensor([2, 2])),
        ),
    ],
)
def test_the_checks_of_the_core_say_the_same(
    core: Callable[[], None], companion: Callable[[], None]
) -> None:
    with pytest.raises((TypeError, ValueError)) as theirs:
        core()
    with pytest.raises(theirs.type, match=f"^{re.escape(str(theirs.value))}$"):
        companion()
