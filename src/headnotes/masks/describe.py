r"""# Masks, in words

A mask is a square of zeros and ones, and in a square of zeros and ones nobody sees that
a corner is wrong. `describe` says what a mask does in the words that one would use for
it, and warns of what usually goes wrong: True that means hidden, minus infinity where a
bool is meant, a corner at the wrong end, a key of the future.

What it says is exact. A rule is named only where it gives this very mask, together with
the padded keys and the empty queries that are listed after it; where no rule does, the
rows are read aloud. Only a warning is a guess.

Source: the questions of people whose model did not learn.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# After so many rows, and so many runs in a list of numbers, the rest is only counted.
ROWS, RUNS = 12, 8

EVERYTHING, NOTHING = "every query sees every key", "no query sees any key"


def describe(mask: Tensor) -> str:
    r"""What `mask` does, one fact a line; a line that begins with `warning:` doubts it.

    `mask` is `[q_len or 1, k_len, batch_size or 1]`. One of floating-point numbers is
    described as what it seems to mean. All that is counted counts from 0.

    Raises `TypeError` for what is no tensor of numbers, `ValueError` for another number
    of axes, for integers beyond 0 and 1, or where there are no values to read.

    >>> past = torch.ones(3, 5).tril(2).bool().unsqueeze(-1)
    >>> lengths = torch.tensor([5, 4, 5, 0])
    >>> filled = torch.arange(5)[:, None] < lengths
    >>> print(describe(past & filled))
    3 queries, 5 keys, 4 batch items
    causal, corner bottom right
    batch item 1 has 1 padded key at the end
    batch item 3 sees nothing
    >>> text = torch.tensor([0, 0, 1, 1, 1])
    >>> same = (text[:, None] == text).unsqueeze(-1)
    >>> print(describe(same))
    5 queries, 5 keys, all batch items alike
    documents of 2 and 3

    What hides the future for `nn.MultiheadAttention` shows nothing else here:

    >>> print(describe(~past))
    3 queries, 5 keys, all batch items alike
    query 0 sees keys 3–4
    query 1 sees key 4
    query 2 sees nothing
    warning: looks inverted: its opposite is causal, corner bottom right; use ~mask
    """
    check_mask(mask)
    mask, doubts = as_bool(mask)  # [q_len, k_len, batch_size]
    if doubts.endswith("no mask"):
        return doubts
    seen = mask.permute(2, 0, 1)  # [batch_size, q_len, k_len]
    items = [item_of(each) for each in seen]
    lines = [sizes_of(mask), *facts(seen, items), doubts, *warnings(seen, items)]
    return "\n".join(line for line in lines if line)


class Item(NamedTuple):
    """What one batch item does: a rule or none, and what is left out of the rule."""

    rule: str
    padded: tuple[int, int] = (0, 0)  # keys at the start, keys at the end
    empty: tuple[int, ...] = ()


def item_of(seen: Tensor) -> Item:
    """The first rule that gives a mask, if need be between padded keys."""
    some = seen.any(dim=1)  # [q_len]
    used = seen.any(dim=0)  # [k_len]
    empty, keys = tuple(indices(~some)), indices(used)
    if not keys:
        return Item(NOTHING)
    ends = keys[0], seen.shape[1] - 1 - keys[-1]
    inside = torch.zeros_like(seen)  # [q_len, k_len]
    inside[:, keys[0] : keys[-1] + 1] = True
    for padded, span in (((0, 0), torch.ones_like(seen)), (ends, inside)):
        for rule, allowed in rules(seen):
            allowed = allowed & span  # [q_len, k_len]
            # Empty rows are listed, so they need not fit; but most of them should.
            missing = (allowed.any(dim=1) & ~some).sum()
            if missing <= some.sum() and torch.equal(seen, allowed & some[:, None]):
                return Item(rule, padded, empty)
    return Item("")


def rules(seen: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The rules that could give a mask, each with the mask that it gives."""
    yield EVERYTHING, torch.ones_like(seen)
    q_len, k_len = seen.shape
    if q_len == 1:
        return
    # A query's own key is the one in its place when both end together.
    own = k_len - q_len
    ahead = distances(seen)  # [q_len, k_len]
    rows, keys = indices(seen.any(dim=1)), indices(seen.any(dim=0))
    top, bottom = indices(seen[rows[0]]), indices(seen[rows[-1]])
    # How far a row reaches forward and back is hidden where it touches the end.
    reach = own if top[-1] == keys[-1] else top[-1] - rows[0]
    back = None if bottom[0] == keys[0] else bottom[0] - rows[-1]
    corner = ", corner bottom right" if own else ""
    yield f"causal{corner}", ahead <= own
    if own:
        yield "causal, corner top left", ahead <= 0
    if reach != own:
        side = "beyond" if reach > own else "short of"
        yield (
            f"causal, but {count(abs(reach - own), 'key')} {side} its own",
            ahead <= reach,
        )
    if back is not None:
        before, after = own - back, reach - own
        band = (back <= ahead) & (ahead <= reach)
        if own and reach == 0:
            yield f"window of {1 - back}, corner top left", band
        elif before >= 0 and after >= 0:
            sides = f", {before} before its own key and {after} after" if after else ""
            yield f"window of {before + 1 + after}{sides}{corner}", band
    if rows[0] == 0 and top[-1] > own:
        prefix = torch.zeros_like(seen)
        prefix[:, : top[-1] + 1] = True
        yield f"prefix of {top[-1] + 1}, then causal{corner}", prefix | (ahead <= own)
    if not own:
        yield from documents(seen, rows)


def documents(seen: Tensor, rows: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Documents that are packed one after another, where the rows look like it."""
    # In a document, the first key that a query sees is the first of the document.
    first = seen.int().argmax(dim=1)  # [length]
    starts = first[rows[0] : rows[-1] + 1]
    lengths = [len(each) for each in grouped(starts.tolist()).values()]
    if len(lengths) > 1 and len(starts) == len(rows) and not (starts.diff() < 0).any():
        same = (first[:, None] == first) & seen.any(dim=1)  # [length, length]
        names = f"documents of {joined(lengths)}"
        yield names, same
        yield f"{names}, causal within each", same & (distances(seen) <= 0)


def facts(seen: Tensor, items: Sequence[Item]) -> Iterator[str]:
    """What is so: the rules, the rows where there is none, and what is left out."""
    alone = len(items) == 1
    ruled = grouped(item.rule for item in items)
    silent = ruled.pop(NOTHING, [])
    for rule, numbers in ruled.items():
        if rule:
            yield rule if len(ruled) == 1 else f"{named('batch item', numbers)}: {rule}"
    yield from rows_aloud(seen, ruled.get("", []))
    for end, where in enumerate(("start", "end")):
        for n, numbers in grouped(item.padded[end] for item in items).items():
            have = "" if alone else f"{named('batch item', numbers)} "
            have += "" if alone else "has " if len(numbers) == 1 else "have "
            if n:
                yield f"{have}{count(n, 'padded key')} at the {where}"
    for empty, numbers in grouped(item.empty for item in items).items():
        if empty:
            whose = "" if alone else f" of {named('batch item', numbers)}"
            yield f"{named('query', empty)}{whose} {sees(empty)} nothing"
    if len(silent) == len(items):
        yield NOTHING
    elif silent:
        yield f"{named('batch item', silent)} {sees(silent)} nothing"


def rows_aloud(
    seen: Tensor,  # [..., q_len, k_len]
    numbers: Sequence[int],
) -> Iterator[str]:
    """The keys that each query of some items sees; equal items and rows said once."""
    equal = grouped(bytes(seen[n].flatten().tolist()) for n in numbers)
    groups = [[numbers[n] for n in positions] for positions in equal.values()]
    spoken = rest = 0
    for group in groups:
        rows = seen[group[0]]  # [q_len, k_len]
        whose = f"{named('batch item', group)}: " if len(seen) > 1 else ""
        starts = [0, *(n + 1 for n in indices((rows[1:] != rows[:-1]).any(dim=1)))]
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            spoken += 1
            if spoken > ROWS:
                rest += end - start
                continue
            queries, keys = range(start, end), indices(rows[start])
            who = named("query", queries) if len(rows) > 1 else "every query"
            what = named("key", keys) if keys else "nothing"
            yield f"{whose}{who} {sees(queries)} {what}"
    if rest:
        yield f"and {count(rest, 'more row')}"


def warnings(seen: Tensor, items: Sequence[Item]) -> Iterator[str]:
    """What is usual, and usually a mistake."""
    alone = len(items) == 1
    q_len, k_len = seen.shape[1:]
    opposites = {n: item_of(~seen[n]).rule for n, i in enumerate(items) if not i.rule}
    guesses = {n: r for n, r in opposites.items() if r not in ("", EVERYTHING, NOTHING)}
    for n, rule in list(guesses.items())[:1]:
        whose = "its opposite" if alone else f"the opposite of batch item {n}"
        yield f"warning: looks inverted: {whose} is {rule}; use ~mask"
    # Lengths that are the wrong way round: the longest sentence has no filler.
    silent = [n for n, item in enumerate(items) if item.rule == NOTHING]
    others = [item for item in items if item.rule != NOTHING]
    last = [i.rule == EVERYTHING and i.padded[0] and not i.padded[1] for i in others]
    if silent and others and all(last):
        who = f"{named('batch item', silent)} {sees(silent)} nothing"
        yield f"warning: looks inverted: only last keys are seen, and {who}; use ~mask"
    if any(item.rule.endswith("corner top left") for item in items):
        yield (
            f"warning: with {count(q_len, 'query')} and {count(k_len, 'key')} the "
            f"corner matters: this is top left, masks.causal({q_len}, {k_len}) is not"
        )
    for n, item in enumerate(items):
        place = None if n in guesses else leak(seen[n], item)
        if place is not None:
            whose = "" if alone else f" of batch item {n}"
            i, j = place
            yield f"warning: leaks the future: query {i}{whose} sees key {j}"
            break


def leak(seen: Tensor, item: Item) -> tuple[int, int] | None:
    """A key of the future that is seen by a mask which is otherwise about causal."""
    future = distances(seen) > seen.shape[1] - seen.shape[0]  # [q_len, k_len]
    leaks = seen & future  # [q_len, k_len]
    if not item.rule:
        rows, could = leaks.any(dim=1).sum(), future.any(dim=1).sum()
        if 2 * rows > could or 2 * (seen & ~future).sum() < (~future).sum():
            return None
    elif "beyond" not in item.rule or item.padded[0]:
        return None  # behind padded keys, a window to both sides looks the same
    places = leaks.nonzero().tolist()
    return tuple(places[0]) if places else None


def distances(seen: Tensor) -> Tensor:
    """How far each key is ahead of each query, counted from the top left corner."""
    q_len, k_len = seen.shape
    key = torch.arange(k_len, device=seen.device)  # [k_len]
    query = torch.arange(q_len, device=seen.device)  # [q_len]
    return key - query[:, None]  # [q_len, k_len]


def indices(flags: Tensor) -> list[int]:
    """Where a row of flags is True."""
    return [int(n) for n in flags.nonzero().flatten().tolist()]


def grouped(values: Iterable[Any]) -> dict[Any, list[int]]:
    """The positions of each value, in the order in which the values come."""
    positions: dict[Any, list[int]] = {}
    for n, value in enumerate(values):
        positions.setdefault(value, []).append(n)
    return positions


def joined(parts: Sequence[object]) -> str:
    """All in a row, or as many as one would read: `0–2, 5 and 3 more`."""
    some = [str(part) for part in parts[:RUNS]]
    if len(parts) > RUNS:
        some.append(f"{len(parts) - RUNS} more")
    return " and ".join([", ".join(some[:-1]), some[-1]] if some[1:] else some)


def named(word: str, numbers: Sequence[int]) -> str:
    """Those of a kind: `key 3`, `queries 0–2 and 5`."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    runs = [f"{a}–{z}" if a < z else f"{a}" for a, z in zip(starts, ends, strict=True)]
    return f"{word if len(numbers) == 1 else plural(word)} {joined(runs)}"


def plural(word: str) -> str:
    """More than one of a kind."""
    return "queries" if word == "query" else f"{word}s"


def count(n: int, word: str) -> str:
    """So many of a kind: `1 key`, `3 queries`."""
    return f"{n} {word if n == 1 else plural(word)}"


def sees(numbers: Sequence[int]) -> str:
    """The verb that goes with them."""
    return "sees" if len(numbers) == 1 else "see"


def sizes_of(mask: Tensor) -> str:
    """The sizes, in the order of the axes."""
    q_len, k_len, batch_size = mask.shape
    queries = "all queries alike" if q_len == 1 else count(q_len, "query")
    items = (
        "all batch items alike" if batch_size == 1 else count(batch_size, "batch item")
    )
    return f"{queries}, {count(k_len, 'key')}, {items}"


def as_bool(mask: Tensor) -> tuple[Tensor, str]:
    """What a mask seems to mean, and a warning where that is not how it is written."""
    if not mask.is_floating_point():
        return mask.bool(), ""
    # Not only infinity: -10000 and -1e9 are in use, and are meant to be as good.
    if ((mask == 0) | (mask <= -1000)).all():
        way_out = "use masks.from_additive(mask)"
        return mask == 0, f"warning: looks additive, as {mask.dtype}; {way_out}"
    if ((mask == 0) | (mask == 1)).all():
        return mask.bool(), f"warning: is {mask.dtype}, not bool; use mask.bool()"
    return mask, f"warning: {mask.dtype} with other numbers: a bias, and no mask"


def check_mask(mask: Tensor) -> None:
    """Refuse what is no mask in any reading."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"`mask` must be a tensor, but is a {type(mask).__name__}")
    if mask.layout != torch.strided or mask.is_nested or mask.is_quantized:
        raise TypeError("`mask` is sparse, nested or quantised; pass a dense one")
    if mask.is_complex() or (mask.is_floating_point() and mask.element_size() < 2):
        raise TypeError(f"`mask` is {mask.dtype}, not bool or integer 0/1")
    if mask.dim() != 3:
        raise ValueError(
            f"`mask` has shape {list(mask.shape)}, not [q_len or 1, k_len, batch_size "
            f"or 1]; a [q_len, k_len] mask needs `mask.unsqueeze(-1)`"
        )
    if mask.is_meta:
        raise ValueError("`mask` is on meta, where there are no values to describe")
    if not mask.is_floating_point() and ((mask != 0) & (mask != 1)).any():
        raise ValueError("`mask` holds integers beyond 0 and 1; write `mask == 1`")
