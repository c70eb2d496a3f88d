"""Whole models give the logits and tokens of `eager` with our attention."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import models
from headnotes.fast.attention import attention
from headnotes.integrations import transformers as integration

pytest.importorskip("transformers")

# Rows 1 and 2 begin with padding.
PROMPTS = torch.randint(1, 31, (3, 7), generator=torch.Generator().manual_seed(2017))
PROMPTS[1, :3] = PROMPTS[2, :1] = 0
PADDING = (PROMPTS > 0).long()

# The first releases in which these models run with our attention.
RUN_SINCE = {"BertForMaskedLM": "5.5", "T5ForConditionalGeneration": "5.16"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of our attention function, of which there must be some."""
    integration.register()
    seen: list[tuple[Any, ...]] = []

    def counted(*args: Any, **options: Any) -> Any:
        seen.append(args)
        return attention(*args, **options)

    monkeypatch.setattr(integration, "attention", counted)
    return seen


def run(model: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """The logits of tokens, and the tokens of a greedy generation with a KV cache."""
    inputs: dict[str, Any] = {"input_ids": PROMPTS, "attention_mask": PADDING}
    if name.startswith("T5"):
        logits = model(**inputs, decoder_input_ids=PROMPTS[:1].expand(3, -1)).logits
    else:
        logits = model(**inputs).logits[PADDING > 0]
    if not model.can_generate():
        return logits, None
    return logits, model.generate(**inputs, max_new_tokens=6, do_sample=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.MODELS)
@torch.no_grad()
def test_logits_and_greedy_tokens_are_those_of_eager(
    name: str, calls: list[tuple[Any, ...]]
) -> None:
    models.require(RUN_SINCE.get(name, "4.57"))
    model = models.build(name)
    expected, tokens = run(model, name)
    assert not calls
    model.set_attn_implementation("headnotes")
    logits, same = run(model, name)
    assert len(calls) >= 2
    assert (logits - expected).norm() <= 1e-5 * expected.norm()
    if tokens is not None:
        assert same is not None
        assert torch.equal(same, tokens)
        assert len(tokens.unique()) > 4


@torch.no_grad()
def test_a_static_cache_and_a_prompt_in_pieces_change_no_logits(
    calls: list[tuple[Any, ...]],
) -> None:
    model = models.build("Gemma3ForCausalLM", "headnotes")
    prompt = PROMPTS.clamp(min=1)

    def logits(**options: Any) -> Tensor:
        result = model.generate(
            prompt,
            max_new_tokens=5,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        return torch.stack(result.logits)

    expected = logits()
    assert calls
    static = logits(cache_implementation="static", disable_compile=True)
    torch.testing.assert_close(static, expected)
    torch.testing.assert_close(logits(prefill_chunk_size=3), expected)


@pytest.mark.parametrize("name", ["GptOssForCausalLM", "T5ForConditionalGeneration"])
def test_gradients_are_those_of_eager(name: str, calls: list[tuple[Any, ...]]) -> None:
    models.require(RUN_SINCE.get(name, "4.57"))
    model = models.build(name)
    gradients = []
    for attention_name in ("eager", "headnotes"):
        model.set_attn_implementation(attention_name)
        model(PROMPTS, attention_mask=PADDING, labels=PROMPTS).loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        gradients.append(found)
        model.zero_grad()
    assert calls
    expected, ours = gradients
    assert ours.keys() == expected.keys()
    for place, grad in expected.items():
        torch.testing.assert_close(ours[place], grad, rtol=1e-3, atol=1e-5, msg=place)


@pytest.mark.parametrize("name", ["BertModel", "T5Model", "BloomModel"])
def test_a_model_that_offers_no_choice_of_implementations_refuses_ours(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not models.is_older({"BertModel": "5.5", "T5Model": "5.15"}.get(name, "99.9")):
        pytest.skip("it offers a choice in this release")
    integration.register()
    integration.register()
    sizes = {"vocab_size": 31, "hidden_size": 24, "num_attention_heads": 6}
    monkeypatch.setitem(models.MODELS, name, sizes | {"num_layers": 1, "n_layer": 1})
    models.build(name)
    message = f"{name} offers no choice of attention implementations in transformers .*"
    with pytest.raises(ValueError, match=rf'{message}; use "eager", or update'):
        models.build(name, "headnotes")


def test_dropout_is_applied_and_the_weights_are_those_before_it() -> None:
    query, key, value = torch.randn(3, 2, 6, 5, 8)
    options: dict[str, Any] = {"attention_mask": None, "is_causal": True}
    inputs = nn.Module(), query, key, value
    plain, none = integration.attention_forward(*inputs, **options)
    assert none is None
    dropped, weights = integration.attention_forward(
        *inputs, **options, dropout=0.5, output_attentions=True
    )
    assert weights is not None
    assert not torch.allclose(dropped, plain)
    assert torch.allclose((weights @ value).transpose(1, 2), plain, atol=1e-6)


def test_a_window_is_that_of_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 2, 6, 11, 8)
    causal = torch.ones(2, 1, 11, 11).bool().tril()
    image = causal.clone()
    image[..., 2:7, 2:7] = True  # wider than the window
    windows = []

    def recorded(*args: Any, **options: Any) -> Any:
        windows.append(options["window"])
        return attention(*args, **options)

    monkeypatch.setattr(integration, "attention", recorded)
    for mask in (causal.triu(-2), image, causal[..., 7:, :]):
        query = x[0][:, :, -mask.shape[2] :]
        inputs = nn.Module(), query, x[1], x[2], mask
        y, _ = integration.attention_forward(*inputs, sliding_window=3)
        expected = F.scaled_dot_product_attention(query, x[1], x[2], mask)
        torch.testing.assert_close(y, expected.transpose(1, 2))
    assert windows == [3, None, None]


def test_a_window_is_used_only_if_the_mask_allows_no_key_outside_of_it() -> None:
    length = 7
    for window in range(1, length + 3):
        for query in range(length):
            for key in range(length):
                mask = torch.zeros(2, 1, length, length).bool()
                mask[1, 0, query, key] = True
                seen = integration.window_of(mask, window)
                inside = 0 <= query - key < window
                assert (seen is not None) == inside, (window, query, key)
    assert integration.window_of(torch.ones(2, 1, 1, 1).bool(), 3) == 1


MASKS = {
    "all earlier tokens": torch.ones(7, 7).bool().tril(),
    "every second diagonal": (torch.arange(7).unsqueeze(1) - torch.arange(7)) % 2 == 0,
}


@pytest.mark.parametrize("kind", MASKS)
@torch.no_grad()
def test_a_mask_wider_than_the_window_of_the_model_is_followed(
    kind: str, calls: list[tuple[Any, ...]]
) -> None:
    model = models.build("MistralForCausalLM")
    mask = MASKS[kind].expand(3, 1, 7, 7)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float).min)
    expected = model(PROMPTS, attention_mask=additive).logits
    model.set_attn_implementation("headnotes")
    logits = model(PROMPTS, attention_mask=mask).logits
    assert calls
    assert (logits - expected).norm() <= 1e-5 * expected.norm()


def test_weights_of_a_prompt_have_a_column_for_each_slot_of_a_static_cache() -> None:
    query, key, value = torch.randn(2, 6, 5, 8), *torch.randn(2, 2, 3, 11, 8)
    options: dict[str, Any] = {"attention_mask": None, "is_causal": True}
    y, weights = integration.attention_forward(
        nn.Module(), query, key, value, **options, output_attentions=True
    )
    assert weights is not None
    assert weights.shape == (2, 6, 5, 11)
    assert not weights[..., 5:].any()
    full = value.repeat_interleave(2, dim=1)
    assert torch.allclose((weights @ full).transpose(1, 2), y, atol=1e-6)


QUERY, MASK = torch.randn(2, 6, 5, 8), torch.ones(2, 1, 5, 5).bool()


@pytest.mark.parametrize(
    ("mask", "others", "error", "message"),
    [
        (MASK.float(), {}, TypeError, r"is torch.float32, not bool; compare"),
        (MASK.long(), {}, TypeError, r"is torch.int64, not bool; compare"),
        (
            MASK.expand(2, 6, 5, 5),
            {},
            ValueError,
            r"shape \[2, 6, 5, 5\], not .*\[2, 1",
        ),
        (None, {"cache": "paged"}, ValueError, '"headnotes" does not support `cache`;'),
        (None, {"head_mask": MASK}, ValueError, "does not support `head_mask`; use"),
    ],
)
def test_what_it_cannot_do_is_refused(
    mask: Tensor, others: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        integration.attention_forward(nn.Module(), QUERY, QUERY, QUERY, mask, **others)
