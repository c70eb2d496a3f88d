"""Pages, docstrings, comments and messages use the field's terms.

`PHRASES` pairs a term with a pattern of what not to write instead. A space in a pattern
is any white space, so that a phrase is found across two lines.
"""

import re
from functools import cache
from pathlib import Path

import pytest
from pygments.lexers import get_lexer_for_filename
from pygments.token import Comment, String, Text, _TokenType

ROOT = Path(__file__).parent.parent
FOLDERS = ["docs", "examples", "museum", "scripts", "src"]
TEXTS = ["*.md", "*.yml", "docs/**/*.md", "src/**/*.md", "examples/**/*.md"]
CODE = ["*.py", "docs/assets/*.js", "src/**/*.js"]
CODE += [f"{folder}/**/*.py" for folder in FOLDERS]

# Of code, the comments and strings are prose, and the space between them. Doctests and
# what stands in backticks are code again.
EXAMPLE = re.compile(r"^[ #]*(>>>|\.\.\. ).*$", re.MULTILINE)
QUOTED = re.compile(r"`[^`\n]+`")
MARKS = re.compile(r"[#\"'*]")

BE = r"\b(is|are|was|were|be|been)"
COUNTED = "every|each|a|the|one|two|three|four|six|all|no|this|that|our|its|same"
PLACED = "next|last|first|second|third|other|later|earlier|future|past|different"
# What to write, and what not. Where several phrases stand for one term, or for terms of
# one kind, each has a line.
PHRASES = [
    ("token", r"\bwords? (that |also |still |may |must )?(asks?|reads?|sees?)\b"),
    ("token", r"\bword (by|after) word\b"),
    ("padding, padded", r"\bfillers?\b|\bfill(s|ed|ing)? up\b"),
    ("backward pass", r"\b(the|a|its) way back\b"),
    ("NaN", BE + r" (no numbers?|not a number|not numbers)\b|\bspoil(s|t|ed)?\b"),
    ("query", r"\b(row|query|position|who|one|padding|sequence) (that )?asks\b"),
    ("key, value", r"\b(token|word|one|key|those)s? (that|who) (is|are) read\b"),
    ("attends to", r"\bmay (only |not |also |still )?(be )?read\b"),
    ("attends to", r"\blisten(s|ed|ing)? to (every|some|any|each|no)"),
    ("context vectors", r"\bwhat is read\b"),
    ("fully masked row", r"\bread(s|ing)? nothing\b|\bempty rows?\b"),
    ("fully masked row", r"\brows? (without|with no) keys?\b"),
    ("causal (masked)", r"\blook(s|ing)? (only |always )?backwards?\b"),
    ("KV cache", r"\bkeys and values,? kept\b"),
    ("transposed, rotated", r"\bturned\b(?! (off|on|into|out|to)\b)"),
    ("as stored in memory", r"\bas (they|it) lies?\b|\blet them lie\b"),
    ("random numbers", r"\bnumbers (that|which) are drawn\b"),
    ("random numbers", r"\bdraws? (its|their|the same|fewer|more|other) \w+"),
    ("samples", r"\b(single|all|the|of|those|\d[\d,]*) draws?\b"),
    ("blockwise, tiled", r"\bby blocks\b|\ba block at a time\b"),
    ("flatten dimensions", r"\bfold(s|ed|ing)? (heads|batch|into (one|the))\b"),
    ("initialized", r"\bborn\b|\bat birth\b"),
    ("Headnotes, this module", r"\b(this|our|the) house\b"),
    ("passes or violates a law", r"\blaws? (that )?(is|are|was|were) (kept|broken)\b"),
    ("passes or violates a law", r"\b(keep|kept|break|broke)\w* (a|an|the|no) laws?\b"),
    ("implementations", r"\bcontest(s|ants?)?\b"),
    ("excluded", r"\bsent home\b"),
    ("copy", r"\b(take|taken|taking) (\w+ )?home\b"),
    ("fix", r"\bmend(s|ed|ing)?\b"),
    ("it in the active voice", BE + r" (said|asked|looked at|listened)\b"),
    ("it in the active voice", BE + r" told\b(?! apart)"),
    ("of a thing as subject", r"\bwho(ever|m)\b|\b(some|every)body\b|\beveryone\b"),
    ("of a thing as subject", r"(?-i:\bWho )(?![^.?]*\?)\w+s\b|\bwho may\b"),
    ("in American spelling", r"\b\w*(colour|neighbour|behaviour|favour)\w*"),
    ("in American spelling", r"\b(grey|licence|centre)s?\b"),
    ("in American spelling", r"\b(initial|normal|optim|recogn|vector|quant)is(e|ing)"),
]
# These words have other meanings where no model reads a text.
IN_LESSONS = [
    ("token", rf"(?<!is\s)(?<!are\s)\b({COUNTED}|{PLACED}) words?\b"),
    ("attends to", r"\breads? (most |only |least )?(from|itself|everything)\b"),
]


def compiled(phrases: list[tuple[str, str]]) -> list[tuple[str, re.Pattern[str]]]:
    return [
        (term, re.compile(phrase.replace(" ", r"\s+"), re.IGNORECASE))
        for term, phrase in phrases
    ]


ALL, LESSONS = compiled(PHRASES), compiled(IN_LESSONS)


@cache
def prose(path: Path) -> str:
    """The text of a file; all else in it is blank, so that lines keep their numbers."""
    text = path.read_text(encoding="utf-8")
    if path.suffix not in (".md", ".yml"):
        lexer = get_lexer_for_filename(path.name)
        tokens = lexer.get_tokens_unprocessed(text)
        text = "".join(
            part if is_prose(kind) else blank(part) for _, kind, part in tokens
        )
        text = EXAMPLE.sub(lambda match: blank(match[0]), text)
    text = QUOTED.sub(lambda match: blank(match[0]), text)
    return MARKS.sub(" ", text)


def is_prose(kind: _TokenType) -> bool:
    if kind in String.Affix or kind in String.Interpol:
        return False
    return kind in Comment or kind in String or kind in Text


def blank(code: str) -> str:
    """As many lines and characters, which no pattern matches."""
    return re.sub(r"[^\n]", "\0", code)


def files() -> list[Path]:
    return sorted({path for pattern in TEXTS + CODE for path in ROOT.glob(pattern)})


def phrases_in(text: str, name: str) -> list[tuple[int, str, str]]:
    """Lines, words and terms: what of `text` should be said otherwise."""
    return sorted(
        (text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), term)
        for term, pattern in ALL + LESSONS * name.startswith("docs/learn/")
        for match in pattern.finditer(text)
    )


@pytest.mark.slow
def test_all_prose_uses_the_terms_of_the_field() -> None:
    found = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        # Few files hold a phrase at all: only those are separated into code and prose.
        if not phrases_in(MARKS.sub(" ", path.read_text(encoding="utf-8")), name):
            continue
        for line, words, term in phrases_in(prose(path), name):
            found.append(f"{name}:{line}: “{words}”: write {term}")
    assert not found, f"{len(found)} phrases:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("code", "place", "term"),
    [
        ("# Kept for the way\n# back.", 1, "backward pass"),
        ('"The rule of "\n"this house"', 2, "Headnotes, this module"),
        ('f"{name}: a key {name} is no number"', 1, "NaN"),
        ("x = 1\n\nborn = x  # Mended.", 3, "fix"),
    ],
)
def test_phrases_are_found_across_lines_and_in_strings(
    tmp_path: Path, code: str, place: int, term: str
) -> None:
    path = tmp_path / "some.py"
    path.write_text(code)
    ((line, _, found),) = phrases_in(prose(path), "some.py")
    assert (line, found) == (place, term)


@pytest.mark.parametrize(
    "code", ["mended = born", "# `filler`", '"""\n>>> mend(x)\n"""']
)
def test_names_of_code_are_no_prose(tmp_path: Path, code: str) -> None:
    path = tmp_path / "some.py"
    path.write_text(code)
    assert phrases_in(prose(path), "some.py") == []
