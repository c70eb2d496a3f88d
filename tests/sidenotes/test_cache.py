"""Cached texts: complete, several versions of each, and within a limit."""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sidenotes import cache
from sidenotes.cache import Memory, code_in, load, path_for, prune, store


def test_each_version_of_a_text_is_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    paths = [path_for(folder, "a", key * 64, ".md") for key in "12"]
    assert load(paths[0]) is None
    for path in paths:
        store(path, f"é {path.name}\r\n".replace("\r", ""))
    assert [load(path) for path in paths] == [f"é {path.name}\n" for path in paths]
    assert sorted(folder.iterdir()) == sorted(paths)


def test_what_was_not_used_for_longest_is_removed_first(tmp_path: Path) -> None:
    old, used, new = paths = [tmp_path / name for name in ("old", "used", "new")]
    for age, path in enumerate(paths):
        store(path, 10 * "x")
        os.utime(path, (age, age))
    load(used)
    prune(tmp_path, limit=30)
    assert all(path.exists() for path in paths)
    prune(tmp_path, limit=29)
    assert [path.exists() for path in paths] == [False, True, True]
    prune(tmp_path, limit=10)
    assert [path.exists() for path in (old, used, new)] == [False, True, False]


def test_a_text_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = path_for(tmp_path, "a", "1" * 64, ".md")
    with pytest.raises(UnicodeEncodeError):
        store(path, "whole, or \ud800 not at all")
    assert not list(tmp_path.iterdir())


def test_docstrings_and_comments_are_no_code() -> None:
    noted = '"""Doc."""\ndef f():\n    """More."""\n    return 1  # why\n'
    assert code_in(noted) == code_in("def f():\n    return 1\n")
    assert code_in(noted) != code_in("def f():\n    return 2\n")


def test_a_value_is_computed_once_for_each_text(tmp_path: Path) -> None:
    computed = []

    def double(text: str, more: str = "") -> list[str]:
        computed.append(text + more)
        return [text, text]

    memory = Memory(tmp_path)
    assert memory(double, "a") == memory(double, "a") == ["a", "a"]
    memory(double, "b")
    memory(double, "a", "b")
    memory.save()
    assert computed == ["a", "b", "ab"]
    for text in ("a", "c"):
        memory = Memory(tmp_path)
        assert memory(double, text) == [text, text]
        memory.save()
    assert computed == ["a", "b", "ab", "c"]
    # Only what the last build used is kept.
    Memory(tmp_path)(double, "a")
    assert computed == ["a", "b", "ab", "c", "a"]


@pytest.mark.slow
def test_sources_may_be_parsed_by_several_threads() -> None:
    # Two kernels run at a time, each started by a thread of its own. While one of them
    # parses, the collector of garbage may run, and let the other in.
    gc.callbacks.append(lambda *_: time.sleep(0))
    sources = [path.read_text() for path in Path(cache.__file__).parent.glob("*.py")]
    memory = [Memory() for _ in range(12)]

    def parse_all(number: int) -> list[str]:
        return [memory[number](code_in, source) for source in sources]

    try:
        with ThreadPoolExecutor(max_workers=4) as threads:
            first, *others = threads.map(parse_all, range(12))
    finally:
        gc.callbacks.pop()
    assert all(other == first for other in others)
