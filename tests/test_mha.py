"""The core: what it computes, what it refuses, and what it works under."""

import copy
import io
import math
import pickle
import re
import shutil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oracle
from headnotes import masks
from headnotes.mha import (
    MultiHeadAttention,
    PrepareForMultiHeadAttention,
    masked_softmax,
)

# Prime and pairwise distinct, so that no swapped pair of axes can pass unseen.
Q_LEN, K_LEN, BATCH, HEADS, D_K = 5, 7, 3, 2, 11
D_MODEL = HEADS * D_K


def build(heads: int = HEADS, d_k: int = D_K, **settings: Any) -> MultiHeadAttention:
    """A module whose rows of attention differ: weights well above the usual scale."""
    mha = MultiHeadAttention(heads, heads * d_k, **settings)
    with torch.no_grad():
        for parameter in mha.parameters():
            parameter.copy_(torch.randn_like(parameter) / (heads * d_k) ** 0.25)
    return mha


def inputs(
    q_len: int = Q_LEN, k_len: int = K_LEN, batch_size: int = BATCH, **like: Any
) -> dict[str, Tensor]:
    """Random query, key and value, as `forward` takes them."""
    return {
        "query": torch.randn(q_len, batch_size, D_MODEL, **like),
        "key": torch.randn(k_len, batch_size, D_MODEL, **like),
        "value": torch.randn(k_len, batch_size, D_MODEL, **like),
    }


def some_mask(
    q_len: int = Q_LEN, k_len: int = K_LEN, batch_size: int = BATCH
) -> Tensor:
    """A random mask without empty rows."""
    mask = torch.rand(q_len, k_len, batch_size) < 0.6
    mask[:, 0] = True
    return mask


def by_loops(
    mha: MultiHeadAttention, x: dict[str, Tensor], mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and weights by the oracle."""
    parameters = {}
    for name in ("query", "key", "value"):
        linear = getattr(mha, name).linear
        bias = None if linear.bias is None else linear.bias.tolist()
        parameters[name] = (linear.weight.tolist(), bias)
    parameters["output"] = (mha.output.weight.tolist(), mha.output.bias.tolist())
    shape = (x["query"].shape[0], x["key"].shape[0], x["query"].shape[1])
    full = torch.ones(shape).bool() if mask is None else mask.bool().expand(shape)
    lists = [x[name].tolist() for name in ("query", "key", "value")]
    output, weights = oracle.attention(*lists, full.tolist(), parameters, mha.heads)
    return torch.tensor(output, dtype=torch.float64), torch.tensor(
        weights, dtype=torch.float64
    )


def torch_twin(mha: MultiHeadAttention) -> nn.MultiheadAttention:
    """PyTorch's own module, holding the same weights."""
    weight = mha.output.weight
    twin = nn.MultiheadAttention(
        weight.shape[0], mha.heads, dtype=weight.dtype, device=weight.device
    )
    parts = [mha.query.linear, mha.key.linear, mha.value.linear]
    twin.load_state_dict(
        {
            "in_proj_weight": torch.cat([part.weight for part in parts]),
            "in_proj_bias": torch.cat([part.bias for part in parts]),
            "out_proj.weight": weight,
            "out_proj.bias": mha.output.bias,
        }
    )
    return twin.eval()


def torch_mask(mask: Tensor | None) -> Tensor | None:
    """PyTorch's kind: batch first, one for each head, and True where it forbids."""
    if mask is None:
        return None
    return ~mask.permute(2, 0, 1).repeat_interleave(HEADS, dim=0)


# What it computes


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_output_and_weights_are_those_of_the_loops(data: st.DataObject) -> None:
    q_len, k_len, batch_size, heads, d_k = (
        data.draw(st.integers(1, 5), label=name)
        for name in ("q_len", "k_len", "batch_size", "heads", "d_k")
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]), label="dtype")
    bias = data.draw(st.booleans(), label="bias")
    torch.manual_seed(data.draw(st.integers(0, 2**31), label="seed"))

    mha = build(heads, d_k, bias=bias).to(dtype).eval()
    query = torch.randn(q_len, batch_size, heads * d_k, dtype=dtype)
    key, value = torch.randn(2, k_len, batch_size, heads * d_k, dtype=dtype)
    x = {"query": query, "key": key, "value": value}
    mask = None
    if data.draw(st.booleans(), label="masked"):
        shape = [
            data.draw(st.sampled_from([1, q_len]), label="mask q"),
            k_len,
            data.draw(st.sampled_from([1, batch_size]), label="mask b"),
        ]
        mask_dtype = data.draw(st.sampled_from([torch.bool, torch.uint8, torch.int64]))
        mask = (torch.rand(shape) < 0.6).to(mask_dtype)

    output = mha(**x, mask=mask)
    expected, weights = by_loops(mha, x, mask)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12  # values reach 10
    assert output.dtype == dtype
    assert mha.attn is not None
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(mha.attn.double(), weights, rtol=0, atol=tolerance)


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str
)
def test_output_is_that_of_torch_under_the_same_weights(
    device: torch.device, dtype: torch.dtype, tolerance: float, masked: bool
) -> None:
    mha = MultiHeadAttention(HEADS, D_MODEL).to(device, dtype).eval()
    x = inputs(device=device, dtype=dtype)
    mask = some_mask().to(device) if masked else None
    expected, _ = torch_twin(mha)(*x.values(), attn_mask=torch_mask(mask))
    difference = (mha(**x, mask=mask) - expected).abs().max().item()
    print(f"largest difference from torch: {difference:.1e}")
    assert difference <= tolerance


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_gradients_are_those_of_torch_under_the_same_weights(
    device: torch.device, masked: bool
) -> None:
    mha = MultiHeadAttention(HEADS, D_MODEL).to(device, torch.float64).eval()
    twin = torch_twin(mha)
    ours = inputs(device=device, dtype=torch.float64)
    theirs = {name: x.clone() for name, x in ours.items()}
    for x in [*ours.values(), *theirs.values()]:
        x.requires_grad_()
    mask = some_mask().to(device) if masked else None

    upstream = torch.randn(Q_LEN, BATCH, D_MODEL, dtype=torch.float64, device=device)
    mha(**ours, mask=mask).backward(upstream)
    twin(*theirs.values(), attn_mask=torch_mask(mask))[0].backward(upstream)

    for name in ours:
        torch.testing.assert_close(
            ours[name].grad, theirs[name].grad, rtol=0, atol=1e-13, msg=name
        )
    parts = [mha.query.linear, mha.key.linear, mha.value.linear]
    pairs = [
        (torch.cat([p.weight.grad for p in parts]), twin.in_proj_weight.grad),
        (torch.cat([p.bias.grad for p in parts]), twin.in_proj_bias.grad),
        (mha.output.weight.grad, twin.out_proj.weight.grad),
        (mha.output.bias.grad, twin.out_proj.bias.grad),
    ]
    for our, their in pairs:
        torch.testing.assert_close(our, their, rtol=0, atol=1e-12)


def test_every_hook_sees_the_shapes_that_its_page_names(device: torch.device) -> None:
    seen = {}

    class Watched(MultiHeadAttention):
        def get_scores(self, query: Tensor, key: Tensor) -> Tensor:
            scores = super().get_scores(query, key)
            seen.update(query=query.shape, key=key.shape, scores=scores.shape)
            return scores

        def prepare_mask(self, *args: Any) -> Tensor:
            mask = super().prepare_mask(*args)
            seen["mask"] = mask.shape
            return mask

        def apply_weights(self, attn: Tensor, value: Tensor) -> Tensor:
            context = super().apply_weights(attn, value)
            seen.update(attn=attn.shape, value=value.shape, context=context.shape)
            return context

    mha = Watched(HEADS, D_MODEL).to(device)
    y = mha(**inputs(device=device), mask=some_mask().to(device))
    assert y.shape == (Q_LEN, BATCH, D_MODEL)
    assert seen == {
        "query": (Q_LEN, BATCH, HEADS, D_K),
        "key": (K_LEN, BATCH, HEADS, D_K),
        "value": (K_LEN, BATCH, HEADS, D_K),
        "mask": (Q_LEN, K_LEN, BATCH, 1),
        "scores": (Q_LEN, K_LEN, BATCH, HEADS),
        "attn": (Q_LEN, K_LEN, BATCH, HEADS),
        "context": (Q_LEN, BATCH, HEADS, D_K),
    }


def test_any_leading_axes_pass_through_the_split_into_heads(
    device: torch.device,
) -> None:
    prepare = PrepareForMultiHeadAttention(13, HEADS, D_K, bias=False).to(device)
    for leading in [(), (3,), (5, 3), (7, 5, 3)]:
        x = torch.randn(*leading, 13, device=device)
        outputs: list[Tensor] = []
        hook = prepare.linear.register_forward_hook(lambda *a: outputs.append(a[-1]))  # noqa: B023
        heads = prepare(x)
        hook.remove()
        assert heads.shape == (*leading, HEADS, D_K)
        assert torch.equal(heads.flatten(-2), outputs[0])
        assert heads.data_ptr() == outputs[0].data_ptr()  # nothing is copied


def test_head_h_is_the_h_th_block_of_rows(device: torch.device) -> None:
    prepare = PrepareForMultiHeadAttention(D_MODEL, HEADS, D_K, bias=True).to(device)
    x = torch.randn(Q_LEN, BATCH, D_MODEL, device=device)
    for h in range(HEADS):
        rows = slice(h * D_K, (h + 1) * D_K)
        expected = x @ prepare.linear.weight[rows].T + prepare.linear.bias[rows]
        torch.testing.assert_close(prepare(x)[:, :, h], expected)


def test_concatenating_the_heads_costs_a_copy(device: torch.device) -> None:
    mha = build().to(device)
    attn = torch.rand(Q_LEN, K_LEN, BATCH, HEADS, device=device)
    context = mha.apply_weights(
        attn, torch.randn(K_LEN, BATCH, HEADS, D_K, device=device)
    )
    assert context.flatten(-2).data_ptr() != context.data_ptr()


def test_without_the_scale_a_wide_head_is_almost_one_hot_and_passes_little_gradient(
    device: torch.device,
) -> None:
    d_k = 512
    query, key = torch.randn(2, 1000, 6, d_k, device=device)
    scores = torch.einsum("nd,nkd->nk", query[:, 0], key)
    assert abs(scores.var() / d_k - 1) < 0.1
    largest, steepness = [], []
    for scaled in (scores, scores / d_k**0.5):
        weights = scaled.softmax(dim=-1)
        jacobian = torch.diag_embed(weights) - weights[:, :, None] * weights[:, None]
        largest.append(weights.max(dim=-1).values.mean().item())
        steepness.append(jacobian.norm(dim=(1, 2)).mean().item())
    assert largest[0] > 0.9 > 0.6 > largest[1]
    assert steepness[0] < 0.1 < 0.3 < steepness[1]


def test_a_mask_means_the_same_in_every_dtype_and_broadcast(
    device: torch.device,
) -> None:
    mha = build().to(device).eval()
    x = inputs(device=device)
    for shape in [(1, K_LEN, 1), (Q_LEN, K_LEN, 1), (1, K_LEN, BATCH)]:
        mask = torch.rand(shape, device=device) < 0.6
        full = mha(**x, mask=mask.expand(Q_LEN, K_LEN, BATCH))
        for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64):
            assert torch.equal(mha(**x, mask=mask.to(dtype)), full)


def test_a_forbidden_key_has_weight_zero_and_an_allowed_one_has_not(
    device: torch.device,
) -> None:
    mha = build().to(device)
    mask = some_mask().to(device)
    mha(**inputs(device=device), mask=mask)
    assert mha.attn is not None
    assert torch.equal(mha.attn > 0, mask.unsqueeze(-1).expand_as(mha.attn))


def test_future_tokens_cannot_leak(device: torch.device) -> None:
    mha = build().to(device).eval()
    x = torch.randn(Q_LEN, BATCH, D_MODEL, device=device)
    mask = masks.causal(Q_LEN, device=device)
    before = mha(query=x, key=x, value=x, mask=mask)
    for t in range(Q_LEN):
        changed = x.clone()
        changed[t] += 1
        after = mha(query=changed, key=changed, value=changed, mask=mask)
        same = (after == before).all(dim=(1, 2))  # type: ignore[call-overload]
        assert same.tolist() == [i < t for i in range(Q_LEN)]


def test_a_key_bias_changes_nothing_and_a_query_bias_does(device: torch.device) -> None:
    mha = build().to(device, torch.float64).eval()
    x = inputs(device=device, dtype=torch.float64)
    before = mha(**x)
    before.square().sum().backward()
    assert mha.key.linear.bias.grad.abs().max() < 1e-11
    assert mha.query.linear.bias.grad.abs().max() > 1e-3
    with torch.no_grad():
        mha.key.linear.bias += 3
        torch.testing.assert_close(mha(**x), before, rtol=0, atol=1e-12)
        mha.query.linear.bias += 3
        assert not torch.allclose(mha(**x), before, atol=1e-3)


def test_the_output_bias_can_hold_the_value_bias(device: torch.device) -> None:
    mha = build().to(device, torch.float64).eval()
    x = inputs(device=device, dtype=torch.float64)
    mask = some_mask().to(device)
    before = mha(**x, mask=mask)
    with torch.no_grad():
        mha.output.bias += mha.output.weight @ mha.value.linear.bias
        mha.value.linear.bias.zero_()
    torch.testing.assert_close(mha(**x, mask=mask), before, rtol=0, atol=1e-12)


def test_bias_governs_query_and_key_only() -> None:
    names = MultiHeadAttention(HEADS, D_MODEL, bias=False).state_dict().keys()
    assert sorted(names) == [
        "key.linear.weight",
        "output.bias",
        "output.weight",
        "query.linear.weight",
        "value.linear.bias",
        "value.linear.weight",
    ]


@pytest.mark.parametrize(("bias", "count"), [(True, 1_050_624), (False, 1_049_600)])
def test_parameters_are_as_many_as_in_the_original(bias: bool, count: int) -> None:
    mha = MultiHeadAttention(8, 512, bias=bias)
    assert sum(p.numel() for p in mha.parameters()) == count


def test_a_checkpoint_of_the_original_loads_strictly() -> None:
    # The original's layers, in its order of construction; it has no other state.
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("query.linear", "key.linear", "value.linear", "output"):
        shapes |= {f"{name}.weight": (D_MODEL, D_MODEL), f"{name}.bias": (D_MODEL,)}
    checkpoint = {name: torch.randn(shape) for name, shape in shapes.items()}
    mha = MultiHeadAttention(HEADS, D_MODEL)
    mha.load_state_dict(checkpoint, strict=True)
    assert list(mha.state_dict()) == list(checkpoint)


# Dropout and the weights that are kept


def test_dropout_acts_on_the_weights_and_only_in_training(device: torch.device) -> None:
    mha = build(dropout_prob=0.5).to(device)
    x = inputs(device=device)
    first, second = mha(**x), mha(**x)
    assert not torch.equal(first, second)
    mha.eval()
    assert torch.equal(mha(**x), mha(**x))


def test_dropout_leaves_only_biases_where_every_weight_is_dropped(
    device: torch.device,
) -> None:
    mha = build(dropout_prob=1.0).to(device)
    y = mha(**inputs(device=device))
    assert torch.equal(y, mha.output.bias.expand_as(y))


def test_survivors_of_dropout_are_scaled_so_that_the_mean_stays(
    device: torch.device,
) -> None:
    mha = build(dropout_prob=0.3).to(device)
    seen: list[Tensor] = []

    def keep(attn: Tensor, value: Tensor) -> Tensor:
        seen.append(attn)
        return torch.einsum("ijbh,jbhd->ibhd", attn, value)

    mha.apply_weights = keep  # type: ignore[method-assign]
    mha(**inputs(61, 67, device=device))
    assert mha.attn is not None
    survived = seen[0] > 0
    torch.testing.assert_close(seen[0][survived], mha.attn[survived] / 0.7)
    assert abs(survived.float().mean().item() - 0.7) < 0.02  # 24,522 draws: 7 sigma


def test_kept_weights_are_those_before_dropout_and_detached(
    device: torch.device,
) -> None:
    mha = build(dropout_prob=0.5).to(device)
    x = inputs(device=device)
    mha(**x)
    in_training = mha.attn
    assert in_training is not None
    assert in_training.shape == (Q_LEN, K_LEN, BATCH, HEADS)
    assert not in_training.requires_grad
    mha.eval()(**x)
    assert mha.attn is not None
    assert torch.equal(in_training, mha.attn)


def test_kept_weights_stay_out_of_state_pickles_and_copies(
    device: torch.device,
) -> None:
    mha = build().to(device)
    x = inputs(device=device)
    optimizer = torch.optim.SGD(mha.parameters(), lr=0.1)
    mha(**x).square().sum().backward()
    optimizer.step()
    mha.eval()
    expected = mha(**x)

    assert "attn" not in mha.state_dict()
    buffer = io.BytesIO()
    torch.save(mha, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(mha),
        pickle.loads(pickle.dumps(mha)),
        torch.load(buffer, weights_only=False),
    ]
    assert mha.attn is not None
    for twin in copies:
        assert twin.attn is None
        assert torch.equal(twin(**x), expected)


# Rows that may attend to nothing


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_an_empty_row_reads_zero_and_its_gradients_are_finite(
    device: torch.device, dtype: torch.dtype
) -> None:
    mha = build().to(device, dtype)
    mha.dropout.p = 0.0
    x = inputs(device=device, dtype=dtype)
    for tensor in x.values():
        tensor.requires_grad_()
    mask = some_mask().to(device)
    mask[3] = False  # query 3 of every batch item
    mask[:, :, 1] = False  # batch item 1 altogether
    y = mha(**x, mask=mask)
    assert mha.attn is not None
    assert not mha.attn[3].any()
    assert not mha.attn[:, :, 1].any()
    assert torch.equal(y[3], mha.output.bias.expand_as(y[3]))
    assert torch.equal(y[:, 1], mha.output.bias.expand_as(y[:, 1]))

    y.float().square().mean().backward()
    for name, tensor in [*x.items(), *mha.named_parameters()]:
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name


def test_no_step_of_an_empty_row_makes_nan_on_the_way_back(
    device: torch.device,
) -> None:
    # A NaN that a later step happens to drop still stops whoever looks for the first.
    mha = build().to(device)
    mask = some_mask().to(device)
    mask[3] = False
    with torch.autograd.set_detect_anomaly(True):
        mha(**inputs(device=device), mask=mask).square().sum().backward()


@pytest.mark.parametrize(
    ("dtype", "score"), [(torch.float32, -1e30), (torch.float16, -60_000)], ids=str
)
def test_no_true_score_is_so_low_that_a_forbidden_key_wins(
    device: torch.device, dtype: torch.dtype, score: float
) -> None:
    scores = torch.tensor([score, 5.0], dtype=dtype, device=device).view(1, 2, 1, 1)
    mask = torch.tensor([True, False], device=device).view(1, 2, 1, 1)
    assert masked_softmax(scores, mask).flatten().tolist() == [1, 0]


def test_not_a_number_in_an_empty_row_stays_there(device: torch.device) -> None:
    scores = torch.randn(Q_LEN, K_LEN, BATCH, HEADS, device=device)
    scores[3] = torch.nan
    scores.requires_grad_()
    mask = torch.ones(Q_LEN, K_LEN, 1, 1, device=device).bool()
    mask[3] = False
    weights = masked_softmax(scores, mask)
    weights.square().sum().backward()
    assert not weights[3].any()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_scores_stay_finite_in_half_precision(
    device: torch.device, dtype: torch.dtype
) -> None:
    mha = MultiHeadAttention(heads=1, d_model=64).to(device, dtype).eval()
    with torch.no_grad():
        for part in (mha.query.linear, mha.key.linear):
            part.weight.copy_(torch.eye(64))
            part.bias.zero_()
    # q · k is 64 · 40 · 40 = 102,400, beyond the end of float16; over √64 it is not.
    assert torch.finfo(torch.float16).max == 65_504
    x = torch.full((Q_LEN, BATCH, 64), 40.0, device=device, dtype=dtype)
    assert mha(query=x, key=x, value=x).isfinite().all()


@pytest.mark.parametrize(
    ("q_len", "k_len", "batch_size"),
    [(0, 7, 3), (5, 0, 3), (5, 7, 0), (0, 0, 3), (0, 0, 0)],
)
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_empty_sequences_and_batches_work_where_torch_accepts_them(
    device: torch.device, q_len: int, k_len: int, batch_size: int, masked: bool
) -> None:
    mha = build().to(device)
    x = inputs(q_len, k_len, batch_size, device=device)
    mask = (
        torch.ones(q_len, k_len, batch_size, device=device).bool() if masked else None
    )
    y = mha(**x, mask=mask)
    expected, _ = torch_twin(mha)(*x.values())
    assert y.shape == expected.shape
    torch.testing.assert_close(y, expected)
    y.sum().backward()


# What it works under


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_whole_and_gives_the_same(device: torch.device, backend: str) -> None:
    if backend == "inductor" and device.type == "cpu" and not shutil.which("g++"):
        pytest.skip("torch.compile needs g++ for the CPU, and there is none here")
    torch.compiler.reset()
    mha = build().to(device).eval()
    fast = torch.compile(mha, backend=backend, fullgraph=True)
    kinds = [some_mask(), None, some_mask().int(), masks.causal(Q_LEN, K_LEN)]
    for mask in kinds if backend == "aot_eager" else kinds[:1]:  # inductor takes 10 s
        x = inputs(device=device)
        for tensor in x.values():
            tensor.requires_grad_()
        mask = mask if mask is None else mask.to(device)
        expected = mha(**x, mask=mask)
        gradients = torch.autograd.grad(expected.square().sum(), list(x.values()))
        output = fast(**x, mask=mask)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(
            torch.autograd.grad(output.square().sum(), list(x.values())),
            gradients,
            rtol=1e-4,
            atol=1e-4,
        )
        torch.testing.assert_close(mha.attn.sum(1), torch.ones_like(mha.attn.sum(1)))


def test_compiles_at_most_twice_for_all_lengths(device: torch.device) -> None:
    torch.compiler.reset()
    mha = build().to(device).eval()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast = torch.compile(mha, backend=counter, fullgraph=True)
    for q_len in range(4, 9):
        x = inputs(q_len, q_len, device=device)
        mask = masks.causal(q_len, device=device)
        torch.testing.assert_close(fast(**x, mask=mask), mha(**x, mask=mask))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_exports_with_dynamic_lengths_and_batch(
    device: torch.device, strict: bool
) -> None:
    mha = build().to(device).eval()
    q_len, k_len, batch = (
        torch.export.Dim(n, min=2) for n in ("q_len", "k_len", "batch")
    )
    dynamic = {
        "query": {0: q_len, 1: batch},
        "key": {0: k_len, 1: batch},
        "value": {0: k_len, 1: batch},
        "mask": {0: q_len, 1: k_len, 2: batch},
    }
    x = inputs(device=device) | {"mask": some_mask().to(device)}
    program = torch.export.export(
        mha, args=(), kwargs=x, dynamic_shapes=dynamic, strict=strict
    )
    other = inputs(11, 13, 17, device=device) | {
        "mask": some_mask(11, 13, 17).to(device)
    }
    torch.testing.assert_close(program.module()(**other), mha(**other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_half_and_stays_close(
    device: torch.device, dtype: torch.dtype
) -> None:
    mha = build().to(device).eval()
    x = inputs(device=device)
    mask = some_mask().to(device)
    expected = mha(**x, mask=mask)
    with torch.autocast(device.type, dtype=dtype):
        output = mha(**x, mask=mask)
        mixed = mha(**x | {"query": x["query"].to(dtype)}, mask=mask)
    assert output.dtype == mixed.dtype == dtype
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.3)
    torch.testing.assert_close(mixed.float(), expected, rtol=0.05, atol=0.3)


def test_first_and_second_derivatives_are_those_of_finite_differences(
    device: torch.device,
) -> None:
    mha = build(heads=2, d_k=3).to(device, torch.float64).eval()
    mask = some_mask(2, 3, 1).to(device)
    mask[1] = False

    def f(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return mha(query=query, key=key, value=value, mask=mask)  # type: ignore[no-any-return]

    options = {"dtype": torch.float64, "device": device, "requires_grad": True}
    x = tuple(torch.randn(n, 1, 6, **options) for n in (2, 3, 3))
    assert torch.autograd.gradcheck(f, x)
    assert torch.autograd.gradgradcheck(f, x)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_vmap_gives_what_a_loop_gives(device: torch.device, dtype: torch.dtype) -> None:
    mha = build().to(device).eval()
    x = [inputs(device=device) for _ in range(2)]
    mask = torch.stack([some_mask(), some_mask()]).to(device, dtype)
    stacked = {name: torch.stack([one[name] for one in x]) for name in x[0]}
    outputs = torch.func.vmap(lambda kw, mask: mha(**kw, mask=mask))(stacked, mask)
    for one, m, output in zip(x, mask, outputs, strict=True):
        torch.testing.assert_close(output, mha(**one, mask=m))


def test_inputs_masks_and_parameters_are_left_alone(device: torch.device) -> None:
    mha = build().to(device)
    # Views of larger tensors: writing through them would be seen too.
    x = {n: t.mT.contiguous().mT for n, t in inputs(device=device).items()}
    x["mask"] = (torch.rand(1, K_LEN, 1, device=device) < 0.6).expand(Q_LEN, -1, BATCH)
    before = {name: t.clone() for name, t in [*x.items(), *mha.state_dict().items()]}
    mha(**x).sum().backward()
    for name, tensor in [*x.items(), *mha.state_dict().items()]:
        assert torch.equal(tensor, before[name]), name


# What it refuses

ONES = torch.ones(Q_LEN, K_LEN, BATCH)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"heads": 10, "d_model": 512},
            ValueError,
            "`d_model` (=512) must be divisible by `heads` (=10); 8 and 16 would do",
        ),
        (
            {"heads": 512, "d_model": 8},
            ValueError,
            "`d_model` (=8) must be divisible by `heads` (=512); 8 would do",
        ),
        (
            {"heads": 0, "d_model": 8},
            ValueError,
            "`heads` (=0) must be an int from 1 up",
        ),
        (
            {"heads": 2, "d_model": -4},
            ValueError,
            "`d_model` (=-4) must be an int from 1 up",
        ),
        (
            {"heads": 2.0, "d_model": 8},
            ValueError,
            "`heads` (=2.0) must be an int from 1 up",
        ),
        (
            {"heads": True, "d_model": 8},
            ValueError,
            "`heads` (=True) must be an int from 1 up",
        ),
        (
            {"heads": 2, "d_model": 8, "dropout_prob": "0.1"},
            ValueError,
            "`dropout_prob` (='0.1') must lie between 0 and 1",
        ),
        (
            {"heads": 2, "d_model": 8, "dropout_prob": 1.5},
            ValueError,
            "`dropout_prob` (=1.5) must lie between 0 and 1",
        ),
    ],
)
def test_impossible_settings_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        MultiHeadAttention(**arguments)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"key": torch.randn(K_LEN, BATCH, 13)},
            ValueError,
            "`key` has shape [7, 3, 13], not [seq_len, batch_size, d_model (=22)]; a "
            "lone sequence needs `key.unsqueeze(1)`",
        ),
        (
            {"query": torch.randn(Q_LEN, D_MODEL)},
            ValueError,
            "`query` has shape [5, 22], not [seq_len, batch_size, d_model (=22)]; a "
            "lone sequence needs `query.unsqueeze(1)`",
        ),
        (
            {"key": torch.randn(K_LEN, 1, D_MODEL)},
            ValueError,
            "`key` has batch size 1, but `query` has 3; share one sequence with "
            "`key.expand`, turn batch-first data with `key.transpose(0, 1)`",
        ),
        (
            {"value": torch.randn(K_LEN, 11, D_MODEL)},
            ValueError,
            "`value` has batch size 11, but `query` has 3; share one sequence with "
            "`value.expand`, turn batch-first data with `value.transpose(0, 1)`",
        ),
        (
            {"value": torch.randn(1, BATCH, D_MODEL)},
            ValueError,
            "`value` has length 1, `key` 7; make them equal",
        ),
        (
            {"value": torch.randn(K_LEN, BATCH, D_MODEL).double()},
            TypeError,
            "`value` is torch.float64, the module torch.float32; use "
            "`value.to(torch.float32)`, or give the module its dtype",
        ),
        (
            {"query": torch.ones(Q_LEN, BATCH, D_MODEL).long()},
            TypeError,
            "`query` is torch.int64, the module torch.float32; use "
            "`query.to(torch.float32)`, or give the module its dtype",
        ),
        (
            {"key": torch.randn(K_LEN, BATCH, D_MODEL, device="meta")},
            ValueError,
            "`key` is on meta, the module on cpu; use `key.to('cpu')`",
        ),
        (
            {"value": torch.randn(K_LEN, BATCH, D_MODEL).to_sparse()},
            TypeError,
            "`value` is sparse, nested or quantised; pass a dense one",
        ),
        (
            {"key": None},
            TypeError,
            "`key` must be a tensor, but is a NoneType",
        ),
        (
            {"mask": (ONES * 2).to(torch.uint16)},
            ValueError,
            "`mask` holds 2 to 2, not 0/1; write `mask == 1`",
        ),
        (
            {"query": [[[0.0]]]},
            TypeError,
            "`query` must be a tensor, but is a list",
        ),
        (
            {"mask": ONES},
            TypeError,
            "`mask` is torch.float32, not bool or integer 0/1 with 1 for 'may attend'; "
            "use `mask.bool()` for 0 and 1, `masks.from_additive(mask)` for 0 and -inf",
        ),
        (
            {"mask": ONES[..., 0].bool()},
            ValueError,
            "`mask` has shape [5, 7], not [q_len or 1, k_len, batch_size or 1] = "
            "[5 or 1, 7, 3 or 1]; a [q_len, k_len] mask needs `mask.unsqueeze(-1)`",
        ),
        (
            {"mask": ONES.bool().transpose(0, 1)},
            ValueError,
            "`mask` has shape [7, 5, 3], not [q_len or 1, k_len, batch_size or 1] = "
            "[5 or 1, 7, 3 or 1]; a [q_len, k_len] mask needs `mask.unsqueeze(-1)`",
        ),
        (
            {"mask": ONES[:, :1].bool()},
            ValueError,
            "`mask` has shape [5, 1, 3], not [q_len or 1, k_len, batch_size or 1] = "
            "[5 or 1, 7, 3 or 1]; a [q_len, k_len] mask needs `mask.unsqueeze(-1)`",
        ),
        (
            {"mask": ONES.bool()[..., None]},
            ValueError,
            "`mask` has shape [5, 7, 3, 1], not [q_len or 1, k_len, batch_size or 1] = "
            "[5 or 1, 7, 3 or 1]; a [q_len, k_len] mask needs `mask.unsqueeze(-1)`",
        ),
        (
            {"mask": ONES.int() * -10_000},
            ValueError,
            "`mask` holds -10000 to -10000, not 0/1; write `mask == 1`",
        ),
        (
            {"mask": ONES.bool().to("meta")},
            ValueError,
            "`mask` is on meta, the module on cpu; use `mask.to('cpu')`",
        ),
        (
            {"mask": ONES.bool().tolist()},
            TypeError,
            "`mask` must be a tensor, but is a list",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    mha = build()
    worked: list[nn.Module] = []
    for module in mha.modules():
        module.register_forward_hook(lambda module, *_: worked.append(module))
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        mha(**inputs() | changed)
    assert not worked


def test_autocast_excuses_no_double_which_it_does_not_cast() -> None:
    x = inputs() | {"key": torch.randn(K_LEN, BATCH, D_MODEL).double()}
    with torch.autocast("cpu"), pytest.raises(TypeError, match="`key` is"):
        build()(**x)
    with torch.autocast("cpu"), pytest.raises(TypeError, match="`query` is"):
        build().double()(**inputs())


def test_what_does_not_fit_is_refused_by_the_split_into_heads() -> None:
    message = "`d_k` (=0) must be an int from 1 up"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PrepareForMultiHeadAttention(D_MODEL, HEADS, 0, bias=True)
    message = "`x` must be a tensor, but is a list"
    with pytest.raises(TypeError, match=f"^{message}$"):
        PrepareForMultiHeadAttention(D_MODEL, HEADS, D_K, bias=True)([0.0])
    prepare = PrepareForMultiHeadAttention(D_MODEL, HEADS, D_K, bias=True)
    message = "`x` has shape [3, 13], not [..., d_model (=22)]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        prepare(torch.randn(3, 13))


def test_shapes_can_be_found_without_any_data() -> None:
    mha = build().to("meta")
    for mask in (some_mask().to("meta"), some_mask().int().to("meta")):
        y = mha(**inputs(device="meta"), mask=mask)
        assert y.shape == (Q_LEN, BATCH, D_MODEL)


def test_arguments_are_keyword_only() -> None:
    x = inputs()
    with pytest.raises(TypeError, match="positional argument"):
        build()(*x.values())


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_a_key_that_no_query_may_read_may_hold_anything(
    device: torch.device, junk: float
) -> None:
    mha = MultiHeadAttention(heads=3, d_model=15, dropout_prob=0).to(device)
    query = torch.randn(2, 5, 15, device=device)
    clean = torch.randn(7, 5, 15, device=device)
    mask = torch.ones(2, 7, 5, dtype=torch.bool, device=device)
    mask[:, 4:, 1] = False
    mask[0, 2] = False  # one query may not, the other may: this key counts
    dirty = clean.clone()
    dirty[4:, 1] = junk
    results = []
    for memory in (clean, dirty):
        mha.zero_grad()
        output = mha(query=query, key=memory, value=memory, mask=mask)
        output.square().sum().backward()
        results.append([output, *(p.grad for p in mha.parameters())])
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert dirty[4:, 1].isfinite().sum() == 0  # the caller's tensor is as it was
