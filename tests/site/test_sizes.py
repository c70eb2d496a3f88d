"""Sizes that a reader chooses: the page then says what a run of that size does."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect
from torch.utils.flop_counter import FlopCounterMode

from headnotes import mha as module
from headnotes.mha import MultiHeadAttention
from sidenotes.grammar import claims, pair
from sidenotes.notations import shapes_of
from sidenotes.trace import trace
from website import switch_to

CORE = "source/mha.html"
SHAPES = ".sn-claim, .sn-shape"

# Each once more in the order of the sliders.
CHOSEN = [
    {"q_len": 13, "k_len": 29, "batch_size": 3, "heads": 5, "d_k": 7},
    {"q_len": 1, "k_len": 4096, "batch_size": 2, "heads": 11, "d_k": 3},
    {"q_len": 127, "k_len": 64, "batch_size": 128, "heads": 1, "d_k": 2},
]

EXAMPLE = '''

def example():
    """
    >>> mha = MultiHeadAttention({heads}, {heads} * {d_k})
    >>> query = torch.randn({q_len}, {batch_size}, {heads} * {d_k})
    >>> key = torch.randn({k_len}, {batch_size}, {heads} * {d_k})
    >>> mask = torch.rand({q_len}, {k_len}, {batch_size}) > 0.5
    >>> _ = mha(query=query, key=key, value=key, mask=mask)
    """
'''


def ran(folder: Path, sizes: dict[str, int]) -> dict[int, set[tuple[int, ...]]]:
    """The shapes that each line of the core gives in a run at these sizes."""
    source = Path(module.__file__).read_text(encoding="utf-8").replace(">>>", "   ")
    path = folder / "mha.py"
    path.write_text(source + EXAMPLE.format(**sizes), encoding="utf-8")
    shapes: dict[int, set[tuple[int, ...]]] = {}
    beside = [claim for claim in claims(source) if not claim.statement]
    for call in trace(path, limit=0).calls:
        for claim in beside:
            if claim.symbol == call.symbol:
                mine = [v.shape for v in call.arguments if v.name in claim.targets]
                shapes.setdefault(claim.line, set()).update(mine)
        for step in call.steps:
            for line in range(step.line, step.last_line + 1):
                shapes.setdefault(line, set()).update(v.shape for v in step.values)
    return shapes


def choose(page: Page, sizes: dict[str, int]) -> None:
    page.get_by_role("button", name="Try other sizes").click()
    for name, size in sizes.items():
        page.get_by_role("spinbutton", name=name).fill(str(size))


def said(page: Page) -> dict[int, str]:
    """What stands beside each line at the chosen sizes."""
    found: list[tuple[str, str]] = page.eval_on_selector_all(
        SHAPES,
        "all => all.map(e => [(e.closest('[id^=L]') ?? e.previousElementSibling).id,"
        " e.querySelector('[data-now]')?.dataset.now])",
    )
    assert all(text for _, text in found), found
    return {int(line[1:]): text.partition(";")[0].strip() for line, text in found}


@pytest.mark.parametrize(
    "sizes", CHOSEN, ids=lambda sizes: "-".join(map(str, sizes.values()))
)
def test_shapes_and_totals_are_those_of_a_run_at_the_chosen_sizes(
    page: Page, url: str, tmp_path: Path, sizes: dict[str, int]
) -> None:
    page.goto(f"{url}/{CORE}")
    choose(page, sizes)
    shapes = ran(tmp_path, sizes)
    now = said(page)
    assert len(now) > 15
    for line, text in now.items():
        assert not re.search("[a-z]", text), f"line {line}: {text} is not all numbers"
        brackets = [shape.axes for shape in shapes_of(text)]
        assert shapes.get(line), f"line {line} has a shape, but was not run"
        for shape in shapes[line]:
            fits = [pair(axes, shape) for axes in brackets]
            assert any(
                p is not None and all(int(entry) == size for entry, size in p)
                for p in fits
            ), f"line {line}: {text} was {shape}"
    compare_totals(page, sizes)


def total(page: Page, label: str) -> int:
    line = page.locator(".sn-sizes span", has_text=re.compile(f"^{label}"))
    return int(line.locator("b").inner_text().replace(",", ""))


def compare_totals(page: Page, sizes: dict[str, int]) -> None:
    heads, d_model = sizes["heads"], sizes["heads"] * sizes["d_k"]
    mha = MultiHeadAttention(heads, d_model)
    query = torch.randn(sizes["q_len"], sizes["batch_size"], d_model)
    memory = torch.randn(sizes["k_len"], sizes["batch_size"], d_model)
    with FlopCounterMode(display=False) as counter:
        mha(query=query, key=memory, value=memory)
    assert mha.attn is not None
    assert total(page, "d_model") == d_model
    assert total(page, "parameters") == sum(p.numel() for p in mha.parameters())
    assert total(page, "FLOPs") == counter.get_total_flops()
    assert total(page, "bytes of the scores") == mha.attn.nbytes


def test_names_come_back_when_the_panel_is_closed(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    before = page.locator(".sidenotes").inner_text()
    choose(page, CHOSEN[0])
    shown = page.locator("[data-now]")
    expect(shown).not_to_have_count(0)
    page.get_by_role("button", name="Back to names").click()
    expect(shown).to_have_count(0)
    assert page.locator(".sidenotes .sn-section").first.inner_text() in before
    choose(page, {})
    page.keyboard.press("Escape")
    expect(shown).to_have_count(0)
    expect(page.get_by_role("button", name="Try other sizes")).to_be_focused()


def test_a_line_is_copied_as_it_was_written_at_any_sizes(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    before = page.eval_on_selector_all(
        ".sn-claim", "all => all.map(e => e.textContent)"
    )
    choose(page, CHOSEN[0])
    after = page.eval_on_selector_all(".sn-claim", "all => all.map(e => e.textContent)")
    assert after == before
    assert before


def test_sizes_are_changed_by_keyboard_and_heard(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    page.get_by_role("button", name="Try other sizes").focus()
    page.keyboard.press("Enter")
    field = page.get_by_role("spinbutton", name="q_len")
    expect(field).to_be_focused()
    expect(field).to_be_in_viewport()
    page.keyboard.press("ArrowUp")
    expect(field).to_have_value("51")
    scores: Locator = page.locator(
        ".sn-claim", has_text="[q_len, k_len, batch_size, heads]"
    )
    expect(scores.first).to_have_accessible_name(
        re.compile(r"^\[51, 60, 32, 8\], values")
    )
    page.keyboard.press("Tab")
    slider = page.get_by_role("slider", name="q_len")
    expect(slider).to_be_focused()
    page.keyboard.press("ArrowRight")
    size = int(field.input_value())
    assert 51 < size < 60
    expect(slider).to_have_attribute("aria-valuetext", str(size))


def test_a_slider_reaches_each_small_size_and_the_greatest(
    page: Page, url: str
) -> None:
    page.goto(f"{url}/{CORE}")
    choose(page, {})
    slider = page.get_by_role("slider", name="k_len")
    field = page.get_by_role("spinbutton", name="k_len")
    slider.focus()
    page.keyboard.press("Home")
    for size in range(1, 12):
        expect(field).to_have_value(str(size))
        page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    expect(field).to_have_value("4096")
    box = slider.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert 16 < int(field.input_value()) < 256  # as on a scale of logarithms


def test_what_is_no_size_changes_nothing(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    choose(page, CHOSEN[0])
    before = said(page)
    field = page.get_by_role("spinbutton", name="heads")
    for wrong in ("", "0", "-3", "65", "2.5"):
        field.fill(wrong)
        assert not field.evaluate("e => e.checkValidity()"), wrong
        assert said(page) == before, wrong
        field.blur()
        expect(field).to_have_value("5")


def test_a_link_carries_the_sizes(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    choose(page, CHOSEN[1])
    page.keyboard.press("Tab")
    # Playwright hears of a new address some time after the page has it.
    link, before = page.evaluate("location.href"), said(page)
    assert "k_len=4096" in link
    page.goto("about:blank")
    page.goto(link)
    assert said(page) == before
    expect(page.get_by_role("form", name="Sizes")).to_be_in_viewport()
    page.goto("about:blank")
    page.goto(f"{link}&d_k=999")  # no such size
    assert said(page) == before
    # The inspector keeps its own state beside them.
    page.get_by_role("button", name="Step through").click()
    assert re.search(r"#L\d+&.*k_len=4096.*t=", page.evaluate("location.href"))
    page.keyboard.press("Escape")
    assert re.search(r"#L\d+$", page.evaluate("location.href"))


def test_the_panel_stays_in_view_beside_the_code(page: Page, url: str) -> None:
    page.goto(f"{url}/{CORE}")
    panel = page.get_by_role("form", name="Sizes")
    choose(page, {})
    for symbol in ("MultiHeadAttention.forward", "masked_softmax"):
        page.evaluate("id => document.getElementById(id).scrollIntoView()", symbol)
        expect(panel).to_be_in_viewport(ratio=1)


def test_without_script_the_totals_are_there_for_one_choice(
    browser: Browser, url: str
) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{url}/{CORE}")
    text = page.locator(".sn-sizes").inner_text()
    assert "1,050,624" in text
    for slider in page.locator(".sn-sizes [type=range]").all():
        expect(slider).to_be_hidden()
    for field in page.locator(".sn-sizes [type=number]").all():
        expect(field).not_to_be_editable()
    context.close()


def test_the_open_panel_is_accessible(
    page: Page, url: str, faults: Callable[..., list[str]]
) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.goto(f"{url}/{CORE}")
    choose(page, CHOSEN[0])
    for scheme, width in [("dark", 1440), ("light", 390)]:
        switch_to(page, scheme)
        page.set_viewport_size({"width": width, "height": 900})
        assert faults(page, contrast_only=scheme == "dark") == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
