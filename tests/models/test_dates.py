"""Dates: each text has one meaning, splits are disjoint, bad lines are named."""

from datetime import date
from pathlib import Path
from random import Random

import pytest

from headnotes.models import dates
from headnotes.models.dates import CHARACTERS, FORMS, Pair


@pytest.mark.slow
def test_no_text_has_two_meanings() -> None:
    # All days of years with the same and with other figures for day, month and year.
    meanings: dict[str, date] = {}
    for year in (1901, 2001, 2010, 2012):
        for number in range(365):
            day = date.fromordinal(date(year, 1, 1).toordinal() + number)
            for language, form in FORMS:
                if "{yy}" in form and year == 1901:
                    continue
                text = dates.write(day, language, form)
                assert meanings.setdefault(text, day) == day, text
    assert {*"".join(meanings)} <= {*CHARACTERS}


def test_the_grammar_writes_well_over_a_million_texts_in_five_languages() -> None:
    days = date(2100, 1, 1).toordinal() - date(1900, 1, 1).toordinal()
    year = [date.fromordinal(date(1999, 1, 1).toordinal() + n) for n in range(365)]
    full = [each for each in FORMS if "{yy}" not in each[1]]
    # Forms of two languages may agree, so distinct texts are counted in one year.
    texts = {dates.write(day, *each) for day in year for each in full}
    assert len(texts) / 365 * days > 1.7e6
    assert {language for language, _ in FORMS} == {"en", "de", "fr", "es", "it"}


def test_no_date_is_in_two_splits_and_a_tenth_is_held_out_for_each_test() -> None:
    random = Random(3)
    drawn = {
        split: {pair.target for pair in dates.sample(split, 500, random)}
        for split in ("train", "validation", "test")
    }
    assert not drawn["train"] & drawn["test"]
    assert not drawn["train"] & drawn["validation"]
    assert not drawn["validation"] & drawn["test"]
    days = [date.fromordinal(700_000 + n) for n in range(2000)]
    for split in ("validation", "test"):
        share = sum(dates.split_of(day) == split for day in days) / len(days)
        assert 0.08 < share < 0.12


def test_two_digits_name_a_year_as_posix_reads_them() -> None:
    pairs = dates.sample("train", 400, Random(5))
    short = [p for p in pairs if not any(p.target[:4] in word for word in [p.text])]
    assert short
    for pair in short:
        two = int(pair.text[-2:])
        assert pair.target.startswith(str(two + (1900 if two > 68 else 2000)))


def test_bad_lines_are_named_by_number_and_skipped_on_request_only(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pairs.tsv"
    lines = [
        b"3. Mai 1998\t1998-05-03",
        b"3. Mai 1998 1998-05-03",
        b"30 February\t1998-02-30",
        b"week 18\t1998-W18-7",
        b"\t1998-05-03",
        b"3 \xe4\t1998-05-03",
        "五月\t1998-05-03".encode(),
        b"4 mai 1998\t1998-05-04\r",
    ]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match="6 bad lines") as caught:
        dates.read_pairs(path)
    message = str(caught.value)
    for said in (
        "line 2: 1 fields",
        "line 3: '1998-02-30' is no date",
        "line 4: '1998-W18-7' is no date",
        "line 5: no text",
        "line 6: 'utf-8' codec",
        "--skip-bad-lines",
    ):
        assert said in message
    pairs = dates.read_pairs(path, skip_bad_lines=True)
    assert pairs == [
        Pair("3. mai 1998", "1998-05-03"),
        Pair("4 mai 1998", "1998-05-04"),
    ]
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="no line with a text"):
        dates.read_pairs(path)


def test_pairs_of_a_file_are_drawn_from_their_own_split() -> None:
    pairs = dates.sample("train", 9, Random(1)) + dates.sample("test", 5, Random(1))
    with pytest.raises(ValueError, match=r"of 14 pairs none has .* split validation"):
        dates.sampler(pairs)
    draw = dates.sampler(pairs + dates.sample("validation", 2, Random(1)))
    assert {*draw("test", 50, Random(2))} == {*pairs[9:]}


def test_another_split_and_empty_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="`split` is 'dev', not 'train'"):
        dates.sample("dev", 1, Random(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one, none empty"):
        dates.encode(["3 mai", ""])
