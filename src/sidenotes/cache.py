"""Store texts that take long to make, each under a hash of all that it depends on.

Several versions of a text stay in the cache, so that undoing an edit finds the earlier
one. What was not used for the longest time is removed when the cache grows too large.
"""

import ast
import hashlib
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock

from sidenotes.split import named, read

# The size that one folder of the cache may have after a build, in bytes.
LIMIT = 128 * 2**20

# Results may change with Python and with each installed package.
INSTALLED = {f"{each.name}=={each.version}" for each in metadata.distributions()}
ENVIRONMENT = " ".join([sys.version, *sorted(INSTALLED)])

# Python 3.11 loses count of its own recursion where two threads parse at once.
PARSING = Lock()


def code_of(file: Path) -> str:
    """A hash of what in a file can change a result: of Python the code, else each byte.

    A file that does not exist (yet) differs from every file that does.
    """
    if not file.is_file():
        return "missing"
    if file.suffix != ".py":
        return hash_of([file.read_bytes()])
    with PARSING:
        return code(file, file.stat().st_mtime_ns)


@cache
def code(file: Path, changed: int) -> str:
    """The hash of the syntax tree without docstrings; parsed once for all pages."""
    tree = ast.parse(read(file))
    for node in [tree, *(definition for _, definition in named(tree))]:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return hash_of([ast.dump(tree)])


def hash_of(parts: Iterable[str | bytes]) -> str:
    """One hash of several texts.

    Each is preceded by its length, so that moving a character from one text to the next
    changes the hash:

    >>> hash_of(["ab", "c"]) == hash_of(["a", "bc"])
    False
    """
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


def path_for(folder: Path, name: str, key: str, suffix: str) -> Path:
    """The file of a cached text; `key` is the hash of all that the text depends on."""
    return folder / f"{name}-{key[:24]}{suffix}"


def load(path: Path) -> str | None:
    """A cached text, or None where there is none; it counts as used just now."""
    try:
        text = path.read_text(encoding="utf-8")
        os.utime(path)
    except FileNotFoundError:
        return None
    return text


def store(path: Path, text: str) -> None:
    """Write a text to the cache, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another build may be reading: the finished file takes its name in one step.
    with NamedTemporaryFile("wb", dir=path.parent, delete=False) as file:
        try:
            file.write(text.encode())
        except BaseException:
            Path(file.name).unlink()
            raise
    Path(file.name).replace(path)


def prune(folder: Path, limit: int = LIMIT) -> None:
    """Remove what was not used for the longest time, until a folder fits its limit."""
    found = []
    for path in folder.glob("*"):
        # Another build may be removing files, too.
        with suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= limit:
            break
        path.unlink(missing_ok=True)
        total -= size
