"""Whatever it is given, each callable answers rightly or refuses in its own words.

`HEADNOTES_FUZZ=500 pytest tests/test_hostile.py` tries 500 inputs for each callable,
others each time, and prints a table of what came of them.
"""

import importlib
import inspect
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from torch import Tensor

from headnotes.variants.soft_cap import SoftCapAttention
from hostile import (
    attention,
    encodings,
    fast,
    linear,
    masks,
    plots,
    positions,
    scores,
    settings,
    weights,
)
from hostile.dice import Dice
from hostile.outcome import ENTERED, Call, outcome
from hostile.registry import ATTACKS, public

__all__ = [
    "attention",
    "encodings",
    "fast",
    "linear",
    "masks",
    "plots",
    "positions",
    "scores",
    "settings",
    "weights",
]

LONG = "HEADNOTES_FUZZ" in os.environ
EXAMPLES = int(os.environ.get("HEADNOTES_FUZZ", "30"))
SLOW = ("plots.display_attention", "plots.display_scaling")

REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "headnotes.md"

# What is not attacked, by the beginning of its name, and why.
SPARED = {
    "architectures.": "it is given layers of `transformers`; see its own test",
    "checks.check_version": "it is given the name of a package",
    "checks.first_index": "it is given what has been checked",
    "checks.fits_dtype": "it is given what has been checked",
    "checks.value_range": "it is given what has been checked",
    "checks.without_heads": "it is given what has been checked",
    "cli.": "it is given words of a command line, not tensors; see test_cli.py",
    "compare.": "it builds what it compares",
    "convert.blocks_by_name": "called when the module is imported",
    "convert.Projection": "a record: it holds what it is given",
    "convert.Format": "a record: it holds what it is given",
    "convert.Weights": "a record: it holds what it is given",
    "convert.from_transformers": "it is given models; see test_architectures.py",
    "convert.to_transformers": "it is given models; see test_architectures.py",
    "convert.architecture_of": "a step of the two above",
    "convert.check_meaning": "a step of the two above",
    "convert.check_pair": "a step of the two above",
    "convert.convert_layer": "a step of the two above",
    "convert.meaning_of": "a step of the two above",
    "convert.parameter_pairs": "a step of the two above",
    "convert.warn_of_others": "a step of the two above",
    "exercises.": "it is given the code of learners; see tests/exercises",
    "integrations.": "it is given what `transformers` passes; see its own test",
    "masks.describe.Item": "a record: it holds what it is given",
    "fast.module.KeyValueCache.take_back": "called by `decode` after an error",
    "fast.module.project_packed": "called by `forward`, behind its checks, on a GPU",
    "implementations.causal.drop_stored_mask": "called by torch, on loading",
    "implementations.causal.rebuild_mask": "called by torch, on loading or moving",
    "models.": "it is given a model and its own batches; see tests/models",
    "parallel.": "it is given models and process groups; see tests/parallel",
    "positions.materialize_table": "called by torch, on loading",
    "fast.blockwise.Blockwise": "it is given what has been checked",
    "fast.formula.Call": "a record: it holds what it is given",
    "fast.attention.FusedOnCPU": "it is given what has been checked",
    "fast.blockwise.Gradients": "made for a call, from what has been checked",
    "fast.blockwise.Tile": "made for a call, from what has been checked",
    "variants.online_softmax.Blockwise": "it is given what has been checked",
    "variants.sliding_window.Blocks": "made for a call, from what has been checked",
    "variants.sliding_window.RingCache.in_order": "it is given nothing",
}
# Steps of a forward, which are handed what that has checked.
STEPS = ("mha.masked_softmax", "implementations.batch_first.masked_softmax")


# Enough for any call. A lone draw of bytes leaves nothing to be mutated, so that no two
# examples are alike; and zeros, towards which they shrink, are a plain call.
ROLLS = st.binary(min_size=200, max_size=200)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[str, Counter[str]]]:
    """What came of the calls of each callable; printed after a long run."""
    counts: dict[str, Counter[str]] = {}
    yield counts
    terminal: Any = request.config.pluginmanager.get_plugin("terminalreporter")
    if not LONG or terminal is None:
        return
    total: Counter[str] = Counter()
    for count in counts.values():
        total += count
    columns = sorted(total)
    terminal.write_line(
        f"\n\n{'':52}{'tried':>9}" + "".join(f"{c:>12}" for c in columns)
    )
    for name, count in [*counts.items(), ("all", total)]:
        cells = "".join(f"{count[c]:12,}" for c in columns)
        terminal.write_line(f"{name:52}{count.total():9,}{cells}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_it_answers_rightly_or_refuses(
    name: str, device: torch.device, table: dict[str, Counter[str]]
) -> None:
    counts: Counter[str] = Counter()

    @profile(
        max_examples=EXAMPLES // 8 if name in SLOW else EXAMPLES,
        derandomize=not LONG,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(ROLLS.map(lambda rolls: ATTACKS[name](Dice(rolls, device))))
    def attempt(call: Call) -> None:
        counts[outcome(call)] += 1

    attempt()
    table[f"{name} ({device})"] = counts
    # An attack that never gets through tests no answer, and one that always does, no
    # refusal.
    assert counts["answered"] > 0


def test_an_attack_finds_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    get_scores = SoftCapAttention.get_scores

    def doubled(module: SoftCapAttention, query: Tensor, key: Tensor) -> Tensor:
        return get_scores(module, 2 * query, key)

    monkeypatch.setattr(SoftCapAttention, "get_scores", doubled)
    attack = ATTACKS["variants.soft_cap.SoftCapAttention.forward"]
    failed = 0
    for number in range(EXAMPLES):
        dice = Dice(random.Random(number).randbytes(200), torch.device("cpu"))
        try:
            outcome(attack(dice))
        except AssertionError:
            failed += 1
    # One that is found in thirty calls by chance is not found in the next thirty.
    assert failed > EXAMPLES // 10


def named_in_the_reference() -> Iterator[tuple[str, Any]]:
    """What the reference shows, under the name of where it is defined."""
    text = REFERENCE.read_text(encoding="utf-8")
    for path in re.findall(r"^::: (headnotes\.\S+)", text, re.MULTILINE):
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        name = f"{value.__module__}.{value.__qualname__}"
        yield name.removeprefix("headnotes."), value


def spared(name: str) -> bool:
    return name.startswith(tuple(SPARED))


def test_what_the_reference_names_is_attacked() -> None:
    shown = dict(named_in_the_reference())
    assert len(shown) > 20
    methods = dict(public())
    for name in shown:
        if spared(name) or name in STEPS:
            continue
        for each in (name, f"{name}.forward"):
            known = each == name or each in methods
            assert each in ATTACKS or not known, f"{each} has no attack"


def unreached() -> list[str]:
    """What is neither attacked nor spared, and no attack has called so far."""
    return [
        name
        for name, value in public()
        if name not in ATTACKS and not spared(name)
        if getattr(inspect.unwrap(value), "__code__", None) not in ENTERED
    ]


@pytest.mark.slow
def test_everything_public_is_attacked_or_reached_by_an_attack() -> None:
    # The tests above may have run in another process.
    for number in range(30):
        wanted = {name.partition(".")[0] for name in unreached()}
        rolls = random.Random(number).randbytes(200)
        for name, attack in ATTACKS.items():
            if name.partition(".")[0] in wanted:
                outcome(attack(Dice(rolls, torch.device("cpu"))))
    assert unreached() == []
    # No entry outlives what it was made for.
    names = [name for name, _ in public()]
    assert all(any(n.startswith(prefix) for n in names) for prefix in SPARED)
    assert set(ATTACKS) | set(STEPS) <= set(names)
