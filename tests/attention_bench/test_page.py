"""The page of benchmarks says what the records say, and nothing else."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from attention_bench.record import Cell, Run, as_json
from attention_bench.setting import Setting
from attention_bench.suites import QUESTIONS

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "compare" / "benchmarks.py"

# How many times as fast as the baseline each is, in every cell.
TIMES = {"nn": 1.0, "fast": 1.37, "sdpa": 1.01, "core": 0.26, "nn-weights": 0.71}


def planted(question: str, device: str, kind: str, dtype: str) -> Run:
    """A record with numbers that nobody has measured."""
    machine = {
        "device": device,
        "kind": kind,
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
    run = Run(question, f"headnotes bench {question}", "nn", dtype, machine)
    for setting in QUESTIONS[question].settings():
        cell = Cell(setting.as_json(), str(setting))
        for name, ratio in TIMES.items():
            found = {"seconds": 0.0123 / ratio, "low": 0.01, "high": 0.02}
            found |= {"ratio": ratio, "of_matmul": ratio / 2, "of_copy": 0.01}
            if question == "memory":
                found = {"peak": 77 * 2**20 * ratio, "kept": 0}
            if question == "tiny":
                found["operators"] = 14
            cell.results[name] = found
        run.cells.append(cell)
    run.cells[0].left_out["x-transformers"] = "another function: output off by 0.3"
    if question in ("growth", "memory"):
        what = "time" if question == "growth" else "memory"
        run.exponents = {f"{what} of inference": {"fast": 1.03, "core": 1.97}}
    return run


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the page beside these records; return what it shows, as one text."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    display = pytest.importorskip("IPython.display")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (tmp_path / "docs" / "compare").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "docs" / "compare")
    monkeypatch.setattr(pyplot, "show", lambda: None)
    shown: list[str] = []
    monkeypatch.setattr(
        display, "display", lambda markdown: shown.append(markdown.data)
    )

    def run(*runs: Run) -> tuple[str, list[Any]]:
        for number, made in enumerate(runs):
            path = results / f"{made.question}-{number}.json"
            path.write_text(as_json(made), encoding="utf-8")
        (results / "equivalence-a-cpu.json").write_text("{}", encoding="utf-8")
        runpy.run_path(str(PAGE))
        figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
        return "\n\n".join(shown), figures

    yield run
    pyplot.close("all")


@pytest.mark.filterwarnings("ignore")
def test_the_numbers_are_those_of_the_records(page: Any) -> None:
    runs = [planted(question, "A CPU", "cpu", "float32") for question in QUESTIONS]
    runs.append(planted("inference", "NVIDIA H200", "cuda", "bfloat16"))
    text, figures = page(*runs)
    assert "Not recorded yet" not in text
    # Sizes, masks and chances of dropout make a row, and each row has all numbers.
    row = "|4 × 512, causal|12.3 ms|1.37|*1.01*|0.26|0.71|"
    assert text.count(row) == 3  # of two runs of inference, and one of training
    assert "|8 × 128, causal, dropout 0.1|12.3 ms|1.37|*1.01*|0.26|0.71|" in text
    assert "|4 × 512|68%|50%|36%|50%|13%|" in text  # shares, with `nn`
    assert "|1 × 4,096|105|77|55|78|20|" in text  # memory
    assert "8.98 ms, 1.37, 14" in text  # a tiny call
    assert "|8 × 4,096|*1.01*|1.37|12.3 ms|" in text  # a token
    assert "|inference|`x-transformers`|another function: output off by 0.3|2|" in text
    assert "|A CPU|2|24|float32|250|27|torch 2.13.0, Python 3.12.1, " in text
    for run in runs:
        assert f"`{run.command}`, 0 seconds: {run.machine['device']}" in text
    titles = [text.get_text() for f in figures for text in f.findobj(match=of_text)]
    assert (
        sum("NVIDIA H200, bfloat16, torch 2.13.0, 2026-11-20" in t for t in titles) == 2
    )
    labels = {label for f in figures for ax in f.axes for label in labels_of(ax)}
    assert "fast, power 1.03" in labels
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


@pytest.mark.filterwarnings("ignore")
def test_it_says_where_we_lose(page: Any) -> None:
    run = planted("inference", "A CPU", "cpu", "float32")
    text, _ = page(run)
    assert ":\nNowhere." in text
    lost = run.cells[9].results
    lost["sdpa"]["ratio"] = 1.37 * 1.021
    lost["nn"]["ratio"] = 1.37 * 1.019  # a tie
    lost["core"]["ratio"] = 1.37 * 2
    text, _ = page(run)
    setting = run.cells[9].setting
    assert Setting(setting["batch_size"], setting["seq_len"]) == Setting(4, 512)
    assert "|---|---|\n|4 × 512|`core` 2.00, `sdpa` 1.02|" in text
    assert "A CPU, 2 threads, float32, torch" in text


@pytest.mark.parametrize("there", [True, False], ids=["beside", "alone"])
def test_it_says_how_near_to_the_bare_kernel_we_come_where_both_were_asked(
    page: Any, there: bool
) -> None:
    run = planted("inference", "A CPU", "cpu", "float32")
    run.cells[3].results["fast"]["ratio"] = 1.01 * 2
    for cell in run.cells:
        if not there:
            del cell.results["sdpa"]
    text, _ = page(run)
    said = "`fast` is 1.36 to 2.00 times as fast as `sdpa`, 1.36 in the middle: A CPU"
    assert (said in text) == there
    assert ("times as fast as `sdpa`," in text) == there


def test_of_a_second_dtype_the_numbers_are_folded_and_nothing_is_drawn(
    page: Any,
) -> None:
    wide = planted("inference", "A CPU", "cpu", "float32")
    half = planted("inference", "A CPU", "cpu", "bfloat16")
    other = planted("inference", "A GPU", "cuda", "bfloat16")
    text, figures = page(half, wide, other)
    assert len(figures) == 4  # how fast, and of what share: for two machines
    titles = [figure.get_suptitle() for figure in figures]
    assert sum("A CPU, 2 threads, float32" in title for title in titles) == 2
    assert sum("A GPU, bfloat16" in title for title in titles) == 2
    assert text.count('??? info "In bfloat16: nn, fast,') == 1
    assert text.count("??? info") == 1
    assert "    |batch size × length|" in text


@pytest.mark.filterwarnings("ignore")
def test_without_records_it_says_how_to_make_them(page: Any) -> None:
    text, figures = page()
    assert figures == []
    for question in QUESTIONS:
        assert f"*Not recorded yet; `python benchmarks/{question}.py` does it.*" in text
        assert (ROOT / "benchmarks" / f"{question}.py").is_file()
    assert "Nobody was left out." in text


def test_every_figure_is_described() -> None:
    cells = PAGE.read_text(encoding="utf-8").split("# %%")
    for cell in cells:
        if "draw(run" in cell or "growth(run" in cell or "ax.plot(" in cell:
            first = cell.partition("\n")[0]
            assert "alt=" in first or "fold=" in first
    assert not re.search(r"\bcontest\(|\bceilings\(|subprocess", "".join(cells))
