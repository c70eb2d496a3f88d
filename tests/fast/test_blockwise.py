"""Attention by blocks: the formula, its slopes, and what chance takes away."""

import itertools
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from chance import assert_independent, assert_share, assert_unlike
from headnotes.fast import blocks
from headnotes.fast.blocks import Rule
from headnotes.fast.blockwise import AttendBackward, attend, attend_and_show

Q_LEN, K_LEN, BATCH, HEADS, D_K = 5, 7, 3, 11, 2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 2 rows, and of 8 of the 11 heads."""
    monkeypatch.setattr(blocks, "ROWS", 2)
    monkeypatch.setattr(blocks, "SCORES", 1)


def some(
    q_len: int = Q_LEN,
    k_len: int = K_LEN,
    batch_size: int = BATCH,
    heads: int = HEADS,
    d_k: int = D_K,
    **like: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose rows of attention differ."""
    query = torch.randn(q_len, batch_size, heads, d_k, **like)
    key, value = torch.randn(2, k_len, batch_size, heads, d_k, **like)
    return 2 * query, key, value


def double(requires_grad: bool = False, **sizes: int) -> tuple[Tensor, ...]:
    x = some(**sizes, dtype=torch.float64)
    return tuple(t.requires_grad_(requires_grad) for t in x)


def some_mask(*shape: int) -> Tensor:
    """A random mask; its last row is empty for the first item."""
    mask = torch.rand(shape) < 0.6
    mask[-1, :, 0] = False
    return mask


def allowed(rule: Rule, q_len: int, k_len: int, batch_size: int) -> Tensor:
    full = torch.ones(q_len, k_len, batch_size).bool()
    if rule.is_causal:
        full = full & torch.ones(q_len, k_len).bool().tril(k_len - q_len)[..., None]
    return full if rule.mask is None else full & rule.mask


def by_formula(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Any:
    """All weights at once, `[q_len, k_len, batch_size, heads]`, and the context."""
    scores = torch.einsum("ibhd,jbhd->ijbh", query, key) / math.sqrt(query.shape[-1])
    keep = allowed(rule, len(query), len(key), query.shape[1]).unsqueeze(-1)
    empty = ~keep.any(1, keepdim=True)
    scores = scores.masked_fill(~keep, -math.inf).masked_fill(empty, 0)
    weights = scores.softmax(1).masked_fill(empty, 0)
    return weights, torch.einsum("ijbh,jbhd->ibhd", weights, value)


# Who returns what; each with gradients.
SHOWING: dict[str, Any] = {
    "attend": attend,
    "attend_and_show": attend_and_show,
    "mean": partial(attend_and_show, average=True),
}
MASKS = {
    "none": None,
    "keys of an item": some_mask(1, K_LEN, BATCH),
    "for all items": some_mask(Q_LEN, K_LEN, 1),
    "full": some_mask(Q_LEN, K_LEN, BATCH),
}


# The formula


@pytest.mark.parametrize("scores", [1, 2 * HEADS * 2 * K_LEN])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("mask", MASKS)
def test_it_is_the_formula_by_loops(
    monkeypatch: pytest.MonkeyPatch, mask: str, is_causal: bool, scores: int
) -> None:
    monkeypatch.setattr(blocks, "SCORES", scores)
    rule = Rule(MASKS[mask], is_causal)
    query, key, value = double()
    keep = allowed(rule, Q_LEN, K_LEN, BATCH).tolist()
    context = torch.zeros(Q_LEN, BATCH, HEADS, D_K, dtype=torch.float64)
    weights = torch.zeros(BATCH, HEADS, Q_LEN, K_LEN, dtype=torch.float64)
    for i, b, h in itertools.product(range(Q_LEN), range(BATCH), range(HEADS)):
        row = [
            sum(map(math.prod, zip(query[i, b, h].tolist(), k, strict=True)))
            / math.sqrt(D_K)
            for k in key[:, b, h].tolist()
        ]
        may = [keep[i][j][b] for j in range(K_LEN)]
        weights[b, h, i] = torch.tensor(oracle.weights_of_row(row, may)).double()
        for j in range(K_LEN):
            context[i, b, h] += weights[b, h, i, j] * value[j, b, h]

    close = {"rtol": 1e-7, "atol": 1e-7}  # the oracle's weights passed through float32
    torch.testing.assert_close(attend(query, key, value, rule), context, **close)
    shown, seen = attend_and_show(query, key, value, rule)
    torch.testing.assert_close(shown, context, **close)
    torch.testing.assert_close(seen, weights, **close)
    shown, seen = attend_and_show(query, key, value, rule, average=True)
    torch.testing.assert_close(shown, context, **close)
    torch.testing.assert_close(seen, weights.mean(1), **close)


@pytest.mark.parametrize(("q_len", "k_len"), [(5, 7), (7, 5), (6, 6), (1, 7), (7, 1)])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_outputs_and_gradients_are_those_of_the_formula(
    q_len: int, k_len: int, is_causal: bool
) -> None:
    x = double(requires_grad=True, q_len=q_len, k_len=k_len)
    shapes = [(1, k_len, BATCH), (q_len, k_len, 1), (q_len, k_len, BATCH)]
    for mask in (None, *(some_mask(*shape) for shape in shapes)):
        rule = Rule(mask, is_causal)
        _, expected = by_formula(*x, rule)
        context = attend(*x, rule)
        close = {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(context, expected, **close)
        upstream = torch.randn_like(expected)
        for ours, theirs in zip(
            torch.autograd.grad(context, x, upstream),
            torch.autograd.grad(expected, x, upstream),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize(
    ("q_len", "k_len", "batch_size"), [(0, 7, 3), (5, 0, 3), (5, 7, 0), (0, 0, 0)]
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dropout_prob", [0.0, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_may_be_read_by_nobody(
    q_len: int,
    k_len: int,
    batch_size: int,
    is_causal: bool,
    dropout_prob: float,
    masked: bool,
) -> None:
    x = double(requires_grad=True, q_len=q_len, k_len=k_len, batch_size=batch_size)
    mask = torch.ones(q_len, k_len, batch_size).bool() if masked else None
    rule = Rule(mask, is_causal, dropout_prob)
    context = attend(*x, rule)
    assert torch.equal(context, torch.zeros(q_len, batch_size, HEADS, D_K).double())
    assert not any(g.any() for g in torch.autograd.grad(context.sum(), x))
    _, weights = attend_and_show(*x, rule)
    assert weights.shape == (batch_size, HEADS, q_len, k_len)


@pytest.mark.parametrize("worst", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_a_key_that_is_no_number_spoils_only_those_who_may_read_it(
    is_causal: bool, masked: bool, worst: float
) -> None:
    query, key, value = double()
    mask = some_mask(Q_LEN, K_LEN, BATCH) if masked else None
    rule = Rule(mask, is_causal)
    may = allowed(rule, Q_LEN, K_LEN, BATCH)
    right = attend(query, key, value, rule)
    j = K_LEN - 2
    spoilt = key.clone()
    spoilt[j] = worst
    context, weights = attend_and_show(query, spoilt, value, rule)
    others = ~may[:, j]  # [q_len, batch_size]
    assert others.any() == (is_causal or masked)
    assert torch.equal(context[others], right[others])
    assert weights.permute(2, 0, 1, 3)[others].isfinite().all()
    if math.isnan(worst):
        assert context[~others].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_adds_up_with_the_bits_of_float32(dtype: torch.dtype) -> None:
    # All weights of a key are alike, so its gradient is a long sum of equal numbers.
    q_len = 2003
    query = torch.zeros(q_len, 1, 1, D_K, dtype=dtype)
    key = torch.zeros(1, 1, 1, D_K, dtype=dtype)
    value = torch.ones(1, 1, 1, D_K, dtype=dtype, requires_grad=True)
    attend(query, key, value).sum().backward()
    expected = torch.full_like(value, q_len)
    assert torch.equal(value.grad, expected)


def test_tensors_may_lie_as_they_like_and_are_left_alone() -> None:
    x = double()
    rule = Rule(some_mask(Q_LEN, K_LEN, 1).expand(-1, -1, BATCH), is_causal=True)
    turned = tuple(t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for t in x)
    assert not any(t.is_contiguous() for t in turned)
    before = [t.clone() for t in (*turned, rule.mask)]
    torch.testing.assert_close(attend(*turned, rule), attend(*x, rule))
    for leaf in turned:
        leaf.requires_grad_()
    context = attend(*turned, rule)
    upstream = torch.randn(D_K, HEADS, BATCH, Q_LEN).double().permute(3, 2, 1, 0)
    kept = upstream.clone()
    context.backward(upstream)
    assert torch.equal(upstream, kept)
    for t, was in zip((*turned, rule.mask), before, strict=True):
        assert torch.equal(t, was)


# Slopes, and none of second order


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("dropout_prob", [0.0, 0.5])
@pytest.mark.parametrize("function", SHOWING)
def test_gradients_are_those_of_finite_differences_while_the_draws_are_fixed(
    function: str, is_causal: bool, masked: bool, dropout_prob: float
) -> None:
    mask = some_mask(Q_LEN, K_LEN, 2) if masked else None
    rule = Rule(mask, is_causal, dropout_prob, seed=2017)
    x = double(requires_grad=True, batch_size=2, heads=3)
    assert torch.autograd.gradcheck(lambda *x: SHOWING[function](*x, rule), x)


def test_a_second_derivative_is_refused_in_plain_words() -> None:
    x = double(requires_grad=True)
    (first,) = torch.autograd.grad(attend(*x).sum(), x[0], create_graph=True)
    message = (
        "attention by blocks has no second derivative; the readable core, "
        "headnotes.mha, has"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        first.sum().backward()


@pytest.mark.parametrize("average", [False, True], ids=["each head", "mean"])
def test_a_loss_may_look_at_the_context_or_at_the_weights_alone(
    average: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = []  # the gradients of the weights
    way_back = AttendBackward.forward
    monkeypatch.setattr(
        AttendBackward,
        "forward",
        staticmethod(lambda *x: (arrived.append(x[5]), way_back(*x))[1]),
    )
    x = double(requires_grad=True)
    weights, context = by_formula(*x, Rule())
    weights = weights.permute(2, 3, 0, 1)
    expected = context, weights.mean(1) if average else weights
    shown = attend_and_show(*x, average=average)
    for ours, theirs in zip(shown, expected, strict=True):
        upstream = torch.randn_like(theirs)
        gradients = torch.autograd.grad(ours, x, upstream, retain_graph=True)
        slopes = torch.autograd.grad(
            theirs, x, upstream, retain_graph=True, materialize_grads=True
        )
        for a, b in zip(gradients, slopes, strict=True):
            torch.testing.assert_close(a, b)
    # For weights that nobody looked at, no zeros are written out.
    assert arrived[0] is None
    assert arrived[1].shape.numel() == expected[1].numel()


def test_only_what_learns_needs_a_gradient() -> None:
    for n in range(3):
        x = double()
        x[n].requires_grad_()
        _, expected = by_formula(*x, Rule())
        upstream = torch.randn_like(expected)
        (ours,) = torch.autograd.grad(attend(*x), x[n], upstream)
        (theirs,) = torch.autograd.grad(expected, x[n], upstream)
        torch.testing.assert_close(ours, theirs)


# Under vmap


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", [(0, 0, 0), (2, None, 1), (None, 4, None)])
@pytest.mark.parametrize("function", SHOWING)
def test_vmap_gives_what_a_loop_gives_with_gradients(
    function: str, mask: str, is_causal: bool, dims: tuple[int | None, ...]
) -> None:
    n = 4
    xs = [double() for _ in range(n)]
    wide = [
        tensors[0] if dim is None else torch.stack(tensors, dim)
        for tensors, dim in zip(zip(*xs, strict=True), dims, strict=True)
    ]
    own = MASKS[mask]
    many = None if own is None else torch.stack([own.roll(i, 1) for i in range(n)], -1)

    def loss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        shown = SHOWING[function](q, k, v, Rule(mask, is_causal))
        shown = shown if isinstance(shown, tuple) else (shown,)
        return sum(x.square().sum() for x in shown), shown

    call = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)
    for masks, m_dim in ((many, None if own is None else -1), (own, None)):
        made = torch.func.vmap(call, in_dims=(*dims, m_dim))(*wide, masks)
        for i in range(n):
            one = [xs[0][k] if dim is None else xs[i][k] for k, dim in enumerate(dims)]
            its = masks if m_dim is None else masks[..., i]
            gradients, shown = call(*one, its)
            for a, b in zip(made[1] + made[0], shown + gradients, strict=True):
                torch.testing.assert_close(a[i], b)


def test_vmap_draws_for_each() -> None:
    x = double()
    rule = Rule(dropout_prob=0.5, seed=5)
    many = torch.func.vmap(lambda q: attend(q, *x[1:], rule))(
        x[0].expand(3, *x[0].shape)
    )
    assert not torch.equal(many[0], many[1])


# Dropout


def drawn(p: float, seed: int = 2017, **sizes: int) -> Tensor:
    """What dropout multiplies each weight by, `[q_len, batch_size, heads, k_len]`.

    With the unit matrix as values, a context is its weights; and of equal scores all
    weights are equal.
    """
    q_len, k_len = sizes.pop("q_len", 61), sizes.pop("k_len", 67)
    query, key, value = some(q_len, k_len, d_k=k_len, **sizes)
    value[:] = torch.eye(k_len)[:, None, None]
    zero = torch.zeros_like(query)
    return attend(zero, key, value, Rule(dropout_prob=p, seed=seed)) * k_len


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_a_share_of_the_weights_is_dropped_and_the_rest_makes_up_for_it(
    p: float,
) -> None:
    factors = drawn(p)
    assert factors.numel() == 61 * 67 * BATCH * HEADS
    assert_share(factors, p)


def test_draws_are_independent_of_their_neighbours() -> None:
    assert_independent(drawn(0.3), 0.3)


def test_every_seed_draws_otherwise_and_each_draws_the_same_again() -> None:
    first = drawn(0.5, seed=1)
    assert torch.equal(drawn(0.5, seed=1), first)
    assert_unlike(first, drawn(0.5, seed=2))


def test_no_draw_is_taken_from_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    x = double(requires_grad=True)
    before = torch.random.get_rng_state()
    attend(*x, Rule(dropout_prob=0.5)).sum().backward()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("mask", ["none", "full"])
def test_the_way_back_drops_what_the_way_there_has_dropped(
    mask: str, is_causal: bool
) -> None:
    # The unit matrix as values shows the draws; they do not depend on the values.
    rule = Rule(MASKS[mask], is_causal, 0.4, seed=5)
    query, key, value = double(requires_grad=True, d_k=K_LEN)
    eye = torch.eye(K_LEN).double()[:, None, None].expand_as(key)
    weights, _ = by_formula(query, key, value, rule)
    used = attend(query, key, eye, rule).permute(0, 3, 1, 2)  # as the weights lie
    factors = torch.where(weights > 0, used / weights, 0).detach()
    expected = torch.einsum("ijbh,jbhd->ibhd", weights * factors, value)
    context = attend(query, key, value, rule)
    torch.testing.assert_close(context, expected)
    upstream, x = torch.randn_like(expected), (query, key, value)
    for ours, theirs in zip(
        torch.autograd.grad(context, x, upstream),
        torch.autograd.grad(expected, x, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_the_mean_over_many_draws_is_the_context_without_dropout() -> None:
    x = double()
    draws = torch.stack(
        [attend(*x, Rule(None, True, 0.3, seed)) for seed in range(500)]
    )
    _, expected = by_formula(*x, Rule(None, True))
    error = draws.std(0) / math.sqrt(len(draws))
    off = (draws.mean(0) - expected) / error.clamp(min=1e-12)
    assert off.abs().max() < 5  # of 330 numbers the largest is expected at 3


@pytest.mark.parametrize(("p", "share"), [(2.0**-18, 0), (1 - 2.0**-18, 1), (1, 1)])
def test_probabilities_at_the_ends_leave_finite_numbers(p: float, share: float) -> None:
    factors = drawn(p, q_len=13)
    assert abs((factors == 0).double().mean() - share) < 1e-3
    assert factors.isfinite().all()
    x = double(requires_grad=True)
    context = attend(*x, Rule(dropout_prob=p))
    for gradient in torch.autograd.grad(context.sum(), x):
        assert gradient.isfinite().all()
        assert p < 1 or not gradient.any()
    assert p < 1 or not context.any()


def test_weights_are_shown_as_they_were_before_dropout() -> None:
    x = double()
    context, weights = attend_and_show(*x, Rule(dropout_prob=0.5, seed=5))
    torch.testing.assert_close(weights, attend_and_show(*x)[1])
    assert torch.equal(context, attend(*x, Rule(dropout_prob=0.5, seed=5)))


# What it refuses

X = torch.randn(K_LEN, BATCH, HEADS, D_K)
ONES = torch.ones(Q_LEN, K_LEN, BATCH)
FIT = "not [seq_len, batch_size, heads, d_k] with the last three alike"


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"key": [0.0]},
            TypeError,
            "`key` must be a floating-point tensor, but is list",
        ),
        (
            {"query": X.long()},
            TypeError,
            "`query` must be a floating-point tensor, but is torch.int64",
        ),
        (
            {"value": X.to_sparse()},
            TypeError,
            "`value` is sparse or nested; pass a dense one",
        ),
        (
            {"key": X.double()},
            TypeError,
            "`key` is torch.float64 on cpu, `query` torch.float32 on cpu; use "
            "`key.to(query)`",
        ),
        (
            {"value": X[..., :1]},
            ValueError,
            f"`value` has shape [7, 3, 11, 1], `query` [5, 3, 11, 2], {FIT}",
        ),
        (
            {"key": X[0]},
            ValueError,
            f"`key` has shape [3, 11, 2], `query` [5, 3, 11, 2], {FIT}",
        ),
        (
            {"value": X[:5]},
            ValueError,
            "`value` has length 5, `key` 7; make them equal",
        ),
        (
            {"dropout_prob": 1.5},
            ValueError,
            "`dropout_prob` (=1.5) must lie between 0 and 1",
        ),
        (
            {"dropout_prob": math.nan},
            ValueError,
            "`dropout_prob` (=nan) must lie between 0 and 1",
        ),
        (
            {"mask": ONES},
            TypeError,
            "`mask` is torch.float32, not a bool tensor; write `mask == 1`",
        ),
        (
            {"mask": ONES.bool()[..., 0]},
            ValueError,
            "`mask` has shape [5, 7], not [q_len or 1, k_len, batch_size or 1] = "
            "[5 or 1, 7, 3 or 1]",
        ),
        (
            {"mask": ONES.bool()[:, :1]},
            ValueError,
            "`mask` has shape [5, 1, 3], not [q_len or 1, k_len, batch_size or 1] = "
            "[5 or 1, 7, 3 or 1]",
        ),
    ],
)
@pytest.mark.parametrize("function", [attend, attend_and_show])
def test_what_does_not_fit_is_refused(
    function: Any, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = {"query": X[:Q_LEN], "key": X, "value": X}
    rule = {name: changed[name] for name in changed if name not in call}
    call |= {name: changed[name] for name in changed if name in call}
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        function(**call, rule=Rule(**rule))
