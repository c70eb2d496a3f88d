"""Equal before fast: the judge, and who is admitted."""

from typing import Any

import pytest
import torch
from torch import nn

import oracle
from attention_bench.contestants import CONTESTANTS, Contestant, Entry
from attention_bench.equal import COMPILED, admit, answer, everyone, judge, step
from attention_bench.setting import MASKS, Setting
from headnotes import convert

SMALL: dict[str, Any] = {"d_model": 28, "heads": 7}
NONE = {"none": "", "causal": "", "padding": ""}


def changed(name: str, change: Any) -> Contestant:
    """A contestant whose entry is changed after it was built."""

    def build(ours: Any, setting: Setting) -> Entry:
        entry = CONTESTANTS[name].build(ours, setting)
        change(entry)
        return entry

    return Contestant(build, NONE)


@pytest.mark.parametrize("mask", MASKS)
def test_the_judge_is_the_formula(mask: str) -> None:
    setting = Setting(3, 5, mask, dtype=torch.float64, **SMALL)
    read, keep = convert.extract(setting.core()), setting.keep()
    allowed = torch.ones(5, 5, 3).bool() if keep is None else keep.expand(5, 5, 3)
    parameters = {
        part: tuple(tensor.tolist() for tensor in getattr(read, part))
        for part in convert.PARTS
    }
    x = setting.x().tolist()
    output, weights = oracle.attention(x, x, x, allowed.tolist(), parameters, 7)
    said = judge(setting)
    assert torch.allclose(said["output"], torch.tensor(output).double(), atol=1e-6)
    mean = torch.tensor(weights).double().mean(dim=-1)
    assert torch.allclose(said["weights"], mean, atol=1e-6)


def test_the_gradient_of_the_judge_is_that_of_the_core() -> None:
    setting = Setting(3, 5, "padding", training=True, **SMALL)
    entry = CONTESTANTS["core"].build(setting.core(), setting)
    theirs = answer(entry, setting)["input gradient"]
    assert torch.allclose(judge(setting)["input gradient"], theirs, atol=1e-5)


def test_a_planted_difference_is_found() -> None:
    def forgets_the_scale(entry: Entry) -> None:
        entry.module.scale = 1.0  # type: ignore[assignment]

    def raises(entry: Entry) -> None:
        def call(x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError("not here")

        entry.call = call

    known = CONTESTANTS | {
        "planted": changed("core", forgets_the_scale),
        "raises": changed("core", raises),
    }
    setting = Setting(3, 5, **SMALL)
    names = ["nn", "planted", "raises", "causal"]
    entries, apart, left_out = admit(names, setting, known)
    assert list(entries) == ["nn"]
    assert apart["nn"] < 1e-6 < apart["planted"]
    assert left_out["planted"].startswith("another function: output off by 0.")
    assert left_out["raises"] == "NotImplementedError: not here"
    assert "causal" not in left_out  # it takes no part, and nobody asks why


def test_a_wrong_gradient_is_found() -> None:
    def stops_the_gradient(entry: Entry) -> None:
        call = entry.call
        entry.call = lambda x: call(x) + 0 * x + (x - x.detach())

    known = CONTESTANTS | {"planted": changed("core", stops_the_gradient)}
    forward = Setting(3, 5, **SMALL)
    assert list(admit(["planted"], forward, known)[0]) == ["planted"]
    training = Setting(3, 5, training=True, **SMALL)
    entries, _, left_out = admit(["planted"], training, known)
    assert entries == {}
    assert "input gradient off by" in left_out["planted"]


def test_forgotten_dropout_is_found() -> None:
    def forgets_dropout(entry: Entry) -> None:
        for part in entry.module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0

    known = CONTESTANTS | {"planted": changed("core", forgets_dropout)}
    setting = Setting(3, 11, dropout=0.3, training=True, **SMALL)
    entries, _, left_out = admit(["core", "planted"], setting, known)
    assert list(entries) == ["core"]
    assert left_out == {
        "planted": "another function: output moved by dropout 0 times as far as it "
        "should be"
    }


def test_doubled_dropout_is_found() -> None:
    def drops_far_more(entry: Entry) -> None:
        for part in entry.module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.8

    known = CONTESTANTS | {"planted": changed("core", drops_far_more)}
    setting = Setting(3, 11, dropout=0.1, training=True, **SMALL)
    assert list(admit(["planted"], setting, known)[2]) == ["planted"]


def test_inference_records_no_graph() -> None:
    setting = Setting(3, 5, **SMALL)
    seen = []
    module = nn.Linear(28, 28)
    entry = Entry(module, lambda x: seen.append(module(x)))
    step(entry, setting)()
    assert [x.requires_grad for x in seen] == [False]
    assert not module.training


def test_a_training_step_reaches_input_and_weights() -> None:
    setting = Setting(3, 5, dropout=0.1, training=True, **SMALL)
    entry = CONTESTANTS["nn"].build(setting.core(), setting)
    arrived = []
    for parameter in entry.module.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: arrived.append(p.grad is not None)
        )
    call = entry.call
    inputs = []
    entry.call = lambda x: (inputs.append(x), call(x))[1]  # type: ignore[func-returns-value]
    one = step(entry, setting)
    one()
    one()
    assert entry.module.training
    assert arrived == [True] * 2 * len(list(entry.module.parameters()))
    assert inputs[0].requires_grad
    assert inputs[0].grad is None
    assert all(p.grad is None for p in entry.module.parameters())


def test_everyone_can_be_compiled_but_what_is_compiled_already() -> None:
    known = everyone()
    plain = [name for name in known if COMPILED not in name]
    assert {f"{n}{COMPILED}" for n in plain if n != "flex"} == set(known) - set(plain)
    assert known[f"nn-fastpath{COMPILED}"].training is False
