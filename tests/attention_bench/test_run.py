"""Asking: a cell from its contestants to its numbers."""

from typing import Any

import pytest
import torch

from attention_bench import memory
from attention_bench import run as asking
from attention_bench.contestants import CONTESTANTS, Contestant, Entry
from attention_bench.equal import everyone
from attention_bench.record import Cell
from attention_bench.run import ask, exponents, operators, rate, threads
from attention_bench.setting import Setting
from attention_bench.suites import Question

SMALL: dict[str, Any] = {"d_model": 28, "heads": 7}


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add one who computes something else, very fast, and one who breaks in time."""

    def cheat(ours: Any, setting: Setting) -> Entry:
        return Entry(torch.nn.Identity(), lambda x: x, batch_first=False)

    def tire(ours: Any, setting: Setting) -> Entry:
        entry = CONTESTANTS["nn"].build(ours, setting)
        call, calls = entry.call, iter(range(2))

        def tired(x: Any) -> Any:
            if next(calls, None) is None:
                raise RuntimeError("tired")
            return call(x)

        entry.call = tired
        return entry

    told = {"none": "", "causal": "", "padding": ""}
    planted = {"cheat": Contestant(cheat, told), "tired": Contestant(tire, told)}
    known = everyone() | planted
    monkeypatch.setattr(asking, "everyone", lambda: known)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_cell_holds_who_is_equal_and_why_others_are_not(
    training: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    plant(monkeypatch)
    question = Question("?", ("core", "cheat", "nn", "tired"), (), seconds=0.01)
    setting = Setting(3, 5, "causal", training=training, device=device, **SMALL)
    told: list[tuple[int, str]] = []
    (cell,) = ask(question, [setting], lambda *s: told.append(s))
    assert told == [(0, str(setting))]
    assert list(cell.results) == ["core", "nn"]
    off = "input gradient off by 1." if training else "output off by 1"
    assert cell.left_out["cheat"].startswith(f"another function: {off}")
    assert cell.left_out["tired"] == "RuntimeError: tired"
    assert cell.results["nn"]["ratio"] == 1
    core = cell.results["core"]
    assert 0 < core["low"] <= core["seconds"] <= core["high"]
    assert core["turns"] >= 1
    assert core["apart"] < 1e-5
    assert cell.setting["flops"] == setting.flops()
    assert cell.setting["bytes"] == setting.bytes()


def test_decoders_are_judged_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention_bench.decoding import DECODERS, Decoder

    def forgetful(prefix: Any) -> Decoder:
        return Decoder(lambda: None, lambda x: x)

    def broken(prefix: Any) -> Decoder:
        raise ImportError("not installed")

    planted = {**DECODERS, "forgetful": forgetful, "broken": broken}
    monkeypatch.setattr(asking, "DECODERS", planted)
    names = ("bmm", "sdpa", "cat", "nn", "forgetful", "broken")
    question = Question("?", names, (), seconds=0.02, baseline="sdpa")
    setting = Setting(3, 11, decoding=True, **SMALL)
    (cell,) = ask(question, [setting])
    assert list(cell.results) == ["bmm", "sdpa", "cat", "nn"]
    assert cell.results["sdpa"]["ratio"] == 1
    assert set(cell.left_out) == {"forgetful", "broken"}
    assert cell.left_out["broken"] == "ImportError: not installed"


def test_without_its_baseline_a_cell_has_no_ratios() -> None:
    question = Question("?", ("core",), (), seconds=0)
    (cell,) = ask(question, [Setting(2, 3, **SMALL)])
    assert "ratio" not in cell.results["core"]


def test_one_thread_counts_operators_and_is_given_back() -> None:
    before = torch.get_num_threads()
    seen = []
    with threads(3):
        seen.append(torch.get_num_threads())
    assert (seen, torch.get_num_threads()) == ([3], before)
    question = Question("?", ("core", "nn"), (), seconds=0, threads=1)
    (cell,) = ask(question, [Setting(2, 3, **SMALL)])
    # Each of the four linear maps alone is four operators: two views and two more.
    assert cell.results["core"]["operators"] > cell.results["nn"]["operators"] > 16


def test_operators_are_counted_beneath_those_that_are_composed() -> None:
    layer = torch.nn.Linear(28, 28)
    setting = Setting(3, 5, **SMALL)
    bare = Entry(layer, lambda x: torch.addmm(x[0], x[0], layer.weight.detach()))
    assert operators(bare, setting) == 4  # two selects, a detach, and the product
    assert operators(Entry(layer, layer), setting) == 4  # it is composed of them


def test_memory_is_asked_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(name: str, settings: list[Setting], threads: int) -> Any:
        asked.append((name, [(s.seq_len, s.training) for s in settings]))
        return [
            "killed" if name == "nn" and s.seq_len == 8192 else {"peak": 7, "kept": 1}
            for s in settings
        ]

    monkeypatch.setattr(memory, "in_a_process", fake)
    question = Question(
        "?",
        ("core", "nn"),
        ((1, 2048), (1, 8192)),
        masks=("none",),
        modes=("inference", "training"),
        amount="memory",
    )
    cells = ask(question, question.settings())
    assert asked == [
        ("core", [(2048, False)]),
        ("core", [(2048, True)]),
        ("nn", [(2048, False), (8192, False)]),
        ("nn", [(2048, True), (8192, True)]),
    ]
    assert [list(cell.results) for cell in cells] == [["core", "nn"], []] * 2
    assert cells[1].left_out == {"nn": "killed"}
    assert cells[2].results["nn"] == {"peak": 7, "kept": 1}


def test_exponents_are_fitted_for_each_who_has_two_points() -> None:
    cells = [
        Cell(
            {"seq_len": n, "training": training},
            "",
            {"a": {"peak": 5 * n}, "b": {"peak": 3 * n**2}, **only},
        )
        for training in (False, True)
        for n, only in ((64, {"c": {"peak": 1}}), (128, {}), (256, {}))
    ]
    found = exponents(cells)
    assert set(found) == {"memory of inference", "memory of training"}
    for fits in found.values():
        assert fits == {"a": pytest.approx(1), "b": pytest.approx(2)}


def test_a_share_of_a_ceiling_is_a_share() -> None:
    cell = Cell({"flops": 600, "bytes": 30}, "", {"a": {"seconds": 2.0}})
    rate(cell, {"flops_per_second": 400.0, "bytes_per_second": 150.0})
    assert cell.results["a"]["of_matmul"] == 0.75
    assert cell.results["a"]["of_copy"] == 0.1
