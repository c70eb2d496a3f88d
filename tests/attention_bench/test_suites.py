"""The questions: who is asked what."""

import pytest

from attention_bench.decoding import DECODERS
from attention_bench.equal import everyone
from attention_bench.setting import Setting
from attention_bench.suites import (
    LONGEST,
    LONGEST_TRAINING,
    QUESTIONS,
    QUICK,
    may_be_asked,
)


def test_each_question_has_a_short_form() -> None:
    assert list(QUICK) == list(QUESTIONS)
    for name, question in QUESTIONS.items():
        short = QUICK[name]
        assert set(short.contestants) <= set(question.contestants)
        assert short.seconds <= 1
        assert len(short.settings()) < len(question.settings())
        assert short.modes == question.modes


@pytest.mark.parametrize("name", QUESTIONS)
def test_everyone_who_is_asked_is_known(name: str) -> None:
    question = QUESTIONS[name]
    known = set(DECODERS) if name == "decode" else set(everyone())
    assert set(question.contestants) <= known
    assert question.baseline in question.contestants
    assert "fast" in question.contestants


def test_the_tables_are_those_that_were_promised() -> None:
    sizes = {(32, 10), (30, 50), (8, 128), (4, 512), (2, 1024), (1, 2048), (1, 4096)}
    for name in ("inference", "training"):
        settings = [s for s in QUESTIONS[name].settings() if not s.dropout]
        assert {(s.batch_size, s.seq_len) for s in settings} == sizes
        assert len(settings) == 3 * len(sizes)
        assert {(s.d_model, s.heads) for s in settings} == {(512, 8)}
    dropped = [s for s in QUESTIONS["training"].settings() if s.dropout]
    for size in ((8, 128), (4, 512), (2, 1024), (1, 2048)):
        for mask in ("none", "causal"):
            assert [
                s for s in dropped if (s.batch_size, s.seq_len, s.mask) == (*size, mask)
            ]
    assert all(s.training for s in QUESTIONS["training"].settings())
    assert all(s.decoding for s in QUESTIONS["decode"].settings())


def test_decoders_and_modules_are_told_apart() -> None:
    (tiny,) = QUICK["tiny"].settings()
    assert (tiny.d_model, tiny.seq_len, tiny.batch_size) == (64, 12, 1)
    assert QUESTIONS["tiny"].threads == 1


def test_nobody_waits_for_the_slowest() -> None:
    for name in {**LONGEST, **LONGEST_TRAINING}:
        assert name in everyone()
    assert may_be_asked("core", Setting(1, 4096))
    assert not may_be_asked("core+compile", Setting(1, 8192))
    assert not may_be_asked("nn-weights", Setting(1, 4096, training=True))
    assert may_be_asked("nn", Setting(1, 8192, training=True))
