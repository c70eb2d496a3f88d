"""Decoders: each computes the reference, and again after a reset."""

import importlib.util

import pytest
import torch

from attention_bench.decoding import DECODERS, TOKENS, decode_tokens, make_prefix
from attention_bench.equal import check_equal, reference
from attention_bench.setting import Setting

pytestmark = pytest.mark.filterwarnings("ignore")
LIBRARIES = {"gpt2": "transformers", "x-transformers": "x_transformers"}


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_all_compute_the_reference(name: str, device: torch.device) -> None:
    library = LIBRARIES.get(name, "torch")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    setting = Setting(3, 11, decoding=True, d_model=28, heads=7, device=device)
    prefix, tokens, expected = make_prefix(setting)
    before = prefix.key.clone(), prefix.value.clone(), prefix.x.clone()
    with torch.inference_mode():
        decoder = DECODERS[name](prefix)
        for _ in range(2):  # after a reset it continues the same prefix
            decoder.reset()
            output = decode_tokens(decoder, tokens)
            assert check_equal({"output": output}, {"output": expected}, 1e-5)[1] == ""
    assert before[0].equal(prefix.key)
    assert before[1].equal(prefix.value)
    assert before[2].equal(prefix.x)


def test_the_reference_of_tokens_is_that_of_the_whole_text() -> None:
    setting = Setting(3, 11, decoding=True, d_model=28, heads=7)
    prefix, tokens, expected = make_prefix(setting)
    whole = Setting(3, 11 + TOKENS, "causal", d_model=28, heads=7)
    assert whole.x().equal(torch.cat([prefix.x, tokens]))
    assert torch.allclose(reference(whole)["output"][11:], expected, atol=1e-6)


def test_without_a_reset_a_decoder_continues() -> None:
    setting = Setting(3, 11, decoding=True, d_model=28, heads=7)
    prefix, tokens, _ = make_prefix(setting)
    with torch.inference_mode():
        decoder = DECODERS["cat"](prefix)
        decoder.reset()
        one, other = decoder.step(tokens[:1]), decoder.step(tokens[:1])
    assert not torch.allclose(one, other, atol=1e-3)
