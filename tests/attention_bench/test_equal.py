"""Equality: the reference is right, and implementations that differ are excluded."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import oracle
from attention_bench.equal import (
    build_and_check,
    check_dropout,
    check_equal,
    deterministic_outputs,
    make_step,
    reference,
)
from attention_bench.implementations import IMPLEMENTATIONS, Adapter, Implementation
from attention_bench.setting import MASKS, Setting
from headnotes import convert

SMALL: dict[str, Any] = {"d_model": 28, "heads": 7}
ALL_MASKS = {"none": "", "causal": "", "padding": ""}


def changed(name: str, change: Any) -> Implementation:
    """An implementation whose adapter is changed after it was built."""

    def build(core: Any, setting: Setting) -> Adapter:
        adapter = IMPLEMENTATIONS[name].build(core, setting)
        change(adapter)
        return adapter

    return Implementation(build, ALL_MASKS)


@pytest.mark.parametrize("mask", MASKS)
def test_the_reference_is_the_formula(mask: str) -> None:
    setting = Setting(3, 5, mask, dtype=torch.float64, **SMALL)
    weights, keep = convert.extract(setting.core()), setting.attention_mask()
    allowed = torch.ones(5, 5, 3).bool() if keep is None else keep.expand(5, 5, 3)
    parameters = {
        part: tuple(tensor.tolist() for tensor in getattr(weights, part))
        for part in convert.PARTS
    }
    x = setting.x().tolist()
    output, attn = oracle.attention(x, x, x, allowed.tolist(), parameters, 7)
    outputs = reference(setting)
    assert torch.allclose(outputs["output"], torch.tensor(output).double(), atol=1e-6)
    mean = torch.tensor(attn).double().mean(dim=-1)
    assert torch.allclose(outputs["weights"], mean, atol=1e-6)


def test_the_gradient_of_the_reference_is_that_of_the_core() -> None:
    setting = Setting(3, 5, "padding", training=True, **SMALL)
    adapter = IMPLEMENTATIONS["core"].build(setting.core(), setting)
    gradient = deterministic_outputs(adapter, setting)["input gradient"]
    expected = reference(setting)["input gradient"]
    assert torch.allclose(expected, gradient, atol=1e-5)


def test_the_largest_error_of_all_parts_counts() -> None:
    expected = {"output": torch.tensor([4.0, 2.0]), "weights": torch.ones(3)}
    close = {"output": torch.tensor([4.0, 2.00001])}
    error, problem = check_equal(close, expected, tolerance=1e-5)
    assert error == pytest.approx(2.5e-6, rel=0.1)
    assert problem == ""
    wrong_weights = close | {"weights": torch.ones(3) * 0.9}
    error, problem = check_equal(wrong_weights, expected, tolerance=1e-5)
    assert error == pytest.approx(0.1)
    assert problem == "not equal: weights off by 0.1 of the largest entry"


def test_nan_is_not_equal() -> None:
    expected = {"output": torch.tensor([4.0, 2.0])}
    nan = {"output": torch.full((2,), math.nan)}
    error, problem = check_equal(nan, expected, tolerance=1e-5)
    assert error == math.inf
    assert problem.startswith("not equal: output off by inf")


def test_parts_that_only_one_has_are_not_compared() -> None:
    expected = {"output": torch.tensor([4.0, 2.0]), "weights": torch.ones(3)}
    more = {"output": expected["output"], "input gradient": torch.ones(1)}
    assert check_equal(more, expected, tolerance=1e-5) == (0, "")


def test_a_planted_difference_is_found() -> None:
    def forget_the_scale(adapter: Adapter) -> None:
        adapter.module.scale = 1.0  # type: ignore[assignment]

    def raise_in_call(adapter: Adapter) -> None:
        def call(x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError("not here")

        adapter.call = call

    implementations = {
        "nn": IMPLEMENTATIONS["nn"],
        "planted": changed("core", forget_the_scale),
        "raises": changed("core", raise_in_call),
        "causal": IMPLEMENTATIONS["causal"],
    }
    setting = Setting(3, 5, **SMALL)
    adapters, max_errors, skipped = build_and_check(implementations, setting)
    assert list(adapters) == ["nn"]
    assert max_errors["nn"] < 1e-6 < max_errors["planted"]
    assert skipped["planted"].startswith("not equal: output off by 0.")
    assert skipped["raises"] == "NotImplementedError: not here"
    # It does not support the setting, which is not worth a line.
    assert "causal" not in skipped


def test_a_wrong_gradient_is_found() -> None:
    def double_the_gradient(adapter: Adapter) -> None:
        call = adapter.call
        adapter.call = lambda x: call(x) + 0 * x + (x - x.detach())

    planted = {"planted": changed("core", double_the_gradient)}
    forward = Setting(3, 5, **SMALL)
    assert list(build_and_check(planted, forward)[0]) == ["planted"]
    training = Setting(3, 5, training=True, **SMALL)
    adapters, _, skipped = build_and_check(planted, training)
    assert adapters == {}
    assert "input gradient off by" in skipped["planted"]


def test_missing_dropout_is_found() -> None:
    def disable_dropout(adapter: Adapter) -> None:
        for part in adapter.module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0

    implementations = {
        "core": IMPLEMENTATIONS["core"],
        "planted": changed("core", disable_dropout),
    }
    setting = Setting(3, 11, dropout=0.3, training=True, **SMALL)
    adapters, _, skipped = build_and_check(implementations, setting)
    assert list(adapters) == ["core"]
    assert skipped == {
        "planted": "not equal: dropout changes the output 0 times as much as the "
        "reference"
    }


def test_too_much_dropout_is_found() -> None:
    def increase_dropout(adapter: Adapter) -> None:
        for part in adapter.module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.8

    planted = {"planted": changed("core", increase_dropout)}
    setting = Setting(3, 11, dropout=0.1, training=True, **SMALL)
    assert list(build_and_check(planted, setting)[2]) == ["planted"]


@pytest.mark.parametrize("change", [0.49, 2.01, math.nan, math.inf])
def test_dropout_may_change_the_output_by_a_factor_of_two(change: float) -> None:
    assert check_dropout(0.51) == check_dropout(1.99) == ""
    assert check_dropout(change).startswith("not equal: dropout changes the output")


def test_inference_records_no_graph() -> None:
    setting = Setting(3, 5, **SMALL)
    outputs = []
    module = nn.Linear(28, 28)
    adapter = Adapter(module, lambda x: outputs.append(module(x)))
    make_step(adapter, setting)()
    assert [output.requires_grad for output in outputs] == [False]
    assert not module.training


def test_a_training_step_has_gradients_of_input_and_weights() -> None:
    setting = Setting(3, 5, dropout=0.1, training=True, **SMALL)
    adapter = IMPLEMENTATIONS["nn"].build(setting.core(), setting)
    accumulated = []
    for parameter in adapter.module.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: accumulated.append(p.grad is not None)
        )
    call = adapter.call
    inputs = []

    def record_input(x: torch.Tensor) -> Any:
        inputs.append(x)
        return call(x)

    adapter.call = record_input
    step = make_step(adapter, setting)
    step()
    step()
    assert adapter.module.training
    assert accumulated == [True] * 2 * len(list(adapter.module.parameters()))
    assert inputs[0].requires_grad
    assert inputs[0].grad is None
    assert all(p.grad is None for p in adapter.module.parameters())
