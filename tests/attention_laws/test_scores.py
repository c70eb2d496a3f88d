"""Laws of scores: each fails on attention that violates it."""

import pytest
import torch

from attention_laws import LAWS, check, scores
from attention_laws.adapter import Adapter, Options, Sizes
from attention_laws.algebra import project
from attention_laws.infer import infer_adapter
from attention_laws.law import NotApplicable
from attention_laws.script import Script
from specimens import assert_caught, each_law_of
from specimens.algebra import ContinuesPrompt
from specimens.execution import NormalizesTokens
from specimens.lengths import ForgetsInChunks


@each_law_of(scores)
def test_each_law_fails_on_implementations_that_violate_it(
    name: str, device: torch.device
) -> None:
    assert_caught(name, device.type)


def test_normalized_tokens_have_no_large_scores() -> None:
    projections = {each: f"attention64.{each}({{}})" for each in ("query", "key")}
    projections["value"] = "attention64.value({})"
    projections["query_norm"] = projections["key_norm"] = (
        "torch.nn.functional.normalize({}, dim=-1)"
    )
    adapter = Adapter(
        NormalizesTokens(12, 3),
        "Attention",
        "",
        {},
        inputs=("x",),
        projections=projections,
    )
    with pytest.raises(NotApplicable, match="do not grow"):
        LAWS["large_scores"].test(Script(adapter, Sizes(2, 3, 3, 3, 4)))


def test_the_own_keys_of_a_decoder_may_have_larger_scores_than_its_context() -> None:
    adapter = infer_adapter(ContinuesPrompt, "Attention", "", Options())
    script = Script(adapter, Sizes(2, 3, 5, 3, 4))
    script.restart()
    args = scores.scale_to_large_scores(script, script.make_arguments())
    q, k, _v = project(script, args)
    assert 5_000 < script.evaluate(f"({q} @ {k}.mT).abs().max()") < 16_000


def test_sums_of_products_that_overflow_are_no_large_scores() -> None:
    assert check(ForgetsInChunks(64, 4), only="large_scores", causal=True).ok
