"""Split a Python source into sections: a note, and the lines of code that it explains.

A note is a docstring, or consecutive comments on lines of their own. Every line of the
source belongs to exactly one section, either to its note or to its code.
"""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# Comments for tools are not notes: they remain in the code.
PRAGMA = re.compile(
    r"#(!|\s*(type:|noqa|fmt:|ruff:|pragma:|pylint:|mypy:|SPDX-|-\*-|(end)?region\b))"
)

# Editors fold what stands between `# region Title` and `# endregion`; so does the page.
REGION = re.compile(r"#\s*(?:region\s+(?P<title>\S.*)|endregion\b)")

# Exceptions of Python for sources that it cannot parse, or that are nested too deeply.
UNREADABLE = (
    SyntaxError,
    ValueError,
    tokenize.TokenError,
    RecursionError,
    MemoryError,
)


class LiterateError(Exception):
    """A source that cannot be rendered; the message has file, line and reason."""


@dataclass
class Section:
    """A note and its code; lines are numbered from 1."""

    scope: str = ""  # dotted name of the innermost enclosing definition
    symbol: str = ""  # dotted name of the definition that begins here, if any
    is_module: bool = False  # whether it has the docstring of the module
    region: str = ""  # title of the enclosing region, if any
    note: list[str] = field(default_factory=list)  # paragraphs of Markdown
    note_lines: list[int] = field(default_factory=list)
    code_lines: list[int] = field(default_factory=list)


def read(path: Path) -> str:
    """The text of a source file, with any line ends and declared encoding."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except FileNotFoundError:
        raise LiterateError(f"{path}:1: there is no such file") from None
    except (OSError, LookupError, SyntaxError, UnicodeDecodeError) as error:
        raise LiterateError(f"{path}:1: cannot be read: {error}") from None


def split(source: str, path: Path) -> list[Section]:
    r"""Split `source` into sections; `path` is used in error messages.

    >>> source = '''
    ... def double(x):
    ...     \"\"\"Twice `x`.\"\"\"
    ...     # Adding is cheaper than multiplying.
    ...     return x + x
    ... '''
    >>> for section in split(source.lstrip(), Path("double.py")):
    ...     print(section.symbol, section.note, section.code_lines)
    double ['Twice `x`.'] [1]
     ['Adding is cheaper than multiplying.'] [4]
    """
    if not source.strip():
        raise LiterateError(f"{path}:1: the file is empty")
    try:
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except UNREADABLE as error:
        line = getattr(error, "lineno", None) or 1
        raise LiterateError(f"{path}:{line}: does not parse: {error}") from None

    lines = source.split("\n")
    docstrings = find_docstrings(tree, tokens, lines, path)
    return assign(lines, tree, docstrings, find_comments(tokens), find_regions(tokens))


def assign(
    lines: list[str],
    tree: ast.Module,
    docstrings: dict[int, tuple[str, int, bool]],
    comments: dict[int, str],
    regions: dict[int, str],
) -> list[Section]:
    """Assign each line to a section, in one pass from top to bottom."""
    definitions = {first_line(node): name for name, node in named(tree)}
    scopes = scope_of_lines(tree, len(lines))
    sections = [Section()]
    region = ""
    number = 0
    while number < len(lines) - (lines[-1] == ""):
        number += 1
        section = sections[-1]
        has_code = any(lines[n - 1].strip() for n in section.code_lines)
        # A note belongs to the code below it, if that has the same indentation.
        waits = not section.note_lines or same_indent(lines, section, number)
        full = has_code or section.symbol or section.is_module or not waits

        if number in regions:
            region = regions[number]
            section = Section(note_lines=[number])
        elif number in docstrings:
            text, last, of_module = docstrings[number]
            if of_module and (has_code or section.note):
                section = Section()
            section.is_module |= of_module
            section.note.append(text)
            section.note_lines += range(number, last + 1)
            number = last
        elif number in comments:
            section = Section(scope=scopes[number]) if full else section
            if section.note and section.note_lines[-1] == number - 1:
                section.note[-1] += f"\n{comments[number]}"
            else:
                section.note.append(comments[number])
            section.note_lines.append(number)
        elif number in definitions:
            section = Section() if full else section
            section.symbol = section.scope = definitions[number]
            section.code_lines.append(number)
        else:
            blank = not lines[number - 1].strip()
            if not blank and (section.is_module or leaves(section, scopes[number])):
                section = Section(scope=scopes[number])
            section.code_lines.append(number)
        if section is not sections[-1]:
            section.region = region
            sections.append(section)
    return [s for s in sections if s.note_lines or s.code_lines]


def same_indent(lines: list[str], section: Section, number: int) -> bool:
    """Whether a line has the indentation of a section's note."""
    note, line = lines[section.note_lines[-1] - 1], lines[number - 1]
    return len(note) - len(note.lstrip()) == len(line) - len(line.lstrip())


def leaves(section: Section, scope: str) -> bool:
    """Whether a line in `scope` is outside the definition that `section` is in."""
    return bool(section.code_lines) and not f"{scope}.".startswith(f"{section.scope}.")


def named(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """All definitions with their dotted names, the outer before the inner."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield f"{prefix}{node.name}", node
            yield from named(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):  # those hold no definitions
            yield from named(node, prefix)


def first_line(node: Definition) -> int:
    """The first line of a definition, or of its first decorator."""
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


def scope_of_lines(tree: ast.AST, count: int) -> dict[int, str]:
    """For each line, the dotted name of the innermost enclosing definition."""
    scopes = dict.fromkeys(range(1, count + 1), "")
    for name, node in named(tree):
        assert node.end_lineno is not None  # set by `ast.parse`
        scopes |= dict.fromkeys(range(first_line(node), node.end_lineno + 1), name)
    return scopes


def find_comments(tokens: list[tokenize.TokenInfo]) -> dict[int, str]:
    """The notes among the comments: line and text, without the `#`."""
    comments: dict[int, str] = {}
    depth = 0
    for token in tokens:
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        # A comment inside brackets would split a statement: it is no note.
        elif token.type == tokenize.COMMENT and depth == 0:
            alone = not token.line[: token.start[1]].strip()
            if alone and not PRAGMA.match(token.string):
                text = token.string.removeprefix("#").removeprefix(" ")
                comments[token.start[0]] = text
    return comments


def is_within(name: str, outer: str) -> bool:
    """Whether a dotted name is that of a definition, or of one inside it.

    >>> is_within("A.f", "A"), is_within("A", "A"), is_within("Ab", "A")
    (True, True, False)
    """
    return f"{name}.".startswith(f"{outer}.")


def find_regions(tokens: list[tokenize.TokenInfo]) -> dict[int, str]:
    """Lines at which a region begins, with its title, or ends, with an empty one."""
    matches = {
        token.start[0]: REGION.match(token.string)
        for token in tokens
        if token.type == tokenize.COMMENT and token.start[1] == 0
    }
    return {line: match["title"] or "" for line, match in matches.items() if match}


def find_docstrings(
    tree: ast.Module, tokens: list[tokenize.TokenInfo], lines: list[str], path: Path
) -> dict[int, tuple[str, int, bool]]:
    """First line of each docstring: its text, its last line, whether the module's."""
    # A docstring on a line with code, or with another string, is treated as code.
    alone = {
        t.start[0]: t
        for t in tokens
        if t.type == tokenize.STRING
        and not lines[t.start[0] - 1][: t.start[1]].strip()
        and not lines[t.end[0] - 1][t.end[1] :].strip()
    }
    docstrings = {}
    for node in [tree, *(node for _, node in named(tree))]:
        if ast.get_docstring(node) is None:
            continue
        token = alone.get(node.body[0].lineno)
        if token is None or token.end[0] != node.body[0].end_lineno:
            continue
        first, last = token.start[0], token.end[0]
        quote = re.search("['\"]", token.string)
        prefix = token.string[: quote.start()] if quote else ""
        if "\\" in token.string and "r" not in prefix.lower():
            reason = 'the docstring has a backslash but is not raw; write r"""'
            raise LiterateError(f"{path}:{first}: {reason}")
        text = inspect.cleandoc(ast.literal_eval(token.string))
        docstrings[first] = (text, last, node is tree)
    return docstrings
