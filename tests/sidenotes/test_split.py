"""Cutting sources into sections: nothing lost, nothing twice, nothing misread."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidenotes.split import REGION, LiterateError, Section, read, split

ROOT = Path(__file__).parent.parent.parent
FILES = sorted(
    p
    for folder in ("src", "docs")
    for p in (ROOT / folder).rglob("*.py")
    if p.read_text(encoding="utf-8").strip()
)


def cut(source: str) -> list[Section]:
    return split(source, Path("a.py"))


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def assert_nothing_lost(source: str) -> None:
    """Each line is in one section, as a note or as code, and notes say what it says."""
    lines = source.split("\n")
    sections = cut(source)
    numbers = [n for s in sections for n in (*s.note_lines, *s.code_lines)]
    expected = range(1, len(lines) + (lines[-1] != ""))
    assert sorted(numbers) == list(expected)
    for section in sections:
        # What the lines of a note say is what the note says, less the prefix of a
        # docstring; and nothing but notes and blank lines is kept from the code.
        written = [lines[n - 1] for n in section.note_lines]
        said = words(" ".join(line for line in written if not REGION.match(line)))
        shown = words(" ".join(section.note))
        assert [w for w in said if w not in "rR"] == [w for w in shown if w not in "rR"]
        for n in section.code_lines:
            assert not lines[n - 1].startswith("# note")


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_line_of_the_project_is_lost_or_shown_twice(path: Path) -> None:
    assert_nothing_lost(read(path))


# Statements that a careless cutter trips over.
STATEMENTS = st.sampled_from(
    [
        "x = 1",
        "# note\n# of two lines",
        "# note\n\n# and another",
        "#note without a space",
        "#",
        "",
        "\n",
        "call(\n    # inside\n    1,  # end\n)",
        "text = '''\n# no comment\n\n'''",
        "x = [\n\n    1,\n]",
        "y = x  # [at, the, end]",
        "x = 1; y = 2",
        "# type: ignore",
        "# region One",
        "# endregion",
        "'a string, no docstring'",
        "x = 1 + \\\n    2",
        "f'{x}'",
        "lambda: (\n    # inside\n    1\n)",
    ]
)
DOCSTRINGS = st.sampled_from(
    [
        '("""In brackets.""")',
        '("Two"\n     "strings.")',
        '"""Docs."""; x = 1',
        "",
        '"""One line."""',
        'r"""Two\n\n    lines."""',
        "'''Single.'''",
        "'Short.'",
    ]
)
HEADERS = st.sampled_from(
    [
        "def f():",
        "def f(\n    a,  # [n]\n    # inside\n    b,\n):",
        "async def f():",
        "class C:",
        "@decorate\n@twice(\n    1,\n)\ndef f():",
        "@decorate\n# between\nclass C:",
        "if x:",
        "with x:",
    ]
)


def indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else line for line in text.split("\n"))


def block(header: str, docstring: str, body: list[str]) -> str:
    if docstring and ("def " in header or "class " in header):
        body = [docstring, *body]
    return f"{header}\n{indented(chr(10).join([*body, 'pass']))}"


SOURCES = st.recursive(
    STATEMENTS,
    lambda inner: st.builds(block, HEADERS, DOCSTRINGS, st.lists(inner, max_size=4)),
    max_leaves=12,
)


@pytest.mark.slow
@given(
    DOCSTRINGS, st.lists(SOURCES, min_size=1, max_size=6), st.sampled_from(["", "\n"])
)
def test_no_line_of_a_generated_source_is_lost_or_shown_twice(
    docstring: str, parts: list[str], end: str
) -> None:
    source = "\n".join([docstring.replace("    ", ""), *parts]) + end
    if source.strip():
        assert_nothing_lost(source)


def test_a_docstring_stands_beside_the_line_that_it_documents() -> None:
    (section,) = cut('def f(x):\n    """What."""\n    return x\n')
    assert section.symbol == "f"
    assert section.note == ["What."]
    assert section.code_lines == [1, 3]


def test_a_comment_opens_a_section_that_runs_to_the_next() -> None:
    first, second = cut("# one\na = 1\nb = 2\n# two\n# more\nc = 3\n")
    assert (first.note, first.code_lines) == (["one"], [2, 3])
    assert (second.note, second.code_lines) == (["two\nmore"], [6])


def test_a_comment_above_a_definition_belongs_to_it() -> None:
    (section,) = cut('# why\n@cached\ndef f():\n    """What."""\n')
    assert section.symbol == "f"
    assert section.note == ["why", "What."]
    assert section.code_lines == [2, 3]


def test_the_last_remark_in_a_function_is_not_about_the_next() -> None:
    sections = cut("def f():\n    pass\n    # over\n\ndef g():\n    pass\n")
    assert [(s.symbol, s.note) for s in sections] == [
        ("f", []),
        ("", ["over"]),
        ("g", []),
    ]


def test_code_after_a_definition_is_not_under_its_heading() -> None:
    sections = cut("class C:\n    def f(self):\n        pass\n\n    x = 1\n\ny = 2\n")
    assert [(s.symbol, s.scope, s.code_lines) for s in sections] == [
        ("C", "C", [1]),
        ("C.f", "C.f", [2, 3, 4]),
        ("", "C", [5, 6]),
        ("", "", [7]),
    ]


def test_nested_and_async_definitions_have_dotted_names() -> None:
    source = "class A:\n    async def f(self):\n        def g():\n            pass\n"
    assert [s.symbol for s in cut(source)] == ["A", "A.f", "A.f.g"]


def test_a_comment_inside_a_call_does_not_split_it() -> None:
    (section,) = cut("f(\n    # inside\n    1,\n)\n")
    assert section.code_lines == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "pragma", ["# type: ignore", "# noqa: E501", "# fmt: off", "#!/usr/bin/env python"]
)
def test_a_comment_to_a_tool_is_no_note(pragma: str) -> None:
    (section,) = cut(f"{pragma}\nx = 1\n")
    assert section.note == []
    assert section.code_lines == [1, 2]


def test_a_region_runs_from_its_title_to_its_end() -> None:
    source = "a = 1\n\n# region Checks\n# why\n\ndef f(): ...\n\n# endregion\nb = 2\n"
    assert [(s.region, s.symbol, s.note, s.code_lines) for s in cut(source)] == [
        ("", "", [], [1, 2]),
        ("Checks", "f", ["why"], [5, 6, 7]),
        ("", "", [], [9]),
    ]


def test_a_region_without_an_end_runs_to_the_end_of_the_file() -> None:
    sections = cut("a = 1\n# region Checks\ndef f(): ...\n\ndef g(): ...\n")
    assert [section.region for section in sections] == ["", "Checks", "Checks"]


def test_a_region_inside_of_a_function_is_for_editors_only() -> None:
    (section,) = cut(
        "def f():\n    # region A\n    x = 1\n    # endregion\n    return x\n"
    )
    assert section.region == ""
    assert section.code_lines == [1, 2, 3, 4, 5]


def test_the_docstring_of_the_module_stands_alone() -> None:
    intro, imports = cut('"""# Title\n\nProse.\n"""\n\nimport os\n')
    assert intro.is_module
    assert intro.note == ["# Title\n\nProse."]
    assert imports.code_lines == [6]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"x = 1\r\ny = 2\r\n", "x = 1\ny = 2\n"),
        (b"x = 1\ry = 2\r", "x = 1\ny = 2\n"),
        (b"\xef\xbb\xbfx = 1\n", "x = 1\n"),
        (b"# coding: latin-1\nx = '\xe9'\n", "# coding: latin-1\nx = 'é'\n"),
    ],
    ids=["CRLF", "CR", "byte order mark", "latin-1"],
)
def test_line_ends_and_encodings_are_understood(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(content)
    assert read(path) == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "1: the file is empty"),
        ("\n \n", "1: the file is empty"),
        ("x = 1\ny = (\n", r"2: does not parse: '\(' was never closed"),
        ("x = 1\n\N{NO-BREAK SPACE}y = 2\n", "2: does not parse: .*U\\+00A0"),
        ("if x:\n\ty = 1\n        z = 2\n", "3: does not parse: .*tabs"),
        (
            'def f():\n    """A $\\\\frac12$."""\n',
            '2: the docstring has a backslash but is not raw; write r"""',
        ),
        ("x = 1\0\n", "1: does not parse: .*null byte"),
    ],
)
def test_what_cannot_be_a_page_is_refused_with_its_line(
    content: str, reason: str
) -> None:
    with pytest.raises(LiterateError, match=f"^a.py:{reason}"):
        cut(content)


def test_a_file_that_is_missing_or_unreadable_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing.py"
    with pytest.raises(LiterateError, match=re.escape(f"{missing}:1: there is no")):
        read(missing)
    latin = tmp_path / "latin.py"
    latin.write_bytes(b"x = '\xe9'\n")
    with pytest.raises(LiterateError, match=re.escape(f"{latin}:1: cannot be read")):
        read(latin)
    with pytest.raises(LiterateError, match=re.escape(f"{tmp_path}:1: cannot be read")):
        read(tmp_path)
