"""The example site of sidenotes: built from ten lines of configuration, and opened."""

from pathlib import Path

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
