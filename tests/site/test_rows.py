"""The rows of an annotated source: notes beside their code, and what is folded."""

import pytest
from playwright.sync_api import Browser, Page, expect

from headnotes.cli import modules

CORE = "source/mha.html"
ROWS = ["mha", "implementations/stages", "implementations/causal"]

# The height of the column of code, and how much of it holds no line. The padding above
# and below the lines of a row, the same in each, is not empty.
EMPTY = """() => {
  let [empty, height] = [0, 0];
  for (const row of document.querySelectorAll(".sn-section")) {
    if (!row.checkVisibility()) continue;
    const lines = [...row.querySelectorAll(".sn-code > span")];
    const box = e => e.getBoundingClientRect();
    const padding = lines.length && 24;
    const filled = lines.length && box(lines.at(-1)).bottom - box(lines[0]).top;
    height += box(row).height;
    empty += box(row).height - filled - padding;
  }
  return [empty, height];
}"""


@pytest.mark.parametrize("name", ROWS)
def test_code_and_shapes_fit_into_their_column_of_which_little_is_empty(
    page: Page, url: str, name: str
) -> None:
    page.goto(f"{url}/source/{name}.html")
    empty, height = page.evaluate(EMPTY)
    print(f"{name}: {empty / height:.1%} of {height:.0f} px are empty")
    assert height > 1500
    assert empty <= 0.15 * height
    for width in (390, 1000, 1280, 1440, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        wide = page.eval_on_selector_all(
            ".sn-code",
            "all => all.filter(e => e.scrollWidth > e.clientWidth)"
            ".map(e => `${innerWidth} px: ${e.innerText}`)",
        )
        assert wide == []
        outside = page.eval_on_selector_all(
            ".sn-claim, .sn-shape",
            """all => all.filter(e => e.checkVisibility()).filter(e => {
              const [inner, outer] = [e, e.closest(".sn-code")].map(
                e => e.getBoundingClientRect());
              return inner.left < outer.left || inner.right > outer.right
                || inner.right > innerWidth;
            }).map(e => `${innerWidth} px: ${e.textContent}`)""",
        )
        assert outside == []


def line_of(text: str) -> int:
    """The number of the first line of the core that contains `text`."""
    lines = modules()["mha"].read_text(encoding="utf-8").split("\n")
    return next(n for n, line in enumerate(lines, 1) if text in line)


FOLDED = {
    "example": ">>> mha.attn.sum(",
    "error": "Raises `ValueError` where",
    "check": "def check_settings(",
}


@pytest.mark.parametrize("javascript", [True, False])
def test_a_link_to_what_is_folded_opens_it(
    browser: Browser, url: str, javascript: bool
) -> None:
    context = browser.new_context(java_script_enabled=javascript)
    page = context.new_page()
    page.goto(f"{url}/{CORE}")
    lines = {what: line_of(text) for what, text in FOLDED.items()}
    for line in lines.values():
        expect(page.locator(f"details:has(#L{line})")).not_to_have_attribute("open", "")
    for what, line in lines.items():
        target = page.locator(f"#L{line}")
        fold = page.locator(f"details:has(#L{line})")
        fold.evaluate("e => { e.open = false }")
        page.goto(f"{url}/{CORE}#L{line}")
        expect(fold).to_have_js_property("open", True)
        page.wait_for_timeout(200)
        box = target.bounding_box()
        assert box is not None
        assert 0 < box["y"] < 720, what
    context.close()


def test_a_link_to_a_value_in_a_folded_check_opens_it(page: Page, url: str) -> None:
    line = line_of("for name, x in inputs.items():")
    page.goto(f"{url}/{CORE}#L{line}&t=x")
    expect(page.get_by_role("dialog", name="Inspector")).to_be_visible()
    page.wait_for_timeout(600)
    expect(page.locator(f"#L{line}")).to_be_in_viewport()


def test_what_is_folded_opens_by_keyboard(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    summary = page.locator(".sn-contract > summary").first
    summary.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("torch.Size([7, 3, 5, 2])", exact=True)).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.get_by_text("torch.Size([7, 3, 5, 2])", exact=True)).to_be_hidden()


@pytest.mark.parametrize("javascript", [True, False])
def test_what_is_folded_is_printed(
    browser: Browser, url: str, javascript: bool
) -> None:
    context = browser.new_context(java_script_enabled=javascript)
    page = context.new_page()
    page.goto(f"{url}/{CORE}")
    shown = page.get_by_text("torch.Size([7, 3, 5, 2])", exact=True)
    assert not shown.is_visible()
    page.emulate_media(media="print")
    page.wait_for_timeout(200)
    check = page.locator(f"#L{line_of('def check_settings(')}")
    for part in (shown, check):
        box = part.bounding_box()
        assert box is not None
        assert box["height"] > 5
    context.close()
