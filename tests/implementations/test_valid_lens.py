"""Valid lengths, heads folded into the batch: what it computes and what it refuses."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headnotes.implementations.valid_lens import (
    DotProductAttention,
    MultiHeadAttention,
    masked_softmax,
)

# Prime and pairwise distinct, so that no swapped pair of axes can pass unseen.
Q_LEN, K_LEN, BATCH, HEADS, D_K = 5, 7, 3, 2, 11
D_MODEL = HEADS * D_K

PER_ITEM = torch.tensor([7, 2, 4])
PER_QUERY = torch.tensor([[1, 2, 3, 4, 5], [7, 7, 1, 2, 6], [3, 1, 4, 1, 5]])
LENGTHS = pytest.mark.parametrize(
    "valid_lens", [None, PER_ITEM, PER_QUERY], ids=["all", "per item", "per query"]
)


def on(device: torch.device, valid_lens: Tensor | None) -> Tensor | None:
    return None if valid_lens is None else valid_lens.to(device)


def inputs(
    q_len: int = Q_LEN,
    k_len: int = K_LEN,
    batch_size: int = BATCH,
    widths: tuple[int, int, int] = (D_MODEL, D_MODEL, D_MODEL),
    **like: Any,
) -> list[Tensor]:
    """Random queries, keys and values."""
    lengths = (q_len, k_len, k_len)
    return [
        torch.randn(batch_size, length, width, **like)
        for length, width in zip(lengths, widths, strict=True)
    ]


def build(
    x: list[Tensor], heads: int = HEADS, d_k: int = D_K, **settings: Any
) -> MultiHeadAttention:
    """A module that has seen `x`, and whose rows of attention differ."""
    settings = {"dropout": 0.0, "bias": True} | settings
    mha = MultiHeadAttention(heads * d_k, heads, **settings).to(x[0].device)
    mha(*(t.float() for t in x), None)
    with torch.no_grad():
        for parameter in mha.parameters():
            parameter.copy_(torch.randn_like(parameter) / (heads * d_k) ** 0.25)
    return mha.to(x[0].dtype)


def kept(mha: MultiHeadAttention) -> Tensor:
    """The weights of the last call."""
    weights = mha.attention.attention_weights
    assert weights is not None
    return weights


def keep(valid_lens: Tensor | None, k_len: int = K_LEN) -> Tensor:
    """What `valid_lens` mean, as a mask `[batch_size, q_len, k_len]`."""
    full = torch.zeros(BATCH, Q_LEN, k_len, dtype=torch.bool)
    for b in range(BATCH):
        for i in range(Q_LEN):
            length = k_len
            if valid_lens is not None:
                length = int(
                    valid_lens[b] if valid_lens.dim() == 1 else valid_lens[b, i]
                )
            for j in range(length):
                full[b, i, j] = True
    return full


def layers(mha: MultiHeadAttention) -> list[nn.Linear]:
    return [mha.W_q, mha.W_k, mha.W_v, mha.W_o]


# What it computes


@LENGTHS
def test_output_and_gradients_are_those_of_torch_under_the_same_weights(
    device: torch.device, valid_lens: Tensor | None
) -> None:
    widths = (D_MODEL, 13, 17)
    ours = inputs(widths=widths, dtype=torch.float64, device=device)
    theirs = [x.clone() for x in ours]
    mha = build(ours).eval()
    twin = nn.MultiheadAttention(
        D_MODEL, HEADS, kdim=13, vdim=17, batch_first=True, dtype=torch.float64
    ).to(device)
    twin.load_state_dict(
        {
            "q_proj_weight": mha.W_q.weight,
            "k_proj_weight": mha.W_k.weight,
            "v_proj_weight": mha.W_v.weight,
            "in_proj_bias": torch.cat([part.bias for part in layers(mha)[:3]]),
            "out_proj.weight": mha.W_o.weight,
            "out_proj.bias": mha.W_o.bias,
        }
    )
    for x in [*ours, *theirs]:
        x.requires_grad_()
    y = mha(*ours, on(device, valid_lens))
    blocked = ~keep(valid_lens).to(device).repeat_interleave(HEADS, dim=0)
    expected, weights = twin(*theirs, attn_mask=blocked, average_attn_weights=False)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(kept(mha), weights.flatten(0, 1), rtol=0, atol=1e-12)

    upstream = torch.randn_like(y)
    y.backward(upstream)
    expected.backward(upstream)
    pairs = [(x.grad, t.grad) for x, t in zip(ours, theirs, strict=True)]
    pairs += [
        (mha.W_q.weight.grad, twin.q_proj_weight.grad),
        (mha.W_k.weight.grad, twin.k_proj_weight.grad),
        (mha.W_v.weight.grad, twin.v_proj_weight.grad),
        (torch.cat([p.bias.grad for p in layers(mha)[:3]]), twin.in_proj_bias.grad),
        (mha.W_o.weight.grad, twin.out_proj.weight.grad),
        (mha.W_o.bias.grad, twin.out_proj.bias.grad),
    ]
    for our, their in pairs:
        torch.testing.assert_close(our, their, rtol=0, atol=1e-12)


def test_the_published_example_has_its_shape_but_cannot_see_a_mask(
    device: torch.device,
) -> None:
    mha = MultiHeadAttention(100, 5, 0.5).to(device)
    lens = torch.tensor([3, 2], device=device)
    X = torch.ones(2, 4, 100, device=device)  # noqa: N806
    Y = torch.ones(2, 6, 100, device=device)  # noqa: N806
    assert mha(X, Y, Y, lens).shape == (2, 4, 100)
    assert kept(mha).shape == (10, 4, 6)

    # All keys are alike, so that any mean of their values is the same.
    mha.eval()
    torch.testing.assert_close(mha(X, Y, Y, lens), mha(X, Y, Y, None))
    Y = torch.randn_like(Y)  # noqa: N806
    assert (mha(X, Y, Y, lens) - mha(X, Y, Y, None)).abs().max() > 0.1


def test_every_row_of_the_folded_batch_is_one_head_of_one_item(
    device: torch.device,
) -> None:
    x = inputs(device=device)
    mha = build(x)
    folded = mha.transpose_qkv(x[0])
    assert folded.shape == (BATCH * HEADS, Q_LEN, D_K)
    for b in range(BATCH):
        for h in range(HEADS):
            head = x[0][b, :, h * D_K : (h + 1) * D_K]
            assert torch.equal(folded[b * HEADS + h], head)
    assert torch.equal(mha.transpose_output(folded), x[0])


def test_lengths_follow_their_item_through_the_folding(device: torch.device) -> None:
    # Plain repetition would give item 0 the length of item 1, without a word.
    x = inputs(batch_size=2, device=device)
    mha = build(x)
    mha(*x, torch.tensor([3, 2], device=device))
    lengths = (kept(mha) > 0).sum(dim=-1)
    assert lengths.tolist() == [[3] * Q_LEN] * HEADS + [[2] * Q_LEN] * HEADS


@LENGTHS
def test_filler_is_neither_read_nor_given_a_gradient(
    device: torch.device, valid_lens: Tensor | None
) -> None:
    queries, keys, values = inputs(device=device)
    mha = build([queries, keys, values])
    lens = on(device, valid_lens)
    before = mha(queries, keys, values, lens)
    filler = ~keep(valid_lens).any(dim=1).to(device)
    keys[filler], values[filler] = 100, -100
    assert torch.equal(mha(queries, keys, values, lens), before)
    assert torch.equal(
        kept(mha) > 0, keep(valid_lens).to(device).repeat_interleave(HEADS, dim=0)
    )
    values.requires_grad_()
    mha(queries, keys, values, lens).square().sum().backward()
    assert values.grad is not None
    assert torch.equal((values.grad == 0).all(dim=-1), filler)


def test_a_length_of_all_keys_is_no_mask(device: torch.device) -> None:
    x = inputs(device=device)
    mha = build(x)
    lens = torch.full((BATCH,), K_LEN, device=device)
    assert torch.equal(mha(*x, lens), mha(*x, None))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16], ids=str
)
def test_lengths_of_every_integer_type_are_read_alike(dtype: torch.dtype) -> None:
    scores = torch.randn(BATCH, Q_LEN, 300)
    lens = torch.tensor([100, 0, 3])
    assert torch.equal(
        masked_softmax(scores, lens.to(dtype)), masked_softmax(scores, lens)
    )


def test_the_weights_that_are_stored_grow_with_the_number_of_heads() -> None:
    # The products cost the same with any number of heads, the memory does not.
    x = torch.randn(1, 64, 128)
    numbers = []
    for heads in (1, 2, 8):
        mha = MultiHeadAttention(128, heads, 0.0)
        mha(x, x, x, None)
        numbers.append(kept(mha).numel())
    assert numbers == [4096, 8192, 32768]


# Layers that wait for their first input


@pytest.mark.parametrize(("bias", "count"), [(False, 1_048_576), (True, 1_050_624)])
def test_parameters_are_as_many_as_in_the_original(bias: bool, count: int) -> None:
    mha = MultiHeadAttention(512, 8, 0.0, bias=bias)
    x = torch.randn(1, 2, 512)
    mha(x, x, x, None)
    assert sum(p.numel() for p in mha.parameters()) == count


def test_weights_are_drawn_at_the_first_forward_in_order() -> None:
    mha = MultiHeadAttention(D_MODEL, HEADS, 0.5, bias=True).eval()
    x = inputs(widths=(13, 17, 19))
    torch.manual_seed(5)
    twins = [nn.Linear(n, D_MODEL) for n in (13, 17, 19, D_MODEL)]
    torch.manual_seed(5)
    mha(*x, None)
    for layer, twin in zip(layers(mha), twins, strict=True):
        assert torch.equal(layer.weight, twin.weight)
        assert torch.equal(layer.bias, twin.bias)


def test_what_is_refused_at_the_first_forward_draws_no_weights() -> None:
    mha = MultiHeadAttention(D_MODEL, HEADS, 0.0)
    x = inputs()
    for lens, error in ((torch.tensor([8, 1, 1]), ValueError), ([1], TypeError)):
        with pytest.raises(error, match="`valid_lens`"):
            mha(*x, lens)
    with pytest.raises(TypeError, match="`values`"):
        mha(x[0], x[1], x[2].double(), None)
    assert all(layer.in_features == 0 for layer in layers(mha))


def test_a_checkpoint_of_the_original_loads_before_and_after_the_first_forward() -> (
    None
):
    x = inputs(widths=(13, 17, 19))
    shapes = {"W_q": 13, "W_k": 17, "W_v": 19, "W_o": D_MODEL}
    checkpoint = {
        f"{name}.weight": torch.randn(D_MODEL, width) for name, width in shapes.items()
    }
    early = MultiHeadAttention(D_MODEL, HEADS, 0.0)
    early.load_state_dict(checkpoint, strict=True)
    late = MultiHeadAttention(D_MODEL, HEADS, 0.0)
    late(*x, None)
    late.load_state_dict(checkpoint, strict=True)
    assert torch.equal(early(*x, PER_ITEM), late(*x, PER_ITEM))
    assert list(late.state_dict()) == list(checkpoint)


def test_an_optimizer_and_copies_take_it_before_the_first_forward() -> None:
    mha = MultiHeadAttention(D_MODEL, HEADS, 0.0)
    optimizer = torch.optim.SGD(mha.parameters(), lr=0.1)
    x = inputs()
    for twin in (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha))):
        assert twin(*x, PER_ITEM).shape == (BATCH, Q_LEN, D_MODEL)
    mha(*x, PER_ITEM).sum().backward()
    before = mha.W_v.weight.clone()
    optimizer.step()
    assert not torch.equal(mha.W_v.weight, before)


# Dropout and the weights that are kept


def test_kept_weights_are_those_before_dropout_and_detached(
    device: torch.device,
) -> None:
    x = inputs(device=device)
    mha = build(x, dropout=0.5)
    mha(*x, None)
    in_training = kept(mha)
    assert in_training.shape == (BATCH * HEADS, Q_LEN, K_LEN)
    assert not in_training.requires_grad
    torch.testing.assert_close(
        in_training.sum(-1), torch.ones_like(in_training[..., 0])
    )
    mha.eval()(*x, None)
    assert torch.equal(in_training, kept(mha))


def test_copies_after_a_training_forward_leave_the_weights_behind(
    device: torch.device,
) -> None:
    # The original keeps the graph with the weights, and `deepcopy` raises.
    x = inputs(device=device)
    mha = build(x)
    mha(*x, PER_ITEM.to(device)).square().sum().backward()
    expected = mha(*x, PER_ITEM.to(device))
    assert "attention.attention_weights" not in mha.state_dict()
    for twin in (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha))):
        assert twin.attention.attention_weights is None
        assert torch.equal(twin(*x, PER_ITEM.to(device)), expected)
    assert kept(mha).shape == (BATCH * HEADS, Q_LEN, K_LEN)


# What it works under


@pytest.mark.slow
def test_layers_that_wait_for_their_input_compile_whole(device: torch.device) -> None:
    torch.compiler.reset()
    x = inputs(widths=(13, 17, 19), device=device)
    mha = MultiHeadAttention(D_MODEL, HEADS, 0.0).to(device)
    compiled = torch.compile(mha, backend="eager", fullgraph=True)
    for valid_lens in (PER_ITEM, PER_QUERY, None):
        lens = on(device, valid_lens)
        torch.testing.assert_close(compiled(*x, lens), mha(*x, lens))


def test_a_negative_length_that_cannot_be_seen_reads_nothing() -> None:
    # Under `vmap` and in a compiler nobody can look at the values.
    scores, lens = torch.randn(2, 3, 5, 7), torch.tensor([[7, -1, 2], [1, 1, -3]])
    weights = torch.func.vmap(masked_softmax)(scores, lens)
    assert weights.isfinite().all()
    assert torch.equal(weights.sum(dim=(2, 3)) == 0, lens < 0)


def test_layers_that_wait_for_their_input_work_on_meta() -> None:
    with torch.device("meta"):
        mha = MultiHeadAttention(D_MODEL, HEADS, 0.0)
    for lens in (PER_ITEM, PER_QUERY):
        y = mha(*inputs(device="meta"), lens.to("meta"))
        assert y.shape == (BATCH, Q_LEN, D_MODEL)


# What it refuses


def test_unknown_keywords_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_bias'"):
        MultiHeadAttention(8, 2, 0.1, use_bias=True)  # type: ignore[call-arg]


ITEM = "[batch_size] or [batch_size, q_len] = [3] or [3, 5]"
INTEGERS = (
    "but lengths are integers; from a padding mask [batch_size, k_len] with all "
    "padding at its end, use `mask.sum(dim=1)`"
)
RANGE = (
    "but must lie between 0 and `k_len` (=7); use `valid_lens.clamp(0, 7)` if meant so"
)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"queries": torch.randn(Q_LEN, D_MODEL)},
            ValueError,
            "`queries` has shape [5, 22], not [batch_size, seq_len, width (=22)]; a "
            "lone sequence needs `queries.unsqueeze(0)`",
        ),
        (
            {"keys": torch.randn(BATCH, K_LEN, 13)},
            ValueError,
            "`keys` has shape [3, 7, 13], not [batch_size, seq_len, width (=22)]; a "
            "lone sequence needs `keys.unsqueeze(0)`",
        ),
        (
            {"keys": torch.randn(1, K_LEN, D_MODEL)},
            ValueError,
            "`keys` has batch size 1, but `queries` has 3; share one sequence with "
            "`keys.expand`",
        ),
        (
            {"values": torch.randn(6, K_LEN, D_MODEL)},
            ValueError,
            "`values` has batch size 6, but `queries` has 3; share one sequence with "
            "`values.expand`",
        ),
        (
            {"values": torch.randn(BATCH, 1, D_MODEL)},
            ValueError,
            "`values` are 1 long, `keys` 7; make them equal",
        ),
        (
            {"valid_lens": [3, 2, 1]},
            TypeError,
            "`valid_lens` must be a tensor, but is a list",
        ),
        (
            {"valid_lens": torch.ones(BATCH, Q_LEN).bool()},
            TypeError,
            f"`valid_lens` is torch.bool, {INTEGERS}",
        ),
        (
            {"valid_lens": torch.ones(BATCH)},
            TypeError,
            f"`valid_lens` is torch.float32, {INTEGERS}",
        ),
        (
            {"valid_lens": torch.ones(BATCH).cfloat()},
            TypeError,
            f"`valid_lens` is torch.complex64, {INTEGERS}",
        ),
        (
            {"valid_lens": torch.tensor([1, 2])},
            ValueError,
            f"`valid_lens` has shape [2], not {ITEM}",
        ),
        (
            {"valid_lens": torch.tensor(3)},
            ValueError,
            f"`valid_lens` has shape [], not {ITEM}",
        ),
        (
            {"valid_lens": torch.ones(BATCH, K_LEN).long()},
            ValueError,
            f"`valid_lens` has shape [3, 7], not {ITEM}",
        ),
        (
            {"valid_lens": torch.ones(BATCH, 1).long()},
            ValueError,
            f"`valid_lens` has shape [3, 1], not {ITEM}",
        ),
        (
            {"valid_lens": torch.tensor([3, 8, 0])},
            ValueError,
            f"`valid_lens` runs from 0 to 8, {RANGE}",
        ),
        (
            {"valid_lens": torch.tensor([3, -1, 7])},
            ValueError,
            f"`valid_lens` runs from -1 to 7, {RANGE}",
        ),
        (
            {"valid_lens": PER_ITEM.to("meta")},
            ValueError,
            "`valid_lens` is on meta, `queries` on cpu; use `valid_lens.to('cpu')`",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    x = inputs()
    mha = build(x)
    arguments = dict(zip(("queries", "keys", "values"), x, strict=True))
    worked: list[nn.Module] = []
    for module in mha.modules():
        module.register_forward_hook(lambda module, *_: worked.append(module))
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        mha(**arguments | {"valid_lens": None} | changed)
    assert not worked


def test_what_does_not_fit_is_refused_by_a_single_head_too() -> None:
    attention = DotProductAttention(0.0)
    queries, keys, values = inputs(widths=(13, 13, 17))
    message = "`keys` are 13 wide, `queries` 11; make them equal"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        attention(queries[..., :11], keys, values)
    with pytest.raises(TypeError, match="`queries` must be a tensor"):
        attention([0.0], keys, values)
    with pytest.raises(
        TypeError, match=r"`queries` is torch\.int64, not torch\.float32"
    ):
        attention(queries.long(), keys.long(), values.long())
    with pytest.raises(ValueError, match="`valid_lens` runs from 1 to 8"):
        attention(queries, keys, values, torch.tensor([1, 8, 1]))
    assert attention.attention_weights is None


def test_what_are_no_scores_is_refused() -> None:
    message = "`X` has shape [3, 7], not [batch_size, q_len, k_len]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        masked_softmax(torch.randn(3, 7), PER_ITEM)
    with pytest.raises(TypeError, match=r"^`X` must be a tensor, but is a list$"):
        masked_softmax([1.0], None)  # type: ignore[arg-type]
    for dtype in (torch.int64, torch.float8_e5m2):
        message = f"`X` is {dtype}, which has no softmax; use `X.float()`"
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            masked_softmax(torch.ones(3, 5, 7).to(dtype), None)
