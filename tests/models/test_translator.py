"""The translator computes what a Transformer computes, with and without the cache."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from attention_laws import check
from headnotes import convert, fast
from headnotes.models.heads import attentions
from headnotes.models.translator import END, PAD, START, Translator
from headnotes.variants.rotary import rotary_frequencies

SOURCE_LENS = torch.tensor([7, 5, 1])


pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> Translator:
    return Translator(vocab_size=11, d_model=12, heads=2, d_ff=17).eval()


@pytest.fixture
def source() -> Tensor:
    return torch.randint(4, 11, (7, 3))


def target_of(length: int) -> Tensor:
    return torch.cat([torch.full((1, 3), START), torch.randint(4, 11, (length - 1, 3))])


def test_it_computes_what_pytorchs_transformer_computes(
    model: Translator, source: Tensor
) -> None:
    with pytest.warns(UserWarning, match="nested_tensor"):
        theirs = nn.Transformer(12, 2, 2, 2, 17, norm_first=True).eval()
    for mine, layer in zip(model.encoder, theirs.encoder.layers, strict=True):
        layer.self_attn = convert.to(mine.attention, "torch")
        layer.linear1, _, layer.linear2 = mine.feed_forward
    for mine, layer in zip(model.decoder, theirs.decoder.layers, strict=True):
        layer.self_attn = convert.to(mine.self_attention, "torch")
        layer.multihead_attn = convert.to(mine.cross_attention, "torch")
        layer.linear1, _, layer.linear2 = mine.feed_forward
    target = target_of(5)
    padding = torch.arange(7) >= SOURCE_LENS.unsqueeze(1)
    x, y = (model.positions(model.embeddings(t)) for t in (source, target))
    states = theirs(
        x,
        y,
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(5),
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    expected = states @ model.embeddings.table.weight.T
    torch.testing.assert_close(model(source, target, SOURCE_LENS), expected)


def test_padding_of_the_source_changes_nothing(
    model: Translator, source: Tensor
) -> None:
    target = target_of(5)
    logits = model(source, target, SOURCE_LENS)
    padded = torch.cat([source, torch.full((4, 3), PAD)])
    padded[5:, 1] = 9
    torch.testing.assert_close(model(padded, target, SOURCE_LENS), logits)


def test_future_target_tokens_cannot_leak(model: Translator, source: Tensor) -> None:
    target = target_of(5)
    logits = model(source, target, SOURCE_LENS)
    target[3:] = 4 + (target[3:] - 3) % 7
    changed = model(source, target, SOURCE_LENS)
    torch.testing.assert_close(changed[:3], logits[:3])
    assert not torch.allclose(changed[3:], logits[3:])


def rotary_and_grouped(heads: int, d_model: int, dropout_prob: float) -> nn.Module:
    rotary = fast.Rotary(rotary_frequencies(d_model // heads))
    return fast.MultiHeadAttention(
        heads, d_model, dropout_prob, kv_heads=1, rotary=rotary
    )


@pytest.mark.slow
@pytest.mark.parametrize("causal_attention", [None, rotary_and_grouped])
def test_decoding_with_the_cache_is_decoding_without_it(
    causal_attention: object, source: Tensor
) -> None:
    make = partial(Translator, 11, 12, 2, d_ff=17)
    model = make(causal_attention=causal_attention).eval()
    # So that tokens differ, and some targets end.
    model.embeddings.table.weight.mul_(9)
    memory, mask = model.encode(source, SOURCE_LENS)
    caches = [layer.cache(memory, 5) for layer in model.decoder]
    target = target_of(5)
    steps = [model.decode_next(tokens[None], caches, mask) for tokens in target]
    torch.testing.assert_close(torch.cat(steps), model.decode(target, memory, mask))
    tokens = model.greedy(source, SOURCE_LENS, 13)
    assert tokens.equal(model.greedy(source, SOURCE_LENS, 13, use_cache=False))


def test_a_target_that_ended_is_continued_by_padding(source: Tensor) -> None:
    model = Translator(vocab_size=11, d_model=12, heads=2, d_ff=17).eval()
    steps = iter([[9, END, 9], [END, 8, 8], [8, 8, END]])

    def decode_next(*_: object) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor([next(steps)]), 11).float()

    model.decode_next = decode_next  # type: ignore[method-assign]
    tokens = model.greedy(source, SOURCE_LENS, 7)
    assert tokens.T.tolist() == [[9, END, PAD], [END, PAD, PAD], [9, 8, END]]


def test_beam_search_with_all_beams_finds_the_most_probable_target() -> None:
    # Seven tokens and three steps: few enough to try all targets.
    model = Translator(vocab_size=7, d_model=12, heads=2, d_ff=17).eval()
    model.embeddings.table.weight.mul_(3)
    source, length = torch.tensor([[4], [5], [6]]), torch.tensor([3])
    targets = torch.tensor([*product(range(7), repeat=3)]).T
    inputs = torch.cat([torch.full_like(targets[:1], START), targets[:-1]])
    count = targets.shape[1]
    logits = model(source.expand(-1, count), inputs, length.expand(count))
    scores = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    best = (-torch.inf, ())
    for tokens, steps in zip(targets.T.tolist(), scores.T.tolist(), strict=True):
        ended = tokens.index(END) + 1 if END in tokens else 3
        if not any(tokens[ended:]):
            best = max(best, (sum(steps[:ended]), tuple(tokens)))
    found, score = model.beam_search(source, length, 3, beams=49)
    found = torch.cat([found[:, 0], torch.zeros(3 - len(found), dtype=torch.long)])
    assert tuple(found.tolist()) == best[1]
    assert float(score) == pytest.approx(best[0], abs=1e-5)


@pytest.mark.slow
def test_its_three_attentions_obey_the_laws(model: Translator) -> None:
    # Where they stand in the model: each with the weights that it has there.
    laws = ["formula", "causality", "nonfinite_padding", "fully_masked_rows"]
    for name in ("encoder.1", "decoder.1.self", "decoder.1.cross"):
        with torch.enable_grad():
            report = check(attentions(model)[name], only=laws)
        assert [result.status for result in report.results] == ["pass"] * 4, report
