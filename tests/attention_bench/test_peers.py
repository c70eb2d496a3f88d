"""The attention of other packages computes the judge's function, where installed."""

import sys

import pytest
import torch

from attention_bench.equal import admit
from attention_bench.peers import PEERS, build_gpt2, linear
from attention_bench.setting import MASKS, Setting
from headnotes.convert import Projection

# What these packages warn of is theirs to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", PEERS)
def test_all_compute_the_same(name: str, device: torch.device) -> None:
    library = "x_transformers" if name == "x-transformers" else "transformers"
    pytest.importorskip(library)
    for mask in MASKS:
        for dropout in (0.0, 0.3):
            setting = Setting(
                3, 11, mask, dropout, True, d_model=28, heads=7, device=device
            )
            entries, apart, left_out = admit([name], setting, PEERS)
            assert left_out == {}
            assert list(entries) == [name]
            assert apart[name] < 1e-5


def test_gpt2_has_no_dropout_but_that_of_its_weights() -> None:
    pytest.importorskip("transformers")
    module = build_gpt2(Setting(2, 3, dropout=0.3, d_model=28, heads=7).core())
    assert module.attn_dropout.p == 0.3
    assert module.resid_dropout.p == 0


def test_a_package_that_is_not_installed_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "x_transformers", None)
    monkeypatch.setitem(sys.modules, "x_transformers.x_transformers", None)
    setting = Setting(2, 3, d_model=28, heads=7)
    entries, _, left_out = admit(["x-transformers"], setting, PEERS)
    assert entries == {}
    assert left_out["x-transformers"].startswith("ModuleNotFoundError: import of x")


def test_a_linear_layer_uses_up_no_random_number() -> None:
    before = torch.get_rng_state()
    layer = linear(Projection(torch.ones(3, 5)))
    assert torch.get_rng_state().equal(before)
    assert layer.weight.equal(torch.ones(3, 5))
    assert layer.bias.equal(torch.zeros(3))
