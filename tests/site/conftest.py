"""The site, built once and strictly, served, and looked at by a real browser."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from website import ADDRESS, BROWSERS, INDEX, REPOSITORY, ROOT, Quiet, build, serve


def pytest_itemcollected(item: pytest.Item) -> None:
    """All tests of this folder are slow: they need the site, or a browser."""
    item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site as it is published; a warning of the build is a failure.

    `make test` has just built it, and says where; else it is built here.
    """
    if built := os.environ.get("HEADNOTES_SITE"):
        return ROOT / built
    folder = tmp_path_factory.mktemp("site")
    build(folder, SITE_URL=ADDRESS, REPO_URL=REPOSITORY)
    return folder


@contextmanager
def served(site: Path, index: Path) -> Iterator[str]:
    """Where the site is served, below the root as at `ADDRESS`: by a file server."""
    root = urlsplit(ADDRESS).path

    class Host(Quiet):
        def translate_path(self, path: str) -> str:
            if not path.startswith(root):
                return "/no/such/file"
            if path == root + INDEX:
                return str(index)
            return super().translate_path("/" + path.removeprefix(root))

    with serve(Host, site) as address:
        yield address + root.rstrip("/")


@pytest.fixture(scope="session")
def url(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site, but for what a search would find.

    Each page reads all of that when it is opened, which takes longer than all the rest.
    """
    index = json.loads((site / INDEX).read_text(encoding="utf-8"))
    empty = tmp_path_factory.mktemp("search") / "search_index.json"
    empty.write_text(json.dumps(index | {"docs": []}), encoding="utf-8")
    with served(site, empty) as address:
        yield address


@pytest.fixture
def searchable(site: Path) -> Iterator[str]:
    """The whole site."""
    with served(site, site / INDEX) as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium or Chrome, as installed on this machine."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        reason = f"no browser on this machine: none of {', '.join(BROWSERS)}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(f"BROWSER TESTS DID NOT RUN: {reason}")
    options = ["--no-sandbox", "--disable-background-networking"]
    # No process that imitates a GPU: it would paint what the browser can paint itself.
    options += ["--disable-gpu", "--disable-software-rasterizer"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def context(browser: Browser, url: str) -> Iterator[BrowserContext]:
    """A context for all pages. One stays open, and with it the process of all."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    # No page knows what was chosen on another.
    context.add_init_script("if (origin.startsWith('http')) localStorage.clear()")
    context.new_page().goto(f"{url}/404.html")
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A wide, light window."""
    page = context.new_page()
    yield page
    page.close()


# Run the rules of axe. Contrast is most of their work, and a property of how text is
# set and of what lies behind it: texts that are alike in that are looked at once.
FAULTS = """async ([passed, contrastOnly]) => {
  const known = new Set(passed);
  const alike = new Map();
  const sort = (element, around, behind) => {
    const style = getComputedStyle(element);
    const of = (...names) => names.map((name) => style[name]).join(" ");
    const text = of("color", "fontSize", "fontWeight", "textShadow", "position");
    behind += ";" + of("backgroundColor", "backgroundImage", "opacity", "filter");
    behind = behind.replace(/;rgba\\(0, 0, 0, 0\\) none 1 none$/, "");
    const own = [...element.childNodes].filter((n) => n.nodeType === Node.TEXT_NODE);
    if (element.value || own.some((n) => n.data.trim())) {
      const named = [element.localName, element.getAttribute("class")];
      const key = [...named, text, around, behind].join("|");
      if (!known.has(key) && element.checkVisibility()) {
        const others = alike.get(key) ?? [];
        if (others.length < 3) alike.set(key, [...others, element]);
      }
    }
    for (const child of element.children) sort(child, text, behind);
  };
  sort(document.documentElement, "", "");

  const key = new Map([...alike].flatMap(([k, all]) => all.map((e) => [e, k])));
  for (const element of key.keys()) element.dataset.look = "";
  axe.configure({rules: [{id: "color-contrast", selector: "[data-look]"}]});
  // Of code, most of a page, the other rules need the words only.
  const tokens = contrastOnly ? "" : "pre span[class]:not([data-look])";
  for (const token of tokens ? document.querySelectorAll(tokens) : []) {
    if (token.attributes.length + token.children.length === 1)
      token.replaceWith(token.textContent);
  }
  const found = await axe.run({
    resultTypes: ["violations", "passes"], elementRef: true, selectors: false,
    ...contrastOnly && {runOnly: ["color-contrast"]},
  });
  for (const element of key.keys()) delete element.dataset.look;
  const right = found.passes.find((rule) => rule.id === "color-contrast")?.nodes ?? [];
  const wrong = found.violations.flatMap(
    (rule) => rule.nodes.map((node) => `${rule.id}: ${node.html.slice(0, 90)}`)
  );
  return [wrong, [...new Set(right.map((node) => key.get(node.element)))]];
}"""


@pytest.fixture(scope="session")
def faults() -> Callable[..., list[str]]:
    """What axe finds wrong with a page, as it is just now, or with its contrast."""
    passed: set[str] = set()

    def find(page: Page, contrast_only: bool = False) -> list[str]:
        page.evaluate(AXE_SCRIPT)
        wrong, right = page.evaluate(FAULTS, [list(passed), contrast_only])
        passed.update(right)
        return wrong

    return find
