"""The mask converter: what it shows of a mask is what Python says of it."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from headnotes import masks
from headnotes.mha import masked_softmax

CONVERTER = "compare/masks.html"
RANDOM = 180

# What the words of these masks must hold between them, so that each way to say
# something is compared.
SENTENCES = (
    "all queries alike",
    "all batch items alike",
    "causal, corner bottom right",
    "causal, corner top left",
    "short of its own",
    "beyond its own",
    "before its own key and",
    "prefix of",
    "documents of",
    "causal within each",
    "padded key at the start",
    "padded keys at the end",
    "no query sees any key",
    "more row",
    "warning: looks inverted: its opposite is",
    "warning: looks inverted: the opposite of",
    "warning: looks inverted: only last keys",
    "the corner matters",
    "warning: leaks the future",
)

# Type each mask, and collect what the page then shows.
SHOWN = """asked => {
  const text = document.querySelector("#mk-text");
  const heads = document.querySelector(".mk-sizes [name=heads]");
  const told = (element) => element.dispatchEvent(new Event("input", {bubbles: true}));
  const lines = (of) => [...document.querySelectorAll(of)].map((e) => e.textContent);
  return asked.map(([mask, n]) => {
    heads.value = n;
    told(heads);
    text.value = mask;
    told(text);
    return {
      cards: [...document.querySelectorAll(".mk-card")].map((card) => ({
        calls: card.querySelector(":scope > pre")?.textContent ?? "",
        value: card.querySelector(".mk-value:not([hidden]) code")?.textContent ?? "",
        refusal: card.querySelector(".mk-refusal:not([hidden])")?.textContent ?? "",
      })),
      cells: lines(".mk-cell").join(""),
      weights: lines(".mk-weight"),
      words: lines(".mk-words li"),
      named: lines(".mk-named")[0],
    };
  });
}"""


def text_of(mask: Tensor) -> str:
    """Rows of 0 and 1, batch items behind a slash."""
    rows = mask.permute(2, 0, 1).int().tolist()
    return " / ".join(" ".join("".join(map(str, row)) for row in item) for item in rows)


def mask_of(text: str) -> Tensor:
    """The mask that a text stands for."""
    rows = [[[*map(int, row)] for row in item.split()] for item in text.split("/")]
    return torch.tensor(rows).bool().permute(1, 2, 0)


def some_masks(number: int) -> list[tuple[Tensor, int]]:
    """Masks of all sizes, as they are in use and as nobody would want them; heads."""
    choose = random.Random(2017)
    torch.manual_seed(2017)
    found = []
    for n in range(number):
        q_len, k_len = choose.choices(range(1, 9), k=2)
        k_len = choose.choice([q_len, k_len, k_len])
        batch_size = choose.randint(1, 3)
        lens = torch.randint(0, k_len + 1, (batch_size,))
        noise = torch.rand(q_len, k_len, batch_size)
        past = masks.causal(q_len, k_len)
        ahead = (torch.arange(k_len) - torch.arange(q_len)[:, None]).unsqueeze(-1)
        back, reach = choose.randint(-4, 1), choose.randint(0, 4)
        packed = masks.block_diagonal(*two_documents(choose, q_len, k_len))
        filled = masks.padding(lens, k_len)
        kinds = (
            noise > choose.random(),
            noise[:1] > 0.3,
            noise[..., :1] > 0.3,
            filled,
            filled.flip(1),
            ~filled,
            past,
            past & filled,
            ~past,
            past & (noise > 0.1),
            masks.causal(q_len, k_len, corner="top left"),
            masks.sliding_window(q_len, k_len, window=choose.randint(1, 4)),
            masks.prefix_lm(lens, q_len, k_len),
            (back <= ahead) & (ahead <= reach),
            (ahead <= reach) & filled,
            (ahead <= reach) & filled.flip(1),
            filled & ~masks.padding(lens // 2, k_len),
            packed,
            packed & past,
            past | (noise > 0.9),
        )
        mask = kinds[n % len(kinds)].expand(q_len, k_len, batch_size)
        found.append((mask, choose.randint(1, 4)))
    return found


def two_documents(choose: random.Random, q_len: int, k_len: int) -> list[Tensor]:
    """Lengths of two packed documents, of queries and of keys."""
    cut = choose.randint(0, q_len)
    k_cut = cut if q_len == k_len else choose.randint(0, k_len)
    return [torch.tensor([cut, q_len - cut]), torch.tensor([k_cut, k_len - k_cut])]


@pytest.fixture(scope="module")
def shown(browser: Browser, url: str) -> list[tuple[Tensor, int, dict[str, Any]]]:
    """Many masks, the heads, and what the page showed of them."""
    asked = some_masks(RANDOM)
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{url}/{CONVERTER}")
    pages = page.evaluate(SHOWN, [[text_of(mask), heads] for mask, heads in asked])
    context.close()
    return [(*pair, page) for pair, page in zip(asked, pages, strict=True)]


def run(code: str, **known: Any) -> Any:
    """The value of some code, whose first line may say what is low."""
    names = {"masks": masks, "torch": torch, "create_block_mask": create_block_mask}
    names |= known
    before, last = code.split("\n", 1) if code.startswith("low") else ("", code)
    exec(before, names)
    return eval(last, names)


def equal(one: Any, other: Any) -> bool:
    """The same tensors of the same dtypes, or what does the same."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple):
        return all(map(equal, one, other))
    if isinstance(one, BlockMask):
        return torch.equal(masks.from_block_mask(one), masks.from_block_mask(other))
    return isinstance(one, bool) is isinstance(other, bool)


def test_every_convention_says_what_python_says(
    shown: list[tuple[Tensor, int, dict[str, Any]]],
) -> None:
    values: dict[str, int] = {}
    refusals: dict[str, int] = {}
    for mask, heads, page in shown:
        ours, *others = page["cards"]
        assert torch.equal(run(ours["value"]), mask)
        for card in others:
            there, back = card["calls"].split("\n")
            name, _, expression = there.partition(" = ")
            # The number of heads stands where it is asked for.
            assert re.findall(r"heads=(\d)", card["calls"]) in ([], [f"{heads}"] * 2)
            kind = re.sub(r"\d", "", expression)
            if card["refusal"]:
                assert not card["value"]
                with pytest.raises(ValueError, match="`mask` ") as caught:
                    run(expression, mask=mask)
                assert card["refusal"] == str(caught.value).replace("`", "")
                refusals[kind] = refusals.get(kind, 0) + 1
                continue
            value = run(card["value"], mask=mask)
            assert equal(value, run(expression, mask=mask)), expression
            again = run(back.removeprefix("mask = "), **{name: value})
            assert torch.equal(again.expand_as(mask), mask), back
            values[kind] = values.get(kind, 0) + 1
    print(f"\n{values}\n{refusals}")
    assert len(values) == 14
    assert len(refusals) == 6
    assert min(values.values()) > 4
    assert min(refusals.values()) > 4


def test_the_words_are_those_of_describe(
    shown: list[tuple[Tensor, int, dict[str, Any]]],
) -> None:
    for mask, _, page in shown:
        assert page["words"] == masks.describe(mask).split("\n")
    said = "\n".join(line for _, _, page in shown for line in page["words"])
    for words in SENTENCES:
        assert words in said


def test_the_weights_are_softmax_and_zero_where_nothing_is_seen(
    shown: list[tuple[Tensor, int, dict[str, Any]]], page: Page, url: str
) -> None:
    page.goto(f"{url}/{CONVERTER}")
    scores = page.evaluate("JSON.parse(document.querySelector('.mk script').innerText)")
    of_item = torch.tensor(scores, dtype=torch.float64).permute(1, 2, 0)
    empty = 0
    for mask, _, seen in shown:
        q_len, k_len, batch_size = mask.shape
        part = of_item[:q_len, :k_len, :batch_size, None]
        wanted = masked_softmax(part, mask.unsqueeze(-1)).permute(2, 0, 1, 3).flatten()
        for text, weight in zip(seen["weights"], wanted.tolist(), strict=True):
            assert abs(float(text) - weight) <= 0.005 + 1e-12
            assert (text == "0") == (weight == 0)
        assert seen["cells"] == re.sub("[ /]", "", text_of(mask))
        empty += int((~mask.any(dim=1)).sum())
    assert empty > 50


def test_presets_are_what_python_builds(page: Page, url: str) -> None:
    page.goto(f"{url}/{CONVERTER}")
    buttons = page.locator(".mk-presets button").all()
    assert len(buttons) == 8
    for sizes in ((3, 5, 2), (8, 8, 3), (7, 2, 1), (1, 1, 3)):
        for name, size in zip(("q_len", "k_len", "batch_size"), sizes, strict=True):
            page.get_by_role("slider", name=name).fill(f"{size}")
        for button in buttons:
            button.click()
            expect(button).to_have_attribute("aria-pressed", "true")
            expect(page.locator(".mk-presets [aria-pressed=true]")).to_have_count(1)
            built = run(page.locator(".mk-named").inner_text())
            assert text_of(built.expand(sizes)) == text(page), sizes


def text(page: Page) -> str:
    return page.locator("#mk-text").input_value()


def cell(page: Page, query: int, key: int, item: int = 0) -> Locator:
    label = f"query {query}, key {key}, item {item}: may attend"
    return page.get_by_role("button", name=label)


def blank(page: Page, url: str) -> None:
    page.goto(f"{url}/{CONVERTER}#mask=0000.0000.0000_0000.0000.0000")


def middle(at: Locator) -> tuple[float, float]:
    box = at.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_a_mouse_paints_along_its_way(page: Page, url: str) -> None:
    blank(page, url)
    page.mouse.move(*middle(cell(page, 0, 0)))
    page.mouse.down()
    page.mouse.move(*middle(cell(page, 2, 0)), steps=9)
    page.mouse.move(*middle(cell(page, 2, 3)), steps=9)
    page.mouse.up()
    assert text(page) == "1000 1000 1111 / 0000 0000 0000"
    # What the first cell becomes, all become; to the next item, too.
    page.mouse.move(*middle(cell(page, 2, 0)))
    page.mouse.down()
    page.mouse.move(*middle(cell(page, 2, 1)), steps=9)
    page.mouse.move(*middle(cell(page, 1, 1, item=1)), steps=40)
    page.mouse.up()
    page.mouse.move(*middle(cell(page, 0, 3)), steps=9)  # the button is up
    assert text(page) == "1000 1000 0011 / 0000 0000 0000"
    cell(page, 1, 2, item=1).click()
    assert text(page) == "1000 1000 0011 / 0000 0010 0000"
    cell(page, 1, 2, item=1).click()
    assert text(page) == "1000 1000 0011 / 0000 0000 0000"
    page.mouse.click(*middle(cell(page, 1, 2)), button="right")
    assert text(page) == "1000 1000 0011 / 0000 0000 0000"


def test_a_finger_paints_and_does_not_scroll(browser: Browser, url: str) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 900}, has_touch=True, is_mobile=True
    )
    page = context.new_page()
    blank(page, url)
    cell(page, 0, 0).tap()
    assert text(page) == "1000 0000 0000 / 0000 0000 0000"
    cell(page, 2, 1).scroll_into_view_if_needed()
    before = page.evaluate("scrollY")
    session = context.new_cdp_session(page)

    def touch(kind: str, *points: tuple[float, float]) -> None:
        places = [{"x": x, "y": y} for x, y in points]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})

    (x, y), (_, end) = middle(cell(page, 0, 1)), middle(cell(page, 2, 1))
    touch("touchStart", (x, y))
    for n in range(1, 11):
        touch("touchMove", (x, y + (end - y) * n / 10))
    touch("touchEnd")
    page.wait_for_timeout(100)
    assert text(page) == "1100 0100 0100 / 0000 0000 0000"
    assert page.evaluate("scrollY") == before
    context.close()


def test_keys_walk_and_paint(page: Page, url: str) -> None:
    blank(page, url)
    page.get_by_role("slider", name="heads").focus()
    page.keyboard.press("Tab")
    expect(cell(page, 0, 0)).to_be_focused()
    expect(page.locator(".mk-cell[tabindex='0']")).to_have_count(2)
    for key in ("ArrowUp", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    page.keyboard.press("Space")
    expect(cell(page, 1, 1)).to_be_focused()
    expect(cell(page, 1, 1)).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert text(page) == "0000 0110 0000 / 0000 0000 0000"
    # One tab stop an item, and it is where one was.
    page.keyboard.press("Tab")
    expect(cell(page, 0, 0, item=1)).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(cell(page, 1, 2)).to_be_focused()
    page.keyboard.press("Space")
    assert text(page) == "0000 0100 0000 / 0000 0000 0000"
    cell(page, 2, 3).click()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Tab")
    expect(cell(page, 0, 0, item=1)).to_be_focused()
    expect(page.locator(".mk-cell[tabindex='0']")).to_have_count(2)


def test_sizes_keep_a_preset_and_what_fits_of_a_painting(page: Page, url: str) -> None:
    page.goto(f"{url}/{CONVERTER}")
    page.get_by_role("button", name="causal", exact=True).click()
    page.get_by_role("slider", name="batch_size").fill("1")
    page.get_by_role("slider", name="q_len").fill("4")
    page.get_by_role("slider", name="k_len").fill("4")
    assert text(page) == "1000 1100 1110 1111"
    cell(page, 0, 3).click()
    page.get_by_role("slider", name="q_len").fill("3")
    page.get_by_role("slider", name="k_len").fill("5")
    assert text(page) == "10011 11001 11101"


def test_a_link_carries_the_mask_and_the_heads(page: Page, url: str) -> None:
    blank(page, url)
    cell(page, 1, 2, item=1).click()
    page.get_by_role("slider", name="heads").fill("3")
    page.keyboard.press("Tab")
    page.wait_for_url("**/masks.html#mask=*heads=3")
    link, before = page.evaluate("location.href"), text(page)
    assert before == "0000 0000 0000 / 0000 0010 0000"
    page.goto("about:blank")
    page.goto(link)
    assert text(page) == before
    expect(page.get_by_role("slider", name="heads")).to_have_value("3")
    page.evaluate("location.hash = '#mask=10.11'")  # as by the back button
    expect(cell(page, 1, 1)).to_be_visible()
    assert text(page) == "10 11"
    for nonsense in ("#mask=10.1", "#mask=12.11", "#mask=", "#L3", "#mask=1&heads=99"):
        page.goto("about:blank")
        page.goto(f"{url}/{CONVERTER}{nonsense}")
        expected = "1" if "&" in nonsense else "11111 11111 11111 / 11100 11100 11100"
        assert text(page) == expected, nonsense
        expect(page.get_by_role("slider", name="heads")).to_have_value("2")


def paste(page: Page, value: str) -> None:
    page.get_by_role("textbox", name="Mask as text").fill(value)


def painted(page: Page) -> str:
    """The mask in the grids, as the page writes masks; the text may be as pasted."""
    address = page.evaluate(
        "[...document.querySelectorAll('.mk-grid[role=grid]')].map(table =>"
        " [...table.querySelectorAll('tbody tr')].map(row =>"
        " [...row.querySelectorAll('button')].map(c => c.textContent).join('')"
        ").join(' ')).join(' / ')"
    )
    return str(address)


def status(page: Page) -> Locator:
    return page.locator(".mk-status")


WRONG = {
    "10 1": "row 0, row 1 has 1 cell, not 2",
    "10 01 / 11": "row 1 has 1 row, not 2",
    "1 / ": "a batch item is empty",
    "1" * 9: "9 keys: this page shows at most 8",
    " ".join("1" * 9): "9 queries: this page shows at most 8",
    "1 / 1 / 1 / 1": "4 batch items: this page shows at most 3",
    "12": "paste a tensor in brackets",
    "x": "x is no entry of a mask",
    "": "paste a tensor in brackets",
    "[[1, 0], [1]]": "row 1 has 1 cell, not 2",
    "[[1, 0], 1]": "row 1: a number stands beside a list",
    "[[1, 0], [1, 1]": "1 bracket not closed",
    "[1, 0]]": "] closes no bracket",
    "[[0., -0.5], [0., -inf]]": "holds 0 and -inf, not -0.5",
    "[[0, -3]]": "-3 is neither 0, 1, -inf nor a length",
    "[[True, 0]]": "bools and numbers are mixed",
    "[[True, False, ..., True]]": "numbers that were not printed",
    "[[[[[1]]]]]": "no mask has 5 axes",
    "[[1, 0] * 2]": "* is no entry of a mask",
}


def test_what_is_wrong_with_a_text_is_said_at_once(page: Page, url: str) -> None:
    blank(page, url)
    field = page.get_by_role("textbox", name="Mask as text")
    for wrong, said in WRONG.items():
        before = painted(page)
        field.fill(wrong)
        expect(status(page)).to_contain_text(said)
        expect(field).to_be_focused()
        assert not field.evaluate("e => e.checkValidity()"), wrong
        assert painted(page) == before, wrong
        field.fill(" 101  110/ 000 111 ")
        expect(status(page)).to_be_empty()
        assert field.evaluate("e => e.checkValidity()"), wrong
        assert painted(page) == "101 110 / 000 111", wrong


MASK = mask_of("100 110 111 111 / 100 100 100 010")
HIDDEN = ~MASK[..., 0]
ADDITIVE = torch.zeros(4, 3).masked_fill(HIDDEN, -torch.inf)


READ: list[tuple[str, str | None]] = [
    (repr(MASK[..., 0]), "may attend"),
    (repr(HIDDEN), "hidden"),
    (f"attn_mask = {HIDDEN.tolist()}", "hidden"),
    (str(HIDDEN.numpy()), "hidden"),
    (repr(HIDDEN.numpy()), "hidden"),
    (repr(MASK[..., 0].int()), "may attend"),
    (repr(MASK[..., 0].float()), "may attend"),
    (str(HIDDEN.tolist()).lower(), "hidden"),
    ("tensor([[1, 0, 0], [1, 1, 0]], device='cuda:0', dtype=torch.uint8)", ""),
    ("1 0 0\n1 1 0\n1 1 1\n1 1 1\n", None),
    (repr(ADDITIVE), None),
    (repr(ADDITIVE.nan_to_num(neginf=-1e9)), None),
    (repr(ADDITIVE.nan_to_num(neginf=torch.finfo(torch.float32).min)), None),
    (str(ADDITIVE.tolist()).replace("-inf", 'float("-inf")'), None),
    (str(ADDITIVE.tolist()).replace("-inf", "-np.inf"), None),
]


def test_a_pasted_mask_is_read_and_its_meaning_asked_where_it_is_open(
    page: Page, url: str
) -> None:
    choice = page.get_by_role("radio", name=re.compile("^(may attend|hidden):"))
    for pasted, meaning in READ:
        page.goto("about:blank")  # the page remembers the last answer
        blank(page, url)
        before = painted(page)
        paste(page, pasted)
        expect(choice).to_have_count(0 if meaning is None else 2)
        if meaning is not None:
            expect(page.locator(".mk-questions :checked[name=meaning]")).to_have_count(
                0
            )
            expect(status(page)).to_contain_text("disagree on what")
            assert painted(page) == before, pasted
            page.get_by_role("radio", name=meaning or "may attend").check()
            expect(choice.locator(":scope:checked")).to_be_focused()
        wanted = "100 110" if meaning == "" else text_of(MASK[..., :1])
        assert painted(page) == wanted, pasted


# The axes of each convention, as the page asks for them, and what True means there.
AXES = {
    "ours": "[batch_size, q_len, k_len]",
    "mha": "[batch_size * heads, q_len, k_len]",
    "mha-float": "[batch_size * heads, q_len, k_len]",
    "key-padding": "[batch_size, k_len], as in a padding mask",
    "sdpa": "[batch_size, heads, q_len, k_len]",
    "sdpa-float": "[batch_size, heads, q_len, k_len]",
    "keras": "[batch_size, q_len, k_len]",
    "key-mask": "[batch_size, k_len], as in a padding mask",
    "huggingface-keys": "[batch_size, k_len], as in a padding mask",
    "huggingface": "[batch_size, heads, q_len, k_len]",
    "valid-lens": "[batch_size], valid lengths",
    "cu-seqlens": "[documents + 1] of queries and of keys, cu_seqlens",
}

# Paste what each card shows of a mask, answer, and collect the masks.
PASTED = """([mask, n, axes]) => {
  const text = document.querySelector("#mk-text");
  const heads = document.querySelector(".mk-sizes [name=heads]");
  const told = (element) => element.dispatchEvent(new Event("input", {bubbles: true}));
  const type = (value) => { text.value = value; told(text); };
  const answer = (name, value) => {
    const all = [...document.querySelectorAll(`.mk-questions [name=${name}]`)];
    all.find((choice) => choice.value === value)?.click();
  };
  heads.value = n;
  told(heads);
  const found = {};
  for (const card of document.querySelectorAll(".mk-card")) {
    const key = card.dataset.convention;
    type(mask);
    const value = card.querySelector(".mk-value:not([hidden]) code")?.textContent;
    if (!value || !axes[key]) continue;
    type(mask.replaceAll("1", "0"));
    type(value);
    if (/^mha/.test(key)) answer("axes", "[batch_size, q_len, k_len]");
    if (/^mha/.test(key)) answer("axes", "[q_len, k_len]");
    answer("axes", value.includes("[[") && key === "valid-lens"
      ? "[batch_size, q_len], valid lengths" : axes[key]);
    answer("meaning", /^(mha|key-padding)$/.test(key) ? "hidden" : "may attend");
    found[key] = [value, [...document.querySelectorAll(".mk-grid[role=grid]")].map(
      (table) => [...table.querySelectorAll("tbody tr")].map((row) =>
        [...row.querySelectorAll("button")].map((c) => c.textContent).join("")
      ).join(" ")).join(" / ")];
  }
  return found;
}"""


def test_what_each_convention_shows_can_be_pasted_back(page: Page, url: str) -> None:
    page.goto(f"{url}/{CONVERTER}")
    seen = dict.fromkeys(AXES, 0)
    for mask, heads in some_masks(30):
        wanted = text_of(mask)
        found = page.evaluate(PASTED, [wanted, heads, AXES])
        for key, (value, got) in found.items():
            assert got == wanted, f"{key}: {value}"
            seen[key] += 1
    print(seen)
    assert min(seen.values()) > 1


def test_changes_are_undone_one_by_one(page: Page, url: str) -> None:
    blank(page, url)
    start = text(page)
    undo = page.get_by_role("button", name="Undo")
    expect(undo).to_be_disabled()
    page.mouse.move(*middle(cell(page, 0, 0)))
    page.mouse.down()
    page.mouse.move(*middle(cell(page, 0, 3)), steps=9)
    page.mouse.up()
    stroke = text(page)
    assert stroke == "1111 0000 0000 / 0000 0000 0000"
    page.get_by_role("button", name="causal", exact=True).click()
    causal = text(page)
    page.get_by_role("slider", name="k_len").fill("6")
    page.get_by_role("slider", name="heads").fill("3")
    page.keyboard.press("Control+z")
    expect(page.get_by_role("slider", name="heads")).to_have_value("2")
    page.keyboard.press("Control+z")
    assert text(page) == causal
    undo.click()
    assert text(page) == stroke
    undo.click()
    assert text(page) == start
    expect(undo).to_be_disabled()
    assert f"#mask={start.replace(' / ', '_').replace(' ', '.')}" in page.evaluate(
        "location.href"
    )
    page.keyboard.press("Control+z")
    assert text(page) == start


def test_a_text_has_an_undo_of_its_own(page: Page, url: str) -> None:
    blank(page, url)
    field = page.get_by_role("textbox", name="Mask as text")
    field.fill("")
    field.press_sequentially("10 11")
    field.press("Control+z")
    assert field.input_value() == "10 1"
    assert painted(page) == "10 11"
    field.fill("10 11")
    field.blur()
    page.keyboard.press("Control+z")
    assert text(page) == "0000 0000 0000 / 0000 0000 0000"


def test_the_last_hundred_changes_can_be_undone(page: Page, url: str) -> None:
    blank(page, url)
    pair = page.locator(".mk-grid tbody tr").first.locator("button")
    pair.evaluate_all(
        "([a, b]) => { for (let n = 0; n < 60; n++) { a.click(); b.click(); } }"
    )
    undo = page.get_by_role("button", name="Undo")
    undone = undo.evaluate(
        "e => { let n = 0; while (!e.disabled) { e.click(); n++; } return n; }"
    )
    assert undone == 100


def test_the_padding_preset_hides_a_key(page: Page, url: str) -> None:
    page.goto(f"{url}/{CONVERTER}")
    for batch_size in (3, 2, 1):
        page.get_by_role("slider", name="batch_size").fill(f"{batch_size}")
        page.get_by_role("button", name="padding", exact=True).click()
        assert "0" in text(page), batch_size
    assert text(page) == "11100 11100 11100"


def test_what_is_copied_is_what_is_shown(browser: Browser, url: str) -> None:
    context = browser.new_context()
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    blank(page, url)
    page.get_by_role("button", name="Copy Keras, attention_mask").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert torch.equal(run(copied), torch.zeros(2, 3, 4, dtype=torch.bool))
    context.close()


def test_the_page_is_complete_without_script(browser: Browser, url: str) -> None:
    seen = []
    for script in (False, True):
        context = browser.new_context(java_script_enabled=script)
        page = context.new_page()
        page.goto(f"{url}/{CONVERTER}")
        for control in page.locator(".mk :is(button, [type=range])").all():
            assert script or not control.is_visible()
        parts = page.locator(".mk-items, .mk-words, .mk-named, .mk-cards, table")
        texts = [re.sub(r"Copy|\s", "", part) for part in parts.all_inner_texts()]
        seen.append(texts)
        context.close()
    assert seen[0] == seen[1]
    assert len("".join(seen[0])) > 2000


def test_the_converter_works_from_a_folder(page: Page, site: Path) -> None:
    page.goto(f"{(site / CONVERTER).as_uri()}#mask=10.11")
    cell(page, 0, 1).click()
    assert text(page) == "11 11"
    assert "#mask=11.11" in page.evaluate("location.href")
    box = page.locator(".mk-cards").bounding_box()
    assert box is not None
    assert box["x"] > 700  # the style sheet has loaded


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_the_converter_is_accessible_at_its_largest(
    page: Page,
    url: str,
    faults: Callable[[Page], list[str]],
    width: int,
    scheme: Any,
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    rows = ".".join("1" * n + "0" * (8 - n) for n in range(1, 9))
    page.goto(f"{url}/{CONVERTER}#mask={rows}_{rows}_{rows}&heads=4")
    expect(page.locator(".mk-cell")).to_have_count(192)
    assert faults(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for control in page.locator(".mk-cell").all()[:9]:
        box = control.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) >= 24  # a fingertip's
