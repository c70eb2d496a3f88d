r"""# What can be said

Every option of `headnotes bench` has a default, so that nothing has to be said. What is
said is read before anything is built, and what cannot be understood is answered with
what can.

Source: [headnotes bench](cli.md), whose options these are.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attention_bench.decoding import DECODERS
from attention_bench.equal import COMPILED, everyone
from attention_bench.setting import DTYPES, MASKS
from attention_bench.suites import QUESTIONS, QUICK, Question, Sizes


class CannotBeAskedError(ValueError):
    """What was said on the command line makes no question."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be said; everything has a default."""
    add = parser.add_argument
    add("questions", nargs="*", metavar="QUESTION", help=", ".join(QUESTIONS))
    add("--quick", action="store_true", help="all questions in less than a minute")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    add("--dtype", default="float32", help=", ".join(DTYPES))
    add("--threads", type=int, default=0, metavar="N", help="of the CPU; else torch's")
    add("--only", default="", metavar="A,B", help=", ".join(everyone_named()))
    add("--sizes", default="", metavar="4x512,…", help="batch size and length")
    add("--masks", default="", metavar="A,B", help=", ".join(MASKS))
    add("--dropout", default="", metavar="P,P", help="for training steps")
    add(
        "--seconds",
        type=float,
        metavar="S",
        help="that the contestants of a cell share",
    )
    add("--compile", action="store_true", help="each once more, by `torch.compile`")
    add("--json", type=Path, metavar="FILE", help="write all that was found")
    add("--results", type=Path, metavar="FOLDER", help="write a file for each question")


def everyone_named() -> list[str]:
    """The contestants that can be named, without those that `--compile` adds."""
    plain = [name for name in everyone() if COMPILED not in name]
    return [*plain, *(name for name in DECODERS if name not in plain)]


def read_options(
    arguments: argparse.Namespace,
) -> tuple[dict[str, Question], torch.device, torch.dtype]:
    """The questions, where and in which dtype; raises `CannotBeAskedError`."""
    known = QUICK if arguments.quick else QUESTIONS
    names = dict.fromkeys(arguments.questions or known)
    for name in names:
        if name not in known:
            raise unknown("", name, "question", known)
    if arguments.dtype not in DTYPES:
        raise unknown("--dtype ", arguments.dtype, "dtype", DTYPES)
    if arguments.threads < 0:
        raise CannotBeAskedError(f"`--threads {arguments.threads}` is below 1")
    for option in ("json", "results"):
        path: Path | None = getattr(arguments, option)
        if option == "json" and path and not path.parent.is_dir():
            raise CannotBeAskedError(f"`--json {path}`: `{path.parent}` is no folder")
        if option == "results" and path and path.is_file():
            raise CannotBeAskedError(f"`--results {path}` is a file, not a folder")
    changes = read_changes(arguments)
    questions = {name: changed(known[name], changes, arguments) for name in names}
    for name, question in questions.items():
        if not question.contestants:
            there = ", ".join(DECODERS if name == "decode" else everyone_named())
            raise CannotBeAskedError(
                f"`--only {arguments.only}` leaves nobody for `{name}`; there are "
                f"{there}"
            )
    return questions, read_device(arguments.device), DTYPES[arguments.dtype]


def unknown(
    option: str, value: str, what: str, known: Iterable[str]
) -> CannotBeAskedError:
    """What to say of a name that is none."""
    return CannotBeAskedError(
        f"`{option}{value}` is no {what}; there are {', '.join(known)}"
    )


def read_device(name: str) -> torch.device:
    """A device that exists here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise CannotBeAskedError(f"`--device {name}` is no device of torch") from None
    if device.type not in ("cpu", "cuda"):
        raise CannotBeAskedError(f"`--device {name}` is neither a CPU nor CUDA")
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= count:
        raise CannotBeAskedError(
            f"`--device {name}` is not there; torch sees {count} CUDA devices"
        )
    return device


def read_changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the options change in each question."""
    changes: dict[str, Any] = {}
    if arguments.only:
        changes["contestants"] = read_names("only", arguments.only, everyone_named())
    if arguments.masks:
        changes["masks"] = read_names("masks", arguments.masks, MASKS)
    if arguments.sizes:
        changes["sizes"] = read_sizes(arguments.sizes)
    if arguments.dropout:
        changes["dropouts"] = read_dropouts(arguments.dropout)
    if arguments.seconds is not None:
        if not arguments.seconds >= 0:
            raise CannotBeAskedError(f"`--seconds {arguments.seconds}` is below 0")
        changes["seconds"] = arguments.seconds
    return changes


def changed(
    question: Question, changes: dict[str, Any], arguments: argparse.Namespace
) -> Question:
    """A question as the command line wants it."""
    changes = {**changes}
    decoding = "decoding" in question.modes
    if decoding or question.amount == "memory":
        changes.pop("masks", None)
    if question.modes != ("training",):
        changes.pop("dropouts", None)
    known = set(DECODERS) if decoding else set(everyone())
    asked = changes.pop("contestants", question.contestants)
    names = tuple(name for name in asked if name in known)
    if arguments.compile and not decoding:
        names += tuple(f"{name}{COMPILED}" for name in names if name != "flex")
        names += ("flex",) * ("flex" not in names)
    return replace(question, contestants=names, **changes)


def read_names(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    r"""Names, with a comma between, each of which must be known.

    >>> read_names("masks", "none, causal", MASKS)
    ('none', 'causal')
    """
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in known:
            what = {"only": "contestant", "masks": "mask"}[option]
            raise unknown(f"--{option} ", name, what, known)
    return names


def read_sizes(text: str) -> Sizes:
    r"""Batch sizes and lengths.

    >>> read_sizes("4x512, 2x1024")
    ((4, 512), (2, 1024))
    """
    parts = [part.strip().partition("x") for part in text.split(",")]
    if not all(
        a.isdecimal() and b.isdecimal() and int(a) * int(b) for a, _, b in parts
    ):
        raise CannotBeAskedError(
            f"`--sizes {text}` cannot be read; write batch sizes and lengths, as in "
            f"4x512,2x1024"
        )
    return tuple((int(batch_size), int(seq_len)) for batch_size, _, seq_len in parts)


def read_dropouts(text: str) -> tuple[float, ...]:
    r"""Chances of dropout.

    >>> read_dropouts("0,0.1")
    (0.0, 0.1)
    """
    try:
        chances = tuple(float(part) for part in text.split(","))
    except ValueError:
        chances = (-1.0,)
    if not all(0 <= chance < 1 for chance in chances):
        raise CannotBeAskedError(
            f"`--dropout {text}` cannot be read; write chances from 0 to below 1, as "
            f"in 0,0.1"
        )
    return chances
