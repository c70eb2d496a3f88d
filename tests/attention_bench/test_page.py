"""The page of benchmarks shows what is in the records, and nothing else."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from attention_bench.report import Cell, Record, as_json, from_json
from attention_bench.setting import Setting
from attention_bench.suites import SUITES

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "compare" / "benchmarks.py"

# The speedup of each implementation, in every cell.
SPEEDUPS = {"nn": 1.0, "fast": 1.37, "sdpa": 1.01, "core": 0.26, "nn-weights": 0.71}


def planted(suite: str, device: str, device_type: str, dtype: str) -> Record:
    """A record with invented numbers."""
    machine = {
        "device": device,
        "device_type": device_type,
        "threads": 2,
        "cores": 2,
        "memory_gib": 24.0,
        "system": "Linux",
        "torch": "2.13.0",
        "python": "3.12.1",
        "libraries": {"transformers": "5.23.0"},
        "commit": "abc1234",
        "date": "2026-11-20",
        "flops_per_second": 2.5e11,
        "bytes_per_second": 2.7e10,
    }
    record = Record(suite, f"headnotes bench {suite}", "nn", dtype, machine)
    for setting in SUITES[suite].settings():
        cell = Cell(setting.as_dict(), str(setting))
        for name, speedup in SPEEDUPS.items():
            result = {"seconds": 0.0123 / speedup, "p25": 0.01, "p75": 0.02}
            result |= {"speedup": speedup}
            result |= {"flops_utilization": speedup / 2, "bandwidth_utilization": 0.01}
            if suite == "memory":
                result = {"peak": 77 * 2**20 * speedup, "retained": 0}
            if suite == "tiny":
                result["operators"] = 14
            cell.results[name] = result
        record.cells.append(cell)
    record.cells[0].skipped["x-transformers"] = "not equal: output off by 0.3"
    if suite in ("growth", "memory"):
        metric = "time" if suite == "growth" else "memory"
        record.exponents = {f"inference {metric}": {"fast": 1.03, "core": 1.97}}
    return record


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the page with these records; return its text and its figures."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    display = pytest.importorskip("IPython.display")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (tmp_path / "docs" / "compare").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "docs" / "compare")
    monkeypatch.setattr(pyplot, "show", lambda: None)
    pyplot.close("all")  # an example of a docstring may have left some open
    shown: list[str] = []
    monkeypatch.setattr(
        display, "display", lambda markdown: shown.append(markdown.data)
    )

    def run(*records: Record) -> tuple[str, list[Any]]:
        for number, record in enumerate(records):
            path = results / f"{record.suite}-{number}.json"
            path.write_text(as_json(record), encoding="utf-8")
        (results / "equivalence-a-cpu.json").write_text("{}", encoding="utf-8")
        runpy.run_path(str(PAGE))
        figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
        return "\n\n".join(shown), figures

    yield run
    pyplot.close("all")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_numbers_are_those_of_the_records(page: Any) -> None:
    records = [planted(suite, "A CPU", "cpu", "float32") for suite in SUITES]
    records.append(planted("inference", "NVIDIA H200", "cuda", "bfloat16"))
    text, figures = page(*records)
    assert "Not recorded yet" not in text
    # Size, mask and dropout probability make a row, and each row has all numbers.
    row = "|4 × 512, causal|12.3 ms|1.37|*1.01*|0.26|0.71|"
    assert text.count(row) == 3  # two records of inference, one of training
    assert "|8 × 128, causal, dropout 0.1|12.3 ms|1.37|*1.01*|0.26|0.71|" in text
    assert "|4 × 512|68%|50%|36%|50%|13%|" in text  # utilization, with `nn`
    assert "|1 × 4,096|105|77|55|78|20|" in text  # memory
    assert "8.98 ms, 1.37, 14" in text  # a tiny call
    assert "|8 × 4,096|*1.01*|1.37|12.3 ms|" in text  # a token
    assert "|inference|`x-transformers`|not equal: output off by 0.3|2|" in text
    assert "|A CPU|2|24|float32|250|27|torch 2.13.0, Python 3.12.1, " in text
    for record in records:
        assert f"`{record.command}`, 0 seconds: {record.machine['device']}" in text
    titles = [text.get_text() for f in figures for text in f.findobj(match=of_text)]
    assert (
        sum("NVIDIA H200, bfloat16, torch 2.13.0, 2026-11-20" in t for t in titles) == 2
    )
    labels = {label for f in figures for ax in f.axes for label in labels_of(ax)}
    assert "fast, exponent 1.03" in labels
    drawn = [
        float(y)
        for f in figures
        for ax in f.axes
        for line in ax.lines
        for y in line.get_ydata()
    ]
    assert 1.37 in drawn
    assert 0.685 in drawn


def of_text(artist: Any) -> bool:
    return hasattr(artist, "get_text")


def labels_of(ax: Any) -> list[str]:
    return [line.get_label() for line in ax.lines]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_settings_in_which_fast_is_slower_are_listed(page: Any) -> None:
    record = planted("inference", "A CPU", "cpu", "float32")
    text, _ = page(record)
    assert ":\nNowhere." in text
    results = record.cells[9].results
    results["sdpa"]["speedup"] = 1.37 * 1.021
    results["nn"]["speedup"] = 1.37 * 1.019  # a tie
    results["core"]["speedup"] = 1.37 * 2
    text, _ = page(record)
    setting = record.cells[9].setting
    assert Setting(setting["batch_size"], setting["seq_len"]) == Setting(4, 512)
    assert "|---|---|\n|4 × 512|`core` 2.00, `sdpa` 1.02|" in text
    assert "A CPU, 2 threads, float32, torch" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_fast_is_summarized_by_the_settings_that_are_not_slower(page: Any) -> None:
    inference = planted("inference", "A CPU", "cpu", "float32")
    for cell in inference.cells:
        cell.results["fast"]["speedup"] = 2.0
    inference.cells[0].results["fast"]["speedup"] = 0.98  # a tie
    inference.cells[1].results["fast"]["speedup"] = 0.5  # slower
    training = planted("training", "A CPU", "cpu", "float32")
    for cell in training.cells:
        with_dropout = cell.setting["dropout"] > 0
        cell.results["fast"]["speedup"] = 3.0 if with_dropout else 1.0
    del training.cells[0].results["fast"]
    text, _ = page(inference, training)
    machine = "A CPU, 2 threads, float32, torch 2.13.0, 2026-11-20"
    mean = (2.0**19 * 0.98 * 0.5) ** (1 / 21)
    assert f"|{machine}|all settings|20 of 21|{mean:.2f}|0.50|" in text
    mean = 3.0 ** (12 / 32)
    assert f"|{machine}|all settings|32 of 32|{mean:.2f}|1.00|" in text
    assert f"|{machine}|dropout 0|20 of 20|1.00|1.00|" in text
    assert f"|{machine}|dropout 0.1|12 of 12|3.00|3.00|" in text
    # Inference has no dropout, so a row for it would say nothing new.
    assert text.count("|dropout 0|") == 1


@pytest.mark.filterwarnings("ignore")
def test_the_page_opens_with_the_speedup_of_fast_for_each_use(page: Any) -> None:
    training = planted("training", "A CPU", "cpu", "float32")
    for cell in training.cells:
        if cell.setting["dropout"]:
            cell.results["fast"]["speedup"] = 3.0
    training.cells[0].results["fast"]["speedup"] = 1.0
    records = [training, planted("decode", "A CPU", "cpu", "float32")]
    text, figures = page(*records)
    opening = text.partition("|device|")[0]
    mean = 1.37 ** (20 / 21)
    line = f"**{mean:.2f} times** as fast as `nn` (1.00 to 1.37 in 21 settings)."
    assert f"- A training step: `fast` is {line}" in opening
    line = "**3.00 times** as fast as `nn` (3.00 to 3.00 in 12 settings)."
    assert f"- A training step with dropout: `fast` is {line}" in opening
    line = "**1.36 times** as fast as `sdpa` (1.36 to 1.36 in 4 settings)."
    assert f"- Decoding with a KV cache: `fast` is {line}" in opening
    assert "A forward pass" not in opening  # was not measured
    rows = [text.get_text() for text in figures[0].axes[0].texts]
    assert rows[2] == "Decoding with a KV cache, over sdpa"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.filterwarnings("ignore")
def test_the_page_says_that_no_gpu_was_measured_until_one_is(
    page: Any, kind: str
) -> None:
    text, _ = page(
        planted("decode", "A CPU", "cpu", "float32"),
        planted("decode", "A device", kind, "float32"),
    )
    assert ("No GPU has been measured" in text) == (kind == "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("measured", [True, False], ids=["both", "one"])
def test_fast_is_compared_with_the_bare_kernel_where_both_were_measured(
    page: Any, measured: bool
) -> None:
    record = planted("inference", "A CPU", "cpu", "float32")
    record.cells[3].results["fast"]["speedup"] = 1.01 * 2
    for cell in record.cells:
        if not measured:
            del cell.results["sdpa"]
    text, _ = page(record)
    line = "`fast` is 1.36 to 2.00 times as fast as `sdpa`, median 1.36: A CPU"
    assert (line in text) == measured
    assert ("times as fast as `sdpa`," in text) == measured


@pytest.mark.slow
def test_a_second_dtype_has_folded_tables_and_no_figures(
    page: Any,
) -> None:
    wide = planted("inference", "A CPU", "cpu", "float32")
    half = planted("inference", "A CPU", "cpu", "bfloat16")
    other = planted("inference", "A GPU", "cuda", "bfloat16")
    text, figures = page(half, wide, other)
    assert len(figures) == 6  # summary, speedup and utilization, for two machines
    titles = [figure.get_suptitle() for figure in figures]
    assert sum("A CPU, 2 threads, float32" in title for title in titles) == 2
    assert sum("A GPU, bfloat16" in title for title in titles) == 2
    assert text.count('??? info "In bfloat16: nn, fast,') == 1
    assert text.count("??? info") == 1
    assert "    |batch size × length|" in text


@pytest.mark.filterwarnings("ignore")
def test_without_records_the_page_shows_the_commands_that_make_them(page: Any) -> None:
    text, figures = page()
    assert figures == []
    for suite in SUITES:
        command = f"headnotes bench {suite} --results benchmarks/results"
        assert f"*Not recorded yet; `{command}` measures it.*" in text
    assert "No implementation was skipped." in text


def test_every_recorded_file_can_be_read() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        if not path.stem.startswith("equivalence"):
            record = from_json(path.read_text(encoding="utf-8"))
            assert path.name.startswith(f"{record.suite}-")
            assert all(cell.results for cell in record.cells)


def test_every_figure_has_an_alternative_text_and_nothing_is_measured() -> None:
    cells = PAGE.read_text(encoding="utf-8").split("# %%")
    for cell in cells:
        if re.search(r"draw\w*\(record|plot_points\(record|ax\.plot\(", cell):
            first = cell.partition("\n")[0]
            assert "alt=" in first or "fold=" in first
    assert not re.search(
        r"\btime_side_by_side\(|\bpeak_rates\(|subprocess", "".join(cells)
    )
