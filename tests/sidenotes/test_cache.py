"""Cached texts: complete, several versions of each, and within a limit."""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sidenotes import cache
from sidenotes.cache import code_of, load, path_for, prune, store


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


def test_of_python_only_code_counts(tmp_path: Path) -> None:
    one, two, text = (tmp_path / name for name in ("one.py", "two.py", "a.txt"))
    one.write_text('"""Doc."""\ndef f():\n    """More."""\n    return 1  # why\n')
    two.write_text("def f():\n    return 1\n")
    assert code_of(one) == code_of(two)
    two.write_text("def f():\n    return 2\n")
    assert code_of(one) != code_of(two)
    text.write_text("# a comment")
    before = code_of(text)
    text.write_text("# another")
    assert code_of(text) != before
    text.unlink()
    assert code_of(text) == "missing"


@pytest.mark.slow
def test_files_may_be_read_by_several_threads() -> None:
    # Two kernels run at a time, each started by a thread of its own. While one of them
    # parses, the collector of garbage may run, and let the other in.
    gc.callbacks.append(lambda *_: time.sleep(0))
    sources = sorted(Path(cache.__file__).parent.glob("*.py"))

    def read_all(_: int) -> list[str]:
        cache.code.cache_clear()
        return [code_of(path) for path in sources]

    try:
        with ThreadPoolExecutor(max_workers=4) as threads:
            first, *others = threads.map(read_all, range(24))
    finally:
        gc.callbacks.pop()
    assert all(other == first for other in others)
