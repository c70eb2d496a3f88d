"""Attacks on words, vectors and positions."""

import math
import unicodedata
from typing import Any

import torch
from torch import Tensor

from headnotes import positions
from hostile.attention import awake, call, compare, dense, need, whole
from hostile.dice import FLOATS, Dice
from hostile.outcome import Call
from hostile.registry import attack

# Letters and their relatives, and what is none: signs, blanks, lone surrogates, zero
# width joiners, characters beyond 16 bits, one that has three in lower case.
SIGNS = "aZé" + "e\u0301" + "İß٣’'-–_ \n\t.<>\0\u200d\ud800𝔸ñ中Ⅷ½"
NO_TEXTS = (None, 3, 1.5, b"bytes", ["a"], "one", ("a", 1), [None], {"a"}, [], {})


def text_of(dice: Dice) -> str:
    return "".join(dice.pick(SIGNS) for _ in range(dice.roll(0, 6)))


def right_words(text: str, words: Any) -> None:
    """Words in order, each of letters, with marks only inside, found again as such."""
    assert isinstance(words, list)
    for word in words:
        assert isinstance(word, str)
        assert word
        assert word[0] not in "'-"
        assert word[-1] not in "'-"
        letters = word.replace("'", "").replace("-", "")
        assert letters
        assert all(unicodedata.category(c)[0] in "LMN" for c in letters)
    assert positions.tokenize(" ".join(words)) == words
    kept = [
        c
        for c in unicodedata.normalize("NFC", text.lower())
        if unicodedata.category(c)[0] in "LMN"
    ]
    assert [c for c in "".join(words) if c not in "'-"] == kept


@attack("positions.tokenize")
def tokenize(dice: Dice) -> Call:
    given: dict[str, Any] = {"text": text_of(dice)}

    def judge(result: Any) -> None:
        need(isinstance(given["text"], str), "it is no text")
        right_words(given["text"], result)

    return call(
        dice, positions.tokenize, given, judge, text=lambda _: dice.pick(NO_TEXTS)
    )


def texts_of(dice: Dice) -> list[str]:
    return [text_of(dice) for _ in range(dice.roll(0, 3))]


def are_texts(texts: Any) -> list[str]:
    need(not isinstance(texts, str), "it is one text")
    need(hasattr(texts, "__iter__"), "they are no texts")
    texts = list(texts)
    need(all(isinstance(text, str) for text in texts), "there are no texts in it")
    return texts


@attack("positions.Vocabulary")
def vocabulary(dice: Dice) -> Call:
    given: dict[str, Any] = {"texts": texts_of(dice)}

    def judge(result: Any) -> None:
        texts = are_texts(given["texts"])
        words = sorted({w for text in texts for w in positions.tokenize(text)})
        assert result.words == ["<pad>", "<unk>", *words]
        assert len(result) == len(words) + 2

    spoil = {"texts": lambda _: dice.pick(NO_TEXTS)}
    return call(dice, positions.Vocabulary, given, judge, "text", **spoil)


@attack("positions.Vocabulary.encode")
def encode(dice: Dice) -> Call:
    words = positions.Vocabulary(texts_of(dice))
    given: dict[str, Any] = {"text": text_of(dice)}

    def judge(result: Any) -> None:
        need(isinstance(given["text"], str), "it is no text")
        numbers = [words.numbers.get(w, 1) for w in positions.tokenize(given["text"])]
        assert result.dtype == torch.int64
        assert result.shape == (len(numbers),)
        assert result.tolist() == numbers

    return call(dice, words.encode, given, judge, text=lambda _: dice.pick(NO_TEXTS))


@attack("positions.Vocabulary.encode_batch")
def encode_batch(dice: Dice) -> Call:
    words = positions.Vocabulary(texts_of(dice))
    given: dict[str, Any] = {"texts": texts_of(dice)}
    empty = not given["texts"]

    def judge(result: Any) -> None:
        texts = are_texts(given["texts"])
        need(bool(texts), "there are none")
        tokens, lens = result
        columns = [words.encode(text).tolist() for text in texts]
        assert lens.tolist() == [len(column) for column in columns]
        longest = max(len(column) for column in columns)
        assert tokens.shape == (longest, len(texts))
        padded = [column + [0] * (longest - len(column)) for column in columns]
        assert tokens.T.tolist() == padded

    spoil = {"texts": lambda _: dice.pick(NO_TEXTS)}
    made = call(dice, words.encode_batch, given, judge, "text", **spoil)
    made.tame = made.tame and not empty
    return made


@attack("positions.Vocabulary.decode")
def decode(dice: Dice) -> Call:
    words = positions.Vocabulary(["a b"])
    dtypes = (torch.int64, torch.int32, torch.int8, torch.uint8)
    tokens = dice.ints(0, 3, dice.roll(0, 4)).to(dice.pick(dtypes))
    given: dict[str, Any] = {"tokens": tokens}

    def judge(result: Any) -> None:
        tokens = given["tokens"]
        whole(tokens, tokens)
        need(tokens.dtype != torch.bool and tokens.dim() == 1, "they are no numbers")
        need(not tokens.is_meta, "there are no values")
        numbers = tokens.tolist()
        need(all(0 <= n < 4 for n in numbers), "there is no such word")
        assert result == [("<pad>", "<unk>", "a", "b")[n] for n in numbers]

    return call(dice, words.decode, given, judge)


@attack("positions.Embeddings.forward")
def embeddings(dice: Dice) -> Call:
    size, d_model = dice.roll(1, 4), dice.roll(1, 3)
    module = awake(dice, positions.Embeddings(size, d_model))
    weight = module.table.weight
    shape = [dice.roll(0, 3) for _ in range(dice.roll(0, 3))]
    tokens = dice.ints(0, size - 1, *shape).to(dice.pick((torch.int64, torch.int32)))
    given: dict[str, Any] = {"tokens": tokens}

    def judge(result: Any) -> None:
        tokens = given["tokens"]
        whole(tokens, weight)
        need(tokens.dtype in (torch.int64, torch.int32), "they are no numbers")
        shape = (*tokens.shape, d_model)
        if tokens.is_meta:
            return compare(result, torch.empty(shape, device="meta"), weight)
        flat = tokens.flatten().tolist()
        need(all(0 <= n < size for n in flat), "there is no such row")
        rows = weight.detach().cpu().double()[flat] * math.sqrt(d_model)
        compare(result, rows.reshape(shape), weight)

    def wrong(tokens: Any) -> Any:
        return dice.pick((tokens + 1, tokens - 1, tokens + size, tokens.float(), 1))

    return call(dice, module, given, judge, tokens=wrong)


@attack("positions.PositionalEncoding.forward")
def encoding(dice: Dice) -> Call:
    d_model, longest = dice.roll(1, 4), dice.roll(1, 4)
    made = positions.PositionalEncoding(d_model, 0.0, longest)
    module = made.to(dice.device).train(not dice.chance(2))
    seq_len, batch_size = dice.roll(0, 5), dice.roll(0, 3)
    x = dice.floats(seq_len, batch_size, d_model, dtype=dice.pick(FLOATS))
    given: dict[str, Any] = {"x": x}

    def judge(result: Any) -> None:
        x = given["x"]
        need(isinstance(x, Tensor) and x.dtype in FLOATS, "they are no vectors")
        dense(x, x, 3)
        need(x.device == module.table.device, "devices differ")
        need(x.shape[-1] == d_model, "it has another width")
        need(len(x) <= longest, "it is too long")
        angles = [
            [t / 10000 ** ((c - c % 2) / d_model) for c in range(d_model)]
            for t in range(len(x))
        ]
        table = [
            [math.cos(a) if c % 2 else math.sin(a) for c, a in enumerate(row)]
            for row in angles
        ]
        added = torch.tensor(table, dtype=torch.float64).reshape(len(x), 1, d_model)
        assert result.dtype == x.dtype
        # The table is as exact as the module is, which may be less than `x`.
        coarse = x if x.dtype.itemsize <= 4 else module.table
        compare(result.to(coarse.dtype), x.detach().cpu().double() + added, coarse)

    made_call = call(dice, module, given, judge)
    made_call.tame = made_call.tame and seq_len <= longest
    return made_call


@attack("positions.sinusoids")
def sinusoids(dice: Dice) -> Call:
    given: dict[str, Any] = {"max_length": dice.roll(1, 4), "d_model": dice.roll(1, 4)}

    def judge(result: Any) -> None:
        need(all(type(n) is int and n > 0 for n in given.values()), "a size is none")
        assert result.shape == tuple(given.values())
        assert result.dtype == torch.float64
        assert (result.abs() <= 1).all()

    return call(dice, positions.sinusoids, given, judge)
