"""Batch first, weights returned: what it computes and what it refuses."""

import copy
import math
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import oracle
from headnotes.implementations.batch_first import MultiHeadAttention, masked_softmax

# Prime and pairwise distinct, so that no swapped pair of axes can pass unseen.
Q_LEN, K_LEN, BATCH, HEADS, D_KEY = 5, 7, 3, 2, 11
D_MODEL = HEADS * D_KEY


def build(
    n_heads: int = HEADS, d_key: int = D_KEY, dropout: float = 0.0
) -> MultiHeadAttention:
    """A module whose rows of attention differ: weights well above the usual scale."""
    mha = MultiHeadAttention(n_heads * d_key, n_heads, dropout)
    with torch.no_grad():
        for parameter in mha.parameters():
            parameter.copy_(torch.randn_like(parameter) / (n_heads * d_key) ** 0.25)
    return mha


def inputs(
    q_len: int = Q_LEN,
    k_len: int = K_LEN,
    batch_size: int = BATCH,
    d_model: int = D_MODEL,
    **like: Any,
) -> list[Tensor]:
    """Random query, key and value."""
    return [torch.randn(batch_size, n, d_model, **like) for n in (q_len, k_len, k_len)]


def some_mask(*shape: int) -> Tensor:
    """A random mask without empty rows, for each item, head, query and key."""
    mask = torch.rand(shape or (BATCH, HEADS, Q_LEN, K_LEN)) < 0.6
    mask[..., 0] = True
    return mask


MASKS = pytest.mark.parametrize(
    "shape",
    [
        None,
        (Q_LEN, K_LEN),
        (1, 1, 1, K_LEN),
        (BATCH, 1, 1, K_LEN),
        (BATCH, 1, Q_LEN, K_LEN),
        (1, HEADS, Q_LEN, K_LEN),
        (BATCH, HEADS, Q_LEN, K_LEN),
    ],
    ids=str,
)


def torch_twin(mha: MultiHeadAttention) -> nn.MultiheadAttention:
    """PyTorch's own module, holding the same weights."""
    weight = mha.Wo.weight
    like = {"dtype": weight.dtype, "device": weight.device}
    twin = nn.MultiheadAttention(mha.d_model, mha.n_heads, batch_first=True, **like)
    parts = [mha.Wq, mha.Wk, mha.Wv]
    twin.load_state_dict(
        {
            "in_proj_weight": torch.cat([part.weight for part in parts]),
            "in_proj_bias": torch.cat([part.bias for part in parts]),
            "out_proj.weight": weight,
            "out_proj.bias": mha.Wo.bias,
        }
    )
    return twin.eval()


# What it computes


@pytest.mark.parametrize(
    "shape", [None, (Q_LEN, K_LEN), (BATCH, 1, Q_LEN, K_LEN)], ids=str
)
def test_output_and_weights_are_those_of_the_loops(
    device: torch.device, shape: tuple[int, ...] | None
) -> None:
    mha = build().to(device, torch.float64).eval()
    x = inputs(dtype=torch.float64, device=device)
    mask = None
    keep = torch.ones(BATCH, Q_LEN, K_LEN).bool()
    if shape is not None:
        mask = torch.rand(shape, device=device) < 0.5
        mask[..., 2, :] = False  # an empty row
        keep = mask.cpu().expand(BATCH, 1, Q_LEN, K_LEN)[:, 0]
    parameters = {
        name: (layer.weight.tolist(), layer.bias.tolist())
        for name, layer in (
            ("query", mha.Wq),
            ("key", mha.Wk),
            ("value", mha.Wv),
            ("output", mha.Wo),
        )
    }
    lists = [t.transpose(0, 1).tolist() for t in x]  # the oracle is sequence first
    expected, weights = (
        torch.tensor(result, dtype=torch.float64, device=device)
        for result in oracle.attention(
            *lists, keep.permute(1, 2, 0).tolist(), parameters, HEADS
        )
    )
    output, attn_probs = mha(*x, mask)
    torch.testing.assert_close(output, expected.transpose(0, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        attn_probs, weights.permute(2, 3, 0, 1), rtol=0, atol=1e-12
    )


@MASKS
def test_output_weights_and_gradients_are_those_of_torch_under_the_same_weights(
    device: torch.device, shape: tuple[int, ...] | None
) -> None:
    mha = build().to(device, torch.float64).eval()
    twin = torch_twin(mha)
    ours = inputs(dtype=torch.float64, device=device)
    theirs = [x.clone() for x in ours]
    for x in [*ours, *theirs]:
        x.requires_grad_()
    mask = None if shape is None else some_mask(*shape).to(device)
    blocked = None
    if mask is not None:
        blocked = ~mask.expand(BATCH, HEADS, Q_LEN, K_LEN).flatten(0, 1)

    output, attn_probs = mha(*ours, mask)
    expected, weights = twin(*theirs, attn_mask=blocked, average_attn_weights=False)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(attn_probs, weights, rtol=0, atol=1e-12)

    # The weights are returned with their graph, so that a loss may speak of them.
    upstream, on_weights = torch.randn_like(output), torch.randn_like(weights)
    torch.autograd.backward((output, attn_probs), (upstream, on_weights))
    torch.autograd.backward((expected, weights), (upstream, on_weights))
    parts = [mha.Wq, mha.Wk, mha.Wv]
    pairs = [(x.grad, t.grad) for x, t in zip(ours, theirs, strict=True)]
    pairs += [
        (torch.cat([p.weight.grad for p in parts]), twin.in_proj_weight.grad),
        (torch.cat([p.bias.grad for p in parts]), twin.in_proj_bias.grad),
        (mha.Wo.weight.grad, twin.out_proj.weight.grad),
        (mha.Wo.bias.grad, twin.out_proj.bias.grad),
    ]
    for our, their in pairs:
        torch.testing.assert_close(our, their, rtol=0, atol=1e-12)


def test_inputs_of_ones_cannot_see_a_mask_and_ours_can(device: torch.device) -> None:
    # All keys are alike, so that any mean of their values is the same.
    mha = build().to(device).eval()
    mask = some_mask().to(device)
    x = [torch.ones_like(x) for x in inputs(device=device)]
    torch.testing.assert_close(mha(*x, mask)[0], mha(*x)[0])
    x = inputs(device=device)
    assert (mha(*x, mask)[0] - mha(*x)[0]).abs().max() > 0.1


def test_a_forbidden_key_has_weight_zero_and_an_allowed_one_has_not(
    device: torch.device,
) -> None:
    mask = some_mask().to(device)
    _, attn_probs = build().to(device)(*inputs(device=device), mask)
    assert torch.equal(attn_probs > 0, mask)


def test_a_mask_means_the_same_in_every_dtype(device: torch.device) -> None:
    mha = build().to(device)
    x, mask = inputs(device=device), some_mask().to(device)
    expected = mha(*x, mask)[0]
    for dtype in (torch.uint8, torch.int32, torch.int64):
        assert torch.equal(mha(*x, mask.to(dtype))[0], expected)


def test_as_many_heads_as_items_leave_no_doubt_whose_a_mask_is(
    device: torch.device,
) -> None:
    # The original read a mask for each item as one for each head, without a word.
    x = inputs(batch_size=HEADS, device=device)
    mask = some_mask(HEADS, Q_LEN, K_LEN).to(device)
    mha = build().to(device)
    with pytest.raises(ValueError, match="one for each batch item, or each head"):
        mha(*x, mask)
    per_item, per_head = mha(*x, mask.unsqueeze(1))[1], mha(*x, mask.unsqueeze(0))[1]
    for n in range(HEADS):
        assert torch.equal(per_item[n] > 0, mask[n].expand(HEADS, -1, -1))
        assert torch.equal(per_head[:, n] > 0, mask[n].expand(HEADS, -1, -1))


def test_future_tokens_cannot_leak(device: torch.device) -> None:
    mha = build().to(device)
    x = torch.randn(BATCH, Q_LEN, D_MODEL, device=device)
    causal = torch.ones(Q_LEN, Q_LEN, device=device).tril().bool()
    before, _ = mha(x, x, x, causal)
    for t in range(Q_LEN):
        changed = x.clone()
        changed[:, t] += 1
        after, _ = mha(changed, changed, changed, causal)
        same = (after == before).all(dim=2).all(dim=0)
        assert same.tolist() == [i < t for i in range(Q_LEN)]


def test_heads_are_blocks_of_the_width_and_splitting_moves_nothing(
    device: torch.device,
) -> None:
    x = torch.randn(BATCH, Q_LEN, D_MODEL, device=device)
    heads = build().split(x)
    assert heads.shape == (BATCH, HEADS, Q_LEN, D_KEY)
    assert heads.data_ptr() == x.data_ptr()
    for h in range(HEADS):
        assert torch.equal(heads[:, h], x[..., h * D_KEY : (h + 1) * D_KEY])


def test_heads_must_divide_the_width_and_need_not_be_even() -> None:
    assert MultiHeadAttention(9, n_heads=3).d_key == 3
    for n_heads in (10, 12):
        with pytest.raises(ValueError, match=r"^`d_model` \(=512\) must be divisible"):
            MultiHeadAttention(512, n_heads)


def test_settings_and_parameters_are_those_of_the_original() -> None:
    mha = MultiHeadAttention()
    assert (mha.d_model, mha.n_heads, mha.d_key) == (512, 8, 64)
    assert isinstance(mha.dropout, nn.Dropout)
    assert mha.dropout.p == 0.1
    assert sum(p.numel() for p in mha.parameters()) == 1_050_624
    names = [f"{n}.{p}" for n in ("Wq", "Wk", "Wv", "Wo") for p in ("weight", "bias")]
    assert list(mha.state_dict()) == names


def test_weights_are_drawn_in_the_order_of_the_original() -> None:
    torch.manual_seed(5)
    twins = [nn.Linear(D_MODEL, D_MODEL) for _ in range(4)]
    torch.manual_seed(5)
    mha = MultiHeadAttention(D_MODEL, HEADS)
    for layer, twin in zip((mha.Wq, mha.Wk, mha.Wv, mha.Wo), twins, strict=True):
        assert torch.equal(layer.weight, twin.weight)
        assert torch.equal(layer.bias, twin.bias)


def test_the_products_cost_the_same_with_any_number_of_heads() -> None:
    x = torch.randn(1, 64, 128)
    for n_heads in (1, 2, 8):
        with FlopCounterMode(display=False) as counter:
            MultiHeadAttention(128, n_heads)(x, x, x)
        assert counter.get_total_flops() == 10_485_760


# Dropout and what is returned


def test_dropout_acts_on_the_output_in_training_and_never_on_what_is_returned(
    device: torch.device,
) -> None:
    mha = build(dropout=0.5).to(device)
    x = inputs(device=device)
    (one, in_training), (two, again) = mha(*x), mha(*x)
    assert not torch.equal(one, two)
    assert torch.equal(in_training, again)
    torch.testing.assert_close(in_training.sum(-1), torch.ones_like(again[..., 0]))
    mha.eval()
    (one, in_eval), (two, _) = mha(*x), mha(*x)
    assert torch.equal(one, two)
    assert torch.equal(in_eval, in_training)


def test_dropout_leaves_only_the_bias_where_every_weight_is_dropped(
    device: torch.device,
) -> None:
    mha = build(dropout=1.0).to(device)
    output, _ = mha(*inputs(device=device))
    assert torch.equal(output, mha.Wo.bias.expand_as(output))


def test_copies_after_a_training_forward_compute_the_same(device: torch.device) -> None:
    mha = build().to(device)
    x = inputs(device=device)
    expected, _ = mha(*x)
    expected.sum().backward()
    for twin in (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha))):
        assert torch.equal(twin(*x)[0], expected)


# Rows that may attend to nothing


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_an_empty_row_reads_zero_and_its_gradients_are_finite(
    device: torch.device, dtype: torch.dtype
) -> None:
    # The original reads all keys alike; in float16 its mask raises.
    mha = build().to(device, dtype)
    x = inputs(dtype=dtype, device=device)
    for tensor in x:
        tensor.requires_grad_()
    mask = some_mask(BATCH, 1, Q_LEN, K_LEN).to(device)
    mask[1], mask[2, :, 3] = False, False  # item 1 altogether, and query 3 of item 2
    with torch.autograd.set_detect_anomaly(True):
        output, attn_probs = mha(*x, mask)
        output.float().square().mean().backward()
    assert not attn_probs[1].any()
    assert not attn_probs[2, :, 3].any()
    assert not attn_probs.masked_select(~mask).any()
    assert torch.equal(attn_probs.sum(-1) > 0, mask.any(-1).expand(-1, HEADS, -1))
    assert torch.equal(output[1], mha.Wo.bias.expand_as(output[1]))
    assert torch.equal(output[2, 3], mha.Wo.bias)
    for name, tensor in [*enumerate(x), *mha.named_parameters()]:
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name


@pytest.mark.parametrize(
    ("dtype", "score"),
    [(torch.float32, -1e30), (torch.float16, -60_000), (torch.float32, -2e6)],
    ids=str,
)
def test_no_true_score_is_so_low_that_a_forbidden_key_wins(
    device: torch.device, dtype: torch.dtype, score: float
) -> None:
    scores = torch.tensor([score, 5.0], dtype=dtype, device=device).view(1, 1, 1, 2)
    mask = torch.tensor([[True, False]], device=device)
    assert masked_softmax(scores, mask).flatten().tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_scores_stay_finite_in_half_precision(
    device: torch.device, dtype: torch.dtype
) -> None:
    mha = MultiHeadAttention(64, 1).to(device, dtype).eval()
    with torch.no_grad():
        for layer in (mha.Wq, mha.Wk):
            layer.weight.copy_(torch.eye(64))
            layer.bias.zero_()
    # q · k is 64 · 40 · 40 = 102,400, beyond the end of float16; over √64 it is not.
    x = torch.full((BATCH, Q_LEN, 64), 40.0, dtype=dtype, device=device)
    causal = torch.ones(Q_LEN, Q_LEN, device=device).tril().bool()
    assert all(y.isfinite().all() for y in mha(x, x, x, causal))


@pytest.mark.parametrize(
    ("q_len", "k_len", "batch_size"), [(0, 7, 3), (5, 0, 3), (5, 7, 0), (0, 0, 0)]
)
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_empty_sequences_and_batches_work(
    device: torch.device, q_len: int, k_len: int, batch_size: int, masked: bool
) -> None:
    mha = build().to(device)
    x = inputs(q_len, k_len, batch_size, device=device)
    mask = torch.ones(q_len, k_len, device=device).bool() if masked else None
    output, attn_probs = mha(*x, mask)
    assert output.shape == (batch_size, q_len, D_MODEL)
    assert attn_probs.shape == (batch_size, HEADS, q_len, k_len)
    if not k_len:
        assert torch.equal(output, mha.Wo.bias.expand_as(output))
    output.sum().backward()


# What it works under


def test_compiles_whole_and_gives_the_same(device: torch.device) -> None:
    torch.compiler.reset()
    mha = build().to(device)
    fast = torch.compile(mha, backend="aot_eager", fullgraph=True)
    x = inputs(device=device)
    for mask in (some_mask(), some_mask(Q_LEN, K_LEN).int(), some_mask() & False, None):
        mask = mask if mask is None else mask.to(device)
        torch.testing.assert_close(fast(*x, mask), mha(*x, mask))


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_exports_with_dynamic_lengths_and_batch(
    device: torch.device, strict: bool
) -> None:
    mha = build().to(device).eval()
    q_len, k_len, batch = (
        torch.export.Dim(n, min=2) for n in ("q_len", "k_len", "batch")
    )
    memory = {0: batch, 1: k_len}
    program = torch.export.export(
        mha,
        (*inputs(device=device), some_mask().to(device)),
        dynamic_shapes=(
            {0: batch, 1: q_len},
            memory,
            memory,
            {0: batch, 2: q_len, 3: k_len},
        ),
        strict=strict,
    )
    other = [
        *inputs(11, 13, 17, device=device),
        some_mask(17, HEADS, 11, 13).to(device),
    ]
    torch.testing.assert_close(program.module()(*other), mha(*other))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_vmap_gives_what_a_loop_gives(device: torch.device, dtype: torch.dtype) -> None:
    mha = build().to(device)
    x = [torch.stack([t, t.roll(1)]) for t in inputs(device=device)]
    mask = torch.stack([some_mask(), some_mask()]).to(device, dtype)
    output, attn_probs = torch.func.vmap(mha)(*x, mask)
    for n in range(2):
        expected = mha(*(t[n] for t in x), mask[n])
        torch.testing.assert_close((output[n], attn_probs[n]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_half_and_stays_close(
    device: torch.device, dtype: torch.dtype
) -> None:
    mha = build().to(device)
    x, mask = inputs(device=device), some_mask().to(device)
    expected, _ = mha(*x, mask)
    with torch.autocast(device.type, dtype=dtype):
        output, _ = mha(*x, mask)
        mixed, _ = mha(x[0].to(dtype), *x[1:], mask)
    assert output.dtype == mixed.dtype == dtype
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.3)
    torch.testing.assert_close(mixed.float(), expected, rtol=0.05, atol=0.3)


def test_first_and_second_derivatives_are_those_of_finite_differences(
    device: torch.device,
) -> None:
    mha = build(2, 3).to(device, torch.float64)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]], device=device)
    x = inputs(2, 3, 1, 6, dtype=torch.float64, device=device)
    for tensor in x:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: mha(*x, mask), x)
    assert torch.autograd.gradgradcheck(lambda *x: mha(*x, mask), x)


def test_shapes_can_be_found_without_any_data() -> None:
    mha = build().to("meta")
    for mask in (some_mask(), some_mask().int()):
        output, attn_probs = mha(*inputs(device="meta"), mask.to("meta"))
        assert output.shape == (BATCH, Q_LEN, D_MODEL)
        assert attn_probs.shape == (BATCH, HEADS, Q_LEN, K_LEN)


def test_inputs_masks_and_parameters_are_left_alone(device: torch.device) -> None:
    mha = build().to(device)
    # Views of larger tensors: writing through them would be seen too.
    x = [t.mT.contiguous().mT for t in inputs(device=device)]
    mask = some_mask(1, 1, 1, K_LEN).to(device).expand(BATCH, -1, Q_LEN, -1)
    tensors = [*x, mask, *mha.parameters()]
    before = [t.clone() for t in tensors]
    mha(*x, mask)[0].sum().backward()
    for tensor, copied in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copied)


# What it refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"n_heads": 12},
            "`d_model` (=512) must be divisible by `n_heads` (=12); 8 and 16 would do",
        ),
        (
            {"n_heads": 1024},
            "`d_model` (=512) must be divisible by `n_heads` (=1024); 512 would do",
        ),
        ({"n_heads": 0}, "`n_heads` (=0) must be an int from 1 up"),
        ({"d_model": 8.0}, "`d_model` (=8.0) must be an int from 1 up"),
        ({"dropout": -0.1}, "`dropout` (=-0.1) must lie between 0 and 1"),
        ({"dropout": True}, "`dropout` (=True) must lie between 0 and 1"),
    ],
)
def test_impossible_settings_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MultiHeadAttention(**arguments)


FIT = (
    "not [q_len, k_len] = [5, 7] or [batch_size or 1, n_heads or 1, q_len or 1, k_len] "
    "= [3 or 1, 2 or 1, 5 or 1, 7]; a padding mask [batch_size, k_len] needs "
    "`mask[:, None, None]`"
)
CAUSAL = torch.ones(Q_LEN, K_LEN).tril()
ADDITIVE = torch.zeros(Q_LEN, K_LEN).masked_fill(CAUSAL == 0, -math.inf)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"query": torch.randn(Q_LEN, D_MODEL)},
            ValueError,
            "`query` has shape [5, 22], not [batch_size, seq_len, d_model (=22)]; a "
            "lone sequence needs `query.unsqueeze(0)`",
        ),
        (
            {"key": torch.randn(BATCH, K_LEN, 13)},
            ValueError,
            "`key` has shape [3, 7, 13], not [batch_size, seq_len, d_model (=22)]; a "
            "lone sequence needs `key.unsqueeze(0)`",
        ),
        (  # what the original reads as a batch of 3, with twice the queries
            {"query": torch.randn(2 * BATCH, Q_LEN, D_MODEL)},
            ValueError,
            "`key` has batch size 3, but `query` has 6; share one sequence with "
            "`key.expand`, turn sequence-first data with `key.transpose(0, 1)`",
        ),
        (
            {"value": torch.randn(1, K_LEN, D_MODEL)},
            ValueError,
            "`value` has batch size 1, but `query` has 3; share one sequence with "
            "`value.expand`, turn sequence-first data with `value.transpose(0, 1)`",
        ),
        (
            {"value": torch.randn(BATCH, 1, D_MODEL)},
            ValueError,
            "`value` has length 1, `key` 7; make them equal",
        ),
        (
            {"value": torch.randn(BATCH, K_LEN, D_MODEL).double()},
            TypeError,
            "`value` is torch.float64, the module torch.float32; use "
            "`value.to(torch.float32)`, or give the module its dtype",
        ),
        (
            {"query": torch.ones(BATCH, Q_LEN, D_MODEL).long()},
            TypeError,
            "`query` is torch.int64, the module torch.float32; use "
            "`query.to(torch.float32)`, or give the module its dtype",
        ),
        (
            {"key": torch.randn(BATCH, K_LEN, D_MODEL, device="meta")},
            ValueError,
            "`key` is on meta, the module on cpu; use `key.to('cpu')`",
        ),
        (
            {"value": torch.randn(BATCH, K_LEN, D_MODEL).to_sparse()},
            TypeError,
            "`value` is sparse, nested or quantised; pass a dense one",
        ),
        ({"key": None}, TypeError, "`key` must be a tensor, but is a NoneType"),
        ({"mask": [[True]]}, TypeError, "`mask` must be a tensor, but is a list"),
        (
            {"mask": ADDITIVE},
            TypeError,
            "`mask` is torch.float32, not bool or integer 0/1 with 1 for 'may attend'; "
            "use `mask.bool()` for 0 and 1, `masks.from_additive(mask)` for 0 and -inf",
        ),
        (
            {"mask": some_mask(BATCH, Q_LEN, K_LEN)},
            ValueError,
            "`mask` has shape [3, 5, 7]: one for each batch item, or each head? Say "
            "the first with `mask.unsqueeze(1)`, else `mask.unsqueeze(0)`",
        ),
        (
            {"mask": some_mask(BATCH, K_LEN)},
            ValueError,
            f"`mask` has shape [3, 7], {FIT}",
        ),
        (
            {"mask": some_mask(1, K_LEN)},
            ValueError,
            f"`mask` has shape [1, 7], {FIT}",
        ),
        ({"mask": some_mask(K_LEN)}, ValueError, f"`mask` has shape [7], {FIT}"),
        (
            {"mask": some_mask(BATCH, HEADS, Q_LEN, 1)},
            ValueError,
            f"`mask` has shape [3, 2, 5, 1], {FIT}",
        ),
        (
            {"mask": some_mask(HEADS, BATCH, Q_LEN, K_LEN)},
            ValueError,
            f"`mask` has shape [2, 3, 5, 7], {FIT}",
        ),
        (
            {"mask": some_mask(BATCH, HEADS, K_LEN, K_LEN)},
            ValueError,
            f"`mask` has shape [3, 2, 7, 7], {FIT}",
        ),
        (
            {"mask": some_mask(1, 1, 1, 1, K_LEN)},
            ValueError,
            f"`mask` has shape [1, 1, 1, 1, 7], {FIT}",
        ),
        (
            {"mask": CAUSAL.int() - 1},
            ValueError,
            "`mask` holds -1 to 0, not 0/1; write `mask == 1`",
        ),
        (
            {"mask": CAUSAL.int() * 2},
            ValueError,
            "`mask` holds 0 to 2, not 0/1; write `mask == 1`",
        ),
        (
            {"mask": some_mask().to("meta")},
            ValueError,
            "`mask` is on meta, the module on cpu; use `mask.to('cpu')`",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    mha = build()
    arguments = dict(zip(("query", "key", "value"), inputs(), strict=True))
    worked: list[nn.Module] = []
    for module in mha.modules():
        module.register_forward_hook(lambda module, *_: worked.append(module))
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        mha(**arguments | changed)
    assert not worked


def test_an_axis_for_keys_may_be_1_where_there_is_one_key() -> None:
    mha = build()
    _, attn_probs = mha(*inputs(k_len=1), torch.ones(1, 1, 1, 1).bool())
    assert torch.equal(attn_probs, torch.ones(BATCH, HEADS, Q_LEN, 1))


@pytest.mark.parametrize("junk", [math.nan, math.inf])
@pytest.mark.parametrize("axes", [2, 4])
def test_a_key_that_no_query_may_read_may_hold_anything(
    device: torch.device, axes: int, junk: float
) -> None:
    mha = build().to(device)
    query, clean, _ = inputs(device=device)
    mask = torch.ones(BATCH, 1, Q_LEN, K_LEN, dtype=torch.bool, device=device)
    mask[:, :, :, 4:] = False
    mask[:, :, 0, 2] = False  # one query may not, the others may: this key counts
    mask = mask[0, 0] if axes == 2 else mask
    dirty = clean.clone()
    dirty[:, 4:] = junk
    results = []
    for memory in (clean, dirty):
        mha.zero_grad()
        output, _ = mha(query, memory, memory, mask)
        output.square().sum().backward()
        results.append([output, *(p.grad for p in mha.parameters())])
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=0, atol=0)
