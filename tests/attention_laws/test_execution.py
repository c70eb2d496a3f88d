"""Laws of execution: each fails on attention that violates it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attention_laws import LAWS, check, execution
from attention_laws.adapter import Adapter, Sizes
from attention_laws.law import LawViolation, NotApplicable, ScriptError
from attention_laws.script import Script
from specimens import assert_caught, each_law_of
from specimens.algebra import HeadsInWeights
from specimens.base import Correct, SelfAttention
from specimens.execution import DiffersIfCompiled, ReturnsOnCpu


class FillsWithLeastOfInput(SelfAttention):
    """The least number of float32 does not fit into the bfloat16 of autocast."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        least = torch.finfo(self.query.weight.dtype).min
        return super().score(q, k).masked_fill(later, least)


@pytest.mark.parametrize("attention", [HeadsInWeights, FillsWithLeastOfInput])
def test_an_attention_that_autocast_cannot_run_is_skipped_unless_asked_for(
    attention: type[nn.Module],
) -> None:
    adapter = Adapter(attention(12, 3), "Attention", "", {}, inputs=("x",))
    for insist, expected in ((False, NotApplicable), (True, ScriptError)):
        script = Script(adapter, Sizes(2, 3, 3, 3, 4), insist=insist)
        with pytest.raises(expected):
            LAWS["autocast"].test(script)


class CapsLargeScores(SelfAttention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return 8 * torch.tanh(super().score(q, k) / 8)


def test_scores_that_a_soft_cap_limits_grow_before_it() -> None:
    settings = {"d_model": "{d_model}", "heads": "{heads}"}
    adapter = Adapter(CapsLargeScores, "Attention", "", settings, inputs=("x",))
    for designs, are_bounded in (({}, True), ({"softcap": "tanh"}, False)):
        script = Script(replace(adapter, designs=designs), Sizes(1, 5, 5, 3, 4))
        assert execution.scores_are_bounded(script) == are_bounded


@each_law_of(execution)
def test_each_law_fails_on_implementations_that_violate_it(
    name: str, device: torch.device
) -> None:
    assert_caught(name, device.type)


@pytest.mark.slow
def test_an_output_on_another_device_fails(device: torch.device) -> None:
    laws = ["dtype_and_device"]
    report = check(ReturnsOnCpu, only=laws, device=device.type)
    assert report.ok == (device.type == "cpu")


def compiled(attention: type[nn.Module], heads: int, thorough: bool = False) -> None:
    settings = {"d_model": "{d_model}", "heads": "{heads}"}
    inputs = ("query", "key", "value")
    adapter = Adapter(attention, attention.__name__, "", settings, inputs=inputs)
    sizes = Sizes(2, 3, 3, heads, d_k=4)
    LAWS["compiled"].test(Script(adapter, sizes, thorough=thorough))


@pytest.mark.slow
def test_the_compiled_law_compiles_after_too_many_recompilations() -> None:
    # After `recompile_limit` compilations torch would run the function eagerly.
    with torch._dynamo.config.patch(recompile_limit=1):
        for heads in (1, 2):
            with pytest.raises(LawViolation):
                compiled(DiffersIfCompiled, heads)


def test_a_missing_compiler_makes_the_law_not_applicable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(module: nn.Module, backend: str) -> Callable[..., Tensor]:
        def call(*inputs: Tensor) -> Tensor:
            raise RuntimeError(f"InvalidCxxCompiler: {problem} found ({backend})")

        return call

    monkeypatch.setattr(torch, "compile", missing)
    problem = "No working C++ compiler"
    with pytest.raises(NotApplicable, match=r"^there is no C\+\+ compiler here$"):
        compiled(Correct, heads=3, thorough=True)
    problem = "Something else was"
    with pytest.raises(ScriptError):
        compiled(Correct, heads=3, thorough=True)
