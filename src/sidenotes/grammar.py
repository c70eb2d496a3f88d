"""Find the shape comments of a source, and evaluate their entries.

A comment at the end of a line of code states the shape of the value that the line
assigns or returns, or of the parameter on that line: a *claim*. A comment on a line of
its own states it of the statement below, or of the variables that it names. Jaxtyping
annotations, such as `x: Float[Tensor, "batch d"]`, are claims, too.
"""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

from sidenotes.notations import ANY, OPERATORS, Axes, Shape, entry_of, shapes_of
from sidenotes.rivals import Drawn, Pairs, attributes
from sidenotes.split import named, scope_of_lines

# The types of jaxtyping that take a shape.
ARRAYS = {"Bool", "Complex", "Float", "Inexact", "Int", "Integer", "Num", "Real"}
ARRAYS |= {"Shaped", "UInt", "BFloat16", "Float16", "Float32", "Float64", "Int32"}
ARRAYS |= {"Int64", "UInt8"}
JOIN = {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, eq=False)
class Claim:
    """A shape that a source states, and the value that it describes."""

    line: int  # of the comment
    text: str  # "[q_len, k_len]"
    axes: Axes  # ("q_len", "k_len")
    code: str  # the line that it ends; the comment itself, if on a line of its own
    symbol: str = ""  # dotted name of the function around it
    statement: int = 0  # first line of its statement; 0 for a parameter
    targets: Axes = ()  # the names that the statement assigns, or the parameter
    problem: str = ""  # the reason why it cannot be checked, if any
    column: int = -1  # where its text begins in the line; -1 if it spans several
    at_end: bool = True  # of a line of code
    until: int = 0  # the last line of the code that it describes, if several
    earlier: bool = False  # whether it may describe the value before the statement
    guessed: bool = False  # whether it may describe another value
    used: frozenset[str] = frozenset()  # names in the code that computes its value
    rivals: Pairs = frozenset()  # sizes of the code that it may name by mistake


def claims(source: str) -> list[Claim]:
    r"""All claims of a source, from top to bottom; raises `SyntaxError` like `ast`.

    >>> source = "def f(x):\n    return x @ x.T  # [n, n]; symmetric"
    >>> [(claim.line, claim.targets, claim.axes) for claim in claims(source)]
    [(2, ('return',), ('n', 'n'))]
    """
    tree = ast.parse(source)
    lines = source.split("\n")
    scopes = scope_of_lines(tree, len(lines))
    statements = [*statements_in(tree)]
    found = [*annotations(statements, lines)]
    above: list[tokenize.TokenInfo] = []  # comments on lines of their own
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        number, column = token.start
        if token.type in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        if token.type != tokenize.COMMENT:
            if above:
                claim = Claim(0, "", (), "", scopes[number], number, at_end=False)
                claim = replace(claim, until=end_of_paragraph(number, lines))
                found += claims_above(above, claim, statements)
            above = []
        elif not token.line[:column].strip():
            above.append(token)
        elif shapes := shapes_of(token.string):
            claim = Claim(number, "", (), token.line.strip(), column=column)
            found += claims_beside(claim, shapes, statements)
    found = [replace(c, symbol=c.symbol or scopes[c.line]) for c in found]
    found.sort(key=lambda claim: (claim.line, claim.column))
    return [*with_rivals(found, tree)]


def with_rivals(found: list[Claim], tree: ast.Module) -> Iterator[Claim]:
    """Claims with the sizes that they may name by mistake."""
    nodes = dict(named(tree))
    drawn: dict[str, Drawn] = {}
    own: dict[str, Pairs] = {}
    for claim in found:
        symbol = claim.symbol
        function, around = nodes.get(symbol), symbol.rpartition(".")[0]
        if not isinstance(function, FUNCTIONS):
            yield claim
            continue
        if symbol not in drawn:
            drawn[symbol] = Drawn(function)
            cls = nodes.get(around)
            own[symbol] = attributes(cls) if isinstance(cls, ast.ClassDef) else Pairs()
        lines = range(claim.statement, max(claim.statement, claim.until) + 1)
        used = drawn[symbol].used(lines, claim.targets)
        rivals = drawn[symbol].rivals(used) | own[symbol]
        last = frozenset(name.rpartition(".")[2] for name in used)
        yield replace(claim, used=last, rivals=rivals)


def statements_in(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements, the outer before the inner; no expression contains any."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.stmt):
            yield inner
        if not isinstance(inner, ast.expr):
            yield from statements_in(inner)


def claims_beside(
    claim: Claim, shapes: list[Shape], statements: list[ast.stmt]
) -> Iterator[Claim]:
    """The claims of a comment at the end of a line of code."""
    try:
        statement, targets = subject(claim.line, statements)
    except ValueError as error:
        yield replace(claim, text=shapes[0].text, problem=str(error))
        return
    claim = replace(claim, statement=statement)
    joined = {axes for n in statements if n.lineno == statement for axes in joins(n)}
    shapes = [shape for shape in shapes if shape.axes not in joined]
    named = any(shape.about for shape in shapes)
    known = variables(claim.line, statements) if named else set()
    yield from distribute(claim, shapes, targets, known)


def joins(node: ast.stmt) -> Iterator[Axes]:
    """The tensors that a statement joins: `x, y` in `torch.cat([x, y])`."""
    for inner in ast.walk(node):
        match inner:
            case ast.Call(func, [ast.List(items) | ast.Tuple(items), *_]):
                if ast.unparse(func).split(".")[-1] in JOIN:
                    yield tuple(map(ast.unparse, items))


def end_of_paragraph(number: int, lines: list[str]) -> int:
    """The last line of code before a blank line, or before a comment of its own."""
    while number < len(lines) and lines[number].strip()[:1] not in ("", "#"):
        number += 1
    return number


def claims_above(
    comments: list[tokenize.TokenInfo], claim: Claim, statements: list[ast.stmt]
) -> Iterator[Claim]:
    """The claims of comments on lines of their own, about the code below them.

    Above a function, they describe its parameters.
    """
    node = next((n for n in statements if n.lineno == claim.statement), None)
    found: list[tuple[Claim, list[Shape]]] = []
    line, text = 0, ""
    for comment in comments:
        whole = not text
        line = comment.start[0] if whole else line
        text += comment.string if whole else comment.string.replace("#", " ", 1)
        # A bracket that is open at the end of a line goes on in the next.
        if sum(map(text.count, "([")) <= sum(map(text.count, ")]")):
            column = comment.start[1] if whole else -1
            if node and comment.start[1] == node.col_offset:
                if shapes := shapes_of(text):
                    new_claim = replace(claim, line=line, code=text, column=column)
                    found.append((new_claim, shapes))
            text = ""
    known = variables(claim.statement, statements) if found else set()
    targets = () if getattr(node, "body", None) else tuple(assigned(node))[:1]
    # It may describe what one of several operations computes.
    below = (n for n in statements if claim.statement <= n.lineno <= claim.until)
    guessed = any(map(has_steps, below))
    for new_claim, shapes in found if known else ():
        if isinstance(node, FUNCTIONS):
            new_claim = replace(new_claim, statement=0, until=0)
        new_claim = replace(new_claim, guessed=guessed)
        yield from distribute(new_claim, shapes, targets, known)


def has_steps(node: ast.stmt) -> bool:
    """Whether a statement without others inside it has several operations."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call | ast.MatMult)]
    return not getattr(node, "body", None) and len(calls) > 1


def distribute(
    claim: Claim, shapes: list[Shape], targets: Axes, known: set[str]
) -> Iterator[Claim]:
    """A claim for each shape of a comment: about what it names, or the targets."""
    values = targets
    if len(targets) == 1 < len(shapes):
        # Whether the value is a tuple is known only when the line runs.
        values = tuple(f"{targets[0]}[{n}]" for n in range(len(shapes)))
    for n, shape in enumerate(shapes):
        place = claim.column + shape.start if claim.column >= 0 else -1
        new_claim = replace(
            claim, text=shape.text, axes=shape.axes, column=place, problem=shape.problem
        )
        new_claim = replace(new_claim, earlier=not claim.at_end and not shape.result)
        if shape.setting and not known.issuperset(shape.about):
            continue
        about = shape.about if known.issuperset(shape.about) else shape.about[-1:]
        if about and known.issuperset(about):
            now = tuple(name for name in about if name in targets)
            guessed = shape.guessed or not (now or claim.at_end)
            yield replace(
                new_claim,
                targets=now or about,
                earlier=new_claim.earlier or not now,
                guessed=guessed,
            )
        elif not targets or not (shape.axes or claim.at_end or shape.problem):
            continue  # nothing to describe, or an empty list in code that is disabled
        elif len(shapes) not in (1, len(values)):
            problem = f"{len(shapes)} shapes, but {len(values)} values"
            yield replace(new_claim, problem=problem)
            return
        else:
            # A single shape describes all assigned values; several, one value each.
            mine = values if len(shapes) == 1 else values[n : n + 1]
            guessed = bool(shape.about) and not claim.at_end
            guessed |= shape.guessed or (claim.guessed and not shape.result)
            yield replace(new_claim, targets=mine, guessed=guessed)


def variables(number: int, statements: list[ast.stmt]) -> set[str]:
    """The variables of the functions around a line."""
    found = set()
    for node in statements:
        if isinstance(node, FUNCTIONS) and node.lineno <= number <= last_line(node):
            for inner in ast.walk(node):
                if isinstance(inner, ast.arg):
                    found.add(inner.arg)
                if isinstance(inner, ast.Name | ast.Attribute):
                    if isinstance(inner.ctx, ast.Store):
                        found.add(ast.unparse(inner))
    return found


def last_line(node: ast.stmt) -> int:
    """The last line of a statement."""
    return node.end_lineno or node.lineno


def annotations(statements: list[ast.stmt], lines: list[str]) -> Iterator[Claim]:
    """The claims of jaxtyping annotations: of parameters, variables and results."""
    for node in statements:
        if isinstance(node, ast.AnnAssign):
            targets = tuple(assigned(node))
            yield from annotation(node.annotation, lines, node.lineno, targets)
        elif isinstance(node, FUNCTIONS):
            for arg in ast.walk(node.args):
                if isinstance(arg, ast.arg):
                    yield from annotation(arg.annotation, lines, 0, (arg.arg,))
            for inner in own_returns(node):
                for n, part in enumerate(parts_of(node.returns)):
                    tuple_of = part is not node.returns
                    targets = (f"return[{n}]" if tuple_of else "return",)
                    yield from annotation(part, lines, inner.lineno, targets)


def own_returns(node: ast.AST) -> Iterator[ast.Return]:
    """The `return` statements of a function, without those of functions inside it."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Return):
            yield inner
        elif not isinstance(inner, (*FUNCTIONS, ast.ClassDef, ast.expr)):
            yield from own_returns(inner)


def parts_of(node: ast.expr | None) -> list[ast.expr]:
    """The annotations in `tuple[…, …]`, or the annotation itself."""
    match node:
        case ast.Subscript(value=ast.Name("tuple" | "Tuple"), slice=ast.Tuple(elts)):
            return elts
    return [node] if node else []


def annotation(
    node: ast.expr | None, lines: list[str], statement: int, targets: Axes
) -> Iterator[Claim]:
    """The claim of an annotation such as `Float[Tensor, "*batch n 2*d"]`."""
    match node:
        case ast.Subscript(
            value=kind, slice=ast.Tuple([_, ast.Constant(str(text)) as string])
        ) if ast.unparse(kind).split(".")[-1] in ARRAYS:
            code = lines[string.lineno - 1].strip()
            claim = Claim(string.lineno, text, (), code, "", statement, targets)
            claim = replace(claim, at_end=False)
            # `*batch` stands for any number of axes, and `#d` for `d` or 1.
            special = {"*": "...", "#": ANY}
            axes = [entry_of(special.get(word[0], word)) for word in text.split()]
            known = tuple(entry for entry in axes if entry)
            if len(known) < len(axes) or known.count("...") > 1:
                yield replace(claim, problem=f"`{text}` is not a list of axes")
            else:
                yield replace(claim, axes=known)


def subject(number: int, statements: list[ast.stmt]) -> tuple[int, Axes]:
    """The value that a comment describes: the line of its statement, and names."""
    functions = [node for node in statements if isinstance(node, FUNCTIONS)]
    around = []
    for node in statements:
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else last_line(node)
        if node.lineno <= number <= max(last, node.lineno):
            around.append((node.lineno, node.col_offset, last, node))
    if not around:
        raise ValueError("no statement ends here")
    first, _, last, node = max(around, key=lambda found: found[:2])
    if not any(s.lineno <= first <= last_line(s) for s in functions):
        raise ValueError("only code inside functions is traced")
    if isinstance(node, FUNCTIONS):
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        here = [p.arg for p in parameters if p.lineno == number]
        here = [name for name in here if name not in ("self", "cls")]
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
    names = (node.id for node in nodes if isinstance(node, ast.Name))
    return dict.fromkeys(name for name in names if name != ANY)


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


@cache
def pair(axes: Axes, shape: tuple[int, ...]) -> tuple[tuple[str, int], ...] | None:
    """Each entry with its size, without `...` and `_`; None if their numbers differ.

    >>> pair(("q", "...", "d"), (2, 3, 5, 7))
    (('q', 2), ('d', 7))
    """
    if "..." in axes:
        before = axes.index("...")
        after = len(axes) - 1 - before
        if len(shape) < before + after:
            return None
        shape = shape[:before] + shape[len(shape) - after :]
        axes = axes[:before] + axes[before + 1 :]
    if len(axes) != len(shape):
        return None
    pairs = zip(axes, shape, strict=True)
    return tuple((entry, size) for entry, size in pairs if entry != ANY)


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
        for node in rewrites(tree_of(entry), tuple(words)) if entry != ANY else ():
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
