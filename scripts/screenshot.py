"""Make the picture in the README: the core page, as Chromium shows it.

make build && .venv/bin/python scripts/screenshot.py
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))
from website import BROWSERS  # noqa: E402


def main() -> None:
    """Write `.github/core-page.png` from the built site."""
    browser_path = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox"]
        )
        page = browser.new_page(
            viewport={"width": 1440, "height": 900}, color_scheme="light"
        )
        page.goto((ROOT / "site/source/mha.html").as_uri())
        page.evaluate(
            "document.getElementById('MultiHeadAttention.__init__').scrollIntoView()"
        )
        page.mouse.move(0, 0)
        page.wait_for_timeout(300)
        page.screenshot(path=ROOT / ".github/core-page.png")
        browser.close()


if __name__ == "__main__":
    main()
