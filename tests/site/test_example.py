"""The example site of sidenotes: built from ten lines of configuration, and opened."""

import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser, Page

from website import ROOT, build

EXAMPLE = ROOT / "examples" / "sidenotes"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning of the build is a failure."""
    folder = tmp_path_factory.mktemp("example")
    config = str(EXAMPLE / "mkdocs.yml")
    build(folder / "site", "-f", config, "--no-directory-urls", cwd=folder)
    return folder / "site"


@pytest.fixture
def module(browser: Browser, example: Path) -> Page:
    """The page of the module in a wide window."""
    page = browser.new_page(viewport={"width": 1600, "height": 1000})
    page.goto((example / "source" / "stable.html").as_uri())
    return page


def test_the_configuration_takes_ten_lines() -> None:
    lines = (EXAMPLE / "mkdocs.yml").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 10
    page = (ROOT / "docs" / "sidenotes.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in page


def test_notes_and_code_stand_side_by_side(module: Page) -> None:
    row = module.locator(".sn-section").last
    note = row.locator(".sn-note").bounding_box()
    code = row.locator(".sn-code").bounding_box()
    assert note is not None
    assert code is not None
    assert note["x"] + note["width"] <= code["x"]
    assert abs(note["y"] - code["y"]) < 40
    assert code["width"] > 600


def test_formulas_are_drawn_and_shapes_are_ticked(module: Page) -> None:
    assert module.locator("math").count() >= 3
    assert module.locator(".sn-claim .sn-mark").count() == 4
    column = module.locator(".sn-claim").first
    assert column.evaluate("e => getComputedStyle(e).backgroundColor") == (
        "rgba(0, 0, 0, 0)"
    )


def test_the_script_shows_the_values_of_a_line(module: Page) -> None:
    strip = module.locator(".sn-claim").last
    strip.click()
    assert module.get_by_text("float64").count() > 0
    module.close()


def test_the_lesson_was_executed(example: Path) -> None:
    assert "[[0.09  0.245 0.665]]" in (example / "lesson.html").read_text()


def test_a_saved_note_shows_in_the_served_page(tmp_path: Path) -> None:
    copy = tmp_path / "example"
    shutil.copytree(EXAMPLE, copy)
    note = copy / "src/softmax/stable.py"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "mkdocs", "serve", "--livereload", "-a", address]

    def shows(text: str) -> bool:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with suppress(OSError), urlopen(f"http://{address}/source/stable/") as page:
                if text in page.read().decode():
                    return True
            time.sleep(0.1)
        return False

    with subprocess.Popen(command, cwd=copy, stderr=subprocess.DEVNULL) as server:
        try:
            assert shows("Without this step")
            text = note.read_text(encoding="utf-8")
            note.write_text(text.replace("Without this step", "Without it"))
            assert shows("Without it")
        finally:
            server.terminate()
