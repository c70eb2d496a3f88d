r"""# The command line

`headnotes` has six commands: `list` and `copy` are for the modules of this site,
`exercise` is for its exercises, `check` and `bench` for any attention implementation,
also your own, and `train` is for its translation model.

```console
$ headnotes list
$ headnotes copy mha attention/ --plain
```

The first prints the modules that can be copied, the second copies one into the folder
`attention/`; `--plain` leaves out the notes. A copied module is yours. It needs only
PyTorch and the standard library. Its first lines say where it came from, under which
license, and which other modules it needs beside it: those are copied with it. The
buttons above each annotated module give the same texts.

[`headnotes check`](attention_laws/cli.md) tests an implementation against the laws of
attention, [`headnotes bench`](attention_bench/cli.md) benchmarks implementations, and
[`headnotes exercise`](exercises/cli.md) writes and checks exercises. [`headnotes
train`](models/cli.md) trains the translation model.

Source: the commands are defined with
[argparse](https://docs.python.org/3/library/argparse.html).
"""

import argparse
import ast
import difflib
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Sequence
from functools import cache
from os.path import relpath
from pathlib import Path
from typing import Any, NoReturn

import headnotes

# Comments that speak to a tool, not to a reader, are no notes.
PRAGMA = re.compile(
    r"#(!|\s*(type:|noqa|fmt:|ruff:|pragma:|pylint:|mypy:|SPDX-|-\*-|(end)?region\b))"
)

# Of no use without the rest of the package.
AT_HOME = {"cli", "compare", "exercises", "integrations", "models", "parallel"}

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> dict[str, Path]:
    r"""The modules that can be copied, by name.

    >>> [name for name in modules() if name.startswith("p")]
    ['plots', 'positions']
    """
    home = Path(__file__).parent
    paths = filter(can_be_copied, sorted(home.rglob("*.py")))
    named = {path.relative_to(home).with_suffix("").as_posix(): path for path in paths}
    # The module that a package is named for is known by the package's name.
    return {name.removesuffix("/module"): path for name, path in named.items()}


def can_be_copied(path: Path) -> bool:
    """Whether a file is a module of ours that needs no more than its companions."""
    home = Path(__file__).parent
    if path.stem == "__init__" or not path.is_relative_to(home):
        return False
    return path.relative_to(home).with_suffix("").parts[0] not in AT_HOME


def copied_name(path: Path) -> str:
    r"""The name of a module's copy, in the one folder where all copies lie.

    >>> copied_name(modules()["fast"])
    'fast.py'
    """
    return f"{path.parent.name}.py" if path.stem == "module" else path.name


def edition(path: Path, *, plain: bool = False) -> str:
    r"""The copy of a module: its origin and license first, then the source.

    >>> print(edition(modules()["mha"])[:24])
    # mha.py, from Headnotes
    """
    source = with_flat_imports(path.read_text(encoding="utf-8"))
    beside = ", ".join(map(copied_name, companions(path)))
    needs = f"# Needs in the same folder: {beside}\n" if beside else ""
    return (
        f"# {copied_name(path)}, from Headnotes {headnotes.__version__}\n"
        f"# SPDX-FileCopyrightText: 2026 the Headnotes authors\n"
        f"# SPDX-License-Identifier: MIT\n{needs}\n"
        f"{without_notes(source) if plain else source}"
    )


def companions(path: Path) -> list[Path]:
    r"""The modules that one needs beside it, and those that these need.

    >>> [companion.name for companion in companions(modules()["fast/components"])]
    ['checks.py', 'mha.py', 'rotary.py']
    """
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        for node in own_imports(waiting.pop().read_text(encoding="utf-8")):
            new = {source_of(name) for name in imported_modules(node)} - found
            found |= new
            waiting += new
    return sorted(found)


@cache  # a build of the site asks for those of each file dozens of times
def own_imports(source: str) -> tuple[ast.ImportFrom, ...]:
    """The imports of other modules of Headnotes, in the order of their lines."""
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.ImportFrom)]
    ours = (n for n in nodes if (n.module or "").partition(".")[0] == "headnotes")
    return tuple(ours)


def imported_modules(node: ast.ImportFrom) -> list[str]:
    """The dotted names of the modules that an import of ours needs."""
    if imports_modules(node):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [str(node.module)]


def imports_modules(node: ast.ImportFrom) -> bool:
    """Whether an import takes modules out of a package, not names out of a module."""
    return not source_of(str(node.module)).is_file()


def source_of(name: str) -> Path:
    """The file of a module of ours; that of a package that is named for its module."""
    path = Path(__file__).parent.joinpath(*name.split(".")[1:])
    module = path / "module.py"
    return module if module.is_file() else path.with_suffix(".py")


def with_flat_imports(source: str) -> str:
    r"""Import our own modules from the folder in which all copies lie.

    The folder may be a package, or be on the path itself:

    >>> print(with_flat_imports("from headnotes.masks.build import causal"))
    if __package__:
        from .build import causal
    else:
        from build import causal
    """
    lines: list[str | None] = [*source.split("\n")]  # None stands for a line that goes
    package, folder = ["if __package__:"], ["else:"]
    for node in own_imports(source):
        names = ", ".join(alias.name for alias in node.names)
        module = ""
        if not imports_modules(node):
            module = copied_name(source_of(str(node.module))).removesuffix(".py")
        package.append(f"    from .{module} import {names}")
        origin = f"from {module} import" if module else "import"
        folder.append(f"    {origin} {names}")
        assert node.end_lineno is not None  # it was parsed
        length = node.end_lineno - node.lineno + 1
        lines[node.lineno - 1 : node.end_lineno] = [None] * length
    if None in lines:
        lines[lines.index(None)] = "\n".join(package + folder)
    return "\n".join(line for line in lines if line is not None)


def archive_name(path: Path) -> str:
    r"""The name of the archive of a module and its companions.

    >>> archive_name(modules()["fast"])
    'fast.zip'
    """
    return Path(copied_name(path)).with_suffix(".zip").name


def editions(path: Path) -> dict[str, str]:
    r"""The files that the page of a module offers to copy: their addresses, by label.

    A module that needs one or two others beside it has a button for each file:

    >>> editions(modules()["masks/build"])
    {'Copy build.py': 'build.py', 'Copy checks.py': '../checks.py'}
    """
    if not can_be_copied(path.resolve()):
        return {}
    needed = companions(path)
    if not needed:
        return {"Copy module": path.name, "Copy without notes": f"plain/{path.name}"}
    if len(needed) > 2:
        return {}
    return {
        f"Copy {copied_name(file)}": Path(relpath(file, path.parent)).as_posix()
        for file in [path, *needed]
    }


def links(path: Path) -> dict[str, str]:
    r"""The links at the top of the page of a module: their addresses, by label.

    >>> links(modules()["fast"])
    {'Download fast.zip (8 files)': 'fast.zip', 'Its tests': 'tests/test_module.md'}
    """
    if path.parent.name == "solutions":
        return {"Download .py": path.name}
    needed = companions(path) if can_be_copied(path.resolve()) else []
    archive = archive_name(path)
    label = f"Download {archive} ({1 + len(needed)} files)"
    download = {label: archive} if needed else {"Download .py": path.name}
    return {**download, "Its tests": f"tests/test_{path.stem}.md"}


def without_notes(source: str) -> str:
    r"""Drop the notes; keep the code, its shape comments, and what each thing is.

    >>> print(without_notes("def double(x):\n    # Why not x + x?\n    return 2 * x"))
    def double(x):
        return 2 * x
    """
    original = source.split("\n")
    lines: list[str | None] = [*original]  # None stands for a line that goes
    docstrings: dict[int, tokenize.TokenInfo] = {}
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (first, start), (last, end) = token.start, token.end
        alone = not token.line[:start].strip() and not depth
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        # A note is a comment on a line of its own; inside brackets it belongs to the
        # code.
        elif token.type == tokenize.COMMENT and alone:
            if not PRAGMA.match(token.string):
                lines[first - 1] = None
        elif token.type == tokenize.STRING and alone:
            if not original[last - 1][end:].strip():
                docstrings[first] = token
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Documented) and ast.get_docstring(node) is not None:
            text = docstrings.get(node.body[0].lineno)
            if text is not None and text.end[0] == node.body[0].end_lineno:
                first, last = text.start[0], text.end[0]
                indent = original[first - 1][: text.start[1]]
                lines[first - 1] = indent + first_line(text.string)
                lines[first:last] = [None] * (last - first)
    return "\n".join(line for line in lines if line is not None)


def first_line(docstring: str) -> str:
    r"""The literal of a docstring, cut to its first line where that can be written so.

    >>> print(first_line('\'\'\'One.\n\n    More.\n    \'\'\''))
    '''One.'''
    """
    text = inspect.cleandoc(ast.literal_eval(docstring)).partition("\n")[0]
    text = text.removeprefix("# ")
    opening = re.match(r"""\w*("{3}|'{3}|"|')""", docstring)
    assert opening is not None  # it is a string
    short = opening[0] + text + opening[1]
    try:
        return short if ast.literal_eval(short) == text else docstring
    except SyntaxError:
        return docstring


def similar_names(name: str) -> list[str]:
    r"""The modules that an unknown name could mean: by folder, by file, or by spelling.

    >>> similar_names("masks")
    ['masks/build', 'masks/conventions', 'masks/describe', 'masks/flex']
    >>> similar_names("MHA.py"), similar_names("positons")
    (['mha'], ['positions'])
    """
    wanted = name.lower().removesuffix(".py").removeprefix("headnotes/")
    by_part = [known for known in modules() if wanted in known.split("/")]
    return by_part or difflib.get_close_matches(wanted, modules(), n=1)


def copy(name: str, destination: Path, *, plain: bool, force: bool) -> list[Path]:
    """Write a module, and what it needs beside it, into a folder or as a file."""
    if name not in modules():
        if similar := similar_names(name):
            way_out = f"did you mean {' or '.join(f'`{each}`' for each in similar)}?"
        else:
            way_out = f"there are {', '.join(modules())}"
        raise ValueError(f"`{name}` is no module that can be copied; {way_out}")
    path = destination
    if destination.is_dir() or not destination.suffix:
        path = destination / copied_name(modules()[name])
    if path.suffix != ".py" or path.parent.is_file():
        raise ValueError(
            f"`{destination}` is neither a folder nor a name ending in .py"
        )
    texts = {path: edition(modules()[name], plain=plain)}
    for companion in companions(modules()[name]):
        texts[path.with_name(copied_name(companion))] = edition(companion, plain=plain)
    # All or nothing: what stands in the way of one file stops them all.
    for path, text in texts.items():
        same = path.is_file() and path.read_text(encoding="utf-8") == text
        if (path.exists() or path.is_symlink()) and not same and not force:
            raise FileExistsError(f"`{path}` exists; `--force` overwrites it")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [*texts]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the message, and exit."""
        self.exit(2, f"{self.prog}: {message}\n")


def parse(
    parser: Parser,
    commands: "argparse._SubParsersAction[Any]",
    options: Sequence[str],
) -> argparse.Namespace:
    """The parsed options; those that a command does not know are its error."""
    arguments, unknown = parser.parse_known_args(options)
    if unknown:
        chosen = commands.choices[arguments.command]
        known = re.findall(r"--[a-z-]+", chosen.format_help())
        similar = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        way_out = "".join(f"; did you mean `{option}`?" for option in similar)
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{way_out}")
    return arguments


def add_list_and_copy(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the commands that need no torch."""
    about = "List the modules that can be copied, each with its title."
    commands.add_parser("list", help=about[0].lower() + about[1:-1], description=about)
    about = (
        "Copy a module, and the modules that it needs beside it, into your project. "
        "The copy depends only on PyTorch."
    )
    take = commands.add_parser(
        "copy", help="copy a module into your project", description=about
    )
    take.add_argument("name", help="name of the module, as printed by `headnotes list`")
    take.add_argument(
        "destination",
        nargs="?",
        default=".",
        type=Path,
        metavar="DEST",
        help="folder, or file name ending in .py (default: the current folder)",
    )
    take.add_argument("--plain", action="store_true", help="leave out the notes")
    take.add_argument("--force", action="store_true", help="overwrite existing files")


def add_others(
    commands: "argparse._SubParsersAction[Any]",
) -> dict[str, argparse.ArgumentParser]:
    """Add the commands whose arguments their own modules define."""
    abouts = {
        "exercise": "write exercises into a folder, and check them",
        "check": "test an attention implementation against the laws of attention",
        "bench": "benchmark attention implementations side by side",
        "train": "train a translation model, and continue interrupted runs",
    }
    return {name: commands.add_parser(name, help=text) for name, text in abouts.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status: 0 where all went well."""
    options = sys.argv[1:] if argv is None else [*argv]
    try:
        return run(options)
    except KeyboardInterrupt:
        print(f"{' '.join(['headnotes', *options[:1]])}: interrupted", file=sys.stderr)
        return 130  # what a shell reports for a program that Ctrl-C ends


def run(options: Sequence[str]) -> int:
    """Run the command that the options name."""
    parser = Parser(
        prog="headnotes",
        description="Copy annotated attention modules; do exercises; check and "
        "benchmark attention implementations; train a translation model.",
    )
    parser.add_argument("--version", action="version", version=headnotes.__version__)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{list,copy,exercise,check,bench,train}"
    )
    add_list_and_copy(commands)
    others = add_others(commands)
    if options[:1] == ["check"]:
        # Only these commands import torch, which takes seconds.
        from attention_laws import cli as laws

        laws.add_arguments(others["check"])
        return laws.run(parse(parser, commands, options))
    if options[:1] == ["bench"]:
        from attention_bench import cli as benchmark

        benchmark.add_arguments(others["bench"])
        return benchmark.run(parse(parser, commands, options))
    if options[:1] == ["exercise"]:
        from headnotes.exercises import cli as exercises

        exercises.add_arguments(others["exercise"])
        return exercises.run(parse(parser, commands, options))
    if options[:1] == ["train"]:
        from headnotes.parallel import cli as training

        training.add_arguments(others["train"])
        return training.run(parse(parser, commands, options))
    arguments = parse(parser, commands, options)

    if arguments.command == "list":
        for name, path in modules().items():
            title = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            print(f"{name:29}{title.splitlines()[0].removeprefix('# ')}")
        return 0
    try:
        paths = copy(
            arguments.name,
            arguments.destination,
            plain=arguments.plain,
            force=arguments.force,
        )
    except (ValueError, OSError) as error:
        print(f"headnotes copy: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(f"{path}: {headnotes.__version__}, MIT license")
    return 0


if __name__ == "__main__":
    sys.exit(main())
