"""Suites: which implementations run in which settings."""

import pytest

from attention_bench.decoding import DECODERS
from attention_bench.implementations import ALL_IMPLEMENTATIONS
from attention_bench.setting import Setting
from attention_bench.suites import (
    MAX_SEQ_LEN,
    MAX_SEQ_LEN_TRAINING,
    QUICK_SUITES,
    SUITES,
    is_within_max_seq_len,
)


def test_each_suite_has_a_quick_form() -> None:
    assert list(QUICK_SUITES) == list(SUITES)
    for name, suite in SUITES.items():
        quick = QUICK_SUITES[name]
        assert set(quick.implementations) <= set(suite.implementations)
        assert quick.seconds <= 1
        assert len(quick.settings()) < len(suite.settings())
        assert quick.modes == suite.modes


@pytest.mark.parametrize("name", [name for name in SUITES if name != "decoders"])
def test_every_implementation_of_a_suite_exists(name: str) -> None:
    suite = SUITES[name]
    known = set(DECODERS) if name == "decode" else set(ALL_IMPLEMENTATIONS)
    assert set(suite.implementations) <= known
    assert suite.baseline in suite.implementations
    assert "fast" in suite.implementations


def test_inference_and_training_cover_all_sizes_and_masks() -> None:
    sizes = {(32, 10), (30, 50), (8, 128), (4, 512), (2, 1024), (1, 2048), (1, 4096)}
    for name in ("inference", "training"):
        settings = [s for s in SUITES[name].settings() if not s.dropout]
        assert {(s.batch_size, s.seq_len) for s in settings} == sizes
        assert len(settings) == 3 * len(sizes)
        assert {(s.d_model, s.heads) for s in settings} == {(512, 8)}
    with_dropout = [s for s in SUITES["training"].settings() if s.dropout]
    for size in ((8, 128), (4, 512), (2, 1024), (1, 2048)):
        for mask in ("none", "causal"):
            cells = [(s.batch_size, s.seq_len, s.mask) for s in with_dropout]
            assert (*size, mask) in cells
    assert all(s.training for s in SUITES["training"].settings())
    assert all(s.decoding for s in SUITES["decode"].settings())


def test_tiny_settings_run_on_one_thread() -> None:
    (tiny,) = QUICK_SUITES["tiny"].settings()
    assert (tiny.d_model, tiny.seq_len, tiny.batch_size) == (64, 12, 1)
    assert SUITES["tiny"].threads == 1


def test_long_settings_leave_out_implementations_that_hold_all_scores() -> None:
    for name in {**MAX_SEQ_LEN, **MAX_SEQ_LEN_TRAINING}:
        assert name in ALL_IMPLEMENTATIONS
    assert is_within_max_seq_len("core", Setting(1, 4096))
    assert not is_within_max_seq_len("core+compile", Setting(1, 8192))
    assert not is_within_max_seq_len("nn-weights", Setting(1, 4096, training=True))
    assert is_within_max_seq_len("nn", Setting(1, 8192, training=True))
