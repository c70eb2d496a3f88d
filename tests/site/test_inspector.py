"""The strip, its card and the inspector: a debugger whose steps are already taken."""

import contextlib
import doctest
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, expect
from torch import Tensor

from headnotes import mha as module
from website import switch_to

CORE = "source/mha.html"
SOURCE = Path(module.__file__).read_text(encoding="utf-8").split("\n")


def number_of(code: str) -> int:
    """The line that begins with `code`, which must be one."""
    found = [n for n, line in enumerate(SOURCE, 1) if line.strip().startswith(code)]
    assert len(found) == 1, found
    return found[0]


ATTN = number_of("attn = self.get_weights(")
SCORES = number_of("scores = self.get_scores(")
PROJECTED = number_of("query = self.query(")
SCALED = number_of("query = query * self.scale")


@pytest.fixture(scope="session")
def example() -> dict[str, Any]:
    """What the example of `forward` holds: run once more, seeded like the site.

    `lines` are those of `forward`, in order, as Python's own tracing reports them.
    """
    torch.manual_seed(2017)
    tests = doctest.DocTestFinder(exclude_empty=True).find(module)
    for test in sorted(tests, key=lambda test: test.lineno or 0):
        lines: list[int] = []

        def follow(
            frame: FrameType, event: str, arg: object, lines: Any = lines
        ) -> Any:
            if frame.f_code is not module.MultiHeadAttention.forward.__code__:
                return None
            if event == "line":
                lines.append(frame.f_lineno)
            return follow

        before = sys.gettrace()
        for part in test.examples:
            with contextlib.redirect_stdout(io.StringIO()):
                sys.settrace(follow)
                try:
                    exec(compile(part.source, "example", "single"), test.globs)
                finally:
                    sys.settrace(before)
        if test.name.endswith(".MultiHeadAttention.forward"):
            return {**test.globs, "lines": lines}
    pytest.fail("`forward` has no example")


def strip(page: Page, line: int) -> Any:
    return page.locator(f".sn-code [data-line='{line}']")


def panel(page: Page) -> Any:
    return page.get_by_role("dialog", name="Inspector")


def middle(target: Any) -> tuple[float, float]:
    box = target.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def shown(page: Page) -> list[list[float]]:
    """The numbers of the cells, row by row, without headings and sums."""
    rows = page.eval_on_selector_all(
        ".sn-values tbody tr",
        "all => all.map(r => [...r.querySelectorAll('td:not(.sn-sum)')]"
        ".map(c => c.textContent))",
    )
    return [[float(text) for text in row] for row in rows]


def rounded(tensor: Tensor) -> list[list[float]]:
    return [[float(f"{x:.4g}") for x in row] for row in tensor.tolist()]


def slide(page: Page, axis: str, value: int) -> None:
    panel(page).get_by_role("slider", name=axis).fill(str(value))


def test_the_values_are_those_of_torch(
    page: Page, url: str, example: dict[str, Any]
) -> None:
    page.goto(f"{url}/{CORE}#L{ATTN}&t=attn")
    attn = example["mha"].attn
    q_len, k_len, batch_size, heads = attn.shape
    assert len({q_len, k_len, batch_size, heads}) == 4
    for b in range(batch_size):
        for h in range(heads):
            slide(page, "batch_size", b)
            slide(page, "heads", h)
            assert shown(page) == rounded(attn[:, :, b, h])
    assert attn.min() == 0  # where the mask forbids
    high = float(attn.max())
    expect(panel(page)).to_contain_text(f"minimum 0, maximum {high:#.4g}")


def test_any_two_axes_can_be_rows_and_columns(
    page: Page, url: str, example: dict[str, Any]
) -> None:
    page.goto(f"{url}/{CORE}#L{ATTN}&t=attn")
    page.get_by_label("rows").select_option("heads")
    page.get_by_label("columns").select_option("q_len")
    slide(page, "k_len", 3)
    slide(page, "batch_size", 1)
    attn = example["mha"].attn
    assert shown(page) == rounded(attn[:, 3, 1, :].T)
    page.get_by_label("rows").select_option("q_len")  # they change places
    assert shown(page) == rounded(attn[:, 3, 1, :])


def test_row_sums_are_right_to_their_last_digit(
    page: Page, url: str, example: dict[str, Any]
) -> None:
    mha = example["mha"]
    query = mha.query(example["x"]) * mha.scale
    for name, tensor, line in (
        ("attn", mha.attn[:, :, 0, 0], ATTN),
        ("query", query[:, 0, 0], SCALED),
    ):
        page.goto("about:blank")
        page.goto(f"{url}/{CORE}#L{line}&t={name}")
        assert shown(page) == rounded(tensor)
        texts = page.locator(".sn-values tbody .sn-sum").all_text_contents()
        for text, total in zip(texts, tensor.double().sum(-1).tolist(), strict=True):
            digits = len(text.partition(".")[2])
            assert abs(float(text) - total) <= 10.0**-digits
            assert digits >= 2


# Press a button until it can do no more, and say each time which line is the current
# one, whether it can be seen, and what is told to who cannot see.
STEPS = """async (name) => {
  const seen = [];
  const look = () => {
    const all = document.querySelectorAll(".sn-code [aria-current='step']");
    const box = all[0].getBoundingClientRect();
    const visible = box.bottom > 0 && box.top < innerHeight;
    const status = document.querySelector(".sn-inspector [role=status]").textContent;
    seen.push([[...all].map((e) => e.id), visible, status]);
  };
  look();
  const button = () => document.querySelector(`.sn-inspector [aria-label='${name}']`);
  while (button().getAttribute("aria-disabled") === "false") {
    button().click();
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    look();
  }
  return seen;
}"""


def test_stepping_visits_the_lines_in_the_order_of_execution(
    page: Page, url: str, example: dict[str, Any]
) -> None:
    lines = example["lines"]
    page.emulate_media(reduced_motion="reduce")  # a line is there at once
    page.goto(f"{url}/{CORE}#L{lines[0]}&t=query")
    expect(page.get_by_role("button", name="Step back")).to_be_visible()
    for name, wanted in (("Step forward", lines), ("Step back", lines[::-1])):
        seen = page.evaluate(STEPS, name)
        assert [current for current, _, _ in seen] == [[f"L{n}"] for n in wanted]
        for (current, visible, status), line in zip(seen, wanted, strict=True):
            assert visible, current
            assert f"line {line}" in status


def test_what_is_alive_is_what_has_been_assigned(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}#L{SCORES}&t=scores")
    alive = page.get_by_role("group", name="Tensors alive").get_by_role("button")
    living = ["query", "key", "value", "mask", "hidden", "scores"]
    assert alive.all_text_contents() == living
    page.keyboard.press("ArrowRight")
    assert alive.all_text_contents()[-1] == "attn"
    page.keyboard.press("ArrowLeft")
    assert alive.all_text_contents()[-1] == "scores"
    # The scaled query, and not the one that came in.
    page.get_by_role("button", name="query", exact=True).click()
    expect(panel(page)).to_contain_text("d_k = 11")


def test_the_keyboard_does_all_of_it(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    page.wait_for_timeout(300)  # what scrolls becomes a tab stop once it is measured
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.line") == str(SCALED):
            break
    page.keyboard.press("ArrowDown")
    expect(strip(page, SCORES)).to_be_focused()
    expect(page.get_by_role("tooltip")).to_contain_text("scores float32, q_len = 3")
    page.keyboard.press("Enter")
    expect(panel(page)).to_be_focused()
    expect(page.get_by_role("tooltip")).to_be_hidden()
    page.keyboard.press("ArrowRight")
    expect(panel(page)).to_contain_text(f"line {ATTN}; attn is [q_len, k_len")
    page.wait_for_timeout(300)
    reached = []
    for _ in range(16):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "document.activeElement.dataset.key || "
                "document.activeElement.getAttribute('aria-label')"
            )
        )
    wanted = ["Step back", "Step forward", "Close the inspector"]
    wanted += ["query", "key", "value", "mask", "hidden", "scores", "attn"]
    wanted += ["rows", "columns"]
    wanted += ["at2", "at3", "Values of attn"]
    assert reached[: len(wanted)] == wanted
    panel(page).get_by_role("slider", name="heads").focus()
    page.keyboard.press("ArrowRight")  # moves the slider, not the step
    expect(page.locator(".sn-controls label:last-child > span")).to_have_text("1")
    expect(panel(page)).to_contain_text(f"line {ATTN};")
    page.keyboard.press("Escape")
    expect(panel(page)).to_have_count(0)
    expect(strip(page, SCORES)).to_be_focused()


def test_focus_that_scrolls_the_page_keeps_its_card(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    page.wait_for_timeout(300)
    strip(page, ATTN).focus()  # far below what the window shows
    page.wait_for_function("scrollY > 0")
    tooltip = page.get_by_role("tooltip")
    for way in (0, 30, -60):
        page.mouse.wheel(0, way)
        page.wait_for_timeout(200)
        expect(tooltip).to_contain_text("attn float32")
        line, card = strip(page, ATTN).bounding_box(), tooltip.bounding_box()
        gap = card["y"] - (line["y"] + line["height"])
        assert 0 <= gap < 12 or 0 <= line["y"] - (card["y"] + card["height"]) < 12
    page.keyboard.press("Shift+Tab")
    expect(tooltip).not_to_contain_text("attn float32")


def test_a_link_carries_the_state(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    strip(page, ATTN).click()
    page.get_by_role("button", name="scores", exact=True).click()
    assert page.evaluate("location.href").endswith(f"#L{ATTN}&t=scores")
    text = panel(page).inner_text()
    link = page.evaluate("location.href")
    page.goto("about:blank")
    page.goto(link)
    expect(panel(page)).to_be_visible()
    assert panel(page).inner_text() == text
    page.wait_for_timeout(600)
    expect(page.locator(f"#L{ATTN}")).to_be_in_viewport()
    page.keyboard.press("Escape")
    assert page.evaluate("location.href").endswith(f"#L{ATTN}")


def test_a_link_to_nothing_opens_nothing_and_one_to_an_unknown_tensor_the_line(
    page: Page, url: str
) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    # The first opens the page, the others change the address of the open page.
    for state in ("#L9999&t=attn", "#L1&t=x", "#Lx&t=", "#L170"):
        page.goto(f"{url}/{CORE}{state}")
        page.wait_for_timeout(200)
        expect(panel(page)).to_have_count(0)
    for rest in ("t=nothing", "t=%E0%A4%A", "t=", "t=attn&n=99"):
        page.goto(f"{url}/{CORE}#L{ATTN}&{rest}")
        expect(panel(page)).to_contain_text(f"line {ATTN}; attn is")
        expect(page.get_by_role("button", name="attn", pressed=True)).to_be_visible()
        page.keyboard.press("Escape")
        expect(panel(page)).to_have_count(0)
    assert errors == []


def test_a_variable_shows_its_uses_and_its_card(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    line = page.locator(f"#L{PROJECTED}")  # query = self.query(query)
    new, _, old = line.locator(".n", has_text=re.compile("^query$")).all()
    for token, width in ((new, "heads = 7, d_k = 11"), (old, "d_model = 77")):
        page.mouse.move(0, 0)
        token.scroll_into_view_if_needed()
        page.wait_for_timeout(200)
        token.hover()
        card = page.get_by_role("tooltip")
        expect(card).to_contain_text("query float32, q_len = 3")
        expect(card).to_contain_text(width)
    uses = page.eval_on_selector_all(
        ".sn-use", "all => all.map(e => e.closest('[id^=L]').id)"
    )
    wanted = [f"L{n}" for n in (PROJECTED, SCALED, SCORES)]
    assert set(wanted) <= set(uses)
    outside = number_of("def get_scores(")
    assert all(int(use[1:]) < outside for use in uses)


def test_the_page_says_what_can_be_done_with_its_shapes(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    legend = page.locator(".sn-legend")
    expect(legend).to_contain_text("\u2713 marks a shape comment")
    expect(legend).to_contain_text("Click a shape to step through the run")
    button = page.get_by_role("button", name="Step through")
    expect(button).to_be_in_viewport()
    button.click()
    expect(panel(page)).to_be_focused()
    expect(panel(page)).to_contain_text("MultiHeadAttention.forward")
    expect(panel(page)).to_contain_text("Step 1 of")
    page.keyboard.press("Escape")
    expect(button).to_be_focused()
    page.goto(f"{url}/source/cli.html")  # without shapes
    expect(page.locator(".sn-legend, .sn-step")).to_have_count(0)


def test_one_escape_closes_all(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    page.get_by_role("button", name="Try other sizes").click()
    strip(page, ATTN).click()
    line = page.locator(f"#L{PROJECTED} .n").first
    line.scroll_into_view_if_needed()
    line.hover()
    sizes = page.locator(".sn-foot.sn-open")
    card = page.get_by_role("tooltip")
    for part in (panel(page), sizes, card):
        expect(part).to_be_visible()
    page.keyboard.press("Escape")
    expect(panel(page)).to_have_count(0)
    expect(sizes).to_have_count(0)
    expect(card).to_be_hidden()


def test_no_card_opens_under_a_pointer_that_rests(page: Page, url: str) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.goto(f"{url}/{CORE}#L{PROJECTED}&t=query")
    card = page.get_by_role("tooltip")
    scroll = "top => scrollBy({top, behavior: 'instant'})"
    for target in (strip(page, SCALED), page.locator(f"#L{SCALED} .n").first):
        page.evaluate(scroll, target.bounding_box()["y"] - 200)
        x, y = middle(target)
        page.mouse.move(x, y + 200)
        page.evaluate(scroll, -200)
        page.wait_for_timeout(500)  # the browser notes what lies under the pointer now
        assert middle(target) == (x, y + 200)
        expect(card).to_be_hidden()
        page.mouse.move(x + 1, y + 200)
        expect(card).to_contain_text("query float32")


def test_the_open_inspector_is_accessible(
    page: Page, url: str, faults: Callable[..., list[str]]
) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.goto(f"{url}/{CORE}#L{ATTN}&t=attn")
    for scheme, width in [("dark", 1440), ("light", 390)]:
        switch_to(page, scheme)
        page.set_viewport_size({"width": width, "height": 900})
        expect(panel(page)).to_be_visible()
        assert faults(page, contrast_only=scheme == "dark") == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_who_wants_no_motion_gets_none(page: Page, url: str) -> None:
    def moves(motion: Any) -> bool:
        page.emulate_media(reduced_motion=motion)
        page.goto("about:blank")
        page.goto(f"{url}/{CORE}")
        page.evaluate("document.querySelector('.sidenotes').scrollIntoView()")
        asked = page.evaluate(
            """line => {
              let asked = [];
              const scrollBy = window.scrollBy;
              window.scrollBy = options => asked.push(options.behavior);
              location.hash = `#L${line}&t=attn`;
              return new Promise(r => setTimeout(() => r(asked), 200));
            }""",
            ATTN,
        )
        assert len(asked) == 1
        return bool(asked[0] == "smooth")

    assert moves("no-preference")
    assert not moves("reduce")


def test_a_first_tap_shows_the_card_and_a_second_one_opens(
    browser: Browser, url: str
) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 900}, has_touch=True, is_mobile=True
    )
    page = context.new_page()
    page.goto(f"{url}/{CORE}")
    strip(page, SCALED).scroll_into_view_if_needed()
    page.wait_for_timeout(300)
    strip(page, SCALED).tap()
    expect(page.get_by_role("tooltip")).to_contain_text("query float32")
    expect(panel(page)).to_have_count(0)
    strip(page, SCALED).tap()
    expect(panel(page)).to_be_visible()
    context.close()


def test_it_works_from_a_folder(browser: Browser, site: Path) -> None:
    page = browser.new_page()
    page.goto(f"{(site / CORE).as_uri()}#L{ATTN}&t=attn")
    expect(panel(page)).to_contain_text("q_len = 3, k_len = 5")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(panel(page)).to_contain_text("self.attn is")
    page.close()


def test_without_script_the_strip_is_text(browser: Browser, url: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{url}/{CORE}")
    expect(strip(page, SCALED)).to_have_text("[q_len, batch_size, heads, d_k]")
    expect(strip(page, SCALED)).to_be_visible()
    expect(strip(page, ATTN)).to_have_text("# [q_len, k_len, batch_size, heads]")
    context.close()


@pytest.mark.parametrize("name", ["mha", "implementations/stages"])
def test_no_shape_lies_over_code(page: Page, url: str, name: str) -> None:
    page.goto(f"{url}/source/{name}.html")
    for width in (390, 1000, 1440, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        gaps = page.eval_on_selector_all(
            "samp.sn-shape",
            """all => all.filter(shape => shape.checkVisibility()).map(shape => {
              const b = shape.getBoundingClientRect();
              const tokens = [...shape.parentElement.children].filter(t => t !== shape);
              const boxes = tokens.flatMap(token => [...token.getClientRects()]);
              const level = boxes.filter(a => a.top < b.bottom && a.bottom > b.top);
              return b.left - Math.max(0, ...level.map(a => a.right));
            })""",
        )
        assert len(gaps) > 3
        assert min(gaps) > 6


def test_shapes_are_shown_once_and_not_copied_with_the_code(
    page: Page, url: str
) -> None:
    page.goto(f"{url}/{CORE}")
    both = page.evaluate(
        "[...document.querySelectorAll('.sn-claim')]"
        ".filter(c => c.closest('[id]').nextSibling?.matches?.('.sn-shape')).length"
    )
    assert both == 0
    block = page.locator(f".sn-code:has(#L{SCALED})")
    selected = block.evaluate(
        "e => { getSelection().selectAllChildren(e); return `${getSelection()}` }"
    )
    assert selected.rstrip("\n").split("\n") == SOURCE[SCALED - 1 : SCORES]


def test_the_data_of_a_page_can_be_read_back(site: Path) -> None:
    shapes = 0
    for path in (site / "source").rglob("*.html"):
        html = path.read_text(encoding="utf-8")
        shapes += html.count(" data-line=")
        for text in re.findall(r'class="sn-data">(.*?)</script>', html, re.DOTALL):
            data = json.loads(text)
            assert data["calls"]
            for call in data["calls"]:
                for value in [v for step in call["steps"] for v in step["values"]]:
                    assert len(value["axes"]) == len(value["sizes"])
    assert shapes > 300
