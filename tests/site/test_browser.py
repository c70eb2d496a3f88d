"""The site as people use it: in Chromium, wide and narrow, with and without script."""

import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect

from headnotes.cli import edition, modules
from website import end_transitions, switch_to

LESSON = "learn/00_a_first_look.html"
CORE = "source/mha.html"
SHOWN = ["index.html", CORE, LESSON, "compare/differences.html"]
# One page of each kind: each page costs seconds, and those of a kind are made by one
# template. `test_build.py` looks at the files of all pages.
KINDS = [
    *SHOWN,
    "learn/05_embeddings_and_positional_encoding.html",  # pictures, the largest lesson
    "source/cli.html",  # a module without shapes
    "source/tests/test_mha.html",
    "glossary.html",  # Markdown, with a long table of contents
    "notation.html",  # tables of formulas and code, on one sheet of paper
    "start.html",
    "exercises/10_multi_head_attention.html",  # by mkdocs-jupyter
    "compare/errata.html",  # Markdown
    "compare/masks.html",  # with a program of its own
    "attention_explorer.html",  # with another
    "compare/museum.html",
    "compare/benchmarks.html",
    "reference/attention_laws.html",
    "404.html",
]

# What a page does by itself while it loads and settles.
LAYOUT_SHIFT = """() => new Promise(resolve => {
  let shift = 0;
  new PerformanceObserver(list => {
    for (const entry of list.getEntries()) shift += entry.value;
  }).observe({type: "layout-shift", buffered: true});
  const loaded = performance.getEntriesByType("navigation")[0].loadEventEnd;
  setTimeout(() => resolve(shift), Math.max(50, loaded + 300 - performance.now()));
})"""


def listen(page: Page, host: str) -> list[str]:
    """What a page complains of or asks from elsewhere, as it comes."""
    heard: list[str] = []
    page.on("console", lambda m: heard.append(f"console: {m.type}: {m.text}"))
    page.on("pageerror", lambda error: heard.append(f"error: {error}"))
    page.on(
        "request",
        lambda r: heard.append(f"request: {r.url}") if host not in r.url else None,
    )
    page.on(
        "response",
        lambda r: heard.append(f"{r.status}: {r.url}") if r.status > 399 else None,
    )
    return heard


# Click each shape, and look whether the inspector shows its line and values.
OPEN_SHAPES = """() => {
  const wrong = [];
  for (const shape of document.querySelectorAll(".sn-code [data-line]")) {
    shape.click();
    const panel = document.querySelector(".sn-inspector");
    const line = panel?.querySelector("[role=status]").textContent;
    if (!line?.includes(`line ${shape.dataset.line};`)) wrong.push(line);
    const values = panel?.querySelector(".sn-values");
    if (!values?.textContent) wrong.push("empty");
  }
  return wrong;
}"""


# What is wider than its box, and where the box either hides the rest or scrolls without
# a shadow at its edge. (Boxes for screen readers are one pixel wide.)
CLIPPED = """() => [...document.querySelectorAll("article, article *")].filter(e => {
  if (!(e instanceof HTMLElement) || e.clientWidth < 2 || !e.checkVisibility()) return;
  const style = getComputedStyle(e);
  return e.scrollWidth > e.clientWidth + 1 && style.overflowX !== "visible"
    && !(style.overflowX === "auto" && style.backgroundAttachment.includes("local"));
}).map(e => `${innerWidth} px: ${e.outerHTML.slice(0, 90)}`)"""


LIGHTNESS = """() => getComputedStyle(document.body).backgroundColor
  .match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0)"""


def open_still(page: Page, address: str) -> None:
    """Open a page, which must not move while it loads."""
    page.goto(address)
    for _ in range(3):
        shift = page.evaluate(LAYOUT_SHIFT)
        if round(shift, 3) == 0:
            return
        # A busy machine may paint a page before all of it has come. What a page does by
        # itself, it does each time.
        page.reload()
    raise AssertionError(f"the page moves each time that it is loaded, by {shift}")


def look_at(page: Page, width: int, scheme: str) -> None:
    """Nothing is wider than the window or than its box."""
    switch_to(page, scheme)
    page.set_viewport_size({"width": width, "height": 900})
    end_transitions(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CLIPPED) == []


@pytest.mark.parametrize("name", KINDS)
def test_pages_are_sound(
    page: Page, url: str, faults: Callable[..., list[str]], name: str
) -> None:
    heard = listen(page, url.split("/")[2])
    page.emulate_media(color_scheme="dark")
    open_still(page, f"{url}/{name}")
    assert page.evaluate(LIGHTNESS) < 200
    # At 1280, a page with the table of contents beside it has least room.
    look_at(page, 1280, "dark")
    if name == CORE:  # a page with two columns, and its contents in the navigation
        expect(page.locator(".md-sidebar--secondary")).to_be_hidden()
        expect(
            page.locator(".md-sidebar--primary").get_by_text("get_scores")
        ).to_be_visible()
        look_at(page, 820, "light")
        look_at(page, 390, "dark")
    for scheme in ("light", "dark") if name == CORE else ("dark",):
        look_at(page, 1440, scheme)
        # Of the rules, that of contrast alone depends on the colors.
        assert faults(page, contrast_only=True) == []
    look_at(page, 390, "light")
    assert page.evaluate(LIGHTNESS) > 600
    assert faults(page) == []
    assert page.evaluate(OPEN_SHAPES) == []
    assert heard == []


def test_narrow_pages_do_not_move_while_they_load(page: Page, url: str) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    for name in SHOWN:
        open_still(page, f"{url}/{name}")
        assert page.evaluate(LIGHTNESS) > 600


IN_LESSON = ["div:not(.lesson-output) > pre > code", ".lesson-output code"]


@pytest.mark.parametrize(
    ("name", "boxes"),
    [
        (LESSON, [*IN_LESSON, ".lesson-figure"]),
        ("compare/differences.html", [".md-typeset__scrollwrap"]),
    ],
)
def test_a_shadow_shows_at_an_edge_where_more_is_hidden(
    page: Page, url: str, name: str, boxes: list[str]
) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto(f"{url}/{name}")
    page.wait_for_timeout(300)
    # Text and lines are made invisible, so that backgrounds remain.
    page.add_style_tag(
        content="article * { color: transparent !important;"
        " border-color: transparent !important } .lesson-figure svg { opacity: 0 }"
    )
    page.add_style_tag(content=".md-code__nav, .sn-mark { visibility: hidden }")

    def brightness(scroller: Locator, left: float) -> list[int]:
        """Of the left edge, the middle and the right edge, as scrolled to `left`."""
        scroller.evaluate("(e, left) => e.scrollLeft = left * e.scrollWidth", left)
        box = scroller.bounding_box()
        assert box is not None
        edges = box["x"] + 3, box["x"] + 150, box["x"] + box["width"] - 4
        y = box["y"] + box["height"] / 2
        shots = [
            page.screenshot(clip={"x": x, "y": y, "width": 1, "height": 1})
            for x in edges
        ]
        pixels = [Image.open(BytesIO(shot)).convert("L") for shot in shots]
        return [pixel.getpixel((0, 0)) for pixel in pixels]

    wide = "e => e.scrollWidth > e.clientWidth + 60"
    for box in boxes:
        of_kind = page.locator(f"article {box}").all()
        scroller = next(each for each in of_kind if each.evaluate(wide))
        scroller.evaluate("e => e.scrollIntoView({block: 'center'})")
        for scheme in ("light", "dark"):
            switch_to(page, scheme)
            left, middle, right = brightness(scroller, 0)
            assert abs(left - middle) < 3, (box, scheme)
            assert abs(right - middle) > 20, (box, scheme)
            left, middle, right = brightness(scroller, 1)
            assert abs(left - middle) > 20, (box, scheme)
            assert abs(right - middle) < 3, (box, scheme)


# The smallest text of the figures, in pixels of the screen.
SMALLEST = """() => Math.min(...[...document.querySelectorAll(".lesson-figure text")]
  .filter(text => text.textContent.trim()).map(text => {
    const {a, b} = text.getScreenCTM();
    return parseFloat(getComputedStyle(text).fontSize) * Math.hypot(a, b);
  }))"""


def test_the_labels_of_all_figures_can_be_read_on_a_phone(
    page: Page, url: str, site: Path
) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    page.route("**/*.js", lambda route: route.abort())  # no figure needs a script
    smallest = {}
    for path in sorted(site.rglob("*.html")):
        if "lesson-figure" in path.read_text(encoding="utf-8"):
            name = path.relative_to(site).as_posix()
            page.goto(f"{url}/{name}", wait_until="domcontentloaded")
            smallest[name] = page.evaluate(SMALLEST)
    print(smallest)
    assert len(smallest) > 8
    assert [name for name, size in smallest.items() if size < 9] == []


@pytest.mark.parametrize("name", [CORE, "learn/02_queries_keys_and_values.html"])
def test_formulas_are_set_in_the_font_of_the_site(
    page: Page, url: str, name: str
) -> None:
    page.goto(f"{url}/{name}")
    page.wait_for_timeout(300)
    session = page.context.new_cdp_session(page)
    session.send("DOM.enable")
    session.send("CSS.enable")
    root = session.send("DOM.getDocument")["root"]["nodeId"]
    of = {"nodeId": root, "selector": "math :is(mi, mn, mo, mtext)"}
    parts = session.send("DOM.querySelectorAll", of)["nodeIds"]
    assert len(parts) > 30
    fonts = [
        (font["familyName"], font["isCustomFont"])
        for part in parts
        for font in session.send("CSS.getPlatformFontsForNode", {"nodeId": part})[
            "fonts"
        ]
    ]
    assert set(fonts) == {("STIX Two Math", True)}


def test_code_of_a_lesson_can_be_copied_and_output_cannot(
    browser: Browser, url: str
) -> None:
    context = browser.new_context()
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(f"{url}/{LESSON}")
    blocks = page.locator("article .highlight:not(.lesson-output)")
    assert blocks.count() > 3
    for block in blocks.all():
        if block.is_visible():  # others are folded
            block.hover()
            block.locator("button").click()
            copied = page.evaluate("navigator.clipboard.readText()")
            assert copied.strip() == block.locator("code").inner_text().strip()
    for button in page.locator(".lesson-output button").all():
        assert not button.is_visible()
    context.close()


def test_the_excerpt_on_the_home_page_can_be_inspected(page: Page, url: str) -> None:
    page.goto(f"{url}/index.html")
    shapes = page.locator(".sn-code [data-line]")
    assert shapes.count() > 1
    shapes.last.click()
    expect(page.get_by_role("dialog", name="Inspector")).to_be_visible()
    expect(page.locator(".sn-values")).to_contain_text(re.compile(r"\d\.\d"))


# The boxes of each note and of its code.
NOTES = """() => [...document.querySelectorAll(".sn-section:has(.sn-note > p)")]
  .filter((section) => section.checkVisibility())
  .map((section) => [".sn-note", ".sn-code"].map(
    (part) => section.querySelector(part).getBoundingClientRect().toJSON()
  ))"""


def test_notes_stand_beside_code_from_60_rem_and_above_it_below(
    page: Page, url: str
) -> None:
    page.goto(f"{url}/{CORE}")
    for width, columns in ((959, 1), (960, 2), (1440, 2)):
        page.set_viewport_size({"width": width, "height": 900})
        sections = page.evaluate(NOTES)
        assert len(sections) > 15
        for note, code in sections:
            if columns == 2:
                assert note["right"] < code["x"]
                assert abs(note["y"] - code["y"]) < 1
            else:
                assert note["x"] == code["x"]
                assert note["bottom"] <= code["y"]


def test_the_page_shows_every_line_of_the_source_once(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    source = modules()["mha"].read_text(encoding="utf-8").split("\n")[:-1]
    ids = page.eval_on_selector_all("[id^=L]", "all => all.map(e => e.id)")
    numbers = sorted(int(i[1:]) for i in ids if re.fullmatch(r"L\d+", i))
    assert numbers == list(range(1, len(source) + 1))
    shown = page.eval_on_selector_all(
        ".sn-code > span",
        "all => all.map(e => [e.id, [...e.childNodes]"
        ".filter(n => n.localName !== 'samp').map(n => n.textContent).join('')])",
    )
    for name, text in shown:
        assert text == source[int(name[1:]) - 1] + "\n"
    code = [line for line in source if line.strip()]
    assert len(shown) > len(code) / 2


@pytest.mark.parametrize("anchor", ["L42", "MultiHeadAttention.forward"])
def test_a_link_to_a_line_or_symbol_shows_it(page: Page, url: str, anchor: str) -> None:
    page.goto(f"{url}/{CORE}#{anchor}")
    page.wait_for_timeout(300)
    header = page.locator(".md-header").bounding_box()
    target = page.evaluate(
        "id => document.getElementById(id).getBoundingClientRect().top", anchor
    )
    assert header is not None
    assert header["height"] <= target < 900


def test_the_buttons_copy_what_the_command_line_copies(
    browser: Browser, url: str
) -> None:
    context = browser.new_context()
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(f"{url}/{CORE}")
    for label, plain in (("Copy module", False), ("Copy without notes", True)):
        page.get_by_role("button", name=label).click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied == edition(modules()["mha"], plain=plain)
        expect(page.get_by_role("button", name=label)).to_be_visible()
    page.goto(f"{url}/source/masks/build.html")
    for label, name in (("build.py", "masks/build"), ("checks.py", "checks")):
        page.get_by_role("button", name=f"Copy {label}").press("Space")
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied == edition(modules()[name])
        expect(page.get_by_role("button", name=f"Copy {label}")).to_be_visible()
    context.close()


def test_the_module_can_be_downloaded_and_without_script_a_button_leads_to_it(
    browser: Browser, url: str
) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{url}/{CORE}")
    for label, plain in (("Copy without notes", True), ("Download .py", False)):
        link = page.get_by_role("link", name=label)
        response = page.request.get(f"{url}/source/{link.get_attribute('href')}")
        assert response.text() == edition(modules()["mha"], plain=plain)
    context.close()


@pytest.mark.parametrize("name", SHOWN)
def test_pages_are_complete_without_script(
    browser: Browser, page: Page, url: str, name: str
) -> None:
    def text(page: Page) -> str:
        content = page.locator("article").inner_text()
        buttons = "Step through|Try other sizes|Click a shape[^.]*[.]"
        return re.sub(rf"{buttons}|\s", "", content)

    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    for each in (plain, page):
        each.goto(f"{url}/{name}")
    assert text(plain) == text(page)
    assert len(text(plain)) > 1000
    for button in plain.locator(".sn-bar button").all():
        assert not button.is_visible()  # it could do nothing
    context.close()


def test_the_site_works_from_a_folder(page: Page, site: Path) -> None:
    complaints = listen(page, "")
    page.goto(f"{site.as_uri()}/index.html")
    page.get_by_role("link", name="core module, line by line").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("sequence first")
    width = page.locator(".sn-section .sn-code").first.bounding_box()
    assert width is not None
    assert width["x"] > 400  # the style sheets have loaded
    # Two things need a server: searching, which runs in a worker, and to load a font
    # ahead of its use.
    served = ("search_index", "math.woff2")
    complaints = [c for c in complaints if not any(name in c for name in served)]
    page.wait_for_function("[...document.fonts].every(f => f.status === 'loaded')")
    assert not [c for c in complaints if "http" in c or c.startswith("error")]


def test_search_finds_a_method_and_leads_to_it(page: Page, searchable: str) -> None:
    heard = listen(page, searchable.split("/")[2])
    page.goto(
        f"{searchable}/index.html", wait_until="networkidle"
    )  # the index is on its way
    page.get_by_role("textbox", name="Search").press_sequentially("get_scores")
    found = page.locator(
        ".md-search-result__link[href$='#MultiHeadAttention.get_scores']"
    )
    expect(found).to_have_count(1)
    page.goto(found.get_attribute("href") or "")
    expect(page.locator("#MultiHeadAttention\\.get_scores")).to_be_in_viewport()
    assert heard == []


def test_everything_can_be_reached_by_keyboard(page: Page, url: str) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto(f"{url}/{CORE}")
    page.wait_for_timeout(300)
    reached = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className"
                " || document.activeElement.textContent"
            )
        )
    # What scrolls is a tab stop, and code that fits is none.
    blocks = page.eval_on_selector_all(
        ".sn-code",
        "all => all.filter(e => e.checkVisibility())"
        ".map(e => [e.scrollWidth > e.clientWidth, e.tabIndex === 0])",
    )
    assert len(blocks) > 15
    assert all(scrolls == stops for scrolls, stops in blocks)
    assert any("md-skip" in name for name in reached)
    assert any("sn-claim" in name for name in reached)
    assert any("md-button" in name for name in reached)


def test_figures_are_drawn_in_the_ink_of_the_text(page: Page, url: str) -> None:
    inks = {}
    page.goto(f"{url}/{LESSON}")
    for scheme in ("light", "dark"):
        switch_to(page, scheme)
        ink = "e => getComputedStyle(e).fill"
        title = page.locator(".lesson-figure text", has_text="head 0").first
        text = page.locator("article p").first
        inks[scheme] = title.evaluate(ink)
        assert inks[scheme] == text.evaluate("e => getComputedStyle(e).color")
    assert inks["light"] != inks["dark"]


def test_print_keeps_both_columns_and_drops_the_bar(page: Page, url: str) -> None:
    page.set_viewport_size({"width": 740, "height": 1000})  # A4 at 96 dpi, less margins
    page.goto(f"{url}/{CORE}")
    page.emulate_media(media="print")
    assert not page.locator(".sn-bar").is_visible()
    for section in page.locator(".sn-section:has(.sn-note > p)").all()[:8]:
        note = section.locator(".sn-note").bounding_box()
        code = section.locator(".sn-code")
        box = code.bounding_box()
        assert note is not None
        assert box is not None
        assert note["x"] + note["width"] <= box["x"]
        assert code.evaluate("e => e.scrollWidth <= e.clientWidth")


def test_the_sheet_of_notation_prints_on_one_page(page: Page, url: str) -> None:
    page.goto(f"{url}/notation.html")
    for paper in ("A4", "Letter"):
        printed = page.pdf(format=paper)
        assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1, paper
