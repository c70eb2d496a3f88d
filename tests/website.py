"""The site for tests: built strictly, served, and read as text."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path

from playwright.sync_api import Page, expect

ROOT = Path(__file__).parent.parent
INDEX = "search/search_index.json"

# Where the site is published, and the repository: as in the Makefile.
ADDRESS = os.environ.get("SITE_URL", "http://headnotes.example/project/")
REPOSITORY = os.environ.get("REPO_URL", "https://github.com/someone/headnotes")

# The first needs less than half of the time of the others, which draw windows as well.
BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)


def build(folder: Path, *options: str, cwd: Path = ROOT, **environment: str) -> None:
    """Build a site into `folder`; a warning of the build is a failure."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    result = subprocess.run(
        [*command, *options],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A plain file server that prints nothing."""

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serve(handler: type[Quiet], folder: Path) -> Iterator[str]:
    """The address at which `handler` serves a folder."""
    bound = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), bound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def switch_to(page: Page, scheme: str) -> None:
    """Choose `light` or `dark` by the button in the header, unless it is chosen."""
    page.evaluate(
        "title => document.querySelector(`.md-header [title='${title}']:not([hidden])`)"
        "?.click()",
        f"Switch to {scheme}",
    )
    name = {"light": "default", "dark": "slate"}[scheme]
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", name)
    end_transitions(page)


def end_transitions(page: Page) -> None:
    """Bring all transitions to their end, so that no color lies between two schemes.

    Nothing waits for them: one that is paused, or that goes on for ever, never ends.
    """
    page.evaluate(
        """document.getAnimations().forEach((one) => {
          if (one.effect.getComputedTiming().endTime < Infinity) one.finish();
        })"""
    )


def text_of(html: str) -> str:
    """The text of a page, without its markup."""
    return unescape(re.sub(r"<[^>]*>", "", html))


def code_lines(html: str) -> dict[int, str]:
    """The lines that a page shows as code, as their reader would copy them."""
    line = r'<span id="L(\d+)"[^>]*><a [^>]*></a>(.*?)(?:<samp .*</samp>)?\n</span>'
    return {int(n): text_of(line) for n, line in re.findall(line, html)}
