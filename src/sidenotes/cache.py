"""Texts that take a while to make are kept until something changes."""

import ast
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock

from sidenotes.split import named, read

# Python 3.11 loses count of its own recursion where two threads parse at once.
PARSING = Lock()


def code_of(file: Path) -> bytes:
    """What in a file can change a result: of Python the code, else every byte."""
    with PARSING:
        return code(file, file.stat().st_mtime_ns)


@cache
def code(file: Path, changed: int) -> bytes:
    """The same, read once for all pages of a build."""
    if file.suffix != ".py":
        return file.read_bytes()
    tree = ast.parse(read(file))
    for node in [tree, *(definition for _, definition in named(tree))]:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree).encode()


def place(folder: Path, name: str, key: str, suffix: str) -> Path:
    """Where a text is kept; `key` is the hash of all that it depends on."""
    return folder / f"{name}-{key[:16]}{suffix}"


def keep(path: Path, text: str) -> None:
    """Write a text to its place, instead of what was kept under its name before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.stem.rpartition("-")[0]
    for outdated in path.parent.glob(f"{name}-{'?' * 16}{path.suffix}"):
        outdated.unlink(missing_ok=True)
    # Written whole or not at all: another build may be looking.
    with NamedTemporaryFile(
        "w", dir=path.parent, delete=False, encoding="utf-8"
    ) as new:
        new.write(text)
    Path(new.name).replace(path)
