r"""# Dates: a task for the translator

This module is the task on which the [translator](translator.md) is trained: dates as
people write them, in five languages and many forms, become ISO 8601 dates.

| source | target |
|---|---|
| the third of may 1998 | 1998-05-03 |
| sonntag, 3. mai 1998 | 1998-05-03 |
| 3.5.98 | 1998-05-03 |

The task is small enough to be learned in minutes, and needs what translation needs: the
words come in another order, some decide nothing (the weekday), and some are spelled
out. Sources and targets are sequences of characters.

Texts come from a grammar: a *form*, such as `{weekday}, {d}. {month} {y}`, is filled in
with a date. Names of months and days are those of the Unicode CLDR, through
[Babel](https://babel.pocoo.org/). What has two meanings is left out, so that each
text has one right answer:

- No form in figures has slashes: 3/5/1998 is in May or in March, depending on the
  country. With dots, the day comes first.
- Years have two digits from 1969 to 2068 only, where POSIX reads them so.

A date belongs to one split, by its hash. So the dates of the test are not only written
differently from those of the training: they do not occur in it.

Source: the grammar is our own; ISO 8601 for the targets; POSIX.1-2017, `strptime`, for
two-digit years. Zhang et al. 2021, [Dive into Deep Learning](https://d2l.ai), section
10.5, has bad lines of a file of pairs skipped silently; here they are errors.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from headnotes.checks import check_sizes
from headnotes.models.translator import END, PAD, START, UNKNOWN

Split = Literal["train", "validation", "test"]

YEARS, TWO_DIGIT_YEARS = (1900, 2099), (1969, 2068)

# What a text may consist of, in lower case; a token is the number of a character, after
# the four special tokens.
CHARACTERS = " ',-.0123456789abcdefghijklmnopqrstuvwxyzßàáâäçèéêëìíîïñòóôöùúûüœ"
NUMBERS = {character: number for number, character in enumerate(CHARACTERS, END + 1)}
VOCAB_SIZE = END + 1 + len(CHARACTERS)

# The forms of each language. `d` and `m` are figures, `dd` and `mm` padded to two
# digits, `month` and `mon` names, `y` and `yy` years of four and of two digits.
FORMS = [
    (language, form)
    for language, forms in {
        "en": [
            "{month} {d}, {y}",
            "{month} {ordinal}, {y}",
            "{weekday}, {month} {ordinal}, {y}",
            "{weekday}, {d} {month} {y}",
            "the {ordinal} of {month} {y}",
            "the {spelled} of {month} {y}",
            "{d} {month} {y}",
            "{d} {mon} {yy}",
            "{mon} {d}, {y}",
            "{y}-{mm}-{dd}",
        ],
        "de": [
            "{d}. {month} {y}",
            "{dd}. {month} {y}",
            "{weekday}, {d}. {month} {y}",
            "{weekday}, der {d}. {month} {y}",
            "{d}. {mon} {yy}",
            "{d}.{m}.{y}",
            "{d}.{m}.{yy}",
            "{dd}.{mm}.{y}",
        ],
        "fr": [
            "{d} {month} {y}",
            "le {d} {month} {y}",
            "{weekday} {d} {month} {y}",
            "le {weekday} {d} {month} {y}",
            "{d} {mon} {yy}",
        ],
        "es": [
            "{d} de {month} de {y}",
            "el {d} de {month} de {y}",
            "{weekday}, {d} de {month} de {y}",
            "{d} {mon} {yy}",
        ],
        "it": [
            "{d} {month} {y}",
            "il {d} {month} {y}",
            "{weekday} {d} {month} {y}",
            "{d} {mon} {yy}",
        ],
    }.items()
    for form in forms
]

# English ordinals, which the CLDR does not spell.
UNITS = [
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"),
    "ninth",
]
TEENS = [
    *("tenth", "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth"),
    *("sixteenth", "seventeenth", "eighteenth", "nineteenth"),
]
TWENTIES = ["twentieth", *(f"twenty-{unit}" for unit in UNITS)]
ORDINALS = [*UNITS, *TEENS, *TWENTIES, "thirtieth", "thirty-first"]


class Pair(NamedTuple):
    """A text, and the date that it means, in ISO 8601."""

    text: str
    target: str


# What draws pairs: of which split, how many, and with which random numbers.
Draw = Callable[[Split, int, Random], list[Pair]]


class Batch(NamedTuple):
    """Pairs as tokens, with the lengths of their sources.

    `source` is `[source_len, batch_size]`. `target` is `[target_len, batch_size]`, from
    `START` to `END`: all but its last row is the decoder's input, all but its first
    row what the decoder is to predict.
    """

    source: Tensor
    source_lens: Tensor
    target: Tensor


@cache
def names(language: str) -> tuple[list[str], list[str], list[str]]:
    r"""Months, months abbreviated, and weekdays from Monday, in lower case.

    Raises `ImportError` without Babel.

    >>> months, short, weekdays = names("de")
    >>> months[4], short[0], weekdays[6]
    ('mai', 'jan.', 'sonntag')
    """
    try:
        from babel.dates import get_day_names, get_month_names
    except ImportError:
        raise ImportError("the names of months need Babel: pip install babel") from None
    found = (
        get_month_names("wide", "format", language),
        get_month_names("abbreviated", "format", language),
        get_day_names("wide", "format", language),
    )
    months, short, weekdays = (
        [by_number[n].lower() for n in sorted(by_number)] for by_number in found
    )
    return months, short, weekdays


def write(day: date, language: str, form: str) -> str:
    r"""Write a date in a form of a language.

    >>> day = date(1998, 5, 3)
    >>> write(day, "en", "{weekday}, {month} {ordinal}, {y}")
    'sunday, may 3rd, 1998'
    >>> write(day, "es", "{d} de {month} de {y}")
    '3 de mayo de 1998'
    """
    months, short, weekdays = names(language)
    ending = {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    if 11 <= day.day <= 13:
        ending = "th"
    return form.format(
        d=day.day,
        dd=f"{day.day:02}",
        m=day.month,
        mm=f"{day.month:02}",
        month=months[day.month - 1],
        mon=short[day.month - 1],
        ordinal=f"{day.day}{ending}",
        spelled=ORDINALS[day.day - 1],
        weekday=weekdays[day.weekday()],
        y=day.year,
        yy=f"{day.year % 100:02}",
    )


def split_of(day: date) -> Split:
    r"""The split of a date, by its hash: 80 % training, 10 % validation, 10 % test.

    >>> split_of(date(1998, 5, 3)), split_of(date(1998, 5, 2))
    ('train', 'test')
    """
    # `hash` differs from one process to the next.
    tenth = hashlib.sha256(day.isoformat().encode()).digest()[0] * 10 // 256
    return "test" if tenth == 9 else "validation" if tenth == 8 else "train"


def sample(split: Split, count: int, random: Random) -> list[Pair]:
    r"""Draw `count` pairs of a split: uniform over the forms, then over the dates.

    Raises `ValueError` for another split.

    >>> for pair in sample("test", 3, Random(5)):
    ...     print(f"{pair.text:28}{pair.target}")
    le 4 février 2067           2067-02-04
    el 11 de octubre de 1977    1977-10-11
    montag, der 3. oktober 2039 2039-10-03
    """
    if split not in ("train", "validation", "test"):
        raise ValueError(f"`split` is {split!r}, not 'train', 'validation' or 'test'")
    check_sizes(count=count)

    pairs = []
    for _ in range(count):
        language, form = random.choice(FORMS)
        first, last = TWO_DIGIT_YEARS if "{yy}" in form else YEARS
        # Drawn until the date is of this split.
        while split_of(day := draw_day(first, last, random)) != split:
            pass
        pairs.append(Pair(write(day, language, form), day.isoformat()))
    return pairs


def draw_day(first: int, last: int, random: Random) -> date:
    """A date of the years from `first` to `last`."""
    start, end = date(first, 1, 1).toordinal(), date(last, 12, 31).toordinal()
    return date.fromordinal(random.randint(start, end))


def encode(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    r"""The numbers of the characters, `[seq_len, batch_size]`, and the lengths.

    Short texts are padded at the end; a character outside of `CHARACTERS` is `UNKNOWN`.
    Raises `ValueError` for an empty list, or an empty text.

    >>> tokens, lengths = encode(["3 mai", "Mai!"])
    >>> tokens.T
    tensor([[12,  4, 31, 19, 27],
            [31, 19, 27,  1,  0]])
    >>> lengths
    tensor([5, 4])
    """
    if not texts or not all(texts):
        raise ValueError(f"`texts` is {list(texts)!r}; give at least one, none empty")
    columns = [
        torch.tensor([NUMBERS.get(character, UNKNOWN) for character in normalize(text)])
        for text in texts
    ]
    lengths = torch.tensor([len(column) for column in columns])  # [batch_size]
    tokens = nn.utils.rnn.pad_sequence(columns, padding_value=PAD)
    return tokens, lengths  # [..., batch_size], [batch_size]


def normalize(text: str) -> str:
    r"""Lower case, and one character for a letter with an accent.

    >>> normalize("Fe\u0301vrier")
    'février'
    """
    return unicodedata.normalize("NFC", text.lower())


def encode_pairs(pairs: Sequence[Pair]) -> Batch:
    r"""The tokens of some pairs.

    >>> batch = encode_pairs([Pair("3 mai 1998", "1998-05-03")])
    >>> batch.source.shape, batch.target.shape
    (torch.Size([10, 1]), torch.Size([12, 1]))
    """
    source, source_lens = encode([pair.text for pair in pairs])  # [..., batch_size]
    target, _ = encode([pair.target for pair in pairs])  # [..., batch_size]
    edges = [torch.full_like(target[:1], token) for token in (START, END)]
    return Batch(source, source_lens, torch.cat([edges[0], target, edges[1]]))


def decode(
    tokens: Tensor,
) -> list[str]:
    r"""The texts of tokens `[seq_len, batch_size]`, each up to its `END`.

    >>> decode(encode_pairs([Pair("3.5.98", "1998-05-03")]).target[1:])
    ['1998-05-03']
    """
    texts = []
    for column in tokens.T.tolist():
        end = column.index(END) if END in column else len(column)
        symbols = [CHARACTERS[n - 4] if n > END else "?" for n in column[:end]]
        texts.append("".join(symbols))
    return texts


def read_pairs(path: Path, *, skip_bad_lines: bool = False) -> list[Pair]:
    r"""Read the pairs of a TSV file: on each line a text, a tab, and an ISO date.

    Bad lines are reported together, by number; with `skip_bad_lines` they are left out.
    Raises `ValueError` for bad lines, and for a file without any good line.
    """
    pairs, faults = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            pairs.append(read_pair(line.decode("utf-8")))
        except ValueError as error:
            faults.append(f"line {number}: {error}")
    if faults and not skip_bad_lines:
        shown = "\n".join(faults[:5] + ["..."] * (len(faults) > 5))
        raise ValueError(
            f"`{path}` has {len(faults)} bad lines; correct them, or leave them out "
            f"with `skip_bad_lines` (`--skip-bad-lines`):\n{shown}"
        )
    if not pairs:
        raise ValueError(f"`{path}` has no line with a text, a tab and an ISO date")
    return pairs


def read_pair(line: str) -> Pair:
    r"""Read one line of a TSV file; a fault is a `ValueError`.

    >>> read_pair("3. Mai 1998\t1998-05-03")
    Pair(text='3. mai 1998', target='1998-05-03')
    """
    fields = line.split("\t")
    if len(fields) != 2:
        raise ValueError(f"{len(fields)} fields, not a text, a tab and a date")
    text, target = normalize(fields[0].strip()), fields[1].strip()
    if not text:
        raise ValueError("no text before the tab")
    if unknown := sorted({*text} - {*CHARACTERS}):
        raise ValueError(f"characters that the model does not know: {unknown}")
    try:
        day = date.fromisoformat(target)
    except ValueError:
        day = None
    # `fromisoformat` also reads other forms of ISO 8601, such as 1998-W18-7.
    if day is None or day.isoformat() != target:
        raise ValueError(f"{target!r} is no date written like 1998-05-03")
    return Pair(text, target)


def sampler(pairs: Sequence[Pair]) -> Draw:
    r"""What draws from these pairs as `sample` does from the grammar.

    Raises `ValueError` where a split has no date.

    >>> texts = ["3 mai", "2 mai", "6 mai"]
    >>> days = ["1998-05-03", "1998-05-02", "1998-05-06"]
    >>> draw = sampler([Pair(*each) for each in zip(texts, days)])
    >>> draw("test", 2, Random(5))
    [Pair(text='2 mai', target='1998-05-02'), Pair(text='2 mai', target='1998-05-02')]
    """
    by_split: dict[Split, list[Pair]] = {"train": [], "validation": [], "test": []}
    for pair in pairs:
        by_split[split_of(date.fromisoformat(pair.target))].append(pair)
    empty = [split for split, found in by_split.items() if not found]
    if empty:
        raise ValueError(
            f"of {len(pairs)} pairs none has a date of the split {' or '.join(empty)}, "
            f"to which a tenth of all dates belongs; add pairs with other dates"
        )

    def draw(split: Split, count: int, random: Random) -> list[Pair]:
        return random.choices(by_split[split], k=count)

    return draw
