"""Linear attention in three forms, and the gated delta rule in two."""

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from claims import (
    BATCH,
    assert_equal_with_gradients,
    inputs,
    some_mask,
)
from contract import randomize
from headnotes.mha import MultiHeadAttention
from headnotes.variants.linear import (
    DeltaNetAttention,
    LinearAttention,
    chunked_delta_rule,
    chunked_linear_attention,
    feature_map,
    parallel_linear_attention,
    recurrent_delta_rule,
    recurrent_linear_attention,
)

HEADS, D_K, D_V = 2, 3, 4
KINDS = pytest.mark.parametrize("kind", [LinearAttention, DeltaNetAttention])


def features(q_len: int, k_len: int, dtype: Any = torch.float64) -> list[Tensor]:
    """Features of queries and keys, and values."""
    shapes = [(q_len, D_K), (k_len, D_K), (k_len, D_V)]
    q, k, v = (torch.randn(n, BATCH, HEADS, d, dtype=dtype) for n, d in shapes)
    return [feature_map(q), feature_map(k), v]


def linear_loops(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The definition, one query of one head at a time."""
    contexts = []
    for i in range(len(q)):
        for b in range(q.shape[1]):
            for h in range(q.shape[2]):
                total = q.new_zeros(())
                context = v.new_zeros(v.shape[3])
                for j in range(len(k)):
                    if mask[i, j, b]:
                        weight = (q[i, b, h] * k[j, b, h]).sum()
                        total = total + weight
                        context = context + weight * v[j, b, h]
                contexts.append(context / total if total > 0 else context)
    return torch.stack(contexts).view(*q.shape[:3], v.shape[3])


def delta_loops(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor
) -> Tensor:
    """The equation of the paper, with matrices: S (α (I - β k kᵀ)) + β v kᵀ."""
    columns = []
    for b in range(q.shape[1]):
        for h in range(q.shape[2]):
            state = v.new_zeros(v.shape[3], q.shape[3])
            contexts = []
            for i in range(len(q)):
                key, rate = k[i, b, h], beta[i, b, h]
                erase = torch.eye(len(key)).to(v) - rate * torch.outer(key, key)
                state = state @ (log_gate[i, b, h].exp() * erase)
                state = state + rate * torch.outer(v[i, b, h], key)
                contexts.append(state @ q[i, b, h])
            columns.append(torch.stack(contexts))
    stacked = torch.stack(columns, dim=1)
    return stacked.view(len(q), q.shape[1], q.shape[2], v.shape[3])


def assert_close_with_gradients(
    output: Tensor, expected: Tensor, leaves: list[Tensor]
) -> None:
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(expected)
    ours = torch.autograd.grad(output, leaves, upstream)
    theirs = torch.autograd.grad(expected, leaves, upstream, retain_graph=True)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12)


# Linear attention


def test_the_features_are_those_of_the_paper() -> None:
    x = torch.tensor([-3.0, -0.5, 0.0, 2.0]).double()
    expected = [math.exp(-3), math.exp(-0.5), 1.0, 3.0]
    assert feature_map(x).tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_features_of_negative_numbers_are_not_rounded_to_zero(
    dtype: torch.dtype,
) -> None:
    x = torch.tensor([-3.0, -7.0, -17.5, -80.0]).to(dtype)
    output, expected = feature_map(x).double(), x.double().exp()
    near = torch.finfo(dtype).eps
    torch.testing.assert_close(output, expected, rtol=near, atol=0)


def test_features_have_one_slope_from_both_sides_of_zero() -> None:
    x = torch.tensor([-2.0, -0.5, 0.0, 3.0]).double().requires_grad_()
    (slope,) = torch.autograd.grad(feature_map(x).sum(), x, create_graph=True)
    assert slope.tolist() == pytest.approx([math.exp(-2), math.exp(-0.5), 1, 1])
    (second,) = torch.autograd.grad(slope.sum(), x)
    assert second[:2].tolist() == pytest.approx([math.exp(-2), math.exp(-0.5)])


def test_the_parallel_form_is_that_of_the_loops() -> None:
    leaves = [x.requires_grad_() for x in features(3, 5)]
    mask = some_mask()
    output = parallel_linear_attention(*leaves, mask)
    assert_close_with_gradients(output, linear_loops(*leaves, mask), leaves)
    assert not output[1, 0].any()


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 8, 100])
def test_all_forms_agree_at_every_boundary_of_chunks(chunk_size: int) -> None:
    leaves = [x.requires_grad_() for x in features(7, 7)]
    causal = torch.ones(7, 7).bool().tril()[..., None].expand(-1, -1, BATCH)
    expected = linear_loops(*leaves, causal)
    output, state = chunked_linear_attention(*leaves, chunk_size=chunk_size)
    assert_close_with_gradients(output, expected, leaves)
    output, same_state = recurrent_linear_attention(*leaves)
    assert_close_with_gradients(output, expected, leaves)
    torch.testing.assert_close(state, same_state)


@pytest.mark.parametrize("form", [recurrent_linear_attention, chunked_linear_attention])
def test_a_state_continues_the_sequence_and_is_not_modified(
    form: Callable[..., Any],
) -> None:
    q, k, v = features(7, 7)
    whole, last = form(q, k, v)
    _, state = form(q[:3], k[:3], v[:3])
    before = state.clone()
    rest, end = form(q[3:], k[3:], v[3:], state)
    torch.testing.assert_close(rest, whole[3:])
    torch.testing.assert_close(end, last)
    assert torch.equal(state, before)


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (5, 5), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", ["none", "one", "all"])
def test_the_module_is_the_formula_between_the_layers_of_the_core(
    lengths: tuple[int, int], is_causal: bool, rows: str
) -> None:
    q_len, k_len = lengths
    core = MultiHeadAttention(2, 6).double()
    module = LinearAttention(2, 6, chunk_size=2).double()
    randomize(core)
    module.load_state_dict(core.state_dict())
    xs = inputs(6, q_len, k_len)
    mask = torch.rand(1 if rows == "one" else q_len, k_len, BATCH) < 0.7
    full = torch.ones(q_len, k_len, BATCH).bool() if rows == "none" else mask
    full = full.expand(q_len, -1, -1)
    if is_causal:
        full = full.permute(2, 0, 1).tril(k_len - q_len).permute(1, 2, 0)
    given = None if rows == "none" else mask
    output = module(**xs, mask=given, is_causal=is_causal)
    q, k = (feature_map(getattr(module, n)(xs[n])) for n in ("query", "key"))
    weights = torch.einsum("ibhd,jbhd->ijbh", q, k) * full.unsqueeze(-1)
    total = weights.sum(dim=1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1)
    context = torch.einsum("ijbh,jbhd->ibhd", weights, module.value(xs["value"]))
    expected = module.output(context.flatten(-2))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


def work(kind: Any, length: int, **options: Any) -> tuple[int, int]:
    """The operations of a training step, and the numbers saved for its second half."""
    module = kind(1, 8, chunk_size=16)
    x = torch.randn(length, 1, 8, requires_grad=True)
    saved = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with FlopCounterMode(display=False) as counter, hooks:
        module(query=x, key=x, value=x, **options).sum().backward()
    return counter.get_total_flops(), sum(saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LinearAttention, {"is_causal": True}),
        (LinearAttention, {}),
        (DeltaNetAttention, {}),
    ],
)
def test_work_and_memory_are_linear_in_the_length(
    kind: Any, options: dict[str, Any]
) -> None:
    first, second, third = (work(kind, n, **options) for n in (32, 64, 96))
    for a, b, c in zip(first, second, third, strict=True):
        assert c - b == b - a > 0


# The delta rule


def delta_inputs(length: int, dtype: Any = torch.float64) -> list[Tensor]:
    """Query, keys of length 1, values, betas and logarithms of gates."""
    q, k, v = (
        torch.randn(length, BATCH, HEADS, d, dtype=dtype) for d in (D_K, D_K, D_V)
    )
    beta, gate = torch.rand(2, length, BATCH, HEADS, dtype=dtype)
    return [q, torch.nn.functional.normalize(k, dim=-1), v, beta, gate.log()]


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_the_delta_rule_is_the_equation_of_the_paper(chunk_size: int) -> None:
    leaves = [x.requires_grad_() for x in delta_inputs(7)]
    expected = delta_loops(*leaves)
    output, state = chunked_delta_rule(*leaves, chunk_size=chunk_size)
    assert_close_with_gradients(output, expected, leaves)
    output, same_state = recurrent_delta_rule(*leaves)
    assert_close_with_gradients(output, expected, leaves)
    torch.testing.assert_close(state, same_state)
    first = [x[:4] for x in leaves]
    _, state = chunked_delta_rule(*first, chunk_size=chunk_size)
    rest, _ = chunked_delta_rule(*(x[4:] for x in leaves), state, chunk_size=chunk_size)
    torch.testing.assert_close(rest, expected[4:])


def test_with_gates_of_one_and_nothing_to_erase_it_is_linear_attention() -> None:
    # Orthogonal keys: what is stored for one says nothing of another.
    q, _, v, beta, log_gate = delta_inputs(3)
    k = torch.eye(3, D_K).double()[:, None, None].expand(-1, BATCH, HEADS, -1)
    output, _ = chunked_delta_rule(q, k, v, beta, torch.zeros_like(log_gate))
    weights = torch.einsum("ibhd,jbhd->ijbh", q, k)
    weights = weights * torch.ones(3, 3).tril()[..., None, None] * beta
    expected = torch.einsum("ijbh,jbhd->ibhd", weights, v)
    torch.testing.assert_close(output, expected)


def test_strong_gates_do_not_overflow_within_a_chunk() -> None:
    # Products of gates down to e^-3000, their ratios up to e^3000.
    leaves = [x.float() for x in delta_inputs(64)]
    leaves[4] = leaves[4] - 50
    for x in leaves:
        x.requires_grad_()
    output, _ = chunked_delta_rule(*leaves)
    expected, _ = recurrent_delta_rule(*leaves)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    for grad in torch.autograd.grad(output.sum(), leaves):
        assert grad.isfinite().all()


@pytest.mark.parametrize(
    "reset", [-1e3, -1e6, torch.finfo(torch.float32).min, -math.inf]
)
def test_gates_that_empty_the_state_leave_the_others_exact(reset: float) -> None:
    # Two documents end: beside their gates, those of e^-0.1 would be rounded away.
    leaves = [x.float() for x in delta_inputs(13)]
    leaves[4] = leaves[4].clamp(min=-0.1)
    leaves[4][[3, 7]] = reset
    results = []
    for dtype, rule in ((torch.float32, chunked_delta_rule), (torch.float64, None)):
        xs = [x.to(dtype).requires_grad_() for x in leaves]
        output = rule(*xs)[0] if rule else delta_loops(*xs)
        grads = torch.autograd.grad(output.square().sum(), xs)
        results.append([x.double() for x in (output, *grads)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_the_module_is_the_rule_between_the_layers_of_the_core() -> None:
    module = DeltaNetAttention(2, 6, chunk_size=2).double()
    randomize(module)
    xs = inputs(6, 4, 4)
    leaves = [x.requires_grad_() for x in xs.values()]
    heads = {}
    for name, x in xs.items():
        layer = getattr(module, name).linear
        heads[name] = (x @ layer.weight.T + layer.bias).unflatten(-1, (2, 3))
    for name in ("query", "key"):
        square = (heads[name] * heads[name]).sum(-1, keepdim=True)
        heads[name] = heads[name] / (square + 1e-6).sqrt()
    key = xs["key"]
    beta = 1 / (1 + (-key @ module.beta.weight.T).exp())
    step = (1 + (key @ module.gate.weight.T + module.dt_bias).exp()).log()
    context = delta_loops(
        heads["query"] / math.sqrt(3),
        heads["key"],
        heads["value"],
        beta,
        -module.A_log.exp() * step,
    )
    expected = context.flatten(-2) @ module.output.weight.T + module.output.bias
    assert_equal_with_gradients(module, module(**xs), expected, leaves)


def test_a_hidden_key_leaves_the_state_as_it_is() -> None:
    module = DeltaNetAttention(2, 6, chunk_size=2).double()
    xs = inputs(6, 2, 5)
    mask = torch.tensor([True, False, True, True, False]).view(1, 5, 1)
    without = {n: x if n == "query" else x[[0, 2, 3]] for n, x in xs.items()}
    output = module(**xs, mask=mask)[-1]
    torch.testing.assert_close(output, module(**without)[-1])


# Both


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_state_of_a_long_sequence_is_near_in_half_precision(
    dtype: torch.dtype,
) -> None:
    module = DeltaNetAttention(2, 6).to(dtype)
    wide = copy.deepcopy(module).double()
    x = torch.randn(300, BATCH, 6).to(dtype)
    output = module(query=x, key=x, value=x)
    x = x.double()
    expected = wide(query=x, key=x, value=x)
    near = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=near)


@pytest.mark.slow
def test_the_sums_of_a_long_sequence_are_in_float32() -> None:
    # 70,000 keys with a feature of 1: float16 ends at 65,504, and counts to 2,048.
    ones = torch.ones(70_000, 1, 1, 1).half()
    value = torch.linspace(0, 1, 70_000).half().view(-1, 1, 1, 1)
    context, state = chunked_linear_attention(ones, ones, value, chunk_size=1024)
    assert state[0, 0, 0].tolist() == pytest.approx([35_000, 70_000], rel=1e-3)
    assert float(context[-1]) == pytest.approx(0.5, abs=1e-3)


@KINDS
@pytest.mark.parametrize("pieces", [[1] * 9, [6, 3], [2, 0, 3, 4], [9]])
def test_padding_leaves_the_state_as_it_is_in_decoding(
    kind: Any, pieces: list[int]
) -> None:
    module = kind(2, 6, chunk_size=2)
    randomize(module)
    module = module.double()
    x = torch.randn(9, 3, 6).double()
    mask = torch.ones(1, 9, 3).bool()
    mask[:, :5, 1] = False  # more than the first piece
    mask[:, [1, 8], 2] = False  # not on the left only
    x[~mask[0]] = torch.nan
    state, outputs = None, []
    masks = mask.split(pieces, dim=1)
    for piece, present in zip(x.split(pieces), masks, strict=True):
        output, state = module.decode(piece, state, mask=present)
        outputs.append(output)
    for b in range(3):
        alone = x[mask[0, :, b], b : b + 1]
        causal = {"is_causal": True} if kind is LinearAttention else {}
        expected = module(query=alone, key=alone, value=alone, **causal)
        output = torch.cat(outputs)[mask[0, :, b], b : b + 1]
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
        _, without = module.decode(alone)
        torch.testing.assert_close(state[b], without[0], rtol=0, atol=1e-12)
    assert torch.cat(outputs).isfinite().all()
    with pytest.raises(ValueError, match="`mask` has 2 rows, one for each query"):
        module.decode(alone[:2], mask=torch.ones(2, 2, 1).bool())


@KINDS
@pytest.mark.parametrize("pieces", [[1] * 7, [3, 4], [0, 5, 2]], ids=str)
def test_decoding_in_any_pieces_is_one_causal_call(
    kind: Any, pieces: list[int]
) -> None:
    module = kind(2, 6, chunk_size=2).double()
    randomize(module)
    x = torch.randn(7, BATCH, 6, dtype=torch.float64)
    state, outputs = None, []
    for piece in x.split(pieces):
        output, state = module.decode(piece, state)
        outputs.append(output)
    options = {"is_causal": True} if kind is LinearAttention else {}
    expected = module(query=x, key=x, value=x, **options)
    torch.testing.assert_close(torch.cat(outputs), expected)


# What it refuses

Q, K, V = features(3, 3, torch.float32)
RATE = torch.rand(3, BATCH, HEADS)
SHAPES = "`query`, `key`, `value` have shapes "


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: parallel_linear_attention(Q, K, None), TypeError, "`value` must be a"),
        (
            lambda: recurrent_linear_attention(Q, K.double(), V),
            TypeError,
            "`key` is torch.float64; use `key.to(torch.float32)`",
        ),
        (
            lambda: recurrent_linear_attention(Q.int(), K, V),
            TypeError,
            "`query` is torch.int32; use `query.to(torch.float32)`",
        ),
        (lambda: recurrent_linear_attention(Q[:2], K, V), ValueError, SHAPES),
        (lambda: parallel_linear_attention(Q, K, V[:2]), ValueError, SHAPES),
        (lambda: parallel_linear_attention(Q[0], K[0], V[0]), ValueError, SHAPES),
        (
            lambda: chunked_linear_attention(Q, K, V, chunk_size=0),
            ValueError,
            "`chunk_size` (=0) must be an int from 1 up",
        ),
        (
            lambda: chunked_linear_attention(Q, K, V, torch.zeros(2, 2, 3, 4)),
            ValueError,
            "`state` has shape [2, 2, 3, 4], not [2, 2, 3, 5]; pass the second",
        ),
        (
            lambda: chunked_linear_attention(Q, K, V, torch.zeros(2, 2, 3, 5).half()),
            TypeError,
            "`state` is torch.float16, but sums are in torch.float32; use",
        ),
        (
            lambda: chunked_delta_rule(Q, K, V, RATE[0], RATE),
            ValueError,
            "`beta` has shape [2, 2], not [seq_len, batch_size, heads] = [3, 2, 2]",
        ),
        (lambda: LinearAttention(4, 6), ValueError, "`d_model` (=6) must be divisible"),
        (
            lambda: DeltaNetAttention(2, 6, chunk_size=1.5),
            ValueError,
            "`chunk_size` (=1.5) must be an int from 1 up",
        ),
        (
            lambda: DeltaNetAttention(2, 6)(
                **{n: x.float() for n, x in inputs(6).items()}, mask=some_mask()
            ),
            ValueError,
            "`mask` has 3 rows, one for each query, but all share one state; pass a",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()
