"""The four stages: what each computes, adds, corrects and refuses."""

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
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
every_stage = pytest.mark.parametrize("stage", list(STAGES))
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


def heads_of(module: nn.Module) -> list[Any]:
    return list(module.heads) if hasattr(module, "heads") else [module]


def matrix(part: nn.Parameter | nn.Linear) -> tuple[Any, Any]:
    """Weight and bias as the oracle wants them: one row for each output."""
    if isinstance(part, nn.Parameter):
        return part.T.tolist(), None
    return part.weight.tolist(), None if part.bias is None else part.bias.tolist()


def by_loops(module: nn.Module, x: Tensor) -> Tensor:
    """The output by the oracle, head by head, with the identity for a projection."""
    batch = x if x.dim() == 3 else x.unsqueeze(0)
    lists = batch.transpose(0, 1).tolist()
    looks_back_only = x.dim() == 3
    length, batch_size = batch.shape[1], batch.shape[0]
    mask = [
        [[j <= i or not looks_back_only] * batch_size for j in range(length)]
        for i in range(length)
    ]
    outputs = []
    for head in heads_of(module):
        parts = {n: matrix(getattr(head, f"W_{n}")) for n in ("query", "key", "value")}
        identity = torch.eye(len(parts["query"][0])).tolist()
        output, _ = oracle.attention(
            lists, lists, lists, mask, {**parts, "output": (identity, None)}, heads=1
        )
        outputs.append(torch.tensor(output, dtype=torch.float64).transpose(0, 1))
    return torch.cat(outputs, dim=-1).view(*x.shape[:-1], -1)


def checkpoint_of_the_original(block_size: int, prefix: str = "") -> dict[str, Tensor]:
    """A causal head as the original stores it: a float32 mask comes first."""
    checkpoint = {prefix + "mask": torch.ones(block_size, block_size).triu(1)}
    for name in ("W_query", "W_key", "W_value"):
        checkpoint[f"{prefix}{name}.weight"] = torch.randn(D_OUT, D_IN)
    return checkpoint


# What each computes


@every_stage
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-12)], ids=str
)
def test_the_output_is_that_of_the_loops(
    device: torch.device, stage: str, dtype: torch.dtype, tolerance: float
) -> None:
    module, x = build(stage, device, dtype=dtype)
    for length in (1, 2, SEQ_LEN):
        part = x[..., :length, :]
        output = module(part)
        assert output.dtype == dtype
        expected = by_loops(module, part)
        torch.testing.assert_close(
            output.double().cpu(), expected, rtol=0, atol=tolerance
        )


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


@every_stage
def test_gradients_are_those_of_finite_differences(
    device: torch.device, stage: str
) -> None:
    module, x = build(stage, device, dtype=torch.float64)
    x = x[..., :3, :].clone().requires_grad_()
    names = [name for name, _ in module.named_parameters()]

    def f(x: Tensor, *parameters: Tensor) -> Any:
        replaced = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, replaced, x)

    assert torch.autograd.gradcheck(f, (x, *module.parameters()), fast_mode=True)
    assert torch.autograd.gradgradcheck(module, x, fast_mode=True)


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


@batched_stages
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_future_tokens_cannot_leak(
    device: torch.device, stage: str, training: bool
) -> None:
    module, x = build(stage, device)
    module.train(training)
    before = module(x)
    for t in range(SEQ_LEN):
        changed = x.clone()
        changed[:, t] += 1
        same = (module(changed) == before).all(dim=2).all(dim=0)
        assert same.tolist() == [i < t for i in range(SEQ_LEN)]


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


@pytest.mark.parametrize("size", [1e3, 1e15])
def test_no_true_score_is_so_low_that_the_future_wins(
    device: torch.device, size: float
) -> None:
    attention = CausalAttention(1, 1, 2, 0.0).to(device)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            parameter.fill_(-1 if name == "W_key.weight" else 1)
    # The first token meets itself with a score of -size², the second with -size.
    x = torch.tensor([[[size], [1.0]]], device=device)
    assert torch.equal(attention(x)[:, 0], x[:, 0])


# The mask, and checkpoints


@pytest.mark.parametrize("block_size", [1, CONTEXT, 1024])
def test_a_checkpoint_of_the_original_loads_strictly_whatever_its_block_size(
    device: torch.device, block_size: int
) -> None:
    attention = CausalAttention(D_IN, D_OUT, CONTEXT, 0.0).to(device)
    wrapper = MultiHeadAttentionWrapper(D_IN, D_OUT, CONTEXT, 0.0, HEADS).to(device)
    single = checkpoint_of_the_original(block_size)
    several: dict[str, Tensor] = {}
    for n in range(HEADS):
        several |= checkpoint_of_the_original(block_size, f"heads.{n}.")
    for module, checkpoint in ((attention, single), (wrapper, several)):
        names = list(checkpoint)
        module.load_state_dict(checkpoint, strict=True)
        assert list(checkpoint) == names
        state = module.state_dict()
        assert list(state) == [name for name in names if "mask" not in name]
        for name, tensor in state.items():
            assert torch.equal(tensor.cpu(), checkpoint[name])
        for head in heads_of(module):
            assert head.mask.dtype == torch.bool
            for i in range(CONTEXT):
                assert head.mask[i].tolist() == [j > i for j in range(CONTEXT)]


@batched_stages
@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
def test_a_module_built_on_meta_gets_its_mask_with_its_weights(
    device: torch.device, stage: str, assign: bool
) -> None:
    module, x = build(stage, device)
    with torch.device("meta"):
        late = STAGES[stage][0]()
    if not assign:
        # What `to_empty` does where zeros have been lying in memory.
        late = late._apply(lambda x: torch.zeros_like(x, device=device))
        pairs = zip(heads_of(late), heads_of(module), strict=True)
        assert all(torch.equal(a.mask, b.mask) for a, b in pairs)
    late.load_state_dict(module.state_dict(), assign=assign)
    assert torch.equal(late(x), module(x))


@every_stage
def test_copies_and_pickles_after_training_give_the_same(
    device: torch.device, stage: str
) -> None:
    module, x = build(stage, device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    module(x).square().mean().backward()
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    fresh = STAGES[stage][0]().to(device)
    fresh.load_state_dict(module.state_dict())
    copies = [
        fresh,
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ]
    for twin in copies:
        assert torch.equal(twin(x), module(x))


# Dropout


@batched_stages
def test_dropout_acts_only_in_training(device: torch.device, stage: str) -> None:
    module, x = build(stage, device)
    for head in heads_of(module):
        head.dropout.p = 0.5
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


@batched_stages
def test_where_every_weight_is_dropped_nothing_is_read(stage: str) -> None:
    settings = (D_IN, D_OUT, CONTEXT, 1.0)
    module = (
        CausalAttention(*settings)
        if stage == "causal"
        else MultiHeadAttentionWrapper(*settings, HEADS)
    )
    assert not module(torch.randn(BATCH, SEQ_LEN, D_IN)).any()


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


# What they work under


@every_stage
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_and_autocast_stay_close(
    device: torch.device, stage: str, dtype: torch.dtype
) -> None:
    module, x = build(stage, device)
    expected = module(x)
    with torch.autocast(device.type, dtype=dtype):
        automatic = module(x)
        mixed = module(x.to(dtype))
    half = module.to(dtype)(x.to(dtype))
    for output in (automatic, mixed, half):
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.3)


@every_stage
def test_large_scores_stay_finite_in_float16(device: torch.device, stage: str) -> None:
    make = {
        "v1": lambda: SelfAttention_v1(64, 64),
        "v2": lambda: SelfAttention_v2(64, 64),
        "causal": lambda: CausalAttention(64, 64, 5, 0.0),
        "wrapper": lambda: MultiHeadAttentionWrapper(64, 64, 5, 0.0, 1),
    }[stage]
    module = make().to(device, torch.float16)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.eye(64))
    # q · k is 64 · 40 · 40 = 102,400, beyond 65,504; over √64 it is not.
    shape = (5, 64) if stage in ("v1", "v2") else (BATCH, 5, 64)
    x = torch.full(shape, 40.0, device=device, dtype=torch.float16)
    assert torch.equal(module(x), x)


@every_stage
def test_compiles_whole_and_gives_the_same(device: torch.device, stage: str) -> None:
    torch.compiler.reset()
    module, x = build(stage, device)
    fast = torch.compile(module, backend="aot_eager", fullgraph=True)
    x.requires_grad_()
    output, expected = fast(x), module(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(
        torch.autograd.grad(output.square().sum(), x),
        torch.autograd.grad(expected.square().sum(), x),
        rtol=1e-4,
        atol=1e-4,
    )


@every_stage
def test_vmap_gives_what_a_loop_gives(device: torch.device, stage: str) -> None:
    module, x = build(stage, device)
    stacked = torch.stack([x, x.flip(-2)])
    expected = torch.stack([module(one) for one in stacked])
    torch.testing.assert_close(torch.vmap(module)(stacked), expected)


@every_stage
def test_empty_sequences_and_batches_work(device: torch.device, stage: str) -> None:
    module, x = build(stage, device)
    width = module(x).shape[-1]
    for empty in (x[..., :0, :], x[:0]):
        y = module(empty)
        assert y.shape == (*empty.shape[:-1], width)
        y.sum().backward()


@every_stage
def test_works_on_meta(stage: str) -> None:
    module, x = build(stage, "meta")
    assert module(x).shape == (*x.shape[:-1], len(heads_of(module)) * D_OUT)


@every_stage
def test_input_and_state_are_left_alone(device: torch.device, stage: str) -> None:
    module, x = build(stage, device)
    # A view of a larger tensor: writing through it would be seen too.
    x = x.mT.contiguous().mT
    everything = {"x": x, **dict(module.named_buffers()), **module.state_dict()}
    before = {name: tensor.clone() for name, tensor in everything.items()}
    module(x).sum().backward()
    for name, tensor in everything.items():
        assert torch.equal(tensor, before[name]), name


# What they refuse


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelfAttention_v1(0, 2), "`d_in` (=0) must be an int from 1 up"),
        (lambda: SelfAttention_v1(3, 2.0), "`d_out` (=2.0) must be an int from 1 up"),  # type: ignore[arg-type]
        (lambda: SelfAttention_v2(-3, 2), "`d_in` (=-3) must be an int from 1 up"),
        (lambda: SelfAttention_v2(3, True), "`d_out` (=True) must be an int from 1 up"),
        (
            lambda: CausalAttention(3, 2, 0, 0.0),
            "`context_length` (=0) must be an int from 1 up",
        ),
        (
            lambda: CausalAttention(3, 2, 6, 1.5),
            "`dropout` (=1.5) must lie between 0 and 1",
        ),
        (
            lambda: CausalAttention(3, 2, 6, "0.1"),  # type: ignore[arg-type]
            "`dropout` (='0.1') must lie between 0 and 1",
        ),
        (
            lambda: MultiHeadAttentionWrapper(3, 2, 6, 0.0, 0),
            "`num_heads` (=0) must be an int from 1 up",
        ),
        (
            lambda: MultiHeadAttentionWrapper(3, 2, 6, 2, 0.0),  # type: ignore[arg-type]
            "`num_heads` (=0.0) must be an int from 1 up",
        ),
        (
            lambda: MultiHeadAttentionWrapper(3, 0, 6, 0.0, 2),
            "`d_out` (=0) must be an int from 1 up",
        ),
    ],
)
def test_impossible_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


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


@batched_stages
def test_more_tokens_than_the_context_length_are_refused(stage: str) -> None:
    module, _ = build(stage)
    x = torch.randn(BATCH, CONTEXT + 2, D_IN)
    message = (
        "`x` has 19 tokens, more than `context_length` (=17); keep the last with "
        "`x[:, -17:]`"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module(x)
    assert module(x[:, -17:]).shape[1] == CONTEXT


@pytest.mark.parametrize("heads", [0, HEADS], ids=["causal", "wrapper"])
def test_a_context_length_of_1_does_not_leak(heads: int) -> None:
    # The original's mask of one zero would broadcast over all scores here.
    module = (
        MultiHeadAttentionWrapper(D_IN, D_OUT, 1, 0.0, heads)
        if heads
        else CausalAttention(D_IN, D_OUT, 1, 0.0)
    )
    x = torch.randn(BATCH, 2, D_IN)
    assert module(x[:, :1]).shape[1] == 1
    message = "`x` has 2 tokens, more than `context_length` (=1)"
    with pytest.raises(ValueError, match=re.escape(message)):
        module(x)


@every_stage
def test_an_input_of_another_kind_is_refused(stage: str) -> None:
    module, x = build(stage)
    way_out = "use `x.to(torch.float32)`, or give the module its dtype"
    cases: list[tuple[Any, type[Exception], str]] = [
        (
            x.double(),
            TypeError,
            f"`x` is torch.float64, the module torch.float32; {way_out}",
        ),
        (
            x.long(),
            TypeError,
            f"`x` is torch.int64, the module torch.float32; {way_out}",
        ),
        (
            x.to("meta"),
            ValueError,
            "`x` is on meta, the module on cpu; use `x.to('cpu')`",
        ),
        (
            x.to_sparse(),
            TypeError,
            "`x` is sparse, nested or quantised; pass a dense one",
        ),
        (x.tolist(), TypeError, "`x` must be a tensor, but is a list"),
    ]
    for wrong, error, message in cases:
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            module(wrong)
    for dtype in (torch.int64, torch.float64):
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(TypeError, match=re.escape(f"`x` is {dtype}, the module")),
        ):
            module(x.to(dtype))
