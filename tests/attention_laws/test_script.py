"""A script executes the lines that it records, and prints those that matter."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attention_laws import script
from attention_laws.adapter import Adapter, MaskArgument, Sizes
from attention_laws.law import LawViolation, ScriptError
from attention_laws.script import CheckedIndices, Script
from headnotes import mha
from headnotes.implementations import causal, valid_lens
from specimens.base import Correct

SIZES = Sizes(2, 3, 5, heads=3, d_k=4)
INIT_ARGS = {"d_model": "{d_model}", "heads": "{heads}"}
MASK = MaskArgument("mask", "attend", "bqk")


def correct_adapter(**fields: Any) -> Adapter:
    fields = {"inputs": ("query", "key", "value"), "masks": (MASK,), **fields}
    imports = "from specimens.base import Correct\n"
    return Adapter(
        Correct, "Correct", imports, INIT_ARGS, cross_attention=True, **fields
    )


def test_the_program_repeats_what_was_executed() -> None:
    script = Script(correct_adapter(), SIZES)
    script.restart()
    y = script.call(script.make_arguments())
    names: dict[str, Any] = {}
    exec(script.program(), names)
    assert torch.equal(names[y], script.evaluate(y))
    assert script.evaluate(y).shape == (2, 3, 12)


def test_a_program_imports_only_what_it_calls() -> None:
    script = Script(correct_adapter(), SIZES)
    script.restart(dropout=0.1)  # its default
    script.call(script.make_arguments())
    assert script.program("assert y.any()") == (
        "import torch\n"
        "from specimens.base import Correct\n"
        "from attention_laws.tools import seeded_randn, randomize_parameters\n"
        "\n"
        "torch.manual_seed(0)\n"
        "attention = Correct(d_model=12, heads=3)\n"
        "randomize_parameters(attention)\n"
        "attention.eval()\n"
        "query = seeded_randn(1, 2, 3, 12)\n"
        "key = seeded_randn(2, 2, 5, 12)\n"
        "value = seeded_randn(3, 2, 5, 12)\n"
        "y = attention(query, key, value)\n"
        "assert y.any()\n"
    )


def test_modes_are_eval_train_and_no_grad_without_dropout() -> None:
    script = Script(correct_adapter(), SIZES)
    assert script.modes() == ["eval", "train"]
    for mode in [*script.modes(), "no_grad", "inference"]:
        script.restart(mode)
        y = script.evaluate(script.call(script.make_arguments()))
        assert script.evaluate("attention").training == (mode == "train")
        assert script.evaluate("attention").dropout.p == 0
        assert y.requires_grad == (mode in ("eval", "train"))
    script = Script(correct_adapter(reproducible_training=False), SIZES)
    assert script.modes() == ["eval"]
    assert Script(Adapter(print, "print", "", {}), SIZES).modes() == ["eval"]


def test_an_instance_is_copied_and_never_modified() -> None:
    mine = mha.MultiHeadAttention(3, 12, 0.5)
    before = mine.output.weight.clone()
    fields: dict[str, Any] = {"layout": "lbd", "by_keyword": True}
    adapter = Adapter(mine, "mine", "", {}, inputs=("query", "key", "value"), **fields)
    script = Script(adapter, SIZES)
    script.restart()
    script.call(script.make_arguments())
    assert torch.equal(mine.output.weight, before)
    assert mine.training
    assert mine.dropout.p == 0.5
    assert "attention = detached_copy(mine)" in script.lines


def test_lazy_weights_are_initialized_before_they_are_randomized() -> None:
    init_args = {"num_hiddens": "12", "num_heads": "3", "dropout": "0.1"}
    kind = valid_lens.MultiHeadAttention
    adapter = Adapter(
        kind,
        "MultiHeadAttention",
        "",
        init_args,
        inputs=("queries", "keys", "values"),
        call_args={"valid_lens": None},
    )
    script = Script(adapter, SIZES)
    script.restart()
    assert script.lines.index("randomize_parameters(attention)") == 6
    assert script.lines[5].endswith("# initializes lazy weights")


def test_rollback_removes_lines_unless_the_law_fails() -> None:
    script = Script(correct_adapter(), SIZES)
    script.restart()
    args = script.make_arguments()
    y = script.call(args)
    before = list(script.lines)
    with script.rollback():
        script.call(script.perturb(args, l=slice(0, 1)))
    assert script.lines == before
    other = script.call(script.perturb(args, l=slice(4, None), b=slice(1, 2)))
    with pytest.raises(LawViolation) as raised:
        script.assert_close(y, other, "{place} moved", b=slice(1, None))
    assert re.fullmatch(r"query \d of batch item 1 moved", str(raised.value))
    assert raised.value.code.startswith("import torch\n")
    assert "key2[1:2, 4:] = seeded_randn(" in raised.value.code
    assert raised.value.difference > raised.value.tolerance > 0


def test_other_sizes_adapters_and_dtypes_end_with_their_block() -> None:
    script = Script(correct_adapter(), SIZES)
    usual, other = script.adapter, correct_adapter(causal=True)
    with script.using(other, torch.float64, q_len=7):
        assert (script.adapter, script.dtype) == (other, torch.float64)
        assert script.sizes == replace(SIZES, q_len=7)
        with script.using(k_len=11):
            assert (script.adapter, script.dtype) == (other, torch.float64)
            assert script.sizes == replace(SIZES, q_len=7, k_len=11)
        assert script.sizes == replace(SIZES, q_len=7)
    assert (script.adapter, script.dtype) == (usual, torch.float32)
    assert script.sizes == SIZES


def test_a_block_that_raises_ends_its_sizes_and_an_error_knows_them() -> None:
    script = Script(correct_adapter(), SIZES)
    script.restart()
    usual = script.adapter

    def fail_in_block() -> None:
        with script.using(batch_size=7):
            script.adapter, script.dtype = correct_adapter(causal=True), torch.float16
            script.exec_line("1 / 0")

    with pytest.raises(ScriptError) as failed:
        fail_in_block()
    assert failed.value.batch_size == 7
    assert (script.adapter, script.dtype) == (usual, torch.float32)
    assert script.sizes == SIZES
    with pytest.raises(LawViolation) as raised, script.using(k_len=11):
        script.assert_true("False", "never")
    assert raised.value.sizes == replace(SIZES, k_len=11)
    assert script.sizes == SIZES


def test_perturb_replaces_copies_of_keys_and_values_only() -> None:
    script = Script(correct_adapter(), SIZES)
    script.restart()
    args = script.make_arguments()
    other = script.perturb(args, "torch.nan", l=slice(1, 3), b=slice(0, 1))
    assert other.inputs[0] == args.inputs[0]
    for before, after in zip(args.inputs[1:], other.inputs[1:], strict=True):
        changed = script.evaluate(after).isnan().all(dim=-1)
        assert changed.nonzero().tolist() == [[0, 1], [0, 2]]
        assert not script.evaluate(before).isnan().any()


def test_no_input_has_the_name_of_a_module_that_a_law_makes() -> None:
    makes = (
        r'exec_line\(f?"(\w+) = (?:copy\.deepcopy|detached_copy|\{script\.build_exp)'
    )
    folder = Path(script.__file__).parent
    source = "".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    made = {*re.findall(makes, source), *re.findall(r'build_other\("(\w+)"', source)}
    assert {"other", "fresh", "plain"} <= made <= {*script.OF_LAWS.split()}


def test_nan_is_a_difference() -> None:
    script = Script(correct_adapter(), SIZES)
    script.restart()
    y = script.call(script.make_arguments())
    script.exec_line("bad = y.clone()")
    script.exec_line("bad[1, 2] = torch.nan")
    with pytest.raises(LawViolation, match=r"^query 2 of batch item 1$"):
        script.assert_close(y, "bad", "{place}")
    with pytest.raises(LawViolation, match=r"^bad$"):
        script.assert_finite("bad", "bad")


def test_rounding_is_no_difference() -> None:
    script = Script(correct_adapter(), SIZES)
    script.restart()
    y = script.call(script.make_arguments())
    script.exec_line("near = y * (1 + 2e-7)")
    script.exec_line("far = y * (1 + 2e-5)")
    script.assert_close(y, "near", "never")
    with pytest.raises(LawViolation):
        script.assert_close(y, "far", "always")
    assert 1e-6 < script.tolerance(y) < 1e-4
    script.dtype = torch.bfloat16
    assert 1e-2 < script.tolerance(y) < 1


def test_a_line_that_raises_is_recorded() -> None:
    script = Script(correct_adapter(), SIZES)
    script.restart()
    with pytest.raises(ScriptError, match=r"^ZeroDivisionError: division by zero$"):
        script.exec_line("1 / 0")
    assert script.lines[-1] == "1 / 0"


def test_only_unusual_dtypes_and_devices_are_written() -> None:
    script = Script(correct_adapter(), SIZES, dtype=torch.float64, device="meta")
    assert script.to_dtype_and_device() == ".to('meta', torch.float64)"
    assert Script(correct_adapter(), SIZES).to_dtype_and_device() == ""
    double = Script(correct_adapter(), SIZES, dtype=torch.float64)
    double.restart()
    assert double.evaluate(double.call(double.make_arguments())).dtype == torch.float64


def test_the_effective_mask_includes_causality_and_window() -> None:
    all_allowed = torch.ones(5, 5, 2).bool()
    script = Script(correct_adapter(causal=True, window=2), SIZES)
    allowed = script.adapter.effective_mask(all_allowed)
    for i in range(5):
        for j in range(5):
            assert allowed[i, j].tolist() == [i - 1 <= j <= i] * 2


def test_mask_cases_are_none_causal_and_padded_in_each_encoding() -> None:
    other = MaskArgument("lens", "lengths", "b")
    script = Script(correct_adapter(masks=(MASK, other)), SIZES)
    cases = list(script.mask_cases())
    assert [mask for _, mask in cases] == [None, MASK, MASK, other]
    assert cases[0][0].all()
    assert cases[1][0].shape == (5, 5, 2)
    assert cases[2][0].shape == (3, 5, 2)
    assert not cases[2][0][:, 3:, 0].any()
    assert cases[2][0][..., 1].all()
    single = Script(correct_adapter(inputs=("x",), causal=True, masks=()), SIZES)
    assert [list(allowed.shape) for allowed, _ in single.mask_cases()] == [[5, 5, 2]]


def test_an_additive_min_mask_is_finite_in_every_dtype() -> None:
    least = MaskArgument("mask", "additive_min", "b1qk")
    script = Script(correct_adapter(), SIZES, dtype=torch.float16)
    allowed = script.all_allowed()
    allowed[:, 0] = False
    script.namespace["torch"] = torch
    encoded = script.encode_mask(allowed, least)
    assert encoded is not None
    mask = script.evaluate(encoded[1])
    assert mask.dtype == torch.float16
    assert mask[..., 0].eq(torch.finfo(torch.float16).min).all()
    assert not mask[..., 1:].any()


def test_weights_come_from_an_attribute_or_the_result() -> None:
    adapter = correct_adapter(weights_source=".out.weight")
    script = Script(adapter, SIZES)
    script.restart()
    name = script.call_for_weights(script.make_arguments())
    assert torch.equal(script.evaluate(name), script.evaluate("attention").out.weight)
    torchs: dict[str, Any] = {
        "layout": "lbd",
        "inputs": ("query", "key", "value"),
        "output_index": "[0]",
        "weights_source": "[1]",
    }
    script = Script(
        Adapter(nn.MultiheadAttention(12, 3), "MHA", "", {}, **torchs), SIZES
    )
    script.restart()
    weights = script.evaluate(script.call_for_weights(script.make_arguments()))
    assert weights.shape == (2, 3, 5)


def test_a_single_input_is_query_key_and_value() -> None:
    init_args = {"d_in": "12", "d_out": "12", "context_length": "9"}
    init_args |= {"dropout": "0.0", "num_heads": "3"}
    kind = causal.MultiHeadAttention
    adapter = Adapter(kind, "MultiHeadAttention", "", init_args, causal=True)
    script = Script(adapter, SIZES)
    script.restart()
    args = script.make_arguments(script.all_allowed(5, 5))
    assert args.inputs == ("x",)
    assert script.perturb(args, l=slice(1, None)).inputs == ("x2",)
    joined = script.concatenate("x", "x2")
    assert script.evaluate(joined).shape == (2, 10, 12)


@pytest.mark.parametrize(
    "look_up",
    [
        lambda table, index: table[:, index],
        lambda table, index: table.index_select(1, index),
        lambda table, index: table.gather(1, index.expand(3, -1)),
        lambda table, index: nn.functional.embedding(index, table.mT),
    ],
)
def test_an_index_out_of_range_is_refused_before_a_gpu_sees_it(look_up: Any) -> None:
    table, checked = torch.randn(3, 5), CheckedIndices()  # type: ignore[no-untyped-call]
    inside, outside = torch.tensor([4, 0]), torch.tensor([4, 5])
    with checked:
        assert look_up(table, inside).numel() == 6
        with pytest.raises(IndexError, match="indices 4 to 5 of a size of 5"):
            look_up(table, outside)


def test_a_mask_and_an_index_from_the_end_are_in_range() -> None:
    table, checked = torch.randn(3, 5), CheckedIndices()  # type: ignore[no-untyped-call]
    with checked:
        assert table[table > 0].numel() == (table > 0).sum()
        assert torch.equal(table[torch.tensor([-3])], table[:1])
