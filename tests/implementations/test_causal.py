"""Causal attention: what it computes, corrects, refuses, and what it works under."""

import ast
import copy
import io
import pickle
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oracle
from headnotes.implementations import causal
from headnotes.implementations.causal import MultiHeadAttention

# Prime and pairwise distinct, so that no swapped pair of axes can pass unseen.
BATCH, SEQ_LEN, D_IN, HEADS, HEAD_DIM, CONTEXT = 3, 7, 13, 2, 11, 17
D_OUT = HEADS * HEAD_DIM


def build(
    d_in: int = D_IN,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    context_length: int = CONTEXT,
    dropout: float = 0.0,
    qkv_bias: bool = True,
) -> MultiHeadAttention:
    """A module whose rows of attention differ: weights well above the usual scale."""
    mha = MultiHeadAttention(
        d_in, heads * head_dim, context_length, dropout, heads, qkv_bias
    )
    with torch.no_grad():
        for parameter in mha.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.25)
    return mha


def by_loops(mha: MultiHeadAttention, x: Tensor) -> Tensor:
    """The output by the oracle, which is sequence first."""
    names = {"query": "W_query", "key": "W_key", "value": "W_value"}
    parameters = {}
    for role, name in {**names, "output": "out_proj"}.items():
        linear = getattr(mha, name)
        bias = None if linear.bias is None else linear.bias.tolist()
        parameters[role] = (linear.weight.tolist(), bias)
    batch_size, seq_len, _ = x.shape
    past = [[[j <= i] * batch_size for j in range(seq_len)] for i in range(seq_len)]
    lists = x.transpose(0, 1).tolist()
    output, _ = oracle.attention(lists, lists, lists, past, parameters, mha.num_heads)
    return torch.tensor(output, dtype=torch.float64).transpose(0, 1)


def weights_seen(mha: MultiHeadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """The weights before and after dropout."""
    seen: list[Tensor] = []
    hook = mha.dropout.register_forward_hook(
        lambda _, inputs, output: seen.extend([inputs[0], output])
    )
    mha(x)
    hook.remove()
    return seen[0], seen[1]


def checkpoint_of_the_original(block_size: int) -> dict[str, Tensor]:
    """Its entries in its order: a float32 mask comes first."""
    checkpoint = {"mask": torch.ones(block_size, block_size).triu(1)}
    for name in ("W_query", "W_key", "W_value"):
        checkpoint[f"{name}.weight"] = torch.randn(D_OUT, D_IN)
    checkpoint["out_proj.weight"] = torch.randn(D_OUT, D_OUT)
    checkpoint["out_proj.bias"] = torch.randn(D_OUT)
    return checkpoint


# What it computes


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_output_is_that_of_the_loops(data: st.DataObject) -> None:
    batch_size, seq_len, d_in, heads, head_dim = (
        data.draw(st.integers(1, 5), label=name)
        for name in ("batch_size", "seq_len", "d_in", "heads", "head_dim")
    )
    spare = data.draw(st.integers(0, 3), label="spare")
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]), label="dtype")
    bias = data.draw(st.booleans(), label="bias")
    torch.manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    mha = build(d_in, heads, head_dim, seq_len + spare, qkv_bias=bias).to(dtype)
    x = torch.randn(batch_size, seq_len, d_in, dtype=dtype)
    output = mha(x)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12  # values reach 10
    assert output.dtype == dtype
    torch.testing.assert_close(
        output.double(), by_loops(mha, x), rtol=0, atol=tolerance
    )


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_output_and_gradients_are_those_of_torch_with_a_causal_mask(
    device: torch.device, qkv_bias: bool
) -> None:
    options = {"dtype": torch.float64, "device": device}
    mha = build(d_in=D_OUT, qkv_bias=qkv_bias).to(**options)
    parts = [mha.W_query, mha.W_key, mha.W_value]
    twin = nn.MultiheadAttention(D_OUT, HEADS, batch_first=True, **options)
    bias = torch.cat([p.bias for p in parts]) if qkv_bias else torch.zeros(3 * D_OUT)
    twin.load_state_dict(
        {
            "in_proj_weight": torch.cat([p.weight for p in parts]),
            "in_proj_bias": bias,
            "out_proj.weight": mha.out_proj.weight,
            "out_proj.bias": mha.out_proj.bias,
        }
    )
    ours = torch.randn(BATCH, SEQ_LEN, D_OUT, **options).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    future = torch.ones(SEQ_LEN, SEQ_LEN, device=device).triu(1).bool()

    output = mha(ours)
    expected, _ = twin(theirs, theirs, theirs, attn_mask=future)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)

    upstream = torch.randn_like(output)
    output.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-11)
    pairs = [
        (torch.cat([p.weight.grad for p in parts]), twin.in_proj_weight.grad),
        (mha.out_proj.weight.grad, twin.out_proj.weight.grad),
        (mha.out_proj.bias.grad, twin.out_proj.bias.grad),
    ]
    if qkv_bias:
        grad = torch.cat([p.bias.grad for p in parts])
        pairs.append((grad, twin.in_proj_bias.grad))
    for our, their in pairs:
        torch.testing.assert_close(our, their, rtol=0, atol=1e-11)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("context_length", [SEQ_LEN, CONTEXT])
def test_future_tokens_cannot_leak(
    device: torch.device, context_length: int, training: bool
) -> None:
    mha = build(context_length=context_length).to(device).train(training)
    x = torch.randn(BATCH, SEQ_LEN, D_IN, device=device)
    before = mha(x)
    for t in range(SEQ_LEN):
        changed = x.clone()
        changed[:, t] += 1
        same = (mha(changed) == before).all(dim=2).all(dim=0)
        assert same.tolist() == [i < t for i in range(SEQ_LEN)]


def test_future_tokens_get_no_gradient(device: torch.device) -> None:
    mha = build().to(device)
    x = torch.randn(BATCH, SEQ_LEN, D_IN, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(mha(x)[:, 3].square().sum(), x)
    assert grad[:, :4].abs().amin(dim=(0, 2)).min() > 0
    assert not grad[:, 4:].any()


def test_a_weight_is_zero_exactly_where_the_mask_says_so(device: torch.device) -> None:
    mha = build().to(device)
    weights, _ = weights_seen(mha, torch.randn(BATCH, SEQ_LEN, D_IN, device=device))
    blocked = mha.mask[:SEQ_LEN, :SEQ_LEN].expand_as(weights)
    assert torch.equal(weights == 0, blocked)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@pytest.mark.parametrize("size", [1e3, 1e15])
def test_no_true_score_is_so_low_that_the_future_wins(
    device: torch.device, size: float
) -> None:
    mha = MultiHeadAttention(1, 1, 2, 0.0, 1).to(device)
    with torch.no_grad():
        for name, parameter in mha.named_parameters():
            parameter.fill_({"W_key.weight": -1, "out_proj.bias": 0}.get(name, 1))
    # The first token meets itself with a score of -size², the second with -size.
    x = torch.tensor([[[size], [1.0]]], device=device)
    assert torch.equal(mha(x)[:, 0], x[:, 0])


def test_head_h_is_the_h_th_block_of_rows_and_of_columns(device: torch.device) -> None:
    mha = build().to(device, torch.float64)
    x = torch.randn(BATCH, SEQ_LEN, D_IN, device=device, dtype=torch.float64)
    total = mha.out_proj.bias.expand(BATCH, SEQ_LEN, D_OUT)
    for h in range(HEADS):
        rows = slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)
        alone = MultiHeadAttention(D_IN, HEAD_DIM, CONTEXT, 0.0, 1, True).to(x)
        state = {
            "out_proj.weight": torch.eye(HEAD_DIM),
            "out_proj.bias": torch.zeros(11),
        }
        for name in ("W_query", "W_key", "W_value"):
            for kind in ("weight", "bias"):
                state[f"{name}.{kind}"] = getattr(getattr(mha, name), kind)[rows]
        alone.load_state_dict(state)
        total = total + alone(x) @ mha.out_proj.weight[:, rows].T
    torch.testing.assert_close(mha(x), total, rtol=0, atol=1e-12)


# What its page says


def test_every_shape_that_the_notes_name_is_the_shape() -> None:
    # The values that each local variable of `forward` takes, in their order.
    history: dict[str, list[tuple[tuple[int, ...], bool]]] = {}

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is MultiHeadAttention.forward.__code__:
            for name, value in frame.f_locals.items():
                if isinstance(value, Tensor):
                    seen = (tuple(value.shape), value.is_contiguous())
                    past = history.setdefault(name, [])
                    if past[-1:] != [seen]:
                        past.append(seen)
            return watch
        return None

    mha = MultiHeadAttention(512, 512, context_length=50, dropout=0.1, num_heads=8)
    x = torch.randn(30, 50, 512)
    outer = sys.gettrace()
    sys.settrace(watch)
    mha(x)
    sys.settrace(outer)
    projected = [((30, 50, 512), True), ((30, 50, 8, 64), True)]
    split = [*projected, ((30, 8, 50, 64), False)]
    assert history == {
        "x": [((30, 50, 512), True)],
        "queries": split,
        "keys": split,
        "values": split,
        "scores": [((30, 8, 50, 50), True)],
        "future": [((50, 50), True)],
        "weights": [((30, 8, 50, 50), True)],
        "context": [
            ((30, 8, 50, 64), True),
            ((30, 50, 8, 64), False),
            ((30, 50, 512), True),
        ],
        "output": [((30, 50, 512), True)],
    }


def test_the_split_is_a_view_and_joining_the_heads_again_costs_a_copy() -> None:
    x = torch.randn(30, 50, 512)
    heads = x.view(30, 50, 8, 64).transpose(1, 2)
    assert heads.data_ptr() == x.data_ptr()
    back = heads.contiguous().transpose(1, 2)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        back.view(30, 50, 512)
    assert back.flatten(2).data_ptr() != back.data_ptr()
    assert torch.equal(back.flatten(2), x)


def test_to_view_directly_as_heads_mixes_up_tokens_and_heads() -> None:
    token = torch.arange(50).view(1, 50, 1).expand(30, 50, 512)
    right = token.reshape(30, 50, 8, 64).transpose(1, 2)
    wrong = token.reshape(30, 8, 50, 64)
    assert right.shape == wrong.shape
    assert torch.equal(right[0, 0, :, 0], torch.arange(50))
    assert wrong[0, 0, :, 0].unique().tolist() == list(range(7))


def test_what_the_page_walks_through_has_about_47_lines_of_code() -> None:
    text = Path(causal.__file__).read_text(encoding="utf-8")
    (cls,) = (n for n in ast.parse(text).body if isinstance(n, ast.ClassDef))
    lines = set(range(cls.lineno, (cls.end_lineno or 0) + 1))
    for node in ast.walk(cls):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            doc = node.body[0]
            lines -= set(range(doc.lineno, (doc.end_lineno or 0) + 1))
        if isinstance(node, ast.FunctionDef) and node.name == "_apply":
            # Keeping the mask alive is not among the steps of attention.
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    code = [text.splitlines()[n - 1].strip() for n in lines]
    assert abs(len([c for c in code if c and not c.startswith("#")]) - 47) <= 3


@pytest.mark.parametrize(("qkv_bias", "count"), [(False, 1_049_088), (True, 1_050_624)])
def test_parameters_are_as_many_as_in_the_original(qkv_bias: bool, count: int) -> None:
    mha = MultiHeadAttention(512, 512, 50, 0.1, 8, qkv_bias)
    assert sum(p.numel() for p in mha.parameters()) == count


def test_d_out_is_the_width_of_all_heads_together() -> None:
    mha = MultiHeadAttention(3, 2, 6, 0.0, num_heads=2)
    assert (mha.d_out, mha.num_heads, mha.head_dim, mha.context_length) == (2, 2, 1, 6)
    assert sum(p.numel() for p in mha.parameters()) == 24
    assert mha(torch.randn(2, 6, 3)).shape == (2, 6, 2)


# The mask, and checkpoints


def test_the_mask_is_bool_and_true_strictly_above_the_diagonal(
    device: torch.device,
) -> None:
    for mha in (build().to(device), build().half().to(device)):
        assert mha.mask.dtype == torch.bool
        assert mha.mask.device.type == device.type
        for i in range(CONTEXT):
            assert mha.mask[i].tolist() == [j > i for j in range(CONTEXT)]


def test_the_mask_takes_a_mebibyte_where_float32_takes_four() -> None:
    mask = MultiHeadAttention(1, 1, 1024, 0.0, 1).mask
    assert mask.nbytes == 2**20
    assert mask.float().nbytes == 4 * 2**20


@pytest.mark.parametrize("block_size", [1, CONTEXT, 1024])
def test_a_checkpoint_of_the_original_loads_strictly_whatever_its_block_size(
    device: torch.device, block_size: int
) -> None:
    checkpoint = checkpoint_of_the_original(block_size)
    before = dict(checkpoint)
    mha = MultiHeadAttention(D_IN, D_OUT, CONTEXT, 0.0, HEADS).to(device)
    inside = nn.ModuleDict({"block": nn.Sequential(copy.deepcopy(mha))})
    mha.load_state_dict(checkpoint, strict=True)
    inside.load_state_dict({f"block.0.{n}": t for n, t in checkpoint.items()})
    assert list(checkpoint) == list(before)
    for loaded in (mha, inside["block"][0]):
        assert ["mask", *loaded.state_dict()] == list(checkpoint)
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor.cpu(), checkpoint[name])
        assert torch.equal(loaded.mask.cpu(), build().mask)


def test_what_else_is_foreign_in_a_checkpoint_is_still_refused() -> None:
    checkpoint = checkpoint_of_the_original(CONTEXT)
    mha = MultiHeadAttention(D_IN, D_OUT, CONTEXT, 0.0, HEADS)
    with pytest.raises(
        RuntimeError, match=re.escape("Unexpected key(s) in state_dict")
    ):
        mha.load_state_dict(checkpoint | {"out_proj.mask": torch.ones(1)})


def test_a_state_goes_round_into_another_context_length() -> None:
    mha = build()
    other = MultiHeadAttention(D_IN, D_OUT, SEQ_LEN, 0.0, HEADS, True)
    other.load_state_dict(mha.state_dict())
    x = torch.randn(BATCH, SEQ_LEN, D_IN)
    assert "mask" not in mha.state_dict()
    assert torch.equal(mha(x), other(x))


@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
def test_a_module_built_on_meta_gets_its_mask_with_its_weights(
    device: torch.device, assign: bool
) -> None:
    mha = build().to(device)
    with torch.device("meta"):
        late = MultiHeadAttention(D_IN, D_OUT, CONTEXT, 0.0, HEADS, True)
    assert late(torch.empty(BATCH, SEQ_LEN, D_IN, device="meta")).shape == (3, 7, D_OUT)
    if not assign:
        # What `to_empty` does where zeros have been lying in memory.
        late = late._apply(lambda x: torch.zeros_like(x, device=device))
        assert torch.equal(late.mask, mha.mask)
    late.load_state_dict(mha.state_dict(), assign=assign)
    x = torch.randn(BATCH, SEQ_LEN, D_IN, device=device)
    assert torch.equal(late.mask, mha.mask)
    assert torch.equal(late(x), mha(x))


def test_copies_and_pickles_after_training_give_the_same(device: torch.device) -> None:
    mha = build(dropout=0.1).to(device)
    x = torch.randn(BATCH, SEQ_LEN, D_IN, device=device)
    optimizer = torch.optim.SGD(mha.parameters(), lr=0.01)
    mha(x).square().mean().backward()
    optimizer.step()
    mha.eval()
    buffer = io.BytesIO()
    torch.save(mha, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(mha),
        pickle.loads(pickle.dumps(mha)),
        torch.load(buffer, weights_only=False),
    ]
    for twin in copies:
        twin.load_state_dict(checkpoint_of_the_original(5) | twin.state_dict())
        assert torch.equal(twin(x), mha(x))


# Dropout


def test_dropout_acts_on_the_weights_and_only_in_training(device: torch.device) -> None:
    mha = build(dropout=0.5).to(device)
    x = torch.randn(BATCH, SEQ_LEN, D_IN, device=device)
    assert not torch.equal(mha(x), mha(x))
    mha.eval()
    assert torch.equal(mha(x), mha(x))
    before, after = weights_seen(mha, x)
    assert torch.equal(before, after)


def test_survivors_of_dropout_are_scaled_and_rows_no_longer_sum_to_1(
    device: torch.device,
) -> None:
    mha = build(context_length=61, dropout=0.3).to(device)
    before, after = weights_seen(mha, torch.randn(BATCH, 61, D_IN, device=device))
    survived = after > 0
    torch.testing.assert_close(after[survived], before[survived] / 0.7)
    share = survived.float().sum() / (before > 0).float().sum()
    assert abs(share.item() - 0.7) < 0.03  # of 11,346 weights: 7 sigma
    assert (after.sum(-1) - 1).abs().max() > 0.1
    # The first token of each head has one weight, which is there or is not.
    torch.testing.assert_close(
        after[:, :, 0, 0], (survived[:, :, 0, 0] / 0.7).to(after.dtype)
    )


def test_where_every_weight_is_dropped_only_the_output_bias_is_left(
    device: torch.device,
) -> None:
    mha = build(dropout=1.0).to(device)
    y = mha(torch.randn(BATCH, SEQ_LEN, D_IN, device=device))
    assert torch.equal(y, mha.out_proj.bias.expand_as(y))


# What it works under


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_close_and_large_scores_stay_finite(
    device: torch.device, dtype: torch.dtype
) -> None:
    mha = build().to(device)
    x = torch.randn(BATCH, SEQ_LEN, D_IN, device=device)
    expected = mha(x)
    with torch.autocast(device.type, dtype=dtype):
        automatic = mha(x)
        mixed = mha(x.to(dtype))
    half = mha.to(dtype)(x.to(dtype))
    for output in (automatic, mixed, half):
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.3)

    # q · k is 64 · 40 · 40 = 102,400, beyond the end of float16; over √64 it is not.
    wide = MultiHeadAttention(64, 64, 5, 0.0, 1).to(device, dtype)
    with torch.no_grad():
        wide.W_query.weight.copy_(torch.eye(64))
        wide.W_key.weight.copy_(torch.eye(64))
    x = torch.full((BATCH, 5, 64), 40.0, device=device, dtype=dtype)
    assert wide(x).isfinite().all()


def test_compiles_whole_and_gives_the_same_for_all_lengths(
    device: torch.device,
) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    mha = build().to(device)
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(mha, backend=counter, fullgraph=True)
    for seq_len in range(4, 8):
        x = torch.randn(BATCH, seq_len, D_IN, device=device, requires_grad=True)
        output, expected = fast(x), mha(x)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(
            torch.autograd.grad(output.square().sum(), x),
            torch.autograd.grad(expected.square().sum(), x),
            rtol=1e-4,
            atol=1e-4,
        )
    assert counter.frame_count <= 2


def test_exports_with_dynamic_length_and_batch(device: torch.device) -> None:
    mha = build().to(device).eval()
    batch = torch.export.Dim("batch", min=2)
    seq_len = torch.export.Dim("seq_len", min=2, max=CONTEXT - 1)
    x = torch.randn(BATCH, SEQ_LEN, D_IN, device=device)
    program = torch.export.export(mha, (x,), dynamic_shapes=({0: batch, 1: seq_len},))
    other = torch.randn(5, 11, D_IN, device=device)
    torch.testing.assert_close(program.module()(other), mha(other))


def test_first_and_second_derivatives_are_those_of_finite_differences(
    device: torch.device,
) -> None:
    mha = build(2, 2, 3).to(device, torch.float64)
    options = {"dtype": torch.float64, "device": device, "requires_grad": True}
    x = torch.randn(1, 3, 2, **options)
    assert torch.autograd.gradcheck(mha, x)
    assert torch.autograd.gradgradcheck(mha, x)


def test_no_step_makes_nan_on_the_way_back(device: torch.device) -> None:
    mha = build().to(device)
    with torch.autograd.set_detect_anomaly(True):
        mha(torch.randn(BATCH, 1, D_IN, device=device)).square().sum().backward()
        mha(torch.randn(BATCH, CONTEXT, D_IN, device=device)).square().sum().backward()


def test_vmap_gives_what_a_loop_gives(device: torch.device) -> None:
    mha = build().to(device)
    x = torch.randn(2, BATCH, SEQ_LEN, D_IN, device=device)
    expected = torch.stack([mha(one) for one in x])
    torch.testing.assert_close(torch.vmap(mha)(x), expected)


@pytest.mark.parametrize(("batch_size", "seq_len"), [(0, 7), (3, 0), (0, 0)])
def test_empty_batches_and_sequences_work(
    device: torch.device, batch_size: int, seq_len: int
) -> None:
    mha = build().to(device)
    y = mha(torch.randn(batch_size, seq_len, D_IN, device=device))
    assert y.shape == (batch_size, seq_len, D_OUT)
    y.sum().backward()


def test_input_and_state_are_left_alone(device: torch.device) -> None:
    mha = build(dropout=0.5).to(device)
    # A view of a larger tensor: writing through it would be seen too.
    x = torch.randn(SEQ_LEN, BATCH, D_IN, device=device).transpose(0, 1)
    everything = {"x": x, "mask": mha.mask, **mha.state_dict()}
    before = {name: tensor.clone() for name, tensor in everything.items()}
    mha(x).sum().backward()
    for name, tensor in everything.items():
        assert torch.equal(tensor, before[name]), name


# What it refuses

SETTINGS = {
    "d_in": 3,
    "d_out": 6,
    "context_length": 5,
    "dropout": 0.0,
    "num_heads": 2,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"d_out": 10, "num_heads": 4},
            "`d_out` (=10) must be divisible by `num_heads` (=4); 2 and 5 would do",
        ),
        (
            {"num_heads": 512},
            "`d_out` (=6) must be divisible by `num_heads` (=512); 6 would do",
        ),
        ({"num_heads": 0}, "`num_heads` (=0) must be an int from 1 up"),
        ({"num_heads": 2.0}, "`num_heads` (=2.0) must be an int from 1 up"),
        ({"num_heads": True}, "`num_heads` (=True) must be an int from 1 up"),
        ({"d_in": 0}, "`d_in` (=0) must be an int from 1 up"),
        ({"d_out": -6}, "`d_out` (=-6) must be an int from 1 up"),
        ({"context_length": 0}, "`context_length` (=0) must be an int from 1 up"),
        ({"dropout": 1.5}, "`dropout` (=1.5) must lie between 0 and 1"),
        ({"dropout": -0.1}, "`dropout` (=-0.1) must lie between 0 and 1"),
        ({"dropout": "0.1"}, "`dropout` (='0.1') must lie between 0 and 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_impossible_settings_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MultiHeadAttention(**SETTINGS | changed)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (
            torch.randn(SEQ_LEN, D_IN),
            ValueError,
            "`x` has shape [7, 13], not [batch_size, seq_len, d_in (=13)]; a lone "
            "sequence needs `x.unsqueeze(0)`",
        ),
        (
            torch.randn(BATCH, SEQ_LEN, 5),
            ValueError,
            "`x` has shape [3, 7, 5], not [batch_size, seq_len, d_in (=13)]; a lone "
            "sequence needs `x.unsqueeze(0)`",
        ),
        (
            torch.randn(BATCH, CONTEXT + 2, D_IN),
            ValueError,
            "`x` has 19 tokens, more than `context_length` (=17); keep the last with "
            "`x[:, -17:]`",
        ),
        (
            torch.randn(BATCH, SEQ_LEN, D_IN).double(),
            TypeError,
            "`x` is torch.float64, the module torch.float32; use "
            "`x.to(torch.float32)`, or give the module its dtype",
        ),
        (
            torch.ones(BATCH, SEQ_LEN, D_IN).long(),
            TypeError,
            "`x` is torch.int64, the module torch.float32; use "
            "`x.to(torch.float32)`, or give the module its dtype",
        ),
        (
            torch.randn(BATCH, SEQ_LEN, D_IN, device="meta"),
            ValueError,
            "`x` is on meta, the module on cpu; use `x.to('cpu')`",
        ),
        (
            torch.randn(BATCH, SEQ_LEN, D_IN).to_sparse(),
            TypeError,
            "`x` is sparse, nested or quantised; pass a dense one",
        ),
        (
            [[[0.0]]],
            TypeError,
            "`x` must be a tensor, but is a list",
        ),
    ],
    ids=[
        "no batch",
        "width",
        "length",
        "double",
        "integer",
        "device",
        "sparse",
        "no tensor",
    ],
)
def test_an_input_that_does_not_fit_is_refused(
    x: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        build()(x)


def test_the_way_out_of_too_long_an_input_is_one(device: torch.device) -> None:
    mha = build().to(device)
    x = torch.randn(BATCH, CONTEXT + 2, D_IN, device=device)
    assert mha(x[:, -17:]).shape == (BATCH, CONTEXT, D_OUT)


def test_a_context_length_of_1_does_not_leak(device: torch.device) -> None:
    # The original's mask of one zero would broadcast over all scores here.
    mha = build(context_length=1).to(device)
    x = torch.randn(BATCH, 2, D_IN, device=device)
    assert mha(x[:, :1]).shape == (BATCH, 1, D_OUT)
    message = "`x` has 2 tokens, more than `context_length` (=1)"
    with pytest.raises(ValueError, match=re.escape(message)):
        mha(x)


def test_autocast_casts_no_integers_and_no_doubles(device: torch.device) -> None:
    mha = build().to(device)
    for dtype in (torch.int64, torch.float64):
        x = torch.ones(BATCH, SEQ_LEN, D_IN, device=device, dtype=dtype)
        with (
            torch.autocast(device.type, dtype=torch.bfloat16),
            pytest.raises(TypeError, match=re.escape(f"`x` is {dtype}, the module")),
        ):
            mha(x)
