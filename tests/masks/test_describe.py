"""Describing masks: descriptions are exact, and warnings are justified."""

import re
import sys
import time

import pytest
import torch
from torch import Tensor

from headnotes import masks
from headnotes.masks.describe import describe

NUMBERS = r"[\d–, and]+"


def numbers(text: str) -> list[int]:
    """The numbers of `0–2, 4 and 6`."""
    found = []
    for part in re.split(r", | and ", text.strip()):
        first, _, last = part.partition("–")
        found += range(int(first), int(last or first) + 1)
    return found


def by_rule(rule: str, q_len: int, k_len: int, empty: list[int]) -> Tensor:
    """The mask of one batch item that a rule describes, by an independent parser."""
    seen = torch.zeros(q_len, k_len, dtype=torch.bool)
    own = 0 if rule.endswith("corner top left") else k_len - q_len
    if rule.startswith("documents of"):
        lengths, inner = re.fullmatch(
            rf"documents of ({NUMBERS}?)(, causal.*)?", rule
        ).groups()
        start = next(i for i in range(q_len) if i not in empty)
        for length in numbers(lengths):
            for i in range(start, start + length):
                seen[i, start : i + 1 if inner else start + length] = True
            start += length
        return seen
    for i in range(q_len):
        before, after, prefix = k_len + q_len, 0, 0
        if rule == "every query sees every key":
            after = k_len + q_len
        elif match := re.match(
            r"causal, but (\d+) keys? (beyond|short of) its own", rule
        ):
            after = int(match[1]) * (1 if match[2] == "beyond" else -1)
        elif match := re.match(
            r"window of (\d+)(, (\d+) before its own key and (\d+) after)?", rule
        ):
            before, after = int(match[1]) - 1, 0
            if match[2]:
                before, after = int(match[3]), int(match[4])
                assert int(match[1]) == before + after + 1
        elif match := re.match(r"prefix of (\d+), then causal", rule):
            prefix = int(match[1])
        else:
            assert rule in (
                "causal",
                "causal, corner bottom right",
                "causal, corner top left",
            )
        for j in range(k_len):
            seen[i, j] = i + own - before <= j <= i + own + after or j < prefix
    return seen


def heard(text: str) -> Tensor:
    """The mask that a description determines."""
    sizes, *lines = [
        line for line in text.split("\n") if not line.startswith("warning")
    ]
    queries, keys, items = sizes.split(", ")
    q_len = 1 if queries == "all queries alike" else int(queries.split()[0])
    k_len = int(keys.split()[0])
    batch_size = 1 if items == "all batch items alike" else int(items.split()[0])
    every = list(range(batch_size))
    rules: dict[int, str] = {}
    padded = {b: [0, 0] for b in every}
    empty: dict[int, list[int]] = {b: [] for b in every}
    rows: dict[tuple[int, int], list[int]] = {}
    silent: list[int] = []
    for line in lines:
        if line == "no query sees any key":
            silent = every
        elif match := re.fullmatch(rf"batch items? ({NUMBERS}) sees? nothing", line):
            silent = numbers(match[1])
        elif match := re.fullmatch(
            rf"quer(?:y|ies) ({NUMBERS}) of batch items? ({NUMBERS}) sees? nothing",
            line,
        ):
            for b in numbers(match[2]):
                empty[b] = numbers(match[1])
        elif match := re.fullmatch(
            rf"(?:batch items? ({NUMBERS}) ha(?:s|ve) )?"
            r"(\d+) padded keys? at the (start|end)",
            line,
        ):
            for b in numbers(match[1]) if match[1] else every:
                padded[b][match[3] == "end"] = int(match[2])
        else:
            match = re.fullmatch(rf"(?:batch items? ({NUMBERS}): )?(.*)", line)
            assert match
            named = numbers(match[1]) if match[1] else every
            row = re.fullmatch(
                rf"(?:every query|quer(?:y|ies) ({NUMBERS})) sees? "
                rf"(?:keys? ({NUMBERS})|nothing)",
                match[2],
            )
            for b in named:
                if row is None:
                    rules[b] = match[2]
                elif row[2] is None:
                    empty[b] = empty[b] + numbers(row[1])
                else:
                    for i in numbers(row[1]) if row[1] else range(q_len):
                        rows[b, i] = numbers(row[2])
    mask = torch.zeros(q_len, k_len, batch_size, dtype=torch.bool)
    for b in every:
        if b in rules and b not in silent:
            start, end = padded[b]
            mask[:, :, b] = by_rule(rules[b], q_len, k_len, empty[b])
            mask[:, :start, b] = mask[:, k_len - end :, b] = False
        for i in range(q_len):
            for j in rows.get((b, i), []):
                mask[i, j, b] = True
        mask[empty[b], :, b] = False
    return mask


def some_mask() -> Tensor:
    """A random mask, or a mask with a rule, or one with a rule and random holes."""
    q_len, k_len, batch_size = torch.randint(1, 5, (3,)).tolist()
    k_len += int(torch.randint(3, ()))
    lens = torch.randint(k_len + 1, (batch_size,))
    wide = torch.randint(4, ())
    rule = [
        torch.rand(q_len, k_len, batch_size) < torch.rand(()),
        masks.causal(q_len, k_len),
        masks.causal(q_len, k_len, corner="top left"),
        masks.sliding_window(q_len, k_len, window=int(wide) + 1),
        masks.prefix_lm(lens, q_len, k_len),
        masks.from_function(lambda b, q, k: (q - k).abs() <= wide, q_len, k_len),
        torch.ones(q_len, k_len, 1).tril(int(wide) - 2).bool(),
        masks.padding(lens, k_len),
        masks.block_diagonal(torch.randint(3, (4,))),
        masks.from_function(lambda b, q, k: k >= lens[b], q_len, k_len, batch_size),
    ][int(torch.randint(10, ()))]
    if torch.rand(()) < 0.5 and rule.shape[1] == k_len:
        rule = masks.combine(rule, masks.padding(lens[: rule.shape[2]], k_len))
    if torch.rand(()) < 0.3 and len(rule) == q_len:
        rule = masks.combine(rule, masks.causal(q_len, rule.shape[1]))
    if torch.rand(()) < 0.2:
        rule = rule & (torch.rand(len(rule), 1, rule.shape[2]) < 0.8)
    if torch.rand(()) < 0.2:
        rule = rule ^ (torch.rand(rule.shape) < 0.1)
    return ~rule if torch.rand(()) < 0.1 else rule


@pytest.mark.slow
def test_a_description_fits_this_mask_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["headnotes.masks.describe"], "MAX_ROWS", 100)
    said = set()
    for _ in range(1000):
        mask = some_mask()
        before = mask.clone()
        text = describe(mask)
        assert "more" not in text  # small enough to be described in full
        assert torch.equal(heard(text), mask), text
        assert torch.equal(mask, before)
        said |= {re.sub(r"[\d–]+", "n", line) for line in text.split("\n")}
    # All kinds of masks occurred.
    for line in (
        "every query sees every key",
        "causal",
        "causal, corner bottom right",
        "causal, corner top left",
        "causal, but n key beyond its own",
        "causal, but n key short of its own",
        "window of n",
        "window of n, corner bottom right",
        "window of n, n before its own key and n after",
        "prefix of n, then causal",
        "prefix of n, then causal, corner bottom right",
        "documents of n and n",
        "documents of n and n, causal within each",
        "n padded keys at the start",
        "n padded keys at the end",
        "batch items n have n padded keys at the end",
        "batch item n sees nothing",
        "query n of batch item n sees nothing",
        "query n sees keys n and n",
        "batch item n: queries n see key n",
        "no query sees any key",
    ):
        assert line in said, line


def told(mask: Tensor) -> tuple[list[str], list[str]]:
    """Facts, without the sizes, and warnings."""
    facts = describe(mask).split("\n")[1:]
    warnings = [line for line in facts if line.startswith("warning: ")]
    assert facts[len(facts) - len(warnings) :] == warnings, "warnings come last"
    return facts[: len(facts) - len(warnings)], warnings


def leaky(mask: Tensor, *place: int) -> Tensor:
    """The same mask, with one more allowed key."""
    mask = mask.clone()
    mask[place] = True
    return mask


PADDED = masks.padding(torch.tensor([5, 3, 0, 3]), 5)
LONG = masks.padding(torch.tensor([5, 3, 1]), 5)


@pytest.mark.parametrize(
    ("mask", "facts"),
    [
        (masks.causal(5), ["causal"]),
        (masks.causal(2, 5), ["causal, corner bottom right"]),
        (
            masks.causal(5, 2),
            ["causal, corner bottom right", "queries 0–2 see nothing"],
        ),
        (masks.sliding_window(5, window=3), ["window of 3"]),
        (masks.sliding_window(3, 7, window=3), ["window of 3, corner bottom right"]),
        (
            masks.from_function(lambda b, q, k: (q - k).abs() <= 1, 5),
            ["window of 3, 1 before its own key and 1 after"],
        ),
        (
            masks.prefix_lm(torch.tensor([2, 3, 0, 2]), 5),
            [
                "batch items 0 and 3: prefix of 2, then causal",
                "batch item 1: prefix of 3, then causal",
                "batch item 2: causal",
            ],
        ),
        (
            masks.block_diagonal(torch.tensor([3, 2, 4])),
            ["documents of 3, 2 and 4"],
        ),
        (
            masks.combine(masks.block_diagonal(torch.tensor([3, 2])), masks.causal(5)),
            ["documents of 3 and 2, causal within each"],
        ),
        (
            PADDED,
            [
                "every query sees every key",
                "batch items 1 and 3 have 2 padded keys at the end",
                "batch item 2 sees nothing",
            ],
        ),
        (
            masks.combine(masks.causal(5), PADDED[..., :3]),
            [
                "causal",
                "batch item 1 has 2 padded keys at the end",
                "batch item 2 sees nothing",
            ],
        ),
        (
            masks.combine(masks.causal(5), LONG.flip(1)),
            [
                "causal",
                "batch item 1 has 2 padded keys at the start",
                "batch item 2 has 4 padded keys at the start",
                "queries 0–1 of batch item 1 see nothing",
                "queries 0–3 of batch item 2 see nothing",
            ],
        ),
        (
            torch.tensor([[0, 0, 1], [0, 0, 0], [1, 0, 1]]).unsqueeze(-1),
            ["query 0 sees key 2", "query 1 sees nothing", "query 2 sees keys 0 and 2"],
        ),
        (torch.ones(1, 1, 1).bool(), ["every query sees every key"]),
        (torch.zeros(5, 3, 2).bool(), ["no query sees any key"]),
        (torch.zeros(5, 0, 2).bool(), ["no query sees any key"]),
        (
            torch.tensor([[1, 0, 1, 1, 0]]).bool().unsqueeze(-1),
            ["every query sees keys 0 and 2–3"],
        ),
    ],
)
def test_a_known_pattern_is_named(mask: Tensor, facts: list[str]) -> None:
    assert told(mask) == (facts, [])


def test_sizes_come_first() -> None:
    assert describe(PADDED).startswith("all queries alike, 5 keys, 4 batch items\n")
    assert describe(masks.causal(2, 1)).startswith(
        "2 queries, 1 key, all batch items alike\n"
    )


@pytest.mark.parametrize(
    ("mask", "warning"),
    [
        (
            ~masks.causal(5),
            "looks inverted: its opposite is causal; use ~mask",
        ),
        (
            ~masks.combine(masks.causal(3, 5), LONG),
            "looks inverted: the opposite of batch item 0 is causal, corner bottom "
            "right; use ~mask",
        ),
        (
            ~masks.block_diagonal(torch.tensor([2, 3])),
            "looks inverted: its opposite is documents of 2 and 3; use ~mask",
        ),
        (
            ~LONG,
            "looks inverted: only last keys are seen, and batch item 0 sees nothing; "
            "use ~mask",
        ),
        (
            masks.causal(2, 5, corner="top left"),
            "with 2 queries and 5 keys the corner matters: this is top left, "
            "masks.causal(2, 5) is not",
        ),
        (
            masks.combine(masks.causal(5, 3, corner="top left"), LONG[:, :3]),
            "with 5 queries and 3 keys the corner matters: this is top left, "
            "masks.causal(5, 3) is not",
        ),
        (
            torch.ones(5, 5).tril(1).bool().unsqueeze(-1),
            "leaks the future: query 0 sees key 1",
        ),
        (
            leaky(masks.causal(5), 1, 3, 0),
            "leaks the future: query 1 sees key 3",
        ),
        (
            leaky(masks.causal(3, 5).expand(3, 5, 2), 1, 4, 1),
            "leaks the future: query 1 of batch item 1 sees key 4",
        ),
        (
            masks.to_additive(masks.causal(5)),
            "looks additive, as torch.float32; use masks.from_additive(mask)",
        ),
        (
            masks.to_additive(masks.causal(5), torch.float16, finite=True),
            "looks additive, as torch.float16; use masks.from_additive(mask)",
        ),
        (
            masks.causal(5).double(),
            "is torch.float64, not bool; use mask.bool()",
        ),
    ],
)
def test_common_mistakes_give_a_warning(mask: Tensor, warning: str) -> None:
    assert told(mask)[1] == [f"warning: {warning}"]


def test_additive_masks_are_described_by_their_meaning() -> None:
    for mask in (masks.causal(5), masks.combine(masks.causal(5), LONG)):
        for finite in (True, False):
            added = masks.to_additive(mask, finite=finite)
            assert told(added)[0] == told(mask)[0]
        assert told(torch.where(mask, 0.0, -1e4))[0] == told(mask)[0]
        assert told(mask.half())[0] == told(mask)[0]
        assert describe(mask.int()) == describe(mask)


def test_a_bias_is_no_mask() -> None:
    bias = -torch.arange(5.0)[:, None, None].expand(5, 5, 2)
    warning = "warning: torch.float32 with other numbers: a bias, not a mask"
    assert describe(bias) == warning


@pytest.mark.slow
def test_correct_masks_give_no_warning() -> None:
    """None of the masks of this package, combined and padded as in practice."""
    kinds = 0
    for q_len, k_len in ((1, 1), (1, 7), (2, 2), (3, 7), (7, 7), (7, 3)):
        lens = torch.tensor([k_len, max(k_len - 2, 1), 1])
        built = [
            masks.causal(q_len, k_len),
            *(masks.sliding_window(q_len, k_len, window=w) for w in (1, 2, 3)),
            masks.prefix_lm(lens // 2, q_len, k_len),
            masks.block_diagonal(torch.tensor([2, 3, 1])),
            masks.from_function(lambda b, q, k: (q - k).abs() <= 2, q_len),
            torch.ones(q_len, k_len, 1).bool(),
        ]
        for mask in built:
            filled = masks.padding(lens.clamp(max=mask.shape[1]), mask.shape[1])
            for filler in (filled, filled.flip(1)):
                # One query with a window is the same as padding at the start.
                for one in (mask, mask & filler if q_len > 1 else filler):
                    assert told(one)[1] == [], describe(one)
                    kinds += 1
    assert kinds == 192


def test_long_lists_are_counted() -> None:
    mask = torch.arange(40)[None, :, None] % 2 == torch.arange(20)[:, None, None] % 2
    facts, _ = told(mask)
    assert facts[0] == "query 0 sees keys 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"
    assert facts[11:] == [
        "query 11 sees keys 1, 3, 5, 7, 9, 11, 13, 15 and 12 more",
        "and 8 more rows",
    ]


def test_a_large_mask_is_described_quickly() -> None:
    begin = time.perf_counter()
    assert told(masks.causal(1024))[0] == ["causal"]
    told(torch.rand(256, 1024, 2) < 0.5)
    assert time.perf_counter() - begin < 4


@pytest.mark.slow
def test_descriptions_do_not_depend_on_the_device(device: torch.device) -> None:
    for _ in range(100):
        mask = some_mask()
        assert describe(mask.to(device)) == describe(mask)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([[True]], TypeError, "`mask` must be a tensor, but is a list"),
        (
            torch.ones(3, 5, 2).to_sparse(),
            TypeError,
            "`mask` is sparse, nested or quantized; pass a dense one",
        ),
        (
            torch.ones(3, 5),
            ValueError,
            "`mask` has shape [3, 5], not [q_len or 1, k_len, batch_size or 1]; a "
            "[q_len, k_len] mask needs `mask.unsqueeze(-1)` "
            "if True means 'may attend', `masks.from_mha(mask, heads)` if True hides",
        ),
        (
            torch.ones(3, 5, 2, device="meta"),
            ValueError,
            "`mask` is on meta, where there are no values to describe",
        ),
        (
            torch.full((3, 5, 2), 2),
            ValueError,
            "`mask` holds 2 to 2, not 0/1; write `mask == 1`",
        ),
        (
            torch.ones(3, 5, 2, dtype=torch.complex64),
            TypeError,
            "`mask` is torch.complex64, not bool or integer 0/1",
        ),
    ],
)
def test_invalid_masks_are_refused(
    mask: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        describe(mask)
