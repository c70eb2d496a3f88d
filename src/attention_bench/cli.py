r"""# The `headnotes bench` command

```console
$ headnotes bench --quick
$ headnotes bench inference training --dtype bfloat16 --device cuda
$ headnotes bench inference --sizes 4x512 --only fast,nn,sdpa --compile
$ headnotes bench --results benchmarks/results
```

The command measures time and memory of implementations of multi-head attention. Without
a name, it runs all [suites](suites.md). It prints a table for each setting, the fastest
implementation first: the median time, half the interquartile range as its spread, and
the speedup relative to the baseline. Differences within 2 % are ties. `--json` writes
all records to one file; `--results` writes one file for each suite, from which the
[page of benchmarks](../../compare/benchmarks.md) is made.

The exit status is 0 if the suites ran, even if implementations were skipped; 2 for an
invalid option; 130 if interrupted. Suites that were finished before an interruption
have been written completely.

Where other processes disturb the measurement, the times are printed with the signs of
it, but nothing is concluded: no speedups, no shares of peak rates, no exponents, and
`--results` writes no file. Signs are a high load average at the start, peak rates that
differ before and after the suite, and a longer sequence that takes less time.

Source: the method is described in [Timing implementations side by side](timing.md).
"""

import argparse
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attention_bench.decoders import COMPARISONS
from attention_bench.decoding import DECODERS
from attention_bench.implementations import (
    ALL_IMPLEMENTATIONS,
    COMPILED,
    COMPILED_IMPLEMENTATIONS,
    IMPLEMENTATIONS,
)
from attention_bench.report import (
    Record,
    as_json,
    describe_machine,
    load_average,
    peak_rates,
    slug,
    table_lines,
    write,
)
from attention_bench.run import (
    add_roofline,
    find_disturbances,
    growth_exponents,
    run_suite,
    without_conclusions,
)
from attention_bench.setting import DTYPES, MASKS, Setting, dtype_name
from attention_bench.suites import QUICK_SUITES, SUITES, Sizes, Suite

# The names that `--only` accepts. Some are both an implementation and a decoder; those
# of the suite `decoders` are comparisons.
SELECTABLE = tuple(dict.fromkeys([*IMPLEMENTATIONS, *DECODERS, *COMPARISONS]))

# An estimate of the FLOP/s that slow implementations reach on a small machine.
SLOW_FLOPS_PER_SECOND = 2e9

# The width of the progress bar's line: that of a usual terminal, minus one column.
LINE_WIDTH = 79


class OptionError(ValueError):
    """An invalid option of the command line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `headnotes bench`; each has a default."""
    add = parser.add_argument
    add(
        "suites",
        nargs="*",
        metavar="SUITE",
        help=f"suites to run: {', '.join(SUITES)}; all by default",
    )
    add("--quick", action="store_true", help="fewer settings, and less time for each")
    add("--device", default="cpu", help="device: cpu (default), cuda, cuda:1, …")
    add("--dtype", default="float32", help=f"dtype: {', '.join(DTYPES)}")
    add(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="number of CPU threads; PyTorch's by default",
    )
    add(
        "--only",
        default="",
        metavar="A,B",
        help=f"implementations to measure: {', '.join(SELECTABLE)}",
    )
    add(
        "--sizes",
        default="",
        metavar="4x512,…",
        help="batch sizes and sequence lengths to measure",
    )
    add("--masks", default="", metavar="A,B", help=f"masks: {', '.join(MASKS)}")
    add(
        "--dropout", default="", metavar="P,P", help="dropout probabilities in training"
    )
    add(
        "--seconds",
        type=float,
        metavar="S",
        help="time budget of a setting, shared by its implementations",
    )
    add(
        "--compile",
        action="store_true",
        help="also measure each implementation with torch.compile",
    )
    add("--json", type=Path, metavar="FILE", help="write all records to one file")
    add("--results", type=Path, metavar="FOLDER", help="write one file for each suite")


def run(arguments: argparse.Namespace) -> int:
    """Run the suites, print their tables, and return the exit status."""
    progress = ProgressBar()
    load = load_average()  # later it would include that of the benchmark itself
    threads_before = torch.get_num_threads()
    try:
        suites, device, dtype = parse_options(arguments)
        torch.set_num_threads(arguments.threads or threads_before)
        records = []
        with warnings.catch_warnings():
            # Other packages warn about deprecations in their own modules.
            warnings.simplefilter("ignore")
            for name, suite in suites.items():
                settings = suite.settings(device=device, dtype=dtype)
                progress.begin(name, settings, suite.seconds)
                record = measure(name, suite, settings, progress, load)
                record.command = command_line(arguments, name)
                records.append(record)
                progress.clear()
                print(*table_lines(record), "", sep="\n", flush=True)
                if arguments.results and not record.disturbances:
                    write(arguments.results / file_name(record), as_json(record))
        if arguments.json:
            texts = [as_json(record).rstrip() for record in records]
            write(arguments.json, "[" + ",\n".join(texts) + "]\n")
    except (OptionError, OSError) as error:
        progress.clear()
        print(f"headnotes bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.clear()
        print("headnotes bench: interrupted", file=sys.stderr)
        return 130
    finally:
        torch.set_num_threads(threads_before)
    return 0


def measure(
    name: str,
    suite: Suite,
    settings: Sequence[Setting],
    progress: "ProgressBar",
    load: float,
) -> Record:
    """Run one suite between two measurements of the machine's peak rates.

    `load` is the load average of other processes.
    """
    start = time.perf_counter()
    device, dtype = settings[0].device, settings[0].dtype
    machine = describe_machine(device)
    if suite.threads:
        machine["threads"] = suite.threads
    record = Record(name, "", suite.baseline, dtype_name(dtype), machine)
    # Peak rates are those of all threads, and bound time, not memory.
    has_roofline = suite.metric == "time" and not suite.threads
    before = peak_rates(device, dtype) if has_roofline else {}
    record.cells = run_suite(suite, settings, progress)
    # Other processes may have slowed down one of the two measurements.
    after = peak_rates(device, dtype) if has_roofline else {}
    record.machine |= {key: max(before[key], after[key]) for key in before}
    if has_roofline:
        for cell in record.cells:
            add_roofline(cell, record.machine)
    if name in ("growth", "memory"):
        record.exponents = growth_exponents(record.cells)
    record.seconds = time.perf_counter() - start
    if suite.metric != "memory":
        # A GPU does not share the cores of the CPU.
        load = load if device.type == "cpu" else 0.0
        record.disturbances = find_disturbances(record, load, before, after)
    return without_conclusions(record) if record.disturbances else record


def file_name(record: Record) -> str:
    r"""The file of a record: suite, machine, and what differs from the default.

    >>> file_name(Record("tiny", "", "nn", "bfloat16", {"device": "A CPU (1)"}))
    'tiny-a-cpu-1-bfloat16.json'
    """
    parts = [record.suite, slug(record.machine["device"])]
    if record.dtype != "float32":
        parts.append(record.dtype)
    if "--compile" in record.command:
        parts.append("compiled")
    return "-".join(parts) + ".json"


def command_line(arguments: argparse.Namespace, name: str) -> str:
    """The command that repeats this suite, without the paths of its results."""
    words = ["headnotes bench", name]
    for option in ("quick", "compile"):
        if getattr(arguments, option):
            words.append(f"--{option}")
    for option, default in (("device", "cpu"), ("dtype", "float32"), ("threads", 0)):
        value = getattr(arguments, option)
        if value != default:
            words.append(f"--{option} {value}")
    for option in ("only", "sizes", "masks", "dropout", "seconds"):
        value = getattr(arguments, option)
        if value not in ("", None):
            words.append(f"--{option} {value}")
    return " ".join(words)


def parse_options(
    arguments: argparse.Namespace,
) -> tuple[dict[str, Suite], torch.device, torch.dtype]:
    """The suites to run, the device and the dtype; raises `OptionError`.

    All options are checked before anything is built or timed.
    """
    known = QUICK_SUITES if arguments.quick else SUITES
    names = dict.fromkeys(arguments.suites or known)
    for name in names:
        if name not in known:
            raise unknown_name("", name, "suite", known)
    if arguments.dtype not in DTYPES:
        raise unknown_name("--dtype ", arguments.dtype, "dtype", DTYPES)
    if arguments.threads < 0:
        raise OptionError(f"`--threads {arguments.threads}` must be at least 1")
    check_output_paths(arguments)
    changes = parse_changes(arguments)
    suites = {name: with_options(known[name], changes, arguments) for name in names}
    if not arguments.suites:  # `--only` may select nothing of some of them
        chosen = {
            name: suite for name, suite in suites.items() if suite.implementations
        }
        suites = chosen or suites
    for name, suite in suites.items():
        if not suite.implementations:
            available = available_in(suite)
            raise OptionError(
                f"`--only {arguments.only}` leaves no implementation for `{name}`; "
                f"there are {', '.join(available)}"
            )
        if not suite.settings():
            raise OptionError(
                f"`{name}` has no such setting: with dropout, it has neither padding "
                f"masks nor lengths above 2,048"
            )
    return suites, parse_device(arguments.device), DTYPES[arguments.dtype]


def available_in(suite: Suite) -> Iterable[str]:
    """The names of all implementations that a suite can measure."""
    if suite.metric == "comparison":
        return COMPARISONS
    return DECODERS if "decoding" in suite.modes else ALL_IMPLEMENTATIONS


def check_output_paths(arguments: argparse.Namespace) -> None:
    """Raise `OptionError` before the run if results could not be written after it."""
    json, results = arguments.json, arguments.results
    if json and not json.parent.is_dir():
        raise OptionError(f"`--json {json}`: there is no folder `{json.parent}`")
    if results and results.is_file():
        raise OptionError(f"`--results {results}` is a file, not a folder")


def unknown_name(
    option: str, value: str, kind: str, known: Iterable[str]
) -> OptionError:
    """The error for an unknown name, with the known ones."""
    return OptionError(
        f"`{option}{value}`: unknown {kind}; there are {', '.join(known)}"
    )


def parse_device(name: str) -> torch.device:
    """A device that exists on this machine."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(f"`--device {name}` is not a device of PyTorch") from None
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"`--device {name}` must be a CPU or a CUDA device")
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= count:
        raise OptionError(
            f"`--device {name}` does not exist; PyTorch sees {count} CUDA devices"
        )
    return device


def parse_changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of the suites that the options change."""
    changes: dict[str, Any] = {}
    if arguments.only:
        changes["implementations"] = parse_names(
            "--only", arguments.only, "implementation", SELECTABLE
        )
    if arguments.masks:
        changes["masks"] = parse_names("--masks", arguments.masks, "mask", MASKS)
    if arguments.sizes:
        changes["sizes"] = parse_sizes(arguments.sizes)
    if arguments.dropout:
        changes["dropouts"] = parse_dropouts(arguments.dropout)
    if arguments.seconds is not None:
        # Written so that NaN is refused as well.
        if not arguments.seconds >= 0:
            raise OptionError(f"`--seconds {arguments.seconds}` must be at least 0")
        changes["seconds"] = arguments.seconds
    return changes


def with_options(
    suite: Suite, changes: dict[str, Any], arguments: argparse.Namespace
) -> Suite:
    """A suite with those changes that apply to it."""
    changes = {**changes}
    is_decoding = "decoding" in suite.modes
    if is_decoding or suite.metric == "memory":
        changes.pop("masks", None)
    if suite.metric == "comparison":
        changes.pop("sizes", None)
    if suite.modes != ("training",):
        changes.pop("dropouts", None)
    known = available_in(suite)
    wanted = changes.pop("implementations", suite.implementations)
    names = [name for name in wanted if name in known]
    if arguments.compile and not is_decoding:
        compiled = [name + COMPILED for name in names]
        names += [name for name in compiled if name in COMPILED_IMPLEMENTATIONS]
        if "flex" not in names:
            names.append("flex")
    return replace(suite, implementations=tuple(names), **changes)


def parse_names(
    option: str, text: str, kind: str, known: Iterable[str]
) -> tuple[str, ...]:
    r"""Known names, separated by commas.

    >>> parse_names("--masks", "none, causal", "mask", MASKS)
    ('none', 'causal')
    """
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in known:
            raise unknown_name(f"{option} ", name, kind, known)
    return names


def parse_sizes(text: str) -> Sizes:
    r"""Batch sizes and lengths.

    >>> parse_sizes("4x512, 2x1024")
    ((4, 512), (2, 1024))
    """
    sizes = []
    for part in text.split(","):
        batch_size, _, seq_len = part.strip().partition("x")
        are_integers = batch_size.isdecimal() and seq_len.isdecimal()
        if not are_integers or int(batch_size) == 0 or int(seq_len) == 0:
            raise OptionError(
                f"`--sizes {text}` must be batch sizes and lengths, as in 4x512,2x1024"
            )
        sizes.append((int(batch_size), int(seq_len)))
    return tuple(sizes)


def parse_dropouts(text: str) -> tuple[float, ...]:
    r"""Dropout probabilities.

    >>> parse_dropouts("0,0.1")
    (0.0, 0.1)
    """
    try:
        probabilities = tuple(float(part) for part in text.split(","))
    except ValueError:
        probabilities = (-1.0,)
    if not all(0 <= probability < 1 for probability in probabilities):
        raise OptionError(
            f"`--dropout {text}` must be probabilities from 0 to below 1, as in 0,0.1"
        )
    return probabilities


class ProgressBar:
    """The progress and the time left, on standard error if it is a terminal.

    The FLOPs of settings differ a thousandfold, so progress is weighted: a setting
    counts its time budget, and the time by which slow implementations exceed it.
    """

    def __init__(self) -> None:
        self.is_shown = False
        self.begin("", [], 0.0)

    def begin(self, name: str, settings: Sequence[Setting], seconds: float) -> None:
        """Start a suite whose settings have a time budget of `seconds` each."""
        self.name = name
        self.weights = [seconds + s.flops() / SLOW_FLOPS_PER_SECOND for s in settings]
        self.start = time.perf_counter()

    def __call__(self, done: int, current: str) -> None:
        """Show the number of finished settings, and the current one."""
        if not sys.stderr.isatty():
            return
        fraction = sum(self.weights[:done]) / (sum(self.weights) or 1)
        bar = f"{'█' * int(20 * fraction):·<20}"
        line = f"{self.name} {bar} {done}/{len(self.weights)} {current}"
        if done:
            elapsed = time.perf_counter() - self.start
            line += f", {time_left(elapsed * (1 / fraction - 1))}"
        self.clear()
        print(f"\r{line[:LINE_WIDTH]}", end="", file=sys.stderr, flush=True)
        self.is_shown = True

    def clear(self) -> None:
        """Remove the bar from the terminal."""
        if self.is_shown:
            blank = " " * LINE_WIDTH
            print(f"\r{blank}\r", end="", file=sys.stderr, flush=True)
            self.is_shown = False


def time_left(seconds: float) -> str:
    r"""The time left in minutes or seconds.

    >>> time_left(130), time_left(7)
    ('2 min left', '7 s left')
    """
    return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
