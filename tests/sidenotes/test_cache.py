"""What is kept: whole, once for each name, and only until something changes."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sidenotes import cache
from sidenotes.cache import code_of, keep, place


def test_a_text_takes_the_place_of_what_its_name_kept_before(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    others = [
        place(folder, "a-b", "1" * 64, ".md"),
        place(folder, "a", "1" * 64, ".json"),
    ]
    old, new = place(folder, "a", "1" * 64, ".md"), place(folder, "a", "2" * 64, ".md")
    for path in [*others, old, new]:
        keep(path, f"é {path.name}")
    assert sorted(folder.iterdir()) == sorted([*others, new])
    assert new.read_text(encoding="utf-8") == f"é {new.name}"


def test_a_text_that_cannot_be_written_is_not_kept_in_part(tmp_path: Path) -> None:
    path = place(tmp_path, "a", "1" * 64, ".md")
    with pytest.raises(UnicodeEncodeError):
        keep(path, "whole, or \ud800 not at all")
    assert not path.exists()


def test_of_python_only_code_counts(tmp_path: Path) -> None:
    one, two, text = (tmp_path / name for name in ("one.py", "two.py", "a.txt"))
    one.write_text('"""Doc."""\ndef f():\n    """More."""\n    return 1  # why\n')
    two.write_text("def f():\n    return 1\n")
    assert code_of(one) == code_of(two)
    two.write_text("def f():\n    return 2\n")
    assert code_of(one) != code_of(two)
    text.write_text("# a comment")
    assert code_of(text) == b"# a comment"


def test_files_may_be_read_by_several_threads() -> None:
    # Two kernels run at a time, each started by a thread of its own. While one of them
    # parses, the collector of garbage may run, and let the other in.
    gc.callbacks.append(lambda *_: time.sleep(0))
    sources = sorted(Path(cache.__file__).parent.glob("*.py"))

    def read_all(_: int) -> list[bytes]:
        cache.code.cache_clear()
        return [code_of(path) for path in sources]

    try:
        with ThreadPoolExecutor(max_workers=4) as threads:
            first, *others = threads.map(read_all, range(24))
    finally:
        gc.callbacks.pop()
    assert all(other == first for other in others)
