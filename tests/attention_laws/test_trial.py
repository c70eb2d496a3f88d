"""A trial runs the lines that it writes down, and keeps those that matter."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from attention_laws.adapter import Adapter, Mask, Sizes
from attention_laws.law import Broken, Failed
from attention_laws.trial import Trial
from headnotes import mha
from headnotes.implementations import causal, valid_lens
from specimens import Honest

SIZES = Sizes(2, 3, 5, heads=3, d_k=4)
SETTINGS = {"d_model": "{d_model}", "heads": "{heads}"}
KEEP = Mask("mask", "keep", "bqk")


def honest(**fields: Any) -> Adapter:
    fields = {"inputs": ("query", "key", "value"), "masks": (KEEP,), **fields}
    imports = "from specimens import Honest\n"
    return Adapter(Honest, "Honest", imports, SETTINGS, cross=True, **fields)


def test_what_is_written_down_is_what_was_run() -> None:
    trial = Trial(honest(), SIZES)
    trial.begin()
    y = trial.call(trial.ask())
    names: dict[str, Any] = {}
    exec(trial.code(), names)
    assert torch.equal(names[y], trial.get(y))
    assert trial.get(y).shape == (2, 3, 12)


def test_a_program_imports_what_it_calls_and_nothing_more() -> None:
    trial = Trial(honest(), SIZES)
    trial.begin(dropout=0.1)  # as it is built
    trial.call(trial.ask())
    assert trial.code("assert y.any()") == (
        "import torch\n"
        "from specimens import Honest\n"
        "from attention_laws.tools import draw, enliven\n"
        "\n"
        "torch.manual_seed(0)\n"
        "attention = Honest(d_model=12, heads=3)\n"
        "enliven(attention)\n"
        "attention.eval()\n"
        "query = draw(1, 2, 3, 12)\n"
        "key = draw(2, 2, 5, 12)\n"
        "value = draw(3, 2, 5, 12)\n"
        "y = attention(query, key, value)\n"
        "assert y.any()\n"
    )


def test_modes_are_without_dropout_and_no_grad_is_one_of_them() -> None:
    trial = Trial(honest(), SIZES)
    assert trial.modes() == ["eval", "train", "no_grad"]
    assert trial.gradient_modes() == ["eval", "train"]
    for mode in trial.modes():
        trial.begin(mode)
        y = trial.get(trial.call(trial.ask()))
        assert trial.get("attention").training == (mode == "train")
        assert trial.get("attention").dropout.p == 0
        assert y.requires_grad == (mode != "no_grad")
    assert Trial(honest(trains=False), SIZES).modes() == ["eval", "no_grad"]
    assert Trial(Adapter(print, "print", "", {}), SIZES).modes() == ["eval"]


def test_an_instance_is_copied_and_never_touched() -> None:
    mine = mha.MultiHeadAttention(3, 12, 0.5)
    before = mine.output.weight.clone()
    fields: dict[str, Any] = {"layout": "lbd", "keyword": True}
    adapter = Adapter(mine, "mine", "", {}, inputs=("query", "key", "value"), **fields)
    trial = Trial(adapter, SIZES)
    trial.begin()
    trial.call(trial.ask())
    assert torch.equal(mine.output.weight, before)
    assert mine.training
    assert mine.dropout.p == 0.5
    assert "attention = copy.deepcopy(mine)" in trial.lines


def test_lazy_weights_are_made_before_they_are_drawn() -> None:
    settings = {"num_hiddens": "12", "num_heads": "3", "dropout": "0.1"}
    kind = valid_lens.MultiHeadAttention
    adapter = Adapter(
        kind,
        "MultiHeadAttention",
        "",
        settings,
        inputs=("queries", "keys", "values"),
        call={"valid_lens": None},
    )
    trial = Trial(adapter, SIZES)
    trial.begin()
    assert trial.lines.index("enliven(attention)") == 6
    assert trial.lines[5].endswith("# shapes of lazy weights")


def test_lines_of_an_attempt_are_forgotten_unless_they_broke_the_law() -> None:
    trial = Trial(honest(), SIZES)
    trial.begin()
    question = trial.ask()
    y = trial.call(question)
    before = list(trial.lines)
    with trial.attempt():
        trial.call(trial.change(question, l=slice(0, 1)))
    assert trial.lines == before
    other = trial.call(trial.change(question, l=slice(4, None), b=slice(1, 2)))
    with pytest.raises(Broken) as raised:
        trial.same(y, other, "{place} moved", b=slice(1, None))
    assert re.fullmatch(r"query \d of batch item 1 moved", str(raised.value))
    assert raised.value.code.startswith("import torch\n")
    assert "key2[1:2, 4:] = draw(" in raised.value.code
    assert raised.value.amount > raised.value.tolerance > 0


def test_change_draws_other_keys_and_values_and_leaves_the_first() -> None:
    trial = Trial(honest(), SIZES)
    trial.begin()
    question = trial.ask()
    other = trial.change(question, "torch.nan", l=slice(1, 3), b=slice(0, 1))
    assert other.inputs[0] == question.inputs[0]
    for before, after in zip(question.inputs[1:], other.inputs[1:], strict=True):
        changed = trial.get(after).isnan().all(dim=-1)
        assert changed.nonzero().tolist() == [[0, 1], [0, 2]]
        assert not trial.get(before).isnan().any()


def test_nan_is_a_difference() -> None:
    trial = Trial(honest(), SIZES)
    trial.begin()
    y = trial.call(trial.ask())
    trial.do("bad = y.clone()")
    trial.do("bad[1, 2] = torch.nan")
    with pytest.raises(Broken, match=r"^query 2 of batch item 1$"):
        trial.same(y, "bad", "{place}")
    with pytest.raises(Broken, match=r"^bad$"):
        trial.finite("bad", "bad")


def test_equal_within_rounding_is_equal() -> None:
    trial = Trial(honest(), SIZES)
    trial.begin()
    y = trial.call(trial.ask())
    trial.do("near = y * (1 + 2e-7)")
    trial.do("far = y * (1 + 2e-5)")
    trial.same(y, "near", "never")
    with pytest.raises(Broken):
        trial.same(y, "far", "always")
    assert 1e-6 < trial.tolerance(y) < 1e-4
    trial.dtype = torch.bfloat16
    assert 1e-2 < trial.tolerance(y) < 1


def test_a_line_that_raises_has_failed() -> None:
    trial = Trial(honest(), SIZES)
    trial.begin()
    with pytest.raises(Failed, match=r"^ZeroDivisionError: division by zero$"):
        trial.do("1 / 0")
    assert trial.lines[-1] == "1 / 0"


def test_dtype_and_device_are_said_where_they_are_unusual() -> None:
    trial = Trial(honest(), SIZES, dtype=torch.float64, device="meta")
    assert trial.suffix() == ".to('meta', torch.float64)"
    assert Trial(honest(), SIZES).suffix() == ""
    double = Trial(honest(), SIZES, dtype=torch.float64)
    double.begin()
    assert double.get(double.call(double.ask())).dtype == torch.float64


def test_what_may_be_read_includes_what_it_does_by_itself() -> None:
    everything = torch.ones(5, 5, 2).bool()
    trial = Trial(honest(causal=True, window=2), SIZES)
    keep = trial.adapter.effective(everything)
    for i in range(5):
        for j in range(5):
            assert keep[i, j].tolist() == [i - 1 <= j <= i] * 2


def test_cases_are_no_mask_and_each_way_to_say_the_others() -> None:
    other = Mask("lens", "lengths", "b")
    trial = Trial(honest(masks=(KEEP, other)), SIZES)
    cases = list(trial.cases())
    assert [way for _, way in cases] == [None, KEEP, KEEP, other]
    assert cases[0][0].all()
    assert cases[1][0].shape == (5, 5, 2)
    assert cases[2][0].shape == (3, 5, 2)
    assert not cases[2][0][:, 3:, 0].any()
    assert cases[2][0][..., 1].all()
    alone = Trial(honest(inputs=("x",), causal=True, masks=()), SIZES)
    assert [list(keep.shape) for keep, _ in alone.cases()] == [[5, 5, 2]]


def test_a_minimum_mask_is_finite_in_every_dtype() -> None:
    least = Mask("mask", "minimum", "b1qk")
    trial = Trial(honest(), SIZES, dtype=torch.float16)
    keep = trial.everything()
    keep[:, 0] = False
    trial.names["torch"] = torch
    said = trial.spell(keep, least)
    assert said is not None
    mask = trial.get(said[1])
    assert mask.dtype == torch.float16
    assert mask[..., 0].eq(torch.finfo(torch.float16).min).all()
    assert not mask[..., 1:].any()


def test_weights_are_found_where_they_lie() -> None:
    adapter = honest(weights=".out.weight")
    trial = Trial(adapter, SIZES)
    trial.begin()
    name = trial.weights(trial.ask())
    assert torch.equal(trial.get(name), trial.get("attention").out.weight)
    torchs: dict[str, Any] = {
        "layout": "lbd",
        "inputs": ("query", "key", "value"),
        "output": "[0]",
        "weights": "[1]",
    }
    trial = Trial(Adapter(nn.MultiheadAttention(12, 3), "MHA", "", {}, **torchs), SIZES)
    trial.begin()
    assert trial.get(trial.weights(trial.ask())).shape == (2, 3, 5)


def test_one_input_is_all_three() -> None:
    settings = {"d_in": "12", "d_out": "12", "context_length": "9"}
    settings |= {"dropout": "0.0", "num_heads": "3"}
    kind = causal.MultiHeadAttention
    adapter = Adapter(kind, "MultiHeadAttention", "", settings, causal=True)
    trial = Trial(adapter, SIZES)
    trial.begin()
    question = trial.ask(trial.everything(5, 5))
    assert question.inputs == ("x",)
    assert trial.change(question, l=slice(1, None)).inputs == ("x2",)
    joined = trial.join("x", "x2")
    assert trial.get(joined).shape == (2, 10, 12)
