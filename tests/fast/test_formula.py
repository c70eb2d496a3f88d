"""What all methods of attention share: the record of a call, masks, and dropout."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from calls import BATCH, DTYPES, call_of, random_mask, tensors
from headnotes.fast import formula


def test_scores_are_finite_if_no_product_can_overflow() -> None:
    x = [torch.ones(1, 1, 1, 2, dtype=torch.float16) for _ in range(3)]
    assert call_of(*x).scores_are_finite(torch.float16)
    x[0][:] = 256
    x[1][:] = 127  # 256 * 127 * 2 = 65,024, and the largest float16 is 65,504
    assert call_of(*x).scores_are_finite(torch.float16)
    x[1][:] = 128
    assert not call_of(*x).scores_are_finite(torch.float16)
    x[0][:], x[1][:] = math.nan, 1
    assert call_of(*x).scores_are_finite(torch.float16)  # only its own row is NaN
    x[1][:] = math.nan
    assert not call_of(*x).scores_are_finite(torch.float16)
    x[1][:] = 128
    assert call_of(*x).scores_are_finite(torch.float32)
    assert not call_of(*x, eager=False).scores_are_finite(torch.float32)
    assert not call_of(*(t.to("meta") for t in x)).scores_are_finite(torch.float16)


@pytest.mark.parametrize("p", [0.0, 2.0**-17, 0.1, 0.25, 0.5, 1 - 2.0**-16, 1.0])
def test_the_scale_belongs_to_the_probability_as_it_was_rounded(p: float) -> None:
    threshold = formula.dropout_threshold(p)
    assert abs(threshold / 2**16 - p) <= 2.0**-17
    kept = 1 - threshold / 2**16
    assert formula.dropout_scale(threshold) == (1 / kept if kept else 1.0)


@pytest.mark.parametrize(("q_len", "k_len"), [(3, 3), (2, 3), (3, 2)])
def test_the_causal_mask_aligns_the_last_query_with_the_last_key(
    q_len: int, k_len: int
) -> None:
    query, key, value = tensors(q_len, k_len)
    past = formula.band_mask(q_len, key, True, None)
    assert past.shape == (q_len, k_len, 1)
    for i, j in itertools.product(range(q_len), range(k_len)):
        assert past[i, j] == (k_len - 1 - j >= q_len - 1 - i)
    mask = random_mask(1, k_len, BATCH)
    call = call_of(query, key, value, mask=mask, is_causal=True)
    assert torch.equal(call.allowed(), (mask & past).permute(2, 0, 1).unsqueeze(1))
    assert call_of(query, key, value).allowed() is None


def test_fully_masked_rows_are_returned() -> None:
    allowed = torch.tensor([[True, False], [False, False]])
    opened, empty = formula.unmask_fully_masked_rows(allowed)
    assert opened.tolist() == [[True, False], [True, True]]
    assert empty.tolist() == [[False], [True]]
    assert formula.unmask_fully_masked_rows(allowed[:1])[1] is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_additive_mask_is_zero_or_minus_infinity(dtype: torch.dtype) -> None:
    bias = formula.additive_mask(torch.tensor([True, False]), dtype)
    assert bias.tolist() == [0, -math.inf]
    assert bias.dtype == dtype


def test_keys_that_causality_and_the_mask_leave_to_no_query_are_cleared() -> None:
    # By the mask only query 0 may attend to key 4; by causality it is in its future.
    key = torch.full((5, 2, 1, 1), math.nan)
    mask = torch.ones(3, 5, 2).bool()
    mask[1:, 4, 1] = False
    cleared, value = formula.zero_hidden_keys(key, key, mask, True, 3)
    assert value is cleared
    expected = torch.zeros(5, 2).bool()
    expected[4, 1] = True
    assert torch.equal(cleared.isfinite()[..., 0, 0], expected)
    assert not cleared[4, 1].any()
    cleared, value = formula.zero_hidden_keys(key, key.clone(), mask, False, 3)
    assert cleared.isnan().all()
    assert value.isnan().all()


def test_known_true_claims_nothing_that_cannot_be_inspected() -> None:
    yes = torch.tensor(True)
    assert formula.known_true(yes)
    assert not formula.known_true(~yes)
    assert not formula.known_true(yes.to("meta"))
    answers = []

    def inspect(condition: Tensor) -> Tensor:
        answers.append(
            (formula.known_true(condition), formula.max_abs(condition * 1.0))
        )
        return condition

    torch.func.vmap(inspect)(yes.expand(3))
    assert not answers[0][0]
    assert math.isnan(answers[0][1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squares_are_finite_up_to_the_root_of_the_largest_number(
    dtype: torch.dtype,
) -> None:
    # The sum of these overflows in float16, which ends at 65,504; no product does.
    x = torch.full((71, 1009), 200.0, dtype=dtype)
    assert formula.squares_are_finite(x)
    assert formula.squares_are_finite(x[:0])
    for bad in (torch.finfo(dtype).max / 2, math.inf, -math.inf, math.nan):
        x[70, 1008] = bad
        assert not formula.squares_are_finite(x)
    assert not formula.squares_are_finite(x.to("meta"))


class Subclass(Tensor):
    """A subclass that adds nothing."""


def test_plain_tensors_are_not_transformed() -> None:
    x = torch.randn(3, requires_grad=True)
    assert not formula.is_transformed(x, nn.Parameter(x))
    assert formula.is_transformed(x, x.as_subclass(Subclass))


def test_seeds_come_from_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    first, second = formula.draw_seed(), formula.draw_seed()
    assert first != second
    torch.random.set_rng_state(before)
    assert formula.draw_seed() == first
