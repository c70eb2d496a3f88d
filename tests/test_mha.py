"""The core: what it computes, what it refuses, and what it works under."""

import copy
import io
import pickle
import re
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headnotes import fast, masks
from headnotes.mha import (
    MultiHeadAttention,
    PrepareForMultiHeadAttention,
    masked_softmax,
)
from headnotes.variants.latent import LatentAttention
from headnotes.variants.linear import DeltaNetAttention, LinearAttention
from headnotes.variants.relative import TransformerXLAttention
from headnotes.variants.rotary import RotaryAttention
from headnotes.variants.sliding_window import SlidingWindowAttention

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


# What it works under


# Where there is a GPU, Inductor advises lower precision, and says how it computes a
# softmax over few keys.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:(?s).*Online softmax is disabled:UserWarning")
def test_inductor_compiles_it_whole_and_gives_the_same(device: torch.device) -> None:
    if device.type == "cpu" and not shutil.which("g++"):
        pytest.skip("torch.compile needs g++ for the CPU, and there is none here")
    torch.compiler.reset()
    mha = build().to(device).eval()
    compiled = torch.compile(mha, backend="inductor", fullgraph=True)
    x, mask = inputs(device=device), some_mask().to(device)
    for tensor in x.values():
        tensor.requires_grad_()
    results = []
    for module in (mha, compiled):
        output = module(**x, mask=mask)
        gradients = torch.autograd.grad(output.square().sum(), list(x.values()))
        results.append([output, mha.attn, *gradients])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# What it refuses

ONES = torch.ones(Q_LEN, K_LEN, BATCH)


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
            {"mask": (ONES * 2).to(torch.uint16)},
            ValueError,
            "`mask` holds 2 to 2, not 0/1; write `mask == 1`",
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
            "[5 or 1, 7, 3 or 1]; a [q_len, k_len] mask needs `mask.unsqueeze(-1)` "
            "if True means 'may attend', `masks.from_mha(mask, heads)` if True hides",
        ),
        (
            {"mask": ONES.bool().transpose(0, 1)},
            ValueError,
            "`mask` has shape [7, 5, 3], not [q_len or 1, k_len, batch_size or 1] = "
            "[5 or 1, 7, 3 or 1]; a [q_len, k_len] mask needs `mask.unsqueeze(-1)` "
            "if True means 'may attend', `masks.from_mha(mask, heads)` if True hides",
        ),
        (
            {"mask": ONES[:, :1].bool()},
            ValueError,
            "`mask` has shape [5, 1, 3], not [q_len or 1, k_len, batch_size or 1] = "
            "[5 or 1, 7, 3 or 1]; a [q_len, k_len] mask needs `mask.unsqueeze(-1)` "
            "if True means 'may attend', `masks.from_mha(mask, heads)` if True hides",
        ),
        (
            {"mask": ONES.bool()[..., None]},
            ValueError,
            "`mask` has shape [5, 7, 3, 1], not [q_len or 1, k_len, batch_size or 1] = "
            "[5 or 1, 7, 3 or 1]; a [q_len, k_len] mask needs `mask.unsqueeze(-1)` "
            "if True means 'may attend', `masks.from_mha(mask, heads)` if True hides",
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


def test_arguments_in_the_order_of_nn_are_refused_with_the_right_order() -> None:
    message = (
        "`d_model` (=2) must be divisible by `heads` (=22); "
        "`heads` comes first: `heads=2, d_model=22`"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MultiHeadAttention(D_MODEL, HEADS)


def test_a_mask_that_fits_batch_first_inputs_is_refused_with_that_hint() -> None:
    x = torch.randn(3, 5, D_MODEL)  # [batch_size, seq_len, d_model]
    causal = torch.ones(5, 5).bool().tril()
    mha = build()
    for mask in (causal.unsqueeze(-1), causal[:1].unsqueeze(-1).expand(1, 5, 3)):
        message = "it fits batch-first inputs: pass `query.transpose(0, 1)`, …"
        with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
            mha(query=x, key=x, value=x, mask=mask)
        turned = x.transpose(0, 1)
        mha(query=turned, key=turned, value=turned, mask=mask)


def test_a_causal_mask_of_nn_is_refused_with_its_polarity() -> None:
    x = torch.randn(5, 3, D_MODEL)
    hidden = torch.ones(5, 5).bool().triu(diagonal=1)
    message = "`masks.from_mha(mask, heads)` if True hides"
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        build()(query=x, key=x, value=x, mask=hidden)
    ours = masks.from_mha(hidden, HEADS)
    assert torch.equal(ours, masks.causal(5))


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


class Wrapped(nn.Module):
    """A layer in place of another, as adapters are, which has no `weight`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class WrappedWithWeight(Wrapped):
    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.layer.weight  # type: ignore[assignment]
        return weight


def forward(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module(query=x, key=x, value=x)
    return y


def decode(module: Any, x: Tensor) -> Tensor:
    y: Tensor
    state = [module.cache(BATCH, Q_LEN)] if hasattr(module, "cache") else []
    y, _ = module.decode(x, *state)
    return y


def decode_in_a_window(module: Any, x: Tensor) -> Tensor:
    y: Tensor
    y, _ = module.decode(x, module.cache(BATCH))
    return y


@pytest.mark.parametrize(
    ("kind", "settings", "call"),
    [
        (MultiHeadAttention, {}, forward),
        (RotaryAttention, {"frequencies": torch.ones(2)}, forward),
        (TransformerXLAttention, {}, forward),
        (SlidingWindowAttention, {"window": 3}, forward),
        (SlidingWindowAttention, {"window": 3}, decode_in_a_window),
        (fast.MultiHeadAttention, {}, forward),
        (fast.MultiHeadAttention, {}, decode),
        (LinearAttention, {}, forward),
        (LinearAttention, {}, decode),
        (DeltaNetAttention, {}, forward),
        (DeltaNetAttention, {}, decode),
        (LatentAttention, {"kv_rank": 7, "rotary_dim": 4}, forward),
        (LatentAttention, {"kv_rank": 7, "rotary_dim": 4}, decode),
    ],
)
def test_a_layer_without_a_weight_is_called_or_refused_by_name(
    kind: type[nn.Module], settings: dict[str, Any], call: Any
) -> None:
    module = kind(HEADS, D_MODEL, **settings).eval()
    x = torch.randn(Q_LEN, BATCH, D_MODEL)
    expected = call(module, x)
    places = [n for n, layer in module.named_modules() if type(layer) is nn.Linear]
    refused = set()
    for place in places:
        owner, _, name = place.rpartition(".")
        parent = module.get_submodule(owner)
        layer = getattr(parent, name)
        setattr(parent, name, WrappedWithWeight(layer))
        assert torch.equal(call(module, x), expected)
        setattr(parent, name, Wrapped(layer))
        message = (
            f"`{name}` of {type(parent).__name__} is a Wrapped without a `weight`, "
            f"which inputs must fit; use an `nn.Linear`, or give yours a `weight`, as "
            f"of the layer that it wraps"
        )
        try:
            assert torch.equal(call(module, x), expected)
        except TypeError as error:
            assert str(error) == message  # noqa: PT017
            refused.add(place)
        setattr(parent, name, layer)
    assert refused >= {"query.linear", "key.linear", "value.linear"}


def test_arguments_are_keyword_only() -> None:
    x = inputs()
    with pytest.raises(TypeError, match="positional argument"):
        build()(*x.values())
