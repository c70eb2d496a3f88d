r"""# Describing masks in words

`describe` describes a mask in words, to check that it does what you intend: which
pattern it has, which keys are padding, which queries are fully masked. It warns of
common mistakes: an inverted mask, an additive mask where a bool mask is expected, the
wrong corner, a query that attends to future keys.

Its statements are exact. A pattern is named only if it gives exactly this mask,
together with the padded keys and the fully masked queries that are listed after it. If
no pattern does, the keys of each query are listed. Only a warning is a guess.

Source: the mistakes that are reported most often in the issues of attention libraries.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headnotes.checks import MASK_AXES, check_tensor, check_zero_one

# The number of rows, and of runs in a list of numbers, that are listed; of the rest,
# only the number is given.
MAX_ROWS = 12
MAX_RUNS = 8

EVERYTHING, NOTHING = "every query sees every key", "no query sees any key"


def describe(mask: Tensor) -> str:
    r"""Describe `mask`, one fact per line; lines starting with `warning:` are guesses.

    `mask` is `[q_len or 1, k_len, batch_size or 1]`. A floating-point mask is described
    by its likely meaning. Queries, keys and batch items are numbered from 0.

    Raises `TypeError` for what is not a tensor of numbers, `ValueError` for another
    number of axes, for integers other than 0 and 1, or where no values can be read.

    >>> past = torch.ones(3, 5).tril(2).bool().unsqueeze(-1)
    >>> lengths = torch.tensor([5, 4, 5, 0])
    >>> not_padding = torch.arange(5)[:, None] < lengths
    >>> print(describe(past & not_padding))
    3 queries, 5 keys, 4 batch items
    causal, corner bottom right
    batch item 1 has 1 padded key at the end
    batch item 3 sees nothing
    >>> document = torch.tensor([0, 0, 1, 1, 1])
    >>> same = (document[:, None] == document).unsqueeze(-1)
    >>> print(describe(same))
    5 queries, 5 keys, all batch items alike
    documents of 2 and 3

    For `nn.MultiheadAttention`, True hides a key. Its causal mask is inverted here:

    >>> print(describe(~past))
    3 queries, 5 keys, all batch items alike
    query 0 sees keys 3–4
    query 1 sees key 4
    query 2 sees nothing
    warning: looks inverted: its opposite is causal, corner bottom right; use ~mask
    """
    check_mask(mask)
    mask, dtype_warning = as_bool(mask)  # [q_len, k_len, batch_size]
    if mask.dtype != torch.bool:
        return dtype_warning
    allowed = mask.permute(2, 0, 1)  # [batch_size, q_len, k_len]
    items = [describe_item(item) for item in allowed]
    lines = [
        sizes_in_words(mask),
        *facts(allowed, items),
        dtype_warning,
        *warnings(allowed, items),
    ]
    return "\n".join(line for line in lines if line)


class Item(NamedTuple):
    """What the mask of one batch item does: a rule or none, and its exceptions."""

    rule: str
    padded: tuple[int, int] = (0, 0)  # keys at the start, keys at the end
    empty: tuple[int, ...] = ()  # fully masked queries


def describe_item(allowed: Tensor) -> Item:
    """The first rule that gives a mask `[q_len, k_len]`, perhaps with padded keys."""
    has_key = allowed.any(dim=1)  # [q_len]
    has_query = allowed.any(dim=0)  # [k_len]
    empty = tuple(indices(~has_key))
    keys = indices(has_query)
    if not keys:
        return Item(NOTHING)
    everywhere = torch.ones_like(allowed)  # [q_len, k_len]
    not_padded = torch.zeros_like(allowed)  # [q_len, k_len]
    not_padded[:, keys[0] : keys[-1] + 1] = True
    ends = (keys[0], allowed.shape[1] - 1 - keys[-1])
    for padded, span in (((0, 0), everywhere), (ends, not_padded)):
        for rule, given in rules(allowed):
            given = given & span  # [q_len, k_len]
            # Fully masked rows are listed, so the rule need not give them; but it is
            # no description of a mask if they are most of its rows.
            exceptions = (given.any(dim=1) & ~has_key).sum()
            fits = torch.equal(allowed, given & has_key[:, None])
            if fits and exceptions <= has_key.sum():
                return Item(rule, padded, empty)
    return Item("")


def rules(allowed: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The rules that could give a mask, each with the mask that it gives."""
    yield EVERYTHING, torch.ones_like(allowed)
    q_len, k_len = allowed.shape
    if q_len == 1:
        return
    # Offsets are key positions minus query positions. With the last query and the last
    # key in one place, this is the offset of the key in a query's own place.
    own_offset = k_len - q_len
    offset = offsets(allowed)  # [q_len, k_len]
    rows = indices(allowed.any(dim=1))
    keys = indices(allowed.any(dim=0))
    first_row = indices(allowed[rows[0]])
    last_row = indices(allowed[rows[-1]])
    # The greatest and the least offset of a band. A row that touches the last key, or
    # the first, does not show it.
    max_offset = own_offset if first_row[-1] == keys[-1] else first_row[-1] - rows[0]
    min_offset = None if last_row[0] == keys[0] else last_row[0] - rows[-1]
    corner = ", corner bottom right" if own_offset else ""
    yield f"causal{corner}", offset <= own_offset
    if own_offset:
        yield "causal, corner top left", offset <= 0
    if max_offset != own_offset:
        side = "beyond" if max_offset > own_offset else "short of"
        distance = count(abs(max_offset - own_offset), "key")
        yield f"causal, but {distance} {side} its own", offset <= max_offset
    if min_offset is not None:
        before = own_offset - min_offset
        after = max_offset - own_offset
        band = (min_offset <= offset) & (offset <= max_offset)
        if own_offset and max_offset == 0:
            yield f"window of {1 - min_offset}, corner top left", band
        elif before >= 0 and after >= 0:
            sides = f", {before} before its own key and {after} after" if after else ""
            yield f"window of {before + 1 + after}{sides}{corner}", band
    if rows[0] == 0 and first_row[-1] > own_offset:
        prefix_len = first_row[-1] + 1
        prefix = torch.zeros_like(allowed)
        prefix[:, :prefix_len] = True
        past = offset <= own_offset
        yield f"prefix of {prefix_len}, then causal{corner}", prefix | past
    if not own_offset:
        yield from documents(allowed, rows)


def documents(allowed: Tensor, rows: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Documents that are packed one after another, where the rows look like it."""
    # In a document, the first key of each query is the first key of the document.
    first_key = allowed.int().argmax(dim=1)  # [length]
    starts = first_key[rows[0] : rows[-1] + 1]
    lengths = [len(rows) for rows in grouped(starts.tolist()).values()]
    contiguous = len(starts) == len(rows) and not (starts.diff() < 0).any()
    if len(lengths) > 1 and contiguous:
        has_key = allowed.any(dim=1)  # [length]
        same = (first_key[:, None] == first_key) & has_key  # [length, length]
        rule = f"documents of {joined(lengths)}"
        yield rule, same
        yield f"{rule}, causal within each", same & (offsets(allowed) <= 0)


def facts(allowed: Tensor, items: Sequence[Item]) -> Iterator[str]:
    """The patterns, the rows where none fits, and the exceptions from the patterns."""
    alone = len(items) == 1
    items_by_rule = grouped(item.rule for item in items)
    fully_masked = items_by_rule.pop(NOTHING, [])
    for rule, numbers in items_by_rule.items():
        if rule:
            shared = len(items_by_rule) == 1
            yield rule if shared else f"{named('batch item', numbers)}: {rule}"
    yield from rows_in_words(allowed, items_by_rule.get("", []))
    for end, where in enumerate(("start", "end")):
        for n, numbers in grouped(item.padded[end] for item in items).items():
            if n:
                verb = "has" if len(numbers) == 1 else "have"
                subject = "" if alone else f"{named('batch item', numbers)} {verb} "
                yield f"{subject}{count(n, 'padded key')} at the {where}"
    for empty, numbers in grouped(item.empty for item in items).items():
        if empty:
            where = "" if alone else f" of {named('batch item', numbers)}"
            yield f"{named('query', empty)}{where} {sees(empty)} nothing"
    if len(fully_masked) == len(items):
        yield NOTHING
    elif fully_masked:
        yield f"{named('batch item', fully_masked)} {sees(fully_masked)} nothing"


def rows_in_words(
    allowed: Tensor,  # [..., q_len, k_len]
    numbers: Sequence[int],
) -> Iterator[str]:
    """The keys of each query of some items; equal items and rows are listed once."""
    equal = grouped(bytes(allowed[n].flatten().tolist()) for n in numbers)
    listed = 0
    more = 0
    for positions in equal.values():
        group = [numbers[n] for n in positions]
        rows = allowed[group[0]]  # [q_len, k_len]
        prefix = f"{named('batch item', group)}: " if len(allowed) > 1 else ""
        changes = indices((rows[1:] != rows[:-1]).any(dim=1))
        starts = [0, *(n + 1 for n in changes)]
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            listed += 1
            if listed > MAX_ROWS:
                more += end - start
                continue
            queries = range(start, end)
            keys = indices(rows[start])
            subject = named("query", queries) if len(rows) > 1 else "every query"
            seen = named("key", keys) if keys else "nothing"
            yield f"{prefix}{subject} {sees(queries)} {seen}"
    if more:
        yield f"and {count(more, 'more row')}"


def warnings(allowed: Tensor, items: Sequence[Item]) -> Iterator[str]:
    """Common patterns that are usually a mistake."""
    alone = len(items) == 1
    q_len, k_len = allowed.shape[1:]
    # Where no rule fits, does one fit the inverted mask?
    inverted = {}
    for n, item in enumerate(items):
        opposite = "" if item.rule else describe_item(~allowed[n]).rule
        if opposite not in ("", EVERYTHING, NOTHING):
            inverted[n] = opposite
    if inverted:
        n, rule = next(iter(inverted.items()))
        subject = "its opposite" if alone else f"the opposite of batch item {n}"
        yield f"warning: looks inverted: {subject} is {rule}; use ~mask"
    # Inverted padding: the longest sequence, which has none, is fully masked.
    fully_masked = [n for n, item in enumerate(items) if item.rule == NOTHING]
    others = [item for item in items if item.rule != NOTHING]
    only_last_keys = [
        item.rule == EVERYTHING and item.padded[0] > 0 and item.padded[1] == 0
        for item in others
    ]
    if fully_masked and others and all(only_last_keys):
        subject = f"{named('batch item', fully_masked)} {sees(fully_masked)} nothing"
        yield (
            f"warning: looks inverted: only last keys are seen, and {subject}; "
            f"use ~mask"
        )
    if any(item.rule.endswith("corner top left") for item in items):
        yield (
            f"warning: with {count(q_len, 'query')} and {count(k_len, 'key')} the "
            f"corner matters: this is top left, masks.causal({q_len}, {k_len}) is not"
        )
    for n, item in enumerate(items):
        pair = None if n in inverted else find_leak(allowed[n], item)
        if pair is not None:
            where = "" if alone else f" of batch item {n}"
            i, j = pair
            yield f"warning: leaks the future: query {i}{where} sees key {j}"
            break


def find_leak(allowed: Tensor, item: Item) -> tuple[int, int] | None:
    """A query and a key of its future, in a mask that is otherwise nearly causal."""
    q_len, k_len = allowed.shape
    future = offsets(allowed) > k_len - q_len  # [q_len, k_len]
    leaks = allowed & future  # [q_len, k_len]
    if not item.rule:
        leaking_rows = leaks.any(dim=1).sum()
        rows_with_future = future.any(dim=1).sum()
        allowed_past = (allowed & ~future).sum()
        if 2 * leaking_rows > rows_with_future or 2 * allowed_past < (~future).sum():
            return None
    elif "beyond" not in item.rule or item.padded[0]:
        return None  # behind padded keys, a window to both sides looks the same
    pairs = leaks.nonzero().tolist()
    return tuple(pairs[0]) if pairs else None


def offsets(allowed: Tensor) -> Tensor:
    """The position of each key minus that of each query, from the top left corner."""
    q_len, k_len = allowed.shape
    key = torch.arange(k_len, device=allowed.device)  # [k_len]
    query = torch.arange(q_len, device=allowed.device)  # [q_len]
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
    """A list in words; a long one is abbreviated: `0–2, 5 and 3 more`."""
    listed = [str(part) for part in parts[:MAX_RUNS]]
    if len(parts) > MAX_RUNS:
        listed.append(f"{len(parts) - MAX_RUNS} more")
    if len(listed) <= 1:
        return "".join(listed)
    return f"{', '.join(listed[:-1])} and {listed[-1]}"


def named(word: str, numbers: Sequence[int]) -> str:
    """A word and its numbers: `key 3`, `queries 0–2 and 5`."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    runs = [
        f"{start}–{end}" if start < end else f"{start}"
        for start, end in zip(starts, ends, strict=True)
    ]
    return f"{word if len(numbers) == 1 else plural(word)} {joined(runs)}"


def plural(word: str) -> str:
    """The plural of a word."""
    return "queries" if word == "query" else f"{word}s"


def count(n: int, word: str) -> str:
    """A number and its word: `1 key`, `3 queries`."""
    return f"{n} {word if n == 1 else plural(word)}"


def sees(numbers: Sequence[int]) -> str:
    """The verb that agrees with a subject of these numbers."""
    return "sees" if len(numbers) == 1 else "see"


def sizes_in_words(mask: Tensor) -> str:
    """The sizes, in the order of the axes."""
    q_len, k_len, batch_size = mask.shape
    queries = "all queries alike"
    if q_len != 1:
        queries = count(q_len, "query")
    items = "all batch items alike"
    if batch_size != 1:
        items = count(batch_size, "batch item")
    return f"{queries}, {count(k_len, 'key')}, {items}"


def as_bool(mask: Tensor) -> tuple[Tensor, str]:
    """The intended bool mask, and a warning if it has another dtype.

    A floating-point mask that is a bias is returned unchanged.
    """
    if not mask.is_floating_point():
        return mask.bool(), ""
    # Many implementations add -10000 or -1e9 in place of minus infinity.
    if ((mask == 0) | (mask <= -1000)).all():
        way_out = "use masks.from_additive(mask)"
        return mask == 0, f"warning: looks additive, as {mask.dtype}; {way_out}"
    if ((mask == 0) | (mask == 1)).all():
        return mask.bool(), f"warning: is {mask.dtype}, not bool; use mask.bool()"
    return mask, f"warning: {mask.dtype} with other numbers: a bias, not a mask"


def check_mask(mask: Tensor) -> None:
    """Refuse what is not a mask in any dtype."""
    check_tensor("mask", mask)
    if mask.is_complex() or (mask.is_floating_point() and mask.element_size() < 2):
        raise TypeError(f"`mask` is {mask.dtype}, not bool or integer 0/1")
    if mask.dim() != 3:
        raise ValueError(
            f"`mask` has shape {list(mask.shape)}, not {MASK_AXES}; a [q_len, k_len] "
            f"mask needs `mask.unsqueeze(-1)` if True means 'may attend', "
            f"`masks.from_mha(mask, heads)` if True hides"
        )
    if mask.is_meta:
        raise ValueError("`mask` is on meta, where there are no values to describe")
    if not mask.is_floating_point():
        check_zero_one("mask", mask)
