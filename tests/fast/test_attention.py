"""Three methods of attention give the same result, and `DISPATCH` chooses right."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import oracle
from calls import (
    BATCH,
    CAUSAL,
    CLOSE,
    D_K,
    DTYPES,
    HEADS,
    K_LEN,
    MASKED,
    MASKS,
    Q_LEN,
    allowed,
    call_of,
    masks_of,
    random_mask,
    reference,
    shrink,
    tensors,
)
from chance import assert_independent, assert_share, assert_unlike
from headnotes.fast import attention as methods
from headnotes.fast import blockwise, formula
from headnotes.fast.formula import Call

# The warning of PyTorch where it has no batching rule for `vmap`.
SLOW = "ignore:There is a performance drop:UserWarning"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles have 2 rows and 8 of the 11 heads; 7 keys are few."""
    shrink(monkeypatch)


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Memory that `torch.empty` and its relatives return is filled with NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


# The tensors that a method returns besides the context.
RETURNS: dict[str, dict[str, bool]] = {
    "context": {},
    "weights": {"need_weights": True},
    "mean": {"need_weights": True, "average_weights": True},
}
# Every method with its possible results. `fused` has neither weights nor dropout here.
ALL_METHODS: list[Any] = [
    pytest.param(method, returned, id=f"{method.__name__}-{returned}")
    for method in (methods.fused, formula.materialized, blockwise.blockwise)
    for returned in (RETURNS if method is not methods.fused else ["context"])
]
METHODS = pytest.mark.parametrize(
    "method",
    [methods.fused, formula.materialized, blockwise.blockwise],
    ids=lambda method: method.__name__,
)
DROPPING = pytest.mark.parametrize(
    "method",
    [formula.materialized, blockwise.blockwise],
    ids=lambda method: method.__name__,
)


# All methods give the same result
# -------------------------------------------------------


@pytest.mark.parametrize("tile_scores", [1, 2 * HEADS * 2 * K_LEN])
@CAUSAL
@pytest.mark.parametrize("kind", MASKS)
def test_every_method_matches_loops_in_float64(
    monkeypatch: pytest.MonkeyPatch, kind: str, is_causal: bool, tile_scores: int
) -> None:
    monkeypatch.setattr(blockwise, "TILE_SCORES", tile_scores)
    mask = masks_of(Q_LEN, K_LEN, BATCH)[kind]
    query, key, value = tensors()
    keep = allowed(mask, is_causal, Q_LEN, K_LEN, BATCH).tolist()
    context = torch.zeros(Q_LEN, BATCH, HEADS, D_K, dtype=torch.float64)
    weights = torch.zeros(Q_LEN, K_LEN, BATCH, HEADS, dtype=torch.float64)
    for i, b, h in itertools.product(range(Q_LEN), range(BATCH), range(HEADS)):
        row = [
            sum(map(math.prod, zip(query[i, b, h].tolist(), k, strict=True)))
            / math.sqrt(D_K)
            for k in key[:, b, h].tolist()
        ]
        may = [keep[i][j][b] for j in range(K_LEN)]
        row = oracle.weights_of_row(row, may)
        weights[i, :, b, h] = torch.tensor(row, dtype=torch.float64)
        for j in range(K_LEN):
            context[i, b, h] += weights[i, j, b, h] * value[j, b, h]

    for case in ALL_METHODS:
        method, returned = case.values
        options = {"mask": mask, "is_causal": is_causal, **RETURNS[returned]}
        ours, shown = method(call_of(query, key, value, **options))
        torch.testing.assert_close(ours, context, **CLOSE)
        if returned == "context":
            assert shown is None
        else:
            right = weights.mean(-1) if returned == "mean" else weights
            torch.testing.assert_close(shown, right, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q_len", "k_len"), [(5, 13), (13, 5), (13, 13), (1, 13), (13, 1), (5, 7)]
)
@CAUSAL
def test_every_method_has_the_outputs_and_gradients_of_the_formula(
    q_len: int, k_len: int, is_causal: bool
) -> None:
    x = tensors(q_len, k_len, requires_grad=True)
    for mask in masks_of(q_len, k_len, BATCH).values():
        context, weights = reference(*x, mask, is_causal)
        upstream, of_weights = torch.randn_like(context), torch.randn_like(weights)
        for case in ALL_METHODS:
            method, returned = case.values
            options = {"mask": mask, "is_causal": is_causal, **RETURNS[returned]}
            # Without a backward pass the fused kernel is called in another method.
            with torch.no_grad():
                bare, _ = method(call_of(*x, **options))
            torch.testing.assert_close(bare, context, **CLOSE)
            ours, shown = method(call_of(*x, **options))
            torch.testing.assert_close(ours, context, **CLOSE)
            loss, right = (ours * upstream).sum(), (context * upstream).sum()
            if returned != "context":
                mean = returned == "mean"
                expected = weights.mean(-1) if mean else weights
                torch.testing.assert_close(shown, expected, **CLOSE)
                scale = of_weights.mean(-1) if mean else of_weights
                loss, right = (
                    loss + (shown * scale).sum(),
                    right + (expected * scale).sum(),
                )
            gradients = torch.autograd.grad(loss, x)
            expected = torch.autograd.grad(right, x, retain_graph=True)
            for a, b in zip(gradients, expected, strict=True):
                torch.testing.assert_close(a, b, **CLOSE)


@CAUSAL
@pytest.mark.parametrize("k_len", [7, K_LEN])
@pytest.mark.parametrize("kind", MASKS)
def test_attention_has_the_outputs_and_gradients_of_the_formula(
    device: torch.device, kind: str, k_len: int, is_causal: bool
) -> None:
    mask = masks_of(Q_LEN, k_len, BATCH)[kind]
    x = tensors(k_len=k_len, requires_grad=True, device=device)
    context, weights = reference(*x, mask, is_causal)
    upstream = torch.randn_like(context)
    expected = torch.autograd.grad(context, x, upstream)
    options = {"mask": None if mask is None else mask.to(device)}
    for returned in RETURNS.values():
        ours, shown = methods.attention(*x, is_causal=is_causal, **options, **returned)
        torch.testing.assert_close(ours, context, rtol=1e-10, atol=1e-10)
        if shown is not None:
            right = weights.mean(-1) if "average_weights" in returned else weights
            torch.testing.assert_close(shown, right, rtol=1e-10, atol=1e-10)
        gradients = torch.autograd.grad(ours, x, upstream)
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("q_len", "k_len", "batch_size"),
    [(0, 7, 3), (0, 13, 3), (5, 0, 3), (5, 13, 0), (5, 7, 0), (0, 0, 3), (0, 0, 0)],
)
@CAUSAL
@MASKED
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
def test_empty_sequences_and_batches_give_zeros_and_gradients_of_zero(
    device: torch.device,
    q_len: int,
    k_len: int,
    batch_size: int,
    is_causal: bool,
    masked: bool,
    p: float,
    needs_grad: bool,
) -> None:
    x = tensors(q_len, k_len, batch_size, requires_grad=needs_grad, device=device)
    full = q_len, k_len, batch_size
    mask = torch.ones(full, device=device).bool() if masked else None
    options = {"mask": mask, "is_causal": is_causal, "dropout": nn.Dropout(p)}
    for returned in RETURNS.values():
        context, weights = methods.attention(*x, **options, **returned)
        assert context.shape == (q_len, batch_size, HEADS, D_K)
        assert not context.any()
        if weights is not None:
            mean = "average_weights" in returned
            assert weights.shape == (full if mean else (*full, HEADS))
        if needs_grad:
            assert not any(g.any() for g in torch.autograd.grad(context.sum(), x))


@METHODS
def test_inputs_may_have_any_strides_and_are_not_modified(
    method: Callable[[Call], Any],
) -> None:
    x = tensors()
    mask = random_mask(Q_LEN, K_LEN, 1).expand(-1, -1, BATCH)
    options = {"mask": mask, "is_causal": True}
    strided = [t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for t in x]
    assert not any(t.is_contiguous() for t in strided)
    before = [t.clone() for t in (*strided, mask)]
    expected, _ = method(call_of(*x, **options))
    torch.testing.assert_close(
        method(call_of(*strided, **options))[0], expected, **CLOSE
    )
    for leaf in (*strided, *x):
        leaf.requires_grad_()
    context, _ = method(call_of(*strided, **options))
    upstream = torch.randn(D_K, HEADS, BATCH, Q_LEN).double().permute(3, 2, 1, 0)
    # A sum has an upstream gradient with strides of zero.
    expanded = torch.ones((), dtype=torch.float64).expand_as(context)
    for grad in (upstream, expanded):
        kept = grad.clone()
        ours = torch.autograd.grad(context, strided, grad, retain_graph=True)
        assert torch.equal(grad, kept)
        right, _ = method(call_of(*x, **options))
        right = torch.autograd.grad(right, x, grad.contiguous())
        for a, b in zip(ours, right, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
    for t, was in zip((*strided, mask), before, strict=True):
        assert torch.equal(t, was)


@METHODS
@pytest.mark.parametrize("create_graph", [False, True])
def test_each_input_alone_may_need_a_gradient(
    method: Callable[[Call], Any], create_graph: bool
) -> None:
    for n in range(3):
        x = tensors()
        x[n].requires_grad_()
        context, _ = reference(*x, None, False)
        upstream = torch.randn_like(context)
        (right,) = torch.autograd.grad(context, x[n], upstream)
        ours, _ = method(call_of(*x))
        (ours,) = torch.autograd.grad(ours, x[n], upstream, create_graph=create_graph)
        torch.testing.assert_close(ours, right, **CLOSE)


@pytest.mark.parametrize("returned", ["weights", "mean"])
def test_keys_before_the_window_have_weights_of_zero(returned: str) -> None:
    x = tensors()
    options: dict[str, Any] = {"is_causal": True, **RETURNS[returned]}
    _, weights = methods.attention(*x, window=3, **options)
    band = formula.band_mask(Q_LEN, x[1], True, 3)
    _, expected = methods.attention(*x, mask=band, **options)
    torch.testing.assert_close(weights, expected, **CLOSE)


@pytest.mark.parametrize("k_len", [7, K_LEN])
def test_returned_weights_have_gradients_unless_grad_is_disabled(k_len: int) -> None:
    query, key, value = tensors(k_len=k_len)
    query.requires_grad_()
    for returned in ("weights", "mean"):
        _, weights = methods.attention(query, key, value, **RETURNS[returned])
        (gradient,) = torch.autograd.grad(weights.square().sum(), query)
        assert gradient.abs().max() > 1e-3
        with torch.no_grad():
            _, weights = methods.attention(query, key, value, **RETURNS[returned])
        assert not weights.requires_grad


@METHODS
@CAUSAL
@MASKED
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.01)], ids=str
)
def test_half_precision_stays_close_to_float64(
    method: Callable[[Call], Any],
    is_causal: bool,
    masked: bool,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    mask = random_mask(Q_LEN, K_LEN, BATCH) if masked else None
    x = tensors(dtype=dtype, requires_grad=True)
    wide = [t.detach().double().requires_grad_() for t in x]
    ours, _ = method(call_of(*x, mask=mask, is_causal=is_causal))
    right, _ = reference(*wide, mask, is_causal)
    assert ours.dtype == dtype
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(ours.double(), right, **close)
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), x),
        torch.autograd.grad(right.square().sum(), wide),
        strict=True,
    ):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=5 * tolerance)


# Derivatives --------------------------------------------------------------------------


def derivative_case(
    method: Callable[[Call], Any],
    returned: str,
    is_causal: bool,
    masked: bool,
    p: float,
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """A function of query, key and value, and inputs for it."""
    mask = random_mask(3, 5, 2) if masked else None
    x = tensors(3, 5, 2, 3, 2, requires_grad=True)

    def function(*x: Tensor) -> Any:
        torch.manual_seed(2017)
        options = {"mask": mask, "is_causal": is_causal, "p": p, **RETURNS[returned]}
        context, weights = method(call_of(*x, **options))
        return context if weights is None else (context, weights)

    return function, x


# Each combination of mask and causality comes once, with dropout or without.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "is_causal", "masked"),
    [(0.0, False, True), (0.0, True, False), (0.5, False, False), (0.5, True, True)],
)
@pytest.mark.parametrize(("method", "returned"), ALL_METHODS)
def test_first_and_second_derivatives_match_finite_differences(
    monkeypatch: pytest.MonkeyPatch,
    method: Callable[[Call], Any],
    returned: str,
    p: float,
    is_causal: bool,
    masked: bool,
) -> None:
    if p and method is methods.fused:
        pytest.skip("the fused kernel of the CPU has no dropout")
    monkeypatch.setattr(blockwise, "TILE_HEADS", 2)
    function, x = derivative_case(method, returned, is_causal, masked, p)
    # The fast mode compares a random projection, in a tenth of the time.
    assert torch.autograd.gradcheck(function, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, x, fast_mode=True)


@pytest.mark.slow
@METHODS
def test_query_key_and_value_may_be_one_tensor_or_depend_on_each_other(
    method: Callable[[Call], Any],
) -> None:
    x = torch.randn(3, 1, 2, 2, dtype=torch.float64, requires_grad=True)
    for inputs in (
        lambda x: (x, x, x),
        lambda x: (x, 2 * x, 2 * x),
        lambda x: (x, x.flip(0), x.flip(0).sin()),
    ):

        def function(x: Tensor, inputs: Any = inputs) -> Any:
            return method(call_of(*inputs(x), is_causal=True))[0]

        upstream = torch.randn_like(x)
        right, _ = reference(*inputs(x), None, True)
        (right,) = torch.autograd.grad(right, x, upstream)
        for create_graph in (False, True):
            (ours,) = torch.autograd.grad(
                function(x), x, upstream, create_graph=create_graph
            )
            torch.testing.assert_close(ours, right, **CLOSE)
        assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("k_len", [7, K_LEN])
def test_forward_mode_matches_finite_differences(k_len: int) -> None:
    x = tensors(3, k_len, 2, 3, 2)
    mask = random_mask(3, k_len, 2)
    for options in ({}, {"mask": mask, "is_causal": True, "need_weights": True}):

        def function(*x: Tensor, options: Any = options) -> Any:
            context, weights = methods.attention(*x, **options)
            return context if weights is None else (context, weights)

        directions = tuple(torch.randn_like(t) for t in x)
        outputs, tangents = torch.func.jvp(function, x, directions)
        ends = [
            function(*(t + s * d for t, d in zip(x, directions, strict=True)))
            for s in (1e-6, -1e-6)
        ]
        if not options:
            outputs, tangents = (outputs,), (tangents,)
            ends = [(end,) for end in ends]
        for tangent, up, down in zip(tangents, *ends, strict=True):
            torch.testing.assert_close(tangent, (up - down) / 2e-6, rtol=0, atol=1e-6)


# Fully masked rows, and numbers that are not finite -----------------------------------


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@CAUSAL
@pytest.mark.parametrize(("method", "returned"), ALL_METHODS)
def test_fully_masked_rows_are_zero_and_their_gradients_are_zero(
    method: Callable[[Call], Any], returned: str, is_causal: bool, dtype: torch.dtype
) -> None:
    # Causality leaves the first eight queries no key.
    q_len, k_len = K_LEN, Q_LEN
    mask = random_mask(q_len, k_len, BATCH)
    mask[-2] = False
    mask[:, :, 1] = False
    empty = ~allowed(mask, is_causal, q_len, k_len, BATCH).any(1)  # [q_len, batch_size]
    options = {"mask": mask, "is_causal": is_causal, **RETURNS[returned]}
    for needs_grad in (False, True):
        x = tensors(q_len, k_len, dtype=dtype, requires_grad=needs_grad)
        context, weights = method(call_of(*x, **options))
        assert not context[empty].any()
        assert context[~empty].isfinite().all()
        assert context[~empty].any(-1).all()
        if weights is not None:
            rows = weights.transpose(1, 2)  # [q_len, batch_size, k_len, ...]
            assert not rows[empty].any()
            assert rows.isfinite().all()
        if needs_grad:
            query, key, value = torch.autograd.grad(context.square().sum(), x)
            assert not query[empty].any()
            assert not key[:, 1].any()
            assert not value[:, 1].any()
            assert all(g.isfinite().all() for g in (query, key, value))


@pytest.mark.slow
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize(("p", "q_len", "k_len"), [(0.0, 5, 13), (0.5, 13, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_uninitialized_memory_reaches_no_result(
    dtype: torch.dtype, p: float, q_len: int, k_len: int
) -> None:
    for case in ALL_METHODS:
        method, returned = case.values
        if p and method is methods.fused:
            continue
        for mask in masks_of(q_len, k_len, BATCH).values():
            for is_causal in (False, True):
                x = tensors(q_len, k_len, dtype=dtype, requires_grad=True)
                options = {"mask": mask, "is_causal": is_causal, "p": p}
                results = method(call_of(*x, **options, **RETURNS[returned]))
                results = [y for y in results if y is not None]
                loss = sum(y.float().square().sum() for y in results)
                gradients = torch.autograd.grad(loss, x)
                assert all(y.isfinite().all() for y in (*results, *gradients))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@CAUSAL
@MASKED
@pytest.mark.parametrize("k_len", [7, K_LEN])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
def test_a_key_that_is_not_finite_affects_only_rows_that_may_attend_to_it(
    device: torch.device,
    k_len: int,
    is_causal: bool,
    masked: bool,
    needs_grad: bool,
    bad: float,
) -> None:
    query, key, value = tensors(k_len=k_len, device=device)
    query.requires_grad_(needs_grad)
    mask = random_mask(Q_LEN, k_len, BATCH) if masked else None
    may = allowed(mask, is_causal, Q_LEN, k_len, BATCH)
    j = k_len - 2
    may = may[:, j].to(device)  # [q_len, batch_size]
    spoilt = key.clone()
    spoilt[j] = bad
    options = {"mask": None if mask is None else mask.to(device)}
    for returned in RETURNS.values():
        options |= {"is_causal": is_causal, **returned}
        right, _ = methods.attention(query, key, value, **options)
        context, weights = methods.attention(query, spoilt, value, **options)
        torch.testing.assert_close(context[~may], right[~may], rtol=1e-10, atol=1e-10)
        if weights is not None:
            assert weights.transpose(1, 2)[~may].isfinite().all()
        if math.isnan(bad):
            assert context[may].isnan().all()


@pytest.mark.parametrize("transformed", [False, True], ids=["fused", "formula"])
def test_nan_is_isolated_where_values_cannot_be_inspected(transformed: bool) -> None:
    # On another device and in a compiler, a call is not eager.
    query, key, value = tensors()
    mask = random_mask(Q_LEN, K_LEN, BATCH)
    mask[:, 3, 1], mask[:2, 3, 1] = False, True
    spoilt = key.clone()
    spoilt[3, 1] = math.nan
    options = {"mask": mask, "eager": False, "transformed": transformed}
    method = formula.materialized if transformed else methods.fused
    right, _ = method(call_of(query, key, value, **options))
    context, _ = method(call_of(query, spoilt, value, **options))
    may = mask[:, 3] & torch.tensor([False, True, False])
    assert may.any()
    assert context[may].isnan().all()
    torch.testing.assert_close(context[~may], right[~may])
    if not transformed:
        # 0 * NaN is NaN, so a value that is not finite reaches all rows of its item.
        spoilt = value.clone()
        spoilt[3, 1] = math.inf
        context, _ = method(call_of(query, key, spoilt, **options))
        may = mask.any(1)
        assert context[:, 1][may[:, 1]].isnan().all()
        others = [0, 2]
        torch.testing.assert_close(context[:, others], right[:, others])


@CAUSAL
def test_an_infinite_key_that_cannot_be_inspected_affects_all_that_may_attend_to_it(
    is_causal: bool,
) -> None:
    # For half of the queries, the score is minus infinity, which is a weight of 0.
    query, key, value = tensors()
    query[::2, ..., 0], query[1::2, ..., 0] = -1, 1
    key[3, 1, :, 0] = math.inf
    mask = random_mask(Q_LEN, K_LEN, BATCH)
    mask[:, 3], mask[:, 0] = True, True
    mask[2, 3] = False
    options = {"mask": mask, "is_causal": is_causal}
    exact, _ = methods.attention(query, key, value, **options)
    strict, _ = methods.fused(call_of(query, key, value, **options, eager=False))
    may = allowed(mask, is_causal, Q_LEN, K_LEN, BATCH)[:, 3]
    may[:, [0, 2]] = False
    assert strict[may].isnan().all()
    torch.testing.assert_close(strict[~may], exact[~may])
    # Elsewhere, a row is NaN if its score is infinity: a subset of these.
    positive = may & (torch.arange(Q_LEN) % 2 == 1)[:, None]
    assert exact[positive].isnan().all()
    assert exact[~positive].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@CAUSAL
@pytest.mark.parametrize(("method", "returned"), ALL_METHODS)
@pytest.mark.parametrize("eager", [True, False])
def test_a_fully_masked_row_is_zero_where_a_visible_value_is_not_finite(
    method: Callable[[Call], Any],
    returned: str,
    is_causal: bool,
    bad: float,
    eager: bool,
) -> None:
    # The weight of such a row is zero, but 0 * NaN is NaN.
    query, key, value = tensors()
    value[3, 1] = bad
    mask = random_mask(Q_LEN, K_LEN, BATCH)
    mask[1], mask[:, 1, 2], mask[2, 3, 1] = False, False, True
    options = {"mask": mask, "is_causal": is_causal, "eager": eager}
    context, _ = method(call_of(query, key, value, **options, **RETURNS[returned]))
    assert not context[1].any()
    assert not context[2, 1].isfinite().any()
    others = context[:, [0, 2]]
    assert others.isfinite().all()
    may = allowed(mask, is_causal, Q_LEN, K_LEN, BATCH).any(1)
    assert torch.equal(others.any(-1).any(-1), may[:, [0, 2]])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 60_000.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("k_len", [7, K_LEN])
@CAUSAL
@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
def test_padding_may_hold_anything(
    k_len: int, is_causal: bool, needs_grad: bool, dtype: torch.dtype, bad: float
) -> None:
    query, key, value = tensors(k_len=k_len, dtype=dtype)
    query = 9 * query  # so that 60,000 overflows float16
    mask = torch.ones(1, k_len, BATCH).bool()
    mask[:, -3:, 1] = False
    options = {"mask": mask, "is_causal": is_causal}
    for returned in RETURNS.values():
        results = []
        for dirty in (0.0, bad):
            k, v = key.clone(), value.clone()
            k[-3:, 1] = v[-3:, 1] = dirty
            x = query.clone(), k, v
            for t in x:
                t.requires_grad_(needs_grad)
            context, weights = methods.attention(*x, **options, **returned)
            outputs = [context, context if weights is None else weights]
            if needs_grad:
                query_grad, *_ = torch.autograd.grad(context.float().sum(), x)
                outputs.append(query_grad)
            results.append(outputs)
        for clean, dirty in zip(*results, strict=True):
            assert clean.isfinite().all()
            torch.testing.assert_close(dirty, clean, rtol=1e-2, atol=1e-2)


@DROPPING
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@MASKED
def test_a_product_that_overflows_affects_only_rows_that_may_attend_to_it(
    method: Callable[[Call], Any], masked: bool, dtype: torch.dtype
) -> None:
    # An infinite score plus minus infinity is NaN.
    query, key, value = tensors(dtype=dtype)
    query = query.abs() + 1
    is_causal = not masked
    mask = random_mask(Q_LEN, K_LEN, BATCH) if masked else None
    may = allowed(mask, is_causal, Q_LEN, K_LEN, BATCH)[:, K_LEN - 1]
    assert not may.all()
    large = key.clone()
    large[K_LEN - 1] = torch.finfo(dtype).max
    call = call_of(query, large, value, mask=mask, is_causal=is_causal)
    assert not call.scores_are_finite(dtype)
    x = [t.requires_grad_() for t in (query, key, value)]
    right, _ = method(call_of(*x, mask=mask, is_causal=is_causal))
    (expected,) = torch.autograd.grad(right.sum(), query)
    context, _ = method(call)
    torch.testing.assert_close(context[~may], right[~may])
    (gradient,) = torch.autograd.grad(context.sum(), query)
    torch.testing.assert_close(gradient[~may], expected[~may])


# Dropout ------------------------------------------------------------------------------


def dropout_factors(
    method: Callable[[Call], Any], p: float, q_len: int = 61, k_len: int = 67
) -> Tensor:
    """What dropout multiplies each weight by, `[q_len, batch_size, heads, k_len]`.

    With the unit matrix as values, a context is its weights; and of equal scores all
    weights are equal.
    """
    zeros = torch.zeros(q_len, BATCH, HEADS, k_len)
    key = torch.randn(k_len, BATCH, HEADS, k_len)
    value = torch.eye(k_len)[:, None, None].expand_as(key)
    return method(call_of(zeros, key, value, p=p))[0] * k_len


@DROPPING
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_dropout_drops_its_share_and_scales_the_rest(
    method: Callable[[Call], Any], p: float
) -> None:
    factors = dropout_factors(method, p)
    assert factors.numel() == 61 * 67 * BATCH * HEADS
    assert_share(factors, p)


@DROPPING
def test_dropout_samples_are_independent(method: Callable[[Call], Any]) -> None:
    assert_independent(dropout_factors(method, 0.3), 0.3)


@DROPPING
def test_a_seed_fixes_the_dropout_mask_and_each_call_samples_anew(
    method: Callable[[Call], Any],
) -> None:
    torch.manual_seed(1)
    first, second = dropout_factors(method, 0.5), dropout_factors(method, 0.5)
    assert_unlike(first, second)
    torch.manual_seed(1)
    assert torch.equal(dropout_factors(method, 0.5), first)


@METHODS
def test_a_call_without_dropout_takes_no_random_numbers(
    method: Callable[[Call], Any],
) -> None:
    x = tensors(requires_grad=True)
    before = torch.random.get_rng_state()
    method(call_of(*x))[0].sum().backward()
    assert torch.equal(torch.random.get_rng_state(), before)


@DROPPING
@CAUSAL
@MASKED
@pytest.mark.parametrize("create_graph", [False, True])
def test_the_backward_pass_applies_the_dropout_mask_of_the_forward_pass(
    method: Callable[[Call], Any], masked: bool, is_causal: bool, create_graph: bool
) -> None:
    # The unit matrix as values shows the mask, which does not depend on the values.
    mask = random_mask(Q_LEN, K_LEN, BATCH) if masked else None
    options = {"mask": mask, "is_causal": is_causal, "p": 0.4}
    query, key, value = tensors(d_k=K_LEN, requires_grad=True)
    eye = torch.eye(K_LEN).double()[:, None, None].expand_as(key)

    def run(value: Tensor) -> Tensor:
        torch.manual_seed(5)
        context: Tensor = method(call_of(query, key, value, **options))[0]
        return context

    _, weights = reference(query, key, value, mask, is_causal)
    used = run(eye).permute(0, 3, 1, 2)  # [q_len, k_len, batch_size, heads]
    factors = torch.where(weights > 0, used / weights, 0).detach()
    assert (factors[weights > 0] == 0).any()
    expected = torch.einsum("ijbh,jbhd->ibhd", weights * factors, value)
    context = run(value)
    torch.testing.assert_close(context, expected)
    upstream, x = torch.randn_like(expected), (query, key, value)
    for ours, right in zip(
        torch.autograd.grad(context, x, upstream, create_graph=create_graph),
        torch.autograd.grad(expected, x, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, right)


@DROPPING
@CAUSAL
def test_activation_checkpointing_repeats_the_dropout_mask(
    method: Callable[[Call], Any], is_causal: bool
) -> None:
    x = tensors(requires_grad=True)

    def run(*x: Tensor) -> Tensor:
        context: Tensor = method(call_of(*x, p=0.5, is_causal=is_causal))[0]
        return context

    results = []
    for function in (run, lambda *x: checkpoint(run, *x, use_reentrant=False)):
        torch.manual_seed(5)
        context = function(*x)
        gradients = torch.autograd.grad(context.square().sum(), x)
        results.append([context, *gradients])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@DROPPING
def test_the_mean_over_many_dropout_masks_is_the_context_without_dropout(
    method: Callable[[Call], Any],
) -> None:
    x = tensors()
    samples = torch.stack(
        [method(call_of(*x, is_causal=True, p=0.3))[0] for _ in range(200)]
    )
    expected, _ = reference(*x, None, True)
    error = samples.std(0) / math.sqrt(len(samples))
    off = (samples.mean(0) - expected) / error.clamp(min=1e-12)
    assert off.abs().max() < 5  # of 330 numbers the largest is expected at 3


@pytest.mark.slow
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [1.0, 1, 1 - 2.0**-18])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "other device"])
@DROPPING
def test_probability_one_gives_exact_zeros_and_gradients_of_zero(
    method: Callable[[Call], Any], eager: bool, p: float, dtype: torch.dtype
) -> None:
    if not eager and (method is blockwise.blockwise or p < 1):
        pytest.skip("blocks are always eager, and other devices round no probability")
    for returned in RETURNS.values():
        for is_causal in (False, True):
            for mask in masks_of(Q_LEN, K_LEN, BATCH).values():
                x = tensors(dtype=dtype, requires_grad=True)
                options = {"mask": mask, "is_causal": is_causal, "eager": eager}
                context, weights = method(call_of(*x, p=p, **options, **returned))
                assert torch.equal(context, torch.zeros_like(context))
                for gradient in torch.autograd.grad(context.float().sum(), x):
                    assert torch.equal(gradient, torch.zeros_like(gradient))
                if weights is not None:
                    _, right = reference(*(t.double() for t in x), mask, is_causal)
                    right = right.mean(-1) if "average_weights" in returned else right
                    close = {"rtol": 0.05, "atol": 0.02}
                    torch.testing.assert_close(weights.double(), right, **close)


@DROPPING
def test_a_probability_that_rounds_to_zero_drops_nothing(
    method: Callable[[Call], Any],
) -> None:
    x = tensors()
    expected, _ = reference(*x, None, False)
    context, _ = method(call_of(*x, p=2.0**-18))
    torch.testing.assert_close(context, expected, **CLOSE)


@DROPPING
@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
def test_returned_weights_are_those_before_dropout(
    method: Callable[[Call], Any], needs_grad: bool
) -> None:
    x = tensors(requires_grad=needs_grad)
    right_context, right = reference(*x, None, False)
    torch.manual_seed(5)
    context, weights = method(call_of(*x, p=0.5, need_weights=True))
    torch.testing.assert_close(weights, right, **CLOSE)
    assert not torch.allclose(context, right_context)
    torch.manual_seed(5)
    bare, _ = method(call_of(*x, p=0.5))
    assert torch.equal(bare, context)


@pytest.mark.parametrize("k_len", [7, K_LEN])
def test_the_mode_of_the_dropout_module_decides(
    device: torch.device, k_len: int
) -> None:
    x, module = tensors(k_len=k_len, device=device), nn.Dropout(0.5)
    right, _ = reference(*x, None, False)
    for dropout in (None, nn.Identity(), module.eval()):
        context, _ = methods.attention(*x, dropout=dropout)
        torch.testing.assert_close(context, right, rtol=1e-10, atol=1e-10)
    context, _ = methods.attention(*x, dropout=module.train())
    assert not torch.allclose(context, right)


@pytest.mark.parametrize("k_len", [7, K_LEN])
def test_another_dropout_module_receives_the_weights_of_the_core(k_len: int) -> None:
    class Halve(nn.Module):
        def forward(self, weights: Tensor) -> Tensor:
            seen.append(weights)
            return weights / 2

    x, seen = tensors(k_len=k_len, requires_grad=True), []
    context, weights = methods.attention(*x, dropout=Halve(), need_weights=True)
    expected, right = reference(*x, None, False)
    torch.testing.assert_close(context, expected / 2, **CLOSE)
    torch.testing.assert_close(weights, right, **CLOSE)
    (received,) = seen
    torch.testing.assert_close(received, right, **CLOSE)


@pytest.mark.parametrize("when", ["forward_hook", "forward_pre_hook", "global"])
def test_hooks_of_the_dropout_module_are_called(when: str) -> None:
    x, seen = tensors(), []
    module = nn.Dropout(0.5).eval()

    def hook(module: nn.Module, *rest: Any) -> None:
        seen.append(module)

    register: Any = (
        nn.modules.module.register_module_forward_hook
        if when == "global"
        else getattr(module, f"register_{when}")
    )
    handle = register(hook)
    try:
        methods.attention(*x, dropout=module)
        assert seen == [module]
    finally:
        handle.remove()
    methods.attention(*x, dropout=module)
    assert seen == [module]


# Transforms ---------------------------------------------------------------------------


@pytest.mark.filterwarnings(SLOW)
@CAUSAL
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    ("returned", "dims"),
    [("context", (0, 0, 0)), ("weights", (2, None, 1)), ("mean", (None, 4, None))],
)
def test_vmap_gives_the_outputs_and_gradients_of_a_loop(
    returned: str, kind: str, is_causal: bool, dims: tuple[int | None, ...]
) -> None:
    n = 4
    xs = [tensors() for _ in range(n)]
    stacked = [
        each[0] if dim is None else torch.stack(each, dim)
        for each, dim in zip(zip(*xs, strict=True), dims, strict=True)
    ]
    own = masks_of(Q_LEN, K_LEN, BATCH)[kind]
    many = None if own is None else torch.stack([own.roll(i, 1) for i in range(n)], -1)

    def loss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        options = {"mask": mask, "is_causal": is_causal, **RETURNS[returned]}
        results = methods.attention(q, k, v, **options)
        results = tuple(y for y in results if y is not None)
        return sum(y.square().sum() for y in results), results

    call = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)
    for mask, mask_dim in ((many, None if own is None else -1), (own, None)):
        gradients, results = torch.func.vmap(call, in_dims=(*dims, mask_dim))(
            *stacked, mask
        )
        for i in range(n):
            one = [xs[0][k] if dim is None else xs[i][k] for k, dim in enumerate(dims)]
            expected = call(*one, mask if mask_dim is None else mask[..., i])
            for ours, right in zip(
                (*gradients, *results), (*expected[0], *expected[1]), strict=True
            ):
                torch.testing.assert_close(ours[i], right, **CLOSE)


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("k_len", [7, K_LEN])
def test_dropout_under_vmap_follows_the_randomness_option(
    device: torch.device, k_len: int
) -> None:
    x = tensors(k_len=k_len, device=device)
    stacked = [t.expand(2, *t.shape) for t in x]

    def call(*x: Tensor) -> Tensor:
        context: Tensor = methods.attention(*x, dropout=nn.Dropout(0.5))[0]
        return context

    one, other = torch.func.vmap(call, randomness="different")(*stacked)
    assert not torch.equal(one, other)
    one, other = torch.func.vmap(call, randomness="same")(*stacked)
    assert torch.equal(one, other)
    plain, _ = methods.attention(*x)
    assert not torch.allclose(one, plain)
    with pytest.raises(RuntimeError, match="random operation"):
        torch.func.vmap(call, randomness="error")(*stacked)
    for off in (nn.Dropout(0.0), nn.Dropout(0.5).eval(), None):
        contexts = torch.func.vmap(lambda *x: methods.attention(*x, dropout=off)[0])(  # noqa: B023
            *stacked
        )
        torch.testing.assert_close(contexts[1], plain)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked and causal"])
def test_recorded_and_compiled_calls_give_the_same(masked: bool) -> None:
    mask = random_mask(Q_LEN, K_LEN, BATCH) if masked else None
    x = tensors()
    for returned in RETURNS.values():
        options = {"mask": mask, "is_causal": masked, **returned}

        def call(*x: Tensor, options: Any = options) -> Any:
            return [y for y in methods.attention(*x, **options) if y is not None]

        torch.compiler.reset()
        runs = {
            "make_fx": torch.fx.experimental.proxy_tensor.make_fx(call)(*x),
            "compile": torch.compile(call, backend="eager", fullgraph=True),
        }
        for name, run in runs.items():
            other = tensors()
            for ours, right in zip(run(*other), call(*other), strict=True):
                torch.testing.assert_close(ours, right, **CLOSE, msg=name)


# Which method a call takes
# ---------------------------------------------------------------

ONES = torch.ones(1, K_LEN, 1).bool()


class Marked(Tensor):
    """A subclass that adds nothing."""


def plainly(run: Any, *x: Tensor) -> None:
    run(*x)


def without_grad(run: Any, *x: Tensor) -> None:
    with torch.no_grad():
        run(*x)


def on_meta(run: Any, *x: Tensor) -> None:
    run(*(t.to("meta") for t in x))


def under_vmap(run: Any, *x: Tensor) -> None:
    torch.func.vmap(lambda *x: run(*x)[0])(*(t.expand(2, *t.shape) for t in x))


def of_gradients(run: Any, *x: Tensor) -> None:
    torch.func.grad(lambda *x: run(*x)[0].sum())(*x)


def forward_mode(run: Any, *x: Tensor) -> None:
    torch.func.jvp(lambda *x: run(*x)[0], x, x)


def dual_numbers(run: Any, *x: Tensor) -> None:
    with forward_ad.dual_level():
        run(forward_ad.make_dual(x[0], x[0]), *x[1:])


def compiled(run: Any, *x: Tensor) -> None:
    torch.compiler.reset()
    torch.compile(run, backend="eager")(*x)


def traced(run: Any, *x: Tensor) -> None:
    torch.fx.experimental.proxy_tensor.make_fx(lambda *x: run(*x)[0])(*x)


def as_subclass(run: Any, *x: Tensor) -> None:
    run(x[0].as_subclass(Marked), *x[1:])


def overflowing(run: Any, *x: Tensor) -> None:
    run(x[0] * 1e200, x[1] * 1e200, x[2])


def not_finite(run: Any, *x: Tensor) -> None:
    x[1][3] = math.nan
    run(*x)


DROP, WEIGHTS = {"dropout": nn.Dropout(0.1)}, {"need_weights": True}
MASK: dict[str, Any] = {"mask": ONES}
PAST: dict[str, Any] = {"is_causal": True}

# How a call is made, its number of queries and keys, whether it needs a gradient, its
# options, and the method that it takes.
CHOICES: list[tuple[Any, int, int, bool, dict[str, Any], str]] = [
    # Transforms, and other modules than `nn.Dropout`.
    (under_vmap, 5, 13, False, {}, "materialized"),
    (under_vmap, 13, 13, False, PAST | MASK, "materialized"),
    (of_gradients, 5, 13, False, {}, "materialized"),
    (forward_mode, 5, 13, False, {}, "materialized"),
    (dual_numbers, 5, 13, False, {}, "materialized"),
    (traced, 5, 13, False, {}, "materialized"),
    (as_subclass, 5, 13, False, {}, "materialized"),
    (plainly, 5, 13, False, {"dropout": nn.AlphaDropout(0.1)}, "materialized"),
    (plainly, 5, 13, False, {"dropout": nn.Identity()}, "fused"),
    # Nothing to compute.
    (plainly, 5, 0, True, {}, "materialized"),
    (plainly, 0, 13, True, {}, "materialized"),
    (on_meta, 5, 0, False, {}, "materialized"),
    # Other devices, and compilers.
    (on_meta, 5, 13, False, WEIGHTS, "materialized"),
    (compiled, 5, 13, True, WEIGHTS, "materialized"),
    (on_meta, 5, 13, False, {}, "fused"),
    (on_meta, 5, 13, True, DROP, "fused"),
    (on_meta, 5, 7, True, DROP, "fused"),
    (on_meta, 13, 13, False, PAST | MASK, "fused"),
    (compiled, 5, 13, True, {}, "fused"),
    (compiled, 5, 13, True, PAST | MASK, "fused"),
    # Few keys.
    (plainly, 5, 7, True, {}, "materialized"),
    (plainly, 5, 7, True, DROP | WEIGHTS | PAST, "materialized"),
    (plainly, 5, 7, False, WEIGHTS, "materialized"),
    (plainly, 5, 7, False, DROP, "materialized"),
    (plainly, 5, 7, False, {}, "fused"),
    (without_grad, 5, 7, True, {}, "fused"),
    (without_grad, 5, 7, True, DROP, "materialized"),
    # What the fused kernel lacks.
    (plainly, 5, 13, False, WEIGHTS, "blockwise"),
    (plainly, 5, 13, True, WEIGHTS, "blockwise"),
    (plainly, 5, 13, True, DROP, "blockwise"),
    (plainly, 13, 13, True, DROP | PAST, "blockwise"),
    (plainly, 5, 13, False, {"dropout": nn.Dropout(0.1).eval()}, "fused"),
    (plainly, 5, 13, False, {"dropout": nn.Dropout(0.0)}, "fused"),
    (plainly, 5, 13, True, PAST, "blockwise"),
    (plainly, 5, 7, False, PAST, "blockwise"),
    (plainly, 13, 5, False, PAST, "blockwise"),
    (plainly, 13, 13, False, PAST | MASK, "blockwise"),
    (overflowing, 5, 13, False, MASK, "blockwise"),
    (overflowing, 5, 13, False, {}, "fused"),
    (not_finite, 5, 13, False, MASK, "blockwise"),
    (plainly, 5, 13, False, {"window": 2}, "blockwise"),
    (plainly, 5, 13, False, {"soft_cap": 9.0}, "blockwise"),
    (on_meta, 5, 13, False, {"soft_cap": 9.0}, "materialized"),
    # The fused kernel.
    (plainly, 5, 13, False, {}, "fused"),
    (plainly, 5, 13, True, {}, "fused"),
    (plainly, 5, 13, True, MASK, "fused"),
    (plainly, 13, 13, True, PAST, "fused"),
    (plainly, 5, 8, True, {}, "fused"),
]


def row_of(
    monkeypatch: pytest.MonkeyPatch,
    how: Any,
    q_len: int,
    k_len: int,
    needs_grad: bool,
    options: dict[str, Any],
) -> int:
    """The row of DISPATCH that serves a call."""
    rows: list[int] = []

    def record(number: int, method: Any) -> Any:
        def recording(call: Call) -> Any:
            rows.append(number)
            return method(call)

        return recording

    table = [
        (record(n, method), serves)
        for n, (method, serves) in enumerate(methods.DISPATCH)
    ]
    with monkeypatch.context() as patch:
        patch.setattr(methods, "DISPATCH", table)
        x = tensors(q_len, k_len)
        if how is on_meta and "mask" in options:
            options = options | {"mask": options["mask"].to("meta")}
        x[2].requires_grad_(needs_grad)
        how(lambda *x: methods.attention(*x, **options), *x)
    assert len(set(rows)) == 1
    return rows[0]


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize(
    ("how", "q_len", "k_len", "needs_grad", "options", "method"),
    CHOICES,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_call_takes_the_method_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
    how: Any,
    q_len: int,
    k_len: int,
    needs_grad: bool,
    options: dict[str, Any],
    method: str,
) -> None:
    row = row_of(monkeypatch, how, q_len, k_len, needs_grad, options)
    assert methods.DISPATCH[row][0].__name__ == method


@pytest.mark.slow
@pytest.mark.filterwarnings(SLOW)
def test_every_row_of_the_table_is_chosen_for_some_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = {row_of(monkeypatch, *choice[:-1]) for choice in CHOICES}
    assert rows == set(range(len(methods.DISPATCH)))


def test_the_mask_is_not_copied_for_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    received = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    apply = methods.FusedOnCPU.apply

    def record(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *rest: Any) -> None:
        received.append(mask)

    def without_backward(*x: Any, **rest: Any) -> Tensor:
        record(*x)
        return kernel(*x, **rest)

    def with_backward(*x: Any) -> Any:
        record(*x)
        return apply(*x)

    monkeypatch.setattr(methods.F, "scaled_dot_product_attention", without_backward)
    monkeypatch.setattr(methods.FusedOnCPU, "apply", with_backward)
    for shape in [(Q_LEN, K_LEN, BATCH), (Q_LEN, K_LEN, 1), (1, K_LEN, BATCH)]:
        for needs_grad in (False, True):
            x = tensors(requires_grad=needs_grad)
            methods.attention(*x, mask=random_mask(*shape))
            assert received[-1].untyped_storage().nbytes() <= Q_LEN * K_LEN * BATCH
            assert received[-1].dtype == torch.bool
    assert len(received) == 6


def test_heads_are_contiguous_for_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received = []
    apply = methods.FusedOnCPU.apply

    def record(*x: Any) -> Any:
        received.append(all(t.is_contiguous() for t in x[:3]))
        return apply(*x)

    monkeypatch.setattr(methods.FusedOnCPU, "apply", record)
    methods.attention(*tensors(requires_grad=True))
    methods.attention(*tensors())
    assert received == [True]
