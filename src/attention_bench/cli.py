r"""# headnotes bench

```console
$ headnotes bench --quick
$ headnotes bench inference training --dtype bfloat16 --device cuda
$ headnotes bench inference --sizes 4x512 --only fast,nn,sdpa --compile
```

Without a name all [questions](suites.md) are asked. What is printed is a table a
cell, the fastest first: the median of its turns, half the distance of their quartiles
as its spread, and how many times as fast as the baseline it was. Differences within 2 %
are ties. `--json` keeps all of it, `--results` one file a question, in the form that
the [page of benchmarks](../../compare/benchmarks.md) reads.

The exit status is 0 where the questions were answered, even if somebody was left out of
one; 2 where they could not be asked at all; and 130 where you had no patience, in which
case what was finished is there, and nothing is there by half.

Source: [a fair contest](timing.md), from the command line.
"""

import argparse
import sys
import time
import warnings

import torch

from attention_bench.machine import ceilings, describe, slug
from attention_bench.options import CannotBeAskedError, add_arguments, read_options
from attention_bench.progress import Progress
from attention_bench.record import Run, as_json, table, write
from attention_bench.run import ask, exponents, rate
from attention_bench.suites import Question

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Ask what the arguments say, print the tables, and return the exit status."""
    progress = Progress()
    before = torch.get_num_threads()
    try:
        questions, device, dtype = read_options(arguments)
        torch.set_num_threads(arguments.threads or before)
        runs = []
        with warnings.catch_warnings():
            # Of other people's modules, which nobody here can mend.
            warnings.simplefilter("ignore")
            for name, question in questions.items():
                settings = question.settings(device=device, dtype=dtype)
                progress.begin(name, settings, question.seconds)
                made = answer(name, question, device, dtype, progress)
                made.command = said(arguments, name)
                runs.append(made)
                progress.clear()
                print(*table(made), "", sep="\n", flush=True)
                if arguments.results:
                    write(arguments.results / file_name(made), as_json(made))
        if arguments.json:
            texts = [as_json(made).rstrip() for made in runs]
            write(arguments.json, "[" + ",\n".join(texts) + "]\n")
    except (CannotBeAskedError, OSError) as error:
        progress.clear()
        print(f"headnotes bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.clear()
        print("headnotes bench: interrupted", file=sys.stderr)
        return 130
    finally:
        torch.set_num_threads(before)
    return 0


def answer(
    name: str,
    question: Question,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> Run:
    """One question, from the machine to the exponents."""
    start = time.perf_counter()
    made = Run(name, "", question.baseline, dtype_name(dtype), describe(device))
    if question.threads:
        made.machine["threads"] = question.threads
    # What one thread cannot reach, and memory is not held against, is not measured.
    rated = question.amount == "time" and not question.threads
    settings = question.settings(device=device, dtype=dtype)
    before = ceilings(device, dtype) if rated else {}
    made.cells = ask(question, settings, progress)
    # A neighbour may have been busy at one time, and gone at the other.
    after = ceilings(device, dtype) if rated else {}
    made.machine |= {key: max(before[key], after[key]) for key in before}
    for cell in made.cells:
        if rated:
            rate(cell, made.machine)
    if name in ("growth", "memory"):
        made.exponents = exponents(made.cells)
    made.seconds = time.perf_counter() - start
    return made


def dtype_name(dtype: torch.dtype) -> str:
    """Its name without the dot."""
    return str(dtype).removeprefix("torch.")


def file_name(made: Run) -> str:
    r"""Where a run is kept: by its question, its machine, and what was unusual.

    >>> file_name(Run("tiny", "", "nn", "bfloat16", {"device": "A CPU (1)"}))
    'tiny-a-cpu-1-bfloat16.json'
    """
    parts = [made.question, slug(made.machine["device"])]
    parts += [made.dtype] * (made.dtype != "float32")
    parts += ["compiled"] * ("--compile" in made.command)
    return "-".join(parts) + ".json"


def said(arguments: argparse.Namespace, name: str) -> str:
    """The command that asks this question again."""
    words = ["headnotes bench", name]
    for option in ("quick", "compile"):
        words += [f"--{option}"] * getattr(arguments, option)
    for option, default in (("device", "cpu"), ("dtype", "float32"), ("threads", 0)):
        value = getattr(arguments, option)
        words += [f"--{option} {value}"] * (value != default)
    for option in ("only", "sizes", "masks", "dropout", "seconds"):
        value = getattr(arguments, option)
        words += [f"--{option} {value}"] * (value not in ("", None))
    return " ".join(words)
