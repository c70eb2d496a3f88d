"""The four stages: what each computes, adds, corrects and refuses."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headnotes.implementations import causal
from headnotes.implementations.stages import (
    CausalAttention,
    MultiHeadAttentionWrapper,
    SelfAttention_v1,
    SelfAttention_v2,
)

# Prime and pairwise distinct, so that no swapped pair of axes can pass unseen.
BATCH, SEQ_LEN, D_IN, HEADS, D_OUT, CONTEXT = 3, 7, 13, 2, 11, 17

# Each stage, with all the biases that it can have, and the shape that it takes.
STAGES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "v1": (lambda: SelfAttention_v1(D_IN, D_OUT), (SEQ_LEN, D_IN)),
    "v2": (lambda: SelfAttention_v2(D_IN, D_OUT, True), (SEQ_LEN, D_IN)),
    "causal": (
        lambda: CausalAttention(D_IN, D_OUT, CONTEXT, 0.0, True),
        (BATCH, SEQ_LEN, D_IN),
    ),
    "wrapper": (
        lambda: MultiHeadAttentionWrapper(D_IN, D_OUT, CONTEXT, 0.0, HEADS, True),
        (BATCH, SEQ_LEN, D_IN),
    ),
}
batched_stages = pytest.mark.parametrize("stage", ["causal", "wrapper"])
lone_stages = pytest.mark.parametrize("stage", ["v1", "v2"])


def spread(module: nn.Module) -> Any:
    """The module with weights so large that its rows of attention differ."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / D_IN**0.25)
    return module


def build(stage: str, device: torch.device | str = "cpu", **like: Any) -> Any:
    """A module and an input for it, on `device`."""
    make, shape = STAGES[stage]
    module = spread(make()).to(device=device, **like)
    return module, torch.randn(shape, device=device, **like)


# What each computes


@pytest.mark.parametrize("stage", ["v2", "causal", "wrapper"])
def test_a_missing_bias_is_a_bias_of_zero(stage: str) -> None:
    with_bias, x = build(stage)
    without = {
        "v2": lambda: SelfAttention_v2(D_IN, D_OUT),
        "causal": lambda: CausalAttention(D_IN, D_OUT, CONTEXT, 0.0),
        "wrapper": lambda: MultiHeadAttentionWrapper(D_IN, D_OUT, CONTEXT, 0.0, HEADS),
    }[stage]()
    state = with_bias.state_dict()
    without.load_state_dict({n: t for n, t in state.items() if "bias" not in n})
    assert not torch.allclose(without(x), with_bias(x), atol=1e-3)
    for name, tensor in state.items():
        if "bias" in name:
            tensor.zero_()
    assert torch.equal(without(x), with_bias(x))


@lone_stages
def test_a_token_reads_from_all_tokens_in_the_first_two_stages(
    device: torch.device, stage: str
) -> None:
    module, x = build(stage, device)
    before = module(x)
    for t in range(SEQ_LEN):
        changed = x.clone()
        changed[t] += 1
        assert (module(changed) != before).any(dim=1).all()


# From stage to stage


def test_transposed_matrices_turn_stage_1_into_stage_2(device: torch.device) -> None:
    v1, x = build("v1", device)
    v2 = SelfAttention_v2(D_IN, D_OUT).to(device)
    state = {f"{name}.weight": w.T for name, w in v1.state_dict().items()}
    v2.load_state_dict(state, strict=True)
    torch.testing.assert_close(v2(x), v1(x))


def test_the_first_stages_begin_as_they_say() -> None:
    v1 = SelfAttention_v1(31, 37)
    v2 = SelfAttention_v2(31, 37, qkv_bias=True)
    for parameter in v1.parameters():
        assert parameter.shape == (31, 37)
        assert 0 <= parameter.min() < 0.05 < 0.95 < parameter.max() < 1
    for name, parameter in v2.named_parameters():
        assert parameter.shape == ((37, 31) if "weight" in name else (37,))
        bound = 31**-0.5
        assert -bound <= parameter.min() < -0.8 * bound
        assert 0.8 * bound < parameter.max() <= bound


def test_the_last_token_of_stage_3_reads_as_in_stage_2(device: torch.device) -> None:
    attention, x = build("causal", device)
    v2 = SelfAttention_v2(D_IN, D_OUT, qkv_bias=True).to(device)
    v2.load_state_dict(attention.state_dict())
    expected = torch.stack([v2(sequence)[-1] for sequence in x])
    torch.testing.assert_close(attention(x)[:, -1], expected)


def test_the_wrapper_lays_its_heads_side_by_side(device: torch.device) -> None:
    wrapper, x = build("wrapper", device)
    assert len(wrapper.heads) == HEADS
    expected = torch.cat([head(x) for head in wrapper.heads], dim=2)
    assert wrapper(x).shape == (BATCH, SEQ_LEN, HEADS * D_OUT)
    assert torch.equal(wrapper(x), expected)


def test_stacked_heads_and_an_identity_turn_stage_4_into_the_fifth(
    device: torch.device,
) -> None:
    wrapper, x = build("wrapper", device)
    width = HEADS * D_OUT
    mha = causal.MultiHeadAttention(D_IN, width, CONTEXT, 0.0, HEADS, True).to(device)
    state = {"out_proj.weight": torch.eye(width), "out_proj.bias": torch.zeros(width)}
    for name in ("W_query", "W_key", "W_value"):
        for kind in ("weight", "bias"):
            parts = [getattr(getattr(head, name), kind) for head in wrapper.heads]
            state[f"{name}.{kind}"] = torch.cat(parts)
    mha.load_state_dict(state)
    torch.testing.assert_close(mha(x), wrapper(x))


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_one_seed_gives_the_first_head_of_each_stage_the_same_weights(
    qkv_bias: bool,
) -> None:
    states = []
    for make in (
        lambda: SelfAttention_v2(3, 2, qkv_bias),
        lambda: CausalAttention(3, 2, 6, 0.5, qkv_bias),
        lambda: MultiHeadAttentionWrapper(3, 2, 6, 0.5, 2, qkv_bias).heads[0],
        lambda: causal.MultiHeadAttention(3, 2, 6, 0.5, 1, qkv_bias),
    ):
        torch.manual_seed(123)
        states.append(make().state_dict())
    for state in states:
        for name, tensor in states[0].items():
            assert torch.equal(state[name], tensor)


def test_d_out_is_one_heads_width_in_stage_4_and_all_heads_in_the_fifth() -> None:
    wrapper = MultiHeadAttentionWrapper(3, 2, 6, 0.0, 2)
    mha = causal.MultiHeadAttention(3, 2, 6, 0.0, 2)
    counts = [sum(p.numel() for p in m.parameters()) for m in (wrapper, mha)]
    x = torch.randn(2, 6, 3)
    assert counts == [36, 24]
    assert [wrapper(x).shape[-1], mha(x).shape[-1]] == [4, 2]


def test_minus_infinity_holds_where_renormalising_divides_0_by_0() -> None:
    attention = CausalAttention(1, 1, 2, 0.0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.fill_(1)
    # The scores of the first token are 14 · 14 = 196 and 14 · 28 = 392.
    x = torch.tensor([[[14.0], [28.0]]])
    weights = (x @ x.mT).softmax(-1).tril()
    assert (weights / weights.sum(-1, keepdim=True))[0, 0].isnan().any()
    assert torch.equal(attention(x), x)


# Dropout


def test_survivors_of_dropout_are_divided_by_the_share_that_is_kept(
    device: torch.device,
) -> None:
    attention = spread(CausalAttention(D_IN, D_OUT, 61, 0.5)).to(device)
    seen: list[Tensor] = []
    attention.dropout.register_forward_hook(
        lambda _, inputs, output: seen.extend([inputs[0], output])
    )
    attention(torch.randn(5, 61, D_IN, device=device))
    before, after = seen
    survived = after > 0
    torch.testing.assert_close(after[survived], before[survived] * 2)
    share = survived.sum() / (before > 0).sum()
    assert abs(share.item() - 0.5) < 0.04  # of 9,455 weights: 7 sigma
    assert set(after[:, 0, 0].tolist()) <= {0.0, 2.0}


# What they refuse


@lone_stages
@pytest.mark.parametrize("shape", [(BATCH, SEQ_LEN, D_IN), (D_IN,), (SEQ_LEN, 5)])
def test_the_first_stages_take_one_sequence_only(
    stage: str, shape: tuple[int, ...]
) -> None:
    module, _ = build(stage)
    message = (
        f"`x` has shape {list(shape)}, not [seq_len, d_in (=13)]; a batch needs "
        f"`torch.vmap(module)(x)`"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module(torch.randn(shape))


@lone_stages
def test_a_batch_is_refused_even_where_its_sizes_would_agree(stage: str) -> None:
    # Here `keys.T` would turn round three axes of size 4, and nothing would raise.
    module = {"v1": SelfAttention_v1, "v2": SelfAttention_v2}[stage](4, 4)
    with pytest.raises(ValueError, match=re.escape("`x` has shape [4, 4, 4], not")):
        module(torch.randn(4, 4, 4))


@batched_stages
@pytest.mark.parametrize("shape", [(SEQ_LEN, D_IN), (BATCH, SEQ_LEN, 5)])
def test_the_last_stages_take_batches_only(stage: str, shape: tuple[int, ...]) -> None:
    module, _ = build(stage)
    message = (
        f"`x` has shape {list(shape)}, not [batch_size, seq_len, d_in (=13)]; a lone "
        f"sequence needs `x.unsqueeze(0)`"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module(torch.randn(shape))
