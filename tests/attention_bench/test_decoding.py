"""Decoders: each says what the judge says, again and again."""

import importlib.util

import pytest
import torch

from attention_bench.decoding import DECODERS, TOKENS, prefix_of
from attention_bench.equal import judge
from attention_bench.run import decode
from attention_bench.setting import Setting
from attention_bench.timing import gate

pytestmark = pytest.mark.filterwarnings("ignore")
NEEDS = {"gpt2": "transformers", "x-transformers": "x_transformers"}


@pytest.mark.parametrize("name", DECODERS)
def test_all_say_what_the_judge_says(name: str, device: torch.device) -> None:
    needs = NEEDS.get(name, "torch")
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"there is no {needs}")
    setting = Setting(3, 11, decoding=True, d_model=28, heads=7, device=device)
    prefix, tokens, right = prefix_of(setting)
    kept = prefix.key.clone(), prefix.value.clone(), prefix.x.clone()
    with torch.inference_mode():
        decoder = DECODERS[name](prefix)
        for _ in range(2):  # set back, it starts again from the same text
            decoder.reset()
            said = {name: {"output": decode(decoder, tokens)}}
            assert gate(said, {"output": right}, 1e-5)[1] == {}
    assert kept[0].equal(prefix.key)
    assert kept[1].equal(prefix.value)
    assert kept[2].equal(prefix.x)


def test_the_judge_of_tokens_is_the_judge_of_texts() -> None:
    setting = Setting(3, 11, decoding=True, d_model=28, heads=7)
    prefix, tokens, right = prefix_of(setting)
    whole = Setting(3, 11 + TOKENS, "causal", d_model=28, heads=7)
    assert whole.x().equal(torch.cat([prefix.x, tokens]))
    assert torch.allclose(judge(whole)["output"][11:], right, atol=1e-6)


def test_without_a_reset_a_decoder_goes_on() -> None:
    setting = Setting(3, 11, decoding=True, d_model=28, heads=7)
    prefix, tokens, _ = prefix_of(setting)
    with torch.inference_mode():
        decoder = DECODERS["cat"](prefix)
        decoder.reset()
        one, other = decoder.step(tokens[:1]), decoder.step(tokens[:1])
    assert not torch.allclose(one, other, atol=1e-3)
