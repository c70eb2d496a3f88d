"""Batch first, weights returned: what it computes and what it refuses."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headnotes.implementations.batch_first import MultiHeadAttention

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


# What it refuses


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


def test_a_mask_of_two_axes_is_one_for_all_items_and_heads(
    device: torch.device,
) -> None:
    mha = build().to(device)
    query, key, value = inputs(device=device)
    mask = some_mask(Q_LEN, K_LEN).to(device)
    mask[:, 4:], mask[3] = False, False
    expected = mha(query, key, value, mask.expand(BATCH, HEADS, -1, -1))
    key[:, 4:], value[:, 4:] = math.nan, math.inf
    for ours, theirs in zip(mha(query, key, value, mask), expected, strict=True):
        assert torch.equal(ours, theirs)
