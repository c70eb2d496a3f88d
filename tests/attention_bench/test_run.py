"""Running a suite: a cell, from its implementations to its numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from attention_bench import memory
from attention_bench import run as run_module
from attention_bench.implementations import (
    ALL_IMPLEMENTATIONS,
    IMPLEMENTATIONS,
    Adapter,
    Implementation,
)
from attention_bench.report import Cell, Record, from_json
from attention_bench.run import (
    add_roofline,
    count_operators,
    faster_on_longer,
    find_disturbances,
    growth_exponents,
    run_suite,
    torch_threads,
)
from attention_bench.setting import Setting
from attention_bench.suites import Suite

SMALL: dict[str, Any] = {"d_model": 28, "heads": 7}


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a fast one that computes something else, and one that fails while timed."""

    def build_wrong(core: Any, setting: Setting) -> Adapter:
        return Adapter(torch.nn.Identity(), lambda x: x, batch_first=False)

    def build_failing(core: Any, setting: Setting) -> Adapter:
        adapter = IMPLEMENTATIONS["nn"].build(core, setting)
        call, calls = adapter.call, iter(range(2))

        def fail_at_the_third_call(x: Any) -> Any:
            if next(calls, None) is None:
                raise RuntimeError("third call")
            return call(x)

        adapter.call = fail_at_the_third_call
        return adapter

    masks = {"none": "", "causal": "", "padding": ""}
    planted = {
        "wrong": Implementation(build_wrong, masks),
        "failing": Implementation(build_failing, masks),
    }
    known = ALL_IMPLEMENTATIONS | planted
    monkeypatch.setattr(run_module, "ALL_IMPLEMENTATIONS", known)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_cell_has_a_result_or_a_reason_for_each_implementation(
    training: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    plant(monkeypatch)
    suite = Suite(("core", "wrong", "nn", "failing"), (), seconds=0.01)
    setting = Setting(3, 5, "causal", training=training, device=device, **SMALL)
    progress: list[tuple[int, str]] = []
    (cell,) = run_suite(suite, [setting], lambda *step: progress.append(step))
    assert progress == [(0, str(setting))]
    assert list(cell.results) == ["core", "nn"]
    assert cell.skipped["wrong"].startswith("not equal: ")
    assert cell.skipped["failing"] == "RuntimeError: third call"
    assert cell.results["nn"]["speedup"] == 1
    core = cell.results["core"]
    assert 0 < core["p25"] <= core["seconds"] <= core["p75"]
    assert core["samples"] >= 1
    assert core["max_error"] < 1e-5
    assert cell.setting["flops"] == setting.flops()
    assert cell.setting["bytes"] == setting.bytes()


@pytest.mark.slow
def test_decoders_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention_bench.decoding import DECODERS, Decoder

    def start_wrong(prefix: Any) -> Decoder:
        return Decoder(lambda: None, lambda x: x)

    def start_missing(prefix: Any) -> Decoder:
        raise ImportError("not installed")

    planted = {**DECODERS, "wrong": start_wrong, "missing": start_missing}
    monkeypatch.setattr(run_module, "DECODERS", planted)
    names = ("bmm", "sdpa", "cat", "nn", "wrong", "missing")
    suite = Suite(names, (), seconds=0.02, baseline="sdpa")
    setting = Setting(3, 11, decoding=True, **SMALL)
    (cell,) = run_suite(suite, [setting])
    assert list(cell.results) == ["bmm", "sdpa", "cat", "nn"]
    assert cell.results["sdpa"]["speedup"] == 1
    assert set(cell.skipped) == {"wrong", "missing"}
    assert cell.skipped["wrong"].startswith("not equal: output off by ")
    assert cell.skipped["missing"] == "ImportError: not installed"


@pytest.mark.slow
def test_without_its_baseline_a_cell_has_no_speedups() -> None:
    suite = Suite(("core",), (), seconds=0)
    (cell,) = run_suite(suite, [Setting(2, 3, **SMALL)])
    assert "speedup" not in cell.results["core"]


@pytest.mark.slow
def test_one_thread_counts_operators_and_threads_are_restored() -> None:
    before = torch.get_num_threads()
    with torch_threads(3):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before
    suite = Suite(("core", "nn"), (), seconds=0, threads=1)
    (cell,) = run_suite(suite, [Setting(2, 3, **SMALL)])
    # Each of the four projections alone is four operators: two views and two more.
    assert cell.results["core"]["operators"] > cell.results["nn"]["operators"] > 16
    assert torch.get_num_threads() == before


def test_composite_operators_count_as_their_parts() -> None:
    layer = torch.nn.Linear(28, 28)
    setting = Setting(3, 5, **SMALL)
    parts = Adapter(layer, lambda x: torch.addmm(x[0], x[0], layer.weight.detach()))
    assert count_operators(parts, setting) == 4  # two selects, a detach, the product
    assert count_operators(Adapter(layer, layer), setting) == 4


def test_memory_is_measured_in_a_process_for_each_implementation_and_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = []

    def fake(name: str, settings: list[Setting], threads: int) -> Any:
        measured.append((name, [(s.seq_len, s.training) for s in settings]))
        return [
            "killed"
            if name == "nn" and s.seq_len == 8192
            else {"peak": 7, "retained": 1}
            for s in settings
        ]

    monkeypatch.setattr(memory, "measure_in_subprocess", fake)
    suite = Suite(
        ("core", "nn"),
        ((1, 2048), (1, 8192)),
        masks=("none",),
        modes=("inference", "training"),
        metric="memory",
    )
    cells = run_suite(suite, suite.settings())
    assert measured == [
        ("core", [(2048, False)]),
        ("core", [(2048, True)]),
        ("nn", [(2048, False), (8192, False)]),
        ("nn", [(2048, True), (8192, True)]),
    ]
    assert [list(cell.results) for cell in cells] == [["core", "nn"], []] * 2
    assert cells[1].skipped == {"nn": "killed"}
    assert cells[2].results["nn"] == {"peak": 7, "retained": 1}
    assert cells[2].title == "training, batch 1, length 2,048, no mask, dropout 0"


def test_exponents_are_fitted_from_two_lengths_up() -> None:
    cells = [
        Cell(
            {"seq_len": n, "training": training},
            "",
            {"a": {"peak": 5 * n}, "b": {"peak": 3 * n**2}, **only},
        )
        for training in (False, True)
        for n, only in ((64, {"c": {"peak": 1}}), (128, {}), (256, {}))
    ]
    found = growth_exponents(cells)
    assert set(found) == {"inference memory", "training memory"}
    for fits in found.values():
        assert fits == {"a": pytest.approx(1), "b": pytest.approx(2)}


def test_the_roofline_is_a_share_of_each_peak_rate() -> None:
    cell = Cell({"flops": 600, "bytes": 30}, "", {"a": {"seconds": 2.0}})
    add_roofline(cell, {"flops_per_second": 400.0, "bytes_per_second": 150.0})
    assert cell.results["a"]["flops_utilization"] == 0.75
    assert cell.results["a"]["bandwidth_utilization"] == 0.1


RATES = {"flops_per_second": 1e9, "bytes_per_second": 2e9}


def disturbances(
    load: float = 0.0, after: dict[str, float] = RATES, threads: int = 2
) -> list[str]:
    machine = {"cores": 2, "threads": threads}
    record = Record("inference", "", "nn", "float32", machine)
    return find_disturbances(record, load, RATES, after)


def test_an_idle_machine_raises_no_doubts() -> None:
    assert disturbances(load=0.4) == []
    assert disturbances(load=1.4, threads=1) == []
    assert (
        disturbances(after={"flops_per_second": 0.9e9, "bytes_per_second": 2.2e9}) == []
    )


def test_a_busy_machine_raises_doubts() -> None:
    (load,) = disturbances(load=0.6)
    assert load.startswith("the load average was 0.6 of 2 cores before the start")
    (rate,) = disturbances(after=RATES | {"bytes_per_second": 1.5e9})
    assert rate.startswith(
        "the peak rate bytes_per_second was 2e+09 before and 1.5e+09"
    )


def test_only_the_same_setting_is_compared_with_a_longer_one() -> None:
    def cell(seq_len: int, mask: str, seconds: float) -> Cell:
        setting = Setting(1, seq_len, mask).as_dict() | {"flops": seq_len, "bytes": 1}
        return Cell(setting, "", {"core": {"seconds": seconds}})

    assert faster_on_longer([cell(8, "none", 3.0), cell(16, "causal", 2.0)]) == []
    assert faster_on_longer([cell(16, "none", 2.8), cell(8, "none", 3.0)]) == []
    (found,) = faster_on_longer([cell(16, "none", 2.6), cell(8, "none", 3.0)])
    assert found == "core took 3.00 s at length 8 and 2.60 s at length 16"


@pytest.mark.parametrize(("rate", "found"), [(0.09, 0), (0.11, 1)])
def test_lengths_are_compared_where_launches_do_not_take_the_time(
    rate: float, found: int
) -> None:
    rates = {"flops_utilization": rate, "bandwidth_utilization": 0.01}
    cells = [
        Cell({"seq_len": n}, "", {"core": {"seconds": seconds, **rates}})
        for n, seconds in ((8, 3.0), (16, 2.0))
    ]
    assert len(faster_on_longer(cells)) == found


def test_no_recorded_benchmark_is_faster_on_longer_sequences() -> None:
    folder = Path(__file__).parent.parent.parent / "benchmarks" / "results"
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.json")]
    records = [from_json(text) for text in texts if '"format"' in text]
    assert records
    for record in records:
        if record.suite != "memory":
            assert faster_on_longer(record.cells) == [], record.suite
