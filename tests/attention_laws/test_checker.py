"""No false alarms, and reports that say what was found."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from attention_laws import LAWS, check
from attention_laws.adapter import Adapter, Sizes
from attention_laws.checker import grid, smaller
from headnotes import fast, mha
from headnotes.implementations import batch_first, causal, stages, valid_lens
from specimens import BROKEN, MASK, SOUND, Honest, MultipliesByTheMask, ScalesByTheWidth

OURS: list[Any] = [
    mha.MultiHeadAttention,
    mha.MultiHeadAttention(3, 21),
    fast.MultiHeadAttention,
    fast.MultiHeadAttention(3, 21),
    batch_first.MultiHeadAttention,
    valid_lens.MultiHeadAttention,
    causal.MultiHeadAttention,
    causal.MultiHeadAttention(7, 10, 32, 0.5, 2),
    stages.SelfAttention_v1,
    stages.SelfAttention_v2,
    stages.CausalAttention,
    stages.MultiHeadAttentionWrapper,
]
TORCH = [
    (nn.MultiheadAttention, {}),
    (nn.MultiheadAttention(14, 7, 0.5, bias=False, batch_first=True), {}),
]


def called(attention: Any) -> str:
    kind = attention if isinstance(attention, type) else type(attention)
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


@pytest.mark.parametrize("attention", OURS, ids=called)
def test_no_false_alarm_on_ours(attention: Any, device: torch.device) -> None:
    report = check(attention, device=device.type)
    assert report.ok, report
    assert len(report.kept) >= 13


@pytest.mark.parametrize(
    "attention",
    [OURS[0], OURS[2], batch_first.MultiHeadAttention, valid_lens.MultiHeadAttention],
    ids=called,
)
def test_ours_keep_the_strict_law_too(attention: Any, device: torch.device) -> None:
    report = check(attention, only="padding_not_finite", device=device.type)
    assert len(report.kept) == 1, report


@pytest.mark.parametrize(("attention", "options"), SOUND)
def test_no_false_alarm_on_who_is_sound(
    attention: Any, options: dict[str, Any], device: torch.device
) -> None:
    report = check(attention, device=device.type, **options)
    assert report.ok, report


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("attention", [OURS[0], OURS[2], OURS[6], Honest], ids=called)
def test_no_false_alarm_whatever_the_seed(attention: Any, seed: int) -> None:
    quick = [name for name, law in LAWS.items() if not (law.once or law.strict)]
    report = check(attention, seed=seed, only=quick)
    assert report.ok, report


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_no_false_alarm_in_other_dtypes(
    dtype: torch.dtype, device: torch.device
) -> None:
    quick = [name for name, law in LAWS.items() if not (law.once or law.strict)]
    for attention in (OURS[0], OURS[2], causal.MultiHeadAttention):
        report = check(attention, dtype=dtype, device=device.type, only=quick)
        assert report.ok, report


@pytest.mark.parametrize(("attention", "options"), TORCH)
def test_torch_breaks_two_laws_and_no_others(
    attention: Any, options: dict[str, Any], device: torch.device
) -> None:
    # It divides 0 by 0 for a row without keys, and shows its weights after dropout.
    report = check(attention, device=device.type, **options)
    assert {f.law.name for f in report.broken} == {"empty_rows", "rows_sum_to_one"}


def shared(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


def backwards(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def heads_last(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


@pytest.mark.parametrize(
    ("attention", "options", "seen"),
    [
        (F.scaled_dot_product_attention, {}, "layout: heads (inferred)"),
        (shared, {"kv_heads": 2}, "heads: 4, 2 of keys and values (given)"),
        (backwards, {}, "causal by itself: yes (inferred)"),
        (heads_last, {}, "layout: heads last (inferred)"),
    ],
)
def test_no_false_alarm_on_functions(
    attention: Any, options: dict[str, Any], seen: str, device: torch.device
) -> None:
    report = check(attention, device=device.type, **options)
    assert report.ok, report
    assert seen in str(report)
    assert "formula" in [f.law.name for f in report.kept]


def test_every_law_is_known_to_be_breakable_and_says_why() -> None:
    assert set(BROKEN) == set(LAWS)
    for name, law in LAWS.items():
        assert name == law.name
        assert law.statement.endswith(".")
        assert law.formula
        assert law.reason.endswith((".", ")"))


def test_a_report_is_a_table_with_copyable_counterexamples() -> None:
    report = check(ScalesByTheWidth, only=["formula", "padding_not_finite", "window"])
    assert not report.ok
    text = str(report)
    assert text.startswith(
        "ScalesByTheWidth\n"
        "  built as: ScalesByTheWidth(d_model=12, heads=3) (inferred)\n"
        "  inputs: query, key, value (inferred)\n"
        "  layout: batch first (inferred)\n"
        "  `mask`: True = may be read [batch items, queries, keys] (inferred)\n"
    )
    assert re.search(
        r"^formula +broken +query \d of batch item \d is not what", text, re.M
    )
    assert re.search(r"^window +not applicable +declares no window$", text, re.M)
    assert "    from specimens import ScalesByTheWidth\n" in text
    assert text.endswith("0 kept, 2 broken, 1 not applicable")


def test_a_strict_law_is_only_asked_if_named_or_thoroughly() -> None:
    finding = check(MultipliesByTheMask, **MASK).findings[
        list(LAWS).index("padding_not_finite")
    ]
    assert finding.verdict == "not applicable"
    assert (
        finding.detail == "asked if named, or with `thorough`: most attention breaks it"
    )


def test_a_law_that_is_skipped_is_shown_as_such_and_breaks_nothing() -> None:
    laws = ["formula", "causality"]
    report = check(ScalesByTheWidth, only=laws, skip="formula", **MASK)
    assert report.ok
    (skipped,) = report.not_applicable
    assert (skipped.law.name, skipped.detail) == ("formula", "skipped, as asked")


def test_counterexamples_are_as_small_as_they_can_be() -> None:
    report = check(MultipliesByTheMask, only="padding", **MASK)
    example = report.broken[0].counterexample
    assert example is not None
    assert example.sizes == Sizes(batch_size=1, q_len=1, k_len=2, heads=1, d_k=1)
    assert example.amount > 100 * example.tolerance
    assert str(example).splitlines() == [
        "query 0 of batch item 0 reads from padded keys of batch item 0, [1]",
        "at batch_size=1, q_len=1, k_len=2, heads=1, d_k=1",
        f"by {example.amount:.2g}, where {example.tolerance:.0e} is rounding",
    ]


def test_a_wrong_answer_is_shown_rather_than_an_error() -> None:

    class Meets(Honest):
        def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            if mask is not None:
                scores = scores.masked_fill(~mask, -1e4)
            return scores.softmax(dim=-1)

    report = check(Meets, only="padding", **MASK)
    example = report.broken[0].counterexample
    assert example is not None
    assert "raises" not in example.said
    assert example.sizes.batch_size == example.sizes.heads


def test_an_error_is_a_broken_law_and_a_refusal_is_not() -> None:
    class Raises(Honest):
        error: type[Exception] = RuntimeError

        def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            if mask is not None and not mask.any(dim=-1).all():
                raise self.error("no row may be empty\nat all")
            return super().weigh(scores, mask)

    class Refuses(Raises):
        error = ValueError

    (finding,) = check(Raises, only="empty_rows", **MASK).findings
    assert finding.verdict == "broken"
    assert finding.detail == "raises RuntimeError: no row may be empty"
    (finding,) = check(Refuses, only="empty_rows", **MASK).findings
    assert finding.verdict == "not applicable"
    assert finding.detail == "refused: no row may be empty"


def test_neither_the_attention_nor_the_seed_is_touched() -> None:
    attention = mha.MultiHeadAttention(3, 12)
    before = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check(attention, only=["causality", "state"])
    assert torch.equal(torch.rand(3), expected)
    assert attention.training
    assert attention.attn is None
    after = attention.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(p.grad is None for p in attention.parameters())


def test_an_unknown_law_or_option_is_refused() -> None:
    known = ", ".join(LAWS)
    message = f"`only` names 'causalty', which is no law; there are {known}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check(Honest, only="causalty")
    with pytest.raises(TypeError, match="unexpected keyword argument 'masks'"):
        check(Honest, masks={})


def test_sizes_coincide_somewhere_and_differ_somewhere() -> None:
    adapter = Adapter(print, "print", "", {}, cross=True)
    sizes = list(grid(adapter, thorough=False))
    assert any(s.batch_size == s.heads for s in sizes)
    assert any(s.batch_size == s.q_len for s in sizes)
    assert any(s.q_len == s.k_len for s in sizes)
    assert any(len({s.batch_size, s.q_len, s.k_len, s.heads}) == 4 for s in sizes)
    assert len(list(grid(adapter, thorough=True))) > len(sizes)


def test_smaller_sizes_are_smaller_and_fit() -> None:
    sizes = Sizes(3, 4, 7, heads=4, d_k=4)
    free = Adapter(print, "print", "", {}, cross=True, groups=2)
    for less in smaller(sizes, free):
        assert less.heads % 2 == 0
        assert less.q_len <= less.k_len
        assert sum(vars(less).values()) < sum(vars(sizes).values())
    fixed = Adapter(print, "print", "", {}, fixed=True)
    for less in smaller(Sizes(3, 7, 7, heads=4, d_k=4), fixed):
        assert (less.heads, less.d_k) == (4, 4)
        assert less.q_len == less.k_len
