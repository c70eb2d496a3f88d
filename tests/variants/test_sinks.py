"""Attention sinks: a learned logit per head that takes weight, and gives no value."""

import math

import pytest
import torch
from torch import Tensor

from attention_laws import check
from claims import (
    assert_equals_the_loops,
    inputs,
    some_mask,
)
from contract import randomize
from headnotes import fast
from headnotes.mha import MultiHeadAttention, masked_softmax
from headnotes.variants.sinks import SinkAttention


def with_sinks(sinks: Tensor, scores: Tensor, head: int) -> Tensor:
    """Each exponential divided by the sum of all, that of the sink included."""
    largest = torch.maximum(scores.amax(), sinks[head])
    exponentials = (scores - largest).exp()
    return exponentials / (exponentials.sum() + (sinks[head] - largest).exp())


@pytest.mark.parametrize("masked", [False, True])
def test_the_sink_takes_part_in_the_softmax_of_each_head(masked: bool) -> None:
    module = SinkAttention(2, 6)
    assert_equals_the_loops(
        module,
        some_mask() if masked else None,
        weigh=lambda scores, head: with_sinks(module.sinks, scores, head),
    )


def test_a_sink_of_zero_adds_one_to_the_sum() -> None:
    module = SinkAttention(2, 6).double()
    xs = inputs(6)
    module(**xs)
    q, k = module.query(xs["query"]) / math.sqrt(3), module.key(xs["key"])
    exponentials = torch.einsum("ibhd,jbhd->ijbh", q, k).exp()
    expected = exponentials / (1 + exponentials.sum(dim=1, keepdim=True))
    torch.testing.assert_close(module.attn, expected)


@pytest.mark.parametrize("logit", [-1e4, -math.inf])
def test_without_weight_for_the_sinks_it_is_the_core(logit: float) -> None:
    core, module = MultiHeadAttention(2, 6).eval(), SinkAttention(2, 6).eval()
    randomize(core)
    missing = module.load_state_dict(core.state_dict(), strict=False)
    assert missing.missing_keys == ["sinks"]
    torch.nn.init.constant_(module.sinks, logit)
    xs = {name: x.float().requires_grad_() for name, x in inputs(6).items()}
    for mask in (None, some_mask()):
        output, expected = module(**xs, mask=mask), core(**xs, mask=mask)
        torch.testing.assert_close(output, expected)
        grads = torch.autograd.grad(output.sum(), [*xs.values(), *module.parameters()])
        assert all(grad.isfinite().all() for grad in grads)


def test_a_sink_beyond_all_scores_leaves_no_weight_and_overflows_nowhere() -> None:
    module = SinkAttention(2, 6).half()
    torch.nn.init.constant_(module.sinks, 60_000)
    xs = {name: x.half() for name, x in inputs(6).items()}
    assert torch.equal(
        module(**xs), module.output.bias.expand_as(xs["query"]).contiguous()
    )


def test_a_sink_that_autocast_rounds_to_infinity_takes_the_whole_weight() -> None:
    module = SinkAttention(2, 6).eval()
    torch.nn.init.constant_(module.sinks, 1e5)
    xs = {name: x.float() for name, x in inputs(6).items()}
    with torch.autocast("cpu", torch.float16):
        output = module(**xs)
    expected = module.output.bias.half().expand_as(output)
    torch.testing.assert_close(output, expected.contiguous())


class AddsToScores(SinkAttention):
    """The bug: the sink is added to the score of each key."""

    def get_weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return masked_softmax(scores + self.sinks, mask)


@pytest.mark.slow
def test_the_law_of_sinks_runs_on_ours_and_fails_without_a_sink() -> None:
    ours = fast.MultiHeadAttention(3, 21, scores=fast.Scores(sinks=True))
    for attention in (SinkAttention, ours):
        report = check(attention, only="sinks")
        assert report.ok, report
        assert [result.law.name for result in report.passed] == ["sinks"], report
    assert [r.law.name for r in check(AddsToScores, only="sinks").failed] == ["sinks"]
