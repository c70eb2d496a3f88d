"""Causal attention: what it computes, corrects, refuses, and what it works under."""

import ast
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

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


def test_future_tokens_get_no_gradient(device: torch.device) -> None:
    mha = build().to(device)
    x = torch.randn(BATCH, SEQ_LEN, D_IN, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(mha(x)[:, 3].square().sum(), x)
    assert grad[:, :4].abs().amin(dim=(0, 2)).min() > 0
    assert not grad[:, 4:].any()


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


# Dropout


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


# What it refuses


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
    ],
    ids=["no batch", "width", "length"],
)
def test_an_input_that_does_not_fit_is_refused(
    x: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        build()(x)
