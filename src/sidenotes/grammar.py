"""Parse shape comments, and evaluate their entries.

`# [q_len, k_len]` at the end of a line of code states the shape of the value that the
line assigns or returns: a *claim*. Comments that do not begin with a bracket are
ignored.
"""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

from sidenotes.split import scope_of_lines

Axes = tuple[str, ...]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)


@dataclass(frozen=True)
class Claim:
    """One bracket of a shape comment, and the value that it describes."""

    line: int  # of the comment
    text: str  # "[q_len, k_len]"
    axes: Axes  # ("q_len", "k_len")
    code: str  # the line that it ends
    symbol: str = ""  # dotted name of the function around it
    statement: int = 0  # first line of its statement; 0 for a parameter
    targets: Axes = ()  # the names that the statement assigns, or the parameter
    problem: str = ""  # the reason why it cannot be checked, if any


def claims(source: str) -> list[Claim]:
    r"""All claims of a source, from top to bottom; raises `SyntaxError` like `ast`.

    >>> source = "def f(x):\n    return x @ x.T  # [n, n]; symmetric"
    >>> [(claim.line, claim.targets, claim.axes) for claim in claims(source)]
    [(2, ('return',), ('n', 'n'))]
    """
    tree = ast.parse(source)
    lines = source.split("\n")
    scopes = scope_of_lines(tree, len(lines))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            code = lines[number - 1]
            text = claimed(token.string) if code[:column].strip() else ""
            if text:
                claim = Claim(number, text, (), code.strip(), scopes[number])
                found += brackets(claim, statements)
    return found


def claimed(comment: str) -> str:
    """The part of a comment that states a shape, or "".

    A pragma may come before or after it, and a remark after a semicolon.

    >>> claimed("# type: ignore  # [batch_size, d]; a view")
    '[batch_size, d]'
    """
    parts = (part.strip() for part in comment.split("#"))
    text = next((part for part in parts if part.startswith("[")), "")
    return text.partition(";")[0].strip()


def brackets(claim: Claim, statements: list[ast.stmt]) -> list[Claim]:
    """A claim for each bracket of a comment, or one with the problem of the comment."""
    try:
        found = parse(claim.text)
        statement, targets = subject(claim.line, statements)
        if len(targets) == 1 < len(found):
            # Whether the value is a tuple is known only when the line runs.
            targets = tuple(f"{targets[0]}[{n}]" for n in range(len(found)))
        if len(found) not in (1, len(targets)):
            raise ValueError(f"{len(found)} brackets, but {len(targets)} values")
    except ValueError as error:
        return [replace(claim, problem=str(error))]
    # A single bracket describes all assigned values; several describe one value each.
    each = [targets] if len(found) == 1 else [(name,) for name in targets]
    claim = replace(claim, statement=statement)
    return [
        replace(claim, text=f"[{', '.join(axes)}]", axes=axes, targets=names)
        for axes, names in zip(found, each, strict=True)
    ]


def parse(text: str) -> list[Axes]:
    """The brackets of a comment; entries are normalized by `ast.unparse`.

    >>> parse("[..., heads*d_k], [3]")
    [('...', 'heads * d_k'), ('3',)]
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError(
            f"`{text}` is not a list of axes in brackets, such as [n, d]"
        ) from None
    found = []
    for bracket in tree.elts if isinstance(tree, ast.Tuple) else [tree]:
        if not isinstance(bracket, ast.List):
            raise ValueError(
                f"`{ast.unparse(bracket)}` is not a list of axes in brackets"
            )
        for entry in bracket.elts:
            dots = isinstance(entry, ast.Constant) and entry.value is ...
            if not dots and not is_size(entry):
                what = "a name, an integer, `...`, or an expression with + - * //"
                raise ValueError(f"`{ast.unparse(entry)}` is not {what}")
        axes = tuple(ast.unparse(entry) for entry in bracket.elts)
        if axes.count("...") > 1:
            raise ValueError("`...` may occur only once in a bracket")
        found.append(axes)
    return found


def is_size(node: ast.expr) -> bool:
    """Whether an expression consists of names, integers and + - * //."""
    if isinstance(node, ast.BinOp):
        known = isinstance(node.op, OPERATORS)
        return known and is_size(node.left) and is_size(node.right)
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Constant) and type(node.value) is int
    )


def subject(number: int, statements: list[ast.stmt]) -> tuple[int, Axes]:
    """The value that a comment describes: the line of its statement, and names."""
    functions = [node for node in statements if isinstance(node, FUNCTIONS)]
    around = []
    for node in statements:
        body = getattr(node, "body", None)
        last = (body[0].lineno - 1 if body else node.end_lineno) or 0
        if node.lineno <= number <= max(last, node.lineno):
            around.append((node.lineno, node.col_offset, last, node))
    if not around:
        raise ValueError("no statement ends here")
    first, _, last, node = max(around, key=lambda found: found[:2])
    if not any(s.lineno <= first <= (s.end_lineno or 0) for s in functions):
        raise ValueError("only code inside functions is traced")
    if isinstance(node, FUNCTIONS):
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        here = [p.arg for p in parameters if p.lineno == number]
        if len(here) != 1:
            raise ValueError(
                "put it beside a parameter on its own line, or beside the `return`"
            )
        return 0, (here[0],)
    if number not in (first, last):
        raise ValueError("put it on the first or last line of the statement")
    targets = tuple(assigned(node))
    if not targets:
        raise ValueError("the line neither assigns nor returns a value")
    return first, targets


def assigned(node: ast.AST | None) -> Iterator[str]:
    """The names that a statement, or a target, assigns."""
    match node:
        case ast.Assign():
            for target in node.targets:
                yield from assigned(target)
        case ast.AnnAssign(value=None):
            return
        case ast.AugAssign() | ast.AnnAssign() | ast.For() | ast.AsyncFor():
            yield from assigned(node.target)
        case ast.With() | ast.AsyncWith():
            for item in node.items:
                yield from assigned(item.optional_vars)
        case ast.Tuple() | ast.List():
            for target in node.elts:
                yield from assigned(target)
        case ast.Starred():
            yield from assigned(node.value)
        case ast.Return(value=ast.Tuple(elts=items)):
            yield from (f"return[{n}]" for n in range(len(items)))
        case ast.Return():
            yield "return"
        case ast.Expr(value=ast.Yield()):
            yield "yield"
        case ast.Subscript():
            yield ast.unparse(node.value)
        case ast.Name() | ast.Attribute():
            yield ast.unparse(node)


@cache
def tree_of(entry: str) -> ast.expr:
    """The syntax tree of an entry; cached and shared, so do not modify it."""
    return ast.parse(entry, mode="eval").body


@cache
def words_of(axes: Axes) -> dict[str, None]:
    """The names in some entries, each once and in order."""
    nodes = (node for entry in axes for node in ast.walk(tree_of(entry)))
    return dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name))


def linear(node: ast.expr, sizes: dict[str, int]) -> tuple[int, int] | None:
    """`(a, b)` if an expression is `a * x + b`, where x is the one name not in `sizes`.

    >>> linear(tree_of("2 * (x + heads)"), {"heads": 5})
    (2, 10)
    """
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return 0, node.value
    if isinstance(node, ast.Name):
        return (0, sizes[node.id]) if node.id in sizes else (1, 0)
    assert isinstance(node, ast.BinOp)
    left, right = linear(node.left, sizes), linear(node.right, sizes)
    if left is None or right is None:
        return None
    (a, b), (c, d) = left, right
    match node.op:
        case ast.Add():
            return a + c, b + d
        case ast.Sub():
            return a - c, b - d
        case ast.Mult():
            return None if a and c else (a * d + b * c, b * d)
    return None if a or c or not d else (0, b // d)


def pair(axes: Axes, shape: tuple[int, ...]) -> list[tuple[str, int]] | None:
    """Each entry with its size, without `...`; None if their numbers differ.

    >>> pair(("q", "...", "d"), (2, 3, 5, 7))
    [('q', 2), ('d', 7)]
    """
    if "..." in axes:
        before = axes.index("...")
        after = len(axes) - 1 - before
        if len(shape) < before + after:
            return None
        shape = shape[:before] + shape[len(shape) - after :]
        axes = axes[:before] + axes[before + 1 :]
    return list(zip(axes, shape, strict=True)) if len(axes) == len(shape) else None


def fits(axes: Axes, shape: tuple[int, ...], sizes: dict[str, int]) -> bool:
    """Whether a bracket fits a shape; all of its names must be known."""
    pairs = pair(axes, shape)
    if pairs is None:
        return False
    return all(value_of(entry, sizes) == size for entry, size in pairs)


def value_of(entry: str, sizes: dict[str, int]) -> int | None:
    """The value of an entry whose names are known; None for `...` and for `n // 0`."""
    line = None if entry == "..." else linear(tree_of(entry), sizes)
    return line and line[1]


def alternatives(axes: Axes, words: Iterable[str]) -> Iterator[tuple[str, str, Axes]]:
    """Mutations of a bracket: the old entry, the new entry, and the new bracket.

    >>> [other for *_, other in alternatives(("q", "k"), ["k", "q"])]
    [('k', 'q'), ('k', 'k'), ('q', 'q')]
    """
    for (i, one), (j, two) in combinations(enumerate(axes), 2):
        if one != two:
            swapped = list(axes)
            swapped[i], swapped[j] = two, one
            yield one, two, tuple(swapped)
    for i, entry in enumerate(axes):
        for node in rewrites(tree_of(entry), tuple(words)):
            other = ast.unparse(node)
            yield entry, other, (*axes[:i], other, *axes[i + 1 :])


def rewrites(node: ast.expr, words: Axes) -> Iterator[ast.expr]:
    """Expressions in which one name, number or operator is replaced or removed."""
    if isinstance(node, ast.BinOp):
        left, right = node.left, node.right
        yield from (left, right)
        for kind in OPERATORS:
            if not isinstance(node.op, kind):
                yield ast.BinOp(left, kind(), right)
        yield from (ast.BinOp(other, node.op, right) for other in rewrites(left, words))
        yield from (ast.BinOp(left, node.op, other) for other in rewrites(right, words))
    elif ast.unparse(node) != "...":
        yield from (ast.Name(word) for word in words if word != ast.unparse(node))
