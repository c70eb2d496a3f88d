r"""# headnotes check

```console
$ headnotes check my_model.py:MyAttention
$ headnotes check my_model.py:MyAttention --with "d_model=64, heads=4" --causal
```

A class is built, a module or a function is taken as it is. What is not said is
inferred, and printed above the table. The exit status is 0 where all laws are kept, 1
where one is broken, and 2 where the attention could not be called at all, so that the
command can stand in a CI job as it is; a law that is broken on purpose is left out by
`--skip`, and the table says so.

Source: [checking an attention](checker.md), from the command line.
"""

import argparse
import ast
import json
import math
import sys
import time
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attention_laws.adapter import LAYOUTS, POSITIONS, CannotBeCalled
from attention_laws.checker import LAWS, Finding, Report, check

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each option of `check`, under the same name."""
    add = parser.add_argument
    add("target", metavar="FILE.py:NAME", help="or package.module:NAME")
    add("--with", dest="settings", default="", metavar="A=1,B=2", help="build it so")
    add("--layout", default="", help=f"{', '.join(LAYOUTS)}, or letters such as bld")
    add("--inputs", default="", metavar="A,B,C", help="its inputs: one, or three")
    add(
        "--mask",
        action="append",
        default=[],
        metavar="NAME=KIND:AXES",
        help="keep (True = may be read), hide, additive, minimum, lengths or flag, and "
        "letters for its axes, such as bqk; `none` for no mask at all",
    )
    add("--call", default="", metavar="A=1,B=2", help="passed with each call")
    sizes = {"heads": "its heads", "kv-heads": "those of keys and values"}
    sizes |= {"d-model": "its width", "window": "keys that a query reads, with itself"}
    for name, meaning in sizes.items():
        add(f"--{name}", type=int, metavar="N", help=meaning)
    add("--causal", action=argparse.BooleanOptionalAction, help="by itself?")
    add("--positions", default="", choices=POSITIONS, help="what it knows of places")
    add("--weights", default="", metavar="[1]:bhqk", help="where they are shown")
    add("--projections", default="", metavar="query=q,…,out=o", help="its linear maps")
    add("--cache", default="", metavar="NAME=[1]", help="argument, place in the result")
    add("--unused", default="", metavar="A,B", help="parameters without a gradient")
    add("--only", default="", metavar="LAW,LAW", help=", ".join(LAWS))
    add("--skip", default="", metavar="LAW,LAW", help="laws that it need not keep")
    add("--thorough", action="store_true", help="more sizes, a compiler, strict laws")
    add("--device", default="cpu", help="where, such as cuda")
    add("--dtype", default="float32", help=", ".join(DTYPES))
    add("--seed", type=int, default=0, help="of all that is drawn")
    add("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check what the arguments name, print the report, and return the exit status."""
    progress = Progress()
    try:
        options = read_options(arguments)
        # Standard output is for the report.
        with redirect_stdout(sys.stderr):
            name, imports, attention = load(arguments.target)
        report = check(
            attention, name=name, imports=imports, progress=progress, **options
        )
    except ValueError as error:  # and with it `CannotBeCalled`
        progress.clear()
        print(f"headnotes check: {error}", file=sys.stderr)
        return 2
    progress.clear()
    print(json.dumps(as_json(report), indent=2) if arguments.json else report)
    return 0 if report.ok else 1


def read_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `check`; raises `CannotBeCalled` for what cannot be read."""
    options = {**vars(arguments)}
    for name in ("target", "json", "command"):
        options.pop(name, None)
    for name in ("settings", "call"):
        options[name] = read_call(name, options[name])
    for name in ("inputs", "unused", "only", "skip"):
        options[name] = tuple(filter(None, options[name].replace(" ", "").split(",")))
    pairs = [part for part in options["projections"].split(",") if part]
    options["projections"] = dict(read_pair("projections", pair) for pair in pairs)
    masks = [(m, "") if m == "none" else read_pair("mask", m) for m in options["mask"]]
    options["mask"] = dict(masks)
    cache = options["cache"]
    options["cache"] = read_pair("cache", cache) if cache else None
    options["dtype"] = DTYPES.get(arguments.dtype)
    if options["dtype"] is None:
        known = ", ".join(DTYPES)
        raise CannotBeCalled(f"`--dtype {arguments.dtype}` is none of {known}")
    return options


def read_pair(option: str, text: str) -> tuple[str, str]:
    r"""A name and what it is given.

    >>> read_pair("mask", "attn_mask=hide:qk")
    ('attn_mask', 'hide:qk')
    """
    name, equals, value = text.strip().partition("=")
    if not equals:
        raise CannotBeCalled(f"`--{option} {text}` names nothing; write NAME={text}")
    return name, value


def read_call(option: str, text: str) -> dict[str, Any]:
    r"""Arguments as they stand in a call; only literals can be given.

    >>> read_call("with", "d_model=12, bias=False")
    {'d_model': 12, 'bias': False}
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return {k.arg or "**": ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        option = {"settings": "with"}.get(option, option)
        raise CannotBeCalled(
            f'`--{option} "{text}"` cannot be read; write "name=value, name=value", '
            f"where values are numbers, strings, lists, True, False or None"
        ) from None


def load(target: str) -> tuple[str, str, Any]:
    """The name of an attention, the lines that import it, and the attention itself."""
    where, _, name = target.rpartition(":")
    is_file = where.endswith(".py")
    path = Path(where).resolve()
    if is_file and not path.is_file():
        raise CannotBeCalled(f"`{where}` is no file")
    module, folder = module_of(path) if is_file else (where, None)
    plain = all(part.isidentifier() for part in module.split("."))
    if not name.isidentifier() or not (plain or is_file):
        raise CannotBeCalled(
            f"`{target}` names no attention; write FILE.py:NAME or package.module:NAME"
        )
    if not is_file and find_spec(module.partition(".")[0]) is None:
        folder = Path.cwd()  # what is not installed may lie here
    imports = f"from {module} import {name}\n"
    if not plain:
        found = f"importlib.import_module({module!r})"
        imports = f"import importlib\n\n{name} = {found}.{name}\n"
    if folder is not None:
        imports = f"import sys\n\nsys.path.insert(0, {str(folder)!r})\n{imports}"
    names: dict[str, Any] = {}
    try:
        exec(imports, names)
    except (Exception, SystemExit) as error:
        raise CannotBeCalled(
            f"`{target}` cannot be imported ({type(error).__name__}: {error})"
        ) from error
    seen = sys.modules[module].__file__
    if is_file and not (seen and path.samefile(seen)):
        raise CannotBeCalled(
            f"`{target}` cannot be imported: `import {module}` finds {seen} instead; "
            f"give the file, or its folder, another name"
        )
    if not callable(names[name]):
        raise CannotBeCalled(
            f"`{target}` is of type {type(names[name]).__name__}, and cannot be called"
        )
    return name, imports, names[name]


def module_of(path: Path) -> tuple[str, Path]:
    """The dotted name of a file in its package, and the folder that holds that.

    A folder without `__init__.py` is a package, too, if imports such as `from .x` say
    so: each dot names one folder more.
    """
    nodes: Iterable[ast.AST] = ()
    with suppress(SyntaxError, ValueError):  # importing it will say why
        nodes = ast.walk(ast.parse(path.read_bytes()))
    dots = max((n.level for n in nodes if isinstance(n, ast.ImportFrom)), default=0)
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file() or dots > 0:
        parts.insert(0, folder.name)
        folder, dots = folder.parent, dots - 1
    for part in parts:
        if "." in part:
            raise CannotBeCalled(
                f"`{path.name}` cannot be imported: `{part}` has a dot in its name"
            )
    return ".".join(parts), folder


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "name": report.name,
        "ok": report.ok,
        "facts": [vars(fact) for fact in report.facts],
        "laws": [finding_as_json(finding) for finding in report.findings],
    }


def finding_as_json(finding: Finding) -> dict[str, Any]:
    """One law and its verdict; an amount that is no number is null."""
    example = None
    if finding.counterexample is not None:
        example = {**vars(finding.counterexample)}
        example["sizes"] = vars(example["sizes"])
        if not math.isfinite(example["amount"]):
            example["amount"] = None
    return {
        "law": finding.law.name,
        "statement": finding.law.statement,
        "verdict": finding.verdict,
        "detail": finding.detail,
        "seconds": round(finding.seconds, 3),
        "counterexample": example,
    }


class Progress:
    """A bar on the terminal, for who has waited a second."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.shown = False

    def __call__(self, done: int, total: int, name: str) -> None:
        """Show how many laws are done, and which comes now."""
        if sys.stderr.isatty() and time.perf_counter() - self.start > 1:
            bar = "█" * (20 * done // total)
            print(f"\r{bar:·<20} {done}/{total} {name:24}", end="", file=sys.stderr)
            sys.stderr.flush()
            self.shown = True

    def clear(self) -> None:
        """Leave the terminal as it was."""
        if self.shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
