r"""# The command line

`headnotes list` names the modules that can be taken home, `headnotes copy` puts one
into your own tree:

```console
$ headnotes copy mha attention/ --plain
```

`headnotes check` asks any attention, yours too, whether it [obeys the
laws](attention_laws/cli.md); `headnotes bench` times those that compute the same, [side
by side](attention_bench/cli.md).

A copied module is yours. It runs on torch and the standard library, and its first lines
say where it came from, under which licence, and which others it needs beside it: those
are copied with it. The buttons above each annotated module hand out exactly these
texts.

Source: a habit of the field. Attention is copied more often than it is imported, so
the copy should be good.
"""

import argparse
import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Sequence
from pathlib import Path

import headnotes

# Comments that speak to a tool, not to a reader, are no notes.
PRAGMA = re.compile(
    r"#(!|\s*(type:|noqa|fmt:|ruff:|pragma:|pylint:|mypy:|SPDX-|-\*-|(end)?region\b))"
)

# These serve the others, and are of no use without them.
AT_HOME = {"cli", "compare"}

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> dict[str, Path]:
    r"""The modules that can be copied, by name.

    >>> [name for name in modules() if name.startswith("p")]
    ['plots', 'positions']
    """
    home = Path(__file__).parent
    paths = [p for p in sorted(home.rglob("*.py")) if p.stem != "__init__"]
    named = {path.relative_to(home).with_suffix("").as_posix(): path for path in paths}
    # The module that a package is named for is known by the package's name.
    named = {name.removesuffix("/module"): path for name, path in named.items()}
    return {n: p for n, p in named.items() if n.partition("/")[0] not in AT_HOME}


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

    >>> [companion.name for companion in companions(modules()["fast"])]
    ['attention.py', 'mha.py']
    """
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        for node in own_imports(waiting.pop().read_text(encoding="utf-8")):
            new = {source_of(name) for name in imported_modules(node)} - found
            found |= new
            waiting += new
    return sorted(found)


def own_imports(source: str) -> list[ast.ImportFrom]:
    """The imports of other modules of Headnotes, in the order of their lines."""
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.ImportFrom)]
    return [n for n in nodes if (n.module or "").partition(".")[0] == "headnotes"]


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


def editions(path: Path) -> dict[str, str]:
    r"""What the page of a module offers to copy: with and without its notes.

    A module that needs one or two others beside it has a button for each file:

    >>> list(editions(modules()["fast"]))
    ['Copy fast.py', 'Copy attention.py', 'Copy mha.py']
    """
    if path.resolve() not in modules().values():
        return {}
    if 0 < len(needed := companions(path)) <= 2:
        return {f"Copy {copied_name(file)}": edition(file) for file in [path, *needed]}
    return {
        "Copy module": edition(path),
        "Copy without notes": edition(path, plain=True),
    }


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


def copy(name: str, destination: Path, *, plain: bool, force: bool) -> list[Path]:
    """Write a module, and what it needs beside it, into a folder or as a file."""
    if name not in modules():
        known = ", ".join(modules())
        raise ValueError(f"`{name}` is not a module of Headnotes; there are {known}")
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status: 0 where all went well."""
    parser = argparse.ArgumentParser(prog="headnotes", description=headnotes.__doc__)
    parser.add_argument("--version", action="version", version=headnotes.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name the modules that can be copied")
    take = commands.add_parser("copy", help="copy a module into your own tree")
    take.add_argument("name", help="a module, as `headnotes list` names it")
    take.add_argument("destination", nargs="?", default=".", type=Path, metavar="DEST")
    take.add_argument("--plain", action="store_true", help="leave out the notes")
    take.add_argument("--force", action="store_true", help="overwrite an existing file")
    ask = commands.add_parser("check", help="test whether an attention obeys the laws")
    race = commands.add_parser(
        "bench", help="time attentions that compute the same, side by side"
    )
    options = sys.argv[1:] if argv is None else [*argv]
    if options[:1] == ["check"]:
        # The laws want torch, which takes seconds to load; the others do not.
        from attention_laws import cli as laws

        laws.add_arguments(ask)
        return laws.run(parser.parse_args(argv))
    if options[:1] == ["bench"]:
        from attention_bench import cli as bench

        bench.add_arguments(race)
        return bench.run(parser.parse_args(argv))
    arguments = parser.parse_args(argv)

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
        print(f"{path}: {headnotes.__version__}, MIT licence")
    return 0


if __name__ == "__main__":
    sys.exit(main())
