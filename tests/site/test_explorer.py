"""The attention explorer: its numbers are the model's, and its steps can be played."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import BrowserContext, Page, expect

from headnotes.models import dates, heads
from headnotes.models.training import recorded

pytestmark = pytest.mark.slow

EXPLORER = "attention_explorer.html"

# Choose each text, and collect what the page then shows.
SHOWN = """() => {
  const select = document.querySelector(".xp select");
  const lines = (of, where) =>
    [...where.querySelectorAll(of)].map((e) => e.textContent);
  return [...select.options].map((option) => {
    select.value = option.value;
    select.dispatchEvent(new Event("change"));
    return {
      text: option.value,
      output: lines(".xp-output", document)[0],
      columns: lines(".xp-head:first-child thead th", document).join(""),
      rows: lines(".xp-head:first-child tbody th", document).join(""),
      without: lines(".xp-without", document),
      maps: [...document.querySelectorAll(".xp-map")].map((map) => lines("td", map)),
    };
  });
}"""


@pytest.fixture(scope="module")
def explorer(context: BrowserContext, url: str) -> Iterator[Page]:
    page = context.new_page()
    page.emulate_media(reduced_motion="reduce")
    page.goto(f"{url}/{EXPLORER}")
    yield page
    page.close()


def weights_of(cells: list[str]) -> list[float]:
    """The numbers of a map; the corner of the table is empty."""
    return [float(cell) for cell in cells if cell]


def test_every_number_is_that_of_the_model(explorer: Page, site: Path) -> None:
    model, _ = max(recorded().items())[1]
    names = [(f"decoder.{layer}.cross", head) for layer in (0, 1) for head in range(4)]
    examples: list[dict[str, Any]] = explorer.evaluate(SHOWN)
    assert len(examples) == 12
    for example in examples:
        source, source_lens = dates.encode([example["text"]])
        tokens = model.greedy(source, source_lens, 12)
        (output,) = dates.decode(tokens)
        shown, _, right = example["output"].partition(", not ")
        assert shown == output != right
        assert example["rows"] == f"{output}■"
        assert example["columns"] == example["text"].replace(" ", "·")
        inputs = torch.cat([torch.full_like(tokens[:1], dates.START), tokens[:-1]])
        maps = heads.attention_maps(model, source, inputs, source_lens)
        for n, (name, head) in enumerate(names):
            wanted = maps[name][:, :, 0, head].flatten().tolist()
            assert weights_of(example["maps"][n]) == pytest.approx(wanted, abs=6e-4)

    batch = dates.encode([example["text"] for example in examples])
    for n, name in enumerate(names):
        ablated = heads.without_head(model, *name)
        without = [example["without"][n] for example in examples]
        assert without == dates.decode(ablated.greedy(*batch, 12))

    # Without its script, the page shows the first of them.
    html = (site / EXPLORER).read_text(encoding="utf-8")
    cells = re.findall(r'<td style="--w:\d+">([\d.]+)</td>', html)
    assert cells == [cell for map in examples[0]["maps"] for cell in map if cell]


def test_steps_are_moved_by_button_and_by_key_and_played(explorer: Page) -> None:
    def visible_rows() -> int:
        rows = explorer.locator(".xp-head:nth-child(6) tbody tr").all()
        return sum(row.locator("td").first.is_visible() for row in rows)

    def button(name: str) -> None:
        explorer.get_by_role("button", name=name, exact=True).click()

    step = explorer.locator(".xp-count")
    explorer.get_by_label("Text").select_option("christmas 1998")
    expect(explorer.locator(".xp-output")).to_have_text("1998-03-01, not 1998-12-25")
    expect(explorer.locator(".xp-output mark")).to_have_text(["0", "3", "0", "1"])
    expect(step).to_have_text("step 11 of 11")
    assert visible_rows() == 11
    button("Back")
    explorer.keyboard.press("ArrowLeft")
    expect(step).to_have_text("step 9 of 11")
    expect(explorer.locator(".xp-output")).to_have_text("1998-03-0")
    assert visible_rows() == 9
    explorer.get_by_role("slider", name="step").press("Home")
    button("Next")
    assert visible_rows() == 2
    duration = "e => getComputedStyle(e).transitionDuration"
    assert explorer.locator(".xp-map td").last.evaluate(duration) == "0s"

    # In a map, the keys go from cell to cell, as far as it has been computed.
    map = explorer.get_by_role("grid", name="Layer 1, head 1")
    map.locator("[tabindex='0']").focus()
    for key in ("ArrowLeft", "ArrowRight", "ArrowDown", "ArrowDown"):
        explorer.keyboard.press(key)
    focused = map.locator("td:focus")
    expect(map.locator("tr:nth-child(2) td[tabindex]").nth(1)).to_be_focused()
    expect(map.locator("[tabindex='0']")).to_have_count(1)
    told = f"step 2 generates ‘9’, weight {focused.text_content()} on ‘h’, character 2"
    expect(explorer.get_by_role("status")).to_have_text(f"Layer 1, head 1: {told}")

    button("Play")
    expect(step).to_have_text("step 4 of 11")
    button("Pause")
    paused = step.text_content() or ""
    explorer.wait_for_timeout(900)
    expect(step).to_have_text(paused)
