"""Cache results on disk, each under a hash of everything that it depends on.

The cache holds several versions of a result, so that undoing an edit finds the earlier
one. When it grows too large, the least recently used results are removed.
"""

import ast
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import Any

from sidenotes.split import named

# The size that one folder of the cache may have after a build, in bytes.
LIMIT = 128 * 2**20

# Results may change with Python and with each installed package.
INSTALLED = {f"{each.name}=={each.version}" for each in metadata.distributions()}
ENVIRONMENT = " ".join([sys.version, *sorted(INSTALLED)])

# In Python 3.11, `ast.parse` in two threads at once miscounts the recursion depth.
PARSING = Lock()

# This package as it was when the process loaded it.
PACKAGE = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]


class Memory:
    """Values that depend on texts only, kept from build to build in one file."""

    def __init__(self, folder: Path | None = None) -> None:
        version = hash_of([ENVIRONMENT, *PACKAGE])
        self.path = folder and path_for(folder, "sources", version, ".json")
        self.before = json.loads((self.path and load(self.path)) or "{}")
        self.used: dict[str, Any] = {}

    def __call__(self, make: Callable[..., Any], *texts: str) -> Any:
        """`make(*texts)`, which JSON can represent."""
        key = f"{make.__name__} {hash_of(texts)}"
        with PARSING:
            if key not in self.used:
                known = key in self.before
                self.used[key] = self.before[key] if known else make(*texts)
            return self.used[key]

    def save(self) -> None:
        """Write the values that were used since the beginning."""
        if self.path and self.used.keys() - self.before.keys():
            store(self.path, json.dumps(self.used))


def code_in(source: str) -> str:
    """A hash of the syntax tree of a source without docstrings."""
    tree = ast.parse(source)
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
    """A cached text, or None if there is none; marks it as recently used."""
    try:
        text = path.read_text(encoding="utf-8")
        os.utime(path)
    except FileNotFoundError:
        return None
    return text


def store(path: Path, text: str) -> None:
    """Write a text to the cache, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another build may be reading the file, so it is replaced atomically.
    with NamedTemporaryFile("wb", dir=path.parent, delete=False) as file:
        try:
            file.write(text.encode())
        except BaseException:
            Path(file.name).unlink()
            raise
    Path(file.name).replace(path)


def cached(path: Path, make: Callable[..., Any], *arguments: Any) -> Any:
    """The cached value at `path`; if there is none, it is made, and stored as JSON."""
    text = load(path)
    if text is None:
        text = json.dumps(make(*arguments))
        store(path, text)
    return json.loads(text)


def prune(folder: Path, limit: int = LIMIT) -> None:
    """Remove the least recently used files until a folder is within its limit."""
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
