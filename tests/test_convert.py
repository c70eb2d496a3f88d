"""Conversion: the same bits in every format, or an error with the reason."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
from headnotes import convert, fast, masks
from headnotes.implementations import batch_first, causal, stages, valid_lens
from headnotes.mha import MultiHeadAttention

# Prime and pairwise distinct, so that no swapped pair of axes can pass unseen.
LENGTH, BATCH, HEADS, D_K = 5, 3, 2, 11
D = HEADS * D_K
K_WIDTH, V_WIDTH, CONTEXT = 7, 13, 17

# Each format with the arguments of its constructor other than sizes.
Settings = dict[str, Any]
SOURCES: dict[str, tuple[str, Settings]] = {
    "core": ("core", {"dropout_prob": 0.3, "bias": True}),
    "core without bias": ("core", {"dropout_prob": 0.3, "bias": False}),
    "fast": ("fast", {"dropout_prob": 0.3, "bias": True}),
    "fast without bias": ("fast", {"dropout_prob": 0.3, "bias": False}),
    "batch_first": ("batch_first", {"dropout": 0.3}),
    "v1": ("v1", {}),
    "torch": ("torch", {"bias": True, "batch_first": True, "dropout": 0.3}),
    "torch without bias": ("torch", {"bias": False, "dropout": 0.3}),
    "torch, widths differ": ("torch", {"bias": True, "dropout": 0.3}),
    "torch, widths differ, without bias": ("torch", {"bias": False, "dropout": 0.3}),
    "valid_lens": ("valid_lens", {"bias": True, "dropout": 0.3}),
    "valid_lens without bias": ("valid_lens", {"bias": False, "dropout": 0.3}),
    "valid_lens, widths differ": ("valid_lens", {"bias": True, "dropout": 0.3}),
    "v2": ("v2", {"qkv_bias": False}),
    "v2 with bias": ("v2", {"qkv_bias": True}),
}
LIMITS = {"context_length": CONTEXT, "dropout": 0.3}
for name in ("causal", "causal_head", "wrapper"):
    SOURCES[name] = (name, {**LIMITS, "qkv_bias": False})
    SOURCES[f"{name} with bias"] = (name, {**LIMITS, "qkv_bias": True})
for order in ("3 heads d_k", "heads 3 d_k"):
    for flags in ((True, True), (False, True), (True, False), (False, False)):
        both = dict(zip(("qkv_bias", "output_bias"), flags, strict=True))
        SOURCES[f"fused {order} {flags}"] = ("fused", {"order": order, **both})

SINGLE = {"v1", "v2", "causal_head"}
WITHOUT_OUTPUT = {*SINGLE, "wrapper"}


def build(source: str, **like: Any) -> nn.Module:
    """A module whose weights and biases are all different, and far from zero."""
    kind, settings = SOURCES[source]
    sizes: dict[str, Any] = {
        "core": {"heads": HEADS, "d_model": D},
        "fast": {"heads": HEADS, "d_model": D},
        "causal": {"d_in": D, "d_out": D, "num_heads": HEADS},
        "valid_lens": {"num_hiddens": D, "num_heads": HEADS},
        "batch_first": {"d_model": D, "n_heads": HEADS},
        "v1": {"d_in": D, "d_out": D},
        "v2": {"d_in": D, "d_out": D},
        "causal_head": {"d_in": D, "d_out": D},
        "wrapper": {"d_in": D, "d_out": D_K, "num_heads": HEADS},
        "torch": {"embed_dim": D, "num_heads": HEADS},
        "fused": {"d_model": D, "heads": HEADS},
    }[kind]
    if source.startswith("torch, widths differ"):
        sizes |= {"kdim": K_WIDTH, "vdim": V_WIDTH}
    module = convert.FORMATS[kind].module_type(**sizes, **settings)
    if kind == "valid_lens":
        k_width, v_width = (K_WIDTH, V_WIDTH) if "differ" in source else (D, D)
        x = [torch.zeros(1, 1, width) for width in (D, k_width, v_width)]
        module(*x, None)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / D**0.25)
    return module.to(**like).eval()


def has_bias(module: nn.Module) -> bool:
    return any("bias" in name for name, _ in module.named_parameters())


def refusal(source: str, target: str, module: nn.Module) -> str | None:
    """The expected error for a pair of formats, or None."""
    kind = SOURCES[source][0]
    if "differ" in source and target not in ("torch", "valid_lens"):
        return "has one width for"
    if kind not in SINGLE and target in SINGLE:
        return "is one head"
    if kind not in WITHOUT_OUTPUT and target in WITHOUT_OUTPUT:
        return "has no output projection"
    if target == "v1" and has_bias(module):
        return "'v1' would lose the query bias"
    return None


def bits(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


def needed(target: str) -> Settings:
    """The settings that the target requires."""
    if target in ("causal", "causal_head", "wrapper"):
        return {"context_length": CONTEXT}
    return {"order": "heads 3 d_k"} if target == "fused" else {}


# Converting there and back


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("source", SOURCES)
def test_every_pair_converts_there_and_back_bit_for_bit_or_is_refused(
    device: torch.device, source: str, dtype: torch.dtype
) -> None:
    kind, settings = SOURCES[source]
    module = build(source, device=device, dtype=dtype)
    before = bits(module)
    for target in convert.FORMATS:
        reason = refusal(source, target, module)
        if reason is not None:
            with pytest.raises(ValueError, match=re.escape(reason)):
                convert.to(module, target, **needed(target))
            continue
        there = convert.to(module, target, **needed(target))
        assert type(there) is convert.FORMATS[target].module_type
        back = convert.to(there, kind, **settings)
        assert same(bits(back), before), target
        assert repr(back) == repr(module), target
    assert same(bits(module), before)


@pytest.mark.parametrize("source", SOURCES)
def test_settings_that_are_not_given_are_those_of_the_source(source: str) -> None:
    kind, settings = SOURCES[source]
    module = build(source)
    twin = convert.to(module, kind)
    assert same(bits(twin), bits(module))
    assert repr(twin) == repr(module)
    for name in ("context_length", "batch_first", "order"):
        if name in settings and kind != "wrapper":
            assert getattr(twin, name) == settings[name]


def test_dropout_and_context_length_are_copied_under_any_name() -> None:
    core = build("core")
    torch_own = convert.to(core, "torch")
    assert torch_own.dropout == 0.3
    head = convert.to(torch_own, "causal", context_length=CONTEXT)
    assert head.dropout.p == 0.3
    assert convert.to(head, "core").dropout.p == 0.3
    assert convert.to(head, "core", dropout_prob=0.5).dropout.p == 0.5
    wrapper = build("wrapper")
    assert convert.to(wrapper, "causal").context_length == CONTEXT
    assert convert.to(wrapper, "causal", context_length=2).context_length == 2
    assert convert.to(wrapper, "valid_lens").attention.dropout.p == 0.3


# The new module


@pytest.mark.parametrize("target", convert.FORMATS)
def test_the_new_module_shares_no_memory_and_is_trainable(
    device: torch.device, target: str
) -> None:
    module = build("causal_head", device=device)
    built = convert.to(module, target, **needed(target))
    before = bits(module)
    for parameter in built.parameters():
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert parameter.device.type == device.type
        with torch.no_grad():
            parameter.fill_(7)
    weights = convert.extract(module)
    for projection in weights[1:]:
        assert not projection.weight.requires_grad
        projection.weight.fill_(7)
    assert same(bits(module), before)


@pytest.mark.parametrize("target", convert.FORMATS)
def test_converting_does_not_change_the_random_state(
    device: torch.device, target: str
) -> None:
    module = build("causal_head", device=device)
    before = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state() if device.type == "cuda" else before
    convert.to(module, target, **needed(target))
    assert torch.equal(torch.get_rng_state(), before)
    if device.type == "cuda":
        assert torch.equal(torch.cuda.get_rng_state(), on_device)


@pytest.mark.parametrize("target", convert.FORMATS)
def test_the_mode_is_that_of_the_source(target: str) -> None:
    module = build("causal_head")
    for training in (True, False):
        built = convert.to(module.train(training), target, **needed(target))
        assert all(child.training == training for child in built.modules())


def test_a_default_device_changes_nothing() -> None:
    module = build("causal_head")
    with torch.device("meta"):
        built = convert.to(module, "core")
    assert {p.device.type for p in built.parameters()} == {"cpu"}


def test_modules_on_meta_convert() -> None:
    nowhere = build("core").to("meta")
    there = convert.to(nowhere, "torch")
    assert {p.device.type for p in there.parameters()} == {"meta"}


def test_a_converted_module_is_like_any_other(device: torch.device) -> None:
    x = torch.randn(BATCH, LENGTH, D, device=device)
    lens = valid_lens.MultiHeadAttention
    built = convert.to(build("core", device=device), "valid_lens")
    assert type(built) is lens
    assert type(built.W_q) is nn.Linear
    assert built.attention.attention_weights is None
    twin = copy.deepcopy(built)
    assert torch.equal(built(x, x, x, None), twin(x, x, x, None))


def test_a_mask_is_built_and_not_left_empty(device: torch.device) -> None:
    built = convert.to(build("core", device=device), "causal", context_length=CONTEXT)
    expected = torch.ones(CONTEXT, CONTEXT, device=device).triu(1).bool()
    assert torch.equal(built.mask, expected)


# Its outputs


def expected_output(module: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """By loops, from the extracted weights; `x` and the result are batch first."""
    heads, *parts = convert.extract(module)
    parameters = {
        name: (part.weight.tolist(), part.bias_or_zeros().tolist())
        for name, part in zip(convert.PARTS, parts, strict=True)
    }
    columns = x.transpose(0, 1).tolist()
    full = mask.expand(LENGTH, LENGTH, BATCH).tolist()
    output, _ = oracle.attention(columns, columns, columns, full, parameters, heads)
    return torch.tensor(output, dtype=torch.float64).transpose(0, 1)


def run(target: str, module: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    """Self-attention in the convention of each; `mask` is causal, or None."""
    keep = None if mask is None else mask.squeeze(-1)
    if target in ("core", "fast"):
        x = x.transpose(0, 1)
        return module(query=x, key=x, value=x, mask=mask).transpose(0, 1)
    if target == "valid_lens":
        lens = torch.arange(1, LENGTH + 1, device=x.device).expand(BATCH, LENGTH)
        return module(x, x, x, None if keep is None else lens)
    if target == "batch_first":
        return module(x, x, x, keep)[0]
    if target == "torch":
        x = x.transpose(0, 1)
        blocked = None if keep is None else ~keep
        return module(x, x, x, attn_mask=blocked)[0].transpose(0, 1)
    if target in ("v1", "v2"):
        return torch.stack([module(sentence) for sentence in x])
    assert mask is not None
    return module(x)


@pytest.mark.parametrize(
    "source",
    ["core", "core without bias", "batch_first", "causal with bias", "wrapper"],
)
def test_outputs_are_those_of_the_loops_in_every_target(
    device: torch.device, source: str
) -> None:
    like = {"device": device, "dtype": torch.float64}
    module = build(source, **like)
    x = torch.randn(BATCH, LENGTH, D, **like)
    mask = masks.causal(LENGTH, device=device)
    expected = expected_output(module, x, mask).to(device)
    targets = ["core", "fast", "causal", "valid_lens", "batch_first", "torch"]
    for target in targets + ["wrapper"] * (source == "wrapper"):
        built = convert.to(module, target, **needed(target))
        y = run(target, built, x, mask)
        assert (y - expected).abs().max() <= 1e-12, target


def test_outputs_of_a_single_head_are_those_of_the_loops_in_every_target(
    device: torch.device,
) -> None:
    like = {"device": device, "dtype": torch.float64}
    module = build("v2", **like)
    x = torch.randn(BATCH, LENGTH, D, **like)
    causal_mask = masks.causal(LENGTH, device=device)
    for mask in (None, causal_mask):
        full = torch.ones_like(causal_mask) if mask is None else mask
        expected = expected_output(module, x, full).to(device)
        never, always = {"v1", "v2"}, {"causal", "causal_head", "wrapper"}
        for target in (
            convert.FORMATS.keys() - {"fused"} - (never if full is mask else always)
        ):
            built = convert.to(module, target, **needed(target))
            y = run(target, built, x, mask)
            assert (y - expected).abs().max() <= 1e-12, target


def test_inputs_of_different_widths_give_the_same_in_torch_and_valid_lens(
    device: torch.device,
) -> None:
    like = {"device": device, "dtype": torch.float64}
    ours = build("valid_lens, widths differ", **like)
    theirs = convert.to(ours, "torch", batch_first=True)
    x = [torch.randn(BATCH, LENGTH, width, **like) for width in (D, K_WIDTH, V_WIDTH)]
    assert (ours(*x, None) - theirs(*x)[0]).abs().max() <= 1e-12


def test_widths_in_and_out_may_differ_where_the_target_allows(
    device: torch.device,
) -> None:
    wide = stages.MultiHeadAttentionWrapper(7, D_K, CONTEXT, 0.0, HEADS).to(device)
    x = torch.randn(BATCH, LENGTH, 7, device=device)
    for target in ("causal", "valid_lens", "wrapper"):
        built = convert.to(wide, target)
        y = run(target, built, x, masks.causal(LENGTH, device=device))
        torch.testing.assert_close(y, wide(x))
        back = convert.to(built, "wrapper", context_length=CONTEXT, qkv_bias=False)
        assert same(bits(back), bits(wide))


# Layouts, row by row


@pytest.mark.parametrize("order", ["3 heads d_k", "heads 3 d_k"])
def test_rows_of_a_fused_projection_are_counted_as_its_order_says(order: str) -> None:
    fused = build(f"fused {order} (True, True)")
    heads, *parts = convert.extract(fused)
    assert heads == HEADS
    for which, part in enumerate(parts[:3]):
        for h in range(HEADS):
            for c in range(D_K):
                row = {
                    "3 heads d_k": (which * HEADS + h) * D_K + c,
                    "heads 3 d_k": (h * 3 + which) * D_K + c,
                }[order]
                assert torch.equal(part.weight[h * D_K + c], fused.qkv.weight[row])
                assert part.bias[h * D_K + c] == fused.qkv.bias[row]
    assert torch.equal(parts[3].weight, fused.output.weight)


def test_torch_counts_its_rows_like_a_fused_projection() -> None:
    module = build("torch")
    fused = convert.to(module, "fused", order="3 heads d_k")
    assert torch.equal(fused.qkv.weight, module.in_proj_weight)
    assert torch.equal(fused.qkv.bias, module.in_proj_bias)


def test_a_checkpoint_without_biases_loads_strictly_into_its_place() -> None:
    fused = convert.Fused(D, HEADS, "3 heads d_k", qkv_bias=False, output_bias=False)
    checkpoint = {
        "qkv.weight": torch.randn(3 * D, D),
        "output.weight": torch.randn(D, D),
    }
    fused.load_state_dict(checkpoint, strict=True)
    core = convert.to(fused, "core")
    assert torch.equal(core.key.linear.weight, checkpoint["qkv.weight"][D : 2 * D])
    assert core.query.linear.bias is None
    assert not core.value.linear.bias.any()


def test_a_compiled_module_is_unwrapped() -> None:
    core = build("core")
    compiled = torch.compile(core, backend="eager")
    for part in convert.PARTS:
        ours, theirs = (getattr(convert.extract(m), part) for m in (core, compiled))
        assert torch.equal(ours.weight, theirs.weight)


def test_v1_is_the_transpose_and_the_wrapper_a_stack() -> None:
    v1 = build("v1")
    v2 = convert.to(v1, "v2")
    assert torch.equal(v2.W_key.weight, v1.W_key.T)
    wrapper = build("wrapper")
    stacked = convert.to(wrapper, "causal")
    for h, head in enumerate(wrapper.heads):
        rows = stacked.W_value.weight[h * D_K : (h + 1) * D_K]
        assert torch.equal(rows, head.W_value.weight)
    assert torch.equal(stacked.out_proj.weight, torch.eye(D))
    assert not stacked.out_proj.bias.any()


# Biases


def test_a_missing_bias_is_written_as_zeros_where_the_target_has_one() -> None:
    source = build("torch without bias")
    core = convert.to(source, "core")
    assert core.query.linear.bias is None
    assert not core.value.linear.bias.any()
    assert not core.output.bias.any()
    all_biased = convert.to(source, "batch_first")
    assert not all_biased.Wq.bias.any()
    asked_for = convert.to(source, "torch", bias=True)
    assert not asked_for.in_proj_bias.any()


def test_a_bias_of_zeros_is_kept_and_dropped_only_where_it_must_be() -> None:
    source = build("v2 with bias")
    with torch.no_grad():
        for name in convert.STAGES_LAYERS:
            source.get_submodule(name).bias.zero_()
    assert convert.to(source, "causal_head", context_length=2).W_query.bias is not None
    assert convert.to(source, "v2", qkv_bias=False).W_query.bias is None
    assert same(
        bits(convert.to(convert.to(source, "v1"), "v2", qkv_bias=True)), bits(source)
    )


@pytest.mark.parametrize("part", convert.PARTS)
def test_a_bias_that_is_not_zero_is_never_lost(part: str) -> None:
    source = convert.to(build("torch without bias"), "batch_first")
    layer = source.get_submodule(
        {"query": "Wq", "key": "Wk", "value": "Wv", "output": "Wo"}[part]
    )
    with torch.no_grad():
        layer.bias[3] = -0.25
    message = (
        f"`bias=False` would lose the {part} bias of `module`, whose largest entry is "
        f"0.25; to drop it, first set it to zero"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        convert.to(source, "torch", bias=False)
    with torch.no_grad():
        layer.bias[3] = torch.nan
    with pytest.raises(ValueError, match="would lose"):
        convert.to(source, "valid_lens", bias=False)


# Errors


class Subclass(MultiHeadAttention):
    """A subclass, which may compute anything."""


def torch_with(**settings: Any) -> nn.Module:
    return nn.MultiheadAttention(D, HEADS, **settings)


def mixed() -> nn.Module:
    module = build("core")
    module.output.double()
    return module


KNOWN = (
    "core, fast, causal, valid_lens, batch_first, v1, v2, causal_head, wrapper, torch, "
    "fused"
)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: convert.to(build("core"), "keras"),
            ValueError,
            f"`target` (='keras') is unknown; there are {KNOWN}",
        ),
        (
            lambda: convert.extract(nn.Linear(2, 2)),
            TypeError,
            "`module` is a torch.nn.modules.linear.Linear, which is unknown here; load "
            f"its weights into one of {KNOWN}",
        ),
        (
            lambda: convert.to(Subclass(HEADS, D), "core"),
            TypeError,
            f"`module` is a {__name__}.Subclass, which is unknown here; load its "
            f"weights into one of {KNOWN}",
        ),
        (
            lambda: convert.to(valid_lens.MultiHeadAttention(D, HEADS, 0.0), "core"),
            ValueError,
            "`module` is lazy; first call it, or load a checkpoint",
        ),
        (
            lambda: convert.to(mixed(), "torch"),
            ValueError,
            "`module` mixes dtypes or devices; first use `module.to(...)`",
        ),
        (
            lambda: convert.to(torch_with(add_bias_kv=True), "core"),
            ValueError,
            "`module` was built with `add_bias_kv` or `add_zero_attn`, a key that the "
            "others do not have; it cannot be converted",
        ),
        (
            lambda: convert.to(torch_with(add_zero_attn=True), "core"),
            ValueError,
            "`module` was built with `add_bias_kv` or `add_zero_attn`, a key that the "
            "others do not have; it cannot be converted",
        ),
        (
            lambda: convert.to(build("core"), "torch", qkv_bias=True, d_model=3),
            TypeError,
            "'torch' has no setting `qkv_bias`, `d_model`; there are dropout, "
            "batch_first, bias",
        ),
        (
            lambda: convert.to(build("core"), "v1", bias=True),
            TypeError,
            "'v1' has no setting `bias`; there are none",
        ),
        (
            lambda: convert.to(build("core"), "causal"),
            ValueError,
            "'causal' needs `context_length=...`, as `module` has none",
        ),
        (
            lambda: convert.to(build("core"), "fused"),
            ValueError,
            "'fused' needs `order=...`, as `module` has none",
        ),
        (
            lambda: convert.to(causal.MultiHeadAttention(3, D, 2, 0.0, HEADS), "core"),
            ValueError,
            "'core' has one width for query, key, value, output, which in `module` are "
            f"3, 3, 3, {D} wide; each may differ in 'valid_lens'",
        ),
        (
            lambda: convert.to(stages.SelfAttention_v2(3, 2), "batch_first"),
            ValueError,
            "'batch_first' has one width for query, key, value, output, which in "
            "`module` are 3, 3, 3, 2 wide; each may differ in 'valid_lens'",
        ),
        (
            lambda: convert.to(
                stages.SelfAttention_v2(3, 2), "fused", order="heads 3 d_k"
            ),
            ValueError,
            "'fused' has one width for query, key, value, output, which in `module` "
            "are 3, 3, 3, 2 wide; each may differ in 'valid_lens'",
        ),
        (
            lambda: convert.to(stages.SelfAttention_v1(3, 2), "torch"),
            ValueError,
            "'torch' has one width for query, output, which in `module` are 3, 2 wide; "
            "each may differ in 'valid_lens'",
        ),
        (
            lambda: convert.to(
                build("valid_lens, widths differ"), "causal", context_length=2
            ),
            ValueError,
            "'causal' has one width for query, key, value, which in `module` are "
            f"{D}, {K_WIDTH}, {V_WIDTH} wide; each may differ in 'valid_lens'",
        ),
        (
            lambda: convert.to(nn.MultiheadAttention(6, 1, device="meta"), "v2"),
            ValueError,
            "'v2' has no output projection, but `module` has one, and it is not the "
            "identity; 'causal' could hold it",
        ),
        (
            lambda: convert.to(build("wrapper"), "v2"),
            ValueError,
            f"'v2' is one head, but `module` has {HEADS}",
        ),
        (
            lambda: convert.to(build("core"), "wrapper", context_length=2),
            ValueError,
            "'wrapper' has no output projection, but `module` has one, and it is not "
            "the identity; 'causal' could hold it",
        ),
        (
            lambda: convert.Fused(D, HEADS, "heads d_k 3"),
            ValueError,
            "`order` (='heads d_k 3') must be '3 heads d_k' or 'heads 3 d_k'",
        ),
        (
            lambda: convert.Fused(10, 4, "heads 3 d_k"),
            ValueError,
            "`d_model` (=10) must be divisible by `heads` (=4); 2 and 5 would do",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()


def test_an_identity_with_a_bias_is_an_output_projection() -> None:
    source = convert.to(build("wrapper"), "causal")
    assert convert.to(source, "wrapper") is not None
    with torch.no_grad():
        source.out_proj.bias[5] = 0.5
    message = (
        "'wrapper' would lose the output bias of `module`, whose largest entry is 0.5; "
        "to drop it, first set it to zero"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        convert.to(source, "wrapper")


def test_a_fused_projection_computes_nothing() -> None:
    with pytest.raises(NotImplementedError):
        build("fused 3 heads d_k (True, True)")(torch.randn(2, D))


def test_every_implementation_has_a_format() -> None:
    types = {form.module_type for form in convert.FORMATS.values()}
    assert types >= {
        MultiHeadAttention,
        fast.MultiHeadAttention,
        nn.MultiheadAttention,
        causal.MultiHeadAttention,
        valid_lens.MultiHeadAttention,
        batch_first.MultiHeadAttention,
        stages.SelfAttention_v1,
        stages.SelfAttention_v2,
        stages.CausalAttention,
        stages.MultiHeadAttentionWrapper,
    }


class Adapted(nn.Module):
    """A layer with an adapter, which computes more than its weight says."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (MultiHeadAttention(HEADS, D), "output"),
        (fast.MultiHeadAttention(HEADS, D), "key.linear"),
        (nn.MultiheadAttention(D, HEADS), "out_proj"),
        (convert.Fused(D, HEADS, "3 heads d_k"), "output"),
        (convert.Fused(D, HEADS, "3 heads d_k"), "qkv"),
        (
            stages.MultiHeadAttentionWrapper(D, D_K, CONTEXT, 0.0, HEADS),
            "heads.1.W_key",
        ),
    ],
)
def test_a_layer_that_is_not_linear_is_refused_by_name(
    module: nn.Module, name: str
) -> None:
    owner, _, attribute = name.rpartition(".")
    parent = module.get_submodule(owner)
    setattr(parent, attribute, Adapted(getattr(parent, attribute)))
    name = attribute if name.startswith("heads") else name
    message = (
        f"`{name}` of `module` is a {__name__}.Adapted, not `nn.Linear`; merge "
        f"adapters into its weights, or set them to the identity"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        convert.extract(module)
