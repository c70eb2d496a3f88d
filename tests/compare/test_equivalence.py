"""The equivalence matrix: implementations are equal, and defects make it unequal."""

import copy
import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
from headnotes import convert
from headnotes.compare import equivalence as compare
from headnotes.compare.calling import call

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEADS, D_MODEL = 4, 24
SETTINGS = ["no mask", "causal", "padding", "causal + padding", "cross"]
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-13}


def measure(
    device: torch.device, dtype: torch.dtype, targets: tuple[str, ...], heads: int
) -> Any:
    like = {"device": device, "dtype": dtype}
    systems = compare.systems(targets, heads=heads, d_model=D_MODEL, **like)
    return compare.matrix(systems, compare.cases(D_MODEL, **like))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_all_systems_give_the_same_outputs_and_gradients(
    device: torch.device, dtype: torch.dtype
) -> None:
    cells = measure(device, dtype, compare.SYSTEMS, HEADS)
    assert list(cells) == SETTINGS
    worst = compare.worst(cells)
    print(f"worst pair in {dtype}: {worst:.1e}")
    assert 0 < worst <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("targets", "heads"),
    [
        (("v1", "v2", "core", "torch"), 1),
        (("causal_head", "causal", "core", "torch"), 1),
        (("wrapper", "causal", "core", "torch"), HEADS),
    ],
)
def test_the_stages_give_the_same_outputs_and_gradients(
    device: torch.device, dtype: torch.dtype, targets: tuple[str, ...], heads: int
) -> None:
    cells = measure(device, dtype, targets, heads)
    setting = "no mask" if "v1" in targets else "causal"
    for by_system in cells[setting].values():
        assert list(by_system) == list(targets)
        assert 0 < max(by_system.values()) <= BOUNDS[dtype]


def test_unsupported_cases_give_a_message() -> None:
    cells = measure(torch.device("cpu"), torch.float64, compare.SYSTEMS, HEADS)
    refusals = {
        (setting, system): said
        for setting, by_quantity in cells.items()
        for system, said in by_quantity["output"].items()
        if isinstance(said, str)
    }
    always = "it is always causal, and takes no other mask"
    assert refusals == {
        ("no mask", "causal"): always,
        ("padding", "causal"): always,
        ("causal + padding", "causal"): always,
        ("cross", "causal"): "it has self-attention only",
    }


@pytest.mark.parametrize("setting", SETTINGS)
def test_results_are_those_of_the_loops(setting: str) -> None:
    systems = compare.systems(compare.SYSTEMS, dtype=torch.float64)
    case = compare.cases(D_MODEL, dtype=torch.float64)[setting]
    weights = convert.extract(systems["core"])
    parameters = {}
    for part in convert.PARTS:
        projection = getattr(weights, part)
        bias = projection.bias_or_zeros().tolist()
        parameters[part] = (projection.weight.tolist(), bias)
    shape = (len(case.x), len(case.memory), case.x.shape[1])
    keep = torch.ones(shape).bool() if case.mask is None else case.mask.expand(shape)
    memory = case.memory.tolist()
    output, attn = oracle.attention(
        case.x.tolist(), memory, memory, keep.tolist(), parameters, HEADS
    )
    for system in systems.values():
        try:
            answer, shown = call(system, case.x, case.memory, case.mask)
        except ValueError:
            continue
        torch.testing.assert_close(answer, torch.tensor(output).double())
        if shown is not None:
            torch.testing.assert_close(shown, torch.tensor(attn).double())


def with_wrong_scale(core: Any) -> None:
    core.scale *= 1.001


def with_heads_swapped(core: Any) -> None:
    rows = core.value.linear.weight
    rows.copy_(rows.unflatten(0, (HEADS, -1)).flip(0).flatten(0, 1))


def with_masks_ignored(core: Any) -> None:
    core.prepare_mask = lambda mask, *_: torch.ones_like(mask).bool().unsqueeze(-1)


@pytest.mark.parametrize(
    ("defect", "unseen"),
    [
        (with_wrong_scale, []),
        (with_heads_swapped, []),
        (with_masks_ignored, ["no mask", "cross"]),
    ],
)
@torch.no_grad()
def test_a_defect_shows_in_every_case_that_it_affects(
    defect: Any, unseen: list[str]
) -> None:
    systems = compare.systems(("core", "torch"), dtype=torch.float64)
    defect(systems["core"])
    with torch.enable_grad():
        cells = compare.matrix(systems, compare.cases(D_MODEL, dtype=torch.float64))
    for setting, by_quantity in cells.items():
        for by_system in by_quantity.values():
            equal = max(float(value) for value in by_system.values()) < 1e-13
            assert equal == (setting in unseen)


@pytest.mark.parametrize("name", compare.SYSTEMS)
def test_nan_is_a_difference(name: str) -> None:
    systems = compare.systems(compare.SYSTEMS, dtype=torch.float64)

    def spoil(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] * math.nan, *output[1:])
        return output * math.nan

    systems[name].register_forward_hook(spoil)
    cells = compare.matrix(systems, compare.cases(D_MODEL, dtype=torch.float64))
    assert cells["causal"]["output"][name] == math.inf
    assert compare.worst(cells) == math.inf


def test_results_of_zero_are_equal() -> None:
    assert compare.difference({"x": torch.zeros(3)}, {"x": torch.zeros(3)}) == 0


def test_equal_outputs_with_other_gradients_show() -> None:
    systems = compare.systems(("core", "torch"), dtype=torch.float64)

    def half_blind(query: Tensor, key: Tensor) -> Tensor:
        """Computes the right scores, and half of the gradient of the keys."""
        key = (key + key.detach()) / 2
        return torch.einsum("ibhd,jbhd->ijbh", query, key)

    systems["core"].get_scores = half_blind  # type: ignore[method-assign, assignment]
    cells = compare.matrix(systems, compare.cases(D_MODEL, dtype=torch.float64))
    for by_quantity in cells.values():
        assert by_quantity["output"]["core"] < 1e-13
        assert by_quantity["input gradient"]["core"] > 1e-3
        assert by_quantity["weight gradients"]["core"] > 1e-3


def test_comparing_modifies_nothing() -> None:
    systems = compare.systems(compare.SYSTEMS)
    case = compare.cases(D_MODEL)["causal"]
    before = copy.deepcopy([system.state_dict() for system in systems.values()])
    x = case.x.clone()
    for system, state in zip(systems.values(), before, strict=True):
        compare.results(system, case)
        assert all(p.grad is None for p in system.parameters())
        now = system.state_dict()
        assert all(now[name].equal(value) for name, value in state.items())
    assert case.x.equal(x)
    assert not case.x.requires_grad


def test_the_cases_are_the_same_in_every_dtype_and_do_not_change_the_seed() -> None:
    state = torch.random.get_rng_state()
    single, double = (compare.cases(5, dtype=d) for d in BOUNDS)
    compare.systems(("core",))
    assert torch.random.get_rng_state().equal(state)
    for setting in SETTINGS:
        assert single[setting].x.equal(double[setting].x.float())
    assert single["cross"].memory is not single["cross"].x
    assert single["causal"].memory is single["causal"].x


def within_bounds(record: Path) -> bool:
    worst = json.loads(record.read_text(encoding="utf-8"))["worst"]
    return all(0 < worst[str(d).split(".")[1]] <= bound for d, bound in BOUNDS.items())


@pytest.mark.slow
def test_a_run_is_recorded_with_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = str(BENCHMARKS / "equivalence.py")
    monkeypatch.setattr(sys, "argv", [program, str(tmp_path)])
    runpy.run_path(program, run_name="__main__")
    records = list(tmp_path.glob("equivalence-*.json"))
    assert len(records) == 1 + torch.cuda.is_available()
    for record in records:
        assert within_bounds(record)
        run = json.loads(record.read_text(encoding="utf-8"))
        assert run["torch"] == torch.__version__
        assert run["device"]
        assert run["date"]


def test_every_recorded_run_is_within_the_bounds() -> None:
    records = list((BENCHMARKS / "results").glob("equivalence-*.json"))
    assert records
    assert all(map(within_bounds, records))
