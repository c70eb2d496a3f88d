r"""# headnotes check

```console
$ headnotes check my_model.py:MyAttention
$ headnotes check my_model.py:MyAttention --init-args "d_model=64, heads=4" --causal
```

The command tests the [laws of attention](../../compare/laws.md) on an implementation
in a file. A module class is instantiated; a module or a function is checked as it is.
What no option gives is inferred, and printed above the table of results.

The exit status is 0 if no law fails and at least one passes, 1 if one fails, and 130
after Ctrl-C, so the command can run in CI. It is 2 if no law fails, but an option is
wrong, an implementation could not be called, each law was skipped, or the checker
itself has a defect; the reason is printed in one line, and the other implementations
are checked even so. `--skip` leaves out a law that is violated on purpose; the table
shows that it was skipped. `--junit report.xml` writes the results for a CI system,
`--github` prints annotations for GitHub Actions, `--quiet` prints nothing unless a law
fails, and `--verbose` prints the program of each failure, not of the first only.
Verdicts are colored on a terminal, unless `NO_COLOR` is set.

`--inside` checks each attention within a model, as it was built:

```console
$ headnotes check my_model.py:build_model --inside
```

So does the command without it, where a model takes token ids or images, which it embeds
before they are attended to, and where no way was found to call a model itself. Each
report says so then. A small model that takes token ids is checked as a whole, too, with
[vectors in their place](embedded.md), and so is a class of models that cut images into
[patches](patches.md). Where a class is called, such as a block with norms around its
attention, and the formula cannot be tested from outside, the attention within it is
checked, too, unless an option says more than how to build the class.

Options may be written into `pyproject.toml`, under the names that `check` has for them.
`headnotes check` then checks all targets that are listed there; flags take precedence.

```toml
[tool.headnotes.check."my_model.py:MyAttention"]
causal = true
init_args = { d_model = 64, heads = 4 }
skip = ["fully_masked_rows"]
```

Each law ends with one of three verdicts. `pass`: it held in all calls. `FAIL`: a
counterexample follows the table. `skip`: it does not apply, for the reason beside it: a
sliding window that is not given, for example, or a name in the code that tells of
another design, such as a gate. `--only` runs a law even so.

Source: [running the laws](checker.md), from the command line.
"""

import argparse
import ast
import json
import math
import os
import re
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import nn

from attention_laws import structure
from attention_laws.adapter import (
    IMAGES,
    LAYOUTS,
    MASK_KINDS,
    POSITIONS,
    CallError,
    Fact,
    ModelError,
    Options,
)
from attention_laws.checker import LAWS, LawResult, Report, check, explain
from attention_laws.embedded import (
    embedding_widths,
    is_large,
    of_vectors,
    with_vectors,
)
from attention_laws.law import did_you_mean, first_line
from attention_laws.names import import_of
from attention_laws.patches import of_patches

# The options of `check` that a table of `pyproject.toml` may set.
SETTINGS = {f.name for f in fields(Options)} | {"only", "skip", "thorough", "inside"}

WHERE_TO_WRITE = 'write options under [tool.headnotes.check."FILE.py:NAME"]'

# Called before each law: how many are done, how many there are, and which one runs.
Progress = Callable[[int, int, str], None]

# Terminal colors of the verdicts.
COLORS = {"pass": "32", "FAIL": "1;31", "skip": "2"}

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each option of `check`, under the same name."""
    add = parser.add_argument
    add(
        "target",
        metavar="FILE.py:NAME",
        nargs="?",
        default="",
        help="module class, module or function to check; or package.module:NAME; "
        "without it, all targets of pyproject.toml",
    )
    add(
        "--inside",
        action="store_true",
        help="check each attention within a model; NAME is the model, or builds it; "
        "inferred for a model that takes token ids or images, or cannot be called",
    )
    add_call_arguments(parser)
    add("--heads", type=int, metavar="N", help="number of query heads")
    add("--kv-heads", type=int, metavar="N", help="number of key and value heads")
    add("--d-model", type=int, metavar="N", help="width of the input")
    add(
        "--causal",
        action=argparse.BooleanOptionalAction,
        help="whether the module is causal without a mask",
    )
    add(
        "--window",
        type=int,
        metavar="N",
        help="keys that a query attends to in a sliding window, its own included",
    )
    add(
        "--positions",
        default="",
        choices=POSITIONS,
        help="positional encoding of the module",
    )
    add(
        "--unused-parameters",
        default="",
        metavar="A,B",
        help="parameters that are meant to receive no gradient",
    )
    add_run_arguments(parser)
    add_output_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the laws, and where and how they run."""
    add = parser.add_argument
    add(
        "--only",
        default="",
        metavar="LAW,LAW",
        help=f"laws to run, instead of all: {', '.join(LAWS)}",
    )
    add("--skip", default="", metavar="LAW,LAW", help="laws to skip")
    add(
        "--thorough",
        action="store_true",
        help="more sizes, and torch.compile with its default backend",
    )
    add("--device", default="cpu", help="device to run on, such as cuda")
    add(
        "--dtype",
        default="float32",
        help=f"dtype of inputs and parameters: {', '.join(DTYPES)}",
    )
    add("--seed", type=int, default=0, help="random seed of inputs and parameters")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the format of the report."""
    add = parser.add_argument
    add("--json", action="store_true", help="print the report as JSON")
    add(
        "--junit", default="", metavar="FILE", help="write the report as JUnit XML, too"
    )
    add(
        "--github",
        action="store_true",
        help="print an annotation of GitHub Actions for each failure",
    )
    add("--quiet", action="store_true", help="print failures only")
    add("--verbose", action="store_true", help="print the program of each failure")


def add_call_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that state how the attention is built and called."""
    add = parser.add_argument
    add(
        "--init-args",
        default="",
        metavar="A=1,B=2",
        help="arguments of the constructor",
    )
    add("--call-args", default="", metavar="A=1,B=2", help="arguments of each call")
    add(
        "--layout",
        default="",
        help=f"axes of the inputs: {', '.join([*LAYOUTS, *IMAGES])}, or letters such "
        "as bld (b batch item, l position, h head, d feature)",
    )
    add(
        "--inputs",
        default="",
        metavar="A,B,C",
        help="name of the one input, or of query, key and value",
    )
    add(
        "--mask",
        action="append",
        default=[],
        metavar="NAME=KIND:AXES",
        help="a mask argument: its kind ("
        + "; ".join(f"{kind}: {meaning}" for kind, meaning in MASK_KINDS.items())
        + "), and letters for its axes, such as bqk (b batch item, h head, q query, k "
        "key, n batch items times heads, 1 an axis of size 1); `none` for no mask",
    )
    add(
        "--weights",
        default="",
        metavar="[1]:bhqk",
        help="index or attribute of the attention weights, and their axes",
    )
    add(
        "--projections",
        default="",
        metavar="query=q,…,out=o",
        help="names of the projection layers",
    )
    add(
        "--cache",
        default="",
        metavar="NAME=[1]",
        help="argument of the KV cache, and index of the new cache in the result",
    )


@dataclass
class Outcome:
    """What was found out about one target: reports, and errors by name.

    The error of an attention that cannot be called does not hide the reports of others.
    """

    target: str
    inside: bool = False  # whether it is a model
    reports: list[Report] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether a law fails."""
        return not all(report.ok for report in self.reports)


def run(arguments: argparse.Namespace) -> int:
    """Check what is named, print what was found out, return the exit status."""
    if reason := unwritable(arguments.junit):
        print(
            f"headnotes check: `--junit {arguments.junit}` cannot be written: {reason}",
            file=sys.stderr,
        )
        return 2
    progress = ProgressBar()
    outcomes: list[Outcome] = []
    try:
        for target, options in chosen_targets(arguments):
            outcomes.append(check_target(target, options, progress))
    except CallError as error:
        target = arguments.target or "pyproject.toml"
        outcomes.append(Outcome(target, errors={target: str(error)}))
    finally:
        progress.clear()
    if arguments.junit:
        Path(arguments.junit).write_bytes(outcomes_to_junit(outcomes))
    with suppress(BrokenPipeError):
        print_outcomes(outcomes, arguments)
    errors = [text for outcome in outcomes for text in outcome.errors.values()]
    for text in errors:
        print(f"headnotes check: {text}", file=sys.stderr)
    return 1 if any(outcome.failed for outcome in outcomes) else 2 * bool(errors)


def unwritable(path: str) -> str:
    """Why a file cannot be written; "" if it can, and it exists then."""
    try:
        if path:
            Path(path).open("ab").close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_target(target: str, options: dict[str, Any], progress: Progress) -> Outcome:
    """Check what a target names, or each attention inside it."""
    outcome = Outcome(target, options.pop("inside"))
    try:
        # Raises an error for an invalid value, once for all attentions of a model.
        Options(**{option.name: options[option.name] for option in fields(Options)})
        # What the imported file prints must not end up in the report, or in JSON.
        with redirect_stdout(sys.stderr):
            loaded = load_attention(target)
        check_loaded(outcome, loaded, progress=progress, **options)
    except ValueError as error:  # `CallError` is a `ValueError`
        outcome.errors[target] = str(error)
    return outcome


def check_loaded(
    outcome: Outcome, loaded: tuple[str, str, Any], **options: Any
) -> None:
    """Check an attention, or each one inside a model, given as by `load_attention`.

    A model that cannot be called with vectors is checked as if `--inside` were given.
    """
    parts = [loaded]
    if outcome.inside:
        init_args = options.pop("init_args", {})
        with redirect_stdout(sys.stderr):
            parts = attentions_inside(*loaded, init_args)
    check_parts(outcome, parts, options)
    results = [result for report in outcome.reports for result in report.results]
    if results and all(result.status == "not applicable" for result in results):
        outcome.errors[outcome.target] = (
            f"no law was tested on `{outcome.target}`: each is skipped, such as "
            f"`{results[0].law.name}` ({results[0].detail})"
        )


def check_parts(
    outcome: Outcome,
    parts: Iterable[tuple[str, str, Any]],
    options: dict[str, Any],
    facts: tuple[Fact, ...] = (),
) -> None:
    """Check each part, or each attention within a part that is a model.

    The reports begin with the given facts.
    """
    for name, imports, attention in parts:
        try:
            report = check(attention, name=name, imports=imports, **options)
            outcome.reports.append(replace(report, facts=(*facts, *report.facts)))
            if report.model is not None and not outcome.inside:
                check_within(outcome, name, *report.model, options)
        except ModelError as model:
            within = [*parts_of_model(name, model.imports, model.model, model.source)]
            is_checked = not outcome.inside and check_with_vectors(
                outcome, name, attention, model, options
            )
            if outcome.inside or not within:
                if not is_checked:
                    outcome.errors[name] = str(model)
                continue
            outcome.inside = True
            text = f"`{name}`, which {model.why}"
            more = {n: value for n, value in options.items() if n != "init_args"}
            check_parts(outcome, within, more, (Fact("within", text, "inferred"),))
            if is_checked:  # with it, a part that takes more than vectors was
                for part, *_ in within:
                    outcome.errors.pop(part, None)
        except CallError as error:
            outcome.errors[name] = str(error)
        except ValueError:
            raise  # of an option, once for all parts
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            outcome.errors[name] = (
                f"`{name}` was not checked: a defect of the checker, which says "
                f"nothing about the attention; please report it: "
                f"{type(error).__name__}: {first_line(error)} ({place})"
            )


def check_within(
    outcome: Outcome,
    name: str,
    model: nn.Module,
    source: str,
    imports: str,
    options: dict[str, Any],
) -> None:
    """Check the attentions within a model that was checked, as far as they are called.

    Its own calls show little of them, such as of their formula.
    """
    within = Outcome(name, inside=True)  # whose errors are left out
    parts = parts_of_model(name, imports, model, source)
    fact = Fact("within", f"`{name}`", "inferred")
    more = {n: value for n, value in options.items() if n != "init_args"}
    check_parts(within, parts, more, (fact,))
    outcome.inside = True
    outcome.reports += within.reports


def check_with_vectors(
    outcome: Outcome,
    name: str,
    model: Any,
    error: ModelError,
    options: dict[str, Any],
) -> bool:
    """Check a model of token ids, or of images, as one of vectors, if it can be called.

    Return whether it can.
    """
    of_class = isinstance(model, type)
    given = {n: v for n, v in options.items() if of_class or n != "init_args"}
    for takes, wrapped, module, source in ways_with_vectors(name, model, error):
        tool = source.partition("(")[0]
        line = f"from {module} import {tool}\n\n{name} = {source}\n"
        with suppress(CallError):
            report = check(wrapped, name=name, imports=error.imports + line, **given)
            fact = Fact(takes, "vectors are given in their place", "inferred")
            outcome.reports.append(replace(report, facts=(*report.facts, fact)))
            return True
    return False


def ways_with_vectors(
    name: str, model: Any, error: ModelError
) -> list[tuple[str, Any, str, str]]:
    """What a model takes, it with vectors in their place, and how that is made.

    That is the module of the function that makes it, and its call.
    """
    ids, patches = "token ids", "patches of images"
    of_ids = error.takes_ids or bool(embedding_widths(error.model))
    if not isinstance(model, type):
        if not of_ids or is_large(error.model):
            return []
        source = f"with_vectors({error.source})"
        return [(ids, with_vectors(error.model), with_vectors.__module__, source)]
    ways = []
    if structure.patch_embedding(error.model) is not None:
        source = f"of_patches({name})"
        ways.append((patches, of_patches(model), of_patches.__module__, source))
    if of_ids:
        source = f"of_vectors({name})"
        ways.append((ids, of_vectors(model), of_vectors.__module__, source))
    return ways[::-1] if error.takes_ids else ways


def chosen_targets(
    arguments: argparse.Namespace,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each target with its options: those of the flags, or else of `pyproject.toml`."""
    flags = parse_options(arguments)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = parse_options(parser.parse_args([]))
    given = {name for name in flags if flags[name] != defaults[name]}
    configured = read_settings(Path("pyproject.toml"))
    targets = [arguments.target] if arguments.target else [*configured]
    if not targets:
        raise CallError(
            "name what to check, as FILE.py:NAME, or list it in pyproject.toml under "
            '[tool.headnotes.check."FILE.py:NAME"]'
        )
    for target in targets:
        settings = configured.get(target, {})
        yield target, {**flags, **{n: v for n, v in settings.items() if n not in given}}


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """The options of each target under `[tool.headnotes.check]`.

    Raises `CallError` for an option that does not exist, and for a value that should be
    a table.
    """
    if not path.is_file():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CallError(f"`{path}` cannot be read: {error}") from None
    for level in ("tool", "headnotes", "check"):
        table = table.get(level, {})
        if not isinstance(table, dict):
            raise CallError(
                f"`{level}` (={table!r}) of `{path}` must be a table; {WHERE_TO_WRITE}"
            )
    for target, settings in table.items():
        if not isinstance(settings, dict):
            raise CallError(
                f"`{path}` has `{target}` in [tool.headnotes.check]; {WHERE_TO_WRITE}"
            )
        for name, value in settings.items():
            validate_setting(path, name, value)
            if isinstance(value, list):
                settings[name] = tuple(value)
        if "dtype" in settings:
            name = str(settings["dtype"])
            settings["dtype"] = DTYPES.get(name, name)
    return table


def validate_setting(path: Path, name: str, value: Any) -> None:
    """Raise `CallError` for an option that does not exist, and a flag that is none."""
    if name not in SETTINGS:
        raise CallError(
            f"`{path}` has `{name}`, which is no option; "
            f"{did_you_mean(name, sorted(SETTINGS), 'the options are')}"
        )
    if name in ("inside", "thorough") and type(value) is not bool:
        raise CallError(f"`{name}` (={value!r}) of `{path}` must be true or false")


def print_outcomes(outcomes: list[Outcome], arguments: argparse.Namespace) -> None:
    """Print the reports, and annotations, in the format that the flags name."""
    if arguments.json:
        found = [entry for outcome in outcomes for entry in outcome_to_json(outcome)]
        is_single = arguments.target and not outcomes[0].inside
        print(json.dumps(found[0] if is_single else found, indent=2))
    else:
        flat = [report for outcome in outcomes for report in outcome.reports]
        shown = [r for r in flat if not (arguments.quiet and r.ok)]
        for n, report in enumerate(shown):
            print("\n" * (n > 0) + with_color(report.render(arguments.verbose)))
    if arguments.github:
        # GitHub reads them from both streams; the other one may be JSON.
        stream = sys.stderr if arguments.json else sys.stdout
        for line in (line for outcome in outcomes for line in annotations(outcome)):
            print(line, file=stream)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough: nothing is printed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def annotations(outcome: Outcome) -> Iterator[str]:
    """A line of GitHub Actions for each law that fails, and for each error."""
    path = path_of(outcome.target)
    place = f"file={path}," if path else ""
    messages = [
        f"{report.name}: {result.law.name}: {result.detail}"
        for report in outcome.reports
        for result in report.failed
    ]
    for message in [*messages, *outcome.errors.values()]:
        text = message.replace("\n", " ")
        yield f"::error {place}title=headnotes check::{text}"


def path_of(target: str) -> str:
    """The file of a target, from the current folder; "" if it is not known."""
    where = target.rpartition(":")[0]
    module = None if where.endswith(".py") else sys.modules.get(where)
    file = where if module is None else getattr(module, "__file__", None) or ""
    path = Path(file)
    is_inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    if not path.is_file():
        return ""
    return path.relative_to(Path.cwd()).as_posix() if is_inside else file


def with_color(text: str) -> str:
    """The text with colored verdicts, if it is printed on a terminal."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return re.sub(
        rf"^(\w+ +)({'|'.join(COLORS)})\b",
        lambda found: f"{found[1]}\033[{COLORS[found[2]]}m{found[2]}\033[0m",
        text,
        flags=re.MULTILINE,
    )


def outcomes_to_junit(outcomes: Iterable[Outcome]) -> bytes:
    """The outcomes as JUnit XML, which most CI systems display."""
    suites = ElementTree.Element("testsuites")
    for outcome in outcomes:
        for report in outcome.reports:
            add_junit_suite(suites, report)
        for name, message in outcome.errors.items():
            suite = ElementTree.SubElement(
                suites, "testsuite", name=name, tests="1", errors="1"
            )
            case = ElementTree.SubElement(
                suite, "testcase", classname=name, name="check"
            )
            ElementTree.SubElement(case, "error", message=message)
    text: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return text


def add_junit_suite(suites: ElementTree.Element, report: Report) -> None:
    """Add a test suite with one test case for each law."""
    suite = ElementTree.SubElement(
        suites,
        "testsuite",
        name=report.name,
        tests=str(len(report.results)),
        failures=str(len(report.failed)),
        skipped=str(len(report.not_applicable)),
    )
    for result in report.results:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=report.name,
            name=result.law.name,
            time=f"{result.seconds:.3f}",
        )
        if result.status == "fail":
            failure = ElementTree.SubElement(case, "failure", message=result.detail)
            failure.text = "\n".join(explain(result))
        elif result.status != "pass":
            ElementTree.SubElement(case, "skipped", message=result.detail)


def parse_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `check`; raises `CallError` for malformed text."""
    options = {**vars(arguments)}
    for name in ("target", "json", "junit", "github", "quiet", "verbose", "command"):
        options.pop(name, None)
    for name in ("init_args", "call_args"):
        options[name] = parse_keywords(name, options[name])
    for name in ("inputs", "unused_parameters", "only", "skip"):
        options[name] = tuple(filter(None, options[name].replace(" ", "").split(",")))
    pairs = [part for part in options["projections"].split(",") if part]
    options["projections"] = dict(parse_pair("projections", pair) for pair in pairs)
    masks = [(m, "") if m == "none" else parse_pair("mask", m) for m in options["mask"]]
    options["mask"] = dict(masks)
    cache = options["cache"]
    options["cache"] = parse_pair("cache", cache) if cache else None
    options["dtype"] = DTYPES.get(arguments.dtype)
    if options["dtype"] is None:
        raise CallError(
            f"`--dtype {arguments.dtype}` must be one of {', '.join(DTYPES)}"
        )
    return options


def parse_pair(option: str, text: str) -> tuple[str, str]:
    r"""A name and its value.

    >>> parse_pair("mask", "attn_mask=ignore:qk")
    ('attn_mask', 'ignore:qk')
    """
    name, equals, value = text.strip().partition("=")
    if not equals:
        raise CallError(f"`--{option} {text}` has no name; write NAME={text}")
    return name, value


def parse_keywords(option: str, text: str) -> dict[str, Any]:
    r"""Keyword arguments, as written in a call; values must be literals.

    >>> parse_keywords("init_args", "d_model=12, bias=False")
    {'d_model': 12, 'bias': False}
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return {k.arg or "**": ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise CallError(
            f'`--{option.replace("_", "-")} "{text}"` is malformed; write '
            f'"name=value, name=value", where values are numbers, strings, lists, '
            f"True, False or None"
        ) from None


def load_attention(target: str) -> tuple[str, str, Any]:
    """Import the target; return its name, the lines that import it, and the target."""
    where, _, name = target.rpartition(":")
    is_file = where.endswith(".py")
    path = Path(where).resolve()
    if is_file and not path.is_file():
        raise CallError(f"there is no file `{where}`; give a path from {Path.cwd()}")
    module, folder = module_name(path) if is_file else (where, None)
    importable = all(part.isidentifier() for part in module.split("."))
    if not name.isidentifier() or not (importable or is_file):
        raise CallError(
            f"`{target}` must be FILE.py:NAME or package.module:NAME, where NAME is a "
            f"module class, a module, or a function"
        )
    if not is_file and find_spec(module.partition(".")[0]) is None:
        folder = Path.cwd()  # a module that is not installed may be here
    imports = import_of(module, name)
    if folder is not None:
        imports = f"import sys\n\nsys.path.insert(0, {str(folder)!r})\n{imports}"

    namespace: dict[str, Any] = {}
    try:
        exec(imports, namespace)
    except (Exception, SystemExit) as error:
        message = str(error).strip().partition("\n")[0]
        raise CallError(
            f"`{target}` cannot be imported ({type(error).__name__}: {message})"
        ) from error
    # An installed or built-in module of the same name takes precedence over the file.
    imported_file = sys.modules[module].__file__
    if is_file and not (imported_file and path.samefile(imported_file)):
        raise CallError(
            f"`{target}` cannot be imported: `import {module}` finds {imported_file} "
            f"instead; rename the file, or its folder"
        )
    if not callable(namespace[name]):
        raise CallError(
            f"`{target}` is of type {type(namespace[name]).__name__}, and cannot be "
            f"called; name a module class, a module, or a function"
        )
    return name, imports, namespace[name]


def attentions_inside(
    name: str, imports: str, model: Any, init_args: dict[str, Any]
) -> list[tuple[str, str, nn.Module]]:
    """Each attention within a model, as `load_attention` returns it.

    Raises `CallError` where there is none, and where the model cannot be built.
    """
    built = name
    if not isinstance(model, nn.Module):
        built += f"({', '.join(f'{n}={value!r}' for n, value in init_args.items())})"
        try:
            model = model(**init_args)
        except Exception as error:
            raise CallError(
                f"`{built}` cannot be built ({type(error).__name__}: "
                f"{first_line(error)}); give `--init-args`, or name a function that "
                f"builds the model"
            ) from error
    if not isinstance(model, nn.Module):
        raise CallError(f"`{built}` is no module, but a {type(model).__name__}")
    parts = [*parts_of_model(name, imports, model, built)]
    if not parts:
        raise CallError(
            f"no attention was found inside `{built}`; check its class, without "
            f"`--inside`"
        )
    return parts


def parts_of_model(
    name: str, imports: str, model: nn.Module, built: str
) -> Iterator[tuple[str, str, nn.Module]]:
    """Each attention within a model that the expression `built` builds.

    Of those with the same class and shapes, such as that of each layer, the first.
    """
    seen = set()
    for path in structure.paths_of_attention(model):
        part = model.get_submodule(path)
        kind = type(part), tuple(p.shape for p in part.parameters())
        if kind not in seen:
            seen.add(kind)
            own = "_".join([name, *path.split(".")])
            yield own, f"{imports}\n{own} = {built}.get_submodule({path!r})\n", part


def module_name(path: Path) -> tuple[str, Path]:
    """The dotted name of a file in its package, and the folder to import it from.

    A folder without `__init__.py` is a package, too, if the file has relative imports:
    `from .x` needs one folder, and each further dot one more.
    """
    nodes: Iterable[ast.AST] = ()
    with suppress(SyntaxError, ValueError):  # the import will raise it again
        nodes = ast.walk(ast.parse(path.read_bytes()))
    dots = max((n.level for n in nodes if isinstance(n, ast.ImportFrom)), default=0)
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file() or dots > 0:
        parts.insert(0, folder.name)
        folder, dots = folder.parent, dots - 1
    for part in parts:
        if "." in part:
            raise CallError(
                f"`{path.name}` cannot be imported: `{part}` has a dot in its name; "
                f"rename it"
            )
    return ".".join(parts), folder


def outcome_to_json(outcome: Outcome) -> list[dict[str, Any]]:
    """The reports, then the errors, as dicts and lists."""
    errors = [
        {"name": name, "ok": False, "error": message}
        for name, message in outcome.errors.items()
    ]
    return [*map(report_to_json, outcome.reports), *errors]


def report_to_json(report: Report) -> dict[str, Any]:
    """The report as dicts and lists."""
    return {
        "name": report.name,
        "ok": report.ok,
        "facts": [vars(fact) for fact in report.facts],
        "laws": [result_to_json(result) for result in report.results],
    }


def result_to_json(result: LawResult) -> dict[str, Any]:
    """The result of one law. JSON has no NaN and no infinity: they become null."""
    example = None
    if result.counterexample is not None:
        example = {**vars(result.counterexample)}
        example["sizes"] = vars(example["sizes"])
        if not math.isfinite(example["difference"]):
            example["difference"] = None
    return {
        "law": result.law.name,
        "statement": result.law.statement,
        "status": result.status,
        "detail": result.detail,
        "seconds": round(result.seconds, 3),
        "counterexample": example,
    }


class ProgressBar:
    """A progress bar on the terminal, shown after one second."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.shown = False

    def __call__(self, done: int, total: int, name: str) -> None:
        """Show how many laws are done, and which one runs."""
        if sys.stderr.isatty() and time.perf_counter() - self.start > 1:
            bar = "█" * (20 * done // total)
            print(f"\r{bar:·<20} {done}/{total} {name:24}", end="", file=sys.stderr)
            sys.stderr.flush()
            self.shown = True

    def clear(self) -> None:
        """Erase the bar."""
        if self.shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
