"""Which kernel a call is given, and that a call's answer does not depend on it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from chance import assert_independent, assert_share, assert_unlike
from headnotes.fast import dispatch as kernels
from headnotes.fast.blocks import Rule

Q_LEN, K_LEN, BATCH, HEADS, D_K = 5, 13, 3, 2, 7


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FEW", 6)
    monkeypatch.setattr(kernels, "LONG", 17)


def some(
    q_len: int = Q_LEN, k_len: int = K_LEN, **like: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose rows of attention differ."""
    query = 2 * torch.randn(q_len, BATCH, HEADS, D_K, **like)
    key, value = 2 * torch.randn(2, k_len, BATCH, HEADS, D_K, **like)
    return query, key, value


def rules(q_len: int = Q_LEN, k_len: int = K_LEN) -> list[Rule]:
    """All kinds of masks, with an empty row in each, and with causality or without."""
    shapes = [
        (1, k_len, BATCH),
        (q_len, k_len, 1),
        (q_len, k_len, BATCH),
        (1, k_len, 1),
    ]
    found: list[Tensor | None] = [None]
    for shape in shapes:
        mask = torch.rand(shape) < 0.5
        mask[-1, :, 0] = False
        found.append(mask)
    return [Rule(mask, causal) for mask in found for causal in (False, True)]


@pytest.mark.parametrize(
    ("q_len", "k_len", "rule", "blocks"),
    [
        (5, 13, Rule(), False),
        (5, 13, Rule(mask=torch.ones(1, 13, 1).bool()), False),
        (5, 13, Rule(dropout_prob=0.1), True),
        (5, 7, Rule(dropout_prob=0.1), True),
        (5, 6, Rule(dropout_prob=0.1), False),
        (5, 6, Rule(is_causal=True, dropout_prob=0.1), False),
        (5, 13, Rule(is_causal=True), True),
        (13, 5, Rule(is_causal=True), True),
        (5, 5, Rule(is_causal=True), False),
        (13, 13, Rule(is_causal=True), False),
        (13, 13, Rule(torch.ones(1, 13, 1).bool(), is_causal=True), True),
        (13, 13, Rule(is_causal=True, dropout_prob=0.1), True),
    ],
)
def test_blocks_serve_where_the_page_says(
    monkeypatch: pytest.MonkeyPatch, q_len: int, k_len: int, rule: Rule, blocks: bool
) -> None:
    called = []

    def attend(query: Tensor, *rest: Any) -> Tensor:
        called.append(rest)
        return query

    monkeypatch.setattr(kernels, "attend", attend)
    query, key, value = some(q_len, k_len)
    kernels.read(query, key, value, rule)
    assert bool(called) == kernels.by_blocks(query, key, rule) == blocks
    meta = [x.to("meta") for x in (query, key, value)]
    assert not kernels.by_blocks(*meta[:2], rule)


@pytest.mark.parametrize(
    ("k_len", "dropout_prob", "learns", "products"),
    [
        (6, 0.0, True, True),
        (6, 0.0, False, False),
        (7, 0.0, True, False),
        (6, 0.1, True, True),
        (6, 0.1, False, True),
        (7, 0.1, True, False),
    ],
)
def test_plain_products_serve_few_keys_with_dropout_or_a_way_back(
    monkeypatch: pytest.MonkeyPatch,
    k_len: int,
    dropout_prob: float,
    learns: bool,
    products: bool,
) -> None:
    called = []
    plainly = kernels.read_plainly

    def read_plainly(*x: Any) -> Any:
        called.append(x)
        return plainly(*x)

    monkeypatch.setattr(kernels, "read_plainly", read_plainly)
    query, key, value = some(k_len=k_len)
    rule = Rule(dropout_prob=dropout_prob)
    value.requires_grad_(learns)
    kernels.read(query, key, value, rule)
    assert bool(called) == products
    with torch.no_grad():
        kernels.read(query, key, value, rule)
    assert len(called) == products * (2 if dropout_prob else 1)


@pytest.mark.parametrize("q_len", [5, 11, 17])
@pytest.mark.parametrize("k_len", [11, 13])
def test_all_ways_to_read_give_the_same(q_len: int, k_len: int) -> None:
    x = some(q_len, k_len, dtype=torch.float64)
    for rule in rules(q_len, k_len):
        context = kernels.read(*x, rule)
        plain, weights = kernels.read_plainly(*x, rule)
        shown, quick = kernels.read_and_show(*x, rule, False)
        averaged, mean = kernels.read_and_show(*x, rule, True)
        close = {"rtol": 1e-12, "atol": 1e-12}
        for each in (plain, shown, averaged):
            torch.testing.assert_close(each, context, **close)
        torch.testing.assert_close(weights.movedim((2, 3), (0, 1)), quick, **close)
        torch.testing.assert_close(quick.mean(-1), mean, **close)
        read = torch.einsum("ijbh,jbhd->ibhd", quick, x[2])
        torch.testing.assert_close(read, context, **close)


@pytest.mark.parametrize("q_len", [5, 13])
@pytest.mark.parametrize("k_len", [6, 13])
@pytest.mark.parametrize("learns", [False, True], ids=["reads", "learns"])
def test_a_key_that_is_no_number_spoils_only_those_who_may_read_it(
    q_len: int, k_len: int, learns: bool
) -> None:
    query, key, value = some(q_len, k_len)
    query.requires_grad_(learns)
    spoilt, j = key.clone(), k_len - 2
    spoilt[j] = math.nan
    for rule in rules(q_len, k_len):
        may = torch.ones(q_len, k_len, BATCH).bool()
        may = may if rule.mask is None else may & rule.mask
        if rule.is_causal:
            may &= torch.ones(q_len, k_len).bool().tril(k_len - q_len)[..., None]
        may = may[:, j]  # [q_len, batch_size]
        for way in (
            kernels.read,
            lambda *x: kernels.read_plainly(*x)[0],
            lambda *x: kernels.read_and_show(*x, False)[0],
        ):
            context = way(query, spoilt, value, rule)
            right = way(query, key, value, rule)
            torch.testing.assert_close(context[~may], right[~may])
            assert context[may].isnan().all()


def test_no_mask_is_written_out_for_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = kernels.F.scaled_dot_product_attention

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **rest: Any) -> Tensor:
        seen.append(mask)
        return plain(q, k, v, mask, **rest)

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", kernel)
    for shape in [(Q_LEN, K_LEN, BATCH), (Q_LEN, K_LEN, 1), (1, K_LEN, BATCH)]:
        mask = torch.rand(shape) < 0.6
        kernels.read(*some(), Rule(mask))
        assert seen[-1].untyped_storage().nbytes() <= Q_LEN * K_LEN * BATCH
        assert seen[-1].dtype == torch.bool


def test_heads_are_laid_side_by_side_where_a_copy_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    plain = kernels.F.scaled_dot_product_attention

    def kernel(*x: Tensor, **rest: Any) -> Tensor:
        seen.append(all(y.is_contiguous() for y in x[:3]))
        return plain(*x, **rest)

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", kernel)
    few, long = kernels.FEW, kernels.LONG
    assert few + 1 < long
    for q_len, copied in [(few, 0), (few + 1, 1), (long - 1, 1), (long, 3)]:
        query, key, value = some(q_len, K_LEN)
        # Who only reads has nothing to do on a way back.
        before = kernels.read(query, key, value, Rule())
        after = kernels.read(query.requires_grad_(), key, value, Rule())
        torch.testing.assert_close(after, before)
        with torch.no_grad():
            kernels.read(query, key, value, Rule())
        assert seen == [copied == 3, copied > 0, copied == 3]
        seen.clear()


def test_weights_of_what_learns_can_learn() -> None:
    query, key, value = some()
    for k_len in (K_LEN, kernels.FEW):
        x = query.clone().requires_grad_(), key[:k_len], value[:k_len]
        for average in (False, True):
            _, weights = kernels.read_and_show(*x, Rule(), average)
            (gradient,) = torch.autograd.grad(weights.square().sum(), x[0])
            assert gradient.abs().max() > 1e-3
        with torch.no_grad():
            _, weights = kernels.read_and_show(*x, Rule(), False)
        assert not weights.requires_grad


@pytest.mark.parametrize("k_len", [kernels.FEW, K_LEN])
@pytest.mark.parametrize("learns", [False, True])
def test_dropout_is_drawn_anew_and_the_weights_are_those_before_it(
    k_len: int, learns: bool
) -> None:
    query, key, value = some(Q_LEN, k_len)
    query.requires_grad_(learns)
    rule = Rule(dropout_prob=0.5)
    expected = kernels.read_plainly(query, key, value, Rule())[1]
    contexts = []
    for _ in range(2):
        context, weights = kernels.read_and_show(query, key, value, rule, False)
        contexts.append(context)
        torch.testing.assert_close(weights.movedim((0, 1), (2, 3)), expected)
    assert not torch.equal(*contexts)
    full = kernels.read_plainly(query, key, value, Rule())[0]
    assert not torch.allclose(contexts[0], full)


# Dropout by plain products


def drawn(p: float, *shape: int) -> Tensor:
    """What dropout multiplies weights by."""
    used, gain = kernels.drop(torch.ones(shape), p)
    return used * gain


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_a_share_of_the_weights_is_dropped_and_the_rest_makes_up_for_it(
    p: float,
) -> None:
    assert_share(drawn(p, 61, 67, 33), p)


@pytest.mark.parametrize(("p", "share"), [(2.0**-18, 0), (1 - 2.0**-18, 1), (1, 1)])
def test_probabilities_at_the_ends_leave_finite_numbers(p: float, share: float) -> None:
    factors = drawn(p, 61, 67)
    assert factors.isfinite().all()
    assert abs((factors == 0).float().mean() - share) < 1e-3


def test_draws_are_independent_of_their_neighbours() -> None:
    assert_independent(drawn(0.3, 61, 67, 33), 0.3)


def test_a_call_draws_anew_and_a_seed_the_same_again() -> None:
    torch.manual_seed(1)
    first, second = drawn(0.5, 61, 67), drawn(0.5, 61, 67)
    assert_unlike(first, second)
    torch.manual_seed(1)
    assert torch.equal(drawn(0.5, 61, 67), first)


def test_gradients_are_those_of_finite_differences_while_the_draws_are_fixed() -> None:
    x = some(3, 5, dtype=torch.float64)

    def read(*x: Tensor) -> Any:
        torch.manual_seed(2017)
        return kernels.read_plainly(*x, Rule(None, True, 0.3))

    for each in x:
        each.requires_grad_()
    assert torch.autograd.gradcheck(read, x)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_draws_for_each_as_it_is_told() -> None:
    def call(weights: Tensor) -> Tensor:
        used, gain = kernels.drop(weights, 0.5)
        return used * gain

    ones = torch.ones(2, 61, 67)
    each = torch.func.vmap(call, randomness="different")(ones)
    assert_unlike(*each)
    assert_share(each, 0.5)
    same = torch.func.vmap(call, randomness="same")(ones)
    assert torch.equal(*same)


def test_a_seed_is_drawn_only_for_dropout() -> None:
    rule = Rule(is_causal=True)
    before = torch.random.get_rng_state()
    assert kernels.seeded(rule) is rule
    assert torch.equal(torch.random.get_rng_state(), before)
    first, second = (kernels.seeded(Rule(dropout_prob=0.5)) for _ in range(2))
    assert first.seed != second.seed
    torch.random.set_rng_state(before)
    assert kernels.seeded(Rule(dropout_prob=0.5)) == first


@pytest.mark.parametrize(("q_len", "k_len"), [(3, 3), (2, 3), (3, 2)])
def test_with_past_the_last_query_meets_the_last_key(q_len: int, k_len: int) -> None:
    query, key, _ = some(q_len, k_len)
    past = kernels.with_past(Rule(is_causal=True), query, key)
    assert past.shape == (q_len, k_len, 1)
    for i in range(q_len):
        for j in range(k_len):
            assert past[i, j] == (k_len - 1 - j >= q_len - 1 - i)
    mask = torch.rand(1, k_len, BATCH) < 0.5
    joined = kernels.with_past(Rule(mask, is_causal=True), query, key)
    assert torch.equal(joined, mask & past)


def test_surely_never_claims_what_cannot_be_seen() -> None:
    yes = torch.tensor(True)
    assert kernels.surely(yes)
    assert not kernels.surely(~yes)
    assert not kernels.surely(yes.to("meta"))
    seen = []

    def look(condition: Tensor) -> Tensor:
        seen.append(kernels.surely(condition))
        return condition

    torch.func.vmap(look)(yes.expand(3))
    assert seen == [False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_many_numbers_are_finite_though_their_sum_may_not_be(
    dtype: torch.dtype,
) -> None:
    x = torch.ones(71, 1009, dtype=dtype)  # float16 ends at 65,504
    assert kernels.finite(x)
    x[70, 1008] = math.inf
    assert not kernels.finite(x)
