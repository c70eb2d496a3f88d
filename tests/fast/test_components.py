"""Components of decoders: right alone, in pairs, when decoded, and after errors."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calls import shrink
from headnotes import mha
from headnotes.fast import (
    KeyValueCache,
    MultiHeadAttention,
    Rotary,
    Scores,
    Widths,
    blockwise,
    formula,
)
from headnotes.fast import attention as methods
from headnotes.variants.rotary import rotary_angles, rotary_frequencies, rotate

Q_LEN, K_LEN, BATCH, HEADS, KV_HEADS, D_K, D_V = 3, 5, 2, 4, 2, 3, 1

CLOSE: Any = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles have 2 rows and one group of heads; 2 keys are few."""
    shrink(monkeypatch, heads=2, few=2)


def may_attend(
    i: int, j: int, q_len: int, k_len: int, is_causal: bool, window: int | None
) -> bool:
    """Whether query `i` may attend to key `j`; the last of both are aligned."""
    distance = i + k_len - q_len - j
    return (not is_causal or distance >= 0) and (
        window is None or abs(distance) < window
    )


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The context, row by row, over the allowed keys only."""
    (q_len, batch_size, heads, d_k), (k_len, _, kv_heads, d_v) = (
        query.shape,
        value.shape,
    )
    context = torch.zeros(q_len, batch_size, heads, d_v, dtype=query.dtype)
    for i, b, h in itertools.product(*map(range, query.shape[:3])):
        shared = h * kv_heads // heads
        total = 0 * query.sum() if sinks is None else sinks[h].exp()
        row = torch.zeros(d_v, dtype=query.dtype)
        visible = False
        for j in range(k_len):
            if not may_attend(i, j, q_len, k_len, is_causal, window):
                continue
            if mask is not None and not mask[i % len(mask), j, b % mask.shape[2]]:
                continue
            visible = True
            score = query[i, b, h].dot(key[j, b, shared])
            score = score / math.sqrt(d_k) if scale is None else score * scale
            if soft_cap is not None:
                score = soft_cap * (score / soft_cap).tanh()
            if bias is not None:
                score = score + bias[i % len(bias), j, b % bias.shape[2], h]
            total = total + score.exp()
            row = row + score.exp() * value[j, b, shared]
        if visible:
            context[i, b, h] = row / total
    return context


# Each part with its arguments; `kv_heads` and `d_v` are sizes.
PARTS: dict[str, dict[str, Any]] = {
    "groups": {"kv_heads": KV_HEADS},
    "width": {"d_v": D_V},
    "window": {"window": 2},
    "scale": {"scale": 1.7},
    "cap": {"soft_cap": 1.3},
    "bias": {"bias": (Q_LEN, K_LEN, 1, HEADS)},
    "sinks": {"sinks": (HEADS,)},
}
PAIRS = [frozenset(pair) for pair in itertools.product(PARTS, PARTS)]
PAIRS = sorted({*PAIRS}, key=sorted)
ALONE_AND_IN_PAIRS = pytest.mark.parametrize(
    "parts", PAIRS, ids=lambda parts: "-".join(sorted(parts))
)


def given(parts: frozenset[str], k_len: int = K_LEN) -> dict[str, Any]:
    """Random arguments of `attention`, in float64, which need a gradient."""
    settings: dict[str, Any] = {}
    for part in sorted(parts):
        settings |= PARTS[part]
    kv_heads, d_v = settings.pop("kv_heads", HEADS), settings.pop("d_v", D_K)
    shapes = {
        "query": (Q_LEN, BATCH, HEADS, D_K),
        "key": (k_len, BATCH, kv_heads, D_K),
        "value": (k_len, BATCH, kv_heads, d_v),
    }
    for name in ("bias", "sinks"):
        if name in settings:
            shapes[name] = settings.pop(name)
    tensors = {
        name: (1.5 * torch.randn(shape)).double().requires_grad_()
        for name, shape in shapes.items()
    }
    return tensors | settings


def gradients(
    context: Tensor, arguments: dict[str, Any], create_graph: bool = False
) -> dict[str, Tensor]:
    """The gradients of all arguments that need one, by name."""
    leaves = {
        name: x
        for name, x in arguments.items()
        if isinstance(x, Tensor) and x.requires_grad
    }
    loss = context.pow(3).sum()
    found = torch.autograd.grad(loss, [*leaves.values()], create_graph=create_graph)
    return dict(zip(leaves, found, strict=True))


@ALONE_AND_IN_PAIRS
def test_each_method_equals_the_oracle_with_gradients(
    parts: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = torch.rand(Q_LEN, K_LEN, BATCH) < 0.7
    mask[1, :, 1] = False
    mask[:, 3, 0] = False
    for is_causal in (False, True):
        arguments = given(parts)
        rest: dict[str, Any] = {"is_causal": is_causal}
        rest["mask"] = None if is_causal else mask
        expected = oracle(**arguments, **rest)
        expected_gradients = gradients(expected, arguments)
        for method in (formula.materialized, blockwise.blockwise, methods.fused):
            learned = dict(arguments)
            if method is methods.fused:
                if parts & {"width", "cap"}:
                    continue  # it has none of them
                if "bias" in parts:
                    learned["bias"] = learned["bias"].detach()
            monkeypatch.setattr(methods, "DISPATCH", [(method, lambda call: True)])
            context, _ = methods.attention(**learned, **rest)
            torch.testing.assert_close(context, expected, **CLOSE)
            found = gradients(context, learned)
            for name, gradient in expected_gradients.items():
                if learned[name].requires_grad:
                    torch.testing.assert_close(found[name], gradient, **CLOSE)


@pytest.mark.parametrize("method", [formula.materialized, blockwise.blockwise])
def test_a_large_cap_changes_nothing_in_float16(method: Any) -> None:
    # The quotient of a score and the cap would be 0 in float16.
    q, k, v = (
        (4 * torch.randn(n, BATCH, HEADS, D_K)).half().requires_grad_()
        for n in (Q_LEN, K_LEN, K_LEN)
    )
    results = []
    for soft_cap in (1e9, None):
        context, _ = method(formula.Call(q, k, v, soft_cap=soft_cap))
        grads = torch.autograd.grad(context.square().sum(), (q, k, v))
        results.append([context, *grads])
    torch.testing.assert_close(*results, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("method", [blockwise.blockwise, methods.fused])
def test_second_derivatives_are_those_of_the_formula(
    method: methods.Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"groups", "sinks", "scale"}
    parts |= {"cap", "bias", "window"} if method is blockwise.blockwise else set()
    arguments = given(frozenset(parts))
    second = []
    for each in (method, formula.materialized):
        monkeypatch.setattr(methods, "DISPATCH", [(each, lambda call: True)])
        context, _ = methods.attention(**arguments, is_causal=True)
        first = gradients(context, arguments, create_graph=True)
        total = torch.stack([x.square().sum() for x in first.values()]).sum()
        second.append(gradients(total, arguments))
    for name, expected in second[1].items():
        error = (second[0][name] - expected).abs().max()
        assert error <= 1e-12 * expected.abs().max(), name


def test_weights_and_dropout_of_tiles_are_those_of_the_components(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = given(frozenset({"groups", "window", "sinks", "cap"}))
    shown = []
    for method in (blockwise.blockwise, formula.materialized):
        monkeypatch.setattr(methods, "DISPATCH", [(method, lambda call: True)])
        options: dict[str, Any] = {"is_causal": True, "need_weights": True}
        context, weights = methods.attention(**arguments, **options)
        assert weights is not None
        loss = context.sum() + weights.square().sum()
        shown.append([weights, *gradients(loss, arguments).values()])
        nothing, _ = methods.attention(**arguments, dropout=nn.Dropout(1.0))
        assert not nothing.any()
    for ours, theirs in zip(*shown, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


# The module -------------------------------------------------------------------------


def alibi(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """A bias that falls with the distance, by another slope in each head."""
    distance = (query_positions.unsqueeze(1) - key_positions).abs()
    return -distance.unsqueeze(-1) * torch.tensor([0.5, 0.25, 0.125, 0.0625]).double()


class Normalized(mha.PrepareForMultiHeadAttention):
    """A projection with a norm over each head."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(super().forward(x), (self.d_k,))


MODULES: dict[str, dict[str, Any]] = {
    "Llama": {"kv_heads": 2, "rotary": Rotary(rotary_frequencies(4))},
    "Mistral": {"kv_heads": 1, "rotary": Rotary(rotary_frequencies(2)), "window": 3},
    "Gemma": {
        "widths": Widths(d_k=6),
        "project": Normalized,
        "rotary": Rotary(rotary_frequencies(6), pairing="neighbors"),
        "scores": Scores(scale=0.3, soft_cap=2.0),
    },
    "gpt-oss": {"kv_heads": 2, "window": 4, "scores": Scores(sinks=True)},
    "MPT": {"kv_heads": 2, "scores": Scores(bias=alibi)},
    "all": {
        "kv_heads": 2,
        "widths": Widths(d_k=4, d_v=3),
        "project": Normalized,
        "rotary": Rotary(rotary_frequencies(4), attention_factor=1.1),
        "window": 2,
        "scores": Scores(scale=0.7, soft_cap=3.0, bias=alibi, sinks=True),
    },
}
OF_EACH = pytest.mark.parametrize("name", MODULES)


def module_of(name: str) -> MultiHeadAttention:
    """A module whose rows of attention differ, in float64."""
    module = MultiHeadAttention(4, 20 if name == "all" else 16, 0.0, **MODULES[name])
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


@OF_EACH
def test_the_module_is_projections_rotation_and_the_oracle(name: str) -> None:
    module = module_of(name)
    x = torch.randn(5, 2, module.d_model).double()
    mask = torch.rand(5, 5, 2) < 0.7
    mask[:, 0, 1] = False
    q, k, v = module.query(x), module.key(x), module.value(x)
    positions = torch.arange(5)
    if isinstance(module.rotary, Rotary):
        angles = rotary_angles(
            positions.unsqueeze(1),
            torch.tensor(module.rotary.frequencies, dtype=torch.float64),
        )
        options: Any = {"pairing": module.rotary.pairing}
        factor = module.rotary.attention_factor
        q, k = (factor * rotate(y, angles, **options) for y in (q, k))
    bias = module.score_bias and module.score_bias(positions, positions).unsqueeze(2)
    context = oracle(
        q,
        k,
        v,
        mask=mask,
        is_causal=True,
        window=module.window,
        scale=module.scale,
        soft_cap=module.soft_cap,
        bias=bias,
        sinks=module.sinks,
    )
    # Padding, which no query may attend to, holds NaN.
    padded = x.clone()
    padded[0, 1] = torch.nan
    output = module(query=x, key=padded, value=padded, mask=mask, is_causal=True)
    torch.testing.assert_close(output, module.output(context.flatten(-2)), **CLOSE)
    output.sum().backward()
    gradients = [x.grad for x in module.parameters()]
    assert all(x is not None and x.isfinite().all() for x in gradients)


@OF_EACH
def test_decoding_in_pieces_is_one_causal_pass(name: str) -> None:
    module = module_of(name).eval()
    x = torch.randn(11, 2, module.d_model).double()
    # The second sequence is padded on the left, with NaN.
    x[:3, 1] = torch.nan
    mask = torch.ones(1, 11, 2).bool()
    mask[:, :3, 1] = False
    whole = module(query=x, key=x, value=x, mask=mask, is_causal=True)
    for pieces in ([11], [1] * 11, [5, 1, 1, 4], [2, 6, 3]):
        cache = module.cache(2, 11, left_padding=torch.tensor([0, 3]))
        outputs = []
        for n, piece in enumerate(torch.split(x, pieces)):
            # Beams change places, and back again.
            order = torch.tensor([1, 0] if n % 2 else [0, 1])
            cache.reorder(torch.tensor([1, 0]) if n else order)
            outputs.append(module.decode(piece[:, order], cache)[0][:, order])
        torch.testing.assert_close(torch.cat(outputs)[3:], whole[3:], **CLOSE)
        padding = torch.cat(outputs)[:3, 1]
        torch.testing.assert_close(padding, module.output.bias.expand(3, -1), **CLOSE)
        stored = min(11, module.window or 11)
        assert cache.keys.shape == (2, module.kv_heads, stored, module.d_k)
        assert cache.buffer.shape[3] == stored


def test_a_ring_of_few_slots_grows_up_to_the_window() -> None:
    module = module_of("Mistral").eval()
    x = torch.randn(9, 1, module.d_model).double()
    whole = module(query=x, key=x, value=x, is_causal=True)
    cache = module.cache(1, 1, grow=True)
    outputs = [module.decode(token, cache)[0] for token in torch.split(x, 1)]
    torch.testing.assert_close(torch.cat(outputs), whole, **CLOSE)
    assert (len(cache), cache.capacity) == (9, 3)


@OF_EACH
def test_half_precision_rounds_and_no_more(name: str) -> None:
    module = module_of(name).eval()
    x = torch.randn(4, 2, module.d_model)
    exact = module(query=x.double(), key=x.double(), value=x.double(), is_causal=True)
    if module.score_bias is not None:
        module.score_bias = lambda i, j: alibi(i, j).bfloat16()
    module, x = module.bfloat16(), x.bfloat16()
    output = module(query=x, key=x, value=x, is_causal=True)
    cache = module.cache(2, 4)
    outputs = [module.decode(piece, cache)[0] for piece in torch.split(x, [2, 1, 1])]
    for rounded in (output, torch.cat(outputs)):
        assert rounded.dtype == torch.bfloat16
        error = (rounded.double() - exact).abs().max() / exact.abs().max()
        assert error < 0.1


@pytest.mark.slow
def test_compiled_and_batched_calls_are_the_eager_call() -> None:
    module = module_of("all").eval()
    x = torch.randn(3, 5, 2, module.d_model).double()

    def call(x: Tensor) -> Tensor:
        output: Tensor = module(query=x, key=x, value=x, is_causal=True)
        return output

    eager = torch.stack([call(each) for each in x])
    torch.testing.assert_close(torch.vmap(call)(x), eager, **CLOSE)
    compiled: Any = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x[0]), eager[0], **CLOSE)


def test_inputs_may_have_widths_of_their_own() -> None:
    module = MultiHeadAttention(2, 6, widths=Widths(d_k=5, d_v=1, key=7, value=11))
    query, key = torch.randn(3, 2, 6), torch.randn(4, 2, 7)
    value = torch.randn(4, 2, 11)
    assert module(query=query, key=key, value=value).shape == (3, 2, 6)
    with pytest.raises(ValueError, match=r"`value` has shape \[4, 2, 7\], not .*11"):
        module(query=query, key=key, value=key)
    with pytest.raises(ValueError, match="`value` has length 3, `key` 4"):
        module(query=query, key=key, value=value[:3])
    with pytest.raises(ValueError, match="`key` has batch size 1, but `query` has 2"):
        module(query=query, key=key[:, :1], value=value)
    with pytest.raises(ValueError, match=r"widths \(7, 11\).*use `forward`"):
        module.decode(query, module.cache(2, 3))


def test_defaults_add_nothing_to_the_state() -> None:
    plain = MultiHeadAttention(2, 6, kv_heads=2, widths=Widths(d_k=3), scores=Scores())
    assert plain.state_dict().keys() == mha.MultiHeadAttention(2, 6).state_dict().keys()
    # A learned bias, and sinks, are parameters of the module.
    bias = nn.Bilinear(1, 1, 1)
    module = MultiHeadAttention(2, 6, scores=Scores(bias=bias, sinks=True))
    added = module.state_dict().keys() - plain.state_dict().keys()
    assert added == {"sinks", "score_bias.weight", "score_bias.bias"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 3}, "`heads` .=4. must be divisible by `kv_heads` .=3."),
        ({"kv_heads": 0}, "`kv_heads` .=0. must be an int from 1 up"),
        ({"window": 0}, "`window` .=0. must be an int from 1 up"),
        ({"rotary": Rotary(rotary_frequencies(6))}, "3 pairs, more than fit.*d_k .=4."),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(4, 16, **options)


def test_components_refuse_what_they_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"`d_k` .=0. must be an int"):
        Widths(d_k=0)
    with pytest.raises(ValueError, match=r"`soft_cap` .=0. must be a finite number"):
        Scores(soft_cap=0)
    with pytest.raises(ValueError, match=r"`scale` .=nan. must be a finite number"):
        Scores(scale=math.nan)
    with pytest.raises(ValueError, match=r"`sinks` .=4. must be True or False"):
        Scores(sinks=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`bias` is a float, not a function"):
        Scores(bias=1.0)  # type: ignore[arg-type]
    module = MultiHeadAttention(4, 16, scores=Scores(bias=lambda i, j: i))
    x = torch.randn(3, 1, 16)
    with pytest.raises(ValueError, match=r"returns shape \[3\], not \[q_len .=3."):
        module(query=x, key=x, value=x)


def test_a_cache_of_other_settings_is_refused() -> None:
    module = module_of("Mistral")
    x = torch.randn(1, 2, 16).double()
    cache = KeyValueCache(2, 1, 4, capacity=5, dtype=torch.float64)
    with pytest.raises(ValueError, match="`cache` has window None, the module 3"):
        module.decode(x, cache)
    with pytest.raises(ValueError, match=r"`left_padding` has shape \[3\], not"):
        module.cache(2, 5, left_padding=torch.tensor([0, 1, 2]))
    full = module.cache(2, 2)
    module.decode(x, full)
    with pytest.raises(ValueError, match="the cache is full: it holds 1 of 2"):
        module.decode(x.repeat(2, 1, 1), full)
    assert len(full) == 1
