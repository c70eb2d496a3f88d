"""Options: what is said is understood, or answered with what can be said."""

import argparse
from typing import Any

import pytest
import torch

from attention_bench.decoding import DECODERS
from attention_bench.options import (
    CannotBeAskedError,
    add_arguments,
    everyone_named,
    read_options,
)
from attention_bench.suites import QUESTIONS, QUICK, Question


def read(*words: str) -> tuple[dict[str, Question], torch.device, torch.dtype]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_options(parser.parse_args(words))


def test_without_a_word_everything_is_asked() -> None:
    questions, device, dtype = read()
    assert questions == QUESTIONS
    assert (device, dtype) == (torch.device("cpu"), torch.float32)
    assert read("--quick")[0] == QUICK


def test_options_change_the_questions_that_they_speak_of() -> None:
    questions, _, dtype = read(
        *("training", "inference", "--sizes", "2x64", "--masks", "causal"),
        *("--dropout", "0.3", "--only", "nn,core", "--seconds", "0.5"),
        *("--dtype", "bfloat16"),
    )
    assert list(questions) == ["training", "inference"]
    for question in questions.values():
        assert question.sizes == ((2, 64),)
        assert question.masks == ("causal",)
        assert question.contestants == ("nn", "core")
        assert question.seconds == 0.5
    assert questions["training"].dropouts == (0.3,)
    assert questions["inference"].dropouts == (0.0,)
    assert dtype == torch.bfloat16


def test_decoders_and_memory_know_no_masks() -> None:
    questions, _, _ = read("decode", "memory", "--masks", "causal", "--only", "bmm,nn")
    assert questions["decode"].masks == questions["memory"].masks == ("none",)
    assert questions["decode"].contestants == ("bmm", "nn")
    assert questions["memory"].contestants == ("nn",)


def test_compile_adds_each_once_more() -> None:
    questions, _, _ = read("inference", "decode", "--compile", "--only", "nn,sdpa")
    names = ("nn", "sdpa", "nn+compile", "sdpa+compile", "flex")
    assert questions["inference"].contestants == names
    assert questions["decode"].contestants == ("nn", "sdpa")
    assert "flex" not in read("inference")[0]["inference"].contestants


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["speed"], f"`speed` is no question; there are {', '.join(QUESTIONS)}"),
        (
            ["--dtype", "float"],
            "`--dtype float` is no dtype; there are float32, float64, bfloat16, "
            "float16",
        ),
        (["--threads", "-1"], "`--threads -1` is below 1"),
        (["--device", "gpu"], "`--device gpu` is no device of torch"),
        (["--device", "meta"], "`--device meta` is neither a CPU nor CUDA"),
        (
            ["--device", "cuda:99"],
            "`--device cuda:99` is not there; torch sees "
            f"{torch.cuda.device_count()} CUDA devices",
        ),
        (
            ["--only", "core,mine"],
            "`--only mine` is no contestant; there are " + ", ".join(everyone_named()),
        ),
        (
            ["--masks", "window"],
            "`--masks window` is no mask; there are none, causal, padding",
        ),
        (
            ["--sizes", "4x512,8"],
            "`--sizes 4x512,8` cannot be read; write batch sizes and lengths, as in "
            "4x512,2x1024",
        ),
        (
            ["--sizes", "0x512"],
            "`--sizes 0x512` cannot be read; write batch sizes and lengths, as in "
            "4x512,2x1024",
        ),
        (
            ["--dropout", "0,1"],
            "`--dropout 0,1` cannot be read; write chances from 0 to below 1, as in "
            "0,0.1",
        ),
        (
            ["--dropout", "some"],
            "`--dropout some` cannot be read; write chances from 0 to below 1, as in "
            "0,0.1",
        ),
        (["--seconds", "-2"], "`--seconds -2.0` is below 0"),
        (["--seconds", "nan"], "`--seconds nan` is below 0"),
        (
            ["--json", "no/such/file.json"],
            "`--json no/such/file.json`: `no/such` is no folder",
        ),
        (
            ["decode", "--only", "core"],
            "`--only core` leaves nobody for `decode`; there are "
            + ", ".join(DECODERS),
        ),
    ],
)
def test_what_cannot_be_asked_is_said(words: list[str], message: str) -> None:
    with pytest.raises(CannotBeAskedError) as raised:
        read(*words)
    assert str(raised.value) == message


def test_a_file_is_no_folder(tmp_path: Any) -> None:
    path = tmp_path / "results"
    path.touch()
    message = f"`--results {path}` is a file, not a folder"
    with pytest.raises(CannotBeAskedError) as raised:
        read("--results", str(path))
    assert str(raised.value) == message
