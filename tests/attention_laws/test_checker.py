"""Correct attention passes, and reports are complete."""

import itertools
import random
import re
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from attention_laws import LAWS, check, checker, structure
from attention_laws.adapter import Adapter, Options, Sizes
from attention_laws.checker import check_law, size_grid, smaller_sizes
from attention_laws.infer import infer_adapter
from attention_laws.law import LawViolation
from attention_laws.script import Script
from headnotes import fast, mha
from headnotes.implementations import batch_first, causal, stages, valid_lens
from specimens import EXCUSED, PASSING, PASSING_ONE, VIOLATING
from specimens.algebra import ScalesByWidth
from specimens.base import (
    CACHE,
    CAUSAL,
    MASK,
    Correct,
    DecoderOfMemory,
    Guided,
    SelfAttention,
)
from specimens.execution import FillValueOverflowsHalf
from specimens.masking import MultipliesByMask

OURS: list[Any] = [
    mha.MultiHeadAttention,
    mha.MultiHeadAttention(3, 21),
    fast.MultiHeadAttention,
    batch_first.MultiHeadAttention,
    valid_lens.MultiHeadAttention,
    causal.MultiHeadAttention,
    causal.MultiHeadAttention(7, 10, 32, 0.5, 2),
    stages.SelfAttention_v1,
    stages.SelfAttention_v2,
    stages.CausalAttention,
    stages.MultiHeadAttentionWrapper,
]
# The page of the laws checks these in each build, on the CPU; and the class of PyTorch,
# with its weights and without.
ON_THE_PAGE = {OURS[0], OURS[3], OURS[4], OURS[5]}
TORCH = nn.MultiheadAttention(14, 7, 0.5, bias=False, batch_first=True)


def name_of(attention: Any) -> str:
    kind = attention if isinstance(attention, type) else type(attention)
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


@pytest.mark.slow
@pytest.mark.parametrize("attention", OURS, ids=name_of)
def test_ours_pass(attention: Any, device: torch.device) -> None:
    if device.type == "cpu" and attention in ON_THE_PAGE:
        pytest.skip("the page of the laws checks it in each build")
    # Compiling takes as long as all other laws.
    skip = () if attention is OURS[0] else "compiled"
    report = check(attention, device=device.type, skip=skip)
    assert report.ok, report
    assert len(report.passed) >= 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention",
    [OURS[0], OURS[2], batch_first.MultiHeadAttention, valid_lens.MultiHeadAttention],
    ids=name_of,
)
def test_ours_pass_the_strict_law_too(attention: Any, device: torch.device) -> None:
    report = check(attention, only="nonfinite_padding", device=device.type)
    assert len(report.passed) == 1, report


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "options"), PASSING)
def test_correct_attention_passes(
    attention: Any, options: dict[str, Any], device: torch.device
) -> None:
    report = check(attention, device=device.type, skip="compiled", **options)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize(("law", "attention"), PASSING_ONE)
def test_what_is_no_violation_passes(law: str, attention: Any) -> None:
    report = check(attention, only=law)
    assert [result.law.name for result in report.passed] == [law], report


@pytest.mark.slow
@pytest.mark.parametrize(("law", "attention", "reason"), EXCUSED)
def test_what_a_design_intends_is_skipped(
    law: str, attention: Any, reason: str
) -> None:
    report = check(attention, skip=[name for name in LAWS if name != law])
    details = {result.law.name: result.detail for result in report.not_applicable}
    assert report.ok, report
    assert reason in details[law]


@pytest.mark.slow
def test_a_causal_decoder_attends_to_all_of_its_memory() -> None:
    options: dict[str, Any] = {"mask": {"memory_mask": "attend:bk"}, **CACHE, **CAUSAL}
    laws = ["causality", "causal_gradient", "padding", "incremental_decoding"]
    laws += ["query_independence", "long_sequences"]
    skipped = [name for name in LAWS if name not in laws]
    report = check(DecoderOfMemory, skip=skipped, **options)
    assert [result.law.name for result in report.failed] == []
    assert {*laws[:4]} <= {result.law.name for result in report.passed}


@pytest.mark.slow
def test_queries_that_attend_to_each_other_are_not_decoded_by_a_context_mask() -> None:
    laws = ["incremental_decoding", "long_sequences"]
    skipped = [name for name in LAWS if name not in laws]
    report = check(Guided, skip=skipped, inputs=("x", "y"))
    assert report.ok, report
    details = {result.law.name: result.detail for result in report.not_applicable}
    assert details[laws[0]] == "its queries attend to each other"


@pytest.mark.slow
def test_correct_attention_passes_with_another_seed() -> None:
    quick = [name for name, law in LAWS.items() if not (law.slow or law.strict)]
    report = check(Correct, seed=1, only=quick)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "dtype"),
    [(Correct, torch.float64), (OURS[2], torch.bfloat16), (OURS[0], torch.float16)],
    ids=["correct-float64", "fast-bfloat16", "core-float16"],
)
def test_correct_attention_passes_in_other_dtypes(
    attention: Any, dtype: torch.dtype, device: torch.device
) -> None:
    quick = [name for name, law in LAWS.items() if not (law.slow or law.strict)]
    report = check(attention, dtype=dtype, device=device.type, only=quick)
    assert report.ok, report


@pytest.mark.slow
def test_torch_fails_two_laws_only_where_they_are_asked_for(
    device: torch.device,
) -> None:
    # It divides 0 by 0 in a fully masked row, and returns its weights after dropout.
    report = check(TORCH, device=device.type, skip="compiled")
    assert report.ok, report
    reasons = {result.law.name: result.detail for result in report.not_applicable}
    assert "NaN, as in PyTorch" in reasons["fully_masked_rows"]
    laws = ["fully_masked_rows", "rows_sum_to_one"]
    insisted = check(TORCH, device=device.type, only=laws)
    assert [f.law.name for f in insisted.failed] == laws


def shared(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


def backwards(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def heads_last(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "options", "seen"),
    [
        (F.scaled_dot_product_attention, {}, "layout: heads first (inferred)"),
        (shared, {"kv_heads": 2}, "heads: 4, 2 of keys and values (given)"),
        (backwards, {}, "causal without a mask: yes (inferred)"),
        (heads_last, {}, "layout: heads last (inferred)"),
    ],
)
def test_correct_functions_pass(
    attention: Any, options: dict[str, Any], seen: str, device: torch.device
) -> None:
    report = check(attention, device=device.type, skip="compiled", **options)
    assert report.ok, str(report)
    assert seen in str(report)
    assert "the check itself failed" not in str(report)
    assert "formula" in [f.law.name for f in report.passed]


def test_every_law_has_texts_and_an_attention_that_violates_it() -> None:
    assert set(VIOLATING) == set(LAWS)
    for name, law in LAWS.items():
        assert name == law.name
        assert law.statement.endswith(".")
        assert law.formula
        assert law.reason.endswith((".", ")"))


@pytest.mark.slow
def test_a_report_is_a_table_with_copyable_counterexamples() -> None:
    report = check(
        ScalesByWidth, only=["formula", "nonfinite_padding", "sliding_window"]
    )
    assert not report.ok
    text = str(report)
    assert text.startswith(
        "ScalesByWidth\n"
        "  built as: ScalesByWidth(d_model=12, heads=3) (inferred)\n"
        "  inputs: query, key, value (inferred)\n"
        "  layout: batch first (inferred)\n"
        "  `mask`: bool, True = may attend [batch items, queries, keys] (inferred)\n"
    )
    assert re.search(
        r"^formula +FAIL +query \d of batch item \d differs from", text, re.M
    )
    assert re.search(r"^sliding_window +skip +\(`window` is not given\)$", text, re.M)
    assert "    from specimens.algebra import ScalesByWidth\n" in text
    assert text.endswith("0 passed, 2 failed, 1 skipped")


@pytest.mark.slow
def test_a_fill_value_beyond_half_precision_fails_only_on_request() -> None:
    laws = ["half_precision", "dtype_and_device"]
    others = [name for name in LAWS if name not in laws]
    report = check(FillValueOverflowsHalf, skip=others)
    assert [result.law.name for result in report.failed] == []
    assert [r.law.name for r in check(FillValueOverflowsHalf, only=laws).failed] == laws


def test_a_strict_law_runs_only_on_request() -> None:
    others = [name for name in LAWS if name != "nonfinite_padding"]
    result = check(MultipliesByMask, skip=others, **MASK).results[
        list(LAWS).index("nonfinite_padding")
    ]
    assert result.status == "not applicable"
    assert result.detail == "strict: runs with `only`"


def test_a_skipped_law_is_shown_as_skipped_and_does_not_fail() -> None:
    laws = ["formula", "causality"]
    report = check(ScalesByWidth, only=laws, skip="formula", **MASK)
    assert report.ok
    (skipped,) = report.not_applicable
    assert (skipped.law.name, skipped.detail) == ("formula", "skipped on request")


def build_scaled(d_model: int, heads: int) -> nn.Module:
    return ScalesByWidth(d_model, heads)


def test_a_report_is_named_after_the_function_that_builds_the_module() -> None:
    report = check(build_scaled, only="formula", **MASK)
    assert report.name == "build_scaled"
    example = report.failed[0].counterexample
    assert example is not None
    assert "\nbuilt = build_scaled(d_model=12, heads=3)\n" in example.code


def test_counterexamples_are_shrunk_to_the_smallest_sizes() -> None:
    report = check(MultipliesByMask, only="padding", **MASK)
    example = report.failed[0].counterexample
    assert example is not None
    assert example.sizes == Sizes(batch_size=1, q_len=1, k_len=2, heads=1, d_k=1)
    assert example.difference > 100 * example.tolerance
    assert str(example).splitlines() == [
        "query 0 of batch item 0 depends on padded keys [1] of batch item 0",
        "at batch_size=1, q_len=1, k_len=2, heads=1, d_k=1",
        f"difference {example.difference:.2g}, tolerance {example.tolerance:.0e}",
    ]


def test_a_slow_machine_shrinks_to_the_same_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0, 10.0)
    monkeypatch.setattr(checker.time, "perf_counter", lambda: next(clock))
    example = check(MultipliesByMask, only="padding", **MASK).failed[0].counterexample
    assert example is not None
    assert example.sizes == Sizes(batch_size=1, q_len=1, k_len=2, heads=1, d_k=1)


@pytest.mark.slow
def test_a_wrong_output_is_shown_rather_than_an_exception() -> None:

    class Meets(Correct):
        def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            if mask is not None:
                scores = scores.masked_fill(~mask, -1e4)
            return scores.softmax(dim=-1)

    report = check(Meets, only="padding", **MASK)
    example = report.failed[0].counterexample
    assert example is not None
    assert "raises" not in example.message
    assert example.sizes.batch_size == example.sizes.heads


def test_an_internal_error_fails_and_a_refusal_does_not() -> None:
    class Raises(Correct):
        error: type[Exception] = RuntimeError

        def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            if mask is not None and not mask.any(dim=-1).all():
                raise self.error("no row may be empty\nat all")
            return super().weigh(scores, mask)

    class Refuses(Raises):
        error = ValueError

    (result,) = check(Raises, only="fully_masked_rows", **MASK).results
    assert result.status == "fail"
    assert result.detail == "raises RuntimeError: no row may be empty"
    (result,) = check(Refuses, only="fully_masked_rows", **MASK).results
    assert result.status == "not applicable"
    assert result.detail == "refused: no row may be empty"


@pytest.mark.slow
def test_neither_the_attention_nor_the_random_state_changes() -> None:
    attention = mha.MultiHeadAttention(3, 12)
    before = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check(attention, only=["causality", "state_dict"])
    assert torch.equal(torch.rand(3), expected)
    assert attention.training
    assert attention.attn is None
    after = attention.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(p.grad is None for p in attention.parameters())


def test_an_unknown_law_or_option_is_refused() -> None:
    message = "`only` names 'causalty', which is not a law; did you mean `causality`?"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check(Correct, only="causalty")
    with pytest.raises(TypeError, match="unexpected keyword argument 'masks'"):
        check(Correct, masks={})


def test_sizes_coincide_in_one_call_and_differ_in_another() -> None:
    adapter = Adapter(print, "print", "", {}, cross_attention=True)
    sizes = list(size_grid(adapter, thorough=False))
    assert any(s.batch_size == s.heads for s in sizes)
    assert any(s.batch_size == s.q_len for s in sizes)
    assert any(s.q_len == s.k_len for s in sizes)
    assert any(len({s.batch_size, s.q_len, s.k_len, s.heads}) == 4 for s in sizes)
    assert len(list(size_grid(adapter, thorough=True))) > len(sizes)


def test_smaller_sizes_are_smaller_and_fit() -> None:
    sizes = Sizes(3, 4, 7, heads=4, d_k=4)
    free = Adapter(print, "print", "", {}, cross_attention=True, group_size=2)
    for smaller in smaller_sizes(sizes, free):
        assert smaller.heads % 2 == 0
        assert sum(vars(smaller).values()) < sum(vars(sizes).values())
    fixed = Adapter(print, "print", "", {}, fixed_size=True)
    for smaller in smaller_sizes(Sizes(3, 7, 7, heads=4, d_k=4), fixed):
        assert (smaller.heads, smaller.d_k) == (4, 4)
        assert smaller.q_len == smaller.k_len


@pytest.mark.parametrize(("difference", "status"), [(0.003, "pass"), (0.3, "fail")])
def test_a_small_difference_that_disappears_in_float64_is_rounding(
    difference: float, status: str
) -> None:
    def differ(script: Script) -> None:
        if script.dtype == torch.float32:
            raise LawViolation("differs", difference, 0.002, "")

    law = replace(LAWS["causality"], test=differ)
    adapter = infer_adapter(Correct, "Correct", "", Options())
    assert check_law(law, adapter, Options(), thorough=False).status == status


def test_rounding_at_one_size_does_not_hide_a_violation_at_another() -> None:
    def differ(script: Script) -> None:
        if script.dtype == torch.float32:
            raise LawViolation("differs", 0.003, 0.002, "")
        if script.sizes.batch_size == 1:
            raise LawViolation("differs in float64, too", 0.003, 0.002, "")

    law = replace(LAWS["causality"], test=differ)
    adapter = infer_adapter(Correct, "Correct", "", Options())
    assert check_law(law, adapter, Options(), thorough=False).status == "fail"


class SkipsLayer(SelfAttention):
    """LayerDrop, by Python's generator, which PyTorch's seed does not seed."""

    def __init__(self, d_model: int, heads: int, layerdrop: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout=0.0)
        self.layerdrop = layerdrop

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.training and random.random() < self.layerdrop:
            return x
        return x + super().forward(x)


@pytest.mark.slow
def test_each_generator_that_the_file_imports_is_seeded() -> None:
    state = random.getstate()
    laws = ["deterministic", "dropout"]
    seen = []
    for _ in range(2):
        random.seed(len(seen))
        before = random.getstate()
        seen.append(str(check(SkipsLayer, only=laws, seed=3)))
        assert random.getstate() == before
    random.setstate(state)
    assert seen[0] == seen[1]
    assert "FAIL" not in seen[0]
    assert structure.seeds_of_file(SkipsLayer) == ["import random; random.seed({})"]


class NotesKernels(SelfAttention):
    """Whether oneDNN may compute its convolution, in each call."""

    seen: ClassVar[set[bool]] = set()

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        self.seen.add(torch.backends.mkldnn.enabled)
        return super().forward(x)


class NotesKernelsOfConvolution(NotesKernels):
    seen: ClassVar[set[bool]] = set()

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        kernel = torch.ones(x.shape[2], 1, 1).to(x)
        return super().forward(nn.functional.conv1d(x.mT, kernel, groups=x.shape[2]).mT)


def test_no_kernels_of_onednn_compute_convolutions() -> None:
    usual = torch.backends.mkldnn.enabled
    for attention in (NotesKernels, NotesKernelsOfConvolution):
        check(attention, only="deterministic")
    assert NotesKernels.seen == {usual}
    assert NotesKernelsOfConvolution.seen == {False}
    assert torch.backends.mkldnn.enabled == usual
