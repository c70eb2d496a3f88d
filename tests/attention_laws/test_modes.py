"""Laws of how it is run: each is broken by something, and by what it should be."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attention_laws import LAWS, check
from attention_laws.adapter import Adapter, Sizes
from attention_laws.law import Broken, Failed, NotApplicable
from attention_laws.modes import __name__ as family
from attention_laws.trial import Trial
from specimens import AnswersOnTheCpu, Honest, OtherwiseCompiled, assert_caught

NAMES = [name for name, law in LAWS.items() if law.test.__module__ == family]


@pytest.mark.parametrize("name", NAMES)
def test_each_law_is_broken_by_who_breaks_it(name: str, device: torch.device) -> None:
    assert_caught(name, device.type)


def test_an_answer_on_another_device_is_seen(device: torch.device) -> None:
    laws = ["dtype_and_device"]
    report = check(AnswersOnTheCpu, only=laws, device=device.type)
    assert report.ok == (device.type == "cpu")


def compiled(attention: type[nn.Module], heads: int, thorough: bool = False) -> None:
    settings = {"d_model": "{d_model}", "heads": "{heads}"}
    inputs = ("query", "key", "value")
    adapter = Adapter(attention, attention.__name__, "", settings, inputs=inputs)
    sizes = Sizes(2, 3, 3, heads, d_k=4)
    LAWS["compiled"].test(Trial(adapter, sizes, thorough=thorough))


def test_who_has_been_compiled_often_is_compiled_again() -> None:
    # torch gives up on what it had to compile too often, and runs it eagerly.
    with torch._dynamo.config.patch(recompile_limit=1):
        for heads in (1, 2):
            with pytest.raises(Broken):
                compiled(OtherwiseCompiled, heads)


def test_who_has_no_compiler_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: nn.Module, backend: str) -> Callable[..., Tensor]:
        def call(*inputs: Tensor) -> Tensor:
            raise RuntimeError(f"InvalidCxxCompiler: {said} found in torch.{backend}")

        return call

    monkeypatch.setattr(torch, "compile", missing)
    said = "No working C++ compiler"
    with pytest.raises(NotApplicable, match=r"^there is no C\+\+ compiler here$"):
        compiled(Honest, heads=3, thorough=True)
    said = "Something else was"
    with pytest.raises(Failed):
        compiled(Honest, heads=3, thorough=True)
