"""Implementations: each computes the reference, in every setting that it supports."""

import sys

import pytest
import torch

from attention_bench.equal import (
    TOLERANCES,
    build_and_check,
    check_equal,
    deterministic_outputs,
    reference,
)
from attention_bench.implementations import (
    ALL_IMPLEMENTATIONS,
    COMPILED,
    COMPILED_IMPLEMENTATIONS,
    IMPLEMENTATIONS,
    compiled,
    gpt2_module,
    linear,
    nn_mask_kwargs,
)
from attention_bench.setting import MASKS, Setting
from headnotes.convert import Projection

# `transformers` and `x-transformers` warn of deprecations in themselves.
pytestmark = pytest.mark.filterwarnings("ignore")

LIBRARIES = {
    "gpt2": "transformers",
    "bert": "transformers",
    "llama": "transformers",
    "x-transformers": "x_transformers",
}
# FlexAttention needs a compiler, and half a minute.
PLAIN = [name for name in IMPLEMENTATIONS if name not in ("flex", *LIBRARIES)]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", PLAIN)
def test_all_compute_the_same(
    name: str, mask: str, training: bool, device: torch.device
) -> None:
    setting = Setting(
        3, 11, mask, training=training, d_model=28, heads=7, device=device
    )
    if not IMPLEMENTATIONS[name].supports(setting):
        pytest.skip("it does not support this setting")
    adapter = IMPLEMENTATIONS[name].build(setting.core(), setting)
    outputs = deterministic_outputs(adapter, setting)
    assert training == ("input gradient" in outputs)
    assert check_equal(outputs, reference(setting), 1e-5)[1] == ""


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "padding"])
def test_flex_attention_computes_the_same(mask: str) -> None:
    torch.compiler.reset()
    setting = Setting(3, 11, mask, d_model=32, heads=2)
    with torch.inference_mode():
        flex = {"flex": IMPLEMENTATIONS["flex"]}
        adapters, max_errors, skipped = build_and_check(flex, setting)
    assert skipped == {}
    assert list(adapters) == ["flex"]
    assert max_errors["flex"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_those_of_other_packages_compute_the_same(
    name: str, device: torch.device
) -> None:
    pytest.importorskip(LIBRARIES[name])
    for mask in MASKS:
        for dropout in (0.0, 0.3):
            setting = Setting(
                3, 11, mask, dropout, True, d_model=28, heads=7, device=device
            )
            adapters, max_errors, skipped = build_and_check(
                {name: IMPLEMENTATIONS[name]}, setting
            )
            assert skipped == {}
            assert list(adapters) == [name]
            assert max_errors[name] < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_within_its_tolerance(dtype: torch.dtype) -> None:
    setting = Setting(2, 5, "causal", d_model=28, heads=7, dtype=dtype)
    for name in ("core", "nn", "sdpa"):
        adapter = IMPLEMENTATIONS[name].build(setting.core(), setting)
        output = deterministic_outputs(adapter, setting)["output"]
        assert output.dtype == dtype
        expected = reference(setting)
        tolerance = TOLERANCES[dtype]
        assert check_equal({"output": output.float()}, expected, tolerance)[1] == ""


def test_returned_weights_are_averaged_and_sequence_first() -> None:
    setting = Setting(3, 11, "causal", d_model=28, heads=7)
    expected = reference(setting)["weights"]
    for name in ("nn-weights", "batch_first", "fast-weights"):
        adapter = IMPLEMENTATIONS[name].build(setting.core(), setting)
        weights = deterministic_outputs(adapter, setting)["weights"]
        assert torch.allclose(weights, expected, atol=1e-6)


def test_unsupported_settings_are_known() -> None:
    assert not IMPLEMENTATIONS["causal"].supports(Setting(2, 3, "none"))
    assert not IMPLEMENTATIONS["causal"].supports(Setting(2, 3, "padding"))
    assert IMPLEMENTATIONS["causal"].supports(Setting(2, 3, "causal"))
    assert not IMPLEMENTATIONS["nn-fastpath"].supports(Setting(2, 3, training=True))
    with_dropout = Setting(2, 3, dropout=0.1, training=True)
    assert not IMPLEMENTATIONS["flex"].supports(with_dropout)
    assert IMPLEMENTATIONS["core"].supports(with_dropout)


def test_the_fast_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch falls back silently (with 7 heads, for example): here it must not.
    setting = Setting(2, 3, "causal", d_model=28, heads=4)
    adapter = IMPLEMENTATIONS["nn-fastpath"].build(setting.core(), setting)
    calls = []
    native = torch._native_multi_head_attention

    def record(*arguments: object, **options: object) -> object:
        calls.append(1)
        return native(*arguments, **options)

    monkeypatch.setattr(torch, "_native_multi_head_attention", record)
    deterministic_outputs(adapter, setting)
    assert calls == [1]


def test_nn_gets_the_causal_hint_and_the_mask() -> None:
    kwargs = nn_mask_kwargs(Setting(2, 3, "causal"))
    assert kwargs["is_causal"] is True
    assert kwargs["attn_mask"].int().tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert nn_mask_kwargs(Setting(2, 3)) == {}


def test_no_implementation_shares_weights_with_the_core() -> None:
    setting = Setting(2, 3, "causal", d_model=28, heads=7)
    core = setting.core()
    for name in PLAIN:
        adapter = IMPLEMENTATIONS[name].build(core, setting)
        pointers = {p.data_ptr() for p in adapter.module.parameters()}
        assert pointers.isdisjoint(p.data_ptr() for p in core.parameters()), name


def test_dropout_reaches_each_implementation(device: torch.device) -> None:
    setting = Setting(
        2, 9, "causal", 0.5, training=True, d_model=28, heads=7, device=device
    )
    for name in PLAIN:
        if IMPLEMENTATIONS[name].supports(setting):
            adapter = IMPLEMENTATIONS[name].build(setting.core(), setting)
            adapter.module.train()
            x = adapter.switch_layout(setting.x())
            with torch.no_grad():
                one, other = (
                    adapter.outputs(adapter.call(x))["output"] for _ in range(2)
                )
            assert not one.equal(other), name


def test_the_call_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch, "compile", lambda f, **how: seen.append((f, how)) or f)
    setting = Setting(2, 3, d_model=28, heads=7)
    adapter = compiled(IMPLEMENTATIONS["nn"].build)(setting.core(), setting)
    assert [how for _, how in seen] == [{"dynamic": False}]
    assert adapter.call is seen[0][0]


def test_everything_can_be_compiled_except_what_is_compiled_already() -> None:
    plain = set(IMPLEMENTATIONS) - {"flex"}
    assert {name + COMPILED for name in plain} == set(COMPILED_IMPLEMENTATIONS)
    assert set(ALL_IMPLEMENTATIONS) == {*IMPLEMENTATIONS, *COMPILED_IMPLEMENTATIONS}
    assert not ALL_IMPLEMENTATIONS[f"nn-fastpath{COMPILED}"].supports_training
    assert not COMPILED_IMPLEMENTATIONS[f"causal{COMPILED}"].supports(Setting(2, 3))


def test_gpt2_has_dropout_in_its_weights_only() -> None:
    pytest.importorskip("transformers")
    module = gpt2_module(Setting(2, 3, dropout=0.3, d_model=28, heads=7).core())
    assert module.attn_dropout.p == 0.3
    assert module.resid_dropout.p == 0


def test_a_package_that_is_not_installed_is_the_reason_to_skip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "x_transformers", None)
    monkeypatch.setitem(sys.modules, "x_transformers.x_transformers", None)
    setting = Setting(2, 3, d_model=28, heads=7)
    name = "x-transformers"
    adapters, _, skipped = build_and_check({name: IMPLEMENTATIONS[name]}, setting)
    assert adapters == {}
    assert skipped[name].startswith("ModuleNotFoundError: import of x")


def test_a_linear_layer_does_not_advance_the_random_generator() -> None:
    before = torch.get_rng_state()
    layer = linear(Projection(torch.ones(3, 5)))
    assert torch.get_rng_state().equal(before)
    assert layer.weight.equal(torch.ones(3, 5))
    assert layer.bias.equal(torch.zeros(3))
