"""The contestants of this house and of PyTorch: all compute the judge's function."""

import pytest
import torch

from attention_bench.contestants import CONTESTANTS, compiled, torch_mask
from attention_bench.equal import answer, judge
from attention_bench.setting import MASKS, Setting
from attention_bench.timing import TOLERANCES, gate

# Needs a compiler, and half a minute.
PLAIN = [name for name in CONTESTANTS if name != "flex"]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", PLAIN)
def test_all_compute_the_same(
    name: str, mask: str, training: bool, device: torch.device
) -> None:
    setting = Setting(
        3, 11, mask, training=training, d_model=28, heads=7, device=device
    )
    if not CONTESTANTS[name].takes_part(setting):
        pytest.skip("it has no words for this")
    entry = CONTESTANTS[name].build(setting.core(), setting)
    said = {name: answer(entry, setting)}
    assert training == ("input gradient" in said[name])
    _, unequal = gate(said, judge(setting), 1e-5)
    assert unequal == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_gate(dtype: torch.dtype) -> None:
    setting = Setting(2, 5, "causal", d_model=28, heads=7, dtype=dtype)
    for name in ("core", "nn", "sdpa"):
        entry = CONTESTANTS[name].build(setting.core(), setting)
        output = answer(entry, setting)["output"]
        assert output.dtype == dtype
        said = {name: {"output": output.float()}}
        assert gate(said, judge(setting), TOLERANCES[dtype])[1] == {}


def test_who_shows_weights_shows_those_of_the_house() -> None:
    setting = Setting(3, 11, "causal", d_model=28, heads=7)
    right = judge(setting)["weights"]
    for name in ("nn-weights", "batch_first", "fast-weights"):
        entry = CONTESTANTS[name].build(setting.core(), setting)
        assert torch.allclose(answer(entry, setting)["weights"], right, atol=1e-6)


def test_who_has_no_words_takes_no_part() -> None:
    assert not CONTESTANTS["causal"].takes_part(Setting(2, 3, "none"))
    assert not CONTESTANTS["causal"].takes_part(Setting(2, 3, "padding"))
    assert CONTESTANTS["causal"].takes_part(Setting(2, 3, "causal"))
    assert not CONTESTANTS["nn-fastpath"].takes_part(Setting(2, 3, training=True))
    dropped = Setting(2, 3, dropout=0.1, training=True)
    assert not CONTESTANTS["flex"].takes_part(dropped)
    assert CONTESTANTS["core"].takes_part(dropped)


def test_the_fast_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch takes it or not without a word (not with 7 heads, say): here it must.
    setting = Setting(2, 3, "causal", d_model=28, heads=4)
    entry = CONTESTANTS["nn-fastpath"].build(setting.core(), setting)
    called = []
    native = torch._native_multi_head_attention

    def record(*arguments: object, **options: object) -> object:
        called.append(1)
        return native(*arguments, **options)

    monkeypatch.setattr(torch, "_native_multi_head_attention", record)
    answer(entry, setting)
    assert called == [1]


def test_causal_is_said_and_not_only_masked() -> None:
    told = torch_mask(Setting(2, 3, "causal"))
    assert told["is_causal"] is True
    assert told["attn_mask"].int().tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert torch_mask(Setting(2, 3)) == {}


def test_no_contestant_shares_weights_with_another() -> None:
    setting = Setting(2, 3, "causal", d_model=28, heads=7)
    ours = setting.core()
    for name in PLAIN:
        entry = CONTESTANTS[name].build(ours, setting)
        theirs = {p.data_ptr() for p in entry.module.parameters()}
        assert theirs.isdisjoint(p.data_ptr() for p in ours.parameters()), name


def test_dropout_arrives_at_each(device: torch.device) -> None:
    setting = Setting(
        2, 9, "causal", 0.5, training=True, d_model=28, heads=7, device=device
    )
    for name in PLAIN:
        if CONTESTANTS[name].takes_part(setting):
            entry = CONTESTANTS[name].build(setting.core(), setting)
            entry.module.train()
            x = entry.turned(setting.x())
            with torch.no_grad():
                one, other = (entry.read(entry.call(x))["output"] for _ in range(2))
            assert not one.equal(other), name


def test_what_is_compiled_is_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch, "compile", lambda f, **how: seen.append((f, how)) or f)
    setting = Setting(2, 3, d_model=28, heads=7)
    entry = compiled(CONTESTANTS["nn"].build)(setting.core(), setting)
    assert [how for _, how in seen] == [{"dynamic": False}]
    assert entry.call is seen[0][0]
